"""A claimed batch, compared with the bare connector on the same offset ranges, in one warm Spark session."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import services
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate, median, rounded
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.spark.session import spark_settings, start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COORDINATION_TOPIC: Final = "__marshal"
TOPIC: Final = "orders"
SHARE_BATCH: Final = 6
"""Factor by which the long batch is larger. It lasts about ten seconds, and coordination should be a small share."""
OUR_CONSUMER: Final = {"kafka.max.poll.records": "10000", "kafka.fetch.max.wait.ms": "1"}
"""The library's options for the connector's consumer; a test checks that they are equal."""
SAME_CONSUMERS: Final = {"kafka.group.id": "benchmark"}
"""With this, all reads share the same cached consumers, as the library's reads of one incarnation of a topic do."""
DEFAULT_CONSUMER: Final[Mapping[str, str]] = {}
_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp")

Process = Callable[["DataFrame"], int]
"""Processes a data frame and returns the number of its records."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: records of a batch and their bytes, partitions, rounds, and warm-up rounds that do not count."""

    records: int = 1_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 7
    warm_up: int = 4
    long_batches: int = 5


@dataclass(slots=True)
class Batches:
    """Claims batches of the same size, each as a group of its own that has processed a batch before."""

    spark: "SparkSession"
    connection: KafkaConnection
    log: KafkaLog
    data: Topics
    partitions: int
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The ranges of the last batch: offsets [start, end) by partition."""
    coordination_s: float = 0.0
    """Seconds that the last batch spent waiting and committing."""
    _groups: Iterator[int] = field(default_factory=count)

    def run_s(self, records: int, process: Process) -> float:
        """Process one claimed batch of `records` records, and return the seconds from the claim to the release."""
        delivery = self._group_at_work()
        began_s = time.perf_counter()
        with delivery.claimed_batch(BatchRequest(topic=TOPIC, max_records=records)) as batch:
            processed = process(batch.read(self.spark))
        took_s = time.perf_counter() - began_s
        if not batch.committed or processed != records:
            raise RuntimeError(f"{processed} of {records} records were processed, committed: {batch.committed}")
        self.ranges = {range_.partition: (range_.start, range_.end) for range_ in batch.ranges}
        self.coordination_s = batch.phases.waiting_s + batch.phases.committing_s
        return took_s

    def bare_s(self, process: Process, consumer: Mapping[str, str]) -> float:
        """Process the ranges of the last batch with the connector alone, and return the seconds."""
        began_s = time.perf_counter()
        processed = process(self._bare_frame(consumer))
        took_s = time.perf_counter() - began_s
        if processed != sum(end - start for start, end in self.ranges.values()):
            raise RuntimeError(f"{processed} records were processed of the ranges {self.ranges}")
        return took_s

    def _group_at_work(self) -> BatchSession:
        """Return the session of a new group that has settings and positions, from one small batch."""
        delivery = BatchSession(
            log=self.log,
            data=self.data,
            connection=self.connection,
            group=f"benchmark-{next(self._groups)}",
            client="benchmark",
            run_id="3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11",
            settings=GroupSettings(),
        )
        with delivery.claimed_batch(BatchRequest(topic=TOPIC, max_records=self.partitions)) as batch:
            _require_work(batch)
            batch.begin_processing()
        return delivery

    def _bare_frame(self, consumer: Mapping[str, str]) -> "DataFrame":
        starts = {str(number): start for number, (start, _) in self.ranges.items()}
        ends = {str(number): end for number, (_, end) in self.ranges.items()}
        return (
            self.spark.read.format("kafka")
            .options(**consumer)
            .option("kafka.bootstrap.servers", self.connection.bootstrap_servers)
            .option("assign", json.dumps({TOPIC: list(self.ranges)}))
            .option("startingOffsets", json.dumps({TOPIC: starts}))
            .option("endingOffsets", json.dumps({TOPIC: ends}))
            .load()
        )


def _require_work(batch: ClaimedBatch) -> None:
    if batch.idle is not None:
        raise RuntimeError(f"nothing to do: {batch.idle.text}")


def run(sizes: Sizes) -> Measured:
    """Measure counting, writing Parquet, and the share of coordination in a longer batch."""
    with services.broker() as connection, scratch() as folder, local_session() as spark:
        _load(connection, sizes)
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        with Topics(connection) as data:
            log = KafkaLog(connection, COORDINATION_TOPIC)
            batches = Batches(spark, connection, log, data, sizes.partitions)
            counted = _throughput(batches, sizes, _count)
            to_parquet = _parquet_into(spark, folder)
            counted_alike = _throughput(batches, sizes, _count, OUR_CONSUMER | SAME_CONSUMERS)
            written = _throughput(batches, sizes, to_parquet)
            coordination, whole = _share(batches, sizes, to_parquet)
            log.close()
    return Measured(
        [
            Case("read and count", *counted, "records/s", Goal.RATIO_AT_LEAST, 0.95),
            Case("read and count, connector tuned as ours", *counted_alike, "records/s", Goal.RATIO_AT_LEAST, 0.95),
            Case("read and write Parquet", *written, "records/s", Goal.RATIO_AT_LEAST, 0.95),
            Case("coordination in a batch of some ten seconds", coordination, whole, "s", Goal.RATIO_AT_MOST, 0.01),
        ],
        {
            "spark_master": "local[2]",
            "long_batch_records": sizes.records * SHARE_BATCH,
            "long_batch_s": rounded(median(whole)),
        },
    )


def _throughput(
    batches: Batches, sizes: Sizes, process: Process, consumer: Mapping[str, str] = DEFAULT_CONSUMER
) -> tuple[Sequence[float], Sequence[float]]:
    """Compare claimed batches with the bare connector, in records per second, from the claim to the release."""
    return alternate(
        sizes.alternations,
        lambda: sizes.records / batches.run_s(sizes.records, process),
        lambda: sizes.records / batches.bare_s(process, consumer),
        warm_up=sizes.warm_up,
    )


def _share(batches: Batches, sizes: Sizes, process: Process) -> tuple[list[float], list[float]]:
    """Return the seconds of coordination and the seconds of the whole batch, for the same batches."""
    coordination, whole = [], []
    for _ in range(sizes.long_batches):
        whole.append(batches.run_s(sizes.records * SHARE_BATCH, process))
        coordination.append(batches.coordination_s)
    return coordination, whole


def _count(frame: "DataFrame") -> int:
    return frame.count()


def _parquet_into(spark: "SparkSession", folder: Path) -> Process:
    """Return a function that writes the columns that both sides have, and counts the records by the files' footers."""
    numbers = count()

    def write(frame: "DataFrame") -> int:
        target = folder / str(next(numbers))
        frame.select(*_COLUMNS).write.parquet(str(target))
        records = spark.read.parquet(str(target)).count()
        shutil.rmtree(target)
        return records

    return write


