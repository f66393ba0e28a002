"""What the tables of a Postgres output say of its ranges, and how writers hold that while they judge by it.

Who writes in order, begins a generation, writes the first range that came in any order, or has very many partitions,
holds them alone from judging on until it has committed. All others whose ranges come in any order share them, which
keeps the generation as it is: they move their rows at the same time. Such a writer also locks the start of its range,
so that another with the same range waits, and then passes over it. At the very end, for as long as the commit takes, it
holds the partition's ranges: it looks once more for what overlaps its own, and nobody else can add any before it is
seen. Each kind is locked in one order, one kind after the other, so nobody waits in a circle.

Before all that a writer locks the topic's groups: shared with others of its group where no other group has ranges, else
alone. So of two groups that begin at once the second sees the first one's ranges.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, LiteralString

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredRanges
from marshal_dagster.sinks.sink import newer_version

if TYPE_CHECKING:
    from psycopg import Cursor

    from marshal_dagster._internal.postgres import Connection

VERSION = 2
"""The newest of what is in the sink's own tables; a newer one is refused.

A partition's position is of version 1 while all of its generation was written in order. In version 2 it is the end of
what was, null if nothing: who takes it for all that is there would pass over ranges or write them again.
"""
IN_ORDER = 1

_MOST_SHARED = 64
"""Ranges of one batch: each lock of a shared partition takes room in a table of the server that all sessions share."""


class LockMode(Enum):
    """How a transaction holds its partitions from judging until it ends."""

    NOT = ""
    SHARED = "FOR SHARE"
    ALONE = "FOR UPDATE"


@dataclass(frozen=True, slots=True)
class Row:
    """What stands in `marshal_ranges` for a partition."""

    version: int
    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    position: int | None


class LocksOutdatedError(Exception):
    """Another writer has changed what the transaction's locks were chosen by."""


