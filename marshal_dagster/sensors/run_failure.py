"""Sensors that revoke what a run held, as soon as Dagster says that it failed or was canceled."""

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
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS
from marshal_dagster.protocol.staleness import GO_ALLOWANCE_MS, stale_after_ms
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.resources.claimer import ClaimerResource, Revocation, claimer_of, require_group
from marshal_dagster.runs.abandoned_work import abandoned_partition, listed
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, run_of, sensor_name
from marshal_dagster.runs.status import FINISHED
from marshal_dagster.sensors._dropped_ranges import possibly_dropped

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
    """Build the two sensors that revoke what a run held, as soon as Dagster says that it failed or was canceled.

    Others can then claim at once instead of waiting until the claim is stale. Should processes of the run still
    live, they are fenced: their next heartbeat or commit is refused. Where Go consumers share the group nothing is
    revoked: what the run held goes stale by itself, two minutes after its last heartbeat. In at most once it is also
    reported what the run possibly dropped, whoever holds the partitions by then. They watch `monitored_jobs`, by
    default all of their code location. The claimer of resource `claimer_key` says of which group and log; it writes,
    which takes WRITE on the coordination topic. Default names: `<group>_failed_runs` and `<group>_canceled_runs`.
    Raises `ConfigurationError`.
    """
    require_group(group)

    def revoke(context: RunStatusSensorContext, **_resources: object) -> SensorResult | SkipReason:
        """Revoke what the run held."""
        return _revoke_run(context, group, claimer_of(context.resources, claimer_key))

    def build(status: DagsterRunStatus, word: str) -> SensorDefinition:
        return RunStatusSensorDefinition(
            name=sensor_name(group, f"{word}_runs") if name is None else f"{name}_{word}_runs",
            run_status=status,
            run_status_sensor_fn=revoke,
            minimum_interval_seconds=minimum_interval_s,
            description=f"Revokes what a {word} run held of group {group!r}, so that others can claim it at once.",
            monitored_jobs=monitored_jobs,
            monitor_all_code_locations=monitor_all_code_locations,
            default_status=default_status,
            required_resource_keys={claimer_key},
        )

    return build(DagsterRunStatus.FAILURE, "failed"), build(DagsterRunStatus.CANCELED, "canceled")


def _revoke_run(context: RunStatusSensorContext, group: str, claimer: ClaimerResource) -> SensorResult | SkipReason:
    if claimer.group != group:
        raise ConfigurationError(f"the claimer of a dead-run sensor must be of group {group!r}, not {claimer.group!r}")
    run_id = context.dagster_run.run_id
    revocation = claimer.revoke_runs([run_id])
    texts = _revocation_texts(f"run {run_id}", revocation, claimer)
    try:
        if others := _other_ended_runs(context, claimer):
            whose = f"{len(others)} other runs that are over"
            texts += _revocation_texts(whose, claimer.revoke_runs(others), claimer)
    except (UnavailableError, CoordinationLogChangedError) as error:
        texts.append(f"what other runs held that are over cannot be revoked now: {error}")
    observations: list[AssetObservation] = []
    try:
        # The log is read only if the run announced something.
        drops = possibly_dropped(context.instance, group, context.dagster_run, claimer.group_keys)
    except UnavailableError as error:
        texts.append(
            f"what the run possibly dropped is not known now, the stale-claim sensor reports it later: {error}"
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
    """Return the other runs that hold something of the group and of which Dagster says that they are over."""
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
        texts.append(f"revoked what {whose} held: {_described(revocation.taken)}")
    if revocation.kept:
        texts.append(
            f"could not revoke what {whose} holds: {_described(revocation.kept)}: {revocation.problem}. "
            f"Unless its processes live, these claims go stale by themselves within "
            f"{2 * claimer.heartbeat_interval_s:g} s of its last heartbeat"
        )
    if revocation.awaited:
        texts.append(
            f"Go consumers share group {claimer.group!r}, or may because it has no settings, so what {whose} held is "
            f"not revoked: {_described(revocation.awaited)}. It goes stale by itself within "
            f"{_GO_STALE_S:g} s of its last heartbeat"
        )
    return texts


def _described(keys: Mapping[DataPartitionId, Key]) -> str:
    held = []
    for (topic, partition), key in sorted(keys.items(), key=itemgetter(0)):
        if key.owner is not None:
            held.append(abandoned_partition(topic, partition, key, key.last_beat_ms))
        held += [abandoned_partition(topic, partition, key, range_.last_beat_ms, range_) for range_ in key.ranges]
    return listed(held)
