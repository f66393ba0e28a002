# ruff: noqa: PT012, ANN401 - what raises is the block of a batch; limits as `BatchRequest`, extra as `BatchSession`
"""Batches of ranges: several members on one partition, delivery modes, and ranges of future offsets."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.batches import BatchSession, IdleReason, RangeOptions
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    ConfigurationError,
    DataLossError,
    DataTopicChangedError,
)
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    RuleSet,
)
from marshal_dagster.protocol.state import RANGES, Phase
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Place, Scene
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

if TYPE_CHECKING:
    from marshal_dagster.batches import ClaimedBatch

ALL_MODES = list(DeliveryMode)
AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE = DeliveryMode
TEN = RangeOptions(size=10)
APPENDS = ("ClaimingRange", "PlanningRange", "RangeDone", "ReleasingRange")
STEPS = [KillPoint(side, record, count) for record in APPENDS for side in Side for count in (1, 2, 3)]


@pytest.fixture
def scene() -> Scene:
    """A data topic of one partition with 35 messages, and a group without any record."""
    scene = Scene()
    scene.data.make(partitions=1, messages=35)
    return scene


def member(scene: Scene, mode: DeliveryMode = AT_LEAST_ONCE, **extra: Any) -> BatchSession:
    """Open a member that claims ranges."""
    return scene.delivery(mode, ranges=True, **extra)


@contextmanager
def one_batch(scene: Scene, **limits: Any) -> Iterator["ClaimedBatch"]:
    """Let a new member claim a batch, and process nothing of it."""
    batch = scene.batch(member(scene, AT_MOST_ONCE), **{"ranges": TEN, **limits})
    with pytest.raises(BatchAbortedError, match="nothing was read"), batch:
        yield batch


def while_asleep(scene: Scene, act: Callable[[], object]) -> None:
    """Run a function whenever a member sleeps."""

    class BusyClock(ManualClock):
        def sleep_ms(self, duration_ms: float) -> None:
            super().sleep_ms(duration_ms)
            act()

    scene.clock.__class__ = BusyClock


def bounds(batch: "ClaimedBatch") -> list[tuple[int, int]]:
    """Return start and end of a batch's ranges."""
    return [(range_.start, range_.end) for range_ in batch.all_ranges]


def spans(scene: Scene) -> list[tuple[int, int, Phase]]:
    """Return the ranges of partition 0 in the log."""
    return [(range_.start, range_.end, range_.phase) for range_ in scene.key().ranges]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_members_work_on_one_partition_at_once(scene: Scene, mode: DeliveryMode) -> None:
    """Each member gets the next range.

    The group's offset moves past completed ranges once there is no gap before them.
    """
    first, second, third = (scene.batch(member(scene, mode), ranges=TEN) for _ in range(3))
    with first:
        with second:
            with third:
                assert [bounds(each) for each in (first, second, third)] == [[(0, 10)], [(10, 20)], [(20, 30)]]
                scene.process(third)
            assert scene.key().offset == 0
            scene.process(second)
        assert (scene.key().offset, spans(scene)) == (0, [(0, 10, first_phase(mode)), (10, 30, Phase.DONE)])
        scene.process(first)

    assert (scene.key().offset, scene.key().ranges) == (30, ())
    scene.drain(member(scene, mode), ranges=TEN)
    assert scene.key().offset == 35
    assert scene.counts(mode) == Counter(scene.data.all_messages())


def first_phase(mode: DeliveryMode) -> Phase:
    """Return the phase of a range before it is processed: at most once plans only when processing starts."""
    return Phase.CLAIMED if mode is AT_MOST_ONCE else Phase.PLANNED


