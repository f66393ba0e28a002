"""Operator actions on an in-memory log: pause, resume, set positions and switch ranges off."""

import logging

import pytest

from marshal_dagster.admin.group_writer import TRIES
from marshal_dagster.admin.paused_change import LONGEST_SETTING_S
from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.coordination.pause_text import origin_text
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ConfigurationError,
    GroupPausedError,
    IncompleteLogError,
    PositionNotSetError,
    SettingsNotSetError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    ClaimingRange,
    DataTopic,
    GroupSettings,
    Heartbeat,
    RangeHeartbeat,
    ReleaseGroup,
    render,
)
from marshal_dagster.protocol.state import Phase
from marshal_dagster.protocol.world import World
from marshal_dagster.testing import ManualClock
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import GROUP, HI_MS, OTHER_TOPIC_ID, RANGES, SETTINGS, TOPIC, TOPIC_ID, Site, about, settings_record


@pytest.fixture
def site() -> Site:
    """An empty coordination topic."""
    return Site()


def operator_on(site: Site, log: FaultyLog | None = None) -> SettingsChanger:
    """Open a `SettingsChanger` for the group."""
    return SettingsChanger(Rationalizer(log or site.log(), clock=site.clock), GROUP, "ops", clock=site.clock)


def is_paused_everywhere(site: Site) -> set[bool]:
    """Return the set of answers, one per coordination partition, to whether the group is paused now."""
    groups = (world.groups.get(GROUP) for world in site.world().partitions.values())
    return {group is not None and group.is_paused(site.clock.wall_ms()) for group in groups}


def test_a_pause_keeps_members_from_claiming_until_it_is_over(site: Site) -> None:
    """A pause holds in every coordination partition until an operator resumes the group."""
    operator = operator_on(site)
    operator.pause(site.clock.wall_ms() // 1_000 + 60)
    assert is_paused_everywhere(site) == {True}
    member = site.member()
    with pytest.raises(GroupPausedError):
        member.claim([0])
    operator.resume()
    assert is_paused_everywhere(site) == {False}
    assert site.member().claim([0])


@pytest.mark.parametrize(("seconds", "is_paused"), [(0, False), (-600, False), (1, True)])
def test_a_pause_that_is_over_already_is_an_error(site: Site, seconds: int, *, is_paused: bool) -> None:
    """A pause whose end has passed already, for example because the operator's clock is slow, is an error."""
    until_s = site.clock.wall_ms() // 1_000 + seconds
    if is_paused:
        operator_on(site).pause(until_s)
    else:
        with pytest.raises(ConfigurationError, match=r"'etl' is not paused: its end"):
            operator_on(site).pause(until_s)
    assert is_paused_everywhere(site) == {is_paused}


def test_a_pause_without_acknowledgement_is_written_again(site: Site) -> None:
    """A pause is sent again to partitions that did not acknowledge it; the error names those that never do."""
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleaseGroup"), times=2)
    operator_on(site, log).pause(site.clock.wall_ms() // 1_000 + 60)
    assert is_paused_everywhere(site) == {True}
    log.fail(Fault.FAILED, of_type("ReleaseGroup"))
    with pytest.raises(UnavailableError, match=r"could not be written to coordination partitions \[0, 1, 2, 3\]"):
        operator_on(site, log).resume()


def test_positions_are_set_back_in_a_new_generation(site: Site) -> None:
    """Positions may be at or below the current offset; each starts a new generation and ends the open plan."""
    site.owner_of(0, at=50).release()
    site.owner_of(1, at=50).release()
    operator_on(site).set_positions(TOPIC, {0: 10, 1: 50}, TOPIC_ID, wait_ms=0)
    first, second = site.key(0), site.key(1)
    assert (first.offset, first.owner, first.plan_end) == (10, None, None)
    assert (second.offset, second.owner) == (50, None)
    assert 0 < first.generation != second.generation > 0
    assert is_paused_everywhere(site) == {False}


def test_the_incarnation_is_written_down_before_a_position(site: Site) -> None:
    """A position in a data topic that was deleted and re-created is recorded with the new topic's id."""
    site.owner_of(0, at=50).release()
    operator_on(site).set_positions(TOPIC, {0: 7}, OTHER_TOPIC_ID, wait_ms=0)
    assert (site.key(0).offset, site.key(0).data_topic_id) == (7, OTHER_TOPIC_ID)


def test_positions_wait_for_owners_to_leave(site: Site) -> None:
    """A live owner is waited for; if it stays, the error names its partition and the group is resumed."""
    site.owner_of(0, at=50)
    with pytest.raises(PositionNotSetError, match=r"partitions \[0\] of topic 'orders' are still claimed"):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=HI_MS)
    assert site.key(0).offset == 50
    assert is_paused_everywhere(site) == {False}
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=3 * HI_MS)
    assert site.key(0).offset == 10


