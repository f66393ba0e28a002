"""The memory of the run's process and of its JVM while sinks write many rows, on a standalone cluster of two workers.

Each batch has a process and a session of its own, because their largest memory is that of all their work.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import jdbc, kafka_sink, mariadb_sink, postgres_sink, services
from benchmarks.batch import new_session
from benchmarks.harness import Benchmark, Case, Goal, Measured, take_turns
from benchmarks.sink_input import Sides, SinkInput, fill
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER_MEMORY: Final = "512m"
_KIB_PER_MIB: Final = 1024
_SINKS: Final = ("KafkaSink", "PostgresSink", "MariaDBSink")
_MOST_GROWTH: Final = 1.1


@dataclass(frozen=True, slots=True)
class Services:
    """Where the cluster and the outputs are."""

    master: str
    connection: KafkaConnection
    postgres: str
    mariadb: str

    def sides(self, sink: str, messages: SinkInput, data: Topics) -> Sides:
        """Return the ways to write the messages to the output of a sink."""
        match sink:
            case "KafkaSink":
                return kafka_sink.Sides(messages, data, _numbers)
            case "PostgresSink":
                return postgres_sink.Sides(messages, self.postgres, _numbers)
        return mariadb_sink.Sides(messages, self.mariadb, _numbers)


_numbers: Final = count(time.time_ns())
"""The numbers of batches, which no other process of the benchmark uses."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the records of the batches that are compared, and the number of rounds."""

    fewest: int = 100_000
    most: int = 10_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 1


@contextmanager
def _services(partitions: int) -> Iterator[Services]:
    """Start a broker, both databases and a cluster of two workers with one core each; stop them at the end."""
    from tests.real.spark_cluster import running_cluster

    with (
        services.broker() as connection,
        services.postgres() as dsn,
        services.mariadb() as server,
        tempfile.TemporaryDirectory(prefix="marshal-benchmark-", ignore_cleanup_errors=True) as folder,
        running_cluster(Path(folder)) as cluster,
    ):
        mariadb_sink.create_database(server)
        with Topics(connection) as data:
            data.create(kafka_sink.OUTPUT, partitions, 1)
        KafkaSink(connection, kafka_sink.OUTPUT).create_notes()
        yield Services(cluster.master, connection, dsn, server)


def _in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - the arguments of `work`
    """Return what `work` returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@contextmanager
def _session(master: str) -> "Iterator[SparkSession]":
    from tests.real.spark_cluster import prepare_driver

    prepare_driver()
    settings = {"spark.master": master, "spark.driver.memory": DRIVER_MEMORY}
    with new_session(jdbc.jars(), settings) as spark:
        yield spark


def run(sizes: Sizes) -> Measured:
    """Measure the memory of the driver with few and with many records."""
    with _services(sizes.partitions) as places:
        with Topics(places.connection) as data:
            fill(data, places.connection, sizes.partitions, sizes.most, sizes.record_bytes)
        cases = [case for sink in _SINKS for case in _memory_of(sink, places, sizes)]
    conditions = {
        "spark_master": "a standalone cluster of two workers with one core each",
        "spark.driver.memory": DRIVER_MEMORY,
    }
    return Measured(cases, conditions)


def _memory_of(sink: str, places: Services, sizes: Sizes) -> list[Case]:
    jvm: dict[int, list[float]] = {sizes.fewest: [], sizes.most: []}

    def python_mib(records: int) -> float:
        python, java = _in_new_process(_memory, places, sizes, sink, records)
        jvm[records].append(java)
        return float(python)

    many, few = take_turns(
        sizes.alternations, [lambda: python_mib(sizes.most), lambda: python_mib(sizes.fewest)], warm_up=0
    )
    named = f"{sink}, {sizes.most:,} rows beside {sizes.fewest:,}"
    return [
        Case(f"{named}: the run's Python", many, few, "MiB", Goal.RATIO_AT_MOST, _MOST_GROWTH),
        Case(f"{named}: the driver's JVM", jvm[sizes.most], jvm[sizes.fewest], "MiB", Goal.RATIO_AT_MOST, _MOST_GROWTH),
    ]


def _memory(places: Services, sizes: Sizes, sink: str, records: int) -> tuple[float, float]:
    """Write a batch, and return the largest resident memory of this process and of its JVM."""
    with _session(places.master) as spark, Topics(places.connection) as data:
        messages = SinkInput(spark, places.connection, sizes.partitions, records)
        places.sides(sink, messages, data).ours()
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to its JVM
        return _largest_mib("self"), _largest_mib(jvm.ProcessHandle.current().pid())


def _largest_mib(pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / _KIB_PER_MIB for line in lines if line.startswith("VmHWM:"))


BENCHMARK: Final = Benchmark(
    "sink_memory",
    "the driver's memory while a sink writes 10,000,000 rows, compared with 100,000",
    Sizes(),
    run,
)
