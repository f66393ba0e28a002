"""Rows in PostgreSQL's binary COPY format. tests/real/test_sink_postgres_tasks.py has PostgreSQL read them."""

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from marshal_dagster.sinks.database.batch_copy import BatchCopy
from marshal_dagster.sinks.database.column_types import TableColumn
from marshal_dagster.sinks.database.pg_binary import (
    HEADER,
    TRAILER,
    BinaryForm,
    OutOfRangeError,
    binary_form,
    binary_rows,
    is_native,
)

NULL = struct.pack(">i", -1)


def rendered(form: BinaryForm, values: list[Any], kind: pa.DataType) -> list[bytes]:
    """Return the fields of rows with one column."""
    rows = pa.RecordBatch.from_arrays([pa.array(values, kind)], ["value"])
    (buffer,) = binary_rows(rows, [form])
    data, fields = buffer.to_pybytes(), []
    while data:
        count, length = struct.unpack_from(">hi", data)
        assert count == 1
        end = 6 + max(0, length)
        fields.append(data[2:end])
        data = data[end:]
    return fields


def field(form: str, value: Any) -> bytes:  # noqa: ANN401 - of the form's type
    """Return a field as PostgreSQL reads it."""
    data = value if form == "bytes" else struct.pack(f">{form}", value)
    return struct.pack(">i", len(data)) + data


@pytest.mark.parametrize(
    ("form", "kind", "packed", "values_and_expected"),
    [
        (BinaryForm.INT2, pa.int8(), "h", {-2: -2, 3: 3}),
        (BinaryForm.INT4, pa.int64(), "i", {-2: -2, 3: 3}),
        (BinaryForm.INT8, pa.int64(), "q", {-2: -2, 2**63 - 1: 2**63 - 1}),
        (BinaryForm.FLOAT4, pa.float32(), "f", {0.5: 0.5, -0.0: -0.0}),
        (BinaryForm.FLOAT8, pa.float64(), "d", {0.1: 0.1, float("inf"): float("inf")}),
        (BinaryForm.BOOL, pa.bool_(), "b", {True: 1, False: 0}),
        (BinaryForm.DATE, pa.date32(), "i", {date(2000, 1, 2): 1, date(1, 1, 1): -730119}),
        (BinaryForm.TIMESTAMP, pa.timestamp("us", "UTC"), "q", {datetime(2000, 1, 1, tzinfo=UTC): 0}),
        (BinaryForm.BYTES, pa.string(), "bytes", {"": b"", "é": "é".encode()}),
        (BinaryForm.BYTES, pa.binary(), "bytes", {b"\xff\0": b"\xff\0"}),
        (BinaryForm.JSONB, pa.string(), "bytes", {"{}": b"\x01{}"}),
    ],
)
@pytest.mark.parametrize("has_null", [False, True])
def test_each_form(
    form: BinaryForm, kind: pa.DataType, packed: str, values_and_expected: dict[Any, Any], has_null: bool
) -> None:
    """A field has its length and its value; that of a null has the length -1 and no value."""
    fields = [field(packed, value) for value in values_and_expected.values()]
    nulls = [None] * has_null
    assert rendered(form, [*values_and_expected, *nulls], kind) == fields + [NULL] * has_null


@pytest.mark.parametrize(
    ("form", "value", "kind"),
    [
        (BinaryForm.INT2, 2**15, pa.int32()),
        (BinaryForm.INT4, -(2**31) - 1, pa.int64()),
        (BinaryForm.DATE, 2**31 - 1, pa.int32()),
        (BinaryForm.DATE, -(2**31), pa.int32()),
        (BinaryForm.TIMESTAMP, -(2**63), pa.int64()),
    ],
)
def test_a_value_that_would_become_another_one_is_refused(form: BinaryForm, value: int, kind: pa.DataType) -> None:
    """PostgreSQL's smallest and largest dates and times are infinite."""
    with pytest.raises(OutOfRangeError):
        rendered(form, [value], kind)


