"""Kafka clients that cannot reach a broker raise a one-line error within the timeout and write nothing to stderr."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_END, KafkaError, TopicPartition

from marshal_dagster.errors import ConfigurationError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import ClientLog
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.connection_errors import FailureCause, FailureReason, reason_in
from marshal_dagster.protocol.state import OffsetBounds
from tests.conditions import WITHIN_S, wait_until

TIMEOUT_S = 0.5
REFUSED = "Connection refused"

Make = Callable[[KafkaConnection], tuple[clients.Client, ClientLog]]
MAKERS: dict[str, Make] = {
    "producer": lambda to: clients.producer(to, delivery_timeout_ms=500, client_id="p"),
    "consumer": lambda to: clients.consumer(to, client_id="c"),
    "admin": lambda to: clients.admin(to, client_id="a"),
}


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | None], int]]:
    """Yield a function that starts a server. It sends `answer` to each connection; `b""` closes, None sends nothing."""
    listeners: list[socket.socket] = []
    held: list[socket.socket] = []

    def work(listener: socket.socket, answer: bytes | None) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            held.append(connected)
            if answer is None:
                continue
            with suppress(OSError):  # the client has disconnected, or the test is over
                connected.recv(1)
                connected.sendall(answer)
            connected.close()

    def start(answer: bytes | None) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=work, args=(listener, answer), daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for each in (*listeners, *held):
        each.close()


def connection_to(servers: str | int, **fields: object) -> KafkaConnection:
    """Return a connection to a local port, or to the servers of a list."""
    servers = f"127.0.0.1:{servers}" if isinstance(servers, int) else servers
    return KafkaConnection.from_settings({"bootstrap_servers": servers, "timeout_s": TIMEOUT_S} | fields)


@contextmanager
def time_from(text: str) -> Iterator[None]:
    """Let the timeouts of clients start when one of them has found a reason with this text."""
    start_s, found = time.monotonic(), threading.Event()
    consider = ClientLog.consider

    def watch(log: ClientLog, reason: FailureReason) -> None:
        consider(log, reason)
        if text in reason.text:
            found.set()

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if found.is_set() else start_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientLog, "consider", watch)
        patch.setattr(clients, "time", clock)
        yield


def reached(make: Make, connection: KafkaConnection, reason: str = "") -> str:
    """Return the message of the error that the client raises when it cannot reach Kafka. Check that it is one line.

    If the message contains `reason`, its timeout starts when the client library has reported that.
    """
    client, log = make(connection)
    try:
        with time_from(reason) if reason else nullcontext(), pytest.raises(UnavailableError) as caught:
            clients.reach(client, log, timeout_s=connection.timeout_s)
    finally:
        clients.close_client(client, log)
    message = str(caught.value)
    assert "\n" not in message
    assert f"Kafka at {connection.bootstrap_servers} cannot be reached: " in message
    return message


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_that_listens_is_reported_within_the_time_out(
    kind: str, unused_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """If no process listens, each kind of client reports the refused connection and writes nothing to stderr."""
    message = reached(MAKERS[kind], connection_to(unused_port), REFUSED)
    assert "Connection refused (tried for 0.5 s); start Kafka there" in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_a_name_that_is_not_known_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """The error for an unknown host name shows the name and advises to check bootstrap_servers."""
    message = reached(MAKERS["admin"], connection_to("no-such-host.invalid:9092", timeout_s=1), "Failed to resolve")
    assert "Failed to resolve 'no-such-host.invalid:9092'" in message
    assert "check bootstrap_servers" in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_of_several_servers_the_one_that_fails_is_named(unused_port: int) -> None:
    """If one of several servers has an unknown name, the message shows that server."""
    connection = connection_to(f"127.0.0.1:{unused_port},no-such-host.invalid:9092", timeout_s=1)
    message = reached(MAKERS["admin"], connection, "Failed to resolve")
    assert "Failed to resolve 'no-such-host.invalid:9092'" in message


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MAKERS)
def test_a_port_that_says_nothing_is_reported_within_the_time_out(
    kind: str, serve: Callable[[bytes | None], int], capfd: pytest.CaptureFixture[str]
) -> None:
    """If a server accepts connections and sends nothing, each kind of client gives up within the timeout."""
    message = reached(MAKERS[kind], connection_to(serve(None)))
    assert "no answer" in message or "does not answer" in message
    assert "check " in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_a_port_that_closes_each_connection_is_reported(serve: Callable[[bytes | None], int]) -> None:
    """If a server closes each connection, the message names the usual cause."""
    message = reached(MAKERS["producer"], connection_to(serve(b"")), "the server closes the connection")
    assert "the server closes the connection" in message
    assert "check security_protocol" in message


@pytest.mark.thorough
def test_what_answers_but_is_not_kafka_is_reported_without_waiting(serve: Callable[[bytes | None], int]) -> None:
    """If the server is not Kafka, retrying cannot help, so the client fails long before its timeout."""
    port = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    client, log = MAKERS["admin"](connection_to(port))
    with pytest.raises(
        UnavailableError, match="does not speak this protocol, or is not Kafka; check security_protocol"
    ):
        clients.reach(client, log, timeout_s=10_000)
    clients.close_client(client, log)


@pytest.mark.thorough
def test_a_server_without_tls_is_reported(serve: Callable[[bytes | None], int]) -> None:
    """If the client uses TLS and the server does not, the message names SSL and `security_protocol`."""
    message = reached(MAKERS["admin"], connection_to(serve(b"\x00" * 64), security_protocol="SSL"), "SSL")
    assert "SSL" in message
    assert "security_protocol" in message


@pytest.mark.thorough
def test_topics_that_cannot_be_requested_report_why(unused_port: int) -> None:
    """If a broker is down, `Topics` raises an error with the reason. A best-effort commit returns the error as text."""
    with Topics(connection_to(unused_port)) as topics, time_from(REFUSED):
        with pytest.raises(UnavailableError, match=REFUSED):
            topics.describe("orders")
        text = topics.commit_group_offsets("g", "orders", {0: 1})
    assert text is not None
    assert REFUSED in text


class ElectingClient:
    """A consumer that returns these offset bounds for each partition, one pair per query. The last pair is repeated."""

    partitions = 1
    leader = 1

    def __init__(self, *bounds: tuple[int, int]) -> None:
        self.bounds = list(bounds)
        self.requested = 0

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Return offsets. The first query is for the starts, the second for the ends."""
        is_end = wanted[0].offset == OFFSET_END
        self.requested += not is_end
        offset = self.bounds[min(self.requested, len(self.bounds)) - 1][is_end]
        return [TopicPartition(place.topic, place.partition, offset) for place in wanted]

    def list_topics(self, topic: str, **_: object) -> SimpleNamespace:
        """Return metadata in which each partition of the topic has a leader."""
        leaders = {number: SimpleNamespace(leader=self.leader) for number in range(self.partitions)}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=leaders)})

    def poll(self, _: float) -> None:
        """Receive no message."""


