"""The weights of partitions: how many offsets of each its group has not read."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer
from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    from marshal_dagster.protocol.state import OffsetBounds

Weigh = Callable[[str, Collection[str], Mapping[DataPartitionId, int]], Mapping[DataPartitionId, float]]
"""Returns the weights of a group's topics by partition, given the next offsets that members report.

It may raise a `MarshalError`.
"""


class LagWeights:
    """Weighs a partition by how many offsets lie between its group's position and its end.

    The position is that of the coordination log or the one that its member reports, whichever is larger. A topic that
    does not exist weighs nothing.
    """

    def __init__(self, coordination: KafkaConnection, coordination_topic: str, data: KafkaConnection) -> None:
        """Connect to nothing yet; `data` is where the topics are."""
        self._coordination = coordination
        self._coordination_topic = coordination_topic
        self._data = data

    def __call__(
        self, group: str, topics: Collection[str], reported: Mapping[DataPartitionId, int]
    ) -> dict[DataPartitionId, float]:
        """Weigh (`Weigh`). Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`."""
        positions = {**reported}
        for place, offset in self._committed(group, topics).items():
            positions[place] = max(offset, positions.get(place, 0))
        with Topics(self._data) as client:
            counts = client.partition_counts()
            return {
                (topic, number): float(_unread(at, positions.get((topic, number), 0)))
                for topic in sorted(topics)
                if topic in counts
                for number, at in client.offsets(topic, range(counts[topic])).items()
            }

    def _committed(self, group: str, topics: Collection[str]) -> dict[DataPartitionId, int]:
        """Return the group's offsets in the coordination log."""
        rationalizer = shared_rationalizer(self._coordination, self._coordination_topic)
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
