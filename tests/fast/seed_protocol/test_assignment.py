"""Check the seed protocol's sections on claiming: "Consuming a New Partition" and the one on restarts."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.topic_settings import settings_for
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat, coordination_partition
from marshal_dagster.testing import MemoryLog
from tests.batch_fixtures import Scene
from tests.fast.seed_protocol.member_steps import member_named
from tests.fast.seed_protocol.sentences import sentence
from tests.faulty_log import Fault
from tests.members import GROUP, HI_MS, TOPIC, Site, about, faulty, messages_sent_by

if TYPE_CHECKING:
    from collections.abc import Callable

NEW, RESTART = "Consuming a New Partition", "Consuming Recently Used Partitions on Restart"
NO_TENURE_GOES_ON = (
    "6, Instance id",
    "a client id proves nothing, and no tenure is continued. A member that knows the owner is dead revokes and claims",
)
GO_LOG = Path(__file__).parents[2] / "vectors" / "marshal-log.jsonl"


@sentence(NEW, "1", "Choose a partition to claim")
def test_consuming_a_new_partition_1_a_batch_chooses_the_largest_lag() -> None:
    """Of the free partitions with unread messages, the one with the largest lag comes first."""
    scene = Scene()
    scene.data.make(partitions=3, messages=1)
    scene.drain(scene.delivery())
    for partition, messages in ((0, 2), (1, 5), (2, 0)):
        scene.data.append(partition, messages)

    chosen = [scene.work(scene.delivery(), max_claims=1).all_ranges for _ in range(2)]
    assert [[range_.partition for range_ in ranges] for ranges in chosen] == [[1], [0]]


@sentence(NEW, "1.1", "Each consumer may choose in its own way")
def test_consuming_a_new_partition_1_1_any_choice_may_be_requested(site: Site) -> None:
    """A claimer claims the given partitions in the given order."""
    member = site.member()
    assert [claim.partition for claim in member.claim([7, 2, 5], max_claims=2)] == [7, 2]


@sentence(
    NEW,
    "2",
    "Topic and partition together choose the coordination partition",
    overridden_by=("1", "the topic alone decides, by md5, as in the Go library, whose consumers share the log"),
)
def test_consuming_a_new_partition_2_the_topic_alone_chooses_the_coordination_partition(site: Site) -> None:
    """Every record of a log that Go wrote is in the expected partition; here, all partitions of a topic share one."""
    records = [json.loads(line) for line in GO_LOG.read_text().splitlines()]
    places = [(coordination_partition(record["value"].split("/")[6], 8), record["partition"]) for record in records]
    assert len({found for found, _ in places}) >= 3
    assert [found for found, _ in places] == [written for _, written in places]

    site.member().claim(range(20))
    assert sum(value.startswith("ClaimingPartition/") for value in site.values()) == 20


@sentence(NEW, "3", "Read the world state from that coordination partition")
def test_consuming_a_new_partition_3_its_coordination_partition_is_all_that_must_be_read(site: Site) -> None:
    """A member that follows only its topic's coordination partition knows what others did there."""
    owner = site.owner_of(0, at=4)
    reader = Rationalizer(MemoryLog(site.broker), topics=[TOPIC], clock=site.clock)
    found = reader.catch_up().key(GROUP, TOPIC, 0)

    assert reader.world.partitions.keys() == {site.home}
    assert (found.owner and found.owner.instance, found.offset) == (owner.member.instance, 4)


@sentence(
    NEW,
    "3.1",
    "If the owner is not stale, choose another partition",
    overridden_by=("6, Revoke", "the same, but an owner that is known to be dead is revoked without a wait"),
)
def test_consuming_a_new_partition_3_1_a_held_partition_is_passed_over(site: Site, scene: Scene) -> None:
    """It is not claimable for up to two intervals; a batch takes another partition, or reports that all are held."""
    dead = site.owner_of(0).member.instance
    site.clock.advance(2 * HI_MS)
    member = site.member()
    assert member.claimable([0, 1]) == [1]
    assert member.claimable([0, 1], is_dead=lambda owner: owner.instance == dead) == [0, 1]

    scene.data.grow(2)
    scene.data.append(1, 5)
    with scene.batch(scene.delivery(), partitions=(0,)) as first:
        second, third = (scene.work(scene.delivery()) for _ in range(2))
        scene.process(first)
        assert [one.partition for one in first.all_ranges] == [0]
    assert [range_.partition for range_ in second.all_ranges] == [1]
    assert third.idle is not None
    assert third.idle.reason == "held"


@sentence(NEW, "3.2", "A stale owner's partition may be claimed")
def test_consuming_a_new_partition_3_2_what_a_stale_owner_held_is_claimable(site: Site) -> None:
    """The log is silent, so the member's clock shows that more than two intervals passed since the last heartbeat."""
    site.owner_of(0)
    member = site.member()
    site.clock.advance(2 * HI_MS + 1)
    assert member.claimable([0]) == [0]
    assert member.claim([0])


