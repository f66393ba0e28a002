# ruff: noqa: PT012 - what raises is the block of a batch
"""A claimed batch from its claim to its end: pauses, rivals, worn-out plans, errors, limits.

See protocol.md, section 6.
"""

import logging
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import cast

import pytest

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
    """A data topic of 3 partitions with 5 messages each, and a group without a past."""
    scene = Scene()
    scene.data.make(messages=5)
    return scene


def why_idle(batch: ClaimedBatch) -> tuple[str, str]:
    """Give the reason and the text of an idle batch."""
    assert batch.idle is not None
    assert not batch.all_ranges
    return batch.idle.reason.value, batch.idle.text


def fail_once(scene: Scene, delivery: BatchSession, **limits: object) -> ClaimedBatch:
    """Claim a batch and have its block fail."""
    batch = scene.batch(delivery, **limits)
    with pytest.raises(ZeroDivisionError), batch:
        assert batch.idle is None, batch.idle
        raise ZeroDivisionError
    return batch


def die_planned(scene: Scene, mode: DeliveryMode = AT_LEAST_ONCE, **limits: object) -> None:
    """Leave an open plan behind, whose owner is dead and stale."""
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(mode, log=log), **limits)
    scene.wait_until_stale()


# What it costs


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_appends_as_often_for_many_partitions_as_for_one(mode: DeliveryMode) -> None:
    """Claims, plans, commits, releases: each kind is one append, however many partitions it has."""

    def appends(partitions: int) -> list[int]:
        """Give how many records the appends of a group's second batch have."""
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
    """Nothing is claimed, and the batch says until when the group is paused; afterwards it goes on."""
    scene.pause(60)
    before = scene.clock.wall_ms()

    reason, text = why_idle(scene.work(scene.delivery(mode)))

    assert reason == "paused"
    assert f"group {GROUP!r} is paused until {before // 1_000 + 60} (unix seconds)" in text
    assert not any(value.startswith(ClaimingPartition.__name__) for value in scene.values())
    scene.clock.advance(60_000)
    scene.drain(scene.delivery(mode))
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


def test_a_pause_that_comes_with_the_claim_is_told_as_such(scene: Scene) -> None:
    """Claims that are refused because of a pause are not taken for rivals' doing."""
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", scene.pause)

    assert why_idle(scene.work(scene.delivery(log=log)))[0] == "paused"


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_pause_before_the_plan_leaves_the_batch_idle(scene: Scene, mode: DeliveryMode) -> None:
    """A claim that was won just before the pause is given up: nothing is planned in a paused group."""
    log = scene.meddled(Side.BEFORE, "ClaimingMessages", scene.pause)

    batch = scene.work(scene.delivery(mode, log=log))

    assert why_idle(batch)[0] == "paused"
    assert not scene.counts(mode)
    assert (scene.key().owner, scene.key().plan_end) == (None, None)


def test_a_pause_before_the_plan_of_at_most_once_is_an_error(scene: Scene) -> None:
    """At most once plans when it is about to process; refused then, nothing is processed and nothing committed."""
    log = scene.meddled(Side.BEFORE, "ClaimingMessages", scene.pause)

    with pytest.raises(PlanRejectedError, match="the group is paused"):
        scene.work(scene.delivery(AT_MOST_ONCE, log=log))

    assert not scene.processed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_in_hand_is_finished_in_a_pause(scene: Scene, mode: DeliveryMode) -> None:
    """A pause ends no claim: the batch is processed, committed and released."""
    with scene.batch(scene.delivery(mode)) as batch:
        batch.begin_processing()
        scene.pause()
        scene.process(batch)

    assert batch.committed
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)
    assert scene.key().owner is None


# Rivals


def test_what_others_hold_is_told_with_who_holds_it(scene: Scene) -> None:
    """A batch that finds everything held says so, and by whom."""
    with scene.batch(scene.delivery()) as other:
        other.begin_processing()
        reason, text = why_idle(scene.work(scene.delivery()))

    assert reason == "held"
    assert "held by client1" in text


