"""Members of a group on a coordination log in memory, with one clock that only the test moves."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from marshal_dagster.coordination.base_claimer import BaseClaimer
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.protocol.messages import (
    GroupSettings,
    GroupSettingsRecord,
    Message,
    ReleaseGroup,
    coordination_partition,
    parse,
    render,
    type_name,
)
from marshal_dagster.protocol.state import Key
from marshal_dagster.protocol.world import World
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog, MemorySnapshotTopic
from tests.faulty_log import FaultyLog

GROUP, TOPIC = "etl", "orders"
TOPIC_ID, OTHER_TOPIC_ID = "A" * 22, "B" * 22
HI_MS = 10_000
SETTINGS = GroupSettings(HI_MS)
RANGES = GroupSettings(HI_MS, features=("ranges",))


@dataclass(slots=True)
class Site:
    """One coordination topic, its clock, and a reader that is no member."""

    clock: ManualClock = field(default_factory=ManualClock)
    partitions: int = 4
    snapshot_topic: MemorySnapshotTopic | None = None
    broker: MemoryBroker = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(self.partitions, now_ms=self.clock.wall_ms)

    @property
    def home(self) -> int:
        """Return the coordination partition of `TOPIC`."""
        return coordination_partition(TOPIC, self.partitions)

    def log(self) -> FaultyLog:
        """Open a log with its own faults."""
        return FaultyLog(MemoryLog(self.broker))

    def reader(self, log: CoordinationLog, topics: Collection[str] | None = None) -> Rationalizer:
        """Open a reader, which starts at a snapshot if there is one."""
        snapshots = None if self.snapshot_topic is None else Snapshots(self.snapshot_topic)
        return Rationalizer(log, topics=topics, clock=self.clock, snapshots=snapshots)

    def claimer(
        self, *, settings: GroupSettings = SETTINGS, log: FaultyLog | None = None, instance: str | None = None
    ) -> Claimer:
        """Open a claimer with its own log and rationalizer, which has read the log."""
        number = next(self._numbers)
        rationalizer = self.reader(log or self.log(), topics=[TOPIC])
        member = Member(GROUP, f"client{number}", instance or f"run{number}.0")
        claimer = Claimer(rationalizer, member, TOPIC, settings, clock=self.clock)
        rationalizer.catch_up()
        return claimer

    def member(self, *, settings: GroupSettings = SETTINGS, log: FaultyLog | None = None) -> Claimer:
        """Open a claimer with the same settings as the group."""
        claimer = self.claimer(settings=settings, log=log)
        claimer.ensure_group_settings()
        return claimer

    def owner_of(
        self, *partitions: int, settings: GroupSettings = SETTINGS, log: FaultyLog | None = None, at: int = 0
    ) -> Claimer:
        """Open a claimer that owns `partitions`, each at the offset `at`, by default 0."""
        claimer = self.member(settings=settings, log=log)
        assert len(claimer.claim(partitions)) == len(partitions)
        claimer.name_data_topic(TOPIC_ID)
        claimer.beat(dict.fromkeys(partitions, at))
        return claimer

    def begin(self, *partitions: int, settings: GroupSettings = RANGES, at: int = 0) -> None:
        """Let a first member write the data topic and the offset, which ranges need."""
        self.owner_of(*partitions, settings=settings, at=at).release()

    def range_claimer(
        self, *, settings: GroupSettings = RANGES, log: FaultyLog | None = None, instance: str | None = None
    ) -> RangeClaimer:
        """Open a claimer of ranges with its own log and rationalizer, and with the same settings as the group."""
        number = next(self._numbers)
        rationalizer = self.reader(log or self.log(), topics=[TOPIC])
        member = Member(GROUP, f"client{number}", instance or f"run{number}.0")
        claimer = RangeClaimer(rationalizer, member, TOPIC, settings, clock=self.clock)
        claimer.ensure_group_settings()
        return claimer

    def holder_of(
        self, ranges: Mapping[int, tuple[int, int]], *, settings: GroupSettings = RANGES, plans: bool = False
    ) -> RangeClaimer:
        """Open a claimer that holds one range in each of some partitions; with `plans`, the ranges are planned."""
        claimer = self.range_claimer(settings=settings)
        assert len(claimer.claim(ranges)) == len(ranges)
        if plans:
            claimer.plan({number: end for number, (_, end) in ranges.items()})
        return claimer

    def ranges(self, partition: int = 0) -> list[tuple[int, int, str]]:
        """Read the log again; return start, end and phase of a key's ranges."""
        return [(range_.start, range_.end, range_.phase.value) for range_ in self.key(partition).ranges]

    def overtake(self) -> None:
        """Let retention delete all records and one more: a reader that has not read it can only observe from now on."""
        self.broker.append(self.home, b"anything")
        self.broker.retain_from(self.home, self.broker.bounds(self.home).end)

    def world(self) -> World:
        """Read the whole log again."""
        return Rationalizer(MemoryLog(self.broker), clock=self.clock).catch_up()

    def key(self, partition: int = 0) -> Key:
        """Read the log again; return the state of one key."""
        return self.world().key(GROUP, TOPIC, partition)

    def owner(self, partition: int = 0) -> str | None:
        """Read the log again; return the instance that owns a key, or None."""
        owner = self.key(partition).owner
        return None if owner is None else owner.instance

    def values(self) -> list[str]:
        """Return all records in the coordination partition of `TOPIC`."""
        return [(value or b"").decode() for _, _, value in self.broker.records(self.home)]

    def say(self, message: Message) -> int:
        """Append `message` to the coordination partition of `TOPIC`, as another member would."""
        return self.broker.append(self.home, render(message))

    def pause(self, seconds: int, instance: str = "ops.1") -> None:
        """Pause the group in all coordination partitions, as `instance`."""
        until_s = self.clock.wall_ms() // 1_000 + seconds
        message = ReleaseGroup(instance=instance, client="ops", group=GROUP, time_s=0, expiry_s=until_s)
        for partition in range(self.partitions):
            self.broker.append(partition, render(message))


def faulty(claimer: BaseClaimer[Any]) -> FaultyLog:
    """Return the log of a member of a `Site`."""
    log = claimer.rationalizer.log
    assert isinstance(log, FaultyLog)
    return log


def about(kind: type[Message], instance: str, partition: int = 0, **tail: object) -> Message:
    """Return a record about the tests' group and topic."""
    fields = {"instance": instance, "client": "other", "group": GROUP, "topic": TOPIC, "partition": partition}
    return kind(time_s=0, **fields, **tail)  # type: ignore[arg-type]


def settings_record(settings: GroupSettings) -> GroupSettingsRecord:
    """Return the record by which `ops.1` sets the group's settings."""
    return GroupSettingsRecord(instance="ops.1", client="ops", group=GROUP, time_s=0, settings=settings)


def messages_sent_by(site: Site, instance: str) -> list[str]:
    """Return the types of the records of `instance` in the log."""
    messages = [parse(value.encode()) for value in site.values()]
    return [type_name(message) for message in messages if isinstance(message, Message) and message.instance == instance]


def raiser(error: BaseException) -> Callable[[], None]:
    """Return a function that raises `error`."""

    def fail() -> None:
        raise error

    return fail
