"""`kafka`: start, show and stop a real Kafka on this machine, for development and tests."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import AsJson
from marshal_dagster.devkafka import BrokerStatus, KafkaCluster, KafkaStatus

app = command_group("Start, show and stop a real Kafka on this machine.")

Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        "-d",
        metavar="FOLDER",
        help="The cluster's directory. Default: MARSHAL_KAFKA_DIR, else one in the user's state folder.",
    ),
]


@command(
    app,
    "up",
    "Start a Kafka on this machine. If some of its brokers run already, the command starts the others. Kafka listens "
    "only on 127.0.0.1 and runs until `kafka down`. The first call downloads its jars.",
    "kafka up",
    "kafka up --brokers 3 --port 19092 --directory ~/kafka-3",
)
def up(
    *,
    brokers: Annotated[
        int | None,
        typer.Option(
            "--brokers", metavar="1|3", help="Number of brokers. Default: as many as the directory has, else 1."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            help="The first broker's port (default: 9092). Others take the next ports; 0 takes free ports.",
        ),
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Start the brokers that are not running, and show the cluster. Raises `ConfigurationError`, `DevKafkaError`."""
    found = KafkaCluster(directory, brokers=brokers, port=port, report=output.write_note).up()
    if as_json:
        output.write_json(_to_json(found))
        return
    output.show(
        f"Kafka is {'' if found.started else 'already '}up at {found.bootstrap_servers}, its data in "
        f"{output.clean(str(found.directory))}",
        f"export MARSHAL_BOOTSTRAP_SERVERS={found.bootstrap_servers}",
    )


@command(
    app,
    "down",
    "Stop the Kafka on this machine. It stops the brokers that `kafka up` started, and keeps their data unless --wipe "
    "is given.",
    "kafka down",
    "kafka down --wipe",
)
def down(
    *,
    wipe: Annotated[bool, typer.Option("--wipe", help="Delete the topics and all other data of the brokers.")] = False,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Stop the brokers, and with `wipe` delete their data. Raises `ConfigurationError`, `DevKafkaError`."""
    cluster = KafkaCluster(directory)
    before = cluster.status()
    after = cluster.down(wipe=wipe)
    if as_json:
        output.write_json(_to_json(after))
        return
    shown = output.clean(str(after.directory))
    if not before.brokers:
        output.show(f"There is no Kafka in {shown}")
        return
    was = "was stopped" if before.is_running else "was not running"
    output.show(f"Kafka in {shown} {was}; its data is {'deleted' if wipe else 'kept'}")


@command(
    app,
    "status",
    "Show each broker. It shows the address, the process and whether it answers. The exit code is 3 unless all answer.",
    "kafka status --json",
)
def status(*, directory: Directory = None, as_json: AsJson = False) -> ExitCode:
    """Show each broker; the exit code shows whether all of them answer. Raises `DevKafkaError`."""
    found = KafkaCluster(directory).status()
    shown = output.clean(str(found.directory))
    if as_json:
        output.write_json(_to_json(found))
    elif not found.brokers:
        start = shlex.join(["marshal-dagster", "kafka", "up", "--directory", str(found.directory)])
        output.show(f"There is no Kafka in {shown}; `{start}` starts one")
    else:
        output.show(f"Kafka in {shown}, cluster id {found.cluster_id}", _table(found))
    return ExitCode.OK if found.is_up else ExitCode.UNAVAILABLE


def _table(found: KafkaStatus) -> output.Table:
    columns = ("#broker", "address", "#pid", "state", "log")
    rows: list[list[str | output.Line]] = [
        [str(broker.broker_id), broker.address, output.number(broker.pid), _state(broker), str(broker.log)]
        for broker in found.brokers
    ]
    return output.Table(columns, rows)


def _state(broker: BrokerStatus) -> output.Line:
    if broker.ready:
        return output.styled("up", "green")
    return output.styled("does not answer", "yellow") if broker.pid is not None else output.styled("down", "red")


def _to_json(found: KafkaStatus) -> dict[str, Any]:
    return {
        "directory": str(found.directory),
        "cluster_id": found.cluster_id,
        "bootstrap_servers": found.bootstrap_servers,
        "up": found.is_up,
        "started": list(found.started),
        "brokers": [
            {
                "id": broker.broker_id,
                "address": broker.address,
                "port": broker.port,
                "pid": broker.pid,
                "ready": broker.ready,
                "log": str(broker.log),
            }
            for broker in found.brokers
        ],
    }
