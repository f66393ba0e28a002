"""The commit log of a file output: which files hold which ranges, in an order that no two writers can both extend.

Commit n is the file `_marshal/commits/<n>.json`, which only one writer can make, and whole (`Storage.publish`): whoever
loses reads what won and judges anew. Every 100 commits a checkpoint repeats all that came before.
Standard library only; the rows themselves are no concern of this module.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredRanges, TakenRanges
from marshal_dagster.sinks.files.storage import Storage
from marshal_dagster.sinks.sink import newer_version, partition_key

VERSION = 2
"""The newest of the files here; a newer one is refused.

What holds no range that came in any order is written as version 1, as ever. In version 2 such a range has
`in_any_order`: who reads its end as the position of the output would pass over what is missing before it.
"""
CHECKPOINT_EVERY = 100
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
_COMMITS, _CHECKPOINTS = "commits", "checkpoints"
_IN_ANY_ORDER = "in_any_order"
_OPTIONS = "options"

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One range as it stands in the output.

    `files` are relative to the attempt's folder, `rows` their rows if known. `replaces` are the offsets at which rows
    of older generations no longer count; none are kept where none of these rows could be.
    """

    taken: ClaimedRange
    files: tuple[str, ...]
    rows: int | None
    has_offsets: bool
    replaces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What one writer added in one step.

    `schema` is the rows' Spark schema as JSON, its columns in the order of the files. `options` are the user's options
    with which files of a text format must be read; None in commits from before these were kept.
    """

    attempt: str
    format: str
    schema: str
    entries: tuple[Entry, ...]
    options: Mapping[str, str] | None = None


@dataclass(slots=True)
class CommitView:
    """All commits up to `number`, as far as judging and reading need them."""

    number: int = 0
    commits: list[Commit] = field(default_factory=list)
    _taken: dict[_Key, TakenRanges] = field(default_factory=dict)
    _entries: dict[_Key, dict[int, list[Entry]]] = field(default_factory=dict)
    """By generation: where there is but one, no entry is looked at for what it replaces."""
    _attempts: dict[str, set[str]] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Add the commit after `number`."""
        self.number += 1
        self.commits.append(commit)
        files = self._attempts.setdefault(commit.attempt, set())
        for entry in commit.entries:
            taken = entry.taken
            self._taken.setdefault(partition_key(taken), TakenRanges()).add(taken)
            self._entries.setdefault(partition_key(taken), {}).setdefault(taken.generation, []).append(entry)
            files.update(entry.files)

    def groups(self, topic: str) -> set[str]:
        """Return the groups that have taken ranges of a topic."""
        return {group for group, of, _ in self._taken if of == topic}

    def stored(self, wanted: ClaimedRange) -> StoredRanges | None:
        """Return what the output has of the key of `wanted`."""
        taken = self._taken.get(partition_key(wanted))
        return None if taken is None else taken.beside(wanted)

    def files_of(self, attempt: str) -> frozenset[str] | None:
        """Return the files of `attempt` that count, None if it added nothing."""
        files = self._attempts.get(attempt)
        return None if files is None else frozenset(files)

    def at_offsets_of(self, wanted: ClaimedRange, below_generation: int | None) -> list[Entry]:
        """Return what holds rows of this data topic where `wanted` can be read, `below_generation` (None: all)."""
        if wanted.first_readable == wanted.end:
            return []
        return [
            entry
            for generation, entries in self._entries.get(partition_key(wanted), {}).items()
            if below_generation is None or generation < below_generation
            for entry in entries
            if entry.files
            and entry.taken.data_topic_id == wanted.data_topic_id
            and entry.taken.first_readable < wanted.end
            and entry.taken.end > wanted.first_readable
        ]

    def replaced(self, entry: Entry) -> list[tuple[int, int]]:
        """Return the offsets of `entry` whose rows no longer count, because a newer generation has read them."""
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
    """The commit files of one output, in its `storage`. One thread at a time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._view = CommitView()
        self._seen = 0
        self._held = 0
        self._checkpoint = 0

    def refresh(self) -> CommitView:
        """Read what was committed since the last call and return all of it.

        Raises `SinkRejectedError` for files that are missing, damaged, or of a newer version.
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
                f"commit file {self._full(_COMMITS, self._seen)} was there and is gone: the output was removed or set "
                "back while this process used it; restore it, or start anew"
            )
        if view.number < newest:
            raise SinkRejectedError(
                f"commit file {self._full(_COMMITS, view.number + 1)} is missing, but there are later ones: "
                "restore it; until then nothing is written"
            )
        self._keep_view(view)
        return view

    def settled(self) -> CommitView:
        """Do as `refresh`, and have the storage hold what is returned.

        A writer may have died between its commit and seeing to that; what is decided by the commit must not outlive it.
        """
        view = self.refresh()
        self._hold(view.number)
        return view

    def append(self, commit: Commit, scratch: str) -> bool:
        """Make `commit` the next one after those read, or return False if another writer was first.

        `scratch` is a folder of the writer's own. True means that it will be there after a loss of power too.
        """
        number = self._view.number + 1
        version = version_of(entry.taken for entry in commit.entries)
        document = {"version": version, "number": number, **_commit_to(commit)}
        if not self._storage.publish(_name(_COMMITS, number), as_bytes(document), scratch):
            return False
        self._hold(number)
        view = self._take_view()
        view.add(commit)
        self._keep_view(view)
        return True

    def checkpoint_if_due(self, scratch: str) -> None:
        """Repeat all commits read in one file when the newest such file is 100 commits back."""
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
        """Return the view to be added to: one that an interrupt leaves half-way is not kept, all is read anew."""
        view, self._view = self._view, CommitView()
        return view

    def _keep_view(self, view: CommitView) -> None:
        self._view = view
        self._seen = view.number

    def _hold(self, number: int) -> None:
        """Have the storage hold the commits up to `number`, and the folders that lead to them."""
        if number <= self._held:
            return
        self._storage.hold(_COMMITS, with_above=not self._held)
        self._held = number

    def _load_checkpoint(self, view: CommitView) -> None:
        for number in sorted(self._numbers(_CHECKPOINTS), reverse=True):
            document = load(self._storage, _name(_CHECKPOINTS, number))
            if document is not None:  # else removed in favour of a newer one
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
    """Say whether an output that holds `stored` has `wanted` or will refuse it for ever.

    What is stored in a generation only grows, generations grow, tokens do where they are compared, and neither the
    coordination topic's id nor, within a generation, the data topic's ever changes in an output.
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
    """Return the version in which these ranges can be written."""
    return VERSION if any(range_.in_any_order for range_ in ranges) else 1


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
    """Return the JSON object in a file, None if there is no such file.

    Raises `SinkRejectedError` if it is damaged or of a newer version.
    """
    text = storage.read(name)
    if text is None:
        return None
    try:
        document = json.loads(text)
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise SinkRejectedError(
            f"{storage.full(name)} is damaged ({error}): restore it; until then nothing is written"
        ) from error
    if version not in range(1, VERSION + 1):
        raise newer_version(storage.full(name), version, VERSION)
    return dict(document)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:0{_DIGITS}d}.json"


def _commit_to(commit: Commit) -> dict[str, Any]:
    fields = {name: getattr(commit, name) for name in _COMMIT_FIELDS}
    options = {} if commit.options is None else {_OPTIONS: dict(commit.options)}
    return fields | options | {"ranges": [_entry_to(entry) for entry in commit.entries]}


def _entry_to(entry: Entry) -> dict[str, Any]:
    document = range_to(entry.taken)
    document |= {"files": list(entry.files), "rows": entry.rows, "has_offsets": entry.has_offsets}
    if entry.replaces:
        document["replaces"] = [list(replace) for replace in entry.replaces]
    return document


def _commit_from(document: Mapping[str, Any], path: str) -> Commit:
    try:
        fields = {name: document[name] for name in _COMMIT_FIELDS}
        entries = tuple(_entry_from(entry) for entry in document["ranges"])
        return Commit(**fields, entries=entries, options=document.get(_OPTIONS))
    except (KeyError, TypeError, ValueError) as error:
        raise SinkRejectedError(f"{path} is damaged ({error!r}): restore it; until then nothing is written") from error


def _entry_from(document: Mapping[str, Any]) -> Entry:
    return Entry(
        taken=range_from(document),
        files=tuple(document["files"]),
        rows=document["rows"],
        has_offsets=document["has_offsets"],
        replaces=tuple((start, end) for start, end in document.get("replaces", ())),
    )


def _checkpoint_to(commits: list[Commit]) -> dict[str, Any]:
    schemas = list(dict.fromkeys(commit.schema for commit in commits))
    places = {schema: place for place, schema in enumerate(schemas)}
    return {
        "version": version_of(entry.taken for commit in commits for entry in commit.entries),
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
        raise SinkRejectedError(f"{path} is damaged ({error!r}): remove it, the commit files hold the same") from error
    if not whole:
        raise SinkRejectedError(f"{path} is damaged (not all commits): remove it, the commit files hold the same")
    return [_commit_from(commit, path) for commit in commits]
