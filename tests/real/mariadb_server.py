"""A MariaDB of the test run: an own folder and port of this machine, ready in seconds, stopped by its process id."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from marshal_dagster._internal.ports import free_port
from tests.conditions import WITHIN_S
from tests.real.services import watched

_SCRIPTS: Final = ("mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql")
_SHARED_FOLDERS: Final = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SMALL: Final = (
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=32M",
    "--skip-innodb-doublewrite",
    "--sync-frm=0",
    "--debug-no-sync",  # tests kill the server, and no test crashes the machine
)


def program() -> str:
    """Return the path of the server's program, from the variable `MARIADBD` or the machine."""
    found = os.environ.get("MARIADBD") or shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert found, "MariaDB is needed, but was not found: run `make mariadb`, or set MARIADBD=..."
    return found


@contextmanager
def running_mariadb(folder: Path, *further: str) -> Iterator[str]:
    """Yield the URL of a server without a database, whose user `root` has no password.

    Args:
        folder: An empty folder for the server's files.
        further: More options of the server.
    """
    data, log = folder / "data", folder / "log"
    data.mkdir()
    # A server that starts deletes temporary tables in its temporary folder, also those of other servers.
    given = ["--no-defaults", f"--datadir={data}", f"--tmpdir={folder}", f"--socket={folder / 'socket'}", *_SMALL]
    if os.getuid() == 0:
        given.append("--user=root")
    _create_system_tables([program(), *given], folder)
    port = free_port()
    bound = ["--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve", *further]
    with log.open("wb") as output:
        server = subprocess.Popen([program(), *given, *bound], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_until_ready(server, port, log)
        with watched("MariaDB", server.pid, log):
            yield f"mariadb://root@127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _create_system_tables(command: list[str], folder: Path) -> None:
    scripts = next(path for path in _SHARED_FOLDERS if (path / _SCRIPTS[0]).is_file())
    statements = "create database mysql;\nuse mysql;\nSET @auth_root_socket=NULL;\n"
    statements += "".join((scripts / name).read_text() for name in _SCRIPTS)
    done = subprocess.run(
        [*command, "--bootstrap"], input=statements, text=True, capture_output=True, check=False, timeout=WITHIN_S
    )
    (folder / "bootstrap.log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    until = time.monotonic() + WITHIN_S
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))
