"""Command line of the benchmarks: `python -m benchmarks` lists them, `python -m benchmarks NAME [--json]` runs one.

Each size is an option: `python -m benchmarks batch --records 100000`. The exit code is 0 if the measurement succeeded,
even if a target was missed. The result shows for each case whether its target was met.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import harness, machine
from benchmarks.harness import Benchmark
from benchmarks.registry import BENCHMARKS

RESULTS: Final = Path(__file__).with_name("results")
_SIGTERM_EXIT: Final = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments describe."""
    chosen = vars(_parser().parse_args(arguments))
    shows_table = chosen.pop("table")
    benchmark: Benchmark[Any] | None = chosen.pop("benchmark", None)
    if benchmark is not None:
        _run(benchmark, chosen, as_json=chosen.pop("json"))
    elif shows_table:
        print(harness.as_markdown(kept_results()))
    else:
        print(_listing())


def kept_results() -> list[dict[str, Any]]:
    """Read the results that the repository keeps, in the order of `BENCHMARKS`."""
    files = (RESULTS / f"{benchmark.name}.json" for benchmark in BENCHMARKS)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def _run(benchmark: Benchmark[Any], sizes: dict[str, int], *, as_json: bool) -> None:
    benchmark = replace(benchmark, sizes=replace(benchmark.sizes, **sizes))
    conditions = machine.conditions(benchmark.sizes)
    found = harness.result(benchmark.name, benchmark.run(benchmark.sizes), conditions)
    print(harness.as_json(found) if as_json else harness.as_table(found))


def _listing() -> str:
    width = max(len(benchmark.name) for benchmark in BENCHMARKS)
    lines = [f"  {benchmark.name.ljust(width)}  {benchmark.summary}" for benchmark in BENCHMARKS]
    return "\n".join(["python -m benchmarks NAME [--json]", "", *lines])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare the library with bare clients.")
    parser.add_argument("--table", action="store_true", help="show the kept results as a table for the documentation")
    commands = parser.add_subparsers(metavar="NAME")
    for benchmark in BENCHMARKS:
        command = commands.add_parser(benchmark.name, help=benchmark.summary, description=benchmark.summary)
        command.set_defaults(benchmark=benchmark)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        for size in fields(benchmark.sizes):
            default = getattr(benchmark.sizes, size.name)
            command.add_argument(
                f"--{size.name.replace('_', '-')}",
                type=partial(_whole, 0 if size.name == "warm_up" else 1),
                default=default,
                metavar="N",
                help=f"default {default}",
            )
    return parser


def _whole(least: int, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_SIGTERM_EXIT))  # so that context managers stop what they started
    main()
