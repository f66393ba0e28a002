"""The outputs of the sinks: how they are made, opened by a process with Spark, and read without the sink."""

import os
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import DeltaSink, FileSink, IcebergSink, MariaDBSink, PostgresSink
from marshal_dagster.sinks.sink import Sink
from marshal_dagster.spark.session import spark_settings, start_session
from tests.iceberg_tables import NAME, catalog_name, catalog_properties, create_table, open_catalog
from tests.kafka_outputs import KafkaOutput
from tests.real.test_kill_points_sinks import Files, Keyed
from tests.session_settings import QUICK_PLANS, SMALL_DELTA, fetched_delta_settings
from tests.sink_conformance import Row
from tests.sink_outputs import TABLE, UPSERTS, MariaDBOutput, PostgresOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE_COLUMN = "source"
"""The column by which `IcebergSink` finds rows of older generations."""
FOREIGN = -1
"""The partition of the rows that another engine has written."""


class SinkKind(StrEnum):
    """The sinks of the library."""

    FILES = "files"
    POSTGRES = "postgres"
    MARIADB = "mariadb"
    DELTA = "delta"
    DELTA_UPSERT = "delta-upsert"
    ICEBERG = "iceberg"
    KAFKA = "kafka"


OF_DELTA = {SinkKind.DELTA, SinkKind.DELTA_UPSERT}


class OutputPlace(BaseModel):
    """An output: a folder, a schema in the database at `server`, or a topic of the cluster at `server`."""

    kind: SinkKind
    at: str
    server: str = ""

    def sink(self, session: "Callable[[], SparkSession]") -> Sink:
        """Return the sink as a process opens it."""
        match self.kind:
            case SinkKind.FILES:
                return FileSink(self.at, "json", session=session)
            case SinkKind.DELTA:
                return DeltaSink(self.at, session=session)
            case SinkKind.DELTA_UPSERT:
                return DeltaSink(self.at, session=session, **UPSERTS)
            case SinkKind.POSTGRES:
                return PostgresSink(self.server, TABLE, schema=self.at)
            case SinkKind.MARIADB:
                return MariaDBSink(f"{self.server}/{self.at}", TABLE)
            case SinkKind.KAFKA:
                return Keyed(KafkaConnection(bootstrap_servers=self.server), self.at, transaction_timeout_s=20)
            case SinkKind.ICEBERG:
                folder = Path(self.at)
                name, properties = catalog_name(folder), catalog_properties(folder)
                return IcebergSink(NAME, catalog=name, catalog_properties=properties, source_column=SOURCE_COLUMN)

    def rows(self) -> list[Row]:
        """Return all rows, sorted."""
        match self.kind:
            case SinkKind.FILES:
                return Files(Path(self.at)).rows()
            case SinkKind.DELTA | SinkKind.DELTA_UPSERT:
                if not Path(self.at, "_delta_log").exists():
                    return []
                frame = session().read.format("delta").load(self.at).select("partition", "offset", "value")
                return sorted(cast("Row", tuple(row)) for row in frame.collect())
            case SinkKind.POSTGRES:
                return PostgresOutput(self.server, self.at, create=False).rows()
            case SinkKind.MARIADB:
                return MariaDBOutput(self.server, self.at, create=False).rows()
            case SinkKind.KAFKA:
                return KafkaOutput(KafkaConnection(bootstrap_servers=self.server), self.at).rows(patience_s=60)
            case SinkKind.ICEBERG:
                found = open_catalog(Path(self.at)).load_table(NAME).scan().to_arrow().to_pylist()
                return sorted((row["partition"], row["offset"], row["value"]) for row in found)

    def add_foreign(self, number: int) -> bool:
        """Append one row as another engine does. Return False if there is no table yet."""
        columns = {"partition": [FOREIGN], "offset": [number], "value": ["foreign"], SOURCE_COLUMN: [None]}
        if self.kind in OF_DELTA:
            if not Path(self.at, "_delta_log").exists():
                return False
            types = "partition INT, offset BIGINT, value STRING"
            rows = [(FOREIGN, number, "foreign")]
            session().createDataFrame(rows, types).write.format("delta").mode("append").save(self.at)
            return True
        import pyarrow as pa

        table = open_catalog(Path(self.at)).load_table(NAME)
        table.append(pa.table(columns, schema=table.schema().as_arrow()))
        return True


def make_output(kind: SinkKind, folder: Path, server: Callable[[SinkKind], str]) -> OutputPlace:
    """Make an empty output in `folder`, or on the server of its kind."""
    match kind:
        case SinkKind.FILES | SinkKind.DELTA | SinkKind.DELTA_UPSERT:
            return OutputPlace(kind=kind, at=str(folder / "output"))
        case SinkKind.POSTGRES:
            return OutputPlace(kind=kind, at=PostgresOutput(server(kind), own_schema()).schema, server=server(kind))
        case SinkKind.MARIADB:
            return OutputPlace(kind=kind, at=MariaDBOutput(server(kind), own_schema()).schema, server=server(kind))
        case SinkKind.KAFKA:
            output = KafkaOutput(KafkaConnection(bootstrap_servers=server(kind)))
            return OutputPlace(kind=kind, at=output.topic, server=server(kind))
        case SinkKind.ICEBERG:
            from pyiceberg.schema import Schema
            from pyiceberg.types import IntegerType, LongType, NestedField, StringType

            lake = folder / f"lake_{os.urandom(4).hex()}"
            lake.mkdir()
            fields: list[Any] = [
                NestedField(1, "partition", IntegerType()),
                NestedField(2, "offset", LongType()),
                NestedField(3, "value", StringType()),
                NestedField(4, SOURCE_COLUMN, StringType()),
            ]
            create_table(lake, Schema(*fields))
            return OutputPlace(kind=kind, at=str(lake))


def session_settings(kind: SinkKind) -> dict[str, str]:
    """Return the settings of a small session for a sink."""
    delta = SMALL_DELTA | fetched_delta_settings() if kind in OF_DELTA else {}
    return {"spark.master": "local[2]", "spark.driver.memory": "512m", **QUICK_PLANS, **delta}


@cache
def session() -> "SparkSession":
    """Return a session of this process that reads Delta tables."""
    spark = start_session(spark_settings(app_name="reader", extra=session_settings(SinkKind.DELTA)))
    spark.sparkContext.setLogLevel("OFF")
    return spark
