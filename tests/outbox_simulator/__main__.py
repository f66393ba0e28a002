"""Runs seeds: `python -m tests.outbox_simulator --seeds 10000`, or shows one: `... --seed 7`.

The last line counts seeds, records, calls, faults by kind and violations; the exit code is 1 on any violation. What
fails is shrunk, and the command that shows it is printed.
"""

import argparse
import os
import sys

from tests.outbox_simulator.running import Tally, run_one, run_range, shrink
from tests.outbox_simulator.scenario import scenario


def command(seed: int, left_out: set[int]) -> str:
    """Give the command that shows a seed."""
    without = f" --without {','.join(map(str, sorted(left_out)))}" if left_out else ""
    return f"python -m tests.outbox_simulator --seed {seed}{without}"


def show(seed: int, left_out: set[int]) -> int:
    """Print what happens in a seed, and what it violates."""
    of = scenario(seed).without(left_out)
    result = run_one(of)
    print(of)
    print(*result.transcript, sep="\n")
    print(*result.violations or ["no violation"], sep="\n")
    return 1 if result.violations else 0


def report(tally: Tally, most: int = 3) -> None:
    """Print how to see what failed, then the tally."""
    for seed in list(tally.failed)[:most]:
        left_out, result = shrink(scenario(seed))
        print(f"seed {seed}: {result.violations[0]}\n    {command(seed, left_out)}")
    if len(tally.failed) > most:
        print(f"and seeds {list(tally.failed)[most:][:20]}")
    print(tally)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.outbox_simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="show one seed")
    parser.add_argument("--without", default="", help="numbers of the faults of that seed to leave out: 0,3")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--until-first", action="store_true", help="stop after the first violation")
    options = parser.parse_args()
    if options.seed is not None:
        return show(options.seed, {int(number) for number in options.without.split(",") if number})
    tally = run_range(options.first, options.seeds, options.processes, until_first=options.until_first)
    report(tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
