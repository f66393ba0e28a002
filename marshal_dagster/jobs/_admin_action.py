"""One run in which an operator acts on a group, and what the jobs and assets for operators share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dagster import Failure, OpExecutionContext, TableMetadataValue

from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.named_sink import named_sink
from marshal_dagster.admin.reprocess import RangeReprocessor, WindowPlans
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.jobs._admin_tables import redo_table
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.runs.abandoned_work import first_ten
from marshal_dagster.runs.status import EndedRunDetector

_Resetter = TypeVar("_Resetter", bound=PositionResetter)


class DryRunnable(Protocol):
    """A run config that may only show what would change."""

    dry_run: bool


class ReprocessFields(DryRunnable, Protocol):
    """The fields of a run config that states how to reprocess."""

    within_s: float
    wait_s: float
    sink: str | None


@dataclass(frozen=True, slots=True)
class AdminAction:
    """One run of an operator's job, with the claimer of its group."""

    context: OpExecutionContext
    claimer: ClaimerResource

    @property
    def client(self) -> str:
        return self.claimer.client_id or self.context.run_id

    @property
    def is_dead(self) -> EndedRunDetector:
        return EndedRunDetector(self.context.instance)

    def require_allowed(self, config: DryRunnable, go_consumers_stopped: str | None = None) -> bool:
        """Check the rights to write, except in a dry run; return whether Go consumers are confirmed to be stopped.

        Raises `ConfigurationError` and `AuthorizationError`.
        """
        stopped = are_stopped(go_consumers_stopped, self.claimer.group)
        if not config.dry_run:
            self.claimer.require_rights()
        return stopped

    @contextmanager
    def opened(
        self, kind: type[_Resetter], topic: str, sink: str | None, *, stopped: bool = False
    ) -> Iterator[_Resetter]:
        """Yield an object of `kind` for the topic, and close it after the block. Raises `ConfigurationError`."""
        loaded_sink = None if sink is None else named_sink(sink, "sink")
        claimer = self.claimer
        with (
            claimer.open_data() as topics,
            closing(
                kind(
                    claimer.open_log,
                    topics,
                    claimer.group,
                    topic,
                    self.client,
                    SystemClock(),
                    settings=claimer.settings,
                    go_consumers_stopped=stopped,
                    sink=loaded_sink,
                )
            ) as work,
        ):
            yield work

    def warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.context.log.warning(warning)


def reprocess(
    action: AdminAction,
    config: ReprocessFields,
    topic: str,
    look: Callable[[RangeReprocessor], WindowPlans],
) -> TableMetadataValue:
    """Have the group's runs process again what `look` finds; return the table of the state before and after.

    Raises `Failure` if the runs did not finish in time, and `MarshalError`.
    """
    log, group = action.context.log, action.claimer.group
    with action.opened(PositionResetter, topic, config.sink) as positions:
        work = RangeReprocessor(positions)
        found = look(work)
        action.warn(positions.warnings([plan.back for plan in found.plans]))
        for partition, why in found.left_out.items():
            log.info("%s/%s: nothing to process again: %s", topic, partition, why)
        if found.has_messages and not found.plans:
            reasons = first_ten([f"partition {partition}: {why}" for partition, why in found.left_out.items()], "; ")
            raise Failure(
                f"nothing of topic {topic!r} can be processed again in group {group!r}: {reasons}. The group's runs "
                "process messages that they have not processed yet; launch this again after that if you still need it",
                allow_retries=False,
            )
        if config.dry_run or not found.plans:
            return redo_table(found.plans, None)
        redone = work.carry_out(
            found.plans, wait_s=config.wait_s, within_s=config.within_s, is_dead=action.is_dead, report=log.info
        )
    table = redo_table(found.plans, redone)
    if redone.problem is not None:
        log.warning(redone.problem)
    if redone.unfinished:
        first = redone.unfinished[0]
        others = f" (and {len(redone.unfinished) - 1} other partitions)" if len(redone.unfinished) > 1 else ""
        raise Failure(
            f"the runs of group {group!r} reached offset {first.reached} of {first.end} in topic {topic!r}, partition "
            f"{first.partition}{others} within {config.within_s:g} s; the group continues at {first.resume_offset}. "
            "Launch it again for the rest, with a larger within_s",
            metadata={"group": group, "before_and_after": table},
            allow_retries=False,
        )
    return table
