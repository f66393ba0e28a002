"""A Kafka cluster on one machine: the brokers of one directory, for any process to start, watch and stop."""

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
from marshal_dagster.devkafka.state import STATE_FILE, ClusterState, new_cluster_id, read_state, write_state
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
    """One broker: its port, its process (None when none runs), whether it answers requests, and its log."""

    broker_id: int
    port: int
    pid: int | None
    ready: bool
    log: Path

    @property
    def address(self) -> str:
        """The `host:port` that clients connect to."""
        return f"{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class KafkaStatus:
    """A cluster: its brokers (none, if the directory holds no cluster), and those that this call started."""

    directory: Path
    cluster_id: str | None
    brokers: tuple[BrokerStatus, ...]
    started: tuple[int, ...] = ()

    @property
    def bootstrap_servers(self) -> str:
        """All brokers' addresses, comma-separated, as clients take them; empty without brokers."""
        return ",".join(broker.address for broker in self.brokers)

    @property
    def is_up(self) -> bool:
        """Whether each broker of the cluster answers."""
        return bool(self.brokers) and all(broker.ready for broker in self.brokers)

    @property
    def is_running(self) -> bool:
        """Whether at least one broker process lives."""
        return any(broker.pid is not None for broker in self.brokers)


class KafkaCluster:
    """The Kafka cluster of one directory: its brokers' data, logs and settings, and which processes they are.

    Brokers are processes of their own that outlive the one that started them; `cluster.json` tells any other
    process of them. What changes the directory is done under a lock, so several processes may do it at once.
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
        """Name a cluster; nothing is started or written.

        Args:
            directory: where it lives; not given: the user's one cluster (`kafka_folder`).
            brokers: 1 or 3; not given: as many as the directory holds, else 1.
            port: the first broker's port, further brokers take the following ones; or one port for each
                broker; or 0: the ports of the last time where they are free, else any free ones. Not given:
                those of the last time, else 9092 and on.
            settings: broker settings on top of this module's own, as in `server.properties`; they hold for
                brokers that are started from here on.
            heap_mb: the largest heap of each broker in MiB.
            report: told, in one line each, what takes long.

        Raises:
            ConfigurationError: a value that cannot be.
        """
        self.directory = (directory or kafka_folder()).expanduser().absolute()
        self._brokers = brokers
        self._port = port
        self._settings = dict(settings or {})
        self._heap_mb = heap_mb
        self._report = report
        if "," in str(self.directory) or not str(self.directory).isprintable():
            raise ConfigurationError(f"directory: {self.directory}; Kafka cannot have a comma or a line end in it")
        if brokers not in {None, *BROKER_COUNTS}:
            raise ConfigurationError(f"brokers: {brokers}; a cluster on one machine has 1 or 3")
        _check_port(port)
        if heap_mb < _SMALLEST_HEAP_MB:
            raise ConfigurationError(f"heap_mb: {heap_mb}; a broker needs {_SMALLEST_HEAP_MB} at the least")
        check_settings(self._settings)

    def up(self, timeout_s: float = START_TIMEOUT_S) -> KafkaStatus:
        """Start the brokers that do not run; return when all of them serve and know each other.

        `started` tells which were started: none, when the cluster was up already. On failure those that
        this call started are stopped again.

        Raises:
            ConfigurationError, UnavailableError: what a broker needs, a Java or the jars, is not there.
            PortInUseError: a port is another process's.
            ClusterMismatchError: the directory holds another number of brokers, or they run on other ports.
            BrokerFailedError: a broker ended, or was not ready within `timeout_s` (without the download).
            ClusterLockedError: another command was at work on the directory for `timeout_s`.
            DevKafkaError: the directory cannot be made or written, is another user's, or all users may write into it.
        """
        with self._locked(timeout_s):
            state = self._arranged(read_state(self.directory))
            idle = [node for node in state.nodes if not _is_running(state, node)]
            if idle:
                state = self._launch(state, idle, within_s=timeout_s, waiting_for=state.nodes)
            return replace(self._look(state), started=tuple(node.broker_id for node in idle))

    def down(self, *, wipe: bool = False, timeout_s: float = STOP_TIMEOUT_S) -> KafkaStatus:
        """Stop all brokers: with SIGTERM, after `timeout_s` with SIGKILL; their data stays.

        With `wipe` they are stopped with SIGKILL at once and their data is deleted; files of others in the
        directory stay. Where there is no cluster, or none that is up, there is nothing to stop.

        Raises:
            ClusterLockedError: another command was at work on the directory for `timeout_s`.
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
        """Look at each broker now: does its process live, and does it answer a request.

        Raises:
            ClusterMismatchError: `cluster.json` cannot be read.
        """
        state = read_state(self.directory)
        return KafkaStatus(self.directory, None, ()) if state is None else self._look(state)

    def start(self, broker_id: int, timeout_s: float = START_TIMEOUT_S) -> BrokerStatus:
        """Start one broker that was killed or stopped, on its old ports, and return when it serves.

        Of three brokers one more must be running, or there is no quorum to serve in; `up` starts all that are
        missing.

        Raises:
            ClusterMismatchError: there is no such cluster or broker.
            PortInUseError, BrokerFailedError, ClusterLockedError: as `up`.
        """
        with self._locked(timeout_s):
            state = self._existing()
            node = state.node(broker_id)
            if not _is_running(state, node):
                state = self._launch(state, [node], within_s=timeout_s, waiting_for=[node])
            return self._look_at(state, node)

    def kill(self, broker_id: int) -> None:
        """End one broker with SIGKILL, as a crash would; its data stays."""
        self._end(broker_id, processes.kill)

    def stop(self, broker_id: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End one broker in order, with SIGTERM, after `timeout_s` with SIGKILL; its data stays."""
        self._end(broker_id, lambda marks: processes.stop(marks, timeout_s))

    @property
    def bootstrap_servers(self) -> str:
        """All brokers' addresses, comma-separated, as clients take them.

        Raises:
            ClusterMismatchError: the directory holds no cluster.
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
                f"another command has been at work on {self.directory} for {timeout_s:g} s; try again later"
            ) from error
        except OSError as error:
            raise DevKafkaError(
                f"{self.directory} cannot be used for Kafka ({error}); mend that, or name another directory"
            ) from error

    def _make_own(self) -> None:
        """Create the directory, or check that no other user can put links where files are written."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.directory, *self.directory.glob("broker-*")):
            if reason := why_not_own(folder):
                raise DevKafkaError(
                    f"{reason}, so files written there could overwrite others through links: name a directory that "
                    "only you may write into, such as ~/kafka, or leave the directory out"
                )

    def _existing(self) -> ClusterState:
        state = read_state(self.directory)
        if state is None:
            raise ClusterMismatchError(
                f"{self.directory} holds no Kafka cluster; start one with `marshal-dagster kafka up`"
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
        """Return the cluster to be up: the one that is there, or a new one; on the ports asked for."""
        if state is None:
            return ClusterState(new_cluster_id(), self._nodes(self._brokers or 1, []), {})
        count = len(state.nodes)
        if self._brokers not in {None, count}:
            raise ClusterMismatchError(
                f"{self.directory} holds a cluster of {count} broker(s), not {self._brokers}; "
                "use it as it is, or delete it with `marshal-dagster kafka down --wipe`"
            )
        last = [node.port for node in state.nodes]
        if not any(_is_running(state, node) for node in state.nodes):
            return replace(state, nodes=self._nodes(count, last), marks={})
        wanted = self._wanted_ports(count)
        if wanted and wanted != last:
            raise ClusterMismatchError(
                f"{self.directory} holds a cluster that is up on {_listed(last)}, not on {_listed(wanted)}; "
                "use it as it is, or stop it with `marshal-dagster kafka down` first"
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
        """Return the ports asked for by number; none when they were left open."""
        if self._port is None or self._port == 0:
            return []
        ports = list(range(self._port, self._port + count) if isinstance(self._port, int) else self._port)
        if len(ports) != count:
            raise ConfigurationError(
                f"port: {_listed(ports)} for {count} broker(s); give one for each, or the first one alone"
            )
        return ports

    def _launch(
        self, state: ClusterState, idle: Sequence[Node], *, within_s: float, waiting_for: Sequence[Node]
    ) -> ClusterState:
        """Start the `idle` brokers, and wait until those `waiting_for` serve and know each other."""
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
        # Each data folder that is new takes a JVM of its own to format.
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
                raise BrokerFailedError(self._failure_text(ended[0], "ended while it started", sizes))
            if time.monotonic() >= deadline:
                raise BrokerFailedError(self._failure_text(waiting[0], f"was not ready within {within_s:g} s", sizes))
            time.sleep(processes.POLL_S)

    def _failure_text(self, node: Node, what: str, sizes: Mapping[int, Mapping[Path, int]]) -> str:
        folder = self._folder(node)
        words = folder.last_log_line(sizes.get(node.broker_id, {folder.log: 0}))
        return f"broker {node.broker_id} {what}: {words}"

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
    """Give a cluster that is up, for tests; afterwards it is wiped, or only stopped when the body raised.

    Raises:
        DevKafkaError: as `KafkaCluster.up`.
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
            f"port: {_listed(ports)}; give numbers from 1 to {LARGEST_PORT}, each once, or 0 for free ones"
        )


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(str(port) for port in ports)


def _is_running(state: ClusterState, node: Node) -> bool:
    mark = state.marks.get(node.broker_id)
    return mark is not None and processes.is_alive(mark)
