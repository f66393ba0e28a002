"""The run of one seed: a topic that grows, processes with Spark that write it to a sink, and their faults."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka import Producer

from marshal_dagster.cli.connections import open_reader
from marshal_dagster.protocol.state import Key
from tests.cli import COMMAND
from tests.conditions import WITHIN_S
from tests.fault_harness.cluster import DATA_SETTINGS, LOG_SETTINGS
from tests.fault_harness.journal import read_journal
from tests.fault_harness.run import MOST_SAID, FaultRun, RunFailedError, Script, WorkerProcess
from tests.simulator.checkers import ViolationError
from tests.sink_faults.checkers import SetBack, Verdict, judge
from tests.sink_faults.outputs import make_output
from tests.sink_faults.scenario import PROCESSES, Fault, FaultKind, Scenario
from tests.sink_faults.services import Services
from tests.sink_faults.worker import GIVEN_UP, LINES, Claimed, Committed, Failed, Line, Orders, Ready
from tests.soak_results import TOP

HEARTBEAT_INTERVAL_MS: Final = 2_000
AT_WORK_WITHIN_S: Final = 60.0
"""How long a fault waits for a process that starts or finds nothing to do."""
AT_A_STEP_WITHIN_S: Final = 20.0
"""How long a process may take to reach the step at which it dies. If the topic is drained, it does not reach it."""
MOST_TRIES: Final = 20
"""How often an operator tries to set positions back while members die."""


@dataclass(slots=True)
class SparkProcess(WorkerProcess):
    """A process with a JVM."""

    @property
    def dies(self) -> Path:
        """Return the path of the file that orders it to die."""
        return self.folder / f"{self.run_id}.dies"

    @property
    def is_ready(self) -> bool:
        """Return whether its session has started."""
        return any(isinstance(line, Ready) for line in read_journal(self.journal, LINES))

    @property
    def is_at_work(self) -> bool:
        """Return whether one of its members processes a batch."""
        lines = read_journal(self.journal, LINES)
        ended = sum(isinstance(line, Committed) or (isinstance(line, Failed) and line.had_claimed) for line in lines)
        return self.is_alive and sum(isinstance(line, Claimed) for line in lines) > ended

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, and its JVM and tasks too unless it asks to end in order."""
        if self.process is None or not self.is_alive:
            return
        others = [] if number is signal.SIGTERM else self.children()
        self.process.send_signal(number)
        signal_all(others, number)

    def children(self) -> list[psutil.Process]:
        """Return its JVM and the Python workers of its tasks."""
        with suppress(psutil.NoSuchProcess):
            if self.process is not None:
                return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def jvms(self) -> list[psutil.Process]:
        """Return its JVM, if it has one."""
        return [child for child in self.children() if name_of(child) == "java"]

    def tasks(self) -> list[psutil.Process]:
        """Return the Python workers of its tasks."""
        return [child for child in self.children() if name_of(child).startswith("python")]


