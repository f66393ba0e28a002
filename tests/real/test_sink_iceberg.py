"""The Iceberg sink with Spark's tasks, and tables that Spark reads, changes and rolls back beside it.

`tests/fast/test_sink_iceberg` and `test_sink_iceberg_values` test its rules and its types without Spark.
"""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg")

import pyarrow.parquet as pq
from pyiceberg import types as i
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import parse_transform
from pyspark.sql import Row
from pyspark.sql import functions as f
from pyspark.sql import types as t

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks import IcebergSink
from marshal_dagster.sinks.conformance import CASES, Case
from marshal_dagster.sinks.conformance.target import COLUMNS, deliver, never, part, rows_of
from tests.iceberg_tables import NAME, IcebergTarget, catalog_name, create_table, duckdb_rows
from tests.real.spark_fixtures import iceberg_jars
from tests.sink_outputs import TYPES
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ON_A_TABLE = ("duplicate", "subset_replayed_by_others", "ranges_without_rows", "foreign_rows", "two_groups_at_once")
SCHEMA = Schema(
    i.NestedField(1, "partition", i.IntegerType()),
    i.NestedField(2, "offset", i.LongType()),
    i.NestedField(3, "value", i.StringType()),
)


class SparkIcebergTarget(IcebergTarget):
    """A table that Spark's tasks write."""

    sink_class = IcebergSink

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        super().__init__(folder)
        self.spark = spark

    def frame(self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = COLUMNS) -> "DataFrame":
        """Return a frame of these rows in two Spark partitions."""
        assert self.spark is not None
        schema = t.StructType([t.StructField(name, TYPES[name]) for name in columns])
        return local_frame(self.spark, rows, schema).coalesce(2)


@pytest.fixture
def target(spark: "SparkSession", tmp_path: Path) -> SparkIcebergTarget:
    """Return an empty table."""
    create_table(tmp_path, SCHEMA)
    return SparkIcebergTarget(spark, tmp_path)


@dataclass(frozen=True)
class Lake:
    """The catalog in Spark that has the tables of the test's folder."""

    spark: "SparkSession"
    name: str

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement in which `{table}` stands for the table and `{lake}` for the catalog, and return its rows.

        Iceberg's catalog never ends its first transaction that reads from SQLite, so each statement has another one.
        """
        self.spark._jsparkSession.sessionState().catalogManager().reset()
        named = statement.format(lake=self.name, table=f"{self.name}.{NAME}")
        return [tuple(row) for row in self.spark.sql(named).collect()]


@pytest.fixture
def lake(spark: "SparkSession", tmp_path: Path) -> Lake:
    """Return the catalog of the test's folder."""
    if not iceberg_jars():
        pytest.skip("Iceberg has no runtime for this Spark")
    name = catalog_name(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")  # with which readers do not block writers
    settings = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        ".uri": f"jdbc:sqlite:{tmp_path}/catalog.db",
        ".warehouse": f"file://{tmp_path}/warehouse",
        ".jdbc.schema-version": "V1",
        ".cache-enabled": "false",
    }
    for key, value in settings.items():
        spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
    return Lake(spark, name)


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in ON_A_TABLE], ids=str)
def test_the_sink_conforms(case: Case, target: SparkIcebergTarget) -> None:
    """The sink passes those cases of the kit that involve Spark."""
    case.check(target)


class CrashError(BaseException):
    """The end of a process."""


def test_dying_at_each_step(target: SparkIcebergTarget) -> None:
    """Each process that dies repeats the batch of the one before it. In the end each row exists once."""
    deliver(target, "old", part(20, 0, 1), part(0, 0, 4))
    batch = [part(0, 4, 8), part(10, 0, 2)]
    before, read = target.found(), rows_of("new", *batch)
    for step in ("written", "judged", "committed"):
        sink = target.sink()

        def reached(at: str, step: str = step) -> None:
            if at == step:
                raise CrashError

        sink._reached = reached  # type: ignore[method-assign,assignment]
        with pytest.raises(CrashError):
            sink.write(target.frame(read), batch, never)
        assert target.found() == (sorted(before + read) if step == "committed" else before), step
    assert set(deliver(target, "again", *batch).skipped) == set(batch)
    assert target.found() == sorted(before + read)


def test_a_failing_task_leaves_the_table(target: SparkIcebergTarget) -> None:
    """Rows that other tasks have written are in no snapshot."""
    mine = [part(0, 0, 3), part(1, 0, 3)]
    fails = f.expr("if(partition = 1, raise_error('wrong'), value)")
    with pytest.raises(Exception, match="wrong"):
        target.sink().write(target.frame(rows_of("a", *mine)).withColumn("value", fails), mine, never)
    assert target.found() == []
    assert deliver(target, "b", *mine).taken == tuple(mine)


