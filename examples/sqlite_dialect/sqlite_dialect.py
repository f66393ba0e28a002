"""A dialect for SQLite: a `DatabaseSink` for integers and strings in a file."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructType

from marshal_dagster.errors import (
    ConfigurationError,
    SinkRejectedError,
    UnavailableError,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.dialect import (
    OWN_TABLES,
    RENAMED,
    Dialect,
    Fragment,
    Kind,
    LockMode,
    StagedRows,
    column_names,
)
from marshal_dagster.sinks.database.ranges import check_row_count
from marshal_dagster.sinks.database.sink import DatabaseSink

OWN_TYPES = {
    Kind.NAME: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.BIGINT: "INTEGER",
    Kind.BOOLEAN: "INTEGER",
    Kind.ID: "INTEGER PRIMARY KEY AUTOINCREMENT",
    Kind.INSTANT: "TEXT DEFAULT CURRENT_TIMESTAMP",
}
TYPES = {
    "byte": "INTEGER",
    "short": "INTEGER",
    "integer": "INTEGER",
    "long": "INTEGER",
    "string": "TEXT",
}


class SqliteDialectSink(DatabaseSink[sqlite3.Connection]):
    """Writes rows to the table `table` in the file `path`."""

    def __init__(
        self,
        path: str,
        table: str,
        **options: Any,  # noqa: ANN401 - as `DatabaseSink`
    ) -> None:
        """Set the file, the table and the options of `DatabaseSink`."""
        super().__init__(SqliteDialect(path, table), **options)


@dataclass(frozen=True)
class Rows:
    """The rows of a batch."""

    rows: Sequence[Mapping[str, Any]]
    rejected: None = None

    @property
    def counts(self) -> Mapping[int | None, int]:
        """The number of rows, by partition."""
        return Counter(row["partition"] for row in self.rows)

    @property
    def all_have_offsets(self) -> bool:
        """Whether each row has an offset."""
        return all("offset" in row and row["offset"] is not None for row in self.rows)


class SqliteDialect(Dialect[sqlite3.Connection]):
    """SQLite 3.35 or newer.

    A transaction locks the whole file, so no other lock is needed.
    """

    lock_clauses: Mapping[LockMode, str] = {LockMode.NOT: "", LockMode.ALONE: ""}
    add_column_statement = "ALTER TABLE {rows} ADD COLUMN {column}"

    def __init__(self, path: str, table: str) -> None:
        """Set the file and the table."""
        super().__init__("main", table)
        self._path = path

    @contextmanager
    def transaction(
        self, reached: Callable[[str], None]
    ) -> Iterator[sqlite3.Connection]:
        """Yield a connection with one transaction."""
        try:
            with closing(
                sqlite3.connect(self._path, timeout=60, isolation_level=None)
            ) as connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                reached("committing")
                connection.execute("COMMIT")
                reached("committed")
        except sqlite3.OperationalError as error:
            raise UnavailableError(f"table {self.output}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise SinkRejectedError(
                f"table {self.output} cannot store the rows: {error}"
            ) from None

    def run(
        self,
        connection: sqlite3.Connection,
        statement: str,
        parameters: Mapping[str, object],
    ) -> sqlite3.Cursor:
        """Execute a statement, in which SQLite writes a parameter as `:name`."""
        return connection.execute(
            re.sub(r"%\((\w+)\)s", r":\1", statement).replace("%%", "%"),
            dict(parameters),
        )

    def quoted(self, *names: str) -> str:
        """Return a quoted name."""
        return ".".join(
            '"' + name.replace('"', '""').replace("%", "%%") + '"' for name in names
        )

    def relation(
        self, alias: str, columns: Mapping[str, Kind], rows: Iterable[Sequence[object]]
    ) -> Fragment:
        """Return the rows as one JSON array."""
        fields = ", ".join(
            f"json_extract(value, '$[{at}]') AS \"{name}\""
            for at, name in enumerate(columns)
        )
        given = json.dumps([list(row) for row in rows])
        return Fragment(
            f"(SELECT {fields} FROM json_each(%({alias}_rows)s)) AS {alias}",  # noqa: S608
            {f"{alias}_rows": given},
        )

    def lock_topic(
        self, connection: sqlite3.Connection, topic: str, *, shared: bool
    ) -> None:
        """Do nothing, because the transaction has locked the file."""

    def create_own_tables(self, connection: sqlite3.Connection) -> None:
        """Create the sink's own tables."""
        for name, table in OWN_TABLES.items():
            parts = [
                f'"{column}" {OWN_TYPES[kind]}'
                for column, kind in table.columns.items()
            ]
            if table.key:
                parts.append(f"PRIMARY KEY ({', '.join(map(self.quoted, table.key))})")
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {name} ({', '.join(parts)})"
            )

    def create_output(
        self, connection: sqlite3.Connection, rows: StructType, keys: Sequence[str] = ()
    ) -> None:
        """Create the table for the rows."""
        columns = {
            RENAMED.get(field.name, field.name): self.column_type(
                field.name, field.dataType
            )
            for field in rows
        }
        parts = [
            "marshal_range INTEGER",
            *(f"{self.quoted(name)} {kind}" for name, kind in columns.items()),
        ]
        if keys:
            parts.append(f"UNIQUE ({', '.join(map(self.quoted, keys))})")
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {self.quoted(self.table)} ({', '.join(parts)})"
        )

    def column_type(self, name: str, data_type: DataType) -> str:
        """Return the type of a column for a Spark type."""
        if data_type.typeName() not in TYPES:
            raise ConfigurationError(
                f"column {name!r} has type {data_type.simpleString()}: cast it to "
                "string"
            )
        return TYPES[data_type.typeName()]

    def columns(self, connection: sqlite3.Connection) -> Collection[str]:
        """Return the names of the output's columns."""
        return [
            row[0]
            for row in connection.execute(
                "SELECT name FROM pragma_table_info(?)", (self.table,)
            )
        ]

    def check_output(
        self, connection: sqlite3.Connection, types: Mapping[str, DataType]
    ) -> None:
        """Check the columns' types, because other types convert values in SQLite."""
        declared = dict(
            connection.execute(
                "SELECT name, type FROM pragma_table_info(?)", (self.table,)
            )
        )
        for name, data_type in types.items():
            if declared[name] != (wanted := self.column_type(name, data_type)):
                raise ConfigurationError(
                    f"column {name!r} is {declared[name]}: make it {wanted}"
                )

    def unique_indexes(
        self, connection: sqlite3.Connection
    ) -> Collection[frozenset[str]]:
        """Return the columns of each unique index."""
        found: dict[str, set[str]] = {}
        for index, column in connection.execute(
            "SELECT i.name, c.name FROM pragma_index_list(?) AS i "
            "JOIN pragma_index_info(i.name) AS c "
            'WHERE i."unique" AND NOT i.partial',
            (self.table,),
        ):
            found.setdefault(index, set()).add(column)
        return set(map(frozenset, found.values()))

    @contextmanager
    def evaluated(self, frame: DataFrame, done: Sequence[int]) -> Iterator[Rows]:
        """Fetch all rows."""
        yield Rows(
            [row.asDict() for row in frame.collect() if row["partition"] not in done]
        )

    def staged_rows(
        self,
        connection: sqlite3.Connection,  # noqa: ARG002
        ids: Mapping[int, int],
        columns: Sequence[str],
        rows: Rows,
    ) -> "TemporaryRows":
        """Return the temporary table of a batch."""
        return TemporaryRows(self, ids, columns, rows)


