"""Jobs with which an operator acts on a group from Dagster's launchpad: pause, resume, set positions and more.

They do the same as the commands of `marshal-dagster`, through `marshal_dagster.admin`. Group and coordination topic are
those of a `ClaimerResource`. The metadata of a run shows the state before and after. The jobs need WRITE on the
coordination topic.

Their launchpads open with a dry run, whose metadata shows what would change. Resources have no part in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypedDict, Unpack

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

from marshal_dagster.admin.group_settings import GroupSettingsAdmin
from marshal_dagster.admin.import_positions import PositionImporter, PositionSourceOptions
from marshal_dagster.admin.log_access import LOOKING_MS
from marshal_dagster.admin.pause import GroupPauser, require_reason
from marshal_dagster.admin.position_spec import PARTITIONS_TEXT, TargetOptions, partitions_of, partitions_text
from marshal_dagster.admin.reprocess import plans_finder
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.retry_plans import PlanRetrier
from marshal_dagster.admin.revoke import ClaimRevoker, held_by, held_in, holds_nothing_text
from marshal_dagster.admin.times import duration_s, instant_ms
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.jobs._admin_action import AdminAction, reprocess
from marshal_dagster.jobs._admin_tables import claim_table, move_table, pause_table, settings_table
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.resources.claimer import claimer_of
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import GROUP_TAG, sensor_name, tag_run

_SECOND_MS: Final = 1_000
_WAIT_S: Final = 300.0
_LONGEST_WAIT_S: Final = 30 * 86_400.0
_WAIT_TEXT: Final = "Seconds to wait for members to release their partitions."
_SINK_TEXT: Final = (
    "The group's sink as module:name. The job then checks that the sink can replace rows that it already has."
)


class AdminConfig(Config):
    """The run config fields of all these jobs."""

    dry_run: bool = Field(
        default=False,
        description="Show in the metadata of the run what would change, without writing anything.",
    )


class ResumeConfig(AdminConfig):
    """The run config of `build_resume_job`."""

    go_consumers_stopped: str | None = Field(
        default=None,
        description="Only if Go consumers use the group, or it has no settings: the group's name. This confirms that "
        "no Go consumer newer than January 2017 will start on this coordination topic again.",
    )


class PauseConfig(ResumeConfig):
    """The run config of `build_pause_job`: set either `until` or `duration`."""

    until: str | None = Field(
        default=None, description="End of the pause: ISO 8601 with time zone, such as 2026-01-31T18:00:00Z."
    )
    duration: str | None = Field(default=None, description="Duration of the pause, such as 90s, 30m, 2h or 1d12h.")
    reason: str | None = Field(
        default=None,
        description="Why, in one line of at most 200 characters. Every reader of the log sees it: no secrets.",
    )


class SettingsConfig(AdminConfig):
    """The run config of `build_settings_job`."""

    wait_s: float = Field(default=_WAIT_S, ge=0, le=_LONGEST_WAIT_S, description=_WAIT_TEXT)
    go_consumers_stopped: str | None = Field(
        default=None,
        description="Only if Go consumers use the group or the coordination topic: the group's name. This confirms "
        "that no Go consumer of any group will use this coordination topic again.",
    )


class PartitionsConfig(AdminConfig):
    """The data topic and its partitions that a job acts on."""

    topic: str = Field(description="The data topic.")
    partitions: str | None = Field(default=None, description=PARTITIONS_TEXT)

    def chosen(self) -> tuple[range, ...] | None:
        """Return the chosen partitions, or None for all. Raises `ConfigurationError`."""
        require_topic_name("topic", self.topic)
        return None if self.partitions is None else partitions_of(self.partitions, "partitions")


class RevokeConfig(PartitionsConfig):
    """The run config of `build_revoke_job`."""

    instance: str = Field(
        description="The dead owner: its instance id or run id, or the first characters of it, such as 5b1c0d3e. If it "
        "is empty, a dry run shows the claims of all owners."
    )


class PositionsConfig(PartitionsConfig):
    """The run config fields of jobs that set positions."""

    wait_s: float = Field(default=_WAIT_S, ge=0, le=_LONGEST_WAIT_S, description=_WAIT_TEXT)
    sink: str | None = Field(default=None, description=_SINK_TEXT)
    allow_out_of_range: bool = Field(
        default=False, description="Accept offsets outside the range that the topic holds (default: reject them)."
    )
    go_consumers_stopped: str | None = Field(
        default=None,
        description="Only if Go consumers share the group: its name. This confirms that all its consumers are stopped.",
    )


class SetPositionConfig(PositionsConfig):
    """The run config of `build_set_position_job`: set exactly one of the `to_...` fields and `shift_by`."""

    to_offset: str | None = Field(
        default=None, description="Next offset of each partition, such as '0=5,1=7', or one offset for all."
    )
    to_datetime: str | None = Field(
        default=None,
        description="Continue at the first record of this time or later: ISO 8601 with time zone, such as "
        "2026-01-31T18:00:00Z.",
    )
    to_earliest: bool = Field(default=False, description="Continue at the first record that the topic holds.")
    to_latest: bool = Field(default=False, description="Continue at the end: only new records are read.")
    shift_by: int | None = Field(
        default=None, description="Number of offsets to move the position forward; negative to move it back."
    )


class ImportPositionsConfig(PositionsConfig):
    """The run config of `build_import_positions_job`: set either `consumer_group` or `checkpoint`."""

    consumer_group: str | None = Field(
        default=None, description="Import the committed offsets of this Kafka consumer group, which must be stopped."
    )
    checkpoint: str | None = Field(
        default=None,
        description="Import the offsets of this checkpoint folder of a stopped Structured Streaming query. The run "
        "must be able to read the folder.",
    )
    others: str | None = Field(
        default=None,
        description="Start of partitions without an offset in the source: earliest or latest (default: earliest for a "
        "checkpoint; an error for a consumer group).",
    )


class ReprocessConfig(AdminConfig):
    """The run config fields of jobs and assets that have the group's runs process messages again."""

    within_s: float = Field(
        default=3_600.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="Seconds in which the group's runs must repeat the messages; after that the job fails.",
    )
    wait_s: float = Field(default=_WAIT_S, ge=0, le=_LONGEST_WAIT_S, description=_WAIT_TEXT)
    sink: str | None = Field(default=None, description=_SINK_TEXT)


