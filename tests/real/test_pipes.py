"""Batches whose script runs in namespaces of its own: both sides are killed at each step, and nothing is lost or twice.

The script shares the brokers and the output with its run, and reads Python and Java (`isolated_script`).
"""

import importlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import dagster as dg
import psutil
import pytest

from marshal_dagster.errors import BatchAbortedError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks import FileSink
from tests.conditions import wait_until
from tests.real.isolated_client import IsolatedClient
from tests.real.isolated_script import ROOT, IsolatedScript, killed_at
from tests.real.log_time import let_claims_become_stale
from tests.real.pipes_run import Run, arguments
from tests.topics import reserved

COUNT, PARTITIONS = 12, 3
SCRIPT_STEPS = ("started", "claim seen", "read", "before commit", "written", "reported")
STOPPED_BY = {
    "read": "has ended; it is held by",
    "before commit": "because another run has taken the partition over",
    "written": "has ended; it is held by",
    "reported": "marshal_outcome",
    "outcome": "marshal_outcome",
}
"""What is in the log of a script that continues after another run has committed its batch: the sink fences the second.

The last two have reported, but their run is dead.
"""
EXAMPLE = ROOT / "examples" / "pipes"


@pytest.fixture
def run(
    kafka: str,
    coordination_topic: str,
    topic: Callable[[int], str],
    fill: Callable[[str, int, int], None],
    tmp_path: Path,
) -> Run:
    """A run of a topic with messages, whose script has its own folder."""
    data = topic(PARTITIONS)
    fill(data, PARTITIONS, COUNT)
    scripts, shared = tmp_path / "scripts", tmp_path / "shared"
    scripts.mkdir()
    shared.mkdir()
    script = shutil.copy(ROOT / "tests" / "real" / "pipes_script.py", scripts)
    shutil.copy(ROOT / "examples" / "sqlite_sink" / "sqlite_sink.py", scripts)
    return Run(kafka, coordination_topic, data, str(shared), str(script))


def rows(run: Run) -> list[tuple[int, int]]:
    """Return partition and offset of each row in the output."""
    if not run.output.exists():
        return []
    with closing(sqlite3.connect(run.output)) as database:
        return sorted(database.execute('SELECT partition, "offset" FROM result'))


