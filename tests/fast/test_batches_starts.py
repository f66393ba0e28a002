# ruff: noqa: PT012 - what raises is the block of a batch
"""Where a claimed batch starts and what it takes: positions, retention, re-created topics and limits.

See protocol.md, section 6.
"""

import logging
import threading
from collections.abc import Callable

import pytest

from marshal_dagster.batches import Advice, BatchRequest, IdleReason
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    DataLossError,
    DataTopicChangedError,
    StartPositionError,
    TopicNotFoundError,
)
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    ReleasingPartition,
)
from marshal_dagster.testing import ManualClock
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, DataTopics, Description, Scene
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

ALL_MODES = list(DeliveryMode)
STRICT_MODES = [DeliveryMode.AT_MOST_ONCE, DeliveryMode.EFFECTIVELY_ONCE]
LATEST = StartPolicy.LATEST


@pytest.fixture
def scene() -> Scene:
    """A group without any record, and no data topic yet."""
    return Scene()


def spans(batch_ranges: object) -> dict[int, tuple[int, int]]:
    """Return start and end of each range by partition."""
    return {one.partition: (one.start, one.end) for one in batch_ranges}  # type: ignore[attr-defined]


# The first claim


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_first_batch_takes_all_there_is(scene: Scene, mode: DeliveryMode) -> None:
    """A group without any record starts at each partition's earliest offset and reads to its end."""
    scene.data.make(messages=5)

    batch = scene.work(scene.delivery(mode))

    assert spans(batch.all_ranges) == {0: (0, 5), 1: (0, 5), 2: (0, 5)}
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)
    assert [scene.key(n).offset for n in range(3)] == [5, 5, 5]
    assert all(scene.key(n).owner is None for n in range(3)), "a claim is still held"


def test_earliest_starts_where_retention_has_got_to(scene: Scene) -> None:
    """Messages that retention deleted before the group existed are not a loss."""
    scene.data.make(messages=5)
    scene.data.retain_from(1, 3)

    batch = scene.work(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE))

    assert spans(batch.all_ranges)[1] == (3, 5)
    assert all(range_.lost is None for range_ in batch.all_ranges)


@pytest.mark.parametrize("limits", [{}, {"partitions": (1,)}, {"max_claims": 1}, {"max_records": 2}], ids=str)
def test_the_first_claim_gives_every_partition_its_position(scene: Scene, limits: dict[str, object]) -> None:
    """With policy `latest`, no message after the first claim is skipped, whatever the first batch took."""
    scene.data.make(messages=5)
    assert scene.work(scene.delivery(), start=LATEST, **limits).idle is not None
    for partition in range(3):
        scene.data.append(partition, 2)

    scene.drain(scene.delivery(), start=LATEST)

    assert scene.processed == {(partition, offset): 1 for partition in range(3) for offset in (5, 6)}


