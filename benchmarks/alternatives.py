"""A claimed batch that converts JSON to Parquet, compared with what a user would write without this library.

The sides are: a claimed batch (at least once, and effectively once), the bare connector on the same ranges, Structured
Streaming (`availableNow` with a checkpoint), and a loop around a Kafka consumer in Python. Before each round new
messages arrive. Then each side processes only these, from its own position. The sides take turns at going first.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, TopicPartition

from benchmarks import bare, services
from benchmarks.batch import COORDINATION_TOPIC, local_session, scratch
from benchmarks.harness import Benchmark, Case, Goal, Measured, steps_of_ten, take_turns_to_begin
from marshal_dagster.batches import BatchRequest, BatchSession
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings
from marshal_dagster.sinks import FileSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA: Final = "id LONG, customer STRING, amount DOUBLE, note STRING"
_AT_LEAST_ONCE: Final = "at least once"
_EFFECTIVELY_ONCE: Final = "effectively once"
_BARE: Final = "bare connector"
_STREAMING: Final = "streaming"
_LOOP: Final = "loop"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the messages of the smallest and the largest batch (in steps of factor 10), and the number of rounds.

    The largest batch is measured in `alternations` rounds, a batch a tenth as large in twice as many, and so on. The
    loop in Python is left out of batches with more than `loop_records` messages.
    """

    fewest: int = 10_000
    most: int = 1_000_000
    loop_records: int = 1_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 5
    warm_up: int = 2


@dataclass(slots=True)
class Feed:
    """A data topic in which messages arrive, the same number in each partition."""

    connection: KafkaConnection
    topic: str
    sizes: Sizes
    records: int
    """Messages that arrive in each round; a multiple of the number of partitions."""
    arrived: int = 0

    def __post_init__(self) -> None:
        """Create the topic."""
        with Topics(self.connection) as topics:
            topics.create(self.topic, self.sizes.partitions, 1)

    def arrive(self) -> None:
        """Write the next messages."""
        numbers = range(self.arrived, self.arrived + self.records)
        width = self.sizes.record_bytes
        services.load(
            self.connection,
            self.topic,
            ((number % self.sizes.partitions, _message(number, width)) for number in numbers),
        )
        self.arrived += self.records

    def newest(self) -> dict[int, tuple[int, int]]:
        """Return the offsets [start, end) of the messages that arrived last, by partition."""
        end, width = self.arrived // self.sizes.partitions, self.records // self.sizes.partitions
        return dict.fromkeys(range(self.sizes.partitions), (end - width, end))


@dataclass(frozen=True, slots=True)
class Stage:
    """What all sizes share: the Spark session, the broker, and the output folder."""

    spark: "SparkSession"
    connection: KafkaConnection
    data: Topics
    folder: Path
    closing: ExitStack
    """Closes the logs that the sides opened."""


@dataclass(slots=True)
class Sides:
    """The ways to process the newest messages; each call returns the seconds that it took."""

    stage: Stage
    feed: Feed
    folder: Path
    _rounds: dict[str, int] = field(default_factory=dict)

    def by_name(self) -> dict[str, Callable[[], float]]:
        """Return each way by its name."""
        at_least_once, effectively_once = self._delivery(_AT_LEAST_ONCE), self._delivery(_EFFECTIVELY_ONCE)
        sink = FileSink(self.folder / "sink")
        servers = self.feed.connection.bootstrap_servers

        def claimed_s() -> float:
            began_s = time.perf_counter()
            with at_least_once.claimed_batch(BatchRequest(topic=self.feed.topic)) as batch:
                _parsed(batch.read(self.stage.spark)).write.parquet(self._target(_AT_LEAST_ONCE))
            return self._checked(_AT_LEAST_ONCE, began_s, committed=batch.committed)

        def claimed_once_s() -> float:
            began_s = time.perf_counter()
            with effectively_once.claimed_batch(BatchRequest(topic=self.feed.topic), sink) as batch:
                written = batch.write(_parsed(batch.read(self.stage.spark), "partition", "offset"))
            took_s = time.perf_counter() - began_s
            if not batch.committed or sum(written.rows.values()) != self.feed.records:
                raise RuntimeError(f"{written.rows} rows were written of {self.feed.records}")
            return took_s

        def bare_s() -> float:
            began_s = time.perf_counter()
            _parsed(self._bare_frame()).write.parquet(self._target(_BARE))
            return self._checked(_BARE, began_s)

        def streaming_s() -> float:
            began_s = time.perf_counter()
            self._stream().awaitTermination()
            return self._checked(_STREAMING, began_s, folder=self.folder / _STREAMING, rounds=self._next(_STREAMING))

        def loop_s() -> float:
            began_s = time.perf_counter()
            consume_to_parquet(servers, self.feed.topic, self.feed.newest(), self._target(_LOOP))
            return self._checked(_LOOP, began_s)

        ways = {
            _AT_LEAST_ONCE: claimed_s,
            _BARE: bare_s,
            _EFFECTIVELY_ONCE: claimed_once_s,
            _STREAMING: streaming_s,
        }
        return ways | ({_LOOP: loop_s} if self.feed.records <= self.feed.sizes.loop_records else {})

    def _delivery(self, name: str) -> BatchSession:
        log = KafkaLog(self.feed.connection, COORDINATION_TOPIC)
        self.stage.closing.callback(log.close)
        mode = DeliveryMode.EFFECTIVELY_ONCE if name == _EFFECTIVELY_ONCE else DeliveryMode.AT_LEAST_ONCE
        return BatchSession(
            log=log,
            data=self.stage.data,
            connection=self.feed.connection,
            group=f"{self.feed.topic} {name}".replace(" ", "-"),
            client="benchmark",
            run_id="3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11",
            settings=GroupSettings(delivery=mode),
        )

    def _bare_frame(self) -> "DataFrame":
        starts = {str(number): start for number, (start, _) in self.feed.newest().items()}
        ends = {str(number): end for number, (_, end) in self.feed.newest().items()}
        return (
            self.stage.spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self.feed.connection.bootstrap_servers)
            .option("assign", json.dumps({self.feed.topic: list(self.feed.newest())}))
            .option("startingOffsets", json.dumps({self.feed.topic: starts}))
            .option("endingOffsets", json.dumps({self.feed.topic: ends}))
            .load()
        )

    def _stream(self) -> Any:  # noqa: ANN401 - a streaming query, which PySpark does not type
        arriving = (
            self.stage.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.feed.connection.bootstrap_servers)
            .option("subscribe", self.feed.topic)
            .option("startingOffsets", "earliest")
            .load()
        )
        return (
            _parsed(arriving)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.folder / _STREAMING))
        )

    def _target(self, name: str) -> str:
        return str(self.folder / f"{name} {self._next(name)}")

    def _next(self, name: str) -> int:
        self._rounds[name] = self._rounds.get(name, 0) + 1
        return self._rounds[name]

    def _checked(
        self, name: str, began_s: float, *, committed: bool = True, folder: Path | None = None, rounds: int = 1
    ) -> float:
        """Return the seconds since `began_s`. Raises `RuntimeError` if not all messages are in the folder."""
        took_s = time.perf_counter() - began_s
        written = folder or self.folder / f"{name} {self._rounds[name]}"
        rows = self.stage.spark.read.parquet(str(written)).count()
        if not committed or rows != rounds * self.feed.records:
            raise RuntimeError(f"{name}: {rows} rows, not {rounds} times {self.feed.records}; committed: {committed}")
        return took_s