class OfTimes(ElectingClient):
    """A client that returns these offsets one after another, for a time and for an end alike."""

    def __init__(self, *offsets: int) -> None:
        super().__init__()
        self.offsets = offsets

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Return the next offset for each partition."""
        offset = self.offsets[min(self.requested, len(self.offsets) - 1)]
        self.requested += 1
        return [TopicPartition(place.topic, place.partition, offset) for place in wanted]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ((7,), {0: 7}),
        ((-1001, 7), {0: 7}),
        ((-1, 9, -1), {}),
        ((-1, 9, 8), {0: 8}),
        ((-1, -1, -1, 9, 8), {0: 8}),
        ((-1, 9, -1001, 7), {0: 7}),
        ((5, 6), {0: 5}),
        ((5, 5, 7), {0: 7}),
    ],
    ids=str,
)
def test_that_no_record_is_so_young_is_requested_twice(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, ...], found: dict[int, int]
) -> None:
    """The answer that no record is that recent is checked by a second query; a leader election may also cause it.

    Between the two queries the end of the partition is looked up. An answer that equals the time is an offset only if
    the partition ends after it. Otherwise the client library has left the query unanswered.
    """
    with topics_of(OfTimes(*answers), monkeypatch) as requested:
        assert requested.offsets_at("orders", [0], 5) == found


class Counting(ElectingClient):
    """A client that records how many partitions each query has, and returns the partition numbers as offsets."""

    partitions = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Return the partition number for each partition."""
        self.sizes.append(len(wanted))
        return [TopicPartition(place.topic, place.partition, place.partition) for place in wanted]


