# ruff: noqa: PT012 - the block that raises is a batch
"""Claimed batches on a real broker: retention, transactions, compaction, re-created topics and logs, a broker outage.

A consumer reads the ranges instead of Spark. `tests.fast.test_batches` has the cases that need no broker.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, IdleReason
from marshal_dagster.coordination import heartbeats
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Append
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.errors import (
    ClaimLostError,
    CoordinationLogChangedError,
    DataLossError,
    DataTopicChangedError,
    GoGroupError,
    MarshalError,
    SettingsMismatchError,
    StartPositionError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.protocol.messages import (
    DeliveryMode,
    GroupSettings,
    ReleaseGroup,
    RevokingClaim,
    RuleSet,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.state import Key
from tests.batch_fixtures import MemorySink
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Message, Side, read_messages
from tests.real.log_time import let_claims_become_stale
from tests.real.test_spark_reader import Writer
from tests.stderr_capture import lines_about
from tests.topics import grow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HEARTBEAT_INTERVAL_MS = 60_000
"""So long that no lease ends, even if this process or the broker is stopped for a while."""
SHORT_INTERVAL_MS = 20_000
"""For a batch that looks every 5 s whether its lease has ended."""
ALL_MODES = list(DeliveryMode)
STRICT_MODES = [DeliveryMode.AT_MOST_ONCE, DeliveryMode.EFFECTIVELY_ONCE]
AT_LEAST_ONCE = DeliveryMode.AT_LEAST_ONCE
EFFECTIVELY_ONCE = DeliveryMode.EFFECTIVELY_ONCE

Fill = Callable[[str, int, int], None]


class Group:
    """The members of one group on a real broker, and the messages that they have processed."""

    def __init__(self, connection: KafkaConnection, coordination_topic: str, topics: Topics) -> None:
        self.connection, self.coordination_topic, self.topics = connection, coordination_topic, topics
        self.name = new_instance_id("group")
        self.processed: Counter[Message] = Counter()
        self.sink = MemorySink()
        self._opened: list[KillableLog] = []

    def open(
        self,
        mode: DeliveryMode = AT_LEAST_ONCE,
        at: KillPoint | None = None,
        *,
        interval_ms: int = HEARTBEAT_INTERVAL_MS,
        **extra: Any,  # noqa: ANN401 - the fields of a BatchSession
    ) -> BatchSession:
        """Open a member that dies at `at`."""
        log = KillableLog(KafkaLog(self.connection, self.coordination_topic, interval_ms), at)
        self._opened.append(log)
        return BatchSession(
            log=log,
            data=self.topics,
            connection=self.connection,
            group=self.name,
            client=f"client{len(self._opened)}",
            run_id=f"run{len(self._opened)}",
            settings=GroupSettings(interval_ms, RuleSet.NATIVE, mode),
            **extra,
        )

    def batch(self, delivery: BatchSession, topic: str, **limits: Any) -> ClaimedBatch:  # noqa: ANN401 - as `BatchRequest`
        """Return a batch on `topic`."""
        has_sink = delivery.settings.delivery is EFFECTIVELY_ONCE
        return delivery.claimed_batch(BatchRequest(topic=topic, **limits), self.sink if has_sink else None)

    def process(self, batch: ClaimedBatch) -> None:
        """Read the batch's messages and write them to the output of its mode."""
        batch.begin_processing()
        messages = read_messages(self.connection, batch.ranges)
        if batch.mode is EFFECTIVELY_ONCE:
            batch.write(cast("DataFrame", messages))
        else:
            self.processed.update(messages)

    def work(self, delivery: BatchSession, topic: str, **limits: Any) -> ClaimedBatch:  # noqa: ANN401
        """Claim, process and commit one batch."""
        with self.batch(delivery, topic, **limits) as batch:
            if batch.idle is None:
                self.process(batch)
        return batch

    def drain(self, delivery: BatchSession, topic: str, **limits: Any) -> list[ClaimedBatch]:  # noqa: ANN401
        """Process batches until the topic is drained. Return those that had messages."""
        done: list[ClaimedBatch] = []
        for _ in range(50):
            batch = self.work(delivery, topic, **limits)
            if batch.idle is not None:
                assert batch.idle.reason is IdleReason.DRAINED, batch.idle
                return done
            done.append(batch)
        raise AssertionError("the topic is not drained after 50 batches")

    def counts(self, mode: DeliveryMode) -> Counter[Message]:
        """Return how often each message is in the output of `mode`."""
        return self.sink.counts() if mode is EFFECTIVELY_ONCE else self.processed

    def key(self, topic: str, partition: int = 0) -> Key:
        """Read the current state of a key from the log."""
        watcher = self.open()
        with watcher.claimed_batch(BatchRequest(topic=topic))._claimer.rationalizer.lock:
            world = watcher._rationalizer(topic).catch_up()
            return world.snapshot_key(self.name, topic, partition)

    @property
    def kafka(self) -> str:
        """The bootstrap servers."""
        return self.connection.bootstrap_servers

    def close(self) -> None:
        """Close all logs."""
        for log in self._opened:
            log.close()