def test_only_who_holds_something_to_read_is_named(scene: Scene) -> None:
    """Owners of drained partitions, and dead ones of plans that are left alone, are in nobody's way."""
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
    """A partition with nothing to read is in the way too when all or nothing is wanted."""
    scene.drain(scene.delivery())
    scene.data.append(0, 3)
    scene.about(ClaimingPartition, "bystander.1", 1)

    reason, text = why_idle(scene.work(scene.delivery(), claim_entire_topic=True))

    assert reason == "held"
    assert "can only be claimed as a whole, but bystander.1's client holds partition 1" in text


def test_some_that_are_held_are_not_all(scene: Scene) -> None:
    """Claims that did not come through, beside a partition that another holds."""
    scene.work(scene.delivery(), max_records=3)
    log = FaultyLog(scene.log())
    log.fail(Fault.FAILED, of_type("ClaimingPartition"))
    with pytest.raises(ZeroDivisionError), scene.batch(scene.delivery(), partitions=(0,)):
        reason, text = why_idle(scene.work(scene.delivery(log=log)))
        raise ZeroDivisionError

    assert reason == "held"
    assert "some are held by client2" in text


def test_what_the_own_run_holds_is_told_as_such(scene: Scene) -> None:
    """A process of the same run that died has not released: the batch says whose it is, and for how long."""
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
    """A dead member's partitions may be all that is left: until they can be claimed the topic is not drained."""
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
    """When no claim came through, there is still something to read."""

    class Deaf(FaultyLog):
        """Acknowledges no claim, and none arrives."""

    log = Deaf(scene.log())
    delivery = scene.delivery(log=log)
    scene.work(scene.delivery(), max_records=1)
    log.is_down = False
    log.before_append = lambda: setattr(log, "is_down", True)
    log.after_append = lambda: setattr(log, "is_down", False)

    assert why_idle(scene.work(delivery))[0] == "held"


def test_dead_owners_claims_are_taken_at_once(scene: Scene) -> None:
    """Where Dagster says that an owner's run is over, nobody waits until it is stale."""
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
    """A member that was taken over commits nothing, and its error names its successor."""
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
    """Nobody else has claimed yet; still a member whose lease ended stops by itself."""
    batch = scene.batch(scene.delivery())
    with pytest.raises(ClaimLostError, match=r"its lease ended: .* this same instance as owner"), batch:
        scene.process(batch)
        scene.clock.advance(1.9 * HI_MS)

    assert not batch.committed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


def test_processing_does_not_begin_past_the_lease(scene: Scene) -> None:
    """Between the claim and the reading a member may have slept: it asks its lease before it processes."""
    with pytest.raises(ClaimLostError), scene.batch(scene.delivery()) as batch:
        scene.clock.advance(1.9 * HI_MS)
        batch.begin_processing()
        pytest.fail("may process")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_revoked_batch_commits_nothing(scene: Scene, mode: DeliveryMode) -> None:
    """A claim that was revoked, by mistake even, is over at the next record; what was processed is not committed."""
    batch = scene.batch(scene.delivery(mode))
    with pytest.raises(ClaimLostError, match="held by no instance"), batch:
        for partition in range(3):
            owner = scene.key(partition).owner
            assert owner is not None
            scene.about(RevokingClaim, "ops.1", partition, epoch=owner.epoch)
        scene.process(batch)

    assert not batch.committed
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


# Worn-out plans


