"""The group coordinator in a process of its own: a group with thousands of members, and a small group that one joins.

The partitions of the large group do not exist in Kafka, because one broker on this machine cannot carry 50,000. The
coordinator gets their number as an argument. All else is real: the broker, the election, the coordinator's loop, and
each member's registration, pings and answers.
"""

import logging
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks import crowd, rebalance, services
from benchmarks.crowd import Seen
from benchmarks.harness import Benchmark, Case, Goal, Measured, rounded
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.group import GroupEventKind
from marshal_dagster.coordinator.member import MemberState
from marshal_dagster.coordinator.service import Coordinator
from marshal_dagster.coordinator.transport import CoordinatorTopics, Reader, end_of
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.coordinator_world import World

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

LARGE: Final = CoordinatorTopics("large")
SMALL: Final = CoordinatorTopics("small")
SMALL_TOPIC: Final = "small-orders"
_WITHIN_S: Final = 120.0
_LOOK_EACH_S: Final = 0.1
_ONE_IN: Final = 10
"""One in this many members dies, all at once."""
_MOST_PERCENT: Final = 50
_MOST_MIB: Final = 256
_CONVERGES_IN_S: Final = 10
_MIB: Final = 2**20
_MS_PER_S: Final = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the large group, how long it is observed, how often a tenth dies; the small group; the simulation."""

    members: int = 5_000
    partitions: int = 50_000
    processes: int = 2
    session_ms: int = 6_000
    steady_seconds: int = 30
    deaths: int = 3
    small_members: int = 10
    small_partitions: int = 900
    alternations: int = 5
    warm_up: int = 1
    kafka_heartbeat_ms: int = 3_000
    """How often a member of Kafka's groups asks whether to rebalance; by default as often as the client's default."""
    simulated_members: int = 5_000
    simulated_partitions: int = 50_000


def run(sizes: Sizes) -> Measured:
    """Measure the large group, the small group, and the large group again on a virtual clock."""
    with services.broker() as connection:
        with Topics(connection) as topics:
            topics.create(SMALL_TOPIC, sizes.small_partitions, 1)
        for each in (LARGE, SMALL):
            each.create(connection)
        large, conditions = _large(connection, sizes)
        cases = [*large, *_small(connection, sizes)]
    return Measured([*cases, _simulated(sizes)], conditions)


# The large group


def _large(connection: KafkaConnection, sizes: Sizes) -> tuple[list[Case], Mapping[str, Any]]:
    known = {crowd.TOPIC: sizes.partitions}
    with _process(_coordinate, connection, LARGE, known) as (_, leader), ExitStack() as stack:
        _await_leader(connection, LARGE)
        idle_mib = leader.memory_info().rss / _MIB
        started = [
            stack.enter_context(_process(crowd.serve, connection, LARGE, sizes.session_ms))
            for _ in range(sizes.processes)
        ]
        members = _Members([commands for commands, _ in started], sizes.partitions)
        joined_s = [members.join(sizes.members)]
        steady = _steady(connection, leader, [process for _, process in started], sizes)
        deaths = []
        for _ in range(sizes.deaths):
            deaths.append(members.lose(sizes.members // _ONE_IN, sizes.session_ms))
            joined_s.append(members.join(sizes.members // _ONE_IN))
        full_mib = leader.memory_info().rss / _MIB
    name = f"{sizes.members:,} members, {sizes.partitions:,} partitions"
    cases = [
        Case(
            f"{name}: the coordinator's processor beside merely reading",
            [steady.percent["coordinator"]],
            [steady.percent["merely reading"]],
            "% of a core",
            Goal.OURS_AT_MOST,
            _MOST_PERCENT,
        ),
        Case(
            f"{name}: its memory beside that without members",
            [full_mib],
            [idle_mib],
            "MiB",
            Goal.OURS_AT_MOST,
            _MOST_MIB,
        ),
        Case(
            f"{name}: answers that came without a request",
            [steady.words_per_s],
            [sizes.members * 3 * _MS_PER_S / sizes.session_ms],
            "messages/s",
            Goal.RATIO_AT_LEAST,
            0.9,
        ),
        Case(
            f"{name}: all worked on after a tenth died beside known to be dead",
            [took_s for took_s, _ in deaths],
            [floor_s for _, floor_s in deaths],
            "s",
            Goal.OURS_AT_MOST,
            _CONVERGES_IN_S,
        ),
    ]
    conditions = {
        "seconds_until_all_who_joined_work": [rounded(each) for each in joined_s],
        "percent_of_a_core": steady.percent,
        "orders_per_s": rounded(steady.orders_per_s),
    }
    return cases, conditions


@dataclass(slots=True)
class _Members:
    """The members of all `crowd` processes."""

    crowds: "Sequence[Connection[Any, Any]]"
    partitions: int
    names: list[str] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    _count: int = 0

    def join(self, count: int) -> float:
        """Let `count` members join, and return the seconds until all members have partitions."""
        new = [f"m{self._count + each}" for each in range(count)]
        self._count += count
        began_s = min(self._report("join", new))
        self.names += new
        return self._await_even() - began_s

    def lose(self, count: int, session_ms: int) -> tuple[float, float]:
        """Kill `count` members at a random moment, and return two durations in seconds.

        The first lasts until every partition has a member again. The second lasts until the coordinator can know that
        they are dead: the first ping that they did not answer is then as old as the session timeout.
        """
        time.sleep(self.dice.random() * session_ms / _MS_PER_S)
        dead = self.dice.sample(self.names, count)
        self.names = sorted(set(self.names) - set(dead))
        died_s = min(self._report("kill", dead))
        took_s = self._await_even() - died_s
        pinged_s = min(each.pinged_s or died_s for each in self._seen())
        return took_s, pinged_s + session_ms / _MS_PER_S - died_s

    def _report(self, what: str, names: list[str]) -> list[float]:
        for number, commands in enumerate(self.crowds):
            commands.send((what, [name for name in names if int(name[1:]) % len(self.crowds) == number]))
        return [_answer(commands) for commands in self.crowds]

    def _seen(self) -> list[Seen]:
        for commands in self.crowds:
            commands.send(("seen", []))
        return [_answer(commands) for commands in self.crowds]

    def _await_even(self) -> float:
        """Wait until the partitions are spread evenly, and return since when they are. Raises `RuntimeError`."""
        deadline_s = time.monotonic() + _WITHIN_S
        while not self._is_even(seen := self._seen()):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the partitions are not spread evenly after {_WITHIN_S:g} s: {seen}")
            time.sleep(_LOOK_EACH_S)
        for commands in self.crowds:
            commands.send(("numbers", []))
        numbers = [number for commands in self.crowds for number in _answer(commands)]
        if sorted(numbers) != list(range(self.partitions)):
            raise RuntimeError("a partition has two members")
        return max(each.changed_s for each in seen)

    def _is_even(self, seen: Sequence[Seen]) -> bool:
        are_all = sum(each.registered for each in seen) == sum(each.members for each in seen) == len(self.names)
        is_all = sum(each.held for each in seen) == self.partitions
        return are_all and is_all and max(each.most for each in seen) - min(each.fewest for each in seen) <= 1


@dataclass(frozen=True, slots=True)
class _Steady:
    """Figures of a period in which members only answered pings."""

    percent: Mapping[str, float]
    """Percent of a core, by process."""
    words_per_s: float
    orders_per_s: float


def _steady(
    connection: KafkaConnection, leader: psutil.Process, crowds: Sequence[psutil.Process], sizes: Sizes
) -> _Steady:
    with _process(_merely_read, connection, LARGE.member_messages) as (commands, reader):
        _answer(commands)
        brokers = [each for each in psutil.Process().children() if "kafka.Kafka" in each.cmdline()]
        watched = {"coordinator": [leader], "members": crowds, "merely reading": [reader], "broker": brokers}
        before = {name: _processor_s(each) for name, each in watched.items()}
        messages, orders = _records(connection, LARGE.member_messages), _records(connection, LARGE.coordinator_messages)
        began_s = time.monotonic()
        time.sleep(sizes.steady_seconds)
        seconds = time.monotonic() - began_s
        after = {name: _processor_s(each) for name, each in watched.items()}
        messages = _records(connection, LARGE.member_messages) - messages
        orders = _records(connection, LARGE.coordinator_messages) - orders
    percent = {name: rounded(max(0.01, 100 * (after[name] - before[name]) / seconds)) for name in watched}
    return _Steady(percent, messages / seconds, orders / seconds)


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _records(connection: KafkaConnection, topic: str) -> int:
    with Topics(connection) as topics:
        partitions = topics.describe(topic).partitions
        return sum(each.end for each in topics.offsets(topic, partitions, committed_only=False).values())


def _await_leader(connection: KafkaConnection, topics: CoordinatorTopics) -> None:
    """Wait until a member without topics is registered. Raises `RuntimeError`."""
    nothing: Callable[[object], None] = lambda _: None  # noqa: E731 - a function that does nothing
    deadline_s = time.monotonic() + _WITHIN_S
    with CoordinatedMember(connection, crowd.GROUP, "first", start=nothing, stop=nothing, topics=topics) as member:
        while member.state is not MemberState.REGISTERED:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no coordinator leads after {_WITHIN_S:g} s")
            time.sleep(_LOOK_EACH_S)


# The small group


def _small(connection: KafkaConnection, sizes: Sizes) -> list[Case]:
    """Let one more member join in turn: a coordinated group, and Kafka's own consumer group with two strategies."""
    members, partitions = sizes.small_members, sizes.small_partitions
    ways = [
        rebalance.coordinated(connection, SMALL, SMALL_TOPIC),
        rebalance.in_a_kafka_group(connection, SMALL_TOPIC, "range", sizes.kafka_heartbeat_ms),
        rebalance.in_a_kafka_group(connection, SMALL_TOPIC, "cooperative-sticky", sizes.kafka_heartbeat_ms),
    ]
    with _process(_coordinate, connection, SMALL, None), ExitStack() as stack:
        groups = [stack.enter_context(rebalance.group(way, members, partitions)) for way in ways]
        rounds = [[one_more() for one_more in groups] for _ in range(sizes.warm_up + sizes.alternations)]
    ours, eager, cooperative = zip(*rounds[sizes.warm_up :], strict=True)
    name = f"{members} members, {partitions:,} partitions, one joins"
    least = partitions // members
    return [
        Case(
            f"{name}: partitions stopped beside Kafka's eager rebalance",
            [our.partitions_stopped for our in ours],
            [each.partitions_stopped for each in eager],
            "partitions",
            Goal.OURS_AT_MOST,
            least,
        ),
        Case(
            f"{name}: until all work again beside Kafka's eager rebalance",
            [each.all_work_again_ms for each in ours],
            [each.all_work_again_ms for each in eager],
            "ms",
            Goal.RATIO_AT_MOST,
            1,
        ),
        Case(
            f"{name}: until all work again beside Kafka's cooperative rebalance",
            [each.all_work_again_ms for each in ours],
            [each.all_work_again_ms for each in cooperative],
            "ms",
            Goal.RATIO_AT_MOST,
            1,
        ),
        Case(
            f"{name}: longest that a partition stood still beside Kafka's cooperative rebalance",
            [each.longest_pause_ms for each in ours],
            [each.longest_pause_ms for each in cooperative],
            "ms",
            Goal.RATIO_AT_MOST,
            1,
        ),
    ]


