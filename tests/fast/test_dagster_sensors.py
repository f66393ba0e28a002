"""The stale-claim sensor on a coordination log in memory: what it asks for, what it leaves alone, what it says."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.delivery import ClaimedBatch, Delivery
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.jobs import build_reprocess_job
from marshal_dagster.ops import SeenKey, build_claimed_batch_op
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode
from marshal_dagster.resources import ClaimerResource, KafkaConnectionConfig, RationalizerResource
from marshal_dagster.runs import Announced, announcement_table
from marshal_dagster.sensors import Grouping, StaleClaimCursor, build_dead_run_sensors, build_stale_claim_sensor
from marshal_dagster.testing import ManualClock
from tests.delivering import GROUP, HI_MS, TOPIC, Scene

OP = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
JOB = build_reprocess_job(OP, name="redo")
OVER = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
UNDER_WAY = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Watch:
    """A scene with a sensor that looks at it."""

    scene: Scene
    instance: dg.DagsterInstance
    mode: DeliveryMode = DeliveryMode.AT_LEAST_ONCE
    cursor: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def tick(self) -> dg.SensorResult:
        """Evaluate the sensor once, with the cursor of the last time."""
        rationalizer = Rationalizer(self.scene.log(), clock=self.scene.clock)

        class InMemory(RationalizerResource):
            def rationalizer(self) -> Rationalizer:
                return rationalizer

        sensor = build_stale_claim_sensor(JOB, **{"group": GROUP, **self.settings})
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources={"rationalizer": InMemory(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"))},
        )
        result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result

    def skipped(self) -> str:
        """Evaluate the sensor once and give why it asked for nothing."""
        result = self.tick()
        assert not result.run_requests
        assert result.skip_reason is not None
        assert result.skip_reason.skip_message is not None
        return result.skip_reason.skip_message

    def requests(self) -> Sequence[dg.RunRequest]:
        """Evaluate the sensor once and give what it asked for."""
        return self.tick().run_requests or ()

    def die(self, run_id: str = "a-dead-run", *, before_plan: bool = False, **limits: Any) -> Delivery:  # noqa: ANN401
        """Let a member claim, plan and fall silent for longer than 2 heartbeat intervals."""
        delivery = self.scene.delivery(self.mode)
        delivery.run_id = run_id
        batch = self.scene.batch(delivery, **limits)
        batch.__enter__()
        if self.mode is DeliveryMode.AT_MOST_ONCE and not before_plan:
            batch.begin_processing()
        self.silence(batch)
        self.scene.wait_until_stale()
        return delivery

    def silence(self, batch: ClaimedBatch) -> None:
        """End the heartbeats of a batch and nothing else."""
        batch._stack.close()

    def was_asked(self, request: dg.RunRequest, status: dg.DagsterRunStatus, outcome: str | None = None) -> None:
        """Let the run that was asked for be in `status`."""
        outcome_tag = {"marshal/outcome": outcome} if outcome else {}
        self.instance.create_run_for_job(
            JOB, run_config=request.run_config, tags={**request.tags, **outcome_tag}, status=status
        )


@pytest.fixture
def watch() -> Iterator[Watch]:
    """A topic of three partitions with ten messages each, its log's clock at the present."""
    scene = Scene(clock=ManualClock(_now_ms() - 60_000))
    scene.data.make(messages=10)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Watch(scene, instance)


def _config(request: dg.RunRequest) -> dict[str, Any]:
    config: dict[str, Any] = request.run_config["ops"]["work"]["config"]
    return config


# What is asked for


def test_nothing_is_asked_for_while_nobody_is_stale(watch: Watch) -> None:
    """An empty log, a drained group and a live owner with an open plan give no run."""
    assert watch.skipped() == "nothing to redo"
    watch.scene.clock.advance(60_000)
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.scene.batch(watch.scene.delivery()).__enter__()
    assert watch.scene.key().plan_end == 10
    assert watch.skipped() == "nothing to redo"


