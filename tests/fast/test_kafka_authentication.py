"""The ways to authenticate: what both clients get from each field, and which combinations are refused."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer

from marshal_dagster.component import ConnectionModel
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.kafka import clients, password_rotation
from marshal_dagster.kafka.authentication import LOGIN_HANDLER, METHODS, NOT_FOR_SPARK
from marshal_dagster.kafka.connection import FILES, SECRETS, KafkaConnection
from marshal_dagster.kafka.connection_errors import FailureCause, FailureReason
from marshal_dagster.kafka.tls_diagnostics import with_handshake_details
from marshal_dagster.kafka.token_callbacks import TokenCallback
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.spark import token_endpoint
from tests.conditions import wait_until
from tests.real.certificates import self_signed

SECRET = "c4nary"
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
EXPIRED = self_signed("client", until_days=-2).certificate
KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
Settings = Mapping[str, Any]

SERVERS: Settings = {"bootstrap_servers": "kafka:9092"}
TLS: Settings = {**SERVERS, "security_protocol": "SSL"}
PLAIN: Settings = {
    **SERVERS,
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "PLAIN",
    "username": "u",
    "password": "p",
}
OAUTH: Settings = {**SERVERS, "security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
HANDLER: Settings = {"spark_source_options": {LOGIN_HANDLER: "org.example.Handler"}}
OIDC: Settings = {
    **OAUTH,
    "oauth_token_endpoint_url": "https://login.example.org/token",
    "oauth_client_id": "etl",
    "oauth_client_secret": SECRET,
}
ASSERTION: Settings = {
    **OAUTH,
    "bootstrap_servers": "127.0.0.1:1",
    "client_settings": {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
        "sasl.oauthbearer.token.endpoint.url": "https://127.0.0.1:1/token",
        "sasl.oauthbearer.assertion.file": "/etc/kafka/assertion.jwt",
        "sasl.oauthbearer.scope": "kafka",
    },
    "spark_source_options": {
        **HANDLER["spark_source_options"],
        "kafka.sasl.oauthbearer.token.endpoint.url": "https://127.0.0.1:1/token",
    },
}
AZURE: Settings = {**OAUTH, **HANDLER, "oauth_azure_resource": "api://kafka"}
CALLBACK: Settings = {**OAUTH, **HANDLER, "oauth_callback": f"{__name__}:my_token"}
MSK: Settings = {**SERVERS, "security_protocol": "SASL_SSL", "sasl_mechanism": "AWS_MSK_IAM", "aws_region": "eu-west-1"}
KERBEROS: Settings = {
    **SERVERS,
    "security_protocol": "SASL_PLAINTEXT",
    "sasl_mechanism": "GSSAPI",
    "kerberos_principal": "etl@EXAMPLE.ORG",
    "kerberos_keytab": "etl.keytab",
}
WITH_KEY: Settings = {**TLS, "ssl_certificate_location": "certificate.pem", "ssl_key_location": "key.pem"}
WITH_STORE: Settings = {**TLS, "ssl_keystore_location": "client.p12", "ssl_keystore_password": SECRET}


def my_token() -> tuple[str, float]:
    """Return a token, as a function of a user does."""
    return "of my own", 1_700_000_000


def another_token() -> tuple[str, float]:
    """Return another token."""
    return "another", 1_700_000_000


def without(settings: Settings, *names: str) -> dict[str, Any]:
    """Return the settings without some names."""
    return {name: value for name, value in settings.items() if name not in names}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files that the settings name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "certificate.pem": PEM,
        "ca.pem": PEM,
        "key.pem": KEY,
        "etl.keytab": "k",
        "client.p12": "s",
        "secret": SECRET,
    }
    texts["another.pem"] = PEM.replace("MIIB", "MIIC")
    texts["another-key.pem"] = KEY.replace("MIIE", "MIIF")
    texts["encrypted.pem"] = KEY.replace("PRIVATE", "ENCRYPTED PRIVATE")
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Put a signer in place of Amazon's, and return the arguments with which it is called."""
    requested: list[tuple[str, ...]] = []

    def signing(name: str) -> Callable[..., tuple[str, int]]:
        def sign(*arguments: str) -> tuple[str, int]:
            requested.append((name, *arguments))
            return "signed", 1_700_000_000_000

        return sign

    names = ("", "_from_profile", "_from_role_arn")
    methods = {f"generate_auth_token{name}": staticmethod(signing(name)) for name in names}
    module = ModuleType("aws_msk_iam_sasl_signer")
    module.MSKAuthTokenProvider = type("MSKAuthTokenProvider", (), methods)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return requested


