"""Look up offsets of a topic's partitions with a consumer that reads nothing. `admin_client.Topics` uses this.

The admin client is not used, for two reasons. In librdkafka 2.16 its look-up of offsets may use memory that another
thread has freed, if a partition has no leader or its leader changes meanwhile. The process then ends with a
segmentation fault and releases no claims. The admin client also creates a future for each partition; for 10,000
partitions that takes longer than the broker's answers.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from marshal_dagster._internal.texts import first_few
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.kafka.clients import close_client, consumer, error_in
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import MISSING, PASSING

AT_ONCE: Final = 256
"""The number of partitions in one request. The time of a request in the client grows with the square of that number."""
NONE_AT: Final = -1
"""The broker's answer if no record has the requested time or a later one."""
_LEADERS_KNOWN_S: Final = 300.0
"""How long leaders are considered known. The client forgets them after 900 s without an answer about the topic."""
_LEAST_S: Final = 0.1
_SHOWN: Final = 10


class OffsetReader:
    """A client that looks up offsets. Threads may share it; their requests are answered one after another.

    With `committed_only` a partition ends at its first open transaction. After some failures `is_spent` is true: create
    another reader, because the client would continue to report that a topic does not exist or is not authorized.
    """

    def __init__(self, connection: KafkaConnection, *, client_id: str, committed_only: bool) -> None:
        """Connect in the background.

        Raises:
            ConfigurationError: The client library rejects the settings.
        """
        self.is_spent = False
        self._lock = threading.Lock()
        self._leaders: dict[str, tuple[float, int]] = {}
        """For each topic when the client learnt the leaders (monotonic seconds), and the number of partitions."""
        self._client: Consumer
        self._client, self.log = consumer(connection, client_id=client_id, committed_only=committed_only)

    def close(self) -> None:
        """Close the connections, after the look-up in progress."""
        with self._lock:
            self.is_spent = True
            close_client(self._client, self.log)

    def forget_leaders(self, topic: str) -> None:
        """Make the next call of `offsets` look up the topic's leaders again."""
        self._leaders.pop(topic, None)

    def partition_numbers(self, topic: str, *, until_s: float) -> tuple[int, ...]:
        """Return the numbers of a topic's partitions, in rising order; the brokers are asked each time.

        Args:
            topic: The topic.
            until_s: The deadline, in monotonic seconds.

        Raises:
            KafkaException: The topic does not exist or this user may not see it, or no broker answered in time.
        """
        with self._in_use(topic, until_s):
            return tuple(sorted(self._listed(topic, until_s)))

    def offsets(
        self, topic: str, partitions: Sequence[int], *places: int, until_s: float, least: int = 0
    ) -> list[dict[int, int]]:
        """Return the offsets of `partitions` at each of `places`.

        Args:
            topic: The topic.
            partitions: The numbers of the partitions.
            places: `OFFSET_BEGINNING`, `OFFSET_END`, or a time (unix ms), which means the first offset of that time or
                a later one.
            until_s: The deadline, in monotonic seconds.
            least: The smallest offset that is a valid answer.

        Returns:
            For each place the offset of each partition.

        Raises:
            TopicNotFoundError: One of the partitions does not exist.
            KafkaException: The topic does not exist or this user may not see it; or a partition has no leader, a
                leader did not answer in time, or an answer is below `least`.
        """
        with self._in_use(topic, until_s):
            self._know_leaders(topic, partitions, until_s)
            return self._all_at(topic, partitions, places, least, until_s)

    @contextmanager
    def _in_use(self, topic: str, until_s: float) -> Iterator[None]:
        """Use the client alone for a request about `topic`, and note a failure after which it cannot be used again."""
        if not self._lock.acquire(timeout=max(_LEAST_S, until_s - time.monotonic())):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - a public code of the client library
        try:
            if self.is_spent:
                raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))  # the caller uses another reader
            try:
                yield
            except KafkaException as raised:
                self.forget_leaders(topic)
                if error_in(raised).code() not in PASSING:
                    self.is_spent = True
                raise
            finally:
                self._client.poll(0)  # delivers log lines, because closing depends on the reason in them
            self.log.clear()
        finally:
            self._lock.release()

    def _all_at(
        self, topic: str, partitions: Sequence[int], places: Sequence[int], least: int, until_s: float
    ) -> list[dict[int, int]]:
        """Return the offsets at each of `places`. Raises as `offsets`, but never reports a missing topic or partition.

        The client also reports a topic or partition as missing while a broker goes away. Only the topic's list of
        partitions, which the next call looks up, shows whether it is missing.
        """
        try:
            return [self._at(topic, partitions, at, least, until_s) for at in places]
        except KafkaException as raised:
            if error_in(raised).code() not in MISSING:
                raise
            self.is_spent = True
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)) from None

    def _at(self, topic: str, partitions: Sequence[int], at: int, least: int, until_s: float) -> dict[int, int]:
        answers = self._ask(topic, partitions, at, until_s)
        unclear = [answer.partition for answer in answers if at >= 0 and answer.error is None and answer.offset == at]
        ends = self._at(topic, unclear, OFFSET_END, 0, until_s) if unclear else {}
        return {answer.partition: _offset_of(answer, at, least, ends) for answer in answers}

    def _ask(self, topic: str, partitions: Sequence[int], at: int, until_s: float) -> list[TopicPartition]:
        answers: list[TopicPartition] = []
        for first in range(0, len(partitions), AT_ONCE):
            wanted = [TopicPartition(topic, partition, at) for partition in partitions[first : first + AT_ONCE]]
            answers += self._client.offsets_for_times(wanted, max(_LEAST_S, until_s - time.monotonic()))
        return answers

    def _know_leaders(self, topic: str, partitions: Sequence[int], until_s: float) -> None:
        """Look up a topic's leaders unless they are known. That answer best shows why a topic cannot be read."""
        known_s, count = self._leaders.get(topic, (-_LEADERS_KNOWN_S, 0))
        now_s = time.monotonic()
        if now_s - known_s < _LEADERS_KNOWN_S and max(partitions) < count:
            return
        listed = self._listed(topic, until_s)
        if missing := sorted(set(partitions) - set(listed)):
            raise TopicNotFoundError(
                f"topic {topic!r} has {len(listed)} partitions, and no partition "
                f"{first_few(missing, _SHOWN)}; name existing partitions, which are numbered from 0"
            )
        if any(listed[partition].leader < 0 for partition in partitions):
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
        self._leaders[topic] = now_s, len(listed)

    def _listed(self, topic: str, until_s: float) -> dict[int, Any]:
        """Return the topic's partitions by number, as the brokers list them."""
        within_s = max(_LEAST_S, until_s - time.monotonic())
        listed = self._client.list_topics(topic, timeout=within_s).topics.get(topic)
        if listed is None:
            raise KafkaException(KafkaError(KafkaError._PARTIAL))  # noqa: SLF001 - a public code of the client library
        if listed.error is not None:
            raise KafkaException(listed.error)
        return dict(listed.partitions)


def _offset_of(answer: TopicPartition, at: int, least: int, ends: Mapping[int, int]) -> int:
    """Return the offset in an answer, or raise if the answer has none.

    If the client did not fill the offset in, it still has the requested time. Such a number counts only if the
    partition, whose end is in `ends`, has a record at that offset. While a leader is elected, an answer may have no
    offset and no error.
    """
    if answer.error is not None:
        raise KafkaException(answer.error)
    if answer.offset < least or (answer.offset == at and ends.get(answer.partition, 0) <= at):
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
    return int(answer.offset)
