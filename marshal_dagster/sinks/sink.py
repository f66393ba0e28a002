"""What a sink is: the questions that a batch asks of its output, and what it tells in return."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition, Verdict
from marshal_dagster.spark.column_names import check_names, name_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Intervals = Sequence[tuple[int, int]]
"""Offsets as rising half-open intervals [start, end)."""
OffsetsRead = Callable[[], Mapping[int, Intervals]]
"""Works out which offsets of each partition a batch has read; a Spark job, so asked only where needed."""

BeforeCommit = Callable[[], None]
"""Called each time that Kafka was read, before any row counts; what it raises leaves nothing written."""

PARTITION_COLUMN = "partition"
OFFSET_COLUMN = "offset"
_INTEGERS = frozenset({"byte", "short", "integer", "long"})


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of each range that was to be written.

    `taken` are in the output by this very call, `skipped` were there already; all of them can be committed. `rows`
    tells the rows written for each partition that was taken, as far as the output knows it. `note` is what a person who
    reads the output should know, if there is anything.
    """

    taken: tuple[ClaimedRange, ...]
    skipped: tuple[ClaimedRange, ...]
    rows: Mapping[int, int]
    note: str | None = None


class Sink(Protocol):
    """An output for effectively once.

    All ranges of one call are of one group and one topic, each partition at most once. What is raised leaves each range
    as it was, or wholly taken.
    """

    @property
    def supports_unordered_ranges(self) -> bool:
        """Whether it knows each range that it has, not only a position (`judge_ranges`).

        Only such a sink can be used in groups whose members claim ranges: there `ClaimedRange.in_any_order` is true.
        """
        ...

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Say what would be done with each range; asked before anything is processed.

        Raises `SinkRejectedError` where one of them could not be written: see `judge`, `judge_ranges` and
        `can_replace`.
        """
        ...

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range, in one step, in place of what older generations hold at the offsets read.

        Best is one step for all ranges; it may be one for each, where the output can do no other.

        Those of the rows themselves are among them, though compaction may have taken one since the rows were worked
        out. A row belongs to the range of its column `partition`; its column `offset`, if there is one, is that of the
        message it comes from, by which a newer generation can replace it. Ranges that are found done, by now or before,
        are left out. A range without rows is taken too. `before_commit` is how the batch makes sure, after Kafka was
        read and before the output is touched, that its claims hold and the topic is the same.
        Raises `SinkRejectedError`, `ConfigurationError`, and what `before_commit` raises.
        """
        ...

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace what is held at these offsets, else the reason."""
        ...


class Steps:
    """The steps of a sink's writes, by name: tests crash there."""

    def _reached(self, step: str) -> None:
        """Do nothing."""


def check_columns(schema: "StructType", reserved: Collection[str], *, case_sensitive: bool = False) -> None:
    """Raise `ConfigurationError` unless rows of `schema` can be assigned to ranges and have no column of `reserved`.

    Names are compared as a session does whose `spark.sql.caseSensitive` is `case_sensitive`; false is Spark's default.
    """
    check_names(schema.names, (PARTITION_COLUMN, OFFSET_COLUMN), case_sensitive=case_sensitive)
    types = {column.name: column.dataType.typeName() for column in schema.fields}
    if PARTITION_COLUMN not in types:
        raise ConfigurationError(
            f"the result has no column {PARTITION_COLUMN!r}, by which a sink for effectively once tells ranges apart: "
            f'keep it, in an aggregation too: groupBy("{PARTITION_COLUMN}", ...)'
        )
    for name in (PARTITION_COLUMN, OFFSET_COLUMN):
        if types.get(name, "integer") not in _INTEGERS:
            raise ConfigurationError(
                f"the result's column {name!r} is of type {types[name]}; it must be the message's own, a number: "
                "rename the other one"
            )
    own = {name_key(name, case_sensitive=case_sensitive) for name in reserved}
    taken = sorted(name for name in types if name_key(name, case_sensitive=case_sensitive) in own)
    if taken:
        raise ConfigurationError(f"the result's columns {', '.join(taken)} are the sink's own: rename them")


def session_of(frame: "DataFrame") -> "SparkSession | None":
    """Return the session of a frame; rows of plain Python, with which sinks are tested, have none."""
    return getattr(frame, "sparkSession", None)


