# ruff: noqa: PT012 - what raises is the block of a batch
"""Claimed batches from claim to end: pauses, rivals, exhausted plans, errors and limits.

See protocol.md, section 6.
"""

import logging
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import cast

import pytest

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, IdleReason
from marshal_dagster.coordination.heartbeats import Heartbeats
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    ConfigurationError,
    CoordinationLogChangedError,
    MarshalError,
    PlanRejectedError,
    SettingsMismatchError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    RevokingClaim,
    RuleSet,
    coordination_partition,
)
from marshal_dagster.protocol.state import Owner
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Scene
from tests.conditions import wait_until
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

ALL_MODES = list(DeliveryMode)
AT_LEAST_ONCE = DeliveryMode.AT_LEAST_ONCE
AT_MOST_ONCE = DeliveryMode.AT_MOST_ONCE
EFFECTIVELY_ONCE = DeliveryMode.EFFECTIVELY_ONCE


@pytest.fixture
def scene() -> Scene:
    """A data topic of 3 partitions with 5 messages each, and a group without any record."""
    scene = Scene()
    scene.data.make(messages=5)
    return scene


def why_idle(batch: ClaimedBatch) -> tuple[str, str]:
    """Return the reason and the text of an idle batch."""
    assert batch.idle is not None
    assert not batch.all_ranges
    return batch.idle.reason.value, batch.idle.text


def fail_once(scene: Scene, delivery: BatchSession, **limits: object) -> ClaimedBatch:
    """Claim a batch and raise an error in its block."""
    batch = scene.batch(delivery, **limits)
    with pytest.raises(ZeroDivisionError), batch:
        assert batch.idle is None, batch.idle
        raise ZeroDivisionError
    return batch


def die_planned(scene: Scene, mode: DeliveryMode = AT_LEAST_ONCE, **limits: object) -> None:
    """Leave an open plan whose owner is dead and stale."""
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(mode, log=log), **limits)
    scene.wait_until_stale()


# Number of appends


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_appends_as_often_for_many_partitions_as_for_one(mode: DeliveryMode) -> None:
    """Claims, plans, commits and releases take one append each, however many partitions the batch has."""

    def appends(partitions: int) -> list[int]:
        """Return how many records each append of a group's second batch has."""
        scene = Scene()
        scene.data.make(partitions=partitions, messages=5)
        scene.work(scene.delivery(mode), max_records=partitions)
        log = FaultyLog(scene.log())
        sizes: list[int] = []
        log.before_append = lambda: sizes.append(len(log.seen))
        assert scene.work(scene.delivery(mode, log=log)).committed
        return [after - before for before, after in pairwise([0, *sizes])]

    assert appends(64) == [64 * records for records in appends(1)]


# Pauses


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_paused_group_is_idle(scene: Scene, mode: DeliveryMode) -> None:
    """Nothing is claimed, and the batch reports how long the group is paused; afterwards it works again."""
    scene.pause(60)
    before = scene.clock.wall_ms()

    reason, text = why_idle(scene.work(scene.delivery(mode)))

    assert reason == "paused"
    assert f"group {GROUP!r} is paused until {utc_to_second(before // 1_000 + 60)} by " in text
    assert not any(value.startswith(ClaimingPartition.__name__) for value in scene.values())
    scene.clock.advance(60_000)
    scene.drain(scene.delivery(mode))
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


def test_a_pause_that_comes_with_the_claim_is_reported_as_such(scene: Scene) -> None:
    """Claims that a pause refused are reported as paused, not as lost to another member."""
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", scene.pause)

    assert why_idle(scene.work(scene.delivery(log=log)))[0] == "paused"


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_pause_before_the_plan_leaves_the_batch_idle(scene: Scene, mode: DeliveryMode) -> None:
    """If a pause begins between claim and plan, the claim is released and nothing is planned."""
    log = scene.meddled(Side.BEFORE, "ClaimingMessages", scene.pause)

    batch = scene.work(scene.delivery(mode, log=log))

    assert why_idle(batch)[0] == "paused"
    assert not scene.counts(mode)
    assert (scene.key().owner, scene.key().plan_end) == (None, None)


