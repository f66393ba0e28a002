"""Jobs by which a person acts on a group from the launchpad: pause, resume, set positions and more.

Each works in the name of a `ClaimerResource`, which says of which group and log, and shows in the run what was and what
is. They write, which takes WRITE on the coordination topic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict, TypeVar, Unpack

from dagster import (
    Config,
    ExecutorDefinition,
    Failure,
    JobDefinition,
    OpExecutionContext,
    TableMetadataValue,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.group_settings import GroupSettingsAdmin
from marshal_dagster.admin.import_positions import PositionImporter, PositionSourceOptions
from marshal_dagster.admin.log_access import LOOKING_MS
from marshal_dagster.admin.named_sink import named_sink
from marshal_dagster.admin.pause import GroupPauser
from marshal_dagster.admin.position_spec import TargetOptions, partitions_of
from marshal_dagster.admin.reprocess import RangeReprocessor
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.retry_plans import PlanRetrier
from marshal_dagster.admin.revoke import ClaimRevoker, held_by, holds_nothing_text
from marshal_dagster.admin.times import duration_s, instant_ms
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.jobs._admin_tables import claim_table, move_table, pause_table, redo_table, settings_table
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import GROUP_TAG, tag_run
from marshal_dagster.runs.status import EndedRunDetector

_Resetter = TypeVar("_Resetter", bound=PositionResetter)
_SECOND_MS: Final = 1_000
_WAIT_S: Final[Any] = Field(default=300.0, ge=0, description="Seconds that those who hold partitions have to leave.")


_SINK: Final[Any] = Field(
    default=None,
    description="The group's sink as module:name, which is asked whether it can replace what it holds.",
)


class AdminConfig(Config):
    """What the run config of each of these jobs has."""

    dry_run: bool = Field(
        default=False,
        description="Only show, in the metadata of the run, what would change; nothing is written.",
    )


class ResumeConfig(AdminConfig):
    """How a group is resumed."""

    go_consumers_stopped: str | None = Field(
        default=None,
        description="The group's name, to pause or resume it although Go consumers use it or it has no settings: no Go "
        "consumer newer than January 2017 will start on this coordination topic again.",
    )


class PauseConfig(ResumeConfig):
    """Until when a group is paused: give `until` or `duration`."""

    until: str | None = Field(
        default=None, description="When the pause ends: ISO 8601 with its zone, such as 2026-01-31T18:00:00Z."
    )
    duration: str | None = Field(default=None, description="How long the pause lasts: 90s, 30m, 2h, 1d12h.")


class SettingsConfig(AdminConfig):
    """How a group is given the settings of its claimer."""

    wait_s: float = _WAIT_S
    go_consumers_stopped: str | None = Field(
        default=None,
        description="The group's name, to give it settings although Go consumers use it or the coordination topic: no "
        "Go consumer, of any group, will use this topic again.",
    )


class PartitionsConfig(AdminConfig):
    """Which partitions of a data topic a job acts on."""

    topic: str = Field(description="The data topic.")
    partitions: str | None = Field(default=None, description="These partitions, as in '0,2-4'; by default all.")

    def chosen(self) -> tuple[range, ...] | None:
        """Return the partitions that are named, None for all. Raises `ConfigurationError`, for the topic's name too."""
        require_topic_name("topic", self.topic)
        return None if self.partitions is None else partitions_of(self.partitions, "partitions")


class RevokeConfig(PartitionsConfig):
    """Whose claims are taken."""

    instance: str = Field(description="The owner, who is dead: an instance id, or the run id in front of it.")


class PositionsConfig(PartitionsConfig):
    """How a group is given positions in a data topic."""

    wait_s: float = _WAIT_S
    sink: str | None = _SINK
    allow_out_of_range: bool = Field(
        default=False, description="Also take offsets that the topic does not hold; else these are refused."
    )
    go_consumers_stopped: str | None = Field(
        default=None,
        description="The group's name, where Go consumers share it and all of its consumers are stopped.",
    )


