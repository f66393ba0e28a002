"""The Kafka connection: which settings it rejects with which messages, and what it passes to librdkafka and Spark."""

import dataclasses
import json
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.secret_text import SecretText

SECRET = "s3cret'; \"\\"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
SASL: Mapping[str, Any] = {
    "bootstrap_servers": "kafka:9092",
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "username": "alice",
    "password": SECRET,
}


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Any]:
    """Write PEM files and return their paths by field name."""
    files = {"ssl_ca_location": CERTIFICATE, "ssl_certificate_location": CERTIFICATE, "ssl_key_location": KEY}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in files}


def refusal(settings: Mapping[str, Any]) -> str:
    """Return the message with which the settings are rejected."""
    with pytest.raises(ConfigurationError) as caught:
        KafkaConnection.from_settings(settings)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


def test_a_list_of_servers_is_enough() -> None:
    """Only the servers are required. The defaults are PLAINTEXT and ten seconds."""
    connection = KafkaConnection(bootstrap_servers="a:9092, b.example.org:9093 ,[::1]:1")
    assert connection.bootstrap_servers == "a:9092,b.example.org:9093,[::1]:1"
    assert connection.security_protocol == "PLAINTEXT"
    assert connection.timeout_s == 10


@pytest.mark.parametrize(
    "servers", ["", "kafka", "kafka:", ":9092", "kafka:0", "kafka:65536", "kafka:9092,", "http://kafka:9092", "a b:1"]
)
def test_servers_must_be_host_and_port(servers: str) -> None:
    """A server without a port, or with an impossible one, is rejected with a message that shows the format."""
    message = refusal({"bootstrap_servers": servers})
    assert "bootstrap_servers must be a comma-separated list of host:port" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "bootstrap_servers is missing: set it to host:port"),
        ({"bootstrap_servers": 9092}, "bootstrap_servers must be text"),
        ({"bootstrap_server": "a:1", "bootstrap_servers": "a:1"}, "did you mean bootstrap_servers?"),
        ({"security_protocol": "TLS"}, "security_protocol must be one of 'PLAINTEXT', 'SSL', 'SASL_PLAINTEXT'"),
        (
            {"sasl_mechanism": "SCRAM"},
            "sasl_mechanism must be one of 'PLAIN', 'SCRAM-SHA-256', 'SCRAM-SHA-512', 'OAUTH",
        ),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0 and at most 300"),
        ({"timeout_s": 301}, "timeout_s must be a number of seconds above 0 and at most 300"),
        ({"timeout_s": "soon"}, "timeout_s must be a number of seconds"),
        ({"timeout_s": True}, "timeout_s must be a number of seconds"),
        ({"timeout_s": "1" * 400}, "timeout_s must be a number of seconds"),
        ({"timeout_s": 10**400}, "timeout_s must be a number of seconds"),
        ({"security_protocol": None}, "security_protocol must be one of 'PLAINTEXT'"),
        ({"client_settings": None}, "client_settings must be a table"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of seconds"),
        ({"client_settings": {"debug": 1}}, "client_settings must be a table"),
        ({"client_settings": ["debug"]}, "client_settings must be a table"),
        ({"username": "alice"}, "username would not be used with security_protocol PLAINTEXT: choose SASL_SSL"),
        ({"security_protocol": "SASL_SSL"}, "SASL_SSL needs sasl_mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, "),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "username": "a"}, "PLAIN needs password (or"),
        ({**SASL, "username": ""}, "username must be text in one line"),
        ({**SASL, "password": "two\nlines"}, "password must be text in one line"),
        ({**SASL, "password": 5}, "password must be text"),
        ({"security_protocol": "SSL", "ssl_ca_location": "/no/such/file"}, "ssl_ca_location must name a PEM file"),
        ({"security_protocol": "SSL", "ssl_key_location": "/"}, "ssl_key_location must name a PEM file"),
        ({"security_protocol": "SSL", "ssl_key_password": SECRET}, "ssl_key_password needs ssl_key_location"),
        ({"ssl_key_password": SECRET}, "ssl_key_password would not be used with security_protocol PLAINTEXT"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(settings: Mapping[str, Any], words: str) -> None:
    """The message names the field and the values that it accepts, in one line and without a secret."""
    given = {"bootstrap_servers": "kafka:9092", **settings} if settings else {}
    assert words in refusal(given)


def test_all_wrong_fields_are_reported_at_once() -> None:
    """One message reports all mistakes."""
    message = refusal({"timeout_s": -1, "colour": "blue"})
    assert "bootstrap_servers is missing" in message
    assert "timeout_s must" in message
    assert "colour is not a setting" in message


def test_a_certificate_and_its_key_go_together(pem: dict[str, Any]) -> None:
    """A certificate without a key is rejected, and a key without a certificate."""
    base = {"bootstrap_servers": "kafka:9092", "security_protocol": "SSL"}
    for field in ("ssl_certificate_location", "ssl_key_location"):
        assert "belong together" in refusal({**base, field: pem[field]})


def test_an_encrypted_key_needs_its_password(pem: dict[str, Any]) -> None:
    """An encrypted key without a password is rejected."""
    Path(pem["ssl_key_location"]).write_text(KEY.replace("PRIVATE", "ENCRYPTED PRIVATE"))
    settings = {"bootstrap_servers": "kafka:9092", "security_protocol": "SSL", **pem}
    assert "is encrypted: set ssl_key_password" in refusal(settings)
    assert KafkaConnection.from_settings({**settings, "ssl_key_password": SECRET}).ssl_key_password is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acks", "all in-sync replicas"),
        ("enable.idempotence", "once and in order"),
        ("enable.auto.commit", "read by position"),
        ("isolation.level", "same records"),
        ("message.timeout.ms", "heartbeat interval"),
        ("enable.partition.eof", "where the log ends"),
        ("group.id", "never join or commit"),
        ("transactional.id", "not written in transactions"),
        ("bootstrap.servers", "use bootstrap_servers"),
        ("sasl.password", "use password"),
        ("sasl.oauthbearer.client.secret", "use oauth_client_secret"),
        ("sasl.oauthbearer.assertion.private.key.passphrase.token", "plain text"),
        ("ssl.keystore.password", "use ssl_keystore_password"),
        ("https.ca.pem", "plain text; set it to env:NAME of an environment variable, or to file:/PATH"),
        ("compression.codec", "use compression.type"),
        ("socket.timeout.ms", "use timeout_s"),
        ("oauth_cb", "use oauth_callback"),
        ("default.topic.config", "set the settings of topics directly"),
        ("rebalance_cb", "its value is not text"),
        ("stats_cb", "already handles the client's log"),
        ("opaque", "its value is not text"),
        ("ssl.keystore.location", "use ssl_keystore_location"),
        ("sasl.jaas.config", "use the fields of the mechanism, such as username and password, because librdkafka"),
        ("ssl.truststore.location", "use ssl_ca_location or ssl_ca_pem, because librdkafka"),
        ("ssl.engine.location", "reads would fail: give the certificate and its key as PEM files"),
        ("enable.ssl.certificate.verification", "reads would fail: give the authority"),
        ("Socket Timeout", "not the name of a librdkafka setting"),
    ],
)
def test_settings_that_the_protocol_needs_are_refused_with_a_reason(name: str, words: str) -> None:
    """A client setting is rejected if it would break a guarantee, duplicates a field or could show a secret."""
    message = refusal({"bootstrap_servers": "kafka:9092", "client_settings": {name: SECRET}})
    assert f"client_settings must not contain {name!r}" in message
    assert words in message


