"""The sink of records in a Kafka topic, beside Spark's own writer to Kafka, with the same rows in one warm session."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Case, Goal, Measured, take_turns
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.protocol.ranges import ClaimedRange
from marshal_dagster.spark.reading import read_ranges
from marshal_dagster.spark.sinks import KafkaSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

INPUT: Final = "orders"
OUTPUT: Final = "orders-upper"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: records of a batch and their bytes, partitions, alternations, runs before they count."""

    records: int = 1_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 5
    warm_up: int = 2


@dataclass(slots=True)
class Sides:
    """Both ways to write the same messages to the same topic; each call gives records per second."""

    spark: "SparkSession"
    connection: KafkaConnection
    data: Topics
    sizes: Sizes
    rounds: int = 0

    def ours(self) -> float:
        """Through the sink, as a group that has written nothing yet."""
        self.rounds += 1
        ranges = [self._range(number) for number in range(self.sizes.partitions)]
        sink = KafkaSink(self.connection, OUTPUT)
        began_s = time.perf_counter()
        outcome = sink.write(self._rows("partition", "offset"), ranges, dict)
        written = sum(outcome.rows.values())
        if written != self._wanted:
            raise RuntimeError(f"{written} records were written, not {self._wanted}")
        return self._rate(began_s)

    def beside(self) -> float:
        """By Spark's writer, whose records stay when the batch fails, and come again with the next."""
        before = self._written()
        options = {**self.connection.spark_options(), "topic": OUTPUT}
        began_s = time.perf_counter()
        self._rows().write.format("kafka").options(**options).save()
        rate, written = self._rate(began_s), self._written() - before
        if written < self._wanted:  # a task that was tried again has written more
            raise RuntimeError(f"{written} records were written, not {self._wanted}")
        return rate

    def _rows(self, *also: str) -> "DataFrame":
        width = self.sizes.records // self.sizes.partitions
        offsets: Mapping[int, tuple[int, int]] = dict.fromkeys(range(self.sizes.partitions), (0, width))
        frame = read_ranges(self.spark, self.connection.spark_options(), INPUT, offsets)
        return frame.selectExpr(*also, "CAST(offset AS STRING) AS key", "upper(CAST(value AS STRING)) AS value")

    def _range(self, number: int) -> ClaimedRange:
        return ClaimedRange(
            coordination_topic_id="coordination",
            group=f"benchmark-{self.rounds}",
            topic=INPUT,
            data_topic_id="data",
            partition=number,
            generation=0,
            epoch=1,
            start=0,
            end=self.sizes.records // self.sizes.partitions,
            first_readable=0,
        )

    def _written(self) -> int:
        found = self.data.offsets(OUTPUT, range(self.sizes.partitions))
        return sum(at.end for at in found.values())

    @property
    def _wanted(self) -> int:
        return self.sizes.records // self.sizes.partitions * self.sizes.partitions

    def _rate(self, began_s: float) -> float:
        return self._wanted / (time.perf_counter() - began_s)


def run(sizes: Sizes) -> Measured:
    """Measure both on one broker."""
    with services.broker() as connection, local_session() as spark, Topics(connection) as data:
        for topic in (INPUT, OUTPUT):
            data.create(topic, sizes.partitions, 1)
        KafkaSink(connection, OUTPUT).create_notes()
        text = b"x" * sizes.record_bytes
        count = sizes.records // sizes.partitions * sizes.partitions
        services.load(connection, INPUT, ((number % sizes.partitions, text) for number in range(count)))
        sides = Sides(spark, connection, data, sizes)
        ours, beside = take_turns(sizes.alternations, [sides.ours, sides.beside], warm_up=sizes.warm_up)
    case = Case("Kafka to Kafka", ours, beside, "records/s", Goal.RATIO_AT_LEAST, 0.2)
    return Measured([case], {"spark_master": "local[2]"})


BENCHMARK: Final = Benchmark(
    "kafka_sink", "rows to a Kafka topic, once each, beside Spark's own writer to Kafka", Sizes(), run
)
