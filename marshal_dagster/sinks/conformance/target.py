"""The description of an output under test (`Target`), and the ranges, rows and checks that the cases use."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.sink import BeforeCommit, Intervals, Sink, WriteResult
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import Row as SparkRow
    from pyspark.sql.types import StructType

Row = tuple[int, int, str]
"""Partition, offset and value; the offset is -1 if the row has none."""

COLUMNS = ("partition", "offset", "value")
LOG = "coordination-topic-id-"
TOPIC_ID = "the-first-data-topic--"
_TYPES = {"partition": "int", "offset": "bigint", "value": "string"}


@dataclass(frozen=True)
class LocalFrame:
    """Plain Python rows with the methods of a DataFrame that a sink uses to fetch rows.

    These are `columns`, `schema`, `collect()` and `toLocalIterator()`. `rows` is None in a frame that must not be read.
    """

    columns: list[str]
    rows: tuple[tuple[Any, ...], ...] | None
    reads: list[str] = field(default_factory=list)

    @property
    def schema(self) -> "StructType":
        """The columns' types."""
        types = {"partition": t.IntegerType(), "offset": t.LongType(), "value": t.StringType()}
        return t.StructType([t.StructField(name, types[name]) for name in self.columns])

    def collect(self) -> list["SparkRow"]:
        """Return all rows."""
        from pyspark.sql import Row as SparkRow

        if self.rows is None:
            raise AssertionError("the sink evaluated a frame although the output has all of its ranges")
        self.reads.append("rows")
        named = SparkRow(*self.columns)
        return [named(*row) for row in self.rows]

    def toLocalIterator(self, prefetchPartitions: bool = False) -> Iterator["SparkRow"]:  # noqa: ARG002, FBT001, FBT002, N802, N803 - Spark's
        """Yield all rows."""
        return iter(self.collect())


class Target(ABC):
    """An output of the sink under test, empty when a case begins. Subclasses implement `sink` and `rows`.

    Example:
        ```python
        class MyTarget(Target):
            def __init__(self, folder: Path) -> None:
                self.folder = folder

            def sink(self) -> Sink:
                return MySink(self.folder)

            def rows(self) -> Iterable[tuple[int, int | None, str]]:
                return read_my_rows(self.folder)
        ```
    """

    spark: "SparkSession | None" = None
    """The Spark session of the frames. Without one, frames are a `LocalFrame` and writers die in forked processes."""
    most_steps = 0
    """The most lines before which a writer dies or stalls, spread evenly over all lines that it runs.

    0 means all lines, or 40 with Spark. If lines are left out, a fault at a single line can be missed.
    """
    range_by_range = False
    """Whether the sink writes each range of a call in an atomic step of its own.

    If true, a writer that dies may have written some of the ranges, each completely. If false, the cases require that
    all ranges of a call are written in one step.
    """
    patience_s = 0.2
    """How many seconds a stalled writer waits for another writer before it continues: it may hold a lock."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return a new sink for this output, as another process would create it."""

    def shared_sink(self) -> Sink | None:
        """Return a new sink for this output with `shared_by_groups=True`, or None if groups cannot share it."""
        return None

    @abstractmethod
    def rows(self) -> Iterable[tuple[int, int | None, str]]:
        """Return partition, offset and value of all committed rows, read without the sink."""

    def frame(self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = COLUMNS) -> "DataFrame":
        """Return a frame of these rows.

        Args:
            rows: The rows, as tuples in the order of `columns`.
            columns: Some of the columns `partition`, `offset` and `value`.
        """
        if self.spark is None:
            return cast("DataFrame", LocalFrame(list(columns), tuple(rows)))  # has the methods that a sink needs
        types = ", ".join(f"{name} {_TYPES[name]}" for name in columns)
        return self.spark.createDataFrame(list(rows), types).coalesce(2)

    def unreadable(self) -> "DataFrame":
        """Return a frame that fails when it is evaluated."""
        if self.spark is None:
            return cast("DataFrame", LocalFrame(list(COLUMNS), None))
        failing = "string(raise_error('evaluated although the output has all of its ranges')) AS value"
        return self.frame([(0, 0, "x")]).selectExpr("partition", "offset", failing)

    def source_files(self) -> Collection[str]:
        """Return the source files in whose lines a writer dies: those of the sink's class and its base classes."""
        return {inspect.getfile(kind) for kind in type(self.sink()).__mro__ if kind.__module__ != "builtins"}

    def found(self) -> list[Row]:
        """Return the rows sorted, with -1 for missing offsets, as the cases compare them."""
        return sorted((partition, -1 if at is None else at, value) for partition, at, value in self.rows())


