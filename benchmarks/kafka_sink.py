"""`KafkaSink` compared with Spark's own Kafka writer, with the same rows in one warm Spark session."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import KafkaSink

OUTPUT: Final = "orders-upper"
_TRANSACTION_TIMEOUT_S: Final = 600.0
"""Enough for a range of 2,500,000 rows on a busy machine."""


@dataclass(slots=True)
class Sides:
    """Both ways to write the same messages to the same topic; each call returns records per second."""

    messages: SinkInput
    data: Topics
    _rounds: Iterator[int]

    def ours(self) -> float:
        """Write with the sink, as a group that has written nothing yet."""
        group = f"benchmark-{next(self._rounds)}"
        sink = KafkaSink(
            self.messages.connection, OUTPUT, shared_by_groups=True, transaction_timeout_s=_TRANSACTION_TIMEOUT_S
        )
        began_s = time.perf_counter()
        outcome = sink.write(self.messages.rows("partition", "offset"), self.messages.ranges(group), dict)
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

    def _written(self) -> int:
        found = self.data.offsets(OUTPUT, range(self.messages.partitions))
        return sum(at.end for at in found.values())

    def _rate(self, began_s: float) -> float:
        return self.messages.wanted / (time.perf_counter() - began_s)


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker."""
    with services.broker() as connection, local_session() as spark, Topics(connection) as data:
        data.create(OUTPUT, sizes.partitions, 1)
        KafkaSink(connection, OUTPUT).create_notes()
        rounds = count()
        cases = compare(spark, connection, data, sizes, lambda messages: Sides(messages, data, rounds), least=1)
    return Measured(cases, {"spark_master": "local[2]"})


BENCHMARK: Final = Benchmark(
    "kafka_sink", "rows to a Kafka topic exactly once, compared with Spark's own Kafka writer", Sizes(), run
)
