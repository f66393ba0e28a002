"""Reads the coordination log and computes the world state from it (protocol.md, sections 2 to 5).

Everything that reads the log uses it: claimers, commands, sensors and tables. It starts from a snapshot if that saves
time or if the log has lost its beginning. It notices if the log is no longer the one that it read before.
"""

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.log import Chunk, CoordinationLog, LogIdentity, PositionLostError
from marshal_dagster.coordination.snapshots import (
    WORTH_A_LOOK,
    ForeignSnapshot,
    Snapshots,
    foreign_snapshots,
    newest_snapshots,
)
from marshal_dagster.errors import CoordinationLogChangedError, MarshalError, TimestampTypeError, UnavailableError
from marshal_dagster.protocol.messages import Heartbeat, Message, coordination_partition
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import ACCEPTED, PartitionWorld, Verdict, VerdictKind, World

logger = logging.getLogger(__name__)

LOG_TIME_AHEAD_MS: Final = 5_000
"""By how many ms log time may be later than this machine's clock before that is reported."""

LOOK_AGAIN_MS: Final = 60_000
"""After how many ms a reader that can only observe looks for a snapshot again."""

_MOST_RESTARTS: Final = 5
_SEE_DOCTOR: Final = "stop all members and run `marshal-dagster doctor`"

OwnRecord = tuple[Message, bytes]
"""A record that this process appended: the message, and the value that was written for it."""


@dataclass(slots=True, eq=False)
class RecordResult:
    """The result of one record that this process appended."""

    verdict: Verdict
    before: int | None = None
    """Of a heartbeat: the offset of its key just before it."""
    after: int | None = None
    """Of a heartbeat: the offset of its key just after it."""

    @property
    def accepted(self) -> bool:
        """Whether the record was accepted."""
        return self.verdict.kind is VerdictKind.ACCEPTED


_ACCEPTED: Final = RecordResult(ACCEPTED)