class TemporaryRows(StagedRows[sqlite3.Connection]):
    """The rows in a temporary table, which ends with the connection."""

    name = "marshal_rows"

    def __init__(
        self,
        dialect: SqliteDialect,
        ids: Mapping[int, int],
        columns: Sequence[str],
        rows: Rows,
    ) -> None:
        """Store the arguments."""
        self._dialect, self._ids = dialect, ids
        self._columns, self._rows = columns, rows
        self._names = Fragment(", ".join(map(dialect.quoted, column_names(columns))))
        self.has_offsets = "offset" in columns

    def stage(
        self,
        connection: sqlite3.Connection,
        wanted: Sequence[ClaimedRange],  # noqa: ARG002
    ) -> None:
        """Insert all rows into the temporary table."""
        statement = (
            "CREATE TEMPORARY TABLE marshal_rows AS SELECT {names} FROM {rows} "
            "WHERE 1 = 0"
        )
        self._dialect.execute(connection, statement, names=self._names)
        places = ", ".join("?" * (len(self._columns) + 1))
        rows = [
            (self._ids[row["partition"]], *(row[name] for name in self._columns))
            for row in self._rows.rows
        ]
        connection.executemany(f"INSERT INTO marshal_rows VALUES ({places})", rows)  # noqa: S608

    def move(
        self,
        connection: sqlite3.Connection,
        wanted: Sequence[ClaimedRange],
        counts: Mapping[int | None, int],
    ) -> None:
        """Move the rows of `wanted` to the output."""
        moved = self._dialect.execute(
            connection,
            "INSERT INTO {rows} ({names}) SELECT {names} FROM marshal_rows "
            "WHERE {is_taken}",
            names=self._names,
            is_taken=self._dialect.one_of(
                "marshal_range", [self._ids[range_.partition] for range_ in wanted]
            ),
        )
        check_row_count(
            moved,
            sum(counts.get(range_.partition, 0) for range_ in wanted),
            self._dialect.output,
        )
