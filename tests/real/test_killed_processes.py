"""Members in separate processes that are killed or stopped: by SIGKILL, SIGSTOP, or the death of their parent."""

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from tests.conditions import WITHIN_S, wait_for_line
from tests.real.batch_worker import Orders
from tests.real.conftest import MakeTopic
from tests.real.kill_points import Message, Side
from tests.real.log_time import let_claims_become_stale

PARTITIONS, MESSAGES = 3, 90
HEARTBEAT_INTERVAL_MS = 60_000
"""So long that no lease ends, even if processes are stopped for a while. Log time passes when a test lets it."""
SHORT_INTERVAL_MS = 20_000
"""For a process that looks every 5 s whether its parent lives."""


class Workers:
    """The members of one group, as processes."""

    def __init__(self, base: dict[str, object]) -> None:
        self.base = base
        self.started: list[subprocess.Popen[str]] = []

    def orders(self, **extra: object) -> Orders:
        """Return the parameters of one more member."""
        return Orders.model_validate({**self.base, "run_id": f"run{len(self.started)}", **extra})

    def start(self, **extra: object) -> subprocess.Popen[str]:
        """Start a member."""
        command = [sys.executable, "-m", "tests.real.batch_worker", self.orders(**extra).model_dump_json()]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.started.append(worker)
        return worker

    def run(self, **extra: object) -> tuple[int, str]:
        """Run a member to its end. Return its exit code and its output."""
        worker = self.start(**extra)
        said, _ = worker.communicate(timeout=WITHIN_S)
        return worker.returncode, said

    def run_until_killed(self, **kill: object) -> None:
        """Run a member that is killed, and let its claims become stale."""
        code, said = self.run(**kill)
        assert code == -signal.SIGKILL, said
        self.let_claims_become_stale()

    def run_to_the_end(self) -> None:
        """Run a member until the topic is drained."""
        code, said = self.run()
        assert code == 0, said

    def let_claims_become_stale(self) -> None:
        """Let the claims of all present members become stale. None of them may write meanwhile."""
        orders = self.orders()
        connection = KafkaConnection(bootstrap_servers=orders.bootstrap_servers)
        let_claims_become_stale(connection, orders.coordination_topic, orders.heartbeat_interval_ms)

    def output(self) -> Counter[Message]:
        """Return how often each message is in the output."""
        path = self.orders().output
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


def all_messages() -> set[Message]:
    """Return all messages of the data topic."""
    return {(partition, offset) for partition in range(PARTITIONS) for offset in range(MESSAGES // PARTITIONS)}


def ranges_claimed(line: str) -> set[str]:
    """Return the ranges that a worker reports as claimed."""
    return set(re.findall(r"\S+ \[\d+, \d+\)", line))


@pytest.fixture
def filled_topic(topic: MakeTopic, fill: Callable[[str, int, int], None]) -> str:
    """A data topic with 30 messages in each of 3 partitions."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, MESSAGES)
    return name


@pytest.fixture
def workers(
    request: pytest.FixtureRequest,
    kafka: str,
    coordination_topic: str,
    filled_topic: str,
    tmp_path: Path,
) -> Iterator[Workers]:
    """A group in the mode of the test's parameter (at least once by default), and a filled data topic."""
    base = {
        "bootstrap_servers": kafka,
        "coordination_topic": coordination_topic,
        "topic": filled_topic,
        "group": new_instance_id("group"),
        "mode": getattr(request, "param", DeliveryMode.AT_LEAST_ONCE),
        "output": tmp_path / "output",
        "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
    }
    workers = Workers(base)
    yield workers
    for worker in workers.started:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()


KILLS: list[dict[str, object]] = [
    {"kill_side": Side.AFTER, "kill_record": "ClaimingMessages"},
    {"kill_after_messages": 10},
    {"kill_side": Side.WITHIN, "kill_count": 3},
]
"""Three moments by SIGKILL. `test_kill_points` has all moments, in one process."""


@pytest.mark.parametrize("kill", KILLS, ids=str)
@pytest.mark.parametrize("workers", [DeliveryMode.AT_LEAST_ONCE], indirect=True)
def test_at_least_once_with_a_killed_process(workers: Workers, kill: dict[str, object]) -> None:
    """Nothing is lost, and at most one batch of 30 messages is repeated."""
    workers.run_until_killed(**kill)
    workers.run_to_the_end()
    found = workers.output()
    assert set(found) == all_messages()
    assert sum(count - 1 for count in found.values()) <= 30
    assert max(found.values()) <= 2


@pytest.mark.parametrize("kill", KILLS, ids=str)
@pytest.mark.parametrize("workers", [DeliveryMode.AT_MOST_ONCE], indirect=True)
def test_at_most_once_with_a_killed_process(workers: Workers, kill: dict[str, object]) -> None:
    """Nothing is repeated, and at most one batch of 30 messages is dropped."""
    workers.run_until_killed(**kill)
    workers.run_to_the_end()
    found = workers.output()
    assert max(found.values()) == 1
    assert len(all_messages() - set(found)) <= 30


def test_a_stopped_member_is_fenced(workers: Workers) -> None:
    """A member that is stopped past its lease and continued commits nothing, and reports the lost claim."""
    may_continue = workers.orders().output.with_name("may continue")
    stopped = workers.start(pause_until=may_continue)
    plan = ranges_claimed(wait_for_line(stopped, "claimed"))
    wait_for_line(stopped, "processing")
    stopped.send_signal(signal.SIGSTOP)
    workers.let_claims_become_stale()
    successor = workers.start()
    taken = ranges_claimed(wait_for_line(successor, "claimed"))
    assert taken == plan, "the successor does not take over the stopped member's plan"
    assert successor.wait(WITHIN_S) == 0
    may_continue.touch()
    stopped.send_signal(signal.SIGCONT)
    said = wait_for_line(stopped, "failed")
    assert "ClaimLostError" in said
    assert stopped.wait(WITHIN_S) == 1
    assert set(workers.output()) == all_messages()


def test_an_orphan_stops(workers: Workers) -> None:
    """A member whose parent process was killed notices this, stops and commits nothing more."""
    workers.base["heartbeat_interval_ms"] = SHORT_INTERVAL_MS
    never = workers.orders().output.with_name("never")
    orders = workers.orders(pause_until=never, watch_parent=True).model_dump_json()
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, orders], stdout=subprocess.PIPE, text=True)
    workers.started.append(parent)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for_line(parent, "processing")
    parent.kill()
    assert "the parent process ended" in wait_for_line(parent, "failed")
    child.wait(WITHIN_S)
    workers.run_to_the_end()
    assert set(workers.output()) == all_messages()


_PARENT = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-m", "tests.real.batch_worker", sys.argv[1]])
print(worker.pid, flush=True)
worker.wait()
"""
