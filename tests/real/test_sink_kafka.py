"""The Kafka sink on a real broker; its rules by themselves are in `tests/fast/test_sink_kafka`."""

import inspect
from collections.abc import Collection

import pytest

from marshal_dagster.kafka import transactions
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.spark.sinks import KafkaSink
from marshal_dagster.spark.sinks.conformance import Case, Row, Target
from tests.kafka_outputs import KafkaOutput
from tests.sink_kit import ALL_CASES


class KafkaTarget(Target):
    """A topic of its own."""

    range_by_range = True
    most_steps = 8

    def __init__(self, connection: KafkaConnection) -> None:
        self.output = KafkaOutput(connection)

    def sink(self) -> KafkaSink:
        """Another process's sink."""
        return self.output.sink()

    def rows(self) -> list[Row]:
        """What readers see; what a dead writer has open they do not."""
        return self.output.rows(patience_s=1)

    def source_files(self) -> Collection[str]:
        """The sink's, and those of the client that it works by."""
        return {*super().source_files(), inspect.getfile(transactions)}


@pytest.fixture
def target(connection: KafkaConnection) -> KafkaTarget:
    """An empty topic."""
    return KafkaTarget(connection)


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_sink_conforms(case: Case, target: KafkaTarget) -> None:
    """Every case of the kit holds on a broker."""
    case.check(target)
