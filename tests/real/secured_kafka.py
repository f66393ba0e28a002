"""A broker with TLS, passwords and ACLs: one listener for each way of connecting, and an authorizer."""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its type hints lack these exports
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from marshal_dagster._internal import processes
from marshal_dagster._internal.java import Java, find_java
from marshal_dagster._internal.ports import HOST, free_port
from marshal_dagster.devkafka import ensure_jars
from marshal_dagster.devkafka.cds_archive import with_archive
from marshal_dagster.devkafka.launch import BrokerFolder, Launcher
from marshal_dagster.devkafka.properties import Node
from marshal_dagster.devkafka.readiness import brokers_known_to
from marshal_dagster.devkafka.state import new_uuid
from tests.conditions import WITHIN_S, wait_until
from tests.real.certificates import self_signed, signed_by
from tests.real.services import watched
from tests.real.token_server import AUDIENCE, TokenServer, token_server

PLAIN_USER, PLAIN_PASSWORD = "paula", "plain-password"
SCRAM_USER = "sam"
SCRAM_PASSWORD = r"""it's "quoted", \back\slashed; and spaced"""

_LISTENERS = {
    "SASL_PLAINTEXT": "SASL_PLAINTEXT",
    "SASL_SSL": "SASL_SSL",
    "SSL": "SSL",
    "EXPIRED": "SSL",
    "ELSEWHERE": "SSL",
    "REAUTH": "SASL_SSL",
}
"""The protocol of each listener. Two listeners have a bad certificate: one is expired, one is for another host.

`REAUTH` takes tokens and passwords, and a client must authenticate again every few seconds.
"""
_MECHANISMS = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"
_MODULES = "org.apache.kafka.common.security"
_ALLOWED_URLS = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
SESSION_MS = 4_000
STORE_PASSWORD = "of-the-store"


@dataclass(frozen=True, slots=True)
class Acl:
    """The right of a user to do one operation on a topic, a group, transactional ids or the cluster."""

    user: str
    operation: str
    kind: str
    name: str
    pattern: str = "LITERAL"

    def binding(self) -> AclBinding:
        """Return the right as the admin client takes it."""
        return AclBinding(
            ResourceType[self.kind],
            self.name,
            ResourcePatternType[self.pattern],
            f"User:{self.user}",
            "*",
            AclOperation[self.operation],
            AclPermissionType.ALLOW,
        )


_ANY: Any = None  # the client's type hints do not know that None means each name
_EACH_ACL = AclBindingFilter(
    ResourceType.ANY, _ANY, ResourcePatternType.ANY, _ANY, _ANY, AclOperation.ANY, AclPermissionType.ANY
)


@dataclass(frozen=True, slots=True)
class SecuredKafka:
    """A running broker: the bootstrap server of each listener, and the PEM files that a client needs.

    `unknown` holds a client certificate that the broker does not trust, with its key. `outdated` and `early` are signed
    by a trusted authority, but are expired or not yet valid. `store` is a PKCS#12 key store with another certificate.
    `provider` gives tokens for the listener `REAUTH`. `admin` is a client of a super user.
    """

    servers: dict[str, str]
    authority: Path
    certificate: Path
    key: Path
    unknown: Path
    outdated: Path
    early: Path
    store: Path
    provider: TokenServer
    admin: AdminClient

    def grant(self, user: str, operation: str, kind: str, name: str, *, pattern: str = "LITERAL") -> None:
        """Grant a user one operation on a topic or a group, and wait until the broker itself applies it."""
        self.grant_all([Acl(user, operation, kind, name, pattern)])

    def grant_all(self, acls: Iterable["Acl"]) -> None:
        """Grant rights with one request, and wait until the broker itself applies them."""
        wanted = {acl.binding() for acl in acls}
        for future in self.admin.create_acls(list(wanted)).values():
            future.result(WITHIN_S)

        # The controller answers when it has stored a right; the broker's authorizer gets it a moment later.
        def is_missing() -> set[AclBinding]:
            return wanted - set(self.admin.describe_acls(_EACH_ACL).result(WITHIN_S))

        wait_until(lambda: not is_missing(), lambda: f"the broker knows the rights {is_missing()}")

    def make_user(self, name: str = SCRAM_USER, password: str = SCRAM_PASSWORD) -> None:
        """Create a user with a password for both SCRAM mechanisms."""
        wanted = [
            UserScramCredentialUpsertion(name, ScramCredentialInfo(mechanism, 4096), password.encode())
            for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        ]
        for each in wanted:
            for future in self.admin.alter_user_scram_credentials([each]).values():
                future.result(WITHIN_S)


@contextmanager
def secured_kafka(directory: Path) -> Iterator[SecuredKafka]:
    """Start one broker in `directory` and stop it afterwards. Anonymous clients are super users."""
    with token_server() as provider:
        yield from _started(directory, provider)


