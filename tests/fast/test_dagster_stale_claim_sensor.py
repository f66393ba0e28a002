"""Check the stale-claim sensor and the run-failure sensors with a coordination log in memory.

The tests cover the runs that a sensor requests, the claims that it leaves alone, and its reports.
"""

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.events import AssetObservationData, StepMaterializationData
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster_shared.serdes import deserialize_value, serialize_value

from marshal_dagster.assets.decorator import DagsterMarshalTranslator
from marshal_dagster.assets.topics import build_topic_sensor
from marshal_dagster.batches import BatchSession, ClaimedBatch, record_reader
from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.log import Ack, Append
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, IncompleteLogError, UnavailableError
from marshal_dagster.jobs.batch import build_reprocess_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode, GroupSettings, RuleSet, render
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.announcements import AnnouncedRange, announced_ranges, announcement_table
from marshal_dagster.runs.names import announcements_key, topic_asset_key
from marshal_dagster.sensors._exhausted_plans import (
    ExhaustedPlans,
    build_exhausted_plans_check,
    digest,
    exhausted_plans_check_key,
)
from marshal_dagster.sensors._run_history import retry_backoff_s
from marshal_dagster.sensors.lag import build_lag_sensor
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import Grouping, StaleClaimCursor, build_stale_claim_sensor
from marshal_dagster.spark import job_control as spark_jobs
from marshal_dagster.spark import reader
from marshal_dagster.testing import ManualClock, MemoryLog
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Scene
from tests.fast.test_dagster_ops import Stand
from tests.members import SETTINGS, settings_record

OP = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
JOB = build_reprocess_job(OP, name="redo")
UNDER_WAY = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Watch:
    """A scene with a stale-claim sensor on it."""

    scene: Scene
    instance: dg.DagsterInstance
    mode: DeliveryMode = DeliveryMode.AT_LEAST_ONCE
    cursor: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def tick(self) -> dg.SensorResult:
        """Evaluate the sensor once, with the cursor of the last evaluation."""
        rationalizer = Rationalizer(self.scene.log(), clock=self.scene.clock)

        class InMemory(RationalizerResource):
            def rationalizer(self) -> Rationalizer:
                return rationalizer

        sensor = build_stale_claim_sensor(JOB, **{"group": GROUP, "retry_wait_s": 0, **self.settings})
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
        """Evaluate the sensor once and return why it requests no run."""
        result = self.tick()
        assert not result.run_requests
        assert result.skip_reason is not None
        assert result.skip_reason.skip_message is not None
        return result.skip_reason.skip_message

    def requests(self) -> Sequence[dg.RunRequest]:
        """Evaluate the sensor once and return the runs that it requests."""
        return self.tick().run_requests or ()

    def die(self, run_id: str = "a-dead-run", *, before_plan: bool = False, **limits: Any) -> BatchSession:  # noqa: ANN401
        """Let a member claim, plan, and then be silent for longer than 2 heartbeat intervals."""
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
        """Stop the heartbeats of a batch; do nothing else."""
        batch._guard.stack.close()

    def was_requested(
        self, request: dg.RunRequest, status: dg.DagsterRunStatus, outcome: str | None = None, *, ago_s: int = 0
    ) -> str:
        """Store the requested run with the status `status`, as requested `ago_s` seconds ago, and return its id."""
        tags = {**request.tags, "marshal/asked_at": str(int(time.time()) - ago_s)}
        if outcome:
            tags["marshal/outcome"] = outcome
        run = self.instance.create_run_for_job(JOB, run_config=request.run_config, tags=tags, status=status)
        return run.run_id


class RefusingLog(MemoryLog):
    """A log that does not acknowledge the next `refused` appends; it writes them if `written` is true."""

    refused = 0
    written = False
    appended = 0

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append, unless the append is to be refused."""
        RefusingLog.appended += 1
        if RefusingLog.refused == 0:
            return super().append(records)
        RefusingLog.refused -= 1
        if self.written:
            super().append(records)
        return [Ack(None, "Local: Message timed out") for _ in records]


@dataclass(slots=True)
class DeadRunWatch:
    """The sensor for failed runs, with a claimer on the log of a scene."""

    watch: Watch
    timeout_s: float = 5

    def react(self, mode: DeliveryMode = DeliveryMode.AT_LEAST_ONCE) -> dg.SensorResult | dg.SkipReason:
        """Let the sensor process the failure of the run `RUN`."""
        instance = self.watch.instance
        run = cast("dg.DagsterRun", instance.get_run_by_id(RUN))
        sensor, _ = build_run_failure_sensors(group=GROUP)
        claimer = self.claimer(mode)
        event = dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, JOB.name)
        with dg.build_run_status_sensor_context(
            sensor.name, event, instance, run, resources={"claimer": claimer}
        ) as context:
            return cast("dg.SensorResult | dg.SkipReason", sensor(context))

    def claimer(self, mode: DeliveryMode = DeliveryMode.AT_LEAST_ONCE) -> ClaimerResource:
        """Return a claimer of the group."""
        connection = KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9", timeout_s=self.timeout_s)
        return ClaimerResource(connection=connection, group=GROUP, delivery=mode.value)

    def evaluate(self, sensor: dg.SensorDefinition, cursor: str | None = None) -> SensorExecutionData:
        """Evaluate a sensor as Dagster does, with its cursor."""
        instance, resources = self.watch.instance, {"claimer": self.claimer()}
        with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
            return sensor.evaluate_tick(context)

    def report(self) -> str:
        """Let the sensor process the failure and return its report."""
        result = self.react()
        reason = result if isinstance(result, dg.SkipReason) else result.skip_reason
        return str(reason and reason.skip_message)


@pytest.fixture
def dead_runs(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> DeadRunWatch:
    """Return a sensor for failed runs that uses the scene's log instead of Kafka's."""
    shared = Rationalizer(watch.scene.log(), clock=watch.scene.clock)
    monkeypatch.setattr("marshal_dagster.coordination.rationalizer_cache.shared_rationalizer", lambda *_: shared)
    monkeypatch.setattr("marshal_dagster.coordination.kafka_log.KafkaLog", lambda *_: RefusingLog(watch.scene.broker))
    monkeypatch.setattr("marshal_dagster.resources.claimer._PAUSE_S", 0.01)
    for name, value in (("refused", 0), ("written", False), ("appended", 0)):
        monkeypatch.setattr(RefusingLog, name, value)
    return DeadRunWatch(watch)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Yield a topic of three partitions with ten messages each; the log's clock is a minute late."""
    scene = Scene(clock=ManualClock(_now_ms() - 60_000))
    scene.data.make(messages=10)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Watch(scene, instance)


def _config(request: dg.RunRequest) -> dict[str, Any]:
    config: dict[str, Any] = request.run_config["ops"]["work"]["config"]
    return config


# Requests for runs


def test_nothing_is_requested_while_nobody_is_stale(watch: Watch) -> None:
    """An empty log, a drained group and a live owner with an open plan cause no request."""
    assert watch.skipped() == "nothing to redo"
    watch.scene.clock.advance(60_000)
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.scene.batch(watch.scene.delivery()).__enter__()
    assert watch.scene.key().plan_end == 10
    assert watch.skipped() == "nothing to redo"


