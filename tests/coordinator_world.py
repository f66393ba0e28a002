"""A group, its members and coordinators on a virtual clock, with a network that loses, delays and repeats records."""

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from marshal_dagster.coordinator.assignment import DataPartitionId, Strategy, sticky_assignment, weighted_assignment
from marshal_dagster.coordinator.group import GroupCoordinator, GroupEvent, GroupEventKind, GroupRules
from marshal_dagster.coordinator.member import MemberActions, Membership, MemberState
from marshal_dagster.coordinator.messages import (
    ALL,
    CoordinatorMessage,
    MemberMessage,
    Register,
    StartFetcher,
    parse_coordinator_message,
    parse_member_message,
    render,
)

GROUP = "etl"
TICK_MS = 50.0
GONE = frozenset({GroupEventKind.LEFT, GroupEventKind.FAILED})


@dataclass(slots=True)
class Network:
    """The faults of a network: two probabilities, and the longest delay in milliseconds."""

    loses: float = 0.0
    repeats: float = 0.0
    delay_ms: float = 20.0


@dataclass(slots=True, eq=False)
class Worker:
    """A member's process: it claims the partitions that it is assigned, and releases those that it has to stop."""

    membership: Membership
    is_dead: bool = False
    sleeps_until_ms: float = 0.0
    inbox: list[bytes] = field(default_factory=list)
    """The messages that arrived while it slept."""
    stops_in_ms: float = 10.0
    stopped_for: int = 0
    """The number of partitions that it had to stop working on."""

    @property
    def name(self) -> str:
        """Return the name of the member."""
        return self.membership.registration.member