@pytest.mark.parametrize("side", [Side.WITHIN, Side.BEFORE])
def test_a_first_claim_that_was_cut_short_is_begun_again(scene: Scene, side: Side) -> None:
    """If a member dies while it sets the first positions, no partition is read from 0 afterwards."""
    scene.data.make(messages=5)
    log = KillableLog(scene.log(), KillPoint(side, "Heartbeat"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(log=log), start=LATEST)
    scene.wait_until_stale()

    assert scene.work(scene.delivery(), start=LATEST).idle is not None
    for partition in range(3):
        scene.data.append(partition, 2)
    scene.drain(scene.delivery(), start=LATEST)

    assert scene.processed == {(partition, offset): 1 for partition in range(3) for offset in (5, 6)}


def test_policy_fail_gives_no_position(scene: Scene) -> None:
    """With policy `fail` a group without any record releases its claims, and the error states what to do."""
    scene.data.make(messages=5)

    with pytest.raises(StartPositionError, match="or choose the policy 'earliest' or 'latest'"):
        scene.work(scene.delivery(), start=StartPolicy.FAIL)

    assert scene.key().offset is None
    assert scene.key().owner is None, "the claim is still held"
    assert not scene.processed


def test_policy_fail_goes_on_where_there_is_a_position(scene: Scene) -> None:
    """The policy applies only to the first claim."""
    scene.data.make(messages=5)
    scene.work(scene.delivery(), max_records=3)

    scene.drain(scene.delivery(), start=StartPolicy.FAIL)

    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


def test_kafkas_committed_offset_comes_before_the_policy(scene: Scene) -> None:
    """A group that was a Kafka consumer group before continues at its committed offsets."""
    scene.data.make(messages=5)
    scene.data.committed[GROUP, TOPIC] = {0: 2, 1: 5}

    batch = scene.work(scene.delivery(), start=LATEST)

    assert spans(batch.all_ranges) == {0: (2, 5)}
    assert [scene.key(n).offset for n in range(3)] == [5, 5, 5]


def test_kafkas_committed_offset_is_read_when_the_log_has_none_only(scene: Scene) -> None:
    """Once the log has a position, Kafka's group offset has no effect."""
    scene.data.make(messages=5)
    scene.work(scene.delivery(), max_records=6)
    scene.data.committed[GROUP, TOPIC] = {0: 0, 1: 0, 2: 0}

    scene.drain(scene.delivery())

    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


def test_kafkas_committed_offset_beyond_the_end_is_no_start(scene: Scene) -> None:
    """A committed offset beyond the topic's end belongs to another topic: the claims are released."""
    scene.data.make(messages=5)
    scene.data.committed[GROUP, TOPIC] = {1: 9}

    with pytest.raises(DataTopicChangedError, match="9 lies beyond the topic's end 5"):
        scene.work(scene.delivery())

    assert scene.key(1).offset is None
    assert not scene.processed


def test_kafkas_committed_offset_within_an_open_transaction_is_a_start(scene: Scene) -> None:
    """A consumer that read uncommitted may have committed past the last stable offset; the group waits there."""
    scene.data.make(messages=5)
    scene.data.hold(1, 2)
    scene.data.committed[GROUP, TOPIC] = {1: 4}

    scene.work(scene.delivery())
    assert scene.key(1).offset == 4
    scene.drain(scene.delivery())
    scene.data.hold(1, None)
    scene.drain(scene.delivery())

    assert {place for place in scene.processed if place[0] == 1} == {(1, 4)}


# New partitions


@pytest.mark.parametrize("mode", ALL_MODES)
def test_new_partitions_start_at_zero_whatever_the_policy(scene: Scene, mode: DeliveryMode) -> None:
    """Messages written to a partition before the group first saw it are read, even with policy `latest`."""
    scene.data.make(partitions=2, messages=3)
    scene.drain(scene.delivery(mode), start=LATEST)
    scene.data.grow(4)
    scene.data.append(2, 3)

    scene.drain(scene.delivery(mode), start=LATEST)

    assert scene.counts(mode) == {(2, 0): 1, (2, 1): 1, (2, 2): 1}


def test_new_partitions_keep_to_the_most_claims(scene: Scene) -> None:
    """Added partitions are not a first claim, so at most `max_claims` are claimed at a time."""
    scene.data.make(partitions=2, messages=3)
    scene.drain(scene.delivery())
    scene.data.grow(6)
    before = len(scene.values())

    scene.work(scene.delivery(), max_claims=1)

    claims = [value for value in scene.values()[before:] if value.startswith(ClaimingPartition.__name__)]
    assert len(claims) == 1


# Nothing to do


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_empty_topic_is_drained(scene: Scene, mode: DeliveryMode) -> None:
    """A topic without messages results in an idle batch, and every partition gets its position."""
    scene.data.make()

    batch = scene.work(scene.delivery(mode))

    assert batch.idle is not None
    assert (batch.idle.reason, batch.all_ranges) == (IdleReason.DRAINED, ())
    assert [scene.key(n).offset for n in range(3)] == [0, 0, 0]
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_drained_topic_is_not_even_claimed(scene: Scene, mode: DeliveryMode) -> None:
    """If nothing is unread, a run writes nothing to the log."""
    scene.data.make(messages=5)
    scene.drain(scene.delivery(mode))
    before = scene.values()

    batch = scene.work(scene.delivery(mode))

    assert batch.idle is not None
    assert batch.idle.reason is IdleReason.DRAINED
    assert scene.values() == before


def test_a_missing_topic_is_said_to_be_missing(scene: Scene) -> None:
    """A batch of a topic that does not exist fails before anything is claimed."""
    with pytest.raises(TopicNotFoundError, match=TOPIC):
        scene.work(scene.delivery())
    assert scene.values() == []


def test_a_partition_that_does_not_exist_is_refused(scene: Scene) -> None:
    """The error names the partitions that the topic does not have."""
    scene.data.make(partitions=2)
    with pytest.raises(ConfigurationError, match=r"no partitions \[2, 7\]; it has 2"):
        scene.work(scene.delivery(), partitions=(7, 1, 2))


# What retention deleted


def cut(scene: Scene, mode: DeliveryMode) -> None:
    """Leave a group at offset 2 of partition 0, of whose 10 records retention has deleted the first 6."""
    scene.data.make(partitions=1, messages=2)
    scene.drain(scene.delivery(mode))
    scene.data.append(0, 8)
    scene.data.retain_from(0, 6)


@pytest.mark.parametrize("accept", [None, True])
def test_at_least_once_reads_what_retention_has_left(
    scene: Scene, caplog: pytest.LogCaptureFixture, accept: bool | None
) -> None:
    """The plan starts at the group's offset, the log reports what is lost, and the commit is at the plan's end."""
    cut(scene, DeliveryMode.AT_LEAST_ONCE)
    scene.processed.clear()
    before = len(scene.values())

    with caplog.at_level(logging.ERROR):
        batch = scene.work(scene.delivery(), allow_data_loss=accept, max_records=3)

    assert [(range_.start, range_.first_readable, range_.end, range_.lost) for range_ in batch.ranges] == [
        (2, 6, 9, (2, 6))
    ]
    assert set(scene.processed) == {(0, 6), (0, 7), (0, 8)}
    assert "offsets 2 to 6 (exclusive) are lost" in caplog.text
    heartbeats = [value.split("/") for value in scene.values()[before:] if value.startswith(Heartbeat.__name__)]
    assert [fields[-1] for fields in heartbeats] == ["2", "9"], "a heartbeat has another offset"


def test_at_least_once_fails_on_loss_if_it_is_configured(scene: Scene) -> None:
    """With `allow_data_loss=False` a loss is an error, and nothing is processed."""
    cut(scene, DeliveryMode.AT_LEAST_ONCE)

    with pytest.raises(DataLossError, match=r"deleted messages 2 to 6 \(exclusive\)"):
        scene.work(scene.delivery(), allow_data_loss=False)

    assert (scene.key().offset, scene.key().plan_end, scene.key().owner) == (2, None, None)


@pytest.mark.parametrize("mode", STRICT_MODES)
def test_the_strict_modes_fail_on_loss(scene: Scene, mode: DeliveryMode) -> None:
    """At most once and effectively once process nothing after a loss unless `allow_data_loss` is set."""
    cut(scene, mode)
    done = dict(scene.counts(mode))

    with pytest.raises(DataLossError, match="Accept the loss for one run"):
        scene.work(scene.delivery(mode))

    assert scene.counts(mode) == done
    assert (scene.key().offset, scene.key().owner) == (2, None)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_loss_that_was_accepted_is_reported_exactly(scene: Scene, mode: DeliveryMode) -> None:
    """In every mode the range starts at the group's offset and reports what was lost."""
    cut(scene, mode)

    batch = scene.work(scene.delivery(mode), allow_data_loss=True)

    assert [(range_.start, range_.end, range_.lost) for range_ in batch.ranges] == [(2, 10, (2, 6))]
    assert scene.counts(mode) == dict.fromkeys([(0, 0), (0, 1), *scene.data.all_messages()], 1)
    assert scene.key().offset == 10


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_partition_of_which_all_was_lost_gets_past_it(scene: Scene, mode: DeliveryMode) -> None:
    """If nothing is left to read, the batch consists of the lost range alone and commits its end."""
    cut(scene, mode)
    scene.data.retain_from(0, 10)

    batch = scene.work(scene.delivery(mode), allow_data_loss=True)

    assert [(range_.start, range_.first_readable, range_.end) for range_ in batch.ranges] == [(2, 10, 10)]
    assert scene.key().offset == 10
    assert scene.work(scene.delivery(mode)).idle is not None


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("left", "readable"), [(4, 4), (5, 5), (9, 5)])
def test_an_open_plan_whose_start_was_deleted(scene: Scene, mode: DeliveryMode, left: int, readable: int) -> None:
    """The plan is replayed unchanged: the rest of it is read, the loss is reported, and its end is committed."""
    scene.data.make(partitions=1, messages=10)
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(mode, log=log), max_records=5)
    scene.wait_until_stale()
    scene.data.retain_from(0, left)

    batch = scene.work(scene.delivery(mode), allow_data_loss=True, max_records=1)

    assert [(one.start, one.first_readable, one.end) for one in batch.ranges] == [(0, readable, 5)]
    assert batch.ranges[0].lost == (0, readable)
    assert batch.report()[0].is_replay
    assert scene.key().offset == 5


