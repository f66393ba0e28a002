"""Failed batches, recorded as Dagster observations with their ranges and the error.

A later run reads them to report the last error of an exhausted plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dagster import AssetObservation, DagsterInstance, MetadataValue, TableMetadataValue

from marshal_dagster.batches import PartitionReport
from marshal_dagster.runs.names import announcements_key
from marshal_dagster.runs.tables import Column, table

FAILED: Final = "failed"
"""The metadata key for the ranges of a failed batch."""
_ERROR: Final = "error"
_LONGEST: Final = 500
_OBSERVATIONS: Final = 100

_COLUMNS: Final[Sequence[Column[PartitionReport]]] = tuple(
    Column(name, "int", cell=lambda report, name=name: getattr(report.range, name))  # type: ignore[misc]
    for name in ("partition", "start", "end", "generation")
)


PlanPlace = tuple[object, ...]
"""The partition, first offset and generation of a plan."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """The last failed attempt at a range: the run id, and the error in one line."""

    run_id: str
    error: str


def error_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    from marshal_dagster.spark.error_text import first_line

    text = first_line(error)
    kind = type(error).__name__
    return (text if text == kind else f"{kind}: {text}")[:_LONGEST]


def failed_batch(
    group: str, topic: str, batch_id: str, reports: Sequence[PartitionReport], error: BaseException
) -> AssetObservation:
    """Return the observation that records a failed batch."""
    return AssetObservation(
        announcements_key(topic),
        description=f"The batch failed and nothing was committed: {error_line(error)}",
        metadata={
            "group": group,
            "batch_id": batch_id,
            _ERROR: MetadataValue.text(error_line(error)),
            FAILED: table(_COLUMNS, reports),
        },
    )


def last_failures(instance: DagsterInstance, group: str, topic: str) -> dict[PlanPlace, FailedAttempt]:
    """Return the last recorded failure of each plan, from the newest 100 observations of the topic."""
    found: dict[PlanPlace, FailedAttempt] = {}
    for record in instance.fetch_observations(announcements_key(topic), limit=_OBSERVATIONS).records:
        observed = record.asset_observation
        if observed is None:
            continue
        metadata: Mapping[str, MetadataValue[Any]] = observed.metadata
        ranges, error, of_group = metadata.get(FAILED), metadata.get(_ERROR), metadata.get("group")
        if not isinstance(ranges, TableMetadataValue) or error is None or of_group is None or of_group.value != group:
            continue
        for row in ranges.records:
            place = tuple(row.data.get(name) for name in ("partition", "start", "generation"))
            found.setdefault(place, FailedAttempt(record.run_id, str(error.value)))
    return found
