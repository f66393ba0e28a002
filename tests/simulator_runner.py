"""Runs the seeds of a simulator in several processes, and counts, shrinks, prints and stores the results.

Both simulators use it: `python -m tests.simulator` and `python -m tests.outbox_simulator`. What happens in a seed does
not depend on this module.
"""

import argparse
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from tests.simulator.checkers import ViolationError
from tests.soak_results import add_row, code_digest, code_version, read_rows

CHUNK: Final = 50
SEEDS_A_PROCESS: Final = 2_000
BLOCK: Final = 10_000
"""The number of seeds in a row of the results file."""
LONGEST_SEED_S: Final = 30
"""CPU time of the process, so a busy machine or a stopped process is not mistaken for a seed that hangs."""
MOST_SHRUNK: Final = 3
"""How many of the failing seeds are shrunk. Each takes as many runs as it has faults."""
MOST_NAMED: Final = 20


class Scenario(Protocol):
    """The faults and events of a seed."""

    @property
    def seed(self) -> int:
        """Return the seed."""
        ...

    @property
    def faults(self) -> int:
        """Return the number of faults and events."""
        ...

    def without(self, left_out: set[int]) -> Self:
        """Return the same scenario without the faults of these numbers."""
        ...


class Result(Protocol):
    """The result of a seed."""

    @property
    def seed(self) -> int:
        """Return the seed."""
        ...

    @property
    def violations(self) -> tuple[ViolationError, ...]:
        """Return the promises that were broken."""
        ...

    @property
    def records(self) -> int:
        """Return the number of records that were written."""
        ...

    @property
    def steps(self) -> int:
        """Return the number of steps or calls."""
        ...

    @property
    def befallen(self) -> Counter[str]:
        """Return how often each kind of fault happened."""
        ...

    @property
    def transcript(self) -> Sequence[str]:
        """Return what happened, line by line."""
        ...


S = TypeVar("S", bound=Scenario)
R = TypeVar("R", bound=Result)


@dataclass(slots=True)
class Tally:
    """The summed results of many seeds."""

    seeds: int = 0
    records: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def merge(self, other: "Tally") -> None:
        """Add the seeds of another tally."""
        self.seeds += other.seeds
        self.records += other.records
        self.steps += other.steps
        self.faults += other.faults
        self.outcomes += other.outcomes
        self.failed |= other.failed

    def row(self) -> dict[str, Any]:
        """Return the counts as a row of the results file."""
        counts = {"seeds": self.seeds, "records": self.records, "steps": self.steps, "faults": self.faults}
        return {**counts, **({"outcomes": self.outcomes} if self.outcomes else {}), "failed": self.failed}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Tally":
        """Return the counts of a row of the results file."""
        failed = {int(seed): text for seed, text in row["failed"].items()}
        faults, outcomes = Counter(row["faults"]), Counter(row.get("outcomes", {}))
        return cls(row["seeds"], row["records"], row["steps"], faults, outcomes, failed)

    def __str__(self) -> str:
        """Return the counts in one line."""
        faults = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.faults.items()))
        outcomes = "".join(f"{count:,} {what}, " for what, count in sorted(self.outcomes.items()))
        return (
            f"{self.seeds:,} seeds, {self.records:,} records, {self.steps:,} steps, {outcomes}"
            f"{sum(self.faults.values()):,} faults ({faults}), {len(self.failed)} violations"
        )


def no_outcomes(_: object) -> Counter[str]:
    """Return no counts, for a simulator without counts of its own."""
    return Counter()


