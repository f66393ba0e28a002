"""Describe how to reach a Kafka cluster: one checked value that is rendered for librdkafka and for Spark.

The module imports no Kafka client. It does not import pydantic either, because that takes a new process longer than
the interpreter and the client together. A secret leaves the connection only in the settings for a client. It never
appears in a `repr`, an error or a log.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka import authentication, tls_settings
from marshal_dagster.kafka.authentication import SaslMechanism
from marshal_dagster.kafka.passthrough import client_setting_refusal, spark_option_refusal
from marshal_dagster.kafka.secret_text import FILE_OF, SecretText, dereferenced, read_pem_file, secret_of

if TYPE_CHECKING:
    from pathlib import Path

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Setting = str | int | float | bool | Callable[..., Any]

DEFAULT_TIMEOUT_S: Final = 10.0
LONGEST_TIMEOUT_S: Final = 300.0
"""The longest timeout that librdkafka allows for a request."""

SERVER = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_EXTENSIONS = re.compile(r"[A-Za-z]+=[^,=\s]+(\s*,\s*[A-Za-z]+=[^,=\s]+)*")
_CLASS_PREFIX = re.compile(r"([A-Za-z_$][\w$]*\.)+")
_PEM_FILES: Final = ("ssl_ca_location", "ssl_certificate_location", "ssl_key_location", "oauth_ca_location")
_OTHER_FILES: Final = ("kerberos_keytab", "ssl_keystore_location", *FILE_OF.values())
_PEM_TEXTS: Final[Mapping[str, tuple[str, bool]]] = {
    "ssl_ca_pem": ("ssl_ca_location", False),
    "ssl_certificate_pem": ("ssl_certificate_location", False),
    "ssl_key_pem": ("ssl_key_location", True),
}
"""For each field with PEM text the field that names a file with it, and whether the text is a secret."""
FILES: Final = (*_PEM_FILES, *_OTHER_FILES)
"""The fields that name a file."""
SECRETS: Final = (*FILE_OF, "ssl_key_pem")
"""The fields that are secrets."""


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
        ConfigurationError: A field is wrong or contradicts another field.

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
    password_file: str | None = None
    """The file with the password, such as a mounted secret. A client notices within seconds that it has changed."""
    oauth_token_endpoint_url: str | None = None
    """For OAUTHBEARER: the URL where an identity provider gives tokens for client credentials (OIDC)."""
    oauth_client_id: str | None = None
    """The client id at the identity provider, or that of a managed identity."""
    oauth_client_secret: SecretText | None = None
    """The client's secret at the identity provider, given as text or as pydantic's `SecretStr`."""
    oauth_client_secret_file: str | None = None
    """The file with the client's secret. It is read when a client is created."""
    oauth_scope: str | None = None
    """The scope of the tokens, if the identity provider needs one."""
    oauth_extensions: str | None = None
    """The SASL extensions: `name=value`, separated by commas, such as `logicalCluster=lkc-1,identityPoolId=pool-1`."""
    oauth_ca_location: str | None = None
    """The PEM file with the authorities to trust at the token endpoint. By default the system's trust store."""
    oauth_azure_resource: str | None = None
    """For OAUTHBEARER: the resource for which Azure gives tokens to this machine's managed identity."""
    oauth_callback: str | None = None
    """For OAUTHBEARER: a function that returns a token and its expiry in unix seconds, as `package.module:function`."""
    aws_region: str | None = None
    """For AWS_MSK_IAM: the region of the cluster."""
    aws_profile: str | None = None
    """For AWS_MSK_IAM: the profile of AWS's configuration files."""
    aws_role_arn: str | None = None
    """For AWS_MSK_IAM: the role to assume."""
    kerberos_principal: str | None = None
    """For GSSAPI: the principal of this client."""
    kerberos_keytab: str | None = None
    """For GSSAPI: the keytab of the principal. Spark needs it on every executor, at the same path."""
    kerberos_service_name: str | None = None
    """For GSSAPI: the primary of the brokers' principal; by default `kafka`."""
    ssl_ca_location: str | None = None
    """The PEM file with the authorities to trust, for `SSL` and `SASL_SSL`. By default the system's trust store."""
    ssl_ca_pem: str | None = None
    """The authorities to trust as PEM text, instead of `ssl_ca_location`."""
    ssl_certificate_location: str | None = None
    """The PEM file with this client's certificate."""
    ssl_certificate_pem: str | None = None
    """This client's certificate as PEM text, instead of `ssl_certificate_location`."""
    ssl_key_location: str | None = None
    """The PEM file with this client's key; Spark needs the PKCS#8 form."""
    ssl_key_pem: SecretText | None = None
    """This client's key as PEM text, instead of `ssl_key_location`; given as text or as pydantic's `SecretStr`."""
    ssl_key_password: SecretText | None = None
    """The password of the key, given as text or as pydantic's `SecretStr`."""
    ssl_key_password_file: str | None = None
    """The file with the password of the key."""
    ssl_keystore_location: str | None = None
    """The PKCS#12 key store with this client's certificate and key. Spark needs the file on every executor."""
    ssl_keystore_password: SecretText | None = None
    """The password of the key store, given as text or as pydantic's `SecretStr`."""
    ssl_keystore_password_file: str | None = None
    """The file with the password of the key store."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long the first connection and each request may take, in seconds; at most 300."""
    client_settings: Mapping[str, str] = field(default_factory=dict)
    """More settings for librdkafka; Spark does not get them. Settings that the protocol decides are refused.

    A value may be `env:NAME` or `file:/PATH`: the variable or the file has the value. Secrets must be given so.
    """
    spark_source_options: Mapping[str, str] = field(default_factory=dict)
    """More options for Spark's Kafka source, such as `kafka.fetch.max.bytes`; in the form of `client_settings`."""
    spark_class_prefix: str | None = None
    """The prefix of Java classes' names for Spark, if its Kafka client is shaded: `kafkashaded.` on Databricks."""

    def __post_init__(self) -> None:
        """Check and normalise each field, then check whether the fields agree."""
        checked, problems = _checked(vars(self), reads_files=True)
        if problems:
            raise _ConnectionConfigurationError(problems)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        settings = tuple(sorted(self.client_settings.items()))
        return hash((self.bootstrap_servers, self.security_protocol, self.username, self.oauth_client_id, settings))

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
            ConfigurationError: A field is missing, unknown or wrong, or contradicts another field.
        """
        known = {"bootstrap_servers": None, **{name: settings[name] for name in settings if name in _FIELDS}}
        unknown = [_unknown_field(name, name_of) for name in settings if name not in _FIELDS]
        problems: Sequence[_Problem] = ()
        try:
            connection = cls(**known)
        except _ConnectionConfigurationError as error:
            problems = error.problems
        else:
            if not unknown:
                return connection
        raise _wrong([problem.describe(name_of) for problem in problems] + unknown, source)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any], *, source: str = "settings") -> None:
        """Raise an error if settings are wrong, without looking at the files that they name.

        Args:
            settings: The fields, by name.
            source: Where the settings come from, for the error message.

        Raises:
            ConfigurationError: A field is missing, unknown or wrong, or contradicts another field.

        Example:
            ```python
            KafkaConnection.check_settings({"bootstrap_servers": "kafka-1:9092"})
            ```
        """
        known = {**_DEFAULTS, **{name: settings[name] for name in settings if name in _FIELDS}}
        unknown = [_unknown_field(name, str) for name in settings if name not in _FIELDS]
        _, problems = _checked(known, reads_files=False)
        if problems or unknown:
            raise _wrong([problem.describe(str) for problem in problems] + unknown, source)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, prefix: str = "MARSHAL_") -> Self:
        """Create a connection from the environment variables `MARSHAL_BOOTSTRAP_SERVERS` and so on, one for each field.

        An empty variable counts as not set. `MARSHAL_CLIENT_SETTINGS` and `MARSHAL_SPARK_SOURCE_OPTIONS` are JSON
        objects.

        Args:
            environment: The variables; by default those of the process.
            prefix: The beginning of the variables' names. Use another one for a second cluster.

        Returns:
            The connection.

        Raises:
            ConfigurationError: A variable is missing or wrong, or contradicts another one.

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
        for name, example in _EXAMPLES.items():
            if name in settings:
                settings[name] = _json_object(settings[name], variable(name), example)
        return cls.from_settings(settings, source="environment", name_of=variable)

    @classmethod
    def from_file(cls, path: "str | Path") -> Self:
        """Create a connection from a TOML or JSON file whose top level has the fields.

        Args:
            path: The file. Paths in it are relative to its folder.

        Returns:
            The connection.

        Raises:
            ConfigurationError: The file cannot be read or parsed, or a field is missing, unknown or wrong.

        Example:
            ```python
            KafkaConnection.from_file("kafka.toml")
            ```
        """
        from pathlib import Path

        path = Path(path)
        settings = _read_file(path)
        for name in FILES:
            if isinstance(value := settings.get(name), str) and value:
                settings[name] = str(path.parent / value)
        return cls.from_settings(settings, source=f"file {path}")

    @property
    def uses_sasl(self) -> bool:
        """Whether the client authenticates with SASL."""
        return self.security_protocol.startswith("SASL_")

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.security_protocol.endswith("SSL")

    def librdkafka(self) -> dict[str, Setting]:
        """Return the settings for a confluent-kafka client, with the secrets as plain text.

        `client_settings` override the recommended settings. Connections to all brokers are opened at once
        (`enable.sparse.connections`). Otherwise the client delays its second connection by 50 ms, which every step of a
        run would wait for.

        Returns:
            The settings by librdkafka's names; times are in milliseconds. The value of `oauth_cb` is a function.

        Raises:
            ConfigurationError: A file or variable with a secret cannot be read, or what a token callback needs is not
                installed.
        """
        timeout_ms = max(10, round(self.timeout_s * 1000))
        settings: dict[str, Setting] = {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": self.security_protocol,
            **(authentication.librdkafka_settings(vars(self)) if self.uses_sasl else {}),
            **(tls_settings.librdkafka_settings(vars(self)) if self.uses_tls else {}),
            "socket.timeout.ms": timeout_ms,
            "socket.connection.setup.timeout.ms": max(1000, timeout_ms),
            "socket.keepalive.enable": True,
            "socket.nagle.disable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            "enable.sparse.connections": False,
            "enable.metrics.push": False,
        }
        return settings | dereferenced(self.client_settings, "client_settings")

    def spark_options(self) -> dict[str, str]:
        """Return the options for Spark's Kafka source, with the secrets as plain text.

        The options contain the content of the PEM files, so executors on other machines do not need these. A PKCS#12
        key store and a keytab must be on every executor. `spark_source_options` override what follows from the other
        fields.

        Returns:
            The options by Spark's names.

        Raises:
            ConfigurationError: A file or variable cannot be read, or the key does not have the form that Java needs
                (PKCS#8).
        """
        options = {
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "kafka.security.protocol": self.security_protocol,
        }
        if self.uses_sasl:
            options |= authentication.spark_options(vars(self))
        if self.uses_tls:
            options |= tls_settings.spark_options(vars(self))
        return options | dereferenced(self.spark_source_options, "spark_source_options")

    def detached(self) -> Self:
        """Return this connection with the contents of its files and variables, for a process on another machine.

        The copy contains secrets as plain text. A PKCS#12 key store, a keytab and the authorities of a token endpoint
        stay paths, so the other machine must have these files.

        Returns:
            The connection.

        Raises:
            ConfigurationError: A file or variable cannot be read.
        """
        contents: dict[str, Any] = {"client_settings": dereferenced(self.client_settings, "client_settings")}
        for name, file in FILE_OF.items():
            secret = secret_of(vars(self), name)
            contents |= {name: None if secret is None else SecretText(secret), file: None}
        for name, (location, as_secret) in _PEM_TEXTS.items():
            if path := getattr(self, location):
                text = read_pem_file(path, location)
                contents |= {name: SecretText(text) if as_secret else text, location: None}
        other = copy.copy(self)
        for name, value in contents.items():
            object.__setattr__(other, name, value)
        return other


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


