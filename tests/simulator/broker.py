"""The simulated coordination log: one broker for all, and each process's own, faulty way to it."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from math import inf

from marshal_dagster.coordination.log import Ack, Append, Chunk, LogIdentity
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemoryBroker, MemoryLog
from tests.simulator.scheduler import Process, Scheduler

EPOCH_MS = 1_700_000_000_000
"""The unix time at which virtual time begins."""
LONGEST_WAIT_MS = 2_000
"""So long a broker takes for an answer at most, an eighth of the heartbeat interval if that is less."""


class AppendFault(StrEnum):
    """What befalls one call of `append`."""

    CRASH_BEFORE = "crash before an append"
    CRASH_WITHIN = "crash within an append"
    CRASH_AFTER = "crash after an append"
    PAUSE_BEFORE = "pause beyond the lease before an append"
    PAUSE_AFTER = "pause beyond the lease after an append"
    LATE_ACK = "append acknowledged late"
    LOST = "append that fails and is not in the log"
    LOST_ACK = "append that fails but is in the log"
    RETRIED = "append retried: in the log twice"
    OUTAGE = "outage, after which all arrives"


class ReadFault(StrEnum):
    """What befalls one reading of a member at work."""

    NOTHING = "reading that gets no answer"
    PART = "reading that fails after a part of the records"
    WHOLE = "reading that fails after the records of a coordination partition"


class SimulatedClock:
    """A member's clocks, which may run fast or slow (`rate`) and be set wrongly (`off_ms`)."""

    def __init__(self, scheduler: Scheduler, rate: float = 1.0, off_ms: int = 0) -> None:
        self.rate = rate
        self._scheduler = scheduler
        self._off_ms = off_ms

    def lease_ms(self) -> float:
        """Milliseconds by this machine's quartz."""
        return self._scheduler.now_ms * self.rate

    def wall_ms(self) -> int:
        """Unix time as this machine believes it."""
        return EPOCH_MS + self._off_ms + int(self._scheduler.now_ms * self.rate)

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait."""
        self._scheduler.sleep(duration_ms / self.rate)


class Cluster:
    """The broker, its clock, and what befalls the appends of all processes: `faults` by their number."""

    def __init__(
        self,
        scheduler: Scheduler,
        partitions: int,
        heartbeat_interval_ms: int,
        faults: Mapping[int, AppendFault],
        seed: int,
    ) -> None:
        self.scheduler = scheduler
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.jump_ms = 0
        """How far the leader's clock is off."""
        self.broker = MemoryBroker(partitions, now_ms=lambda: EPOCH_MS + int(scheduler.now_ms) + self.jump_ms)
        self.before_append: Callable[[Sequence[Append]], AppendFault | None] = lambda _: None
        """Told the records of each append; tells what befalls it, if it is to be another fault than of its number."""
        self.appended: Callable[[int, int, int, bytes], None] = lambda *_: None
        """Told coordination partition, offset, timestamp and value of each record as it gets into the log."""
        self.work_of: Callable[[Process], object] = lambda _: None
        """Tells what a process is at."""
        self.wall_of: Callable[[Process], int | None] = lambda _: None
        """Tells a process's unix time in ms, which its records get while the topic has senders' timestamps."""
        self.about_to_append: Callable[[SimulatedLog, Process, Sequence[Append]], None] = lambda *_: None
        """Told the records of each append, before anything befalls them."""
        self.looking_again: Callable[[SimulatedLog], None] = lambda _: None
        """Called with a log before each look-up of its bounds between a failed reading and the next one."""
        self.left_queue: Callable[[object, bytes], None] = lambda *_: None
        """Told what its process was at, and the value, for each record that leaves a sender's queue late."""
        self.faults_end_ms = float("inf")
        """By then every outage is over."""
        self.befallen: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.failing_part = 0.0
        """Part of the readings of members at work that fail."""
        self._read_random = random.Random(~seed)
        self.appends = 0
        self.faults = dict(faults)

    def open(self, process: Process, slowness: float = 1.0) -> "SimulatedLog":
        """Open the log for a process that waits `slowness` times as long as others for each answer."""
        return SimulatedLog(self, process, slowness)

    def put(self, partition: int, value: bytes, sender_ms: int | None = None) -> int:
        """Let a record into the log, with its sender's timestamp if the topic has those."""
        if sender_ms is None or not self.broker.is_sender_timed:
            sender_ms = self.broker.now_ms()
        return self.put_at(partition, value, sender_ms)

    def put_at(self, partition: int, value: bytes, timestamp_ms: int) -> int:
        """Let a record into the log with that timestamp."""
        offset = self.broker.append(partition, value, timestamp_ms)
        self.appended(partition, offset, timestamp_ms, value)
        return offset

    def next_read_fault(self, process: Process) -> ReadFault | None:
        """Tell what befalls a reading that a process begins: more while there are senders' timestamps to be seen."""
        if not self.failing_part or self.work_of(process) is None or self.scheduler.now_ms >= self.faults_end_ms:
            return None
        if self._read_random.random() >= (0.5 if self.broker.is_sender_timed else self.failing_part):
            return None
        fault = self._read_random.choice(list(ReadFault))
        self.befallen[fault] += 1
        return fault

    def next_fault(self) -> AppendFault | None:
        """Count an append, and tell what befalls it."""
        self.appends += 1
        fault = self.faults.pop(self.appends, None)
        if fault is not None:
            self.befallen[fault] += 1
        return fault


