"""What a test tells of the output under test, and the ranges and rows that the cases send there."""

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
"""Partition, offset, value; the offset is -1 where a row has none."""

COLUMNS = ("partition", "offset", "value")
LOG = "coordination-topic-id-"
TOPIC_ID = "the-first-data-topic--"
_TYPES = {"partition": "int", "offset": "bigint", "value": "string"}


@dataclass(frozen=True)
class LocalFrame:
    """Rows of plain Python with as much of a DataFrame as a sink uses that fetches its rows.

    That is `columns`, `schema`, `collect()` and `toLocalIterator()`. `rows` is None in a frame that must not be read.
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
            raise AssertionError("the frame was evaluated, though all of its ranges are in the output")
        self.reads.append("rows")
        named = SparkRow(*self.columns)
        return [named(*row) for row in self.rows]

    def toLocalIterator(self, prefetchPartitions: bool = False) -> Iterator["SparkRow"]:  # noqa: ARG002, FBT001, FBT002, N802, N803 - Spark's
        """Yield all rows."""
        return iter(self.collect())


class Target(ABC):
    """One output of the sink under test, empty when a case begins."""

    spark: "SparkSession | None" = None
    """With a session the frames are Spark's; without one they are a `LocalFrame`, and writers die for real (a fork)."""
    most_steps = 0
    """Ahead of how many of its lines a writer dies or stalls, spread evenly over all that it comes to.

    0 is all, with Spark 40. Where some are left out, a fault of a single line can be missed.
    """
    range_by_range = False
    """Whether each range of a call is a step of its own.

    A writer that dies may then have taken some of them, each as a whole. That is within the promise, which is made of
    ranges; a sink that has one step for all does not set this, and is held to it.
    """
    patience_s = 0.2
    """How long a writer that stalls holds up another before it goes on: it may hold a lock."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return a new sink of this output, as another process would make one."""

    def shared_sink(self) -> Sink | None:
        """Return a new sink of this output with `shared_by_groups=True`, None for a sink that groups never share."""
        return None

    @abstractmethod
    def rows(self) -> Iterable[tuple[int, int | None, str]]:
        """Return partition, offset and value of all rows that count in the output; read them without the sink."""

    def frame(self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = COLUMNS) -> "DataFrame":
        """Return a frame of these rows."""
        if self.spark is None:
            return cast("DataFrame", LocalFrame(list(columns), tuple(rows)))  # as much of one as the sink needs
        types = ", ".join(f"{name} {_TYPES[name]}" for name in columns)
        return self.spark.createDataFrame(list(rows), types).coalesce(2)

    def unreadable(self) -> "DataFrame":
        """Return a frame that fails when it is evaluated."""
        if self.spark is None:
            return cast("DataFrame", LocalFrame(list(COLUMNS), None))
        failing = "raise_error('evaluated, though all of its ranges are in the output') AS value"
        return self.frame([(0, 0, "x")]).selectExpr("partition", "offset", failing)

    def source_files(self) -> Collection[str]:
        """Return the files in whose lines a writer can die: those of the sink's class and what it inherits from."""
        return {inspect.getfile(kind) for kind in type(self.sink()).__mro__ if kind.__module__ != "builtins"}

    def found(self) -> list[Row]:
        """Return the rows as the cases compare them."""
        return sorted((partition, -1 if at is None else at, value) for partition, at, value in self.rows())


def shared_target(target: Target) -> Target | None:
    """Return the target with sinks that groups share, None where there are none."""
    if target.shared_sink() is None:
        return None
    shared = copy(target)
    shared.sink = target.shared_sink  # type: ignore[method-assign,assignment] # it returns sinks, as was seen
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
    """Return a range of a batch; `readable` is the first offset that retention has left."""
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
    """Return a range of a group whose members claim ranges."""
    return part(partition, start, end, in_any_order=True, **others)


def rows_of(value: str, *ranges: ClaimedRange, without: Iterable[int] = ()) -> list[Row]:
    """Return a row for each offset that can be read, but for those `without`."""
    gone = set(without)
    return [
        (range_.partition, offset, value)
        for range_ in ranges
        for offset in range(range_.first_readable, range_.end)
        if offset not in gone
    ]


def intervals(rows: Iterable[tuple[Any, ...]]) -> dict[int, list[tuple[int, int]]]:
    """Return the offsets of these rows, as a batch tells them."""
    offsets: dict[int, list[tuple[int, int]]] = {}
    for partition, offset, *_ in sorted(rows):
        runs = offsets.setdefault(partition, [])
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return offsets


def never() -> Mapping[int, Intervals]:
    """Stand for offsets that must not be asked for: a Spark job more."""
    raise AssertionError("asked for the offsets read where nothing older is to be replaced")


def deliver(
    target: Target,
    value: str,
    *ranges: ClaimedRange,
    rows: Sequence[Row] | None = None,
    without: Iterable[int] = (),
    sink: Sink | None = None,
    before_commit: BeforeCommit = lambda: None,
) -> WriteResult:
    """Do what a batch does: ask, process, write."""
    sink = sink or target.sink()
    sink.verdicts(ranges)
    read = rows_of(value, *ranges, without=without)
    outcome = sink.write(target.frame(read if rows is None else rows), ranges, lambda: intervals(read), before_commit)
    answered = {*outcome.taken, *outcome.skipped}
    expect(answered == set(ranges), f"write() of {listed(ranges)} told of {listed(answered)}")
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
        raise AssertionError(f"{when}: rows too many {twice[:10]}, rows missing {missing[:10]}")


def expect_refused(target: Target, value: str, *ranges: ClaimedRange, why: str) -> None:
    """Raise `AssertionError` unless the ranges are refused both times that the sink is asked, and nothing changes."""
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
    """Name the ranges."""
    return ", ".join(sorted(str(range_) for range_ in ranges)) or "no range"