def test_a_stale_owner_is_asked_for_in_one_run(watch: Watch) -> None:
    """All partitions of a topic whose owner went stale are asked for together, with what was seen of each."""
    watch.die(max_records=12)
    (request,) = watch.requests()
    assert request.job_name == "redo"
    assert request.tags == {"marshal/group": GROUP, "marshal/topic": TOPIC, "marshal/reason": "stale claim"}
    config = _config(request)
    assert (config["partitions"], config["max_batches"]) == ([0, 1, 2], 1)
    assert [SeenKey(**seen) for seen in config["seen"]] == [
        SeenKey(
            partition=n,
            generation=0,
            offset=0,
            plan_end=4,
            plan_attempts=0,
            epoch=watch.scene.key(n).owner.epoch,  # type: ignore[union-attr]
            instance=watch.scene.key(n).owner.instance,  # type: ignore[union-attr]
        )
        for n in range(3)
    ]


def test_stale_means_silent_for_more_than_two_intervals(watch: Watch) -> None:
    """At exactly 2 heartbeat intervals of silence an owner is live, one millisecond later it is stale, by any clock."""
    watch.scene.clock = ManualClock(_now_ms() + 3_600_000)
    watch.scene.broker.now_ms = watch.scene.clock.wall_ms
    watch.die()
    watch.scene.clock.advance(-1)
    watch.scene.pause(-60)
    assert watch.skipped() == "nothing to redo"
    watch.scene.clock.advance(1)
    watch.scene.pause(-60)
    assert len(watch.requests()) == 1


def test_an_open_plan_that_nobody_holds_is_asked_for(watch: Watch) -> None:
    """A run that failed released its claim and left its plan: it is redone at once, without waiting."""
    watch.scene.clock.advance(60_000)
    with pytest.raises(ZeroDivisionError), watch.scene.batch(watch.scene.delivery(), partitions=(1,)):
        _ = 1 / 0
    (request,) = watch.requests()
    assert _config(request)["partitions"] == [1]
    assert "epoch" not in _config(request)["seen"][0]


def test_a_stale_claim_without_a_plan_is_asked_for(watch: Watch) -> None:
    """A member that died between its claim and its plan is found too."""
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.scene.about(ClaimingPartition, "dead.1", partition=1)
    watch.scene.wait_until_stale()
    (request,) = watch.requests()
    (seen,) = _config(request)["seen"]
    assert (seen["partition"], seen["offset"], seen["instance"]) == (1, 2, "dead.1")
    assert "plan_end" not in seen


def test_partitions_can_be_asked_for_one_by_one(watch: Watch) -> None:
    """Grouped by partition each gets a run of its own, at most so many a tick; the others are asked for later."""
    watch.settings = {"grouping": Grouping.PARTITION, "max_runs_per_tick": 2}
    watch.die()
    first = watch.requests()
    assert [_config(request)["partitions"] for request in first] == [[0], [1]]
    for request in first:
        watch.was_asked(request, dg.DagsterRunStatus.STARTED)
    assert [_config(request)["partitions"] for request in watch.requests()] == [[2]]


# Run keys


def test_the_run_key_names_partition_generation_offset_and_attempt(watch: Watch) -> None:
    """Group, topic, partition, generation, offset and attempt number make the key; asked again it is the same."""
    watch.settings = {"grouping": "partition"}
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.die(partitions=(2,))
    (request,) = watch.requests()
    assert request.run_key == f"{GROUP}/{TOPIC}/2.0.2.0"
    assert [again.run_key for again in watch.requests()] == [request.run_key]


