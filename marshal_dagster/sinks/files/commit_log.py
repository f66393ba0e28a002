"""The commit log of a file output: an ordered record of which files contain the rows of which ranges.

Commit n is the file `_marshal/commits/<n>.json`, which exactly one writer can create, atomically (`Storage.publish`).
A writer that loses reads the winner's commit and judges its ranges again. Every 100 commits a checkpoint repeats all
commits before it. `files.sink` appends commits and `files.reader` reads their rows; this module needs only the
standard library.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredRanges, TakenRanges
from marshal_dagster.sinks.files.storage import Storage
from marshal_dagster.sinks.sink import newer_version, partition_key

VERSION = 3
"""The newest version of these files that this code reads; newer ones are refused.

In commits of version 3 files are visible: they are moved out of the folder of their attempt, and files with replaced
rows are rewritten. Other commits without ranges in any order are written as version 1. In version 2 these ranges have
the field `in_any_order`: a reader that took the end of one for the output's position would skip the ranges missing
before it.
"""
CHECKPOINT_EVERY = 100
FOLDER = "_marshal"
"""The folder of the sink's own files below the output."""
_KEPT_CHECKPOINTS = 2
_DIGITS = 20
_RANGE_FIELDS = (
    "coordination_topic_id",
    "group",
    "topic",
    "data_topic_id",
    "partition",
    "generation",
    "epoch",
    "start",
    "end",
    "first_readable",
)
_COMMIT_FIELDS = ("attempt", "format", "schema")
_COMMITS, _CHECKPOINTS = f"{FOLDER}/commits", f"{FOLDER}/checkpoints"
_IN_ANY_ORDER = "in_any_order"
_OPTIONS, _PARTITION_BY, _REWRITTEN = "options", "partition_by", "rewritten"

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One range of a commit."""

    taken: ClaimedRange
    files: tuple[str, ...]
    """The files with the range's rows, each beginning with its attempt: `attempt/marshal_range=3/part-0.parquet`."""
    rows: int | None
    """The number of rows in these files, None if unknown."""
    has_offsets: bool
    """Whether all rows have an offset."""
    replaces: tuple[tuple[int, int], ...] = ()
    """The offsets at which this range replaces rows of older generations; empty if there are no older rows."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The ranges that one writer added in one atomic step."""

    attempt: str
    format: str
    schema: str
    """The rows' Spark schema as JSON, with the columns in the order of the files."""
    entries: tuple[Entry, ...]
    options: Mapping[str, str] | None = None
    """The user's options for reading files of a text format; None in commits of older versions."""
    visible: bool = False
    """Whether committed files are moved to their visible place. It is the same in all commits of an output."""
    partition_by: tuple[str, ...] = ()
    """The columns that are stored as folders `column=value`. They are the same in all commits of an output."""
    rewritten: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files of older commits that no longer count, and the files of this attempt with the rows that still do."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that this commit adds to the output."""
        own = (entry.files for entry in self.entries)
        return tuple(name for names in (*own, *self.rewritten.values()) for name in names)


