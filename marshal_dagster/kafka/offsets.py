"""Offsets of many partitions of a topic, through a consumer that reads nothing.

The admin client makes a future for each partition and question, which for 10,000 partitions takes longer than the
broker's answers; a consumer gives a plain list. It tells less of a failure, so the admin client is asked again then.
"""

import threading
import time
from collections.abc import Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from marshal_dagster.kafka.clients import close_client, consumer
from marshal_dagster.kafka.connection import KafkaConnection

AT_ONCE: Final = 500
"""Partitions whose offsets are asked for in one request: a request costs the client the square of their number."""
NONE_AT: Final = -1
"""The broker's answer where no record is as young as asked for."""


class ManyOffsets:
    """Looks up offsets, as far as no open transaction holds them; may be shared by threads.

    After a failure it is of no more use, see `is_spent`: its client goes on saying so of a topic that it once was not
    allowed to see, or that was not there.
    """

    def __init__(self, connection: KafkaConnection, *, client_id: str) -> None:
        """Connect in the background.

        Raises:
            ConfigurationError: the client library refuses the settings.
        """
        self.is_spent = False
        self._lock = threading.Lock()
        self._client: Consumer
        self._client, self._log = consumer(connection, client_id=client_id, committed_only=True)

    def close(self) -> None:
        """Let go of the connections, behind the question that is being asked."""
        with self._lock:
            self.is_spent = True
            close_client(self._client, self._log)

    def ask(self, topic: str, partitions: Sequence[int], at: int, *, least: int, until_s: float) -> dict[int, int]:
        """Give each partition's offset `at`: `OFFSET_BEGINNING`, `OFFSET_END`, or the first one of a time (unix ms).

        It has until `until_s` (monotonic seconds).

        Raises:
            KafkaException: one of them was not told in time, or is below `least`.
        """
        with self._lock:
            if self.is_spent:
                raise KafkaException(KafkaError(KafkaError._STATE))  # noqa: SLF001 - the library's own name
            try:
                offsets: dict[int, int] = {}
                for first in range(0, len(partitions), AT_ONCE):
                    wanted = [TopicPartition(topic, partition, at) for partition in partitions[first : first + AT_ONCE]]
                    answers = self._client.offsets_for_times(wanted, max(0.1, until_s - time.monotonic()))
                    offsets |= {answer.partition: _offset_of(answer, at, least) for answer in answers}
                return offsets
            except KafkaException:
                self.is_spent = True
                raise
            finally:
                self._client.poll(0)  # hands out what the client has logged: closing goes by it


def _offset_of(answer: TopicPartition, at: int, least: int) -> int:
    """Give the offset in an answer; one that the client did not fill in still has what was asked for."""
    if answer.error is not None:
        raise KafkaException(answer.error)
    if answer.offset < least or answer.offset == at:
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
    return int(answer.offset)
