"""The coordinator's topics in Kafka: their settings, a reader from an offset on, and a writer that never waits."""

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from marshal_dagster.coordinator import DEFAULT_TOPIC
from marshal_dagster.coordinator.messages import (
    ALL,
    MOST_BYTES,
    CoordinatorMessage,
    MemberMessage,
    Registered,
    parse_coordinator_message,
    render,
)
from marshal_dagster.election.elector import LEADER_SETTINGS
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import close_client
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topic_creation import create_and_warn

logger = logging.getLogger(__name__)

CLIENT_ID: Final = "marshal-dagster-coordinator"
DEFAULT_PARTITIONS: Final = 8
_SAFE_COPIES: Final = 3
_BATCH: Final = 10_000
_DELIVERY_MS: Final = 5_000
_WARN_EACH_S: Final = 60.0
_MEMBER_KINDS: Final = ("stop", "start")
CLIENT_FAILURES: Final = (UnavailableError, KafkaException, SystemError)
"""Errors that an unusable client raises. A fatal error during callbacks raises `SystemError`."""
_OUTSIDE: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001
"""Error codes for a position that is not in the log any more. The client stops reading there."""
_MEMBER_TOPIC_SETTINGS: Final = {"cleanup.policy": "delete", "retention.ms": "3600000", "segment.bytes": "16777216"}
_COORDINATOR_TOPIC_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "message.timestamp.type": "LogAppendTime",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.1",
    "unclean.leader.election.enable": "false",
}