def test_a_connection_made_directly_shows_no_secret_in_its_error() -> None:
    """The constructor raises the same error as `from_settings`, and no chained exception contains the given values."""
    with pytest.raises(ConfigurationError, match="Kafka connection: sasl_mechanism and username and") as caught:
        KafkaConnection(**{**SASL, "security_protocol": "PLAINTEXT"})
    with pytest.raises(ConfigurationError) as wrong:
        KafkaConnection(**{**SASL, "password": f"{SECRET}\n", "timeout_s": SECRET})
    for each in (caught.value, wrong.value):
        assert SECRET not in "".join(traceback.format_exception(each))
        assert SECRET not in repr(each)


def test_no_secret_shows(pem: dict[str, Any]) -> None:
    """No text form of a connection shows a password. Pydantic's secrets are accepted too."""
    connection = KafkaConnection.from_settings({**SASL, **pem, "ssl_key_password": SecretStr("open sesame")})
    assert {connection.ssl_key_password} == {SecretText("open sesame")}
    assert connection.ssl_key_password != "open sesame"
    for text in (repr(connection), str(connection), str(vars(connection)), str(dataclasses.asdict(connection))):
        assert "s3cret" not in text
        assert "sesame" not in text


def test_equal_connections_are_one_key() -> None:
    """Connections are compared and hashed by value, so they can be keys of a dictionary."""
    first = KafkaConnection(bootstrap_servers="a:1", client_settings={"debug": "broker", "client.rack": "r"})
    second = KafkaConnection(bootstrap_servers="a:1", client_settings={"client.rack": "r", "debug": "broker"})
    assert first == second
    assert hash(first) == hash(second)
    assert KafkaConnection(**SASL) != KafkaConnection(**{**SASL, "password": "other"})
    assert {first: 1}[second] == 1
    assert pickle.loads(pickle.dumps(KafkaConnection(**SASL))) == KafkaConnection(**SASL)  # noqa: S301


