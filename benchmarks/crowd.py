"""Run thousands of members of one coordinated group in one process; they share a reader and a writer."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from marshal_dagster.coordinator.member import MemberActions, Membership, MemberState
from marshal_dagster.coordinator.messages import ALL, CoordinatorMessage, Ping, Register, parse_coordinator_message
from marshal_dagster.coordinator.transport import CoordinatorTopics, Reader, Writer, end_of, partition_of
from marshal_dagster.kafka.connection import KafkaConnection

GROUP: Final = "crowd"
TOPIC: Final = "orders"
_READ_S: Final = 0.02
_TICK_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Seen:
    """State of a crowd. Times are seconds of CLOCK_MONOTONIC, which all processes share."""

    members: int
    registered: int
    held: int
    """Partitions that its members have."""
    fewest: int
    most: int
    changed_s: float
    """When a member last started a partition."""
    pinged_s: float | None
    """When the first ping arrived after members were killed."""


@dataclass(slots=True)
class Crowd:
    """Members that follow each message of the coordinator at once, and do no work."""

    connection: KafkaConnection
    topics: CoordinatorTopics
    session_ms: int
    members: dict[str, Membership] = field(default_factory=dict)
    changed_s: float = 0.0
    pinged_s: float | None = None
    _reader: Reader = field(init=False)
    _writer: Writer = field(init=False)
    _next_tick_s: float = 0.0

    def __post_init__(self) -> None:
        """Connect."""
        partitions = self.topics.partitions(self.connection)
        self._reader = Reader(self.connection, self.topics.coordinator_messages)
        self._writer = Writer(self.connection, self.topics, partitions)
        partition = partition_of(GROUP, partitions)
        self._reader.follow({partition: end_of(self.connection, self.topics.coordinator_messages, partition)})

    def join(self, names: Iterable[str]) -> float:
        """Start members, and return when."""
        for name in names:
            register = Register(
                group=GROUP,
                member=name,
                epoch=0,
                tenure=f"{name}.tenure",
                topics=[TOPIC],
                session_timeout_ms=self.session_ms,
            )
            self.members[name] = Membership(register, _now_ms())
        self._next_tick_s = 0.0
        return time.monotonic()

    def kill(self, names: Iterable[str]) -> float:
        """Remove members without a message to the coordinator, and return when."""
        self.pinged_s = None
        for name in names:
            self.members.pop(name, None)
        return time.monotonic()

    def seen(self) -> Seen:
        """Return the state of all members."""
        held = [len(member.places) for member in self.members.values()]
        registered = sum(each.state is MemberState.REGISTERED for each in self.members.values())
        least, most = min(held, default=0), max(held, default=0)
        return Seen(len(held), registered, sum(held), least, most, self.changed_s, self.pinged_s)

    def numbers(self) -> list[int]:
        """Return the numbers of the partitions that its members have."""
        return [number for member in self.members.values() for _, number in member.places]

    def turn(self) -> None:
        """Process the messages that have arrived, and the timers that are due."""
        for came in self._reader.read(_READ_S):
            order = parse_coordinator_message(came.value)
            if order is None or order.group != GROUP:
                continue
            if isinstance(order, Ping) and self.pinged_s is None:
                self.pinged_s = time.monotonic()
            for member in self._meant(order):
                self._do(member, member.receive(order, _now_ms()))
        if time.monotonic() >= self._next_tick_s:
            self._next_tick_s = time.monotonic() + _TICK_S
            for member in self.members.values():
                self._do(member, member.tick(_now_ms()))
        self._writer.poll()

    def close(self) -> None:
        """Close the reader and the writer."""
        self._reader.close()
        self._writer.close()

    def _meant(self, order: CoordinatorMessage) -> Iterable[Membership]:
        if order.member == ALL:
            return self.members.values()
        member = self.members.get(order.member)
        return [] if member is None else [member]

    def _do(self, member: Membership, actions: MemberActions) -> None:
        if actions.start:
            self.changed_s = time.monotonic()
        stopped = member.stopped(actions.stop).messages if actions.stop else ()
        for message in (*actions.messages, *stopped):
            self._writer.send_to_coordinator(message)


def serve(commands: Connection, connection: KafkaConnection, topics: CoordinatorTopics, session_ms: int) -> None:
    """Run a crowd that carries out and answers each command (what, names), until it receives None."""
    crowd = Crowd(connection, topics, session_ms)
    while True:
        while commands.poll():
            command = commands.recv()
            if command is None:
                crowd.close()
                return
            what, names = command
            match what:
                case "join":
                    commands.send(crowd.join(names))
                case "kill":
                    commands.send(crowd.kill(names))
                case "seen":
                    commands.send(crowd.seen())
                case "numbers":
                    commands.send(crowd.numbers())
        crowd.turn()


def _now_ms() -> float:
    return time.monotonic() * 1_000
