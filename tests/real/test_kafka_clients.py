"""The Kafka clients on a real broker: connecting, reading, writing, and what they never do."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.stderr_capture import lines_about

END = KafkaError._PARTITION_EOF


@pytest.fixture
def producer(connection: KafkaConnection) -> Iterator[Producer]:
    """A producer that has reached the broker."""
    client, log = clients.producer(connection, delivery_timeout_ms=5000, client_id="test")
    clients.reach(client, log, timeout_s=WITHIN_S)
    yield client
    clients.close_client(client, log)


@pytest.fixture
def consumer(connection: KafkaConnection) -> Iterator[Consumer]:
    """A consumer that has reached the broker."""
    client, log = clients.consumer(connection, client_id="test")
    clients.reach(client, log, timeout_s=WITHIN_S)
    yield client
    client.close()


def append(producer: Producer, topic: str, values: list[bytes]) -> list[Message]:
    """Write to partition 0 and return the acknowledgements."""
    acknowledged: list[Message] = []

    def note(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        acknowledged.append(message)

    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=note)
    assert producer.flush(WITHIN_S) == 0
    return acknowledged


def read(consumer: Consumer) -> list[Message]:
    """Read up to the end of the partition, or to another error."""
    found: list[Message] = []

    def is_at_end() -> bool:
        found.extend(consumer.consume(1000, timeout=0.5))
        return bool(found) and found[-1].error() is not None

    wait_until(is_at_end, lambda: f"the end shows: {found}")
    return found


def code(message: Message) -> int:
    """Return the error code of a message that is an error."""
    error = message.error()
    assert error is not None
    return int(error.code())


@pytest.mark.parametrize("named", [True, False])
def test_each_kind_of_client_reaches_the_broker(
    connection: KafkaConnection, topic: MakeTopic, capfd: pytest.CaptureFixture[str], *, named: bool
) -> None:
    """Clients reach the broker, with and without a topic's name, and print nothing to stderr."""
    name = topic() if named else None
    for client, log in (
        clients.producer(connection, delivery_timeout_ms=1000, client_id="p"),
        clients.consumer(connection, client_id="c"),
        clients.admin(connection, client_id="a"),
    ):
        clients.reach(client, log, timeout_s=WITHIN_S, topic=name)
        assert log.reason is None
        clients.close_client(client, log)
    clients.check_reachable(connection)
    printed = capfd.readouterr()
    assert (printed.out, lines_about(connection.bootstrap_servers, printed.err)) == ("", [])


def test_one_server_of_the_list_is_enough(kafka: str) -> None:
    """If one server is down, a client reaches the cluster by another."""
    clients.check_reachable(KafkaConnection(bootstrap_servers=f"127.0.0.1:1,{kafka}", timeout_s=WITHIN_S))


def test_reaching_makes_no_topic(connection: KafkaConnection, topics: Topics) -> None:
    """Connecting with the name of a missing topic does not create the topic."""
    for client, log in (
        clients.producer(connection, delivery_timeout_ms=1000, client_id="p"),
        clients.consumer(connection, client_id="c"),
    ):
        clients.reach(client, log, timeout_s=WITHIN_S, topic="never-made")
        clients.close_client(client, log)
    with pytest.raises(Exception, match="there is no such topic"):
        topics.describe("never-made")


def test_an_acknowledgement_names_offset_and_log_time(producer: Producer, topic: MakeTopic) -> None:
    """With LogAppendTime each acknowledgement has the record's offset and the broker's timestamp."""
    name = topic(1, {"message.timestamp.type": "LogAppendTime"})
    before_ms = time.time() * 1000
    messages = append(producer, name, [b"a", b"b"])
    assert [each.offset() for each in messages] == [0, 1]
    for message in messages:
        kind, at_ms = message.timestamp()
        assert kind == 2
        assert before_ms - 1000 <= at_ms <= time.time() * 1000 + 1000


