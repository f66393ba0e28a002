"""The rows of a task of the Kafka sink: how they become the records of one range after another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.kafka.transactions import ProducerFencedError, RecordRejectedError, UnnamedRecord
from marshal_dagster.sinks.conformance.target import part
from marshal_dagster.sinks.kafka.arrow_rows import ArrowRows, UnorderedError
from marshal_dagster.sinks.kafka.range_write import Step
from marshal_dagster.sinks.kafka.records import FrameRecords
from marshal_dagster.sinks.kafka.tasks import _Outcome, _RangeTask, _run, _run_all

SCHEMA = pa.schema(
    [
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.int64()),
        ("output_partition", pa.int32()),
    ]
)


class Transaction:
    """Keeps the records that are sent."""

    def __init__(self) -> None:
        self.records: list[UnnamedRecord] = []

    def send_many(self, records: Iterable[UnnamedRecord]) -> int:
        """Keep records."""
        before = len(self.records)
        self.records += records
        return len(self.records) - before


def batch(*rows: Sequence[Any]) -> pa.RecordBatch:
    """Return a batch of rows; the columns that they lack are null."""
    full = [(*row, *([None] * (len(SCHEMA) - len(row)))) for row in rows]
    return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in full], SCHEMA)


def sent(rows: ArrowRows, partition: int) -> list[tuple[Any, ...]]:
    """Return the records of a partition without their topic."""
    transaction: Any = Transaction()
    assert rows.send(transaction, "t", part(partition, 0, 1)) == len(transaction.records)
    assert {record[0] for record in transaction.records} <= {"t"}
    return [record[1:] for record in transaction.records]


def test_batches_are_cut_where_a_range_ends() -> None:
    """A range may take several batches, and a batch may have several ranges. Empty batches are passed over."""
    rows = ArrowRows(
        [
            batch(),
            batch((0, 0, b"a"), (0, 1, b"b")),
            batch((0, 2, b"c"), (3, 0, b"d"), (7, 0, b"e")),
            batch(),
            batch((7, 1, b"f")),
        ]
    )
    assert _next(rows) == 0
    assert [record[0] for record in sent(rows, 0)] == [b"a", b"b", b"c"]
    assert _next(rows) == 3
    rows.skip(3)
    assert _next(rows) == 7
    assert [record[0] for record in sent(rows, 7)] == [b"e", b"f"]
    assert _next(rows) is None
    assert sent(rows, 9) == []


def _next(rows: ArrowRows) -> int | None:
    return rows.partition


def test_a_batch_without_rows_is_none() -> None:
    """A task without rows has nothing to do."""
    assert ArrowRows([]).partition is None
    assert ArrowRows([batch(), batch()]).partition is None


def test_nulls_are_the_clients_own_values() -> None:
    """A record without partition and time gets those of the client. Headers stay apart from those of other records."""
    rows = ArrowRows(
        [
            batch(
                (0, 0, b"a", b"k", [{"key": "h", "value": b"1"}, {"key": "h", "value": None}], 5, 2),
                (0, 1, None, None, None, None, None),
                (0, 2, b"", b"", [], 6, 0),
                (1, 3, b"b", None, [{"key": "", "value": b"2"}], None, 1),
            ),
            batch((1, 4, b"c")),
        ]
    )
    assert sent(rows, 0) == [
        (b"a", b"k", 2, 5, [("h", b"1"), ("h", None)]),
        (None, None, -1, 0, None),
        (b"", b"", 0, 6, []),
    ]
    assert sent(rows, 1) == [(b"b", None, 1, 0, [("", b"2")]), (b"c", None, -1, 0, None)]


def test_columns_that_the_frame_lacks_are_null() -> None:
    """Spark passes only the columns of the user's frame."""
    full = batch((0, 0, b"a", b"k", [], 5, 2), (0, 1, b"b", b"l", None, 6, 1))
    assert sent(ArrowRows([full.select(["partition", "value"])]), 0) == [
        (b"a", None, -1, 0, None),
        (b"b", None, -1, 0, None),
    ]
    assert sent(ArrowRows([full.select(["partition", "offset", "value", "key", "output_partition"])]), 0) == [
        (b"a", b"k", 2, 0, None),
        (b"b", b"l", 1, 0, None),
    ]


UNORDERED = {
    "within a batch": [batch((0, 4, b""), (0, 3, b""))],
    "between batches": [batch((0, 4, b"")), batch((0, 3, b""))],
    "no offset": [batch((0, 4, b""), (0, None, b""))],
    "another range in between": [batch((0, 3, b""), (1, 0, b""), (0, 4, b""))],
    "a row is missing": [batch((0, 3, b""))],
}


