"""Runs races of processes that write the same ranges of a Kafka output.

`python -m tests.task_races --seeds 50` starts a broker and runs 50 seeds; `--seed 7` runs one, and `--servers` uses a
broker that runs already. The return code is 1 if a record was lost, written twice, out of order or changed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from marshal_dagster.devkafka import running_kafka
from marshal_dagster.kafka.connection import KafkaConnection
from tests.task_races.local_tasks import Processes
from tests.task_races.race import Race


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.task_races", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, metavar="N", help="run only this seed")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="the number of seeds")
    parser.add_argument("--servers", metavar="HOST:PORT", help="a broker, instead of one that is started")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    bad = 0
    with _servers(asked.servers) as servers, Processes() as processes:
        for seed in seeds:
            began_s = time.monotonic()
            race = Race(KafkaConnection(bootstrap_servers=servers), processes, seed)
            found = race.go()
            bad += bool(found.violations)
            sys.stdout.write(
                f"seed {seed}: {found.records} records, {race.runs} runs, {race.killed} processes killed or stopped, "
                f"{race.resumed} continued, {found.lost} lost, {found.twice} twice, "
                f"{time.monotonic() - began_s:.1f} s\n"
            )
            sys.stdout.writelines(f"  {violation}\n" for violation in found.violations)
            sys.stdout.flush()
    return min(bad, 1)


@contextmanager
def _servers(named: str | None) -> Iterator[str]:
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="marshal-races-") as folder, running_kafka(Path(folder, "kafka")) as kafka:
        yield kafka.bootstrap_servers


if __name__ == "__main__":
    sys.exit(main())
