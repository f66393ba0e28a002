"""Start the Dagster UI for this deployment, and a Kafka cluster: `python -m demo.dev [PORT]`.

Kafka's data and Dagster's home stay in `build/dev` between sessions. If `MARSHAL_BOOTSTRAP_SERVERS` is set, it uses
that cluster and starts no Kafka. Ctrl-C stops all that it has started.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

from rich.console import Console

from demo import flights
from demo.deployment import BUILD, Deployment
from marshal_dagster.devkafka import KafkaCluster
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

DIRECTORY: Final = BUILD / "dev"
DEFAULT_PORT: Final = "3000"
SETTINGS: Final = {"MARSHAL_HEARTBEAT_INTERVAL_S": "5", "MARSHAL_MAX_RECORDS": "20000", "MARSHAL_MAX_BATCHES": "2"}

console = Console(soft_wrap=True)


@contextlib.contextmanager
def kafka() -> Iterator[KafkaConnection]:
    """Yield a connection to the cluster in the environment, or to a new local one that runs during the block."""
    if os.environ.get("MARSHAL_BOOTSTRAP_SERVERS"):
        yield KafkaConnection.from_environment()
        return
    cluster = KafkaCluster(DIRECTORY / "kafka", port=0)
    console.print("starting Kafka (the first start downloads its jars)")
    cluster.up()
    try:
        yield KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)
    finally:
        cluster.down()


def main() -> int:
    """Serve until Ctrl-C."""
    port = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_PORT
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with kafka() as connection:
            serve(connection, port)
    except KeyboardInterrupt:
        console.print("stopped")
    except MarshalError as error:
        console.print(f"[red]{error}[/]")
        return 1
    return 0


def serve(connection: KafkaConnection, port: str) -> None:
    """Run Dagster until it exits or this process is interrupted."""
    deployment = Deployment(DIRECTORY, connection, SETTINGS)
    deployment.prepare()
    with Topics(connection) as topics:
        ends = topics.offsets(flights.TOPIC, range(flights.PARTITIONS)).values()
    if not any(at.end for at in ends):
        console.print(f"loading the flights into topic {flights.TOPIC!r}")
        flights.load(connection, flights.data_set())
    dagster = deployment.start("dagster", "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", port)
    try:
        console.print(f"Dagster: [bold]http://127.0.0.1:{port}[/]   Kafka: {connection.bootstrap_servers}")
        console.print(f"The output of Dagster is in {DIRECTORY / 'dagster.log'}. Ctrl-C stops everything.")
        code = dagster.wait()
        console.print(f"[red]Dagster exited with code {code}: see {DIRECTORY / 'dagster.log'}[/]")
    finally:
        deployment.stop()


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