def test_a_plan_with_too_many_attempts_is_left_alone(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """After the first execution and two more nobody tries again; the batch says which plan and what to do."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)
    before = scene.values()

    with caplog.at_level(logging.ERROR):
        reason, text = why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))

    assert reason == "given_up"
    assert "partition 1 [0, 5)" in text
    assert f"run `marshal-dagster retry {GROUP} {TOPIC} 1`, or set the position past" in text
    assert "partition 1 [0, 5)" in caplog.text
    assert scene.values() == before, "not even claimed"


def test_a_plan_whose_owners_all_died_is_left_alone(scene: Scene) -> None:
    """An owner that is dead and stale holds nothing: what is said is that its plan was given up."""
    for _ in range(3):
        die_planned(scene, partitions=(1,))
    scene.wait_until_stale()

    assert why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))[0] == "given_up"


def test_one_more_attempt_can_be_asked_for(scene: Scene) -> None:
    """A person's attempt takes the plan as it is; when it fails, the next run leaves it alone again."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)

    again = fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2, retry_exhausted=True)
    assert [str(range_) for range_ in again.ranges] == [f"{TOPIC}/1 [0, 5)"]
    assert why_idle(scene.work(scene.delivery(), partitions=(1,), max_attempts=2))[0] == "given_up"
    scene.work(scene.delivery(), partitions=(1,), max_attempts=2, retry_exhausted=True)

    assert scene.key(1).offset == 5
    assert (scene.key(1).plan_end, scene.key(1).plan_attempts) == (None, 0)


def test_a_worn_out_plan_is_found_at_the_claim_too(scene: Scene) -> None:
    """Of two members that try the last attempt at once, the second finds out when it has won, and lets go."""
    for _ in range(2):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)
    rival = scene.delivery()
    log = scene.meddled(
        Side.BEFORE, "ClaimingPartition", lambda: fail_once(scene, rival, partitions=(1,), max_attempts=2)
    )

    assert why_idle(scene.work(scene.delivery(log=log), partitions=(1,), max_attempts=2))[0] == "given_up"
    assert scene.key(1).owner is None


def test_a_worn_out_plan_is_told_of_though_the_rest_is_drained(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The other partitions go on; a run never says drained while a plan is left alone."""
    for _ in range(3):
        fail_once(scene, scene.delivery(), partitions=(1,), max_attempts=2)

    with caplog.at_level(logging.ERROR):
        batches = scene.drain(scene.delivery(), max_attempts=2)

    assert [len(batch.ranges) for batch in batches] == [2, 0]
    assert why_idle(batches[-1])[0] == "given_up"
    assert "partition 1 [0, 5)" in caplog.text
    assert set(scene.processed) == {place for place in scene.data.all_messages() if place[0] != 1}


def test_a_worn_out_plan_is_told_of_beside_what_others_hold(scene: Scene) -> None:
    """Both reasons are in the text."""
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
    """Partitions that have nothing to read are held too, until the batch ends."""
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
    """While another holds any partition of it, none is taken."""
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
    """What was won beside a rival is given up."""
    scene.work(scene.delivery(), max_records=3)
    other = scene.batch(scene.delivery(), partitions=rivals)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", other.__enter__)

    assert why_idle(scene.work(scene.delivery(log=log), claim_entire_topic=True))[0] == "held"
    assert [scene.key(n).owner is None for n in range(3)] == [n not in rivals for n in range(3)]
    other.begin_processing()
    other.__exit__(None, None, None)


def test_the_entire_topic_is_not_claimed_when_it_is_drained(scene: Scene) -> None:
    """Where all is done, a run writes nothing into the log."""
    scene.work(scene.delivery(), claim_entire_topic=True)
    before = scene.values()

    assert why_idle(scene.work(scene.delivery(), claim_entire_topic=True))[0] == "drained"
    assert scene.values() == before


def test_the_entire_topic_waits_for_a_person_when_one_plan_is_worn_out(scene: Scene) -> None:
    """All or nothing holds for plans that are left alone, too."""
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
    """Whatever ends the block, its claims are free for the next run at once, and its plan is open."""
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
    """Interrupted between the claim and the block, nothing is held any more."""

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
    """Name the threads that keep the batch's claims alive."""
    heartbeats = batch._guard.heartbeats
    return [thread.name for thread in heartbeats._threads if thread.is_alive()] if heartbeats else []


def _interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool = False) -> None:
    """Let the next call of a method be interrupted at its entry, or just before it returns."""
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
    """Heartbeats that went on would hold the partitions for as long as the process lives."""
    batch = scene.batch(scene.delivery())
    with pytest.raises(KeyboardInterrupt), batch:
        assert len(heartbeat_threads(batch)) == 2
        batch.begin_processing()
        if place == "release":
            _interrupt_once(monkeypatch, batch._guard, "release")
        elif place == "stack.close":
            _interrupt_once(monkeypatch, batch._guard.stack, "close")
        else:  # the stack has forgotten them by then
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
    """It may come just when the heartbeats have begun, or on the way out after another error."""
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
    """Whether it is still the same topic cannot be known: nothing is committed, and the next run does it again."""
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
    """Only tools that show lag read them: a warning is enough."""
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
    """After each batch the offsets committed are Kafka's for the group, too."""
    scene.work(scene.delivery(mode), max_records=7)
    assert scene.data.committed == {(GROUP, TOPIC): {0: 3, 1: 2, 2: 2}}
    scene.drain(scene.delivery(mode))
    assert scene.data.committed == {(GROUP, TOPIC): {0: 5, 1: 5, 2: 5}}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_kafkas_group_offsets_are_set_while_the_partitions_are_held(scene: Scene, mode: DeliveryMode) -> None:
    """Set after the release they could set back what a successor has committed by then."""
    holders: list[str] = []
    tell = scene.data.commit_group_offsets

    def noted(group: str, topic: str, offsets: Mapping[int, int], metadata: str = "") -> str | None:  # noqa: ARG001
        holders.extend(owner.instance for n in range(3) if (owner := scene.key(n).owner) is not None)
        return tell(group, topic, offsets)

    delivery = scene.delivery(mode)
    delivery.data.commit_group_offsets = noted  # type: ignore[method-assign]
    batch = scene.work(delivery)

    assert holders == [batch.batch_id] * 3
    assert scene.data.committed == {(GROUP, TOPIC): {0: 5, 1: 5, 2: 5}}


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("x"), {0: 5, 1: 5, 2: 5}), (KeyboardInterrupt(), {})], ids=repr
)
def test_an_interrupted_batch_waits_for_no_group_offsets(
    scene: Scene, error: BaseException, told: dict[int, int]
) -> None:
    """At most once has committed when its work fails: Kafka is told, unless an interrupt wants it to end at once."""
    with pytest.raises(type(error)), scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        batch.begin_processing()
        raise error

    assert scene.data.committed.get((GROUP, TOPIC), {}) == told