# Offsets without a message


@pytest.mark.parametrize("mode", ALL_MODES)
def test_offsets_without_a_message_are_passed(scene: Scene, mode: DeliveryMode) -> None:
    """Transaction markers and aborted or compacted messages at either end of a range, or inside it, do no harm."""
    scene.data.make(partitions=1)
    for messages in (0, 3, 1, 0, 0):
        scene.data.append(0, messages)
        scene.data.skip(0, 2)

    batches = scene.drain(scene.delivery(mode), max_records=3)

    assert [spans(batch.all_ranges) for batch in batches] == [
        {0: (0, 3)},
        {0: (3, 6)},
        {0: (6, 9)},
        {0: (9, 12)},
        {0: (12, 14)},
        {},
    ]
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


def test_an_open_transaction_is_waited_for(scene: Scene) -> None:
    """A plan never extends beyond the last stable offset."""
    scene.data.make(partitions=1, messages=5)
    scene.data.hold(0, 2)

    assert spans(scene.drain(scene.delivery())[0].all_ranges) == {0: (0, 2)}
    scene.data.hold(0, None)
    assert spans(scene.drain(scene.delivery())[0].all_ranges) == {0: (2, 5)}


def test_a_position_within_an_open_transaction_is_not_another_topic(scene: Scene) -> None:
    """An operator may set a position past the last stable offset. The group waits for the transaction to end."""
    scene.data.make(partitions=1, messages=5)
    scene.drain(scene.delivery())
    scene.data.append(0, 4)
    scene.data.hold(0, 5)
    set_position(scene, 0, 8)

    batch = scene.work(scene.delivery())
    assert batch.idle is not None
    assert batch.idle.reason is IdleReason.DRAINED
    scene.data.hold(0, None)
    assert spans(scene.work(scene.delivery()).all_ranges) == {0: (8, 9)}