def consume_to_parquet(servers: str, topic: str, ranges: Mapping[int, tuple[int, int]], target: str) -> None:
    """Read, decode and collect messages in Python, and write one Parquet file, as a user without Spark would."""
    import pyarrow as pa
    from pyarrow import parquet

    consumer = Consumer({"bootstrap.servers": servers, "group.id": "loop", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, number, start) for number, (start, _) in ranges.items()])
    due = sum(end - start for start, end in ranges.values())
    rows: list[dict[str, Any]] = []
    while len(rows) < due:
        messages = consumer.consume(bare.READ_BATCH, timeout=1.0)
        rows += [json.loads(message.value() or b"{}") for message in messages if message.error() is None]
    parquet.write_table(pa.Table.from_pylist(rows), target)
    consumer.commit(offsets=[TopicPartition(topic, number, end) for number, (_, end) in ranges.items()])
    consumer.close()


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker, in one warm Spark session."""
    with services.broker() as connection, scratch() as folder, local_session() as spark:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        with Topics(connection) as data, ExitStack() as closing:
            stage = Stage(spark, connection, data, folder, closing)
            batches = list(_batches(sizes))
            cases = [
                case
                for records, times in zip(batches, range(len(batches), 0, -1), strict=True)
                for case in _cases(records, _measured(records, times, sizes, stage))
            ]
    return Measured(cases, {"spark_master": "local[2]"})


def _batches(sizes: Sizes) -> Iterator[int]:
    for records in steps_of_ten(sizes.fewest, sizes.most):
        yield records // sizes.partitions * sizes.partitions


def _measured(records: int, times: int, sizes: Sizes, stage: Stage) -> dict[str, list[float]]:
    """Return the seconds of each side for batches of `records` messages.

    `times` multiplies the number of rounds, which is given for the largest batch.
    """
    feed = Feed(stage.connection, f"orders-{records}", sizes, records)
    folder = stage.folder / str(records)
    folder.mkdir()
    sides = Sides(stage, feed, folder).by_name()
    alternations, warm_up = times * sizes.alternations, times * sizes.warm_up
    taken = take_turns_to_begin(alternations, list(sides.values()), feed.arrive, warm_up=warm_up)
    shutil.rmtree(folder)
    stage.data.delete(feed.topic)
    return dict(zip(sides, taken, strict=True))


def _cases(records: int, seconds: Mapping[str, Sequence[float]]) -> Iterator[Case]:
    """Compare the sides, in messages per second."""
    rates = {name: [records / took_s for took_s in second] for name, second in seconds.items()}
    ours, once = rates[_AT_LEAST_ONCE], rates[_EFFECTIVELY_ONCE]
    for name, one, beside, target in (
        ("bare connector", ours, _BARE, 0.95),
        ("Structured Streaming", ours, _STREAMING, 1),
        ("Structured Streaming, ours effectively once", once, _STREAMING, 1),
        ("a consumer loop in Python", ours, _LOOP, 1),
    ):
        if beside in rates:
            yield Case(
                f"{records:,} messages, beside {name}", one, rates[beside], "records/s", Goal.RATIO_AT_LEAST, target
            )


def _message(number: int, width: int) -> bytes:
    known = {"id": number, "customer": f"customer {number % 1000}", "amount": number % 9973 / 100, "note": ""}
    return json.dumps(known | {"note": "x" * max(0, width - len(json.dumps(known)))}).encode()


def _parsed(frame: "DataFrame", *kept: str) -> "DataFrame":
    """Decode the JSON of the messages into columns."""
    from pyspark.sql import functions as f

    value = f.from_json(f.col("value").cast("string"), _SCHEMA)
    return frame.select(*kept, value.alias("message")).select(*kept, "message.*")


BENCHMARK: Final = Benchmark(
    "alternatives",
    "a claimed batch from JSON to Parquet, compared with what a user would write without it",
    Sizes(),
    run,
)
