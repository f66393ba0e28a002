"""The files that a broker reads at its start: `server.properties` and the log4j2 configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster._internal.ports import HOST
from marshal_dagster.errors import ConfigurationError

_OWNED = frozenset(
    {
        "advertised.listeners",
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "controller.quorum.voters",
        "listener.security.protocol.map",
        "listeners",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
        "node.id",
        "process.roles",
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """A broker that is also a controller: its id and its two ports."""

    broker_id: int
    port: int
    controller_port: int


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise an error if `settings` contain a setting that `KafkaCluster` itself chooses.

    Raises:
        ConfigurationError: A setting is a port, folder or role, or has a line break.
    """
    for name in settings.keys() & _OWNED:
        raise ConfigurationError(f"broker setting {name!r} is chosen by the cluster itself; leave it out")
    render_properties(settings)


def server_properties(node: Node, nodes: Sequence[Node], data: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of `node` in a cluster of `nodes`; `settings` override the defaults."""
    replicas = str(len(nodes))
    in_sync = "2" if len(nodes) > 1 else "1"
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.broker_id),
        "controller.quorum.voters": ",".join(f"{voter.broker_id}@{HOST}:{voter.controller_port}" for voter in nodes),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{HOST}:{node.port},CONTROLLER://{HOST}:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{node.port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "default.replication.factor": replicas,
        "group.initial.rebalance.delay.ms": "0",
        "offsets.topic.replication.factor": replicas,
        "offsets.topic.num.partitions": "8",
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "transaction.state.log.num.partitions": "8",
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": "8",
        # A killed broker is noticed, and can register again, once its session has timed out.
        "broker.heartbeat.interval.ms": "500",
        "broker.session.timeout.ms": "4000",
        # By default the controller writes a record every 500 ms, about 30 % of the processor time of an idle broker.
        "metadata.max.idle.interval.ms": "0",
        # The default of 128 MiB is allocated from the heap of 512 MiB even if no topic is compacted.
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        **settings,
    }


def logging_configuration(log: Path) -> str:
    """Return a log4j2 configuration that writes at most 10 MB to `log` and keeps one older file of that size."""
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="ERROR" shutdownHook="disable">
  <Appenders>
    <RollingFile name="file" fileName={quoteattr(str(log))} filePattern={quoteattr(str(log) + ".%i")}>
      <PatternLayout pattern="%d{{ISO8601}} %p %c{{1}}: %m%n"/>
      <SizeBasedTriggeringPolicy size="10 MB"/>
      <DefaultRolloverStrategy max="1"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="file"/></Root>
    <Logger name="org.apache.kafka.common.config.AbstractConfig" level="WARN"/>
  </Loggers>
</Configuration>
"""
