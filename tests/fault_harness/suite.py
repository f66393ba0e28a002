"""Runs seeds under faults: as many as `--seeds`, starting with `--first`, or the one of `--seed`.

`--results FILE` adds a row for each finished run, with the commit that it ran on, and skips the seeds that are in the
file for the same commit. `--table FILE` prints a table of the results of its newest commit, or of `--commit`. For a
violation it prints the command that repeats the seed, and keeps the folder with the journals and stderr of the
processes.
"""

import argparse
import queue
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final, Generic, Protocol, TypeVar

from tests import soak_results
from tests.fault_harness.run import STOPPING, Tally
from tests.simulator.checkers import ViolationError

BLOCK: Final = 48
MOST_SHOWN: Final = 5
MOST_KEPT: Final = 20
MOST_TRACED: Final = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """The fields of every run in the results file."""

    commit: str
    seed: int
    faults: tuple[str, ...]
    violations: tuple[str, ...]
    seconds: float


class Fault(Protocol):
    """A fault of a run."""

    @property
    def kind(self) -> StrEnum:
        """Return the kind of the fault."""
        ...


class Scenario(Protocol):
    """A seed's run."""

    @property
    def faults(self) -> Sequence[Fault]:
        """Return the faults of the run."""
        ...


class Services(Protocol):
    """The services that runs need."""

    def repair(self) -> None:
        """Restart the services that do not run, for the next run."""


S = TypeVar("S", bound=Scenario)
V = TypeVar("V", bound=Services)
T = TypeVar("T", bound=Tally)
R = TypeVar("R", bound=RunRow)


