"""Finds the files in which a new generation replaces rows, so that they are rewritten without these rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.files.commit_log import Commit, CommitView, Entry
from marshal_dagster.sinks.sink import Intervals, within


@dataclass(frozen=True, slots=True)
class OlderRows:
    """The rows of one range of an older generation, of which a new generation replaces some."""

    entry: Entry
    commit: Commit
    """The commit that added the range; its files have the columns of this commit."""
    files: tuple[str, ...]
    """The files that hold the rows now."""
    replaced: Intervals
    """The offsets at which rows are replaced."""

    @property
    def all_replaced(self) -> bool:
        """Whether the new generation replaces the rows at all offsets of the range."""
        taken = self.entry.taken
        return tuple(self.replaced) == ((taken.first_readable, taken.end),)


def older_rows(
    view: CommitView, taken: Sequence[ClaimedRange], offsets: Mapping[int, Intervals]
) -> Iterator[OlderRows]:
    """Yield the ranges of older generations that have rows at `offsets`, by the partition, in the ranges `taken`."""
    for range_ in taken:
        own = within(range_, offsets.get(range_.partition, ()))
        for entry in view.at_offsets_of(range_, below_generation=range_.generation):
            commit = view.commit_of(entry.files[0].partition("/")[0])
            replaced = within(entry.taken, own)
            if commit is not None and replaced:
                yield OlderRows(entry, commit, view.files(entry), replaced)
