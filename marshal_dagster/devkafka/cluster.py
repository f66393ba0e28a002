"""A Kafka cluster on one machine: the brokers of one directory, which any process can start, inspect and stop."""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from marshal_dagster._internal import processes
from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.jars import Report
from marshal_dagster._internal.java import find_java
from marshal_dagster._internal.ports import HOST, LARGEST_PORT, check_free, free_port, is_free
from marshal_dagster._internal.user_folders import kafka_folder, why_not_own
from marshal_dagster.devkafka.cds_archive import with_archive
from marshal_dagster.devkafka.errors import BrokerFailedError, ClusterLockedError, ClusterMismatchError, DevKafkaError
from marshal_dagster.devkafka.jars import ensure_jars
from marshal_dagster.devkafka.launch import DEFAULT_HEAP_MB, BrokerFolder, Launcher
from marshal_dagster.devkafka.properties import Node, check_settings
from marshal_dagster.devkafka.readiness import brokers_known_to
from marshal_dagster.devkafka.state import STATE_FILE, ClusterState, new_uuid, read_state, write_state
from marshal_dagster.errors import ConfigurationError

DEFAULT_PORT = 9092
BROKER_COUNTS = (1, 3)
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_LOCK_FILE = ".lock"
_SMALLEST_HEAP_MB = 128
_TEST_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The status of one broker."""

    broker_id: int
    """The broker's id, from 1."""
    port: int
    """The port for clients."""
    pid: int | None
    """The id of its process; None if it does not run."""
    ready: bool
    """Whether it answers requests."""
    log: Path
    """The path of its log."""

    @property
    def address(self) -> str:
        """The `host:port` that clients connect to."""
        return f"{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class KafkaStatus:
    """The status of a cluster."""

    directory: Path
    """Where the cluster is stored."""
    cluster_id: str | None
    """Its id; None if the directory holds no cluster."""
    brokers: tuple[BrokerStatus, ...]
    """The status of each broker; empty if the directory holds no cluster."""
    started: tuple[int, ...] = ()
    """The ids of the brokers that this call of `KafkaCluster.up` started."""

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all brokers, comma-separated, for `bootstrap.servers`; empty without brokers."""
        return ",".join(broker.address for broker in self.brokers)

    @property
    def is_up(self) -> bool:
        """Whether there is a cluster and each of its brokers answers requests."""
        return bool(self.brokers) and all(broker.ready for broker in self.brokers)

    @property
    def is_running(self) -> bool:
        """Whether at least one broker process runs."""
        return any(broker.pid is not None for broker in self.brokers)


class KafkaCluster:
    """The Kafka cluster of one directory, which holds its brokers' data, logs and settings.

    Brokers are separate processes that outlive the process that starts them. Other processes find them by
    `cluster.json` in the directory. Changes of the directory are made under a lock, so several processes may call these
    methods at once.

    Example:
        ```python
        cluster = KafkaCluster(brokers=3, port=0)
        cluster.up()
        print(cluster.bootstrap_servers)
        cluster.down(wipe=True)
        ```
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        brokers: int | None = None,
        port: int | Sequence[int] | None = None,
        settings: Mapping[str, str] | None = None,
        heap_mb: int = DEFAULT_HEAP_MB,
        report: Report | None = None,
    ) -> None:
        """Describe a cluster; nothing is started or written.

        Args:
            directory: Where the cluster is stored; by default the user's own folder (`kafka_folder`).
            brokers: The number of brokers, 1 or 3; by default as many as the directory holds, or else 1.
            port: The first broker's port, whose successors the other brokers use; or a sequence with one port for each
                broker; or 0 for the previous ports if they are free, otherwise any free ones. By default the previous
                ports, or else 9092 and its successors.
            settings: Broker settings as in `server.properties`, which override this module's own. They apply to
                brokers that this object starts.
            heap_mb: The maximum heap of each broker in MiB.
            report: Called with one line before each step that takes long.

        Raises:
            ConfigurationError: A value is invalid.
        """
        self.directory = (directory or kafka_folder()).expanduser().absolute()
        self._brokers = brokers
        self._port = port
        self._settings = dict(settings or {})
        self._heap_mb = heap_mb
        self._report = report
        if "," in str(self.directory) or not str(self.directory).isprintable():
            raise ConfigurationError(
                f"directory is {self.directory}; use a path without commas and line breaks, which Kafka rejects"
            )
        if brokers not in {None, *BROKER_COUNTS}:
            raise ConfigurationError(f"brokers is {brokers}; it must be 1 or 3")
        _check_port(port)
        if heap_mb < _SMALLEST_HEAP_MB:
            raise ConfigurationError(f"heap_mb is {heap_mb}; it must be at least {_SMALLEST_HEAP_MB}")
        check_settings(self._settings)

    def up(self, timeout_s: float = START_TIMEOUT_S) -> KafkaStatus:
        """Start the brokers that do not run, and wait until all brokers serve and know each other.

        On failure the brokers that this call started are killed.

        Args:
            timeout_s: How many seconds to wait for another command, and then for the brokers. A download of the jars
                does not count.

        Returns:
            The status of the cluster. `started` has the ids of the brokers that this call started; it is empty if the
            cluster was already up.

        Raises:
            ConfigurationError: There is no suitable Java or no PySpark, or the number of ports is wrong.
            UnavailableError: The jars could not be downloaded.
            PortInUseError: Another process uses a port.
            ClusterMismatchError: The directory holds another number of brokers, or they run on other ports.
            BrokerFailedError: A broker ended, or was not ready within `timeout_s`.
            ClusterLockedError: Another command used the directory for `timeout_s`.
            DevKafkaError: The directory cannot be created or written, belongs to another user, or is writable for all
                users.
        """
        with self._locked(timeout_s):
            state = self._arranged(read_state(self.directory))
            idle = [node for node in state.nodes if not _is_running(state, node)]
            if idle:
                state = self._launch(state, idle, within_s=timeout_s, waiting_for=state.nodes)
            return replace(self._look(state), started=tuple(node.broker_id for node in idle))

    def down(self, *, wipe: bool = False, timeout_s: float = STOP_TIMEOUT_S) -> KafkaStatus:
        """Stop all brokers; do nothing if none runs.

        Args:
            wipe: Kill the brokers with SIGKILL at once and delete their data. Other files in the directory stay.
                Without it the brokers get SIGTERM, and their data stays.
            timeout_s: How many seconds to wait for another command, and after SIGTERM before SIGKILL.

        Returns:
            The status of the cluster after that.

        Raises:
            ClusterLockedError: Another command used the directory for `timeout_s`.
        """
        if read_state(self.directory) is None:
            return self.status()
        with self._locked(timeout_s):
            state = read_state(self.directory)
            if state is not None and wipe:
                processes.kill(list(state.marks.values()))
                self._wipe(state)
            elif state is not None:
                processes.stop(list(state.marks.values()), timeout_s)
                write_state(self.directory, replace(state, marks={}))
        return self.status()

    def status(self) -> KafkaStatus:
        """Check for each broker whether its process runs and answers a request.

        Returns:
            The status of the cluster; without brokers if the directory holds none.

        Raises:
            ClusterMismatchError: `cluster.json` cannot be read.
        """
        state = read_state(self.directory)
        return KafkaStatus(self.directory, None, ()) if state is None else self._look(state)

    def start(self, broker_id: int, timeout_s: float = START_TIMEOUT_S) -> BrokerStatus:
        """Start one broker that was killed or stopped, on its previous ports, and wait until it serves.

        In a cluster of three, another broker must be running, because one broker alone is no quorum. `up` starts all
        brokers that do not run.

        Args:
            broker_id: The broker's id, from 1.
            timeout_s: How many seconds to wait for another command, and then for the broker.

        Returns:
            The status of the broker.

        Raises:
            ClusterMismatchError: There is no such cluster or broker.
            PortInUseError: Another process uses a port of the broker.
            BrokerFailedError: The broker ended, or was not ready within `timeout_s`.
            ClusterLockedError: Another command used the directory for `timeout_s`.
        """
        with self._locked(timeout_s):
            state = self._existing()
            node = state.node(broker_id)
            if not _is_running(state, node):
                state = self._launch(state, [node], within_s=timeout_s, waiting_for=[node])
            return self._look_at(state, node)

    def kill(self, broker_id: int) -> None:
        """Kill one broker with SIGKILL, as in a crash; its data stays.

        Args:
            broker_id: The broker's id, from 1.
        """
        self._end(broker_id, processes.kill)

    def stop(self, broker_id: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Shut down one broker with SIGTERM; its data stays.

        Args:
            broker_id: The broker's id, from 1.
            timeout_s: After how many seconds a broker that still runs gets SIGKILL.
        """
        self._end(broker_id, lambda marks: processes.stop(marks, timeout_s))

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all brokers, comma-separated, for `bootstrap.servers`.

        Raises:
            ClusterMismatchError: The directory holds no cluster.
        """
        return ",".join(f"{HOST}:{node.port}" for node in self._existing().nodes)

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        try:
            self._make_own()
            with locked(self.directory / _LOCK_FILE, timeout_s):
                yield
        except TimeoutError as error:
            raise ClusterLockedError(
                f"another command has been using {self.directory} for {timeout_s:g} s; try again later"
            ) from error
        except OSError as error:
            raise DevKafkaError(
                f"{self.directory} cannot be used for Kafka ({error}); fix that, or use another directory"
            ) from error

    def _make_own(self) -> None:
        """Create the directory, or check that no other user can put links into it."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.directory, *self.directory.glob("broker-*")):
            if reason := why_not_own(folder):
                raise DevKafkaError(
                    f"{reason}, so files written there could overwrite others through links: use a directory that only "
                    "you may write into, such as ~/kafka, or leave the directory out"
                )

    def _command(self, name: str, *options: str) -> str:
        """Return the command for this directory, because without it another cluster would be meant."""
        return shlex.join(["marshal-dagster", "kafka", name, "--directory", str(self.directory), *options])

    def _existing(self) -> ClusterState:
        state = read_state(self.directory)
        if state is None:
            raise ClusterMismatchError(
                f"{self.directory} holds no Kafka cluster; start one with `{self._command('up')}`"
            )
        return state

    def _end(self, broker_id: int, end: Callable[[Sequence[processes.ProcessMark]], None]) -> None:
        state = self._existing()
        mark = state.marks.get(state.node(broker_id).broker_id)
        if mark is not None:
            end([mark])

    def _folder(self, node: Node) -> BrokerFolder:
        return BrokerFolder(self.directory / f"broker-{node.broker_id}")

    def _look(self, state: ClusterState) -> KafkaStatus:
        brokers = tuple(self._look_at(state, node) for node in state.nodes)
        return KafkaStatus(self.directory, state.cluster_id, brokers)

    def _look_at(self, state: ClusterState, node: Node) -> BrokerStatus:
        mark = state.marks.get(node.broker_id)
        pid = mark.pid if mark is not None and processes.is_alive(mark) else None
        ready = pid is not None and node.broker_id in brokers_known_to(node.port)
        return BrokerStatus(node.broker_id, node.port, pid, ready, self._folder(node).log)

    def _arranged(self, state: ClusterState | None) -> ClusterState:
        """Return the existing cluster, or a new one, with the requested ports."""
        if state is None:
            return ClusterState(new_uuid(), self._nodes(self._brokers or 1, []), {})
        count = len(state.nodes)
        if self._brokers not in {None, count}:
            raise ClusterMismatchError(
                f"{self.directory} holds a cluster of {count} broker(s), not {self._brokers}; "
                f"use it as it is, or delete it with `{self._command('down', '--wipe')}`"
            )
        last = [node.port for node in state.nodes]
        if not any(_is_running(state, node) for node in state.nodes):
            return replace(state, nodes=self._nodes(count, last), marks={})
        wanted = self._wanted_ports(count)
        if wanted and wanted != last:
            raise ClusterMismatchError(
                f"{self.directory} holds a cluster that is up on {_listed(last)}, not on {_listed(wanted)}; "
                f"use it as it is, or stop it with `{self._command('down')}` first"
            )
        return state

    def _nodes(self, count: int, last_ports: list[int]) -> tuple[Node, ...]:
        ports = self._ports(count, last_ports)
        taken = set(ports)
        nodes: list[Node] = []
        for broker_id, port in enumerate(ports, start=1):
            nodes.append(Node(broker_id, port, free_port(taken)))
            taken.add(nodes[-1].controller_port)
        return tuple(nodes)

    def _ports(self, count: int, last_ports: list[int]) -> list[int]:
        if self._port != 0:
            return self._wanted_ports(count) or last_ports or list(range(DEFAULT_PORT, DEFAULT_PORT + count))
        if last_ports and all(is_free(port) for port in last_ports):
            return last_ports
        ports: list[int] = []
        while len(ports) < count:
            ports.append(free_port(ports))
        return ports

    def _wanted_ports(self, count: int) -> list[int]:
        """Return the ports that the caller named; an empty list if it named none."""
        if self._port is None or self._port == 0:
            return []
        ports = list(range(self._port, self._port + count) if isinstance(self._port, int) else self._port)
        if len(ports) != count:
            raise ConfigurationError(
                f"port is {_listed(ports)}, but there are {count} broker(s): pass one port for each, or only the first"
            )
        return ports

    def _launch(
        self, state: ClusterState, idle: Sequence[Node], *, within_s: float, waiting_for: Sequence[Node]
    ) -> ClusterState:
        """Start the `idle` brokers, and wait until the brokers `waiting_for` serve and know each other."""
        launcher = self._launcher()
        for node in idle:
            check_free(node.port)
            check_free(node.controller_port)
        write_state(self.directory, state)
        sizes = {node.broker_id: self._folder(node).sizes() for node in idle}
        deadline = time.monotonic() + within_s
        self._prepare(launcher, state, idle)
        started: list[processes.ProcessMark] = []
        try:
            for node in idle:
                started.append(launcher.start(self._folder(node)))
                state = replace(state, marks={**state.marks, node.broker_id: started[-1]})
                write_state(self.directory, state)
            self._wait_ready(state, sizes, waiting_for, deadline=deadline, within_s=within_s)
        except BaseException:
            processes.kill(started)
            raise
        return state

    def _launcher(self) -> Launcher:
        java = find_java()
        jars = ensure_jars(java, report=self._report)
        return with_archive(Launcher(java, jars, self._heap_mb, self._settings), report=self._report)

    def _prepare(self, launcher: Launcher, state: ClusterState, idle: Sequence[Node]) -> None:
        # Formatting a new data folder takes a separate JVM for each.
        with ThreadPoolExecutor(max_workers=len(idle)) as pool:
            jobs = [
                pool.submit(launcher.prepare, self._folder(node), node, state.nodes, state.cluster_id) for node in idle
            ]
        for job in jobs:
            job.result()

    def _wait_ready(
        self,
        state: ClusterState,
        sizes: Mapping[int, Mapping[Path, int]],
        waiting_for: Sequence[Node],
        *,
        deadline: float,
        within_s: float,
    ) -> None:
        expected = {node.broker_id for node in waiting_for}
        waiting = list(waiting_for)
        while waiting := [node for node in waiting if not expected <= brokers_known_to(node.port)]:
            ended = [node for node in waiting_for if not _is_running(state, node)]
            if ended:
                raise BrokerFailedError(self._failure_text(ended[0], "ended during its start", sizes))
            if time.monotonic() >= deadline:
                raise BrokerFailedError(self._failure_text(waiting[0], f"was not ready within {within_s:g} s", sizes))
            time.sleep(processes.POLL_S)

    def _failure_text(self, node: Node, what: str, sizes: Mapping[int, Mapping[Path, int]]) -> str:
        folder = self._folder(node)
        reason = folder.last_log_line(sizes.get(node.broker_id, {folder.log: 0}))
        return f"broker {node.broker_id} {what}: {reason}"

    def _wipe(self, state: ClusterState) -> None:
        for node in state.nodes:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._folder(node).path)
        (self.directory / STATE_FILE).unlink(missing_ok=True)
        (self.directory / _LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()


@contextmanager
def running_kafka(
    directory: Path, brokers: int = 1, port: int = 0, settings: Mapping[str, str] | None = None
) -> Iterator[KafkaCluster]:
    """Run a cluster while the block runs, for tests.

    After the block the cluster is stopped and its data deleted. If the block raises, the data stays for diagnosis.

    Args:
        directory: Where the cluster is stored.
        brokers: The number of brokers, 1 or 3.
        port: The first broker's port; 0 for any free ones.
        settings: Broker settings as in `server.properties`.

    Yields:
        The cluster, whose brokers all serve.

    Raises:
        DevKafkaError: The cluster could not be started, see `KafkaCluster.up`.
    """
    cluster = KafkaCluster(directory, brokers=brokers, port=port, settings=settings)
    cluster.up()
    try:
        yield cluster
    except BaseException:
        cluster.down(timeout_s=_TEST_STOP_S)
        raise
    cluster.down(wipe=True)


def _check_port(port: int | Sequence[int] | None) -> None:
    if port is None or port == 0:
        return
    ports = [port] if isinstance(port, int) else list(port)
    if not ports or len(set(ports)) != len(ports) or min(ports) < 1 or max(ports) > LARGEST_PORT:
        raise ConfigurationError(
            f"port is {_listed(ports)}; it must be numbers from 1 to {LARGEST_PORT}, each once, or 0 for any free ones"
        )


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(str(port) for port in ports)


def _is_running(state: ClusterState, node: Node) -> bool:
    mark = state.marks.get(node.broker_id)
    return mark is not None and processes.is_alive(mark)
