"""Where a Kafka cluster is, as Dagster config, and what all resources check of their fields."""

import os
from collections.abc import Mapping
from typing import Any, Final, Self, get_args

from dagster import Config, ConfigurableResource, EnvVar
from pydantic import Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import (
    DEFAULT_TIMEOUT_S,
    LONGEST_TIMEOUT_S,
    KafkaConnection,
    SaslMechanism,
    SecurityProtocol,
)
from marshal_dagster.kafka.topic_names import topic_name_problem

_SECRETS: Final = ("password", "ssl_key_password")
_FILES: Final = ("ssl_ca_location", "ssl_certificate_location", "ssl_key_location")


class KafkaConnectionConfig(Config):
    """Where a Kafka cluster is and how to speak to it, as Dagster config."""

    bootstrap_servers: str = Field(description="Brokers to ask first: a comma-separated list of host:port.")
    security_protocol: SecurityProtocol = Field(default="PLAINTEXT", description="How the brokers' listener speaks.")
    sasl_mechanism: str | None = Field(
        default=None, description=f"One of {', '.join(get_args(SaslMechanism))}; with SASL_PLAINTEXT and SASL_SSL only."
    )
    username: str | None = Field(default=None, description="The user name for SASL.")
    # Not marked as Dagster's secrets: the launchpad would fill in asterisks, as if they were the password. What Dagster
    # stores is a variable's name, because `CheckedResource` refuses all else.
    password: str | None = Field(
        default=None,
        repr=False,
        description='The password for SASL: EnvVar("NAME") in code, {"env": "NAME"} in YAML, never the text itself.',
    )
    ssl_ca_location: str | None = Field(
        default=None, description="PEM file of the authorities to trust; by default those that the system trusts."
    )
    ssl_certificate_location: str | None = Field(default=None, description="PEM file of this client's certificate.")
    ssl_key_location: str | None = Field(default=None, description="PEM file of this client's key (PKCS#8).")
    ssl_key_password: str | None = Field(
        default=None, repr=False, description="The key's password; given as `password` is."
    )
    timeout_s: float = Field(
        default=DEFAULT_TIMEOUT_S,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="Seconds that the first connection and each request may take.",
    )
    client_settings: dict[str, str] = Field(
        default_factory=dict,
        description="Further settings for librdkafka alone; those that the protocol decides are refused.",
    )

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - pydantic judges them
        """Check at once what can be checked without files and environment.

        Raises `ConfigurationError`, naming the field.
        """
        wrong: ConfigurationError | None = None
        _reject_unknown_fields(type(self), fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = _in_one_line(type(self), error)
        if wrong is not None:
            raise wrong  # out here: in the block it would carry pydantic's error with all that was given
        values = self._values()
        if not any(isinstance(value, EnvVar) for value in values.values()):
            unseen = {*_FILES, *(("ssl_key_password",) if self.ssl_key_location is not None else ())}
            KafkaConnection.from_settings({name: value for name, value in values.items() if name not in unseen})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, prefix: str = "MARSHAL_") -> Self:
        """Take what variables such as `MARSHAL_BOOTSTRAP_SERVERS` say; secrets stay in the environment, by name.

        Raises `ConfigurationError`: a variable is missing, wrong, or contradicts another.
        """
        environment = os.environ if environment is None else environment
        found = KafkaConnection.from_environment(environment, prefix=prefix)
        named = {name: EnvVar(f"{prefix}{name.upper()}") for name in _SECRETS if getattr(found, name) is not None}
        plain = {name: value for name, value in vars(found).items() if value is not None and name not in _SECRETS}
        return cls(**plain, **named)

    def to_connection(self, source: str) -> KafkaConnection:
        """Give the connection; `source` says in errors where the fields stand. Raises `ConfigurationError`."""
        return KafkaConnection.from_settings(self._values(), source=source)

    def secrets_in_code(self) -> list[str]:
        """Name the secrets that are written down instead of named by their environment variable."""
        values = self._values()
        return [name for name in _SECRETS if name in values and not isinstance(values[name], EnvVar)]

    def _values(self) -> dict[str, Any]:
        # Not `model_dump`, which would ask an EnvVar for its value.
        return {name: value for name in type(self).model_fields if (value := self.__dict__[name]) is not None}


def secret_in_code(where: str, field: str) -> ConfigurationError:
    """Return the error that a secret is written down, with what to do."""
    return ConfigurationError(
        f"{where} is written down in the code, where Dagster stores and shows it: put it into an environment variable "
        f'and give {field}=EnvVar("ITS_NAME")'
    )


def check_topic(value: str) -> str:
    """Return `value`, or raise `ValueError` if Kafka allows no topic of this name."""
    problem = topic_name_problem(value)
    if problem is not None:
        raise ValueError(problem)
    return value


def _reject_unknown_fields(cls: type[Any], given: Mapping[str, Any]) -> None:
    """Refuse fields that a config or resource does not have, which pydantic would leave out without a word."""
    unknown = sorted(given.keys() - cls.model_fields.keys())
    if unknown:
        raise ConfigurationError(
            f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(cls.model_fields)}"
        )


def _in_one_line(cls: type[Any], error: ValidationError) -> ConfigurationError:
    """Name the wrong fields as our own error, in one line; a value is in it only where a check puts it."""
    texts = []
    for problem in error.errors():
        field, text = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        texts.append(f"{field}: {text}" if field else text)
    return ConfigurationError(f"{cls.__name__}: {'; '.join(texts)}")


class CheckedResource(ConfigurableResource):  # type: ignore[type-arg] # it is its own value
    """A resource that says in one line which field is wrong, one that it does not have among them.

    Making one raises `ConfigurationError`.
    """

    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Return what Dagster stores of this resource; refuses secrets in plain text, which Dagster would show."""
        for field, value in self.__dict__.items():
            for name in value.secrets_in_code() if isinstance(value, KafkaConnectionConfig) else ():
                raise secret_in_code(f"{type(self).__name__}: {field}.{name}", name)
        return super().get_resource_definition()

    @model_validator(mode="wrap")
    @classmethod
    def _errors_in_one_line(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401 - pydantic's
        if isinstance(values, Mapping):
            _reject_unknown_fields(cls, values)
        try:
            return check(values)
        except ValidationError as error:
            wrong = _in_one_line(cls, error)
        raise wrong  # out here: in the block it would carry pydantic's error with all that was given
