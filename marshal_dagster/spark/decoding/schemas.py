"""Where the schemas of framed messages come from: a registry, or files. Asked by the driver alone."""

import base64
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol

from marshal_dagster.errors import ConfigurationError, UnavailableError

_UNKNOWN: Final = frozenset({40401, 40402, 40403})
"""What a registry answers when it has no such subject, version, or schema."""
_LARGEST_ID: Final = 2**31 - 1
"""Of a larger one it says, as of any path that it does not have, that there is none."""
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
    is a PEM file of certificates to trust instead of the system's. `timeout_s` bounds each request.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca_location: str | None = None
    timeout_s: float = 10.0
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
        if self.token and not (self.token.isascii() and self.token.isprintable()):  # http.client's error would show it
            raise ConfigurationError("token: it has characters that no token has, such as a line break at its end")

    def by_id(self, number: int, /) -> Schema | None:
        """Ask for the schema of that id; it is asked for once. Raises `UnavailableError`, `ConfigurationError`."""
        return self._schema(f"/schemas/ids/{number}") if number <= _LARGEST_ID else None

    def latest(self, subject: str, /) -> Schema:
        """Ask for the newest schema of `subject`, each time. Raises `UnavailableError`, `ConfigurationError`."""
        return self._version(subject, "latest")

    def _version(self, subject: str, version: str) -> Schema:
        from urllib.parse import quote

        path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
        found = self._schema(path, keep=version != "latest")
        if found is None:
            raise ConfigurationError(f"schema registry {self.url} has no version {version} of subject {subject!r}")
        return found

    def _schema(self, path: str, *, keep: bool = True) -> Schema | None:
        answer = self._ask(path, keep=keep)
        if answer is not None and answer.get("schemaType") == SchemaKind.PROTOBUF and "id" in answer:
            path, keep = f"/schemas/ids/{answer['id']}", True  # the newest one may be another by now
        if answer is not None and answer.get("schemaType") == SchemaKind.PROTOBUF:
            answer = self._ask(f"{path}?format=serialized", keep=keep)
        if answer is None:
            return None
        try:
            kind = SchemaKind(answer.get("schemaType", SchemaKind.AVRO))
            references = {
                str(each["name"]): self._version(str(each["subject"]), str(int(each["version"])))
                for each in answer.get("references") or ()
            }
            return Schema(kind, str(answer["schema"]), references)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.url} does not answer as a schema registry does ({error!r})") from error

    def _ask(self, path: str, *, keep: bool = True) -> Mapping[str, Any] | None:
        """Give the answer, None if there is nothing there; an answer that can never change is kept."""
        if path not in self._known:
            found = self._request(path)
            if found is None or not keep:
                return found
            self._known[path] = found
        kept: Mapping[str, Any] = self._known[path]
        return kept

    def _request(self, path: str) -> Mapping[str, Any] | None:
        from http.client import HTTPException, HTTPResponse
        from urllib.request import HTTPErrorProcessor, HTTPSHandler, Request, build_opener

        class AsItIs(HTTPErrorProcessor):
            """Gives each answer, and follows no redirection: it would take the login along to another server."""

            def http_response(self, request: Request, response: HTTPResponse) -> HTTPResponse:  # noqa: ARG002 - the base's name
                return response

            https_response = http_response

        request = Request(f"{self.url.rstrip('/')}{path}", headers=self._headers())  # noqa: S310 - http(s), see above
        try:
            trusting = HTTPSHandler(context=ssl.create_default_context(cafile=self.ca_location))
            with build_opener(AsItIs, trusting).open(request, timeout=self.timeout_s) as answer:
                status, body = answer.status, answer.read(_MOST_BYTES)
        except (OSError, ValueError, HTTPException) as error:  # no host, a time-out, TLS, an answer cut short
            raise UnavailableError(f"schema registry {self.url} cannot be asked: {error}") from error
        if status == HTTPStatus.OK:
            return _object(body, self.url)
        self._raise_unless_unknown(status, body)
        return None

    def _raise_unless_unknown(self, status: int, body: bytes) -> None:
        """Return if there is surely no such thing: that it cannot be asked makes no record bad."""
        try:
            told = json.loads(body)
            code, message = int(told["error_code"]), str(told.get("message", ""))
        except (KeyError, TypeError, ValueError):
            code, message = status, "no reason given"
        if status == HTTPStatus.NOT_FOUND and code in _UNKNOWN:
            return
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise ConfigurationError(f"schema registry {self.url} refuses this user ({status}: {message})")
        if status == HTTPStatus.NOT_FOUND:
            raise ConfigurationError(f"{self.url} does not answer as a schema registry does (404: {message})")
        raise UnavailableError(f"schema registry {self.url} cannot be asked ({status}: {message})")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": _ACCEPT}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        elif self.username is not None:
            pair = f"{self.username}:{self.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
        return headers


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


def _object(body: bytes, url: str) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ConfigurationError(f"{url} does not answer as a schema registry does (no JSON object)")
    return answer
