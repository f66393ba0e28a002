"""How a claimer keeps its claims, plans, commits and releases (protocol.md, section 6).

The log is in memory, and each test chooses its faults.
"""

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ClaimLostError,
    CommitFailedError,
    ConfigurationError,
    PlanRejectedError,
    UnavailableError,
)
from marshal_dagster.protocol import world
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    ClaimingMessages,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    RevokingClaim,
    RevokingRange,
    RuleSet,
)
from tests.conditions import WITHIN_S
from tests.faulty_log import Fault, InterruptError, of_type
from tests.members import (
    HI_MS,
    SETTINGS,
    TOPIC,
    Site,
    about,
    faulty,
    messages_sent_by,
    raiser,
)

if TYPE_CHECKING:
    from marshal_dagster.coordination.base_claimer import BaseClaimer

RUN = "5b1c0d3e-8f6a-4e62-9d2c-1f0a7b3c4d5e"
AT_MOST_ONCE = GroupSettings(HI_MS, RuleSet.NATIVE, DeliveryMode.AT_MOST_ONCE)


@pytest.fixture
def site() -> Site:
    """An empty coordination topic."""
    return Site()


# Heartbeats and leases


def test_a_heartbeat_keeps_the_claim(site: Site) -> None:
    """A member that sends one heartbeat per interval keeps its claim."""
    member = site.owner_of(0)

    for _ in range(10):
        site.clock.advance(HI_MS)
        member.beat()

    member.check([0])
    assert site.member().claim([0]) == []


def test_a_heartbeat_carries_the_offset_where_the_key_stands(site: Site) -> None:
    """Heartbeats before a commit carry the state's offset; a partition without an offset waits for its start."""
    member = site.member()
    member.claim([0, 1])
    member.beat()
    assert "Heartbeat" not in messages_sent_by(site, member.member.instance)

    member.beat({0: 7})
    member.beat()

    assert site.key(0).offset == 7
    assert site.key(1).offset is None


def test_a_start_moves_no_offset_that_is_known(site: Site) -> None:
    """A start is ignored if the partition has an offset, because it would commit unprocessed messages."""
    member = site.owner_of(0)

    member.beat({0: 50})

    assert site.key().offset == 0


def test_no_heartbeat_for_what_is_not_held(site: Site) -> None:
    """A start for a partition that was released is an error, and nothing is sent for it."""
    member = site.owner_of(0, 1)
    member.release([1])
    before = site.values()

    with pytest.raises(ClaimLostError, match="orders/1"):
        member.beat({1: 0})
    assert site.values() == before


def test_a_lost_lease_is_not_reported_as_held_by_oneself(site: Site) -> None:
    """After its lease a member holds nothing, even while the log still shows it as owner."""
    member = site.owner_of(0)
    site.clock.advance(2 * HI_MS)
    with pytest.raises(ClaimLostError) as lost:
        member.check([0])
    assert "its lease ended" in str(lost.value)
    assert "the log as last read still shows this same instance as owner, until the claim is stale" in str(lost.value)
    assert "held by" not in str(lost.value)

    site.clock.advance(1)
    successor = site.owner_of(0)
    member.rationalizer.catch_up()
    with pytest.raises(ClaimLostError, match=f"held by client '.*', instance '{successor.member.instance}'"):
        member.check([0])


def test_the_lease_counts_from_sending(site: Site) -> None:
    """A lease starts when the last accepted heartbeat was sent, not when it was acknowledged."""
    member = site.owner_of(0)
    site.clock.advance(1_000)
    faulty(member).after_append = lambda: site.clock.advance(3_000)

    member.beat()

    assert member.lease_left_ms() == 2 * HI_MS - HI_MS / 10 - 3_000


def test_a_heartbeat_without_acknowledgement_renews_no_lease(site: Site) -> None:
    """A heartbeat without an acknowledgement is an error, and the lease is not renewed."""
    member = site.owner_of(0)
    site.clock.advance(HI_MS)
    before = member.lease_left_ms()
    faulty(member).fail(Fault.LOST_ACK, of_type("Heartbeat"))

    with pytest.raises(CommitFailedError, match="The leases continue"):
        member.beat()

    assert member.lease_left_ms() == before
    member.check([0])


