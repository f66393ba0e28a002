"""The op that claims, processes and commits, batch after batch in one Spark session."""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict, Unpack

from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    Config,
    Failure,
    MetadataValue,
    OpDefinition,
    OpExecutionContext,
    Out,
    Output,
    RetryPolicy,
    RetryRequested,
    TableColumn,
    TableMetadataValue,
    TableRecord,
    TableSchema,
    op,
)
from pydantic import Field, create_model

from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.delivery import DEFAULT_MAX_ATTEMPTS, ClaimedBatch, Idle, PartitionReport, RangeOptions
from marshal_dagster.errors import BatchAborted, ConfigurationError, MarshalError, TopicMissing
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.positions import StartPolicy
from marshal_dagster.resources import ClaimerResource, claimer_of, require_topic
from marshal_dagster.runs import (
    GROUP_TAG,
    OUTCOME_TAG,
    TOPIC_TAG,
    announcements_key,
    recorded_before,
    run_is_over,
    tag_run,
)
from marshal_dagster.spark import reading
from marshal_dagster.spark.session import SINGLE_EXECUTION, spark_settings, start_session
from marshal_dagster.spark.sinks import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROGRESS_EVERY_S: Final = 5.0
"""Seconds between two looks at how far Spark is; a line is logged when something has changed."""

_SLACK_INTERVALS: Final = 0.1
_LONGEST_WAIT_INTERVALS: Final = 3
"""Heartbeat intervals: how much longer than need be a run waits for its own claims, and how long at most."""


