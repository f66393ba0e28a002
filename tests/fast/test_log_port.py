"""Tests of the contract that every coordination log fulfils.

`LogPort` contains the tests. Here they run against the log in memory, in `tests/real/test_kafka_log.py` against Kafka.
"""

import time
from collections.abc import Mapping
from typing import Protocol

import pytest

from marshal_dagster.coordination.log import Append, CoordinationLog, PositionLostError, TimedLog
from marshal_dagster.errors import TopicNotFoundError, UnavailableError
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog
from tests.conditions import WITHIN_S

Read = dict[int, list[tuple[int, bytes | None]]]
"""Offset and value of each record read, by coordination partition."""


class House(Protocol):
    """A coordination topic with two partitions, with the operations of its broker and of other members."""

    def open(self) -> TimedLog:
        """Open the log, as another member does."""
        ...

    def say(self, partition: int, value: bytes | None) -> int:
        """Append a record as another member, and return its offset."""
        ...

    def pass_over(self, partition: int) -> None:
        """Use up at least one offset without a record that a reader receives."""
        ...

    def retain_from(self, partition: int, start: int) -> None:
        """Delete the records before `start`."""
        ...

    def recreate(self, partitions: int) -> None:
        """Delete the topic and create it again."""
        ...

    def delete(self) -> None:
        """Delete the topic."""
        ...


def read(log: CoordinationLog, ends: Mapping[int, int], timeout_s: float = WITHIN_S) -> Read:
    """Read up to `ends`. Check that offsets increase and that each position is after the offsets read."""
    records: Read = {}
    for chunk in log.read_until(ends, timeout_s):
        offsets = [offset for offset, _, _ in chunk.records]
        assert offsets == sorted(set(offsets))
        assert all(offset < chunk.position for offset in offsets)
        records.setdefault(chunk.partition, []).extend((offset, value) for offset, _, value in chunk.records)
    return records


def values(records: Read, partition: int) -> list[bytes | None]:
    """Return the values read from one coordination partition."""
    return [value for _, value in records.get(partition, [])]


