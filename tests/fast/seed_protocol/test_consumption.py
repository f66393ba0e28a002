# ruff: noqa: PT012 - what raises is the block of a batch
"""Check the section "Consumption" of the seed protocol, its two modes, the failure of a consumer, and the TODO."""

from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.coordination.topic_settings import Severity, check_coordination_topic, settings_for
from marshal_dagster.errors import ClaimLostError, ConfigurationError, PlanRejectedError
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, Heartbeat, RevokingClaim, RuleSet
from tests.batch_fixtures import HI_MS, MeddledLog, Scene
from tests.fast.seed_protocol.member_steps import stay
from tests.fast.seed_protocol.sentences import sentence
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import Site, about
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

AMO, ALO, FAILURE = "At Most Once", "At Least Once", "Consumer Failure"
AT_MOST_ONCE, AT_LEAST_ONCE = DeliveryMode.AT_MOST_ONCE, DeliveryMode.AT_LEAST_ONCE
AMO_SETTINGS = GroupSettings(HI_MS, delivery=AT_MOST_ONCE)
A_BATCH_IS_A_PLAN = ("6, Plan", "a batch is a range of offsets, fixed in the log before any of its messages is read")
ALL = {(0, offset): 1 for offset in range(5)}


def die(scene: Scene, mode: DeliveryMode, at: KillPoint, max_records: int | None = None) -> None:
    """Let a member work until it dies at `at`, and wait until it is stale."""
    with pytest.raises(KilledError):
        scene.work(scene.delivery(mode, log=KillableLog(scene.log(), at)), max_records=max_records)
    assert scene.work(scene.delivery(mode)).idle is not None
    scene.wait_until_stale()


def revoked_behind(scene: Scene, record: str) -> MeddledLog:
    """Return a log in which the claim of partition 0 is revoked directly after the first record of this type."""

    def revoke() -> None:
        owner = scene.key().owner
        assert owner is not None
        scene.about(RevokingClaim, "ops.1", epoch=owner.epoch)

    return scene.meddled(Side.AFTER, record, revoke)


def committed_by(scene: Scene, batch: ClaimedBatch) -> list[str]:
    """Return the offsets of the batch's heartbeats."""
    values = [value.split("/") for value in scene.values() if f"/{batch.batch_id}/" in value]
    return [fields[8] for fields in values if fields[0] == "Heartbeat"]


@sentence("Consumption", "sentence 2", "Only the holder of a valid claim processes messages")
def test_consumption_sentence_2_without_a_claim_nothing_is_planned_or_committed(site: Site) -> None:
    """A plan or commit of another owner's, an unclaimed or a released partition is an error, and writes no record."""
    site.owner_of(0)
    member = site.member()
    member.claim([0, 1])
    member.beat({1: 0})
    member.release([1])
    before = site.values()
    for number in (0, 1, 2):
        with pytest.raises(ClaimLostError):
            member.plan({number: 5})
        with pytest.raises(ClaimLostError):
            member.commit({number: 5})
    assert site.values() == before


# At most once


@pytest.mark.slow
@sentence(AMO, "sentence 1", "A message may be lost, but is never processed twice")
def test_at_most_once_sentence_1_no_message_is_processed_twice_wherever_a_member_dies() -> None:
    """Whichever append is a member's last, no message is processed twice, and only one batch may be missing."""
    for record in ("ClaimingPartition", "DataTopic", "Heartbeat", "ClaimingMessages", "ReleasingPartition"):
        for side, count in ((Side.BEFORE, 1), (Side.AFTER, 1), (Side.BEFORE, 2), (Side.AFTER, 2)):
            scene = Scene()
            scene.data.make(partitions=1, messages=5)
            log = KillableLog(scene.log(), KillPoint(side, record, count))
            try:
                scene.drain(scene.delivery(AT_MOST_ONCE, log=log), max_records=2)
            except KilledError:
                scene.wait_until_stale()
                scene.drain(scene.delivery(AT_MOST_ONCE), max_records=2)
            assert set(scene.processed.values()) == {1}
            assert len(scene.processed) >= 3