@pytest.mark.parametrize("at", STEPS, ids=str)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_member_that_dies_at_any_step(scene: Scene, mode: DeliveryMode, at: KillPoint) -> None:
    """At most once repeats nothing and at least once loses nothing; only one range is affected.

    Effectively once is exact.
    """
    delivery = member(scene, mode, log=KillableLog(scene.log(), at))
    last: ClaimedBatch | None = None
    its_batch: set[Place] = set()
    try:
        for _ in range(4):
            last = scene.batch(delivery, ranges=TEN)
            with last:
                scene.process(last)
    except KilledError:
        assert last is not None
        its_batch = {
            (range_.partition, offset) for range_ in last.all_ranges for offset in range(range_.start, range_.end)
        }
    else:
        assert at.record == "ReleasingRange"
    scene.wait_until_stale()
    scene.drain(member(scene, mode), ranges=RangeOptions(size=7))

    assert scene.key().offset == 35
    counts, once = scene.counts(mode), Counter(scene.data.all_messages())
    if mode is EFFECTIVELY_ONCE:
        assert counts == once
        return
    more, fewer = counts - once, once - counts
    assert not (more if mode is AT_MOST_ONCE else fewer)
    assert set(more | fewer) <= its_batch
    assert max((more | fewer).values(), default=1) == 1


def test_what_a_dead_member_planned_is_replayed_exactly(scene: Scene) -> None:
    """The next owner gets the same range, whatever its own range size, while others process higher offsets."""
    dying = member(scene, log=KillableLog(scene.log(), KillPoint(Side.BEFORE, "RangeDone")))
    with pytest.raises(KilledError), scene.batch(dying, ranges=TEN) as batch:
        scene.process(batch)
    assert bounds(scene.work(member(scene), ranges=RangeOptions(size=4))) == [(10, 14)]
    scene.wait_until_stale()

    again = scene.work(member(scene), ranges=RangeOptions(size=4))

    assert bounds(again) == [(0, 10)]
    assert [each.is_replay for each in again.report()] == [True]
    assert scene.key().offset == 14


def test_the_dead_by_what_dagster_says_are_not_waited_for(scene: Scene) -> None:
    """If Dagster reports an owner's run as over, its range is revoked at once."""
    dying = member(scene, log=KillableLog(scene.log(), KillPoint(Side.BEFORE, "RangeDone")))
    with pytest.raises(KilledError), scene.batch(dying, ranges=TEN) as batch:
        scene.process(batch)

    assert bounds(scene.work(member(scene, is_dead=lambda _: True), ranges=TEN)) == [(0, 10)]


def test_partitions_get_a_range_each(scene: Scene) -> None:
    """A batch has one range of each partition, and limits count all of them."""
    scene.data.make(partitions=3, messages=20)
    with one_batch(scene) as batch:
        assert bounds(batch) == [(0, 10)] * 3
    with one_batch(scene, max_claims=2) as batch:
        assert [range_.partition for range_ in batch.ranges] == [0, 1]
    with one_batch(scene, max_records=6) as batch:
        assert bounds(batch) == [(0, 2)] * 3
    with one_batch(scene, partitions=(2,)) as batch:
        assert [one.partition for one in batch.ranges] == [2]


@pytest.mark.parametrize("limits", [{"max_records": 2}, {"max_claims": 1}], ids=str)
def test_what_is_left_behind_comes_first(scene: Scene, limits: dict[str, int]) -> None:
    """A small gap below completed ranges holds the group's offset back, so it comes before wider ranges elsewhere."""
    scene.data.make(partitions=2, messages=10)
    scene.data.append(1, 4)
    with one_batch(scene, ranges=RangeOptions(size=2), partitions=(1,)):
        scene.work(member(scene, AT_MOST_ONCE), ranges=RangeOptions(size=12), partitions=(1,))

    with one_batch(scene, **limits) as batch:
        assert [(range_.partition, range_.start, range_.end) for range_ in batch.ranges] == [(1, 0, 2)]


