"""The coordination log over a real Kafka: the contract of every log, and failures that only Kafka has."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Append, PositionLostError
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.errors import ClaimLostError, CoordinationLogChangedError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings
from tests.conditions import WITHIN_S, wait_until
from tests.fast.test_log_port import House, LogPort, read, values
from tests.real.conftest import MakeTopic
from tests.stderr_capture import lines_about

SETTINGS = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
NUMBERS = count()


def offset_of_end(topics: Topics, topic: str, partition: int, *, committed_only: bool) -> int:
    """Return the end of a partition."""
    return topics.offsets(topic, [partition], committed_only=committed_only)[partition].end


class KafkaHouse:
    """A topic of a real cluster."""

    def __init__(self, connection: KafkaConnection, topics: Topics, topic: str) -> None:
        """Use an existing topic."""
        self.topic = topic
        self.logs: list[KafkaLog] = []
        self._connection = connection
        self._topics = topics

    def open(self) -> KafkaLog:
        """Open a log."""
        log = KafkaLog(self._connection, self.topic, heartbeat_interval_ms=60_000)
        self.logs.append(log)
        return log

    def say(self, partition: int, value: bytes | None) -> int:
        """Append with a separate producer."""
        offsets: list[int] = []
        producer = Producer({"bootstrap.servers": self._connection.bootstrap_servers})
        producer.produce(
            self.topic, value, partition=partition, on_delivery=lambda _, message: offsets.append(message.offset() or 0)
        )
        assert producer.flush(WITHIN_S) == 0
        return offsets[0]

    def pass_over(self, partition: int) -> None:
        """Commit a transaction, so that a marker follows its record, and wait until the marker is written."""
        name = f"marks-{next(NUMBERS)}"
        producer = Producer({"bootstrap.servers": self._connection.bootstrap_servers, "transactional.id": name})
        producer.init_transactions(WITHIN_S)
        producer.begin_transaction()
        producer.produce(self.topic, b"marker", partition=partition)
        producer.commit_transaction(WITHIN_S)

        def is_there() -> bool:
            end = offset_of_end(self._topics, self.topic, partition, committed_only=False)
            return offset_of_end(self._topics, self.topic, partition, committed_only=True) == end

        wait_until(is_there, "the marker is there")

    def retain_from(self, partition: int, start: int) -> None:
        """Delete records."""
        admin = AdminClient({"bootstrap.servers": self._connection.bootstrap_servers})
        for future in admin.delete_records([TopicPartition(self.topic, partition, start)]).values():
            future.result(WITHIN_S)

    def recreate(self, partitions: int) -> None:
        """Delete and re-create the topic."""
        self._topics.delete(self.topic)
        assert self._topics.create(self.topic, partitions, 1, SETTINGS)

    def delete(self) -> None:
        """Delete the topic."""
        self._topics.delete(self.topic)


@pytest.fixture
def house(connection: KafkaConnection, topics: Topics, topic: MakeTopic) -> Iterator[KafkaHouse]:
    """A topic of two partitions. Its logs are closed afterwards."""
    house = KafkaHouse(connection, topics, topic(2, SETTINGS))
    yield house
    for log in house.logs:
        log.close()


class TestKafkaLog(LogPort):
    """The contract of every log."""

    def test_offsets_without_records_do_not_hold_a_reader_up(self, house: House) -> None:
        """The reader skips a transaction marker at the log's end, and reads the record of the transaction."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        house.pass_over(0)
        end = log.bounds([0])[0].end
        assert end == 3

        assert values(read(log, {0: end}), 0) == [b"a", b"marker"]
        house.say(0, b"b")
        assert values(read(log, {0: end + 1}), 0) == [b"b"]


def test_a_record_that_is_too_large_is_not_acknowledged(house: KafkaHouse) -> None:
    """The result of a rejected record has the reason and no offset. Later records are written."""
    log = house.open()

    (large,) = log.append([Append(0, b"x" * 1_200_000)])
    (small,) = log.append([Append(0, b"x")])

    assert large.offset is None
    assert "large" in (large.error or "").lower()
    assert small.offset == 0


def test_a_reader_opens_no_producer(house: KafkaHouse) -> None:
    """A reader needs no right to write and no resources of a producer."""
    log = house.open()
    log.follow({0: 0, 1: 0})
    log.bounds([0, 1])
    log.identity()
    read(log, {0: 0})

    assert log._producer is None


