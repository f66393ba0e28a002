"""Reading exact offset ranges, whatever lies between the messages in the log."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

import psutil
import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import functions as f

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.reader import offsets_read, read_ranges, read_schema, run_once
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = dict[int, list[int]]
KEPT_S = 5
"""A consumer is idle for longer before Spark releases it."""


def options(kafka: str) -> dict[str, str]:
    """Return the connection for the connector."""
    return {"kafka.bootstrap.servers": kafka}


def offsets_of(frame: "DataFrame") -> Offsets:
    """Return the offsets in a frame, by partition."""
    found: Offsets = {}
    for row in sorted(frame.select("partition", "offset").collect()):
        found.setdefault(row["partition"], []).append(row["offset"])
    return found


def all_ranges(end: int) -> list[tuple[int, int]]:
    """Return every non-empty [a, b) up to `end`."""
    return list(combinations(range(end + 1), 2))


def within(offsets: Sequence[int], bounds: tuple[int, int]) -> list[int]:
    """Return the offsets in [start, end)."""
    return [offset for offset in offsets if bounds[0] <= offset < bounds[1]]


def expected(visible: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Offsets:
    """Return the offsets read if each partition has the messages `visible`, and partition i is read at range i."""
    found = {partition: within(visible, bounds) for partition, bounds in enumerate(ranges)}
    return {partition: offsets for partition, offsets in found.items() if offsets}


class Writer:
    """A writer of the same messages to each partition of a topic, with and without transactions."""

    def __init__(self, kafka: str, topic: str, partitions: int) -> None:
        self.kafka, self.topic, self.partitions = kafka, topic, partitions
        self.reported: Offsets = {}
        self._plain = Producer({"bootstrap.servers": kafka, "linger.ms": 5})

    @cached_property
    def _transactional(self) -> Producer:
        """The producer of transactions, whose start takes half a second."""
        producer = Producer({"bootstrap.servers": self.kafka, "transactional.id": self.topic, "linger.ms": 5})
        producer.init_transactions(WITHIN_S)
        return producer

    def _report(self, error: object, message: Message) -> None:
        assert error is None, error
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self.reported.setdefault(partition, []).append(offset)

    def _send(self, producer: Producer, count: int, *, key: str | None = None, value: str | None = "x") -> None:
        for _ in range(count):
            for partition in range(self.partitions):
                producer.produce(self.topic, key=key, value=value, partition=partition, on_delivery=self._report)
        assert producer.flush(WITHIN_S) == 0

    def plain(self, count: int, *, key: str | None = None, value: str | None = "x") -> None:
        """Write without a transaction."""
        self._send(self._plain, count, key=key, value=value)

    def committed(self, count: int) -> None:
        """Write in a transaction and commit it, so that a marker follows."""
        before = watermarks(self.kafka, self.topic, range(self.partitions))
        self._transactional.begin_transaction()
        self._send(self._transactional, count)
        self._transactional.commit_transaction(WITHIN_S)
        self._await_markers([end + count + 1 for end in before])

    def aborted(self, count: int) -> None:
        """Write in a transaction and abort it: a marker follows, and the messages must never be read."""
        known = {partition: list(offsets) for partition, offsets in self.reported.items()}
        before = watermarks(self.kafka, self.topic, range(self.partitions))
        self._transactional.begin_transaction()
        self._send(self._transactional, count)
        self._transactional.abort_transaction(WITHIN_S)
        self._await_markers([end + count + 1 for end in before])
        self.reported = known

    def _await_markers(self, ends: list[int]) -> None:
        """Wait for the markers, which the broker writes some time after it has reported the transaction's end."""
        wait_until(
            lambda: watermarks(self.kafka, self.topic, range(self.partitions)) == ends,
            "there is a marker in every partition",
        )


