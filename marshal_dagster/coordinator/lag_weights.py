"""The weights of partitions: how many offsets of each its group has not read, and when they are found out."""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer
from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.group import GroupCoordinator
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    from marshal_dagster.protocol.state import OffsetBounds

logger = logging.getLogger(__name__)

_WEIGH_EACH_MS: Final = 30_000.0
_WEIGHS_FOR_MS: Final = 30_000.0
"""The known weights are used if weighing takes longer."""

Weigh = Callable[[str, Collection[str], Mapping[DataPartitionId, int]], Mapping[DataPartitionId, float]]
"""Returns the weights of a group's topics by partition, given the next offsets that members report.

It may raise a `MarshalError`.
"""


@dataclass(frozen=True, slots=True)
class LagWeights:
    """Weighs a partition by how many offsets lie between its group's position and its end.

    The position is that of the coordination log or the one that its member reports, whichever is larger. A topic that
    does not exist weighs nothing. `data` is where the topics are.
    """

    coordination: KafkaConnection
    coordination_topic: str
    data: KafkaConnection

    def __call__(
        self, group: str, topics: Collection[str], reported: Mapping[DataPartitionId, int]
    ) -> dict[DataPartitionId, float]:
        """Weigh (`Weigh`). Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`."""
        positions = {**reported}
        for place, offset in self._committed(group, topics).items():
            positions[place] = max(offset, positions.get(place, 0))
        with Topics(self.data) as client:
            counts = client.partition_counts()
            return {
                (topic, number): float(_unread(at, positions.get((topic, number), 0)))
                for topic in sorted(topics)
                if topic in counts
                for number, at in client.offsets(topic, range(counts[topic])).items()
            }

    def _committed(self, group: str, topics: Collection[str]) -> dict[DataPartitionId, int]:
        """Return the group's offsets in the coordination log."""
        rationalizer = shared_rationalizer(self.coordination, self.coordination_topic)
        with rationalizer.lock:
            world = rationalizer.catch_up()
            return {
                place: key.offset
                for topic in topics
                for place, key in world.group_of(group, topic).keys.items()
                if place[0] == topic and key.offset is not None
            }


def _unread(at: "OffsetBounds", position: int) -> int:
    """Return how much is unread; a position after the end belongs to an earlier topic of that name."""
    return at.end - at.start if position > at.end else at.end - max(at.start, position)


@dataclass(slots=True)
class _Weighing:
    """A group's partitions that are being weighed, for any group that has the name when it is done."""

    topics: frozenset[str]
    began_ms: float
    found: Future[Mapping[DataPartitionId, float]]


class GroupWeigher:
    """Weighs what each group has to work on: every 30 s, and as soon as a group awaits its weights."""

    def __init__(self, weigh: Weigh) -> None:
        """Weigh nothing yet."""
        self._weigh = weigh
        self._weighings: dict[str, _Weighing] = {}
        self._next_ms: dict[str, float] = {}

    def poll(self, executor: Executor, groups: Mapping[str, GroupCoordinator], now_ms: float) -> None:
        """Give groups the weights that were found, and begin to weigh those that are due."""
        for name in [name for name, weighing in self._weighings.items() if weighing.found.done()]:
            weighing = self._weighings.pop(name)
            self._next_ms[name] = now_ms + _WEIGH_EACH_MS
            error = weighing.found.exception()
            if error is not None:  # those that are known serve
                logger.warning("the partitions of group %r could not be weighed: %s", name, error)
            if name in groups:
                groups[name].update_weights(weighing.topics, None if error is not None else weighing.found.result())
        self._next_ms = {name: at_ms for name, at_ms in self._next_ms.items() if name in groups}
        for name, group in groups.items():
            self._poll_group(executor, name, group, now_ms)

    def _poll_group(self, executor: Executor, name: str, group: GroupCoordinator, now_ms: float) -> None:
        weighing = self._weighings.get(name)
        if weighing is None:
            if group.awaits_weights or now_ms >= self._next_ms.get(name, 0.0):
                topics, positions = group.topics_wanted(), dict(group.positions)
                found = executor.submit(self._weigh, name, topics, positions)
                self._weighings[name] = _Weighing(topics, now_ms, found)
        elif group.awaits_weights and now_ms >= weighing.began_ms + _WEIGHS_FOR_MS:
            group.update_weights(group.topics_wanted(), None)

    def forget(self) -> None:
        """Take no notice of what is being weighed."""
        self._weighings = {}
