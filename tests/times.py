"""Prints where the time of the tests goes: by part, by file, and the slowest tests.

`python -m tests.times build/real-tests.xml` reads the reports that `make test` leaves in `build`. The seconds are those
of the workers, which run side by side, and hold only what the tests of a file take, set-up of shared services included.
The processor seconds also contain those of the processes that a test starts. Compare these: on a busy machine a test
takes longer without computing more.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.parts import FOLDER, PARTS, files_of
from tests.processor_time import PROPERTY

SHOWN = 20


class Time(NamedTuple):
    """What tests took, in seconds."""

    duration_s: float
    processor_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of one or more reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE")
    sys.stdout.write(tables(seconds_of(parser.parse_args(arguments).reports)))


def seconds_of(reports: Sequence[Path]) -> dict[tuple[str, str], Time]:
    """Return the time of each test, by its file (relative to `tests`) and its name."""
    found: dict[tuple[str, str], Time] = {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own file
            module = case.get("classname", "").split(".")[1:]
            while module and not FOLDER.joinpath(*module).with_suffix(".py").exists():
                module.pop()
            measured = case.find(f"properties/property[@name='{PROPERTY}']")
            processor_s = 0.0 if measured is None else float(measured.get("value", 0))
            found["/".join(module), case.get("name", "")] = Time(float(case.get("time", 0)), processor_s)
    return found


def tables(times: Mapping[tuple[str, str], Time]) -> str:
    """Return the tables as Markdown, by processor seconds. A file counts in the first of its parts."""
    kinds: dict[str, Callable[[str, str], str]] = {
        "part": lambda file, _: _part_of(file),
        "file": lambda file, _: file,
        "test": lambda file, name: f"{file}: {name}",
    }
    return "\n".join(_table(title, kind, times) for title, kind in kinds.items())


@cache  # a report has thousands of tests
def _part_of(file: str) -> str:
    path = FOLDER.joinpath(file).with_suffix(".py")
    return next((part for part in PARTS if path in files_of(part, file.partition("/")[0])), "other")


def _table(title: str, kind: Callable[[str, str], str], times: Mapping[tuple[str, str], Time]) -> str:
    durations, processor = defaultdict[str, float](float), defaultdict[str, float](float)
    for test, time in times.items():
        durations[kind(*test)] += time.duration_s
        processor[kind(*test)] += time.processor_s
    total_s = sum(processor.values()) or 1
    longest = sorted(processor.items(), key=lambda row: -row[1])[:SHOWN]
    lines = [
        f"| {name} | {durations[name]:.0f} | {took_s:.0f} | {100 * took_s / total_s:.0f} |" for name, took_s in longest
    ]
    return "\n".join([f"| {title} | s | processor s | % |", "| --- | ---: | ---: | ---: |", *lines, ""])


if __name__ == "__main__":
    main()
