"""The messages for the benchmarks of sinks, and the ranges that a batch of them would claim."""

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
    """Create the topic, and write `records` messages to it, the same number to each partition."""
    data.create(INPUT, partitions, 1)
    text = b"x" * record_bytes
    count = records // partitions * partitions
    services.load(connection, INPUT, ((number % partitions, text) for number in range(count)))


@dataclass(frozen=True, slots=True)
class SinkInput:
    """The first `records` messages, the same number from each partition."""

    spark: "SparkSession"
    connection: KafkaConnection
    partitions: int
    records: int

    @property
    def wanted(self) -> int:
        """The number of rows that a sink must write."""
        return self._width * self.partitions

    def rows(self, *also: str) -> "DataFrame":
        """Return a key and a value of each message, and the columns `also`."""
        offsets: Mapping[int, tuple[int, int]] = dict.fromkeys(range(self.partitions), (0, self._width))
        frame = read_ranges(self.spark, self.connection.spark_options(), INPUT, offsets)
        return frame.selectExpr(*also, "CAST(offset AS STRING) AS key", "upper(CAST(value AS STRING)) AS value")

    def ranges(self, group: str) -> list[ClaimedRange]:
        """Return the ranges as a member of `group` would claim them."""
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
