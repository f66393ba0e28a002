"""The simulated coordination log: one broker for all processes, and for each process its own faulty connection."""

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
"""The Unix time at which virtual time starts."""
LONGEST_WAIT_MS = 2_000
"""The longest time that a broker takes for an answer, or an eighth of the heartbeat interval if that is less."""


class AppendFault(StrEnum):
    """A fault of one call of `append`."""

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
    """A fault of one read of a working member."""

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
        """Return the milliseconds by this machine's quartz."""
        return self._scheduler.now_ms * self.rate

    def wall_ms(self) -> int:
        """Return the Unix time that this machine shows."""
        return EPOCH_MS + self._off_ms + int(self._scheduler.now_ms * self.rate)

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep for a virtual time."""
        self._scheduler.sleep(duration_ms / self.rate)


class Cluster:
    """The broker, its clock, and the faults of the appends of all processes: `faults` by the number of the append."""

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
        """The error of the leader's clock."""
        self.broker = MemoryBroker(partitions, now_ms=lambda: EPOCH_MS + int(scheduler.now_ms) + self.jump_ms)
        self.before_append: Callable[[Sequence[Append]], AppendFault | None] = lambda _: None
        """Called with the records of each append; returns its fault, if it is not the one of its number."""
        self.appended: Callable[[int, int, int, bytes], None] = lambda *_: None
        """Called with coordination partition, offset, timestamp and value of each record that enters the log."""
        self.work_of: Callable[[Process], object] = lambda _: None
        """Returns the current work of a process."""
        self.wall_of: Callable[[Process], int | None] = lambda _: None
        """Returns a process's Unix time in ms. Its records get it while the topic has senders' timestamps."""
        self.about_to_append: Callable[[SimulatedLog, Process, Sequence[Append]], None] = lambda *_: None
        """Called with the records of each append before any fault."""
        self.looking_again: Callable[[SimulatedLog], None] = lambda _: None
        """Called with the log each time that its bounds are looked up between a failed read and the next one."""
        self.left_queue: Callable[[object, bytes], None] = lambda *_: None
        """Called with the work of the process and the value, for each record that leaves a sender's queue late."""
        self.faults_end_ms = float("inf")
        """The time at which every outage is over."""
        self.befallen: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.failing_part = 0.0
        """The share of reads of working members that fail."""
        self._read_random = random.Random(~seed)
        self.appends = 0
        self.faults = dict(faults)

    def open(self, process: Process, slowness: float = 1.0) -> "SimulatedLog":
        """Open the log for a process that waits `slowness` times as long as others for each answer."""
        return SimulatedLog(self, process, slowness)

    def put(self, partition: int, value: bytes, sender_ms: int | None = None) -> int:
        """Add a record to the log, with its sender's timestamp if the topic has those."""
        if sender_ms is None or not self.broker.is_sender_timed:
            sender_ms = self.broker.now_ms()
        return self.put_at(partition, value, sender_ms)

    def put_at(self, partition: int, value: bytes, timestamp_ms: int) -> int:
        """Add a record with that timestamp to the log."""
        offset = self.broker.append(partition, value, timestamp_ms)
        self.appended(partition, offset, timestamp_ms, value)
        return offset

    def next_read_fault(self, process: Process) -> ReadFault | None:
        """Return the fault of a read that a process starts; there are more while the topic has senders' timestamps."""
        if not self.failing_part or self.work_of(process) is None or self.scheduler.now_ms >= self.faults_end_ms:
            return None
        if self._read_random.random() >= (0.5 if self.broker.is_sender_timed else self.failing_part):
            return None
        fault = self._read_random.choice(list(ReadFault))
        self.befallen[fault] += 1
        return fault

    def next_fault(self) -> AppendFault | None:
        """Count an append, and return its fault."""
        self.appends += 1
        fault = self.faults.pop(self.appends, None)
        if fault is not None:
            self.befallen[fault] += 1
        return fault


