"""Finds, writes and deletes snapshots of the coordination log, from which readers can start (protocol.md, section 5).

The snapshots are stored in a compacted topic. Those of a coordination partition are in the partition with the same
number. Readers look back from the end of that partition, further each time, until they find a snapshot. Two
implementations of the topic pass the same tests: `kafka_snapshots.KafkaSnapshotTopic` and
`marshal_dagster.testing.MemorySnapshotTopic`.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

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
"""A reader looks for a snapshot if the log has this many offsets. A shorter log is read just as fast without one."""
_FIRST_LOOK: Final = 32
"""How many offsets the first look goes back from the end."""
_FURTHER: Final = 8
_NOT_TOLD: Final = frozenset({RejectedSnapshot.BEFORE_START, RejectedSnapshot.INCOMPLETE})
"""Reasons for passing over a snapshot that are not logged if another snapshot fits."""

T = TypeVar("T")
Read = Sequence[tuple[bytes | None, bytes | None]]
"""Keys and values of records, in order."""


def snapshot_topic_of(coordination_topic: str) -> str:
    """Return the name of the topic for the snapshots of a coordination topic."""
    return f"{coordination_topic}_snapshot"


class SnapshotTopic(Protocol):
    """The interface of the compacted topic. All calls are bounded in time; one thread uses it at a time."""

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present bounds. Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`."""
        ...

    def read(self, ranges: Mapping[int, OffsetBounds], timeout_s: float) -> Mapping[int, Read]:
        """Return the records at these offsets that compaction has left. Raises `UnavailableError`."""
        ...

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append records in order and wait for their acknowledgements.

        Raises:
            AuthorizationError: this user may not write to the topic.
            UnavailableError: a record was not acknowledged.
        """
        ...

    def close(self) -> None:
        """Close all connections; the next call opens them again."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """The position of a snapshot in the log, from its closing part."""

    offset: int
    """The next offset to read after the snapshot."""
    log_time_ms: int | None
    version: int = VERSION


class Snapshots:
    """Finds, writes and deletes the snapshots of one coordination topic."""

    def __init__(self, topic: SnapshotTopic, *, timeout_s: float = 10.0) -> None:
        """Use the snapshots in `topic`; `timeout_s` is how long to wait for each answer."""
        self._topic = topic
        self._timeout_s = timeout_s

    def newest(
        self,
        identity: LogIdentity,
        bounds: Mapping[int, OffsetBounds],
        defaults: GroupSettings,
        foreign: Collection["ForeignSnapshot"] = (),
    ) -> Mapping[int, PartitionWorld]:
        """Return the state in the newest usable snapshot of each coordination partition that has one.

        Args:
            identity: the log from which the snapshot must have been made.
            bounds: the present bounds of the coordination partitions.
            defaults: the settings of groups that have none.
            foreign: last records of snapshots that were read from another log; these snapshots do not fit (see
                `newest_snapshots`).

        Raises:
            TopicNotFoundError: the snapshot topic does not exist.
            AuthorizationError: this user may not read it.
            UnavailableError: no answer in time.
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
        """Return the position of each coordination partition's newest complete snapshot, or None if it has none.

        Snapshots of a former version do not count, because a present reader may not be able to use them.

        Raises:
            TopicNotFoundError: the snapshot topic does not exist.
            AuthorizationError: this user may not read it.
            UnavailableError: no answer in time.
        """
        whose = (identity.topic_id, identity.partitions)

        def judge(_: int, records: Read) -> tuple[SnapshotHead | None, bool]:
            """Return the newest complete snapshot, and whether a newer one may have been read only in part."""
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
        """Write the state of a coordination partition, then delete the snapshots that it replaces.

        `check` is called between the two steps. If it raises, nothing is deleted. If `write` raises, a part of the
        snapshot may be in the topic; readers skip it.

        Raises:
            TopicNotFoundError: the snapshot topic does not exist.
            AuthorizationError: this user may not write to it.
            UnavailableError: no answer in time.
        """
        number, snapshot_id = world.number, new_snapshot_id()
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
        """Close the connections of the snapshot topic."""
        self._topic.close()

    def _look(
        self,
        numbers: Collection[int],
        judge: Callable[[int, Read], T],
        is_found: Callable[[T], bool],
        is_cut: Callable[[T], bool],
    ) -> dict[int, T]:
        """Read further and further back until `judge` has found a snapshot.

        If the first look may have cut off the start of a newer snapshot (`is_cut`), look further back once more.
        """
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
        if renewed:  # compaction may have deleted the older snapshot before it was read
            judged |= self._look(renewed, judge, is_found, is_cut)
        return judged


ForeignSnapshot = tuple[int, LastRecord]
"""A coordination partition, and the last record before a snapshot, where the log has another record."""


def newest_snapshots(
    log: CoordinationLog,
    bounds: Mapping[int, OffsetBounds],
    timeout_s: float,
    newest: Callable[[Collection[ForeignSnapshot]], Mapping[int, PartitionWorld]],
) -> Mapping[int, PartitionWorld]:
    """Return the states in the newest snapshots that were read from this same log.

    A log that lost records in an unclean leader election may have grown past a snapshot again. So the last record
    before the snapshot is compared with the log, unless retention has deleted it. Afterwards call `log.follow` again.
    This raises `UnavailableError`, and the errors of `newest`.

    Args:
        log: the coordination log.
        bounds: its present bounds.
        timeout_s: how long to wait for each answer.
        newest: returns the states in the newest snapshots, except those that are foreign.
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
    """Return the last records of the `worlds` that were not read from this log, whose bounds are `bounds`.

    Between the last record of a state and its next offset there must be no other record, either. Records that retention
    has deleted are not compared. Afterwards call `log.follow` again. Raises `UnavailableError`.
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
                foreign.add((lost.partition, last))  # the log was truncated: retention would have moved the start
        else:
            foreign |= {(number, last) for number, (last, _) in due.items() if there[number] != [last]}
            break
    return frozenset(foreign)


def _records(
    log: CoordinationLog, ranges: Mapping[int, tuple[LastRecord, int]], timeout_s: float
) -> Mapping[int, Sequence[LastRecord]]:
    """Return the records in the log from the offset of each given record up to an end."""
    found: dict[int, list[LastRecord]] = {number: [] for number in ranges}
    ends = {number: end for number, (_, end) in ranges.items()}
    log.follow({number: first.offset for number, (first, _) in ranges.items()})
    for chunk in log.read_until(ends, timeout_s):
        within = [record for record in chunk.records if record[0] < ends[chunk.partition]]
        found[chunk.partition] += [LastRecord.of(*record) for record in within]
    return found


def _is_cut(choice: SnapshotChoice) -> bool:
    """Return whether a newer snapshot may have been read only in part."""
    return RejectedSnapshot.INCOMPLETE in choice.passed_over.values()


def _report(topic: str, number: int, choice: SnapshotChoice) -> None:
    is_found = choice.world is not None
    odd = {name: why for name, why in choice.passed_over.items() if not (is_found and why in _NOT_TOLD)}
    for name, why in odd.items():
        logger.warning("snapshot %s of coordination partition %d of %r is not used: %s", name, number, topic, why)


def new_snapshot_id() -> str:
    """Return a random id that no other snapshot has."""
    return os.urandom(16).hex()