@pytest.fixture
def group(connection: KafkaConnection, coordination_topic: str, topics: Topics) -> Iterator[Group]:
    """A group without history."""
    group = Group(connection, coordination_topic, topics)
    yield group
    group.close()


def spans(batch: ClaimedBatch) -> dict[int, tuple[int, int]]:
    """Return start and end of each range, by partition."""
    return {range_.partition: (range_.start, range_.end) for range_ in batch.all_ranges}


def assume_all_dead(_: object) -> bool:
    """Return True: treat every owner of a claim as dead."""
    return True


# Start positions


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_empty_topic(group: Group, topic: MakeTopic, fill: Fill, mode: DeliveryMode) -> None:
    """An empty topic is drained, each partition gets a position, and later messages are read from there."""
    name = topic(2)
    delivery = group.open(mode)
    assert group.drain(delivery, name, start=StartPolicy.LATEST) == []
    fill(name, 2, 6)
    group.drain(delivery, name, start=StartPolicy.LATEST)
    assert group.counts(mode) == {(partition, offset): 1 for partition in range(2) for offset in range(3)}


def test_new_partitions(group: Group, topic: MakeTopic, topics: Topics, fill: Fill) -> None:
    """Partitions added to a topic are read from offset 0, whatever the start policy."""
    name = topic(1)
    fill(name, 1, 5)
    assert group.drain(group.open(), name, start=StartPolicy.LATEST) == []
    grow(topics, name, 3)
    fill(name, 3, 9)
    group.drain(group.open(), name, start=StartPolicy.LATEST)
    assert group.processed == {(0, 5): 1, (0, 6): 1, (0, 7): 1} | {(n, at): 1 for n in (1, 2) for at in range(3)}


def test_kafkas_group_offsets(group: Group, topic: MakeTopic, topics: Topics, fill: Fill) -> None:
    """A group starts at the offsets of Kafka's consumer group of the same name, and commits its own offsets there."""
    name = topic(2)
    fill(name, 2, 10)
    assert topics.commit_group_offsets(group.name, name, {0: 3}) is None
    assert spans(group.work(group.open(), name, max_records=4)) == {0: (3, 4), 1: (0, 3)}
    assert topics.group_offsets(group.name, name) == {0: 4, 1: 3}
    group.drain(group.open(), name)
    assert topics.group_offsets(group.name, name) == {0: 5, 1: 5}


# Messages that retention deleted


def delete_before(kafka: str, topic: str, partition: int, offset: int) -> None:
    """Delete messages as retention does."""
    admin = AdminClient({"bootstrap.servers": kafka})
    for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(WITHIN_S)


