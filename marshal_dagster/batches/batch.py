"""One claimed batch: its ranges, from the claim to the commit, and what becomes of it when something fails."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from marshal_dagster.batches.claim_guard import ClaimGuard
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.early_commit import EarlyCommit
from marshal_dagster.batches.failing_record import find_failing_record
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
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.spark import reader
from marshal_dagster.spark.session import check_session, check_single_execution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.batches.session import BatchSession


logger = logging.getLogger(__name__)


class BatchState(StrEnum):
    """How far a batch has got."""

    PREPARED = "prepared"
    """Nothing is claimed yet."""
    CLAIMED = "claimed"
    """The block was entered: the batch has its ranges, or is idle."""
    PERMITTED = "permitted"
    """This process may process the ranges; at most once has committed them."""
    READ = "read"
    """The block has been given what it needs to process the ranges."""
    LEFT_UNREAD = "left_unread"
    """The block was left, and nothing can have been processed."""
    LEFT_READ = "left_read"
    """The block was left after it was read; what it did is not committed, or not complete."""
    COMPLETED = "completed"
    """The block was left cleanly after it was read, and what it did is committed."""

    @property
    def was_read(self) -> bool:
        """Whether messages may have been processed."""
        return self in {BatchState.READ, BatchState.LEFT_READ, BatchState.COMPLETED}

    @property
    def is_aborted(self) -> bool:
        """Whether the block was left with its work not done, or not wholly."""
        return self in {BatchState.LEFT_UNREAD, BatchState.LEFT_READ}


class BatchEvent(StrEnum):
    """What moves a batch from one state to the next."""

    ENTER = "enter"
    PERMIT = "permit"
    READ = "read"
    LEAVE = "leave"
    COMPLETE = "complete"


BATCH_TRANSITIONS: Final[Mapping[tuple[BatchState, BatchEvent], BatchState]] = MappingProxyType(
    {
        (BatchState.PREPARED, BatchEvent.ENTER): BatchState.CLAIMED,
        (BatchState.CLAIMED, BatchEvent.PERMIT): BatchState.PERMITTED,
        (BatchState.CLAIMED, BatchEvent.READ): BatchState.READ,  # of nothing: there are no ranges to permit
        (BatchState.PERMITTED, BatchEvent.READ): BatchState.READ,
        (BatchState.READ, BatchEvent.READ): BatchState.READ,
        (BatchState.CLAIMED, BatchEvent.LEAVE): BatchState.LEFT_UNREAD,
        (BatchState.PERMITTED, BatchEvent.LEAVE): BatchState.LEFT_UNREAD,
        (BatchState.READ, BatchEvent.LEAVE): BatchState.LEFT_READ,
        (BatchState.LEFT_UNREAD, BatchEvent.COMPLETE): BatchState.LEFT_UNREAD,
        (BatchState.LEFT_READ, BatchEvent.COMPLETE): BatchState.COMPLETED,
    }
)
"""Every move that a batch can make; any other is a mistake of the caller (`ConfigurationError`)."""


class ClaimedBatch:
    """Exact offset ranges of a data topic, held by this process from `with` to the block's end.

    On entering it claims, plans and (at least once, effectively once) has its `ranges`; leaving the block cleanly
    commits and releases, any other way releases with nothing more committed. A block that did not read the batch
    commits nothing: at least once raises `BatchAbortedError`. `idle` says why there is nothing to do.
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
        """Prepare; `BatchSession.claimed_batch` makes these.

        With a `range_claimer` it holds ranges, and whole partitions only where one is to be finished whole; with
        `only_positions` it gives keys their first position and has nothing to do.
        """
        self.request = context.request
        self.skipped: tuple[ClaimedRange, ...] = ()
        self.idle: Idle | None = None
        self.advice: Advice | None = None
        """What it was advised to claim."""
        self.phases = PhaseDurations()
        self.outcome: WriteResult | None = None
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
        """What was read last."""
        self._written: DataFrame | None = None

    # What it is

    @property
    def _claimer(self) -> Claimer | RangeClaimer:
        return self._claims.claimer

    @property
    def batch_id(self) -> str:
        """The instance id of this tenure: unique to the batch."""
        return self._claimer.member.instance

    @property
    def mode(self) -> DeliveryMode:
        """The delivery mode of the group."""
        return self._delivery.settings.delivery

    @property
    def ranges(self) -> tuple[ClaimedRange, ...]:
        """The ranges to process, by partition."""
        return tuple(part for part in self._to_do if not self._is_dropped(part) and not self._early.is_refused(part))

    @property
    def dropped(self) -> tuple[ClaimedRange, ...]:
        """At most once: the ranges whose commit is or may be in the log and that are not processed, or not wholly.

        This process did not get the permission, or left the block by an error, or without having read them; `report`
        says of each whether it is dropped for sure.
        """
        return tuple(part for part in self._to_do if self._is_dropped(part))

    @property
    def all_ranges(self) -> tuple[ClaimedRange, ...]:
        """Every range of the batch, those that need no processing too, by partition."""
        if not self.skipped:
            return self._to_do
        return tuple(sorted((*self._to_do, *self.skipped), key=lambda part: part.partition))

    @property
    def lag_after(self) -> int:
        """Offsets that the batch leaves to be read in all partitions that it claimed, those that got no part too."""
        ends = {range_.partition: range_.end for range_ in self.all_ranges}
        return sum(max(0, at.end - ends.get(number, at.readable)) for number, at in self._claims.positions.items())

    def report(self) -> list[PartitionReport]:
        """Tell what each partition's part came to, by partition."""
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

    # The block

    def __enter__(self) -> Self:
        """Claim and plan. Raises `MarshalError`; then nothing is held any more."""
        began_s = time.monotonic()
        try:
            self._begin()
            self._move(BatchEvent.ENTER)
            self._entered_s = time.monotonic()
            self.phases.waiting_s = self._entered_s - began_s
        except BaseException:
            try:
                self._guard.release()
            finally:  # once more: the first time may have been interrupted
                self._guard.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit if the block was left cleanly; release in any case.

        Raises `BatchAbortedError` where a block that was left cleanly has not read, or not written, what it would
        commit.
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
                finally:  # once more: the first time may have been interrupted
                    self._guard.release()
            self.phases.committing_s += time.monotonic() - self._left_s
            self._notify_left()
        changed = self._claimer.rationalizer.changed
        if error is None and changed is not None and self.committed:
            raise CoordinationLogChangedError(f"what this batch has committed may be lost: {changed}")
        lost, is_told = self._guard.lost, isinstance(error, ClaimLostError | BatchAbortedError)
        if lost is not None and isinstance(error, Exception) and not is_told:
            raise self._guard.with_present_owner(lost, self._numbers) from error
        if named is not None:
            raise named from error

    # In the block

    def check(self) -> None:
        """Make sure that the claims still hold and the data topic is the same: call it before touching an output.

        Raises `ClaimLostError`, `BatchAbortedError`, `DataTopicChangedError`.
        """
        self._check_heartbeats()
        if self.idle is not None:
            return
        self._guard.check_claims(self._numbers)
        self._context.check_topic()

    def begin_processing(self) -> None:
        """Take the permission to process; `read` does it by itself, a reader of one's own must call it first.

        At most once: plans, announces and commits now; what did not get through is in `dropped`, should this raise too.
        Raises `PlanRejectedError`, `ClaimLostError`, `BatchAbortedError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        self._take_permission()
        if self.request.late_plan and self.ranges:
            self.plan()
        self._move(BatchEvent.READ)

    def read(self, spark: "SparkSession", *, min_partitions: int | None = None) -> "DataFrame":
        """Give a frame over exactly the ranges: key, value, topic, partition, offset, timestamp, headers.

        The frame reads Kafka anew for each action on it: cache it, or act on it once. `min_partitions` splits the
        reading into at least so many tasks (by default one for each Kafka partition). Its Spark jobs are cancelled when
        the claim is lost. Raises `ConfigurationError` for a session that could process a message twice in at most once.
        """
        began_s = time.monotonic()
        reader.check_min_partitions(min_partitions)
        check_session(spark)
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            check_single_execution(spark)
        self._take_permission()
        if self._guard.run_jobs_in(spark):
            self._check_heartbeats()
        frame = self._read_ranges(spark, min_partitions)
        self.phases.reading_s += time.monotonic() - began_s
        self._move(BatchEvent.READ)
        self._frame = frame
        return frame

    def plan(self) -> None:
        """Write a late plan now: from here on, a failure counts as an attempt at it.

        Raises `GroupPausedError` if the group was paused since the claim: then the batch is idle, and there is nothing
        to do. Raises `PlanRejectedError`, `ClaimLostError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        self._plan()
        if self.idle is not None:
            raise GroupPausedError(self.idle.text)

    def write(self, frame: "DataFrame") -> WriteResult:
        """Hand the result to the sink, once for the whole batch; its rows are told apart by their `partition` column.

        Raises `SinkRejectedError`, and what `check` raises.
        """
        if self._sink is None:
            raise ConfigurationError(f"delivery is {self.mode}: the batch has no sink; write the frame yourself")
        if self.outcome is not None:
            raise ConfigurationError("write() was called before: the sink takes the result of a batch in one piece")
        self.plan()
        self.check()
        self._written = frame
        began_s = time.monotonic()
        try:
            self.outcome = self._sink.write(frame, self.ranges, self._offsets_read, self.check)
        finally:
            self.phases.writing_s = time.monotonic() - began_s
        return self.outcome

    # Entering

    def _begin(self) -> None:
        self._context.look_up()
        self._claimer.ensure_group_settings()
        paused_until_s = self._claimer.paused_until_s()
        if paused_until_s is not None:
            self.idle = self._context.paused(paused_until_s)
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
        """Ask which partitions to claim, unless the request says it."""
        advise, request = self._delivery.advise, self.request
        if advise is None or request.partitions is not None or request.claim_entire_topic:
            return None
        return advise(request.topic)

    def _choose_claims(self, wanted: list[int]) -> list[int]:
        """Say which of `wanted` to claim, and set how: by ranges unless some are to be finished whole first."""
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
        """Write down the plans; at most once does so just before it processes."""
        if self._is_planned or self.mode is DeliveryMode.AT_MOST_ONCE or not self.all_ranges:
            return
        try:
            self._claimer.plan({range_.partition: range_.end for range_ in self.all_ranges})
        except PlanRejectedError:
            if self._claimer.paused_until_s() is None:
                raise
            self._to_do, self.skipped = (), ()
            self.idle = self._context.paused(self._claimer.paused_until_s())
        else:
            self._is_planned = True

    def _ask_sink(self) -> None:
        """Ask the sink which ranges it has: those are only committed."""
        if self._sink is None or not self._to_do:
            return
        ranges = self._to_do
        verdicts = self._sink.verdicts(ranges)
        self._to_do = tuple(part for part in ranges if verdicts[part] is not Verdict.SKIP)
        self.skipped = tuple(part for part in ranges if verdicts[part] is Verdict.SKIP)

    # Processing and leaving

    def _move(self, event: BatchEvent) -> None:
        """Move to the next state. Raises `ConfigurationError` for what a batch cannot do in its present one."""
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
        """Commit; however this ends, `dropped` has what may be in the log and may not be processed here."""
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
        """Commit what a clean block has done, or end the work of another; tell Kafka, while this is still the owner.

        Return the error that names the record at fault, where one is found.
        """
        named = None
        if error is None:
            self._finish()
            self._move(BatchEvent.COMPLETE)
        else:
            self._count_attempt(error)
            named = self._find_failing_record(error)
            self._guard.cancel_jobs(f"the batch was left: {type(error).__name__}")
        if self.committed and (error is None or isinstance(error, Exception)):  # an interrupt waits for no broker
            self._commit_to_kafka()
        return named

    def _find_failing_record(self, error: BaseException) -> FailingRecordError | None:
        """Look for the record by which Spark failed; not in at most once, which evaluates no record twice."""
        if not isinstance(error, Exception) or self._frame is None or self.mode is DeliveryMode.AT_MOST_ONCE:
            return None
        check = self._check_heartbeats
        return find_failing_record(error, self._frame, self.ranges, self._read_part, check, written=self._written)

    def _count_attempt(self, error: BaseException) -> None:
        """Write a late plan, so that a failure counts as an attempt; not after a mistake in code or an interrupt."""
        is_mistake = isinstance(error, ConfigurationError) or not isinstance(error, Exception)
        if is_mistake or not self.request.late_plan or self.idle is not None or not self._state.was_read:
            return
        self._plan_after_failure()

    def _plan_after_failure(self) -> None:
        """Write a late plan, so that the failure counts as an attempt and the partitions are tried in parts."""
        try:
            self._plan()
        except MarshalError as unplanned:
            logger.warning("this attempt at %s is not counted: %s", list(map(str, self.all_ranges)), unplanned)

    def _finish(self) -> None:
        if self.idle is not None:
            return
        self._check_heartbeats()
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            if not self._early.was_tried:
                logger.warning("the batch was left without being read: nothing was processed, nothing was committed")
            return
        self._require_work()
        self.check()
        self.plan()
        self._claimer.commit({part.partition: part.end for part in self.all_ranges})
        self.committed = True

    def _require_work(self) -> None:
        """Refuse to commit what nobody has processed."""
        if self._sink is not None and self._to_do and self.outcome is None:
            raise BatchAbortedError(
                "the block ended without batch.write(...): nothing was written, so nothing is committed"
            )
        if self._sink is None and not self._state.was_read:
            raise BatchAbortedError(reader.NOTHING_READ)

    def _commit_to_kafka(self) -> None:
        """Let lag tools see the offsets that are surely in the log; best effort.

        Before the release, while heartbeats go on: afterwards a successor's may be there, and would be set back.
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
        options = self._delivery.connection.spark_options()
        spark: SparkSession = self._guard.spark  # type: ignore[assignment] # the batch was read in it
        return reader.read_part(spark, options, self.request.topic, offsets)

    def _read_ranges(self, spark: "SparkSession", min_partitions: int | None = None) -> "DataFrame":
        return reader.read_ranges(
            spark,
            self._delivery.connection.spark_options(),
            self.request.topic,
            {range_.partition: (range_.first_readable, range_.end) for range_ in self.ranges},
            min_partitions=min_partitions,
            topic_id=self._context.topic_id,
        )

    def _notify_left(self) -> None:
        observer = self._delivery.observer
        if observer is None or self._only_positions:  # a part of another batch, which is told of
            return
        try:
            observer.left(self)
        except Exception:
            logger.exception("an observer of batches failed")

    # What it holds

    def _check_heartbeats(self) -> None:
        self._guard.check_heartbeats(self._numbers)

    @property
    def _numbers(self) -> list[int]:
        return [range_.partition for range_ in self.all_ranges]


class BatchObserver(Observer, Protocol):
    """An observer that is told of batches too."""

    def left(self, batch: "ClaimedBatch") -> None:
        """Take in that a batch was left, idle ones too; it holds nothing any more."""
        ...
