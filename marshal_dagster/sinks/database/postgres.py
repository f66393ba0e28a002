"""A sink that writes rows to a PostgreSQL table, and the ranges they belong to in the same transaction.

It uses two more tables. `marshal_ranges` stores the position and generation of each partition. `marshal_taken_ranges`
contains one entry for each range that was written, and each row refers to its entry.

A writer first copies its rows to a temporary table. After that it locks its partitions in `marshal_ranges` and judges
its ranges (protocol.md, section 6, "Effectively once"). Finally it moves the rows to the output and sets the positions.
So a writer that stalls while it copies blocks no other writer. A writer whose claim was taken over is refused before
any of its rows is visible. `postgres_ranges` documents the locks.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString, Protocol

from marshal_dagster._internal.postgres import (
    DEFAULT_SCHEMA,
    Database,
    Secret,
    be_only_creator,
    check_name,
    check_tables_keep_rows,
    identifier,
)
from marshal_dagster.errors import ConfigurationError, MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge_ranges
from marshal_dagster.sinks.database.column_types import check_column_types, table_columns
from marshal_dagster.sinks.database.pg_copy import FrameLines, evaluated, postgres_type
from marshal_dagster.sinks.database.postgres_ranges import (
    IN_ORDER,
    VERSION,
    LockMode,
    LocksOutdatedError,
    RangeTables,
    check_row_count,
    columns_of,
    may_share_lock,
)
from marshal_dagster.sinks.database.staged_rows import RANGE_COLUMN, RENAMED, StagedRows, column_names
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.sink import (
    OFFSET_COLUMN,
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    check_columns,
    check_ranges,
    checked_after_read,
    refuse_foreign_rows,
    unreplaceable,
)
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composable, Composed
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from marshal_dagster._internal.postgres import Connection

_POSITIONS = "marshal_ranges"
_TAKEN = "marshal_taken_ranges"
_LONGEST_TIMEOUT_S = 2_147_483
"""The longest timeout that PostgreSQL accepts, in whole seconds."""
_WITHOUT_POLICIES = "grant BYPASSRLS to the role, or disable row-level security on the sink's tables"

_CREATE: tuple[LiteralString, ...] = (
    """
    CREATE TABLE IF NOT EXISTS {positions} (
        output text NOT NULL,
        member_group text NOT NULL,
        topic text NOT NULL,
        partition integer NOT NULL,
        coordination_topic_id text,
        data_topic_id text,
        generation bigint,
        epoch bigint,
        position bigint,
        version integer NOT NULL,
        changed_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (output, member_group, topic, partition)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS {taken} (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        output text NOT NULL,
        member_group text NOT NULL,
        topic text NOT NULL,
        partition integer NOT NULL,
        coordination_topic_id text NOT NULL,
        data_topic_id text NOT NULL,
        generation bigint NOT NULL,
        epoch bigint NOT NULL,
        start_offset bigint NOT NULL,
        first_readable bigint NOT NULL,
        end_offset bigint NOT NULL,
        row_count bigint NOT NULL,
        has_offsets boolean NOT NULL,
        version integer NOT NULL,
        taken_at timestamptz NOT NULL DEFAULT now()
    )
    """,
)
_INDEXES: Mapping[str, LiteralString] = {
    "marshal_taken_ranges_by_key": "ON {taken} (output, member_group, topic, partition, end_offset)",
    "marshal_taken_ranges_by_generation": "ON {taken} (output, member_group, topic, partition, generation, end_offset)",
}

_GONE: LiteralString = """
    WITH gone AS MATERIALIZED (
        SELECT w.partition, w.data_topic_id, w.generation,
            range_agg(int8range(o.first_offset, o.end_offset)) AS offsets
        FROM unnest(%s::integer[], %s::text[], %s::bigint[]) AS w (partition, data_topic_id, generation)
        JOIN pg_temp.marshal_offsets AS o ON o.partition = w.partition
        GROUP BY w.partition, w.data_topic_id, w.generation
    )
    """
_IS_GONE: LiteralString = """
    r.marshal_range = t.id AND t.output = %s AND t.member_group = %s AND t.topic = %s AND t.partition = gone.partition
    AND t.data_topic_id = gone.data_topic_id AND t.generation < gone.generation
    AND r.kafka_partition = gone.partition AND r.kafka_offset::bigint <@ gone.offsets
    """


class TransactionHook(Protocol):
    """A hook that writes more data in the sink's transaction, such as outbox events, to be committed with the rows.

    The rows are in the temporary table `pg_temp.marshal_rows`, with the output's columns and `marshal_range`.
    """

    def check(self, connection: "Connection", columns: Sequence[str]) -> None:
        """Check before a batch that the data of rows with these columns can be written.

        Args:
            connection: A connection with an open transaction.
            columns: The output's columns.

        Raises:
            ConfigurationError: If it cannot be written.
        """
        ...

    def write(self, connection: "Connection", columns: Sequence[str], ranges: Sequence[int]) -> None:
        """Write the data that belongs to the rows of some ranges.

        Args:
            connection: The connection with the sink's transaction.
            columns: The columns of `pg_temp.marshal_rows`.
            ranges: The values of `marshal_range` of the rows that are written.

        Raises:
            SinkRejectedError: If the data cannot be written.
        """
        ...


@dataclass(frozen=True, slots=True)
class _RangeDecisions:
    """The verdict on each range, and the ranges at whose offsets there are rows of older generations."""

    verdicts: Mapping[ClaimedRange, Verdict]
    over_older: tuple[ClaimedRange, ...]

    @property
    def open(self) -> tuple[ClaimedRange, ...]:
        return tuple(wanted for wanted, verdict in self.verdicts.items() if verdict is not Verdict.SKIP)


class _OffsetsNeededError(Exception):
    """Older rows must be replaced, but the offsets that the batch has read are not known yet."""


class PostgresSink(Steps):
    """A sink that writes rows to the table `table` of PostgreSQL 14 or newer.

    The table has the frame's columns, with `partition` and `offset` renamed to `kafka_partition` (integer) and
    `kafka_offset` (bigint; only if the frame has `offset`), and the column `marshal_range` (bigint). Arrays, maps and
    structs are stored as jsonb. `create_tables` creates all tables. The role needs the right to create temporary
    tables.

    Columns that would store other values than the frame has are refused, and so are tables that could lose rows. The
    error for a row that PostgreSQL rejects names its partition, offset and column.

    Example:
        ```python
        sink = PostgresSink("postgresql://me@localhost/shop", "orders")
        sink.create_tables(frame.schema)  # once, when the output is set up
        ```
    """

    supports_unordered_ranges = True
    """True: the sink stores every range, so it accepts ranges in any order."""
    _evaluated = staticmethod(evaluated)
    """Evaluates the rows of the partitions that are not done; tests replace it."""

    def __init__(
        self,
        dsn: str | Secret,
        table: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        companion: TransactionHook | None = None,
        connect_timeout_s: int = 10,
        lock_timeout_s: float = 60.0,
        statement_timeout_s: float = 600.0,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
    ) -> None:
        """Configure the output; the sink does not connect before its first use.

        Args:
            dsn: A connection string or URI. Timeouts and keepalives in it override the defaults of the sink.
            table: The table for the rows.
            schema: The schema of the table and of the sink's own tables.
            companion: Writes more data in the same transaction, such as events for an outbox.
            connect_timeout_s: How many seconds connecting may take.
            lock_timeout_s: How many seconds to wait for the locks of another writer of the same ranges.
            statement_timeout_s: How many seconds one statement may take, and the transaction may be idle.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/sinks.md,
                "Another group").

        Raises:
            ConfigurationError: If a value is not valid.
        """
        self.table, self.schema = table, schema
        for name, value in (("table", table), ("schema", schema)):
            check_name(name, value)
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("lock_timeout_s", lock_timeout_s),
            ("statement_timeout_s", statement_timeout_s),
        ):
            if not 0 < seconds <= _LONGEST_TIMEOUT_S:
                raise ConfigurationError(
                    f"{name} is {seconds}; it must be a number of seconds above 0 and at most {_LONGEST_TIMEOUT_S:,}"
                )
        self._database = Database(dsn, connect_timeout_s=connect_timeout_s)
        self._lock_timeout_s = lock_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._companion = companion
        self._output = f"{schema}.{table}"
        self._groups = OutputGroups(f"table {self._output}", shared_by_groups, previous_group)
        self._ranges = RangeTables(self._execute, self._output, f"{schema}.{_POSITIONS}")

    def __repr__(self) -> str:
        return f"PostgresSink(table={self.table!r}, schema={self.schema!r})"

    def create_tables(self, rows: "StructType | None" = None) -> None:
        """Create the sink's own tables if they are missing, and optionally the table for the rows.

        Args:
            rows: The schema of the frame, to create the table for the rows too if it is missing.

        Raises:
            ConfigurationError: If a column has a type that the sink does not write or a reserved name, or if the role
                lacks a right.
            UnavailableError: If the database cannot be reached or does not answer in time.
        """
        with self._transaction() as connection:
            be_only_creator(connection)
            for statement in _CREATE:
                self._execute(connection, statement)
            for name, on in _INDEXES.items():
                self._create_index(connection, name, on)
            if rows is not None:
                self._create_rows(connection, rows)

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: If one of the ranges cannot be written.
            ConfigurationError: If a table is missing or the role lacks a right.
            UnavailableError: If the database cannot be reached or does not answer in time.
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
            UnavailableError: If the database cannot be reached or does not answer in time.
        """
        with self._transaction() as connection:
            held = self._held(connection, ranges, only_older=False)
            return unreplaceable(held, f"table {self._output}") or self._groups.refusal(
                *self._of_groups(connection, ranges)
            )

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range that the table does not have, in one transaction (`Sink.write`).

        The executors evaluate the frame once, before the transaction begins. The rows then pass through this process,
        a few megabytes at a time.

        Args:
            frame: The rows, with the column `partition` and optionally `offset`.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read; called if older rows are replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: If a range or a row cannot be written.
            ConfigurationError: If the table is missing or would change or lose values.
            UnavailableError: If the database cannot be reached or does not answer in time.
        """
        check_columns(frame.schema, {RANGE_COLUMN, *RENAMED.values()})
        check_ranges(ranges)
        columns = frame.columns
        with self._transaction() as connection:
            judged = self._judge(connection, ranges)
            if judged.open:
                self._check_table(connection, frame.schema)
        if not judged.open:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        done = [range_.partition for range_ in ranges if range_ not in judged.open]
        with self._evaluated(frame, done) as lines:
            refuse_foreign_rows(["null" if partition is None else partition for partition in lines.counts], judged.open)
            if lines.rejected is not None:
                raise lines.rejected.error(f"table {self._output}", judged.open)
            self._reached("evaluated")
            before_commit()
            taken = self._take(judged.open, columns, lines, checked_after_read(offsets_read, before_commit))
        return WriteResult(
            taken=taken,
            skipped=tuple(range_ for range_ in ranges if range_ not in taken),
            rows={range_.partition: lines.counts.get(range_.partition, 0) for range_ in taken},
        )

    def _take(
        self, wanted: Sequence[ClaimedRange], columns: Sequence[str], lines: FrameLines, offsets_read: OffsetsRead
    ) -> tuple[ClaimedRange, ...]:
        """Write, in one transaction, those of `wanted` that no other writer has written meanwhile."""
        read: Mapping[int, Intervals] | None = None
        while True:
            try:
                with self._transaction() as connection:
                    return self._take_in(connection, wanted, columns, lines=lines, read=read)
            except _OffsetsNeededError:
                read = offsets_read()
            except LocksOutdatedError:
                continue

    def _take_in(
        self,
        connection: "Connection",
        wanted: Sequence[ClaimedRange],
        columns: Sequence[str],
        *,
        lines: FrameLines,
        read: Mapping[int, Intervals] | None,
    ) -> tuple[ClaimedRange, ...]:
        if read is None and self._judge(connection, wanted).over_older:
            raise _OffsetsNeededError
        ids = self._enter(connection, wanted, lines)
        there = table_columns(connection, self.schema, self.table)
        rows = StagedRows(self._execute, self._database.error_text, self._output, ids, columns, there=there)
        rows.copy(connection, wanted, lines)
        self._reached("copied")
        if not self._groups.shared_by_groups:
            self._ranges.lock_groups(connection, wanted)
        hold = self._ranges.hold_for(connection, wanted)
        judged = self._judge(connection, wanted, hold, own=ids.values())
        self._reached("locked")
        if judged.over_older:
            if read is None:
                raise _OffsetsNeededError
            self._note_offsets(connection, judged.over_older, read)
            if OFFSET_COLUMN in columns:
                self._note_own_offsets(connection, judged.over_older)
            self._replace(connection, judged.over_older)
            self._reached("replaced")
        taken = [ids[range_.partition] for range_ in judged.open]
        rows.move(connection, judged.open, lines.counts)
        if self._companion is not None and taken:
            self._companion.write(connection, column_names(columns), taken)
        self._reached("moved")
        done_by_others = [ids[range_.partition] for range_ in wanted if range_ not in judged.open]
        if done_by_others:
            removed = self._execute(connection, "DELETE FROM {taken} WHERE id = ANY(%s)", (done_by_others,))
            check_row_count(removed, len(done_by_others), f"{self.schema}.{_TAKEN}")
        if hold is LockMode.SHARED:
            self._ranges.look_once_more(connection, judged.open, own=ids.values())
        else:
            self._set_positions(connection, judged.open)
        self._reached("set")
        return judged.open

    def _judge(
        self,
        connection: "Connection",
        ranges: Sequence[ClaimedRange],
        hold: LockMode = LockMode.NOT,
        own: Collection[int] = (),
    ) -> _RangeDecisions:
        """Judge all ranges by the stored ranges, except the entries `own` of this transaction.

        `hold` selects the lock that is kept until the transaction ends.

        Raises:
            SinkRejectedError: If a range is refused, belongs to another group, or lies over rows that cannot be
                replaced.
        """
        rows = self._ranges.rows(connection, ranges, hold)
        if hold is LockMode.SHARED:
            self._ranges.lock_starts(connection, ranges)
        stored = self._ranges.stored(connection, ranges, rows, own)
        verdicts = {wanted: judge_ranges(stored.get(wanted.partition), wanted) for wanted in ranges}
        if hold is LockMode.SHARED and not may_share_lock(rows, ranges):
            raise LocksOutdatedError
        wanted = [wanted for wanted, verdict in verdicts.items() if verdict is not Verdict.SKIP]
        self._groups.check(*self._of_groups(connection, wanted))
        older = self._held(connection, wanted, only_older=True)
        if reason := unreplaceable(older, f"table {self._output}"):
            raise SinkRejectedError(reason)
        return _RangeDecisions(verdicts, tuple(dict.fromkeys(over for over, _, _ in older)))

    def _of_groups(
        self, connection: "Connection", wanted: Sequence[ClaimedRange]
    ) -> tuple[Sequence[ClaimedRange], Collection[str], Callable[[Sequence[ClaimedRange]], Iterator[ClaimedRange]]]:
        """Return the arguments of `OutputGroups.check` and `refusal`."""
        groups = self._ranges.groups(connection, wanted) if wanted else ()

        def held(ranges: Sequence[ClaimedRange]) -> Iterator[ClaimedRange]:
            return (range_ for range_, _, _ in self._held(connection, ranges, only_older=False))

        return wanted, groups, held

    def _held(
        self, connection: "Connection", ranges: Sequence[ClaimedRange], *, only_older: bool
    ) -> list[tuple[ClaimedRange, int, bool]]:
        """Return the ranges at whose readable offsets the output has rows of the same group and data topic.

        Each item is the range, the rows' generation, and whether all of these rows have offsets. With `only_older`
        only generations older than the range's are considered.
        """
        readable = {range_.partition: range_ for range_ in ranges if range_.first_readable < range_.end}
        if not readable:
            return []
        wanted = list(readable.values())
        held = self._execute(
            connection,
            "SELECT t.partition, t.generation, bool_and(t.has_offsets) "
            "FROM {taken} AS t JOIN unnest(%s::integer[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[]) "
            "AS w (partition, data_topic_id, generation, first_readable, end_offset) "
            "ON t.partition = w.partition AND t.data_topic_id = w.data_topic_id "
            "AND t.first_readable < w.end_offset AND t.end_offset > w.first_readable "
            "WHERE t.output = %s AND t.member_group = %s AND t.topic = %s AND t.row_count > 0 "
            "AND (t.generation < w.generation OR NOT %s) "
            "GROUP BY t.partition, t.generation ORDER BY t.partition, t.generation",
            (
                *columns_of(wanted, "partition", "data_topic_id", "generation", "first_readable", "end"),
                *self._ranges.key(wanted),
                only_older,
            ),
        )
        return [(readable[partition], generation, offsets) for partition, generation, offsets in held]

    def _enter(self, connection: "Connection", wanted: Sequence[ClaimedRange], lines: FrameLines) -> dict[int, int]:
        """Insert the entries of the ranges into `marshal_taken_ranges`, and return their ids by partition."""
        entries = self._execute(
            connection,
            "INSERT INTO {taken} (output, member_group, topic, partition, coordination_topic_id, data_topic_id, "
            "generation, epoch, start_offset, first_readable, end_offset, row_count, has_offsets, version) "
            "SELECT %s, %s, %s, w.*, %s, %s FROM unnest(%s::integer[], %s::text[], %s::text[], %s::bigint[], "
            "%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) AS w RETURNING partition, id",
            (
                *self._ranges.key(wanted),
                lines.all_have_offsets,
                IN_ORDER,
                *columns_of(wanted, "partition", "coordination_topic_id", "data_topic_id", "generation", "epoch"),
                *columns_of(wanted, "start", "first_readable", "end"),
                [lines.counts.get(range_.partition, 0) for range_ in wanted],
            ),
        )
        check_row_count(entries, len(wanted), f"{self.schema}.{_TAKEN}")
        return dict(entries.fetchall())

    def _note_offsets(
        self, connection: "Connection", wanted: Sequence[ClaimedRange], read: Mapping[int, Intervals]
    ) -> None:
        connection.execute(
            "CREATE TEMPORARY TABLE marshal_offsets (partition integer, first_offset bigint, end_offset bigint) "
            "ON COMMIT DROP"
        )
        with connection.cursor().copy("COPY pg_temp.marshal_offsets FROM STDIN") as copy:
            for range_ in wanted:
                for start, end in read.get(range_.partition, ()):
                    copy.write_row((range_.partition, start, end))

    def _note_own_offsets(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> None:
        """Add the offsets of the rows to be written: compaction can have removed messages since they were computed."""
        connection.execute(
            "INSERT INTO pg_temp.marshal_offsets SELECT kafka_partition, min(kafka_offset), max(kafka_offset) + 1 "
            "FROM (SELECT r.kafka_partition, r.kafka_offset, r.kafka_offset - dense_rank() OVER "
            "(PARTITION BY r.kafka_partition ORDER BY r.kafka_offset) AS run FROM pg_temp.marshal_rows AS r "
            "JOIN unnest(%s::integer[], %s::bigint[], %s::bigint[]) AS w (partition, first_readable, end_offset) "
            "ON r.kafka_partition = w.partition AND r.kafka_offset >= w.first_readable "
            "AND r.kafka_offset < w.end_offset) AS own GROUP BY kafka_partition, run",
            columns_of(wanted, "partition", "first_readable", "end"),
        )

    def _replace(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> None:
        """Delete the rows of older generations at the offsets in `pg_temp.marshal_offsets`."""
        from psycopg import sql

        parameters = (*columns_of(wanted, "partition", "data_topic_id", "generation"), *self._ranges.key(wanted))
        parts = {"gone": sql.SQL(_GONE), "is_gone": sql.SQL(_IS_GONE)}
        self._execute(
            connection, "{gone} DELETE FROM {rows} AS r USING {taken} AS t, gone WHERE {is_gone}", parameters, **parts
        )
        left = self._execute(
            connection, "{gone} SELECT FROM {rows} AS r, {taken} AS t, gone WHERE {is_gone}", parameters, **parts
        )
        if left.rowcount:
            raise SinkRejectedError(
                f"table {self._output}: {left.rowcount} rows of an older generation still exist after they were "
                "deleted, because a trigger keeps them, so nothing was written. Remove the trigger"
            )

    def _set_positions(self, connection: "Connection", taken: Sequence[ClaimedRange]) -> None:
        if not taken:
            return
        updated = self._execute(
            connection,
            "UPDATE {positions} AS p SET coordination_topic_id = w.coordination_topic_id, "
            "data_topic_id = w.data_topic_id, generation = w.generation, epoch = w.epoch, "
            "position = CASE WHEN NOT w.in_any_order THEN w.position "
            "WHEN p.generation = w.generation THEN p.position END, "
            "version = CASE WHEN w.in_any_order THEN %s WHEN p.generation = w.generation THEN p.version "
            "ELSE %s END, changed_at = now() "
            "FROM unnest(%s::integer[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], "
            "%s::boolean[]) "
            "AS w (partition, coordination_topic_id, data_topic_id, generation, epoch, position, in_any_order) "
            "WHERE p.output = %s AND p.member_group = %s AND p.topic = %s AND p.partition = w.partition",
            (
                VERSION,
                IN_ORDER,
                *columns_of(taken, "partition", "coordination_topic_id", "data_topic_id", "generation", "epoch"),
                *columns_of(taken, "end", "in_any_order"),
                *self._ranges.key(taken),
            ),
        )
        check_row_count(updated, len(taken), f"{self.schema}.{_POSITIONS}")

    def _check_table(self, connection: "Connection", schema: "StructType") -> None:
        """Raise `ConfigurationError` unless the table stores rows of this schema unchanged."""
        there = table_columns(connection, self.schema, self.table)
        names = column_names(schema.names)
        if not there:
            raise ConfigurationError(
                f"table {self._output} does not exist, or the role has no right to read it. Create it with "
                "`create_tables(frame.schema)`, or grant the right"
            )
        if missing := [name for name in names if name not in there]:
            raise ConfigurationError(f"table {self._output} lacks the columns {', '.join(missing)}: add them")
        types = {RENAMED.get(column.name, column.name): column.dataType for column in schema.fields}
        own = {RANGE_COLUMN, *RENAMED.values()}
        check_column_types(self._output, {RANGE_COLUMN: t.LongType(), **types}, there, own)
        check_tables_keep_rows(connection, self.schema, [self.table, _POSITIONS, _TAKEN])
        filtered = connection.execute(
            "SELECT c.relname FROM pg_catalog.pg_class AS c "
            "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = ANY(%s) AND row_security_active(c.oid)",
            (self.schema, [self.table, _POSITIONS, _TAKEN]),
        )
        for (name,) in filtered:
            raise ConfigurationError(
                f"table {self.schema}.{name} has row-level security for this role, which could hide rows from the "
                f"sink. To continue, {_WITHOUT_POLICIES}"
            )
        if self._companion is not None:
            self._companion.check(connection, names)

    def _create_rows(self, connection: "Connection", rows: "StructType") -> None:
        from psycopg import sql

        check_columns(rows, {RANGE_COLUMN, *RENAMED.values()})
        kinds = {RANGE_COLUMN: "bigint NOT NULL"} | {
            RENAMED.get(column.name, column.name): postgres_type(column.name, column.dataType) for column in rows.fields
        }
        kinds |= {"kafka_partition": "integer NOT NULL"}
        if OFFSET_COLUMN in rows.names:
            kinds |= {"kafka_offset": "bigint"}
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(identifier(name), sql.SQL(kind)) for name, kind in kinds.items()
        )
        self._execute(connection, "CREATE TABLE IF NOT EXISTS {rows} ({columns})", columns=columns)
        # The rows of a range are stored next to each other, so a BRIN index of a few pages is enough.
        name = f"marshal_range_{zlib.crc32(self.table.encode()):08x}"
        self._create_index(connection, name, "ON {rows} USING brin (marshal_range)")

    def _create_index(self, connection: "Connection", name: str, on: LiteralString) -> None:
        """Create an index unless it exists.

        IF NOT EXISTS waits for all open writers of the table even if the index exists, and new writers wait for it.
        """
        found = connection.execute(
            "SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            (self.schema, name),
        )
        if not found.rowcount:
            self._execute(connection, "CREATE INDEX IF NOT EXISTS {index} " + on, index=identifier(name))

    def _execute(
        self,
        connection: "Connection",
        statement: LiteralString,
        parameters: Sequence[object] = (),
        **names: "Composable",
    ) -> "psycopg.Cursor[tuple[Any, ...]]":
        """Execute a statement in which the placeholders of the tables and of `names` are filled in."""
        return connection.execute(self._named(statement, **names), parameters)

    def _named(self, statement: LiteralString, **names: "Composable") -> "Composed":
        from psycopg import sql

        return sql.SQL(statement).format(
            positions=identifier(self.schema, _POSITIONS),
            taken=identifier(self.schema, _TAKEN),
            rows=identifier(self.schema, self.table),
            **names,
        )

    @contextmanager
    def _transaction(self) -> "Iterator[Connection]":
        """Yield a connection with one transaction, which is committed at the end and rolled back after any error."""
        import psycopg

        try:
            with self._database.connect(is_one_transaction=True, prepare_threshold=None) as connection:
                for name, seconds in (
                    ("lock_timeout", self._lock_timeout_s),
                    ("statement_timeout", self._statement_timeout_s),
                    # The server ends the transaction of a process that stops in the middle of it.
                    ("idle_in_transaction_session_timeout", self._statement_timeout_s),
                ):
                    milliseconds = max(1, round(seconds * 1000))
                    connection.execute("SELECT set_config(%s, %s, true)", (name, f"{milliseconds}ms"))
                # The group's positions are committed after this transaction, so a power failure must not undo it. With
                # synchronous_commit off it could.
                connection.execute(
                    "SELECT set_config('synchronous_commit', 'on', true) "
                    "WHERE current_setting('synchronous_commit') = 'off'"
                )
                yield connection
                self._reached("committing")
                connection.commit()
                self._reached("committed")
        except psycopg.Error as error:
            # Not chained: psycopg's errors can contain the connection string or a row.
            raise self._translated_error(error) from None

    def _translated_error(self, error: "psycopg.Error") -> MarshalError:
        """Return the error as a `MarshalError`, in one line and without the password."""
        import psycopg
        from psycopg import errors

        said = self._database.error_text(error)
        if isinstance(error, errors.LockNotAvailable):
            return UnavailableError(
                f"table {self._output}: another writer has locked these ranges for {self._lock_timeout_s} s. Run the "
                "batch again"
            )
        if isinstance(error, errors.QueryCanceled):
            return UnavailableError(
                f"table {self._output}: a statement did not finish within statement_timeout_s="
                f"{self._statement_timeout_s}. Use smaller batches or a longer timeout"
            )
        if isinstance(error, errors.UndefinedTable):
            return ConfigurationError(f"table {self._output}: {said}. Create missing tables with `create_tables`")
        if isinstance(error, errors.InsufficientPrivilege) and "row-level security" in said:
            return ConfigurationError(f"table {self._output}: {said}. To continue, {_WITHOUT_POLICIES}")
        outages = psycopg.OperationalError | psycopg.InterfaceError | errors.ReadOnlySqlTransaction
        if isinstance(error, outages) and not isinstance(error, errors.ProgramLimitExceeded):
            return UnavailableError(
                f"PostgreSQL of table {self._output}: {said or 'the connection was lost'}. Whether a commit in "
                "progress succeeded is not known: the next attempt of the batch finds out, and skips ranges that were "
                "written"
            )
        if isinstance(error, psycopg.ProgrammingError):
            return ConfigurationError(f"table {self._output}: {said}")
        return SinkRejectedError(
            f"table {self._output} cannot store the rows: {said}; nothing was written. Correct the code that makes the "
            "rows, or change the table"
        )