def test_ten_thousand_records_are_taken_at_once(producer: Producer, consumer: Consumer, topic: MakeTopic) -> None:
    """The queue takes the records without waiting, and they are read back in order and unchanged."""
    name = topic()
    values = [b"%d" % number for number in range(12_000)]
    assert len(append(producer, name, values)) == len(values)
    consumer.assign([TopicPartition(name, 0, 0)])
    found = read(consumer)
    assert [each.value() for each in found[:-1]] == values
    assert code(found[-1]) == END


def test_a_consumer_reads_from_where_it_is_reported(producer: Producer, consumer: Consumer, topic: MakeTopic) -> None:
    """Reading starts at the given offset and reports the current end, also if there is nothing to read."""
    name = topic()
    append(producer, name, [b"a", b"b", b"c"])
    consumer.assign([TopicPartition(name, 0, 2)])
    found = read(consumer)
    assert [each.value() for each in found[:-1]] == [b"c"]
    assert (code(found[-1]), found[-1].offset()) == (END, 3)
    consumer.assign([TopicPartition(name, 0, 3)])
    only = read(consumer)
    assert (code(only[0]), only[0].offset()) == (END, 3)


def test_an_offset_outside_the_log_is_an_error_not_a_jump(
    producer: Producer, consumer: Consumer, topic: MakeTopic
) -> None:
    """A reader with an invalid offset gets an error, and no record from another offset."""
    name = topic()
    append(producer, name, [b"a"])
    consumer.assign([TopicPartition(name, 0, 99)])
    found = read(consumer)
    assert len(found) == 1
    assert code(found[0]) in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


@pytest.mark.parametrize(
    ("committed_only", "expected"),
    [
        (True, [b"before", b"after"]),
        (False, [b"before", b"aborted", b"after"]),
    ],
)
def test_isolation_decides_what_shows_of_transactions(
    connection: KafkaConnection, kafka: str, topic: MakeTopic, *, committed_only: bool, expected: list[bytes]
) -> None:
    """Only an uncommitted reader gets aborted records. Both readers skip the markers and reach the end."""
    name = topic()
    writer = Producer({"bootstrap.servers": kafka, "transactional.id": f"of-{name}", "linger.ms": 0})
    writer.init_transactions(WITHIN_S)
    for value, commits in ((b"before", True), (b"aborted", False), (b"after", True)):
        writer.begin_transaction()
        writer.produce(name, value, partition=0)
        assert writer.flush(WITHIN_S) == 0
        (writer.commit_transaction if commits else writer.abort_transaction)(WITHIN_S)
    with Topics(connection) as topics:
        wait_until(lambda: topics.offsets(name, [0])[0].end == 6, "the last marker is there")
    reader, log = clients.consumer(connection, client_id="test", committed_only=committed_only)
    reader.assign([TopicPartition(name, 0, 0)])
    found = read(reader)
    assert [each.value() for each in found[:-1]] == expected
    assert (code(found[-1]), found[-1].offset()) == (END, 6)
    clients.close_client(reader, log)


def test_a_reader_commits_nothing(
    producer: Producer, connection: KafkaConnection, topics: Topics, topic: MakeTopic
) -> None:
    """Kafka has no offset of a consumer that has read and closed."""
    name = topic()
    append(producer, name, [b"a"])
    reader, log = clients.consumer(connection, client_id="test")
    reader.assign([TopicPartition(name, 0, 0)])
    read(reader)
    clients.close_client(reader, log)
    assert topics.group_offsets(clients.READER_GROUP, name) == {}


def test_a_producer_that_reached_the_broker_sends_at_once(
    connection: KafkaConnection, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """When `reach` returns, the producer id is requested. Otherwise some first records would wait half a second.

    Without the second answer for which `reach` waits, every sixth producer has not requested its id.
    """
    name, connection = topic(), replace(connection, client_settings={"debug": "eos"})
    caplog.set_level(logging.DEBUG, clients.__name__)
    is_requested: list[bool] = []
    for _ in range(40):
        caplog.clear()
        client, log = clients.producer(connection, delivery_timeout_ms=5000, client_id="test")
        clients.reach(client, log, timeout_s=WITHIN_S, topic=name)
        client.poll(0)
        is_requested.append("Acquiring ProducerId" in caplog.text)
        clients.close_client(client, log)
    assert is_requested.count(False) <= 1