@pytest.mark.parametrize("accept", [None, True, False])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_messages_that_retention_deleted(
    group: Group, topic: MakeTopic, fill: Fill, mode: DeliveryMode, accept: bool | None
) -> None:
    """The batch continues and reports the exact lost range, or it fails and does nothing.

    The mode decides which, unless `allow_data_loss` is set.
    """
    name = topic(1)
    fill(name, 1, 4)
    group.drain(group.open(mode), name)
    fill(name, 1, 6)
    delete_before(group.kafka, name, 0, 7)

    if accept or (accept is None and mode is AT_LEAST_ONCE):
        batch = group.work(group.open(mode), name, allow_data_loss=accept)
        assert [(range_.start, range_.first_readable, range_.end, range_.lost) for range_ in batch.ranges] == [
            (4, 7, 10, (4, 7))
        ]
        assert group.counts(mode) == dict.fromkeys([(0, at) for at in (0, 1, 2, 3, 7, 8, 9)], 1)
        assert group.key(name).offset == 10
        return
    with pytest.raises(DataLossError, match=r"messages 4 to 7 \(exclusive\)"):
        group.work(group.open(mode), name, allow_data_loss=accept)
    assert group.counts(mode) == dict.fromkeys([(0, at) for at in range(4)], 1)
    assert (group.key(name).offset, group.key(name).owner) == (4, None)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_open_plan_whose_start_was_deleted(group: Group, topic: MakeTopic, fill: Fill, mode: DeliveryMode) -> None:
    """The rest of the plan is read, and its end is committed."""
    name = topic(1)
    fill(name, 1, 10)
    with pytest.raises(KilledError):
        group.work(group.open(mode, KillPoint(Side.AFTER, "ClaimingMessages")), name, max_records=6)
    delete_before(group.kafka, name, 0, 4)

    batch = group.work(group.open(mode, is_dead=assume_all_dead), name, allow_data_loss=True, max_records=1)

    assert [(range_.start, range_.first_readable, range_.end) for range_ in batch.ranges] == [(0, 4, 6)]
    assert group.counts(mode) == {(0, 4): 1, (0, 5): 1}
    assert group.key(name).offset == 6


# Offsets without a message


@pytest.mark.parametrize("most", [1, 2, 3, 100])
@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_transactions(group: Group, topic: MakeTopic, kafka: str, mode: DeliveryMode, most: int) -> None:
    """Ranges with aborted messages and markers anywhere are read correctly, committed and drained."""
    name = topic(1)
    writer = Writer(kafka, name, 1)
    writer.aborted(1)  # 0, marker 1
    writer.committed(2)  # 2 3, marker 4
    writer.plain(1)  # 5
    writer.aborted(2)  # 6 7, marker 8
    batches = group.drain(group.open(mode), name, max_records=most)
    assert spans(batches[-1])[0][1] == 9
    assert group.counts(mode) == {(0, 2): 1, (0, 3): 1, (0, 5): 1}
    writer.committed(1)  # 9, marker 10
    group.drain(group.open(mode), name, max_records=most)
    assert group.counts(mode) == {(0, 2): 1, (0, 3): 1, (0, 5): 1, (0, 9): 1}
    assert group.key(name).offset == 11


def test_an_open_transaction(group: Group, topic: MakeTopic, kafka: str) -> None:
    """No plan extends beyond an open transaction. The group waits for its end without an error, wherever it starts."""
    name = topic(1)
    writer = Writer(kafka, name, 1)
    writer.plain(2)
    other = Producer({"bootstrap.servers": kafka, "transactional.id": f"{name}-open"})
    other.init_transactions(WITHIN_S)
    other.begin_transaction()
    other.produce(name, "in doubt", partition=0)
    assert other.flush(WITHIN_S) == 0
    writer.plain(2)

    delivery = group.open()
    assert [spans(batch) for batch in group.drain(delivery, name)] == [{0: (0, 2)}]
    late = Group(group.connection, group.coordination_topic, group.topics)
    assert group.topics.commit_group_offsets(late.name, name, {0: 4}) is None
    assert late.drain(late.open(), name) == []
    other.commit_transaction(WITHIN_S)
    # The broker reports the end of a transaction before it writes the marker.
    wait_until(lambda: group.topics.offsets(name, [0])[0].end > 2, "the marker is written")
    assert [spans(batch) for batch in group.drain(delivery, name)] == [{0: (2, 6)}]
    assert group.processed == {(0, at): 1 for at in range(5)}
    assert [spans(batch) for batch in late.drain(late.open(), name)] == [{0: (4, 6)}]
    late.close()


