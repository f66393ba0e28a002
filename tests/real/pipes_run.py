"""A run whose script processes a batch through Pipes; also a process of its own, which tests kill.

`python -m tests.real.pipes_run JSON` processes one batch by the settings in JSON. With `pause_at` "outcome" it waits
after the script's outcome.
"""

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.pipes import run_with_pipes
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.sinks import RemoteSink
from tests.real.isolated_script import IsolatedScript, PlainClient

GROUP = "pipes"


@dataclass(frozen=True)
class Run:
    """One run: where it claims, and what its script does."""

    bootstrap_servers: str
    coordination_topic: str
    topic: str
    folder: str
    """The folder that the script may write to; it has the output and the files of its steps."""
    script: str
    """The script's path."""
    heartbeat_interval_ms: int = 60_000
    pause_at: str = ""
    """The step at which the script waits, or "outcome" for the run itself."""
    log_name: str = "script.log"
    """The name of the script's log."""
    mode: DeliveryMode = DeliveryMode.EFFECTIVELY_ONCE
    others_are_dead: bool = False
    """Whether the run takes the claims of earlier runs at once."""

    @property
    def steps(self) -> Path:
        """The folder with a file for each step that the script has reached."""
        return Path(self.folder, "steps")

    @property
    def output(self) -> Path:
        """The file of the sink."""
        return Path(self.folder, "orders.db")

    def client(self) -> PlainClient:
        """Return a client that starts the script."""
        self.steps.mkdir(parents=True, exist_ok=True)
        variables = {"STEPS": str(self.steps), "PAUSE_AT": self.pause_at}
        script, folder = Path(self.script), Path(self.folder)
        return PlainClient(IsolatedScript(script, folder, self.bootstrap_servers, variables, self.log_name))

    @property
    def log(self) -> Path:
        """The script's log."""
        return self.client().script.log

    def process(self, client: Any) -> ClaimedBatch:  # noqa: ANN401 - a client of Pipes
        """Claim a batch, and process it with the script."""
        with BatchSession.open(
            KafkaConnection(bootstrap_servers=self.bootstrap_servers),
            GROUP,
            settings=GroupSettings(self.heartbeat_interval_ms, RuleSet.NATIVE, DeliveryMode(self.mode)),
            coordination_topic=self.coordination_topic,
            is_dead=(lambda _: True) if self.others_are_dead else assume_alive,
        ) as session:
            request = BatchRequest(topic=self.topic, max_attempts=100)
            sink = RemoteSink(str(self.output)) if self.mode == DeliveryMode.EFFECTIVELY_ONCE else None
            with session.claimed_batch(request, sink) as batch:
                run_with_pipes(cast("Any", SimpleNamespace(log=MagicMock())), batch, client)
        return batch

    def position(self) -> int | None:
        """Return the group's position in partition 0."""
        connection = KafkaConnection(bootstrap_servers=self.bootstrap_servers)
        with closing(KafkaLog(connection, self.coordination_topic, self.heartbeat_interval_ms)) as log:
            world = Rationalizer(log, topics=[self.topic]).catch_up()
        return world.snapshot_key(GROUP, self.topic, 0).offset


class WaitingClient(PlainClient):
    """A client that waits with the script's outcome, until its run is killed."""

    def run(self, *, context: object, extras: Any) -> Any:  # noqa: ANN401 - as `PlainClient`
        """Run the script, and wait."""
        super().run(context=context, extras=extras)
        (Path(str(self.script.output)) / "steps" / "outcome").touch()
        time.sleep(600)


def main() -> None:
    """Process one batch by the settings in the argument."""
    run = Run(**json.loads(sys.argv[1]))
    client = run.client()
    if run.pause_at == "outcome":
        client = WaitingClient(client.script)
    run.process(client)


def arguments(run: Run) -> list[str]:
    """Return the arguments of Python for the process of a run."""
    return [sys.executable, "-m", "tests.real.pipes_run", json.dumps(asdict(run))]


if __name__ == "__main__":
    main()
