"""Reports of what is requested no more: a failed asset check of the data topic, and a function of the user's own."""

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
from marshal_dagster.runs.names import topic_asset_key, unique_name
from marshal_dagster.runs.tables import Column, table
from marshal_dagster.sensors._run_history import place_of

if TYPE_CHECKING:
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator

MOST_REMEMBERED: Final = 1_000
_MOST_SHOWN: Final = 100
_PAGE: Final = 20


@dataclass(frozen=True, slots=True)
class ExhaustedPlan:
    """A partition, or a range of one, that no more runs are requested for; offsets as in `AbandonedPartition`."""

    partition: int
    offset: int | None
    plan_end: int | None
    generation: int
    attempts: int
    """How often its plan was tried, or how many runs failed or changed nothing."""
    run_ids: tuple[str, ...]
    """The runs that failed or changed nothing."""
    reason: str
    """Why, and what a person can do."""

    @property
    def place(self) -> str:
        """Partition, generation and offset, as the cursor remembers them."""
        return place_of(self.partition, self.generation, self.offset)


@dataclass(frozen=True, slots=True)
class ExhaustedPlans:
    """What was given up of a topic since the last report."""

    group: str
    topic: str
    partitions: tuple[ExhaustedPlan, ...]
    total: int
    """How many are given up in all, those that were reported before among them."""

    def __str__(self) -> str:
        """Describe the first ten in a line."""
        return f"group {self.group!r}: {first_ten([plan.reason for plan in self.partitions], '; ')}"


class AlertHook(Protocol):
    """A function of the user's own that is called once for each partition, generation and offset that is given up.

    It is called again if it raised, and rarely otherwise. It is called in the tick, so it should be quick; what it
    raises is logged and does no harm.
    """

    def __call__(self, found: ExhaustedPlans, /) -> object:
        """Notify people."""
        ...


def exhausted_plans_check_key(
    group: str, topic: str, translator: "DagsterMarshalTranslator | None" = None
) -> AssetCheckKey:
    """Name the check: each group has its own of a topic, because what one gave up another may have read."""
    asset_key = topic_asset_key(topic) if translator is None else translator.get_topic_spec(topic).key
    return AssetCheckKey(asset_key, f"nothing_given_up_{unique_name(group)}")


def digest(key: AssetCheckKey, plans: Sequence[ExhaustedPlan]) -> str:
    """Name a state of the check; one that gets another key has not been evaluated yet."""
    lines = [*key.asset_key.path, key.name, *sorted(plan.place for plan in plans)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


_COLUMNS: Final[Sequence[Column[ExhaustedPlan]]] = (
    *(Column(name, "int") for name in ("partition", "generation", "offset", "plan_end", "attempts")),
    Column("last_run", "string", cell=lambda plan: plan.run_ids[0] if plan.run_ids else None),
    Column("reason", "string"),
)


def evaluation(key: AssetCheckKey, group: str, plans: Sequence[ExhaustedPlan]) -> AssetCheckEvaluation:
    """Evaluate the check: failed while anything is given up, with up to 100 of them."""
    metadata: dict[str, Any] = {"group": group, "partitions_given_up": len(plans)}
    description = "Nothing is given up."
    if plans:
        metadata["given_up"] = table(_COLUMNS, plans[:_MOST_SHOWN])
        description = f"{len(plans)} partitions or ranges are asked for no more: somebody must look at them."
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
    """Define the check that the group's stale-claim sensor evaluates, so that Dagster shows it.

    It is `nothing_given_up_<group>` of the topic's asset: `kafka/<topic>`, unless `translator` gives that another key;
    then give the sensor the same one. Of a group whose name Dagster does not allow there, what is not allowed becomes
    `_`, and a digest comes behind. Run by hand it repeats what the sensor said last, and passes where it has said
    nothing. Raises `ConfigurationError`.
    """
    require_group(group)
    require_topic_name("topic", topic)
    key = exhausted_plans_check_key(group, topic, translator)

    description = f"Fails while runs of group {group!r} left something undone that no more runs are asked for."

    # Not `asset_check`: its ops of topics `a.b` and `a-b` have one name.
    @multi_asset_check(
        name=f"{unique_name('__'.join(key.asset_key.path))}_{key.name}",
        specs=[AssetCheckSpec(key.name, asset=key.asset_key, description=description)],
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        """Repeat what was said last."""
        last = _newest_evaluation(context.instance, key)
        if last is None:
            return AssetCheckResult(passed=True, description="The stale-claim sensor has said nothing yet.")
        return AssetCheckResult(
            passed=last.passed, severity=last.severity, description=last.description, metadata=last.metadata
        )

    return check


def _newest_evaluation(instance: DagsterInstance, key: AssetCheckKey) -> AssetCheckEvaluation | None:
    """Give the newest evaluation there is; those that are only planned have none."""
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=_PAGE):
        event = record.event.dagster_event if record.event is not None else None
        if event is not None and event.event_type is DagsterEventType.ASSET_CHECK_EVALUATION:
            return event.asset_check_evaluation_data
    return None