def test_an_interrupted_append_leaves_nothing_to_be_sent(house: KafkaHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of an interrupted append are purged, so that none is sent later."""
    log = house.open()
    log.append([Append(0, b"a")])

    class InterruptError(BaseException):
        """An exception that can occur at any time."""

    def interrupt(_: object) -> None:
        raise InterruptError

    with monkeypatch.context() as interrupted:
        interrupted.setattr(log, "_wait_for", interrupt)
        with pytest.raises(InterruptError):
            log.append([Append(0, b"b")])

    assert log._producer is None, "the producer of the interrupted append is still used"
    assert log.append([Append(0, b"c")])[0].offset is not None


def test_records_behind_a_purge_are_not_purged(house: KafkaHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a purge, with or without pending records, all records of the next append are acknowledged."""
    log = house.open()
    log.append([Append(0, b"a")])
    for number in range(50):
        if number % 2:
            with monkeypatch.context() as impatient:
                impatient.setattr(log, "_wait_for", lambda _: None)
                log.append([Append(1, b"not waited for")] * 500)
        log.purge()

        acks = log.append([Append(0, b"b")] * 500)

        assert [ack.error for ack in acks if ack.offset is None] == []


def test_batch_after_batch_claims_what_the_one_before_released(house: KafkaHouse) -> None:
    """A member that releases and at once claims again under a new instance id wins everything."""
    rationalizer = Rationalizer(house.open(), topics=["orders"])
    for _ in range(20):
        claimer = Claimer(rationalizer, Member("etl", "c", new_instance_id("run")), "orders", GroupSettings(60_000))
        claimer.ensure_group_settings()
        assert len(claimer.claim(range(300))) == 300
        claimer.release()


def test_a_long_log_is_read_in_large_chunks(house: KafkaHouse) -> None:
    """A backlog is read in chunks of thousands of records."""
    log = house.open()
    log.append([Append(0, b"x" * 80)] * 20_000)
    reader = house.open()
    reader.follow({0: 0})

    sizes = [len(chunk.records) for chunk in reader.read_until({0: 20_000}, WITHIN_S)]

    assert sum(sizes) == 20_000
    assert max(sizes) >= 1_000


def test_a_log_on_a_broker_that_is_down_fails_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the broker dies, calls end in time with an error and stderr is not flooded.

    With the broker back, they work again.
    """
    with running_kafka(tmp_path / "kafka") as cluster:
        connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers, timeout_s=3)
        with Topics(replace(connection, timeout_s=WITHIN_S)) as topics:
            topics.create("log", 1, 1, SETTINGS)
        log = KafkaLog(connection, "log", heartbeat_interval_ms=4_000)
        log.follow({0: 0})

        def end_after_append() -> int | None:
            offset = log.append([Append(0, b"c")])[0].offset
            return None if offset is None else offset + 1

        end = wait_until(end_after_append, "the broker takes a record", ignored=UnavailableError)
        cluster.kill(1)
        began = time.monotonic()

        with caplog.at_level(logging.WARNING):
            (ack,) = log.append([Append(0, b"b")])
            assert ack.offset is None
            assert ack.error
            with pytest.raises(UnavailableError):
                log.identity()
            with pytest.raises(UnavailableError):
                read(log, {0: end + 2}, timeout_s=2)

        assert time.monotonic() - began < 150  # half of the client library's own timeout for a record
        assert len(caplog.records) < 5
        cluster.start(1)

        end = wait_until(end_after_append, "the broker takes a record again", ignored=UnavailableError)
        assert values(read(log, {0: end}, timeout_s=WITHIN_S), 0)[-1] == b"c"
        log.close()
    assert len(lines_about(connection.bootstrap_servers, capfd.readouterr().err)) < 5


def member(log: KafkaLog, interval_ms: int = 60_000, topic: str = "orders") -> Claimer:
    """Open a member."""
    rationalizer = Rationalizer(log, topics=[topic])
    return Claimer(rationalizer, Member("etl", "c", new_instance_id("run")), topic, GroupSettings(interval_ms))


def beat_until_it_ends(claimer: Claimer) -> None:
    """Send heartbeats as `Heartbeats` does, which retries if the broker is briefly unavailable."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        with suppress(UnavailableError, TopicNotFoundError):
            claimer.beat()


@pytest.mark.parametrize("partitions", [2, 3])
def test_a_log_re_created_ends_the_claims(house: KafkaHouse, partitions: int) -> None:
    """If the coordination topic is deleted and re-created, a member's claims end by its next heartbeat."""
    claimer = member(house.open())
    claimer.ensure_group_settings()
    claimer.claim([0, 1])
    claimer.beat({0: 0, 1: 0})

    house.recreate(partitions)

    with pytest.raises(CoordinationLogChangedError, match=r"re-created|acknowledged"):
        beat_until_it_ends(claimer)
    with pytest.raises(ClaimLostError):
        claimer.check([0])


def test_a_reader_beyond_the_logs_end_is_not_moved(house: KafkaHouse) -> None:
    """A position that the log does not have raises a specific error. The reader never jumps to another offset."""
    log = house.open()
    house.say(0, b"a")
    log.follow({0: 0, 1: 5})

    with pytest.raises(PositionLostError) as lost:
        read(log, {0: 1, 1: 6})
    assert lost.value.partition == 1


def test_threads_share_a_rationalizer(house: KafkaHouse) -> None:
    """If several threads catch up at once, every record is read once."""
    log = house.open()
    rationalizer = Rationalizer(log)
    log.append([Append(0, b"anything")] * 1_000)
    errors: list[Exception] = []

    def catch_up() -> None:
        try:
            for _ in range(20):
                rationalizer.catch_up()
        except Exception as error:  # noqa: BLE001 - the test reports it
            errors.append(error)

    threads = [threading.Thread(target=catch_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert rationalizer.records_read == 1_000


def test_the_world_is_that_of_the_log(house: KafkaHouse) -> None:
    """A member's world state equals that of another reader of the same records."""
    claimer = member(house.open())
    claimer.ensure_group_settings()
    claimer.claim(range(50))
    claimer.beat(dict.fromkeys(range(50), 3))
    claimer.plan(dict.fromkeys(range(50), 9))
    claimer.commit(dict.fromkeys(range(25), 9))
    claimer.release(range(10))

    world = Rationalizer(house.open()).catch_up()

    followed = claimer.rationalizer.world.partitions
    assert {number: world.partitions[number].groups for number in followed} == {
        number: part.groups for number, part in followed.items()
    }
