"""Fuzzes the protocol: `python -m tests.fuzz --seconds 60`; `python -m tests.fuzz --replay FILE` runs an input again.

Findings are kept in `build/fuzz/findings`, and the command that reproduces each is printed; the exit code is then 1.
The last line counts inputs and records. With `--results FILE` the fuzzing continues until the number of `--records` was
read on this commit, over several runs. It adds a row to the file after each `--seconds`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.fuzz.counts import Count, read_count
from tests.fuzz.targets import CORPUS, TARGETS
from tests.soak_results import ALL_CODE, TOP, add_row, code_version, read_rows

BUILD: Final = TOP / "build" / "fuzz"
WORDS: Final = Path(__file__).parent / "words.dict"
SHARES: Final = {"world": 0.4, "parser": 0.2, "snapshots": 0.2, "notes": 0.05, "coordinator": 0.1, "election": 0.05}
"""The share of each target in the CPU time."""
LOG_RECORDS: Final = ("world", "parser")
"""The targets whose records count for a soak. Records of snapshots are not records of the log."""
LONGEST_INPUT_BYTES: Final = {
    "world": 600,
    "parser": 2_100,
    "snapshots": 400,
    "notes": 600,
    "coordinator": 400,
    "election": 400,
}
LONGEST_RUN_S: Final = 20
LARGEST_MIB: Final = 1_024
KEPT_BYTES: Final = 1_024
"""The longest input that is added to the corpus in the repository."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One target that is fuzzed for some time from a seed."""

    target: str
    seconds: int
    seed: int
    build: Path = BUILD

    @property
    def finds(self) -> Path:
        """The folder for inputs that reach new code."""
        return self.build / "corpus" / self.target

    @property
    def findings(self) -> Path:
        """The folder for inputs that break a promise."""
        return self.build / "findings" / self.target

    def command(self, counts: Path) -> list[str]:
        """Return the command that fuzzes."""
        return [
            *child(self.target, counts),
            self.target,
            str(self.finds),
            str(CORPUS / self.target),
            f"-max_total_time={self.seconds}",
            f"-seed={self.seed}",
            f"-max_len={LONGEST_INPUT_BYTES[self.target]}",
            f"-timeout={LONGEST_RUN_S}",
            f"-rss_limit_mb={LARGEST_MIB}",
            f"-dict={WORDS}",
            f"-artifact_prefix={self.findings}/",
            "-print_final_stats=1",
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a stretch."""

    stretch: Stretch
    count: Count
    seconds: float
    findings: tuple[Path, ...] = ()
    error: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether every promise held."""
        return not self.findings and not self.error


def child(target: str, counts: Path) -> list[str]:
    """Return the command of a fuzzing process without libFuzzer's arguments, the first of which is its own name."""
    return [sys.executable, "-m", "tests.fuzz.process", target, str(counts)]


def run(stretch: Stretch) -> Outcome:
    """Fuzz in another process, which libFuzzer ends."""
    stretch.finds.mkdir(parents=True, exist_ok=True)
    stretch.findings.mkdir(parents=True, exist_ok=True)
    counts = stretch.build / f"{stretch.target}.count"
    counts.unlink(missing_ok=True)
    before = set(stretch.findings.iterdir())
    began_s = time.monotonic()
    ended = subprocess.run(
        stretch.command(counts), cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    outcome = Outcome(stretch, read_count(counts), round(time.monotonic() - began_s, 1))
    if ended.returncode == 0:
        return outcome
    findings = tuple(sorted(set(stretch.findings.iterdir()) - before))
    return replace(outcome, findings=findings, error=ended.stdout[-3_000:] or f"exit code {ended.returncode}")


def run_all(seconds: int, seed: int, processes: int, targets: Iterable[str] = tuple(SHARES)) -> list[Outcome]:
    """Fuzz the targets, each for its share of the time of that many processes."""
    chosen = tuple(targets)
    whole = sum(SHARES[target] for target in chosen)
    stretches = [
        Stretch(target, max(1, min(seconds, int(seconds * processes * SHARES[target] / whole))), seed)
        for target in chosen
    ]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, stretches))


def report(outcomes: Iterable[Outcome]) -> bool:
    """Print the findings and the commands that reproduce them; return whether there are none."""
    clean = True
    for outcome in outcomes:
        if outcome.is_clean:
            continue
        clean = False
        print(outcome.error)
        for path in outcome.findings:
            print(f"{outcome.stretch.target}: {path}\n    python -m tests.fuzz --replay {path}")
    return clean


