"""Recovery of a coordination log that was cut without a snapshot (protocol.md, section 5)."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from marshal_dagster.admin.recovery import ConfirmedOffset, LastOffsets, Recovery, Whose
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.log import LogIdentity, PositionLostError
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import SnapshotHead, Snapshots
from marshal_dagster.errors import (
    CoordinationLogChangedError,
    RecoveryFailedError,
    TimestampTypeError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    ClaimingPartition,
    DataTopic,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    Mark,
    ReleaseGroup,
    ReleasingPartition,
    RuleSet,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import PartitionWorld
from marshal_dagster.testing import ManualClock, MemorySnapshotTopic
from tests.faulty_log import Fault, FaultyLog
from tests.members import GROUP, HI_MS, SETTINGS, TOPIC, TOPIC_ID, Site, about, settings_record

GO_LOG = Path(__file__).parents[1] / "vectors" / "marshal-log.jsonl"
KEY: Whose = (GROUP, (TOPIC, 0))
CONFIRMED = {KEY: ConfirmedOffset(7, TOPIC_ID), (GROUP, (TOPIC, 1)): ConfirmedOffset(0, TOPIC_ID)}


@pytest.fixture
def site() -> Site:
    """A log whose first records retention deleted; no process uses it any more."""
    site = Site()
    site.say(about(ClaimingPartition, "cut.0"))
    site.pause(1_000)
    site.say(about(ClaimingPartition, "run1.0"))
    site.say(about(DataTopic, "run1.0", topic_id=TOPIC_ID))
    site.say(about(Heartbeat, "run1.0", offset=9))
    site.say(about(ReleasingPartition, "run1.0", offset=7))
    site.broker.retain_from(site.home, 1)
    return site


@pytest.fixture
def topic(site: Site) -> MemorySnapshotTopic:
    """An empty snapshot topic."""
    return MemorySnapshotTopic(site.partitions)


class Waiting(ManualClock):
    """A clock that runs a function during each sleep."""

    def __init__(self, site: Site, deed: Callable[[], object] = lambda: None, part: float = 1.0) -> None:
        super().__init__()
        self.site, self.deed, self.part = site, deed, part
        self.slept_ms: list[float] = []

    def sleep_ms(self, duration_ms: float) -> None:
        """Record the sleep, let `part` of the time pass for the broker, and call the function."""
        self.slept_ms.append(duration_ms)
        self.site.clock.advance(duration_ms * self.part)
        self.deed()


def recovery(
    site: Site, topic: MemorySnapshotTopic, clock: Waiting | None = None, log: FaultyLog | None = None
) -> Recovery:
    """Create a recovery that has read the log."""
    begun = Recovery(log or site.log(), Snapshots(topic), clock=clock or Waiting(site))
    begun.look()
    return begun


def started(site: Site, topic: MemorySnapshotTopic) -> Rationalizer:
    """Start a reader of the recovered log."""
    opened = Rationalizer(site.log(), clock=site.clock, snapshots=Snapshots(topic))
    opened.catch_up()
    return opened


def test_what_is_known_is_shown(site: Site, topic: MemorySnapshotTopic) -> None:
    """Only partitions that were cut are observed.

    Offsets of heartbeats and releases differ: either may have been refused.
    """
    observed = recovery(site, topic).observed
    assert list(observed) == [site.home]
    assert observed[site.home].last_offsets == {KEY: LastOffsets(9, 7)}
    group = observed[site.home].world.groups[GROUP]
    assert group.paused_by == "ops.1"


def test_a_recovered_log_is_certain(site: Site, topic: MemorySnapshotTopic) -> None:
    """The recovered state has the pauses shown and the offsets confirmed, no owner and no plan.

    The generation is the log offset of the second Mark.
    """
    assert recovery(site, topic).recover(CONFIRMED) == [site.home]

    world = started(site, topic).world.partitions[site.home]

    marks = [offset for offset, _, value in site.broker.records(site.home) if (value or b"").startswith(b"Mark/")]
    assert len(marks) == 2
    assert (world.certain, world.next_offset) == (True, marks[1] + 1)
    identity = site.broker.identity
    assert Snapshots(topic).heads(identity)[site.home] == SnapshotHead(marks[1] + 1, world.log_time_ms)
    assert world.log_time_ms == site.broker.records(site.home)[-1][1]
    group = world.groups[GROUP]
    assert (group.paused_by, group.paused_until_s is None) == ("ops.1", False)
    assert {place: (key.offset, key.owner, key.plan_end, key.generation) for place, key in group.keys.items()} == {
        (TOPIC, 0): (7, None, None, marks[1]),
        (TOPIC, 1): (0, None, None, marks[1]),
    }
    assert {key.data_topic_id for key in group.keys.values()} == {TOPIC_ID}
    assert not recovery(site, topic).observed


def test_what_the_rest_of_the_log_says_of_a_group_counts(site: Site, topic: MemorySnapshotTopic) -> None:
    """Settings and pauses of which only other coordination partitions have a record apply to the recovered one too."""
    site = Site()
    settings = GroupSettings(300_000, delivery=DeliveryMode.AT_MOST_ONCE)
    for number in range(site.partitions):
        site.broker.append(number, render(settings_record(settings)))
    site.pause(10_000, "ops.1")
    site.say(about(Heartbeat, "run1.0", offset=9))
    site.broker.retain_from(site.home, 2)
    clock = Waiting(site)
    recovery(site, topic, clock).recover(CONFIRMED)
    assert clock.slept_ms == [600_100]
    group = started(site, topic).world.group_of(GROUP, TOPIC)
    assert (group.settings, group.settings_accepted, group.paused_by) == (settings, True, "ops.1")
    assert group.is_paused(site.clock.wall_ms())
    assert group.keys[TOPIC, 0].offset == 7


def test_a_pause_that_is_left_here_counts_more_than_elsewhere(site: Site, topic: MemorySnapshotTopic) -> None:
    """A resumption that is left in the partition that was cut is newer than the records it lost."""
    site.say(ReleaseGroup(instance="boss", client="c", group=GROUP, time_s=0, expiry_s=5))
    recovery(site, topic).recover(CONFIRMED)
    assert started(site, topic).world.group_of(GROUP, TOPIC).paused_until_s == 5


def test_of_two_who_recover_at_once_both_give_up(site: Site, topic: MemorySnapshotTopic) -> None:
    """If two recoveries run at once, both fail and write nothing, because they may confirm different offsets."""
    other = recovery(site, topic)

    def recover_too() -> None:
        with pytest.raises(RecoveryFailedError, match="a Mark of another `recover`"):
            other.recover({KEY: ConfirmedOffset(3, TOPIC_ID)})

    begun = recovery(site, topic, Waiting(site, recover_too))
    with pytest.raises(RecoveryFailedError, match="a Mark of another `recover`"):
        begun.recover(CONFIRMED)
    assert topic.bounds([site.home])[site.home].end == 0


def test_what_another_has_recovered_since_is_not_written_over(site: Site, topic: MemorySnapshotTopic) -> None:
    """A recovery that looked between another one's Marks and its snapshot does not overwrite that snapshot."""
    later: list[Recovery] = []

    class Slow(Snapshots):
        def write(
            self, world: PartitionWorld, identity: LogIdentity, check: Callable[[], object] = lambda: None
        ) -> None:
            later.append(recovery(site, topic))
            super().write(world, identity, check)

    first = Recovery(site.log(), Slow(topic), clock=Waiting(site))
    first.look()
    first.recover({KEY: ConfirmedOffset(3, TOPIC_ID)})
    with pytest.raises(RecoveryFailedError, match="another `recover` was faster"):
        later[0].recover(CONFIRMED)
    assert started(site, topic).world.key(GROUP, TOPIC, 0).offset == 3


