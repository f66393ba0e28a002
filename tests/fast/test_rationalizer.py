"""How the coordination log is read into the world state, and which errors end that (protocol.md, sections 5 and 6)."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from marshal_dagster.coordination.log import Chunk, LogIdentity, PositionLostError
from marshal_dagster.coordination.rationalizer import LOG_TIME_AHEAD_MS, Rationalizer
from marshal_dagster.errors import (
    CoordinationLogChangedError,
    TimestampTypeError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat, Message, render
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.world import World
from marshal_dagster.testing import MemoryLog
from tests.faulty_log import FaultyLog, InterruptError
from tests.members import GROUP, TOPIC, Site


@pytest.fixture
def site() -> Site:
    """Return an empty coordination topic."""
    return Site()


def claim_record(number: int, instance: str = "run1.0") -> Message:
    """Return a claim of partition `number`."""
    return ClaimingPartition(instance=instance, client="c", group=GROUP, topic=TOPIC, partition=number, time_s=0)


def reader(site: Site, topics: list[str] | None = None) -> tuple[Rationalizer, FaultyLog]:
    """Open a reader and its log."""
    log = site.log()
    return Rationalizer(log, topics=topics, clock=site.clock), log


def replayed(site: Site) -> dict[str, object]:
    """Apply all records of the log to a new world state, and return its summary."""
    world = World(site.partitions)
    for partition in range(site.partitions):
        world.start(partition, 0)
        for record in site.broker.records(partition):
            world.apply(partition, *record)
    return summary(world)


def test_only_new_records_are_read(site: Site) -> None:
    """A second catch-up reads only the records that were appended after the first one."""
    rationalizer, _ = reader(site)
    for number in range(10):
        site.say(claim_record(number))
    rationalizer.catch_up()
    assert rationalizer.records_read == 10
    site.say(claim_record(10))

    rationalizer.catch_up()
    rationalizer.catch_up()

    assert rationalizer.records_read == 11


def test_a_member_follows_only_what_its_topics_need(site: Site) -> None:
    """With `topics` only their coordination partitions are read. `follow_all` adds the others."""
    rationalizer, _ = reader(site, [TOPIC])
    assert list(rationalizer.catch_up().partitions) == [site.home]

    assert sorted(rationalizer.follow_all().partitions) == list(range(site.partitions))


def test_offsets_without_records_are_passed_over(site: Site) -> None:
    """A log whose last offsets have no record, such as a transaction marker, is read to its end."""
    rationalizer, _ = reader(site)
    site.say(claim_record(0))
    site.broker.skip(site.home, 3)

    rationalizer.catch_up()

    assert rationalizer.world.partitions[site.home].next_offset == 4


def test_own_records_are_reported_by_their_offset(site: Site) -> None:
    """Two equal records are distinguished by their offsets, and each gets its own result."""
    rationalizer, _ = reader(site)
    message = claim_record(0)
    first, second = site.say(message), site.say(message)
    own = {offset: (message, render(message)) for offset in (first, second)}

    outcomes = rationalizer.read_past({site.home: own})[site.home]

    assert [outcomes[offset].accepted for offset in (first, second)] == [True, False]


def test_a_heartbeat_is_reported_where_it_moved_the_offset(site: Site) -> None:
    """The result of a heartbeat has the offset right before and right after it, whatever the records in between did."""
    rationalizer, _ = reader(site)
    site.say(claim_record(0))
    beats = [
        Heartbeat(instance="run1.0", client="c", group=GROUP, topic=TOPIC, partition=0, time_s=0, offset=offset)
        for offset in (5, 7, 9)
    ]
    offsets = [site.say(beat) for beat in beats]
    own = {offset: (beat, render(beat)) for offset, beat in zip(offsets, beats, strict=True)}
    del own[offsets[1]]

    outcomes = rationalizer.read_past({site.home: own})[site.home]

    assert [(outcome.before, outcome.after) for outcome in outcomes.values()] == [(None, 5), (7, 9)]


def test_a_heartbeat_that_creates_its_key_has_a_result_too(site: Site) -> None:
    """In a Go group a heartbeat is accepted without a claim."""
    rationalizer, _ = reader(site)
    beat = Heartbeat(instance="run1.0", client="c", group=GROUP, topic=TOPIC, partition=0, time_s=0, offset=5)
    offset = site.say(beat)

    outcome = rationalizer.read_past({site.home: {offset: (beat, render(beat))}})[site.home][offset]

    assert (outcome.accepted, outcome.before, outcome.after) == (True, None, 5)


@pytest.mark.parametrize("where", ["read", "apply"])
def test_an_interrupted_reading_loses_nothing(site: Site, where: str) -> None:
    """A reading that was interrupted at any point and then repeated leads to the same state."""
    rationalizer, log = reader(site)
    for number in range(5):
        site.say(claim_record(number))
    rationalizer.catch_up()
    for number in range(5, 10):
        site.say(claim_record(number))
    log.interrupt = where

    with pytest.raises(InterruptError):
        rationalizer.catch_up()
    rationalizer.catch_up()

    assert summary(rationalizer.world) == replayed(site)
    assert len(rationalizer.world.partitions[site.home].groups[GROUP].keys) == 10


def test_an_interrupt_at_the_last_record_is_not_forgotten(site: Site) -> None:
    """A record that was half applied when the reading was interrupted is applied completely by the next reading."""
    rationalizer, log = reader(site)
    rationalizer.catch_up()
    site.say(claim_record(0))
    log.interrupt = "apply"
    with pytest.raises(InterruptError):
        rationalizer.catch_up()
    rationalizer.world.partitions[site.home].next_offset = 1  # as the rules do before they apply a record

    rationalizer.catch_up()

    assert summary(rationalizer.world) == replayed(site)


def test_a_broker_that_was_away_costs_nothing(site: Site) -> None:
    """After an outage, reading continues at its position."""
    rationalizer, log = reader(site)
    site.say(claim_record(0))
    rationalizer.catch_up()
    site.say(claim_record(1))
    log.is_down = True
    with pytest.raises(UnavailableError):
        rationalizer.catch_up()
    failed = rationalizer.failure
    log.recover()

    rationalizer.catch_up()

    assert isinstance(failed, UnavailableError)
    assert rationalizer.failure is None
    assert rationalizer.records_read == 2
    assert summary(rationalizer.world) == replayed(site)


CHANGES: dict[str, Callable[[Site], None]] = {
    "truncated": lambda site: site.broker.truncate(site.home, 1),
    "re-created": lambda site: site.broker.recreate(),
    "repartitioned": lambda site: site.broker.recreate(partitions=7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_log_that_changed_is_an_error_for_good(site: Site, change: str) -> None:
    """A log that was truncated or replaced raises an error on each later step, even after it has grown again."""
    rationalizer, _ = reader(site)
    for number in range(3):
        site.say(claim_record(number))
    rationalizer.catch_up()
    CHANGES[change](site)

    with pytest.raises(CoordinationLogChangedError, match=r"truncated|re-created, or repartitioned"):
        rationalizer.catch_up()
    for number in range(10):
        site.broker.append(site.home % site.broker.identity.partitions, render(claim_record(number)))
    for step in (rationalizer.catch_up, rationalizer.check_identity, rationalizer.follow_all):
        with pytest.raises(CoordinationLogChangedError):
            step()
    assert rationalizer.changed is not None


def test_a_deleted_topic_is_missing(site: Site) -> None:
    """A deleted coordination topic raises TopicNotFoundError."""
    rationalizer, _ = reader(site)
    site.broker.delete()

    with pytest.raises(TopicNotFoundError):
        rationalizer.catch_up()


def test_an_acknowledged_record_that_is_not_there_is_an_error(site: Site) -> None:
    """A record that was acknowledged at an offset already read must be in another log."""
    rationalizer, _ = reader(site)
    message = claim_record(0)
    for _ in range(3):
        site.say(message)
    rationalizer.catch_up()

    with pytest.raises(CoordinationLogChangedError, match="acknowledged"):
        rationalizer.read_past({site.home: {1: (message, render(message))}})


def test_another_record_in_the_place_of_ones_own_is_an_error(site: Site) -> None:
    """The record at an acknowledged offset must be the one that was written."""
    rationalizer, _ = reader(site)
    offset = site.say(claim_record(0))
    other = claim_record(0, "run2.0")

    with pytest.raises(CoordinationLogChangedError, match="not the one that was acknowledged"):
        rationalizer.read_past({site.home: {offset: (other, render(other))}})


def test_a_reader_overtaken_by_retention_observes_from_there(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """If retention deletes records before they are read, the reader only observes from then on.

    It still reads to the end of the log.
    """
    rationalizer, _ = reader(site)
    site.say(claim_record(0))
    rationalizer.catch_up()
    for number in range(1, 10):
        site.say(claim_record(number))
    site.broker.retain_from(site.home, 5)

    with caplog.at_level(logging.WARNING):
        world = rationalizer.catch_up().partitions[site.home]

    assert not world.certain
    assert world.next_offset == 10
    assert sorted(number for _, number in world.groups[GROUP].keys) == [5, 6, 7, 8, 9]
    assert "only observed" in caplog.text


def test_of_what_retention_deleted_before_it_was_read_back_nothing_is_reported(site: Site) -> None:
    """Records that retention deletes before they are read back have no result. The log does not count as truncated.

    Simulator seed 574955: a process slept after an append.
    """
    rationalizer, _ = reader(site)
    site.say(claim_record(7))
    rationalizer.catch_up()
    messages = [claim_record(number) for number in range(4)]
    own = {site.say(message): (message, render(message)) for message in messages}
    site.broker.retain_from(site.home, 3)

    reported = rationalizer.read_past({site.home: own})

    assert sorted(reported[site.home]) == [3, 4]
    assert rationalizer.changed is None
    assert not rationalizer.world.partitions[site.home].certain


class OvertakenLog(MemoryLog):
    """A log that returns one record and then, once, loses its reader's position to retention."""

    has_overtaken = False

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read, and delete records during the reading."""
        for chunk in super().read_until(ends, timeout_s):
            if self.has_overtaken:
                yield chunk
                continue
            self.has_overtaken = True
            first = chunk.records[0]
            yield Chunk(chunk.partition, [first], first[0] + 1)
            self.broker.retain_from(chunk.partition, first[0] + 2)
            raise PositionLostError(chunk.partition)


def test_of_what_retention_deleted_after_it_was_read_back_nothing_is_reported_either(site: Site) -> None:
    """If retention deletes records that were read back, their effect on the state and their results are discarded."""
    rationalizer = Rationalizer(OvertakenLog(site.broker), clock=site.clock)
    rationalizer.catch_up()
    messages = [claim_record(number) for number in range(4)]
    own = {site.say(message): (message, render(message)) for message in messages}

    reported = rationalizer.read_past({site.home: own})

    assert sorted(reported[site.home]) == [2, 3]
    assert rationalizer.changed is None
    assert not rationalizer.world.partitions[site.home].certain


class ByRecordLog(MemoryLog):
    """A log that returns one record at a time.

    With `fails_at_the_end` the broker stops answering after the last one.
    """

    fails_at_the_end = False

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read, and fail if configured."""
        for chunk in super().read_until(ends, timeout_s):
            for record in chunk.records:
                yield Chunk(chunk.partition, [record], record[0] + 1, chunk.sender_timed)
        if self.fails_at_the_end:
            raise UnavailableError("the broker does not answer")


