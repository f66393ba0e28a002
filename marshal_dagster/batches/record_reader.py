"""Reading of a batch's records: the interface that a session has for it, and its implementation over Kafka.

`marshal_dagster.testing` has another implementation, over topics in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.spark import reader
from marshal_dagster.spark.session import check_session, check_single_execution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.kafka.admin_client import Topics


class RecordReader(Protocol):
    """Reads the records of the data topics."""

    def check_session(self, spark: "SparkSession", mode: DeliveryMode) -> None:
        """Raise `ConfigurationError` if batches cannot be read with this session in this delivery mode."""
        ...

    def read_ranges(
        self,
        spark: "SparkSession",
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        *,
        min_partitions: int | None = None,
        topic_id: str | None = None,
    ) -> "DataFrame":
        """Return a frame over the records of `topic` in `ranges`, as `marshal_dagster.spark.reader.read_ranges`."""
        ...

    def read_part(self, spark: "SparkSession", topic: str, offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
        """Return a frame over a part of a batch, whose ranges may be empty."""
        ...

    def bytes_per_offset(self, topics: "Topics", group: str, topic: str) -> float | None:
        """Return about how many bytes an unread offset has; None if the topic has no offsets."""
        ...


@dataclass(frozen=True, slots=True)
class KafkaReader:
    """Reads with Spark's Kafka source over a connection."""

    connection: KafkaConnection

    def check_session(self, spark: "SparkSession", mode: DeliveryMode) -> None:
        """Raise `ConfigurationError` unless the Kafka source works, and in at most once runs no task twice."""
        check_session(spark)
        if mode is DeliveryMode.AT_MOST_ONCE:
            check_single_execution(spark)

    def read_ranges(
        self,
        spark: "SparkSession",
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        *,
        min_partitions: int | None = None,
        topic_id: str | None = None,
    ) -> "DataFrame":
        """Return a lazy frame: each action on it reads Kafka again."""
        options = self.connection.spark_options()
        return reader.read_ranges(spark, options, topic, ranges, min_partitions=min_partitions, topic_id=topic_id)

    def read_part(self, spark: "SparkSession", topic: str, offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
        """Return a lazy frame over a part of a batch."""
        return reader.read_part(spark, self.connection.spark_options(), topic, offsets)

    def bytes_per_offset(self, topics: "Topics", group: str, topic: str) -> float | None:
        """Return the estimate of `marshal_dagster.kafka.record_size`, from a sample of unread records."""
        from marshal_dagster.kafka import record_size

        return record_size.bytes_per_offset(topics, self.connection, group, topic)
