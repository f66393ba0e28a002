"""Claimed batches: exact offset ranges held by a run, in the three delivery modes (PROTOCOL.md 6).

Floor 3: stands on `coordination`, `kafka` and `spark`, knows nothing of Dagster. A `Delivery` is what one process needs
for batch after batch; each `ClaimedBatch` is a tenure of its own: claim, plan, process, commit, release. It holds whole
partitions (`whole`) or ranges of them (`ranged`).
"""

from marshal_dagster.delivery.batch import ClaimedBatch
from marshal_dagster.delivery.delivery import Delivery
from marshal_dagster.delivery.requests import (
    DEFAULT_MAX_ATTEMPTS,
    Advice,
    Advise,
    BatchObserver,
    BatchRequest,
    Idle,
    IdleReason,
    PartitionReport,
    Phases,
    RangeOptions,
)

__all__ = [
    "DEFAULT_MAX_ATTEMPTS",
    "Advice",
    "Advise",
    "BatchObserver",
    "BatchRequest",
    "ClaimedBatch",
    "Delivery",
    "Idle",
    "IdleReason",
    "PartitionReport",
    "Phases",
    "RangeOptions",
]
