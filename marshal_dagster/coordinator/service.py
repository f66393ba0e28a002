"""A coordinator as a process has it: elected for some partitions, it leads the groups that hash to them."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordinator.assignment import Place, sticky_assignment
from marshal_dagster.coordinator.group import Event, GroupCoordinator, Happening, Rules
from marshal_dagster.coordinator.measuring import GroupMetrics
from marshal_dagster.coordinator.messages import CoordinatorMessage, Register, StartFetcher, parse_member_message
from marshal_dagster.coordinator.weighing import Weigh
from marshal_dagster.coordinator.wire import (
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
from marshal_dagster.election.rules import Resigned, Term, Timing
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.health import FAILING_AFTER_S, IDLE_AFTER_S
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_LOOK_AT_TOPICS_MS: Final = 5_000.0
_MEASURE_EACH_MS: Final = 5_000.0
_WEIGH_EACH_MS: Final = 30_000.0
_CHECK_EACH_MS: Final = 10_000.0
_AGAIN_AFTER_S: Final = 0.5
_CALM_S: Final = 10.0
"""A failure is over when there was none for so long: a client that is made anew takes a while to fail again."""
_REST_S: Final = 2.0
_WEIGHS_FOR_MS: Final = 30_000.0
"""After which the weights that are known serve."""
_HELPERS: Final = 5
LookAtTopics = Callable[[], Mapping[str, int]]
"""Gives how many partitions each topic has; may raise `UnavailableError`."""

Listener = Callable[[str, Event], None]
"""Receives what happens, with the group's name, in the coordinator's thread."""

_GONE: Final = frozenset({Happening.LEFT, Happening.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """How a coordinator works."""

    rules: Rules = field(default_factory=lambda: Rules(sticky_assignment))
    timing: Timing = field(default_factory=Timing)
    recovery_ms: float = 10_000.0
    """How long members that a coordinator before had may take to register again, if their session is not longer."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for a time that cannot be."""
        if not 0 <= self.recovery_ms < math.inf:
            raise ConfigurationError(f"recovery_ms: {self.recovery_ms}; give 0 or more")


@dataclass(slots=True)
class _Shard:
    """What one term in one partition leads: its groups, by name."""

    term: Term
    groups: dict[str, GroupCoordinator] = field(default_factory=dict)
    generation: int = 0
    """Of groups that were led in this term and are not any more the newest, which those that come begin after."""
    rests_until_s: dict[str, float] = field(default_factory=dict)
    """Groups with which something has gone wrong."""

    @property
    def epoch(self) -> int:
        """Above 0, which is what members have that have heard no coordinator."""
        return self.term.fence + 1


_Shares = Mapping[str, Sequence[StartFetcher]]
"""What members have been told to work on, by group."""


