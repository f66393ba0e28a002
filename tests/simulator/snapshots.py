"""The simulated snapshot topic: each process has its own slow and faulty connection; compaction at any time."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final
from unittest.mock import patch

from marshal_dagster.coordination.snapshots import Read
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol import snapshots as protocol
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.snapshots import Record, render
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import PartitionWorld
from marshal_dagster.testing import MemorySnapshotTopic
from tests.simulator.checkers import SnapshotJudge
from tests.simulator.scheduler import Process

PART_BYTES: Final = (100, 200)
"""Small enough that the few keys of a seed fill several parts."""


class SnapshotFault(StrEnum):
    """A fault of one record on its way to the snapshot topic: a part of a snapshot, or a deletion."""

    CRASH = "crash between the parts of a snapshot"
    LOST = "part of a snapshot that is not written"
    LOST_ACK = "part of a snapshot that is written but not acknowledged"


class SimulatedSnapshotTopic:
    """One process's view, as a `marshal_dagster.coordination.snapshots.SnapshotTopic`.

    Parts are appended one by one, so a process that dies or fails in between leaves only some of them.
    """

    def __init__(
        self,
        topic: MemorySnapshotTopic,
        judge: SnapshotJudge,
        process: Process,
        wait: Callable[[], None],
        *,
        compacts: Callable[[], bool],
        next_fault: Callable[[], SnapshotFault | None],
    ) -> None:
        self._topic = topic
        self._judge = judge
        self._process = process
        self._wait = wait
        self._compacts = compacts
        self._next_fault = next_fault

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Look up the bounds."""
        self._wait()
        return self._topic.bounds(partitions)

    def read(self, ranges: Mapping[int, OffsetBounds], timeout_s: float) -> Mapping[int, Read]:
        """Read the present records after a delay."""
        self._wait()
        return self._topic.read(ranges, timeout_s)

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append one part after another."""
        for record in records:
            self._wait()
            fault = self._next_fault()
            if fault is SnapshotFault.CRASH:
                self._process.kill()
            if fault is not SnapshotFault.LOST:
                self._topic.append(partition, [record])
                self._judge.read(partition, *record)
            if fault is not None:
                raise UnavailableError("simulated")
            if self._compacts():
                self._topic.compact()

    def close(self) -> None:
        """Do nothing."""


def render_as_former(
    records: Sequence[tuple[int, int, str]], number: int, partitions: int, topic_id: str, chance: random.Random
) -> list[Record]:
    """Return the snapshot that a member of the former version writes after (offset, timestamp, value) records.

    That version judged a group without settings as a native one.
    """
    world = PartitionWorld(number, partitions, GroupSettings(60_000, RuleSet.NATIVE), 0)
    last = (-1, 0, b"")
    for offset, timestamp_ms, text in records:
        last = (offset, timestamp_ms, text.encode("utf-8", "surrogateescape"))
        world.apply(*last)
    world.set_last_record(last)
    with patch.multiple(protocol, VERSION=1, VERSION_WITH_RANGES=2):
        return protocol.render(world, topic_id, f"former{chance.getrandbits(32)}", chance.choice(PART_BYTES))


def render_in_parts(world: PartitionWorld, topic_id: str, snapshot_id: str, *, chance: random.Random) -> list[Record]:
    """Write a snapshot in several parts; often the first part ends with a line, so it is readable by itself."""
    text = max((value for _, value in render(world, topic_id, snapshot_id) if value is not None), key=len)
    lines_end = [at for at, character in enumerate(text) if character == ord("\n")]
    sizes = lines_end if lines_end and chance.random() < 0.5 else PART_BYTES
    return render(world, topic_id, snapshot_id, chance.choice(sizes))