def test_a_dead_owner_is_not_waited_for(site: Site) -> None:
    """The claim of an owner known to be dead is revoked at once."""
    site.owner_of(0, at=50)
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0, is_dead=lambda _: True)
    assert site.key(0).offset == 10


def test_a_pause_in_force_is_put_back(site: Site) -> None:
    """A longer pause that was in force before is restored afterwards."""
    operator = operator_on(site)
    until_s = site.clock.wall_ms() // 1_000 + 10 * LONGEST_SETTING_S
    site.owner_of(0, at=50).release()
    operator.pause(until_s, "the database moves")
    operator.set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    group = site.world().group_of(GROUP, TOPIC)
    assert (group.paused_until_s, group.pause_reason) == (until_s, "the database moves")
    assert group.pause_origin is not None
    assert origin_text(group.pause_origin) == "ops, who restored it after a change (reason: the database moves)"


@pytest.mark.parametrize("ahead_s", [-7_200, 600])
def test_a_wrong_clock_ends_no_pause(site: Site, ahead_s: int) -> None:
    """An operator whose clock is minutes fast or hours slow can set positions, and ends no pause by doing so."""
    site.owner_of(0, at=50).release()
    site.pause(300, "boss.1")
    until_s = site.world().group_of(GROUP, TOPIC).paused_until_s
    wrong = ManualClock(site.clock.wall_ms() + 1_000 * ahead_s)
    operator = SettingsChanger(Rationalizer(site.log(), clock=site.clock), GROUP, "ops", clock=wrong)
    operator.set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert site.world().group_of(GROUP, TOPIC).paused_until_s == until_s


