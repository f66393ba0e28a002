"""One test for each sentence of protocol.md, section 8, that defines a record or a state."""

from dataclasses import fields
from typing import Any

import pytest

from marshal_dagster.cli.tail import details_text
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    ClaimingRange,
    GroupSettings,
    GroupSettingsRecord,
    Invalid,
    InvalidMessage,
    Message,
    PlanningRange,
    RangeHeartbeat,
    parse,
    render,
)
from marshal_dagster.protocol.range_set import MOST_RANGES
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.rules import NATIVE, RecordNote, Refusal
from marshal_dagster.protocol.state import Key, Owner, Phase, Range
from marshal_dagster.protocol.world import Verdict, VerdictKind, World

HI_MS = 1_000
TOPIC_ID, OTHER_TOPIC_ID = "A" * 22, "B" * 22


class Log:
    """A log of one coordination partition, with the key `t/0` of group `g` and times in ms."""

    def __init__(self, start: int = 0) -> None:
        """Create an empty log that starts at log offset `start`."""
        self.world, self.now_ms, self.next = World(1), 0, start

    def add(self, kind: str, *tail: object, by: str = "a", at_ms: int | None = None) -> Verdict:
        """Append a record of instance `by`, and return its verdict."""
        self.now_ms = self.now_ms if at_ms is None else at_ms
        where = "/0" if kind in {"ReleaseGroup", "GroupSettings"} else "t/0"
        value = "/".join([kind, "1", "1", by, "c", "g", where, *map(str, tail)])
        self.next += 1
        return self.world.apply(0, self.next - 1, self.now_ms, value.encode())

    def win(self, kind: str, *tail: object, by: str = "a", at_ms: int | None = None) -> int:
        """Append a record, check that it is accepted, and return its log offset."""
        verdict = self.add(kind, *tail, by=by, at_ms=at_ms)
        assert verdict.kind is VerdictKind.ACCEPTED, verdict
        return self.next - 1

    def lose(self, why: Refusal, kind: str, *tail: object, by: str = "a", at_ms: int | None = None) -> None:
        """Append a record, and check that it is refused for this reason and changes nothing."""
        before = summary(self.world)["groups"]
        assert self.add(kind, *tail, by=by, at_ms=at_ms).reason == why
        assert summary(self.world)["groups"] == before

    def settle(self, features: str = "ranges", delivery: str = "at_least_once", rules: str = "native") -> int:
        """Pause the group, change its settings and resume it. Return the log offset of the settings."""
        interval_ms = HI_MS if rules == "native" else 60_000
        self.win("ReleaseGroup", 9_999_999_999, by="settler")
        settled = self.win("GroupSettings", interval_ms, rules, delivery, features, by="settler")
        self.win("ReleaseGroup", 0, by="settler")
        return settled

    def pause(self, by: str = "p") -> None:
        """Pause the group."""
        self.win("ReleaseGroup", 9_999_999_999, by=by)

    def plan(self, start: int, end: int, by: str = "a") -> int:
        """Claim and plan a range, and return its epoch."""
        epoch = self.win("ClaimingRange", start, end, by=by)
        self.win("PlanningRange", epoch, end, by=by)
        return epoch

    @property
    def key(self) -> Key:
        """The state of the key."""
        return self.world.key("g", "t", 0)

    @property
    def ranges(self) -> list[tuple[int, int, str]]:
        """Start, end and phase of the key's ranges."""
        return [(range_.start, range_.end, range_.phase.value) for range_ in self.key.ranges]


@pytest.fixture
def log() -> Log:
    """Return a log with a key at offset 5, in a group that enables ranges."""
    log = Log()
    log.settle()
    log.win("ClaimingPartition", by="first")
    log.win("DataTopic", TOPIC_ID, by="first")
    log.win("Heartbeat", 5, by="first")
    log.win("ReleasingPartition", 5, by="first")
    return log


# 1. Records


def message(kind: type[Message], **content: Any) -> Message:  # noqa: ANN401 - whatever its tail holds
    """Return a record of `t/0`."""
    return kind(instance="i", client="c", group="g", topic="t", partition=0, time_s=1, **content)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (message(ClaimingRange, start=0, end=2**63 - 1), "ClaimingRange/1/1/i/c/g/t/0/0/9223372036854775807"),
        (message(PlanningRange, epoch=7, end=9), "PlanningRange/1/1/i/c/g/t/0/7/9"),
        (message(RangeHeartbeat, epoch=7), "RangeHeartbeat/1/1/i/c/g/t/0/7"),
    ],
)
def test_they_have_the_form_of_section_1(record: Message, text: str) -> None:
    """Each record is parsed to what was rendered, byte for byte."""
    assert render(record) == text.encode()
    assert parse(text.encode()) == record


