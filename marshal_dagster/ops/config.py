"""The run config and the options of ops and assets of claimed batches.

`ClaimedBatchConfig` is the run config, shown in the launchpad. `WorkOptions` are the options in code. `batch_spec`
checks the options and returns a `BatchSpec`, which each execution uses.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict

from dagster import AssetKey, Config, OpExecutionContext
from pydantic import Field, create_model

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.admin.position_spec import PARTITIONS_TEXT
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS, ClaimedBatch, RangeOptions
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.ops.user_function import check_arguments, function_text, process_arguments
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.exhausted_plans import MAX_ATTEMPTS_TAG
from marshal_dagster.runs.names import TOPIC_TAG
from marshal_dagster.sinks import Sink
from marshal_dagster.spark.reader import check_min_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ClaimedBatchConfig(Config):
    """The run config of a claimed-batch op or asset: which messages the run processes, and when it ends."""

    partitions: str | None = Field(default=None, description=PARTITIONS_TEXT)
    max_records: int | None = Field(
        default=None, ge=1, description="Maximum offsets of a batch, over all its partitions (default: no limit)."
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Approximate maximum bytes of a batch, by a sample of unread records (default: no limit).",
    )
    max_batches: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of batches, including those of earlier attempts in this run (default: until the "
        "topic is drained).",
    )
    time_budget_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which the run starts no further batch (default: until the topic is drained).",
    )
    retry_exhausted: bool = Field(default=False, description="Retry plans that failed too many times once more.")
    on_idle: Literal["skip", "fail"] = Field(
        default="skip",
        description="Whether a run that finds nothing to process skips the steps that depend on this one, or fails. "
        "Reasons are a drained topic, a paused group, or partitions that other runs hold.",
    )
    allow_data_loss: bool | None = Field(
        default=None,
        description="Continue if retention deleted messages before they were read (default: in at_least_once only).",
    )
    allow_log_reset: bool = Field(
        default=False,
        description="Continue if Kafka has committed offsets of the group that the coordination log lacks, because the "
        "log was re-created.",
    )
    seen: list[ExpectedKeyState] = Field(
        default_factory=list,
        description="The state of each partition when the stale-claim sensor requested this run. The sensor sets it; "
        "the run shows it as metadata.",
    )


MakeSink = Callable[[OpExecutionContext], Sink]


class WorkOptions(TypedDict, total=False):
    """Options for claiming and processing batches, the same for ops and assets.

    Pass them as keyword arguments of `build_claimed_batch_op` or `marshal_asset`.

    Example:
        ```python
        @marshal_asset(topic="orders", max_records=1_000_000, spark_key="pyspark")
        def orders_per_shop(context, batch, frame): ...
        ```
    """

    sink: Sink | MakeSink | None
    """The output in `effectively_once`: a sink, or a function that takes the context and returns a sink for each run.
    """
    max_records: int | None
    """Maximum offsets of a batch, over all its partitions. Run config can change this limit and the next three."""
    max_bytes: int | None
    """Approximate maximum bytes of a batch (uncompressed keys, values and headers).

    Each run reads a sample of the unread records and divides this limit by their mean size. Batches are larger if later
    records are larger.
    """
    max_batches: int | None
    """Maximum number of batches of a run (default: until the topic is drained)."""
    time_budget_s: float | None
    """Seconds after which a run starts no further batch (default: no limit)."""
    max_claims: int | None
    """Maximum number of partitions of a batch (default: all that are free)."""
    claim_entire_topic: bool
    """Claim either all partitions of the topic or none."""
    ranges: RangeOptions | None
    """How ranges are claimed. Only for groups that claim ranges of offsets instead of whole partitions."""
    start: StartPolicy | str
    """Where a group without a position in the topic starts (default: at the earliest offset)."""
    max_attempts: int
    """How often runs retry a failed plan before they leave it to an operator (default: 5)."""
    allow_topic_without_id: bool
    """Process a data topic without an id in at most once and effectively once, too (default: the run fails).

    Brokers before Kafka 2.8, and some services, give topics no id. If such a topic is deleted and re-created, messages
    may be skipped or repeated unnoticed. At least once always continues, with a warning.
    """
    allow_missing_topic: bool
    """Let a run succeed without work if the data topic does not exist (default: the run fails)."""
    count_records: bool
    """Record how many records each batch had. This costs an extra pass over the batch.

    After compaction or transactions a range has fewer records than offsets.
    """
    min_partitions: int | None
    """Minimum number of Spark tasks that read a batch (default: one for each Kafka partition).

    Set it if one partition has far more messages than the others.
    """
    claimer_key: str
    """The key of the `ClaimerResource` (default: `claimer`)."""
    spark_key: str | None
    """The key of the resource that has the run's `spark_session`.

    Use a `LazyPySparkResource` with the settings of `spark_settings`: the run claims first, and starts Spark only if
    there is something to read. A `PySparkResource` starts Spark before the run claims. A `SparkConnectResource` uses a
    server. Without a key each run starts a session with `spark_settings` and `spark_config`.
    """
    with_frame: bool
    """Whether the run starts Spark and reads each batch (default: true).

    If false, the function takes context and batch only. It processes the batch with `run_with_pipes`, or reads it
    itself.
    """
    spark_config: Mapping[str, str] | None
    """Spark settings that replace or extend `spark_settings`, for a session that the run starts itself."""


LIMITS: Final = ("max_records", "max_bytes", "max_batches", "time_budget_s")
"""The options that are also fields of the run config, and set its defaults."""


_OF_A_FRAME: Final = ("count_records", "min_partitions", "spark_key", "spark_config")
"""The options that have an effect only with `with_frame`."""


def config_of(options: WorkOptions) -> type[ClaimedBatchConfig]:
    """Return the run config class with the limits of `options` as defaults, so that the launchpad shows them.

    Raises `ConfigurationError` if a limit is not positive.
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
    """The user's function for one batch.

    It returns the rows for the sink. Without a sink it writes its results itself and returns None.
    """

    def __call__(self, context: OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame", /) -> "DataFrame | None":
        """Process one batch.

        Args:
            context: The context of the op.
            batch: The batch, with its id, ranges and delivery mode.
            frame: The messages of exactly `batch.ranges`, with the columns key, value, topic, partition, offset,
                timestamp and headers.

        Returns:
            The rows for the sink, with the column `partition`; None without a sink.
        """
        ...


class FramelessProcess(Protocol):
    """The user's function for one batch with `with_frame=False`. It processes the batch by `run_with_pipes`, or itself.

    Its result is not used.
    """

    def __call__(self, context: OpExecutionContext, batch: ClaimedBatch, /) -> object:
        """Process one batch.

        Args:
            context: The context of the op.
            batch: The batch, with its id, ranges and delivery mode.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The checked options of an op or asset that run config cannot change; see `WorkOptions` for each."""

    process: Process | FramelessProcess
    topic: str
    asset_key: AssetKey
    function: str
    """The user's function as errors show it; `process` may be a wrapper around it."""
    sink: Sink | MakeSink | None = None
    start: StartPolicy = StartPolicy.EARLIEST
    max_claims: int | None = None
    claim_entire_topic: bool = False
    ranges: RangeOptions | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    allow_missing_topic: bool = False
    allow_topic_without_id: bool = False
    count_records: bool = False
    min_partitions: int | None = None
    claimer_key: str = "claimer"
    spark_key: str | None = None
    with_frame: bool = True
    spark_config: Mapping[str, str] | None = None

    @property
    def op_tags(self) -> dict[str, str]:
        """The tags from which jobs, sensors and checks read the topic and the maximum number of attempts."""
        is_default = self.max_attempts == DEFAULT_MAX_ATTEMPTS
        return {TOPIC_TAG: self.topic, **({} if is_default else {MAX_ATTEMPTS_TAG: str(self.max_attempts)})}

    @property
    def resource_keys(self) -> set[str]:
        """The keys of the resources that a run needs."""
        return {self.claimer_key} | ({self.spark_key} if self.spark_key is not None else set())


def batch_spec(process: Process | FramelessProcess, topic: str, asset_key: AssetKey, options: WorkOptions) -> BatchSpec:
    """Check the options that run config cannot change, and return them. Raises `ConfigurationError`."""
    require_topic_name("topic", topic)
    check_arguments(process, process_arguments(options))
    sink = options.get("sink")
    if isinstance(sink, type):
        raise ConfigurationError(f"sink is the class {sink.__name__}: pass an instance of it")
    if callable(sink):
        check_arguments(sink, ("context",))
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in LIMITS}
    if "start" in given:
        given["start"] = enum_member(StartPolicy, "start", given["start"])
    spec = BatchSpec(process=process, topic=topic, asset_key=asset_key, function=function_text(process), **given)
    check_min_partitions(spec.min_partitions)
    unused = [name for name in _OF_A_FRAME if getattr(spec, name)]
    if unused and not spec.with_frame:
        raise ConfigurationError(
            f"with_frame is false, so the run reads no batch and {' and '.join(unused)} would have no effect: leave it "
            "out, or set with_frame"
        )
    if spec.spark_key is not None and spec.spark_config is not None:
        raise ConfigurationError(
            f"spark_config does not apply to the session of resource {spec.spark_key!r}: configure it in that resource"
        )
    return spec