@pytest.mark.parametrize("after", ["ClaimingPartition", "ReleasingPartition"])
@pytest.mark.parametrize("seconds", [7_200, -1])
def test_who_pauses_or_resumes_meanwhile_has_the_last_word(site: Site, after: str, seconds: int) -> None:
    """A pause or a resumption by another operator meanwhile stays in force, under that operator's name."""
    site.owner_of(0, at=50).release()
    site.pause(600, "ops.1")
    log = site.log()

    def another_decides() -> None:
        if log.types()[-1] == after:
            log.after_append = lambda: None
            site.pause(seconds, "boss.1")

    log.after_append = another_decides
    operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    groups = [world.groups[GROUP] for world in site.world().partitions.values()]
    assert {group.paused_until_s for group in groups} == {site.clock.wall_ms() // 1_000 + seconds}
    if after == "ReleasingPartition":
        assert {group.paused_by for group in groups} == {"boss.1"}


def test_each_part_gets_its_own_pause_back(site: Site) -> None:
    """A pause that held in some coordination partitions only is restored in those partitions only."""
    site.owner_of(0, at=50).release()
    away = next(number for number in range(site.partitions) if number != site.home)
    until_s = site.clock.wall_ms() // 1_000 + 600
    site.broker.append(away, render(ReleaseGroup(instance="b", client="b", group=GROUP, time_s=0, expiry_s=until_s)))
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    paused = {number: world.groups[GROUP].paused_until_s for number, world in site.world().partitions.items()}
    assert paused == {number: until_s if number == away else 0 for number in range(site.partitions)}


def test_the_end_of_another_setting_ends_no_pause(site: Site) -> None:
    """Of two operators that set positions at once, the one that saw the earlier pause restores it."""
    site.owner_of(0, at=50).release()
    site.pause(600, "boss.1")
    until_s = site.world().group_of(GROUP, TOPIC).paused_until_s
    log = site.log()

    def another_sets() -> None:
        if log.types()[-1] == "ReleasingPartition":
            log.after_append = lambda: None
            operator_on(site).set_positions(TOPIC, {1: 3}, TOPIC_ID, wait_ms=0)

    log.after_append = another_sets
    operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert (site.key(0).offset, site.key(1).offset) == (10, 3)
    assert site.world().group_of(GROUP, TOPIC).paused_until_s == until_s


def test_what_was_set_before_the_wait_was_over_is_reported(site: Site) -> None:
    """If a later try waits for a member in vain, the error names the partitions that an earlier try has set."""
    site.owner_of(0, at=50).release()
    site.owner_of(1, at=50).release()
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleasingPartition", partition=1), times=1)

    def somebody_claims() -> None:
        if log.types()[-1] == "ReleasingPartition":
            log.after_append = lambda: None
            site.pause(-1, "boss.1")
            site.clock.advance(3 * HI_MS)
            site.owner_of(1, at=50)

    log.after_append = somebody_claims
    with pytest.raises(
        PositionNotSetError, match=r"partitions \[1\] of topic 'orders' are still claimed.*; partitions \[0\] were set"
    ):
        operator_on(site, log).set_positions(TOPIC, {0: 10, 1: 10}, TOPIC_ID, wait_ms=0)


def test_the_pause_outlasts_the_wait(site: Site) -> None:
    """If the wait for owners may take longer than usual, the group stays paused for that long."""
    site.owner_of(0, at=50)
    wait_ms = 1_000 * LONGEST_SETTING_S
    log = site.log()
    operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=wait_ms)
    first = next(value for value in log.seen if value.startswith("ReleaseGroup"))
    assert int(first.rpartition("/")[2]) == ManualClock().wall_ms() // 1_000 + 2 * LONGEST_SETTING_S


def test_the_pause_of_another_setting_is_not_put_back(site: Site) -> None:
    """A pause of another process that set positions is not restored, because that process may have ended already."""
    site.owner_of(0, at=50).release()
    site.pause(LONGEST_SETTING_S, "setting-positions.1")
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert is_paused_everywhere(site) == {False}


@pytest.mark.parametrize("record", ["ClaimingPartition", "ReleasingPartition"])
def test_who_resumes_in_between_is_found_out(site: Site, record: str) -> None:
    """A release after another process resumed the group sets no position: all is repeated under a new instance id."""
    site.owner_of(0, at=50).release()
    log = site.log()
    seen: list[str] = []

    def somebody_resumes() -> None:
        if log.types()[-1] == record and not seen:
            seen.append(record)
            site.say(ReleaseGroup(instance="other", client="other", group=GROUP, time_s=0, expiry_s=0))

    log.before_append = somebody_resumes
    operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert seen == [record]
    assert site.key(0).offset == 10
    assert log.types().count("ClaimingPartition") == 2


def test_a_position_is_not_set_by_a_release_that_was_never_acknowledged(site: Site) -> None:
    """Without acknowledgements the step is repeated a few times, then fails, and the group is resumed."""
    site.owner_of(0, at=50).release()
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleasingPartition"))
    with pytest.raises(PositionNotSetError, match=r"were not confirmed for partitions \[0\]"):
        operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert log.types().count("ReleasingPartition") == log.types().count("ClaimingPartition") == TRIES
    assert site.key(0).offset == 50
    assert is_paused_everywhere(site) == {False}