@pytest.mark.parametrize("tail", ["5", "5/6/7", "5/", "/6", "05/6", "5/06", "5/9223372036854775808", "-1/6", "5/6 "])
@pytest.mark.parametrize("kind", ["ClaimingRange", "PlanningRange"])
def test_all_numbers_fit_int64_and_each_is_a_field_of_its_own(kind: str, tail: str) -> None:
    """A record with any other tail is invalid, and `render` rejects it."""
    parsed = parse(f"{kind}/1/1/i/c/g/t/0/{tail}".encode())
    assert isinstance(parsed, InvalidMessage)
    assert parsed.reason in {Invalid.NUMBER, Invalid.FIELD_COUNT}
    for start, end in ((-1, 5), (5, -1), (2**63, 5), (5, 2**63)):
        with pytest.raises(ValueError, match="no valid record can carry"):
            render(message(ClaimingRange, start=start, end=end))


def test_they_lie_in_the_coordination_partition_of_their_topic() -> None:
    """A range record in another coordination partition is invalid."""
    world = World(2)
    verdicts = {world.apply(number, 0, 1, b"ClaimingRange/1/1/i/c/g/t/0/5/6").reason for number in (0, 1)}
    assert verdicts == {Invalid.MISPLACED, Refusal.RANGES_DISABLED}


def test_a_delayed_record_of_an_earlier_claim_never_counts_for_a_later_one(log: Log) -> None:
    """An old epoch is refused even if the same instance has claimed the same range again."""
    epoch = log.plan(5, 9)
    log.win("ReleasingRange", epoch)
    again = log.win("ClaimingRange", 5, 9)
    for kind in ("RangeHeartbeat", "RangeDone", "ReleasingRange", "RevokingRange"):
        log.lose(Refusal.OTHER_EPOCH, kind, epoch)
    log.lose(Refusal.OTHER_EPOCH, "PlanningRange", epoch, 9)
    log.win("RangeDone", again)


# ClaimingRange


@pytest.mark.parametrize(("features", "rules"), [("-", "native"), ("range", "native"), ("ranges", "go")])
def test_ranges_are_claimed_only_where_they_are_enabled(log: Log, features: str, rules: str) -> None:
    """The settings in force must name the feature, and the rule set must be native. The default enables no ranges."""
    log.settle(features, rules=rules)
    log.lose(Refusal.RANGES_DISABLED, "ClaimingRange", 5, 9)
    unsettled = Log()
    unsettled.win("ClaimingPartition")
    unsettled.win("Heartbeat", 5)
    unsettled.win("DataTopic", TOPIC_ID)
    unsettled.win("ReleasingPartition", 5)
    unsettled.lose(Refusal.RANGES_DISABLED, "ClaimingRange", 5, 9)


def test_no_range_is_claimed_in_a_paused_group_not_by_the_pausing_instance_either(log: Log) -> None:
    """The pausing instance sets positions by whole claims. After the pause, ranges can be claimed again."""
    log.win("ReleaseGroup", 7, by="p")
    log.lose(Refusal.PAUSED, "ClaimingRange", 5, 9, by="p", at_ms=6_999)
    log.win("ClaimingRange", 5, 9, at_ms=7_000)


def test_no_range_is_claimed_beside_a_live_whole_owner(log: Log) -> None:
    """Beside a live owner of the whole partition no range is claimed.

    After more than two intervals a range can be claimed, and the stale owner loses its ownership.
    """
    log.win("ClaimingPartition", by="whole", at_ms=10)
    log.lose(Refusal.LIVE_OWNER, "ClaimingRange", 5, 9, at_ms=10 + 2 * HI_MS)
    log.win("ClaimingRange", 5, 9, at_ms=11 + 2 * HI_MS)
    assert log.key.owner is None
    log.lose(Refusal.NOT_OWNER, "Heartbeat", 20, by="whole")


def test_no_range_is_claimed_beside_an_open_whole_plan(log: Log) -> None:
    """An open plan of the whole partition must first be completed, by an owner of the whole partition."""
    log.win("ClaimingPartition", by="whole")
    log.win("ClaimingMessages", 8, by="whole")
    log.win("ReleasingPartition", 5, by="whole")
    log.lose(Refusal.OPEN_PLAN, "ClaimingRange", 8, 9)