class ReprocessRangeConfig(ReprocessConfig):
    """The run config of `build_reprocess_range_job`: a range of offsets, or a window of time.

    Set either `partitions`, `start` and `end`, or `from_datetime` and `to_datetime`.
    """

    topic: str = Field(description="The data topic.")
    partitions: str | None = Field(
        default=None,
        description="Partitions of the topic, such as '0-3,7' (default: all; needed with start and end).",
    )
    start: int | None = Field(default=None, ge=0, description="The first offset to repeat.")
    end: int | None = Field(
        default=None,
        ge=1,
        description="The next offset after the range; everything before it must have been processed.",
    )
    from_datetime: str | None = Field(
        default=None,
        description="Start of the window: the first message with this timestamp or a later one. ISO 8601 with time "
        "zone, such as 2026-01-31T18:00:00Z.",
    )
    to_datetime: str | None = Field(
        default=None,
        description="End of the window (exclusive): the first message with this timestamp or a later one.",
    )


class RetryConfig(PartitionsConfig):
    """The run config of `build_retry_job`: the partitions whose exhausted plans are retried."""

    wait_s: float = Field(default=_WAIT_S, ge=0, le=_LONGEST_WAIT_S, description=_WAIT_TEXT)
    sink: str | None = Field(default=None, description=_SINK_TEXT)
    max_attempts: int = Field(
        default=DEFAULT_MAX_ATTEMPTS,
        ge=1,
        description="Number of attempts after which a plan counts as exhausted.",
    )


class AdminJobOptions(TypedDict, total=False):
    """Keyword arguments of all these factories."""

    group: str
    """The claimer's group, for the job's name and description; a claimer of another group fails the run."""
    topic: str
    """The data topic with which the launchpad opens (default: none, so the operator names it)."""
    name: str
    """The name of the job (default: see each factory; with `group` it begins with the group)."""
    claimer_key: str
    """The key of the `ClaimerResource`, which determines group and coordination topic (default: `claimer`)."""
    executor_def: ExecutorDefinition
    """The executor (default: `in_process_executor`, which runs the job in the run worker itself)."""
    tags: Mapping[str, str] | None
    """Tags of the job's runs."""


