"""The mutation gate of a simulator: each mutant is a broken copy of the library that some seed must catch.

`python -m tests.simulator.mutants` and `python -m tests.outbox_simulator.mutants` contain the mutants.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.soak_results import TOP, code_digest

LIBRARY: Final = "marshal_dagster"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the library: in one file, a text that occurs exactly once is replaced by another."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str, str], ...] = ()
    """More edits, if one alone changes nothing because a second check remains: file, text, new text."""

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """Return all edits."""
        return ((self.file, self.old, self.new), *self.also)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a mutant: the number of seeds until it was caught, and the promise that it broke."""

    mutant: Mutant
    seeds: int
    caught_by: str | None


def broken_copy(mutant: Mutant, folder: Path) -> Path:
    """Copy the library and these tests to `folder` and break the copy; raise `LookupError` if the text is not found."""
    shutil.copytree(TOP / LIBRARY, folder / LIBRARY, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(TOP / "tests")
    for name, old, new in mutant.edits:
        path = folder / LIBRARY / name
        text = path.read_text()
        if text.count(old) != 1:
            raise LookupError(f"mutant {mutant.name!r}: its text is {text.count(old)} times in {name}, not once")
        path.write_text(text.replace(old, new))
    return folder


def judge(mutant: Mutant, seeds: int, module: str) -> Verdict:
    """Run seeds of a simulator against a mutant until one finds a violation."""
    with tempfile.TemporaryDirectory(prefix="marshal-mutant-") as folder:
        tree = broken_copy(mutant, Path(folder))
        command = [sys.executable, "-m", module, "--seeds", str(seeds), "--processes", "1", "--until-first"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    found = re.search(r"^seed (\d+): (.*?): ", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1 and found is None):
        raise RuntimeError(f"mutant {mutant.name!r} failed to run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if found is None:
        return Verdict(mutant, seeds, None)
    return Verdict(mutant, int(found[1]) + 1, found[2])


def gate(mutants: Sequence[Mutant], module: str, code: Sequence[str], seeds: int) -> int:
    """Judge all mutants, or those whose names contain a text from the command line; return the exit code.

    A mutant has survived if `seeds` seeds find no violation. `code` lists the paths on which the results depend, as git
    names them; a digest of them is printed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}.mutants")
    parser.add_argument(
        "--seeds", type=int, default=seeds, help="the most seeds for a mutant; one that passes them has survived"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("names", nargs="*", help="parts of the names of the mutants to judge; all by default")
    options = parser.parse_args()
    chosen = [one for one in mutants if not options.names or any(part in one.name for part in options.names)]
    survivors, digest = 0, code_digest(code)
    print("| mutant | caught by | after seeds |\n| --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(options.processes) as pool:
        for verdict in pool.map(lambda mutant: judge(mutant, options.seeds, module), chosen):
            survivors += verdict.caught_by is None
            print(f"| {verdict.mutant.name} | {verdict.caught_by or 'SURVIVED'} | {verdict.seeds:,} |", flush=True)
    print(f"{len(chosen)} mutants of code {digest}, {survivors} survived")
    return 1 if survivors else 0
