"""The services of the runs: three brokers, and the databases once a sink needs one."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.real.mariadb_server import running_mariadb
from tests.real.spark_fixtures import running_postgres
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
            self._started[kind] = self._stack.enter_context(self._running(kind))
        return self._started[kind]

    def _running(self, kind: SinkKind) -> AbstractContextManager[str]:
        if kind is not SinkKind.MARIADB:
            return running_postgres()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="marshal-sink-faults-"))
        return running_mariadb(Path(folder))


@contextmanager
def running_services(folder: Path, lanes: int) -> Iterator[Services]:
    """Start the brokers."""
    del lanes
    with ExitStack() as stack:
        yield Services(stack.enter_context(faulty_kafka(folder / "kafka", links=0)), stack)
