"""The run of one seed: processes that are restarted, fault scripts, and brokers and links that fail."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter

from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.fault_harness.cluster import BROKERS, FaultyKafka
from tests.fault_harness.journal import read_journal
from tests.fault_harness.proxy import HEALTHY, LinkState, Proxy
from tests.simulator.checkers import ViolationError
from tests.soak_results import TOP

END_WITHIN_S: Final = 120.0
TICK_S: Final = 0.02
HELPERS: Final = 4
MOST_SAID: Final = 2_000

STOPPING: Final = threading.Event()
"""Set when this process should end; then every run ends."""

Script = Generator[None]
"""A sequence of actions over time; it continues at each tick."""


class RunFailedError(Exception):
    """The run itself failed: a promise of liveness was broken, or the test bed failed."""


class LinkFault(Protocol):
    """The part of a fault that concerns a link."""

    @property
    def lasts_s(self) -> float:
        """Return the duration of the failure of the link."""
        ...

    @property
    def comes_late(self) -> bool:
        """Return whether bytes that were held arrive afterwards."""
        ...


@dataclass(slots=True)
class WorkerProcess:
    """A process of the run, which is started repeatedly; each start is a run with its own id and journal."""

    number: int
    folder: Path
    runs: int = field(default=0, kw_only=True)
    process: subprocess.Popen[bytes] | None = field(default=None, kw_only=True)
    is_held: bool = field(default=False, kw_only=True)
    """Whether a fault decides when the process is restarted."""

    @property
    def name(self) -> str:
        """Return the common name of all its runs."""
        return f"run{self.number}"

    @property
    def run_id(self) -> str:
        """Return the id of this run."""
        return f"{self.name}x{self.runs}"

    @property
    def journal(self) -> Path:
        """Return the path of this run's journal."""
        return self.folder / "journals" / f"{self.run_id}.jsonl"

    @property
    def errors(self) -> Path:
        """Return the path of this run's stderr."""
        return self.folder / f"{self.run_id}.stderr"

    @property
    def is_alive(self) -> bool:
        """Return whether the process exists, stopped or not."""
        return self.process is not None and self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP."""
        if self.process is None or not self.is_alive:
            return False
        with suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        if self.process is not None and self.is_alive:
            self.process.send_signal(number)

    def terminate(self) -> None:
        """Send the process SIGTERM, and SIGCONT if it is stopped."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def wait(self) -> None:
        """Wait until the process has ended, if there is one."""
        if self.process is not None:
            self.process.wait()


class Tally(Protocol):
    """The result of a run."""

    @property
    def violations(self) -> list[ViolationError]:
        """Return the promises that were broken."""
        ...


P = TypeVar("P", bound=WorkerProcess)
L = TypeVar("L")
T = TypeVar("T", bound=Tally)


