"""Prints where the time of the tests goes: by part, by file, and the slowest tests.

`python -m tests.times build/real-tests.xml` reads the reports that `make test` leaves in `build`. The seconds are those
of the workers, which run side by side, and hold only what the tests of a file take, set-up of shared services included.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.parts import FOLDER, PARTS, files_of

SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of one or more reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE")
    sys.stdout.write(tables(seconds_of(parser.parse_args(arguments).reports)))


def seconds_of(reports: Sequence[Path]) -> dict[tuple[str, str], float]:
    """Return the seconds of each test, by its file (relative to `tests`) and its name."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for report in reports:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own file
            module = case.get("classname", "").split(".")[1:]
            while module and not FOLDER.joinpath(*module).with_suffix(".py").exists():
                module.pop()
            found["/".join(module), case.get("name", "")] += float(case.get("time", 0))
    return found


def tables(seconds: Mapping[tuple[str, str], float]) -> str:
    """Return the tables as Markdown. A file counts in the first of its parts."""
    kinds: dict[str, Callable[[str, str], str]] = {
        "part": lambda file, _: _part_of(file),
        "file": lambda file, _: file,
        "test": lambda file, name: f"{file}: {name}",
    }
    return "\n".join(_table(title, kind, seconds) for title, kind in kinds.items())


def _part_of(file: str) -> str:
    path = FOLDER.joinpath(file).with_suffix(".py")
    return next((part for part in PARTS if path in files_of(part, file.partition("/")[0])), "other")


def _table(title: str, kind: Callable[[str, str], str], seconds: Mapping[tuple[str, str], float]) -> str:
    sums: dict[str, float] = defaultdict(float)
    for test, took_s in seconds.items():
        sums[kind(*test)] += took_s
    total_s = sum(sums.values())
    longest = sorted(sums.items(), key=lambda row: -row[1])[:SHOWN]
    lines = [f"| {name} | {took_s:.0f} | {100 * took_s / total_s:.0f} |" for name, took_s in longest]
    return "\n".join([f"| {title} | s | % |", "| --- | ---: | ---: |", *lines, ""])


if __name__ == "__main__":
    main()
