"""The messages whose rows sinks are measured with, and the ranges of them that a batch would hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks import services
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.spark.reader import read_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

INPUT: Final = "orders"


def fill(data: Topics, connection: KafkaConnection, partitions: int, records: int, record_bytes: int) -> None:
    """Make the topic, and write `records` messages to it, as many to each partition."""
    data.create(INPUT, partitions, 1)
    text = b"x" * record_bytes
    count = records // partitions * partitions
    services.load(connection, INPUT, ((number % partitions, text) for number in range(count)))


@dataclass(frozen=True, slots=True)
class SinkInput:
    """The first `records` messages, as many of each partition."""

    spark: "SparkSession"
    connection: KafkaConnection
    partitions: int
    records: int

    @property
    def wanted(self) -> int:
        """How many rows a sink is to write."""
        return self._width * self.partitions

    def rows(self, *also: str) -> "DataFrame":
        """Give a key and a value of each message, and which of its columns there are to be `also`."""
        offsets: Mapping[int, tuple[int, int]] = dict.fromkeys(range(self.partitions), (0, self._width))
        frame = read_ranges(self.spark, self.connection.spark_options(), INPUT, offsets)
        return frame.selectExpr(*also, "CAST(offset AS STRING) AS key", "upper(CAST(value AS STRING)) AS value")

    def ranges(self, group: str) -> list[ClaimedRange]:
        """Give them as a member of `group` would have claimed them."""
        return [
            ClaimedRange(
                coordination_topic_id="coordination",
                group=group,
                topic=INPUT,
                data_topic_id="data",
                partition=number,
                generation=0,
                epoch=1,
                start=0,
                end=self._width,
                first_readable=0,
            )
            for number in range(self.partitions)
        ]

    @property
    def _width(self) -> int:
        return self.records // self.partitions