class FaultRun(ABC, Generic[P, L, T]):
    """A seed's run on real brokers: `_tick` does the regular work, scripts inject faults.

    `folder` holds all files of the run. `worker` is the module of its processes, `lines` the type of the lines of their
    journals.
    """

    def __init__(self, seed: int, kafka: FaultyKafka, folder: Path, worker: str, lines: TypeAdapter[L]) -> None:
        self.kafka = kafka
        self.folder = folder
        self.chance = random.Random(seed * 3 + 1)
        self.connection = KafkaConnection(bootstrap_servers=kafka.bootstrap_servers, timeout_s=30)
        self.wrong: list[ViolationError] = []
        self.has_failed = False
        """Whether the run was aborted."""
        self.admin: Topics
        self._worker = worker
        self._lines = lines
        self._run_ids: set[str] = set()
        self._helpers = ThreadPoolExecutor(HELPERS)

    # From start to end

    def go(self) -> T:
        """Run the seed and judge it."""
        (self.folder / "journals").mkdir(parents=True)
        with Topics(self.connection) as self.admin:
            self._prepare()
            try:
                self._live()
            except RunFailedError as failed:
                self.has_failed = True
                self._fail("the run comes to its end", str(failed))
            finally:
                self._end()
            tally = self._judge()
            for topic in self._topics():
                with suppress(Exception):
                    self.admin.delete(topic)
        tally.violations[:0] = self.wrong
        return tally

    @property
    @abstractmethod
    def processes(self) -> Sequence[P]:
        """Return all processes that belong to the run now."""

    @abstractmethod
    def _prepare(self) -> None:
        """Create topics and everything else that must exist before a process starts."""

    @abstractmethod
    def _live(self) -> None:
        """Start everything, let faults happen, and wait until the promises hold again."""

    @abstractmethod
    def _judge(self) -> T:
        """Compare the journals, logs and outputs of the processes."""

    @abstractmethod
    def _topics(self) -> Iterable[str]:
        """Return the topics that the run has created."""

    @abstractmethod
    def _orders(self, process: P) -> BaseModel:
        """Return the orders for a process that starts now."""

    @abstractmethod
    def _is_good_end(self, process: P, code: int) -> bool:
        """Return whether a process may end with this exit code."""

    def _fail(self, promise: str, text: str) -> None:
        self.wrong.append(ViolationError(promise, text))

    def _journals(self) -> dict[str, list[L]]:
        """Return all journals, by run id."""
        return {path.stem: read_journal(path, self._lines) for path in (self.folder / "journals").iterdir()}

    # Processes

    def _environment(self, process: P) -> Mapping[str, str]:
        """Return additional environment variables for a process."""
        del process
        return {}

    def _start(self, process: P) -> None:
        """Start a process's next run; the run before has ended or was killed."""
        process.wait()
        process.runs += 1
        while process.run_id in self._run_ids:
            process.runs += 1
        self._run_ids.add(process.run_id)
        orders = self._orders(process)
        with process.errors.open("wb") as errors:
            process.process = subprocess.Popen(
                [sys.executable, "-m", self._worker, orders.model_dump_json()],
                cwd=TOP,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **self._environment(process)},
            )

    def _start_again(self, process: P) -> None:
        """Restart a process that a fault has held."""
        self._start(process)
        process.is_held = False

    def _kill(self, process: P) -> None:
        """Kill a process with SIGKILL; it is not restarted automatically."""
        process.is_held = True
        process.signal(signal.SIGKILL)
        process.wait()

    def _check_exit(self, process: P) -> None:
        code = None if process.process is None else process.process.returncode
        if code is not None and not self._is_good_end(process, code):
            said = process.errors.read_text()[-MOST_SAID:]
            self._fail("nothing else goes wrong", f"{process.run_id} ended with {code}: {said}")

    def _whereabouts(self, process: P) -> str:
        """Return where a process is that does not end, as a text for messages."""
        del process
        return ""

    def _may_hang(self, whereabouts: str) -> bool:
        """Return whether a process may hang at this place for a known reason."""
        del whereabouts
        return False

    def _terminate_all(self) -> None:
        for process in self.processes:
            process.terminate()

    def _end(self) -> None:
        """End all processes, so that nothing changes any more."""
        self._terminate_all()
        for process in self.processes:
            deadline_s = time.monotonic() + END_WITHIN_S
            while process.is_alive and time.monotonic() < deadline_s:
                self._watch()
                for other in self.processes:
                    other.signal(signal.SIGCONT)
                time.sleep(TICK_S)
            if process.is_alive:
                whereabouts = self._whereabouts(process)
                if not self._may_hang(whereabouts):
                    self._fail("processes end at SIGTERM", f"{process.run_id} does not{whereabouts}")
                self._kill(process)
            elif not process.is_held:
                self._check_exit(process)
        self._helpers.shutdown()

    # Each tick

    def _tick(self) -> None:
        """Do the regular work, and sleep for one tick."""
        if STOPPING.is_set():
            raise RunFailedError("this process was asked to end")
        self._watch()
        for process in self.processes:
            if not process.is_held:
                self._keep_up(process)
        time.sleep(TICK_S)

    def _watch(self) -> None:
        """Read what must be read at each tick."""

    def _keep_up(self, process: P) -> None:
        """Restart a process that has ended."""
        if not process.is_alive:
            self._check_exit(process)
            self._start(process)

    def _play(self, scripts: Iterable[Script], beside: Script | None = None) -> None:
        """Tick until all scripts are over; `beside` runs at the same time and need not end."""
        left = list(scripts)
        while left:
            self._tick()
            left = [script for script in left if next(script, left) is None]
            if beside is not None:
                next(beside, None)

    def _wait(self, condition: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
        for _ in self._until(condition, within_s, what):
            self._tick()

    # Scripts

    def _pause(self, seconds: float) -> Script:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            yield

    def _until(self, condition: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> Script:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise RunFailedError(f"waited {within_s:g} s for {what if isinstance(what, str) else what()}")
            yield

    def _aside(self, work: Callable[[], object]) -> Script:
        """Do slow work in another thread."""
        done: Future[object] = self._helpers.submit(work)
        while not done.done():
            yield
        done.result()

    def _ended(self, process: P) -> Script:
        """Send a process SIGTERM, and wait until it has ended."""
        process.is_held = True
        process.terminate()
        deadline_s = time.monotonic() + END_WITHIN_S
        while process.is_alive:
            process.signal(signal.SIGCONT)
            if time.monotonic() > deadline_s:
                where = self._whereabouts(process)
                raise RunFailedError(f"{process.run_id} does not end within {END_WITHIN_S:g} s of SIGTERM{where}")
            yield

    def _killed(self, processes: Iterable[P], lasts_s: float) -> Script:
        """Kill processes, and restart them later."""
        held = [process for process in processes if not process.is_held]
        for process in held:
            self._kill(process)
        yield from self._pause(lasts_s)
        for process in held:
            self._start_again(process)

    def _stopped(self, processes: Iterable[P], lasts_s: float) -> Script:
        """Stop processes with SIGSTOP, and let them continue later."""
        stopped = [process for process in processes if not process.is_held]
        for process in stopped:
            process.signal(signal.SIGSTOP)
        yield from self._pause(lasts_s)
        for process in stopped:
            process.signal(signal.SIGCONT)

    def _broker(self, topic: str | None, partition: int = 0) -> Generator[None, None, int]:
        """Choose a broker: the leader of a partition, if there is one."""
        if topic is not None:
            leader = self._helpers.submit(self.kafka.leader, topic, partition)
            while not leader.done():
                yield
            with suppress(Exception):
                if leader.result() in BROKERS:
                    return leader.result()
        return self.chance.choice(BROKERS)

    def _broker_killed(self, broker: int, lasts_s: float) -> Script:
        yield from self._aside(lambda: self.kafka.kill(broker))
        yield from self._pause(lasts_s)
        yield from self._aside(self.kafka.repair)

    def _broker_stopped(self, broker: int, lasts_s: float) -> Script:
        with suppress(ProcessLookupError):
            self.kafka.suspend(broker)
        yield from self._pause(lasts_s)
        self.kafka.resume(broker)

    def _link_fails(self, proxy: Proxy, link: int, state: LinkState, fault: LinkFault) -> Script:
        proxy.change(link, state, delivers_late=fault.comes_late)
        try:
            yield from self._pause(fault.lasts_s)
        finally:
            proxy.change(link, HEALTHY, delivers_late=fault.comes_late)


def fake_clock(**settings: str) -> dict[str, str]:
    """Return the environment of a process whose time of day libfaketime changes; CLOCK_MONOTONIC stays real."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise RunFailedError("libfaketime is not installed")
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", **settings}
