"""What `status` adds to the world state: freshness, lag and half-written records, without changing it."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from rich.console import Console

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.cli import attention, output, world_tables
from marshal_dagster.cli.world_view import (
    Assignee,
    DataTopicEnds,
    LagUnknownReason,
    PartitionLag,
    ViewFilter,
    WorldView,
    data_places,
    to_json,
    world_view,
)
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    ReleaseGroup,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import World

PARTITIONS = 4
HOME = coordination_partition("orders", PARTITIONS)
HI_MS = 60_000
TOPIC_ID, OTHER_ID = "A" * 22, "B" * 22


class Log:
    """A world state built record by record."""

    def __init__(self, start: int = 0) -> None:
        self.world = World(PARTITIONS)
        self._next = dict.fromkeys(range(PARTITIONS), start)

    def add(self, message: Message, at_ms: int, partition: int = HOME) -> None:
        """Apply a record."""
        verdict = self.world.apply(partition, self._next[partition], at_ms, render(message))
        assert verdict.reason is None, verdict
        self._next[partition] += 1


def claim(number: int = 0, instance: str = "i") -> Message:
    """Return a claim of a partition of topic orders."""
    return ClaimingPartition(instance=instance, client="c", group="g", topic="orders", partition=number, time_s=1)


def beat(offset: int, number: int = 0) -> Message:
    """Return a heartbeat of its owner."""
    return Heartbeat(instance="i", client="c", group="g", topic="orders", partition=number, time_s=1, offset=offset)


def pause(until_s: int) -> Message:
    """Return a pause of the group."""
    return ReleaseGroup(instance="p", client="c", group="g", time_s=1, expiry_s=until_s)


def settings(interval_ms: int) -> Message:
    """Return settings of the group."""
    return GroupSettingsRecord(instance="i", client="c", group="g", time_s=1, settings=GroupSettings(interval_ms))


def text(looked: WorldView) -> str:
    """Return the text that an operator sees."""
    return "\n".join(str(part) for part in world_tables.overview(looked))


def test_names_are_cut_only_if_nothing_else_makes_room() -> None:
    """In a narrow terminal the owner folds at its space, and the partition is on one line."""
    owner, partition = "run 77aa01bc (nightly_orders)", "orders-of-the-shop.v2/12"
    table = output.Table(["partition", "owner", "#lag"], [[partition, owner, "5"]], {"partition", "owner"})
    for width, is_whole in ((100, True), (47, True), (46, False)):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(output._rich_table(table, width))
        assert (partition in captured.get()) is is_whole


def test_counts_of_zero_are_not_shown() -> None:
    """A log without an invalid or refused record has no line about them; one with some names the reasons."""
    world = World(PARTITIONS)
    assert "invalid" not in text(world_view(world))
    world.apply(HOME, 0, 1_000, b"junk")
    assert "Records invalid: 1 " in text(world_view(world))
    assert "refused" not in text(world_view(world))


@pytest.fixture
def log() -> Log:
    """A log in which instance i holds partition 0 of topic orders at offset 7, with a heartbeat at 1,000 ms."""
    log = Log()
    log.add(claim(), 1_000)
    log.add(beat(7), 1_000)
    return log


@pytest.mark.parametrize(
    ("silent_ms", "freshness"),
    [(0, "fresh"), (HI_MS, "fresh"), (HI_MS + 1, "unknown"), (2 * HI_MS, "unknown"), (2 * HI_MS + 1, "stale")],
)
def test_an_owner_is_fresh_unknown_or_stale(log: Log, silent_ms: int, freshness: str) -> None:
    """Up to one interval of silence is fresh, up to two are unknown, and a millisecond more is stale."""
    looked = world_view(log.world, at_ms=1_000 + silent_ms)
    assert to_json(looked)["groups"]["g"]["partitions"][0]["freshness"] == freshness
    assert f"{freshness}, {output.duration(silent_ms)}" in text(looked)


def test_log_time_counts_when_it_is_later_than_the_clock(log: Log) -> None:
    """With a slow clock an owner is not younger than the log shows."""
    log.add(claim(1), 1_000 + 2 * HI_MS + 1)
    (key, _) = world_view(log.world, at_ms=0).groups[0].keys
    assert key.last_heartbeat is not None
    assert key.last_heartbeat.freshness == "stale"


def test_a_stored_log_has_no_freshness(log: Log) -> None:
    """Without a clock the time of the last heartbeat is shown, not its age."""
    looked = world_view(log.world)
    (key,) = looked.groups[0].keys
    assert key.last_heartbeat is not None
    assert key.last_heartbeat.freshness is None
    assert "1970-01-01 00:00:01.000Z" in text(looked)


def test_the_member_that_a_partition_is_assigned_to_is_shown(log: Log) -> None:
    """The assignment has a column of its own and JSON fields, but only if a coordinator leads the group."""
    topic = DataTopic(instance="i", client="c", group="g", topic="orders", partition=0, time_s=1, topic_id=TOPIC_ID)
    log.add(topic, 1_000)
    looked = world_view(log.world, at_ms=1_000)
    led = world_view(log.world, at_ms=1_000, assigned={"g": {("orders", 0): Assignee("east", 0)}, "other": {}})
    long_led = world_view(log.world, at_ms=1_000, assigned={"g": {("orders", 0): Assignee("east", -600_000)}})

    assert "assigned to" not in text(looked)
    assert "assigned" not in to_json(looked)["groups"]["g"]["partitions"][0]
    assert "assigned to" in text(led)
    assert "east, for 1 s" in text(led)
    assert "east, for" not in text(long_led)
    partition = to_json(led)["groups"]["g"]["partitions"][0]
    assert (partition["assigned"], partition["assigned_since_ms"]) == ("east", 0)


@pytest.mark.parametrize(
    ("now", "lag"),
    [
        (DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 10)}), PartitionLag(10, 3)),
        (DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 7)}), PartitionLag(7, 0)),
        (DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 6)}), PartitionLag(6, None, LagUnknownReason.BEYOND_END)),
        (DataTopicEnds(OTHER_ID, {0: OffsetBounds(0, 10)}), PartitionLag(10, None, LagUnknownReason.OTHER_TOPIC)),
        (DataTopicEnds(TOPIC_ID, {1: OffsetBounds(0, 10)}), PartitionLag(None, None, LagUnknownReason.NO_PARTITION)),
        (DataTopicEnds(unknown=LagUnknownReason.NO_TOPIC), PartitionLag(None, None, LagUnknownReason.NO_TOPIC)),
        (DataTopicEnds(unknown=LagUnknownReason.UNAVAILABLE), PartitionLag(None, None, LagUnknownReason.UNAVAILABLE)),
    ],
)
def test_the_lag_is_reported_or_why_there_is_none(now: DataTopicEnds, lag: PartitionLag) -> None:
    """The lag is the topic's end less the offset, if both belong to the same incarnation of the topic."""
    log = Log()
    topic = DataTopic(instance="i", client="c", group="g", topic="orders", partition=0, time_s=1, topic_id=TOPIC_ID)
    for message in (settings(HI_MS), claim(), topic, beat(7)):
        log.add(message, 1_000)
    looked = world_view(log.world, at_ms=1_000, data={"orders": now})
    found = looked.groups[0].keys[0].lag
    assert found is not None
    assert replace(found, age_ms=None) == lag
    row = to_json(looked)["groups"]["g"]["partitions"][0]
    assert (row["data_end"], row["lag"], row["lag_unknown"]) == (lag.end, lag.records, lag.unknown)
    assert str(lag.unknown or lag.records) in text(looked)