class SimulatedLog:
    """One process's view of the cluster, as a `CoordinationLog`: each call takes a while, and others act meanwhile."""

    def __init__(self, cluster: Cluster, process: Process, slowness: float) -> None:
        self.delivery_timeout_ms = cluster.heartbeat_interval_ms // 4
        self._cluster = cluster
        self._process = process
        self.slowness = slowness
        self._longest_waits_ms = 2.0 * slowness, min(LONGEST_WAIT_MS, cluster.heartbeat_interval_ms / 8) * slowness
        self._random, self._sleep = cluster.random.random, cluster.scheduler.sleep
        self._log = MemoryLog(cluster.broker)
        self._queued: list[Append] = []
        """What waits in the sender."""
        self._waiting = self._queued
        """What fills in the present outage: that, or something in the network."""
        self._is_out_until_ms = 0.0
        self.read: dict[int, int] = {}
        """Up to where it has given records, by partition."""
        self.looked_ms = -inf
        """When the ends of the log were last those that it told."""
        self.trouble_until_ms = -inf
        """Until then an append of this process was under way that something befell."""
        self._appended: set[tuple[int, int]] = set()
        """Coordination partition and offset of what was acknowledged and has its sender's timestamp."""
        self.sender_timed: set[tuple[int, int]] = set()
        """The same of all own records that it has given to its reader."""
        self.told_sender_timed_ms: float | None = None
        """When it first gave its reader an own record with its sender's timestamp."""
        self.told_truncated_ms: float | None = None
        """When it told its reader that the log ends before what it has given; None if that reads anew from there on."""
        self._ended: dict[int, int] = {}
        """Where it ended as it told so, by partition."""
        self._failed = False
        """Whether the last reading failed."""
        self.failures = 0
        """How many readings have failed."""

    def identity(self) -> LogIdentity:
        """Ask which log it is."""
        self._wait()
        return self._log.identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Ask for the bounds."""
        if self._failed:
            self._cluster.looking_again(self)
        bounds = self._log.bounds(partitions)
        self.looked_ms = self._cluster.scheduler.now_ms
        self._wait()
        self._tell_ends({partition: at.end for partition, at in bounds.items()})
        return bounds

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from there: who has looked further for a moment, and counts on none of that, has lost nothing."""
        self._log.follow(positions)
        self.read = dict(positions)
        if all(position <= self._ended.get(partition, position) for partition, position in positions.items()):
            self.told_truncated_ms = None
            self._ended.clear()

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read what is there after a while, unless the answer does not come, or not wholly."""
        self._wait()
        fault = self._cluster.next_read_fault(self._process)
        self._failed = fault is not None
        self.failures += self._failed
        if fault is not None:
            self._wait_in_vain(timeout_s)
        for chunk in self._log.read_until(ends, timeout_s) if fault is not ReadFault.NOTHING else ():
            given = _first_half(chunk) if fault is ReadFault.PART else chunk
            self.read[given.partition] = given.position
            if self._appended:
                self._note_sender_timed(given, ends[given.partition])
            yield given
            if fault is not None:
                break
        if fault is not None:
            raise UnavailableError("simulated")

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append, with whatever befalls it."""
        cluster = self._cluster
        cluster.about_to_append(self, self._process, records)
        if cluster.scheduler.now_ms < self._is_out_until_ms:
            return self._fail_to_send(records)
        fault = cluster.before_append(records) or cluster.next_fault()
        if fault is not None and fault is not AppendFault.RETRIED:
            self.trouble_until_ms = inf
            try:
                return self._append_with(fault, records)
            finally:
                self.trouble_until_ms = cluster.scheduler.now_ms
        self._wait()
        acks = []
        for record in records:
            acks.append(Ack(self._put(record)))
            if fault is AppendFault.RETRIED:
                self._put(record)
            if self._random() < 0.1:
                self._wait()
        self._wait()
        self._note_acknowledged(records, acks)
        return acks

    def purge(self) -> None:
        """Drop what waits to be sent."""
        self._queued.clear()

    def close(self) -> None:
        """Nothing to let go of."""

    def _append_with(self, fault: AppendFault, records: Sequence[Append]) -> Sequence[Ack]:
        cluster, process = self._cluster, self._process
        interval_ms = cluster.heartbeat_interval_ms
        self._wait()
        failed = [Ack(None, "simulated")] * len(records)
        if fault is AppendFault.CRASH_BEFORE:
            process.kill()
        elif fault is AppendFault.LOST:
            cluster.scheduler.sleep(self.delivery_timeout_ms)
            return failed
        elif fault is AppendFault.OUTAGE:
            self._go_out()
            return self._fail_to_send(records)
        elif fault is AppendFault.PAUSE_BEFORE:
            process.stop(interval_ms * cluster.random.uniform(2, 4))
            self._wait()
        acks = []
        for record in records:
            acks.append(Ack(self._put(record)))
            if fault is AppendFault.CRASH_WITHIN:
                process.kill()
        answer = self._answer(fault, acks, failed)
        self._note_acknowledged(records, answer)
        return answer

    def _answer(self, fault: AppendFault, acks: list[Ack], failed: list[Ack]) -> list[Ack]:
        """Let the sender hear of records that are in the log, or not."""
        cluster, process = self._cluster, self._process
        if fault is AppendFault.CRASH_AFTER:
            process.kill()
        elif fault is AppendFault.PAUSE_AFTER:
            process.stop(cluster.heartbeat_interval_ms * cluster.random.uniform(2, 4))
        elif fault is AppendFault.LATE_ACK:
            cluster.scheduler.sleep(self.delivery_timeout_ms * cluster.random.random())
        elif fault is AppendFault.LOST_ACK:
            cluster.scheduler.sleep(self.delivery_timeout_ms)
            return failed
        self._wait()
        return acks

    def _put(self, record: Append) -> int:
        return self._cluster.put(*record, self._cluster.wall_of(self._process))

    def _note_acknowledged(self, records: Sequence[Append], acks: Sequence[Ack]) -> None:
        """Note what the sender is told by acknowledgements.

        The log had ended before what was read of it; or a record has its sender's timestamp, as who reads it will see.
        """
        timed = self._cluster.broker.sender_timed
        for (partition, _), (offset, _) in zip(records, acks, strict=True):
            if offset is not None:
                self._tell_ends({partition: offset})
                if offset in timed[partition]:
                    self._appended.add((partition, offset))

    def _note_sender_timed(self, chunk: Chunk, end: int) -> None:
        """Note what was asked for: who looks whether the log is the same counts on nothing behind what it had read."""
        found = {(chunk.partition, offset) for offset, _, _ in chunk.records if offset < end} & self._appended
        if found and self.told_sender_timed_ms is None:
            self.told_sender_timed_ms = self._cluster.scheduler.now_ms
        self.sender_timed |= found

    def _tell_ends(self, ends: Mapping[int, int]) -> None:
        """Note what the reader is told of where the log ends, or did a moment ago, if it has read further."""
        for partition, end in ends.items():
            if end < self.read.get(partition, 0):
                self.told_truncated_ms = self._cluster.scheduler.now_ms
                self._ended[partition] = end

    def _go_out(self) -> None:
        """Let nothing get through for a while, and then all of it: from the network, or from the sender's own queue.

        What is still in the queue does not arrive when that is purged, or when the sender has ended.
        """
        cluster, process = self._cluster, self._process
        is_queued = cluster.random.random() < 0.5
        duration_ms = cluster.heartbeat_interval_ms * cluster.random.uniform(0.3, 4)
        duration_ms = min(duration_ms, max(0.0, cluster.faults_end_ms - cluster.scheduler.now_ms))
        self._is_out_until_ms = cluster.scheduler.now_ms + duration_ms
        if duration_ms >= 2 * cluster.heartbeat_interval_ms:
            cluster.befallen["record that leaves the queue after an outage longer than the lease"] += 1
        work, sender_ms = cluster.work_of(process), cluster.wall_of(process)
        waiting = self._waiting = self._queued if is_queued else []

        def deliver() -> None:
            cluster.scheduler.sleep(duration_ms)
            while is_queued and process.runs_from_ms > cluster.scheduler.now_ms:
                cluster.scheduler.sleep(process.runs_from_ms - cluster.scheduler.now_ms)
            if is_queued and (process.is_dead or not process.tasks):
                return
            while waiting:
                record = waiting.pop(0)
                if is_queued:
                    cluster.left_queue(work, record.value)
                cluster.put(*record, sender_ms)

        Process(cluster.scheduler, "network").spawn(deliver)

    def _fail_to_send(self, records: Sequence[Append]) -> Sequence[Ack]:
        self._waiting.extend(records)
        self.trouble_until_ms = inf
        self._cluster.scheduler.sleep(self.delivery_timeout_ms)
        self.trouble_until_ms = self._cluster.scheduler.now_ms
        return [Ack(None, "simulated")] * len(records)

    def _wait_in_vain(self, timeout_s: float) -> None:
        """Wait for an answer until the time-out, or until faults are over."""
        scheduler = self._cluster.scheduler
        left_ms = self._cluster.faults_end_ms - scheduler.now_ms
        self.trouble_until_ms = inf
        scheduler.sleep(min(timeout_s * 1_000, left_ms))
        self.trouble_until_ms = scheduler.now_ms

    def _wait(self) -> None:
        """Let some time pass, half of the times; nearly always little. Who is dead or stopped gets no further."""
        how, (mostly_ms, rarely_ms) = self._random(), self._longest_waits_ms
        if how < 0.5 and self._process.may_go_on():
            return
        if how >= 0.95 and self._cluster.scheduler.now_ms >= self._cluster.faults_end_ms:
            rarely_ms = min(rarely_ms, 60 * mostly_ms)
        self._sleep(self._random() * (mostly_ms if how < 0.95 else rarely_ms))


def _first_half(chunk: Chunk) -> Chunk:
    """Return a chunk without the second half of its records."""
    records = list(chunk.records)
    kept = records[: (len(records) + 1) // 2]
    return chunk._replace(records=kept, position=kept[-1][0] + 1) if len(kept) < len(records) else chunk
