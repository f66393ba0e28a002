"""One execution of an op or asset that claims, processes and commits batches.

`BatchExecution` processes batch after batch in one Spark session, until the topic is drained or a limit of the run is
reached. It records each batch as Dagster events. The op in `claimed_batch` and the assets of `marshal_asset` use it.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dagster import (
    AssetMaterialization,
    AssetObservation,
    Failure,
    MetadataValue,
    OpExecutionContext,
    RetryRequested,
    RunsFilter,
)
from dagster._core.storage.tags import RETRY_ON_ASSET_OR_OP_FAILURE_TAG  # has no public name

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.admin.position_spec import partition_numbers
from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.errors import (
    ConfigurationError,
    DecodeError,
    FailingRecordError,
    GroupPausedError,
    MarshalError,
    SchemaDriftError,
    SinkRejectedError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.ops.batch_events import BatchEvents
from marshal_dagster.ops.config import BatchSpec, ClaimedBatchConfig
from marshal_dagster.ops.dropped_ranges import dropped_by_earlier_attempts
from marshal_dagster.ops.metadata import (
    BatchesResult,
    CompletedBatch,
    ExecutionOutcome,
    completed_batch,
    parse_completed_batch,
    seen_table,
)
from marshal_dagster.ops.spark_monitor import full_disk_as_abort, progress_lines, session_death_as_abort
from marshal_dagster.ops.user_function import check_rows, function_text, require_no_rows
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.open_plans import exhausted, parts_to_retry
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of, copied_keys
from marshal_dagster.runs.exhausted_plans import (
    exhausted_plans_evaluation,
    exhausted_plans_text,
    failed_in_run,
    has_failed,
)
from marshal_dagster.runs.failed_batches import error_line
from marshal_dagster.runs.linked_runs import link_repeated_runs
from marshal_dagster.runs.names import ASSET_KEY_TAG, GROUP_TAG, OUTCOME_TAG, TOPIC_TAG, run_of, tag_run
from marshal_dagster.runs.recorded_batches import batches_of_earlier_attempts
from marshal_dagster.runs.status import run_is_over
from marshal_dagster.sinks import Sink
from marshal_dagster.spark import reader
from marshal_dagster.spark.job_control import is_stopped
from marshal_dagster.spark.session import SINGLE_EXECUTION, session_of_resource, spark_settings, start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_RUNS_LOOKED_AT: Final = 20
"""The number of newest runs of a group that are searched for other assets."""
_SLACK_INTERVALS: Final = 0.1
"""How long a run waits after its own earlier claims are stale, in heartbeat intervals."""
_LONGEST_WAIT_INTERVALS: Final = 3
"""How long a run waits in total for its own earlier claims, in heartbeat intervals."""


@dataclass(frozen=True, slots=True)
class _IdleResult:
    """Why there is no further batch; `stale_in_s` means the same as in `marshal_dagster.batches.Idle`."""

    outcome: ExecutionOutcome
    text: str
    stale_in_s: float | None = None


def _is_of_the_data(error: Exception) -> bool:
    """Return whether the records of a batch may have caused an error, so that another batch may succeed."""
    if isinstance(_retry_decision(error), RetryRequested):
        return False
    of_records = (DecodeError, FailingRecordError, SchemaDriftError, SinkRejectedError)
    return isinstance(error, of_records) or not isinstance(error, MarshalError)


def _retry_decision(error: BaseException) -> Failure | RetryRequested | None:
    """Return the exception by which the user's function decided about retries: `error`, or the first such cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Failure | RetryRequested):
        cause = cause.__cause__
    return cause


def _forbids_retries(error: BaseException) -> bool:
    decision = _retry_decision(error)
    return isinstance(decision, Failure) and not decision.allow_retries


@contextmanager
def _pause_as_idle(batch: ClaimedBatch) -> Iterator[None]:
    """Suppress the error if the group was paused between claim and plan: nothing was planned, so nothing failed."""
    try:
        yield
    except GroupPausedError:
        if batch.idle is None:
            raise


