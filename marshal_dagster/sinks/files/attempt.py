"""What one call of `FileSink.write` has written, until it is committed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.files.commit_log import CommitView, Entry
from marshal_dagster.sinks.files.older_rows import OlderRows, older_rows
from marshal_dagster.sinks.sink import OFFSET_COLUMN, Intervals, within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of one range in an attempt, and the number of their rows if known."""

    files: tuple[str, ...] = ()
    """The names, as in `Entry.files`."""
    rows: int | None = 0
    has_offsets: bool = True

    def beside(self, others: "WrittenFiles") -> "WrittenFiles":
        """Return these files together with `others` of the same range."""
        return WrittenFiles(
            files=(*others.files, *self.files),
            rows=None if self.rows is None or others.rows is None else self.rows + others.rows,
            has_offsets=self.has_offsets and others.has_offsets,
        )


@dataclass(slots=True)
class Attempt:
    """The ranges and files of one attempt."""

    name: str
    frame: "DataFrame"
    ranges: tuple[ClaimedRange, ...]
    written: Mapping[int, WrittenFiles] = field(default_factory=dict)
    """The files of the rows, by partition."""
    replaced: Mapping[int, Intervals] | None = None
    """The offsets at which older rows are replaced, by partition; None as long as no older rows were found."""
    rewritten: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    """The files that stand for older ones, in which rows are replaced."""
    folders: int = 0
    """The number of folders that were begun for such files."""

    def of(self, range_: ClaimedRange) -> WrittenFiles:
        """Return the files of a range."""
        return self.written.get(range_.partition, WrittenFiles())

    def older(self, view: CommitView, taken: Sequence[ClaimedRange]) -> list[OlderRows]:
        """Return the older rows of which the ranges `taken` replace some; none if `replaced` is not known yet."""
        return list(older_rows(view, taken, self.replaced or {}))

    def unwritten(self, older: Iterable[OlderRows]) -> list[OlderRows]:
        """Return those of `older` whose files were not rewritten yet."""
        return [rows for rows in older if rows.files not in self.rewritten]

    def entries(self, taken: Sequence[ClaimedRange], over_older: Collection[ClaimedRange]) -> tuple[Entry, ...]:
        """Return the entries of the ranges `taken`; those of `over_older` state at which offsets they replace rows."""
        has_offsets = OFFSET_COLUMN in self.frame.columns
        entries = []
        for range_ in taken:
            own = self.of(range_)
            offsets = (self.replaced or {}).get(range_.partition, ()) if range_ in over_older else ()
            whole = has_offsets and own.has_offsets
            entries.append(Entry(range_, own.files, own.rows, whole, within(range_, offsets)))
        return tuple(entries)

    def all_rewritten(self, older: Iterable[OlderRows]) -> dict[str, tuple[str, ...]]:
        """Return which files stand for the files of `older` (`Commit.rewritten`)."""
        found: dict[str, tuple[str, ...]] = {}
        for rows in older:
            found |= dict.fromkeys(rows.files, ()) | {rows.files[0]: self.rewritten[rows.files]}
        return found