@sentence(AMO, "sentence 2", "The order of a partition's records allows a transaction")
def test_at_most_once_sentence_2_of_two_equal_commits_one_gives_the_permission(scene: Scene) -> None:
    """Two heartbeats of one instance id have the same offset: the sender of the second does not process the batch."""
    twin = ""

    def overtake() -> None:
        scene.about(Heartbeat, twin, offset=5)

    log = scene.meddled(Side.BEFORE, "Heartbeat", overtake, count=2)
    with scene.batch(scene.delivery(AT_MOST_ONCE, log=log)) as batch:
        twin = batch.batch_id
        batch.begin_processing()
    assert batch.ranges == ()
    assert [str(one) for one in batch.dropped] == ["orders/0 [0, 5)"]
    assert scene.key().offset == 5


@sentence(AMO, "1", "Make sure that you still hold the claim")
def test_at_most_once_1_who_lost_the_claim_does_not_begin(site: Site) -> None:
    """After its lease a member neither plans nor commits, and writes no record."""
    member = site.owner_of(0, settings=AMO_SETTINGS)
    site.clock.advance(2 * HI_MS)
    before = site.values()
    with pytest.raises(ClaimLostError):
        member.plan({0: 5})
    with pytest.raises(ClaimLostError):
        member.commit_before_processing({0: 5})
    assert site.values() == before


@sentence(AMO, "2", "Fetch a batch of messages", overridden_by=A_BATCH_IS_A_PLAN)
def test_at_most_once_2_a_batch_is_a_range_that_is_fixed_before_it_is_read(scene: Scene) -> None:
    """The plan fixes the offsets; messages that arrive later are not part of the batch."""
    with scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        batch.begin_processing()
        scene.data.append(0, 3)
        assert Counter(scene.data.read(batch.ranges)) == ALL
    assert scene.key().offset == 5


@sentence(AMO, "2.1", "Smaller batches lose fewer messages and need more records")
def test_at_most_once_2_1_the_size_of_a_batch_weighs_loss_against_records() -> None:
    """With batches of one message, a death between commit and processing loses one message; each batch has a plan."""
    lost, plans = [], []
    for most in (1, 5):
        scene = Scene()
        scene.data.make(partitions=1, messages=5)
        die(scene, AT_MOST_ONCE, KillPoint(Side.AFTER, "Heartbeat", 2), max_records=most)
        scene.drain(scene.delivery(AT_MOST_ONCE), max_records=most)
        lost.append(5 - len(scene.processed))
        plans.append(sum(value.startswith("ClaimingMessages/") for value in scene.values()))
    assert lost == [1, 5]
    assert plans == [5, 1]


@sentence(
    AMO,
    "3",
    "Claim the messages up to the last one of the batch",
    overridden_by=("1", "a plan's end is the next offset to read, so messages 0 to 4 end at 5"),
)
def test_at_most_once_3_the_plan_names_the_end_of_the_batch(scene: Scene) -> None:
    """There is one plan, with the offset after the last message, from the batch's instance."""
    batch = scene.work(scene.delivery(AT_MOST_ONCE))
    plans = [value.split("/") for value in scene.values() if value.startswith("ClaimingMessages/")]
    assert [(fields[3], fields[8]) for fields in plans] == [(batch.batch_id, "5")]


@sentence(AMO, "4", "Read the world state again")
def test_at_most_once_4_the_log_is_read_past_the_plan_before_the_commit(site: Site) -> None:
    """When the member commits, it has read all records before the commit, those of others too."""
    member = site.owner_of(0, settings=AMO_SETTINGS)
    site.say(about(RevokingClaim, "ops.1", 7, epoch=0))
    member.plan({0: 5})

    assert member.rationalizer.world.partitions[site.home].next_offset == site.broker.bounds(site.home).end
    assert member.claims[0].plan_end == 5
    assert member.commit_before_processing({0: 5}) == {0}


