"""Values and partitions of the Iceberg sink: each is stored exactly and found by queries, or refused."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
from pyiceberg import types as i
from pyiceberg.expressions import And, EqualTo, IsNull
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import parse_transform
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.iceberg.arrays import NOT_UTF8, problem
from tests.iceberg_tables import IcebergTarget, TypedFrame, create_table, duckdb_rows

EQUAL: Any = EqualTo  # the hints of these classes do not allow names of columns
IS_NULL: Any = IsNull
LONGEST = datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001 - a timestamp without a zone
PAIR = t.StructType([t.StructField("x", t.IntegerType()), t.StructField("Y.y", t.ArrayType(t.StringType()))])
VALUES: Sequence[tuple[str, t.DataType, i.IcebergType, Sequence[Any]]] = (
    ("boolean", t.BooleanType(), i.BooleanType(), (True, False)),
    ("byte", t.ByteType(), i.IntegerType(), (-128, 127)),
    ("short", t.ShortType(), i.LongType(), (-(2**15), 2**15 - 1)),
    ("int", t.IntegerType(), i.IntegerType(), (-(2**31), 2**31 - 1)),
    ("int to long", t.IntegerType(), i.LongType(), (-(2**31), 2**31 - 1)),
    ("long", t.LongType(), i.LongType(), (-(2**63), 2**63 - 1)),
    ("float", t.FloatType(), i.FloatType(), (1.5, -0.0, inf, -inf)),
    ("float to double", t.FloatType(), i.DoubleType(), (1.5, inf)),
    ("double", t.DoubleType(), i.DoubleType(), (0.1, 5e-324, -inf)),
    ("decimal", t.DecimalType(5, 2), i.DecimalType(5, 2), (Decimal("-999.99"), Decimal("0.01"))),
    ("wider decimal", t.DecimalType(5, 2), i.DecimalType(38, 2), (Decimal("-999.99"), Decimal("0.01"))),
    ("long decimal", t.DecimalType(38, 0), i.DecimalType(38, 0), (Decimal(10**38 - 1), Decimal(1 - 10**38))),
    ("date", t.DateType(), i.DateType(), (date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31))),
    ("timestamp", t.TimestampType(), i.TimestamptzType(), (datetime(1, 1, 1, tzinfo=UTC), LONGEST.replace(tzinfo=UTC))),
    ("timestamp_ntz", t.TimestampNTZType(), i.TimestampType(), (datetime(1, 1, 1), LONGEST)),  # noqa: DTZ001 - as above
    ("string", t.StringType(), i.StringType(), ("", "a\0b", "\U0001f600" * 20, "x" * 70_000)),
    ("binary", t.BinaryType(), i.BinaryType(), (b"", b"\x00\xff" * 40)),
    ("array", t.ArrayType(t.IntegerType()), i.ListType(10, i.LongType(), element_required=False), ([], [1, None, 3])),
    (
        "map",
        t.MapType(t.StringType(), PAIR),
        i.MapType(
            10,
            i.StringType(),
            11,
            i.StructType(
                i.NestedField(12, "x", i.LongType()),
                i.NestedField(13, "Y.y", i.ListType(14, i.StringType(), element_required=False)),
            ),
            value_required=False,
        ),
        ({}, {"a": {"x": 2, "Y.y": ["b", None]}, "c": {"x": None, "Y.y": None}, "d": None}),
    ),
)


def write(target: IcebergTarget, frame: TypedFrame, start: int = 0, end: int = 1_000) -> Any:  # noqa: ANN401 - a result
    """Write rows of partition 0."""
    return target.sink().write(frame, [part(0, start, end)], never)  # type: ignore[arg-type]


def frame_of(kind: t.DataType, values: Sequence[Any], name: str = "value") -> TypedFrame:
    """Return a frame whose column `name` has these values."""
    fields = [t.StructField("partition", t.IntegerType()), t.StructField(name, kind)]
    return TypedFrame(t.StructType(fields), [{"partition": 0, name: value} for value in values])


def one_column(folder: Path, kind: i.IcebergType, *, required: bool = False, name: str = "value") -> IcebergTarget:
    """Return a table with one column."""
    create_table(folder, Schema(i.NestedField(1, name, kind, required=required)))
    return IcebergTarget(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "wanted", "values"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES])
def test_values_are_stored_exactly(
    given: t.DataType, wanted: i.IcebergType, values: Sequence[Any], tmp_path: Path
) -> None:
    """Each value and null are read back equal by pyiceberg, and nulls are found by a query."""
    target = one_column(tmp_path, wanted)
    assert write(target, frame_of(given, [*values, None])).rows == {0: len(values) + 1}
    table = target.table()
    found = [row["value"] for row in table.scan().to_arrow().to_pylist()]
    if isinstance(wanted, i.MapType):  # pyiceberg 0.12 reads null as an empty map
        found = [value for (value,) in duckdb_rows(table, "SELECT value FROM {rows}")]
    assert found == [*values, None]
    if wanted.is_primitive:  # pyiceberg has no such condition for others
        assert table.scan(row_filter=IS_NULL("value")).to_arrow().num_rows == 1
    assert duckdb_rows(table, "SELECT count(*) FROM {rows} WHERE value IS NULL") == [(1,)]
    assert duckdb_rows(table, "SELECT count(*), count(value) FROM {rows}") == [(len(values) + 1, len(values))]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (t.LongType(), i.IntegerType()),
        (t.DoubleType(), i.FloatType()),
        (t.IntegerType(), i.DoubleType()),
        (t.IntegerType(), i.StringType()),
        (t.DecimalType(5, 2), i.DecimalType(4, 2)),
        (t.DecimalType(5, 2), i.DecimalType(9, 3)),
        (t.DecimalType(5, 0), i.LongType()),
        (t.TimestampType(), i.TimestampType()),
        (t.TimestampNTZType(), i.TimestamptzType()),
        (t.DateType(), i.TimestampType()),
        (t.StringType(), i.UUIDType()),
        (t.StringType(), i.BinaryType()),
        (t.BinaryType(), i.FixedType(4)),
        (t.LongType(), i.TimeType()),
        (t.NullType(), i.StringType()),
        (t.DayTimeIntervalType(), i.LongType()),
        (t.YearMonthIntervalType(), i.IntegerType()),
        (t.ArrayType(t.LongType()), i.ListType(10, i.IntegerType(), element_required=False)),
        (t.ArrayType(t.StringType()), i.StringType()),
        (t.StringType(), i.ListType(10, i.StringType(), element_required=False)),
        (PAIR, i.StructType(i.NestedField(10, "x", i.IntegerType()))),
    ],
    ids=str,
)
def test_types_that_would_change_values_are_refused(given: t.DataType, wanted: i.IcebergType, tmp_path: Path) -> None:
    """The error comes before the frame is evaluated."""
    target = one_column(tmp_path, wanted)
    with pytest.raises(ConfigurationError, match="value"):
        write(target, frame_of(given, []))
    assert not list(tmp_path.glob("**/*.parquet"))


def test_variants_are_refused(tmp_path: Path) -> None:
    """A variant has no type in a table of format version 2."""
    variant = getattr(t, "VariantType", None)
    if variant is None:
        pytest.skip("Spark 3.5 has no variants")
    with pytest.raises(ConfigurationError, match="cannot hold all values of the result's variant"):
        write(one_column(tmp_path, i.StringType()), frame_of(variant(), []))


@pytest.mark.slow
def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    """A column that the table does not have is refused, and so is a required one that the result does not have."""
    schema = Schema(i.NestedField(1, "a.b", i.LongType()), i.NestedField(2, "Ünïcode x", i.LongType(), required=True))
    create_table(tmp_path, schema)
    target = IcebergTarget(tmp_path)
    for name, why in (("other", "has no column 'other'"), ("a.b", "'Ünïcode x' is required")):
        with pytest.raises(ConfigurationError, match=why):
            write(target, frame_of(t.LongType(), [1], name))
    fields = [t.StructField("partition", t.IntegerType())]
    fields += [t.StructField(name, t.LongType()) for name in ("Ünïcode x", "A.B")]
    write(target, TypedFrame(t.StructType(fields), [{"partition": 0, "Ünïcode x": 1, "A.B": 2}]))
    assert target.table().scan().to_arrow().to_pylist() == [{"a.b": 2, "Ünïcode x": 1}]
    assert duckdb_rows(target.table(), 'SELECT "a.b", "Ünïcode x" FROM {rows}') == [(2, 1)]


def test_names_that_differ_in_case(tmp_path: Path) -> None:
    """The column that is spelt the same is taken, and without one the name is ambiguous."""
    create_table(tmp_path, Schema(i.NestedField(1, "ab", i.LongType()), i.NestedField(2, "AB", i.LongType())))
    target = IcebergTarget(tmp_path)
    write(target, frame_of(t.LongType(), [1], "AB"))
    assert target.table().scan().to_arrow().to_pylist() == [{"ab": None, "AB": 1}]
    with pytest.raises(ConfigurationError, match="could be 'ab' or 'AB'"):
        write(target, frame_of(t.LongType(), [1], "Ab"), 1_000, 2_000)


@pytest.mark.parametrize("other", ["A", "a"])
def test_two_fields_of_a_struct_for_one_of_the_table(other: str, tmp_path: Path) -> None:
    """No reader could read a file with two fields of the same id."""
    target = one_column(tmp_path, i.StructType(i.NestedField(10, "a", i.LongType())))
    given = t.StructType([t.StructField("a", t.LongType()), t.StructField(other, t.LongType())])
    with pytest.raises(ConfigurationError, match=f"'a' and '{other}' both belong to the field of value 'a'"):
        write(target, frame_of(given, [{"a": 1, other: 2}]))
    assert not list(tmp_path.glob("**/*.parquet"))


@pytest.mark.parametrize("is_nested", [False, True])
def test_names_that_are_equal_in_files(tmp_path: Path, *, is_nested: bool) -> None:
    """Files have names that Avro allows, of which two of a table may be equal."""
    fields = i.NestedField(10, "a.b", i.LongType()), i.NestedField(11, "a_x2Eb", i.LongType())
    create_table(tmp_path, Schema(*[i.NestedField(1, "value", i.StructType(*fields))] if is_nested else fields))
    target = IcebergTarget(tmp_path)
    given = t.StructType([t.StructField("a.b", t.LongType())])
    frame = frame_of(given, [{"a.b": 1}]) if is_nested else frame_of(t.LongType(), [1], "a.b")
    with pytest.raises(ConfigurationError, match=r"'a\.b' has the same name in files as 'a_x2Eb'"):
        write(target, frame)


STRUCT = i.StructType(i.NestedField(10, "x", i.IntegerType(), required=True))


@pytest.mark.parametrize(
    ("given", "wanted", "values"),
    [
        (t.LongType(), i.LongType(), [1, 2, None]),
        (t.ArrayType(t.LongType()), i.ListType(10, i.LongType(), element_required=True), [[], [1], [2, None]]),
        (t.StructType([t.StructField("x", t.IntegerType())]), STRUCT, [{"x": 1}, {"x": 2}, {"x": None}]),
        (
            t.MapType(t.StringType(), t.StructType([t.StructField("x", t.IntegerType())])),
            i.MapType(11, i.StringType(), 12, STRUCT, value_required=False),
            [{}, {"a": {"x": 1}, "b": None}, {"a": {"x": 1}, "b": {"x": None}}],
        ),
    ],
    ids=str,
)
def test_a_null_in_a_required_field_is_refused(
    given: t.DataType, wanted: i.IcebergType, values: Sequence[Any], tmp_path: Path
) -> None:
    """The error names the offset and the column, at any level. Null around the field is no such null."""
    target = one_column(tmp_path, wanted, required=wanted.is_primitive)
    fields = [t.StructField("partition", t.IntegerType()), t.StructField("offset", t.LongType())]
    schema = t.StructType([*fields, t.StructField("value", given)])
    around = [] if wanted.is_primitive else [None]
    rows = [{"partition": 0, "offset": at, "value": value} for at, value in enumerate([*values[:2], *around])]
    assert write(target, TypedFrame(schema, rows), 0, 10).rows == {0: len(rows)}
    wrong = [{"partition": 0, "offset": 10 + at, "value": value} for at, value in enumerate(values)]
    with pytest.raises(SinkRejectedError, match="offset 12, column 'value': it is null, but the table requires"):
        write(target, TypedFrame(schema, wrong), 10, 20)
    assert target.table().scan().to_arrow().num_rows == len(rows)
    named = {file["file_path"].removeprefix("file://") for file in target.table().inspect.files().to_pylist()}
    assert {str(path) for path in tmp_path.glob("**/*.parquet")} >= named


def test_text_that_is_not_utf_8_is_refused() -> None:
    """Spark's strings may have any bytes, at any level."""
    bad = pa.array([b"a", b"\xff"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, bad.buffers())
    assert problem(text, i.NestedField(1, "value", i.StringType())) == NOT_UTF8
    nested = pa.ListArray.from_arrays([0, 2], text)
    kind = i.ListType(2, i.StringType(), element_required=False)
    assert problem(nested, i.NestedField(1, "value", kind)) == NOT_UTF8


@pytest.mark.slow
def test_a_condition_does_not_hold_for_nan(tmp_path: Path) -> None:
    """Without counts of NaNs, a deletion by a condition would take a file with NaNs as a whole."""
    target = one_column(tmp_path, i.DoubleType())
    write(target, frame_of(t.DoubleType(), [1.0, 2.0, nan]))
    files = target.table().inspect.files().to_pylist()
    assert sorted(file["nan_value_counts"] for file in files) == [[(1, 0)], [(1, 1)]]
    target.table().delete("value < 5")
    (left,) = target.table().scan().to_arrow().to_pylist()
    assert isnan(left["value"])


MOMENT = datetime(1969, 12, 31, 23, 30, tzinfo=UTC)
MOMENTS = [MOMENT + timedelta(hours=9_000 * number) for number in range(-3, 6)]
PARTITIONED: Sequence[tuple[str, t.DataType, i.IcebergType, Sequence[Any]]] = (
    ("identity", t.StringType(), i.StringType(), ["a", "", "a/b=c", "\U0001f600"]),
    ("identity", t.DateType(), i.DateType(), [moment.date() for moment in MOMENTS]),
    ("identity", t.TimestampType(), i.TimestamptzType(), MOMENTS),
    ("identity", t.DecimalType(5, 2), i.DecimalType(9, 2), [Decimal("1.50"), Decimal("-1.50")]),
    ("identity", t.BooleanType(), i.BooleanType(), [True, False]),
    ("identity", t.BinaryType(), i.BinaryType(), [b"", b"\x00"]),
    ("bucket[4]", t.IntegerType(), i.LongType(), list(range(-9, 9))),
    ("bucket[4]", t.StringType(), i.StringType(), ["a", "b", "", "\U0001f600"]),
    ("bucket[3]", t.TimestampType(), i.TimestamptzType(), MOMENTS),
    ("truncate[10]", t.IntegerType(), i.IntegerType(), [-11, -10, -1, 0, 1, 10, 19]),
    ("truncate[2]", t.StringType(), i.StringType(), ["abc", "abd", "a", "\U0001f600bcd"]),
    ("truncate[50]", t.DecimalType(5, 2), i.DecimalType(5, 2), [Decimal("10.65"), Decimal("-0.01")]),
    ("year", t.DateType(), i.DateType(), [moment.date() for moment in MOMENTS]),
    ("month", t.TimestampType(), i.TimestamptzType(), MOMENTS),
    ("day", t.TimestampNTZType(), i.TimestampType(), [moment.replace(tzinfo=None) for moment in MOMENTS]),
    ("hour", t.TimestampType(), i.TimestamptzType(), MOMENTS),
    ("void", t.IntegerType(), i.IntegerType(), [1, 2, 3]),
)


def partitioned(folder: Path, transform: str, kind: i.IcebergType) -> IcebergTarget:
    """Return a table that is partitioned by the column `value`."""
    schema = Schema(i.NestedField(1, "value", kind), i.NestedField(2, "number", i.IntegerType()))
    spec = PartitionSpec(PartitionField(1, 1000, parse_transform(transform), "p"))
    create_table(folder, schema, spec)
    return IcebergTarget(folder)


def partitions(target: IcebergTarget, condition: Any = "true") -> set[tuple[Any, ...]]:  # noqa: ANN401 - an expression
    """Return the partitions of the files that a condition may hold for."""
    files: list[Any] = [task.file for task in target.table().scan(row_filter=condition).plan_files()]
    return {tuple(file.partition) for file in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "given", "wanted", "values"),
    PARTITIONED,
    ids=[f"{transform} of {wanted}" for transform, _, wanted, _ in PARTITIONED],
)
def test_queries_find_rows_of_a_partitioned_table(
    transform: str, given: t.DataType, wanted: i.IcebergType, values: Sequence[Any], tmp_path: Path
) -> None:
    """Each value and null are found by a condition, by pyiceberg and DuckDB, and each file has one partition."""
    target = partitioned(tmp_path, transform, wanted)
    fields = [("partition", t.IntegerType()), ("value", given), ("number", t.IntegerType())]
    schema = t.StructType([t.StructField(name, kind) for name, kind in fields])
    listed = [{"partition": 0, "value": value, "number": at} for at, value in enumerate([*values, None] * 2)]
    write(target, TypedFrame(schema, listed))
    table = target.table()
    for value in values:
        condition = And(EQUAL("value", value), EQUAL("number", values.index(value)))
        assert table.scan(row_filter=condition).to_arrow().num_rows == 1, value
    assert table.scan(row_filter=IS_NULL("value")).to_arrow().num_rows == 2
    assert duckdb_rows(table, "SELECT count(*), count(value) FROM {rows}") == [(2 * len(values) + 2, 2 * len(values))]
    assert duckdb_rows(table, "SELECT count(*) FROM {rows} WHERE value IS NULL") == [(2,)]
    of_value = parse_transform(transform).transform(wanted)
    for task in table.scan().plan_files():
        rows = table.io.new_input(task.file.file_path)
        found = {of_value(internal(row)) for row in read_parquet(rows.location)}
        assert found == {task.file.partition[0]}, task.file.file_path


