"""Files of the Iceberg sink: their bounds hold for all rows, any value and any setting of the table can be written."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
from pyarrow.parquet import ParquetFile
from pyiceberg import types as i
from pyiceberg.catalog.rest.auth import OAuth2AuthManager
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.update import RemoveSnapshotRefUpdate
from pyiceberg.transforms import parse_transform
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.iceberg.table import IcebergTable
from marshal_dagster.sinks.iceberg.tasks import TaskResult, WritePlan, write_batches
from tests.iceberg_tables import IcebergTarget, TypedFrame, create_table

LONG = 5_000
"""Bytes: Parquet stores no bounds of a row group with values that are longer than 4,096 bytes."""


def write_arrays(target: IcebergTarget, given: t.DataType, batches: Sequence[pa.Array]) -> None:
    """Write batches of the column `value`, all in one task."""
    write_batches_of(target, given, [batch_of(values) for values in batches])


def write_batches_of(target: IcebergTarget, given: t.DataType, batches: Sequence[pa.RecordBatch]) -> None:
    """Write batches, as a task gets them, in one task."""
    sink = target.sink()

    def run(frame: Any, done: Any, plan: WritePlan) -> list[TaskResult]:  # noqa: ANN401, ARG001 - as the sink calls it
        result = write_batches(plan, batches)
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


DAYS = pa.array([-1_000_000, 5_000_000], pa.int32()).cast(pa.date32())
MOMENTS = pa.array([-(10**17), 10**18], pa.int64()).cast(pa.timestamp("us"))
"""The years -768 and 15659, and -1199 and 33658, which Spark has, but no date of Python."""


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


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (t.DateType(), i.DateType(), DAYS),
        (t.TimestampNTZType(), i.TimestampType(), MOMENTS),
        (t.TimestampType(), i.TimestamptzType(), MOMENTS.cast(pa.timestamp("us", "UTC"))),
        (t.StringType(), i.StringType(), pa.array(["a" * 15 + "\ud7ff" + "b", "A"])),
    ],
    ids=["date", "timestamp_ntz", "timestamp", "string before the surrogates"],
)
def test_values_without_bounds_are_written(
    given: t.DataType, kind: i.IcebergType, values: pa.Array, tmp_path: Path
) -> None:
    """The file has counts, but no bounds."""
    target = one_column(tmp_path, kind)
    write_arrays(target, given, [values])
    (file,) = target.table().inspect.files().to_pylist()
    assert (file["lower_bounds"], file["upper_bounds"]) == ([], [])
    assert (file["value_counts"], file["null_value_counts"]) == ([(1, 2)], [(1, 0)])
    assert target.table().scan().to_arrow()["value"].combine_chunks().cast(values.type) == values


def partitioned(folder: Path, transform: str, kind: i.IcebergType) -> IcebergTarget:
    """Return a table that is partitioned by its only column `value`."""
    spec = PartitionSpec(PartitionField(1, 1000, parse_transform(transform), "p"))
    create_table(folder, Schema(i.NestedField(1, "value", kind)), spec)
    return IcebergTarget(folder)


@pytest.mark.parametrize(
    ("transform", "given", "kind", "values", "expected"),
    [
        ("year", t.DateType(), i.DateType(), DAYS, {-2738, 13689}),
        ("month", t.DateType(), i.DateType(), DAYS, {-32855, 164274}),
        ("year", t.TimestampNTZType(), i.TimestampType(), MOMENTS, {-3169, 31688}),
        ("month", t.TimestampNTZType(), i.TimestampType(), MOMENTS, {-38027, 380264}),
    ],
)
def test_partitions_of_years_that_python_does_not_have(
    transform: str, given: t.DataType, kind: i.IcebergType, values: pa.Array, *, expected: set[int], tmp_path: Path
) -> None:
    """The numbers of years and months are those of Iceberg's calendar, also before the year 1."""
    target = partitioned(tmp_path, transform, kind)
    write_arrays(target, given, [values])
    files: list[Any] = [task.file for task in target.table().scan().plan_files()]
    assert {file.partition[0] for file in files} == expected
    assert target.table().scan().to_arrow().num_rows == 2


EDGES = pa.array([-719_162, 2_932_896, None], pa.int32()).cast(pa.date32())
FIRST_US, LAST_US = -719_162 * 86_400_000_000, 2_932_897 * 86_400_000_000 - 1
EDGE_MOMENTS = pa.array([FIRST_US, LAST_US, None], pa.int64()).cast(pa.timestamp("us"))


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize(
    ("transform", "given", "kind", "edges"),
    [
        ("day", t.DateType(), i.DateType(), EDGES),
        ("identity", t.DateType(), i.DateType(), EDGES),
        ("identity", t.TimestampNTZType(), i.TimestampType(), EDGE_MOMENTS),
        ("day", t.TimestampType(), i.TimestamptzType(), EDGE_MOMENTS.cast(pa.timestamp("us", "UTC"))),
        ("hour", t.TimestampNTZType(), i.TimestampType(), EDGE_MOMENTS),
    ],
)
def test_dates_that_cannot_be_committed_are_refused(
    transform: str, given: t.DataType, kind: i.IcebergType, edges: pa.Array, *, step: int, tmp_path: Path
) -> None:
    """Pyiceberg converts such a partition to a date of Python, which has the years 1 to 9999 only."""
    target = partitioned(tmp_path, transform, kind)
    number = pa.int32() if given == t.DateType() else pa.int64()
    edge = edges[0 if step < 0 else 1].cast(number).as_py()
    with pytest.raises(SinkRejectedError, match="column 'value': its year is not within 1 to 9999"):
        write_arrays(target, given, [pa.array([0, None, edge + step], number).cast(edges.type)])
    write_arrays(target, given, [edges])
    assert target.table().scan().to_arrow()["value"].null_count == 1
    assert target.table().scan().to_arrow().num_rows == 3