class SetPositionConfig(PositionsConfig):
    """Where a group goes on in a data topic: give one of the `to_...` and `shift_by`."""

    to_offset: str | None = Field(
        default=None, description="These next offsets to read: '0=5,1=7' by partition, or one number for all."
    )
    to_datetime: str | None = Field(
        default=None,
        description="The first record of that time or later: ISO 8601 with its zone, such as 2026-01-31T18:00:00Z.",
    )
    to_earliest: bool = Field(default=False, description="The first record that is left.")
    to_latest: bool = Field(default=False, description="The end: only new records are read.")
    shift_by: int | None = Field(
        default=None, description="So many offsets after the present position; before it where the number is negative."
    )


class ImportPositionsConfig(PositionsConfig):
    """Where a group's first positions come from: give `consumer_group` or `checkpoint`."""

    consumer_group: str | None = Field(
        default=None, description="What Kafka holds as the offsets of this consumer group, which must be stopped."
    )
    checkpoint: str | None = Field(
        default=None,
        description="The checkpoint folder of a stopped query of Structured Streaming, where the run can read it.",
    )
    others: str | None = Field(
        default=None,
        description="Where partitions begin of which it has no offset: earliest or latest. By default those of a "
        "checkpoint at the earliest; those of a consumer group are refused.",
    )


class ReprocessRangeConfig(AdminConfig):
    """Which offsets the group does again."""

    topic: str = Field(description="The data topic.")
    partition: int = Field(ge=0, description="The partition.")
    start: int = Field(ge=0, description="The first offset to do again.")
    end: int = Field(ge=1, description="The first one after them; the group must have done all before it.")
    within_s: float = Field(
        default=3_600.0,
        gt=0,
        description="Seconds that the group's own runs have for it; then it is given up.",
    )
    wait_s: float = _WAIT_S
    sink: str | None = _SINK


class RetryConfig(PartitionsConfig):
    """Which exhausted plans of a data topic are retried: those of all partitions, or of some."""

    wait_s: float = _WAIT_S
    sink: str | None = _SINK
    max_attempts: int = Field(
        default=DEFAULT_MAX_ATTEMPTS, ge=1, description="How often a plan is taken over before it is exhausted."
    )


class AdminJobOptions(TypedDict, total=False):
    """How each of these jobs is built."""

    name: str
    """The job's name."""
    claimer_key: str
    """The `ClaimerResource` in whose name the job acts; by default `claimer`."""
    executor_def: ExecutorDefinition
    """By default the work is done in the run worker itself."""
    tags: Mapping[str, str] | None
    """Tags of the job's runs."""


def build_pause_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that pauses the claimer's group, as its run config (`PauseConfig`) says.

    Members end what they have in hand and leave; a pause in force is replaced. Before and after are in the metadata.
    A group without settings gets those of the claimer first; one that Go consumers use is paused only when a person
    says that they are stopped (`go_consumers_stopped`). Default name: `pause_group`.
    """
    shown = {"duration": "1h", "dry_run": False}
    return _job("pause_group", "Pauses the group.", PauseConfig, _pause, options, shown=shown)


def build_resume_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that ends a pause of the claimer's group, whoever began it. Default name: `resume_group`."""
    return _job("resume_group", "Ends the group's pause.", ResumeConfig, _resume, options)


def build_set_position_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that sets where the claimer's group goes on (`SetPositionConfig`).

    The group is paused meanwhile; a pause in force is put back. What runs hold that Dagster knows to be over is
    revoked. Before and after are in the metadata; should it fail half way, the failure says what was set. A group
    without settings gets those of the claimer first. One that Go consumers share is not paused, and nothing is revoked
    in it: a person says that all of its consumers are stopped (`go_consumers_stopped`). Default name: `set_position`.
    """
    about = "Sets where the group goes on in a data topic."
    return _job("set_position", about, SetPositionConfig, _set_position, options)


def build_import_positions_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that gives the claimer's group its first positions (`ImportPositionsConfig`).

    They come from a consumer group, or from a checkpoint of Structured Streaming. The run fails where the group has
    positions already; else it does and shows what `build_set_position_job` does. Default name: `adopt_positions`.
    """
    about = "Takes the group's first positions from where its work was done before."
    return _job("adopt_positions", about, ImportPositionsConfig, _import_positions, options)