def test_what_only_the_person_knows_is_written_too(site: Site, topic: MemorySnapshotTopic) -> None:
    """An offset confirmed for a group without records in the log is in the snapshot, with default settings."""
    unseen: Whose = ("unseen", (TOPIC, 3))
    recovery(site, topic).recover({**CONFIRMED, unseen: ConfirmedOffset(500, TOPIC_ID)})
    world = started(site, topic).world
    assert world.key(unseen[0], TOPIC, 3).offset == 500
    assert not world.group_of(unseen[0], TOPIC).settings_accepted


def test_members_claim_again(site: Site, topic: MemorySnapshotTopic) -> None:
    """After a recovery a member can claim, and it starts at the confirmed offset."""
    recovery(site, topic).recover(CONFIRMED)
    site.pause(-1)
    log = site.log()
    rationalizer = Rationalizer(log, topics=[TOPIC], clock=site.clock, snapshots=Snapshots(topic))
    from marshal_dagster.coordination.claimer import Claimer, Member

    claimer = Claimer(rationalizer, Member(GROUP, "c", "new.0"), TOPIC, SETTINGS, clock=site.clock)
    claimer.ensure_group_settings()
    (claim,) = claimer.claim([0])
    assert claim.offset == 7


def test_settings_that_are_shown_stay(site: Site, topic: MemorySnapshotTopic) -> None:
    """Settings whose record is left stay in force, and the recovery waits according to their heartbeat interval."""
    site.say(settings_record(GroupSettings(90_000)))
    clock = Waiting(site)
    recovery(site, topic, clock).recover(CONFIRMED)
    assert started(site, topic).world.group_of(GROUP, TOPIC).settings == GroupSettings(90_000)
    assert clock.slept_ms == [180_100]


