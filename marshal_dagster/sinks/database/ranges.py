"""Reads, locks and writes the tables that record which ranges a database output has, for `sink`.

A writer locks its partitions' rows in `marshal_ranges` before it judges its ranges, until its transaction ends:

- Exclusively, if its ranges come in order, begin a generation, are the first ones in any order, or are very many.
- Shared, in all other cases of ranges in any order, if the dialect has such locks. The lock keeps the generation
  unchanged, and several of these writers move their rows at the same time.

A writer with a shared lock also locks the start of its range, so that another writer of the same range waits and then
skips it. Immediately before its commit it locks the partition's ranges and checks again that no other range overlaps
its own; no other writer can add one until the commit is visible.

Locks of each kind are taken in a fixed order, and one kind after the other, so there are no deadlocks.

Before these locks, a writer locks the topic's groups: shared if only its own group has ranges there, else exclusively.
So if two groups start at the same time, the second sees the ranges of the first.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredRanges
from marshal_dagster.sinks.database.dialect import (
    POSITIONS,
    TAKEN,
    Connection,
    Cursor,
    Dialect,
    Kind,
    LockMode,
    LocksOutdatedError,
)
from marshal_dagster.sinks.sink import newer_version

VERSION = 2
"""The newest version of rows in the sink's own tables that this code reads; newer ones are refused.

A position has version 1 if all ranges of its generation were written in order. In version 2 the position is the end of
the ranges written in order, or null if there are none. Code that took it for the whole content of the output would
skip ranges or write them again.
"""
IN_ORDER = 1
"""The version of a position whose ranges were all written in order."""
MERGED = 2
"""The version of an entry in `marshal_taken_ranges` that a vacuum has merged from entries of adjacent ranges."""

_MOST_SHARED = 64
"""The most ranges of a batch with shared locks: these locks use the server's lock table, which sessions share."""


@dataclass(frozen=True, slots=True)
class Row:
    """A partition's row in `marshal_ranges`."""

    version: int
    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    position: int | None


