"""A process without claims reads in the log whether another one still holds them."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from marshal_dagster.batches import ClaimedBatch, RangeOptions
from marshal_dagster.coordination.claim_watch import ClaimWatch
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    CoordinationLogChangedError,
    IncompleteLogError,
    MarshalError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat, coordination_partition
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import HI_MS, TOPIC, Scene
from tests.faulty_log import FaultyLog


class Watched:
    """A claimed batch, and another process that watches its claims with a clock of its own."""

    def __init__(self, scene: Scene, batch: ClaimedBatch) -> None:
        self.scene, self.batch = scene, batch
        self.log = FaultyLog(scene.log())
        self.clock = ManualClock()
        self.watch = ClaimWatch(Rationalizer(self.log), batch.batch_id, batch.ranges, self.clock)

    def beat(self) -> None:
        """Have the batch's member send a heartbeat."""
        self.batch._claimer.beat()

    def pass_ms(self, passed_ms: float) -> None:
        """Let time pass for the broker and for the watching process."""
        self.scene.clock.advance(passed_ms)
        self.clock.advance(passed_ms)


@pytest.fixture
def scene() -> Scene:
    """Return a group whose topic has messages."""
    scene = Scene()
    scene.data.make(messages=5)
    return scene


@pytest.fixture(params=["whole partitions", "ranges", "a whole plan in a group with ranges"])
def watched(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """Yield a watched batch of each kind of claim."""
    if request.param.startswith("a whole plan"):
        with pytest.raises(OSError, match="disk"), scene.batch(scene.delivery()):
            raise OSError("disk")
        scene.delivery(ranges=True)
    ranges = request.param == "ranges"
    options = {"ranges": RangeOptions(size=3)} if ranges else {}
    batch = scene.batch(scene.delivery(ranges=ranges), **options)
    with suppress(MarshalError), batch:  # tests lose the claims
        assert batch.ranges
        yield Watched(scene, batch)


def test_claims_hold_while_heartbeats_come(watched: Watched) -> None:
    """Each heartbeat renews them for two intervals; the watching process sends nothing."""
    for _ in range(3):
        watched.watch.require_held()
        watched.pass_ms(1.5 * HI_MS)
        watched.watch.require_held()
        watched.beat()
    assert watched.watch.interval_ms == HI_MS
    assert not watched.log.seen


def test_a_run_that_is_silent_for_two_intervals_counts_as_dead(watched: Watched) -> None:
    """At exactly two intervals the claims still hold, as everywhere."""
    watched.watch.require_held()
    watched.clock.advance(2 * HI_MS)
    watched.watch.require_held()
    watched.clock.advance(1)
    with pytest.raises(BatchAbortedError, match=r"no heartbeat of batch .* came for 20\.0 s"):
        watched.watch.require_held()


def test_one_partition_without_heartbeats_ends_the_batch(scene: Scene) -> None:
    """Each claim has its own heartbeats, so one that is silent is stale although the others are not."""
    with suppress(BatchAbortedError), scene.batch(scene.delivery()) as batch:
        watched = Watched(scene, batch)
        watched.watch.require_held()
        watched.clock.advance(2 * HI_MS + 1)
        scene.clock.advance(1)
        scene.about(Heartbeat, batch.batch_id, 0, offset=0)
        with pytest.raises(BatchAbortedError) as ended:
            watched.watch.require_held()
    assert "no heartbeat" in str(ended.value)


def test_log_time_shows_that_a_claim_is_stale(watched: Watched) -> None:
    """Any later record in the coordination partition shows it, even to a process that has just started."""
    watched.scene.clock.advance(2 * HI_MS + 1)
    watched.scene.about(ClaimingPartition, "other.1", 7)
    with pytest.raises(BatchAbortedError, match="its run has died"):
        watched.watch.require_held()


def released(watched: Watched) -> None:
    """Release as a batch does that failed."""
    watched.batch._guard.release()


def taken_over(watched: Watched) -> None:
    """Let the claims become stale, and another member take them over."""
    watched.scene.wait_until_stale()
    other = watched.scene.delivery(ranges=watched.batch.ranges[0].in_any_order)
    other.claimed_batch(watched.batch.request).__enter__()


@pytest.mark.parametrize(("lose", "holder"), [(released, "no instance"), (taken_over, "client 'client")])
def test_a_claim_that_ended_names_its_present_holder(
    watched: Watched, lose: Callable[[Watched], None], holder: str
) -> None:
    """A claim that was released or taken over is lost at the next reading, without any wait."""
    watched.watch.require_held()
    lose(watched)
    with pytest.raises(ClaimLostError, match=f"has ended; it is held by {holder}"):
        watched.watch.require_held()


@pytest.mark.parametrize("name", ["epoch", "generation"])
def test_a_claim_of_another_epoch_or_generation_is_another_claim(scene: Scene, name: str) -> None:
    """An instance may claim a partition again, and an operator may set the position meanwhile."""
    with suppress(BatchAbortedError), scene.batch(scene.delivery()) as batch:
        (claimed, *_) = batch.ranges
        later = replace(claimed, **{name: getattr(claimed, name) + 1})
        with pytest.raises(ClaimLostError):
            ClaimWatch(Rationalizer(scene.log()), batch.batch_id, [later], ManualClock()).require_held()


def test_an_outage_is_waited_for_as_long_as_heartbeats_may_have_come(watched: Watched) -> None:
    """Brokers that do not answer are asked again; after two intervals without a heartbeat the batch is over."""
    watched.log.is_down = True
    with pytest.raises(UnavailableError):
        watched.watch.require_held()
    watched.log.is_down = False
    watched.watch.require_held()

    requested: list[int] = []

    def seldom() -> str:
        requested.append(1)
        if len(requested) < 3:
            raise UnavailableError("no broker")
        return "answer"

    assert watched.watch.while_fresh(seldom) == "answer"
    watched.log.is_down = True
    began_ms = watched.clock.lease_ms()
    with pytest.raises(BatchAbortedError, match="brokers cannot be reached"):
        watched.watch.require_held()
    assert watched.clock.lease_ms() - began_ms > 1.9 * HI_MS


def cut(watched: Watched) -> None:
    """Delete the beginning of the log before it is read."""
    home = coordination_partition(TOPIC, watched.scene.broker.identity.partitions)
    watched.scene.broker.retain_from(home, 1)


def recreate(watched: Watched) -> None:
    """Delete and re-create the coordination topic."""
    watched.scene.broker.recreate()


@pytest.mark.parametrize(("damage", "error"), [(cut, IncompleteLogError), (recreate, CoordinationLogChangedError)])
def test_a_damaged_log_proves_no_claim(
    scene: Scene, damage: Callable[[Watched], None], error: type[MarshalError]
) -> None:
    """A log that lost its beginning, or that is another one, shows no owner that a script could trust."""
    found: MarshalError | None = None
    with suppress(MarshalError), scene.batch(scene.delivery()) as batch:
        watched = Watched(scene, batch)
        if error is CoordinationLogChangedError:
            watched.watch.require_held()
        damage(watched)
        if error is IncompleteLogError:
            watched = Watched(scene, batch)
        try:
            watched.watch.require_held()
        except MarshalError as raised:
            found = raised
    assert type(found) is error
