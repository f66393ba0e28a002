"""Each delivery mode keeps its promise when a member dies before or after any of its appends, or while it processes.

The broker is real. The member dies inside this process: from one moment on none of its calls reaches the log, and it
neither releases nor sends heartbeats. Its successors wait until its claims are stale. `test_killed_processes` has
similar tests with processes that end by SIGKILL, `test_kill_points_sinks` with Spark and the real sinks.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from tests.real.conftest import MakeTopic
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Message, Side, drain, read_messages

HEARTBEAT_INTERVAL_MS = 2_000
PARTITIONS = 3
MESSAGES = 60

APPENDS = ("GroupSettings", "ClaimingPartition", "DataTopic", "Heartbeat", "ClaimingMessages", "ReleasingPartition")
STEPS = [KillPoint(side, record) for record in APPENDS for side in Side]
POSITIONS = [KillPoint(side, "Heartbeat", 2) for side in Side]
"""On a group's first claim, the lowest partition gets its position last."""
COMMITS = [KillPoint(side, "Heartbeat", 3) for side in Side]
PROCESSING = None

OpenDelivery = Callable[..., tuple[BatchSession, KillableLog]]


@pytest.fixture
def open_delivery(connection: KafkaConnection, coordination_topic: str, topics: Topics) -> Iterator[OpenDelivery]:
    """A function that opens members of one group. Each dies at the given step."""
    group = new_instance_id("group")
    opened: list[KillableLog] = []

    def open_one(mode: DeliveryMode, at: KillPoint | None = None) -> tuple[BatchSession, KillableLog]:
        log = KillableLog(KafkaLog(connection, coordination_topic, HEARTBEAT_INTERVAL_MS), at)
        opened.append(log)
        delivery = BatchSession(
            log=log,
            data=topics,
            connection=connection,
            group=group,
            client="tester",
            run_id=f"run{len(opened)}",
            settings=GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, mode),
        )
        return delivery, log

    yield open_one
    for log in opened:
        log.close()


@pytest.fixture
def filled_topic(topic: MakeTopic, fill: Callable[[str, int, int], None]) -> str:
    """A data topic with 20 messages in each of 3 partitions."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, MESSAGES)
    return name


def all_messages() -> set[Message]:
    """Return all messages of `filled_topic`."""
    return {(partition, offset) for partition in range(PARTITIONS) for offset in range(MESSAGES // PARTITIONS)}


class Account:
    """The messages processed by a member: an output that cannot be undone."""

    def __init__(
        self, connection: KafkaConnection, log: KillableLog | None = None, die_after: int | None = None
    ) -> None:
        self.processed: Counter[Message] = Counter()
        self.ranges: set[Message] = set()
        self._connection = connection
        self._log = log
        self._die_after = die_after

    def process(self, batch: ClaimedBatch) -> None:
        """Process the batch's messages one by one."""
        batch.begin_processing()
        for count, message in enumerate(read_messages(self._connection, batch.ranges)):
            if count == self._die_after and self._log is not None:
                self._log.dead = True
                raise KilledError
            self.processed[message] += 1


def planned(batch: ClaimedBatch) -> set[Message]:
    """Return all messages of the batch's ranges."""
    return {(range_.partition, offset) for range_ in batch.all_ranges for offset in range(range_.start, range_.end)}


def run_and_die(
    delivery: BatchSession, log: KillableLog, topic: str, connection: KafkaConnection, at: KillPoint | None
) -> tuple[Account, set[Message]]:
    """Process one batch of 30 messages. Die at `at`, or after 10 messages."""
    account = Account(connection, log, die_after=10 if at is None else None)
    batch = delivery.claimed_batch(BatchRequest(topic=topic, max_records=30))
    with pytest.raises(KilledError), batch:
        account.process(batch)
    return account, planned(batch)


@pytest.mark.parametrize("at", [*STEPS, *POSITIONS, *COMMITS, PROCESSING], ids=str)
def test_at_least_once_loses_nothing(
    open_delivery: OpenDelivery, filled_topic: str, connection: KafkaConnection, at: KillPoint | None
) -> None:
    """Every message is processed. Messages processed twice belong to the one batch that was not committed."""
    first, log = open_delivery(DeliveryMode.AT_LEAST_ONCE, at)
    dead, its_batch = run_and_die(first, log, filled_topic, connection, at)

    successor, _ = open_delivery(DeliveryMode.AT_LEAST_ONCE)
    account = Account(connection)
    drain(lambda: successor.claimed_batch(BatchRequest(topic=filled_topic, max_records=40)), account.process)

    total = dead.processed + account.processed
    assert set(total) == all_messages()
    assert {message for message, count in total.items() if count > 1} <= its_batch
    assert max(total.values()) <= 2


@pytest.mark.parametrize("at", [*STEPS, *POSITIONS, *COMMITS, PROCESSING], ids=str)
def test_at_most_once_repeats_nothing(
    open_delivery: OpenDelivery, filled_topic: str, connection: KafkaConnection, at: KillPoint | None
) -> None:
    """No message is processed twice. Messages that are never processed belong to the one batch of the dead member."""
    first, log = open_delivery(DeliveryMode.AT_MOST_ONCE, at)
    dead, its_batch = run_and_die(first, log, filled_topic, connection, at)

    successor, _ = open_delivery(DeliveryMode.AT_MOST_ONCE)
    account = Account(connection)
    drain(lambda: successor.claimed_batch(BatchRequest(topic=filled_topic, max_records=40)), account.process)

    total = dead.processed + account.processed
    assert max(total.values()) == 1
    dropped = all_messages() - set(total)
    assert dropped <= its_batch
    if at is not None and at in [*STEPS, *POSITIONS] and at.record != "ReleasingPartition":
        assert not dropped