def test_compacted_gaps(group: Group, topic: MakeTopic, kafka: str) -> None:
    """Ranges that start or end at compacted offsets, or contain them, pass every offset and read each message once."""
    name = topic(
        1,
        {
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.0",
            "max.compaction.lag.ms": "100",
        },
    )
    writer = Writer(kafka, name, 1)
    for key in ("a", "b", "a", "c", "d", "d", "d", "b", "e", "a"):
        writer.plain(1, key=key)
    end = 0

    def is_compacted() -> bool:
        nonlocal end
        writer.plain(1, key="tail")  # only segments that are no longer written to are compacted
        end = writer.reported[0][-1] + 1
        probe = Group(group.connection, group.coordination_topic, group.topics)
        with probe.batch(probe.open(), name) as batch:
            batch.begin_processing()
            left = [offset for _, offset in read_messages(group.connection, batch.ranges)]
        probe.close()
        return [offset for offset in left if offset < 10] == [3, 6, 7, 8, 9]

    wait_until(is_compacted, "compaction has left the newest message of each key", pause_s=0.2)

    batches = group.drain(group.open(), name, max_records=2)

    assert [spans(batch)[0] for batch in batches][:5] == [(at, at + 2) for at in range(0, 10, 2)]
    assert {at: count for (_, at), count in group.processed.items() if at < 10} == dict.fromkeys([3, 6, 7, 8, 9], 1)
    assert group.key(name).offset == end


# Re-created topics


@pytest.mark.parametrize("messages", [0, 4, 6])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_data_topic_re_created(group: Group, topic: MakeTopic, fill: Fill, mode: DeliveryMode, messages: int) -> None:
    """Every mode fails and processes nothing, whether the new topic has fewer messages, as many or more."""
    name = topic(1)
    fill(name, 1, 4)
    group.drain(group.open(mode), name)
    group.topics.delete(name)
    with pytest.raises(TopicNotFoundError, match=name):
        group.work(group.open(mode), name)
    assert group.topics.create(name, 1, 1)
    fill(name, 1, messages)

    with pytest.raises(DataTopicChangedError, match="until an operator sets the position"):
        group.work(group.open(mode), name)

    assert sum(group.counts(mode).values()) == 4
    assert (group.key(name).offset, group.key(name).owner) == (4, None)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_data_topic_re_created_while_a_batch_reads(
    group: Group, topic: MakeTopic, topics: Topics, fill: Fill, mode: DeliveryMode
) -> None:
    """`check` detects it before the output is changed.

    Only at-most-once mode has committed by then, before it processes.
    """
    name = topic(1)
    fill(name, 1, 4)
    batch = group.batch(group.open(mode), name)
    with pytest.raises(DataTopicChangedError, match="deleted and re-created while group"), batch:
        batch.begin_processing()
        topics.delete(name)
        assert topics.create(name, 1, 1)
        fill(name, 1, 4)
        if mode is EFFECTIVELY_ONCE:
            group.process(batch)
        batch.check()
    assert not group.sink.rows
    assert group.key(name).offset == (4 if mode is DeliveryMode.AT_MOST_ONCE else 0)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_coordination_topic_re_created(group: Group, topic: MakeTopic, fill: Fill, mode: DeliveryMode) -> None:
    """Kafka knows the group's offsets, but the log does not. Only at-least-once mode continues there by itself."""
    name = topic(2)
    fill(name, 2, 8)
    delivery = group.open(mode)
    group.work(delivery, name, max_records=4)
    recreate(group)

    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created, or repartitioned"):
        group.work(delivery, name)
    if mode in STRICT_MODES:
        with pytest.raises(StartPositionError, match="perhaps it was deleted and re-created"):
            group.work(group.open(mode), name)
        group.sink.stored.clear()  # another output, as the error requests
    group.drain(group.open(mode), name, allow_log_reset=mode in STRICT_MODES)

    assert group.counts(mode) == {(partition, offset): 1 for partition in range(2) for offset in range(4)}