def build_pause_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that pauses the claimer's group.

    Members finish their batches and release their partitions. The job replaces a pause that is in force. A group
    without settings first gets those of the claimer. A group that Go consumers use is paused only if
    `go_consumers_stopped` confirms that they are stopped.

    Args:
        **options: See `AdminJobOptions`. The default name is `pause_group`, or `<group>_pause_group`.

    Returns:
        The job. Its run config is `PauseConfig`.

    Example:
        ```python
        defs = Definitions(jobs=[build_pause_job(), build_resume_job()], resources={"claimer": claimer})
        ```
    """
    return _job("pause_group", "Pauses {group}.", PauseConfig, _pause, options, shown={"duration": "1h"})


def build_resume_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that ends a pause of the claimer's group, no matter which operator or member began it.

    Args:
        **options: See `AdminJobOptions`. The default name is `resume_group`, or `<group>_resume_group`.

    Returns:
        The job. Its run config is `ResumeConfig`.

    Example:
        ```python
        job = build_resume_job(claimer_key="shops_claimer")
        ```
    """
    return _job("resume_group", "Ends the pause of {group}.", ResumeConfig, _resume, options)


def build_set_position_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that sets the position at which the claimer's group continues in a data topic.

    The job pauses the group for the change, and then restores the pause that was in force before, if any. It revokes
    the claims of runs that have ended according to Dagster. If it fails halfway, the failure lists the partitions whose
    position was set.

    A group without settings first gets those of the claimer. In a group that Go consumers share the job neither pauses
    nor revokes. There `go_consumers_stopped` must confirm that all consumers of the group are stopped.

    Args:
        **options: See `AdminJobOptions`. The default name is `set_position`, or `<group>_set_position`.

    Returns:
        The job. Its run config is `SetPositionConfig`.

    Example:
        In the launchpad of `build_set_position_job()`, this run config moves two partitions back:

        ```yaml
        ops:
          set_position_op:
            config: {topic: orders, to_offset: "0=1200,1=900"}
        ```
    """
    about = "Sets the position at which {group} continues in a data topic."
    return _job("set_position", about, SetPositionConfig, _set_position, options)


def build_import_positions_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that imports the first positions of the claimer's group.

    The positions come from a Kafka consumer group or from a checkpoint of Structured Streaming. The run fails if the
    group already has positions. Otherwise it sets them like the job of `build_set_position_job`.

    Args:
        **options: See `AdminJobOptions`. The default name is `import_positions`, or `<group>_import_positions`.

    Returns:
        The job. Its run config is `ImportPositionsConfig`.

    Example:
        In the launchpad of `build_import_positions_job()`, this run config imports the positions of a consumer group:

        ```yaml
        ops:
          import_positions_op:
            config: {topic: orders, consumer_group: old-consumer}
        ```
    """
    about = "Imports the first positions of {group} from a consumer group or a checkpoint."
    return _job("import_positions", about, ImportPositionsConfig, _import_positions, options)


def build_settings_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that changes the group's settings in the coordination log to those of the claimer.

    The job pauses the group for the change, unless the group is new, and then restores the pause that was in force
    before, if any. It revokes the claims of runs that have ended according to Dagster.

    Args:
        **options: See `AdminJobOptions`. The default name is `set_settings`, or `<group>_set_settings`.

    Returns:
        The job. Its run config is `SettingsConfig`.

    Example:
        ```python
        # Change the fields of the claimer, deploy it, and launch this job once.
        job = build_settings_job()
        ```
    """
    about = "Changes the settings of {group} to those of its claimer."
    return _job("set_settings", about, SettingsConfig, _set_settings, options)


def build_reprocess_range_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that makes the claimer's group process messages again: a range of offsets, or a window of time.

    The group's own scheduled runs process them, so do not stop those. The job sets the positions back and waits until
    the runs have reached the end of each range. Then it sets the positions to where the group was before. It does that
    last step even if it fails, unless its process is killed. The run fails if not everything was processed in time; its
    metadata shows the progress.

    A window of time has, in each partition, the messages from the first one with the timestamp `from_datetime` or a
    later one, up to the first one with the timestamp `to_datetime` or a later one (exclusive). For a Dagster backfill
    over such windows, see `build_reprocess_asset`.

    Args:
        **options: See `AdminJobOptions`. The default name is `reprocess_range`, or `<group>_reprocess_range`.

    Returns:
        The job. Its run config is `ReprocessRangeConfig`.

    Example:
        In the launchpad of `build_reprocess_range_job()`:

        ```yaml
        ops:
          reprocess_range_op:
            config: {topic: orders, partitions: "0", start: 1200, end: 1500}
        ```

        Or, for one hour in all partitions:

        ```yaml
        ops:
          reprocess_range_op:
            config:
              topic: orders
              from_datetime: "2026-01-31T18:00:00Z"
              to_datetime: "2026-01-31T19:00:00Z"
        ```
    """
    about = "Makes the runs of {group} process a range of offsets, or a window of time, again."
    return _job("reprocess_range", about, ReprocessRangeConfig, _reprocess_range, options)


