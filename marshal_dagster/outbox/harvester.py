"""The harvester of a process: takes part in the election of a leader, and publishes an outbox's rows while it leads.

It runs a `harvest.Harvest` per session, and starts a new session after each failure.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster._internal.health_server import FAILING_AFTER_S, IDLE_AFTER_S
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.election.rules import Term
from marshal_dagster.errors import ConfigurationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvest import Harvest, HarvestCounts, LeadershipLostError
from marshal_dagster.outbox.interfaces import BatchUnsettledError, PublisherFencedError, SessionSupersededError
from marshal_dagster.outbox.metrics import metrics_recorded
from marshal_dagster.outbox.options import DEFAULT_OPTIONS, HarvesterOptions
from marshal_dagster.outbox.schema import OutboxRegistration, OutboxTables, OutboxTarget
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.store import PostgresStore

if TYPE_CHECKING:
    from marshal_dagster.election.elector import Elector
    from marshal_dagster.outbox.publisher import KafkaPublisher

logger = logging.getLogger(__name__)

Leads = Callable[[], bool]

_LOOK_S: Final = 0.5
_SAFE_COPIES: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_HAND_OVER_AFTER_S: Final = 10.0
"""After failing for this long, a leader steps down, because another process may reach the services."""
_ASIDE_S: Final = 10.0
_LOOK_AT_ENDS_S: Final = 10.0
_CALM_S: Final = 120.0
"""How long a failed term counts as the present failure if no later turn succeeds.

This must be longer than the time until this harvester leads again. The checks of a standby do not find everything that
can fail while it leads, such as a missing right.
"""
_DRAIN_PATIENCE_S: Final = 300.0
_STOPPED_WITHIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class OutboxTopics:
    """The two topics by which the harvesters of an outbox coordinate.

    Example:
        ```python
        registration = OutboxTables(Database(dsn)).create()
        OutboxTopics.of(registration.uid).create(connection)
        ```
    """

    leader: str
    """The topic by which a leader is elected."""
    notes: str
    """The compacted topic with notes of the published rows."""

    @classmethod
    def of(cls, uid: str) -> "OutboxTopics":
        """Return the topics of an outbox.

        Args:
            uid: The unique id of the outbox, from its registration.

        Returns:
            The topics with their names.
        """
        from marshal_dagster.outbox.publisher import TOPIC_PREFIX

        return cls(f"{TOPIC_PREFIX}{uid}_leader", f"{TOPIC_PREFIX}{uid}_notes")

    def create(self, connection: KafkaConnection, replication: int | None = None) -> None:
        """Create the topics that are missing.

        Args:
            connection: The cluster.
            replication: The number of replicas; by default three, or the number of brokers if that is lower.

        Raises:
            ConfigurationError: A topic cannot be created with these settings.
            AuthorizationError: The user may not create the topics.
            UnavailableError: The brokers do not answer in time.
        """
        from marshal_dagster.election.elector import LEADER_SETTINGS
        from marshal_dagster.kafka.admin_client import Topics
        from marshal_dagster.kafka.topic_creation import create_and_warn
        from marshal_dagster.outbox.publisher import NOTES_SETTINGS

        with Topics(connection) as topics:
            copies = replication or min(_SAFE_COPIES, topics.broker_count())
            safe = {"min.insync.replicas": "2"} if copies >= _SAFE_COPIES else {}
            create_and_warn(topics, self.leader, 1, copies, {**LEADER_SETTINGS, **safe})
            create_and_warn(topics, self.notes, 1, copies, {**NOTES_SETTINGS, **safe}, required=("cleanup.policy",))


class _Progress:
    """Whether the rows of a drain become fewer: each row is published or set aside after a while."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._first: int | None = None
        self._since_s = time.monotonic()

    def check(self, outbox: str, first: int | None) -> None:
        """Raise `MarshalError` if `first`, the smallest id of the waiting rows, is the same for too long."""
        if first is None or first != self._first:
            self._first, self._since_s = first, time.monotonic()
        elif time.monotonic() - self._since_s > self._patience_s:
            raise MarshalError(
                f"outbox {outbox!r}: row {first} was neither published nor set aside within {self._patience_s:g} s. "
                "Look at the log of the harvester that leads (`marshal-dagster outbox status` names it), and at the "
                "rows that are set aside, then drain again"
            )