def test_a_member_whose_lease_ended_sends_nothing_more(site: Site) -> None:
    """After its lease a member stops by itself and purges its send queue, even if no other has claimed."""
    member = site.owner_of(0)
    site.clock.advance(2 * HI_MS - HI_MS / 10)
    before = site.values()

    for step in (member.beat, member.check, partial(member.commit, {0: 5}), partial(member.plan, {0: 5})):
        with pytest.raises(ClaimLostError, match="lease ended"):
            step()
    member.release()

    assert site.values() == before
    assert faulty(member).purged


def test_nothing_is_sent_that_could_arrive_after_the_lease(site: Site) -> None:
    """If less of the lease is left than a record may wait to be sent, nothing is sent."""
    member = site.owner_of(0)
    site.clock.advance(2 * HI_MS - HI_MS / 10 - HI_MS / 4 - 1)
    member.check([0])
    site.clock.advance(1)
    before = site.values()

    with pytest.raises(ClaimLostError):
        member.beat()
    assert site.values() == before


def test_a_member_fences_itself_while_the_broker_is_down(site: Site) -> None:
    """Without a broker the lease is not renewed, and the member stops when it ends."""
    member = site.owner_of(0)
    faulty(member).is_down = True
    site.clock.advance(HI_MS)
    with pytest.raises((CommitFailedError, UnavailableError)):
        member.beat()
    member.check([0])

    site.clock.advance(HI_MS)

    with pytest.raises(ClaimLostError, match="lease ended"):
        member.check([0])


def test_the_error_of_a_lost_claim_names_its_owner(site: Site) -> None:
    """The heartbeat of a member that was replaced is refused, and the error names the new owner."""
    member = site.owner_of(0)
    successor = site.member()
    successor.claim([0], is_dead=lambda _: True)

    with pytest.raises(ClaimLostError, match=successor.member.instance):
        member.beat()
    with pytest.raises(ClaimLostError):
        member.commit({0: 10})
    member.release()

    assert site.owner(0) == successor.member.instance


def test_a_loss_is_reported_before_any_other_request_to_the_broker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that knows its claim is lost stops before any further request, which could take long."""
    member = site.owner_of(0)
    site.member().claim([0], is_dead=lambda _: True)
    monkeypatch.setattr(member.rationalizer, "check_identity", raiser(AssertionError("the broker was asked")))

    with pytest.raises(ClaimLostError, match="its heartbeat was refused"):
        member.beat()


@pytest.mark.parametrize("is_read_first", [True, False])
@pytest.mark.parametrize(
    ("instance", "text"),
    [
        ("revoking.0", r"an operator \(run 5b1c0d3e\) revoked it"),
        ("setting-positions.0", r"an operator \(run 5b1c0d3e\) revoked it"),
        (f"revoking-{RUN}.0", "a run-failure sensor revoked it, because Dagster reported that its run had ended"),
        (f"{RUN}.0", f"client '{RUN}', instance '{RUN}.0', revoked it, because it considered its run dead"),
    ],
)
@pytest.mark.parametrize("by_range", [False, True])
def test_a_loss_names_who_revoked_the_claim(
    site: Site, instance: str, text: str, by_range: bool, is_read_first: bool
) -> None:
    """A revocation is named whether the member reads it first or its heartbeat is refused."""
    if by_range:
        site.begin(0)
    member: BaseClaimer[Any] = site.holder_of({0: (5, 10)}) if by_range else site.owner_of(0)
    kind = RevokingRange if by_range else RevokingClaim
    site.say(replace(about(kind, instance, epoch=member.claims[0].epoch), client=RUN))
    refused = "" if is_read_first else "its heartbeat was refused: .*, because "

    if is_read_first:
        member.rationalizer.catch_up()

    with pytest.raises(ClaimLostError, match=f"{TOPIC}/0: {refused}{text}; "):
        member.check([0]) if is_read_first else member.beat()


@pytest.mark.parametrize("by_range", [False, True])
def test_a_loss_to_a_member_that_found_the_claim_stale_is_not_called_a_revocation(site: Site, by_range: bool) -> None:
    """Nothing revoked the claim: its owner was silent for too long."""
    if by_range:
        site.begin(0)
        member: BaseClaimer[Any] = site.holder_of({0: (5, 10)})
        successor: Any = site.range_claimer()
    else:
        member, successor = site.owner_of(0), site.member()
    site.clock.advance(2 * HI_MS + 1)
    assert successor.claim({0: (5, 10)} if by_range else [0])
    member.rationalizer.catch_up()

    with pytest.raises(ClaimLostError, match=f"{TOPIC}/0: it was stale and another member took it over; by the log"):
        member.check([0])


def test_a_reader_keeps_the_last_revocations_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped; a claim that was never revoked costs nothing."""
    monkeypatch.setattr(world, "MOST_REVOCATIONS", 2)
    member = site.owner_of(0, 1, 2)
    epochs = [member.claims[partition].epoch for partition in range(3)]
    assert site.world().partition_of(TOPIC).revocations == {}

    for partition, epoch in enumerate(epochs):
        site.say(about(RevokingClaim, "revoking.0", partition=partition, epoch=epoch))
    site.say(about(RevokingClaim, "revoking.0", partition=0, epoch=epochs[0]))

    assert list(site.world().partition_of(TOPIC).revocations) == epochs[1:], "a refused revocation is not kept"


