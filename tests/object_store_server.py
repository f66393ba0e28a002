"""A small object store in this process, over HTTP: the part of S3, Google Cloud Storage and Azure that a sink uses.

It can fail in the ways in which a real store or the network to it fails (`Fault`). Real conditional requests are tried
on moto in `tests.real.test_sink_objects`.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

BUCKET = "lake"
_DATE = "Fri, 27 Nov 2026 10:00:00 GMT"
_ISO_DATE = "2026-11-27T10:00:00.000Z"
_HEADERS = {"if-none-match": "*", "x-goog-if-generation-match": "0"}
"""The headers of a conditional request, and their values."""


class Fault(Enum):
    """What happens to a conditional request."""

    LOST_ANSWER = auto()
    """The object is created, and the connection ends without an answer."""
    LOST_REQUEST = auto()
    """Nothing is created, and the connection ends without an answer."""
    LATE = auto()
    """The connection ends without an answer; the object is created only at `Objects.let_late_ones_arrive`."""
    TWICE = auto()
    """The request arrives twice, as after a retry in the network: the answer is that of the second."""
    CONFLICT = auto()
    """409 ConditionalRequestConflict: another request is under way, and nothing is created."""
    THROTTLED = auto()
    """503 SlowDown: nothing is created."""
    DENIED = auto()
    """403 AccessDenied."""


@dataclass
class Objects:
    """The objects of the store, the requests that it got, and what is to fail."""

    content: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    """Method, key or query, and headers in lower case."""
    faults: list[Fault] = field(default_factory=list)
    """What happens to the next conditional requests for `faulty`, one each."""
    faulty: str = "/commits/"
    """A part of the keys whose requests fail."""
    pretends: bool = False
    """Whether the store ignores the condition of a request."""
    refuses: set[str] = field(default_factory=set)
    """Methods that are answered with 403."""
    keeps_all: bool = False
    """Whether the right to remove objects is missing: S3 answers a deletion of several objects with 200 and errors."""
    page_size: int = 1000
    """The greatest number of entries in one answer to a request of S3's to list objects."""
    is_missing: bool = False
    """Whether the bucket does not exist."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    url: str = ""
    _late: list[tuple[str, bytes]] = field(default_factory=list)

    def let_late_ones_arrive(self) -> list[bool]:
        """Carry out the requests that were held back, and return which of them created an object."""
        with self.lock:
            late, self._late = self._late, []
            return [self.create(key, content) for key, content in late]

    def create(self, key: str, content: bytes) -> bool:
        """Create an object, or return False if it exists."""
        if key in self.content and not self.pretends:
            return False
        self.content[key] = content
        return True

    def conditional(self) -> list[tuple[str, Mapping[str, str]]]:
        """Return the keys and headers of the requests that should create an object."""
        return [
            (key, headers)
            for method, key, headers in self.requests
            if method == "PUT" and any(headers.get(name) == value for name, value in _HEADERS.items())
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet, for which the client does not wait
    disable_nagle_algorithm = True
    objects: Objects

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 - as in the base class
        """Log nothing."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - `do_GET` and so on
        if name.startswith("do_"):
            return self._handle
        raise AttributeError(name)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        key = unquote(split.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.objects.lock:
            self.objects.requests.append((self.command, key or split.query, headers))
            answer = self._answer(key, query, headers, body)
        if answer is None:
            self.close_connection = True
            return
        status, content, extra = answer
        self.send_response(status)
        length = extra.pop("Content-Length", str(len(content)))
        for name, value in {"Content-Length": length, "Last-Modified": _DATE, "ETag": '"1"', **extra}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(content)
        with suppress(ConnectionError):
            self.wfile.flush()

    def _answer(
        self, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]] | None:
        store = self.objects
        if self.command in store.refuses:
            return _error(403, "AccessDenied")
        if store.is_missing:
            return _error(404, "NoSuchBucket")
        if self.command == "POST":
            return self._bulk_deletion(query, body)
        if not key:
            return 200, _listing(store.content, query, store.page_size).encode(), {}
        if self.command == "PUT":
            return self._put(key, headers, body)
        if key not in store.content:
            return _error(404, "NoSuchKey")
        if self.command == "DELETE":
            del store.content[key]
            return 202 if "x-ms-version" in headers else 204, b"", {}
        return self._get(store.content[key], headers)

    def _put(self, key: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]] | None:
        store = self.objects
        if not any(headers.get(name) == value for name, value in _HEADERS.items()):
            store.content[key] = body
            return 201, b"", {"x-goog-generation": "1"}
        fault = store.faults.pop(0) if store.faults and store.faulty in key else None
        match fault:
            case Fault.LOST_REQUEST:
                return None
            case Fault.LATE:
                store._late.append((key, body))
                return None
            case Fault.CONFLICT:
                return _error(409, "ConditionalRequestConflict")
            case Fault.THROTTLED:
                return _error(503, "SlowDown")
            case Fault.DENIED:
                return _error(403, "AccessDenied")
        if fault is Fault.TWICE:
            store.create(key, body)
        is_created = store.create(key, body)
        if fault is Fault.LOST_ANSWER:
            return None
        # Azure answers 409 BlobAlreadyExists, the others 412.
        is_azure = "x-ms-version" in headers
        refusal = _error(409, "BlobAlreadyExists") if is_azure else _error(412, "PreconditionFailed")
        return (201, b"", {"x-goog-generation": "1"}) if is_created else refusal

    def _get(self, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, dict[str, str]]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", headers.get("x-ms-range", "")))
        if found is None:
            return 200, content, {"Content-Length": str(len(content)), "x-goog-generation": "1"}
        start, end = int(found[1]), min(int(found[2]) + 1, len(content))
        return 206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}

    def _bulk_deletion(self, query: Mapping[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "delete" in query:
            keys = [each.text or "" for each in ET.fromstring(body).iter() if each.tag.endswith("Key")]  # noqa: S314
            if self.objects.keeps_all:
                error = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
                errors = "".join(f"<Error><Key>{escape(key)}</Key>{error}</Error>" for key in keys)
                return 200, f"<DeleteResult>{errors}</DeleteResult>".encode(), {}
            for key in keys:
                self.objects.content.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {}
        parts = []
        for number, path in enumerate(re.findall(rb"DELETE (\S+) HTTP", body)):
            key = unquote(path.decode()).partition("?")[0].removeprefix(f"/{BUCKET}/")
            status = "404 Not Found" if self.objects.content.pop(key, None) is None else "202 Accepted"
            parts.append(
                f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n"
            )
        return 202, ("".join(parts) + "--b--\r\n").encode(), {"Content-Type": "multipart/mixed; boundary=b"}


def _error(status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
    text = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    return status, text.encode(), {"x-ms-error-code": code}


def _listing(content: Mapping[str, bytes], query: Mapping[str, str], page_size: int) -> str:
    """Return a listing: a page of it in the form of S3 and of GCS, or all keys in that of Azure."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items: list[str] = []
    folders: dict[str, None] = {}
    for key in sorted(content):
        rest = key.removeprefix(prefix)
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in rest:
            folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
        else:
            items.append(key)
    if query.get("comp") == "list":
        blobs = [
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified><Etag>1</Etag>"
            f"<Content-Length>{len(content[key])}</Content-Length><Content-Type>text/plain</Content-Type></Properties></Blob>"
            for key in items
        ]
        blobs += [f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>" for folder in folders]
        return f"<EnumerationResults><Blobs>{''.join(blobs)}</Blobs><NextMarker /></EnumerationResults>"
    page = sorted(name for name in (*items, *folders) if name > query.get("continuation-token", ""))
    is_whole = len(page) <= page_size
    page = page[:page_size]
    items, folders = [key for key in items if key in page], {key: None for key in folders if key in page}
    more = "" if is_whole else f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    more += f"<IsTruncated>{str(not is_whole).lower()}</IsTruncated>"
    entries = [
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_ISO_DATE}</LastModified><ETag>1</ETag>"
        f"<Size>{len(content[key])}</Size></Contents>"
        for key in items
    ]
    entries += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
    return f"<ListBucketResult>{more}{''.join(entries)}</ListBucketResult>"


@contextmanager
def running_store() -> Iterator[Objects]:
    """Start a store with an empty bucket, yield it, and stop it."""
    objects = Objects()
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    objects.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
