"""TCP ports on 127.0.0.1, for the brokers of `devkafka`: find a free one, and check that one is free."""

import errno
import random
import socket
from collections.abc import Container
from contextlib import closing, suppress
from pathlib import Path

import psutil

from marshal_dagster.errors import PortInUseError

HOST = "127.0.0.1"
LARGEST_PORT = 65_535
_LOWEST = 20_000
_EPHEMERAL_FROM = 32_768
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(taken: Container[int] = ()) -> int:
    """Return a free port that is not in `taken` and is below the system's ephemeral port range.

    While a broker is stopped, the system may assign a port in that range to any outgoing connection. That may even be
    a client that tries to reach the broker (TCP then connects to itself). The broker could not start on that port.
    """
    candidates = list(range(_LOWEST, _highest() + 1))
    random.shuffle(candidates)
    for port in candidates:
        if port not in taken and _bind_error(port) is None:
            return port
    raise PortInUseError(f"no port from {_LOWEST} to {_highest()} is free; free one, or name the ports to use")


def check_free(port: int) -> None:
    """Raise an error unless a server can listen on `port`.

    Raises:
        PortInUseError: The port is in use or not allowed. The message names the process that listens, if the system
            reports it.
    """
    error = _bind_error(port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        what = f"port {port} is in use{_user_of(port)}; stop that process, or give another port"
    else:
        what = f"port {port} cannot be used ({error.strerror}); give another port"
    raise PortInUseError(f"{what} (0 picks a free one)") from error


def is_free(port: int) -> bool:
    """Return whether a server can listen on `port`."""
    return _bind_error(port) is None


def _bind_error(port: int) -> OSError | None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As the JVM does, so that connections of an earlier broker in TIME_WAIT do not make this fail.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _user_of(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def _highest() -> int:
    try:
        ephemeral_from = int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral_from = _EPHEMERAL_FROM
    # If nearly all ports are ephemeral, no range below them is left to use.
    return ephemeral_from - 1 if ephemeral_from > _LOWEST + 1000 else LARGEST_PORT
