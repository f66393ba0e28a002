"""Runs races of processes that write the same ranges of a Kafka output.

`python -m tests.task_races --seeds 50` starts a broker and runs 50 seeds; `--seed 7` runs one, and `--servers` uses a
broker that runs already. The return code is 1 if a record was lost, written twice, out of order or changed.

`--results FILE` adds the sums to a file of JSON lines. Seeds that follow those of the last row there are added to that
row, if the code is the same. So many seeds can be run in several portions.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from marshal_dagster.devkafka import running_kafka
from marshal_dagster.kafka.connection import KafkaConnection
from tests.soak_results import code_digest, code_version, read_rows, write_rows
from tests.task_races.checks import Verdict
from tests.task_races.local_tasks import Processes
from tests.task_races.race import Race

CODE: Final = ("marshal_dagster/kafka", "marshal_dagster/protocol", "marshal_dagster/sinks/kafka", "tests/task_races")
"""What the result of a seed depends on."""
_SUMS: Final = ("records", "runs", "killed", "resumed", "lost", "twice", "violations", "seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.task_races", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, metavar="N", help="run only this seed")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="the number of seeds")
    parser.add_argument("--servers", metavar="HOST:PORT", help="a broker, instead of one that is started")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add the sums of the seeds to this file")
    requested = parser.parse_args(arguments)
    seeds = range(requested.first, requested.first + requested.seeds) if requested.seed is None else [requested.seed]
    bad = 0
    with _servers(requested.servers) as servers, Processes() as processes:
        for seed in seeds:
            began_s = time.monotonic()
            race = Race(KafkaConnection(bootstrap_servers=servers), processes, seed)
            found = race.go()
            bad += bool(found.violations)
            took_s = time.monotonic() - began_s
            if requested.results is not None:
                add_seed(requested.results, result_of(race, found, took_s))
            sys.stdout.write(
                f"seed {seed}: {found.records} records, {race.runs} runs, {race.killed} processes killed or stopped, "
                f"{race.resumed} continued, {found.lost} lost, {found.twice} twice, {took_s:.1f} s\n"
            )
            sys.stdout.writelines(f"  {violation}\n" for violation in found.violations)
            sys.stdout.flush()
    return min(bad, 1)


def result_of(race: Race, found: Verdict, took_s: float) -> dict[str, Any]:
    """Return the row of one seed."""
    sums = (found.records, race.runs, race.killed, race.resumed, found.lost, found.twice, len(found.violations))
    named = {"commit": code_version(CODE), "code": code_digest(CODE), "first": race.seed, "seeds": 1}
    return named | dict(zip(_SUMS, (*sums, round(took_s, 1)), strict=True))


def add_seed(results: Path, row: dict[str, Any]) -> None:
    """Add a seed to the last row if it follows the seeds there and has the same code, else as a row of its own."""
    rows = read_rows(results)
    if rows and rows[-1]["code"] == row["code"] and rows[-1]["first"] + rows[-1]["seeds"] == row["first"]:
        last = rows.pop()
        row = last | {name: round(last[name] + row[name], 1) for name in ("seeds", *_SUMS)}
    write_rows(results, [*rows, row])


@contextmanager
def _servers(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="marshal-races-") as folder, running_kafka(Path(folder, "kafka")) as kafka:
        yield kafka.bootstrap_servers


if __name__ == "__main__":
    sys.exit(main())
