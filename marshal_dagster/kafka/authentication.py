"""The ways to authenticate with SASL: which fields each one needs, and what librdkafka and Spark's Kafka client get.

Each way is one entry of `METHODS`. An entry has both renderings, so a way cannot work for one client only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.secret_text import FILE_OF, read_pem_file, secret_of
from marshal_dagster.kafka.token_callbacks import aws_msk_iam_callback, token_callback

SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM", "GSSAPI"]
Fields = Mapping[str, Any]
"""The fields of a connection by name."""

NOT_FOR_SPARK: Final = "none"
"""The value of `LOGIN_HANDLER` for a connection with which Spark does not read."""
LOGIN_HANDLER: Final = "kafka.sasl.login.callback.handler.class"
TOKEN_ENDPOINT: Final = "kafka.sasl.oauthbearer.token.endpoint.url"  # noqa: S105 - the name of an option
GRANT_TYPE: Final = "sasl.oauthbearer.grant.type"
"""The setting in `client_settings` for tokens by another grant than that of client credentials."""
_JAAS: Final = "kafka.sasl.jaas.config"
_OAUTH: Final = "sasl.oauthbearer."
_KAFKA: Final = "org.apache.kafka.common.security"
_OAUTH_MODULE: Final = f"{_KAFKA}.oauthbearer.OAuthBearerLoginModule"
_OAUTH_HANDLER: Final = f"{_KAFKA}.oauthbearer.OAuthBearerLoginCallbackHandler"
"""From Kafka 3.4 on, which Spark 3.5 has, the handler is in this package. Kafka 4 has no other."""
_AWS: Final = "software.amazon.msk.auth.iam"
_AZURE_API: Final = "2018-02-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to authenticate: its fields, and what both clients get."""

    mechanism: SaslMechanism
    needs: tuple[str, ...]
    """The fields that must be set. A secret may come from its file instead."""
    may_have: tuple[str, ...] = ()
    librdkafka: Callable[[Fields], Mapping[str, Any]]
    """Returns the settings for librdkafka."""
    spark: Callable[[Fields, str], Mapping[str, str]]
    """Returns the options for Spark. The second argument is the prefix of the names of Java classes."""
    needs_handler: bool = False
    """Whether Kafka's Java client can do it only with a login callback handler that the user names."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that this way uses, each secret followed by that of its file."""
        named = (*self.needs, *self.may_have)
        return tuple(name for field in named for name in (field, FILE_OF.get(field)) if name is not None)


def sasl_problems(fields: Fields, *, uses_sasl: bool) -> list[str]:
    """Return what is wrong with the fields that are for SASL, each with what would be right.

    Args:
        fields: The connection's fields, each of which is valid by itself.
        uses_sasl: Whether the security protocol has SASL.

    Returns:
        The problems.
    """
    given = [name for name in ("sasl_mechanism", *SASL_FIELDS) if fields.get(name) is not None]
    protocol, mechanism = fields["security_protocol"], fields["sasl_mechanism"]
    if not uses_sasl:
        return [useless(given, protocol, "SASL_SSL or SASL_PLAINTEXT")] if given else []
    if mechanism is None:
        return [f"security_protocol {protocol} needs sasl_mechanism: {listed(get_args(SaslMechanism))}"]
    if mechanism == "AWS_MSK_IAM" and protocol != "SASL_SSL":
        return ["sasl_mechanism AWS_MSK_IAM needs security_protocol SASL_SSL, because Amazon MSK has no other listener"]
    both = [f"set {name} or {FILE_OF[name]}, not both" for name in FILE_OF if name in given and FILE_OF[name] in given]
    if "aws_profile" in given and "aws_role_arn" in given:
        both.append("set aws_profile or aws_role_arn, not both")
    if mechanism == "OAUTHBEARER" and (problem := _token_source_problem(fields)):
        return [problem, *both]
    method = method_of(fields)
    missing = [name for name in method.needs if name not in given and FILE_OF.get(name) not in given]
    surplus = [name for name in given if name not in method.fields and name != "sasl_mechanism"]
    problems = [f"sasl_mechanism {mechanism} needs {listed(map(_or_file, missing), 'and')}"] if missing else []
    if surplus:
        problems.append(
            f"{listed(surplus, 'and')} would not be used with sasl_mechanism {mechanism}: {_advice(method)}"
        )
    if method.needs_handler and LOGIN_HANDLER not in fields["spark_source_options"]:
        problems.append(_handler_problem(fields))
    return [*problems, *both]


