"""Files of the Iceberg sink: their bounds hold for all rows, any value and any setting of the table can be written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
from pyiceberg import types as i
from pyiceberg.schema import Schema
from pyspark.sql import types as t

from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.iceberg.tasks import TaskResult, WritePlan, write_batches
from tests.iceberg_tables import IcebergTarget, TypedFrame, create_table

LONG = 5_000
"""Bytes: Parquet stores no bounds of a row group with values that are longer than 4,096 bytes."""


def write_arrays(target: IcebergTarget, given: t.DataType, batches: Sequence[pa.Array]) -> None:
    """Write batches of the column `value`, all in one task."""
    sink = target.sink()

    def run(frame: Any, done: Any, plan: WritePlan) -> list[TaskResult]:  # noqa: ANN401, ARG001 - as the sink calls it
        result = write_batches(plan, [batch_of(values) for values in batches])
        assert result is not None
        return [result]

    sink._run_tasks = run
    fields = [t.StructField("partition", t.IntegerType()), t.StructField("value", given)]
    sink.write(TypedFrame(t.StructType(fields), []), [part(0, 0, 1_000)], never)  # type: ignore[arg-type]


def batch_of(values: pa.Array) -> pa.RecordBatch:
    """Return a batch as a task gets it, of partition 0."""
    partitions = pa.array([0] * len(values), pa.int64())
    return pa.RecordBatch.from_arrays(
        [partitions, pa.nulls(len(values), pa.int64()), partitions.cast(pa.int32()), values],
        ["partition", "offset", "field_0", "field_1"],
    )


def one_column(folder: Path, kind: i.IcebergType, **properties: str) -> IcebergTarget:
    """Return a table with the column `value`."""
    create_table(folder, Schema(i.NestedField(1, "value", kind)), None, **properties)
    return IcebergTarget(folder)


@pytest.mark.parametrize("long_first", [True, False])
@pytest.mark.parametrize(
    ("given", "kind", "long", "short"),
    [
        (t.StringType(), i.StringType(), ["z" * LONG] * 8, "a"),
        (t.StringType(), i.StringType(), ["m", "z" * LONG] * 4, "n"),
        (t.BinaryType(), i.BinaryType(), [b"z" * LONG] * 8, b"a"),
    ],
    ids=["string", "one long value", "binary"],
)
def test_bounds_hold_for_row_groups_with_long_values(
    given: t.DataType, kind: i.IcebergType, long: Sequence[Any], short: str | bytes, *, long_first: bool, tmp_path: Path
) -> None:
    """Parquet has no bounds of a row group with a long value, so the file has none either."""
    target = one_column(tmp_path, kind, **{"write.parquet.row-group-limit": "8"})
    arrays = [pa.array(long), pa.array([short] * 8)]
    write_arrays(target, given, arrays if long_first else arrays[::-1])
    table = target.table()
    (file,) = table.inspect.files().to_pylist()
    assert len(file["split_offsets"]) == 2
    assert (file["lower_bounds"], file["upper_bounds"]) == ([], [])
    if given == t.StringType():
        assert table.scan(row_filter=f"value = '{long[0]}'").to_arrow().num_rows == long.count(long[0])


def test_row_groups_without_values_leave_the_bounds(tmp_path: Path) -> None:
    """Nulls, and NaNs, which are counted, have no bounds."""
    for folder, given, kind, value, none in (
        ("text", t.StringType(), i.StringType(), "a", None),
        ("number", t.DoubleType(), i.DoubleType(), 1.5, float("nan")),
    ):
        (tmp_path / folder).mkdir()
        target = one_column(tmp_path / folder, kind, **{"write.parquet.row-group-limit": "8"})
        arrow = pa.string() if none is None else pa.float64()
        write_arrays(target, given, [pa.array([none] * 8, arrow), pa.array([value] * 8, arrow)])
        (file,) = target.table().inspect.files().to_pylist()
        assert len(file["split_offsets"]) == 2
        assert [key for key, _ in file["lower_bounds"]] == [key for key, _ in file["upper_bounds"]] == [1]
