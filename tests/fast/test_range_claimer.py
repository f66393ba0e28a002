"""How a claimer holds, plans, commits and releases ranges of partitions (protocol.md, section 8.4).

The log is in memory, and each test chooses its faults.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from marshal_dagster.coordination.base_claimer import BaseClaimer
from marshal_dagster.coordination.heartbeats import Heartbeats
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.errors import (
    ClaimLostError,
    CommitFailedError,
    ConfigurationError,
    CoordinationLogChangedError,
    GroupPausedError,
    IncompleteLogError,
    PlanRejectedError,
    SettingsMismatchError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    ClaimingRange,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    PlanningRange,
    RangeDone,
    ReleaseGroup,
    RevokingRange,
    RuleSet,
)
from marshal_dagster.protocol.state import Owner
from tests.conditions import WITHIN_S
from tests.faulty_log import Fault, InterruptError, of_type
from tests.members import (
    HI_MS,
    RANGES,
    SETTINGS,
    TOPIC_ID,
    Site,
    about,
    faulty,
    messages_sent_by,
    raiser,
    settings_record,
)

LEASE_MS = 2 * HI_MS - HI_MS // 10
AT_MOST_ONCE = GroupSettings(HI_MS, delivery=DeliveryMode.AT_MOST_ONCE, features=("ranges",))


@pytest.fixture
def site() -> Site:
    """Return a group that enables ranges, with two partitions at offset 5."""
    site = Site()
    site.begin(0, 1, at=5)
    return site


def epoch_of(member: RangeClaimer, partition: int = 0) -> int:
    """Return the epoch of the member's claim."""
    return member.claims[partition].epoch


# Who may claim


@pytest.mark.parametrize("settings", [SETTINGS, GroupSettings(60_000, RuleSet.GO, features=("ranges",))])
def test_ranges_are_claimed_where_the_settings_enable_them(settings: GroupSettings) -> None:
    """A range claimer rejects settings that do not enable ranges."""
    with pytest.raises(ConfigurationError, match="ranges"):
        Site().range_claimer(settings=settings)


def test_a_group_without_ranges_is_left_alone() -> None:
    """If the group's settings do not enable ranges, a range claimer raises an error and claims nothing."""
    site = Site()
    site.begin(0, settings=SETTINGS)

    with pytest.raises(SettingsMismatchError, match="ranges"):
        site.range_claimer()


def test_the_first_member_may_give_the_group_its_settings() -> None:
    """A group without settings gets those of the first range claimer."""
    site = Site()

    site.range_claimer()

    assert site.world().group_of("etl", "orders").settings == RANGES


# Claiming


def test_many_ranges_are_claimed_with_one_append(site: Site) -> None:
    """One range of each partition is claimed in a single append, and all free ones are won."""
    member = site.range_claimer()
    appends: list[int] = []
    log = faulty(member)
    log.before_append = lambda: appends.append(len(log.seen))
    before = len(log.seen)

    won = member.claim({0: (5, 10), 1: (7, 9)})

    assert [(claim.partition, claim.start, claim.end, claim.plan_end, claim.attempts) for claim in won] == [
        (0, 5, 10, None, 0),
        (1, 7, 9, None, 0),
    ]
    assert [claim.generation for claim in won] == [0, 0]
    assert appends == [before + 2]


def test_several_members_hold_one_partition(site: Site) -> None:
    """Each member holds its own range of a partition, with the log offset of its own record as epoch."""
    first, second = site.holder_of({0: (5, 10)}), site.holder_of({0: (10, 20)})

    first.check([0])
    second.check([0])
    assert site.ranges() == [(5, 10, "claimed"), (10, 20, "claimed")]
    assert [range_.owner.epoch for range_ in site.key().ranges if range_.owner] == [epoch_of(first), epoch_of(second)]


def test_what_overlaps_another_range_is_not_won(site: Site) -> None:
    """A range that overlaps another member's is not won. Other ranges of the same append are."""
    site.holder_of({0: (5, 10)})
    member = site.range_claimer()

    assert [claim.partition for claim in member.claim({0: (9, 12), 1: (5, 10)})] == [1]
    assert list(member.claims) == [1]


def test_a_range_whose_owner_is_stale_is_taken(site: Site) -> None:
    """A claimed range is free after its owner was silent for more than two intervals."""
    site.holder_of({0: (5, 10)})
    site.clock.advance(2 * HI_MS)
    assert site.range_claimer().claim({0: (5, 7)}) == []

    site.clock.advance(1)

    assert len(site.range_claimer().claim({0: (5, 7)})) == 1


def test_a_planned_range_is_taken_over_exactly(site: Site) -> None:
    """A planned range without a live owner is won with the same bounds and plan, and one more attempt."""
    site.holder_of({0: (5, 10)}, plans=True).release()
    assert site.range_claimer().claim({0: (5, 9)}) == []
    member = site.range_claimer()

    (claim,) = member.claim({0: (5, 10)})

    assert (claim.start, claim.end, claim.plan_end, claim.attempts) == (5, 10, 10, 1)