@pytest.mark.slow
def test_large_rows_are_rendered_in_several_parts() -> None:
    """Each part has at least one row."""
    text = "x" * (40 * 1024 * 1024)
    rows = pa.RecordBatch.from_arrays([pa.array([text, text, None])], ["value"])
    parts = [len(buffer) for buffer in binary_rows(rows, [BinaryForm.BYTES])]
    assert len(parts) > 1
    assert sum(parts) == 2 * len(text) + 3 * 6


def test_slices_of_a_batch_are_rendered_alone() -> None:
    """Arrow's slices share the data of the whole batch."""
    rows = pa.RecordBatch.from_arrays([pa.array(["a", "b", "c"]), pa.array([1, None, 3])], ["text", "number"]).slice(
        1, 2
    )
    (buffer,) = binary_rows(rows, [BinaryForm.BYTES, BinaryForm.INT2])
    two = struct.pack(">h", 2)
    assert buffer.to_pybytes() == two + field("bytes", b"b") + NULL + two + field("bytes", b"c") + field("h", 3)


def column(name: str) -> TableColumn:
    """Return a column of a built-in type."""
    return TableColumn(shown=name, type=name, category="?", modifier=-1)


def test_only_forms_that_keep_the_value_are_known() -> None:
    """Text columns take the text of every type. A number of decimals, or one in another type, is sent as text."""
    assert binary_form(t.LongType(), column("int4")) is BinaryForm.INT4
    assert binary_form(t.FloatType(), column("float8")) is None
    assert binary_form(t.DecimalType(10, 2), column("numeric")) is None
    assert binary_form(t.StringType(), column("uuid")) is None
    assert binary_form(t.LongType(), column("text")) is BinaryForm.BYTES
    assert not is_native(t.LongType(), BinaryForm.BYTES)
    assert is_native(t.BinaryType(), BinaryForm.BYTES)
    assert is_native(t.LongType(), BinaryForm.INT8)


class Stream:
    """A cursor and its COPY, which collects what is written."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    @contextmanager
    def copy(self, _: object) -> Iterator["Stream"]:
        """Yield itself."""
        yield self

    def write(self, part: bytes) -> None:
        """Keep a part of the stream."""
        self.parts.append(bytes(part))


def copied(batches: list[pa.RecordBatch]) -> tuple[list[bytes], Counter[int | None], bool]:
    """Return the parts of the stream that a copy of batches writes, and what it returns."""
    stream = Stream()
    copy = BatchCopy(("marshal_range", "value"), {0: 7, 1: 8}, (BinaryForm.INT8, BinaryForm.BYTES))
    counts, have_offsets = copy.copy(cast("Any", stream), ("public", "shop"), batches, is_new=True)
    return stream.parts, counts, have_offsets


def batch(partitions: list[int], values: list[str], *, has_offset: bool = True) -> pa.RecordBatch:
    """Return a batch as `BatchCopy.rows` makes them."""
    columns = [
        pa.array(partitions, pa.int64()),
        pa.array([has_offset] * len(values)),
        pa.array([False] * len(values)),
        pa.array(values),
    ]
    return pa.RecordBatch.from_arrays(columns, ["partition", "has_offset", "is_doubtful", "field_0"])


def test_small_batches_are_copied_together() -> None:
    """Three batches make one part, with the rows in their order."""
    parts = [batch([0, 1], ["a", "b"]), batch([1], ["c"], has_offset=False), batch([0, 0], ["d", ""])]
    (header, rows, trailer), counts, have_offsets = copied(parts)
    assert (header, trailer) == (HEADER, TRAILER)
    fields = [(7, b"a"), (8, b"b"), (8, b"c"), (7, b"d"), (7, b"")]
    assert rows == b"".join(struct.pack(">hiqi", 2, 8, taken, len(value)) + value for taken, value in fields)
    assert counts == {0: 3, 1: 2}
    assert not have_offsets


def test_large_batches_are_copied_alone() -> None:
    """No more rows are held back than are rendered well: a large batch does not wait for the next one."""
    large = batch([0], ["x" * 3_000_000])
    parts, counts, have_offsets = copied([large, large, batch([1], ["y"])])
    assert [len(part) for part in parts[1:-1]] == [3_000_018, 3_000_018, 19]
    assert counts == {0: 2, 1: 1}
    assert have_offsets
