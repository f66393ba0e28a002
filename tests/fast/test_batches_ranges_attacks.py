"""Batches of ranges under interrupts at any line, and with rivals and expired leases at the worst moment."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from marshal_dagster.batches import (
    ClaimedBatch,
    Idle,
    IdleReason,
    RangeOptions,
    batch,
    claim_guard,
    early_commit,
    partition_source,
    range_source,
)
from marshal_dagster.coordination import appender, base_claimer, claimer, claims, range_claimer
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.errors import ClaimLostError, DataTopicChangedError
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DeliveryMode,
    Heartbeat,
    RevokingRange,
)
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import HI_MS, Place, Scene
from tests.faulty_log import InterruptError
from tests.line_interrupts import watched
from tests.real.kill_points import Side

AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE = DeliveryMode
ALL_MODES = list(DeliveryMode)
TEN = RangeOptions(size=10)
IDLE = Idle(IdleReason.DRAINED, "")
AHEAD = RangeOptions(size=10, prefetch_offsets=10, wait_s=0.5)


@pytest.fixture
def scene() -> Scene:
    """A data topic of two partitions with 12 messages each, and a group without any record."""
    scene = Scene()
    scene.data.make(partitions=2, messages=12)
    return scene


def ranged_batch(
    scene: Scene,
    mode: DeliveryMode = AT_LEAST_ONCE,
    *,
    log: CoordinationLog | None = None,
    **limits: Any,  # noqa: ANN401
) -> ClaimedBatch:
    """Return a batch of a new member that claims ranges."""
    return scene.batch(scene.delivery(mode, ranges=True, log=log), **{"ranges": TEN, **limits})


def bounds(of: ClaimedBatch) -> list[tuple[int, int, int]]:
    """Return partition, start and end of a batch's ranges."""
    return [(range_.partition, range_.start, range_.end) for range_ in of.all_ranges]


def after_looks(scene: Scene, count: int, act: Callable[[], object]) -> None:
    """Run a function at the `count`th request for the data topic's bounds from now on, counted from 0."""
    looks = iter(range(count))

    def look() -> None:
        if next(looks, None) is None:
            scene.data.before_offsets = lambda: None
            act()

    scene.data.before_offsets = look


# Interrupts

CODE = (
    base_claimer,
    batch,
    claim_guard,
    claimer,
    early_commit,
    range_claimer,
    range_source,
    appender,
    claims,
    partition_source,
)
UNINTERRUPTED = ("with ", "try:", "pass\n", "return self\n")
"""Python does not handle signals before these lines, though it traces them: they neither call nor jump."""


def finish(scene: Scene, it: ClaimedBatch) -> None:
    """Process a batch."""
    if it.idle is None:
        scene.process(it)


def fail(_: Scene, it: ClaimedBatch) -> None:
    """Raise an error in the block."""
    assert it.ranges
    raise ZeroDivisionError


def prepared(case: str, mode: DeliveryMode) -> tuple[Scene, ClaimedBatch]:
    """Return a batch to enter: with new ranges, an open plan of a whole partition, or a range of future offsets."""
    scene = Scene()
    scene.data.make(partitions=2, messages=12)
    if case == "ahead":
        scene.drain(scene.delivery(mode, ranges=True), ranges=TEN)
        it = ranged_batch(scene, mode, ranges=AHEAD)
        after_looks(scene, 3, lambda: scene.data.append(1, 2))
        return scene, it
    if case == "whole":
        with ranged_batch(scene, mode, ranges=RangeOptions(size=3)) as first:
            scene.process(first)
        scene.about(ClaimingPartition, "a.1")
        scene.about(ClaimingMessages, "a.1", plan_end=7)
        scene.wait_until_stale()
    return scene, ranged_batch(scene, mode)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "mode", "work"),
    [
        ("new", AT_MOST_ONCE, finish),
        ("ahead", EFFECTIVELY_ONCE, finish),
        ("whole", AT_LEAST_ONCE, fail),
    ],
)
def test_an_interrupt_at_any_line_leaves_nothing_held(
    case: str, mode: DeliveryMode, work: Callable[[Scene, ClaimedBatch], None]
) -> None:
    """No claim remains, each delivery mode keeps its guarantee, and at most once reports all that it drops."""
    scene, it = prepared(case, mode)
    seen: list[tuple[str, int]] = []
    with suppress(ZeroDivisionError), watched(CODE, seen.append, but=UNINTERRUPTED), it:
        work(scene, it)
    last_visits = {place: index for index, place in enumerate(seen)}
    assert len(last_visits) > 200

    for place, index in last_visits.items():
        scene, it = prepared(case, mode)
        lines = iter(range(index))

        def interrupt(_: tuple[str, int], lines: Iterator[int] = lines) -> None:
            if next(lines, None) is None:
                raise InterruptError

        with suppress(ZeroDivisionError, InterruptError), watched(CODE, interrupt, but=UNINTERRUPTED), it:
            work(scene, it)
        assert_left(scene, it, mode, place)


