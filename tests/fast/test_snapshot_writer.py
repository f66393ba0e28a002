"""Which members write snapshots, and when (protocol.md, section 5)."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from marshal_dagster.coordination.log import LogIdentity
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import (
    OLD_MS,
    OLD_RECORDS,
    _of_use,
    outdated_snapshots,
    renew_snapshots,
)
from marshal_dagster.coordination.snapshots import SnapshotHead, Snapshots
from marshal_dagster.errors import AuthorizationError, CoordinationLogChangedError, TopicNotFoundError
from marshal_dagster.protocol.messages import Heartbeat
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import World
from marshal_dagster.testing import MemorySnapshotTopic
from tests.batch_fixtures import Scene
from tests.members import TOPIC, Site, about


@pytest.fixture
def site() -> Site:
    """Return a group with one owner and a past pause, so each coordination partition has a record."""
    site = Site()
    site.pause(1)
    site.clock.advance(2_000)
    site.owner_of(0)
    return site


@pytest.fixture
def topic(site: Site) -> MemorySnapshotTopic:
    """Return the snapshot topic of the site."""
    return MemorySnapshotTopic(site.partitions)


def member(site: Site) -> Rationalizer:
    """Open a reader that follows one data topic, as a run does."""
    opened = Rationalizer(site.log(), topics=[TOPIC], clock=site.clock)
    opened.catch_up()
    return opened


def renew(site: Site, topic: MemorySnapshotTopic) -> list[int]:
    """Write snapshots as a member does at the end of its run."""
    return renew_snapshots(member(site), Snapshots(topic), site.clock)


def test_the_first_run_writes_all(site: Site, topic: MemorySnapshotTopic) -> None:
    """Without snapshots, one is written for each coordination partition, even for those that the run did not follow."""
    assert renew(site, topic) == list(range(site.partitions))
    assert renew(site, topic) == []
    for number in range(site.partitions):
        site.broker.retain_from(number, site.broker.bounds(number).end)
    world = Rationalizer(site.log(), clock=site.clock, snapshots=Snapshots(topic)).catch_up()
    assert all(partition.certain for partition in world.partitions.values())
    assert all(partition.groups["etl"].paused_by == "ops.1" for partition in world.partitions.values())
    assert world.key("etl", TOPIC, 0).owner is not None


def test_an_empty_log_has_none(topic: MemorySnapshotTopic) -> None:
    """A coordination partition without records gets no snapshot."""
    assert renew(Site(), topic) == []


def test_an_hour_later_what_changed_is_written_again(site: Site, topic: MemorySnapshotTopic) -> None:
    """A snapshot older than an hour is replaced, unless it still has the present state."""
    renew(site, topic)
    site.say(about(Heartbeat, "run1.0", 0, offset=7))
    assert renew(site, topic) == []
    site.clock.advance(OLD_MS + 1)
    assert renew(site, topic) == [site.home]
    assert renew(site, topic) == []


def test_what_came_last_is_in_it(site: Site, topic: MemorySnapshotTopic) -> None:
    """The log is read to its present end before the state is written."""
    run = Rationalizer(site.log(), clock=site.clock)
    run.catch_up()
    site.say(about(Heartbeat, "run1.0", 0, offset=7))
    renew_snapshots(run, Snapshots(topic), site.clock)
    head = Snapshots(topic).heads(run.identity)[site.home]
    assert head == SnapshotHead(site.broker.bounds(site.home).end, site.clock.wall_ms())


@pytest.mark.parametrize(
    ("head", "end", "is_old"),
    [
        (None, 0, False),
        (None, 1, True),
        (SnapshotHead(5, 0), 5, False),
        (SnapshotHead(5, 0), 6, True),
        (SnapshotHead(5, None), 6, True),
        (SnapshotHead(5, 1), 6, False),
        (SnapshotHead(5, OLD_MS), 5 + OLD_RECORDS, False),
        (SnapshotHead(5, OLD_MS), 6 + OLD_RECORDS, True),
        (SnapshotHead(5, OLD_MS), 4, True),
    ],
)
def test_what_is_old(head: SnapshotHead | None, end: int, is_old: bool) -> None:
    """A snapshot is outdated after 10,000 further records, after an hour with any, or if the log now ends before it."""
    assert outdated_snapshots({3: head}, {3: OffsetBounds(0, end)}, OLD_MS + 1) == ({3} if is_old else set())


@pytest.mark.parametrize(("version", "had_ranges", "counts"), [(3, False, True), (3, True, False), (4, True, True)])
def test_a_snapshot_that_lacks_ranges_does_not_count(version: int, had_ranges: bool, counts: bool) -> None:
    """A snapshot that may lack ranges does not stop members that know ranges from writing one."""
    world, head = World(1).start(0, 0), SnapshotHead(5, 1, version)
    world.had_ranges = had_ranges
    assert _of_use(head, world) == (head if counts else None)
    assert _of_use(head, None) == head
    assert _of_use(None, world) is None


def test_a_log_that_was_truncated_gets_one_where_it_ends(site: Site, topic: MemorySnapshotTopic) -> None:
    """A snapshot beyond the end of the log is useless, so another one is written and read."""
    renew(site, topic)
    site.broker.truncate(site.home, site.broker.bounds(site.home).end - 1)
    assert renew(site, topic) == [site.home]
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end)
    assert Rationalizer(site.log(), clock=site.clock, snapshots=Snapshots(topic)).world.partitions[site.home].certain


def test_what_is_only_observed_is_not_written(site: Site, topic: MemorySnapshotTopic) -> None:
    """A member that could not read a coordination partition from its start writes no snapshot of it."""
    site.broker.retain_from(site.home, 1)
    assert renew(site, topic) == [number for number in range(site.partitions) if number != site.home]


def test_what_cannot_be_certain_is_not_followed_for_nothing(site: Site, topic: MemorySnapshotTopic) -> None:
    """At its end a run does not read coordination partitions that it could only observe."""
    away = next(number for number in range(site.partitions) if number != site.home)
    site.broker.retain_from(away, 1)
    renew(site, topic)
    run = member(site)
    assert renew_snapshots(run, Snapshots(topic), site.clock) == []
    assert list(run.world.partitions) == [site.home]


@pytest.mark.parametrize(
    "error", [AuthorizationError("no WRITE"), TopicNotFoundError("no topic"), RuntimeError("a bug")]
)
def test_who_cannot_write_goes_on(site: Site, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A missing right, a missing topic or any other error is logged, and the run succeeds."""
    closed: list[int] = []

    class Refusing(MemorySnapshotTopic):
        def append(self, partition: int, records: Sequence[Record]) -> None:  # noqa: ARG002
            raise error

        def close(self) -> None:
            closed.append(1)

    with caplog.at_level(logging.INFO):
        assert renew(site, Refusing(site.partitions)) == []
    assert str(error) in caplog.text
    assert closed == [1]


