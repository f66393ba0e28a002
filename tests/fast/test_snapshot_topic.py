"""Where a reader starts, and which records writers leave in the snapshot topic (protocol.md, section 5)."""

import logging
from collections.abc import Collection, Mapping, Sequence

import pytest

from marshal_dagster.coordination import rationalizer as rationalizer_module
from marshal_dagster.coordination import snapshots as snapshots_module
from marshal_dagster.coordination.rationalizer import LOOK_AGAIN_MS, Rationalizer
from marshal_dagster.coordination.snapshots import Read, SnapshotHead, Snapshots, SnapshotTopic
from marshal_dagster.errors import AuthorizationError, UnavailableError
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.snapshots import Record, collect, render
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemorySnapshotTopic
from tests.members import Site, about


@pytest.fixture
def site() -> Site:
    """Return a coordination topic with two owners and a pause."""
    site = Site()
    for number in range(2):
        site.say(about(ClaimingPartition, f"run{number}.0", number))
        site.say(about(Heartbeat, f"run{number}.0", number, offset=5 + number))
    site.pause(1_000)
    return site


@pytest.fixture
def topic(site: Site) -> MemorySnapshotTopic:
    """Return the snapshot topic of the site."""
    return MemorySnapshotTopic(site.partitions)


def reader(site: Site, topic: SnapshotTopic | None) -> Rationalizer:
    """Open a reader of the coordination partition of the data topic, and let it catch up."""
    opened = Rationalizer(
        site.log(), topics=["orders"], clock=site.clock, snapshots=None if topic is None else Snapshots(topic)
    )
    opened.catch_up()
    return opened


def write(site: Site, topic: SnapshotTopic, of: Rationalizer | None = None) -> Rationalizer:
    """Write a snapshot of the state of `of`, by default of the present state."""
    rationalizer = of or reader(site, None)
    Snapshots(topic).write(rationalizer.world.partitions[site.home], rationalizer.identity)
    return rationalizer


def beat(site: Site, offset: int) -> None:
    """Append a commit of the first owner."""
    site.say(about(Heartbeat, "run0.0", 0, offset=offset))


def cut(site: Site) -> None:
    """Delete all present records by retention."""
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end)


def kept(site: Site, topic: MemorySnapshotTopic) -> list[int]:
    """Return the log offsets of the stored snapshots, including incomplete ones."""
    at = topic.bounds([site.home])
    stored, _ = collect(topic.read(at, 1)[site.home])
    return [one.name.offset for one in stored]


def test_a_cut_log_with_a_snapshot_is_certain(site: Site, topic: MemorySnapshotTopic) -> None:
    """Owners, offsets and pauses survive the log's retention, and later records are read from the log."""
    write(site, topic)
    cut(site)
    beat(site, 9)

    started = reader(site, topic)

    world = started.world.partitions[site.home]
    assert world.certain
    assert started.records_read == 1
    assert world.groups["etl"].keys["orders", 0].offset == 9
    assert world.groups["etl"].keys["orders", 1].owner is not None
    assert world.groups["etl"].paused_by == "ops.1"


def test_without_a_snapshot_a_cut_log_is_observed(site: Site, topic: MemorySnapshotTopic) -> None:
    """Without a snapshot, a log whose start was deleted is only observed."""
    cut(site)
    assert not reader(site, topic).world.partitions[site.home].certain


def test_a_short_whole_log_is_read_as_it_is(site: Site) -> None:
    """For a short and complete log no snapshot is looked up, because reading the log is as fast."""

    class Untouched(MemorySnapshotTopic):
        def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
            raise AssertionError(partitions)

    assert reader(site, Untouched()).world.partitions[site.home].certain


