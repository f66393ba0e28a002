"""Results that add up over several sittings: a file of JSON lines, each a row with the commit that it was had on."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class SeedRow(DataclassInstance, Protocol):
        """What a seed came to, on a commit."""

        @property
        def commit(self) -> str:
            """The commit."""
            ...

        @property
        def seed(self) -> int:
            """The seed."""
            ...


R = TypeVar("R")
S = TypeVar("S", bound="SeedRow")
T_co = TypeVar("T_co", covariant=True)


class Bed(Protocol[T_co]):
    """Services on which one seed after another is run; `folder` has what violates."""

    folder: Path

    def row(self, seed: int) -> T_co:
        """Run a seed."""
        ...

    def repair(self) -> None:
        """See to it that the next seed finds everything in order."""


TOP: Final = Path(__file__).parents[1]
ALL_CODE: Final = ("marshal_dagster", "tests/*.py")
"""The library and all tests, as git names them; a results file may lie beside."""


def code_version(paths: Sequence[str]) -> str:
    """Give the last commit that changed `paths`, marked when there are changes since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=True).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths) + ("-changed" if changes else "")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read a results file; one that is not there yet has no rows."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rows_of(kind: Callable[..., R], results: Path) -> list[R]:
    """Read a results file as rows of a dataclass, in which sequences are tuples."""
    return [
        kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        for fields in read_rows(results)
    ]


def soak(
    seeds: Sequence[int],
    kind: type[S],
    results: Path | None,
    *,
    at: str,
    running_bed: Callable[[], AbstractContextManager[Bed[S]]],
    report: Callable[[S, Path], None],
) -> list[S]:
    """Run what `results` does not have yet for commit `at`, report each row, and add it; give the rows of all seeds."""
    done = {row.seed: row for row in (rows_of(kind, results) if results else []) if row.commit == at}
    due = [seed for seed in seeds if seed not in done]
    found = [done[seed] for seed in seeds if seed in done]
    if not due:
        return found
    with running_bed() as bed:
        for seed in due:
            row = bed.row(seed)
            report(row, bed.folder)
            found.append(row)
            if results:
                add_row(results, asdict(row))
            bed.repair()
    return found


def add_row(results: Path, row: Mapping[str, Any]) -> None:
    """Add a row."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