@pytest.mark.parametrize(("named_ms", "slept_ms"), [(None, 120_100), (HI_MS, 120_100), (300_000, 600_100)])
def test_the_longest_interval_counts(
    site: Site, topic: MemorySnapshotTopic, named_ms: int | None, slept_ms: int
) -> None:
    """The wait uses the longer of two intervals: the one shown and the one that the operator names."""
    clock = Waiting(site)
    recovery(site, topic, clock).recover(CONFIRMED, named_ms)
    assert clock.slept_ms == [slept_ms]


@pytest.mark.parametrize("value", [render(about(Heartbeat, "run1.0", offset=9)), b"anything", None])
@pytest.mark.parametrize("when", ["before", "between"])
def test_anything_but_marks_stops_it(site: Site, topic: MemorySnapshotTopic, value: bytes | None, when: str) -> None:
    """Any other record since the look means that a process is still running: nothing is written."""
    clock = Waiting(site, lambda: site.broker.append(site.home, value) if when == "between" else None)
    begun = recovery(site, topic, clock)
    if when == "before":
        site.broker.append(site.home, value)
    with pytest.raises(RecoveryFailedError, match="another process is writing"):
        begun.recover(CONFIRMED)
    assert not started(site, topic).world.partitions[site.home].certain


def test_marks_of_others_do_not_stop_it(site: Site, topic: MemorySnapshotTopic) -> None:
    """A Mark by another client does not prove that a member is running."""
    mark = Mark(instance="i", client="c", group="g", time_s=0)
    begun = recovery(site, topic, Waiting(site, lambda: site.say(mark)))
    assert begun.recover(CONFIRMED) == [site.home]


def test_log_time_decides_when_it_was_long_enough(site: Site, topic: MemorySnapshotTopic) -> None:
    """Another Mark is tried until log time has advanced by more than 2 intervals; after some tries recovery fails."""
    half = Waiting(site, part=0.5)
    recovery(site, topic, half).recover(CONFIRMED)
    assert len(half.slept_ms) == 2
    site.broker.retain_from(site.home, 3)
    never = Waiting(site, part=0)
    with pytest.raises(RecoveryFailedError, match="log time"):
        recovery(site, MemorySnapshotTopic(site.partitions), never).recover(CONFIRMED)


def test_a_log_that_grew_again_past_its_snapshot_can_be_recovered(site: Site, topic: MemorySnapshotTopic) -> None:
    """A snapshot that covers records lost by the log is not used. The new one records the offset of its last Mark."""
    recovery(site, topic).recover(CONFIRMED)
    end = site.broker.bounds(site.home).end
    mark = started(site, topic).world.partitions[site.home].last
    assert mark is not None
    assert (mark.offset, mark.timestamp_ms) == site.broker.records(site.home)[-1][:2]
    site.broker.truncate(site.home, end - 1)
    for _ in range(2):
        site.say(about(Heartbeat, "run1.0", offset=30))
    begun = recovery(site, topic)
    assert list(begun.observed) == [site.home]
    begun.recover({KEY: ConfirmedOffset(30, TOPIC_ID)})
    assert started(site, topic).world.key(GROUP, TOPIC, 0).offset == 30


