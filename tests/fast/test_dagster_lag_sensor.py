"""Check the lag sensor on in-memory topics: when it requests runs, how many, and what its ticks report."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import dagster as dg
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ConfigurationError,
    DataTopicChangedError,
    IncompleteLogError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Key, Phase, Range
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.sensors._lag_reader import GroupPositions, _position, read_lag
from marshal_dagster.sensors.lag import LagCursor, build_lag_sensor
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import GROUP, TOPIC, DataTopics, Scene

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

OP = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
JOB = build_claimed_batch_job(OP, name="go_on")
STARTED, QUEUED = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.QUEUED
SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class StampedTopics(DataTopics):
    """Data topics with old messages only, except those of a partition from its offset in `young` on."""

    def __init__(self) -> None:
        super().__init__()
        self.young: dict[int, int] = {}
        self.future: dict[int, int] = {}
        """By partition, the first record with a time far in the future."""
        self.written_ms = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release nothing."""

    def offsets_at(self, topic: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset with this time or a later one."""
        self.describe(topic)
        if at_ms <= self.written_ms:
            return dict.fromkeys(partitions, 0)
        found = dict(self.future)
        if at_ms <= _now_ms():
            found |= {number: min(at, found.get(number, at)) for number, at in self.young.items()}
        return {partition: found[partition] for partition in partitions if partition in found}


@dataclass(slots=True)
class Watch:
    """A scene with a lag sensor on it."""

    scene: Scene
    data: StampedTopics
    instance: dg.DagsterInstance
    settings: dict[str, Any] = field(default_factory=lambda: {"max_lag_records": 20})
    cursor: str | None = None

    def tick(self) -> dg.SensorResult:
        """Evaluate the sensor once, with the cursor of the last evaluation."""
        rationalizer, data = Rationalizer(self.scene.log(), clock=self.scene.clock), self.data

        class InMemory(RationalizerResource):
            def rationalizer(self) -> Rationalizer:
                return rationalizer

            def open_data(self) -> "Topics":
                return cast("Topics", data)

        sensor = build_lag_sensor(JOB, **{"group": GROUP, **self.settings})
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources={"rationalizer": InMemory(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"))},
        )
        result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result

    def requests(self) -> Sequence[dg.RunRequest]:
        """Evaluate the sensor once and return the runs that it requests."""
        return self.tick().run_requests or ()

    def skipped(self) -> str:
        """Evaluate the sensor once and return why it requests no run."""
        result = self.tick()
        assert not result.run_requests
        assert result.skip_reason is not None
        return str(result.skip_reason.skip_message)

    def was_requested(self, request: dg.RunRequest, status: dg.DagsterRunStatus, *, ago_s: int = 0) -> str:
        """Store the requested run with the status `status`, as requested `ago_s` seconds ago, and return its id."""
        tags = {**request.tags, "marshal/asked_at": str(int(time.time()) - ago_s)}
        return self.run(status, tags)

    def run(self, status: dg.DagsterRunStatus, tags: dict[str, str] | None = None) -> str:
        """Store a run of the job in Dagster and return its id."""
        location = InProcessCodeLocationOrigin(LoadableTargetOrigin(python_file="of_a_test.py"))
        origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "all"), JOB.name)
        return self.instance.create_run_for_job(JOB, tags=tags, status=status, remote_job_origin=origin).run_id

    def hold(self, partitions: tuple[int, ...], run_id: str = "another", **limits: Any) -> None:  # noqa: ANN401
        """Let a live member hold partitions."""
        delivery = self.scene.delivery()
        delivery.run_id = run_id
        self.scene.batch(delivery, partitions=partitions, **limits).__enter__()


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Yield a topic of three partitions with ten messages each; the log's clock shows the present time."""
    data = StampedTopics()
    scene = Scene(clock=ManualClock(_now_ms()), data=data)
    data.make(messages=10)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Watch(scene, data, instance)


# Requests for runs


def test_more_unread_records_than_the_threshold_are_requested(watch: Watch) -> None:
    """One record more than the limit causes a request; at the limit, the tick reports the lag."""
    watch.settings = {"max_lag_records": 30}
    reported = "30 records are unread, 30 of them in 3 unheld partitions; the limit is 30"
    assert watch.skipped() == reported
    watch.data.append(0, 1)
    (request,) = watch.requests()
    assert request.job_name == "go_on"
    named = {name: request.tags[name] for name in ("marshal/group", "marshal/topic", "marshal/reason")}
    assert named == {"marshal/group": GROUP, "marshal/topic": TOPIC, "marshal/reason": "lag"}
    assert request.run_config == {}, "the run has the job's own config"


def test_a_group_that_the_log_does_not_have_is_reported(watch: Watch) -> None:
    """All records are unread for it, so it may be a new group, or its name is misspelt."""
    watch.settings = {"group": "other", "max_lag_records": 40}
    assert "has no group" not in watch.skipped()
    watch.hold((0,))
    assert watch.skipped().endswith(f"; the log has no group 'other'; it has {GROUP!r}")


def test_what_was_read_counts_no_more(watch: Watch) -> None:
    """Unread records are those between the group's offset and the end, except those that retention deleted."""
    watch.settings = {"max_lag_records": 0}
    watch.scene.work(watch.scene.delivery(), max_records=6)
    watch.data.retain_from(0, 7)
    assert len(watch.requests()) == 1
    watch.settings = {"max_lag_records": 100}
    watch.cursor = None
    assert watch.skipped().startswith("19 records are unread")
    watch.settings = {"max_lag_records": 0}
    watch.scene.drain(watch.scene.delivery())
    watch.cursor = None
    assert watch.skipped().startswith("0 records are unread")


def test_an_open_transaction_is_not_waited_for(watch: Watch) -> None:
    """Records of an open transaction cannot be read yet, so they do not count as lag."""
    for partition in range(3):
        watch.data.hold(partition, 0)
    watch.settings = {"max_lag_records": 0, "max_lag_age_s": 1}
    assert watch.skipped().startswith("0 records are unread")


def test_an_old_unread_record_is_requested(watch: Watch) -> None:
    """One old record is enough. The broker returns the first offset with a recent time; records before it are old."""
    watch.settings = {"max_lag_age_s": 600}
    watch.data.young = dict.fromkeys(range(3), 4)
    watch.scene.work(watch.scene.delivery(), max_records=12)
    assert [watch.scene.key(n).offset for n in range(3)] == [4, 4, 4]
    assert "0 partitions have an unread record older than 600 s" in watch.skipped()
    watch.data.young = {0: 4, 1: 5, 2: 4}
    assert len(watch.requests()) == 1
    watch.cursor = None
    watch.data.young = {0: 4, 2: 4}
    assert len(watch.requests()) == 1, "partition 1 has no recent record, so all are old"


def test_the_age_is_counted_back_from_now(watch: Watch) -> None:
    """No record is older than a limit ten seconds above the records' age."""
    watch.data.written_ms = _now_ms() - 60_000
    watch.settings = {"max_lag_age_s": 70}
    assert "0 partitions have an unread record older than 70 s" in watch.skipped()
    watch.settings = {"max_lag_age_s": 50}
    assert len(watch.requests()) == 1


def test_a_time_in_the_future_hides_no_old_record(watch: Watch) -> None:
    """After a record with a time in the future, the age of the records is unknown.

    They count as old, and the tick names that record's partition and offset.
    """
    watch.settings = {"max_lag_age_s": 600}
    watch.scene.work(watch.scene.delivery(), max_records=12)
    watch.data.young = {0: 4, 1: 2, 2: 4}
    assert "0 partitions" in watch.skipped(), "partitions read up to offset 4 have no old record"
    watch.data.future = {1: 2, 2: 7}
    assert len(watch.requests()) == 1
    watch.hold((0, 1, 2))
    reported = watch.skipped()
    assert "1 partitions have an unread record older than" in reported
    assert "count as old, because their age is unknown: partition 1, offset 2. Correct the sender's clock" in reported


@pytest.mark.parametrize("start", [0, 3])
def test_old_records_before_one_with_a_time_in_the_future_are_found(watch: Watch, start: int) -> None:
    """The age of unread records at lower offsets is known."""
    watch.settings = {"max_lag_age_s": 600}
    if start:
        watch.scene.work(watch.scene.delivery(), max_records=9)
    watch.data.young, watch.data.future = dict.fromkeys(range(3), 4), {1: 4}
    assert len(watch.requests()) == 1


def test_a_missing_topic_fails_the_tick_unless_allowed(watch: Watch) -> None:
    """If the name is wrong, no run would ever be requested. An option allows a topic that is created later."""
    watch.data.delete()
    with pytest.raises(TopicNotFoundError, match=f"topic '{TOPIC}' does not exist"):
        watch.skipped()
    watch.settings["allow_missing_topic"] = True
    assert watch.skipped() == f"topic '{TOPIC}' does not exist"


def test_a_data_cluster_that_is_down_fails_the_tick(watch: Watch) -> None:
    """The tick fails with the error and keeps its cursor."""
    watch.data.is_down = True
    with pytest.raises(UnavailableError, match="the data cluster does not answer"):
        watch.tick()
    assert watch.cursor is None


def test_a_topic_that_was_re_created_fails_the_tick(watch: Watch) -> None:
    """Runs would fail until an operator sets the position, so the tick requests none, and fails itself."""
    watch.settings = {"max_lag_records": 0}
    watch.scene.work(watch.scene.delivery())
    watch.data.make(messages=5)
    named = "not counted because the topic was re-created: partitions 0, 1, 2"
    with pytest.raises(DataTopicChangedError, match=f"{named}.*marshal-dagster position reset {GROUP} {TOPIC}"):
        watch.tick()


# Hysteresis


def test_once_above_it_asks_until_the_lag_is_at_the_lower_threshold(watch: Watch) -> None:
    """Between the two limits, a sensor that has fired continues, and one that has not fired requests nothing."""
    watch.settings = {"max_lag_records": 20, "rearm_records": 5}
    watch.scene.work(watch.scene.delivery(), max_records=12)
    assert watch.skipped().endswith("the limit is 20"), "18 records are unread"
    for partition in range(3):
        watch.data.append(partition, 1)
    (first,) = watch.requests()
    watch.was_requested(first, SUCCESS)
    watch.scene.work(watch.scene.delivery(), max_records=12)
    (second,) = watch.requests()
    assert second.run_key != first.run_key, "9 records are unread"
    watch.was_requested(second, SUCCESS)
    watch.scene.work(watch.scene.delivery(), max_records=4)
    assert watch.skipped().endswith("the limit is 5"), "5 records are unread"
    watch.data.append(0, 15)
    assert watch.skipped().endswith("the limit is 20"), "20 records are unread, and the sensor is armed again"
    watch.data.append(0, 1)
    assert len(watch.requests()) == 1


def test_the_lower_threshold_is_half_if_none_is_given(watch: Watch) -> None:
    """This is true for the number of records and for their age."""
    watch.settings = {"max_lag_records": 20, "max_lag_age_s": 600}
    watch.data.written_ms = _now_ms() - 1_000
    assert len(watch.requests()) == 1
    watch.scene.work(watch.scene.delivery(), max_records=21)
    reported = watch.skipped()
    assert "the limit is 10;" in reported
    assert "older than 300 s" in reported


def test_either_threshold_is_enough_and_both_must_be_met_again(watch: Watch) -> None:
    """Many recent records or one old record cause a request.

    The sensor is armed again when neither limit is exceeded.
    """
    watch.settings = {"max_lag_records": 29, "max_lag_age_s": 600}
    watch.data.written_ms = _now_ms()
    assert len(watch.requests()) == 1
    watch.data.written_ms = 0
    watch.scene.work(watch.scene.delivery(), max_records=27)
    assert len(watch.requests()) == 1, "3 records are unread, and old"
    watch.scene.drain(watch.scene.delivery())
    assert watch.skipped().startswith("0 records are unread")
    assert LagCursor.read(watch.cursor) == LagCursor()


def test_while_others_are_at_work_nothing_is_armed_again(watch: Watch) -> None:
    """Held partitions are still unread, so a sensor that has fired continues if they are released unread."""
    watch.settings = {"max_lag_records": 29, "rearm_records": 0}
    assert len(watch.requests()) == 1
    watch.hold((0, 1, 2))
    reported = "30 records are unread, 0 of them in 0 unheld partitions; the limit is 0; the members that"
    assert watch.skipped().startswith(reported)
    watch.scene.wait_until_stale()
    watch.scene.pause(-60)
    assert len(watch.requests()) == 1


# The number of runs


def test_what_others_hold_is_not_requested(watch: Watch) -> None:
    """The owner of a held partition will read the rest of it."""
    watch.hold((0, 1))
    assert watch.skipped().startswith("30 records are unread, 10 of them in 1 unheld partitions")
    watch.settings = {"max_lag_records": 9, "max_runs_per_tick": 5}
    assert len(watch.requests()) == 1


def test_never_more_runs_than_unclaimed_partitions(watch: Watch) -> None:
    """The limit `max_runs_per_tick` holds too; each request has its own run key."""
    watch.settings = {"max_lag_records": 5, "max_runs_per_tick": 10}
    keys = [request.run_key for request in watch.requests()]
    assert (len(keys), len(set(keys))) == (3, 3)
    watch.settings["max_runs_per_tick"] = 2
    assert len(watch.requests()) == 2
    watch.hold((0, 1))
    assert len(watch.requests()) == 1


@pytest.mark.parametrize("status", [STARTED, QUEUED, dg.DagsterRunStatus.NOT_STARTED])
def test_runs_that_hold_nothing_yet_are_counted(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """Runs that hold nothing may still claim unread partitions, whether the sensor requested them or not.

    Runs that hold partitions count by these.
    """
    watch.settings = {"max_lag_records": 5, "max_runs_per_tick": 3}
    (request, *_) = watch.requests()
    run_id = watch.was_requested(request, status)
    assert len(watch.requests()) == 2
    of_the_schedule = watch.run(status)
    assert len(watch.requests()) == 1
    watch.settings["max_runs_per_tick"] = 2
    reported = watch.skipped()
    assert "runs of 'go_on' are in progress and hold nothing yet: " in reported
    assert run_id in reported
    assert of_the_schedule in reported
    watch.hold((0,), run_id)
    assert len(watch.requests()) == 1


def test_a_run_that_vanished_blocks_for_a_bounded_time(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A started run that holds nothing is ignored after a while; a queued run is waited for."""
    (request,) = watch.requests()
    watch.was_requested(request, STARTED)
    assert "in progress" in watch.skipped()
    monkeypatch.setattr("marshal_dagster.sensors._run_history.OPEN_RUN_PATIENCE_S", -60)
    (again,) = watch.requests()
    assert again.run_key != request.run_key
    watch.was_requested(again, QUEUED)
    assert "in progress" in watch.skipped()


@pytest.mark.parametrize("status", [SUCCESS, FAILURE])
def test_after_runs_that_moved_nothing_it_waits(watch: Watch, status: dg.DagsterRunStatus) -> None:
    """The pause doubles each time; there is none if a position has moved."""
    for ago_s in (1_000, 61):
        (request,) = watch.requests()
        watch.was_requested(request, status, ago_s=ago_s)
    (request,) = watch.requests()
    watch.was_requested(request, status, ago_s=60)
    reported = watch.skipped().split("the last run moved no position, next request in ")[1]
    assert 50 <= int(reported.split(" s")[0]) <= 60
    watch.scene.work(watch.scene.delivery(), max_records=3)
    assert len(watch.requests()) == 1


# What the sensor skips


def test_a_paused_group_is_skipped_with_the_time_left(watch: Watch) -> None:
    """The tick shows which member paused the group, and for how long."""
    assert len(watch.requests()) == 1
    watch.scene.pause(100, "ops.7")
    reported = watch.skipped()
    assert reported.startswith(f"group '{GROUP}' is paused by ops, for ")
    assert 90 <= int(reported.split("for ")[1].split(" s")[0]) <= 101
    assert LagCursor.read(watch.cursor).is_draining, "it continues after the pause"


def test_a_log_that_can_only_be_observed_fails_the_tick(watch: Watch) -> None:
    """After retention has cut the log no member can claim until an operator recovers it."""
    watch.scene.work(watch.scene.delivery(), max_records=3)
    for partition in range(4):
        watch.scene.broker.retain_from(partition, 1)
    with pytest.raises(IncompleteLogError, match="marshal-dagster recover"):
        watch.tick()


def test_plans_that_were_tried_too_often_are_left_to_a_person(watch: Watch) -> None:
    """Runs skip these plans, so the tick names them and does not count them."""
    watch.settings = {"max_lag_records": 20, "max_attempts": 2}
    for _ in range(3):
        watch.hold((0,), max_records=3)
        watch.scene.wait_until_stale()
    assert watch.scene.key(0).plan_attempts == 2
    assert "20 records are unread, 20 of them in 2 unheld partitions" in watch.skipped()
    assert watch.skipped().endswith("not counted because their plan failed too many times: partitions 0")


@pytest.mark.slow
def test_a_tick_that_finds_only_exhausted_plans_fails(watch: Watch) -> None:
    """No run would be requested any more, so the tick names the plan and the command that retries it."""
    watch.settings = {"max_lag_records": 20, "max_attempts": 2}
    for _ in range(3):
        watch.hold((0,), max_records=3)
        watch.scene.wait_until_stale()
    watch.scene.drain(watch.scene.delivery(), partitions=(1, 2))
    with pytest.raises(dg.Failure, match=rf"{TOPIC}/0 \[0, 3\) .* was tried 3 times.*retry {GROUP} {TOPIC} 0"):
        watch.tick()
    watch.data.append(1, 21)
    assert len(watch.requests()) == 1, "runs can process the other partitions"


@pytest.mark.slow
def test_an_exhausted_range_fails_the_tick_too(watch: Watch) -> None:
    """In a group that claims ranges, the offset stays before such a range."""
    watch.settings = {"max_lag_records": 20, "max_attempts": 2}
    for _ in range(3):
        delivery = watch.scene.delivery(ranges=True)
        watch.scene.batch(delivery, partitions=(0,), max_records=3).__enter__()
        watch.scene.wait_until_stale()
    watch.scene.drain(watch.scene.delivery(ranges=True), max_attempts=2)
    with pytest.raises(dg.Failure, match=rf"{TOPIC}/0 \[0, 3\) .* was tried 3 times.*retry {GROUP} {TOPIC} 0"):
        watch.tick()


@pytest.mark.slow
def test_ranges_done_after_an_exhausted_one_are_progress(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exhausted range keeps the group's offset where it is, although runs process the ranges after it."""
    watch.settings = {"max_lag_records": 0}

    def stands(*done: Range) -> None:
        key = Key(offset=0, ranges=(Range(0, 2, Phase.PLANNED, attempts=5), *done))
        found = GroupPositions({0: _position(key, is_claimed=False, max_attempts=5)}, ())
        monkeypatch.setattr("marshal_dagster.sensors.lag.positions_of", lambda *_, **__: found)

    stands()
    (first,) = watch.requests()
    watch.was_requested(first, SUCCESS)
    assert "moved no position" in watch.skipped()
    stands(Range(2, 4, Phase.DONE))
    (second,) = watch.requests()
    assert second.run_key != first.run_key


def test_ranges_that_are_done_ahead_or_worn_out_are_not_unread(watch: Watch) -> None:
    """The first unread offset comes after the ranges that are adjacent to the group's offset."""
    planned = Range(0, 2, Phase.PLANNED, attempts=5)
    key = Key(offset=0, ranges=(planned, Range(2, 4, Phase.DONE), Range(7, 9, Phase.DONE)))
    positions = GroupPositions({0: _position(key, is_claimed=False, max_attempts=5)}, ())
    first, *_ = read_lag(cast("Topics", watch.data), TOPIC, positions, None).unread
    assert (first.partition, first.start, first.records) == (0, 4, 4)
    positions = GroupPositions({0: _position(key, is_claimed=False, max_attempts=6)}, ())
    first, *_ = read_lag(cast("Topics", watch.data), TOPIC, positions, None).unread
    assert (first.start, first.records) == (0, 6)


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]], ids=str)
def test_deleted_runs_bring_no_key_back(watch: Watch, deleted: list[int]) -> None:
    """Dagster deletes old runs, and never starts a run with the run key of a run that it still has."""
    runs: list[tuple[str, str | None]] = []
    for ago_s in (9_000, 8_000, 7_000):
        (request,) = watch.requests()
        runs.append((watch.was_requested(request, FAILURE, ago_s=ago_s), request.run_key))
    for number in deleted:
        watch.instance.delete_run(runs[number][0])
    (request,) = watch.requests()
    assert request.run_key not in {key for number, (_, key) in enumerate(runs) if number not in deleted}


