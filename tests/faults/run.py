"""One seed's run: a group of members on a topic of its own, what befalls it, and what it leaves behind."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from marshal_dagster.coordination.admin import create_snapshot_topic
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.keeping import renew_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.placement import coordination_partition
from tests.fault_harness.cluster import BROKERS, FaultyKafka
from tests.fault_harness.proxy import FAIR, Weather
from tests.faults.journal import Left, Refused, now_ms, read_journal
from tests.faults.judging import Evidence, Tally, Trial
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
from tests.plain_reader import PlainReader
from tests.simulator.checkers import Violation

TOP: Final = Path(__file__).parents[2]
GROUP: Final = "fleet"
START_WITHIN_S: Final = 40.0
DRAIN_WITHIN_S: Final = 60.0
HOLD_WITHIN_S: Final = 3.0
END_WITHIN_S: Final = 30.0
TICK_S: Final = 0.02
LOG_SETTINGS: Final = {
    "message.timestamp.type": "LogAppendTime",
    "retention.ms": "-1",
    "segment.ms": "604800000",
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
}
DATA_SETTINGS: Final = {"min.insync.replicas": "2", "retention.ms": "-1", "segment.ms": "60000"}
OLD_S: Final = 3_600
"""How old the first messages of a topic that retention will cut are made to look."""

STOPPING: Final = threading.Event()
"""Whether this process was told to end: then every run does."""

Script = Generator[None]
"""What happens in time: goes on at each tick."""


class Failed(Exception):
    """The run itself did not go as it must: a promise of liveness, or the test bed."""


@dataclass(slots=True)
class Member:
    """One of the group's members: run after run, each a process."""

    number: int
    link: int | None = None
    runs: int = 0
    run_id: str = ""
    process: subprocess.Popen[bytes] | None = None
    is_held: bool = False
    """Whether a fault decides when it is started again."""
    again_at_s: float = 0.0
    stops_itself: bool = False
    may_die: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self.process is not None and self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped."""
        if self.process is None or not self.is_alive:
            return False
        with suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.process is not None and self.is_alive:
            self.process.send_signal(number)


class Watcher:
    """Reads every record of the coordination log as it gets there, before retention can take it."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self.records: list[tuple[int, int, int, bytes]] = []
        self.reader = PlainReader(partitions)
        self._topic = topic
        self._next = dict.fromkeys(range(partitions), 0)
        self._consumer = _consumer(servers)
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])

    def look(self) -> None:
        """Read what is there."""
        for message in self._consumer.consume(500, 0.0):
            if message.error() is not None:
                continue
            partition, offset, value = message.partition() or 0, message.offset() or 0, message.value() or b""
            self._next[partition] = offset + 1
            self.records.append((partition, offset, message.timestamp()[1], value))
            self.reader.read(partition, offset, message.timestamp()[1], value)

    def is_at_end(self) -> bool:
        """Whether everything that the brokers have now was read."""
        self.look()
        return all(
            self._next[number] >= self._consumer.get_watermark_offsets(TopicPartition(self._topic, number), 10)[1]
            for number in self._next
        )

    def start(self, partition: int) -> int:
        """Give the first offset that retention has left."""
        low, _ = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), 10)
        return low

    def bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Give the offsets that each partition of a topic holds: the first, and the next one to come."""
        self._consumer.list_topics(topic, timeout=20)  # or it knows of no partition that was added
        numbers = range(partitions)
        return {n: self._consumer.get_watermark_offsets(TopicPartition(topic, n), 20) for n in numbers}

    def offsets(self, topic: str) -> dict[int, int]:
        """Give where the group stands."""
        return {
            place[1]: key["offset"]
            for log in self.reader.logs.values()
            for group in log["groups"].values()
            for place, key in group["keys"].items()
            if place[0] == topic and key["offset"] is not None
        }

    def owners(self, topic: str) -> set[str]:
        """Give the instances that hold something."""
        return {
            held["owner"]["instance"]
            for log in self.reader.logs.values()
            for group in log["groups"].values()
            for place, key in group["keys"].items()
            for held in (key, *key["ranges"])
            if place[0] == topic and held["owner"] is not None
        }

    def close(self) -> None:
        """Let go."""
        self._consumer.close()


class Run:
    """A seed's run, from its topics to its end; `folder` has what it leaves."""

    def __init__(self, of: Scenario, cluster: FaultyKafka, lane: int, folder: Path) -> None:
        self.of = of
        self.cluster = cluster
        self.folder = folder
        self.chance = random.Random(of.seed * 3 + 1)
        stem = f"seed{of.seed}-{os.urandom(3).hex()}"
        self.topic, self.log_topic = f"{stem}-data", f"{stem}-log"
        self.home = coordination_partition(self.topic, of.coordination_partitions)
        self.members = [Member(number) for number in range(MEMBERS)]
        for fault in of.faults:
            if fault.kind in OF_LINKS:
                self.members[fault.member].link = lane * MEMBERS + fault.member
        self.partitions = of.partitions
        self.evidence = Evidence(of.mode, GROUP, self.topic, self.home, of.coordination_partitions, 0.0)
        self.evidence.is_log_safe = not any(fault.kind in ALONE for fault in of.faults)
        self.deserted_at_ms: float | None = None
        self.went_wrong: list[Violation] = []
        self.is_calm = False
        self._helpers = ThreadPoolExecutor(2)
        self._began_s = time.monotonic()

    # From beginning to end

    def go(self) -> Tally:
        """Let it all happen, and judge."""
        servers = self.cluster.bootstrap_servers
        connection = KafkaConnection(bootstrap_servers=servers, timeout_s=30)
        (self.folder / "dead").mkdir(parents=True)
        with Topics(connection) as topics:
            self._make_topics(topics)
            self.producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
            self._fill()
            self.watcher = Watcher(servers, self.log_topic, self.of.coordination_partitions)
            try:
                self._live(topics)
            except Failed as failed:
                self.went_wrong.append(Violation("the group goes on", str(failed)))
                self.evidence.is_drained = False
            finally:
                self._end_members()
            return self._judge(topics)

    def _make_topics(self, topics: Topics) -> None:
        topics.create(self.log_topic, self.of.coordination_partitions, 3, LOG_SETTINGS)
        if self.of.of(FaultKind.LOG_CUT_WITH_SNAPSHOTS):
            create_snapshot_topic(topics, self.log_topic)
        topics.create(self.topic, self.partitions, 3, DATA_SETTINGS)

    def _fill(self) -> None:
        """Write the backlog; where retention is to cut it, its first part looks old."""
        old = self.of.backlog // 2 if self.of.of(FaultKind.DATA_CUT) else 0
        now = time.time_ns() // 1_000_000
        for part in (range(old), range(old, self.of.backlog)):
            for number in part:
                at = now - (OLD_S * 1_000 if number < old else 0)
                for partition in range(self.partitions):
                    self.producer.produce(self.topic, f"message {number}", partition=partition, timestamp=at)
            if self.producer.flush(30):
                raise Failed("the data topic was not filled")

    def _live(self, topics: Topics) -> None:
        for member in self.members:
            self._start(member)
        self._wait(lambda: bool(self.watcher.offsets(self.topic)), START_WITHIN_S, "a first claim")
        scripts = [self._befall(fault, topics) for fault in self.of.faults]
        trickle = self._trickle()
        while scripts:
            self._tick()
            scripts = [script for script in scripts if next(script, scripts) is None]
            next(trickle)
        self.is_calm = True
        if self.deserted_at_ms is not None:
            self.evidence.is_drained = False
            return
        if self.evidence.mode is not DeliveryMode.AT_LEAST_ONCE:
            (self.folder / "accept-loss").touch()
        self._wait_drained()

    def _wait_drained(self) -> None:
        if self.producer.flush(30):
            raise Failed("messages of the trickle were not taken")
        ends = self._bounds()
        self._wait(
            lambda: all(self.watcher.offsets(self.topic).get(number) == end for number, (_, end) in ends.items()),
            DRAIN_WITHIN_S,
            lambda: f"all to be drained: {self.watcher.offsets(self.topic)} of {ends}",
        )

    def _bounds(self) -> dict[int, tuple[int, int]]:
        return self.watcher.bounds(self.topic, self.partitions)

    def _end_members(self) -> None:
        (self.folder / "stop").touch()
        deadline = time.monotonic() + END_WITHIN_S
        while any(member.is_alive for member in self.members) and time.monotonic() < deadline:
            self.watcher.look()
            for member in self.members:
                self._wake(member)
            time.sleep(TICK_S)
        for member in self.members:
            if member.is_alive:
                self.went_wrong.append(Violation("members end when told to", f"{member.run_id} does not"))
                member.signal(signal.SIGKILL)
            if member.process is not None:
                member.process.wait()
                if not member.is_held:
                    self._check_exit(member)
        with suppress(Failed):
            if self.deserted_at_ms is None:
                self._wait(self.watcher.is_at_end, 20, "the rest of the log", keeps_up=False)
        for number, (start, end) in self._bounds().items():
            self.evidence.messages.update((number, offset) for offset in range(start, end))
        self.watcher.close()
        self._helpers.shutdown()

    def _judge(self, topics: Topics) -> Tally:
        evidence = self.evidence
        evidence.clock_offset_ms = time.time() * 1_000 - now_ms()
        for path in (self.folder / "journals").iterdir():
            evidence.journals[path.stem] = read_journal(path)
        if evidence.mode is DeliveryMode.EFFECTIVELY_ONCE:
            evidence.rows = _rows(self.folder / "output")
        self._keep_log()
        tally = Trial(evidence, self.watcher.records).judge()
        tally.violations[:0] = self.went_wrong
        for topic in (self.topic, self.log_topic):
            with suppress(Exception):
                topics.delete(topic)
        return tally

    def _keep_log(self) -> None:
        """Write the recorded log as `marshal-dagster replay` reads it."""
        with (self.folder / "log.jsonl").open("w") as file:
            for partition, offset, timestamp, value in self.watcher.records:
                line = {"partition": partition, "offset": offset, "timestamp": timestamp, "value": value.decode()}
                file.write(json.dumps(line) + "\n")

    # What goes on all the time

    def _tick(self) -> None:
        if STOPPING.is_set():
            raise Failed("told to stop")
        self.watcher.look()
        self.producer.poll(0)
        self._keep_up()
        time.sleep(TICK_S)

    def _wait(
        self,
        condition: Callable[[], bool],
        within_s: float,
        what: str | Callable[[], str],
        *,
        keeps_up: bool = True,
    ) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"waited {within_s:g} s for {what if isinstance(what, str) else what()}")
            if keeps_up:
                self._tick()
            else:
                time.sleep(TICK_S)

    def _keep_up(self) -> None:
        """Start a run after each that has ended, as a schedule or a retry would."""
        for member in self.members:
            if member.is_held or self.deserted_at_ms is not None:
                continue
            if member.is_alive:
                self._wake(member)
                continue
            if not member.again_at_s:
                self._check_exit(member)
                self._tell_over(member)
                member.again_at_s = time.monotonic() + self.chance.uniform(0.1, 0.6)
            elif time.monotonic() > member.again_at_s:
                self._start(member)

    def _wake(self, member: Member) -> None:
        """Let a member go on that came by its step to stop later than at its time."""
        if member.stops_itself and member.is_stopped:
            member.stops_itself = False
            member.signal(signal.SIGCONT)

    def _check_exit(self, member: Member) -> None:
        code = None if member.process is None else member.process.returncode
        if code == -signal.SIGKILL and member.may_die:
            return
        if code not in {0, GIVEN_UP, None}:
            said = (self.folder / f"{member.run_id}.stderr").read_text()[-2_000:]
            self.went_wrong.append(Violation("nothing else goes wrong", f"{member.run_id} ended with {code}: {said}"))

    def _tell_over(self, member: Member) -> None:
        """Say that a run is over, as Dagster would: mostly, and at some time."""
        if self.chance.random() < 0.5:
            (self.folder / "dead" / member.run_id).touch()

    def _start(self, member: Member) -> None:
        """Start a member's next run; the one before has ended, or was killed."""
        if member.process is not None:
            member.process.wait()
        member.runs += 1
        member.again_at_s = 0.0
        member.run_id = f"run{member.number}x{member.runs}"
        member.may_die = member.stops_itself = False
        (self.folder / "journals").mkdir(exist_ok=True)
        orders = self._orders(member)
        fault = self._first_run_of(member, FaultKind.CLOCK_OFF)
        with (self.folder / f"{member.run_id}.stderr").open("wb") as errors:
            member.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.worker", orders.model_dump_json()],
                cwd=TOP,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | (_fake_clock(fault) if fault else {}),
            )

    def _first_run_of(self, member: Member, kind: FaultKind) -> Fault | None:
        fault = self.of.of(kind)
        return fault if fault is not None and fault.member == member.number else None

    def _orders(self, member: Member) -> Orders:
        orders = Orders(
            bootstrap_servers=self.cluster.servers(member.link),
            coordination_topic=self.log_topic,
            topic=self.topic,
            group=GROUP,
            run_id=member.run_id,
            mode=self.of.mode,
            folder=self.folder,
            journal=self.folder / "journals" / f"{member.run_id}.jsonl",
            heartbeat_interval_ms=HI_MS,
            max_records=self.of.max_records,
            max_claims=self.of.max_claims,
            slow_ms=self.of.slow_ms,
            seed=self.of.seed,
            is_patient=self.of.faults[0].kind in ALONE,
            with_snapshots=self.of.of(FaultKind.LOG_CUT_WITH_SNAPSHOTS) is not None,
            ranges=self.of.ranges,
        )
        clock = self._first_run_of(member, FaultKind.CLOCK_OFF)
        if clock is not None:
            orders.off_ms, orders.lease_rate = clock.off_s * 1_000, clock.lease_rate
        for kind in (FaultKind.MEMBER_KILLED, FaultKind.MEMBER_STOPPED):
            fault = self._first_run_of(member, kind)
            if fault is None or member.runs > 1:
                continue
            orders.stops = member.stops_itself = kind is FaultKind.MEMBER_STOPPED
            member.may_die = kind is FaultKind.MEMBER_KILLED
            orders.after_messages = fault.after_messages
            if fault.step is not None:
                orders.step_side, orders.step_record = fault.step.side, fault.step.record
                orders.step_count = fault.step.count
            member.is_held = True
        return orders

    def _trickle(self) -> Script:
        """Let messages arrive while faults go on."""
        while True:
            yield from self._pause(self.chance.uniform(0.1, 0.5))
            self._add_message()

    def _add_message(self) -> None:
        with suppress(BufferError, KafkaException):  # a partition that is new may not be known yet
            self.producer.produce(self.topic, "more", partition=self.chance.randrange(self.partitions))

    # What befalls it

    def _befall(self, fault: Fault, topics: Topics) -> Script:
        yield from self._pause(fault.at_s)
        if fault.kind in OF_HOLDERS:
            with suppress(Failed):
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
            FaultKind.LOG_DELETED: lambda: self._log_deleted(topics),
            FaultKind.PARTITIONS_ADDED: lambda: self._partitions_added(topics),
            **dict.fromkeys(OF_LINKS, lambda: self._link(fault)),
        }
        yield from scripts[fault.kind]()

    def _holds(self, member: Member) -> bool:
        """Tell whether a member owns a partition, or a range of one, by the log."""
        owners = self.watcher.owners(self.topic)
        return not member.is_alive or any(owner.startswith(f"{member.run_id}.") for owner in owners)

    def _pause(self, seconds: float) -> Script:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            yield

    def _until(self, condition: Callable[[], bool], within_s: float, what: str) -> Script:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"waited {within_s:g} s for {what}")
            yield

    def _aside(self, work: Callable[[], object]) -> Script:
        """Do what takes long in a thread."""
        done: Future[object] = self._helpers.submit(work)
        while not done.done():
            yield
        done.result()

    def _leader_killed(self, fault: Fault) -> Script:
        leader = self.cluster.leader(self.log_topic, self.home)
        self.cluster.kill(leader)
        yield from self._pause(fault.lasts_s)
        yield from self._aside(lambda: self.cluster.start(leader, 120))

    def _leader_stopped(self, fault: Fault) -> Script:
        leader = self.cluster.leader(self.log_topic, self.home)
        self.cluster.suspend(leader)
        yield from self._pause(fault.lasts_s * 2)
        self.cluster.resume(leader)
        yield from self._aside(self.cluster.repair)

    def _rolling_restart(self) -> Script:
        for broker in BROKERS:
            yield from self._aside(lambda broker=broker: self.cluster.stop(broker))  # type: ignore[misc]
            yield from self._aside(lambda broker=broker: self.cluster.start(broker, 120))  # type: ignore[misc]

    def _link(self, fault: Fault) -> Script:
        link = self.members[fault.member].link
        if link is None:
            raise Failed("no link")
        bad = Weather(is_cut=fault.kind is FaultKind.LINK_CUT, delay_s=fault.delay_s, held=fault.held)
        proxy = self.cluster.proxy
        proxy.change(link, bad)
        try:
            yield from self._pause(fault.lasts_s)
        finally:
            proxy.change(link, FAIR, delivers_late=fault.comes_late)

    def _member_killed(self, fault: Fault) -> Script:
        member = self.members[fault.member]
        member.is_held = True
        if fault.step is not None or fault.after_messages is not None:
            with suppress(Failed):
                yield from self._until(lambda: not member.is_alive, 3, "its step")
        member.signal(signal.SIGKILL)
        yield from self._until(lambda: not member.is_alive, 10, "a member that was killed")
        self._tell_over(member)
        yield from self._pause(fault.lasts_s)
        self._start(member)
        member.is_held = False

    def _member_stopped(self, fault: Fault) -> Script:
        member = self.members[fault.member]
        member.is_held = True
        if fault.step is not None or fault.after_messages is not None:
            with suppress(Failed):
                yield from self._until(lambda: member.is_stopped or not member.is_alive, 3, "its step")
        member.signal(signal.SIGSTOP)
        yield from self._pause(fault.lasts_s)
        member.signal(signal.SIGCONT)
        member.is_held = False

    def _taken_for_dead(self, fault: Fault) -> Script:
        (self.folder / "dead" / self.members[fault.member].run_id).touch()
        yield from self._pause(fault.lasts_s)

    def _data_cut(self) -> Script:
        self.cluster.configure(self.topic, {"retention.ms": str(OLD_S * 500)})
        yield from self._until(
            lambda: any(start for start, _ in self._bounds().values()), 20, "retention to cut the data topic"
        )

    def _partitions_added(self, topics: Topics) -> Script:
        more = self.partitions + self.chance.randint(1, 3)
        yield from self._aside(lambda: topics.grow(self.topic, more))
        self.partitions = more
        yield from self._pause(1)
        for _ in range(10):
            self._add_message()

    def _log_cut(self) -> Script:
        """One member stays and knows all; two that come after retention has cut the log can only observe."""
        late = self.members[1:]
        for member in late:
            member.is_held = True
            member.signal(signal.SIGKILL)
        yield from self._cut(retention_s=LEASE_S)
        for member in late:
            self._start(member)
            self.evidence.observers.add(member.run_id)
        yield from self._until(lambda: all(self._has_said(member, "NotCertain") for member in late), 30, "observers")
        for member in late:  # whatever else they start as can observe only, too; so they go
            member.signal(signal.SIGKILL)

    def _log_cut_with_snapshots(self) -> Script:
        """One member dies, two end in order and leave a snapshot; all of the log is gone when they come back."""
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
            self._start(member)
            member.is_held = False

    def _leave_snapshots(self) -> None:
        """Do as a run that ends, where members came too late to open the log, and so have left none."""
        connection = KafkaConnection(bootstrap_servers=self.cluster.bootstrap_servers, timeout_s=30)
        with closing(KafkaLog(connection, self.log_topic)) as log:
            renew_snapshots(Rationalizer(log), kafka_snapshots(connection, self.log_topic))

    def _cut(self, retention_s: float) -> Script:
        """Let retention take what is older."""
        short = {"retention.ms": f"{retention_s * 1_000:.0f}", "segment.ms": "300"}
        self.cluster.configure(self.log_topic, short)
        yield from self._until(lambda: self.watcher.start(self.home) > 0, 30, "retention to cut the log")
        self.cluster.configure(self.log_topic, LOG_SETTINGS)

    def _log_deleted(self, topics: Topics) -> Script:
        """All stop, so that the log is known to its end; then it is deleted, and they go on."""
        for member in self.members:
            member.is_held = True
            member.signal(signal.SIGSTOP)
        yield from self._pause(0.3)
        yield from self._until(self.watcher.is_at_end, 20, "the rest of the log")
        yield from self._aside(lambda: topics.delete(self.log_topic))
        self.deserted_at_ms = now_ms()
        for member in self.members:
            self.evidence.deserted.add(member.run_id)
            member.signal(signal.SIGCONT)
        yield from self._until(
            lambda: all(self._has_said(member, "LogChanged", "TopicMissing") for member in self.members),
            30,
            "members to say that the log is gone",
        )

    def _has_said(self, member: Member, *errors: str) -> bool:
        entries = read_journal(self.folder / "journals" / f"{member.run_id}.jsonl")
        return any(isinstance(entry, Left | Refused) and entry.error in errors for entry in entries)


def _consumer(servers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"watcher-{os.urandom(4).hex()}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
            "topic.metadata.refresh.interval.ms": 1_000,
            "log_level": 0,
        }
    )


def _fake_clock(fault: Fault) -> dict[str, str]:
    """Give the environment of a process whose time of day goes at another rate.

    With a clock that is off by much from the start, or with a faked CLOCK_MONOTONIC, the Kafka client's timed waits
    never end; so the hours are added by the member's own `Clock`.
    """
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise Failed("libfaketime is not installed")
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"+0s x{fault.rate}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


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


def run(of: Scenario, cluster: FaultyKafka, lane: int, folder: Path) -> Tally:
    """Run a scenario in `folder`, which is emptied before, with the links of `lane`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Run(of, cluster, lane, folder).go()
