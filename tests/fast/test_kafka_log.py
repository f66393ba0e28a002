"""How long the coordination log waits for its broker; other tests use a real one (`tests/real`)."""

import time
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError, TopicPartition

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection

HEARTBEAT_S = 0.1
"""How long a member with a short heartbeat interval waits for an answer."""
CONNECTING_S = 0.5


@dataclass(frozen=True, slots=True)
class End:
    """The event that the client returns when a partition was read to its end."""

    at: int

    def partition(self) -> int:
        """Return the only partition."""
        return 0

    def offset(self) -> int:
        """Return the end offset."""
        return self.at

    def error(self) -> KafkaError:
        """Return the error that marks the end of a partition."""
        return KafkaError(KafkaError._PARTITION_EOF)


class SlowConsumer:
    """A client that needs a while to connect. Then it is at offset 3, the end of the partition, and returns no more."""

    def __init__(self) -> None:
        self._connected_s = time.monotonic() + CONNECTING_S
        self._due = [End(3)]

    def assign(self, at: list[TopicPartition]) -> None:
        """Accept the assignment."""

    def consume(self, count: int, timeout_s: float) -> list[End]:
        """Return the end-of-partition event once the client is connected."""
        time.sleep(timeout_s)
        if time.monotonic() < self._connected_s:
            return []
        given, self._due = self._due[:count], self._due[count:]
        return given


@pytest.mark.thorough
def test_the_first_answer_may_take_as_long_as_the_connection_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read may take the connection's time-out, because the client has to connect.

    Later reads use their own.
    """
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (SlowConsumer(), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=300))
    log.follow({0: 0})

    (chunk,) = log.read_until({0: 3}, HEARTBEAT_S)
    with pytest.raises(UnavailableError, match=r"not read up to \{0: 4\} .* within 0.1 s"):
        list(log.read_until({0: 4}, HEARTBEAT_S))

    assert chunk.position == 3