def test_a_pause_before_the_plan_of_at_most_once_is_an_error(scene: Scene) -> None:
    """At most once plans just before it processes. If a pause refuses the plan, nothing is processed or committed."""
    log = scene.meddled(Side.BEFORE, "ClaimingMessages", scene.pause)

    with pytest.raises(PlanRejectedError, match="the group is paused"):
        scene.work(scene.delivery(AT_MOST_ONCE, log=log))

    assert not scene.processed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_in_hand_is_finished_in_a_pause(scene: Scene, mode: DeliveryMode) -> None:
    """A pause does not end a claim: the batch is processed, committed and released."""
    with scene.batch(scene.delivery(mode)) as batch:
        batch.begin_processing()
        scene.pause()
        scene.process(batch)

    assert batch.committed
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)
    assert scene.key().owner is None


# Rivals


def test_what_others_hold_is_reported_with_who_holds_it(scene: Scene) -> None:
    """If other members hold all partitions, the batch reports them."""
    with scene.batch(scene.delivery()) as other:
        other.begin_processing()
        reason, text = why_idle(scene.work(scene.delivery()))

    assert reason == "held"
    assert "held by client1" in text


def test_only_who_holds_something_to_read_is_named(scene: Scene) -> None:
    """Owners of drained partitions and dead owners of exhausted plans are not reported as holders."""
    scene.drain(scene.delivery())
    for partition in (0, 2):
        scene.data.append(partition, 3)
    for _ in range(3):
        die_planned(scene, partitions=(2,))
    scene.about(ClaimingPartition, "bystander.1", 1)
    with pytest.raises(ZeroDivisionError), scene.batch(scene.delivery(), partitions=(0,)):
        reason, text = why_idle(scene.work(scene.delivery(), max_attempts=2))
        raise ZeroDivisionError

    assert reason == "held"
    assert "all are held by client5. plans" in text
    assert "partition 2 [5, 8)" in text


def test_who_keeps_the_entire_topic_from_being_claimed_is_named(scene: Scene) -> None:
    """When the whole topic is needed, the owner of a partition without unread messages is reported, too."""
    scene.drain(scene.delivery())
    scene.data.append(0, 3)
    scene.about(ClaimingPartition, "bystander.1", 1)

    reason, text = why_idle(scene.work(scene.delivery(), claim_entire_topic=True))

    assert reason == "held"
    assert "can only be claimed as a whole, but bystander.1's client holds partition 1" in text


def test_some_that_are_held_are_not_all(scene: Scene) -> None:
    """If other claims failed, the report states that only some partitions are held."""
    scene.work(scene.delivery(), max_records=3)
    log = FaultyLog(scene.log())
    log.fail(Fault.FAILED, of_type("ClaimingPartition"))
    with pytest.raises(ZeroDivisionError), scene.batch(scene.delivery(), partitions=(0,)):
        reason, text = why_idle(scene.work(scene.delivery(log=log)))
        raise ZeroDivisionError

    assert reason == "held"
    assert "some are held by client2" in text


def test_what_the_own_run_holds_is_reported_as_such(scene: Scene) -> None:
    """If a dead process of the same run holds the claims, the batch reports it and when they become stale."""
    dead = scene.delivery(log=KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages")))
    with pytest.raises(KilledError):
        scene.work(dead)
    scene.clock.advance(HI_MS)
    again = scene.delivery()
    again.run_id = dead.run_id

    batch = scene.work(again)

    reason, text = why_idle(batch)
    assert batch.idle is not None
    owner = scene.key().owner
    assert owner is not None
    assert reason == "held"
    assert f"(instance {owner.instance!r}): either that process has died, and its claim is stale in 10.0 s" in text
    assert batch.idle.stale_in_s == HI_MS / 1_000
    other = scene.work(scene.delivery())
    assert other.idle is not None
    assert other.idle.stale_in_s is None


def test_drained_is_never_said_while_others_have_work_in_hand(scene: Scene) -> None:
    """While another member's claims hold the only unread messages, the topic is not reported as drained."""
    scene.drain(scene.delivery())
    scene.data.append(0, 3)
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(log=log))

    assert why_idle(scene.work(scene.delivery())) == (
        "held",
        f"no partition of topic {TOPIC!r} with unread messages can be claimed: all are held by client2",
    )
    scene.wait_until_stale()
    assert [range_.partition for range_ in scene.work(scene.delivery()).ranges] == [0]


