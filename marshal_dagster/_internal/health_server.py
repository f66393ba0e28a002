"""The HTTP endpoints of a service, such as a harvester: its health for probes, and its metrics for Prometheus."""

import gzip
import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, ClassVar, Final, NamedTuple, Self

from marshal_dagster.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
PATH: Final = "/health"
LIVE: Final = "/live"
READY: Final = "/ready"
METRICS: Final = "/metrics"
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FIELDS: Final = {PATH: "healthy", LIVE: "live", READY: "ready"}
"""The field of the health report that decides about the status of each path."""
IDLE_AFTER_S: Final = 60.0
"""A service is unhealthy if its thread has done nothing for longer, because each of its own waits is shorter."""
FAILING_AFTER_S: Final = 60.0
"""A service is unhealthy if all its attempts have failed for longer."""
_PACKED_FROM: Final = 10_000
"""Longer bodies, in bytes, are compressed if the client accepts that."""
_SENT_BYTES: Final = 1 << 16
"""A client has 5 s to accept this much."""
_LARGEST_PORT: Final = 65_535


def address_of(given: str) -> tuple[str, int]:
    """Parse HOST:PORT, :PORT or PORT; without a host, the loopback address is used.

    Raises `ConfigurationError` for anything else.
    """
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) <= _LARGEST_PORT):
        raise ConfigurationError(f"{given!r} is not an address; give HOST:PORT, or PORT for {LOOPBACK}")
    return host or LOOPBACK, int(port)


class HealthServer:
    """Serves what `health` returns as JSON at GET /health, /live and /ready, and metrics at GET /metrics.

    The status of /health is 200 while the report's `healthy` is true, else 503; that of /live and /ready depends on
    `live` and `ready` in the same way. /metrics answers 501 with one line if the metrics need an extra that is not
    installed. The server listens while the `with` block runs, and answers in its own threads. There is no
    authentication: error texts contain the names of servers and topics, but no secrets.

    Example:
        ```python
        with HealthServer(harvester.health, port=8080):
            harvester.run()
        ```
    """

    def __init__(
        self,
        health: Callable[[], dict[str, Any]],
        host: str = LOOPBACK,
        port: int = 0,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        """Configure the server; it starts to listen when the `with` block is entered.

        Args:
            health: Returns the report to serve, such as `Harvester.health`.
            host: The host name or IP address to listen on; the loopback address by default.
            port: The TCP port; 0 for any free one, which `address` then shows.
            metrics: Returns the metrics in Prometheus' text format, such as `marshal_dagster.telemetry.prometheus`
                renders them; without it there is no /metrics.
        """
        self._health = health
        self._metrics = metrics
        self._wanted = host, port
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        """The address as HOST:PORT. While the server listens it has the actual port."""
        host, port = self._wanted if self._server is None else self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def __enter__(self) -> Self:
        """Start to listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        try:
            self._server = _server_class(self._wanted[0])(self._wanted, _handler(self._health, self._metrics))
        except (OSError, ValueError, TypeError, OverflowError) as error:  # a host or port that no address can have
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"health: cannot listen on {self.address}: {reason}; give another address"
            ) from None
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family: int = AF_INET6 if ":" in host else AF_INET
        block_on_close = False  # a slow client must not delay a handover

        def handle_error(self, *_: object) -> None:
            """Log nothing, because a client that closes its connection is no fault of the server."""

    return Server


class _Answer(NamedTuple):
    """The status, the content type and the body of an answer."""

    status: HTTPStatus
    content_type: str
    body: bytes

    @classmethod
    def of_json(cls, status: HTTPStatus, report: dict[str, Any]) -> Self:
        return cls(status, "application/json", json.dumps(report).encode() + b"\n")


def _answer(path: str, health: Callable[[], dict[str, Any]], metrics: Callable[[], bytes] | None) -> _Answer:
    if path == METRICS and metrics is not None:
        try:
            return _Answer(HTTPStatus.OK, METRICS_TYPE, metrics())
        except ConfigurationError as error:
            return _Answer(HTTPStatus.NOT_IMPLEMENTED, "text/plain; charset=utf-8", f"{error}\n".encode())
    if path not in _FIELDS:
        known = ", ".join([*_FIELDS, *([METRICS] if metrics else [])])
        return _Answer.of_json(HTTPStatus.NOT_FOUND, {"error": f"not found: use {known}"})
    report = health()
    is_well = report.get(_FIELDS[path], report["healthy"])
    return _Answer.of_json(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, report)


def _handler(
    health: Callable[[], dict[str, Any]], metrics: Callable[[], bytes] | None = None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "marshal-dagster"
        sys_version = ""
        timeout: ClassVar[float | None] = 5.0

        def do_GET(self) -> None:
            try:
                status, content_type, body = _answer(self.path.partition("?")[0], health, metrics)
            except Exception as error:
                what = repr(error)  # a command shows its user only this line
                logger.exception("no answer to GET %r: %s; report this as a bug", self.path, what)
                report = {"error": f"unexpected {type(error).__name__}: see the log of this process"}
                status, content_type, body = _Answer.of_json(HTTPStatus.INTERNAL_SERVER_ERROR, report)
            is_packed = len(body) > _PACKED_FROM and "gzip" in self.headers.get("Accept-Encoding", "")
            if is_packed:
                body = gzip.compress(body, compresslevel=1)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            if is_packed:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for start in range(0, len(body), _SENT_BYTES):  # `timeout` limits each call as a whole
                self.wfile.write(body[start : start + _SENT_BYTES])

        def log_message(self, *_: object) -> None:
            """Log nothing: probes send a request every few seconds."""

    return Handler
