"""Runs the tests many times beside busy processes: a test that depends on the machine's pace fails then.

`python -m tests.stress fast` runs the fast tests twenty times beside four busy processes. With `--freeze` each test is
also stopped for two seconds at a random moment, which shows more in one round than busy processes in many. Rounds that
are in the results file for the same code are not run again, so the command continues after an interruption.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from tests.parts import FOLDER, PARTS, files_of
from tests.soak_results import ALL_CODE, TOP, add_row, code_digest, code_version, read_rows

ROUNDS: Final = 20
BUSY: Final = 4
WORKERS: Final = {"fast": ("-n", "2"), "real": ("-n", "3", "--dist", "loadfile", "--max-worker-restart", "0")}
HANGS_AFTER_S: Final = 3_600
"""Time limit of a test: it only ends a test that hangs, so it is long enough for any machine."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one run of all tests of a suite."""

    commit: str
    code: str
    suite: str
    """`fast` or `real`, the part if it was only one, and `frozen` if each test was stopped for a while."""
    round: int
    busy: int
    tests: int
    seconds: int
    failed: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing rounds and print a table. Return 1 if a test failed in any round, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", choices=WORKERS, help="the suite")
    parser.add_argument("--part", choices=PARTS, metavar="PART", help="only the tests of this part of the library")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="how often each test runs")
    parser.add_argument("--busy", type=int, default=BUSY, metavar="N", help="number of busy processes beside the tests")
    parser.add_argument("--freeze", action="store_true", help="stop each test for a while (tests/freezing.py)")
    parser.add_argument("--results", type=Path, default=TOP / "tests/results/stress.jsonl", metavar="FILE")
    requested = parser.parse_args(arguments)
    suite = "/".join(filter(None, (requested.folder, requested.part, "frozen" if requested.freeze else None)))
    options = [*WORKERS[requested.folder], *(("-p", "tests.freezing") if requested.freeze else ())]
    tests = [FOLDER / requested.folder] if requested.part is None else files_of(requested.part, requested.folder)
    code, commit = code_digest(ALL_CODE), code_version(ALL_CODE)
    for number in range(requested.rounds):
        if number in {row.round for row in rounds(requested.results, suite, code)}:
            continue
        start_s = time.monotonic()
        with busy_processes(requested.busy):
            count, failed = run(tests, options)
        seconds = round(time.monotonic() - start_s)
        add_row(requested.results, asdict(Round(commit, code, suite, number, requested.busy, count, seconds, failed)))
    done = rounds(requested.results, suite, code)
    sys.stdout.write(table(done))
    return int(any(row.failed for row in done))


def rounds(results: Path, suite: str, code: str) -> list[Round]:
    """Return the stored rounds of a suite with this code."""
    rows = [Round(**{**row, "failed": tuple(row["failed"])}) for row in read_rows(results)]
    return [row for row in rows if (row.suite, row.code) == (suite, code)]


def run(tests: Sequence[Path], options: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Run the tests once. Return their number, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
        limits = [f"--timeout={HANGS_AFTER_S}", "-o", f"faulthandler_timeout={HANGS_AFTER_S}"]
        done = subprocess.run([*command, *limits, *map(str, tests)], cwd=TOP, check=False)
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - our own file
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    if done.returncode and not failed:
        failed = (f"pytest ended with exit code {done.returncode}",)
    return len(cases), failed


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep this number of processors busy while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def table(done: Sequence[Round]) -> str:
    """Return the sums of the rounds, and each test that failed with the number of its failures."""
    if not done:
        return "no rounds\n"
    failures = Counter(name for row in done for name in row.failed)
    seconds = sorted(row.seconds for row in done)
    tests = f"{len(done)} rounds, {sum(row.tests for row in done):,} tests beside {done[0].busy} busy processes"
    times = f"{seconds[0]:,} to {seconds[-1]:,} s a round"
    lines = [
        f"{done[0].suite}: {tests}, {times}, {sum(failures.values())} failures (code {done[0].code})",
        *(f"{number:4} times {name}" for name, number in failures.most_common()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
