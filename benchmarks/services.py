"""Brokers and databases for benchmarks: on free ports, in temporary folders that are removed at the end."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer

from marshal_dagster.devkafka import running_kafka
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

COORDINATION_PARTITIONS: Final = 8
LIKE_A_COORDINATION_TOPIC: Final = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
_FLUSH_WITHIN_S: Final = 120.0


@contextmanager
def broker() -> Iterator[KafkaConnection]:
    """Start one broker and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder, running_kafka(Path(folder)) as cluster:
        yield KafkaConnection(bootstrap_servers=cluster.bootstrap_servers, timeout_s=60)


@contextmanager
def postgres() -> Iterator[str]:
    """Start a PostgreSQL on a port of 127.0.0.1, yield its connection string, and stop it at the end."""
    from tests.outbox_faults.cluster import FaultyPostgres

    with tempfile.TemporaryDirectory(prefix="marshal-benchmark-", ignore_cleanup_errors=True) as folder:
        server = FaultyPostgres(Path(folder), links=0)
        server.start()
        try:
            yield server.dsn()
        finally:
            server.stop()


@contextmanager
def mariadb() -> Iterator[str]:
    """Start a MariaDB on a port of 127.0.0.1, yield its URL without a database, and stop it at the end."""
    from tests.real.mariadb_server import running_mariadb

    sizes = ("--innodb-buffer-pool-size=512M", "--innodb-log-file-size=512M")
    with (
        tempfile.TemporaryDirectory(prefix="marshal-benchmark-", ignore_cleanup_errors=True) as folder,
        running_mariadb(Path(folder), *sizes) as server,
    ):
        yield server


def create_coordination_topic(connection: KafkaConnection, name: str) -> None:
    """Create a topic with the settings and the number of partitions of a coordination topic."""
    with Topics(connection) as topics:
        topics.create(name, COORDINATION_PARTITIONS, 1, LIKE_A_COORDINATION_TOPIC)


def load(connection: KafkaConnection, topic: str, records: Iterable[tuple[int, bytes | None]]) -> int:
    """Write (partition, value) records as fast as possible, in order within a partition, and return their number.

    Raises `RuntimeError` if not all of them were written.
    """
    failed: list[str] = []

    def note(error: Any, _: object) -> None:  # noqa: ANN401 - the client library's error
        if error is not None:
            failed.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": connection.bootstrap_servers,
            "retries": 0,  # an idempotent producer would wait half a second for its id
            "request.timeout.ms": round(_FLUSH_WITHIN_S * 1_000),
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 200_000,
            "delivery.report.only.error": True,
            "log_level": 3,  # refusals of a cluster that has just started are warnings, and the client retries
        }
    )
    count = 0
    for partition, value in records:
        while True:
            try:
                producer.produce(topic, value, partition=partition, on_delivery=note)
                break
            except BufferError:
                producer.poll(0.05)
        count += 1
    unsent = producer.flush(_FLUSH_WITHIN_S)
    if unsent or failed:
        raise RuntimeError(
            f"of {count} records for {topic!r} {unsent} were not sent, {len(failed)} failed: {failed[:3]}"
        )
    return count
