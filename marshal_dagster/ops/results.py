"""What an execution came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dagster import MetadataValue, TableMetadataValue

from marshal_dagster.protocol.messages import DeliveryMode


class ExecutionOutcome(StrEnum):
    """What an execution of the op came to: batches were done, or why there was none."""

    DONE = "done"
    PAUSED = "paused"
    HELD = "held"
    DRAINED = "drained"
    GIVEN_UP = "given_up"
    NOT_ASSIGNED = "not_assigned"
    TOPIC_MISSING = "topic_missing"


@dataclass(frozen=True, slots=True)
class CompletedBatch:
    """One batch that was carried out."""

    batch_id: str
    delivery: DeliveryMode
    ranges: TableMetadataValue
    numbers: Mapping[str, float]
    """Seconds of each phase, offsets, lag, and the rows written where the sink tells them."""


@dataclass(frozen=True, slots=True)
class BatchesResult:
    """What the op gives to ops that depend on it."""

    topic: str
    group: str
    outcome: ExecutionOutcome
    batch_ids: tuple[str, ...]
    offsets: int
    lag: int


_NUMBERS: Final = (
    "offsets",
    "lag",
    "lost_offsets",
    "records",
    "waiting_s",
    "starting_spark_s",
    "reading_s",
    "processing_s",
    "committing_s",
    "rows",
)
"""What a batch is recorded with that plots over time."""


def parse_completed_batch(metadata: Mapping[str, MetadataValue[Any]]) -> CompletedBatch | None:
    """Read what a batch was recorded with; None for what is of another form."""
    batch_id, delivery, ranges = (metadata.get(name) for name in ("batch_id", "delivery", "ranges"))
    numbers = {name: metadata[name].value for name in _NUMBERS if name in metadata}
    if batch_id is None or delivery is None or not isinstance(ranges, TableMetadataValue):
        return None
    if not {"offsets", "lag"} <= numbers.keys():
        return None
    return CompletedBatch(str(batch_id.value), DeliveryMode(delivery.value), ranges, numbers)