class RangeTables(Generic[Connection]):
    """Access to the two tables for the ranges of one batch, within a transaction."""

    def __init__(self, dialect: Dialect[Connection]) -> None:
        """Store the dialect; no statement is executed."""
        self._dialect = dialect

    def key(self, ranges: Sequence[ClaimedRange]) -> dict[str, object]:
        """Return output, group and topic, which the entries of all ranges of a batch have in common."""
        return {"output": self._dialect.output, "member_group": ranges[0].group, "topic": ranges[0].topic}

    def groups(self, connection: Connection, ranges: Sequence[ClaimedRange]) -> set[str]:
        """Return the groups that have ranges of the topic of `ranges` in the output."""
        found = self._dialect.execute(
            connection,
            "SELECT DISTINCT member_group FROM {positions} "
            "WHERE output = %(output)s AND topic = %(topic)s AND generation IS NOT NULL",
            {"output": self._dialect.output, "topic": ranges[0].topic},
        )
        return {group for (group,) in found.fetchall()}

    def lock_groups(self, connection: Connection, ranges: Sequence[ClaimedRange]) -> None:
        """Lock the groups of the topic until the transaction ends: no other group can start to write ranges.

        The lock is shared if only the ranges' own group has ranges there, else exclusive.

        Raises:
            LocksOutdatedError: The topic's groups changed before the shared lock was acquired.
        """
        own = {ranges[0].group}
        is_alone = self.groups(connection, ranges) == own
        self._dialect.lock_topic(connection, ranges[0].topic, shared=is_alone)
        if is_alone and self.groups(connection, ranges) != own:
            raise LocksOutdatedError

    def hold_for(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> LockMode:
        """Choose how to lock the partitions of `wanted`: shared if writing them leaves all rows unchanged."""
        has_shared = LockMode.SHARED in self._dialect.lock_clauses
        if not has_shared or len(wanted) > _MOST_SHARED or not all(range_.in_any_order for range_ in wanted):
            return LockMode.ALONE
        rows = self.rows(connection, wanted, LockMode.NOT)
        return LockMode.SHARED if may_share_lock(rows, wanted) else LockMode.ALONE

    def rows(self, connection: Connection, ranges: Sequence[ClaimedRange], hold: LockMode) -> dict[int, Row]:
        """Read and lock the row of each partition, in ascending order of partitions."""
        if not ranges:
            return {}
        key = self.key(ranges)
        partitions = [range_.partition for range_ in ranges]
        if hold is LockMode.ALONE:
            self._dialect.execute(
                connection,
                'INSERT INTO {positions} (output, member_group, topic, "partition", version) '
                'SELECT %(output)s, %(member_group)s, %(topic)s, w."partition", %(version)s FROM {wanted} '
                f'WHERE 1 = 1 ORDER BY w."partition" {self._dialect.keep_existing}',
                {**key, "version": IN_ORDER},
                wanted=self._dialect.ranges("w", ranges, "partition"),
            )
        stored_rows = self._dialect.execute(
            connection,
            'SELECT "partition", version, coordination_topic_id, data_topic_id, generation, epoch, position '
            "FROM {positions} WHERE output = %(output)s AND member_group = %(member_group)s AND topic = %(topic)s "
            f'AND {{is_wanted}} ORDER BY "partition" {self._dialect.lock_clauses[hold]}',
            key,
            is_wanted=self._dialect.one_of('"partition"', partitions),
        )
        return {
            partition: Row(version, coordination, data, generation, epoch, position)
            for partition, version, coordination, data, generation, epoch, position in stored_rows.fetchall()
            if self._knows(version) and generation is not None
        }

    def stored(
        self,
        connection: Connection,
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
        positions = self._output_position(connection, in_order_after, own)
        stored = {}
        for range_ in ranges:
            if row := rows.get(range_.partition):
                position, epoch = positions.get(range_.partition, (row.position, row.epoch))
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
        self, connection: Connection, ranges: Sequence[ClaimedRange], own: Collection[int]
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the first entry of the same generation that overlaps the range.

        Entries of one generation do not overlap, so this is the first entry that ends after the range's start. A merged
        entry does not show where its ranges began and ended. It counts as the range itself if it contains the range.
        """
        if not ranges:
            return {}
        is_within = f"t.version = {MERGED} AND t.start_offset <= w.start_offset AND t.end_offset >= w.end_offset"
        entries = self._dialect.execute(
            connection,
            f'SELECT w."partition", CASE WHEN {is_within} THEN w.start_offset ELSE t.start_offset END, '
            f"CASE WHEN {is_within} THEN w.end_offset ELSE t.end_offset END FROM {{wanted}} "
            "JOIN {taken} AS t ON t.id = ("
            "SELECT e.id FROM {taken} AS e "
            "WHERE e.output = %(output)s AND e.member_group = %(member_group)s AND e.topic = %(topic)s "
            'AND e."partition" = w."partition" AND e.generation = w.generation AND e.end_offset > w.start_offset '
            "AND e.start_offset < e.end_offset AND NOT {is_own} ORDER BY e.end_offset LIMIT 1) "
            "WHERE t.start_offset < w.end_offset",
            self.key(ranges),
            wanted=self._dialect.ranges("w", ranges, "partition", "generation", "start", "end"),
            is_own=self._dialect.one_of("e.id", own),
        )
        return {partition: (start, end) for partition, start, end in entries.fetchall()}

    def _output_position(
        self, connection: Connection, ranges: Sequence[ClaimedRange], own: Collection[int]
    ) -> dict[int, tuple[int | None, int]]:
        """Return, by partition, the output's position (None if its ranges have gaps) and its highest fencing token."""
        if not ranges:
            return {}
        positions = self._dialect.execute(
            connection,
            'SELECT e."partition", CASE WHEN sum(e.end_offset - e.start_offset) = max(e.end_offset) - '
            "min(e.start_offset) THEN max(e.end_offset) END, max(e.epoch) "
            'FROM {wanted} JOIN {taken} AS e ON e."partition" = w."partition" AND e.generation = w.generation '
            "WHERE e.output = %(output)s AND e.member_group = %(member_group)s AND e.topic = %(topic)s "
            'AND NOT {is_own} GROUP BY e."partition"',
            self.key(ranges),
            wanted=self._dialect.ranges("w", ranges, "partition", "generation"),
            is_own=self._dialect.one_of("e.id", own),
        )
        return {partition: (position, epoch) for partition, position, epoch in positions.fetchall()}

    def look_once_more(self, connection: Connection, taken: Sequence[ClaimedRange], own: Collection[int]) -> None:
        """Lock the partitions' ranges, and check again that no other writer has added an overlapping range.

        Raises:
            LocksOutdatedError: Another writer has added one.
        """
        self._dialect.lock_names(connection, [self._name(range_) for range_ in taken])
        if self._overlapping(connection, taken, own):
            raise LocksOutdatedError

    def lock_starts(self, connection: Connection, ranges: Sequence[ClaimedRange]) -> None:
        """Lock the start of each range, so that other writers of the same range wait until the transaction ends."""
        names = [self._name(range_, range_.generation, range_.start) for range_ in ranges]
        self._dialect.lock_names(connection, names)

    def _name(self, wanted: ClaimedRange, *further: int) -> str:
        return json.dumps([self._dialect.output, wanted.group, wanted.topic, wanted.partition, *further])

    def _knows(self, version: int) -> bool:
        if version > VERSION:
            raise newer_version(f"table {self._dialect.schema}.{POSITIONS}", version, VERSION)
        return True

    def held(
        self, connection: Connection, ranges: Sequence[ClaimedRange], *, only_older: bool
    ) -> list[tuple[ClaimedRange, int, bool]]:
        """Return the ranges at whose readable offsets the output has rows of the same group and data topic.

        Each item is the range, the rows' generation, and whether all of these rows have offsets. With `only_older`
        only generations older than the range's are considered.
        """
        readable = {range_.partition: range_ for range_ in ranges if range_.first_readable < range_.end}
        if not readable:
            return []
        wanted = list(readable.values())
        older = "AND t.generation < w.generation " if only_older else ""
        held = self._dialect.execute(
            connection,
            'SELECT t."partition", t.generation, min(CASE WHEN t.has_offsets THEN 1 ELSE 0 END) '
            'FROM {wanted} JOIN {taken} AS t ON t."partition" = w."partition" AND t.data_topic_id = w.data_topic_id '
            "AND t.first_readable < w.end_offset AND t.end_offset > w.first_readable "
            "WHERE t.output = %(output)s AND t.member_group = %(member_group)s AND t.topic = %(topic)s "
            f'AND t.row_count > 0 {older}GROUP BY t."partition", t.generation ORDER BY t."partition", t.generation',
            self.key(wanted),
            wanted=self._dialect.ranges(
                "w", wanted, "partition", "data_topic_id", "generation", "first_readable", "end"
            ),
        )
        return [(readable[partition], generation, bool(offsets)) for partition, generation, offsets in held.fetchall()]

    def first_rows(
        self, connection: Connection, ranges: Sequence[ClaimedRange]
    ) -> dict[int, tuple[int | None, int | None]]:
        """Return, by partition, where the rows of older generations begin, and where those of the range's own begin.

        Both are the first readable offset of an entry of the same group and data topic, or None. Entries without rows
        count only for the range's own generation.
        """
        found = self._dialect.execute(
            connection,
            'SELECT w."partition", min(CASE WHEN t.generation < w.generation AND t.row_count > 0 THEN t.first_readable '
            "END), min(CASE WHEN t.generation = w.generation THEN t.first_readable END) "
            'FROM {wanted} JOIN {taken} AS t ON t."partition" = w."partition" AND t.data_topic_id = w.data_topic_id '
            "WHERE t.output = %(output)s AND t.member_group = %(member_group)s AND t.topic = %(topic)s "
            'GROUP BY w."partition"',
            self.key(ranges),
            wanted=self._dialect.ranges("w", ranges, "partition", "data_topic_id", "generation"),
        )
        return {partition: (older, own) for partition, older, own in found.fetchall()}

    def enter(
        self,
        connection: Connection,
        wanted: Sequence[ClaimedRange],
        counts: Mapping[int | None, int],
        *,
        have_offsets: bool,
        given: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Insert the entries of the ranges into `marshal_taken_ranges`, and return their ids by partition.

        The ids are those `given`, by partition, or new ones.
        """
        fields = ("partition", "coordination_topic_id", "data_topic_id", "generation", "epoch", "start", "end")
        rows = [
            [getattr(range_, name) for name in (*fields, "first_readable")] + [counts.get(range_.partition, 0)]
            for range_ in wanted
        ]
        kinds = {
            "partition": Kind.INTEGER,
            "coordination_topic_id": Kind.NAME,
            "data_topic_id": Kind.NAME,
            **dict.fromkeys(
                ("generation", "epoch", "start_offset", "end_offset", "first_readable", "row_count"), Kind.BIGINT
            ),
        }
        keep = self._dialect.keep_ids if given else ""
        if given:
            kinds["id"] = Kind.BIGINT
            rows = [[*row, given[range_.partition]] for row, range_ in zip(rows, wanted, strict=True)]
        names = ", ".join(f'"{name}"' for name in kinds)
        entries = self._dialect.execute(
            connection,
            f"INSERT INTO {{taken}} (output, member_group, topic, {names}, has_offsets, version) "
            f"{keep} SELECT %(output)s, %(member_group)s, %(topic)s, {names}, %(has_offsets)s, %(version)s "
            'FROM {wanted} WHERE 1 = 1 RETURNING "partition", id',
            {**self.key(wanted), "has_offsets": have_offsets, "version": IN_ORDER},
            wanted=self._dialect.relation("w", kinds, rows),
        )
        ids = dict(entries.fetchall())
        check_row_count(len(ids), len(wanted), f"{self._dialect.schema}.{TAKEN}")
        return ids

    def remove(self, connection: Connection, ids: Collection[int]) -> None:
        """Delete the entries with these ids."""
        removed = self._dialect.execute(
            connection, "DELETE FROM {taken} WHERE {is_gone}", is_gone=self._dialect.one_of("id", ids)
        )
        check_row_count(removed, len(ids), f"{self._dialect.schema}.{TAKEN}")

    def set_positions(self, connection: Connection, taken: Sequence[ClaimedRange]) -> None:
        """Set the position, the generation and the fencing token of each range's partition."""
        if not taken:
            return
        assignments = {
            "coordination_topic_id": "w.coordination_topic_id",
            "data_topic_id": "w.data_topic_id",
            "generation": "w.generation",
            "epoch": "w.epoch",
            "position": "CASE WHEN NOT w.in_any_order THEN w.end_offset "
            "WHEN p.generation = w.generation THEN p.position END",
            "version": "CASE WHEN w.in_any_order THEN %(version)s WHEN p.generation = w.generation THEN p.version "
            "ELSE %(in_order)s END",
            "changed_at": "CURRENT_TIMESTAMP",
        }
        condition = (
            "p.output = %(output)s AND p.member_group = %(member_group)s AND p.topic = %(topic)s "
            'AND p."partition" = w."partition"'
        )
        fields = (
            "partition",
            "coordination_topic_id",
            "data_topic_id",
            "generation",
            "epoch",
            "end",
            "in_any_order",
        )
        updated = self._dialect.execute(
            connection,
            self._dialect.update_from("{positions}", "p", "{wanted}", assignments, condition),
            {**self.key(taken), "version": VERSION, "in_order": IN_ORDER},
            wanted=self._dialect.ranges("w", taken, *fields),
        )
        check_row_count(updated, len(taken), f"{self._dialect.schema}.{POSITIONS}")


def check_row_count(affected: Cursor | int, expected: int, table: str) -> None:
    """Raise `SinkRejectedError` unless a statement affected as many rows of `table` as expected."""
    count = affected if isinstance(affected, int) else affected.rowcount
    if count != expected:
        raise SinkRejectedError(
            f"table {table}: a statement affected {count} rows instead of {expected}, because a trigger or "
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
