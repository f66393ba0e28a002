"""What an op or asset is told of its batches and run config does not change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dagster import AssetKey, OpExecutionContext

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS, ClaimedBatch, RangeOptions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.ops.config import MakeSink, WorkOptions
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.sinks import Sink
from marshal_dagster.spark.reader import check_min_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Process(Protocol):
    """What a user writes: turns the messages of a batch into the rows of the sink, or does its work and gives None."""

    def __call__(self, context: OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame", /) -> "DataFrame | None":
        """Process `frame`: key, value, topic, partition, offset, timestamp, headers of exactly `batch.ranges`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What an op or asset was told of its batches and run config does not change."""

    process: Process
    topic: str
    sink: Sink | MakeSink | None
    start: StartPolicy
    max_claims: int | None
    claim_entire_topic: bool
    ranges: RangeOptions | None
    max_attempts: int
    count_records: bool
    min_partitions: int | None
    claimer_key: str
    spark_key: str | None
    spark_config: Mapping[str, str]
    asset_key: AssetKey

    @property
    def resource_keys(self) -> set[str]:
        """The resources that a run needs."""
        return {self.claimer_key} | ({self.spark_key} if self.spark_key is not None else set())


def batch_spec(process: Process, topic: str, asset_key: AssetKey, options: WorkOptions) -> BatchSpec:
    """Gather what run config does not change. Raises `ConfigurationError`."""
    spark_key, spark_config = options.get("spark_key"), options.get("spark_config")
    require_topic_name("topic", topic)
    min_partitions = options.get("min_partitions")
    check_min_partitions(min_partitions)
    if spark_key is not None and spark_config is not None:
        raise ConfigurationError(f"spark_config: the session of resource {spark_key!r} is configured there")
    return BatchSpec(
        process=process,
        topic=topic,
        sink=options.get("sink"),
        start=enum_member(StartPolicy, "start", options.get("start", StartPolicy.EARLIEST)),
        max_claims=options.get("max_claims"),
        claim_entire_topic=options.get("claim_entire_topic", False),
        ranges=options.get("ranges"),
        max_attempts=options.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
        count_records=options.get("count_records", False),
        min_partitions=min_partitions,
        claimer_key=options.get("claimer_key", "claimer"),
        spark_key=spark_key,
        spark_config=dict(spark_config or {}),
        asset_key=asset_key,
    )