def test_rows_are_the_messages_at_exactly_these_offsets(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """Each column has what was sent, from the first offset to the one before the end."""
    name = topic(2, {"retention.ms": "-1"})  # the messages are years old
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(6):
        producer.produce(
            name,
            key=None if number == 3 else f"k{number}".encode(),
            value=None if number == 4 else f"v{number}".encode(),
            partition=number % 2,
            timestamp=1_700_000_000_123 + number,
            headers=[("a", b"1"), ("a", None), ("b", b"2")] if number == 2 else None,
        )
    assert producer.flush(WITHIN_S) == 0
    frame = read_ranges(spark, options(kafka), name, {0: (1, 3), 1: (1, 3)})
    assert frame.schema == read_schema()
    rows = {(row["partition"], row["offset"]): row for row in frame.collect()}
    assert sorted(rows) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [(bytes(rows[0, 1]["key"]), bytes(rows[0, 1]["value"]), rows[0, 1]["topic"])] == [(b"k2", b"v2", name)]
    assert [(h["key"], h["value"] and bytes(h["value"])) for h in rows[0, 1]["headers"]] == [
        ("a", b"1"),
        ("a", None),
        ("b", b"2"),
    ]
    assert rows[1, 1]["key"] is None
    assert rows[0, 2]["value"] is None
    assert rows[1, 2]["headers"] is None
    stamps = frame.selectExpr("partition", "offset", "unix_millis(timestamp) AS ms").collect()
    assert {(row[0], row[1]): row[2] for row in stamps}[1, 2] == 1_700_000_000_128


def test_no_range_at_all_reads_nothing_and_asks_no_broker(spark: "SparkSession") -> None:
    """Without ranges, or with only empty ones, the frame is empty, has the same columns, and needs no broker."""
    nowhere = {"kafka.bootstrap.servers": "127.0.0.1:1"}
    for ranges in ({}, {0: (7, 7), 3: (0, 0)}):
        frame = read_ranges(spark, nowhere, "t", ranges)
        assert frame.schema == read_schema()
        assert frame.count() == 0
        assert offsets_read(frame) == {}


def test_empty_ranges_beside_others_are_left_out(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """A partition with an empty range gives no rows, and the others give theirs."""
    name = topic(2)
    writer = Writer(kafka, name, 2)
    writer.plain(3)
    assert offsets_of(read_ranges(spark, options(kafka), name, {0: (3, 3), 1: (0, 2)})) == {1: [0, 1]}


def test_every_range_over_transactions(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """Ranges that start, end or lie anywhere among aborted messages and markers give exactly the committed messages."""
    ranges = all_ranges(12)
    name = topic(len(ranges))
    writer = Writer(kafka, name, len(ranges))
    writer.aborted(1)  # 0, marker 1
    writer.committed(2)  # 2 3, marker 4
    writer.plain(1)  # 5
    writer.aborted(2)  # 6 7, marker 8
    writer.committed(1)  # 9, marker 10
    visible = writer.reported[0]
    assert visible == [2, 3, 5, 9]
    ends = watermarks(kafka, name, range(len(ranges)))
    assert set(ends) == {11}
    wanted = {partition: (start, min(end, 11)) for partition, (start, end) in enumerate(ranges)}
    frame = read_ranges(spark, options(kafka), name, wanted)
    assert offsets_of(frame) == expected(visible, list(wanted.values()))
    for cut in range(1, 11):
        for part in ((0, cut), (cut, 11)):
            frame = read_ranges(spark, options(kafka), name, {0: part}, topic_id="with the same consumers")
            assert offsets_of(frame) == expected(visible, [part])


def test_every_range_over_compacted_gaps(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """Ranges that start, end or lie anywhere among compacted messages give exactly the remaining messages."""
    ranges = all_ranges(11)
    name = topic(
        len(ranges),
        {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.0",
            "max.compaction.lag.ms": "100",
            "delete.retention.ms": "86400000",
        },
    )
    writer = Writer(kafka, name, len(ranges))
    for key in ("a", "b", "a", "c", "d", "d", "d", "b", "e", "a"):
        writer.plain(1, key=key)
    end, left = 10, dict[int, list[int]]()

    def is_compacted() -> bool:
        nonlocal end
        # Only segments that are no longer written to are compacted, so a later message closes each segment.
        writer.plain(1, key="tail")
        end += 1
        left.update({partition: remaining(kafka, name, partition) for partition in (0, len(ranges) - 1)})
        return all(within(offsets, (0, 10)) == [3, 6, 7, 8, 9] for offsets in left.values())

    wait_until(is_compacted, lambda: f"compaction has left the newest messages, not {left}", pause_s=0.2)
    frame = read_ranges(spark, options(kafka), name, dict(enumerate(ranges)))
    found = offsets_of(frame)
    for partition, bounds in enumerate(ranges):
        low, high = bounds[0], min(bounds[1], 10)
        assert within(found.get(partition, []), (low, high)) == within([3, 6, 7, 8, 9], (low, high)), bounds


def test_offsets_that_retention_took_fail_the_read(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """A range before the log's start is an error, never a shorter result."""
    name = topic(1)
    Writer(kafka, name, 1).plain(10)
    admin = AdminClient({"bootstrap.servers": kafka})
    for future in admin.delete_records([TopicPartition(name, 0, 5)]).values():
        future.result(WITHIN_S)
    assert offsets_of(read_ranges(spark, options(kafka), name, {0: (5, 10)})) == {0: [5, 6, 7, 8, 9]}
    with pytest.raises(Exception, match=r"data loss|Cannot fetch|OFFSET|aged out"):
        read_ranges(spark, options(kafka), name, {0: (3, 10)}).count()


def test_splitting_a_partition_changes_no_row(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """`min_partitions` gives more tasks with the same offsets."""
    name = topic(1)
    Writer(kafka, name, 1).plain(100)
    for _ in range(3):
        frame = read_ranges(spark, options(kafka), name, {0: (7, 93)}, min_partitions=4, topic_id="once more")
        assert frame.rdd.getNumPartitions() == 4
        assert offsets_of(frame) == {0: list(range(7, 93))}


def test_first_attempts_give_all_rows(spark: "SparkSession") -> None:
    """This holds for tasks with Python, after a shuffle, and for tasks that end early."""
    frame = run_once(spark.range(0, 100, 1, 3))
    plus_one = f.udf(lambda number: number + 1, "long")
    assert sum(row[0] for row in frame.select(plus_one("id")).collect()) == 5_050
    assert run_once(frame.repartition(2)).groupBy((f.col("id") % 7).alias("rest")).count().count() == 7
    assert len(frame.limit(5).collect()) == 5


def test_offsets_read_are_the_exact_intervals(spark: "SparkSession") -> None:
    """Gaps separate intervals and neighbours join them, in any order of the rows and with duplicate offsets."""
    rows = [(0, 4), (0, 2), (0, 3), (0, 9), (1, 0), (2, 2**40), (2, 2**40 + 1), (0, 3), (1, 2), (1, 4)]
    frame = spark.createDataFrame(rows, "partition int, offset long").repartition(3)
    assert offsets_read(frame) == {
        0: [(2, 5), (9, 10)],
        1: [(0, 1), (2, 3), (4, 5)],
        2: [(2**40, 2**40 + 2)],
    }


def test_no_password_shows_in_the_plan(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """No plan, from parsed to physical, contains the connection's secrets."""
    name = topic(1)
    secrets = {
        "kafka.ssl.key.password": "hunter2",
        "kafka.sasl.jaas.config": 'ScramLoginModule required username="u" password="hunter2";',
    }
    query = read_ranges(spark, options(kafka) | secrets, name, {0: (0, 5)})._jdf.queryExecution()
    shown = query.toString()
    assert "Physical Plan" in shown
    assert name in shown or "KafkaRelation" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize("name", ["startingOffsets", "bootstrap.servers", "kafka.isolation.level"])
def test_options_that_are_not_the_connections_are_refused(spark: "SparkSession", name: str) -> None:
    """Options that decide which offsets are read cannot come from the connection."""
    with pytest.raises(ConfigurationError, match=name):
        read_ranges(spark, {name: "x"}, "t", {0: (0, 1)})


def test_a_read_goes_on_with_the_consumers_of_the_one_before(
    spark: "SparkSession", kafka: str, topic: MakeTopic
) -> None:
    """The next read starts faster and Spark logs no warnings. It does not reuse consumers of a re-created topic.

    Nor does it reuse those of another configuration. If such a consumer has fetched records beyond the end of a read,
    the next read gets them.
    """
    name = topic(1)
    Writer(kafka, name, 1).plain(15)

    def connects(start: int, topic_id: str | None, **more: str) -> bool:
        before = connected(spark, kafka)
        frame = read_ranges(spark, options(kafka) | more, name, {0: (start, start + 5)}, topic_id=topic_id)
        assert offsets_of(frame) == {0: list(range(start, start + 5))}
        return not connected(spark, kafka) <= before

    def continues(one: int, other: int, *topic_ids: str, **more: str) -> bool:
        """Return whether a read uses the consumer of the one before, while Spark does not release it as idle."""

        def reused() -> tuple[bool] | None:
            began_s = time.monotonic()
            connects(one, topic_ids[0], **more)
            is_reused = not connects(other, topic_ids[-1], **more)
            return (is_reused,) if time.monotonic() - began_s < KEPT_S else None

        return wait_until(reused, "two reads follow each other")[0]

    assert connects(0, "first")
    assert continues(0, 5, "first")
    assert continues(5, 0, "first")
    assert connects(5, "second")
    assert connects(5, "first", **{"kafka.client.rack": "r"})
    assert connects(5, "first", **{"kafka.group.id": "mine"})
    assert continues(5, 0, "first", "second", **{"kafka.group.id": "mine"})
    assert connects(5, None)
    assert connects(5, None)
    jvm = spark._jvm
    assert jvm is not None
    source = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
    assert str(jvm.org.apache.logging.log4j.LogManager.getLogger(source).getLevel()) == "ERROR"


def connected(spark: "SparkSession", kafka: str) -> set[int]:
    """Return the local ports from which the session's JVM is connected to the broker."""
    jvm = spark._jvm
    assert jvm is not None
    found = psutil.Process(jvm.java.lang.ProcessHandle.current().pid()).net_connections("tcp")
    port = int(kafka.rpartition(":")[2])
    return {each.laddr.port for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port}


def watermarks(kafka: str, topic: str, partitions: Sequence[int] | range) -> list[int]:
    """Return the end offset of each partition."""
    with consumer(kafka)() as reader:
        return [
            reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)[1] for partition in partitions
        ]


def remaining(kafka: str, topic: str, partition: int) -> list[int]:
    """Return all offsets that a plain consumer finds in a partition."""
    with consumer(kafka)() as reader:
        place = TopicPartition(topic, partition, 0)
        end = reader.get_watermark_offsets(place, timeout=30)[1]
        reader.assign([place])
        found: list[int] = []

        def is_at_end() -> bool:
            for message in reader.consume(1000, timeout=1):
                offset = message.offset()
                assert message.error() is None
                assert offset is not None
                found.append(offset)
            return bool(found) and found[-1] >= end - 1

        wait_until(is_at_end, lambda: f"all is read to {end}: {found}")
        return found


def consumer(kafka: str) -> Callable[[], Consumer]:
    """Return a function that creates a consumer without a group."""
    return lambda: Consumer({"bootstrap.servers": kafka, "group.id": "tests", "enable.auto.commit": False})


def test_consumers_that_idle_are_let_go(spark: "SparkSession", kafka: str, filled: str) -> None:
    """In a warm session, consumers of earlier batches and their fetched records are released."""

    def made_by_a_read() -> set[int]:
        before = connected(spark, kafka)
        assert read_ranges(spark, options(kafka), filled, {0: (0, 5)}).count() == 5
        return connected(spark, kafka) - before

    left = wait_until(made_by_a_read, "a read has connected")
    wait_until(lambda: not left & connected(spark, kafka), "no connection of the read is left", pause_s=1)