def build_retry_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that retries exhausted plans, which failed too many times. Fix the cause first.

    The job sets the position of each partition concerned to its current offset. That ends the plan, and the group's
    next run makes a new one. The job pauses the group for the change, and then restores the pause that was in force
    before, if any. The run fails if there is no exhausted plan.

    Args:
        **options: See `AdminJobOptions`. The default name is `retry_plans`, or `<group>_retry_plans`.

    Returns:
        The job. Its run config is `RetryConfig`.

    Example:
        In the launchpad of `build_retry_job()`:

        ```yaml
        ops:
          retry_plans_op:
            config: {topic: orders, partitions: "0,2-4"}
        ```
    """
    return _job("retry_plans", "Retries plans of {group} that failed too many times.", RetryConfig, _retry, options)


def build_revoke_job(**options: Unpack[AdminJobOptions]) -> JobDefinition:
    """Build a job that revokes the claims of a dead owner in a data topic.

    Other members can then claim the partitions at once. The metadata shows the revoked claims. The run fails if the
    owner holds nothing, or if not all claims could be revoked.

    In a group that Go consumers share, the job claims the partitions itself and releases them. A live Go owner takes
    them back with its next heartbeat. The sensors of `build_run_failure_sensors` revoke the claims of failed runs
    without an operator.

    Args:
        **options: See `AdminJobOptions`. The default name is `revoke_claims`, or `<group>_revoke_claims`.

    Returns:
        The job. Its run config is `RevokeConfig`.

    Example:
        In the launchpad of `build_revoke_job()`, this run config revokes what a run holds:

        ```yaml
        ops:
          revoke_claims_op:
            config: {topic: orders, instance: 8d3f1c9e-2f54-4a5e-9f6c-1c8e5b7a9d10}
        ```
    """
    about = "Revokes the claims of a dead owner in {group}."
    return _job("revoke_claims", about, RevokeConfig, _revoke, options, shown={"instance": ""})


def _job(
    default_name: str,
    about: str,
    config_class: type[AdminConfig],
    act: Callable[[AdminAction, Any], TableMetadataValue],
    options: AdminJobOptions,
    *,
    shown: Mapping[str, object] = MappingProxyType({}),
) -> JobDefinition:
    """Return a job that calls `act`, which returns the table of the state before and after.

    Its launchpad opens with a dry run, the topic, and the fields `shown`.
    """
    group, claimer_key = options.get("group"), options.get("claimer_key", "claimer")
    name = options.get("name") or (default_name if group is None else sensor_name(group, default_name))

    def run(context: OpExecutionContext, config: config_class) -> None:  # type: ignore[valid-type]
        claimer = claimer_of(context.resources, claimer_key)
        try:
            if group not in {None, claimer.group}:
                raise ConfigurationError(
                    f"job {name!r} is for group {group!r}, but its resource {claimer_key!r} claims for group "
                    f"{claimer.group!r}: pass the claimer_key of the group's claimer"
                )
            tag_run(context, {GROUP_TAG: claimer.group})
            with logs_to_run(context):
                table = act(AdminAction(context, claimer), config)
        except MarshalError as error:
            raise Failure(str(error)) from None  # without a traceback, so that the run's page begins with the message
        dry_run: bool = config.dry_run  # type: ignore[attr-defined]
        if dry_run:
            context.log.info("dry run: nothing was written")
        context.add_output_metadata({"group": claimer.group, "dry_run": dry_run, "before_and_after": table})

    work = op(name=f"{name}_op", required_resource_keys={claimer_key})(run)

    def do() -> None:
        work()

    opens_with = {"dry_run": True, **shown}
    if "topic" in config_class.model_fields:
        opens_with = {"dry_run": True, "topic": options.get("topic", ""), **shown}
    config = {"ops": {work.name: {"config": opens_with}}}
    about = about.format(group="the group" if group is None else f"group {group!r}")
    executor_def, tags = options.get("executor_def", in_process_executor), dict(options.get("tags") or {})
    return job(name=name, description=about, config=config, executor_def=executor_def, tags=tags)(do)


@contextmanager
def _pauser(action: AdminAction, config: ResumeConfig) -> Iterator[GroupPauser]:
    claimer = action.claimer
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    interval_ms = min(LOOKING_MS, claimer.settings.heartbeat_interval_ms)
    with closing(claimer.open_log(interval_ms)) as rationalizer:
        pauser = GroupPauser(
            rationalizer, claimer.group, action.client, settings=claimer.settings, go_consumers_stopped=stopped
        )
        pauser.look()
        yield pauser


def _pause(action: AdminAction, config: PauseConfig) -> TableMetadataValue:
    with _pauser(action, config) as pauser:
        if (config.until is None) == (config.duration is None):
            raise ConfigurationError(
                f"group {pauser.group!r} is not paused, because the run config must have either until or duration: set "
                "one of them"
            )
        if config.until is not None:
            until_s = -(-instant_ms(config.until, "until") // _SECOND_MS)
            pauser.require_future(until_s, "until")
        else:
            until_s = pauser.end_after(duration_s(config.duration or "", "duration"))
        why = require_reason(config.reason, "reason")
        return pause_table(pauser.preview(until_s, why) if config.dry_run else pauser.pause(until_s, why))


def _resume(action: AdminAction, config: ResumeConfig) -> TableMetadataValue:
    with _pauser(action, config) as pauser:
        if not pauser.is_in_force:
            action.context.log.info("group %r is not paused", pauser.group)
        return pause_table(pauser.preview() if config.dry_run else pauser.resume())


def _set_position(action: AdminAction, config: SetPositionConfig) -> TableMetadataValue:
    chosen = config.chosen()
    target = TargetOptions(
        config.to_offset, config.to_datetime, config.to_earliest, config.to_latest, config.shift_by
    ).target()
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    with action.opened(PositionResetter, config.topic, config.sink, stopped=stopped) as work:
        moves = work.look(target, chosen, allow_out_of_range=config.allow_out_of_range, new_group=True)
        action.warn(work.warnings(moves))
        return _move(action, config, work, moves)


def _import_positions(action: AdminAction, config: ImportPositionsConfig) -> TableMetadataValue:
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


def _retry(action: AdminAction, config: RetryConfig) -> TableMetadataValue:
    chosen = config.chosen()
    action.require_allowed(config)
    with action.opened(PlanRetrier, config.topic, config.sink) as work:
        plans = [
            plan
            for plan in work.exhausted(max_attempts=config.max_attempts)
            if chosen is None or any(plan.partition in numbers for numbers in chosen)
        ]
        if not plans:
            raise Failure(work.nothing_to_retry(None), allow_retries=False)
        moves = work.look_at_plans(plans)
        action.warn(work.warnings(moves))
        return _move(action, config, work, moves)


def _move(
    action: AdminAction,
    config: PositionsConfig | RetryConfig,
    work: PositionResetter,
    moves: Sequence[PositionChange],
) -> TableMetadataValue:
    """Set the positions, except in a dry run; a failure lists the partitions whose position was set."""
    if config.dry_run:
        return move_table(moves, ())
    log = action.context.log

    def done() -> list[int]:
        """Return the partitions whose position was set, by the coordination log."""
        try:
            return sorted(work.done(moves))
        except MarshalError as error:
            log.warning("the positions that were set could not be read back: %s", error)
            return []

    try:
        problem = work.carry_out(moves, wait_s=config.wait_s, is_dead=action.is_dead)
    except MarshalError as error:
        partitions = done()
        raise Failure(
            f"{error}. Topic {config.topic!r}: the position was set in partitions {partitions}",
            metadata={"group": action.claimer.group, "before_and_after": move_table(moves, partitions)},
            allow_retries=False,
        ) from error
    except BaseException:
        log.exception("topic %r: the run was stopped after it set the positions of partitions %s", config.topic, done())
        raise
    if problem is not None:
        log.warning(problem)
    try:
        partitions = sorted(work.done(moves))
    except MarshalError as error:
        log.warning("the positions were set, but could not be read back: %s", error)
        return move_table(moves, [move.partition for move in moves])
    if changed := {move.partition for move in moves}.difference(partitions):
        raise Failure(
            f"group {action.claimer.group!r}, topic {config.topic!r}: partitions {partitions_text(changed)} do not "
            "have these positions, because another process set them meanwhile. Stop it, and launch the job again",
            metadata={"group": action.claimer.group, "before_and_after": move_table(moves, partitions)},
            allow_retries=False,
        )
    return move_table(moves, partitions)


def _reprocess_range(action: AdminAction, config: ReprocessRangeConfig) -> TableMetadataValue:
    require_topic_name("topic", config.topic)
    chosen = None if config.partitions is None else partitions_of(config.partitions, "partitions")
    find = plans_finder(chosen, config.start, config.end, config.from_datetime, config.to_datetime)
    if find is None:
        raise ConfigurationError(
            f"topic {config.topic!r}: the run config must have either partitions, start and end, or from_datetime and "
            "to_datetime"
        )
    action.require_allowed(config)
    return reprocess(action, config, config.topic, find)


def _set_settings(action: AdminAction, config: SettingsConfig) -> TableMetadataValue:
    claimer = action.claimer
    stopped = action.require_allowed(config, config.go_consumers_stopped)
    work = GroupSettingsAdmin(claimer.open_log, claimer.group, action.client, SystemClock(), stopped)
    with closing(work):
        before = after = work.look(new_group=True)
        if all(partition.settings == claimer.settings for partition in before.values()):
            action.context.log.info("group %r already has these settings", claimer.group)
        elif config.dry_run:
            work.require_allowed()
            after = {
                number: replace(partition, settings=claimer.settings, by_default=False)
                for number, partition in before.items()
            }
        else:
            after = work.set_settings(claimer.settings, wait_s=config.wait_s, is_dead=action.is_dead)
    return settings_table(before, after)


def _revoke(action: AdminAction, config: RevokeConfig) -> TableMetadataValue:
    claimer, chosen = action.claimer, config.chosen()
    action.require_allowed(config)
    with closing(ClaimRevoker(claimer.open_log, claimer.group, config.topic, action.client)) as work:
        held = work.look()
        is_preview_of_all = config.dry_run and not config.instance
        claims = held_in(held, chosen) if is_preview_of_all else held_by(config.instance, held, chosen)
        if is_preview_of_all:
            action.context.log.info("all claims are shown, because the run config has no instance: name a dead owner")
        if not claims:
            raise Failure(holds_nothing_text(config.instance, config.topic, held), allow_retries=False)
        taken = [] if config.dry_run else work.carry_out(claims)
        is_go = work.is_go
        if is_go:
            action.context.log.warning(
                "group %r is shared with Go consumers, or has no settings, so its claims cannot be revoked but only "
                "released: a live Go owner takes its partitions back with its next heartbeat, within a minute",
                claimer.group,
            )
            back = {claim.partition for claim in work.taken_back(taken)} if taken else set()
            taken = [claim for claim in taken if claim.partition not in back]
    table = claim_table(claims, taken)
    if not config.dry_run and len(taken) < len(claims):
        raise Failure(
            f"group {claimer.group!r}, topic {config.topic!r}: not all partitions could be released, because they have "
            "no offset, have another owner now, or a live owner took them back. They become free two minutes after "
            "its last heartbeat"
            if is_go
            else f"group {claimer.group!r}, topic {config.topic!r}: not all claims could be revoked, because they have "
            "another owner now, or the broker did not acknowledge the records. Launch the job again",
            metadata={"group": claimer.group, "claims": table},
            allow_retries=False,
        )
    return table
