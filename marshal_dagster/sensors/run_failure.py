"""Sensors that revoke the claims of a run as soon as Dagster reports that it failed or was canceled.

Without them other members wait until the claims are stale. The stale-claim sensor is still needed for runs whose end
Dagster does not notice.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Final

from dagster import (
    AssetObservation,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunsFilter,
    RunStatusSensorContext,
    RunStatusSensorDefinition,
    SensorDefinition,
    SensorResult,
    SkipReason,
)

from marshal_dagster.errors import ConfigurationError, CoordinationLogChangedError, UnavailableError
from marshal_dagster.jobs.batch import AnyJob
from marshal_dagster.ops.dropped_ranges import possibly_dropped
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS
from marshal_dagster.protocol.staleness import GO_ALLOWANCE_MS, stale_after_ms
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.resources.claimer import ClaimerResource, Revocation, claimer_of, require_group
from marshal_dagster.runs.abandoned_work import abandoned_partition, listed
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, run_of, sensor_name
from marshal_dagster.runs.status import FINISHED

_GO_STALE_S: Final = (stale_after_ms(GO_HEARTBEAT_INTERVAL_MS) + GO_ALLOWANCE_MS) / 1_000


def build_run_failure_sensors(
    *,
    group: str,
    name: str | None = None,
    monitored_jobs: Sequence[AnyJob] | None = None,
    monitor_all_code_locations: bool = False,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    claimer_key: str = "claimer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> tuple[SensorDefinition, SensorDefinition]:
    """Build two sensors that revoke the claims of a run as soon as Dagster reports that it failed or was canceled.

    Other members can then claim the partitions at once, instead of waiting until the claims are stale. If processes of
    the run are still alive, they are fenced: their next heartbeat or commit is refused. In `at_most_once` the sensors
    also report the ranges that the run possibly dropped.

    In a group that Go consumers share, the sensors revoke nothing. There the claims become stale two minutes after the
    last heartbeat.

    The sensors need WRITE on the coordination topic.

    Args:
        group: The group. It must be the group of the claimer.
        name: The first part of the names of the sensors (default: `group`). The names are `<name>_failed_runs` and
            `<name>_canceled_runs`.
        monitored_jobs: The jobs whose runs are watched (default: all jobs of the code location).
        monitor_all_code_locations: Whether to watch the runs of all code locations.
        minimum_interval_s: The minimum time between two ticks, in seconds.
        claimer_key: The key of the `ClaimerResource`, which connects to the coordination topic.
        default_status: `RUNNING` starts the sensors with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor for failed runs and the sensor for canceled runs, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: `group` is not a valid name.

    Example:
        ```python
        sensors = build_run_failure_sensors(group="shops", default_status=DefaultSensorStatus.RUNNING)
        defs = Definitions(sensors=[*sensors], resources={"claimer": claimer})
        ```
    """
    require_group(group)

    def revoke(context: RunStatusSensorContext, **_resources: object) -> SensorResult | SkipReason:
        """Revoke the claims of the run."""
        return _revoke_run(context, group, claimer_of(context.resources, claimer_key))

    def build(status: DagsterRunStatus, word: str) -> SensorDefinition:
        return RunStatusSensorDefinition(
            name=sensor_name(group, f"{word}_runs") if name is None else f"{name}_{word}_runs",
            run_status=status,
            run_status_sensor_fn=revoke,
            minimum_interval_seconds=minimum_interval_s,
            description=f"Revokes the claims of {word} runs of group {group!r}, so that other runs can claim at once.",
            monitored_jobs=monitored_jobs,
            monitor_all_code_locations=monitor_all_code_locations,
            default_status=default_status,
            required_resource_keys={claimer_key},
        )

    return build(DagsterRunStatus.FAILURE, "failed"), build(DagsterRunStatus.CANCELED, "canceled")


def _revoke_run(context: RunStatusSensorContext, group: str, claimer: ClaimerResource) -> SensorResult | SkipReason:
    if claimer.group != group:
        raise ConfigurationError(
            f"the sensor is for group {group!r}, but its claimer is for group {claimer.group!r}: pass the claimer's "
            "group to build_run_failure_sensors, or another claimer_key"
        )
    run_id = context.dagster_run.run_id
    revocation = claimer.revoke_runs([run_id])
    texts = _revocation_texts(f"run {run_id}", revocation, claimer)
    try:
        if others := _other_ended_runs(context, claimer):
            whose = f"{len(others)} other ended runs"
            texts += _revocation_texts(whose, claimer.revoke_runs(others), claimer)
    except (UnavailableError, CoordinationLogChangedError) as error:
        texts.append(f"the claims of other ended runs cannot be revoked now: {error}")
    observations: list[AssetObservation] = []
    try:
        # The log is read only if the run announced ranges.
        drops = possibly_dropped(context.instance, group, context.dagster_run, claimer.group_keys)
    except UnavailableError as error:
        texts.append(
            f"ranges that the run possibly dropped are unknown now, the stale-claim sensor reports them later: {error}"
        )
    else:
        texts += [drops.describe()] if drops.rows else []
        observations += drops.observations()
    if not texts:
        return SkipReason(f"run {run_id} held nothing of group {group!r}")
    log = context.log.error if revocation.kept else context.log.info
    log("; ".join(texts))
    return SensorResult(skip_reason="; ".join(texts), asset_events=observations)


def _other_ended_runs(context: RunStatusSensorContext, claimer: ClaimerResource) -> list[str]:
    """Return the ids of other runs that hold claims of the group although Dagster reports that they have ended."""
    keys = claimer.group_keys().values()
    owners = [owner for key in keys for owner in key.owners]
    holding = {run_of(owner.instance) for owner in owners} - {context.dagster_run.run_id, ""}
    if not holding:
        return []
    ended = context.instance.get_runs(RunsFilter(run_ids=sorted(holding), statuses=list(FINISHED)))
    return [run.run_id for run in ended]


def _revocation_texts(whose: str, revocation: Revocation, claimer: ClaimerResource) -> list[str]:
    texts = []
    if revocation.taken:
        texts.append(f"revoked the claims of {whose}: {_described(revocation.taken)}")
    if revocation.kept:
        texts.append(
            f"could not revoke the claims of {whose}: {_described(revocation.kept)}: {revocation.problem}. "
            f"They become stale {2 * claimer.heartbeat_interval_s:g} s after the last heartbeat, unless processes of "
            "the run are alive"
        )
    if revocation.awaited:
        texts.append(
            f"the claims of {whose} are not revoked, because group {claimer.group!r} is shared with Go consumers or "
            f"has no settings: {_described(revocation.awaited)}. They become stale {_GO_STALE_S:g} s after the last "
            "heartbeat"
        )
    return texts


def _described(keys: Mapping[DataPartitionId, Key]) -> str:
    held = []
    for (topic, partition), key in sorted(keys.items(), key=itemgetter(0)):
        if key.owner is not None:
            held.append(abandoned_partition(topic, partition, key, key.last_beat_ms))
        held += [abandoned_partition(topic, partition, key, range_.last_beat_ms, range_) for range_ in key.ranges]
    return listed(held)
