"""Write the ranges of a batch from Spark's tasks: each range is a transaction of the task that has its rows.

The driver evaluates the rows, and checks the claims and the data topic. A task then fences all earlier writers of its
range's partition, reads the newest note, and judges the range by it, as the driver would. So a claim that is lost in
between adds nothing: the next owner writes the same range, and whichever writer is later finds it done
(docs/contributing/decisions/0017-kafka-records-from-tasks.md).
"""

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.kafka.transactions import (
    ProducerFencedError,
    RecordRejectedError,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.kafka.arrow_rows import ArrowRows, UnorderedError
from marshal_dagster.sinks.kafka.notes import new_attempt
from marshal_dagster.sinks.kafka.range_write import Place, RangeSink, Step
from marshal_dagster.sinks.kafka.records import (
    FrameRecords,
)
from marshal_dagster.sinks.sink import BeforeCommit
from marshal_dagster.spark.arrow_tasks import error_as_text, error_from_text, limited_batches, sparing_next_tasks
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.task_secret import TaskSecret, task_secret

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

_RESULTS: Final = "partition bigint, outcome string, text string, took_s double"
_ARROW_BYTES: Final = 32_000_000
"""The maximum size of a batch of rows that Spark passes to Python."""
_TASKS: Final = "spark.sql.shuffle.partitions"
_SPECULATION: Final = "spark.speculation"
_PAUSE_S: Final = 0.2
_RARE_COPY_S: Final = 5.0


class _Outcome(StrEnum):
    TAKEN = Step.TAKEN.value
    APPENDED = Step.APPENDED.value
    SKIPPED = "skipped"
    REJECTED = "rejected"
    """A record was rejected, and nothing was written."""
    UNORDERED = "unordered"
    """The rows are not in the order of their messages, and nothing was written."""
    FENCED = "fenced"
    FAILED = "failed"
    """The text is that of `error_as_text`."""


_UNDONE: Final = frozenset({_Outcome.UNORDERED, _Outcome.FENCED})
_STEPS: Final[Mapping[_Outcome, Step | None]] = {
    _Outcome.TAKEN: Step.TAKEN,
    _Outcome.APPENDED: Step.APPENDED,
    _Outcome.SKIPPED: None,
}


def write_in_tasks(
    sink: RangeSink,
    place: Place,
    counts: Mapping[ClaimedRange, int],
    records: FrameRecords,
    before_commit: BeforeCommit,
) -> dict[ClaimedRange, Step | None]:
    """Write the ranges from Spark's tasks.

    Args:
        sink: The sink.
        place: The output.
        counts: The ranges and their numbers of records.
        records: The evaluated records.
        before_commit: Checks the claims again before ranges whose task was fenced are written again.

    Returns:
        What was done with each range, None if another writer has taken it. Ranges of which a record was rejected are
        missing.

    Raises:
        MarshalError: A range cannot be written; nothing of it is visible.
        UnavailableError: Kafka cannot be reached, or a task has died.
    """
    if not counts:
        return {}
    spark = records.session
    notes = place.notes.newest(sink._patience_s)
    with (
        task_secret(spark, pickle.dumps(sink._connection.detached())) as secret,
        limited_batches(spark, records.batch_rows(_ARROW_BYTES), is_size_known=True),
    ):
        task = _RangeTask(
            sink._with_connection(None),
            place.topic_id,
            dict(notes),
            place.notes.next_offset,
            counts,
            secret,
            may_have_copy=str(spark.conf.get(_SPECULATION, "false")).lower() == "true",
        )
        outcomes = _run_all(task, records, int(spark.conf.get(_TASKS) or 1), before_commit)
    return {range_: _STEPS[outcome] for range_, outcome in outcomes.items() if outcome in _STEPS}


def _run_all(
    task: "_RangeTask", records: FrameRecords, most_tasks: int, before_commit: BeforeCommit
) -> "dict[ClaimedRange, _Outcome]":
    """Run the task until each range has an outcome: on the rows as they are, on sorted rows, and if need be once more.

    With `spark.speculation` a leftover copy of an earlier task can fence a later one. So ranges that were fenced are
    written once more, if the batch still holds its claims.
    """
    outcomes: dict[ClaimedRange, _Outcome] = {}
    if records.has_whole_partitions:
        outcomes = _run(task, records.as_they_are())
    for is_last in (False, True):
        undone = {range_ for range_ in task.counts if outcomes.get(range_, _Outcome.UNORDERED) in _UNDONE}
        is_fenced = _Outcome.FENCED in outcomes.values()
        if not undone or (is_last and not is_fenced):
            break
        if is_fenced:
            before_commit()
        done = [range_.partition for range_ in task.counts if range_ not in undone]
        kept = {range_: outcome for range_, outcome in outcomes.items() if range_ not in undone}
        rows = without_partitions(records.by_range(most_tasks), done)
        outcomes = kept | _run(replace(task, are_sorted=True), rows, is_last=is_last)
    return outcomes


def _run(task: "_RangeTask", rows: "DataFrame", *, is_last: bool = False) -> "dict[ClaimedRange, _Outcome]":
    """Run a task on each partition of a frame, and return what was done with each range that it has rows of.

    A range that was fenced is an error if the run is the last one, or if its records were not sent in time.
    """
    sink = task.sink
    try:
        found = rows.mapInArrow(task, _RESULTS).collect()
    except Exception as error:
        raise UnavailableError(
            f"topic {sink.topic}: a Spark task that wrote to it has died ({first_line(error)}). The next attempt "
            "of the batch finds out which ranges were written"
        ) from error
    ranges = {range_.partition: range_ for range_ in task.counts}
    results = [_Result(ranges[row.partition], _Outcome(row.outcome), row.text, row.took_s) for row in found]
    for result in results:
        result.check(sink, is_last=is_last)
    outcomes = {result.range_: result.outcome for result in results}
    if len(outcomes) < len(results):
        raise SinkRejectedError(
            f"topic {sink.topic}: the result of the batch changed while it was written. Make the result the same each "
            "time it is computed"
        )
    return outcomes


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a task for one range."""

    range_: ClaimedRange
    outcome: _Outcome
    text: str = ""
    took_s: float = 0.0

    def to_arrow(self) -> "RecordBatch":
        """Return the result as a row of Spark's."""
        import pyarrow as pa

        return pa.RecordBatch.from_pydict(
            {
                "partition": pa.array([self.range_.partition], pa.int64()),
                "outcome": pa.array([self.outcome.value], pa.string()),
                "text": pa.array([self.text], pa.string()),
                "took_s": pa.array([self.took_s], pa.float64()),
            }
        )

    def check(self, sink: RangeSink, *, is_last: bool) -> None:
        """Raise the error that the task had, unless a further run may write the range."""
        if self.outcome is _Outcome.FENCED and (is_last or self.took_s >= sink.transaction_timeout_s):
            raise sink._fenced_error(self.range_, self.took_s)
        if self.outcome is _Outcome.FAILED:
            raise error_from_text(self.text)


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """The function that each Spark task runs on the rows of its ranges. It yields a result for each range."""

    sink: RangeSink
    topic_id: str
    notes: Mapping[str, bytes]
    next_offset: int
    """The offset up to which the driver has read the topic of notes."""
    counts: Mapping[ClaimedRange, int]
    connection: TaskSecret
    may_have_copy: bool
    """Whether Spark may run a task twice at the same time, and uses the result of the process that ends first."""
    are_sorted: bool = False
    """Whether the rows of each task are sorted by the partition and the offset of their messages."""
    attempt: str = field(default_factory=new_attempt)

    def __call__(self, batches: Iterable["RecordBatch"]) -> Iterator["RecordBatch"]:
        rows = ArrowRows(batches, None if self.are_sorted else self.counts)
        if rows.partition is None:
            return
        with sparing_next_tasks(), self._place() as (sink, place):
            for result in self._results(sink, place, rows):
                yield result.to_arrow()

    @contextmanager
    def _place(self) -> Iterator[tuple[RangeSink, Place]]:
        sink = self.sink._with_connection(pickle.loads(self.connection.value()))  # noqa: S301 - the driver's own bytes
        with sink._notes_reader() as (topics, notes):
            notes.resume(self.notes, self.next_offset)
            yield sink, Place(self.topic_id, notes, topics)

    def _results(self, sink: RangeSink, place: Place, rows: "ArrowRows") -> Iterator[_Result]:
        ranges = {range_.partition: range_ for range_ in self.counts}
        undone = set(ranges)
        while (partition := rows.partition) is not None:
            if partition in undone:  # only rows that are not sorted can return to a range
                undone.remove(partition)
                result = self._write(sink, place, ranges[partition], rows)
                yield result
                if result.outcome in {_Outcome.FENCED, _Outcome.FAILED}:
                    return
            elif partition in rows.complete:
                yield _Result(ranges[partition], _Outcome.UNORDERED)  # the driver refuses a second result of a range
                return
            rows.skip(partition)

    def _write(self, sink: RangeSink, place: Place, wanted: ClaimedRange, rows: "ArrowRows") -> _Result:
        try:
            step = sink._write(place, wanted, self.counts[wanted], rows, lambda: None, attempt=self.attempt)
        except ProducerFencedError as fenced:
            return self._fenced(sink, place, wanted, fenced.took_s)
        except UnorderedError:
            return _Result(wanted, _Outcome.UNORDERED)
        except RecordRejectedError as rejected:
            return _Result(wanted, _Outcome.REJECTED, str(rejected))
        except MarshalError as error:
            return _Result(wanted, _Outcome.FAILED, error_as_text(error))
        return _Result(wanted, _Outcome.SKIPPED) if step is None else self._written(sink, place, wanted)

    def _written(self, sink: RangeSink, place: Place, wanted: ClaimedRange) -> _Result:
        """Return the result for a range that this task has written, in this process or in another one."""
        before = sink._found(self.notes, wanted)
        is_appended = before is not None and before.covers(wanted, place.topic_id)
        return _Result(wanted, _Outcome.APPENDED if is_appended else _Outcome.TAKEN)

    def _fenced(self, sink: RangeSink, place: Place, wanted: ClaimedRange, took_s: float) -> _Result:
        try:
            is_written = self._is_written_by_copy(sink, place, wanted)
        except MarshalError as error:
            return _Result(wanted, _Outcome.FAILED, error_as_text(error))
        if is_written:
            return self._written(sink, place, wanted)
        return _Result(wanted, _Outcome.FENCED, took_s=took_s)

    def _is_written_by_copy(self, sink: RangeSink, place: Place, wanted: ClaimedRange) -> bool:
        """Wait for the note of the writer that has fenced this one. Return whether it ran the same task.

        Without speculation a copy is rare: Spark has lost sight of an executor that still works. So the wait is short.
        """
        deadline = time.monotonic() + (sink.transaction_timeout_s if self.may_have_copy else _RARE_COPY_S)
        while time.monotonic() < deadline:
            note = sink._found(place.notes.newest(sink._patience_s), wanted)
            if note is not None and note.attempt == self.attempt:
                return True
            if note is not None and note.position.position >= wanted.end:
                return False
            time.sleep(_PAUSE_S)
        return False