def test_a_long_log_is_read_from_the_snapshot(
    site: Site, topic: MemorySnapshotTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records before the snapshot are not read, and the state equals that of the whole log."""
    monkeypatch.setattr(rationalizer_module, "WORTH_A_LOOK", 3)
    write(site, topic)
    beat(site, 9)

    started, whole = reader(site, topic), reader(site, None)

    assert started.records_read == 1
    assert summary(started.world) == summary(whole.world)


@pytest.mark.parametrize("error", [UnavailableError("away"), AuthorizationError("no READ")])
def test_a_snapshot_topic_that_does_not_answer_is_done_without(
    site: Site, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A log can be read without snapshots. If one was needed, a warning reports why there is none."""

    class Failing(MemorySnapshotTopic):
        def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:  # noqa: ARG002
            raise error

    cut(site)
    with caplog.at_level(logging.WARNING):
        assert not reader(site, Failing(site.partitions)).world.partitions[site.home].certain
    assert str(error) in caplog.text


def test_a_snapshot_that_does_not_fit_is_reported(
    site: Site, topic: MemorySnapshotTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot of a coordination topic that was re-created is skipped with a warning."""
    write(site, topic)
    site.broker.recreate()
    beat(site, 3)
    cut(site)
    with caplog.at_level(logging.WARNING):
        assert not reader(site, topic).world.partitions[site.home].certain
    assert "a coordination topic with another topic id" in caplog.text


def test_an_older_writer_does_not_displace_a_newer_snapshot(site: Site, topic: MemorySnapshotTopic) -> None:
    """A late snapshot of an old state does not replace a newer one, before and after compaction."""
    lagging = reader(site, None)
    beat(site, 9)
    newest = write(site, topic)
    write(site, topic, lagging)
    cut(site)
    for _ in range(2):
        found = reader(site, topic).world.partitions[site.home]
        assert found.next_offset == newest.world.partitions[site.home].next_offset
        topic.compact()


def test_a_half_written_newer_one_leaves_the_older(site: Site, topic: MemorySnapshotTopic) -> None:
    """The older snapshot is used and kept until a newer one is complete, compacted or not."""
    older = write(site, topic)
    at_offset = older.world.partitions[site.home].next_offset
    beat(site, 9)
    world, identity = reader(site, None).world.partitions[site.home], older.identity
    for written in range(2):
        broken_off = render(world, identity.topic_id, f"broken{written}")[written : written + 1]
        topic.append(site.home, broken_off)
        topic.compact()
        heads = Snapshots(topic).heads(identity)
        assert heads[site.home] == SnapshotHead(at_offset, older.world.partitions[site.home].log_time_ms)
    beat(site, 11)
    write(site, topic)
    topic.compact()
    assert kept(site, topic) == [at_offset + 2]


def test_what_was_not_read_back_whole_deletes_nothing(site: Site) -> None:
    """A writer deletes older snapshots only after it has read back its own completely."""

    class Losing(MemorySnapshotTopic):
        loses = False

        def append(self, partition: int, records: Sequence[Record]) -> None:
            lost = [record for record in records if self.loses and record.value and record.key.endswith(b"end")]
            super().append(partition, [record for record in records if record not in lost])

    topic = Losing(site.partitions)
    older = write(site, topic)
    beat(site, 9)
    topic.loses = True
    write(site, topic)
    assert kept(site, topic)[-1] == older.world.partitions[site.home].next_offset
    assert len(kept(site, topic)) == 2


@pytest.mark.slow
def test_it_is_found_behind_whatever_came_after_it(site: Site) -> None:
    """The topic is read backwards from its end until a complete snapshot is found."""
    reads: list[OffsetBounds] = []

    class Watched(MemorySnapshotTopic):
        def read(self, ranges: Mapping[int, OffsetBounds], timeout_s: float) -> Mapping[int, Read]:
            reads.extend(ranges.values())
            return super().read(ranges, timeout_s)

    watched = Watched(site.partitions)
    watched.append(site.home, [Record(b"old %d" % number, b"x") for number in range(10_000)])
    write(site, watched)
    watched.append(site.home, [Record(b"junk", b"x")] * 700)
    cut(site)
    reads.clear()

    assert reader(site, watched).world.partitions[site.home].certain
    assert [at.end - at.start for at in reads] == [32, 256, 2048]


def test_a_snapshot_longer_than_the_first_look_is_found(
    site: Site, topic: MemorySnapshotTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read sees only the end of the newer snapshot. It is still preferred to a complete older one."""
    lagging = reader(site, None)
    beat(site, 9)
    newest = reader(site, None)
    monkeypatch.setattr(
        snapshots_module, "render", lambda world, topic_id, name: render(world, topic_id, name, part_bytes=8)
    )
    write(site, topic, newest)
    monkeypatch.undo()
    write(site, topic, lagging)
    site.broker.retain_from(site.home, lagging.world.partitions[site.home].next_offset)
    assert reader(site, topic).records_read == 0


def test_a_reader_overtaken_by_retention_goes_on_from_a_snapshot(site: Site, topic: MemorySnapshotTopic) -> None:
    """If retention deletes records that were to be read next, the reader continues from a newer snapshot."""
    overtaken = reader(site, topic)
    beat(site, 9)
    write(site, topic)
    cut(site)
    beat(site, 12)

    world = overtaken.catch_up().partitions[site.home]

    assert world.certain
    assert world.groups["etl"].keys["orders", 0].offset == 12


@pytest.mark.parametrize("why", ["none yet", "away"])
def test_a_reader_that_only_observes_looks_again(site: Site, why: str) -> None:
    """An observing reader looks for a snapshot once a minute. With one it becomes certain."""
    requested: list[int] = []

    class Watched(MemorySnapshotTopic):
        is_away = False

        def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
            requested.extend(partitions)
            if self.is_away:
                raise UnavailableError("away")
            return super().bounds(partitions)

    topic, whole = Watched(site.partitions), reader(site, None)
    cut(site)
    if why == "away":
        write(site, topic, whole)
        topic.is_away = True
    observing = reader(site, topic)
    beat(site, 9)
    assert not observing.catch_up().partitions[site.home].certain
    topic.is_away = False
    if why == "none yet":
        write(site, topic, whole)
    requested.clear()
    site.clock.advance(LOOK_AGAIN_MS - 1)
    assert not observing.catch_up().partitions[site.home].certain
    assert requested == []
    site.clock.advance(1)
    beat(site, 11)
    whole.catch_up()
    assert observing.catch_up().partitions[site.home].certain
    assert summary(observing.world) == summary(whole.world)
    requested.clear()
    site.clock.advance(LOOK_AGAIN_MS)
    observing.catch_up()
    assert requested == []


def lose(site: Site, records: int = 1) -> None:
    """Lose the last records by an unclean leader election, and append more than were lost."""
    end = site.broker.bounds(site.home).end
    site.broker.truncate(site.home, end - records)
    for _ in range(records + 1):
        site.say(about(Heartbeat, "run1.0", 1, offset=77))


def test_a_log_that_grew_again_is_not_read_on_from_before(
    site: Site, topic: MemorySnapshotTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the log has another record at the snapshot's last offset, the snapshot is skipped with a warning."""
    monkeypatch.setattr(rationalizer_module, "WORTH_A_LOOK", 3)
    beat(site, 9)
    write(site, topic)
    lose(site)

    with caplog.at_level(logging.WARNING):
        started = reader(site, topic)

    assert summary(started.world) == summary(reader(site, None).world)
    assert started.world.key("etl", "orders", 0).offset == 5
    assert "holds other records at their offsets" in caplog.text


def test_where_the_log_was_cut_too_it_is_only_observed(site: Site, topic: MemorySnapshotTopic) -> None:
    """A snapshot of records that the log has lost makes no reader certain."""
    beat(site, 9)
    write(site, topic)
    site.broker.retain_from(site.home, site.broker.bounds(site.home).end - 1)
    assert reader(site, topic).world.partitions[site.home].certain
    lose(site)
    assert not reader(site, topic).world.partitions[site.home].certain


def test_an_older_snapshot_of_what_was_not_lost_is_taken(site: Site, topic: MemorySnapshotTopic) -> None:
    """The newest snapshot whose last record is still in the log is used."""
    older = write(site, topic).world.partitions[site.home]
    site.broker.retain_from(site.home, older.next_offset - 1)
    beat(site, 9)
    newer = reader(site, topic)
    topic.append(site.home, render(newer.world.partitions[site.home], newer.identity.topic_id, "newer"))
    assert reader(site, topic).records_read == 0
    lose(site)
    started = reader(site, topic)
    assert started.world.partitions[site.home].certain
    assert started.records_read == 2
    assert started.world.key("etl", "orders", 1).offset == 77


def test_an_equal_record_elsewhere_is_not_mistaken(topic: MemorySnapshotTopic) -> None:
    """Coordination partitions may have equal last records, such as those of a pause. Each is checked on its own."""
    site = Site()
    site.pause(1_000)
    everything = Rationalizer(site.log(), clock=site.clock)
    worlds = everything.catch_up().partitions
    for world in worlds.values():
        Snapshots(topic).write(world, everything.identity)
    (last,) = {world.last for world in worlds.values()}
    assert last is not None
    bounds = {number: site.broker.bounds(number) for number in worlds}
    defaults = everything.world.defaults
    found = Snapshots(topic).newest(everything.identity, bounds, defaults, [(site.home, last)])
    assert found.keys() == worlds.keys() - {site.home}


def test_what_retention_deletes_meanwhile_is_not_looked_at(site: Site, topic: MemorySnapshotTopic) -> None:
    """If retention deletes the last record while it is being looked up, the snapshot is still used."""
    write(site, topic)
    site.broker.retain_from(site.home, 1)
    log = site.log()

    def cut_now() -> None:
        log.before_read = lambda: None
        cut(site)

    log.before_read = cut_now
    started = Rationalizer(log, topics=["orders"], clock=site.clock, snapshots=Snapshots(topic))
    assert started.catch_up().partitions[site.home].certain


def test_a_reader_that_began_at_a_snapshot_writes_the_same(site: Site, topic: MemorySnapshotTopic) -> None:
    """A reader that started at a snapshot and has read nothing else writes the same last record."""
    first = write(site, topic).world.partitions[site.home]
    cut(site)
    again = reader(site, topic).world.partitions[site.home]
    assert first.last is not None
    assert (again.last, again.next_offset) == (first.last, first.last.offset + 1)