def test_a_connection_cannot_be_changed() -> None:
    """A field cannot be set after the connection was created."""
    connection = KafkaConnection(bootstrap_servers="a:1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        connection.bootstrap_servers = "b:1"  # type: ignore[misc]
    settings = {"client.rack": "r1"}
    racked = KafkaConnection(bootstrap_servers="a:1", client_settings=settings)
    settings["client.rack"] = "r2"
    assert racked.client_settings == {"client.rack": "r1"}


def test_the_environment_is_read() -> None:
    """Each field is read from its environment variable. An empty variable counts as not set."""
    connection = KafkaConnection.from_environment(
        {
            "MARSHAL_BOOTSTRAP_SERVERS": "kafka:9092",
            "MARSHAL_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "MARSHAL_SASL_MECHANISM": "PLAIN",
            "MARSHAL_USERNAME": "alice",
            "MARSHAL_PASSWORD": SECRET,
            "MARSHAL_SSL_CA_LOCATION": "",
            "MARSHAL_TIMEOUT_S": "2.5",
            "MARSHAL_CLIENT_SETTINGS": '{"client.rack": "r1"}',
            "MARSHAL_GROUP": "of another part",
        }
    )
    assert connection.timeout_s == 2.5
    assert connection.password is not None
    assert connection.password.get_secret_value() == SECRET
    assert connection.client_settings == {"client.rack": "r1"}


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the variables of the process are read. Another prefix selects another cluster."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "a:1")
    monkeypatch.setenv("MARSHAL_DATA_BOOTSTRAP_SERVERS", "b:1")
    assert KafkaConnection.from_environment().bootstrap_servers == "a:1"
    assert KafkaConnection.from_environment(prefix="MARSHAL_DATA_").bootstrap_servers == "b:1"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "MARSHAL_BOOTSTRAP_SERVERS is missing"),
        (
            {"MARSHAL_SECURITY_PROTOCOL": "SASL_SSL"},
            "MARSHAL_SECURITY_PROTOCOL SASL_SSL needs MARSHAL_SASL_MECHANISM: ",
        ),
        ({"MARSHAL_CLIENT_SETTINGS": "debug=all"}, "MARSHAL_CLIENT_SETTINGS must be a JSON object"),
        ({"MARSHAL_CLIENT_SETTINGS": "[1]"}, "MARSHAL_CLIENT_SETTINGS must be a JSON object"),
        ({"MARSHAL_TIMEOUT_S": "-1"}, "MARSHAL_TIMEOUT_S must be a number"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], words: str) -> None:
    """The message names the variable and not the field."""
    given = {"MARSHAL_BOOTSTRAP_SERVERS": "kafka:9092", **environment} if environment else {}
    with pytest.raises(ConfigurationError) as caught:
        KafkaConnection.from_environment(given)
    assert words in str(caught.value)
    assert "environment" in str(caught.value) or "JSON" in str(caught.value)