def useless(names: Sequence[str], protocol: str, protocols: str) -> str:
    """Return the problem that `names` would not be used with a security protocol; `protocols` would use them."""
    return (
        f"{' and '.join(names)} would not be used with security_protocol {protocol}: "
        f"choose {protocols}, or remove what is not used"
    )


def method_of(fields: Fields) -> Method:
    """Return the way to authenticate of a connection whose security protocol has SASL."""
    if fields["sasl_mechanism"] != "OAUTHBEARER":
        return METHODS[fields["sasl_mechanism"]]
    (source,) = _token_sources(fields)
    return METHODS[source]


def advice(fields: Fields) -> str:
    """Return which fields to check if the brokers, or the source of tokens, reject the client."""
    method = method_of(fields)
    return (
        f"check {listed([name for name in method.fields if fields.get(name) is not None] + ['sasl_mechanism'], 'and')}"
    )


def librdkafka_settings(fields: Fields) -> dict[str, Any]:
    """Return librdkafka's settings for SASL, with the secrets as plain text.

    Raises:
        ConfigurationError: The file of a secret cannot be read, or a token callback cannot be imported.
    """
    method = method_of(fields)
    mechanism = "OAUTHBEARER" if method.mechanism == "AWS_MSK_IAM" else method.mechanism
    return _set({"sasl.mechanisms": mechanism, **method.librdkafka(fields)})


def spark_options(fields: Fields) -> dict[str, str]:
    """Return the options of Spark's Kafka source for SASL, with the secrets as plain text.

    Raises:
        ConfigurationError: The file of a secret cannot be read, or the connection is not for Spark.
    """
    method = method_of(fields)
    if fields["spark_source_options"].get(LOGIN_HANDLER) == NOT_FOR_SPARK:
        raise ConfigurationError(
            f"Spark cannot read with this connection, because its spark_source_options set {LOGIN_HANDLER} to "
            f"{NOT_FOR_SPARK!r}: name the class of a login callback handler there"
        )
    return _set({"kafka.sasl.mechanism": method.mechanism, **method.spark(fields, fields["spark_class_prefix"] or "")})


def jaas(module: str, options: Mapping[str, str | None]) -> str:
    """Return the line of a JAAS configuration that requires a login module; options without a value are left out."""
    given = "".join(f" {name}={_quoted(value)}" for name, value in options.items() if value is not None)
    return f"{module} required{given};"


def _quoted(text: str) -> str:
    """Return `text` quoted for a line of a JAAS configuration, in which a backslash escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n")
    return f'"{escaped}"'


def _set(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def listed(names: Iterable[str], last: str = "or") -> str:
    """Return names as text: `a`, `a or b`, or `a, b or c`. There is at least one."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


def _or_file(name: str) -> str:
    return f"{name} (or {FILE_OF[name]})" if name in FILE_OF else name


def _advice(method: Method) -> str:
    used = listed(map(_or_file, (*method.needs, *method.may_have) or ("client_settings",)), "and")
    return f"remove what is not used; it uses {used}"


# The sources of tokens for OAUTHBEARER


def _token_sources(fields: Fields) -> list[str]:
    given = [name for name in TOKEN_SOURCES if fields.get(name) is not None]
    if not given and any(name.startswith(_OAUTH) for name in fields["client_settings"]):
        return ["client_settings"]
    return given


def _token_source_problem(fields: Fields) -> str | None:
    given = _token_sources(fields)
    if GRANT_TYPE in fields["client_settings"] and given != ["client_settings"]:
        given = [*given, f"client_settings[{GRANT_TYPE!r}]"]
    if len(given) == 1:
        return None
    if given:
        return f"{listed(given, 'and')} are different sources of tokens for sasl_mechanism OAUTHBEARER: set only one"
    return (
        "sasl_mechanism OAUTHBEARER needs a source of tokens: oauth_token_endpoint_url with oauth_client_id and "
        f"{_or_file('oauth_client_secret')}, or oauth_azure_resource, or oauth_callback"
    )


