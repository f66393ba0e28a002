"""A small schema registry on loopback, with the paths and answers of Confluent's."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class Registry:
    """A registry: its schemas, and the requests that it got."""

    url: str = ""
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    serialized: dict[int, str] = field(default_factory=dict)
    login: str | None = None
    status: int | None = None
    """The status with which it answers every request, if set."""
    redirect: str | None = None
    """The address to which it redirects every request, if set."""
    requested: list[str] = field(default_factory=list)

    def register(
        self,
        subject: str,
        text: str,
        *,
        kind: str = "AVRO",
        serialized: bytes | None = None,
        references: Mapping[str, tuple[str, int]] | None = None,
    ) -> int:
        """Register a schema under the next id; `serialized` is the descriptor of a Protobuf file."""
        number = 100_000 + len(self.schemas)
        found: dict[str, Any] = {"schema": text}
        if kind != "AVRO":  # Confluent's registry leaves it out for Avro
            found["schemaType"] = kind
        if references:
            found["references"] = [
                {"name": name, "subject": of, "version": version} for name, (of, version) in references.items()
            ]
        self.schemas[number] = found
        if serialized is not None:
            self.serialized[number] = base64.b64encode(serialized).decode()
        self.subjects.setdefault(subject, []).append(number)
        return number

    def answer(self, path: str, login: str | None) -> tuple[int, dict[str, Any]]:
        """Answer a GET."""
        self.requested.append(path)
        if self.status is not None:
            return self.status, {"error_code": self.status, "message": "configured"}
        if self.login is not None and login != f"Basic {base64.b64encode(self.login.encode()).decode()}":
            return 401, {"error_code": 401, "message": "Unauthorized"}
        path, _, query = path.partition("?")
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["schemas", "ids", text]:
                number = int(text)
                if number > 2**31 - 1:  # the path takes only a 32-bit number, so there is no such path
                    return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
                if number not in self.schemas:
                    return 404, {"error_code": 40403, "message": f"Schema {number} not found"}
                return 200, self._in_form(number, query)
            case ["subjects", subject, "versions", version]:
                if subject not in self.subjects:
                    return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
                numbers = self.subjects[subject]
                at = len(numbers) if version == "latest" else int(version)
                if not 1 <= at <= len(numbers):
                    return 404, {"error_code": 40402, "message": f"Version {at} not found."}
                found = numbers[at - 1]
                return 200, {"subject": subject, "version": at, "id": found, **self._in_form(found, query)}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _in_form(self, number: int, query: str) -> dict[str, Any]:
        """Return a schema, in the form that the query requests; only Protobuf has another one."""
        if number in self.serialized and "format=serialized" in query.split("&"):
            return {**self.schemas[number], "schema": self.serialized[number]}
        return self.schemas[number]


@contextmanager
def running_registry() -> Iterator[Registry]:
    """Serve a registry until the block ends."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = registry.answer(self.path, self.headers.get("Authorization"))
            body = json.dumps(answer).encode()
            self.send_response(status if registry.redirect is None else 302)
            if registry.redirect is not None:
                self.send_header("Location", f"{registry.redirect}{self.path}")
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
