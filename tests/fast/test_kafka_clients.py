"""Kafka clients that reach no Kafka: one clear line within the time-out, and nothing on stderr."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_END, TopicPartition

from marshal_dagster.errors import ConfigurationError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import ClientLog
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.connection_errors import FailureCause, reason_in
from marshal_dagster.protocol.state import OffsetBounds
from tests.conditions import wait_until

TIMEOUT_S = 0.5
SLACK_S = 1.0

Make = Callable[[KafkaConnection], tuple[clients.Client, ClientLog]]
MAKERS: dict[str, Make] = {
    "producer": lambda to: clients.producer(to, delivery_timeout_ms=500, client_id="p"),
    "consumer": lambda to: clients.consumer(to, client_id="c"),
    "admin": lambda to: clients.admin(to, client_id="a"),
}


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | None], int]]:
    """Start a server that answers each connection with some bytes, or closes it for `b""`, or says nothing for None."""
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
            with suppress(OSError):  # the client is gone, or the test is over
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
    """Give a connection to a port here, or to servers by name."""
    servers = f"127.0.0.1:{servers}" if isinstance(servers, int) else servers
    return KafkaConnection.from_settings({"bootstrap_servers": servers, "timeout_s": TIMEOUT_S} | fields)


def reached(make: Make, connection: KafkaConnection) -> str:
    """Try to reach and give the one line that tells why not."""
    client, log = make(connection)
    start = time.monotonic()
    try:
        with pytest.raises(UnavailableError) as caught:
            clients.reach(client, log, timeout_s=connection.timeout_s)
        assert time.monotonic() - start < connection.timeout_s + SLACK_S
    finally:
        clients.close_client(client, log)
    message = str(caught.value)
    assert "\n" not in message
    assert f"Kafka at {connection.bootstrap_servers} cannot be reached: " in message
    return message


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_that_listens_is_told_within_the_time_out(
    kind: str, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each kind of client says that the connection was refused, and writes nothing to stderr."""
    message = reached(MAKERS[kind], connection_to(free_port))
    assert "Connection refused (tried for 0.5 s); start Kafka there" in message
    assert capfd.readouterr() == ("", "")


def test_a_name_that_is_not_known_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong host name is told as such."""
    message = reached(MAKERS["admin"], connection_to("no-such-host.invalid:9092", timeout_s=1))
    assert "Failed to resolve 'no-such-host.invalid:9092'" in message
    assert "check bootstrap_servers" in message
    assert capfd.readouterr() == ("", "")


def test_of_several_servers_the_one_that_fails_is_named(free_port: int) -> None:
    """With more than one server the message says of which it speaks."""
    message = reached(MAKERS["admin"], connection_to(f"127.0.0.1:{free_port},no-such-host.invalid:9092", timeout_s=1))
    assert "Failed to resolve 'no-such-host.invalid:9092'" in message


@pytest.mark.parametrize("kind", MAKERS)
def test_a_port_that_says_nothing_is_told_within_the_time_out(
    kind: str, serve: Callable[[bytes | None], int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that accepts and is silent does not hold anybody longer than the time-out."""
    message = reached(MAKERS[kind], connection_to(serve(None)))
    assert "no answer" in message or "does not answer" in message
    assert "check " in message
    assert capfd.readouterr() == ("", "")


def test_a_port_that_closes_each_connection_is_told(serve: Callable[[bytes | None], int]) -> None:
    """A server that hangs up is told with what mostly causes it."""
    message = reached(MAKERS["producer"], connection_to(serve(b"")))
    assert "the server closes the connection" in message
    assert "check security_protocol" in message


def test_what_answers_but_is_not_kafka_is_told_without_waiting(serve: Callable[[bytes | None], int]) -> None:
    """An answer of another protocol cannot mend itself: it is told after a second, however long the time-out is."""
    port = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    client, log = MAKERS["admin"](connection_to(port))
    start = time.monotonic()
    with pytest.raises(
        UnavailableError, match="does not speak this protocol, or is not Kafka; check security_protocol"
    ):
        clients.reach(client, log, timeout_s=30)
    assert time.monotonic() - start < 1 + SLACK_S
    clients.close_client(client, log)


def test_a_server_without_tls_is_told(serve: Callable[[bytes | None], int]) -> None:
    """Asking for TLS where there is none is told."""
    message = reached(MAKERS["admin"], connection_to(serve(b"\x00" * 64), security_protocol="SSL"))
    assert "SSL" in message
    assert "security_protocol" in message


def test_topics_that_cannot_be_asked_tell_why(free_port: int) -> None:
    """A question to a broker that is down raises the same line; best-effort commits give it as text."""
    with Topics(connection_to(free_port)) as topics:
        with pytest.raises(UnavailableError, match="Connection refused"):
            topics.describe("orders")
        text = topics.commit_group_offsets("g", "orders", {0: 1})
    assert text is not None
    assert "Connection refused" in text


