"""Snapshots in a real Kafka topic: large ones, compacted ones, and a missing topic."""

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

import pytest

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import KafkaSnapshotTopic
from marshal_dagster.coordination.log import Append, LogIdentity
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import ForeignSnapshot, Snapshots, SnapshotTopic, newest_snapshots
from marshal_dagster.coordination.topic_settings import SNAPSHOT_SETTINGS
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingPartition, Heartbeat, render
from marshal_dagster.protocol.snapshots import PART_BYTES, Record
from marshal_dagster.protocol.snapshots import render as snapshot_records
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import PartitionWorld, World
from tests.conditions import WITHIN_S, wait_until
from tests.fast.test_snapshot_port import SnapshotTopicPort
from tests.members import TOPIC, about
from tests.real.conftest import MakeTopic

IDENTITY = LogIdentity("__marshal", "A" * 22, 1)


@pytest.fixture
def kept(connection: KafkaConnection, topic: MakeTopic) -> Iterator[KafkaSnapshotTopic]:
    """A topic with one partition, compacted as often as the broker can."""
    settings = {**SNAPSHOT_SETTINGS, "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001"}
    settings |= {"delete.retention.ms": "0"}
    kept = KafkaSnapshotTopic(connection, topic(1, settings))
    yield kept
    kept.close()


class TestKafkaSnapshotTopic(SnapshotTopicPort):
    """The contract of every snapshot topic."""

    @pytest.fixture
    def topic(self, connection: KafkaConnection, topics: Topics) -> Iterator[SnapshotTopic]:
        """A topic of two partitions, created as the library creates it."""
        name = f"port-{uuid.uuid4().hex}"
        assert topics.create(name, 2, 1, SNAPSHOT_SETTINGS)
        opened = KafkaSnapshotTopic(connection, name)
        yield opened
        opened.close()


def state(keys: int) -> PartitionWorld:
    """Return a state with this number of keys that have an owner."""
    world = World(1)
    world.apply(0, 0, 1_000, render(about(ClaimingPartition, "run1.0", 0)))
    world.apply(0, 1, 2_000, render(about(Heartbeat, "run1.0", 0, offset=5)))
    (group,) = world.partitions[0].groups.values()
    for number in range(keys):
        group.keys[TOPIC, number] = replace(group.keys[TOPIC, 0], offset=number)
    return world.partitions[0]


def newest(kept: KafkaSnapshotTopic, world: PartitionWorld) -> PartitionWorld | None:
    """Read the newest snapshot as a new process does."""
    end = OffsetBounds(world.next_offset, world.next_offset)
    found = Snapshots(KafkaSnapshotTopic(kept._connection, kept.topic)).newest(IDENTITY, {0: end}, world.defaults)
    return found.get(0)


def test_a_snapshot_of_several_mb_comes_back(kept: KafkaSnapshotTopic) -> None:
    """50,000 keys are written in parts that fit the broker's default limits, and are read back equal."""
    world = state(50_000)
    Snapshots(kept).write(world, IDENTITY)
    (records,) = kept.read(kept.bounds([0]), 10).values()
    sizes = [len(value or b"") for _, value in records]
    assert len(sizes) > 4
    assert max(sizes) == PART_BYTES
    found = newest(kept, world)
    assert found is not None
    assert found.groups == world.groups


def test_compaction_leaves_the_newest_and_it_is_found(kept: KafkaSnapshotTopic) -> None:
    """Older snapshots are compacted away after some time. The newest is read across the gaps."""
    world = state(10)
    for offset in range(2, 12):
        world.resume_at(offset, 1_000 * offset)
        Snapshots(kept).write(world, IDENTITY)

    def end_when_compacted() -> int | None:
        kept.append(0, [Record(b"junk", b"rolls the segment")])
        end = kept.bounds([0])[0].end
        (records,) = kept.read({0: OffsetBounds(0, end)}, 10).values()
        return end if len([value for _, value in records if value]) < 10 else None

    assert wait_until(end_when_compacted, "the snapshots before are compacted away", pause_s=0.2) > 20
    found = newest(kept, world)
    assert found is not None
    assert found.next_offset == 11


def test_the_record_before_a_snapshot_is_looked_at_in_the_log(
    kept: KafkaSnapshotTopic, connection: KafkaConnection, topic: MakeTopic
) -> None:
    """A snapshot whose last record differs from the log's is rejected, and an older matching one is used."""
    with closing(KafkaLog(connection, topic(1, {"message.timestamp.type": "LogAppendTime"}))) as log:
        snapshots, rationalizer = Snapshots(kept), Rationalizer(log)
        for number in range(3):
            log.append([Append(0, render(about(ClaimingPartition, f"run{number}.0", number)))])
            world = rationalizer.catch_up().partitions[0]
            if number == 2:
                assert world.last is not None
                world.set_last_record(world.last._replace(digest="0" * 64))
            kept.append(0, snapshot_records(world, rationalizer.identity.topic_id, f"s{number}"))
        bounds = log.bounds([0])

        def newest_of(strange: Collection[ForeignSnapshot]) -> Mapping[int, PartitionWorld]:
            return snapshots.newest(rationalizer.identity, bounds, world.defaults, strange)

        assert newest_of([])[0].next_offset == 3
        assert newest_snapshots(log, bounds, WITHIN_S, newest_of)[0].next_offset == 2


def test_a_missing_topic_is_reported(connection: KafkaConnection) -> None:
    """A missing snapshot topic raises an error at once."""
    missing = KafkaSnapshotTopic(replace(connection, timeout_s=WITHIN_S), "no-such-topic")
    began_s = time.monotonic()
    with pytest.raises(TopicNotFoundError):
        missing.bounds([0])
    assert time.monotonic() - began_s < WITHIN_S
    missing.close()