@dataclass(frozen=True, slots=True)
class CoordinatorTopics:
    """The three topics of a coordinator. The names of two of them are derived from that of the first.

    Example:
        ```python
        CoordinatorTopics().create(connection, partitions=16)
        ```
    """

    member_messages: str = DEFAULT_TOPIC
    """The topic with the members' messages."""

    @property
    def coordinator_messages(self) -> str:
        """The topic with the coordinators' messages. It is compacted, so that the share of each member is kept."""
        return f"{self.member_messages}_orders"

    @property
    def leader(self) -> str:
        """The topic by which a coordinator is elected for each partition."""
        return f"{self.member_messages}_leader"

    def create(self, connection: KafkaConnection, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Create the topics that are missing.

        Args:
            connection: The cluster.
            partitions: The number of partitions of each topic. It limits how many coordinators can share the groups.

        Raises:
            ConfigurationError: An existing topic has another number of partitions.
            AuthorizationError: The user may not create or describe the topics.
            UnavailableError: The brokers do not answer in time.
        """
        with Topics(connection) as topics:
            copies = min(_SAFE_COPIES, topics.broker_count())
            safe = {"min.insync.replicas": "2"} if copies >= _SAFE_COPIES else {}
            create_and_warn(topics, self.member_messages, partitions, copies, {**_MEMBER_TOPIC_SETTINGS, **safe})
            create_and_warn(
                topics, self.coordinator_messages, partitions, copies, {**_COORDINATOR_TOPIC_SETTINGS, **safe}
            )
            create_and_warn(topics, self.leader, partitions, copies, {**LEADER_SETTINGS, **safe})
            self._check_counts(topics)

    def partitions(self, connection: KafkaConnection) -> int:
        """Return the number of partitions of each topic.

        Args:
            connection: The cluster.

        Returns:
            The number of partitions of the topic with the members' messages.

        Raises:
            TopicNotFoundError: The topic does not exist.
            UnavailableError: The brokers do not answer in time.
        """
        try:
            with Topics(connection) as topics:
                return len(topics.describe(self.member_messages).partitions)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"{error}; `marshal-dagster coordinator init` creates the coordinator's topics"
            ) from None

    def check(self, connection: KafkaConnection, partitions: int) -> None:
        """Check that a coordinator can use the topics.

        Args:
            connection: The cluster.
            partitions: The number of partitions that each topic had when the coordinator started.

        Raises:
            ConfigurationError: The topics have different numbers of partitions, or not `partitions` each. Or the topic
                with the coordinators' messages is not compacted.
            TopicNotFoundError: A topic does not exist.
            AuthorizationError: The user may not read the members' messages, or read and write the other topics.
            UnavailableError: The brokers do not answer in time.
        """
        with Topics(connection) as topics:
            topics.require(on_topic(self.member_messages, Right.READ))
            for topic in (self.coordinator_messages, self.leader):
                topics.require(on_topic(topic, Right.READ, Right.WRITE))
            self._check_keeps_shares(topics)
            if self._check_counts(topics) != partitions:
                raise ConfigurationError(
                    f"topic {self.member_messages!r} had {partitions} partitions when this process started, and has "
                    "another number now: restart all coordinators and members"
                )

    def check_member(self, connection: KafkaConnection) -> None:
        """Check that a member can use the topics.

        Args:
            connection: The cluster.

        Raises:
            TopicNotFoundError: A topic does not exist.
            AuthorizationError: The user may not read the coordinators' messages or write those of members.
            UnavailableError: The brokers do not answer in time.
        """
        with Topics(connection) as topics:
            topics.require(on_topic(self.coordinator_messages, Right.READ))
            topics.require(on_topic(self.member_messages, Right.WRITE))

    def _check_keeps_shares(self, topics: Topics) -> None:
        """Raise `ConfigurationError` if the topic deletes the members' shares after some time.

        Pass if this user may not see the topic's settings.
        """
        try:
            policy = topics.settings(self.coordinator_messages).get("cleanup.policy")
        except AuthorizationError:
            return
        if policy != "compact":
            raise ConfigurationError(
                f"topic {self.coordinator_messages!r} has cleanup.policy {policy}, so it deletes the shares of members "
                "after some time, and their runs then claim no partition: set it to compact alone"
            )

    def _check_counts(self, topics: Topics) -> int:
        """Return the number of partitions of each topic. Raises `ConfigurationError` if the topics differ."""
        counts = {
            topic: len(topics.describe(topic).partitions)
            for topic in (self.member_messages, self.coordinator_messages, self.leader)
        }
        if len(set(counts.values())) > 1:
            described = ", ".join(f"{topic!r} has {count}" for topic, count in counts.items())
            raise ConfigurationError(
                f"the coordinator's topics must have the same number of partitions: {described}; stop all coordinators "
                "and members, delete the three topics and run `marshal-dagster coordinator init`"
            )
        return counts[self.member_messages]


def partition_of(group: str, partitions: int) -> int:
    """Return the partition of the coordinator's topics that has a group's records."""
    digest = hashlib.md5(group.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % partitions


class ReceivedRecord(NamedTuple):
    """A record read from a topic; `at_ms` is its timestamp in Unix milliseconds."""

    partition: int
    offset: int
    key: bytes
    value: bytes | None
    at_ms: int


class Reader:
    """A reader of the records of partitions as they arrive. Not thread-safe."""

    def __init__(self, connection: KafkaConnection, topic: str) -> None:
        """Connect in the background. Nothing is read before `follow`."""
        self._topic = topic
        self._connection = connection
        self._consumer, self._log = clients.consumer(connection, client_id=CLIENT_ID, fetch_wait_ms=20)
        self.ends: dict[int, int] = {}
        """The end offset of each partition that was read to its end."""

    def follow(self, starts: Mapping[int, int]) -> None:
        """Read these partitions in addition, from these offsets on."""
        self.leave(starts)
        self._consumer.incremental_assign([TopicPartition(self._topic, number, at) for number, at in starts.items()])

    def leave(self, partitions: Iterable[int]) -> None:
        """Stop reading these partitions; ignore those that are not read."""
        followed = {assigned.partition for assigned in self._consumer.assignment()}
        unfollowed = followed.intersection(partitions)
        if unfollowed:
            self._consumer.incremental_unassign([TopicPartition(self._topic, number) for number in unfollowed])
        for number in unfollowed:
            self.ends.pop(number, None)

    def read(self, timeout_s: float) -> Iterator[ReceivedRecord]:
        """Wait up to `timeout_s` seconds for records, and yield those that have arrived."""
        first = self._consumer.consume(1, timeout_s)
        messages: list[Any] = [*first, *self._consumer.consume(_BATCH, 0)] if first else []
        for message in messages:
            error = message.error()
            if error is None:
                _, at_ms = message.timestamp()
                yield ReceivedRecord(
                    message.partition(), message.offset(), message.key() or b"", message.value(), at_ms
                )
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                self.ends[message.partition()] = message.offset()
            elif error.code() in _OUTSIDE:
                logger.warning(
                    "topic %r, partition %d: its records from the last position on were deleted; it is read from its "
                    "end on: %s",
                    self._topic,
                    message.partition(),
                    error,
                )
                self.follow({message.partition(): OFFSET_END})
            elif error.code() not in clients.HARMLESS_TO_A_READER:
                logger.debug("topic %r: reading has failed and is retried: %s", self._topic, error)

    def close(self) -> None:
        """Close the connections."""
        close_client(self._consumer, self._log)


class Writer:
    """A writer of records that does not wait for their delivery. Thread-safe.

    A record that was lost is sent again, because the protocol repeats every request until it is answered.
    """

    def __init__(self, connection: KafkaConnection, topics: CoordinatorTopics, partitions: int) -> None:
        """Connect in the background."""
        self._topics = topics
        self.partitions = partitions
        self._warned_at_s = -math.inf
        self._producer, self._log = clients.producer(connection, delivery_timeout_ms=_DELIVERY_MS, client_id=CLIENT_ID)

    def send_to_coordinator(self, message: MemberMessage) -> None:
        """Write a member's message."""
        self._write(self._topics.member_messages, message.group, message.member.encode(), render(message))

    def send_to_member(self, message: CoordinatorMessage) -> None:
        """Write a coordinator's message."""
        self._write(self._topics.coordinator_messages, message.group, key_of(message), render(message))

    def forget(self, group: str, member: str) -> None:
        """Write tombstones for the messages that were sent to a member, so that compaction removes them."""
        for kind in _MEMBER_KINDS:
            self._write(self._topics.coordinator_messages, group, record_key(group, member, kind), None)

    def revoke(self, message: CoordinatorMessage) -> None:
        """Write a tombstone for a message, so that readers ignore it."""
        self._write(self._topics.coordinator_messages, message.group, key_of(message), None)

    def poll(self) -> None:
        """Process delivery reports. Raises `UnavailableError` if the client has failed for good."""
        self._producer.poll(0)
        if self._log.fatal:
            raise UnavailableError(f"the producer of the coordinator's topics has failed: {self._log.fatal}")

    def close(self) -> None:
        """Send queued records, for one second at most, and close the client."""
        self._producer.flush(1.0)
        close_client(self._producer, self._log)

    def _write(self, topic: str, group: str, key: bytes, value: bytes | None) -> None:
        if value is not None and len(value) > MOST_BYTES:
            self._warn(
                topic,
                f"a record for group {group!r} has {len(value):,} bytes, more than the {MOST_BYTES:,} that readers "
                "accept; start more members, so that each has fewer partitions",
            )
            return
        try:
            self._producer.produce(topic, value, key, partition_of(group, self.partitions), on_delivery=self._delivered)
        except (BufferError, KafkaException) as error:
            self._warn(topic, error)

    def _delivered(self, error: KafkaError | None, message: Any) -> None:  # noqa: ANN401 - the client's
        if error is not None:
            self._warn(message.topic(), error)

    def _warn(self, topic: str, what: object) -> None:
        """Log that a record was not written, at most once a minute, because retries often fail as well."""
        now_s = time.monotonic()
        if now_s - self._warned_at_s >= _WARN_EACH_S:
            self._warned_at_s = now_s
            logger.warning(
                "topic %r: a record could not be written; the protocol repeats it if it is still needed: %s",
                topic,
                what,
            )


def record_key(group: str, member: str, kind: str) -> bytes:
    """Return the key of a coordinator's message; a newer message with the same key replaces it."""
    return f"{group}/{member}/{kind}".encode()


def key_of(message: CoordinatorMessage) -> bytes:
    """Return the key under which a coordinator writes a message.

    All answers to registrations of a group share one key. A refused member never leaves, so a key of its own would
    never get a tombstone.
    """
    return record_key(message.group, ALL if isinstance(message, Registered) else message.member, message.kind)


def end_of(connection: KafkaConnection, topic: str, partition: int) -> int:
    """Return the end offset of a partition. Raises `UnavailableError`, `TopicNotFoundError`."""
    with Topics(connection) as topics:
        return topics.offsets(topic, [partition], committed_only=False)[partition].end


NewestMessages = dict[tuple[int, bytes], tuple[CoordinatorMessage, ReceivedRecord]]
"""The newest valid message of each partition and key, with its record."""


def read_coordinator_messages(
    connection: KafkaConnection, topic: str, partitions: Iterable[int]
) -> list[tuple[CoordinatorMessage, ReceivedRecord]]:
    """Read the newest coordinators' message of each key, up to the present ends of the partitions.

    A message of an older epoch does not replace one of a newer epoch. The result is sorted by partition and offset.
    Raises `UnavailableError`, `TopicNotFoundError`.
    """
    with Topics(connection) as topics:
        bounds = topics.offsets(topic, partitions, committed_only=False)
    found: NewestMessages = {}
    filled = {number: at for number, at in bounds.items() if at.start < at.end}
    if not filled:
        return []
    reader = Reader(connection, topic)
    try:
        reader.follow({number: at.start for number, at in filled.items()})
        for record in _read_up_to(reader, {number: at.end for number, at in filled.items()}, connection.timeout_s):
            keep_newest(found, record)
    finally:
        reader.close()
    return sorted(found.values(), key=lambda item: (item[1].partition, item[1].offset))


def keep_newest(found: NewestMessages, record: ReceivedRecord) -> None:
    """Add a record to the newest messages.

    A message under a key that coordinators do not use for it is ignored, because no later message would replace it.
    """
    key, message = (record.partition, record.key), parse_coordinator_message(record.value)
    if record.value is None:
        found.pop(key, None)
    elif message is None or record.key != key_of(message):
        return
    elif key not in found or found[key][0].epoch <= message.epoch:
        found[key] = message, record


def _read_up_to(reader: Reader, ends: Mapping[int, int], timeout_s: float) -> Iterator[ReceivedRecord]:
    """Read up to `ends`, even if the last offsets are transaction markers or were compacted away."""
    progress_s, position = time.monotonic(), dict.fromkeys(ends, 0)

    def is_open(number: int) -> bool:
        return max(position[number], reader.ends.get(number, 0)) < ends[number]

    while any(map(is_open, ends)):
        records = list(reader.read(0.1))
        is_progress = any(is_open(record.partition) for record in records)
        if not is_progress and time.monotonic() - progress_s > timeout_s:
            raise UnavailableError(
                f"the coordinators' messages were not read to their ends: nothing arrived within {timeout_s:g} s; "
                "check the brokers"
            )
        for record in records:
            position[record.partition] = max(position[record.partition], record.offset + 1)
            yield record
        if is_progress:
            progress_s = time.monotonic()  # without the time that the caller took for the records
