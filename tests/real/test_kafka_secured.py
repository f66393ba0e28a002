"""TLS, passwords and rights on a real broker: which connections work, and which errors the others get."""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.topic_settings import create_coordination_topic, create_snapshot_topic
from marshal_dagster.errors import AuthorizationError, MarshalError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.authentication import LOGIN_HANDLER, NOT_FOR_SPARK
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.record_size import bytes_per_offset
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.spark.reader import read_ranges
from tests.cli import call
from tests.conditions import WITHIN_S, wait_until
from tests.real.secured_kafka import (
    PLAIN_PASSWORD,
    PLAIN_USER,
    SCRAM_PASSWORD,
    SCRAM_USER,
    SESSION_MS,
    STORE_PASSWORD,
    SecuredKafka,
    secured_kafka,
)
from tests.stderr_capture import lines_about
from tests.topics import grow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOKEN_CLIENT, TOKEN_SECRET = "etl", "of-the-token-client"
SECRETS = (PLAIN_PASSWORD, SCRAM_PASSWORD, STORE_PASSWORD, TOKEN_SECRET)
PATIENT_MS = round(WITHIN_S * 1_000)
"""A delivery timeout that ends only a test that hangs."""
WITH_PLAIN = {"sasl_mechanism": "PLAIN", "username": PLAIN_USER, "password": PLAIN_PASSWORD}
WITH_SCRAM = {"sasl_mechanism": "SCRAM-SHA-512", "username": SCRAM_USER, "password": SCRAM_PASSWORD}
WITH_SCRAM_256 = {**WITH_SCRAM, "sasl_mechanism": "SCRAM-SHA-256"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A broker with a listener for each security protocol."""
    with secured_kafka(tmp_path_factory.mktemp("secured")) as secured:
        yield secured


@pytest.fixture(scope="module")
def admin(secured: SecuredKafka) -> Iterator[Topics]:
    """An admin client with all rights."""
    with Topics(KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])) as topics:
        yield topics


def connect(
    secured: SecuredKafka,
    protocol: str,
    *,
    listener: str | None = None,
    **fields: Any,  # noqa: ANN401 - any field
) -> KafkaConnection:
    """Return a connection to the protocol's own listener, or to another one."""
    servers = secured.servers[listener or protocol]
    return KafkaConnection.from_settings(
        {"bootstrap_servers": servers, "security_protocol": protocol, "timeout_s": 30, **fields}
    )


def trusting(secured: SecuredKafka) -> dict[str, str]:
    """Return the field that makes the client trust the broker's certificate."""
    return {"ssl_ca_location": str(secured.authority)}


def known(secured: SecuredKafka) -> dict[str, str]:
    """Return the fields of the client's own certificate."""
    return {"ssl_certificate_location": str(secured.certificate), "ssl_key_location": str(secured.key)}


def as_text(secured: SecuredKafka) -> dict[str, str]:
    """Return the client's own certificate and key as PEM texts, as they come from a secret."""
    return {"ssl_certificate_pem": secured.certificate.read_text(), "ssl_key_pem": secured.key.read_text()}


def stored(secured: SecuredKafka) -> dict[str, str]:
    """Return the fields of a key store."""
    return {"ssl_keystore_location": str(secured.store), "ssl_keystore_password": STORE_PASSWORD}


def with_tokens(secured: SecuredKafka, client: str = TOKEN_CLIENT, **fields: Any) -> KafkaConnection:  # noqa: ANN401 - any field
    """Return a connection that gets tokens by client credentials, which the identity provider knows from now on."""
    secured.provider.client_secrets.setdefault(client, TOKEN_SECRET)
    return connect(
        secured,
        "SASL_SSL",
        listener="REAUTH",
        sasl_mechanism="OAUTHBEARER",
        **{
            "oauth_token_endpoint_url": secured.provider.url,
            "oauth_client_id": client,
            "oauth_client_secret": TOKEN_SECRET,
            **fields,
        },
        **trusting(secured),
    )


def with_callback(secured: SecuredKafka) -> KafkaConnection:
    """Return a connection whose tokens come from a function of the user; Spark does not read with it."""
    _providers[:] = [secured]
    return connect(
        secured,
        "SASL_SSL",
        listener="REAUTH",
        sasl_mechanism="OAUTHBEARER",
        oauth_callback=f"{__name__}:token_of_my_own",
        spark_source_options={LOGIN_HANDLER: NOT_FOR_SPARK},
        **trusting(secured),
    )


_providers: list[SecuredKafka] = []


def token_of_my_own() -> tuple[str, float]:
    """Return a token, as a function of a user does."""
    return _providers[0].provider.token("callback")


def test_each_way_of_connecting_works(secured: SecuredKafka) -> None:
    """Passwords with PLAIN and SCRAM, TLS with and without them, and a client certificate all work."""
    for connection in (
        connect(secured, "SASL_PLAINTEXT", **WITH_PLAIN),
        connect(secured, "SASL_PLAINTEXT", **WITH_SCRAM),
        connect(secured, "SASL_PLAINTEXT", **WITH_SCRAM_256),
        connect(secured, "SASL_SSL", **WITH_PLAIN, **trusting(secured)),
        connect(secured, "SASL_SSL", **WITH_SCRAM, **trusting(secured)),
        connect(secured, "SSL", **trusting(secured), **known(secured)),
        connect(secured, "SSL", ssl_ca_pem=secured.authority.read_text(), **as_text(secured)),
        connect(secured, "SSL", **trusting(secured), **stored(secured)),
        with_tokens(secured),
        with_callback(secured),
    ):
        clients.check_reachable(connection)


WRONG_WAYS: dict[str, tuple[str, str, dict[str, str], str]] = {
    "a wrong password": (
        "SASL_PLAINTEXT",
        "SASL_PLAINTEXT",
        {**WITH_PLAIN, "password": "wrong"},
        "Authentication failed",
    ),
    "a wrong password, SCRAM": ("SASL_SSL", "SASL_SSL", {**WITH_SCRAM, "password": "wrong"}, "Authentication failed"),
    "an unknown user": ("SASL_SSL", "SASL_SSL", {**WITH_SCRAM, "username": "nobody"}, "Authentication failed"),
    "no certificate of one's own": ("SSL", "SSL", {}, "requires a certificate of this client, which has none"),
    "a server's certificate that is out of date": ("SSL", "EXPIRED", {}, "the server's certificate has expired"),
    "another host's certificate": ("SSL", "ELSEWHERE", {}, "certificate is not for the host 127.0.0.1"),
    "TLS where there is none": ("SSL", "PLAINTEXT", {}, "SSL"),
    "TLS where there are passwords alone": ("SASL_SSL", "SASL_PLAINTEXT", WITH_SCRAM, "SSL"),
    "a password where none is wanted": ("SASL_PLAINTEXT", "PLAINTEXT", WITH_SCRAM, "does not speak SASL there"),
    "no password where one is wanted": (  # the server may close it for another reason, so the client tries again
        "PLAINTEXT",
        "SASL_PLAINTEXT",
        {"timeout_s": "5"},
        "the server closes the connection",
    ),
    "no TLS where it is wanted": (
        "PLAINTEXT",
        "SASL_SSL",
        {},
        "TLS there; check security_protocol: set it to SSL",
    ),
    "a password without TLS where it is wanted": ("SASL_PLAINTEXT", "SASL_SSL", WITH_SCRAM, "set it to SASL_SSL"),
}


@pytest.mark.parametrize("way", WRONG_WAYS)
def test_a_wrong_way_of_connecting_is_reported(
    secured: SecuredKafka, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    """One line within the timeout names the problem and contains no secret. Nothing is printed to stderr."""
    protocol, listener, fields, words = WRONG_WAYS[way]
    trust = trusting(secured) if protocol.endswith("SSL") else {}
    connection = connect(secured, protocol, listener=listener, **fields, **trust)
    message = refused(connection)
    assert words in message
    printed = capfd.readouterr()
    assert (printed.out, lines_about(connection.bootstrap_servers, printed.err)) == ("", [])


@pytest.mark.parametrize("authority", ["the system's", "another"])
def test_a_certificate_that_is_not_trusted_is_reported(secured: SecuredKafka, authority: str) -> None:
    """If the client does not trust the broker's authority, it sends nothing to the broker."""
    trust = {} if authority == "the system's" else {"ssl_ca_location": str(secured.certificate)}
    message = refused(connect(secured, "SASL_SSL", **WITH_SCRAM, **trust))
    assert "certificate verify failed" in message
    assert "check ssl_ca_location" in message
    if trust:
        text = {"ssl_ca_pem": secured.certificate.read_text()}
        assert "certificate verify failed" in refused(connect(secured, "SASL_SSL", **WITH_SCRAM, **text))


def test_a_certificate_of_ones_own_that_is_not_trusted_is_reported(secured: SecuredKafka) -> None:
    """The server rejects the client's certificate, and the error names the fields that configure it."""
    own = {"ssl_certificate_location": str(secured.unknown), "ssl_key_location": str(secured.unknown)}
    assert "ssl_certificate_location and ssl_key_location" in refused(
        connect(secured, "SSL", **trusting(secured), **own)
    )


@pytest.mark.parametrize(("which", "words"), [("outdated", "expired on "), ("early", "is not valid before ")])
def test_a_certificate_of_ones_own_that_is_not_in_date_is_reported(
    secured: SecuredKafka, which: str, words: str
) -> None:
    """The server gives no reason for the rejection, so the client checks its own certificate.

    The error has the date and the file.
    """
    own = getattr(secured, which)
    (said,) = refused(
        connect(secured, "SSL", **trusting(secured), ssl_certificate_location=str(own), ssl_key_location=str(own))
    ).splitlines()
    assert f"does not accept the certificate of this client, which {words}" in said
    assert f"check ssl_certificate_location: {own} needs " in said
    text = own.read_text()
    (said,) = refused(
        connect(secured, "SSL", **trusting(secured), ssl_certificate_pem=text, ssl_key_pem=text)
    ).splitlines()
    assert f"certificate of this client, which {words}" in said
    assert "check ssl_certificate_pem: it needs " in said


@pytest.mark.parametrize("way", ["a wrong password, SCRAM", "a server's certificate that is out of date"])
def test_what_is_wrong_is_one_line_wherever_it_is_met(
    secured: SecuredKafka,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    way: str,
) -> None:
    """The command line, `doctor` and a Dagster resource show the same line. Log lines of the client appear nowhere."""
    protocol, listener, fields, words = WRONG_WAYS[way]
    connection = connect(secured, protocol, listener=listener, **fields, **trusting(secured))
    given = {"security_protocol": protocol, "timeout_s": "30", **fields, **trusting(secured)}
    for name, value in {"bootstrap_servers": connection.bootstrap_servers, **given}.items():
        monkeypatch.setenv(f"MARSHAL_{name.upper()}", value)
    capfd.readouterr()

    status = call(capfd, "status")
    assert (status.code, status.out, words in status.error) == (3, "", True)

    doctor = call(capfd, "doctor", "--json")
    (found,) = (each for each in doctor.json["findings"] if each["name"] == "connection")
    assert lines_about(connection.bootstrap_servers, doctor.err) == []
    assert (doctor.code, found["state"], words in found["found"]) == (1, "problem", True)
    assert "kafka up" not in found["fix"]

    @dg.op
    def look(rationalizer: RationalizerResource) -> None:
        rationalizer.rationalizer()

    @dg.job(resource_defs={"rationalizer": RationalizerResource(connection=KafkaConnectionConfig.from_environment())})
    def looking() -> None:
        look()

    result = looking.execute_in_process(raise_on_error=False)
    (event,) = (all_node_event for all_node_event in result.all_node_events if all_node_event.is_step_failure)
    cause = event.step_failure_data.error and event.step_failure_data.error.cause
    assert cause is not None
    assert words in cause.message
    assert not [each for each in lines_about(connection.bootstrap_servers, capfd.readouterr().err) if "rdkafka" in each]


def refused(connection: KafkaConnection) -> str:
    """Try to connect and return the error, which is one line."""
    with pytest.raises(UnavailableError) as caught:
        clients.check_reachable(connection)
    message = str(caught.value)
    assert re.search(r"; (check|set|install|use) ", message)
    assert "\n" not in message
    assert not any(secret in message for secret in SECRETS)
    return message


def test_a_right_that_is_missing_is_named(secured: SecuredKafka, admin: Topics) -> None:
    """Each request without permission names the missing right. A best-effort commit returns it as text."""
    admin.create("rights", 1, 1)
    connection = connect(secured, "SASL_PLAINTEXT", **WITH_PLAIN)
    with Topics(connection) as topics:
        questions: dict[str, Callable[[], object]] = {
            "DESCRIBE on topic 'rights'": lambda: topics.describe("rights"),
            "DESCRIBE on topic 'rights': kafka-acls": lambda: topics.offsets("rights", [0]),
            "DESCRIBE_CONFIGS on topic 'rights'": lambda: topics.settings("rights"),
            "CREATE on topic 'new'": lambda: topics.create("new", 1, 1),
            "ALTER on topic 'rights'": lambda: grow(topics, "rights", 2),
            "DELETE on topic 'rights'": lambda: topics.delete("rights"),
        }
        for right, question in questions.items():
            with pytest.raises(AuthorizationError, match=f"not allowed; grant this user {right}"):
                question()
        text = topics.commit_group_offsets("g", "rights", {0: 1})
        assert text is not None
        assert "grant this user READ on group 'g' and on topic 'rights'" in text
        secured.grant(PLAIN_USER, "DESCRIBE", "TOPIC", "rights")
        wait_until(lambda: answers(lambda: topics.describe("rights")), "the right to describe is known")
        assert topics.offsets("rights", [0]) == {0: OffsetBounds(0, 0)}
        with pytest.raises(AuthorizationError, match="DESCRIBE on group 'g'"):
            topics.group_offsets("g", "rights")
        writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
        writer.produce("rights", b"1")
        assert writer.flush(WITHIN_S) == 0
        began_s = time.monotonic()
        with pytest.raises(AuthorizationError, match="grant this user READ on topic 'rights'"):
            bytes_per_offset(topics, replace(connection, timeout_s=WITHIN_S), "g", "rights")
        assert time.monotonic() - began_s < WITHIN_S


def test_reading_by_position_takes_no_right_on_a_group(secured: SecuredKafka, admin: Topics) -> None:
    """With only READ on the topic all records are read. The client's errors about its group are known as harmless."""
    admin.create("readable", 1, 1)
    writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
    for number in range(5):
        writer.produce("readable", str(number), partition=0)
    assert writer.flush(WITHIN_S) == 0
    secured.grant(SCRAM_USER, "READ", "TOPIC", "readable")
    connection = connect(secured, "SASL_SSL", **WITH_SCRAM, **trusting(secured))
    with Topics(connection) as topics:
        wait_until(lambda: answers(lambda: topics.describe("readable")), "the right to describe is known")
    reader, log = clients.consumer(connection, client_id="test")
    reader.assign([TopicPartition("readable", 0, 0)])
    values, codes = [], set()

    def is_at_end() -> bool:
        for message in reader.consume(100, timeout=0.2):
            error = message.error()
            if error is None:
                values.append(message.value())
            else:
                codes.add(error.code())
        return KafkaError._PARTITION_EOF in codes

    wait_until(is_at_end, "the end of the partition shows")
    clients.close_client(reader, log)
    assert values == [b"0", b"1", b"2", b"3", b"4"]
    assert codes - {KafkaError._PARTITION_EOF} <= clients.HARMLESS_TO_A_READER


def test_offsets_take_the_right_to_describe_alone(secured: SecuredKafka, admin: Topics) -> None:
    """The client for offsets needs no right on a group. Without DESCRIBE on the topic, the error names that right."""
    admin.create("described", 2, 1)
    connection = connect(secured, "SASL_SSL", **WITH_SCRAM, **trusting(secured))
    with Topics(connection) as topics:
        with pytest.raises(AuthorizationError, match="grant this user DESCRIBE on topic 'described'"):
            topics.offsets("described", [0, 1])
        secured.grant(SCRAM_USER, "DESCRIBE", "TOPIC", "described")
        wait_until(lambda: answers(lambda: topics.offsets("described", [0, 1])), "the right to describe is known")
        assert topics.offsets("described", [0, 1]) == dict.fromkeys((0, 1), OffsetBounds(0, 0))


def test_a_producer_that_may_write_nowhere_is_reported(secured: SecuredKafka) -> None:
    """Without WRITE on any topic a producer does not work.

    The error explains it, and the client's log keeps the cause.
    """
    connection = connect(secured, "SASL_PLAINTEXT", **WITH_PLAIN)
    client, log = clients.producer(connection, delivery_timeout_ms=1000, client_id="test")

    def reach_again_and_again() -> None:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            clients.reach(client, log, timeout_s=WITHIN_S)

    with pytest.raises(AuthorizationError, match="grant WRITE on its topic"):
        reach_again_and_again()
    assert log.fatal is not None
    with pytest.raises(KafkaException):
        client.produce("rights", b"a")
    clients.close_client(client, log)


def test_a_producer_that_polls_itself_finds_the_fatal_error_in_its_log(secured: SecuredKafka) -> None:
    """The client raises a fatal error only once. The log keeps it for later calls."""
    connection = connect(secured, "SASL_PLAINTEXT", **WITH_PLAIN)
    client, log = clients.producer(connection, delivery_timeout_ms=1000, client_id="test")

    def is_fatal() -> bool:
        with contextlib.suppress(KafkaException):
            client.poll(0.05)
        return log.fatal is not None

    wait_until(is_fatal, "the error is fatal")
    assert "Cluster authorization failed" in (log.fatal or "")
    clients.close_client(client, log)


def test_who_may_not_write_snapshots_goes_without(
    secured: SecuredKafka, admin: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that may write only to the coordination topic ends its run without a snapshot, and logs the reason."""
    assert create_coordination_topic(admin, "log", 1).created
    assert create_snapshot_topic(admin, "log")
    writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
    writer.produce("log", b"junk", partition=0)
    assert writer.flush(WITHIN_S) == 0
    for right, topic in (("READ", "log"), ("WRITE", "log"), ("READ", "log_snapshot")):
        secured.grant(SCRAM_USER, right, "TOPIC", topic)
    connection = connect(secured, "SASL_SSL", **WITH_SCRAM, **trusting(secured))
    with Topics(connection) as topics:
        wait_until(lambda: answers(lambda: topics.describe("log_snapshot")), "the right to describe is known")
    log = KafkaLog(connection, "log")
    rationalizer = Rationalizer(log)

    with caplog.at_level(logging.INFO):
        assert renew_snapshots(rationalizer, kafka_snapshots(connection, "log")) == []
    assert "grant WRITE on topic 'log_snapshot'" in caplog.text
    secured.grant(SCRAM_USER, "WRITE", "TOPIC", "log_snapshot")
    wait_until(
        lambda: renew_snapshots(rationalizer, kafka_snapshots(connection, "log")) == [0],
        "a snapshot can be written",
    )
    log.close()


def test_doctor_reports_what_this_user_can_do(
    secured: SecuredKafka, admin: Topics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` reports each missing right with the command that grants it. A user that only reads is no problem."""
    create_coordination_topic(admin, "doctored", 2)
    create_snapshot_topic(admin, "doctored")
    connection = connect(secured, "SASL_PLAINTEXT", **WITH_PLAIN)
    for name in ("bootstrap_servers", "security_protocol", "sasl_mechanism", "username"):
        monkeypatch.setenv(f"MARSHAL_{name.upper()}", str(getattr(connection, name)))
    monkeypatch.setenv("MARSHAL_PASSWORD", PLAIN_PASSWORD)

    def findings() -> list[dict[str, str]]:
        found: list[dict[str, str]] = call(capsys, "doctor", "--json", "--coordination-topic", "doctored").json[
            "findings"
        ]
        return found

    def rights() -> list[tuple[str, str]]:
        return [(each["state"], each["found"]) for each in findings() if each["name"] == "rights"]

    (stranger,) = (each for each in findings() if each["name"] == "rights")
    assert (stranger["state"], stranger["found"]) == ("problem", "on doctored: none, not even Describe")
    assert f"--allow-principal User:{PLAIN_USER} --operation Describe --operation Read" in stranger["fix"]
    secured.grant(PLAIN_USER, "DESCRIBE", "TOPIC", "doctored")
    wait_until(
        lambda: ("problem", "on doctored: Describe; not Read") in rights(),
        "the missing right to read is reported",
    )
    secured.grant(PLAIN_USER, "READ", "TOPIC", "doctored")
    secured.grant(PLAIN_USER, "READ", "TOPIC", "doctored_snapshot")
    wait_until(lambda: [state for state, _ in rights()] == ["ok", "ok"], "all rights are found")
    reader = findings()
    assert "problem" not in [each["state"] for each in reader]
    assert "it can read" in next(each["found"] for each in reader if each["name"] == "rights")
    settings = next(each for each in reader if each["name"] == "topic settings")
    assert (settings["state"], "DESCRIBE_CONFIGS" in settings["found"]) == ("not checked", True)
    secured.grant(PLAIN_USER, "WRITE", "TOPIC", "doctored")
    wait_until(
        lambda: ("warning", "on doctored_snapshot: Describe, Read; not Write") in rights(),
        "the missing right to write is reported",
    )
    assert "it can claim" in rights()[0][1]


def test_spark_reads_through_tls_with_a_password(secured: SecuredKafka, admin: Topics, spark: "SparkSession") -> None:
    """Spark connects with the options, by password, certificate, key store and token. Its plan shows no secret."""
    admin.create("sparkling", 1, 1)
    writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
    writer.produce("sparkling", "hello", partition=0)
    assert writer.flush(WITHIN_S) == 0
    for user in (SCRAM_USER, "CN=client", "CN=stored", TOKEN_CLIENT):
        secured.grant(user, "READ", "TOPIC", "sparkling")
    for connection in (
        connect(secured, "SASL_SSL", **WITH_SCRAM, **trusting(secured)),
        connect(secured, "SSL", **trusting(secured), **known(secured)),
        connect(secured, "SSL", ssl_ca_pem=secured.authority.read_text(), **as_text(secured)),
        connect(secured, "SSL", **trusting(secured), **stored(secured)),
        with_tokens(secured, oauth_scope="kafka"),
    ):
        frame = read_ranges(spark, connection.spark_options(), "sparkling", {0: (0, 1)}, topic_id="its id")
        assert [row["value"] for row in frame.collect()] == [b"hello"]
        plan = frame._jdf.queryExecution().toString()
        assert not any(secret in plan for secret in (*SECRETS, "PRIVATE KEY"))


def test_a_token_that_is_not_given_is_reported(secured: SecuredKafka, unused_port: int) -> None:
    """An unknown client, an unreachable identity provider and an expired token are each one line with the fields."""
    unknown = with_tokens(secured, "unknown", oauth_client_secret="another")
    message = refused(unknown)
    assert "Failed to acquire SASL OAUTHBEARER token" in message
    assert "check oauth_token_endpoint_url, oauth_client_id, oauth_client_secret and sasl_mechanism" in message
    assert "Could not connect to server" in refused(
        with_tokens(secured, oauth_token_endpoint_url=f"http://127.0.0.1:{unused_port}/token")
    )
    secured.provider.lifetime_s, before_s = -10, secured.provider.lifetime_s
    try:
        assert "unexpired token" in refused(with_tokens(secured))
    finally:
        secured.provider.lifetime_s = before_s
    own = with_callback(secured)
    _providers.clear()
    with pytest.raises(UnavailableError, match=r"token_of_my_own gives no token for Kafka \(IndexError: list index"):
        clients.check_reachable(own)


def test_tokens_are_renewed_while_a_client_works(secured: SecuredKafka, admin: Topics) -> None:
    """Tokens live for seconds, and every record is acknowledged. After the client is revoked, none is any more."""
    admin.create("renewed", 1, 1)
    connection = with_tokens(secured, "short-lived")
    for right in ("WRITE", "DESCRIBE"):
        secured.grant("short-lived", right, "TOPIC", "renewed")
    provider = secured.provider
    provider.lifetime_s, before_s = 5, provider.lifetime_s
    writer, log = clients.producer(connection, delivery_timeout_ms=PATIENT_MS, client_id="test")

    def has_third_token() -> bool:
        assert has_written(writer, "renewed")
        return [claims["sub"] for claims in provider.given].count("short-lived") >= 3

    def is_refused() -> bool:
        writer.produce("renewed", b"a")
        writer.poll(0.1)
        return "Failed to acquire SASL OAUTHBEARER token" in str(log.reason)

    try:
        clients.reach(writer, log, timeout_s=WITHIN_S, topic="renewed")
        wait_until(has_third_token, "the client gets its third token")
        del provider.client_secrets["short-lived"]
        wait_until(is_refused, "the client gets no token any more")
        expires_s = provider.given[-1]["exp"]
        wait_until(lambda: time.time() > expires_s + 1, "the last token has expired")
        late: list[KafkaError | None] = []
        writer.produce("renewed", b"late", on_delivery=lambda failure, _: late.append(failure))
        writer.poll(1)
        assert late == []
    finally:
        provider.lifetime_s = before_s
        clients.close_client(writer, log)


def test_a_batch_outlives_its_tokens(secured: SecuredKafka, admin: Topics, tmp_path: Path) -> None:
    """A run claims, renews its tokens several times while it works, and commits. Its secret comes from a file."""
    client, provider = "batching", secured.provider
    admin.create("outlived", 1, 1)
    create_coordination_topic(admin, "outlived_log", 1)
    create_snapshot_topic(admin, "outlived_log")
    for topic in ("outlived_log", "outlived_log_snapshot", "outlived"):
        for right in ("READ", "WRITE", "DESCRIBE_CONFIGS"):
            secured.grant(client, right, "TOPIC", topic)
    secured.grant(client, "READ", "GROUP", "etl")
    file = tmp_path / "client-secret"
    file.write_text(TOKEN_SECRET)
    template = with_tokens(secured, client)
    config = KafkaConnectionConfig(
        bootstrap_servers=template.bootstrap_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        oauth_token_endpoint_url=provider.url,
        oauth_client_id=client,
        oauth_client_secret_file=str(file),
        **trusting(secured),
    )
    provider.lifetime_s, before_s = 5, provider.lifetime_s
    writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
    writer.produce("outlived", b"a", partition=0)
    assert writer.flush(WITHIN_S) == 0

    @dg.op
    def work(context: dg.OpExecutionContext, claimer: ClaimerResource) -> int | None:
        with claimer.claimed_batch(context, topic="outlived") as batch:
            batch.begin_processing()
            expires_s = time.time() + 2 * provider.lifetime_s
            wait_until(lambda: time.time() > expires_s, "all tokens of the beginning have expired")
        return claimer.group_keys()["outlived", 0].offset

    @dg.job(executor_def=dg.in_process_executor)
    def working() -> None:
        work()

    claimer = ClaimerResource(
        connection=config, group="etl", coordination_topic="outlived_log", heartbeat_interval_s=60
    )
    try:
        result = working.execute_in_process(resources={"claimer": claimer})
    finally:
        provider.lifetime_s = before_s
    assert result.output_for_node("work") == 1


def test_a_rotated_password_is_used_by_clients_that_are_connected(
    secured: SecuredKafka, admin: Topics, tmp_path: Path
) -> None:
    """The broker requests the password again every few seconds. After a rotation the same client still writes."""
    admin.create("rotated", 1, 1)
    secured.make_user("rotating", "first")
    for right in ("WRITE", "DESCRIBE"):
        secured.grant("rotating", right, "TOPIC", "rotated")
    file = tmp_path / "password"
    file.write_text("first\n")
    fields = {"sasl_mechanism": "SCRAM-SHA-512", "username": "rotating", "password_file": str(file)}
    connection = connect(secured, "SASL_SSL", listener="REAUTH", **fields, **trusting(secured))
    writer, log = clients.producer(connection, delivery_timeout_ms=PATIENT_MS, client_id="test")
    try:
        clients.reach(writer, log, timeout_s=WITHIN_S, topic="rotated")
        secured.make_user("rotating", "second")
        file.write_text("second\n")
        until_s = time.monotonic() + 2 * SESSION_MS / 1_000  # the first password is of no use after one session
        is_over = False
        while not is_over:
            is_over = time.monotonic() > until_s
            assert has_written(writer, "rotated")
    finally:
        clients.close_client(writer, log)


def has_written(writer: Producer, topic: str) -> bool:
    """Return whether a record is acknowledged before the client's delivery timeout."""
    errors: list[KafkaError | None] = []
    writer.produce(topic, b"a", on_delivery=lambda failure, _: errors.append(failure))
    while not errors:
        writer.poll(0.05)
    return errors == [None]


def answers(question: Callable[[], object]) -> bool:
    """Return whether the request is allowed now."""
    try:
        question()
    except MarshalError:
        return False
    return True
