"""A small batch, from the start of its run to its commit: a warm Connect server compared with a fresh JVM."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks import bare, interpreters, run_batch, services
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from benchmarks.machine import TOP
from benchmarks.run_batch import Orders
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.spark.connect_server import ConnectServer

COORDINATION_TOPIC: Final = "__marshal"
TOPIC: Final = "orders"
SETTINGS: Final = {"spark.master": "local[2]"}
TARGET: Final = 1 / 3
_EXIT_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: records of a batch and their bytes, partitions, rounds, and warm-up rounds that do not count."""

    records: int = 1_000
    record_bytes: int = 200
    partitions: int = 4
    alternations: int = 5
    warm_up: int = 2


def run(sizes: Sizes) -> Measured:
    """Measure both. Each run is a process with a group of its own."""
    with services.broker() as connection, tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        _load(connection, sizes)
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        home = ConnectServer(Path(folder, "connect"))
        try:
            server = home.start(SETTINGS)
            with interpreters.environment() as environment:
                runs = _Runs(connection, sizes, environment)
                ours, beside = alternate(
                    sizes.alternations,
                    lambda: runs.seconds(url=server.url, token=server.token),
                    lambda: runs.seconds(settings=SETTINGS),
                    warm_up=sizes.warm_up,
                )
        finally:
            home.stop()
    name = f"batch of {sizes.records:,} records, from the start of the run to the commit"
    return Measured([Case(name, ours, beside, "s", Goal.RATIO_AT_MOST, TARGET)], {"spark_master": "local[2]"})


class _Runs:
    """Runs of one batch each."""

    def __init__(self, connection: KafkaConnection, sizes: Sizes, environment: Mapping[str, str]) -> None:
        self._connection, self._sizes, self._environment = connection, sizes, environment
        self._groups = count()

    def seconds(
        self, *, url: str | None = None, token: str | None = None, settings: Mapping[str, str] | None = None
    ) -> float:
        """Do one run, and return the seconds from the start of its interpreter to its commit."""
        orders = Orders(
            servers=self._connection.bootstrap_servers,
            coordination_topic=COORDINATION_TOPIC,
            topic=TOPIC,
            group=f"benchmark-{next(self._groups)}",
            records=self._sizes.records,
            url=url,
            token=token,
            settings=dict(settings or {}),
        )
        began_s = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", run_batch.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=TOP,
            env=self._environment,
        ) as process:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process has no pipes")
            process.stdin.write(orders.model_dump_json())
            process.stdin.close()
            said = process.stdout.readline()
            took_s = time.perf_counter() - began_s
            code = process.wait(_EXIT_WITHIN_S)
        if said.strip() != bare.DONE or code:
            raise RuntimeError(
                f"a run {'on the server' if url else 'with a JVM'} exited with code {code}, printed {said!r}"
            )
        return took_s


def _load(connection: KafkaConnection, sizes: Sizes) -> None:
    with Topics(connection) as topics:
        topics.create(TOPIC, sizes.partitions, 1)
    text = (f"order {number}".encode().ljust(sizes.record_bytes) for number in range(sizes.records))
    services.load(connection, TOPIC, ((number % sizes.partitions, value) for number, value in enumerate(text)))


BENCHMARK: Final = Benchmark(
    "connect",
    "the run of a small batch on a warm Spark Connect server, compared with one that starts a JVM",
    Sizes(),
    run,
)
