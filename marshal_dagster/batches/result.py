"""Why a batch had nothing to do, and what each partition's part of it came to."""

from dataclasses import dataclass
from enum import StrEnum

from marshal_dagster.protocol.batch_planning import ClaimedRange


class IdleReason(StrEnum):
    """Why a batch has nothing to do."""

    PAUSED = "paused"
    HELD = "held"
    DRAINED = "drained"
    GIVEN_UP = "given_up"
    NOT_ASSIGNED = "not_assigned"


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a batch has nothing to do, and in a sentence.

    `stale_in_s` is set where what it waits for is held in the name of its own run: by a process of it that died, or by
    one that works on. In so many seconds that is stale, unless it sends another heartbeat.
    """

    reason: IdleReason
    text: str
    stale_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What one partition's part of a batch came to. Lags are in offsets, as known when the batch was planned."""

    range: ClaimedRange
    lag_before: int
    lag_after: int
    is_replay: bool
    state: str


@dataclass(slots=True)
class PhaseDurations:
    """Seconds spent in each phase of a batch; starting Spark and writing to the sink are parts of the processing."""

    waiting_s: float = 0.0
    reading_s: float = 0.0
    processing_s: float = 0.0
    committing_s: float = 0.0
    starting_spark_s: float = 0.0
    """Noted by who starts the session."""
    writing_s: float = 0.0