def test_a_stale_owner_is_requested_in_one_run(watch: Watch) -> None:
    """One request covers all stale partitions of a topic, with the state that the sensor saw of each."""
    watch.die(max_records=12)
    (request,) = watch.requests()
    assert request.job_name == "redo"
    named = {name: request.tags[name] for name in ("marshal/group", "marshal/topic", "marshal/reason")}
    assert named == {"marshal/group": GROUP, "marshal/topic": TOPIC, "marshal/reason": "stale claim"}
    command = f"marshal-dagster timeline --group {GROUP} --topic {TOPIC} --since "
    assert request.tags["marshal/timeline"].startswith(command)
    since = datetime.fromisoformat(request.tags["marshal/timeline"].removeprefix(command))
    assert 600 < time.time() - since.timestamp() < 1_200
    config = _config(request)
    assert (config["partitions"], config["max_batches"]) == ("0-2", 1)
    assert [ExpectedKeyState(**seen) for seen in config["seen"]] == [
        ExpectedKeyState(
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
    """After exactly 2 heartbeat intervals an owner is live, a millisecond later it is stale.

    The interval is measured by the log's times: the sensor's clock does not matter.
    """
    watch.scene.clock = ManualClock(_now_ms() + 3_600_000)
    watch.scene.broker.now_ms = watch.scene.clock.wall_ms
    watch.die()
    watch.scene.clock.advance(-1)
    watch.scene.pause(-60)
    assert watch.skipped() == "nothing to redo"
    watch.scene.clock.advance(1)
    watch.scene.pause(-60)
    assert len(watch.requests()) == 1


def test_an_open_plan_that_nobody_holds_is_requested(watch: Watch) -> None:
    """A failed run released its claim and left its plan, which is repeated at once."""
    watch.scene.clock.advance(60_000)
    with pytest.raises(ZeroDivisionError), watch.scene.batch(watch.scene.delivery(), partitions=(1,)):
        _ = 1 / 0
    (request,) = watch.requests()
    assert _config(request)["partitions"] == "1"
    assert "epoch" not in _config(request)["seen"][0]


def test_a_stale_claim_without_a_plan_is_requested(watch: Watch) -> None:
    """The claim of a member that died before it planned is found too."""
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.scene.about(ClaimingPartition, "dead.1", partition=1)
    watch.scene.wait_until_stale()
    (request,) = watch.requests()
    (seen,) = _config(request)["seen"]
    assert (seen["partition"], seen["offset"], seen["instance"]) == (1, 2, "dead.1")
    assert "plan_end" not in seen


def test_partitions_can_be_requested_one_by_one(watch: Watch) -> None:
    """Grouped by partition, each partition gets its own run. A tick has a limit; the next tick requests the rest."""
    watch.settings = {"grouping": Grouping.PARTITION, "max_runs_per_tick": 2}
    watch.die()
    first = watch.requests()
    assert [_config(request)["partitions"] for request in first] == ["0", "1"]
    for request in first:
        watch.was_requested(request, dg.DagsterRunStatus.STARTED)
    assert [_config(request)["partitions"] for request in watch.requests()] == ["2"]


# Run keys


def test_the_run_key_names_partition_generation_offset_and_attempt(watch: Watch) -> None:
    """Group, topic, partition, generation, offset and attempt make up the run key, which the next tick repeats."""
    watch.settings = {"grouping": "partition"}
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.die(partitions=(2,))
    (request,) = watch.requests()
    assert request.run_key == f"{GROUP}/{TOPIC}/2.0.2.0"
    assert [again.run_key for again in watch.requests()] == [request.run_key]


@pytest.mark.parametrize("status", UNDER_WAY)
def test_a_run_that_is_under_way_is_not_requested_again(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """While a requested run is queued or in progress, no other run is requested for its partitions."""
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, status)
    assert "was requested and has not ended" in watch.skipped()


@pytest.mark.slow
@pytest.mark.parametrize("before_plan", [False, True])
def test_a_run_that_died_though_dagster_says_started_blocks_nothing(watch: Watch, before_plan: bool) -> None:
    """If the stale owner belongs to the requested run itself, another run is requested, up to a limit."""
    watch.settings = {"max_attempts": 3}
    watch.scene.clock.advance(-600_000)

    def die(run_id: str) -> None:
        if before_plan:
            watch.scene.about(ClaimingPartition, f"{run_id}.1")
            watch.scene.clock.advance(130_000)  # without settings, the interval is a minute
        else:
            watch.die(run_id, partitions=(0,))

    die("a-dead-run")
    keys = set()
    for _ in range(3):
        (request,) = watch.requests()
        keys.add(request.run_key)
        die(watch.was_requested(request, dg.DagsterRunStatus.STARTED))
    assert len(keys) == 3
    assert f"no more runs after {'3 runs' if before_plan else '4 attempts'}" in watch.skipped()


@pytest.mark.parametrize(
    ("status", "bundles"),
    [(dg.DagsterRunStatus.STARTED, ["0", "1", "2"]), (dg.DagsterRunStatus.NOT_STARTED, ["0-2"])],
)
def test_a_run_under_way_does_not_hide_a_later_death(
    watch: Watch, status: dg.DagsterRunStatus, bundles: list[str]
) -> None:
    """A run that was requested for an earlier state blocks nothing; a run that was not even launched has not failed."""
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, status)
    watch.die("another-dead-run")
    assert [_config(each)["partitions"] for each in watch.requests()] == bundles


def test_a_run_that_never_claims_blocks_for_a_bounded_time(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster shows the run as started, but it died before it claimed.

    After a while it is ignored; a queued run is not.
    """
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, dg.DagsterRunStatus.STARTED)
    assert "was requested and has not ended" in watch.skipped()
    monkeypatch.setattr("marshal_dagster.sensors._run_history.OPEN_RUN_PATIENCE_S", -60)
    again = watch.requests()
    assert [_config(each)["partitions"] for each in again] == ["0", "1", "2"]
    assert request.run_key not in {each.run_key for each in again}


@pytest.mark.thorough
def test_a_run_key_never_repeats_however_many_runs_there_were(watch: Watch) -> None:
    """Dagster compares run keys with its whole history, so the count continues after 201 runs for other partitions."""
    watch.die(partitions=(2,))
    (first,) = watch.requests()
    watch.was_requested(first, dg.DagsterRunStatus.FAILURE)
    (second,) = watch.requests()
    for number in range(201):
        seen = [{"partition": number + 10, "generation": 0}]
        config = {"ops": {"work": {"config": {"partitions": str(number + 10), "max_batches": 1, "seen": seen}}}}
        tags = {**first.tags, "marshal/asked": f"other {number}"}
        watch.instance.create_run_for_job(JOB, run_config=config, tags=tags, status=dg.DagsterRunStatus.SUCCESS)
    (third,) = watch.requests()
    assert third.run_key not in {first.run_key, None}
    assert third.run_key == second.run_key, "the second request was never run"
    watch.settings = {"max_attempts": 1}
    assert "no more runs after 1 runs" in watch.skipped()


@pytest.mark.thorough
@pytest.mark.parametrize("deleted", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("grouping", ["partition", "topic"])
def test_deleted_runs_bring_no_key_back(watch: Watch, grouping: str, deleted: list[int]) -> None:
    """Dagster deletes old runs, and never starts a run with the run key of a run that it still has."""
    watch.settings = {"grouping": grouping, "retry_wait_s": 0, "max_attempts": 9}
    watch.die(partitions=(0, 1) if grouping == "topic" else (0,))
    runs: list[tuple[str, str | None]] = []
    for _ in range(3):
        request = watch.requests()[0]
        runs.append((watch.was_requested(request, dg.DagsterRunStatus.FAILURE), request.run_key))
    for number in deleted:
        watch.instance.delete_run(runs[number][0])
    request = watch.requests()[0]
    assert request.run_key not in {key for number, (_, key) in enumerate(runs) if number not in deleted}


@pytest.mark.thorough
def test_the_run_key_of_a_bundle_never_repeats(watch: Watch) -> None:
    """The run key changes even if the bundle's earlier runs are too old to be looked up."""
    watch.die()
    (first,) = watch.requests()
    watch.was_requested(first, dg.DagsterRunStatus.FAILURE)
    for number in range(200):
        seen = [{"partition": number + 10, "generation": 0}]
        config = {"ops": {"work": {"config": {"partitions": str(number + 10), "max_batches": 1, "seen": seen}}}}
        tags = {**first.tags, "marshal/asked": f"other {number}"}
        watch.instance.create_run_for_job(JOB, run_config=config, tags=tags, status=dg.DagsterRunStatus.SUCCESS)
    assert first.run_key not in {request.run_key for request in watch.requests()}


@pytest.mark.slow
def test_after_a_fruitless_bundle_its_partitions_are_requested_one_by_one(watch: Watch) -> None:
    """A message that always fails then affects only its own partition; other partitions are repeated alone."""
    watch.die()
    (bundle,) = watch.requests()
    assert _config(bundle)["partitions"] == "0-2"
    watch.was_requested(bundle, dg.DagsterRunStatus.FAILURE)
    watch.settings = {"max_runs_per_tick": 2}
    singles = watch.requests()
    assert [_config(request)["partitions"] for request in singles] == ["0", "1"]
    for partition in (1, 2):
        watch.scene.work(watch.scene.delivery(), partitions=(partition,))
    watch.was_requested(singles[0], dg.DagsterRunStatus.FAILURE)
    watch.was_requested(singles[1], dg.DagsterRunStatus.SUCCESS, "done")
    assert [_config(request)["partitions"] for request in watch.requests()] == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("status", [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED])
def test_after_a_failure_it_is_requested_again_under_another_key(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """A run that failed or was canceled, even before it claimed, is followed by another."""
    watch.die(partitions=(0,))
    keys = set()
    for _ in range(3):
        (request,) = watch.requests()
        keys.add(request.run_key)
        watch.was_requested(request, status)
    assert len(keys) == 3


@pytest.mark.slow
def test_an_attempt_by_anybody_makes_another_key(watch: Watch) -> None:
    """A scheduled run took over the plan and died too, so the next request has another run key."""
    watch.die(partitions=(0,))
    (first,) = watch.requests()
    watch.was_requested(first, dg.DagsterRunStatus.SUCCESS, "held")
    watch.die("another-dead-run", partitions=(0,))
    (second,) = watch.requests()
    assert first.run_key != second.run_key
    assert {seen["plan_attempts"] for seen in _config(second)["seen"]} == {1}


def test_a_claim_with_nothing_behind_it_is_requested_once(watch: Watch) -> None:
    """A run that found nothing to repeat settles the claim, although the log still has the dead owner."""
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, dg.DagsterRunStatus.SUCCESS, "drained")
    assert watch.skipped() == "nothing to redo"


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["done", "given_up", "topic_missing"])
def test_a_run_that_did_not_take_it_is_followed_by_another(watch: Watch, outcome: str) -> None:
    """A run that only took other partitions, or changed nothing, is followed by another, up to a limit."""
    watch.settings = {"max_attempts": 3}
    watch.die(partitions=(0,))
    for _ in range(3):
        (request,) = watch.requests()
        watch.was_requested(request, dg.DagsterRunStatus.SUCCESS, outcome)
    assert "no more runs after 3 runs" in watch.skipped()


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["paused", "held"])
def test_a_run_that_could_not_try_wears_nothing_out(watch: Watch, outcome: str) -> None:
    """A run that found the group paused, or the owner live, has not failed: the sensor's clock may be wrong."""
    watch.settings = {"max_attempts": 2, "retry_wait_s": 30}
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, dg.DagsterRunStatus.SUCCESS, outcome)
    assert "next request in" in watch.skipped()
    watch.settings["retry_wait_s"] = 0
    for _ in range(4):
        (request,) = watch.requests()
        assert _config(request)["partitions"] == "0-2"
        watch.was_requested(request, dg.DagsterRunStatus.SUCCESS, outcome)


