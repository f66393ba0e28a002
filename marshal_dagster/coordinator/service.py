"""The coordinator process: it is elected for partitions of the coordinator's topics, and leads the groups in them.

Each group is hashed to one partition. For each of the groups that it leads it runs a `group.GroupCoordinator`, reads
the members' messages and writes the answers (`transport`).
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from marshal_dagster._internal.health_server import FAILING_AFTER_S, IDLE_AFTER_S
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordinator.assignment import DataPartitionId, sticky_assignment
from marshal_dagster.coordinator.background import PeriodicCall
from marshal_dagster.coordinator.group import GroupCoordinator, GroupEvent, GroupEventKind, GroupRules
from marshal_dagster.coordinator.lag_weights import GroupWeigher, Weigh
from marshal_dagster.coordinator.messages import (
    CoordinatorMessage,
    MemberMessage,
    Register,
    StartFetcher,
    parse_member_message,
)
from marshal_dagster.coordinator.metrics import GroupMetrics
from marshal_dagster.coordinator.transport import (
    CLIENT_FAILURES,
    CoordinatorTopics,
    Reader,
    ReceivedRecord,
    Writer,
    end_of,
    partition_of,
    read_coordinator_messages,
)
from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Event as ElectionEvent
from marshal_dagster.election.rules import Term, TermEnded, Timing
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_LOOK_AT_TOPICS_MS: Final = 5_000.0
_MEASURE_EACH_MS: Final = 5_000.0
_CHECK_EACH_MS: Final = 10_000.0
_AGAIN_AFTER_S: Final = 0.5
_CALM_S: Final = 10.0
"""How long without failures until the last one counts as over. A new client takes a while to fail again."""
_REST_MS: Final = 2_000.0
_HELPERS: Final = 5
LookAtTopics = Callable[[], Mapping[str, int]]
"""A function that returns the number of partitions of each topic. It may raise `UnavailableError`."""

Listener = Callable[[str, GroupEvent], None]
"""A function that receives each event with the group's name. It runs in the coordinator's thread: do not block it."""

_GONE: Final = frozenset({GroupEventKind.LEFT, GroupEventKind.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options of a coordinator process.

    Raises:
        ConfigurationError: `recovery_ms` is negative or not finite.

    Example:
        ```python
        options = CoordinatorOptions(GroupRules(sticky_assignment, gather_ms=500))
        coordinator = Coordinator(connection, options=options)
        ```
    """

    rules: GroupRules = field(default_factory=lambda: GroupRules(sticky_assignment))
    """The rules by which groups are led; by default with the strategy `sticky`."""
    timing: Timing = field(default_factory=Timing)
    """The timing of the election."""
    recovery_ms: float = 10_000.0
    """How long members of the previous coordinator have to register again, in milliseconds.

    They have the longest of their session timeouts (up to a minute) if that is longer.
    """

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if `recovery_ms` is out of range."""
        if not 0 <= self.recovery_ms < math.inf:
            raise ConfigurationError(f"recovery_ms is {self.recovery_ms}; it must be 0 or more")


@dataclass(slots=True)
class _Shard:
    """A partition that this process leads for one term, with the groups in it."""

    term: Term
    may_have_successor: Callable[[int], bool] = lambda _: False
    """A function that returns whether the election shows that a later term with this fence may have begun."""
    groups: dict[str, GroupCoordinator] = field(default_factory=dict)
    """The coordinator of each group, by the group's name."""
    generation: int = 0
    """The largest generation of groups that were removed in this term. New groups start after it."""
    rests_until_ms: dict[str, float] = field(default_factory=dict)
    """Until when each failed group is paused."""

    @property
    def epoch(self) -> int:
        """The epoch of this term. It is above 0, the epoch of members that have heard no coordinator yet."""
        return self.term.fence + 1

    def is_later_epoch(self, epoch: int) -> bool:
        """Return whether the election shows that a later coordinator may lead under `epoch`."""
        return self.may_have_successor(epoch - 1)


