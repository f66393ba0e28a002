"""The events that record a batch: a materialization, and observations of what failed, was dropped or was lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagster import AssetMaterialization, AssetObservation, MetadataValue, OpExecutionContext

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.ops.config import BatchSpec
from marshal_dagster.ops.metadata import CompletedBatch, lost_offsets, ranges_table
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.runs.failed_batches import failed_batch
from marshal_dagster.runs.names import announcements_key


@dataclass(frozen=True, slots=True)
class BatchEvents:
    """The events of the batches of one op or asset in one run."""

    context: OpExecutionContext
    group: str
    spec: BatchSpec

    def materialization(self, batch: ClaimedBatch, done: CompletedBatch, partition: int | None) -> AssetMaterialization:
        """Build the materialization of a batch that is over; `partition` is the Dagster partition, if there is one."""
        return AssetMaterialization(
            self.spec.asset_key,
            partition=None if partition is None else str(partition),
            description=f"Batch {done.batch_id} of group {self.group!r}",
            metadata={
                **done.numbers,
                "ranges": done.ranges,
                "delivery": done.delivery.value,
                "batch_id": done.batch_id,
                "group": self.group,
                "topic": self.spec.topic,
                **({} if batch.outcome is None or batch.outcome.note is None else {"output": batch.outcome.note}),
                **({} if batch.advice is None else {"assigned": batch.advice.text}),
            },
        )

    def observe_dropped(self, batch: ClaimedBatch) -> None:
        """Record what at most once has dropped, however the batch ended; the batch itself logs it."""
        dropped = set(batch.dropped)
        if not dropped:
            return
        reports = [report for report in batch.report() if report.range in dropped]
        metadata = {
            "dropped": ranges_table(reports),
            "dropped_offsets": sum(report.range.width for report in reports),
        }
        try:
            self._observe(batch, "At most once: committed, and never processed, or possibly not.", metadata)
        except Exception as error:  # noqa: BLE001 - the batch's own error is the one to report
            self.context.log.warning("what was dropped could not be written into the run's events: %s", error)

    def observe_failed(self, batch: ClaimedBatch, error: Exception) -> None:
        """Record the ranges and the error of a batch whose plan stays open, for the run that gives it up."""
        if not batch.all_ranges or batch.committed or batch.mode is DeliveryMode.AT_MOST_ONCE:
            return
        failed = failed_batch(self.group, self.spec.topic, batch.batch_id, batch.report(), error)
        try:
            self.context.log_event(failed)
        except Exception as unrecorded:  # noqa: BLE001 - the batch's own error is the one to report
            self.context.log.warning("the failed batch could not be written into the run's events: %s", unrecorded)

    def observe_lost(self, batch: ClaimedBatch) -> None:
        """Record what retention has deleted of a batch that was committed."""
        reports = [report for report in batch.report() if report.range.lost is not None]
        if not reports:
            return
        lost = [
            {"partition": range_.partition, "start": range_.start, "end": range_.first_readable}
            for range_ in (report.range for report in reports)
        ]
        self._observe(
            batch,
            "Retention deleted these messages before they were read; the batch went on behind them.",
            {"lost": MetadataValue.json(lost), "lost_offsets": lost_offsets(reports)},
        )

    def _observe(self, batch: ClaimedBatch, description: str, metadata: Mapping[str, Any]) -> None:
        """Observe the topic."""
        self.context.log_event(
            AssetObservation(
                announcements_key(self.spec.topic),
                description=description,
                metadata={**metadata, "batch_id": batch.batch_id, "group": self.group},
            )
        )
