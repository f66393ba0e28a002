"""A state machine that takes any step that members may take with a coordination log, in any order.

It compares the log with its own lists of the records. It runs with the log in memory and with Kafka. Only one step runs
at a time, so an acknowledged record lies exactly at the end of the lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from marshal_dagster.coordination.log import Append, Chunk, CoordinationLog, LogIdentity, PositionLostError
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import ManualClock, MemoryBroker
from tests.conditions import WITHIN_S
from tests.fast.test_log_port import House, MemoryHouse

PARTITIONS = 2
MOST_LOGS = 3
numbers = st.integers(0, PARTITIONS - 1)
payloads = st.binary(max_size=12)
parts = st.sampled_from([0, 1, 0.5]) | st.floats(0, 1)
"""A place between two offsets, as a fraction."""


@dataclass(slots=True)
class Partition:
    """The content of one coordination partition: for each offset so far the value, or None if there is no record."""

    values: list[tuple[bytes | None] | None] = field(default_factory=list)
    times_ms: dict[int, int] = field(default_factory=dict)
    start: int = 0

    @property
    def end(self) -> int:
        """Return the offset of the next record."""
        return len(self.values)

    def between(self, start: int, end: int) -> list[tuple[int, bytes | None]]:
        """Return the records from offset `start` to `end` (exclusive)."""
        return [(at, value[0]) for at in range(start, end) if (value := self.values[at]) is not None]


@dataclass(slots=True)
class Opened:
    """A log that a member opened, and its read positions."""

    log: CoordinationLog
    positions: dict[int, int] = field(default_factory=dict)


class LogMachine(RuleBasedStateMachine):
    """The steps; a subclass provides the broker."""

    in_memory: ClassVar[bool] = False

    def make_house(self) -> House:
        """Create an empty topic of two partitions."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        """Open the first log."""
        self.house = self.make_house()
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.logs: list[Opened] = []
        self.identity: LogIdentity | None = None
        self.open()

    @rule()
    @precondition(lambda self: len(self.logs) < MOST_LOGS)
    def open(self) -> None:
        """Another member opens the log, sees the same one, and reads it from its start."""
        opened = Opened(self.house.open())
        self.logs.append(opened)
        self._begin(opened)
        identity = opened.log.identity()
        assert identity == (self.identity or identity)
        assert identity.partitions == PARTITIONS
        self.identity = identity

    @rule(which=st.integers(0), batch=st.lists(st.tuples(numbers, payloads), max_size=8))
    def append(self, which: int, batch: list[tuple[int, bytes]]) -> None:
        """A member appends records; the acknowledgements name the offsets, which rise in the order of the records."""
        acks = self._log(which).log.append([Append(number, value) for number, value in batch])
        assert [ack.error for ack in acks] == [None] * len(batch)
        offsets = [self._add(number, value) for number, value in batch]
        assert [ack.offset for ack in acks] == offsets

    @rule(number=numbers, value=st.none() | payloads)
    def say(self, number: int, value: bytes | None) -> None:
        """Another process appends a record, perhaps without a value."""
        assert self.house.say(number, value) == self._add(number, value)

    @rule(which=st.integers(0), at=st.dictionaries(numbers, parts, min_size=1))
    def follow(self, which: int, at: dict[int, float]) -> None:
        """A member starts to read at any place of the log, instead of its present position."""
        opened = self._log(which)
        opened.positions = {number: self._between(number, part) for number, part in at.items()}
        opened.log.follow(opened.positions)

    @rule(which=st.integers(0), at=st.dictionaries(numbers, parts, min_size=1))
    def read(self, which: int, at: dict[int, float]) -> None:
        """A member reads at least up to some offset: it gets every record once, in order and unchanged."""
        opened = self._log(which)
        ends = {number: self._between(number, part) for number, part in at.items() if number in opened.positions}
        at_start = opened.positions.copy()
        lost = [n for n, end in ends.items() if at_start[n] < end and self._is_outside(at_start[n], n)]
        reported = self._read(opened, ends)
        if reported is not None:
            assert self._is_outside(opened.positions[reported], reported)
            self._begin(opened)
            return
        # Kafka's client still returns records that it fetched before they were deleted.
        assert not (lost and self.in_memory)
        assert all(opened.positions[number] >= end for number, end in ends.items())

    @rule(which=st.integers(0))
    def ask_for_bounds(self, which: int) -> None:
        """The bounds are the present ones."""
        bounds = self._log(which).log.bounds(range(PARTITIONS))
        assert bounds == {
            number: OffsetBounds(partition.start, partition.end) for number, partition in enumerate(self.partitions)
        }

    @rule(which=st.integers(0))
    def purge(self, which: int) -> None:
        """A member drops the records that wait to be sent; records that it appends later are sent."""
        self._log(which).log.purge()

    @rule(number=numbers, part=parts)
    def retain(self, number: int, part: float) -> None:
        """Retention deletes the start of the log."""
        start = self._between(number, part)
        self.house.retain_from(number, start)
        self.partitions[number].start = start

    @rule(which=st.integers(0))
    @precondition(lambda self: len(self.logs) > 1)
    def close(self, which: int) -> None:
        """A member closes its log."""
        opened = self._log(which)
        opened.log.close()
        self.logs.remove(opened)

    def teardown(self) -> None:
        """Close all logs."""
        for opened in getattr(self, "logs", []):
            opened.log.close()

    # Checks

    def _read(self, opened: Opened, ends: Mapping[int, int]) -> int | None:
        """Read, and return the partition whose position is lost, if the log reports one."""
        try:
            for chunk in opened.log.read_until(ends, WITHIN_S):
                self._take(opened, chunk)
        except PositionLostError as lost:
            return lost.partition
        return None

    def _log(self, which: int) -> Opened:
        return self.logs[which % len(self.logs)]

    def _between(self, number: int, part: float) -> int:
        one = self.partitions[number]
        return one.start + round(part * (one.end - one.start))

    def _add(self, number: int, value: bytes | None) -> int:
        self.partitions[number].values.append((value,))
        return self.partitions[number].end - 1

    def _is_outside(self, position: int, number: int) -> bool:
        one = self.partitions[number]
        return not one.start <= position <= one.end

    def _take(self, opened: Opened, chunk: Chunk) -> None:
        position, one = opened.positions[chunk.partition], self.partitions[chunk.partition]
        assert position <= chunk.position <= one.end
        read = [(offset, value) for offset, _, value in chunk.records]
        assert read == one.between(position, chunk.position)
        opened.positions[chunk.partition] = chunk.position
        for offset, timestamp_ms, _ in chunk.records:
            # All readers get the same time for a record.
            assert one.times_ms.setdefault(offset, timestamp_ms) == timestamp_ms
        times_ms = [one.times_ms[offset] for offset in sorted(one.times_ms)]
        assert times_ms == sorted(times_ms)

    def _begin(self, opened: Opened) -> None:
        opened.positions = {number: partition.start for number, partition in enumerate(self.partitions)}
        opened.log.follow(opened.positions)


class MemoryLogMachine(LogMachine):
    """The log in memory, with the steps that only a test can take."""

    in_memory = True

    def make_house(self) -> House:
        """Create a topic on a broker with its own clock."""
        self.clock = ManualClock()
        self.memory = MemoryHouse()
        self.memory.broker.now_ms = self.clock.wall_ms
        return self.memory

    @property
    def broker(self) -> MemoryBroker:
        """Return the broker."""
        return self.memory.broker

    @rule(passed_ms=st.integers(0, 100_000))
    def wait(self, passed_ms: int) -> None:
        """Time passes."""
        self.clock.advance(passed_ms)

    @rule(number=numbers, offsets=st.integers(1, 3))
    def pass_over(self, number: int, offsets: int) -> None:
        """Offsets are skipped without a record."""
        self.broker.skip(number, offsets)
        self.partitions[number].values += [None] * offsets

    @rule(number=numbers, part=parts)
    def truncate(self, number: int, part: float) -> None:
        """An unclean election loses the end of the log."""
        one = self.partitions[number]
        end = self._between(number, part)
        self.broker.truncate(number, end)
        del one.values[end:]
        one.times_ms = {offset: at for offset, at in one.times_ms.items() if offset < end}
        # A reader that was further may not notice once others have appended. Members notice by the leader epoch.
        for opened in self.logs:
            if opened.positions.get(number, 0) > end:
                self._begin(opened)

    @rule(which=st.integers(0))
    def append_where_nothing_is(self, which: int) -> None:
        """An append to a coordination partition that does not exist fails; the appends to the others succeed."""
        good, bad = self._log(which).log.append([Append(0, b"a"), Append(PARTITIONS, b"b")])
        assert good.offset == self._add(0, b"a")
        assert bad.offset is None
        assert bad.error

    @invariant()
    def what_is_there_is_what_was_appended(self) -> None:
        """The broker has exactly the records of the lists."""
        for number, one in enumerate(getattr(self, "partitions", [])):
            held = [(offset, value) for offset, _, value in self.broker.records(number)]
            assert held == one.between(one.start, one.end)