def test_each_own_record_must_have_the_brokers_timestamp(site: Site) -> None:
    """Each own record must have the broker's timestamp, including the last one after others."""
    rationalizer = Rationalizer(ByRecordLog(site.broker), clock=site.clock)
    rationalizer.catch_up()
    own = {}
    for number in range(2):
        site.broker.is_sender_timed = number == 1
        message = claim_record(number)
        own[site.say(message)] = (message, render(message))

    with pytest.raises(TimestampTypeError, match="record 1 of"):
        rationalizer.read_past({site.home: own})


def test_what_a_reading_has_shown_counts_though_it_fails(site: Site) -> None:
    """If a read shows an own record with its sender's timestamp, the log is no longer used, even if the read fails."""
    log = ByRecordLog(site.broker)
    rationalizer = Rationalizer(log, clock=site.clock)
    rationalizer.catch_up()
    site.broker.is_sender_timed = log.fails_at_the_end = True
    message = claim_record(0)

    with pytest.raises(UnavailableError):
        rationalizer.read_past({site.home: {site.say(message): (message, render(message))}})

    assert isinstance(rationalizer.changed, TimestampTypeError)
    with pytest.raises(TimestampTypeError):
        rationalizer.check_identity()


def test_a_reader_that_cannot_start_at_the_beginning_observes(site: Site) -> None:
    """A coordination partition that does not start at offset 0 is only observed. Others are not affected."""
    site.say(claim_record(0))
    site.broker.retain_from(site.home, 1)

    world = reader(site)[0].catch_up()

    assert [number for number, partition in world.partitions.items() if not partition.certain] == [site.home]


def test_log_time_ahead_of_the_clock_is_reported_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A broker clock that is too far ahead causes one warning, until the clock is right again."""
    rationalizer, _ = reader(site)

    def say_at(ahead_ms: int) -> None:
        site.broker.append(site.home, render(claim_record(0)), site.clock.wall_ms() + ahead_ms)
        rationalizer.catch_up()

    with caplog.at_level(logging.WARNING):
        say_at(LOG_TIME_AHEAD_MS)
        assert caplog.records == []
        say_at(LOG_TIME_AHEAD_MS + 1)
        say_at(LOG_TIME_AHEAD_MS + 2_000)
    assert len(caplog.records) == 1
    assert "clock" in caplog.text


def test_identities_differ_by_id_and_by_number_of_partitions() -> None:
    """A log is identified by its topic's id and its number of partitions."""
    identity = LogIdentity("__marshal", "A" * 22, 8)

    assert identity != replace(identity, topic_id="B" * 22)
    assert identity != replace(identity, partitions=16)