def set_position(scene: Scene, partition: int, offset: int) -> None:
    """Set a position as the command does."""
    scene.pause(instance="ops.1")
    scene.about(ClaimingPartition, "ops.1", partition)
    scene.about(ReleasingPartition, "ops.1", partition, offset=offset)
    scene.pause(-1, instance="ops.1")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_position_that_was_set_begins_a_generation(scene: Scene, mode: DeliveryMode) -> None:
    """Messages processed before are processed once more, and the sink replaces their output."""
    scene.data.make(partitions=1, messages=5)
    scene.drain(scene.delivery(mode))
    set_position(scene, 0, 2)

    scene.drain(scene.delivery(mode))

    replays = 1 if mode is DeliveryMode.EFFECTIVELY_ONCE else 2
    assert scene.counts(mode) == {(0, 0): 1, (0, 1): 1} | dict.fromkeys([(0, 2), (0, 3), (0, 4)], replays)


def test_a_range_carries_what_an_output_must_compare(scene: Scene) -> None:
    """Fencing token, generation and both topic ids match the log and the cluster in each generation."""
    scene.data.make(partitions=1, messages=5)
    delivery = scene.delivery(DeliveryMode.EFFECTIVELY_ONCE)
    for generations in (1, 2):
        with scene.batch(delivery) as batch:
            (one,) = batch.ranges
            owner = scene.key().owner
            assert owner is not None
            assert (one.epoch, one.generation) == (owner.epoch, scene.key().generation)
            assert (one.generation > 0) == (generations > 1)
            assert one.data_topic_id == scene.data.describe(TOPIC).topic_id
            assert one.coordination_topic_id == scene.broker.identity.topic_id
            assert (one.group, one.topic, one.partition, one.start, one.end) == (GROUP, TOPIC, 0, 0, 5)
            scene.process(batch)
        set_position(scene, 0, 0)


