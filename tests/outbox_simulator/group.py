"""The leader topic, the coordinator of its consumer group, and the library's `Elector` as a member of the group."""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, cast

from confluent_kafka import TopicPartition

from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Event, Term, TermStarted, Timing
from tests.outbox_simulator.network import Side
from tests.outbox_simulator.scenario import TIMING_DEADLINE_MS
from tests.simulator.scheduler import Process, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.outbox_simulator.world import World

TIMING: Final = Timing(TIMING_DEADLINE_MS, TIMING_DEADLINE_MS / 10)
SESSION_MS: Final = 2_500.0
"""How long a member without contact keeps the partition."""
_TOPIC: Final = "leader"
_PARTITIONS: Final = [TopicPartition(_TOPIC, 0)]
_CONSUMER: Final = cast("Any", type("Consumer", (), {"incremental_assign": lambda *_: None})())


class Beat:
    """A message of the leader topic, with the methods of the client library."""

    def __init__(self, offset: int, value: bytes, due_ms: float) -> None:
        self.due_ms = due_ms
        self._offset = offset
        self._value = value

    def error(self) -> None:
        """Return no error."""

    def value(self) -> bytes:
        """Return the value."""
        return self._value

    def partition(self) -> int:
        """Return the only partition."""
        return 0

    def offset(self) -> int:
        """Return the offset."""
        return self._offset