@pytest.mark.slow
def test_a_success_elsewhere_does_not_hide_a_new_death(watch: Watch) -> None:
    """A claim that becomes stale at a later offset is requested again."""
    watch.die(max_records=6)
    (request,) = watch.requests()
    watch.was_requested(request, dg.DagsterRunStatus.SUCCESS, "done")
    watch.scene.work(watch.scene.delivery())
    assert watch.skipped() == "nothing to redo"
    watch.die()
    assert len(watch.requests()) == 1


# What the sensors skip


def test_a_plan_that_was_tried_too_often_is_left_alone_and_named(watch: Watch) -> None:
    """The tick names the range and shows what an operator can do."""
    watch.settings = {"max_attempts": 2}
    for number in range(3):
        watch.die(f"dead-{number}", partitions=(0,))
    report = watch.skipped()
    assert f"{TOPIC}/0: plan [0, 10)" in report
    skip = f"marshal-dagster position reset {GROUP} {TOPIC} --to-offset 0=10"
    assert (
        f"no more runs after 3 attempts. Fix the cause and run `marshal-dagster retry {GROUP} {TOPIC} 0`, or skip its "
        f"offsets: `{skip}`" in report
    )


@pytest.mark.slow
def test_runs_that_fail_before_they_claim_are_bounded_too(watch: Watch) -> None:
    """Runs that cannot even start, for example without Java, are requested only up to a limit."""
    watch.settings = {"max_attempts": 2}
    watch.die()
    for _ in range(2):
        for request in watch.requests():
            watch.was_requested(request, dg.DagsterRunStatus.FAILURE)
    assert "no more runs after 2 runs that failed" in watch.skipped()


def _wear_out(watch: Watch, tries: int = 2, partitions: tuple[int, ...] = (0,)) -> None:
    """Let a dead run leave partitions, and let as many requested runs as `tries` fail."""
    watch.settings["max_attempts"] = tries
    watch.die(partitions=partitions)
    for _ in range(tries):
        for request in watch.requests():
            watch.was_requested(request, dg.DagsterRunStatus.FAILURE)


def _checks(result: dg.SensorResult) -> list[dg.AssetCheckEvaluation]:
    return [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]


@pytest.mark.slow
def test_after_each_failure_it_is_requested_later(watch: Watch) -> None:
    """The pause before the next run doubles each time; other partitions do not wait."""
    watch.settings = {"retry_wait_s": 100, "max_attempts": 9, "grouping": "partition"}
    watch.die(partitions=(0,))
    for ago_s in (1_000, 150):
        (request,) = watch.requests()
        watch.was_requested(request, dg.DagsterRunStatus.FAILURE, ago_s=ago_s)
    report = watch.skipped()
    assert f"{TOPIC}/0: " in report
    assert 40 <= int(report.split("the last run failed or changed nothing, next request in ")[1].split(" s")[0]) <= 50
    watch.die("another", partitions=(1,))
    assert [_config(request)["partitions"] for request in watch.requests()] == ["1"]


@pytest.mark.slow
def test_the_pause_after_a_failure_counts_from_the_runs_end(watch: Watch) -> None:
    """The pause is the same for a run that failed after a long time and for one that failed at once."""
    watch.settings = {"retry_wait_s": 100}
    watch.die(partitions=(0,))
    (request,) = watch.requests()
    run_id = watch.was_requested(request, STARTED, ago_s=1_000)
    watch.instance.report_run_failed(cast("dg.DagsterRun", watch.instance.get_run_by_id(run_id)))
    assert "next request in" in watch.skipped()


def test_the_pause_has_a_limit() -> None:
    """After any number of failures, the next run comes within an hour."""
    assert [retry_backoff_s(30, times) for times in (1, 2, 3, 8, 5_000)] == [30, 60, 120, 3_600, 3_600]


@pytest.mark.slow
def test_what_is_given_up_fails_a_check_once_and_passes_it_when_it_is_mended(watch: Watch) -> None:
    """The check is evaluated when its state changes, not at every tick; it shows partition, offset and last run."""
    (first,) = _checks(watch.tick())
    assert (first.asset_key, first.check_name, first.passed) == (topic_asset_key(TOPIC), "nothing_given_up_etl", True)
    _wear_out(watch)
    (check,) = _checks(watch.tick())
    assert not check.passed
    assert check.severity is dg.AssetCheckSeverity.ERROR
    table = cast("dg.TableMetadataValue", check.metadata["given_up"])
    assert str(check.metadata["timeline"].value).startswith(f"marshal-dagster timeline --group {GROUP}")
    (row,) = [record.data for record in table.records]
    assert (row["partition"], row["offset"], row["plan_end"], row["attempts"]) == (0, 0, 10, 2)
    assert row["last_run"] == watch.instance.get_runs(limit=1)[0].run_id
    assert "no more runs after 2 runs" in str(row["reason"])
    assert _checks(watch.tick()) == []
    watch.scene.work(watch.scene.delivery(), partitions=(0,))
    (mended,) = _checks(watch.tick())
    assert mended.passed
    assert _checks(watch.tick()) == []


@pytest.mark.slow
def test_the_check_reaches_dagsters_storage(watch: Watch) -> None:
    """The instance stores the failed evaluation as the daemon sends it."""
    _wear_out(watch)
    for event in watch.tick().asset_events:
        handed_over = deserialize_value(serialize_value(event), type(event))
        watch.instance.report_runless_asset_event(handed_over)
    key = exhausted_plans_check_key(GROUP, TOPIC)
    (record,) = watch.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    assert record.event is not None
    assert record.event.asset_check_evaluation is not None
    assert not record.event.asset_check_evaluation.passed


def _run_check(
    instance: dg.DagsterInstance, translator: DagsterMarshalTranslator | None = None
) -> dg.AssetCheckEvaluation:
    """Run the check as a user would and return its result."""
    check = build_exhausted_plans_check(TOPIC, group=GROUP, translator=translator)
    job = dg.define_asset_job("by_hand", selection=dg.AssetSelection.checks(check))
    defs = dg.Definitions(asset_checks=[check], jobs=[job])
    (evaluation,) = defs.resolve_job_def("by_hand").execute_in_process(instance=instance).get_asset_check_evaluations()
    return evaluation


@pytest.mark.slow
def test_planned_checks_do_not_hide_what_the_sensor_said(watch: Watch) -> None:
    """Dagster plans a check in each run that selects it, also if a step before it fails or is skipped."""
    _wear_out(watch)
    for event in watch.tick().asset_events:
        watch.instance.report_runless_asset_event(event)
    check = build_exhausted_plans_check(TOPIC, group=GROUP)
    job = dg.define_asset_job("by_hand", selection=dg.AssetSelection.checks(check))
    planned = dg.Definitions(asset_checks=[check], jobs=[job]).resolve_job_def("by_hand")
    for _ in range(20):
        watch.instance.create_run_for_job(planned)
    assert not _run_check(watch.instance).passed


@pytest.mark.slow
def test_the_check_that_a_user_defines_repeats_what_the_sensor_said(watch: Watch) -> None:
    """A check that is run by hand has the sensor's last result, so that Dagster shows it."""
    said = _run_check(watch.instance)
    assert (said.passed, said.severity) == (False, dg.AssetCheckSeverity.WARN), "a sensor that is off finds nothing"
    assert said.description is not None
    assert said.description.endswith("switch the sensor on, or correct the group's name.")
    _wear_out(watch)
    for event in watch.tick().asset_events:
        watch.instance.report_runless_asset_event(event)
    for _ in range(2):
        said = _run_check(watch.instance)
        assert not said.passed
        assert said.metadata["partitions_given_up"].value == 1
    watch.scene.work(watch.scene.delivery(), partitions=(0,))
    for event in watch.tick().asset_events:
        watch.instance.report_runless_asset_event(event)
    assert _run_check(watch.instance).passed
    with pytest.raises(ConfigurationError, match="group 'a/b' cannot be a name"):
        build_exhausted_plans_check(TOPIC, group="a/b")
    with pytest.raises(ConfigurationError, match="topic: 'a/b' is not a name"):
        build_exhausted_plans_check("a/b", group=GROUP)


class Renamed(DagsterMarshalTranslator):
    """A translator that gives the topic another asset key."""

    def get_topic_spec(self, topic: str) -> dg.AssetSpec:
        """Return a spec with another key."""
        return super().get_topic_spec(topic).replace_attributes(key=["events", topic])