@sentence(AMO, "4.1", "Check that you still hold the claim")
def test_at_most_once_4_1_who_was_revoked_behind_its_plan_does_not_commit(scene: Scene) -> None:
    """The plan is accepted, but the claim is over: no commit is sent and nothing is processed."""
    with (
        pytest.raises(ClaimLostError),
        scene.batch(scene.delivery(AT_MOST_ONCE, log=revoked_behind(scene, "ClaimingMessages"))) as batch,
    ):
        scene.process(batch)
    assert not scene.processed
    assert committed_by(scene, batch) == ["0"]


@sentence(AMO, "4.2", "Check that your claim of the messages is in the log")
def test_at_most_once_4_2_without_its_plan_in_the_log_nothing_is_committed(scene: Scene) -> None:
    """The plan did not reach the log: nothing is committed or processed, and the next member processes all."""
    log = FaultyLog(scene.log())
    log.fail(Fault.FAILED, of_type("ClaimingMessages"))
    with pytest.raises(PlanRejectedError), scene.batch(scene.delivery(AT_MOST_ONCE, log=log)) as batch:
        scene.process(batch)
    assert not scene.processed
    assert committed_by(scene, batch) == ["0"]
    scene.drain(scene.delivery(AT_MOST_ONCE))
    assert scene.processed == ALL


@sentence(AMO, "5", "A heartbeat with the offset commits")
def test_at_most_once_5_the_offset_has_moved_before_anything_is_processed(scene: Scene) -> None:
    """The permission comes after the batch's heartbeat has moved the offset to the plan's end."""
    with scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        assert scene.key().offset == 0
        batch.begin_processing()
        assert scene.key().offset == 5
        assert committed_by(scene, batch) == ["0", "5"]


@sentence(AMO, "6", "Process the messages of the batch")
def test_at_most_once_6_all_of_the_batch_is_processed(scene: Scene) -> None:
    """Each message of the range is processed once, and leaving the block commits nothing more."""
    batch = scene.work(scene.delivery(AT_MOST_ONCE))
    assert scene.processed == ALL
    assert committed_by(scene, batch) == ["0", "5"]


@sentence(AMO, "sentence 3", "The guarantee needs durable storage and the right settings")
def test_at_most_once_sentence_3_settings_that_could_lose_records_are_dangers() -> None:
    """Each setting of the coordination topic with which an acknowledged record can be lost is reported as a danger."""

    class Topic:
        wrong: tuple[str, str] = ("", "")

        def settings(self, _: str) -> dict[str, str]:
            return settings_for(3) | dict([self.wrong])

    described, topic = TopicDescription("__marshal", "B" * 22, (0,), 3), Topic()
    assert check_coordination_topic(cast("Topics", topic), described) == []
    for setting, value, severity in (
        ("unclean.leader.election.enable", "true", Severity.DANGER),
        ("min.insync.replicas", "1", Severity.DANGER),
        ("retention.ms", "3600000", Severity.DANGER),
        ("cleanup.policy", "compact", Severity.UNUSABLE),
        ("message.timestamp.type", "CreateTime", Severity.UNUSABLE),
    ):
        topic.wrong = (setting, value)
        problems = check_coordination_topic(cast("Topics", topic), described)
        assert [(problem.setting, problem.severity) for problem in problems] == [(setting, severity)]


@sentence(AMO, "sentence 4", "Others retry after a failure before the commit; a failure after it drops the batch")
def test_at_most_once_sentence_4_the_commit_divides_what_is_retried_from_what_is_dropped() -> None:
    """If the member dies before its commit, others process the batch; if it dies after it, no member does."""
    for side, left in ((Side.BEFORE, ALL), (Side.AFTER, {})):
        scene = Scene()
        scene.data.make(partitions=1, messages=5)
        die(scene, AT_MOST_ONCE, KillPoint(side, "Heartbeat", 2))
        scene.drain(scene.delivery(AT_MOST_ONCE))
        assert scene.processed == left


