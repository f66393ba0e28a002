"""Sources of the schemas of messages with Confluent's frame: a schema registry, or files.

Only the driver reads schemas.
"""

import base64
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark.time_limit import within

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.request import OpenerDirector, Request

UNKNOWN_CODES: Final = frozenset({40401, 40402, 40403})
"""The error codes of a registry for an unknown subject, version or schema."""
LARGEST_ID: Final = 2**31 - 1
"""The largest possible id. For a larger one a registry answers as for an unknown path."""
LATEST: Final = "latest"
"""The name of a subject's newest version in a registry's paths."""
_ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"
_MOST_BYTES: Final = 16 * 1024 * 1024


class SchemaKind(StrEnum):
    """The languages of schemas, by their names in a registry."""

    AVRO = "AVRO"
    PROTOBUF = "PROTOBUF"
    JSON = "JSON"


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema, with the schemas that it references."""

    kind: SchemaKind
    """The language."""
    text: str
    """The registered text. For Protobuf: the serialized `FileDescriptorProto` of its file, in base64."""
    references: Mapping[str, "Schema"] = field(default_factory=dict)
    """The schemas whose types it uses, by the names that it uses for them."""


class Schemas(Protocol):
    """A source of schemas, by the ids in messages. `SchemaRegistry`, `ConfluentSchemas` and `SchemaFiles` are sources.

    Example:
        ```python
        class MySchemas:
            largest_id = 100

            def by_id(self, number):
                return Schema(SchemaKind.AVRO, read_my_schema(number))

            def latest(self, subject):
                return self.by_id(newest_id_of(subject))
        ```
    """

    @property
    def largest_id(self) -> int:
        """The largest id that a schema can have; `by_id` is not called for larger ones."""
        ...

    def by_id(self, number: int, /) -> Schema | None:
        """Return a schema by its id.

        Args:
            number: The id.

        Returns:
            The schema; None if there is definitely none.

        Raises:
            MarshalError: The source cannot be read.
        """
        ...

    def latest(self, subject: str, /) -> Schema:
        """Return the newest schema of a subject.

        Args:
            subject: The subject.

        Returns:
            The schema.

        Raises:
            MarshalError: There is none, or the source cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class SchemaFiles:
    """The writers' schemas in files.

    Avro schemas are in files with the suffix `.avsc`. Other files have Protobuf descriptors, written by
    `protoc --descriptor_set_out=...` for one `.proto` file.

    Example:
        ```python
        schemas = SchemaFiles({1: "schemas/order-v1.avsc", 7: "schemas/order-v2.avsc"})
        ```
    """

    by_number: Mapping[int, str | os.PathLike[str]]
    """The path of the file of each schema id."""

    @property
    def largest_id(self) -> int:
        """The largest id that has a file."""
        return max(self.by_number, default=0)

    def by_id(self, number: int, /) -> Schema | None:
        """Read the file of a schema id.

        Args:
            number: The id.

        Returns:
            The schema; None if the id has no file.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        path = self.by_number.get(number)
        if path is None:
            return None
        if Path(path).suffix == ".avsc":
            return Schema(SchemaKind.AVRO, read_schema_file(path))
        return Schema(SchemaKind.PROTOBUF, _last_file(path))

    def latest(self, subject: str, /) -> Schema:
        """Return nothing and raise an error, because files have no subjects.

        Args:
            subject: Any subject.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"subject is {subject!r}, but files have no subjects: pass the reader's schema itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRegistry:
    """A schema registry with Confluent's REST interface.

    Only the driver sends the credentials, and no `repr` contains them.

    Example:
        ```python
        registry = SchemaRegistry(url="https://registry:8081", token=os.environ["REGISTRY_TOKEN"])
        ```
    """

    url: str
    """The address, starting with http:// or https://."""
    username: str | None = None
    """The user name for basic authentication, with `password`."""
    password: str | None = field(default=None, repr=False)
    """The password for basic authentication."""
    token: str | None = field(default=None, repr=False)
    """The bearer token, instead of `username` and `password`."""
    ca_location: str | None = None
    """PEM file of the trusted certificate authorities (default: the system trust store)."""
    timeout_s: float = 10.0
    """The maximum time of a whole request, in seconds."""
    largest_id: int = LARGEST_ID
    """The highest schema id of the registry. Larger ids in broken records are unknown without a request."""
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the address, and that no secret is in it. Raises `ConfigurationError`."""
        from urllib.parse import urlsplit

        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigurationError(
                "the url of the schema registry must start with http:// or https:// and have a host"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError(
                "the url of the schema registry must have only the address: pass credentials as username and password"
            )
        if (self.username is None) != (self.password is None) or (self.token and self.username):
            raise ConfigurationError(
                "the credentials of the schema registry are incomplete or contradictory: pass username and password, "
                "or token, or none of them"
            )
        if not 0 < self.largest_id <= LARGEST_ID:
            raise ConfigurationError(f"largest_id is {self.largest_id}; it must be from 1 to {LARGEST_ID}")
        if self.token and not (
            self.token.isascii() and self.token.isprintable()
        ):  # the error of http.client would show it
            raise ConfigurationError("token has invalid characters, such as a line break at its end: remove them")

    def by_id(self, number: int, /) -> Schema | None:
        """Return a schema by its id; each one is requested once.

        Args:
            number: The id.

        Returns:
            The schema; None if the registry has none with this id.

        Raises:
            UnavailableError: The registry cannot be reached.
            ConfigurationError: The registry rejects the credentials, or the URL is not that of a registry.
        """
        return self._schema(f"/schemas/ids/{number}") if number <= self.largest_id else None

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

    def _version(self, subject: str, version: str) -> Schema:
        from urllib.parse import quote

        path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
        schema = self._schema(path, keep=version != LATEST)
        if schema is None:
            raise missing_schema(f"schema registry {self.url}", subject, version)
        return schema

    def _schema(self, path: str, *, keep: bool = True) -> Schema | None:
        answer = self._ask(path, keep=keep)
        if answer is not None and answer.get("schemaType") == SchemaKind.PROTOBUF:
            if "id" in answer:
                path, keep = f"/schemas/ids/{answer['id']}", True  # the newest one may have changed by now
            answer = self._ask(f"{path}?format=serialized", keep=keep)
        if answer is None:
            return None
        try:
            kind = SchemaKind(answer.get("schemaType", SchemaKind.AVRO))
            references = {
                str(reference["name"]): self._version(str(reference["subject"]), str(int(reference["version"])))
                for reference in answer.get("references") or ()
            }
            return Schema(kind, str(answer["schema"]), references)
        except (KeyError, TypeError, ValueError) as error:
            raise self._is_no_registry(repr(error)) from error

    def _ask(self, path: str, *, keep: bool = True) -> Mapping[str, Any] | None:
        """Return the answer; None if the registry has none. Answers that never change are cached."""
        answer: Mapping[str, Any] | None = self._known.get(path)
        if answer is None:
            answer = self._request(path)
            if answer is not None and keep:
                self._known[path] = answer
        return answer

    def _request(self, path: str) -> Mapping[str, Any] | None:
        from http.client import HTTPException

        try:
            status, body = within(self.timeout_s, lambda: self._exchange(path))
        except TimeoutError as error:
            raise UnavailableError(
                f"schema registry {self.url} did not answer within {self.timeout_s:g} s; check it, or raise timeout_s"
            ) from error
        except (OSError, ValueError, HTTPException) as error:  # unknown host, TLS, truncated answer
            raise UnavailableError(
                f"schema registry {self.url} cannot be reached: {error}; check the address and the network"
            ) from error
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if status != HTTPStatus.OK:
            self._raise_unless_unknown(status, answer)
            return None
        if not isinstance(answer, dict):
            raise self._is_no_registry("no JSON object")
        return answer

    def _exchange(self, path: str) -> tuple[int, bytes]:
        from urllib.request import Request

        request = Request(f"{self.url.rstrip('/')}{path}", headers=self._headers())  # noqa: S310 - http(s), see above
        with _opener(self.ca_location).open(request, timeout=self.timeout_s) as answer:
            return answer.status, answer.read(_MOST_BYTES)

    def _raise_unless_unknown(self, status: int, answer: Any) -> None:  # noqa: ANN401 - JSON
        """Return if the registry definitely has none; otherwise raise, so that an outage makes no record bad."""
        try:
            code, message = int(answer["error_code"]), str(answer.get("message", ""))
        except (AttributeError, KeyError, TypeError, ValueError):
            code, message = status, "no reason given"
        if status == HTTPStatus.NOT_FOUND and code in UNKNOWN_CODES:
            return
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise ConfigurationError(
                f"schema registry {self.url} rejects this user ({status}: {message}): check the credentials"
            )
        if status == HTTPStatus.NOT_FOUND:
            raise self._is_no_registry(f"404: {message}")
        raise UnavailableError(f"schema registry {self.url} cannot answer ({status}: {message})")

    def _is_no_registry(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self.url} does not answer as a schema registry ({why}): check the URL")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": _ACCEPT}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        elif self.username is not None:
            pair = f"{self.username}:{self.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
        return headers


def missing_schema(registry: str, subject: str, version: int | str) -> ConfigurationError:
    """Return the error for a version of a subject, or `latest`, that a registry does not have."""
    if version == LATEST:
        return ConfigurationError(f"{registry} has no subject {subject!r}: correct the name, or register a schema")
    return ConfigurationError(
        f"{registry} has no version {version} of subject {subject!r}, to which another schema refers: register it there"
    )


@lru_cache(maxsize=8)
def _opener(ca_location: str | None) -> "OpenerDirector":
    """Return the HTTP client, cached because reading the certificates takes longer than a request."""
    from urllib.request import HTTPErrorProcessor, HTTPSHandler, build_opener

    class AsItIs(HTTPErrorProcessor):
        """Returns each answer and follows no redirect, which would send the credentials to another server."""

        def http_response(self, request: "Request", response: "HTTPResponse") -> "HTTPResponse":  # noqa: ARG002 - the signature of the base class
            return response

        https_response = http_response

    return build_opener(AsItIs, HTTPSHandler(context=ssl.create_default_context(cafile=ca_location)))


def read_schema_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a schema file. Raises `ConfigurationError` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"schema file {os.fspath(path)!r} cannot be read: {error}") from error


def _last_file(path: str | os.PathLike[str]) -> str:
    """Return the descriptor of the last file of a set, which comes after its imports."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    try:
        files = FileDescriptorSet.FromString(Path(path).read_bytes()).file
        return base64.b64encode(files[-1].SerializeToString()).decode("ascii")
    except (OSError, DecodeError, IndexError) as error:
        raise ConfigurationError(f"schema file {os.fspath(path)!r} cannot be read: {error}") from error
