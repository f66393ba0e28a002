"""Runs seeds: `python -m tests.simulator --first 0 --seeds 10000`, or shows one: `python -m tests.simulator --seed 7`.

The last line counts seeds, records, steps, faults by kind and violations; the exit code is 1 on any violation. What
fails is shrunk, and the command that shows it is printed. `--results FILE` adds each finished range to a file, with the
commit that it ran on and a digest of the code, and leaves out the ranges that are in it for the same code.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.simulator.running import CODE, Tally, run_one, run_range
from tests.simulator.scenario import Scenario, scenario
from tests.simulator.world import Result
from tests.soaking import add_row, code_digest, code_version, read_rows

MOST_SHRUNK: Final = 3
"""Of the seeds that fail, so many are shrunk: it takes as many runs as there are faults."""


def shrink(of: Scenario) -> tuple[set[int], Result]:
    """Leave out what the first violation of a scenario does not need."""
    left_out: set[int] = set()
    result = run_one(of)
    promise = result.violations[0].promise
    for number in range(of.faults):
        tried = run_one(of.without(left_out | {number}))
        if any(violation.promise == promise for violation in tried.violations):
            left_out.add(number)
            result = tried
    return left_out, result


def command(seed: int, left_out: set[int]) -> str:
    """Give the command that shows a seed."""
    without = f" --without {','.join(map(str, sorted(left_out)))}" if left_out else ""
    return f"python -m tests.simulator --seed {seed}{without}"


def show(seed: int, left_out: set[int]) -> int:
    """Print a seed's log and what it violates."""
    of = scenario(seed).without(left_out)
    result = run_one(of)
    print(of)
    print(*result.transcript, sep="\n")
    print(*result.violations or ["no violation"], sep="\n")
    return 1 if result.violations else 0


def report(tally: Tally, most: int = MOST_SHRUNK) -> None:
    """Print how to see what failed, then the tally."""
    for seed in list(tally.failed)[:most]:
        left_out, result = shrink(scenario(seed))
        print(f"seed {seed}: {result.violations[0]}\n    {command(seed, left_out)}")
    if len(tally.failed) > most:
        print(f"and seeds {list(tally.failed)[most:][:20]}")
    print(tally)


def soak(first: int, seeds: int, processes: int, results: Path, block: int = 10_000) -> Tally:
    """Run what `results` does not have yet of this code, block by block."""
    at, code = code_version(CODE), code_digest(CODE)
    tally = Tally()
    asked, done = list(_blocks(first, seeds, block)), set()
    for row in read_rows(results):
        ran = row["first"], row["seeds"]
        if row.get("code") == code and ran in asked:
            done.add(ran)
            failed = {int(seed): text for seed, text in row["failed"].items()}
            tally.merge(Tally(row["seeds"], row["records"], row["steps"], Counter(row["faults"]), failed))
    for start, count in asked:
        if (start, count) in done:
            continue
        began_s = time.monotonic()
        part = run_range(start, count, processes)
        tally.merge(part)
        row = {
            "commit": at,
            "code": code,
            "first": start,
            "seeds": count,
            "records": part.records,
            "steps": part.steps,
            "faults": part.faults,
            "failed": part.failed,
            "seconds": round(time.monotonic() - began_s, 1),
        }
        add_row(results, row)
        print(f"{tally.seeds:,} of {seeds:,} seeds, {len(tally.failed)} violations", flush=True)
    return tally


def _blocks(first: int, seeds: int, block: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + seeds, block):
        yield start, min(block, first + seeds - start)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="show one seed")
    parser.add_argument("--without", default="", help="numbers of the faults of that seed to leave out: 0,3")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--until-first", action="store_true", help="stop after the first violation")
    parser.add_argument("--results", type=Path, help="add finished ranges to this file; leave out those in it")
    options = parser.parse_args()
    if options.seed is not None:
        return show(options.seed, {int(number) for number in options.without.split(",") if number})
    if options.results:
        tally = soak(options.first, options.seeds, options.processes, options.results)
    else:
        tally = run_range(options.first, options.seeds, options.processes, until_first=options.until_first)
    report(tally, most=1 if options.until_first else MOST_SHRUNK)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