def _handler_problem(fields: Fields) -> str:
    return (
        f"{_token_sources(fields)[0]} is for librdkafka only, and Kafka's Java client in Spark needs the class that "
        f"gets its tokens: set spark_source_options[{LOGIN_HANDLER!r}] to it, or to {NOT_FOR_SPARK!r} if Spark does "
        "not read with this connection"
    )


def _extensions(fields: Fields) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in (fields["oauth_extensions"] or "").split(",") if pair)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _extensions_text(fields: Fields) -> str | None:
    return ",".join(f"{name}={value}" for name, value in _extensions(fields).items()) or None


def _oidc_for_librdkafka(fields: Fields) -> Mapping[str, Any]:
    return {
        f"{_OAUTH}method": "oidc",
        f"{_OAUTH}token.endpoint.url": fields["oauth_token_endpoint_url"],
        f"{_OAUTH}client.id": fields["oauth_client_id"],
        f"{_OAUTH}client.secret": secret_of(fields, "oauth_client_secret"),
        f"{_OAUTH}scope": fields["oauth_scope"],
        f"{_OAUTH}extensions": _extensions_text(fields),
        "https.ca.location": fields["oauth_ca_location"],
    }


def _oidc_for_spark(fields: Fields, prefix: str) -> Mapping[str, Any]:
    authority = fields["oauth_ca_location"]
    options = {
        "clientId": fields["oauth_client_id"],
        "clientSecret": secret_of(fields, "oauth_client_secret"),
        "scope": fields["oauth_scope"],
        **{f"extension_{name}": value for name, value in _extensions(fields).items()},
        "ssl.truststore.type": None if authority is None else "PEM",
        "ssl.truststore.certificates": None if authority is None else read_pem_file(authority, "oauth_ca_location"),
    }
    return {
        LOGIN_HANDLER: f"{prefix}{_OAUTH_HANDLER}",
        TOKEN_ENDPOINT: fields["oauth_token_endpoint_url"],
        _JAAS: jaas(f"{prefix}{_OAUTH_MODULE}", options),
    }


def _azure_for_librdkafka(fields: Fields) -> Mapping[str, Any]:
    from urllib.parse import urlencode

    query = _set(
        {
            "api-version": _AZURE_API,
            "resource": fields["oauth_azure_resource"],
            "client_id": fields["oauth_client_id"],
        }
    )
    return {
        f"{_OAUTH}method": "oidc",
        f"{_OAUTH}metadata.authentication.type": "azure_imds",
        f"{_OAUTH}config": f"query={urlencode(query)}",
        f"{_OAUTH}extensions": _extensions_text(fields),
    }


def _handler_for_spark(fields: Fields, prefix: str) -> Mapping[str, Any]:
    options = {
        "clientId": fields["oauth_client_id"],
        "scope": fields["oauth_azure_resource"],
        **{f"extension_{name}": value for name, value in _extensions(fields).items()},
    }
    return {_JAAS: jaas(f"{prefix}{_OAUTH_MODULE}", options)}


# The other mechanisms


def _password_for_librdkafka(fields: Fields) -> Mapping[str, Any]:
    return {"sasl.username": fields["username"], "sasl.password": secret_of(fields, "password")}


def _password_for_spark(module: str) -> Callable[[Fields, str], Mapping[str, Any]]:
    def options(fields: Fields, prefix: str) -> Mapping[str, Any]:
        named = {"username": fields["username"], "password": secret_of(fields, "password")}
        return {_JAAS: jaas(f"{prefix}{_KAFKA}.{module}", named)}

    return options


def _aws_for_librdkafka(fields: Fields) -> Mapping[str, Any]:
    return {"oauth_cb": aws_msk_iam_callback(fields["aws_region"], fields["aws_profile"], fields["aws_role_arn"])}