class Process(Protocol):
    """What a user writes: turns the messages of a batch into the rows of the sink, or does its work and gives None."""

    def __call__(self, context: OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame", /) -> "DataFrame | None":
        """Process `frame`: key, value, topic, partition, offset, timestamp, headers of exactly `batch.ranges`."""
        ...


MakeSink = Callable[[OpExecutionContext], Sink]


class Outcome(StrEnum):
    """What an execution of the op came to: batches were done, or why there was none."""

    DONE = "done"
    PAUSED = "paused"
    HELD = "held"
    DRAINED = "drained"
    GIVEN_UP = "given_up"
    TOPIC_MISSING = "topic_missing"


class SeenKey(Config):
    """Where a partition stood when a sensor asked for its reprocessing; to be compared, nothing is decided by it."""

    partition: int = Field(ge=0, description="The partition of the data topic.")
    generation: int = Field(description="Its generation.")
    offset: int | None = Field(default=None, description="Its offset, the next one to read.")
    plan_end: int | None = Field(default=None, description="The end (exclusive) of its open plan.")
    plan_attempts: int = Field(default=0, description="How often that plan had been tried.")
    epoch: int | None = Field(default=None, description="The epoch of its owner, gone stale by then.")
    instance: str | None = Field(default=None, description="The instance id of that owner.")


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
    one_more_attempt: bool = Field(
        default=False, description="Try plans once more that were given up after too many attempts."
    )
    on_idle: Literal["skip", "fail"] = Field(
        default="skip",
        description="When there is nothing to do (drained, paused, held by others, no such topic): skip what depends "
        "on this op, or fail the run.",
    )
    accept_data_loss: bool | None = Field(
        default=None,
        description="Go on where retention has deleted messages unread; default: in at_least_once only.",
    )
    accept_new_log: bool = Field(
        default=False, description="Go on where Kafka knows offsets of the group and the coordination log does not."
    )
    seen: list[SeenKey] = Field(
        default_factory=list, description="Filled in by the stale-claim sensor: what it saw. Shown in the metadata."
    )


@dataclass(frozen=True, slots=True)
class DoneBatch:
    """One batch that was carried out."""

    batch_id: str
    delivery: DeliveryMode
    ranges: TableMetadataValue
    numbers: Mapping[str, float]
    """Seconds of each phase, offsets, lag, and the rows written where the sink tells them."""


@dataclass(frozen=True, slots=True)
class DrainedBatches:
    """What the op gives to ops that depend on it."""

    topic: str
    group: str
    outcome: Outcome
    batch_ids: tuple[str, ...]
    offsets: int
    lag: int


@dataclass(frozen=True, slots=True)
class _Nothing:
    """Why there is no further batch; `stale_in_s` as in `marshal_dagster.delivery.Idle`."""

    outcome: Outcome
    text: str
    stale_in_s: float | None = None


class WorkOptions(TypedDict, total=False):
    """How batches are claimed and worked on; the same for an op and for an asset."""

    sink: Sink | MakeSink | None
    """Takes the rows in effectively once; may be made anew for each run by a function of the context."""
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
    entire_topic: bool
    """Claim all partitions of the topic or none."""
    ranges: RangeOptions | None
    """How ranges are claimed, in groups that do."""
    start: StartPolicy | str
    """Where a group begins that has no position in the topic; by default at the earliest offset."""
    max_attempts: int
    """How often a plan is tried before it is left to a person; 5 by default."""
    count_records: bool
    """Tell how many records the offsets of each batch held, where compaction and transactions leave fewer; it takes a
    pass over the batch of its own."""
    claimer_key: str
    """The resource that is the `ClaimerResource`; by default `claimer`."""
    spark_key: str | None
    """A resource that has a `spark_session` (a `LazyPySparkResource`, a `SparkConnectResource`).

    By default a session on this machine is started.
    """
    spark_config: Mapping[str, str] | None
    """Changes the settings (`spark_settings`) of a session that is started here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What an op or asset was told of its batches and run config does not change."""

    process: Process
    topic: str
    sink: Sink | MakeSink | None
    start: StartPolicy
    max_claims: int | None
    entire_topic: bool
    ranges: RangeOptions | None
    max_attempts: int
    count_records: bool
    claimer_key: str
    spark_key: str | None
    spark_config: Mapping[str, str]
    asset_key: AssetKey

    @property
    def resource_keys(self) -> set[str]:
        """The resources that a run needs."""
        return {self.claimer_key} | ({self.spark_key} if self.spark_key is not None else set())


def build_claimed_batch_op(
    process: Process,
    *,
    name: str,
    topic: str,
    asset_key: AssetKey | None = None,
    required_resource_keys: Sequence[str] = (),
    description: str | None = None,
    tags: Mapping[str, str] | None = None,
    retry_policy: RetryPolicy | None = None,
    pool: str | None = None,
    **options: Unpack[WorkOptions],
) -> OpDefinition:
    """Build the op `name`, which claims partitions of `topic`, has `process` work on them with Spark, and commits.

    `process(context, batch, frame)` gets key, value, topic, partition, offset, timestamp and headers of exactly the
    offsets that it holds.

    It works batch after batch until the topic is drained or a limit is reached; `options` are those of `WorkOptions`.
    In effectively once `process` returns the rows for the sink, in the other modes it does its work itself and returns
    None. The claim comes first, then the Spark session. Each batch is recorded as a materialization of `asset_key`
    (default: the op's name). The one output, a `DrainedBatches`, is left out when there was nothing to do, so that what
    depends on it is skipped. A step that is tried again, by `retry_policy` or by re-execution, gives what its failed
    attempts did too.

    Raises `ConfigurationError` for settings that no batch could keep to.
    """
    spec = batch_spec(process, topic, asset_key or AssetKey([name]), options)
    config_class = config_of(options)

    def claimed_batches(context: OpExecutionContext, config: config_class) -> Iterator[Output[DrainedBatches]]:  # type: ignore[valid-type]
        work = BatchWork(spec, context, config)
        if work.run():
            yield Output(work.result(), metadata=work.sum())

    return op(
        name=name,
        description=description or process.__doc__,
        out=Out(DrainedBatches, is_required=False, description="What was done; left out when there was nothing to do."),
        required_resource_keys={*spec.resource_keys, *required_resource_keys},
        tags={TOPIC_TAG: topic, **(tags or {})},
        retry_policy=retry_policy,
        pool=pool,
    )(claimed_batches)


def batch_spec(process: Process, topic: str, asset_key: AssetKey, options: WorkOptions) -> BatchSpec:
    """Gather what run config does not change. Raises `ConfigurationError`."""
    spark_key, spark_config = options.get("spark_key"), options.get("spark_config")
    require_topic(topic)
    if spark_key is not None and spark_config is not None:
        raise ConfigurationError(f"spark_config: the session of resource {spark_key!r} is configured there")
    return BatchSpec(
        process=process,
        topic=topic,
        sink=options.get("sink"),
        start=_start_policy(options.get("start", StartPolicy.EARLIEST)),
        max_claims=options.get("max_claims"),
        entire_topic=options.get("entire_topic", False),
        ranges=options.get("ranges"),
        max_attempts=options.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
        count_records=options.get("count_records", False),
        claimer_key=options.get("claimer_key", "claimer"),
        spark_key=spark_key,
        spark_config=dict(spark_config or {}),
        asset_key=asset_key,
    )


def config_of(options: WorkOptions) -> type[ClaimedBatchConfig]:
    """Give the config class with the defaults of `options`, so that the launchpad shows them.

    Raises `ConfigurationError`.
    """
    return _with_defaults(
        max_records=options.get("max_records"),
        max_bytes=options.get("max_bytes"),
        max_batches=options.get("max_batches"),
        time_budget_s=options.get("time_budget_s"),
    )


def _start_policy(start: StartPolicy | str) -> StartPolicy:
    try:
        return StartPolicy(start)
    except ValueError:
        raise ConfigurationError(f"start is {start!r}; it must be one of {', '.join(StartPolicy)}") from None


def _with_defaults(**defaults: float | None) -> type[ClaimedBatchConfig]:
    """Give the config class with other defaults, so that the launchpad shows them. Raises `ConfigurationError`."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if value is not None and value <= 0:
            raise ConfigurationError(f"{name} is {value}; it must be above 0")
        info = copy.copy(ClaimedBatchConfig.model_fields[name])
        info.default = value
        fields[name] = (info.annotation, info)
    return create_model(
        ClaimedBatchConfig.__name__, __base__=ClaimedBatchConfig, __doc__=ClaimedBatchConfig.__doc__, **fields
    )


@dataclass(slots=True)
class BatchWork:
    """One execution of the op or asset."""

    spec: BatchSpec
    context: OpExecutionContext
    config: ClaimedBatchConfig
    partition: int | None = None
    """The one Kafka partition to work on, for an asset with a Dagster partition for each."""
    keeps_last: bool = False
    """Leave the last batch's materialization to the caller, as `last`; an asset's own output is one."""
    last: AssetMaterialization | None = None
    ended: str = ""
    """Why there was nothing more to do; empty at a limit of this run."""
    done: list[DoneBatch] = field(default_factory=list)
    before: list[DoneBatch] = field(default_factory=list)
    """What earlier attempts of this step did, which failed and so handed nothing on."""
    before_in_run: int = 0
    """How many of them are of this very run."""
    spark: "SparkSession | None" = None
    records: Mapping[int, int] | None = None
    """How many records the batch in hand has of each partition, where they are counted."""

    def run(self) -> bool:
        """Work until drained or at a limit; tell whether this step did anything, in earlier attempts too."""
        tag_run(self.context, {GROUP_TAG: self.claimer.group, TOPIC_TAG: self.spec.topic})
        if over := self._run_is_over():
            raise Failure(f"nothing is begun: {over}", allow_retries=False)
        try:
            self._recall()
            idle = self._drain()
            outcome = Outcome.DONE if self.all_done or idle is None else idle.outcome
            tag_run(self.context, {OUTCOME_TAG: outcome.value})
        except BaseException as error:
            with suppress(Exception):  # the error of the work is the one to tell
                self._tell_last()
            self._forbid_retries(error)
            raise
        self.ended = "" if idle is None else idle.text
        if idle is not None:
            self.context.log.info(idle.text)
        if not self.all_done:
            self._tell_idle(outcome, self.ended)
        return bool(self.all_done)

    @property
    def all_done(self) -> list[DoneBatch]:
        """What this step did, in all of its attempts."""
        return [*self.before, *self.done]

    def _recall(self) -> None:
        """Learn what earlier attempts of this step did."""
        recorded = recorded_before(self.context, self.claimer.group, self.spec.topic)
        self.before = [batch for each in recorded if (batch := _recalled(each.metadata)) is not None]
        self.before_in_run = sum(each.run_id == self.context.run_id for each in recorded)
        if self.before:
            self.context.log.info(
                "earlier attempts of this step did %d batches, which belong to what it gives: %s",
                len(self.before),
                ", ".join(each.batch_id for each in self.before),
            )

    def _forbid_retries(self, error: BaseException) -> None:
        """Raise a `Failure` that is not tried again in place of `error`, if the run is over or being canceled.

        Dagster follows a retry policy when a cancellation interrupts the step, too.
        """
        over = self._run_is_over()
        if over is None:
            return
        if isinstance(error, RetryRequested) or self.context.get_step_execution_context().op_retry_policy is not None:
            raise Failure(f"{over}: {type(error).__name__} {error}".rstrip(), allow_retries=False) from error

    def _run_is_over(self) -> str | None:
        return run_is_over(self.context.instance, self.context.run_id)()

    @property
    def claimer(self) -> ClaimerResource:
        """The resource that claims. Raises `ConfigurationError`."""
        return claimer_of(self.context.resources, self.spec.claimer_key)

    # Working

    def _drain(self) -> _Nothing | None:
        """Work batch after batch; say why there was nothing more, or None at a limit.

        What another process of this run holds, which died if this step is tried again, is waited for until it is stale;
        while that sends heartbeats it is a holder like any other.
        """
        sink = self.spec.sink(self.context) if callable(self.spec.sink) else self.spec.sink
        idle = self._work_through(sink)
        waited_s = 0.0
        while idle is not None and not self.done and (idle.stale_in_s == 0 or (idle.stale_in_s and not waited_s)):
            waited_s += self._wait_for_own_claims(idle, waited_s)
            idle = self._work_through(sink)
        return idle

    def _wait_for_own_claims(self, idle: _Nothing, waited_s: float) -> float:
        """Wait until what this run's other process holds should be stale; fail where that takes too long."""
        interval_s = self.claimer.settings.heartbeat_interval_ms / 1_000
        longest_s = min(_LONGEST_WAIT_INTERVALS * interval_s, self.config.time_budget_s or math.inf)
        wait_s = (idle.stale_in_s or 0.0) + _SLACK_INTERVALS * interval_s
        if waited_s + wait_s > longest_s:
            tag_run(self.context, {OUTCOME_TAG: idle.outcome.value})
            raise Failure(f"nothing was done: {idle.text}", metadata=self._idle_metadata(idle.outcome, idle.text))
        self.context.log.info("waiting for %.1f s: %s", wait_s, idle.text)
        clock = self.claimer.open_delivery(self.context).clock or SystemClock()
        clock.sleep_ms(wait_s * 1_000)
        return wait_s

    def _work_through(self, sink: Sink | None) -> _Nothing | None:
        """Work batch after batch; say why there was nothing more, or None at a limit."""
        config = self.config
        left = None if config.max_batches is None else config.max_batches - self.before_in_run
        if left is not None and left < 1:
            return None
        batches = self.claimer.batches(
            self.context,
            sink=sink,
            max_batches=left,
            time_budget_s=config.time_budget_s,
            topic=self.spec.topic,
            partitions=self._partitions(),
            max_records=self._most_offsets(),
            max_claims=self.spec.max_claims,
            entire_topic=self.spec.entire_topic,
            ranges=self.spec.ranges,
            start=self.spec.start,
            max_attempts=self.spec.max_attempts,
            one_more_attempt=config.one_more_attempt,
            accept_data_loss=config.accept_data_loss,
            accept_new_log=config.accept_new_log,
        )
        for batch in batches:
            idle = self._work_on(batch)
            if idle is not None:
                return idle
        return None

    def _most_offsets(self) -> int | None:
        """Give the most offsets of a batch, by both limits."""
        from marshal_dagster.kafka.sampling import bytes_per_offset

        limit, max_bytes = self.config.max_records, self.config.max_bytes
        if max_bytes is None:
            return limit
        delivery = self.claimer.open_delivery(self.context)
        try:
            mean = bytes_per_offset(delivery.data, delivery.connection, self.claimer.group, self.spec.topic)
        except TopicMissing:  # the batch says so
            return limit
        if mean is None:
            return limit
        by_size = max(1, int(max_bytes / max(mean, 1.0)))  # of empty records, the next may be no empty ones
        self.context.log.info(
            "an offset of %s has about %.0f bytes: %d bytes are %d offsets", self.spec.topic, mean, max_bytes, by_size
        )
        return by_size if limit is None else min(limit, by_size)

    def _partitions(self) -> tuple[int, ...] | None:
        """Give the partitions that the run is limited to; one that takes the entire topic is not."""
        partitions = self.config.partitions
        if self.partition is not None:
            if partitions is not None:
                raise ConfigurationError("partitions: this run's Dagster partition says which one; leave it out")
            return (self.partition,)
        return None if partitions is None or self.spec.entire_topic else tuple(partitions)

    def _work_on(self, batch: ClaimedBatch) -> _Nothing | None:
        """Claim, process and commit one batch; give why there was nothing to do."""
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(batch)
                except TopicMissing:
                    missing = self._missing_topic()
                    if missing is None:
                        raise
                    return _Nothing(Outcome.TOPIC_MISSING, missing)
                if batch.idle is None:
                    self._tell_last()
                    self.records = {} if self.spec.count_records else None
                    self._process(batch)
        finally:
            self._observe_dropped(batch)
        if batch.idle is not None:
            return _Nothing(_outcome_of(batch.idle), batch.idle.text, batch.idle.stale_in_s)
        self._record(batch)
        self._observe_lost(batch)
        return None

    def _missing_topic(self) -> str | None:
        """Tell whether it is the data topic that does not exist."""
        try:
            self.claimer.open_delivery(self.context).data.describe(self.spec.topic)
        except TopicMissing as missing:
            return str(missing)
        return None

    def _process(self, batch: ClaimedBatch) -> None:
        log = self.context.log
        log.info("claimed batch %s: %s", batch.batch_id, ", ".join(_named(report) for report in batch.report()))
        if not batch.ranges:
            log.info("the sink has all of these ranges already: they are only committed")
            return
        spark = self._session(batch)
        frame = batch.read(spark)
        if not batch.ranges:
            return
        with _session_watched(spark), _progress_lines(self.context, spark, batch.batch_id):
            if self.spec.count_records:
                self.records = reading.count_records(frame)
            rows = self.spec.process(self.context, batch, frame)
            if self.spec.sink is not None and rows is not None:
                batch.write(rows)
            elif rows is not None:
                raise ConfigurationError(
                    f"the function of op {self.context.op.name!r} returned rows, but there is no sink to take them, so "
                    "nothing was committed: write them in the function and return None, or give the op a sink"
                )

    def _session(self, batch: ClaimedBatch) -> "SparkSession":
        if self.spark is None:
            began_s = time.monotonic()
            if self.spec.spark_key is not None:
                self.spark = getattr(self.context.resources, self.spec.spark_key).spark_session
            else:
                single = SINGLE_EXECUTION if batch.mode is DeliveryMode.AT_MOST_ONCE else {}
                extra = {**single, **self.spec.spark_config}
                name = f"{self.context.op.name} {self.context.run_id}"
                self.spark = start_session(spark_settings(app_name=name, extra=extra))
            took_s = time.monotonic() - began_s
            batch.phases.starting_spark_s = took_s
            self.context.log.info("the Spark session was ready after %.1f s", took_s)
        return self.spark

    # Telling

    def _record(self, batch: ClaimedBatch) -> None:
        """Note a batch that is over, as a materialization: its numbers plot over time."""
        reports, phases = tuple(batch.report()), batch.phases
        numbers: dict[str, float] = {
            "offsets": sum(each.range.width for each in reports),
            "lag": batch.lag_after,
            "lost_offsets": _lost_offsets(reports),
            **({} if self.records is None else {"records": sum(self.records.values())}),
            "waiting_s": round(phases.waiting_s, 3),
            "starting_spark_s": round(phases.starting_spark_s, 3),
            "reading_s": round(phases.reading_s, 3),
            "processing_s": round(max(0.0, phases.processing_s - phases.starting_spark_s), 3),
            "committing_s": round(phases.committing_s, 3),
        }
        if batch.outcome is not None and len(batch.outcome.rows) == len(batch.outcome.taken):
            numbers["rows"] = sum(batch.outcome.rows.values())
        done = DoneBatch(batch.batch_id, batch.mode, _table(reports, self.records), numbers)
        self.done.append(done)
        self.last = AssetMaterialization(
            self.spec.asset_key,
            partition=None if self.partition is None else str(self.partition),
            description=f"Batch {done.batch_id} of group {self.claimer.group!r}",
            metadata={
                **numbers,
                "ranges": done.ranges,
                "delivery": done.delivery.value,
                "batch_id": done.batch_id,
                "group": self.claimer.group,
                "topic": self.spec.topic,
                **({} if batch.outcome is None or batch.outcome.note is None else {"output": batch.outcome.note}),
            },
        )
        if not self.keeps_last:
            self._tell_last()

    def _tell_last(self) -> None:
        last, self.last = self.last, None
        if last is not None:
            self.context.log_event(last)

    def _observe_dropped(self, batch: ClaimedBatch) -> None:
        """Note what at most once has dropped, however the batch ended; the lines in the log are the batch's own."""
        dropped = set(batch.dropped)
        if not dropped:
            return
        reports = [report for report in batch.report() if report.range in dropped]
        try:
            self.context.log_event(
                AssetObservation(
                    announcements_key(self.spec.topic),
                    description="At most once: committed, and never processed, or possibly not.",
                    metadata={
                        "dropped": _table(reports),
                        "dropped_offsets": sum(report.range.width for report in reports),
                        "batch_id": batch.batch_id,
                        "group": self.claimer.group,
                    },
                )
            )
        except Exception as error:  # noqa: BLE001 - the batch's own error is the one to tell
            self.context.log.warning("what was dropped could not be written into the run's events: %s", error)

    def _observe_lost(self, batch: ClaimedBatch) -> None:
        """Note what retention has deleted of a batch that was committed, as an observation of the topic."""
        reports = [report for report in batch.report() if report.range.lost is not None]
        if not reports:
            return
        self.context.log_event(
            AssetObservation(
                announcements_key(self.spec.topic),
                description="Retention deleted these messages before they were read; the batch went on behind them.",
                metadata={
                    "lost": MetadataValue.json([_lost(report) for report in reports]),
                    "lost_offsets": _lost_offsets(reports),
                    "batch_id": batch.batch_id,
                    "group": self.claimer.group,
                },
            )
        )

    def _idle_metadata(self, outcome: Outcome, text: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "state": outcome.value,
            "reason": text,
            "group": self.claimer.group,
            "topic": self.spec.topic,
        }
        if self.config.seen:
            metadata["seen"] = _seen_table(self.config.seen)
        return metadata

    def _tell_idle(self, outcome: Outcome, text: str) -> None:
        """Say in the metadata that there was nothing to do and why; fail if that is what was asked for."""
        metadata = self._idle_metadata(outcome, text)
        self.context.log_event(
            AssetObservation(self.spec.asset_key, description=f"Nothing to do: {text}", metadata=metadata)
        )
        if self.config.on_idle == "fail":
            raise Failure(
                f"nothing to do: {text}", metadata=metadata, allow_retries=outcome is not Outcome.TOPIC_MISSING
            )

    def result(self) -> DrainedBatches:
        """Give what was done, for what depends on it."""
        return DrainedBatches(
            topic=self.spec.topic,
            group=self.claimer.group,
            outcome=Outcome.DONE,
            batch_ids=tuple(each.batch_id for each in self.all_done),
            offsets=sum(int(each.numbers["offsets"]) for each in self.all_done),
            lag=int(self.all_done[-1].numbers["lag"]),
        )

    def sum(self) -> dict[str, Any]:
        """Give the metadata of all batches together."""
        all_done = self.all_done
        names = {name: None for each in all_done for name in each.numbers}
        numbers = {name: sum(each.numbers.get(name, 0) for each in all_done) for name in names}
        numbers = {name: round(value, 3) if name.endswith("_s") else int(value) for name, value in numbers.items()}
        metadata: dict[str, Any] = {
            "batches": len(all_done),
            **numbers,
            "lag": int(all_done[-1].numbers["lag"]),
            "ranges": MetadataValue.table(
                [row for each in all_done for row in each.ranges.records], all_done[-1].ranges.schema
            ),
            "delivery": all_done[-1].delivery.value,
            "batch_ids": MetadataValue.json([each.batch_id for each in all_done]),
            "group": self.claimer.group,
            "ended": self.ended or "at a limit of this run",
        }
        if self.before:
            metadata["batches_of_earlier_attempts"] = len(self.before)
        if self.config.seen:
            metadata["seen"] = _seen_table(self.config.seen)
        return metadata


def _recalled(metadata: Mapping[str, MetadataValue[Any]]) -> DoneBatch | None:
    """Read what a batch was recorded with; None for what is of another form."""
    batch_id, delivery, ranges = (metadata.get(name) for name in ("batch_id", "delivery", "ranges"))
    numbers = {name: metadata[name].value for name in _NUMBERS if name in metadata}
    if batch_id is None or delivery is None or not isinstance(ranges, TableMetadataValue):
        return None
    if not {"offsets", "lag"} <= numbers.keys():
        return None
    return DoneBatch(str(batch_id.value), DeliveryMode(delivery.value), ranges, numbers)


def _outcome_of(idle: Idle) -> Outcome:
    return Outcome(idle.reason.value)


def _named(report: PartitionReport) -> str:
    return f"{report.range}{' (an open plan)' if report.is_replay else ''}"


_NUMBERS: Final = (
    "offsets",
    "lag",
    "lost_offsets",
    "records",
    "waiting_s",
    "starting_spark_s",
    "reading_s",
    "processing_s",
    "committing_s",
    "rows",
)
"""What a batch is recorded with that plots over time."""

_COLUMNS: Final = (
    TableColumn("partition", "int", "The partition."),
    TableColumn("start", "int", "The first offset of the range."),
    TableColumn("end", "int", "The next offset to read after it."),
    TableColumn("offsets", "int", "How many offsets it spans; compaction and transactions leave fewer records."),
    TableColumn("lost", "int", "How many of these, from the start, retention had deleted before they were read."),
    TableColumn("state", "string", "What became of the range."),
    TableColumn("lag_before", "int", "Offsets up to the end of the topic when the batch was planned."),
    TableColumn("lag_after", "int", "The same behind the batch."),
    TableColumn("epoch", "int", "The fencing token of the claim."),
    TableColumn("generation", "int", "The generation of the position: another one once a person has set it."),
    TableColumn("replay", "bool", "Whether it was the open plan of an earlier owner."),
    TableColumn("topic", "string", "The data topic."),
)
_RANGES: Final = TableSchema([*_COLUMNS])
_COUNTED: Final = TableSchema(
    [*_COLUMNS, TableColumn("records", "int", "How many records the offsets of the range held, where it was read.")]
)


def _table(reports: Sequence[PartitionReport], counts: Mapping[int, int] | None = None) -> TableMetadataValue:
    records = [
        TableRecord(
            {
                "partition": each.range.partition,
                "start": each.range.start,
                "end": each.range.end,
                "offsets": each.range.width,
                "lost": each.range.first_readable - each.range.start,
                "state": each.state,
                "lag_before": each.lag_before,
                "lag_after": each.lag_after,
                "epoch": each.range.epoch,
                "generation": each.range.generation,
                "replay": each.is_replay,
                "topic": each.range.topic,
                **({} if counts is None else {"records": counts.get(each.range.partition, 0)}),
            }
        )
        for each in reports
    ]
    return MetadataValue.table(records, _RANGES if counts is None else _COUNTED)


def _lost(report: PartitionReport) -> dict[str, int]:
    one = report.range
    return {"partition": one.partition, "start": one.start, "end": one.first_readable}


def _lost_offsets(reports: Sequence[PartitionReport]) -> int:
    return sum(report.range.first_readable - report.range.start for report in reports)


def _seen_table(seen: Sequence[SeenKey]) -> TableMetadataValue:
    names = tuple(SeenKey.model_fields)
    schema = TableSchema([TableColumn(name, "string" if name == "instance" else "int") for name in names])
    return MetadataValue.table([TableRecord({name: getattr(each, name) for name in names}) for each in seen], schema)


@contextmanager
def _session_watched(spark: "SparkSession") -> Iterator[None]:
    """Raise `BatchAborted` in place of what Spark raises when the session has died under the block."""
    from marshal_dagster.spark.jobs import session_ended

    try:
        yield
    except (MarshalError, Failure, RetryRequested):
        raise
    except Exception as error:
        ended = session_ended(spark, error)
        if ended is None:
            raise
        told = next(iter(str(error).splitlines()), type(error).__name__)
        raise BatchAborted(f"{ended} ({told}): this batch ends here and its claims are released") from error


@contextmanager
def _progress_lines(context: OpExecutionContext, spark: "SparkSession", batch_id: str) -> Iterator[None]:
    """Log how far Spark is, from a thread of its own, while the block runs."""
    from marshal_dagster.spark.jobs import progress

    over = threading.Event()

    def tell() -> None:
        last = ""
        while not over.wait(PROGRESS_EVERY_S):
            now = progress(spark, batch_id)
            if now is not None and str(now) != last:
                last = str(now)
                context.log.info("Spark: %s", last)

    thread = threading.Thread(target=tell, name=f"progress {batch_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