def internal(value: Any) -> Any:  # noqa: ANN401 - any value
    """Return a value as Iceberg's transforms take it."""
    match value:
        case datetime():
            return round((value.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
        case date():
            return (value - date(1970, 1, 1)).days
    return value


def read_parquet(location: str) -> list[Any]:
    """Return the column `value` of a file."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(location.removeprefix("file://")).read(["value"])["value"].to_pylist()  # type: ignore[no-any-return]


def test_a_partition_of_a_field_in_a_struct_and_of_two_columns(tmp_path: Path) -> None:
    """A null struct has a null field. Two fields of a specification may have the same source."""
    inside = i.StructType(i.NestedField(3, "x", i.IntegerType()))
    schema = Schema(i.NestedField(1, "s", inside), i.NestedField(2, "day", i.DateType()))
    names = (("identity", 3, "x"), ("year", 2, "y"), ("day", 2, "d"), ("void", 2, "v"))
    fields = [
        PartitionField(source, 1000 + at, parse_transform(how), name) for at, (how, source, name) in enumerate(names)
    ]
    create_table(tmp_path, schema, PartitionSpec(*fields))
    target = IcebergTarget(tmp_path)
    given = t.StructType(
        [
            t.StructField("partition", t.IntegerType()),
            t.StructField("s", t.StructType([t.StructField("x", t.IntegerType())])),
            t.StructField("day", t.DateType()),
        ]
    )
    values = [({"x": 1}, date(2020, 2, 3)), ({"x": None}, date(2020, 2, 4)), (None, None), ({"x": 1}, date(2020, 2, 3))]
    write(target, TypedFrame(given, [{"partition": 0, "s": s, "day": day} for s, day in values]))
    found = partitions(target)
    first, second = (date(2020, 2, day) - date(1970, 1, 1) for day in (3, 4))
    assert found == {(1, 50, first.days, None), (None, 50, second.days, None), (None, None, None, None)}
    assert target.table().scan(row_filter="s.x = 1").to_arrow().num_rows == 2


def test_a_partition_of_a_column_that_the_result_does_not_have(tmp_path: Path) -> None:
    """Its value is null."""
    target = partitioned(tmp_path, "identity", i.StringType())
    write(target, frame_of(t.IntegerType(), [1, 2], "number"))
    assert partitions(target, IS_NULL("value")) == {(None,)}


def test_floating_point_partitions_are_refused(tmp_path: Path) -> None:
    """NaN is not equal to itself, and zero has two forms."""
    target = partitioned(tmp_path, "identity", i.DoubleType())
    with pytest.raises(ConfigurationError, match="partitioned by identity of column 'value', which has type double"):
        target.sink().verdicts([part(0, 0, 1)])


def test_a_dropped_column_that_partitioned_an_older_table(tmp_path: Path) -> None:
    """A partition field of format version 1 stays as one that is always null. Pyiceberg needs its column."""
    schema = Schema(i.NestedField(1, "value", i.DoubleType()), i.NestedField(2, "number", i.IntegerType()))
    fields = (
        PartitionField(1, 1000, parse_transform("void"), "p"),
        PartitionField(2, 1001, parse_transform("identity"), "q"),
    )
    table = create_table(tmp_path, schema, PartitionSpec(*fields))
    target = IcebergTarget(tmp_path)
    rows = frame_of(t.IntegerType(), [1], "number")
    write(target, rows)
    with table.refresh().update_schema() as update:
        update.delete_column("value")
    with pytest.raises(ConfigurationError, match="partition field 'p' is of a column that was dropped"):
        write(target, rows, 1_000, 2_000)
    table.refresh().update_spec().remove_field("p").commit()
    write(target, rows, 1_000, 2_000)
    assert target.table().scan(row_filter="number = 1").to_arrow().num_rows == 2


def evolving(target: IcebergTarget, change: Any, frame: TypedFrame) -> None:  # noqa: ANN401 - a function of a table
    """Write a frame, and change the table after the rows were written."""
    sink, steps = target.sink(), list[str]()

    def reached(step: str) -> None:
        steps.append(step)
        if steps == ["written", "judged"]:
            change(target.table())

    sink._reached = reached  # type: ignore[method-assign]
    sink.write(frame, [part(0, 0, 1_000)], never)  # type: ignore[arg-type]


def renamed(table: Table) -> None:
    """Rename a column, add one with the old name, promote one and drop one."""
    with table.update_schema() as update:
        update.rename_column("value", "renamed")
    with table.update_schema() as update:
        update.add_column("value", i.StringType())
        update.update_column("number", i.LongType())


@pytest.mark.slow
def test_a_schema_that_changes_during_a_write(tmp_path: Path) -> None:
    """Files are read by field id, so a renamed column keeps its values, and a new one of that name is null."""
    schema = Schema(i.NestedField(1, "value", i.StringType()), i.NestedField(2, "number", i.IntegerType()))
    create_table(tmp_path, schema)
    target = IcebergTarget(tmp_path)
    fields = [("partition", t.IntegerType()), ("value", t.StringType()), ("number", t.IntegerType())]
    given = t.StructType([t.StructField(name, kind) for name, kind in fields])
    evolving(target, renamed, TypedFrame(given, [{"partition": 0, "value": "a", "number": 1}]))
    expected = [{"renamed": "a", "number": 1, "value": None}]
    assert target.table().scan().to_arrow().to_pylist() == expected
    assert duckdb_rows(target.table(), "SELECT renamed, number, value FROM {rows}") == [("a", 1, None)]
    write(target, TypedFrame(given, [{"partition": 0, "value": "b", "number": 2}]), 1_000, 1_001)
    found = target.table().scan(row_filter="number >= 2").to_arrow().to_pylist()
    assert found == [{"renamed": None, "number": 2, "value": "b"}]


def test_a_specification_that_changes_during_a_write(tmp_path: Path) -> None:
    """The files do not fit it, so the batch fails, and its next attempt succeeds."""
    target = partitioned(tmp_path, "identity", i.StringType())

    def change(table: Table) -> None:
        with table.update_spec() as update:
            update.add_field("number", "identity")

    rows = frame_of(t.StringType(), ["a", None])
    with pytest.raises(UnavailableError, match="was partitioned in another way"):
        evolving(target, change, rows)
    assert target.table().scan().to_arrow().num_rows == 0
    write(target, rows)
    assert partitions(target) == {("a", None), (None, None)}


@pytest.mark.slow
def test_many_files_within_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task closes files if many are open, writes a row group if it holds many rows, and closes a large file."""
    monkeypatch.setattr("marshal_dagster.sinks.iceberg.parquet_files._MOST_OPEN", 2)
    monkeypatch.setattr("marshal_dagster.sinks.iceberg.parquet_files._MOST_BUFFERED_BYTES", 40)
    schema = Schema(i.NestedField(1, "value", i.LongType()))
    spec = PartitionSpec(PartitionField(1, 1000, parse_transform("bucket[5]"), "p"))
    create_table(tmp_path, schema, spec, **{"write.target-file-size-bytes": "300"})
    target = IcebergTarget(tmp_path)
    write(target, frame_of(t.LongType(), list(range(100))))
    assert sorted(row["value"] for row in target.table().scan().to_arrow().to_pylist()) == list(range(100))
    assert len(list(tmp_path.glob("**/*.parquet"))) > 10
