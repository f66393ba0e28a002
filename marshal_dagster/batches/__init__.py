"""Claimed batches: exact offset ranges that one run claims, processes and commits (protocol.md, section 6).

A `BatchSession` has the connections and the state that the batches of one process share. Each `ClaimedBatch` claims
with its own instance id, plans, processes, commits and releases. It claims whole partitions (`partition_source`) or
ranges of them (`range_source`), in one of three delivery modes. The package imports `coordination`, `kafka` and
`spark`, and does not know Dagster.
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
