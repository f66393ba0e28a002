"""Members that do as the Go library does, in a group with rule set `go` (PROTOCOL.md 7).

They claim what is free by their own clock, take a claim back by a heartbeat in the name of their client id, and
heartbeat on after they have slept through their claim. They know no plans, revocations, settings or pauses.
"""

import random
from typing import TYPE_CHECKING

from tests.simulator.broker import SimulatedClock
from tests.simulator.scenario import GROUP, TOPIC
from tests.simulator.scheduling import Process

if TYPE_CHECKING:
    from tests.simulator.world import Simulation


class GoMember:
    """One client id; its processes die, restart, sleep and come back."""

    def __init__(self, world: "Simulation", number: int) -> None:
        self._world = world
        self._client = f"go{number}"
        self._chance = random.Random(f"{world.scenario.seed}/{self._client}")
        self._clock = SimulatedClock(world.scheduler, off_ms=self._chance.choice((0, 0, -500, 500)))
        self._instance = ""
        self._held: dict[int, int] = {}
        """By partition: the next offset to process."""

    def live(self) -> None:
        """Run process after process until faults are over."""
        world, count = self._world, 0
        while world.scheduler.now_ms < world.scenario.faulty_ms:
            count += 1
            self._instance, self._held = f"{self._client}.{count}", {}
            process = Process(world.scheduler, self._instance)
            process.spawn(self._work)
            process.wait_until_over()
            world.scheduler.sleep(world.hi_ms * self._chance.uniform(0.05, 2.5))

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
            for partition, offset in self._held.items():
                self._say("ReleasingPartition", partition, offset)
        else:
            world.befallen["Go member that dies"] += 1

    def _reclaim(self) -> None:
        """Take over what an earlier process of the same client still holds, by a heartbeat."""
        for partition, (_, client, _, beat_ms, offset, *_) in self._states().items():
            is_fresh = isinstance(beat_ms, int) and self._clock.wall_ms() - beat_ms < 2 * self._world.hi_ms
            if client == self._client and is_fresh and isinstance(offset, int):
                self._world.befallen["Go member that reclaims by a heartbeat"] += 1
                self._held[partition] = offset
                self._beat(partition)

    def _claim(self) -> None:
        for partition, (instance, _, _, beat_ms, *_) in self._states().items():
            is_stale = isinstance(beat_ms, int) and self._clock.wall_ms() - beat_ms >= 2 * self._world.hi_ms
            if partition in self._held or not (instance is None or is_stale) or self._chance.random() < 0.3:
                continue
            self._say("ClaimingPartition", partition)
            self._wait()
            state = self._states()[partition]
            if state[0] == self._instance:
                self._held[partition] = state[4] if isinstance(state[4], int) else 0
                self._beat(partition)

    def _process(self, partition: int) -> None:
        world = self._world
        end = world.data.offsets(TOPIC, [partition])[partition].end
        for _ in range(self._chance.randint(0, 4)):
            offset = self._held[partition]
            if offset < end:
                world.scheduler.sleep(self._chance.random() * world.scenario.slow * world.hi_ms)
                world.output.elsewhere.add((partition, offset))
                self._held[partition] = offset + 1

    def _beat(self, partition: int) -> None:
        """Send where it stands, whoever the owner is by now; then see whether that took the partition, or not."""
        self._say("Heartbeat", partition, self._held[partition])
        self._wait()
        if self._states()[partition][0] != self._instance:
            del self._held[partition]

    def _states(self) -> dict[int, tuple[object, ...]]:
        world = self._world
        partitions = world.data.describe(TOPIC).partitions
        return {n: world.judge.state(world.home, (GROUP, TOPIC, n)) for n in partitions}

    def _say(self, kind: str, partition: int, *tail: int) -> None:
        now_s = self._clock.wall_ms() // 1_000
        fields = (kind, 1, now_s, self._instance, self._client, GROUP, TOPIC, partition, *tail)
        self._wait()
        self._world.cluster.put(self._world.home, "/".join(map(str, fields)).encode())

    def _wait(self) -> None:
        self._world.scheduler.sleep(self._chance.random() * 20)
