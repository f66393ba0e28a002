"""A member in its own process: `python -m tests.faults.worker JSON`; `tests.faults.run` starts them.

It works batch after batch until it is asked to stop. A consumer in place of Spark reads the ranges. To process a
message means to write a line into the journal. In effectively once a file sink stores the rows.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, RangeOptions
from marshal_dagster.coordination import snapshot_writer
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.errors import CoordinationLogChangedError, MarshalError, TopicNotFoundError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import RANGES, Owner, Range
from marshal_dagster.sinks import FileSink
from tests.fault_harness.journal import Journal, now_ms
from tests.faults.journal import ENTRY, Claimed, Halted, Known, Left, Processed, Refused, part
from tests.real.kill_points import KillableLog, KillPoint, Side, die, read_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GIVEN_UP = 3
"""The exit code of a run that failed and should be repeated in another process."""
MOST_ATTEMPTS = 1_000
"""Faults may interrupt the same plan more often than five times."""


class Orders(BaseModel):
    """The orders for a member. It receives later requests through files in `folder`.

    `stop` asks it to end, `dead/<run id>` reports that a run is over, and `accept-loss` lets it continue in any mode
    after retention deleted messages.
    """

    bootstrap_servers: str
    coordination_topic: str
    topic: str
    group: str
    run_id: str
    mode: DeliveryMode
    folder: Path
    journal: Path
    heartbeat_interval_ms: int
    max_records: int
    max_claims: int | None
    slow_ms: int
    seed: int
    stops: bool = False
    """Whether it stops with SIGSTOP at the step where it otherwise kills itself."""
    step_side: Side | None = None
    step_record: str = ""
    step_count: int = 1
    after_messages: int | None = None
    with_snapshots: bool = False
    lease_rate: float = 1.0
    off_ms: int = 0
    """The error of its time of day in milliseconds."""
    ranges: RangeOptions | None = None
    """How it claims ranges, if the group uses them."""
    is_patient: bool = False
    """Whether it continues in the same process as long as the log exists."""


class SteppedLog(KillableLog):
    """A log that halts its member at a step, once, and continues afterwards if the member does."""

    def _die(self) -> None:
        if self.at is not None and self.kill is not None:
            self.at = None
            self.kill()


class WrongClock(SystemClock):
    """A clock with a wrong time of day and a lease clock that runs at another rate."""

    def __init__(self, rate: float, off_ms: int) -> None:
        self._rate = rate
        self._off_ms = off_ms

    def wall_ms(self) -> int:
        """Return the Unix time in milliseconds that this clock shows."""
        return super().wall_ms() + self._off_ms

    def lease_ms(self) -> float:
        """Return the milliseconds since boot by this clock."""
        return super().lease_ms() * self._rate


class Worker:
    """One run of a member."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.journal = Journal(orders.journal, ENTRY)
        self.chance = random.Random(f"{orders.seed} {orders.run_id}")
        self.connection = KafkaConnection(bootstrap_servers=orders.bootstrap_servers, timeout_s=5)
        self.after_messages = orders.after_messages
        self.delivery = self._open()
        self.sink = self._open_sink()

    def work(self) -> int:
        """Work until the member is asked to stop; return 3 if the run failed and should be repeated."""
        while not (self.orders.folder / "stop").exists():
            if self._work_once():
                return GIVEN_UP
        self._report_state()
        self.delivery.close()
        return 0

    def _work_once(self) -> bool:
        """Try a batch; return True if the run should end."""
        accepts_loss = True if (self.orders.folder / "accept-loss").exists() else None
        request = BatchRequest(
            topic=self.orders.topic,
            max_records=self.orders.max_records,
            max_claims=self.orders.max_claims,
            max_attempts=MOST_ATTEMPTS,
            allow_data_loss=accepts_loss,
            ranges=self.orders.ranges,
        )
        batch: ClaimedBatch | None = None
        try:
            batch = self.delivery.claimed_batch(request, self.sink)
            with batch:
                if batch.idle is None:
                    self._process(batch)
        except (MarshalError, AssertionError) as error:
            self._report_end(batch, error)
            time.sleep(0.1)
            if isinstance(error, CoordinationLogChangedError | TopicNotFoundError):
                return True
            return not self.orders.is_patient and self.chance.random() < 0.5
        if batch.idle is None:
            self._report_end(batch, None)
        else:
            time.sleep(0.1)
        return False

    def _process(self, batch: ClaimedBatch) -> None:
        parts = tuple(part(one) for one in batch.all_ranges)
        self.journal.write(Claimed(at_ms=now_ms(), instance=batch.batch_id, parts=parts))
        batch.begin_processing()
        found = read_messages(self.connection, batch.ranges, timeout_s=4)
        if batch.mode is DeliveryMode.EFFECTIVELY_ONCE:
            self._write(batch, found)
            return
        by_partition = {range_.partition: range_ for range_ in batch.ranges}
        for partition, offset in sorted(found):
            self._take_time(batch)
            self._process_one(batch, by_partition[partition], offset)

    def _write(self, batch: ClaimedBatch, found: list[tuple[int, int]]) -> None:
        from tests.sink_outputs import FakeFrame

        for _ in found:
            self._take_time(batch)
        rows = tuple((partition, offset, f"{partition}/{offset}") for partition, offset in found)
        batch.write(cast("DataFrame", FakeFrame(["partition", "offset", "value"], rows)))

    def _take_time(self, batch: ClaimedBatch) -> None:
        """Spend the time of one message; raise the error if the claim is lost, as Spark's jobs are cancelled."""
        if self.after_messages is not None:
            self.after_messages -= 1
            if self.after_messages < 0:
                self.after_messages = None
                self._halt()
        time.sleep(self.chance.random() * self.orders.slow_ms / 1_000)
        if batch._guard.lost is not None:
            raise batch._guard.lost

    def _process_one(self, batch: ClaimedBatch, one: ClaimedRange, offset: int) -> None:
        claim = batch._claimer._claim_set.claims.get(one.partition)
        at_ms = now_ms()
        lease_ends_ms = None
        if claim is not None:
            ends_ms = claim.lease.sent_ms + 1.9 * self.orders.heartbeat_interval_ms  # computed without the library
            lease_ends_ms = at_ms + (ends_ms - batch._claimer.clock.lease_ms()) / self.orders.lease_rate
        self.journal.write(
            Processed(at_ms=at_ms, instance=batch.batch_id, part=part(one), offset=offset, lease_ends_ms=lease_ends_ms)
        )

    def _report_end(self, batch: ClaimedBatch | None, error: Exception | None) -> None:
        at_ms, text = now_ms(), "" if error is None else str(error)
        kind = None if error is None else type(error).__name__
        if batch is None or (kind is not None and not batch.all_ranges):
            instance = "" if batch is None else batch.batch_id
            self.journal.write(Refused(at_ms=at_ms, instance=instance, error=str(kind), text=text))
            return
        dropped = tuple(part(one) for one in batch.dropped)
        committed = tuple(part(each.range) for each in batch.report() if each.state in {"committed", "skipped"})
        self.journal.write(
            Left(at_ms=at_ms, instance=batch.batch_id, committed=committed, dropped=dropped, error=kind, text=text)
        )

    def _report_state(self) -> None:
        """Write the state of each key for which this reader is certain."""
        reader = self.delivery._followed
        if reader is None or reader.failure is not None:
            return
        report = partial(Known, at_ms=now_ms(), instance=self.orders.run_id)
        for number, read in reader.world.partitions.items():
            keys = [(name, place, key) for name, group in read.groups.items() for place, key in group.keys.items()]
            for name, (topic, partition), key in keys if read.certain else ():
                owner = (None,) * 4 if key.owner is None else (*key.owner, key.last_beat_ms)
                self.journal.write(
                    report(
                        coordination_partition=number,
                        next_offset=read.next_offset,
                        group=name,
                        topic=topic,
                        partition=partition,
                        state=(
                            *owner,
                            key.offset,
                            key.plan_end,
                            key.plan_attempts,
                            key.generation,
                            key.data_topic_id,
                        ),
                        ranges=tuple(_range_state(range_) for range_ in key.ranges),
                    )
                )

    def _halt(self) -> None:
        self.journal.write(Halted(at_ms=now_ms(), instance=self.orders.run_id))
        if self.orders.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            die()

    def _open(self) -> BatchSession:
        orders = self.orders
        log = KafkaLog(self.connection, orders.coordination_topic, orders.heartbeat_interval_ms)
        side = orders.step_side
        at = None if side is None else KillPoint(side, orders.step_record, orders.step_count)
        features = () if orders.ranges is None else (RANGES,)
        return BatchSession(
            log=SteppedLog(log, at, self._halt),
            data=Topics(self.connection),
            connection=self.connection,
            group=orders.group,
            client="member",
            run_id=orders.run_id,
            settings=GroupSettings(orders.heartbeat_interval_ms, RuleSet.NATIVE, orders.mode, features),
            is_dead=self._is_dead,
            clock=WrongClock(orders.lease_rate, orders.off_ms),
            snapshots=kafka_snapshots(self.connection, orders.coordination_topic) if orders.with_snapshots else None,
        )

    def _open_sink(self) -> FileSink | None:
        if self.orders.mode is not DeliveryMode.EFFECTIVELY_ONCE:
            return None
        from tests.sink_outputs import FakeFileSink

        return FakeFileSink(self.orders.folder / "output")

    def _is_dead(self, owner: Owner) -> bool:
        return (self.orders.folder / "dead" / owner.instance.rpartition(".")[0]).exists()


def _range_state(each: Range) -> tuple[object, ...]:
    owner = (None,) * 4 if each.owner is None else (*each.owner, each.last_beat_ms)
    return (each.start, each.end, each.phase, *owner, each.attempts)


def main() -> int:
    """Run the member that the orders describe."""
    orders = Orders.model_validate_json(sys.argv[1])
    snapshot_writer.OLD_MS = -(10**12)  # type: ignore[misc] # a snapshot is written at each end that has anything new
    return Worker(orders).work()


if __name__ == "__main__":
    sys.exit(main())