def test_an_interrupted_setting_puts_the_group_back(site: Site) -> None:
    """Ctrl-C while positions are set leaves neither a pause nor a claim."""
    site.owner_of(0, at=50).release()
    log = site.log()

    def interrupt() -> None:
        if log.types()[-1] == "ReleasingPartition":
            log.before_append = lambda: None
            raise KeyboardInterrupt

    log.before_append = interrupt
    with pytest.raises(KeyboardInterrupt):
        operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert (site.key(0).offset, site.key(0).owner) == (50, None)
    assert is_paused_everywhere(site) == {False}


@pytest.mark.parametrize("before", [0, 1])
def test_an_interrupt_while_the_group_is_put_back_leaves_no_pause(site: Site, before: int) -> None:
    """Ctrl-C just before or after the pause is ended does not leave the group paused for an hour."""
    site.owner_of(0, at=50).release()
    log = site.log()

    def interrupt() -> None:
        if log.types()[-1] == "ReleaseGroup" and "ReleasingPartition" in log.types():
            log.before_append = log.after_append = lambda: None
            raise KeyboardInterrupt

    if before:
        log.before_append = interrupt
    else:
        log.after_append = interrupt
    with pytest.raises(KeyboardInterrupt):
        operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert is_paused_everywhere(site) == {False}


def test_who_cannot_put_the_group_back_says_what_was_set(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """If the broker fails after positions were set, the log states them, and that the group stays paused."""
    site.owner_of(0, at=50).release()
    log = site.log()

    def breaks_down() -> None:
        if log.types()[-1] == "ReleaseGroup" and "ReleasingPartition" in log.types():
            log.is_down = True

    log.before_append = breaks_down
    with pytest.raises(UnavailableError):
        operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert "stays paused" in caplog.text
    assert "partitions [0] were set" in caplog.text


def test_no_position_is_set_from_a_log_that_was_cut(site: Site) -> None:
    """If retention has cut the log, so that the reader can only observe it, no position is set."""
    site.owner_of(0, at=50).release()
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end)
    with pytest.raises(IncompleteLogError):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)


# Members that hold ranges (protocol.md, section 8.4)


def test_positions_wait_for_ranges_too(site: Site) -> None:
    """A live range is waited for; if it stays, the error names its partition.

    A range that becomes stale is released.
    """
    site.begin(0, settings=RANGES, at=50)
    site.holder_of({0: (60, 70)})
    with pytest.raises(PositionNotSetError, match=r"partitions \[0\] of topic 'orders' are still claimed"):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=HI_MS)
    assert (site.key(0).offset, site.ranges()) == (50, [(60, 70, "claimed")])
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=3 * HI_MS)
    assert (site.key(0).offset, site.ranges()) == (10, [])


def test_ranges_of_the_dead_are_not_waited_for(site: Site) -> None:
    """Ranges of an owner known to be dead are revoked, including planned ones."""
    site.begin(0, settings=RANGES, at=50)
    site.holder_of({0: (50, 55)})
    site.holder_of({0: (60, 70)}, plans=True)
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0, is_dead=lambda _: True)
    assert (site.key(0).offset, site.ranges()) == (10, [])