def _load(connection: KafkaConnection, sizes: Sizes) -> None:
    """Write the records of the longest batch, and those of the small batch before it."""
    with Topics(connection) as topics:
        topics.create(TOPIC, sizes.partitions, 1)
    total = sizes.records * SHARE_BATCH + sizes.partitions
    width = sizes.record_bytes
    services.load(
        connection,
        TOPIC,
        ((number % sizes.partitions, f"order {number}".encode().ljust(width)) for number in range(total)),
    )


@contextmanager
def scratch() -> Iterator[Path]:
    """Provide a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        yield Path(folder)


@contextmanager
def local_session(jars: str = "", settings: Mapping[str, str] | None = None) -> Iterator["SparkSession"]:
    """Start a session with two cores, and stop it at the end; `jars` are further paths, separated by commas."""
    with new_session(jars, {"spark.master": "local[2]", **(settings or {})}) as session:
        yield session


@contextmanager
def new_session(jars: str, settings: Mapping[str, str]) -> Iterator["SparkSession"]:
    """Start a session with these settings, and stop it at the end."""
    session = start_session(spark_settings(app_name="benchmark", extra={"spark.jars": jars, **settings}))
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


BENCHMARK: Final = Benchmark(
    "batch", "a claimed batch, compared with the bare connector on the same ranges", Sizes(), run
)
