"""Check the sections "Determining World State" and "Heartbeats" of the seed protocol."""

import random

import pytest

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ClaimLostError, IncompleteLogError
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    RevokingClaim,
)
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.staleness import Freshness, freshness
from marshal_dagster.testing import ManualClock, MemoryLog
from tests.fast.seed_protocol.sentences import sentence
from tests.members import GROUP, HI_MS, SETTINGS, TOPIC, Site, about, settings_record

WORLD, HEARTBEATS = "Determining World State", "Heartbeats"
ONLY_SHOWN = ("3", "exactly one interval still counts as fresh; both states are only displayed and decide nothing")


def say_anything(site: Site, chosen: random.Random) -> None:
    """Let one of three instances write any record about one of two partitions, at any time."""
    site.clock.advance(chosen.choice((0, 1, HI_MS, 2 * HI_MS, 2 * HI_MS + 1)) if chosen.random() < 0.2 else 10)
    at, instance, partition = chosen.randrange(20), f"run{chosen.randrange(3)}.0", chosen.randrange(2)
    said = (
        about(ClaimingPartition, instance, partition),
        about(Heartbeat, instance, partition, offset=at),
        about(ClaimingMessages, instance, partition, plan_end=at),
        about(ReleasingPartition, instance, partition, offset=at),
    )
    site.say(chosen.choice(said))


@sentence(WORLD, "sentence 2", "A rationalizer turns the sequence of records into a world state")
def test_determining_world_state_sentence_2_the_state_follows_from_the_records(site: Site) -> None:
    """A claim, a heartbeat, a plan and a release, read one after the other, each have their effect on the state."""
    reader = Rationalizer(MemoryLog(site.broker), clock=site.clock)
    found = []
    epoch = site.broker.bounds(site.home).end
    for message in (
        about(ClaimingPartition, "run1.0"),
        about(Heartbeat, "run1.0", offset=3),
        about(ClaimingMessages, "run1.0", plan_end=9),
        about(ReleasingPartition, "run1.0", offset=3),
    ):
        site.say(message)
        key = reader.catch_up().key(GROUP, TOPIC, 0)
        found.append((key.owner and (key.owner.instance, key.owner.epoch), key.offset, key.plan_end))

    owner = ("run1.0", epoch)
    assert found == [(owner, None, None), (owner, 3, None), (owner, 3, 9), (None, 3, 9)]


@sentence(
    WORLD,
    "sentence 3",
    "All readers of the same log get the same state; nothing else affects it",
    overridden_by=(
        "2",
        "the same, and time comes from the log too: from the broker's timestamps, not from a reader's clock",
    ),
)
def test_determining_world_state_sentence_3_the_same_log_gives_the_same_state(site: Site) -> None:
    """A reader that followed record by record, with another clock, has the same state as one that reads all at once."""
    slow, chosen = Rationalizer(MemoryLog(site.broker), clock=ManualClock()), random.Random(5)
    site.say(settings_record(SETTINGS))
    for _ in range(400):
        say_anything(site, chosen)
        slow.catch_up()
    quick = Rationalizer(MemoryLog(site.broker), clock=ManualClock(4_000_000_000_000)).catch_up()

    found = summary(quick)
    assert summary(slow.world) == found
    assert found["refused"] > 50
    assert site.broker.bounds(site.home).end - found["refused"] > 50


@sentence(
    WORLD,
    "sentence 4",
    "A reader gets the state from the whole log, as of the last record that it read",
    overridden_by=(
        "5",
        "the same, or from a snapshot; a reader that can use neither only observes, and no member claims",
    ),
)
def test_determining_world_state_sentence_4_it_takes_the_whole_log_and_is_as_old_as_its_last_record(
    site: Site,
) -> None:
    """A reader knows what it has read; without the start of the log it only observes, and no member claims."""
    reader = Rationalizer(MemoryLog(site.broker), clock=site.clock)
    reader.catch_up()
    owner = site.owner_of(0, at=4)
    assert reader.world.key(GROUP, TOPIC, 0).owner is None
    found = reader.catch_up().key(GROUP, TOPIC, 0)
    assert (found.owner and found.owner.instance, found.offset) == (owner.member.instance, 4)

    site.broker.retain_from(site.home, 1)
    assert site.key().provisional
    with pytest.raises(IncompleteLogError):
        site.claimer().claim([1])


