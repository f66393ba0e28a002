"""Describe how to reach a Kafka cluster: one checked value that is rendered for librdkafka and for Spark.

The module imports no Kafka client. It does not import pydantic either, because that takes a new process longer than
the interpreter and the client together. A secret leaves the connection only in the settings for a client. It never
appears in a `repr`, an error or a log.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from marshal_dagster.errors import ConfigurationError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Setting = str | int | float | bool

DEFAULT_TIMEOUT_S: Final = 10.0
LONGEST_TIMEOUT_S: Final = 300.0
"""The longest time-out that librdkafka allows for a request."""

_SERVER = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_SETTING_NAME = re.compile(r"[a-z][a-z0-9._]*")
_HOLDS_A_SECRET = re.compile(r"password|secret|\.pem$|\.key$")
_NOT_TEXT: Final = frozenset({"interceptors", "logger", "opaque"})
_LOCATIONS: Final = ("ssl_ca_location", "ssl_certificate_location", "ssl_key_location")

_REASONS: Final[Mapping[str, str]] = {
    "records must be on all in-sync replicas, once and in order": (
        "acks request.required.acks enable.idempotence enable.gapless.guarantee max.in.flight "
        "max.in.flight.requests.per.connection message.send.max.retries retries"
    ),
    "records of the coordination log are not written in transactions": "transactional.id transaction.timeout.ms",
    "the delivery time-out follows from the group's heartbeat interval": "message.timeout.ms delivery.timeout.ms",
    "a claim must not wait in a queue": "linger.ms queue.buffering.max.ms",
    "the library needs the log offset in every record's acknowledgement": "delivery.report.only.error",
    "a topic that is created by accident has the wrong settings": "allow.auto.create.topics",
    "members read by position and never join or commit to a Kafka consumer group": (
        "auto.offset.reset enable.auto.commit enable.auto.offset.store group.id group.instance.id group.protocol"
    ),
    "readers use it to find out where the log ends": "enable.partition.eof",
    "a corrupt record must not be processed as a valid one": "check.crcs",
    "all readers of a log must see the same records": "isolation.level",
    "it names the part of marshal-dagster that connects": "client.id",
    "the library already handles the client's log and errors": (
        "error_cb log_cb logger on_delivery stats_cb throttle_cb"
    ),
}
_NOT_FOR_SPARK: Final = "Spark does not have this setting, so claims would work and reads would fail: "
_WITHOUT_SPARK: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("ssl.keystore.location", "ssl.engine.location"),
        f"{_NOT_FOR_SPARK}give the certificate and its key as PEM files, ssl_certificate_location and "
        "ssl_key_location. `openssl pkcs12 -in STORE -out FILE` extracts them from a PKCS#12 key store",
    ),
    "enable.ssl.certificate.verification": f"{_NOT_FOR_SPARK}give the authority that signed the brokers' certificates "
    "as ssl_ca_location",
}
_DECIDED_HERE: Final = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_HAS_A_FIELD: Final[Mapping[str, str]] = {
    "bootstrap.servers": "bootstrap_servers",
    "metadata.broker.list": "bootstrap_servers",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "username",
    "sasl.password": "password",
    "ssl.ca.location": "ssl_ca_location",
    "ssl.certificate.location": "ssl_certificate_location",
    "ssl.key.location": "ssl_key_location",
    "ssl.key.password": "ssl_key_password",
    "socket.timeout.ms": "timeout_s",
}


class SecretText:
    """A text that `repr` and `str` do not show. Two are equal if their texts are equal."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretText) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def get_secret_value(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        return "SecretText(...)"


@dataclass(frozen=True)
class _Problem:
    """A problem of one field, or of several that contradict each other; the text then contains their names."""

    text: str
    field: str | None = None

    def describe(self, name_of: Callable[[str], str]) -> str:
        """Return the problem as text, with the names of fields that `name_of` returns."""
        if self.field is not None:
            return f"{name_of(self.field)} {self.text}"
        text = self.text
        for name in sorted(_FIELDS, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.]){name}(?![\w.])", name_of(name), text)
        return text


