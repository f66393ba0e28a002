"""The sort order of an Iceberg table: each file's rows are in it, or the file does not name it."""

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import types as i
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import parse_transform
from pyspark.sql import types as t

from marshal_dagster.sinks.conformance.target import deliver, never, part
from marshal_dagster.sinks.iceberg import parquet_files
from marshal_dagster.sinks.iceberg.sort_order import file_order
from tests.fast.test_sink_iceberg_files import write_arrays
from tests.iceberg_tables import IcebergTarget, TypedFrame, create_sorted_table

ASCENDING, DESCENDING = SortDirection.ASC, SortDirection.DESC
FIRST, LAST = NullOrder.NULLS_FIRST, NullOrder.NULLS_LAST
NAN, MINUS_NAN = struct.unpack("<dd", struct.pack("<QQ", 0x7FF8 << 48, 0xFFF8 << 48))


def sort_order(*fields: tuple[int, str, SortDirection, NullOrder]) -> SortOrder:
    """Return a sort order of fields: source id, transform, direction and order of nulls."""
    return SortOrder(*(SortField(field, parse_transform(name), way, nulls) for field, name, way, nulls in fields))


def in_order(kind: i.IcebergType, order: SortOrder, *arrays: pa.Array) -> list[Any]:
    """Return the values in the order of a table of one column."""
    schema = Schema(i.NestedField(1, "value", kind))
    found = file_order(new_table_metadata(schema, UNPARTITIONED_PARTITION_SPEC, order, "file:///nowhere"))
    assert found is not None
    field = pa.field("value", arrays[0].type, metadata={"PARQUET:field_id": "1"})
    rows = pa.Table.from_arrays([pa.chunked_array(arrays)], schema=pa.schema([field]))
    return list(found.sort(rows)["value"].to_pylist())


def sorted_target(folder: Path, kind: i.IcebergType, order: SortOrder, **properties: str) -> IcebergTarget:
    """Return a table with the column `value` in this order."""
    create_sorted_table(folder, Schema(i.NestedField(1, "value", kind)), order, properties=properties)
    return IcebergTarget(folder)


def files_of(target: IcebergTarget) -> list[tuple[int | None, list[Any]]]:
    """Return for each file its sort order's id, and the values of the column `value` as they are in it."""
    files = target.table().inspect.files().to_pylist()
    paths = [(file["sort_order_id"], file["file_path"].removeprefix("file://")) for file in files]
    return [(order, pq.read_table(path)["value"].to_pylist()) for order, path in sorted(paths)]


def moment(text: str) -> datetime:
    """Return a time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


TEXTS = ["b", None, "a\uffff", "", "a\U0001f600", "ab", "a", None, "B"]
MOMENTS = ["1969-12-31 23:59:59", "1970-01-01 00:00:00", "1969-12-31 00:00:00", "2024-02-29 12:30:00", "1600-01-01"]


@pytest.mark.parametrize(
    ("transform", "arrow", "kind", "values", "key"),
    [
        ("identity", pa.string(), i.StringType(), TEXTS, str.encode),
        ("truncate[1]", pa.string(), i.StringType(), TEXTS, lambda value: value[:1].encode()),
        ("identity", pa.binary(), i.BinaryType(), [b"\xff", b"\x00", None, b"", b"a"], bytes),
        ("identity", pa.int64(), i.LongType(), [3, None, -(2**63), 2**63 - 1, 0], int),
        ("truncate[10]", pa.int64(), i.LongType(), [3, None, -1, 19, 10, 12], lambda value: value // 10),
        ("identity", pa.bool_(), i.BooleanType(), [True, None, False, True], bool),
        ("identity", pa.decimal128(9, 2), i.DecimalType(9, 2), [Decimal("1.50"), None, Decimal("-2.00")], Decimal),
        ("truncate[100]", pa.decimal128(9, 2), i.DecimalType(9, 2), [Decimal("1.50"), Decimal("1.10")], int),
        *(
            (unit, pa.timestamp("us", "UTC"), i.TimestamptzType(), [None, *map(moment, MOMENTS)], key)
            for unit, key in {
                "identity": datetime.timestamp,
                "year": lambda value: value.year,
                "month": lambda value: (value.year, value.month),
                "day": datetime.toordinal,
                "hour": lambda value: (value.toordinal(), value.hour),
            }.items()
        ),
        ("day", pa.date32(), i.DateType(), [moment(text).date() for text in MOMENTS], lambda value: value),
    ],
)
@pytest.mark.parametrize("nulls", [FIRST, LAST])
@pytest.mark.parametrize("direction", [ASCENDING, DESCENDING])
def test_rows_are_sorted(  # noqa: PLR0917 - what a table can have
    transform: str,
    arrow: pa.DataType,
    kind: i.IcebergType,
    values: list[Any],
    key: Callable[[Any], Any],
    direction: SortDirection,
    nulls: NullOrder,
) -> None:
    """By the transform's values, with nulls where the order has them; equal rows stay as they came."""
    order = sort_order((1, transform, direction, nulls))
    found = in_order(kind, order, pa.array(values[:2], arrow), pa.array(values[2:], arrow))
    none = [value for value in values if value is None]
    known = sorted((value for value in values if value is not None), key=key, reverse=direction is DESCENDING)
    assert found == (none + known if nulls is FIRST else known + none)


