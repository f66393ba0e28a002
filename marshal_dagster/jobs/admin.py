"""Jobs by which a person acts on a group from the launchpad: pause, resume, set positions and more.

Each works in the name of a `ClaimerResource`, which says of which group and log, and shows in the run what was and what
is. They write, which takes WRITE on the coordination topic.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from dagster import (
    Config,
    ExecutorDefinition,
    Failure,
    JobDefinition,
    OpDefinition,
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
from marshal_dagster.admin.pause import GroupPauser
from marshal_dagster.admin.position_spec import TargetOptions, partitions_of
from marshal_dagster.admin.reprocess import RangeReprocessor
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.revoke import ClaimRevoker, held_by, holds_nothing_text
from marshal_dagster.admin.times import duration_s, instant_ms
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.jobs._admin_tables import claim_table, move_table, pause_table, redo_table, settings_table
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import GROUP_TAG, tag_run
from marshal_dagster.runs.status import EndedRunDetector

DEFAULT_WAIT_S: Final = 300.0
_Resetter = TypeVar("_Resetter", bound=PositionResetter)
_SHOWN_PAUSE: Final = "1h"
"""How long a pause lasts that is launched as the launchpad opens."""
_SECOND_MS: Final = 1_000
_DRY_RUN: Final = "Only show, in the metadata of the run, what would change; nothing is written."
_PARTITIONS: Final = "These partitions, as in '0,2-4'; by default all."
_WAIT: Final = "Seconds that those who hold partitions have to leave."
_GO_STOPPED: Final = "The group's name, where Go consumers share it and all of its consumers are stopped."
_GO_STOPPED_FOR_PAUSE: Final = (
    "The group's name, to pause or resume it although Go consumers use it or it has no settings: no Go consumer newer "
    "than January 2017 will start on this coordination topic again."
)
_GO_STOPPED_FOR_GOOD: Final = (
    "The group's name, to give it settings although Go consumers use it or the coordination topic: no Go consumer, of "
    "any group, will use this topic again."
)
_OUTSIDE: Final = "Also take offsets that the topic does not hold; else these are refused."


class PauseConfig(Config):
    """Until when a group is paused: give `until` or `duration`."""

    until: str | None = Field(
        default=None, description="When the pause ends: ISO 8601 with its zone, such as 2026-01-31T18:00:00Z."
    )
    duration: str | None = Field(default=None, description="How long the pause lasts: 90s, 30m, 2h, 1d12h.")
    go_consumers_stopped: str | None = Field(default=None, description=_GO_STOPPED_FOR_PAUSE)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class ResumeConfig(Config):
    """How a group is resumed."""

    go_consumers_stopped: str | None = Field(default=None, description=_GO_STOPPED_FOR_PAUSE)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class SetPositionConfig(Config):
    """Where a group goes on in a data topic: give one of `offsets`, `timestamp`, `earliest`, `latest` and `back`."""

    topic: str = Field(description="The data topic.")
    offsets: str | None = Field(
        default=None, description="These next offsets to read: '0=5,1=7' by partition, or one number for all."
    )
    timestamp: str | None = Field(
        default=None,
        description="The first record of that time or later: ISO 8601 with its zone, such as 2026-01-31T18:00:00Z.",
    )
    earliest: bool = Field(default=False, description="The first record that is left.")
    latest: bool = Field(default=False, description="The end: only what comes is read.")
    back: int | None = Field(default=None, ge=1, description="So many offsets before where each partition stands.")
    partitions: str | None = Field(default=None, description=_PARTITIONS)
    wait_s: float = Field(default=DEFAULT_WAIT_S, ge=0, description=_WAIT)
    allow_out_of_range: bool = Field(default=False, description=_OUTSIDE)
    go_consumers_stopped: str | None = Field(default=None, description=_GO_STOPPED)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class ImportPositionsConfig(Config):
    """Where a group's first positions come from: give `consumer_group` or `checkpoint`."""

    topic: str = Field(description="The data topic.")
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
    partitions: str | None = Field(default=None, description=_PARTITIONS)
    wait_s: float = Field(default=DEFAULT_WAIT_S, ge=0, description=_WAIT)
    allow_out_of_range: bool = Field(default=False, description=_OUTSIDE)
    go_consumers_stopped: str | None = Field(default=None, description=_GO_STOPPED)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class SettingsConfig(Config):
    """How a group is given the settings of its claimer."""

    wait_s: float = Field(default=DEFAULT_WAIT_S, ge=0, description=_WAIT)
    go_consumers_stopped: str | None = Field(default=None, description=_GO_STOPPED_FOR_GOOD)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class ReprocessRangeConfig(Config):
    """Which offsets the group does again."""

    topic: str = Field(description="The data topic.")
    partition: int = Field(ge=0, description="The partition.")
    start: int = Field(ge=0, description="The first offset to do again.")
    end: int = Field(ge=1, description="The first one behind them; the group must have done all before it.")
    within_s: float = Field(
        default=3_600.0,
        gt=0,
        description="Seconds that the group's own runs have for it; then it is given up.",
    )
    wait_s: float = Field(default=DEFAULT_WAIT_S, ge=0, description=_WAIT)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