@pytest.mark.parametrize("case", UNORDERED)
def test_rows_whose_order_is_checked(case: str) -> None:
    """Rows of one range must follow each other, with rising offsets; the rows of a message stay together."""
    wanted, transaction = part(0, 0, 9), Transaction()
    with pytest.raises(UnorderedError):
        ArrowRows(UNORDERED[case], {wanted: 2}).send(transaction, "t", wanted)  # type: ignore[arg-type]
    rows = ArrowRows([batch((0, 3, b"a"), (0, 3, b"b")), batch((0, 3, b"c"), (0, 7, b"d"))], {wanted: 4})
    assert rows.send(transaction, "t", wanted) == 4  # type: ignore[arg-type]
    without = ArrowRows([batch((0, 3, b"a"), (0, 1, b"b")).drop_columns(["offset"])], {wanted: 2})
    assert without.send(transaction, "t", wanted) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "row",
    [
        (0, 0, b"a", None, [{"key": "h", "value": b"1"}, {"key": None, "value": b"1"}]),
        (0, 0, b"a", None, None, 0),
        (0, 0, b"a", None, None, -1),
        (0, 0, b"a", None, None, None, -1),
    ],
)
def test_what_the_client_would_change_is_refused(row: Sequence[Any]) -> None:
    """The driver then finds the record and names it."""
    with pytest.raises(RecordRejectedError):
        sent(ArrowRows([batch((0, 0, b"fine", None, None, 7, 0)), batch((0, 0, b"fine"), row)]), 0)


class RangeSink:
    """Sends the records of a range, and finds the same note for each range."""

    topic, transaction_timeout_s, _patience_s = "t", 60.0, 1.0

    def __init__(self, note: object = None, error: Exception | None = None) -> None:
        self.note, self.error = note, error

    def _write(self, _place: object, wanted: Any, _count: int, rows: ArrowRows, *_: object, attempt: str) -> Step:  # noqa: ANN401
        self.attempt = attempt
        if self.error is not None:
            raise self.error
        rows.send(Transaction(), "t", wanted)  # type: ignore[arg-type]
        return Step.TAKEN

    def _found(self, _notes: object, _wanted: object) -> object:
        return self.note


class Task(_RangeTask):
    """A task with its sink."""

    @contextmanager
    def _place(self) -> Iterator[Any]:
        yield self.sink, SimpleNamespace(topic_id="id", notes=SimpleNamespace(newest=lambda _: {}))


def outcomes(sink: Any, counts: Mapping[Any, int], *tasks: Sequence[pa.RecordBatch]) -> Mapping[Any, _Outcome]:  # noqa: ANN401
    """Run a task on each list of batches."""

    def collect(task: Task) -> list[Any]:
        rows = (row for batches in tasks for result in task(batches) for row in result.to_pylist())
        return [SimpleNamespace(**row) for row in rows]

    task: Any = Task(sink, "id", {}, 0, counts, None, may_have_copy=False)  # type: ignore[arg-type]
    frame: Any = SimpleNamespace(mapInArrow=lambda task, _: SimpleNamespace(collect=lambda: collect(task)))
    return _run(task, frame)


A, B = part(0, 0, 9), part(1, 0, 9)


@pytest.mark.slow
def test_more_rows_than_were_counted_are_refused() -> None:
    """They come after those of another range, or in another task. They would be missing in the output."""
    first, second, late = batch((0, 3, b"")), batch((1, 0, b"")), batch((0, 4, b""))
    assert outcomes(RangeSink(), {A: 1, B: 1}, [first, second]) == {A: _Outcome.TAKEN, B: _Outcome.TAKEN}
    with pytest.raises(SinkRejectedError, match="changed while it was written"):
        outcomes(RangeSink(), {A: 1, B: 1}, [first, second, late])
    with pytest.raises(SinkRejectedError, match="changed while it was written"):
        outcomes(RangeSink(), {A: 1, B: 1}, [first, second], [late])


def test_records_after_those_of_an_older_generation_are_reported_by_each_attempt_of_the_task() -> None:
    """The second attempt finds the note of the first, and knows the older one from the driver."""
    older = SimpleNamespace(covers=lambda *_: True)
    assert outcomes(RangeSink(older), {A: 1}, [batch((0, 3, b""))]) == {A: _Outcome.APPENDED}


def test_an_error_while_a_fenced_task_looks_for_its_copy_is_reported() -> None:
    """It is not taken for another run."""
    sink = RangeSink(error=ProducerFencedError(1.0))

    def fail(*_: object) -> object:
        raise SinkRejectedError("a damaged note")

    sink._found = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(SinkRejectedError, match="a damaged note"):
        outcomes(sink, {A: 1}, [batch((0, 3, b""))])


class Records:
    """The same rows, as they are and sorted."""

    has_whole_partitions = True

    def __init__(self, *batches: pa.RecordBatch) -> None:
        self.runs: list[bool] = []
        self._batches = batches

    def as_they_are(self) -> Any:  # noqa: ANN401
        """Return the rows."""
        return SimpleNamespace(mapInArrow=lambda task, _: SimpleNamespace(collect=lambda: self._run(task)))

    def by_range(self, _: int) -> Any:  # noqa: ANN401
        """Return the rows as if Spark had sorted them."""
        return self.as_they_are()

    def _run(self, task: Task) -> list[Any]:
        self.runs.append(task.are_sorted)
        return [SimpleNamespace(**row) for result in task(self._batches) for row in result.to_pylist()]


