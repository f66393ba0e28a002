"""Where the files of an output are: those of attempts, and the visible places of those that are committed.

A file goes one way: from the folder of its attempt to its visible place, and out of the output when a later commit has
rewritten it. A writer moves the files of all commits before it rewrites any. So a process that moves a file late finds
nothing to move.
"""

import contextlib
from collections.abc import Callable

from marshal_dagster.sinks.files.commit_log import FOLDER, Commit
from marshal_dagster.sinks.files.storage import Storage

ATTEMPTS = f"{FOLDER}/attempts"
NOTE = ".json"
RANGE_COLUMN = "marshal_range"
"""The column by whose values Spark divides the rows of an attempt."""


def of_attempt(name: str) -> str:
    """Return the place of an attempt's folder, or of a file that is named as in a commit."""
    return f"{ATTEMPTS}/{name}"


def note_of(attempt: str) -> str:
    """Return the place of the note with an attempt's ranges."""
    return of_attempt(attempt + NOTE)


def visible_place(name: str) -> str:
    """Return the visible place of a committed file. Its name has the attempt and the range, so that no two are equal.

    Example:
        ```python
        visible_place("4f1c/marshal_range=3/day=2026-01-31/part-0.json")  # "day=2026-01-31/3-4f1c-part-0.json"
        ```
    """
    attempt = name.partition("/")[0]
    value, *folders, file = name.partition(f"{RANGE_COLUMN}=")[2].split("/")
    return "/".join((*folders, f"{value}-{attempt}-{file}"))


def base_of(place: str) -> str:
    """Return the folder below which the folders of a file's place are named after columns."""
    above, is_attempt, _ = place.partition(f"/{RANGE_COLUMN}=")
    return above if is_attempt and place.startswith(f"{ATTEMPTS}/") else ""


def show(storage: Storage, commit: Commit, reached: Callable[[str], None]) -> None:
    """Remove the files that a commit has rewritten, and move its own to their visible places, durably.

    Any process can do this at any time, and several at once. The files that were rewritten go first, so that no row is
    visible twice.

    Args:
        storage: The output's files.
        commit: A commit that is durable. The files that it has rewritten must have been moved.
        reached: Called at each step.
    """
    for name in commit.rewritten:
        storage.remove(visible_place(name))
        reached("older file removed")
    for name in commit.files:
        storage.move(of_attempt(name), visible_place(name))
        reached("file moved")
    changed = {folder for name in (*commit.rewritten, *commit.files) for folder in _folders(visible_place(name))}
    for folder in sorted(changed, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # an empty folder that was removed
            storage.hold(folder, with_above=False)


def _folders(place: str) -> list[str]:
    """Return the folders of a place: `a/b/file` is in `a/b`, `a` and the output's own."""
    return [place[:end] for end, letter in enumerate(place) if letter == "/"] + [""]
