"""Run the demonstration and check its result: `python -m demo`.

It loads the flights, lets Dagster's schedule and sensor process them with Spark, and kills one run while Spark writes.
Then it compares the totals of each carrier with those of the data set. It writes `build/demo.json`, and exits with 1 if
anything differs.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import dagster as dg
from rich.console import Console
from rich.table import Table

from demo import flights
from demo.deployment import BUILD, COORDINATION_TOPIC, Deployment, kill_tree, running, wait_for
from demo.logbook import Logbook, Plan
from demo.runs import Runs
from jobs.flights import GROUP, carrier_totals
from marshal_dagster._internal.java import find_java
from marshal_dagster.devkafka.jars import ensure_jars
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import FileSink
from marshal_dagster.spark.connector import fetch_connector

HEARTBEAT_INTERVAL_S: Final = 2.0
SETTINGS: Final = {
    "MARSHAL_HEARTBEAT_INTERVAL_S": str(HEARTBEAT_INTERVAL_S),
    "MARSHAL_MAX_RECORDS": "75000",
    "MARSHAL_MAX_BATCHES": "3",
}
NEEDED_BEFORE_TICK_S: Final = 45
"""Time from the launch of a run to the claim of the reprocessing run. The schedule should not tick within it."""
LATEST_KILL_SECOND: Final = 45
"""Latest second of a minute for the kill: the sensor then finds the dead run before the schedule's next run."""
RUN_S: Final = 600.0
"""Ends a demonstration that hangs. On a busy machine, Spark alone may take minutes to start."""

console = Console(soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Kill:
    """The killed run, the number of its processes, and its plans that are not committed."""

    run_id: str
    processes: int
    plans: list[Plan]


@dataclass(slots=True)
class Stopwatch:
    """Measures the seconds since the set-up."""

    started_s: float = 0.0

    def start(self) -> None:
        """Start at 0."""
        self.started_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self.started_s


stopwatch = Stopwatch()


def say(text: str) -> None:
    """Print one step with its time."""
    console.print(f"[dim]{stopwatch.seconds:6.1f} s[/]  {text}", highlight=False)


def main() -> int:
    """Run the demo. Returns 0 if all checks pass."""
    report = BUILD / "demo.json"
    report.unlink(missing_ok=True)
    set_up()
    stopwatch.start()
    say("starting Kafka")
    with running(BUILD / "demo", SETTINGS) as deployment:
        os.environ["DAGSTER_HOME"] = str(deployment.home)
        say(f"Kafka is up on {deployment.connection.bootstrap_servers}; starting Dagster's daemon")
        deployment.start("dagster-daemon", "run", "-w", "workspace.yaml")
        with dg.DagsterInstance.get() as instance:
            try:
                result = show(deployment, Runs(instance))
            except TimeoutError as error:
                say(f"[red]{error}[/]; {BUILD / 'demo'} has Dagster's output (*.log)")
                return 1
    report.write_text(json.dumps(result, indent=2) + "\n")
    ok = result["counts_match"] and result["plan_replayed"]
    say(f"[{'green' if ok else 'red'}]{'everything matches' if ok else 'something differs'}[/], see {report}")
    return 0 if ok else 1


def set_up() -> None:
    """Download the jars that every machine needs once."""
    ensure_jars(find_java(), report=console.print)
    fetch_connector(report=console.print)


def show(deployment: Deployment, runs: Runs) -> dict[str, object]:
    """Load the flights, process them, kill a run meanwhile, and compare the result."""
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, deployment)
        first_run(deployment)
        loaded = loading.result()
    logbook = Logbook(deployment.connection, COORDINATION_TOPIC, GROUP, flights.TOPIC)
    kill = kill_one_run(deployment, runs, logbook)
    takeover = wait_for_takeover(runs, logbook, kill)
    say("waiting until the topic is drained and every run has ended")
    wait_for("the topic is drained", lambda: drained(logbook, deployment) or None, RUN_S, 0.5)
    wait_for("the runs have ended", lambda: runs.all_ended() or None, RUN_S, 0.5)
    logbook.catch_up()
    matches = compare(deployment)
    replayed = all(logbook.replayed(kill.run_id, plan) for plan in kill.plans)
    table = Table("", "", show_header=False)
    result: dict[str, object] = {
        "flights": loaded,
        "counts_match": matches,
        "batches": logbook.batches(),
        "runs": len(runs.all()),
        "killed_run": kill.run_id,
        "takeover_seconds": takeover["seconds"],
        "takeover": takeover,
        "plan_replayed": replayed,
        "seconds": round(stopwatch.seconds, 1),
    }
    for name, value in result.items():
        table.add_row(name, str(value))
    console.print(table)
    logbook.close()
    return result


def load(deployment: Deployment) -> int:
    """Write all flights to the topic, and return their number."""
    count = flights.load(deployment.connection, flights.data_set())
    say(f"loaded {count:,} flights into topic {flights.TOPIC!r}, {flights.PARTITIONS} partitions")
    return count


