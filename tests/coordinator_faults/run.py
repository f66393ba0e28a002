"""The run of one seed: a group, its faults, and the checks when no fault is active."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from marshal_dagster.coordinator.transport import CoordinatorTopics
from tests.conditions import WITHIN_S
from tests.coordinator_faults.checkers import Ownership, Place, Verdict, gap_ms, judge, needless_stops
from tests.coordinator_faults.journal import LINES, Did, Line
from tests.coordinator_faults.scenario import LINKED, OF_LINKS, Ending, Fault, FaultKind, Scenario
from tests.coordinator_faults.worker import GROUP, Orders, Role
from tests.fault_harness.cluster import DATA_SETTINGS, LOG_SETTINGS, FaultyKafka
from tests.fault_harness.journal import now_ms, read_journal
from tests.fault_harness.log_watcher import LogWatcher
from tests.fault_harness.proxy import LinkState
from tests.fault_harness.run import END_WITHIN_S, FaultRun, RunFailedError, Script, WorkerProcess
from tests.simulator.checkers import ViolationError
from tests.topics import grow

COORDINATION_PARTITIONS: Final = 2
COORDINATOR_PARTITIONS: Final = 2
SETTLE_WITHIN_S: Final = 60.0
"""The time after the last fault until each partition has an owner and the spread is even. This promise is judged."""
STAYS_S: Final = 2.0
"""How much longer than a session timeout the spread must stay even, because the last fault may be detected so late."""


@dataclass(slots=True)
class Process(WorkerProcess):
    """One of the group's processes."""

    role: Role
    is_static: bool = False
    link: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the member."""
        return f"{self.role.value}{self.number}"

    @property
    def leads(self) -> bool:
        """Return whether it believes that it leads the group, by its journal."""
        lines = [line.did for line in read_journal(self.journal, LINES) if line.did in {Did.LEADS, Did.FOLLOWS}]
        return self.is_alive and lines[-1:] == [Did.LEADS]


@dataclass(slots=True)
class Tally:
    """The result of a run."""

    verdict: Verdict = field(default_factory=Verdict)
    claims: int = 0
    commits: int = 0
    terms: int = 0
    stops: int = 0
    settled_after_s: float = 0.0
    ended_after_s: float = 0.0
    is_unsteady: bool = False
    """Whether a busy machine ended the coordinator's term during the calm, so that members may have stopped."""

    @property
    def violations(self) -> list[ViolationError]:
        """Return the promises that were broken."""
        return self.verdict.violations


