"""Memory of a run's Python process while a sink writes a small and a large batch."""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Case, Goal, Measured
from benchmarks.iceberg_sink import sink_for_new_table
from benchmarks.mariadb_sink import execute
from benchmarks.sink_input import SinkInput, fill
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import DeltaSink, FileSink, KafkaSink, MariaDBSink, PostgresSink, Sink
from marshal_dagster.sinks.delta.table import delta_settings

KIB_IN_MIB: Final = 1_024
HEAP: Final = "2g"
"""The heap of the JVM, which runs the tasks too and keeps the computed rows of the batch."""
OUTPUT: Final = "orders-upper"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the rows of the small and the large batch, and how many of the sinks are measured."""

    fewest: int = 100_000
    most: int = 10_000_000
    record_bytes: int = 200
    partitions: int = 4
    sinks: int = 6


def file_sink(_: SinkInput, place: Mapping[str, str]) -> Sink:
    """Return a sink for a folder of Parquet files."""
    return FileSink(f"{place['folder']}/files")


def delta_sink(messages: SinkInput, place: Mapping[str, str]) -> Sink:
    """Return a sink for a Delta table."""
    return DeltaSink(f"{place['folder']}/delta", session=lambda: messages.spark)


def iceberg_sink(_: SinkInput, place: Mapping[str, str]) -> Sink:
    """Return a sink for an Iceberg table."""
    return sink_for_new_table(place["folder"], "orders")


def kafka_sink(messages: SinkInput, _: Mapping[str, str]) -> Sink:
    """Return a sink for a topic."""
    return KafkaSink(messages.connection, OUTPUT, shared_by_groups=True)


def postgres_sink(messages: SinkInput, place: Mapping[str, str]) -> Sink:
    """Return a sink for a table of its own."""
    sink = PostgresSink(place["postgres"], f"rows_{messages.records}")
    sink.create_tables(messages.rows("partition", "offset").schema)
    return sink


def mariadb_sink(messages: SinkInput, place: Mapping[str, str]) -> Sink:
    """Return a sink for a database of its own."""
    database = f"rows_{messages.records}"
    execute(place["mariadb"], f"CREATE DATABASE {database}", database=None)
    sink = MariaDBSink(f"{place['mariadb']}/{database}", "orders")
    sink.create_tables(messages.rows("partition", "offset").schema)
    return sink


SINKS: Final[Mapping[str, Callable[[SinkInput, Mapping[str, str]], Sink]]] = {
    "FileSink": file_sink,
    "PostgresSink": postgres_sink,
    "MariaDBSink": mariadb_sink,
    "DeltaSink": delta_sink,
    "IcebergSink": iceberg_sink,
    "KafkaSink": kafka_sink,
}


def write(name: str, servers: str, partitions: int, records: int, place: Mapping[str, str]) -> float:
    """Write a batch in this process, and return the most memory that it had in MiB. Spark's memory is its JVM's."""
    connection = KafkaConnection(bootstrap_servers=servers, timeout_s=60)
    settings = delta_settings() if name == "DeltaSink" else {}
    with local_session(settings={**settings, "spark.driver.memory": HEAP}) as spark:
        messages = SinkInput(spark, connection, partitions, records)
        sink: Any = SINKS[name](messages, place)
        outcome = sink.write(messages.rows("partition", "offset"), messages.ranges(f"group {records}"), dict)
        written = sum(outcome.rows.values())
    if written != messages.wanted:
        raise RuntimeError(f"{name}: {written} rows were written, not {messages.wanted}")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_IN_MIB


def measure(name: str, connection: KafkaConnection, servers: Mapping[str, str], sizes: Sizes, records: int) -> float:
    """Write a batch of a sink in a process of its own, and return that process's memory in MiB."""
    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        place = {"folder": folder, **servers}
        arguments = [name, connection.bootstrap_servers, sizes.partitions, records, place]
        command = [sys.executable, "-m", __name__, json.dumps(arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def run(sizes: Sizes) -> Measured:
    """Measure the sinks one after the other with one broker and one database."""
    names = list(SINKS)[: sizes.sinks]
    with ExitStack() as stack, services.broker() as connection, Topics(connection) as data:
        servers = {}
        if postgres_sink in map(SINKS.get, names):
            servers["postgres"] = stack.enter_context(services.postgres())
        if mariadb_sink in map(SINKS.get, names):
            servers["mariadb"] = stack.enter_context(services.mariadb())
        data.create(OUTPUT, sizes.partitions, 1)
        KafkaSink(connection, OUTPUT).create_notes()
        fill(data, connection, sizes.partitions, sizes.most, sizes.record_bytes)
        cases = []
        for name in names:
            large, small = (
                measure(name, connection, servers, sizes, records) for records in (sizes.most, sizes.fewest)
            )
            cases.append(Case(f"{name}, {sizes.most:,} rows", [large], [small], "MiB", Goal.RATIO_AT_MOST, 1.2))
    return Measured(cases, {"spark_master": "local[2]"})


BENCHMARK: Final = Benchmark(
    "sink_memory", "memory of a run's process: a large batch, compared with a small one", Sizes(), run
)

if __name__ == "__main__":
    sys.stdout.write(f"{write(*json.loads(sys.argv[1]))}\n")
