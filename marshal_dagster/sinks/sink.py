"""The `Sink` protocol: what a batch requires of its output. Also the checks and helpers that all sinks share."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import BatchAbortedError, ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition, Verdict
from marshal_dagster.spark.column_names import check_names, name_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Intervals = Sequence[tuple[int, int]]
"""Offsets as half-open intervals [start, end) in ascending order."""
OffsetsRead = Callable[[], Mapping[int, Intervals]]
"""Returns the offsets that a batch has read, by partition. It runs a Spark job, so a sink calls it only if needed."""

BeforeCommit = Callable[[], None]
"""Called after each read of Kafka and before rows are committed. If it raises, the sink does not write these rows."""

PARTITION_COLUMN = "partition"
OFFSET_COLUMN = "offset"
_INTEGERS = frozenset({"byte", "short", "integer", "long"})
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of `Sink.write`. The positions of all its ranges, taken or skipped, can be committed.

    Example:
        ```python
        WriteResult(taken=(ranges[0],), skipped=(ranges[1],), rows={0: 250})
        ```
    """

    taken: tuple[ClaimedRange, ...]
    """The ranges that this call wrote."""
    skipped: tuple[ClaimedRange, ...]
    """The ranges that the output already had, so this call did not write them."""
    rows: Mapping[int, int]
    """The number of rows written, by partition; partitions whose count the output does not know are missing."""
    note: str | None = None
    """A hint for readers of the output, shown in the batch's metadata."""


class Sink(Protocol):
    """An output for the delivery mode `effectively_once` (protocol.md, section 6).

    All ranges of one call belong to one group and one topic, with at most one range per partition. If a method raises,
    each range is either unchanged or completely written. docs/how-to/sinks.md, "A sink of your own", has a complete
    example.

    Example:
        ```python
        class MySink:
            supports_unordered_ranges = False

            def verdicts(self, ranges):
                return {range_: judge(self.stored_position(range_), range_) for range_ in ranges}

            def can_replace(self, ranges):
                return "this output cannot replace rows"

            def write(self, frame, ranges, offsets_read, before_commit=lambda: None): ...
        ```
    """

    @property
    def supports_unordered_ranges(self) -> bool:
        """Whether the output stores every range that it has, not only a position for each partition.

        Groups whose members claim ranges need this: their ranges arrive in any order (`ClaimedRange.in_any_order`).
        A sink that returns true decides with `judge_ranges`, any other with `judge`.
        """
        ...

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Return what the sink would do with each range. Called before the batch is processed.

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written; see `judge`, `judge_ranges` and `can_replace`.
        """
        ...

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range atomically, and replace the rows of older generations at the offsets read.

        Write all ranges in one atomic step if the output supports it, otherwise each range in one atomic step. Skip
        ranges that the output has. Store a range that has no rows too.

        Rows of older generations are replaced at the offsets that `offsets_read` returns and at the offsets of the
        new rows. Both are needed because compaction can remove a message after its row was computed.

        Args:
            frame: The rows. The column `partition` assigns a row to the range of that partition. The column `offset`,
                if present, is the offset of the row's message; only rows with an offset can be replaced later.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read, by partition.
            before_commit: Checks that the batch still holds its claims and that the data topic is the same. Call it
                after the rows are computed and before the output changes, and again after `offsets_read`.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: A range or a row cannot be written.
            ConfigurationError: The columns or the configuration of the output do not allow it.
            Exception: Any error that `before_commit` raises.
        """
        ...

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the output's rows at these offsets, else the reason.

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why these rows cannot be replaced.
        """
        ...


class Steps:
    """Named steps of a sink's writes, at which tests simulate crashes."""

    def _reached(self, step: str) -> None:
        """Do nothing; tests override this."""