def test_the_coordination_topic_re_created_in_the_middle(group: Group, topic: MakeTopic, fill: Fill) -> None:
    """The batch fails with that error and counts as not committed.

    The group has no settings in the new log, so a record that was in flight is interpreted as a Go consumer's. Members
    detect that, and write nothing more until an operator decides.
    """
    name = topic(1)
    fill(name, 1, 4)
    batch = group.batch(group.open(), name)
    with pytest.raises(CoordinationLogChangedError), batch:
        group.process(batch)
        recreate(group)

    assert not batch.committed
    assert group.key(name).offset == 4
    with pytest.raises(GoGroupError), group.batch(group.open(), name):
        pytest.fail("the batch was entered")


def recreate(group: Group) -> None:
    """Delete the coordination topic and create it again."""
    group.topics.delete(group.coordination_topic)
    settings = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
    assert group.topics.create(group.coordination_topic, 4, 1, settings)


# Pauses, competing members, settings


def test_a_paused_group(group: Group, topic: MakeTopic, fill: Fill) -> None:
    """The idle result reports the end of the pause.

    A current batch is finished, and later runs continue once another record has moved the end into the past.
    """
    name = topic(1)
    fill(name, 1, 8)
    delivery = group.open()
    with group.batch(delivery, name, max_records=4) as batch:
        until_s = int(time.time()) + 3_600
        pause(group, until_s)
        group.process(batch)
    assert batch.committed

    idle = group.work(delivery, name).idle
    assert idle is not None
    assert (idle.reason, utc_to_second(until_s) in idle.text) == (IdleReason.PAUSED, True)
    pause(group, int(time.time()) - 1)
    group.drain(delivery, name)
    assert group.processed == {(0, at): 1 for at in range(8)}


def pause(group: Group, until_s: int) -> None:
    """Pause a group, as an operator's tool does."""
    message = ReleaseGroup(instance="ops.1", client="ops", group=group.name, time_s=0, expiry_s=until_s)
    log = KafkaLog(group.connection, group.coordination_topic)
    acks = log.append([Append(partition, render(message)) for partition in range(log.identity().partitions)])
    assert all(ack.offset is not None for ack in acks)
    log.close()


def test_a_lost_claim_names_who_holds_it(group: Group, topic: MakeTopic, fill: Fill) -> None:
    """If a claim was revoked and won by another member, the commit is rejected and the error names that member."""
    name = topic(1)
    fill(name, 1, 4)
    batch = group.batch(group.open(), name)
    successor = group.batch(group.open(), name)
    with pytest.raises(ClaimLostError, match=f"held by client 'client2', instance '{successor.batch_id}'"), batch:
        group.process(batch)
        revoke(group, name)
        successor.__enter__()
        assert spans(successor) == spans(batch)
    assert not batch.committed
    group.process(successor)
    successor.__exit__(None, None, None)
    assert group.key(name).offset == 4


def revoke(group: Group, topic: str, partition: int = 0) -> None:
    """Revoke the claim of a key."""
    owner = group.key(topic, partition).owner
    assert owner is not None
    assert owner.epoch is not None
    message = RevokingClaim(
        instance="ops.1", client="ops", group=group.name, topic=topic, partition=partition, time_s=0, epoch=owner.epoch
    )
    log = KafkaLog(group.connection, group.coordination_topic)
    home = coordination_partition(topic, log.identity().partitions)
    assert log.append([Append(home, render(message))])[0].offset is not None
    log.close()


def test_settings_that_differ(group: Group, topic: MakeTopic, fill: Fill) -> None:
    """A member with other settings claims nothing and reports the difference."""
    name = topic(1)
    fill(name, 1, 4)
    group.work(group.open(), name, max_records=1)
    with pytest.raises(SettingsMismatchError, match="'effectively_once' here, 'at_least_once' in force"):
        group.work(group.open(EFFECTIVELY_ONCE), name)
    with pytest.raises(SettingsMismatchError, match="5000 here, 60000 in force"):
        group.work(group.open(interval_ms=5_000), name)
    assert group.key(name).offset == 1