def messages(count: int) -> list[tuple[int, int]]:
    """Return partition and offset of the first `count` messages."""
    return sorted((number % PARTITIONS, number // PARTITIONS) for number in range(count))


def test_a_script_that_is_killed_at_any_step_commits_nothing(run: Run) -> None:
    """The next run starts it again, and each message is in the output once."""
    for step in SCRIPT_STEPS:
        client = replace(run, pause_at=step).client()
        (run.steps / step).unlink(missing_ok=True)
        thread = killed_at(client, run.steps / step)
        with pytest.raises((ChildProcessError, BatchAbortedError)):
            run.process(client)
        thread.join()
        assert rows(run) == (messages(COUNT) if step in {"written", "reported"} else []), step
    batch = run.process(run.client())
    assert batch.committed
    assert batch.outcome is not None
    assert batch.outcome.skipped == batch.ranges
    assert rows(run) == messages(COUNT)


@contextmanager
def killed_run(run: Run) -> Iterator[list[psutil.Process]]:
    """Start a run in a process of its own, wait until it or its script pauses, and kill the run alone.

    Yield the processes of its script, which are killed after the block.
    """
    paused = run.steps / run.pause_at
    paused.unlink(missing_ok=True)
    with subprocess.Popen(arguments(run), cwd=ROOT) as process:
        wait_until(lambda: process.poll() is not None or paused.exists(), "the script pauses")
        assert process.poll() is None
        script = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    try:
        yield script
    finally:
        for each in script:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def end_of_script(run: Run, script: list[psutil.Process]) -> str:
    """Let a script continue that pauses, and return what it has logged until its end."""
    (run.steps / run.pause_at).unlink()
    wait_until(lambda: not any(each.is_running() for each in script), "the script has ended")
    return run.log.read_text()


def test_each_message_is_written_at_least_once_though_script_and_run_are_killed(run: Run) -> None:
    """Nothing of a killed script or run is committed. The next run writes the same messages, even if they are there.

    Until its write a script does the same in each mode.
    """
    again = replace(run, mode=DeliveryMode.AT_LEAST_ONCE)
    written = 0
    for step in SCRIPT_STEPS[SCRIPT_STEPS.index("before commit") :]:
        client = replace(again, pause_at=step).client()
        thread = killed_at(client, run.steps / step)
        with pytest.raises((ChildProcessError, BatchAbortedError)):
            again.process(client)
        thread.join()
        written += step in {"written", "reported"}
        assert rows(run) == sorted(messages(COUNT) * written), step
        assert again.position() == 0, step
    with killed_run(replace(again, pause_at="outcome")):
        written += 1
    last = replace(again, others_are_dead=True).process(again.client())
    assert last.committed
    assert rows(run) == sorted(messages(COUNT) * (written + 1))
    assert again.position() == COUNT // PARTITIONS


def test_a_script_whose_run_was_killed_stops(run: Run) -> None:
    """Heartbeats of the run renew the claims. When none comes for two intervals, the script stops by itself."""
    silent = replace(run, heartbeat_interval_ms=20_000, pause_at="checking")
    with killed_run(silent) as script:
        connection = KafkaConnection(bootstrap_servers=run.bootstrap_servers)
        let_claims_become_stale(connection, run.coordination_topic, silent.heartbeat_interval_ms)
        wait_until(lambda: not any(each.is_running() for each in script), "the script has ended")
    assert "no heartbeat of batch" in run.log.read_text()
    assert rows(run) == []


def test_a_script_that_outlives_its_run_is_fenced(run: Run, fill: Callable[[str, int, int], None]) -> None:
    """Another run has taken the batch over, and committed it, when the script continues at any step."""
    count = 0
    for step, stopped_by in STOPPED_BY.items():
        stale = replace(run, pause_at=step, log_name=f"{step}.log", others_are_dead=True)
        with killed_run(stale) as script:
            count += PARTITIONS if count else COUNT
            was_written = step in {"written", "reported", "outcome"}
            assert (len(rows(run)) == count) is was_written, step
            batch = replace(run, others_are_dead=True).process(run.client())
            assert batch.committed
            assert batch.outcome is not None
            assert bool(batch.outcome.skipped) is was_written, step
            log = end_of_script(stale, script)
        assert stopped_by in log
        assert rows(run) == messages(count), step
        fill(run.topic, PARTITIONS, PARTITIONS)


# The example, with Spark and Dagster's own session of Pipes


@pytest.fixture
def example(
    kafka: str, coordination_topic: str, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example's code location."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("ORDERS_COORDINATION_TOPIC", coordination_topic)
    monkeypatch.setenv("ORDERS_OUTPUT", str(tmp_path / "shared" / "output"))
    monkeypatch.syspath_prepend(EXAMPLE)
    with reserved(topics, "orders"):
        yield importlib.import_module("pipes_batches")
    del sys.modules["pipes_batches"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::dagster.PreviewWarning")  # of Pipes itself
def test_the_example_writes_each_order_once_though_its_first_script_is_killed(
    example: ModuleType, kafka: str, topics: Topics, fill: Callable[[str, int, int], None], tmp_path: Path
) -> None:
    """The run fails with its script and releases; the next one writes all rows. A run without messages starts none."""
    topics.create("orders", PARTITIONS, 1)
    fill("orders", PARTITIONS, COUNT)
    scripts = Path(shutil.copytree(EXAMPLE, tmp_path / "scripts"))
    script = IsolatedScript(scripts / "parse_orders.py", tmp_path / "shared", kafka)
    sink = FileSink(example.OUTPUT, format="json")

    def run(client: IsolatedClient) -> dg.ExecuteInProcessResult:
        resources = {**(example.defs.resources or {}), "pipes": client}
        return dg.materialize([example.parsed_orders], instance=instance, resources=resources, raise_on_error=False)

    with dg.DagsterInstance.ephemeral() as instance:
        assert not run(IsolatedClient(script, is_killed=True)).success
        assert not sink.committed_files()
        done = run(IsolatedClient(script))
        assert done.success
        (event,) = done.get_asset_materialization_events()
        assert event.materialization.metadata["spark"].value
        written = sink.committed_files()
        rows = [line for path in written for line in path.read_text().splitlines()]
        assert len(set(rows)) == len(rows) == COUNT
        script.log.unlink()
        assert run(IsolatedClient(script)).success
        assert not script.log.exists()
        assert sink.committed_files() == written
