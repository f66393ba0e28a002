"""The benchmarks in their short form."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.conditions import WITHIN_S, wait_until
from tests.fast.test_benchmarks import check_form

TOP = Path(__file__).resolve().parents[2]
SHORT = {
    "claim": ["--single-rounds=5", "--many-rounds=2", "--partitions=50", "--process-rounds=1", "--log-records=3"],
    "world_state": ["--records=40000", "--keys=1000", "--alternations=1"],
    "snapshot": ["--records=160000", "--keys=500", "--alternations=1"],
    "batch": ["--records=4000", "--alternations=1", "--warm-up=0", "--long-batches=1"],
    "alternatives": ["--fewest=400", "--most=400", "--alternations=1", "--warm-up=0"],
    "growth": ["--partitions=8", "--runs=1", "--alternations=1"],
    "queued_runs": ["--runs=2", "--partitions=8", "--partitions-of-a-run=3", "--hold-s=1", "--alone=1"],
    "scale": ["--runs=200", "--alternations=2", "--readings=1"],
    "connect": ["--alternations=1", "--warm-up=0"],
    "postgres_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "postgres_upsert": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "delta_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "file_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "mariadb_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "iceberg_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "kafka_sink": ["--fewest=2000", "--most=2000", "--alternations=1", "--warm-up=0"],
    "coordinator": [
        *("--members=40", "--partitions=200", "--session-ms=2000", "--steady-seconds=2", "--deaths=1"),
        *("--small-members=3", "--small-partitions=6", "--alternations=1", "--warm-up=0"),
        "--kafka-heartbeat-ms=200",
        *("--simulated-members=40", "--simulated-partitions=200"),
    ],
    "tick": ["--partitions=200", "--lagging=20", "--alternations=1"],
    "exporter": ["--groups=2", "--partitions=100", "--alternations=1"],
    "start_up": ["--processes=1"],
    "heartbeat_under_load": ["--seconds=2", "--heartbeat-interval-ms=500", "--rows-a-job=1000000"],
}
"""Options of each benchmark, except `sink_memory`, whose cluster takes a minute to measure a few rows.

They run in this order; the last one stops the Spark session that they share.
"""
CASES = {
    "claim": ["claim 1 partition", "claim 50 partitions", "fresh process to first won claim"],
    "world_state": ["world state from 40,000 records"],
    "snapshot": ["fresh process to the world state after 160,000 records"],
    "batch": [
        "read and count",
        "read and count, connector tuned as ours",
        "read and write Parquet",
        "coordination in a batch of some ten seconds",
    ],
    "alternatives": [
        "400 messages, beside bare connector",
        "400 messages, beside Structured Streaming",
        "400 messages, beside Structured Streaming, ours effectively once",
        "400 messages, beside a consumer loop in Python",
    ],
    "growth": [
        "batch of 1 partitions",
        "batch of 8 partitions",
        "1 run(s) at once, 4 partitions each",
    ],
    "queued_runs": [
        "2 runs on 8 partitions: most claims of a run",
        "2 runs on 8 partitions: until a run has its claim, beside alone",
    ],
    "scale": [
        "claim 10 partitions, 200 runs at once",
        "heartbeats of 10 partitions, 200 runs at once",
        "a new reader, each record, 200 runs at once",
    ],
    "connect": ["batch of 1,000 records, from the start of the run to the commit"],
    "kafka_sink": ["2,000 rows"],
    "postgres_sink": ["2,000 rows"],
    "postgres_upsert": ["2,000 rows"],
    "delta_sink": ["2,000 rows"],
    "file_sink": ["2,000 rows"],
    "mariadb_sink": ["2,000 rows"],
    "iceberg_sink": ["2,000 rows"],
    "coordinator": [
        "40 members, 200 partitions: the coordinator's processor beside merely reading",
        "40 members, 200 partitions: its memory beside that without members",
        "40 members, 200 partitions: answers that came without a request",
        "40 members, 200 partitions: all worked on after a tenth died beside known to be dead",
        "3 members, 6 partitions, one joins: partitions stopped beside Kafka's eager rebalance",
        "3 members, 6 partitions, one joins: until all work again beside Kafka's eager rebalance",
        "3 members, 6 partitions, one joins: until all work again beside Kafka's cooperative rebalance",
        "3 members, 6 partitions, one joins: longest that a partition stood still beside Kafka's cooperative rebalance",
        "40 members, 200 partitions, virtual clock: all worked on after a tenth died beside known to be dead",
    ],
    "heartbeat_under_load": [
        "longest time between two heartbeats of a batch that loads all cores, beside the interval"
    ],
    "tick": [
        "stale-claim tick, 200 live claims",
        "stale-claim tick, 200 stale claims",
        "lag tick, 20 partitions",
        "topic tick, 20 partitions",
    ],
    "exporter": ["refresh: 2 groups, 200 partitions", "scrape: 2 groups, 200 partitions"],
    "start_up": [
        "import dagster, then marshal_dagster",
        "import dagster, then the names of a job with a sink",
        "import dagster, then every public name of marshal_dagster",
    ],
}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `python -m benchmarks`."""
    return started([sys.executable, "-m", "benchmarks", *arguments])