# Topics deleted and re-created


def shorter(scene: Scene) -> None:
    """Create a topic that has fewer messages than were processed."""
    scene.data.make(messages=2)


def as_long(scene: Scene) -> None:
    """Create a topic that ends exactly at the group's offset."""
    scene.data.make(messages=5)


def longer(scene: Scene) -> None:
    """Create a topic that has more messages than were processed."""
    scene.data.make(messages=9)


def empty(scene: Scene) -> None:
    """Create a topic without messages."""
    scene.data.make()


@pytest.mark.parametrize("anew", [shorter, as_long, longer, empty])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_topic_re_created_is_an_error_in_every_mode(
    scene: Scene, mode: DeliveryMode, anew: Callable[[Scene], None]
) -> None:
    """Nothing is processed until an operator sets the position, and no batch is reported as drained."""
    scene.data.make(messages=5)
    scene.drain(scene.delivery(mode))
    done = dict(scene.counts(mode))
    anew(scene)

    with pytest.raises(DataTopicChangedError, match="until an operator sets the position"):
        scene.work(scene.delivery(mode))

    assert scene.counts(mode) == done
    assert [scene.key(n).offset for n in range(3)] == [5, 5, 5]
    assert [scene.key(n).owner for n in range(3)] == [None, None, None]


def test_a_topic_re_created_with_an_open_plan_is_an_error(scene: Scene) -> None:
    """The plan belongs to the old topic and is not replayed."""
    scene.data.make(partitions=1, messages=5)
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(log=log))
    scene.wait_until_stale()
    scene.data.make(partitions=1, messages=5)

    with pytest.raises(DataTopicChangedError):
        scene.work(scene.delivery())

    assert scene.key().plan_end == 5
    assert not scene.processed


def test_a_position_beyond_the_end_is_another_topic(scene: Scene) -> None:
    """If a topic with the same id has fewer messages than were processed, the cluster has lost some: an error."""
    scene.data.make(partitions=1, messages=5)
    scene.drain(scene.delivery())
    topic_id = scene.data.describe(TOPIC).topic_id
    scene.data.make(partitions=1, messages=3)
    scene.data._topics[TOPIC].topic_id = topic_id

    with pytest.raises(DataTopicChangedError, match="position 5 lies beyond the topic's end 3"):
        scene.work(scene.delivery())


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_topic_re_created_while_a_batch_reads_fails_the_check(scene: Scene, mode: DeliveryMode) -> None:
    """The messages may be of either topic: `check` fails before the sink is called, and nothing is committed."""
    scene.data.make(partitions=1, messages=5)

    with (
        pytest.raises(DataTopicChangedError, match="deleted and re-created while group"),
        scene.batch(scene.delivery(mode)) as batch,
    ):
        scene.data.make(partitions=1, messages=5)
        scene.process(batch)
        batch.check()

    assert not scene.sink.rows
    assert scene.key().offset == 0
    assert not batch.committed