class Harvester:
    """A harvester, which publishes the rows of an outbox to Kafka while it leads.

    Start several harvesters for one outbox: one leads, the others stand by and take over. `run` and `drain` block until
    they are done or `stop` is called, by any thread or by a signal handler.

    Example:
        ```python
        harvester = Harvester(OutboxTables(Database(dsn)), connection)
        signal.signal(signal.SIGTERM, lambda *_: harvester.stop())
        harvester.run()
        ```
    """

    def __init__(
        self, tables: OutboxTables, connection: KafkaConnection, options: HarvesterOptions | None = None
    ) -> None:
        """Configure the harvester; it connects in `run` or `drain`.

        Args:
            tables: The outbox's tables.
            connection: The cluster to publish to.
            options: The options; by default those of `HarvesterOptions()`.
        """
        self.counts = HarvestCounts()
        """The numbers of rows, refusals and sessions since the start."""
        self.failure: MarshalError | None = None
        """The error of the last attempt to harvest or, on standby, of the last check; None if it succeeded."""
        self.term: Term | None = None
        """The term in which this harvester leads; None on standby."""
        self._tables = tables
        self._connection = connection
        self._options = options or DEFAULT_OPTIONS
        self._clock = SystemClock()
        self._cluster_id: str | None = None
        self._is_stopped = False
        self._has_started = False
        """Whether the database and Kafka have answered once."""
        self._alive_at_s = time.monotonic()
        self._elector_idle_s: Callable[[], float] = lambda: 0.0
        self._failing_from_s = self._failed_at_s = 0.0
        self._failed_term_at_s = -math.inf
        self._looked_at_s = time.monotonic()

    @property
    def name(self) -> str:
        """The outbox's name."""
        return self._tables.name

    @property
    def failing_s(self) -> float:
        """The time from the first to the last of its failures without a success between, in seconds; 0 without one."""
        return 0.0 if self.failure is None else self._failed_at_s - self._failing_from_s

    @property
    def idle_s(self) -> float:
        """How long the harvester's thread or that of its election has done nothing, in seconds.

        After a minute the harvester loses the leadership.
        """
        return max(time.monotonic() - self._alive_at_s, self._elector_idle_s())

    def health(self, failing_after_s: float = FAILING_AFTER_S) -> dict[str, Any]:
        """Return the state of this harvester, for health checks.

        Args:
            failing_after_s: After failing for this long, in seconds, it is not healthy.

        Returns:
            A report of JSON values. `live` is false if the thread hangs. `healthy` is false also if the harvester has
            failed for too long, and `ready` also until the database and Kafka have answered once. `outbox` is the
            outbox's name, and `role` is `leader` or `standby`. `failure` is the text of the present failure, or None.
            `failing_s` is the time between the first and the last failed attempt, and `idle_s` how long its thread has
            done nothing, in seconds. `published`, `parked` (rows set aside) and `sessions` are counts since the start.
        """
        idle_s, failing_s, failure = self.idle_s, self.failing_s, self.failure
        is_live = idle_s <= IDLE_AFTER_S
        is_healthy = is_live and failing_s <= failing_after_s
        return {
            "healthy": is_healthy,
            "live": is_live,
            "ready": is_healthy and self._has_started,
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
        """Make `run` and `drain` end after the present batch."""
        # This takes no lock, because a signal handler may have interrupted the thread that holds it.
        self._is_stopped = True

    def run(self) -> None:
        """Take part in the election, and harvest while it leads, until `stop` is called.

        After the start, unavailable services are retried, and `failure` has the error.

        Raises:
            ConfigurationError: The outbox does not exist, has another version, or a setting is unsafe.
            TopicNotFoundError: At the start: one of the outbox's topics does not exist.
            AuthorizationError: At the start: the user may not use one of these topics.
            UnavailableError: At the start: the database or the brokers do not answer.
        """
        self._alive_at_s = time.monotonic()
        registration = self._look_up()
        self._require_target(registration)
        self._take_part(registration, lambda: False)

    def drain(self, patience_s: float = _DRAIN_PATIENCE_S) -> int:
        """Harvest until all rows that exist now are published or set aside, by this harvester or another leader.

        Args:
            patience_s: After failing for this long, in seconds, the error is raised. It is also raised if the first row
                waits for longer, although nothing fails; the patience of `HarvestLimits` for topics is added then.

        Returns:
            The number of rows that this harvester has published.

        Raises:
            ConfigurationError: The outbox does not exist, has another version, or a setting is unsafe.
            TopicNotFoundError: One of the outbox's topics does not exist.
            AuthorizationError: The user may not use one of these topics.
            UnavailableError: The database or the brokers do not answer.
            MarshalError: Another error has lasted for `patience_s`, or a row waits without one.
        """
        self._alive_at_s = time.monotonic()
        registration, before = self._look_up(), self.counts.published
        self._require_target(registration)
        with closing(OutboxInspector(self._tables)) as backlog:
            last = backlog.last_id()
            progress = _Progress(patience_s + self._options.limits.topic_patience_s)

            def is_over() -> bool:
                if self.failure is not None and self.failing_s > patience_s:
                    raise self.failure
                try:
                    first = None if last is None else backlog.first_id(last)
                except UnavailableError as error:
                    self._note(error)
                    self._pause(_FIRST_PAUSE_S)
                    return False
                progress.check(self.name, first)
                return first is None

            self._take_part(registration, is_over)
        return self.counts.published - before

    def _take_part(self, registration: OutboxRegistration, is_over: Callable[[], bool]) -> None:
        try:
            elector = self._elector(registration)
            self._require_target(registration)
            self._elector_idle_s = lambda: elector.idle_s
            with metrics_recorded(self._tables, self.counts, lambda: self.term is not None), elector:
                self._has_started = True
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
            raise TopicNotFoundError(
                f"{error}; `marshal-dagster outbox init` creates the topics of an outbox"
            ) from None

    def _look_at_ends(self, elector: "Elector") -> None:
        """On standby, check every 10 s whether this harvester could take over.

        If that succeeds, the failure of a recent term remains.
        """
        if time.monotonic() - self._looked_at_s < _LOOK_AT_ENDS_S:
            return
        from marshal_dagster.kafka.admin_client import Topics

        try:
            self._require_target(self._look_up())
            with Topics(self._connection) as topics:
                topics.require(on_topic(elector.topic, Right.READ, Right.WRITE))
        except MarshalError as error:
            self._note(error)
        else:
            if elector.failure is not None or time.monotonic() - self._failed_term_at_s > _CALM_S:
                self._note(elector.failure)
        self._looked_at_s = time.monotonic()

    def _look_up(self, *, is_recorded: bool = False) -> OutboxRegistration:
        """Return the outbox's entry in the registry, after this harvester's target `is_recorded` if none was."""
        with self._tables.translated_errors(), self._tables.database.connect(is_one_transaction=True) as connection:
            if is_recorded:
                self._tables.record_target(connection, self._target())
            return self._tables.registration(connection)

    def _target(self) -> OutboxTarget:
        return OutboxTarget(self._cluster_id, str(self._options.partitioner))

    def _require_target(self, registration: OutboxRegistration) -> None:
        """Raise `ConfigurationError` if another harvester or a migration recorded another cluster or partitioner."""
        needed, own = registration.target, self._target()
        change = (
            "To change that, drain the outbox, stop its harvesters, then run `marshal-dagster outbox init "
            "--forget-target`"
        )
        if needed.partitioner not in {None, own.partitioner}:
            raise ConfigurationError(
                f"outbox {self.name!r}: its keys are placed by the partitioner {needed.partitioner!r}, but this "
                f"harvester has {own.partitioner!r}, so keys would lose their order. Start each harvester with "
                f"--partitioner {needed.partitioner} (`partitioner` of the resource). {change}"
            )
        if own.cluster_id is not None and needed.cluster_id not in {None, own.cluster_id}:
            raise ConfigurationError(
                f"outbox {self.name!r}: its harvesters publish to the Kafka cluster with the id "
                f"{needed.cluster_id!r}, but {self._connection.bootstrap_servers} has the id {own.cluster_id!r}, so "
                f"rows would be in one cluster or in the other. Correct the cluster of this harvester. {change}"
            )

    def _elector(self, registration: OutboxRegistration) -> "Elector":
        from marshal_dagster.election.elector import Elector
        from marshal_dagster.kafka.admin_client import Topics
        from marshal_dagster.kafka.transactions import check_notes_are_kept

        topics = OutboxTopics.of(registration.uid)
        with Topics(self._connection) as topics_client:
            check_notes_are_kept(topics_client, topics.notes)
            self._cluster_id = topics_client.cluster_id()
        return Elector(
            self._connection,
            topics.leader,
            f"marshal-outbox-{registration.uid}",
            timing=self._options.timing,
            is_alive=lambda: self.idle_s <= IDLE_AFTER_S,
        )

    def _ends(self, registration: OutboxRegistration) -> "tuple[PostgresStore, KafkaPublisher]":
        from marshal_dagster.outbox.publisher import KafkaPublisher

        publisher = KafkaPublisher(
            self._connection,
            registration.uid,
            OutboxTopics.of(registration.uid).notes,
            transaction_timeout_s=self._options.transaction_timeout_s,
            partitioner=self._options.partitioner,
        )
        return PostgresStore(self._tables), publisher

    def _harvest(self, store: PostgresStore, publisher: "KafkaPublisher", leads: Leads) -> Harvest:
        return Harvest(
            store,
            publisher,
            limits=self._options.limits,
            counts=self.counts,
            now_ms=self._clock.lease_ms,
            leads=leads,
        )

    def _lead(
        self, registration: OutboxRegistration, elector: "Elector", term: Term, is_over: Callable[[], bool]
    ) -> None:
        """Harvest while the term lasts, with a new session after each failure."""
        store, publisher = self._ends(registration)
        pause_s = _FIRST_PAUSE_S

        def leads() -> bool:
            # A turn of many attempts, each with a refused row, is slow, but it does not hang.
            self._alive_at_s = time.monotonic()
            return elector.leads(term) and not self._is_stopped

        try:
            self._require_target(self._look_up(is_recorded=True))
            while leads():
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
                    self._note_of_term(error)
                    if self.failing_s > _HAND_OVER_AFTER_S:
                        elector.step_down(term, str(error), _ASIDE_S)
                        return
                    self._pause(pause_s)
        except ConfigurationError:
            raise
        except MarshalError as error:
            self._note_of_term(error)
            elector.step_down(term, str(error), _ASIDE_S)
        finally:
            publisher.close()
            store.close()

    def _go_on(self, harvest: Harvest, store: PostgresStore, leads: Leads, is_over: Callable[[], bool]) -> None:
        next_check_s = 0.0
        while leads():
            taken = harvest.turn()
            self.failure, self._failed_term_at_s = None, -math.inf
            # On a busy outbox each turn takes rows, so a drain must also end between two of them.
            if taken and time.monotonic() < next_check_s:
                continue
            if is_over():
                break
            next_check_s = time.monotonic() + _LOOK_S
            if not taken:
                store.wait(self._options.poll_interval_s)
        harvest.finish()

    def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until `stop` is called."""
        until_s = time.monotonic() + seconds
        while not self._is_stopped and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _STOPPED_WITHIN_S))

    def _note_of_term(self, error: MarshalError) -> None:
        self._note(error)
        self._failed_term_at_s = time.monotonic()

    def _note(self, error: MarshalError | None) -> None:
        if error is not None and str(error) != str(self.failure):
            logger.warning("outbox %r: %s", self._tables.name, error)
        self._failed_at_s = time.monotonic()
        if self.failure is None:
            self._failing_from_s = self._failed_at_s
        self.failure = error
