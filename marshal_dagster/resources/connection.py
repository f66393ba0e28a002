"""The configuration of a Kafka connection in Dagster, and the base class of all resources.

`KafkaConnectionConfig` is a field of the other resources. `CheckedResource` reports invalid fields in one line, and
rejects secrets that are written in code.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any, Final, Self, get_args

from dagster import Config, ConfigurableResource, EnvVar
from dagster._utils.cached_method import cached_method  # has no public name
from pydantic import Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.authentication import SaslMechanism
from marshal_dagster.kafka.connection import (
    DEFAULT_TIMEOUT_S,
    LONGEST_TIMEOUT_S,
    SECRETS,
    KafkaConnection,
    SecurityProtocol,
)
from marshal_dagster.kafka.topic_names import topic_name_problem
from marshal_dagster.resources.launchpad import without_defaults

_PLACEHOLDERS: Final = {name: "-----BEGIN PRIVATE KEY-----" if name == "ssl_key_pem" else "?" for name in SECRETS}
"""Texts that take the place of secrets when a connection is checked before their variables are read."""


class KafkaConnectionConfig(Config):
    """The address of a Kafka cluster, and how to connect to it, as Dagster config.

    An invalid field raises `ConfigurationError` when the configuration is created.

    Example:
        ```python
        connection = KafkaConnectionConfig(
            bootstrap_servers="kafka-1:9093,kafka-2:9093",
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            username="etl",
            password=EnvVar("KAFKA_PASSWORD"),
        )
        ```
    """

    bootstrap_servers: str = Field(description="Brokers for the first connection: a comma-separated list of host:port.")
    security_protocol: SecurityProtocol = Field(
        default="PLAINTEXT", description="The security protocol of the brokers' listener."
    )
    sasl_mechanism: str | None = Field(
        default=None, description=f"One of {', '.join(get_args(SaslMechanism))}; only with SASL_PLAINTEXT and SASL_SSL."
    )
    username: str | None = Field(default=None, description="The user name for SASL.")
    # Not marked as a secret for Dagster: the launchpad would fill in asterisks as its value. Dagster stores only the
    # name of a variable, because `CheckedResource` rejects everything else.
    password: str | None = Field(
        default=None,
        repr=False,
        description='The password for SASL: EnvVar("NAME") in code, {"env": "NAME"} in YAML, never the value itself.',
    )
    password_file: str | None = Field(default=None, description="File with the password, such as a mounted secret.")
    oauth_token_endpoint_url: str | None = Field(
        default=None, description="For OAUTHBEARER: URL where an identity provider gives tokens (OIDC)."
    )
    oauth_client_id: str | None = Field(
        default=None, description="The client id at the identity provider, or that of a managed identity."
    )
    oauth_client_secret: str | None = Field(
        default=None, repr=False, description="The client's secret, in the form of `password`."
    )
    oauth_client_secret_file: str | None = Field(default=None, description="File with the client's secret.")
    oauth_scope: str | None = Field(default=None, description="The scope of the tokens.")
    oauth_extensions: str | None = Field(
        default=None, description="SASL extensions: name=value, separated by commas (Confluent Cloud: logicalCluster)."
    )
    oauth_ca_location: str | None = Field(
        default=None,
        description="PEM file of the certificate authorities that are trusted at the token endpoint (default: the "
        "system trust store).",
    )
    oauth_azure_resource: str | None = Field(
        default=None, description="For OAUTHBEARER: the resource for which Azure gives a managed identity tokens."
    )
    oauth_callback: str | None = Field(
        default=None,
        description="For OAUTHBEARER: package.module:function that returns a token and its expiry in unix seconds.",
    )
    aws_region: str | None = Field(default=None, description="For AWS_MSK_IAM: the region of the cluster.")
    aws_profile: str | None = Field(default=None, description="For AWS_MSK_IAM: the profile of AWS's configuration.")
    aws_role_arn: str | None = Field(default=None, description="For AWS_MSK_IAM: the role to assume.")
    kerberos_principal: str | None = Field(default=None, description="For GSSAPI: the principal of this client.")
    kerberos_keytab: str | None = Field(default=None, description="For GSSAPI: the keytab of the principal.")
    kerberos_service_name: str | None = Field(
        default=None, description="For GSSAPI: the primary of the brokers' principal (default: kafka)."
    )
    ssl_ca_location: str | None = Field(
        default=None, description="PEM file of the trusted certificate authorities (default: the system trust store)."
    )
    ssl_ca_pem: str | None = Field(default=None, description="The trusted certificate authorities as PEM text.")
    ssl_certificate_location: str | None = Field(default=None, description="PEM file of this client's certificate.")
    ssl_certificate_pem: str | None = Field(default=None, description="This client's certificate as PEM text.")
    ssl_key_location: str | None = Field(default=None, description="PEM file of this client's private key (PKCS#8).")
    ssl_key_pem: str | None = Field(
        default=None, repr=False, description="This client's private key as PEM text, in the form of `password`."
    )
    ssl_key_password: str | None = Field(
        default=None, repr=False, description="The password of the private key, in the form of `password`."
    )
    ssl_key_password_file: str | None = Field(default=None, description="File with the password of the private key.")
    ssl_keystore_location: str | None = Field(
        default=None, description="PKCS#12 key store with this client's certificate and private key."
    )
    ssl_keystore_password: str | None = Field(
        default=None, repr=False, description="The password of the key store, in the form of `password`."
    )
    ssl_keystore_password_file: str | None = Field(default=None, description="File with the password of the key store.")
    timeout_s: float = Field(
        default=DEFAULT_TIMEOUT_S,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="Maximum seconds for the first connection and for each request.",
    )
    client_settings: dict[str, str] = Field(
        default_factory=dict,
        description="Further settings of librdkafka; secrets as env:NAME or file:/PATH. Settings that the protocol "
        "prescribes are rejected.",
    )
    spark_source_options: dict[str, str] = Field(
        default_factory=dict,
        description="Further options of Spark's Kafka source, such as kafka.fetch.max.bytes; secrets as env:NAME or "
        "file:/PATH.",
    )
    spark_class_prefix: str | None = Field(
        default=None,
        description="Prefix of Java classes' names if Spark's Kafka client is shaded (Databricks: kafkashaded.).",
    )

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - pydantic validates them
        """Check everything that needs neither files nor environment variables.

        Args:
            **fields: The fields of this class.

        Raises:
            ConfigurationError: A field is invalid; the message names it.
        """
        wrong: ConfigurationError | None = None
        _reject_unknown_fields(type(self), fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = _in_one_line(type(self), error)
        if wrong is not None:
            raise wrong  # outside the `except` block, so that the traceback cannot contain secrets
        values = self._values()
        hidden = {name: text for name, text in _PLACEHOLDERS.items() if isinstance(values.get(name), EnvVar)}
        if not any(isinstance(value, EnvVar) for value in {**values, **hidden}.values()):
            KafkaConnection.check_settings({**values, **hidden})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, prefix: str = "MARSHAL_") -> Self:
        """Return the configuration from environment variables such as `MARSHAL_BOOTSTRAP_SERVERS`.

        Secrets stay in the environment: the configuration has only the names of their variables.

        Args:
            environment: The variables (default: those of this process).
            prefix: The prefix of the names of the variables.

        Returns:
            The configuration.

        Raises:
            ConfigurationError: A variable is missing, invalid, or contradicts another one.
        """
        environment = os.environ if environment is None else environment
        found = KafkaConnection.from_environment(environment, prefix=prefix)
        named = {name: EnvVar(f"{prefix}{name.upper()}") for name in SECRETS if getattr(found, name) is not None}
        plain = {name: value for name, value in vars(found).items() if value is not None and name not in SECRETS}
        return cls(**plain, **named)

    def to_connection(self, source: str) -> KafkaConnection:
        """Return the connection.

        Args:
            source: The name of this configuration in error messages.

        Returns:
            The connection, with the values of environment variables.

        Raises:
            ConfigurationError: A field is invalid, or a variable or file is missing.
        """
        return KafkaConnection.from_settings(self._values(), source=source)

    def secrets_in_code(self) -> list[str]:
        """Return the names of the fields with a secret in plain text instead of an `EnvVar`."""
        values = self._values()
        return [name for name in SECRETS if name in values and not isinstance(values[name], EnvVar)]

    def _values(self) -> dict[str, Any]:
        # Not `model_dump`, which would read the value of an EnvVar.
        return {name: value for name in type(self).model_fields if (value := self.__dict__[name]) is not None}


def secret_in_code(where: str, field: str) -> ConfigurationError:
    """Return the error for a secret that is written in code."""
    return ConfigurationError(
        f"{where} is written in the code, so Dagster would store and show it: put it into an environment variable and "
        f'pass {field}=EnvVar("ITS_NAME")'
    )


def check_topic(value: str) -> str:
    """Return `value`, or raise `ValueError` if Kafka allows no topic of this name."""
    problem = topic_name_problem(value)
    if problem is not None:
        raise ValueError(problem)
    return value


def _reject_unknown_fields(cls: type[Any], given: Mapping[str, Any]) -> None:
    """Reject unknown fields, which pydantic would ignore silently."""
    unknown = sorted(given.keys() - cls.model_fields.keys())
    if not unknown:
        return
    near = [match for name in unknown for match in difflib.get_close_matches(name, cls.model_fields, n=1)]
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(cls.model_fields)}"
    raise ConfigurationError(f"{cls.__name__} has no field {', '.join(unknown)}; {hint}")


def _in_one_line(cls: type[Any], error: ValidationError) -> ConfigurationError:
    """Return a one-line error with the invalid fields, without their values unless a check reports them."""
    texts = []
    for problem in error.errors():
        field, text = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        if problem["input"] is None and field in cls.model_fields:  # Dagster passes None for what is missing
            text = f"must be set ({(cls.model_fields[field].description or '').rstrip('.')})"
        texts.append(f"{field}: {text}" if field else text)
    return ConfigurationError(f"{cls.__name__}: {'; '.join(texts)}")


class CheckedResource(ConfigurableResource):  # type: ignore[type-arg] # it is its own value
    """Base class of the resources: an invalid or unknown field raises a `ConfigurationError` in one line."""

    @cached_method  # Dagster finds nested resources by the identity of their definitions
    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Return Dagster's definition of this resource, whose settings stay out of the launchpad.

        Secrets in plain text are rejected, because Dagster would show them.
        """
        for field, value in self.__dict__.items():
            for name in value.secrets_in_code() if isinstance(value, KafkaConnectionConfig) else ():
                raise secret_in_code(f"{type(self).__name__}: {field}.{name}", name)
        return without_defaults(super().get_resource_definition())

    @model_validator(mode="wrap")
    @classmethod
    def _errors_in_one_line(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401 - pydantic's
        if isinstance(values, Mapping):
            _reject_unknown_fields(cls, values)
        try:
            return check(values)
        except ValidationError as error:
            wrong = _in_one_line(cls, error)
        raise wrong  # outside the `except` block, so that the traceback cannot contain secrets