def test_claims_without_acknowledgement_are_not_a_drained_topic(scene: Scene) -> None:
    """If no claim was acknowledged, the topic is not reported as drained."""

    class Deaf(FaultyLog):
        """A log that acknowledges no claim and stores none."""

    log = Deaf(scene.log())
    delivery = scene.delivery(log=log)
    scene.work(scene.delivery(), max_records=1)
    log.is_down = False
    log.before_append = lambda: setattr(log, "is_down", True)
    log.after_append = lambda: setattr(log, "is_down", False)

    assert why_idle(scene.work(delivery))[0] == "held"


def test_dead_owners_claims_are_taken_at_once(scene: Scene) -> None:
    """If Dagster reports that an owner's run is over, its claims are revoked before they are stale."""
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(log=log))

    def is_dead(owner: Owner) -> bool:
        return owner.instance.startswith("run1.")

    batch = scene.work(scene.delivery(is_dead=is_dead))

    assert len(batch.ranges) == 3
    assert all(report.is_replay for report in batch.report())
    assert sum(value.startswith(RevokingClaim.__name__) for value in scene.values()) == 3


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_lost_claim_at_commit_names_who_holds_it(scene: Scene, mode: DeliveryMode) -> None:
    """A member whose claims were taken over commits nothing, and the error names its successor."""
    late = scene.delivery(mode)
    batch = scene.batch(late)
    with pytest.raises(ClaimLostError, match="held by client 'client2', instance 'run2"), batch:
        taken = scene.delivery(mode)
        scene.wait_until_stale()
        with scene.batch(taken) as successor:
            assert [str(range_) for range_ in successor.ranges] == [str(one) for one in batch.ranges]
            scene.process(batch)

    assert not batch.committed
    assert not scene.counts(mode)
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0] if mode is not AT_MOST_ONCE else [5, 5, 5]


def test_a_batch_past_its_lease_commits_nothing(scene: Scene) -> None:
    """A member whose lease ended stops, even if no other member has claimed its partitions."""
    batch = scene.batch(scene.delivery())
    with pytest.raises(ClaimLostError, match=r"its lease ended: .* this same instance as owner"), batch:
        scene.process(batch)
        scene.clock.advance(1.9 * HI_MS)

    assert not batch.committed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


def test_processing_does_not_begin_past_the_lease(scene: Scene) -> None:
    """A member may have been paused between claim and read, so it checks its lease before it processes."""
    with pytest.raises(ClaimLostError), scene.batch(scene.delivery()) as batch:
        scene.clock.advance(1.9 * HI_MS)
        batch.begin_processing()
        pytest.fail("may process")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_revoked_batch_commits_nothing(scene: Scene, mode: DeliveryMode) -> None:
    """A revoked claim ends at the next record, even if the revocation was a mistake; nothing is committed."""
    batch = scene.batch(scene.delivery(mode))
    with pytest.raises(ClaimLostError, match="held by no instance"), batch:
        for partition in range(3):
            owner = scene.key(partition).owner
            assert owner is not None
            scene.about(RevokingClaim, "ops.1", partition, epoch=owner.epoch)
        scene.process(batch)

    assert not batch.committed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


# Exhausted plans


def test_a_plan_with_too_many_attempts_is_left_alone(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """After the first attempt and two more, the plan is not tried again; the batch reports it and what to do."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)
    before = scene.values()

    with caplog.at_level(logging.ERROR):
        reason, text = why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))

    assert reason == "given_up"
    assert "partition 1 [0, 5)" in text
    skip = f"marshal-dagster position reset {GROUP} {TOPIC} --to-offset 1=5"
    assert f"run `marshal-dagster retry {GROUP} {TOPIC} 1`, or skip its offsets: `{skip}`" in text
    assert "partition 1 [0, 5)" in caplog.text
    assert scene.values() == before, "the batch wrote records"


def test_a_plan_whose_owners_all_died_is_left_alone(scene: Scene) -> None:
    """A plan of a dead and stale owner is reported as exhausted, not as held."""
    for _ in range(3):
        die_planned(scene, partitions=(1,))
    scene.wait_until_stale()

    assert why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))[0] == "given_up"


def test_one_more_attempt_can_be_requested(scene: Scene) -> None:
    """`retry_exhausted` repeats the plan once as it is; if that fails, the next run skips it again."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)

    again = fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2, retry_exhausted=True)
    assert [str(range_) for range_ in again.ranges] == [f"{TOPIC}/1 [0, 5)"]
    assert why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))[0] == "given_up"
    scene.work(scene.delivery(), partitions=(1,), max_attempts=2, retry_exhausted=True)

    assert scene.key(1).offset == 5
    assert (scene.key(1).plan_end, scene.key(1).plan_attempts) == (None, 0)


