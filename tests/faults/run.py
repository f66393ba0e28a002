"""The run of one seed: a group of members on its own topic, its faults, and the files for the checkers."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException, Producer

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.topic_settings import create_snapshot_topic
from marshal_dagster.protocol.messages import DeliveryMode, coordination_partition
from tests.conditions import WITHIN_S
from tests.fault_harness.cluster import BROKERS, DATA_SETTINGS, LOG_SETTINGS, FaultyKafka
from tests.fault_harness.journal import now_ms, read_journal
from tests.fault_harness.log_watcher import LogWatcher
from tests.fault_harness.proxy import LinkState
from tests.fault_harness.run import FaultRun, RunFailedError, Script, WorkerProcess, fake_clock
from tests.faults.checkers import Evidence, Tally, Trial
from tests.faults.journal import ENTRY, Entry, Left, Refused
from tests.faults.scenario import (
    ALONE,
    HI_MS,
    LEASE_S,
    MEMBERS,
    OF_HOLDERS,
    OF_LINKS,
    Fault,
    FaultKind,
    Scenario,
)
from tests.faults.worker import GIVEN_UP, Orders
from tests.topics import grow

GROUP: Final = "fleet"
HOLD_WITHIN_S: Final = 3.0
OLD_S: Final = 3_600
"""The apparent age of the first messages of a topic that retention will delete."""


@dataclass(slots=True)
class Member(WorkerProcess):
    """One of the group's members."""

    link: int | None = None
    again_at_s: float = 0.0
    stops_itself: bool = False
    may_die: bool = False