FIELDS: Mapping[str, tuple[Settings, Any]] = {
    "bootstrap_servers": (SERVERS, "other:9092"),
    "security_protocol": (SERVERS, "SSL"),
    "sasl_mechanism": (PLAIN, "SCRAM-SHA-512"),
    "username": (PLAIN, "other"),
    "password": (PLAIN, "other"),
    "password_file": (without(PLAIN, "password"), "secret"),
    "oauth_token_endpoint_url": (OIDC, "https://other.example.org/token"),
    "oauth_client_id": (OIDC, "other"),
    "oauth_client_secret": (OIDC, "other"),
    "oauth_client_secret_file": (without(OIDC, "oauth_client_secret"), "secret"),
    "oauth_scope": (OIDC, "kafka"),
    "oauth_extensions": (OIDC, "logicalCluster=lkc-1,identityPoolId=pool-1"),
    "oauth_ca_location": (OIDC, "ca.pem"),
    "oauth_azure_resource": (AZURE, "api://other"),
    "oauth_callback": (CALLBACK, f"{__name__}:another_token"),
    "aws_region": (MSK, "eu-west-2"),
    "aws_profile": (MSK, "etl"),
    "aws_role_arn": (MSK, "arn:aws:iam::1:role/etl"),
    "kerberos_principal": (KERBEROS, "other@EXAMPLE.ORG"),
    "kerberos_keytab": (KERBEROS, "secret"),
    "kerberos_service_name": (KERBEROS, "broker"),
    "ssl_ca_location": (TLS, "ca.pem"),
    "ssl_ca_pem": (TLS, PEM),
    "ssl_certificate_location": (WITH_KEY, "another.pem"),
    "ssl_certificate_pem": (without(WITH_KEY, "ssl_certificate_location"), PEM),
    "ssl_key_location": (WITH_KEY, "another-key.pem"),
    "ssl_key_pem": (without(WITH_KEY, "ssl_key_location"), KEY),
    "ssl_key_password": ({**WITH_KEY, "ssl_key_location": "encrypted.pem"}, "other"),
    "ssl_key_password_file": ({**WITH_KEY, "ssl_key_location": "encrypted.pem"}, "secret"),
    "ssl_keystore_location": (WITH_STORE, "secret"),
    "ssl_keystore_password": (WITH_STORE, "other"),
    "ssl_keystore_password_file": (without(WITH_STORE, "ssl_keystore_password"), "secret"),
}
"""For each field that both clients get: settings to which it belongs, and a value that makes a difference."""

FOR_ONE_CLIENT: Mapping[str, tuple[Settings, Any]] = {
    "timeout_s": (SERVERS, 7),
    "client_settings": (SERVERS, {"client.rack": "r1"}),
    "spark_source_options": (SERVERS, {"kafka.client.rack": "r1"}),
    "spark_class_prefix": (PLAIN, "kafkashaded."),
}
"""Fields that are by their names for one client: a timeout of requests, settings of each client, Java's classes."""