@sentence(WORLD, "sentence 5", "Heartbeats and records about partitions show the active consumers")
def test_determining_world_state_sentence_5_the_state_names_who_is_at_work(site: Site) -> None:
    """Of members that send heartbeats, are silent, released or were revoked, only the first are active."""
    silent = site.owner_of(0)
    site.clock.advance(HI_MS)
    beating, leaving, revoked = (site.owner_of(number) for number in (1, 2, 3))
    leaving.release()
    site.say(about(RevokingClaim, "ops.1", 3, epoch=revoked.claims[3].epoch))
    site.clock.advance(HI_MS + 1)
    beating.beat()

    world = site.world()
    log_time_ms = world.partition_of(TOPIC).log_time_ms
    assert log_time_ms is not None
    assert list(world.group_of(GROUP, TOPIC).live_keys(log_time_ms)) == [(TOPIC, 1)]
    assert site.owner(0) == silent.member.instance


@sentence(HEARTBEATS, "sentence 1", "A consumer must send a heartbeat in each interval")
def test_heartbeats_sentence_1_who_sends_none_stops_by_itself_before_others_may_begin(site: Site) -> None:
    """A silent owner's lease lasts a little less than two intervals; in the log, its claim lasts exactly two."""
    owner, other = site.owner_of(0), site.member()
    site.clock.advance(1.9 * HI_MS - 1)
    owner.check([0])
    site.clock.advance(1)
    with pytest.raises(ClaimLostError, match="lease ended"):
        owner.check([0])
    other.rationalizer.catch_up()
    assert other.claimable([0]) == []


@sentence(HEARTBEATS, "sentence 2", "A heartbeat within the last interval: fresh", overridden_by=ONLY_SHOWN)
def test_heartbeats_sentence_2_fresh_is_up_to_one_interval() -> None:
    """A member is fresh from its heartbeat to one interval after it, inclusive."""
    assert {freshness(silent_ms, HI_MS) for silent_ms in (0, 1, HI_MS - 1, HI_MS)} == {Freshness.FRESH}
    assert freshness(HI_MS + 1, HI_MS) is not Freshness.FRESH


@sentence(HEARTBEATS, "sentence 3", "Silent for one to two intervals: unknown", overridden_by=ONLY_SHOWN)
def test_heartbeats_sentence_3_unknown_is_up_to_two_intervals_and_nobody_may_claim(site: Site) -> None:
    """Such an owner still owns: a claim is refused, and the owner's next heartbeat is accepted."""
    assert {freshness(silent_ms, HI_MS) for silent_ms in (HI_MS + 1, 2 * HI_MS)} == {Freshness.UNKNOWN}

    owner = site.owner_of(0)
    site.clock.advance(2 * HI_MS)
    assert site.member().claim([0]) == []
    site.say(about(Heartbeat, owner.member.instance, offset=2))
    assert (site.owner(), site.key().offset) == (owner.member.instance, 2)


@sentence(HEARTBEATS, "sentence 4", "Silent for more than two intervals: stale")
def test_heartbeats_sentence_4_stale_is_more_than_two_intervals_without_a_heartbeat(site: Site) -> None:
    """A heartbeat prolongs the time; a millisecond over two intervals after the last one, another claim wins."""
    assert freshness(2 * HI_MS + 1, HI_MS) is Freshness.STALE

    owner = site.owner_of(0)
    site.clock.advance(HI_MS)
    owner.beat()
    site.clock.advance(2 * HI_MS)
    assert site.member().claim([0]) == []
    site.clock.advance(1)
    assert site.member().claim([0])