class RevokeConfig(Config):
    """Whose claims are taken."""

    topic: str = Field(description="The data topic.")
    instance: str = Field(description="The owner, who is dead: an instance id, or the run id in front of it.")
    partitions: str | None = Field(default=None, description=_PARTITIONS)
    dry_run: bool = Field(default=False, description=_DRY_RUN)


def build_pause_job(
    *,
    name: str = "pause_group",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that pauses the group of the claimer `claimer_key`, as its run config (`PauseConfig`) says.

    Members end what they have in hand and leave; a pause in force is replaced. Before and after stand in the metadata.
    A group without settings gets those of the claimer first; one that Go consumers use is paused only when a person
    says that they are stopped (`go_consumers_stopped`).
    """

    def pause(context: OpExecutionContext, config: PauseConfig) -> None:
        with _pausing(context, claimer_key, config) as pausing:
            until_s = _until_s(config, pausing)
            changes = pausing.preview(until_s) if config.dry_run else pausing.pause(until_s)
            _report(context, pausing.group, config.dry_run, pause_table(changes))

    shown = {"duration": _SHOWN_PAUSE, "dry_run": False}
    return _job(name, "Pauses the group.", _op(name, pause, claimer_key), executor_def, tags, shown=shown)


def build_resume_job(
    *,
    name: str = "resume_group",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that ends a pause of the group of the claimer `claimer_key`, whoever began it."""

    def resume(context: OpExecutionContext, config: ResumeConfig) -> None:
        with _pausing(context, claimer_key, config) as pausing:
            if not pausing.is_in_force:
                context.log.info("group %r is not paused", pausing.group)
            changes = pausing.preview() if config.dry_run else pausing.resume()
            _report(context, pausing.group, config.dry_run, pause_table(changes))

    return _job(name, "Ends the group's pause.", _op(name, resume, claimer_key), executor_def, tags)


def build_set_position_job(
    *,
    name: str = "set_position",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that sets where the group of the claimer `claimer_key` goes on (`SetPositionConfig`).

    The group is paused meanwhile; a pause in force is put back. What runs hold that Dagster knows to be over is
    revoked. Before and after stand in the metadata; should it fail half way, the failure says what was set. A group
    without settings gets those of the claimer first. One that Go consumers share is not paused, and nothing is revoked
    in it: a person says that all of its consumers are stopped (`go_consumers_stopped`).
    """

    def set_position(context: OpExecutionContext, config: SetPositionConfig) -> None:
        _set_position(context, _claimer(context, claimer_key), config)

    description = "Sets where the group goes on in a data topic."
    return _job(name, description, _op(name, set_position, claimer_key), executor_def, tags)


def build_import_positions_job(
    *,
    name: str = "adopt_positions",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that gives the group of the claimer `claimer_key` its first positions (`ImportPositionsConfig`).

    They come from a consumer group, or from a checkpoint of Structured Streaming. The run fails where the group has
    positions already; else it does and shows what `build_set_position_job` does.
    """

    def adopt(context: OpExecutionContext, config: ImportPositionsConfig) -> None:
        _adopt(context, _claimer(context, claimer_key), config)

    description = "Takes the group's first positions from where its work was done before."
    return _job(name, description, _op(name, adopt, claimer_key), executor_def, tags)


def build_settings_job(
    *,
    name: str = "set_settings",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that gives the group of the claimer `claimer_key` the settings that this is configured with.

    The group is paused meanwhile, unless nothing of it is there; a pause in force is put back. What runs hold that
    Dagster knows to be over is revoked. Before and after stand in the metadata.
    """

    def set_settings(context: OpExecutionContext, config: SettingsConfig) -> None:
        _set_settings(context, _claimer(context, claimer_key), config)

    description = "Gives the group the settings that its claimer is configured with."
    return _job(name, description, _op(name, set_settings, claimer_key), executor_def, tags)


def build_reprocess_range_job(
    *,
    name: str = "reprocess_range",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that has the group of the claimer `claimer_key` do a range again (`ReprocessRangeConfig`).

    The group's own scheduled runs do it, so these must go on: the job sets the position back, waits until they have
    reached the end, and sets the position to where the group stood. However it ends, but by a kill, the group goes on
    there. The run fails when they were not through in time; the metadata say how far they got.
    """

    def reprocess_range(context: OpExecutionContext, config: ReprocessRangeConfig) -> None:
        _reprocess_range(context, _claimer(context, claimer_key), config)

    description = "Has the group's own runs do a range of offsets again."
    return _job(name, description, _op(name, reprocess_range, claimer_key), executor_def, tags)


def build_revoke_job(
    *,
    name: str = "revoke_claims",
    claimer_key: str = "claimer",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that takes from an owner who is dead what it holds of a data topic (`RevokeConfig`).

    Others can then claim it at once. What was taken stands in the metadata. The run fails when the owner holds nothing,
    or not all could be taken. In a group that Go consumers share another instance takes the partitions and releases
    them; a live Go owner takes them back with its next heartbeat. What dead runs hold is revoked without a person by
    `build_run_failure_sensors`.
    """

    def revoke(context: OpExecutionContext, config: RevokeConfig) -> None:
        _revoke(context, _claimer(context, claimer_key), config)

    return _job(name, "Takes what a dead owner holds.", _op(name, revoke, claimer_key), executor_def, tags)


def _op(name: str, work: Any, claimer_key: str) -> OpDefinition:  # noqa: ANN401 - a function of context and config
    return op(name=f"{name}_op", required_resource_keys={claimer_key})(work)


def _job(
    name: str,
    about: str,
    work: OpDefinition,
    executor_def: ExecutorDefinition,
    tags: Mapping[str, str] | None,
    *,
    shown: Mapping[str, object] | None = None,
) -> JobDefinition:
    """Make the job; `shown` is the op's config as the launchpad opens, by default all that has a default."""

    def do() -> None:
        work()

    config: Any = None if shown is None else {"ops": {work.name: {"config": dict(shown)}}}
    return job(name=name, description=about, config=config, executor_def=executor_def, tags=dict(tags or {}))(do)


def _claimer(context: OpExecutionContext, claimer_key: str) -> ClaimerResource:
    """Give the claimer, and have the run show whose group it acts on."""
    claimer = claimer_of(context.resources, claimer_key)
    tag_run(context, {GROUP_TAG: claimer.group})
    return claimer


def _require_rights(claimer: ClaimerResource, *, dry_run: bool) -> None:
    """Make sure that it can be written before anything is. Raises `AuthorizationError`."""
    if not dry_run:
        claimer.require_rights()


@contextmanager
def _pausing(
    context: OpExecutionContext, claimer_key: str, config: PauseConfig | ResumeConfig
) -> Iterator[GroupPauser]:
    claimer = _claimer(context, claimer_key)
    stopped = are_stopped(config.go_consumers_stopped, claimer.group)
    _require_rights(claimer, dry_run=config.dry_run)
    interval_ms = min(LOOKING_MS, claimer.settings.heartbeat_interval_ms)
    with logs_to_run(context), closing(claimer.open_log(interval_ms)) as rationalizer:
        pausing = GroupPauser(
            rationalizer,
            claimer.group,
            claimer.client_id or context.run_id,
            settings=claimer.settings,
            go_consumers_stopped=stopped,
        )
        pausing.look()
        yield pausing


def _until_s(config: PauseConfig, pausing: GroupPauser) -> int:
    """Give the end of the pause, in unix seconds. Raises `ConfigurationError`."""
    if config.until is not None and config.duration is None:
        until_s = -(-instant_ms(config.until, "until") // _SECOND_MS)
        pausing.require_future(until_s, "until")
        return until_s
    if config.duration is not None and config.until is None:
        return pausing.end_after(duration_s(config.duration, "duration"))
    raise ConfigurationError("give one of until and duration in the run config")


def _set_position(context: OpExecutionContext, claimer: ClaimerResource, config: SetPositionConfig) -> None:
    require_topic_name("topic", config.topic)
    shift_by = None if config.back is None else -config.back
    where = TargetOptions(config.offsets, config.timestamp, config.earliest, config.latest, shift_by)
    named = None if config.partitions is None else partitions_of(config.partitions, "partitions")
    target = where.target()
    stopped = are_stopped(config.go_consumers_stopped, claimer.group)
    _require_rights(claimer, dry_run=config.dry_run)
    with _resetter(PositionResetter, context, claimer, config.topic, stopped=stopped) as work:
        moves = work.look(target, named, allow_out_of_range=config.allow_out_of_range, new_group=True)
        for warning in work.warnings():
            context.log.warning(warning)
        if not config.dry_run:
            _carry_out(context, claimer.group, work, moves, config.wait_s)
    _report_changes(context, claimer.group, moves, dry_run=config.dry_run)


def _adopt(context: OpExecutionContext, claimer: ClaimerResource, config: ImportPositionsConfig) -> None:
    given = PositionSourceOptions(config.consumer_group, config.checkpoint, config.others)
    others = given.begin_at()
    named = None if config.partitions is None else partitions_of(config.partitions, "partitions")
    stopped = are_stopped(config.go_consumers_stopped, claimer.group)
    require_topic_name("topic", config.topic)
    _require_rights(claimer, dry_run=config.dry_run)
    with _resetter(PositionImporter, context, claimer, config.topic, stopped=stopped) as work:
        source = given.source(work.topics, config.topic)
        moves = work.look_at(source, named, others=others, allow_out_of_range=config.allow_out_of_range)
        for warning in (*source.notes, *work.warnings()):
            context.log.warning(warning)
        if not config.dry_run:
            source.require_at_rest()
            _carry_out(context, claimer.group, work, moves, config.wait_s)
    _report_changes(context, claimer.group, moves, dry_run=config.dry_run)


def _reprocess_range(context: OpExecutionContext, claimer: ClaimerResource, config: ReprocessRangeConfig) -> None:
    require_topic_name("topic", config.topic)
    _require_rights(claimer, dry_run=config.dry_run)
    with _resetter(PositionResetter, context, claimer, config.topic, stopped=False) as positions:
        work = RangeReprocessor(positions)
        redo = work.look(config.partition, config.start, config.end)
        for warning in positions.warnings():
            context.log.warning(warning)
        redone = None
        if not config.dry_run:
            redone = work.carry_out(
                redo,
                wait_s=config.wait_s,
                within_s=config.within_s,
                is_dead=EndedRunDetector(context.instance),
                report=context.log.info,
            )
    table = redo_table(redo, redone)
    if redone is not None and redone.problem is not None:
        context.log.warning(redone.problem)
    if redone is not None and redone.reached < redo.end:
        raise Failure(
            f"the group's runs have got to {redone.reached} of {redo.end} within {config.within_s:g} s; it goes on at "
            f"{redone.resume_offset}",
            metadata={"group": claimer.group, "before_and_after": table},
            allow_retries=False,
        )
    _report(context, claimer.group, config.dry_run, table)


@contextmanager
def _resetter(
    kind: type[_Resetter], context: OpExecutionContext, claimer: ClaimerResource, topic: str, *, stopped: bool
) -> Iterator[_Resetter]:
    with (
        logs_to_run(context),
        claimer.open_data() as topics,
        closing(
            kind(
                claimer.open_log,
                topics,
                claimer.group,
                topic,
                claimer.client_id or context.run_id,
                SystemClock(),
                settings=claimer.settings,
                go_consumers_stopped=stopped,
            )
        ) as work,
    ):
        yield work


def _set_settings(context: OpExecutionContext, claimer: ClaimerResource, config: SettingsConfig) -> None:
    stopped = are_stopped(config.go_consumers_stopped, claimer.group)
    client = claimer.client_id or context.run_id
    _require_rights(claimer, dry_run=config.dry_run)
    work = GroupSettingsAdmin(claimer.open_log, claimer.group, client, SystemClock(), stopped)
    with logs_to_run(context), closing(work):
        before = work.look(new_group=True)
        after = before
        if all(each.settings == claimer.settings for each in before.values()):
            context.log.info("group %r has these settings already", claimer.group)
        elif config.dry_run:
            work.require_allowed()
            after = {n: replace(each, settings=claimer.settings, by_default=False) for n, each in before.items()}
        else:
            after = dict(
                work.set_settings(claimer.settings, wait_s=config.wait_s, is_dead=EndedRunDetector(context.instance))
            )
    _report(context, claimer.group, config.dry_run, settings_table(before, after))


def _report_changes(context: OpExecutionContext, group: str, moves: Sequence[PositionChange], *, dry_run: bool) -> None:
    _report(context, group, dry_run, move_table(moves, () if dry_run else [move.partition for move in moves]))


def _carry_out(
    context: OpExecutionContext,
    group: str,
    work: PositionResetter,
    moves: Sequence[PositionChange],
    wait_s: float,
) -> None:
    """Set the positions; should it fail, have the failure say what was set."""
    try:
        problem = work.carry_out(moves, wait_s=wait_s, is_dead=EndedRunDetector(context.instance))
    except MarshalError as error:
        done = _done(context, work, moves)
        metadata: dict[str, Any] = {"group": group, "before_and_after": move_table(moves, done)}
        raise Failure(f"{error}. Set: partitions {done}", metadata=metadata, allow_retries=False) from error
    except BaseException:
        context.log.exception(
            "the run was stopped; of the positions were set: partitions %s", _done(context, work, moves)
        )
        raise
    if problem is not None:
        context.log.warning(problem)


def _done(context: OpExecutionContext, work: PositionResetter, moves: Sequence[PositionChange]) -> list[int]:
    """Give the partitions that were set, by what the log shows."""
    try:
        return sorted(work.done(moves))
    except MarshalError as error:
        context.log.warning("what was set could not be read: %s", error)
        return []


def _revoke(context: OpExecutionContext, claimer: ClaimerResource, config: RevokeConfig) -> None:
    require_topic_name("topic", config.topic)
    named = None if config.partitions is None else partitions_of(config.partitions, "partitions")
    client = claimer.client_id or context.run_id
    _require_rights(claimer, dry_run=config.dry_run)
    with (
        logs_to_run(context),
        closing(ClaimRevoker(claimer.open_log, claimer.group, config.topic, client)) as work,
    ):
        held = work.look()
        claims = held_by(config.instance, held, named)
        if not claims:
            raise Failure(holds_nothing_text(config.instance, config.topic, held), allow_retries=False)
        taken = [] if config.dry_run else work.carry_out(claims)
        is_go = work.is_go
        if is_go:
            context.log.warning(
                "nothing can be revoked in group %r, which Go consumers share, or may because it has no settings: a "
                "live Go owner takes its partitions back with its next heartbeat, within a minute",
                claimer.group,
            )
            back = {each.partition for each in work.taken_back(taken)} if taken else set()
            taken = [each for each in taken if each.partition not in back]
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
    _report(context, claimer.group, config.dry_run, table)


def _report(context: OpExecutionContext, group: str, dry_run: bool, table: TableMetadataValue) -> None:  # noqa: FBT001
    if dry_run:
        context.log.info("a dry run: nothing was written")
    context.add_output_metadata({"group": group, "dry_run": dry_run, "before_and_after": table})