class LogPort:
    """The tests. A subclass provides the fixture `house`."""

    def test_what_was_appended_is_read(self, house: House) -> None:
        """Each acknowledged record is at the offset that its acknowledgement reports."""
        log = house.open()
        log.follow({0: 0, 1: 0})

        acks = log.append([Append(0, b"a"), Append(1, b"b"), Append(0, b"c")])

        assert [ack.error for ack in acks] == [None] * 3
        assert read(log, {0: 2, 1: 1}) == {
            0: [(acks[0].offset, b"a"), (acks[2].offset, b"c")],
            1: [(acks[1].offset, b"b")],
        }

    def test_records_keep_their_order(self, house: House) -> None:
        """Records that are appended together keep their order and have no gap, and each is acknowledged."""
        log = house.open()
        log.follow({0: 0})
        sent = [b"record %d" % number for number in range(2_000)]

        acks = log.append([Append(0, value) for value in sent])

        assert [ack.offset for ack in acks] == list(range(2_000))
        assert values(read(log, {0: 2_000}), 0) == sent

    def test_two_members_read_the_same(self, house: House) -> None:
        """Two members that append at the same time read the same records in the same order."""
        first, second = house.open(), house.open()
        for log in (first, second):
            log.follow({0: 0})
        for number in range(20):
            first.append([Append(0, b"first %d" % number)])
            second.append([Append(0, b"second %d" % number)])

        assert read(first, {0: 40}) == read(second, {0: 40})

    def test_bounds_are_those_of_now(self, house: House) -> None:
        """The bounds are the start of the log and the offset of the next record."""
        log = house.open()
        assert {number: (at.start, at.end) for number, at in log.bounds([0, 1]).items()} == {0: (0, 0), 1: (0, 0)}

        log.append([Append(1, b"a"), Append(1, b"b")])

        assert {number: (at.start, at.end) for number, at in log.bounds([1]).items()} == {1: (0, 2)}

    def test_the_first_record_of_a_time_is_found(self, house: House) -> None:
        """It is the first one with that timestamp or a later one; a partition without one is left out."""
        log = house.open()
        log.append([Append(0, b"a"), Append(1, b"b")])
        after_ms = time.time_ns() // 1_000_000 + 60_000

        assert log.offsets_at([0, 1], 1_000) == {0: 0, 1: 0}
        assert log.offsets_at([0, 1], after_ms) == {}

    def test_the_reason_of_a_pause_is_read_with_it(self, house: House) -> None:
        """It is a header of that record; other records have none."""
        log = house.open()
        log.follow({0: 0})
        log.append([Append(0, b"ReleaseGroup/1", "the database moves"), Append(0, b"ReleaseGroup/2"), Append(0, b"c")])

        reasons: dict[int, str] = {}
        for chunk in log.read_until({0: 3}, WITHIN_S):
            reasons.update(chunk.reasons)

        assert reasons == {0: "the database moves"}

    def test_reading_goes_on_where_it_ended(self, house: House) -> None:
        """Each record is read once. The next read returns only newer records."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        assert values(read(log, {0: 1}), 0) == [b"a"]

        house.say(0, b"b")

        assert values(read(log, {0: 2}), 0) == [b"b"]

    def test_reading_begins_where_it_is_reported(self, house: House) -> None:
        """A reader starts at the offset passed to `follow`, and at another one after the next `follow`."""
        log = house.open()
        for value in (b"a", b"b", b"c"):
            house.say(0, value)

        log.follow({0: 1})
        assert values(read(log, {0: 3}), 0) == [b"b", b"c"]
        log.follow({0: 2, 1: 0})
        assert values(read(log, {0: 3}), 0) == [b"c"]

    def test_an_end_that_was_passed_is_no_reason_to_wait(self, house: House) -> None:
        """Reading up to the current position returns nothing and does not wait."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        read(log, {0: 1})

        assert read(log, {0: 1}, timeout_s=0.5) == {}

    def test_offsets_without_records_do_not_hold_a_reader_up(self, house: House) -> None:
        """A log whose last offset has no record is read to its end, and later records are read too."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        house.pass_over(0)
        end = log.bounds([0])[0].end
        assert end > 1

        assert values(read(log, {0: end}), 0) == [b"a"]
        house.say(0, b"b")
        assert values(read(log, {0: end + 1}), 0) == [b"b"]

    def test_a_record_without_value_is_read_as_that(self, house: House) -> None:
        """A null value is read as None."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, None)

        assert values(read(log, {0: 1}), 0) == [None]

    def test_records_carry_the_brokers_time(self, house: House) -> None:
        """Each record has the broker's time in milliseconds at which it was appended."""
        log = house.open()
        log.follow({0: 0})
        log.append([Append(0, b"a")])

        ((_, timestamp_ms, _),) = [record for chunk in log.read_until({0: 1}, WITHIN_S) for record in chunk.records]

        assert abs(timestamp_ms - time.time() * 1_000) < 60_000

    def test_what_never_comes_is_an_error(self, house: House) -> None:
        """Reading up to an end that the log does not reach raises an error after the timeout."""
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        read(log, {0: 1})  # the first answer may take longer

        with pytest.raises(UnavailableError):
            read(log, {0: 5}, timeout_s=0.1)
        log.follow({0: 0})
        assert values(read(log, {0: 1}), 0) == [b"a"]

    def test_a_position_beyond_the_end_is_lost(self, house: House) -> None:
        """A position beyond the log's end raises PositionLostError, because the log was truncated."""
        log = house.open()
        house.say(0, b"a")
        log.follow({0: 7})

        with pytest.raises(PositionLostError) as lost:
            read(log, {0: 8})
        assert lost.value.partition == 0

    def test_a_position_that_retention_deleted_is_lost(self, house: House) -> None:
        """A position before the log's start raises PositionLostError. The reader can start again at the log's start."""
        log = house.open()
        for value in (b"a", b"b", b"c"):
            house.say(0, value)
        house.retain_from(0, 2)
        log.follow({0: 0})

        with pytest.raises(PositionLostError):
            read(log, {0: 3})
        start = log.bounds([0])[0].start
        log.follow({0: start})
        assert (start, values(read(log, {0: 3}), 0)) == (2, [b"c"])

    def test_what_was_lost_before_is_nothing_to_who_begins_elsewhere(self, house: House) -> None:
        """A reader that moves from before the log's start into the log gets no error for its earlier position."""
        log = house.open()
        for value in (b"a", b"b", b"c"):
            house.say(0, value)
        house.retain_from(0, 2)
        for _ in range(5):
            log.follow({0: 0})
            for _ in range(30):  # give a client that fetches ahead the time to notice the lost position
                log.bounds([0])
            log.follow({0: 2})
            assert values(read(log, {0: 3}), 0) == [b"c"]

    def test_members_agree_which_log_it_is(self, house: House) -> None:
        """All members see the same identity, with the topic's id as 22 characters of URL-safe base64."""
        identity = house.open().identity()

        assert identity == house.open().identity()
        assert identity.partitions == 2
        assert len(identity.topic_id) == 22
        assert identity.topic_id.replace("-", "").replace("_", "").isalnum()

    def test_a_topic_re_created_is_another_log(self, house: House) -> None:
        """A topic that was deleted and re-created has another identity, which also shows a new number of partitions."""
        log = house.open()
        before = log.identity()

        house.recreate(partitions=3)

        after = log.identity()
        assert after.topic == before.topic
        assert after.topic_id != before.topic_id
        assert after.partitions == 3

    def test_a_topic_that_is_gone_is_missing(self, house: House) -> None:
        """A deleted topic raises TopicNotFoundError."""
        log = house.open()
        log.identity()

        house.delete()

        with pytest.raises(TopicNotFoundError):
            log.identity()

    def test_a_partition_that_is_not_there_takes_nothing(self, house: House) -> None:
        """A record for a coordination partition that does not exist gets an error and no offset."""
        log = house.open()

        good, bad = log.append([Append(1, b"a"), Append(9, b"b")])

        assert good.offset == 0
        assert bad.offset is None
        assert bad.error

    def test_a_purged_log_goes_on(self, house: House) -> None:
        """After `purge` has dropped the unsent records, new records are appended as before."""
        log = house.open()
        log.append([Append(0, b"a")])

        log.purge()

        assert log.append([Append(0, b"b")])[0].offset is not None

    def test_appending_nothing_is_nothing(self, house: House) -> None:
        """Appending no records returns no acknowledgements."""
        assert list(house.open().append([])) == []