def test_the_offset_and_the_data_topic_id_must_be_known() -> None:
    """Without a known offset and data topic id a range claim is refused. The first whole claim sets both."""
    log = Log()
    log.settle()
    log.lose(Refusal.OFFSET_UNKNOWN, "ClaimingRange", 5, 9)
    log.win("ClaimingPartition", by="first")
    log.win("Heartbeat", 5, by="first")
    log.win("ReleasingPartition", 5, by="first")
    log.lose(Refusal.TOPIC_UNKNOWN, "ClaimingRange", 5, 9)


def test_a_range_begins_at_the_offset_or_beyond_and_is_not_empty(log: Log) -> None:
    """A range may have a single message, and may start anywhere at or after the group's offset."""
    log.lose(Refusal.BELOW_OFFSET, "ClaimingRange", 4, 9)
    log.lose(Refusal.EMPTY_RANGE, "ClaimingRange", 9, 9)
    log.lose(Refusal.EMPTY_RANGE, "ClaimingRange", 9, 8)
    log.win("ClaimingRange", 5, 6)
    log.win("ClaimingRange", 2**62, 2**62 + 1)


@pytest.mark.parametrize("bounds", [(10, 20), (9, 11), (19, 21), (11, 19), (9, 21), (10, 19), (11, 20)])
@pytest.mark.parametrize("phase", Phase)
def test_no_range_overlaps_another(log: Log, bounds: tuple[int, int], phase: Phase) -> None:
    """An overlap of one offset is refused, in each phase of the other range. Adjacent offsets are free."""
    epoch = log.win("ClaimingRange", 10, 20)
    if phase is not Phase.CLAIMED:
        log.win("PlanningRange", epoch, 20)
    if phase is Phase.DONE:
        log.win("RangeDone", epoch)
    log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", *bounds, by="b")
    log.win("ClaimingRange", 5, 10, by="b")
    log.win("ClaimingRange", 20, 21, by="b")
    assert [start for start, _, _ in log.ranges] == [5, 10, 20]


def test_a_planned_range_without_a_live_owner_is_claimed_exactly_as_it_is(log: Log) -> None:
    """The old owner is live for exactly two intervals. A new owner then takes over the plan, with one more attempt."""
    epoch = log.plan(5, 9)
    for bounds in ((5, 8), (5, 10), (6, 9)):
        log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", *bounds, by="b")
    log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", 5, 9, by="b", at_ms=2 * HI_MS)
    for bounds in ((5, 8), (5, 10), (6, 9)):
        log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", *bounds, by="b", at_ms=2 * HI_MS + 1)
    again = log.win("ClaimingRange", 5, 9, by="b")
    [held] = log.key.ranges
    assert (held.phase, held.attempts, held.owner and held.owner.epoch) == (Phase.PLANNED, 1, again)
    log.lose(Refusal.OTHER_EPOCH, "RangeDone", epoch)
    log.win("RangeDone", again, by="b")
    assert (log.key.offset, log.ranges) == (9, [])


def test_a_spent_range_is_in_nobodys_way(log: Log) -> None:
    """A claimed range with a stale owner is removed by the next claim, even if that is for other offsets."""
    epoch = log.win("ClaimingRange", 5, 9)
    log.win("ClaimingRange", 20, 30)
    log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", 8, 12, by="b", at_ms=2 * HI_MS)
    log.win("ClaimingRange", 8, 12, by="b", at_ms=2 * HI_MS + 1)
    assert log.ranges == [(8, 12, "claimed")]
    log.lose(Refusal.OTHER_EPOCH, "RangeHeartbeat", epoch)


def test_a_spent_range_is_still_there_until_another_is_claimed(log: Log) -> None:
    """An expired range stays until the next claim, because its owner may still send a heartbeat."""
    epoch = log.win("ClaimingRange", 5, 9)
    log.win("RangeHeartbeat", epoch, at_ms=3 * HI_MS)
    log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", 5, 9, by="b")


