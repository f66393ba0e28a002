"""A sink that writes rows to a MariaDB table, and the ranges they belong to in the same transaction.

`sink` has the course of a write. This module has MariaDB's dialect: its connections, SQL, locks and errors.

The locks are those of InnoDB's rows, so they end with the transaction. Writers of one partition exclude each other
from the judgement of their ranges until they commit, also if their ranges come in any order.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.postgres import Secret, check_name
from marshal_dagster.errors import ConfigurationError, MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks.database.dialect import (
    OWN_TABLES,
    POSITIONS,
    RANGE_COLUMN,
    RENAMED,
    TAKEN,
    Cursor,
    Dialect,
    Fragment,
    Kind,
    LockMode,
    OwnTable,
    TransactionConflictError,
)
from marshal_dagster.sinks.database.frame_lines import FrameLines
from marshal_dagster.sinks.database.mariadb_connection import Connection, Server, Timeouts
from marshal_dagster.sinks.database.mariadb_rows import InsertedRows, evaluated, is_value_error
from marshal_dagster.sinks.database.mariadb_types import (
    COLUMNS,
    Column,
    check_engines,
    mariadb_type,
)
from marshal_dagster.sinks.database.sink import DatabaseSink, TransactionHook
from marshal_dagster.sinks.sink import OFFSET_COLUMN
from marshal_dagster.sinks.upsert_keys import WriteMode

if TYPE_CHECKING:
    import pymysql
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_LONGEST_TIMEOUT_S: Final = 31_536_000
_LONGEST_NAME: Final = 64
_LOCKS: Final = "marshal_topic_locks"
"""A table with a row for each output and topic, which writers lock."""

_EXACT: Final = "CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
"""Texts that differ in case, accents or spaces at their end are different."""
_DECLARED: Final[Mapping[Kind, str]] = {
    Kind.NAME: f"varchar(255) {_EXACT}",
    Kind.INTEGER: "int",
    Kind.BIGINT: "bigint",
    Kind.BOOLEAN: "boolean",
    Kind.ID: "bigint NOT NULL AUTO_INCREMENT PRIMARY KEY",
    Kind.INSTANT: "timestamp(6) DEFAULT CURRENT_TIMESTAMP(6)",
}
"""The declaration of each kind of column in the sink's own tables."""
_LENGTHS: Final = {"output": 129, "topic": 249}
"""Lengths of columns of a key, which has at most 3,072 bytes: two names with a dot, and a topic of Kafka."""

_LOCK_TABLE: Final = OwnTable({"output": Kind.NAME, "topic": Kind.NAME}, key=("output", "topic"))

_WEAK_COMMITS: Final = frozenset({0, 2})
"""Values of innodb_flush_log_at_trx_commit with which a power failure can undo a commit."""

_WRONG_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_DENIED: Final = re.compile(r"(?P<rights>[A-Z, ]+) command denied to user .* for table (?P<table>`.*`)$")
_LOCK_TIMEOUT, _DEADLOCK, _STATEMENT_TIMEOUT, _NO_TABLE = 1205, 1213, 1969, 1146
_NO_ACCESS: Final = 1044
_OUTAGES: Final = frozenset(
    {1021, 1040, 1053, 1077, 1114, 1129, 1158, 1159, 1160, 1161, 1203, 1226, 1290, 1317, 1792, 1836, 1927, 2002}
    | {2003, 2006, 2013, 2055, 4031}
)
"""Codes of errors that may pass: the server is full, stops, is read-only, or the connection was lost."""


_OLDER: Final = """FROM {wanted} STRAIGHT_JOIN {taken} AS t ON t."partition" = w."partition"
    AND t.output = %(output)s AND t.member_group = %(member_group)s AND t.topic = %(topic)s
    AND t.data_topic_id = w.data_topic_id AND t.generation < w.generation
    STRAIGHT_JOIN {rows} ON {rows}.marshal_range = t.id AND {rows}.kafka_partition = w."partition"
    WHERE EXISTS (SELECT 1 FROM marshal_offsets AS o WHERE o."partition" = w."partition"
    AND {rows}.kafka_offset >= o.first_offset AND {rows}.kafka_offset < o.end_offset)
    """
