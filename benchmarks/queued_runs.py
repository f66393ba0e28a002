"""Real runs of Dagster in a queue that claim from one topic: how often each has to claim, and how long that takes.

A daemon of Dagster executes the runs: its sensor queues them, its run coordinator starts them, and each run is a
process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks import interpreters, services
from benchmarks.harness import Benchmark, Case, Goal, Measured
from benchmarks.machine import TOP
from marshal_dagster.batches import BatchRequest, BatchSession
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings

SERVERS: Final = "BENCHMARK_SERVERS"
FOLDER: Final = "BENCHMARK_FOLDER"
GROUP: Final = "queued"
TOPIC: Final = "orders"
SETTINGS: Final = GroupSettings(heartbeat_interval_ms=30_000)
_LOCATION: Final = Path(__file__).with_name("queued_location.py")
_DAGSTER_YAML: Final = """\
telemetry:
  enabled: false
nux:
  enabled: false
run_coordinator:
  module: dagster
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1
concurrency:
  runs:
    max_concurrent_runs: {runs}
"""
_WITHIN_S: Final = 600.0
_STOP_S: Final = 30.0
_LOOK_S: Final = 0.2
_ENOUGH_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: runs in the queue, partitions of the topic and of a run, seconds that a run holds them, runs alone."""

    runs: int = 20
    partitions: int = 128
    partitions_of_a_run: int = 6
    hold_s: int = 10
    alone: int = 3


@dataclass(slots=True)
class Wanted:
    """The runs to queue next: how many, and what each of them does. `number` is that of the round."""

    number: int
    runs: int
    partitions: int
    """The most partitions of a run."""
    hold_s: float
    """How long a run holds its claims."""


@dataclass(slots=True)
class Report:
    """What a run reports: the records and the accepted records of each append of claims, and how long it waited."""

    run_id: str
    number: int
    tries: list[tuple[int, int]] = field(default_factory=list)
    partitions: int = 0
    waiting_s: float = 0.0


def run(sizes: Sizes) -> Measured:
    """Let some runs work alone, one after another, and then all of them together."""
    with services.broker() as connection, tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as name:
        folder = Path(name)
        services.create_coordination_topic(connection, DEFAULT_COORDINATION_TOPIC)
        with Topics(connection) as topics:
            topics.create(TOPIC, sizes.partitions, 1)
        _set_positions(connection)
        with _daemon(connection, folder, sizes.runs):
            alone = [
                report
                for number in range(sizes.alone)
                for report in _work(connection, folder, sizes, Wanted(number, 1, sizes.partitions_of_a_run, 0))
            ]
            began_s = time.monotonic()
            wanted = Wanted(sizes.alone, sizes.runs, sizes.partitions_of_a_run, sizes.hold_s)
            together = _work(connection, folder, sizes, wanted)
            took_s = time.monotonic() - began_s
    name = f"{sizes.runs} runs on {sizes.partitions} partitions"
    tries = [float(len(report.tries)) for report in together]
    waits = [report.waiting_s for report in together], [report.waiting_s for report in alone]
    return Measured(
        [
            Case(f"{name}: most claims of a run", [max(tries)], [1.0], "claims", Goal.OURS_AT_MOST, _ENOUGH_TRIES),
            Case(f"{name}: until a run has its claim, beside alone", *waits, "s", Goal.OURS_AT_MOST, 1),
        ],
        {
            "claims_of_each_run": sorted(map(int, tries)),
            "partitions_of_each_run": sorted(report.partitions for report in together),
            "claims_refused": sum(asked - won for report in together for asked, won in report.tries),
            "seconds_until_all_were_done": round(took_s, 1),
        },
    )


def _set_positions(connection: KafkaConnection) -> None:
    """Set the group's position in each partition, as every group in use has one."""
    with (
        BatchSession.open(connection, GROUP, settings=SETTINGS) as session,
        session.claimed_batch(BatchRequest(topic=TOPIC)) as batch,
    ):
        if batch.idle is None:
            raise RuntimeError(f"topic {TOPIC!r} has messages already")


def _work(connection: KafkaConnection, folder: Path, sizes: Sizes, wanted: Wanted) -> list[Report]:
    """Write a message to each partition, queue runs, and return their reports when all are done."""
    services.load(connection, TOPIC, ((partition, b"x") for partition in range(sizes.partitions)))
    before = set(folder.glob("*.json"))
    unfinished = folder / "wanted.unfinished"
    unfinished.write_text(json.dumps(asdict(wanted)), encoding="utf-8")
    unfinished.rename(folder / "wanted")
    until_s = time.monotonic() + _WITHIN_S
    while len(files := set(folder.glob("*.json")) - before) < wanted.runs:
        if time.monotonic() > until_s:
            raise RuntimeError(f"{len(files)} of {wanted.runs} runs were done within {_WITHIN_S:g} s")
        time.sleep(_LOOK_S)
    return _checked([Report(**json.loads(file.read_text(encoding="utf-8"))) for file in files], wanted)


def _checked(reports: list[Report], wanted: Wanted) -> list[Report]:
    """Return the reports; raise `RuntimeError` if a run is of another round, or has not all of its partitions."""
    for report in reports:
        if (report.number, report.partitions) != (wanted.number, wanted.partitions):
            raise RuntimeError(f"a run of {wanted} has another result: {report}")
    return reports


@contextmanager
def _daemon(connection: KafkaConnection, folder: Path, runs: int) -> Iterator[None]:
    """Run Dagster's daemon, with an instance of its own, and stop all processes that it started."""
    import dagster as dg

    home = folder / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(_DAGSTER_YAML.format(runs=runs), encoding="utf-8")
    with dg.DagsterInstance.from_config(str(home)):
        pass  # creates the databases, which several processes must not do at once
    program = Path(sys.executable).with_name("dagster-daemon")
    with interpreters.environment() as environment, (folder / "daemon.log").open("wb") as output:
        own = {"DAGSTER_HOME": str(home), SERVERS: connection.bootstrap_servers, FOLDER: str(folder)}
        daemon = psutil.Popen(
            [str(program), "run", "-f", str(_LOCATION), "-d", str(TOP)],
            cwd=TOP,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        except RuntimeError as error:
            output.flush()
            raise RuntimeError(f"{error}; the daemon's log: {(folder / 'daemon.log').read_text()[-4_000:]}") from error
        finally:
            _stop([daemon, *daemon.children(recursive=True)])


def _stop(processes: Sequence[psutil.Process]) -> None:
    """Terminate processes, and kill those that remain."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=_STOP_S)


BENCHMARK: Final = Benchmark(
    "queued_runs", "runs of Dagster in a queue that claim from one topic, compared with a run alone", Sizes(), run
)
