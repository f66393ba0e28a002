"""The coordination log of version 0.1 and its snapshots, as this version reads them (docs/how-to/upgrading.md)."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.log import LogIdentity
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import GroupPausedError, SettingsMismatchError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet, parse
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog
from marshal_dagster.testing.memory_log import MemorySnapshotTopic
from tests.cli import call

FOLDER: Final = Path(__file__).parents[1] / "data" / "version_0_1"
COORDINATION, DATA = "former.coordination", "former.orders"
PARTITIONS: Final = 2
AFTERWARDS_MS: Final = 3_600_000


def records_of(topic: str) -> list[dict[str, Any]]:
    """Return the records of a topic."""
    return [json.loads(line) for line in (FOLDER / f"{topic}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def broker() -> MemoryBroker:
    """A broker with the coordination topic, an hour after its last record."""
    records = records_of(COORDINATION)
    clock = ManualClock(max(record["timestamp"] for record in records) + AFTERWARDS_MS)
    broker = MemoryBroker(PARTITIONS, topic=COORDINATION, now_ms=clock.wall_ms)
    topic_id = json.loads((FOLDER / "topic_ids.json").read_text(encoding="utf-8"))[COORDINATION]
    broker._identity = LogIdentity(COORDINATION, topic_id, PARTITIONS)
    for record in records:
        offset = broker.append(record["partition"], record["value"].encode(), record["timestamp"])
        assert offset == record["offset"]
    return broker


def test_the_log_leads_to_the_same_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Each owner, position, plan, range, setting and pause is what version 0.1 computed of this log."""
    log = str(FOLDER / f"{COORDINATION}.jsonl")
    answer = call(capsys, "replay", log, "--json", "--coordination-partitions", str(PARTITIONS))
    assert answer.code == 0, answer.err
    now, former = (json.loads(text)["groups"] for text in (answer.out, (FOLDER / "state.json").read_text()))
    assert now == former


def test_the_log_has_all_kinds_of_records() -> None:
    """Claims, plans, commits, releases, ranges, pauses, settings and topic ids are among the records."""
    kinds = {type(parse(record["value"].encode())).__name__ for record in records_of(COORDINATION)}
    assert kinds >= {
        "ClaimingPartition",
        "ClaimingMessages",
        "Heartbeat",
        "ReleasingPartition",
        "ReleaseGroup",
        "GroupSettingsRecord",
        "DataTopic",
        "ClaimingRange",
        "PlanningRange",
        "RangeDone",
    }


def test_a_snapshot_replaces_the_records_before_it(broker: MemoryBroker) -> None:
    """With the snapshots of version 0.1, a log whose older records were deleted leads to the state of the whole log."""
    whole = Rationalizer(MemoryLog(broker)).follow_all()
    topic = MemorySnapshotTopic(PARTITIONS)
    for record in records_of(f"{COORDINATION}_snapshot"):
        topic.append(record["partition"], [Record(record["key"].encode(), record["value"].encode())])
        broker.retain_from(record["partition"], int(record["key"].split("/")[4]))

    rest = Rationalizer(MemoryLog(broker), snapshots=Snapshots(topic)).follow_all()

    assert all(broker.bounds(number).start > 0 for number in range(PARTITIONS))
    for number in range(PARTITIONS):
        assert rest.partitions[number].certain
        assert rest.partitions[number].groups == whole.partitions[number].groups


def test_a_group_without_settings_is_a_go_group(broker: MemoryBroker) -> None:
    """The rules of Go consumers apply to a group whose positions an operator set before its first member came."""
    worlds = Rationalizer(MemoryLog(broker)).follow_all().partitions.values()
    assert {world.group("without settings").settings.rule_set for world in worlds} == {RuleSet.GO}


def test_a_pause_and_settings_still_hold(broker: MemoryBroker) -> None:
    """A member of this version claims nothing in a group that version 0.1 paused, or with other settings."""
    rationalizer = Rationalizer(MemoryLog(broker))
    rationalizer.follow_all()
    settings = GroupSettings(60_000, RuleSet.NATIVE, DeliveryMode.AT_LEAST_ONCE)
    paused = Claimer(rationalizer, Member("paused", "tester", "today.1"), DATA, settings)
    paused.ensure_group_settings()
    with pytest.raises(GroupPausedError):
        paused.claim(range(PARTITIONS))
    other = Claimer(rationalizer, Member("files", "tester", "today.2"), DATA, settings)
    with pytest.raises(SettingsMismatchError, match="effectively_once"):
        other.ensure_group_settings()
