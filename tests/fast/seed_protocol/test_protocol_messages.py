"""Check the section "Protocol Messages" of the seed protocol."""

from itertools import pairwise
from uuid import uuid4

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, GroupPausedError
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DeliveryMode,
    Heartbeat,
    InvalidMessage,
    ReleasingPartition,
    parse,
)
from tests.batch_fixtures import Scene
from tests.fast.seed_protocol.member_steps import beats_ms, member_named, site_of, stay
from tests.fast.seed_protocol.sentences import sentence
from tests.faulty_log import Fault, of_type
from tests.members import GROUP, HI_MS, TOPIC, Site, about, faulty, messages_sent_by

SECTION = "Protocol Messages"
MORE_FIELDS = (
    "1",
    "it also has a version, the sender's time and the instance id, and only the instance id identifies the sender",
)
NEXT_OFFSET = ("1", "an offset is the next one to read, never the last one that was read")


def value_of(client: str = "c", group: str = GROUP, topic: str = TOPIC, partition: str = "0") -> bytes:
    """Return a claim's value without a check of its fields."""
    return f"ClaimingPartition/1/0/run1.0/{client}/{group}/{topic}/{partition}".encode()


def is_valid(value: bytes) -> bool:
    """Return whether readers apply the value."""
    return not isinstance(parse(value), InvalidMessage)


def last_record(site: Site) -> str:
    """Return the newest record, with the sender's clock as T."""
    kind, version, _, *rest = site.values()[-1].split("/")
    return "/".join((kind, version, "T", *rest))


# Parameters


@sentence(
    SECTION,
    "parameter 1",
    "A client id is any string",
    overridden_by=("1", "1 to 255 code points without slashes and control characters, because / separates the fields"),
)
def test_protocol_messages_parameter_1_a_client_id_is_any_name_that_fits_a_record(site: Site) -> None:
    """A name without a separator works; members and readers refuse other names."""
    for client in ("c", "Halle 7, Förderband №3", "x" * 255):
        assert is_valid(value_of(client=client))
        assert member_named(site, client, f"{uuid4()}.0").member.client == client
    for client in ("", "a/b", "a\nb", "x" * 256):
        assert not is_valid(value_of(client=client))
        with pytest.raises(ConfigurationError, match="client id"):
            member_named(site, client, "run1.0")


@sentence(
    SECTION,
    "parameter 1.1",
    "No two members of a group should have the same client id",
    overridden_by=(
        "4",
        "only the instance id identifies a member; the client id is for display, and two members may share it",
    ),
)
def test_protocol_messages_parameter_1_1_two_members_of_one_client_id_are_two(site: Site) -> None:
    """Of two members with one client id, only the winner's heartbeats count; the other gets a free partition."""
    first, second = (member_named(site, "same", f"run{number}.0") for number in (1, 2))
    first.claim([0])
    first.beat({0: 3})

    assert [claim.partition for claim in second.claim([0, 1])] == [1]
    site.say(about(Heartbeat, "run2.0", offset=9))
    assert (site.owner(0), site.key(0).offset, site.owner(1)) == ("run1.0", 3, "run2.0")


@sentence(SECTION, "parameter 1.2", "A client id may be random, or known in advance")
def test_protocol_messages_parameter_1_2_client_ids_are_shown_as_they_were_chosen(site: Site) -> None:
    """The state has the owners' client ids, whether random or always the same."""
    chosen = [str(uuid4()), "nightly", "nightly"]
    for number, client in enumerate(chosen):
        member_named(site, client, f"run{number}.0").claim([number])

    owners = [site.key(number).owner for number in range(3)]
    assert [owner and owner.client for owner in owners] == chosen


@sentence(
    SECTION,
    "parameter 1.2b",
    "After a restart with the same client id, a consumer continues its old heartbeats",
    overridden_by=("6, Instance id", "an instance id is one tenure; a delayed record of the old one would count again"),
)
def test_protocol_messages_parameter_1_2b_a_restart_is_another_tenure_that_starts_where_the_last_stood(
    site: Site,
) -> None:
    """The restarted client owns nothing, and its heartbeat is refused.

    It revokes, claims, and continues at the offset.
    """
    before = site.owner_of(0, at=5)
    after = member_named(site, before.member.client, "run1.1")
    site.say(about(Heartbeat, "run1.1", offset=9))
    assert (site.owner(), site.key().offset) == (before.member.instance, 5)

    (claim,) = after.claim([0], is_dead=lambda owner: owner.instance == before.member.instance)
    assert (site.owner(), claim.offset) == ("run1.1", 5)


@sentence(SECTION, "parameter 2", "A group id is an opaque string; groups do not affect each other")
def test_protocol_messages_parameter_2_groups_do_not_see_each_other(site: Site) -> None:
    """Groups, even with a common prefix, hold the same partition with separate positions."""
    for group, at in (("foo", 1), ("foo.bar", 2), ("bar.foo", 3)):
        member = member_named(site, "c", f"{group}.0", group=group)
        assert member.claim([0])
        member.beat({0: at})

    keys = [site.world().key(group, TOPIC, 0) for group in ("foo", "foo.bar", "bar.foo")]
    assert [(key.owner and key.owner.instance, key.offset) for key in keys] == [
        ("foo.0", 1),
        ("foo.bar.0", 2),
        ("bar.foo.0", 3),
    ]


