"""The world of one seed: members that run the library's harvester, writers, faults, and the judge of all steps."""

import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from marshal_dagster.election.elector import Elector
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox import harvester, publisher
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.publisher import KafkaPublisher
from marshal_dagster.outbox.schema import VERSION, OutboxRegistration
from marshal_dagster.outbox.store import PostgresStore
from tests.outbox_simulator import kafka
from tests.outbox_simulator.checkers import Judge, Story
from tests.outbox_simulator.database import NO_RIGHT, Database, Stored, Tables
from tests.outbox_simulator.group import TIMING, Group, SimulatedElector
from tests.outbox_simulator.network import Network, Side
from tests.outbox_simulator.scenario import TOPICS, Event, EventKind, Scenario, Writing
from tests.simulator.checkers import ViolationError
from tests.simulator.scheduler import Process, Scheduler, Task

T = TypeVar("T")

TRANSACTION_TIMEOUT_S: Final = 2.5
LOOK_MS: Final = 500.0
_STANDING: Final = OutboxRegistration("outbox", kafka.UID, VERSION, 0, None)
_CONNECTION: Final = KafkaConnection(bootstrap_servers="simulated:1")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed."""

    seed: int
    violations: tuple[ViolationError, ...]
    records: int
    steps: int
    befallen: Counter[str]
    outcomes: Counter[str] = field(default_factory=Counter)
    story: tuple[tuple[float, str, tuple[object, ...]], ...] = ()

    @property
    def transcript(self) -> list[str]:
        """Return what happened, line by line."""
        return [f"{at_ms:10.3f}  {text.format(*values)}" for at_ms, text, values in self.story]


class MemberClock:
    """The clocks of a machine; `lease_ms` counts from the start of the machine."""

    def __init__(self, scheduler: Scheduler, off_ms: float) -> None:
        self._scheduler = scheduler
        self._off_ms = off_ms
        self.wall_off_ms = 0.0

    def lease_ms(self) -> float:
        """Return the milliseconds since the machine's start."""
        return self._scheduler.now_ms + self._off_ms

    def wall_ms(self) -> int:
        """Return the Unix time, which may jump."""
        return round(self._scheduler.now_ms + self.wall_off_ms)

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep for a virtual time."""
        self._scheduler.sleep(duration_ms)


class SimulatedHarvester(Harvester):
    """The library's harvester, connected to the simulated services."""

    def __init__(self, world: "World", process: Process) -> None:
        of = world.scenario
        options = HarvesterOptions(
            HarvestLimits(of.max_records, of.max_bytes, of.max_attempts, of.topic_patience_s),
            TIMING,
            of.poll_interval_s,
            TRANSACTION_TIMEOUT_S,
        )
        super().__init__(cast("Any", Tables(world, process)), _CONNECTION, options)
        self._clock = cast("Any", world.clock(process))
        self._world = world
        self._process = process

    def _look_up(self, *, is_recorded: bool = False) -> OutboxRegistration:
        del is_recorded
        return _STANDING

    def _elector(self, registration: OutboxRegistration) -> Elector:
        del registration
        return SimulatedElector(self._world, self._process)

    def _pause(self, seconds: float) -> None:
        self._world.scheduler.sleep(seconds * 1_000)

    def _look_at_ends(self, elector: Elector) -> None:
        """Do nothing, because this check only records failures for operators."""

    def _ends(self, registration: OutboxRegistration) -> tuple[PostgresStore, KafkaPublisher]:
        store = PostgresStore(self._tables, self._process.name)
        return store, KafkaPublisher(
            self._connection, registration.uid, kafka.NOTES, transaction_timeout_s=self._options.transaction_timeout_s
        )


