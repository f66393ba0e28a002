"""Claimed batches: exact offset ranges held by a run, in the three delivery modes (protocol.md, section 6).

It imports `coordination`, `kafka` and `spark`, knows nothing of Dagster. A `BatchSession` is what one process
needs for batch after batch; each `ClaimedBatch` is a tenure of its own: claim, plan, process, commit, release. It
holds whole partitions (`partition_source`) or ranges of them (`range_source`).
"""

from marshal_dagster.batches.batch import BatchObserver, ClaimedBatch
from marshal_dagster.batches.request import Advice, Advise, BatchRequest, RangeOptions
from marshal_dagster.batches.result import Idle, IdleReason, PartitionReport, PhaseDurations
from marshal_dagster.batches.session import BatchSession
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS

__all__ = [
    "DEFAULT_MAX_ATTEMPTS",
    "Advice",
    "Advise",
    "BatchObserver",
    "BatchRequest",
    "BatchSession",
    "ClaimedBatch",
    "Idle",
    "IdleReason",
    "PartitionReport",
    "PhaseDurations",
    "RangeOptions",
]
