"""Members that die at a chosen step, and a reader of the messages of their ranges.

There are two kinds of kill. `KillableLog` ends a member inside this process: no further call of it reaches the log, not
even a release or a heartbeat. `tests.real.batch_worker` is a separate process that ends itself with SIGKILL at the same
steps.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from confluent_kafka import Consumer, TopicPartition

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.coordination.log import Ack, Append, Chunk, CoordinationLog, LogIdentity
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.state import OffsetBounds
from tests.conditions import WITHIN_S

Message = tuple[int, int]
"""Partition and offset."""


class KilledError(BaseException):
    """This member is dead. Only the test catches this exception."""


class Side(StrEnum):
    """The side of a step on which the member dies."""

    BEFORE = "before"
    WITHIN = "within"
    """After the first of several records that are appended together."""
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class KillPoint:
    """Die before, within or after the `count`th append that contains records of type `record`."""

    side: Side
    record: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.side}-{self.record}-{self.count}"


def die() -> None:
    """End this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class KillableLog:
    """A coordination log that kills its member at the step `at` by calling `kill`. All calls of a dead member fail."""

    log: CoordinationLog
    at: KillPoint | None
    kill: Callable[[], None] | None = None
    dead: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def delivery_timeout_ms(self) -> int:
        """The delivery timeout of the log."""
        return self.log.delivery_timeout_ms

    def _die(self) -> None:
        self.dead = True
        if self.kill is not None:
            self.kill()
        raise KilledError

    def _alive(self) -> CoordinationLog:
        if self.dead:
            raise KilledError
        return self.log

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append, unless the member dies at this step."""
        log = self._alive()
        kinds = {record.value.split(b"/", 1)[0].decode() for record in records}
        self.seen.update(kinds)
        here = self.at is not None and self.at.record in kinds and self.seen[self.at.record] == self.at.count
        if self.at is not None and here and self.at.side is Side.BEFORE:
            self._die()
        within = self.at is not None and here and self.at.side is Side.WITHIN
        acks = log.append(records[:1] if within else records)
        if here:
            self._die()
        return acks

    def identity(self) -> LogIdentity:
        """Return the log's identity."""
        return self._alive().identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the log's bounds."""
        return self._alive().bounds(partitions)

    def follow(self, positions: Mapping[int, int]) -> None:
        """Follow the log from `positions`."""
        self._alive().follow(positions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read the log up to `ends`."""
        return self._alive().read_until(ends, timeout_s)

    def purge(self) -> None:
        """Purge the log if the member is alive."""
        if not self.dead:
            self.log.purge()

    def close(self) -> None:
        """Close the log, also for a dead member, so that its sockets are closed."""
        self.log.close()


def read_messages(
    connection: KafkaConnection, ranges: Sequence[ClaimedRange], timeout_s: float = WITHIN_S
) -> list[Message]:
    """Read the messages in exactly `ranges`, as Spark would. Return their partitions and offsets."""
    due = {range_.partition: range_.end for range_ in ranges if range_.first_readable < range_.end}
    if not due:
        return []
    consumer: Consumer = clients.consumer(connection, client_id="stand-in", committed_only=True, fetch_wait_ms=10)[0]
    consumer.assign([TopicPartition(one.topic, one.partition, one.first_readable) for one in ranges])
    found: list[Message] = []
    deadline = time.monotonic() + timeout_s
    try:
        while due:
            assert time.monotonic() < deadline, f"not read in time: {due}"
            message = consumer.poll(0.2)
            if message is None:
                continue
            partition, offset = message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            at_end = message.error() is not None
            if not at_end and offset < due.get(partition, 0):
                found.append((partition, offset))
            if partition in due and offset + (0 if at_end else 1) >= due[partition]:
                del due[partition]
    finally:
        consumer.close()
    return found


def drain(
    batches: Callable[[], ClaimedBatch], process: Callable[[ClaimedBatch], object], *, timeout_s: float = WITHIN_S
) -> list[ClaimedBatch]:
    """Process batches until the topic is drained. Wait for partitions that dead members still hold."""
    done: list[ClaimedBatch] = []
    deadline = time.monotonic() + timeout_s
    while True:
        with batches() as batch:
            if batch.idle is None:
                process(batch)
        if batch.idle is None:
            done.append(batch)
        elif batch.idle.reason == "drained":
            return done
        assert time.monotonic() < deadline, batch.idle
        if batch.idle is not None:
            time.sleep(0.05)
