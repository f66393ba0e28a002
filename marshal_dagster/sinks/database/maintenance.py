"""Describes, checks and shortens the record of the ranges that a database output has (decision 21).

`sink` offers it to `marshal-dagster sink describe|check|vacuum`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Generic

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.dialect import (
    MOST_CONFLICTS,
    Connection,
    Dialect,
    Fragment,
    LockMode,
    TransactionConflictError,
)
from marshal_dagster.sinks.database.ranges import IN_ORDER, MERGED, RangeTables, check_row_count
from marshal_dagster.sinks.report import SinkReport, StoredGeneration, VacuumResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_AT_ONCE: Final = 500
"""The most entries that one transaction merges: it locks their partition meanwhile."""
_MOST_ROWS: Final = 1_000_000
"""The most rows that it updates, unless the second entry alone has more."""


@dataclass(frozen=True, slots=True)
class _Partition:
    """A partition of a group and topic."""

    group: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"group {self.group!r}, {self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of `marshal_taken_ranges`."""

    id: int
    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    start: int
    end: int
    row_count: int
    has_offsets: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """What one transaction of a vacuum does."""

    merged: int = 0
    obsolete: int = 0
    moved_rows: int = 0


class TableMaintenance(Generic[Connection]):
    """The reports on one output, and the vacuum of its record of ranges."""

    def __init__(
        self,
        dialect: Dialect[Connection],
        transaction: "Callable[[], AbstractContextManager[Connection]]",
        *,
        replaces_rows: bool,
    ) -> None:
        """Store the arguments; nothing is executed.

        Args:
            dialect: Executes statements.
            transaction: Opens a transaction.
            replaces_rows: Whether rows replace each other by keys.
        """
        self._dialect, self._transaction, self._replaces_rows = dialect, transaction, replaces_rows
        self._ranges = RangeTables(dialect)
        self._given = {"output": dialect.output}

    def describe(self) -> SinkReport:
        """Return what the output has, by its record of ranges."""
        with self._transaction() as connection:
            found = self._dialect.execute(
                connection,
                'SELECT e.member_group, e.topic, e."partition", e.generation, min(e.start_offset), max(e.end_offset), '
                "count(*), sum(e.row_count), sum(CASE WHEN e.before_start < e.start_offset THEN 1 ELSE 0 END), "
                "max(p.generation), max(p.version) FROM (SELECT t.*, max(t.end_offset) OVER "
                '(PARTITION BY t.member_group, t.topic, t."partition", t.generation '
                "ORDER BY t.start_offset, t.end_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) "
                "AS before_start FROM {taken} AS t WHERE t.output = %(output)s) AS e "
                "LEFT JOIN {positions} AS p ON p.output = e.output "
                'AND p.member_group = e.member_group AND p.topic = e.topic AND p."partition" = e."partition" '
                'GROUP BY e.member_group, e.topic, e."partition", e.generation ORDER BY 1, 2, 3, 4',
                self._given,
            ).fetchall()
        return SinkReport(
            f"table {self._dialect.output}",
            tuple(
                StoredGeneration(
                    group=group,
                    topic=topic,
                    partition=partition,
                    generation=generation,
                    is_current=generation == current,
                    start=start,
                    end=end,
                    ranges=count,
                    rows=int(rows),
                    gaps=int(gaps),
                    in_any_order=generation == current and version != IN_ORDER,
                )
                for group, topic, partition, generation, start, end, count, rows, gaps, current, version in found
            ),
        )

    def check(self) -> list[str]:
        """Return what is wrong: gaps and overlaps of ranges, wrong positions, and rows that belong to no range."""
        report = self.describe()
        problems = [
            f"{_Partition(stored.group, stored.topic, stored.partition)}, generation {stored.generation}: gaps between "
            f"its ranges, which come in order: {stored.gaps}"
            for stored in report.generations
            if stored.gaps and stored.is_current and not stored.in_any_order
        ]
        with self._transaction() as connection:
            problems += self._overlaps(connection)
            problems += self._wrong_positions(connection)
            problems += self._foreign_rows(connection)
            if not self._replaces_rows:
                problems += self._surplus_rows(connection)
        return problems

    def _overlaps(self, connection: Connection) -> Iterator[str]:
        found = self._dialect.execute(
            connection,
            'SELECT member_group, topic, "partition", generation, count(*), min(start_offset) FROM (SELECT t.*, '
            'max(t.end_offset) OVER (PARTITION BY t.member_group, t.topic, t."partition", t.generation '
            "ORDER BY t.start_offset, t.end_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_start "
            "FROM {taken} AS t WHERE t.output = %(output)s AND t.start_offset < t.end_offset) AS e "
            'WHERE before_start > start_offset GROUP BY member_group, topic, "partition", generation '
            "ORDER BY 1, 2, 3, 4",
            self._given,
        ).fetchall()
        for group, topic, partition, generation, count, first in found:
            yield (
                f"{_Partition(group, topic, partition)}, generation {generation}: ranges that overlap the one "
                f"before them: {count}, the first one at offset {first}"
            )

    def _wrong_positions(self, connection: Connection) -> Iterator[str]:
        found = self._dialect.execute(
            connection,
            'SELECT p.member_group, p.topic, p."partition", p.position, max(t.end_offset) FROM {positions} AS p '
            "LEFT JOIN {taken} AS t ON t.output = p.output AND t.member_group = p.member_group AND t.topic = p.topic "
            'AND t."partition" = p."partition" AND t.generation = p.generation '
            f"WHERE p.output = %(output)s AND p.generation IS NOT NULL AND p.version = {IN_ORDER} "
            'GROUP BY p.member_group, p.topic, p."partition", p.position '
            "HAVING max(t.end_offset) IS NULL OR max(t.end_offset) <> p.position ORDER BY 1, 2, 3",
            self._given,
        ).fetchall()
        for group, topic, partition, position, end in found:
            there = "it has no range" if end is None else f"its last range ends at {end}"
            yield f"{_Partition(group, topic, partition)}: the stored position is {position}, but {there}"

    def _foreign_rows(self, connection: Connection) -> Iterator[str]:
        if not (columns := self._dialect.columns(connection)):
            yield f"table {self._dialect.output} does not exist, or the role may not read it"
            return
        outside = 'r.kafka_partition <> t."partition"'
        if "kafka_offset" in columns:
            outside += " OR r.kafka_offset < t.first_readable OR r.kafka_offset >= t.end_offset"
        ((unknown, misplaced),) = self._dialect.execute(
            connection,
            "SELECT coalesce(sum(CASE WHEN t.id IS NULL THEN 1 ELSE 0 END), 0), "
            f"coalesce(sum(CASE WHEN {outside} THEN 1 ELSE 0 END), 0) "
            "FROM {rows} AS r LEFT JOIN {taken} AS t ON t.id = r.marshal_range AND t.output = %(output)s",
            self._given,
        ).fetchall()
        if unknown:
            yield f"rows that belong to no range: {unknown}. Another writer wrote them, or their range was deleted"
        if misplaced:
            yield f"rows of another partition, or of offsets outside of their range: {misplaced}"

    def _surplus_rows(self, connection: Connection) -> Iterator[str]:
        found = self._dialect.execute(
            connection,
            'SELECT t.member_group, t.topic, t."partition", t.start_offset, t.end_offset, t.row_count, count(*) '
            "FROM {rows} AS r JOIN {taken} AS t ON t.id = r.marshal_range WHERE t.output = %(output)s "
            'GROUP BY t.id, t.member_group, t.topic, t."partition", t.start_offset, t.end_offset, t.row_count '
            "HAVING count(*) > t.row_count ORDER BY 1, 2, 3, 4 LIMIT 100",
            self._given,
        ).fetchall()
        for group, topic, partition, start, end, written, count in found:
            yield (
                f"{_Partition(group, topic, partition)} [{start}, {end}): the table has {count} rows of this range, of "
                f"which the sink wrote {written}"
            )

    def vacuum(self, *, dry_run: bool) -> VacuumResult:
        """Merge entries of adjacent ranges, and delete those of older generations of which no row is left.

        What dead runs have left in the database is removed too.

        Args:
            dry_run: Whether to report only.
        """
        if not dry_run:
            self._dialect.drop_abandoned()
        before = 0
        steps: list[_Step] = []
        for place in self._partitions():
            with self._transaction() as connection:
                entries = self._entries(connection, place)
                before += len(entries)
                unused = self._unused(connection, place, entries)
            if dry_run:
                steps.append(_Step(sum(len(run) - 1 for run in _runs(entries, unused)), len(unused)))
                continue
            while step := self._shortened(place):
                steps.append(step)
        return VacuumResult(
            f"table {self._dialect.output}",
            entries=before,
            merged=sum(step.merged for step in steps),
            obsolete=sum(step.obsolete for step in steps),
            moved_rows=None if dry_run else sum(step.moved_rows for step in steps),
        )

    def _partitions(self) -> list[_Partition]:
        with self._transaction() as connection:
            found = self._dialect.execute(
                connection,
                'SELECT DISTINCT member_group, topic, "partition" FROM {taken} WHERE output = %(output)s '
                "ORDER BY 1, 2, 3",
                self._given,
            ).fetchall()
        return [_Partition(*place) for place in found]

    def _entries(self, connection: Connection, place: _Partition) -> list[_Entry]:
        """Return the entries of a partition, by generation and start."""
        found = self._dialect.execute(
            connection,
            "SELECT id, coordination_topic_id, data_topic_id, generation, epoch, start_offset, end_offset, row_count, "
            "has_offsets FROM {taken} WHERE output = %(output)s AND member_group = %(member_group)s "
            'AND topic = %(topic)s AND "partition" = %(partition)s ORDER BY generation, start_offset, end_offset, id',
            self._key(place),
        ).fetchall()
        return [_Entry(*(*values, bool(has_offsets))) for *values, has_offsets in found]

    def _unused(self, connection: Connection, place: _Partition, entries: Sequence[_Entry]) -> set[int]:
        """Return the entries of older generations without rows. Upserts still need them, to refuse a generation."""
        if self._replaces_rows or not entries:
            return set()
        older = [entry.id for entry in entries if entry.generation < entries[-1].generation]
        if not older:
            return set()
        found = self._dialect.execute(
            connection,
            "SELECT t.id FROM {taken} AS t WHERE t.output = %(output)s AND t.member_group = %(member_group)s AND "
            't.topic = %(topic)s AND t."partition" = %(partition)s AND {is_older} '
            "AND NOT EXISTS (SELECT 1 FROM {rows} AS r WHERE r.marshal_range = t.id)",
            self._key(place),
            is_older=self._dialect.one_of("t.id", older),
        ).fetchall()
        return {entry for (entry,) in found}

    def _shortened(self, place: _Partition) -> _Step | None:
        """Merge or delete some entries of a partition in one transaction, again after a conflict with another one."""
        conflicts = 0
        while True:
            try:
                with self._transaction() as connection:
                    return self._shorten(connection, place)
            except TransactionConflictError:
                conflicts += 1
                if conflicts > MOST_CONFLICTS:
                    raise

    def _shorten(self, connection: Connection, place: _Partition) -> _Step | None:
        """Merge or delete some entries of a partition. Return None if nothing is left to do."""
        self._ranges.rows(connection, [_locked(place)], LockMode.ALONE)
        entries = self._entries(connection, place)
        unused = self._unused(connection, place, entries)
        if unused:
            self._ranges.remove(connection, deleted := sorted(unused)[:_AT_ONCE])
            return _Step(obsolete=len(deleted))
        run = next(_runs(entries, unused), None)
        return None if run is None else self._merge(connection, _part(run))

    def _merge(self, connection: Connection, run: Sequence[_Entry]) -> _Step:
        """Merge the entries of adjacent ranges into the first one, and assign their rows to it."""
        first, *others = run
        with_rows = [entry for entry in run if entry.row_count]
        ids = [entry.id for entry in others]
        changed = self._dialect.execute(
            connection,
            "UPDATE {taken} SET end_offset = %(end)s, epoch = %(epoch)s, row_count = %(rows)s, "
            f"has_offsets = %(has_offsets)s, version = {MERGED} WHERE id = %(id)s",
            {
                "id": first.id,
                "end": run[-1].end,
                "epoch": max(entry.epoch for entry in run),
                "rows": sum(entry.row_count for entry in run),
                "has_offsets": all(entry.has_offsets for entry in with_rows or run),
            },
        )
        check_row_count(changed, 1, f"{self._dialect.schema}.marshal_taken_ranges")
        of_others = self._dialect.one_of("marshal_range", ids)
        moved = 0
        kept = self._dialect.changed_by_update(connection)
        if len(with_rows) > 1 or (with_rows and with_rows[0] is not first):
            moved = self._dialect.execute(
                connection,
                "UPDATE {rows} SET {kept}marshal_range = %(id)s WHERE {of_others}",
                {"id": first.id},
                of_others=of_others,
                kept=Fragment("".join(f"{name} = {name}, " for name in map(self._dialect.quoted, kept))),
            ).rowcount
        ((left,),) = self._dialect.execute(
            connection, "SELECT count(*) FROM {rows} WHERE {of_others}", of_others=of_others
        ).fetchall()
        if left:
            raise SinkRejectedError(
                f"table {self._dialect.output}: {left} rows could not be assigned to a merged range, because a trigger "
                "or rule keeps them, so nothing was merged. Remove the trigger or rule"
            )
        self._ranges.remove(connection, ids)
        return _Step(merged=len(ids), moved_rows=moved)

    def _key(self, place: _Partition) -> dict[str, object]:
        return {
            **self._given,
            "member_group": place.group,
            "topic": place.topic,
            "partition": place.partition,
        }


