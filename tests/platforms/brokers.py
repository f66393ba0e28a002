"""A Kafka broker of a version, from Maven coordinates; a Kafka before 3.3 gets a ZooKeeper from the same jars."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from marshal_dagster._internal import processes
from marshal_dagster._internal.jars import JarSet
from marshal_dagster._internal.java import find_java, java_environment
from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster._internal.ports import HOST, free_port
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.devkafka.readiness import brokers_known_to
from tests.conditions import wait_until

_FIRST_WITHOUT_ZOOKEEPER: Final = (3, 3)
_HEAP: Final = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_STOPPED_WITHIN_S: Final = 20.0
_CLUSTER_ID: Final = "bWFyc2hhbC1wbGF0Zm9ybQ"
_COMMON: Final = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "8",
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
}


@contextmanager
def running_broker(version: str, folder: Path) -> Iterator[str]:
    """Run a broker with its files in `folder`, and yield its bootstrap servers."""
    jars = _jars(version)
    with_zookeeper = tuple(map(int, version.split(".")[:2])) < _FIRST_WITHOUT_ZOOKEEPER
    port, other = free_port(), free_port()
    started: list[processes.ProcessMark] = []
    try:
        if with_zookeeper:
            started.append(_zookeeper(jars, folder, other))
            settings = {
                "broker.id": "1",
                "zookeeper.connect": f"{HOST}:{other}",
                "listeners": f"PLAINTEXT://{HOST}:{port}",
            }
        else:
            settings = {
                "process.roles": "broker,controller",
                "node.id": "1",
                "controller.quorum.voters": f"1@{HOST}:{other}",
                "controller.listener.names": "CONTROLLER",
                "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{other}",
                "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            }
        properties = folder / "server.properties"
        properties.write_text(render_properties({**_COMMON, "log.dirs": str(folder / "data"), **settings}))
        if not with_zookeeper:
            _format(jars, properties, folder)
        broker = processes.spawn(_java(jars, "kafka.Kafka", str(properties)), java_environment(), folder / "broker.log")
        started.append(broker)
        wait_until(lambda: _serves_or_ended(port, broker), f"Kafka {version} serves", 60, pause_s=0.2)
        assert processes.is_alive(broker), f"Kafka {version} ended: see {folder / 'broker.log'}"
        yield f"{HOST}:{port}"
    finally:
        for process in reversed(started):
            processes.stop([process], _STOPPED_WITHIN_S)


def _serves_or_ended(port: int, broker: processes.ProcessMark) -> bool:
    return bool(brokers_known_to(port)) or not processes.is_alive(broker)


def _zookeeper(jars: tuple[Path, ...], folder: Path, port: int) -> processes.ProcessMark:
    config = folder / "zookeeper.properties"
    config.write_text(
        render_properties(
            {
                "dataDir": str(folder / "zookeeper"),
                "clientPort": str(port),
                "clientPortAddress": HOST,
                "admin.enableServer": "false",
                "tickTime": "2000",
            }
        )
    )
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    started = processes.spawn(_java(jars, main, str(config)), java_environment(), folder / "zookeeper.log")
    wait_until(lambda: processes.listens(started, port), "ZooKeeper listens", 60, pause_s=0.2)
    return started


def _format(jars: tuple[Path, ...], properties: Path, folder: Path) -> None:
    command = _java(jars, "kafka.tools.StorageTool", "format", "--cluster-id", _CLUSTER_ID, "--config", str(properties))
    with (folder / "format.log").open("wb") as log:
        subprocess.run(command, env=java_environment(), stdout=log, stderr=log, check=True, timeout=60)


def _java(jars: tuple[Path, ...], main: str, *arguments: str) -> list[str]:
    return [str(find_java().executable), *_HEAP, "-cp", os.pathsep.join(map(str, jars)), main, *arguments]


def _jars(version: str) -> tuple[Path, ...]:
    jars = JarSet(
        title=f"Kafka {version}",
        megabytes=45,
        coordinates=(f"org.apache.kafka:kafka_2.13:{version}",),
        folder=cache_folder() / f"kafka-platform-{version}",
        required=frozenset({f"kafka_2.13-{version}.jar"}),
    )
    return jars.download(find_java(), print)
