"""Start Kafka and Dagster for this deployment, and stop all their processes by process id."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import dagster as dg
import psutil

from demo.flights import PARTITIONS, TOPIC
from marshal_dagster.coordination.topic_settings import create_coordination_topic, create_snapshot_topic
from marshal_dagster.devkafka import KafkaCluster
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build"
MARK: Final = "MARSHAL_DEPLOYMENT"
"""Environment variable that identifies all processes of one deployment, orphans included."""
COORDINATION_TOPIC: Final = "__marshal"
STOP_S: Final = 10.0

T = TypeVar("T")

DAGSTER_YAML: Final = """\
telemetry:
  enabled: false
nux:
  enabled: false
"""


@dataclass(slots=True)
class Deployment:
    """One Dagster instance with its daemon, in a directory of its own, with one Kafka cluster."""

    directory: Path
    connection: KafkaConnection
    settings: dict[str, str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def home(self) -> Path:
        """The Dagster instance's folder."""
        return self.directory / "dagster_home"

    @property
    def output(self) -> Path:
        """The folder to which the sink writes."""
        return self.directory / "output"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process of the deployment."""
        return {
            **os.environ,
            **self.settings,
            "DAGSTER_HOME": str(self.home),
            "MARSHAL_BOOTSTRAP_SERVERS": self.connection.bootstrap_servers,
            "MARSHAL_OUTPUT": str(self.output),
            MARK: self.mark,
        }

    def prepare(self) -> None:
        """Create the Dagster instance and the topics, if they do not exist yet.

        This includes the databases of the instance. If several processes create them concurrently, they corrupt them
        ("more than one head").
        """
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "dagster.yaml").write_text(DAGSTER_YAML)
        with dg.DagsterInstance.from_config(str(self.home)):
            pass
        with Topics(self.connection) as topics:
            create_coordination_topic(topics, COORDINATION_TOPIC)
            create_snapshot_topic(topics, COORDINATION_TOPIC)
            topics.create(TOPIC, PARTITIONS, 1)

    def start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one of Dagster's commands for this workspace, with its output in `<command>.log`."""
        program = Path(sys.executable).parent / command
        with (self.directory / f"{command}.log").open("ab") as output:
            return subprocess.Popen(
                [program, *arguments],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of this deployment, by the mark in their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def stop(self) -> None:
        """Stop all processes: terminate them first, then kill those that remain."""
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            ours = self.processes()
            for process in ours:
                _quietly(process, ask)
            psutil.wait_procs(ours, timeout=STOP_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False


def _quietly(process: psutil.Process, ask: Callable[[psutil.Process], None]) -> None:
    try:
        ask(process)
    except psutil.NoSuchProcess:
        return


def kill_tree(pid: int) -> int:
    """Kill a process and all its descendants, and return how many they are.

    Each is stopped with SIGSTOP first, so that none can react. A process that exits by itself meanwhile counts too.
    """
    root = psutil.Process(pid)
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        _quietly(process, lambda found: found.send_signal(signal.SIGSTOP))
    for process in root.children(recursive=True):
        if process not in tree:
            tree.append(process)
    for process in tree:
        _quietly(process, psutil.Process.kill)
    psutil.wait_procs(tree, timeout=STOP_S)
    return len(tree)


@contextmanager
def running(directory: Path, settings: dict[str, str], *, port: int = 0) -> Iterator[Deployment]:
    """Start a Kafka cluster and prepare an empty deployment in `directory`; stop both at the end."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    cluster = KafkaCluster(directory / "kafka", port=port)
    cluster.up()
    deployment = Deployment(directory, KafkaConnection(bootstrap_servers=cluster.bootstrap_servers), settings)
    try:
        deployment.prepare()
        yield deployment
    finally:
        deployment.stop()
        cluster.down(wipe=True)


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float, pause_s: float = 0.1) -> T:
    """Call `look` repeatedly until it returns a value. Raises `TimeoutError` with the text `what`."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(pause_s)
    return found