@dataclass(frozen=True, slots=True)
class Simulator(Generic[S, R]):
    """A simulator, and how to run its seeds. Its functions belong to modules, because processes get them by name."""

    module: str
    description: str | None
    code: Sequence[str]
    """The paths on which the results depend, as git names them."""
    scenario: Callable[[int], S]
    simulate: Callable[[S], R]
    result: Callable[[int, tuple[ViolationError, ...], int, int, Counter[str]], R]
    """Makes a result: seed, violations, records, steps, faults."""
    outcomes: Callable[[R], Counter[str]] = no_outcomes
    """Returns the other counts of a seed."""

    def run_one(self, of: S) -> R:
        """Run a scenario; a scenario that does not end is a violation too."""

        def stop(*_: object) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SEED_S)
        try:
            return self.simulate(of)
        except TimeoutError:
            endless = ViolationError("every seed ends", f"not after {LONGEST_SEED_S} s")
            return self.result(of.seed, (endless,), 0, 0, Counter())
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def run_chunk(self, first: int, seeds: int, *, until_first: bool = False) -> Tally:
        """Run seeds one after another; with `until_first`, stop after the first violation."""
        tally = Tally()
        for seed in range(first, first + seeds):
            result = self.run_one(self.scenario(seed))
            faults = Counter({str(kind): count for kind, count in result.befallen.items()})
            found = {seed: [str(violation) for violation in result.violations]} if result.violations else {}
            tally.merge(Tally(1, result.records, result.steps, faults, self.outcomes(result), found))
            if until_first and found:
                break
        return tally

    def run_range(self, first: int, seeds: int, processes: int, *, until_first: bool = False) -> Tally:
        """Run seeds in several processes."""
        tally = Tally()
        end, share = first + seeds, SEEDS_A_PROCESS * processes
        for begin in range(first, end, share):
            starts = range(begin, min(begin + share, end), CHUNK)
            # One process runs few seeds, so collecting garbage costs more time than it saves memory.
            with ProcessPoolExecutor(processes, initializer=gc.disable) as pool:
                parts = [
                    pool.submit(self.run_chunk, start, min(CHUNK, end - start), until_first=until_first)
                    for start in starts
                ]
                for part in parts:
                    tally.merge(part.result())
                    if until_first and tally.failed:
                        pool.shutdown(wait=False, cancel_futures=True)
                        return tally
        return tally

    def shrink(self, of: S) -> tuple[set[int], R]:
        """Remove the faults that the first violation of a scenario does not need."""
        left_out: set[int] = set()
        result = self.run_one(of)
        promise = result.violations[0].promise
        for number in range(of.faults):
            tried = self.run_one(of.without(left_out | {number}))
            if any(violation.promise == promise for violation in tried.violations):
                left_out.add(number)
                result = tried
        return left_out, result

    def command(self, seed: int, left_out: set[int]) -> str:
        """Return the command that shows a seed."""
        without = f" --without {','.join(map(str, sorted(left_out)))}" if left_out else ""
        return f"python -m {self.module} --seed {seed}{without}"

    def show(self, seed: int, left_out: set[int]) -> int:
        """Print what happens in a seed and what it violates; return the exit code."""
        of = self.scenario(seed).without(left_out)
        result = self.run_one(of)
        print(of)
        print(*result.transcript, sep="\n")
        print(*result.violations or ["no violation"], sep="\n")
        return 1 if result.violations else 0

    def report(self, tally: Tally, most: int = MOST_SHRUNK) -> None:
        """Print the commands that show the failed seeds, then the tally."""
        for seed in list(tally.failed)[:most]:
            left_out, result = self.shrink(self.scenario(seed))
            print(f"seed {seed}: {result.violations[0]}\n    {self.command(seed, left_out)}")
        if len(tally.failed) > most:
            print(f"and seeds {list(tally.failed)[most:][:MOST_NAMED]}")
        print(tally)

    def soak(self, first: int, seeds: int, processes: int, results: Path, block: int = BLOCK) -> Tally:
        """Run the seeds that `results` does not have yet for this code, block by block."""
        at, code = code_version(self.code), code_digest(self.code)
        tally = Tally()
        wanted, done = list(_blocks(first, seeds, block)), set()
        for row in read_rows(results):
            ran = row["first"], row["seeds"]
            if row.get("code") == code and ran in wanted:
                done.add(ran)
                tally.merge(Tally.of_row(row))
        for start, count in wanted:
            if (start, count) in done:
                continue
            began_s = time.monotonic()
            part = self.run_range(start, count, processes)
            tally.merge(part)
            seconds = round(time.monotonic() - began_s, 1)
            add_row(results, {"commit": at, "code": code, "first": start, **part.row(), "seconds": seconds})
            print(f"{tally.seeds:,} of {seeds:,} seeds, {len(tally.failed)} violations", flush=True)
        return tally

    def main(self) -> int:
        """Run the command line; return the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.description)
        parser.add_argument("--seed", type=int, help="show one seed")
        parser.add_argument("--without", default="", help="numbers of the faults of that seed to leave out: 0,3")
        parser.add_argument("--first", type=int, default=0)
        parser.add_argument("--seeds", type=int, default=1_000)
        parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
        parser.add_argument("--until-first", action="store_true", help="stop after the first violation")
        parser.add_argument("--results", type=Path, help="add finished ranges to this file; skip those in it")
        options = parser.parse_args()
        if options.seed is not None:
            return self.show(options.seed, {int(number) for number in options.without.split(",") if number})
        if options.results:
            tally = self.soak(options.first, options.seeds, options.processes, options.results)
        else:
            tally = self.run_range(options.first, options.seeds, options.processes, until_first=options.until_first)
        self.report(tally, most=1 if options.until_first else MOST_SHRUNK)
        return 1 if tally.failed else 0


def _blocks(first: int, seeds: int, block: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + seeds, block):
        yield start, min(block, first + seeds - start)