class _ConnectionConfigurationError(ConfigurationError):
    def __init__(self, problems: Sequence[_Problem]) -> None:
        super().__init__(f"Kafka connection: {'; '.join(problem.describe(str) for problem in problems)}")
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class KafkaConnection:
    """The address of a Kafka cluster, and how to connect to it.

    The value is checked when it is created. Equal connections are equal as dictionary keys.

    Raises:
        ConfigurationError: a field is wrong or contradicts another field.

    Example:
        ```python
        KafkaConnection(
            bootstrap_servers="kafka-1:9092,kafka-2:9092",
            security_protocol="SSL",
            ssl_ca_location="/etc/kafka/ca.pem",
        )
        ```
    """

    bootstrap_servers: str
    """The first brokers to contact: `host:port`, separated by commas."""
    security_protocol: SecurityProtocol = "PLAINTEXT"
    """The protocol of the brokers' listener."""
    sasl_mechanism: SaslMechanism | None = None
    """The SASL mechanism; required with `SASL_PLAINTEXT` and `SASL_SSL`, and not allowed otherwise."""
    username: str | None = None
    """The user name for SASL."""
    password: SecretText | None = None
    """The password for SASL, given as text or as pydantic's `SecretStr`."""
    ssl_ca_location: str | None = None
    """The PEM file with the authorities to trust, for `SSL` and `SASL_SSL`. By default the system's trust store."""
    ssl_certificate_location: str | None = None
    """The PEM file with this client's certificate."""
    ssl_key_location: str | None = None
    """The PEM file with this client's key; Spark needs the PKCS#8 form."""
    ssl_key_password: SecretText | None = None
    """The password of the key, given as text or as pydantic's `SecretStr`."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long the first connection and each request may take, in seconds; at most 300."""
    client_settings: Mapping[str, str] = field(default_factory=dict)
    """More settings for librdkafka; Spark does not get them. Settings that the protocol decides are refused."""

    def __post_init__(self) -> None:
        """Check and normalise each field, then check whether the fields agree."""
        problems = []
        for name, take in _TAKEN_BY.items():
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            try:
                object.__setattr__(self, name, take(given))
            except ValueError as error:
                problems.append(_Problem(str(error), name))
        if not problems:
            problems = [_Problem(text) for text in (*self._sasl_problems(), *self._tls_problems())]
        if problems:
            raise _ConnectionConfigurationError(problems)

    def __hash__(self) -> int:
        settings = tuple(sorted(self.client_settings.items()))
        return hash((self.bootstrap_servers, self.security_protocol, self.username, settings))

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], *, source: str = "settings", name_of: Callable[[str], str] = str
    ) -> Self:
        """Create a connection from a mapping of field names to values.

        Args:
            settings: The fields.
            source: Where the settings come from, for the error message.
            name_of: Returns the name of a field for the error message, such as that of an environment variable.

        Returns:
            The connection.

        Raises:
            ConfigurationError: a field is missing, unknown or wrong, or contradicts another field.
        """
        known = {name: value for name, value in settings.items() if name in _FIELDS}
        unknown = [name for name in settings if name not in _FIELDS]
        problems: list[str] = []
        try:
            connection = cls(**{"bootstrap_servers": None, **known})
        except _ConnectionConfigurationError as error:
            problems.extend(problem.describe(name_of) for problem in error.problems)
        else:
            if not unknown:
                return connection
        problems.extend(_unknown_field(name, name_of) for name in unknown)
        raise ConfigurationError(f"Kafka connection ({source}): {'; '.join(problems)}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, prefix: str = "MARSHAL_") -> Self:
        """Create a connection from the environment variables `MARSHAL_BOOTSTRAP_SERVERS` and so on, one for each field.

        An empty variable counts as not set. `MARSHAL_CLIENT_SETTINGS` is a JSON object.

        Args:
            environment: The variables; by default those of the process.
            prefix: The beginning of the variables' names. Use another one for a second cluster.

        Returns:
            The connection.

        Raises:
            ConfigurationError: a variable is missing or wrong, or contradicts another one.

        Example:
            ```python
            os.environ["MARSHAL_BOOTSTRAP_SERVERS"] = "kafka-1:9092"
            KafkaConnection.from_environment()
            ```
        """
        environment = os.environ if environment is None else environment

        def variable(name: str) -> str:
            return f"{prefix}{name.upper()}"

        settings: dict[str, Any] = {
            name: value for name in _FIELDS if (value := environment.get(variable(name), "").strip())
        }
        if "client_settings" in settings:
            settings["client_settings"] = _json_object(settings["client_settings"], variable("client_settings"))
        return cls.from_settings(settings, source="environment", name_of=variable)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Create a connection from a TOML or JSON file whose top level has the fields.

        Args:
            path: The file. Paths of PEM files in it are relative to its folder.

        Returns:
            The connection.

        Raises:
            ConfigurationError: the file cannot be read or parsed, or a field is missing, unknown or wrong.

        Example:
            ```python
            KafkaConnection.from_file("kafka.toml")
            ```
        """
        path = Path(path)
        settings = _read_file(path)
        for name in _LOCATIONS:
            if isinstance(value := settings.get(name), str) and value:
                settings[name] = str(path.parent / value)
        return cls.from_settings(settings, source=f"file {path}")

    @property
    def uses_sasl(self) -> bool:
        """Whether the client sends a user name and a password."""
        return self.security_protocol.startswith("SASL_")

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.security_protocol.endswith("SSL")

    def _sasl_problems(self) -> list[str]:
        given = {"sasl_mechanism": self.sasl_mechanism, "username": self.username, "password": self.password}
        if self.uses_sasl:
            missing = [name for name, value in given.items() if value is None]
            return [f"security_protocol {self.security_protocol} needs {' and '.join(missing)}"] if missing else []
        useless = [name for name, value in given.items() if value is not None]
        return [self._useless(useless, "SASL_SSL or SASL_PLAINTEXT")] if useless else []

    def _useless(self, names: Sequence[str], protocols: str) -> str:
        return (
            f"{' and '.join(names)} would not be used with security_protocol {self.security_protocol}: "
            f"choose {protocols}, or remove what is not used"
        )

    def _tls_problems(self) -> list[str]:
        useless = [name for name in (*_LOCATIONS, "ssl_key_password") if getattr(self, name) is not None]
        if useless and not self.uses_tls:
            return [self._useless(useless, "SSL or SASL_SSL")]
        if (self.ssl_certificate_location is None) != (self.ssl_key_location is None):
            return ["ssl_certificate_location and ssl_key_location belong together: set both or neither"]
        if self.ssl_key_password is not None and self.ssl_key_location is None:
            return ["ssl_key_password needs ssl_key_location"]
        key = self.ssl_key_location
        if key is not None and self.ssl_key_password is None and b"ENCRYPTED" in Path(key).read_bytes():
            return [f"ssl_key_location {self.ssl_key_location!r} is encrypted: set ssl_key_password"]
        return []

    def librdkafka(self) -> dict[str, Setting]:
        """Return the settings for a confluent-kafka client, with the secrets as plain text.

        `client_settings` override the recommended settings. Connections to all brokers are opened at once
        (`enable.sparse.connections`). Otherwise the client delays its second connection by 50 ms, which every step of a
        run would wait for.

        Returns:
            The settings by librdkafka's names; times are in milliseconds.
        """
        timeout_ms = max(10, round(self.timeout_s * 1000))
        settings: dict[str, Setting | None] = {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": self.security_protocol,
            "sasl.mechanisms": self.sasl_mechanism,
            "sasl.username": self.username,
            "sasl.password": _plain(self.password),
            "ssl.ca.location": self.ssl_ca_location,
            "ssl.certificate.location": self.ssl_certificate_location,
            "ssl.key.location": self.ssl_key_location,
            "ssl.key.password": _plain(self.ssl_key_password),
            "socket.timeout.ms": timeout_ms,
            "socket.connection.setup.timeout.ms": max(1000, timeout_ms),
            "socket.keepalive.enable": True,
            "socket.nagle.disable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            "enable.sparse.connections": False,
            "enable.metrics.push": False,
        }
        return {name: value for name, value in settings.items() if value is not None} | dict(self.client_settings)

    def spark_options(self) -> dict[str, str]:
        """Return the options for Spark's Kafka source, with the secrets as plain text.

        The options contain the content of the PEM files, so executors on other machines do not need the files.

        Returns:
            The options by Spark's names, which begin with `kafka.`.

        Raises:
            ConfigurationError: a PEM file cannot be read, or the key does not have the form that Java needs (PKCS#8).
        """
        options = {
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "kafka.security.protocol": self.security_protocol,
        }
        if self.uses_sasl:
            options |= self._spark_sasl()
        if self.uses_tls:
            options |= self._spark_tls()
        return options

    def _spark_sasl(self) -> dict[str, str]:
        module = "plain.PlainLoginModule" if self.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        username, password = _quoted(self.username or ""), _quoted(_plain(self.password) or "")
        return {
            "kafka.sasl.mechanism": str(self.sasl_mechanism),
            "kafka.sasl.jaas.config": f"org.apache.kafka.common.security.{module} required "
            f"username={username} password={password};",
        }

    def _spark_tls(self) -> dict[str, str]:
        options = {}
        if self.ssl_ca_location is not None:
            options["kafka.ssl.truststore.type"] = "PEM"
            options["kafka.ssl.truststore.certificates"] = _pem("ssl_ca_location", self.ssl_ca_location)
        if self.ssl_certificate_location is not None and self.ssl_key_location is not None:
            options["kafka.ssl.keystore.type"] = "PEM"
            options["kafka.ssl.keystore.certificate.chain"] = _pem(
                "ssl_certificate_location", self.ssl_certificate_location
            )
            options["kafka.ssl.keystore.key"] = _pkcs8("ssl_key_location", self.ssl_key_location)
        if self.ssl_key_password is not None:
            options["kafka.ssl.key.password"] = self.ssl_key_password.get_secret_value()
        if self.client_settings.get("ssl.endpoint.identification.algorithm") == "none":
            options["kafka.ssl.endpoint.identification.algorithm"] = ""
        return options


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - the checks of all fields raise ValueError
    return value


def _line_of_text(value: object) -> str:
    text = _text(value)
    if not text or any(ord(sign) < 32 or ord(sign) == 127 for sign in text):  # noqa: PLR2004 - ASCII's controls
        raise ValueError("must be text in one line, not empty")
    return text


def _secret(value: Any) -> SecretText:  # noqa: ANN401 - the user may give any value
    shown = value.get_secret_value() if hasattr(value, "get_secret_value") else value
    return SecretText(_line_of_text(shown))


def _servers(value: object) -> str:
    if value is None:
        raise ValueError("is missing: set it to host:port of one or more brokers")
    servers = [server.strip() for server in _text(value).split(",")]
    if any("@" in server for server in servers):
        raise ValueError("must name hosts only: put the user into username, and the password into password")
    for server in servers:
        matched = _SERVER.fullmatch(server)
        if not matched or not 1 <= int(matched[1]) <= 65535:  # noqa: PLR2004 - the largest port
            raise ValueError(
                f"must be a comma-separated list of host:port, for example kafka-1:9092,kafka-2:9092; {server!r} is "
                "not host:port"
            )
    return ",".join(servers)


def _one_of(choices: Sequence[str]) -> Callable[[object], str]:
    def take(value: object) -> str:
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"must be one of {', '.join(others)} or {last}, not {value!r}")
        return str(value)

    return take


def _readable(value: object) -> str:
    path = _text(value)
    if not (Path(path).is_file() and os.access(path, os.R_OK)):
        raise ValueError(f"must name a PEM file that this process can read; {path!r} is not such a file")
    return path


def _timeout_s(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise ValueError(f"must be a number of seconds above 0 and at most {LONGEST_TIMEOUT_S:.0f}")
    return seconds


def _settings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ValueError("must be a table that maps names of librdkafka settings to text")
    for name in value:
        if reason := _refusal(name):
            raise ValueError(f"must not contain {name!r}: {reason}")
    return dict(value)


def _unknown_field(name: str, name_of: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    hint = f"; did you mean {name_of(near[0])}?" if near else "; remove it"
    return f"{name_of(name)} is not a setting of a connection{hint}"


_TAKEN_BY: Final[Mapping[str, Callable[[object], object]]] = {
    "bootstrap_servers": _servers,
    "security_protocol": _one_of(get_args(SecurityProtocol)),
    "sasl_mechanism": _one_of(get_args(SaslMechanism)),
    "username": _line_of_text,
    "password": _secret,
    **dict.fromkeys(_LOCATIONS, _readable),
    "ssl_key_password": _secret,
    "timeout_s": _timeout_s,
    "client_settings": _settings,
}
"""For each field the function that checks a value and returns it in the form that the connection keeps."""

_FIELDS: Final = tuple(_TAKEN_BY)
_OPTIONAL: Final = frozenset(field.name for field in fields(KafkaConnection) if field.default is None)


def _plain(secret: SecretText | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _quoted(text: str) -> str:
    """Return `text` quoted for a line of a JAAS configuration, in which a backslash escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _pem(field: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{field}: {path!r} cannot be read as a PEM file: {error}") from None
    if "-----BEGIN " not in text:
        raise ConfigurationError(f"{field}: {path!r} is not a PEM file, because no line starts with -----BEGIN")
    return text


def _pkcs8(field: str, path: str) -> str:
    text = _pem(field, path)
    if not re.search("-----BEGIN (ENCRYPTED )?PRIVATE KEY-----", text):
        raise ConfigurationError(
            f"{field}: {path!r} is not a PKCS#8 key, the only form that Spark's Kafka client reads. Convert it with "
            "`openssl pkcs8 -topk8 -in OLD -out NEW`"
        )
    return text


def _refusal(name: str) -> str | None:
    if not _SETTING_NAME.fullmatch(name):
        return "it is not the name of a librdkafka setting; those look like socket.send.buffer.bytes"
    if name in _HAS_A_FIELD:
        return f"use {_HAS_A_FIELD[name]}"
    if name in _DECIDED_HERE:
        return f"marshal-dagster sets it, because {_DECIDED_HERE[name]}; remove it"
    if name.startswith("sasl.") or name == "oauth_cb":
        return "use sasl_mechanism, username and password; other ways to authenticate are not supported"
    if name in _WITHOUT_SPARK:
        return _WITHOUT_SPARK[name]
    if "_" in name or name in _NOT_TEXT:
        return "its value is not text, so it cannot be set here; remove it"
    if name == "default.topic.config":
        return "its value is not text: set the settings of topics directly, by their own names"
    if _HOLDS_A_SECRET.search(name):
        return "it would contain a secret in plain text; use the field for it"
    return None


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f'{name} must be a JSON object such as {{"socket.send.buffer.bytes": "1000000"}}')
    return value


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix not in {".toml", ".json"}:
        raise ConfigurationError(f"Kafka connection file {path}: must be a .toml or .json file")
    try:
        text = path.read_text(encoding="utf-8")
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigurationError(f"Kafka connection file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        form = path.suffix[1:].upper()
        raise ConfigurationError(f"Kafka connection file {path} is not valid {form}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"Kafka connection file {path}: its top level must be a table of the fields")
    return value
