"""The run config of claimed batches, the options of an op or asset, and what is made of them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict

from dagster import AssetKey, Config, OpExecutionContext
from pydantic import Field, create_model

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS, ClaimedBatch, RangeOptions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.ops.user_function import PROCESS_ARGUMENTS, check_arguments, function_text
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.exhausted_plans import MAX_ATTEMPTS_TAG
from marshal_dagster.runs.names import TOPIC_TAG
from marshal_dagster.sinks import Sink
from marshal_dagster.spark.reader import check_min_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ClaimedBatchConfig(Config):
    """What one run of the op should take and when it should end."""

    partitions: list[int] | None = Field(default=None, description="Only these partitions of the topic; default: all.")
    max_records: int | None = Field(
        default=None, ge=1, description="The most offsets of a batch, all its partitions together; default: no limit."
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="About the most bytes of a batch, estimated from a sample of what is unread; default: no limit.",
    )
    max_batches: int | None = Field(
        default=None,
        ge=1,
        description="End after so many batches, those of earlier attempts in this run counted in; default: when the "
        "topic is drained.",
    )
    time_budget_s: float | None = Field(
        default=None, gt=0, description="Begin no batch after so many seconds; default: when the topic is drained."
    )
    retry_exhausted: bool = Field(
        default=False, description="Try plans once more that were given up after too many attempts."
    )
    on_idle: Literal["skip", "fail"] = Field(
        default="skip",
        description="When there is nothing to do (drained, paused, held by others): skip what depends on this op, or "
        "fail the run.",
    )
    allow_data_loss: bool | None = Field(
        default=None,
        description="Go on where retention has deleted messages unread; default: in at_least_once only.",
    )
    allow_log_reset: bool = Field(
        default=False, description="Go on where Kafka knows offsets of the group and the coordination log does not."
    )
    seen: list[ExpectedKeyState] = Field(
        default_factory=list, description="Filled in by the stale-claim sensor: what it saw. Shown in the metadata."
    )


MakeSink = Callable[[OpExecutionContext], Sink]


class WorkOptions(TypedDict, total=False):
    """How batches are claimed and worked on; the same for an op and for an asset."""

    sink: Sink | MakeSink | None
    """Takes the rows in effectively once; or a function of the context that makes one for each run."""
    max_records: int | None
    """The most offsets of a batch. This and the limits below are defaults that run config may change."""
    max_bytes: int | None
    """About the most bytes of a batch (keys, values and headers, not compressed). Each run reads a sample of what is
    unread, and turns this into offsets by the mean size in it; larger records further on make larger batches."""
    max_batches: int | None
    """The most batches of a run; by default it ends when the topic is drained."""
    time_budget_s: float | None
    """Seconds after which a run begins no further batch."""
    max_claims: int | None
    """The most partitions that a batch holds; by default all that are free."""
    claim_entire_topic: bool
    """Claim all partitions of the topic or none."""
    ranges: RangeOptions | None
    """How ranges are claimed, in groups that do."""
    start: StartPolicy | str
    """Where a group begins that has no position in the topic; by default at the earliest offset."""
    max_attempts: int
    """How often a plan is tried before it is left to a person; 5 by default."""
    allow_missing_topic: bool
    """Let a run succeed if the data topic does not exist, as if there were nothing to do; by default it fails."""
    count_records: bool
    """Report how many records the offsets of each batch held, where compaction and transactions leave fewer; it takes a
    pass over the batch of its own."""
    min_partitions: int | None
    """Read each batch in at least so many Spark tasks, where one partition has far more than the others; by default in
    one for each Kafka partition."""
    claimer_key: str
    """The resource that is the `ClaimerResource`; by default `claimer`."""
    spark_key: str | None
    """A resource that has a `spark_session` (a `LazyPySparkResource`, a `SparkConnectResource`).

    By default a session on this machine is started.
    """
    spark_config: Mapping[str, str] | None
    """Changes the settings (`spark_settings`) of a session that is started here."""


LIMITS: Final = ("max_records", "max_bytes", "max_batches", "time_budget_s")
"""The options that are defaults of the run config."""


def config_of(options: WorkOptions) -> type[ClaimedBatchConfig]:
    """Return the config class with the limits of `options` as defaults, so that the launchpad shows them.

    Raises `ConfigurationError`.
    """
    fields: dict[str, Any] = {}
    for name in LIMITS:
        value: Any = options.get(name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"{name} is {value}; it must be above 0")
        info = copy.copy(ClaimedBatchConfig.model_fields[name])
        info.default = value
        fields[name] = (info.annotation, info)
    return create_model(
        ClaimedBatchConfig.__name__, __base__=ClaimedBatchConfig, __doc__=ClaimedBatchConfig.__doc__, **fields
    )


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
    function: str
    """The user's function as errors name it; `process` may be a wrapper around it."""
    sink: Sink | MakeSink | None = None
    start: StartPolicy = StartPolicy.EARLIEST
    max_claims: int | None = None
    claim_entire_topic: bool = False
    ranges: RangeOptions | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    allow_missing_topic: bool = False
    count_records: bool = False
    min_partitions: int | None = None
    claimer_key: str = "claimer"
    spark_key: str | None = None
    spark_config: Mapping[str, str] | None = None

    @property
    def op_tags(self) -> dict[str, str]:
        """The tags of the op, which jobs, sensors and checks read."""
        is_default = self.max_attempts == DEFAULT_MAX_ATTEMPTS
        return {TOPIC_TAG: self.topic, **({} if is_default else {MAX_ATTEMPTS_TAG: str(self.max_attempts)})}

    @property
    def resource_keys(self) -> set[str]:
        """The resources that a run needs."""
        return {self.claimer_key} | ({self.spark_key} if self.spark_key is not None else set())


def batch_spec(process: Process, topic: str, asset_key: AssetKey, options: WorkOptions) -> BatchSpec:
    """Check and gather what run config does not change. Raises `ConfigurationError`."""
    require_topic_name("topic", topic)
    check_arguments(process, PROCESS_ARGUMENTS)
    sink = options.get("sink")
    if isinstance(sink, type):
        raise ConfigurationError(f"sink is the class {sink.__name__}: give an instance of it")
    if callable(sink):
        check_arguments(sink, ("context",))
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in LIMITS}
    if "start" in given:
        given["start"] = enum_member(StartPolicy, "start", given["start"])
    spec = BatchSpec(process=process, topic=topic, asset_key=asset_key, function=function_text(process), **given)
    check_min_partitions(spec.min_partitions)
    if spec.spark_key is not None and spec.spark_config is not None:
        raise ConfigurationError(f"spark_config: the session of resource {spec.spark_key!r} is configured there")
    return spec
