"""A sink that writes rows to a table of a database, and the ranges they belong to in the same transaction.

It uses two more tables. `marshal_ranges` stores the position and generation of each partition. `marshal_taken_ranges`
contains one entry for each range that was written, and each row refers to its entry.

A writer first loads its rows into a staging table. After that it locks its partitions in `marshal_ranges` and judges
its ranges (protocol.md, section 6, "Effectively once"). Finally it moves the rows to the output and sets the positions.
So a writer that stalls while it loads blocks no other writer. A writer whose claim was taken over is refused before
any of its rows is visible. `ranges` documents the locks.

What differs between database engines is in a `Dialect`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge_ranges
from marshal_dagster.sinks.database.dialect import (
    MOST_CONFLICTS,
    RANGE_COLUMN,
    RENAMED,
    Connection,
    Dialect,
    EvaluatedRows,
    LockMode,
    LocksOutdatedError,
    TransactionConflictError,
    column_names,
)
from marshal_dagster.sinks.database.maintenance import TableMaintenance
from marshal_dagster.sinks.database.ranges import RangeTables, may_share_lock
from marshal_dagster.sinks.database.upsert import RESERVED, Upsert, stored_keys
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.report import SinkReport, VacuumResult
from marshal_dagster.sinks.row_writer import RowWriter
from marshal_dagster.sinks.sink import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    check_columns,
    check_ranges,
    checked_after_read,
    ranges_to_write,
    refuse_foreign_rows,
    unreplaceable,
    write_result,
)
from marshal_dagster.sinks.upsert_keys import WriteMode, keys_of
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_Connection_contra = TypeVar("_Connection_contra", contravariant=True)


class TransactionHook(Protocol[_Connection_contra]):
    """A hook that writes more data in the sink's transaction, such as outbox events, to be committed with the rows.

    The rows are in the temporary table `marshal_rows`, with the output's columns and `marshal_range`.
    """

    def check(self, connection: _Connection_contra, columns: Sequence[str]) -> None:
        """Check before a batch that the data of rows with these columns can be written.

        Args:
            connection: A connection with an open transaction.
            columns: The output's columns.

        Raises:
            ConfigurationError: The data cannot be written.
        """
        ...

    def write(self, connection: _Connection_contra, columns: Sequence[str], ranges: Sequence[int]) -> None:
        """Write the data that belongs to the rows of some ranges.

        Args:
            connection: The connection with the sink's transaction.
            columns: The columns of `marshal_rows`.
            ranges: The values of `marshal_range` of the rows that are written.

        Raises:
            SinkRejectedError: The data cannot be written.
        """
        ...


@dataclass(frozen=True, slots=True)
class _RangeDecisions:
    """The verdict on each range, and the ranges at whose offsets there are rows of older generations."""

    verdicts: Mapping[ClaimedRange, Verdict]
    over_older: tuple[ClaimedRange, ...]

    @property
    def open(self) -> tuple[ClaimedRange, ...]:
        return ranges_to_write(self.verdicts)


@dataclass(frozen=True, slots=True)
class _CheckedTable:
    """What is known of the table before a batch is processed."""

    columns: Collection[str] = ()
    ids: Mapping[int, int] = field(default_factory=dict)
    """The ids with which tasks write rows, by partition."""


class _OffsetsNeededError(Exception):
    """Older rows must be replaced, but the offsets that the batch has read are not known yet."""


class DatabaseSink(Steps, Generic[Connection]):
    """A sink that writes rows to a table of a database, for which it has a `Dialect`.

    Example:
        ```python
        class MySink(DatabaseSink):
            def __init__(self, path, table):
                super().__init__(MyDialect(path, table))
        ```
    """

    supports_unordered_ranges = True
    """True: the sink stores every range, so it accepts ranges in any order."""

    def __init__(
        self,
        dialect: Dialect[Connection],
        *,
        companion: TransactionHook[Connection] | None = None,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
        written_by: RowWriter | str = RowWriter.DRIVER,
        mode: WriteMode | str = WriteMode.APPEND,
        keys: Sequence[str] = (),
        order_by: str | None = None,
        add_columns: bool = False,
    ) -> None:
        """Configure the output; the sink does not connect before its first use.

        Args:
            dialect: The database engine, with the output's schema and table.
            companion: Writes more data in the same transaction.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").
            written_by: The processes that load the rows. Tasks do it only if the dialect has
                `Dialect.evaluated_by_tasks`.
            mode: Whether rows are added, or newer rows replace those with the same keys (docs/how-to/sinks.md, "One row
                for each key").
            keys: The result's columns by which rows replace each other. The table needs a unique index on them.
            order_by: The result's column that decides between rows of several partitions: the greatest value wins.
            add_columns: Whether columns of the result that the table lacks are added to it, before the frame is
                evaluated. Columns are never removed, and their types never changed.

        Raises:
            ConfigurationError: A value is not valid.
        """
        self.written_by = enum_member(RowWriter, "written_by", written_by)
        """The processes that load the rows."""
        self.table, self.schema = dialect.table, dialect.schema
        self._dialect = dialect
        self._companion = companion
        self._output = dialect.output
        self._groups = OutputGroups(f"table {self._output}", shared_by_groups, previous_group)
        self._ranges = RangeTables(dialect)
        self._adds_columns = add_columns
        self._keys = keys_of(mode, keys, order_by, shared_by_groups=shared_by_groups)
        self._upsert = None if self._keys is None else Upsert(dialect, self._keys)
        self._maintenance = TableMaintenance(dialect, self._transaction, replaces_rows=self._keys is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(table={self.table!r}, schema={self.schema!r})"

    def create_tables(self, rows: "StructType | None" = None) -> None:
        """Create the sink's own tables if they are missing, and optionally the table for the rows.

        Args:
            rows: The schema of the frame, to create the table for the rows too if it is missing.

        Raises:
            ConfigurationError: A column has a type that the sink does not write or a reserved name, or the role
                lacks a right.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        if rows is not None:
            self._check_columns(rows)
        with self._transaction() as connection:
            self._dialect.create_own_tables(connection)
            if rows is not None:
                self._dialect.create_output(connection, rows, () if self._keys is None else stored_keys(self._keys))

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written.
            ConfigurationError: A table is missing or the role lacks a right.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        check_ranges(ranges)
        with self._transaction() as connection:
            return dict(self._judge(connection, ranges).verdicts)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the rows at these offsets, else why not (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why these rows cannot be replaced.

        Raises:
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        with self._transaction() as connection:
            held = self._ranges.held(connection, ranges, only_older=False)
            return (
                unreplaceable(held, f"table {self._output}")
                or self._lost_rows(connection, [wanted for wanted, _, _ in held])
                or self._groups.refusal(*self._of_groups(connection, ranges))
            )

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range that the table does not have, in one transaction (`Sink.write`).

        The executors evaluate the frame once, before the transaction begins. Their tasks copy the rows into a staging
        table, from which the transaction moves them. Or the rows pass through this process, a few megabytes at a time.

        Args:
            frame: The rows, with the column `partition` and optionally `offset`.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read; called if older rows are replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: A range or a row cannot be written.
            ConfigurationError: The table is missing or would change or lose values.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        self._check_columns(frame.schema)
        check_ranges(ranges)
        columns = frame.columns
        with self._transaction() as connection:
            judged = self._judge(connection, ranges)
            checked = self._checked(connection, judged.open, frame.schema)
        if not judged.open:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        done = [range_.partition for range_ in ranges if range_ not in judged.open]
        with self._evaluated(frame, done, checked.ids) as rows:
            refuse_foreign_rows(rows.counts, judged.open)
            if rows.rejected is not None:
                raise rows.rejected.error(f"table {self._output}", judged.open)
            if self._keys is not None and not rows.all_have_offsets:
                raise SinkRejectedError(
                    f"table {self._output}: the result has rows whose column 'offset' is null, so no order decides "
                    "which row of a key is the newest. Keep each message's offset"
                )
            self._reached("evaluated")
            before_commit()
            taken = self._take(judged.open, columns, rows, checked_after_read(offsets_read, before_commit), checked)
        return write_result(ranges, taken, rows.counts)

    def describe(self) -> SinkReport:
        """Return what the table has, by the record of its ranges (`ReportingSink.describe`).

        Raises:
            ConfigurationError: A table is missing or the role lacks a right.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        return self._maintenance.describe()

    def check(self) -> list[str]:
        """Return what is wrong with the ranges and rows of the table; it reads all rows (`ReportingSink.check`).

        Raises:
            ConfigurationError: A table is missing or the role lacks a right.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        return self._maintenance.check()

    def vacuum(self, *, dry_run: bool) -> VacuumResult:
        """Merge the entries of adjacent ranges, and delete entries that no write can need (`ReportingSink.vacuum`).

        The rows of a merged range are updated, each at most once in its life. Writers of the partition wait meanwhile.

        Args:
            dry_run: Whether to report only.

        Returns:
            How many entries are merged and deleted.

        Raises:
            ConfigurationError: A table is missing or the role lacks a right.
            SinkRejectedError: A trigger keeps rows from being updated.
            UnavailableError: The database cannot be reached or does not answer in time.
        """
        return self._maintenance.vacuum(dry_run=dry_run)

    @contextmanager
    def _evaluated(self, frame: "DataFrame", done: Sequence[int], ids: Mapping[int, int]) -> Iterator[EvaluatedRows]:
        """Evaluate the rows of the partitions that are not done; tests replace it.

        If a row that tasks have computed may be rejected, the driver writes the batch, and names the row.
        """
        if self.written_by is RowWriter.EXECUTORS:
            is_read_by_hook = self._companion is not None
            with self._dialect.evaluated_by_tasks(frame, done, ids, is_read_by_hook=is_read_by_hook) as staged:
                if staged is not None:
                    yield staged
                    return
        with self._dialect.evaluated(frame, done) as rows:
            yield rows

    def _take(
        self,
        wanted: Sequence[ClaimedRange],
        columns: Sequence[str],
        rows: EvaluatedRows,
        offsets_read: OffsetsRead,
        checked: _CheckedTable,
    ) -> tuple[ClaimedRange, ...]:
        """Write, in one transaction, those of `wanted` that no other writer has written meanwhile."""
        read: Mapping[int, Intervals] | None = None
        conflicts = 0
        while True:
            try:
                with self._transaction() as connection:
                    self._keep_columns(connection, checked.columns)
                    return self._take_in(connection, wanted, columns, rows=rows, read=read, given_ids=checked.ids)
            except _OffsetsNeededError:
                read = offsets_read()
            except LocksOutdatedError:
                continue
            except TransactionConflictError:
                conflicts += 1
                if conflicts > MOST_CONFLICTS:
                    raise

    def _take_in(
        self,
        connection: Connection,
        wanted: Sequence[ClaimedRange],
        columns: Sequence[str],
        *,
        rows: EvaluatedRows,
        read: Mapping[int, Intervals] | None,
        given_ids: Mapping[int, int],
    ) -> tuple[ClaimedRange, ...]:
        if read is None and self._judge(connection, wanted).over_older:
            raise _OffsetsNeededError
        ids = self._ranges.enter(connection, wanted, rows.counts, have_offsets=rows.all_have_offsets, given=given_ids)
        staged = self._dialect.staged_rows(connection, ids, columns, rows)
        staged.stage(connection, wanted)
        self._reached("copied")
        if not self._groups.shared_by_groups:
            self._ranges.lock_groups(connection, wanted)
        hold = LockMode.ALONE if self._upsert is not None else self._ranges.hold_for(connection, wanted)
        judged = self._judge(connection, wanted, hold, own=ids.values())
        self._reached("locked")
        if judged.over_older:
            if read is None:
                raise _OffsetsNeededError
            key = self._ranges.key(wanted)
            left = self._dialect.delete_older(connection, judged.over_older, key, read, staged)
            self._check_none_left(left)
            self._reached("replaced")
        taken = [ids[range_.partition] for range_ in judged.open]
        if self._upsert is None:
            staged.move(connection, judged.open, rows.counts)
        else:
            open_ids = {range_: ids[range_.partition] for range_ in judged.open}
            self._upsert.move(connection, staged, columns, open_ids, rows.counts)
        if self._companion is not None and taken:
            self._companion.write(connection, column_names(columns), taken)
        self._reached("moved")
        if done_by_others := [ids[range_.partition] for range_ in wanted if range_ not in judged.open]:
            self._ranges.remove(connection, done_by_others)
        if hold is LockMode.SHARED:
            self._ranges.look_once_more(connection, judged.open, own=ids.values())
        else:
            self._set_positions(connection, judged.open)
        staged.clear(connection)
        self._reached("set")
        return judged.open

    def _checked(self, connection: Connection, wanted: Sequence[ClaimedRange], schema: "StructType") -> _CheckedTable:
        if not wanted:
            return _CheckedTable()
        columns = self._check_table(connection, schema)
        return _CheckedTable(columns, self._reserved_ids(connection, wanted))

    def _keep_columns(self, connection: Connection, there: Collection[str]) -> None:
        """Keep the table's columns as they were checked, until the transaction ends."""
        self._dialect.execute(connection, "SELECT 1 FROM {rows} WHERE 1 = 0").fetchall()
        if self._dialect.columns(connection) != there:
            raise UnavailableError(
                f"table {self._output}: its columns were changed while the batch was processed, so nothing was "
                "written. Run the batch again"
            )

    def _reserved_ids(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> Mapping[int, int]:
        """Return ids with which tasks write rows before the ranges have entries, or none."""
        if self.written_by is RowWriter.DRIVER:
            return {}
        return self._dialect.reserved_ids(
            connection, lambda: self._ranges.enter(connection, wanted, {}, have_offsets=True)
        )

    def _judge(
        self,
        connection: Connection,
        ranges: Sequence[ClaimedRange],
        hold: LockMode = LockMode.NOT,
        own: Collection[int] = (),
    ) -> _RangeDecisions:
        """Judge all ranges by the stored ranges, except the entries `own` of this transaction.

        `hold` selects the lock that is kept until the transaction ends.

        Raises:
            SinkRejectedError: A range is refused, belongs to another group, or lies over rows that cannot be
                replaced.
        """
        rows = self._ranges.rows(connection, ranges, hold)
        if hold is LockMode.SHARED:
            self._ranges.lock_starts(connection, ranges)
        stored = self._ranges.stored(connection, ranges, rows, own)
        verdicts = {wanted: judge_ranges(stored.get(wanted.partition), wanted) for wanted in ranges}
        if hold is LockMode.SHARED and not may_share_lock(rows, ranges):
            raise LocksOutdatedError
        wanted = ranges_to_write(verdicts)
        self._groups.check(*self._of_groups(connection, wanted))
        older = self._ranges.held(connection, wanted, only_older=True)
        reason = unreplaceable(older, f"table {self._output}")
        if reason := reason or self._lost_rows(connection, [over for over, _, _ in older]):
            raise SinkRejectedError(reason)
        return _RangeDecisions(verdicts, tuple(dict.fromkeys(over for over, _, _ in older)))

    def _lost_rows(self, connection: Connection, over_older: Sequence[ClaimedRange]) -> str | None:
        """Return why these ranges cannot replace older rows of their keys, None if they can or if rows are appended.

        An older row may have replaced a row of an earlier offset. Only a generation that begins where the first one
        began writes that row again.
        """
        if self._keys is None or not over_older:
            return None
        first_rows = self._ranges.first_rows(connection, over_older)
        for wanted in over_older:
            older, own = first_rows.get(wanted.partition, (None, None))
            if older is None:
                continue
            lost = (
                f"{wanted} of group {wanted.group!r}: rows of older generations in table {self._output} have replaced"
            )
            if self._keys.order_by is not None or wanted.in_any_order:
                return f"{lost} other rows, which a new generation cannot bring back. Write to a new table"
            if older < wanted.first_readable and (own is None or older < own):
                return (
                    f"{lost} rows from offset {older} on, which this generation does not read again. Reset the "
                    f"position to {older}, or write to a new table"
                )
        return None

    def _of_groups(
        self, connection: Connection, wanted: Sequence[ClaimedRange]
    ) -> tuple[Sequence[ClaimedRange], Collection[str], Callable[[Sequence[ClaimedRange]], Iterator[ClaimedRange]]]:
        """Return the arguments of `OutputGroups.check` and `refusal`."""
        groups = self._ranges.groups(connection, wanted) if wanted else ()

        def held(ranges: Sequence[ClaimedRange]) -> Iterator[ClaimedRange]:
            return (range_ for range_, _, _ in self._ranges.held(connection, ranges, only_older=False))

        return wanted, groups, held

    def _check_columns(self, schema: "StructType") -> None:
        reserved = {RANGE_COLUMN, *RENAMED.values(), *(RESERVED if self._keys is not None else ())}
        check_columns(schema, reserved)
        if self._keys is not None:
            self._keys.check(schema)

    def _check_none_left(self, count: int) -> None:
        if count:
            raise SinkRejectedError(
                f"table {self._output}: {count} rows of an older generation still exist after they were "
                "deleted, because a trigger keeps them, so nothing was written. Remove the trigger"
            )

    def _set_positions(self, connection: Connection, taken: Sequence[ClaimedRange]) -> None:
        self._ranges.set_positions(connection, taken)

    def _check_table(self, connection: Connection, schema: "StructType") -> Collection[str]:
        """Return the table's columns. Raise `ConfigurationError` unless it stores rows of this schema unchanged."""
        there = self._dialect.columns(connection)
        names = column_names(schema.names)
        if not there:
            raise ConfigurationError(
                f"table {self._output} does not exist, or the role has no right to read it. Create it with "
                "`create_tables(frame.schema)`, or grant the right"
            )
        types = {RENAMED.get(column.name, column.name): column.dataType for column in schema.fields}
        if missing := [name for name in names if name not in there]:
            there = self._add_columns(connection, missing, types, there)
        self._dialect.check_output(connection, {RANGE_COLUMN: t.LongType(), **types})
        if self._upsert is not None:
            self._upsert.check_output(connection, types)
        if self._companion is not None:
            self._companion.check(connection, names)
        return there

    def _add_columns(
        self, connection: Connection, missing: Sequence[str], types: "Mapping[str, DataType]", there: Collection[str]
    ) -> Collection[str]:
        """Add the missing columns to the table, in the transaction that checks it, and return all its columns."""
        listed = f"table {self._output} lacks the columns {', '.join(missing)}"
        if own := {RANGE_COLUMN, *RENAMED.values()}.intersection(missing):
            raise ConfigurationError(f"{listed}: add {', '.join(sorted(own))}, by which the sink finds rows, yourself")
        if not self._adds_columns:
            raise ConfigurationError(f"{listed}: add them, or give the sink add_columns=True")
        spelt = {name.casefold(): name for name in there}
        if other := [spelt[name.casefold()] for name in missing if name.casefold() in spelt]:
            raise ConfigurationError(
                f"{listed}, but has {', '.join(other)}, spelt otherwise, so none was added. Rename the result's columns"
            )
        self._dialect.add_columns(connection, {name: types[name] for name in missing})
        found = self._dialect.columns(connection)
        if still := [name for name in missing if name not in found]:
            raise ConfigurationError(
                f"table {self._output} lacks the columns {', '.join(still)} after they were added: their names are "
                "too long, or the role may not read them. Rename the result's columns, or grant the right"
            )
        return found

    @contextmanager
    def _transaction(self) -> "Iterator[Connection]":
        """Yield a connection with one transaction, which is committed at the end and rolled back after any error."""
        with self._dialect.transaction(self._reached) as connection:
            yield connection
