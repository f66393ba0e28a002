"""A sink in memory, which decides by the same rules as the library's sinks and passes the same conformance cases."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import TakenRanges, Verdict, judge_ranges
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.sink import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    check_ranges,
    checked_after_read,
    refuse_foreign_rows,
    session_of,
    unreplaceable,
)
from marshal_dagster.spark.column_names import check_names, is_case_sensitive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Row = dict[str, Any]
"""A row: its values by column."""


@dataclass(slots=True)
class _StoredRange:
    """A range that was taken, with its rows."""

    range: ClaimedRange
    rows: list[Row] = field(default_factory=list)

    @property
    def has_offsets(self) -> bool:
        return all(row.get(OFFSET_COLUMN) is not None for row in self.rows)


class MemorySink(Steps):
    """An output in memory for `effectively_once`, which takes each range once per generation.

    `write` takes a Spark DataFrame, a pandas DataFrame or a list of dicts.

    Example:
        ```python
        sink = MemorySink()
        result = run_in_memory(orders_per_shop, records={"orders": ["north"]}, sink=sink)
        assert sink.rows() == [{"partition": 0, "shop": "north", "count": 1}]
        ```
    """

    supports_unordered_ranges = True

    def __init__(
        self, name: str = "memory", *, shared_by_groups: bool = False, previous_group: str | None = None
    ) -> None:
        """Create an empty output.

        Args:
            name: The output's name in errors.
            shared_by_groups: Whether several groups write all offsets of a topic to this output.
            previous_group: The group that wrote to this output before.
        """
        self.name = name
        self._groups = OutputGroups(f"sink {name}", shared_by_groups, previous_group)
        self._stored: list[_StoredRange] = []
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"MemorySink({self.name!r})"

    def rows(self) -> list[Row]:
        """Return all rows, those of each partition in the order of their ranges."""
        with self._lock:
            return [dict(row) for stored in self._in_order() for row in stored.rows]

    def ranges(self) -> list[ClaimedRange]:
        """Return the ranges that the output has, by partition and offset."""
        with self._lock:
            return [stored.range for stored in self._in_order()]

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Return what the sink would do with each range.

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written.
        """
        with self._lock:
            return self._judge(ranges)

    def write(
        self,
        frame: "DataFrame | Iterable[Mapping[str, Any]]",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Store the rows of all ranges that are not stored yet, in one step.

        Args:
            frame: The rows: a Spark DataFrame, a pandas DataFrame or dicts.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read, by partition.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: A range or a row cannot be written.
            ConfigurationError: The rows have no column `partition`.
        """
        check_ranges(ranges)
        if set(self.verdicts(ranges).values()) <= {Verdict.SKIP}:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        rows = rows_of_frame(frame)
        refuse_foreign_rows([row[PARTITION_COLUMN] for row in rows], ranges)
        before_commit()
        read: Mapping[int, Intervals] = {}
        if any(self._older(range_) for range_ in ranges):
            read = checked_after_read(offsets_read, before_commit)()
        self._reached("rows computed")
        with self._lock:
            verdicts = self._judge(ranges)
            taken = tuple(range_ for range_ in ranges if verdicts[range_] is not Verdict.SKIP)
            for range_ in taken:
                self._store(range_, [row for row in rows if row[PARTITION_COLUMN] == range_.partition], read)
        counts = {range_.partition: sum(row[PARTITION_COLUMN] == range_.partition for row in rows) for range_ in taken}
        return WriteResult(taken, tuple(range_ for range_ in ranges if range_ not in taken), counts)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the rows at these offsets, else the reason.

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason.
        """
        with self._lock:
            held = [
                (range_, stored.range.generation, stored.has_offsets)
                for range_ in ranges
                for stored in self._overlapping(range_)
            ]
            return unreplaceable(held, f"sink {self.name}") or self._groups.refusal(
                ranges, self._writers(ranges), self._held
            )

    def _judge(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = {}
        for range_ in ranges:
            taken = TakenRanges()
            for stored in self._of_partition(range_):
                taken.add(stored.range)
            verdicts[range_] = judge_ranges(taken.beside(range_), range_)
        undone = [range_ for range_, verdict in verdicts.items() if verdict is not Verdict.SKIP]
        self._groups.check(undone, self._writers(ranges), self._held)
        held = [
            (range_, stored.range.generation, stored.has_offsets) for range_ in undone for stored in self._older(range_)
        ]
        if reason := unreplaceable(held, f"sink {self.name}"):
            raise SinkRejectedError(reason)
        return verdicts

    def _store(self, range_: ClaimedRange, rows: list[Row], read: Mapping[int, Intervals]) -> None:
        new = [(row[OFFSET_COLUMN], row[OFFSET_COLUMN] + 1) for row in rows if row.get(OFFSET_COLUMN) is not None]
        replaced_offsets = [*read.get(range_.partition, ()), *new]
        for stored in self._older(range_, is_any=True):
            stored.rows = [row for row in stored.rows if not _is_replaced(row[OFFSET_COLUMN], range_, replaced_offsets)]
        self._stored.append(_StoredRange(range_, rows))

    def _of_partition(self, range_: ClaimedRange) -> list[_StoredRange]:
        key = range_.group, range_.topic, range_.partition
        return [
            stored for stored in self._stored if (stored.range.group, stored.range.topic, stored.range.partition) == key
        ]

    def _overlapping(self, range_: ClaimedRange) -> list[_StoredRange]:
        """Return the stored ranges with rows that overlap a range of the same incarnation of the topic."""
        return [
            stored
            for stored in self._of_partition(range_)
            if stored.rows
            and stored.range.data_topic_id == range_.data_topic_id
            and stored.range.start < range_.end
            and range_.start < stored.range.end
        ]

    def _older(self, range_: ClaimedRange, *, is_any: bool = False) -> list[_StoredRange]:
        """Return the stored ranges of older generations with rows that a range replaces; with offsets if `is_any`."""
        older = [
            stored
            for stored in (self._of_partition(range_) if is_any else self._overlapping(range_))
            if stored.range.generation < range_.generation and stored.range.data_topic_id == range_.data_topic_id
        ]
        return [stored for stored in older if stored.has_offsets] if is_any else older

    def _writers(self, ranges: Sequence[ClaimedRange]) -> set[str]:
        topics = {range_.topic for range_ in ranges}
        return {stored.range.group for stored in self._stored if stored.range.topic in topics}

    def _held(self, ranges: Sequence[ClaimedRange]) -> list[ClaimedRange]:
        return [range_ for range_ in ranges if self._overlapping(range_)]

    def _in_order(self) -> list[_StoredRange]:
        return sorted(self._stored, key=lambda stored: (stored.range.topic, stored.range.partition, stored.range.start))


def rows_of_frame(frame: object) -> list[Row]:
    """Return the rows of a Spark DataFrame, of a pandas DataFrame or of an iterable of dicts, each with its partition.

    Args:
        frame: The frame.

    Returns:
        The rows as dicts.

    Raises:
        ConfigurationError: A row has no column `partition`, or its partition or offset is no integer; or two columns
            have the same name.
    """
    given: Any = frame
    if hasattr(given, "collect"):  # Spark
        columns = list(given.columns)
        rows = [_plain(row) for row in given.collect()]
    elif hasattr(given, "to_dict"):  # pandas
        columns = [str(name) for name in given.columns]
        rows = cast("list[Row]", given.to_dict("records"))
    else:
        given = list(given) if isinstance(given, Iterable) else [given]
        wrong = [row for row in given if not isinstance(row, Mapping)]
        if wrong:
            raise ConfigurationError(f"the result has a {type(wrong[0]).__name__} as a row: return a list of dicts")
        rows = [dict(row) for row in given]
        columns = sorted(set.union(*(set(row) for row in rows))) if rows else [PARTITION_COLUMN]
    own = (PARTITION_COLUMN, OFFSET_COLUMN)
    check_names(columns, own, case_sensitive=is_case_sensitive(session_of(given)))
    if PARTITION_COLUMN not in columns or any(PARTITION_COLUMN not in row for row in rows):
        raise ConfigurationError(
            f"the result has no column {PARTITION_COLUMN!r}, by which a sink assigns each row to its range: keep the "
            "column"
        )
    for row in rows:
        for name in own:
            value = row.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ConfigurationError(
                    f"the result has {value!r} in column {name!r}, which must be the integer {name} of the message: a "
                    "run's sink refuses other types. Keep the column as it was read"
                )
    return rows


def _plain(row: Any) -> Row:  # noqa: ANN401 - a row of Spark
    made: Row = row.asDict(recursive=True)
    return made


def _is_replaced(offset: int, range_: ClaimedRange, replaced_offsets: Iterable[tuple[int, int]]) -> bool:
    if not range_.first_readable <= offset < range_.end:
        return False
    return any(start <= offset < end for start, end in replaced_offsets)
