"""For users' tests: a coordination log in memory that passes the same tests as the one over Kafka."""

from marshal_dagster.testing.memory_log import ManualClock, MemoryBroker, MemoryLog, MemorySnapshotTopic

__all__ = ["ManualClock", "MemoryBroker", "MemoryLog", "MemorySnapshotTopic"]
