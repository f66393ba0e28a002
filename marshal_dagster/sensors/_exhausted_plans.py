"""Reports of exhausted plans: partitions for which the stale-claim sensor requests no more runs.

The sensor reports them by a failed asset check of the data topic, and by calling the user's alert hook.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from dagster import (
    AssetCheckEvaluation,
    AssetCheckExecutionContext,
    AssetCheckKey,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    DagsterEventType,
    DagsterInstance,
    multi_asset_check,
)

from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.resources.claimer import require_group
from marshal_dagster.runs.abandoned_work import first_ten
from marshal_dagster.runs.exhausted_plans import EVALUATED
from marshal_dagster.runs.names import topic_asset_key, unique_name
from marshal_dagster.runs.tables import Column, table
from marshal_dagster.sensors._run_history import place_of

if TYPE_CHECKING:
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator

MOST_REMEMBERED: Final = 1_000
_MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class ExhaustedPlan:
    """A partition, or a range of one, for which the sensor requests no more runs. `ExhaustedPlans` lists them."""

    partition: int
    """The partition of the data topic."""
    offset: int | None
    """The next offset to read, or the first offset of the range."""
    plan_end: int | None
    """The end (exclusive) of the open plan, or None without a plan."""
    generation: int
    """The generation of the position."""
    attempts: int
    """How often the plan was retried, or how many runs failed or changed nothing."""
    run_ids: tuple[str, ...]
    """The ids of the runs that failed or changed nothing, newest first."""
    reason: str
    """Why no more runs are requested, and what an operator can do."""

    @property
    def place(self) -> str:
        """Partition, generation and offset, in the form that the cursor stores."""
        return place_of(self.partition, self.generation, self.offset)


@dataclass(frozen=True, slots=True)
class ExhaustedPlans:
    """The exhausted plans of a topic that are new since the last report. An `AlertHook` receives them.

    Example:
        ```python
        def page(found: ExhaustedPlans) -> None:
            send_to_pager(f"topic {found.topic}: partitions {[plan.partition for plan in found.partitions]}")
        ```
    """

    group: str
    """The group."""
    topic: str
    """The data topic."""
    partitions: tuple[ExhaustedPlan, ...]
    """The new exhausted plans."""
    total: int
    """The number of all exhausted plans of the topic, including those reported before."""

    def __str__(self) -> str:
        """Return one line with the first ten."""
        return f"group {self.group!r}: {first_ten([plan.reason for plan in self.partitions], '; ')}"


class AlertHook(Protocol):
    """The user's function that the stale-claim sensor calls for new exhausted plans.

    The sensor calls it once for each partition, generation and offset. If the function raises, the sensor calls it
    again at the next tick. In rare cases it repeats a successful call too. The call is part of a tick, so the function
    should be quick. An exception fails the tick, unless that has something else to record.

    Example:
        ```python
        def page(found: ExhaustedPlans) -> None:
            send_to_pager(str(found))


        sensor = build_stale_claim_sensor(redo_job, group="shops", on_exhausted_plans=page)
        ```
    """

    def __call__(self, found: ExhaustedPlans, /) -> object:
        """Notify operators.

        Args:
            found: The new exhausted plans of one topic.
        """
        ...


def exhausted_plans_check_key(
    group: str, topic: str, translator: "DagsterMarshalTranslator | None" = None
) -> AssetCheckKey:
    """Return the key of the check. Each group has its own check of a topic, because groups progress independently."""
    asset_key = topic_asset_key(topic) if translator is None else translator.get_topic_spec(topic).key
    return AssetCheckKey(asset_key, f"nothing_given_up_{unique_name(group)}")


def digest(key: AssetCheckKey, plans: Sequence[ExhaustedPlan]) -> str:
    """Return a digest of the check's state; the sensor evaluates the check only if the digest is new."""
    lines = [*key.asset_key.path, key.name, *sorted(plan.place for plan in plans)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


_COLUMNS: Final[Sequence[Column[ExhaustedPlan]]] = (
    *(Column(name, "int") for name in ("partition", "generation", "offset", "plan_end", "attempts")),
    Column("last_run", "string", cell=lambda plan: plan.run_ids[0] if plan.run_ids else None),
    Column("reason", "string"),
)


def evaluation(key: AssetCheckKey, group: str, plans: Sequence[ExhaustedPlan], timeline: str) -> AssetCheckEvaluation:
    """Return the evaluation of the check: failed if there are exhausted plans, with a table of up to 100.

    `timeline` is the command that draws what happened.
    """
    metadata: dict[str, Any] = {"group": group, "partitions_given_up": len(plans)}
    description = "There are no exhausted plans."
    if plans:
        metadata["given_up"] = table(_COLUMNS, plans[:_MOST_SHOWN])
        metadata["timeline"] = timeline
        description = (
            f"The sensor requests no more runs for {len(plans)} partitions or ranges: an operator must act. The table "
            "shows what to do."
        )
    return AssetCheckEvaluation(
        asset_key=key.asset_key,
        check_name=key.name,
        passed=not plans,
        severity=AssetCheckSeverity.ERROR,
        description=description,
        metadata=metadata,
    )


def build_exhausted_plans_check(
    topic: str, *, group: str, translator: "DagsterMarshalTranslator | None" = None
) -> AssetChecksDefinition:
    """Build the asset check that the group's stale-claim sensor evaluates, so that Dagster shows it.

    The check is named `nothing_given_up_<group>` and belongs to the topic's asset. In the name, characters of the group
    that Dagster does not allow become `_`, followed by a digest. An operator can execute the check: it then repeats the
    sensor's last result, or fails as a warning if there is none.

    Args:
        topic: The data topic.
        group: The group.
        translator: Defines the key of the topic's asset (default: `kafka/<topic>`). Pass the same one to the sensor.

    Returns:
        The check, for `Definitions(asset_checks=[...])`.

    Raises:
        ConfigurationError: `group` or `topic` is not a valid name.

    Example:
        ```python
        check = build_exhausted_plans_check("orders", group="shops")
        ```
    """
    require_group(group)
    require_topic_name("topic", topic)
    key = exhausted_plans_check_key(group, topic, translator)

    description = f"Fails if group {group!r} has unfinished work for which no more runs are requested."

    # Not `asset_check`, which gives the ops of topics `a.b` and `a-b` the same name.
    @multi_asset_check(
        name=f"{unique_name('__'.join(key.asset_key.path))}_{key.name}",
        specs=[AssetCheckSpec(key.name, asset=key.asset_key, description=description)],
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        """Repeat the last result of the sensor."""
        last = _newest_evaluation(context.instance, key)
        if last is None:
            return AssetCheckResult(
                passed=False,
                severity=AssetCheckSeverity.WARN,
                description=f"No stale-claim sensor of group {group!r} has evaluated this check yet: switch the sensor "
                "on, or correct the group's name.",
            )
        return AssetCheckResult(
            passed=last.passed, severity=last.severity, description=last.description, metadata=last.metadata
        )

    return check


def _newest_evaluation(instance: DagsterInstance, key: AssetCheckKey) -> AssetCheckEvaluation | None:
    """Return the newest evaluation, ignoring checks that are only planned; None without one."""
    history = instance.event_log_storage.get_asset_check_execution_history(key, limit=1, status=set(EVALUATED))
    for record in history:
        event = record.event.dagster_event if record.event is not None else None
        if event is not None and event.event_type is DagsterEventType.ASSET_CHECK_EVALUATION:
            return event.asset_check_evaluation_data
    return None
