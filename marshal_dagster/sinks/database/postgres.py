"""A sink that writes rows to a PostgreSQL table, and the ranges they belong to in the same transaction.

`sink` has the course of a write. This module has PostgreSQL's dialect: its connections, SQL, locks and errors.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, LiteralString

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.postgres import (
    DEFAULT_SCHEMA,
    Database,
    Secret,
    be_only_creator,
    check_name,
    check_tables_keep_rows,
)
from marshal_dagster.errors import ConfigurationError, MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.column_types import table_columns, with_exact_floats
from marshal_dagster.sinks.database.dialect import (
    OFFSETS_OF_STAGED,
    OWN_TABLES,
    POSITIONS,
    RANGE_COLUMN,
    RENAMED,
    TAKEN,
    Dialect,
    Fragment,
    Kind,
    LockMode,
    StagedRows,
    TransactionConflictError,
)
from marshal_dagster.sinks.database.frame_lines import FrameLines
from marshal_dagster.sinks.database.pg_copy import evaluated, postgres_type
from marshal_dagster.sinks.database.postgres_rights import check_may_create_tables, missing_grants
from marshal_dagster.sinks.database.sink import DatabaseSink, TransactionHook
from marshal_dagster.sinks.database.staged_rows import CopiedRows, PostgresRows
from marshal_dagster.sinks.database.task_rows import TaskRows, TaskStagedRows, drop_abandoned, rows_of_tasks
from marshal_dagster.sinks.row_writer import RowWriter
from marshal_dagster.sinks.sink import OFFSET_COLUMN, Intervals
from marshal_dagster.sinks.upsert_keys import WriteMode
from marshal_dagster.spark.executor_check import check_executors
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

    from marshal_dagster._internal.postgres import Connection

_LONGEST_TIMEOUT_S = 2_147_483
"""The longest timeout that PostgreSQL accepts, in whole seconds."""
_BY_OTHERS = "let another role call `create_tables`"
_WITHOUT_POLICIES = "grant BYPASSRLS to the role, or disable row-level security on the sink's tables"

_DECLARED: Final[Mapping[Kind, str]] = {
    Kind.NAME: "text",
    Kind.INTEGER: "integer",
    Kind.BIGINT: "bigint",
    Kind.BOOLEAN: "boolean",
    Kind.ID: "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    Kind.INSTANT: "timestamptz DEFAULT now()",
}
"""The declaration of each kind of column in the sink's own tables."""

_UNIQUE_INDEXES: LiteralString = """
    SELECT array_agg(a.attname::text) FROM pg_catalog.pg_index AS i
    JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = ANY((i.indkey::int2[])[:i.indnkeyatts - 1])
    WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
    AND i.indpred IS NULL AND i.indexprs IS NULL GROUP BY i.indexrelid
    """
"""Selects the columns of each unique index, without partial and deferrable ones and those of expressions."""

_INEXACT_COLLATIONS: LiteralString = """
    SELECT a.attname::text FROM pg_catalog.pg_attribute AS a
    JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_collation AS l ON l.oid = a.attcollation
    WHERE n.nspname = %s AND c.relname = %s AND NOT l.collisdeterministic
    """
"""Selects the columns of which different strings can be equal."""

_GONE: LiteralString = """
    WITH gone AS MATERIALIZED (
        SELECT w.partition, w.data_topic_id, w.generation,
            range_agg(int8range(o.first_offset, o.end_offset)) AS offsets
        FROM {wanted} JOIN pg_temp.marshal_offsets AS o ON o.partition = w.partition
        GROUP BY w.partition, w.data_topic_id, w.generation
    )
    """
_IS_GONE: LiteralString = """
    r.marshal_range = t.id AND t.output = %(output)s AND t.member_group = %(member_group)s AND t.topic = %(topic)s
    AND t.partition = gone.partition AND t.data_topic_id = gone.data_topic_id AND t.generation < gone.generation
    AND r.kafka_partition = gone.partition AND r.kafka_offset::bigint <@ gone.offsets
    """