def name_of(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@dataclass(slots=True)
class Tally:
    """The result of a run."""

    verdict: Verdict = field(default_factory=Verdict)
    records: int = 0
    batches: int = 0
    failed_batches: int = 0
    skipped_ranges: int = 0
    """Ranges that a run found in the output, because the run that wrote them died before it could commit."""
    processes: int = 0
    set_back: int = 0
    foreign: int = 0
    drained_after_s: float = 0.0

    @property
    def violations(self) -> list[ViolationError]:
        """Return the promises that were broken."""
        return self.verdict.violations


class Run(FaultRun[SparkProcess, Line, Tally]):
    """A seed's run."""

    def __init__(self, of: Scenario, services: Services, folder: Path) -> None:
        super().__init__(of.seed, services.kafka, folder, "tests.sink_faults.worker", LINES)
        self.of = of
        self.services = services
        stem = f"s{of.seed}-{os.urandom(3).hex()}"
        self.coordination_topic, self.topic, self.group = f"{stem}-log", f"{stem}-data", f"{stem}-group"
        self.written: dict[int, list[str]] = {number: [] for number in range(of.partitions)}
        self.set_back: list[SetBack] = []

        self.tally = Tally()
        self._processes = [SparkProcess(number, folder) for number in range(PROCESSES)]
        self._began_s = time.monotonic()
        self._is_growing = True
        self._operator = threading.Lock()

    @property
    def processes(self) -> Sequence[SparkProcess]:
        """Return the processes with Spark."""
        return self._processes

    def _prepare(self) -> None:
        self.admin.create(self.coordination_topic, 2, 3, LOG_SETTINGS)
        self.admin.create(self.topic, self.of.partitions, 3, DATA_SETTINGS)
        self.output = make_output(self.of.sink, self.folder, self.services.server)
        settings = {"bootstrap.servers": self.connection.bootstrap_servers, "enable.idempotence": True, "log_level": 0}
        self._producer = Producer(settings)

    def _topics(self) -> Sequence[str]:
        kafka = [self.output.at, f"{self.output.at}-notes"] if self.output.server == self._servers else []
        return self.coordination_topic, self.topic, *kafka

    @property
    def _servers(self) -> str:
        return self.connection.bootstrap_servers

    def _orders(self, process: SparkProcess) -> Orders:
        return Orders(
            bootstrap_servers=self._servers,
            coordination_topic=self.coordination_topic,
            topic=self.topic,
            group=self.group,
            run_id=process.run_id,
            output=self.output,
            journal=process.journal,
            dies=process.dies,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            max_records=self.of.max_records,
        )

    def _is_good_end(self, process: SparkProcess, code: int) -> bool:
        """Return whether a process may end so: in order, without its JVM, or killed at a step as ordered."""
        return code in {0, GIVEN_UP} or (code == -signal.SIGKILL and process.dies.exists())

    # Each tick

    def _live(self) -> None:
        for process in self.processes:
            self._start(process)
        self._wait(lambda: all(process.is_ready for process in self.processes), WITHIN_S, "all sessions to start")
        self._began_s = time.monotonic()
        self._play([self._faults_of(process) for process in self.processes])
        self._is_growing = False
        assert self._producer.flush(WITHIN_S) == 0
        self.services.kafka.repair()
        calm_s = time.monotonic()
        self._wait_until_drained()
        self.tally.drained_after_s = round(time.monotonic() - calm_s, 1)

    def _watch(self) -> None:
        """Let the topic grow."""
        due = round((time.monotonic() - self._began_s) * self.of.records_per_s)
        while self._is_growing and sum(map(len, self.written.values())) < due:
            partition = self.chance.randrange(self.of.partitions)
            values = self.written[partition]
            values.append(f"record {partition}/{len(values)}")
            self._producer.produce(self.topic, values[-1], partition=partition)
        self._producer.poll(0)

    def _wait_until_drained(self) -> None:
        """Wait for all records to be committed, on a slow machine too, as long as some offset changes."""
        ends = {number: len(values) for number, values in self.written.items()}
        while (offsets := self._offsets()) != ends:
            self._wait(partial(self._is_past, offsets), WITHIN_S, "further records to be committed")

    def _is_past(self, offsets: Mapping[int, int | None]) -> bool:
        return self._offsets() != offsets

    def _offsets(self) -> dict[int, int | None]:
        return {number: key.offset for number, key in self._keys().items()}

    def _keys(self) -> dict[int, Key]:
        """Return the state of each partition by the log."""
        with closing(open_reader(self.connection, self.coordination_topic)) as reader:
            world = reader.catch_up()
            return {number: world.snapshot_key(self.group, self.topic, number) for number in self.written}

    # Faults

    def _faults_of(self, process: SparkProcess) -> Script:
        """Let the faults of a process happen one after the other, each while it is at work."""
        for fault in self.of.faults:
            if fault.process != process.number:
                continue
            deadline_s = time.monotonic() + AT_WORK_WITHIN_S
            while not process.is_at_work and time.monotonic() < deadline_s:
                yield
            yield from self._pause(fault.after_s)
            yield from self._inject(fault, process)

    def _inject(self, fault: Fault, process: SparkProcess) -> Script:
        match fault.kind:
            case FaultKind.KILLED:
                yield from self._killed([process], fault.lasts_s)
            case FaultKind.KILLED_AT_STEP:
                yield from self._dies_at_step(process, fault.steps)
            case FaultKind.JVM_KILLED:
                signal_all(process.jvms(), signal.SIGKILL)
            case FaultKind.TASK_KILLED:
                yield from self._task_dies(process)
            case FaultKind.STOPPED:
                yield from self._stopped([process], fault.lasts_s)
            case FaultKind.DRIVER_STOPPED | FaultKind.JVM_STOPPED:
                yield from self._half_stopped(process, fault)
            case FaultKind.BROKER_KILLED:
                broker = yield from self._broker(self.topic)
                yield from self._broker_killed(broker, fault.lasts_s)
            case FaultKind.FOREIGN:
                yield from self._aside(self._add_foreign)
            case FaultKind.SET_BACK:
                yield from self._positions_set_back(process, fault)

    def _dies_at_step(self, process: SparkProcess, steps: int) -> Script:
        run_id, dies = process.run_id, process.dies
        dies.write_text(str(steps))
        deadline_s = time.monotonic() + AT_A_STEP_WITHIN_S
        while process.run_id == run_id and process.is_alive and time.monotonic() < deadline_s:
            yield

    def _task_dies(self, process: SparkProcess) -> Script:
        """Kill the Python workers of one moment at which there are some."""
        deadline_s = time.monotonic() + AT_A_STEP_WITHIN_S
        while time.monotonic() < deadline_s:
            if tasks := process.tasks():
                signal_all([self.chance.choice(tasks)], signal.SIGKILL)
                return
            yield

    def _half_stopped(self, process: SparkProcess, fault: Fault) -> Script:
        main = [] if process.process is None or not process.is_alive else [psutil.Process(process.process.pid)]
        stopped = main if fault.kind is FaultKind.DRIVER_STOPPED else process.jvms()
        signal_all(stopped, signal.SIGSTOP)
        yield from self._pause(fault.lasts_s)
        signal_all(stopped, signal.SIGCONT)

    def _add_foreign(self) -> None:
        self.tally.foreign += self.output.add_foreign(self.tally.foreign)

    def _positions_set_back(self, process: SparkProcess, fault: Fault) -> Script:
        """Let an operator set positions back, while one process is dead or stopped."""
        if fault.as_zombie:
            process.signal(signal.SIGSTOP)
        elif not process.is_held:
            self._kill(process)
        yield from self._aside(self._set_back)
        if not fault.as_zombie:
            self._start_again(process)
            return
        yield from self._pause(fault.lasts_s)
        process.signal(signal.SIGCONT)

    def _set_back(self) -> None:
        """Set positions back as an operator does, one operator at a time."""
        with self._operator:
            keys = self._keys()
            targets = {n: self.chance.randrange(key.offset) for n, key in keys.items() if key.offset}
            if not targets:
                return
            tries = 0
            while problem := self._reset(targets):
                tries += 1
                if tries == MOST_TRIES:
                    raise RunFailedError(f"the positions could not be set: {problem}")
            keys = self._keys()
            self.set_back += [SetBack(n, offset, keys[n].generation) for n, offset in targets.items()]
            self.tally.set_back += 1

    def _reset(self, targets: Mapping[int, int]) -> str:
        """Return why the command failed; empty if it did not."""
        offsets = ",".join(f"{partition}={offset}" for partition, offset in targets.items())
        command = ["position", "reset", self.group, self.topic, "--to-offset", offsets, "--yes", "--wait", "60s"]
        where = ["--bootstrap-servers", self._servers, "--coordination-topic", self.coordination_topic]
        done = subprocess.run(
            [*COMMAND, *command, *where],
            cwd=TOP,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr[-MOST_SAID:] if done.returncode else ""

    # Judging

    def _judge(self) -> Tally:
        journals = self._journals()
        lines = [line for journal in journals.values() for line in journal]
        committed = [line for line in lines if isinstance(line, Committed)]
        self.tally.batches = len(committed)
        self.tally.skipped_ranges = sum(line.skipped for line in committed)
        self.tally.failed_batches = sum(isinstance(line, Failed) for line in lines)
        self.tally.processes = len(journals)
        self.tally.records = sum(map(len, self.written.values()))
        self.tally.verdict = judge(self.output.rows(), self.written, self.set_back, self.tally.foreign)
        return self.tally