def test_what_retention_took_of_a_plan_is_not_counted(scene: Scene) -> None:
    """Deleted offsets do not count toward `max_records`, neither in open plans nor in new ranges."""
    scene.data.make(partitions=2, messages=14)
    dying = member(scene, log=KillableLog(scene.log(), KillPoint(Side.BEFORE, "RangeDone")))
    with pytest.raises(KilledError), scene.batch(dying, ranges=TEN, partitions=(0,)) as batch:
        scene.process(batch)
    for partition in range(2):
        scene.data.retain_from(partition, 8)
    scene.wait_until_stale()

    batch = scene.work(member(scene), ranges=RangeOptions(size=4), max_records=5)

    assert bounds(batch) == [(0, 10), (0, 11)]


def test_a_plan_of_a_whole_partition_is_carried_out_whole_first(scene: Scene) -> None:
    """Such a plan may exist from the time before the group used ranges."""
    scene.work(member(scene), ranges=TEN)
    scene.about(ClaimingPartition, "a.1")
    scene.about(ClaimingMessages, "a.1", plan_end=17)
    scene.wait_until_stale()

    batch = scene.work(member(scene), ranges=TEN)

    assert bounds(batch) == [(10, 17)]
    assert scene.key().offset == 17
    assert bounds(scene.work(member(scene), ranges=TEN)) == [(17, 27)]


def test_the_first_positions_are_given_before_ranges_are_claimed(scene: Scene) -> None:
    """A claim of the whole partition sets the first position and is released before ranges are claimed."""
    with one_batch(scene) as batch:
        kinds = [value.split("/", 1)[0] for value in scene.values()]
        assert kinds.index("ReleasingPartition") < kinds.index("ClaimingRange")
        assert scene.key().owner is None
        assert batch.batch_id.startswith("run1.")


def test_ranges_are_claimed_ahead_and_filled(scene: Scene) -> None:
    """If nothing is unread, a range of future offsets is claimed and filled up to its size."""
    scene.drain(member(scene), ranges=TEN)
    options = RangeOptions(size=10, prefetch_offsets=10, wait_s=5)
    arriving = iter([3, 4, 3, 100])
    while_asleep(scene, lambda: scene.data.append(0, next(arriving)))

    with scene.batch(member(scene), ranges=options) as batch:
        assert bounds(batch) == [(35, 45)]
        scene.process(batch)

    assert scene.key().offset == 45


def test_who_has_waited_long_enough_takes_what_has_come(scene: Scene) -> None:
    """After the wait, the batch takes the messages that have arrived, and the rest of the range is free again."""
    scene.drain(member(scene), ranges=TEN)
    scene.data.append(0, 0)
    options = RangeOptions(size=10, prefetch_offsets=10, wait_s=1)
    arriving = iter([4])
    while_asleep(scene, lambda: scene.data.append(0, next(arriving, 0)))

    with scene.batch(member(scene), ranges=options) as batch:
        assert bounds(batch) == [(35, 39)]
        assert spans(scene) == [(35, 39, Phase.PLANNED)]
        scene.process(batch)

    idle = scene.work(member(scene), ranges=options).idle
    assert idle is not None
    assert idle.reason is IdleReason.DRAINED
    assert (scene.key().offset, scene.key().ranges) == (39, ())


def test_why_there_is_nothing_to_do(scene: Scene) -> None:
    """The reasons: others hold the rest, the same run holds it (with the time until stale), paused, drained."""
    mine = member(scene)
    with scene.batch(mine, ranges=RangeOptions(size=100)) as batch:
        held = scene.work(member(scene), ranges=TEN).idle
        own = scene.work(mine, ranges=TEN).idle
        scene.pause()
        paused = scene.work(member(scene), ranges=TEN).idle
        scene.process(batch)
    scene.clock.advance(3_600_000)
    drained = scene.work(member(scene), ranges=TEN).idle

    assert held is not None
    assert (held.reason, held.stale_in_s) == (IdleReason.HELD, None)
    assert "the rest is held by client1" in held.text
    assert own is not None
    assert (own.reason, own.stale_in_s) == (IdleReason.HELD, 2 * HI_MS / 1_000)
    assert paused is not None
    assert paused.reason is IdleReason.PAUSED
    assert drained is not None
    assert drained.reason is IdleReason.DRAINED