def test_a_file_is_read(tmp_path: Path, pem: dict[str, Any]) -> None:
    """TOML and JSON files are read. Relative paths in them are resolved from the directory of the file."""
    toml, document = tmp_path / "kafka.toml", tmp_path / "kafka.json"
    toml.write_text(
        'bootstrap_servers = "kafka:9092"\nsecurity_protocol = "SSL"\nssl_ca_location = "ssl_ca_location"\n'
        'timeout_s = 3\n[client_settings]\n"client.rack" = "r1"\n'
    )
    document.write_text(
        json.dumps(
            {
                "bootstrap_servers": "kafka:9092",
                "security_protocol": "SSL",
                "ssl_ca_location": pem["ssl_ca_location"],
                "timeout_s": 3,
                "client_settings": {"client.rack": "r1"},
            }
        )
    )
    assert KafkaConnection.from_file(toml) == KafkaConnection.from_file(str(document))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kafka.yaml", "a: 1", "must be a .toml or .json file"),
        ("kafka.toml", "bootstrap_servers = ", "is not valid TOML"),
        ("kafka.json", "{", "is not valid JSON"),
        ("kafka.json", "[1]", "its top level must be a table of the fields"),
        ("kafka.toml", "timeout_s = 1", "bootstrap_servers is missing"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path: Path, name: str, text: str, words: str) -> None:
    """The message names the file and describes the fault."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        KafkaConnection.from_file(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """A file that cannot be read raises a ConfigurationError with its path."""
    with pytest.raises(ConfigurationError, match=r"none\.toml cannot be read: No such file"):
        KafkaConnection.from_file(tmp_path / "none.toml")


def test_librdkafka_gets_the_secrets_and_what_was_requested(pem: dict[str, Any]) -> None:
    """The librdkafka settings contain the credentials and files. `client_settings` override the recommended values."""
    connection = KafkaConnection(
        **SASL, **pem, ssl_key_password=SecretText("sesame"), timeout_s=2, client_settings={"reconnect.backoff.ms": "7"}
    )
    settings = connection.librdkafka()
    expected = {
        "bootstrap.servers": "kafka:9092",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": SECRET,
        "ssl.ca.location": pem["ssl_ca_location"],
        "ssl.certificate.location": pem["ssl_certificate_location"],
        "ssl.key.location": pem["ssl_key_location"],
        "ssl.key.password": "sesame",
        "socket.timeout.ms": 2000,
        "reconnect.backoff.ms": "7",
    }
    assert expected.items() <= settings.items()


def test_librdkafka_gets_nothing_that_was_not_set() -> None:
    """A PLAINTEXT connection sets no SASL or TLS option."""
    settings = KafkaConnection(bootstrap_servers="a:1").librdkafka()
    assert not [name for name in settings if name.startswith(("sasl.", "ssl."))]
    assert None not in settings.values()


def test_spark_gets_plain_options() -> None:
    """For a PLAINTEXT connection Spark receives two options."""
    assert KafkaConnection(bootstrap_servers="a:1").spark_options() == {
        "kafka.bootstrap.servers": "a:1",
        "kafka.security.protocol": "PLAINTEXT",
    }


def test_spark_gets_credentials_that_java_can_parse() -> None:
    """Quotes and backslashes in a password are escaped as the JAAS syntax requires."""
    options = KafkaConnection(**SASL).spark_options()
    assert options["kafka.sasl.mechanism"] == "SCRAM-SHA-512"
    assert options["kafka.sasl.jaas.config"] == (
        "org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="alice" password="s3cret\'; \\"\\\\";'
    )
    plain = KafkaConnection(**{**SASL, "sasl_mechanism": "PLAIN"}).spark_options()
    assert plain["kafka.sasl.jaas.config"].startswith("org.apache.kafka.common.security.plain.PlainLoginModule ")


def test_spark_gets_certificates_whole(pem: dict[str, Any]) -> None:
    """Spark receives the PEM texts themselves, so executors need no file."""
    connection = KafkaConnection(
        bootstrap_servers="a:1",
        security_protocol="SSL",
        **pem,
        ssl_key_password=SecretText("sesame"),
        client_settings={"ssl.endpoint.identification.algorithm": "none"},
    )
    assert connection.spark_options() == {
        "kafka.bootstrap.servers": "a:1",
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": CERTIFICATE,
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": CERTIFICATE,
        "kafka.ssl.keystore.key": KEY,
        "kafka.ssl.key.password": "sesame",
        "kafka.ssl.endpoint.identification.algorithm": "",
    }


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("ssl_ca_location", "nothing here", "ssl_ca_location: '{path}' is not a PEM file"),
        ("ssl_key_location", KEY.replace("PRIVATE", "RSA PRIVATE"), "openssl pkcs8 -topk8"),
    ],
)
def test_a_file_that_java_cannot_use_is_refused(pem: dict[str, Any], field: str, text: str, words: str) -> None:
    """A file that is not PEM, or a key that Java cannot read, is rejected when Spark's options are built."""
    Path(pem[field]).write_text(text)
    connection = KafkaConnection(bootstrap_servers="a:1", security_protocol="SSL", **pem)
    with pytest.raises(ConfigurationError) as caught:
        connection.spark_options()
    assert words.format(path=pem[field]) in str(caught.value)


