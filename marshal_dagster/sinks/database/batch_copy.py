"""Copies rows in Arrow batches into a table of PostgreSQL, in Spark's tasks and in the driver.

The rows are in binary form if the form of each column is known (`pg_binary`), else in CSV.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from marshal_dagster.sinks.database.column_types import TableColumn, limited_columns
from marshal_dagster.sinks.database.dialect import column_names
from marshal_dagster.sinks.database.pg_binary import (
    HEADER,
    TRAILER,
    BinaryForm,
    OutOfRangeError,
    binary_form,
    binary_rows,
    is_native,
)
from marshal_dagster.sinks.database.pg_copy import column_text
from marshal_dagster.sinks.rejected_rows import NUL, text_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed
    from pyarrow import Array, Buffer, RecordBatch
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField


_BYTES_AT_ONCE: Final = 2_000_000
"""The size from which on rows are rendered. Small batches take two to three times as long."""


class DoubtfulRowError(Exception):
    """A row that the table may reject or change."""


@dataclass(frozen=True, slots=True)
class BatchCopy:
    """How the rows of a frame are copied into a table."""

    columns: Sequence[str]
    """The table's columns, the range's first."""
    ids: Mapping[int, int]
    """The id of each range, by partition."""
    forms: Sequence[BinaryForm] | None
    """The binary forms of the columns, or None for CSV."""

    @classmethod
    def of(cls, frame: "DataFrame", ids: Mapping[int, int], there: Mapping[str, TableColumn]) -> "BatchCopy":
        """Return the copy for a frame, and the table with the columns `there`."""
        return cls(tuple(column_names(frame.columns)), dict(ids), _forms(frame.schema.fields, there))

    def rows(self, frame: "DataFrame", there: Mapping[str, TableColumn]) -> "DataFrame":
        """Return a frame with the columns that `copy` expects in its batches."""
        has_offset = f.col(OFFSET_COLUMN).isNotNull() if OFFSET_COLUMN in frame.columns else f.lit(False)  # noqa: FBT003
        return frame.select(
            f.col(PARTITION_COLUMN).cast("bigint").alias("partition"),
            has_offset.alias("has_offset"),
            _is_doubtful(frame, there).alias("is_doubtful"),
            *(
                _field(column, self.forms[number + 1] if self.forms else None).alias(f"field_{number}")
                for number, column in enumerate(frame.schema.fields)
            ),
        )

    def copy(
        self, cursor: "psycopg.Cursor", table: Sequence[str], batches: "Iterable[RecordBatch]", *, is_new: bool
    ) -> tuple[Counter[int | None], bool]:
        """Copy all rows.

        Args:
            cursor: A cursor in a transaction.
            table: The schema and the name of the table.
            batches: The rows, with the columns of `rows`.
            is_new: Whether this transaction has created the table. PostgreSQL then stores the rows as frozen.

        Returns:
            The number of rows by partition, and whether all have offsets.

        Raises:
            DoubtfulRowError: The table may reject or change a row, or has rejected one. The transaction has failed.
        """
        counts: Counter[int | None] = Counter()
        have_offsets = True
        wrong_values: tuple[type[Exception], ...] = (OutOfRangeError, *value_errors())
        try:
            with cursor.copy(self._statement(table, is_new=is_new)) as copy:
                copy.write(HEADER if self.forms else b"")
                for batch in _joined(batches):
                    partition, has_offset, is_doubtful, *fields = batch.columns
                    if is_doubtful.true_count:
                        raise DoubtfulRowError
                    have_offsets = have_offsets and has_offset.true_count == len(batch)
                    for entry in partition.value_counts():
                        counts[entry["values"].as_py()] += entry["counts"].as_py()
                    for piece in self._rendered([self._ranges(partition), *fields]):
                        copy.write(piece)
                copy.write(TRAILER if self.forms else b"")
        except wrong_values:
            raise DoubtfulRowError from None
        return counts, have_offsets

    def _statement(self, table: Sequence[str], *, is_new: bool) -> "Composed":
        """Return the COPY statement; it has no parameters, so percent signs are not doubled."""
        from psycopg import sql

        names = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        options = sql.SQL("binary" if self.forms else "csv") + sql.SQL(", FREEZE" if is_new else "")
        return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(sql.Identifier(*table), names, options)

    def _ranges(self, partitions: "Array") -> "Array":
        """Return the ids of the rows' ranges, null for a partition that the batch has not read."""
        import pyarrow as pa
        import pyarrow.compute as pc

        ids = pa.array(list(self.ids.values()), pa.int64())
        return ids.take(pc.index_in(partitions, value_set=pa.array(list(self.ids), pa.int64())))

    def _rendered(self, columns: Sequence["Array"]) -> "Iterable[Buffer]":
        import pyarrow as pa

        rows = pa.RecordBatch.from_arrays(columns, self.columns)
        return [_csv(rows)] if self.forms is None else binary_rows(rows, self.forms)


def _joined(batches: "Iterable[RecordBatch]") -> "Iterator[RecordBatch]":
    """Yield the rows in larger batches."""
    import pyarrow as pa

    held: list[RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= _BYTES_AT_ONCE:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, size = [], 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _forms(fields: Sequence["StructField"], there: Mapping[str, TableColumn]) -> tuple[BinaryForm, ...] | None:
    """Return the binary forms of the columns, the range's first; None if one is not known, and rows are sent as CSV."""
    columns = [there[name] for name in column_names(field.name for field in fields)]
    types = [t.LongType(), *(field.dataType for field in fields)]
    forms = [binary_form(data_type, column) for data_type, column in zip(types, columns, strict=True)]
    return None if None in forms else tuple(form for form in forms if form is not None)


def _field(column: "StructField", form: BinaryForm | None) -> "Column":
    """Return a column as it is, if it can be rendered so, else as the text that PostgreSQL parses."""
    as_it_is = isinstance(column.dataType, t.IntegralType) if form is None else is_native(column.dataType, form)
    if as_it_is:
        return f.col(quoted(column.name))
    return column_text(column.name, column.dataType).cast("string")  # PySpark has no Arrow type for char and varchar


def _is_doubtful(frame: "DataFrame", there: Mapping[str, TableColumn]) -> "Column":
    """Return the condition that a string of a row would be changed without an error.

    PostgreSQL itself rejects bytes that are not UTF-8, and NUL characters. Spark would replace them when it renders
    JSON. A column with a limited length may lose spaces at the end.
    """
    nested = [
        column for column in frame.schema.fields if isinstance(column.dataType, t.ArrayType | t.MapType | t.StructType)
    ]
    is_doubtful = f.lit(False)  # noqa: FBT003
    if nested:
        is_doubtful = text_check(t.StructType(nested), nul=NUL).problem.isNotNull()
    for index in limited_columns(frame.columns, there):
        text = f.col(quoted(frame.columns[index])).cast("string")
        is_doubtful = is_doubtful | f.coalesce(text.endswith(" "), f.lit(False))  # noqa: FBT003
    return is_doubtful


def _csv(fields: "RecordBatch") -> "Buffer":
    """Return rows as CSV. All strings are quoted, so that an empty one is not null."""
    import pyarrow as pa
    import pyarrow.csv

    text = pa.BufferOutputStream()
    pyarrow.csv.write_csv(fields, text, pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed"))
    return text.getvalue()


def value_errors() -> "tuple[type[psycopg.Error], ...]":
    """Return the exceptions with which PostgreSQL or a trigger rejects a value."""
    import psycopg
    from psycopg import errors

    return psycopg.DataError, psycopg.IntegrityError, errors.ProgramLimitExceeded, errors.RaiseException