def assert_left(scene: Scene, it: ClaimedBatch, mode: DeliveryMode, place: tuple[str, int]) -> None:
    """Check that nothing of the batch is held and that each message was processed as the delivery mode guarantees."""
    threads = it._guard.heartbeats._threads if it._guard.heartbeats else []
    assert [thread.name for thread in threads if thread.is_alive()] == [], place
    for key in map(scene.key, (0, 1)):
        owners = [each.owner.instance for each in (key, *key.ranges) if each.owner is not None]  # type: ignore[attr-defined]
        assert [owner for owner in owners if not owner.startswith("a.")] == [], place

    scene.data.before_offsets = lambda: None
    last = scene.drain(scene.delivery(mode, ranges=True), ranges=RangeOptions(size=4))[-1]
    assert last.idle is not None
    assert last.idle.reason is IdleReason.DRAINED, (place, last.idle)
    counts, once = scene.counts(mode), Counter(scene.data.all_messages())
    more, fewer = set(counts - once), set(once - counts)
    if mode is AT_LEAST_ONCE:
        more -= places(it.all_ranges)
    if mode is AT_MOST_ONCE:
        fewer -= places(it.dropped)
    assert (more, fewer) == (set(), set()), place


def places(ranges: Any) -> set[Place]:  # noqa: ANN401
    """Return all offsets of the ranges."""
    return {(range_.partition, offset) for range_ in ranges for offset in range(range_.start, range_.end)}


# Rivals


def test_what_was_refused_is_looked_for_anew(scene: Scene) -> None:
    """If several runs try to claim the lowest range at once, a run that loses gets the next range and is not idle."""
    scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,))
    scene.data.append(0, 20)
    rival = ranged_batch(scene, partitions=(0,))
    log = scene.meddled(Side.BEFORE, "ClaimingRange", rival.__enter__)

    late = scene.work(scene.delivery(ranges=True, log=log), ranges=TEN, partitions=(0,))

    assert bounds(rival) == [(0, 10, 20)]
    assert bounds(late) == [(0, 20, 30)]
    rival.__exit__(ValueError, ValueError(), None)


def test_what_is_refused_and_looks_the_same_is_left(scene: Scene) -> None:
    """A member with a fast clock may take a live owner for stale.

    After one refused claim it stops trying that range.
    """
    scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,))
    fast = scene.delivery(ranges=True)
    fast.clock = ManualClock(scene.clock.wall_ms() + 3 * HI_MS)
    with ranged_batch(scene, partitions=(0,)) as owner:
        before = len(scene.values())
        idle = scene.work(fast, ranges=TEN, partitions=(0,)).idle
        requested = [value for value in scene.values()[before:] if value.startswith("ClaimingRange")]
        scene.process(owner)

    assert idle is not None
    assert idle.reason is IdleReason.HELD
    assert len(requested) == 1


def test_what_is_refused_is_passed_over(scene: Scene) -> None:
    """A member with a fast clock and a low limit works on another, free partition: seed 238439."""
    scene.work(scene.delivery(ranges=True), ranges=TEN)
    scene.data.append(0, 20)
    scene.data.append(1, 5)
    fast = scene.delivery(ranges=True)
    fast.clock = ManualClock(scene.clock.wall_ms() + 3 * HI_MS)
    with ranged_batch(scene, partitions=(0,), max_records=20) as owner:
        batch = scene.work(fast, ranges=TEN, max_records=5)
        scene.process(owner)

    assert [range_.partition for range_ in batch.all_ranges] == [1]


