"""Claimed batches without services: data topics, a sink and the coordination log in memory, and one clock for all."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import TakenRanges, Verdict, judge_ranges
from marshal_dagster.protocol.messages import (
    DeliveryMode,
    GroupSettings,
    Message,
    ReleaseGroup,
    RuleSet,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.state import RANGES, Key
from marshal_dagster.sinks.sink import BeforeCommit, OffsetsRead, WriteResult
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog
from tests.real.kill_points import KillableLog, KillPoint, Side

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_dagster.kafka.admin_client import Topics

GROUP, TOPIC = "etl", "orders"
HI_MS = 10_000
"""Much longer than any test, so no heartbeat thread sends records. Tests move the clock themselves."""

Place = tuple[int, int]
"""The partition and offset of a message."""


@dataclass(frozen=True, slots=True)
class Description:
    """The same fields as `marshal_dagster.kafka.admin_client.TopicDescription`."""

    topic_id: str
    partitions: tuple[int, ...]


class Bounds(NamedTuple):
    """The same fields as `marshal_dagster.kafka.admin_client.OffsetBounds`."""

    start: int
    end: int


@dataclass(slots=True)
class DataPartition:
    """One partition of a data topic: the offsets that hold a message, and its bounds."""

    messages: list[int] = field(default_factory=list)
    start: int = 0
    end: int = 0
    stable_end: int | None = None
    """The last stable offset while a transaction is open."""


@dataclass(slots=True)
class DataTopic:
    """One incarnation of a data topic."""

    topic_id: str
    partitions: list[DataPartition]


class DataTopics:
    """Data topics in memory, with the methods of `marshal_dagster.kafka.admin_client.Topics`."""

    def __init__(self) -> None:
        self.is_down = False
        self.committed: dict[tuple[str, str], dict[int, int]] = {}
        self.before_describe: Callable[[], None] = lambda: None
        self.before_offsets: Callable[[], None] = lambda: None
        self._topics: dict[str, DataTopic] = {}
        self._made = 0

    # Methods with which a test changes the topics

    def make(self, topic: str = TOPIC, partitions: int = 3, messages: int = 0) -> None:
        """Create a topic with `messages` messages in each partition; it replaces a topic of that name."""
        self._made += 1
        self._topics[topic] = DataTopic(f"{self._made:022d}", [DataPartition() for _ in range(partitions)])
        for partition in range(partitions):
            self.append(partition, messages, topic)

    def delete(self, topic: str = TOPIC) -> None:
        """Delete a topic."""
        del self._topics[topic]

    def append(self, partition: int, messages: int, topic: str = TOPIC) -> None:
        """Append messages."""
        at = self._topics[topic].partitions[partition]
        at.messages.extend(range(at.end, at.end + messages))
        at.end += messages

    def skip(self, partition: int, offsets: int = 1, topic: str = TOPIC) -> None:
        """Skip offsets, as transaction markers, aborted messages and compacted messages do."""
        self._topics[topic].partitions[partition].end += offsets

    def retain_from(self, partition: int, start: int, topic: str = TOPIC) -> None:
        """Delete the messages before `start`, as retention does."""
        at = self._topics[topic].partitions[partition]
        at.start = start
        at.messages = [offset for offset in at.messages if offset >= start]

    def hold(self, partition: int, stable_end: int | None, topic: str = TOPIC) -> None:
        """Keep a transaction open from `stable_end`; None ends it."""
        self._topics[topic].partitions[partition].stable_end = stable_end

    def grow(self, partitions: int, topic: str = TOPIC) -> None:
        """Increase the number of partitions to `partitions`."""
        at = self._topics[topic].partitions
        at.extend(DataPartition() for _ in range(partitions - len(at)))

    def read(self, ranges: Iterable[ClaimedRange]) -> list[Place]:
        """Read the messages of `ranges`."""
        return [
            (range_.partition, offset)
            for range_ in ranges
            for offset in self._topics[range_.topic].partitions[range_.partition].messages
            if range_.first_readable <= offset < range_.end
        ]

    def all_messages(self, topic: str = TOPIC) -> set[Place]:
        """Return all messages of a topic."""
        return {(n, offset) for n, at in enumerate(self._topics[topic].partitions) for offset in at.messages}

    # Methods that a batch session calls

    def describe(self, topic: str) -> Description:
        """Look up a topic's id and partitions."""
        self.before_describe()
        found = self._found(topic)
        return Description(found.topic_id, tuple(range(len(found.partitions))))

    def partition_numbers(self, topic: str) -> tuple[int, ...]:
        """Look up a topic's partitions."""
        return tuple(range(len(self._found(topic).partitions)))

    def offsets(self, topic: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, Bounds]:
        """Look up the bounds of the partitions."""
        self.before_offsets()
        found = self._found(topic).partitions
        bounds = {}
        for partition in partitions:
            at = found[partition]
            end = at.end if at.stable_end is None or not committed_only else at.stable_end
            bounds[partition] = Bounds(at.start, max(at.start, end))
        return bounds

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Look up the committed offsets."""
        self._found(topic)
        return dict(self.committed.get((group, topic), {}))

    def commit_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> str | None:
        """Set the committed offsets, or return why that failed."""
        if self.is_down:
            return "the data cluster does not answer"
        self.committed.setdefault((group, topic), {}).update(offsets)
        return None

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    def _found(self, topic: str) -> DataTopic:
        if self.is_down:
            raise UnavailableError("the data cluster does not answer")
        if topic not in self._topics:
            raise TopicNotFoundError(f"topic {topic!r} does not exist")
        return self._topics[topic]


class MemorySink:
    """A sink in memory that stores each range once, by the rules of the real sinks; a frame is a list of places."""

    supports_unordered_ranges = True

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, Place]] = []
        """Data topic id, generation, and the message."""
        self.stored: dict[int, TakenRanges] = {}
        self.while_reading: Callable[[], None] = lambda: None
        """Called at the moment at which Spark would read Kafka."""
        self.after_write: Callable[[], None] = lambda: None

    def counts(self) -> Counter[Place]:
        """Return how often each message is in the output."""
        return Counter(place for _, _, place in self.rows)

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Judge each range."""
        return {
            range_: judge_ranges(self.stored.get(range_.partition, TakenRanges()).beside(range_), range_)
            for range_ in ranges
        }

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Store all ranges that are not stored yet, in one step."""
        self.while_reading()
        before_commit()
        verdicts = self.verdicts(ranges)
        taken = tuple(range_ for range_ in ranges if verdicts[range_] is not Verdict.SKIP)
        for one in taken:
            self._replace(one, offsets_read()[one.partition])
        places = cast("list[Place]", frame)
        by_partition = {one.partition: one for one in taken}
        for place in places:
            if place[0] in by_partition:
                one = by_partition[place[0]]
                self.rows.append((one.data_topic_id, one.generation, place))
        for one in taken:
            self.stored.setdefault(one.partition, TakenRanges()).add(one)
        self.after_write()
        return WriteResult(taken, tuple(one for one in ranges if one not in taken), {})

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:  # noqa: ARG002 - as `Sink`
        """Return None: each row has an offset, so replacing is always possible."""
        return None

    def _replace(self, one: ClaimedRange, intervals: Iterable[tuple[int, int]]) -> None:
        gone = {(one.partition, offset) for start, end in intervals for offset in range(start, end)}
        self.rows = [
            row for row in self.rows if not (row[0] == one.data_topic_id and row[1] < one.generation and row[2] in gone)
        ]


class MeddledLog(KillableLog):
    """A log that calls `meddle` once, just before or after the append at `at`, and then continues."""

    def __init__(self, log: CoordinationLog, at: KillPoint, meddle: Callable[[], object]) -> None:
        super().__init__(log, at)
        self._meddle = meddle

    def _die(self) -> None:
        if self.at is not None:
            self.at = None
            self._meddle()


@dataclass(slots=True)
class Scene:
    """One coordination topic, data topics, a clock, two kinds of output, and members that start and stop."""

    clock: ManualClock = field(default_factory=ManualClock)
    data: DataTopics = field(default_factory=DataTopics)
    sink: MemorySink = field(default_factory=MemorySink)
    processed: Counter[Place] = field(default_factory=Counter)
    """Messages that members without a sink processed: an output that cannot be undone."""
    announced: list[ClaimedRange] = field(default_factory=list)
    broker: MemoryBroker = field(init=False)
    _members: int = 0

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(4, now_ms=self.clock.wall_ms)

    def log(self) -> MemoryLog:
        """Open a log."""
        return MemoryLog(self.broker)

    def meddled(self, side: Side, record: str, meddle: Callable[[], object], count: int = 1) -> MeddledLog:
        """Open a log that calls `meddle` before or after (`side`) the `count`th append of a record of type `record`."""
        return MeddledLog(self.log(), KillPoint(side, record, count), meddle)

    def delivery(
        self,
        mode: DeliveryMode = DeliveryMode.AT_LEAST_ONCE,
        *,
        settings: GroupSettings | None = None,
        ranges: bool = False,
        log: CoordinationLog | None = None,
        **extra: Any,  # noqa: ANN401 - the fields of a Delivery
    ) -> BatchSession:
        """Open a batch session as a new member of the group. It claims whole partitions, or `ranges` of them."""
        self._members += 1
        features = (RANGES,) if ranges else ()
        return BatchSession(
            log=log or self.log(),
            data=cast("Topics", self.data),
            connection=KafkaConnection(bootstrap_servers="127.0.0.1:1"),
            group=GROUP,
            client=f"client{self._members}",
            run_id=f"run{self._members}",
            settings=settings or GroupSettings(HI_MS, RuleSet.NATIVE, mode, features),
            announce=self.announced.extend,
            clock=self.clock,
            **extra,
        )

    def batch(self, delivery: BatchSession, **limits: Any) -> ClaimedBatch:  # noqa: ANN401 - as `BatchRequest`
        """Return a batch of `TOPIC` with these limits, and with the sink if the mode needs one."""
        has_sink = delivery.settings.delivery is DeliveryMode.EFFECTIVELY_ONCE
        return delivery.claimed_batch(BatchRequest(topic=TOPIC, **limits), self.sink if has_sink else None)

    def process(self, batch: ClaimedBatch) -> None:
        """Read the batch's messages and write them to the output of its mode."""
        batch.begin_processing()
        messages = self.data.read(batch.ranges)
        if batch.mode is DeliveryMode.EFFECTIVELY_ONCE:
            batch.write(cast("DataFrame", messages))
        else:
            self.processed.update(messages)

    def work(self, delivery: BatchSession, **limits: Any) -> ClaimedBatch:  # noqa: ANN401 - as `BatchRequest`
        """Claim, process and commit one batch."""
        with self.batch(delivery, **limits) as batch:
            if batch.idle is None:
                self.process(batch)
        return batch

    def drain(self, delivery: BatchSession, **limits: Any) -> list[ClaimedBatch]:  # noqa: ANN401
        """Work batch after batch until one is idle. The last batch returned is the idle one."""
        batches = []
        for _ in range(100):
            batches.append(self.work(delivery, **limits))
            if batches[-1].idle is not None:
                return batches
        raise AssertionError("endless")

    def counts(self, mode: DeliveryMode) -> Counter[Place]:
        """Return how often each message is in the output of `mode`."""
        return self.sink.counts() if mode is DeliveryMode.EFFECTIVELY_ONCE else self.processed

    def wait_until_stale(self) -> None:
        """Move the clock so far that every owner is stale."""
        self.clock.advance(2 * HI_MS + 1)

    def key(self, partition: int = 0, topic: str = TOPIC) -> Key:
        """Read the state of one key from the log again."""
        return replace(Rationalizer(self.log()).catch_up().key(GROUP, topic, partition))

    def values(self, topic: str = TOPIC) -> list[str]:
        """Return all records in the coordination partition of `topic`."""
        return [(value or b"").decode() for _, _, value in self.broker.records(self._home(topic))]

    def say(self, message: Message, topic: str = TOPIC) -> int:
        """Append `message` to the coordination partition of `topic`, as another member would; return its log offset."""
        return self.broker.append(self._home(topic), render(message))

    def about(self, kind: type[Message], instance: str, partition: int = 0, **tail: Any) -> int:  # noqa: ANN401
        """Append a record about a key of `TOPIC` as `instance`; return its log offset."""
        fields: dict[str, Any] = {"instance": instance, "client": f"{instance}'s client", "group": GROUP, "time_s": 0}
        return self.say(kind(topic=TOPIC, partition=partition, **fields, **tail))

    def pause(self, seconds: int = 3_600, instance: str = "ops.1") -> None:
        """Pause the group in all coordination partitions."""
        until_s = self.clock.wall_ms() // 1_000 + seconds
        message = ReleaseGroup(instance=instance, client="ops", group=GROUP, time_s=0, expiry_s=until_s)
        for partition in range(self.broker.identity.partitions):
            self.broker.append(partition, render(message))

    def _home(self, topic: str) -> int:
        return coordination_partition(topic, self.broker.identity.partitions)