class PostgresSink(DatabaseSink["Connection"]):
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

    def __init__(
        self,
        dsn: str | Secret,
        table: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        companion: TransactionHook["Connection"] | None = None,
        connect_timeout_s: int = 10,
        lock_timeout_s: float = 60.0,
        statement_timeout_s: float = 600.0,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
        written_by: RowWriter | str = RowWriter.EXECUTORS,
        mode: WriteMode | str = WriteMode.APPEND,
        keys: Sequence[str] = (),
        order_by: str | None = None,
        add_columns: bool = False,
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
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").
            written_by: Whether Spark's tasks copy the rows into a staging table, or the process of the run copies them.
                Tasks need the packages marshal-dagster, psycopg, pandas and pyarrow on each executor, and the role
                needs the right to create tables in the schema.
            mode: `append` adds each row. `upsert` replaces the row with the same keys by a newer one
                (docs/how-to/sinks.md, "One row for each key").
            keys: The result's columns by which rows replace each other. The table needs a unique index on them.
            order_by: The result's column that decides between rows of several partitions: the greatest value wins.
            add_columns: Whether columns of the result that the table lacks are added to it, before the frame is
                evaluated. The role must own the table. Columns are never removed, and their types never changed.

        Raises:
            ConfigurationError: A value is not valid.
        """
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
        super().__init__(
            PostgresDialect(
                Database(dsn, connect_timeout_s=connect_timeout_s),
                schema,
                table,
                lock_timeout_s=lock_timeout_s,
                statement_timeout_s=statement_timeout_s,
                privileges=("SELECT", "INSERT", "UPDATE") if mode == WriteMode.UPSERT else ("SELECT", "INSERT"),
            ),
            companion=companion,
            shared_by_groups=shared_by_groups,
            previous_group=previous_group,
            written_by=written_by,
            mode=mode,
            keys=keys,
            order_by=order_by,
            add_columns=add_columns,
        )


class PostgresDialect(Dialect["Connection"]):
    """PostgreSQL 14 or newer."""

    keep_ids = "OVERRIDING SYSTEM VALUE"
    lock_clauses: Mapping[LockMode, str] = {
        LockMode.NOT: "",
        LockMode.SHARED: "FOR SHARE",
        LockMode.ALONE: "FOR UPDATE",
    }
    temporary_clause = "ON COMMIT DROP"

    def __init__(
        self,
        database: Database,
        schema: str,
        table: str,
        *,
        lock_timeout_s: float,
        statement_timeout_s: float,
        privileges: Sequence[str],
    ) -> None:
        """Store the arguments (`PostgresSink.__init__`), and the privileges on the table that each batch needs."""
        super().__init__(schema, table)
        self._privileges = privileges
        self._database = database
        self._lock_timeout_s, self._statement_timeout_s = lock_timeout_s, statement_timeout_s

    def run(
        self, connection: "Connection", statement: str, parameters: Mapping[str, object]
    ) -> "psycopg.Cursor[tuple[Any, ...]]":
        """Execute a statement."""
        from psycopg import sql

        return connection.execute(sql.SQL(statement), parameters)

    def quoted(self, *names: str) -> str:
        """Return a quoted name, with percent signs doubled."""
        return ".".join('"' + name.replace('"', '""').replace("%", "%%") + '"' for name in names)

    def relation(self, alias: str, columns: Mapping[str, Kind], rows: Iterable[Sequence[object]]) -> Fragment:
        """Return the rows as arrays, one for each column."""
        rows = list(rows)
        arrays = ", ".join(f"%({alias}_{name})s::{_DECLARED[kind]}[]" for name, kind in columns.items())
        names = ", ".join(f'"{name}"' for name in columns)
        return Fragment(
            f"unnest({arrays}) AS {alias} ({names})",
            {f"{alias}_{name}": [row[index] for row in rows] for index, name in enumerate(columns)},
        )

    def one_of(self, expression: str, numbers: Iterable[int]) -> Fragment:
        """Return the condition with the numbers as one array."""
        return Fragment(f"({expression} = ANY(%(numbers)s::bigint[]))", {"numbers": list(numbers)})

    def lock_topic(self, connection: "Connection", topic: str, *, shared: bool) -> None:
        """Take an advisory lock."""
        name = json.dumps([self.output, topic])
        statement: LiteralString = "SELECT pg_advisory_xact_lock{}(hashtextextended(%s, 0))"
        connection.execute(statement.format("_shared" if shared else ""), (name,))

    def lock_names(self, connection: "Connection", names: Sequence[str]) -> None:
        """Take advisory locks with these names until the transaction ends, always in the same order."""
        connection.execute(
            "SELECT pg_advisory_xact_lock(number) FROM (SELECT DISTINCT hashtextextended(name, 0) AS number "
            "FROM unnest(%s::text[]) AS name ORDER BY number) AS numbers",
            (list(names),),
        )

    def create_own_tables(self, connection: "Connection") -> None:
        """Create the sink's own tables and their indexes."""
        check_may_create_tables(connection, self.output, self.schema, _BY_OTHERS)
        be_only_creator(connection)
        for name, table in OWN_TABLES.items():
            parts = [
                f'"{column}" {_DECLARED[kind]}{"" if column in table.optional or kind is Kind.ID else " NOT NULL"}'
                for column, kind in table.columns.items()
            ]
            if table.key:
                parts.append(f"PRIMARY KEY ({', '.join(_named(table.key))})")
            place = self.quoted(self.schema, name)
            self.execute(
                connection, f"CREATE TABLE IF NOT EXISTS {{place}} ({', '.join(parts)})", place=Fragment(place)
            )
            for index, columns in table.indexes.items():
                self._create_index(connection, index, f"ON {{place}} ({', '.join(_named(columns))})", place)

    def create_output(self, connection: "Connection", rows: "StructType", keys: Sequence[str] = ()) -> None:
        """Create the table for the rows."""
        be_only_creator(connection)
        kinds = {RANGE_COLUMN: "bigint NOT NULL"} | {
            RENAMED.get(column.name, column.name): postgres_type(column.name, column.dataType) for column in rows.fields
        }
        kinds |= {"kafka_partition": "integer NOT NULL"}
        if OFFSET_COLUMN in rows.names:
            kinds |= {"kafka_offset": "bigint"}
        parts = [f"{self.quoted(name)} {kind}" for name, kind in kinds.items()]
        if keys:
            parts.append(f"UNIQUE ({', '.join(map(self.quoted, keys))})")
        columns = Fragment(", ".join(parts))
        self.execute(connection, "CREATE TABLE IF NOT EXISTS {rows} ({columns})", columns=columns)
        # The rows of a range are stored next to each other, so a BRIN index of a few pages is enough.
        name = f"marshal_range_{zlib.crc32(self.table.encode()):08x}"
        self._create_index(
            connection, name, "ON {place} USING brin (marshal_range)", self.quoted(self.schema, self.table)
        )

    def _create_index(self, connection: "Connection", name: str, on: str, place: str) -> None:
        """Create an index unless it exists.

        IF NOT EXISTS waits for all open writers of the table even if the index exists, and new writers wait for it.
        """
        found = connection.execute(
            "SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            (self.schema, name),
        )
        if not found.rowcount:
            index = Fragment(self.quoted(name))
            self.execute(connection, f"CREATE INDEX IF NOT EXISTS {{index}} {on}", index=index, place=Fragment(place))

    def column_type(self, name: str, data_type: "DataType") -> str:
        """Return the type of a column for a Spark type."""
        return postgres_type(name, data_type)

    def add_columns(self, connection: "Connection", columns: "Mapping[str, DataType]") -> None:
        """Add columns. Raises `ConfigurationError` if the role does not own the table."""
        others = connection.execute(
            "SELECT pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n "
            "ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s "
            "AND NOT pg_has_role(c.relowner, 'USAGE')",
            (self.schema, self.table),
        )
        for (owner,) in others:
            raise ConfigurationError(
                f"table {self.output}: only its owner {owner} may add the columns {', '.join(columns)}. Let that role "
                "add them, or make this role the owner or a member of it"
            )
        super().add_columns(connection, columns)

    def columns(self, connection: "Connection") -> Collection[str]:
        """Return the names of the output's columns. Raises `ConfigurationError` if the role has no right to it."""
        found = table_columns(connection, self.schema, self.table)
        if not found and (missing := self._missing_grants(connection, "DELETE")):
            raise self._missing_right(missing)
        return found

    def check_output(self, connection: "Connection", types: "Mapping[str, DataType]") -> None:
        """Check the columns' types, that the tables keep rows, that no policy hides rows, and the role's rights."""
        self._check_column_types(types, table_columns(connection, self.schema, self.table))
        tables = [self.table, POSITIONS, TAKEN]
        check_tables_keep_rows(connection, self.schema, tables)
        filtered = connection.execute(
            "SELECT c.relname FROM pg_catalog.pg_class AS c "
            "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = ANY(%s) AND row_security_active(c.oid)",
            (self.schema, tables),
        )
        for (name,) in filtered:
            raise ConfigurationError(
                f"table {self.schema}.{name} has row-level security for this role, which could hide rows from the "
                f"sink. To continue, {_WITHOUT_POLICIES}"
            )

        if missing := self._missing_grants(connection):
            raise self._missing_right(missing)

    def _missing_right(self, grants: Sequence[str]) -> ConfigurationError:
        return ConfigurationError(f"table {self.output}: the role lacks rights: execute `{'; '.join(grants)}`")

    def unique_indexes(self, connection: "Connection") -> Collection[frozenset[str]]:
        """Return the columns of each unique index that is checked at once and for all rows."""
        found = connection.execute(_UNIQUE_INDEXES, (self.schema, self.table))
        return {frozenset(columns) for (columns,) in found}

    def inexact_keys(self, connection: "Connection", keys: "Mapping[str, DataType]") -> list[str]:
        """Return the keys with strings that are not in a `text` or `varchar` with a deterministic collation."""
        there = table_columns(connection, self.schema, self.table)
        found = connection.execute(_INEXACT_COLLATIONS, (self.schema, self.table))
        inexact = {name for (name,) in found}
        strings = [name for name, data_type in keys.items() if isinstance(data_type, t.StringType)]
        return [name for name in strings if name in inexact or there[name].type not in {"text", "varchar"}]

    def is_number_or_time(self, connection: "Connection", column: str) -> bool:
        """Return whether PostgreSQL counts the column's type among the numbers, or the dates and times."""
        return table_columns(connection, self.schema, self.table)[column].category in {"N", "D"}

    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> AbstractContextManager[FrameLines]:
        """Evaluate a frame as lines of COPY text."""
        if any(isinstance(field.dataType, t.FloatType) for field in frame.schema.fields):
            with self.transaction(lambda _: None) as connection:
                frame = with_exact_floats(frame, table_columns(connection, self.schema, self.table))
        return evaluated(frame, done)

    @contextmanager
    def evaluated_by_tasks(
        self, frame: "DataFrame", done: Sequence[int], ids: Mapping[int, int], *, is_read_by_hook: bool
    ) -> Iterator[TaskRows | None]:
        """Evaluate a frame in tasks that copy its rows into unlogged tables."""
        check_executors(
            frame.sparkSession, ("marshal_dagster", "psycopg"), f"use written_by={RowWriter.DRIVER.value!r}"
        )
        with rows_of_tasks(self, frame, done, ids, is_read_by_hook=is_read_by_hook) as rows:
            yield rows

    def drop_abandoned(self) -> None:
        """Drop the staging tables of dead runs in the schema."""
        drop_abandoned(self)

    def reserved_ids(self, connection: "Connection", enter: Callable[[], Mapping[int, int]]) -> Mapping[int, int]:
        """Return ids of entries that are inserted and undone: a sequence never returns to an earlier number.

        The commit of the transaction makes that durable, also beyond a crash of the server.
        """
        with connection.transaction(force_rollback=True):
            return enter()

    def staged_rows(
        self, connection: "Connection", ids: Mapping[int, int], columns: Sequence[str], rows: FrameLines | TaskRows
    ) -> PostgresRows:
        """Return the temporary table of a batch, or the view of the table that tasks have filled."""
        if isinstance(rows, TaskRows):
            return TaskStagedRows(self, self._database.error_text, ids, columns, rows)
        there = table_columns(connection, self.schema, self.table)
        return CopiedRows(self, self._database.error_text, ids, columns, rows, there=there)

    def delete_older(
        self,
        connection: "Connection",
        wanted: Sequence[ClaimedRange],
        key: Mapping[str, object],
        offsets: Mapping[int, Intervals],
        staged: "StagedRows[Connection]",
    ) -> int:
        """Delete the rows of older generations, whose offsets are compared with one multirange for each partition."""
        connection.execute(
            "CREATE TEMPORARY TABLE marshal_offsets (partition integer, first_offset bigint, end_offset bigint) "
            "ON COMMIT DROP"
        )
        with connection.cursor().copy("COPY pg_temp.marshal_offsets FROM STDIN") as copy:
            for range_ in wanted:
                for start, end in offsets.get(range_.partition, ()):
                    copy.write_row((range_.partition, start, end))
        if staged.has_offsets:
            self.execute(
                connection,
                OFFSETS_OF_STAGED,
                staged=Fragment(staged.name),
                wanted=self.ranges("w", wanted, "partition", "first_readable", "end"),
            )
        given = self.ranges("w", wanted, "partition", "data_topic_id", "generation")
        self.execute(
            connection,
            f"{_GONE} DELETE FROM {{rows}} AS r USING {{taken}} AS t, gone WHERE {_IS_GONE}",
            key,
            wanted=given,
        )
        left = self.execute(
            connection, f"{_GONE} SELECT FROM {{rows}} AS r, {{taken}} AS t, gone WHERE {_IS_GONE}", key, wanted=given
        )
        return left.rowcount

    @contextmanager
    def transaction(self, reached: Callable[[str], None]) -> "Iterator[Connection]":
        """Yield a connection with one transaction, which is committed at the end and rolled back after any error."""
        require_extra(Extra.POSTGRES, "PostgreSQL")
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
                reached("committing")
                connection.commit()
                reached("committed")
        except psycopg.Error as error:
            # Not chained: psycopg's errors can contain the connection string or a row.
            raise self._translated_error(error) from None

    def _missing_grants(self, connection: "Connection", *more: str) -> list[str]:
        return missing_grants(connection, self.schema, self.table, [*self._privileges, *more])

    def _missing_grants_after_error(self) -> list[str]:
        """Return the statements that grant what the role lacks; none if they cannot be found out."""
        import psycopg

        try:
            with self._database.connect(is_one_transaction=True) as connection:
                return self._missing_grants(connection, "DELETE")
        except psycopg.Error:
            return []

    def _translated_error(self, error: "psycopg.Error") -> MarshalError:
        """Return the error as a `MarshalError`, in one line and without the password."""
        import psycopg
        from psycopg import errors

        text = self._database.error_text(error)
        if isinstance(error, errors.LockNotAvailable):
            return UnavailableError(
                f"table {self.output}: another writer has locked these ranges for {self._lock_timeout_s} s. Run the "
                "batch again"
            )
        if isinstance(error, errors.QueryCanceled):
            return UnavailableError(
                f"table {self.output}: a statement did not finish within statement_timeout_s="
                f"{self._statement_timeout_s}. Use smaller batches or a longer timeout"
            )
        if isinstance(error, errors.UndefinedTable):
            return ConfigurationError(
                f"table {self.output}: {text}. Call `create_tables(schema)` of the sink once, with the schema of the "
                "result"
            )
        if isinstance(error, errors.InsufficientPrivilege) and "row-level security" in text:
            return ConfigurationError(f"table {self.output}: {text}. To continue, {_WITHOUT_POLICIES}")
        if isinstance(error, errors.InsufficientPrivilege) and (missing := self._missing_grants_after_error()):
            return self._missing_right(missing)
        if isinstance(error, errors.DeadlockDetected):
            return TransactionConflictError(
                f"table {self.output}: the transaction waited for another one that waited for it. Run the batch again"
            )
        outages = psycopg.OperationalError | psycopg.InterfaceError | errors.ReadOnlySqlTransaction
        if isinstance(error, outages) and not isinstance(error, errors.ProgramLimitExceeded):
            return UnavailableError(
                f"PostgreSQL of table {self.output}: {text or 'the connection was lost'}. Whether a commit in "
                "progress succeeded is not known: the next attempt of the batch finds out, and skips ranges that were "
                "written"
            )
        if isinstance(error, psycopg.ProgrammingError):
            return ConfigurationError(f"table {self.output}: {text}")
        return SinkRejectedError(
            f"table {self.output} cannot store the rows: {text}; nothing was written. Correct the code that makes the "
            "rows, or change the table"
        )


def _named(columns: Iterable[str]) -> list[str]:
    return [f'"{name}"' for name in columns]
