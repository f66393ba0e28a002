"""Run the election rules of `rules` with a consumer group: a member that publishes beats and reads them back."""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any, Final, Self

from confluent_kafka import OFFSET_END, Consumer, KafkaError, Message, TopicPartition

from marshal_dagster._internal.texts import first_few
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.election.rules import Beat, Candidacy, Event, Term, Timing
from marshal_dagster.errors import MarshalError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.acls import Needed, Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import close_client
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import MISSING, Request, failure

logger = logging.getLogger(__name__)

CLIENT_ID: Final = "marshal-dagster-elector"
LEADER_SETTINGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "3600000",
    "segment.bytes": "1048576",
    "unclean.leader.election.enable": "false",
}
"""The settings with which a leader topic is created; only the newest beats are needed."""

_SESSION_MS: Final = 6_000
"""The shortest session timeout that brokers allow by default. The group keeps a dead leader's partition that long."""
_LASTING: Final = frozenset(
    {
        *MISSING,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)
"""Error codes that remain until an operator fixes their cause."""
_LATE_AFTER_DEADLINES: Final = 2
"""A member that owns a partition and leads only after more deadlines than this cannot write or read its beats."""
_LONGEST_REST_S: Final = 5.0
_CLOSE_WITHIN_S: Final = 10.0
_MOST_SHOWN: Final = 10

_LOOK_AGAIN_S: Final = 1.0
"""While `is_alive` returns false, it is called again after this time."""

Listener = Callable[[int, Event], None]
"""Called with the partition and the event when a term starts or ends."""


class Elector:
    """A member of an election, with a thread of its own: a candidate in each partition that the group assigns to it.

    A member that leads a partition may act as long as `leads` returns true. `failure` is the error that keeps the
    member from taking part at present, or None.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        group: str,
        *,
        timing: Timing | None = None,
        listener: Listener = lambda _partition, _event: None,
        clock: Clock | None = None,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Set the member up. It connects when it is entered as a context manager.

        Args:
            connection: How to reach the cluster.
            topic: The leader topic.
            group: The consumer group of the members.
            timing: The deadline and the poll interval.
            listener: Called in the member's thread when a term starts or ends.
            clock: The clock that measures the deadline.
            is_alive: Returns whether the member's work makes progress. While it returns false, because the work hangs,
                the member leaves the group and another member can lead.
        """
        self.topic, self.group = topic, group
        self.failure: MarshalError | None = None
        self._connection = connection
        self._timing = timing or Timing()
        self._listener = listener
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._candidacies: dict[int, Candidacy] = {}
        self._is_alive = is_alive
        self._stop = threading.Event()
        self._aside_until_ms = 0.0
        self._not_delivered: KafkaError | None = None
        """Why the last beat was not stored; None if it was."""
        self._thread: threading.Thread | None = None
        self._alive_at_s = time.monotonic()

    def __enter__(self) -> Self:
        """Check the rights on the leader topic and join the group.

        Raises:
            TopicNotFoundError: The leader topic does not exist.
            AuthorizationError: READ or WRITE on the leader topic is missing.
            UnavailableError: The brokers did not answer in time.
            ConfigurationError: The client library rejects the settings.
        """
        with Topics(self._connection) as topics:
            topics.require(on_topic(self.topic, Right.READ, Right.WRITE))
        self._alive_at_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"elector {self.group}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group, so that another member can lead at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WITHIN_S)

    @property
    def idle_s(self) -> float:
        """How long the member's thread has done nothing, in seconds; 0 while there is no thread."""
        return 0.0 if self._thread is None or self._stop.is_set() else time.monotonic() - self._alive_at_s

    def term(self, partition: int = 0) -> Term | None:
        """Return the term in which this member leads a partition at present, or None."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            leads = candidacy is not None and candidacy.leads(self._clock.lease_ms())
            return candidacy.term if candidacy is not None and leads else None

    def leads(self, term: Term, partition: int = 0) -> bool:
        """Return whether this member still leads a partition in this term."""
        return self.term(partition) == term

    def may_have_successor(self, fence: int, partition: int = 0) -> bool:
        """Return whether another member may have started a term with this fence, as the leader topic shows."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            return candidacy is not None and candidacy.may_have_successor(fence)

    def wait_for_term(self, timeout_s: float, partition: int = 0) -> Term | None:
        """Wait at most `timeout_s` seconds until this member leads a partition; return the term, or None."""
        with self._changed:
            self._changed.wait_for(lambda: self.term(partition) is not None or self._stop.is_set(), timeout_s)
            return self.term(partition)

    def give_up(self, term: Term, reason: str, partition: int = 0) -> None:
        """End a term. If this member still owns the partition, it becomes a candidate for another term."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            if candidacy is not None and candidacy.term == term:
                self._report(partition, candidacy.give_up(self._clock.lease_ms(), reason))

    def step_down(self, term: Term, reason: str, for_s: float, partition: int = 0) -> None:
        """End a term and leave the group for `for_s` seconds, so that another member can try to lead."""
        with self._lock:
            if self.leads(term, partition):
                self._aside_until_ms = self._clock.lease_ms() + for_s * 1_000
            self.give_up(term, reason, partition)

    @property
    def _aside_s(self) -> float:
        least_s = 0.0 if self._is_alive() else _LOOK_AGAIN_S
        return max(least_s, (self._aside_until_ms - self._clock.lease_ms()) / 1_000)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._alive_at_s = time.monotonic()
            if (aside_s := self._aside_s) > 0:
                self._stop.wait(aside_s)
                continue
            try:
                self._take_part()
            except Exception as error:  # noqa: BLE001 - after any error the member joins the group again
                self._lose_all(f"the client failed: {error}")
                self._note_failure(error if isinstance(error, MarshalError) else UnavailableError(str(error)))
                self._stop.wait(min(self._timing.receive_deadline_ms / 1_000, _LONGEST_REST_S))

    def _take_part(self) -> None:
        """Take part in the group until the elector is stopped or the member must step aside."""
        consumer, log = self._consumer()
        producer, producer_log = clients.producer(
            self._connection, delivery_timeout_ms=round(self._timing.receive_deadline_ms), client_id=CLIENT_ID
        )
        poll_s = self._timing.poll_interval_ms / 1_000
        try:
            consumer.subscribe(
                [self.topic],
                on_assign=self._gain,
                on_revoke=lambda _, partitions: self._lose(partitions, "the group assigned it to another member"),
                on_lost=lambda _, partitions: self._lose(partitions, "the group considered this member dead"),
            )
            while not self._stop.is_set() and self._aside_s == 0:
                for message in consumer.consume(100, poll_s):
                    self._take(message, log)
                self._alive_at_s = time.monotonic()
                producer.poll(0)
                for partition, beat in self._due():
                    producer.produce(self.topic, beat.render(), partition=partition, on_delivery=self._delivered)
                self._note_if_late()
                if log.fatal or producer_log.fatal:
                    raise UnavailableError(f"election {self.group!r}: {log.fatal or producer_log.fatal}")
        finally:
            self._lose_all("this member leaves the group" if self._is_alive() else "the work of this member hangs")
            close_client(producer, producer_log)
            close_client(consumer, log)

    def _consumer(self) -> tuple[Consumer, clients.ClientLog]:
        settings: dict[str, Any] = {
            "group.id": self.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "latest",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": _SESSION_MS,
            "heartbeat.interval.ms": _SESSION_MS // 6,
            "max.poll.interval.ms": _SESSION_MS + round(self._timing.receive_deadline_ms),
            "isolation.level": "read_uncommitted",
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 50,
        }
        return clients.make_client(Consumer, self._connection, CLIENT_ID, settings)

    def _gain(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign([TopicPartition(given.topic, given.partition, OFFSET_END) for given in partitions])
        with self._lock:
            for partition in partitions:
                candidacy = Candidacy(self._timing, (str(uuid.uuid4()) for _ in count()))
                self._candidacies[partition.partition] = candidacy
                candidacy.gain(self._clock.lease_ms())
            if not self._candidacies:
                # The member is in the group and others own all partitions, so no beat can show that the error is over.
                self.failure = None

    def _lose(self, partitions: list[TopicPartition], reason: str) -> None:
        with self._lock:
            for taken in partitions:
                candidacy = self._candidacies.pop(taken.partition, None)
                if candidacy is not None:
                    self._report(taken.partition, candidacy.lose(reason))

    def _lose_all(self, reason: str) -> None:
        with self._lock:
            self._lose([TopicPartition(self.topic, partition) for partition in self._candidacies], reason)

    def _take(self, message: Message, log: clients.ClientLog) -> None:
        error = message.error()
        if error is not None:
            if error.code() in _LASTING:
                needed = Needed((Right.READ,), self.topic, self.group)
                request = Request(f"take part in election {self.group!r}", needed, self.topic)
                self._note_failure(failure(request, error, log, self._connection.timeout_s))
            return
        beat, partition, offset = Beat.parse(message.value()), message.partition(), message.offset()
        if beat is None or partition is None or offset is None:
            return
        with self._lock:
            candidacy = self._candidacies.get(partition)
            if candidacy is not None:
                self._report(partition, candidacy.receive(beat, offset, self._clock.lease_ms()))
            if not self._late():
                self.failure = None

    def _due(self) -> list[tuple[int, Beat]]:
        """End the terms whose deadline has passed, and return the beats that are due."""
        due = []
        with self._lock:
            for partition, candidacy in self._candidacies.items():
                events, beat = candidacy.tick(self._clock.lease_ms())
                self._report(partition, events)
                if beat is not None:
                    due.append((partition, beat))
        return due

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        self._not_delivered = error

    def _late(self) -> list[int]:
        """Return the partitions that this member owns and should lead by now."""
        now_ms, most_ms = self._clock.lease_ms(), _LATE_AFTER_DEADLINES * self._timing.receive_deadline_ms
        return sorted(number for number, own in self._candidacies.items() if own.waited_ms(now_ms) > most_ms)

    def _note_if_late(self) -> None:
        with self._lock:
            late = self._late()
        if late:
            reason = "" if self._not_delivered is None else f": {self._not_delivered.str()}"
            numbers = first_few(late, _MOST_SHOWN)
            self._note_failure(
                UnavailableError(
                    f"election {self.group!r}: this member cannot lead, because its records in topic {self.topic!r}, "
                    f"partition {numbers}, are not stored or not read back{reason}. Check that each partition has a "
                    "leader and as many in-sync replicas as min.insync.replicas requires"
                )
            )

    def _note_failure(self, error: MarshalError) -> None:
        if str(error) != str(self.failure):
            logger.warning("election %r: %s", self.group, error)
        self.failure = error

    def _report(self, partition: int, events: list[Event]) -> None:
        for event in events:
            logger.info("election %r, partition %d: %s", self.group, partition, event)
            self._listener(partition, event)
        if events:
            self._changed.notify_all()
