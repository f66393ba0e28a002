"""The harvester as a process has it: stands for leader, and harvests while it leads."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from marshal_dagster._internal.health_server import FAILING_AFTER_S, IDLE_AFTER_S
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.election.elector import LEADER_SETTINGS, Elector
from marshal_dagster.election.rules import Term
from marshal_dagster.errors import ConfigurationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.transactions import check_notes_are_kept
from marshal_dagster.outbox.harvest import Harvest, HarvestCounts, LeadershipLostError
from marshal_dagster.outbox.interfaces import BatchUnsettledError, PublisherFencedError, SessionSupersededError
from marshal_dagster.outbox.metrics import metrics_recorded
from marshal_dagster.outbox.options import DEFAULT_OPTIONS, HarvesterOptions
from marshal_dagster.outbox.publisher import NOTES_SETTINGS, KafkaPublisher
from marshal_dagster.outbox.schema import OutboxRegistration, OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.store import PostgresStore

logger = logging.getLogger(__name__)

Leads = Callable[[], bool]

_LOOK_S: Final = 0.5
_SAFE_COPIES: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_HAND_OVER_AFTER_S: Final = 10.0
"""A leader that has failed for so long leaves it to another, who may reach what this one does not."""
_ASIDE_S: Final = 10.0
_LOOK_AT_ENDS_S: Final = 10.0
_DRAIN_PATIENCE_S: Final = 300.0
_STOPPED_WITHIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class OutboxTopics:
    """The topics behind an outbox: one to elect a harvester by, one for the notes of what is published."""

    leader: str
    notes: str

    @classmethod
    def of(cls, uid: str) -> "OutboxTopics":
        """Give those of an outbox, by its uid."""
        return cls(f"__marshal_outbox_{uid}_leader", f"__marshal_outbox_{uid}_notes")

    def create(self, connection: KafkaConnection, replication: int | None = None) -> None:
        """Make what is missing; by default with three replicas, or as many as there are brokers.

        Raises `AuthorizationError`, `UnavailableError`, `ConfigurationError`.
        """
        with Topics(connection) as topics:
            copies = replication or min(_SAFE_COPIES, topics.broker_count())
            safe = {"min.insync.replicas": "2"} if copies >= _SAFE_COPIES else {}
            topics.create(self.leader, 1, copies, {**LEADER_SETTINGS, **safe})
            topics.create(self.notes, 1, copies, {**NOTES_SETTINGS, **safe})


class Harvester:
    """Publishes an outbox's rows while it leads; several of one outbox stand by for each other.

    `run` and `drain` block until `stop`, which any thread or a signal's handler may call.
    """

    def __init__(
        self,
        tables: OutboxTables,
        connection: KafkaConnection,
        options: HarvesterOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Connect to nothing yet."""
        self.counts = HarvestCounts()
        self.failure: MarshalError | None = None
        """What the last attempt to harvest, or to reach both ends while it stands by, failed with."""
        self.term: Term | None = None
        """In which this harvester leads."""
        self._tables = tables
        self._connection = connection
        self._options = options or DEFAULT_OPTIONS
        self._clock = clock or SystemClock()
        self._is_stopped = False
        self._alive_at_s = time.monotonic()
        self._failing_from_s = 0.0
        self._looked_at_s = time.monotonic()

    @property
    def name(self) -> str:
        """The outbox's name."""
        return self._tables.name

    @property
    def failing_s(self) -> float:
        """For how many seconds `failure` has been there; 0 without one."""
        return 0.0 if self.failure is None else time.monotonic() - self._failing_from_s

    @property
    def idle_s(self) -> float:
        """For how many seconds its thread has done nothing, not even looked: after a minute another one leads."""
        return time.monotonic() - self._alive_at_s

    def health(self, failing_after_s: float = FAILING_AFTER_S) -> dict[str, Any]:
        """Tell how it is; `healthy` unless its thread hangs, or it has failed for `failing_after_s` seconds."""
        idle_s, failing_s, failure = self.idle_s, self.failing_s, self.failure
        return {
            "healthy": idle_s <= IDLE_AFTER_S and failing_s <= failing_after_s,
            "outbox": self.name,
            "role": "standby" if self.term is None else "leader",
            "failure": None if failure is None else str(failure),
            "failing_s": round(failing_s, 3),
            "idle_s": round(idle_s, 3),
            "published": self.counts.published,
            "parked": self.counts.parked,
            "sessions": self.counts.sessions,
        }

    def stop(self) -> None:
        """Have `run` and `drain` end after the batch that is under way."""
        # No lock: a signal's handler may have interrupted who holds it.
        self._is_stopped = True

    def run(self) -> None:
        """Stand for leader, and harvest while it leads, until it is stopped.

        Raises `ConfigurationError`; `TopicNotFoundError`, `AuthorizationError` and `UnavailableError` at the beginning
        only: later it tries again, and `failure` is what it fails with.
        """
        self._alive_at_s = time.monotonic()
        self._stand(self._look_up(), lambda: False)

    def drain(self, patience_s: float = _DRAIN_PATIENCE_S) -> int:
        """Harvest until what is there now is published or set aside, by this harvester or another one that leads.

        Gives how many rows this one has published. Raises as `run`, and what it has failed with for `patience_s`.
        """
        self._alive_at_s = time.monotonic()
        registration, before = self._look_up(), self.counts.published
        with closing(OutboxInspector(self._tables)) as backlog:
            last = backlog.last_id()

            def is_over() -> bool:
                if self.failure is not None and self.failing_s > patience_s:
                    raise self.failure
                try:
                    return last is None or backlog.is_empty_up_to(last)
                except UnavailableError as error:
                    self._note(error)
                    self._pause(_FIRST_PAUSE_S)
                    return False

            self._stand(registration, is_over)
        return self.counts.published - before

    def _stand(self, registration: OutboxRegistration, is_over: Callable[[], bool]) -> None:
        try:
            elector = self._elector(registration)
            with metrics_recorded(self._tables, self.counts, lambda: self.term is not None), elector:
                while not self._is_stopped and not is_over():
                    self._alive_at_s = time.monotonic()
                    self.term = elector.wait_for_term(_LOOK_S)
                    if self.term is None:
                        self._look_at_ends(elector)
                        continue
                    try:
                        self._lead(registration, elector, self.term, is_over)
                    finally:
                        self.term = None
        except TopicNotFoundError as error:
            raise TopicNotFoundError(f"{error}; `marshal-dagster outbox init` makes the topics of an outbox") from None

    def _look_at_ends(self, elector: Elector) -> None:
        """Find out now and then whether this harvester could take over, while it stands by."""
        if time.monotonic() - self._looked_at_s < _LOOK_AT_ENDS_S:
            return
        try:
            self._look_up()
            with Topics(self._connection) as topics:
                topics.require(on_topic(elector.topic, Right.READ, Right.WRITE))
        except MarshalError as error:
            self._note(error)
        else:
            self._note(elector.failure)
        self._looked_at_s = time.monotonic()

    def _look_up(self) -> OutboxRegistration:
        with self._tables.telling(), self._tables.database.connect(is_one_transaction=True) as connection:
            return self._tables.registration(connection)

    def _elector(self, registration: OutboxRegistration) -> Elector:
        topics = OutboxTopics.of(registration.uid)
        with Topics(self._connection) as asking:
            check_notes_are_kept(asking, topics.notes)
        return Elector(
            self._connection,
            topics.leader,
            f"marshal-outbox-{registration.uid}",
            timing=self._options.timing,
            is_alive=lambda: self.idle_s <= IDLE_AFTER_S,
        )

    def _ends(self, registration: OutboxRegistration) -> tuple[PostgresStore, KafkaPublisher]:
        publisher = KafkaPublisher(
            self._connection,
            registration.uid,
            OutboxTopics.of(registration.uid).notes,
            transaction_timeout_s=self._options.transaction_timeout_s,
            partitioner=self._options.partitioner,
        )
        return PostgresStore(self._tables), publisher

    def _harvest(self, store: PostgresStore, publisher: KafkaPublisher, leads: Leads) -> Harvest:
        return Harvest(
            store,
            publisher,
            limits=self._options.limits,
            counts=self.counts,
            now_ms=self._clock.lease_ms,
            leads=leads,
        )

    def _lead(
        self, registration: OutboxRegistration, elector: Elector, term: Term, is_over: Callable[[], bool]
    ) -> None:
        """Harvest for as long as the term holds, session after session."""
        store, publisher = self._ends(registration)
        pause_s = _FIRST_PAUSE_S

        def leads() -> bool:
            return elector.leads(term) and not self._is_stopped

        try:
            while leads():
                self._alive_at_s = time.monotonic()
                harvest = self._harvest(store, publisher, leads)
                try:
                    harvest.begin()
                    self._go_on(harvest, store, leads, is_over)
                    if is_over():
                        return
                except LeadershipLostError:
                    pass
                except (SessionSupersededError, PublisherFencedError, BatchUnsettledError, UnavailableError) as error:
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s) if self.failure else _FIRST_PAUSE_S
                    self._note(error)
                    if self.failing_s > _HAND_OVER_AFTER_S:
                        elector.step_down(term, str(error), _ASIDE_S)
                        return
                    self._pause(pause_s)
        except ConfigurationError:
            raise
        except MarshalError as error:
            self._note(error)
            elector.step_down(term, str(error), _ASIDE_S)
        finally:
            publisher.close()
            store.close()

    def _go_on(self, harvest: Harvest, store: PostgresStore, leads: Leads, is_over: Callable[[], bool]) -> None:
        while leads():
            self._alive_at_s = time.monotonic()
            taken = harvest.turn()
            self.failure = None
            if taken:
                continue
            if is_over():
                break
            store.wait(self._options.poll_interval_s)
        harvest.finish()

    def _pause(self, seconds: float) -> None:
        """Let time pass, or less of it when it is stopped."""
        until_s = time.monotonic() + seconds
        while not self._is_stopped and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _STOPPED_WITHIN_S))

    def _note(self, error: MarshalError | None) -> None:
        if error is not None and str(error) != str(self.failure):
            logger.warning("outbox %r: %s", self._tables.name, error)
        if self.failure is None:
            self._failing_from_s = time.monotonic()
        self.failure = error
