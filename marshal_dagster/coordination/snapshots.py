"""Snapshots beside the coordination log: where a reader may start, and who writes them (protocol.md, section 5).

They lie in a compacted topic, those of a coordination partition in the partition with its number. It is read from its
end, a little further back each time, until a snapshot is found: what was written before is of no interest. Two
implementations of the topic pass the same tests: `kafka_snapshots.KafkaSnapshotTopic` and
`marshal_dagster.testing.MemorySnapshotTopic`.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar
from uuid import uuid4

from marshal_dagster.coordination.log import CoordinationLog, LogIdentity, PositionLostError
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.snapshots import (
    VERSION,
    WRITTEN_VERSIONS,
    Record,
    RejectedSnapshot,
    SnapshotChoice,
    choose,
    collect,
    outdated,
    render,
)
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import LastRecord, PartitionWorld

logger = logging.getLogger(__name__)

WORTH_A_LOOK: Final = 10_000
"""How many records a log must hold for a snapshot to be looked for: fewer are read as fast."""
_FIRST_LOOK: Final = 32
"""How many offsets back from the end the first look goes."""
_FURTHER: Final = 8
_NOT_TOLD: Final = frozenset({RejectedSnapshot.BEFORE_START, RejectedSnapshot.INCOMPLETE})
"""What is no sign of anything wrong once a snapshot that fits was found."""

T = TypeVar("T")
Read = Sequence[tuple[bytes | None, bytes | None]]
"""Keys and values, in order."""


def snapshot_topic_of(coordination_topic: str) -> str:
    """Name the topic that holds the snapshots of a coordination topic."""
    return f"{coordination_topic}_snapshot"


class SnapshotTopic(Protocol):
    """The compacted topic. All calls are bounded in time; one thread uses it at a time."""

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Ask for the present bounds. Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`."""
        ...

    def read(self, ranges: Mapping[int, OffsetBounds], timeout_s: float) -> Mapping[int, Read]:
        """Read what lies in these offsets, of which compaction may have left few. Raises `UnavailableError`."""
        ...

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append in order and wait. Raises `UnavailableError` unless all are acknowledged; `AuthorizationError`."""
        ...

    def close(self) -> None:
        """Let go of all connections; the next call opens them anew."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """Where the newest snapshot of a coordination partition stands, as its closing part says."""

    offset: int
    log_time_ms: int | None
    version: int = VERSION


class Snapshots:
    """Finds, writes and clears away the snapshots of one coordination topic."""

    def __init__(self, topic: SnapshotTopic, *, timeout_s: float = 10.0) -> None:
        """Say where they lie; `timeout_s` bounds the waiting for each answer."""
        self._topic = topic
        self._timeout_s = timeout_s

    def newest(
        self,
        identity: LogIdentity,
        bounds: Mapping[int, OffsetBounds],
        defaults: GroupSettings,
        foreign: Collection["ForeignSnapshot"] = (),
    ) -> Mapping[int, PartitionWorld]:
        """Give the states from which the coordination partitions, which hold `bounds`, can be read on.

        Absent where no snapshot fits; one whose last record is `foreign` to the log does not, see `newest_snapshots`.
        Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
        """

        def judge(number: int, records: Read) -> SnapshotChoice:
            return choose(
                records,
                topic_id=identity.topic_id,
                number=number,
                partitions=identity.partitions,
                start=bounds[number].start,
                end=bounds[number].end,
                defaults=defaults,
                foreign=[last for where, last in foreign if where == number],
            )

        choices = self._look(bounds.keys(), judge, lambda choice: choice.world is not None, _is_cut)
        for number, choice in choices.items():
            _report(identity.topic, number, choice)
        return {number: choice.world for number, choice in choices.items() if choice.world is not None}

    def heads(self, identity: LogIdentity) -> Mapping[int, SnapshotHead | None]:
        """Return where the newest whole snapshot of each coordination partition is, None without any.

        One of a former version does not count: it may be of no use to readers of the present one.
        Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
        """
        whose = (identity.topic_id, identity.partitions)

        def judge(_: int, records: Read) -> tuple[SnapshotHead | None, bool]:
            """Give the newest whole one, and whether a newer one may only have been read in part."""
            is_cut = False
            for stored in collect(records)[0]:
                name, closing = stored.name, stored.closing
                if (name.topic_id, name.partitions) != whose or name.version not in WRITTEN_VERSIONS:
                    continue
                if closing is not None:
                    return SnapshotHead(name.offset, closing.log_time_ms, name.version), is_cut
                is_cut = True
            return None, is_cut

        numbers = range(identity.partitions)
        heads = self._look(numbers, judge, lambda judged: judged[0] is not None, lambda judged: judged[1])
        return {number: heads.get(number, (None, False))[0] for number in numbers}

    def write(self, world: PartitionWorld, identity: LogIdentity, check: Callable[[], object] = lambda: None) -> None:
        """Write the state of a coordination partition, then clear away what that makes useless.

        Nothing is cleared away where `check`, which is called between, raises.
        Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`: then it may be there in part, which
        hurts nobody.
        """
        number, snapshot_id = world.number, uuid4().hex
        records = render(world, identity.topic_id, snapshot_id)
        self._topic.append(number, records)
        at = self._topic.bounds([number])[number]
        reach = 4 * len(records) + 2 * _FIRST_LOOK
        read = self._topic.read({number: OffsetBounds(max(at.start, at.end - reach), at.end)}, self._timeout_s)[number]
        stored, _ = collect(read)
        own = next((snapshot for snapshot in stored if snapshot.name.snapshot_id == snapshot_id), None)
        if own is not None and own.is_whole:
            check()
            self._topic.append(number, outdated(stored, own.name))

    def close(self) -> None:
        """Let go of the topic."""
        self._topic.close()

    def _look(
        self,
        numbers: Collection[int],
        judge: Callable[[int, Read], T],
        is_found: Callable[[T], bool],
        is_cut: Callable[[T], bool],
    ) -> dict[int, T]:
        """Look further and further back until `judge` has found something, at least twice where it `is_cut`."""
        before = self._topic.bounds(numbers)
        due = {number: at for number, at in before.items() if at.end > at.start}
        judged: dict[int, T] = {}
        reach = _FIRST_LOOK
        while due:
            ranges = {number: OffsetBounds(max(at.start, at.end - reach), at.end) for number, at in due.items()}
            for number, records in self._topic.read(ranges, self._timeout_s).items():
                judged[number] = judge(number, records)
                looks_again = reach == _FIRST_LOOK and is_cut(judged[number])
                if ranges[number].start == due[number].start or (is_found(judged[number]) and not looks_again):
                    del due[number]
            reach *= _FURTHER
        missing = {number for number in numbers if number not in judged or not is_found(judged[number])}
        now = self._topic.bounds(missing) if missing else {}
        renewed = {number for number, at in now.items() if at.end != before[number].end}
        if renewed:  # compaction may have taken the older one before it was read
            judged |= self._look(renewed, judge, is_found, is_cut)
        return judged


ForeignSnapshot = tuple[int, LastRecord]
"""A coordination partition, and a record that a snapshot says was read there, where the log has another."""


def newest_snapshots(
    log: CoordinationLog,
    bounds: Mapping[int, OffsetBounds],
    timeout_s: float,
    newest: Callable[[Collection[ForeignSnapshot]], Mapping[int, PartitionWorld]],
) -> Mapping[int, PartitionWorld]:
    """Return the states that `newest` finds, given which are foreign, and that were read from this very log.

    A log that lost records by an unclean leader election may have grown again past a snapshot: so the last record
    before it is looked at, where retention has left it. Afterwards the log follows what it did for that. Raises
    `UnavailableError`, and what `newest` does.
    """
    foreign: frozenset[ForeignSnapshot] = frozenset()
    while True:
        worlds = newest(foreign)
        found = foreign_snapshots(log, bounds, timeout_s, worlds)
        if not found:
            return worlds
        foreign |= found


def foreign_snapshots(
    log: CoordinationLog, bounds: Mapping[int, OffsetBounds], timeout_s: float, worlds: Mapping[int, PartitionWorld]
) -> frozenset[ForeignSnapshot]:
    """Give the last records of those `worlds` that were not read from this log, which holds `bounds`, up to its ends.

    Between its last record and where such a state stands there must be none, either. What retention has deleted is not
    looked at. Afterwards the log follows something else. Raises `UnavailableError`.
    """
    due: dict[int, tuple[LastRecord, int]] = {
        number: (world.last, world.next_offset)
        for number, world in worlds.items()
        if world.last is not None and world.last.offset >= bounds[number].start
    }
    foreign: set[ForeignSnapshot] = set()
    while due:
        try:
            there = _records(log, due, timeout_s)
        except PositionLostError as lost:
            last, _ = due.pop(lost.partition)
            if log.bounds([lost.partition])[lost.partition].start <= last.offset:
                foreign.add((lost.partition, last))  # truncated meanwhile: retention would have moved the start
        else:
            foreign |= {(number, last) for number, (last, _) in due.items() if there[number] != [last]}
            break
    return frozenset(foreign)


def _records(
    log: CoordinationLog, ranges: Mapping[int, tuple[LastRecord, int]], timeout_s: float
) -> Mapping[int, Sequence[LastRecord]]:
    """Read what the log holds from the offset of each record up to an end."""
    found: dict[int, list[LastRecord]] = {number: [] for number in ranges}
    ends = {number: end for number, (_, end) in ranges.items()}
    log.follow({number: first.offset for number, (first, _) in ranges.items()})
    for chunk in log.read_until(ends, timeout_s):
        within = [record for record in chunk.records if record[0] < ends[chunk.partition]]
        found[chunk.partition] += [LastRecord.of(*record) for record in within]
    return found


def _is_cut(choice: SnapshotChoice) -> bool:
    """Tell whether a newer snapshot may only have been read in part."""
    return RejectedSnapshot.INCOMPLETE in choice.passed_over.values()


def _report(topic: str, number: int, choice: SnapshotChoice) -> None:
    is_found = choice.world is not None
    odd = {name: why for name, why in choice.passed_over.items() if not (is_found and why in _NOT_TOLD)}
    for name, why in odd.items():
        logger.warning("snapshot %s of coordination partition %d of %r is passed over: %s", name, number, topic, why)
