"""Pausing, resuming and setting positions, on a log in memory."""

import pytest

from marshal_dagster.coordination.operator import LONGEST_SETTING_S, TRIES, Operator
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, GroupPaused, NotCertain, PositionNotSet, UnavailableError
from marshal_dagster.protocol.messages import ReleaseGroup, render
from marshal_dagster.testing import ManualClock
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import GROUP, HI_MS, OTHER_TOPIC_ID, TOPIC, TOPIC_ID, Site


@pytest.fixture
def site() -> Site:
    """A coordination topic of its own."""
    return Site()


def operator_on(site: Site, log: FaultyLog | None = None) -> Operator:
    """Open an operator."""
    return Operator(Rationalizer(log or site.log(), clock=site.clock), GROUP, "ops", clock=site.clock)


def is_paused_everywhere(site: Site) -> set[bool]:
    """Tell, for each coordination partition, whether the group is paused now."""
    groups = (world.groups.get(GROUP) for world in site.world().partitions.values())
    return {group is not None and group.is_paused(site.clock.wall_ms()) for group in groups}


def test_a_pause_keeps_members_from_claiming_until_it_is_over(site: Site) -> None:
    """A pause holds in every coordination partition; who resumes ends it."""
    operator = operator_on(site)
    operator.pause(site.clock.wall_ms() // 1_000 + 60)
    assert is_paused_everywhere(site) == {True}
    member = site.member()
    with pytest.raises(GroupPaused):
        member.claim([0])
    operator.resume()
    assert is_paused_everywhere(site) == {False}
    assert site.member().claim([0])


@pytest.mark.parametrize(("seconds", "is_paused"), [(0, False), (-600, False), (1, True)])
def test_a_pause_that_is_over_already_is_an_error(site: Site, seconds: int, *, is_paused: bool) -> None:
    """Who pauses by a clock that is slow hears that the group is not paused."""
    until_s = site.clock.wall_ms() // 1_000 + seconds
    if is_paused:
        operator_on(site).pause(until_s)
    else:
        with pytest.raises(ConfigurationError, match=r"'etl' is not paused: by the brokers' clocks"):
            operator_on(site).pause(until_s)
    assert is_paused_everywhere(site) == {is_paused}


def test_a_pause_without_acknowledgement_is_written_again(site: Site) -> None:
    """What was not acknowledged anywhere is sent once more there; what never is, is named."""
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleaseGroup"), times=2)
    operator_on(site, log).pause(site.clock.wall_ms() // 1_000 + 60)
    assert is_paused_everywhere(site) == {True}
    log.fail(Fault.FAILED, of_type("ReleaseGroup"))
    with pytest.raises(UnavailableError, match=r"could not be written to coordination partitions \[0, 1, 2, 3\]"):
        operator_on(site, log).resume()


def test_positions_are_set_back_in_a_new_generation(site: Site) -> None:
    """Lower, equal and higher positions count; the group goes on afterwards, and no plan is left."""
    site.owner_of(0, at=50).release()
    site.owner_of(1, at=50).release()
    operator_on(site).set_positions(TOPIC, {0: 10, 1: 50}, TOPIC_ID, wait_ms=0)
    first, second = site.key(0), site.key(1)
    assert (first.offset, first.owner, first.plan_end) == (10, None, None)
    assert (second.offset, second.owner) == (50, None)
    assert 0 < first.generation != second.generation > 0
    assert is_paused_everywhere(site) == {False}


def test_the_incarnation_is_written_down_before_a_position(site: Site) -> None:
    """A position in a data topic that was made anew belongs to the new one."""
    site.owner_of(0, at=50).release()
    operator_on(site).set_positions(TOPIC, {0: 7}, OTHER_TOPIC_ID, wait_ms=0)
    assert (site.key(0).offset, site.key(0).data_topic_id) == (7, OTHER_TOPIC_ID)


def test_positions_wait_for_owners_to_leave(site: Site) -> None:
    """A live owner is waited for, and named if it stays; then the group goes on as before."""
    site.owner_of(0, at=50)
    with pytest.raises(PositionNotSet, match=r"partitions \[0\] of 'orders' are still held"):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=HI_MS)
    assert site.key(0).offset == 50
    assert is_paused_everywhere(site) == {False}
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=3 * HI_MS)
    assert site.key(0).offset == 10


def test_a_dead_owner_is_not_waited_for(site: Site) -> None:
    """What is known to be dead is revoked."""
    site.owner_of(0, at=50)
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0, is_dead=lambda _: True)
    assert site.key(0).offset == 10