def test_buckets_are_in_order() -> None:
    """Rows of one bucket are together, and buckets ascend."""
    bucket = parse_transform("bucket[4]").transform(i.LongType())
    found = in_order(i.LongType(), sort_order((1, "bucket[4]", ASCENDING, FIRST)), pa.array(range(100)))
    assert found == sorted(range(100), key=lambda value: bucket(value) or 0)


@pytest.mark.parametrize(("kind", "arrow"), [(i.FloatType(), pa.float32()), (i.DoubleType(), pa.float64())])
def test_floating_point_numbers_have_icebergs_order(kind: i.IcebergType, arrow: pa.DataType) -> None:
    """-NaN, -infinity, negative, -0, 0, positive, infinity, NaN."""
    wanted = pa.array([None, MINUS_NAN, float("-inf"), -1.5, -0.0, 0.0, 1.5, float("inf"), NAN], arrow)
    found = in_order(kind, sort_order((1, "identity", ASCENDING, FIRST)), wanted[::-1])
    assert list(map(bits, found)) == list(map(bits, wanted.to_pylist()))


def bits(value: float | None) -> bytes | None:
    """Return the bytes of a number."""
    return None if value is None else struct.pack("<d", value)


def test_several_fields_decide_one_after_another(tmp_path: Path) -> None:
    """Also a field of a struct, and one that the result does not have."""
    inner = i.NestedField(4, "inner", i.LongType())
    schema = Schema(
        i.NestedField(1, "partition", i.IntegerType()),
        i.NestedField(2, "offset", i.LongType()),
        i.NestedField(3, "value", i.StructType(inner)),
        i.NestedField(5, "more", i.StringType()),
    )
    order = sort_order(
        (5, "identity", ASCENDING, FIRST), (4, "identity", DESCENDING, LAST), (2, "identity", DESCENDING, FIRST)
    )
    create_sorted_table(tmp_path, schema, order)
    target = IcebergTarget(tmp_path)
    struct_type = t.StructType([t.StructField("inner", t.LongType())])
    kinds = {"partition": t.IntegerType(), "offset": t.LongType(), "value": struct_type}
    frame = t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])
    given = [{"inner": 1}, None, {"inner": 2}, {"inner": None}, {"inner": 2}]
    rows = [{"partition": 0, "offset": at, "value": value} for at, value in enumerate([*given, *given])]
    target.sink().write(TypedFrame(frame, rows), [part(0, 0, 10)], never)  # type: ignore[arg-type]
    for file in target.table().inspect.files().to_pylist():
        found = pq.read_table(file["file_path"].removeprefix("file://")).to_pylist()
        values = [(row["value"] or {"inner": None})["inner"] for row in found]
        keys = [(value is None, -(value or 0), -row["offset"]) for value, row in zip(values, found, strict=True)]
        assert (file["sort_order_id"], keys) == (1, sorted(keys))


