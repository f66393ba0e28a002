"""Renders Arrow batches as PostgreSQL's binary COPY format, column by column, without a loop over the rows.

PostgreSQL reads it in half of the time that it needs for CSV. `task_rows` uses it if the form of each column is known.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.sinks.database.column_types import TableColumn
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyarrow import Array, Buffer, RecordBatch
    from pyspark.sql.types import DataType

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""What a stream of rows begins with: the signature, no flags, no extension."""
TRAILER: Final = b"\xff\xff"
"""What a stream of rows ends with."""
_MOST_BYTES: Final = 64 * 1024 * 1024
"""The bytes of Arrow data that are rendered at once."""
_NULL: Final = -1
_DAYS: Final = 10_957
"""The days from 1970, from which Arrow counts, to 2000, from which PostgreSQL counts."""
_MICROS: Final = _DAYS * 86_400_000_000
_FIRST_DAY: Final = -2_451_545
_FIRST_MICRO: Final = _FIRST_DAY * 86_400_000_000
_END_DAY: Final = 2_145_031_949
"""PostgreSQL's first and last dates, from 2000. Numbers below or above would be rejected, or stored as infinity."""


class BinaryForm(StrEnum):
    """How a value is stored in a field, after its length: a number in this form of numpy, or bytes."""

    INT2 = ">i2"
    INT4 = ">i4"
    INT8 = ">i8"
    FLOAT4 = ">f4"
    FLOAT8 = ">f8"
    BOOL = "i1"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BYTES = "bytes"
    JSONB = "jsonb"


class OutOfRangeError(Exception):
    """A number or a time that the column cannot store."""


_INTEGERS: Final[Mapping[str, BinaryForm]] = {
    "int2": BinaryForm.INT2,
    "int4": BinaryForm.INT4,
    "int8": BinaryForm.INT8,
}
_JSON: Final[Mapping[str, BinaryForm]] = {"json": BinaryForm.BYTES, "jsonb": BinaryForm.JSONB}
_FORMS: Final[Mapping[str, Mapping[str, BinaryForm]]] = {
    "byte": _INTEGERS,
    "short": _INTEGERS,
    "integer": _INTEGERS,
    "long": _INTEGERS,
    "float": {"float4": BinaryForm.FLOAT4},
    "double": {"float8": BinaryForm.FLOAT8},
    "boolean": {"bool": BinaryForm.BOOL},
    "binary": {"bytea": BinaryForm.BYTES},
    "date": {"date": BinaryForm.DATE},
    "timestamp": {"timestamptz": BinaryForm.TIMESTAMP},
    "timestamp_ntz": {"timestamp": BinaryForm.TIMESTAMP},
    "array": _JSON,
    "map": _JSON,
    "struct": _JSON,
}
_TEXTS: Final = frozenset({"text", "varchar", "bpchar"})


def binary_form(data_type: "DataType", column: TableColumn) -> BinaryForm | None:
    """Return how the values of a Spark type are stored in a field for a column, or None if that is not known here.

    `BYTES` and `JSONB` are bytes as they are, except for the types of which `is_native` is false: these are text.
    """
    if column.type in _TEXTS:
        return BinaryForm.BYTES
    return _FORMS.get(data_type.typeName(), {}).get(column.type)


def is_native(data_type: "DataType", form: BinaryForm) -> bool:
    """Return whether values are rendered from their own Arrow type, instead of from text."""
    return form not in {BinaryForm.BYTES, BinaryForm.JSONB} or isinstance(data_type, t.BinaryType)


