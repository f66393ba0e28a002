"""Sinks whose rows the tasks write, compared with Spark's own writers, on a standalone cluster of two workers."""

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final

from benchmarks import jdbc, kafka_sink, postgres_sink, services, sink_input
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import Sides, SinkInput, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import KafkaSink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Sizes(sink_input.Sizes):
    """Sizes: those of a sink's benchmark, and how many of the sinks are measured."""

    sinks: int = 2


def run(sizes: Sizes) -> Measured:
    """Measure the sinks one after the other with one broker, one database and one cluster."""
    with (
        services.broker() as connection,
        services.postgres() as dsn,
        services.spark_cluster() as master,
        local_session(jdbc.jars(), {"spark.master": master}) as spark,
        Topics(connection) as data,
    ):
        data.create(kafka_sink.OUTPUT, sizes.partitions, 1)
        KafkaSink(connection, kafka_sink.OUTPUT).create_notes()
        rounds, tables = count(), count()
        sides: Mapping[str, tuple[Callable[[SinkInput], Sides], float]] = {
            "PostgresSink": (lambda messages: postgres_sink.Sides(messages, dsn, tables), 0.7),
            "KafkaSink": (lambda messages: kafka_sink.Sides(messages, data, rounds), 1),
        }
        cases = [
            replace(case, name=f"{name}, {case.name}")
            for name, (sides_of, least) in [*sides.items()][: sizes.sinks]
            for case in compare(spark, connection, data, sizes, sides_of, least=least)
        ]
    return Measured(cases, {"spark_master": "a standalone cluster of two workers on this machine, one core each"})


BENCHMARK: Final = Benchmark(
    "sinks_on_cluster",
    "rows that tasks write to PostgreSQL and Kafka, compared with Spark's own writers, on a cluster of two workers",
    Sizes(),
    run,
)
