"""What stops, and for how long, when a member joins a coordinated group or one of Kafka's own consumer groups."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.kafka.connection import KafkaConnection

MS_PER_S: Final = 1_000
_WITHIN_S: Final = 120.0
_POLL_S: Final = 0.05
_LOOK_EACH_S: Final = 0.002


@dataclass(slots=True)
class Watch:
    """The partitions of each member, those that were without a member, and the longest such pause."""

    works: dict[str, set[int]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    longest_s: float = 0.0
    changed_s: float = 0.0
    _since_s: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, member: str, numbers: Collection[int]) -> None:
        """Record that a member starts partitions."""
        with self._lock:
            self.changed_s = time.perf_counter()
            self.works.setdefault(member, set()).update(numbers)
            for number in numbers:
                if number in self._since_s:
                    self.longest_s = max(self.longest_s, self.changed_s - self._since_s.pop(number))

    def stop(self, member: str, numbers: Collection[int]) -> None:
        """Record that a member stops partitions."""
        with self._lock:
            now_s = time.perf_counter()
            self.works.get(member, set()).difference_update(numbers)
            self.stopped.update(numbers)
            for number in numbers:
                self._since_s.setdefault(number, now_s)

    def begin(self) -> None:
        """Reset the record of stopped partitions and pauses."""
        with self._lock:
            self.stopped, self.longest_s, self._since_s = set(), 0.0, {}

    def await_shares(self, members: int, partitions: int) -> None:
        """Wait until `members` members share the partitions evenly. Raises `RuntimeError`."""
        deadline_s = time.monotonic() + _WITHIN_S
        while not self._is_shared(members, partitions):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{partitions} partitions were not shared by {members} within {_WITHIN_S:g} s")
            time.sleep(_LOOK_EACH_S)

    def _is_shared(self, members: int, partitions: int) -> bool:
        with self._lock:
            held = [work for work in self.works.values() if work]
            counts = [len(each) for each in held]
            is_even = len(held) == members and max(counts) - min(counts) <= 1
            return is_even and sum(counts) == len(set().union(*held)) == partitions


Joins = Callable[[str, Watch], AbstractContextManager[object]]
"""Lets a member with the given name belong to a group during a block."""


def coordinated(connection: KafkaConnection, topics: CoordinatorTopics, topic: str) -> Joins:
    """Return a function that adds members to a coordinated group."""

    def join(name: str, watch: Watch) -> CoordinatedMember:
        return CoordinatedMember(
            connection,
            "small",
            name,
            start=lambda places: watch.start(name, [number for _, number in places]),
            stop=lambda places: watch.stop(name, [number for _, number in places]),
            topics=topics,
            topics_wanted=[topic],
        )

    return join


def in_a_kafka_group(connection: KafkaConnection, topic: str, strategy: str, heartbeat_ms: int) -> Joins:
    """Return a function that adds members to a Kafka consumer group.

    All other settings of a group are the client's defaults.
    """
    settings = {
        "bootstrap.servers": connection.bootstrap_servers,
        "group.id": f"small-{strategy}",
        "partition.assignment.strategy": strategy,
        "heartbeat.interval.ms": heartbeat_ms,
        "enable.auto.commit": False,
        "auto.offset.reset": "latest",
        "log_level": 3,
    }

    @contextmanager
    def join(name: str, watch: Watch) -> Iterator[None]:
        is_over = threading.Event()
        thread = threading.Thread(target=lambda: _consume(Consumer(settings), topic, name, watch, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(_WITHIN_S)

    return join


def _consume(consumer: Consumer, topic: str, name: str, watch: Watch, is_over: threading.Event) -> None:
    def hook(do: Callable[[str, Collection[int]], None]) -> Callable[[Consumer, list[TopicPartition]], None]:
        return lambda _, places: do(name, [place.partition for place in places])

    consumer.subscribe([topic], on_assign=hook(watch.start), on_revoke=hook(watch.stop), on_lost=hook(watch.stop))
    while not is_over.is_set():
        consumer.poll(_POLL_S)
    consumer.close()


@dataclass(frozen=True, slots=True)
class Joined:
    """The effect of a member that joins."""

    all_work_again_ms: float
    partitions_stopped: int
    longest_pause_ms: float


@contextmanager
def group(joins: Joins, members: int, partitions: int) -> Iterator[Callable[[], Joined]]:
    """Run a group with all members except one; yields a function that lets the last member join and leave."""
    watch = Watch()
    with ExitStack() as stack:
        for number in range(members - 1):
            stack.enter_context(joins(f"m{number}", watch))
        watch.await_shares(members - 1, partitions)

        def one_more() -> Joined:
            watch.begin()
            began_s = time.perf_counter()
            with joins("last", watch):
                watch.await_shares(members, partitions)
                found = Joined((watch.changed_s - began_s) * MS_PER_S, len(watch.stopped), watch.longest_s * MS_PER_S)
            watch.await_shares(members - 1, partitions)
            return found

        yield one_more