def test_a_worn_out_plan_is_found_at_the_claim_too(scene: Scene) -> None:
    """Of two members that try the last attempt at once, the second detects it after its claim, and releases."""
    for _ in range(2):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)
    rival = scene.delivery()
    log = scene.meddled(
        Side.BEFORE, "ClaimingPartition", lambda: fail_once(scene, rival, partitions=(1,), max_attempts=2)
    )

    assert why_idle(scene.work(scene.delivery(log=log), partitions=(1,), max_attempts=2))[0] == "given_up"
    assert scene.key(1).owner is None


def test_a_worn_out_plan_is_reported_though_the_rest_is_drained(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Other partitions are processed, but the run does not report the topic as drained."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)

    with caplog.at_level(logging.ERROR):
        batches = scene.drain(scene.delivery(), max_attempts=2)

    assert [len(batch.ranges) for batch in batches] == [2, 0]
    assert why_idle(batches[-1])[0] == "given_up"
    assert "partition 1 [0, 5)" in caplog.text
    assert set(scene.processed) == {place for place in scene.data.all_messages() if place[0] != 1}


def test_a_worn_out_plan_is_reported_beside_what_others_hold(scene: Scene) -> None:
    """The text has both reasons."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)
    with scene.batch(scene.delivery(), partitions=(0, 2)) as other:
        other.begin_processing()
        assert len(other.ranges) == 2
        reason, text = why_idle(scene.work(scene.delivery(), max_attempts=2))

    assert reason == "held"
    assert "held by client4" in text
    assert "partition 1 [0, 5)" in text


# The entire topic


def test_the_entire_topic_is_held_while_it_is_worked_on(scene: Scene) -> None:
    """Partitions without unread messages are held too, until the batch ends."""
    scene.drain(scene.delivery())
    scene.data.append(1, 4)

    with scene.batch(scene.delivery(), claim_entire_topic=True) as batch:
        assert [str(range_) for range_ in batch.ranges] == [f"{TOPIC}/1 [5, 9)"]
        assert [scene.key(n).owner is not None for n in range(3)] == [True, True, True]
        assert why_idle(scene.work(scene.delivery(), claim_entire_topic=True))[0] == "held"
        scene.process(batch)

    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert [scene.key(n).offset for n in range(3)] == [5, 9, 5]


@pytest.mark.parametrize("held", [0, 2])
def test_the_entire_topic_or_nothing(scene: Scene, held: int) -> None:
    """While another member holds any partition, no partition is claimed."""
    scene.work(scene.delivery(), max_records=3)
    with scene.batch(scene.delivery(), partitions=(held,)) as other:
        other.begin_processing()
        assert len(other.ranges) == 1
        batch = scene.work(scene.delivery(), claim_entire_topic=True)
        assert why_idle(batch)[0] == "held"
        assert [scene.key(n).owner is None for n in range(3)] == [n != held for n in range(3)]

    assert len(scene.work(scene.delivery(), claim_entire_topic=True).ranges) == 3 - (1 if other.committed else 0)


@pytest.mark.parametrize("rivals", [(0,), (1, 2)])
def test_a_rival_between_look_and_claim_takes_the_entire_topic_away(scene: Scene, rivals: tuple[int, ...]) -> None:
    """If another member claims a partition first, the claims that were won are released."""
    scene.work(scene.delivery(), max_records=3)
    other = scene.batch(scene.delivery(), partitions=rivals)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", other.__enter__)

    assert why_idle(scene.work(scene.delivery(log=log), claim_entire_topic=True))[0] == "held"
    assert [scene.key(n).owner is None for n in range(3)] == [n not in rivals for n in range(3)]
    other.begin_processing()
    other.__exit__(None, None, None)


def test_the_entire_topic_is_not_claimed_when_it_is_drained(scene: Scene) -> None:
    """If nothing is unread, a run writes nothing to the log."""
    scene.work(scene.delivery(), claim_entire_topic=True)
    before = scene.values()

    assert why_idle(scene.work(scene.delivery(), claim_entire_topic=True))[0] == "drained"
    assert scene.values() == before


def test_the_entire_topic_waits_for_a_person_when_one_plan_is_worn_out(scene: Scene) -> None:
    """An exhausted plan prevents the claim of the whole topic, until `retry_exhausted` is set."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)

    assert why_idle(scene.work(scene.delivery(), claim_entire_topic=True, max_attempts=2))[0] == "given_up"
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    batch = scene.work(scene.delivery(), claim_entire_topic=True, max_attempts=2, retry_exhausted=True)
    assert len(batch.ranges) == 3


# Errors in the block


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_error_in_the_block_releases_at_once_and_commits_nothing(
    scene: Scene, mode: DeliveryMode, error: BaseException
) -> None:
    """Whatever ends the block, the claims are released at once and the plan stays open for the next run."""
    batch = scene.batch(scene.delivery(mode))
    with pytest.raises(type(error)) as raised, batch:
        raise error

    assert raised.value is error
    assert not batch.committed
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]
    assert scene.key().plan_end == (None if mode is AT_MOST_ONCE else 5)
    assert scene.data.committed == {}
    scene.drain(scene.delivery(mode))
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


