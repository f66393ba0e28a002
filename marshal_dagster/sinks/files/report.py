"""Describes and checks a file output by its commit log, for `marshal-dagster sink describe|check`."""

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, pairwise

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.files.commit_log import Commit, CommitView, Entry
from marshal_dagster.sinks.files.places import ATTEMPTS, of_attempt, visible_place
from marshal_dagster.sinks.files.storage import Storage
from marshal_dagster.sinks.report import StoredGeneration
from marshal_dagster.sinks.sink import partition_key


def stored_generations(view: CommitView) -> list[StoredGeneration]:
    """Return what the output has of each generation of a partition."""
    newest: dict[tuple[str, str, int], int] = {}
    for entry in _entries(view):
        key = partition_key(entry.taken)
        newest[key] = max(newest.get(key, 0), entry.taken.generation)
    return [_stored(entries, newest) for entries in _by_generation(view)]


def range_problems(view: CommitView) -> Iterator[str]:
    """Yield the gaps and overlaps of ranges, by partition and generation."""
    for entries, stored in zip(_by_generation(view), stored_generations(view), strict=True):
        where = f"group {stored.group!r}, {stored.topic}/{stored.partition}, generation {stored.generation}"
        if stored.gaps and stored.is_current and not stored.in_any_order:
            yield f"{where}: gaps between its ranges, which come in order: {stored.gaps}"
        overlaps = sum(later.taken.start < earlier.taken.end for earlier, later in pairwise(entries))
        if overlaps:
            yield f"{where}: ranges that overlap the one before them: {overlaps}"


def file_problems(view: CommitView, storage: Storage, *, are_counted: bool) -> Iterator[str]:
    """Yield the committed files that are missing or not visible yet, and the files that no commit has.

    Args:
        view: All commits.
        storage: The output's files.
        are_counted: Whether the files contain their number of rows, as Parquet files do.
    """
    there = frozenset(storage.files_below("") or ())
    owners: dict[str, int] = {}
    for number, commit in enumerate(view.commits, start=1):
        for entry in commit.entries:
            where = f"commit {number}, {entry.taken}"
            places = [_place(name, commit, there) for name in view.files(entry)]
            missing = [place for place in places if place not in there]
            yield from (f"{where}: file {storage.full(place)} is missing" for place in missing)
            if commit.visible and any(place.startswith(ATTEMPTS) for place in places):
                yield f"{where}: its files are not visible yet. Run `marshal-dagster sink vacuum`"
            for place in places:
                if place in owners:
                    yield f"{where}: file {storage.full(place)} is in commit {owners[place]} too"
                owners[place] = number
            is_whole = not missing and view.files(entry) == entry.files
            if are_counted and entry.rows is not None and is_whole:
                yield from _count_problems(storage, entry, places, where)
    foreign = sorted(name for name in there - owners.keys() if not any(part[0] in "._" for part in name.split("/")))
    if foreign:
        yield f"files that no commit has, which other engines read: {len(foreign)}, such as {storage.full(foreign[0])}"


def _place(name: str, commit: Commit, there: Collection[str]) -> str:
    hidden = of_attempt(name)
    return hidden if hidden in there or not commit.visible else visible_place(name)


def _count_problems(storage: Storage, entry: Entry, names: Iterable[str], where: str) -> Iterator[str]:
    count = 0
    for name in names:
        try:
            count += storage.rows(name)
        except (SinkRejectedError, OSError, ValueError) as error:
            yield f"{where}: file {storage.full(name)} cannot be read: {error}"
            return
    if count != entry.rows:
        yield f"{where}: its files have {count} rows, of {entry.rows} that were committed"


def _entries(view: CommitView) -> Iterator[Entry]:
    return (entry for commit in view.commits for entry in commit.entries)


def _by_generation(view: CommitView) -> list[list[Entry]]:
    """Return the entries of each generation of a partition, in the order of their offsets."""
    rising = sorted(
        _entries(view),
        key=lambda entry: (
            *partition_key(entry.taken),
            entry.taken.generation,
            entry.taken.start,
            entry.taken.end,
        ),
    )
    of_one = groupby(rising, key=lambda entry: (*partition_key(entry.taken), entry.taken.generation))
    return [list(entries) for _, entries in of_one]


def _stored(entries: list[Entry], newest: dict[tuple[str, str, int], int]) -> StoredGeneration:
    first = entries[0].taken
    counts = [entry.rows for entry in entries]
    known = [count for count in counts if count is not None]
    return StoredGeneration(
        group=first.group,
        topic=first.topic,
        partition=first.partition,
        generation=first.generation,
        is_current=first.generation == newest[partition_key(first)],
        start=first.start,
        end=max(entry.taken.end for entry in entries),
        ranges=len(entries),
        rows=sum(known) if len(known) == len(counts) else None,
        gaps=_gaps(entries),
        in_any_order=any(entry.taken.in_any_order for entry in entries),
    )


def _gaps(entries: list[Entry]) -> int:
    gaps, end = 0, entries[0].taken.end
    for entry in entries:
        gaps += entry.taken.start > end
        end = max(end, entry.taken.end)
    return gaps
