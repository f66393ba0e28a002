"""What a commit of the Delta sink says of each partition, and what the sink needs of a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.sink import Intervals, newer_version, position_after

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


APPLICATION = "marshal-dagster"
"""The application id of the sink's transactions in a table."""
MARSHAL_COLUMN = "marshal"
VERSION = 2
"""The newest of what a commit says of the positions; a newer one is refused."""
_ONE_BY_ONE = 1
"""The version before, in which each partition has all fields of its own."""
_COMMON = ("group", "topic", "coordination_topic_id", "data_topic_id", "generation", "first_generation")
_OWN = ("partition", "epoch", "position")
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class DeltaPosition:
    """What is known of one partition: where it stands, and the first generation that it was written in."""

    position: StoredPosition
    first_generation: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit of the sink says: its number, who made it, and where all partitions of the output stand."""

    number: int = 0
    attempt: str = ""
    kept: Mapping[_Key, DeltaPosition] = field(default_factory=dict)

    def then(self, attempt: str, taken: Sequence[ClaimedRange]) -> "Commit":
        """Return the commit that follows on this one and takes these ranges."""
        changed = {partition_key(each): _kept(self.kept.get(partition_key(each)), each) for each in taken}
        return Commit(self.number + 1, attempt, {**self.kept, **changed})

    def to_metadata(self) -> str:
        """Return it as text: what partitions have in common once, and of each its number, epoch and position."""
        told: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
        for (group, topic, partition), each in sorted(self.kept.items()):
            at = each.position
            common = group, topic, at.coordination_topic_id, at.data_topic_id, at.generation, each.first_generation
            told.setdefault(common, []).append((partition, at.epoch, at.position))
        positions = [dict(zip(_COMMON, common, strict=True), partitions=each) for common, each in told.items()]
        said = {"version": VERSION, "number": self.number, "attempt": self.attempt, "positions": positions}
        return json.dumps({APPLICATION: said}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_metadata(cls, text: str | None) -> "Commit | None":
        """Return what `to_metadata` wrote, None for what others write into their commits.

        Raises `SinkRejectedError` for a newer version.
        """
        try:
            said = json.loads(text or "null")
        except ValueError:
            return None
        if not isinstance(said, dict) or APPLICATION not in said:
            return None
        ours: dict[str, Any] = said[APPLICATION]
        if ours["version"] not in {_ONE_BY_ONE, VERSION}:
            raise newer_version("the table's last commit", ours["version"], VERSION)
        one_by_one = ours["version"] == _ONE_BY_ONE
        kept = {
            (each["group"], each["topic"], partition): _kept_from(each, epoch, position)
            for each in ours["positions"]
            for partition, epoch, position in ([[each[name] for name in _OWN]] if one_by_one else each["partitions"])
        }
        return cls(ours["number"], ours["attempt"], kept)


class Rows(Protocol):
    """The rows of an evaluated frame, which are there to be written more than once."""

    @property
    def counts(self) -> Mapping[int | None, int]:
        """Rows by partition."""
        ...

    @property
    def has_offsets(self) -> bool:
        """Whether there is a column `offset`."""
        ...

    def offsets(self) -> Mapping[int, Intervals]:
        """Work out at which offsets of each partition there are rows."""
        ...


class Table(Protocol):
    """What the sink needs of a Delta table."""

    def commits(self) -> Iterator[Commit]:
        """Yield what the sink's commits say, the newest first; none if there is no table."""
        ...

    def properties(self) -> Mapping[str, str]:
        """Return the table's properties; none if there is no table."""
        ...

    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> AbstractContextManager[Rows]:
        """Evaluate the rows, but for those of the partitions `done`."""
        ...

    def held(self, ranges: Sequence[ClaimedRange], *, only_older: bool) -> list[tuple[ClaimedRange, int, bool]]:
        """Return which ranges can be read where the table holds rows of this data topic.

        That is the range, a generation of these rows, and whether all of them have offsets.
        """
        ...

    def older_offsets(self, ranges: Sequence[ClaimedRange]) -> Mapping[int, Intervals]:
        """Return, by partition, the offsets that can be read in `ranges` and at which rows of older generations are."""
        ...

    def commit(
        self, rows: Rows, taken: Sequence[ClaimedRange], commit: Commit, replaced: Mapping[ClaimedRange, Intervals]
    ) -> None:
        """Add the rows of the ranges in one commit, in place of older generations' at the offsets `replaced`.

        Does so if no other commit has that number, else raises anything or does nothing.
        """
        ...


def partition_key(wanted: ClaimedRange) -> _Key:
    """Return group, topic and partition of a range."""
    return wanted.group, wanted.topic, wanted.partition


def _kept(before: DeltaPosition | None, taken: ClaimedRange) -> DeltaPosition:
    return DeltaPosition(position_after(taken), before.first_generation if before else taken.generation)


def _kept_from(common: Mapping[str, Any], epoch: int, position: int) -> DeltaPosition:
    stored = StoredPosition(
        coordination_topic_id=common["coordination_topic_id"],
        data_topic_id=common["data_topic_id"],
        generation=common["generation"],
        epoch=epoch,
        position=position,
    )
    return DeltaPosition(stored, common["first_generation"])
