"""A sink of rows in a PostgreSQL table, taken in the same transaction as the ranges that they are of.

Two tables stand beside the rows': `marshal_ranges` says how far the output has got with each partition, in which
generation; `marshal_taken_ranges` lists each range that was taken, and each row names its entry there. A writer copies
its rows to a temporary table first; only then does it lock its partitions in `marshal_ranges`, judge its ranges
(protocol.md, section 6, "Effectively once"), move the rows over and set the positions. So a writer that stalls holds
nobody up, and one that was overtaken finds that out before a row of its own is seen; `postgres_ranges` says who holds
what.
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
_WITHOUT_POLICIES = "give the role BYPASSRLS, or disable row-level security of the sink's tables"

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
    """
    CREATE INDEX IF NOT EXISTS marshal_taken_ranges_by_key
    ON {taken} (output, member_group, topic, partition, end_offset)
    """,
    """
    CREATE INDEX IF NOT EXISTS marshal_taken_ranges_by_generation
    ON {taken} (output, member_group, topic, partition, generation, end_offset)
    """,
)

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
    """What is written in the same transaction as the rows: all of it is there, or none.

    The rows are in the temporary table `pg_temp.marshal_rows`, with the output's columns and `marshal_range`.
    """

    def check(self, connection: "Connection", columns: Sequence[str]) -> None:
        """Raise `ConfigurationError` if it could not be written of rows with these columns."""
        ...

    def write(self, connection: "Connection", columns: Sequence[str], ranges: Sequence[int]) -> None:
        """Write what belongs to the rows whose `marshal_range` is one of `ranges`. Raises `SinkRejectedError`."""
        ...


@dataclass(frozen=True, slots=True)
class _RangeDecisions:
    """What is done with each range, and which of those to take lie over rows of older generations."""

    verdicts: Mapping[ClaimedRange, Verdict]
    over_older: tuple[ClaimedRange, ...]

    @property
    def open(self) -> tuple[ClaimedRange, ...]:
        return tuple(wanted for wanted, verdict in self.verdicts.items() if verdict is not Verdict.SKIP)


class _OffsetsNeededError(Exception):
    """Older rows are to be replaced, and the offsets read are not known yet."""


class PostgresSink(Steps):
    """Rows in the table `table` of a PostgreSQL 14 or newer.

    The table has the frame's columns under their names, but for `partition` and `offset`: these are `kafka_partition`
    (integer) and `kafka_offset` (bigint; needed only where the frame has an `offset`); and `marshal_range` (bigint).
    Arrays, maps and structs go to jsonb. `create_tables` makes all of it. The role must be allowed temporary tables.

    A column that would hold other values than the frame has is refused (`ConfigurationError`), as is a table that could
    lose rows. A row that PostgreSQL refuses is named with partition, offset and column (`SinkRejectedError`).
    """

    supports_unordered_ranges = True
    _evaluated = staticmethod(evaluated)
    """Evaluates the rows, except those of partitions that are done; tests put other rows in their place."""

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
        """Name the output; nothing is connected to before it is used.

        `dsn` is a connection string or URI; what it says of time-outs and keepalives comes before the defaults here.
        `companion` writes more in the same transaction, such as events for an outbox. `shared_by_groups` lets several
        groups write all offsets of a topic, each apart; without it a group is refused where another has ranges, unless
        that is its `previous_group` (docs/sinks.md, "Another group").
        Raises `ConfigurationError` for values that cannot be.
        """
        self.table, self.schema = table, schema
        for name, value in (("table", table), ("schema", schema)):
            check_name(name, value)
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("lock_timeout_s", lock_timeout_s),
            ("statement_timeout_s", statement_timeout_s),
        ):
            if seconds <= 0:
                raise ConfigurationError(f"{name}: {seconds}; give a time above 0")
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
        """Make the sink's own tables where they are missing, and with the frame's schema `rows` the rows' table too.

        Raises `UnavailableError`, as every method that follows, when the database cannot be reached or does not answer.
        """
        with self._transaction() as connection:
            be_only_creator(connection)
            for statement in _CREATE:
                self._execute(connection, statement)
            if rows is not None:
                self._create_rows(connection, rows)

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Say what would be done with each range (`Sink.verdicts`)."""
        check_ranges(ranges)
        with self._transaction() as connection:
            return dict(self._judge(connection, ranges).verdicts)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace what is there, else why not (`Sink.can_replace`)."""
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
        """Write the rows of each range that is not yet there, in one transaction (`Sink.write`).

        The frame is evaluated once, by all executors, before the transaction begins; its rows then come through this
        process, some megabytes at a time.
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
        """Take, in one transaction, those of `wanted` that are not done meanwhile."""
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
        rows = StagedRows(self._execute, self._database.error_text, self._output, ids, columns)
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
        """Judge all by what is stored beside the entries `own`, held until the transaction ends.

        Refuses also where older rows could not be replaced, and ranges that are another group's.
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
        """Return what `OutputGroups` judges by."""
        groups = self._ranges.groups(connection, wanted) if wanted else ()

        def held(ranges: Sequence[ClaimedRange]) -> Iterator[ClaimedRange]:
            return (range_ for range_, _, _ in self._held(connection, ranges, only_older=False))

        return wanted, groups, held

    def _held(
        self, connection: "Connection", ranges: Sequence[ClaimedRange], *, only_older: bool
    ) -> list[tuple[ClaimedRange, int, bool]]:
        """Return which ranges can be read where the output holds rows of this data topic, by generation.

        That is the range, the rows' generation, and whether all of them have offsets.
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
        """Enter the ranges as taken and return what their rows name them by, by partition."""
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
        """Add those of the rows to be written: the offsets were read after them, and compaction may have taken some."""
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
        """Delete what older generations hold at the very offsets noted."""
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
                f"table {self._output}: {left.rowcount} rows of an older generation were to be deleted and are still "
                "there: a trigger keeps them. Nothing was written; remove the trigger"
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
        """Raise `ConfigurationError` unless the table keeps rows of this schema as they are."""
        there = table_columns(connection, self.schema, self.table)
        names = column_names(schema.names)
        if not there:
            raise ConfigurationError(
                f"table: {self._output} does not exist, or may not be read: `create_tables(frame.schema)` makes it"
            )
        if missing := [name for name in names if name not in there]:
            raise ConfigurationError(f"table: {self._output} lacks the columns {', '.join(missing)}: add them")
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
                f"table: {self.schema}.{name} has row-level security for this role, which could hide rows from the "
                f"sink: {_WITHOUT_POLICIES}"
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
        # Ranges follow each other in the table, so an index of a few pages finds them.
        index = identifier(f"marshal_range_{zlib.crc32(self.table.encode()):08x}")
        statement: LiteralString = "CREATE INDEX IF NOT EXISTS {index} ON {rows} USING brin (marshal_range)"
        self._execute(connection, statement, index=index)

    def _execute(
        self,
        connection: "Connection",
        statement: LiteralString,
        parameters: Sequence[object] = (),
        **names: "Composable",
    ) -> "psycopg.Cursor[tuple[Any, ...]]":
        """Execute a statement with the tables' names, and `names`, put in."""
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
        """Give a connection whose one transaction is committed at the end, and undone by any error."""
        import psycopg

        try:
            with self._database.connect(is_one_transaction=True, prepare_threshold=None) as connection:
                for name, seconds in (
                    ("lock_timeout", self._lock_timeout_s),
                    ("statement_timeout", self._statement_timeout_s),
                    # A process that stops in the middle of a transaction loses it.
                    ("idle_in_transaction_session_timeout", self._statement_timeout_s),
                ):
                    milliseconds = max(1, round(seconds * 1000))
                    connection.execute("SELECT set_config(%s, %s, true)", (name, f"{milliseconds}ms"))
                # What is taken by one's word that it is there must not be lost with the power: off would let it.
                connection.execute(
                    "SELECT set_config('synchronous_commit', 'on', true) "
                    "WHERE current_setting('synchronous_commit') = 'off'"
                )
                yield connection
                self._reached("committing")
                connection.commit()
                self._reached("committed")
        except psycopg.Error as error:
            # Not chained: a connection's errors can hold the connection string, and a row's the row.
            raise self._translated_error(error) from None

    def _translated_error(self, error: "psycopg.Error") -> MarshalError:
        """Return the error as one of ours, in one line, without the password."""
        import psycopg
        from psycopg import errors

        said = self._database.error_text(error)
        if isinstance(error, errors.LockNotAvailable):
            return UnavailableError(
                f"table {self._output}: another writer has held these ranges for {self._lock_timeout_s} s: try again"
            )
        if isinstance(error, errors.QueryCanceled):
            return UnavailableError(
                f"table {self._output}: no answer within statement_timeout_s={self._statement_timeout_s}: take smaller "
                "batches, or a longer time-out"
            )
        if isinstance(error, errors.UndefinedTable):
            return ConfigurationError(f"table {self._output}: {said}: `create_tables` makes what is missing")
        if isinstance(error, errors.InsufficientPrivilege) and "row-level security" in said:
            return ConfigurationError(f"table {self._output}: {said}: {_WITHOUT_POLICIES}")
        outages = psycopg.OperationalError | psycopg.InterfaceError | errors.ReadOnlySqlTransaction
        if isinstance(error, outages) and not isinstance(error, errors.ProgramLimitExceeded):
            return UnavailableError(
                f"Postgres of table {self._output}: {said or 'the connection was lost'}. Whether a commit that was "
                "under way took effect is seen at the next attempt, which skips what is there"
            )
        if isinstance(error, psycopg.ProgrammingError):
            return ConfigurationError(f"table {self._output}: {said}")
        return SinkRejectedError(f"table {self._output} does not take the rows: {said}; nothing was written")
