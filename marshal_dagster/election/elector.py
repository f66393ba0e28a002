"""A member of an election over Kafka: the rules of `rules`, driven by a consumer group."""

import logging
import threading
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any, Final, Self

from confluent_kafka import OFFSET_END, Consumer, KafkaError, Message, TopicPartition

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.election.rules import Beat, Candidacy, Event, Term, Timing
from marshal_dagster.errors import MarshalError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.acls import Needed, Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import checked_settings, close_client
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
"""What a leader topic is made with: only the newest beats are of use."""

_SESSION_MS: Final = 6_000
"""The least that brokers allow by default: so long a dead leader's partition is kept for it."""
_LASTING: Final = frozenset({*MISSING, KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED})
_CLOSE_WITHIN_S: Final = 10.0

_LOOK_AGAIN_S: Final = 1.0

Listener = Callable[[int, Event], None]


class Elector:
    """Stands for leader in each partition of a topic that the group gives it; has a thread of its own.

    Who leads a partition may act until `leads` says no. `failure` is why it cannot stand, as long as it cannot.
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
        """Connect to nothing yet; `listener` receives terms that begin and end, in the elector's thread.

        While `is_alive` says no, as of work that hangs, it is not in the group: another leads.
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
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Join the group.

        Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`, `ConfigurationError`.
        """
        with Topics(self._connection) as topics:
            topics.require(on_topic(self.topic, Right.READ, Right.WRITE))
        self._thread = threading.Thread(target=self._run, name=f"elector {self.group}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group, so that another leads at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WITHIN_S)

    def term(self, partition: int = 0) -> Term | None:
        """Give the term in which this member leads a partition, if it does."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            leads = candidacy is not None and candidacy.leads(self._clock.lease_ms())
            return candidacy.term if candidacy is not None and leads else None

    def leads(self, term: Term, partition: int = 0) -> bool:
        """Tell whether a term still holds."""
        return self.term(partition) == term

    def may_have_successor(self, fence: int, partition: int = 0) -> bool:
        """Return whether another member may have begun a term with this fence, as the leader topic shows."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            return candidacy is not None and candidacy.may_have_successor(fence)

    def wait_for_term(self, timeout_s: float, partition: int = 0) -> Term | None:
        """Wait until this member leads a partition, `timeout_s` seconds at the most."""
        with self._changed:
            self._changed.wait_for(lambda: self.term(partition) is not None or self._stop.is_set(), timeout_s)
            return self.term(partition)

    def give_up(self, term: Term, reason: str, partition: int = 0) -> None:
        """End a term; whoever has the partition then stands for another."""
        with self._lock:
            candidacy = self._candidacies.get(partition)
            if candidacy is not None and candidacy.term == term:
                self._report(partition, candidacy.give_up(self._clock.lease_ms(), reason))

    def step_down(self, term: Term, reason: str, for_s: float, partition: int = 0) -> None:
        """End a term and leave the group for `for_s` seconds, so that another leads who may fare better."""
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
            if (aside_s := self._aside_s) > 0:
                self._stop.wait(aside_s)
                continue
            try:
                self._stand()
            except Exception as error:  # noqa: BLE001 - whatever it is, it stands again
                self._lose_all(f"the client failed: {error}")
                self._note_failure(error if isinstance(error, MarshalError) else UnavailableError(str(error)))
                self._stop.wait(self._timing.receive_deadline_ms / 1_000)

    def _stand(self) -> None:
        """Be a member of the group until the end."""
        consumer, log = self._consumer()
        producer, producer_log = clients.producer(
            self._connection, delivery_timeout_ms=round(self._timing.receive_deadline_ms), client_id=CLIENT_ID
        )
        poll_s = self._timing.poll_interval_ms / 1_000
        try:
            consumer.subscribe(
                [self.topic],
                on_assign=self._gain,
                on_revoke=lambda _, partitions: self._lose(partitions, "the group has given it to another"),
                on_lost=lambda _, partitions: self._lose(partitions, "the group took this member for dead"),
            )
            while not self._stop.is_set() and self._aside_s == 0:
                for message in consumer.consume(100, poll_s):
                    self._take(message, log)
                producer.poll(0)
                for partition, beat in self._due():
                    producer.produce(self.topic, beat.render(), partition=partition)
                if log.fatal or producer_log.fatal:
                    raise UnavailableError(f"election {self.group!r}: {log.fatal or producer_log.fatal}")
        finally:
            self._lose_all("it leaves the group" if self._is_alive() else "its work hangs")
            close_client(producer, producer_log)
            close_client(consumer, log)

    def _consumer(self) -> tuple[Consumer, clients.ClientLog]:
        log = clients.ClientLog(CLIENT_ID, self._connection.bootstrap_servers, self._connection)
        settings: dict[str, Any] = {
            **self._connection.librdkafka(),
            "client.id": CLIENT_ID,
            "group.id": self.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "latest",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": _SESSION_MS,
            "heartbeat.interval.ms": _SESSION_MS // 6,
            "max.poll.interval.ms": _SESSION_MS + round(self._timing.receive_deadline_ms),
            "allow.auto.create.topics": False,
            "isolation.level": "read_uncommitted",
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 50,
            **log.callbacks(),
        }
        with checked_settings():
            return Consumer(settings), log

    def _gain(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign([TopicPartition(given.topic, given.partition, OFFSET_END) for given in partitions])
        with self._lock:
            for partition in partitions:
                candidacy = Candidacy(self._timing, (str(uuid.uuid4()) for _ in count()))
                self._candidacies[partition.partition] = candidacy
                candidacy.gain(self._clock.lease_ms())
            if not self._candidacies:
                # It is in the group, and others have all: it will hear no beat by which it would know.
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
                request = Request(f"stand in election {self.group!r}", needed, self.topic)
                self._note_failure(failure(request, error, log, self._connection.timeout_s))
            return
        beat, partition, offset = Beat.parse(message.value()), message.partition(), message.offset()
        if beat is None or partition is None or offset is None:
            return
        with self._lock:
            self.failure = None
            candidacy = self._candidacies.get(partition)
            if candidacy is not None:
                self._report(partition, candidacy.receive(beat, offset, self._clock.lease_ms()))

    def _due(self) -> list[tuple[int, Beat]]:
        """Let time pass, and give the beats that are due."""
        due = []
        with self._lock:
            for partition, candidacy in self._candidacies.items():
                events, beat = candidacy.tick(self._clock.lease_ms())
                self._report(partition, events)
                if beat is not None:
                    due.append((partition, beat))
        return due

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