@pytest.mark.parametrize(("kind", "number", "least"), [("int", pa.int32(), -(2**31)), ("long", pa.int64(), -(2**63))])
def test_integers_whose_truncation_does_not_fit_are_refused(
    kind: str, number: pa.DataType, least: int, tmp_path: Path
) -> None:
    """Pyiceberg computes a number of more bits, and then fails to commit it without naming a row."""
    given, table_type = (t.IntegerType(), i.IntegerType()) if kind == "int" else (t.LongType(), i.LongType())
    target = partitioned(tmp_path, "truncate[10]", table_type)
    edge = -(-least // 10) * 10
    with pytest.raises(SinkRejectedError, match="column 'value': the table is partitioned by its truncation"):
        write_arrays(target, given, [pa.array([0, None, edge - 1], number)])
    write_arrays(target, given, [pa.array([edge, -least - 1, None], number)])
    assert target.table().scan(row_filter=f"value = {edge}").to_arrow()["value"].to_pylist() == [edge]


@pytest.mark.parametrize("is_signed", [False, True])
def test_tasks_do_not_get_the_login_of_a_catalog(*, is_signed: bool) -> None:
    """A login has secrets and locks. If the catalog signs requests, tasks get the header that it accepts."""
    manager = OAuth2AuthManager("me", "secret-1", "http://localhost/token", expires_in=60)
    signed = {"s3.signer": "S3V4RestSigner", "uri": "http://localhost"} if is_signed else {}
    storage = {"s3.access-key-id": "key", **signed}
    login = {"auth": {"oauth2": {"client_secret": "secret-1"}}, "auth.manager": manager, "credential": "me:secret-1"}
    manager.token_provider.get_token = lambda: "token-1"  # type: ignore[method-assign]
    table: Any = SimpleNamespace(io=SimpleNamespace(properties=storage | login))
    sent = pickle.dumps(IcebergTable(table, "main", "output").io_properties)
    header = {"header.Authorization": "Bearer token-1"} if is_signed else {}
    assert pickle.loads(sent) == storage | header  # noqa: S301 - of this test


@pytest.mark.parametrize("what", ["value", "partition"])
def test_refused_rows_leave_no_files(what: str, tmp_path: Path) -> None:
    """The files of the rows before a refused one are removed, also those that the task had not completed."""
    create_table(tmp_path, Schema(i.NestedField(1, "value", i.StringType(), required=True)))
    good = batch_of(pa.array(["a"]))
    bad = batch_of(pa.array([None], pa.string()))
    if what == "partition":
        bad = good.set_column(0, "partition", pa.nulls(1, pa.int64()))
    with pytest.raises(SinkRejectedError):
        write_batches_of(IcebergTarget(tmp_path), t.StringType(), [good, bad])
    assert not list(tmp_path.glob("**/*.parquet"))


@pytest.mark.parametrize("codec", ["uncompressed", "snappy", "lz4", "gzip", "brotli", "ZSTD"])
def test_codecs(codec: str, tmp_path: Path) -> None:
    """A level is left out for a codec that has none."""
    names = {"write.parquet.compression-codec": codec, "write.parquet.compression-level": "3"}
    target = one_column(tmp_path, i.StringType(), **names)
    write_arrays(target, t.StringType(), [pa.array(["a"])])
    (path,) = tmp_path.glob("**/*.parquet")
    assert ParquetFile(path).metadata.row_group(0).column(0).compression == codec.upper()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("write.parquet.compression-codec", "lzo"),
        ("write.parquet.compression-codec", "other"),
        ("write.parquet.compression-level", "high"),
        ("write.target-file-size-bytes", "1GB"),
    ],
)
def test_properties_that_cannot_be_used_are_refused(name: str, text: str, tmp_path: Path) -> None:
    """The error comes before the frame is evaluated."""
    target = one_column(tmp_path, i.StringType(), **{name: text})
    with pytest.raises(ConfigurationError, match="do not allow pyarrow to write"):
        write_arrays(target, t.StringType(), [])


def test_the_settings_of_the_storage_are_not_shown(tmp_path: Path) -> None:
    """They may have credentials, and the text of a plan could get into an error or a log."""
    metadata = create_table(tmp_path, Schema(i.NestedField(1, "value", i.StringType()))).metadata
    plan = WritePlan(metadata, {"s3.secret-access-key": "secret-1"}, "attempt", (), case_sensitive=True)
    assert "secret-1" not in repr(plan)


def test_a_replaced_table_has_no_branch_before_its_first_row(tmp_path: Path) -> None:
    """Spark's REPLACE TABLE keeps the snapshots, but no branch has them. The error names the next step."""
    target = one_column(tmp_path, i.StringType())
    write_arrays(target, t.StringType(), [pa.array(["a"])])
    table = target.table()
    removed = RemoveSnapshotRefUpdate.model_validate({"ref-name": "main"})
    table.catalog.commit_table(table, (), (removed,))
    with pytest.raises(SinkRejectedError, match=r"no branch 'main'\. Write any row with the engine that replaced"):
        write_arrays(target, t.StringType(), [pa.array(["b"])])