def test_a_key_without_an_offset_has_no_lag() -> None:
    """A partition that was claimed without a heartbeat has no offset."""
    log = Log()
    log.add(claim(), 0)
    looked = world_view(log.world, at_ms=0, data={"orders": DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 10)})})
    assert looked.groups[0].keys[0].lag == PartitionLag(10, None, LagUnknownReason.NO_OFFSET)


def test_an_open_plan_is_shown_with_its_attempts(log: Log) -> None:
    """A plan that was taken over is shown with its end and the number of attempts."""
    plan = ClaimingMessages(instance="i", client="c", group="g", topic="orders", partition=0, time_s=1, plan_end=9)
    log.add(plan, 1_000)
    log.add(claim(instance="j"), 1_000 + 2 * HI_MS + 1)
    shown = text(world_view(log.world, at_ms=1_000))
    assert "9, try 2" in shown
    assert "j (c)" in shown


@pytest.mark.parametrize("written", [{0}, {0, 1, 3}])
def test_a_pause_that_is_half_written_is_reported(log: Log, written: set[int]) -> None:
    """A pause in some coordination partitions only is reported with these."""
    _start_all(log.world)
    for number in written:
        log.add(pause(1_000), 1_000, number)
    (group,) = world_view(log.world, at_ms=1_000).groups
    assert group.is_paused
    (difference,) = group.differences
    assert f"in coordination partitions {runs_text(written)} only" in difference.problem
    assert str(difference) in text(world_view(log.world, at_ms=1_000))


