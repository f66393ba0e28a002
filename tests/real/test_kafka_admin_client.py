"""The admin client: topic and group data of a real broker."""

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from marshal_dagster.devkafka import running_kafka
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import ClientLog
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.offsets import AT_ONCE
from marshal_dagster.protocol.state import OffsetBounds
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic


@pytest.fixture
def transactions(kafka: str) -> Iterator[Producer]:
    """A producer that writes in transactions."""
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": "test-kafka-topics", "linger.ms": 0})
    producer.init_transactions(WITHIN_S)
    yield producer
    producer.flush(WITHIN_S)


def fill(kafka: str, topic: str, counts: dict[int, int]) -> None:
    """Write the given number of records to each partition."""
    producer = Producer({"bootstrap.servers": kafka})
    for partition, count in counts.items():
        for number in range(count):
            producer.produce(topic, str(number), partition=partition)
    assert producer.flush(WITHIN_S) == 0


def test_a_topic_is_described_by_id_and_partitions(topics: Topics, topic: MakeTopic) -> None:
    """The description has the partitions, the replicas and a URL-safe id of 22 characters."""
    name = topic(3)
    found = topics.describe(name)
    assert found.name == name
    assert found.partitions == topics.partition_numbers(name) == (0, 1, 2)
    assert found.replication == 1
    assert len(found.topic_id) == 22
    assert len(base64.b64decode(found.topic_id + "==", altchars=b"-_", validate=True)) == 16


def test_a_topic_id_is_url_safe_whatever_its_bits(topics: Topics, topic: MakeTopic) -> None:
    """Ids that Kafka writes with a slash or a plus are returned with `_` and `-`."""
    names = [topic() for _ in range(12)]
    seen = {topics.describe(name).topic_id for name in names}
    assert len(seen) == len(names)
    assert not any(set(each) & set("+/=") for each in seen)


def test_a_topic_re_created_has_another_id(kafka: str, topics: Topics, topic: MakeTopic) -> None:
    """After deletion and re-creation of a topic its id differs, and its offsets start at 0."""
    name = topic(2)
    fill(kafka, name, {0: 1})
    before = topics.describe(name)
    assert topics.offsets(name, [0, 1])[0] == OffsetBounds(0, 1)
    topics.delete(name)
    assert topics.create(name, 2, 1)
    assert topics.describe(name).topic_id != before.topic_id
    assert topics.offsets(name, [0, 1]) == {0: OffsetBounds(0, 0), 1: OffsetBounds(0, 0)}


def test_a_topic_that_is_missing_is_reported(connection: KafkaConnection) -> None:
    """Every request about a missing topic raises long before its timeout, with the topic's name."""
    with Topics(replace(connection, timeout_s=WITHIN_S)) as topics:
        start = time.monotonic()
        for question in (
            lambda: topics.describe("no-such-topic"),
            lambda: topics.partition_numbers("no-such-topic"),
            lambda: topics.settings("no-such-topic"),
            lambda: topics.offsets("no-such-topic", [0]),
            lambda: topics.group_offsets("g", "no-such-topic"),
            lambda: topics.delete("no-such-topic"),
        ):
            with pytest.raises(TopicNotFoundError, match=r"'no-such-topic'.*there is no such topic"):
                question()
        assert time.monotonic() - start < WITHIN_S


def test_a_misspelt_topic_is_reported_with_the_nearest_names_first(topics: Topics, topic: MakeTopic) -> None:
    """The error lists the most similar topic names first."""
    name = topic(1)
    with pytest.raises(TopicNotFoundError, match=f"existing topics, nearest names first: '{name}'"):
        topics.describe(f"{name[:-1]}")


def test_a_partition_that_is_missing_is_reported(topics: Topics, topic: MakeTopic) -> None:
    """Missing partitions are named in the error, also if others of the request exist."""
    name = topic(2)
    for wanted in ([2, 7], [0, 1, 2, 7]):
        with pytest.raises(TopicNotFoundError, match=r"has 2 partitions, and no partition (2, )?7"):
            topics.offsets(name, wanted)


def test_nothing_is_made_by_asking_for_it(tmp_path: Path) -> None:
    """No request creates a topic, although the brokers create topics on request by default."""
    with (
        running_kafka(tmp_path, settings={"auto.create.topics.enable": "true"}) as cluster,
        Topics(KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)) as topics,
    ):
        asks: list[Callable[[str], object]] = [
            topics.describe,
            topics.settings,
            lambda name: topics.offsets(name, [0]),
            lambda name: topics.offsets_at(name, [0], 1),
            lambda name: topics.offsets(name, range(1_000)),
        ]
        for number, ask in enumerate(asks):
            with pytest.raises(TopicNotFoundError):
                ask(f"typo-{number}")
        topics.create("later", 1, 1)  # a topic that a request has created would be listed before this one
        wait_until(lambda: "later" in topics.partition_counts(), "the topic is listed")
        assert topics.partition_counts() == {"later": 1}