def build_settings_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that gives the claimer's group the settings that the claimer is configured with.

    The group is paused meanwhile, unless nothing of it is there; a pause in force is put back. What runs hold that
    Dagster knows to be over is revoked. Before and after are in the metadata. Default name: `set_settings`.
    """
    about = "Gives the group the settings that its claimer is configured with."
    return _job("set_settings", about, SettingsConfig, _set_settings, options)


def build_reprocess_range_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that has the claimer's group do a range again (`ReprocessRangeConfig`).

    The group's own scheduled runs do it, so these must go on: the job sets the position back, waits until they have
    reached the end, and sets the position to where the group was. However it ends, except by a kill, the group goes on
    there. The run fails when they were not through in time; the metadata say how far they got. Default name:
    `reprocess_range`.
    """
    about = "Has the group's own runs do a range of offsets again."
    return _job("reprocess_range", about, ReprocessRangeConfig, _reprocess_range, options)


def build_retry_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that retries plans that failed too often (`RetryConfig`). Fix the cause first.

    It sets the position of each of their partitions to its present offset. That ends the plan, and the group's next run
    makes a new one. The group is paused meanwhile, and a pause in force is restored. The run fails if there is no such
    plan. Default name: `retry_plans`.
    """
    return _job("retry_plans", "Retries plans that failed too often.", RetryConfig, _retry, options)


def build_revoke_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build the job that takes from an owner who is dead what it holds of a data topic (`RevokeConfig`).

    Others can then claim it at once. What was taken is in the metadata. The run fails when the owner holds nothing,
    or not all could be taken. In a group that Go consumers share another instance takes the partitions and releases
    them; a live Go owner takes them back with its next heartbeat. What dead runs hold is revoked without a person by
    `build_run_failure_sensors`. Default name: `revoke_claims`.
    """
    return _job("revoke_claims", "Takes what a dead owner holds.", RevokeConfig, _revoke, options)


@dataclass(frozen=True, slots=True)
class _Action:
    """The run of an action, and the claimer in whose name it acts."""

    context: OpExecutionContext
    claimer: ClaimerResource

    @property
    def client(self) -> str:
        return self.claimer.client_id or self.context.run_id

    @property
    def is_dead(self) -> EndedRunDetector:
        return EndedRunDetector(self.context.instance)

    def require_allowed(self, config: AdminConfig, go_consumers_stopped: str | None = None) -> bool:
        """Check that it may write, unless it is a dry run; return whether a person says that Go consumers are stopped.

        Raises `ConfigurationError`, `AuthorizationError`.
        """
        stopped = are_stopped(go_consumers_stopped, self.claimer.group)
        if not config.dry_run:
            self.claimer.require_rights()
        return stopped

    @contextmanager
    def opened(
        self, kind: type[_Resetter], topic: str, sink: str | None, *, stopped: bool = False
    ) -> Iterator[_Resetter]:
        """Give what sets positions in a data topic, as long as the block lasts. Raises `ConfigurationError`."""
        asked = None if sink is None else named_sink(sink, "sink")
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
                    sink=asked,
                )
            ) as work,
        ):
            yield work

    def warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.context.log.warning(warning)


def _job(
    default_name: str,
    about: str,
    config_class: type[AdminConfig],
    act: Callable[[_Action, Any], TableMetadataValue],
    options: AdminJobOptions,
    *,
    shown: Mapping[str, object] | None = None,
) -> JobDefinition:
    """Make the job of what `act` does, which returns what was and what is.

    `shown` is the op's config as the launchpad opens, by default all that has a default.
    """
    name, claimer_key = options.get("name", default_name), options.get("claimer_key", "claimer")

    def run(context: OpExecutionContext, config: config_class) -> None:  # type: ignore[valid-type]
        claimer = claimer_of(context.resources, claimer_key)
        tag_run(context, {GROUP_TAG: claimer.group})
        with logs_to_run(context):
            table = act(_Action(context, claimer), config)
        dry_run: bool = config.dry_run  # type: ignore[attr-defined]
        if dry_run:
            context.log.info("a dry run: nothing was written")
        context.add_output_metadata({"group": claimer.group, "dry_run": dry_run, "before_and_after": table})

    work = op(name=f"{name}_op", required_resource_keys={claimer_key})(run)

    def do() -> None:
        work()

    config: Any = None if shown is None else {"ops": {work.name: {"config": dict(shown)}}}
    executor_def, tags = options.get("executor_def", in_process_executor), dict(options.get("tags") or {})
    return job(name=name, description=about, config=config, executor_def=executor_def, tags=tags)(do)


