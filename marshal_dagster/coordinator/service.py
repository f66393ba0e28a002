"""A coordinator as a process has it: elected for some partitions, it leads the groups that hash to them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordinator.assignment import Place, sticky_assignment
from marshal_dagster.coordinator.group import Event, GroupCoordinator, Happening, Rules
from marshal_dagster.coordinator.measuring import Measuring
from marshal_dagster.coordinator.messages import Order, StartFetcher, parse_order, parse_word
from marshal_dagster.coordinator.weighing import Weigh
from marshal_dagster.coordinator.wire import CLIENT_FAILURES, CoordinatorTopics, Reader, Writer, end_of, read_all
from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Event as ElectionEvent
from marshal_dagster.election.rules import Resigned, Term, Timing
from marshal_dagster.errors import MarshalError
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
_HELPERS: Final = 5
LookAtTopics = Callable[[], Mapping[str, int]]
"""Gives how many partitions each topic has; may raise `UnavailableError`."""

Listener = Callable[[str, Event], None]
"""Told what happens, with the group's name, in the coordinator's thread."""

_GONE: Final = frozenset({Happening.LEFT, Happening.FAILED})


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """How a coordinator works."""

    rules: Rules = field(default_factory=lambda: Rules(sticky_assignment))
    timing: Timing = field(default_factory=Timing)
    recovery_ms: float = 10_000.0
    """How long members that a coordinator before had may take to register again."""


@dataclass(slots=True)
class _Shard:
    """What one term in one partition leads: its groups, by name."""

    term: Term
    groups: dict[str, GroupCoordinator]
    topics: Mapping[str, int] = field(default_factory=dict)


_Shares = Mapping[str, Sequence[StartFetcher]]
"""What members have been told to work on, by group."""

_Weighed = dict[str, tuple[frozenset[str], Mapping[Place, float] | None]]
"""The topics of each group, and what their partitions weigh, if that could be found out."""


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
        self._looking: Future[Mapping[str, int]] | None = None
        self._next_look_ms = 0.0
        self._cannot_look: MarshalError | None = None
        self._checking: Future[None] | None = None
        self._next_check_ms = 0.0
        self._cannot_use: MarshalError | None = None
        """What is wrong with its own topics, which may be on other brokers than those to work on."""
        self._weighing: Future[_Weighed] | None = None
        self._next_weighing_ms = 0.0
        self._helpers = ThreadPoolExecutor(_HELPERS, "coordinator")
        self._measuring = Measuring()
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
        partitions = self._topics.partitions(self._connection)
        self._measuring = Measuring()
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
        try:
            with elector:
                while not self._stop.is_set():
                    self._lead_with(Writer(self._connection, self._topics, partitions), elector, reader)
        finally:
            self._measuring.end()
            self._helpers.shutdown(wait=False, cancel_futures=True)
            self._shards, self._beginning = {}, {}
            self._looking = self._checking = self._weighing = None
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
        for came in reader.read(_TICK_S):
            shard, word = self._shards.get(came.partition), parse_word(came.value)
            if shard is None or word is None:
                continue
            if word.group not in shard.groups:
                shard.groups[word.group] = self._group(word.group, shard.term, ())
            self._write(writer, shard.groups[word.group].hear(word, self._now_ms))
        for partition, shard in list(self._shards.items()):
            if not elector.leads(shard.term, partition):
                del self._shards[partition]
                reader.leave([partition])
                continue
            self._lead(shard, elector, partition, writer)
        writer.poll()

    def _lead(self, shard: _Shard, elector: Elector, partition: int, writer: Writer) -> None:
        for name, group in list(shard.groups.items()):
            orders = [*self._tell_topics(group), *group.tick(self._now_ms)]
            events, group.events = group.events, []
            self._write(writer, orders)
            self._tell(name, events, writer)
            if any(event.happening is Happening.SUPERSEDED for event in events):
                elector.give_up(shard.term, "a later coordinator was heard of", partition)
                return

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
        for came in read_all(self._connection, self._topics.orders, [partition]):
            order = parse_order(came.value)
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
                self._known = None
            groups = {name: self._group(name, term, each) for name, each in shares.items()}
            self._shards[partition] = _Shard(term, groups)
            self._next_look_ms = 0.0
            reader.follow({partition: end})

    def _group(self, name: str, term: Term, kept: Sequence[StartFetcher]) -> GroupCoordinator:
        recovery_ms = self._options.recovery_ms if kept else 0.0
        # An epoch above 0, which is what members have that have heard none.
        epoch = term.fence + 1
        return GroupCoordinator(name, epoch, self._rules, self._now_ms, kept=kept, recovery_ms=recovery_ms)

    def _look_at_topics(self) -> None:
        """Look, now and then and in the background, which topics there are with how many partitions."""
        looking = self._looking
        if looking is not None and looking.done():
            self._looking = None
            try:
                self._known, self._cannot_look = looking.result(), None
            except MarshalError as error:
                logger.warning("the topics could not be looked up: %s", error)
                self._cannot_look = error
        if self._looking is None and self._now_ms >= self._next_look_ms:
            self._next_look_ms = self._now_ms + _LOOK_AT_TOPICS_MS
            self._looking = self._helpers.submit(self._look)

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
            self._checking = self._helpers.submit(self._topics.check, self._connection)

    def _weigh_groups(self) -> None:
        """Weigh, now and then and in the background, what groups have to work on; soon where one waits for it."""
        if self._weigh is None or self._known is None:
            return
        groups = {name: group for shard in self._shards.values() for name, group in shard.groups.items()}
        if self._weighing is not None and self._weighing.done():
            self._next_weighing_ms = self._now_ms + _WEIGH_EACH_MS
            weighed, self._weighing = self._weighing.result(), None
            for name, (topics, weights) in weighed.items():
                if name in groups:
                    groups[name].weights_are(topics, weights)
        is_due = self._now_ms >= self._next_weighing_ms or any(group.awaits_weights for group in groups.values())
        if self._weighing is None and is_due:
            wanted = {name: (group.topics_wanted(), dict(group.positions)) for name, group in groups.items()}
            self._weighing = self._helpers.submit(self._weigh_all, self._weigh, wanted)

    @staticmethod
    def _weigh_all(weigh: Weigh, wanted: Mapping[str, tuple[frozenset[str], Mapping[Place, int]]]) -> _Weighed:
        found: _Weighed = {}
        for name, (topics, positions) in wanted.items():
            try:
                found[name] = topics, weigh(name, topics, positions)
            except MarshalError as error:
                logger.warning("the partitions of group %r could not be weighed: %s", name, error)
                found[name] = topics, None
        return found

    def _ask_brokers(self) -> Mapping[str, int]:
        with Topics(self._connection) as topics:
            return topics.partition_counts()

    def _tell_topics(self, group: GroupCoordinator) -> Sequence[Order]:
        return [] if self._known is None else group.topics_are(self._known, self._now_ms)

    def _write(self, writer: Writer, orders: Sequence[Order]) -> None:
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