@sentence(SECTION, "parameter 3", "A topic is identified by its name")
def test_protocol_messages_parameter_3_a_topic_is_a_name_that_kafka_allows() -> None:
    """Topics with other names have other keys; a record with an invalid topic name is invalid."""
    site = Site(partitions=1)
    for topic in ("orders", "foo.orders", "foo_orders-2"):
        assert member_named(site, "c", f"{topic}.0", topic=topic).claim([0])
        assert site.world().key(GROUP, topic, 0).owner is not None
    for topic in ("", ".", "..", "a/b", "ö", "x" * 250):
        assert not is_valid(value_of(topic=topic))


@sentence(SECTION, "parameter 4", "A partition is Kafka's number for it")
def test_protocol_messages_parameter_4_a_partition_is_a_number_as_kafka_has_them() -> None:
    """Partitions are numbers from 0 to the largest of 32 bits, with only one spelling."""
    assert [is_valid(value_of(partition=text)) for text in ("0", "7", "2147483647")] == [True] * 3
    assert not any(is_valid(value_of(partition=text)) for text in ("", "-1", "+1", "01", "1.0", "x", "2147483648", "٣"))


@sentence(
    SECTION, "parameter 5", "Both offsets are those of a message, as Kafka numbers them", overridden_by=NEXT_OFFSET
)
def test_protocol_messages_parameter_5_an_offset_is_the_next_to_read(scene: Scene) -> None:
    """For messages 0 to 4 the plan and the commit are at 5, and the next batch starts with message 5."""
    scene.work(scene.delivery())
    messages = [parse(value.encode()) for value in scene.values()]
    assert [message.plan_end for message in messages if isinstance(message, ClaimingMessages)] == [5]
    assert [each.offset for each in messages if isinstance(each, Heartbeat)] == [0, 5]

    scene.data.append(0, 1)
    with scene.batch(scene.delivery()) as batch:
        batch.begin_processing()
        assert scene.data.read(batch.ranges) == [(0, 5)]


@sentence(
    SECTION,
    "parameter 5b",
    "Offsets are never invented",
    overridden_by=(
        "1",
        "an offset is a limit of what is read and may be no message's own; it stays within Kafka's bounds",
    ),
)
def test_protocol_messages_parameter_5b_no_offset_lies_outside_of_what_kafka_reported(scene: Scene) -> None:
    """With small batches, gaps and retention, all offsets stay within the topic's bounds."""
    scene.data.skip(0, 3)
    scene.data.append(0, 4)
    scene.data.retain_from(0, 2)
    scene.drain(scene.delivery(), max_records=3)

    messages = [parse(value.encode()) for value in scene.values()]
    offsets = [message.offset for message in messages if isinstance(message, Heartbeat | ReleasingPartition)]
    ends = [each.plan_end for each in messages if isinstance(each, ClaimingMessages)]
    assert (min(offsets), max(offsets)) == (2, 12)
    assert (min(ends), max(ends)) == (5, 12)


# Constants


@sentence(SECTION, "constant 1", "The heartbeat interval is the longest time allowed between two heartbeats")
def test_protocol_messages_constant_1_no_two_heartbeats_are_further_apart(site: Site) -> None:
    """In the log, a member's heartbeats are at most an interval apart."""
    member = site.owner_of(0)
    stay(site, member, 30 * HI_MS)

    gaps = [later - earlier for earlier, later in pairwise(beats_ms(site))]
    assert len(gaps) >= 30
    assert max(gaps) <= HI_MS


@sentence(SECTION, "constant 1b", "One heartbeat is sent in each interval")
def test_protocol_messages_constant_1b_a_heartbeat_for_each_interval_and_few_more(site: Site) -> None:
    """Jitter only shortens the time between heartbeats: 70 intervals have at least 70 and at most 100 of them."""
    member = site.owner_of(0)
    before = len(beats_ms(site))
    stay(site, member, 70 * HI_MS)

    assert 70 <= len(beats_ms(site)) - before <= 100


