"""`MariaDBSink` compared with Spark's own database writer (JDBC), in one warm Spark session."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import pymysql

from benchmarks import jdbc, services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import MariaDBSink

_DATABASE: Final = "shop"


@dataclass(slots=True)
class Sides:
    """Both ways to write the same rows to an empty table; each call returns rows per second."""

    messages: SinkInput
    server: str
    _tables: Iterator[int]

    def ours(self) -> float:
        """Write with the sink: this process inserts into a temporary table, and one transaction moves the rows."""
        table, rows = f"ours_{next(self._tables)}", self.messages.rows("partition", "offset")
        sink = MariaDBSink(f"{self.server}/{_DATABASE}", table)
        sink.create_tables(rows.schema)
        ranges = self.messages.ranges("benchmark")
        began_s = time.perf_counter()
        sink.write(rows, ranges, dict)
        return self._checked(table, began_s)

    def beside(self) -> float:
        """Write with Spark's writer. If a batch fails, its rows stay, and the next batch writes them again."""
        table, rows = f"jdbc_{next(self._tables)}", self.messages.rows("partition", "offset AS kafka_offset")
        execute(
            self.server,
            f"CREATE TABLE {table} (`partition` int, kafka_offset bigint, `key` longtext, value longtext) "
            "CHARACTER SET utf8mb4",
        )
        options = jdbc_options(self.server, table)
        began_s = time.perf_counter()
        rows.write.format("jdbc").options(**options).mode("append").save()
        return self._checked(table, began_s)

    def _checked(self, table: str, began_s: float) -> float:
        took_s = time.perf_counter() - began_s
        ((found,),) = execute(self.server, f"SELECT count(*) FROM {table}")  # noqa: S608 - an own name
        execute(self.server, f"DROP TABLE {table}")
        return self.messages.rate(found, took_s)


def execute(server: str, statement: str, database: str | None = _DATABASE) -> list[tuple[Any, ...]]:
    """Execute a statement and return its rows."""
    place = urlsplit(server)
    with (
        pymysql.connect(
            host=place.hostname, port=place.port or 0, user=place.username, database=database, autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return list(cursor.fetchall())


def create_database(server: str) -> None:
    """Create the database of the tables."""
    execute(server, f"CREATE DATABASE {_DATABASE}", database=None)


def jdbc_options(server: str, table: str) -> dict[str, str]:
    """Return the options of Spark's writer. It quotes names as MariaDB does only for the scheme of MySQL."""
    place = urlsplit(server)
    url = (
        f"jdbc:mysql://{place.hostname}:{place.port}/{_DATABASE}"
        f"?permitMysqlScheme&user={place.username}&useBulkStmts=true"
    )
    return {"url": url, "driver": "org.mariadb.jdbc.Driver", "dbtable": table, "batchsize": "10000"}


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker and one database."""
    with (
        services.broker() as connection,
        services.mariadb() as server,
        local_session(jdbc.jars()) as spark,
        Topics(connection) as data,
    ):
        create_database(server)
        tables = count()
        cases = compare(spark, connection, data, sizes, lambda messages: Sides(messages, server, tables), least=0.5)
    return Measured(cases, {"spark_master": "local[2]", "jdbc_driver": jdbc.MARIADB})


BENCHMARK: Final = Benchmark(
    "mariadb_sink",
    "rows to a MariaDB table exactly once, compared with Spark's own writer (JDBC)",
    Sizes(alternations=3, warm_up=1),
    run,
)
