"""The files of one broker, the formatting of its data folder, and the start of its process."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marshal_dagster._internal.java import Java, java_environment
from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster._internal.processes import ProcessMark, spawn
from marshal_dagster.devkafka.errors import BrokerFailedError
from marshal_dagster.devkafka.properties import Node, logging_configuration, server_properties
from marshal_dagster.devkafka.state import new_uuid

# Measured on two cores: half the processor time of the default compilers and collector, a lower and steadier
# latency, the same throughput.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+ (?P<level>[A-Z]+) ")
_GRAVE = frozenset({None, "ERROR", "FATAL"})
_THROWN = re.compile(r'(?:Exception in thread "[^"]*" )?(?:[\w$]+\.)*(?P<reason>[\w$]+(?:Exception|Error)\b.*)')
_TAIL_BYTES = 64 * 1024
_FORMAT_WITHIN_S = 60.0
CHECKPOINT = "bootstrap.checkpoint"
"""The file of a new data folder with the versions of Kafka's features."""
DEFAULT_HEAP_MB = 512


class BrokerFolder:
    """The files of one broker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        """The folder of Kafka's own logs: topics and metadata."""
        self.meta = self.data / "meta.properties"
        """The identity of the data folder; the last file that its formatting writes."""
        self.properties = path / "server.properties"
        """The broker's settings, rewritten at each start."""
        self.logging = path / "log4j2.xml"
        """The log4j2 configuration."""
        self.log = path / "broker.log"
        """The broker's log."""
        self.console = path / "console.log"
        """The output of the JVM, which includes the error of a crash."""

    def sizes(self) -> dict[Path, int]:
        """Return the current sizes of the logs in bytes, from which `last_log_line` later reads."""
        return {path: path.stat().st_size if path.exists() else 0 for path in (self.console, self.log)}

    def last_log_line(self, since: Mapping[Path, int]) -> str:
        """Return the line logged after `since` that best explains a failure, and the path of its log."""
        last = "it logged nothing"
        for path, size_bytes in since.items():
            lines = _lines(path, size_bytes)
            reason = reason_in(lines)
            if reason is not None:
                return f"{reason}; its log: {path}"
            last = lines[-1] if lines else last
        return f"{last}; its log: {self.log}"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the brokers of one cluster with the settings that they share."""

    java: Java
    jars: tuple[Path, ...]
    heap_mb: int = DEFAULT_HEAP_MB
    settings: Mapping[str, str] | None = None
    archive_flag: str | None = None
    """The JVM flag that uses or creates the class archive."""
    checkpoint: Path | None = None
    """A copy of what Kafka writes into a new data folder. It is the same for all brokers without further settings."""

    def prepare(self, folder: BrokerFolder, node: Node, nodes: Sequence[Node], cluster_id: str) -> None:
        """Write the broker's files, and format its data folder if that is new.

        Raises:
            BrokerFailedError: The data folder could not be formatted, usually because Kafka rejects a setting.
        """
        folder.path.mkdir(parents=True, exist_ok=True)
        properties = server_properties(node, nodes, folder.data, self.settings or {})
        folder.properties.write_text(render_properties(properties), encoding="ascii")
        folder.logging.write_text(logging_configuration(folder.log), encoding="utf-8")
        if not folder.meta.exists():
            self._format(folder, node, cluster_id)

    def start(self, folder: BrokerFolder) -> ProcessMark:
        """Start the process of a broker whose files `prepare` has written."""
        return spawn(self._command(folder, "kafka.Kafka", str(folder.properties)), java_environment(), folder.console)

    def _format(self, folder: BrokerFolder, node: Node, cluster_id: str) -> None:
        if self.checkpoint is not None and not self.settings:
            folder.data.mkdir(exist_ok=True)
            shutil.copyfile(self.checkpoint, folder.data / CHECKPOINT)
            properties = {"version": "1", "cluster.id": cluster_id, "node.id": str(node.broker_id)}
            new = folder.meta.with_suffix(".new")
            new.write_text(render_properties({**properties, "directory.id": new_uuid()}), encoding="ascii")
            new.replace(folder.meta)
            return
        before = folder.sizes()
        arguments = ("format", "--ignore-formatted", "--cluster-id", cluster_id, "--config", str(folder.properties))
        try:
            with folder.console.open("ab") as console:
                done = subprocess.run(
                    self._command(folder, "kafka.tools.StorageTool", *arguments),
                    env=java_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    timeout=_FORMAT_WITHIN_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise BrokerFailedError(
                f"broker {node.broker_id} could not be set up within {_FORMAT_WITHIN_S:.0f} s: "
                f"{folder.last_log_line(before)}"
            ) from error
        if done.returncode != 0:
            raise BrokerFailedError(f"broker {node.broker_id} could not be set up: {folder.last_log_line(before)}")

    def _command(self, folder: BrokerFolder, main: str, *arguments: str) -> list[str]:
        return [
            str(self.java.executable),
            f"-Xmx{self.heap_mb}m",
            *_QUICK,
            *([self.archive_flag] if self.archive_flag else ()),
            "-XX:+ExitOnOutOfMemoryError",
            f"-XX:ErrorFile={folder.path / 'crash-%p.log'}",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={folder.logging.as_uri()}",
            "-cp",
            os.pathsep.join(str(jar) for jar in self.jars),
            main,
            *arguments,
        ]


def reason_in(lines: Iterable[str]) -> str | None:
    """Return the first exception in the output or in an error message; without one, the first error message.

    Later errors are only consequences of the broker's shutdown.
    """
    level = first_error = None
    for line in lines:
        logged = _LOG_LINE.match(line)
        level = logged["level"] if logged else level
        if level not in _GRAVE:
            continue
        thrown = None if logged else _THROWN.match(line)
        if thrown:
            return thrown["reason"]
        if first_error is None and (logged or line.startswith("Error")):
            first_error = line
    return first_error


def _lines(path: Path, since_bytes: int) -> list[str]:
    """Return the lines written to a log since it had `since_bytes`, without blank lines."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            # If it is shorter than before, the log has been rolled over.
            start = since_bytes if since_bytes <= size_bytes else 0
            stream.seek(max(start, size_bytes - _TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
