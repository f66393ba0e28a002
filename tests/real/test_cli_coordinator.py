"""The `coordinator` commands, run as processes, on a real broker."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import pytest

from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

Call = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def name() -> str:
    """The name of a coordinator's topics, which no other test uses."""
    return f"coordinator-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def call(connection: KafkaConnection, name: str) -> Iterator[Call]:
    """A function that starts `coordinator ...`. Processes that still run at the end are killed."""
    environment = {
        **os.environ,
        "MARSHAL_BOOTSTRAP_SERVERS": connection.bootstrap_servers,
        "MARSHAL_COORDINATOR_TOPIC": name,
    }
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "marshal_dagster.cli", "coordinator", *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def partitions_of(members: Sequence[CoordinatedMember]) -> list[list[int]]:
    """Return the partitions of each member."""
    return [sorted(partition for _, partition in each.places) for each in members]


def said(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a process, and return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=WITHIN_S)
    return process.returncode, out, err


def run_cli(*arguments: str, environment: Mapping[str, str]) -> int:
    """Run another command and return its exit code."""
    command = [sys.executable, "-m", "marshal_dagster.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, check=False, timeout=WITHIN_S).returncode


def member(connection: KafkaConnection, name: str, who: str, topic: str) -> CoordinatedMember:
    """Return a member without any processing."""
    return CoordinatedMember(
        connection,
        "etl",
        who,
        start=lambda _: None,
        stop=lambda _: None,
        topics=CoordinatorTopics(name),
        topics_wanted=[topic],
    )


def test_a_group_is_led_and_looked_at(connection: KafkaConnection, name: str, call: Call, topic: MakeTopic) -> None:
    """The commands work from missing topics to a group without members, step by step as a user runs them."""
    wanted = topic(7)
    code, _, err = said(call("run"))
    assert (code, "`marshal-dagster coordinator init` creates" in err) == (ExitCode.TOPIC_MISSING, True)
    assert said(call("init", "--partitions", "2"))[0] == ExitCode.OK
    code, out, err = said(call("init", "--partitions", "3"))
    assert (code, "with 2 partitions each" in out, "stay as they are" in err) == (ExitCode.OK, True, True)
    assert said(call("status"))[1] == "No coordinator has led a group yet\n"
    assert said(call("assignments", "etl"))[0] == ExitCode.PROBLEMS

    serving = call("run", "--json", "--strategy", "range", "--health", "0")
    assert serving.stdout is not None
    started = json.loads(serving.stdout.readline())
    with ExitStack() as stack:
        members = [stack.enter_context(member(connection, name, who, wanted)) for who in ("a", "b")]
        wait_until(
            lambda: partitions_of(members) == [[0, 1, 2, 3], [4, 5, 6]],
            lambda: f"both members have a share, not {partitions_of(members)}",
        )
        code, out, _ = said(call("status", "--json"))
        (group,) = json.loads(out)["groups"]
        assert code == ExitCode.OK
        assert 0 <= group["silent_ms"] < 3_600_000
        shares = {each["member"]: each["partitions"] for each in group["members"]}
        assert shares == {"a": {wanted: [0, 1, 2, 3]}, "b": {wanted: [4, 5, 6]}}
        assert "0-3" in said(call("assignments", "etl"))[1]
        assert "7 partitions for 2 members, 3 to 4 each; " in said(call("status"))[1]
        with urllib.request.urlopen(f"http://{started['health']}/health", timeout=WITHIN_S) as answer:
            how = json.load(answer)
        assert (answer.status, how["role"], how["groups"], how["members"]) == (200, "leader", 1, 2)
        assert (how["partitions"], how["failure"], how["ready"]) == (2, None, True)

        def metrics() -> list[str]:
            with urllib.request.urlopen(f"http://{started['health']}/metrics", timeout=WITHIN_S) as answer:
                return str(answer.read().decode()).splitlines()

        wait_until(lambda: 'marshal_coordinator_assigned{group="etl"} 7.0' in metrics(), "the assignment is measured")
        assert {"marshal_coordinator_led 2.0", "marshal_coordinator_partitions 2.0"} <= set(metrics())
    wait_until(lambda: said(call("assignments", "etl"))[1] == "Group etl has no members\n", "no member is left")

    serving.send_signal(signal.SIGTERM)
    code, out, _ = said(serving)
    events = [json.loads(line) for line in out.splitlines()]
    assert code == ExitCode.OK
    assert started["event"] == "started"
    assert {"joined", "rebalanced", "left", "stopped"} <= {event["event"] for event in events}
    assert {name for each in events if each["event"] == "joined" for name in each["members"]} == {"a", "b"}
    assert sum(each.get("moved", 0) for each in events) >= 7


def test_what_is_unread_is_shared(  # noqa: PLR0917 - fixtures
    connection: KafkaConnection,
    name: str,
    call: Call,
    topic: MakeTopic,
    coordination_topic: str,
    fill: Callable[[str, int, int], None],
) -> None:
    """With the weighted strategy, one member gets the partition with many unread records and at most an empty one."""
    wanted = topic(6)
    fill(wanted, 6, 60)
    fill(wanted, 1, 400)
    reported = {
        "MARSHAL_BOOTSTRAP_SERVERS": connection.bootstrap_servers,
        "MARSHAL_COORDINATION_TOPIC": coordination_topic,
    }
    assert run_cli("settings", "set", "etl", "--new-group", "--yes", environment=reported) == ExitCode.OK
    at = ("--to-offset", "0=10,1=10,2=0,3=0,4=0,5=0", "--yes")
    assert run_cli("position", "reset", "etl", wanted, *at, environment=reported) == ExitCode.OK
    assert said(call("init", "--partitions", "1"))[0] == ExitCode.OK
    call("run", "--strategy", "weighted", "--coordination-topic", coordination_topic)
    with ExitStack() as stack:
        members = [stack.enter_context(member(connection, name, who, wanted)) for who in ("a", "b")]

        def is_shared() -> bool:
            found = partitions_of(members)
            return sum(map(len, found)) == 6 and any(0 in share and set(share) <= {0, 1} for share in found)

        wait_until(is_shared, lambda: f"partition 0 has many unread records: {partitions_of(members)}")


def test_a_log_to_weigh_by_must_be_there(call: Call) -> None:
    """If the coordination log for the weights is missing, the error names the command that creates it."""
    assert said(call("init", "--partitions", "1"))[0] == ExitCode.OK
    code, _, err = said(call("run", "--strategy", "weighted", "--coordination-topic", "missing"))
    assert (code, "`marshal-dagster topic create --name missing`" in err) == (ExitCode.TOPIC_MISSING, True)