@dataclass(slots=True)
class CommitView:
    """All commits up to `number`, indexed for judging ranges and reading rows."""

    number: int = 0
    commits: list[Commit] = field(default_factory=list)
    _taken: dict[_Key, TakenRanges] = field(default_factory=dict)
    _entries: dict[_Key, dict[int, list[Entry]]] = field(default_factory=dict)
    """By key and generation. If there is only one generation, no entry can have been replaced."""
    _attempts: dict[str, Commit] = field(default_factory=dict)
    _rewritten: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Add the commit after `number`."""
        self.number += 1
        self.commits.append(commit)
        self._attempts[commit.attempt] = commit
        self._rewritten.update(commit.rewritten)
        for entry in commit.entries:
            taken = entry.taken
            self._taken.setdefault(partition_key(taken), TakenRanges()).add(taken)
            self._entries.setdefault(partition_key(taken), {}).setdefault(taken.generation, []).append(entry)

    @property
    def newest(self) -> Commit | None:
        """The newest commit, None if there is none yet."""
        return self.commits[-1] if self.commits else None

    def commit_of(self, attempt: str) -> Commit | None:
        """Return the commit of an attempt, or None if it committed nothing."""
        return self._attempts.get(attempt)

    def counts(self, name: str) -> bool:
        """Return whether a committed file still counts: no later commit has rewritten it."""
        return name not in self._rewritten

    def files(self, entry: Entry) -> tuple[str, ...]:
        """Return the files that hold the rows of an entry now."""
        return tuple(each for name in entry.files for each in self._now(name))

    def _now(self, name: str) -> tuple[str, ...]:
        if self.counts(name):
            return (name,)
        return tuple(each for later in self._rewritten[name] for each in self._now(later))

    def groups(self, topic: str) -> set[str]:
        """Return the groups that have taken ranges of a topic."""
        return {group for group, of, _ in self._taken if of == topic}

    def stored(self, wanted: ClaimedRange) -> StoredRanges | None:
        """Return the ranges that the output has of the group, topic and partition of `wanted`."""
        taken = self._taken.get(partition_key(wanted))
        return None if taken is None else taken.beside(wanted)

    def at_offsets_of(self, wanted: ClaimedRange, below_generation: int | None) -> list[Entry]:
        """Return the entries with rows of the same data topic at the readable offsets of `wanted`.

        Args:
            wanted: The range.
            below_generation: Return only entries of generations below this one; None for all generations.
        """
        if wanted.first_readable == wanted.end:
            return []
        return [
            entry
            for generation, entries in self._entries.get(partition_key(wanted), {}).items()
            if below_generation is None or generation < below_generation
            for entry in entries
            if self.files(entry)
            and entry.taken.data_topic_id == wanted.data_topic_id
            and entry.taken.first_readable < wanted.end
            and entry.taken.end > wanted.first_readable
        ]

    def replaced(self, entry: Entry) -> list[tuple[int, int]]:
        """Return the offsets of `entry` whose rows a newer generation has replaced."""
        taken = entry.taken
        return [
            (max(start, taken.start), min(end, taken.end))
            for generation, entries in self._entries.get(partition_key(taken), {}).items()
            if generation > taken.generation
            for newer in entries
            if newer.replaces and newer.taken.data_topic_id == taken.data_topic_id
            for start, end in newer.replaces
            if start < taken.end and end > taken.start
        ]


class CommitLog:
    """The commit files of one output. Not thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._view = CommitView()
        self._seen = 0
        self._held = 0
        self._checkpoint = 0

    def refresh(self) -> CommitView:
        """Read the commits made since the last call, and return all commits.

        Raises:
            SinkRejectedError: A file is missing, damaged, or of a newer version.
        """
        view = self._take_view()
        self._storage.refresh_folder(_COMMITS)
        newest = self._seen or max(self._numbers(_COMMITS), default=0)
        if not view.number:
            self._load_checkpoint(view)
        while (document := load(self._storage, _name(_COMMITS, view.number + 1))) is not None:
            view.add(_commit_from(document, self._full(_COMMITS, view.number + 1)))
        if self._seen and not self._storage.exists(_name(_COMMITS, self._seen)):
            raise SinkRejectedError(
                f"commit file {self._full(_COMMITS, self._seen)} has disappeared: the output was removed or restored "
                "to an older state while this process used it. Restore it, or start a new output in another folder"
            )
        if view.number < newest:
            raise SinkRejectedError(
                f"commit file {self._full(_COMMITS, view.number + 1)} is missing, but there are later ones, so nothing "
                "is written. Restore the file"
            )
        self._keep_view(view)
        return view

    def settled(self) -> CommitView:
        """Do the same as `refresh`, and make all returned commits durable.

        A writer may have died after its commit and before syncing it. A decision that is based on a commit must not
        outlive that commit.
        """
        view = self.refresh()
        self._hold(view.number)
        return view

    def append(self, commit: Commit, scratch: str) -> bool:
        """Append `commit` after the commits that were read, or return False if another writer was first.

        Args:
            commit: The commit.
            scratch: A folder that only this writer uses.

        Returns:
            True if the commit was written and is durable.
        """
        number = self._view.number + 1
        document = {"version": _version_of([commit]), "number": number, **_commit_to(commit)}
        if not self._storage.publish(_name(_COMMITS, number), as_bytes(document), scratch):
            return False
        self._hold(number)
        view = self._take_view()
        view.add(commit)
        self._keep_view(view)
        return True

    def checkpoint_if_due(self, scratch: str) -> None:
        """Write a checkpoint with all commits read if the newest checkpoint is 100 or more commits old."""
        number = self._view.number // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        if number <= self._checkpoint:
            return
        self._checkpoint = number
        if number in self._numbers(_CHECKPOINTS):
            return
        content = as_bytes(_checkpoint_to(self._view.commits[:number]))
        self._storage.publish(_name(_CHECKPOINTS, number), content, scratch)
        self._storage.hold(_CHECKPOINTS, with_above=False)
        for older in sorted(self._numbers(_CHECKPOINTS))[:-_KEPT_CHECKPOINTS]:
            self._storage.remove(_name(_CHECKPOINTS, older))

    def _take_view(self) -> CommitView:
        """Return the view for an update and reset it, so that after an interrupted update all is read again."""
        view, self._view = self._view, CommitView()
        return view

    def _keep_view(self, view: CommitView) -> None:
        self._view = view
        self._seen = view.number

    def _hold(self, number: int) -> None:
        """Make the commits up to `number` durable, and the folders above them."""
        if number <= self._held:
            return
        self._storage.hold(_COMMITS, with_above=not self._held)
        self._held = number

    def _load_checkpoint(self, view: CommitView) -> None:
        for number in sorted(self._numbers(_CHECKPOINTS), reverse=True):
            document = load(self._storage, _name(_CHECKPOINTS, number))
            if document is not None:  # otherwise another process removed it after it wrote a newer one
                for commit in _checkpoint_from(document, self._full(_CHECKPOINTS, number)):
                    view.add(commit)
                self._checkpoint = number
                return

    def _numbers(self, folder: str) -> list[int]:
        return [
            int(name[:_DIGITS])
            for name in self._storage.names(folder)
            if len(name) == _DIGITS + len(".json") and name[:_DIGITS].isascii() and name[:_DIGITS].isdigit()
        ]

    def _full(self, folder: str, number: int) -> str:
        return self._storage.full(_name(folder, number))