@pytest.mark.slow
def test_many_partitions_are_requested_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries for many partitions are split. The client library needs quadratic time: 10,000 at once took seconds."""
    client = Counting()
    with topics_of(client, monkeypatch) as requested:
        numbers = range(10_000)
        assert requested.offsets("orders", numbers) == {each: OffsetBounds(each, each) for each in numbers}
        assert requested.offsets_at("orders", numbers, 20_000) == {each: each for each in numbers}
    assert max(client.sizes) <= 500
    assert sum(client.sizes) == 3 * len(numbers)


def topics_of(client: ElectingClient, monkeypatch: pytest.MonkeyPatch, timeout_s: float = WITHIN_S) -> Topics:
    """Return `Topics` that query `client` as if it were connected."""
    made = (client, ClientLog("a", "broker:9092"))
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.admin", lambda *_, **__: made)
    monkeypatch.setattr("marshal_dagster.kafka.offsets.consumer", lambda *_, **__: made)
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.reach", lambda *_, **__: None)
    return Topics(connection_to(1, timeout_s=timeout_s))


@pytest.mark.parametrize("unknown", [(-1001, -1001), (5, -1001), (-1001, 5), (-1, -1)])
def test_offsets_that_are_not_known_yet_are_requested_again(
    monkeypatch: pytest.MonkeyPatch, unknown: tuple[int, int]
) -> None:
    """An unknown offset is queried again: the library may return one without an error during a leader election."""
    with topics_of(ElectingClient(unknown, unknown, (3, 68)), monkeypatch) as requested:
        assert requested.offsets("orders", [0]) == {0: OffsetBounds(3, 68)}


@pytest.mark.slow
def test_offsets_that_are_never_known_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset that stays unknown raises an error, so the caller does not see an empty or truncated log."""
    with (
        topics_of(ElectingClient((0, -1001)), monkeypatch, TIMEOUT_S) as requested,
        pytest.raises(UnavailableError, match="cannot look up the offsets of topic 'orders'"),
    ):
        requested.offsets("orders", [0])


