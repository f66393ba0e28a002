"""Schemas by Confluent's own client of a schema registry, which has OAuth, client certificates and retries."""

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.spark.decoding.schemas import LARGEST_ID, LATEST, UNKNOWN_CODES, Schema, SchemaKind, missing_schema

_FORMAT: Final = "serialized"
"""The form in which the registry gives Protobuf schemas. It gives those of other languages as they are."""
_TEXT_OF_PROTOBUF: Final = ("syntax", "message", "package", "import", "//", "/*", "enum")


class RegistryClient(Protocol):
    """What `ConfluentSchemas` needs of `confluent_kafka.schema_registry.SchemaRegistryClient`."""

    def get_schema(self, schema_id: int, subject_name: str | None = None, fmt: str | None = None) -> Any:  # noqa: ANN401 - Confluent's
        """Return a schema by its id."""
        ...

    def get_version(
        self,
        subject_name: str,
        version: Any = "latest",  # noqa: ANN401 - Confluent's
        deleted: bool = False,  # noqa: FBT001, FBT002 - Confluent's
        fmt: str | None = None,
    ) -> Any:  # noqa: ANN401 - Confluent's
        """Return a version of a subject."""
        ...


@dataclass(frozen=True, slots=True)
class ConfluentSchemas:
    """A schema registry that is reached by Confluent's own client (`confluent-kafka[schemaregistry]`).

    Take `SchemaRegistry` unless the registry needs OAuth, a client certificate or the client's retries. Pass a client
    that nothing else uses: the client keeps each schema in the form in which it was requested first.

    Example:
        ```python
        from confluent_kafka.schema_registry import SchemaRegistryClient

        client = SchemaRegistryClient(
            {
                "url": "https://registry:8081",
                "ssl.certificate.location": "/etc/registry/client.pem",
                "ssl.key.location": "/etc/registry/client-key.pem",
            }
        )
        rows = decode_avro(frame, ConfluentSchemas(client), subject="orders-value").or_fail()
        ```
    """

    client: RegistryClient = field(repr=False)
    """The client, with its address, credentials, timeouts and retries."""
    largest_id: int = LARGEST_ID
    """The highest schema id of the registry. Larger ids in broken records are unknown without a request."""

    def by_id(self, number: int, /) -> Schema | None:
        """Return a schema by its id; the client requests each one once.

        Args:
            number: The id.

        Returns:
            The schema; None if the registry has none with this id.

        Raises:
            UnavailableError: The registry cannot be reached.
            ConfigurationError: The registry rejects the credentials, or the client has kept the schema in another form.
        """
        if number > self.largest_id:
            return None
        return self._schema(lambda: self.client.get_schema(number, fmt=_FORMAT))

    def latest(self, subject: str, /) -> Schema:
        """Return the newest schema of a subject; each call requests it.

        Args:
            subject: The subject.

        Returns:
            The schema.

        Raises:
            UnavailableError: The registry cannot be reached.
            ConfigurationError: There is no such subject, or the registry rejects the credentials.
        """
        return self._version(subject, LATEST)

    def _version(self, subject: str, version: int | str) -> Schema:
        found = self._schema(lambda: self.client.get_version(subject, version, fmt=_FORMAT).schema)
        if found is None:
            raise missing_schema("the schema registry", subject, version)
        return found

    def _schema(self, request: Callable[[], Any]) -> Schema | None:
        try:
            answer = request()
        except Exception as error:  # its errors need packages that may not be installed
            if not _is_unknown(error):
                raise _failure(error) from error
            return None
        kind, text = SchemaKind(answer.schema_type or SchemaKind.AVRO), str(answer.schema_str)
        if kind is SchemaKind.PROTOBUF and text.lstrip().startswith(_TEXT_OF_PROTOBUF):
            raise ConfigurationError(
                "the client of the schema registry has kept a Protobuf schema as text, because it was used for that "
                "before: give ConfluentSchemas a client of its own"
            )
        references = answer.references or ()
        return Schema(kind, text, {each.name: self._version(each.subject, each.version) for each in references})


def _is_unknown(error: Exception) -> bool:
    """Return whether the registry definitely has none. An outage must make no record bad."""
    status = getattr(error, "http_status_code", None)
    return status == HTTPStatus.NOT_FOUND and getattr(error, "error_code", None) in UNKNOWN_CODES


def _failure(error: Exception) -> MarshalError:
    status = getattr(error, "http_status_code", None)
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return ConfigurationError(
            f"the schema registry rejects this user ({error}): check the credentials of its client"
        )
    if status == HTTPStatus.NOT_FOUND:
        return ConfigurationError(
            f"the address does not answer as a schema registry ({error}): check the url of its client"
        )
    return UnavailableError(
        f"the schema registry cannot be used ({type(error).__name__}: {error}): check its client's settings, and the "
        "network"
    )
