"""Copies a batch's rows to a temporary table, moves them to the output, and finds the row that PostgreSQL rejects.

`postgres` uses it within the sink's transaction.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.batch_copy import BatchCopy, DoubtfulRowError, value_errors
from marshal_dagster.sinks.database.column_types import TableColumn, limited_columns
from marshal_dagster.sinks.database.dialect import (
    RENAMED,
    Dialect,
    Fragment,
    StagedRows,
    ValueRejectedError,
    column_names,
)
from marshal_dagster.sinks.database.frame_lines import FrameLines
from marshal_dagster.sinks.database.pg_copy import NULL
from marshal_dagster.sinks.database.ranges import check_row_count
from marshal_dagster.sinks.rejected_rows import RejectedRow, first_rejected
from marshal_dagster.sinks.sink import OFFSET_COLUMN, changed_result

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed

    from marshal_dagster._internal.postgres import Connection

_LINES_AT_ONCE: Final = 1000
_ESCAPED: Final = re.compile(r"\\.")
_COPY_LINE: Final = re.compile(r"^COPY marshal_rows, line (?P<line>\d+)(?P<rest>.*)$", re.MULTILINE)


class PostgresRows(StagedRows["Connection"]):
    """Rows in `pg_temp.marshal_rows`, which `stage` creates. They exist until the transaction ends."""

    name = "pg_temp.marshal_rows"

    def __init__(
        self,
        dialect: "Dialect[Connection]",
        error_text: "Callable[[psycopg.Error], str]",
        ids: Mapping[int, int],
        columns: Sequence[str],
    ) -> None:
        """Store the arguments.

        Args:
            dialect: Executes statements.
            error_text: Returns an error's text in one line without the password.
            ids: The id of each range's entry in `marshal_taken_ranges`, by partition.
            columns: The frame's columns.
        """
        self._dialect, self._error_text, self._output = dialect, error_text, dialect.output
        self._ids, self._columns = ids, columns
        self.has_offsets = OFFSET_COLUMN in columns

    def move(self, connection: "Connection", wanted: Sequence[ClaimedRange], counts: Mapping[int | None, int]) -> None:
        """Move the rows of `wanted` to the output.

        Raises:
            SinkRejectedError: The table rejects a row, or their number differs from `counts` (by partition).
        """
        taken = {self._ids[range_.partition]: range_.partition for range_ in wanted}
        try:
            with connection.transaction():
                moved = self._dialect.execute(
                    connection,
                    "INSERT INTO {rows} ({columns}) SELECT {columns} FROM pg_temp.marshal_rows WHERE {is_taken}",
                    is_taken=self._dialect.one_of("marshal_range", taken),
                    columns=self._names(),
                )
        except value_errors():
            rejected = self._rejected_row(connection, taken)
            if rejected is None:
                raise
            # Not chained: psycopg's error can contain the row.
            raise rejected.error(f"table {self._output}", wanted) from None
        check_row_count(moved, sum(counts.get(partition, 0) for partition in taken.values()), self._output)

    @contextmanager
    def attempt(self, connection: "Connection") -> Iterator[None]:
        """Run statements in a savepoint."""
        try:
            with connection.transaction():
                yield
        except value_errors() as error:
            # Not chained: psycopg's error can contain the row.
            raise ValueRejectedError(self._error_text(error), error.diag.column_name) from None

    def _rejected_row(self, connection: "Connection", taken: Mapping[int, int]) -> RejectedRow | None:
        """Return the first row that the table rejects, found by moving parts of the rows.

        Return None if the table accepts all rows this time, or if the search fails.
        """
        import psycopg

        ids = list(taken)
        try:
            ((count,),) = connection.execute(
                "SELECT count(*) FROM pg_temp.marshal_rows WHERE marshal_range = ANY(%s)", (ids,)
            ).fetchall()
            found = first_rejected(count, lambda first, end: self._error_of(connection, ids, first, end))
            if found is None:
                return None
            first, error = found
            ((range_id, offset),) = self._dialect.execute(
                connection,
                "SELECT marshal_range, {offset} FROM pg_temp.marshal_rows WHERE {is_taken} "
                "ORDER BY ctid OFFSET %(first)s LIMIT 1",
                {"first": first},
                offset=Fragment("kafka_offset" if self.has_offsets else "NULL"),
                is_taken=self._dialect.one_of("marshal_range", ids),
            ).fetchall()
        except psycopg.Error:
            # The original error is more useful than a timeout of the search.
            return None
        renamed = {RENAMED.get(name, name): name for name in self._columns}
        column = renamed.get(error.diag.column_name or "", error.diag.column_name)
        return RejectedRow(taken[range_id], offset, column, self._error_text(error))

    def _error_of(self, connection: "Connection", ids: Sequence[int], first: int, end: int) -> "psycopg.Error | None":
        """Move a part of the rows, and return the error with which the table rejects it."""
        try:
            with connection.transaction():
                self._dialect.execute(
                    connection,
                    "INSERT INTO {rows} ({columns}) SELECT {columns} FROM pg_temp.marshal_rows WHERE ctid = ANY("
                    "ARRAY(SELECT ctid FROM pg_temp.marshal_rows WHERE {is_taken} "
                    "ORDER BY ctid OFFSET %(first)s LIMIT %(count)s))",
                    {"first": first, "count": end - first},
                    is_taken=self._dialect.one_of("marshal_range", ids),
                    columns=self._names(),
                )
        except value_errors() as error:
            return error
        return None

    def _names(self) -> Fragment:
        """Return the table's columns, the range's column first."""
        return Fragment(", ".join(map(self._dialect.quoted, column_names(self._columns))))


class CopiedRows(PostgresRows):
    """Rows that this process copies to a temporary table."""

    def __init__(
        self,
        dialect: "Dialect[Connection]",
        error_text: "Callable[[psycopg.Error], str]",
        ids: Mapping[int, int],
        columns: Sequence[str],
        lines: FrameLines,
        *,
        there: Mapping[str, TableColumn],
    ) -> None:
        """Store the arguments of `PostgresRows`, and two more.

        Args:
            dialect: Executes statements.
            error_text: Returns an error's text in one line without the password.
            ids: The id of each range's entry in `marshal_taken_ranges`, by partition.
            columns: The frame's columns.
            lines: The rows, also as lines of COPY text.
            there: The output's columns, by name.
        """
        super().__init__(dialect, error_text, ids, columns)
        self._lines, self._there = lines, there
        self._limited = limited_columns(columns, there)

    def stage(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> None:
        """Copy all rows to the temporary table, whose columns have the output's types.

        They are copied as Arrow batches. If PostgreSQL may reject a row, they are copied as lines, which name it.

        Raises:
            SinkRejectedError: If PostgreSQL rejects a row, or the number of rows has changed since they were counted.
        """
        self._dialect.execute(
            connection,
            "CREATE TEMPORARY TABLE marshal_rows ON COMMIT DROP AS SELECT {columns} FROM {rows} WITH NO DATA",
            columns=self._names(),
        )
        copied = self._copy_batches(connection)
        if copied is None:
            copied = self._copy_lines(connection, wanted)
        if copied != (expected := sum(self._lines.counts.values())):
            raise changed_result(f"table {self._output}", expected, copied)

    def _copy_batches(self, connection: "Connection") -> int | None:
        """Copy the rows as Arrow batches. Return their number, or None if they are to be copied as lines."""
        batches = self._lines.batches(lambda rows: self._batch_copy.rows(rows, self._there))
        if batches is None:
            return None
        try:
            with connection.transaction(), connection.cursor() as cursor:
                counts, _ = self._batch_copy.copy(cursor, ("pg_temp", "marshal_rows"), batches, is_new=False)
        except DoubtfulRowError:
            return None
        return sum(counts.values())

    @cached_property
    def _batch_copy(self) -> BatchCopy:
        return BatchCopy.of(self._lines.rows, self._ids, self._there)

    def _copy_lines(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> int:
        """Copy the rows as lines, and return their number. Raises `SinkRejectedError` for the row that is rejected."""
        lines = self._lines
        prefixes = {partition: f"{taken}\t" for partition, taken in self._ids.items()}
        kept = self._with_all_spaces(lines, wanted) if self._limited else lines
        text = (f"{prefixes[partition]}{line}\n" for partition, line in kept)
        with connection.cursor() as cursor:
            try:
                with cursor.copy(_copy_statement(self._columns)) as copy:
                    while piece := "".join(itertools.islice(text, _LINES_AT_ONCE)):
                        copy.write(piece)
            except value_errors() as error:
                rejected = self._rejected_line(error, lines)
                if rejected is None:
                    raise
                # Not chained: psycopg's error can contain the row.
                raise rejected.error(f"table {self._output}", wanted) from None
            return cursor.rowcount

    def _with_all_spaces(self, lines: FrameLines, wanted: Sequence[ClaimedRange]) -> Iterator[tuple[int, str]]:
        """Yield the lines. Raise `SinkRejectedError` for a string at whose end a column would change the spaces.

        PostgreSQL reports no error then.
        """
        for partition, line in lines:
            if " \t" in line or line.endswith(" "):
                fields = line.split("\t")
                for index, column in self._limited.items():
                    length = len(_ESCAPED.sub("x", fields[index]))
                    if fields[index].endswith(" ") and column.changes_last_spaces(length):
                        reason = f"it ends with spaces, which {column.shown} would not store unchanged"
                        rejected = RejectedRow(partition, self._offset_in(fields), self._columns[index], reason)
                        raise rejected.error(f"table {self._output}", wanted)
            yield partition, line

    def _offset_in(self, fields: Sequence[str]) -> int | None:
        offset = fields[self._columns.index(OFFSET_COLUMN)] if OFFSET_COLUMN in self._columns else NULL
        return int(offset) if offset.lstrip("-").isdigit() else None

    def _rejected_line(self, error: "psycopg.Error", lines: FrameLines) -> RejectedRow | None:
        """Return the row that COPY rejected: PostgreSQL reports its line number, and the rows are read again."""
        if (found := _COPY_LINE.search(error.diag.context or "")) is None:
            return None
        row = next(itertools.islice(lines, int(found["line"]) - 1, None), None)
        if row is None:
            return None
        partition, line = row
        fields = line.split("\t")
        # Column names can contain colons and commas, so the longest match is the right one.
        named = [name for name in self._columns if found["rest"].startswith(f", column {RENAMED.get(name, name)}")]
        with_nul = [name for name, field in zip(self._columns, fields, strict=False) if "\0" in field]
        return RejectedRow(
            partition,
            self._offset_in(fields),
            max(named, key=len, default=with_nul[0] if with_nul else None),
            self._error_text(error),
        )


def _copy_statement(columns: Iterable[str]) -> "Composed":
    """Return the COPY statement for the temporary table; it has no parameters, so percent signs are not doubled."""
    from psycopg import sql

    names = sql.SQL(", ").join(map(sql.Identifier, column_names(columns)))
    return sql.SQL("COPY pg_temp.marshal_rows ({}) FROM STDIN").format(names)