class SimulatedLog:
    """One process's view of the cluster, as a `CoordinationLog`. Each call takes time, and other tasks run then."""

    def __init__(self, cluster: Cluster, process: Process, slowness: float) -> None:
        self.delivery_timeout_ms = cluster.heartbeat_interval_ms // 4
        self._cluster = cluster
        self._process = process
        self.slowness = slowness
        self._longest_waits_ms = 2.0 * slowness, min(LONGEST_WAIT_MS, cluster.heartbeat_interval_ms / 8) * slowness
        self._random, self._sleep = cluster.random.random, cluster.scheduler.sleep
        self._log = MemoryLog(cluster.broker)
        self._queued: list[Append] = []
        """The records that wait in the sender."""
        self._waiting = self._queued
        """The records that wait in the present outage: those of the sender, or others in the network."""
        self._is_out_until_ms = 0.0
        self.read: dict[int, int] = {}
        """By partition, the offset up to which it has returned records."""
        self.looked_ms = -inf
        """The last time at which the log had the ends that this view returned."""
        self.trouble_until_ms = -inf
        """The time until which an append of this process was affected by a fault."""
        self._appended: set[tuple[int, int]] = set()
        """Coordination partition and offset of each acknowledged record with its sender's timestamp."""
        self.sender_timed: set[tuple[int, int]] = set()
        """The same for all own records that it has returned to its reader."""
        self.reported_sender_timed_ms: float | None = None
        """When it first returned an own record with its sender's timestamp to its reader."""
        self.reported_truncated_ms: float | None = None
        """When it reported that the log ends below what it had returned; None once the reader reads from there."""
        self._ended: dict[int, int] = {}
        """By partition, the end that it reported then."""
        self._failed = False
        """Whether the last read failed."""
        self.failures = 0
        """The number of failed reads."""

    def identity(self) -> LogIdentity:
        """Look up the identity of the log."""
        self._wait()
        return self._log.identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Look up the bounds."""
        if self._failed:
            self._cluster.looking_again(self)
        bounds = self._log.bounds(partitions)
        self.looked_ms = self._cluster.scheduler.now_ms
        self._wait()
        self._report_ends({partition: at.end for partition, at in bounds.items()})
        return bounds

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from these positions. A reader that only looked further for a moment has lost nothing."""
        self._log.follow(positions)
        self.read = dict(positions)
        if all(position <= self._ended.get(partition, position) for partition, position in positions.items()):
            self.reported_truncated_ms = None
            self._ended.clear()

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read the present records after a delay, unless there is no answer or only a part of it."""
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
        """Append records, with the fault of this call."""
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
        """Drop the records that wait to be sent."""
        self._queued.clear()

    def close(self) -> None:
        """Do nothing."""

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
        """Return the acknowledgements to the sender, or not, for records that are in the log."""
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
        return self._cluster.put(record.partition, record.value, self._cluster.wall_of(self._process))

    def _note_acknowledged(self, records: Sequence[Append], acks: Sequence[Ack]) -> None:
        """Record what acknowledgements reveal to the sender.

        Either the log had ended before the records that were read. Or a record has its sender's timestamp, which its
        reader will see.
        """
        timed = self._cluster.broker.sender_timed
        for record, (offset, _) in zip(records, acks, strict=True):
            partition = record.partition
            if offset is not None:
                self._report_ends({partition: offset})
                if offset in timed[partition]:
                    self._appended.add((partition, offset))

    def _note_sender_timed(self, chunk: Chunk, end: int) -> None:
        """Record own records with senders' timestamps below `end`; a check of the log does not use later ones."""
        found = {(chunk.partition, offset) for offset, _, _ in chunk.records if offset < end} & self._appended
        if found and self.reported_sender_timed_ms is None:
            self.reported_sender_timed_ms = self._cluster.scheduler.now_ms
        self.sender_timed |= found

    def _report_ends(self, ends: Mapping[int, int]) -> None:
        """Record an end of the log that the reader gets, now or a moment ago, if it has read further than that."""
        for partition, end in ends.items():
            if end < self.read.get(partition, 0):
                self.reported_truncated_ms = self._cluster.scheduler.now_ms
                self._ended[partition] = end

    def _go_out(self) -> None:
        """Hold all records for a while and deliver them then, from the network or from the sender's own queue.

        Records in the queue are not delivered if the queue is purged or the sender has ended.
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
                cluster.put(record.partition, record.value, sender_ms)

        Process(cluster.scheduler, "network").spawn(deliver)

    def _fail_to_send(self, records: Sequence[Append]) -> Sequence[Ack]:
        self._waiting.extend(records)
        self.trouble_until_ms = inf
        self._cluster.scheduler.sleep(self.delivery_timeout_ms)
        self.trouble_until_ms = self._cluster.scheduler.now_ms
        return [Ack(None, "simulated")] * len(records)

    def _wait_in_vain(self, timeout_s: float) -> None:
        """Wait for an answer until the timeout, or until faults are over."""
        scheduler = self._cluster.scheduler
        left_ms = self._cluster.faults_end_ms - scheduler.now_ms
        self.trouble_until_ms = inf
        scheduler.sleep(min(timeout_s * 1_000, left_ms))
        self.trouble_until_ms = scheduler.now_ms

    def _wait(self) -> None:
        """Let some time pass in half of the calls, mostly little. A process that is dead or stopped does not return."""
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