@dataclass
class World:
    """All state of one simulation. `claims` replaces the coordination log, which alone decides who owns a partition."""

    seed: int = 0
    session_ms: int = 6_000
    strategy: Strategy = sticky_assignment
    topics: dict[str, int] = field(default_factory=lambda: {"orders": 24})
    network: Network = field(default_factory=Network)
    weights: dict[DataPartitionId, float] | None = None
    """The weight of each partition, if the strategy uses weights."""
    overhears: bool = True
    """Whether members receive the messages for others too, as on a broker. With thousands of members that is too slow.
    """

    def __post_init__(self) -> None:
        self.now_ms = 0.0
        self.random = random.Random(self.seed)
        self.workers: dict[str, Worker] = {}
        self.coordinators: list[GroupCoordinator] = []
        self.terms = 0
        self.kept: dict[str, StartFetcher] = {}
        self.happened: list[tuple[int, GroupEvent]] = []
        """The events that coordinators reported, each with the coordinator's epoch."""
        self.sleeping: dict[int, tuple[float, list[bytes]]] = {}
        """By epoch of a sleeping coordinator: when it wakes up, and the messages that arrived for it."""
        self.claims: dict[DataPartitionId, Worker] = {}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.rules = GroupRules(self.strategy, min_session_ms=500, weighs=self.weights is not None)

    def join(self, name: str, **fields: object) -> Worker:
        """Start a member's process; an older process of that name continues if it is alive."""
        if name in self.workers and not self.workers[name].is_dead:
            self.workers[f"{name} before {next(self._numbers)}"] = self.workers.pop(name)
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
        """Shut down a member."""
        worker = self.workers[name]
        self._do(worker, worker.membership.leave())

    def elect(self) -> GroupCoordinator:
        """Start another coordinator's term; the coordinator before it may continue for a while."""
        self.terms += 1
        epoch = self.terms
        leader = GroupCoordinator(
            GROUP,
            epoch,
            self.rules,
            self.now_ms,
            kept=list(self.kept.values()),
            recovery_ms=self.session_ms,
            is_later_epoch=lambda later: later <= self.terms,
        )
        self.coordinators.append(leader)
        self._send_orders(leader.update_topics(self.topics, self.now_ms))
        return leader

    def put_to_sleep(self, leader: GroupCoordinator, duration_ms: float) -> None:
        """Stop a coordinator's process for a while; it receives the messages of that time when it wakes up."""
        self.sleeping.setdefault(leader.epoch, (self.now_ms + duration_ms, []))

    def depose(self, leader: GroupCoordinator) -> None:
        """End a coordinator."""
        self.sleeping.pop(leader.epoch, None)
        self.coordinators = [coordinator for coordinator in self.coordinators if coordinator is not leader]

    def run(self, duration_ms: float) -> None:
        """Let the given time pass."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms += TICK_MS
            while self._due and self._due[0][0] <= self.now_ms:
                heapq.heappop(self._due)[2]()
            self._wake()
            for leader in self.coordinators:
                if leader.epoch not in self.sleeping:
                    self._send_orders(leader.update_topics(self.topics, self.now_ms))
                    self._weigh(leader)
                    self._send_orders(leader.tick(self.now_ms))
                    self._report(leader)
            for worker in list(self.workers.values()):
                if worker.sleeps_until_ms <= self.now_ms:
                    inbox, worker.inbox = worker.inbox, []
                    for value in inbox:
                        self._obey(worker, value)
                    self._do(worker, worker.membership.tick(self.now_ms))
                    self._claim(worker)

    def until(self, condition: Callable[[], bool], within_ms: float) -> float:
        """Let time pass until `condition` holds; return how long that took. Raises `AssertionError`."""
        began_ms = self.now_ms
        while not condition():
            assert self.now_ms - began_ms < within_ms, self.actions()
            self.run(TICK_MS)
        return self.now_ms - began_ms

    def is_even(self) -> bool:
        """Return whether each assigned member works on its partitions, and the counts differ by at most one."""
        living = [name for name, worker in self.workers.items() if worker.membership.state is MemberState.REGISTERED]
        places = {(topic, number) for topic, count in self.topics.items() for number in range(count)}
        owners = self.owners()
        counts = Counter(owners[place] for place in places if place in owners)
        has_all = sum(counts[name] for name in living) == len(places) and len(living) == len(self.workers)
        if has_all and self.weights is not None:
            return self._is_even_by_weight(owners)
        return has_all and max(counts[name] for name in living) - min(counts[name] for name in living) <= 1

    def _is_even_by_weight(self, owners: dict[DataPartitionId, str]) -> bool:
        """Return whether no member has much more than its share plus the heaviest partition."""
        weights = self.weights or {}
        loads: Counter[str] = Counter()
        for place, name in owners.items():
            loads[name] += round(weights.get(place, 0.0)) + 1
        heaviest = max(weights.values(), default=0.0) + 1
        return max(loads.values()) <= 1.3 * (loads.total() / len(self.workers) + heaviest)

    def _weigh(self, leader: GroupCoordinator) -> None:
        """Update the weights now and then, and soon after the coordinator waits for them, as a process does."""
        is_due = self.now_ms % 3_000 < TICK_MS or (leader.awaits_weights and self.now_ms % 500 < TICK_MS)
        if self.weights is not None and is_due:
            leader.update_weights(leader.topics_wanted(), self.weights)

    def owners(self) -> dict[DataPartitionId, str]:
        """Return the name of the member that claims each partition."""
        return {place: owner.name for place, owner in self.claims.items()}

    def disagreements(self) -> list[str]:
        """Return where the members, the newest coordinator and the claims differ about the owner of a partition."""
        shares = self.coordinators[-1].assignment()
        found = [
            f"{name}: it has {sorted(worker.membership.places)}, the coordinator has {sorted(shares.get(name, []))}"
            for name, worker in self.workers.items()
            if worker.membership.places != shares.get(name)
        ]
        claimed = {
            name: {place for place, owner in self.claims.items() if owner is worker}
            for name, worker in self.workers.items()
        }
        return found + [f"{n}: it claims {c}" for n, c in claimed.items() if c != self.workers[n].membership.places]

    def actions(self) -> str:
        """Return a summary of the present state, for messages."""
        counts = Counter(self.owners().values())
        standings = {name: worker.membership.state.name for name, worker in self.workers.items()}
        return f"at {self.now_ms:.0f} ms: {dict(counts)}, {standings}"

    def _claim(self, worker: Worker) -> None:
        for place in worker.membership.places:
            owner = self.claims.setdefault(place, worker)
            if owner.is_dead and owner.name == worker.name:
                self.claims[place] = worker

    def _forget(self, worker: Worker) -> None:
        self.claims = {place: owner for place, owner in self.claims.items() if owner is not worker}

    def _do(self, worker: Worker, actions: MemberActions) -> None:
        for message in actions.messages:
            self._send_message(message)
        if actions.stop:
            worker.stopped_for += len(actions.stop)
            self._later(worker.stops_in_ms, lambda: self._release(worker, actions.stop))
        if worker.membership.state is MemberState.GONE:
            self.workers = {name: each for name, each in self.workers.items() if each is not worker}

    def _release(self, worker: Worker, places: frozenset[DataPartitionId]) -> None:
        for place in places - worker.membership.places:
            if self.claims.get(place) is worker:
                del self.claims[place]
        if not worker.is_dead:
            self._do(worker, worker.membership.stopped(places))

    def _send_message(self, message: MemberMessage) -> None:
        value = render(message)
        for delay_ms in self._deliveries():
            self._later(delay_ms, lambda: self._receive(value))

    def _receive(self, value: bytes) -> None:
        for leader in self.coordinators:
            if leader.epoch in self.sleeping:
                self.sleeping[leader.epoch][1].append(value)
            else:
                self._receive_one(leader, value)

    def _receive_one(self, leader: GroupCoordinator, value: bytes) -> None:
        message = parse_member_message(value)
        assert message is not None
        self._send_orders(leader.receive(message, self.now_ms))

    def _wake(self) -> None:
        """Wake the coordinators whose sleep is over; they receive their messages at once or a little later."""
        for leader in self.coordinators:
            until_ms, waiting = self.sleeping.get(leader.epoch, (self.now_ms + 1, []))
            if until_ms > self.now_ms:
                continue
            del self.sleeping[leader.epoch]
            delay_ms = self.random.choice((0.0, 2 * TICK_MS))
            for value in waiting:
                self._later(delay_ms, lambda leader=leader, value=value: self._receive_one(leader, value))  # type: ignore[misc]

    def _report(self, leader: GroupCoordinator) -> None:
        """Handle the events that a coordinator reports as its process does."""
        count = sum(epoch == leader.epoch for epoch, _ in self.happened)
        for event in leader.events[count:]:
            self.happened.append((leader.epoch, event))
            if event.happening in GONE:
                for member in event.members:
                    self.kept.pop(member, None)

    def _send_orders(self, orders: list[CoordinatorMessage]) -> None:
        for order in orders:
            if isinstance(order, StartFetcher):
                self.kept[order.member] = order
            value = render(order)
            for worker in self._hearers(order):
                for delay_ms in self._deliveries():
                    self._later(delay_ms, lambda worker=worker, value=value: self._obey(worker, value))  # type: ignore[misc]

    def _hearers(self, order: CoordinatorMessage) -> Iterable[Worker]:
        if self.overhears or order.member == ALL:
            return self.workers.values()
        worker = self.workers.get(order.member)
        return [] if worker is None else [worker]

    def _obey(self, worker: Worker, value: bytes) -> None:
        order = parse_coordinator_message(value)
        assert order is not None
        if worker.is_dead:
            return
        if worker.sleeps_until_ms > self.now_ms:
            worker.inbox.append(value)
            return
        self._do(worker, worker.membership.receive(order, self.now_ms))

    def _deliveries(self) -> list[float]:
        """Return the delay of each delivery of a record: no delivery, one or two."""
        bad = self.network
        if self.random.random() < bad.loses:
            return []
        count = 2 if self.random.random() < bad.repeats else 1
        return [self.random.random() * bad.delay_ms for _ in range(count)]

    def _later(self, delay_ms: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_ms + delay_ms, next(self._numbers), do))


def inject_fault(seed: int) -> None:
    """Inject random faults into a group for a while, then none; raise `AssertionError` if the group does not recover.

    At the end another coordinator leads, or the newest one continues with its own state.
    """
    dice = random.Random(seed)
    # In one of five worlds a reply may arrive after the reply to the next ping.
    world = World(seed=seed, network=Network(loses=0.15, repeats=0.1, delay_ms=3_000 if seed % 5 == 2 else 800))
    if seed % 4 == 3:
        weights = {("orders", number): random.Random(f"{seed}/{number}").paretovariate(1) * 100 for number in range(24)}
        world = World(seed=seed, network=world.network, strategy=weighted_assignment, weights=weights)
    world.elect()
    names = (f"m{number}" for number in itertools.count())
    for _ in range(40):
        _inject_one_fault(world, dice, names)
        _depose_superseded(world)
        world.run(dice.random() * 4_000)
    _calm_down(world, dice)
    world.until(world.is_even, 40_000 + 4 * world.session_ms)
    world.run(2 * world.session_ms)
    assert world.is_even(), world.actions()
    stopped_for = sum(worker.stopped_for for worker in world.workers.values())
    world.run(2 * world.session_ms)
    assert not world.disagreements(), world.disagreements()
    for leader in world.coordinators[:]:
        world.depose(leader)
    world.elect()
    world.run(2 * world.session_ms + 1_000)
    assert not world.disagreements(), world.disagreements()
    assert sum(worker.stopped_for for worker in world.workers.values()) == stopped_for, (
        "members stopped without a reason"
    )
    assert world.kept.keys() <= world.workers.keys(), f"kept: {sorted(world.kept)}, members: {sorted(world.workers)}"


def _calm_down(world: World, dice: random.Random) -> None:
    """End all faults; the present coordinator mostly stays."""
    world.network = Network()
    world.run(1_000)
    _depose_superseded(world)
    for worker in world.workers.values():
        worker.sleeps_until_ms = 0.0
        worker.stops_in_ms = 10.0
    is_new = dice.random() < 0.3
    for leader in world.coordinators[:] if is_new else world.coordinators[:-1]:
        world.depose(leader)
    world.sleeping = {epoch: (world.now_ms, waiting) for epoch, (_, waiting) in world.sleeping.items()}
    if not world.coordinators:
        world.elect()
    if not any(" before " not in name for name in world.workers):
        world.join("last")
    for name in [name for name in world.workers if " before " in name]:
        world.kill(name)


def _depose_superseded(world: World) -> None:
    for leader in world.coordinators[:]:
        if GroupEventKind.SUPERSEDED in [event.happening for event in leader.events]:
            world.depose(leader)


def _inject_one_fault(world: World, dice: random.Random, names: Iterator[str]) -> None:
    living = [name for name in world.workers if " before " not in name]
    match dice.randrange(12):
        case 0 | 1:
            fields = {"auto_commit": dice.random() < 0.3, "is_static": dice.random() < 0.4}
            wanted: dict[str, object] = {"topics": [], "pattern": "ord*"} if dice.random() < 0.5 else {}
            world.join(next(names), **fields, **wanted)
        case 2 if len(living) > 2:
            world.kill(dice.choice(living))
        case 3 if len(living) > 2:
            world.leave(dice.choice(living))
        case 4 | 5 | 6:
            _inject_coordinator_faults(world, dice)
        case 7 | 8 | 9 if living:
            _inject_member_fault(world, dice, dice.choice(living))
        case 10:
            world.topics["orders"] += 1


def _inject_coordinator_faults(world: World, dice: random.Random) -> None:
    match dice.randrange(3):
        case 0:
            world.elect()
        case 1 if world.coordinators:
            world.depose(dice.choice(world.coordinators))
        case 2 if world.coordinators:
            world.put_to_sleep(dice.choice(world.coordinators), dice.random() * 12_000)


def _inject_member_fault(world: World, dice: random.Random, name: str) -> None:
    match dice.randrange(3):
        case 0:
            world.workers[name].sleeps_until_ms = world.now_ms + dice.random() * 20_000
        case 1:
            world.workers[name].stops_in_ms = dice.random() * 10_000
        case 2:
            _start_again(world, name, is_dead=dice.random() < 0.5)


def _start_again(world: World, name: str, *, is_dead: bool) -> None:
    """Start a second process of a name, whose first process is killed or continues."""
    fields = world.workers[name].membership.registration.model_dump(
        include={"topics", "pattern", "auto_commit", "is_static"}
    )
    if is_dead:
        world.kill(name)
    world.join(name, **fields)


def main() -> None:
    """Run the seeds from the first argument, as many as the second argument, and print those that fail."""
    first, count = map(int, sys.argv[1:])
    failed = []
    for seed in range(first, first + count):
        try:
            inject_fault(seed)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {error}".partition("\n")[0])
    print(f"{count} seeds, {len(failed)} violations")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
