"""Reports of exhausted plans, which failed too many times: a log line, and the result of the asset check.

Runs and the asset check `exhausted_plans` share them.
"""

from collections.abc import Sequence
from typing import Any, Final

from dagster import AssetCheckEvaluation, AssetCheckKey, AssetCheckSeverity, AssetKey, DagsterInstance
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus  # has no public name

from marshal_dagster._internal.texts import first_few
from marshal_dagster.protocol.open_plans import OpenPlan, retry_text
from marshal_dagster.runs.failed_batches import last_failures
from marshal_dagster.runs.tables import Column, table

EXHAUSTED_PLANS: Final = "exhausted_plans"
"""The name of the asset check."""
NOTHING_EXHAUSTED: Final = "no plan failed too many times"
MAX_ATTEMPTS_TAG: Final = "marshal/max_attempts"
"""Tag of an op: its `max_attempts`, if that is not the default."""
EVALUATED: Final = frozenset({AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED})
"""The statuses of checks that were evaluated, not only planned."""
_MOST_NAMED: Final = 5
_MOST_SHOWN: Final = 100
_COLUMNS: Final[Sequence[Column[OpenPlan]]] = (
    *(Column(name, "int") for name in ("partition", "start", "end")),
    Column("tries", "int", "Number of attempts."),
)


def exhausted_plans_text(instance: DagsterInstance, plans: Sequence[OpenPlan]) -> str:
    """Return one line with the exhausted plans, their last errors and the command to retry; empty without plans."""
    if not plans:
        return ""
    failures = last_failures(instance, plans[0].group, plans[0].topic)
    named = []
    for plan in plans:
        failed = failures.get((plan.partition, plan.start, plan.generation))
        last = "its last error was not recorded" if failed is None else f"last in run {failed.run_id}: {failed.error}"
        named.append(f"{plan.tried}, {last}")
    return f"{first_few(named, _MOST_NAMED, '; ')}. Fix the cause and {retry_text(plans)}"


def failed_in_run(instance: DagsterInstance, plans: Sequence[OpenPlan], run_id: str) -> bool:
    """Return whether the last failed attempt of one of the plans was made by this run."""
    failures = last_failures(instance, plans[0].group, plans[0].topic)
    last = [failures.get((plan.partition, plan.start, plan.generation)) for plan in plans]
    return any(failed is not None and failed.run_id == run_id for failed in last)


def exhausted_plans_metadata(plans: Sequence[OpenPlan]) -> dict[str, Any]:
    """Return the metadata of the check: the number of exhausted plans, and a table of them."""
    return {"plans": len(plans), **({"exhausted": table(_COLUMNS, plans[:_MOST_SHOWN])} if plans else {})}


def exhausted_plans_evaluation(asset_key: AssetKey, plans: Sequence[OpenPlan], text: str) -> AssetCheckEvaluation:
    """Return the evaluation of the check, to be logged by the asset's own run, which may have no step for the check."""
    return AssetCheckEvaluation(
        asset_key=asset_key,
        check_name=EXHAUSTED_PLANS,
        passed=not plans,
        severity=AssetCheckSeverity.ERROR,
        description=text or NOTHING_EXHAUSTED,
        metadata=exhausted_plans_metadata(plans),
    )


def has_failed(instance: DagsterInstance, asset_key: AssetKey) -> bool:
    """Return whether the last evaluation of the check failed; checks that are only planned do not count."""
    key, storage = AssetCheckKey(asset_key, EXHAUSTED_PLANS), instance.event_log_storage
    records = storage.get_asset_check_execution_history(key, limit=1, status=set(EVALUATED))
    return any(record.status is AssetCheckExecutionRecordStatus.FAILED for record in records)
