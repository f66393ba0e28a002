"""The positions of all partitions of an Iceberg table's branch, as each commit of the sink stores them.

A commit stores them twice: with its snapshot, so that they are rolled back with it, and in the table's properties,
which stay when snapshots expire.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.sink import fewest_intervals, newer_version, partition_key, position_after

PROPERTY: Final = "marshal-dagster.positions"
"""The property of a snapshot with its positions. The table's property adds a dot and the branch."""
VERSION: Final = 1
"""The newest version of the text that this code reads and writes; newer ones are refused."""
_MOST_INTERVALS: Final = 20
"""The most intervals of one partition."""
_MOST_IN_ALL: Final = 1_000
"""The most intervals of a table whose partitions have one each or more, because each snapshot has a copy of them."""
_LONGEST_PLAIN: Final = 1_000
"""The longest text that is stored as it is. A longer one is compressed, because each snapshot has a copy of it."""
_COMMON: Final = ("group", "topic", "coordination_topic_id", "data_topic_id", "generation")
_FOUND_BY: Final = "found_by"
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The position of one partition, and the offsets of which the table may have rows."""

    position: StoredPosition
    covered: tuple[tuple[int, int], ...]
    """Offsets of the data topic, as intervals [start, end). The nearest ones are merged if there are more than 20,
    or more than 1,000 of all partitions."""
    found_by: tuple[int, ...] = ()
    """The ids of the columns in which each of these rows has its source, its partition and its offset, so that a new
    generation can replace it; empty if a row lacks one of them."""

    def covers(self, wanted: ClaimedRange) -> bool:
        """Return whether the table may have rows of offsets that `wanted` can read."""
        return self.position.data_topic_id == wanted.data_topic_id and any(
            start < wanted.end and end > wanted.first_readable for start, end in self.covered
        )


@dataclass(frozen=True, slots=True)
class TablePositions:
    """The positions after one commit: its number, the attempt that made it, and all partitions."""

    number: int = 0
    attempt: str = ""
    sequence_number: int = 0
    """Iceberg's sequence number of the commit's snapshot."""
    kept: Mapping[_Key, PartitionPosition] = field(default_factory=dict)

    def then(
        self,
        attempt: str,
        sequence_number: int,
        taken: Sequence[ClaimedRange],
        with_rows: Collection[int],
        replaceable: Collection[int] = (),
        *,
        columns: tuple[int, ...] = (),
    ) -> "TablePositions":
        """Return the positions after a commit that takes the ranges `taken`.

        Args:
            attempt: The attempt that makes the commit.
            sequence_number: The sequence number of its snapshot.
            taken: The ranges.
            with_rows: The partitions of which rows are written.
            replaceable: Those partitions of which each row has its source and its offset.
            columns: The ids of the columns of a row's source, partition and offset.
        """
        kept = dict(self.kept)
        count = len(kept.keys() | {partition_key(range_) for range_ in taken})
        most = max(1, min(_MOST_INTERVALS, _MOST_IN_ALL // max(1, count)))
        for range_ in taken:
            before = kept.get(partition_key(range_))
            is_same_topic = before is not None and before.position.data_topic_id == range_.data_topic_id
            covered = before.covered if before is not None and is_same_topic else ()
            found_by = before.found_by if before is not None and covered else columns
            if range_.partition in with_rows and range_.first_readable < range_.end:
                covered = fewest_intervals([*covered, (range_.first_readable, range_.end)], most)
                found_by = columns if range_.partition in replaceable and found_by == columns else ()
            kept[partition_key(range_)] = PartitionPosition(
                position_after(range_), covered, found_by if covered else ()
            )
        return TablePositions(self.number + 1, attempt, sequence_number, kept)

    def to_text(self) -> str:
        """Return the positions as JSON, compressed if it is long. Values that partitions share are stored once."""
        by_common: dict[tuple[object, ...], list[list[int]]] = {}
        for (group, topic, partition), kept in sorted(self.kept.items()):
            at = kept.position
            common = group, topic, at.coordination_topic_id, at.data_topic_id, at.generation, kept.found_by
            covered = [offset for interval in kept.covered for offset in interval]
            by_common.setdefault(common, []).append([partition, at.epoch, at.position, *covered])
        document = {
            "version": VERSION,
            "number": self.number,
            "attempt": self.attempt,
            "sequence_number": self.sequence_number,
            "positions": [_shared(common) | {"partitions": own} for common, own in by_common.items()],
        }
        text = json.dumps(document, separators=(",", ":"))
        return text if len(text) <= _LONGEST_PLAIN else b64encode(zlib.compress(text.encode(), 9)).decode()

    @classmethod
    def from_text(cls, text: str, where: str) -> "TablePositions":
        """Parse the text of `to_text`.

        Args:
            text: The text.
            where: The name of the property and the table, for errors.

        Raises:
            SinkRejectedError: The text is damaged or has a newer version.
        """
        try:
            plain = text if text.startswith("{") else zlib.decompress(b64decode(text, validate=True)).decode()
            document: dict[str, Any] = json.loads(plain)
            if document["version"] != VERSION:
                raise newer_version(where, document["version"], VERSION)
            kept = {
                (common["group"], common["topic"], own[0]): _kept_from(common, own)
                for common in document["positions"]
                for own in common["partitions"]
            }
            return cls(document["number"], document["attempt"], document["sequence_number"], kept)
        except (ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
            raise SinkRejectedError(
                f"{where} is damaged ({error!r}), so nothing was written. Restore the property from an older metadata "
                "file of the table, or write to a new table"
            ) from None


def _shared(common: Sequence[object]) -> dict[str, object]:
    """Return the values that partitions share."""
    *values, found_by = common
    return dict(zip(_COMMON, values, strict=True)) | ({_FOUND_BY: found_by} if found_by else {})


def _kept_from(common: Mapping[str, Any], own: Sequence[int]) -> PartitionPosition:
    _, epoch, position, *offsets = own
    ids = {name: common[name] for name in ("coordination_topic_id", "data_topic_id", "generation")}
    covered = tuple(zip(offsets[::2], offsets[1::2], strict=True))
    found_by = tuple(common.get(_FOUND_BY, ()))
    return PartitionPosition(StoredPosition(**ids, epoch=epoch, position=position), covered, found_by)
