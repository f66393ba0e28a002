"""`PostgresSink` compared with Spark's own database writer (JDBC), in one warm Spark session."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import sql

from benchmarks import jdbc, services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import PostgresSink


@dataclass(slots=True)
class Sides:
    """Both ways to write the same rows to an empty table; each call returns rows per second."""

    messages: SinkInput
    dsn: str
    _tables: Iterator[int]

    def ours(self) -> float:
        """Write with the sink: tasks copy to staging tables, from which one transaction moves rows and positions."""
        table, rows = f"ours_{next(self._tables)}", self.messages.rows("partition", "offset")
        sink = PostgresSink(self.dsn, table)
        sink.create_tables(rows.schema)
        ranges = self.messages.ranges("benchmark")
        began_s = time.perf_counter()
        sink.write(rows, ranges, dict)
        return self._checked(table, began_s)

    def beside(self) -> float:
        """Write with Spark's writer. If a batch fails, its rows stay, and the next batch writes them again."""
        table, rows = f"jdbc_{next(self._tables)}", self.messages.rows("partition", "offset AS kafka_offset")
        with psycopg.connect(self.dsn) as database:
            database.execute(
                sql.SQL("CREATE TABLE {} (partition integer, kafka_offset bigint, key text, value text)").format(
                    sql.Identifier(table)
                )
            )
        options = jdbc_options(self.dsn, table)
        began_s = time.perf_counter()
        rows.write.format("jdbc").options(**options).mode("append").save()
        return self._checked(table, began_s)

    def _checked(self, table: str, began_s: float) -> float:
        took_s = time.perf_counter() - began_s
        name = sql.Identifier(table)
        with psycopg.connect(self.dsn) as database:
            found: Any = database.execute(sql.SQL("SELECT count(*) FROM {}").format(name)).fetchone()
            database.execute(sql.SQL("DROP TABLE {}").format(name))
        return self.messages.rate(found[0], took_s)


def jdbc_options(dsn: str, table: str) -> dict[str, str]:
    """Return the options of Spark's writer. It sends many rows in one statement only with `reWriteBatchedInserts`."""
    known = psycopg.conninfo.conninfo_to_dict(dsn)
    url = (
        f"jdbc:postgresql://{known['host']}:{known['port']}/{known['dbname']}"
        f"?user={known['user']}&reWriteBatchedInserts=true"
    )
    return {"url": url, "driver": "org.postgresql.Driver", "dbtable": table, "batchsize": "10000"}


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker and one database."""
    with (
        services.broker() as connection,
        services.postgres() as dsn,
        local_session(jdbc.jars()) as spark,
        Topics(connection) as data,
    ):
        tables = count()
        cases = compare(spark, connection, data, sizes, lambda messages: Sides(messages, dsn, tables), least=0.7)
    return Measured(cases, {"spark_master": "local[2]", "jdbc_driver": jdbc.POSTGRES})


BENCHMARK: Final = Benchmark(
    "postgres_sink", "rows to a PostgreSQL table exactly once, compared with Spark's own writer (JDBC)", Sizes(), run
)
