"""Check runs of assets, ops and jobs in memory, with simulated crashes; no test starts Spark."""

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
import pytest
from pyspark.sql.types import _make_type_verifier

import marshal_dagster as marshal
from marshal_dagster.protocol.messages import ReleasingPartition, RevokingClaim, parse
from marshal_dagster.sinks.conformance import LocalFrame
from marshal_dagster.spark import job_control
from marshal_dagster.testing import CrashPoint, ManualClock, MemoryKafka, MemoryResult, MemorySink, crash, run_in_memory
from marshal_dagster.testing.memory_reader import FrameKind, frame_kind

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from marshal_dagster.ops.claimed_batch import ClaimedBatchOp

KAFKA = marshal.KafkaConnectionConfig(bootstrap_servers="kafka:9092")
Delivery = Literal["at_most_once", "at_least_once", "effectively_once"]
ORDERS = {"orders": ["north", "south", "north", "west"]}
OF_A_SINK = [CrashPoint.DURING_WRITE, CrashPoint.AFTER_WRITE]


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    """Yield one Dagster instance for all tests; each test reads only its own runs."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@marshal.marshal_asset(topic="orders", sink=marshal.FileSink("/nowhere/shops"))
def shops(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401, ARG001
    """Return the shop of each order."""
    assert isinstance(frame, list)
    return [{"partition": row["partition"], "offset": row["offset"], "shop": row["value"].decode()} for row in frame]


def sends(sent: list[str], after: Callable[[], None] = lambda: None) -> Callable[..., None]:
    """Return the function of an op without a sink: it sends each order, and calls `after` after each."""

    def send(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> None:  # noqa: ANN401, ARG001
        assert isinstance(frame, list)
        for row in frame:
            sent.append(row["value"].decode())
            after()

    return send


def claimer(delivery: Delivery, **options: Any) -> marshal.ClaimerResource:  # noqa: ANN401 - the fields of a claimer
    """Return a claimer as in production."""
    return marshal.ClaimerResource(connection=KAFKA, group="shops", delivery=delivery, **options)


def shops_of(result: MemoryResult) -> list[str]:
    """Return the shop of each row."""
    return [row["shop"] for row in result.rows]


def records_of(result: MemoryResult, kind: type) -> list[Any]:
    """Return the records of this type in the coordination log."""
    log = result.kafka.coordination
    values = [value for number in range(log.identity.partitions) for _, _, value in log.records(number)]
    return [message for value in values if isinstance(message := parse(value), kind)]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Require that the runs of a test leave no handler of log lines and no thread."""
    library, threads = logging.getLogger("marshal_dagster"), set(threading.enumerate())
    handlers = list(library.handlers)
    yield
    assert library.handlers == handlers
    assert not [
        thread for thread in set(threading.enumerate()) - threads if thread.name.split()[0] in {"step", "watch", "ask"}
    ]


@pytest.mark.slow
def test_rows_ranges_and_positions(instance: dg.DagsterInstance) -> None:
    """The result has the rows in the sink, the ranges, the committed positions and Dagster's own result."""
    result = run_in_memory(shops, ORDERS, partitions=2, instance=instance)
    assert sorted(shops_of(result)) == sorted(ORDERS["orders"])
    assert result.positions == result.kafka_offsets == {"orders": {0: 2, 1: 2}}
    assert [(range_.partition, range_.start, range_.end) for range_ in result.ranges] == [(0, 0, 2), (1, 0, 2)]
    assert not result.repeated
    (attempt,) = result.attempts
    assert attempt.success
    assert attempt.result is not None
    (event,) = attempt.result.get_asset_materialization_events()
    assert event.materialization.metadata["offsets"].value == 4
    assert attempt.result.run_id == attempt.run_id


