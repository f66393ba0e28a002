"""Test doubles for users' tests: a coordination log in memory, without Kafka.

It passes the same tests as the log over Kafka.
"""

from marshal_dagster.testing.memory_log import ManualClock, MemoryBroker, MemoryLog, MemorySnapshotTopic

__all__ = ["ManualClock", "MemoryBroker", "MemoryLog", "MemorySnapshotTopic"]