class SimulatedElector(Elector):
    """The library's elector, without its thread and its clients."""

    def __init__(self, world: "World", process: Process) -> None:
        super().__init__(
            cast("Any", None), _TOPIC, "group", timing=TIMING, listener=self._note, clock=world.clock(process)
        )
        self.process = process
        self.has_partition = False
        """Whether it believes that it has the partition."""
        self.position = 0
        self.inbox: deque[Beat] = deque()
        self._orders: list[tuple[float, Callable[[], None]]] = []
        self._world = world
        self._is_over = False
        self._task: Task | None = None
        self._waiter: Task | None = None
        self._polls_ms = 0.0

    def __enter__(self) -> Self:
        """Join the group."""
        self._task = self.process.spawn(self._work)
        self._world.group.join(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group."""
        if self.process.is_dead:
            return
        self._is_over = True
        self._lose_all("this member leaves the group")
        self._world.group.leave(self)
        self.wake()

    def wait_for_term(self, timeout_s: float, partition: int = 0) -> Term | None:
        """Wait until this member leads."""
        term = self.term(partition)
        if term is None:
            self._waiter = self._world.scheduler.current
            self._world.scheduler.park(timeout_s * 1_000)
            self._waiter = None
        return self.term(partition)

    def term(self, partition: int = 0) -> Term | None:
        """Return the term in which this member leads; the judge checks it."""
        term = super().term(partition)
        if term is not None:
            now_ms = self._world.scheduler.now_ms
            self._world.judge.believed(
                self.process.name, term.leader_id, now_ms, TIMING_DEADLINE_MS, has_partition=self.has_partition
            )
        return term

    def give_up(self, term: Term, reason: str, partition: int = 0) -> None:
        """End a term."""
        super().give_up(term, reason, partition)
        self._world.judge.term_ended(term.leader_id)

    def step_down(self, term: Term, reason: str, for_s: float, partition: int = 0) -> None:
        """End a term and wait. The member keeps the partition meanwhile: a harder case than leaving the group."""
        self.give_up(term, reason, partition)
        self._world.scheduler.sleep(for_s * 1_000)

    def reported(self, after_ms: float, *, has_partition: bool) -> None:
        """Notify the member after a delay that it has got or lost the partition."""
        due_ms = self._world.scheduler.now_ms + after_ms
        self._orders = [(min(at_ms, due_ms), order) for at_ms, order in self._orders]
        self._orders.append((due_ms, self._take_partition if has_partition else self._drop_partition))
        self.wake()

    @property
    def is_in(self) -> bool:
        """Return whether it wants to be a member."""
        return not self._is_over

    def wake(self) -> None:
        """Wake the member's task."""
        if self._task is not None and self._world.scheduler.current is not self._task:
            self._world.scheduler.wake(self._task)

    def _work(self) -> None:
        world, scheduler = self._world, self._world.scheduler
        while not self._is_over:
            self._carry_out_orders()
            while self.inbox and self.inbox[0].due_ms <= scheduler.now_ms:
                beat = self.inbox.popleft()
                world.judge.heartbeat_received(self.process.name, beat.value())
                self._take(cast("Any", beat), cast("Any", None))
            if self.has_partition and self._polls_ms <= scheduler.now_ms:
                self._polls_ms = scheduler.now_ms + TIMING.poll_interval_ms
                for _, sent in self._due():
                    world.group.send(self, sent.render())
            next_ms = min(
                self._polls_ms if self.has_partition else scheduler.now_ms + 60_000,
                self.inbox[0].due_ms if self.inbox else scheduler.now_ms + 60_000,
                min((at_ms for at_ms, _ in self._orders), default=scheduler.now_ms + 60_000),
            )
            scheduler.park(next_ms - scheduler.now_ms)

    def _carry_out_orders(self) -> None:
        now_ms = self._world.scheduler.now_ms
        due = [order for at_ms, order in self._orders if at_ms <= now_ms]
        self._orders = [each for each in self._orders if each[0] > now_ms]
        for order in due:
            order()

    def _take_partition(self) -> None:
        self.position = len(self._world.group.log)
        self.inbox.clear()
        self.has_partition = True
        self._polls_ms = 0.0
        self._gain(_CONSUMER, _PARTITIONS)

    def _drop_partition(self) -> None:
        self.has_partition = False
        self.inbox.clear()
        self._lose(_PARTITIONS, "the group assigned it to another member")

    def _note(self, _: int, event: Event) -> None:
        term, judge = event.term, self._world.judge
        self._world.report("{} {} with fence {}", self.process.name, type(event).__name__, term.fence)
        if isinstance(event, TermStarted):
            self._world.outcomes["terms"] += 1
            log = self._world.group.log
            beat = log[term.fence] if term.fence < len(log) else b"//"
            judge.term_begun(self.process.name, term.leader_id, term.fence, beat)
            if self._waiter is not None:
                self._world.scheduler.wake(self._waiter)
        else:
            judge.term_ended(term.leader_id)


class Group:
    """The group coordinator, which assigns the partition to a member with contact, and the log of the topic."""

    def __init__(self, world: "World") -> None:
        self.log: list[bytes] = []
        self.owner: SimulatedElector | None = None
        self.late_until_ms = 0.0
        self.doubled_until_ms = 0.0
        self._world = world
        self._members: list[SimulatedElector] = []
        self._expelled: list[SimulatedElector] = []
        self._last_contact_ms: dict[SimulatedElector, float] = {}

    def join(self, member: SimulatedElector) -> None:
        """Add a member."""
        self._members.append(member)
        self._last_contact_ms[member] = self._world.scheduler.now_ms
        self._assign()

    def leave(self, member: SimulatedElector) -> None:
        """Remove a member."""
        self._expelled = [each for each in self._expelled if each is not member]
        self._members = [each for each in self._members if each is not member]
        if self.owner is member:
            self.owner = None
            self._assign()

    def look(self) -> None:
        """Expel members without contact; take expelled members back when they have contact again."""
        now_ms = self._world.scheduler.now_ms
        for member in [*self._members, *self._expelled]:
            if self._is_heard_of(member):
                self._last_contact_ms[member] = now_ms
        for member in [each for each in self._members if now_ms - self._last_contact_ms[each] > SESSION_MS]:
            self.leave(member)
            if not member.process.is_dead:
                self._expelled.append(member)
        for member in [each for each in self._expelled if self._last_contact_ms[each] == now_ms]:
            self._expelled.remove(member)
            member.reported(self._world.chance.random() * 300, has_partition=False)
            self._world.network.later(400, partial(self._rejoin, member))

    def rebalance(self, old_knows_after_ms: float) -> None:
        """Assign the partition to another member; the owner is notified only later."""
        others = [member for member in self._members if member is not self.owner]
        if self.owner is None or not others:
            return
        self.owner.reported(old_knows_after_ms, has_partition=False)
        self.owner = self._world.chance.choice(others)
        self.owner.reported(20, has_partition=True)

    def send(self, member: SimulatedElector, value: bytes) -> None:
        """Append a beat to the log, unless the way to the brokers is cut for too long."""
        scheduler, chance = self._world.scheduler, self._world.chance
        self._world.judge.beat_sent(value, scheduler.now_ms)
        wait_ms = self._world.network.cut_ms(member.process, Side.KAFKA) - scheduler.now_ms
        if wait_ms > TIMING_DEADLINE_MS:
            return
        if self.late_until_ms > scheduler.now_ms:
            wait_ms = max(wait_ms, chance.random() * 2 * TIMING_DEADLINE_MS)
        self._append_after(wait_ms, value)
        if self.doubled_until_ms > scheduler.now_ms:
            self._append_after(chance.random() * TIMING_DEADLINE_MS * 2, value)

    def _append_after(self, wait_ms: float, value: bytes) -> None:
        if wait_ms > 0:
            self._world.network.later(wait_ms, lambda: self._append(value))
        else:
            self._append(value)

    def _append(self, value: bytes) -> None:
        world, offset = self._world, len(self.log)
        self.log.append(value)
        for member in [*self._members, *self._expelled]:
            if not member.has_partition or offset < member.position or member.process.is_dead:
                continue
            due_ms = world.scheduler.now_ms + 1 + world.chance.random() * 4
            if self.late_until_ms > world.scheduler.now_ms:
                due_ms += world.chance.random() * TIMING_DEADLINE_MS
            due_ms = max(due_ms, world.network.cut_ms(member.process, Side.KAFKA))
            if member.inbox:
                due_ms = max(due_ms, member.inbox[-1].due_ms)
            member.inbox.append(Beat(offset, value, due_ms))
            member.wake()

    def _assign(self) -> None:
        if self.owner is None and self._members:
            self.owner = self._world.chance.choice(self._members)
            self.owner.reported(self._world.chance.random() * 50, has_partition=True)

    def _rejoin(self, member: SimulatedElector) -> None:
        if not member.process.is_dead and member.is_in:
            self.join(member)

    def _is_heard_of(self, member: SimulatedElector) -> bool:
        now_ms = self._world.scheduler.now_ms
        process = member.process
        is_cut = self._world.network.cut_ms(process, Side.KAFKA) > now_ms
        return not (process.is_dead or process.runs_from_ms > now_ms or is_cut)