class Rationalizer:
    """Reads coordination partitions and keeps the world state that follows from their records.

    `lock` guards the world state. Hold it while you use the state, because methods return live state, not copies. It is
    also the lock of every claimer that uses this rationalizer.

    `failure` is the error with which the last reading ended, or None. A `CoordinationLogChangedError` stays, and every
    later call raises it.
    """

    def __init__(
        self,
        log: CoordinationLog,
        *,
        topics: Collection[str] | None = None,
        timeout_s: float = 10.0,
        clock: Clock | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Follow the coordination partitions of some data topics, or all of them; no record is read yet.

        Args:
            log: the coordination log.
            topics: the data topics whose coordination partitions are read; by default all.
            timeout_s: how long to wait for each answer. Reading a long log may take longer.
            clock: the clock with which log time is compared.
            snapshots: where to look for a snapshot if the log is long or does not begin at offset 0.

        Raises:
            TopicNotFoundError: the coordination topic does not exist.
            UnavailableError: the log did not answer in time.
        """
        self.lock = threading.RLock()
        self.log = log
        self.identity: LogIdentity = log.identity()
        self.world = World(self.identity.partitions)
        self.records_read = 0
        self.failure: MarshalError | None = None
        self._timeout_s = timeout_s
        self._snapshots = snapshots
        self._clock = clock or SystemClock()
        self._is_clock_reported = False
        self._looks_again_ms = 0.0
        """When to look again for snapshots of partitions that can only be observed, in ms of the lease clock."""
        self.can_resume = False
        """Whether the log's next record is the one that the world state needs, because no reading was interrupted."""
        self._began_at: dict[int, int] = {}
        """The log offset from which the present reading of each coordination partition began."""
        self._half_applied: int | None = None
        """The coordination partition in which a record may have been applied only in part."""
        self._unread_own: dict[int, set[int]] = {}
        """The log offsets of own records that were not read yet, by coordination partition."""
        self._sender_timed: list[tuple[int, int]] = []
        """Coordination partition and log offset of own records that have their sender's timestamp."""
        count = self.identity.partitions
        self._begin(range(count) if topics is None else {coordination_partition(topic, count) for topic in topics})

    @property
    def changed(self) -> CoordinationLogChangedError | None:
        """The error if the log is not the one that was read before, else None. After an error the state is void."""
        if self._sender_timed:
            return sender_timed_error(self.identity.topic, self._sender_timed[0])
        return self.failure if isinstance(self.failure, CoordinationLogChangedError) else None

    def began_at(self, partition: int) -> int:
        """Return the log offset from which the present reading of a coordination partition began."""
        return self._began_at[partition]

    def require_unchanged(self) -> None:
        """Raise `CoordinationLogChangedError` if the log is not the one that was read before (`changed`)."""
        changed = self.changed
        if changed is not None:
            raise type(changed)(str(changed))

    def catch_up(self) -> World:
        """Read to the present end of every followed coordination partition; return the world state.

        Raises:
            CoordinationLogChangedError: it is not the log that was read before, or an own record has its sender's
                timestamp.
            UnavailableError: the log did not answer in time.
        """
        with self.lock, self._reading():
            self._check_identity()
            bounds = self.log.bounds(self.world.partitions.keys())
            self._require_not_truncated(bounds)
            self._look_again(bounds)
            self._read({partition: at.end for partition, at in bounds.items()})
            return self.world

    def read_past(self, own: Mapping[int, Mapping[int, OwnRecord]]) -> Mapping[int, Mapping[int, RecordResult]]:
        """Read past the records that this process has appended, and return their results.

        Records are matched by offset, not by content, so an identical record of another member is never mistaken for
        one of them. They must not have been read before: hold `lock` from before they are appended.

        Args:
            own: the records, by coordination partition and log offset.

        Returns:
            The result of each record. It is missing if retention has deleted the record in the meantime, or if the
            reading began again from a snapshot after it.

        Raises:
            CoordinationLogChangedError: a record is not in the log, or another record has its offset.
            TimestampTypeError: the broker stored a record with its sender's timestamp.
            UnavailableError: the log did not answer in time.
        """
        with self.lock, self._reading():
            for partition, records in own.items():
                read, first = self.world.partitions[partition].next_offset, min(records)
                if first < read:
                    raise CoordinationLogChangedError(
                        f"coordination partition {partition} of {self.identity.topic!r} acknowledged a record at "
                        f"offset {first}, but was read up to {read} before that: the log was truncated; {_SEE_DOCTOR}"
                    )
            self.expect(own)
            outcomes: dict[int, dict[int, RecordResult]] = {partition: {} for partition in own}
            self._read({partition: max(records) + 1 for partition, records in own.items()}, own, outcomes)
            for partition, records in own.items():
                untold = records.keys() - outcomes[partition].keys()
                missing = sorted(offset for offset in untold if offset >= self._began_at[partition])
                if missing:
                    raise CoordinationLogChangedError(
                        f"records that coordination partition {partition} of {self.identity.topic!r} acknowledged are "
                        f"not in it (offsets {missing[:5]}): the log was truncated, or deleted and re-created; "
                        f"{_SEE_DOCTOR}"
                    )
            return outcomes

    def expect(self, own: Mapping[int, Collection[int]]) -> None:
        """Record the offsets of own records, so that their timestamps are checked when they are read.

        `read_past` does that itself. Call this, under `lock`, for records that a later call will read.
        """
        for partition, offsets in own.items():
            self._unread_own.setdefault(partition, set()).update(offsets)

    def follow_all(self) -> World:
        """Follow every coordination partition from now on, and read each to its end (`catch_up`)."""
        with self.lock, self._reading():
            missing = set(range(self.identity.partitions)) - self.world.partitions.keys()
            if missing:
                self._begin(missing)
            return self.catch_up()

    def check_identity(self) -> None:
        """Check that the log is still the one that was read before.

        Raises:
            CoordinationLogChangedError: it is another log.
            TopicNotFoundError: the coordination topic does not exist.
            UnavailableError: the log did not answer in time.
        """
        with self.lock, self._reading():
            self._check_identity()

    def close(self) -> None:
        """Close the log."""
        with self.lock:
            self.log.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep the error with which a reading ends in `failure`; use it under the lock."""
        self.require_unchanged()
        try:
            yield
        except (CoordinationLogChangedError, UnavailableError) as error:
            self.failure = error
            raise
        self.failure = None

    def _check_identity(self) -> None:
        now = self.log.identity()
        if now != self.identity:
            raise CoordinationLogChangedError(
                f"coordination topic {self.identity.topic!r} has topic id {now.topic_id} and {now.partitions} "
                f"partitions, but had topic id {self.identity.topic_id} and {self.identity.partitions} partitions "
                f"before: it was deleted and re-created, or repartitioned; {_SEE_DOCTOR}"
            )

    def _require_not_truncated(self, bounds: Mapping[int, OffsetBounds]) -> None:
        for partition, at in bounds.items():
            read = self.world.partitions[partition].next_offset
            if at.end < read:
                raise CoordinationLogChangedError(
                    f"coordination partition {partition} of {self.identity.topic!r} ends at {at.end}, but was read "
                    f"up to {read}: the log was truncated; {_SEE_DOCTOR}"
                )

    def _begin(self, partitions: Collection[int]) -> None:
        """Discard the state of these partitions, and read them from a snapshot, or else from the log's start."""
        self.can_resume = False
        self._looks_again_ms = self._clock.lease_ms() + LOOK_AGAIN_MS
        bounds = self.log.bounds(partitions)
        self._require_not_truncated({number: at for number, at in bounds.items() if number in self.world.partitions})
        known = self._snapshots_of(bounds)
        for partition, at in bounds.items():
            state = known.get(partition)
            if state is not None:
                self.world.adopt(state)
            else:
                self.world.start(partition, at.start)
                if at.start > 0:
                    logger.warning(
                        "coordination partition %d of %r begins at offset %d and has no usable snapshot: it is only "
                        "observed, so nothing can be claimed. Run `marshal-dagster recover`",
                        partition,
                        self.identity.topic,
                        at.start,
                    )
            self._began_at[partition] = self.world.partitions[partition].next_offset

    def _look_again(self, bounds: Mapping[int, OffsetBounds]) -> None:
        """Look for snapshots of partitions that are only observed: an operator may have run `recover` since."""
        observed = {number: bounds[number] for number, world in self.world.partitions.items() if not world.certain}
        if self._snapshots is None or not observed or self._clock.lease_ms() < self._looks_again_ms:
            return
        self.can_resume = False
        self._looks_again_ms = self._clock.lease_ms() + LOOK_AGAIN_MS
        for state in self._snapshots_of(observed).values():
            self.world.adopt(state)

    def _snapshots_of(self, bounds: Mapping[int, OffsetBounds]) -> Mapping[int, PartitionWorld]:
        """Return the newest snapshots of the partitions that need one or are read faster with one."""
        wanted = {number: at for number, at in bounds.items() if at.start > 0 or at.end >= WORTH_A_LOOK}
        snapshots = self._snapshots
        if snapshots is None or not wanted:
            return {}
        return newest_snapshots(
            self.log, wanted, self._timeout_s, lambda foreign: self._newest(snapshots, wanted, foreign)
        )

    def _newest(
        self, snapshots: Snapshots, wanted: Mapping[int, OffsetBounds], foreign: Collection[ForeignSnapshot]
    ) -> Mapping[int, PartitionWorld]:
        try:
            return snapshots.newest(self.identity, wanted, self.world.defaults, foreign)
        except MarshalError as error:
            level = logging.WARNING if any(at.start > 0 for at in wanted.values()) else logging.INFO
            logger.log(level, "the snapshots of coordination topic %r cannot be read: %s", self.identity.topic, error)
            return {}
        finally:
            snapshots.close()

    def _read(
        self,
        ends: Mapping[int, int],
        own: Mapping[int, Mapping[int, OwnRecord]] = MappingProxyType({}),
        outcomes: Mapping[int, dict[int, RecordResult]] = MappingProxyType({}),
    ) -> None:
        """Read up to `ends`; store the result of each record of `own` in `outcomes`."""
        for _ in range(_MOST_RESTARTS):
            self._resume()
            due = {number: end for number, end in ends.items() if end > self.world.partitions[number].next_offset}
            if not due:
                self._report_clock()
                self.require_unchanged()
                return
            try:
                self._read_further(due, own, outcomes)
            except PositionLostError as lost:
                self._restart_partition(lost.partition)
                outcomes.get(lost.partition, {}).clear()
        raise UnavailableError(
            f"retention deletes records of coordination topic {self.identity.topic!r} before they can be read: set "
            "retention.ms and retention.bytes of the topic to -1"
        )

    def _resume(self) -> None:
        """Make the log continue at the offsets of the world state, if the last reading did not end normally.

        An exception during a reading (Ctrl-C, Dagster's interrupt) may have lost records that the log returned. It may
        also have left a record applied only in part: then that partition is read again from its start.
        """
        if self.can_resume:
            return
        if self._half_applied is not None:
            self._begin([self._half_applied])
            self._half_applied = None
        self._check_last_read()
        self.log.follow({number: world.next_offset for number, world in self.world.partitions.items()})
        self.can_resume = True

    def _check_last_read(self) -> None:
        """Check that the log still has the last records that were read.

        A reader that starts again at an offset does not notice by itself that the records before it have changed.
        """
        read = {number: world for number, world in self.world.partitions.items() if world.last is not None}
        if not read:
            return
        bounds = self.log.bounds(read.keys())
        self._require_not_truncated(bounds)
        for number, last in foreign_snapshots(self.log, bounds, self._timeout_s, read):
            raise CoordinationLogChangedError(
                f"coordination partition {number} of {self.identity.topic!r} has another record at offset "
                f"{last.offset} than the one that was read there: the log was truncated; {_SEE_DOCTOR}"
            )

    def _read_further(
        self,
        due: Mapping[int, int],
        own: Mapping[int, Mapping[int, OwnRecord]],
        outcomes: Mapping[int, dict[int, RecordResult]],
    ) -> None:
        self.can_resume = False
        for chunk in self.log.read_until(due, self._timeout_s):
            world = self.world.partitions[chunk.partition]
            self._half_applied = chunk.partition
            if chunk.partition in own:
                self._apply(world, chunk.records, own[chunk.partition], outcomes[chunk.partition])
            else:
                world.apply_many(chunk.records)
            _keep_reasons(world, chunk)
            if self._unread_own.get(chunk.partition):
                self._note_own(chunk)
            world.next_offset = chunk.position
            if chunk.records:
                world.set_last_record(chunk.records[-1])
            self._half_applied = None
            self.records_read += len(chunk.records)
        self.can_resume = True

    def _note_own(self, chunk: Chunk) -> None:
        """Record which own records in `chunk` have their sender's timestamp, and which were not read yet."""
        own = self._unread_own[chunk.partition]
        self._sender_timed += [(chunk.partition, offset) for offset in chunk.sender_timed if offset in own]
        self._unread_own[chunk.partition] = {offset for offset in own if offset >= chunk.position}

    def _apply(
        self,
        world: PartitionWorld,
        records: Collection[tuple[int, int, bytes | None]],
        own: Mapping[int, OwnRecord],
        outcomes: dict[int, RecordResult],
    ) -> None:
        for offset, timestamp_ms, value in records:
            written = own.get(offset)
            if written is None:
                world.apply(offset, timestamp_ms, value)
                continue
            message, sent = written
            if value != sent:
                raise CoordinationLogChangedError(
                    f"the record at offset {offset} of coordination partition {world.number} of "
                    f"{self.identity.topic!r} is not the one that was acknowledged there: the log was truncated, or "
                    f"deleted and re-created; {_SEE_DOCTOR}"
                )
            if isinstance(message, Heartbeat):
                key = world.key(message.group, message.topic, message.partition)
                before = key.offset
                verdict = world.apply(offset, timestamp_ms, value, message)
                if before is None:  # only then can the heartbeat create the key
                    key = world.key(message.group, message.topic, message.partition)
                outcomes[offset] = RecordResult(verdict, before, key.offset)
            else:
                verdict = world.apply(offset, timestamp_ms, value, message)
                outcomes[offset] = _ACCEPTED if verdict is ACCEPTED else RecordResult(verdict)

    def _restart_partition(self, partition: int) -> None:
        """Start to read a coordination partition again, after retention deleted the next record before it was read.

        Unless a snapshot fits, the partition can only be observed from now on.
        """
        read = self.world.partitions[partition].next_offset
        bounds = self.log.bounds([partition])[partition]
        if bounds.start <= read:
            raise CoordinationLogChangedError(
                f"coordination partition {partition} of {self.identity.topic!r} was read up to offset {read}, but now "
                f"has only offsets {bounds.start} to {bounds.end}: the log was truncated; {_SEE_DOCTOR}"
            )
        self._begin([partition])

    def _report_clock(self) -> None:
        """Log once that log time is later than this machine's clock (protocol.md, section 6)."""
        latest_ms = max([world.log_time_ms or 0 for world in self.world.partitions.values()], default=0)
        ahead_ms = latest_ms - self._clock.wall_ms()
        is_ahead = ahead_ms > LOG_TIME_AHEAD_MS
        if is_ahead and not self._is_clock_reported:
            logger.warning(
                "log time of coordination topic %r is %.1f s later than this machine's clock: a broker's clock has "
                "jumped, or this clock is slow. Owners may go stale early (safe: they are fenced) or late; check the "
                "clocks",
                self.identity.topic,
                ahead_ms / 1_000,
            )
        self._is_clock_reported = is_ahead


def _keep_reasons(world: PartitionWorld, chunk: Chunk) -> None:
    """Keep the reasons of the pauses in a chunk that was applied."""
    if not chunk.reasons:
        return
    for offset, _, value in chunk.records:
        reason = chunk.reasons.get(offset)
        if reason is not None:
            world.keep_pause_reason(value, reason)


def sender_timed_error(topic: str, where: tuple[int, int]) -> TimestampTypeError:
    """Return the error for an own record at this coordination partition and log offset (protocol.md, section 2)."""
    partition, offset = where
    return TimestampTypeError(
        f"coordination topic {topic!r} stored record {offset} of partition {partition} with its sender's timestamp, so "
        "the record claims, plans and commits nothing. Set message.timestamp.type=LogAppendTime on the topic, or use a "
        "new topic, then restart the members"
    )