# At least once


@sentence(ALO, "1", "Make sure that you still hold the claim")
def test_at_least_once_1_who_lost_the_claim_does_not_begin(scene: Scene) -> None:
    """After a revocation there is no batch; if the lease ends before the batch is read, reading it is an error."""
    with pytest.raises(ClaimLostError):
        scene.work(scene.delivery(log=revoked_behind(scene, "ClaimingMessages")))
    with pytest.raises(ClaimLostError), scene.batch(scene.delivery()) as batch:
        scene.wait_until_stale()
        scene.process(batch)
    assert not scene.processed
    assert scene.key().offset == 0


@sentence(ALO, "2", "Fetch a batch of messages", overridden_by=A_BATCH_IS_A_PLAN)
def test_at_least_once_2_the_plan_is_in_the_log_before_the_batch_is_read(scene: Scene) -> None:
    """The range is planned before the block starts; messages that arrive later are not part of it."""
    with scene.batch(scene.delivery()) as batch:
        assert (scene.key().offset, scene.key().plan_end) == (0, 5)
        scene.data.append(0, 3)
        scene.process(batch)
    assert scene.processed == ALL
    assert scene.key().offset == 5


@sentence(ALO, "3", "Process the batch")
def test_at_least_once_3_processing_comes_before_the_commit(scene: Scene) -> None:
    """Nothing is committed when all is processed; leaving the block commits the batch."""
    with scene.batch(scene.delivery()) as batch:
        scene.process(batch)
        assert (scene.processed, scene.key().offset) == (ALL, 0)
    assert scene.key().offset == 5


@sentence(
    ALO,
    "4",
    "A heartbeat in each interval has the last offset processed",
    overridden_by=(
        "6, Stay and Commit",
        "heartbeats have the present offset; one commit, at the plan's end, moves it",
    ),
)
def test_at_least_once_4_heartbeats_stay_at_the_start_until_the_commit(site: Site) -> None:
    """Heartbeats during a batch keep the offset; the commit moves it to the plan's end."""
    member = site.owner_of(0)
    member.plan({0: 5})
    stay(site, member, 3 * HI_MS)
    member.commit({0: 5})

    offsets = [value.rpartition("/")[2] for value in site.values() if value.startswith("Heartbeat/")]
    assert len(offsets) >= 5
    assert offsets == ["0"] * (len(offsets) - 1) + ["5"]


@sentence(
    ALO,
    "sentence 2",
    "After a failure, at most the messages of one interval are processed again",
    overridden_by=("6, Plan", "the limit is one batch, however long it takes: the open plan is replayed exactly"),
)
def test_at_least_once_sentence_2_exactly_the_open_plan_is_processed_again(scene: Scene) -> None:
    """A member dies before its commit and more messages arrive; others replay the same batch, whatever their limits."""
    die(scene, AT_LEAST_ONCE, KillPoint(Side.BEFORE, "Heartbeat", 2), max_records=3)
    scene.data.append(0, 2)

    with scene.batch(scene.delivery(), max_records=1) as replay:
        scene.process(replay)
    assert [(range_.start, range_.end) for range_ in replay.all_ranges] == [(0, 3)]
    scene.drain(scene.delivery())
    assert scene.processed == {(0, offset): 2 if offset < 3 else 1 for offset in range(7)}


# Consumer failure


@sentence(FAILURE, "sentence 1", "Others can claim what a silent consumer held")
def test_consumer_failure_sentence_1_others_finish_what_a_dead_member_began(scene: Scene) -> None:
    """A member that died with an open plan is followed by a member that finishes the plan and continues."""
    die(scene, AT_LEAST_ONCE, KillPoint(Side.AFTER, "ClaimingMessages"))
    scene.data.append(0, 1)
    scene.drain(scene.delivery())
    assert scene.processed == {**ALL, (0, 5): 1}