def _runs(entries: Iterable[_Entry], unused: set[int]) -> Iterator[list[_Entry]]:
    """Yield entries of adjacent ranges that can be merged, at least two at once.

    The last entry of each generation stays as it is: it may be of a batch whose position is not committed yet.
    """
    of_origin = attrgetter("generation", "coordination_topic_id", "data_topic_id")
    for _, found in groupby((entry for entry in entries if entry.id not in unused), of_origin):
        *done, _ = found
        run = done[:1]
        for entry, following in pairwise(done):
            if entry.end == following.start:
                run.append(following)
                continue
            if len(run) > 1:
                yield run
            run = [following]
        if len(run) > 1:
            yield run


def _part(run: Sequence[_Entry]) -> Sequence[_Entry]:
    """Return the entries from the first one on that one transaction merges, at least two."""
    rows = 0
    for count, entry in enumerate(run[1:_AT_ONCE], start=1):
        rows += entry.row_count
        if rows > _MOST_ROWS:
            return run[: max(count, 2)]
    return run[:_AT_ONCE]


def _locked(place: _Partition) -> ClaimedRange:
    """Return a range by which `RangeTables.rows` locks the partition."""
    return ClaimedRange(
        coordination_topic_id="",
        group=place.group,
        topic=place.topic,
        data_topic_id="",
        partition=place.partition,
        generation=0,
        epoch=0,
        start=0,
        end=0,
        first_readable=0,
        in_any_order=False,
    )