def test_two_topics_at_once(group: Group, topic: MakeTopic, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process holds batches on two topics for more than one heartbeat, and commits both."""
    for name in ("SHORTEST_PART", "LONGEST_PART"):
        monkeypatch.setattr(heartbeats, name, 0.02)  # a heartbeat is due soon, and no lease ends
    names = [topic(1), topic(1)]
    delivery = group.open()
    for name in names:
        fill(name, 1, 4)
    with group.batch(delivery, names[0]) as one, group.batch(delivery, names[1]) as two:
        seen = [batch._claimer.claims[0].lease for batch in (one, two)]
        wait_until(
            lambda: all(batch._claimer.claims[0].lease != lease for batch, lease in zip((one, two), seen, strict=True)),
            "both leases are renewed",
        )
        for batch in (one, two):
            group.process(batch)
    assert one.committed
    assert two.committed


# An unreachable broker


def test_no_broker_at_the_start(unused_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a broker there is one clear error within the timeout, and no flood of lines on stderr."""
    nowhere = KafkaConnection(bootstrap_servers=f"127.0.0.1:{unused_port}", timeout_s=2)
    delivery = BatchSession(
        log=KafkaLog(nowhere),
        data=Topics(nowhere),
        connection=nowhere,
        group="g",
        client="c",
        run_id="r",
        settings=GroupSettings(HEARTBEAT_INTERVAL_MS),
    )
    with (
        pytest.raises(UnavailableError, match=rf"127.0.0.1:{unused_port}.*\(tried for 2 s\)"),
        delivery.claimed_batch(BatchRequest(topic="orders")),
    ):
        pytest.fail("the batch was entered")
    delivery.close()
    assert len(lines_about(f"127.0.0.1:{unused_port}", capfd.readouterr().err)) <= 2


def test_a_broker_that_goes_away_in_the_middle(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The member stops when its lease ends and reports why.

    The next run, with the broker back, processes all messages.
    """
    with running_kafka(tmp_path / "kafka") as cluster:
        connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers, timeout_s=5)
        with Topics(replace(connection, timeout_s=WITHIN_S)) as patient:
            settings = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
            assert patient.create("__marshal", 4, 1, settings)
            assert patient.create("orders", 2, 1)
        with Topics(connection) as topics:
            group = Group(connection, "__marshal", topics)
            fill_with(connection, "orders", 2, 10)
            group.work(group.open(interval_ms=SHORT_INTERVAL_MS), "orders", max_records=4)
            capfd.readouterr()
            with pytest.raises(ClaimLostError, match="no heartbeat was accepted in time") as raised:
                stop_working_when_lost(group, cluster.kill)
            assert isinstance(raised.value.__cause__, RuntimeError)
            assert len(lines_about(cluster.bootstrap_servers, capfd.readouterr().err)) <= 20
            cluster.start(1)
            let_claims_become_stale(connection, "__marshal", SHORT_INTERVAL_MS)
            wait_for_drained(group)
            assert group.processed == {(partition, offset): 1 for partition in range(2) for offset in range(5)}
            group.close()


def fill_with(connection: KafkaConnection, topic: str, partitions: int, messages: int) -> None:
    """Write messages, spread evenly."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(messages):
        producer.produce(topic, f"message {number}", partition=number % partitions)
    assert producer.flush(WITHIN_S) == 0


class ClockAhead(SystemClock):
    """This machine's clock, but later."""

    ahead_ms = 0

    def lease_ms(self) -> float:
        """Return the time by which leases end."""
        return super().lease_ms() + self.ahead_ms


def stop_working_when_lost(group: Group, kill_broker: Callable[[int], None]) -> None:
    """Process a batch while the broker dies, until the batch itself reports the lost claim."""
    clock = ClockAhead()
    with group.batch(group.open(interval_ms=SHORT_INTERVAL_MS, clock=clock), "orders") as batch:
        batch.begin_processing()
        kill_broker(1)
        clock.ahead_ms = 2 * SHORT_INTERVAL_MS
        wait_until(lambda: batch._guard.lost is not None, "the batch has lost its claim")
        raise RuntimeError("the work was cut off")


def wait_for_drained(group: Group) -> None:
    """Start later runs until the topic is drained."""

    def is_drained() -> bool:
        idle = group.work(group.open(interval_ms=SHORT_INTERVAL_MS), "orders").idle
        return idle is not None and idle.reason is IdleReason.DRAINED

    wait_until(is_drained, "the topic is drained", ignored=MarshalError)