def _started(directory: Path, provider: TokenServer) -> Iterator[SecuredKafka]:
    ports: dict[str, int] = {}
    for name in ("PLAINTEXT", *_LISTENERS, "controller"):
        ports[name] = free_port(set(ports.values()))
    java = find_java()
    files = _files(directory, java)
    node = Node(1, ports["PLAINTEXT"], ports.pop("controller"))
    launcher = with_archive(Launcher(java, ensure_jars(java), settings=_settings(ports, files, provider)))
    folder = BrokerFolder(directory / "broker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"-D{_ALLOWED_URLS}={provider.keys_url}")
        launcher.prepare(folder, node, [node], new_uuid())
        mark = launcher.start(folder)
    try:
        wait_until(
            lambda: not processes.is_alive(mark) or brokers_known_to(node.port),
            lambda: f"the broker answers: {folder.last_log_line({folder.log: 0, folder.console: 0})}",
        )
        assert processes.is_alive(mark), folder.last_log_line({folder.log: 0, folder.console: 0})
        secured = SecuredKafka(
            {name: f"{HOST}:{port}" for name, port in ports.items()},
            files["authority.pem"],
            files["client.pem"],
            files["client-key.pem"],
            files["client-unknown.pem"],
            files["client-outdated.pem"],
            files["client-early.pem"],
            files["client.p12"],
            provider,
            # Without its log, because it may outlive the broker.
            AdminClient({"bootstrap.servers": f"{HOST}:{ports['PLAINTEXT']}", "log_level": 0}),
        )
        secured.make_user()
        with watched("the secured Kafka broker", mark.pid, folder.log, folder.console):
            yield secured
    finally:
        processes.kill([mark])


def _files(directory: Path, java: Java) -> dict[str, Path]:
    """Write the PEM files and return their paths by name."""
    broker, expired = self_signed("broker", (HOST,)), self_signed("expired", (HOST,), until_days=-2)
    elsewhere, client = self_signed("elsewhere", ("192.0.2.1",)), self_signed("client")
    unknown, clients = self_signed("unknown client"), self_signed("authority of clients")
    outdated, early = (signed_by(clients, "client", until_days=days) for days in (-2, 12))
    contents = {
        "authority.pem": broker.certificate + expired.certificate + elsewhere.certificate,
        "broker.pem": broker.key + broker.certificate,
        "expired.pem": expired.key + expired.certificate,
        "elsewhere.pem": elsewhere.key + elsewhere.certificate,
        "client.pem": client.certificate,
        "client-key.pem": client.key,
        "client-unknown.pem": unknown.key + unknown.certificate,
        "client-outdated.pem": outdated.key + outdated.certificate,
        "client-early.pem": early.key + early.certificate,
        "clients.pem": client.certificate + clients.certificate,
    }
    files = {name: directory / name for name in contents}
    store = directory / "client.p12"
    contents["clients.pem"] += _key_store(java, store)
    for name, text in contents.items():
        files[name].write_text(text)
    return {**files, store.name: store}


def _key_store(java: Java, path: Path) -> str:
    """Create a PKCS#12 key store with a key and its certificate, and return the certificate as PEM text."""
    store = ("-keystore", str(path), "-storetype", "PKCS12", "-storepass", STORE_PASSWORD, "-alias", "client")
    tool = str(java.executable.with_name("keytool"))
    made = ("-genkeypair", "-keyalg", "EC", "-groupname", "secp256r1", "-dname", "CN=stored", "-validity", "9", *store)

    def run(*arguments: str) -> str:
        return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True, timeout=WITHIN_S).stdout

    run(*made)
    return run("-exportcert", "-rfc", *store)


def _settings(ports: dict[str, int], files: dict[str, Path], provider: TokenServer) -> dict[str, str]:
    listeners = ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items())
    controller = free_port(set(ports.values()))
    settings = {
        "listeners": f"{listeners},CONTROLLER://{HOST}:{controller}",
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        + ",".join(f"{name}:{protocol}" for name, protocol in _LISTENERS.items()),
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": _MECHANISMS,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(files["broker.pem"]),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(files["clients.pem"]),
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.expired.ssl.keystore.location": str(files["expired.pem"]),
        "listener.name.elsewhere.ssl.keystore.location": str(files["elsewhere.pem"]),
        **{f"listener.name.{name}.ssl.keystore.type": "PEM" for name in ("expired", "elsewhere")},
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    for name in ("sasl_plaintext", "sasl_ssl"):
        prefix = f"listener.name.{name}"
        settings[f"{prefix}.plain.sasl.jaas.config"] = (
            f'{_MODULES}.plain.PlainLoginModule required user_{PLAIN_USER}="{PLAIN_PASSWORD}";'
        )
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            settings[f"{prefix}.{mechanism}.sasl.jaas.config"] = f"{_MODULES}.scram.ScramLoginModule required;"
    reauth = "listener.name.reauth"
    return settings | {
        f"{reauth}.sasl.enabled.mechanisms": "OAUTHBEARER,SCRAM-SHA-512",
        f"{reauth}.scram-sha-512.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
        f"{reauth}.scram-sha-512.connections.max.reauth.ms": str(SESSION_MS),
        f"{reauth}.oauthbearer.sasl.jaas.config": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required;",
        f"{reauth}.oauthbearer.sasl.server.callback.handler.class": (
            f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
        ),
        f"{reauth}.oauthbearer.connections.max.reauth.ms": str(SESSION_MS),
        f"{reauth}.sasl.oauthbearer.jwks.endpoint.url": provider.keys_url,
        f"{reauth}.sasl.oauthbearer.expected.audience": AUDIENCE,
        f"{reauth}.sasl.oauthbearer.expected.issuer": provider.url,
    }