def test_a_mark_that_is_not_acknowledged_is_an_error(site: Site, topic: MemorySnapshotTopic) -> None:
    """If a Mark is not acknowledged, nothing is written."""
    log = site.log()
    begun = recovery(site, topic, log=log)
    log.fail(Fault.LOST_ACK)
    with pytest.raises(UnavailableError, match="a Mark was not acknowledged"):
        begun.recover(CONFIRMED)


def test_a_mark_that_is_lost_again_is_an_error(site: Site, topic: MemorySnapshotTopic) -> None:
    """A log that loses an acknowledged Mark is not recovered."""
    log = site.log()

    def lose() -> None:
        site.broker.truncate(site.home, site.broker.bounds(site.home).end - 1)
        site.broker.skip(site.home)

    def lose_the_next() -> None:
        log.after_append = lose

    begun = recovery(site, topic, Waiting(site, lose_the_next), log)
    with pytest.raises(CoordinationLogChangedError, match="truncated"):
        begun.recover(CONFIRMED)


def test_retention_that_goes_on_is_reported(site: Site, topic: MemorySnapshotTopic) -> None:
    """If retention deletes more of the log during the wait, recovery fails."""
    clock = Waiting(site, lambda: site.broker.retain_from(site.home, site.broker.bounds(site.home).end + 3))
    with pytest.raises(RecoveryFailedError, match="retention"):
        recovery(site, topic, clock).recover(CONFIRMED)


def test_a_log_truncated_meanwhile_is_reported(site: Site, topic: MemorySnapshotTopic) -> None:
    """If the log is truncated during the wait, the error reports that, not retention."""
    log = site.log()

    def report() -> None:
        raise PositionLostError(site.home)

    def truncate() -> None:
        site.broker.truncate(site.home, site.broker.bounds(site.home).end - 1)
        log.before_read = report

    begun = recovery(site, topic, Waiting(site, truncate), log)
    with pytest.raises(CoordinationLogChangedError, match="ends before what was read of it"):
        begun.recover(CONFIRMED)


def test_the_mark_of_another_is_not_ones_own(site: Site, topic: MemorySnapshotTopic) -> None:
    """Another client's Mark at the offset of the recovery's own, acknowledged Mark shows that the log was truncated."""
    log = site.log()

    def lose() -> None:
        site.broker.truncate(site.home, site.broker.bounds(site.home).end - 1)
        site.say(Mark(instance="i", client="c", group="g", time_s=0))

    begun = recovery(site, topic, log=log)
    log.after_append = lose
    with pytest.raises(CoordinationLogChangedError, match="truncated"):
        begun.recover(CONFIRMED)


def test_a_log_re_created_while_it_is_looked_at_is_reported(site: Site) -> None:
    """A log that is deleted and re-created while it is read is detected, even if it has fewer partitions."""

    class Repartitioning(MemorySnapshotTopic):
        """A snapshot topic that re-creates the log when its bounds are requested."""

        def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
            """Return the bounds after re-creating the log."""
            site.broker.recreate(partitions=1)
            return super().bounds(partitions)

    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created"):
        recovery(site, Repartitioning(site.partitions))


def test_what_failed_at_the_end_can_be_tried_again(topic: MemorySnapshotTopic) -> None:
    """A recovery that failed at its last step can be repeated, even if it found a stale snapshot before."""
    site, mark = Site(), Mark(instance="m.0", client="m", group="m", time_s=0)
    for partition in (0, 1):
        for _ in range(6):
            site.broker.append(partition, render(mark))
    Snapshots(topic).write(site.world().partitions[0], site.broker.identity)
    site.broker.truncate(0, 5)
    for _ in range(4):
        site.broker.append(0, render(replace(mark, client="other")))
    for partition in (0, 1):
        site.broker.retain_from(partition, 2)
    begun = recovery(site, topic)
    assert sorted(begun.observed) == [0, 1]
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(topic, "append", unavailable)
        with pytest.raises(UnavailableError):
            begun.recover({})

    assert begun.recover({}) == [0, 1]


def unavailable(partition: int, records: Sequence[Record]) -> None:
    """Fail as an unavailable broker does."""
    raise UnavailableError(f"partition {partition} does not take {len(records)} records")