def test_what_is_planned_or_done_ahead_is_shown_before_it_is_forgotten(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator sees ranges that will be processed again or never. Ranges that are only claimed are not shown."""
    site.begin(0, 1, settings=RANGES, at=50)
    site.holder_of({0: (50, 55), 1: (90, 99)})
    site.holder_of({0: (60, 70)}, plans=True)
    site.holder_of({0: (70, 80)}, plans=True).commit({0: 80})
    operator = operator_on(site)
    assert [(n, [range_[:3] for range_ in ranges]) for n, ranges in operator.ahead(TOPIC).items()] == [
        (0, [(60, 70, Phase.PLANNED), (70, 80, Phase.DONE)])
    ]
    with caplog.at_level(logging.WARNING):
        operator.set_positions(TOPIC, {0: 50}, TOPIC_ID, wait_ms=3 * HI_MS)
    assert "orders/0: ranges after the offset are forgotten" in caplog.text
    assert "or never: [60, 70) planned, [70, 80) done" in caplog.text
    assert operator.ahead(TOPIC) == {}


def test_a_whole_claim_leaves_alone_what_has_ranges(site: Site) -> None:
    """A partition with a live or a planned range is not free for a claim of the whole partition; others are."""
    site.begin(0, 1, 2, 3, settings=RANGES)
    site.holder_of({0: (0, 5)})
    site.holder_of({1: (0, 5)}, plans=True).release()
    dead = site.holder_of({2: (0, 5)})
    member = site.member(settings=RANGES)
    assert member.claimable(range(4)) == [3]
    wanted = member.claimable(range(4), is_dead=lambda owner: owner.instance == dead.member.instance)
    assert wanted == [2, 3]
    assert len(member.claim(wanted, is_dead=lambda owner: owner.instance == dead.member.instance)) == 2
    site.clock.advance(2 * HI_MS + 1)
    assert site.member(settings=RANGES).claimable(range(4)) == [0, 2, 3]


# Switching ranges off


def blind(site: Site) -> World:
    """Read the log as a member without support for ranges does."""
    world = World(site.partitions)
    for number in range(site.partitions):
        for offset, at_ms, value in site.broker.records(number):
            kind = (value or b"").split(b"/", 1)[0]
            world.apply(number, offset, at_ms, b"Unheard" if b"Range" in kind else value)
    return world


def assert_all_see_ranges_off(site: Site, *, paused: bool = False) -> None:
    """Check that the feature is off everywhere, and that a member without support for ranges reads the same state."""
    ours, theirs = site.world(), blind(site)
    for number in range(site.partitions):
        assert ours.partitions[number].groups[GROUP] == theirs.partitions[number].groups[GROUP]
        assert ours.partitions[number].groups[GROUP].settings == SETTINGS
    assert is_paused_everywhere(site) == {paused}


def test_ranges_are_switched_off(site: Site) -> None:
    """The feature is removed everywhere, positions do not change, and members without support for ranges can claim."""
    site.begin(0, 1, settings=RANGES, at=50)
    site.holder_of({0: (60, 70)}, plans=True).commit({0: 70})
    site.holder_of({1: (50, 70)}, plans=True).commit({1: 70})
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)
    assert [(site.key(n).offset, site.key(n).data_topic_id, site.ranges(n)) for n in (0, 1)] == [
        (50, TOPIC_ID, []),
        (70, TOPIC_ID, []),
    ]
    assert len(site.member().claim([0, 1])) == 2
    before = site.values()
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert site.values() == before


def test_who_knows_no_ranges_may_have_seen_another_owner(site: Site) -> None:
    """A whole-partition claim that a range prevented is valid for members that ignore ranges.

    Its owner is waited for.
    """
    site.begin(0, settings=RANGES, at=50)
    holder = site.holder_of({0: (60, 70)}, plans=True)
    site.say(about(ClaimingPartition, "phantom.1"))
    site.say(about(Heartbeat, "phantom.1", offset=65))
    holder.release()
    owner = blind(site).key(GROUP, TOPIC, 0).owner
    assert owner is not None
    assert owner.instance == "phantom.1"
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)


def test_a_pause_in_force_is_put_back_after_switching_off(site: Site) -> None:
    """A longer pause that was in force before is restored afterwards."""
    site.begin(0, settings=RANGES)
    site.pause(3_000, "boss.1")
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site, paused=True)


def test_switching_off_waits_for_members_to_leave(site: Site) -> None:
    """A live range is waited for; if it stays, nothing changes and the group is resumed."""
    site.begin(0, settings=RANGES)
    holder = site.holder_of({0: (0, 5)})
    with pytest.raises(PositionNotSetError, match=r"partitions \[0\] of topic 'orders' are still claimed"):
        operator_on(site).switch_ranges_off(wait_ms=HI_MS)
    holder.beat()
    assert is_paused_everywhere(site) == {False}
    assert site.key(0).generation == 0
    operator_on(site).switch_ranges_off(wait_ms=3 * HI_MS)
    assert_all_see_ranges_off(site)


@pytest.mark.parametrize("at", ["ReleaseGroup", "Mark", "ClaimingPartition", "DataTopic", "ReleasingPartition"])
def test_who_resumes_meanwhile_makes_it_begin_anew(site: Site, at: str) -> None:
    """If another operator resumes the group at any step, members may have claimed: all steps are repeated."""
    site.begin(0, settings=RANGES, at=50)
    log = site.log()

    def another_resumes() -> None:
        if log.types()[-1] == at:
            log.after_append = lambda: None
            site.pause(-1, "boss.1")
            site.say(about(ClaimingRange, "late.1", start=60, end=70))
            site.say(about(RangeHeartbeat, "late.1", epoch=site.broker.bounds(site.home).end - 1))

    log.after_append = another_resumes
    operator_on(site, log).switch_ranges_off(wait_ms=10 * HI_MS)
    assert log.after_append is not another_resumes
    assert_all_see_ranges_off(site)
    pauses = {value.split("/")[3] for value in log.seen if value.startswith("ReleaseGroup/")}
    assert sum(instance.startswith("setting-positions.") for instance in pauses) == 2


@pytest.mark.parametrize("fault", [Fault.LOST_ACK, Fault.LATE])
def test_a_pause_that_could_come_back_is_begun_anew(site: Site, fault: Fault) -> None:
    """An instance whose pause was not acknowledged does nothing more: its pause may still arrive after a resumption."""
    site.begin(0, settings=RANGES)
    log = site.log()
    log.fail(fault, of_type("ReleaseGroup"), times=1)
    operator_on(site, log).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)
    paused_by = [value.split("/")[3] for value in log.seen if value.startswith("ReleaseGroup/")]
    (claimed_by,) = {value.split("/")[3] for value in log.seen if value.startswith("ClaimingPartition/")}
    assert claimed_by != paused_by[0]
    assert paused_by.count(claimed_by) == site.partitions


@pytest.mark.parametrize("kind", ["ClaimingPartition", "DataTopic", "ReleasingPartition", "GroupSettings"])
@pytest.mark.parametrize("fault", [Fault.LOST_ACK, Fault.FAILED])
def test_what_was_not_seen_accepted_is_done_anew(site: Site, kind: str, fault: Fault) -> None:
    """A step without acknowledgement ends the try. The next try completes it, whatever other records came between."""
    site.begin(0, 1, settings=RANGES, at=50)
    holder = site.holder_of({0: (50, 60), 1: (50, 60)}, plans=True)
    site.pause(60, "boss.1")
    for number in (0, 1):
        site.say(about(ClaimingPartition, "boss.1", number))
        site.say(about(DataTopic, "boss.1", number, topic_id=OTHER_TOPIC_ID))
    site.pause(-1)
    holder.commit({0: 60, 1: 60})
    assert [blind(site).key(GROUP, TOPIC, n).data_topic_id for n in (0, 1)] == [OTHER_TOPIC_ID] * 2
    log = site.log()
    log.fail(fault, of_type(kind), times=1)
    operator_on(site, log).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)
    assert [(site.key(n).offset, site.key(n).data_topic_id) for n in (0, 1)] == [(60, TOPIC_ID)] * 2


def test_a_key_without_offset_is_named(site: Site) -> None:
    """If a partition has no offset, nothing is changed and the error names the partition."""
    site.begin(0, settings=RANGES)
    member = site.member(settings=RANGES)
    member.claim([3])
    member.release()
    with pytest.raises(PositionNotSetError, match=r"partitions \[3\] of 'orders' have no offset"):
        operator_on(site).switch_ranges_off(wait_ms=0)
    assert is_paused_everywhere(site) == {False}


@pytest.mark.parametrize(
    ("record", "text"), [("GroupSettings", "still enabled in coordination partitions"), ("Mark", "does not advance")]
)
def test_settings_that_were_not_changed_are_no_failure_of_positions(site: Site, record: str, text: str) -> None:
    """If the brokers take no settings record, or log time stops, `SettingsNotSetError` reports it."""
    site.begin(0, settings=RANGES)
    log = site.log()
    log.fail(Fault.FAILED, of_type(record))
    with pytest.raises(SettingsNotSetError, match=text):
        operator_on(site, log).switch_ranges_off(wait_ms=0)
    assert is_paused_everywhere(site) == {False}


def test_other_features_stay(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the feature `ranges` is removed."""
    monkeypatch.setattr("marshal_dagster.coordination.group_settings.KNOWN_FEATURES", {"ranges", "others"})
    site.begin(0, settings=GroupSettings(HI_MS, features=("ranges", "others")))
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert site.world().group_of(GROUP, TOPIC).settings == GroupSettings(HI_MS, features=("others",))


def test_what_was_switched_off_by_halves_is_completed(site: Site) -> None:
    """If the feature is off in some coordination partitions only, it is removed in the others."""
    elsewhere = (site.home + 1) % site.partitions
    site.begin(0, settings=RANGES)
    site.pause(60)
    site.broker.append(elsewhere, render(settings_record(SETTINGS)))
    site.pause(-1)
    operator_on(site).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)