# On a virtual clock


def _simulated(sizes: Sizes) -> Case:
    """Simulate the large group with a network that only delays: all members join at once, then a tenth dies."""
    world = World(session_ms=sizes.session_ms, topics={"orders": sizes.simulated_partitions}, overhears=False)
    leader = world.elect()
    for number in range(sizes.simulated_members):
        world.join(f"m{number}")
    world.until(world.is_even, 60_000)
    world.run(sizes.session_ms)
    leader.events.clear()
    for number in range(sizes.simulated_members // _ONE_IN):
        world.kill(f"m{number}")
    died_ms = world.now_ms
    world.until(lambda: GroupEventKind.FAILED in [event.happening for event in leader.events], 60_000)
    known_ms = world.now_ms - died_ms
    world.until(world.is_even, 60_000)
    return Case(
        f"{sizes.simulated_members:,} members, {sizes.simulated_partitions:,} partitions, virtual clock: "
        "all worked on after a tenth died beside known to be dead",
        [(world.now_ms - died_ms) / _MS_PER_S],
        [known_ms / _MS_PER_S],
        "s",
        Goal.OURS_AT_MOST,
        _CONVERGES_IN_S,
    )


# Processes


def _coordinate(
    commands: "Connection[Any, Any]",
    connection: KafkaConnection,
    topics: CoordinatorTopics,
    known: Mapping[str, int] | None,
) -> None:
    """Run a coordinator until a command arrives. `known` replaces the topics that it would read from Kafka."""
    logging.disable()  # it logs each member that dies
    coordinator = Coordinator(connection, topics, look=None if known is None else lambda: known)

    def stop_when_requested() -> None:
        commands.poll(None)
        coordinator.stop()

    threading.Thread(target=stop_when_requested, daemon=True).start()
    coordinator.run()


def _merely_read(commands: "Connection[Any, Any]", connection: KafkaConnection, topic: str) -> None:
    """Read new records as the coordinator does, and ignore them."""
    with Topics(connection) as topics:
        partitions = topics.describe(topic).partitions
    reader = Reader(connection, topic)
    reader.follow({partition: end_of(connection, topic, partition) for partition in partitions})
    commands.send(None)
    while not commands.poll():
        for _ in reader.read(0.05):
            pass
    reader.close()


@contextmanager
def _process(serve: Callable[..., None], *arguments: object) -> "Iterator[tuple[Connection[Any, Any], psutil.Process]]":
    """Start a process that exits when it receives None."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process: BaseProcess = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None  # noqa: S101 - the process has been started
    try:
        yield ours, psutil.Process(process.pid)
    finally:
        with suppress(OSError):  # the process has exited
            ours.send(None)
        process.join(_WITHIN_S)


def _answer(ours: "Connection[Any, Any]") -> Any:  # noqa: ANN401 - the answer to any command
    if not ours.poll(_WITHIN_S):
        raise RuntimeError(f"a process did not answer within {_WITHIN_S:g} s")
    return ours.recv()


BENCHMARK: Final = Benchmark(
    "coordinator", "a coordinated group of thousands, and what stops when a member joins a small one", Sizes(), run
)
