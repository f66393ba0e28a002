"""Where a group stands in a data topic: what Dagster shows of it as observations and checks."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from dagster import TableMetadataValue

from marshal_dagster.protocol.state import Key, Phase
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.runs.tables import Column, table
from marshal_dagster.telemetry.metrics import record_lag

MOST_SHOWN: Final = 100
"""How many partitions a table has at most."""


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """One partition of a data topic: what it holds, up to `end` (exclusive), and where the group stands in it."""

    partition: int
    start: int
    end: int
    key: Key | None

    @property
    def offset(self) -> int | None:
        """The next offset to read; None before the group has claimed the partition of this very topic."""
        return None if self.key is None else self.key.offset

    @property
    def lag(self) -> int:
        """How many offsets are left to read; all that there is while the group has no position."""
        first = max(self.start, self.offset or 0)
        ahead = () if self.key is None else (range_ for range_ in self.key.ranges if range_.phase is Phase.DONE)
        done = sum(max(0, min(range_.end, self.end) - max(range_.start, first)) for range_ in ahead)
        return max(0, self.end - first - done)

    @property
    def lost(self) -> int:
        """How many offsets retention deleted before the group had read them."""
        return 0 if self.offset is None else max(0, min(self.start, self.end) - self.offset)


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """A data topic, by its id, and its partitions in order."""

    topic_id: str
    partitions: tuple[PartitionProgress, ...]

    @property
    def lag(self) -> int:
        """How many offsets are left to read in all."""
        return sum(partition.lag for partition in self.partitions)

    @property
    def ends(self) -> Mapping[int, int]:
        """The next offset of each partition that nothing has been written to."""
        return {partition.partition: partition.end for partition in self.partitions}

    def table(self) -> TableMetadataValue:
        """Show the partitions; of more than 100 those with the most lag, because Dagster keeps each observation."""
        shown = sorted(self.partitions, key=lambda partition: -partition.lag)[:MOST_SHOWN]
        return table(_COLUMNS, sorted(shown, key=lambda partition: partition.partition))


_COLUMNS: Final[Sequence[Column[PartitionProgress]]] = (
    Column("partition", "int", "The partition."),
    Column("start", "int", "The first offset that it holds."),
    Column("end", "int", "The next one to be written, as far as no open transaction holds it."),
    Column("offset", "int", "The next one that the group reads; empty before it has begun."),
    Column("lag", "int", "How many are left to read."),
)


def topic_progress(claimer: ClaimerResource, topic: str) -> TopicProgress:
    """Return where the group of `claimer` is in `topic`; nothing is claimed or written.

    Raises `ConfigurationError`, `TopicNotFoundError` for either topic, `AuthorizationError`, `UnavailableError`.
    """
    with closing(claimer.open_data()) as data:
        described = data.describe(topic)
        bounds = data.offsets(topic, described.partitions)
    keys = claimer.group_keys()

    def key(partition: int) -> Key | None:
        """Return its key, unless that belongs to an earlier topic of that name (protocol.md, section 6)."""
        known = keys.get((topic, partition))
        return known if known is not None and known.data_topic_id in {None, described.topic_id} else None

    found = TopicProgress(
        described.topic_id,
        tuple(
            PartitionProgress(partition, bounds[partition].start, bounds[partition].end, key(partition))
            for partition in described.partitions
        ),
    )
    record_lag(claimer.group, topic, found.lag)
    return found