@sentence(NEW, "4", "Write a claim of the partition")
def test_consuming_a_new_partition_4_send_a_claiming_partition(site: Site) -> None:
    """There is one such record for each partition, in the topic's coordination partition."""
    member = member_named(site, "c", "run9.0")
    before = len(site.values())
    member.claim([0, 4])

    assert [value.split("/")[0:1] + value.split("/")[3:] for value in site.values()[before:]] == [
        ["ClaimingPartition", "run9.0", "c", GROUP, TOPIC, "0"],
        ["ClaimingPartition", "run9.0", "c", GROUP, TOPIC, "4"],
    ]


@sentence(NEW, "5", "Continue to read, to the end of the log")
def test_consuming_a_new_partition_5_nothing_is_held_before_it_was_read_back(site: Site) -> None:
    """The claim is in the log, but the member holds nothing until it has read past the claim."""
    member = site.member()
    held: list[tuple[str | None, int]] = []
    faulty(member).before_read = lambda: held.append((site.owner(), len(member.claims)))
    member.claim([0])

    assert held == [(member.member.instance, 0)]
    assert list(member.claims) == [0]
    assert member.rationalizer.world.partitions[site.home].next_offset == site.broker.bounds(site.home).end


@sentence(
    NEW,
    "5.1",
    "The earliest claim of the partition wins; continue if it is your own",
    overridden_by=(
        "4 and 6",
        "the first claim that finds no live owner wins; it is identified by its log offset, not its content",
    ),
)
def test_consuming_a_new_partition_5_1_the_first_claim_that_found_it_free_wins(site: Site) -> None:
    """An earlier claim that became stale does not count, nor is a twin's equal record mistaken for the member's own."""
    site.member()
    site.say(about(ClaimingPartition, "run8.0"))
    site.clock.advance(2 * HI_MS + 1)
    member, twin = (member_named(site, "c", "run9.0") for _ in range(2))
    (claim,) = member.claim([0])

    assert claim.epoch == site.broker.bounds(site.home).end - 1
    assert twin.claim([0]) == []


@sentence(NEW, "5.2", "After a lost race, start again with another partition")
def test_consuming_a_new_partition_5_2_the_loser_says_no_more_about_it_and_takes_another(site: Site) -> None:
    """After the lost claim, this instance writes no more records about the partition."""
    site.owner_of(0)
    member = member_named(site, "c", "run9.0")
    assert member.claim([0]) == []
    assert member.claim([0, 1])[0].partition == 1
    member.beat({1: 0})
    member.release()

    assert [value.split("/")[0] for value in site.values() if "/run9.0/" in value and value.split("/")[7] == "0"] == [
        "ClaimingPartition"
    ]


@sentence(
    NEW,
    "6",
    "The winner sends a heartbeat at once; then it may consume",
    overridden_by=("6, Data topic", "the same, but first a key without the data topic's id gets it"),
)
def test_consuming_a_new_partition_6_a_heartbeat_follows_the_won_claim_before_anything_is_read(scene: Scene) -> None:
    """The record after the claim is the winner's heartbeat at the group's offset; the block starts after it."""
    topic_id = scene.data.describe(TOPIC).topic_id
    expected = [["ClaimingPartition"], ["DataTopic", topic_id], ["Heartbeat", "0"]]
    for _ in range(2):
        with scene.batch(scene.delivery()) as batch:
            values = [value.split("/") for value in scene.values() if f"/{batch.batch_id}/" in value]
            said = [[fields[0], *fields[8:]] for fields in values if fields[0] != "GroupSettings"]
            assert said[: len(expected)] == expected
            scene.process(batch)
        scene.data.append(0, 2)
        expected = [["ClaimingPartition"], ["Heartbeat", "5"]]