def check_ranges(ranges: Sequence[ClaimedRange]) -> None:
    """Raise `ValueError` unless `ranges` are of one group and topic, each partition once."""
    if len({(range_.coordination_topic_id, range_.group, range_.topic) for range_ in ranges}) > 1:
        raise ValueError("ranges of more than one group or topic in one call")
    counts = Counter(range_.partition for range_ in ranges)
    twice = [partition for partition, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"partitions {twice} have more than one range in one call")


def quoted(name: str) -> str:
    """Return the column's name as Spark looks it up, where a plain dot leads into a structure."""
    return f"`{name.replace('`', '``')}`"


def refuse_foreign_rows(partitions: Collection[object], ranges: Sequence[ClaimedRange]) -> None:
    """Raise `SinkRejectedError` when there are rows of `partitions` that none of `ranges` has."""
    foreign = sorted(map(str, set(partitions) - {range_.partition for range_ in ranges}))
    if foreign:
        raise SinkRejectedError(
            f"the result has rows of partition {', '.join(foreign)}, which this batch did not read: nothing was "
            f"written; leave the column {PARTITION_COLUMN!r} as it was read"
        )


def checked_after_read(offsets_read: OffsetsRead, before_commit: BeforeCommit) -> OffsetsRead:
    """Return `offsets_read` with `before_commit` behind it: the topic read may be another than that of the rows."""

    def read() -> Mapping[int, Intervals]:
        offsets = offsets_read()
        before_commit()
        return offsets

    return read


def partition_key(wanted: ClaimedRange) -> tuple[str, str, int]:
    """Return group, topic and partition of a range."""
    return wanted.group, wanted.topic, wanted.partition


def within(taken: ClaimedRange, offsets: Intervals) -> tuple[tuple[int, int], ...]:
    """Return those of `offsets` that `taken` could read, as rising intervals that do not meet."""
    readable = [(max(start, taken.first_readable), min(end, taken.end)) for start, end in offsets]
    return tuple(joined((start, end) for start, end in readable if start < end))


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals in rising order; those that overlap or touch become one."""
    rising: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if rising and start <= rising[-1][1]:
            rising[-1] = rising[-1][0], max(rising[-1][1], end)
        else:
            rising.append((start, end))
    return rising


def both(one: Mapping[int, Intervals], other: Mapping[int, Intervals]) -> dict[int, Intervals]:
    """Return the intervals of both, by partition."""
    return {partition: (*one.get(partition, ()), *other.get(partition, ())) for partition in one.keys() | other.keys()}


def position_after(taken: ClaimedRange) -> StoredPosition:
    """Return what an output stores of a partition when it has taken a range."""
    return StoredPosition(
        coordination_topic_id=taken.coordination_topic_id,
        data_topic_id=taken.data_topic_id,
        generation=taken.generation,
        epoch=taken.epoch,
        position=taken.end,
    )


def newer_version(what: str, version: object, known: int) -> SinkRejectedError:
    """Return the refusal of what a newer marshal-dagster has written."""
    return SinkRejectedError(
        f"{what} has version {version}, this marshal-dagster knows {known}: run one that is at least as new as the "
        "output's last writer"
    )


def changed_result(what: str, expected: int, fetched: int) -> SinkRejectedError:
    """Return the refusal of a result that had another number of rows when they were fetched."""
    return SinkRejectedError(
        f"{what}: the result had {expected} rows, and {fetched} when they were fetched: nothing of it was written; an "
        "executor was lost, or the result is not the same each time it is computed"
    )


def unreplaceable(held: Iterable[tuple[ClaimedRange, int, bool]], where: str) -> str | None:
    """Return why rows without offsets cannot be replaced, and what to do; None if all rows have offsets.

    `held` are ranges where the output has rows, with the generation of these, and whether all of them have offsets.
    """
    for wanted, older_generation, has_offsets in held:
        if not has_offsets:
            return (
                f"{wanted} of group {wanted.group!r}: {where} holds rows of generation {older_generation} there that "
                f"have no column {OFFSET_COLUMN!r}, or nothing in it, so a new generation cannot replace them offset "
                "by offset; remove these rows and what the output knows of the group, or write to a new output"
            )
    return None