def _aws_for_spark(fields: Fields, prefix: str) -> Mapping[str, Any]:
    options = {
        "awsProfileName": fields["aws_profile"],
        "awsRoleArn": fields["aws_role_arn"],
        "awsStsRegion": fields["aws_region"],
    }
    return {
        _JAAS: jaas(f"{prefix}{_AWS}.IAMLoginModule", options),
        "kafka.sasl.client.callback.handler.class": f"{prefix}{_AWS}.IAMClientCallbackHandler",
    }


def _kerberos_for_librdkafka(fields: Fields) -> Mapping[str, Any]:
    return {
        "sasl.kerberos.service.name": fields["kerberos_service_name"],
        "sasl.kerberos.principal": fields["kerberos_principal"],
        "sasl.kerberos.keytab": fields["kerberos_keytab"],
    }


def _kerberos_for_spark(fields: Fields, prefix: str) -> Mapping[str, Any]:  # noqa: ARG001 - the module is Java's own
    options = {
        "useKeyTab": "true",
        "storeKey": "true",
        "keyTab": fields["kerberos_keytab"],
        "principal": fields["kerberos_principal"],
    }
    return {
        "kafka.sasl.kerberos.service.name": fields["kerberos_service_name"] or "kafka",
        _JAAS: jaas("com.sun.security.auth.module.Krb5LoginModule", options),
    }


def _with_password(mechanism: SaslMechanism, module: str) -> Method:
    return Method(
        mechanism=mechanism,
        needs=("username", "password"),
        librdkafka=_password_for_librdkafka,
        spark=_password_for_spark(module),
    )


METHODS: Final[Mapping[str, Method]] = {
    "PLAIN": _with_password("PLAIN", "plain.PlainLoginModule"),
    "SCRAM-SHA-256": _with_password("SCRAM-SHA-256", "scram.ScramLoginModule"),
    "SCRAM-SHA-512": _with_password("SCRAM-SHA-512", "scram.ScramLoginModule"),
    "AWS_MSK_IAM": Method(
        mechanism="AWS_MSK_IAM",
        needs=("aws_region",),
        may_have=("aws_profile", "aws_role_arn"),
        librdkafka=_aws_for_librdkafka,
        spark=_aws_for_spark,
    ),
    "GSSAPI": Method(
        mechanism="GSSAPI",
        needs=("kerberos_principal", "kerberos_keytab"),
        may_have=("kerberos_service_name",),
        librdkafka=_kerberos_for_librdkafka,
        spark=_kerberos_for_spark,
    ),
    "oauth_token_endpoint_url": Method(
        mechanism="OAUTHBEARER",
        needs=("oauth_token_endpoint_url", "oauth_client_id", "oauth_client_secret"),
        may_have=("oauth_scope", "oauth_extensions", "oauth_ca_location"),
        librdkafka=_oidc_for_librdkafka,
        spark=_oidc_for_spark,
    ),
    "oauth_azure_resource": Method(
        mechanism="OAUTHBEARER",
        needs=("oauth_azure_resource",),
        may_have=("oauth_client_id", "oauth_extensions"),
        librdkafka=_azure_for_librdkafka,
        spark=_handler_for_spark,
        needs_handler=True,
    ),
    "oauth_callback": Method(
        mechanism="OAUTHBEARER",
        needs=("oauth_callback",),
        may_have=("oauth_extensions",),
        librdkafka=lambda fields: {"oauth_cb": token_callback(fields["oauth_callback"], _extensions(fields))},
        spark=_handler_for_spark,
        needs_handler=True,
    ),
    "client_settings": Method(
        mechanism="OAUTHBEARER",
        needs=(),
        librdkafka=lambda _: {},
        spark=_handler_for_spark,
        needs_handler=True,
    ),
}
"""The ways to authenticate, by SASL mechanism; those of OAUTHBEARER by the field that names the source of tokens."""

TOKEN_SOURCES: Final = ("oauth_token_endpoint_url", "oauth_azure_resource", "oauth_callback")
SASL_FIELDS: Final = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.fields))
"""All fields that are for SASL only, apart from `sasl_mechanism`."""