def test_a_whole_plan_that_is_left_alone_is_reported_as_such(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A plan of a whole partition that was tried too often is reported with its range and what to do."""
    scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,))
    scene.about(ClaimingPartition, "a.1")
    scene.about(ClaimingMessages, "a.1", plan_end=12)
    for tries in (2, 3):
        scene.wait_until_stale()
        scene.about(ClaimingPartition, f"a.{tries}")
    held = scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,), max_attempts=2).idle
    scene.wait_until_stale()

    left = scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,), max_attempts=2).idle

    assert held is not None
    assert (held.reason, "a.3's client" in held.text) == (IdleReason.HELD, True)
    assert left is not None
    assert left.reason is IdleReason.GIVEN_UP
    assert "partition 0 [10, 12)" in left.text
    assert "or skip its offsets: `marshal-dagster position reset etl orders --to-offset 0=12`" in caplog.text
    again = scene.work(scene.delivery(ranges=True), ranges=TEN, partitions=(0,), retry_exhausted=True)
    assert bounds(again) == [(0, 10, 12)]


def test_an_owner_is_waited_for_until_it_is_stale(scene: Scene) -> None:
    """A run that finds its own dead process's range held until this millisecond waits one millisecond more."""
    mine = scene.delivery(ranges=True)
    with scene.batch(mine, ranges=RangeOptions(size=100)) as dead:
        dead._claims.claimer.release = lambda _=None: None  # type: ignore[method-assign, assignment]
        dead.begin_processing()
        dead.idle = IDLE
    scene.clock.advance(2 * HI_MS)
    last = scene.work(mine, ranges=TEN).idle
    scene.clock.advance(1)

    assert last is not None
    assert (last.reason, last.stale_in_s) == (IdleReason.HELD, 0.0)
    assert bounds(scene.work(mine, ranges=TEN)) == [(0, 0, 12), (1, 0, 12)]


def test_of_many_who_hold_ranges_some_are_named(scene: Scene) -> None:
    """A partition may be held by 256 members, so the text names only some of them."""
    with ExitStack() as stack:
        for _ in range(6):
            scene.process(stack.enter_context(ranged_batch(scene, ranges=RangeOptions(size=2))))
        idle = scene.work(scene.delivery(ranges=True), ranges=TEN).idle

    assert idle is not None
    assert "is held by client1, client2, client3 and 3 more" in idle.text


# Retention


@pytest.mark.parametrize("size", [10, 1_000])
def test_what_retention_has_deleted_takes_no_batches_of_its_own(scene: Scene, size: int) -> None:
    """Limits count the messages that are left to read, however many retention has deleted."""
    scene.work(scene.delivery(ranges=True), ranges=TEN)
    for partition in (0, 1):
        scene.data.append(partition, 988)
        scene.data.retain_from(partition, 990)
    scene.data.retain_from(1, 1_000)

    it = scene.work(scene.delivery(ranges=True), ranges=RangeOptions(size=size), max_records=4)

    assert bounds(it) == [(0, 10, 994), (1, 10, 1_000)]
    assert [range_.lost for range_ in it.ranges] == [(10, 990), (10, 1_000)]
    scene.drain(scene.delivery(ranges=True), ranges=RangeOptions(size=size))
    assert [scene.key(n).offset for n in (0, 1)] == [1_000, 1_000]


# At most once


def test_at_most_once_processes_nothing_whose_commit_was_refused(scene: Scene) -> None:
    """If a range was revoked just before its commit, only its next owner processes it."""
    log = scene.meddled(Side.BEFORE, "RangeDone", lambda: revoke(scene, 0))

    with ranged_batch(scene, AT_MOST_ONCE, log=log) as it:
        scene.process(it)

    assert [range_.partition for range_ in it.ranges] == [1]
    assert it.dropped == ()
    assert [report.state for report in it.report()] == ["not committed", "committed"]
    scene.drain(scene.delivery(AT_MOST_ONCE, ranges=True), ranges=TEN)
    assert scene.processed == Counter(scene.data.all_messages())


def test_at_most_once_processes_nothing_beside_a_go_consumer(scene: Scene) -> None:
    """If a member reads a Go consumer's commit together with its own, the batch fails and its ranges are dropped."""

    def go_consumer_commits() -> None:
        scene.about(ClaimingPartition, "1320e57a", 5)
        scene.about(Heartbeat, "1320e57a", 5, offset=1)
        scene.about(Heartbeat, "1320e57a", 5, offset=3)

    log = scene.meddled(Side.AFTER, "RangeDone", go_consumer_commits)

    it = ranged_batch(scene, AT_MOST_ONCE, log=log)
    with pytest.raises(ClaimLostError, match="'1320e57a' moved the offset of orders/5 without a plan"), it:
        scene.process(it)

    assert scene.processed == Counter()
    assert [report.state for report in it.report()] == ["dropped", "dropped"]


def revoke(scene: Scene, partition: int) -> None:
    """Revoke the lowest range of a partition."""
    owner = scene.key(partition).ranges[0].owner
    assert owner is not None
    scene.about(RevokingRange, "ops.1", partition, epoch=owner.epoch)


# Ranges of future offsets


def test_a_lease_that_ends_while_the_unused_is_released_is_reported_as_lost(scene: Scene) -> None:
    """Two ranges of future offsets are claimed and one gets messages; releasing the other may outlast the lease."""
    scene.drain(scene.delivery(ranges=True), ranges=TEN)
    it = ranged_batch(scene, ranges=AHEAD)
    after_looks(scene, 3, lambda: scene.data.append(0, 10))
    release = it._claims.claimer.release

    def slow(partitions: Any = None) -> None:  # noqa: ANN401
        scene.clock.advance(1.9 * HI_MS)
        release(partitions)

    it._claims.claimer.release = slow  # type: ignore[method-assign]
    with pytest.raises(ClaimLostError, match="its lease ended"), it:
        pytest.fail("entered")


def test_nothing_is_planned_of_a_topic_re_created_while_it_was_waited_for(scene: Scene) -> None:
    """The new topic has as many messages, so only its id differs."""
    scene.drain(scene.delivery(ranges=True), ranges=TEN)
    after_looks(scene, 3, lambda: scene.data.make(partitions=2, messages=60))

    with pytest.raises(DataTopicChangedError, match="deleted and re-created"), ranged_batch(scene, ranges=AHEAD):
        pytest.fail("entered")

    assert scene.key().ranges == ()
