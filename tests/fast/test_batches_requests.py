"""How few requests a batch makes, and how runs that start together share the partitions."""

import random
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from marshal_dagster.batches import ClaimedBatch, IdleReason
from marshal_dagster.coordination import claims
from marshal_dagster.coordination.log import NO_TOPIC_ID, LogIdentity
from marshal_dagster.errors import DataLossError, DataTopicChangedError
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    ClaimingPartition,
    DataTopic,
    DeliveryMode,
    ReleasingPartition,
)
from marshal_dagster.protocol.state import OffsetBounds, Owner
from marshal_dagster.testing import MemoryLog
from tests.batch_fixtures import HI_MS, TOPIC, DataTopics, Description, MeddledLog, Scene
from tests.real.kill_points import KillPoint, Side

RUNS = 32
EACH = 4


@pytest.fixture
def scene() -> Scene:
    """A group without any record, and no data topic yet."""
    return Scene()


class CountingLog(MemoryLog):
    """A log in memory that counts the requests about its topic."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.broker)
        self.requested = Counter[str]()

    def identity(self) -> LogIdentity:
        """Count, then return the identity."""
        self.requested["identity"] += 1
        return super().identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Count, then return the bounds."""
        self.requested["bounds"] += 1
        return super().bounds(partitions)


def count_offset_requests(scene: Scene) -> list[None]:
    """Return a list that grows by an element with each request for offsets of the data topic."""
    requests: list[None] = []
    scene.data.before_offsets = lambda: requests.append(None)
    return requests


# Requests


def test_the_offsets_that_chose_the_partitions_are_those_of_the_batch(scene: Scene) -> None:
    """A group with positions asks once for the offsets of all partitions."""
    scene.data.make(partitions=5, messages=2)
    scene.drain(scene.delivery())
    scene.data.append(3, 1)
    requests = count_offset_requests(scene)

    batch = scene.work(scene.delivery())

    assert [range_.partition for range_ in batch.all_ranges] == [3]
    assert len(requests) == 1


def test_a_position_beyond_the_offsets_that_chose_it_is_looked_up_again(scene: Scene) -> None:
    """A member that committed newer messages in the meantime does not make the topic look re-created."""
    scene.data.make(partitions=1, messages=2)
    scene.work(scene.delivery(), max_records=1)
    rival = scene.delivery()

    def overtake() -> None:
        scene.data.append(0, 5)
        scene.drain(rival)
        scene.data.append(0, 2)

    log = scene.meddled(Side.BEFORE, "ClaimingPartition", overtake)
    batch = scene.work(scene.delivery(log=log))

    assert [(range_.start, range_.end) for range_ in batch.all_ranges] == [(7, 9)]


def test_the_offsets_of_a_topic_that_was_deleted_are_not_used(scene: Scene) -> None:
    """A topic that is re-created between look and claim is noticed."""
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery(), max_records=1)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.data.make(partitions=1, messages=5))

    with pytest.raises(DataTopicChangedError, match="topic id"), scene.batch(scene.delivery(log=log)):
        pytest.fail("entered")


def test_in_a_go_group_the_offsets_of_a_topic_that_was_deleted_are_not_used(scene: Scene) -> None:
    """Keys of a Go group have no topic id; that the topic was re-created shows by an end below the position."""
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery(settings=WITHOUT_SETTINGS), max_records=3)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.data.make(partitions=1, messages=1))
    batch = scene.batch(scene.delivery(settings=WITHOUT_SETTINGS, log=log))

    with pytest.raises(DataTopicChangedError, match="beyond the topic's end"), batch:
        pytest.fail("entered")


@pytest.mark.parametrize("mode", [DeliveryMode.AT_MOST_ONCE, DeliveryMode.EFFECTIVELY_ONCE])
def test_offsets_are_looked_up_again_after_a_heartbeat_interval(scene: Scene, mode: DeliveryMode) -> None:
    """Retention may delete unread messages while a run is suspended between look-up and claim."""
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery(mode), max_records=1)

    def be_suspended() -> None:
        scene.clock.advance(HI_MS)
        scene.data.retain_from(0, 3)

    log = scene.meddled(Side.BEFORE, "ClaimingPartition", be_suspended)

    with pytest.raises(DataLossError), scene.batch(scene.delivery(mode, log=log)):
        pytest.fail("entered")


def test_a_plan_beyond_the_offsets_that_chose_it_is_looked_up_again(scene: Scene) -> None:
    """A member that planned newer messages in the meantime and failed leaves a plan within the reported offsets."""
    scene.data.make(partitions=1, messages=2)
    scene.work(scene.delivery(), max_records=1)
    rival = scene.delivery()

    def fail_with_newer_messages() -> None:
        scene.data.append(0, 5)
        with pytest.raises(ZeroDivisionError), scene.batch(rival):
            raise ZeroDivisionError
        scene.data.append(0, 2)

    log = scene.meddled(Side.BEFORE, "ClaimingPartition", fail_with_newer_messages)
    batch = scene.work(scene.delivery(log=log))

    assert [(range_.start, range_.end) for range_ in batch.all_ranges] == [(1, 7)]
    assert [(part.lag_before, part.lag_after) for part in batch.report()] == [(8, 2)]


