"""What a sink reports about its output, for `marshal-dagster sink describe|check|vacuum`.

A sink that implements `ReportingSink` can be named with `--sink module:name`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from marshal_dagster.protocol.idempotence import StoredPosition


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """What an output has of one generation of a partition."""

    group: str
    topic: str
    partition: int
    generation: int
    is_current: bool
    """Whether it is the partition's newest generation, which the output continues."""
    start: int | None
    """The first offset of its ranges, None if the output stores only a position."""
    end: int
    """The offset after its last range."""
    ranges: int
    """The number of entries that the output stores for its ranges, 1 for a position."""
    rows: int | None
    """The number of rows that were written, None if unknown. Rows that were replaced or deleted later count too."""
    gaps: int
    """How often there are offsets between two ranges that no range has: normal in a group that claims ranges."""
    in_any_order: bool
    """Whether its ranges come in any order, because members of the group claim ranges."""


@dataclass(frozen=True, slots=True)
class SinkReport:
    """What an output has."""

    output: str
    """The output's name, such as `table public.orders`."""
    generations: Sequence[StoredGeneration]
    """What it has, by group, topic, partition and generation."""


@dataclass(frozen=True, slots=True)
class VacuumResult:
    """What a vacuum removes, or would remove."""

    output: str
    """The output's name."""
    entries: int
    """The number of entries of ranges before, or of what `what` names."""
    merged: int
    """The entries that are merged into the entry of the adjacent range before them."""
    obsolete: int
    """The entries that no write can need again, such as those of older generations without rows."""
    moved_rows: int | None
    """The rows that were assigned to another entry; None if nothing was written."""
    completed: int = 0
    """The attempts of writers that ended after their commit: their files are moved to their places, not deleted."""
    what: str = "entries"
    """What is removed, in the plural."""
    hint: str | None = None
    """How to remove what the sink leaves to the output itself."""


@runtime_checkable
class ReportingSink(Protocol):
    """A sink that reports what its output has.

    Example:
        ```python
        report = sink.describe()
        assert sink.check() == []
        sink.vacuum(dry_run=False)
        ```
    """

    def describe(self) -> SinkReport:
        """Return what the output has. Reads only the records of ranges."""
        ...

    def check(self) -> Sequence[str]:
        """Return what is wrong with the output, one line for each problem. May read all rows."""
        ...

    def vacuum(self, *, dry_run: bool) -> VacuumResult:
        """Remove records of ranges that no write can need again.

        Args:
            dry_run: Whether to report only.
        """
        ...


def stored_position(
    key: tuple[str, str, int], position: StoredPosition, *, start: int | None = None, gaps: int = 0
) -> StoredGeneration:
    """Return what an output has of a partition of which it stores one position, and no older generation.

    Args:
        key: The group, the topic and the partition.
        position: The position.
        start: The first offset of which there may be rows, None if it is unknown.
        gaps: The number of gaps between the offsets.
    """
    group, topic, partition = key
    return StoredGeneration(
        group=group,
        topic=topic,
        partition=partition,
        generation=position.generation,
        is_current=True,
        start=start,
        end=position.position,
        ranges=1,
        rows=None,
        gaps=gaps,
        in_any_order=False,
    )
