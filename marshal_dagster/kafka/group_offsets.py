"""Look up and set the committed offsets of a group in Kafka, without joining the group.

This uses a consumer that never subscribes. The admin client has such requests too, but it aborts the whole process if
the group's coordinator goes away during one (librdkafka issue 4605).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from marshal_dagster.errors import MarshalError, UnavailableError
from marshal_dagster.kafka.acls import Needed, Right
from marshal_dagster.kafka.clients import close_client, close_client_later, error_in, make_client
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import PASSING, Request, failure

T = TypeVar("T")

AT_ONCE: Final = 512
"""The number of partitions in one request. Each request waits for the coordinator, so it has more than a look-up."""
_PAUSE_S: Final = 0.02
_GLANCE_S: Final = 0.002
_SLICE_S: Final = 0.25


class GroupOffsets:
    """The committed offsets of one group. Only one thread at a time may use it.

    After a failure that may leave a request unanswered, `is_spent` is true: close the object and create another one.
    """

    def __init__(self, connection: KafkaConnection, group: str, *, client_id: str) -> None:
        """Connect in the background.

        Raises:
            ConfigurationError: The client library rejects the settings.
        """
        self.group = group
        self.is_spent = False
        self._timeout_s = connection.timeout_s
        self._answers: list[tuple[KafkaError | None, list[TopicPartition]]] = []
        settings = {
            "group.id": group,
            "enable.auto.commit": False,
            "session.timeout.ms": round(self._timeout_s * 1000),  # how long a commit waits for the coordinator
            "on_commit": lambda error, partitions: self._answers.append((error, partitions)),
        }
        self._client, self._log = make_client(Consumer, connection, client_id, settings)

    def close(self) -> None:
        """Close the connections."""
        close = close_client_later if self.is_spent else close_client
        close(self._client, self._log)

    def read(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Look up the committed offsets (the next ones to read).

        A partition without a committed offset is not in the result.

        Raises:
            AuthorizationError: DESCRIBE on the group or on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        request = Request(
            f"look up the committed offsets of group {self.group!r}",
            Needed((Right.DESCRIBE,), topic, self.group),
        )
        committed: list[TopicPartition] = []
        for wanted in _parts([TopicPartition(topic, partition) for partition in partitions]):
            committed += self._repeated(request, partial(self._committed, wanted))
        return {position.partition: position.offset for position in committed if position.offset >= 0}

    def commit(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Set committed offsets.

        Raises:
            AuthorizationError: READ on the group or on the topic is missing.
            TopicNotFoundError: The topic or one of the partitions does not exist.
            UnavailableError: The brokers did not answer in time, or the group has active Kafka consumers.
        """
        request = Request(
            f"commit the offsets of group {self.group!r} in topic {topic!r}",
            Needed((Right.READ,), topic, self.group),
            topic,
        )
        for wanted in _parts([TopicPartition(topic, number, offset) for number, offset in sorted(offsets.items())]):
            self._repeated(request, partial(self._commit_once, wanted))

    def _committed(self, wanted: list[TopicPartition], deadline: float) -> list[TopicPartition]:
        while True:
            left_s = deadline - time.monotonic()
            try:
                held = self._client.committed(wanted, timeout=max(_PAUSE_S, min(_SLICE_S, left_s)))
            except KafkaException as raised:
                if error_in(raised).code() != KafkaError._TIMED_OUT or left_s <= _SLICE_S:  # noqa: SLF001
                    raise
                self._poll(0)
            else:
                _raise_first(held)
                return held

    def _commit_once(self, wanted: list[TopicPartition], deadline: float) -> None:
        self._answers.clear()
        self._client.commit(offsets=wanted, asynchronous=True)
        while not self._answers:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - a public code of the client library
            self._poll(min(_GLANCE_S, left_s))
        error, partitions = self._answers[0]
        if error is not None:
            raise KafkaException(error)
        _raise_first(partitions)

    def _poll(self, timeout_s: float) -> None:
        """Receive answers; raise a missing right on the group, which the client reports as a message."""
        message = self._client.poll(timeout_s)
        error = message.error() if message is not None else None
        if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise KafkaException(error)

    def _repeated(self, request: Request, ask: Callable[[float], T]) -> T:
        """Call `ask` with the deadline (monotonic seconds); retry it after temporary failures until then."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                answer = ask(deadline)
            except KafkaException as raised:
                error = error_in(raised)
                if error.code() not in PASSING or time.monotonic() + _PAUSE_S >= deadline:
                    raise self._failure(request, error) from None
                time.sleep(_PAUSE_S)
            else:
                self._log.clear()
                return answer

    def _failure(self, request: Request, error: KafkaError) -> MarshalError:
        self.is_spent = True
        if error.code() in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS}:
            return UnavailableError(
                f"cannot {request.doing} on {self._log.servers}: that group has active Kafka consumers; stop them, or "
                "use another name for one of the two groups"
            )
        return failure(request, error, self._log, self._timeout_s)


def _parts(partitions: Sequence[TopicPartition]) -> Iterator[list[TopicPartition]]:
    """Yield the partitions of each request. The client's time for a request grows with the square of its partitions."""
    for first in range(0, len(partitions), AT_ONCE):
        yield list(partitions[first : first + AT_ONCE])


def _raise_first(partitions: Iterable[TopicPartition]) -> None:
    for partition in partitions:
        if partition.error is not None:
            raise KafkaException(partition.error)
