"""Deployments of `examples/coordinator` start and stop while coordinators are killed. The output must be exact."""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from demo.deployment import kill_tree
from marshal_dagster.cli.main import run
from marshal_dagster.coordinator.group_view import GroupAssignments, read_group
from marshal_dagster.coordinator.messages import StartFetcher, parse_coordinator_message, places_of
from marshal_dagster.coordinator.transport import CoordinatorTopics, Reader, partition_of
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import FileSink
from tests.conditions import WITHIN_S, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS, GROUP, TOPIC = 24, "parcels", "parcels"
FIRST, LATER = ("east", "north"), ("south", "centre")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Depot:
    """A cluster, a folder for the output, and the processes that work there."""

    connection: KafkaConnection
    folder: Path
    producer: Producer
    written: Counter[int] = field(default_factory=Counter)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    def report(self, what: str) -> None:
        """Log an event with its time."""
        logger.info("%5.1f s  %s", time.monotonic() - self.began_s, what)

    def start(self, name: str, *command: str) -> None:
        """Start a process. Its output goes to a file named after it."""
        environment = {
            **os.environ,
            "MARSHAL_BOOTSTRAP_SERVERS": self.connection.bootstrap_servers,
            "MARSHAL_MEMBER": name,
            "PARCELS_FOLDER": str(self.folder / "out"),
            "PARCELS_SPARK_MASTER": "local[1]",
        }
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def start_member(self, name: str) -> None:
        """Start a deployment."""
        (self.folder / name).mkdir()
        self.start(name, "-m", "tests.real.coordinated_deployment", str(self.folder / name))

    def start_coordinator(self, name: str) -> None:
        """Start a coordinator."""
        self.start(name, "-m", "marshal_dagster.cli", "coordinator", "run")

    def kill(self, name: str) -> None:
        """Kill a process and its children."""
        process = self.processes.pop(name)
        kill_tree(process.pid)
        process.wait(WITHIN_S)

    def stop(self) -> None:
        """End the remaining processes."""
        for process in self.processes.values():
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait(WITHIN_S)

    def write(self, count: int) -> None:
        """Write messages, round-robin over the partitions."""
        for number in range(count):
            self.producer.produce(TOPIC, f"parcel {number}", partition=number % PARTITIONS)
            self.written[number % PARTITIONS] += 1
        assert self.producer.flush(WITHIN_S) == 0

    def view(self) -> GroupAssignments:
        """Read the assignments of the group."""
        return read_group(self.connection, CoordinatorTopics(), GROUP)

    def shares(self) -> dict[str, int]:
        """Return how many partitions each member has."""
        return {name: len(share.places) for name, share in sorted(self.view().shares.items())}

    def wait_until_even(self, *members: str) -> None:
        """Write messages every other second until exactly these members share all partitions evenly."""

        def is_even() -> bool:
            self.write(PARTITIONS)
            shares = self.shares()
            counts = shares.values()
            return set(shares) == set(members) and sum(counts) == PARTITIONS and max(counts) - min(counts) <= 1

        wait_until(is_even, f"{members} share all partitions evenly", pause_s=2.0)
        self.report(", ".join(f"{name} {count}" for name, count in self.shares().items()))

    def taken(self) -> int:
        """Return the number of messages before the group's offsets."""
        with Topics(self.connection) as topics:
            return sum(topics.group_offsets(GROUP, TOPIC).values())


@pytest.fixture
def depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Depot]:
    """A cluster with the data topic and the coordinator's topics, and no process yet."""
    with running_kafka(tmp_path / "kafka") as cluster:
        connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)
        monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", cluster.bootstrap_servers)
        assert run(["topic", "create"]) == 0
        assert run(["coordinator", "init"]) == 0
        with Topics(connection) as topics:
            topics.create(TOPIC, PARTITIONS, 1)
        made = Depot(connection, tmp_path, Producer({"bootstrap.servers": cluster.bootstrap_servers}))
        yield made
        made.stop()


def history(depot: Depot) -> list[str]:
    """Return the assignments of each generation as lines."""
    topics = CoordinatorTopics()
    number = partition_of(GROUP, topics.partitions(depot.connection))
    reader = Reader(depot.connection, topics.coordinator_messages)
    reader.follow({number: 0})
    shares: dict[str, frozenset[tuple[str, int]]] = {}
    by_generation: dict[int, list[str]] = {}
    quiet = 0
    while quiet < 20:
        came = list(reader.read(0.1))
        quiet = 0 if came else quiet + 1
        for record in came:
            order = parse_coordinator_message(record.value)
            if isinstance(order, StartFetcher) and order.group == GROUP:
                before, now = shares.get(order.member, frozenset()), places_of(order.places)
                gained, lost = len(now - before), len(before - now)
                shares[order.member] = now
                reported = f"{order.member} {len(now)} (+{gained} -{lost})"
                by_generation.setdefault(order.generation, []).append(reported)
    reader.close()
    return [f"generation {number}: {', '.join(each)}" for number, each in sorted(by_generation.items())]


def test_deployments_come_and_go_and_coordinators_are_killed(depot: Depot, spark: "SparkSession") -> None:
    """Two deployments, then four, then two others share 24 partitions. Each message is in the output once."""
    depot.start_coordinator("coordinator-1")
    depot.start_coordinator("coordinator-2")
    for name in FIRST:
        depot.start_member(name)
    depot.wait_until_even(*FIRST)
    for name in LATER:
        depot.start_member(name)
    depot.kill("coordinator-1")
    depot.report("killed a coordinator; two deployments are starting")
    depot.wait_until_even(*FIRST, *LATER)

    depot.processes["east"].terminate()
    depot.kill("north")
    depot.start_coordinator("coordinator-3")
    depot.kill("coordinator-2")
    depot.report("terminated a deployment, killed another one, and the other coordinator")
    depot.wait_until_even(*LATER)
    assert depot.processes.pop("east").wait(WITHIN_S) == 0

    depot.write(PARTITIONS)
    wait_until(lambda: depot.taken() == depot.written.total(), "all messages are committed")
    depot.report(f"{depot.written.total()} messages are committed")
    found = FileSink(depot.folder / "out").read(spark).select("partition", "offset").collect()
    wanted = [(number, offset) for number, count in depot.written.items() for offset in range(count)]
    assert sorted((row.partition, row.offset) for row in found) == sorted(wanted)
    for line in history(depot):
        depot.report(line)