@pytest.mark.slow
@sentence(SECTION, "constant 1c", "A shorter interval needs more records and finds dead consumers sooner")
def test_protocol_messages_constant_1c_a_shorter_interval_is_busier_and_recovers_sooner() -> None:
    """Half the interval means twice the heartbeats, and half the time until a silent member is replaced."""
    counts, waits = [], []
    for interval_ms in (HI_MS, HI_MS // 2):
        site, member = site_of(interval_ms)
        stay(site, member, 40 * HI_MS)
        counts.append(len(beats_ms(site)))
        member.beat()
        successor = site.member(settings=member.settings)
        began_ms = site.clock.lease_ms()
        while not successor.claimable([0]):
            site.clock.advance(1)
        waits.append(site.clock.lease_ms() - began_ms)

    assert 1.8 < counts[1] / counts[0] < 2.2
    assert waits == [2 * HI_MS + 1, HI_MS + 1]


# Messages


@sentence(SECTION, "message 1", "The fields of a heartbeat", overridden_by=MORE_FIELDS)
def test_protocol_messages_message_1_the_fields_of_a_heartbeat(site: Site) -> None:
    """Client, group, topic, partition and offset follow the instance."""
    member = member_named(site, "nightly", "run1.0")
    member.claim([3])
    member.beat({3: 7})
    assert last_record(site) == "Heartbeat/1/T/run1.0/nightly/etl/orders/3/7"


@sentence(SECTION, "message 1b", "Heartbeats follow each other within the interval")
def test_protocol_messages_message_1b_one_that_failed_is_made_up_for_in_time(site: Site) -> None:
    """A heartbeat that does not reach the log is followed by another before the interval ends."""
    member = site.owner_of(0)
    faulty(member).fail(Fault.FAILED, of_type("Heartbeat"), times=1)
    stay(site, member, 2 * HI_MS)

    gaps = [later - earlier for earlier, later in pairwise(beats_ms(site))]
    assert faulty(member).types().count("Heartbeat") > len(beats_ms(site)) >= 3
    assert max(gaps) <= HI_MS


@sentence(SECTION, "message 2", "The fields of a claim, which requests a partition", overridden_by=MORE_FIELDS)
def test_protocol_messages_message_2_a_claim_is_the_first_that_is_said_about_a_partition(site: Site) -> None:
    """It ends with client, group, topic and partition; the instance has written nothing about the key before."""
    site.member()
    member = member_named(site, "nightly", "nightly.0")
    member.claim([3])
    assert last_record(site) == "ClaimingPartition/1/T/nightly.0/nightly/etl/orders/3"
    assert messages_sent_by(site, "nightly.0") == ["ClaimingPartition"]


@sentence(SECTION, "message 3", "The fields of a release, which frees a partition at once", overridden_by=MORE_FIELDS)
def test_protocol_messages_message_3_a_released_partition_is_free_at_once(site: Site) -> None:
    """It ends with client, group, topic, partition and offset; no member has to wait until the owner is stale."""
    member = member_named(site, "nightly", "run1.0")
    member.claim([3])
    member.beat({3: 7})
    member.release()
    assert last_record(site) == "ReleasingPartition/1/T/run1.0/nightly/etl/orders/3/7"
    assert site.member().claim([3])


@sentence(
    SECTION,
    "message 4",
    "Messages are claimed up to an offset, for at most once",
    overridden_by=("6, Plan", "every mode writes plans, and the next owner replays an open plan exactly"),
)
def test_protocol_messages_message_4_every_mode_plans_before_it_processes(site: Site) -> None:
    """It ends with client, group, topic, partition and the plan's end.

    In each mode it is in the log before a message is read.
    """
    member = member_named(site, "nightly", "run1.0")
    member.claim([3])
    member.beat({3: 7})
    member.plan({3: 9})
    assert last_record(site) == "ClaimingMessages/1/T/run1.0/nightly/etl/orders/3/9"

    for mode in DeliveryMode:
        scene = Scene()
        scene.data.make(partitions=1, messages=5)
        with scene.batch(scene.delivery(mode)) as batch:
            batch.begin_processing()
            assert scene.values()[-1 if mode is not DeliveryMode.AT_MOST_ONCE else -2].startswith("ClaimingMessages/")
            scene.process(batch)


@sentence(SECTION, "message 5", "The fields of a pause", overridden_by=MORE_FIELDS)
def test_protocol_messages_message_5_the_fields_of_a_pause(site: Site) -> None:
    """It has client, group and the end of the pause; version 0, no topic and partition 0, as Go writes it."""
    GroupAdmin(Rationalizer(site.log(), clock=site.clock), GROUP, "ops", clock=site.clock).pause(1_800_000_000)
    kind, version, _, instance, *rest = site.values()[-1].split("/")
    assert (kind, version, rest) == ("ReleaseGroup", "0", ["ops", "etl", "", "0", "1800000000"])
    assert instance


@sentence(SECTION, "message 5b", "An operator pauses a whole group until a time")
def test_protocol_messages_message_5b_a_pause_holds_everywhere_until_its_time(site: Site) -> None:
    """Until that time, no member can claim in any coordination partition; then the pause ends without a record."""
    member = site.member()
    until_s = site.clock.wall_ms() // 1_000 + 60
    GroupAdmin(Rationalizer(site.log(), clock=site.clock), GROUP, "ops", clock=site.clock).pause(until_s)
    found = [partition.groups[GROUP].paused_until_s for partition in site.world().partitions.values()]
    assert found == [until_s] * site.partitions

    site.clock.advance(59_999)
    member.rationalizer.catch_up()
    with pytest.raises(GroupPausedError):
        member.claim([0])
    site.say(about(ClaimingPartition, "rude.0"))
    assert site.owner() is None
    site.clock.advance(1)
    assert member.claim([0])