def test_a_run_renews_at_its_end_and_the_next_starts_there() -> None:
    """A closed session leaves snapshots.

    After retention has deleted the log, the next run starts at the same offset.
    """
    scene = Scene()
    scene.data.make(messages=5)
    topic = MemorySnapshotTopic(8)
    first = scene.delivery(snapshots=Snapshots(topic))
    scene.work(first)
    assert topic.bounds([0])[0].end == 0
    first.close()
    for number in range(scene.broker.identity.partitions):
        scene.broker.retain_from(number, scene.broker.bounds(number).end)
    scene.data.append(0, 2)

    second = scene.work(scene.delivery(snapshots=Snapshots(topic)))

    assert second.committed
    assert [(range_.partition, range_.start, range_.end) for range_ in second.ranges] == [(0, 5, 7)]


def test_a_run_that_did_nothing_asks_nothing() -> None:
    """A session without a batch, or whose log failed, does not read the snapshot topic."""
    asked: list[Collection[int]] = []

    class Noted(MemorySnapshotTopic):
        def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
            asked.append(partitions)
            return super().bounds(partitions)

    scene = Scene()
    scene.data.make(messages=5)
    scene.delivery(snapshots=Snapshots(Noted())).close()
    session = scene.delivery(snapshots=Snapshots(Noted()))
    scene.work(session, max_records=1)
    scene.broker.recreate()
    with pytest.raises(CoordinationLogChangedError):
        scene.work(session)
    session.close()
    assert asked == []


def test_a_former_snapshot_keeps_no_member_from_writing_another() -> None:
    """A snapshot of the previous version does not stop a member from writing one.

    Readers of the present version may not be able to use it, however new it is.
    """
    records = json.loads(Path("tests/data/snapshots_before_go_rules.json").read_text(encoding="utf-8"))["version_1"]
    topic = MemorySnapshotTopic(1)
    topic.append(0, [Record(key.encode(), value.encode()) for key, value in records])

    assert Snapshots(topic).heads(LogIdentity("__marshal", "A" * 22, 1)) == {0: None}
