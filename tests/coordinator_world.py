"""A group, its members and its coordinators on a virtual clock, with a network that loses, delays and repeats."""

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from marshal_dagster.coordinator.assignment import Place, Strategy, sticky_assignment
from marshal_dagster.coordinator.group import ALL, GroupCoordinator, Happening, Rules
from marshal_dagster.coordinator.member import Membership, Standing, Told
from marshal_dagster.coordinator.messages import Order, Register, StartFetcher, Word, parse_order, parse_word, render

GROUP = "etl"
TICK_MS = 50.0


@dataclass(slots=True)
class Network:
    """How bad it is; probabilities, and the longest delay in milliseconds."""

    loses: float = 0.0
    repeats: float = 0.0
    delay_ms: float = 20.0


@dataclass(slots=True)
class Worker:
    """A member's process: it claims what it is told to work on, and gives up what it is told to stop with."""

    membership: Membership
    is_dead: bool = False
    sleeps_until_ms: float = 0.0
    stops_in_ms: float = 10.0
    stopped_for: int = 0
    """How many partitions it had to stop working on."""


@dataclass
class World:
    """Everything; `claims` stand for the coordination log, which alone decides who has what."""

    seed: int = 0
    session_ms: int = 6_000
    strategy: Strategy = sticky_assignment
    topics: dict[str, int] = field(default_factory=lambda: {"orders": 24})
    network: Network = field(default_factory=Network)
    overhears: bool = True
    """Whether members get the orders for others too, as they do on a broker; thousands are too many for that here."""

    def __post_init__(self) -> None:
        """Begin with nobody."""
        self.now_ms = 0.0
        self.random = random.Random(self.seed)
        self.workers: dict[str, Worker] = {}
        self.coordinators: list[GroupCoordinator] = []
        self.terms = 0
        self.kept: dict[str, StartFetcher] = {}
        self.claims: dict[Place, str] = {}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.rules = Rules(self.strategy, min_session_ms=500)

    def join(self, name: str, **fields: object) -> Worker:
        """Start a member's process."""
        wanted = {"topics": ["orders"], "session_timeout_ms": self.session_ms, **fields}
        tenure = f"{name}-{next(self._numbers)}"
        register = Register.model_validate({"group": GROUP, "member": name, "epoch": 0, "tenure": tenure, **wanted})
        worker = Worker(Membership(register, self.now_ms))
        self.workers[name] = worker
        return worker

    def kill(self, name: str) -> None:
        """Kill a member's process; its claims become stale after a while."""
        worker = self.workers.pop(name)
        worker.is_dead = True
        self._later(self.session_ms / 2, lambda: self._forget(worker))

    def leave(self, name: str) -> None:
        """Shut a member down."""
        worker = self.workers[name]
        self._do(worker, worker.membership.leave())

    def elect(self) -> GroupCoordinator:
        """Begin another coordinator's term; one before may go on for a while."""
        self.terms += 1
        epoch = self.terms
        leader = GroupCoordinator(
            GROUP, epoch, self.rules, self.now_ms, kept=list(self.kept.values()), recovery_ms=self.session_ms
        )
        self.coordinators.append(leader)
        self._send_orders(leader.topics_are(self.topics, self.now_ms))
        return leader

    def depose(self, leader: GroupCoordinator) -> None:
        """End a coordinator."""
        self.coordinators = [each for each in self.coordinators if each is not leader]

    def run(self, duration_ms: float) -> None:
        """Let time pass."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms += TICK_MS
            while self._due and self._due[0][0] <= self.now_ms:
                heapq.heappop(self._due)[2]()
            for leader in self.coordinators:
                self._send_orders(leader.topics_are(self.topics, self.now_ms))
                self._send_orders(leader.tick(self.now_ms))
            for worker in list(self.workers.values()):
                if worker.sleeps_until_ms <= self.now_ms:
                    self._do(worker, worker.membership.tick(self.now_ms))
                    self._claim(worker)

    def until(self, condition: Callable[[], bool], within_ms: float) -> float:
        """Let time pass until something is so; give how long it took. Raises `AssertionError`."""
        began_ms = self.now_ms
        while not condition():
            assert self.now_ms - began_ms < within_ms, self.told()
            self.run(TICK_MS)
        return self.now_ms - began_ms

    def is_even(self) -> bool:
        """Tell whether each partition is worked on, by who is to, and nobody has two more than another."""
        living = [name for name, each in self.workers.items() if each.membership.standing is Standing.REGISTERED]
        places = {(topic, number) for topic, count in self.topics.items() for number in range(count)}
        counts = Counter(self.claims[place] for place in places if place in self.claims)
        has_all = sum(counts[name] for name in living) == len(places) and len(living) == len(self.workers)
        return has_all and max(counts[name] for name in living) - min(counts[name] for name in living) <= 1

    def told(self) -> str:
        """Say how things stand, for messages."""
        counts = Counter(self.claims.values())
        standings = {name: each.membership.standing.name for name, each in self.workers.items()}
        return f"at {self.now_ms:.0f} ms: {dict(counts)}, {standings}"

    def _claim(self, worker: Worker) -> None:
        name = worker.membership.registration.member
        for place in worker.membership.places:
            self.claims.setdefault(place, name)

    def _forget(self, worker: Worker) -> None:
        name = worker.membership.registration.member
        if name not in self.workers:
            self.claims = {place: owner for place, owner in self.claims.items() if owner != name}

    def _do(self, worker: Worker, told: Told) -> None:
        for word in told.words:
            self._send_word(word)
        if told.stop:
            worker.stopped_for += len(told.stop)
            self._later(worker.stops_in_ms, lambda: self._release(worker, told.stop))
        if worker.membership.standing is Standing.GONE:
            self.workers.pop(worker.membership.registration.member, None)

    def _release(self, worker: Worker, places: frozenset[Place]) -> None:
        name = worker.membership.registration.member
        for place in places - worker.membership.places:
            if self.claims.get(place) == name:
                del self.claims[place]
        if not worker.is_dead:
            self._do(worker, worker.membership.stopped(places))

    def _send_word(self, word: Word) -> None:
        value = render(word)
        for delay_ms in self._deliveries():
            self._later(delay_ms, lambda: self._hear(value))

    def _hear(self, value: bytes) -> None:
        word = parse_word(value)
        assert word is not None
        for leader in self.coordinators:
            self._send_orders(leader.hear(word, self.now_ms))

    def _send_orders(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, StartFetcher):
                self.kept[order.member] = order
            value = render(order)
            for worker in self._hearers(order):
                for delay_ms in self._deliveries():
                    self._later(delay_ms, lambda worker=worker, value=value: self._obey(worker, value))  # type: ignore[misc]

    def _hearers(self, order: Order) -> Iterable[Worker]:
        if self.overhears or order.member == ALL:
            return self.workers.values()
        worker = self.workers.get(order.member)
        return [] if worker is None else [worker]

    def _obey(self, worker: Worker, value: bytes) -> None:
        order = parse_order(value)
        assert order is not None
        if worker.is_dead or worker.sleeps_until_ms > self.now_ms:
            return
        self._do(worker, worker.membership.hear(order, self.now_ms))

    def _deliveries(self) -> list[float]:
        """Give after how long a record arrives: not at all, once or twice."""
        bad = self.network
        if self.random.random() < bad.loses:
            return []
        count = 2 if self.random.random() < bad.repeats else 1
        return [self.random.random() * bad.delay_ms for _ in range(count)]

    def _later(self, delay_ms: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_ms + delay_ms, next(self._numbers), do))


def befall(seed: int) -> None:
    """Let faults befall a group for a while, at random; then none. Raises `AssertionError` unless all is well then."""
    dice = random.Random(seed)
    world = World(seed=seed, network=Network(loses=0.15, repeats=0.1, delay_ms=800))
    world.elect()
    names = (f"m{number}" for number in itertools.count())
    for _ in range(40):
        _befall_once(world, dice, names)
        world.topics["orders"] += dice.random() < 0.1
        for leader in world.coordinators:
            if Happening.SUPERSEDED in [event.happening for event in leader.events]:
                world.depose(leader)
        world.run(dice.random() * 4_000)
    world.network = Network()
    for leader in world.coordinators:
        world.depose(leader)
    world.elect()
    world.until(world.is_even, 20_000 + 3 * world.session_ms)
    world.run(3 * world.session_ms)
    assert world.is_even(), world.told()


def _befall_once(world: World, dice: random.Random, names: Iterator[str]) -> None:
    living = list(world.workers)
    match dice.randrange(7):
        case 0 | 1:
            world.join(next(names))
        case 2 if len(living) > 2:
            world.kill(dice.choice(living))
        case 3 if len(living) > 2:
            world.leave(dice.choice(living))
        case 4:
            world.elect()
        case 5 if len(world.coordinators) > 1:
            world.depose(dice.choice(world.coordinators))
        case 6 if living:
            world.workers[dice.choice(living)].sleeps_until_ms = world.now_ms + dice.random() * 20_000


def main() -> None:
    """Run the seeds from the first number on, as many as the second says; show which fail."""
    first, count = map(int, sys.argv[1:])
    failed = []
    for seed in range(first, first + count):
        try:
            befall(seed)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {error}".partition("\n")[0])
    print(f"{count} seeds, {len(failed)} violations")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