def test_a_twin_with_the_same_instance_id_is_not_mistaken_for_oneself(site: Site) -> None:
    """A range is won only by the record that this process appended, which is identified by its log offset."""
    twin, member = site.range_claimer(instance="run.same"), site.range_claimer(instance="run.same")
    twin.claim({0: (5, 10)})

    assert member.claim({0: (5, 10)}) == []


def test_a_partition_is_requested_once_in_a_tenure(site: Site) -> None:
    """An instance wins at most one range of a partition, even after it has released that range."""
    member = site.range_claimer()
    member.claim({0: (5, 10)})
    member.claim({0: (10, 20)})
    member.release()

    assert member.claim({0: (20, 30)}) == []
    assert member.choose({0: 100}, 10) == {}
    assert messages_sent_by(site, member.member.instance).count("ClaimingRange") == 1


def test_what_was_refused_may_be_requested_again(site: Site) -> None:
    """If another member was faster, the same instance may claim a later range."""
    member, rival = site.range_claimer(), site.range_claimer()
    rival.claim({0: (5, 10)})

    assert member.claim({0: (5, 10)}) == []
    assert member.choose({0: 20}, 10) == {0: (10, 20)}
    assert [(claim.start, claim.end) for claim in member.claim({0: (10, 20)})] == [(10, 20)]


def test_a_paused_group_is_not_claimed(site: Site) -> None:
    """While the group is paused no range is claimed. The error shows the end of the pause and who paused the group."""
    member = site.range_claimer()
    site.pause(60)
    member.rationalizer.catch_up()

    with pytest.raises(GroupPausedError, match="by ops;"):
        member.claim({0: (5, 10)})
    assert member.choose({0: 100}, 10) == {}
    assert messages_sent_by(site, member.member.instance) == []


def test_nobody_claims_from_a_log_that_is_only_observed(site: Site) -> None:
    """If retention has deleted the start of the log, a member neither agrees on settings nor claims."""
    member = site.range_claimer()
    for start in (5, 6):
        site.say(about(ClaimingRange, "other.1", start=start, end=start + 1))
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end - 1)

    with pytest.raises(IncompleteLogError, match="only be observed"):
        member.ensure_group_settings()
    with pytest.raises(IncompleteLogError, match="only be observed"):
        member.claim({0: (5, 10)})


def test_settings_that_change_while_a_claim_is_under_way_end_it(site: Site) -> None:
    """A range is released unused if the settings changed before its claim was read back."""
    member = site.range_claimer()
    site.pause(60)
    site.say(settings_record(GroupSettings(20_000, features=("ranges",))))
    site.say(ReleaseGroup(instance="ops.1", client="ops", group="etl", time_s=0, expiry_s=0))

    with pytest.raises(SettingsMismatchError):
        member.claim({0: (5, 10)})

    assert site.ranges() == []
    assert not member.claims


def test_a_claim_without_acknowledgement_is_not_continued(site: Site) -> None:
    """A range won by an unacknowledged claim is not held. It is revoked by its epoch, as another instance."""
    member = site.range_claimer()
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingRange", partition=1))

    won = member.claim({0: (5, 10), 1: (5, 10)})

    assert [claim.partition for claim in won] == [0]
    assert site.ranges(1) == []
    assert "RevokingRange" not in messages_sent_by(site, member.member.instance)
    assert any(value.startswith("RevokingRange/") for value in site.values())


def test_what_others_hold_is_not_revoked_with_it(site: Site) -> None:
    """An unacknowledged claim that won nothing revokes no range of another member."""
    other = site.holder_of({0: (5, 10)})
    member = site.range_claimer()
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingRange"))

    member.claim({0: (5, 10)})
    member.release()

    other.beat()


def test_a_claim_that_arrives_late_is_revoked_on_leaving(site: Site) -> None:
    """A claim that reaches the log too late for the member to read it is revoked when the member leaves."""
    member = site.range_claimer()
    faulty(member).fail(Fault.LATE, of_type("ClaimingRange", partition=1))
    member.claim({0: (5, 10), 1: (5, 10)})
    faulty(member).arrive()
    assert site.ranges(1) == [(5, 10, "claimed")]

    member.release()

    assert site.ranges(1) == []


def test_an_interrupted_claim_that_took_a_plan_over_leaves_it_free(site: Site) -> None:
    """A planned range whose takeover was not read back is released when the member leaves, and stays planned."""
    site.holder_of({0: (5, 10)}, plans=True).release()
    member = site.range_claimer()
    faulty(member).after_append = raiser(InterruptError())
    with pytest.raises(InterruptError):
        member.claim({0: (5, 10)})
    faulty(member).recover()

    member.release()

    (left,) = site.key().ranges
    assert (left.start, left.end, left.phase, left.owner, left.attempts) == (5, 10, "planned", None, 1)


@pytest.mark.parametrize("where", ["before_append", "after_append", "before_read"])
def test_an_interrupted_claim_leaves_nothing_behind(site: Site, where: str) -> None:
    """A claim that is interrupted at any point is undone by the next release."""
    member = site.range_claimer()
    setattr(faulty(member), where, raiser(InterruptError()))
    with pytest.raises(InterruptError):
        member.claim({0: (5, 10), 1: (5, 10)})
    faulty(member).recover()

    member.release()

    assert site.ranges(0) == site.ranges(1) == []


# Dead owners


def test_ranges_of_the_dead_that_stand_in_the_way_are_revoked(site: Site) -> None:
    """Ranges of a dead owner that overlap the wanted offsets are revoked by epoch and claimed in the same append."""
    dead, alive = site.holder_of({0: (5, 10)}), site.holder_of({1: (5, 10)})
    elsewhere = site.holder_of({0: (20, 30)})
    member = site.range_claimer()

    won = member.claim({0: (7, 12), 1: (7, 12)}, is_dead=lambda owner: owner.instance != alive.member.instance)

    assert [claim.partition for claim in won] == [0]
    assert messages_sent_by(site, member.member.instance) == ["RevokingRange", "ClaimingRange", "ClaimingRange"]
    assert site.ranges() == [(7, 12, "claimed"), (20, 30, "claimed")]
    elsewhere.beat()
    with pytest.raises(ClaimLostError, match=member.member.instance):
        dead.beat()


def test_a_planned_range_of_the_dead_is_revoked_and_taken_over(site: Site) -> None:
    """A planned range of a dead owner is won exactly, even before its owner is stale."""
    dead = site.holder_of({0: (5, 10)}, plans=True)
    member = site.range_claimer()
    is_dead = partial(_is, dead)
    assert member.choose({0: 100}, 3) == {0: (10, 13)}

    wanted = member.choose({0: 100}, 3, is_dead=is_dead)
    (claim,) = member.claim(wanted, is_dead=is_dead)

    assert (claim.start, claim.end, claim.plan_end, claim.attempts) == (5, 10, 10, 1)


def test_a_dead_whole_owner_is_revoked(site: Site) -> None:
    """A whole partition of a dead owner is revoked, and a range of it is claimed in the same append."""
    dead = site.owner_of(0, settings=RANGES)
    member = site.range_claimer()
    is_dead = partial(_is, dead)
    assert member.choose({0: 100}, 3) == {}
    assert member.choose({0: 100}, 3, is_dead=is_dead) == {0: (5, 8)}

    assert len(member.claim({0: (5, 8)}, is_dead=is_dead)) == 1
    assert messages_sent_by(site, member.member.instance) == ["RevokingClaim", "ClaimingRange"]


def test_an_owner_is_judged_once_and_without_holding_others_up(site: Site) -> None:
    """`is_dead` is called once for each owner, outside of the lock, so other threads can read the log meanwhile."""
    site.holder_of({0: (5, 10), 1: (5, 10)})
    member = site.range_claimer()
    requested: list[Owner] = []

    def is_dead(owner: Owner) -> bool:
        requested.append(owner)
        free = threading.Thread(target=member.rationalizer.catch_up)
        free.start()
        free.join(WITHIN_S)
        assert not free.is_alive()
        return True

    member.claim({0: (5, 10), 1: (5, 10)}, is_dead=is_dead)

    assert len(requested) == 1


def test_revoke_reports_what_it_took(site: Site) -> None:
    """`revoke` takes partitions and epochs, and returns those that were still valid and are now revoked."""
    owner, other = site.holder_of({0: (5, 10), 1: (5, 10)}), site.holder_of({0: (10, 20)})
    member = site.range_claimer()
    held = [(0, epoch_of(owner)), (0, epoch_of(other)), (1, epoch_of(owner, 1) + 1)]

    assert member.revoke(held) == frozenset(held[:2])
    assert (site.ranges(0), site.ranges(1)) == ([], [(5, 10, "claimed")])


def _is(member: BaseClaimer[Any], owner: Owner) -> bool:
    return owner.instance == member.member.instance


# Leases and heartbeats


def test_heartbeats_keep_all_ranges_with_one_append(site: Site) -> None:
    """With a heartbeat in each interval a member keeps its ranges. One append sends all heartbeats."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})
    appends: list[None] = []
    faulty(member).before_append = lambda: appends.append(None)

    for _ in range(10):
        site.clock.advance(HI_MS)
        member.beat()

    member.check([0, 1])
    assert len(appends) == 10
    assert messages_sent_by(site, member.member.instance).count("RangeHeartbeat") == 20
    assert site.range_claimer().claim({0: (5, 10)}) == []


def test_the_lease_counts_from_sending(site: Site) -> None:
    """A lease starts when the last accepted record is sent, not when its acknowledgement arrives."""
    member = site.range_claimer()
    faulty(member).after_append = lambda: site.clock.advance(3_000)
    member.claim({0: (5, 10)})
    assert member.lease_left_ms() == LEASE_MS - 3_000

    member.beat()

    assert member.lease_left_ms() == LEASE_MS - 3_000


def test_a_heartbeat_without_acknowledgement_renews_no_lease(site: Site) -> None:
    """A heartbeat without an acknowledgement raises an error and does not renew the lease."""
    member = site.holder_of({0: (5, 10)})
    site.clock.advance(HI_MS)
    before = member.lease_left_ms()
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeHeartbeat"))

    with pytest.raises(CommitFailedError, match="The leases continue"):
        member.beat()

    assert member.lease_left_ms() == before
    member.check([0])


@pytest.mark.parametrize("plans", [False, True])
def test_a_member_whose_lease_ended_sends_nothing_more(site: Site, plans: bool) -> None:
    """After its lease ends a member stops, even if no other member took the range, and purges its unsent records."""
    member = site.holder_of({0: (5, 10)}, plans=plans)
    site.clock.advance(LEASE_MS)
    before = site.values()

    steps: list[Callable[[], object]] = [
        member.beat,
        member.check,
        partial(member.plan, {0: 10}),
        partial(member.commit, {0: 10}),
        partial(member.commit_before_processing, {0: 10}),
    ]
    for step in steps:
        with pytest.raises(ClaimLostError, match="lease ended"):
            step()
    member.release()

    assert site.values() == before
    assert faulty(member).purged


def test_nothing_is_sent_that_could_arrive_after_the_lease(site: Site) -> None:
    """If the lease left is shorter than a record may wait to be sent, no record is sent, not even a release."""
    member, leaver = site.holder_of({0: (5, 10)}, plans=True), site.holder_of({1: (5, 10)})
    site.clock.advance(LEASE_MS - HI_MS // 4 - 1)
    member.check([0])
    site.clock.advance(1)
    before = site.values()

    leaver.release()
    with pytest.raises(ClaimLostError):
        member.commit({0: 10})
    assert site.values() == before


def test_each_range_has_a_lease_of_its_own(site: Site) -> None:
    """A range whose heartbeat was not acknowledged is fenced when its lease ends. The other range is kept."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})
    faulty(member).fail(Fault.FAILED, of_type("RangeHeartbeat", partition=1))
    site.clock.advance(HI_MS)
    with pytest.raises(CommitFailedError, match="orders/1"):
        member.beat()
    site.clock.advance(LEASE_MS - HI_MS)

    member.check([0])
    with pytest.raises(ClaimLostError, match="orders/1: its lease ended"):
        member.check([1])


def test_a_revoked_range_is_lost_at_the_next_heartbeat(site: Site) -> None:
    """The heartbeat of a revoked range is refused. The error names the new holder, and no further record is sent."""
    member = site.holder_of({0: (5, 10)})
    successor = site.range_claimer()
    successor.claim({0: (5, 10)}, is_dead=lambda _: True)

    with pytest.raises(ClaimLostError, match=f"held by client '.*', instance '{successor.member.instance}'"):
        member.beat()
    before = site.values()
    member.release()

    assert site.values() == before
    successor.check([0])


def test_a_loss_is_reported_before_any_other_request_to_the_broker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that finds its range lost must stop the work first.

    It sends no request to the broker, which may take long.
    """
    member = site.holder_of({0: (5, 10)})
    site.range_claimer().claim({0: (5, 10)}, is_dead=lambda _: True)
    monkeypatch.setattr(member.rationalizer, "check_identity", raiser(AssertionError("the broker was queried")))

    with pytest.raises(ClaimLostError, match="its heartbeat was refused"):
        member.beat()


def test_who_holds_other_offsets_is_not_named(site: Site) -> None:
    """The error names the holder of the lost offsets, not a member that holds other offsets of the partition."""
    member, neighbour = site.holder_of({0: (5, 10)}), site.holder_of({0: (10, 20)})
    site.say(about(RevokingRange, "ops.1", epoch=epoch_of(member)))

    with pytest.raises(ClaimLostError, match="held by no instance") as lost:
        member.beat()
    assert neighbour.member.instance not in str(lost.value)


def test_heartbeats_of_threads_take_a_claimer_of_ranges(site: Site) -> None:
    """The heartbeat thread renews ranges as it renews whole claims, and reports a lost one."""
    member = site.holder_of({0: (5, 10)})
    errors: list[Exception] = []
    heartbeats = Heartbeats(member, errors.append, seed=1)
    site.clock.advance(HI_MS)
    heartbeats.step()
    assert messages_sent_by(site, member.member.instance).count("RangeHeartbeat") == 1

    site.clock.advance(LEASE_MS)
    heartbeats.watch()

    assert isinstance(errors[0], ClaimLostError)


# Plans


def test_a_plan_is_written_down_and_gives_up_what_lies_behind_it(site: Site) -> None:
    """A shorter plan ends the range there, and other members may claim the rest."""
    member = site.holder_of({0: (5, 10)})

    member.plan({0: 7})

    claim = member.claims[0]
    assert (claim.start, claim.end, claim.plan_end) == (5, 7, 7)
    assert site.ranges() == [(5, 7, "planned")]
    assert len(site.range_claimer().claim({0: (7, 10)})) == 1


def test_what_was_planned_when_it_was_won_is_not_planned_again(site: Site) -> None:
    """For a planned range that was taken over, the same plan sends no record, and another end is rejected."""
    site.holder_of({0: (5, 10)}, plans=True).release()
    member = site.holder_of({0: (5, 10)})
    before = site.values()

    member.plan({0: 10})
    for other in (9, 11):
        with pytest.raises(PlanRejectedError, match="planned from 5 to 10"):
            member.plan({0: other})

    assert site.values() == before


@pytest.mark.parametrize("end", [4, 5, 11])
def test_only_what_is_held_is_planned(site: Site, end: int) -> None:
    """A plan that is empty or exceeds the range is rejected, and no record is sent."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})
    before = site.values()

    with pytest.raises(PlanRejectedError, match="orders/0"):
        member.plan({1: 10, 0: end})
    assert site.values() == before


def test_a_plan_in_a_paused_group_is_an_error(site: Site) -> None:
    """A plan in a paused group raises an error."""
    member = site.holder_of({0: (5, 10)})
    site.pause(60)

    with pytest.raises(PlanRejectedError, match="paused"):
        member.plan({0: 10})


def test_a_plan_without_acknowledgement_is_found_by_reading(site: Site) -> None:
    """A plan that is in the log is valid even if its acknowledgement was lost."""
    member = site.holder_of({0: (5, 10)})
    faulty(member).fail(Fault.LOST_ACK, of_type("PlanningRange"))

    member.plan({0: 8})

    assert member.claims[0].plan_end == 8


def test_what_lies_behind_a_plan_that_was_sent_is_not_counted_on(site: Site) -> None:
    """An unacknowledged plan may still arrive, so the member can no longer plan the offsets after its end."""
    member = site.holder_of({0: (5, 10)})
    faulty(member).fail(Fault.LATE, of_type("PlanningRange"), times=1)
    with pytest.raises(PlanRejectedError, match="not acknowledged"):
        member.plan({0: 7})
    assert member.claims[0].end == 7

    with pytest.raises(PlanRejectedError, match="the claimed range is 5 to 7"):
        member.plan({0: 9})
    member.beat()
    assert member.claims[0].end == 7
    faulty(member).arrive()
    assert site.ranges() == [(5, 7, "planned")]
    member.beat()
    member.plan({0: 7})

    assert member.claims[0].plan_end == 7


def test_planning_what_was_lost_reports_the_loss(site: Site) -> None:
    """A plan for a revoked range raises ClaimLostError."""
    member = site.holder_of({0: (5, 10)})
    site.say(about(RevokingRange, "ops.1", epoch=epoch_of(member)))

    with pytest.raises(ClaimLostError):
        member.plan({0: 10})


# Commits


def test_a_commit_moves_the_offset_over_what_is_done_without_a_gap(site: Site) -> None:
    """Ranges may be done in any order. The offset waits at a gap and then moves past all done ranges."""
    first, second = site.holder_of({0: (5, 10)}, plans=True), site.holder_of({0: (10, 20)}, plans=True)

    second.commit({0: 20})
    assert (site.key().offset, site.ranges()) == (5, [(5, 10, "planned"), (10, 20, "done")])
    first.commit({0: 10})

    assert (site.key().offset, site.ranges()) == (20, [])
    assert [(one.claims[0].is_done, one.claims[0].offset) for one in (first, second)] == [(True, 10), (True, 20)]


def test_a_done_range_needs_no_lease_and_no_record(site: Site) -> None:
    """A done range gets no heartbeat, is not lost when its lease ends, and is left without a record."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)}, plans=True)
    member.commit({0: 10})
    member.commit({0: 10})
    sent = messages_sent_by(site, member.member.instance)
    assert sent.count("RangeDone") == 1
    site.clock.advance(HI_MS)
    member.beat()
    member.commit({1: 10})
    assert member.lease_left_ms() is None
    before = site.values()
    site.clock.advance(10 * HI_MS)

    member.check()
    member.beat()
    member.release()

    assert site.values() == before
    assert site.values()[-2].startswith("RangeHeartbeat/")
    assert not member.claims


@pytest.mark.parametrize("end", [9, 11])
def test_only_the_end_of_a_plan_is_committed(site: Site, end: int) -> None:
    """A commit that is not at the end of a plan is rejected, and no record is sent."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    unplanned = site.holder_of({1: (5, 10)})
    before = site.values()

    with pytest.raises(CommitFailedError, match="no plan ends at the offset"):
        member.commit({0: end})
    with pytest.raises(CommitFailedError, match="no plan ends at the offset"):
        unplanned.commit({1: 10})
    assert site.values() == before


def test_a_commit_without_acknowledgement_is_settled_by_reading(site: Site) -> None:
    """A commit that is in the log is valid and not sent again, at the group's offset and after it."""
    member = site.holder_of({0: (5, 10), 1: (7, 10)}, plans=True)
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeDone"))
    began_ms = site.clock.lease_ms()

    member.commit({0: 10, 1: 10})

    assert site.clock.lease_ms() == began_ms
    assert (site.key(0).offset, site.ranges(1)) == (10, [(7, 10, "done")])
    assert messages_sent_by(site, member.member.instance).count("RangeDone") == 2
    member.check()


def test_a_commit_without_acknowledgement_is_found_as_part_of_what_is_done(site: Site) -> None:
    """The committed range is found even if the done range was merged with its neighbours."""
    below, member = site.holder_of({0: (7, 10)}, plans=True), site.holder_of({0: (10, 20)}, plans=True)
    above = site.holder_of({0: (20, 30)}, plans=True)
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeDone"))

    def neighbours_are_done() -> None:
        faulty(member).after_append = lambda: None
        below.commit({0: 10})
        above.commit({0: 30})

    faulty(member).after_append = neighbours_are_done
    member.commit({0: 20})

    assert site.ranges() == [(7, 30, "done")]


def test_a_commit_that_did_not_arrive_is_sent_again(site: Site) -> None:
    """A commit that is not found in the log is sent again."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"), times=3)

    member.commit({0: 10})

    assert site.key().offset == 10


def test_a_commit_that_was_overtaken_by_an_earlier_try_counts(site: Site) -> None:
    """If the first attempt arrives late, just before the second, the refusal of the second is not a loss."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    log = faulty(member)
    log.fail(Fault.LATE, of_type("RangeDone"), times=1)
    log.before_append = log.arrive

    member.commit({0: 10})

    assert site.key().offset == 10
    assert messages_sent_by(site, member.member.instance).count("RangeDone") == 2
    member.check()