def first_run(deployment: Deployment) -> None:
    """Let the schedule start the first run, or launch it now if the next tick is too far off."""
    to_tick_s = 60 - datetime.now().astimezone().second
    if to_tick_s < NEEDED_BEFORE_TICK_S:
        say(f"the schedule starts the first run in {to_tick_s} s")
        return
    say("the schedule's next tick is far off: launching the first run by hand")
    deployment.start("dagster", "job", "launch", "-w", "workspace.yaml", "-j", "flights")


def kill_one_run(deployment: Deployment, runs: Runs, logbook: Logbook) -> Kill:
    """Wait until a run has committed a batch and Spark writes the next one; then kill all processes of the run."""
    say("waiting for a run that has committed a batch and is writing another")

    def writing() -> tuple[str, list[Plan]] | None:
        if datetime.now().astimezone().second > LATEST_KILL_SECOND:
            return None
        attempts = {str(path) for path in attempts_under_way(deployment.output)}
        for run_id in runs.running():
            plans = logbook.plans_of(run_id)
            if plans and attempts and any(entry.run_id == run_id for entry in logbook.commits()):
                return run_id, plans
        return None

    run_id, plans = wait_for("a run that writes its second batch", writing, RUN_S, 0.05)
    processes = kill_tree(runs.worker_pid(run_id))
    left = logbook.plans_of(run_id)
    if {plan.partition for plan in left} != {plan.partition for plan in plans}:
        raise RuntimeError("the run committed while it was being killed; run the demo again")
    say(f"[bold]killed run {run_id[:8]}[/] with SIGKILL, {processes} processes; it held {len(left)} open plans")
    return Kill(run_id, processes, left)


def attempts_under_way(output: Path) -> list[Path]:
    """Return the temporary folders of Spark tasks that write now, or none if a folder is removed meanwhile."""
    try:
        return list(output.glob("**/_temporary"))
    except FileNotFoundError:
        return []


def wait_for_takeover(runs: Runs, logbook: Logbook, kill: Kill) -> dict[str, object]:
    """Wait until other runs have claimed all partitions of the dead run, and return the duration and its parts."""

    def taken() -> bool | None:
        logbook.catch_up()
        return len(logbook.takeover(kill.run_id, kill.plans)) == len(kill.plans) or None

    wait_for("another run takes the dead run's partitions", taken, RUN_S)
    claims = logbook.takeover(kill.run_id, kill.plans)
    last_ms = logbook.last_heartbeat_ms(kill.run_id)
    claimed_ms = max(claim.log_time_ms for claim in claims)
    successor = runs.get(claims[-1].run_id)
    requested_ms, began_ms = successor.create_timestamp.timestamp() * 1_000, (successor.start_time or 0) * 1_000
    seconds = round((claimed_ms - last_ms) / 1_000, 2)
    found = runs.found_by(successor.dagster_run, last_ms, HEARTBEAT_INTERVAL_S)
    job = successor.dagster_run.job_name
    say(f"run {claims[-1].run_id[:8]} ({job}) took over, {seconds} s after the last heartbeat: {found}")
    return {
        "seconds": seconds,
        "found": found,
        "by_run": claims[-1].run_id,
        "by_job": job,
        "heartbeat_to_request_s": round((requested_ms - last_ms) / 1_000, 2),
        "request_to_start_s": round((began_ms - requested_ms) / 1_000, 2),
        "start_to_claim_s": round((claimed_ms - began_ms) / 1_000, 2),
    }


def drained(logbook: Logbook, deployment: Deployment) -> bool:
    """Return whether the position of every partition is at its end, and no partition has an owner."""
    world = logbook.catch_up()
    with Topics(deployment.connection) as topics:
        ends = topics.offsets(flights.TOPIC, range(flights.PARTITIONS))
    keys = [world.key(GROUP, flights.TOPIC, number) for number in ends]
    return all(key.owner is None and key.offset == ends[number].end for number, key in enumerate(keys))


def compare(deployment: Deployment) -> bool:
    """Compare Spark's totals with those of pandas, carrier by carrier."""
    expected = flights.expected_totals(flights.data_set())
    counted = carrier_totals(FileSink(deployment.output / "flights_by_carrier"))
    found = {
        name: flights.CarrierTotal(name, one.flights, one.delay_count, one.delay_sum) for name, one in counted.items()
    }
    table = Table("carrier", "flights", "mean departure delay (min)", "by pandas", "", title="Flights by carrier")
    for name in sorted(expected.keys() | found.keys()):
        table.add_row(name, *row(found.get(name), expected.get(name)))
    console.print(table)
    return found == expected


def row(found: flights.CarrierTotal | None, expected: flights.CarrierTotal | None) -> Sequence[str]:
    """Return the cells of one row of the table."""
    same = "[green]same[/]" if found == expected else "[red]differs[/]"
    return (f"{found.flights:,}" if found else "-", mean(found), mean(expected), same)


def mean(total: flights.CarrierTotal | None) -> str:
    """Return a mean delay as text."""
    return "-" if total is None or total.mean_delay_min is None else f"{total.mean_delay_min:.3f}"


if __name__ == "__main__":
    sys.exit(main())