def test_who_lost_one_claim_sends_nothing_more_for_it(site: Site) -> None:
    """An instance sends no further record for a lost partition; its other claims are released."""
    member = site.owner_of(0, 1)
    site.member().claim([0], is_dead=lambda _: True)
    with pytest.raises(ClaimLostError):
        member.beat()
    before = len(site.values())

    member.release()

    assert [value.split("/")[7] for value in site.values()[before:]] == ["1"]


def test_what_is_read_back_with_a_release_ends_other_claims_too(site: Site) -> None:
    """A member that reads of its displacement together with its own release sends nothing more: simulator seed 4837."""
    member = site.owner_of(0, 1, settings=WITHOUT_SETTINGS)
    site.say(about(Heartbeat, "go1", 1, offset=0))
    member.release([0])
    before = len(site.values())

    assert list(member.claims) == []
    with pytest.raises(ClaimLostError):
        member.plan({1: 5})

    assert len(site.values()) == before


def test_check_waits_for_nobody_that_waits_for_it(site: Site) -> None:
    """A thread that checks claims while it holds the state's lock does not block one that sends heartbeats."""
    member = site.owner_of(0)
    lock = member.rationalizer.lock

    def beat() -> None:
        for _ in range(200):
            member.beat()

    def look() -> None:
        for _ in range(2_000):
            with lock:
                member.check([0])

    threads = [threading.Thread(target=work, daemon=True) for work in (beat, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert not any(thread.is_alive() for thread in threads)


def test_the_lease_is_reported_without_waiting(site: Site) -> None:
    """The rest of the lease can be read while another thread waits for the broker."""
    member = site.owner_of(0)
    waiting, done = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        done.wait(20)

    faulty(member).before_append = wait
    thread = threading.Thread(target=member.beat)
    thread.start()
    waiting.wait(20)

    assert member.lease_left_ms() is not None
    done.set()
    thread.join()


# Planning


def test_a_plan_is_written_down(site: Site) -> None:
    """Once a plan was read back, both the log and the claim have it."""
    member = site.owner_of(0)

    member.plan({0: 10})

    assert member.claims[0].plan_end == site.key().plan_end == 10


def test_a_plan_that_the_log_refuses_is_an_error(site: Site) -> None:
    """An open plan is not replaced; the error reports it."""
    member = site.owner_of(0)
    member.plan({0: 10})

    with pytest.raises(PlanRejectedError, match="another plan is open"):
        member.plan({0: 20})


def test_a_plan_in_a_paused_group_is_an_error(site: Site) -> None:
    """Nothing is planned while the group is paused."""
    member = site.owner_of(0)
    site.pause(60)

    with pytest.raises(PlanRejectedError, match="paused"):
        member.plan({0: 10})


def test_a_plan_without_acknowledgement_is_found_by_reading(site: Site) -> None:
    """A plan in the log counts, even if its acknowledgement was lost."""
    member = site.owner_of(0)
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingMessages"))

    member.plan({0: 10})

    assert member.claims[0].plan_end == 10


def test_a_plan_that_is_not_in_the_log_is_an_error(site: Site) -> None:
    """A plan that did not reach the log is an error."""
    member = site.owner_of(0)
    faulty(member).fail(Fault.FAILED, of_type("ClaimingMessages"))

    with pytest.raises(PlanRejectedError, match="not acknowledged"):
        member.plan({0: 10})


def test_planning_what_was_lost_reports_the_loss(site: Site) -> None:
    """A plan for a partition that another member has claimed raises the loss of the claim."""
    member = site.owner_of(0)
    site.member().claim([0], is_dead=lambda _: True)

    with pytest.raises(ClaimLostError):
        member.plan({0: 10})


def test_the_next_owner_finds_the_plan_and_its_attempts(site: Site) -> None:
    """An open plan survives its owner, and each further claim counts as an attempt."""
    member = site.owner_of(0)
    member.plan({0: 10})
    member.release()

    (claim,) = site.member().claim([0])

    assert (claim.offset, claim.plan_end, claim.plan_attempts) == (0, 10, 1)


# Committing


def test_a_commit_is_seen_in_the_log(site: Site) -> None:
    """After a commit the state has the committed offset, and the plan is closed."""
    member = site.owner_of(0, 1)
    member.plan({0: 10, 1: 20})

    member.commit({0: 10, 1: 20})

    assert (site.key(0).offset, site.key(1).offset) == (10, 20)
    assert site.key(0).plan_end is None
    assert member.claims[1].offset == 20


def test_a_commit_without_acknowledgement_is_settled_by_reading(site: Site) -> None:
    """A commit that is in the log counts and is not sent again."""
    member = site.owner_of(0)
    member.plan({0: 10})
    faulty(member).fail(Fault.LOST_ACK, of_type("Heartbeat"))
    before = len(site.values())

    member.commit({0: 10})

    assert site.key().offset == 10
    assert len(site.values()) == before + 1


def test_a_commit_that_did_not_arrive_is_sent_again(site: Site) -> None:
    """A commit that is not found by reading is sent again."""
    member = site.owner_of(0)
    member.plan({0: 10})
    faulty(member).fail(Fault.FAILED, of_type("Heartbeat"), times=3)

    member.commit({0: 10})

    assert site.key().offset == 10


def test_a_commit_is_tried_until_the_lease_ends(site: Site) -> None:
    """Without a broker the commit is retried with pauses until the lease ends; then the claim is lost."""
    member = site.owner_of(0)
    member.plan({0: 10})
    began_ms = site.clock.lease_ms()
    faulty(member).is_down = True

    with pytest.raises(ClaimLostError, match="lease ended"):
        member.commit({0: 10})

    spent_ms = site.clock.lease_ms() - began_ms
    assert 1.5 * HI_MS < spent_ms < 2 * HI_MS
    assert len(faulty(member).seen) < 300
    assert site.key().offset == 0


def test_nothing_is_sent_before_an_ambiguous_commit_is_settled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading has not shown whether a commit is in the log, no heartbeat follows it."""
    member = site.owner_of(0)
    member.plan({0: 10})
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


def test_a_commit_that_comes_back_after_an_outage_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of unknown outcome is found when the broker is back, and not sent again."""
    member = site.owner_of(0)
    member.plan({0: 10})
    log = faulty(member)
    log.fail(Fault.LOST_ACK, of_type("Heartbeat"))
    log.after_append = lambda: setattr(log, "is_down", True)
    before = len(site.values())

    def back(duration_ms: float) -> None:
        site.clock.advance(duration_ms)
        log.recover()

    monkeypatch.setattr(member.clock, "sleep_ms", back)
    member.commit({0: 10})

    assert len(site.values()) == before + 1


def test_a_commit_of_who_was_replaced_is_an_error(site: Site) -> None:
    """A commit after a takeover changes nothing, and the error names the owner."""
    member = site.owner_of(0)
    member.plan({0: 10})
    successor = site.member()
    successor.claim([0], is_dead=lambda _: True)

    with pytest.raises(ClaimLostError, match=successor.member.instance):
        member.commit({0: 10})
    assert site.key().offset == 0


def test_what_was_seen_stays_committed(site: Site) -> None:
    """If one of several commits is refused, the others remain in the log."""
    member = site.owner_of(0, 1)
    member.plan({0: 10, 1: 10})
    site.member().claim([1], is_dead=lambda _: True)

    with pytest.raises(ClaimLostError, match="orders/1"):
        member.commit({0: 10, 1: 10})
    assert (site.key(0).offset, site.key(1).offset) == (10, 0)


def test_no_heartbeat_carries_less_than_an_earlier_one(site: Site) -> None:
    """A commit below an offset that this claim has sent before is refused."""
    member = site.owner_of(0)
    member.plan({0: 10})
    member.commit({0: 10})
    before = site.values()

    with pytest.raises(CommitFailedError, match="10"):
        member.commit({0: 5})

    assert site.values() == before


def test_a_commit_that_was_not_sent_is_not_carried_by_a_heartbeat(site: Site) -> None:
    """If a commit fails before it is sent because one claim is lost, no later heartbeat commits the others."""
    member = site.owner_of(0, 1)
    claim = member.claims[1]
    claim.lease = type(claim.lease)(HI_MS, claim.lease.sent_ms - 2 * HI_MS)

    with pytest.raises(ClaimLostError):
        member.commit({0: 10, 1: 10})

    assert member.claims[0].beat_offset == 0
    assert member.claims[0].highest_sent == 0


def test_a_heartbeat_after_an_ambiguous_commit_carries_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that may be in the log is never followed by a heartbeat with a lower offset."""
    member = site.owner_of(0)
    member.plan({0: 10})
    log = faulty(member)
    log.fail(Fault.LATE, of_type("Heartbeat"))

    class StopWorkError(Exception):
        """Leaves the commit before it is complete."""

    def leave(_: float) -> None:
        raise StopWorkError

    monkeypatch.setattr(member.clock, "sleep_ms", leave)
    with pytest.raises(StopWorkError):
        member.commit({0: 10})
    log.recover()

    member.beat()

    assert [value.split("/")[-1] for value in log.seen if value.startswith("Heartbeat")][-1] == "10"


def test_commit_is_not_for_at_most_once(site: Site) -> None:
    """At most once refuses the commit after processing, because there reading alone does not prove a commit."""
    member = site.owner_of(0, settings=AT_MOST_ONCE)

    with pytest.raises(ConfigurationError, match="at_most_once"):
        member.commit({0: 10})


# At most once


def test_the_permission_to_process_comes_with_ones_own_commit(site: Site) -> None:
    """A partition may be processed if the member's record moved its offset from the plan's start to its end."""
    member = site.owner_of(0, 1, settings=AT_MOST_ONCE)
    member.plan({0: 10, 1: 20})

    assert member.commit_before_processing({0: 10, 1: 20}) == {0, 1}
    assert (site.key(0).offset, site.key(1).offset) == (10, 20)


def test_no_permission_without_acknowledgement(site: Site) -> None:
    """A commit without an acknowledgement gives no permission, even if it is in the log."""
    member = site.owner_of(0, 1, settings=AT_MOST_ONCE)
    member.plan({0: 10, 1: 20})
    faulty(member).fail(Fault.LOST_ACK, of_type("Heartbeat", partition=1))

    assert member.commit_before_processing({0: 10, 1: 20}) == {0}
    assert site.key(1).offset == 20


def test_no_permission_for_what_another_has_moved(site: Site) -> None:
    """If another process's record moved the offset first, the member's record gives no permission."""
    member = site.owner_of(0, settings=AT_MOST_ONCE)
    member.plan({0: 10})
    twin = about(Heartbeat, member.member.instance, offset=10)

    def twin_is_faster() -> None:
        site.say(twin)

    faulty(member).before_append = twin_is_faster

    assert member.commit_before_processing({0: 10}) == frozenset()


def test_no_permission_without_a_plan(site: Site) -> None:
    """Before processing only an open plan can be committed, at its end."""
    member = site.owner_of(0, settings=AT_MOST_ONCE)
    before = site.values()

    with pytest.raises(PlanRejectedError, match="plan"):
        member.commit_before_processing({0: 10})
    assert site.values() == before


def test_no_permission_after_the_lease(site: Site) -> None:
    """A commit that took longer than the lease gives no permission."""
    member = site.owner_of(0, settings=AT_MOST_ONCE)
    member.plan({0: 10})
    faulty(member).after_append = lambda: site.clock.advance(2 * HI_MS)

    assert member.commit_before_processing({0: 10}) == frozenset()


# Leaving


def test_a_release_moves_nothing(site: Site) -> None:
    """A released partition is free at once and keeps its offset and its open plan."""
    member = site.owner_of(0)
    member.plan({0: 10})

    member.release()

    key = site.key()
    assert (key.owner, key.offset, key.plan_end) == (None, 0, 10)
    assert not member.claims


def test_what_is_named_twice_is_released_once(site: Site) -> None:
    """A release sends one record per partition and ignores partitions that are not held."""
    member = site.owner_of(0, 1)

    member.release([0, 0, 7])

    assert messages_sent_by(site, member.member.instance).count("ReleasingPartition") == 1
    assert list(member.claims) == [1]


def test_a_claim_without_offset_is_released(site: Site) -> None:
    """A claim of a partition without an offset is released without one."""
    member = site.member()
    member.claim([0])

    member.release()

    assert (site.owner(), site.key().offset) == (None, None)


def test_a_release_never_raises(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A failed release is a log line; the claim becomes stale by itself."""
    member = site.owner_of(0)
    faulty(member).before_append = raiser(RuntimeError("a client that broke"))

    with caplog.at_level(logging.WARNING):
        member.release()

    assert "go stale" in caplog.text
    assert not member.claims


def test_a_release_in_a_group_that_one_has_paused_sets_no_position(site: Site) -> None:
    """If the instance that paused the group releases an unused claim, position and generation stay."""
    site.owner_of(0).release()
    site.pause(60, instance="ops.7")
    member = site.claimer(instance="ops.7")
    member.claim([0])

    member.release()

    assert (site.owner(), site.key().offset, site.key().generation) == (None, 0, 0)


def test_a_release_after_an_ambiguous_commit_undoes_nothing(site: Site) -> None:
    """A commit that was in flight when its owner released remains valid."""
    member = site.owner_of(0)
    member.plan({0: 10})
    log = faulty(member)
    log.after_append = raiser(InterruptError())
    with pytest.raises(InterruptError):
        member.commit({0: 10})
    log.recover()

    member.release()

    assert (site.key().offset, site.owner()) == (10, None)


def test_an_open_plan_keeps_its_end_for_the_next_owner(site: Site) -> None:
    """A late plan of an instance that released the partition has no effect."""
    member = site.owner_of(0)
    member.release()
    site.say(about(ClaimingMessages, member.member.instance, plan_end=99))

    assert site.key().plan_end is None


def test_claims_are_distinguished_by_group_and_topic(site: Site) -> None:
    """A claimer of another topic or group neither sees nor affects these claims."""
    member = site.owner_of(0)
    rationalizer = Rationalizer(site.log(), clock=site.clock)
    rationalizer.catch_up()
    other = Claimer(rationalizer, Member("other", "c", "run9.0"), TOPIC, SETTINGS, clock=site.clock)
    other.ensure_group_settings()

    assert len(other.claim([0])) == 1
    member.check([0])


def test_what_is_only_observed_renews_nothing(site: Site) -> None:
    """If retention overtakes the reader, a heartbeat renews nothing, although it appears to be accepted."""
    owner = site.owner_of(0, at=5)
    site.overtake()
    with pytest.raises(ClaimLostError, match="can only be observed"):
        owner.beat()
    assert not owner.claims