def check_columns(schema: "StructType", reserved: Collection[str], *, case_sensitive: bool = False) -> None:
    """Check that rows can be assigned to ranges and that no column has a name that the sink reserves.

    Args:
        schema: The schema of the rows.
        reserved: The names of the sink's own columns.
        case_sensitive: The session's `spark.sql.caseSensitive`, by which names are compared.

    Raises:
        ConfigurationError: The column `partition` is missing, `partition` or `offset` is not an integer or is spelt
            in another case, or a reserved name is used.

    Example:
        ```python
        check_columns(frame.schema, {"my_sink_range"})
        ```
    """
    check_names(schema.names, (PARTITION_COLUMN, OFFSET_COLUMN), case_sensitive=case_sensitive)
    types = {column.name: column.dataType.typeName() for column in schema.fields}
    if PARTITION_COLUMN not in types:
        raise ConfigurationError(
            f"the result has no column {PARTITION_COLUMN!r}, by which a sink assigns each row to its range. Keep the "
            f'column, in an aggregation too: groupBy("{PARTITION_COLUMN}", ...)'
        )
    for name in (PARTITION_COLUMN, OFFSET_COLUMN):
        if types.get(name, "integer") not in _INTEGERS:
            raise ConfigurationError(
                f"the result's column {name!r} has type {types[name]}, but must be the integer {name} of the message. "
                "Rename your column, and keep the one that was read"
            )
    own = {name_key(name, case_sensitive=case_sensitive) for name in reserved}
    taken = sorted(name for name in types if name_key(name, case_sensitive=case_sensitive) in own)
    if taken:
        raise ConfigurationError(f"the result's columns {', '.join(taken)} are the sink's own: rename them")


def check_result(result: WriteResult | None, ranges: Sequence[ClaimedRange], sink: Sink) -> None:
    """Check that a sink has reported each range of a batch, so that no position is committed without its rows.

    Args:
        result: What the sink's `write` has returned; a sink that is not typed may return None.
        ranges: The ranges of the batch.
        sink: The sink, for the error.

    Raises:
        BatchAbortedError: A range is missing in the result, or is in it twice, or belongs to another batch.
    """
    reported = Counter(() if result is None else (*result.taken, *result.skipped))
    wrong = list(map(str, (Counter(ranges) - reported) + (reported - Counter(ranges))))
    if wrong:
        raise BatchAbortedError(
            f"{sink!r} has not reported each range once as taken or skipped: {first_few(wrong, _MOST_NAMED)}. So "
            "nothing is committed: correct the WriteResult that its write() returns"
        )


def session_of(frame: "DataFrame") -> "SparkSession | None":
    """Return the session of a frame, or None for the plain Python rows with which sinks are tested."""
    return getattr(frame, "sparkSession", None)


def check_ranges(ranges: Sequence[ClaimedRange]) -> None:
    """Raise `ValueError` unless `ranges` belong to one group and topic, with at most one range per partition."""
    if len({(range_.coordination_topic_id, range_.group, range_.topic) for range_ in ranges}) > 1:
        raise ValueError("ranges of more than one group or topic in one call")
    counts = Counter(range_.partition for range_ in ranges)
    twice = [partition for partition, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"partitions {twice} have more than one range in one call")


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark, so that a dot in it does not select a field of a struct."""
    return f"`{name.replace('`', '``')}`"


def ranges_to_write(verdicts: Mapping[ClaimedRange, Verdict]) -> tuple[ClaimedRange, ...]:
    """Return the ranges that the output does not have yet, in the order of their verdicts."""
    return tuple(range_ for range_, verdict in verdicts.items() if verdict is not Verdict.SKIP)


def write_result(
    ranges: Sequence[ClaimedRange],
    taken: tuple[ClaimedRange, ...],
    counts: Mapping[int, int] | Mapping[int | None, int],
    note: str | None = None,
) -> WriteResult:
    """Return the result of a batch of `ranges`, of which `taken` were written; `counts` has the rows by partition."""
    return WriteResult(
        taken=taken,
        skipped=tuple(range_ for range_ in ranges if range_ not in taken),
        rows={range_.partition: counts.get(range_.partition, 0) for range_ in taken},
        note=note,
    )


def refuse_foreign_rows(partitions: Collection[object], ranges: Sequence[ClaimedRange]) -> None:
    """Check that all rows belong to partitions that the batch has read.

    Args:
        partitions: The partitions of the rows; None of rows without one.
        ranges: The ranges of the batch.

    Raises:
        SinkRejectedError: There are rows of a partition without a range.

    Example:
        ```python
        counts = {row["partition"]: row["count"] for row in frame.groupBy("partition").count().collect()}
        refuse_foreign_rows(counts.keys(), ranges)
        ```
    """
    unread = set(partitions) - {range_.partition for range_ in ranges}
    foreign = sorted("null" if partition is None else str(partition) for partition in unread)
    if foreign:
        where = f"group {ranges[0].group!r}, topic {ranges[0].topic!r}: " if ranges else ""
        raise SinkRejectedError(
            f"{where}the result has rows of partition {', '.join(foreign)}, which this batch did not read, so nothing "
            f"was written. Do not change the column {PARTITION_COLUMN!r}"
        )


def checked_after_read(offsets_read: OffsetsRead, before_commit: BeforeCommit) -> OffsetsRead:
    """Return a function that calls `offsets_read` and then `before_commit`.

    The topic can be deleted and re-created between the two reads of Kafka; `before_commit` detects that.

    Args:
        offsets_read: Returns the offsets that the batch has read, by partition.
        before_commit: The check that `Sink.write` got from the batch.

    Returns:
        A function that returns what `offsets_read` returns, or raises what `before_commit` raises.

    Example:
        ```python
        offsets = checked_after_read(offsets_read, before_commit)()  # only if older rows must be replaced
        ```
    """

    def read() -> Mapping[int, Intervals]:
        offsets = offsets_read()
        before_commit()
        return offsets

    return read


def partition_key(wanted: ClaimedRange) -> tuple[str, str, int]:
    """Return group, topic and partition of a range."""
    return wanted.group, wanted.topic, wanted.partition


def within(taken: ClaimedRange, offsets: Intervals) -> tuple[tuple[int, int], ...]:
    """Return the part of `offsets` that `taken` could read, as separate intervals in ascending order."""
    readable = [(max(start, taken.first_readable), min(end, taken.end)) for start, end in offsets]
    return tuple(joined((start, end) for start, end in readable if start < end))


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals in ascending order, with overlapping and adjacent ones merged."""
    rising: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if rising and start <= rising[-1][1]:
            rising[-1] = rising[-1][0], max(rising[-1][1], end)
        else:
            rising.append((start, end))
    return rising