def test_there_are_at_most_256_ranges(log: Log) -> None:
    """A key has at most 256 ranges. A planned one can still be claimed again, and expired ones do not count."""
    epochs = [log.plan(10 * number + 10, 10 * number + 15) for number in range(MOST_RANGES - 1)]
    log.win("ClaimingRange", 5, 6, at_ms=1)
    log.lose(Refusal.TOO_MANY_RANGES, "ClaimingRange", 7, 8)
    log.win("RevokingRange", epochs[3])
    log.lose(Refusal.TOO_MANY_RANGES, "ClaimingRange", 7, 8)
    log.win("ClaimingRange", 40, 45)
    log.win("ClaimingRange", 7, 8, at_ms=2 + 2 * HI_MS)
    assert len(log.ranges) == MOST_RANGES


# PlanningRange


def test_only_the_live_owner_plans_a_range(log: Log) -> None:
    """A plan of another instance, of another epoch or of a stale owner is refused."""
    epoch = log.win("ClaimingRange", 5, 9)
    log.lose(Refusal.NOT_OWNER, "PlanningRange", epoch, 9, by="b")
    log.lose(Refusal.OTHER_EPOCH, "PlanningRange", epoch + 1, 9)
    log.lose(Refusal.NOT_LIVE, "PlanningRange", epoch, 9, at_ms=2 * HI_MS + 1)


def test_no_range_is_planned_in_a_paused_group(log: Log) -> None:
    """In a paused group no range is planned, but planned ranges can still be completed."""
    epoch, planned = log.win("ClaimingRange", 5, 9), log.plan(9, 12)
    log.pause(by="a")
    log.lose(Refusal.PAUSED, "PlanningRange", epoch, 9)
    log.win("RangeHeartbeat", epoch)
    log.win("RangeDone", planned)


def test_a_plan_ends_within_the_claimed_range_and_leaves_the_rest(log: Log) -> None:
    """A plan must end within its range. The offsets after its end are free at once."""
    epoch = log.win("ClaimingRange", 6, 9)
    for end in (5, 6, 10):
        log.lose(Refusal.OUTSIDE_RANGE, "PlanningRange", epoch, end)
    log.win("PlanningRange", epoch, 7)
    assert log.ranges == [(6, 7, "planned")]
    log.win("ClaimingRange", 7, 9, by="b")


def test_a_planned_range_stays_exactly_as_it_is(log: Log) -> None:
    """The same plan is accepted again, also after a takeover, and keeps its attempts."""
    epoch = log.plan(5, 9)
    log.lose(Refusal.OTHER_PLAN, "PlanningRange", epoch, 8)
    log.win("RevokingRange", epoch)
    again = log.win("ClaimingRange", 5, 9, by="b")
    log.lose(Refusal.OTHER_PLAN, "PlanningRange", again, 8, by="b")
    log.win("PlanningRange", again, 9, by="b")
    assert [range_.attempts for range_ in log.key.ranges] == [1]


# RangeHeartbeat, RangeDone


def test_the_owner_beats_live_or_stale(log: Log) -> None:
    """The heartbeat of the owner, live or stale, renews only its own range. Another instance's is refused."""
    epoch, other = log.win("ClaimingRange", 5, 9), log.win("ClaimingRange", 9, 12)
    log.lose(Refusal.NOT_OWNER, "RangeHeartbeat", epoch, by="b")
    log.win("RangeHeartbeat", epoch, at_ms=9 * HI_MS)
    assert [range_.last_beat_ms for range_ in log.key.ranges] == [9 * HI_MS, 0]
    log.lose(Refusal.NOT_LIVE, "PlanningRange", other, 12)


def test_only_a_planned_range_is_done_and_only_its_owner_says_so(log: Log) -> None:
    """Only a planned range can be done. A stale owner may complete it until another member has claimed the range."""
    epoch = log.win("ClaimingRange", 5, 9)
    log.lose(Refusal.NOT_PLANNED, "RangeDone", epoch)
    log.win("PlanningRange", epoch, 9)
    log.lose(Refusal.NOT_OWNER, "RangeDone", epoch, by="b")
    log.win("RangeDone", epoch, at_ms=9 * HI_MS)
    log.lose(Refusal.OTHER_EPOCH, "RangeDone", epoch)


