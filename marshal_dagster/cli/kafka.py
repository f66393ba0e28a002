"""`kafka up|down|status`: the Kafka for one machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.devkafka import BrokerStatus, KafkaCluster, KafkaStatus


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What is to be up; None: as the directory holds it, else one broker on port 9092."""

    directory: Path | None = None
    brokers: int | None = None
    port: int | None = None
    as_json: bool = False


def up(request: UpRequest) -> None:
    """Start the brokers that do not run, and show the cluster. Raises `ConfigurationError`, `DevKafkaError`."""
    cluster = KafkaCluster(request.directory, brokers=request.brokers, port=request.port, report=output.write_note)
    status = cluster.up()
    if request.as_json:
        output.write_json(_to_json(status))
        return
    was = "" if status.started else "already "
    output.show(
        f"Kafka is {was}up at {status.bootstrap_servers}, its data in {output.clean(str(status.directory))}",
        f"export MARSHAL_BOOTSTRAP_SERVERS={status.bootstrap_servers}",
    )


def down(directory: Path | None, *, wipe: bool, as_json: bool) -> None:
    """Stop the brokers, and with `wipe` delete their data. Raises `ConfigurationError`, `DevKafkaError`."""
    cluster = KafkaCluster(directory)
    before = cluster.status()
    after = cluster.down(wipe=wipe)
    if as_json:
        output.write_json(_to_json(after))
        return
    place = output.clean(str(after.directory))
    if not before.brokers:
        output.show(f"There is no Kafka in {place}")
        return
    what = "was stopped" if before.is_running else "was not running"
    output.show(f"Kafka in {place} {what}; its data is {'deleted' if wipe else 'kept'}")


def status(directory: Path | None, *, as_json: bool) -> ExitCode:
    """Show each broker as it is now; the exit code says whether all of them answer. Raises `DevKafkaError`."""
    found = KafkaCluster(directory).status()
    if as_json:
        output.write_json(_to_json(found))
    elif not found.brokers:
        output.show(f"There is no Kafka in {output.clean(str(found.directory))}; `marshal-dagster kafka up` starts one")
    else:
        output.show(f"Kafka in {output.clean(str(found.directory))}, cluster id {found.cluster_id}", _table(found))
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
