"""An identity provider on the loopback: it gives signed tokens for client credentials, and publishes its keys.

The tokens are JSON web tokens, signed with an elliptic-curve key (ES256).
"""

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs

from marshal_dagster._internal.ports import HOST
from tests.real.certificates import KeyPair

AUDIENCE: Final = "kafka"
_KEY_ID: Final = "the only one"


@dataclass
class TokenServer:
    """A running identity provider. A test changes its fields to let tokens expire, or to revoke a client."""

    port: int
    key: KeyPair = field(default_factory=KeyPair.create)
    client_secrets: dict[str, str] = field(default_factory=dict)
    """The secret of each client. Without an entry a client gets no token."""
    lifetime_s: float = 300
    """The seconds for which a new token is valid."""
    given: list[dict[str, Any]] = field(default_factory=list)
    """The claims of all tokens that were given."""
    signatures: list[str] = field(default_factory=list)
    """The signatures of all tokens that were given."""
    scopes: list[str | None] = field(default_factory=list)
    """The scope of each request."""

    @property
    def url(self) -> str:
        """The token endpoint."""
        return f"http://{HOST}:{self.port}/token"

    @property
    def keys_url(self) -> str:
        """The address of the public keys."""
        return f"http://{HOST}:{self.port}/keys"

    def token(self, client: str) -> tuple[str, float]:
        """Return a token for a client, and its expiry in unix seconds."""
        now_s = time.time()
        claims: dict[str, Any] = {
            "sub": client,
            "aud": AUDIENCE,
            "iss": self.url,
            "iat": int(now_s),
            "exp": int(now_s + self.lifetime_s),
        }
        self.given.append(claims)
        signed = f"{_encoded({'alg': 'ES256', 'kid': _KEY_ID})}.{_encoded({**claims, 'jti': secrets.token_hex(8)})}"
        self.signatures.append(_base64(self.key.sign(signed.encode())))
        return f"{signed}.{self.signatures[-1]}", float(claims["exp"])

    def answer(self, path: str, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of the answer to a request."""
        if path == "/keys":
            x, y = (_base64(number.to_bytes(32)) for number in self.key.point)
            return 200, {"keys": [{"kty": "EC", "crv": "P-256", "alg": "ES256", "kid": _KEY_ID, "x": x, "y": y}]}
        client, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        if self.client_secrets.get(client) != secret:
            return 401, {"error": "invalid_client", "error_description": "no such client, or another secret"}
        self.scopes.append(form.get("scope", [None])[0])
        token, expires_s = self.token(client)
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": int(expires_s - time.time())}


@contextmanager
def token_server() -> Iterator[TokenServer]:
    """Run an identity provider in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))

        def _answer(self, form: dict[str, list[str]]) -> None:
            status, value = provider.answer(self.path, self.headers.get("Authorization", ""), form)
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    provider = TokenServer(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _encoded(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
