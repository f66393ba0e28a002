"""History of the demo, from the coordination log: every record, its verdict, and its time by the broker's clock."""

from dataclasses import dataclass, field

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    Heartbeat,
    InvalidMessage,
    Message,
    parse,
)
from marshal_dagster.protocol.world import VerdictKind, World


@dataclass(frozen=True, slots=True)
class Entry:
    """One valid record: when it was appended (unix ms, log time) and whether it changed the state."""

    log_time_ms: int
    message: Message
    accepted: bool
    offset_before: int | None
    offset_after: int | None

    @property
    def run_id(self) -> str:
        """The run that sent it."""
        return self.message.instance.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of a planned batch in one partition: offsets `start` to `end` (exclusive)."""

    partition: int
    start: int
    end: int


@dataclass(slots=True)
class Logbook:
    """Follows the coordination log of one deployment and keeps all its entries."""

    connection: KafkaConnection
    coordination_topic: str
    group: str
    topic: str
    entries: list[Entry] = field(default_factory=list)
    _log: KafkaLog | None = None
    _world: World | None = None

    def catch_up(self) -> World:
        """Read to the current end of the log, and return the world state."""
        if self._log is None or self._world is None:
            self._log = KafkaLog(self.connection, self.coordination_topic)
            self._world = World(self._log.identity().partitions)
            for number in range(self._world.coordination_partitions):
                self._world.start(number, 0)
            self._log.follow(dict.fromkeys(range(self._world.coordination_partitions), 0))
        ends = {number: at.end for number, at in self._log.bounds(range(self._world.coordination_partitions)).items()}
        for chunk in self._log.read_until(ends, 10):
            for offset, timestamp_ms, value in chunk.records:
                self._enter(self._world, chunk.partition, offset, timestamp_ms, value)
        return self._world

    def close(self) -> None:
        """Close the connection."""
        if self._log is not None:
            self._log.close()

    def plans_of(self, run_id: str) -> list[Plan]:
        """Return the open plans of the partitions that a run owns now."""
        world = self.catch_up()
        return [
            Plan(place[1], key.offset, key.plan_end)
            for name, place, _, key in world.keys()  # noqa: SIM118 - no dict
            if name == self.group and key.owner is not None and key.owner.instance.rpartition(".")[0] == run_id
            if key.offset is not None and key.plan_end is not None
        ]

    def commits(self) -> list[Entry]:
        """Return the accepted records that moved an offset forward."""
        return [
            entry
            for entry in self.entries
            if isinstance(entry.message, Heartbeat) and entry.accepted and entry.offset_before is not None
            if entry.offset_after != entry.offset_before
        ]

    def batches(self) -> int:
        """Return the number of committed batches: the instances that moved an offset."""
        return len({entry.message.instance for entry in self.commits()})

    def last_heartbeat_ms(self, run_id: str) -> int:
        """Return the log time of the last claim or heartbeat of a run."""
        alive = (Heartbeat, ClaimingPartition)
        return max(
            e.log_time_ms for e in self.entries if e.run_id == run_id and e.accepted and isinstance(e.message, alive)
        )

    def takeover(self, dead_run_id: str, plans: list[Plan]) -> list[Entry]:
        """Return the first claims that other runs won after the dead run's, in the partitions of `plans`."""
        taken: dict[int, Entry] = {}
        dead_seen: set[int] = set()
        for entry in self.entries:
            if not isinstance(entry.message, ClaimingPartition) or not entry.accepted:
                continue
            number = entry.message.partition
            if entry.run_id == dead_run_id:
                dead_seen.add(number)
                taken.pop(number, None)
            elif number in dead_seen:
                taken.setdefault(number, entry)
        return [taken[plan.partition] for plan in plans if plan.partition in taken]

    def replayed(self, dead_run_id: str, plan: Plan) -> bool:
        """Return whether the first commit from the plan's start is another run's, and is exactly at the plan's end."""
        for entry in self.commits():
            if entry.message.partition == plan.partition and entry.offset_before == plan.start:
                return entry.run_id != dead_run_id and entry.offset_after == plan.end
        return False

    def _enter(self, world: World, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> None:
        message = parse(value)
        if isinstance(message, InvalidMessage):
            world.apply(partition, offset, timestamp_ms, value)
            return
        before = self._offset(world, message)
        verdict = world.apply(partition, offset, timestamp_ms, value)
        log_time_ms = world.partitions[partition].log_time_ms or timestamp_ms
        accepted = verdict.kind is VerdictKind.ACCEPTED
        self.entries.append(Entry(log_time_ms, message, accepted, before, self._offset(world, message)))

    def _offset(self, world: World, message: Message) -> int | None:
        return world.key(message.group, message.topic, message.partition).offset if message.topic else None