@pytest.mark.slow
@pytest.mark.parametrize("point", CrashPoint)
def test_effectively_once_loses_and_repeats_nothing(instance: dg.DagsterInstance, point: CrashPoint) -> None:
    """After a crash at each point, the next run completes the work, and each row is in the sink once."""
    result = run_in_memory(shops, ORDERS, partitions=2, crash_at=point, instance=instance)
    assert Counter(shops_of(result)) == Counter(ORDERS["orders"])
    assert result.positions == {"orders": {0: 2, 1: 2}}
    first, second = result.attempts
    assert (first.is_crashed, first.crashed_at, first.success, first.result) == (True, point, False, None)
    assert first.run is not None
    assert first.run.status is dg.DagsterRunStatus.FAILURE
    assert second.success
    assert first.run_id != second.run_id
    is_done = point is CrashPoint.AFTER_COMMIT  # nothing is left to claim
    assert len(records_of(result, RevokingClaim)) == (0 if is_done else 2)
    assert all(message.instance.startswith(second.run_id) for message in records_of(result, ReleasingPartition))


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in CrashPoint if point not in OF_A_SINK])
def test_at_least_once_repeats(instance: dg.DagsterInstance, point: CrashPoint) -> None:
    """Orders are sent again after a crash between the function and the commit, and never lost."""
    sent: list[str] = []
    op = marshal.build_claimed_batch_op(sends(sent), name="send", topic="orders")
    result = run_in_memory(op, ORDERS, crash_at=point, instance=instance)
    repeats = point is CrashPoint.AFTER_PROCESS
    assert sent == ORDERS["orders"] * (2 if repeats else 1)
    assert len(result.repeated) == (4 if repeats else 0)
    assert result.positions == {"orders": {0: 4}}
    assert not result.rows


@pytest.mark.slow
@pytest.mark.parametrize("point", [CrashPoint.AFTER_COMMIT, CrashPoint.AFTER_CLAIM, CrashPoint.AFTER_PROCESS])
def test_at_most_once_loses(instance: dg.DagsterInstance, point: CrashPoint) -> None:
    """A crash after the commit and before the function loses the batch; nothing is sent twice."""
    sent: list[str] = []
    op = marshal.build_claimed_batch_op(sends(sent), name="send", topic="orders")
    resources = {"claimer": claimer("at_most_once")}
    result = run_in_memory(op, ORDERS, crash_at=point, resources=resources, instance=instance)
    assert sent == ([] if point is CrashPoint.AFTER_COMMIT else ORDERS["orders"])
    assert result.positions == {"orders": {0: 4}}
    assert result.group == "shops"


@pytest.mark.slow
def test_a_crash_in_the_function(instance: dg.DagsterInstance) -> None:
    """`crash` ends the run in the middle of the function; at least once repeats the whole batch."""
    sent: list[str] = []

    def after() -> None:
        if len(sent) == 2:
            crash()

    op = marshal.build_claimed_batch_op(sends(sent, after), name="send", topic="orders")
    result = run_in_memory(op, ORDERS, attempts=2, instance=instance)
    assert sent == ["north", "south", *ORDERS["orders"]]
    assert [(attempt.is_crashed, attempt.crashed_at) for attempt in result.attempts] == [(True, None), (False, None)]
    with pytest.raises(marshal.ConfigurationError, match="none is running"):
        crash()


@pytest.mark.slow
def test_several_crashes_and_attempts(instance: dg.DagsterInstance) -> None:
    """Each of the first attempts has its crash point; a run after the work is done is idle."""
    points = [CrashPoint.DURING_WRITE, "after_write"]
    result = run_in_memory(shops, ORDERS, crash_at=points, attempts=4, instance=instance)
    assert [attempt.crashed_at for attempt in result.attempts] == [*points, None, None]
    assert [len(attempt.ranges) for attempt in result.attempts] == [1, 1, 0, 0]


@pytest.mark.slow
def test_a_later_call_continues(instance: dg.DagsterInstance) -> None:
    """A call with the same cluster and sink processes only new records."""
    kafka, sink = MemoryKafka(), MemorySink()
    run_in_memory(shops, ORDERS, kafka=kafka, sink=sink, instance=instance)
    later = run_in_memory(shops, {"orders": ["east"]}, kafka=kafka, sink=sink, instance=instance)
    assert [str(range_) for range_ in later.ranges] == ["orders/0 [4, 5)"]
    assert shops_of(later) == [*ORDERS["orders"], "east"]


