"""The metadata of a commit of the Delta sink: the position of each partition of the output, stored as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.sink import newer_version, partition_key, position_after
from marshal_dagster.sinks.upsert_keys import Keys

APPLICATION = "marshal-dagster"
"""The application id of the sink's transactions in a table."""
MARSHAL_COLUMN = "marshal"
VERSION = 3
"""The newest version of the metadata that this code reads and writes; newer ones are refused."""
_ONE_BY_ONE = 1
"""The first version, in which each partition repeats all fields."""
_APPENDED = 2
"""The version of tables to which rows are only added. Tables with one row for each key have the newest version."""
_COMMON = ("group", "topic", "coordination_topic_id", "data_topic_id", "generation", "first_generation")
_OWN = ("partition", "epoch", "position")
_STARTS = ("began", "older_began")
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class DeltaPosition:
    """The position of one partition, and the first generation in which it was written."""

    position: StoredPosition
    first_generation: int
    began: int = 0
    """The first readable offset of the generation's first range. Only tables with one row for each key store it."""
    older_began: int | None = None
    """The lowest `began` of older generations of the same data topic, None if there is none."""

    def then(self, taken: ClaimedRange) -> "DeltaPosition":
        """Return the position after the range `taken`, which this output accepts."""
        at, began, older_began = self.position, self.began, self.older_began
        if taken.generation != at.generation:
            earlier = [began] if older_began is None else [began, older_began]
            older_began = min(earlier) if taken.data_topic_id == at.data_topic_id else None
            began = taken.first_readable
        return DeltaPosition(position_after(taken), self.first_generation, began, older_began)


@dataclass(frozen=True, slots=True)
class Commit:
    """The metadata of one commit: its number, the attempt that made it, and the positions of all partitions."""

    number: int = 0
    attempt: str = ""
    kept: Mapping[_Key, DeltaPosition] = field(default_factory=dict)
    table_id: str | None = None
    """The id of the table for which the commit was made, None if the table did not exist yet or in older commits."""
    keys: Keys | None = None
    """The columns by which rows replace each other, None if rows are only added."""

    def then(
        self, attempt: str, taken: Sequence[ClaimedRange], table_id: str | None = None, keys: Keys | None = None
    ) -> "Commit":
        """Return the commit that follows this one and takes the ranges `taken`."""
        kept = dict(self.kept)
        for range_ in taken:
            before = kept.get(partition_key(range_))
            if before is not None and keys is not None:
                kept[partition_key(range_)] = before.then(range_)
                continue
            first_generation = before.first_generation if before else range_.generation
            began = 0 if keys is None else range_.first_readable
            kept[partition_key(range_)] = DeltaPosition(position_after(range_), first_generation, began)
        return Commit(self.number + 1, attempt, kept, table_id, keys)

    def to_metadata(self) -> str:
        """Return the metadata as JSON. Fields that partitions have in common are stored once."""
        by_common: dict[tuple[object, ...], list[tuple[int | None, ...]]] = {}
        for (group, topic, partition), kept in sorted(self.kept.items()):
            at = kept.position
            common = group, topic, at.coordination_topic_id, at.data_topic_id, at.generation, kept.first_generation
            starts = () if self.keys is None else (kept.began, kept.older_began)
            by_common.setdefault(common, []).append((partition, at.epoch, at.position, *starts))
        positions = [dict(zip(_COMMON, common, strict=True), partitions=own) for common, own in by_common.items()]
        table = {} if self.table_id is None else {"table": self.table_id}
        version, keys = _APPENDED, dict[str, object]()
        if self.keys is not None:
            version, keys = VERSION, {"keys": list(self.keys.columns), "order_by": self.keys.order_by}
        document = {
            "version": version,
            "number": self.number,
            "attempt": self.attempt,
            **table,
            **keys,
            "positions": positions,
        }
        return json.dumps({APPLICATION: document}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_metadata(cls, text: str | None) -> "Commit | None":
        """Parse the metadata of a commit, or return None if another writer made the commit.

        Raises:
            SinkRejectedError: The metadata has a newer version.
        """
        try:
            document = json.loads(text or "null")
        except ValueError:
            return None
        if not isinstance(document, dict) or APPLICATION not in document:
            return None
        ours: dict[str, Any] = document[APPLICATION]
        if ours["version"] not in {_ONE_BY_ONE, _APPENDED, VERSION}:
            raise newer_version("the table's last commit", ours["version"], VERSION)
        one_by_one = ours["version"] == _ONE_BY_ONE
        kept = {
            (common["group"], common["topic"], partition): _kept_from(common, epoch, position, starts)
            for common in ours["positions"]
            for partition, epoch, position, *starts in (
                [[common[name] for name in _OWN]] if one_by_one else common["partitions"]
            )
        }
        keys = Keys(tuple(ours["keys"]), ours["order_by"]) if "keys" in ours else None
        return cls(ours["number"], ours["attempt"], kept, ours.get("table"), keys)


def _kept_from(common: Mapping[str, Any], epoch: int, position: int, starts: Sequence[int | None]) -> DeltaPosition:
    own = {name: common[name] for name in ("coordination_topic_id", "data_topic_id", "generation")}
    known: dict[str, Any] = dict(zip(_STARTS, starts, strict=False))
    return DeltaPosition(StoredPosition(**own, epoch=epoch, position=position), common["first_generation"], **known)