def test_offsets_are_the_first_and_the_next(kafka: str, topics: Topics, topic: MakeTopic) -> None:
    """An empty partition starts and ends at 0. One with deleted records starts at the first record that is left."""
    name = topic(3)
    fill(kafka, name, {1: 5, 2: 9})
    admin = AdminClient({"bootstrap.servers": kafka})
    for future in admin.delete_records([TopicPartition(name, 2, 4)]).values():
        future.result(WITHIN_S)
    expected = {0: OffsetBounds(0, 0), 1: OffsetBounds(0, 5), 2: OffsetBounds(4, 9)}
    assert topics.offsets(name, [2, 0, 1, 1]) == expected
    assert topics.offsets(name, [2]) == {2: expected[2]}
    assert topics.offsets(name, []) == {}


def test_many_offsets_are_requested_in_more_than_one_request(
    kafka: str, topics: Topics, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the requests are merged."""
    name = topic(3)
    fill(kafka, name, {0: 1, 2: 2})
    monkeypatch.setattr("marshal_dagster.kafka.offsets.AT_ONCE", 2)
    assert topics.offsets(name, [0, 1, 2]) == {0: OffsetBounds(0, 1), 1: OffsetBounds(0, 0), 2: OffsetBounds(0, 2)}
    assert topics.offsets_at(name, [0, 1, 2], 2) == {0: 0, 2: 0}


def test_the_committed_end_stays_before_an_open_transaction(
    topics: Topics, topic: MakeTopic, transactions: Producer
) -> None:
    """By default the end is the last stable offset; with `committed_only=False` it is the next record's offset."""
    name = topic()
    transactions.begin_transaction()
    transactions.produce(name, "committed")
    transactions.commit_transaction(WITHIN_S)
    transactions.begin_transaction()
    transactions.produce(name, "open")
    assert transactions.flush(WITHIN_S) == 0
    wait_until(lambda: topics.offsets(name, [0]) == {0: OffsetBounds(0, 2)}, "the committed offset is seen")
    assert topics.offsets(name, [0], committed_only=False) == {0: OffsetBounds(0, 3)}
    transactions.abort_transaction(WITHIN_S)
    wait_until(lambda: topics.offsets(name, [0]) == {0: OffsetBounds(0, 4)}, "the committed offset is seen")


def test_a_thousand_partitions_are_looked_up_together(
    connection: KafkaConnection, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets of 1,000 partitions come together, and not with one request for each."""
    sizes: list[int] = []

    class Counting:
        """A client that records how many partitions each request has."""

        def __init__(self, client: Consumer) -> None:
            self._client = client

        def offsets_for_times(self, places: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
            sizes.append(len(places))
            return self._client.offsets_for_times(places, timeout_s)

        def __getattr__(self, name: str) -> object:
            return getattr(self._client, name)

    def consumer(*positional: Any, **named: Any) -> tuple[Any, ClientLog]:  # noqa: ANN401 - those of the library
        client, log = clients.consumer(*positional, **named)
        return Counting(client), log

    monkeypatch.setattr("marshal_dagster.kafka.offsets.consumer", consumer)
    with Topics(connection) as topics:
        found = topics.offsets(topic(1000), range(1000))
    assert found == dict.fromkeys(range(1000), OffsetBounds(0, 0))
    assert set(sizes) == {AT_ONCE, 1000 % AT_ONCE}  # while leaders are elected, the look-up is repeated


def test_settings_show_the_brokers_defaults_too(topics: Topics, topic: MakeTopic) -> None:
    """The result has the topic's own settings and the broker's defaults."""
    settings = topics.settings(topic(1, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}))
    expected = {
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1",
        "unclean.leader.election.enable": "false",
        "cleanup.policy": "delete",
        "min.insync.replicas": "1",
        "retention.bytes": "-1",
    }
    assert expected.items() <= settings.items()


def test_a_topic_that_exists_is_left_alone(topics: Topics, topic: MakeTopic) -> None:
    """Creating an existing topic returns False and changes nothing, whatever the arguments."""
    name = topic(2)
    before = topics.describe(name)
    assert topics.create(name, 5, 1, {"retention.ms": "1"}) is False
    assert topics.describe(name) == before
    assert topics.settings(name)["retention.ms"] != "1"


@pytest.mark.parametrize(
    ("name", "numbers", "settings", "words"),
    [
        ("not/a/name", (1, 1), {}, "'not/a/name' contains"),
        ("no-partitions", (0, 1), {}, "partitions"),
        ("too-many-replicas", (1, 3), {}, "replication factor"),
        ("unknown-setting", (1, 1), {"no.such": "1"}, "no.such"),
        ("wrong-value", (1, 1), {"retention.ms": "soon"}, "retention.ms"),
    ],
)
def test_a_topic_that_cannot_be_made_is_reported(
    topics: Topics, name: str, numbers: tuple[int, int], settings: dict[str, str], words: str
) -> None:
    """The broker's reason is in the message."""
    with pytest.raises(ConfigurationError) as caught:
        topics.create(name, *numbers, settings)
    assert words in str(caught.value)


def test_a_groups_offsets_are_set_and_read_without_joining_it(kafka: str, topics: Topics, topic: MakeTopic) -> None:
    """Committed offsets are read back by this client and by a plain consumer."""
    name, other = topic(3), topic(1)
    group = f"group-of-{name}"
    assert topics.group_offsets(group, name) == {}
    assert topics.commit_group_offsets(group, name, {0: 5, 2: 7}) is None
    assert topics.commit_group_offsets(group, other, {0: 1}) is None
    assert topics.commit_group_offsets(group, name, {0: 4}) is None
    assert topics.commit_group_offsets(group, name, {}) is None
    assert topics.group_offsets(group, name) == {0: 4, 2: 7}
    assert topics.group_offsets(group, other) == {0: 1}
    assert topics.group_offsets("another-group", name) == {}
    reader = Consumer({"bootstrap.servers": kafka, "group.id": group})
    held = reader.committed([TopicPartition(name, 2)], timeout=WITHIN_S)
    reader.close()
    assert held[0].offset == 7


def test_offsets_of_a_group_with_live_consumers_are_left_alone(kafka: str, topics: Topics, topic: MakeTopic) -> None:
    """If the group has active Kafka consumers, the commit reports that and sets nothing."""
    name = topic()
    group = f"group-of-{name}"
    reader = Consumer({"bootstrap.servers": kafka, "group.id": group, "enable.auto.commit": False})
    reader.subscribe([name])

    def is_assigned() -> bool:
        reader.poll(0.1)
        return bool(reader.assignment())

    wait_until(is_assigned, "the consumer has partitions")
    text = topics.commit_group_offsets(group, name, {0: 1})
    assert text is not None
    assert "that group has active Kafka consumers" in text
    assert topics.group_offsets(group, name) == {}
    reader.close()
    wait_until(lambda: topics.commit_group_offsets(group, name, {0: 1}) is None, "the group has no consumers")
    assert topics.group_offsets(group, name) == {0: 1}


def test_offsets_of_a_topic_that_is_missing_are_not_set(topics: Topics) -> None:
    """A best-effort commit returns the reason as text."""
    text = topics.commit_group_offsets("g", "no-such-topic", {0: 1})
    assert text is not None
    assert text.startswith("the offsets of group 'g' in Kafka were not updated (only lag tools read them): ")
    assert "there is no such topic" in text


def test_brokers_are_counted(topics: Topics) -> None:
    """The suite's cluster has one broker."""
    assert topics.broker_count() == 1


def test_topics_are_shared_by_threads(connection: KafkaConnection, topic: MakeTopic) -> None:
    """Concurrent requests of several threads, also about several groups, get their own results."""
    names = [topic(number + 1) for number in range(4)]

    def ask(number: int) -> tuple[int, dict[int, int]]:
        name, group = names[number % 4], f"group-{number % 3}-of-{names[0]}"
        offset = 100 + number % 4
        assert shared.commit_group_offsets(group, name, {0: offset}) is None
        assert shared.group_offsets(group, name) == {0: offset}
        return len(shared.offsets(name, shared.describe(name).partitions)), shared.group_offsets(group, name)

    with Topics(connection) as shared, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(48)))
    assert answers == [(number % 4 + 1, {0: 100 + number % 4}) for number in range(48)]