@pytest.mark.slow
def test_a_crashed_run_of_another_dagster(instance: dg.DagsterInstance) -> None:
    """Claims of a dead run that Dagster does not know are free when the clock has made them stale."""
    kafka = MemoryKafka(ManualClock())
    run_in_memory(shops, ORDERS, crash_at="after_claim", attempts=1, kafka=kafka)
    held = run_in_memory(shops, kafka=kafka, instance=instance)
    assert not held.rows
    assert held.attempts[0].run is not None
    assert held.attempts[0].run.tags["marshal/outcome"] == "held"
    kafka.clock.advance(20_001)
    assert shops_of(run_in_memory(shops, kafka=kafka, instance=instance)) == ORDERS["orders"]


def test_records_in_each_form(instance: dg.DagsterInstance) -> None:
    """Records are values, tuples of key and value, or dicts of their parts. Times are in UTC, with milliseconds."""
    at = datetime(2026, 11, 27, microsecond=7_000, tzinfo=UTC)
    elsewhere = at.replace(microsecond=7_999).astimezone(timezone(timedelta(hours=9)))
    given = [
        "text",
        b"bytes",
        None,
        ("key", b"value"),
        {"key": "k", "value": {"price": 5}, "headers": {"trace": "7"}, "timestamp": elsewhere, "partition": 1},
        {"value": [1], "timestamp": 1_000.9},
    ]
    seen: list[dict[str, Any]] = []

    def see(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> None:  # noqa: ANN401, ARG001
        assert isinstance(frame, list)
        seen.extend(frame)

    op = marshal.build_claimed_batch_op(see, name="see", topic="orders")
    run_in_memory(op, {"orders": given}, partitions=2, instance=instance)
    assert {row["value"] for row in seen} == {b"text", b"bytes", None, b"value", b'{"price": 5}', b"[1]"}
    (full,) = [row for row in seen if row["key"] == b"k"]
    expected = {"topic": "orders", "partition": 1, "timestamp": at, "headers": [{"key": "trace", "value": b"7"}]}
    assert expected.items() <= full.items()
    assert full["timestamp"].tzinfo is UTC
    (timed,) = [row for row in seen if row["value"] == b"[1]"]
    assert timed["timestamp"] == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert list(full) == ["key", "value", "topic", "partition", "offset", "timestamp", "headers"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"shop": "north"}, 'no field shop; .*make it the value: {"value": {...}}'),
        (5, "5 is no record"),
        ({"value": 5}, "the value of a record is a int"),
        ({"partition": 3, "value": "x"}, "has no partition 3; it has 1 partitions"),
        ({"partition": "0"}, "partition of a record is '0': give its number"),
        ({"value": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "no JSON .*: give texts, numbers"),
        ({"timestamp": "2026-01-01"}, "timestamp of a record is '2026-01-01': give a datetime with a time zone"),
        ({"timestamp": datetime(2026, 1, 1)}, "give a datetime with a time zone"),  # noqa: DTZ001 - the mistake
        ({"headers": [("trace", "7")]}, "give a dict with texts as names"),
        ({"headers": {7: "trace"}}, "give a dict with texts as names"),
    ],
)
def test_records_of_another_form(record: Any, why: str) -> None:  # noqa: ANN401 - any mistake
    """A mistake in a record is named."""
    with pytest.raises(marshal.ConfigurationError, match=why):
        MemoryKafka().append({"orders": [record]})