def _pem_text(value: object) -> str:
    text = _text(value)
    if "-----BEGIN " not in text:
        raise ValueError("must be PEM text, with a line that starts with -----BEGIN")
    return f"{text.strip()}\n"


def _secret_pem(value: Any) -> SecretText:  # noqa: ANN401 - the user may give any value
    return SecretText(_pem_text(value.get_secret_value() if hasattr(value, "get_secret_value") else value))


def _token_endpoint(value: object) -> str:
    from urllib.parse import urlsplit

    text = _line_of_text(value)
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be a URL that starts with https:// and names a host")
    if parts.username is not None:
        raise ValueError("must have only the address: put the credentials into oauth_client_id and oauth_client_secret")
    return text


def _matching(pattern: re.Pattern[str], form: str) -> Callable[[object], str]:
    def take(value: object) -> str:
        text = _line_of_text(value)
        if not pattern.fullmatch(text):
            raise ValueError(f"must be {form}, not {text!r}")
        return text

    return take


def _servers(value: object) -> str:
    if value is None:
        raise ValueError("is missing: set it to host:port of one or more brokers")
    servers = [server.strip() for server in _text(value).split(",")]
    if any("@" in server for server in servers):
        raise ValueError("must name hosts only: put the user into username, and the password into password")
    for server in servers:
        matched = SERVER.fullmatch(server)
        if not matched or not 1 <= int(matched[1]) <= 65535:  # noqa: PLR2004 - the largest port
            raise ValueError(
                f"must be a comma-separated list of host:port, for example kafka-1:9092,kafka-2:9092; {server!r} is "
                "not host:port"
            )
    return ",".join(servers)


