"""Results that accumulate over several runs: a file of JSON lines, each with the commit that it belongs to."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar


class Row(Protocol):
    """A row of a results file."""

    @property
    def commit(self) -> str:
        """Return the commit of the code that was run."""
        ...


R = TypeVar("R")
S = TypeVar("S", bound=Row)

TOP: Final = Path(__file__).parents[1]
ALL_CODE: Final = ("marshal_dagster", "tests/*.py")
"""The library and all tests, as git names them, but not the results files."""


def code_version(paths: Sequence[str]) -> str:
    """Return the last commit that changed `paths`, and a digest of what has changed since, if anything has."""
    return _git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths) + _changed(paths)


def code_digest(paths: Sequence[str]) -> str:
    """Return a digest of the content of `paths` in git, and one of the changes since the last commit, if there are any.

    The same code has the same digest under every commit.
    """
    return hashlib.sha256(_git("ls-files", "--stage", "--", *paths).encode()).hexdigest()[:12] + _changed(paths)


def _changed(paths: Sequence[str]) -> str:
    difference = _git("diff", "HEAD", "--", *paths)
    return f"-changed-{hashlib.sha256(difference.encode()).hexdigest()[:8]}" if difference else ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=True).stdout.strip()


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read a results file; a file that does not exist has no rows."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rows_of(kind: Callable[..., R], results: Path) -> list[R]:
    """Read a results file as rows of a dataclass; lists become tuples."""
    return [
        kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        for fields in read_rows(results)
    ]


def of_one_commit(rows: Sequence[S], commit: str | None = None) -> list[S]:
    """Return the rows of `commit`, by default that of the last row: results of other code prove nothing about it."""
    return [row for row in rows if row.commit == (commit or rows[-1].commit)]


def add_row(results: Path, row: Mapping[str, Any]) -> None:
    """Add a row."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_rows(results: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a results file again, at once."""
    results.parent.mkdir(parents=True, exist_ok=True)
    new = results.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(results)