def decided(stored: StoredRanges | None, wanted: ClaimedRange) -> bool:
    """Return whether an output with `stored` has the range `wanted` or will always refuse it.

    This holds because an output's ranges only grow within a generation, and generations and fencing tokens only
    increase. The id of the coordination topic never changes in an output, nor that of the data topic in a generation.
    """
    if stored is None:
        return False
    if stored.coordination_topic_id != wanted.coordination_topic_id:
        return True
    if wanted.generation != stored.generation:
        return wanted.generation < stored.generation
    if wanted.data_topic_id != stored.data_topic_id or stored.overlapping or stored.below > wanted.start:
        return True
    if wanted.in_any_order:
        return not wanted.width
    return wanted.epoch < stored.epoch or stored.below == wanted.end


def version_of(ranges: Iterable[ClaimedRange]) -> int:
    """Return the lowest version of a file that can contain these ranges."""
    return 2 if any(range_.in_any_order for range_ in ranges) else 1


def _version_of(commits: Sequence[Commit]) -> int:
    if any(commit.visible for commit in commits):
        return VERSION
    return version_of(entry.taken for commit in commits for entry in commit.entries)


def range_to(wanted: ClaimedRange) -> dict[str, Any]:
    """Return the fields of a range, for JSON."""
    fields = {name: getattr(wanted, name) for name in _RANGE_FIELDS}
    return fields | {_IN_ANY_ORDER: True} if wanted.in_any_order else fields


