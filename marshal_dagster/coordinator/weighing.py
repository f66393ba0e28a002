"""What partitions weigh: how much of each its group has not read."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from marshal_dagster.coordination.registry import shared_rationalizer
from marshal_dagster.coordinator.assignment import Place
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics

if TYPE_CHECKING:
    from marshal_dagster.kafka.topics import OffsetBounds

Weigh = Callable[[str, Collection[str], Mapping[Place, int]], Mapping[Place, float]]
"""Weighs the partitions of a group's topics; it is also given how far members say that they got, by partition.

It may raise a `MarshalError`.
"""


class LagWeights:
    """Weighs a partition by how many offsets lie between its group's position and its end.

    The position is that of the coordination log, or what its member says, whichever is further. A topic that is not
    there weighs nothing.
    """

    def __init__(self, coordination: KafkaConnection, coordination_topic: str, data: KafkaConnection) -> None:
        """Connect to nothing yet; `data` is where the topics are."""
        self._coordination = coordination
        self._coordination_topic = coordination_topic
        self._data = data

    def __call__(self, group: str, topics: Collection[str], told: Mapping[Place, int]) -> dict[Place, float]:
        """Weigh (`Weigh`). Raises `TopicMissing`, `RightMissing`, `UnavailableError`."""
        positions = {**told}
        for place, offset in self._committed(group, topics).items():
            positions[place] = max(offset, positions.get(place, 0))
        with Topics(self._data) as asked:
            counts = asked.partition_counts()
            return {
                (topic, number): float(_unread(at, positions.get((topic, number), 0)))
                for topic in sorted(topics)
                if topic in counts
                for number, at in asked.offsets(topic, range(counts[topic])).items()
            }

    def _committed(self, group: str, topics: Collection[str]) -> dict[Place, int]:
        """Give the group's offsets by the coordination log."""
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
    """Give how much is unread; a position behind the end is of an earlier topic of that name."""
    return at.end - at.start if position > at.end else at.end - max(at.start, position)