def total(outcomes: Iterable[Outcome]) -> str:
    """Return a summary in one line."""
    parts = [
        f"{outcome.stretch.target} {outcome.count.inputs:,} inputs, {outcome.count.records:,} records"
        f" in {outcome.seconds:g} s"
        for outcome in outcomes
    ]
    return "; ".join(parts)


def replay(path: Path, target: str | None) -> int:
    """Run one input; the name of its folder is its target."""
    records = TARGETS[target or path.resolve().parent.name](path.read_bytes())
    print(f"{path}: {records} records, every promise held")
    return 0


@dataclass(frozen=True, slots=True)
class Soak:
    """The totals of a commit in a results file."""

    records: int
    sittings: int
    clean: bool


def soaked(results: Path, at: str) -> Soak:
    """Add up the rows of a commit."""
    rows = [row for row in read_rows(results) if row["commit"] == at]
    records = sum(row["targets"][target]["records"] for row in rows for target in LOG_RECORDS)
    return Soak(records, len(rows), all(row["findings"] == 0 for row in rows))


def soak(records: int, results: Path, seconds: int, processes: int, first_seed: int) -> bool:
    """Fuzz until the results file has that many records of this commit; return whether there was no finding."""
    at = code_version(ALL_CODE)
    while (so_far := soaked(results, at)).records < records:
        seed = first_seed + so_far.sittings
        outcomes = run_all(seconds, seed, processes)
        add_row(results, row_of(at, seed, outcomes))
        if not report(outcomes):
            return False
        print(f"{soaked(results, at).records:,} of {records:,} records; {total(outcomes)}", flush=True)
    return so_far.clean


def row_of(at: str, seed: int, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the row of one stretch."""
    done = tuple(outcomes)
    return {
        "commit": at,
        "seed": seed,
        "targets": {
            outcome.stretch.target: {**outcome.count._asdict(), "seconds": outcome.seconds} for outcome in done
        },
        "findings": sum(not outcome.is_clean for outcome in done),
    }


def merge(target: str) -> int:
    """Reduce the corpus to the smallest one that reaches all that it and the new inputs reach."""
    script = BUILD / "merge"
    counts = BUILD / f"{target}.count"
    merged = BUILD / "merged" / target
    merged.mkdir(parents=True, exist_ok=True)
    for path in merged.iterdir():
        path.unlink()
    # libFuzzer starts itself again from its first argument, so it skips inputs that crash during the merge.
    script.write_text(f'#!/bin/sh\nexec {shlex.join(child(target, counts))} "$0" "$@"\n')
    script.chmod(0o755)
    folders = [path for path in (CORPUS / target, BUILD / "corpus" / target) if path.is_dir()]
    arguments = ["-merge=1", f"-max_len={KEPT_BYTES}", str(merged), *map(str, folders)]
    ended = subprocess.run([str(script), *arguments], cwd=TOP, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr[-3_000:])
        return 1
    kept = {path.name: path.read_bytes() for path in merged.iterdir()}
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for path in (CORPUS / target).iterdir():
        if path.name not in kept and not path.name.startswith(STAYS):
            path.unlink()
    for name, data in kept.items():
        (CORPUS / target / name).write_bytes(data)
    print(f"{target}: {len(kept)} files, {sum(map(len, kept.values())):,} bytes")
    return 0


STAYS: Final = ("crash-", "timeout-", "oom-", "odd-")
"""The prefixes of inputs that broke a promise once, or whose oddity coverage does not show. A merge keeps them."""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="seconds to fuzz (with --results: for each row)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1, help="the seed of libFuzzer's random numbers")
    parser.add_argument("--target", choices=sorted(TARGETS), help="one target only")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input again")
    parser.add_argument(
        "--records", type=int, default=100_000_000, help="with --results: stop after so many records in all"
    )
    parser.add_argument("--results", type=Path, help="add results to this file, and continue from those in it")
    parser.add_argument("--merge", action="store_true", help="add new inputs to the corpus, and reduce it")
    options = parser.parse_args()
    targets = [options.target] if options.target else list(SHARES)
    if options.replay:
        return replay(options.replay, options.target)
    if options.merge:
        return max(merge(target) for target in targets)
    if options.results:
        return 0 if soak(options.records, options.results, options.seconds, options.processes, options.seed) else 1
    outcomes = run_all(options.seconds, options.seed, options.processes, targets)
    clean = report(outcomes)
    print(f"{total(outcomes)}; {sum(not outcome.is_clean for outcome in outcomes)} findings")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