def rendered(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what both clients get."""
    connection = KafkaConnection.from_settings(settings)
    return connection.librdkafka(), connection.spark_options()


def one_is_missing(settings: Settings) -> bool:
    """Return whether the settings alone are incomplete."""
    try:
        KafkaConnection.from_settings(settings)
    except ConfigurationError:
        return True
    return False


def names_of(connection: type[KafkaConnection] = KafkaConnection) -> set[str]:
    """Return the names of all fields."""
    return {field.name for field in fields(connection)}


def test_each_field_is_in_the_table() -> None:
    """A new field needs an entry, and so a rendering for both clients."""
    assert FIELDS.keys() | FOR_ONE_CLIENT.keys() == names_of()
    assert not FIELDS.keys() & FOR_ONE_CLIENT.keys()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_reaches_librdkafka_and_spark(name: str, signer: list[tuple[str, ...]]) -> None:
    """A value of the field changes what librdkafka gets, and what Spark gets."""
    settings, value = FIELDS[name]
    with_it = librdkafka, spark = rendered({**settings, name: value})
    if one_is_missing(settings):  # the field is required, so there is nothing to compare with
        for settings_of_client in with_it:
            assert any(shown(value) in shown(text) for text in settings_of_client.values())
        return
    before_librdkafka, before_spark = rendered(settings)
    assert tokens(librdkafka, signer) != tokens(before_librdkafka, signer)
    if name != "oauth_callback":  # Spark gets the handler that the user names beside it
        assert spark != before_spark


def shown(value: object) -> str:
    """Return a value as it is found in the settings of a client: a file's name, or its content."""
    path = Path(str(value))
    is_file = "\n" not in str(value) and path.is_file()
    return path.read_text().strip() if is_file else str(value).strip()


def tokens(settings: Mapping[str, Any], signer: list[tuple[str, ...]]) -> dict[str, Any]:
    """Return the settings with the token of the callback, and what it asks the signer for, in place of the callback."""
    if "oauth_cb" not in settings:
        return dict(settings)
    signer.clear()
    return {**settings, "oauth_cb": (settings["oauth_cb"](""), *signer)}


@pytest.mark.parametrize("name", FOR_ONE_CLIENT)
def test_a_field_for_one_client_reaches_that_one(name: str) -> None:
    """The few fields for one client change exactly what that client gets."""
    settings, value = FOR_ONE_CLIENT[name]
    before, after = rendered(settings), rendered({**settings, name: value})
    changed = [first != second for first, second in zip(before, after, strict=True)]
    assert changed == [not name.startswith("spark_"), name.startswith("spark_")]


def test_environment_dagster_and_component_offer_the_same_fields() -> None:
    """Each field can be set everywhere. In YAML a secret is the name of its variable."""
    assert set(KafkaConnectionConfig.model_fields) == names_of()
    in_yaml = {f"{name}_variable" if name in SECRETS else name for name in names_of()}
    assert set(ConnectionModel.model_fields) == in_yaml


def test_the_page_names_each_field() -> None:
    """Each field of authentication is on the page."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "authentication.md").read_text()
    assert [name for name in (*FIELDS, *FOR_ONE_CLIENT) if f"{name}" not in page] == ["timeout_s"]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (TLS, "set ssl_certificate_location and ssl_key_location to a certificate that the server trusts"),
        (WITH_STORE, "check that the certificate in client.p12 has not expired"),
        (
            without(WITH_KEY, "ssl_certificate_location") | {"ssl_certificate_pem": EXPIRED},
            "check ssl_certificate_pem: it",
        ),
    ],
)
@pytest.mark.usefixtures("files")
def test_a_rejected_certificate_is_looked_at_wherever_it_comes_from(settings: Settings, advice: str) -> None:
    """A broker gives no reason, so the client's own certificate is checked: that of a file, a text or a key store."""
    reason = FailureReason(FailureCause.OWN_CERTIFICATE, "kafka:9092", "rejected")
    assert advice in with_handshake_details(reason, KafkaConnection.from_settings(settings)).advice


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_read_from_the_environment(name: str) -> None:
    """Each field has a variable, which Dagster's config keeps as a reference if it is a secret."""
    settings = {**FIELDS[name][0], name: FIELDS[name][1]}
    given = {f"MARSHAL_{field.upper()}": as_variable(value) for field, value in settings.items()}
    assert KafkaConnection.from_environment(given) == KafkaConnection.from_settings(settings)
    assert KafkaConnectionConfig.from_environment(given).secrets_in_code() == []


def as_variable(value: object) -> str:
    """Return a value as an environment variable has it."""
    return json.dumps(value) if isinstance(value, dict) else str(value).strip()


WRONG: Mapping[str, tuple[Settings, str]] = {
    "a mechanism without SASL": (
        {**SERVERS, "sasl_mechanism": "PLAIN"},
        "sasl_mechanism would not be used with security_protocol PLAINTEXT: choose SASL_SSL or SASL_PLAINTEXT",
    ),
    "SASL without a mechanism": (
        {**SERVERS, "security_protocol": "SASL_SSL"},
        "needs sasl_mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER, AWS_MSK_IAM or GSSAPI",
    ),
    "no password": (without(PLAIN, "password"), "sasl_mechanism PLAIN needs password (or password_file)"),
    "two passwords": ({**PLAIN, "password_file": "secret"}, "set password or password_file, not both"),
    "a field of another mechanism": (
        {**PLAIN, "oauth_scope": "kafka"},
        "oauth_scope would not be used with sasl_mechanism PLAIN: remove what is not used; it uses username and pass",
    ),
    "no source of tokens": (OAUTH, "needs a source of tokens: oauth_token_endpoint_url with oauth_client_id and"),
    "two sources of tokens": (
        {**OIDC, "oauth_callback": "a.b:c"},
        "oauth_callback are different sources of tokens for sasl_mechanism OAUTHBEARER: set only one",
    ),
    "no client secret": (
        without(OIDC, "oauth_client_secret"),
        "sasl_mechanism OAUTHBEARER needs oauth_client_secret (or oauth_client_secret_file)",
    ),
    "a password for tokens": ({**OIDC, "password": "p"}, "password would not be used with sasl_mechanism OAUTHBEARER"),
    "an address that is no URL": (
        {**OIDC, "oauth_token_endpoint_url": "login.example.org"},
        "oauth_token_endpoint_url must be a URL that starts with https:// and names a host",
    ),
    "a secret in the URL": (
        {**OIDC, "oauth_token_endpoint_url": f"https://etl:{SECRET}@login.example.org/"},
        "put the credentials into oauth_client_id and oauth_client_secret",
    ),
    "extensions in another form": ({**OIDC, "oauth_extensions": "lkc-1"}, "oauth_extensions must be name=value, separ"),
    "a managed identity without a handler": (
        without(AZURE, "spark_source_options"),
        f"the class that gets its tokens: set spark_source_options['{LOGIN_HANDLER}'] to it, or to 'none'",
    ),
    "a callback without a handler": (
        without(CALLBACK, "spark_source_options"),
        "oauth_callback is for librdkafka only",
    ),
    "other settings without a handler": (
        {**OAUTH, "client_settings": {"sasl.oauthbearer.method": "oidc"}},
        "client_settings is for librdkafka only",
    ),
    "client credentials and another grant": (
        {**OIDC, "client_settings": {"sasl.oauthbearer.grant.type": "g"}},
        "oauth_token_endpoint_url and client_settings['sasl.oauthbearer.grant.type'] are different sources of tokens",
    ),
    "an endpoint without another grant": (
        {**OAUTH, "client_settings": {"sasl.oauthbearer.token.endpoint.url": "https://login.example.org/"}},
        "use oauth_token_endpoint_url",
    ),
    "a field of client credentials with another grant": (
        {**ASSERTION, "oauth_scope": "kafka"},
        "with sasl_mechanism OAUTHBEARER: remove what is not used; it uses client_settings",
    ),
    "the secret of a key in plain text": (
        {**OAUTH, "client_settings": {"sasl.oauthbearer.assertion.private.key.passphrase": SECRET}},
        "it would contain a secret in plain text",
    ),
    "a callback that is no path": ({**CALLBACK, "oauth_callback": "my_token"}, "an import path such as package.module"),
    "MSK without a region": (without(MSK, "aws_region"), "sasl_mechanism AWS_MSK_IAM needs aws_region"),
    "MSK without TLS": (
        {**MSK, "security_protocol": "SASL_PLAINTEXT"},
        "AWS_MSK_IAM needs security_protocol SASL_SSL, because Amazon MSK has no other listener",
    ),
    "a profile and a role": (
        {**MSK, "aws_profile": "p", "aws_role_arn": "r"},
        "set aws_profile or aws_role_arn, not both",
    ),
    "Kerberos without a keytab": (without(KERBEROS, "kerberos_keytab"), "GSSAPI needs kerberos_keytab"),
    "a keytab that is not there": ({**KERBEROS, "kerberos_keytab": "none"}, "kerberos_keytab must name a keytab that"),
    "a certificate without TLS": (
        {**SERVERS, "ssl_ca_pem": PEM},
        "ssl_ca_pem would not be used with security_protocol",
    ),
    "authorities twice": ({**TLS, "ssl_ca_pem": PEM, "ssl_ca_location": "ca.pem"}, "set ssl_ca_location or ssl_ca_pem"),
    "a certificate twice": ({**WITH_KEY, "ssl_certificate_pem": PEM}, "ssl_certificate_pem, not both"),
    "a key twice": ({**WITH_KEY, "ssl_key_pem": KEY}, "set ssl_key_location or ssl_key_pem, not both"),
    "a certificate without a key": (
        {**TLS, "ssl_certificate_pem": PEM},
        "set ssl_certificate_location (or ssl_certificate_pem) and ssl_key_location (or ssl_key_pem), or neither",
    ),
    "a key that is encrypted": (
        {**WITH_KEY, "ssl_key_location": "encrypted.pem"},
        "the key in ssl_key_location is encrypted: set ssl_key_password or ssl_key_password_file",
    ),
    "a password of no key": (
        {**TLS, "ssl_key_password": "p"},
        "ssl_key_password needs ssl_key_location or ssl_key_pem",
    ),
    "a path as PEM text": (
        {**TLS, "ssl_ca_pem": "ca.pem"},
        "ssl_ca_pem must be PEM text, with a line that starts with",
    ),
    "a key store without a password": (
        without(WITH_STORE, "ssl_keystore_password"),
        "ssl_keystore_location needs ssl_keystore_password or ssl_keystore_password_file",
    ),
    "a password of no key store": (
        {**TLS, "ssl_keystore_password": "p"},
        "ssl_keystore_password needs ssl_keystore_loc",
    ),
    "a key store and a key": (
        {**WITH_STORE, "ssl_key_location": "key.pem"},
        "ssl_keystore_location has the client's certificate and key: remove ssl_key_location, or the key store",
    ),
    "a prefix without a dot": (
        {**SERVERS, "spark_class_prefix": "kafkashaded"},
        "that ends with a dot, as kafkashaded.",
    ),
}


@pytest.mark.usefixtures("files", "signer")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_combination_is_one_line_that_says_what_is_right(case: str) -> None:
    """The line names the fields and has no secret. Dagster refuses the same when definitions are loaded."""
    settings, words = WRONG[case]
    said = refusal(lambda: KafkaConnection.from_settings(settings))
    assert words in said
    if "is not such a file" not in said and "is encrypted" not in said:  # files are looked at in the run
        assert words in refusal(lambda: KafkaConnectionConfig(**settings))


def refusal(make: Callable[[], object]) -> str:
    """Return the line with which something is refused."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    said = str(caught.value)
    assert "\n" not in said
    assert SECRET not in said
    return said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kafka.isolation.level", "read_uncommitted", "all readers of a log must see the same records"),
        ("kafka.group.id", "mine", "never join or commit"),
        ("kafka.auto.offset.reset", "latest", "never join or commit"),
        ("kafka.enable.auto.commit", "true", "never join or commit"),
        ("kafka.key.deserializer", "x", "Spark reads bytes"),
        ("kafka.bootstrap.servers", "a:1", "use bootstrap_servers"),
        ("kafka.ssl.truststore.location", "a.jks", "use the fields that begin with ssl_"),
        ("kafka.ssl.key.password", "env:KEY", "use the fields that begin with ssl_"),
        ("kafka.ssl.endpoint.identification.algorithm", "", "use client_settings"),
        ("startingOffsets", "earliest", "the batch decides which offsets Spark reads"),
        ("ENDINGOFFSETS", "latest", "the batch decides which offsets Spark reads"),
        ("failOnDataLoss", "false", "the batch decides"),
        ("subscribe", "orders", "the batch decides"),
        ("groupIdPrefix", "mine", "never join or commit"),
        ("fetch.max.bytes", "1", "begin with kafka."),
        ("kafka.fetch max", "1", "not the name of an option"),
        ("kafka.sasl.jaas.config", f'x required clientSecret="{SECRET}";', "env:NAME of an environment variable"),
        ("kafka.my.password", SECRET, "env:NAME of an environment variable, or to file:/PATH"),
        ("databricks.serviceCredential", SECRET, "env:NAME"),
    ],
)
def test_options_of_spark_that_a_batch_decides_are_refused(name: str, value: str, words: str) -> None:
    """An option is refused if the batch decides it, if a field has it, or if it would show a secret."""
    said = refusal(lambda: KafkaConnection.from_settings({**SERVERS, "spark_source_options": {name: value}}))
    assert f"spark_source_options must not contain {name!r}: " in said
    assert words in said


def test_secrets_of_settings_come_from_variables_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value names its variable or file. It is read for each client, and a missing one is named."""
    (tmp_path / "token").write_text("of a file\n")
    connection = KafkaConnection(
        **SERVERS,
        client_settings={"https.ca.pem": "env:CA_PEM", "client.rack": f"file:{tmp_path / 'token'}"},
        spark_source_options={"kafka.sasl.jaas.config": "env:JAAS", "databricks.serviceCredential": "env:CREDENTIAL"},
    )
    assert "client_settings['https.ca.pem'] names the environment variable CA_PEM" in refusal(connection.librdkafka)
    monkeypatch.setenv("CA_PEM", PEM)
    monkeypatch.setenv("JAAS", "a line")
    monkeypatch.setenv("CREDENTIAL", "name")
    assert {"https.ca.pem": PEM, "client.rack": "of a file"}.items() <= connection.librdkafka().items()
    assert connection.spark_options()["kafka.sasl.jaas.config"] == "a line"
    (tmp_path / "token").unlink()
    assert "cannot be read: No such file" in refusal(connection.librdkafka)


def test_a_rotated_file_is_read_by_the_next_client(files: Path) -> None:
    """The file of a secret is read for each client, without the line break at its end."""
    connection = KafkaConnection.from_settings({**without(PLAIN, "password"), "password_file": "secret"})
    assert connection.librdkafka()["sasl.password"] == SECRET
    (files / "secret").write_text("rotated")
    assert connection.librdkafka()["sasl.password"] == "rotated"
    assert 'password="rotated"' in connection.spark_options()["kafka.sasl.jaas.config"]
    (files / "secret").write_text(f"{SECRET}\n{SECRET}")
    assert "password_file: 'secret' must contain the secret as one line" in refusal(connection.librdkafka)
    (files / "secret").unlink()
    assert "password_file: 'secret' cannot be read: No such file" in refusal(connection.spark_options)


@pytest.mark.usefixtures("files")
def test_client_credentials_reach_both_clients() -> None:
    """The identity provider's address, credentials and extensions are what each client calls them."""
    settings = {"oauth_scope": "kafka", "oauth_extensions": "logicalCluster=lkc-1, identityPoolId=pool-1"}
    librdkafka, spark = rendered({**OIDC, **settings, "oauth_ca_location": "ca.pem"})
    assert {
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://login.example.org/token",
        "sasl.oauthbearer.client.id": "etl",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-1",
        "https.ca.location": "ca.pem",
    }.items() <= librdkafka.items()
    package, authority = "org.apache.kafka.common.security.oauthbearer", f"{PEM}\n".replace("\n", "\\n")
    assert spark == {
        "kafka.bootstrap.servers": "kafka:9092",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.login.callback.handler.class": f"{package}.OAuthBearerLoginCallbackHandler",
        "kafka.sasl.oauthbearer.token.endpoint.url": "https://login.example.org/token",
        "kafka.sasl.jaas.config": (
            f'{package}.OAuthBearerLoginModule required clientId="etl" clientSecret="{SECRET}" scope="kafka" '
            'extension_logicalCluster="lkc-1" extension_identityPoolId="pool-1" ssl.truststore.type="PEM" '
            f'ssl.truststore.certificates="{authority}";'
        ),
    }


def test_a_managed_identity_asks_azure() -> None:
    """The client asks Azure's metadata service for the resource, as the identity if one is named."""
    librdkafka, spark = rendered({**AZURE, "oauth_client_id": "identity"})
    assert {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.metadata.authentication.type": "azure_imds",
        "sasl.oauthbearer.config": "query=api-version=2018-02-01&resource=api%3A%2F%2Fkafka&client_id=identity",
    }.items() <= librdkafka.items()
    assert spark[LOGIN_HANDLER] == "org.example.Handler"


def test_a_callback_of_ones_own_gives_the_tokens() -> None:
    """The function is imported by its path and called for each token; extensions go with the token."""
    callback = rendered(CALLBACK)[0]["oauth_cb"]
    assert callback("") == ("of my own", 1_700_000_000.0)
    extended = rendered({**CALLBACK, "oauth_extensions": "logicalCluster=lkc-1"})[0]["oauth_cb"]
    assert extended("") == ("of my own", 1_700_000_000.0, "", {"logicalCluster": "lkc-1"})
    for path, words in (("no.such:function", "No module named"), (f"{__name__}:nothing", "nothing")):
        connection = KafkaConnection.from_settings({**CALLBACK, "oauth_callback": path})
        assert words in refusal(connection.librdkafka)
    connection = KafkaConnection.from_settings({**CALLBACK, "oauth_callback": f"{__name__}:SECRET"})
    assert "is not a function" in refusal(connection.librdkafka)


def test_msk_signs_with_the_credentials_of_aws(signer: list[tuple[str, ...]]) -> None:
    """The Python client gets OAUTHBEARER with a signed token, Spark gets Amazon's login module."""
    librdkafka, spark = rendered(MSK)
    assert librdkafka["sasl.mechanisms"] == "OAUTHBEARER"
    assert librdkafka["oauth_cb"]("") == ("signed", 1_700_000_000.0)
    rendered({**MSK, "aws_profile": "p"})[0]["oauth_cb"]("")
    rendered({**MSK, "aws_role_arn": "r"})[0]["oauth_cb"]("")
    assert signer == [
        ("", "eu-west-1"),
        ("_from_profile", "eu-west-1", "p"),
        ("_from_role_arn", "eu-west-1", "r"),
    ]
    assert spark["kafka.sasl.mechanism"] == "AWS_MSK_IAM"
    assert spark["kafka.sasl.jaas.config"] == (
        'software.amazon.msk.auth.iam.IAMLoginModule required awsStsRegion="eu-west-1";'
    )
    assert spark["kafka.sasl.client.callback.handler.class"] == "software.amazon.msk.auth.iam.IAMClientCallbackHandler"


def test_msk_without_credentials_is_one_line(signer: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The signer fails with an attribute of None if the machine has no credentials; the line names what is missing."""
    assert signer == []
    module: Any = sys.modules["aws_msk_iam_sasl_signer"]
    monkeypatch.setattr(module.MSKAuthTokenProvider, "generate_auth_token", lambda _: module.access_key)
    with pytest.raises(UnavailableError, match="AWS's SDK finds no credentials on this machine"):
        rendered(MSK)[0]["oauth_cb"].fetch_first()


def test_msk_without_its_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the extra to install."""
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)
    assert "pip install 'marshal-dagster[msk]'" in refusal(KafkaConnection.from_settings(MSK).librdkafka)


@pytest.mark.usefixtures("files")
def test_kerberos_reaches_both_clients() -> None:
    """Both clients get principal, keytab and the brokers' service name, which Java does not have by default."""
    librdkafka, spark = rendered(KERBEROS)
    assert librdkafka["sasl.kerberos.keytab"] == "etl.keytab"
    assert spark["kafka.sasl.kerberos.service.name"] == "kafka"
    assert spark["kafka.sasl.jaas.config"] == (
        'com.sun.security.auth.module.Krb5LoginModule required useKeyTab="true" storeKey="true" keyTab="etl.keytab" '
        'principal="etl@EXAMPLE.ORG";'
    )


def test_another_grant_is_set_by_the_settings_of_both_clients() -> None:
    """Both clients get the endpoint of a signed assertion, which has no field."""
    settings, options = rendered(ASSERTION)
    endpoint = ASSERTION["client_settings"]["sasl.oauthbearer.token.endpoint.url"]
    assert settings["sasl.oauthbearer.token.endpoint.url"] == endpoint
    assert options["kafka.sasl.oauthbearer.token.endpoint.url"] == endpoint


@pytest.mark.usefixtures("files", "signer")
@pytest.mark.parametrize("way", sorted(METHODS))
def test_the_prefix_of_a_shaded_client_is_on_each_class(way: str) -> None:
    """Each Java class of Kafka and Amazon has the prefix. Java's own and those that the user names have not."""
    settings = {
        "PLAIN": PLAIN,
        "SCRAM-SHA-256": {**PLAIN, "sasl_mechanism": "SCRAM-SHA-256"},
        "SCRAM-SHA-512": {**PLAIN, "sasl_mechanism": "SCRAM-SHA-512"},
        "AWS_MSK_IAM": MSK,
        "GSSAPI": KERBEROS,
        "oauth_token_endpoint_url": OIDC,
        "oauth_azure_resource": AZURE,
        "oauth_callback": CALLBACK,
        "client_settings": {**OAUTH, **HANDLER, "client_settings": {"sasl.oauthbearer.config": "x"}},
    }[way]
    spark = rendered({**settings, "spark_class_prefix": "shaded."})[1]
    classes = [value.split()[0] for name, value in spark.items() if name.endswith((".class", "jaas.config"))]
    own = ("com.sun.", "org.example.")
    assert classes
    assert all(name.startswith(("shaded.org.apache.kafka.", "shaded.software.amazon.", *own)) for name in classes)


def test_a_connection_that_is_not_for_spark_is_refused_by_reads() -> None:
    """With the handler `none`, librdkafka connects, and a read by Spark is refused in one line."""
    connection = KafkaConnection.from_settings({**CALLBACK, "spark_source_options": {LOGIN_HANDLER: NOT_FOR_SPARK}})
    assert connection.librdkafka()["oauth_cb"]
    assert "Spark cannot read with this connection" in refusal(connection.spark_options)


def test_a_file_of_settings_may_name_files_beside_it(tmp_path: Path) -> None:
    """Each field that names a file is relative to the folder of the connection's file."""
    for name in FILES:
        (tmp_path / name).write_text("x")
    (tmp_path / "kafka.toml").write_text(
        'bootstrap_servers = "a:1"\nsecurity_protocol = "SASL_SSL"\nsasl_mechanism = "PLAIN"\nusername = "u"\n'
        'password_file = "password_file"\nssl_keystore_location = "ssl_keystore_location"\n'
        'ssl_keystore_password_file = "ssl_keystore_password_file"\n'
    )
    connection = KafkaConnection.from_file(tmp_path / "kafka.toml")
    assert connection.password_file == str(tmp_path / "password_file")
    assert connection.ssl_keystore_password_file == str(tmp_path / "ssl_keystore_password_file")


def test_a_source_without_a_token_is_reported_at_once() -> None:
    """The reason is in the error before a client is created, which would wait ten seconds for a token."""
    connection = KafkaConnection.from_settings({**CALLBACK, "oauth_callback": f"{__name__}:no_token"})
    with pytest.raises(UnavailableError, match=r"no_token gives no token for Kafka \(PermissionError: not for you\)"):
        clients.admin(connection, client_id="test")


def no_token() -> tuple[str, float]:
    """Raise an error, as a function of a user does."""
    raise PermissionError("not for you")


def test_the_first_token_is_fetched_once() -> None:
    """The token that is fetched before the client is created is the first that the client gets."""
    fetched: list[float] = []

    def fetch() -> tuple[str, float]:
        fetched.append(len(fetched))
        return "token", fetched[-1]

    callback = TokenCallback("test", fetch)
    callback.fetch_first()
    assert [callback("")[1] for _ in range(3)] == [0, 1, 2]


@pytest.mark.usefixtures("files")
def test_a_client_library_without_kerberos_names_what_to_install() -> None:
    """PyPI's wheel has no GSSAPI; the line shows how to get a client that has it."""
    said = refusal(lambda: clients.admin(KafkaConnection.from_settings(KERBEROS), client_id="test"))
    assert "pip install --no-binary confluent-kafka" in said


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("https.ca.location", "oauth_ca_location needs confluent-kafka 2.11 or newer"),
        ("sasl.oauthbearer.metadata.authentication.type", "oauth_azure_resource needs confluent-kafka 2.12 or newer"),
    ],
)
def test_a_client_library_that_is_too_old_names_the_version(setting: str, advice: str) -> None:
    """The lowest version that is allowed lacks two settings; the line names the field and the version."""
    with pytest.raises(ConfigurationError, match=advice), clients.checked_settings():
        raise ValueError(f'No such configuration property: "{setting}"')