"""The rows of older generations. The tables are joined in this order, so that an index finds the rows to lock."""


class MariaDBSink(DatabaseSink[Connection]):
    """A sink that writes rows to the table `table` of MariaDB 10.6 or newer, which InnoDB stores.

    The table has the frame's columns, with `partition` and `offset` renamed to `kafka_partition` (int) and
    `kafka_offset` (bigint; only if the frame has `offset`), and the column `marshal_range` (bigint) with an index.
    Arrays, maps and structs are stored as JSON. `create_tables` creates all tables. The role needs the right to create
    temporary tables.

    Columns that would store other values than the frame has are refused, and so are tables without transactions. The
    error for a row that MariaDB rejects names its partition, offset and column.

    Example:
        ```python
        sink = MariaDBSink("mariadb://me@localhost/shop", "orders")
        sink.create_tables(frame.schema)  # once, when the output is set up
        ```
    """

    def __init__(
        self,
        dsn: str | Secret,
        table: str,
        *,
        companion: TransactionHook[Connection] | None = None,
        connect_timeout_s: float = 10,
        lock_timeout_s: float = 60.0,
        statement_timeout_s: float = 600.0,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
        mode: WriteMode | str = WriteMode.APPEND,
        keys: Sequence[str] = (),
        order_by: str | None = None,
        add_columns: bool = False,
    ) -> None:
        """Configure the output; the sink does not connect before its first use.

        Args:
            dsn: `mariadb://user:password@host:port/database`, or a secret that holds it. With `?ssl_ca=PATH` the
                connection is encrypted and the server's certificate verified; `ssl_cert` and `ssl_key` are the
                client's.
            table: The table for the rows, in the URL's database.
            companion: Writes more data in the same transaction.
            connect_timeout_s: How many seconds connecting may take.
            lock_timeout_s: How many seconds to wait for the locks of another writer of the same ranges; MariaDB waits
                for whole seconds.
            statement_timeout_s: How many seconds one statement may take, and the transaction may be idle.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").
            mode: `append` adds each row. `upsert` replaces the row with the same keys by a newer one
                (docs/how-to/sinks.md, "One row for each key").
            keys: The result's columns by which rows replace each other. The table needs a unique index on them.
            order_by: The result's column that decides between rows of several partitions: the greatest value wins.
            add_columns: Whether columns of the result that the table lacks are added to it, before the frame is
                evaluated. The role needs the right to alter the table. Columns are never removed, and their types
                never changed.

        Raises:
            ConfigurationError: A value is not valid.
        """
        check_name("table", table, 4 * _LONGEST_NAME)
        if len(table) > _LONGEST_NAME:
            raise ConfigurationError(f"table: {table!r}; give a name of 1 to {_LONGEST_NAME} characters")
        for name, seconds in (
            ("connect_timeout_s", connect_timeout_s),
            ("lock_timeout_s", lock_timeout_s),
            ("statement_timeout_s", statement_timeout_s),
        ):
            if not 0 < seconds <= _LONGEST_TIMEOUT_S:
                raise ConfigurationError(
                    f"{name} is {seconds}; it must be a number of seconds above 0 and at most {_LONGEST_TIMEOUT_S:,}"
                )
        server = Server(dsn, Timeouts(connect_timeout_s, lock_timeout_s, statement_timeout_s))
        super().__init__(
            MariaDBDialect(server, table),
            companion=companion,
            shared_by_groups=shared_by_groups,
            previous_group=previous_group,
            mode=mode,
            keys=keys,
            order_by=order_by,
            add_columns=add_columns,
        )


