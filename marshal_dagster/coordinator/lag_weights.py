"""The weights of partitions for the `weighted` strategy: the lag of each partition, looked up in the background."""

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
"""If a lookup takes longer, the weights known so far are used."""

Weigh = Callable[[str, Collection[str], Mapping[DataPartitionId, int]], Mapping[DataPartitionId, float]]
"""A function that returns the weight of each partition of a group's topics.

Its arguments are the group, its topics, and the next offset of each partition that members report. It may raise a
`MarshalError`.
"""


@dataclass(frozen=True, slots=True)
class LagWeights:
    """The lag of each partition as its weight: the number of offsets from the group's position to the partition's end.

    The position is the one in the coordination log or the one that the member reports, whichever is larger. Topics
    that do not exist are left out.
    """

    coordination: KafkaConnection
    """The cluster with the coordination topic."""
    coordination_topic: str
    data: KafkaConnection
    """The cluster with the data topics."""

    def __call__(
        self, group: str, topics: Collection[str], reported: Mapping[DataPartitionId, int]
    ) -> dict[DataPartitionId, float]:
        """Return the lag of each partition (`Weigh`).

        Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
        """
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
        """Return the group's position in each partition, from the coordination log."""
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
    """Return the number of unread offsets.

    A position after the end belongs to an earlier topic of the same name, so that everything is unread.
    """
    return at.end - at.start if position > at.end else at.end - max(at.start, position)


@dataclass(slots=True)
class _Weighing:
    """A lookup of weights under way. Its result goes to the group that has the name when it ends."""

    topics: frozenset[str]
    began_ms: float
    found: Future[Mapping[DataPartitionId, float]]


class GroupWeigher:
    """A background lookup of the weights of each group's partitions, every 30 s and as soon as a group needs them."""

    def __init__(self, weigh: Weigh) -> None:
        """Use `weigh` to look weights up; no lookup starts yet."""
        self._weigh = weigh
        self._weighings: dict[str, _Weighing] = {}
        self._next_ms: dict[str, float] = {}

    def poll(self, executor: Executor, groups: Mapping[str, GroupCoordinator], now_ms: float) -> None:
        """Pass the weights of finished lookups to their groups, and start the lookups that are due."""
        for name in [name for name, weighing in self._weighings.items() if weighing.found.done()]:
            weighing = self._weighings.pop(name)
            self._next_ms[name] = now_ms + _WEIGH_EACH_MS
            error = weighing.found.exception()
            if error is not None:
                logger.warning(
                    "the lag of the partitions of group %r could not be looked up, so the last known weights are "
                    "used: %s",
                    name,
                    error,
                )
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
        """Ignore the results of lookups that are under way."""
        self._weighings = {}