@pytest.mark.usefixtures("files")
def test_a_wrong_key_store_names_its_fields() -> None:
    """The client library cannot read the key store; the line names the fields of the key store."""
    said = refusal(lambda: clients.admin(KafkaConnection.from_settings(WITH_STORE), client_id="test"))
    assert "check ssl_keystore_location and ssl_keystore_password" in said


class Client:
    """A client that keeps the passwords that it gets."""

    def __init__(self) -> None:
        self.passwords: list[tuple[str, str]] = []

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Keep a password."""
        self.passwords.append((username, password))


def test_a_changed_password_file_reaches_the_clients_that_are_open(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client gets each new password once, until it is closed. A file that is missing changes nothing."""
    monkeypatch.setattr(password_rotation, "CHECKED_EVERY_S", 0.01)
    connection = KafkaConnection.from_settings({**without(PLAIN, "password"), "password_file": "secret"})
    first, second = Client(), Client()
    for client in (first, second):
        password_rotation.watch(client, connection)
    (files / "secret").write_text("second")
    wait_until(lambda: first.passwords and second.passwords, "both clients have the new password")
    password_rotation.forget(second)
    (files / "secret").unlink()
    password_rotation.rotate_all()
    (files / "secret").write_text("third")
    wait_until(lambda: len(first.passwords) > 1, "the open client has the next password")
    password_rotation.rotate_all()
    assert first.passwords == [("u", "second"), ("u", "third")]
    assert second.passwords == [("u", "second")]