def test_a_file_ends_before_its_rows_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is sorted as a whole, and holds at most as many rows as a task holds in memory."""
    monkeypatch.setattr(parquet_files, "_MOST_BUFFERED_BYTES", 1_000)
    target = sorted_target(tmp_path, i.LongType(), sort_order((1, "identity", DESCENDING, LAST)))
    write_arrays(target, t.LongType(), [pa.array(range(start, start + 50)) for start in range(0, 500, 50)])
    files = files_of(target)
    assert len(files) > 2
    assert all(order_id == 1 and values == sorted(values, reverse=True) for order_id, values in files)
    assert sorted(value for _, values in files for value in values) == list(range(500))


def test_a_file_has_the_size_that_the_table_wants(tmp_path: Path) -> None:
    """And row groups too."""
    small = {"write.target-file-size-bytes": "900", "write.parquet.row-group-limit": "30"}
    target = sorted_target(tmp_path, i.LongType(), sort_order((1, "identity", ASCENDING, LAST)), **small)
    write_arrays(target, t.LongType(), [pa.array(range(start, start + 50)) for start in range(0, 500, 50)])
    files = target.table().inspect.files().to_pylist()
    assert sorted((file["record_count"], len(file["split_offsets"])) for file in files) == [(50, 2), *[(150, 5)] * 3]


def test_partitions_are_sorted_each(tmp_path: Path) -> None:
    """A file of a partitioned table has the order too."""
    schema = Schema(
        i.NestedField(1, "partition", i.IntegerType()),
        i.NestedField(2, "offset", i.LongType()),
        i.NestedField(3, "value", i.StringType()),
    )
    spec = PartitionSpec(PartitionField(3, 1000, parse_transform("truncate[1]"), "first"))
    create_sorted_table(tmp_path, schema, sort_order((2, "identity", DESCENDING, LAST)), spec)
    target = IcebergTarget(tmp_path)
    deliver(target, "a", part(0, 0, 20), part(1, 0, 20))
    files = target.table().inspect.files().to_pylist()
    for file in files:
        offsets = pq.read_table(file["file_path"].removeprefix("file://"))["offset"].to_pylist()
        assert offsets == sorted(offsets, reverse=True)
        assert file["sort_order_id"] == 1


def test_an_order_that_is_not_kept_is_not_named(tmp_path: Path) -> None:
    """Rows stay as they came, and no reader takes them for sorted."""
    target = sorted_target(tmp_path, i.LongType(), sort_order((1, "void", ASCENDING, FIRST)))
    write_arrays(target, t.LongType(), [pa.array([3, 1, 2])])
    assert files_of(target) == [(None, [3, 1, 2])]


def test_an_order_by_elements_of_a_list_is_not_kept() -> None:
    """A row has no one value of such a source."""
    schema = Schema(i.NestedField(1, "value", i.ListType(2, i.LongType())))
    order = sort_order((2, "identity", ASCENDING, FIRST))
    metadata = new_table_metadata(schema, UNPARTITIONED_PARTITION_SPEC, order, "file:///nowhere")
    assert file_order(metadata) is None


def test_a_new_order_leaves_written_files_as_they_are(tmp_path: Path) -> None:
    """A file that was written before the order changed names the order that it has."""
    target = sorted_target(tmp_path, i.LongType(), sort_order((1, "identity", ASCENDING, FIRST)))
    sink = target.sink()

    def reached(step: str) -> None:
        if step == "written":
            with target.table().update_sort_order() as update:
                update.desc("value", parse_transform("identity"), FIRST)

    sink._reached = reached  # type: ignore[method-assign]
    fields = [t.StructField("partition", t.IntegerType()), t.StructField("value", t.LongType())]
    rows = [{"partition": 0, "value": value} for value in (3, 1)]
    sink.write(TypedFrame(t.StructType(fields), rows), [part(0, 0, 9)], never)  # type: ignore[arg-type]
    assert target.table().metadata.default_sort_order_id == 2
    assert {order_id for order_id, _ in files_of(target)} == {1}
