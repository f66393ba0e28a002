"""A group member in its own process, for tests that kill or stop processes.

Run it with `python -m tests.real.batch_worker JSON`. It processes one batch after another without Spark: it reads the
ranges with a Kafka consumer and appends one line `partition offset epoch` for each message to a file. This output
cannot be undone. The worker reports each step as one line on stdout.
"""

import os
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.heartbeats import ReasonToStop
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from tests.real.kill_points import KillableLog, KillPoint, Side, die, read_messages


def parent_ended() -> ReasonToStop:
    """Return a reason to stop that applies once the parent of this process has ended."""
    parent = os.getppid()
    return lambda: "the parent process ended" if os.getppid() != parent else None


class Orders(BaseModel):
    """The worker's parameters.

    It waits for the file `pause_until` before it processes, and dies after `kill_after_messages` messages. With
    `watch_parent` it does not wait for longer than its parent lives.
    """

    bootstrap_servers: str
    coordination_topic: str
    topic: str
    group: str
    run_id: str
    mode: DeliveryMode
    output: Path
    heartbeat_interval_ms: int
    max_records: int = 30
    kill_side: Side | None = None
    kill_record: str = "Heartbeat"
    kill_count: int = 1
    kill_after_messages: int | None = None
    pause_until: Path | None = None
    watch_parent: bool = False


def open_delivery(orders: Orders) -> BatchSession:
    """Open the member's session."""
    connection = KafkaConnection(bootstrap_servers=orders.bootstrap_servers)
    side = orders.kill_side
    at = None if side is None else KillPoint(side, orders.kill_record, orders.kill_count)
    return BatchSession(
        log=KillableLog(KafkaLog(connection, orders.coordination_topic, orders.heartbeat_interval_ms), at, die),
        data=Topics(connection),
        connection=connection,
        group=orders.group,
        client="worker",
        run_id=orders.run_id,
        settings=GroupSettings(orders.heartbeat_interval_ms, RuleSet.NATIVE, orders.mode),
        reasons_to_stop=[parent_ended()] if orders.watch_parent else [],
    )


def process(batch: ClaimedBatch, orders: Orders, connection: KafkaConnection) -> None:
    """Read the batch's messages and append each to the output."""
    batch.begin_processing()
    messages = read_messages(connection, batch.ranges)
    say("processing")
    while orders.pause_until is not None and not orders.pause_until.exists():
        if orders.watch_parent:
            batch.check()
        time.sleep(0.02)
    epochs = {range_.partition: range_.epoch for range_ in batch.ranges}
    with orders.output.open("a", buffering=1) as output:
        for count, (partition, offset) in enumerate(messages):
            if count == orders.kill_after_messages:
                die()
            output.write(f"{partition} {offset} {epochs[partition]}\n")


def say(text: str) -> None:
    """Write one line to stdout, for the parent process."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Process batches until the topic is drained. Return 1 if a batch failed."""
    orders = Orders.model_validate_json(sys.argv[1])
    delivery = open_delivery(orders)
    while True:
        batch = delivery.claimed_batch(BatchRequest(topic=orders.topic, max_records=orders.max_records))
        try:
            with batch:
                if batch.idle is None:
                    say(f"claimed {' '.join(str(one) for one in batch.ranges)}")
                    process(batch, orders, delivery.connection)
        except MarshalError as error:
            say(f"failed {type(error).__name__}: {error}")
            return 1
        if batch.idle is None:
            say("committed")
        elif batch.idle.reason == "drained":
            say("drained")
            return 0
        else:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