class MemoryHouse:
    """A topic in memory."""

    def __init__(self) -> None:
        """Create a topic with two partitions."""
        self.broker = MemoryBroker(2)

    def open(self) -> MemoryLog:
        """Open a log."""
        return MemoryLog(self.broker)

    def say(self, partition: int, value: bytes | None) -> int:
        """Append a record."""
        return self.broker.append(partition, value)

    def pass_over(self, partition: int) -> None:
        """Skip an offset."""
        self.broker.skip(partition)

    def retain_from(self, partition: int, start: int) -> None:
        """Delete the records before `start`."""
        self.broker.retain_from(partition, start)

    def recreate(self, partitions: int) -> None:
        """Re-create the topic."""
        self.broker.recreate(partitions)

    def delete(self) -> None:
        """Delete the topic."""
        self.broker.delete()


class TestMemoryLog(LogPort):
    """Run the tests against the log in memory."""

    @pytest.fixture
    def house(self) -> House:
        """Return a topic in memory."""
        return MemoryHouse()

    def test_a_gone_topic_takes_nothing(self) -> None:
        """A deleted topic acknowledges no record and has neither bounds nor records."""
        house = MemoryHouse()
        log = house.open()
        log.follow({0: 0})
        house.say(0, b"a")
        house.delete()

        assert log.append([Append(0, b"b")])[0].offset is None
        with pytest.raises(TopicNotFoundError):
            log.bounds([0])
        with pytest.raises((TopicNotFoundError, UnavailableError)):
            read(log, {0: 1})

    def test_a_truncated_log_is_reported_by_its_position(self) -> None:
        """A reader beyond the end that an unclean leader election left gets PositionLostError."""
        house = MemoryHouse()
        log = house.open()
        log.follow({0: 0})
        for value in (b"a", b"b", b"c"):
            house.say(0, value)
        read(log, {0: 3})
        house.broker.truncate(0, 1)
        house.say(0, b"d")

        with pytest.raises(PositionLostError):
            read(log, {0: 4})

    def test_a_log_truncated_before_its_start_is_empty_there(self) -> None:
        """If the new leader's log ends before the start that retention left, the log starts at that end.

        Simulator seed 564088.
        """
        house = MemoryHouse()
        log = house.open()
        for value in (b"a", b"b", b"c"):
            house.say(0, value)
        house.retain_from(0, 2)
        house.broker.truncate(0, 1)

        assert log.bounds([0]) == {0: (1, 1)}

    def test_a_partition_that_is_gone_is_reported(self) -> None:
        """Reading a partition that the re-created topic does not have raises TopicNotFoundError."""
        house = MemoryHouse()
        log = house.open()
        log.follow({1: 0})
        house.recreate(1)

        with pytest.raises(TopicNotFoundError, match="no partition 1"):
            log.bounds([1])
        with pytest.raises(TopicNotFoundError, match="no partition 1"):
            read(log, {1: 1})

    def test_the_clock_is_the_brokers(self) -> None:
        """A broker with its own clock uses that clock for the timestamps of records."""
        clock = ManualClock(1_000)
        broker = MemoryBroker(1, now_ms=clock.wall_ms)
        log = MemoryLog(broker)
        log.append([Append(0, b"a")])
        clock.advance(250)
        log.append([Append(0, b"b")])

        assert [timestamp_ms for _, timestamp_ms, _ in broker.records(0)] == [1_000, 1_250]