class MariaDBDialect(Dialect[Connection]):
    """MariaDB 10.6 or newer, with InnoDB."""

    # The INSERT of positions has locked each of their rows, also those that exist.
    lock_clauses: Mapping[LockMode, str] = {LockMode.NOT: "", LockMode.ALONE: ""}
    keep_existing = "ON DUPLICATE KEY UPDATE version = {positions}.version"
    keep_stored_rows = "ON DUPLICATE KEY UPDATE marshal_range = {rows}.marshal_range"
    delete_statement = f"DELETE {{rows}} {_OLDER}"
    count_statement = f"SELECT count(*) {_OLDER}"

    def __init__(self, server: Server, table: str) -> None:
        """Store the arguments (`MariaDBSink.__init__`)."""
        super().__init__(server.database, table)
        self._server = server

    @contextmanager
    def transaction(self, reached: Callable[[str], None]) -> Iterator[Connection]:
        """Yield a connection with one transaction, which is committed at the end and rolled back after any error."""
        require_extra(Extra.MARIADB, "MariaDB")
        import pymysql

        try:
            connection = self._server.connect()
            try:
                yield connection
                reached("committing")
                connection.commit()
                reached("committed")
            except Exception:
                # The server also does it when the connection ends, but a moment later.
                with suppress(pymysql.Error):
                    connection.rollback()
                raise
            finally:
                if connection.open:
                    connection.close()
        except pymysql.Error as error:
            # Not chained: the driver's errors can contain a row.
            raise self._translated_error(error) from None

    def _translated_error(self, error: "pymysql.Error") -> MarshalError:
        """Return the error as a `MarshalError`, in one line and without the password."""
        import pymysql

        code, text = error.args[0] if error.args else 0, self._server.error_text(error)
        timeouts = self._server.timeouts
        if code == _LOCK_TIMEOUT:
            return UnavailableError(
                f"table {self.output}: another writer has locked these ranges for {timeouts.lock_s} s. Run the batch "
                "again"
            )
        if code == _DEADLOCK:
            return TransactionConflictError(
                f"table {self.output}: the transaction waited for another one that waited for it. Run the batch again"
            )
        if code == _STATEMENT_TIMEOUT:
            return UnavailableError(
                f"table {self.output}: a statement did not finish within statement_timeout_s={timeouts.statement_s}. "
                "Use smaller batches or a longer timeout"
            )
        if code == _NO_TABLE:
            return ConfigurationError(
                f"table {self.output}: {text}. Call `create_tables(schema)` of the sink once, with the schema of the "
                "result"
            )
        if _WRONG_CERTIFICATE in text:
            return ConfigurationError(
                f"MariaDB of table {self.output}: {text}. Check ssl_ca, and that the certificate is for the URL's host"
            )
        if code == _NO_ACCESS:
            grant = f"GRANT CREATE TEMPORARY TABLES ON `{self.schema}`.* TO ..."
            return ConfigurationError(f"table {self.output}: {text}. Execute {grant}")
        if denied := _DENIED.match(text):
            grant = f"GRANT {denied['rights']} ON {denied['table']} TO ..."
            return ConfigurationError(f"table {self.output}: {text}. Execute {grant}")
        if code in _OUTAGES or isinstance(error, pymysql.InterfaceError):
            return UnavailableError(
                f"MariaDB of table {self.output}: {text or 'the connection was lost'}. Whether a commit in progress "
                "succeeded is not known: the next attempt of the batch finds out, and skips ranges that were written"
            )
        if is_value_error(error):
            return SinkRejectedError(
                f"table {self.output} cannot store the rows: {text}; nothing was written. Correct the code that makes "
                "the rows, or change the table"
            )
        return ConfigurationError(f"table {self.output}: {text}")

    def run(self, connection: Connection, statement: str, parameters: Mapping[str, object]) -> Cursor:
        """Execute a statement."""
        cursor = connection.cursor()
        cursor.execute(statement, dict(parameters))
        found: Cursor = cursor
        return found

    def quoted(self, *names: str) -> str:
        """Return a quoted name, with percent signs doubled."""
        return ".".join('"' + name.replace('"', '""').replace("%", "%%") + '"' for name in names)

    def relation(self, alias: str, columns: Mapping[str, Kind], rows: Iterable[Sequence[object]]) -> Fragment:
        """Return the rows as one JSON array."""
        wide = {Kind.NAME: f"varchar(1000) {_EXACT}"}
        described = ", ".join(
            f"\"{name}\" {wide.get(kind, _DECLARED[kind])} PATH '$[{index}]' ERROR ON ERROR"
            for index, (name, kind) in enumerate(columns.items())
        )
        return Fragment(
            f"JSON_TABLE(%({alias}_rows)s, '$[*]' COLUMNS ({described})) AS {alias}",
            {f"{alias}_rows": json.dumps([list(row) for row in rows])},
        )

    def update_from(self, table: str, alias: str, given: str, assignments: Mapping[str, str], condition: str) -> str:
        """Return an UPDATE that begins with the relation, so that each row is found by its key."""
        assigned = ", ".join(f"{alias}.{column} = {expression}" for column, expression in assignments.items())
        return f"UPDATE {given} STRAIGHT_JOIN {table} AS {alias} ON {condition} SET {assigned}"

    def lock_topic(self, connection: Connection, topic: str, *, shared: bool) -> None:
        """Lock the topic's row in `marshal_topic_locks`, which is inserted if it is missing."""
        key = {"output": self.output, "topic": topic}
        table = Fragment(self.quoted(self.schema, _LOCKS))
        if shared:
            found = self.execute(
                connection,
                "SELECT 1 FROM {locks} WHERE output = %(output)s AND topic = %(topic)s LOCK IN SHARE MODE",
                key,
                locks=table,
            )
            if found.fetchall():
                return
        self.execute(
            connection,
            "INSERT INTO {locks} (output, topic) VALUES (%(output)s, %(topic)s) ON DUPLICATE KEY UPDATE topic = topic",
            key,
            locks=table,
        )

    def create_own_tables(self, connection: Connection) -> None:
        """Create the sink's own tables. Each statement commits by itself."""
        for name, table in {**OWN_TABLES, _LOCKS: _LOCK_TABLE}.items():
            parts = [
                f"{self.quoted(column)} {self._declared(column, kind)}"
                f"{' NULL' if column in table.optional else ' NOT NULL' if kind is not Kind.ID else ''}"
                for column, kind in table.columns.items()
            ]
            if table.key:
                parts.append(f"PRIMARY KEY ({', '.join(map(self.quoted, table.key))})")
            parts += [
                f"KEY {self.quoted(index)} ({', '.join(map(self.quoted, columns))})"
                for index, columns in table.indexes.items()
            ]
            self._create(connection, name, parts)

    def _declared(self, column: str, kind: Kind) -> str:
        declared = _DECLARED[kind]
        return declared.replace("255", str(_LENGTHS[column])) if column in _LENGTHS else declared

    def _create(self, connection: Connection, name: str, parts: Sequence[str]) -> None:
        self.execute(
            connection,
            f"CREATE TABLE IF NOT EXISTS {{place}} ({{parts}}) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT {_EXACT}",
            place=Fragment(self.quoted(self.schema, name)),
            parts=Fragment(", ".join(parts)),
        )

    def create_output(self, connection: Connection, rows: "StructType", keys: Sequence[str] = ()) -> None:
        """Create the table for the rows. The statement commits by itself."""
        kinds = {RANGE_COLUMN: "bigint NOT NULL"} | {
            RENAMED.get(column.name, column.name): f"{mariadb_type(column.name, column.dataType)} NULL"
            for column in rows.fields
        }
        kinds |= {"kafka_partition": "int NOT NULL"}
        if OFFSET_COLUMN in rows.names:
            kinds |= {"kafka_offset": "bigint NULL"}
        parts = [f"{self.quoted(name)} {_indexed(kind) if name in keys else kind}" for name, kind in kinds.items()]
        parts.append("KEY marshal_range (marshal_range)")
        if keys:
            parts.append(f"UNIQUE KEY marshal_keys ({', '.join(map(self.quoted, keys))})")
        self._create(connection, self.table, parts)

    def column_type(self, name: str, data_type: "DataType") -> str:
        """Return the type of a column for a Spark type."""
        return mariadb_type(name, data_type)

    def columns(self, connection: Connection) -> Collection[str]:
        """Return the names of the output's columns. Raises PyMySQL's error if the role has no right to it."""
        import pymysql

        found = self._columns(connection)
        if not found:
            with suppress(pymysql.ProgrammingError):  # there is no such table
                self.execute(connection, "SELECT 1 FROM {rows} LIMIT 0")
        return found

    def _columns(self, connection: Connection) -> dict[str, Column]:
        found = self.execute(connection, COLUMNS, {"schema": self.schema, "table": self.table})
        return {name: Column(*described) for name, *described in found.fetchall()}

    def check_output(self, connection: Connection, types: "Mapping[str, DataType]") -> None:
        """Check the columns' types, the tables' engine, the index of the ranges, and that commits last."""
        tables = [self.table, POSITIONS, TAKEN, _LOCKS]
        found = self.execute(
            connection,
            "SELECT table_name, table_type, engine FROM information_schema.tables WHERE table_schema = %(schema)s "
            f"AND table_name IN ({', '.join(f'%(t{number})s' for number in range(len(tables)))})",
            {"schema": self.schema, **{f"t{number}": name for number, name in enumerate(tables)}},
        )
        check_engines(self.schema, {name: (kind, engine) for name, kind, engine in found.fetchall()})
        self._check_column_types(types, self._columns(connection))
        self._check_index(connection)
        ((flush,),) = self.execute(connection, "SELECT @@innodb_flush_log_at_trx_commit").fetchall()
        if flush in _WEAK_COMMITS:
            raise ConfigurationError(
                f"MariaDB of table {self.output} has innodb_flush_log_at_trx_commit={flush}, so a power failure can "
                "undo a commit whose offsets are processed. Set it to 1"
            )

    def unique_indexes(self, connection: Connection) -> Collection[frozenset[str]]:
        """Return the columns of each unique index, without those that contain only the beginning of a value."""
        found = self.execute(
            connection,
            "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
            "WHERE table_schema = %(schema)s AND table_name = %(table)s AND non_unique = 0",
            {"schema": self.schema, "table": self.table},
        )
        columns: dict[str, set[str]] = {}
        for index, column, length in found.fetchall():
            columns.setdefault(index, set()).add(column if length is None else f"{column}({length})")
        return set(map(frozenset, columns.values()))

    def unique_index_statement(self, keys: Sequence[str]) -> str:
        """Return the statement that creates a unique index, with MariaDB's own quotes."""
        table, *columns = ("`" + name.replace("`", "``") + "`" for name in (self.table, *keys))
        return f"ALTER TABLE {table} ADD UNIQUE ({', '.join(columns)})"

    def inexact_keys(self, connection: Connection, keys: "Mapping[str, DataType]") -> list[str]:
        """Return the columns of strings whose collation takes different strings for equal."""
        there = self._columns(connection)
        return [name for name in keys if there[name].charset and not str(there[name].collation).endswith("nopad_bin")]

    def changed_by_update(self, connection: Connection) -> Collection[str]:
        """Return the columns with the attribute ON UPDATE, which some servers give the first TIMESTAMP of a table."""
        return [name for name, column in self._columns(connection).items() if "on update" in column.extra.lower()]

    def is_number_or_time(self, connection: Connection, column: str) -> bool:
        """Return whether the column has a type of numbers, dates or times."""
        return not self._columns(connection)[column].charset

    def _check_index(self, connection: Connection) -> None:
        found = self.execute(
            connection,
            "SELECT 1 FROM information_schema.statistics WHERE table_schema = %(schema)s AND table_name = %(table)s "
            "AND column_name = %(column)s AND seq_in_index = 1",
            {"schema": self.schema, "table": self.table, "column": RANGE_COLUMN},
        )
        if not found.fetchall():
            raise ConfigurationError(
                f"table {self.output} has no index that begins with {RANGE_COLUMN}, so a new generation would lock all "
                f"rows. Run ALTER TABLE `{self.table}` ADD INDEX ({RANGE_COLUMN})"
            )

    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> AbstractContextManager[FrameLines]:
        """Evaluate a frame as lists of SQL literals."""
        return evaluated(frame, done)

    def staged_rows(
        self, connection: Connection, ids: Mapping[int, int], columns: Sequence[str], rows: FrameLines
    ) -> InsertedRows:
        """Return the temporary table of a batch."""
        return InsertedRows(self, self._server.error_text, ids, columns, rows, there=self._columns(connection))


def _indexed(declared: str) -> str:
    """Return the declaration of a column of a key: a text of any length cannot have a unique index."""
    return declared.replace("longtext NULL", "varchar(255) NULL").replace("longblob NULL", "varbinary(255) NULL")