def test_kafkas_group_offsets_are_not_set_by_who_lost_the_claim(scene: Scene) -> None:
    """At most once committed, then its lease ended: who has the partitions by now may be further."""
    with pytest.raises(ValueError, match="x"), scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        batch.begin_processing()
        scene.clock.advance(1.9 * HI_MS)
        raise ValueError("x")

    assert scene.data.committed.get((GROUP, TOPIC), {}) == {}


# Heartbeats and reasons to stop


def test_a_reason_to_stop_ends_the_batch(scene: Scene) -> None:
    """When the run is over, the batch fails with that reason, whatever its own work then said."""
    over = threading.Event()
    settings = GroupSettings(50)
    delivery = scene.delivery(settings=settings, reasons_to_stop=[lambda: "the run is over" if over.is_set() else None])
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="the run is over") as raised, batch:
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim", 10)
        raise ValueError("Spark was cancelled")

    assert isinstance(raised.value.__cause__, ValueError)
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_lost_claims_are_told_in_every_mode(scene: Scene, mode: DeliveryMode) -> None:
    """Work that fails because the claim was lost meanwhile fails with the loss, after an early commit too."""
    over = threading.Event()
    delivery = scene.delivery(
        settings=GroupSettings(50, RuleSet.NATIVE, mode), reasons_to_stop=[lambda: "told" if over.is_set() else None]
    )
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="told"), batch:
        batch.begin_processing()
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim", 10)
        raise ValueError("Spark was cancelled")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_whose_heartbeats_ended_does_nothing_more(scene: Scene, mode: DeliveryMode) -> None:
    """Neither may it begin to process, nor write, nor commit; and the error is the reason itself."""
    over = threading.Event()
    delivery = scene.delivery(
        settings=GroupSettings(50, RuleSet.NATIVE, mode), reasons_to_stop=[lambda: "told" if over.is_set() else None]
    )
    batch = scene.batch(delivery)
    with pytest.raises(BatchAbortedError, match="told") as raised, batch:
        over.set()
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim", 10)
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
    """Count the heartbeats in the log."""
    return sum(value.startswith(Heartbeat.__name__) for value in scene.values())