def always(_: object) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True)
class FaultSuite(Generic[S, V, T, R]):
    """Runs of one kind, the services that they need, and the columns of their table."""

    module: str
    code: Sequence[str]
    """The paths on which a result depends, as git names them."""
    kinds: Sequence[StrEnum]
    """The kinds of faults. That many consecutive seeds have each of them."""
    scenario: Callable[[int], S]
    services: Callable[[Path, int], AbstractContextManager[V]]
    """Starts services below a folder, for that many lanes."""
    run: Callable[[S, V, int, Path], T]
    """Runs a scenario on services, in a lane and a folder."""
    tally: Callable[[], T]
    """Makes the tally of a run that was aborted."""
    row: type[R]
    """The dataclass of its rows."""
    sources: Callable[[S, T], Sequence[object]]
    """Returns the objects whose fields become fields of a row with the same names, besides the fields of every row."""
    summary: Callable[[R], str]
    """Describes a run."""
    totals: Callable[[Sequence[R]], str]
    """Describes all runs."""
    columns: Sequence[str]
    """The columns of the table between runs and violations."""
    cells: Callable[[Sequence[R]], Sequence[str]]
    notes: Callable[[Sequence[R]], str]
    """Returns the text below the table."""
    lanes: int = 1
    """The number of runs at the same time, for runs that can share the services."""
    is_alone: Callable[[S], bool] = always
    """Whether a run needs the services for itself."""

    # Runs

    @contextmanager
    def bed(self, lanes: int | None = None, *, services: V | None = None) -> Iterator["Bed[S, V, T, R]"]:
        """Start services for runs, or use those of the caller; the folders of runs with violations are kept."""
        many = lanes or self.lanes
        name = self.module.rpartition(".")[2].replace("_", "-").replace(" ", "-")
        folder = Path(tempfile.mkdtemp(prefix=f"marshal-{name}-"))
        with self.services(folder, many) if services is None else nullcontext(services) as used:
            yield Bed(self, used, many, folder)
        if not any(folder.iterdir()):
            folder.rmdir()

    def soak(self, seeds: Sequence[int], results: Path | None, lanes: int | None = None) -> list[R]:
        """Run the seeds that `results` does not have for this code; print and add each; return all their rows."""
        at = soak_results.code_version(self.code)
        rows = soak_results.rows_of(self.row, results) if results else []
        done = {row.seed: row for row in rows if row.commit == at}
        due = [seed for seed in seeds if seed not in done]
        found = [done[seed] for seed in seeds if seed in done]
        if not due:
            return found
        with self.bed(lanes) as bed:
            for start in range(0, len(due), BLOCK):
                for row in bed.rows(due[start : start + BLOCK]):
                    self._report(row, bed.folder / f"seed{row.seed}")
                    found.append(row)
                    if results:
                        soak_results.add_row(results, asdict(row))
        return found

    def row_of(self, of: S, tally: T, commit: str, seed: int, seconds: float) -> R:
        """Return the row of a run."""
        return self.row(
            commit=commit,
            seed=seed,
            faults=tuple(fault.kind.value for fault in of.faults),
            violations=tuple(str(violation) for violation in tally.violations[:MOST_KEPT]),
            seconds=round(seconds, 1),
            **_fields(self.row, self.sources(of, tally)),
        )

    def _report(self, row: R, folder: Path) -> None:
        print(f"seed {row.seed}: {', '.join(row.faults)}: {self.summary(row)}, {row.seconds} s", flush=True)
        for violation in row.violations[:MOST_SHOWN]:
            print(f"    VIOLATED {violation}")
        if len(row.violations) > MOST_SHOWN:
            print(f"    and {len(row.violations) - MOST_SHOWN} more")
        if row.violations:
            print(f"    python -m {self.module} --seed {row.seed}    # left in {folder}", flush=True)

    # Results

    def table(self, rows: Sequence[R]) -> str:
        """Return the results as a markdown table; a run counts in the row of each of its faults."""
        columns = ["fault", "runs", *self.columns, "violations"]
        lines = [f"| {' | '.join(columns)} |", f"| ---{' | ---:' * (len(columns) - 1)} |"]
        lines += [self._line(kind.value, [row for row in rows if kind.value in row.faults]) for kind in self.kinds]
        lines.append(self._line("all runs", rows))
        commits = ", ".join(sorted({row.commit for row in rows}))
        minutes = sum(row.seconds for row in rows) / 60
        return "\n".join([*lines, "", f"Of commit {commits}, in {minutes:,.0f} minutes of runs. {self.notes(rows)}"])

    def _line(self, name: str, rows: Sequence[R]) -> str:
        cells = [name, f"{len(rows):,}", *self.cells(rows), f"{sum(bool(row.violations) for row in rows):,}"]
        return f"| {' | '.join(cells)} |"

    def main(self) -> int:
        """Run the command line; return the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=__doc__)
        parser.add_argument("--seed", type=int, help="run one seed")
        parser.add_argument("--first", type=int, default=0)
        parser.add_argument(
            "--seeds", "--runs", type=int, default=len(self.kinds), help="the number of seeds, starting with --first"
        )
        parser.add_argument("--results", type=Path, help="add finished runs to this file; skip those in it")
        parser.add_argument(
            "--table", type=Path, help="print the results of a commit in this file, by default the newest"
        )
        parser.add_argument("--commit", help="that commit")
        if self.lanes > 1:
            parser.add_argument("--lanes", type=int, help="runs at the same time, if no fault concerns a broker")
        options = parser.parse_args()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        if options.table:
            print(self.table(soak_results.of_one_commit(soak_results.rows_of(self.row, options.table), options.commit)))
            return 0
        seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
        rows = self.soak(seeds, options.results, getattr(options, "lanes", None))
        failed = sum(bool(row.violations) for row in rows)
        print(f"{len(rows)} runs, {self.totals(rows)}, {failed} with violations")
        return 1 if failed else 0


class Bed(Generic[S, V, T, R]):
    """Services for runs; `folder` keeps the files of runs with violations."""

    def __init__(self, suite: FaultSuite[S, V, T, R], services: V, lanes: int, folder: Path) -> None:
        self.folder = folder
        self._suite = suite
        self._services = services
        self._commit = soak_results.code_version(suite.code)
        self._lanes = lanes
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for lane in range(lanes):
            self._free.put(lane)

    def rows(self, seeds: Iterable[int]) -> Iterator[R]:
        """Run seeds; those that need the services for themselves run one by one at the end."""
        alone = {seed: self._lanes == 1 or self._suite.is_alone(self._suite.scenario(seed)) for seed in seeds}
        yield from self._rows_beside([seed for seed in alone if not alone[seed]])
        for seed in [seed for seed in alone if alone[seed]]:
            yield self.row(seed)
            self._services.repair()

    def _rows_beside(self, seeds: Sequence[int]) -> Iterator[R]:
        with ThreadPoolExecutor(self._lanes) as pool:
            try:
                for done in as_completed([pool.submit(self.row, seed) for seed in seeds]):
                    yield done.result()
            except BaseException:
                STOPPING.set()
                pool.shutdown(cancel_futures=True)
                raise

    def row(self, seed: int) -> R:
        """Run a seed."""
        suite = self._suite
        of, lane, began_s = suite.scenario(seed), self._free.get(), time.monotonic()
        folder = self.folder / f"seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            tally = suite.run(of, self._services, lane, folder)
        except Exception as error:  # noqa: BLE001 - the next run may go better; this one counts as failed
            tally = suite.tally()
            text = f"{error!r}, {traceback.format_exc()[-MOST_TRACED:]}"
            tally.violations.append(ViolationError("the run itself works", text))
        finally:
            self._free.put(lane)
        if not tally.violations:
            shutil.rmtree(folder)
        return suite.row_of(of, tally, self._commit, seed, time.monotonic() - began_s)


def _fields(row: type[RunRow], sources: Sequence[object]) -> dict[str, Any]:
    """Return the fields that this kind of row adds, each from the first source that has it."""
    common = {field.name for field in fields(RunRow)}
    found = {}
    for name in [field.name for field in fields(row) if field.name not in common]:
        value = next(getattr(source, name) for source in sources if hasattr(source, name))
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def median_and_longest(times_s: Sequence[float]) -> str:
    """Return a cell of a table: the median and the longest time."""
    return f"{median(times_s):.1f} s, {max(times_s):.1f} s" if times_s else ""
