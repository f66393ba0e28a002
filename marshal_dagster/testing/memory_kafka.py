"""A Kafka cluster in memory: data topics, the coordination topic and a clock."""

from collections.abc import Iterable, Mapping

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.testing.memory_log import ManualClock, MemoryBroker, MemoryLog
from marshal_dagster.testing.memory_topics import AnyRecord, MemoryTopics


class MemoryKafka:
    """Data topics and a coordination topic in memory, with a clock that a test moves.

    Several calls of `run_in_memory` share it, as runs share a cluster.

    Example:
        ```python
        kafka = MemoryKafka()
        run_in_memory(orders_per_shop, records={"orders": ["north"]}, kafka=kafka)
        later = run_in_memory(orders_per_shop, records={"orders": ["south"]}, kafka=kafka)
        assert later.positions == {"orders": {0: 2}}
        ```
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        """Start without data topics, and with an empty coordination topic.

        Args:
            clock: The clock of the cluster and of all runs; by default a new one.
        """
        self.clock = clock or ManualClock()
        """The clock. Claims of a crashed run are stale two heartbeat intervals after its last heartbeat."""
        self.topics = MemoryTopics(self.clock.wall_ms)
        """The data topics."""
        self.coordination = MemoryBroker(now_ms=self.clock.wall_ms)
        """The coordination topic."""

    def append(self, records: Mapping[str, Iterable[AnyRecord]], *, partitions: int = 1) -> None:
        """Append records to data topics, and create the topics that do not exist.

        Args:
            records: The records of each topic, in the forms of `MemoryTopics.append`.
            partitions: The number of partitions of each topic that is created.

        Raises:
            ConfigurationError: A name or a record is invalid.

        Example:
            ```python
            kafka.append({"orders": ["north", {"key": "k", "value": "south"}]}, partitions=2)
            ```
        """
        if not isinstance(records, Mapping):
            raise ConfigurationError(f"records are a {type(records).__name__}: give a dict with a list for each topic")
        existing = self.topics.partition_counts()
        for topic, added in records.items():
            if topic not in existing:
                self.topics.create(topic, partitions)
            self.topics.append(topic, added)

    def positions(self, group: str) -> dict[str, dict[int, int]]:
        """Return the group's positions by the coordination log.

        Args:
            group: The group.

        Returns:
            For each topic the next offset to process, by partition. Partitions without a position are left out.
        """
        found: dict[str, dict[int, int]] = {}
        world = Rationalizer(MemoryLog(self.coordination)).catch_up()
        for name, (topic, partition), _, key in world.keys():  # noqa: SIM118 - no dict
            if name == group and key.offset is not None:
                found.setdefault(topic, {})[partition] = key.offset
        return {topic: dict(sorted(offsets.items())) for topic, offsets in sorted(found.items())}