@pytest.mark.parametrize("step", ["before_describe", "before_offsets"])
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_an_error_on_the_way_in_releases_at_once(scene: Scene, step: str, error: BaseException) -> None:
    """An error between the claim and the block releases all claims."""

    def fail_once_claimed() -> None:
        if scene.key().owner is not None:
            setattr(scene.data, step, lambda: None)
            raise error

    setattr(scene.data, step, fail_once_claimed)
    batch = scene.batch(scene.delivery())
    with pytest.raises(type(error)), batch:
        pytest.fail("entered")

    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert batch._guard.heartbeats is not None
    assert heartbeat_threads(batch) == []


def heartbeat_threads(batch: ClaimedBatch) -> list[str]:
    """Return the names of the threads that keep the batch's claims alive."""
    heartbeats = batch._guard.heartbeats
    return [thread.name for thread in heartbeats._threads if thread.is_alive()] if heartbeats else []


def _interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool = False) -> None:
    """Interrupt the next call of a method at its start, or just before it returns."""
    method = getattr(owner, name)

    def interrupted(*args: object) -> None:
        monkeypatch.setattr(owner, name, method)
        if after:
            method(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("place", ["release", "stack.close", "heartbeats"])
def test_an_interrupt_on_the_way_out_leaves_nothing_running(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Heartbeats that continued would hold the partitions as long as the process runs."""
    batch = scene.batch(scene.delivery())
    with pytest.raises(KeyboardInterrupt), batch:
        assert len(heartbeat_threads(batch)) == 2
        batch.begin_processing()
        if place == "release":
            _interrupt_once(monkeypatch, batch._guard, "release")
        elif place == "stack.close":
            _interrupt_once(monkeypatch, batch._guard.stack, "close")
        else:  # the stack no longer has them
            assert batch._guard.heartbeats is not None
            batch._guard.stack.pop_all()
            batch._guard.stack.callback(_raise_interrupt)

    assert heartbeat_threads(batch) == []
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert batch.committed


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["heartbeats", "release"])
def test_an_interrupt_on_the_way_in_leaves_nothing_running(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The interrupt comes just after the heartbeats start, or while another error is handled."""
    batch = scene.batch(scene.delivery())
    if place == "heartbeats":
        _interrupt_once(monkeypatch, Heartbeats, "__enter__", after=True)
    else:
        _interrupt_once(monkeypatch, batch._guard, "release")
        monkeypatch.setattr(batch, "_plan", lambda: 1 / 0)
    with pytest.raises(KeyboardInterrupt), batch:
        pytest.fail("entered")

    assert heartbeat_threads(batch) == []
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_data_cluster_that_is_down_at_the_commit(scene: Scene, mode: DeliveryMode) -> None:
    """The next run repeats the batch, because a check that the topic was not re-created is impossible."""
    batch = scene.batch(scene.delivery(mode))
    with pytest.raises(UnavailableError), batch:
        scene.process(batch)
        scene.data.is_down = True

    assert not batch.committed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]
    scene.data.is_down = False
    scene.drain(scene.delivery(mode))
    assert set(scene.counts(mode)) == scene.data.all_messages()


def test_a_commit_counts_though_kafkas_group_offsets_cannot_be_set(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Only lag tools read these offsets, so a warning is enough."""
    delivery = scene.delivery()
    with scene.batch(delivery) as batch:
        scene.process(batch)
        describe = scene.data.describe
        delivery.data.commit_group_offsets = lambda *_: "no right to"  # type: ignore[method-assign]
        assert describe is not None

    assert batch.committed
    assert "no right to" in caplog.text


@pytest.mark.parametrize("mode", ALL_MODES)
def test_commits_show_in_kafkas_group_offsets(scene: Scene, mode: DeliveryMode) -> None:
    """After each batch, Kafka's group offsets equal the committed offsets."""
    scene.work(scene.delivery(mode), max_records=7)
    assert scene.data.committed == {(GROUP, TOPIC): {0: 3, 1: 2, 2: 2}}
    scene.drain(scene.delivery(mode))
    assert scene.data.committed == {(GROUP, TOPIC): {0: 5, 1: 5, 2: 5}}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_kafkas_group_offsets_are_set_while_the_partitions_are_held(scene: Scene, mode: DeliveryMode) -> None:
    """If they were set after the release, they could overwrite the later offsets of a successor."""
    holders: list[str] = []
    report = scene.data.commit_group_offsets

    def noted(group: str, topic: str, offsets: Mapping[int, int], metadata: str = "") -> str | None:  # noqa: ARG001
        holders.extend(owner.instance for n in range(3) if (owner := scene.key(n).owner) is not None)
        return report(group, topic, offsets)

    delivery = scene.delivery(mode)
    delivery.data.commit_group_offsets = noted  # type: ignore[method-assign]
    batch = scene.work(delivery)

    assert holders == [batch.batch_id] * 3
    assert scene.data.committed == {(GROUP, TOPIC): {0: 5, 1: 5, 2: 5}}


@pytest.mark.parametrize(
    ("error", "reported"), [(ValueError("x"), {0: 5, 1: 5, 2: 5}), (KeyboardInterrupt(), {})], ids=repr
)
def test_an_interrupted_batch_waits_for_no_group_offsets(
    scene: Scene, error: BaseException, reported: dict[int, int]
) -> None:
    """At most once has committed when the work fails: Kafka's offsets are set, except after an interrupt."""
    with pytest.raises(type(error)), scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        batch.begin_processing()
        raise error

    assert scene.data.committed.get((GROUP, TOPIC), {}) == reported


def test_kafkas_group_offsets_are_not_set_by_who_lost_the_claim(scene: Scene) -> None:
    """The lease ended after an at-most-once commit, so a successor may have set later offsets."""
    with pytest.raises(ValueError, match="x"), scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        batch.begin_processing()
        scene.clock.advance(1.9 * HI_MS)
        raise ValueError("x")

    assert scene.data.committed.get((GROUP, TOPIC), {}) == {}


# Heartbeats and reasons to stop


def test_a_reason_to_stop_ends_the_batch(scene: Scene) -> None:
    """When the run is over, the batch fails with that reason, whatever error its own work raised."""
    over = threading.Event()
    settings = GroupSettings(50)
    delivery = scene.delivery(settings=settings, reasons_to_stop=[lambda: "the run is over" if over.is_set() else None])
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="the run is over") as raised, batch:
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim")
        raise ValueError("Spark was cancelled")

    assert isinstance(raised.value.__cause__, ValueError)
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_lost_claims_are_reported_in_every_mode(scene: Scene, mode: DeliveryMode) -> None:
    """Work that fails because the claim was lost raises that loss, even after an early commit."""
    over = threading.Event()
    delivery = scene.delivery(
        settings=GroupSettings(50, RuleSet.NATIVE, mode),
        reasons_to_stop=[lambda: "reported" if over.is_set() else None],
    )
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="reported"), batch:
        batch.begin_processing()
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim")
        raise ValueError("Spark was cancelled")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_whose_heartbeats_ended_does_nothing_more(scene: Scene, mode: DeliveryMode) -> None:
    """It can neither start to process nor write nor commit, and the error is the reason itself."""
    over = threading.Event()
    delivery = scene.delivery(
        settings=GroupSettings(50, RuleSet.NATIVE, mode),
        reasons_to_stop=[lambda: "reported" if over.is_set() else None],
    )
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="reported") as raised, batch:
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim")
        with pytest.raises(BatchAbortedError):
            batch.begin_processing()
        with pytest.raises(BatchAbortedError):
            batch.check()
        if mode is AT_MOST_ONCE:
            batch.check()

    assert raised.value.__cause__ is None
    assert not scene.counts(mode)
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


