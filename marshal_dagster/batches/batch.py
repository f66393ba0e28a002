"""One claimed batch, from the claim of its ranges to their commit, in each delivery mode and after each failure.

`BatchSession` creates batches. A batch takes its ranges from `partition_source` or `range_source`, keeps its claims
with `claim_guard`, and reads and writes with Spark.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from marshal_dagster.batches.claim_guard import ClaimGuard
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.early_commit import EarlyCommit
from marshal_dagster.batches.failing_record import find_failing_record
from marshal_dagster.batches.manifest import BatchManifest
from marshal_dagster.batches.partition_source import PartitionSource
from marshal_dagster.batches.range_source import RangeSource
from marshal_dagster.batches.request import Advice
from marshal_dagster.batches.result import Idle, IdleReason, PartitionReport, PhaseDurations
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.observer import Observer
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    ConfigurationError,
    CoordinationLogChangedError,
    FailingRecordError,
    GroupPausedError,
    MarshalError,
    PlanRejectedError,
    SinkRejectedError,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Owner
from marshal_dagster.sinks import RemoteSink, Sink, WriteResult
from marshal_dagster.sinks.sink import check_result
from marshal_dagster.spark import reader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.batches.session import BatchSession


logger = logging.getLogger(__name__)


class BatchState(StrEnum):
    """The state of a batch."""

    PREPARED = "prepared"
    """Nothing is claimed yet."""
    CLAIMED = "claimed"
    """The block was entered: the batch has its ranges, or is idle."""
    PERMITTED = "permitted"
    """This process may process the ranges. In at most once they are committed."""
    READ = "read"
    """The block has read the batch, or has called `begin_processing`."""
    LEFT_UNREAD = "left_unread"
    """The block was left, and no message can have been processed."""
    LEFT_READ = "left_read"
    """The block was left after it was read; its work is not committed, or not complete."""
    COMPLETED = "completed"
    """The block was left without an error after it was read, and its work is committed."""

    @property
    def was_read(self) -> bool:
        """Whether messages may have been processed."""
        return self in {BatchState.READ, BatchState.LEFT_READ, BatchState.COMPLETED}

    @property
    def is_aborted(self) -> bool:
        """Whether the block was left before its work was completely done."""
        return self in {BatchState.LEFT_UNREAD, BatchState.LEFT_READ}


class BatchEvent(StrEnum):
    """An event that changes the state of a batch."""

    ENTER = "enter"
    PERMIT = "permit"
    READ = "read"
    LEAVE = "leave"
    COMPLETE = "complete"


BATCH_TRANSITIONS: Final[Mapping[tuple[BatchState, BatchEvent], BatchState]] = MappingProxyType(
    {
        (BatchState.PREPARED, BatchEvent.ENTER): BatchState.CLAIMED,
        (BatchState.CLAIMED, BatchEvent.PERMIT): BatchState.PERMITTED,
        (BatchState.CLAIMED, BatchEvent.READ): BatchState.READ,  # an empty batch: it has no ranges to permit
        (BatchState.PERMITTED, BatchEvent.READ): BatchState.READ,
        (BatchState.READ, BatchEvent.READ): BatchState.READ,
        (BatchState.CLAIMED, BatchEvent.LEAVE): BatchState.LEFT_UNREAD,
        (BatchState.PERMITTED, BatchEvent.LEAVE): BatchState.LEFT_UNREAD,
        (BatchState.READ, BatchEvent.LEAVE): BatchState.LEFT_READ,
        (BatchState.LEFT_UNREAD, BatchEvent.COMPLETE): BatchState.LEFT_UNREAD,
        (BatchState.LEFT_READ, BatchEvent.COMPLETE): BatchState.COMPLETED,
    }
)
"""All transitions of a batch; any other is a mistake of the caller (`ConfigurationError`)."""


class ClaimedBatch:
    """Exact offset ranges of a data topic that this process holds during a `with` block.

    On entry the batch claims partitions and determines its `ranges`. At least once and effectively once also plan them
    then, unless `BatchRequest.late_plan` is set. If the block ends without an error, the ranges are committed and
    released. If it ends with an error, they are released and nothing more is committed.

    If the block has not processed its ranges, nothing is committed and `BatchAbortedError` is raised. `idle` states why
    there is nothing to do. Create batches with `BatchSession.claimed_batch`.

    Example:
        ```python
        with session.claimed_batch(BatchRequest(topic="orders")) as batch:
            if batch.idle is None:
                batch.read(spark).write.mode("append").parquet("/data/orders")
        ```
    """

    def __init__(
        self,
        delivery: "BatchSession",
        context: BatchContext,
        claimer: Claimer,
        range_claimer: RangeClaimer | None = None,
        sink: Sink | None = None,
        *,
        only_positions: bool = False,
    ) -> None:
        """Prepare a batch; call `BatchSession.claimed_batch` to get one.

        Args:
            delivery: The session of the batch.
            context: The data topic and the group's keys.
            claimer: Claims whole partitions.
            range_claimer: Claims ranges. With it, a whole partition is claimed only to finish its open plan.
            sink: The output, in effectively once.
            only_positions: Only set the first position of keys; the batch is idle then.
        """
        self.request = context.request
        """The options of the batch."""
        self.skipped: tuple[ClaimedRange, ...] = ()
        """The ranges that the sink has already: they are committed without processing."""
        self.idle: Idle | None = None
        """Why there is nothing to do, or None."""
        self.advice: Advice | None = None
        """The partitions that the process should claim, if `BatchSession.advise` returned some."""
        self.phases = PhaseDurations()
        """The seconds spent in each phase so far."""
        self.outcome: WriteResult | None = None
        """The result of `write`, or of the sink of a script (`run_with_pipes`)."""
        self.metadata: dict[str, Any] = {}
        """Metadata for the batch's materialization. A function or a script may add to it."""
        self.committed = False
        """Whether this batch has committed anything."""
        self._delivery = delivery
        self._context = context
        self._guard = ClaimGuard(range_claimer or claimer, delivery.reasons_to_stop)
        start_heartbeats = self._guard.start_heartbeats
        self._whole = PartitionSource(context, claimer, start_heartbeats)
        self._ranged: RangeSource | None = None
        if range_claimer is not None:
            self._ranged = RangeSource(context, range_claimer, start_heartbeats, self._check_heartbeats)
        self._claims: PartitionSource | RangeSource = self._ranged or self._whole
        self._sink = sink
        self._only_positions = only_positions
        self._is_planned = False
        self._state = BatchState.PREPARED
        self._early = EarlyCommit()
        self._to_do: tuple[ClaimedRange, ...] = ()
        self._entered_s = self._left_s = 0.0
        self._frame: DataFrame | None = None
        """The frame that `read` returned last."""
        self._written: DataFrame | None = None

    # State

    @property
    def _claimer(self) -> Claimer | RangeClaimer:
        return self._claims.claimer

    @property
    def batch_id(self) -> str:
        """The instance id of the batch's claims; it is unique to the batch."""
        return self._claimer.member.instance

    @property
    def mode(self) -> DeliveryMode:
        """The delivery mode of the group."""
        return self._delivery.settings.delivery

    @property
    def ranges(self) -> tuple[ClaimedRange, ...]:
        """The ranges to process, by partition."""
        if not self._early.was_tried:  # only a commit before processing drops or refuses ranges
            return self._to_do
        return tuple(part for part in self._to_do if not self._is_dropped(part) and not self._early.is_refused(part))

    @property
    def dropped(self) -> tuple[ClaimedRange, ...]:
        """In at most once: the ranges whose commit is or may be in the log, but that are not completely processed.

        Either this process may not process them, or the block ended with an error, or it did not read them. `report`
        shows for each range whether it is certainly dropped.
        """
        return tuple(part for part in self._to_do if self._early.was_tried and self._is_dropped(part))

    @property
    def all_ranges(self) -> tuple[ClaimedRange, ...]:
        """All ranges of the batch by partition, with those that need no processing."""
        if not self.skipped:
            return self._to_do
        return tuple(sorted((*self._to_do, *self.skipped), key=lambda part: part.partition))

    @property
    def lag_after(self) -> int:
        """The number of unread offsets after the batch in all partitions that it claimed."""
        ends = {range_.partition: range_.end for range_ in self.all_ranges}
        return sum(max(0, at.end - ends.get(number, at.readable)) for number, at in self._claims.positions.items())

    def report(self) -> list[PartitionReport]:
        """Return the result for each range, by partition.

        Returns:
            A report for each range of `all_ranges`. It is final after the block has ended.
        """
        was_read, early = self._state.was_read, self._early
        states = dict.fromkeys(self.skipped, "skipped")
        states |= {part: early.how_dropped(part, was_read=was_read) for part in self.dropped}
        states |= dict.fromkeys(filter(early.is_refused, set(self._to_do) - states.keys()), "not committed")
        done = "committed" if self.committed else "not committed"
        topic_ends = {number: at.end for number, at in self._claims.positions.items()}
        return [
            PartitionReport(
                range_,
                topic_ends[range_.partition] - range_.start,
                max(0, topic_ends[range_.partition] - range_.end),
                range_.partition in self._claims.replays,
                states.get(range_, done),
            )
            for range_ in self.all_ranges
        ]

    def earlier_owners(self) -> dict[int, Owner]:
        """Return who held each partition whose open plan this batch repeats, as far as that is known.

        Returns:
            The last owner before this one, by partition. Ranges of a partition have none.
        """
        keys = self._context.keys(self._claims.replays)
        owners = {partition: key.former_owner for partition, key in keys.items()}
        return {partition: owner for partition, owner in owners.items() if owner is not None}

    # The block

    def __enter__(self) -> Self:
        """Claim and plan. If this raises a `MarshalError`, nothing is held any more."""
        began_s = time.monotonic()
        try:
            self._begin()
            self._move(BatchEvent.ENTER)
            self._entered_s = time.monotonic()
            self.phases.waiting_s = self._entered_s - began_s
        except BaseException:
            try:
                self._guard.release()
            finally:  # again, because the first call may have been interrupted
                self._guard.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit if the block ended without an error; release in any case.

        Raises:
            BatchAbortedError: The block has not read the batch, or has not written it to the sink.
            ClaimLostError: The claim was lost; the message names the present owner.
            FailingRecordError: Spark failed because of the records that the message names.
        """
        try:
            self._move(BatchEvent.LEAVE)
            self._left_s = time.monotonic()
            self.phases.processing_s += self._left_s - self._entered_s - self.phases.reading_s
            named = self._end_block(error)
        finally:
            try:
                self._log_dropped()
            finally:
                try:
                    self._guard.release()
                finally:  # again, because the first call may have been interrupted
                    self._guard.release()
            self.phases.committing_s += time.monotonic() - self._left_s
            self._notify_left()
        changed = self._claimer.rationalizer.changed
        if error is None and changed is not None and self.committed:
            raise CoordinationLogChangedError(
                f"group {self._delivery.group!r}: the commit of this batch of topic {self.request.topic!r} may be "
                f"lost: {changed}"
            )
        lost, is_its_error = self._guard.lost, isinstance(error, ClaimLostError | BatchAbortedError)
        if lost is not None and isinstance(error, Exception) and not is_its_error:
            raise self._guard.with_present_owner(lost, self._numbers) from error
        if named is not None:
            raise named from error

    # In the block

    def check(self) -> None:
        """Check that the claims still hold and that the data topic is the same.

        Call it before you change an output yourself. `write` calls it for a sink.

        Raises:
            ClaimLostError: A claim is lost.
            BatchAbortedError: The batch has to stop.
            DataTopicChangedError: The data topic was deleted and re-created.
        """
        self._check_heartbeats()
        if self.idle is not None:
            return
        self._guard.check_claims(self._numbers)
        self._context.check_topic()

    def begin_processing(self) -> None:
        """Check that the `ranges` may be processed now.

        Call it before you read the ranges in another way than with `read`. In at most once, it plans, announces and
        commits the ranges. Ranges that may not be processed are in `dropped`, even if this raises. A late plan is
        written now.

        Raises:
            PlanRejectedError: A plan was refused.
            ClaimLostError: A claim is lost.
            BatchAbortedError: The batch has to stop.
            UnavailableError: The log did not answer in time.
            CoordinationLogChangedError: The coordination log is not the one that was read before.
        """
        self._take_permission()
        if self.request.late_plan and self.ranges:
            self.plan()
        self._move(BatchEvent.READ)

    def read(self, spark: "SparkSession", *, min_partitions: int | None = None) -> "DataFrame":
        """Return a DataFrame over exactly the messages of `ranges`.

        Each action on the frame reads Kafka again: cache it, or use it for one action. Its Spark jobs are cancelled if
        the claim is lost. In at most once the ranges are planned, announced and committed first.

        Args:
            spark: The Spark session.
            min_partitions: The lowest number of Spark tasks for reading; by default one for each Kafka partition.

        Returns:
            A frame with the columns key, value, topic, partition, offset, timestamp and headers.

        Raises:
            ConfigurationError: The session cannot be used. For example, it could process a message twice in at most
                once.
            MarshalError: The errors of `begin_processing`.

        Example:
            ```python
            frame = batch.read(spark).selectExpr("CAST(value AS STRING) AS json", "partition", "offset")
            ```
        """
        began_s = time.monotonic()
        reader.check_min_partitions(min_partitions)
        self._delivery.records.check_session(spark, self.mode)
        self._take_permission()
        if self._guard.run_jobs_in(spark):
            self._check_heartbeats()
        frame = self._read_ranges(spark, min_partitions)
        self.phases.reading_s += time.monotonic() - began_s
        self._move(BatchEvent.READ)
        self._frame = frame
        return frame

    def plan(self) -> None:
        """Write a late plan now (`BatchRequest.late_plan`); after that, a failure counts as an attempt.

        Raises:
            GroupPausedError: The group was paused since the claim; the batch is idle now.
            PlanRejectedError: A plan was refused.
            ClaimLostError: A claim is lost.
            UnavailableError: The log did not answer in time.
            CoordinationLogChangedError: The coordination log is not the one that was read before.
        """
        self._plan()
        if self.idle is not None:
            raise GroupPausedError(self.idle.text)

    def write(self, frame: "DataFrame") -> WriteResult:
        """Write the result of the batch to the sink (effectively once). Call it once for the whole batch.

        Args:
            frame: The rows. The column `partition` assigns each row to a range.

        Returns:
            The ranges and the numbers of rows that the sink has written.

        Raises:
            ConfigurationError: The batch has no sink, or `write` was called before.
            SinkRejectedError: The sink cannot take the ranges or the rows.
            BatchAbortedError: The sink has not reported each range as taken or skipped.
            MarshalError: The errors of `plan` and `check`.

        Example:
            ```python
            batch.write(batch.read(spark).groupBy("partition").count())
            ```
        """
        if self._sink is None:
            raise ConfigurationError(
                f"group {self._delivery.group!r} has delivery {self.mode}, so the batch has no sink: write the frame "
                "without batch.write()"
            )
        if self.outcome is not None:
            raise ConfigurationError(
                f"group {self._delivery.group!r}: write() was called twice for one batch of topic "
                f"{self.request.topic!r}: write the whole result with one call"
            )
        self.plan()
        self.check()
        self._written = frame
        began_s = time.monotonic()
        ranges = self.ranges
        try:
            result = self._sink.write(frame, ranges, self._offsets_read, self.check)
        finally:
            self.phases.writing_s = time.monotonic() - began_s
        check_result(result, ranges, self._sink)
        self.outcome = result
        return result

    def manifest(self) -> BatchManifest:
        """Return the description of the batch with which a script can process it; it has at least one range."""
        return BatchManifest(
            batch_id=self.batch_id,
            mode=self.mode,
            coordination_topic=self._context.rationalizer.identity.topic,
            ranges=self.ranges,
            output=self._sink.output if isinstance(self._sink, RemoteSink) else None,
        )

    # Entering

    def _begin(self) -> None:
        self._context.look_up_partitions()
        self._claimer.ensure_group_settings()
        paused_until_s = self._claimer.paused_until_s()
        if paused_until_s is not None:
            self.idle = self._context.paused(paused_until_s, self._claimer.group.pause_origin)
            return
        self.advice = advice = self._ask_advice()
        allowed = [n for n in self._context.wanted() if advice is None or n in advice.partitions]
        if advice is not None and not allowed:
            self.idle = Idle(IdleReason.NOT_ASSIGNED, advice.text)
            return
        allowed = [number for number in allowed if number not in self.request.except_partitions]
        if not allowed:
            self.idle = self._context.drained()
            return
        wanted = self._choose_claims(allowed)
        self._to_do = self._claims.take(wanted)
        if self._only_positions:
            self._to_do, self.idle = (), self._context.drained()
            return
        if not self.request.late_plan:
            self._plan()
        try:
            self._ask_sink()
        except SinkRejectedError:
            self._plan_after_failure()
            raise
        if self.idle is None and not self.all_ranges:
            idle = self._claims.why_idle(wanted)
            self.idle = idle if advice is None else replace(idle, text=f"{idle.text}; {advice.text}")

    def _ask_advice(self) -> Advice | None:
        """Return which partitions to claim, unless the request names them."""
        advise, request = self._delivery.advise, self.request
        if advise is None or request.partitions is not None or request.claim_entire_topic:
            return None
        return advise(request.topic)

    def _choose_claims(self, wanted: list[int]) -> list[int]:
        """Return which of `wanted` to claim, and set how: by ranges, or whole if plans of whole partitions are open."""
        if self._ranged is None:
            return wanted
        missing = self._ranged.without_position(wanted)
        if missing:
            with self._delivery.positions_batch(replace(self.request, partitions=tuple(missing))):
                pass
        planned = self._whole.worth_trying(self._ranged.planned_whole(wanted))
        if not planned:
            return wanted
        self._claims = self._whole
        self._guard.claimer = self._whole.claimer
        return planned

    def _plan(self) -> None:
        """Write the plans; at most once writes them just before it processes."""
        if self._is_planned or self.mode is DeliveryMode.AT_MOST_ONCE or not self.all_ranges:
            return
        try:
            self._claimer.plan({range_.partition: range_.end for range_ in self.all_ranges})
        except PlanRejectedError:
            if self._claimer.paused_until_s() is None:
                raise
            self._to_do, self.skipped = (), ()
            self.idle = self._context.paused(self._claimer.paused_until_s(), self._claimer.group.pause_origin)
        else:
            self._is_planned = True

    def _ask_sink(self) -> None:
        """Find out which ranges the sink has already: those are committed without processing."""
        if self._sink is None or not self._to_do:
            return
        ranges = self._to_do
        verdicts = self._sink.verdicts(ranges)
        self._to_do = tuple(part for part in ranges if verdicts[part] is not Verdict.SKIP)
        self.skipped = tuple(part for part in ranges if verdicts[part] is Verdict.SKIP)

    # Processing and leaving

    def _move(self, event: BatchEvent) -> None:
        """Change to the next state; raise `ConfigurationError` if the present state does not allow the event."""
        moved = BATCH_TRANSITIONS.get((self._state, event))
        if moved is None:
            raise ConfigurationError(
                f"a batch that is {self._state} cannot {event}: enter it once with a `with` statement, and read it in "
                "the block"
            )
        self._state = moved

    def _take_permission(self) -> None:
        self._check_heartbeats()
        if self._state is not BatchState.CLAIMED or not self.ranges:
            return
        self._guard.check_claims(self._numbers)
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            self._commit_before_processing()
        self._move(BatchEvent.PERMIT)

    def _commit_before_processing(self) -> None:
        """Commit before processing; then `dropped` has the ranges that may be committed but not processed here."""
        ends = {part.partition: part.end for part in self._to_do}
        self.check()
        self._claimer.plan(ends)
        self._delivery.announce(self._to_do)
        self._early.claims = self._claimer.claims
        self._early.permitted = self._claimer.commit_before_processing(ends)
        self.committed = bool(self._early.permitted)
        self._log_dropped()

    def _is_dropped(self, part: ClaimedRange) -> bool:
        return self._early.is_dropped(part, is_aborted=self._state.is_aborted)

    def _log_dropped(self) -> None:
        self._early.log_dropped(self.dropped, was_read=self._state.was_read)

    def _end_block(self, error: BaseException | None) -> FailingRecordError | None:
        """Commit the work of a block without an error, or stop the work of a failed one.

        The offsets are also committed to Kafka, while this batch still owns them. Return the error that names the
        failing record, if one was found.
        """
        named = None
        if error is None:
            self._finish()
            self._move(BatchEvent.COMPLETE)
        else:
            self._count_attempt(error)
            named = self._find_failing_record(error)
            self._guard.cancel_jobs(f"the batch was left: {type(error).__name__}")
        if self.committed and (error is None or isinstance(error, Exception)):  # after an interrupt, do not wait
            self._commit_to_kafka()
        return named

    def _find_failing_record(self, error: BaseException) -> FailingRecordError | None:
        """Look for the record that made Spark fail; not in at most once, which must not evaluate a record twice."""
        if not isinstance(error, Exception) or self._frame is None or self.mode is DeliveryMode.AT_MOST_ONCE:
            return None
        check = self._check_heartbeats
        return find_failing_record(error, self._frame, self.ranges, self._read_part, check, written=self._written)

    def _count_attempt(self, error: BaseException) -> None:
        """Write a late plan, so that the failure counts as an attempt; not after a wrong call or an interrupt."""
        is_mistake = isinstance(error, ConfigurationError) or not isinstance(error, Exception)
        if is_mistake or not self.request.late_plan or self.idle is not None or not self._state.was_read:
            return
        self._plan_after_failure()

    def _plan_after_failure(self) -> None:
        """Write a late plan, so that the failure counts as an attempt, and retries take fewer partitions at once."""
        try:
            self._plan()
        except MarshalError as unplanned:
            logger.warning(
                "group %r: this attempt to process %s does not count, because its plan could not be written: %s",
                self._delivery.group,
                list(map(str, self.all_ranges)),
                unplanned,
            )

    def _finish(self) -> None:
        if self.idle is not None:
            return
        self._check_heartbeats()
        self._require_work()
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            return
        self.check()
        self.plan()
        self._claimer.commit({part.partition: part.end for part in self.all_ranges})
        self.committed = True

    def _require_work(self) -> None:
        """Raise `BatchAbortedError` if the block has not processed the batch."""
        if self._sink is not None and self._to_do and self.outcome is None:
            raise BatchAbortedError(
                f"group {self._delivery.group!r}, topic {self.request.topic!r}: the block ended without "
                "batch.write(...), so nothing was written and nothing is committed. Call batch.write(frame) in it"
            )
        if self._sink is not None or self._state.was_read:
            return
        if self._early.was_tried:
            raise BatchAbortedError(
                f"group {self._delivery.group!r}, topic {self.request.topic!r}: the block ended without an error, "
                "although batch.read(...) failed in it: these offsets are committed, and nothing processes them: "
                f"{', '.join(map(str, self._to_do))}. Let the block raise the error"
            )
        raise BatchAbortedError(reader.NOTHING_READ)

    def _commit_to_kafka(self) -> None:
        """Commit the offsets to Kafka, so that lag tools see them; failures are only logged.

        This happens before the release, because later it could set back the offset of the next owner.
        """
        sure = [
            range_
            for range_ in self.all_ranges
            if self.mode is not DeliveryMode.AT_MOST_ONCE or self._early.is_permitted(range_)
        ]
        offsets = self._claims.offsets_to_publish(sure)
        problem = self._delivery.data.commit_group_offsets(self._delivery.group, self.request.topic, offsets)
        if problem is not None:
            logger.warning(problem)

    def _offsets_read(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        spark = self._guard.spark
        if spark is None:
            return {range_.partition: [(range_.first_readable, range_.end)] for range_ in self.ranges}
        return reader.offsets_read(self._read_ranges(spark))

    def _read_part(self, offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
        spark: SparkSession = self._guard.spark  # type: ignore[assignment] # the batch was read in it
        return self._delivery.records.read_part(spark, self.request.topic, offsets)

    def _read_ranges(self, spark: "SparkSession", min_partitions: int | None = None) -> "DataFrame":
        return self._delivery.records.read_ranges(
            spark,
            self.request.topic,
            {range_.partition: (range_.first_readable, range_.end) for range_ in self.ranges},
            min_partitions=min_partitions,
            topic_id=self._context.topic_id,
        )

    def _notify_left(self) -> None:
        observer = self._delivery.observer
        if observer is None or self._only_positions:  # it is a part of another batch, which is reported
            return
        try:
            observer.left(self)
        except Exception:
            logger.exception("an observer of batches failed")

    # Claims

    def _check_heartbeats(self) -> None:
        self._guard.check_heartbeats(self._numbers)

    @property
    def _numbers(self) -> list[int]:
        return [range_.partition for range_ in self.all_ranges]


class BatchObserver(Observer, Protocol):
    """Callbacks for the events of batches and claimers. `Observer` has the rules for them."""

    def left(self, batch: "ClaimedBatch") -> None:
        """Handle the end of a batch, also of an idle one; it holds nothing any more."""
        ...
