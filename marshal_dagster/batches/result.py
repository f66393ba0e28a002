"""The results of a batch: why it was idle, what happened to each partition's range, and how long each phase took."""

from dataclasses import dataclass
from enum import StrEnum

from marshal_dagster.protocol.batch_planning import ClaimedRange


class IdleReason(StrEnum):
    """Why a batch has nothing to do."""

    PAUSED = "paused"
    """The group is paused."""
    HELD = "held"
    """Other members hold all partitions that have unread messages."""
    DRAINED = "drained"
    """There are no unread messages."""
    GIVEN_UP = "given_up"
    """The only work left is plans that have had `BatchRequest.max_attempts` attempts."""
    NOT_ASSIGNED = "not_assigned"
    """The process should claim none of these partitions now (`BatchSession.advise`)."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a batch has nothing to do."""

    reason: IdleReason
    """The reason."""
    text: str
    """The reason in a sentence."""
    stale_in_s: float | None = None
    """In how many seconds a claim of this same run is stale, unless it gets another heartbeat.

    It is set only if the batch waits for a claim that another process of the same run holds or has left.
    """


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The result of a batch for one partition. Lags are numbers of offsets, as known when the batch was planned.

    Example:
        ```python
        for report in batch.report():
            print(report.range, report.state, report.lag_after)
        ```
    """

    range: ClaimedRange
    """The offsets of this partition in the batch."""
    lag_before: int
    """The number of unread offsets before the batch."""
    lag_after: int
    """The number of unread offsets after the range of the batch."""
    is_replay: bool
    """Whether the range was taken over from an earlier run that had planned it."""
    state: str
    """`committed`, `not committed`, `skipped` (the sink had it already), `dropped` or `possibly dropped`."""


@dataclass(slots=True)
class PhaseDurations:
    """Seconds spent in each phase of a batch; starting Spark and writing to the sink are parts of the processing."""

    waiting_s: float = 0.0
    """From the start of the batch until it has claimed and planned."""
    reading_s: float = 0.0
    """Calls of `ClaimedBatch.read`; Spark itself reads Kafka during the processing."""
    processing_s: float = 0.0
    """The `with` block without `reading_s`."""
    committing_s: float = 0.0
    """From the end of the block until everything is committed and released."""
    starting_spark_s: float = 0.0
    """Starting the Spark session; set by the caller that starts it."""
    writing_s: float = 0.0
    """Writing to the sink."""
