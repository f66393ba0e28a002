"""Coordinators and members on a real broker."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.member import MemberState
from marshal_dagster.coordinator.messages import ALL, Ping, render
from marshal_dagster.coordinator.service import Coordinator, LookAtTopics
from marshal_dagster.coordinator.transport import (
    CoordinatorTopics,
    Reader,
    end_of,
    key_of,
    partition_of,
    read_coordinator_messages,
)
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.topics import grow

SESSION_MS = 10_000


@pytest.fixture
def topics_of(connection: KafkaConnection) -> CoordinatorTopics:
    """A coordinator's topics, which no other test uses."""
    topics = CoordinatorTopics(f"coordinator-{uuid.uuid4().hex[:8]}")
    topics.create(connection, 2)
    return topics


@dataclass
class Member:
    """A member, the partitions that it works on and those that it stopped."""

    client: CoordinatedMember
    works_on: set[DataPartitionId] = field(default_factory=set)
    stopped: list[DataPartitionId] = field(default_factory=list)


@contextmanager
def coordinator(
    connection: KafkaConnection, topics: CoordinatorTopics, look: LookAtTopics | None = None
) -> Iterator[Coordinator]:
    """Run a coordinator in a thread."""
    service = Coordinator(connection, topics, look=look)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(WITHIN_S)


@contextmanager
def member(
    connection: KafkaConnection, topics: CoordinatorTopics, name: str, wanted: str, group: str = "etl"
) -> Iterator[Member]:
    """Run a member that requests one topic."""
    works_on: set[DataPartitionId] = set()
    stopped: list[DataPartitionId] = []

    def stop(places: frozenset[DataPartitionId]) -> None:
        works_on.difference_update(places)
        stopped.extend(places)

    client = CoordinatedMember(
        connection,
        group,
        name,
        start=works_on.update,
        stop=stop,
        topics=topics,
        topics_wanted=[wanted],
        session_timeout_ms=SESSION_MS,
    )
    with client:
        yield Member(client, works_on, stopped)


def even(members: list[Member], partitions: int) -> Callable[[], bool]:
    """Return a function that checks that the members share the partitions, with counts that differ by at most one."""

    def look() -> bool:
        counts = [len(each.works_on) for each in members]
        places = {place for each in members for place in each.works_on}
        return len(places) == sum(counts) == partitions and max(counts) - min(counts) <= 1

    return look


def test_members_come_and_go_and_the_coordinator_is_replaced(
    connection: KafkaConnection, topics_of: CoordinatorTopics, topic: MakeTopic, topics: Topics
) -> None:
    """Only the necessary partitions move.

    A second coordinator takes over without a rebalance, and new partitions are used.
    """
    wanted = topic(12)
    with ExitStack() as stack:
        first = ExitStack()
        first.enter_context(coordinator(connection, topics_of))
        members = [stack.enter_context(member(connection, topics_of, f"m{number}", wanted)) for number in range(2)]
        wait_until(even(members, 12), "the members share all partitions evenly")
        for each in members:
            each.stopped.clear()

        members.append(stack.enter_context(member(connection, topics_of, "m2", wanted)))
        wait_until(even(members, 12), "the members share all partitions evenly")
        assert sorted(len(each.stopped) for each in members) == [0, 2, 2]

        stack.enter_context(coordinator(connection, topics_of))
        first.close()
        for each in members:
            each.stopped.clear()
        with member(connection, topics_of, "m3", wanted) as late:
            wait_until(even([*members, late], 12), "the member that came late has its share")
            assert all(len(each.stopped) <= 1 for each in members)
        wait_until(even(members, 12), "the members share the partitions of the one that left")
        grow(topics, wanted, 15)
        wait_until(even(members, 15), "the partitions that were added are shared evenly")


def test_coordinators_share_the_groups(
    connection: KafkaConnection, topics_of: CoordinatorTopics, topic: MakeTopic
) -> None:
    """Each group is led by one coordinator, by the group's partition.

    The remaining coordinator takes over the other's.
    """
    wanted = topic(4)
    count = topics_of.partitions(connection)
    groups = [
        next(name for name in map("g{}".format, range(100)) if partition_of(name, count) == at) for at in range(2)
    ]
    with ExitStack() as stack:
        first = stack.enter_context(coordinator(connection, topics_of))
        other = ExitStack()
        second = other.enter_context(coordinator(connection, topics_of))
        wait_until(
            lambda: first.health()["partitions"] == second.health()["partitions"] == 1,
            "each coordinator leads one partition",
        )
        members = [stack.enter_context(member(connection, topics_of, "m", wanted, group)) for group in groups]
        wait_until(lambda: all(even([each], 4)() for each in members), "each member has all of its group")
        assert sorted([*first.groups(), *second.groups()]) == sorted(groups)
        for each in members:
            each.stopped.clear()
        other.close()
        wait_until(lambda: sorted(first.groups()) == sorted(groups), "the one that is left leads all groups")
        wait_until(lambda: first.health()["members"] == 2, "the one that is left knows both members")
        assert [each.stopped for each in members] == [[], []]