class FencedSink(RangeSink):
    """A sink whose first writes of sorted rows are fenced."""

    transaction_timeout_s = 0.5

    def __init__(self, fences: int, took_s: float = 0.1) -> None:
        super().__init__()
        self.fences, self.took_s = fences, took_s

    def _write(self, *arguments: Any, attempt: str) -> Step:  # noqa: ANN401
        step = super()._write(*arguments, attempt=attempt)
        if self.fences:
            self.fences -= 1
            raise ProducerFencedError(self.took_s)
        return step

    def _fenced_error(self, wanted: object, took_s: float) -> SinkRejectedError:
        return SinkRejectedError(f"{wanted} fenced after {took_s}")


def _run_all_of(sink: FencedSink, records: Records, before_commit: Any) -> Any:  # noqa: ANN401
    task: Any = Task(sink, "id", {}, 0, {A: 2}, None, may_have_copy=True)  # type: ignore[arg-type]
    return _run_all(task, records, 1, before_commit)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_range_that_a_leftover_copy_fences_is_written_once_more() -> None:
    """The rows are out of order, and a copy of the first pass fences the second one. The claims are checked again."""
    records, checks = Records(batch((0, 4, b"")), batch((0, 3, b""))), list[int]()
    outcome = _run_all_of(FencedSink(1), records, lambda: checks.append(len(records.runs)))
    assert (outcome, records.runs, checks) == ({A: _Outcome.TAKEN}, [False, True, True], [2])

    with pytest.raises(SinkRejectedError, match="fenced"):
        _run_all_of(FencedSink(2), Records(batch((0, 4, b"")), batch((0, 3, b""))), lambda: None)


@pytest.mark.slow
def test_a_fenced_range_is_not_written_again_without_its_claim_or_after_its_time() -> None:
    """Another run owns it, or it would take as long again."""

    def lost() -> None:
        raise SinkRejectedError("the claim was lost")

    records = Records(batch((0, 3, b"")), batch((0, 4, b"")))
    with pytest.raises(SinkRejectedError, match="the claim was lost"):
        _run_all_of(FencedSink(1), records, lost)
    assert records.runs == [False]
    with pytest.raises(SinkRejectedError, match=r"fenced after 0\.5"):
        _run_all_of(FencedSink(1, took_s=0.5), records, lambda: None)


@pytest.mark.parametrize(
    ("largest", "larger", "rows"),
    [
        (250, {2_000: 0, 16_000: 0}, 40_000),
        (1_000_000, {2_000: 1_000_000, 16_000: 1_000_000}, 4_500),
        (1_000_000, {2_000: 90_000_000, 16_000: 2_000_000}, 500),
        (1_000_000, {2_000: 90_000_000, 16_000: 80_000_000}, 10),
        (20_000_000, {2_000: 20_000_000, 16_000: 20_000_000}, 1),
    ],
)
def test_a_few_large_rows_make_no_batch_small(largest: int, larger: dict[int, int], rows: int) -> None:
    """A batch of so many rows has at most 10 MB, whichever rows it has."""
    frame: Any = None
    records = FrameRecords({}, None, largest, larger, frame, has_whole_partitions=True, _size=0)
    assert records.batch_rows(10_000_000) == rows


@pytest.mark.slow
@pytest.mark.parametrize(("is_own", "end"), [(True, 9), (False, 9), (False, 5)])
def test_a_fenced_task_has_written_its_range_only_if_its_copy_has(is_own: bool, end: int) -> None:
    """A note of another run does not count, whether it has the range or an earlier one."""
    sink = RangeSink(error=ProducerFencedError(1.0))
    task: Any = Task(sink, "id", {}, 0, {A: 1}, None, may_have_copy=True)  # type: ignore[arg-type]
    sink.transaction_timeout_s = 0.01
    sink.note = SimpleNamespace(
        attempt=task.attempt if is_own else "another run",
        position=SimpleNamespace(position=end),
        covers=lambda *_: False,
    )
    (result,) = [row for found in task([batch((0, 3, b""))]) for row in found.to_pylist()]
    assert result["outcome"] == (_Outcome.TAKEN if is_own else _Outcome.FENCED).value


class SkippingSink(RangeSink):
    """Finds that another writer has taken the first range, and sends the records of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.transaction = Transaction()

    def _write(self, _place: object, wanted: Any, _count: int, rows: ArrowRows, *_: object, **__: object) -> Any:  # noqa: ANN401
        if wanted == A:
            return None
        rows.send(self.transaction, "t", wanted)  # type: ignore[arg-type]
        return Step.TAKEN


@pytest.mark.timeout(20)
def test_rows_of_a_range_that_is_skipped_are_not_sent_with_the_next_one() -> None:
    """They may begin in one batch and end in another."""
    sink = SkippingSink()
    batches = [batch((0, 3, b"a"), (0, 4, b"b")), batch((0, 5, b"c"), (1, 0, b"d")), batch((1, 1, b"e"))]
    assert outcomes(sink, {A: 3, B: 2}, batches) == {A: _Outcome.SKIPPED, B: _Outcome.TAKEN}
    assert [record[1] for record in sink.transaction.records] == [b"d", b"e"]
