"""Each delivery mode keeps its promise when a member dies before or after any of its appends, or while it processes.

The broker is real. The member dies inside this process: from one moment on none of its calls reaches the log, and it
neither releases nor sends heartbeats. Its successor knows that it is dead, as it would from Dagster.
`test_killed_processes` has similar tests with processes that end by SIGKILL, whose successors wait until the claims are
stale, and `test_kill_points_sinks` has tests with Spark and the real sinks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from tests.real.conftest import MakeTopic
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Message, Side, drain, read_messages

HEARTBEAT_INTERVAL_MS = 60_000
"""So long that no background heartbeat is sent and no lease ends: `COMMITS` counts heartbeats."""
PARTITIONS = 3
MESSAGES = 60

APPENDS = ("GroupSettings", "ClaimingPartition", "DataTopic", "Heartbeat", "ClaimingMessages", "ReleasingPartition")
STEPS = [KillPoint(side, record) for record in APPENDS for side in Side]
POSITIONS = [KillPoint(side, "Heartbeat", 2) for side in Side]
"""On a group's first claim, the lowest partition gets its position last."""
COMMITS = [KillPoint(side, "Heartbeat", 3) for side in Side]
PROCESSING = None

KILLS = [*STEPS, *POSITIONS, *COMMITS, PROCESSING]

OpenDelivery = Callable[..., tuple[BatchSession, KillableLog]]


@pytest.fixture
def open_delivery(connection: KafkaConnection, coordination_topic: str, topics: Topics) -> Iterator[OpenDelivery]:
    """A function that opens members of groups. Each dies at the given step."""
    opened: list[KillableLog] = []

    def open_one(group: str, mode: DeliveryMode, at: KillPoint | None = None) -> tuple[BatchSession, KillableLog]:
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
            is_dead=lambda _: True,
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


@dataclass(frozen=True, slots=True)
class Death:
    """A member that died at `at`, or after 10 messages, in its only batch."""

    at: KillPoint | None
    group: str
    processed: Counter[Message]
    batch: set[Message]
    """All messages of the ranges of its batch."""


def deaths(open_delivery: OpenDelivery, topic: str, connection: KafkaConnection, mode: DeliveryMode) -> list[Death]:
    """Have a member of a group of its own process one batch of 30 messages and die, for each of `KILLS`."""
    found = []
    for at in KILLS:
        group = new_instance_id("group")
        member, log = open_delivery(group, mode, at)
        account = Account(connection, log, die_after=10 if at is None else None)
        batch = member.claimed_batch(BatchRequest(topic=topic, max_records=30))
        with pytest.raises(KilledError), batch:
            account.process(batch)
        found.append(Death(at, group, account.processed, planned(batch)))
    return found


def in_all(
    open_delivery: OpenDelivery, topic: str, connection: KafkaConnection, mode: DeliveryMode, death: Death
) -> Counter[Message]:
    """Have a successor process the rest. Return how often each message was processed."""
    successor, _ = open_delivery(death.group, mode)
    account = Account(connection)
    drain(lambda: successor.claimed_batch(BatchRequest(topic=topic, max_records=40)), account.process)
    return death.processed + account.processed


def test_at_least_once_loses_nothing(
    open_delivery: OpenDelivery, filled_topic: str, connection: KafkaConnection
) -> None:
    """Every message is processed. Messages processed twice belong to the one batch that was not committed."""
    mode = DeliveryMode.AT_LEAST_ONCE
    for death in deaths(open_delivery, filled_topic, connection, mode):
        total = in_all(open_delivery, filled_topic, connection, mode, death)
        assert set(total) == all_messages(), death.at
        assert {message for message, count in total.items() if count > 1} <= death.batch, death.at
        assert max(total.values()) <= 2, death.at


def test_at_most_once_repeats_nothing(
    open_delivery: OpenDelivery, filled_topic: str, connection: KafkaConnection
) -> None:
    """No message is processed twice. Messages that are never processed belong to the one batch of the dead member."""
    mode = DeliveryMode.AT_MOST_ONCE
    for death in deaths(open_delivery, filled_topic, connection, mode):
        total = in_all(open_delivery, filled_topic, connection, mode, death)
        assert max(total.values()) == 1, death.at
        dropped = all_messages() - set(total)
        assert dropped <= death.batch, death.at
        if death.at is not None and death.at in [*STEPS, *POSITIONS] and death.at.record != "ReleasingPartition":
            assert not dropped, death.at
