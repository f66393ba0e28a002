"""Starts a script of Dagster Pipes where it shares almost nothing with its run, as on a cluster of others.

The script has mount, pid and user namespaces of its own, and an empty file system with these folders: Python and Java
with their libraries, this library and the script (read-only), `/tmp`, and the folder of the output. It reaches the
brokers on loopback. It gets the batch in one environment variable, and its messages come through its log.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil
from dagster_pipes import (
    DAGSTER_PIPES_CONTEXT_ENV_VAR,
    DAGSTER_PIPES_MESSAGES_ENV_VAR,
    PIPES_PROTOCOL_VERSION_FIELD,
    PipesDefaultContextLoader,
    PipesDefaultMessageWriter,
    encode_param,
)

from marshal_dagster._internal.user_folders import cache_folder
from tests.conditions import wait_until

ROOT: Final = Path(__file__).parents[2]
MESSAGES: Final = {PipesDefaultMessageWriter.STDIO_KEY: PipesDefaultMessageWriter.STDOUT}
"""The parameters with which a script writes its messages to its log."""
_FLAGS: Final = ("JAVA_HOME", "SPARK_DIST_CLASSPATH", "SPARK_LAUNCHER_OPTS", "SPARK_SUBMIT_OPTS")

_SET_UP: Final = """
set -e
root=$1; shift
mount -t tmpfs none "$root"
while [ "$1" != -- ]; do
    mkdir -p "$root$3"
    mount --bind "$2" "$root$3"
    if [ "$1" = ro ]; then mount -o remount,bind,ro "$root$3"; fi
    shift 3
done
shift
mkdir -p "$root/dev" "$root/proc" "$root/tmp"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
exec chroot "$root" "$@"
"""
"""Builds the file system of the script from folders (mode, source, target), and starts its command."""


def _folders(script: Path, output: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield each folder that the script sees: its mode, where it is, and where the script sees it."""
    system = [path for name in ("bin", "etc", "lib", "lib64", "sbin", "usr") if (path := Path("/", name)).exists()]
    python = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    caches = [folder for folder in (cache_folder(), ROOT / "build") if folder.exists()]
    for folder in [*system, *sorted(python - {Path("/usr")}), *caches]:
        yield "ro", folder, folder
    yield "ro", ROOT / "marshal_dagster", Path("/library/marshal_dagster")
    yield "ro", script.parent, Path("/script")
    yield "rw", output, output


@dataclass
class IsolatedScript:
    """A script that is started with parameters of Pipes. Its folder contains all of its own modules."""

    script: Path
    output: Path
    bootstrap_servers: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables; the script inherits none."""
    log_name: str = "script.log"
    """The name of the log beside the folder of the output, where the script itself cannot read it."""

    @property
    def log(self) -> Path:
        """The log, which stays when the run dies, as that of a platform."""
        return self.output.with_name(self.log_name)

    def start(self, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start the script. Killing the process that is returned kills everything in its namespaces."""
        root = self.output.with_name("root of the script")
        root.mkdir(exist_ok=True)
        mounts = [str(part) for folder in _folders(self.script, self.output) for part in folder]
        inherited = {name: value for name in _FLAGS if (value := os.environ.get(name))}
        environment = {
            **inherited,
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/tmp",  # noqa: S108 - that of the script
            "PYTHONPATH": "/library:/script",
            "PYTHONUNBUFFERED": "1",
            "MARSHAL_CACHE": str(cache_folder()),
            "MARSHAL_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            **self.environment,
            **variables,
        }
        python = str(Path(sys.prefix, "bin", "python"))
        unshare = shutil.which("unshare") or "unshare"
        own = ["--mount", "--pid", "--user", "--map-root-user", "--fork", "--kill-child"]
        set_up = ["sh", "-c", _SET_UP, "sh", str(root), *mounts, "--"]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [unshare, *own, *set_up, python, f"/script/{self.script.name}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @contextmanager
    def running(self, variables: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
        """Start the script, and kill it after the block if it still runs."""
        with self.start(variables) as process:
            try:
                yield process
            finally:
                kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a script with everything that it has started, as a cluster does that loses a node."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        wait_until(lambda: not any(each.is_running() for each in below), "the namespaces have ended")
    process.wait()


def variables_of(extras: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a context with these extras, as a client of Pipes sets them."""
    context = {"asset_keys": None, "run_id": "run", "job_name": None, "retry_number": 0, "extras": dict(extras)}
    return {
        DAGSTER_PIPES_CONTEXT_ENV_VAR: encode_param({PipesDefaultContextLoader.DIRECT_KEY: context}),
        DAGSTER_PIPES_MESSAGES_ENV_VAR: encode_param(MESSAGES),
    }


def message_in(line: str) -> dict[str, Any] | None:
    """Return the message of Pipes in a line of the log, or None."""
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and PIPES_PROTOCOL_VERSION_FIELD in message:
            return message
    return None


class PlainClient:
    """A client of Pipes for runs without Dagster: the same variables, and messages from the log."""

    def __init__(self, script: IsolatedScript) -> None:
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *, context: object, extras: Mapping[str, Any]) -> Any:  # noqa: ANN401, ARG002 - as a client of Pipes
        """Run the script to its end."""
        with self.script.running(variables_of(extras)) as process:
            self.process = process
            code = process.wait()
        log = self.script.log.read_text()
        if code != 0:
            raise ChildProcessError(f"the script ended with {code}: {log}")
        found = [message for line in log.splitlines() if (message := message_in(line)) is not None]
        payloads = [each["params"]["payload"] for each in found if each["method"] == "report_custom_message"]
        return SimpleNamespace(get_custom_messages=lambda: payloads)


def killed_at(process_of: PlainClient, mark: Path) -> threading.Thread:
    """Start a thread that kills the script of a client once the file `mark` exists."""

    def watch() -> None:
        wait_until(mark.exists, f"the script has reached {mark.name}")
        assert process_of.process is not None
        process_of.process.kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