def shared_target(target: Target) -> Target | None:
    """Return the target with sinks that groups share, or None if groups cannot share them."""
    if target.shared_sink() is None:
        return None
    shared = copy(target)
    shared.sink = target.shared_sink  # type: ignore[method-assign,assignment] # not None, as checked above
    return shared


def part(
    partition: int,
    start: int,
    end: int,
    *,
    epoch: int = 10,
    generation: int = 0,
    readable: int | None = None,
    group: str = "g",
    topic: str = "t",
    log: str = LOG,
    topic_id: str = TOPIC_ID,
    in_any_order: bool = False,
) -> ClaimedRange:
    """Return a range of a batch; `readable` is the first offset that retention has not deleted."""
    return ClaimedRange(
        coordination_topic_id=log,
        group=group,
        topic=topic,
        data_topic_id=topic_id,
        partition=partition,
        generation=generation,
        epoch=epoch,
        start=start,
        end=end,
        first_readable=start if readable is None else readable,
        in_any_order=in_any_order,
    )


def ahead(partition: int, start: int, end: int, **others: Any) -> ClaimedRange:  # noqa: ANN401 - as `part`
    """Return a range in any order, as in a group whose members claim ranges."""
    return part(partition, start, end, in_any_order=True, **others)


def rows_of(value: str, *ranges: ClaimedRange, without: Iterable[int] = ()) -> list[Row]:
    """Return a row for each readable offset of the ranges, except the offsets `without`."""
    left_out = set(without)
    return [
        (range_.partition, offset, value)
        for range_ in ranges
        for offset in range(range_.first_readable, range_.end)
        if offset not in left_out
    ]


def intervals(rows: Iterable[tuple[Any, ...]]) -> dict[int, list[tuple[int, int]]]:
    """Return the offsets of these rows as intervals by partition, as `offsets_read` does."""
    offsets: dict[int, list[tuple[int, int]]] = {}
    for partition, offset, *_ in sorted(rows):
        runs = offsets.setdefault(partition, [])
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return offsets


def never() -> Mapping[int, Intervals]:
    """Raise `AssertionError`: an `offsets_read` that the sink must not call, because no older rows are replaced."""
    raise AssertionError("the sink called offsets_read() although there are no older rows to replace")


def deliver(
    target: Target,
    value: str,
    *ranges: ClaimedRange,
    rows: Sequence[Row] | None = None,
    without: Iterable[int] = (),
    sink: Sink | None = None,
    before_commit: BeforeCommit = lambda: None,
) -> WriteResult:
    """Call the sink as a batch does: `verdicts`, then `write`. Check that the result names exactly these ranges."""
    sink = sink or target.sink()
    sink.verdicts(ranges)
    read = rows_of(value, *ranges, without=without)
    outcome = sink.write(target.frame(read if rows is None else rows), ranges, lambda: intervals(read), before_commit)
    answered = {*outcome.taken, *outcome.skipped}
    expect(answered == set(ranges), f"write() of {listed(ranges)} returned results for {listed(answered)}")
    return outcome


def expect(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - as assert
    """Raise `AssertionError` unless `is_so`."""
    if not is_so:
        raise AssertionError(otherwise)


def expect_rows(target: Target, expected: Iterable[Row], when: str) -> None:
    """Raise `AssertionError` unless the output has exactly these rows."""
    found, wanted = target.found(), sorted(expected)
    if found != wanted:
        twice = sorted({row for row in found if found.count(row) > wanted.count(row)})
        missing = sorted({row for row in wanted if wanted.count(row) > found.count(row)})
        raise AssertionError(f"{when}: unexpected rows {twice[:10]}, missing rows {missing[:10]}")


def expect_refused(target: Target, value: str, *ranges: ClaimedRange, why: str) -> None:
    """Raise `AssertionError` unless both `verdicts` and `write` refuse the ranges, and the output does not change."""
    before, read = target.found(), rows_of(value, *ranges)
    expect_raised(SinkRejectedError, lambda: target.sink().verdicts(ranges), f"{why}: verdicts() of {listed(ranges)}")
    expect_raised(
        SinkRejectedError,
        lambda: target.sink().write(target.frame(read), ranges, lambda: intervals(read)),
        f"{why}: write()",
    )
    expect_rows(target, before, f"{why}, refused")


def expect_raised(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """Raise `AssertionError` unless `call` raises an error of this kind."""
    try:
        outcome = call()
    except kind:
        return
    raise AssertionError(f"{what} did not raise {kind.__name__}, but returned {outcome}")


def listed(ranges: Iterable[ClaimedRange]) -> str:
    """Return the names of the ranges."""
    return ", ".join(sorted(str(range_) for range_ in ranges)) or "no range"
