"""A sink that writes rows to a Delta table, and the positions of all partitions in the same commit.

Each commit of the sink stores the positions of all partitions of the output as user metadata, and its number as an
application transaction (`APPLICATION`). Delta rejects concurrent commits of one application transaction, and writes
no number twice. So a commit is a compare-and-set on the previous number, and a writer that loses judges its ranges
again (docs/contributing/decisions/0009-delta.md). This module decides what to write; `table` reads and writes with
Spark.
"""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge
from marshal_dagster.sinks.delta import report
from marshal_dagster.sinks.delta.commit import MARSHAL_COLUMN, Commit, DeltaPosition
from marshal_dagster.sinks.delta.merge import KEY_COLUMN
from marshal_dagster.sinks.delta.place import delta_place
from marshal_dagster.sinks.delta.table import DeltaTable, KeptRows, KnownDetail, WrittenRows
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.report import SinkReport, VacuumResult
from marshal_dagster.sinks.sink import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    both,
    check_columns,
    check_ranges,
    checked_after_read,
    partition_key,
    ranges_to_write,
    refuse_foreign_rows,
    session_of,
    unreplaceable,
    within,
    write_result,
)
from marshal_dagster.sinks.upsert_keys import WriteMode, keys_of
from marshal_dagster.spark.column_names import is_case_sensitive
from marshal_dagster.spark.conversion_settings import PARQUET_FILES, QUOTED_NAMES, check_settings
from marshal_dagster.spark.session import active_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORGETS = "delta.setTransactionRetentionDuration"
_APPEND_ONLY = "delta.appendOnly"
_CHANGED = ("DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""Delta's errors if another writer changed the table since the transaction began."""
MOST_INTERVALS = 1_000
"""The most intervals of offsets that one commit replaces. Each is a condition that costs Spark about 50 ms."""


class DeltaSink(Steps):
    """A sink that writes rows to a Delta table, with an extra column `marshal` for each row's range.

    The table is given by its folder or by its name in a catalog. The session needs Delta Lake (`delta_settings`). The
    frame is persisted on the executors during the write.

    Example:
        ```python
        settings = spark_settings(app_name="orders", extra=delta_settings())
        by_path = DeltaSink("/data/orders")
        by_name = DeltaSink(table="main.shop.orders")
        newest = DeltaSink("/data/customers", mode="upsert", keys=["customer_id"])
        ```
    """

    supports_unordered_ranges = False
    """False: the sink stores one position for each partition, so it needs ranges in order."""

    def __init__(
        self,
        path: str | None = None,
        *,
        table: str | None = None,
        session: "Callable[[], SparkSession] | None" = None,
        options: Mapping[str, str] | None = None,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
        mode: WriteMode | str = WriteMode.APPEND,
        keys: Sequence[str] = (),
        order_by: str | None = None,
    ) -> None:
        """Configure the output; the sink does not access the table before its first use.

        Args:
            path: The folder of the Delta table; give either `path` or `table`.
            table: The table's name, `schema.table` or `catalog.schema.table`, with backquotes around a part that has a
                dot. A table that does not exist is created as a managed table.
            session: Returns the Spark session, by default the active one. The session must exist before the batch is
                claimed, because the sink reads the table then.
            options: Options of Delta's writer, such as `mergeSchema`.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").
            mode: `append` adds each row. `upsert` replaces the row with the same keys by a newer one
                (docs/how-to/sinks.md, "One row for each key in Delta Lake").
            keys: The result's columns by which rows replace each other.
            order_by: The result's column that decides between rows of several partitions: the greatest value wins.

        Raises:
            ConfigurationError: Not exactly one of `path` and `table` is given, the name has no schema, `options`
                contains an option that the sink sets itself, or `keys` and `order_by` do not fit the mode.
        """
        self._keys = keys_of(mode, keys, order_by, shared_by_groups=shared_by_groups)
        self._place = delta_place(path, table)
        own = {option.lower() for option in options or ()} & {"usermetadata", "txnappid", "txnversion", "replacewhere"}
        if own:
            raise ConfigurationError(
                f"options {', '.join(sorted(own))}: the sink sets these itself for its commits. Leave them out"
            )
        self.path = path
        """The folder of the Delta table, None if it is given by its name."""
        self.table = table
        """The name of the Delta table, None if it is given by its folder."""
        self._session = session or partial(active_session, "a Delta table")
        self._options = dict(options or {})
        self._groups = OutputGroups(f"table {self._place}", shared_by_groups, previous_group)
        self._known: KnownDetail | None = None

    def __repr__(self) -> str:
        return f"DeltaSink({self.path!r})" if self.table is None else f"DeltaSink(table={self.table!r})"

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written.
            ConfigurationError: There is no session, or it does not have Delta Lake.
        """
        check_ranges(ranges)
        table = self._table()
        newest = self._checked(table)
        verdicts = _judge(newest, ranges)
        self._refuse_unreplaceable(table, ranges_to_write(verdicts), newest)
        return verdicts

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the rows at these offsets, else why not (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why these rows cannot be replaced.
        """
        table = self._table()
        held = table.held(_readable(ranges), only_older=False)
        newest = self._checked(table)
        return (
            unreplaceable(held, f"table {self._place}")
            or (self._append_only(table) if held else None)
            or self._lost_rows(newest, [wanted for wanted, _, _ in held])
            or self._groups.refusal(*_of_groups(table, newest, ranges))
        )

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range that the table does not have, in one commit (`Sink.write`).

        Args:
            frame: The rows, with the column `partition` and optionally `offset`.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read; called if older rows are replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: A range or a row cannot be written.
            ConfigurationError: A column has a reserved name, or a setting of the session or the table's partitions
                would change values.
        """
        spark = session_of(frame)
        reserved = {MARSHAL_COLUMN} if self._keys is None else {MARSHAL_COLUMN, KEY_COLUMN}
        check_columns(frame.schema, reserved, case_sensitive=is_case_sensitive(spark))
        check_settings(spark, {**PARQUET_FILES, **QUOTED_NAMES}, "a Delta sink")
        check_ranges(ranges)
        table = self._table()
        newest = self._checked(table)
        wanted = ranges_to_write(_judge(newest, ranges))
        if not wanted:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        table.check_partitions(frame)
        over_older = self._refuse_unreplaceable(table, wanted, newest)
        done = [range_.partition for range_ in ranges if range_ not in wanted]
        if self._keys is not None:
            table.prepare_merge(frame, self._keys)
        elif not over_older:
            counts = self._append(table, newest, wanted, partial(table.written, frame, done), before_commit)
            if counts is not None:
                return write_result(ranges, wanted, counts)
        with table.evaluated(frame, done) as rows:
            refuse_foreign_rows(rows.counts, wanted)
            if rows.rejected is not None:
                raise rows.rejected.error(f"table {self._place}", wanted)
            self._reached("evaluated")
            before_commit()
            taken = self._take(table, newest, wanted, rows, checked_after_read(offsets_read, before_commit))
        return write_result(ranges, taken, rows.counts)

    def describe(self) -> SinkReport:
        """Return the position of each partition, by the sink's newest commit.

        Returns:
            The positions, by group, topic and partition.

        Raises:
            SinkRejectedError: The newest commit has a newer version, or is that of another table.
            ConfigurationError: There is no session, or it does not have Delta Lake.
        """
        return SinkReport(f"table {self._place}", tuple(report.stored_generations(self._checked(self._table()))))

    def check(self) -> list[str]:
        """Return what is wrong: positions that cannot be read, rows that do not fit them, messages written twice.

        Reads all rows.

        Returns:
            One line for each problem.

        Raises:
            ConfigurationError: There is no session, or it does not have Delta Lake.
        """
        while True:
            table = self._table()
            try:
                newest = self._checked(table)
            except SinkRejectedError as error:
                return [str(error)]
            problems = [] if table.table_id() is None else list(report.row_problems(newest, table.frame()))
            if not problems or _newest(table).number == newest.number:
                return problems

    def vacuum(self, *, dry_run: bool) -> VacuumResult:  # noqa: ARG002 - nothing is removed
        """Remove nothing: each commit replaces the positions of the one before, and old files are Delta's to remove.

        Args:
            dry_run: Without effect.

        Returns:
            A result with Delta's own statement as a hint.
        """
        hint = f"Old files are removed by Delta itself: run VACUUM {self._place.sql} with Spark"
        return VacuumResult(f"table {self._place}", 0, merged=0, obsolete=0, moved_rows=None, hint=hint)

    def _append(
        self,
        table: DeltaTable,
        newest: Commit,
        wanted: tuple[ClaimedRange, ...],
        write: Callable[[Sequence[ClaimedRange], Commit, Commit], WrittenRows | None],
        before_commit: BeforeCommit,
    ) -> Mapping[int | None, int] | None:
        """Write rows that replace none into the table's files, and commit them if nothing has changed meanwhile.

        Returns:
            The number of rows by partition, or None if nothing was written. Then the rows must be evaluated first.
        """
        self._refuse_other_mode(table, newest)
        commit = newest.then(secrets.token_hex(16), wanted, table.table_id(), self._keys)
        written = write(wanted, newest, commit)
        if written is None:
            return None
        if written.counts.keys() - {range_.partition for range_ in wanted}:
            written.discard()
            return None
        self._reached("evaluated")
        try:
            before_commit()
        except Exception:
            written.discard()
            raise
        if not written.is_current():
            written.discard()
            return None
        self._reached("judged")
        state, failure = None, None
        try:
            state = written.commit()
            state = state if written.is_current() else None  # another table may have the name by now
        except Exception as error:  # noqa: BLE001 - a conflict, a lost response and a full disk look alike
            failure = error
        if state is None and not self._has_commit(table, commit, failure):
            return None
        self._known = table.known(commit, state)
        self._reached("committed")
        return written.counts

    def _take(
        self,
        table: DeltaTable,
        known: Commit,
        wanted: Sequence[ClaimedRange],
        rows: KeptRows,
        offsets_read: OffsetsRead,
    ) -> tuple[ClaimedRange, ...]:
        """Write, in one commit, those of `wanted` that no other writer has written meanwhile.

        What another writer commits after the table was judged has the number of this commit, so the loop judges again.
        """
        read: Mapping[int, Intervals] | None = None
        while True:
            newest = _newest(table)
            if newest != known or not newest.number:
                table.refresh()
                self._refuse_other_table(table, newest)
                known = newest
            taken = ranges_to_write(_judge(newest, wanted))
            if not taken:
                return ()
            self._refuse_other_mode(table, newest)
            over_older = self._refuse_unreplaceable(table, taken, newest)
            if over_older and read is None:
                own = rows.offsets()
                read = both(offsets_read(), own)
            commit = newest.then(secrets.token_hex(16), taken, table.table_id(), self._keys)
            replaced = self._replaced(table, over_older, read or {})
            self._reached("judged")
            if self._commit(table, rows, taken, commit, replaced):
                self._known = table.known(commit)
                self._reached("committed")
                return taken

    def _replaced(
        self, table: DeltaTable, over_older: Sequence[ClaimedRange], read: Mapping[int, Intervals]
    ) -> Mapping[ClaimedRange, Intervals]:
        """Return the offsets at which rows of older generations are replaced, in as few intervals as possible."""
        replaced: dict[ClaimedRange, Intervals] = {
            range_: within(range_, read.get(range_.partition, ())) for range_ in over_older
        }
        gappy = [range_ for range_, offsets in replaced.items() if len(offsets) > 1]
        older = table.older_offsets(gappy) if gappy else {}
        replaced |= {range_: _spanning(replaced[range_], older.get(range_.partition, ())) for range_ in gappy}
        count = sum(len(offsets) for offsets in replaced.values())
        if count > MOST_INTERVALS:
            raise SinkRejectedError(
                f"table {self._place}: a new generation would replace rows at {count} separate intervals of offsets, "
                f"but one commit can replace {MOST_INTERVALS} intervals, so nothing was written. Set the group's "
                "position again and use smaller batches (max_records), or write to a new output"
            )
        return replaced

    def _commit(
        self,
        table: DeltaTable,
        rows: KeptRows,
        taken: Sequence[ClaimedRange],
        commit: Commit,
        replaced: Mapping[ClaimedRange, Intervals],
    ) -> bool:
        """Commit, or return False if another writer was first. The table's history decides, not the call's result."""
        failure: Exception | None = None
        try:
            table.commit(rows, taken, commit, replaced)
        except Exception as error:  # noqa: BLE001 - a conflict, a lost response and a full disk look alike
            failure = error
        return self._has_commit(table, commit, failure)

    def _has_commit(self, table: DeltaTable, commit: Commit, failure: Exception | None) -> bool:
        """Return whether the table has the commit, or false if another writer was first.

        Raises:
            Exception: `failure`, if no commit has the number.
            SinkRejectedError: The table's history has lost a commit with the number.
        """
        for other in table.commits():
            if other.number == commit.number:
                return other.attempt == commit.attempt
            if other.number < commit.number:
                break
        if failure is not None and not any(name in str(failure) for name in _CHANGED):
            raise failure
        if failure is not None:
            table.refresh()
            self._refuse_forgetful(table)
            return False
        raise SinkRejectedError(
            f"table {self._place} has commits of marshal-dagster that its history no longer shows, so nothing was "
            "written: the table was restored, or the log with the sink's last commit was cleaned "
            "(delta.logRetentionDuration). Write to a new output, and keep its log longer"
        )

    def _refuse_unreplaceable(
        self, table: DeltaTable, ranges: Sequence[ClaimedRange], newest: Commit
    ) -> tuple[ClaimedRange, ...]:
        """Return the ranges at whose offsets the table has rows of older generations.

        Raises:
            SinkRejectedError: These rows cannot be replaced, or the ranges belong to another group.
        """
        self._groups.check(*_of_groups(table, newest, ranges))
        later = [range_ for range_ in _readable(ranges) if _is_later(newest.kept.get(partition_key(range_)), range_)]
        held = table.held(later, only_older=True) if later else []
        refusal = (
            unreplaceable(held, f"table {self._place}")
            or (self._append_only(table) if held or self._keys is not None else None)
            or self._lost_rows(newest, [wanted for wanted, _, _ in held])
        )
        if refusal is not None:
            raise SinkRejectedError(refusal)
        return tuple(dict.fromkeys(wanted for wanted, _, _ in held))

    def _lost_rows(self, newest: Commit, over_older: Sequence[ClaimedRange]) -> str | None:
        """Return why these ranges cannot replace older rows of their keys, None if they can or if rows are added.

        An older row may have replaced a row of an earlier offset. Only a generation that begins where the first one
        began writes that row again.
        """
        if self._keys is None:
            return None
        for wanted in over_older:
            lost = f"{wanted} of group {wanted.group!r}: rows of older generations in table {self._place} have replaced"
            if self._keys.order_by is not None:
                return f"{lost} other rows, which a new generation cannot bring back. Write to a new table"
            kept = newest.kept.get(partition_key(wanted))
            position = kept.then(wanted) if kept is not None else None
            if position is not None and position.older_began is not None and position.older_began < position.began:
                return (
                    f"{lost} rows from offset {position.older_began} on, which this generation does not read again. "
                    f"Reset the position to {position.older_began}, or write to a new table"
                )
        return None

    def _refuse_other_mode(self, table: DeltaTable, newest: Commit) -> None:
        """Raise `ConfigurationError` if the table was written in another mode, or has two rows of a key."""
        if newest.keys == self._keys:
            return
        if newest.keys is not None:
            order_by = "" if newest.keys.order_by is None else f", order_by={newest.keys.order_by!r}"
            raise ConfigurationError(
                f"table {self._place} was written with mode='upsert', keys={list(newest.keys.columns)}{order_by}, and "
                "with other options it would get other rows. Give the sink these options, or write to a new table"
            )
        if self._keys is not None and (count := table.repeated_keys(self._keys)):
            raise ConfigurationError(
                f"table {self._place} has more than one row for each of {count} keys, but mode='upsert' keeps one. "
                "Delete the others, or write to a new table"
            )

    def _checked(self, table: DeltaTable) -> Commit:
        """Return the sink's newest commit in the table.

        Raises:
            SinkRejectedError: The table forgets commits, or its commits are those of another table.
            ConfigurationError: Its storage lets two writers commit at once, or the session cannot merge.
        """
        if self._keys is not None:
            table.check_merges()
        table.reuse(self._known)
        table.check_session()
        self._refuse_forgetful(table)
        newest = _newest(table)
        self._refuse_other_table(table, newest)
        self._known = table.known_unchanged(newest) or self._known
        return newest

    def _refuse_other_table(self, table: DeltaTable, newest: Commit) -> None:
        """Refuse a table whose newest commit was made for a table that was dropped or replaced."""
        if newest.table_id is not None and newest.table_id != table.table_id():
            raise SinkRejectedError(
                f"table {self._place} was replaced, or dropped and re-created while a batch was written: its newest "
                "commit has the positions of the former table, so nothing was written. Drop it with all writers "
                "stopped, or write to a new table, and reset the group's position to write older rows again"
            )

    def _refuse_forgetful(self, table: DeltaTable) -> None:
        """Refuse a table that forgets the sink's transaction number, because a late commit would not be rejected."""
        if _FORGETS in table.properties():
            raise SinkRejectedError(
                f"table {self._place} has the property {_FORGETS}, with which Delta forgets the sink's commits and "
                f"could write a range twice, so nothing was written. Run ALTER TABLE {self._place.sql} UNSET "
                f"TBLPROPERTIES ('{_FORGETS}')"
            )

    def _append_only(self, table: DeltaTable) -> str | None:
        """Return why rows of the table cannot be replaced, or None if they can."""
        if table.properties().get(_APPEND_ONLY, "").lower() != "true":
            return None
        return (
            f"table {self._place} has the property {_APPEND_ONLY}, so a new generation cannot replace the rows there: "
            "unset it, or write to a new output"
        )

    def _table(self) -> DeltaTable:
        """Return the table; tests override this."""
        return DeltaTable(self._session(), self._place, self._options)


def _newest(table: DeltaTable) -> Commit:
    return next(table.commits(), Commit())


def _judge(newest: Commit, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
    kept = {range_: newest.kept.get(partition_key(range_)) for range_ in ranges}
    return {range_: judge(known.position if known else None, range_) for range_, known in kept.items()}


def _of_groups(
    table: DeltaTable, newest: Commit, wanted: Sequence[ClaimedRange]
) -> tuple[Sequence[ClaimedRange], Collection[str], Callable[[Sequence[ClaimedRange]], Iterator[ClaimedRange]]]:
    """Return the arguments of `OutputGroups.check` and `refusal`."""
    groups = {group for group, topic, _ in newest.kept if wanted and topic == wanted[0].topic}

    def held(ranges: Sequence[ClaimedRange]) -> Iterator[ClaimedRange]:
        return (range_ for range_, _, _ in table.held(_readable(ranges), only_older=False))

    return wanted, groups, held


def _readable(ranges: Sequence[ClaimedRange]) -> list[ClaimedRange]:
    return [range_ for range_ in ranges if range_.first_readable < range_.end]


def _is_later(kept: DeltaPosition | None, wanted: ClaimedRange) -> bool:
    return kept is not None and wanted.generation > kept.first_generation


def _spanning(read: Intervals, older: Intervals) -> Intervals:
    """Return the intervals of `read`, with neighbours merged if no interval of `older` lies between them."""
    spans: list[tuple[int, int]] = []
    for start, end in read:
        last_before = bisect_left(older, (start,)) - 1
        if spans and (last_before < 0 or older[last_before][1] <= spans[-1][1]):
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans
