"""How a claimer holds ranges of partitions, plans, commits and leaves (protocol.md, section 8.4).

On a log in memory whose faults a test chooses.
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
    """A group that enables ranges, with two partitions at offset 5."""
    site = Site()
    site.begin(0, 1, at=5)
    return site


def epoch_of(member: RangeClaimer, partition: int = 0) -> int:
    """Give the epoch of what a member holds."""
    return member.claims[partition].epoch


# Who claims


@pytest.mark.parametrize("settings", [SETTINGS, GroupSettings(60_000, RuleSet.GO, features=("ranges",))])
def test_ranges_are_claimed_where_the_settings_enable_them(settings: GroupSettings) -> None:
    """A claimer of ranges does not begin under settings that do not enable them."""
    with pytest.raises(ConfigurationError, match="ranges"):
        Site().range_claimer(settings=settings)


def test_a_group_without_ranges_is_left_alone() -> None:
    """Where the settings in force do not enable ranges, a member that would claim them is told so and claims none."""
    site = Site()
    site.begin(0, settings=SETTINGS)

    with pytest.raises(SettingsMismatchError, match="ranges"):
        site.range_claimer()


def test_the_first_member_may_give_the_group_its_settings() -> None:
    """A group without settings gets those of the first member that would claim ranges."""
    site = Site()

    site.range_claimer()

    assert site.world().group_of("etl", "orders").settings == RANGES


# Claiming


def test_many_ranges_are_claimed_with_one_append(site: Site) -> None:
    """One range of each partition is asked for, all at once, and all that were free are won."""
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
    """Each member holds its own range of a partition, by the log offset of its own record."""
    first, second = site.holder_of({0: (5, 10)}), site.holder_of({0: (10, 20)})

    first.check([0])
    second.check([0])
    assert site.ranges() == [(5, 10, "claimed"), (10, 20, "claimed")]
    assert [range_.owner.epoch for range_ in site.key().ranges if range_.owner] == [epoch_of(first), epoch_of(second)]


def test_what_overlaps_another_range_is_not_won(site: Site) -> None:
    """A range of which another member holds a part is not won; the others of the same append are."""
    site.holder_of({0: (5, 10)})
    member = site.range_claimer()

    assert [claim.partition for claim in member.claim({0: (9, 12), 1: (5, 10)})] == [1]
    assert list(member.claims) == [1]


def test_a_range_whose_owner_is_stale_is_taken(site: Site) -> None:
    """What a member merely claimed is free once it was silent for more than two intervals."""
    site.holder_of({0: (5, 10)})
    site.clock.advance(2 * HI_MS)
    assert site.range_claimer().claim({0: (5, 7)}) == []

    site.clock.advance(1)

    assert len(site.range_claimer().claim({0: (5, 7)})) == 1


def test_a_planned_range_is_taken_over_exactly(site: Site) -> None:
    """A planned range without live owner is won as it is, with its plan and one attempt more."""
    site.holder_of({0: (5, 10)}, plans=True).release()
    assert site.range_claimer().claim({0: (5, 9)}) == []
    member = site.range_claimer()

    (claim,) = member.claim({0: (5, 10)})

    assert (claim.start, claim.end, claim.plan_end, claim.attempts) == (5, 10, 10, 1)


def test_a_twin_with_the_same_instance_id_is_not_mistaken_for_oneself(site: Site) -> None:
    """A range is won only by the record that this very process appended, known by its log offset."""
    twin, member = site.range_claimer(instance="run.same"), site.range_claimer(instance="run.same")
    twin.claim({0: (5, 10)})

    assert member.claim({0: (5, 10)}) == []


def test_a_partition_is_asked_for_once_in_a_tenure(site: Site) -> None:
    """An instance asks for one range of a partition, however often it is asked to, also after it has released it."""
    member = site.range_claimer()
    member.claim({0: (5, 10)})
    member.claim({0: (10, 20)})
    member.release()

    assert member.claim({0: (20, 30)}) == []
    assert member.choose({0: 100}, 10) == {}
    assert messages_sent_by(site, member.member.instance).count("ClaimingRange") == 1


def test_what_was_refused_may_be_asked_for_again(site: Site) -> None:
    """Another was faster: what lies behind its range is asked for, by the same instance."""
    member, rival = site.range_claimer(), site.range_claimer()
    rival.claim({0: (5, 10)})

    assert member.claim({0: (5, 10)}) == []
    assert member.choose({0: 20}, 10) == {0: (10, 20)}
    assert [(claim.start, claim.end) for claim in member.claim({0: (10, 20)})] == [(10, 20)]


def test_a_paused_group_is_not_claimed(site: Site) -> None:
    """While the group is paused nothing is claimed, and the error says until when and by whom."""
    member = site.range_claimer()
    site.pause(60)
    member.rationalizer.catch_up()

    with pytest.raises(GroupPausedError, match=r"ops\.1"):
        member.claim({0: (5, 10)})
    assert member.choose({0: 100}, 10) == {}
    assert messages_sent_by(site, member.member.instance) == []


def test_nobody_claims_from_a_log_that_is_only_observed(site: Site) -> None:
    """Where retention has cut the log a member neither agrees on settings nor claims."""
    member = site.range_claimer()
    for start in (5, 6):
        site.say(about(ClaimingRange, "other.1", start=start, end=start + 1))
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end - 1)

    with pytest.raises(IncompleteLogError, match="only be observed"):
        member.ensure_group_settings()
    with pytest.raises(IncompleteLogError, match="only be observed"):
        member.claim({0: (5, 10)})


def test_settings_that_change_while_a_claim_is_under_way_end_it(site: Site) -> None:
    """A range won under settings that changed before it was read back is released unused."""
    member = site.range_claimer()
    site.pause(60)
    site.say(settings_record(GroupSettings(20_000, features=("ranges",))))
    site.say(ReleaseGroup(instance="ops.1", client="ops", group="etl", time_s=0, expiry_s=0))

    with pytest.raises(SettingsMismatchError):
        member.claim({0: (5, 10)})

    assert site.ranges() == []
    assert not member.claims


def test_a_claim_without_acknowledgement_is_not_continued(site: Site) -> None:
    """What a claim without acknowledgement has won is revoked by its epoch, as another instance, and not held."""
    member = site.range_claimer()
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingRange", partition=1))

    won = member.claim({0: (5, 10), 1: (5, 10)})

    assert [claim.partition for claim in won] == [0]
    assert site.ranges(1) == []
    assert "RevokingRange" not in messages_sent_by(site, member.member.instance)
    assert any(value.startswith("RevokingRange/") for value in site.values())


def test_what_others_hold_is_not_revoked_with_it(site: Site) -> None:
    """A claim without acknowledgement that has won nothing takes nothing from others of the partition."""
    other = site.holder_of({0: (5, 10)})
    member = site.range_claimer()
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingRange"))

    member.claim({0: (5, 10)})
    member.release()

    other.beat()


def test_a_claim_that_arrives_late_is_revoked_on_leaving(site: Site) -> None:
    """A claim that reaches the log only after it was given up is looked for again when the member leaves."""
    member = site.range_claimer()
    faulty(member).fail(Fault.LATE, of_type("ClaimingRange", partition=1))
    member.claim({0: (5, 10), 1: (5, 10)})
    faulty(member).arrive()
    assert site.ranges(1) == [(5, 10, "claimed")]

    member.release()

    assert site.ranges(1) == []


def test_an_interrupted_claim_that_took_a_plan_over_leaves_it_free(site: Site) -> None:
    """A planned range that was taken over without being read back is given up on leaving, still planned."""
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
    """A claim that is interrupted anywhere is undone by the release that follows."""
    member = site.range_claimer()
    setattr(faulty(member), where, raiser(InterruptError()))
    with pytest.raises(InterruptError):
        member.claim({0: (5, 10), 1: (5, 10)})
    faulty(member).recover()

    member.release()

    assert site.ranges(0) == site.ranges(1) == []


# Who is dead


def test_ranges_of_the_dead_that_stand_in_the_way_are_revoked(site: Site) -> None:
    """What a dead owner holds of the wanted offsets is revoked by its epoch and won with the same append."""
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
    """A planned range of a dead owner is won exactly, though its owner is not stale yet."""
    dead = site.holder_of({0: (5, 10)}, plans=True)
    member = site.range_claimer()
    is_dead = partial(_is, dead)
    assert member.choose({0: 100}, 3) == {0: (10, 13)}

    wanted = member.choose({0: 100}, 3, is_dead=is_dead)
    (claim,) = member.claim(wanted, is_dead=is_dead)

    assert (claim.start, claim.end, claim.plan_end, claim.attempts) == (5, 10, 10, 1)


def test_a_dead_whole_owner_is_revoked(site: Site) -> None:
    """A partition that a dead owner holds whole is revoked, and a range of it is won with the same append."""
    dead = site.owner_of(0, settings=RANGES)
    member = site.range_claimer()
    is_dead = partial(_is, dead)
    assert member.choose({0: 100}, 3) == {}
    assert member.choose({0: 100}, 3, is_dead=is_dead) == {0: (5, 8)}

    assert len(member.claim({0: (5, 8)}, is_dead=is_dead)) == 1
    assert messages_sent_by(site, member.member.instance) == ["RevokingClaim", "ClaimingRange"]


def test_an_owner_is_judged_once_and_without_holding_others_up(site: Site) -> None:
    """Whether an owner is dead is asked once for all that it holds, while other threads go on reading."""
    site.holder_of({0: (5, 10), 1: (5, 10)})
    member = site.range_claimer()
    asked: list[Owner] = []

    def is_dead(owner: Owner) -> bool:
        asked.append(owner)
        free = threading.Thread(target=member.rationalizer.catch_up)
        free.start()
        free.join(5)
        assert not free.is_alive()
        return True

    member.claim({0: (5, 10), 1: (5, 10)}, is_dead=is_dead)

    assert len(asked) == 1


def test_revoke_tells_what_it_took(site: Site) -> None:
    """Ranges are taken by partition and epoch, and only those that are still of that epoch."""
    owner, other = site.holder_of({0: (5, 10), 1: (5, 10)}), site.holder_of({0: (10, 20)})
    member = site.range_claimer()
    held = [(0, epoch_of(owner)), (0, epoch_of(other)), (1, epoch_of(owner, 1) + 1)]

    assert member.revoke(held) == frozenset(held[:2])
    assert (site.ranges(0), site.ranges(1)) == ([], [(5, 10, "claimed")])


def _is(member: BaseClaimer[Any], owner: Owner) -> bool:
    return owner.instance == member.member.instance


# Staying


def test_heartbeats_keep_all_ranges_with_one_append(site: Site) -> None:
    """A member that beats once in each interval holds its ranges for as long as it likes."""
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
    """A lease runs from the sending of the last accepted record, not from when its acknowledgement came."""
    member = site.range_claimer()
    faulty(member).after_append = lambda: site.clock.advance(3_000)
    member.claim({0: (5, 10)})
    assert member.lease_left_ms() == LEASE_MS - 3_000

    member.beat()

    assert member.lease_left_ms() == LEASE_MS - 3_000


def test_a_heartbeat_without_acknowledgement_renews_no_lease(site: Site) -> None:
    """A heartbeat that is not known to be in the log is an error, and the lease runs on."""
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
    """Past its lease a member stops by itself, though nobody has taken the range, and purges what waits to be sent."""
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
    """With less of the lease left than a record may wait to be sent, none is sent, not even a release."""
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
    """A range whose heartbeat was not acknowledged is fenced when its lease ends; the other is held on."""
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
    """A heartbeat of who was revoked is refused, the error names who holds the range, and nothing more is sent."""
    member = site.holder_of({0: (5, 10)})
    successor = site.range_claimer()
    successor.claim({0: (5, 10)}, is_dead=lambda _: True)

    with pytest.raises(ClaimLostError, match=f"held by client '.*', instance '{successor.member.instance}'"):
        member.beat()
    before = site.values()
    member.release()

    assert site.values() == before
    successor.check([0])


def test_a_loss_is_told_before_the_broker_is_asked_anything_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows that its range is another's asks no broker, which may take long, before it stops the work."""
    member = site.holder_of({0: (5, 10)})
    site.range_claimer().claim({0: (5, 10)}, is_dead=lambda _: True)
    monkeypatch.setattr(member.rationalizer, "check_identity", raiser(AssertionError("the broker was asked")))

    with pytest.raises(ClaimLostError, match="its heartbeat was refused"):
        member.beat()


def test_who_holds_other_offsets_is_not_named(site: Site) -> None:
    """The error of who lost a range names who holds its offsets, not who holds others of the partition."""
    member, neighbour = site.holder_of({0: (5, 10)}), site.holder_of({0: (10, 20)})
    site.say(about(RevokingRange, "ops.1", epoch=epoch_of(member)))

    with pytest.raises(ClaimLostError, match="held by no instance") as lost:
        member.beat()
    assert neighbour.member.instance not in str(lost.value)


def test_heartbeats_of_threads_take_a_claimer_of_ranges(site: Site) -> None:
    """What keeps whole claims alive keeps ranges alive, and ends the work when one is lost."""
    member = site.holder_of({0: (5, 10)})
    errors: list[Exception] = []
    heartbeats = Heartbeats(member, errors.append, seed=1)
    site.clock.advance(HI_MS)
    heartbeats.step()
    assert messages_sent_by(site, member.member.instance).count("RangeHeartbeat") == 1

    site.clock.advance(LEASE_MS)
    heartbeats.watch()

    assert isinstance(errors[0], ClaimLostError)


# Planning


def test_a_plan_is_written_down_and_gives_up_what_lies_behind_it(site: Site) -> None:
    """A range that is planned shorter ends there, and others may have the rest."""
    member = site.holder_of({0: (5, 10)})

    member.plan({0: 7})

    claim = member.claims[0]
    assert (claim.start, claim.end, claim.plan_end) == (5, 7, 7)
    assert site.ranges() == [(5, 7, "planned")]
    assert len(site.range_claimer().claim({0: (7, 10)})) == 1


def test_what_was_planned_when_it_was_won_is_not_planned_again(site: Site) -> None:
    """A planned range that was taken over gets no record for the same end, and no other end."""
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
    """A plan that is empty or reaches beyond the range is refused with nothing sent."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})
    before = site.values()

    with pytest.raises(PlanRejectedError, match="orders/0"):
        member.plan({1: 10, 0: end})
    assert site.values() == before


def test_a_plan_in_a_paused_group_is_an_error(site: Site) -> None:
    """Nothing is planned while the group is paused."""
    member = site.holder_of({0: (5, 10)})
    site.pause(60)

    with pytest.raises(PlanRejectedError, match="paused"):
        member.plan({0: 10})


def test_a_plan_without_acknowledgement_is_found_by_reading(site: Site) -> None:
    """A plan that is in the log counts, though its acknowledgement was lost."""
    member = site.holder_of({0: (5, 10)})
    faulty(member).fail(Fault.LOST_ACK, of_type("PlanningRange"))

    member.plan({0: 8})

    assert member.claims[0].plan_end == 8


def test_what_lies_behind_a_plan_that_was_sent_is_not_counted_on(site: Site) -> None:
    """A plan that may come late leaves the member no offset behind its end: it cannot plan these any more."""
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


def test_planning_what_was_lost_tells_the_loss(site: Site) -> None:
    """A plan for a range that was revoked is told as a lost claim."""
    member = site.holder_of({0: (5, 10)})
    site.say(about(RevokingRange, "ops.1", epoch=epoch_of(member)))

    with pytest.raises(ClaimLostError):
        member.plan({0: 10})


# Committing


def test_a_commit_moves_the_offset_over_what_is_done_without_a_gap(site: Site) -> None:
    """Ranges are done in any order; the offset waits for the gap and then passes all of it."""
    first, second = site.holder_of({0: (5, 10)}, plans=True), site.holder_of({0: (10, 20)}, plans=True)

    second.commit({0: 20})
    assert (site.key().offset, site.ranges()) == (5, [(5, 10, "planned"), (10, 20, "done")])
    first.commit({0: 10})

    assert (site.key().offset, site.ranges()) == (20, [])
    assert [(one.claims[0].is_done, one.claims[0].offset) for one in (first, second)] == [(True, 10), (True, 20)]


def test_a_done_range_needs_no_lease_and_no_record(site: Site) -> None:
    """What is done gets no heartbeat, loses nothing when its time has passed, and is left without a record."""
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
    """A commit elsewhere than at the plan's end, or of what is not planned, is refused with nothing sent."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    unplanned = site.holder_of({1: (5, 10)})
    before = site.values()

    with pytest.raises(CommitFailedError, match="no plan ends at the offset"):
        member.commit({0: end})
    with pytest.raises(CommitFailedError, match="no plan ends at the offset"):
        unplanned.commit({1: 10})
    assert site.values() == before


def test_a_commit_without_acknowledgement_is_settled_by_reading(site: Site) -> None:
    """A commit that is in the log counts and is not sent again, at the offset and ahead of it."""
    member = site.holder_of({0: (5, 10), 1: (7, 10)}, plans=True)
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeDone"))
    began_ms = site.clock.lease_ms()

    member.commit({0: 10, 1: 10})

    assert site.clock.lease_ms() == began_ms
    assert (site.key(0).offset, site.ranges(1)) == (10, [(7, 10, "done")])
    assert messages_sent_by(site, member.member.instance).count("RangeDone") == 2
    member.check()


def test_a_commit_without_acknowledgement_is_found_as_part_of_what_is_done(site: Site) -> None:
    """A done range that has grown together with its neighbours covers the one that was committed."""
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
    """A commit that reading did not find is sent again."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"), times=3)

    member.commit({0: 10})

    assert site.key().offset == 10


def test_a_commit_that_was_overtaken_by_an_earlier_try_counts(site: Site) -> None:
    """When the first try arrives late, just before the second, the refusal of the second is no loss."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    log = faulty(member)
    log.fail(Fault.LATE, of_type("RangeDone"), times=1)
    log.before_append = log.arrive

    member.commit({0: 10})

    assert site.key().offset == 10
    assert messages_sent_by(site, member.member.instance).count("RangeDone") == 2
    member.check()


def test_a_heartbeat_after_a_commit_that_came_late_is_no_loss(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that is refused because an earlier commit arrived just before it loses nothing."""
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
    """What became of an interrupted commit is read before the next heartbeat: a range that is done gets none."""
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
    """A planned range that another holds by now is not done by one's own commit."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"))
    successor = site.range_claimer()
    monkeypatch.setattr(member.clock, "sleep_ms", lambda _: successor.claim({0: (5, 10)}, is_dead=lambda _: True))

    with pytest.raises(ClaimLostError, match=successor.member.instance):
        member.commit({0: 10})


def test_done_in_another_generation_is_not_committed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset past the range's end counts for nothing when a position was set meanwhile."""
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
    """A commit that was acknowledged and refused is a loss, though the range is done: by its next owner."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    successor = site.range_claimer()
    successor.claim({0: (5, 10)}, is_dead=lambda _: True)
    successor.commit({0: 10})

    with pytest.raises(ClaimLostError, match="its commit was refused: the claim of that epoch is over"):
        member.commit({0: 10})


def test_a_stale_owner_that_nobody_replaced_commits(site: Site) -> None:
    """Within its lease a member commits, though the log calls it stale by then."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    faulty(member).before_append = lambda: site.clock.advance(2 * HI_MS + 1)

    member.commit({0: 10})

    assert site.key().offset == 10


def test_a_commit_is_tried_until_the_lease_ends(site: Site) -> None:
    """Without a broker a commit is tried, with pauses, for as long as the lease lasts; then the range is lost."""
    member = site.holder_of({0: (5, 10)}, plans=True)
    began_ms = site.clock.lease_ms()
    faulty(member).is_down = True

    with pytest.raises(ClaimLostError, match="lease ended"):
        member.commit({0: 10})

    assert 1.5 * HI_MS < site.clock.lease_ms() - began_ms < 2 * HI_MS


def test_nothing_is_sent_before_an_ambiguous_commit_is_settled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a commit is not settled by reading, no heartbeat follows it."""
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
    """In at most once nothing counts as committed by reading alone: the commit after processing is refused."""
    site = Site()
    site.begin(0, settings=AT_MOST_ONCE)
    member = site.holder_of({0: (0, 10)}, settings=AT_MOST_ONCE, plans=True)

    with pytest.raises(ConfigurationError, match="at_most_once"):
        member.commit({0: 10})


# At most once


@pytest.fixture
def once() -> Site:
    """A group that delivers at most once, with two partitions at offset 5."""
    site = Site()
    site.begin(0, 1, settings=AT_MOST_ONCE, at=5)
    return site


def test_the_permission_to_process_comes_with_ones_own_commit(once: Site) -> None:
    """Those ranges may be processed that one's own record has done; they need no lease any more."""
    member = once.holder_of({0: (5, 10), 1: (7, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).after_append = lambda: once.clock.advance(3 * HI_MS)

    assert member.commit_before_processing({0: 10, 1: 10}) == {0, 1}
    member.check([0, 1])


def test_no_permission_without_acknowledgement(once: Site) -> None:
    """A commit whose acknowledgement was lost gives no permission, now and when asked again, though it is done."""
    member = once.holder_of({0: (5, 10), 1: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).fail(Fault.LOST_ACK, of_type("RangeDone", partition=1))

    assert member.commit_before_processing({0: 10, 1: 10}) == {0}
    assert once.key(1).offset == 10
    with pytest.raises(PlanRejectedError):
        member.commit_before_processing({1: 10})
    member.beat()
    member.check([0])


def test_no_permission_for_what_a_twin_has_done(once: Site) -> None:
    """When a twin's record was the accepted one, one's own gives no permission."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    twin = about(RangeDone, member.member.instance, epoch=epoch_of(member))

    def twin_is_faster() -> None:
        once.say(twin)

    faulty(member).before_append = twin_is_faster

    assert member.commit_before_processing({0: 10}) == frozenset()


def test_no_permission_beside_a_go_consumer(once: Site) -> None:
    """What is done is committed, but who reads that a Go consumer is in the group stops, and tells so."""
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
    """Nothing is committed before processing but a plan, at its end."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE)
    before = once.values()

    with pytest.raises(PlanRejectedError, match="plan"):
        member.commit_before_processing({0: 10})
    assert once.values() == before


def test_what_was_committed_for_nothing_can_be_taken_by_another(once: Site) -> None:
    """A commit that did not reach the log gives no permission, and its range is left for others, planned."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    faulty(member).fail(Fault.FAILED, of_type("RangeDone"))

    assert member.commit_before_processing({0: 10}) == frozenset()
    member.release()

    successor = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE)
    assert successor.commit_before_processing({0: 10}) == {0}


# Leaving


def test_what_is_released_is_free_at_once(site: Site) -> None:
    """A claimed range is gone, a planned one has no owner, a done one stays done."""
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
    """A release of some sends a record for each that is held, and leaves the others alone."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)})

    member.release([0, 0, 7])

    assert list(member.claims) == [1]
    assert messages_sent_by(site, member.member.instance).count("ReleasingRange") == 1


def test_a_release_never_raises(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A release that fails is a line in the log; the range goes stale by itself."""
    member = site.holder_of({0: (5, 10)})
    faulty(member).before_append = raiser(RuntimeError("a client that broke"))

    with caplog.at_level(logging.WARNING):
        member.release()

    assert "go stale" in caplog.text
    assert not member.claims


def test_a_release_in_a_paused_group_gives_up(site: Site) -> None:
    """A pause keeps nobody from committing what is planned, nor from leaving."""
    member = site.holder_of({0: (5, 10), 1: (5, 10)}, plans=True)
    site.pause(60)

    member.commit({0: 10})
    member.release()

    assert site.key(0).offset == 10
    assert site.key(1).ranges[0].owner is None


def test_a_late_plan_after_the_release_changes_nothing(site: Site) -> None:
    """A plan of who released the range is refused: its epoch is over."""
    member = site.holder_of({0: (5, 10)})
    epoch = epoch_of(member)
    member.release()
    site.say(about(PlanningRange, member.member.instance, epoch=epoch, end=10))

    assert site.ranges() == []


# A log that is not the one read before


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
    """When the log is another one, each step fails clearly, all is over, done or not, and nothing more is sent."""
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
    """A commit that was acknowledged by a log made anew, long by now, raises: all of it must be dropped."""
    member = once.holder_of({0: (5, 10)}, settings=AT_MOST_ONCE, plans=True)
    once.broker.recreate()
    for _ in range(100):
        once.broker.append(once.home, b"anything")

    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created"):
        member.commit_before_processing({0: 10})


# A log that can only be observed


def test_a_range_that_retention_overtakes_is_none(site: Site) -> None:
    """Who can only observe by the time that its claim is read back has won nothing."""
    log = site.log()
    member = site.range_claimer(log=log)
    log.before_append = site.overtake
    with pytest.raises(IncompleteLogError):
        member.claim({0: (5, 9)})
    assert not member.claims


@pytest.mark.parametrize("mode", [DeliveryMode.AT_LEAST_ONCE, DeliveryMode.AT_MOST_ONCE])
def test_what_is_only_observed_is_no_answer(mode: DeliveryMode) -> None:
    """Retention overtakes a member: it reads on in the middle, where everything looks accepted."""
    site, settings = Site(), replace(RANGES, delivery=mode)
    site.begin(0, settings=settings, at=5)
    member = site.holder_of({0: (5, 8)}, settings=settings, plans=True)
    site.overtake()

    with pytest.raises(ClaimLostError, match="can only be observed"):
        (member.commit if mode is DeliveryMode.AT_LEAST_ONCE else member.commit_before_processing)({0: 8})
    assert not member.claims


def test_who_gives_up_a_range_of_a_log_that_is_truncated_holds_none(site: Site) -> None:
    """A release raises nothing; what it learns ends the claims all the same."""
    log = site.log()
    member = site.range_claimer(log=log)
    assert len(member.claim({0: (5, 9), 1: (5, 9)})) == 2
    log.after_append = lambda: site.broker.truncate(site.home, 1)

    member.release([0])

    assert not member.claims


def test_of_a_log_that_is_only_observed_no_range_was_seen_revoked(site: Site) -> None:
    """There every revocation looks accepted, also one of an epoch that never was."""
    log = site.log()
    member = site.range_claimer(log=log)
    log.before_append = site.overtake

    assert member.revoke([(0, 9_999)]) == frozenset()
