"""Runs seeds, one after another or in several processes, and counts what they came to."""

import gc
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from tests.simulator.checkers import Violation
from tests.simulator.scenario import Scenario, scenario
from tests.simulator.world import Result, simulate

CODE: Final = (
    "marshal_dagster/protocol",
    "marshal_dagster/coordination",
    "marshal_dagster/delivery",
    "marshal_dagster/sensors/left.py",
    "marshal_dagster/runs.py",
    "marshal_dagster/errors.py",
    "marshal_dagster/testing.py",
    "tests/simulator",
    "tests/delivering.py",
    "tests/plain_reader.py",
    ":(exclude)tests/simulator/__main__.py",
    ":(exclude)tests/simulator/mutants.py",
    ":(exclude)tests/simulator/running.py",
)
"""What happens in a seed depends on, as git names it: not how seeds are asked for, counted and shrunk."""

CHUNK: Final = 50
SEEDS_A_PROCESS: Final = 2_000
LONGEST_SEED_S: Final = 30
"""Of the process's own time, so that a busy machine or a stopped process is not taken for a seed that hangs."""


@dataclass(slots=True)
class Tally:
    """What many seeds came to."""

    seeds: int = 0
    records: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Count one seed."""
        self.seeds += 1
        self.records += result.records
        self.steps += result.steps
        self.faults += Counter({str(kind): count for kind, count in result.befallen.items()})
        if result.violations:
            self.failed[result.seed] = [str(violation) for violation in result.violations]

    def merge(self, other: "Tally") -> None:
        """Count the seeds of another tally."""
        self.seeds += other.seeds
        self.records += other.records
        self.steps += other.steps
        self.faults += other.faults
        self.failed |= other.failed

    def __str__(self) -> str:
        """Say it in one line."""
        faults = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.seeds:,} seeds, {self.records:,} records, {self.steps:,} steps, "
            f"{sum(self.faults.values()):,} faults ({faults}), {len(self.failed)} violations"
        )


def run_one(of: Scenario) -> Result:
    """Run a scenario; one that does not end is a violation too."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SEED_S)
    try:
        return simulate(of)
    except TimeoutError:
        endless = Violation("every seed ends", f"not after {LONGEST_SEED_S} s")
        return Result(of.seed, (endless,), 0, 0, Counter())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def run_chunk(first: int, seeds: int) -> Tally:
    """Run seeds one after another."""
    tally = Tally()
    gc.disable()  # dearer than the memory of the few seeds that one process runs
    for seed in range(first, first + seeds):
        tally.add(run_one(scenario(seed)))
    return tally


def run_range(first: int, seeds: int, processes: int, *, until_first: bool = False) -> Tally:
    """Run seeds in several processes."""
    tally = Tally()
    end, share = first + seeds, SEEDS_A_PROCESS * processes
    for begin in range(first, end, share):
        starts = range(begin, min(begin + share, end), CHUNK)
        with ProcessPoolExecutor(processes) as pool:
            parts = [pool.submit(run_chunk, start, min(CHUNK, end - start)) for start in starts]
            for part in parts:
                tally.merge(part.result())
                if until_first and tally.failed:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return tally
    return tally
