"""The metadata of a commit of the Delta sink: the position of each partition of the output, stored as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.sink import newer_version, partition_key, position_after

APPLICATION = "marshal-dagster"
"""The application id of the sink's transactions in a table."""
MARSHAL_COLUMN = "marshal"
VERSION = 2
"""The newest version of the metadata that this code reads and writes; newer ones are refused."""
_ONE_BY_ONE = 1
"""The previous version, in which each partition repeats all fields."""
_COMMON = ("group", "topic", "coordination_topic_id", "data_topic_id", "generation", "first_generation")
_OWN = ("partition", "epoch", "position")
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class DeltaPosition:
    """The position of one partition, and the first generation in which it was written."""

    position: StoredPosition
    first_generation: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The metadata of one commit: its number, the attempt that made it, and the positions of all partitions."""

    number: int = 0
    attempt: str = ""
    kept: Mapping[_Key, DeltaPosition] = field(default_factory=dict)
    table_id: str | None = None
    """The id of the table for which the commit was made, None if the table did not exist yet or in older commits."""

    def then(self, attempt: str, taken: Sequence[ClaimedRange], table_id: str | None = None) -> "Commit":
        """Return the commit that follows this one and takes the ranges `taken`."""
        kept = dict(self.kept)
        for range_ in taken:
            before = kept.get(partition_key(range_))
            first_generation = before.first_generation if before else range_.generation
            kept[partition_key(range_)] = DeltaPosition(position_after(range_), first_generation)
        return Commit(self.number + 1, attempt, kept, table_id)

    def to_metadata(self) -> str:
        """Return the metadata as JSON. Fields that partitions have in common are stored once."""
        by_common: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
        for (group, topic, partition), kept in sorted(self.kept.items()):
            at = kept.position
            common = group, topic, at.coordination_topic_id, at.data_topic_id, at.generation, kept.first_generation
            by_common.setdefault(common, []).append((partition, at.epoch, at.position))
        positions = [dict(zip(_COMMON, common, strict=True), partitions=own) for common, own in by_common.items()]
        table = {} if self.table_id is None else {"table": self.table_id}
        document = {"version": VERSION, "number": self.number, "attempt": self.attempt, **table, "positions": positions}
        return json.dumps({APPLICATION: document}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_metadata(cls, text: str | None) -> "Commit | None":
        """Parse the metadata of a commit, or return None if another writer made the commit.

        Raises:
            SinkRejectedError: If the metadata has a newer version.
        """
        try:
            document = json.loads(text or "null")
        except ValueError:
            return None
        if not isinstance(document, dict) or APPLICATION not in document:
            return None
        ours: dict[str, Any] = document[APPLICATION]
        if ours["version"] not in {_ONE_BY_ONE, VERSION}:
            raise newer_version("the table's last commit", ours["version"], VERSION)
        one_by_one = ours["version"] == _ONE_BY_ONE
        kept = {
            (common["group"], common["topic"], partition): _kept_from(common, epoch, position)
            for common in ours["positions"]
            for partition, epoch, position in (
                [[common[name] for name in _OWN]] if one_by_one else common["partitions"]
            )
        }
        return cls(ours["number"], ours["attempt"], kept, ours.get("table"))


def _kept_from(common: Mapping[str, Any], epoch: int, position: int) -> DeltaPosition:
    own = {name: common[name] for name in ("coordination_topic_id", "data_topic_id", "generation")}
    return DeltaPosition(StoredPosition(**own, epoch=epoch, position=position), common["first_generation"])