def wait_for_beats(scene: Scene, count: int) -> None:
    """Wait until there are so many heartbeats in the log."""
    wait_until(lambda: beats(scene) == count, "the heartbeats are in the log", 10)


def test_long_work_is_kept_alive(scene: Scene) -> None:
    """Heartbeats at the present offset go on while the block works, and commit nothing."""
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
    """The error says which value differs, and nothing is claimed."""
    scene.work(scene.delivery(), max_records=3)
    before = scene.values()

    with pytest.raises(SettingsMismatchError, match=said):
        scene.work(scene.delivery(settings=other))

    assert scene.values() == before


@pytest.mark.parametrize("mode", [AT_MOST_ONCE, EFFECTIVELY_ONCE])
def test_a_group_shared_with_go_promises_at_least_once_only(scene: Scene, mode: DeliveryMode) -> None:
    """Rule set `go` refuses the other modes before anything is connected."""
    with pytest.raises(ConfigurationError, match="can only promise at_least_once"):
        scene.delivery(settings=GroupSettings(60_000, RuleSet.GO, mode))


def test_a_group_shared_with_go_works_at_least_once(scene: Scene) -> None:
    """At least once goes through under rule set `go`."""
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
    """Each batch is a tenure of its own; the last one says why there is no more."""
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
    """After `max_batches` batches with work there is no further one."""
    for batch in scene.delivery().batches(BatchRequest(topic=TOPIC, max_records=6), max_batches=most):
        with batch:
            if batch.idle is None:
                scene.process(batch)

    assert sum(scene.processed.values()) == done


def test_no_batch_begins_after_the_time_budget(scene: Scene) -> None:
    """One batch is always begun, none once the budget is spent."""
    for batch in scene.delivery().batches(BatchRequest(topic=TOPIC, max_records=6), time_budget_s=1e-9):
        with batch:
            scene.process(batch)

    assert sum(scene.processed.values()) == 6


def test_two_topics_in_turn(scene: Scene) -> None:
    """One delivery works on one topic after another, and back."""
    scene.data.make("payments", partitions=2, messages=4)
    delivery = scene.delivery()

    for topic in (TOPIC, "payments", TOPIC, "payments"):
        with delivery.claimed_batch(BatchRequest(topic=topic, max_records=5)) as batch:
            batch.begin_processing()
            assert {range_.topic for range_ in batch.ranges} == {topic}

    assert [scene.key(n, "payments").offset for n in range(2)] == [4, 4]
    assert sum(scene.key(n).offset or 0 for n in range(3)) == 10


def test_two_topics_at_once(scene: Scene) -> None:
    """Batches on two topics may be open together, in one process, wherever the topics' records lie in the log."""
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
    """A delivery keeps what it has read: no batch begins at the log's start again, however topics alternate."""
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
    """The report tells lag before and after, replays, and whether it was committed."""
    die_planned(scene, partitions=(1,), max_records=2)
    batch = scene.work(scene.delivery(), max_records=8)

    told = {report.range.partition: report for report in batch.report()}
    assert {n: (r.lag_before, r.lag_after, r.is_replay, r.state) for n, r in told.items()} == {
        0: (5, 2, False, "committed"),
        1: (5, 3, True, "committed"),
        2: (5, 2, False, "committed"),
    }
    failed = fail_once(scene, scene.delivery())
    assert {report.state for report in failed.report()} == {"not committed"}


def test_errors_are_of_one_tree() -> None:
    """Whatever a batch raises by itself can be caught as `MarshalError`."""
    assert all(
        issubclass(kind, MarshalError)
        for kind in (ClaimLostError, BatchAbortedError, PlanRejectedError, SettingsMismatchError)
    )


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_batch_whose_release_finds_the_log_truncated_says_so(scene: Scene, mode: DeliveryMode) -> None:
    """Its commit was seen in the log, and may be lost since: whoever relies on it must hear of that."""
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