@pytest.mark.slow
def test_the_check_belongs_to_the_asset_that_a_translator_makes_of_the_topic(watch: Watch) -> None:
    """A result that was reported under another key is reported again under the new one."""
    _wear_out(watch)
    assert [one.asset_key for one in _checks(watch.tick())] == [topic_asset_key(TOPIC)]
    watch.settings = {**watch.settings, "translator": Renamed()}
    (check,) = _checks(watch.tick())
    assert (check.asset_key, check.passed) == (dg.AssetKey(["events", TOPIC]), False)
    watch.instance.report_runless_asset_event(check)
    assert not _run_check(watch.instance, Renamed()).passed
    assert _checks(watch.tick()) == []


def test_groups_whose_names_differ_in_dots_and_dashes_have_checks_of_their_own() -> None:
    """The checks differ in one asset and in one deployment; a name that Dagster allows is kept."""
    groups = ("a.b", "a-b", "a_b", "ä b")
    checks = [build_exhausted_plans_check(TOPIC, group=group) for group in groups]
    assert len({key for check in checks for key in check.check_keys}) == len(groups)
    assert exhausted_plans_check_key("a_b", TOPIC).name == "nothing_given_up_a_b"
    dg.Definitions.validate_loadable(dg.Definitions(asset_checks=checks))


@pytest.mark.slow
def test_the_hook_is_reported_once_of_each_place_that_is_given_up(watch: Watch) -> None:
    """The hook gets new places with the runs that failed; places of earlier calls count only in the total."""
    report: list[ExhaustedPlans] = []
    watch.settings = {"on_exhausted_plans": report.append, "grouping": "partition"}
    _wear_out(watch)
    for _ in range(2):
        watch.tick()
    (first,) = report
    assert (first.group, first.topic, first.total) == (GROUP, TOPIC, 1)
    assert [(one.partition, one.offset, one.plan_end, one.attempts) for one in first.partitions] == [(0, 0, 10, 2)]
    assert list(first.partitions[0].run_ids) == [run.run_id for run in watch.instance.get_runs()]
    assert str(first).startswith(f"group '{GROUP}': {TOPIC}/0: plan [0, 10), ")
    _wear_out(watch, partitions=(1,))
    watch.tick()
    assert [partition.partition for partition in report[1].partitions] == [1]
    assert report[1].total == 2
    watch.scene.work(watch.scene.delivery(), partitions=(0,))
    watch.tick()
    assert len(report) == 2, "the hook is not called for a repaired partition"


@pytest.mark.slow
def test_a_hook_that_fails_harms_nothing_and_is_called_again(watch: Watch) -> None:
    """A tick still requests other partitions, and the check fails; the next ticks fail until the hook succeeds."""
    calls: list[ExhaustedPlans] = []

    def hook(found: ExhaustedPlans) -> None:
        calls.append(found)
        if len(calls) < 3:
            raise ZeroDivisionError("no pager")

    watch.settings = {"on_exhausted_plans": hook, "grouping": "partition"}
    _wear_out(watch)
    watch.die("another", partitions=(1,))
    result = watch.tick()
    assert [_config(request)["partitions"] for request in result.run_requests or ()] == ["1"]
    assert [check.passed for check in _checks(result)] == [False]
    watch.was_requested((result.run_requests or ())[0], STARTED)
    with pytest.raises(dg.Failure, match=r"on_exhausted_plans and failed, .* ZeroDivisionError\('no pager'\)"):
        watch.tick()
    for _ in range(3):
        watch.tick()
    assert len(calls) == 3


@pytest.mark.slow
def test_a_hook_that_is_added_later_gets_what_was_given_up_before(watch: Watch) -> None:
    """A new hook is called for all places that need attention at that time."""
    _wear_out(watch)
    watch.tick()
    report: list[ExhaustedPlans] = []
    watch.settings["on_exhausted_plans"] = report.append
    watch.tick()
    assert [one.total for one in report] == [1]


@pytest.mark.slow
def test_what_is_given_up_is_remembered_through_a_pause(watch: Watch) -> None:
    """In a paused group nothing is evaluated: the check does not pass, and nothing is reported again afterwards."""
    report: list[ExhaustedPlans] = []
    watch.settings["on_exhausted_plans"] = report.append
    _wear_out(watch)
    assert len(_checks(watch.tick())) == 1
    watch.scene.pause(3_600)
    assert "is paused" in watch.skipped()
    watch.scene.pause(-3_600)
    assert _checks(watch.tick()) == []
    assert len(report) == 1


def test_a_settled_claim_is_not_given_up(watch: Watch) -> None:
    """A run that found nothing to repeat has not failed, even if one failure is the limit."""
    watch.settings = {"max_attempts": 1}
    watch.die()
    (request,) = watch.requests()
    watch.was_requested(request, SUCCESS, "drained")
    result = watch.tick()
    assert (result.skip_reason, _checks(result)) == (dg.SkipReason("nothing to redo"), [])


@pytest.mark.thorough
def test_thousands_that_are_given_up_are_reported_once_and_shortly(watch: Watch) -> None:
    """The check lists a hundred places; the hook gets a thousand and the total; the cursor's size is limited."""
    report: list[ExhaustedPlans] = []
    watch.settings = {"on_exhausted_plans": report.append}
    watch.scene.data.make(partitions=1_200, messages=1)
    _wear_out(watch, 1, tuple(range(1_200)))
    (check,) = _checks(watch.tick())
    assert len(cast("dg.TableMetadataValue", check.metadata["given_up"]).records) == 100
    watch.tick()
    assert [(len(one.partitions), one.total) for one in report] == [(1_000, 1_200)]
    assert len(watch.cursor or "") < 20_000


@pytest.mark.parametrize(
    "seen",
    [
        None,
        ["a"],
        [{"partition": "0", "generation": 0}],
        [{"partition": 0, "generation": None}],
        [{"partition": 0, "generation": 0, "epoch": "1"}],
        [{}],
    ],
)
def test_what_another_version_reported_its_runs_is_passed_over(watch: Watch, seen: Any) -> None:  # noqa: ANN401
    """A run config of another form does not fail the tick; its run is ignored."""
    watch.die()
    (request,) = watch.requests()
    config = {"ops": {"work": {"config": {**_config(request), "seen": seen}}}}
    other_version = dg.op(name="work", config_schema=dict)(lambda _: None)
    job = dg.GraphDefinition(JOB.name, node_defs=[other_version]).to_job()
    watch.instance.create_run_for_job(job, run_config=config, tags=request.tags, status=STARTED)
    assert len(watch.requests()) == 1