def test_the_offset_moves_only_over_done_ground_without_a_gap(log: Log) -> None:
    """A done range waits for those before it and is merged with its neighbours. Then the offset passes all of them."""
    first, second, third, far = log.plan(5, 9), log.plan(9, 12), log.plan(12, 20), log.plan(21, 30)
    log.win("RangeDone", third)
    log.win("RangeDone", far)
    assert (log.key.offset, log.ranges[2:]) == (5, [(12, 20, "done"), (21, 30, "done")])
    log.win("RangeDone", second)
    assert (log.key.offset, log.ranges) == (5, [(5, 9, "planned"), (9, 20, "done"), (21, 30, "done")])
    log.win("RangeDone", first)
    assert (log.key.offset, log.ranges) == (20, [(21, 30, "done")])
    log.win("RangeDone", log.plan(20, 21))
    assert (log.key.offset, log.ranges) == (30, [])


def test_what_is_done_is_never_claimed_again_in_its_generation(log: Log) -> None:
    """A done range is never claimed again in its generation. The at-most-once mode depends on this."""
    log.win("RangeDone", log.plan(9, 12))
    log.win("RangeDone", log.plan(5, 7))
    log.lose(Refusal.RANGE_TAKEN, "ClaimingRange", 9, 12, at_ms=9 * HI_MS)
    log.lose(Refusal.BELOW_OFFSET, "ClaimingRange", 5, 7)
    assert log.key.generation == 0


# ReleasingRange, RevokingRange


@pytest.mark.parametrize("kind", ["ReleasingRange", "RevokingRange"])
def test_a_claimed_range_goes_with_its_owner_a_planned_one_stays(log: Log, kind: str) -> None:
    """When the owner is gone, a range that was only claimed is removed. A planned one stays and is free at once."""
    claimed, planned = log.win("ClaimingRange", 5, 9), log.plan(9, 12)
    log.win(kind, claimed)
    log.win(kind, planned)
    assert log.ranges == [(9, 12, "planned")]
    assert log.key.ranges[0].owner is None
    log.win("ClaimingRange", 9, 12, by="b")


def test_only_the_owner_releases_a_range_anybody_revokes_it_by_its_epoch(log: Log) -> None:
    """Only the owner can release a range, and any instance can revoke it by its epoch, even a stale one."""
    first, second = log.win("ClaimingRange", 5, 9), log.plan(9, 12)
    log.lose(Refusal.NOT_OWNER, "ReleasingRange", first, by="b")
    log.lose(Refusal.OTHER_EPOCH, "RevokingRange", second + 1, by="b")
    log.win("ReleasingRange", first, at_ms=9 * HI_MS)
    log.win("RevokingRange", second, by="b")
    log.lose(Refusal.OTHER_EPOCH, "RevokingRange", second, by="b")


# Rules of section 4 that change for a key with ranges


def test_nobody_claims_whole_beside_a_live_range(log: Log) -> None:
    """Beside a live range no instance can claim the whole partition, including the pausing one."""
    log.win("ClaimingRange", 5, 9)
    log.lose(Refusal.HELD_BY_RANGES, "ClaimingPartition", by="b", at_ms=2 * HI_MS)
    log.pause()
    log.lose(Refusal.HELD_BY_RANGES, "ClaimingPartition", by="p")
    log.win("ClaimingPartition", by="p", at_ms=2 * HI_MS + 1)


def test_whole_claims_take_spent_ranges_away(log: Log) -> None:
    """A whole claim removes expired ranges. It is accepted if no range is planned or done."""
    epoch = log.win("ClaimingRange", 5, 9)
    log.win("ClaimingPartition", by="b", at_ms=2 * HI_MS + 1)
    assert log.ranges == []
    log.lose(Refusal.OTHER_EPOCH, "RangeHeartbeat", epoch)
    log.win("ClaimingMessages", 9, by="b")
    log.win("Heartbeat", 9, by="b")
    assert log.key.offset == 9


@pytest.mark.parametrize("is_done", [False, True])
def test_only_the_pausing_instance_claims_whole_beside_planned_or_done_ranges(log: Log, is_done: bool) -> None:
    """Beside planned or done ranges only the pausing instance can claim the whole partition.

    The claim removes the owners of the ranges, so their later heartbeats are refused.
    """
    epoch = log.plan(9, 12)
    if is_done:
        log.win("RangeDone", epoch)
    log.lose(Refusal.HELD_BY_RANGES, "ClaimingPartition", by="p", at_ms=9 * HI_MS)
    log.pause()
    log.lose(Refusal.PAUSED, "ClaimingPartition", by="b")
    log.win("ClaimingPartition", by="p")
    log.lose(Refusal.OTHER_EPOCH, "RangeHeartbeat", epoch)
    log.lose(Refusal.OTHER_EPOCH, "RangeDone", epoch)
    assert log.ranges == [(9, 12, "done" if is_done else "planned")]