class Run(FaultRun[Process, Line, Tally]):
    """A seed's run."""

    def __init__(self, of: Scenario, kafka: FaultyKafka, folder: Path) -> None:
        super().__init__(of.seed, kafka, folder, "tests.coordinator_faults.worker", LINES)
        self.of = of
        stem = f"s{of.seed}-{os.urandom(3).hex()}"
        self.topic, self.pattern, self.log_topic = f"{stem}-data", f"{stem}-more*", f"{stem}-log"
        self.topics = {self.topic: of.partitions}
        self.coordinator_topics = CoordinatorTopics(f"{stem}-words")
        linked = any(fault.kind in OF_LINKS for fault in of.faults)
        self.coordinators = [
            Process(n, folder, Role.COORDINATOR, link=n if linked and n < LINKED else None)
            for n in range(of.coordinators)
        ]
        self.members = [
            Process(n, folder, Role.MEMBER, n % 2 == 0, LINKED + n if linked and n < LINKED else None)
            for n in range(of.members)
        ]
        self.stranger = Process(0, folder, Role.STRANGER)
        self.twins: list[Process] = []
        self.tally = Tally()

    @property
    def processes(self) -> list[Process]:
        """Return all processes that run now."""
        return [*self.coordinators, *self.members, *self.twins, self.stranger]

    def _prepare(self) -> None:
        self.admin.create(self.log_topic, COORDINATION_PARTITIONS, 3, LOG_SETTINGS)
        self.admin.create(self.topic, self.of.partitions, 3, DATA_SETTINGS)
        self.coordinator_topics.create(self.connection, COORDINATOR_PARTITIONS)
        self.watcher = LogWatcher(self.kafka.bootstrap_servers, self.log_topic, COORDINATION_PARTITIONS)

    def _topics(self) -> Sequence[str]:
        messages = self.coordinator_topics
        return *self.topics, self.log_topic, messages.member_messages, messages.coordinator_messages, messages.leader

    # Each tick

    def _live(self) -> None:
        for process in self.processes:
            self._start(process)
        self._wait(lambda: len(self._owned()) >= self.of.partitions / 2, WITHIN_S, "a first share")
        self._play([self._inject(fault) for fault in self.of.faults])
        self._calm_down()
        self.tally.settled_after_s = self._settle("after the last fault")
        self._end_calmly()

    def _calm_down(self) -> None:
        """Let all processes run, but only one (by chance) of two with the same name, and no independent claimer."""
        self.kafka.repair()
        for twin in self.twins:
            double = next(each for each in self.members if each.name == twin.name)
            loser, winner = (double, twin) if self.chance.random() < 0.5 else (twin, double)
            self._kill(loser)
            self.members = [winner if member is double else member for member in self.members]
        self.twins = []
        self._retire(self.stranger)

    def _settle(self, when: str) -> float:
        """Wait until the members own all partitions, evenly, and that stays for a session timeout.

        Return how long it took to get there, in seconds.
        """
        began_s = since_s = time.monotonic()
        stays_s = self.of.session_ms / 1_000 + STAYS_S
        before = self._ownership()
        while time.monotonic() < since_s + stays_s:
            self._tick()
            now, wrong = self._ownership(), self._what_is_wrong()
            if wrong or now.names() != before.names():
                since_s, before = time.monotonic(), now
            if since_s > began_s + SETTLE_WITHIN_S:
                raise RunFailedError(f"not settled within {SETTLE_WITHIN_S:g} s {when}: {wrong or 'it still changes'}")
        return round(since_s - began_s, 1)

    def _what_is_wrong(self) -> str | None:
        return self._ownership().what_is_wrong(self._places(), [member.run_id for member in self.members])

    def _places(self) -> set[Place]:
        return {(topic, number) for topic, count in self.topics.items() for number in range(count)}

    def _ownership(self) -> Ownership:
        return Ownership(self._owned())

    def _owned(self) -> dict[Place, tuple[str, int]]:
        """Return the owner of each partition by the log."""
        self.watcher.look()
        return {
            place: (key["owner"]["instance"].rpartition(".")[0], key["owner"]["epoch"])
            for place, key in self.watcher.keys(GROUP)
            if key["owner"] is not None
        }

    def _end_calmly(self) -> None:
        """Do the one step that the seed has for the calm, and check which claims it moves."""
        before, since_ms = self._ownership(), now_ms()
        leaving: list[str] = []
        if self.of.ending is Ending.JOINED:
            late = Process(self.of.members, self.folder, Role.MEMBER)
            self._start(late)
            self.members.append(late)
        elif self.of.ending is Ending.LEFT:
            leaver = self.members.pop()
            leaving.append(leaver.run_id)
            self._retire(leaver)
        elif self.of.ending is Ending.WITHOUT:
            self._be_without_coordinators(before)
        else:
            self._kill(next((each for each in self.coordinators if each.leads), self.coordinators[0]))
        self.tally.ended_after_s = self._settle(f"after {self.of.ending.value}")
        if self.of.ending is Ending.WITHOUT:
            return
        if gap_ms(self._journals(), since_ms - 2 * self.of.session_ms, now_ms()) > self.of.session_ms / 3:
            self.tally.is_unsteady = True
            return
        if self.of.ending is Ending.REPLACED:
            self._check_unmoved(before, "under another coordinator")
        needless = needless_stops(self._journals(), since_ms, self._ownership(), leaving)
        if needless:
            self._fail("only what moves is stopped", f"{self.of.ending.value}: {needless[:5]}")

    def _be_without_coordinators(self, before: Ownership) -> None:
        """Kill all coordinators for less than a session: members keep their claims and continue to work."""
        without_s = self.of.session_ms / 1_000 * 0.5
        is_slow = self._progress_s() > without_s / 4
        since_ms = now_ms()
        for coordinator in self.coordinators:
            self._kill(coordinator)
        offsets = self._offsets()
        self._pause_for(without_s)
        self._check_unmoved(before, "without a coordinator")
        if stops := needless_stops(self._journals(), since_ms, before):
            self._fail("nothing is stopped without a coordinator", str(stops[:5]))
        still = self._without_progress(offsets)
        if still and is_slow:
            self.tally.is_unsteady = True
        elif still:
            self._fail("progress continues without a coordinator", f"no progress of {sorted(still)[:5]}")
        for each in self.coordinators:
            self._start_again(each)

    def _progress_s(self) -> float:
        """Wait until there is progress in each partition, and return how long that took, in seconds."""
        began_s, before = time.monotonic(), self._offsets()
        self._wait(lambda: not self._without_progress(before), SETTLE_WITHIN_S, "progress in each partition")
        return time.monotonic() - began_s

    def _without_progress(self, before: Mapping[Place, int]) -> set[Place]:
        """Return the partitions whose offsets are those of `before`."""
        offsets = self._offsets()
        return {place for place in self._places() if offsets.get(place, 0) <= before.get(place, 0)}

    def _check_unmoved(self, before: Ownership, when: str) -> None:
        """Check that each partition has the same member. Its claim may be new if a busy machine lost the lease."""
        now = self._ownership().names()
        moved = {place: (had, now.get(place)) for place, had in before.names().items() if now.get(place) != had}
        if moved:
            self._fail("claims stay", f"{when}: {moved}")

    def _offsets(self) -> dict[Place, int]:
        self.watcher.look()
        return self.watcher.offsets(GROUP)

    def _end(self) -> None:
        super()._end()
        self.watcher.read_to_end(20)
        self.watcher.close()

    def _watch(self) -> None:
        self.watcher.look()

    def _is_good_end(self, process: Process, code: int) -> bool:
        del process
        return code in {0, -signal.SIGTERM}

    def _pause_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._tick()

    def _orders(self, process: Process) -> Orders:
        return Orders(
            role=process.role,
            bootstrap_servers=self.kafka.servers(process.link),
            name=process.name,
            run_id=process.run_id,
            messages=self.coordinator_topics.member_messages,
            coordination_topic=self.log_topic,
            topic=self.topic,
            pattern=self.pattern,
            partitions=self.of.partitions,
            session_ms=self.of.session_ms,
            slow_stop_s=self.of.slow_stop_s,
            is_static=process.is_static,
            seed=self.of.seed,
            journal=process.journal,
        )

    def _retire(self, process: Process) -> None:
        """End the process cleanly; it is not restarted."""
        process.is_held = True
        process.terminate()
        self._wait(lambda: not process.is_alive, END_WITHIN_S, f"{process.run_id} to end")
        self._check_exit(process)

    # Faults

    def _inject(self, fault: Fault) -> Script:
        yield from self._pause(fault.at_s)
        kind = FaultKind
        scripts: dict[FaultKind, Callable[[], Script]] = {
            kind.COORDINATOR_KILLED: lambda: self._killed([self._coordinator(fault)], fault.lasts_s),
            kind.COORDINATOR_STOPPED: lambda: self._stopped([self._coordinator(fault)], fault.lasts_s),
            kind.ALL_COORDINATORS_KILLED: lambda: self._killed(self.coordinators, fault.lasts_s),
            kind.ALL_COORDINATORS_STOPPED: lambda: self._stopped(self.coordinators, fault.lasts_s),
            kind.COORDINATOR_CUT: lambda: self._link(fault, fault.number % LINKED),
            kind.COORDINATOR_HELD: lambda: self._link(fault, fault.number % LINKED),
            kind.MEMBER_KILLED: lambda: self._killed([self._member(fault)], fault.lasts_s),
            kind.MEMBER_STOPPED: lambda: self._stopped([self._member(fault)], fault.lasts_s),
            kind.MEMBER_CUT: lambda: self._link(fault, LINKED + fault.number % LINKED),
            kind.MEMBER_HELD: lambda: self._link(fault, LINKED + fault.number % LINKED),
            kind.MEMBERS_FLAP: lambda: self._flap(fault),
            kind.NAME_TAKEN: lambda: self._name_taken(fault),
            kind.BROKER_KILLED: lambda: self._broker_fails(fault),
            kind.BROKER_STOPPED: lambda: self._broker_fails(fault),
            kind.PARTITIONS_ADDED: self._partitions_added,
            kind.TOPIC_CREATED: self._topic_created,
        }
        yield from scripts[fault.kind]()

    def _coordinator(self, fault: Fault) -> Process:
        leading = [each for each in self.coordinators if each.leads]
        return leading[0] if leading and fault.number == 0 else self.coordinators[fault.number % len(self.coordinators)]

    def _member(self, fault: Fault) -> Process:
        return self.members[fault.number % len(self.members)]

    def _flap(self, fault: Fault) -> Script:
        """Members end and restart repeatedly, some of them cleanly."""
        for _ in range(4):
            member = self.chance.choice(self.members)
            if member.is_held:
                continue
            if self.chance.random() < 0.5:
                self._kill(member)
            else:
                yield from self._ended(member)
            yield from self._pause(fault.lasts_s)
            self._start_again(member)
            yield from self._pause(fault.lasts_s)

    def _name_taken(self, fault: Fault) -> Script:
        """Start a second process with a member's name while the first one runs."""
        double = self._member(fault)
        if any(twin.number == double.number for twin in self.twins):
            return
        twin = Process(double.number, self.folder, Role.MEMBER, double.is_static, runs=100 + double.runs)
        self._start(twin)
        self.twins.append(twin)
        yield from self._pause(fault.lasts_s)

    def _broker_fails(self, fault: Fault) -> Script:
        """Stop or kill a broker, mostly one that leads a partition to which coordinators or members write."""
        messages = self.coordinator_topics
        topic = self.chance.choice(
            (messages.member_messages, messages.coordinator_messages, messages.leader, self.log_topic)
        )
        broker = yield from self._broker(topic, self.chance.randrange(2))
        fails = self._broker_killed if fault.kind is FaultKind.BROKER_KILLED else self._broker_stopped
        yield from fails(broker, fault.lasts_s)

    def _link(self, fault: Fault, link: int) -> Script:
        is_cut = fault.kind in {FaultKind.COORDINATOR_CUT, FaultKind.MEMBER_CUT}
        yield from self._link_fails(self.kafka.proxy, link, LinkState(is_cut, held=fault.held), fault)

    def _partitions_added(self) -> Script:
        more = self.topics[self.topic] + self.chance.randint(1, 3)
        yield from self._aside(lambda: grow(self.admin, self.topic, more))
        self.topics[self.topic] = more

    def _topic_created(self) -> Script:
        name = self.pattern.replace("*", str(len(self.topics)))
        yield from self._aside(lambda: self.admin.create(name, 3, 3, DATA_SETTINGS))
        self.topics[name] = 3

    # Results

    def _judge(self) -> Tally:
        journals, tally = self._journals(), self.tally
        tally.verdict = judge(GROUP, COORDINATION_PARTITIONS, self.watcher.records, journals)
        lines = [line for journal in journals.values() for line in journal]
        tally.claims = len({(line.place, line.epoch) for line in lines if line.did is Did.WORKS})
        tally.commits = sum(line.did is Did.COMMITTED for line in lines)
        tally.terms = sum(line.did is Did.LEADS for line in lines)
        tally.stops = sum(line.did is Did.STOPS and line.place != ("", 0) for line in lines)
        if tally.violations or self.wrong:
            self.watcher.write(self.folder / "log.jsonl")
        return tally