def test_a_paused_group_is_skipped_with_the_time_left(watch: Watch) -> None:
    """The tick shows which member paused the group, and for how long."""
    watch.die()
    watch.scene.pause((_now_ms() - watch.scene.clock.wall_ms()) // 1_000 + 100, "ops.7")
    report = watch.skipped()
    assert report.startswith(f"group '{GROUP}' is paused by ops, for ")
    assert 90 <= int(report.split("for ")[1].split(" s")[0]) <= 101


def test_a_log_that_can_only_be_observed_fails_the_tick(watch: Watch) -> None:
    """After retention has cut the log no member can claim until an operator recovers it."""
    watch.die()
    assert len(watch.requests()) == 1
    for partition in range(4):
        watch.scene.broker.retain_from(partition, 1)
    with pytest.raises(IncompleteLogError, match="marshal-dagster recover"):
        watch.tick()


def test_another_groups_claims_are_not_this_sensors(watch: Watch) -> None:
    """A sensor evaluates only its own group. If the log does not have it, its name is probably misspelt."""
    watch.die()
    watch.settings = {"group": "other"}
    assert watch.skipped() == f"the log has no group 'other'; it has {GROUP!r}"


# At most once


RUN = "3b8f4f0e-6c57-4d55-9a4e-7d3c1c6a1f00"
REPLAY, UNCOMMITTED, FINE = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
STARTED, FAILURE, SUCCESS = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
TAGGED = {"marshal/group": GROUP, "marshal/topic": TOPIC}


def _run(
    watch: Watch, run_id: str = RUN, status: dg.DagsterRunStatus = FAILURE, tags: dict[str, str] | None = None
) -> None:
    """Store a run in Dagster, by default a failed run of a claimed-batch op."""
    watch.instance.create_run_for_job(JOB, run_id=run_id, status=status, tags=TAGGED if tags is None else tags)


def _event(watch: Watch, run_id: str, kind: dg.DagsterEventType, data: Any) -> None:  # noqa: ANN401 - the data of any event
    event = dg.DagsterEvent(kind.value, JOB.name, event_specific_data=data)
    watch.instance.report_dagster_event(event, run_id)


def _announce(watch: Watch, epochs: dict[int, int], end: int = 10, *, start: int = 0, run_id: str = RUN) -> None:
    """Record that the run announced these partitions."""
    table = announcement_table([AnnouncedRange(GROUP, TOPIC, n, epoch, start, end) for n, epoch in epochs.items()])
    observation = dg.AssetObservation(announcements_key(TOPIC), metadata={"announced": table})
    _event(watch, run_id, dg.DagsterEventType.ASSET_OBSERVATION, AssetObservationData(observation))


def _finish(watch: Watch, epochs: dict[int, int], state: str = "done", *, run_id: str = RUN) -> None:
    """Record that the run processed these partitions, as a claimed-batch op does."""
    schema = dg.TableSchema([dg.TableColumn("topic"), dg.TableColumn("state")])
    rows = [dg.TableRecord({"topic": TOPIC, "partition": n, "epoch": e, "state": state}) for n, e in epochs.items()]
    table = dg.MetadataValue.table(rows, schema)
    done = dg.AssetMaterialization("out", metadata={"ranges": table, "group": GROUP})
    _event(watch, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION, StepMaterializationData(done, []))


def _epochs(watch: Watch) -> dict[int, int]:
    owners = {n: watch.scene.key(n).owner for n in range(3)}
    return {n: owner.epoch for n, owner in owners.items() if owner is not None and owner.epoch is not None}


def _observed(result: dg.SensorResult) -> list[dg.AssetObservation]:
    return [event for event in result.asset_events if isinstance(event, dg.AssetObservation)]


def _dropped(result: dg.SensorResult) -> list[int]:
    return [cast("int", event.metadata["possibly_dropped_offsets"].value) for event in _observed(result)]


def _partitions(result: dg.SensorResult) -> list[object]:
    tables = [cast("dg.TableMetadataValue", event.metadata["possibly_dropped"]) for event in _observed(result)]
    return [record.data["partition"] for table in tables for record in table.records]


def _die_at_most_once(watch: Watch, status: dg.DagsterRunStatus = FAILURE, tags: dict[str, str] | None = None) -> None:
    """Let a run commit all ten messages of each partition, and die before it processes them."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die(RUN)
    _run(watch, status=status, tags=tags)
    _announce(watch, _epochs(watch))


def _take_over(watch: Watch) -> None:
    """Let the next scheduled run claim the partitions, before any tick."""
    for partition in range(3):
        watch.scene.data.append(partition, 1)
    watch.scene.work(watch.scene.delivery(watch.mode))


@pytest.mark.parametrize("status", [STARTED, FAILURE])
def test_what_a_dead_at_most_once_run_dropped_is_reported_once(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """Ranges that the run announced and committed are reported and observed once; no run is requested."""
    _die_at_most_once(watch, status)
    result = watch.tick()
    assert not result.run_requests
    assert result.skip_reason is not None
    assert f"{TOPIC}/1: possibly dropped [0, 10)" in str(result.skip_reason.skip_message)
    assert f"run {RUN} ({status.value})" in str(result.skip_reason.skip_message)
    assert _dropped(result) == [10, 10, 10]
    again = watch.tick()
    assert (again.asset_events, again.skip_reason) == ([], dg.SkipReason("nothing to redo"))


@pytest.mark.parametrize("status", [FAILURE, dg.DagsterRunStatus.CANCELED])
@pytest.mark.parametrize("tags", [TAGGED, {}])
def test_drops_are_reported_though_others_took_the_partitions_over(
    watch: Watch, status: dg.DagsterRunStatus, tags: dict[str, str]
) -> None:
    """Ranges that the dead run announced and did not finish are reported, whichever member holds the partitions now."""
    _die_at_most_once(watch, status, tags)
    _take_over(watch)
    assert _dropped(watch.tick()) == [10, 10, 10]
    assert _dropped(watch.tick()) == []


def test_drops_of_a_run_that_vanished_are_reported_though_it_lost_its_claims(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster shows the run as STARTED and it holds nothing.

    The sensor gives it time to record its batch, and then reports the drops.
    """
    _die_at_most_once(watch, STARTED)
    _take_over(watch)
    assert _dropped(watch.tick()) == []
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.TIME_TO_RECORD_S", 0)
    assert _dropped(watch.tick()) == [10, 10, 10]
    assert _dropped(watch.tick()) == []


def test_a_run_at_work_has_dropped_nothing_yet(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reported while the run holds a live claim, whatever Dagster shows, but once the claim is stale."""
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.TIME_TO_RECORD_S", 0)
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.scene.clock.advance(60_000)
    delivery = watch.scene.delivery(watch.mode)
    delivery.run_id = RUN
    batch = watch.scene.batch(delivery)
    batch.__enter__()
    batch.begin_processing()
    _run(watch, status=STARTED)
    _announce(watch, _epochs(watch))
    assert _dropped(watch.tick()) == []
    watch.instance.report_run_failed(cast("dg.DagsterRun", watch.instance.get_run_by_id(RUN)))
    assert _dropped(watch.tick()) == []
    watch.silence(batch)
    watch.scene.wait_until_stale()
    watch.scene.pause(-60)
    assert _dropped(watch.tick()) == [10, 10, 10]


@pytest.mark.parametrize("status", [FAILURE, SUCCESS])
def test_what_a_run_finished_was_not_dropped(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """If a run failed later, or retried a step, only its ranges without a record are reported."""
    _die_at_most_once(watch, status)
    epochs = _epochs(watch)
    _take_over(watch)
    _finish(watch, {0: epochs[0]})
    _finish(watch, {1: epochs[1]}, "dropped")
    result = watch.tick()
    assert _partitions(result) == [1, 2]


@pytest.mark.slow
def test_a_plan_that_a_successor_replayed_was_not_dropped(watch: Watch) -> None:
    """A later owner announced the same offsets, so the plan was not committed, and that owner processed them."""
    _die_at_most_once(watch)
    _run(watch, REPLAY, SUCCESS)
    _announce(watch, {n: epoch + 100 for n, epoch in _epochs(watch).items() if n != 2}, run_id=REPLAY)
    _finish(watch, {n: epoch + 100 for n, epoch in _epochs(watch).items()}, run_id=REPLAY)
    _take_over(watch)
    result = watch.tick()
    assert _partitions(result) == [2]


def test_what_was_announced_and_not_committed_was_not_dropped(watch: Watch) -> None:
    """A range above the group's offset was not committed: the next owner repeats it."""
    _die_at_most_once(watch)
    _take_over(watch)
    _run(watch, UNCOMMITTED)
    _announce(watch, {0: 10_000}, 20, start=11, run_id=UNCOMMITTED)
    assert _dropped(watch.tick()) == [10, 10, 10]


def test_an_op_of_ones_own_is_reported_by_its_last_range(watch: Watch) -> None:
    """A run that records no batches can only have dropped its last range of each partition.

    A successful run drops nothing.
    """
    _die_at_most_once(watch, tags={})
    epochs = _epochs(watch)
    _take_over(watch)
    _announce(watch, {0: epochs[0] + 100}, 11, start=10)
    _run(watch, FINE, SUCCESS, {})
    _announce(watch, {1: epochs[1]}, 11, start=10, run_id=FINE)
    assert _dropped(watch.tick()) == [1, 10, 10]


@pytest.mark.slow
def test_what_the_other_sensor_reported_is_not_reported_again(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """The stale-claim sensor does not repeat drops that the sensor for failed runs has observed."""
    _die_at_most_once(watch)
    _take_over(watch)
    report = dead_runs.react(DeliveryMode.AT_MOST_ONCE)
    assert isinstance(report, dg.SensorResult)
    assert _dropped(report) == [10, 10, 10]
    for event in report.asset_events:
        watch.instance.report_runless_asset_event(event)
    assert _dropped(watch.tick()) == []
    again = dead_runs.react(DeliveryMode.AT_MOST_ONCE)
    assert isinstance(again, dg.SkipReason)


@pytest.mark.slow
def test_what_announced_runs_there_are_is_read_bit_by_bit(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick reads and evaluates a limited number; the cursor has the place, so no run is missed."""
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.OBSERVATIONS_A_TICK", 4)
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.RUNS_A_TICK", 3)
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die("of-elsewhere")
    runs = [str(uuid.uuid4()) for _ in range(9)]
    for number, run_id in enumerate(runs):
        _run(watch, run_id)
        _announce(watch, {0: 100 + number}, number + 1, start=number, run_id=run_id)
    found: list[str] = []
    for _ in range(5):
        result = watch.tick()
        assert len(_observed(result)) <= 3
        found += [str(event.metadata["run"].value) for event in _observed(result)]
        assert len(watch.cursor or "") < 1_000
    assert sorted(found) == sorted(runs)


@pytest.mark.slow
@pytest.mark.parametrize("also_before", [0, 1])
def test_runs_that_announce_after_others_were_deleted_are_found(watch: Watch, also_before: int) -> None:
    """Dagster's storage may reuse the ids of a deleted run's events for later runs."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die("of-elsewhere")
    runs = [str(uuid.uuid4()) for _ in range(4)]
    for number, run_id in enumerate(runs[: 1 + also_before]):
        _run(watch, run_id, SUCCESS, {})
        _announce(watch, {0: 100 + number}, 1, run_id=run_id)
    watch.tick()
    for run_id in runs[: 1 + also_before]:
        watch.instance.delete_run(run_id)
    for number, run_id in enumerate(runs[2:]):
        _run(watch, run_id)
        _announce(watch, {0: 200 + number}, number + 1, start=number, run_id=run_id)
    found = [str(event.metadata["run"].value) for event in _observed(watch.tick())]
    assert sorted(found) == sorted(runs[2:])
    assert not _observed(watch.tick())


def test_a_dead_at_most_once_run_of_elsewhere_is_reported(watch: Watch) -> None:
    """If this Dagster instance does not have the run, the tick reports that the drops are unknown."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die("of-elsewhere")
    assert "this Dagster instance has no run of-elsewhere" in watch.skipped()


def test_an_at_most_once_run_that_died_before_its_commit_dropped_nothing(watch: Watch) -> None:
    """A known run with a stale claim, but without an announcement, dropped nothing; the tick reports that."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die(RUN, before_plan=True)
    _run(watch)
    assert "nothing was dropped, because the run died before it committed" in watch.skipped()


def test_an_uncommitted_at_most_once_plan_may_be_run(watch: Watch) -> None:
    """A plan that was opened but not committed was never processed, so a run is requested."""
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


@pytest.mark.slow
def test_runs_that_never_end_are_not_watched_without_end(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a limit, the oldest run is no longer watched, and named; a run that Dagster deleted is forgotten."""
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.MOST_WATCHED", 2)
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.TIME_TO_RECORD_S", 0)
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.die("of-elsewhere")
    runs = [str(uuid.uuid4()) for _ in range(3)]
    for number, run_id in enumerate(runs):
        _run(watch, run_id, STARTED, {})
        _announce(watch, {0: 100 + number}, number + 1, start=number, run_id=run_id)
    report = [watch.skipped() for _ in range(3)]
    assert f"run {runs[0]} is unfinished, but too many newer runs are watched" in report[1]
    assert list(StaleClaimCursor.read(watch.cursor).watched) == runs[1:]
    watch.instance.delete_run(runs[1])
    assert watch.skipped() == "nothing to redo"
    assert list(StaleClaimCursor.read(watch.cursor).watched) == runs[2:]


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [True, False])
def test_what_an_op_records_is_what_the_sensor_compares(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """For a successful run of the op nothing is reported; if the function raised, all that the run committed."""

    def process(*_: object) -> None:
        if not is_done:
            raise ZeroDivisionError

    for name in ("check_session", "check_single_execution"):
        monkeypatch.setattr(record_reader, name, lambda _: None)
    monkeypatch.setattr(reader, "read_ranges", lambda *_, **__: [])
    monkeypatch.setattr(spark_jobs, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(spark_jobs, "progress", lambda *_: None)
    watch.mode = DeliveryMode.AT_MOST_ONCE
    result = Stand(watch.scene, watch.instance, process, DeliveryMode.AT_MOST_ONCE).run()
    assert result.success == is_done
    assert watch.scene.key().offset == 10
    rows = (row for row, _ in announced_ranges(watch.instance, result.run_id))
    assert sorted(rows, key=lambda row: row.partition)[2].end == 10
    assert _dropped(watch.tick()) == ([] if is_done else [10, 10, 10])


# Claims of dead runs


def _owners(watch: Watch) -> list[bool]:
    return [watch.scene.key(n).owner is not None for n in range(3)]


def test_what_a_failed_run_held_is_revoked(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """All claims are revoked, once; if the run held nothing, the tick reports that."""
    watch.die(RUN)
    _run(watch)
    assert dead_runs.report().startswith(f"revoked the claims of run {RUN}: {TOPIC}/0: plan [0, 10)")
    assert _owners(watch) == [False] * 3
    assert dead_runs.report() == f"run {RUN} held nothing of group '{GROUP}'"


def test_what_a_failed_run_held_in_a_go_group_is_waited_for(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """Go consumers do not know revocations: nothing is written, and the tick shows when the claims become stale."""
    _run(watch)
    watch.scene.about(ClaimingPartition, f"{RUN}.1", 0)
    report = dead_runs.report()
    assert f"are not revoked, because group '{GROUP}' is shared with Go consumers or has no settings" in report
    assert report.endswith("They become stale 121 s after the last heartbeat")
    assert (_owners(watch), RefusingLog.appended) == ([True, False, False], 0)


def _hold_each(watch: Watch, statuses: Sequence[dg.DagsterRunStatus]) -> list[str]:
    """Let each run hold a partition, and store each run in Dagster with its status."""
    for number in range(4):
        watch.scene.broker.append(number, render(settings_record(SETTINGS)))
    runs = [str(uuid.uuid4()) for _ in statuses]
    for partition, (run_id, status) in enumerate(zip(runs, statuses, strict=True)):
        watch.scene.about(ClaimingPartition, f"{run_id}.1", partition)
        _run(watch, run_id, status)
    return runs


def test_all_runs_that_are_over_are_freed_at_once(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """Dagster shows one run at a time, so a tick also revokes claims of other ended runs. Live runs keep theirs."""
    _run(watch)
    _hold_each(watch, [FAILURE, STARTED, dg.DagsterRunStatus.CANCELED])
    report = dead_runs.report()
    assert report.startswith(f"revoked the claims of 2 other ended runs: {TOPIC}/0: no plan")
    assert f"{TOPIC}/2: no plan" in report
    assert _owners(watch) == [False, True, False]
    assert RefusingLog.appended == 1


@pytest.mark.slow
def test_what_others_held_that_cannot_be_revoked_does_not_hide_the_rest(
    watch: Watch, dead_runs: DeadRunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick reports the revocation for Dagster's run, and the error for the others."""
    watch.die(RUN, partitions=(0,))
    _run(watch)

    def down(_: ClaimerResource) -> dict[DataPartitionId, Key]:
        raise UnavailableError("Kafka is down")

    monkeypatch.setattr(ClaimerResource, "group_keys", down)
    report = dead_runs.report()
    assert report.startswith(f"revoked the claims of run {RUN}: ")
    assert report.endswith("the claims of other ended runs cannot be revoked now: Kafka is down")


def test_what_a_dead_run_held_is_freed_while_the_group_is_paused(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """A pause waits until all claims are released, so the sensor must not skip a paused group."""
    watch.die(RUN)
    _run(watch)
    watch.scene.pause(3_600)
    assert dead_runs.report().startswith(f"revoked the claims of run {RUN}: ")
    assert _owners(watch) == [False] * 3


@pytest.mark.parametrize(("watches_all", "owners"), [(True, [False] * 3), (False, [True] * 3)])
@pytest.mark.parametrize("status", [FAILURE, dg.DagsterRunStatus.CANCELED])
def test_runs_of_other_code_locations_are_watched_if_wanted(
    watch: Watch, dead_runs: DeadRunWatch, status: dg.DagsterRunStatus, watches_all: bool, owners: list[bool]
) -> None:
    """Dagster shows the sensor a run of another code location only if it monitors all of them."""
    watch.die(RUN)
    location = InProcessCodeLocationOrigin(LoadableTargetOrigin(python_file="elsewhere.py"), "elsewhere")
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "all"), JOB.name)
    run = watch.instance.create_run_for_job(JOB, run_id=RUN, status=STARTED, tags=TAGGED, remote_job_origin=origin)
    sensors = build_run_failure_sensors(group=GROUP, monitor_all_code_locations=watches_all)
    ticks = {FAILURE: sensors[0], dg.DagsterRunStatus.CANCELED: sensors[1]}
    cursor = dead_runs.evaluate(ticks[status]).cursor
    if status is FAILURE:
        watch.instance.report_run_failed(run)
    else:
        watch.instance.report_run_canceled(run)
    result = dead_runs.evaluate(ticks[status], cursor)
    assert _owners(watch) == owners
    assert (f"revoked the claims of run {RUN}" in str(result.skip_message)) is watches_all


@pytest.mark.parametrize("written", [False, True])
def test_a_revocation_without_an_answer_is_tried_again(watch: Watch, dead_runs: DeadRunWatch, written: bool) -> None:
    """Dagster shows a failed run once only, so the sensor retries until the log shows that the claims are gone."""
    watch.die(RUN)
    _run(watch)
    RefusingLog.refused, RefusingLog.written = 2, written
    assert dead_runs.report().startswith(f"revoked the claims of run {RUN}: ")
    assert _owners(watch) == [False] * 3
    assert RefusingLog.appended == (1 if written else 3)


def test_what_cannot_be_revoked_is_named(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """After a few tries the tick names the remaining claims and the reason; they become stale in any case."""
    watch.die(RUN, partitions=(1, 2))
    _run(watch)
    RefusingLog.refused = 100
    report = dead_runs.report()
    assert report.startswith(f"could not revoke the claims of run {RUN}: {TOPIC}/1: plan [0, 10)")
    assert "Local: Message timed out" in report
    assert "become stale 20 s after the last heartbeat" in report
    assert RefusingLog.appended == 3


def test_revoking_ends_within_the_time_out(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """If no time is left, there is no second try."""
    watch.die(RUN)
    _run(watch)
    dead_runs.timeout_s = 0.001
    RefusingLog.refused = 100
    assert "could not revoke" in dead_runs.report()
    assert RefusingLog.appended == 1


def test_a_claim_that_is_only_observed_is_named(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """If retention truncated the log, the claims' epochs are unknown: that is reported, and not tried again."""
    watch.die(RUN)
    _run(watch)
    for partition in range(4):
        watch.scene.broker.retain_from(partition, 1)
    assert "the epochs are unknown" in dead_runs.report()
    assert RefusingLog.appended == 0


def test_a_log_that_cannot_be_read_fails_the_tick_with_what_to_expect(
    watch: Watch, dead_runs: DeadRunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the run's claims are unknown, the tick's error shows that they become stale in any case."""
    watch.die(RUN)
    _run(watch)
    requested = []

    def down(*_: object) -> Rationalizer:
        requested.append(1)
        raise UnavailableError("Kafka at 127.0.0.1:9 cannot be reached")

    monkeypatch.setattr("marshal_dagster.coordination.rationalizer_cache.shared_rationalizer", down)
    with pytest.raises(UnavailableError, match=r"could not be revoked: Kafka at .* become stale 20 s after"):
        dead_runs.react()
    assert len(requested) == 3


def test_drops_that_cannot_be_reported_now_do_not_hide_what_was_revoked(
    watch: Watch, dead_runs: DeadRunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the offsets cannot be read, the tick still reports what was revoked."""

    def down(_: ClaimerResource) -> dict[DataPartitionId, Key]:
        raise UnavailableError("Kafka is down")

    _die_at_most_once(watch)
    monkeypatch.setattr(ClaimerResource, "group_keys", down)
    report = dead_runs.report()
    assert report.startswith(f"revoked the claims of run {RUN}: ")
    assert report.endswith("are unknown now, the stale-claim sensor reports them later: Kafka is down")


# Cursor


FRESH = StaleClaimCursor(checked={TOPIC: digest(exhausted_plans_check_key(GROUP, TOPIC), ())})
"""The cursor after a tick in which no partition was given up."""


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "12",
        "null",
        "[]",
        "not json",
        "[" * 10_000,
        '{"version": 2, "reported": {"orders/0": 7}}',
        '{"version": "1"}',
        '{"reported": [1], "checked": 3, "alerted": {"orders": 4}}',
        '{"position": 7}',
    ],
)
def test_a_cursor_of_another_shape_is_begun_anew(watch: Watch, text: str | None) -> None:
    """A missing, older, newer or damaged cursor does not stop the sensor, which then writes a valid one."""
    watch.cursor = text
    watch.die()
    assert len(watch.requests()) == 1
    assert watch.cursor is not None
    assert StaleClaimCursor.read(watch.cursor) == FRESH


def test_of_a_cursor_what_is_known_is_kept() -> None:
    """An unknown field of a newer version is left out; a field of another type is reset, and no other."""
    text = '{"version": 1, "reported": {"orders/0": 7}, "watched": ["a"], "alerted": {"a": ["1"]}, "later": {"x": 1}}'
    assert StaleClaimCursor.read(text) == StaleClaimCursor(reported={"orders/0": 7}, alerted={"a": ["1"]})


@pytest.mark.parametrize("text", [None, "damaged", '{"version": 9}', '{"checked": 1}'])
def test_a_lost_cursor_asks_for_nothing_twice(watch: Watch, text: str | None) -> None:
    """Dagster's runs show what was requested; until a run exists, its run key stays the same."""
    watch.die()
    (request,) = watch.requests()
    watch.cursor = text
    assert [again.run_key for again in watch.requests()] == [request.run_key]
    watch.was_requested(request, STARTED)
    watch.cursor = text
    assert "was requested and has not ended" in watch.skipped()


@pytest.mark.thorough
def test_the_cursor_stays_small(watch: Watch) -> None:
    """The cursor holds the newest thousand dead owners, however many were reported."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    watch.scene.data.make(partitions=1_100, messages=1)
    watch.die("of-elsewhere")
    assert watch.skipped().endswith(" and 1090 more in the log of this tick, which has the first 1,000")
    assert watch.cursor is not None
    assert len(StaleClaimCursor.read(watch.cursor).reported) == 1_000
    assert len(watch.cursor) < 50_000


# Failures


@pytest.mark.thorough
def test_a_broker_that_is_down_fails_the_tick_in_one_line(watch: Watch) -> None:
    """Without a broker the tick fails within the timeout; its one line shows the cause and what to do."""
    sensor = build_stale_claim_sensor(JOB, group=GROUP)
    connection = KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9", timeout_s=0.5)
    context = dg.build_sensor_context(
        instance=watch.instance, resources={"rationalizer": RationalizerResource(connection=connection)}
    )
    with pytest.raises(UnavailableError, match=r"Kafka at 127\.0\.0\.1:9 cannot be reached.* for 0\.5 s") as failed:
        sensor(context)
    assert "\n" not in str(failed.value)


@pytest.mark.thorough
def test_a_tick_brings_no_spark() -> None:
    """Evaluating the sensor imports neither pyspark nor pandas, and starts no process."""
    code = """
import sys
from tests.fast.test_dagster_stale_claim_sensor import Scene, Watch, ManualClock, dg, _now_ms
scene = Scene(clock=ManualClock(_now_ms() - 60_000))
scene.data.make(messages=10)
with dg.DagsterInstance.ephemeral() as instance:
    watch = Watch(scene, instance)
    watch.die()
    print(len(watch.requests()))
import psutil
print(len(psutil.Process().children(recursive=True)), *({"pyspark", "py4j", "pandas"} & sys.modules.keys()))
"""
    report = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert report.stdout.split() == ["1", "0"]


@pytest.mark.thorough
def test_many_partitions_are_requested_in_one_run_with_a_short_key(watch: Watch) -> None:
    """Of 500 partitions, the 100 stale ones make one request; its run key is short for any number of them."""
    watch.scene.data.make(partitions=500, messages=1)
    watch.scene.drain(watch.scene.delivery())
    for partition in range(100):
        watch.scene.data.append(partition, 1)
    watch.die()
    (request,) = watch.requests()
    assert _config(request)["partitions"] == "0-99"
    assert len(request.run_key or "") < 100


# Building and its errors


@dg.op
def _other() -> None: ...


@dg.job
def _other_job() -> None:
    _other()


@pytest.mark.parametrize(
    ("jobs", "settings", "report"),
    [
        (JOB, {"group": "a/b"}, "group 'a/b' cannot be a name"),
        (JOB, {"group": GROUP, "max_runs_per_tick": 0}, "max_runs_per_tick is 0; it must be at least 1"),
        (JOB, {"group": GROUP, "max_attempts": -1}, "max_attempts is -1; it must be at least 1"),
        (JOB, {"group": GROUP, "grouping": "run"}, "grouping: 'run'; give topic or partition"),
        (_other_job, {"group": GROUP}, "job '_other_job' has no claimed-batch op"),
        (JOB, {"group": GROUP, "retry_wait_s": float("nan")}, "retry_wait_s is nan; it must be a number of seconds"),
        ([JOB, build_reprocess_job(OP, name="redo2")], {"group": GROUP}, "'redo' and 'redo2' both process topic"),
    ],
)
def test_settings_that_make_no_sensor_are_refused(jobs: Any, settings: dict[str, Any], report: str) -> None:  # noqa: ANN401
    """The error is raised when the sensor is built; it names the setting and shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=report):
        build_stale_claim_sensor(jobs, **settings)


def test_dead_run_sensors_watch_failures_and_cancellations() -> None:
    """There is a sensor for each status in which a run ends without success."""
    failed, canceled = build_run_failure_sensors(group="etl", monitored_jobs=[JOB])
    assert [failed.name, canceled.name] == ["etl_failed_runs", "etl_canceled_runs"]
    with pytest.raises(ConfigurationError, match="group 'a/b' cannot be a name"):
        build_run_failure_sensors(group="a/b")


def test_a_dead_run_sensor_refuses_another_groups_claimer(watch: Watch) -> None:
    """A claimer of another group would revoke nothing, so it is an error."""
    sensor, _ = build_run_failure_sensors(group=GROUP)
    other = ClaimerResource(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9"), group="other")
    run = watch.instance.create_run_for_job(JOB, status=dg.DagsterRunStatus.FAILURE)
    event = dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, JOB.name)
    with (
        dg.build_run_status_sensor_context(
            sensor.name, event, watch.instance, run, resources={"claimer": other}
        ) as context,
        pytest.raises(ConfigurationError, match=f"is for group '{GROUP}', but its claimer is for group 'other'"),
    ):
        sensor(context)


def test_a_groups_name_becomes_one_that_dagster_allows() -> None:
    """Characters that Dagster refuses become underscores, and a digest is added unless only dashes were replaced."""
    name = build_stale_claim_sensor(JOB, group="etl.günter 1").name
    assert re.fullmatch("etl_g_nter_1_[0-9a-f]{8}_stale_claims", name)
    assert build_stale_claim_sensor(JOB, group="etl_1").name == "etl_1_stale_claims"
    assert build_stale_claim_sensor(JOB, group="etl-2").name == "etl_2_stale_claims"


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")  # Dagster warns when it copies a sensor
def test_groups_whose_names_differ_in_dots_and_dashes_have_sensors_of_their_own() -> None:
    """All sensors of these groups fit into one deployment; so do those of such topics."""
    groups = ("a.b", "a-b", "a..b")
    sensors = [build_topic_sensor(each) for each in groups]
    for group in groups:
        sensors += [
            build_stale_claim_sensor(JOB, group=group),
            build_lag_sensor(JOB, group=group, max_lag_records=1),
            *build_run_failure_sensors(group=group),
        ]
    resources = dict.fromkeys(("claimer", "rationalizer"), dg.ResourceDefinition.none_resource())
    dg.Definitions.validate_loadable(dg.Definitions(sensors=sensors, resources=resources))
    assert {"a_b_messages", "a_b_stale_claims", "a_b_lag", "a_b_failed_runs"} <= {sensor.name for sensor in sensors}


def test_sensors_of_two_groups_that_get_one_name_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Dagster's own error only has the sensor's name, so the library logs both groups.

    Building a sensor of one group again is not logged.
    """
    build_lag_sensor(JOB, group="one-name", max_lag_records=1)
    build_lag_sensor(JOB, group="one-name", max_lag_records=2)
    build_stale_claim_sensor(JOB, group="one_name")
    build_lag_sensor(JOB, group="one_name", max_lag_records=1, name="another")
    assert caplog.messages == []
    build_lag_sensor(JOB, group="one_name", max_lag_records=1)
    (report,) = caplog.messages
    assert report.startswith("the sensors of 'one-name' and of 'one_name' are both named one_name_lag")


@pytest.mark.slow
def test_the_interval_is_that_of_the_group(watch: Watch) -> None:
    """The heartbeat interval is that of the group's settings, not a setting of the sensor."""
    watch.die()
    assert watch.scene.key().last_beat_ms + 2 * HI_MS < watch.scene.clock.wall_ms()
    assert len(watch.requests()) == 1


# Ranges of partitions (protocol.md, section 8.4)


def _range_settings(watch: Watch) -> GroupSettings:
    return GroupSettings(HI_MS, RuleSet.NATIVE, watch.mode, ("ranges",))


def _begin_ranges(watch: Watch) -> None:
    """Let a group that enables ranges name the topic and start at 0, at the sensor's present time."""
    scene = watch.scene
    scene.clock.advance(_now_ms() - scene.clock.wall_ms())
    member = Member(GROUP, "first", "first.0")
    claimer = Claimer(
        Rationalizer(scene.log(), clock=scene.clock), member, TOPIC, _range_settings(watch), clock=scene.clock
    )
    claimer.ensure_group_settings()
    claimer.claim(range(3))
    claimer.name_data_topic(scene.data.describe(TOPIC).topic_id)
    claimer.beat(dict.fromkeys(range(3), 0))
    claimer.release()


def _hold(watch: Watch, wanted: dict[int, tuple[int, int]], run_id: str = RUN, *, plans: bool = True) -> RangeClaimer:
    """Let a run hold a range of each of some partitions, planned by default."""
    scene, member = watch.scene, Member(GROUP, "c", new_instance_id(run_id))
    rationalizer = Rationalizer(scene.log(), clock=scene.clock)
    claimer = RangeClaimer(rationalizer, member, TOPIC, _range_settings(watch), clock=scene.clock)
    claimer.ensure_group_settings()
    assert len(claimer.claim(wanted)) == len(wanted)
    if plans:
        claimer.plan({number: end for number, (_, end) in wanted.items()})
    return claimer


def _seen(request: dg.RunRequest) -> list[tuple[int, int, int]]:
    return [(one["partition"], one["offset"], one["plan_end"]) for one in _config(request)["seen"]]


def test_planned_ranges_without_live_owner_are_requested_with_their_bounds(watch: Watch) -> None:
    """Stale and released plans are requested once each; claims without a plan are not.

    Two ranges of a partition need two runs, because a batch holds one of them.
    """
    _begin_ranges(watch)
    _hold(watch, {0: (0, 3), 1: (0, 4)})
    _hold(watch, {0: (5, 8)})
    _hold(watch, {0: (8, 10), 2: (0, 10)}, plans=False)
    assert watch.skipped() == "nothing to redo"
    watch.scene.wait_until_stale()
    _hold(watch, {2: (3, 7)}).release()
    _hold(watch, {2: (7, 9)})
    first, second = watch.requests()
    assert _seen(first) == [(0, 0, 3), (1, 0, 4), (2, 3, 7)]
    assert _seen(second) == [(0, 5, 8)]
    assert _config(second)["partitions"] == "0"
    assert _config(second)["seen"][0]["plan_attempts"] == 0


def test_a_range_that_was_redone_is_not_requested_again(watch: Watch) -> None:
    """A successful run makes a range done, even above the group's offset.

    After a failure the range is requested alone.
    """
    _begin_ranges(watch)
    _hold(watch, {0: (5, 8), 1: (5, 8)}).release()
    (request,) = watch.requests()
    _hold(watch, {0: (5, 8)}).commit({0: 8})
    _hold(watch, {1: (5, 8)}).release()
    watch.was_requested(request, FAILURE)
    (again,) = watch.requests()
    assert _seen(again) == [(1, 5, 8)]
    watch.settings["max_attempts"] = 1
    skipped = watch.skipped()
    assert "orders/1: plan [5, 8), no owner: no more runs after 2 attempts" in skipped
    assert "position reset" not in skipped, "it would skip the offsets before the range too"


def test_ranges_that_a_failed_run_held_are_revoked(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """All ranges of the run are revoked, two of a partition included, but none of another run."""
    _begin_ranges(watch)
    _hold(watch, {0: (0, 3), 1: (0, 4)})
    _hold(watch, {0: (3, 5)}, plans=False)
    other = _hold(watch, {0: (5, 8)}, FINE)
    _run(watch)
    report = dead_runs.report()
    assert report.startswith(
        f"revoked the claims of run {RUN}: {TOPIC}/0: plan [0, 3), client 'c' silent for 0 s; {TOPIC}/0: no"
    )
    assert f"{TOPIC}/1: plan [0, 4)" in report
    assert [(range_.start, range_.phase, range_.owner is None) for range_ in watch.scene.key(0).ranges] == [
        (0, "planned", True),
        (5, "planned", False),
    ]
    other.beat()
    assert dead_runs.report() == f"run {RUN} held nothing of group '{GROUP}'"


def test_ranges_that_cannot_be_revoked_are_named(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """The report has the bounds of the ranges that remain."""
    _begin_ranges(watch)
    _hold(watch, {1: (5, 8)})
    _run(watch)
    RefusingLog.refused = 100
    assert dead_runs.report().startswith(f"could not revoke the claims of run {RUN}: {TOPIC}/1: plan [5, 8)")
    assert RefusingLog.appended == 3


def _drop_ahead(watch: Watch, status: dg.DagsterRunStatus = FAILURE) -> RangeClaimer:
    """Let an at-most-once run commit a range above the group's offset, and die before it processes it."""
    watch.mode = DeliveryMode.AT_MOST_ONCE
    _begin_ranges(watch)
    _run(watch, status=status)
    claimer = _hold(watch, {0: (5, 8), 1: (5, 8)})
    _announce(watch, {0: claimer.claims[0].epoch}, 8, start=5)
    assert claimer.commit_before_processing({0: 8}) == {0}
    return claimer


def test_drops_ahead_of_the_offset_are_reported(watch: Watch) -> None:
    """A committed range of a dead at-most-once run counts, although the offset has not reached it."""
    _drop_ahead(watch).release([1])
    watch.scene.pause(3_600)
    result = watch.tick()
    assert f"{TOPIC}/0: possibly dropped [5, 8)" in str(result.skip_reason and result.skip_reason.skip_message)
    assert _dropped(result) == [3]


def test_drops_are_not_hidden_by_a_later_range_below_them(watch: Watch) -> None:
    """A later announcement of a lower range does not reset the dropped one."""
    _drop_ahead(watch).release([1])
    _run(watch, FINE, SUCCESS)
    later = _hold(watch, {0: (0, 5)}, FINE)
    _announce(watch, {0: later.claims[0].epoch}, 5, run_id=FINE)
    later.commit_before_processing({0: 5})
    _finish(watch, {0: later.claims[0].epoch}, run_id=FINE)
    assert _dropped(watch.tick()) == [3]


def test_the_other_sensor_reports_drops_ahead_of_the_offset_too(watch: Watch, dead_runs: DeadRunWatch) -> None:
    """The run's claims are revoked, and its committed range is reported as possibly dropped."""
    _drop_ahead(watch)
    result = dead_runs.react(DeliveryMode.AT_MOST_ONCE)
    assert isinstance(result, dg.SensorResult)
    assert f"{TOPIC}/1: plan [5, 8)" in str(result.skip_reason)
    assert _dropped(result) == [3]


def test_a_run_that_holds_a_range_is_at_work(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run holds a live range it has dropped nothing; when the range is stale, the run counts as ended."""
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.TIME_TO_RECORD_S", 0)
    _drop_ahead(watch, STARTED)
    for _ in range(2):
        assert _dropped(watch.tick()) == []
    monkeypatch.setattr("marshal_dagster.sensors._dropped_ranges.TIME_TO_RECORD_S", 3_600)
    watch.scene.wait_until_stale()
    watch.scene.pause(0)  # any record advances the log's time
    assert _dropped(watch.tick()) == [3]