class RangeTables:
    """The two tables as they stand in a transaction's connection, for the ranges of one batch."""

    def __init__(self, execute: "Callable[..., Cursor[tuple[Any, ...]]]", output: str, table: str) -> None:
        """Take what executes statements with the tables' names, the output's name there, and that of the positions."""
        self._execute, self._output, self._table = execute, output, table

    def key(self, ranges: Sequence[ClaimedRange]) -> tuple[str, str, str]:
        """Return output, group and topic, which all entries of a batch's ranges have in common."""
        return self._output, ranges[0].group, ranges[0].topic

    def groups(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> set[str]:
        """Return the groups of which the output has ranges of the topic of `ranges`."""
        output, _, topic = self.key(ranges)
        found = self._execute(
            connection,
            "SELECT DISTINCT member_group FROM {positions} WHERE output = %s AND topic = %s AND generation IS NOT NULL",
            (output, topic),
        )
        return {group for (group,) in found}

    def lock_groups(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> None:
        """Keep the groups of the topic as they are until the transaction ends, and others of several from writing."""
        own = {ranges[0].group}
        is_alone = self.groups(connection, ranges) == own
        name = json.dumps([self._output, ranges[0].topic])
        statement: LiteralString = "SELECT pg_advisory_xact_lock{}(hashtextextended(%s, 0))"
        connection.execute(statement.format("_shared" if is_alone else ""), (name,))
        if is_alone and self.groups(connection, ranges) != own:
            raise LocksOutdatedError

    def hold_for(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> LockMode:
        """Choose how to hold the partitions of `wanted`: shared where that leaves all rows as they are."""
        if len(wanted) > _MOST_SHARED or not all(range_.in_any_order for range_ in wanted):
            return LockMode.ALONE
        rows = self.rows(connection, wanted, LockMode.NOT)
        return LockMode.SHARED if may_share_lock(rows, wanted) else LockMode.ALONE

    def rows(self, connection: "Connection", ranges: Sequence[ClaimedRange], hold: LockMode) -> dict[int, Row]:
        """Read what stands for each partition, and hold it; always from the lowest partition on."""
        from psycopg import sql

        if not ranges:
            return {}
        key = self.key(ranges)
        partitions = [range_.partition for range_ in ranges]
        if hold is LockMode.ALONE:
            self._execute(
                connection,
                "INSERT INTO {positions} (output, member_group, topic, partition, version) "
                "SELECT %s, %s, %s, p, %s FROM unnest(%s::integer[]) AS p ORDER BY p "
                "ON CONFLICT (output, member_group, topic, partition) DO NOTHING",
                (*key, IN_ORDER, partitions),
            )
        stored_rows = self._execute(
            connection,
            "SELECT partition, version, coordination_topic_id, data_topic_id, generation, epoch, position "
            "FROM {positions} WHERE output = %s AND member_group = %s AND topic = %s AND partition = ANY(%s) "
            "ORDER BY partition {hold}",
            (*key, partitions),
            hold=sql.SQL(hold.value),
        )
        return {
            partition: Row(version, coordination, data, generation, epoch, position)
            for partition, version, coordination, data, generation, epoch, position in stored_rows
            if self._knows(version) and generation is not None
        }

    def stored(
        self,
        connection: "Connection",
        ranges: Sequence[ClaimedRange],
        rows: Mapping[int, Row],
        own: Collection[int],
    ) -> dict[int, StoredRanges]:
        """Put together what is stored beside each range; entries of ranges are looked at only where they can decide."""
        with_ranges = [
            range_
            for range_ in ranges
            if (row := rows.get(range_.partition)) and (range_.in_any_order or row.version != IN_ORDER)
        ]
        overlapping = self._overlapping(connection, with_ranges, own)
        in_order_after = [with_range for with_range in with_ranges if not with_range.in_any_order]
        stands = self._output_position(connection, in_order_after, own)
        stored = {}
        for range_ in ranges:
            if row := rows.get(range_.partition):
                position, epoch = stands.get(range_.partition, (row.position, row.epoch))
                stored[range_.partition] = StoredRanges(
                    coordination_topic_id=row.coordination_topic_id,
                    data_topic_id=row.data_topic_id,
                    generation=row.generation,
                    epoch=epoch,
                    below=row.position or 0,
                    position=position,
                    overlapping=overlapping.get(range_.partition),
                )
        return stored

    def _overlapping(
        self, connection: "Connection", ranges: Sequence[ClaimedRange], own: Collection[int]
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the first entry of the same generation that shares an offset with the range.

        Those of one generation do not overlap each other, so it is the first that ends behind the range's start.
        """
        if not ranges:
            return {}
        entries = self._execute(
            connection,
            "SELECT w.partition, t.start_offset, t.end_offset "
            "FROM unnest(%s::integer[], %s::bigint[], %s::bigint[], %s::bigint[]) "
            "AS w (partition, generation, start_offset, end_offset) CROSS JOIN LATERAL ("
            "SELECT start_offset, end_offset FROM {taken} AS e "
            "WHERE e.output = %s AND e.member_group = %s AND e.topic = %s AND e.partition = w.partition "
            "AND e.generation = w.generation AND e.end_offset > w.start_offset "
            "AND e.start_offset < e.end_offset AND e.id <> ALL(%s::bigint[]) "
            "ORDER BY e.end_offset LIMIT 1) AS t WHERE t.start_offset < w.end_offset",
            (*columns_of(ranges, "partition", "generation", "start", "end"), *self.key(ranges), list(own)),
        )
        return {partition: (start, end) for partition, start, end in entries}

    def _output_position(
        self, connection: "Connection", ranges: Sequence[ClaimedRange], own: Collection[int]
    ) -> dict[int, tuple[int | None, int]]:
        """Return where the output stands, by partition (None: there are gaps), and the highest token there."""
        if not ranges:
            return {}
        positions = self._execute(
            connection,
            "SELECT e.partition, CASE WHEN sum(e.end_offset - e.start_offset) = max(e.end_offset) - "
            "min(e.start_offset) THEN max(e.end_offset) END, max(e.epoch) "
            "FROM unnest(%s::integer[], %s::bigint[]) AS w (partition, generation) JOIN {taken} AS e "
            "ON e.partition = w.partition AND e.generation = w.generation "
            "WHERE e.output = %s AND e.member_group = %s AND e.topic = %s AND e.id <> ALL(%s::bigint[]) "
            "GROUP BY e.partition",
            (*columns_of(ranges, "partition", "generation"), *self.key(ranges), list(own)),
        )
        return {partition: (position, epoch) for partition, position, epoch in positions}

    def look_once_more(self, connection: "Connection", taken: Sequence[ClaimedRange], own: Collection[int]) -> None:
        """See that nobody has added what overlaps these ranges, and that nobody does before they are seen."""
        self._lock_names(connection, [self._name(range_) for range_ in taken])
        if self._overlapping(connection, taken, own):
            raise LocksOutdatedError

    def lock_starts(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> None:
        """Have whoever comes with one of these ranges wait until the transaction ends."""
        self._lock_names(connection, [self._name(range_, range_.generation, range_.start) for range_ in ranges])

    def _name(self, wanted: ClaimedRange, *further: int) -> str:
        return json.dumps([self._output, wanted.group, wanted.topic, wanted.partition, *further])

    def _lock_names(self, connection: "Connection", names: Sequence[str]) -> None:
        """Hold what is called so, always in one order, until the transaction ends."""
        connection.execute(
            "SELECT pg_advisory_xact_lock(number) FROM (SELECT DISTINCT hashtextextended(name, 0) AS number "
            "FROM unnest(%s::text[]) AS name ORDER BY number) AS numbers",
            (list(names),),
        )

    def _knows(self, version: int) -> bool:
        if version > VERSION:
            raise newer_version(f"table {self._table}", version, VERSION)
        return True


def check_row_count(executed: "Cursor[Any]", expected: int, table: str) -> None:
    """Raise `SinkRejectedError` unless a statement affected as many rows of `table` as expected."""
    if executed.rowcount != expected:
        raise SinkRejectedError(
            f"table {table}: a statement for {expected} rows had an effect on {executed.rowcount}, so a trigger or "
            "rule of the table skips or moves rows. Nothing was written; remove the trigger or rule"
        )


def may_share_lock(rows: Mapping[int, Row], wanted: Sequence[ClaimedRange]) -> bool:
    """Say whether `rows` stay as they are with `wanted`, which come in any order: such have come in each generation."""
    return all(
        (row := rows.get(range_.partition)) is not None
        and row.version != IN_ORDER
        and row.generation == range_.generation
        for range_ in wanted
    )


def columns_of(ranges: Sequence[ClaimedRange], *fields: str) -> list[list[Any]]:
    """Return of each of these fields the values in all ranges, for `unnest`."""
    return [[getattr(range_, field) for range_ in ranges] for field in fields]