def test_a_log_of_which_not_even_the_settings_are_known_is_left_alone(site: Site) -> None:
    """If the settings are not known, because retention cut the log, the feature is not reported as off."""
    site.begin(0, settings=RANGES)
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end)
    with pytest.raises(IncompleteLogError, match="so the settings there are unknown"):
        operator_on(site).switch_ranges_off(wait_ms=0)


def test_what_another_operator_switched_off_meanwhile_is_off(site: Site) -> None:
    """If another operator has switched ranges off meanwhile, nothing is left to do and the group is resumed."""
    site.begin(0, settings=RANGES, at=50)
    log = site.log()

    def another_switches_off() -> None:
        log.before_append = lambda: None
        operator_on(site).switch_ranges_off(wait_ms=0)

    log.before_append = another_switches_off
    operator_on(site, log).switch_ranges_off(wait_ms=0)
    assert_all_see_ranges_off(site)


def overtaken_at(site: Site, number: int) -> FaultyLog:
    """Open a log that retention cuts past its reader just before an append (`number`, counted from 0)."""
    log = site.log()
    turns = iter(range(number))

    def retention_overtakes() -> None:
        if next(turns, None) is None:
            log.before_append = lambda: None
            site.overtake()

    log.before_append = retention_overtakes
    return log


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("number", range(20))
def test_who_is_overtaken_by_retention_switches_nothing_off(site: Site, number: int, *, is_paused: bool) -> None:
    """If retention overtakes the reader at any append, an error reports it, and a pause in force before is restored."""
    site.begin(0, settings=RANGES, at=50)
    if is_paused:
        site.pause(3_000, "boss.1")
    with pytest.raises(IncompleteLogError):
        operator_on(site, overtaken_at(site, number)).switch_ranges_off(wait_ms=10 * HI_MS)
    assert is_paused_everywhere(site) == {is_paused}


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_who_is_overtaken_by_retention_sets_no_position(site: Site, number: int, *, is_paused: bool) -> None:
    """If retention overtakes the reader, an error reports that no position was set; an earlier pause is restored."""
    site.begin(0, at=50)
    if is_paused:
        site.pause(3_000, "boss.1")
    with pytest.raises((IncompleteLogError, PositionNotSetError)):
        operator_on(site, overtaken_at(site, number)).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert is_paused_everywhere(site) == {is_paused}


def test_a_log_that_is_only_observed_is_left_alone(site: Site) -> None:
    """On a log that retention has cut, ranges are not switched off."""
    site.begin(0, settings=RANGES)
    site.pause(60)
    site.say(settings_record(RANGES))
    site.say(about(Heartbeat, "x.1", offset=1))
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end - 2)
    with pytest.raises(IncompleteLogError):
        operator_on(site).switch_ranges_off(wait_ms=0)
