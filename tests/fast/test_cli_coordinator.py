"""Test `coordinator run` as a user calls it, with a fake coordinator."""

import importlib.util
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from marshal_dagster.cli import assignments, coordinator, outbox
from marshal_dagster.cli.world_view import Assignee
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.kafka import topic_creation
from marshal_dagster.kafka.connection import KafkaConnection
from tests.cli import call
from tests.conditions import WITHIN_S

BROKERS = ("-b", "127.0.0.1:1")


class Fake:
    """A coordinator whose health and work a test chooses."""

    health_is: dict[str, Any]
    work: Callable[[], None]

    def __init__(self, *_: object, **__: object) -> None:
        """Accept the arguments of the command."""

    def run(self) -> None:
        """Do its work, then return."""
        type(self).work()

    def stop(self) -> None:
        """Do nothing."""

    def health(self) -> dict[str, Any]:
        """Return the health that the test chose."""
        return self.health_is


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """A healthy coordinator that ends at once."""
    monkeypatch.setattr(coordinator, "Coordinator", Fake)
    Fake.health_is, Fake.work = {"healthy": True}, lambda: None
    return Fake


@pytest.mark.slow
def test_health_is_off_unless_requested(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    """The health address is printed."""
    del fake
    started, stopped = call(capsys, "coordinator", "run", "--json", *BROKERS).lines
    assert (started["event"], started["health"], stopped["event"]) == ("started", None, "stopped")
    started, _ = call(capsys, "coordinator", "run", "--json", "--health", "0", *BROKERS).lines
    assert started["health"].startswith("127.0.0.1:")
    reported = call(capsys, "coordinator", "run", "--health", "0", *BROKERS).err
    assert "its health is at http://127.0.0.1:" in reported


@pytest.mark.parametrize("module", ["coordinator.background", "coordinator.lag_weights", "coordination.rationalizer"])
def test_the_warnings_of_each_part_of_it_are_shown(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], module: str
) -> None:
    """Without --health they are all that an operator sees of a failure."""
    fake.work = lambda: logging.getLogger(f"marshal_dagster.{module}").warning("the topic is gone")
    assert "the topic is gone" in call(capsys, "coordinator", "run", *BROKERS).err.splitlines()


def test_a_setting_that_the_brokers_ignored_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`topic create` reports it, too."""

    def create(*_: object) -> None:
        topic_creation.logger.warning("the brokers ignored min.insync.replicas=2")

    monkeypatch.setattr(CoordinatorTopics, "create", create)
    monkeypatch.setattr(CoordinatorTopics, "partitions", lambda *_: 8)
    answer = call(capsys, "coordinator", "init", *BROKERS)
    assert (answer.code, answer.err) == (0, "the brokers ignored min.insync.replicas=2\n")


@pytest.mark.slow
@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
def test_it_answers_while_the_coordinator_works(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], healthy: bool, status: int
) -> None:
    """The answer is the coordinator's own health report."""
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        address = json.loads(capsys.readouterr().out.splitlines()[0])["health"]
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=WITHIN_S) as answer:
                answers.append((answer.status, json.load(answer)))
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.load(error)))

    fake.health_is, fake.work = {"healthy": healthy, "role": "standby"}, ask
    assert call(capsys, "coordinator", "run", "--json", "--health", "0", *BROKERS).code == 0
    assert answers == [(status, {"healthy": healthy, "role": "standby"})]


@pytest.mark.parametrize("part", sorted({*coordinator._LOGGED_PARTS, *outbox._LOGGED_PARTS}))
def test_services_show_the_warnings_of_modules_that_exist(part: str) -> None:
    """A logger is named after its module, so the list must follow a renamed module."""
    assert importlib.util.find_spec(f"marshal_dagster.{part}") is not None


def test_what_a_silent_coordinator_has_assigned_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assignments expire after two session timeouts of the members, or two default ones if none is known."""
    now_ms = round(time.time() * 1_000)
    shares = {
        "east": MemberAssignment("east", "t", 1, 1, frozenset({("orders", 0)}), 6_000, frozenset({("orders", 0)}), 7)
    }
    old = {"west": MemberAssignment("west", "t", 1, 1, frozenset({("orders", 1)}))}
    views = {
        "led": GroupAssignments("led", 1, shares, now_ms - 11_000),
        "silent": GroupAssignments("silent", 1, shares, now_ms - 12_001),
        "led long": GroupAssignments("led long", 1, old, now_ms - 50_000),
        "silent long": GroupAssignments("silent long", 1, old, now_ms - 60_001),
        "never heard": GroupAssignments("never heard", 1, old, None),
    }
    monkeypatch.setattr(assignments, "read_groups", lambda *_: views)
    found = assignments.AssignmentCache(KafkaConnection(bootstrap_servers="127.0.0.1:1")).of(views)
    assert found == {"led": {("orders", 0): Assignee("east", 7)}, "led long": {("orders", 1): Assignee("west")}}