def test_topics_that_do_not_fit_each_other_are_reported(
    connection: KafkaConnection, topics_of: CoordinatorTopics, topics: Topics
) -> None:
    """Different partition counts are an error: groups could have no coordinator, or two after a restart."""
    topics_of.check(connection, 2)
    grow(topics, topics_of.member_messages, 4)
    actions = f"'{topics_of.member_messages}' has 4, '{topics_of.coordinator_messages}' has 2.*delete the three topics"
    with pytest.raises(ConfigurationError, match=actions):
        topics_of.check(connection, 2)
    with pytest.raises(ConfigurationError, match=actions):
        topics_of.create(connection, 4)
    for name in (topics_of.coordinator_messages, topics_of.leader):
        grow(topics, name, 4)
    with pytest.raises(
        ConfigurationError, match=r"had 2 partitions when this process started.*restart all coordinators"
    ):
        topics_of.check(connection, 2)
    topics_of.check(connection, 4)


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_that_forgets_shares_is_reported(
    connection: KafkaConnection, topics: Topics, topic: MakeTopic, policy: str
) -> None:
    """A stable group gets no new shares. Once the old ones are deleted, the runs of its members claim nothing."""
    made = CoordinatorTopics(topic(1))
    topics.create(made.coordinator_messages, 1, 1, {"cleanup.policy": policy})
    topics.create(made.leader, 1, 1)
    with pytest.raises(ConfigurationError, match=f"'{made.coordinator_messages}' has cleanup.policy .* compact alone"):
        made.check(connection, 1)


def test_a_second_of_the_same_name_is_refused(
    connection: KafkaConnection, topics_of: CoordinatorTopics, topic: MakeTopic
) -> None:
    """The second member gets an error and no partitions. The first one continues."""
    wanted = topic(2)
    with coordinator(connection, topics_of), member(connection, topics_of, "m", wanted) as first:
        wait_until(even([first], 2), "the first member has both partitions")
        with member(connection, topics_of, "m", wanted) as second:
            wait_until(lambda: second.client.state is MemberState.REFUSED, "the second member is refused")
            assert second.client.error == "duplicate_id"
        assert even([first], 2)()


def test_nothing_is_kept_of_a_member_that_has_gone(
    connection: KafkaConnection, topics_of: CoordinatorTopics, topic: MakeTopic
) -> None:
    """Neither the share of the member nor the answers to it remain. Compaction would keep them in the topic forever."""
    wanted, partition = topic(4), partition_of("etl", topics_of.partitions(connection))
    with coordinator(connection, topics_of), member(connection, topics_of, "stays", wanted) as stays:
        with member(connection, topics_of, "goes", wanted) as goes:
            wait_until(even([stays, goes], 4), "both members have their share")
        wait_until(even([stays], 4), "the member that stays has all")

        def kept() -> set[bytes]:
            return {
                came.key
                for _, came in read_coordinator_messages(connection, topics_of.coordinator_messages, [partition])
            }

        wait_until(
            lambda: not any(key.startswith(b"etl/goes/") for key in kept()),
            "nothing is kept of the member that left",
        )
        assert b"etl/stays/start" in kept()


def test_a_coordinator_may_be_reported_which_topics_there_are(
    connection: KafkaConnection, topics_of: CoordinatorTopics
) -> None:
    """With given topics, the coordinator does not ask the brokers."""
    look = {"nowhere": 7}.copy
    with coordinator(connection, topics_of, look), member(connection, topics_of, "m", "nowhere") as one:
        wait_until(even([one], 7), "the member has all partitions")


@pytest.mark.parametrize("commits", [True, False])
def test_a_partition_that_ends_in_a_transaction_is_read_to_its_end(
    connection: KafkaConnection, topics_of: CoordinatorTopics, commits: bool
) -> None:
    """The last offset is the transaction marker, which readers do not get. No coordinator waits for it."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(WITHIN_S)
    producer.begin_transaction()
    ping = Ping(group="etl", member=ALL, epoch=1, round=1)
    producer.produce(topics_of.coordinator_messages, render(ping), key_of(ping), 0)
    producer.flush(WITHIN_S)
    (producer.commit_transaction if commits else producer.abort_transaction)(WITHIN_S)
    wait_until(lambda: end_of(connection, topics_of.coordinator_messages, 0) == 2, "both orders are in the topic")
    found = read_coordinator_messages(connection, topics_of.coordinator_messages, [0])
    assert [(order, came.offset, came.key) for order, came in found] == [(ping, 0, b"etl/*/ping")]


def test_a_reader_whose_position_is_gone_goes_on_at_the_end(
    connection: KafkaConnection, topics_of: CoordinatorTopics
) -> None:
    """This happens to a reader that was stopped for longer than the retention of member messages."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for _ in range(3):
        producer.produce(topics_of.member_messages, b"old", partition=0)
    producer.flush(WITHIN_S)
    admin = AdminClient({"bootstrap.servers": connection.bootstrap_servers})
    for done in admin.delete_records([TopicPartition(topics_of.member_messages, 0, 3)]).values():
        done.result(WITHIN_S)
    reader = Reader(connection, topics_of.member_messages)
    try:
        reader.follow({0: 0})
        wait_until(lambda: not list(reader.read(0.1)) and reader.ends.get(0) == 3, "the reader is at the end")
        producer.produce(topics_of.member_messages, b"new", partition=0)
        producer.flush(WITHIN_S)
        found: list[bytes | None] = []

        def finds_some() -> bool:
            found.extend(each.value for each in reader.read(0.1))
            return bool(found)

        wait_until(finds_some, "the new record is read")
        assert (found, end_of(connection, topics_of.member_messages, 0)) == ([b"new"], 4)
    finally:
        reader.close()


def test_what_is_missing_or_wrong_is_reported(connection: KafkaConnection) -> None:
    """Missing topics and invalid member ids are reported."""
    nowhere = CoordinatorTopics("not-made")
    with pytest.raises(TopicNotFoundError, match="creates the coordinator's topics"):
        Coordinator(connection, nowhere).run()
    with pytest.raises(ConfigurationError, match="member 'a/b' of group 'etl' cannot register"):
        CoordinatedMember(connection, "etl", "a/b", start=print, stop=print)
