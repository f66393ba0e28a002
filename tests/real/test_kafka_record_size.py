"""The size of a topic's records, estimated by a sample of unread records."""

import pytest
from confluent_kafka import Producer

from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.record_size import FEW, RECORDS, bytes_per_offset
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic


def test_the_largest_mean_of_what_is_unread_counts(
    connection: KafkaConnection, topics: Topics, topic: MakeTopic
) -> None:
    """Keys, values and headers count. Markers, aborted messages and records that are already read do not."""
    name, group = topic(3), "sampled"
    plain = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(10):
        plain.produce(name, key=b"k" * 10, value=b"v" * 80, headers=[("h" * 4, b"x" * 6)], partition=0)
        plain.produce(name, value=b"v" * (1_000 if number < 5 else 50), partition=1)
    assert plain.flush(WITHIN_S) == 0
    assert bytes_per_offset(topics, connection, group, name) == (5 * 1_000 + 5 * 50) / 10
    assert topics.commit_group_offsets(group, name, {1: 5}) is None
    assert bytes_per_offset(topics, connection, group, name) == 100
    assert topics.commit_group_offsets(group, name, {0: 10, 1: 10}) is None
    assert bytes_per_offset(topics, connection, group, name) == (5 * 1_000 + 5 * 50) / 10
    within = Producer({"bootstrap.servers": connection.bootstrap_servers, "transactional.id": name})
    within.init_transactions(WITHIN_S)
    for end in (within.abort_transaction, within.commit_transaction):
        within.begin_transaction()
        for _ in range(3):
            within.produce(name, value=b"v" * 80, partition=2)
        assert within.flush(WITHIN_S) == 0
        end(30)
    # The broker writes markers after it has answered that the transaction ended.
    wait_until(lambda: topics.offsets(name, [2])[2].end == 2 * (3 + 1), "all messages and markers are there")
    assert bytes_per_offset(topics, connection, group, name) == 80


def test_no_more_than_a_sample_is_read(connection: KafkaConnection, topics: Topics, topic: MakeTopic) -> None:
    """The sample has the first and the last unread records."""
    name = topic(1)
    plain = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(3 * RECORDS):
        plain.produce(name, value=b"v" * {0: 10, 1: 1_000, 2: 30}[number // RECORDS])
    assert plain.flush(WITHIN_S) == 0
    assert bytes_per_offset(topics, connection, "sampled", name) == 30


def test_offsets_without_records_make_batches_smaller_and_never_larger(
    connection: KafkaConnection, topics: Topics, topic: MakeTopic
) -> None:
    """A mean over offsets would be 9 bytes instead of 100 because of the gap, and batches eleven times too large."""
    name = topic(1)
    within = Producer({"bootstrap.servers": connection.bootstrap_servers, "transactional.id": name})
    within.init_transactions(WITHIN_S)
    for count, end in ((100, within.abort_transaction), (10, within.commit_transaction)):
        within.begin_transaction()
        for _ in range(count):
            within.produce(name, value=b"v" * 100)
        assert within.flush(WITHIN_S) == 0
        end(30)
    wait_until(lambda: topics.offsets(name, [0])[0].end == 100 + 1 + 10 + 1, "all messages and markers are there")
    assert bytes_per_offset(topics, connection, "sampled", name) == 100


def test_where_no_record_is_unread_the_last_ones_count(
    connection: KafkaConnection, topics: Topics, topic: MakeTopic
) -> None:
    """If all records are read, or all unread ones were aborted, the last records are sampled to limit later batches."""
    name, group = topic(2), "sampled"
    assert bytes_per_offset(topics, connection, group, name) is None
    plain = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(2 * FEW):
        plain.produce(name, value=b"v" * (10 if number < FEW else 1_000), partition=0)
    assert plain.flush(WITHIN_S) == 0
    assert topics.commit_group_offsets(group, name, {0: 2 * FEW}) is None
    assert bytes_per_offset(topics, connection, group, name) == 10
    within = Producer({"bootstrap.servers": connection.bootstrap_servers, "transactional.id": name})
    within.init_transactions(WITHIN_S)
    within.begin_transaction()
    for _ in range(50):
        within.produce(name, value=b"v" * 30_000, partition=1)
    assert within.flush(WITHIN_S) == 0
    within.abort_transaction(WITHIN_S)
    assert bytes_per_offset(topics, connection, group, name) == 10


def test_a_topic_that_is_not_there_is_reported(connection: KafkaConnection, topics: Topics) -> None:
    """A missing topic is an error, as everywhere."""
    with pytest.raises(TopicNotFoundError):
        bytes_per_offset(topics, connection, "sampled", "none-such")