class World:
    """The complete state of one seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(scenario.seed)
        self.scheduler.stops_end_ms = scenario.calm_ms
        self.chance = random.Random(scenario.seed * 7 + 1)
        self.violations: list[ViolationError] = []
        self.outcomes: Counter[str] = Counter()
        self.story: list[tuple[float, str, tuple[object, ...]]] = []
        self.judge = Judge(self._fail)
        self.database = Database(self)
        self.brokers = kafka.Brokers(self, dict(scenario.missing))
        self.network = Network(
            self.scheduler,
            self.chance,
            dict(scenario.call_faults),
            self.kill,
            latency_ms=scenario.latency_ms,
            calm_ms=scenario.calm_ms,
        )
        self.group = Group(self)
        self._clocks = [MemberClock(self.scheduler, self.chance.random() * 1e6) for _ in range(scenario.members)]
        self._members: dict[str, SimulatedHarvester] = {}
        self._processes: dict[str, Process] = {}
        self._rightless: dict[tuple[str, Side], float] = {}
        self._nature = Process(self.scheduler, "nature")
        self._row_waiters: list[Task] = []
        self._last_id = 0
        self._unwritten = len(scenario.writings)
        self._open_writings = 0

    def run(self) -> Result:
        """Run the seed."""
        with _instead(self):
            for number in range(self.scenario.members):
                self._nature.spawn(partial(self._keep_up, f"m{number}"))
            self._nature.spawn(self._write)
            self._nature.spawn(self._look)
            if self.scenario.events:
                self._nature.spawn(self._inject_fault)
            self.scheduler.run(self.scenario.ends_ms)
            self.judge.at_the_end(self.scheduler.now_ms)
            self.scheduler.kill_all()
        for process, error in self.scheduler.failures:
            self._fail("no process fails unexpectedly", f"{process.name}: {traceback.format_exception(error)[-3:]}")
        return Result(
            self.scenario.seed,
            tuple(self.violations),
            self.brokers.committed,
            self.network.calls,
            self.network.befallen,
            self.outcomes,
            tuple(self.story),
        )

    def report(self, text: str, *values: object) -> None:
        """Add a line to the transcript of the seed."""
        self.story.append((self.scheduler.now_ms, text, values))

    def call(
        self, side: Side, effect: Callable[[], T], timeout_ms: float, is_late: Callable[[], None] = lambda: None
    ) -> T:
        """Make a call on behalf of the current process (`Network.call`)."""
        if side is Side.KAFKA:
            self.judge.tried(self.current_process().name)
        return self.network.call(side, effect, timeout_ms, is_late)

    def clock(self, process: Process) -> MemberClock:
        """Return the clock of a process's machine."""
        return self._clocks[int(process.name[1 : process.name.index(".")])]

    def lacks_right(self, process: Process, side: Side) -> bool:
        """Return whether a member has lost its right to the tables or to its transactional id."""
        return self._rightless.get((process.name.partition(".")[0], side), 0.0) > self.scheduler.now_ms

    def wait_for_rows(self, timeout_ms: float) -> None:
        """Pause the current task until rows are committed, or until the timeout."""
        task = self.scheduler.current
        assert task is not None
        self._row_waiters.append(task)
        try:
            self.scheduler.park(timeout_ms)
        finally:
            self._row_waiters.remove(task)

    def kill(self, process: Process) -> None:
        """Kill a process and its open database transactions."""
        self.report("{} is killed", process.name)
        self.database.hang_up(process.name)
        process.kill()

    def current_process(self) -> Process:
        """Return the current process."""
        assert self.scheduler.current is not None
        return self.scheduler.current.process

    def _fail(self, promise: str, text: str) -> None:
        self.violations.append(ViolationError(promise, text))
        self.report("VIOLATION of {}: {}", promise, text)
        self.scheduler.is_stopped = True

    def _keep_up(self, member: str) -> None:
        """Restart a member whenever it has ended."""
        number = 0
        while True:
            process = Process(self.scheduler, f"{member}.{number}")
            self._processes[member] = process
            self._members[member] = SimulatedHarvester(self, process)
            process.spawn(partial(_run, self._members[member]))
            process.wait_until_over()
            self.report("{} is over", process.name)
            self.scheduler.sleep(self.chance.random() * 1_000)
            number += 1

    def _look(self) -> None:
        """Update the group, and end the world once all rows are done."""
        while True:
            self.scheduler.sleep(LOOK_MS)
            self.group.look()
            is_calm = self.scheduler.now_ms >= self.scenario.calm_ms
            if is_calm and not self._unwritten and not self.database.rows:
                self.scheduler.is_stopped = True

    def _write(self) -> None:
        """Run the writers' transactions."""
        steps: list[tuple[float, int, Callable[[], None]]] = []
        for number, writing in enumerate(self.scenario.writings):
            stories: list[Story] = []
            restarts: list[int] = []
            begin = (writing.rows[0].at_ms, len(steps), partial(self._begin_writing, restarts))
            steps.append(begin)
            for written in writing.rows:
                insert = partial(self._insert, number, written.number, stories, written)
                steps.append((written.at_ms, len(steps), insert))
            steps.append((writing.ends_ms, len(steps), partial(self._end_writing, writing, stories, restarts)))
        steps.sort(key=lambda step: step[:2])
        for count, (at_ms, _, step) in enumerate(steps):
            self._step = count
            if at_ms > self.scheduler.now_ms:
                self.scheduler.sleep(at_ms - self.scheduler.now_ms)
            step()

    def _begin_writing(self, restarts: list[int]) -> None:
        restarts += [self.database.restarts, round(self.scheduler.now_ms * 1_000)]
        self._open_writings += 1

    def _insert(self, writing: int, number: int, stories: list[Story], written: Any) -> None:  # noqa: ANN401
        self._last_id += 1
        begun = stories[0].begun if stories else self._step
        story = Story(number, self._last_id, written.topic, written.key, writing, begun)
        stories.append(story)
        self.judge.inserted(story)
        if written.poison is not None:
            self.brokers.poison(b"%d" % number, written.poison)

    def _end_writing(self, writing: Writing, stories: list[Story], restarts: list[int]) -> None:
        self._unwritten -= 1
        self._open_writings -= 1
        if writing.is_rolled_back or restarts[0] != self.database.restarts:
            self.report("rows {} are rolled back", [story.id for story in stories])
            return
        for story in stories:
            story.committed = self._step
            value = b"%d" % story.number
            self.database.rows[story.id] = Stored(story.id, story.topic, story.key, value, restarts[1])
        self.report("rows {} are committed", [(story.id, story.topic, story.key) for story in stories])
        for waiter in self._row_waiters:
            self.scheduler.wake(waiter)

    def _inject_fault(self) -> None:
        """Run the events."""
        for event in self.scenario.events:
            self.scheduler.sleep(event.at_ms - self.scheduler.now_ms)
            self.network.befallen[event.kind] += 1
            self.report("event: {}", event.kind)
            self._happen(event, random.Random(event.chance))

    def _happen(self, event: Event, chance: random.Random) -> None:  # noqa: C901, PLR0912 - a table in the form of code
        now_ms = self.scheduler.now_ms
        until_ms = min(now_ms + event.for_ms, self.scenario.calm_ms)
        member = self._victim(chance)
        process = self._processes[member]
        match event.kind:
            case EventKind.CRASH:
                self.kill(process)
            case EventKind.STOP:
                process.stop(event.for_ms)
            case EventKind.HANDOVER:
                self._members[member].stop()
            case EventKind.RESTART:
                self.database.restart(min(event.for_ms, self.scenario.calm_ms - now_ms))
            case EventKind.CUT_DATABASE:
                self.network.cut_until_ms[member, Side.DATABASE] = until_ms
            case EventKind.CUT_KAFKA:
                self.network.cut_until_ms[member, Side.KAFKA] = until_ms
            case EventKind.SLOW_DATABASE:
                self.network.slow_until_ms[Side.DATABASE] = until_ms
            case EventKind.SLOW_KAFKA:
                self.network.slow_until_ms[Side.KAFKA] = until_ms
            case EventKind.REBALANCE:
                self.group.rebalance(chance.random() * event.for_ms)
            case EventKind.LATE_BEATS:
                self.group.late_until_ms = until_ms
            case EventKind.DOUBLE_BEATS:
                self.group.doubled_until_ms = until_ms
            case EventKind.WALL_CLOCK:
                self._clocks[int(member[1:])].wall_off_ms += chance.choice((-1e7, 1e7))
            case EventKind.RIGHT_LOST:
                self._rightless[member, chance.choice(list(Side))] = until_ms
                self.database.restart(1)
            case EventKind.TOPIC_GONE:
                self.brokers.missing_until_ms[chance.choice(TOPICS)] = until_ms
            case EventKind.PUT_BACK:
                for row_id in sorted(self.database.parked.keys() - self.database.rows.keys()):
                    self.database.put_back(row_id)
            case EventKind.NOTES_LOST:
                self.brokers.lose_notes()
            case EventKind.TRUNCATED:
                self._nature.spawn(self._truncate)

    def _truncate(self) -> None:
        """Empty the tables and use ids again, at a time when no writer and no harvester uses them."""
        while self.scheduler.now_ms < self.scenario.calm_ms:
            if not self._open_writings and self.database.truncate():
                self._last_id = 0
                self.outcomes["truncated"] += 1
                self.report("the tables are truncated")
                return
            self.scheduler.sleep(1)

    def _victim(self, chance: random.Random) -> str:
        """Choose a member, the leader more often than others."""
        leaders = [name for name, member in self._members.items() if member.term is not None]
        names = sorted(self._members)
        return chance.choice(leaders) if leaders and chance.random() < 0.7 else chance.choice(names)


