"""A harvester's health report: over HTTP, and from its own checks of the database and Kafka."""

import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace
from typing import Any, Self

import pytest

from marshal_dagster._internal import health_server
from marshal_dagster._internal.health_server import HealthServer, address_of
from marshal_dagster._internal.postgres import Database
from marshal_dagster.election.rules import Term
from marshal_dagster.errors import AuthorizationError, ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox import harvester as harvester_module
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.schema import VERSION, OutboxRegistration, OutboxTables, OutboxTarget
from tests.conditions import WITHIN_S

KAFKA = KafkaConnection(bootstrap_servers="127.0.0.1:1")


@pytest.fixture
def harvester() -> Harvester:
    """Return a harvester that has not started."""
    return Harvester(OutboxTables(Database("postgresql://127.0.0.1:1/db")), KAFKA)


def ask(address: str, path: str = "/health", method: str = "GET") -> tuple[int, Any]:
    """Send a request and return its status and body."""
    connection = http.client.HTTPConnection(address)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.getheader("Server") == "marshal-dagster "
        body = answer.read()
        return answer.status, json.loads(body) if answer.getheader("Content-Type") == "application/json" else body
    finally:
        connection.close()


# The endpoint


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_an_answer_that_fails_states_it(caplog: pytest.LogCaptureFixture, path: str) -> None:
    """The client gets status 500, and the log of the process has the error."""
    with HealthServer(lambda: {"healthy": 1 / 0}, metrics=lambda: bytes(1 // 0)) as server:
        answer = ask(server.address, path)
    assert answer == (500, {"error": "unexpected ZeroDivisionError: see the log of this process"})
    assert caplog.messages[0].startswith(f"no answer to GET {path!r}: ZeroDivisionError(")


@pytest.mark.slow
def test_a_harvester_that_works_is_healthy(harvester: Harvester) -> None:
    """A working harvester returns status 200 with its role and counts."""
    harvester.counts.published, harvester.counts.parked, harvester.counts.sessions = 5, 2, 1
    with HealthServer(harvester.health) as server:
        status, reported = ask(server.address)
        harvester.term = Term(1, "id")
        assert ask(server.address, "/health?verbose")[1]["role"] == "leader"
    assert reported.pop("idle_s") < health_server.IDLE_AFTER_S
    assert (status, reported) == (
        200,
        {
            "healthy": True,
            "live": True,
            "ready": False,
            "outbox": "outbox",
            "role": "standby",
            "failure": None,
            "failing_s": 0.0,
            "published": 5,
            "parked": 2,
            "sessions": 1,
        },
    )


@pytest.mark.slow
def test_a_harvester_that_hangs_is_not(harvester: Harvester) -> None:
    """The status is 503 once the harvester's thread has been idle for longer than any of its own waits."""
    harvester._alive_at_s = time.monotonic()
    with HealthServer(harvester.health) as server:
        assert ask(server.address)[0] == 200
        harvester._alive_at_s -= health_server.IDLE_AFTER_S
        assert ask(server.address)[0] == 503


def test_a_harvester_whose_election_hangs_is_not_live(harvester: Harvester) -> None:
    """It would stand by without a limit, although no other failure shows that."""
    harvester._elector_idle_s = lambda: health_server.IDLE_AFTER_S + 1
    health = harvester.health()
    assert (health["healthy"], health["live"], health["ready"]) == (False, False, False)


@pytest.mark.slow
def test_a_harvester_that_fails_is_given_time(harvester: Harvester) -> None:
    """The status is 503 once the harvester has failed for longer than the given time, until it succeeds."""
    with HealthServer(lambda: harvester.health(failing_after_s=30)) as server:
        harvester._note(UnavailableError("away"))
        status, reported = ask(server.address)
        assert (status, reported["failure"]) == (200, "away")
        harvester._note(UnavailableError("still away"))
        harvester._failing_from_s -= 30
        assert ask(server.address)[0] == 503
        harvester._note(None)
        assert (ask(server.address)[0], harvester.failing_s) == (200, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/healthz", "/health/", "/../health"])
def test_all_else_is_not_found(harvester: Harvester, path: str) -> None:
    """Any other path returns status 404."""
    with HealthServer(harvester.health) as server:
        assert ask(server.address, path)[0] == 404


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_requested(harvester: Harvester, method: str) -> None:
    """Methods other than GET return status 501."""
    with HealthServer(harvester.health) as server:
        assert ask(server.address, method=method)[0] == 501


@pytest.mark.slow
def test_a_client_that_says_nothing_holds_up_nobody(harvester: Harvester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends nothing blocks neither other clients nor the shutdown."""
    handler = health_server._handler(harvester.health)
    monkeypatch.setattr(handler, "timeout", None)
    monkeypatch.setattr(health_server, "_handler", lambda *_: handler)
    with HealthServer(harvester.health) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))):
            assert ask(server.address)[0] == 200
            server.__exit__(None, None, None)


@pytest.mark.slow
def test_an_address_in_use_is_an_error_that_names_it(harvester: Harvester) -> None:
    """An address that another process uses raises an error that names it. It is free again after the server ends."""
    with HealthServer(harvester.health) as first:
        port, kept = int(first.address.rpartition(":")[2]), first._server
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            HealthServer(harvester.health, port=port).__enter__()
    with HealthServer(harvester.health, port=port) as second:
        assert ask(second.address)[0] == 200
    assert kept is not None


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("\0", 80), ("a" * 70 + ".x", 80)])
def test_an_address_that_cannot_be_is_an_error(harvester: Harvester, host: str, port: int) -> None:
    """It is an error of the configuration, whatever error the socket raises."""
    with pytest.raises(ConfigurationError, match="health: cannot listen on"):
        HealthServer(harvester.health, host, port).__enter__()


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),  # noqa: S104 - only parsed
        ("[::1]:80", ("::1", 80)),
        ("host:0", ("host", 0)),
    ],
)
def test_an_address_without_a_host_is_loopback(given: str, address: tuple[str, int]) -> None:
    """A port without a host means loopback. Other addresses are kept."""
    assert address_of(given) == address


@pytest.mark.parametrize("given", ["", "host", "host:", "host:x", "host:65536", "host:-1", "host:²"])
def test_what_is_no_address_is_refused(given: str) -> None:
    """An invalid address is rejected with the accepted format."""
    with pytest.raises(ConfigurationError, match="give HOST:PORT"):
        address_of(given)


# Checks of the database and Kafka


class Ends:
    """A stand-in for the database and Kafka. Each can be unavailable."""

    def __init__(self) -> None:
        """Make both available."""
        self.database: MarshalError | None = None
        self.kafka: MarshalError | None = None
        self.requested = 0
        self.recorded = OutboxTarget()

    def look_up(self) -> OutboxRegistration:
        """Check the tables."""
        self.requested += 1
        if self.database is not None:
            raise self.database
        return OutboxRegistration("outbox", "uid", VERSION, 0, None, self.recorded)

    def topics(self, _: KafkaConnection) -> Self:
        """Replace the class `Topics`."""
        return self

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def require(self, _: object) -> None:
        """Check the leader topic."""
        if self.kafka is not None:
            raise self.kafka


@pytest.fixture
def ends(harvester: Harvester, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Replace the database and Kafka of the harvester."""
    ends = Ends()
    monkeypatch.setattr(harvester, "_look_up", ends.look_up)
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.Topics", ends.topics)
    monkeypatch.setattr(harvester_module, "_LOOK_AT_ENDS_S", 0.0)
    return ends


def test_a_standby_knows_whether_it_could_take_over(harvester: Harvester, ends: Ends) -> None:
    """A standby reports a failure while the database or Kafka is unavailable or it cannot take part in the election."""
    elector: Any = SimpleNamespace(topic="t", failure=None)
    for name in ("database", "kafka"):
        setattr(ends, name, UnavailableError(f"{name} is away"))
        harvester._look_at_ends(elector)
        assert str(harvester.failure) == f"{name} is away"
        setattr(ends, name, None)
    elector.failure = MarshalError("may not stand")
    harvester._look_at_ends(elector)
    assert harvester.health()["failure"] == "may not stand"
    elector.failure = None
    ends.recorded = OutboxTarget(partitioner="consistent")
    harvester._look_at_ends(elector)
    assert "the partitioner 'consistent'" in harvester.health()["failure"]
    ends.recorded = OutboxTarget()
    harvester._look_at_ends(elector)
    assert harvester.failure is None


def test_a_standby_that_failed_to_lead_has_not_recovered(harvester: Harvester, ends: Ends) -> None:
    """A failed term, such as one that lacked a right, stays the failure until another term had time to succeed."""
    elector: Any = SimpleNamespace(topic="t", failure=None)
    for attempts in range(1, 6):
        harvester._note_of_term(AuthorizationError("no right on transactional ids"))
        harvester._look_at_ends(elector)
        assert ends.requested == attempts
        assert harvester.health()["failure"] == "no right on transactional ids"
        harvester._failing_from_s -= 15
    assert harvester.health()["healthy"] is False
    harvester._failed_term_at_s -= harvester_module._CALM_S
    harvester._look_at_ends(elector)
    assert harvester.health()["healthy"] is True


def test_one_failed_term_makes_no_standby_unhealthy(harvester: Harvester) -> None:
    """The time since a failure is over does not count as time of failing."""
    harvester._note_of_term(UnavailableError("away"))
    harvester._failing_from_s, harvester._failed_at_s = time.monotonic() - 90, time.monotonic() - 80
    assert (harvester.health()["healthy"], harvester.health()["failing_s"]) == (True, 10.0)


def test_a_standby_looks_now_and_then(harvester: Harvester, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby checks the database and Kafka every ten seconds, and not at each turn of its loop."""
    monkeypatch.setattr(harvester_module, "_LOOK_AT_ENDS_S", 10.0)
    elector: Any = SimpleNamespace(topic="t", failure=None)
    harvester._looked_at_s -= 11
    for _ in range(3):
        harvester._look_at_ends(elector)
    assert ends.requested == 1


def test_one_failure_is_one_warning(harvester: Harvester, caplog: pytest.LogCaptureFixture) -> None:
    """A repeated failure is logged once, and its duration counts from the first time."""
    harvester._note(UnavailableError("away"))
    harvester._failing_from_s -= 7
    harvester._note(UnavailableError("away"))
    assert (caplog.text.count("away"), harvester.failing_s >= 7) == (1, True)


@pytest.mark.slow
def test_a_pause_ends_when_a_signal_stops_the_harvester(harvester: Harvester) -> None:
    """A signal handler runs in the thread that pauses, and must still be able to end the pause."""
    before = signal.signal(signal.SIGUSR1, lambda *_: harvester.stop())
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        harvester._pause(10_000)
    finally:
        signal.signal(signal.SIGUSR1, before)
    began_s = time.monotonic()
    harvester._is_stopped = False
    harvester._pause(0.2)
    assert time.monotonic() - began_s >= 0.2


@pytest.mark.slow
def test_a_long_answer_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is that of one piece, so a scrape over a slow link gets all of it."""
    body, sizes = bytes(24_000_000), list[int]()

    def recorded(handler: Any) -> None:  # noqa: ANN401 - the handler's class is local
        setup(handler)
        write = handler.wfile.write

        def write_piece(piece: bytes) -> Any:  # noqa: ANN401 - as the real one
            sizes.append(len(piece))
            return write(piece)

        handler.wfile.write = write_piece

    with HealthServer(lambda: {"healthy": True}, metrics=lambda: body) as server:
        assert server._server is not None
        handlers: Any = server._server.RequestHandlerClass
        setup = handlers.setup
        monkeypatch.setattr(handlers, "setup", recorded)
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WITHIN_S) as answer:
            assert answer.read() == body
    assert max(sizes) == health_server._SENT_BYTES