def test_a_topic_re_created_while_the_sink_reads_is_noticed(scene: Scene) -> None:
    """Spark reads when the sink writes, so the topic id is checked again after that and before the write."""
    scene.data.make(partitions=1, messages=5)
    scene.sink.while_reading = lambda: scene.data.make(partitions=1, messages=5)

    with pytest.raises(DataTopicChangedError, match="nothing was written or committed"):
        scene.work(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE))

    assert (scene.sink.rows, scene.sink.stored) == ([], {})


def test_a_claim_that_is_lost_while_the_sink_reads_is_noticed(scene: Scene) -> None:
    """A batch whose lease ended while Spark was reading writes nothing."""
    scene.data.make(partitions=1, messages=5)
    scene.sink.while_reading = lambda: scene.clock.advance(1.9 * HI_MS)

    with pytest.raises(ClaimLostError, match="its lease ended"):
        scene.work(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE))

    assert (scene.sink.rows, scene.sink.stored) == ([], {})


def test_a_topic_re_created_just_after_the_claim_is_noticed(scene: Scene) -> None:
    """The topic id is looked up after the claim is won; an earlier look-up does not count."""
    scene.data.make(partitions=1, messages=5)
    scene.drain(scene.delivery())
    scene.data.append(0, 1)
    log = scene.meddled(Side.AFTER, "ClaimingPartition", lambda: scene.data.make(partitions=1, messages=9))

    with pytest.raises(DataTopicChangedError, match="its position belongs to topic id"):
        scene.work(scene.delivery(log=log))

    assert scene.key().offset == 5


@pytest.mark.slow
def test_a_position_gets_its_data_topic_before_the_first_heartbeat(scene: Scene) -> None:
    """If a key has an offset but no topic id, no heartbeat precedes the id, however slow the cluster is."""
    scene.data.make(partitions=2, messages=5)
    settings = GroupSettings(50)
    scene.work(scene.delivery(settings=settings), partitions=(0,), max_records=1)
    for kind, tail in ((ClaimingPartition, {}), (Heartbeat, {"offset": 0}), (ReleasingPartition, {"offset": 0})):
        scene.about(kind, "old.1", 2, **tail)
    scene.data.grow(3)
    scene.data.append(2, 5)
    assert (scene.key(2).offset, scene.key(2).data_topic_id) == (0, None)

    def be_slow() -> None:
        if scene.key(2).owner is not None:
            scene.data.before_describe = lambda: None
            scene.clock.advance(45)
            threading.Event().wait(0.2)  # by then a heartbeat is due

    scene.data.before_describe = be_slow
    batch = scene.work(scene.delivery(settings=settings), partitions=(2,))

    own = [value.split("/")[0] for value in scene.values() if f"/{batch.batch_id}/" in value]
    assert own[:3] == [ClaimingPartition.__name__, DataTopic.__name__, Heartbeat.__name__]
    assert batch.committed


def test_the_position_is_read_after_the_claim_is_won(scene: Scene) -> None:
    """If another member commits between look and claim, the batch starts at the new position."""
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery(), max_records=1)
    rival = scene.delivery()
    log = scene.meddled(Side.BEFORE, "ClaimingPartition", lambda: scene.work(rival, max_records=2))

    batch = scene.work(scene.delivery(log=log))

    assert spans(batch.all_ranges) == {0: (3, 5)}
    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


# The coordination log deleted and re-created


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_forgotten_group_goes_on_by_itself_in_at_least_once_only(scene: Scene, mode: DeliveryMode) -> None:
    """Kafka has committed offsets that the log does not have: the strict modes fail until this is accepted."""
    scene.data.make(messages=5)
    scene.work(scene.delivery(mode), max_records=6)
    scene.broker.recreate()
    done = dict(scene.counts(mode))

    if mode in STRICT_MODES:
        with pytest.raises(StartPositionError, match="perhaps it was deleted and re-created"):
            scene.work(scene.delivery(mode))
        assert scene.counts(mode) == done
        assert scene.key().owner is None
        return
    scene.drain(scene.delivery(mode))
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


