"""Spark's standalone cluster for tests: a master and two workers with one slot each, stopped by their pid."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import psutil
import pyspark

from marshal_dagster._internal.ports import HOST, free_port
from tests.conditions import wait_until
from tests.real.services import watched

SPARK_HOME: Final = Path(pyspark.__file__).parent
WORKERS: Final = 2
_READY_WITHIN_S: Final = 120.0
_STOPPED_WITHIN_S: Final = 20.0


def spark_environment() -> dict[str, str]:
    """Return the environment of Spark's processes: only the loopback address, and this Python interpreter."""
    return {**os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": HOST, "PYSPARK_PYTHON": sys.executable}


def prepare_driver() -> None:
    """Let a session that this process starts find the workers and their interpreter."""
    os.environ.update({name: value for name, value in spark_environment().items() if name.startswith(("SPARK", "PYS"))})


def stop_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all processes that it started."""
    with ExitStack() as stack:
        stack.callback(process.wait)
        try:
            tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        except psutil.NoSuchProcess:
            return
        for each in reversed(tree):
            _signal(each, psutil.Process.terminate)
        for each in psutil.wait_procs(tree, _STOPPED_WITHIN_S)[1]:
            _signal(each, psutil.Process.kill)


def _signal(process: psutil.Process, action: Any) -> None:  # noqa: ANN401 - a method of the process
    try:
        action(process)
    except psutil.NoSuchProcess:
        return


@dataclass
class SparkCluster:
    """A master and its workers."""

    folder: Path
    port: int = field(default_factory=free_port)
    page: int = field(default_factory=free_port)
    workers: "dict[subprocess.Popen[bytes], str]" = field(default_factory=dict)
    """The names of the workers' folders."""
    stack: ExitStack = field(default_factory=ExitStack)
    _added: int = 0

    @property
    def master(self) -> str:
        """The URL of the master, for a session."""
        return f"spark://{HOST}:{self.port}"

    @property
    def events(self) -> Path:
        """The folder for event logs of sessions."""
        return self.folder / "events"

    def start(self) -> None:
        """Start all processes and wait until the workers are registered."""
        self.events.mkdir()
        ports = ("--port", str(self.port), "--webui-port", str(self.page))
        master = self._spawn("master.Master", "--host", HOST, *ports)
        self.stack.enter_context(watched("the master of the Spark cluster", master.pid, *self.folder.glob("*.log")))
        for _ in range(WORKERS):
            self.add_worker()
        self.wait_for(WORKERS)

    def add_worker(self) -> None:
        """Start one more worker on a host of its own: Spark runs a task twice at once only on two hosts."""
        self._added += 1
        place = self.folder / f"worker {self._added}"
        place.mkdir()
        size = ("--cores", "1", "--memory", "1g", "--work-dir", str(place))
        host = f"127.0.0.{self._added}"
        worker = self._spawn(
            "worker.Worker", "--host", host, "--webui-port", str(free_port()), *size, self.master, host=host
        )
        self.workers[worker] = place.name

    def kill_worker(self) -> None:
        """Kill the worker `worker_to_kill` and its executor, as if its machine was switched off."""
        worker = self._worker_to_kill()
        executors = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        for executor in executors:
            _signal(executor, psutil.Process.kill)
        worker.wait()
        del self.workers[worker]

    @property
    def worker_to_kill(self) -> str:
        """The name of the folder of the next worker to be killed: the first one that has an executor."""
        return self.workers[self._worker_to_kill()]

    def _worker_to_kill(self) -> "subprocess.Popen[bytes]":
        return next(each for each in self.workers if each.poll() is None and psutil.Process(each.pid).children())

    def alive_workers(self) -> int:
        """Return the number of workers that the master reports, or 0 if it does not answer yet with JSON."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.page}/json/", timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError, HTTPException):  # until its routes are added, the server's answer is an HTML page
            return 0

    def wait_for(self, workers: int) -> None:
        """Wait until this number of workers is registered."""
        wait_until(
            lambda: self.alive_workers() == workers,
            lambda: f"{workers} workers are known: {self.response()}",
            _READY_WITHIN_S,
            pause_s=0.1,
        )

    def response(self) -> str:
        """Return the last lines that the processes printed."""
        return "\n".join(each.read_text(errors="replace")[-1500:] for each in self.folder.glob("*.log"))

    def _spawn(self, name: str, *arguments: str, host: str = HOST) -> "subprocess.Popen[bytes]":
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        environment = spark_environment() | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": host}
        path = self.folder / f"{name} {self._added}.log"
        with path.open("wb") as console:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment, cwd=self.folder
            )
        self.stack.callback(stop_tree, process)
        return process


@contextmanager
def running_cluster(folder: Path) -> Iterator[SparkCluster]:
    """Start a cluster and stop it at the end."""
    cluster = SparkCluster(folder)
    with cluster.stack:
        cluster.start()
        yield cluster
