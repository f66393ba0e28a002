"""Each command with `--json` is run with it in a test, so that its JSON is held against the schema."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from marshal_dagster.admin.recovery import Recovery
from marshal_dagster.cli import coordinator, kafka, outbox, recover, topic
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.devkafka import BrokerStatus, KafkaStatus
from marshal_dagster.outbox.migration import MigrationPlan
from marshal_dagster.outbox.old_tables import Check, Level
from marshal_dagster.testing import MemoryLog, MemorySnapshotTopic
from tests.admin_fixtures import FakeTopics, site_now
from tests.cli import Answer, call
from tests.fast.test_coordination_topic import Cluster
from tests.json_schemas import commands_with_json
from tests.members import GROUP, TOPIC

FOLDER: Final = Path(__file__).parent
THIS: Final = Path(__file__).name
HELD: Final[Mapping[str, str]] = {
    "doctor": "test_cli_doctor.py",
    "status": "test_cli_retry.py",
    "top": "test_cli_top.py",
    "lag": "test_cli_lag.py",
    "tail": "test_cli_tail.py",
    "replay": "test_cli_replay.py",
    "timeline": "test_cli_timeline.py",
    "recover": THIS,
    "pause": "test_cli_pause.py",
    "resume": "test_cli_pause.py",
    "reprocess": "test_cli_reprocess.py",
    "retry": "test_cli_retry.py",
    "revoke": "test_cli_revoke.py",
    "position get": "test_cli_position.py",
    "position reset": "test_cli_position.py",
    "position import": "test_cli_position_import.py",
    "settings show": "test_cli_settings.py",
    "settings set": "test_cli_settings.py",
    "settings disable-ranges": "test_cli_settings.py",
    "topic create": THIS,
    "topic check": THIS,
    "outbox init": "test_cli_outbox.py",
    "outbox harvest": "test_cli_outbox.py",
    "outbox drain": "test_cli_outbox.py",
    "outbox status": "test_cli_outbox.py",
    "outbox migrate": THIS,
    "outbox parked list": "test_cli_outbox.py",
    "outbox parked retry": "test_cli_outbox.py",
    "outbox parked delete": "test_cli_outbox.py",
    "sink describe": "test_sink_maintenance.py",
    "sink check": "test_sink_maintenance.py",
    "sink vacuum": "test_sink_maintenance.py",
    "exporter": "test_cli_exporter.py",
    "coordinator init": THIS,
    "coordinator run": "test_cli_coordinator.py",
    "coordinator status": THIS,
    "coordinator assignments": THIS,
    "kafka up": THIS,
    "kafka down": THIS,
    "kafka status": THIS,
}
"""Each command, and the file with a test that calls it with `--json`. `tests.cli.call` holds the JSON to the schema."""


def test_each_command_with_json_is_held_to_the_schema() -> None:
    """A new command needs a test that calls it."""
    assert set(HELD) == commands_with_json()
    missing = [command for command, name in HELD.items() if not _calls(command, name)]
    assert missing == []


def _calls(command: str, name: str) -> bool:
    """Return whether a function of a test file has `--json` and the names in the command, or a constant has these."""
    constants, functions = _texts(name)
    names = set(command.split()[-1:] if name != THIS else command.split())
    return any("--json" in texts and names <= texts | constants for texts in functions)


@cache
def _texts(name: str) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
    """Return the texts of a file outside of functions, and those of each function."""
    body = ast.parse((FOLDER / name).read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    others = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)]
    return frozenset(_of(others)), tuple(frozenset(_of([function])) for function in functions)


def _of(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        yield from (
            each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )


def on_kafka(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run a command against a server that is not contacted."""
    return call(capsys, *arguments, "-b", "somewhere:1")