def step(site: Site, member: Claimer, chosen: random.Random) -> None:
    """Let a member take a random step, while its broker may fail."""
    log = faulty(member)
    log.recover()
    if chosen.random() < 0.2:
        log.fail(chosen.choice(list(Fault)), times=1)
    acts: list[Callable[[], Any]] = [
        lambda: member.claim([0, 1]),
        member.beat,
        lambda: member.beat(dict.fromkeys(member.claims, 0)),
        member.rationalizer.catch_up,
        member.release,
        log.arrive,
        lambda: site.clock.advance(chosen.choice((1, HI_MS // 3, HI_MS))),
    ]
    with suppress(MarshalError):
        chosen.choice(acts)()


@pytest.mark.slow
@sentence(NEW, "sentence 2", "If Kafka loses no records, no partition has two consumers")
def test_consuming_a_new_partition_sentence_2_no_two_believe_that_they_hold_it() -> None:
    """Members come, send heartbeats, are silent and meet failures; two never hold a lease on the same partition."""
    wins = 0
    for seed in range(12):
        site, chosen = Site(), random.Random(seed)
        members = [site.member() for _ in range(4)]
        for _ in range(120):
            place = chosen.randrange(len(members))
            if not members[place].claims and chosen.random() < 0.3:
                members[place] = site.member()
            before = len(members[place].claims)
            step(site, members[place], chosen)
            wins += max(0, len(members[place].claims) - before)
            now_ms = site.clock.lease_ms()
            for number in (0, 1):
                claims = [one.claims[number] for one in members if number in one.claims]
                assert sum(claim.lease.holds(now_ms) for claim in claims) <= 1, seed
    assert wins > 50


@sentence(NEW, "sentence 2", "To lose no records, produce them with the right options")
def test_consuming_a_new_partition_sentence_2_records_are_produced_so_that_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Producers wait for all in-sync replicas and are idempotent.

    Of three replicas two must be in sync, and a lagging replica cannot become leader.
    """
    options: dict[str, Any] = {}
    monkeypatch.setattr(clients, "Producer", options.update)
    clients.producer(KafkaConnection(bootstrap_servers="127.0.0.1:1"), delivery_timeout_ms=1, client_id="c")
    assert (options["acks"], options["enable.idempotence"]) == ("all", True)

    topic = settings_for(3)
    assert (topic["min.insync.replicas"], topic["unclean.leader.election.enable"]) == ("2", "false")


@sentence(
    RESTART,
    "sentence 2",
    "With a constant client id, a client finds the partitions that it consumed before",
    overridden_by=NO_TENURE_GOES_ON,
)
def test_consuming_recently_used_partitions_on_restart_sentence_2_a_client_id_is_shown_and_gives_nothing_back(
    site: Site,
) -> None:
    """The state shows what the client held; for this client it is claimable no earlier than for others."""
    member_named(site, "nightly", "run1.0").claim([3])
    restarted, other = member_named(site, "nightly", "run2.0"), member_named(site, "other", "run3.0")
    keys = restarted.group.keys.items()
    assert [place for place, key in keys if key.owner and key.owner.client == "nightly"] == [(TOPIC, 3)]

    assert restarted.claimable([3]) == other.claimable([3]) == []
    site.clock.advance(2 * HI_MS + 1)
    assert restarted.claimable([3]) == other.claimable([3]) == [3]


@sentence(RESTART, "1", "Read the state of the whole world")
def test_consuming_recently_used_partitions_on_restart_1_all_coordination_partitions_can_be_followed(
    site: Site,
) -> None:
    """A reader of all coordination partitions finds what a dead run held in every topic."""
    topics = [f"topic{number}" for number in range(8)]
    for topic in topics:
        member_named(site, "c", "run1.0", topic=topic).claim([0])

    world = Rationalizer(MemoryLog(site.broker), clock=site.clock).catch_up()
    owners = [world.key(GROUP, topic, 0).owner for topic in topics]
    assert [owner and owner.instance for owner in owners] == ["run1.0"] * len(topics)
    assert len({coordination_partition(topic, site.partitions) for topic in topics}) > 1


@sentence(
    RESTART,
    "1.1",
    "To do so, read the recent records of all coordination partitions",
    overridden_by=(
        "5",
        "the state is known only from the start of the log: older records may have a pause, a plan or a position",
    ),
)
def test_consuming_recently_used_partitions_on_restart_1_1_recent_records_are_not_enough(site: Site) -> None:
    """A reader of the whole log finds an old plan; a reader of the recent part does not."""
    owner = site.owner_of(0)
    owner.plan({0: 9})
    end = site.broker.bounds(site.home).end
    owner.beat()
    assert (site.key().plan_end, site.key().provisional) == (9, False)

    site.broker.retain_from(site.home, end)
    assert (site.key().plan_end, site.key().provisional) == (None, True)


@sentence(RESTART, "2", "If your own heartbeats are fresh, continue them", overridden_by=NO_TENURE_GOES_ON)
def test_consuming_recently_used_partitions_on_restart_2_what_a_dead_instance_held_is_revoked_and_claimed(
    site: Site,
) -> None:
    """With one append, the dead instance's claim ends and the partition belongs to the new instance, fresh or not."""
    dead = site.owner_of(0)
    restarted = member_named(site, dead.member.client, "run9.0")
    assert restarted.claimable([0]) == []
    assert restarted.claim([0], is_dead=lambda owner: owner.instance == dead.member.instance)

    assert messages_sent_by(site, "run9.0") == ["RevokingClaim", "ClaimingPartition"]
    site.say(about(Heartbeat, dead.member.instance, offset=9))
    assert (site.owner(), site.key().offset) == ("run9.0", 0)


@sentence(RESTART, "2.1", "Continue at the offset of the last heartbeat")
def test_consuming_recently_used_partitions_on_restart_2_1_the_successor_begins_at_the_last_heartbeat(
    scene: Scene,
) -> None:
    """The new owner reads from the offset of the last accepted heartbeat."""
    scene.work(scene.delivery(), max_records=2)
    scene.wait_until_stale()
    with scene.batch(scene.delivery()) as batch:
        batch.begin_processing()
        assert scene.data.read(batch.ranges) == [(0, 2), (0, 3), (0, 4)]