def beats(scene: Scene) -> int:
    """Return the number of heartbeats in the log."""
    return sum(value.startswith(Heartbeat.__name__) for value in scene.values())


def wait_for_beats(scene: Scene, count: int) -> None:
    """Wait until the log has this number of heartbeats."""
    wait_until(lambda: beats(scene) == count, "the heartbeats are in the log")


@pytest.mark.slow
def test_long_work_is_kept_alive(scene: Scene) -> None:
    """Heartbeats with the current offset continue while the block works, and commit nothing."""
    with scene.batch(scene.delivery(settings=GroupSettings(50))) as batch:
        for expected in range(beats(scene) + 3, beats(scene) + 18, 3):
            scene.clock.advance(45)
            wait_for_beats(scene, expected)
        assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]
        scene.process(batch)

    assert [scene.key(n).offset for n in range(3)] == [5, 5, 5]


# Settings


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (GroupSettings(HI_MS * 2), "heartbeat interval"),
        (GroupSettings(HI_MS, RuleSet.NATIVE, AT_MOST_ONCE), "'at_most_once' here, 'at_least_once' in force"),
        (GroupSettings(60_000, RuleSet.GO), "'go' here, 'native' in force"),
    ],
    ids=str,
)
def test_members_that_are_configured_otherwise_do_not_claim(scene: Scene, other: GroupSettings, said: str) -> None:
    """The error names the value that differs, and nothing is claimed."""
    scene.work(scene.delivery(), max_records=3)
    before = scene.values()

    with pytest.raises(SettingsMismatchError, match=said):
        scene.work(scene.delivery(settings=other))

    assert scene.values() == before


