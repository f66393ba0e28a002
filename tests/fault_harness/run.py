"""One seed's run: processes that are started again, scripts of faults, brokers and links that fail."""

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

END_WITHIN_S: Final = 30.0
TICK_S: Final = 0.02
HELPERS: Final = 4
MOST_SAID: Final = 2_000

STOPPING: Final = threading.Event()
"""Whether this process is to end: then every run ends."""

Script = Generator[None]
"""What happens in time: continues at each tick."""


class RunFailedError(Exception):
    """The run itself did not go as it must: a promise of liveness, or the test bed."""


class LinkFault(Protocol):
    """What a fault has about a link."""

    @property
    def lasts_s(self) -> float:
        """For how long the link fails."""
        ...

    @property
    def comes_late(self) -> bool:
        """Whether bytes that were held arrive afterwards."""
        ...


@dataclass(slots=True)
class WorkerProcess:
    """A process of the run, start after start; each start is a run with an id and a journal of its own."""

    number: int
    folder: Path
    runs: int = field(default=0, kw_only=True)
    process: subprocess.Popen[bytes] | None = field(default=None, kw_only=True)
    is_held: bool = field(default=False, kw_only=True)
    """Whether a fault decides when it is started again."""

    @property
    def name(self) -> str:
        """What all its runs are called."""
        return f"run{self.number}"

    @property
    def run_id(self) -> str:
        """The id of this run."""
        return f"{self.name}x{self.runs}"

    @property
    def journal(self) -> Path:
        """What this run writes down."""
        return self.folder / "journals" / f"{self.run_id}.jsonl"

    @property
    def errors(self) -> Path:
        """What this run prints on stderr."""
        return self.folder / f"{self.run_id}.stderr"

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self.process is not None and self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped."""
        if self.process is None or not self.is_alive:
            return False
        with suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.process is not None and self.is_alive:
            self.process.send_signal(number)

    def terminate(self) -> None:
        """Send it SIGTERM; a stopped process continues."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def wait(self) -> None:
        """Wait until its process has ended, if it has one."""
        if self.process is not None:
            self.process.wait()


class Tally(Protocol):
    """What a run came to."""

    @property
    def violations(self) -> list[ViolationError]:
        """The promises that were broken."""
        ...


P = TypeVar("P", bound=WorkerProcess)
L = TypeVar("L")
T = TypeVar("T", bound=Tally)


class FaultRun(ABC, Generic[P, L, T]):
    """A seed's run on real brokers: `_tick` does what is always due, scripts inject faults.

    `folder` has what it leaves; `worker` is the module of its processes, `lines` the type of their journals' lines.
    """

    def __init__(self, seed: int, kafka: FaultyKafka, folder: Path, worker: str, lines: TypeAdapter[L]) -> None:
        self.kafka = kafka
        self.folder = folder
        self.chance = random.Random(seed * 3 + 1)
        self.connection = KafkaConnection(bootstrap_servers=kafka.bootstrap_servers, timeout_s=30)
        self.wrong: list[ViolationError] = []
        self.has_failed = False
        """Whether the run did not get to its end."""
        self.admin: Topics
        self._worker = worker
        self._lines = lines
        self._run_ids: set[str] = set()
        self._helpers = ThreadPoolExecutor(HELPERS)

    # From beginning to end

    def go(self) -> T:
        """Let it all happen, and judge."""
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
        """All processes that belong to the run now."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make topics and whatever else must be there before any process starts."""

    @abstractmethod
    def _live(self) -> None:
        """Start all, let faults happen, and wait until what is promised holds again."""

    @abstractmethod
    def _judge(self) -> T:
        """Compare what the processes have left behind."""

    @abstractmethod
    def _topics(self) -> Iterable[str]:
        """Return the topics that the run has made."""

    @abstractmethod
    def _orders(self, process: P) -> BaseModel:
        """Return what a process that starts now is to do."""

    @abstractmethod
    def _is_good_end(self, process: P, code: int) -> bool:
        """Whether a process may end with this exit code."""

    def _fail(self, promise: str, text: str) -> None:
        self.wrong.append(ViolationError(promise, text))

    def _journals(self) -> dict[str, list[L]]:
        """Return all journals, by run id."""
        return {path.stem: read_journal(path, self._lines) for path in (self.folder / "journals").iterdir()}

    # Processes

    def _environment(self, process: P) -> Mapping[str, str]:
        """Return the variables that a process has in its environment beside those of this one."""
        del process
        return {}

    def _start(self, process: P) -> None:
        """Start a process's next run; the one before has ended, or was killed."""
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
        """Start a process that a fault has held."""
        self._start(process)
        process.is_held = False

    def _kill(self, process: P) -> None:
        """End a process with SIGKILL; it is not started again by itself."""
        process.is_held = True
        process.signal(signal.SIGKILL)
        process.wait()

    def _check_exit(self, process: P) -> None:
        code = None if process.process is None else process.process.returncode
        if code is not None and not self._is_good_end(process, code):
            said = process.errors.read_text()[-MOST_SAID:]
            self._fail("nothing else goes wrong", f"{process.run_id} ended with {code}: {said}")

    def _whereabouts(self, process: P) -> str:
        """Return where a process is that does not end."""
        del process
        return ""

    def _may_hang(self, whereabouts: str) -> bool:
        """Whether a process may be there and not end, for a reason that is known."""
        del whereabouts
        return False

    def _terminate_all(self) -> None:
        for process in self.processes:
            process.terminate()

    def _end(self) -> None:
        """End all processes, after which nothing changes any more."""
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
        """Do what is always due, and let a moment pass."""
        if STOPPING.is_set():
            raise RunFailedError("this process is to end")
        self._watch()
        for process in self.processes:
            if not process.is_held:
                self._keep_up(process)
        time.sleep(TICK_S)

    def _watch(self) -> None:
        """Read what is to be read at each tick."""

    def _keep_up(self, process: P) -> None:
        """Start a process again that has ended."""
        if not process.is_alive:
            self._check_exit(process)
            self._start(process)

    def _play(self, scripts: Iterable[Script], beside: Script | None = None) -> None:
        """Tick until all scripts are over; the script `beside` them need not be."""
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
        """Do what takes long in a thread."""
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
        """Kill processes, and start them again later."""
        held = [process for process in processes if not process.is_held]
        for process in held:
            self._kill(process)
        yield from self._pause(lasts_s)
        for process in held:
            self._start_again(process)

    def _stopped(self, processes: Iterable[P], lasts_s: float) -> Script:
        """Stop processes where they are, and let them continue later."""
        stopped = [process for process in processes if not process.is_held]
        for process in stopped:
            process.signal(signal.SIGSTOP)
        yield from self._pause(lasts_s)
        for process in stopped:
            process.signal(signal.SIGCONT)

    def _broker(self, topic: str | None, partition: int = 0) -> Generator[None, None, int]:
        """Choose a broker: the one that leads a partition, if there is one."""
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
    """Return the environment of a process whose time of day libfaketime changes; CLOCK_MONOTONIC is left alone."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise RunFailedError("libfaketime is not installed")
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", **settings}