def test_a_pause_that_is_over_or_whole_is_no_difference(log: Log) -> None:
    """A pause in all coordination partitions, and the rest of one that is over, need no repair."""
    _start_all(log.world)
    log.add(pause(2), 1_000, 0)
    looked = world_view(log.world, at_ms=2_000)
    assert (looked.groups[0].differences, looked.groups[0].is_paused) == ((), False)
    assert "paused until" not in text(looked)
    assert "paused until 1970-01-01 00:00:02Z" in text(world_view(log.world))
    for number in range(PARTITIONS):
        log.add(pause(9), 1_000, number)
    looked = world_view(log.world, at_ms=2_000)
    assert (looked.groups[0].differences, looked.groups[0].is_paused) == ((), True)
    assert f"; `marshal-dagster resume {looked.groups[0].name}` ends it now" in text(looked)


def test_settings_that_are_half_written_are_reported() -> None:
    """Settings in some coordination partitions only are reported with these."""
    log = Log()
    _start_all(log.world)
    for number in (1, 2):
        log.add(settings(5_000), 0, number)
    (group,) = world_view(log.world, at_ms=0).groups
    (difference,) = group.differences
    assert str(difference) == (
        "settings heartbeat interval 5 s, rule set native, delivery at_least_once, features none: in coordination "
        "partitions 1-2 only; write it again to complete it"
    )
    assert (group.settings.heartbeat_interval_ms, group.settings_accepted) == (5_000, True)


def test_what_is_half_written_needs_an_operator() -> None:
    """Which pause or settings a member follows depends on the coordination partition of its topic."""
    log = Log()
    _start_all(log.world)
    log.add(settings(5_000), 0, 1)
    log.add(pause(2), 1_000, 2)
    view = world_view(log.world, at_ms=1_000)
    (group,) = view.groups
    said = [f"half written: group 'g': {difference}" for difference in group.differences]
    assert (len(said), attention.other_lines(view)) == (2, said)


def test_a_position_after_the_end_needs_an_operator(log: Log) -> None:
    """Each batch of it fails, as of a topic that was re-created."""
    log.add(beat(50), 1_000)
    data = {"orders": DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 49)})}
    (line,) = attention.other_lines(world_view(log.world, at_ms=1_000, data=data))
    assert line.startswith("lost records: positions of group 'g' are after the end of topic 'orders'; runs fail")
    assert line.endswith("`marshal-dagster position reset g orders --to-earliest`")


def test_what_is_only_observed_is_reported_and_misses_nothing() -> None:
    """Partitions without a start are named, and a record that they may have lost is no difference."""
    log = Log(start=5)
    log.add(beat(7), 0)
    log.add(pause(99), 0, (HOME + 1) % PARTITIONS)
    looked = world_view(log.world, at_ms=0)
    assert looked.observed == sorted({HOME, (HOME + 1) % PARTITIONS})
    assert looked.groups[0].differences == ()
    assert f"Only observed: coordination partitions {runs_text(looked.observed)}." in text(looked)
    assert "orders/0 (provisional)" in text(looked)


