"""Look up and change topics and groups, with few requests, each of them bounded in time.

`Topics` is the interface that the rest of the library uses for everything except reading and writing records.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import confluent_kafka.admin
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    TopicCollection,
    Uuid,
)
from confluent_kafka.admin import AdminClient

from marshal_dagster.errors import MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.acls import Needed, Right, on_topic
from marshal_dagster.kafka.clients import ClientLog, admin, close_client, error_in, list_brokers, reach
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.connection_errors import NO_BROKERS
from marshal_dagster.kafka.errors import MISSING, PASSING, Request, failure, right_missing
from marshal_dagster.kafka.group_offsets import GroupOffsets
from marshal_dagster.kafka.offsets import NONE_AT, OffsetReader
from marshal_dagster.kafka.topic_names import nearest_names_text
from marshal_dagster.protocol.state import OffsetBounds

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

CLIENT_ID: Final = "marshal-dagster-topics"
_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_PER_PARTITION_S: Final = 0.05
_CLOSED: Final = "this client for requests about topics is closed; create another one"
_API: Final[Any] = confluent_kafka.admin
"""For the names that the client library's type hints do not export."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as the cluster reports it."""

    name: str
    topic_id: str
    """Kafka's id of this incarnation: 22 characters of URL-safe base64 (protocol.md, section 1.3)."""
    partitions: tuple[int, ...]
    """The numbers of the partitions, in rising order."""
    replication: int
    """The number of replicas of the partition that has the fewest."""


