"""The health of a service, over HTTP."""

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, ClassVar, Final, Self

from marshal_dagster.errors import ConfigurationError

LOOPBACK: Final = "127.0.0.1"
PATH: Final = "/health"
IDLE_AFTER_S: Final = 60.0
"""A service whose thread has done nothing for longer hangs: no wait of its own takes as long."""
FAILING_AFTER_S: Final = 60.0
_LARGEST_PORT: Final = 65_535


def address_of(given: str) -> tuple[str, int]:
    """Read HOST:PORT, :PORT or PORT, where loopback is meant. Raises `ConfigurationError`."""
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) <= _LARGEST_PORT):
        raise ConfigurationError(f"{given!r} is no address; give HOST:PORT, or PORT for {LOOPBACK}")
    return host or LOOPBACK, int(port)


class HealthServer:
    """Answers GET /health with what `health` returns: status 200 while its `healthy` is true, else 503.

    It answers behind the `with` statement's beginning, in threads of its own, until the block's end. It asks nobody
    who they are: the failure's text names servers and topics, no secrets.
    """

    def __init__(self, health: Callable[[], dict[str, Any]], host: str = LOOPBACK, port: int = 0) -> None:
        """Listen on nothing yet; port 0 takes any that is free.

        `health` is that of a `Harvester`, or of a `Coordinator`.
        """
        self._health = health
        self._wanted = host, port
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        """HOST:PORT where it listens, or would."""
        host, port = self._wanted if self._server is None else self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def __enter__(self) -> Self:
        """Listen. Raises `ConfigurationError` where that cannot be."""
        try:
            self._server = _server_class(self._wanted[0])(self._wanted, _handler(self._health))
        except OSError as error:
            raise ConfigurationError(
                f"health: cannot listen on {self.address}: {error.strerror or error}; give another address"
            ) from None
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family: int = AF_INET6 if ":" in host else AF_INET
        block_on_close = False  # a client that is slow holds up no handing over

        def handle_error(self, *_: object) -> None:
            """Say nothing of clients that went away."""

    return Server


def _handler(health: Callable[[], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "marshal-dagster"
        sys_version = ""
        timeout: ClassVar[float | None] = 5.0

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self._answer(HTTPStatus.NOT_FOUND, {"error": f"ask for {PATH}"})
                return
            report = health()
            self._answer(HTTPStatus.OK if report["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE, report)

        def _answer(self, status: HTTPStatus, report: dict[str, Any]) -> None:
            body = json.dumps(report).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: whoever watches asks each few seconds."""

    return Handler
