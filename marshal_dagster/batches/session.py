"""Creates the claimed batches of one process, with the connections and the world state that they share."""

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from marshal_dagster.batches.batch import BatchObserver, ClaimedBatch
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.record_reader import KafkaReader, RecordReader
from marshal_dagster.batches.request import Advise, BatchRequest
from marshal_dagster.coordination.claimer import Claimer, Member, assume_alive, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_settings import check_settings
from marshal_dagster.coordination.heartbeats import ReasonToStop
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC, CoordinationLog
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import DEFAULT_TIMEOUT_S, KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import (
    DEFAULT_SETTINGS,
    NO_NAME,
    DeliveryMode,
    GroupSettings,
    coordination_partition,
    is_name,
)
from marshal_dagster.protocol.open_plans import OpenPlan, open_plans
from marshal_dagster.protocol.state import Owner, enables_ranges
from marshal_dagster.sinks import Sink

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

logger = logging.getLogger(__name__)

Announce = Callable[[Sequence[ClaimedRange]], None]
"""Called with the ranges of an at-most-once batch just before they are committed, because then they may be lost."""


def announce_to_log(ranges: Sequence[ClaimedRange]) -> None:
    """Log the ranges that are about to be committed."""
    logger.info("about to commit before processing: %s", ", ".join(str(range_) for range_ in ranges))


