"""The coordinator of a process: it is elected for some partitions, and leads the groups that hash to them."""

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
from marshal_dagster.coordination.clock import Clock, SystemClock
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
"""A failure is over when there was none for so long: a new client takes a while to fail again."""
_REST_S: Final = 2.0
_HELPERS: Final = 5
LookAtTopics = Callable[[], Mapping[str, int]]
"""Returns how many partitions each topic has; may raise `UnavailableError`."""

Listener = Callable[[str, GroupEvent], None]
"""Receives each event with the group's name, in the coordinator's thread."""

_GONE: Final = frozenset({GroupEventKind.LEFT, GroupEventKind.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Rules, times and recovery of a coordinator."""

    rules: GroupRules = field(default_factory=lambda: GroupRules(sticky_assignment))
    timing: Timing = field(default_factory=Timing)
    recovery_ms: float = 10_000.0
    """How long members of the coordinator before may take to register again, if their session is not longer."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for a time out of range."""
        if not 0 <= self.recovery_ms < math.inf:
            raise ConfigurationError(f"recovery_ms: {self.recovery_ms}; give 0 or more")


@dataclass(slots=True)
class _Shard:
    """What one term in one partition leads: its groups, by name."""

    term: Term
    may_have_successor: Callable[[int], bool] = lambda _: False
    """Returns whether the election shows that another term, with this fence, may have begun after it."""
    groups: dict[str, GroupCoordinator] = field(default_factory=dict)
    generation: int = 0
    """The newest of groups that were led in this term and are not any more: others begin after it."""
    rests_until_s: dict[str, float] = field(default_factory=dict)
    """Groups that have failed."""

    @property
    def epoch(self) -> int:
        """Above 0, which is the epoch of members that have heard no coordinator."""
        return self.term.fence + 1

    def is_later_epoch(self, epoch: int) -> bool:
        """Return whether a later coordinator may lead under `epoch`, as the election shows."""
        return self.may_have_successor(epoch - 1)


@dataclass(frozen=True, slots=True)
class _TopicsRead:
    """What a coordinator reads of a partition when it begins to lead it."""

    shares: Mapping[str, Sequence[StartFetcher]]
    """What members were sent to work on, by group."""
    impossible: Sequence[CoordinatorMessage]
    """Messages with an epoch that no coordinator can have had; readers would prefer them to any real one."""
    end: int
    """The end offset of the members' messages."""

    @classmethod
    def of(cls, messages: Iterable[CoordinatorMessage], last_epoch: int, end: int) -> "_TopicsRead":
        """Sort messages; `last_epoch` is the largest possible epoch: epochs are offsets in the leader topic."""
        shares: dict[str, list[StartFetcher]] = {}
        impossible = []
        for message in messages:
            if isinstance(message, StartFetcher):
                shares.setdefault(message.group, []).append(message)
            if message.epoch > last_epoch:
                impossible.append(message)
        return cls(shares, impossible, end)


class _KnownTopics:
    """How many partitions each topic has, as far as it was looked up."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.counts: Mapping[str, int] | None = None
        self._looked: Mapping[str, int] = {}

    def update(self, looked: Mapping[str, int]) -> None:
        """Believe that there is less only when it is seen twice: a broker that has just started may not know all."""
        before, self._looked = self._looked, looked
        self.counts = {
            topic: max(before.get(topic, 0), looked.get(topic, 0)) for topic in before.keys() | looked.keys()
        }


class _Failures:
    """What a coordinator fails with, at present or a moment ago."""

    def __init__(self) -> None:
        self.current: Exception | None = None
        self.from_s = self.last_s = 0.0

    @property
    def duration_s(self) -> float:
        return 0.0 if self.current is None else self.last_s - self.from_s

    def note(self, failure: Exception | None, *, may_end: bool) -> None:
        """Note what it fails with, if it does; a failure counts until all has gone well for a while."""
        now_s = time.monotonic()
        if failure is not None:
            if self.current is None:
                self.from_s = now_s
            self.last_s, self.current = now_s, failure
        elif may_end and now_s - self.last_s > _CALM_S:
            self.current = None


class Coordinator:
    """Leads the groups of the partitions that it is elected for; several processes share them.

    `run` blocks until `stop`, which any thread or a signal's handler may call.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topics: CoordinatorTopics | None = None,
        options: CoordinatorOptions | None = None,
        clock: Clock | None = None,
        *,
        look: LookAtTopics | None = None,
        weigh: Weigh | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Connect to nothing yet.

        `look` returns which topics there are: by default it asks the brokers. `weigh` weighs the partitions of a group
        every half a minute, for a strategy that goes by weights, such as `weighted`. `listener` receives the events: by
        default they are logged.
        """
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._options = options or CoordinatorOptions()
        self._clock = clock or SystemClock()
        self._rules = replace(self._options.rules, weighs=weigh is not None)
        self._listener = listener or _log
        self._stop = threading.Event()
        self._elections: queue.SimpleQueue[tuple[int, ElectionEvent]] = queue.SimpleQueue()
        self._shards: dict[int, _Shard] = {}
        self._beginning: dict[int, tuple[Term, Future[_TopicsRead]]] = {}
        """Partitions in which a term has begun that is not led yet: what members were sent is being read."""
        self._known = _KnownTopics()
        self._topic_lookup = PeriodicCall(
            "the topics could not be looked up",
            look or self._ask_brokers,
            self._known.update,
            _LOOK_AT_TOPICS_MS,
        )
        self._topic_check = PeriodicCall(
            "the coordinator's own topics",  # which may be on other brokers than those to work on
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

    @property
    def failure(self) -> Exception | None:
        """What keeps it from leading, or from standing for election, at present or a moment ago."""
        return self._failures.current

    def health(self, failing_after_s: float = FAILING_AFTER_S) -> dict[str, Any]:
        """Return how it is; `healthy` unless its thread hangs, or it has failed for `failing_after_s` seconds."""
        idle_s, failure, shards = self._idle_s, self.failure, list(self._shards.values())
        failing_s = self._failures.duration_s
        groups = [group for shard in shards for group in list(shard.groups.values())]
        return {
            "healthy": idle_s <= IDLE_AFTER_S and failing_s <= failing_after_s,
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
        return time.monotonic() - self._alive_at_s

    def stop(self) -> None:
        """Have `run` end."""
        self._stop.set()

    def groups(self) -> dict[str, Mapping[str, frozenset[DataPartitionId]]]:
        """Return which member is to work on what, in each group that this process leads now."""
        return {
            name: group.assignment() for shard in list(self._shards.values()) for name, group in shard.groups.items()
        }

    def run(self) -> None:
        """Stand for election and lead, until it is stopped.

        Raises `ConfigurationError`, `TopicNotFoundError`, `AuthorizationError`, `UnavailableError` at the beginning
        only.
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
        reader = Reader(self._connection, self._topics.member_messages)
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._scales = ThreadPoolExecutor(_HELPERS, "weights")
        try:
            with elector:
                while not self._stop.is_set():
                    self._lead_with(Writer(self._connection, self._topics, partitions), elector, reader)
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
        """Lead until the end, or until the producer is of no more use."""
        try:
            while not self._stop.is_set():
                self._turn(elector, reader, writer)
        except CLIENT_FAILURES as error:
            logger.warning("coordinator: %s; it connects again", error)
            self._note(error)
            self._stop.wait(_AGAIN_AFTER_S)
        finally:
            writer.close()

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
        """Take a message for a group that belongs where it was read; only a registration creates a group."""
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
        """Let a group's time pass; return whether a later coordinator leads."""
        is_superseded = False
        with self._isolated(shard, name) as group:
            if group is None:
                return False
            counts = self._known.counts
            topic_messages = [] if counts is None else group.update_topics(counts, self._now_ms)
            self._write(writer, [*topic_messages, *group.tick(self._now_ms)])
            events, group.events = group.events, []
            is_superseded = any(event.happening is GroupEventKind.SUPERSEDED for event in events)
            self._report(name, events, writer)
            if group.is_empty:
                shard.generation = max(shard.generation, group.generation)
                del shard.groups[name]
        return is_superseded

    @contextmanager
    def _isolated(self, shard: _Shard, name: str) -> Iterator[GroupCoordinator | None]:
        """Yield a group, or None while it rests; what fails in it, as its strategy may, disturbs no other group.

        After a rest it is led again, with the partitions that its members report.
        """
        if time.monotonic() < shard.rests_until_s.get(name, 0.0):
            yield None
            return
        shard.rests_until_s.pop(name, None)
        group = shard.groups[name]
        try:
            yield group
        except Exception as error:
            logger.exception("group %r: it is led again in %g s", name, _REST_S)
            self._note(error)
            shard.generation = max(shard.generation, group.generation)
            shard.rests_until_s[name] = time.monotonic() + _REST_S
            shard.groups[name] = self._group(name, shard, group.shares())

    def _measure(self) -> None:
        if self._now_ms >= self._next_measure_ms:
            self._next_measure_ms = self._now_ms + _MEASURE_EACH_MS
            self._metrics.update(self.groups())

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
        """Read what coordinators before have sent to members, and before that where the members' messages end."""
        end = end_of(self._connection, self._topics.member_messages, partition)
        messages = read_coordinator_messages(self._connection, self._topics.coordinator_messages, [partition])
        # Looked up last, so that no coordinator that wrote meanwhile has a later epoch.
        last_epoch = end_of(self._connection, self._topics.leader, partition)
        return _TopicsRead.of([message for message, _ in messages if self._is_in(message, partition)], last_epoch, end)

    def _is_in(self, message: CoordinatorMessage | MemberMessage, partition: int) -> bool:
        """Return whether the group of a message belongs to a partition."""
        return partition_of(message.group, self._partitions) == partition

    def _begin_to_lead(self, elector: Elector, reader: Reader, writer: Writer) -> None:
        """Begin to lead where the shares that members were sent have been read."""
        for partition, (term, found) in list(self._beginning.items()):
            if not found.done():
                continue
            del self._beginning[partition]
            try:
                read = found.result()
            except (MarshalError, *CLIENT_FAILURES) as error:
                logger.warning("coordinator of partition %d: %s", partition, error)
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
                    "of topic %r: no coordinator wrote it, or that topic was re-created. The record is deleted",
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
        f" ({event.moved} partitions changed hands)" if event.moved else "",
    )