class WithoutIds(DataTopics):
    """Data topics of brokers that give topics no id."""

    def describe(self, topic: str) -> Description:
        """Return the description with the id of all topics."""
        return Description(NO_TOPIC_ID, super().describe(topic).partitions)


def test_without_topic_ids_the_offsets_are_looked_up_after_the_claim() -> None:
    """A topic that was re-created in the meantime cannot be noticed, but nothing beyond its end is planned."""
    scene = Scene(data=WithoutIds())
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery(), max_records=1)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.data.make(partitions=1, messages=3))

    batch = scene.work(scene.delivery(log=log))

    assert [(range_.start, range_.end) for range_ in batch.all_ranges] == [(1, 3)]


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("messages", [0, 3, 5, 9])
def test_a_topic_that_was_re_created_between_two_batches_of_a_session_is_noticed(
    scene: Scene, messages: int, *, ranges: bool
) -> None:
    """The id of an earlier batch does not make a re-created topic look drained."""
    scene.data.make(messages=5)
    delivery = scene.delivery(ranges=ranges)
    scene.drain(delivery)
    done = dict(scene.processed)
    scene.data.make(messages=messages)

    with pytest.raises(DataTopicChangedError, match="until an operator sets the position"):
        scene.work(delivery)

    assert scene.processed == done


def test_a_session_continues_with_a_re_created_topic_whose_position_was_set(scene: Scene) -> None:
    """The id of an earlier batch is looked up again, before a key with another one is an error."""
    scene.data.make(partitions=1, messages=5)
    delivery = scene.delivery()
    scene.drain(delivery)
    scene.data.make(partitions=1, messages=2)
    scene.pause(instance="ops.1")
    scene.about(ClaimingPartition, "ops.1")
    scene.about(DataTopic, "ops.1", topic_id=scene.data.describe(TOPIC).topic_id)
    scene.about(ReleasingPartition, "ops.1", offset=0)
    scene.pause(-1, instance="ops.1")

    batch = scene.work(delivery)

    assert [(range_.start, range_.end) for range_ in batch.all_ranges] == [(0, 2)]


def test_a_drained_topic_is_looked_at_once(scene: Scene) -> None:
    """If nothing was claimed, the reason is found without further requests."""
    scene.data.make(partitions=3, messages=1)
    scene.drain(scene.delivery())
    log = CountingLog(scene)
    delivery = scene.delivery(log=log)
    scene.work(delivery)
    log.requested.clear()
    requests = count_offset_requests(scene)

    batch = scene.work(delivery)

    assert batch.idle is not None
    assert batch.idle.reason is IdleReason.DRAINED
    assert len(requests) == 1
    assert log.requested["bounds"] == 1


# Runs that start together


def start_together(scene: Scene, stack: ExitStack, runs: int) -> list[ClaimedBatch]:
    """Enter a batch of each run after all runs have looked at the same state, and keep all batches open."""
    entered: list[ClaimedBatch] = []

    def start(left: int) -> None:
        if left:
            log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: start(left - 1))
            entered.append(stack.enter_context(scene.batch(scene.delivery(log=log), max_claims=EACH)))

    start(runs)
    return entered


def claims_of(scene: Scene, batch: ClaimedBatch) -> int:
    """Return how many partitions a batch has tried to claim."""
    return sum(value.startswith("ClaimingPartition/") and f"/{batch.batch_id}/" in value for value in scene.values())