@pytest.mark.slow
def test_pandas(instance: dg.DagsterInstance) -> None:
    """A function that takes and returns frames of pandas needs no Spark."""

    def count(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | pd.DataFrame") -> Any:  # noqa: ANN401, ARG001
        pandas: Any = frame
        return pandas.groupby(["partition", "value"]).size().reset_index(name="orders")

    op = marshal.build_claimed_batch_op(count, name="count", topic="orders", sink=marshal.FileSink("/nowhere"))
    result = run_in_memory(op, ORDERS, crash_at="after_write", instance=instance)
    assert {row["value"]: row["orders"] for row in result.rows} == {b"north": 2, b"south": 1, b"west": 1}


class FakeSession:
    """A stand-in for a session of Spark. PySpark's own check of rows against a schema needs no Java."""

    def createDataFrame(self, rows: list[tuple[Any, ...]], schema: Any) -> LocalFrame:  # noqa: ANN401, N802 - Spark's
        """Check the rows, and return them as a frame."""
        for row in rows:
            _make_type_verifier(schema)(row)
            schema.toInternal(row)
        return LocalFrame(schema.names, tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("point", [None, *CrashPoint])
def test_a_frame_of_spark(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, point: CrashPoint) -> None:
    """With a session the function gets a frame, although it would take rows, and crashes at the same points."""
    monkeypatch.setattr(job_control, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(job_control, "interruptible_calls", lambda *_: nullcontext())
    monkeypatch.setattr(job_control, "cancel", lambda *_: None)

    def count(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[int]") -> Any:  # noqa: ANN401, ARG001
        assert isinstance(frame, LocalFrame)
        return frame

    op = marshal.build_claimed_batch_op(count, name="count", topic="orders", sink=marshal.FileSink("/nowhere"))
    record = {"key": "k", "value": b"\xff", "headers": {"trace": "7", "empty": None}}
    session: Any = FakeSession()
    result = run_in_memory(op, {"orders": [record, "second"]}, crash_at=point, spark=session, instance=instance)
    assert [row["value"] for row in result.rows] == [b"\xff", b"second"]
    assert result.positions == {"orders": {0: 2}}


def test_an_annotation_without_spark() -> None:
    """A function that would fail in production, because it takes only lists, is refused."""

    def process(context: Any, batch: marshal.ClaimedBatch, frame: list[int]) -> None: ...  # noqa: ANN401

    op = marshal.build_claimed_batch_op(process, name="lists", topic="orders")  # type: ignore[arg-type]
    with pytest.raises(marshal.ConfigurationError, match=r"annotate it as `DataFrame \| list\[int\]`"):
        run_in_memory(op, ORDERS)


@pytest.mark.parametrize("annotation", ["list", "list[str]", "Sequence", "typing.List[str]"])
def test_rows_alone_are_refused_however_they_are_written(annotation: str) -> None:
    """Otherwise the test would start Spark, and the function would get a frame that it does not expect."""

    def send(context: Any, batch: marshal.ClaimedBatch, frame: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    send.__annotations__["frame"] = annotation
    with pytest.raises(marshal.ConfigurationError, match=re.escape(f"annotate it as `DataFrame | {annotation}`")):
        frame_kind(send)
    send.__annotations__["frame"] = f"DataFrame | {annotation}"
    assert frame_kind(send) is FrameKind.ROWS


@pytest.mark.slow
def test_a_function_without_a_frame(instance: dg.DagsterInstance) -> None:
    """A function that reads its batch itself can read the topics in memory, and write rows to the sink."""
    kafka = MemoryKafka()

    @marshal.marshal_asset(topic="orders", sink=marshal.FileSink("/nowhere"), with_frame=False)
    def own_reader(context: dg.AssetExecutionContext, batch: marshal.ClaimedBatch) -> None:
        assert context.asset_key == dg.AssetKey("own_reader")
        batch.begin_processing()
        read = kafka.topics.read(batch.ranges)
        batch.write([{"partition": record.partition, "shop": record.value} for record in read])  # type: ignore[arg-type]

    result = run_in_memory(own_reader, ORDERS, kafka=kafka, crash_at="after_claim", instance=instance)
    assert len(result.rows) == 4


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_function_that_does_not_read_its_batch_fails(instance: dg.DagsterInstance, delivery: Delivery) -> None:
    """Otherwise the run would claim the same batch again and again, and record it each time."""
    op = marshal.build_claimed_batch_op(lambda _context, _batch: None, name="idle", topic="orders", with_frame=False)
    with pytest.raises(marshal.BatchAbortedError, match="nothing was read, so nothing is committed"):
        run_in_memory(op, ORDERS, resources={"claimer": claimer(delivery)}, instance=instance)


def test_a_job_with_further_ops(instance: dg.DagsterInstance) -> None:
    """The ops of a job run together, and rows are also found by op."""
    outcomes: list[marshal.BatchesResult] = []
    count = marshal.build_claimed_batch_op(shops.fn, name="count", topic="orders", sink=marshal.FileSink("/nowhere"))

    @dg.op
    def after(done: marshal.BatchesResult) -> None:
        outcomes.append(done)

    @dg.job(resource_defs={"claimer": claimer("effectively_once").get_resource_definition()})
    def both() -> None:
        after(count())

    result = run_in_memory(both, ORDERS, instance=instance)
    assert result.group == "shops"
    assert result.rows_of("count") == result.rows
    assert not result.rows_of("after")
    assert outcomes[0].offsets == 4


@pytest.mark.slow
def test_ranges_are_claimed(instance: dg.DagsterInstance) -> None:
    """A group that claims ranges crashes and continues, too."""
    asset = shops.replace(ranges=marshal.RangeOptions(size=2))
    resources = {"claimer": claimer("effectively_once", claim_ranges=True)}
    for point in ("after_plan", "after_write", "after_commit"):
        result = run_in_memory(asset, ORDERS, resources=resources, crash_at=point, instance=instance)
        assert Counter(shops_of(result)) == Counter(ORDERS["orders"])


@pytest.mark.slow
def test_run_config_and_partitions(instance: dg.DagsterInstance) -> None:
    """Limits of the run config apply, also that of bytes. An asset may have a Dagster partition for each of Kafka's."""
    config = marshal.ClaimedBatchConfig(max_records=1, max_batches=2)
    result = run_in_memory(shops, ORDERS, config=config, instance=instance)
    assert [range_.width for range_ in result.ranges] == [1, 1]
    config = marshal.ClaimedBatchConfig(max_bytes=10, max_batches=1)
    assert run_in_memory(shops, ORDERS, config=config, instance=instance).positions == {"orders": {0: 2}}

    @marshal.marshal_asset(topic="orders", sink=marshal.FileSink("/nowhere"), per_partition=True)
    def by_partition(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401
        return shops.fn(context, batch, frame)

    result = run_in_memory(by_partition, ORDERS, partitions=2, partition_key="1", instance=instance)
    assert {row["partition"] for row in result.rows} == {1}


@pytest.mark.slow
def test_an_error_of_the_function(instance: dg.DagsterInstance) -> None:
    """The error of a function is raised, or is in Dagster's result."""
    failing = shops.replace(_fails)
    with pytest.raises(ZeroDivisionError):
        run_in_memory(failing, ORDERS, instance=instance)
    result = run_in_memory(failing, ORDERS, raise_on_error=False, attempts=2, instance=instance)
    assert [attempt.success for attempt in result.attempts] == [False, False]
    assert not result.attempts[0].is_crashed
    assert result.positions == {"orders": {0: 0}}
    assert len(result.repeated) == 4


def _fails(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401, ARG001
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"crash_at": "later"}, "crash_at is 'later'; the crash points are after_claim, "),
        ({"crash_at": "after_claim", "attempts": 0}, "attempts is 0"),
        ({"records": ["north"]}, "records are a list: give a dict"),
        ({"records": {"order": []}}, "reads topic 'orders', but there is order"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], why: str) -> None:
    """A mistake in an argument is named."""
    with pytest.raises(marshal.ConfigurationError, match=why):
        run_in_memory(shops, **{"records": ORDERS, **arguments})


def test_a_crash_point_that_is_not_reached(instance: dg.DagsterInstance) -> None:
    """A test does not pass by mistake because its crash did not happen."""
    with pytest.raises(marshal.ConfigurationError, match="after_claim was not reached"):
        run_in_memory(shops, {"orders": []}, crash_at="after_claim", instance=instance)


def test_what_cannot_run() -> None:
    """Other definitions are refused with what to pass instead."""

    @dg.asset
    def other() -> None: ...

    with pytest.raises(marshal.ConfigurationError, match="pass an asset of marshal_asset"):
        run_in_memory(other)

    @dg.op
    def nothing() -> None: ...

    @dg.job
    def of_others() -> None:
        nothing()

    with pytest.raises(marshal.ConfigurationError, match="job 'of_others' cannot run in memory"):
        run_in_memory(of_others, ORDERS)


@pytest.mark.slow
def test_the_job_of_an_asset(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a code location runs with its run config, its claimer's group, and the assets that depend on it."""
    seen: list[str] = []

    @dg.asset(deps=[shops])
    def report() -> None:
        seen.append("report")

    monkeypatch.setenv("SHOPS_GROUP", "from-env")
    kafka = marshal.KafkaConnectionConfig(bootstrap_servers="kafka:9092")
    named = marshal.ClaimerResource(connection=kafka, group=dg.EnvVar("SHOPS_GROUP"), delivery="effectively_once")
    config = marshal.ClaimedBatchConfig(max_records=3, max_batches=1)
    definitions = dg.Definitions(
        assets=[shops, report],
        jobs=[
            marshal.build_claimed_batch_job(shops, config=config),
            dg.define_asset_job("both", [shops.key, report.key]),
        ],
        resources={"claimer": named, "rationalizer": marshal.RationalizerResource(connection=kafka)},
    )
    result = run_in_memory(definitions.resolve_job_def("shops_job"), ORDERS, instance=instance)
    assert (result.group, result.positions, seen) == ("from-env", {"orders": {0: 3}}, [])
    both = run_in_memory(definitions.resolve_job_def("both"), ORDERS, crash_at="after_write", instance=instance)
    assert (shops_of(both), seen) == (ORDERS["orders"], ["report"])


def test_the_function_is_reachable() -> None:
    """`fn` is the function of an asset or op, also after Dagster has combined the definitions."""
    assert shops.fn.__name__ == "shops"
    definitions = dg.Definitions(assets=[shops], resources={"claimer": claimer("effectively_once")})
    dg.Definitions.validate_loadable(definitions)  # opens no connection
    assert definitions.resolve_assets_def("shops").op.fn is shops.fn  # type: ignore[attr-defined]
    assert shops.fn(None, None, [{"partition": 0, "offset": 0, "value": b"north"}])[0]["shop"] == "north"
    op = marshal.build_claimed_batch_op(shops.fn, name="op", topic="orders")
    assert op.fn is shops.fn
    assert op.replace(max_claims=1).fn is shops.fn


@pytest.mark.slow
def test_ops_with_one_sink(instance: dg.DagsterInstance) -> None:
    """A sink of one's own is used although it is empty, and its rows are in the result once, also if ops share it."""

    class Sized(MemorySink):
        def __len__(self) -> int:
            return len(self.rows())

    shops_of_pays = marshal.build_claimed_batch_op(
        shops.fn, name="pays", topic="pays", sink=marshal.FileSink("/nowhere/pays")
    )
    shops_of_orders = marshal.build_claimed_batch_op(
        shops.fn, name="orders", topic="orders", sink=marshal.FileSink("/nowhere/orders")
    )

    @dg.job(resource_defs={"claimer": claimer("effectively_once")})
    def both() -> None:
        shops_of_orders()
        shops_of_pays()

    sink = Sized()
    result = run_in_memory(both, {**ORDERS, "pays": ["east"]}, sink=sink, instance=instance)
    assert shops_of(result) == [*ORDERS["orders"], "east"]
    assert result.rows == sink.rows()


@pytest.mark.slow
def test_a_job_with_an_alias_and_a_retry_policy(instance: dg.DagsterInstance) -> None:
    """The run config reaches an op under its alias, and the job's tags and retry policy apply."""
    calls: list[int] = []

    def send(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> None:  # noqa: ANN401, ARG001
        calls.append(len(frame))  # type: ignore[arg-type] # a list
        if len(calls) == 1:
            raise ZeroDivisionError

    send_op = marshal.build_claimed_batch_op(send, name="send", topic="orders")

    @dg.job(
        resource_defs={"claimer": marshal.ClaimerResource(connection=KAFKA, group="shops", delivery="at_least_once")},
        op_retry_policy=dg.RetryPolicy(max_retries=1),
        tags={"team": "shops"},
    )
    def sending() -> None:
        send_op.alias("second_name")()

    config = marshal.ClaimedBatchConfig(max_records=3)
    result = run_in_memory(sending, ORDERS, config=config, instance=instance)
    assert calls == [3, 3, 1]
    (attempt,) = result.attempts
    assert attempt.run is not None
    assert attempt.run.tags["team"] == "shops"


@pytest.mark.slow
def test_the_rows_of_an_alias(instance: dg.DagsterInstance) -> None:
    """They are those of its op's sink."""
    real = marshal.build_claimed_batch_op(shops.fn, name="real", topic="orders", sink=marshal.FileSink("/nowhere/a"))

    @dg.job(resource_defs={"claimer": claimer("effectively_once")})
    def renamed() -> None:
        real.alias("second_name")()

    result = run_in_memory(renamed, ORDERS, instance=instance)
    assert result.rows
    assert result.rows_of("second_name") == result.rows_of("real") == result.rows


def test_a_nested_op_is_refused() -> None:
    """An op in a graph of the job would write to its real sink."""
    real = marshal.build_claimed_batch_op(shops.fn, name="real", topic="orders", sink=marshal.FileSink("/nowhere/a"))

    @dg.graph
    def inner() -> None:
        real()

    @dg.graph
    def outer() -> None:
        inner()

    @dg.job(resource_defs={"claimer": claimer("effectively_once")})
    def nested() -> None:
        outer()

    with pytest.raises(marshal.ConfigurationError, match=r"op 'real' is in its graph 'inner'.*pass the op itself"):
        run_in_memory(nested, ORDERS)


@pytest.mark.parametrize("records", ["north", b"north", {"value": "north"}])
def test_a_record_without_a_list(records: Any) -> None:  # noqa: ANN401 - a mistake
    """One record in place of a list is refused; a text would otherwise be a record for each character."""
    with pytest.raises(marshal.ConfigurationError, match="put it into a list"):
        run_in_memory(shops, {"orders": records})


@pytest.mark.slow
def test_results_are_checked_as_in_production(instance: dg.DagsterInstance) -> None:
    """A function that returns nothing for its sink, or rows without a sink, fails as it would with Spark."""

    def nothing(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> None: ...  # noqa: ANN401

    def number(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401, ARG001
        return [1]

    without_sink = marshal.build_claimed_batch_op(shops.fn, name="without_sink", topic="orders")
    mistakes: list[tuple[dg.AssetsDefinition | ClaimedBatchOp, str]] = [
        (shops.replace(nothing), "returned None, but the sink writes the rows"),
        (shops.replace(number), "has a int as a row: return a list of dicts"),
        (without_sink, "returned rows, but the op has no sink"),
    ]
    for claimed, why in mistakes:
        with pytest.raises(marshal.ConfigurationError, match=why):
            run_in_memory(claimed, ORDERS, instance=instance)


@pytest.mark.slow
def test_a_crash_in_a_thread(instance: dg.DagsterInstance) -> None:
    """`crash` ends the run also in a thread that the function has started."""
    sent: list[str] = []

    def send(order: str) -> None:
        sent.append(order)
        if len(sent) == 2:
            crash()

    def send_all(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> None:  # noqa: ANN401, ARG001
        assert isinstance(frame, list)
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(send, [row["value"].decode() for row in frame[:2]]))

    op = marshal.build_claimed_batch_op(send_all, name="send_all", topic="orders")
    result = run_in_memory(op, ORDERS, attempts=2, instance=instance)
    assert [attempt.is_crashed for attempt in result.attempts] == [True, False]
    assert sent == ["north", "south"] * 2
    with pytest.raises(marshal.ConfigurationError, match="none is running"):
        crash()


def test_a_claimer_under_another_key() -> None:
    """A claimer that no op uses would silently leave the op in another delivery mode."""
    op = marshal.build_claimed_batch_op(sends([]), name="send", topic="orders", claimer_key="notifier")
    with pytest.raises(
        marshal.ConfigurationError, match="ClaimerResource 'claimer', but the claimer_key is 'notifier'"
    ):
        run_in_memory(op, ORDERS, resources={"claimer": claimer("at_most_once")})


def test_the_partition_key_is_checked() -> None:
    """An asset with Dagster partitions needs one, and nothing else takes one."""
    per_partition = marshal.marshal_asset(topic="orders", sink=marshal.FileSink("/nowhere/a"), per_partition=True)
    with pytest.raises(marshal.ConfigurationError, match="pass partition_key"):
        run_in_memory(per_partition(shops.fn), ORDERS)
    with pytest.raises(marshal.ConfigurationError, match="partition_key is '0', but nothing"):
        run_in_memory(shops, ORDERS, partition_key="0")


@pytest.mark.slow
def test_an_asset_with_a_prefix(instance: dg.DagsterInstance) -> None:
    """An asset that Dagster has prefixed keeps its key, so dependent assets wait for it and are skipped with it."""
    below_runs: list[str] = []

    @dg.asset(deps=["shops"])
    def below() -> None:
        below_runs.append("below")

    module = ModuleType("location")
    module.shops, module.below = shops, below  # type: ignore[attr-defined]
    assets = dg.load_assets_from_modules([module], key_prefix="raw")
    defs = dg.Definitions(
        assets=assets,
        jobs=[dg.define_asset_job("everything")],
        resources={"claimer": claimer("effectively_once")},
    )
    job, kafka, sink = defs.resolve_job_def("everything"), MemoryKafka(), MemorySink()
    done = run_in_memory(job, ORDERS, kafka=kafka, sink=sink, instance=instance).attempts[0].result
    assert done is not None
    events = [event.asset_key for event in done.get_asset_materialization_events()]
    assert events == [dg.AssetKey(["raw", "shops"]), dg.AssetKey(["raw", "below"])]
    run_in_memory(job, kafka=kafka, sink=sink, instance=instance)
    assert below_runs == ["below"]
    prefixed = next(asset for asset in assets if asset.key == dg.AssetKey(["raw", "shops"]))  # type: ignore[union-attr]
    assert len(run_in_memory(prefixed, ORDERS, instance=instance).rows) == 4  # type: ignore[arg-type]


def test_the_group_of_a_claimer(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may be in an environment variable, and a claimer may be of a class of the user's own."""

    class OwnClaimer(marshal.ClaimerResource):
        team: str = "shops"

    monkeypatch.setenv("SHOPS_GROUP", "shops")
    given = OwnClaimer(connection=KAFKA, group=dg.EnvVar("SHOPS_GROUP"), delivery="effectively_once")
    result = run_in_memory(shops, ORDERS, resources={"claimer": given}, instance=instance)
    assert result.group == "shops"
    assert result.positions == {"orders": {0: 4}}
    at_launch = marshal.ClaimerResource.configure_at_launch()
    with pytest.raises(marshal.ConfigurationError, match=r"'claimer' is a .*: pass a ClaimerResource"):
        run_in_memory(shops, ORDERS, resources={"claimer": at_launch}, instance=instance)


def test_a_sink_that_would_get_nothing(tmp_path: Path) -> None:
    """A sink for an op without one, and a sink of frames without a Spark session, are refused."""
    op = marshal.build_claimed_batch_op(sends([]), name="send", topic="orders")
    with pytest.raises(marshal.ConfigurationError, match="'send' has no sink"):
        run_in_memory(op, ORDERS, sink=MemorySink())
    with pytest.raises(marshal.ConfigurationError, match=r"writes frames of Spark, but .*: pass `spark`"):
        run_in_memory(shops, ORDERS, sink=marshal.FileSink(tmp_path))


@pytest.mark.slow
def test_the_retry_policy_and_tags_of_an_asset_job(instance: dg.DagsterInstance) -> None:
    """The retry policy and the tags of a job of assets apply."""
    calls: list[int] = []

    def fails_once(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return shops.fn(context, batch, frame)

    retry = dg.RetryPolicy(max_retries=1)
    defs = dg.Definitions(
        assets=[shops.replace(fails_once)],
        jobs=[dg.define_asset_job("retried", op_retry_policy=retry, tags={"team": "a"}, run_tags={"team": "shops"})],
        resources={"claimer": claimer("effectively_once")},
    )
    result = run_in_memory(defs.resolve_job_def("retried"), ORDERS, instance=instance)
    assert shops_of(result) == ORDERS["orders"]
    run = result.attempts[0].run
    assert run is not None
    assert (run.job_name, run.tags["team"]) == ("retried", "shops")


@pytest.mark.slow
def test_errors_name_the_function(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error about the result of a function that gets a frame names it, and not the library's wrapper."""
    monkeypatch.setattr(job_control, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(job_control, "interruptible_calls", lambda *_: nullcontext())
    monkeypatch.setattr(job_control, "cancel", lambda *_: None)

    def listed(context: Any, batch: marshal.ClaimedBatch, frame: "DataFrame") -> Any:  # noqa: ANN401, ARG001
        return [{"partition": 0}]

    replaced = shops.replace(listed)
    session: Any = FakeSession()
    with pytest.raises(marshal.ConfigurationError, match=r"function '.*listed' .* returned a builtins.list"):
        run_in_memory(replaced, ORDERS, spark=session, instance=instance)