@dataclass(slots=True)
class _Weighing:
    """A group's partitions being weighed, in the background; whatever group has the name then."""

    topics: frozenset[str]
    began_ms: float
    found: Future[Mapping[Place, float] | None]


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

        `look` tells which topics there are: by default the brokers. `weigh` weighs the partitions of a group every
        half a minute, for a strategy that goes by weights, such as `weighted`. `listener` is told what happens: by
        default the log.
        """
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._options = options or CoordinatorOptions()
        self._clock = clock or SystemClock()
        self._look = look or self._ask_brokers
        self._weigh = weigh
        self._rules = replace(self._options.rules, weighs=weigh is not None)
        self._listener = listener or _log
        self._stop = threading.Event()
        self._elections: queue.SimpleQueue[tuple[int, ElectionEvent]] = queue.SimpleQueue()
        self._shards: dict[int, _Shard] = {}
        self._beginning: dict[int, tuple[Term, Future[tuple[_Shares, int]]]] = {}
        """Partitions in which a term has begun that is not led yet: what was told before is still being read."""
        self._known: Mapping[str, int] | None = None
        """How many partitions each topic has, once that was looked up."""
        self._looked: Mapping[str, int] = {}
        self._looking: Future[Mapping[str, int]] | None = None
        self._next_look_ms = 0.0
        self._cannot_look: MarshalError | None = None
        self._checking: Future[None] | None = None
        self._next_check_ms = 0.0
        self._partitions = 0
        self._cannot_use: MarshalError | None = None
        """What is wrong with its own topics, which may be on other brokers than those to work on."""
        self._weighing: dict[str, _Weighing] = {}
        self._next_weighing_ms: dict[str, float] = {}
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._scales = ThreadPoolExecutor(_HELPERS, "weights")
        self._measuring = GroupMetrics()
        self._next_measure_ms = 0.0
        self.failure: Exception | None = None
        """What keeps it from leading, or from standing for election, at present or a moment ago."""
        self._failing_from_s = self._failed_at_s = 0.0
        self._alive_at_s = time.monotonic()

    def health(self, failing_after_s: float = FAILING_AFTER_S) -> dict[str, Any]:
        """Tell how it is; `healthy` unless its thread hangs, or it has failed for `failing_after_s` seconds."""
        idle_s, failure, shards = self._idle_s, self.failure, list(self._shards.values())
        failing_s = 0.0 if failure is None else self._failed_at_s - self._failing_from_s
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

    def groups(self) -> dict[str, Mapping[str, frozenset[Place]]]:
        """Give who is to work on what in each group that this process leads now."""
        return {
            name: group.assignment() for shard in list(self._shards.values()) for name, group in shard.groups.items()
        }

    def run(self) -> None:
        """Stand for election and lead, until it is stopped.

        Raises `ConfigurationError`, `TopicMissing`, `RightMissing`, `UnavailableError` at the beginning only.
        """
        self._alive_at_s = time.monotonic()
        partitions = self._partitions = self._topics.partitions(self._connection)
        self._measuring = GroupMetrics()
        elector = Elector(
            self._connection,
            self._topics.leader,
            f"{self._topics.leader}_election",
            timing=self._options.timing,
            listener=lambda partition, event: self._elections.put((partition, event)),
            is_alive=lambda: self._idle_s <= IDLE_AFTER_S,
        )
        reader = Reader(self._connection, self._topics.words)
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._scales = ThreadPoolExecutor(_HELPERS, "weights")
        try:
            with elector:
                while not self._stop.is_set():
                    self._lead_with(Writer(self._connection, self._topics, partitions), elector, reader)
        finally:
            self._measuring.end()
            for helpers in (self._helpers, self._scales):
                helpers.shutdown(wait=False, cancel_futures=True)
            self._shards, self._beginning, self._weighing = {}, {}, {}
            self._looking = self._checking = None
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
        self._take_up(elector, reader)
        self._measure()
        self._look_at_topics()
        self._check_topics()
        self._note(elector.failure or self._cannot_use or self._cannot_look)
        if not self._shards:
            self._stop.wait(_TICK_S)
            return
        self._weigh_groups()
        came = list(reader.read(_TICK_S))
        for partition, shard in list(self._shards.items()):
            if not elector.leads(shard.term, partition):
                del self._shards[partition]
                reader.leave([partition])
        for each in came:
            self._hear(each, writer)
        for partition, shard in list(self._shards.items()):
            if any(self._lead(shard, name, writer) for name in list(shard.groups)):
                elector.give_up(shard.term, "a later coordinator was heard of", partition)
        writer.poll()

    def _hear(self, came: ReceivedRecord, writer: Writer) -> None:
        """Take a member's word, of a group that belongs where it was read; only one that registers makes a group."""
        shard, word = self._shards.get(came.partition), parse_member_message(came.value)
        if shard is None or word is None or partition_of(word.group, writer.partitions) != came.partition:
            return
        if word.group not in shard.groups:
            if not isinstance(word, Register) and word.epoch != shard.epoch:
                return
            shard.groups[word.group] = self._group(word.group, shard, ())
        with self._alone(shard, word.group) as group:
            if group is not None:
                self._write(writer, group.receive(word, self._now_ms))

    def _lead(self, shard: _Shard, name: str, writer: Writer) -> bool:
        """Let a group's time pass; tell whether a later coordinator was heard of."""
        is_superseded = False
        with self._alone(shard, name) as group:
            if group is None:
                return False
            self._write(writer, [*self._tell_topics(group), *group.tick(self._now_ms)])
            events, group.events = group.events, []
            is_superseded = any(event.happening is Happening.SUPERSEDED for event in events)
            self._tell(name, events, writer)
            if group.is_empty:
                shard.generation = max(shard.generation, group.generation)
                del shard.groups[name]
        return is_superseded

    @contextmanager
    def _alone(self, shard: _Shard, name: str) -> Iterator[GroupCoordinator | None]:
        """Give a group, unless it rests; what goes wrong with it, as its strategy may, disturbs no other.

        It is led anew after a rest, by what its members say that they have.
        """
        if time.monotonic() < shard.rests_until_s.get(name, 0.0):
            yield None
            return
        shard.rests_until_s.pop(name, None)
        group = shard.groups[name]
        try:
            yield group
        except Exception as error:
            logger.exception("group %r: it is led anew in %g s", name, _REST_S)
            self._note(error)
            shard.generation = max(shard.generation, group.generation)
            shard.rests_until_s[name] = time.monotonic() + _REST_S
            shard.groups[name] = self._group(name, shard, group.shares())

    def _measure(self) -> None:
        if self._now_ms >= self._next_measure_ms:
            self._next_measure_ms = self._now_ms + _MEASURE_EACH_MS
            self._measuring.look(self.groups())

    def _note(self, failure: Exception | None) -> None:
        """Note what it fails with, if it does; what it failed with counts until all has gone well for a while."""
        now_s = time.monotonic()
        if failure is not None:
            if self.failure is None:
                self._failing_from_s = now_s
            self._failed_at_s, self.failure = now_s, failure
        elif not self._beginning and now_s - self._failed_at_s > _CALM_S:
            self.failure = None

    def _take_elections(self, reader: Reader) -> None:
        while not self._elections.empty():
            partition, event = self._elections.get()
            self._shards.pop(partition, None)
            reader.leave([partition])
            self._beginning.pop(partition, None)
            if not isinstance(event, Resigned):
                self._beginning[partition] = event.term, self._helpers.submit(self._read, partition)

    def _read(self, partition: int) -> tuple[_Shares, int]:
        """Read what coordinators before have told members; give the end of what members have said, from before that."""
        end = end_of(self._connection, self._topics.words, partition)
        shares: dict[str, list[StartFetcher]] = {}
        for order, _ in read_coordinator_messages(self._connection, self._topics.orders, [partition]):
            if isinstance(order, StartFetcher):
                shares.setdefault(order.group, []).append(order)
        return shares, end

    def _take_up(self, elector: Elector, reader: Reader) -> None:
        """Begin to lead where what was told before has been read."""
        for partition, (term, found) in list(self._beginning.items()):
            if not found.done():
                continue
            del self._beginning[partition]
            try:
                shares, end = found.result()
            except (MarshalError, *CLIENT_FAILURES) as error:
                logger.warning("coordinator of partition %d: %s", partition, error)
                self._note(error)
                elector.give_up(term, str(error), partition)
                continue
            if not self._shards:
                self._known, self._looked = None, {}
            shard = self._shards[partition] = _Shard(term)
            shard.groups |= {name: self._group(name, shard, each) for name, each in shares.items()}
            self._next_look_ms = 0.0
            reader.follow({partition: end})

    def _group(self, name: str, shard: _Shard, kept: Sequence[StartFetcher]) -> GroupCoordinator:
        return GroupCoordinator(
            name,
            shard.epoch,
            self._rules,
            self._now_ms,
            kept=kept,
            recovery_ms=self._options.recovery_ms if kept else 0.0,
            generation=shard.generation,
        )

    def _look_at_topics(self) -> None:
        """Look, now and then and in the background, which topics there are with how many partitions."""
        looking = self._looking
        if looking is not None and looking.done():
            self._looking = None
            try:
                self._known, self._cannot_look = self._believed(looking.result()), None
            except MarshalError as error:
                logger.warning("the topics could not be looked up: %s", error)
                self._cannot_look = error
        if self._looking is None and self._now_ms >= self._next_look_ms:
            self._next_look_ms = self._now_ms + _LOOK_AT_TOPICS_MS
            self._looking = self._helpers.submit(self._look)

    def _believed(self, looked: Mapping[str, int]) -> Mapping[str, int]:
        """Believe that there is less only when it is seen twice: a broker that has just started may not know all."""
        before, self._looked = self._looked, looked
        return {topic: max(before.get(topic, 0), looked.get(topic, 0)) for topic in before.keys() | looked.keys()}

    def _check_topics(self) -> None:
        """See, now and then and in the background, whether its own topics are there for it."""
        checking = self._checking
        if checking is not None and checking.done():
            self._checking, before = None, self._cannot_use
            try:
                checking.result()
                self._cannot_use = None
            except MarshalError as error:
                if str(error) != str(before):
                    logger.warning("the coordinator's own topics: %s", error)
                self._cannot_use = error
        if self._checking is None and self._now_ms >= self._next_check_ms:
            self._next_check_ms = self._now_ms + _CHECK_EACH_MS
            self._checking = self._helpers.submit(self._topics.check, self._connection, self._partitions)

    def _weigh_groups(self) -> None:
        """Weigh, now and then and in the background, what each group has to work on; soon where it waits for that."""
        if self._weigh is None or self._known is None:
            return
        groups = {name: group for shard in self._shards.values() for name, group in shard.groups.items()}
        for name in [name for name, weighing in self._weighing.items() if weighing.found.done()]:
            weighing = self._weighing.pop(name)
            self._next_weighing_ms[name] = self._now_ms + _WEIGH_EACH_MS
            if name in groups:
                groups[name].update_weights(weighing.topics, weighing.found.result())
        self._next_weighing_ms = {name: at for name, at in self._next_weighing_ms.items() if name in groups}
        for name, group in groups.items():
            self._weigh_one(self._weigh, name, group)

    def _weigh_one(self, weigh: Weigh, name: str, group: GroupCoordinator) -> None:
        weighing = self._weighing.get(name)
        if weighing is None:
            if group.awaits_weights or self._now_ms >= self._next_weighing_ms.get(name, 0.0):
                topics, positions = group.topics_wanted(), dict(group.positions)
                found = self._scales.submit(_weighed, weigh, name, topics, positions)
                self._weighing[name] = _Weighing(topics, self._now_ms, found)
        elif group.awaits_weights and self._now_ms >= weighing.began_ms + _WEIGHS_FOR_MS:
            group.update_weights(group.topics_wanted(), None)

    def _ask_brokers(self) -> Mapping[str, int]:
        with Topics(self._connection) as topics:
            return topics.partition_counts()

    def _tell_topics(self, group: GroupCoordinator) -> Sequence[CoordinatorMessage]:
        return [] if self._known is None else group.update_topics(self._known, self._now_ms)

    def _write(self, writer: Writer, orders: Sequence[CoordinatorMessage]) -> None:
        for order in orders:
            writer.order(order)

    def _tell(self, group: str, events: Sequence[Event], writer: Writer) -> None:
        for event in events:
            self._listener(group, event)
            self._measuring.happened(group, event)
            if event.happening in _GONE:
                for member in event.members:
                    writer.forget(group, member)

    @property
    def _now_ms(self) -> float:
        return self._clock.lease_ms()


def _weighed(
    weigh: Weigh, name: str, topics: frozenset[str], positions: Mapping[Place, int]
) -> Mapping[Place, float] | None:
    try:
        return weigh(name, topics, positions)
    except Exception as error:  # noqa: BLE001 - whatever it is, those that are known serve
        logger.warning("the partitions of group %r could not be weighed: %s", name, error)
        return None


def _log(group: str, event: Event) -> None:
    is_bad = event.happening in {Happening.FAILED, Happening.REBALANCE_GIVEN_UP}
    logger.log(
        logging.WARNING if is_bad else logging.INFO,
        "group %r: %s: %s%s",
        group,
        event.happening.value,
        ", ".join(event.members),
        f" ({event.moved} partitions changed hands)" if event.moved else "",
    )
