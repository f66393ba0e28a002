"""Members that behave like the Go library (protocol.md, section 7).

Each process reads the log by the rules of that library. It judges staleness by its own clock and the senders' times, in
whole seconds, and treats a claim as stale at exactly two intervals. It takes a claim back by a heartbeat in the name of
its client id, and sends more heartbeats after it has slept through its claim. It does not know plans, revocations,
settings or pauses.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.reference_reader import parse
from tests.simulator.broker import EPOCH_MS, SimulatedClock
from tests.simulator.scenario import GO_CLIENT, GROUP, TOPIC
from tests.simulator.scheduler import Process

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

GO_INTERVAL_S = 60


@dataclass(slots=True)
class GoKey:
    """The Go library's state of a partition; `beat_s` is 0 for an unclaimed partition."""

    instance: str = ""
    client: str = ""
    offset: int = 0
    beat_s: int = 0


class GoView:
    """The claims on the group's partitions of the topic, as one Go process sees them."""

    def __init__(self, group: str, clock: SimulatedClock) -> None:
        self.keys: dict[int, GoKey] = {}
        self._group = group
        self._clock = clock

    def key(self, partition: int) -> GoKey:
        """Return the state of a partition."""
        return self.keys.setdefault(partition, GoKey())

    def is_claimed(self, partition: int) -> bool:
        """Return whether a partition is claimed, by the present time of the clock."""
        beat_s = self.key(partition).beat_s
        return beat_s != 0 and 0 <= self._clock.wall_ms() // 1_000 - beat_s < 2 * GO_INTERVAL_S

    def read(self, record: dict[str, Any] | None, time_s: int) -> None:
        """Read a record with the sender's time `time_s`."""
        if record is None or record["group"] != self._group or record["topic"] != TOPIC:
            return
        kind, partition = record["type"], record["partition"]
        sender, client, key = record["instance"], record["client"], self.key(partition)
        if kind == "Heartbeat":
            self.keys[partition] = GoKey(sender, client, record["offset"], time_s)
        elif kind == "ClaimingPartition" and not self.is_claimed(partition):
            self.keys[partition] = GoKey(sender, client, 0, time_s)
        elif kind == "ReleasingPartition" and (key.instance, key.client) == (sender, client):
            key.offset, key.beat_s = record["offset"], 0


