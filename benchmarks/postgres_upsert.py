"""Upserts of `PostgresSink` compared with Spark's own writer (JDBC) and one INSERT ... ON CONFLICT, in one session."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from benchmarks import jdbc, services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.postgres_sink import jdbc_options
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import PostgresSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEY: Final = "concat(partition, ':', offset)"
_STORED: Final = "kafka_partition integer, kafka_offset bigint, key text, value text"
_MERGE: Final = """
    INSERT INTO merged SELECT DISTINCT ON (key) * FROM loaded ORDER BY key, kafka_offset DESC ON CONFLICT (key)
    DO UPDATE SET kafka_partition = excluded.kafka_partition, kafka_offset = excluded.kafka_offset,
        value = excluded.value
    """
"""As in our upsert, the row with the highest offset wins within a batch."""


@dataclass(slots=True)
class Sides:
    """Both ways to write rows over a table that has a row for each of their keys; each call returns rows per second."""

    messages: SinkInput
    dsn: str

    def ours(self) -> float:
        """Write with the sink, whose keys have rows of the range before."""
        sink = PostgresSink(self.dsn, "upserted", mode="upsert", keys=["key"])
        self._execute("DROP TABLE IF EXISTS upserted, marshal_ranges, marshal_taken_ranges")
        rows = self._rows("partition", "offset")
        sink.create_tables(rows.schema)
        earlier, later = self.messages.ranges("benchmark"), self.messages.ranges("benchmark", is_later=True)
        sink.write(rows, earlier, dict)
        again = rows.selectExpr("partition", f"offset + {self.messages.width} AS offset", "key", "value")
        began_s = time.perf_counter()
        sink.write(again, later, dict)
        return self._checked("upserted", began_s)

    def beside(self) -> float:
        """Write a table with Spark's writer, and merge it. A batch that is repeated would be merged again."""
        self._execute(
            "DROP TABLE IF EXISTS loaded, merged",
            f"CREATE TABLE merged ({_STORED}, UNIQUE (key))",
            f"CREATE UNLOGGED TABLE loaded ({_STORED})",
        )
        rows = self._rows("partition AS kafka_partition", "offset AS kafka_offset")
        options = jdbc_options(self.dsn, "loaded")
        rate = 0.0
        for _ in range(2):
            self._execute("TRUNCATE loaded")
            began_s = time.perf_counter()
            rows.write.format("jdbc").options(**options).mode("append").save()
            self._execute(_MERGE)
            rate = self._checked("merged", began_s)
        return rate

    def _rows(self, *also: str) -> "DataFrame":
        return self.messages.rows(*also, key=_KEY)

    def _execute(self, *statements: str) -> None:
        with psycopg.connect(self.dsn) as database:
            for statement in statements:
                database.execute(statement.encode())

    def _checked(self, table: str, began_s: float) -> float:
        took_s = time.perf_counter() - began_s
        with psycopg.connect(self.dsn) as database:
            found: Any = database.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()  # noqa: S608 - a constant
        return self.messages.rate(found[0], took_s)


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker and one database."""
    with (
        services.broker() as connection,
        services.postgres() as dsn,
        local_session(jdbc.jars()) as spark,
        Topics(connection) as data,
    ):
        cases = compare(spark, connection, data, sizes, lambda messages: Sides(messages, dsn), least=0.7)
    return Measured(cases, {"spark_master": "local[2]", "jdbc_driver": jdbc.POSTGRES})


BENCHMARK: Final = Benchmark(
    "postgres_upsert",
    "rows by key to a PostgreSQL table exactly once, compared with Spark's writer (JDBC) and INSERT ... ON CONFLICT",
    Sizes(most=100_000, alternations=5, warm_up=2),
    run,
)