@dataclass(slots=True)
class BatchExecution:
    """One execution of an op or asset."""

    spec: BatchSpec
    context: OpExecutionContext
    config: ClaimedBatchConfig
    partition: int | None = None
    """The only Kafka partition to process, for an asset with one Dagster partition for each Kafka partition."""
    keeps_last: bool = False
    """Whether the caller records the last batch itself (from `last`), as the output of an asset."""
    last: AssetMaterialization | None = None
    """The materialization of the last batch, until it is recorded."""
    ended: str = ""
    """Why there was nothing more to do; empty if a limit of this run was reached."""
    idle_metadata: Mapping[str, Any] | None = None
    """The metadata recorded if there was nothing to do; its `state` is the outcome."""
    done: list[CompletedBatch] = field(default_factory=list)
    """The batches that this attempt completed."""
    before: list[CompletedBatch] = field(default_factory=list)
    """The batches that earlier attempts of this step completed. These attempts failed, so they had no output."""
    before_in_run: int = 0
    """How many of the batches in `before` belong to this run."""
    spark: "SparkSession | None" = None
    failed: dict[tuple[int, ...], Exception] = field(default_factory=dict)
    """The error of each part (a tuple of partitions) that failed again."""
    has_tried_parts: bool = False
    """Whether parts of an earlier failed batch were tried. Together they count as one batch."""
    began_s: float = field(default_factory=time.monotonic)
    exhausted: str = ""
    """A text with the exhausted plans and what an operator must do; empty if there are none."""
    has_dropped: bool = False
    """Whether an at-most-once batch failed after its commit: a retry would find nothing to repeat, and succeed."""
    has_exhausted: bool = False
    """Whether a plan is exhausted whose last failed attempt was one of this run: the step fails then."""
    records: Mapping[int, int] | None = None
    """The number of records of each partition in the current batch, if records are counted."""

    def run(self) -> bool:
        """Process batches until the topic is drained or a limit is reached.

        Return whether this step completed any batch, including those of its earlier attempts. Raise `Failure` if only
        exhausted plans are left, or if the run's own retries have exhausted one.
        """
        self._warn_of_other_assets()
        if over := self._run_is_over():
            raise Failure(f"no batch was started: {over}", allow_retries=False)
        if self.spec.with_frame and self.spec.spark_key is None:
            require_extra(Extra.SPARK, f"op {self.context.op.name!r}")
        try:
            self._recall()
            self._fail_if_earlier_attempts_dropped()
            idle = self._drain()
            outcome = ExecutionOutcome.DONE if self.all_done or idle is None else idle.outcome
            tag_run(self.context, {OUTCOME_TAG: outcome.value})
            self._try_to_report_exhausted()
        except BaseException as error:
            with suppress(Exception):  # report the error of the batch, not one of recording it
                self._report_last()
                if isinstance(error, Exception) and not isinstance(error, UnavailableError):
                    self._report_exhausted()  # this attempt may have been the last one
            self._forbid_retries(error)
            self._keep_retry_decision(error)
            raise
        self.ended = "" if idle is None else idle.text
        if idle is not None:
            self.context.log.info(idle.text)
        if not self.all_done:
            self._record_idle(outcome, self.ended)
        elif self.has_exhausted or (not self.done and idle is not None and idle.outcome is ExecutionOutcome.GIVEN_UP):
            self._report_last()
            tag_run(self.context, {OUTCOME_TAG: ExecutionOutcome.GIVEN_UP.value})
            self._fail_for_good(self.exhausted or self.ended, self._metadata_of(ExecutionOutcome.GIVEN_UP, self.ended))
        return bool(self.all_done)

    def _warn_of_other_assets(self) -> None:
        """Tag the run, and log a warning if newer runs of the same group and topic were for another asset."""
        group, topic, own = self.claimer.group, self.spec.topic, self.spec.asset_key.to_user_string()
        tags = {GROUP_TAG: group, TOPIC_TAG: topic}
        runs = self.context.instance.get_runs(RunsFilter(tags=tags), limit=_RUNS_LOOKED_AT)
        others = {key: run.run_id for run in reversed(runs) if (key := run.tags.get(ASSET_KEY_TAG, own)) != own}
        for key, run_id in others.items():
            self.context.log.warning(
                "group %r, topic %r: run %s was for asset %r. Assets of one group share its position, so each message "
                "is processed for one of them only. If both need all messages, give %r a ClaimerResource with another "
                "group",
                group,
                topic,
                run_id,
                key,
                own,
            )
        tag_run(self.context, {**tags, ASSET_KEY_TAG: own})

    def _try_to_report_exhausted(self) -> None:
        try:
            self._report_exhausted()
        except Exception:  # the batches are committed, so the run does not fail
            self.context.log.exception("the plans that failed too many times could not be reported")

    def _report_exhausted(self) -> None:
        """Log a warning about exhausted plans, and record the result of the check `exhausted_plans`.

        If there are no exhausted plans, the result is recorded only if the check failed before. Otherwise a step of the
        check itself records it.
        """
        plans = exhausted(self.claimer.open_delivery(self.context).open_plans(self.spec.topic), self.spec.max_attempts)
        self.exhausted = exhausted_plans_text(self.context.instance, plans)
        if plans:
            self.has_exhausted = failed_in_run(self.context.instance, plans, self.context.run_id)
            self.context.log.warning(self.exhausted)
        if plans or has_failed(self.context.instance, self.spec.asset_key):
            evaluation = exhausted_plans_evaluation(self.spec.asset_key, plans, self.exhausted)
            self.context.log_event(evaluation)  # type: ignore[arg-type] # accepted at run time

    @property
    def all_done(self) -> list[CompletedBatch]:
        """The batches that this step completed, in all of its attempts."""
        return [*self.before, *self.done]

    def _recall(self) -> None:
        """Read from Dagster's events which batches earlier attempts of this step completed."""
        recorded = batches_of_earlier_attempts(self.context, self.claimer.group, self.spec.topic)
        self.before = [batch for _, metadata in recorded if (batch := parse_completed_batch(metadata)) is not None]
        self.before_in_run = sum(run_id == self.context.run_id for run_id, _ in recorded)
        if self.before:
            self.context.log.info(
                "earlier attempts of this step completed %d batches, which its output includes: %s",
                len(self.before),
                ", ".join(batch.batch_id for batch in self.before),
            )

    def _fail_if_earlier_attempts_dropped(self) -> None:
        """Raise `Failure` if an earlier attempt of this step, whose process was killed, possibly dropped messages."""
        if DeliveryMode(self.claimer.delivery) is not DeliveryMode.AT_MOST_ONCE:
            return
        dropped = dropped_by_earlier_attempts(self.context, self.claimer.group, self.spec.topic, self._keys)
        if dropped is not None:
            raise Failure(
                f"group {self.claimer.group!r}: an earlier attempt of this step was stopped. {dropped.describe()}. "
                "They are not processed again (at most once); the next run continues after them",
                allow_retries=False,
            )

    def _keys(self) -> dict[DataPartitionId, Key]:
        """Read the log to its end, and return copies of the group's keys."""
        session = self.claimer.open_delivery(self.context)
        reader = session._rationalizer(self.spec.topic)  # noqa: SLF001 - there is no public way to its reader
        with reader.lock:
            reader.catch_up()
            return copied_keys(reader.world, self.claimer.group)

    def _forbid_retries(self, error: BaseException) -> None:
        """Raise a `Failure` without retries instead of `error`, if the run is over or messages were dropped.

        Otherwise Dagster would apply a retry policy even to a step that a cancellation interrupted.
        """
        reason = self._run_is_over()
        if reason is None and self.has_dropped:
            reason = (
                f"group {self.claimer.group!r}, topic {self.spec.topic!r}: the failed batch is committed and its "
                "messages are dropped (at most once), so the step is not retried. Fix the cause; the next run "
                "continues after them"
            )
        if reason is None:
            return
        if isinstance(error, RetryRequested) or self.context.get_step_execution_context().op_retry_policy is not None:
            raise Failure(f"{reason}: {type(error).__name__} {error}".rstrip(), allow_retries=False) from error

    @staticmethod
    def _keep_retry_decision(error: BaseException) -> None:
        """Raise what the user's function decided about retries, if an error of the library has replaced it."""
        decision = _retry_decision(error)
        if decision is error:
            return
        if isinstance(decision, RetryRequested):
            raise RetryRequested(decision.max_retries, decision.seconds_to_wait) from error
        if decision is not None:
            text = f"{type(error).__name__}: {error}"
            raise Failure(text, metadata=decision.metadata, allow_retries=decision.allow_retries) from error

    def _run_is_over(self) -> str | None:
        return run_is_over(self.context.instance, self.context.run_id)()

    @property
    def claimer(self) -> ClaimerResource:
        """The resource that claims. Raises `ConfigurationError`."""
        return claimer_of(self.context.resources, self.spec.claimer_key)

    @property
    def _events(self) -> BatchEvents:
        return BatchEvents(self.context, self.claimer.group, self.spec)

    # Processing batches

    def _drain(self) -> _IdleResult | None:
        """Process batches; return why there was nothing more to do, or None if a limit was reached.

        An earlier process of this run may still hold partitions, for example if this step is retried after a crash. The
        step waits until those claims are stale. If that process still sends heartbeats, it counts as another member.
        """
        sink = self._make_sink()
        self._retry_parts(sink)
        idle = self._work_through(sink)
        waited_s = 0.0
        while idle is not None and not self.done and (idle.stale_in_s == 0 or (idle.stale_in_s and not waited_s)):
            waited_s += self._wait_for_own_claims(idle, waited_s)
            idle = self._work_through(sink)
        if self.failed:
            self._fail_for_parts()
        return idle

    def _retry_parts(self, sink: Sink | None) -> None:
        """Retry plans that failed at least twice, in smaller parts each time; skip parts that fail again.

        See docs/contributing/decisions/0015-failing-plans-in-halves.md.
        """
        if self.spec.claim_entire_topic or self._batches_left() == 0:
            return
        for part in self._parts_to_retry():
            if self._time_left() == 0.0:
                return
            self.context.log.info("partitions %s failed before, so they are retried in a separate batch", list(part))
            try:
                for batch in self._batches(sink, max_batches=1, partitions=part):
                    self.has_tried_parts |= self._work_on(batch) is None
            except Exception as error:
                if not _is_of_the_data(error):
                    raise
                self.has_tried_parts = True
                self.failed[part] = error
                self.context.log.exception("partitions %s failed again; the run continues without them", list(part))

    def _parts_to_retry(self) -> list[tuple[int, ...]]:
        """Return the parts (tuples of partitions) to retry one by one, those with the fewest attempts first."""
        session, most = self.claimer.open_delivery(self.context), self.spec.max_attempts
        plans = session.open_plans(self.spec.topic, read_on=True)
        wanted = self._partitions()
        advice = None if session.advise is None or wanted is not None else session.advise(self.spec.topic)
        allowed = wanted if advice is None else advice.partitions
        plans = [plan for plan in plans if allowed is None or plan.partition in allowed]
        if not self.config.retry_exhausted:
            tired = exhausted(plans, most)
            plans = [plan for plan in plans if plan not in tired]
        size = self.spec.max_claims
        parts = parts_to_retry(plans, most)
        if size is None:
            return parts
        return [part[at : at + size] for part in parts for at in range(0, len(part), size)]

    def _fail_for_parts(self) -> NoReturn:
        """Fail the run because of the parts that failed again, after everything else is done."""
        parts = "; ".join(f"partitions {list(part)}: {error_line(error)}" for part, error in self.failed.items())
        raise Failure(
            f"group {self.claimer.group!r}, topic {self.spec.topic!r}: some partitions failed again, all others are "
            f"processed. {parts}. Fix the cause, or set the position after the failing messages with "
            "`marshal-dagster position reset`",
            allow_retries=not any(map(_forbids_retries, self.failed.values())),
        ) from next(iter(self.failed.values()))

    def _batches_left(self) -> int | None:
        """Return how many batches this run may still start; None without a limit."""
        most = self.config.max_batches
        return None if most is None else max(0, most - self.before_in_run - self.has_tried_parts)

    def _time_left(self) -> float | None:
        """Return for how many seconds this run may still start batches; None without a limit."""
        budget_s = self.config.time_budget_s
        if budget_s is None or not self.has_tried_parts:
            return budget_s
        return max(0.0, budget_s - (time.monotonic() - self.began_s))

    def _make_sink(self) -> Sink | None:
        if not callable(self.spec.sink):
            return self.spec.sink
        sink: Any = self.spec.sink(self.context)
        if not hasattr(sink, "verdicts"):
            text = "None" if sink is None else f"a {type(sink).__name__}"
            raise ConfigurationError(
                f"{function_text(self.spec.sink)} is the option `sink`, but it returned {text}: return a Sink"
            )
        made: Sink = sink
        return made

    def _wait_for_own_claims(self, idle: _IdleResult, waited_s: float) -> float:
        """Wait until the claims of this run's earlier process should be stale; return the wait in seconds.

        Raises `Failure` if that takes too long.
        """
        interval_s = self.claimer.settings.heartbeat_interval_ms / 1_000
        longest_s = min(_LONGEST_WAIT_INTERVALS * interval_s, self.config.time_budget_s or math.inf)
        wait_s = (idle.stale_in_s or 0.0) + _SLACK_INTERVALS * interval_s
        if waited_s + wait_s > longest_s:
            tag_run(self.context, {OUTCOME_TAG: idle.outcome.value})
            raise Failure(f"no batch was processed: {idle.text}", metadata=self._metadata_of(idle.outcome, idle.text))
        self.context.log.info("waiting %.1f s for claims of an earlier process of this run: %s", wait_s, idle.text)
        clock = self.claimer.open_delivery(self.context).clock or SystemClock()
        clock.sleep_ms(wait_s * 1_000)
        return wait_s

    def _work_through(self, sink: Sink | None) -> _IdleResult | None:
        """Process batch after batch; return why there was nothing more to do, or None if a limit was reached."""
        left, left_s = self._batches_left(), self._time_left()
        if left == 0 or left_s == 0.0:
            return None
        for batch in self._batches(sink, max_batches=left, time_budget_s=left_s, partitions=self._partitions()):
            idle = self._work_on(batch)
            if idle is not None:
                return idle
        return None

    def _batches(
        self,
        sink: Sink | None,
        *,
        partitions: tuple[int, ...] | None,
        max_batches: int | None,
        time_budget_s: float | None = None,
    ) -> Iterator[ClaimedBatch]:
        """Return an iterator of batches of these partitions, without the partitions that failed in this run."""
        config = self.config
        return self.claimer.batches(
            self.context,
            sink=sink,
            max_batches=max_batches,
            time_budget_s=time_budget_s,
            topic=self.spec.topic,
            partitions=partitions,
            except_partitions=frozenset(partition for part in self.failed for partition in part),
            max_records=self._most_offsets(),
            max_claims=self.spec.max_claims,
            claim_entire_topic=self.spec.claim_entire_topic,
            ranges=self.spec.ranges,
            start=self.spec.start,
            max_attempts=self.spec.max_attempts,
            retry_exhausted=config.retry_exhausted,
            allow_data_loss=config.allow_data_loss,
            allow_log_reset=config.allow_log_reset,
            allow_topic_without_id=self.spec.allow_topic_without_id,
            late_plan=sink is not None,
        )

    def _most_offsets(self) -> int | None:
        """Return the maximum number of offsets of a batch by `max_records` and `max_bytes`; None without a limit."""
        limit, max_bytes = self.config.max_records, self.config.max_bytes
        if max_bytes is None:
            return limit
        delivery = self.claimer.open_delivery(self.context)
        try:
            mean = delivery.records.bytes_per_offset(delivery.data, self.claimer.group, self.spec.topic)
        except TopicNotFoundError:  # the batch itself reports it
            return limit
        if mean is None:
            return limit
        by_size = max(1, int(max_bytes / max(mean, 1.0)))  # at least 1 byte, because only the sample may be empty
        self.context.log.info(
            "topic %s has about %.0f bytes per offset, so max_bytes=%d allows %d offsets",
            self.spec.topic,
            mean,
            max_bytes,
            by_size,
        )
        return by_size if limit is None else min(limit, by_size)

    def _partitions(self) -> tuple[int, ...] | None:
        """Return the partitions that the run is limited to; None if it may claim any, or claims the entire topic."""
        partitions = self.config.partitions
        if self.partition is not None:
            if partitions is not None:
                raise ConfigurationError(
                    "this run has a Dagster partition, which selects the Kafka partition: remove `partitions` "
                    "from the run config"
                )
            return (self.partition,)
        numbers = None if partitions is None else partition_numbers(partitions, "partitions")
        return None if self.spec.claim_entire_topic else numbers

    def _work_on(self, batch: ClaimedBatch) -> _IdleResult | None:
        """Claim, process and commit one batch; return why there was nothing to do, or None."""
        try:
            disk = full_disk_as_abort(self.claimer.group, self.spec.topic)
            with disk, _pause_as_idle(batch), ExitStack() as stack:
                try:
                    stack.enter_context(batch)
                except TopicNotFoundError:
                    missing = self._missing_topic()
                    if missing is None:
                        raise
                    return _IdleResult(ExecutionOutcome.TOPIC_MISSING, missing)
                if batch.idle is None:
                    self._report_last()
                    self.records = {} if self.spec.count_records else None
                    self._process(batch)
        except BaseException as error:
            self.has_dropped |= bool(batch.dropped)
            if isinstance(error, Exception):
                self._events.observe_failed(batch, error)
            raise
        finally:
            self._events.observe_dropped(batch)
        if batch.idle is not None:
            return _IdleResult(ExecutionOutcome(batch.idle.reason.value), batch.idle.text, batch.idle.stale_in_s)
        self._record(batch)
        self._events.observe_lost(batch)
        return None

    def _missing_topic(self) -> str | None:
        """Return the error text if the data topic does not exist; None if another topic is missing."""
        try:
            self.claimer.open_delivery(self.context).data.describe(self.spec.topic)
        except TopicNotFoundError as missing:
            return str(missing)
        return None

    def _process(self, batch: ClaimedBatch) -> None:
        log = self.context.log
        ranges = [f"{part.range}{' (an open plan)' if part.is_replay else ''}" for part in batch.report()]
        log.info("claimed batch %s: %s", batch.batch_id, ", ".join(ranges))
        earlier = {run_of(owner.instance) for owner in batch.earlier_owners().values()}
        link_repeated_runs(self.context, earlier - {""}, batch.batch_id)
        if not batch.ranges:
            log.info("the sink already has all of these ranges, so they are only committed")
            return
        if not self.spec.with_frame:
            self.spec.process(self.context, batch)  # type: ignore[call-arg] # checked by `batch_spec`
            return
        spark = self._session(batch)
        frame = batch.read(spark, min_partitions=self.spec.min_partitions)
        if not batch.ranges:
            return
        with session_death_as_abort(spark), progress_lines(self.context, spark, batch.batch_id):
            if self.spec.sink is None:
                self._count(frame)
                self._process_without_sink(batch, frame)
                return
            rows = self.spec.process(self.context, batch, frame)  # type: ignore[call-arg] # as above
            if batch.outcome is None or rows is not None:
                check_rows(rows, self.spec.function)
            batch.plan()
            self._count(frame)
            if rows is not None:
                batch.write(rows)  # type: ignore[arg-type] # checked by `check_rows`

    def _process_without_sink(self, batch: ClaimedBatch, frame: "DataFrame") -> None:
        returned = self.spec.process(self.context, batch, frame)  # type: ignore[call-arg] # as above
        require_no_rows(returned, self.spec.function, self.context.op.name)

    def _count(self, frame: "DataFrame") -> None:
        if self.spec.count_records:
            self.records = reader.count_records(frame)

    def _session(self, batch: ClaimedBatch) -> "SparkSession":
        if self.spark is None:
            began_s = time.monotonic()
            key = self.spec.spark_key
            self.spark = self._own_session(batch.mode) if key is None else self._session_of_resource(key)
            took_s = time.monotonic() - began_s
            batch.phases.starting_spark_s = took_s
            self.context.log.info("the Spark session was ready after %.1f s", took_s)
        if is_stopped(self.spark):
            raise ConfigurationError(
                f"the Spark session of op {self.context.op.name!r} was stopped in an earlier batch or step, so this "
                f"batch cannot be read, and nothing of it is committed: {self.spec.function} must not call stop()"
            )
        return self.spark

    def _own_session(self, mode: DeliveryMode) -> "SparkSession":
        """Start a session for this run: it needs no dagster-pyspark, which requires one exact version of Dagster."""
        single = SINGLE_EXECUTION if mode is DeliveryMode.AT_MOST_ONCE else {}
        name = f"{self.context.op.name} {self.context.run_id}"
        return start_session(spark_settings(app_name=name, extra={**single, **(self.spec.spark_config or {})}))

    def _session_of_resource(self, key: str) -> "SparkSession":
        resource = getattr(self.context.resources, key)
        try:
            return session_of_resource(resource)
        except AttributeError as error:
            if (error.obj, error.name) != (resource, "spark_session"):
                raise
            raise ConfigurationError(
                f"resource {key!r} of op {self.context.op.name!r} is a {type(resource).__name__}, which has no "
                "spark_session: use a LazyPySparkResource or a SparkConnectResource"
            ) from None

    # Recording batches

    def _record(self, batch: ClaimedBatch) -> None:
        """Record a completed batch as a materialization; Dagster plots its numbers over time."""
        done = completed_batch(batch, self.records)
        self.done.append(done)
        self.last = self._events.materialization(batch, done, self.partition)
        if not self.keeps_last:
            self._report_last()

    def _report_last(self) -> None:
        last, self.last = self.last, None
        if last is not None:
            self.context.log_event(last)

    def _metadata_of(self, outcome: ExecutionOutcome, text: str) -> dict[str, Any]:
        group, topic = self.claimer.group, self.spec.topic
        return {"state": outcome.value, "reason": text, "group": group, "topic": topic, **self._seen}

    @property
    def _seen(self) -> dict[str, Any]:
        return {"seen": seen_table(self.config.seen)} if self.config.seen else {}

    def _record_idle(self, outcome: ExecutionOutcome, text: str) -> None:
        """Record why there was nothing to do; fail if the outcome or the run config requires it."""
        self.idle_metadata = metadata = self._metadata_of(outcome, text)
        self.context.log_event(
            AssetObservation(self.spec.asset_key, description=f"Nothing to do: {text}", metadata=metadata)
        )
        if outcome is ExecutionOutcome.GIVEN_UP:
            self._fail_for_good(self.exhausted or text, metadata)
        if outcome is ExecutionOutcome.TOPIC_MISSING and not self.spec.allow_missing_topic:
            self._fail_for_good(
                f"group {self.claimer.group!r}: {text}. If the topic is created later, set allow_missing_topic of the "
                "op or asset, so that runs succeed until then",
                metadata,
            )
        if self.config.on_idle == "fail":
            raise Failure(
                f"nothing to do: {text}", metadata=metadata, allow_retries=outcome is not ExecutionOutcome.TOPIC_MISSING
            )

    def _fail_for_good(self, text: str, metadata: Mapping[str, Any]) -> NoReturn:
        """Fail without a retry of the step or the run, because an operator must act first."""
        tag_run(self.context, {RETRY_ON_ASSET_OR_OP_FAILURE_TAG: "false"})
        raise Failure(text, metadata=metadata, allow_retries=False)

    def result(self) -> BatchesResult:
        """Return the output: what all attempts of this step completed."""
        return BatchesResult(
            topic=self.spec.topic,
            group=self.claimer.group,
            outcome=ExecutionOutcome.DONE,
            batch_ids=tuple(batch.batch_id for batch in self.all_done),
            offsets=sum(int(batch.numbers["offsets"]) for batch in self.all_done),
            lag=int(self.all_done[-1].numbers["lag"]),
        )

    def sum(self) -> dict[str, Any]:
        """Return the metadata of the output: the sums over all batches."""
        all_done = self.all_done
        names = {name: None for batch in all_done for name in batch.numbers}
        numbers = {name: sum(batch.numbers.get(name, 0) for batch in all_done) for name in names}
        numbers = {name: round(value, 3) if name.endswith("_s") else int(value) for name, value in numbers.items()}
        return {
            "batches": len(all_done),
            **numbers,
            "lag": int(all_done[-1].numbers["lag"]),
            "ranges": MetadataValue.table(
                [row for batch in all_done for row in batch.ranges.records], all_done[-1].ranges.schema
            ),
            "delivery": all_done[-1].delivery.value,
            "batch_ids": MetadataValue.json([batch.batch_id for batch in all_done]),
            "group": self.claimer.group,
            "ended": self.ended or "at a limit of this run",
            **({"batches_of_earlier_attempts": len(self.before)} if self.before else {}),
            **self._seen,
        }
