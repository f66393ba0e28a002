"""What tests of your own assets, ops and jobs need: a Kafka, a sink and a clock in memory, and simulated crashes.

`run_in_memory` runs a claimed asset, op or job without Kafka. The coordination log in memory passes the same tests as
the log over Kafka, and the sink in memory passes the conformance cases of sinks.
"""

from typing import TYPE_CHECKING, Final

from marshal_dagster.testing.memory_log import ManualClock, MemoryBroker, MemoryLog, MemorySnapshotTopic

if TYPE_CHECKING:
    from marshal_dagster.testing.crashes import CrashPoint, crash
    from marshal_dagster.testing.memory_kafka import MemoryKafka
    from marshal_dagster.testing.memory_sink import MemorySink
    from marshal_dagster.testing.memory_topics import MemoryRecord, MemoryTopics
    from marshal_dagster.testing.run import MemoryAttempt, MemoryResult, run_in_memory

__all__ = [
    "CrashPoint",
    "ManualClock",
    "MemoryAttempt",
    "MemoryBroker",
    "MemoryKafka",
    "MemoryLog",
    "MemoryRecord",
    "MemoryResult",
    "MemorySink",
    "MemorySnapshotTopic",
    "MemoryTopics",
    "crash",
    "run_in_memory",
]

_MODULES: Final = {
    "CrashPoint": "crashes",
    "MemoryAttempt": "run",
    "MemoryKafka": "memory_kafka",
    "MemoryRecord": "memory_topics",
    "MemoryResult": "run",
    "MemorySink": "memory_sink",
    "MemoryTopics": "memory_topics",
    "crash": "crashes",
    "run_in_memory": "run",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that the log in memory alone does not import Dagster (PEP 562)."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