class Run(FaultRun[Member, Entry, Tally]):
    """A seed's run, with the links of `lane`."""

    def __init__(self, of: Scenario, kafka: FaultyKafka, lane: int, folder: Path) -> None:
        super().__init__(of.seed, kafka, folder, "tests.faults.worker", ENTRY)
        self.of = of
        stem = f"seed{of.seed}-{os.urandom(3).hex()}"
        self.topic, self.log_topic = f"{stem}-data", f"{stem}-log"
        self.home = coordination_partition(self.topic, of.coordination_partitions)
        self.members = [Member(number, folder) for number in range(MEMBERS)]
        for fault in of.faults:
            if fault.kind in OF_LINKS:
                self.members[fault.member].link = lane * MEMBERS + fault.member
        self.partitions = of.partitions
        self.evidence = Evidence(of.mode, GROUP, self.topic, self.home, of.coordination_partitions, 0.0)
        self.evidence.is_log_safe = not any(fault.kind in ALONE for fault in of.faults)
        self.is_deserted = False

    @property
    def processes(self) -> Sequence[Member]:
        """Return the members."""
        return self.members

    # From start to end

    def _prepare(self) -> None:
        (self.folder / "dead").mkdir()
        self.admin.create(self.log_topic, self.of.coordination_partitions, 3, LOG_SETTINGS)
        if self.of.of(FaultKind.LOG_CUT_WITH_SNAPSHOTS):
            create_snapshot_topic(self.admin, self.log_topic)
        self.admin.create(self.topic, self.partitions, 3, DATA_SETTINGS)
        servers = self.kafka.bootstrap_servers
        self.producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
        self._fill()
        self.watcher = LogWatcher(servers, self.log_topic, self.of.coordination_partitions)

    def _topics(self) -> Sequence[str]:
        return self.topic, self.log_topic

    def _fill(self) -> None:
        """Write the backlog; if retention is to delete a part of it, that part gets old timestamps."""
        old = self.of.backlog // 2 if self.of.of(FaultKind.DATA_CUT) else 0
        now = time.time_ns() // 1_000_000
        for part in (range(old), range(old, self.of.backlog)):
            for number in part:
                at = now - (OLD_S * 1_000 if number < old else 0)
                for partition in range(self.partitions):
                    self.producer.produce(self.topic, f"message {number}", partition=partition, timestamp=at)
            if self.producer.flush(30):
                raise RunFailedError("the messages of the backlog were not written")

    def _live(self) -> None:
        for member in self.members:
            self._start(member)
        self._wait(lambda: bool(self._offsets()), WITHIN_S, "a first claim")
        self._play([self._inject(fault) for fault in self.of.faults], beside=self._trickle())
        if self.is_deserted:
            return
        if self.evidence.mode is not DeliveryMode.AT_LEAST_ONCE:
            (self.folder / "accept-loss").touch()
        self._wait_drained()

    def _offsets(self) -> dict[int, int]:
        """Return the offset of each partition of the topic, by the log."""
        offsets = self.watcher.offsets(GROUP)
        return {partition: offset for (topic, partition), offset in offsets.items() if topic == self.topic}

    def _wait_drained(self) -> None:
        if self.producer.flush(30):
            raise RunFailedError("messages during the faults were not written")
        ends = {partition: end for partition, (_, end) in self._bounds().items()}
        self._wait(
            lambda: ends.items() <= self._offsets().items(),
            WITHIN_S,
            lambda: f"all messages to be processed: {self._offsets()} of {ends}",
        )

    def _bounds(self) -> dict[int, tuple[int, int]]:
        return self.watcher.bounds(self.topic, self.partitions)

    def _terminate_all(self) -> None:
        (self.folder / "stop").touch()

    def _end(self) -> None:
        super()._end()
        if not self.is_deserted:
            self.watcher.read_to_end(20)
        for number, (start, end) in self._bounds().items():
            self.evidence.messages.update((number, offset) for offset in range(start, end))
        self.watcher.close()

    def _judge(self) -> Tally:
        evidence = self.evidence
        evidence.is_drained = not (self.has_failed or self.is_deserted)
        evidence.clock_offset_ms = time.time() * 1_000 - now_ms()
        evidence.journals = self._journals()
        if evidence.mode is DeliveryMode.EFFECTIVELY_ONCE:
            evidence.rows = _rows(self.folder / "output")
        self.watcher.write(self.folder / "log.jsonl")
        return Trial(evidence, self.watcher.records).judge()

    # Each tick

    def _watch(self) -> None:
        self.watcher.look()
        self.producer.poll(0)

    def _keep_up(self, process: Member) -> None:
        """Start the next run after each that has ended, as a schedule or a retry would."""
        if self.is_deserted:
            return
        if process.is_alive:
            self._wake(process)
        elif not process.again_at_s:
            self._check_exit(process)
            self._report_over(process)
            process.again_at_s = time.monotonic() + self.chance.uniform(0.1, 0.6)
        elif time.monotonic() > process.again_at_s:
            self._start(process)

    def _wake(self, member: Member) -> None:
        """Let a member continue that reached its step, and stopped itself there, later than the planned time."""
        if member.stops_itself and member.is_stopped:
            member.stops_itself = False
            member.signal(signal.SIGCONT)

    def _is_good_end(self, process: Member, code: int) -> bool:
        return code in {0, GIVEN_UP} or (code == -signal.SIGKILL and process.may_die)

    def _report_over(self, member: Member) -> None:
        """Report that a run is over, as Dagster would, in half of the cases."""
        if self.chance.random() < 0.5:
            (self.folder / "dead" / member.run_id).touch()

    def _environment(self, process: Member) -> Mapping[str, str]:
        """Return the environment of a member with a wrong clock.

        The timed waits of Kafka's client never end if its clock is wrong by much from the start. So libfaketime changes
        only the rate; the member's own `Clock` adds the hours.
        """
        fault = self._first_run_of(process, FaultKind.CLOCK_OFF)
        return fake_clock(FAKETIME=f"+0s x{fault.rate}") if fault else {}

    def _first_run_of(self, member: Member, kind: FaultKind) -> Fault | None:
        fault = self.of.of(kind)
        return fault if fault is not None and fault.member == member.number else None

    def _orders(self, process: Member) -> Orders:
        process.again_at_s = 0.0
        process.may_die = process.stops_itself = False
        orders = Orders(
            bootstrap_servers=self.kafka.servers(process.link),
            coordination_topic=self.log_topic,
            topic=self.topic,
            group=GROUP,
            run_id=process.run_id,
            mode=self.of.mode,
            folder=self.folder,
            journal=process.journal,
            heartbeat_interval_ms=HI_MS,
            max_records=self.of.max_records,
            max_claims=self.of.max_claims,
            slow_ms=self.of.slow_ms,
            seed=self.of.seed,
            is_patient=self.of.faults[0].kind in ALONE,
            with_snapshots=self.of.of(FaultKind.LOG_CUT_WITH_SNAPSHOTS) is not None,
            ranges=self.of.ranges,
        )
        clock = self._first_run_of(process, FaultKind.CLOCK_OFF)
        if clock is not None:
            orders.off_ms, orders.lease_rate = clock.off_s * 1_000, clock.lease_rate
        for kind in (FaultKind.MEMBER_KILLED, FaultKind.MEMBER_STOPPED):
            fault = self._first_run_of(process, kind)
            if fault is None or process.runs > 1:
                continue
            orders.stops = process.stops_itself = kind is FaultKind.MEMBER_STOPPED
            process.may_die = kind is FaultKind.MEMBER_KILLED
            orders.after_messages = fault.after_messages
            if fault.step is not None:
                orders.step_side, orders.step_record = fault.step.side, fault.step.record
                orders.step_count = fault.step.count
            process.is_held = True
        return orders

    def _trickle(self) -> Script:
        """Write messages during the faults."""
        while True:
            yield from self._pause(self.chance.uniform(0.1, 0.5))
            self._add_message()

    def _add_message(self) -> None:
        with suppress(BufferError, KafkaException):  # a new partition may not be known yet
            self.producer.produce(self.topic, "more", partition=self.chance.randrange(self.partitions))

    # Faults

    def _inject(self, fault: Fault) -> Script:
        yield from self._pause(fault.at_s)
        if fault.kind in OF_HOLDERS:
            with suppress(RunFailedError):
                yield from self._until(lambda: self._holds(self.members[fault.member]), HOLD_WITHIN_S, "its claim")
        scripts: dict[FaultKind, Callable[[], Script]] = {
            FaultKind.LEADER_KILLED: lambda: self._leader_killed(fault),
            FaultKind.LEADER_STOPPED: lambda: self._leader_stopped(fault),
            FaultKind.ROLLING_RESTART: self._rolling_restart,
            FaultKind.MEMBER_KILLED: lambda: self._member_killed(fault),
            FaultKind.MEMBER_STOPPED: lambda: self._member_stopped(fault),
            FaultKind.TAKEN_FOR_DEAD: lambda: self._taken_for_dead(fault),
            FaultKind.CLOCK_OFF: lambda: self._pause(fault.lasts_s),
            FaultKind.DATA_CUT: self._data_cut,
            FaultKind.LOG_CUT: self._log_cut,
            FaultKind.LOG_CUT_WITH_SNAPSHOTS: self._log_cut_with_snapshots,
            FaultKind.LOG_DELETED: self._log_deleted,
            FaultKind.PARTITIONS_ADDED: self._partitions_added,
            **dict.fromkeys(OF_LINKS, lambda: self._link(fault)),
        }
        yield from scripts[fault.kind]()

    def _holds(self, member: Member) -> bool:
        """Return whether a member owns a partition, or a range of one, by the log, or has ended."""
        owners = {
            held["owner"]["instance"]
            for _, key in self.watcher.keys(GROUP)
            for held in (key, *key["ranges"])
            if held["owner"] is not None
        }
        return not member.is_alive or any(owner.startswith(f"{member.run_id}.") for owner in owners)

    def _leader_killed(self, fault: Fault) -> Script:
        yield from self._broker_killed(self.kafka.leader(self.log_topic, self.home), fault.lasts_s)

    def _leader_stopped(self, fault: Fault) -> Script:
        yield from self._broker_stopped(self.kafka.leader(self.log_topic, self.home), fault.lasts_s * 2)
        yield from self._aside(self.kafka.repair)

    def _rolling_restart(self) -> Script:
        for broker in BROKERS:
            yield from self._aside(lambda broker=broker: self.kafka.stop(broker))  # type: ignore[misc]
            yield from self._aside(lambda broker=broker: self.kafka.start(broker, 120))  # type: ignore[misc]

    def _link(self, fault: Fault) -> Script:
        link = self.members[fault.member].link
        if link is None:
            raise RunFailedError("no link")
        state = LinkState(is_cut=fault.kind is FaultKind.LINK_CUT, delay_s=fault.delay_s, held=fault.held)
        yield from self._link_fails(self.kafka.proxy, link, state, fault)

    def _member_killed(self, fault: Fault) -> Script:
        member = self.members[fault.member]
        member.is_held = True
        if fault.step is not None or fault.after_messages is not None:
            with suppress(RunFailedError):
                yield from self._until(lambda: not member.is_alive, 3, "its step")
        self._kill(member)
        self._report_over(member)
        yield from self._pause(fault.lasts_s)
        self._start_again(member)

    def _member_stopped(self, fault: Fault) -> Script:
        member = self.members[fault.member]
        member.is_held = True
        if fault.step is not None or fault.after_messages is not None:
            with suppress(RunFailedError):
                yield from self._until(lambda: member.is_stopped or not member.is_alive, 3, "its step")
        member.signal(signal.SIGSTOP)
        yield from self._pause(fault.lasts_s)
        member.signal(signal.SIGCONT)
        member.is_held = False

    def _taken_for_dead(self, fault: Fault) -> Script:
        (self.folder / "dead" / self.members[fault.member].run_id).touch()
        yield from self._pause(fault.lasts_s)

    def _data_cut(self) -> Script:
        self.kafka.configure(self.topic, {"retention.ms": str(OLD_S * 500)})
        yield from self._until(
            lambda: any(start for start, _ in self._bounds().values()), 20, "retention to cut the data topic"
        )

    def _partitions_added(self) -> Script:
        more = self.partitions + self.chance.randint(1, 3)
        yield from self._aside(lambda: grow(self.admin, self.topic, more))
        self.partitions = more
        yield from self._pause(1)
        for _ in range(10):
            self._add_message()

    def _log_cut(self) -> Script:
        """One member continues with the whole log; two that start after its beginning was deleted can only observe."""
        late = self.members[1:]
        for member in late:
            member.is_held = True
            member.signal(signal.SIGKILL)
        yield from self._cut(retention_s=LEASE_S)
        for member in late:
            self._start(member)
            self.evidence.observers.add(member.run_id)
        yield from self._until(
            lambda: all(self._has_reported(member, "IncompleteLogError") for member in late), 30, "observers"
        )
        for member in late:  # their next runs can only observe too, so they end here
            member.signal(signal.SIGKILL)

    def _log_cut_with_snapshots(self) -> Script:
        """One member dies and two end with a snapshot; the whole log is deleted before they are started again."""
        for member in self.members:
            member.is_held = True
        victim = next((member for member in self.members if self._holds(member)), self.members[0])
        victim.signal(signal.SIGKILL)
        (self.folder / "stop").touch()
        yield from self._until(lambda: not any(member.is_alive for member in self.members), 30, "members to end")
        yield from self._until(self.watcher.is_at_end, 20, "the rest of the log")
        yield from self._aside(self._leave_snapshots)
        yield from self._cut(retention_s=0.2)
        (self.folder / "stop").unlink()
        for member in self.members:
            self._start_again(member)

    def _leave_snapshots(self) -> None:
        """Write snapshots as a run does at its end, because members that could not open the log have written none."""
        with closing(KafkaLog(self.connection, self.log_topic)) as log:
            renew_snapshots(Rationalizer(log), kafka_snapshots(self.connection, self.log_topic))

    def _cut(self, retention_s: float) -> Script:
        """Let retention delete all older records."""
        short = {"retention.ms": f"{retention_s * 1_000:.0f}", "segment.ms": "300"}
        self.kafka.configure(self.log_topic, short)
        yield from self._until(lambda: self.watcher.start(self.home) > 0, 30, "retention to cut the log")
        self.kafka.configure(self.log_topic, LOG_SETTINGS)

    def _log_deleted(self) -> Script:
        """Stop all members, so that the end of the log is known; then delete the topic and let them continue."""
        for member in self.members:
            member.is_held = True
            member.signal(signal.SIGSTOP)
        yield from self._pause(0.3)
        yield from self._until(self.watcher.is_at_end, 20, "the rest of the log")
        yield from self._aside(lambda: self.admin.delete(self.log_topic))
        self.is_deserted = True
        for member in self.members:
            self.evidence.deserted.add(member.run_id)
            member.signal(signal.SIGCONT)
        yield from self._until(
            lambda: all(
                self._has_reported(member, "CoordinationLogChangedError", "TopicNotFoundError")
                for member in self.members
            ),
            30,
            "members to report that the log is gone",
        )

    def _has_reported(self, member: Member, *errors: str) -> bool:
        entries = read_journal(member.journal, ENTRY)
        return any(isinstance(entry, Left | Refused) and entry.error in errors for entry in entries)


def _rows(folder: Path) -> Counter[tuple[int, int]]:
    from tests.sink_outputs import counting_files

    found: Counter[tuple[int, int]] = Counter()
    if not (folder / "_marshal").exists():
        return found
    for path, is_replaced in counting_files(folder):
        for row in map(json.loads, path.read_text().splitlines()):
            if not is_replaced(row["offset"]):
                found[row["partition"], row["offset"]] += 1
    return found