@pytest.mark.parametrize("status", UNDER_WAY)
def test_a_run_that_is_under_way_is_not_asked_for_again(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """While a run that was asked for is queued or at work its partitions are left to it."""
    watch.die()
    (request,) = watch.requests()
    watch.was_asked(request, status)
    assert "was asked for and is not over" in watch.skipped()


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED])
def test_after_a_failure_it_is_asked_for_again_under_another_key(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """A run that ended without success, even before it claimed anything, is followed by another."""
    watch.die()
    keys = set()
    for _ in range(3):
        (request,) = watch.requests()
        keys.add(request.run_key)
        watch.was_asked(request, status)
    assert len(keys) == 3


def test_an_attempt_by_anybody_makes_another_key(watch: Watch) -> None:
    """When a scheduled run took the plan and died too, the plan is asked for under another key."""
    watch.die()
    (first,) = watch.requests()
    watch.die("another-dead-run")
    (second,) = watch.requests()
    assert first.run_key != second.run_key
    assert {seen["plan_attempts"] for seen in _config(second)["seen"]} == {1}


def test_a_claim_with_nothing_behind_it_is_asked_for_once(watch: Watch) -> None:
    """A run that found nothing to redo settles it, though the dead owner still stands in the log."""
    watch.die()
    (request,) = watch.requests()
    watch.was_asked(request, dg.DagsterRunStatus.SUCCESS, "drained")
    assert watch.skipped() == "nothing to redo"


@pytest.mark.parametrize("outcome", ["paused", "held", "done"])
def test_a_run_that_did_not_take_it_is_followed_by_another(watch: Watch, outcome: str) -> None:
    """A run that found the group paused, the partition held, or others enough is followed by another, boundedly."""
    watch.settings = {"max_attempts": 3}
    watch.die()
    for _ in range(3):
        (request,) = watch.requests()
        watch.was_asked(request, dg.DagsterRunStatus.SUCCESS, outcome)
    assert "left alone after 3 runs" in watch.skipped()


def test_a_success_elsewhere_does_not_hide_a_new_death(watch: Watch) -> None:
    """After the offset moved, a claim that goes stale at the new offset is asked for."""
    watch.die(max_records=6)
    (request,) = watch.requests()
    watch.was_asked(request, dg.DagsterRunStatus.SUCCESS, "done")
    watch.scene.work(watch.scene.delivery())
    assert watch.skipped() == "nothing to redo"
    watch.die()
    assert len(watch.requests()) == 1


# What is left alone


def test_a_plan_that_was_tried_too_often_is_left_alone_and_named(watch: Watch) -> None:
    """Nothing is asked for it; the tick says which range and what a person can do."""
    watch.settings = {"max_attempts": 2}
    for number in range(3):
        watch.die(f"dead-{number}", partitions=(0,))
    told = watch.skipped()
    assert f"{TOPIC}/0: plan [0, 10)" in told
    assert "left alone after 2 attempts" in told
    assert "one_more_attempt" in told


def test_runs_that_fail_before_they_claim_are_bounded_too(watch: Watch) -> None:
    """A run that cannot even start (no Java, say) is not asked for without end."""
    watch.settings = {"max_attempts": 2}
    watch.die()
    for _ in range(2):
        (request,) = watch.requests()
        watch.was_asked(request, dg.DagsterRunStatus.FAILURE)
    assert "left alone after 2 runs that failed" in watch.skipped()


def test_a_paused_group_is_skipped_with_the_time_left(watch: Watch) -> None:
    """While the group is paused nothing is asked for; the tick says by whom and for how long."""
    watch.die()
    watch.scene.pause((_now_ms() - watch.scene.clock.wall_ms()) // 1_000 + 100, "ops.7")
    told = watch.skipped()
    assert told.startswith(f"group '{GROUP}' is paused by 'ops.7', for ")
    assert 90 <= int(told.split("for ")[1].split(" s")[0]) <= 101


def test_a_log_that_can_only_be_observed_is_not_acted_upon(watch: Watch) -> None:
    """When retention has cut the log nobody can claim, so nothing is asked for."""
    watch.die()
    for partition in range(4):
        watch.scene.broker.retain_from(partition, 1)
    assert "only observed" in watch.skipped()


def test_another_groups_claims_are_not_this_sensors(watch: Watch) -> None:
    """A sensor looks at its own group alone."""
    watch.die()
    watch.settings = {"group": "other"}
    assert watch.skipped() == "nothing to redo"


# At most once


def _announce(watch: Watch, run_id: str, epochs: dict[int, int | None], end: int) -> None:
    """Let the run have announced partitions 0 to 2 from offset 0 on."""
    instance = watch.instance
    rows = [Announced(GROUP, TOPIC, n, epoch, 0, end) for n, epoch in epochs.items() if epoch is not None]

    @dg.op
    def announce(context: dg.OpExecutionContext) -> None:
        context.log_event(dg.AssetObservation("x", metadata={"announced": announcement_table(rows)}))

    @dg.job
    def dead() -> None:
        announce()

    dead.execute_in_process(instance=instance, run_id=run_id)


def test_what_a_dead_at_most_once_run_dropped_is_reported_once(watch: Watch) -> None:
    """The ranges that it announced and committed are told and observed, once, and nothing is asked for."""
    run_id = "3b8f4f0e-6c57-4d55-9a4e-7d3c1c6a1f00"
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die(run_id)
    epochs = {n: owner.epoch for n in range(3) if (owner := watch.scene.key(n).owner) is not None}
    _announce(watch, run_id, epochs, end=10)
    result = watch.tick()
    assert not result.run_requests
    assert result.skip_reason is not None
    assert f"{TOPIC}/1: possibly dropped [0, 10): run {run_id} died" in str(result.skip_reason.skip_message)
    assert [event.metadata["possibly_dropped_offsets"].value for event in result.asset_events] == [10, 10, 10]
    again = watch.tick()
    assert (again.asset_events, again.skip_reason) == ([], dg.SkipReason("nothing to redo"))


def test_a_dead_at_most_once_run_of_elsewhere_is_told(watch: Watch) -> None:
    """When this Dagster does not know the run it says that it cannot tell what was dropped."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die("of-elsewhere")
    assert "run of-elsewhere is not known here" in watch.skipped()


def test_an_at_most_once_run_that_died_before_its_commit_dropped_nothing(watch: Watch) -> None:
    """A stale claim of a known run that announced nothing is told as such."""
    run_id = "3b8f4f0e-6c57-4d55-9a4e-7d3c1c6a1f01"
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die(run_id, before_plan=True)
    _announce(watch, run_id, {}, end=0)
    assert "nothing was dropped, it died before it committed" in watch.skipped()


def test_an_uncommitted_at_most_once_plan_may_be_run(watch: Watch) -> None:
    """A plan that was opened and not committed was never processed: it is asked for."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    delivery = watch.scene.delivery(watch.mode)

    def die_before_the_commit(*_: object) -> None:
        raise ZeroDivisionError

    delivery.announce = die_before_the_commit
    batch = watch.scene.batch(delivery)
    batch.__enter__()
    with pytest.raises(ZeroDivisionError):
        batch.begin_processing()
    watch.silence(batch)
    watch.scene.wait_until_stale()
    (request,) = watch.requests()
    assert [seen["plan_end"] for seen in _config(request)["seen"]] == [10, 10, 10]


# Cursor


@pytest.mark.parametrize("text", [None, "", "12", "not json", '{"version": 2}', '{"reported": [1]}', '{"position": 7}'])
def test_a_cursor_of_another_shape_is_begun_anew(watch: Watch, text: str | None) -> None:
    """No cursor, an old one and a damaged one do not stop the sensor, and what it writes it can read."""
    watch.cursor = text
    watch.die()
    assert len(watch.requests()) == 1
    assert watch.cursor is not None
    assert StaleClaimCursor.read(watch.cursor) == StaleClaimCursor()


def test_the_cursor_stays_small(watch: Watch) -> None:
    """However many dead owners were reported, the newest thousand are remembered."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.scene.data.make(partitions=1_100, messages=1)
    watch.die("of-elsewhere")
    assert watch.skipped().endswith("; and 1090 more in the log of this tick")
    assert watch.cursor is not None
    assert len(StaleClaimCursor.read(watch.cursor).reported) == 1_000
    assert len(watch.cursor) < 50_000


# Trouble


def test_a_broker_that_is_down_fails_the_tick_in_one_line(watch: Watch) -> None:
    """Without a broker the tick fails within the time-out, with one line that says so and what to do."""
    sensor = build_stale_claim_sensor(JOB, group=GROUP)
    connection = KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9", timeout_s=0.5)
    context = dg.build_sensor_context(
        instance=watch.instance, resources={"rationalizer": RationalizerResource(connection=connection)}
    )
    began_s = time.monotonic()
    with pytest.raises(UnavailableError, match=r"Kafka at 127\.0\.0\.1:9 cannot be reached") as failed:
        sensor(context)
    assert time.monotonic() - began_s < 10
    assert "\n" not in str(failed.value)


def test_a_tick_brings_no_spark() -> None:
    """Evaluating the sensor imports no pyspark and no pandas, and starts no process."""
    code = """
import sys
from tests.fast.test_dagster_sensors import Scene, Watch, ManualClock, dg, _now_ms
scene = Scene(clock=ManualClock(_now_ms() - 60_000))
scene.data.make(messages=10)
with dg.DagsterInstance.ephemeral() as instance:
    watch = Watch(scene, instance)
    watch.die()
    print(len(watch.requests()))
import psutil
print(len(psutil.Process().children(recursive=True)), *({"pyspark", "py4j", "pandas"} & sys.modules.keys()))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "0"]


def test_many_partitions_are_asked_for_in_one_run_with_a_short_key(watch: Watch) -> None:
    """Of 500 partitions the 100 that are stale make one request, whose key is short however many they are."""
    watch.scene.data.make(partitions=500, messages=1)
    watch.scene.drain(watch.scene.delivery())
    for partition in range(100):
        watch.scene.data.append(partition, 1)
    watch.die()
    (request,) = watch.requests()
    assert _config(request)["partitions"] == list(range(100))
    assert len(request.run_key or "") < 100


# Building


@dg.op
def _other() -> None: ...


@dg.job
def _other_job() -> None:
    _other()


@pytest.mark.parametrize(
    ("jobs", "settings", "told"),
    [
        (JOB, {"group": "a/b"}, "group 'a/b' cannot be a name"),
        (JOB, {"group": GROUP, "max_runs_per_tick": 0}, "max_runs_per_tick is 0; it must be at least 1"),
        (JOB, {"group": GROUP, "max_attempts": -1}, "max_attempts is -1; it must be at least 1"),
        (JOB, {"group": GROUP, "grouping": "run"}, "grouping is 'run'; it must be one of topic, partition"),
        (_other_job, {"group": GROUP}, "job '_other_job' has no claimed-batch op"),
        ([JOB, build_reprocess_job(OP, name="redo2")], {"group": GROUP}, "'redo' and 'redo2' both work on topic"),
    ],
)
def test_settings_that_make_no_sensor_are_refused(jobs: Any, settings: dict[str, Any], told: str) -> None:  # noqa: ANN401
    """A wrong setting is an error when the sensor is built, naming it and what would be right."""
    with pytest.raises(ConfigurationError, match=told):
        build_stale_claim_sensor(jobs, **settings)


def test_dead_run_sensors_watch_failures_and_cancellations() -> None:
    """There is one sensor for each way in which Dagster says that a run is over without success."""
    failed, canceled = build_dead_run_sensors(group="etl", monitored_jobs=[JOB])
    assert [failed.name, canceled.name] == ["etl_failed_runs", "etl_canceled_runs"]
    with pytest.raises(ConfigurationError, match="group 'a/b' cannot be a name"):
        build_dead_run_sensors(group="a/b")


def test_a_dead_run_sensor_refuses_another_groups_claimer(watch: Watch) -> None:
    """A claimer of another group would revoke nothing, so it is an error that says so."""
    sensor, _ = build_dead_run_sensors(group=GROUP)
    other = ClaimerResource(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9"), group="other")
    run = watch.instance.create_run_for_job(JOB, status=dg.DagsterRunStatus.FAILURE)
    event = dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, JOB.name)
    with (
        dg.build_run_status_sensor_context(
            sensor.name, event, watch.instance, run, resources={"claimer": other}
        ) as context,
        pytest.raises(ConfigurationError, match=f"must be a ClaimerResource of group '{GROUP}'"),
    ):
        sensor(context)


def test_a_groups_name_becomes_one_that_dagster_allows() -> None:
    """The sensor's default name is the group's, with underscores for what Dagster refuses."""
    assert build_stale_claim_sensor(JOB, group="etl.günter 1").name == "etl_g_nter_1_stale_claims"


def test_the_interval_is_that_of_the_group(watch: Watch) -> None:
    """Staleness is judged by the heartbeat interval that the group agreed on, not by a setting of the sensor."""
    watch.die()
    assert watch.scene.key().last_beat_ms + 2 * HI_MS < watch.scene.clock.wall_ms()
    assert len(watch.requests()) == 1