@sentence(FAILURE, "sentence 2", "After two silent intervals, consumers that look for partitions claim it")
def test_consumer_failure_sentence_2_all_may_ask_after_two_intervals_and_one_gets_it(site: Site) -> None:
    """Up to that time no member sees it as free; then all do, and the first claim wins."""
    site.owner_of(0)
    waiting = [site.member() for _ in range(3)]
    site.clock.advance(2 * HI_MS)
    assert [one.claimable([0]) for one in waiting] == [[], [], []]
    site.clock.advance(1)
    assert [one.claimable([0]) for one in waiting] == [[0], [0], [0]]
    assert [len(one.claim([0])) for one in waiting] == [1, 0, 0]


@sentence(FAILURE, "sentence 3", "In at least once, two consumers may process the same batch, but no more than that")
def test_consumer_failure_sentence_3_two_work_on_the_same_batch_and_one_commits_it(site: Site) -> None:
    """A paused member and its successor have the same plan; nothing after it can be planned, or committed twice."""
    late = site.owner_of(0)
    late.plan({0: 5})
    site.clock.advance(2 * HI_MS + 1)
    successor = site.member()
    (claim,) = successor.claim([0])
    successor.beat()
    assert (claim.offset, claim.plan_end) == (0, 5)
    with pytest.raises(PlanRejectedError):
        successor.plan({0: 9})

    for record in (f"Heartbeat/1/0/{late.member.instance}/c/etl/orders/0/5", "ClaimingMessages/1/0/x/c/etl/orders/0/9"):
        site.broker.append(site.home, record.encode())
    assert (site.key().offset, site.key().plan_end) == (0, 5)
    successor.commit({0: 5})
    assert (site.owner(), site.key().offset) == (successor.member.instance, 5)


@sentence(FAILURE, "sentence 4", "In at most once this is impossible: at worst, messages are not processed")
def test_consumer_failure_sentence_4_at_most_once_gives_the_permission_to_one(site: Site) -> None:
    """A member is paused before its commit and replaced: its successor may process the batch, and it may not."""
    late = site.owner_of(0, settings=AMO_SETTINGS)
    late.plan({0: 5})
    site.clock.advance(2 * HI_MS + 1)
    successor = site.member(settings=AMO_SETTINGS)
    successor.claim([0])
    successor.beat()
    assert successor.commit_before_processing({0: 5}) == {0}
    with pytest.raises(ClaimLostError):
        late.commit_before_processing({0: 5})

    slept = site.owner_of(1, settings=AMO_SETTINGS)
    slept.plan({1: 5})
    assert slept.commit_before_processing({1: 5}) == {1}
    site.clock.advance(2 * HI_MS + 1)
    (claim,) = site.member(settings=AMO_SETTINGS).claim([1])
    assert (claim.offset, claim.plan_end) == (5, None)


# The TODO of the seed


@sentence(
    "TODO",
    "sentence 1",
    "A consumer could hold a range of offsets instead of the partition",
    overridden_by=("8", "a group's settings must name the feature `ranges`; never in rule set `go`"),
)
def test_todo_sentence_1_members_hold_ranges_of_a_partition_that_nobody_holds(site: Site) -> None:
    """In a group with ranges enabled, two members hold a range each; Go's rule set has no ranges."""
    site.begin(0, at=5)
    first, second = site.holder_of({0: (5, 8)}), site.range_claimer()
    assert [each.start for each in second.claim({0: (8, 9)})] == [8]
    first.check([0])
    second.check([0])
    assert site.owner() is None
    with pytest.raises(ConfigurationError, match="ranges"):
        site.claimer(settings=GroupSettings(60_000, RuleSet.GO, features=("ranges",)))