@pytest.mark.parametrize("mode", [AT_MOST_ONCE, EFFECTIVELY_ONCE])
def test_a_group_shared_with_go_promises_at_least_once_only(scene: Scene, mode: DeliveryMode) -> None:
    """Rule set `go` refuses the other modes before it connects to Kafka."""
    with pytest.raises(ConfigurationError, match="can only promise at_least_once"):
        scene.delivery(settings=GroupSettings(60_000, RuleSet.GO, mode))


def test_a_group_shared_with_go_works_at_least_once(scene: Scene) -> None:
    """All messages are processed once under rule set `go`."""
    scene.drain(scene.delivery(settings=GroupSettings(60_000, RuleSet.GO)))
    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


def test_a_sink_belongs_to_effectively_once(scene: Scene) -> None:
    """Effectively once without a sink, and a sink in another mode, are refused before anything is claimed."""
    with pytest.raises(ConfigurationError, match="needs a sink"):
        scene.delivery(EFFECTIVELY_ONCE).claimed_batch(BatchRequest(topic=TOPIC))
    with pytest.raises(ConfigurationError, match="only effectively_once uses a sink"):
        scene.delivery(AT_LEAST_ONCE).claimed_batch(BatchRequest(topic=TOPIC), scene.sink)
    with pytest.raises(ConfigurationError, match="the batch has no sink"), scene.batch(scene.delivery()) as batch:
        batch.write(cast("object", []))  # type: ignore[arg-type]


# Several batches


def test_batches_go_on_until_the_topic_is_drained(scene: Scene) -> None:
    """Each batch has its own claims; the last one reports why there are no more."""
    delivery = scene.delivery()
    seen = []
    for batch in delivery.batches(BatchRequest(topic=TOPIC, max_records=6)):
        with batch:
            if batch.idle is None:
                scene.process(batch)
        seen.append(batch)

    assert [sum(range_.width for range_ in batch.all_ranges) for batch in seen] == [6, 6, 3, 0]
    assert len({batch.batch_id for batch in seen}) == 4
    assert why_idle(seen[-1])[0] == IdleReason.DRAINED
    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


@pytest.mark.parametrize(("most", "done"), [(0, 0), (1, 6), (2, 12), (9, 15)])
def test_the_most_batches(scene: Scene, most: int, done: int) -> None:
    """At most `max_batches` batches with work are returned."""
    for batch in scene.delivery().batches(BatchRequest(topic=TOPIC, max_records=6), max_batches=most):
        with batch:
            if batch.idle is None:
                scene.process(batch)

    assert sum(scene.processed.values()) == done


