"""Reads the coordination log into the world state (protocol.md, sections 2 to 5)."""

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
"""How far log time may lie ahead of this machine's clock before it is reported, in milliseconds."""

LOOK_AGAIN_MS: Final = 60_000
"""How long a reader that only observes goes on before it looks for a snapshot again, in milliseconds."""

_MOST_RESTARTS: Final = 5
_SEE_DOCTOR: Final = "stop all members and see `marshal-dagster doctor`"

OwnRecord = tuple[Message, bytes]
"""A record that this process appended: what it says, and as which value it was written."""


@dataclass(slots=True, eq=False)
class RecordResult:
    """What one own record came to; of a heartbeat also the key's offset just `before` and just `after` it."""

    verdict: Verdict
    before: int | None = None
    after: int | None = None

    @property
    def accepted(self) -> bool:
        """Whether it changed the state."""
        return self.verdict.kind is VerdictKind.ACCEPTED


_ACCEPTED: Final = RecordResult(ACCEPTED)


class Rationalizer:
    """Follows coordination partitions and keeps the world state that their records lead to.

    `lock` guards the world state: hold it while looking at a state that another thread may be reading on. What a
    method returns under it is the live state, not a copy. It is also the lock of every claimer that stands on it.

    `failure` is the error that the last reading ended with; a `CoordinationLogChangedError` stays, and every later
    call raises it.
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
        """Follow the coordination partitions of the data `topics`, or all of them; of the log nothing is read yet.

        Where the log is long, or does not begin at offset 0, it is read on from the newest of `snapshots` that fits.
        `timeout_s` bounds the waiting for each answer, not the reading of a long log; `clock` is what log time is
        compared with. Raises `TopicNotFoundError`, `UnavailableError`.
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
        """When a snapshot of what is only observed is looked for again."""
        self.can_resume = False
        """Whether no reading was interrupted: the log's next record is the one that the world state waits for."""
        self._began_at: dict[int, int] = {}
        """The log offset from which each coordination partition was read, the last time that it was begun."""
        self._half_applied: int | None = None
        """The coordination partition in which a record may have been carried out in part."""
        self._unread_own: dict[int, set[int]] = {}
        """By coordination partition: the log offsets of own records that were not read yet."""
        self._sender_timed: list[tuple[int, int]] = []
        """Coordination partition and log offset of own records that have their sender's timestamp."""
        count = self.identity.partitions
        self._begin(range(count) if topics is None else {coordination_partition(topic, count) for topic in topics})

    @property
    def changed(self) -> CoordinationLogChangedError | None:
        """How the log was found not to be the one read before; all that was known of it counts no more."""
        if self._sender_timed:
            return sender_timed_error(self.identity.topic, self._sender_timed[0])
        return self.failure if isinstance(self.failure, CoordinationLogChangedError) else None

    def began_at(self, partition: int) -> int:
        """Return the log offset at which the reading of a coordination partition began, or began again."""
        return self._began_at[partition]

    def require_unchanged(self) -> None:
        """Raise how the log was found not to be the one read before, if it was."""
        changed = self.changed
        if changed is not None:
            raise type(changed)(str(changed))

    def catch_up(self) -> World:
        """Read to the present end of every followed coordination partition.

        Raises `CoordinationLogChangedError` when it is not the log that was read before, or when an own record is read
        late and has its sender's timestamp; `UnavailableError` when it does not answer.
        """
        with self.lock, self._reading():
            self._check_identity()
            bounds = self.log.bounds(self.world.partitions.keys())
            self._require_not_truncated(bounds)
            self._look_again(bounds)
            self._read({partition: at.end for partition, at in bounds.items()})
            return self.world

    def read_past(self, own: Mapping[int, Mapping[int, OwnRecord]]) -> Mapping[int, Mapping[int, RecordResult]]:
        """Read past every record of `own` (by coordination partition and log offset), and tell what each came to.

        They are told by where they lie: nobody else's equal record is mistaken for one of them.
        Of a record that retention has deleted meanwhile, or that lies before the snapshot with which the reading began
        anew, nothing is told. The records must not have been read before: hold `lock` from before they are appended.
        Raises `CoordinationLogChangedError` when one is not in the log, or is another one there; `TimestampTypeError`,
        which is one too, when the broker did not give one its timestamp; `UnavailableError`.
        """
        with self.lock, self._reading():
            for partition, records in own.items():
                read, first = self.world.partitions[partition].next_offset, min(records)
                if first < read:
                    raise CoordinationLogChangedError(
                        f"coordination partition {partition} of {self.identity.topic!r} acknowledged a record at "
                        f"offset {first}, but was read up to {read} before: the log was truncated; {_SEE_DOCTOR}"
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
                        f"not in it: offsets {missing[:5]}. The log was truncated or made anew; {_SEE_DOCTOR}"
                    )
            return outcomes

    def expect(self, own: Mapping[int, Collection[int]]) -> None:
        """Note where own records were acknowledged: whichever reading comes there checks their timestamps.

        `read_past` does so by itself. Call this, under `lock`, for records that are left to a later reading.
        """
        for partition, offsets in own.items():
            self._unread_own.setdefault(partition, set()).update(offsets)

    def follow_all(self) -> World:
        """Follow every coordination partition from now on, and catch up."""
        with self.lock, self._reading():
            missing = set(range(self.identity.partitions)) - self.world.partitions.keys()
            if missing:
                self._begin(missing)
            return self.catch_up()

    def check_identity(self) -> None:
        """Ask whether it is still the log that was read before.

        Raises `CoordinationLogChangedError`, `TopicNotFoundError`, `UnavailableError`.
        """
        with self.lock, self._reading():
            self._check_identity()

    def close(self) -> None:
        """Let go of the log."""
        with self.lock:
            self.log.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Remember how a reading ended, under the lock: what is known of a log that changed counts no more."""
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
                f"coordination topic {self.identity.topic!r} is not the one read before: topic id {now.topic_id} "
                f"with {now.partitions} partitions instead of {self.identity.topic_id} with "
                f"{self.identity.partitions}. It was made anew or repartitioned; {_SEE_DOCTOR}"
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
        """Know nothing of these partitions, and read them from a snapshot, or else from the log's start."""
        self.can_resume = False
        self._looks_again_ms = self._clock.lease_ms() + LOOK_AGAIN_MS
        bounds = self.log.bounds(partitions)
        known = self._snapshots_of(bounds)
        for partition, at in bounds.items():
            state = known.get(partition)
            if state is not None:
                self.world.adopt(state)
            else:
                self.world.start(partition, at.start)
                if at.start > 0:
                    logger.warning(
                        "coordination partition %d of %r begins at offset %d and no snapshot fits: it is only "
                        "observed, nothing can be claimed from it",
                        partition,
                        self.identity.topic,
                        at.start,
                    )
            self._began_at[partition] = self.world.partitions[partition].next_offset

    def _look_again(self, bounds: Mapping[int, OffsetBounds]) -> None:
        """Look whether what is only observed has a snapshot by now: somebody has recovered, or it can be read again."""
        observed = {number: bounds[number] for number, world in self.world.partitions.items() if not world.certain}
        if self._snapshots is None or not observed or self._clock.lease_ms() < self._looks_again_ms:
            return
        self.can_resume = False
        self._looks_again_ms = self._clock.lease_ms() + LOOK_AGAIN_MS
        for state in self._snapshots_of(observed).values():
            self.world.adopt(state)

    def _snapshots_of(self, bounds: Mapping[int, OffsetBounds]) -> Mapping[int, PartitionWorld]:
        """Look for snapshots where one is needed or saves time; a log is read without them too."""
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
            logger.log(level, "no snapshot of %r can be read: %s", self.identity.topic, error)
            return {}
        finally:
            snapshots.close()

    def _read(
        self,
        ends: Mapping[int, int],
        own: Mapping[int, Mapping[int, OwnRecord]] = MappingProxyType({}),
        outcomes: Mapping[int, dict[int, RecordResult]] = MappingProxyType({}),
    ) -> None:
        """Read up to `ends`; note in `outcomes` what each record of `own` came to."""
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
            f"retention deletes the coordination topic {self.identity.topic!r} faster than it is read; set "
            "retention.ms and retention.bytes to -1"
        )

    def _resume(self) -> None:
        """Read on where the world state stands, after whatever ended the last reading.

        An exception in the middle of it (Ctrl-C, Dagster's interrupt) may have lost records that the log gave, or have
        left one half carried out; then that partition is read anew.
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
        """Make sure that the log still holds what was read last: who begins to follow it anew is not told otherwise."""
        read = {number: world for number, world in self.world.partitions.items() if world.last is not None}
        if not read:
            return
        bounds = self.log.bounds(read.keys())
        self._require_not_truncated(bounds)
        for number, last in foreign_snapshots(self.log, bounds, self._timeout_s, read):
            raise CoordinationLogChangedError(
                f"coordination partition {number} of {self.identity.topic!r} holds something else at offset "
                f"{last.offset} than was read there: the log was truncated; {_SEE_DOCTOR}"
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
            if self._unread_own.get(chunk.partition):
                self._note_own(chunk)
            world.next_offset = chunk.position
            if chunk.records:
                world.set_last_record(chunk.records[-1])
            self._half_applied = None
            self.records_read += len(chunk.records)
        self.can_resume = True

    def _note_own(self, chunk: Chunk) -> None:
        """Note which own records in `chunk` have their sender's timestamp, and which are still to be read."""
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
                    f"{self.identity.topic!r} is not the one that was acknowledged there. The log was truncated or "
                    f"made anew; {_SEE_DOCTOR}"
                )
            if isinstance(message, Heartbeat):
                named = message.group, message.topic, message.partition
                before = world.key(*named).offset
                verdict = world.apply(offset, timestamp_ms, value, message)
                outcomes[offset] = RecordResult(verdict, before, world.key(*named).offset)
            else:
                verdict = world.apply(offset, timestamp_ms, value, message)
                outcomes[offset] = _ACCEPTED if verdict is ACCEPTED else RecordResult(verdict)

    def _restart_partition(self, partition: int) -> None:
        """Retention overtook this reader: from here on it can only observe that coordination partition."""
        read = self.world.partitions[partition].next_offset
        bounds = self.log.bounds([partition])[partition]
        if bounds.start <= read:
            raise CoordinationLogChangedError(
                f"coordination partition {partition} of {self.identity.topic!r} was read up to {read}, which is no "
                f"longer in it (it holds {bounds.start} to {bounds.end}): the log was truncated; {_SEE_DOCTOR}"
            )
        self._begin([partition])

    def _report_clock(self) -> None:
        """Report once that log time is ahead, until it is not any more (protocol.md, section 6)."""
        latest_ms = max([world.log_time_ms or 0 for world in self.world.partitions.values()], default=0)
        ahead_ms = latest_ms - self._clock.wall_ms()
        is_ahead = ahead_ms > LOG_TIME_AHEAD_MS
        if is_ahead and not self._is_clock_reported:
            logger.warning(
                "log time of %r is %.1f s ahead of this machine's clock: a broker's clock has jumped, or this one is "
                "slow. Owners may go stale early (safe: they are fenced) or late; check the clocks",
                self.identity.topic,
                ahead_ms / 1_000,
            )
        self._is_clock_reported = is_ahead


def sender_timed_error(topic: str, where: tuple[int, int]) -> TimestampTypeError:
    """Return the error for an own record at this coordination partition and log offset (protocol.md, section 2)."""
    partition, offset = where
    return TimestampTypeError(
        f"coordination topic {topic!r} stored record {offset} of partition {partition} with its sender's timestamp, so "
        f"nothing was claimed, planned or committed by it. Set message.timestamp.type=LogAppendTime on the topic, or "
        "use a new one, then start the members again"
    )
