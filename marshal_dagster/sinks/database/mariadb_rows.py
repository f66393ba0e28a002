"""Renders rows as SQL literals in Spark, loads them into a temporary table of MariaDB, and finds rejected rows."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.dialect import (
    RENAMED,
    Cursor,
    Dialect,
    Fragment,
    StagedRows,
    ValueRejectedError,
    column_names,
)
from marshal_dagster.sinks.database.frame_lines import FrameLines, evaluated_lines
from marshal_dagster.sinks.database.mariadb_connection import Connection
from marshal_dagster.sinks.database.mariadb_types import Column, mariadb_type
from marshal_dagster.sinks.database.ranges import check_row_count
from marshal_dagster.sinks.database.value_text import (
    JSON_OPTIONS,
    day_text,
    decimal_text,
    in_utc,
    parts_of,
    time_text,
    with_times_as_text,
    without_collation,
)
from marshal_dagster.sinks.rejected_rows import RejectedRow, first_rejected, row_check, text_problems
from marshal_dagster.sinks.sink import OFFSET_COLUMN, changed_result, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    import pymysql
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

NULL: Final = "NULL"
_ESCAPES: Final = (("\\", "\\\\"), ("'", "\\'"), ("\0", "\\0"))
_STATEMENT_BYTES: Final = 1024 * 1024
"""The size of an INSERT, unless the server allows only smaller ones."""
_OVERHEAD_BYTES: Final = 64 * 1024
"""What an INSERT has besides the rows, at most."""
_AT_ROW: Final = re.compile(
    r"(?:column '(?P<quoted>[^']*)'|`(?P<name>[^`]*)`)?(?: cannot be null)? at row (?P<row>\d+)$", re.MULTILINE
)
_AT_ROW_NUMBER: Final = re.compile(r" at row \d+$")
_ROW: Final = "marshal_row"
"""The column of the staging table that numbers its rows."""

NOT_FINITE: Final = "it is NaN or infinite, which MariaDB cannot store"
OUT_OF_YEARS: Final = "its year is not one of 1 to 9999, which MariaDB can store"

_VALUE_ERRORS: Final = frozenset({1048, 1264, 1265, 1292, 1364, 1366, 1406, 1526, 1644, 4025, 4161})
"""Codes with which MariaDB, a constraint or a trigger rejects a row, besides `DataError` and `IntegrityError`."""


def value_line(schema: "StructType", names: Sequence[str]) -> "SparkColumn":
    """Return the columns `names` as a comma-separated list of SQL literals."""
    literals = [f.coalesce(_literal(name, schema[name].dataType)(f.col(quoted(name))), f.lit(NULL)) for name in names]
    return f.concat_ws(",", *literals)


def _literal(name: str, data_type: "DataType") -> "Callable[[SparkColumn], SparkColumn]":
    target = mariadb_type(name, data_type)
    if target == "longtext":
        return _string
    if target == "longblob":
        return lambda column: f.concat(f.lit("X'"), f.hex(column), f.lit("'"))
    if target == "json":
        return lambda column: _string(f.to_json(with_times_as_text(column, data_type), JSON_OPTIONS))
    return lambda column: f.concat(f.lit("'"), _plain(data_type)(column), f.lit("'"))


def _plain(data_type: "DataType") -> "Callable[[SparkColumn], SparkColumn]":
    if isinstance(data_type, t.DecimalType):
        return decimal_text
    if isinstance(data_type, t.BooleanType):
        return lambda column: column.cast("int").cast("string")
    if isinstance(data_type, t.FloatType):
        # MariaDB parses a number as a double first, so the text has all its digits.
        return lambda column: column.cast("double").cast("string")
    if isinstance(data_type, t.DateType):
        return day_text
    if isinstance(data_type, t.TimestampType):
        return lambda column: _moment(*in_utc(column))
    if isinstance(data_type, t.TimestampNTZType):
        return lambda column: _moment(*parts_of(column))
    return lambda column: column.cast("string")


def _moment(date: "SparkColumn", time: "SparkColumn") -> "SparkColumn":
    return f.concat(day_text(date), f.lit(" "), time_text(time))


def _string(column: "SparkColumn") -> "SparkColumn":
    column = without_collation(column)
    for plain, escaped in _ESCAPES:
        column = f.replace(column, f.lit(plain), f.lit(escaped))
    return f.concat(f.lit("'"), column, f.lit("'"))


def _problems(schema: "StructType") -> "list[tuple[str, str, SparkColumn]]":
    """Return the conditions of values that MariaDB has no literal for, or changes."""
    found = text_problems(schema, nul=None)
    for field in schema.fields:
        column = f.col(quoted(field.name))
        if isinstance(field.dataType, t.FloatType | t.DoubleType):
            infinite = column.isin(float("inf"), float("-inf"))
            found.append((field.name, NOT_FINITE, f.isnan(column) | infinite))
        elif isinstance(field.dataType, t.DateType | t.TimestampType | t.TimestampNTZType):
            is_instant = isinstance(field.dataType, t.TimestampType)
            year = f.year(in_utc(column)[0] if is_instant else column)
            found.append((field.name, OUT_OF_YEARS, ~year.between(1, 9999)))
    return found


@contextmanager
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameLines]:
    """Evaluate `frame` once on the executors, without the rows of the partitions `done`, and yield its lines."""
    schema = frame.schema
    check = row_check(schema, _problems(schema))
    with evaluated_lines(frame, done, value_line(schema, frame.columns), check) as lines:
        yield lines


class InsertedRows(StagedRows[Connection]):
    """The rows in the temporary table `marshal_rows`, which ends with the connection."""

    name = "marshal_rows"

    def __init__(
        self,
        dialect: Dialect[Connection],
        error_text: Callable[[Exception], str],
        ids: Mapping[int, int],
        columns: Sequence[str],
        lines: FrameLines,
        *,
        there: Mapping[str, Column],
    ) -> None:
        """Store the arguments; `stage` creates the table.

        Args:
            dialect: Executes statements.
            error_text: Returns an error's text in one line without the password.
            ids: The id of each range's entry in `marshal_taken_ranges`, by partition.
            columns: The frame's columns.
            lines: The rows as lists of SQL literals.
            there: The output's columns, by name.
        """
        self._dialect, self._error_text, self._output = dialect, error_text, dialect.output
        self._ids, self._columns, self._lines = ids, columns, lines
        self._there = {name: there[name] for name in column_names(columns)}
        self.has_offsets = OFFSET_COLUMN in columns

    def stage(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> None:
        """Insert all rows into the temporary table, whose columns have the output's types.

        Raises:
            SinkRejectedError: If MariaDB rejects or changes a row, or the number of rows has changed.
        """
        columns = ", ".join(f"{self._dialect.quoted(name)} {column.staged}" for name, column in self._there.items())
        self._dialect.execute(
            connection,
            f"CREATE TEMPORARY TABLE marshal_rows ({_ROW} bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, {{columns}}) "
            "ENGINE = InnoDB",
            columns=Fragment(columns),
        )
        count = 0
        for rows in self._pieces(connection, wanted):
            self._insert(connection, wanted, rows)
            count += len(rows)
        if count != (expected := sum(self._lines.counts.values())):
            raise changed_result(f"table {self._output}", expected, count)
        self._check_kept(connection, wanted)

    def move(self, connection: Connection, wanted: Sequence[ClaimedRange], counts: Mapping[int | None, int]) -> None:
        """Move the rows of `wanted` to the output.

        Raises:
            SinkRejectedError: The table rejects a row, or their number differs from `counts` (by partition).
        """
        taken = {self._ids[range_.partition]: range_.partition for range_ in wanted}
        try:
            moved = self._move(connection, taken, "1 = 1")
        except value_errors() as error:
            if not is_value_error(error):
                raise
            rejected = self._rejected_row(connection, taken)
            if rejected is None:
                raise
            # Not chained: the error can contain the row.
            raise rejected.error(f"table {self._output}", wanted) from None
        check_row_count(moved, sum(counts.get(partition, 0) for partition in taken.values()), self._output)

    @contextmanager
    def attempt(self, connection: Connection) -> Iterator[None]:  # noqa: ARG002 - the server undoes a rejected statement
        """Run statements. Those before the rejected one remain."""
        try:
            yield
        except value_errors() as error:
            if not is_value_error(error):
                raise
            # Not chained: the error can contain the row.
            raise ValueRejectedError(self._error_text(error)) from None

    def _pieces(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> Iterator[list[tuple[int, bytes]]]:
        """Yield rows, each with its partition and its literals, as many as one INSERT takes."""
        ((allowed,),) = self._dialect.execute(connection, "SELECT @@max_allowed_packet").fetchall()
        most = min(_STATEMENT_BYTES, allowed - _OVERHEAD_BYTES)
        rows: list[tuple[int, bytes]] = []
        size = 0
        for partition, line in self._lines:
            row = f"{self._ids[partition]},{line}".encode()
            if len(row) > allowed - _OVERHEAD_BYTES:
                reason = f"it has {len(row):,} bytes, too many for the server's max_allowed_packet of {allowed:,}"
                raise self._rejection(wanted, partition, None, None, reason)
            if rows and size + len(row) > most:
                yield rows
                rows, size = [], 0
            rows.append((partition, row))
            size += len(row)
        if rows:
            yield rows

    def _insert(
        self, connection: Connection, wanted: Sequence[ClaimedRange], rows: Sequence[tuple[int, bytes]]
    ) -> None:
        names = self._names().text.replace("%%", "%")
        statement = f"INSERT INTO marshal_rows ({names}) VALUES (".encode() + b"),(".join(row for _, row in rows) + b")"
        reason = None
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                if cursor.warning_count:
                    cursor.execute("SHOW WARNINGS")
                    reason = str(cursor.fetchall()[0][2])
        except value_errors() as error:
            if not is_value_error(error):
                raise
            reason = self._error_text(error)
        if reason is None:
            return
        # Not chained: the error can contain the row.
        found = _AT_ROW.search(reason)
        if found is None or not 1 <= int(found["row"]) <= len(rows):
            raise self._rejection(wanted, rows[0][0], None, None, reason) from None
        partition, row = rows[int(found["row"]) - 1]
        named = found["quoted"] or found["name"]
        raise self._rejection(wanted, partition, self._offset_in(connection, row), named, reason) from None

    def _offset_in(self, connection: Connection, row: bytes) -> int | None:
        if not self.has_offsets:
            return None
        with connection.cursor() as cursor:
            cursor.execute(b"SELECT " + row)
            value = cursor.fetchall()[0][1 + self._columns.index(OFFSET_COLUMN)]
        return None if value is None else int(value)

    def _check_kept(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> None:
        """Raise `SinkRejectedError` for a null or for spaces that the output would replace without an error."""
        for name, column in self._there.items():
            place = self._dialect.quoted(name)
            if column.is_not_null:
                self._check_none(connection, wanted, name, f"{place} IS NULL", "it is null, and the column is NOT NULL")
            if column.type == "char":
                reason = f"it ends with spaces, which {column.shown} would not store unchanged"
                self._check_none(connection, wanted, name, f"{place} LIKE '%% '", reason)

    def _check_none(
        self, connection: Connection, wanted: Sequence[ClaimedRange], name: str, condition: str, reason: str
    ) -> None:
        found = self._find(connection, f"WHERE {condition} ORDER BY {_ROW} LIMIT 1")
        partitions = {taken: partition for partition, taken in self._ids.items()}
        for _, taken, offset in found:
            raise self._rejection(wanted, partitions[taken], offset, name, reason)

    def _rejection(
        self, wanted: Sequence[ClaimedRange], partition: int, offset: int | None, name: str | None, reason: str
    ) -> Exception:
        rejected = RejectedRow(partition, offset, self._frame_name(name), _AT_ROW_NUMBER.sub("", reason))
        return rejected.error(f"table {self._output}", wanted)

    def _frame_name(self, name: str | None) -> str | None:
        renamed = {RENAMED.get(column, column): column for column in self._columns}
        return None if name is None else renamed.get(name, name)

    def _find(self, connection: Connection, where: str) -> Sequence[tuple[int, int, int | None]]:
        """Return the number, the range's id and the offset of staged rows."""
        offset = "kafka_offset" if self.has_offsets else "NULL"
        statement = f"SELECT {_ROW}, marshal_range, {offset} FROM marshal_rows {{where}}"
        return list(self._dialect.execute(connection, statement, where=Fragment(where)).fetchall())

    def _move(self, connection: Connection, ids: Iterable[int], condition: str) -> Cursor:
        return self._dialect.execute(
            connection,
            "INSERT INTO {rows} ({columns}) SELECT {columns} FROM marshal_rows "
            f"WHERE {{is_taken}} AND {condition} ORDER BY {_ROW}",
            columns=self._names(),
            is_taken=self._dialect.one_of("marshal_range", ids),
        )

    def _rejected_row(self, connection: Connection, taken: Mapping[int, int]) -> RejectedRow | None:
        """Return the first row that the table rejects, found by moving parts of the rows.

        A part that the table rejects is rolled back by the server. Return None if the table accepts all rows this
        time, or if the search fails.
        """
        import pymysql

        is_taken = self._dialect.one_of("marshal_range", taken).text
        try:
            rows = self._find(connection, f"WHERE {is_taken} ORDER BY {_ROW}")
            numbers = [number for number, *_ in rows]
            found = first_rejected(len(rows), lambda first, end: self._error_of(connection, taken, numbers[first:end]))
        except pymysql.Error:
            # The original error is more useful than a timeout of the search.
            return None
        if found is None:
            return None
        first, error = found
        _, range_id, offset = rows[first]
        reason = self._error_text(error)
        named = _AT_ROW.search(reason)
        column = None if named is None else named["quoted"] or named["name"]
        return RejectedRow(taken[range_id], offset, self._frame_name(column), _AT_ROW_NUMBER.sub("", reason))

    def _error_of(
        self, connection: Connection, taken: Mapping[int, int], numbers: Sequence[int]
    ) -> "pymysql.Error | None":
        """Move rows with these numbers, and return the error with which the table rejects them."""
        try:
            self._move(connection, taken, f"{_ROW} BETWEEN {numbers[0]} AND {numbers[-1]}")
        except value_errors() as error:
            if not is_value_error(error):
                raise
            return error
        return None

    def _names(self) -> Fragment:
        """Return the table's columns, the range's column first."""
        return Fragment(", ".join(map(self._dialect.quoted, self._there)))


def value_errors() -> "tuple[type[pymysql.Error], ...]":
    """Return the exceptions with which MariaDB or a trigger rejects a value; see `is_value_error`."""
    import pymysql

    return (pymysql.DataError, pymysql.IntegrityError, pymysql.OperationalError, pymysql.InternalError)


def is_value_error(error: Exception) -> bool:
    """Return whether MariaDB rejected a value."""
    import pymysql

    return isinstance(error, pymysql.DataError | pymysql.IntegrityError) or error.args[0] in _VALUE_ERRORS