def test_no_batch_begins_after_the_time_budget(scene: Scene) -> None:
    """The first batch always starts; no other one starts once the time budget is spent."""
    for batch in scene.delivery().batches(BatchRequest(topic=TOPIC, max_records=6), time_budget_s=1e-9):
        with batch:
            scene.process(batch)

    assert sum(scene.processed.values()) == 6


def test_two_topics_in_turn(scene: Scene) -> None:
    """One session can alternate between topics."""
    scene.data.make("payments", partitions=2, messages=4)
    delivery = scene.delivery()

    for topic in (TOPIC, "payments", TOPIC, "payments"):
        with delivery.claimed_batch(BatchRequest(topic=topic, max_records=5)) as batch:
            batch.begin_processing()
            assert {range_.topic for range_ in batch.ranges} == {topic}

    assert [scene.key(n, "payments").offset for n in range(2)] == [4, 4]
    assert sum(scene.key(n).offset or 0 for n in range(3)) == 10


def test_two_topics_at_once(scene: Scene) -> None:
    """Batches on several topics may be open at once in one process, wherever the log has the topics' records."""
    scene.data.make("payments", partitions=2, messages=4)
    scene.data.make("refunds", partitions=1, messages=2)
    delivery = scene.delivery()
    with (
        delivery.claimed_batch(BatchRequest(topic=TOPIC)) as one,
        delivery.claimed_batch(BatchRequest(topic="payments")) as two,
        delivery.claimed_batch(BatchRequest(topic="refunds")) as three,
    ):
        for batch in (one, two, three):
            batch.begin_processing()
            batch.check()

    assert all(batch.committed for batch in (one, two, three))
    assert [scene.key(n).offset for n in range(3)] == [5, 5, 5]
    assert [scene.key(n, "payments").offset for n in range(2)] == [4, 4]
    assert scene.key(0, "refunds").offset == 2


def test_each_batch_reads_only_what_is_new_in_the_log(scene: Scene) -> None:
    """A session keeps what it has read, so no batch reads the log from its start again."""
    scene.data.make("payments", partitions=2, messages=4)
    delivery = scene.delivery()
    for topic in (TOPIC, "payments") * 3:
        with delivery.claimed_batch(BatchRequest(topic=topic, max_records=1)) as batch:
            batch.begin_processing()

    followed = delivery._followed
    assert followed is not None
    every = sum(len(scene.broker.records(partition)) for partition in range(4))
    followed.catch_up()
    assert followed.records_read == every


def test_what_a_batch_came_to(scene: Scene) -> None:
    """The report has the lag before and after, whether a range is a replay, and whether it was committed."""
    die_planned(scene, partitions=(1,), max_records=2)
    batch = scene.work(scene.delivery(), max_records=8)

    reported = {report.range.partition: report for report in batch.report()}
    assert {n: (r.lag_before, r.lag_after, r.is_replay, r.state) for n, r in reported.items()} == {
        0: (5, 2, False, "committed"),
        1: (5, 3, True, "committed"),
        2: (5, 2, False, "committed"),
    }
    failed = fail_once(scene, scene.delivery())
    assert {report.state for report in failed.report()} == {"not committed"}


def test_errors_are_of_one_tree() -> None:
    """Every error that a batch raises is a `MarshalError`."""
    assert all(
        issubclass(kind, MarshalError)
        for kind in (ClaimLostError, BatchAbortedError, PlanRejectedError, SettingsMismatchError)
    )


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_whose_release_finds_the_log_truncated_says_so(scene: Scene, mode: DeliveryMode) -> None:
    """A truncated log may have lost the commit, so an error reports it even though the commit was read back."""
    log = FaultyLog(scene.log())
    home = coordination_partition(TOPIC, scene.broker.identity.partitions)

    def lose_the_commits() -> None:
        if log.types()[-1] == "ReleasingPartition":
            log.before_append = lambda: None
            scene.broker.truncate(home, scene.broker.bounds(home).end - 3)

    log.before_append = lose_the_commits
    batch = scene.batch(scene.delivery(mode, log=log))

    with (
        pytest.raises(CoordinationLogChangedError, match="the commit of this batch of topic 'orders' may be lost"),
        batch,
    ):
        scene.process(batch)

    assert scene.key().offset == 0