FIRST = datetime(1, 1, 1)  # noqa: DTZ001 - without a zone
GIVEN = (
    "true AS boolean, 7Y AS int, 8 AS long, float(1.5) AS float, double('NaN') AS double, 1.25BD AS decimal, "
    "date'1969-12-31' AS date, timestamp'1969-12-31 23:59:59.999999Z' AS tz, timestamp_ntz'0001-01-01' AS ntz, "
    "'\u00e9' AS string, x'00ff' AS binary, array(1, null) AS list, map('a', named_struct('x', 1)) AS map"
)
ALL_TYPES = Schema(
    i.NestedField(1, "boolean", i.BooleanType()),
    i.NestedField(2, "int", i.IntegerType(), required=True),
    i.NestedField(3, "long", i.LongType()),
    i.NestedField(4, "float", i.DoubleType()),
    i.NestedField(5, "double", i.DoubleType()),
    i.NestedField(6, "decimal", i.DecimalType(20, 2)),
    i.NestedField(7, "date", i.DateType()),
    i.NestedField(8, "tz", i.TimestamptzType()),
    i.NestedField(9, "ntz", i.TimestampType()),
    i.NestedField(10, "string", i.StringType()),
    i.NestedField(11, "binary", i.BinaryType()),
    i.NestedField(12, "list", i.ListType(13, i.LongType(), element_required=False)),
    i.NestedField(
        14,
        "map",
        i.MapType(15, i.StringType(), 16, i.StructType(i.NestedField(17, "x", i.LongType())), value_required=False),
    ),
)


def test_spark_and_duckdb_read_each_type(lake: Lake, tmp_path: Path) -> None:
    """They read the values that Spark's tasks have written to a partitioned table, and find them by conditions."""
    day = PartitionField(8, 1000, parse_transform("day"), "d")
    bucket = PartitionField(10, 1001, parse_transform("bucket[4]"), "b")
    create_table(tmp_path, ALL_TYPES, PartitionSpec(day, bucket))
    target = SparkIcebergTarget(lake.spark, tmp_path)
    given = lake.spark.sql(f"SELECT 0 AS partition, {GIVEN}")
    optional = [f"if(int = 0, {name}, null) AS {name}" for name in given.columns if name not in {"partition", "int"}]
    frame = given.unionByName(given.selectExpr("partition", "int", *optional))
    target.sink().write(frame, [part(0, 0, 9)], never)
    names = ", ".join(field.name for field in ALL_TYPES.fields if field.name not in {"double", "tz"})
    found = lake.sql(f"SELECT {names} FROM {{table}} ORDER BY string IS NULL")
    binary, entries = bytearray(b"\x00\xff"), {"a": Row(x=1)}
    decimal = Decimal("1.25")
    values = (True, 7, 8, 1.5, decimal, date(1969, 12, 31), FIRST, "\u00e9", binary, [1, None], entries)
    assert found == [values, (None, 7, *[None] * 9)]
    for condition in (
        "string = '\u00e9'",
        "tz = timestamp'1969-12-31 23:59:59.999999Z'",
        "isnan(double)",
        "string IS NULL",
        "tz IS NULL",
    ):
        assert lake.sql(f"SELECT count(*) FROM {{table}} WHERE {condition}") == [(1,)], condition
    query = "SELECT epoch_us(tz), isnan(double), ntz, map['a'].x, list FROM {rows} WHERE string = '\u00e9'"
    assert duckdb_rows(target.table(), query) == [(-1, True, FIRST, 1, [1, None])]


COMPACT = "CALL {lake}.system.rewrite_data_files(table => 'shop.orders', options => map('rewrite-all', 'true'))"