def range_from(fields: Mapping[str, Any]) -> ClaimedRange:
    """Return the range with these fields."""
    own = {name: fields[name] for name in _RANGE_FIELDS}
    return ClaimedRange(**own, in_any_order=fields.get(_IN_ANY_ORDER, False))


def as_bytes(document: Mapping[str, Any]) -> bytes:
    """Return `document` as JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def load(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not exist.

    Raises:
        SinkRejectedError: The file is damaged or of a newer version.
    """
    text = storage.read(name)
    if text is None:
        return None
    try:
        document = json.loads(text)
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise SinkRejectedError(
            f"{storage.full(name)} is damaged ({error}), so nothing is written. Restore the file"
        ) from error
    if version not in range(1, VERSION + 1):
        raise newer_version(storage.full(name), version, VERSION)
    return dict(document)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:0{_DIGITS}d}.json"


def _commit_to(commit: Commit) -> dict[str, Any]:
    fields = {name: getattr(commit, name) for name in _COMMIT_FIELDS}
    options = {} if commit.options is None else {_OPTIONS: dict(commit.options)}
    layout: dict[str, Any] = {_PARTITION_BY: commit.partition_by} if commit.visible else {}
    rewritten = {_REWRITTEN: commit.rewritten} if commit.rewritten else {}
    ranges = [_entry_to(entry, commit.attempt) for entry in commit.entries]
    return fields | options | layout | rewritten | {"ranges": ranges}


def _entry_to(entry: Entry, attempt: str) -> dict[str, Any]:
    document = range_to(entry.taken)
    files = [name.removeprefix(f"{attempt}/") for name in entry.files]
    document |= {"files": files, "rows": entry.rows, "has_offsets": entry.has_offsets}
    if entry.replaces:
        document["replaces"] = [list(replace) for replace in entry.replaces]
    return document


def _commit_from(document: Mapping[str, Any], path: str) -> Commit:
    try:
        fields = {name: document[name] for name in _COMMIT_FIELDS}
        entries = tuple(_entry_from(entry, fields["attempt"]) for entry in document["ranges"])
        rewritten = {name: tuple(names) for name, names in document.get(_REWRITTEN, {}).items()}
        return Commit(
            **fields,
            entries=entries,
            options=document.get(_OPTIONS),
            visible=_PARTITION_BY in document,
            partition_by=tuple(document.get(_PARTITION_BY, ())),
            rewritten=rewritten,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SinkRejectedError(f"{path} is damaged ({error!r}), so nothing is written. Restore the file") from error


def _entry_from(document: Mapping[str, Any], attempt: str) -> Entry:
    return Entry(
        taken=range_from(document),
        files=tuple(f"{attempt}/{name}" for name in document["files"]),
        rows=document["rows"],
        has_offsets=document["has_offsets"],
        replaces=tuple((start, end) for start, end in document.get("replaces", ())),
    )


def _checkpoint_to(commits: list[Commit]) -> dict[str, Any]:
    schemas = list(dict.fromkeys(commit.schema for commit in commits))
    places = {schema: place for place, schema in enumerate(schemas)}
    return {
        "version": _version_of(commits),
        "number": len(commits),
        "schemas": schemas,
        "commits": [_commit_to(commit) | {"schema": places[commit.schema]} for commit in commits],
    }


def _checkpoint_from(document: Mapping[str, Any], path: str) -> list[Commit]:
    try:
        schemas = document["schemas"]
        commits = [commit | {"schema": schemas[commit["schema"]]} for commit in document["commits"]]
        whole = len(commits) == document["number"]
    except (KeyError, TypeError, IndexError) as error:
        raise SinkRejectedError(
            f"{path} is damaged ({error!r}). Remove the file, because the commit files contain the same data"
        ) from error
    if not whole:
        raise SinkRejectedError(
            f"{path} is damaged (commits are missing). Remove the file, because the commit files contain the same data"
        )
    return [_commit_from(commit, path) for commit in commits]