def test_a_new_log_can_be_accepted(scene: Scene) -> None:
    """With `allow_log_reset` at most once continues at the offsets committed in Kafka."""
    scene.data.make(messages=5)
    scene.work(scene.delivery(DeliveryMode.AT_MOST_ONCE), max_records=6)
    scene.broker.recreate()

    scene.drain(scene.delivery(DeliveryMode.AT_MOST_ONCE), allow_log_reset=True)

    assert scene.processed == dict.fromkeys(scene.data.all_messages(), 1)


def test_a_group_offset_without_a_past_in_the_log_is_the_same(scene: Scene) -> None:
    """A Kafka consumer group that is used for the first time here must be accepted once, too."""
    scene.data.make(messages=5)
    scene.data.committed[GROUP, TOPIC] = {1: 2}

    with pytest.raises(StartPositionError, match=r"partitions \[1\]"):
        scene.work(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE))
    scene.drain(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE), allow_log_reset=True)

    assert {place for place in scene.sink.counts() if place[0] == 1} == {(1, 2), (1, 3), (1, 4)}


# A data topic without an id


class WithoutIds(DataTopics):
    """Data topics of brokers that give topics no id."""

    def describe(self, topic: str) -> Description:
        """Return the description with the id of all topics."""
        return Description(NO_TOPIC_ID, super().describe(topic).partitions)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_topic_without_an_id_is_for_at_least_once_only(mode: DeliveryMode, caplog: pytest.LogCaptureFixture) -> None:
    """At least once warns, once for each topic; the strict modes claim nothing unless that is allowed."""
    scene = Scene(data=WithoutIds())
    scene.data.make(messages=5)
    group = f"group of {mode}"  # the warning is logged once for each group of a process
    if mode in STRICT_MODES:
        with pytest.raises(ConfigurationError, match="but topic 'orders' has no id") as refused:
            scene.work(scene.delivery(mode))
        assert len(str(refused.value).splitlines()) == 1
        assert scene.values() == []
    delivery = scene.delivery(mode)
    delivery.group = group
    scene.drain(delivery, max_records=6, allow_topic_without_id=mode in STRICT_MODES)
    assert scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)
    assert caplog.text.count(f"topic 'orders' has no id: if it is deleted and re-created, group '{group}' may") == 1


# Limits


def test_the_largest_lags_are_levelled_first(scene: Scene) -> None:
    """`max_records` limits all ranges together; they level the lags, largest first."""
    scene.data.make()
    for partition, messages in enumerate((2, 10, 6)):
        scene.data.append(partition, messages)

    batch = scene.work(scene.delivery(), max_records=8)

    assert spans(batch.all_ranges) == {1: (0, 6), 2: (0, 2)}
    assert {report.range.partition: (report.lag_before, report.lag_after) for report in batch.report()} == {
        1: (10, 4),
        2: (6, 4),
    }


def test_open_plans_count_toward_the_most_records(scene: Scene) -> None:
    """A plan is taken as it is, whatever `max_records` is; new ranges get what is left."""
    scene.data.make(partitions=2, messages=10)
    log = KillableLog(scene.log(), KillPoint(Side.AFTER, "ClaimingMessages"))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(log=log), partitions=(0,), max_records=6)
    scene.wait_until_stale()

    assert spans(scene.work(scene.delivery(), max_records=8).all_ranges) == {0: (0, 6), 1: (0, 2)}


def test_the_most_claims_take_the_largest_lags(scene: Scene) -> None:
    """At most `max_claims` partitions are held: those with the largest lags."""
    scene.data.make()
    for partition, messages in enumerate((2, 10, 6)):
        scene.data.append(partition, messages)

    first = scene.work(scene.delivery(), max_claims=2)
    second = scene.work(scene.delivery(), max_claims=2)

    assert spans(first.all_ranges) == {1: (0, 10), 2: (0, 6)}
    assert spans(second.all_ranges) == {0: (0, 2)}


