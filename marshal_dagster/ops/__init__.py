"""The op that claims, processes and commits, batch after batch in one Spark session."""

from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.ops.config import ClaimedBatchConfig, WorkOptions, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.results import BatchesResult, CompletedBatch, ExecutionOutcome
from marshal_dagster.ops.spec import BatchSpec, Process, batch_spec
from marshal_dagster.runs.abandoned_work import ExpectedKeyState

__all__ = [
    "BatchExecution",
    "BatchSpec",
    "BatchesResult",
    "ClaimedBatchConfig",
    "CompletedBatch",
    "ExecutionOutcome",
    "ExpectedKeyState",
    "Process",
    "WorkOptions",
    "batch_spec",
    "build_claimed_batch_op",
    "config_of",
]
