"""The Dagster events that record a batch.

A completed batch is recorded as a materialization. Failed batches, dropped ranges and messages that retention deleted
are recorded as observations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagster import AssetMaterialization, AssetObservation, MetadataValue, OpExecutionContext

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.ops.config import BatchSpec
from marshal_dagster.ops.metadata import CompletedBatch, lost_offsets, own_metadata, ranges_table
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
        """Return the materialization of a completed batch; `partition` is the Dagster partition, if there is one."""
        return AssetMaterialization(
            self.spec.asset_key,
            partition=None if partition is None else str(partition),
            description=f"Batch {done.batch_id} of group {self.group!r}",
            metadata={
                **own_metadata(batch),
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
        """Record the ranges that an at-most-once batch dropped, whether it succeeded or failed.

        The log line about them comes from the batch itself.
        """
        dropped = set(batch.dropped)
        if not dropped:
            return
        reports = [report for report in batch.report() if report.range in dropped]
        metadata = {
            "dropped": ranges_table(reports),
            "dropped_offsets": sum(report.range.width for report in reports),
        }
        try:
            self._observe(
                batch,
                "At most once: these offsets were committed, but their messages were not, or possibly not, processed.",
                metadata,
            )
        except Exception as error:  # noqa: BLE001 - report the error of the batch, not this one
            self.context.log.warning("the dropped ranges could not be recorded in the run's events: %s", error)

    def observe_failed(self, batch: ClaimedBatch, error: Exception) -> None:
        """Record the ranges and the error of a failed batch whose plan stays open.

        If the plan fails too many times, later runs report this error.
        """
        if not batch.all_ranges or batch.committed or batch.mode is DeliveryMode.AT_MOST_ONCE:
            return
        failed = failed_batch(self.group, self.spec.topic, batch.batch_id, batch.report(), error)
        try:
            self.context.log_event(failed)
        except Exception as unrecorded:  # noqa: BLE001 - report the error of the batch, not this one
            self.context.log.warning("the failed batch could not be recorded in the run's events: %s", unrecorded)

    def observe_lost(self, batch: ClaimedBatch) -> None:
        """Record the messages of a committed batch that retention had deleted before they were read."""
        reports = [report for report in batch.report() if report.range.lost is not None]
        if not reports:
            return
        lost = [
            {"partition": range_.partition, "start": range_.start, "end": range_.first_readable}
            for range_ in (report.range for report in reports)
        ]
        self._observe(
            batch,
            "Retention deleted these messages before they were read. The batch continued after them.",
            {"lost": MetadataValue.json(lost), "lost_offsets": lost_offsets(reports)},
        )

    def _observe(self, batch: ClaimedBatch, description: str, metadata: Mapping[str, Any]) -> None:
        self.context.log_event(
            AssetObservation(
                announcements_key(self.spec.topic),
                description=description,
                metadata={**metadata, "batch_id": batch.batch_id, "group": self.group},
            )
        )