def test_a_range_that_keeps_failing_stops_nobody_behind_it(scene: Scene) -> None:
    """The range is skipped once its attempts are exhausted. The offset stays before it until an operator acts."""
    for _ in range(3):
        with pytest.raises(RuntimeError), scene.batch(member(scene), ranges=TEN, max_attempts=2) as batch:
            assert bounds(batch) == [(0, 10)]
            raise RuntimeError
    batches = scene.drain(member(scene), ranges=TEN, max_attempts=2)

    idle = batches[-1].idle
    assert idle is not None
    assert idle.reason is IdleReason.GIVEN_UP
    assert "partition 0 [0, 10)" in idle.text
    assert (scene.key().offset, spans(scene)) == (0, [(0, 10, Phase.PLANNED), (10, 35, Phase.DONE)])
    scene.drain(member(scene), ranges=TEN, retry_exhausted=True)
    assert scene.key().offset == 35


def test_retention_has_taken_part_of_a_range(scene: Scene) -> None:
    """The remaining messages are read and the loss is reported, unless `allow_data_loss` is false."""
    scene.work(member(scene), ranges=TEN)
    scene.data.retain_from(0, 14)
    with scene.batch(member(scene), ranges=TEN) as batch:
        assert [range_.lost for range_ in batch.ranges] == [(10, 14)]
        scene.process(batch)
    assert scene.key().offset == 24
    scene.data.retain_from(0, 25)
    with pytest.raises(DataLossError), scene.batch(member(scene), ranges=TEN, allow_data_loss=False):
        pytest.fail("entered")


def test_a_topic_re_created_is_not_read(scene: Scene) -> None:
    """The topic's id differs from the one in the state."""
    scene.work(member(scene), ranges=TEN)
    scene.data.make(partitions=1, messages=35)
    with pytest.raises(DataTopicChangedError), scene.batch(member(scene), ranges=TEN):
        pytest.fail("entered")


def test_a_lost_range_is_noticed_before_the_output_is_touched(scene: Scene) -> None:
    """A lease that ended while Spark read is noticed before the write."""
    scene.sink.while_reading = lambda: scene.clock.advance(1.9 * HI_MS)
    with pytest.raises(ClaimLostError, match="its lease ended"):
        scene.work(member(scene, EFFECTIVELY_ONCE), ranges=TEN)
    assert scene.sink.rows == []


def test_kafka_gets_the_offset_and_not_what_is_done_ahead(scene: Scene) -> None:
    """Lag tools need the offset before which nothing is missing."""
    first, second = (scene.batch(member(scene), ranges=TEN) for _ in range(2))
    with first:
        with second:
            scene.process(second)
        assert scene.data.committed[GROUP, TOPIC] == {0: 0}
        scene.process(first)
    assert scene.data.committed[GROUP, TOPIC] == {0: 20}


def test_what_does_not_go_together(scene: Scene) -> None:
    """Each invalid combination has an error that states what to do."""
    with pytest.raises(ConfigurationError, match="its settings lack the feature 'ranges'"):
        scene.batch(scene.delivery(), ranges=TEN)
    with pytest.raises(ConfigurationError, match="leave out claim_entire_topic"):
        scene.batch(member(scene), claim_entire_topic=True)
    scene.sink.supports_unordered_ranges = False
    with pytest.raises(ConfigurationError, match="use a sink that stores ranges"):
        scene.batch(member(scene, EFFECTIVELY_ONCE))
    with pytest.raises(ConfigurationError, match="Go"):
        scene.batch(scene.delivery(settings=GroupSettings(60_000, RuleSet.GO, AT_LEAST_ONCE, (RANGES,))))
