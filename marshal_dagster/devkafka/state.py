"""The state of a local cluster between commands, stored as `cluster.json` in its directory."""

import base64
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marshal_dagster._internal.processes import ProcessMark
from marshal_dagster.devkafka.errors import ClusterMismatchError
from marshal_dagster.devkafka.properties import Node

STATE_FILE = "cluster.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster of a directory: its id, its brokers, and the last process started for each broker id."""

    cluster_id: str
    nodes: tuple[Node, ...]
    marks: Mapping[int, ProcessMark]

    def node(self, broker_id: int) -> Node:
        """Return the broker with that id.

        Raises:
            ClusterMismatchError: The cluster has no such broker.
        """
        nodes = {node.broker_id: node for node in self.nodes}
        if broker_id not in nodes:
            raise ClusterMismatchError(f"there is no broker {broker_id}; this cluster has {', '.join(map(str, nodes))}")
        return nodes[broker_id]


def new_uuid() -> str:
    """Return an id of a cluster or a data folder in Kafka's form.

    These are 16 random bytes in URL-safe base64, without a leading dash.
    """
    while True:
        made = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        if not made.startswith("-"):
            return made


def read_state(directory: Path) -> ClusterState | None:
    """Return the state that is stored in `directory`; None if it holds no cluster.

    Raises:
        ClusterMismatchError: The `cluster.json` cannot be read, or has another version.
    """
    path = directory / STATE_FILE
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterMismatchError(
            f"{path} cannot be read as the state of a cluster ({error}); "
            f"move {directory} away, or use another directory"
        ) from error


def write_state(directory: Path, state: ClusterState) -> None:
    """Replace the state that is stored in `directory`, atomically."""
    document = {
        "version": _VERSION,
        "cluster_id": state.cluster_id,
        "brokers": [_render(node, state.marks.get(node.broker_id)) for node in state.nodes],
    }
    path = directory / STATE_FILE
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1), encoding="utf-8")
    fresh.replace(path)


def _render(node: Node, mark: ProcessMark | None) -> dict[str, object]:
    return {
        "id": node.broker_id,
        "port": node.port,
        "controller_port": node.controller_port,
        "pid": mark.pid if mark else None,
        "birth": mark.birth if mark else None,
    }


def _parse(document: dict[str, Any]) -> ClusterState:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}, not {_VERSION}")
    brokers = document["brokers"]
    nodes = tuple(Node(int(broker["id"]), int(broker["port"]), int(broker["controller_port"])) for broker in brokers)
    marks = {
        int(broker["id"]): ProcessMark(int(broker["pid"]), str(broker["birth"]))
        for broker in brokers
        if broker["pid"] is not None
    }
    return ClusterState(str(document["cluster_id"]), nodes, marks)
