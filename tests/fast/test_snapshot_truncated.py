"""Snapshots of a log that loses its newest records and grows again while it is read (protocol.md, section 5)."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from marshal_dagster.coordination import rationalizer as rationalizer_module
from marshal_dagster.coordination import snapshots as snapshots_module
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import OLD_MS, renew_snapshots
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat, ReleasingPartition
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.snapshots import render as render_parts
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemorySnapshotTopic
from tests.faulty_log import FaultyLog
from tests.members import TOPIC, Site, about


class ActedOnTopic(MemorySnapshotTopic):
    """A topic that runs a function once, before a read or after a snapshot was written."""

    before_read: Callable[[], None] | None = None
    after_append: Callable[[], None] | None = None

    def read(
        self, ranges: Mapping[int, OffsetBounds], timeout_s: float
    ) -> Mapping[int, Sequence[tuple[bytes | None, bytes | None]]]:
        """Run the function, and read."""
        act, self.before_read = self.before_read, None
        if act is not None:
            act()
        return super().read(ranges, timeout_s)

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append, and run the function."""
        super().append(partition, records)
        act, self.after_append = self.after_append, None
        if act is not None:
            act()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a log with a claim and a heartbeat, for which snapshots are looked up although it is short."""
    monkeypatch.setattr(rationalizer_module, "WORTH_A_LOOK", 1)
    site = Site()
    site.say(about(ClaimingPartition, "run0.0"))
    site.say(about(Heartbeat, "run0.0", offset=5))
    return site


@pytest.fixture
def topic(site: Site) -> ActedOnTopic:
    """Return the snapshot topic of the site."""
    return ActedOnTopic(site.partitions)


def read(site: Site, topic: MemorySnapshotTopic | None = None, log: FaultyLog | None = None) -> Rationalizer:
    """Open a reader and let it catch up."""
    snapshots = None if topic is None else Snapshots(topic)
    reader = Rationalizer(log or site.log(), topics=[TOPIC], clock=site.clock, snapshots=snapshots)
    reader.catch_up()
    return reader


def write(reader: Rationalizer, site: Site, topic: MemorySnapshotTopic) -> None:
    """Write a snapshot of a reader's home partition."""
    Snapshots(topic).write(reader.world.partitions[site.home], reader.identity)


def take_over(site: Site, offset: int) -> None:
    """Let another instance claim the key that run0 releases at `offset`."""
    site.say(about(ReleasingPartition, "run0.0", offset=offset))
    site.say(about(ClaimingPartition, "run1.0"))


def test_a_snapshot_behind_offsets_without_records_is_passed_over_once_there_are_some(
    site: Site, topic: ActedOnTopic
) -> None:
    """A snapshot after a transaction marker is skipped once the log has records at the marker's offset."""
    site.broker.skip(site.home, 2)
    write(read(site), site, topic)
    site.broker.truncate(site.home, 2)
    site.say(about(Heartbeat, "run0.0", offset=9))
    take_over(site, 9)

    assert summary(read(site, topic).world) == summary(read(site).world)


def test_a_log_truncated_while_a_snapshot_is_held_against_it_is_not_taken_for_one_that_was_cut(
    site: Site, topic: ActedOnTopic
) -> None:
    """The check of a snapshot is left out only if retention deleted the record, and not if the log was truncated."""
    site.say(about(Heartbeat, "run0.0", offset=6))
    site.say(about(Heartbeat, "run0.0", offset=7))
    write(read(site), site, topic)
    log = site.log()

    def lose() -> None:
        log.before_read = lambda: None
        site.broker.truncate(site.home, 2)

    log.before_read = lose
    reader = Rationalizer(log, topics=[TOPIC], clock=site.clock, snapshots=Snapshots(topic))
    for _ in range(3):
        site.say(about(Heartbeat, "run0.0", offset=6))
    reader.catch_up()

    assert summary(reader.world) == summary(read(site).world)


def test_who_follows_the_log_anew_looks_whether_it_is_the_one_that_was_read(site: Site, topic: ActedOnTopic) -> None:
    """A reader that follows the log again checks that it is the log that it has read.

    Otherwise it would continue from records that the log has lost, and replace the good snapshot.
    """
    other = next(number for number in range(site.partitions) if number != site.home)
    write(read(site), site, topic)
    site.broker.retain_from(site.home, 2)
    site.say(about(Heartbeat, "run0.0", offset=6))
    live = read(site, topic)
    site.broker.truncate(site.home, 2)
    take_over(site, 5)
    site.broker.append(other, b"anything")  # so that this partition has to be followed too
    good = read(site, topic)
    site.clock.advance(OLD_MS + 1)

    renew_snapshots(live, Snapshots(topic), site.clock)

    topic.compact()
    assert summary(read(site, topic).world) == summary(good.world)
    assert live.changed is not None


def test_nothing_is_cleared_away_for_a_snapshot_of_what_was_lost_as_it_was_written(
    site: Site, topic: ActedOnTopic
) -> None:
    """No snapshot is deleted for one whose records were lost while it was written.

    The older snapshot is the only one that still matches the log.
    """
    write(read(site), site, topic)
    site.broker.retain_from(site.home, 1)
    for offset in (6, 7):
        site.say(about(Heartbeat, "run0.0", offset=offset))
    live = read(site, topic)
    site.clock.advance(OLD_MS + 1)
    lost: list[int] = []

    def lose() -> None:
        site.broker.truncate(site.home, 3)
        lost.append(3)

    topic.after_append = lose
    renew_snapshots(live, Snapshots(topic), site.clock)

    topic.compact()
    assert lost
    assert read(site, topic).world.partition_of(TOPIC).certain


def test_the_newest_is_reported_though_an_older_one_came_after_it(
    site: Site, topic: ActedOnTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest snapshot is found even if an older one was written after it.

    It is so long that the first read sees only its end.
    """
    lagging = read(site)
    site.say(about(Heartbeat, "run0.0", offset=6))
    with monkeypatch.context() as long:
        long.setattr(
            snapshots_module,
            "render",
            lambda world, topic_id, name: render_parts(world, topic_id, name, part_bytes=8),
        )
        write(read(site), site, topic)
    write(lagging, site, topic)

    head = Snapshots(topic).heads(site.broker.identity)[site.home]

    assert head is not None
    assert head.offset == 3


def test_one_is_found_though_a_newer_one_came_and_compaction_took_it(site: Site, topic: ActedOnTopic) -> None:
    """A snapshot is found even if compaction replaces it by a newer one between the look-up and the read."""
    live = read(site)
    write(live, site, topic)
    site.broker.retain_from(site.home, 1)
    site.say(about(Heartbeat, "run0.0", offset=6))
    live.catch_up()

    def renew() -> None:
        write(live, site, topic)
        topic.compact()

    topic.before_read = renew
    assert read(site, topic).world.partition_of(TOPIC).certain
