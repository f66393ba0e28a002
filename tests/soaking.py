"""Results that add up over several sittings: a file of JSON lines, each a row with the commit that it was had on."""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

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

        @property
        def violations(self) -> tuple[str, ...]:
            """What was not as promised."""
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
    """Give the last commit that changed `paths`, and a digest of what has changed since, if anything has."""
    return _git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths) + _changed(paths)


def code_digest(paths: Sequence[str]) -> str:
    """Give a digest of what git holds of `paths`, and one of what has changed since, if anything has.

    It names the same code under whatever commit it came.
    """
    return hashlib.sha256(_git("ls-files", "--stage", "--", *paths).encode()).hexdigest()[:12] + _changed(paths)


def _changed(paths: Sequence[str]) -> str:
    difference = _git("diff", "HEAD", "--", *paths)
    return f"-changed-{hashlib.sha256(difference.encode()).hexdigest()[:8]}" if difference else ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=True).stdout.strip()


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read a results file; one that is not there yet has no rows."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rows_of(kind: Callable[..., R], results: Path) -> list[R]:
    """Read a results file as rows of a dataclass, in which sequences are tuples."""
    return [
        kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        for fields in read_rows(results)
    ]


def of_one_commit(rows: Sequence[S], commit: str | None = None) -> list[S]:
    """Give those of `commit`, by default that of the last row: what another state came to proves nothing of it."""
    return [row for row in rows if row.commit == (commit or rows[-1].commit)]


@dataclass(frozen=True, slots=True)
class Soak(Generic[S]):
    """Seeds that are run one after another on real services, as a command; its results add up."""

    module: str
    description: str | None
    kind: Callable[..., S]
    """The dataclass of its rows."""
    code: Sequence[str]
    """What a result depends on, as git names it."""
    runs: int
    """How many a call is for by default."""
    running_bed: Callable[[], AbstractContextManager[Bed[S]]]
    told: Callable[[S], str]
    """Says what a run came to."""
    counted: Callable[[Sequence[S]], str]
    """Says what all runs came to."""
    table: Callable[[Sequence[S]], str]

    def main(self) -> int:
        """Do what the command line says; give the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.description)
        parser.add_argument("--seed", type=int, help="run one seed")
        parser.add_argument("--first", type=int, default=0)
        parser.add_argument("--runs", type=int, default=self.runs)
        parser.add_argument("--results", type=Path, help="add finished runs to this file; leave out those in it")
        parser.add_argument("--table", type=Path, help="print what is in this file of a commit, by default the newest")
        parser.add_argument("--commit", help="that commit")
        options = parser.parse_args()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        if options.table:
            print(self.table(of_one_commit(rows_of(self.kind, options.table), options.commit)))
            return 0
        seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.runs)
        rows = self.run(seeds, options.results)
        failed = sum(bool(row.violations) for row in rows)
        print(f"{len(rows)} runs, {self.counted(rows)}, {failed} with violations")
        return 1 if failed else 0

    def run(self, seeds: Sequence[int], results: Path | None) -> list[S]:
        """Run what `results` does not have yet of this code, report each, and add it; give the rows of all seeds."""
        at = code_version(self.code)
        done = {row.seed: row for row in (rows_of(self.kind, results) if results else []) if row.commit == at}
        due = [seed for seed in seeds if seed not in done]
        found = [done[seed] for seed in seeds if seed in done]
        if not due:
            return found
        with self.running_bed() as bed:
            for seed in due:
                row = bed.row(seed)
                self._report(row, bed.folder / f"seed{seed}")
                found.append(row)
                if results:
                    add_row(results, asdict(row))
                bed.repair()
        return found

    def _report(self, row: S, folder: Path) -> None:
        print(f"seed {row.seed}: {self.told(row)}", flush=True)
        for violation in row.violations:
            print(f"    VIOLATED {violation}", flush=True)
        if row.violations:
            print(f"    python -m {self.module} --seed {row.seed}    # left in {folder}", flush=True)


def add_row(results: Path, row: Mapping[str, Any]) -> None:
    """Add a row."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