def test_a_heartbeat_after_a_commit_that_came_late_is_no_loss(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that is refused because an earlier commit arrived just before it is not a loss."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    log = faulty(member)
    log.fail(Fault.LATE, of_type("RangeDone"), times=1)

    def another_thread_beats(_: float) -> None:
        log.before_append = log.arrive
        member.beat()

    monkeypatch.setattr(member.clock, "sleep_ms", another_thread_beats)
    member.commit({0: 10})

    assert messages_sent_by(site, member.member.instance)[-2:] == ["RangeDone", "RangeHeartbeat"]


def test_a_heartbeat_finds_a_commit_that_was_interrupted(site: Site) -> None:
    """The result of an interrupted commit is read before the next heartbeat. A done range gets no heartbeat."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).after_append = raiser(InterruptError())
    with pytest.raises(InterruptError):
        member.commit({0: 10})
    faulty(member).recover()

    member.beat()

    assert member.claims[0].is_done
    assert messages_sent_by(site, member.member.instance)[-1] == "RangeDone"


def test_a_commit_that_did_not_arrive_before_another_took_over_is_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another member holds the range before the commit arrives, the range is lost."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"))
    successor = site.range_claimer()
    monkeypatch.setattr(member.clock, "sleep_ms", lambda _: successor.claim({0: (5, 10)}, is_dead=lambda _: True))

    with pytest.raises(ClaimLostError, match=successor.member.instance):
        member.commit({0: 10})


def test_done_in_another_generation_is_not_committed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a position was set meanwhile, an offset after the range's end does not prove the commit."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    log = faulty(member)
    log.fail(Fault.FAILED, of_type("RangeDone"))

    def person_sets_the_position(_: float) -> None:
        site.say(about(RevokingRange, "ops.1", epoch=epoch_of(member)))
        site.pause(60, instance="ops.7")
        ops = site.claimer(settings=RANGES, instance="ops.7")
        ops.claim([0])
        assert ops.set_positions({0: 50}, TOPIC_ID) == {0}

    monkeypatch.setattr(member.clock, "sleep_ms", person_sets_the_position)
    with pytest.raises(ClaimLostError):
        member.commit({0: 10})
    assert not any(claim.is_done for claim in member.claims.values())


def test_what_another_has_done_is_not_ones_own_commit(site: Site) -> None:
    """A commit that was acknowledged and refused is a loss, even if the next owner has done the range."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    successor = site.range_claimer()
    successor.claim({0: (5, 10)}, is_dead=lambda _: True)
    successor.commit({0: 10})

    with pytest.raises(ClaimLostError, match="its commit was refused: the claim of that epoch is over"):
        member.commit({0: 10})


def test_a_stale_owner_that_nobody_replaced_commits(site: Site) -> None:
    """Within its lease a member commits, even if it is stale in the log by then."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).before_append = lambda: site.clock.advance(2 * HI_MS + 1)

    member.commit({0: 10})

    assert site.key().offset == 10


def test_a_commit_is_tried_until_the_lease_ends(site: Site) -> None:
    """Without a broker a commit is retried, with pauses, until the lease ends. Then the range is lost."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    began_ms = site.clock.lease_ms()
    faulty(member).is_down = True

    with pytest.raises(ClaimLostError, match="lease ended"):
        member.commit({0: 10})

    assert 1.5 * HI_MS < site.clock.lease_ms() - began_ms < 2 * HI_MS


def test_nothing_is_sent_before_an_ambiguous_commit_is_settled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the result of a commit has been read, no heartbeat is sent."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    log = faulty(member)
    log.is_down = True
    sent_at_first: list[int] = []

    def another_thread_beats(_: float) -> None:
        sent_at_first.append(len(log.seen))
        with pytest.raises(UnavailableError):
            member.beat()
        if len(sent_at_first) == 3:
            log.recover()

    monkeypatch.setattr(member.clock, "sleep_ms", another_thread_beats)
    member.commit({0: 10})

    assert sent_at_first == [sent_at_first[0]] * 3


def test_commit_is_not_for_at_most_once() -> None:
    """In at-most-once mode a commit after processing is rejected, because reading alone proves no commit."""
    site = Site()
    site.begin(0, settings=AT_MOST_ONCE)
    member = site.holder_of({0: (0, 10)}, settings=AT_MOST_ONCE, plans=True)

    with pytest.raises(ConfigurationError, match="at_most_once"):
        member.commit({0: 10})


# At most once


@pytest.fixture
def once() -> Site:
    """Return an at-most-once group with two partitions at offset 5."""
    site = Site()
    site.begin(0, 1, settings=AT_MOST_ONCE, at=5)
    return site


def test_the_permission_to_process_comes_with_ones_own_commit(once: Site) -> None:
    """Ranges may be processed if the member's own record committed them. They need no lease any more."""
    member = once.holder_of({0: (5, 10), 1: (7, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).after_append = lambda: once.clock.advance(3 * HI_MS)

    assert member.commit_before_processing({0: 10, 1: 10}) == {0, 1}
    member.check([0, 1])


def test_no_permission_without_acknowledgement(once: Site) -> None:
    """A commit without an acknowledgement never gives permission to process, even though the range is done."""
    member = once.holder_of({0: (5, 10), 1: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeDone", partition=1))

    assert member.commit_before_processing({0: 10, 1: 10}) == {0}
    assert once.key(1).offset == 10
    with pytest.raises(PlanRejectedError):
        member.commit_before_processing({1: 10})
    member.beat()
    member.check([0])


def test_no_permission_for_what_a_twin_has_done(once: Site) -> None:
    """If another process with the same instance id committed first, the member's own record gives no permission."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    twin = about(RangeDone, member.member.instance, epoch=epoch_of(member))

    def twin_is_faster() -> None:
        once.say(twin)

    faulty(member).before_append = twin_is_faster

    assert member.commit_before_processing({0: 10}) == frozenset()


def test_no_permission_beside_a_go_consumer(once: Site) -> None:
    """A member that finds a Go consumer in the group stops with an error, although its ranges are committed."""
    foreign = once.owner_of(2, settings=AT_MOST_ONCE)
    member = once.holder_of({0: (5, 10), 1: (5, 10)}, settings=AT_MOST_ONCE, plans=True)

    def go_consumer_commits() -> None:
        once.say(about(Heartbeat, foreign.member.instance, partition=2, offset=9))

    faulty(member).after_append = go_consumer_commits

    with pytest.raises(ClaimLostError, match="moved the offset of orders/2 without a plan"):
        member.commit_before_processing({0: 10, 1: 10})
    assert member.claims == {}
    assert [once.key(partition).offset for partition in (0, 1)] == [10, 10]


def test_no_permission_without_a_plan(once: Site) -> None:
    """Only a planned range can be committed before processing."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE)
    before = once.values()

    with pytest.raises(PlanRejectedError, match="plan"):
        member.commit_before_processing({0: 10})
    assert once.values() == before


def test_what_was_committed_for_nothing_can_be_taken_by_another(once: Site) -> None:
    """A commit that did not reach the log gives no permission. Its range stays planned, for another member."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"))

    assert member.commit_before_processing({0: 10}) == frozenset()
    member.release()

    successor = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE)
    assert successor.commit_before_processing({0: 10}) == {0}


# Releases


def test_what_is_released_is_free_at_once(site: Site) -> None:
    """A released range that was only claimed is gone, a planned one has no owner, and a done one stays done."""
    member = site.holder_of({0: (5, 10)})
    planner = site.holder_of({0: (10, 20)}, plans=True)
    doer = site.holder_of({0: (20, 30)}, plans=True)
    doer.commit({0: 30})

    for one in (member, planner, doer):
        one.release()

    assert site.ranges() == [(10, 20, "planned"), (20, 30, "done")]
    assert all(range_.owner is None for range_ in site.key().ranges)
    assert messages_sent_by(site, doer.member.instance)[-1] == "RangeDone"


def test_what_is_named_is_released(site: Site) -> None:
    """A release of some partitions sends a record for each that is held, and keeps the others."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})

    member.release([0, 0, 7])

    assert list(member.claims) == [1]
    assert messages_sent_by(site, member.member.instance).count("ReleasingRange") == 1


def test_a_release_never_raises(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A failed release logs a warning. The range becomes stale by itself."""
    member = site.holder_of({0: (5, 10)})
    faulty(member).before_append = raiser(RuntimeError("a client that broke"))

    with caplog.at_level(logging.WARNING):
        member.release()

    assert "go stale" in caplog.text
    assert not member.claims


def test_a_release_in_a_paused_group_gives_up(site: Site) -> None:
    """In a paused group a member may still commit its plan and release its ranges."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)}, plans=True)
    site.pause(60)

    member.commit({0: 10})
    member.release()

    assert site.key(0).offset == 10
    assert site.key(1).ranges[0].owner is None


def test_a_late_plan_after_the_release_changes_nothing(site: Site) -> None:
    """A plan of a member that released its range is refused, because its epoch is over."""
    member = site.holder_of({0: (5, 10)})
    epoch = epoch_of(member)
    member.release()
    site.say(about(PlanningRange, member.member.instance, epoch=epoch, end=10))

    assert site.ranges() == []


# A truncated or re-created log


@pytest.mark.parametrize(
    "change",
    [
        lambda site: site.broker.truncate(site.home, 1),
        lambda site: site.broker.recreate(),
        lambda site: site.broker.recreate(partitions=7),
    ],
    ids=["truncated", "re-created", "repartitioned"],
)
def test_a_log_that_changed_ends_every_claim(site: Site, change: Callable[[Site], None]) -> None:
    """If the log was replaced or truncated, each step fails with a clear error.

    All claims end, even done ones, and no further record is sent.
    """
    member = site.holder_of({0: (5, 10), 1: (5, 10)}, plans=True)
    member.commit({1: 10})
    change(site)

    with pytest.raises(CoordinationLogChangedError):
        member.beat()
    before = [site.broker.records(number) for number in range(site.broker.identity.partitions)]
    with pytest.raises(ClaimLostError, match=r"re-created|truncated"):
        member.check([0])
    member.release()

    assert not member.claims
    assert [site.broker.records(number) for number in range(site.broker.identity.partitions)] == before


def test_no_permission_from_a_log_that_changed(once: Site) -> None:
    """A commit that a re-created log acknowledged raises an error, so that its results are dropped.

    This holds even if the new log is longer than the old one was.
    """
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    once.broker.recreate()
    for _ in range(100):
        once.broker.append(once.home, b"anything")

    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created"):
        member.commit_before_processing({0: 10})


# A log that can only be observed


def test_a_range_that_retention_overtakes_is_none(site: Site) -> None:
    """If the log can only be observed when the claim is read back, the range is not won."""
    log = site.log()
    member = site.range_claimer(log=log)
    log.before_append = site.overtake
    with pytest.raises(IncompleteLogError):
        member.claim({0: (5, 9)})
    assert not member.claims


@pytest.mark.parametrize("mode", [DeliveryMode.AT_LEAST_ONCE, DeliveryMode.AT_MOST_ONCE])
def test_what_is_only_observed_is_no_answer(mode: DeliveryMode) -> None:
    """A member that retention overtakes reads on from a later offset, where every record seems accepted."""
    site, settings = Site(), replace(RANGES, delivery=mode)
    site.begin(0, settings=settings, at=5)
    member = site.holder_of({0: (5, 8)}, settings=settings, plans=True)
    site.overtake()

    with pytest.raises(ClaimLostError, match="can only be observed"):
        (member.commit if mode is DeliveryMode.AT_LEAST_ONCE else member.commit_before_processing)({0: 8})
    assert not member.claims


def test_who_gives_up_a_range_of_a_log_that_is_truncated_holds_none(site: Site) -> None:
    """A release raises nothing. If it finds a truncated log, all claims end."""
    log = site.log()
    member = site.range_claimer(log=log)
    assert len(member.claim({0: (5, 9), 1: (5, 9)})) == 2
    log.after_append = lambda: site.broker.truncate(site.home, 1)

    member.release([0])

    assert not member.claims


def test_of_a_log_that_is_only_observed_no_range_was_seen_revoked(site: Site) -> None:
    """In a log that can only be observed every revocation seems accepted, even of an epoch that never existed."""
    log = site.log()
    member = site.range_claimer(log=log)
    log.before_append = site.overtake

    assert member.revoke([(0, 9_999)]) == frozenset()
