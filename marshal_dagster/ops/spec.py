"""The options of an op's or asset's batches that run config does not change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dagster import AssetKey, OpExecutionContext

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS, ClaimedBatch, RangeOptions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.ops.config import LIMITS, MakeSink, WorkOptions
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
    """What run config does not change of an op's or asset's batches; options as in `WorkOptions`."""

    process: Process
    topic: str
    asset_key: AssetKey
    sink: Sink | MakeSink | None = None
    start: StartPolicy = StartPolicy.EARLIEST
    max_claims: int | None = None
    claim_entire_topic: bool = False
    ranges: RangeOptions | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    count_records: bool = False
    min_partitions: int | None = None
    claimer_key: str = "claimer"
    spark_key: str | None = None
    spark_config: Mapping[str, str] | None = None

    @property
    def resource_keys(self) -> set[str]:
        """The resources that a run needs."""
        return {self.claimer_key} | ({self.spark_key} if self.spark_key is not None else set())


def batch_spec(process: Process, topic: str, asset_key: AssetKey, options: WorkOptions) -> BatchSpec:
    """Check and gather what run config does not change. Raises `ConfigurationError`."""
    require_topic_name("topic", topic)
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in LIMITS}
    if "start" in given:
        given["start"] = enum_member(StartPolicy, "start", given["start"])
    spec = BatchSpec(process=process, topic=topic, asset_key=asset_key, **given)
    check_min_partitions(spec.min_partitions)
    if spec.spark_key is not None and spec.spark_config is not None:
        raise ConfigurationError(f"spark_config: the session of resource {spec.spark_key!r} is configured there")
    return spec