class ElectingClient:
    """A consumer that answers with these bounds of each partition, one after another; the last ones from then on."""

    partitions = 1
    leader = 1

    def __init__(self, *bounds: tuple[int, int]) -> None:
        self.bounds = list(bounds)
        self.asked = 0

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Answer: first for the starts, then for the ends."""
        is_end = wanted[0].offset == OFFSET_END
        self.asked += not is_end
        offset = self.bounds[min(self.asked, len(self.bounds)) - 1][is_end]
        return [TopicPartition(place.topic, place.partition, offset) for place in wanted]

    def list_topics(self, topic: str, **_: object) -> SimpleNamespace:
        """Tell of the topic that each of its partitions has a leader."""
        leaders = {number: SimpleNamespace(leader=self.leader) for number in range(self.partitions)}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=leaders)})

    def poll(self, _: float) -> None:
        """Nothing has come."""


class OfTimes(ElectingClient):
    """One that answers with these offsets, one after another, whatever it is asked for."""

    def __init__(self, *offsets: int) -> None:
        super().__init__()
        self.offsets = offsets

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Answer."""
        offset = self.offsets[min(self.asked, len(self.offsets) - 1)]
        self.asked += 1
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
def test_that_no_record_is_so_young_is_asked_twice(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, ...], found: dict[int, int]
) -> None:
    """While a leader is elected the answer may look the same: in between it is heard of, by the partition's end.

    An offset that equals the time is one only if the partition goes beyond it, else the question was left in place.
    """
    with topics_of(OfTimes(*answers), monkeypatch) as asked:
        assert asked.offsets_at("orders", [0], 5) == found


