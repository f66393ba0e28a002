"""The benchmarks in their short form."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from marshal_dagster.spark.connector import fetch_connector
from marshal_dagster.spark.packages import delta_package
from tests.conditions import WITHIN_S, wait_until
from tests.fast.test_benchmarks import check_form

TOP = Path(__file__).resolve().parents[2]
SHORT = {
    "claim": ["--single-rounds=5", "--many-rounds=2", "--partitions=50", "--process-rounds=1", "--log-records=3"],
    "world_state": ["--records=40000", "--keys=1000", "--alternations=1"],
    "snapshot": ["--records=160000", "--keys=500", "--alternations=1"],
    "batch": ["--records=4000", "--alternations=1", "--warm-up=0", "--long-batches=1"],
    "alternatives": ["--fewest=400", "--most=400", "--alternations=1", "--warm-up=0"],
    "growth": ["--partitions=8", "--runs=2", "--alternations=1"],
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
    "heartbeat_under_load": ["--seconds=2", "--heartbeat-interval-ms=500", "--rows-a-job=10000000"],
    "tick": ["--partitions=200", "--lagging=20", "--alternations=1"],
    "start_up": ["--processes=1"],
}
TOGETHER = [
    (
        "postgres_sink",
        "postgres_upsert",
        "mariadb_sink",
        "kafka_sink",
        "file_sink",
        "delta_sink",
        "batch",
        "alternatives",
        "heartbeat_under_load",
    ),
    (
        "iceberg_sink",
        "tick",
        "claim",
        "world_state",
        "snapshot",
        "scale",
        "start_up",
        "connect",
        "growth",
        "coordinator",
    ),
]
"""Benchmarks that run in one process, on one broker, with the byte code of the interpreters that they start.

Those with a Spark session of their own process share its JVM, which has the jars of Delta Lake from its start.
"""
ONE_AFTER_THE_OTHER = """
import json, signal, sys
from contextlib import contextmanager, nullcontext

from confluent_kafka.admin import AdminClient

from benchmarks import interpreters, services
from benchmarks.__main__ import main
from marshal_dagster.coordination import rationalizer_cache
from marshal_dagster.kafka.admin_client import Topics

@contextmanager
def emptied():
    rationalizer_cache._places.clear()  # as in a new process
    with Topics(connection) as topics:
        for name in AdminClient(connection.librdkafka()).list_topics(timeout=60).topics:
            if name not in INTERNAL:
                topics.delete(name)
    yield connection

INTERNAL = ("__consumer_offsets", "__transaction_state")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
with services.broker() as connection, interpreters.environment() as environment:
    services.broker = emptied
    interpreters.environment = lambda: nullcontext(environment)
    for arguments in json.loads(sys.argv[1]):
        main(arguments)
"""
CASES = {
    "claim": ["claim 1 partition", "claim 50 partitions", "fresh process to first won claim"],
    "world_state": ["world state from 40,000 records"],
    "snapshot": ["fresh process to the world state behind 160,000 records"],
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
        "2 run(s) at once, 4 partitions each",
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
        "40 members, 200 partitions: answers that came beside those asked for",
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
    "start_up": [
        "import dagster, then marshal_dagster",
        "import dagster, then every public name of marshal_dagster",
    ],
}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `python -m benchmarks`."""
    return started([sys.executable, "-m", "benchmarks", *arguments])


def started(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process in the top folder."""
    jars = ":".join(map(str, fetch_connector(delta_package())))
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": f"--driver-class-path {jars} pyspark-shell"}
    return subprocess.Popen(
        command, cwd=TOP, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@cache
def outcome_of(names: Sequence[str]) -> tuple[int, str, str]:
    """Run benchmarks in one process. Return its exit code, what it printed, and its stderr."""
    commands = json.dumps([[name, "--json", *SHORT[name]] for name in names])
    with started([sys.executable, "-c", ONE_AFTER_THE_OTHER, commands]) as process:
        try:
            printed, errors = process.communicate(timeout=WITHIN_S * len(names))
        finally:
            process.terminate()
    return process.returncode, printed, errors


def results_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the objects that benchmarks printed which ran in one process, by name."""
    code, printed, errors = outcome_of(names)
    assert code == 0, errors
    return dict(zip(names, json.loads("[" + printed.replace("}\n{", "},{") + "]"), strict=True))


@pytest.mark.parametrize(("name", "together"), [(name, together) for together in TOGETHER for name in together])
def test_a_benchmark_measures_every_case(name: str, together: Sequence[str]) -> None:
    """A benchmark prints one object of the specified form, with figures for each of its cases."""
    found = results_of(together)[name]
    check_form(found)
    assert found["benchmark"] == name
    assert [case["name"] for case in found["cases"]] == CASES[name]
    assert all(case["ours"] > 0 for case in found["cases"])


def test_each_benchmark_is_run() -> None:
    """The benchmarks that run together are all of those with a short form."""
    assert sorted(name for together in TOGETHER for name in together) == sorted(SHORT)


def test_the_measured_log_is_the_one_asked_for() -> None:
    """The log has the requested number of records and keys, and 0.5 % of the records are invalid."""
    log = results_of(TOGETHER[1])["world_state"]["conditions"]["log"]
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
    assert not broker.is_running()


def broker_of(pid: int) -> psutil.Process:
    """Wait for the broker that the process `pid` starts."""

    def broker() -> psutil.Process | None:
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):  # other processes may end meanwhile
                if "kafka.Kafka" in child.cmdline():
                    return child
        return None

    return wait_until(broker, "a broker is started")
