"""Reads and locks the tables that record which ranges a PostgreSQL output has, for `postgres`.

A writer locks its partitions' rows in `marshal_ranges` before it judges its ranges, until its transaction ends:

- Exclusively (`FOR UPDATE`), if its ranges come in order, begin a generation, are the first ones in any order, or are
  very many.
- Shared (`FOR SHARE`), in all other cases of ranges in any order. The lock keeps the generation unchanged, and several
  of these writers move their rows at the same time.

A writer with a shared lock also locks the start of its range, so that another writer of the same range waits and then
skips it. Immediately before its commit it locks the partition's ranges and checks again that no other range overlaps
its own; no other writer can add one until the commit is visible.

Locks of each kind are taken in a fixed order, and one kind after the other, so there are no deadlocks.

Before these locks, a writer locks the topic's groups: shared if only its own group has ranges there, else exclusively.
So if two groups start at the same time, the second sees the ranges of the first.
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
"""The newest version of rows in the sink's own tables that this code reads; newer ones are refused.

A position has version 1 if all ranges of its generation were written in order. In version 2 the position is the end of
the ranges written in order, or null if there are none. Code that took it for the whole content of the output would
skip ranges or write them again.
"""
IN_ORDER = 1
"""The version of a position whose ranges were all written in order."""

_MOST_SHARED = 64
"""The most ranges of a batch with shared locks: these locks use the server's lock table, which sessions share."""


class LockMode(Enum):
    """How a transaction locks its partitions from the judgement of its ranges until it ends."""

    NOT = ""
    SHARED = "FOR SHARE"
    ALONE = "FOR UPDATE"


@dataclass(frozen=True, slots=True)
class Row:
    """A partition's row in `marshal_ranges`."""

    version: int
    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    position: int | None


class LocksOutdatedError(Exception):
    """Another writer has changed the state by which the transaction's locks were chosen."""


class RangeTables:
    """Access to the two tables for the ranges of one batch, within a transaction."""

    def __init__(self, execute: "Callable[..., Cursor[tuple[Any, ...]]]", output: str, table: str) -> None:
        """Store the arguments; no statement is executed.

        Args:
            execute: Executes a statement with the tables' names filled in.
            output: The output's name in the tables.
            table: The name of the table of positions, for errors.
        """
        self._execute, self._output, self._table = execute, output, table

    def key(self, ranges: Sequence[ClaimedRange]) -> tuple[str, str, str]:
        """Return output, group and topic, which the entries of all ranges of a batch have in common."""
        return self._output, ranges[0].group, ranges[0].topic

    def groups(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> set[str]:
        """Return the groups that have ranges of the topic of `ranges` in the output."""
        output, _, topic = self.key(ranges)
        found = self._execute(
            connection,
            "SELECT DISTINCT member_group FROM {positions} WHERE output = %s AND topic = %s AND generation IS NOT NULL",
            (output, topic),
        )
        return {group for (group,) in found}

    def lock_groups(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> None:
        """Lock the groups of the topic until the transaction ends: no other group can start to write ranges.

        The lock is shared if only the ranges' own group has ranges there, else exclusive.

        Raises:
            LocksOutdatedError: If the topic's groups changed before the shared lock was acquired.
        """
        own = {ranges[0].group}
        is_alone = self.groups(connection, ranges) == own
        name = json.dumps([self._output, ranges[0].topic])
        statement: LiteralString = "SELECT pg_advisory_xact_lock{}(hashtextextended(%s, 0))"
        connection.execute(statement.format("_shared" if is_alone else ""), (name,))
        if is_alone and self.groups(connection, ranges) != own:
            raise LocksOutdatedError

    def hold_for(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> LockMode:
        """Choose how to lock the partitions of `wanted`: shared if writing them leaves all rows unchanged."""
        if len(wanted) > _MOST_SHARED or not all(range_.in_any_order for range_ in wanted):
            return LockMode.ALONE
        rows = self.rows(connection, wanted, LockMode.NOT)
        return LockMode.SHARED if may_share_lock(rows, wanted) else LockMode.ALONE

    def rows(self, connection: "Connection", ranges: Sequence[ClaimedRange], hold: LockMode) -> dict[int, Row]:
        """Read and lock the row of each partition, in ascending order of partitions."""
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
        """Return what is stored for each range's partition, without the entries `own` of this transaction.

        The entries of ranges are read only if they can influence the verdict.
        """
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
        """Return, by partition, the first entry of the same generation that overlaps the range.

        Entries of one generation do not overlap, so this is the first entry that ends after the range's start.
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
        """Return, by partition, the output's position (None if its ranges have gaps) and its highest fencing token."""
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
        """Lock the partitions' ranges, and check again that no other writer has added an overlapping range.

        Raises:
            LocksOutdatedError: If another writer has.
        """
        self._lock_names(connection, [self._name(range_) for range_ in taken])
        if self._overlapping(connection, taken, own):
            raise LocksOutdatedError

    def lock_starts(self, connection: "Connection", ranges: Sequence[ClaimedRange]) -> None:
        """Lock the start of each range, so that other writers of the same range wait until the transaction ends."""
        self._lock_names(connection, [self._name(range_, range_.generation, range_.start) for range_ in ranges])

    def _name(self, wanted: ClaimedRange, *further: int) -> str:
        return json.dumps([self._output, wanted.group, wanted.topic, wanted.partition, *further])

    def _lock_names(self, connection: "Connection", names: Sequence[str]) -> None:
        """Take advisory locks with these names until the transaction ends, always in the same order."""
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
            f"table {table}: a statement affected {executed.rowcount} rows instead of {expected}, because a trigger or "
            "rule of the table skips or moves rows, so nothing was written. Remove the trigger or rule"
        )


def may_share_lock(rows: Mapping[int, Row], wanted: Sequence[ClaimedRange]) -> bool:
    """Return whether writing `wanted`, which come in any order, leaves `rows` unchanged.

    This is so if each partition's generation is that of the range and has other ranges in any order.
    """
    return all(
        (row := rows.get(range_.partition)) is not None
        and row.version != IN_ORDER
        and row.generation == range_.generation
        for range_ in wanted
    )


def columns_of(ranges: Sequence[ClaimedRange], *fields: str) -> list[list[Any]]:
    """Return one list of values for each field, for `unnest`."""
    return [[getattr(range_, field) for range_ in ranges] for field in fields]
