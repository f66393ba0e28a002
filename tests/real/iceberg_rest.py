"""Apache Iceberg's own REST catalog, and a proxy that can lose its answers."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

from py4j.java_gateway import JavaGateway

from marshal_dagster._internal.jars import JarSet
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.user_folders import cache_folder
from tests.vended_io import VENDED

_ICEBERG: Final = "1.10.1"
_JETTY: Final = "11.0.24"
_JARS: Final = JarSet(
    title=f"Iceberg's REST catalog {_ICEBERG}",
    megabytes=32,
    coordinates=(
        f"org.apache.iceberg:iceberg-core:{_ICEBERG}",
        f"org.apache.iceberg:iceberg-core:{_ICEBERG}:tests",
        f"org.apache.iceberg:iceberg-open-api:{_ICEBERG}:test-fixtures",
        f"org.eclipse.jetty:jetty-servlet:{_JETTY}",
        "org.xerial:sqlite-jdbc:3.46.1.3",
        "org.slf4j:slf4j-nop:2.0.16",
    ),
    folder=cache_folder() / f"iceberg-rest-{_ICEBERG}",
)


@contextmanager
def rest_catalog(folder: Path) -> Iterator[int]:
    """Run the catalog of Iceberg's project in a JVM of its own, on loopback, and yield its port.

    It stores tables in a database and a warehouse in `folder`. Its own `main` would listen on all addresses.
    """
    pyspark = Path(next(iter(find_spec("pyspark").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    (bridge,) = (pyspark / "jars").glob("py4j-*.jar")
    jars = [*_JARS.download(find_java(), None), *(pyspark / "jars").glob("hadoop-client-*.jar")]
    gateway = JavaGateway.launch_gateway(
        classpath=os.pathsep.join(map(str, jars)),
        javaopts=["-Xmx256m"],
        die_on_exit=True,
        enable_auth=True,
        jarpath=str(bridge),
        java_path=str(find_java().executable),
    )
    try:
        server = _started(gateway, folder)
        yield server.getConnectors()[0].getLocalPort()
        server.stop()
    finally:
        gateway.shutdown()
        gateway.java_process.stdin.close()
        gateway.java_process.wait(30)


def _started(gateway: JavaGateway, folder: Path) -> Any:  # noqa: ANN401 - a server of Jetty
    jvm, settings = gateway.jvm, gateway.jvm.java.util.HashMap()
    named = {
        "uri": f"jdbc:sqlite:{folder}/rest.db",
        "warehouse": f"file://{folder}/warehouse",
        "jdbc.schema-version": "V1",
        "include-credentials": "true",
        **VENDED,
    }
    for name, text in named.items():
        settings.put(name, text)
    catalog = jvm.org.apache.iceberg.jdbc.JdbcCatalog()
    catalog.setConf(jvm.org.apache.hadoop.conf.Configuration())
    catalog.initialize("rest", settings)
    context = _new(gateway, "org.apache.iceberg.rest.RESTCatalogServer$CatalogContext", catalog, settings)
    adapter = _new(gateway, "org.apache.iceberg.rest.RESTServerCatalogAdapter", context)
    handler = jvm.org.eclipse.jetty.servlet.ServletContextHandler()
    servlet = jvm.org.apache.iceberg.rest.RESTCatalogServlet(adapter)
    handler.addServlet(jvm.org.eclipse.jetty.servlet.ServletHolder(servlet), "/*")
    server = jvm.org.eclipse.jetty.server.Server(jvm.java.net.InetSocketAddress("127.0.0.1", 0))
    server.setHandler(handler)
    server.start()
    return server


def _new(gateway: JavaGateway, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - Java's objects
    """Return a new object of a class that is not public."""
    constructor = gateway.jvm.java.lang.Class.forName(name).getDeclaredConstructors()[0]
    constructor.setAccessible(True)
    given = gateway.new_array(gateway.jvm.java.lang.Object, len(arguments))
    for at, argument in enumerate(arguments):
        given[at] = argument
    return constructor.newInstance(given)


@dataclass
class Proxy:
    """Passes requests on to the catalog, except for commits of which a test decides otherwise."""

    port: int
    """The catalog's port."""
    plans: list[str] = field(default_factory=list)
    """What happens to the next commits: `pass`, `lost` (it is made, and the answer is 504), `cut` (it is made, and the
    connection is closed), `failed` (it is not made, and the answer is 500)."""
    commits: list[dict[str, Any]] = field(default_factory=list)
    """The commits that came, as JSON."""
    _lock: Lock = field(default_factory=Lock)

    def plan_of(self, path: str, body: bytes) -> str:
        """Return what happens to a request."""
        if "/tables/" not in path or not body or "requirements" not in (commit := json.loads(body)):
            return "pass"
        with self._lock:
            self.commits.append(commit)
            return self.plans.pop(0) if self.plans else "pass"

    def forward(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        """Return the catalog's answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body or None, {"Content-Type": kind} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Yield the URI of the proxy."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                plan = proxy.plan_of(self.path, body)
                status, text = 500, b'{"error": {"message": "failed", "type": "ServerError", "code": 500}}'
                if plan != "failed":
                    kind = self.headers.get("Content-Type", "application/json")
                    status, text = proxy.forward(self.command, self.path, body, kind)
                if plan == "cut":
                    self.close_connection = True
                    return
                if plan == "lost":
                    status, text = 504, b'{"error": {"message": "timeout", "type": "GatewayTimeout", "code": 504}}'
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_POST = do_HEAD = do_DELETE = do_request  # noqa: N815 - as the base class wants

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
