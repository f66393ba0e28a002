"""A Spark Connect server on this machine, which keeps running between runs, so they need not start a JVM.

`SparkConnectResource` starts and stops it. Its folder has `server.json` (process, port and token, readable only by this
user), the settings with which it was started, and its output: `server.log`, and `previous.log` of the server before.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from marshal_dagster._internal import processes
from marshal_dagster._internal.extras import Extra, has_extra
from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.java import find_java, java_environment
from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster._internal.ports import free_port
from marshal_dagster._internal.processes import ProcessMark
from marshal_dagster._internal.user_folders import cache_folder
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark.connect import MISSING_CLIENT, check_client
from marshal_dagster.spark.process_files import spark_home, write_private
from marshal_dagster.spark.session import SINGLE_EXECUTION, is_local, spark_settings, with_connector

DEFAULT_FOLDER_NAME: Final = "spark-connect"

_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_LOOPBACK: Final = "127.0.0.1"
_READY_WITHIN_S: Final = 180.0
_STOPPED_WITHIN_S: Final = 30.0
_POLL_S: Final = 0.1
_TOKEN_VARIABLE: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - a name
# The server ends statements of a killed client after this time. A client that is alive reconnects sooner.
_ABANDONED_AFTER: Final = "30s"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: ProcessMark
    port: int
    token: str

    @property
    def url(self) -> str:
        """The URL for clients on this machine. Spark sends a token without TLS only to `localhost`."""
        return f"sc://localhost:{self.port}"


class ConnectServer:
    """The server of a folder (default: in the user's cache folder)."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder() / DEFAULT_FOLDER_NAME
        self._state, self._log = self.folder / "server.json", self.folder / "server.log"

    def running(self) -> Server | None:
        """Return the server if it is running, else None."""
        try:
            fields = json.loads(self._state.read_text(encoding="utf-8"))
            server = Server(**fields | {"process": ProcessMark(**fields["process"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return server if processes.is_alive(server.process) else None

    def start(self, settings: Mapping[str, str] | None = None) -> Server:
        """Return the running server; start it first if there is none. Several processes may call this at once.

        `settings` replace or extend the defaults: `spark_settings`, and for a local master also `SINGLE_EXECUTION`.
        Raises `ConfigurationError` without a suitable Java, and `UnavailableError` if the server does not start.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.folder / "lock"):
            server = self.running()
            if server is None:
                return self._start(settings or {})
            self._wait_until_ready(server)  # the process that started it may have been killed in between
            return server

    def stop(self) -> bool:
        """Stop the server; return False if there was none."""
        if not self.folder.is_dir():
            return False
        with locked(self.folder / "lock"):
            server = self.running()
            if server is not None:
                processes.stop([server.process], _STOPPED_WITHIN_S)
            self._state.unlink(missing_ok=True)
            return server is not None

    def _start(self, settings: Mapping[str, str]) -> Server:
        check_client()
        if not has_extra(Extra.CONNECT):  # the server would start, but no session on it
            raise ConfigurationError(MISSING_CLIENT)
        java = find_java()
        port, token = free_port(), secrets.token_urlsafe(32)
        properties = self.folder / "server.conf"
        write_private(properties, render_properties(_settings(settings, port)))
        home = spark_home()
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            **java_environment(),
            "JAVA_HOME": str(java.executable.resolve().parent.parent),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", _LOOPBACK),
            _TOKEN_VARIABLE: token,
        }
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
            environment.pop(name, None)
        submit = str(home / "bin" / "spark-submit")
        command = [submit, "--properties-file", str(properties), "--class", _CLASS, "spark-internal"]
        if self._log.exists():
            self._log.replace(self.folder / "previous.log")
        write_private(self._log, "")
        server = Server(processes.spawn(command, environment, self._log), port, token)
        try:
            write_private(self._state, json.dumps(asdict(server)))
            self._wait_until_ready(server)
        except BaseException:
            processes.stop([server.process], _STOPPED_WITHIN_S)
            raise
        return server

    def _wait_until_ready(self, server: Server) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not processes.listens(server.process, server.port):
            if not processes.is_alive(server.process):
                raise UnavailableError(
                    f"the Spark Connect server ended during its start: its log {self._log} shows why"
                )
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the Spark Connect server did not answer within {_READY_WITHIN_S:g} s: see "
                    f"{self._log}. If it is still running (process {server.process.pid}), stop it"
                )
            time.sleep(_POLL_S)


def _settings(wanted: Mapping[str, str], port: int) -> dict[str, str]:
    settings = with_connector(spark_settings(app_name="marshal-dagster connect server", extra=wanted))
    ours = {"spark.connect.execute.manager.detachedTimeout": _ABANDONED_AFTER}
    if is_local(settings["spark.master"]):
        ours |= SINGLE_EXECUTION
    where = {"spark.connect.grpc.binding.address": _LOOPBACK, "spark.connect.grpc.binding.port": str(port)}
    return ours | settings | where
