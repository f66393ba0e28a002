"""The simulated snapshot topic: each process's own way to it, which takes a while, and compaction at any time."""

from collections.abc import Callable, Collection, Mapping, Sequence

from marshal_dagster.coordination.log import Bounds
from marshal_dagster.coordination.snapshots import Read
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.testing import MemorySnapshotTopic
from tests.simulator.checkers import SnapshotJudge


class SimulatedSnapshotTopic:
    """One process's view, as a `marshal_dagster.coordination.snapshots.SnapshotTopic`.

    Parts are appended one by one: whoever dies in between leaves some of them.
    """

    def __init__(
        self, topic: MemorySnapshotTopic, judge: SnapshotJudge, wait: Callable[[], None], compacts: Callable[[], bool]
    ) -> None:
        self._topic = topic
        self._judge = judge
        self._wait = wait
        self._compacts = compacts

    def bounds(self, partitions: Collection[int]) -> Mapping[int, Bounds]:
        """Ask for the bounds."""
        self._wait()
        return self._topic.bounds(partitions)

    def read(self, ranges: Mapping[int, Bounds], timeout_s: float) -> Mapping[int, Read]:
        """Read what is there after a while."""
        self._wait()
        return self._topic.read(ranges, timeout_s)

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append part by part."""
        for record in records:
            self._wait()
            self._topic.append(partition, [record])
            self._judge.read(partition, *record)
            if self._compacts():
                self._topic.compact()

    def close(self) -> None:
        """Nothing to let go of."""