class Noting(ElectingClient):
    """A client that records its calls. Its partitions have no leader for the first `without_leader` look-ups."""

    partitions = 2

    def __init__(self, without_leader: int = 0) -> None:
        super().__init__((3, 68))
        self.calls: list[str] = []
        self.without_leader = without_leader

    def offsets_for_times(self, wanted: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
        """Record the call and return the bounds."""
        self.calls.append("offsets")
        return super().offsets_for_times(wanted, timeout_s)

    def list_topics(self, topic: str, **further: object) -> SimpleNamespace:
        """Record the call and return the leaders."""
        self.calls.append("leaders")
        self.leader = -1 if self.calls.count("leaders") <= self.without_leader else 1
        return super().list_topics(topic, **further)


def test_leaders_are_known_before_offsets_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders are looked up before offsets, to explain a failure.

    The look-up is repeated after a while, and when a query names a partition that was not known.
    """
    client = Noting(without_leader=2)
    with topics_of(client, monkeypatch) as requested:
        requested.offsets("orders", [0, 1])
        assert client.calls == ["leaders"] * 3 + ["offsets"] * 2
        requested.offsets("orders", [0])
        assert client.calls[5:] == ["offsets"] * 2
        with pytest.raises(TopicNotFoundError, match="no partition 2"):
            requested.offsets("orders", [2])
        assert client.calls[7:] == ["leaders"]
        monkeypatch.setattr("marshal_dagster.kafka.offsets._LEADERS_KNOWN_S", 0.0)
        requested.offsets("orders", [0])
        assert client.calls[8:] == ["leaders", "offsets", "offsets"]


def test_partitions_are_listed_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added partitions are seen at once, and the brokers' temporary failures are passed over."""
    client = Noting()
    with topics_of(client, monkeypatch) as requested:
        assert requested.partition_numbers("orders") == (0, 1)
        client.partitions = 3
        assert requested.partition_numbers("orders") == (0, 1, 2)
        assert client.calls == ["leaders"] * 2


class Held(ElectingClient):
    """A client that waits until it may answer. It checks that it is not closed before it does."""

    def __init__(self) -> None:
        super().__init__((3, 68))
        self.may_answer, self.is_closed = threading.Event(), threading.Event()
        self.requested_by = threading.Semaphore(0)

    def list_topics(self, topic: str, **further: object) -> SimpleNamespace:
        """Wait until the test allows an answer."""
        self.requested_by.release()
        self.may_answer.wait()
        assert not self.is_closed.is_set()
        return super().list_topics(topic, **further)

    def __exit__(self, *_: object) -> None:
        self.is_closed.set()


def test_a_client_is_closed_by_the_last_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thread that uses a client closes it.

    Closing it earlier frees its memory, and the process would crash.
    """
    client, found = Held(), []
    topics = topics_of(client, monkeypatch)
    asking = [threading.Thread(target=lambda: found.append(topics.offsets("orders", [0]))) for _ in range(2)]
    for thread in asking:
        thread.start()
    client.requested_by.acquire()
    wait_until(lambda: topics._borrowers == len(asking), "both ask")
    topics.close()
    assert not client.is_closed.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        topics.offsets("orders", [0])
    client.may_answer.set()
    for thread in asking:
        thread.join()
    assert found == [{0: OffsetBounds(3, 68)}] * 2
    client.is_closed.wait()


class Unanswered(ElectingClient):
    """An admin client of which one broker does not list its consumer groups in time."""

    def list_consumer_groups(self, **_: object) -> "Future[SimpleNamespace]":
        """Return the groups of the other brokers, and the error as the client library has it: not an exception."""
        listed: Future[SimpleNamespace] = Future()
        listed.set_result(SimpleNamespace(valid=[], errors=[KafkaError(KafkaError._TIMED_OUT)]))
        return listed


def test_a_broker_that_lists_no_groups_in_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is not "no consumers". A KafkaError of the client library can be raised, but no `except` catches it."""
    with (
        topics_of(Unanswered(), monkeypatch) as requested,
        pytest.raises(UnavailableError, match="cannot list the consumer groups"),
    ):
        requested.has_consumers("etl")


def test_topics_that_were_closed_say_so(unused_port: int) -> None:
    """A query after `close` is a programming error and raises RuntimeError."""
    topics = Topics(connection_to(unused_port))
    topics.close()
    topics.close()
    with pytest.raises(RuntimeError, match="closed"):
        topics.broker_count()


@pytest.mark.thorough
def test_letting_go_does_not_wait_for_a_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Closing a client during a name look-up does not wait for that look-up."""
    client, log = MAKERS["admin"](connection_to("no-such-host.invalid:9092"))
    with time_from("Failed to resolve"), pytest.raises(UnavailableError):
        clients.reach(client, log, timeout_s=TIMEOUT_S)
    close, looked_up, is_closed = clients._close, threading.Event(), threading.Event()

    def close_slowly(client: clients.Client) -> None:
        looked_up.wait()
        close(client)
        is_closed.set()

    monkeypatch.setattr(clients, "_close", close_slowly)
    clients.close_client(client, log)
    looked_up.set()
    is_closed.wait()
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_check_reachable_uses_the_connections_own_time_out(unused_port: int) -> None:
    """`check_reachable` raises an error within the timeout of the connection if no broker answers."""
    with time_from(REFUSED), pytest.raises(UnavailableError, match=REFUSED):
        clients.check_reachable(connection_to(unused_port))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_setting_that_the_library_does_not_know_is_refused(kind: str) -> None:
    """A misspelt client setting raises a configuration error that names it."""
    with pytest.raises(ConfigurationError, match=r"no\.such\.setting.*check client_settings"):
        MAKERS[kind](connection_to(9092, client_settings={"no.such.setting": "1"}))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_a_setting_that_the_library_stumbles_over_is_refused(
    kind: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that the client library raises for a value of the wrong type becomes a configuration error."""
    name = {"producer": "Producer", "consumer": "Consumer", "admin": "AdminClient"}[kind]

    def stumble(_: object) -> None:
        raise error("expected a callable function")

    monkeypatch.setattr(f"marshal_dagster.kafka.clients.{name}", stumble)
    with pytest.raises(ConfigurationError, match="expected a callable function; check client_settings"):
        MAKERS[kind](connection_to(9092))


def test_a_file_that_holds_no_certificate_is_refused(tmp_path: Path) -> None:
    """A CA file without a certificate raises a configuration error when a client is created."""
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location"):
        MAKERS["admin"](connection_to(9092, security_protocol="SSL", ssl_ca_location=str(path)))


@pytest.mark.thorough
def test_what_a_client_logs_goes_to_python_at_debug(unused_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """The client library's log lines are forwarded at DEBUG with the client's id, and at no other level."""
    with caplog.at_level(logging.DEBUG):
        reached(MAKERS["producer"], connection_to(unused_port), REFUSED)
    lines = [record for record in caplog.records if record.name == "marshal_dagster.kafka.clients"]
    assert any("Connection refused" in record.getMessage() for record in lines)
    assert {record.levelno for record in lines} == {logging.DEBUG}
    assert all(record.getMessage().startswith("p: ") for record in lines)


@pytest.mark.parametrize(
    ("line", "cause", "server", "text"),
    [
        (
            (
                "[thrd:127.0.0.1:1/bootstrap]: 127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: "
                "Connection refused (after 0ms in state CONNECT, 1 identical error(s) suppressed)"
            ),
            FailureCause.REFUSED,
            "127.0.0.1:1",
            "Connect to ipv4#127.0.0.1:1 failed: Connection refused",
        ),
        (
            (
                "sasl_ssl://kafka:9095/1: SASL authentication error: Authentication failed: Invalid username or "
                "password (after 316ms in state AUTH_REQ)"
            ),
            FailureCause.AUTHENTICATION,
            "kafka:9095",
            "SASL authentication error: Authentication failed: Invalid username or password",
        ),
        (
            (
                "[thrd:sasl_ssl://[::1]:9095/bootstrap]: sasl_ssl://[::1]:9095/bootstrap: SSL handshake failed: "
                "error:0A000086:SSL routines::certificate verify failed: broker certificate could not be "
                "verified, verify that ssl.ca.location is correctly configured (after 116ms in state SSL_HANDSHAKE)"
            ),
            FailureCause.CERTIFICATE,
            "[::1]:9095",
            "certificate verify failed: the server's certificate is not trusted",
        ),
        (
            (
                "ssl://a:1/bootstrap: Receive failed: error:0A000412:SSL routines::ssl/tls alert bad certificate: SSL "
                "alert number 42 (after 3ms in state APIVERSION_QUERY)"
            ),
            FailureCause.OWN_CERTIFICATE,
            "a:1",
            "the server does not accept the certificate of this client, or this client has none",
        ),
        (
            (
                "ssl://a:1/bootstrap: SSL handshake failed: Disconnected: SSL connection closed by peer: connecting to "
                "a PLAINTEXT broker listener? (after 3ms in state SSL_HANDSHAKE)"
            ),
            FailureCause.PROTOCOL,
            "a:1",
            "the server does not speak SSL there",
        ),
        (
            (
                "sasl_plaintext://a:1/bootstrap: SASL PLAIN mechanism handshake failed: Broker: Request not valid in "
                "current SASL state: broker's supported mechanisms:  (after 1ms in state AUTH_HANDSHAKE)"
            ),
            FailureCause.PROTOCOL,
            "a:1",
            "the server does not speak SASL there",
        ),
        (
            (
                "sasl_plaintext://a:1/bootstrap: SASL GSSAPI mechanism handshake failed: Broker: Unsupported SASL "
                "mechanism: broker's supported mechanisms: PLAIN (after 1ms in state AUTH_HANDSHAKE)"
            ),
            FailureCause.PROTOCOL,
            "a:1",
            (
                "SASL GSSAPI mechanism handshake failed: Broker: Unsupported SASL mechanism: broker's supported "
                "mechanisms: PLAIN"
            ),
        ),
        (
            "a:1/bootstrap: Failed to resolve 'a:1': Name or service not known (after 0ms in state CONNECT)",
            FailureCause.NAME,
            "a:1",
            "Failed to resolve 'a:1': Name or service not known",
        ),
        (
            "a:1/bootstrap: ApiVersionRequest failed: Local: Timed out: probably due to broker version < 0.10",
            FailureCause.SILENT,
            "a:1",
            "the server accepts the connection and does not answer",
        ),
        (
            (
                "a:1/bootstrap: Disconnected while requesting ApiVersion: might be caused by incorrect "
                "security.protocol configuration (connecting to a SSL listener?) (after 1ms in state APIVERSION_QUERY)"
            ),
            FailureCause.CLOSED,
            "a:1",
            "the server closes the connection",
        ),
        (
            (
                "a:1/1: Disconnected: verify that security.protocol is correctly configured, broker might require SASL "
                "authentication (after 1ms in state UP)"
            ),
            FailureCause.CLOSED,
            "a:1",
            "the server closes the connection",
        ),
        ("a:1/2: Connection setup timed out in state CONNECT", FailureCause.UNREACHABLE, "a:1", None),
        ("Something else", FailureCause.UNKNOWN, "", "Something else"),
        ("", FailureCause.UNKNOWN, "", ""),
    ],
)
def test_a_line_of_the_librarys_log_is_understood(
    line: str, cause: FailureCause, server: str, text: str | None
) -> None:
    """The cause, the server and the text are parsed from the log lines of librdkafka 2.8 and 2.16."""
    found = reason_in(line)
    assert (found.cause, found.server) == (cause, server)
    assert text is None or found.text == text
    assert found.advice


def test_the_more_telling_reason_is_kept() -> None:
    """A closed connection does not replace the wrong password that was logged before it. `clear` removes the reason."""
    log = ClientLog("a", "kafka:1")
    log.log(
        40, "%s [%s] %s", "FAIL", "a", "[thrd:kafka:1/1]: kafka:1/1: SASL authentication error: Authentication failed"
    )
    log.log(40, "%s [%s] %s", "FAIL", "a", "[thrd:kafka:1/1]: kafka:1/1: Disconnected (after 1ms in state UP)")
    log.log(40, "%s [%s] %s", "TERMINATE", "a", "certificate of nobody")
    assert log.reason is not None
    assert log.reason.cause is FailureCause.AUTHENTICATION
    assert "check username, password and sasl_mechanism" in str(log.unavailable(3))
    log.clear()
    assert "no answer (tried for 3 s)" in str(log.unavailable(3))


def test_a_reason_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason that was logged a minute ago does not explain a new failure."""
    log = ClientLog("a", "kafka:1")
    log.log(40, "%s [%s] %s", "FAIL", "a", "[thrd:kafka:1/1]: kafka:1/1: Connect failed: Connection refused")
    now = time.monotonic()
    assert "refused" in str(log.unavailable(3))
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert "refused" not in str(log.unavailable(3))