@dataclass(frozen=True, slots=True)
class _TopicsRead:
    """The data that a coordinator reads from a partition before it leads it."""

    shares: Mapping[str, Sequence[StartFetcher]]
    """The shares that were sent to members, by group."""
    impossible: Sequence[CoordinatorMessage]
    """Messages with an epoch that no coordinator can have had. Readers would prefer them to any real message."""
    end: int
    """The end offset of the members' messages."""

    @classmethod
    def of(cls, messages: Iterable[CoordinatorMessage], last_epoch: int, end: int) -> "_TopicsRead":
        """Sort messages; `last_epoch` is the largest possible epoch, because epochs are offsets in the leader topic."""
        shares: dict[str, list[StartFetcher]] = {}
        impossible = []
        for message in messages:
            if isinstance(message, StartFetcher):
                shares.setdefault(message.group, []).append(message)
            if message.epoch > last_epoch:
                impossible.append(message)
        return cls(shares, impossible, end)


class _KnownTopics:
    """The number of partitions of each topic, from lookups."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.counts: Mapping[str, int] | None = None
        self._last_found: Mapping[str, int] = {}

    def update(self, found_now: Mapping[str, int]) -> None:
        """Use the result of a lookup.

        A topic or partition counts as gone only after two lookups without it. A broker that has just started may not
        know all of them yet.
        """
        before, self._last_found = self._last_found, found_now
        self.counts = {
            topic: max(before.get(topic, 0), found_now.get(topic, 0)) for topic in before.keys() | found_now.keys()
        }


class _Failures:
    """The present or most recent failure of a coordinator."""

    def __init__(self) -> None:
        self.current: Exception | None = None
        self.from_s = self.last_s = 0.0

    @property
    def duration_s(self) -> float:
        return 0.0 if self.current is None else self.last_s - self.from_s

    def note(self, failure: Exception | None, *, may_end: bool) -> None:
        """Record a failure, or that there is none; the last failure is kept until all has gone well for a while."""
        now_s = time.monotonic()
        if failure is not None:
            if self.current is None:
                self.from_s = now_s
            self.last_s, self.current = now_s, failure
        elif may_end and now_s - self.last_s > _CALM_S:
            self.current = None


class Coordinator:
    """A coordinator process, which leads the groups in the partitions that it is elected for.

    Several processes share the partitions, and take over from each other. `run` blocks until `stop` is called, by any
    thread or by a signal handler.

    Example:
        ```python
        coordinator = Coordinator(connection)
        signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
        coordinator.run()
        ```
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topics: CoordinatorTopics | None = None,
        options: CoordinatorOptions | None = None,
        *,
        look: LookAtTopics | None = None,
        weigh: Weigh | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Configure the coordinator; it connects in `run`.

        Args:
            connection: The cluster with the coordinator's topics.
            topics: The coordinator's topics; by default those with the default name.
            options: Rules, timing and recovery.
            look: Returns the data topics with their partition counts; by default it queries `connection`.
            weigh: Returns the weights of a group's partitions, for a strategy that needs them, such as `weighted`. It
                is called every 30 seconds for each group, in a background thread.
            listener: Receives the events of the groups; by default they are logged.
        """
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._options = options or CoordinatorOptions()
        self._clock = SystemClock()
        self._rules = replace(self._options.rules, weighs=weigh is not None)
        self._listener = listener or _log
        self._stop = threading.Event()
        self._elections: queue.SimpleQueue[tuple[int, ElectionEvent]] = queue.SimpleQueue()
        self._shards: dict[int, _Shard] = {}
        self._beginning: dict[int, tuple[Term, Future[_TopicsRead]]] = {}
        """Partitions whose term has begun, while the messages of earlier coordinators are being read."""
        self._known = _KnownTopics()
        self._topic_lookup = PeriodicCall(
            "coordinator: the data topics could not be looked up",
            look or self._ask_brokers,
            self._known.update,
            _LOOK_AT_TOPICS_MS,
        )
        self._topic_check = PeriodicCall(
            "coordinator: check of its own topics",  # they may be on other brokers than the data topics
            lambda: self._topics.check(connection, self._partitions),
            lambda _: None,
            _CHECK_EACH_MS,
        )
        self._partitions = 0
        self._weigher = None if weigh is None else GroupWeigher(weigh)
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._scales = ThreadPoolExecutor(_HELPERS, "weights")
        self._metrics = GroupMetrics()
        self._next_measure_ms = 0.0
        self._failures = _Failures()
        self._alive_at_s = time.monotonic()
        self._elector_idle_s: Callable[[], float] = lambda: 0.0

    @property
    def failure(self) -> Exception | None:
        """The error that keeps it from leading or from taking part in the election; None if all went well for 10 s."""
        return self._failures.current

    def health(self, failing_after_s: float = FAILING_AFTER_S) -> dict[str, Any]:
        """Return the state of this process, for health checks.

        Args:
            failing_after_s: After failing for this long, in seconds, it is not healthy.

        Returns:
            A report of JSON values. `live` is false if the thread hangs. `healthy` is false also if the process has
            failed for too long, and `ready` also until the brokers have listed the data topics once. `role` is
            `leader` or `standby`. `partitions`, `groups` and `members` are the numbers of those that it leads.
            `failure` is the text of the present failure, or None. `failing_s` is how long it has failed, and `idle_s`
            how long its thread has done nothing, in seconds.
        """
        idle_s, failure, shards = self._idle_s, self.failure, list(self._shards.values())
        failing_s = self._failures.duration_s
        groups = [group for shard in shards for group in list(shard.groups.values())]
        is_live = idle_s <= IDLE_AFTER_S
        is_healthy = is_live and failing_s <= failing_after_s
        return {
            "healthy": is_healthy,
            "live": is_live,
            "ready": is_healthy and self._known.counts is not None,
            "role": "leader" if shards else "standby",
            "partitions": len(shards),
            "groups": len(groups),
            "members": sum(len(group.members) for group in groups),
            "failure": None if failure is None else str(failure),
            "failing_s": round(failing_s, 3),
            "idle_s": round(idle_s, 3),
        }

    @property
    def _idle_s(self) -> float:
        return max(time.monotonic() - self._alive_at_s, self._elector_idle_s())

    def stop(self) -> None:
        """Make `run` end."""
        self._stop.set()

    def groups(self) -> dict[str, Mapping[str, frozenset[DataPartitionId]]]:
        """Return the assignment of each group that this process leads now.

        Returns:
            For each group, by name, the partitions of each member.
        """
        return {
            name: group.assignment() for shard in list(self._shards.values()) for name, group in shard.groups.items()
        }

    def run(self) -> None:
        """Take part in the election and lead groups until `stop` is called.

        Errors are raised only at the beginning. Later ones are logged and retried, and `health` reports them.

        Raises:
            ConfigurationError: The coordinator's topics are not usable together.
            TopicNotFoundError: One of the coordinator's topics does not exist.
            AuthorizationError: The user may not read or write one of these topics.
            UnavailableError: The brokers do not answer in time.
        """
        self._alive_at_s = time.monotonic()
        partitions = self._partitions = self._topics.partitions(self._connection)
        self._metrics = GroupMetrics()
        elector = Elector(
            self._connection,
            self._topics.leader,
            f"{self._topics.leader}_election",
            timing=self._options.timing,
            listener=lambda partition, event: self._elections.put((partition, event)),
            is_alive=lambda: self._idle_s <= IDLE_AFTER_S,
        )
        self._elector_idle_s = lambda: elector.idle_s
        reader = Reader(self._connection, self._topics.member_messages)
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._scales = ThreadPoolExecutor(_HELPERS, "weights")
        try:
            writer: Writer | None = Writer(self._connection, self._topics, partitions)
            with elector:
                while writer is not None:
                    self._lead_with(writer, elector, reader)
                    writer = self._new_writer(partitions)
        finally:
            self._metrics.close()
            for helpers in (self._helpers, self._scales):
                helpers.shutdown(wait=False, cancel_futures=True)
            self._shards, self._beginning = {}, {}
            for calls in (self._topic_lookup, self._topic_check, self._weigher):
                if calls is not None:
                    calls.forget()
            reader.close()

    def _lead_with(self, writer: Writer, elector: Elector, reader: Reader) -> None:
        """Lead until `stop` is called or the producer fails for good."""
        try:
            while not self._stop.is_set():
                self._turn(elector, reader, writer)
        except CLIENT_FAILURES as error:
            logger.warning("coordinator: connection lost, it reconnects: %s", error)
            self._note(error)
            self._stop.wait(_AGAIN_AFTER_S)
        finally:
            writer.close()

    def _new_writer(self, partitions: int) -> Writer | None:
        """Return a new writer, or None if `stop` is called before one can be made, such as without a key file.

        A coordinator without a writer is idle, so it steps down after a while.
        """
        while not self._stop.is_set():
            try:
                return Writer(self._connection, self._topics, partitions)
            except ConfigurationError as error:
                if str(error) != str(self.failure):
                    logger.warning("coordinator: it cannot reconnect, and tries again: %s", error)
                self._note(error)
                self._stop.wait(_AGAIN_AFTER_S)
        return None

    def _turn(self, elector: Elector, reader: Reader, writer: Writer) -> None:
        self._alive_at_s = time.monotonic()
        self._take_elections(reader)
        self._begin_to_lead(elector, reader, writer)
        self._measure()
        self._topic_lookup.poll(self._helpers, self._now_ms)
        self._topic_check.poll(self._helpers, self._now_ms)
        self._note(elector.failure or self._topic_check.failure or self._topic_lookup.failure)
        if not self._shards:
            self._stop.wait(_TICK_S)
            return
        self._weigh_groups()
        records = list(reader.read(_TICK_S))
        for partition, shard in list(self._shards.items()):
            if not elector.leads(shard.term, partition):
                del self._shards[partition]
                reader.leave([partition])
        for record in records:
            self._receive(record, writer)
        for partition, shard in list(self._shards.items()):
            if any(self._lead(shard, name, writer) for name in list(shard.groups)):
                elector.give_up(shard.term, "a later coordinator leads", partition)
        writer.poll()

    def _receive(self, record: ReceivedRecord, writer: Writer) -> None:
        """Process a member's message. Only a message of this epoch or a registration creates a group.

        A message whose group does not belong to the partition that it was read from is ignored.
        """
        shard, message = self._shards.get(record.partition), parse_member_message(record.value)
        if shard is None or message is None or partition_of(message.group, writer.partitions) != record.partition:
            return
        if message.group not in shard.groups:
            if not isinstance(message, Register) and message.epoch != shard.epoch:
                return
            shard.groups[message.group] = self._group(message.group, shard, ())
        with self._isolated(shard, message.group) as group:
            if group is not None:
                self._write(writer, group.receive(message, self._now_ms))

    def _lead(self, shard: _Shard, name: str, writer: Writer) -> bool:
        """Advance a group, and return whether a later coordinator leads it."""
        is_superseded = False
        with self._isolated(shard, name) as group:
            if group is None:
                return False
            counts = self._known.counts
            topic_messages = [] if counts is None else group.update_topics(counts, self._now_ms)
            messages = [*topic_messages, *group.tick(self._now_ms)]
            events, group.events = group.events, []
            is_superseded = any(event.happening is GroupEventKind.SUPERSEDED for event in events)
            # First, because the tombstone of a member that left must not delete its share after it joined again.
            self._report(name, events, writer)
            self._write(writer, messages)
            if group.is_empty:
                shard.generation = max(shard.generation, group.generation)
                del shard.groups[name]
        return is_superseded

    @contextmanager
    def _isolated(self, shard: _Shard, name: str) -> Iterator[GroupCoordinator | None]:
        """Yield a group, or None while it is paused after a failure.

        An error in one group, such as one of its strategy, does not affect other groups. After the pause the group is
        led again, with the partitions that its members report.
        """
        if self._now_ms < shard.rests_until_ms.get(name, 0.0):
            yield None
            return
        shard.rests_until_ms.pop(name, None)
        group = shard.groups[name]
        try:
            yield group
        except Exception as error:
            logger.exception("group %r: the coordinator failed to lead it; it retries in %g s", name, _REST_MS / 1_000)
            self._note(error)
            shard.generation = max(shard.generation, group.generation)
            shard.rests_until_ms[name] = self._now_ms + _REST_MS
            shard.groups[name] = self._group(name, shard, group.shares())

    def _measure(self) -> None:
        if self._now_ms >= self._next_measure_ms:
            self._next_measure_ms = self._now_ms + _MEASURE_EACH_MS
            self._metrics.update(self.groups(), led=len(self._shards), partitions=self._partitions)

    def _note(self, failure: Exception | None) -> None:
        self._failures.note(failure, may_end=not self._beginning)

    def _take_elections(self, reader: Reader) -> None:
        while not self._elections.empty():
            partition, event = self._elections.get()
            self._shards.pop(partition, None)
            reader.leave([partition])
            self._beginning.pop(partition, None)
            if not isinstance(event, TermEnded):
                self._beginning[partition] = event.term, self._helpers.submit(self._read, partition)

    def _read(self, partition: int) -> _TopicsRead:
        """Look up the end of the members' messages, then read the messages of earlier coordinators."""
        end = end_of(self._connection, self._topics.member_messages, partition)
        messages = read_coordinator_messages(self._connection, self._topics.coordinator_messages, [partition])
        # This is looked up last, so that no coordinator that wrote meanwhile has a later epoch.
        last_epoch = end_of(self._connection, self._topics.leader, partition)
        return _TopicsRead.of([message for message, _ in messages if self._is_in(message, partition)], last_epoch, end)

    def _is_in(self, message: CoordinatorMessage | MemberMessage, partition: int) -> bool:
        """Return whether the group of a message is hashed to a partition."""
        return partition_of(message.group, self._partitions) == partition

    def _begin_to_lead(self, elector: Elector, reader: Reader, writer: Writer) -> None:
        """Lead the partitions whose earlier messages have been read."""
        for partition, (term, found) in list(self._beginning.items()):
            if not found.done():
                continue
            del self._beginning[partition]
            try:
                read = found.result()
            except (MarshalError, *CLIENT_FAILURES) as error:
                logger.warning(
                    "coordinator: partition %d of topic %r could not be read, so it is given up: %s",
                    partition,
                    self._topics.coordinator_messages,
                    error,
                )
                self._note(error)
                elector.give_up(term, str(error), partition)
                continue
            if not self._shards:
                self._known.forget()
            may_have_successor = partial(elector.may_have_successor, partition=partition)
            shard = self._shards[partition] = _Shard(term, may_have_successor)
            shard.groups |= {name: self._group(name, shard, kept) for name, kept in read.shares.items()}
            for message in read.impossible:
                logger.warning(
                    "group %r: topic %r, partition %d, has a record for member %r of epoch %d, which is after the end "
                    "of topic %r: another program wrote it, or that topic was re-created. The record is deleted",
                    message.group,
                    self._topics.coordinator_messages,
                    partition,
                    message.member,
                    message.epoch,
                    self._topics.leader,
                )
                writer.revoke(message)
            self._topic_lookup.next_ms = 0.0
            reader.follow({partition: read.end})

    def _group(self, name: str, shard: _Shard, kept: Sequence[StartFetcher]) -> GroupCoordinator:
        return GroupCoordinator(
            name,
            shard.epoch,
            self._rules,
            self._now_ms,
            kept=kept,
            recovery_ms=self._options.recovery_ms if kept else 0.0,
            generation=shard.generation,
            is_later_epoch=shard.is_later_epoch,
        )

    def _weigh_groups(self) -> None:
        if self._weigher is not None and self._known.counts is not None:
            groups = {name: group for shard in self._shards.values() for name, group in shard.groups.items()}
            self._weigher.poll(self._scales, groups, self._now_ms)

    def _ask_brokers(self) -> Mapping[str, int]:
        with Topics(self._connection) as topics:
            return topics.partition_counts()

    def _write(self, writer: Writer, messages: Sequence[CoordinatorMessage]) -> None:
        for message in messages:
            writer.send_to_member(message)

    def _report(self, group: str, events: Sequence[GroupEvent], writer: Writer) -> None:
        for event in events:
            self._listener(group, event)
            self._metrics.record(group, event)
            if event.happening in _GONE:
                for member in event.members:
                    writer.forget(group, member)

    @property
    def _now_ms(self) -> float:
        return self._clock.lease_ms()


def _log(group: str, event: GroupEvent) -> None:
    is_bad = event.happening in {GroupEventKind.FAILED, GroupEventKind.REBALANCE_GIVEN_UP}
    logger.log(
        logging.WARNING if is_bad else logging.INFO,
        "group %r: %s: %s%s",
        group,
        event.happening.value,
        ", ".join(event.members),
        f" ({event.moved} partitions moved)" if event.moved else "",
    )