@pytest.mark.usefixtures("files")
def test_a_client_that_is_closed_is_forgotten() -> None:
    """A real client is watched if its password comes from a file, until it is closed."""
    connection = KafkaConnection.from_settings({**without(PLAIN, "password"), "password_file": "secret"})
    client, log = clients.producer(connection, delivery_timeout_ms=1_000, client_id="test")
    assert isinstance(client, Producer)
    assert client in password_rotation._watched
    clients.close_client(*clients.consumer(KafkaConnection.from_settings(SERVERS), client_id="another"))
    assert client in password_rotation._watched
    clients.close_client(client, log)
    assert client not in password_rotation._watched


class Session:
    """A session whose driver has a system property, and whose Kafka client has a version."""

    def __init__(self, master: str, version: str, options: str = "") -> None:
        self.properties: dict[str, str] = {}
        system = SimpleNamespace(getProperty=self.properties.get, setProperty=self.properties.__setitem__)
        parser = SimpleNamespace(getVersion=lambda: version)
        utils = SimpleNamespace(utils=SimpleNamespace(AppInfoParser=parser))
        kafka = SimpleNamespace(kafka=SimpleNamespace(common=utils))
        self._jvm = SimpleNamespace(
            java=SimpleNamespace(lang=SimpleNamespace(System=system)), org=SimpleNamespace(apache=kafka)
        )
        conf = {"spark.executor.extraJavaOptions": options}
        self.sparkContext = SimpleNamespace(master=master, getConf=lambda: conf)


def test_the_driver_may_request_tokens_and_executors_must_be_allowed() -> None:
    """The address is added to those that the driver's JVM allows. A cluster's executors need it as a setting."""
    url, property_ = "https://login.example.org/token", token_endpoint.ALLOWED_URLS
    local: Any = Session("local[2]", "4.1.0")
    local.properties[property_] = "https://other"
    for _ in range(2):
        token_endpoint.allow_token_endpoint(local, url)
    assert local.properties == {property_: f"https://other,{url}"}
    cluster: Any = Session("spark://host:7077", "3.9.1")
    assert f"spark.executor.extraJavaOptions=-D{property_}={url}" in refusal(
        lambda: token_endpoint.allow_token_endpoint(cluster, url)
    )
    for fine in (Session("spark://host:7077", "3.9.0"), Session("yarn", "4.1.0", f"-D{property_}={url}")):
        token_endpoint.allow_token_endpoint(fine, url)  # type: ignore[arg-type]
