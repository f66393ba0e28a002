"""An S3 in a process of its own: moto's server. It answers one request at a time, so that each request is atomic.

Usage: python -m tests.real.moto_server BUCKET. It prints its port, and ends when its stdin is closed.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.real.services import watched

BUCKET = "lake"
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


@contextmanager
def running_moto() -> Iterator[str]:
    """Start the server with one bucket, yield its URL, and stop it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.real.moto_server", BUCKET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        with watched("moto's S3", process.pid):
            yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def in_turn(application: Application) -> Application:
    """Return an application that answers one request after another. moto looks for an object, and then creates it."""
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's
        with lock:
            return [b"".join(application(environ, start_response))]

    return answer


def main(bucket: str) -> None:
    """Serve until stdin is closed."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    application = in_turn(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    named = {"aws_access_key_id": "writer", "aws_secret_access_key": "made-up", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", **named).create_bucket(Bucket=bucket)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