def test_a_log_that_grew_again_since_it_was_shown_is_reported(site: Site, topic: MemorySnapshotTopic) -> None:
    """If records that the operator was shown were lost and replaced, nothing is written.

    The operator confirmed offsets for the lost records.
    """
    begun = recovery(site, topic)
    site.broker.truncate(site.home, site.broker.bounds(site.home).end - 1)
    site.say(about(Heartbeat, "run1.0", offset=30))
    with pytest.raises(CoordinationLogChangedError, match="lost records since this was shown"):
        begun.recover(CONFIRMED)


def test_somebody_who_begins_after_the_last_mark_is_noticed(site: Site, topic: MemorySnapshotTopic) -> None:
    """Until the snapshot is written, a record after the last Mark is noticed, and recovery fails."""
    begun = recovery(site, topic)
    looked_up = topic.bounds

    def begin(partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        site.say(about(ClaimingPartition, "alive.1"))
        return looked_up(partitions)

    with pytest.MonkeyPatch.context() as late:
        late.setattr(topic, "bounds", begin)
        with pytest.raises(RecoveryFailedError, match="another process is writing"):
            begun.recover(CONFIRMED)
    assert Snapshots(topic).heads(site.broker.identity)[site.home] is None


@pytest.mark.parametrize("lost", [0, 1])
def test_a_snapshot_that_does_not_fit_any_more_is_reported(site: Site, topic: MemorySnapshotTopic, lost: int) -> None:
    """If the log loses its last record or more of its start while the snapshot is written, recovery fails."""
    begun = recovery(site, topic)
    append = topic.append

    def cut(partition: int, records: Sequence[Record]) -> None:
        if lost:
            site.broker.truncate(site.home, site.broker.bounds(site.home).end - lost)
        else:
            site.overtake()
        append(partition, records)

    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(topic, "append", cut)
        with pytest.raises(RecoveryFailedError, match="are not valid"):
            begun.recover(CONFIRMED)


AT_MOST_ONCE = GroupSettings(30 * HI_MS, delivery=DeliveryMode.AT_MOST_ONCE)


def test_settings_and_pause_are_known_where_every_coordination_partition_was_cut() -> None:
    """If all coordination partitions were cut, settings and pause come from one that still has their records."""
    site = Site()
    site.say(about(ClaimingPartition, "cut.0"))
    for number in range(site.partitions):
        if number != site.home:
            site.broker.append(number, b"cut")
        site.broker.append(number, render(settings_record(AT_MOST_ONCE)))
    site.pause(10_000, "ops.1")
    site.say(about(Heartbeat, "run1.0", offset=9))
    for number in range(site.partitions):
        site.broker.retain_from(number, 3 if number == site.home else 1)
    topic, clock = MemorySnapshotTopic(site.partitions), Waiting(site)
    begun = recovery(site, topic, clock)
    assert len(begun.observed) == site.partitions

    begun.recover(CONFIRMED)

    group = started(site, topic).world.group_of(GROUP, TOPIC)
    assert (group.settings, group.paused_by) == (AT_MOST_ONCE, "ops.1")
    assert clock.slept_ms[0] > 2 * AT_MOST_ONCE.heartbeat_interval_ms


def test_settings_that_were_refused_do_not_count_over_those_that_are_certain() -> None:
    """Settings read from a partition that is complete win over those in a cut one, which may have been refused."""
    site = Site()
    for settings in (AT_MOST_ONCE, SETTINGS):
        for number in range(site.partitions):
            site.broker.append(number, render(settings_record(settings)))
    site.say(about(Heartbeat, "run1.0", offset=9))
    site.broker.retain_from(site.home, 1)
    topic, clock = MemorySnapshotTopic(site.partitions), Waiting(site)

    recovery(site, topic, clock).recover(CONFIRMED)

    assert started(site, topic).world.group_of(GROUP, TOPIC).settings == AT_MOST_ONCE
    assert clock.slept_ms[0] > 2 * AT_MOST_ONCE.heartbeat_interval_ms


def test_without_a_snapshot_topic_it_does_not_begin(site: Site) -> None:
    """Without a snapshot topic recovery does not start, because its result could not be written."""
    with pytest.raises(TopicNotFoundError):
        recovery(site, MemorySnapshotTopic(0))


def test_a_log_that_is_whole_needs_none() -> None:
    """A log whose coordination partitions all begin at offset 0 needs no recovery."""
    site = Site()
    begun = recovery(site, MemorySnapshotTopic(0))
    assert begun.observed == {}
    assert begun.recover({}) == []


def test_an_old_go_deployment_is_adopted() -> None:
    """A log of Go consumers that was cut in the middle shows the last offsets.

    Once they are confirmed, members claim.
    """
    records = [json.loads(line) for line in GO_LOG.read_text().splitlines()]
    clock = ManualClock(max(record["timestamp"] for record in records))
    site = Site(clock, 8)
    for record in records:
        site.broker.append(record["partition"], record["value"].encode(), record["timestamp"])
    stood = Rationalizer(site.log(), clock=clock).catch_up().key("takeover", "ev", 1).offset
    for partition in (4, 5, 7):
        site.broker.retain_from(partition, site.broker.bounds(partition).end // 2)
    topic = MemorySnapshotTopic(8)
    begun = recovery(site, topic)
    assert begun.observed.keys() == {4, 5, 7}
    said = {whose: said for seen in begun.observed.values() for whose, said in seen.last_offsets.items()}
    assert said["takeover", ("ev", 1)] == LastOffsets(stood, stood)
    offsets = {whose: one.release if one.heartbeat is None else one.heartbeat for whose, one in said.items()}
    begun.recover({whose: ConfirmedOffset(offset or 0, TOPIC_ID) for whose, offset in offsets.items()})

    rationalizer = Rationalizer(site.log(), topics=["ev"], clock=clock, snapshots=Snapshots(topic))
    settings = GroupSettings(60_000, RuleSet.GO)
    claimer = Claimer(rationalizer, Member("takeover", "native", "run1.0"), "ev", settings, clock=clock)
    claimer.ensure_group_settings()
    (claim,) = claimer.claim([1])
    assert claim.offset == stood


def go_site() -> Site:
    """Return a log that retention cut, of which only records of a Go consumer are left."""
    site = Site()
    site.say(about(ClaimingPartition, "gohost"))
    site.say(about(Heartbeat, "gohost", offset=9))
    site.say(about(ReleasingPartition, "gohost", offset=9))
    site.broker.retain_from(site.home, 1)
    return site


GO_CONFIRMED = {KEY: ConfirmedOffset(9, None)}


def test_where_go_consumers_are_a_release_stands_for_a_mark(topic: MemorySnapshotTopic) -> None:
    """In a log of Go consumers, releases replace the Marks.

    They come from an instance that owns nothing and carry a key and an offset that were shown. Their time is set back,
    as members do in such a group.
    """
    site = go_site()
    before = len(site.values())
    clock = Waiting(site)
    begun = recovery(site, topic, clock)
    assert begun.go_groups() == {GROUP}
    begun.recover(GO_CONFIRMED)
    written = site.values()[before:]
    assert {int(value.split("/")[2]) for value in written} == {clock.wall_ms() // 1_000 - 2}
    assert [value.split("/")[0] for value in written] == ["ReleasingPartition"] * 2
    assert {tuple(value.split("/")[5:]) for value in written} == {(GROUP, TOPIC, "0", "9")}
    world = started(site, topic).world
    assert (world.go_groups(), world.key(GROUP, TOPIC, 0).owner) == ({GROUP: [(TOPIC, 0)]}, None)
    assert not world.group_of(GROUP, TOPIC).settings_accepted


def test_where_nothing_is_shown_the_release_is_of_a_topic_of_its_own(topic: MemorySnapshotTopic) -> None:
    """A cut partition without any key gets releases of a topic made up for it, which are not part of the snapshot."""
    site = go_site()
    other = (site.home + 1) % site.partitions
    site.broker.append(other, b"anything")
    site.broker.retain_from(other, 1)
    recovery(site, topic).recover(GO_CONFIRMED)
    values = [(value or b"").decode().split("/") for _, _, value in site.broker.records(other)]
    assert [(value[0], value[5]) for value in values] == [("ReleasingPartition", "recover")] * 2
    assert "recover" not in started(site, topic).world.partitions[other].groups
    assert all(coordination_partition(value[6], site.partitions) == other for value in values)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_go_consumers_of_any_group_count(topic: MemorySnapshotTopic, is_elsewhere: bool) -> None:
    """Go consumers of any group count, even if only a complete coordination partition shows them."""
    site = Site()
    site.say(about(Heartbeat, "cut.0", offset=1))
    site.say(about(DataTopic, "run1.0", topic_id=TOPIC_ID))
    site.say(about(Heartbeat, "run1.0", offset=9))
    site.broker.retain_from(site.home, 1)
    elsewhere = next(
        name for name in map(str, range(99)) if coordination_partition(name, site.partitions) not in {site.home, 0}
    )
    if is_elsewhere:
        home = coordination_partition(elsewhere, site.partitions)
        signed = {"instance": "gohost", "client": "c", "group": "go", "topic": elsewhere, "partition": 0, "time_s": 0}
        site.broker.append(home, render(ClaimingPartition(**signed)))  # type: ignore[arg-type]
        site.broker.append(home, render(Heartbeat(offset=4, **signed)))  # type: ignore[arg-type]
    begun = recovery(site, topic)
    assert begun.go_groups() == ({"go"} if is_elsewhere else set())
    begun.recover({KEY: ConfirmedOffset(9, TOPIC_ID)})
    assert site.values()[-1].startswith("ReleasingPartition" if is_elsewhere else "Mark")


def test_a_person_names_the_settings_of_which_none_are_left(topic: MemorySnapshotTopic) -> None:
    """Settings named by the operator are in force afterwards and determine the wait.

    Without Go consumers Marks are used.
    """
    site = go_site()
    clock = Waiting(site)
    named = {GROUP: GroupSettings(90_000, delivery=DeliveryMode.EFFECTIVELY_ONCE)}
    begun = recovery(site, topic, clock)
    assert begun.go_groups(named) == set()
    begun.recover(CONFIRMED, settings=named)
    group = started(site, topic).world.group_of(GROUP, TOPIC)
    assert (group.settings, group.settings_accepted, clock.slept_ms) == (named[GROUP], True, [180_100])
    assert site.values()[-1].startswith("Mark")


def test_a_person_says_that_a_group_is_one_of_go_consumers(site: Site, topic: MemorySnapshotTopic) -> None:
    """An operator can declare a group one of Go consumers, even if a record of it still has a data topic id."""
    begun = recovery(site, topic)
    assert begun.go_groups() == set()
    begun.recover({KEY: ConfirmedOffset(7, None)}, settings={GROUP: WITHOUT_SETTINGS})
    assert site.values()[-1].startswith("ReleasingPartition")
    assert not started(site, topic).world.group_of(GROUP, TOPIC).settings_accepted


def test_a_group_that_has_go_rules_by_a_record_is_one_of_go_consumers(topic: MemorySnapshotTopic) -> None:
    """A settings record decides whether a group has Go consumers, whatever its keys show."""
    site = go_site()
    site.say(settings_record(WITHOUT_SETTINGS))
    assert recovery(site, topic).go_groups() == {GROUP}
    site.say(settings_record(SETTINGS))
    assert recovery(site, topic).go_groups() == set()


@pytest.mark.parametrize("is_go", [True, False])
def test_a_mark_with_its_senders_timestamp_ends_it(site: Site, topic: MemorySnapshotTopic, is_go: bool) -> None:
    """If the Marks carry the sender's timestamp, nothing is written, because log time would be the sender's clock."""
    site = go_site() if is_go else site
    begun = recovery(site, topic)
    site.broker.is_sender_timed = True
    with pytest.raises(TimestampTypeError):
        begun.recover(GO_CONFIRMED if is_go else CONFIRMED)
    assert topic.bounds([site.home])[site.home].end == 0


def test_the_release_of_another_recover_stops_it(topic: MemorySnapshotTopic) -> None:
    """Releases written by another recovery are records of another process: both recoveries fail."""
    site = go_site()
    other = recovery(site, topic)

    def recover_too() -> None:
        with pytest.raises(RecoveryFailedError, match="a ReleasingPartition at offset"):
            other.recover(GO_CONFIRMED)

    with pytest.raises(RecoveryFailedError, match="a ReleasingPartition at offset"):
        recovery(site, topic, Waiting(site, recover_too)).recover(GO_CONFIRMED)