def test_the_whole_owners_heartbeats_and_plans_move_nothing_over_ranges(log: Log) -> None:
    """An owner of the whole partition cannot move the offset over ranges, even after its pause has ended.

    Its heartbeat keeps it live and is reported. Its plan is refused.
    """
    log.plan(9, 12)
    log.win("ReleaseGroup", 8, by="p", at_ms=5 * HI_MS)
    log.win("ClaimingPartition", by="p")
    assert log.add("Heartbeat", 5, by="p", at_ms=7 * HI_MS).notes == ()
    assert log.add("Heartbeat", 9, by="p").notes == (RecordNote.BEYOND_RANGES,)
    assert log.add("Heartbeat", 4, by="p").notes == (RecordNote.REWIND,)
    assert (log.key.offset, log.key.last_beat_ms) == (5, 7 * HI_MS)
    log.lose(Refusal.HELD_BY_RANGES, "ClaimingMessages", 20, by="p", at_ms=8 * HI_MS)
    log.win("ReleasingPartition", 20, by="p")
    assert (log.key.offset, log.ranges) == (5, [(9, 12, "planned")])
    log.win("ClaimingRange", 9, 12)


def test_many_heartbeats_at_once_move_nothing_over_ranges(log: Log) -> None:
    """Heartbeats that the fast path of `apply_many` reads do not move the offset over ranges either."""
    log.plan(9, 12)
    log.pause()
    log.win("ClaimingPartition", by="p", at_ms=5 * HI_MS)
    beats = [
        (log.next + number, log.now_ms, f"Heartbeat/1/1795230000/p/c/g/t/0/{5 + number}".encode())
        for number in range(5)
    ]
    log.world.apply_many(0, beats)
    assert log.key.offset == 5


def test_a_set_position_drops_all_ranges_in_a_new_generation(log: Log) -> None:
    """A set position drops all ranges and starts a generation.

    So does the id of another data topic, which also makes the offset unknown.
    """
    log.plan(9, 12)
    log.pause()
    log.win("ClaimingPartition", by="p", at_ms=5 * HI_MS)
    released = log.win("ReleasingPartition", 7, by="p")
    assert (log.key.offset, log.key.generation, log.ranges) == (7, released, [])
    log.win("ReleaseGroup", 0, by="p")
    log.plan(9, 12)
    log.pause()
    log.win("ClaimingPartition", by="p", at_ms=10 * HI_MS)
    log.win("DataTopic", TOPIC_ID, by="p")
    assert log.ranges == [(9, 12, "planned")]
    named = log.win("DataTopic", OTHER_TOPIC_ID, by="p")
    assert (log.key.offset, log.key.generation, log.ranges) == (None, named, [])


def test_settings_wait_for_live_ranges_and_clear_stale_owners(log: Log) -> None:
    """Settings wait for live ranges. Planned and done ranges stay in their generation, and expired ones are removed."""
    done, planned = log.plan(5, 7), log.plan(9, 12)
    log.win("RangeDone", log.plan(12, 20))
    log.win("RangeDone", done)
    log.win("ClaimingRange", 30, 40)
    log.pause()
    settings = (HI_MS, "native", "at_least_once", "ranges")
    log.lose(Refusal.LIVE_MEMBERS, "GroupSettings", *settings, by="p", at_ms=2 * HI_MS)
    log.win("GroupSettings", *settings, by="p", at_ms=2 * HI_MS + 1)
    assert log.ranges == [(9, 12, "planned"), (12, 20, "done")]
    assert (log.key.offset, log.key.generation) == (7, 0)
    log.lose(Refusal.OTHER_EPOCH, "RangeHeartbeat", planned)


def test_another_delivery_drops_all_ranges_in_a_new_generation(log: Log) -> None:
    """Another delivery drops all ranges and starts a generation, even if the new settings also enable ranges."""
    log.win("RevokingRange", log.plan(9, 12))
    settled = log.settle(delivery="at_most_once")
    assert (log.key.offset, log.key.generation, log.ranges) == (5, settled, [])