class Topics:
    """Requests about topics and groups over one admin client. Threads may share it.

    Each request is answered within the connection's `timeout_s`; otherwise it raises `UnavailableError`. If a right is
    missing, it raises `AuthorizationError`, which names the right. The first request waits for the connection.
    Temporary failures (such as a leader election, or a coordinator that is still loading) are retried until the time is
    over.
    """

    def __init__(self, connection: KafkaConnection, *, client_id: str = CLIENT_ID) -> None:
        """Connect in the background.

        Raises:
            ConfigurationError: The client library rejects the settings.
        """
        self._timeout_s = connection.timeout_s
        self._log: ClientLog
        self._client: AdminClient | None
        self._client, self._log = admin(connection, client_id=client_id)
        self._client_lock = threading.Lock()
        self._borrowers = 0
        """How many threads use the client at present."""
        self._reached = False
        self._connection = connection
        self._group_lock = threading.Lock()
        self._held: GroupOffsets | None = None
        self._reader_lock = threading.Lock()
        self._readers: dict[bool, OffsetReader] = {}
        """The readers of offsets: for committed records only (True), or for all records (False)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections after the requests in progress. Any later request raises `RuntimeError`."""
        with self._client_lock:
            client, self._client = self._client, None
            is_in_use = self._borrowers > 0
        if client is not None and not is_in_use:
            self._let_go(client)
        with self._group_lock:
            if self._held is not None:
                self._held.close()
            self._held = None

    def describe(self, topic: str) -> TopicDescription:
        """Look up a topic's id and partitions.

        Raises:
            TopicNotFoundError: The topic does not exist; the message has the nearest names.
            AuthorizationError: DESCRIBE on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        try:
            described = self._described(topic)
        except TopicNotFoundError as missing:
            raise TopicNotFoundError(f"{missing}{self._nearest_names(topic)}") from None
        return TopicDescription(
            name=topic,
            topic_id=url_safe(described.topic_id),
            partitions=tuple(sorted(partition.id for partition in described.partitions)),
            replication=min((len(partition.replicas) for partition in described.partitions), default=0),
        )

    def partition_numbers(self, topic: str) -> tuple[int, ...]:
        """Look up the numbers of a topic's partitions, in rising order. It is much faster than `describe`.

        Raises:
            TopicNotFoundError: The topic does not exist; the message has the nearest names.
            AuthorizationError: DESCRIBE on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        request = Request(f"look up topic {topic!r}", on_topic(topic, Right.DESCRIBE), topic)
        try:
            return self._ask_reader(
                request, lambda reader, until_s: reader.partition_numbers(topic, until_s=until_s), committed_only=True
            )
        except TopicNotFoundError as missing:
            raise TopicNotFoundError(f"{missing}{self._nearest_names(topic)}") from None

    def partition_counts(self) -> dict[str, int]:
        """Look up the number of partitions of each topic that this user may see, except topics that begin with `__`.

        Raises:
            UnavailableError: The brokers did not answer in time.
        """
        request = Request("list the topics", Needed((Right.DESCRIBE,)))
        listed = self._ask(request, lambda client, left_s: client.list_topics(timeout=left_s))
        return {name: len(topic.partitions) for name, topic in listed.topics.items() if not name.startswith("__")}

    def cluster_id(self) -> str | None:
        """Return the id of the cluster, or None if its brokers have none. Raises `UnavailableError`."""
        request = Request("look up the cluster", Needed((Right.DESCRIBE,)))
        listed = self._ask(request, lambda client, left_s: client.list_topics(timeout=left_s))
        found: str | None = getattr(listed, "cluster_id", None)  # the client library's type hints lack it
        return found or None

    def _nearest_names(self, topic: str) -> str:
        """Return the end of an error message with existing names; empty for one of the library's own topics.

        Those are created by a command, so similar names do not help.
        """
        if topic.startswith("__"):
            return ""
        try:
            return f"; {nearest_names_text(topic, self.partition_counts())}"
        except MarshalError:  # the caller reports the missing topic, which matters more
            return ""

    def rights(self, topic: str) -> frozenset[Right] | None:
        """Look up this user's rights on a topic; None if the brokers do not report them. Raises as `describe`."""
        return authorized(self._described(topic, with_rights=True))

    def require(self, needed: Needed) -> None:
        """Check that this user has the rights on a topic. If the brokers do not report rights, this passes.

        Raises:
            TopicNotFoundError: The topic does not exist.
            AuthorizationError: One of the rights is missing.
            UnavailableError: The brokers did not answer in time.
        """
        topic = needed.topic or ""
        held = self.rights(topic)
        lacking = () if held is None else tuple(right for right in needed.rights if right not in held)
        if lacking:
            doing = " and ".join(right.lower() for right in lacking)
            cannot = f"cannot {doing} topic {topic!r} on {self._log.servers}"
            raise right_missing(cannot, Needed(lacking, needed.topic, needed.group), self._log)

    def _described(self, topic: str, *, with_rights: bool = False) -> Any:  # noqa: ANN401 - the client library has no type hint
        request = Request(f"look up topic {topic!r}", on_topic(topic, Right.DESCRIBE), topic)
        return self._ask_for_one(
            request,
            lambda client, left_s: client.describe_topics(
                TopicCollection([topic]), include_authorized_operations=with_rights, request_timeout=left_s
            ),
        )

    def offsets(self, topic: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Look up the first and the next offset of all `partitions`.

        This takes two requests for each 256 partitions of a broker. With `committed_only` the end is the last stable
        offset, before which no transaction is open. Otherwise it is the offset of the next record.

        Raises:
            TopicNotFoundError: The topic or one of the partitions does not exist.
            AuthorizationError: DESCRIBE on the topic is missing.
            UnavailableError: The brokers did not answer in time, or a partition has no leader.
        """
        doing = f"look up the offsets of topic {topic!r}"
        return self._ask_for_offsets(doing, topic, partitions, _bounds, committed_only=committed_only)

    def offsets_at(
        self, topic: str, partitions: Iterable[int], at_ms: int, *, committed_only: bool = True
    ) -> dict[int, int]:
        """Look up the offset of each partition's first record with the timestamp `at_ms` (unix ms) or a later one.

        A partition without such a record is not in the result. With `committed_only` only records before the first open
        transaction count. Raises as `offsets`.
        """
        doing = f"look up the offsets of topic {topic!r} at a time"
        return self._ask_for_offsets(
            doing,
            topic,
            partitions,
            lambda read, wanted: _first_at(read, wanted, at_ms),
            committed_only=committed_only,
        )

    def _ask_for_offsets(
        self,
        doing: str,
        topic: str,
        partitions: Iterable[int],
        ask: Callable[["_Offsets", Sequence[int]], dict[int, T]],
        *,
        committed_only: bool,
    ) -> dict[int, T]:
        wanted = sorted(set(partitions))
        if not wanted:
            return {}
        return self._ask_reader(
            Request(doing, on_topic(topic, Right.DESCRIBE), topic),
            lambda reader, until_s: ask(partial(reader.offsets, topic, until_s=until_s), wanted),
            committed_only=committed_only,
        )

    def _ask_reader(self, request: Request, question: Callable[[OffsetReader, float], T], *, committed_only: bool) -> T:
        """Call `question` with a reader of offsets and the deadline (monotonic seconds); retry it as `_ask`."""

        def look_up(_: AdminClient, left_s: float) -> T:
            reader = self._reader(committed_only=committed_only)
            try:
                return question(reader, time.monotonic() + left_s)
            except KafkaException:
                if (reason := reader.log.reason) is not None:
                    self._log.consider(reason)
                raise

        return self._ask(request, look_up)

    def _reader(self, *, committed_only: bool) -> OffsetReader:
        """Return the reader of offsets; create a new one if the last one is unusable."""
        with self._reader_lock:
            reader = self._readers.get(committed_only)
            if reader is not None and reader.is_spent:
                reader.close()
                reader = None
            if reader is None:
                client_id = f"{self._log.client_id}-offsets"
                reader = OffsetReader(self._connection, client_id=client_id, committed_only=committed_only)
            self._readers[committed_only] = reader
            return reader

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Look up the committed offsets (the next ones to read) of `group` in Kafka.

        A partition without a committed offset is not in the result.

        Raises:
            TopicNotFoundError: The topic does not exist.
            AuthorizationError: DESCRIBE on the group or on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        partitions = self.describe(topic).partitions
        with self._group(group) as held:
            return held.read(topic, partitions)

    def commit_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> str | None:
        """Set the committed offsets of `group` in Kafka without joining it, for tools that show lag.

        See protocol.md, section 6. This raises nothing.

        Returns:
            None if the offsets are set; otherwise one line that states why they are not.
        """
        if not offsets:
            return None
        try:
            with self._group(group) as held:
                held.commit(topic, offsets)
        except MarshalError as error:
            return f"the offsets of group {group!r} in Kafka were not updated (only lag tools read them): {error}"
        return None

    def has_consumers(self, group: str) -> bool:
        """Return whether `group` has active Kafka consumers; false if it does not exist or this user may not see it.

        Raises:
            UnavailableError: Not all brokers answered in time.
        """
        request = Request("list the consumer groups", Needed((Right.DESCRIBE,), group=group))

        def states(client: AdminClient, left_s: float) -> set[ConsumerGroupState]:
            listed = result(client.list_consumer_groups(request_timeout=left_s), left_s)
            if listed.errors:
                raise KafkaException(listed.errors[0])
            return {consumers.state for consumers in listed.valid if consumers.group_id == group}

        return not self._ask(request, states) <= {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD}

    @contextlib.contextmanager
    def _group(self, group: str) -> Iterator[GroupOffsets]:
        """Lend the client of a group. The last usable client is kept for the next call."""
        with self._borrowed_client() as client:
            self._reach(client)
        with self._group_lock:
            held, self._held = self._held, None
            if held is not None and held.group != group:
                held.close()
                held = None
            held = held or GroupOffsets(self._connection, group, client_id=f"{self._log.client_id}-group")
            try:
                yield held
            finally:
                if held.is_spent:
                    held.close()
                else:
                    self._held = held

    def settings(self, topic: str) -> dict[str, str]:
        """Look up all settings of a topic, including the broker's defaults and without secret settings.

        Raises:
            TopicNotFoundError: The topic does not exist.
            AuthorizationError: DESCRIBE_CONFIGS on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        request = Request(f"look up the settings of topic {topic!r}", on_topic(topic, Right.DESCRIBE_CONFIGS), topic)
        resource = _API.ConfigResource(_API.ResourceType.TOPIC, topic)
        entries = self._ask_for_one(
            request, lambda client, left_s: client.describe_configs([resource], request_timeout=left_s)
        )
        return {name: entry.value for name, entry in entries.items() if entry.value is not None}

    def create(self, topic: str, partitions: int, replication: int, settings: Mapping[str, str] | None = None) -> bool:
        """Create a topic, and wait until all its partitions have a leader.

        The wait may be 50 ms for each partition longer than that of other requests.

        Returns:
            Whether the topic was created; false if it existed already. An existing topic is not changed.

        Raises:
            ConfigurationError: The broker rejects the name, a number or a setting.
            AuthorizationError: CREATE on the topic or the cluster, or DESCRIBE on the topic, is missing.
            UnavailableError: The brokers did not answer in time.
        """
        request = Request(
            f"create topic {topic!r} with {partitions} partitions and replication {replication}",
            on_topic(topic, Right.CREATE),
            topic,
        )
        new = _API.NewTopic(
            topic, num_partitions=partitions, replication_factor=replication, config=dict(settings or {})
        )

        def create(client: AdminClient, left_s: float) -> bool:
            try:
                only(client.create_topics([new], request_timeout=left_s, operation_timeout=left_s), left_s)
            except KafkaException as error:
                if error_in(error).code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    return False
                raise
            return True

        created = self._ask(request, create)
        self._await_usable(topic, partitions if created else 1)
        return created

    def delete(self, topic: str) -> None:
        """Delete a topic and wait until it no longer exists.

        Raises:
            TopicNotFoundError: The topic does not exist.
            ConfigurationError: The broker does not allow topics to be deleted.
            AuthorizationError: DELETE on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        request = Request(f"delete topic {topic!r}", on_topic(topic, Right.DELETE), topic)
        self._ask_for_one(
            request,
            lambda client, left_s: client.delete_topics([topic], request_timeout=left_s, operation_timeout=left_s),
        )
        _await(lambda: self._is_missing(topic), f"topic {topic!r} was deleted, but still exists", self._timeout_s)

    def broker_count(self) -> int:
        """Return the number of brokers of the cluster that are alive.

        Raises:
            UnavailableError: The brokers did not answer in time, or the answer lists no broker.
        """
        return len(self._broker_ids())

    def _broker_ids(self) -> list[int]:
        """Return the ids of the brokers."""
        return self._ask(Request("look up the brokers", Needed((Right.DESCRIBE,))), list_brokers)

    def _await_usable(self, topic: str, partitions: int) -> None:
        request = Request(f"check whether topic {topic!r} can be used", on_topic(topic, Right.DESCRIBE), topic)
        wanted = range(partitions)

        def is_usable() -> bool:
            reader = self._reader(committed_only=True)
            reader.forget_leaders(topic)
            try:
                _bounds(_offsets(reader, topic, self._timeout_s), wanted)
            except KafkaException as raised:
                error = error_in(raised)
                if error.code() not in PASSING | MISSING:
                    raise self._failure(request, error) from None
                return False
            except (TopicNotFoundError, TimeoutError):
                return False
            return True

        within_s = self._timeout_s + partitions * _PER_PARTITION_S
        with self._borrowed_client():
            _await(is_usable, f"topic {topic!r} exists, but not all its partitions have a leader", within_s)

    def _is_missing(self, topic: str) -> bool:
        try:
            self._described(topic)
        except TopicNotFoundError:
            return True
        return False

    def _ask(self, request: Request, question: Callable[[AdminClient, float], T]) -> T:
        """Call `question` with the client and the remaining seconds; retry it after temporary failures."""
        deadline = time.monotonic() + self._timeout_s
        with self._borrowed_client() as client:
            self._reach(client)
            while True:
                try:
                    answer = question(client, max(0.1, deadline - time.monotonic()))
                except KafkaException as raised:
                    error = error_in(raised)
                    if error.code() == KafkaError._PARTIAL:  # noqa: SLF001 - a public code of the client library
                        self._log.consider(NO_BROKERS)
                    if error.code() not in PASSING or time.monotonic() + _PAUSE_S >= deadline:
                        raise self._failure(request, error) from None
                except TimeoutError:
                    raise self._failure(request, KafkaError(KafkaError._TIMED_OUT)) from None  # noqa: SLF001
                else:
                    client.poll(0)
                    self._log.clear()
                    return answer
                time.sleep(_PAUSE_S)
                self._require_open()

    def _ask_for_one(
        self, request: Request, question: "Callable[[AdminClient, float], Mapping[Any, Future[Any]]]"
    ) -> Any:  # noqa: ANN401 - the client library has no type hint
        return self._ask(request, lambda client, left_s: only(question(client, left_s), left_s))

    @contextlib.contextmanager
    def _borrowed_client(self) -> Iterator[AdminClient]:
        """Lend the client. If `close` is called meanwhile, the last user releases it, because that frees its memory."""
        with self._client_lock:
            client = self._require_open()
            self._borrowers += 1
        try:
            yield client
        finally:
            with self._client_lock:
                self._borrowers -= 1
                is_last = self._client is None and self._borrowers == 0
            if is_last:
                self._let_go(client)

    def _let_go(self, client: AdminClient) -> None:
        close_client(client, self._log)
        with self._reader_lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _require_open(self) -> AdminClient:
        client = self._client
        if client is None:
            raise RuntimeError(_CLOSED)
        return client

    def _reach(self, client: AdminClient) -> None:
        if not self._reached:
            reach(client, self._log, timeout_s=self._timeout_s)
            self._reached = True

    def _failure(self, request: Request, error: KafkaError) -> MarshalError:
        if self._client is not None:
            self._client.poll(0)
        return failure(request, error, self._log, self._timeout_s)


def _await(condition: Callable[[], bool], otherwise: str, within_s: float) -> None:
    deadline, pause_s = time.monotonic() + within_s, _PAUSE_S
    while not condition():
        if time.monotonic() > deadline:
            raise UnavailableError(f"{otherwise} after {within_s:g} s; check the brokers' logs")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_Offsets = Callable[..., list[dict[int, int]]]
"""`OffsetReader.offsets` with the topic and the deadline filled in."""


def _offsets(reader: OffsetReader, topic: str, left_s: float) -> _Offsets:
    return partial(reader.offsets, topic, until_s=time.monotonic() + left_s)


def _bounds(offsets: _Offsets, partitions: Sequence[int]) -> dict[int, OffsetBounds]:
    starts, ends = offsets(partitions, OFFSET_BEGINNING, OFFSET_END)
    # Retention may run between the two answers.
    return {partition: OffsetBounds(start, max(start, ends[partition])) for partition, start in starts.items()}


def _first_at(offsets: _Offsets, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
    """Return the first offsets of that time or a later one.

    While a leader is elected, a broker may wrongly answer that there is none. So that answer must come twice, with an
    answer of the partition's leader in between.
    """

    def look_up(wanted: Sequence[int]) -> dict[int, int]:
        (found,) = offsets(wanted, max(0, at_ms), least=NONE_AT)
        return {partition: offset for partition, offset in found.items() if offset != NONE_AT}

    first = look_up(partitions)
    if missing := [partition for partition in partitions if partition not in first]:
        offsets(missing, OFFSET_END)
        first |= look_up(missing)
    return first


def result(future: "Future[Any]", left_s: float) -> Any:  # noqa: ANN401 - the client library has no type hint
    """Wait for an answer one second longer than `left_s`, so that the client's own timeout comes first."""
    return future.result(timeout=left_s + 1)


def only(futures: Mapping[Any, "Future[Any]"], left_s: float) -> Any:  # noqa: ANN401 - as above
    """Wait for the answer to a request about a single resource."""
    (future,) = futures.values()
    return result(future, left_s)


def authorized(described: Any) -> frozenset[Right] | None:  # noqa: ANN401 - as above
    """Return the rights in an answer of `describe_topics`; None if the brokers did not report them."""
    if described.authorized_operations is None:
        return None
    names = {operation.name for operation in described.authorized_operations}
    return frozenset(right for right in Right if right.name in names)


def url_safe(topic_id: Uuid) -> str:
    """Return a topic's id as the log has it (protocol.md, section 1.3)."""
    return str(topic_id).translate(_URL_SAFE).rstrip("=")


_URL_SAFE: Final = str.maketrans("+/", "-_")
