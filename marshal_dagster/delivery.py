"""Claimed batches: exact offset ranges held by a run, in the three delivery modes (PROTOCOL.md 6).

Floor 3: stands on `coordination`, `kafka` and `spark`, knows nothing of Dagster. A `Delivery` is what one process needs
for batch after batch; each `ClaimedBatch` is a tenure of its own: claim, plan, process, commit, release.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from marshal_dagster.coordination.claimer import (
    GO_EXTRA_PATIENCE_MS,
    Claim,
    Claimer,
    Member,
    new_instance_id,
    nobody_is_dead,
)
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.heartbeats import Heartbeats, ReasonToStop
from marshal_dagster.coordination.keeping import renew_snapshots
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import (
    BatchAborted,
    ClaimLost,
    ConfigurationError,
    DataTopicChanged,
    GroupPaused,
    MarshalError,
    PlanRejected,
    StartUnknown,
)
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet, Settings
from marshal_dagster.protocol.placement import coordination_partition
from marshal_dagster.protocol.positions import (
    Extent,
    Position,
    StartPolicy,
    check_incarnation,
    first_offset,
    position,
)
from marshal_dagster.protocol.ranges import ClaimedRange, Verdict, plan_ends
from marshal_dagster.protocol.state import Key, Owner
from marshal_dagster.spark import jobs, reading
from marshal_dagster.spark.session import check_session, check_single_execution
from marshal_dagster.spark.sinks import Sink, WriteOutcome

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.kafka.connection import KafkaConnection
    from marshal_dagster.kafka.topics import Topics

logger = logging.getLogger(__name__)

DEFAULT_MAX_ATTEMPTS: Final = 5


class IdleReason(StrEnum):
    """Why a batch has nothing to do."""

    PAUSED = "paused"
    HELD = "held"
    DRAINED = "drained"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a batch has nothing to do, and in a sentence.

    `stale_in_s` is set where what it waits for is held in the name of its own run: by a process of it that died, or by
    one that works on. In so many seconds that is stale, unless it sends another heartbeat.
    """

    reason: IdleReason
    text: str
    stale_in_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What one batch should take.

    `partitions` limits it to those (all by default), `max_records` bounds the offsets of all its ranges together,
    `max_claims` how many partitions it holds; `entire_topic` takes all partitions or none. `start` is for a group that
    claims the topic for the first time. A plan with `max_attempts` attempts is left alone unless `one_more_attempt`.
    `accept_data_loss` lets a batch go on where retention deleted messages unread (at least once does so by default);
    `accept_new_log` lets it go on where Kafka knows an offset of the group and the coordination log does not.
    """

    topic: str
    partitions: tuple[int, ...] | None = None
    max_records: int | None = None
    max_claims: int | None = None
    entire_topic: bool = False
    start: StartPolicy = StartPolicy.EARLIEST
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    one_more_attempt: bool = False
    accept_data_loss: bool | None = None
    accept_new_log: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that no batch could keep to."""
        for name, least in (("max_records", 1), ("max_claims", 1), ("max_attempts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        if self.partitions is not None and not self.partitions:
            raise ConfigurationError("partitions is empty: name some, or leave it out to take all")
        if self.partitions is not None and any(number < 0 for number in self.partitions):
            raise ConfigurationError(f"partitions is {list(self.partitions)}; partitions are numbered from 0")
        if self.entire_topic and (self.partitions is not None or self.max_claims is not None):
            raise ConfigurationError("entire_topic takes all partitions: leave out partitions and max_claims")


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What one partition's part of a batch came to. Lags are in offsets, as known when the batch was planned."""

    range: ClaimedRange
    lag_before: int
    lag_after: int
    is_replay: bool
    state: str


@dataclass(slots=True)
class Phases:
    """Seconds spent in each phase of a batch."""

    waiting_s: float = 0.0
    reading_s: float = 0.0
    processing_s: float = 0.0
    committing_s: float = 0.0


Announce = Callable[[Sequence[ClaimedRange]], None]
"""Told the ranges of an at-most-once batch just before they are committed and may be lost."""


def announce_to_log(ranges: Sequence[ClaimedRange]) -> None:
    """Write the ranges into the log."""
    logger.info("about to commit before processing: %s", ", ".join(str(one) for one in ranges))


@dataclass(slots=True, kw_only=True)
class Delivery:
    """What the batches of one process share: connections, the world state, and in whose name they claim.

    `run_id` is put in front of each instance id, `client` is for people. `is_dead` tells of an owner that its run is
    over; `reasons_to_stop` are asked before each heartbeat. `data` are the data cluster's topics; its `connection` is
    handed to Spark. Where the log is long it is read on from one of `snapshots`, which are renewed at the end.
    """

    log: CoordinationLog
    data: "Topics"
    connection: "KafkaConnection"
    group: str
    client: str
    run_id: str
    settings: Settings
    is_dead: Callable[[Owner], bool] = nobody_is_dead
    announce: Announce = announce_to_log
    reasons_to_stop: Sequence[ReasonToStop] = ()
    clock: Clock | None = None
    timeout_s: float = 10.0
    snapshots: Snapshots | None = None
    _followed: Rationalizer | None = None

    def __post_init__(self) -> None:
        """Refuse a mode that the rule set cannot promise."""
        if self.settings.rule_set is RuleSet.GO and self.settings.delivery is not DeliveryMode.AT_LEAST_ONCE:
            raise ConfigurationError(
                f"delivery is {self.settings.delivery}; a group shared with Go consumers (rule set 'go') can only "
                "promise at_least_once"
            )

    def claimed_batch(self, request: BatchRequest, sink: Sink | None = None) -> "ClaimedBatch":
        """Give a batch to be used in a `with` block; nothing is claimed before it is entered."""
        effectively_once = self.settings.delivery is DeliveryMode.EFFECTIVELY_ONCE
        if effectively_once and sink is None:
            raise ConfigurationError("delivery is effectively_once: give the batch a sink that takes each range once")
        if sink is not None and not effectively_once:
            raise ConfigurationError(
                f"delivery is {self.settings.delivery}, a sink takes part in effectively_once only: change the "
                "group's delivery, or write the frame yourself"
            )
        member = Member(self.group, self.client, new_instance_id(self.run_id))
        rationalizer = self._rationalizer(request.topic)
        claimer = Claimer(rationalizer, member, request.topic, self.settings, clock=self.clock)
        return ClaimedBatch(self, claimer, request, sink)

    def batches(
        self,
        request: BatchRequest,
        sink: Sink | None = None,
        *,
        max_batches: int | None = None,
        time_budget_s: float | None = None,
    ) -> Iterator["ClaimedBatch"]:
        """Give batch after batch, each to be used in a `with` block, until one is idle or a limit is reached.

        The last one given may be idle: its `idle` says why. No batch is begun after `time_budget_s` seconds.
        """
        began_s = time.monotonic()
        count = 0
        while max_batches is None or count < max_batches:
            if time_budget_s is not None and count and time.monotonic() - began_s >= time_budget_s:
                return
            batch = self.claimed_batch(request, sink)
            yield batch
            if batch.idle is not None:
                return
            count += 1

    def close(self) -> None:
        """Renew what snapshots are old, then let go of all connections."""
        followed, snapshots = self._followed, self.snapshots
        try:
            if followed is not None and followed.failure is None and snapshots is not None:
                renew_snapshots(followed, snapshots, self.clock)
        finally:
            self.log.close()
            self.data.close()

    def _rationalizer(self, topic: str) -> Rationalizer:
        """Give the one rationalizer on the log; it follows what the topics of all batches need."""
        if self._followed is None:
            timeout_s = min(self.timeout_s, max(1.0, self.settings.heartbeat_interval_ms / 4_000))
            self._followed = Rationalizer(self.log, topics=[topic], timeout_s=timeout_s, snapshots=self.snapshots)
        partition = coordination_partition(topic, self._followed.identity.partitions)
        if partition not in self._followed.world.partitions:
            self._followed.follow_all()
        return self._followed


class ClaimedBatch:
    """Exact offset ranges of a data topic, held by this process from `with` to the block's end.

    On entering it claims, plans and (at least once, effectively once) has its `ranges`; leaving the block cleanly
    commits and releases, any other way releases with nothing more committed. A block that did not read the batch
    commits nothing: at least once raises `BatchAborted`. `idle` says why there is nothing to do.
    """

    def __init__(self, delivery: Delivery, claimer: Claimer, request: BatchRequest, sink: Sink | None) -> None:
        """Prepare; `Delivery.claimed_batch` makes these."""
        self.request = request
        self.skipped: tuple[ClaimedRange, ...] = ()
        self.idle: Idle | None = None
        self.phases = Phases()
        self.outcome: WriteOutcome | None = None
        self.committed = False
        self._delivery = delivery
        self._claimer = claimer
        self._sink = sink
        self._positions: dict[int, Position] = {}
        self._replays: set[int] = set()
        self._topic_id = ""
        self._stack = ExitStack()
        self._heartbeats: Heartbeats | None = None
        self._spark: SparkSession | None = None
        self._to_do: tuple[ClaimedRange, ...] = ()
        self._may_process = False
        self._is_read = False
        """Whether the block has been given what it needs to process the ranges."""
        self._committing: Mapping[int, Claim] = {}
        """At most once: the claims of which a commit was tried; each knows how high a heartbeat of it was sent."""
        self._permitted: frozenset[int] = frozenset()
        """At most once: the partitions that this process may process."""
        self._told: set[ClaimedRange] = set()
        self._is_left = False
        self._is_done = False
        self._is_leaving = False
        self._has_left = False
        self._entered_s = 0.0

    # What it is

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
        return tuple(one for one in self._to_do if not self._is_dropped(one))

    @property
    def dropped(self) -> tuple[ClaimedRange, ...]:
        """At most once: the ranges whose commit is or may be in the log and that are not processed, or not wholly.

        This process did not get the permission, or left the block by an error, or without having read them; `report`
        says of each whether it is dropped for sure.
        """
        return tuple(one for one in self._to_do if self._is_dropped(one))

    @property
    def all_ranges(self) -> tuple[ClaimedRange, ...]:
        """Every range of the batch, those that need no processing too, by partition."""
        return tuple(sorted((*self._to_do, *self.skipped), key=lambda one: one.partition))

    @property
    def lag_after(self) -> int:
        """Offsets that the batch leaves to be read in all partitions that it claimed, those that got no part too."""
        ends = {one.partition: one.end for one in self.all_ranges}
        return sum(max(0, at.end - ends.get(number, at.readable)) for number, at in self._positions.items())

    def report(self) -> list[PartitionReport]:
        """Tell what each partition's part came to, by partition."""
        states = dict.fromkeys(self.skipped, "skipped") | {one: self._how_dropped(one) for one in self.dropped}
        done = "committed" if self.committed else "not committed"
        return [
            PartitionReport(
                one,
                self._positions[one.partition].end - one.start,
                max(0, self._positions[one.partition].end - one.end),
                one.partition in self._replays,
                states.get(one, done),
            )
            for one in self.all_ranges
        ]

    # The block

    def __enter__(self) -> Self:
        """Claim and plan. Raises `MarshalError`; then nothing is held any more."""
        began_s = time.monotonic()
        try:
            self._begin()
            self._entered_s = time.monotonic()
            self.phases.waiting_s = self._entered_s - began_s
        except BaseException:
            try:
                self._leave()
            finally:  # once more: the first time may have been interrupted
                self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit if the block was left cleanly; release in any case.

        Raises `BatchAborted` where a block that was left cleanly has not read, or not written, what it would commit.
        """
        began_s = time.monotonic()
        try:
            self._is_left = True
            self.phases.processing_s += began_s - self._entered_s - self.phases.reading_s
            self._end_block(error)
        finally:
            try:
                self._tell_dropped()
            finally:
                try:
                    self._leave()
                finally:  # once more: the first time may have been interrupted
                    self._leave()
            self.phases.committing_s += time.monotonic() - began_s
        lost = self._lost
        if lost is not None and isinstance(error, Exception) and not isinstance(error, ClaimLost | BatchAborted):
            raise self._told_anew(lost) from error

    # In the block

    def check(self) -> None:
        """Make sure that the claims still hold and the data topic is the same: call it before touching an output.

        Raises `ClaimLost`, `BatchAborted`, `DataTopicChanged`.
        """
        self._check_heartbeats()
        if self.idle is not None:
            return
        self._check_claims()
        now = self._delivery.data.describe(self.request.topic).topic_id
        if now != self._topic_id:
            raise DataTopicChanged(
                f"topic {self.request.topic!r} was made anew while this batch read it (id {now} instead of "
                f"{self._topic_id}); nothing was written or committed. A person must set the position"
            )

    def begin_processing(self) -> None:
        """Take the permission to process; `read` does it by itself, a reader of one's own must call it first.

        At most once: plans, announces and commits now; what did not get through is in `dropped`, should this raise too.
        Raises `PlanRejected`, `ClaimLost`, `BatchAborted`, `UnavailableError`, `LogChanged`.
        """
        self._take_permission()
        self._is_read = True

    def read(self, spark: "SparkSession") -> "DataFrame":
        """Give a frame over exactly the ranges: key, value, topic, partition, offset, timestamp, headers.

        The frame reads Kafka anew for each action on it: cache it, or act on it once. Its Spark jobs are cancelled when
        the claim is lost. Raises `ConfigurationError` for a session that could process a message twice in at most once.
        """
        began_s = time.monotonic()
        check_session(spark)
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            check_single_execution(spark)
        self._take_permission()
        if self._spark is None:
            self._spark = spark
            self._stack.enter_context(jobs.batch_jobs(spark, self.batch_id))
            self._stack.enter_context(jobs.interruptible_calls(spark))
            self._check_heartbeats()
        offsets = {one.partition: (one.first_readable, one.end) for one in self.ranges}
        frame = reading.read_ranges(spark, self._delivery.connection.spark_options(), self.request.topic, offsets)
        self.phases.reading_s += time.monotonic() - began_s
        self._is_read = True
        return frame

    def write(self, frame: "DataFrame") -> WriteOutcome:
        """Hand the result to the sink, once for the whole batch; its rows are told apart by their `partition` column.

        Raises `SinkRefused`, and what `check` raises.
        """
        if self._sink is None:
            raise ConfigurationError(f"delivery is {self.mode}: the batch has no sink; write the frame yourself")
        if self.outcome is not None:
            raise ConfigurationError("write() was called before: the sink takes the result of a batch in one piece")
        self.check()
        self.outcome = self._sink.write(frame, self.ranges, self._offsets_read, self.check)
        return self.outcome

    # Entering

    def _begin(self) -> None:
        request, claimer = self.request, self._claimer
        described = self._delivery.data.describe(request.topic)
        self._topic_id = described.topic_id
        claimer.agree_on_settings()
        if claimer.paused_until_s() is not None:
            self.idle = Idle(IdleReason.PAUSED, self._paused_text())
            return
        wanted = self._wanted(described.partitions)
        key_partition = self._key_to_first_claim(described.partitions)
        is_first = key_partition is not None
        chosen = list(described.partitions) if is_first and not request.entire_topic else self._choose(wanted)
        claims = self._claim(chosen, is_first=is_first)
        if not claims:
            self.idle = self._why_idle(wanted)
            return
        if all(claim.offset is None or claim.data_topic_id is not None for claim in claims):
            self._keep_alive()
        self._take_positions(claims, key_partition)
        self._let_go_of_rest(wanted)
        self._plan()
        self._ask_sink()
        if self.idle is None and not self.all_ranges:
            self.idle = self._why_idle(wanted)

    def _wanted(self, existing: Sequence[int]) -> list[int]:
        if self.request.partitions is None:
            return list(existing)
        unknown = sorted(set(self.request.partitions) - set(existing))
        if unknown:
            raise ConfigurationError(
                f"topic {self.request.topic!r} has no partitions {unknown}; it has {len(existing)}"
            )
        return sorted(set(self.request.partitions))

    def _key_to_first_claim(self, partitions: Sequence[int]) -> int | None:
        """Give the lowest partition if it has no position yet, else None.

        A group's first claim of a topic gives every partition a position, that one last: as long as it has none, the
        first claim was not carried out, or was cut short, and is begun (again).
        """
        with self._claimer.rationalizer.lock:
            key = self._claimer.key(min(partitions))
            return min(partitions) if key.offset is None and key.generation == 0 else None

    def _choose(self, wanted: Sequence[int]) -> list[int]:
        """Give those of `wanted` that look free and have something to do, the largest lag first.

        Raises `DataTopicChanged` when one of them stands in another incarnation of the topic.
        """
        free, worn = self._free(wanted)
        extents, keys = self._extents(wanted), self._keys(wanted)
        self._check_incarnation({number: keys[number] for number in free}, extents)
        if worn:
            logger.error("%s", self._given_up_text(worn))
        todo = {number: lag for number in free if (lag := _advised_lag(keys[number], extents[number]))}
        if self.request.entire_topic:
            return list(wanted) if todo and len(free) == len(wanted) else []
        return sorted(todo, key=lambda number: (-todo[number], number))

    def _free(self, wanted: Sequence[int]) -> tuple[list[int], dict[int, Key]]:
        """Give those of `wanted` that look free, apart from those whose plan is left alone."""
        is_dead = self._delivery.is_dead
        free = self._claimer.claimable(wanted, is_dead=is_dead)
        if self.request.one_more_attempt:
            return free, {}
        untired = self._claimer.claimable(free, is_dead=is_dead, max_attempts=self.request.max_attempts)
        return untired, self._keys(number for number in free if number not in untired)

    def _claim(self, chosen: Sequence[int], *, is_first: bool) -> list[Claim]:
        delivery, request = self._delivery, self.request
        if not chosen:
            return []
        try:
            if request.entire_topic:
                claims = self._claimer.claim_entire_topic(chosen, is_dead=delivery.is_dead)
            else:
                limit = None if is_first else request.max_claims
                claims = self._claimer.claim(chosen, max_claims=limit, is_dead=delivery.is_dead)
        except GroupPaused:
            return []
        worn = [claim.partition for claim in claims if self._is_worn_out(claim)]
        if worn:
            logger.error("%s", self._given_up_text(self._keys(worn)))
            self._claimer.release(worn)
        kept = [claim for claim in claims if claim.partition not in worn]
        if request.entire_topic and len(kept) < len(chosen):
            self._claimer.release()
            return []
        return kept

    def _keep_alive(self) -> None:
        """Start the heartbeats; a key with an offset must have its data topic's id before (PROTOCOL.md 6)."""
        if self._heartbeats is not None:
            return
        self._heartbeats = Heartbeats(self._claimer, self._stop_work, reasons_to_stop=self._delivery.reasons_to_stop)
        self._stack.push(self._heartbeats)  # before they start: an interrupt may come in between
        self._heartbeats.__enter__()

    def _take_positions(self, claims: Sequence[Claim], key_partition: int | None) -> None:
        """Read, after the claim is won, where each partition stands; choose how far each goes."""
        self._topic_id = self._delivery.data.describe(self.request.topic).topic_id
        extents = self._extents([claim.partition for claim in claims])
        keys = self._keys(claim.partition for claim in claims)
        self._check_incarnation(keys, extents)
        self._claimer.name_data_topic(self._topic_id)
        self._keep_alive()
        self._check_forgotten(keys)
        starts = self._starts(keys, extents, is_first=key_partition is not None)
        self._check_incarnation({number: replace(key, offset=starts[number]) for number, key in keys.items()}, extents)
        if key_partition in starts and len(starts) > 1:
            self._claimer.beat({number: start for number, start in starts.items() if number != key_partition})
        self._claimer.beat(starts)
        wanted = keys.keys() if self.request.partitions is None else keys.keys() & set(self.request.partitions)
        for number in wanted:
            self._positions[number] = position(
                self._name(number), starts[number], extents[number], accept_data_loss=self._accepts_loss
            )
        self._make_ranges(keys)

    def _starts(self, keys: Mapping[int, Key], extents: Mapping[int, Extent], *, is_first: bool) -> dict[int, int]:
        unset = [number for number, key in keys.items() if key.offset is None]
        committed = self._delivery.data.group_offsets(self._delivery.group, self.request.topic) if unset else {}
        return {
            number: first_offset(
                self._name(number),
                key,
                extents[number],
                self.request.start,
                group_offset=committed.get(number),
                is_new=not is_first,
            )
            for number, key in keys.items()
        }

    def _check_forgotten(self, keys: Mapping[int, Key]) -> None:
        """Refuse to go on where the coordination log has forgotten a position that Kafka still knows."""
        unset = [number for number, key in keys.items() if key.offset is None and key.generation == 0]
        if not unset or self.mode is DeliveryMode.AT_LEAST_ONCE or self.request.accept_new_log:
            return
        committed = self._delivery.data.group_offsets(self._delivery.group, self.request.topic)
        known = sorted(number for number in unset if number in committed)
        if known:
            raise StartUnknown(
                f"Kafka knows committed offsets of group {self._delivery.group!r} for partitions {known} of "
                f"{self.request.topic!r}, the coordination log does not: was it made anew? {self.mode} cannot go on by "
                "itself; check what was done, then accept the new log explicitly (accept_new_log)"
            )

    def _make_ranges(self, keys: Mapping[int, Key]) -> None:
        plans = {number: keys[number].plan_end for number in self._positions}
        self._replays = {number for number, end in plans.items() if end is not None}
        ends = {number: end for number, end in plans.items() if end is not None}
        spent = sum(max(0, end - self._positions[number].readable) for number, end in ends.items())
        left = None if self.request.max_records is None else max(0, self.request.max_records - spent)
        fresh = {number: at for number, at in self._positions.items() if number not in ends}
        ends |= plan_ends({number: (at.readable, at.end) for number, at in fresh.items()}, left)
        ends |= {number: at.end for number, at in fresh.items() if not at.lag and at.end > at.offset}
        claims = self._claimer.claims
        self._claimer.check(ends)
        self._to_do = tuple(self._range(claims[number], ends[number]) for number in sorted(ends))
        for one in self._to_do:
            if one.lost is not None:
                logger.error("retention deleted %s unread: offsets %d to %d (exclusive) are lost", one, *one.lost)

    def _range(self, claim: Claim, end: int) -> ClaimedRange:
        at = self._positions[claim.partition]
        return ClaimedRange(
            coordination_topic_id=self._claimer.rationalizer.identity.topic_id,
            group=self._delivery.group,
            topic=self.request.topic,
            data_topic_id=self._topic_id,
            partition=claim.partition,
            generation=claim.generation,
            epoch=claim.epoch,
            start=at.offset,
            end=end,
            first_readable=min(at.readable, end),
        )

    def _let_go_of_rest(self, wanted: Collection[int]) -> None:
        """Release what has no part in the batch, and what is over the limit after a first claim."""
        if self.request.entire_topic:
            return
        most = self.request.max_claims
        mine = [one for one in self._to_do if one.partition in wanted]
        if most is not None and len(mine) > most:
            mine = sorted(mine, key=lambda one: -one.width)[:most]
        self._to_do = tuple(sorted(mine, key=lambda one: one.partition))
        kept = {one.partition for one in self._to_do}
        unused = [number for number in self._claimer.claims if number not in kept]
        if unused:
            self._claimer.release(unused)

    def _plan(self) -> None:
        """Write down the plans; at most once does so just before it processes."""
        if self.mode is DeliveryMode.AT_MOST_ONCE or not self.ranges:
            return
        try:
            self._claimer.plan({one.partition: one.end for one in self.ranges})
        except PlanRejected:
            if self._claimer.paused_until_s() is None:
                raise
            self._to_do = ()
            self.idle = Idle(IdleReason.PAUSED, self._paused_text())

    def _ask_sink(self) -> None:
        """Ask the sink which ranges it has: those are only committed."""
        if self._sink is None or not self._to_do:
            return
        ranges = self._to_do
        verdicts = self._sink.verdicts(ranges)
        self._to_do = tuple(one for one in ranges if verdicts[one] is not Verdict.SKIP)
        self.skipped = tuple(one for one in ranges if verdicts[one] is Verdict.SKIP)

    # Processing and leaving

    def _take_permission(self) -> None:
        self._check_heartbeats()
        if self._may_process or not self.ranges:
            return
        self._check_claims()
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            self._commit_before_processing()
        self._may_process = True

    def _commit_before_processing(self) -> None:
        """Commit; however this ends, `dropped` has what may be in the log and may not be processed here."""
        ends = {one.partition: one.end for one in self._to_do}
        self.check()
        self._claimer.plan(ends)
        self._delivery.announce(self._to_do)
        self._committing = self._claimer.claims
        self._permitted = self._claimer.commit_before_processing(ends)
        self.committed = bool(self._permitted)
        self._tell_dropped()

    def _is_dropped(self, one: ClaimedRange) -> bool:
        claim = self._committing.get(one.partition)
        if claim is None or claim.highest_sent < one.end:
            return False
        return one.partition not in self._permitted or (self._is_left and not self._is_done)

    def _how_dropped(self, one: ClaimedRange) -> str:
        """Say whether a dropped range is committed for sure and untouched for sure."""
        if one.partition in self._permitted:
            return "possibly dropped" if self._is_read else "dropped"
        return "dropped" if self._committing[one.partition].offset == one.end else "possibly dropped"

    def _tell_dropped(self) -> None:
        """Log what was dropped, each range once."""
        untold = [one for one in self.dropped if one not in self._told]
        self._told.update(untold)
        for how in ("dropped", "possibly dropped"):
            ranges = ", ".join(str(one) for one in untold if self._how_dropped(one) == how)
            if ranges:
                logger.error("%s, as at most once must: %s", how, ranges)

    def _end_block(self, error: BaseException | None) -> None:
        """Commit what a clean block has done, or end the work of another; tell Kafka, while this is still the owner."""
        if error is None:
            self._finish()
            self._is_done = self._is_read
        elif self._spark is not None:
            jobs.cancel(self._spark, self.batch_id, f"the batch was left: {type(error).__name__}")
        if self.committed and (error is None or isinstance(error, Exception)):  # an interrupt waits for no broker
            self._tell_kafka()

    def _finish(self) -> None:
        if self.idle is not None:
            return
        self._check_heartbeats()
        if self.mode is DeliveryMode.AT_MOST_ONCE:
            if not self._committing:
                logger.warning("the batch was left without being read: nothing was processed, nothing was committed")
            return
        self._require_work()
        self.check()
        done = self.all_ranges
        self._claimer.commit({one.partition: one.end for one in done})
        self.committed = True

    def _require_work(self) -> None:
        """Refuse to commit what nobody has processed."""
        if self._sink is not None and self._to_do and self.outcome is None:
            raise BatchAborted("the block ended without batch.write(...): nothing was written, so nothing is committed")
        if self._sink is None and not self._is_read:
            raise BatchAborted(
                "the block ended without batch.read(...): nothing was read, so nothing is committed. Read the batch, "
                "or call batch.begin_processing() before you read its ranges with a reader of your own"
            )

    def _leave(self) -> None:
        """Stop heartbeats and release; what fails here goes stale by itself, and undoes nothing that was committed.

        To be called again after an interrupt, which may come anywhere in here; otherwise the second call does nothing.
        """
        if self._has_left:
            return
        if self._is_leaving and self._heartbeats is not None:
            self._stack.push(self._heartbeats)  # the stack may have been about to end them when it was interrupted
        self._is_leaving = True
        try:
            self._stack.close()
        except Exception:
            logger.warning("batch %s did not end cleanly", self.batch_id, exc_info=True)
        finally:
            self._claimer.release()
        self._has_left = True

    def _stop_work(self, error: MarshalError) -> None:
        """End the Spark jobs of a batch whose claim is no longer sure; called from the heartbeat thread."""
        spark = self._spark
        if spark is None:
            return
        logger.error("cancelling the Spark jobs of batch %s: %s", self.batch_id, error)
        jobs.cancel(spark, self.batch_id)

    def _tell_kafka(self) -> None:
        """Let lag tools see the offsets that are surely in the log; best effort.

        Before the release, while heartbeats go on: afterwards a successor's may be there, and would be set back.
        """
        held, now_ms = self._claimer.claims, self._claimer.clock.lease_ms()
        sure = self._permitted if self.mode is DeliveryMode.AT_MOST_ONCE else held.keys()
        offsets = {
            one.partition: one.end
            for one in self.all_ranges
            if one.partition in sure and one.partition in held and held[one.partition].lease.holds(now_ms)
        }
        problem = self._delivery.data.commit_group_offsets(self._delivery.group, self.request.topic, offsets)
        if problem is not None:
            logger.warning("the group's offsets in Kafka were not updated (only lag tools read them): %s", problem)

    def _offsets_read(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        if self._spark is None:
            return {one.partition: [(one.first_readable, one.end)] for one in self.ranges}
        offsets = {one.partition: (one.first_readable, one.end) for one in self.ranges}
        options = self._delivery.connection.spark_options()
        return reading.offsets_read(reading.read_ranges(self._spark, options, self.request.topic, offsets))

    # Words

    @property
    def _lost(self) -> MarshalError | None:
        """Why the heartbeats have ended by themselves, if they have."""
        return None if self._heartbeats is None else self._heartbeats.error

    def _check_heartbeats(self) -> None:
        lost = self._lost
        if lost is not None:
            raise self._told_anew(lost)

    def _check_claims(self) -> None:
        try:
            self._claimer.check(self._numbers)
        except ClaimLost as lost:
            raise self._told_anew(lost) from None

    def _told_anew(self, lost: MarshalError) -> MarshalError:
        """Give the loss of a claim with who holds it by now, if the log can be asked."""
        if not isinstance(lost, ClaimLost):
            return lost
        try:
            self._claimer.rationalizer.catch_up()
            self._claimer.check(self._numbers)
        except ClaimLost as told:
            return told
        except MarshalError as error:
            logger.warning("who holds the partitions of %r now could not be read: %s", self.request.topic, error)
        return lost

    @property
    def _numbers(self) -> list[int]:
        return [one.partition for one in self.all_ranges]

    @property
    def _accepts_loss(self) -> bool:
        if self.request.accept_data_loss is not None:
            return self.request.accept_data_loss
        return self.mode is DeliveryMode.AT_LEAST_ONCE

    def _extents(self, partitions: Collection[int]) -> dict[int, Extent]:
        bounds = self._delivery.data.offsets(self.request.topic, partitions)
        return {number: Extent(at.start, at.end) for number, at in bounds.items()}

    def _keys(self, partitions: Iterable[int]) -> dict[int, Key]:
        """Give copies of the keys' states."""
        with self._claimer.rationalizer.lock:
            return {number: replace(self._claimer.key(number)) for number in partitions}

    def _check_incarnation(self, keys: Mapping[int, Key], extents: Mapping[int, Extent]) -> None:
        """Raise `DataTopicChanged` unless all keys stand in this incarnation of the topic.

        `extents` end where open transactions begin; a position may lie beyond that, not beyond the last message.
        """
        beyond = [number for number, key in keys.items() if (key.offset or 0) > extents[number].end]
        if beyond:
            bounds = self._delivery.data.offsets(self.request.topic, beyond, committed_only=False)
            extents = {**extents, **{number: Extent(at.start, at.end) for number, at in bounds.items()}}
        for number, key in keys.items():
            check_incarnation(self._name(number), key, self._topic_id, extents[number])

    def _name(self, partition: int) -> str:
        return f"{self.request.topic}/{partition} of group {self._delivery.group!r}"

    def _is_worn_out(self, claim: Claim) -> bool:
        return claim.plan_attempts > self.request.max_attempts and not self.request.one_more_attempt

    def _paused_text(self) -> str:
        return f"group {self._delivery.group!r} is paused until {self._claimer.paused_until_s()} (unix seconds)"

    def _why_idle(self, wanted: Sequence[int]) -> Idle:
        """Say why there is nothing to do, by the log as it is now."""
        topic = self.request.topic
        self._claimer.rationalizer.catch_up()
        if self._claimer.paused_until_s() is not None:
            return Idle(IdleReason.PAUSED, self._paused_text())
        extents, keys = self._extents(wanted), self._keys(wanted)
        free, worn = self._free(wanted)
        todo = [n for n, key in keys.items() if n not in worn and _advised_lag(key, extents[n])]
        if todo and not (worn and self.request.entire_topic):
            taken = set(wanted if self.request.entire_topic else todo).difference(free)
            idle = self._held({n: key for n, key in keys.items() if n in taken}, is_all=len(taken) >= len(todo))
            return replace(idle, text=f"{idle.text}. {self._given_up_text(worn)}") if worn else idle
        if worn:
            return Idle(IdleReason.GIVEN_UP, self._given_up_text(worn))
        return Idle(IdleReason.DRAINED, f"topic {topic!r} has nothing to read beyond what was done")

    def _held(self, taken: Mapping[int, Key], *, is_all: bool) -> Idle:
        """Say who holds the partitions `taken`, which are or are not all of those that have something to read."""
        owners = {number: owner for number, key in taken.items() if (owner := key.owner) is not None}
        clients = ", ".join(sorted({owner.client for owner in owners.values()}))
        text = f"no partition of topic {self.request.topic!r} that has something to read can be claimed"
        if self.request.entire_topic and owners:
            held = ", ".join(f"{owner.client} holds partition {number}" for number, owner in sorted(owners.items()))
            text = f"topic {self.request.topic!r} is claimed whole or not at all: {held}"
        elif owners:
            text = f"{text}: {'all' if is_all else 'some'} are held by {clients}"
        ours = {n: owner for n, owner in owners.items() if _run_of(owner) == self._delivery.run_id}
        if not ours:
            return Idle(IdleReason.HELD, text)
        stale_in_s = self._stale_in_s(taken[number] for number in ours)
        instances = ", ".join(sorted({repr(owner.instance) for owner in ours.values()}))
        return Idle(
            IdleReason.HELD,
            f"{text}. Of this very run is instance {instances}: a process of it that died, and is stale in "
            f"{stale_in_s:.1f} s, or one that works on",
            stale_in_s,
        )

    def _stale_in_s(self, keys: Iterable[Key]) -> float:
        """Give the seconds until the owners of `keys` are stale if they send nothing more."""
        claimer = self._claimer
        with claimer.rationalizer.lock:
            log_time_ms = claimer.rationalizer.world.partition_of(self.request.topic).log_time_ms or 0
            settings = claimer.group.settings
        patience_ms = GO_EXTRA_PATIENCE_MS if settings.rule_set is RuleSet.GO else 0
        now_ms = max(log_time_ms, claimer.clock.wall_ms()) - patience_ms
        last_ms = max(key.last_beat_ms for key in keys)
        return max(0.0, last_ms + 2 * settings.heartbeat_interval_ms - now_ms) / 1_000

    def _given_up_text(self, worn: Mapping[int, Key]) -> str:
        plans = ", ".join(f"partition {number} [{key.offset}, {key.plan_end})" for number, key in worn.items())
        return (
            f"plans of topic {self.request.topic!r} were tried {self.request.max_attempts} times and are left alone: "
            f"{plans}. Mend what fails and ask for one more attempt, or set the position past them"
        )


def _advised_lag(key: Key, extent: Extent) -> int:
    """Say how much there seems to be to do: 1 at least for a key without position or with an open plan."""
    if key.offset is None or key.plan_end is not None:
        return max(1, extent.end - (key.offset or extent.start))
    return max(0, extent.end - key.offset)


def _run_of(owner: Owner) -> str:
    """Give the run id in front of the owner's instance id."""
    return owner.instance.rpartition(".")[0]


def parent_ended() -> ReasonToStop:
    """Give a reason to stop that holds once the process that started this one has ended."""
    parent = os.getppid()
    return lambda: "the parent process ended" if os.getppid() != parent else None
