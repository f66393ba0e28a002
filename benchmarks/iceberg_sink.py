"""`IcebergSink` compared with Spark's own append to an Iceberg table, in one warm Spark session."""

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import IcebergSink
from marshal_dagster.spark.connector import fetch_connector
from marshal_dagster.spark.packages import iceberg_package

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

_SQLITE: Final = "org.xerial:sqlite-jdbc:3.46.1.3"
"""The driver with which Spark's catalog uses the same database as the sink's."""


NAMESPACE: Final = "shop"


def catalog_properties(folder: Path | str) -> dict[str, str]:
    """Return the settings of pyiceberg for a catalog in this folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def load_catalog(folder: Path | str) -> "Catalog":
    """Open the catalog in this folder."""
    from pyiceberg import catalog

    return catalog.load_catalog("benchmark", **catalog_properties(folder))


def sink_for_new_table(folder: Path | str, name: str) -> IcebergSink:
    """Create a table for the rows of `SinkInput`, and return its sink."""
    from pyiceberg.schema import Schema
    from pyiceberg.types import IntegerType, LongType, NestedField, StringType

    catalog = load_catalog(folder)
    catalog.create_namespace_if_not_exists(NAMESPACE)
    columns = {"partition": IntegerType(), "offset": LongType(), "key": StringType(), "value": StringType()}
    fields = [NestedField(at, column, kind) for at, (column, kind) in enumerate(columns.items(), 1)]
    catalog.create_table(f"{NAMESPACE}.{name}", Schema(*fields))
    return IcebergSink(f"{NAMESPACE}.{name}", catalog="benchmark", catalog_properties=catalog_properties(folder))


@dataclass(slots=True)
class Sides:
    """Both ways to append the same rows to an empty table; each call returns rows per second."""

    messages: SinkInput
    folder: Path
    _tables: Iterator[int]

    def ours(self) -> float:
        """Append with the sink: tasks write the files by pyarrow, and one commit adds them and the positions."""
        sink = sink_for_new_table(self.folder, table := f"ours_{next(self._tables)}")
        rows = self.messages.rows("partition", "offset")
        ranges = self.messages.ranges("benchmark")
        began_s = time.perf_counter()
        sink.write(rows, ranges, dict)
        took_s = time.perf_counter() - began_s
        return self.messages.rate(load_catalog(self.folder).load_table(f"{NAMESPACE}.{table}").scan().count(), took_s)

    def beside(self) -> float:
        """Append with Spark and Iceberg's own runtime. A batch that is repeated after its commit is there twice."""
        table, rows = f"benchmark.shop.spark_{next(self._tables)}", self.messages.rows("partition", "offset")
        spark = self.messages.spark
        spark.sql(f"CREATE TABLE {table} (partition int, offset bigint, key string, value string) USING iceberg")
        began_s = time.perf_counter()
        rows.writeTo(table).append()
        took_s = time.perf_counter() - began_s
        return self.messages.rate(spark.table(table).count(), took_s)


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker."""
    runtime = iceberg_package()
    jars = ",".join(map(str, [*fetch_connector(runtime), *fetch_connector(_SQLITE)]))
    with (
        tempfile.TemporaryDirectory() as folder,
        services.broker() as connection,
        local_session(jars) as spark,
        Topics(connection) as data,
    ):
        with closing(sqlite3.connect(f"{folder}/spark.db")) as database:
            database.execute("PRAGMA journal_mode=WAL")  # with which Spark's readers do not block its writers
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            ".uri": f"jdbc:sqlite:{folder}/spark.db",
            ".jdbc.schema-version": "V1",
            ".warehouse": f"file://{folder}/spark",
            ".cache-enabled": "false",
        }
        for key, value in settings.items():
            spark.conf.set(f"spark.sql.catalog.benchmark{key}", value)
        spark.sql("CREATE NAMESPACE benchmark.shop")
        tables = count()
        cases = compare(
            spark, connection, data, sizes, lambda messages: Sides(messages, Path(folder), tables), least=0.9
        )
    return Measured(cases, {"spark_master": "local[2]", "iceberg": runtime})


BENCHMARK: Final = Benchmark(
    "iceberg_sink", "rows to an Iceberg table exactly once, compared with Spark's own append", Sizes(), run
)