def started(command: Sequence[str], stderr: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a process in the top folder."""
    return subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE, stderr=stderr, text=True)


class Benchmarks:
    """One process that runs all benchmarks. Each prints its object when it has ended."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process, self._errors = process, errors
        self._found: dict[str, Any] = {}

    def result(self, name: str) -> dict[str, Any]:
        """Return the object of a benchmark; wait until it has ended."""
        printed = ""
        while name not in self._found:
            line = self._process.stdout.readline() if self._process.stdout else ""
            assert line, f"exit code {self._process.wait()}: {self._errors.read_text(encoding='utf-8')}"
            printed += line
            with suppress(json.JSONDecodeError):
                found = json.loads(printed)
                self._found[found["benchmark"]], printed = found, ""
        return self._found[name]  # type: ignore[no-any-return] # an object

    def exit_code(self) -> int:
        """Return the exit code of the process, after all benchmarks have ended."""
        self.result(list(SHORT)[-1])
        return self._process.wait(WITHIN_S)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benchmarks]:
    """Run all benchmarks, while the tests wait for their results."""
    commands = json.dumps([[name, "--json", *options] for name, options in SHORT.items()])
    errors = tmp_path_factory.mktemp("benchmarks") / "stderr"
    with (
        errors.open("w", encoding="utf-8") as file,
        started([sys.executable, "-u", "-m", "tests.real.benchmark_runner", commands], stderr=file) as process,
    ):
        yield Benchmarks(process, errors)
        process.terminate()


@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_measures_every_case(benchmarks: Benchmarks, name: str) -> None:
    """A benchmark prints one object of the specified form, with figures for each of its cases."""
    found = benchmarks.result(name)
    check_form(found)
    assert found["benchmark"] == name
    assert [case["name"] for case in found["cases"]] == CASES[name]
    assert all(case["ours"] > 0 for case in found["cases"])


def test_all_benchmarks_end_well(benchmarks: Benchmarks) -> None:
    """The process has stopped its services."""
    assert benchmarks.exit_code() == 0


def test_the_measured_log_is_the_one_requested(benchmarks: Benchmarks) -> None:
    """The log has the requested number of records and keys, and 0.5 % of the records are invalid."""
    log = benchmarks.result("world_state")["conditions"]["log"]
    assert log["keys"] == 1000
    assert log["invalid_records"] == pytest.approx(200, rel=0.3)
    assert log["refused_records"] < 100


def test_a_benchmark_that_is_stopped_stops_its_broker() -> None:
    """SIGTERM during the measurement leaves no broker running."""
    with start("claim", "--json", "--single-rounds=1000000") as process:
        try:
            broker = broker_of(process.pid)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not broker.is_running(), "the broker has ended")  # until it is reaped, it is a zombie


def broker_of(pid: int) -> psutil.Process:
    """Wait for the broker that the process `pid` starts."""

    def broker() -> psutil.Process | None:
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):  # other processes may end meanwhile
                if "kafka.Kafka" in child.cmdline():
                    return child
        return None

    return wait_until(broker, "a broker is started")