class GoMember:
    """One client id. Its processes die, restart, sleep and continue."""

    def __init__(self, world: "Simulation", number: int, group: str) -> None:
        self._world = world
        self._client = f"{GO_CLIENT}{number}"
        self._group = group
        self._chance = random.Random(f"{world.scenario.seed}/{self._client}")
        self._clock = SimulatedClock(world.scheduler, off_ms=self._chance.choice((0, 0, -1_500, 500)))
        self._view = GoView(group, self._clock)
        self._instance = ""
        self._held: dict[int, int] = {}
        """By partition: the next offset to process."""

    def live(self) -> None:
        """Run one process after another until faults are over."""
        world, count = self._world, 0
        while world.scheduler.now_ms < world.scenario.faulty_ms:
            count += 1
            self._instance, self._held = f"{self._client}-{count}", {}
            self._read_log()
            process = Process(world.scheduler, self._instance)
            process.spawn(self._work)
            process.wait_until_over()
            world.scheduler.sleep(world.hi_ms * self._chance.uniform(0.05, 2.5))

    def see(self, value: bytes) -> None:
        """Read a record that has just entered the coordination partition of the topic."""
        record = parse(value, self._world.home, self._world.scenario.coordination_partitions)
        self._view.read(record, 0 if record is None else int(value.split(b"/", 3)[2]))

    def _read_log(self) -> None:
        """Read the whole log with a new view. A claim that is old by the clock now is stale."""
        self._view = GoView(self._group, self._clock)
        for partition, _, _, value, _ in self._world.judge.records:
            if partition == self._world.home:
                self.see(value.encode("utf-8", "replace"))

    def _work(self) -> None:
        world, chance = self._world, self._chance
        self._reclaim()
        for _ in range(chance.randint(1, 8)):
            if world.scheduler.now_ms > world.scenario.faulty_ms:
                break
            self._claim()
            for partition in tuple(self._held):
                self._process(partition)
                if chance.random() < 0.1:
                    world.befallen["Go member that sleeps and heartbeats on"] += 1
                    world.scheduler.sleep(world.hi_ms * chance.uniform(2, 4))
                self._beat(partition)
            world.scheduler.sleep(world.hi_ms * chance.uniform(0.3, 0.9))
        if chance.random() < 0.6:
            for partition in self._held:
                self._process(partition)
                self._say("ReleasingPartition", partition, self._held[partition])
        else:
            world.befallen["Go member that dies"] += 1

    def _reclaim(self) -> None:
        """Take back all claims of its client id by a heartbeat, without a claim record."""
        for partition in self._partitions():
            if self._view.key(partition).client == self._client and self._view.is_claimed(partition):
                self._world.befallen["Go member that reclaims by a heartbeat"] += 1
                self._held[partition] = self._start(partition)
                self._beat(partition)

    def _claim(self) -> None:
        for partition in self._partitions():
            if partition in self._held or self._view.is_claimed(partition) or self._chance.random() < 0.3:
                continue
            start = self._start(partition)
            self._say("ClaimingPartition", partition)
            self._wait()
            if self._view.key(partition).instance == self._instance:
                self._held[partition] = start
                self._beat(partition)

    def _start(self, partition: int) -> int:
        """Return the larger of the offset in the log and the group offset in Kafka."""
        committed = self._world.data.group_offsets(self._group, TOPIC).get(partition, 0)
        return max(self._view.key(partition).offset, committed)

    def _process(self, partition: int) -> None:
        world = self._world
        end = world.data.offsets(TOPIC, [partition])[partition].end
        for _ in range(self._chance.randint(0, 4)):
            offset = self._held[partition]
            if offset < end:
                world.scheduler.sleep(self._chance.random() * world.scenario.slow * world.hi_ms)
                if self._group == GROUP:
                    world.output.elsewhere.add((partition, offset))
                self._held[partition] = offset + 1

    def _beat(self, partition: int) -> None:
        """Send a heartbeat with the offset, whatever the owner is now; then mostly check who is the owner."""
        offset = self._held[partition]
        self._say("Heartbeat", partition, offset)
        self._world.data.commit_group_offsets(self._group, TOPIC, {partition: offset})
        self._wait()
        if self._view.key(partition).instance != self._instance and self._chance.random() < 0.7:
            del self._held[partition]

    def _partitions(self) -> tuple[int, ...]:
        return self._world.data.describe(TOPIC).partitions

    def _say(self, kind: str, partition: int, *tail: int) -> None:
        self._wait()
        wall_ms = self._clock.wall_ms()
        fields = (kind, 1, wall_ms // 1_000, self._instance, self._client, self._group, TOPIC, partition, *tail)
        self._world.cluster.put(self._world.home, "/".join(map(str, fields)).encode(), wall_ms)

    def _wait(self) -> None:
        self._world.scheduler.sleep(self._chance.random() * 20)


def keys_left_by_go(world: "Simulation", chance: random.Random, group: str) -> None:
    """Write records of Go consumers that worked before the seed starts; they are stale or have released by then."""
    for partition, end in _ends(world).items():
        offset = chance.randint(0, end)
        at_ms = EPOCH_MS - 2 * GO_INTERVAL_S * 1_000 - chance.randint(1_500, 60_000)
        sender = f"{at_ms // 1_000}/{GO_CLIENT}9-1/{GO_CLIENT}9/{group}/{TOPIC}/{partition}"
        _put_old(world, f"ClaimingPartition/1/{sender}", at_ms)
        _put_old(world, f"Heartbeat/1/{sender}/{offset}", at_ms)
        if chance.random() < 0.6:
            _put_old(world, f"ReleasingPartition/1/{sender}/{offset}", at_ms)
        if group == GROUP:
            _note_done(world, partition, offset)


def keys_of_former_members(world: "Simulation", chance: random.Random, topic_id: str, *, has_plans: bool) -> None:
    """Write records of members that worked when the library still judged a group without settings as a native one.

    Some of their claims become stale only when the seed starts.
    """
    plan_at = chance.choice(sorted(_ends(world))) if has_plans else None
    for partition, end in _ends(world).items():
        offset = min(chance.randint(0, end), end - 1 if partition == plan_at else end)
        at_ms = EPOCH_MS - 2 * GO_INTERVAL_S * 1_000 - chance.randint(-700, 60_000)
        sender = f"{at_ms // 1_000}/former{partition}.0/former/{GROUP}/{TOPIC}/{partition}"
        _put_old(world, f"ClaimingPartition/1/{sender}", at_ms)
        _put_old(world, f"DataTopic/1/{sender}/{topic_id}", at_ms)
        _put_old(world, f"Heartbeat/1/{sender}/{offset}", at_ms)
        if partition == plan_at:
            _put_old(world, f"ClaimingMessages/1/{sender}/{chance.randint(offset + 1, end)}", at_ms)
        if chance.random() < 0.5:
            _put_old(world, f"ReleasingPartition/1/{sender}/{offset}", at_ms)
        _note_done(world, partition, offset)


def _ends(world: "Simulation") -> dict[int, int]:
    partitions = world.data.describe(TOPIC).partitions
    return {number: at.end for number, at in world.data.offsets(TOPIC, partitions).items()}


def _put_old(world: "Simulation", value: str, at_ms: int) -> None:
    world.cluster.put_at(world.home, value.encode(), at_ms)


def _note_done(world: "Simulation", partition: int, end: int) -> None:
    for offset in range(end):
        world.output.elsewhere.add((partition, offset))
        world.output.rows[partition, offset][0] += 1