@contextmanager
def _pauser(action: _Action, config: ResumeConfig) -> Iterator[GroupPauser]:
    claimer = action.claimer
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    interval_ms = min(LOOKING_MS, claimer.settings.heartbeat_interval_ms)
    with closing(claimer.open_log(interval_ms)) as rationalizer:
        pauser = GroupPauser(
            rationalizer, claimer.group, action.client, settings=claimer.settings, go_consumers_stopped=stopped
        )
        pauser.look()
        yield pauser


def _pause(action: _Action, config: PauseConfig) -> TableMetadataValue:
    with _pauser(action, config) as pauser:
        if (config.until is None) == (config.duration is None):
            raise ConfigurationError("give one of until and duration in the run config")
        if config.until is not None:
            until_s = -(-instant_ms(config.until, "until") // _SECOND_MS)
            pauser.require_future(until_s, "until")
        else:
            until_s = pauser.end_after(duration_s(config.duration or "", "duration"))
        return pause_table(pauser.preview(until_s) if config.dry_run else pauser.pause(until_s))


def _resume(action: _Action, config: ResumeConfig) -> TableMetadataValue:
    with _pauser(action, config) as pauser:
        if not pauser.is_in_force:
            action.context.log.info("group %r is not paused", pauser.group)
        return pause_table(pauser.preview() if config.dry_run else pauser.resume())


def _set_position(action: _Action, config: SetPositionConfig) -> TableMetadataValue:
    chosen = config.chosen()
    target = TargetOptions(
        config.to_offset, config.to_datetime, config.to_earliest, config.to_latest, config.shift_by
    ).target()
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    with action.opened(PositionResetter, config.topic, config.sink, stopped=stopped) as work:
        moves = work.look(target, chosen, allow_out_of_range=config.allow_out_of_range, new_group=True)
        action.warn(work.warnings(moves))
        return _move(action, config, work, moves)


def _import_positions(action: _Action, config: ImportPositionsConfig) -> TableMetadataValue:
    chosen = config.chosen()
    options = PositionSourceOptions(config.consumer_group, config.checkpoint, config.others)
    others = options.begin_at()
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    with action.opened(PositionImporter, config.topic, config.sink, stopped=stopped) as work:
        source = options.source(work.topics, config.topic)
        moves = work.look_at(source, chosen, others=others, allow_out_of_range=config.allow_out_of_range)
        action.warn([*source.notes, *work.warnings(moves)])
        if not config.dry_run:
            source.require_at_rest()
        return _move(action, config, work, moves)


def _retry(action: _Action, config: RetryConfig) -> TableMetadataValue:
    chosen = config.chosen()
    action.require_allowed(config)
    with action.opened(PlanRetrier, config.topic, config.sink) as work:
        plans = [
            plan
            for plan in work.exhausted(max_attempts=config.max_attempts)
            if chosen is None or any(plan.partition in numbers for numbers in chosen)
        ]
        if not plans:
            raise Failure(f"group {work.group!r} has no exhausted plan in topic {config.topic!r}", allow_retries=False)
        moves = work.look_at_plans(plans)
        action.warn(work.warnings(moves))
        return _move(action, config, work, moves)


def _move(
    action: _Action,
    config: PositionsConfig | RetryConfig,
    work: PositionResetter,
    moves: Sequence[PositionChange],
) -> TableMetadataValue:
    """Set the positions, unless it is a dry run; if it fails, have the failure say what was set."""
    if config.dry_run:
        return move_table(moves, ())
    log = action.context.log

    def done() -> list[int]:
        """Return the partitions that were set, as the log shows."""
        try:
            return sorted(work.done(moves))
        except MarshalError as error:
            log.warning("what was set could not be read: %s", error)
            return []

    try:
        problem = work.carry_out(moves, wait_s=config.wait_s, is_dead=action.is_dead)
    except MarshalError as error:
        partitions = done()
        raise Failure(
            f"{error}. Set: partitions {partitions}",
            metadata={"group": action.claimer.group, "before_and_after": move_table(moves, partitions)},
            allow_retries=False,
        ) from error
    except BaseException:
        log.exception("the run was stopped; of the positions were set: partitions %s", done())
        raise
    if problem is not None:
        log.warning(problem)
    return move_table(moves, [move.partition for move in moves])


def _reprocess_range(action: _Action, config: ReprocessRangeConfig) -> TableMetadataValue:
    log = action.context.log
    require_topic_name("topic", config.topic)
    action.require_allowed(config)
    with action.opened(PositionResetter, config.topic, config.sink) as positions:
        work = RangeReprocessor(positions)
        redo = work.look(config.partition, config.start, config.end)
        action.warn(positions.warnings([redo.back]))
        if config.dry_run:
            return redo_table(redo, None)
        redone = work.carry_out(
            redo, wait_s=config.wait_s, within_s=config.within_s, is_dead=action.is_dead, report=log.info
        )
    table = redo_table(redo, redone)
    if redone.problem is not None:
        log.warning(redone.problem)
    if redone.reached < redo.end:
        raise Failure(
            f"the group's runs have got to {redone.reached} of {redo.end} within {config.within_s:g} s; it goes on at "
            f"{redone.resume_offset}",
            metadata={"group": action.claimer.group, "before_and_after": table},
            allow_retries=False,
        )
    return table


def _set_settings(action: _Action, config: SettingsConfig) -> TableMetadataValue:
    claimer = action.claimer
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    work = GroupSettingsAdmin(claimer.open_log, claimer.group, action.client, SystemClock(), stopped)
    with closing(work):
        before = after = work.look(new_group=True)
        if all(partition.settings == claimer.settings for partition in before.values()):
            action.context.log.info("group %r has these settings already", claimer.group)
        elif config.dry_run:
            work.require_allowed()
            after = {
                number: replace(partition, settings=claimer.settings, by_default=False)
                for number, partition in before.items()
            }
        else:
            after = work.set_settings(claimer.settings, wait_s=config.wait_s, is_dead=action.is_dead)
    return settings_table(before, after)


def _revoke(action: _Action, config: RevokeConfig) -> TableMetadataValue:
    claimer, chosen = action.claimer, config.chosen()
    action.require_allowed(config)
    with closing(ClaimRevoker(claimer.open_log, claimer.group, config.topic, action.client)) as work:
        held = work.look()
        claims = held_by(config.instance, held, chosen)
        if not claims:
            raise Failure(holds_nothing_text(config.instance, config.topic, held), allow_retries=False)
        taken = [] if config.dry_run else work.carry_out(claims)
        is_go = work.is_go
        if is_go:
            action.context.log.warning(
                "nothing can be revoked in group %r, which Go consumers share, or may because it has no settings: a "
                "live Go owner takes its partitions back with its next heartbeat, within a minute",
                claimer.group,
            )
            back = {claim.partition for claim in work.taken_back(taken)} if taken else set()
            taken = [claim for claim in taken if claim.partition not in back]
    table = claim_table(claims, taken)
    if not config.dry_run and len(taken) < len(claims):
        raise Failure(
            "not all could be freed: partitions have no offset, changed hands meanwhile, or their owner lives and took "
            "them back; they are free two minutes after its last heartbeat"
            if is_go
            else "not all could be revoked: claims changed hands meanwhile, or the broker did not acknowledge it",
            metadata={"group": claimer.group, "claims": table},
            allow_retries=False,
        )
    return table