def test_the_json_holds_what_replay_gives(log: Log) -> None:
    """The JSON has each field of `replay --json` with the same value."""
    log.add(claim(1), 2_000)
    log.world.apply(HOME, 9, 2_000, b"junk")
    document, stored = to_json(world_view(log.world, at_ms=5_000)), summary(log.world)
    assert (document["invalid"], document["refused"]) == (stored["invalid"], stored["refused"]) == (1, 0)
    assert document["groups"].keys() == stored["groups"].keys()
    for name, group in stored["groups"].items():
        assert document["groups"][name]["paused_until"] == group["paused_until"]
        rows = document["groups"][name]["partitions"]
        assert [row | fields for row, fields in zip(rows, group["partitions"], strict=True)] == rows


def test_what_is_wanted_is_what_is_shown(log: Log) -> None:
    """If a group or topic is named, no other is shown or looked up."""
    other = ClaimingPartition(instance="i", client="c", group="h", topic="bills", partition=3, time_s=1)
    log.add(other, 1_000, coordination_partition("bills", PARTITIONS))
    assert data_places(log.world) == {"orders": {0}, "bills": {3}}
    assert data_places(log.world, ViewFilter(group="h")) == {"bills": {3}}
    assert data_places(log.world, ViewFilter(topic="orders")) == {"orders": {0}}
    assert [group.name for group in world_view(log.world, wanted=ViewFilter(group="h")).groups] == ["h"]
    groups = world_view(log.world, wanted=ViewFilter(topic="orders")).groups
    assert [[key.place for key in group.keys] for group in groups] == [[("orders", 0)], []]


@pytest.mark.parametrize(
    ("numbers", "said"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 2, 3, 5], "0, 2-3, 5"), ([1, 2], "1-2")]
)
def test_numbers_are_listed_shortly(numbers: Iterable[int], said: str) -> None:
    """Consecutive numbers are joined."""
    assert runs_text(list(numbers)) == said


def _start_all(world: World) -> None:
    for number in set(range(PARTITIONS)) - world.partitions.keys():
        world.start(number, 0)


def test_ranges_are_shown_below_their_key(log: Log) -> None:
    """Each range has its bounds, phase, owner and last heartbeat; in JSON its fields are those of `replay`."""
    world = World(PARTITIONS)
    tails = (
        ("GroupSettings", f"{HI_MS}/native/at_least_once/ranges"),
        ("ClaimingPartition", ""),
        ("DataTopic", TOPIC_ID),
        ("Heartbeat", "7"),
        ("ReleasingPartition", "7"),
        ("ClaimingRange", "7/10"),
        ("ClaimingRange", "10/20"),
        ("PlanningRange", "6/20"),
        ("ReleasingRange", "6"),
        ("ClaimingRange", "10/20"),
        ("ClaimingRange", "30/40"),
        ("PlanningRange", "10/40"),
        ("RangeDone", "10"),
    )
    for offset, (kind, tail) in enumerate(tails):
        place = "/0" if kind == "GroupSettings" else "orders/0"
        value = "/".join([kind, "1", "1", f"i{offset}" if kind == "ClaimingRange" else "i", "c", "g", place])
        value = f"{value}/{tail}" if tail else value
        if kind in {"PlanningRange", "ReleasingRange", "RangeDone"}:
            value = value.replace("/i/", f"/i{tail.split('/')[0]}/")
        assert world.apply(HOME, offset, 1_000, value.encode()).reason is None, value
    looked = world_view(
        world, at_ms=1_000 + 3 * HI_MS, data={"orders": DataTopicEnds(TOPIC_ID, {0: OffsetBounds(0, 99)})}
    )
    reported = text(looked)
    assert "orders/0 [7, 10) claimed" in reported
    assert "orders/0 [10, 20) planned" in reported
    assert "orders/0 [30, 40) done" in reported
    assert "20, try 2" in reported
    assert reported.count("stale") == 2
    (row,) = to_json(looked)["groups"]["g"]["partitions"]
    assert [(one["start"], one["end"], one["phase"]) for one in row["ranges"]] == [
        (7, 10, "claimed"),
        (10, 20, "planned"),
        (30, 40, "done"),
    ]
    assert row["lag"] == 82
    assert "ranges" not in to_json(world_view(log.world))["groups"]["g"]["partitions"][0]
    assert "1970-01-01 00:00:01.000Z" in text(world_view(world))