def test_spark_changes_the_table_between_batches(lake: Lake, target: SparkIcebergTarget) -> None:
    """Appends, a compaction, a deletion, an expiry and a rollback by Spark keep each row of the sink once."""
    deliver(target, "a", part(0, 0, 3), part(1, 0, 3))
    deliver(target, "a", part(0, 3, 6))
    lake.sql("INSERT INTO {table} VALUES (null, null, 'of another')")
    deliver(target, "b", part(0, 6, 9))
    lake.sql(COMPACT)
    assert deliver(target, "c", part(0, 6, 9, epoch=20)).skipped
    lake.sql("DELETE FROM {table} WHERE value = 'of another'")
    lake.sql("CALL {lake}.system.expire_snapshots(table => 'shop.orders', older_than => now(), retain_last => 1)")
    assert len(target.table().snapshots()) == 1
    assert deliver(target, "c", part(0, 6, 9, epoch=20)).skipped
    deliver(target, "c", part(1, 3, 6))
    expected = rows_of("a", part(0, 0, 6), part(1, 0, 3)) + rows_of("b", part(0, 6, 9)) + rows_of("c", part(1, 3, 6))
    assert target.found() == sorted(expected)
    assert sorted(lake.sql("SELECT * FROM {table}")) == sorted(expected)
    kept = target.table().current_snapshot()
    assert kept is not None
    deliver(target, "d", part(0, 9, 12))
    lake.sql(f"CALL {{lake}}.system.rollback_to_snapshot('shop.orders', {kept.snapshot_id})")
    with pytest.raises(SinkRejectedError, match="is at position 9, which is neither"):
        deliver(target, "e", part(0, 12, 15))
    deliver(target, "e", part(0, 9, 12, epoch=20))
    assert target.found() == sorted(expected + rows_of("e", part(0, 9, 12)))


def test_spark_changes_the_table_before_the_commit(lake: Lake, target: SparkIcebergTarget) -> None:
    """A commit that meets one of another engine judges again and commits the same files."""
    deliver(target, "a", part(0, 0, 3))
    changes = [
        "INSERT INTO {table} VALUES (null, null, 'of another')",
        COMPACT,
        "ALTER TABLE {table} ADD COLUMN more int",
    ]
    sink = target.sink()

    def reached(step: str) -> None:
        if step == "judged" and changes:
            lake.sql(changes.pop(0))

    sink._reached = reached  # type: ignore[method-assign]
    mine = part(0, 3, 6)
    assert sink.write(target.frame(rows_of("b", mine)), [mine], never).taken == (mine,)
    assert changes == []
    rows = lake.sql("SELECT partition, offset, value FROM {table} WHERE partition IS NOT NULL")
    assert sorted(rows) == rows_of("a", part(0, 0, 3)) + rows_of("b", mine)


def test_a_new_generation_replaces_rows_that_spark_has_moved(lake: Lake, tmp_path: Path) -> None:
    """After a compaction and a merge-on-read deletion by Spark. Files are in the order that Spark has set."""
    source = i.NestedField(4, "marshal_source", i.StringType())
    table = create_table(tmp_path, Schema(*SCHEMA.fields, source), None, **{"write.delete.mode": "merge-on-read"})
    with table.update_sort_order() as order:
        order.desc("offset", parse_transform("identity"), NullOrder.NULLS_LAST)
    target = SparkIcebergTarget(lake.spark, tmp_path)
    target.source_column = "marshal_source"
    deliver(target, "old", part(0, 0, 6), part(1, 0, 6))
    lake.sql(COMPACT)
    lake.sql("DELETE FROM {table} WHERE offset = 5")
    deliver(target, "new", part(0, 2, 4, generation=20, epoch=21))
    old = rows_of("old", part(0, 0, 2), part(0, 4, 5), part(1, 0, 5))
    expected = sorted(old + rows_of("new", part(0, 2, 4)))
    assert target.found() == expected
    assert sorted(lake.sql("SELECT partition, offset, value FROM {table}")) == expected
    files = lake.sql("SELECT file_path, sort_order_id FROM {table}.files WHERE content = 0")
    assert {order_id for _, order_id in files} == {1}
    for path, _ in files:
        offsets = pq.read_table(path.removeprefix("file:"))["offset"].to_pylist()
        assert offsets == sorted(offsets, reverse=True)
    assert sorted(duckdb_rows(target.table(), 'SELECT "partition", "offset", value FROM {rows}')) == expected


def test_spark_removes_files_of_dead_runs(lake: Lake, target: SparkIcebergTarget) -> None:
    """Iceberg's procedure deletes them after some days, and no file of the table."""
    deliver(target, "a", part(0, 0, 3))
    sink = target.sink()

    def reached(step: str) -> None:
        if step == "written":
            raise CrashError

    sink._reached = reached  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        sink.write(target.frame(rows_of("dead", part(0, 3, 6))), [part(0, 3, 6)], never)
    files = list(target.folder.glob("warehouse/**/*.parquet"))
    for path in files:
        os.utime(path, (0, 0))
    lake.sql("CALL {lake}.system.remove_orphan_files(table => 'shop.orders')")
    left = set(target.folder.glob("warehouse/**/*.parquet"))
    named = {file["file_path"].removeprefix("file://") for file in target.table().inspect.files().to_pylist()}
    assert {str(path) for path in left} == named
    assert len(left) < len(files)
    assert target.found() == rows_of("a", part(0, 0, 3))