def test_kafka(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cluster that runs, one that does not, and a directory without one."""
    down = KafkaStatus(tmp_path, "c" * 22, (BrokerStatus(1, 9_092, None, ready=False, log=tmp_path / "log"),))
    up = KafkaStatus(tmp_path, "c" * 22, (BrokerStatus(1, 9_092, 7, ready=True, log=tmp_path / "log"),), (1,))
    states = [up]
    cluster = SimpleNamespace(up=lambda: up, down=lambda **_: down, status=lambda: states[0])
    monkeypatch.setattr(kafka, "KafkaCluster", lambda *_, **__: cluster)
    assert call(capsys, "kafka", "up", "--json").json["started"] == [1]
    assert call(capsys, "kafka", "status", "--json").json["up"]
    assert call(capsys, "kafka", "down", "--json").json["brokers"][0]["pid"] is None
    states[0] = KafkaStatus(tmp_path, None, ())
    assert (
        call(capsys, "kafka", "status", "--json").code,
        call(capsys, "kafka", "status", "--json").json["brokers"],
    ) == (3, [])


def test_topic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is created, and one with a dangerous setting."""
    cluster = Cluster(3)
    monkeypatch.setattr(topic, "Topics", lambda *_, **__: _Opened(cluster))
    assert on_kafka(capsys, "topic", "create", "--json").json["created"] is True
    assert on_kafka(capsys, "topic", "check", "--json").json["problems"] == []
    cluster.created["__marshal"][2]["cleanup.policy"] = "compact"
    answer = on_kafka(capsys, "topic", "check", "--json")
    assert (answer.code, answer.json["ok"], len(answer.json["problems"])) == (1, False, 1)


class _Opened:
    """A client of a cluster in memory, as a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Cluster:
        return self.cluster

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def test_coordinator(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with a member, one that was never pinged, and one that no coordinator has led."""
    share = MemberAssignment("east", "t", 1, 1, frozenset({("orders", 0)}), 6_000, frozenset({("orders", 0)}), 7)
    views = {"led": GroupAssignments("led", 1, {"east": share}, 9), "new": GroupAssignments("new", 0, {}, None)}
    monkeypatch.setattr(CoordinatorTopics, "create", lambda *_: None)
    monkeypatch.setattr(CoordinatorTopics, "partitions", lambda *_: 8)
    monkeypatch.setattr(coordinator, "read_groups", lambda *_: views)
    assert on_kafka(capsys, "coordinator", "init", "--json").json["partitions"] == 8
    led, new = on_kafka(capsys, "coordinator", "status", "--json").json["groups"]
    assert (led["members"][0]["partitions"], new["silent_ms"]) == ({"orders": [0]}, None)
    assert on_kafka(capsys, "coordinator", "assignments", "led", "--json").json["members"][0]["gained"] == {
        "orders": [0]
    }
    unknown = on_kafka(capsys, "coordinator", "assignments", "lad", "--json")
    assert (unknown.code, unknown.json) == (1, None)
    assert unknown.error == (
        "no coordinator has led group 'lad'; groups with a coordinator: 'led', 'new'. Correct the name, or start "
        "`marshal-dagster coordinator run --bootstrap-servers somewhere:1` and a member of the group"
    )


def test_outbox_migrate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, and what was done: then it has a position in the database's log."""
    checks = (Check("table", Level.OK, "it exists"), Check("partitioner", Level.WARNING, "set it"))
    plan = MigrationPlan(("ALTER TABLE outbox RENAME TO outbox_migrated",), checks, rows=3)
    done = MigrationPlan(plan.statements, plan.checks, plan.rows, position="0/1A2B3C4")
    migration = SimpleNamespace(plan=lambda **_: plan, apply=lambda: done, undo=lambda: done, shown="outbox")
    monkeypatch.setattr(outbox, "OutboxMigration", lambda *_, **__: migration)
    monkeypatch.setattr(outbox, "_tables", lambda _: None)
    command = ("outbox", "migrate", "--from", "goharvest", "--table", "outbox")
    assert call(capsys, *command, "--dry-run", "--json").json["position"] is None
    assert call(capsys, *command, "--yes", "--json").json["position"] == "0/1A2B3C4"


def test_recover(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A log without its first records, and a complete one."""
    site = site_now()
    site.owner_of(0, at=50).release()
    snapshots = MemorySnapshotTopic(site.partitions)
    monkeypatch.setattr(recover, "open_log", lambda *_: MemoryLog(site.broker))
    monkeypatch.setattr(recover, "kafka_snapshots", lambda *_: Snapshots(snapshots))
    monkeypatch.setattr(recover, "require_rights", lambda *_: None)
    monkeypatch.setattr(recover, "Topics", lambda *_, **__: FakeTopics())
    assert on_kafka(capsys, "recover", "--yes", "--json").json == {"recovered": [], "keys": []}
    site.broker.retain_from(site.home, 2)
    monkeypatch.setattr(Recovery, "recover", lambda recovery, *_: list(recovery.observed))
    answer = on_kafka(capsys, "recover", "--yes", "--json").json
    assert answer["recovered"] == [site.home]
    assert next((row["group"], row["topic"], row["offset"]) for row in answer["keys"]) == (GROUP, TOPIC, 50)
