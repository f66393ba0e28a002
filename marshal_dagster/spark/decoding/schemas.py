"""Where the schemas of framed messages come from: a registry, or files. Asked by the driver alone."""

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

_UNKNOWN: Final = frozenset({40401, 40402, 40403})
"""What a registry answers when it has no such subject, version, or schema."""
_LARGEST_ID: Final = 2**31 - 1
"""Of a larger one a registry says, as of any path that it does not have, that there is none."""
_ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"
_MOST_BYTES: Final = 16 * 1024 * 1024


class SchemaKind(StrEnum):
    """The languages of schemas, as a registry names them."""

    AVRO = "AVRO"
    PROTOBUF = "PROTOBUF"
    JSON = "JSON"


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema; `references` are those whose types it names, by the name that it uses.

    `text` is as it was registered; of a Protobuf schema, in base64 the serialized `FileDescriptorProto` of its file.
    """

    kind: SchemaKind
    text: str
    references: Mapping[str, "Schema"] = field(default_factory=dict)


class Schemas(Protocol):
    """Knows schemas by the ids that stand in messages."""

    @property
    def largest_id(self) -> int:
        """No larger id is that of a schema: `by_id` is not asked for one."""
        ...

    def by_id(self, number: int, /) -> Schema | None:
        """Give the schema of that id, or None if there is surely none. Raises `MarshalError` if it cannot be asked."""
        ...

    def latest(self, subject: str, /) -> Schema:
        """Give the newest schema of a subject. Raises `MarshalError` if there is none, or it cannot be asked."""
        ...


@dataclass(frozen=True, slots=True)
class SchemaFiles:
    """Schemas that writers used, in files by the ids in messages: Avro's in `.avsc` ones, else Protobuf's descriptors.

    These are as `protoc --descriptor_set_out=...` writes them for one `.proto` file.
    """

    by_number: Mapping[int, str | os.PathLike[str]]

    @property
    def largest_id(self) -> int:
        """The largest id that has a file."""
        return max(self.by_number, default=0)

    def by_id(self, number: int, /) -> Schema | None:
        """Read the file of that id, if one is named. Raises `ConfigurationError` if it cannot be read."""
        path = self.by_number.get(number)
        if path is None:
            return None
        if Path(path).suffix == ".avsc":
            return Schema(SchemaKind.AVRO, read_schema_file(path))
        return Schema(SchemaKind.PROTOBUF, _last_file(path))

    def latest(self, subject: str, /) -> Schema:
        """Refuse: files have no subjects."""
        raise ConfigurationError(f"subject {subject!r}: files have no subjects; give the schema to read with itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRegistry:
    """A schema registry with Confluent's REST interface, at `url`.

    `username` and `password`, or `token`, log in; they are in no `repr`, and only the driver sends them. `ca_location`
    is a PEM file of certificates to trust instead of the system's. `timeout_s` bounds each request as a whole. An id
    above `largest_id` is not known without asking: registries count up, so most ids of broken records are above it.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca_location: str | None = None
    timeout_s: float = 10.0
    largest_id: int = _LARGEST_ID
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what names no registry, and secrets where they would be shown."""
        from urllib.parse import urlsplit

        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigurationError("url: it must begin with http:// or https:// and name a host")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError("url: give only the address; who logs in stands in username and password")
        if (self.username is None) != (self.password is None) or (self.token and self.username):
            raise ConfigurationError("give username and password, or token, or none of them")
        if not 0 < self.largest_id <= _LARGEST_ID:
            raise ConfigurationError(f"largest_id: {self.largest_id} is not from 1 to {_LARGEST_ID}")
        if self.token and not (self.token.isascii() and self.token.isprintable()):  # http.client's error would show it
            raise ConfigurationError("token: it has characters that no token has, such as a line break at its end")

    def by_id(self, number: int, /) -> Schema | None:
        """Ask for the schema of that id; it is asked for once. Raises `UnavailableError`, `ConfigurationError`."""
        return self._schema(f"/schemas/ids/{number}") if number <= self.largest_id else None

    def latest(self, subject: str, /) -> Schema:
        """Ask for the newest schema of `subject`, each time. Raises `UnavailableError`, `ConfigurationError`."""
        return self._version(subject, "latest")

    def _version(self, subject: str, version: str) -> Schema:
        from urllib.parse import quote

        path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
        schema = self._schema(path, keep=version != "latest")
        if schema is None:
            raise ConfigurationError(f"schema registry {self.url} has no version {version} of subject {subject!r}")
        return schema

    def _schema(self, path: str, *, keep: bool = True) -> Schema | None:
        answer = self._ask(path, keep=keep)
        if answer is not None and answer.get("schemaType") == SchemaKind.PROTOBUF:
            if "id" in answer:
                path, keep = f"/schemas/ids/{answer['id']}", True  # the newest one may be another by now
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
        """Give the answer, None if there is nothing there; an answer that can never change is kept."""
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
            raise UnavailableError(f"schema registry {self.url} did not answer within {self.timeout_s:g} s") from error
        except (OSError, ValueError, HTTPException) as error:  # no host, TLS, an answer cut short
            raise UnavailableError(f"schema registry {self.url} cannot be asked: {error}") from error
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
        """Return if there is surely no such thing: that it cannot be asked makes no record bad."""
        try:
            code, message = int(answer["error_code"]), str(answer.get("message", ""))
        except (AttributeError, KeyError, TypeError, ValueError):
            code, message = status, "no reason given"
        if status == HTTPStatus.NOT_FOUND and code in _UNKNOWN:
            return
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise ConfigurationError(f"schema registry {self.url} refuses this user ({status}: {message})")
        if status == HTTPStatus.NOT_FOUND:
            raise self._is_no_registry(f"404: {message}")
        raise UnavailableError(f"schema registry {self.url} cannot be asked ({status}: {message})")

    def _is_no_registry(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self.url} does not answer as a schema registry does ({why})")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": _ACCEPT}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        elif self.username is not None:
            pair = f"{self.username}:{self.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
        return headers


@lru_cache(maxsize=8)
def _opener(ca_location: str | None) -> "OpenerDirector":
    """Give what asks servers; to read the certificates takes longer than to ask."""
    from urllib.request import HTTPErrorProcessor, HTTPSHandler, build_opener

    class AsItIs(HTTPErrorProcessor):
        """Gives each answer, and follows no redirection: it would take the login along to another server."""

        def http_response(self, request: "Request", response: "HTTPResponse") -> "HTTPResponse":  # noqa: ARG002 - the base's name
            return response

        https_response = http_response

    return build_opener(AsItIs, HTTPSHandler(context=ssl.create_default_context(cafile=ca_location)))


def read_schema_file(path: str | os.PathLike[str]) -> str:
    """Read a schema's text. Raises `ConfigurationError`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"schema file {os.fspath(path)!r} cannot be read: {error}") from error


def _last_file(path: str | os.PathLike[str]) -> str:
    """Give the descriptor of the file for which a set was written: imports come before it."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    try:
        files = FileDescriptorSet.FromString(Path(path).read_bytes()).file
        return base64.b64encode(files[-1].SerializeToString()).decode("ascii")
    except (OSError, DecodeError, IndexError) as error:
        raise ConfigurationError(f"schema file {os.fspath(path)!r} cannot be read: {error}") from error