@dataclass(slots=True, kw_only=True)
class BatchSession:
    """Creates the claimed batches of one process, which share connections and the state of the coordination log.

    Batches may run one after another. Open a session with `open`, and use it in a `with` block or call `close`.

    Raises:
        ConfigurationError: A member cannot keep the settings.

    Example:
        ```python
        with BatchSession.open(KafkaConnection(bootstrap_servers="localhost:9092"), "shops") as session:
            for batch in session.batches(BatchRequest(topic="orders"), max_batches=10):
                with batch:
                    if batch.idle is None:
                        process(batch.read(spark))
        ```
    """

    log: CoordinationLog
    """The coordination log."""
    data: "Topics"
    """The topics of the data cluster."""
    connection: "KafkaConnection"
    """The connection to the data cluster."""
    group: str
    """The group for which the batches claim."""
    client: str
    """The client id, which tools show."""
    run_id: str
    """The id of the run; each instance id begins with it."""
    settings: GroupSettings
    """The settings of the group."""
    is_dead: Callable[[Owner], bool] = assume_alive
    """Returns whether an owner is known to be dead, because its run is over. Claims of dead owners are revoked."""
    announce: Announce = announce_to_log
    """Called in at most once just before ranges are committed; by default it logs them."""
    reasons_to_stop: Sequence[ReasonToStop] = ()
    """Functions that return why the work must stop, or None. They are called four times per heartbeat interval."""
    clock: Clock | None = None
    """The clock of the member; by default that of this machine."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long to wait for an answer of the coordination log, in seconds."""
    snapshots: Snapshots | None = None
    """The snapshots from which a long log is read, and which `close` renews; by default none."""
    observer: BatchObserver | None = None
    """Callbacks for the results of records and batches."""
    advise: Advise | None = None
    """Returns which partitions to claim, if the request names none and does not claim the entire topic."""
    reader: RecordReader | None = None
    """Reads the records of batches; by default Spark's Kafka source over `connection`."""
    _followed: Rationalizer | None = None
    _topic_ids: dict[str, str] = field(default_factory=dict)
    """The id of each data topic at its last look-up."""

    def __post_init__(self) -> None:
        check_settings(self.settings, 0)

    @classmethod
    def open(
        cls,
        connection: KafkaConnection,
        group: str,
        *,
        settings: GroupSettings = DEFAULT_SETTINGS,
        coordination_topic: str = DEFAULT_COORDINATION_TOPIC,
        coordination_connection: KafkaConnection | None = None,
        client: str | None = None,
        run_id: str | None = None,
        is_dead: Callable[[Owner], bool] = assume_alive,
        announce: Announce = announce_to_log,
        reasons_to_stop: Sequence[ReasonToStop] = (),
        allow_unsafe_topic: bool = False,
        observer: BatchObserver | None = None,
    ) -> Self:
        """Connect to Kafka and check the coordination topic, for processes without Dagster.

        Args:
            connection: The cluster with the data topics.
            group: The group for which the batches claim.
            settings: The settings of the group; the same in all members. By default a heartbeat each 10 s, at least
                once.
            coordination_topic: The name of the coordination topic.
            coordination_connection: The cluster with the coordination topic; by default that of the data topics.
            client: The client id, which tools show as the owner; by default the name of this machine.
            run_id: The id of this run, with which each instance id begins; by default a new one.
            is_dead: Returns whether an owner is known to be dead. By default claims of dead runs are free when they are
                stale: two heartbeat intervals after the last heartbeat.
            announce: Called in at most once just before ranges are committed; by default it logs them.
            reasons_to_stop: Functions that return why the work must stop, or None. They are called four times per
                heartbeat interval.
            allow_unsafe_topic: Claim even if the coordination topic has dangerous settings.
            observer: Callbacks for the results of records and batches, such as a `telemetry_observer`.

        Returns:
            The session. Close it at the end, or use it in a `with` block.

        Raises:
            ConfigurationError: A name is invalid, or the client library rejects the settings.
            TopicNotFoundError: The coordination topic does not exist.
            AuthorizationError: This user may not read or write the coordination topic.
            UnsafeTopicError: The coordination topic has dangerous settings.
            UnavailableError: Kafka did not answer in time.

        Example:
            ```python
            settings = GroupSettings(10_000, delivery=DeliveryMode.EFFECTIVELY_ONCE)
            with BatchSession.open(connection, "shops", settings=settings) as session:
                for batch in session.batches(BatchRequest(topic="orders"), sink):
                    with batch:
                        if batch.idle is None:
                            batch.write(transform(batch.read(spark)))
            ```
        """
        from marshal_dagster.coordination.kafka_log import KafkaLog
        from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
        from marshal_dagster.coordination.topic_settings import usable_topic_id
        from marshal_dagster.kafka.admin_client import Topics

        coordination = coordination_connection or connection
        names = {"group": group, "client": client or socket.gethostname(), "run_id": run_id or str(uuid.uuid4())}
        for field_name, name in names.items():
            if not is_name(name):
                raise ConfigurationError(f"{field_name} {name!r} {NO_NAME}")
        log = KafkaLog(coordination, coordination_topic, settings.heartbeat_interval_ms)
        session = cls(
            log=log,
            data=Topics(connection),
            connection=connection,
            settings=settings,
            is_dead=is_dead,
            announce=announce,
            reasons_to_stop=reasons_to_stop,
            timeout_s=coordination.timeout_s,
            snapshots=kafka_snapshots(coordination, coordination_topic),
            observer=observer,
            group=group,
            client=names["client"],
            run_id=names["run_id"],
        )
        try:
            with nullcontext(session.data) if coordination == connection else Topics(coordination) as topics:
                log.usable_id = usable_topic_id(topics, coordination_topic, allow_unsafe=allow_unsafe_topic)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def records(self) -> RecordReader:
        """What reads the records of batches."""
        return self.reader or KafkaReader(self.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def claimed_batch(self, request: BatchRequest, sink: Sink | None = None) -> ClaimedBatch:
        """Return a batch for use in a `with` block; it claims when the block is entered.

        In a group whose settings name the feature `ranges`, the batch claims ranges.

        Args:
            request: The options of the batch.
            sink: The output; required in effectively once, and not allowed otherwise.

        Returns:
            A batch that has not claimed anything yet.

        Raises:
            ConfigurationError: The request, the sink and the group's settings do not fit together.
            TopicNotFoundError: The coordination topic does not exist.
            UnavailableError: The log did not answer in time.

        Example:
            ```python
            with session.claimed_batch(BatchRequest(topic="orders"), sink) as batch:
                if batch.idle is None:
                    batch.write(transform(batch.read(spark)))
            ```
        """
        effectively_once = self.settings.delivery is DeliveryMode.EFFECTIVELY_ONCE
        if effectively_once and sink is None:
            raise ConfigurationError(
                f"group {self.group!r} has delivery effectively_once, so a batch of topic {request.topic!r} needs a "
                "sink: pass one"
            )
        if sink is not None and not effectively_once:
            raise ConfigurationError(
                f"group {self.group!r} has delivery {self.settings.delivery}, but only effectively_once uses a sink: "
                "change the group's delivery, or write the frame without a sink"
            )
        if request.ranges is not None and not enables_ranges(self.settings):
            raise ConfigurationError(
                f"group {self.group!r} cannot claim ranges, because its settings lack the feature 'ranges' or the rule "
                "set 'native': leave ranges out, or enable them for the group"
            )
        if enables_ranges(self.settings) and request.claim_entire_topic:
            raise ConfigurationError(
                f"the members of group {self.group!r} claim ranges, but claim_entire_topic claims whole partitions: "
                "leave out claim_entire_topic, or disable the feature 'ranges' for the group"
            )
        if enables_ranges(self.settings) and sink is not None and not getattr(sink, "supports_unordered_ranges", False):
            raise ConfigurationError(
                f"{sink!r} stores one position for each partition, but the members of group {self.group!r} claim "
                "ranges in any order: use a sink that stores ranges, or disable the feature 'ranges' for the group"
            )
        return self._batch(request, sink)

    def positions_batch(self, request: BatchRequest) -> ClaimedBatch:
        """Return a batch that only sets first positions, and is idle.

        It writes an offset and a data topic id for each key of `request.partitions`, so that ranges can be claimed.

        Args:
            request: The options of the batch; its ranges and limits are not used.

        Returns:
            A batch that has not claimed anything yet.
        """
        whole = replace(request, ranges=None, max_records=None, max_claims=None)
        return self._batch(whole, None, only_positions=True)

    def _batch(self, request: BatchRequest, sink: Sink | None, *, only_positions: bool = False) -> ClaimedBatch:
        topic, rationalizer = request.topic, self._rationalizer(request.topic)
        member = Member(self.group, self.client, new_instance_id(self.run_id))
        claimer = Claimer(rationalizer, member, topic, self.settings, clock=self.clock, observer=self.observer)
        context = BatchContext(
            request=request,
            group=self.group,
            run_id=self.run_id,
            settings=self.settings,
            data=self.data,
            rationalizer=rationalizer,
            clock=claimer.clock,
            is_dead=self.is_dead,
            known_ids=self._topic_ids,
        )
        by_ranges = None
        if enables_ranges(self.settings) and not only_positions:
            by_ranges = RangeClaimer(
                rationalizer, member.with_new_instance(), topic, self.settings, clock=self.clock, observer=self.observer
            )
        return ClaimedBatch(self, context, claimer, by_ranges, sink, only_positions=only_positions)

    def batches(
        self,
        request: BatchRequest,
        sink: Sink | None = None,
        *,
        max_batches: int | None = None,
        time_budget_s: float | None = None,
    ) -> Iterator[ClaimedBatch]:
        """Yield one batch after another, until one is idle or a limit is reached.

        Use each batch in a `with` block before you take the next one.

        Args:
            request: The options of each batch.
            sink: The output; required in effectively once, and not allowed otherwise.
            max_batches: The highest number of batches; by default no limit.
            time_budget_s: After this many seconds no further batch is started; by default no limit.

        Yields:
            The batches. The last one may be idle: its `idle` states why.

        Raises:
            ConfigurationError: The request, the sink and the group's settings do not fit together.
        """
        began_s = time.monotonic()
        count = 0
        while max_batches is None or count < max_batches:
            if time_budget_s is not None and count and time.monotonic() - began_s >= time_budget_s:
                return
            batch = self.claimed_batch(request, sink)
            yield batch
            if batch.idle is not None:
                return
            count += 1

    def open_plans(self, topic: str, *, read_on: bool = False) -> list[OpenPlan]:
        """Return the group's open plans in a topic that no live member holds.

        Args:
            topic: The data topic.
            read_on: First read the log to its present end; otherwise the state as last read counts.

        Returns:
            The open plans, those with the most attempts first.

        Raises:
            UnavailableError: The log did not answer in time.
            TopicNotFoundError: The coordination topic does not exist.
            CoordinationLogChangedError: The coordination log is not the one that was read before.
        """
        if read_on:
            self._rationalizer(topic).catch_up()
        if self._followed is None:
            return []
        wall_ms = (self.clock or SystemClock()).wall_ms()
        with self._followed.lock:
            world = self._followed.world
            return open_plans(world, wall_ms, group=self.group, topic=topic, is_dead=self.is_dead)

    def close(self) -> None:
        """Renew old snapshots, then close all connections."""
        followed, snapshots = self._followed, self.snapshots
        try:
            if followed is not None and followed.failure is None and snapshots is not None:
                renew_snapshots(followed, snapshots, self.clock)
        finally:
            self.log.close()
            self.data.close()

    def _rationalizer(self, topic: str) -> Rationalizer:
        """Return the session's rationalizer; it follows the coordination partitions of all topics used so far."""
        if self._followed is None:
            timeout_s = min(self.timeout_s, max(1.0, self.settings.heartbeat_interval_ms / 4_000))
            self._followed = Rationalizer(self.log, topics=[topic], timeout_s=timeout_s, snapshots=self.snapshots)
        partition = coordination_partition(topic, self._followed.identity.partitions)
        if partition not in self._followed.world.partitions:
            self._followed.follow_all()
        return self._followed
