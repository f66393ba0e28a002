"""A coordinator as a process has it: elected for some partitions, it leads the groups that hash to them."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordinator.assignment import Place, sticky_assignment
from marshal_dagster.coordinator.group import Event, GroupCoordinator, Happening, Rules
from marshal_dagster.coordinator.messages import Order, StartFetcher, parse_order, parse_word
from marshal_dagster.coordinator.wire import CoordinatorTopics, Reader, Writer, read_all
from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Event as ElectionEvent
from marshal_dagster.election.rules import Resigned, Term, Timing
from marshal_dagster.errors import MarshalError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_LOOK_AT_TOPICS_MS: Final = 5_000.0
LookAtTopics = Callable[[], Mapping[str, int]]
"""Gives how many partitions each topic has; may raise `UnavailableError`."""

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
        look: LookAtTopics | None = None,
    ) -> None:
        """Connect to nothing yet. `look` tells which topics there are, instead of the brokers."""
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._options = options or CoordinatorOptions()
        self._clock = clock or SystemClock()
        self._look = look or self._ask_brokers
        self._stop = threading.Event()
        self._elections: queue.SimpleQueue[tuple[int, ElectionEvent]] = queue.SimpleQueue()
        self._shards: dict[int, _Shard] = {}
        self._known: Mapping[str, int] = {}
        self._next_look_ms = 0.0

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
        partitions = self._topics.partitions(self._connection)
        reader, writer = (
            Reader(self._connection, self._topics.words),
            Writer(self._connection, self._topics, partitions),
        )
        elector = Elector(
            self._connection,
            self._topics.leader,
            f"{self._topics.leader}_election",
            timing=self._options.timing,
            listener=lambda partition, event: self._elections.put((partition, event)),
        )
        try:
            with elector:
                while not self._stop.is_set():
                    self._turn(elector, reader, writer)
        finally:
            reader.close()
            writer.close()

    def _turn(self, elector: Elector, reader: Reader, writer: Writer) -> None:
        self._take_elections(elector, reader)
        if not self._shards:
            self._stop.wait(_TICK_S)
            return
        self._look_at_topics()
        for partition, _, _, value in reader.read(_TICK_S):
            shard, word = self._shards.get(partition), parse_word(value)
            if shard is None or word is None:
                continue
            if word.group not in shard.groups:
                shard.groups[word.group] = self._group(word.group, shard.term, ())
            self._write(writer, shard.groups[word.group].hear(word, self._now_ms))
        for partition, shard in list(self._shards.items()):
            if not elector.leads(shard.term, partition):
                del self._shards[partition]
                continue
            self._lead(shard, elector, partition, writer)
        writer.poll()

    def _lead(self, shard: _Shard, elector: Elector, partition: int, writer: Writer) -> None:
        for name, group in list(shard.groups.items()):
            orders = [*group.topics_are(self._known, self._now_ms), *group.tick(self._now_ms)]
            events, group.events = group.events, []
            self._write(writer, orders)
            self._tell(name, events, writer)
            if any(event.happening is Happening.SUPERSEDED for event in events):
                elector.give_up(shard.term, "a later coordinator was heard of", partition)
                return

    def _take_elections(self, elector: Elector, reader: Reader) -> None:
        changed = False
        while not self._elections.empty():
            partition, event = self._elections.get()
            changed = True
            if isinstance(event, Resigned):
                self._shards.pop(partition, None)
                continue
            try:
                self._shards[partition] = self._begin(partition, event.term)
            except MarshalError as error:
                logger.warning("coordinator of partition %d: %s", partition, error)
                elector.give_up(event.term, str(error), partition)
        if changed:
            reader.follow(dict.fromkeys(self._shards))

    def _begin(self, partition: int, term: Term) -> _Shard:
        """Take up what coordinators before have told members."""
        kept, _ = read_all(self._connection, self._topics.orders, partition)
        shares: dict[str, list[StartFetcher]] = {}
        for value in kept.values():
            order = parse_order(value)
            if isinstance(order, StartFetcher):
                shares.setdefault(order.group, []).append(order)
        self._next_look_ms = 0.0
        return _Shard(term, {name: self._group(name, term, each) for name, each in shares.items()})

    def _group(self, name: str, term: Term, kept: Sequence[StartFetcher]) -> GroupCoordinator:
        recovery_ms = self._options.recovery_ms if kept else 0.0
        # An epoch above 0, which is what members have that have heard none.
        epoch = term.fence + 1
        return GroupCoordinator(name, epoch, self._options.rules, self._now_ms, kept=kept, recovery_ms=recovery_ms)

    def _look_at_topics(self) -> None:
        """Look, now and then, which topics there are with how many partitions."""
        if self._now_ms < self._next_look_ms:
            return
        self._next_look_ms = self._now_ms + _LOOK_AT_TOPICS_MS
        try:
            self._known = self._look()
        except UnavailableError as error:
            logger.warning("the topics could not be looked up: %s", error)

    def _ask_brokers(self) -> Mapping[str, int]:
        with Topics(self._connection) as topics:
            return topics.partition_counts()

    def _write(self, writer: Writer, orders: Sequence[Order]) -> None:
        for order in orders:
            writer.order(order)

    def _tell(self, group: str, events: Sequence[Event], writer: Writer) -> None:
        for event in events:
            is_bad = event.happening in {Happening.FAILED, Happening.REBALANCE_GIVEN_UP}
            logger.log(
                logging.WARNING if is_bad else logging.INFO,
                "group %r: %s: %s%s",
                group,
                event.happening.value,
                ", ".join(event.members),
                f" ({event.moved} partitions changed hands)" if event.moved else "",
            )
            if event.happening in _GONE:
                for member in event.members:
                    writer.forget(group, member)

    @property
    def _now_ms(self) -> float:
        return self._clock.lease_ms()