@pytest.mark.parametrize("ranges", [False, True])
def test_a_member_claims_what_it_is_advised_to(scene: Scene, *, ranges: bool) -> None:
    """A member claims only assigned partitions, unless partitions are named.

    The assignment is looked up for each batch, and its reason is reported.
    """
    scene.data.make()
    for partition, messages in enumerate((2, 10, 6)):
        scene.data.append(partition, messages)
    shares: list[Advice | None] = [Advice(frozenset(), "none is b's"), Advice(frozenset({2, 99}), "2 is b's"), None]
    delivery = scene.delivery(ranges=ranges, advise=lambda topic: shares.pop(0) if topic == TOPIC else None)

    nothing = scene.work(delivery)
    named = scene.work(delivery, partitions=(0,))
    advised = scene.work(delivery)
    rest = scene.work(delivery)

    assert nothing.idle is not None
    assert (nothing.idle.reason, nothing.idle.text) == (IdleReason.NOT_ASSIGNED, "none is b's")
    assert [spans(each.all_ranges) for each in (named, advised, rest)] == [{0: (0, 2)}, {2: (0, 6)}, {1: (0, 10)}]


def test_who_is_idle_on_what_it_is_advised_to_claim_says_so(scene: Scene) -> None:
    """An idle batch reports the assignment, because others may have work. The entire topic is claimed regardless."""
    scene.data.make()
    scene.data.append(1, 5)
    delivery = scene.delivery(advise=lambda _: Advice(frozenset({0}), "member b has partition 0"))

    idle = scene.work(delivery).idle
    entire = scene.work(delivery, claim_entire_topic=True)

    assert idle is not None
    assert idle.reason is IdleReason.DRAINED
    assert idle.text.endswith("; member b has partition 0")
    assert 1 in spans(entire.all_ranges)


def test_what_is_refused_is_passed_over(scene: Scene) -> None:
    """A member with a fast clock and a low limit works on another, free partition."""
    scene.data.make()
    for partition, messages in enumerate((2, 10, 6)):
        scene.data.append(partition, messages)
    scene.work(scene.delivery(), max_records=1)
    fast = scene.delivery()
    fast.clock = ManualClock(scene.clock.wall_ms() + 3 * HI_MS)
    with scene.batch(scene.delivery(), max_claims=1) as owner:
        batch = scene.work(fast, max_claims=1)
        scene.process(owner)

    assert [range_.partition for range_ in owner.all_ranges] == [1]
    assert [one.partition for one in batch.all_ranges] in ([0], [2])


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_records": 0}, "max_records is 0; it must be at least 1"),
        ({"max_claims": 0}, "max_claims is 0; it must be at least 1"),
        ({"max_attempts": 0}, "max_attempts is 0; it must be at least 1"),
        ({"partitions": (-1,)}, "numbered from 0"),
        ({"partitions": ()}, "partitions is empty"),
        ({"claim_entire_topic": True, "partitions": (1,)}, "leave out partitions and max_claims"),
        ({"claim_entire_topic": True, "max_claims": 1}, "leave out partitions and max_claims"),
    ],
    ids=str,
)
def test_limits_that_no_batch_could_keep_are_refused(limits: dict[str, object], said: str) -> None:
    """The error names the limit and the values allowed."""
    with pytest.raises(ConfigurationError, match=said):
        BatchRequest(topic=TOPIC, **limits)  # type: ignore[arg-type]


def test_the_records_of_one_batch(scene: Scene) -> None:
    """A batch writes few records, in this order: claim, data topic, first heartbeat, plan, commit, release."""
    scene.data.make(partitions=1, messages=5)
    scene.work(scene.delivery())

    assert [value.split("/")[0] for value in scene.values()] == [
        "GroupSettings",
        ClaimingPartition.__name__,
        DataTopic.__name__,
        Heartbeat.__name__,
        ClaimingMessages.__name__,
        Heartbeat.__name__,
        ReleasingPartition.__name__,
    ]