def binary_rows(rows: "RecordBatch", forms: Sequence[BinaryForm]) -> Iterator["Buffer"]:
    """Yield the rows as parts of a binary COPY stream, without its header and trailer.

    Args:
        rows: The rows. Bytes and strings may be in either; times are in microseconds.
        forms: How each column is stored.

    Raises:
        OutOfRangeError: A column cannot store one of the numbers or times.
    """
    at_once = max(1, len(rows) * _MOST_BYTES // max(1, rows.nbytes))
    for start in range(0, len(rows), at_once):
        part = rows.slice(start, at_once)
        stream = _Stream(len(part), len(forms))
        for column, form in zip(part.columns, forms, strict=True):
            stream.add(column, form)
        yield stream.buffer()


class _Stream:
    """The rows' bytes, as Arrow arrays of which each has a part of every row.

    Neighbouring parts that have the same length in each row are collected in one array.
    """

    def __init__(self, count: int, columns: int) -> None:
        import numpy as np

        self._count = count
        self._fixed: list[tuple[str, NDArray[Any] | int]] = [(">i2", columns)]
        self._parts: list[Array] = []
        self._numpy = np

    def add(self, column: "Array", form: BinaryForm) -> None:
        """Append a column to the rows."""
        if form in {BinaryForm.BYTES, BinaryForm.JSONB}:
            self._add_bytes(column, form)
            return
        kind, values = self._numbers(column, form)
        length = self._numpy.dtype(kind).itemsize
        if not column.null_count:
            self._fixed += [(">i4", length), (kind, values)]
            return
        self._end_fixed()
        self._parts.append(self._or_null(column, [(">i4", length), (kind, values)]))

    def buffer(self) -> "Buffer":
        """Return the bytes of all rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._end_fixed()
        joined = pc.binary_join_element_wise(*self._parts, pa.scalar(b"", pa.binary()))
        _, offsets, data = joined.buffers()
        ends = self._numpy.frombuffer(offsets, dtype=self._numpy.int32)
        first, last = int(ends[joined.offset]), int(ends[joined.offset + len(joined)])
        return data.slice(first, last - first)

    def _add_bytes(self, column: "Array", form: BinaryForm) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        values = column.cast(pa.binary())
        if form is BinaryForm.JSONB:
            version = pa.scalar(b"\x01", pa.binary())
            values = pc.binary_join_element_wise(version, values, pa.scalar(b"", pa.binary()))
        self._fixed.append((">i4", pc.binary_length(values).fill_null(_NULL).to_numpy()))
        self._end_fixed()
        self._parts.append(values.fill_null(b""))

    def _numbers(self, column: "Array", form: BinaryForm) -> tuple[str, "NDArray[Any]"]:
        """Return the form of numpy and the numbers; those of nulls mean nothing."""
        import pyarrow as pa

        if form is BinaryForm.DATE:
            days = column.cast(pa.int32()).cast(pa.int64()).fill_null(0).to_numpy() - _DAYS
            return ">i4", _within(days, _FIRST_DAY, _END_DAY - 1)
        if form is BinaryForm.TIMESTAMP:
            micros = column.cast(pa.int64()).fill_null(0).to_numpy()
            return ">i8", _within(micros, _FIRST_MICRO + _MICROS, None) - _MICROS
        if form is BinaryForm.BOOL:
            return form.value, column.cast(pa.int8()).fill_null(0).to_numpy()
        numbers = column.fill_null(0).to_numpy()
        if form in _INTEGERS.values():
            bounds = self._numpy.iinfo(self._numpy.dtype(form.value))
            numbers = _within(numbers, int(bounds.min), int(bounds.max))
        return form.value, numbers

    def _or_null(self, column: "Array", fields: Sequence[tuple[str, "NDArray[Any] | int"]]) -> "Array":
        import pyarrow as pa
        import pyarrow.compute as pc

        null = self._numpy.array(_NULL, dtype=">i4").tobytes()
        return pc.if_else(column.is_valid(), self._array(fields), pa.scalar(null, pa.binary()))

    def _end_fixed(self) -> None:
        if self._fixed:
            self._parts.append(self._array(self._fixed))
            self._fixed = []

    def _array(self, fields: Sequence[tuple[str, "NDArray[Any] | int"]]) -> "Array":
        """Return an array of bytes that has these fields of each row."""
        import pyarrow as pa

        block = self._numpy.empty(self._count, [(f"field_{index}", kind) for index, (kind, _) in enumerate(fields)])
        for name, (_, values) in zip(block.dtype.names or (), fields, strict=True):
            block[name] = values
        width = block.dtype.itemsize
        ends = self._numpy.arange(0, (self._count + 1) * width, width, dtype=self._numpy.int32)
        return pa.Array.from_buffers(pa.binary(), self._count, [None, pa.py_buffer(ends), pa.py_buffer(block)])


def _within(numbers: "NDArray[Any]", least: int, most: int | None) -> "NDArray[Any]":
    if numbers.size and (numbers.min() < least or (most is not None and numbers.max() > most)):
        raise OutOfRangeError
    return numbers