def _one_of(choices: Sequence[str]) -> Callable[[object], str]:
    def take(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {authentication.listed(map(repr, choices))}, not {value!r}")
        return str(value)

    return take


def _readable(kind: str) -> Callable[[object], str]:
    def take(value: object) -> str:
        from pathlib import Path

        path = _text(value)
        if not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise ValueError(f"must name a {kind} that this process can read; {path!r} is not such a file")
        return path

    return take


def _timeout_s(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise ValueError(f"must be a number of seconds above 0 and at most {LONGEST_TIMEOUT_S:.0f}")
    return seconds


def _settings(kind: str, refusal: Callable[[str, Mapping[str, str]], str | None]) -> Callable[[object], dict[str, str]]:
    def take(value: object) -> dict[str, str]:
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise ValueError(f"must be a table that maps names of {kind} to text")
        for name in value:
            if reason := refusal(name, value):
                raise ValueError(f"must not contain {name!r}: {reason}")
        return dict(value)

    return take


def _unknown_field(name: str, name_of: Callable[[str], str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, _FIELDS, n=1)
    hint = f"; did you mean {name_of(near[0])}?" if near else "; remove it"
    return f"{name_of(name)} is not a setting of a connection{hint}"


_TAKEN_BY: Final[Mapping[str, Callable[[object], object]]] = {
    "bootstrap_servers": _servers,
    "security_protocol": _one_of(get_args(SecurityProtocol)),
    "sasl_mechanism": _one_of(get_args(SaslMechanism)),
    "username": _line_of_text,
    **dict.fromkeys(FILE_OF, _secret),
    **dict.fromkeys(FILE_OF.values(), _readable("file")),
    "oauth_token_endpoint_url": _token_endpoint,
    "oauth_client_id": _line_of_text,
    "oauth_scope": _line_of_text,
    "oauth_extensions": _matching(_EXTENSIONS, "name=value, separated by commas"),
    "oauth_azure_resource": _line_of_text,
    "oauth_callback": _matching(_IMPORT_PATH, "an import path such as package.module:function"),
    "aws_region": _line_of_text,
    "aws_profile": _line_of_text,
    "aws_role_arn": _line_of_text,
    "kerberos_principal": _line_of_text,
    "kerberos_keytab": _readable("keytab"),
    "kerberos_service_name": _line_of_text,
    **dict.fromkeys(_PEM_FILES, _readable("PEM file")),
    "ssl_ca_pem": _pem_text,
    "ssl_certificate_pem": _pem_text,
    "ssl_key_pem": _secret_pem,
    "ssl_keystore_location": _readable("PKCS#12 key store"),
    "timeout_s": _timeout_s,
    "client_settings": _settings("librdkafka settings", client_setting_refusal),
    "spark_source_options": _settings("options of Spark's Kafka source", spark_option_refusal),
    "spark_class_prefix": _matching(_CLASS_PREFIX, "a prefix of Java packages that ends with a dot, as kafkashaded."),
}
"""For each field the function that checks a value and returns it in the form that the connection keeps."""

_EXAMPLES: Final[Mapping[str, str]] = {
    "client_settings": '{"socket.send.buffer.bytes": "1000000"}',
    "spark_source_options": '{"kafka.fetch.max.bytes": "1000000"}',
}
"""The fields that are JSON objects in the environment, each with an example."""
_FIELDS: Final = tuple(_TAKEN_BY)
_OPTIONAL: Final = frozenset(field.name for field in fields(KafkaConnection) if field.default is None)
_DEFAULTS: Final[Mapping[str, Any]] = {
    name: {} if name in _EXAMPLES else None if name == "bootstrap_servers" else getattr(KafkaConnection, name)
    for name in _FIELDS
}


def _checked(given: Mapping[str, Any], *, reads_files: bool) -> tuple[dict[str, Any], list[_Problem]]:
    """Return the fields in the form that a connection keeps, and what is wrong with them."""
    checked, problems = dict(given), []
    for name, take in _TAKEN_BY.items():
        if given[name] is None and name in _OPTIONAL:
            continue
        try:
            checked[name] = (take if reads_files or name not in FILES else _line_of_text)(given[name])
        except ValueError as error:
            problems.append(_Problem(str(error), name))
    if problems:
        return checked, problems
    protocol = checked["security_protocol"]
    sasl = authentication.sasl_problems(checked, uses_sasl=protocol.startswith("SASL_"))
    tls = tls_settings.tls_problems(checked, uses_tls=protocol.endswith("SSL"), reads_files=reads_files)
    return checked, [_Problem(text) for text in (*sasl, *tls)]


def _wrong(problems: Sequence[str], source: str) -> ConfigurationError:
    return ConfigurationError(f"Kafka connection ({source}): {'; '.join(problems)}")


def _json_object(text: str, name: str, example: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be a JSON object such as {example}")
    return value


def _read_file(path: "Path") -> dict[str, Any]:
    import tomllib

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