@pytest.mark.slow
@pytest.mark.parametrize("lags", ["alike", "all different"])
def test_runs_that_start_together_find_partitions_at_the_first_or_second_try(
    scene: Scene, lags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 32 runs on 128 partitions gets its four, though all of them saw the same partitions as free."""
    monkeypatch.setattr(claims, "os", SimpleNamespace(urandom=random.Random(1).randbytes))
    scene.data.make(partitions=RUNS * EACH, messages=1)
    scene.drain(scene.delivery())
    for partition in range(RUNS * EACH):
        scene.data.append(partition, 1 if lags == "alike" else 2 ** (partition % 12))

    with ExitStack() as stack:
        batches = start_together(scene, stack, RUNS)
        held = Counter(range_.partition for batch in batches for range_ in batch.all_ranges)
        tried = [claims_of(scene, batch) for batch in batches]
        for batch in batches:
            scene.process(batch)

    assert held == dict.fromkeys(range(RUNS * EACH), 1)
    assert max(tried) <= 2 * EACH
    if lags == "alike":
        assert sum(count == EACH for count in tried) >= RUNS / 3


def test_a_run_that_wins_a_part_claims_more(scene: Scene) -> None:
    """A run that got two of four partitions takes two others, so that its batch is as large as it may be."""
    scene.data.make(partitions=8, messages=1)
    scene.drain(scene.delivery())
    for partition in range(8):
        scene.data.append(partition, 100 if partition < 4 else 1)
    rival = rival_batch(scene)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", rival.__enter__)

    with scene.batch(scene.delivery(log=log), max_claims=EACH) as batch:
        assert len(batch.all_ranges) == EACH
        assert not {0, 1} & {range_.partition for range_ in batch.all_ranges}
        assert claims_of(scene, batch) == EACH + 2
        scene.process(batch)
    scene.process(rival)
    rival.__exit__(None, None, None)


def test_while_claims_are_held_no_other_owner_is_looked_up(scene: Scene) -> None:
    """Asking Dagster takes time, and claims get no heartbeats before the batch has all of them."""
    scene.data.make(partitions=8, messages=1)
    scene.drain(scene.delivery())
    for partition in range(8):
        scene.data.append(partition, 100 if partition < 4 else 1)
    for partition in range(4, 7):
        scene.about(ClaimingPartition, "killed", partition)
    scene.wait_until_stale()
    claims_made: list[int] = []

    def is_dead(_: Owner) -> bool:
        claims_made.append(claims_of(scene, batch))
        return False

    rival = rival_batch(scene)
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", rival.__enter__)
    batch = scene.batch(scene.delivery(log=log, is_dead=is_dead), max_claims=EACH)

    with batch:
        assert len(batch.all_ranges) == EACH
        assert claims_made
        assert not any(claims_made)
        scene.process(batch)
    scene.process(rival)
    rival.__exit__(None, None, None)


def test_what_a_faster_run_has_finished_is_not_claimed_again(scene: Scene) -> None:
    """Partitions that were free and unread may be read by another run before the second try."""
    scene.data.make(partitions=12, messages=1)
    scene.drain(scene.delivery())
    for partition in range(12):
        scene.data.append(partition, 100 if partition < EACH else 1)
    rival = scene.delivery()
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.work(rival, partitions=tuple(range(10))))

    with scene.batch(scene.delivery(log=log), max_claims=4) as batch:
        assert {range_.partition for range_ in batch.all_ranges} == {10, 11}
        scene.process(batch)
    assert claims_of(scene, batch) <= 6


def test_a_pause_before_the_second_try_releases_what_was_won(scene: Scene) -> None:
    """The batch is idle, and an idle batch holds nothing."""
    scene.data.make(partitions=8, messages=1)
    scene.drain(scene.delivery())
    for partition in range(8):
        scene.data.append(partition, 100 if partition < 4 else 1)
    rival = rival_batch(scene)
    won = scene.meddled(Side.BEFORE, "ClaimingPartition", rival.__enter__)
    log = MeddledLog(won, KillPoint(Side.AFTER, "ClaimingPartition"), scene.pause)

    with scene.batch(scene.delivery(log=log), max_claims=EACH) as batch:
        assert batch.idle is not None
        assert batch.idle.reason is IdleReason.PAUSED
        owners = [scene.key(partition).owner for partition in range(8)]
        assert batch.batch_id not in {owner.instance for owner in owners if owner is not None}
    assert claims_of(scene, batch) == EACH


def test_partitions_of_dead_owners_are_claimed_if_all_others_are_taken(scene: Scene) -> None:
    """Claims of dead owners are live by the log, so a second try asks about them."""
    scene.data.make(partitions=8, messages=1)
    scene.drain(scene.delivery())
    for partition in range(8):
        scene.data.append(partition, 100 if partition < 4 else 1)
    for partition in range(4, 8):
        scene.about(ClaimingPartition, "killed", partition)
    rival = scene.batch(scene.delivery(), partitions=(0, 1, 2, 3))
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", rival.__enter__)
    delivery = scene.delivery(log=log, is_dead=lambda owner: owner.instance == "killed")

    batch = scene.work(delivery, max_claims=EACH)

    assert [range_.partition for range_ in batch.all_ranges] == [4, 5, 6, 7]
    scene.process(rival)
    rival.__exit__(None, None, None)


def rival_batch(scene: Scene) -> ClaimedBatch:
    """Return a batch of another run that claims partitions 0 and 1."""
    return scene.batch(scene.delivery(), partitions=(0, 1))


@pytest.mark.slow
def test_a_run_has_its_own_order_among_partitions_with_similar_lags(scene: Scene) -> None:
    """Lags of the same number of binary digits count as equal; a larger lag comes first for every run."""
    scene.data.make(partitions=12, messages=1, topic=TOPIC)
    scene.drain(scene.delivery())
    for partition in range(12):
        scene.data.append(partition, 900 if partition == 7 else 100 + partition % 2)
    first = Counter[int]()

    for _ in range(40):
        with scene.batch(scene.delivery(), max_claims=2) as batch:
            first.update(range_.partition for range_ in batch.all_ranges)
            batch.begin_processing()
            scene.data.append(7, 900)
            scene.data.append(next(r.partition for r in batch.all_ranges if r.partition != 7), 100)

    assert first[7] == 40
    assert len(first) > 6