def test_a_connection_loads_no_kafka_client() -> None:
    """Checking a connection and building Spark's options imports no Kafka client, no pyspark and no pydantic."""
    program = (
        "import sys\n"
        "from marshal_dagster.kafka.connection import KafkaConnection\n"
        "KafkaConnection(bootstrap_servers='a:1').spark_options()\n"
        "print(sorted({'confluent_kafka', 'pyspark', 'dagster', 'pydantic'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_detached_connection_needs_no_file_and_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's tasks on another machine get the contents. The copy can be pickled; the connection does not change."""
    texts = {
        "ssl_ca_location": "ca",
        "ssl_certificate_location": "certificate",
        "ssl_key_location": "key",
        "password_file": "let me in",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setenv("SOME_VALUE", "7")
    settings: dict[str, Any] = {
        "bootstrap_servers": "kafka-1:9092",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "username": "ann",
        "client_settings": {"socket.send.buffer.bytes": "env:SOME_VALUE"},
        **{name: str(tmp_path / name) for name in texts},
    }
    connection = KafkaConnection.from_settings(settings)
    before = repr(connection)
    detached = pickle.loads(pickle.dumps(connection.detached()))  # noqa: S301 - our own bytes
    for name in texts:
        (tmp_path / name).unlink()
    monkeypatch.delenv("SOME_VALUE")

    settings = detached.librdkafka()
    assert {name: settings[name] for name in ("sasl.username", "sasl.password", "socket.send.buffer.bytes")} == {
        "sasl.username": "ann",
        "sasl.password": "let me in",
        "socket.send.buffer.bytes": "7",
    }
    pems = [settings[f"ssl.{name}.pem"] for name in ("ca", "certificate", "key")]
    assert [pem.strip() for pem in pems] == ["ca", "certificate", "key"]
    assert not [name for name in settings if name.endswith(".location")]
    assert "let me in" not in repr(detached)
    assert repr(connection) == before