# Cursor


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "damaged",
        '{"version": 7, "is_draining": true}',
        '{"is_draining": "yes"}',
        '{"is_draining": true, "more": [1]}',
    ],
)
def test_a_lost_cursor_asks_for_nothing_twice(watch: Watch, text: str | None) -> None:
    """An older, newer or damaged cursor stops nothing.

    The sensor repeats the run key until the run exists, and then requests nothing.
    """
    (request,) = watch.requests()
    watch.cursor = text
    assert [each.run_key for each in watch.requests()] == [request.run_key]
    watch.was_requested(request, STARTED)
    watch.cursor = text
    assert "in progress" in watch.skipped()
    assert LagCursor.read(watch.cursor) == LagCursor(is_draining=True)


# Building and its errors


@dg.job
def _nothing() -> None: ...


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({}, "has no limit: pass max_lag_records, max_lag_age_s, or both"),
        ({"max_lag_records": -1}, "max_lag_records is -1; it must be 0 or more"),
        ({"max_lag_age_s": float("nan")}, "max_lag_age_s is nan; it must be 0 or more"),
        ({"max_lag_records": 5, "rearm_records": 6}, "rearm_records is 6; it must be between 0 and max_lag_rec"),
        ({"max_lag_records": 5, "rearm_s": 1}, "rearm_s is 1, but max_lag_age_s is not given"),
        ({"max_lag_records": 5, "max_runs_per_tick": 0}, "max_runs_per_tick is 0; it must be at least 1"),
        ({"max_lag_records": 5, "group": "a/b"}, "group 'a/b' cannot be a name"),
        ({"max_lag_records": 5, "job": _nothing}, "job '_nothing' has 0 claimed-batch ops"),
    ],
)
def test_settings_that_make_no_sensor_are_refused(settings: dict[str, Any], reported: str) -> None:
    """The error is raised when the sensor is built; it names the setting and shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=reported):
        build_lag_sensor(**{"job": JOB, "group": GROUP, **settings})


def test_the_modes_make_no_difference(watch: Watch) -> None:
    """Records that an at-most-once group has committed count as read."""
    watch.settings = {"max_lag_records": 0}
    watch.scene.drain(watch.scene.delivery(DeliveryMode.AT_MOST_ONCE))
    assert watch.skipped().startswith("0 records are unread")
