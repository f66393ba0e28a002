"""Metrics and log lines of a real op on the log in memory, read back with OpenTelemetry's SDK and Python's logging."""

import json
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from marshal_dagster.assets.topics import topic_progress
from marshal_dagster.batches import BatchSession
from marshal_dagster.coordination.claimer import Member
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode, RevokingClaim
from marshal_dagster.protocol.state import Key
from marshal_dagster.protocol.world import World
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.announcements import announcer
from marshal_dagster.sensors.lag import build_lag_sensor
from marshal_dagster.telemetry import log_lines, metrics
from marshal_dagster.telemetry.observer import Telemetry
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Scene
from tests.conditions import WITHIN_S
from tests.fast.test_dagster_ops import do_without_spark
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import RANGES, Site
from tests.real.kill_points import Side

AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE = DeliveryMode
SECRET = "canary-5f1d"


@dataclass(slots=True)
class Stand:
    """An op with a real resource, with the Kafka and Spark of a scene."""

    scene: Scene
    mode: DeliveryMode = EFFECTIVELY_ONCE
    ranges: bool = False
    log: Any = None
    process: Callable[[Any], Any] = lambda frame: frame

    def run(self, instance: dg.DagsterInstance | None = None, **settings: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401
        """Run the op. `settings` are those of the op, and the loggers of the job."""
        stand = self

        class SceneClaimer(ClaimerResource):
            def _make_delivery(self, context: Any, at_end: Callable[..., object]) -> BatchSession:  # noqa: ANN401
                delivery = stand.scene.delivery(stand.mode, log=stand.log, ranges=stand.ranges)
                delivery.announce = announcer(context)
                at_end(delivery.close)
                return delivery

        class Session:
            @property
            def spark_session(self) -> object:
                time.sleep(0.001)
                return object()

        def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - stands for a data frame
            rows = self.process(frame)
            return rows if self.mode is EFFECTIVELY_ONCE else None

        loggers = settings.pop("logger_defs", {})
        sink = self.scene.sink if self.mode is EFFECTIVELY_ONCE else None
        work = build_claimed_batch_op(process, name="work", topic=TOPIC, sink=sink, spark_key="spark", **settings)
        connection = KafkaConnectionConfig(
            bootstrap_servers="127.0.0.1:1", client_settings={"client.rack": SECRET}, timeout_s=1
        )
        claimer = SceneClaimer(connection=connection, group=GROUP, delivery=self.mode.value)
        spark = dg.ResourceDefinition.hardcoded_resource(Session())

        @dg.job(resource_defs={"claimer": claimer.get_resource_definition(), "spark": spark}, logger_defs=loggers)
        def job() -> None:
            work()

        config = dg.RunConfig(loggers={name: {"config": {"log_level": "INFO"}} for name in loggers})
        return job.execute_in_process(config, instance=instance, raise_on_error=False)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Return an op for a topic with three partitions and ten messages in each. A list replaces Spark's data frame."""
    scene = Scene()
    scene.data.make(messages=10)
    do_without_spark(monkeypatch, scene)
    return Stand(scene)


Point = tuple[str, frozenset[tuple[str, object]]]


@dataclass(slots=True)
class Measured:
    """The measurements by instrument and attributes, without group and topic, which are always present."""

    reader: InMemoryMetricReader
    provider: MeterProvider = field(init=False)
    flushed_ms: list[float] = field(default_factory=list)
    _found: dict[Point, Any] = field(default_factory=dict)
    """Points of earlier reads, because an older SDK returns a gauge's value only once."""

    def __post_init__(self) -> None:
        """Create the provider, and record its flushes."""
        stand = self

        class Provider(MeterProvider):
            def force_flush(self, timeout_millis: float = 10_000) -> bool:
                stand.points()
                stand.flushed_ms.append(timeout_millis)
                return True

        self.provider = Provider([self.reader])

    def points(self) -> dict[Point, Any]:
        """Return the data points."""
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                assert scope.scope.name == "marshal_dagster"
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        attributes = dict(point.attributes or {})
                        assert (attributes.pop("group"), attributes.pop("topic")) == (GROUP, TOPIC)
                        self._found[metric.name, frozenset(attributes.items())] = point
        return self._found

    def values(self, name: str) -> dict[Any, Any]:
        """Return the values of a counter or gauge, or the counts of a histogram, by attribute values."""
        found = {}
        for (of, attributes), point in self.points().items():
            if of == name:
                values = tuple(value for _, value in sorted(attributes))
                number = point.count if isinstance(point, HistogramDataPoint) else point.value
                found[values[0] if len(values) == 1 else values] = number
        return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    """Turn OpenTelemetry on, with a separate provider."""
    measured = Measured(InMemoryMetricReader())
    monkeypatch.setattr(api, "get_meter_provider", lambda: measured.provider)
    yield measured
    measured.provider.shutdown()


def _revoke(scene: Scene, partition: int = 0) -> None:
    owner = scene.key(partition).owner
    assert owner is not None
    assert owner.epoch is not None
    scene.about(RevokingClaim, "ops.1", partition, epoch=owner.epoch)


def _revoked_before_commit(stand: Stand) -> None:
    """Revoke partition 0 after the op has processed, just before it sends its commit."""
    log = stand.log = FaultyLog(stand.scene.log())

    def revoke() -> None:
        log.before_append = lambda: None
        _revoke(stand.scene)

    stand.process = lambda _: setattr(log, "before_append", revoke)


def _claim_as_another(scene: Scene) -> None:
    scene.about(ClaimingPartition, "other.1")


# Metrics


@pytest.mark.slow
def test_a_run_is_measured(stand: Stand, measured: Measured) -> None:
    """Three batches of three partitions count each claim, commit, batch, offset and phase once, and record the lag."""
    assert stand.run(max_records=12).success

    assert measured.values("marshal.claims") == {"won": 9}
    assert measured.values("marshal.commits") == {"committed": 9}
    assert measured.values("marshal.records.refused") == {}
    assert measured.values("marshal.batches") == {"committed": 3, "drained": 1}
    assert measured.values("marshal.offsets") == {"committed": 30}
    assert measured.values("marshal.phase.duration") == {
        "claim": 3,
        "start_spark": 1,
        "read": 3,
        "process": 3,
        "write": 3,
        "commit": 3,
    }
    assert measured.values("marshal.batch.lag") == {(): 0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", DeliveryMode)
@pytest.mark.parametrize("ranges", [False, True])
def test_a_run_is_measured_in_each_mode(stand: Stand, measured: Measured, mode: DeliveryMode, ranges: bool) -> None:
    """In each mode, with and without ranges, each partition is committed once, and the lease left is recorded."""
    stand.mode, stand.ranges = mode, ranges
    assert stand.run().success

    assert measured.values("marshal.commits") == {"committed": 3}
    assert measured.values("marshal.batches") == {"committed": 1, "drained": 1}
    assert measured.values("marshal.offsets") == {"committed": 30}
    point = measured.points()["marshal.lease.remaining", frozenset({("at", "commit")})]
    assert 0 < point.max <= 1.9 * HI_MS / 1_000


@pytest.mark.slow
def test_the_lag_that_a_batch_leaves_is_measured(stand: Stand, measured: Measured) -> None:
    """A run that stops at a limit records the remaining lag in the gauge."""
    assert stand.run(max_records=12, max_batches=2).success

    assert measured.values("marshal.batch.lag") == {(): 6}
    stand.process = lambda *_: 1 / 0
    assert not stand.run(max_records=8).success
    assert measured.values("marshal.batch.lag") == {(): 6}, "a failed batch leaves everything unread"


@pytest.mark.slow
def test_the_lease_is_measured_as_it_was_before_the_heartbeat(stand: Stand, measured: Measured) -> None:
    """If a commit follows a whole interval after the last heartbeat, 0.9 intervals of the lease were left, not 1.9."""
    stand.mode = AT_LEAST_ONCE
    stand.process = lambda _: stand.scene.clock.advance(HI_MS)
    assert stand.run().success

    point = measured.points()["marshal.lease.remaining", frozenset({("at", "commit")})]
    assert (point.count, point.min) == (1, pytest.approx(0.9 * HI_MS / 1_000))


@pytest.mark.slow
def test_a_refused_commit_and_a_lost_claim_are_counted(stand: Stand, measured: Measured) -> None:
    """If a claim is revoked just before the commit, the commit is counted as refused and the claim as lost."""
    stand.mode = AT_LEAST_ONCE
    _revoked_before_commit(stand)

    assert not stand.run().success

    assert measured.values("marshal.claims") == {"won": 3, "lost": 1}
    assert measured.values("marshal.commits") == {"committed": 2, "refused": 1}
    assert measured.values("marshal.records.refused") == {("not_owner", "Heartbeat"): 1}
    assert measured.values("marshal.batches") == {"failed": 1}
    assert measured.values("marshal.offsets") == {"not_committed": 30}


@pytest.mark.slow
def test_a_claim_that_another_got_first_is_counted(stand: Stand, measured: Measured) -> None:
    """The second claim is counted as refused, and none as lost."""
    stand.log = stand.scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: _claim_as_another(stand.scene))

    assert stand.run(max_batches=1).success

    claims = measured.values("marshal.claims")
    assert (claims["refused"], "lost" in claims) == (1, False)
    assert measured.values("marshal.records.refused") == {("live_owner", "ClaimingPartition"): 1}


@pytest.mark.slow
def test_a_lease_that_ended_is_counted_as_lost(stand: Stand, measured: Measured) -> None:
    """Work that takes longer than the lease loses all its claims."""
    stand.mode = AT_LEAST_ONCE
    stand.process = lambda _: stand.scene.wait_until_stale()

    assert not stand.run().success

    assert measured.values("marshal.claims") == {"won": 3, "lost": 3}
    assert measured.values("marshal.commits") == {}


def test_a_range_that_is_done_cannot_be_lost(measured: Measured) -> None:
    """A re-created log ends each claim. A range that was committed before is not counted as lost."""
    site = Site()
    site.begin(0, 1)
    rationalizer = Rationalizer(site.log(), topics=[TOPIC], clock=site.clock)
    member = Member(GROUP, "client", "run.1")
    claimer = RangeClaimer(rationalizer, member, TOPIC, RANGES, clock=site.clock, observer=Telemetry(GROUP))
    claimer.ensure_group_settings()
    claimer.claim({0: (0, 5), 1: (0, 5)})
    claimer.plan({0: 5})
    claimer.commit({0: 5})

    claimer._claim_set._lose_all("the log was re-created")

    assert measured.values("marshal.claims") == {"won": 2, "lost": 1}


@pytest.mark.slow
def test_the_metrics_are_handed_over_at_the_end(stand: Stand, measured: Measured) -> None:
    """The op flushes the provider once, within its timeout."""
    assert stand.run().success

    assert measured.flushed_ms == [metrics.FLUSH_TIMEOUT_S * 1_000]


def test_a_flush_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A collector that does not respond delays the op by the timeout, and causes a warning."""
    let_go = threading.Event()

    class Hanging:
        def force_flush(self, timeout_millis: float) -> None:
            del timeout_millis
            let_go.wait()

    monkeypatch.setattr(api, "get_meter_provider", Hanging)
    metrics.flush(0.05)
    let_go.set()

    assert "could not be exported within 0.05 s" in caplog.text


@pytest.mark.slow
def test_what_opentelemetry_raises_stops_no_run(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing provider is reported once, and the run continues without metrics."""

    class Failing:
        def get_meter(self, *_: object) -> None:
            raise TypeError(f"of another version: {SECRET}")

        def force_flush(self, **_: object) -> None:
            raise ConnectionError(SECRET)

    monkeypatch.setattr(api, "get_meter_provider", Failing)
    metrics._log_disabled_metrics.cache_clear()
    assert stand.run(max_records=12).success
    assert stand.run().success

    assert caplog.text.count("there are no metrics of marshal-dagster: TypeError") == 1
    assert "could not be exported: ConnectionError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.slow
def test_without_a_provider_nothing_is_recorded(stand: Stand) -> None:
    """With OpenTelemetry's API but no SDK, a run behaves as without both."""
    assert type(api.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
    assert stand.run().success


@pytest.mark.slow
def test_without_opentelemetry_nothing_is_imported(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other code has imported OpenTelemetry, a run does not either, and there are no instruments."""
    monkeypatch.delenv("OTEL_PYTHON_METER_PROVIDER", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    assert stand.run().success

    assert metrics.metrics() is None
    assert not any(name.split(".")[0] == "opentelemetry" for name in sys.modules)


@pytest.mark.slow
def test_no_attribute_is_unbounded_or_secret(stand: Stand, measured: Measured) -> None:
    """Except for group and topic, attributes are from a small set. No setting of a connection is among them."""
    stand.run(max_records=12)
    names = {name for _, attributes in measured.points() for name, _ in attributes}

    assert names <= {"outcome", "state", "phase", "at", "record", "reason"}
    assert SECRET not in str(measured.points())


def test_the_lag_of_the_topic_is_measured_where_it_is_observed(stand: Stand, measured: Measured) -> None:
    """The asset and its checks look up the group's position in the topic, and record the lag in the gauge."""
    stand.scene.data.append(1, 5)
    _claim_as_another(stand.scene)
    scene = stand.scene

    class SceneClaimer(ClaimerResource):
        def open_data(self) -> Any:  # noqa: ANN401 - stands for Topics
            return scene.data

        @contextmanager
        def world(self) -> Iterator[World]:
            world = Rationalizer(scene.log()).catch_up()
            world.group_of(GROUP, TOPIC).keys[TOPIC, 0] = Key(offset=4)
            yield world

    topic_progress(SceneClaimer(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"), group=GROUP), TOPIC)

    assert measured.values("marshal.lag") == {(): 6 + 15 + 10}


def test_the_lag_that_the_lag_sensor_sees_is_measured(stand: Stand, measured: Measured) -> None:
    """The gauge includes all unread records and those of exhausted plans, also if the tick fails because of them."""
    _claim_as_another(stand.scene)
    world = Rationalizer(stand.scene.log()).catch_up()
    world.group_of(GROUP, TOPIC).keys[TOPIC, 0] = Key(offset=4, plan_end=10, plan_attempts=9)
    data = stand.scene.data

    class SceneRationalizer(RationalizerResource):
        @contextmanager
        def world(self) -> Iterator[World]:
            yield world

        def open_data(self) -> Any:  # noqa: ANN401 - stands for Topics
            return nullcontext(data)

    job = build_claimed_batch_job(build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC))
    sensor = build_lag_sensor(job, group=GROUP, max_lag_records=1_000)
    resource = SceneRationalizer(connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"))
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(dg.Failure, match="marshal-dagster retry etl orders 0"),
    ):
        sensor(dg.build_sensor_context(instance, resources={"rationalizer": resource}))

    assert measured.values("marshal.lag") == {(): 26}


# Log lines


def _reported(caplog: pytest.LogCaptureFixture) -> list[Mapping[str, Any]]:
    """Return the fields of each log line about claims."""
    return [vars(record) for record in caplog.records if record.name == log_lines.LOGGER.name]


@pytest.mark.slow
def test_each_claim_and_commit_has_a_line_with_fields(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO, group, topic, partition and epoch are fields of the record and part of its text."""
    caplog.set_level(logging.INFO, log_lines.LOGGER.name)
    assert stand.run().success

    reported = _reported(caplog)
    assert Counter((each["event"], each["outcome"]) for each in reported) == {
        ("claim", "won"): 3,
        ("commit", "committed"): 3,
    }
    values = stand.scene.values()
    for each in reported:
        assert (each["group"], each["topic"]) == (GROUP, TOPIC)
        assert values[each["epoch"]].startswith("ClaimingPartition/")
        assert values[each["epoch"]].endswith(f"/{each['partition']}")
        assert f"{TOPIC}/{each['partition']} of group '{GROUP}', epoch {each['epoch']}" in each["message"]
    assert {each["offset"] for each in reported if each["event"] == "commit"} == {10}
    assert SECRET not in str(reported)


@pytest.mark.slow
def test_a_refusal_and_a_loss_have_lines_that_warn(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """Refusals and losses are logged as warnings with the reason, so the default level shows them."""
    stand.mode = AT_LEAST_ONCE
    _revoked_before_commit(stand)
    result = stand.run()

    reported = _reported(caplog)
    assert [(each["event"], each["outcome"], each["partition"], each["levelname"]) for each in reported] == [
        ("commit", "refused", 0, "WARNING"),
        ("claim", "lost", 0, "WARNING"),
    ]
    assert reported[0]["epoch"] == reported[1]["epoch"]
    assert reported[0]["reason"] == "the sender does not own the partition"
    assert reported[1]["reason"].startswith("its heartbeat was refused")
    assert not result.success


@pytest.mark.slow
def test_a_record_that_was_not_acknowledged_has_a_line(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """A record without an acknowledgement is logged as neither accepted nor refused, with its key."""
    stand.log = FaultyLog(stand.scene.log())
    stand.log.fail(Fault.FAILED, of_type("ClaimingPartition", partition=1), times=1)
    stand.run(max_batches=1)

    reported = [each for each in _reported(caplog) if each["event"] == "claim"]
    assert [(each["outcome"], each["partition"], each["epoch"]) for each in reported] == [("unacknowledged", 1, None)]


@pytest.mark.slow
@pytest.mark.parametrize("managed", [False, True])
def test_the_fields_reach_dagsters_json_logger(
    stand: Stand, managed: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's JSON logger receives the fields of warnings, and of all lines if the library's loggers are managed.

    The run's log has the lines too.
    """
    monkeypatch.setattr(logging.getLogger("marshal_dagster"), "level", logging.NOTSET)  # Dagster sets the level
    stand.mode = AT_LEAST_ONCE
    _revoked_before_commit(stand)
    logs = {"managed_python_loggers": ["marshal_dagster"], "python_log_level": "INFO"} if managed else {}
    with dg.instance_for_test(overrides={"python_logs": logs}) as instance:
        result = stand.run(instance, logger_defs={"json": dg.json_console_logger})
        in_run = [entry.user_message for entry in instance.all_logs(result.run_id)]

    printed = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith('{"')]
    reported = [
        (each["event"], each["outcome"]) for each in printed if {"group", "topic", "partition", "epoch"} <= each.keys()
    ]
    won, wrong = [("claim", "won")] * 3, [("commit", "refused"), ("claim", "lost")]
    assert Counter(reported) == Counter(
        [*won, ("commit", "committed"), ("commit", "committed"), *wrong] if managed else wrong
    )
    assert sum("lost, its heartbeat was refused" in line for line in in_run) == 1


def test_lines_that_nobody_takes_hold_up_no_end(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that hangs delays the op's end by the timeout. The number of dropped lines is logged."""
    hangs, let_go = threading.Event(), threading.Event()

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "were dropped" not in record.getMessage():
                hangs.set()
                let_go.wait()

    hanging = Hanging()
    log_lines.LOGGER.addHandler(hanging)
    written = log_lines.LineWriter()
    try:
        for number in range(3):
            written.write(logging.WARNING, "line", {"partition": number})
        hangs.wait()
        written.close(0.05)
        written.write(logging.WARNING, "afterwards", {})
    finally:
        let_go.set()
        assert written._thread is not None
        written._thread.join()
        log_lines.LOGGER.removeHandler(hanging)

    assert "2 log lines about claims were dropped" in caplog.text
    assert "afterwards" not in caplog.text


@pytest.mark.thorough
def test_slow_handlers_hold_up_no_claim(caplog: pytest.LogCaptureFixture) -> None:
    """A separate thread writes the lines, so a claim does not wait for handlers."""
    caplog.set_level(logging.INFO, log_lines.LOGGER.name)

    let_go = threading.Event()

    class Slow(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            let_go.wait()

    slow = Slow()
    log_lines.LOGGER.addHandler(slow)
    written = log_lines.LineWriter()
    try:
        for number in range(3):
            written.write(logging.INFO, "line", {"partition": number})
        let_go.set()
        written.close(WITHIN_S)
    finally:
        log_lines.LOGGER.removeHandler(slow)

    assert [each["partition"] for each in _reported(caplog)] == [0, 1, 2]


def test_an_interrupt_at_the_end_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """An interrupt during the final wait takes effect at once. The thread ends when its handler returns."""
    caplog.set_level(logging.INFO, log_lines.LOGGER.name)
    written = log_lines.LineWriter()
    written.write(logging.INFO, "line", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "flush", lambda _timeout_s: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            written.close()
    assert written._thread is not None
    written._thread.join()