class Counting(ElectingClient):
    """One that notes for how many partitions it is asked at once, and answers with their numbers."""

    partitions = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def offsets_for_times(self, wanted: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        """Answer."""
        self.sizes.append(len(wanted))
        return [TopicPartition(place.topic, place.partition, place.partition) for place in wanted]


def test_many_partitions_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request costs the client library the square of its partitions: 10,000 at once took seconds."""
    client = Counting()
    with topics_of(client, monkeypatch, timeout_s=60) as asked:
        numbers = range(10_000)
        assert asked.offsets("orders", numbers) == {each: OffsetBounds(each, each) for each in numbers}
        assert asked.offsets_at("orders", numbers, 20_000) == {each: each for each in numbers}
    assert max(client.sizes) <= 500
    assert sum(client.sizes) == 3 * len(numbers)


def topics_of(client: ElectingClient, monkeypatch: pytest.MonkeyPatch, timeout_s: float = TIMEOUT_S) -> Topics:
    """Ask `client` as if it had a connection."""
    made = (client, ClientLog("a", "broker:9092"))
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.admin", lambda *_, **__: made)
    monkeypatch.setattr("marshal_dagster.kafka.offsets.consumer", lambda *_, **__: made)
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.reach", lambda *_, **__: None)
    return Topics(connection_to(1, timeout_s=timeout_s))


@pytest.mark.parametrize("unknown", [(-1001, -1001), (5, -1001), (-1001, 5), (-1, -1)])
def test_offsets_that_are_not_known_yet_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, unknown: tuple[int, int]
) -> None:
    """While a leader is elected the client library may answer without an error, and with an offset that none is."""
    with topics_of(ElectingClient(unknown, unknown, (3, 68)), monkeypatch) as asked:
        assert asked.offsets("orders", [0]) == {0: OffsetBounds(3, 68)}


def test_offsets_that_are_never_known_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no answer that a caller could take for a log that is empty or was truncated."""
    with (
        topics_of(ElectingClient((0, -1001)), monkeypatch) as asked,
        pytest.raises(UnavailableError, match="cannot look up the offsets of topic 'orders'"),
    ):
        asked.offsets("orders", [0])


class Noting(ElectingClient):
    """One that notes what it is asked; its partitions have no leader for the first few times that it is looked."""

    partitions = 2

    def __init__(self, without_leader: int = 0) -> None:
        super().__init__((3, 68))
        self.calls: list[str] = []
        self.without_leader = without_leader

    def offsets_for_times(self, wanted: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
        """Answer."""
        self.calls.append("offsets")
        return super().offsets_for_times(wanted, timeout_s)

    def list_topics(self, topic: str, **further: object) -> SimpleNamespace:
        """Tell of the leaders."""
        self.calls.append("leaders")
        self.leader = -1 if self.calls.count("leaders") <= self.without_leader else 1
        return super().list_topics(topic, **further)


def test_leaders_are_known_before_offsets_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of leaders shows why offsets cannot be read; it is repeated after a time, and as topics grow."""
    client = Noting(without_leader=2)
    with topics_of(client, monkeypatch) as asked:
        asked.offsets("orders", [0, 1])
        assert client.calls == ["leaders"] * 3 + ["offsets"] * 2
        asked.offsets("orders", [0])
        assert client.calls[5:] == ["offsets"] * 2
        with pytest.raises(TopicNotFoundError, match="no partition 2"):
            asked.offsets("orders", [2])
        assert client.calls[7:] == ["leaders"]
        monkeypatch.setattr("marshal_dagster.kafka.offsets._LEADERS_KNOWN_S", 0.0)
        asked.offsets("orders", [0])
        assert client.calls[8:] == ["leaders", "offsets", "offsets"]


class Held(ElectingClient):
    """One that answers when it may, and notes whether it was closed by then."""

    def __init__(self) -> None:
        super().__init__((3, 68))
        self.may_answer, self.is_closed = threading.Event(), threading.Event()
        self.asked_by = threading.Semaphore(0)

    def list_topics(self, topic: str, **further: object) -> SimpleNamespace:
        """Wait."""
        self.asked_by.release()
        assert self.may_answer.wait(10)
        assert not self.is_closed.is_set()
        return super().list_topics(topic, **further)

    def __exit__(self, *_: object) -> None:
        self.is_closed.set()


def test_a_client_is_closed_by_the_last_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is freed by closing: whoever asks meanwhile would crash the process."""
    client, found = Held(), []
    topics = topics_of(client, monkeypatch)
    asking = [threading.Thread(target=lambda: found.append(topics.offsets("orders", [0]))) for _ in range(2)]
    for thread in asking:
        thread.start()
    assert client.asked_by.acquire(timeout=10)
    wait_until(lambda: topics._borrowers == len(asking), "both ask", 10)
    topics.close()
    assert not client.is_closed.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        topics.offsets("orders", [0])
    client.may_answer.set()
    for thread in asking:
        thread.join(10)
    assert found == [{0: OffsetBounds(3, 68)}] * 2
    assert client.is_closed.wait(10)


def test_topics_that_were_closed_say_so(free_port: int) -> None:
    """A question after closing is a mistake of the program."""
    topics = Topics(connection_to(free_port))
    topics.close()
    topics.close()
    with pytest.raises(RuntimeError, match="closed"):
        topics.broker_count()


def test_letting_go_does_not_wait_for_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    """Closing a client whose name look-up is under way takes no time."""
    client, log = MAKERS["admin"](connection_to("no-such-host.invalid:9092"))
    with pytest.raises(UnavailableError):
        clients.reach(client, log, timeout_s=0.6)
    start = time.monotonic()
    clients.close_client(client, log)
    assert time.monotonic() - start < SLACK_S
    assert capfd.readouterr() == ("", "")


def test_check_reachable_uses_the_connections_own_time_out(free_port: int) -> None:
    """One call tells whether there is a cluster."""
    with pytest.raises(UnavailableError, match="Connection refused"):
        clients.check_reachable(connection_to(free_port))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_setting_that_the_library_does_not_know_is_refused(kind: str) -> None:
    """A misspelt client setting is a configuration error that names it."""
    with pytest.raises(ConfigurationError, match=r"no\.such\.setting.*check client_settings"):
        MAKERS[kind](connection_to(9092, client_settings={"no.such.setting": "1"}))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_a_setting_that_the_library_stumbles_over_is_refused(
    kind: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that it raises for a value of another kind is a configuration error too."""
    name = {"producer": "Producer", "consumer": "Consumer", "admin": "AdminClient"}[kind]

    def stumble(_: object) -> None:
        raise error("expected a callable function")

    monkeypatch.setattr(f"marshal_dagster.kafka.clients.{name}", stumble)
    with pytest.raises(ConfigurationError, match="expected a callable function; check client_settings"):
        MAKERS[kind](connection_to(9092))


def test_a_file_that_holds_no_certificate_is_refused(tmp_path: Path) -> None:
    """A file of authorities without a certificate is told when a client is made."""
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location"):
        MAKERS["admin"](connection_to(9092, security_protocol="SSL", ssl_ca_location=str(path)))


def test_what_a_client_logs_goes_to_python_at_debug(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """The library's lines are forwarded at DEBUG, under the client's id, and at no other level."""
    with caplog.at_level(logging.DEBUG):
        reached(MAKERS["producer"], connection_to(free_port))
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
        ("a:1/2: Connection setup timed out in state CONNECT", FailureCause.UNREACHABLE, "a:1", None),
        ("Something else", FailureCause.UNKNOWN, "", "Something else"),
        ("", FailureCause.UNKNOWN, "", ""),
    ],
)
def test_a_line_of_the_librarys_log_is_understood(
    line: str, cause: FailureCause, server: str, text: str | None
) -> None:
    """Cause, server and words are found in what librdkafka 2.8 and 2.16 write."""
    found = reason_in(line)
    assert (found.cause, found.server) == (cause, server)
    assert text is None or found.text == text
    assert found.advice


def test_the_more_telling_reason_is_kept() -> None:
    """A closed connection does not displace the wrong password that came before it; a clear log has no reason."""
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
    """What was told a minute ago is no explanation for what fails now."""
    log = ClientLog("a", "kafka:1")
    log.log(40, "%s [%s] %s", "FAIL", "a", "[thrd:kafka:1/1]: kafka:1/1: Connect failed: Connection refused")
    now = time.monotonic()
    assert "refused" in str(log.unavailable(3))
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert "refused" not in str(log.unavailable(3))
