"""What the batches of one process share."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marshal_dagster.batches.batch import BatchObserver, ClaimedBatch
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.request import Advise, BatchRequest
from marshal_dagster.coordination.claimer import Claimer, Member, assume_alive, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_settings import check_settings
from marshal_dagster.coordination.heartbeats import ReasonToStop
from marshal_dagster.coordination.log import CoordinationLog
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import DEFAULT_TIMEOUT_S, KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, coordination_partition
from marshal_dagster.protocol.open_plans import OpenPlan, open_plans
from marshal_dagster.protocol.state import Owner, enables_ranges
from marshal_dagster.sinks import Sink

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

logger = logging.getLogger(__name__)

Announce = Callable[[Sequence[ClaimedRange]], None]
"""Told the ranges of an at-most-once batch just before they are committed and may be lost."""


def announce_to_log(ranges: Sequence[ClaimedRange]) -> None:
    """Write the ranges into the log."""
    logger.info("about to commit before processing: %s", ", ".join(str(range_) for range_ in ranges))


@dataclass(slots=True, kw_only=True)
class BatchSession:
    """What the batches of one process share: connections, the world state, and in whose name they claim.

    `run_id` is put in front of each instance id, `client` is for people. `is_dead` tells of an owner that its run is
    over; `reasons_to_stop` are asked four times in each heartbeat interval. `data` are the data cluster's topics; its
    `connection` is handed to Spark. Where the log is long it is read on from one of `snapshots`, which are renewed at
    the end. `observer` is told what records and batches came to. `advise` limits batches that name no partitions and do
    not take the entire topic.
    """

    log: CoordinationLog
    data: "Topics"
    connection: "KafkaConnection"
    group: str
    client: str
    run_id: str
    settings: GroupSettings
    is_dead: Callable[[Owner], bool] = assume_alive
    announce: Announce = announce_to_log
    reasons_to_stop: Sequence[ReasonToStop] = ()
    clock: Clock | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    snapshots: Snapshots | None = None
    observer: BatchObserver | None = None
    advise: Advise | None = None
    _followed: Rationalizer | None = None

    def __post_init__(self) -> None:
        check_settings(self.settings, 0)

    def claimed_batch(self, request: BatchRequest, sink: Sink | None = None) -> ClaimedBatch:
        """Give a batch to be used in a `with` block; nothing is claimed before it is entered.

        In a group that enables ranges it claims these, of one `RangeOptions` if the request says nothing. Raises
        `ConfigurationError` for what does not go together.
        """
        effectively_once = self.settings.delivery is DeliveryMode.EFFECTIVELY_ONCE
        if effectively_once and sink is None:
            raise ConfigurationError("delivery is effectively_once: give the batch a sink that takes each range once")
        if sink is not None and not effectively_once:
            raise ConfigurationError(
                f"delivery is {self.settings.delivery}, a sink takes part in effectively_once only: change the "
                "group's delivery, or write the frame yourself"
            )
        if request.ranges is not None and not enables_ranges(self.settings):
            raise ConfigurationError(
                "ranges are claimed only in groups whose settings name the feature 'ranges', with rule set 'native': "
                "leave ranges out, or enable them for the group"
            )
        if enables_ranges(self.settings) and request.claim_entire_topic:
            raise ConfigurationError(
                f"claim_entire_topic takes whole partitions, the members of group {self.group!r} claim ranges "
                "of them: leave "
                "claim_entire_topic out, or switch the feature 'ranges' off for the group"
            )
        if enables_ranges(self.settings) and sink is not None and not getattr(sink, "supports_unordered_ranges", False):
            raise ConfigurationError(
                f"{sink!r} keeps one position for each partition, the members of group {self.group!r} claim ranges in "
                "any order: use a sink that keeps ranges, or switch the feature 'ranges' off for the group"
            )
        return self._batch(request, sink)

    def positions_batch(self, request: BatchRequest) -> ClaimedBatch:
        """Give a batch that only gives the keys of `request.partitions` what ranges of them need; it is idle."""
        whole = replace(request, ranges=None, max_records=None, max_claims=None)
        return self._batch(whole, None, only_positions=True)

    def _batch(self, request: BatchRequest, sink: Sink | None, *, only_positions: bool = False) -> ClaimedBatch:
        topic, rationalizer = request.topic, self._rationalizer(request.topic)
        member = Member(self.group, self.client, new_instance_id(self.run_id))
        claimer = Claimer(rationalizer, member, topic, self.settings, clock=self.clock, observer=self.observer)
        context = BatchContext(
            request=request,
            group=self.group,
            run_id=self.run_id,
            settings=self.settings,
            data=self.data,
            rationalizer=rationalizer,
            clock=claimer.clock,
            is_dead=self.is_dead,
        )
        by_ranges = None
        if enables_ranges(self.settings) and not only_positions:
            by_ranges = RangeClaimer(
                rationalizer, member.with_new_instance(), topic, self.settings, clock=self.clock, observer=self.observer
            )
        return ClaimedBatch(self, context, claimer, by_ranges, sink, only_positions=only_positions)

    def batches(
        self,
        request: BatchRequest,
        sink: Sink | None = None,
        *,
        max_batches: int | None = None,
        time_budget_s: float | None = None,
    ) -> Iterator[ClaimedBatch]:
        """Give batch after batch, each to be used in a `with` block, until one is idle or a limit is reached.

        The last one given may be idle: its `idle` says why. No batch is begun after `time_budget_s` seconds.
        """
        began_s = time.monotonic()
        count = 0
        while max_batches is None or count < max_batches:
            if time_budget_s is not None and count and time.monotonic() - began_s >= time_budget_s:
                return
            batch = self.claimed_batch(request, sink)
            yield batch
            if batch.idle is not None:
                return
            count += 1

    def open_plans(self, topic: str, *, read_on: bool = False) -> list[OpenPlan]:
        """Return the group's open plans in `topic` that no live member holds, as last read; most attempts first.

        With `read_on` the log is first read to its present end, which raises `UnavailableError`,
        `TopicNotFoundError`, `CoordinationLogChangedError`.
        """
        if read_on:
            self._rationalizer(topic).catch_up()
        if self._followed is None:
            return []
        wall_ms = (self.clock or SystemClock()).wall_ms()
        with self._followed.lock:
            world = self._followed.world
            return open_plans(world, wall_ms, group=self.group, topic=topic, is_dead=self.is_dead)

    def close(self) -> None:
        """Renew what snapshots are old, then let go of all connections."""
        followed, snapshots = self._followed, self.snapshots
        try:
            if followed is not None and followed.failure is None and snapshots is not None:
                renew_snapshots(followed, snapshots, self.clock)
        finally:
            self.log.close()
            self.data.close()

    def _rationalizer(self, topic: str) -> Rationalizer:
        """Give the one rationalizer on the log; it follows what the topics of all batches need."""
        if self._followed is None:
            timeout_s = min(self.timeout_s, max(1.0, self.settings.heartbeat_interval_ms / 4_000))
            self._followed = Rationalizer(self.log, topics=[topic], timeout_s=timeout_s, snapshots=self.snapshots)
        partition = coordination_partition(topic, self._followed.identity.partitions)
        if partition not in self._followed.world.partitions:
            self._followed.follow_all()
        return self._followed