def _run(member: Harvester) -> None:
    """Run a member, which may end because of a missing right."""
    try:
        member.run()
    except ConfigurationError as error:
        if str(error) != NO_RIGHT:
            raise


@contextmanager
def _instead(world: World) -> Iterator[None]:
    """Replace real brokers and real time by simulated ones in the library."""

    def transaction(_: object, transactional_id: str, *, topics: Any, timeout_s: float, **__: object) -> object:  # noqa: ANN401
        return kafka.Transaction(world, world.current_process(), transactional_id, topics=topics, timeout_s=timeout_s)

    time = SimpleNamespace(monotonic=lambda: world.scheduler.now_ms / 1_000)
    modules: list[tuple[Any, str, Any]] = [
        (publisher, "Transaction", transaction),
        (publisher, "NotesReader", lambda *_, **__: kafka.Notes(world)),
        (publisher, "Topics", lambda _: kafka.Topics(world)),
        (publisher, "time", time),
        (harvester, "time", time),
        (harvester, "metrics_recorded", lambda *_: nullcontext()),  # it would read real time, in a thread
    ]
    before = [getattr(module, name) for module, name, _ in modules]
    logging.disable(logging.CRITICAL)
    try:
        for module, name, fake in modules:
            setattr(module, name, fake)
        yield
    finally:
        logging.disable(logging.NOTSET)
        for (module, name, _), original in zip(modules, before, strict=True):
            setattr(module, name, original)


def simulate(scenario: Scenario) -> Result:
    """Run one seed."""
    return World(scenario).run()
