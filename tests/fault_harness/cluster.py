"""Three brokers with one listener for each link of the proxy, and their faults."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its hints do not export what it offers
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from marshal_dagster._internal.ports import HOST, free_port
from marshal_dagster.devkafka import KafkaCluster
from marshal_dagster.devkafka.errors import BrokerFailedError
from marshal_dagster.devkafka.launch import BrokerFolder, Launcher
from marshal_dagster.devkafka.properties import Node
from tests.fault_harness.proxy import Proxy

BROKERS = (1, 2, 3)
ANSWER_WITHIN_S = 20.0
UP_WITHIN_S = 180.0
"""Enough time on a busy machine."""
SETTINGS = {
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "2000",
    "group.min.session.timeout.ms": "2000",
    "log.initial.task.delay.ms": "300",
    "log.retention.check.interval.ms": "300",
    "log.segment.delete.delay.ms": "500",
    "num.network.threads": "1",
}
LOG_SETTINGS = {
    "message.timestamp.type": "LogAppendTime",
    "retention.ms": "-1",
    "segment.ms": "604800000",
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
}
"""Settings of a coordination topic."""
DATA_SETTINGS = {"min.insync.replicas": "2", "retention.ms": "-1", "segment.ms": "60000"}
"""Settings of a data topic."""


@dataclass(frozen=True, slots=True)
class ManyListeners(Launcher):
    """Starts brokers with one more listener for each link; it advertises the port of the link."""

    inner: Sequence[Mapping[int, int]] = ()
    outer: Sequence[Mapping[int, int]] = field(default=())

    def prepare(self, folder: BrokerFolder, node: Node, nodes: Sequence[Node], cluster_id: str) -> None:
        """Write the broker's files."""
        plain = f"PLAINTEXT://{HOST}:{node.port}"
        names = [f"LINK{number}" for number in range(len(self.inner))]
        broker = node.broker_id
        listeners = [f"{name}://{HOST}:{ports[broker]}" for name, ports in zip(names, self.inner, strict=True)]
        advertised = [f"{name}://{HOST}:{ports[broker]}" for name, ports in zip(names, self.outer, strict=True)]
        settings = {
            "listeners": ",".join([plain, f"CONTROLLER://{HOST}:{node.controller_port}", *listeners]),
            "advertised.listeners": ",".join([plain, *advertised]),
            "listener.security.protocol.map": ",".join(
                f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *names)
            ),
            "inter.broker.listener.name": "PLAINTEXT",
        }
        own = replace(self, settings={**(self.settings or {}), **settings})
        Launcher.prepare(own, folder, node, nodes, cluster_id)


class FaultyKafka(KafkaCluster):
    """Three brokers that members reach directly or through links of a proxy."""

    def __init__(self, directory: Path, links: int) -> None:
        """Name the cluster and its `links` links."""
        super().__init__(directory, brokers=3, port=0, settings=SETTINGS, heap_mb=320)
        self._reserved = [_reserved() for _ in range(links * len(BROKERS))]
        ports = iter([each.getsockname()[1] for each in self._reserved])
        self._inner = [{broker: next(ports) for broker in BROKERS} for _ in range(links)]
        self.proxy = Proxy(self._inner)
        self._admin: AdminClient | None = None
        self._kills_begun: list[int] = []
        self._kills_over: list[int] = []

    def servers(self, link: int | None) -> str:
        """Return the bootstrap servers: those of a link, or the brokers' own."""
        if link is None:
            return self.bootstrap_servers
        return ",".join(f"{HOST}:{port}" for port in self.proxy.links[link].ports.values())

    def leader(self, topic: str, partition: int) -> int:
        """Return the broker that leads a partition."""
        metadata = self.admin().list_topics(topic, timeout=ANSWER_WITHIN_S)
        return int(metadata.topics[topic].partitions[partition].leader)

    def suspend(self, broker: int) -> None:
        """Stop a broker's process with SIGSTOP."""
        os.kill(self._pid(broker), signal.SIGSTOP)

    def resume(self, broker: int) -> None:
        """Let a broker's process continue."""
        with suppress(ProcessLookupError):
            os.kill(self._pid(broker), signal.SIGCONT)

    def kill(self, broker_id: int) -> None:
        """Kill one broker with SIGKILL, even if a repair is starting it now."""
        self._kills_begun.append(broker_id)
        super().kill(broker_id)
        self._kills_over.append(broker_id)

    def repair(self) -> None:
        """Start the brokers that do not run, until all know each other; start over if one is killed meanwhile."""
        while True:
            over = len(self._kills_over)
            for broker in BROKERS:
                self.resume(broker)
            try:
                self.up(timeout_s=UP_WITHIN_S)
            except BrokerFailedError:
                if len(self._kills_begun) == over:
                    raise
            else:
                return

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Set these settings of a topic."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        for done in self.admin().incremental_alter_configs([resource]).values():
            done.result(ANSWER_WITHIN_S)

    def admin(self) -> AdminClient:
        """Return the one admin client, because the responses of a client without a reference are lost."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        return self._admin

    def _pid(self, broker: int) -> int:
        return self._existing().marks[broker].pid

    def _launcher(self) -> Launcher:
        base = super()._launcher()
        for each in self._reserved:
            each.close()
        self._reserved.clear()
        outer = [link.ports for link in self.proxy.links]
        return ManyListeners(
            base.java,
            base.jars,
            base.heap_mb,
            base.settings,
            base.archive_flag,
            inner=tuple(self._inner),
            outer=tuple(outer),
        )


def _reserved() -> socket.socket:
    """Bind a free port, so that no other process gets it before the brokers do."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, free_port()))
    reserved.listen(1)
    return reserved


@contextmanager
def faulty_kafka(directory: Path, links: int) -> Iterator[FaultyKafka]:
    """Start a cluster, and delete it afterwards."""
    cluster = FaultyKafka(directory, links)
    cluster.proxy.start()
    try:
        cluster.up(timeout_s=UP_WITHIN_S)
        yield cluster
    finally:
        with suppress(Exception):
            for broker in BROKERS:
                cluster.resume(broker)
        cluster.down(wipe=True)
        cluster.proxy.stop()