def fewest_intervals(intervals: Iterable[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """Merge overlapping and adjacent intervals, then the nearest ones until at most `most` remain."""
    rising = joined(intervals)
    while len(rising) > most:
        at = min(range(1, len(rising)), key=lambda at: rising[at][0] - rising[at - 1][1])
        rising[at - 1 : at + 1] = [(rising[at - 1][0], rising[at][1])]
    return tuple(rising)


def both(one: Mapping[int, Intervals], other: Mapping[int, Intervals]) -> dict[int, Intervals]:
    """Return the intervals of both mappings, by partition."""
    return {partition: (*one.get(partition, ()), *other.get(partition, ())) for partition in one.keys() | other.keys()}


def position_after(taken: ClaimedRange) -> StoredPosition:
    """Return the position that an output stores for a partition after it has taken a range."""
    return StoredPosition(
        coordination_topic_id=taken.coordination_topic_id,
        data_topic_id=taken.data_topic_id,
        generation=taken.generation,
        epoch=taken.epoch,
        position=taken.end,
    )


def newer_version(what: str, version: object, known: int) -> SinkRejectedError:
    """Return the error for data that a newer version of marshal-dagster has written."""
    return SinkRejectedError(
        f"{what} has version {version}, but this marshal-dagster supports only {known}. Run a version that is at least "
        "as new as the output's last writer"
    )


def changed_result(what: str, expected: int, fetched: int) -> SinkRejectedError:
    """Return the error for a result whose number of rows changed between counting and fetching them."""
    return SinkRejectedError(
        f"{what}: the result had {expected} rows, and {fetched} when they were fetched, so none of them were written. "
        "Run the batch again if an executor was lost; otherwise make the result the same each time it is computed"
    )


def unreplaceable(held: Iterable[tuple[ClaimedRange, int, bool]], where: str) -> str | None:
    """Return why rows without offsets cannot be replaced, and what to do; None if all rows have offsets.

    Args:
        held: The ranges where the output has rows: range, generation of the rows, and whether all have offsets.
        where: The output's name.
    """
    for wanted, older_generation, has_offsets in held:
        if not has_offsets:
            return (
                f"{wanted} of group {wanted.group!r}: {where} holds rows of generation {older_generation} there that "
                f"have no column {OFFSET_COLUMN!r} or null in it, so a new generation cannot replace them. Remove "
                "these rows and the group's positions from the output, or write to a new output"
            )
    return None