def test_offsets_are_looked_up_by_time(kafka: str, topics: Topics, topic: MakeTopic, transactions: Producer) -> None:
    """The result is the first record at this time or later, if there is one and no open transaction hides it."""
    name = topic(3)
    producer = Producer({"bootstrap.servers": kafka})
    for at_ms in (1_000, 2_000, 2_000, 3_000):
        producer.produce(name, "x", partition=0, timestamp=at_ms)
    producer.produce(name, "x", partition=1, timestamp=2_500)
    assert producer.flush(WITHIN_S) == 0
    assert topics.offsets_at(name, [0, 1, 2], 1) == {0: 0, 1: 0}
    assert topics.offsets_at(name, [0, 1, 2], 2_000) == {0: 1, 1: 0}
    assert topics.offsets_at(name, [0, 1], 2_501) == {0: 3}
    assert topics.offsets_at(name, [0, 1], 3_001) == {}
    assert topics.offsets_at(name, [], 0) == {}
    transactions.begin_transaction()
    transactions.produce(name, "x", partition=2, timestamp=5_000)
    transactions.flush(WITHIN_S)
    assert topics.offsets_at(name, [2], 4_000) == {}
    transactions.commit_transaction(WITHIN_S)
    wait_until(lambda: topics.offsets_at(name, [2], 4_000) == {2: 0}, "the offset at the time is seen")
    with pytest.raises(TopicNotFoundError, match="no-such-topic"):
        topics.offsets_at("no-such-topic", [0], 0)
