"""The demo's deployment and a code location with assets, under `dagster dev`, with a separate Kafka."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from confluent_kafka import Producer

from demo.deployment import ROOT, running
from marshal_dagster._internal.ports import free_port
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S, wait_until

FLIGHTS, MAX_RECORDS, BATCHES = 3_000, 1_000, 3
ORDERS, ORDERS_PARTITIONS, ORDERS_COUNT = "orders", 2, 250
SETTINGS = {
    "MARSHAL_HEARTBEAT_INTERVAL_S": "5",
    "MARSHAL_MAX_RECORDS": str(MAX_RECORDS),
    "MARSHAL_MAX_BATCHES": str(BATCHES),
    "MARSHAL_SPARK_MASTER": "local[1]",
    "TEST_TOPIC": ORDERS,
}
WORKSPACE = """\
load_from:
  - python_file: {{relative_path: {root}/definitions.py, working_directory: {root}, location_name: marshal-dagster}}
  - python_file: {{relative_path: {root}/tests/ui/asset_location.py, working_directory: {root}, location_name: assets}}
"""


@dataclass(frozen=True, slots=True)
class Site:
    """The address of the pages, and the connection of their Kafka cluster."""

    port: int
    connection: KafkaConnection

    def at(self, path: str = "") -> str:
        """Return the address of a page."""
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def running_site(directory: Path) -> Iterator[Site]:
    """Serve both code locations during the block. There are orders and no flights yet."""
    with running(directory, SETTINGS) as deployment:
        _load_orders(deployment.connection)
        site = Site(free_port(), deployment.connection)
        workspace = directory / "workspace.yaml"
        workspace.write_text(WORKSPACE.format(root=ROOT))
        dagster = deployment.start("dagster", "dev", "-w", str(workspace), "-h", "127.0.0.1", "-p", str(site.port))
        try:
            log = directory / "dagster.log"
            wait_until(lambda: _answers(site), f"Dagster's webserver answers (see {log})", pause_s=0.1)
            yield site
        finally:
            deployment.stop()
            dagster.wait()


def _load_orders(connection: KafkaConnection) -> None:
    with Topics(connection) as topics:
        topics.create(ORDERS, ORDERS_PARTITIONS, 1)
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers, "enable.idempotence": True})
    for number in range(ORDERS_COUNT):
        producer.produce(ORDERS, f"order {number}", f"shop {number % 7}", partition=number % ORDERS_PARTITIONS)
    assert producer.flush(WITHIN_S) == 0


def _answers(site: Site) -> bool:
    try:
        with urlopen(site.at("/server_info"), timeout=WITHIN_S) as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
