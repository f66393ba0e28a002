"""`KafkaSink` compared with Spark's own Kafka writer, with the same rows in one warm Spark session."""

import time
from dataclasses import dataclass
from typing import Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Case, Goal, Measured, take_turns
from benchmarks.sink_input import SinkInput, fill
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import KafkaSink

OUTPUT: Final = "orders-upper"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: records of a batch and their bytes, partitions, rounds, and warm-up rounds that do not count."""

    records: int = 1_000_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 5
    warm_up: int = 2


@dataclass(slots=True)
class Sides:
    """Both ways to write the same messages to the same topic; each call returns records per second."""

    messages: SinkInput
    data: Topics
    rounds: int = 0

    def ours(self) -> float:
        """Write with the sink, as a group that has written nothing yet."""
        self.rounds += 1
        sink = KafkaSink(self.messages.connection, OUTPUT, shared_by_groups=True)
        began_s = time.perf_counter()
        outcome = sink.write(self.messages.rows("partition", "offset"), self.messages.ranges(self._group), dict)
        written = sum(outcome.rows.values())
        if written != self.messages.wanted:
            raise RuntimeError(f"{written} records were written, not {self.messages.wanted}")
        return self._rate(began_s)

    def beside(self) -> float:
        """Write with Spark's writer. If a batch fails, its records stay, and the next batch writes them again."""
        before = self._written()
        options = {**self.messages.connection.spark_options(), "topic": OUTPUT}
        began_s = time.perf_counter()
        self.messages.rows().write.format("kafka").options(**options).save()
        rate, written = self._rate(began_s), self._written() - before
        if written < self.messages.wanted:  # a task that Spark retried has written more
            raise RuntimeError(f"{written} records were written, not {self.messages.wanted}")
        return rate

    @property
    def _group(self) -> str:
        return f"benchmark-{self.rounds}"

    def _written(self) -> int:
        found = self.data.offsets(OUTPUT, range(self.messages.partitions))
        return sum(at.end for at in found.values())

    def _rate(self, began_s: float) -> float:
        return self.messages.wanted / (time.perf_counter() - began_s)


def run(sizes: Sizes) -> Measured:
    """Measure both sides with one broker."""
    with services.broker() as connection, local_session() as spark, Topics(connection) as data:
        data.create(OUTPUT, sizes.partitions, 1)
        KafkaSink(connection, OUTPUT).create_notes()
        fill(data, connection, sizes.partitions, sizes.records, sizes.record_bytes)
        sides = Sides(SinkInput(spark, connection, sizes.partitions, sizes.records), data)
        ours, beside = take_turns(sizes.alternations, [sides.ours, sides.beside], warm_up=sizes.warm_up)
    case = Case("Kafka to Kafka", ours, beside, "records/s", Goal.RATIO_AT_LEAST, 0.2)
    return Measured([case], {"spark_master": "local[2]"})


BENCHMARK: Final = Benchmark(
    "kafka_sink", "rows to a Kafka topic exactly once, compared with Spark's own Kafka writer", Sizes(), run
)