def test_a_pause_in_force_is_put_back(site: Site) -> None:
    """Whoever paused the group for longer still finds it paused."""
    operator = operator_on(site)
    until_s = site.clock.wall_ms() // 1_000 + 10 * LONGEST_SETTING_S
    site.owner_of(0, at=50).release()
    operator.pause(until_s)
    operator.set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert site.world().group_of(GROUP, TOPIC).paused_until_s == until_s


@pytest.mark.parametrize("ahead_s", [-7_200, 600])
def test_a_wrong_clock_ends_no_pause(site: Site, ahead_s: int) -> None:
    """Who sets positions by a clock that is minutes fast, or hours slow, does so all the same, and ends no pause."""
    site.owner_of(0, at=50).release()
    site.pause(300, "boss.1")
    until_s = site.world().group_of(GROUP, TOPIC).paused_until_s
    wrong = ManualClock(site.clock.wall_ms() + 1_000 * ahead_s)
    operator = Operator(Rationalizer(site.log(), clock=site.clock), GROUP, "ops", clock=wrong)
    operator.set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert site.world().group_of(GROUP, TOPIC).paused_until_s == until_s


@pytest.mark.parametrize("after", ["ClaimingPartition", "ReleasingPartition"])
@pytest.mark.parametrize("seconds", [7_200, -1])
def test_who_pauses_or_resumes_meanwhile_has_the_last_word(site: Site, after: str, seconds: int) -> None:
    """A pause or a resumption that comes while positions are set is in force afterwards, under its own name."""
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
    """A pause that holds in some coordination partitions holds in just these afterwards."""
    site.owner_of(0, at=50).release()
    away = next(number for number in range(site.partitions) if number != site.home)
    until_s = site.clock.wall_ms() // 1_000 + 600
    site.broker.append(away, render(ReleaseGroup(instance="b", client="b", group=GROUP, time_s=0, expiry_s=until_s)))
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    paused = {number: world.groups[GROUP].paused_until_s for number, world in site.world().partitions.items()}
    assert paused == {number: until_s if number == away else 0 for number in range(site.partitions)}


def test_the_end_of_another_setting_ends_no_pause(site: Site) -> None:
    """Of two who set positions the one that knows the pause from before puts it back, though the other ended last."""
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


def test_what_was_set_before_the_wait_was_over_is_told(site: Site) -> None:
    """Partitions that one try has set are named when the next one waits for a member in vain."""
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
        PositionNotSet, match=r"partitions \[1\] of 'orders' are still held.*; partitions \[0\] were set"
    ):
        operator_on(site, log).set_positions(TOPIC, {0: 10, 1: 10}, TOPIC_ID, wait_ms=0)


def test_the_pause_outlasts_the_wait(site: Site) -> None:
    """Who waits for owners longer than a setting may take has the group paused for as long."""
    site.owner_of(0, at=50)
    wait_ms = 1_000 * LONGEST_SETTING_S
    log = site.log()
    operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=wait_ms)
    first = next(value for value in log.seen if value.startswith("ReleaseGroup"))
    assert int(first.rpartition("/")[2]) == ManualClock().wall_ms() // 1_000 + 2 * LONGEST_SETTING_S


def test_the_pause_of_another_setting_is_not_put_back(site: Site) -> None:
    """Who sets positions while another does so leaves no pause behind, should the other have ended first."""
    site.owner_of(0, at=50).release()
    site.pause(LONGEST_SETTING_S, "setting-positions.1")
    operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.key(0).offset == 10
    assert is_paused_everywhere(site) == {False}


@pytest.mark.parametrize("record", ["ClaimingPartition", "ReleasingPartition"])
def test_who_resumes_in_between_is_found_out(site: Site, record: str) -> None:
    """A release after somebody's resume sets nothing: it is done again, as another instance."""
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
    """Without acknowledgements it is tried anew, then ends with an error, and the group goes on."""
    site.owner_of(0, at=50).release()
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleasingPartition"))
    with pytest.raises(PositionNotSet, match=r"were not set for partitions \[0\]"):
        operator_on(site, log).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert log.types().count("ReleasingPartition") == log.types().count("ClaimingPartition") == TRIES
    assert site.key(0).offset == 50
    assert is_paused_everywhere(site) == {False}


def test_an_interrupted_setting_puts_the_group_back(site: Site) -> None:
    """Ctrl-C in the middle leaves no pause and no claim."""
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
    """Ctrl-C at the very end, just before or after the pause was ended, does not leave the group paused for an hour."""
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
    """Positions are set, then the broker is gone: that they are, and that the group stays paused, is told."""
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
    """Where one only observes, nothing is done."""
    site.owner_of(0, at=50).release()
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end)
    with pytest.raises(NotCertain):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