@pytest.mark.parametrize(("features", "rules"), [("-", "native"), ("ranges", "go")])
def test_switched_off_ranges_are_gone_in_a_new_generation(log: Log, features: str, rules: str) -> None:
    """Settings that disable ranges drop them and start a generation. A key without ranges keeps its generation."""
    log.win("RevokingRange", log.plan(9, 12))
    settled = log.settle(features, rules=rules)
    assert (log.key.offset, log.key.generation, log.ranges) == (5, settled, [])
    log.settle()
    log.win("ClaimingRange", 5, 9, at_ms=200_000)
    log.now_ms = 400_000
    log.settle(features, rules=rules)
    assert (log.key.generation, log.ranges) == (settled, [])


# Others


def test_each_range_record_has_a_rule() -> None:
    """The rule table in the code has the same range records as the page."""
    ours = {kind.__name__ for kind in NATIVE if "Range" in kind.__name__}
    assert ours == {
        "ClaimingRange",
        "PlanningRange",
        "RangeHeartbeat",
        "RangeDone",
        "ReleasingRange",
        "RevokingRange",
    }


def test_an_observing_reader_knows_no_ranges() -> None:
    """In an observed log a range record creates its key and has no other effect."""
    log = Log(start=7)
    log.win("GroupSettings", HI_MS, "native", "at_least_once", "ranges")
    log.win("Heartbeat", 5)
    log.win("ClaimingRange", 5, 9)
    log.win("RangeDone", 9)
    assert (log.key.offset, log.ranges, log.key.provisional) == (5, [], True)


def test_ranges_are_shown_where_there_are_any(log: Log) -> None:
    """The JSON of the world state has ranges only for partitions that have some."""
    [without] = summary(log.world)["groups"]["g"]["partitions"]
    assert "ranges" not in without
    epoch = log.plan(5, 9)
    log.win("RangeDone", log.plan(12, 20))
    [shown] = summary(log.world)["groups"]["g"]["partitions"]
    assert list(shown) == [*without, "ranges"]
    nobody = {"owner_instance": None, "owner_client": None, "epoch": None, "last_beat_ms": None}
    assert shown["ranges"] == [
        {
            "start": 5,
            "end": 9,
            "phase": "planned",
            "attempts": 0,
            "owner_instance": "a",
            "owner_client": "c",
            "epoch": epoch,
            "last_beat_ms": 0,
        },
        {"start": 12, "end": 20, "phase": "done", "attempts": 0, **nobody},
    ]


def test_a_copy_of_a_key_has_all_of_it() -> None:
    """A copy of a key has all of its fields."""
    held = Range(5, 9, Phase.PLANNED)
    former = Owner("b", "c", 6)
    key = Key(4, Owner("a", "c", 7), 3, 9, 2, 1, "x" * 22, provisional=True, ranges=(held,), former_owner=former)
    names = [field.name for field in fields(Key)]
    assert all(getattr(key, name) != getattr(Key(), name) for name in names)
    assert all(getattr(key.copy(), name) == getattr(key, name) for name in names)
    assert key.copy() is not key


def test_a_copy_of_a_key_stays_as_it_is(log: Log) -> None:
    """Ranges are immutable values, so a later record does not change a copy."""
    epoch = log.plan(5, 9)
    copy = log.world.snapshot_key("g", "t", 0)
    log.win("RangeDone", epoch)
    assert [range_.phase for range_ in copy.ranges] == [Phase.PLANNED]


def test_a_group_that_somebody_holds_by_a_range_is_not_idle(log: Log) -> None:
    """A wait for the end of all live claims includes ranges."""
    log.win("ClaimingRange", 5, 9)
    group = log.world.group_of("g", "t")
    assert list(group.live_keys(2 * HI_MS)) == [("t", 0)]
    assert list(group.live_keys(2 * HI_MS + 1)) == []


def test_settings_with_ranges_and_go_are_valid_though_they_enable_nothing() -> None:
    """Readers without ranges accept these settings, so a reader with ranges must accept them too."""
    assert isinstance(parse(b"GroupSettings/1/1/i/c/g//0/60000/go/at_least_once/ranges"), GroupSettingsRecord)
    assert GroupSettings().features == ()
    assert ClaimingPartition in NATIVE


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (message(ClaimingRange, start=5, end=9), " from 5 up to 9"),
        (message(PlanningRange, epoch=7, end=9), " of epoch 7 up to 9"),
        (message(RangeHeartbeat, epoch=7), " of epoch 7"),
    ],
)
def test_tail_says_what_a_range_record_says(record: Message, text: str) -> None:
    """The text shows the bounds and the epoch of a range record to a person who follows the log."""
    assert details_text(record) == text
