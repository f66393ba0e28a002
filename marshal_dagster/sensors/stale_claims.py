"""The sensor that finds the unfinished work of dead members and requests runs that repeat it.

Unfinished work is a stale claim or an open plan without a live owner (`marshal_dagster.runs.abandoned_work`). The
sensor checks which runs it requested before (`_run_history`), and reports work that failed too many times
(`_exhausted_plans`). In `at_most_once` it reports dropped ranges instead (`_dropped_ranges`).
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from dagster import (
    AssetCheckEvaluation,
    AssetObservation,
    DefaultSensorStatus,
    Failure,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
)
from pydantic import Field

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.pause import missing_group
from marshal_dagster.admin.position_spec import partitions_text
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.errors import ConfigurationError, IncompleteLogError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.ops.user_function import check_arguments, function_text
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.open_plans import OpenPlan, way_out
from marshal_dagster.protocol.world import World
from marshal_dagster.resources.claimer import require_group, resource_of
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import (
    MAX_NAMED,
    AbandonedPartition,
    ExpectedKeyState,
    abandoned_partitions,
    first_ten,
    listed,
    why_paused,
)
from marshal_dagster.runs.announcements import announced_ranges
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, TIMELINE_TAG, sensor_name
from marshal_dagster.sensors._cursor import Cursor
from marshal_dagster.sensors._dropped_ranges import DroppedRangeWatcher, KeysView
from marshal_dagster.sensors._exhausted_plans import (
    MOST_REMEMBERED,
    AlertHook,
    ExhaustedPlan,
    ExhaustedPlans,
    digest,
    evaluation,
    exhausted_plans_check_key,
)
from marshal_dagster.sensors._run_history import (
    FIRST_WAIT_S,
    STALE_CLAIM,
    PreviousRuns,
    digest_of,
    next_key,
    place_of,
    previous_runs,
    request_tags,
)
from marshal_dagster.timeline.shell_command import timeline_command

if TYPE_CHECKING:
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator

_MOST_REPORTED: Final = 1_000
_MOST_LOGGED: Final = 1_000
_TRIED_WITHIN_S: Final = 3_600
"""The picture of an exhausted plan begins this long ago, because the log of its attempts is not searched."""


class Grouping(StrEnum):
    """The partitions for which one run is requested."""

    TOPIC = "topic"
    """All abandoned partitions of a topic."""
    PARTITION = "partition"
    """One partition."""


class StaleClaimCursor(Cursor):
    """The sensor's cursor. All other state is in the log and in Dagster's run storage."""

    reported: dict[str, int] = Field(default_factory=dict)
    """For each `topic/partition`, the epoch of the dead at-most-once owner that was reported last."""
    looked_at: dict[str, int] = Field(default_factory=dict)
    """For each topic, Dagster's storage id of the last observation that was searched for announcements."""
    looked_at_runs: dict[str, str] = Field(default_factory=dict)
    """For each topic, the id of the run that made this observation."""
    watched: dict[str, int] = Field(default_factory=dict)
    """At most 200 unfinished runs that announced ranges, see `DroppedRangeWatcher`."""
    checked: dict[str, str] = Field(default_factory=dict)
    """For each topic, a digest of the state for which the check of exhausted plans was evaluated last."""
    alerted: dict[str, list[str]] = Field(default_factory=dict)
    """For each topic, at most 1,000 exhausted plans for which the alert hook was called."""

    def report(self, left: Sequence[AbandonedPartition]) -> None:
        """Remember that `left` was reported; forget the oldest beyond 1,000."""
        epochs = self.reported | {
            f"{dead.topic}/{dead.partition}": dead.epoch for dead in left if dead.epoch is not None
        }
        self.reported = dict(list(epochs.items())[-_MOST_REPORTED:])

    def has_reported(self, left: AbandonedPartition) -> bool:
        """Return whether this owner was reported."""
        return self.reported.get(f"{left.topic}/{left.partition}") == left.epoch


class _Target(NamedTuple):
    """The job and the op that process the abandoned partitions of a topic."""

    job: str
    op: str
    topic: str


def build_stale_claim_sensor(
    jobs: AnyJob | Sequence[AnyJob],
    *,
    group: str,
    name: str | None = None,
    grouping: Grouping | str = Grouping.TOPIC,
    max_runs_per_tick: int = 10,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    retry_wait_s: float = FIRST_WAIT_S,
    on_exhausted_plans: AlertHook | None = None,
    translator: "DagsterMarshalTranslator | None" = None,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    rationalizer_key: str = "rationalizer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build a sensor that finds the unfinished work of dead members, and requests runs that repeat it.

    The sensor watches the topics of the jobs. It finds partitions with a stale owner, and open plans without a live
    owner. Where members claim ranges, it finds planned ranges without a live owner too. It requests one run for each
    topic or partition, and more if several ranges of one partition are left.

    A run that succeeds moves the offset, so the same work is never requested twice. After a failure the sensor requests
    a separate run for each partition. It waits `retry_wait_s` first, then twice as long each time, up to an hour.

    The sensor stops if a plan was retried `max_attempts` times or as many runs failed. It then reports an exhausted
    plan in three places: the log of the tick, the failed asset check of `build_exhausted_plans_check`, and
    `on_exhausted_plans`.

    A tick fails if the coordination log of a topic is incomplete, because only an operator can recover it, or if
    `on_exhausted_plans` failed. If there is other work, that is requested first.

    In `at_most_once` committed work is never repeated. The sensor reports the ranges that a run possibly dropped, in
    the log of the tick and as an observation of the topic. If Go consumers share the group, or it has no settings, an
    owner is stale 121 s after its last heartbeat.

    Args:
        jobs: One or more jobs of `build_reprocess_job`, for different topics.
        group: The group.
        name: The name of the sensor (default: `<group>_stale_claims`). In the default name `_` replaces characters that
            Dagster does not allow. If it replaces any other than dashes, a digest is added.
        grouping: Whether one run is requested for each topic (`topic`) or for each partition (`partition`).
        max_runs_per_tick: The maximum number of runs that a tick requests.
        max_attempts: How often a plan is retried, or how many runs may fail, before an operator must act.
        retry_wait_s: How long to wait after the first failed run, in seconds.
        on_exhausted_plans: A function that is called for new exhausted plans, see `AlertHook`.
        translator: Defines the key of the topic's asset (default: `kafka/<topic>`), to which the check belongs.
        minimum_interval_s: The minimum time between two ticks, in seconds.
        rationalizer_key: The key of the `RationalizerResource`, which reads the coordination log.
        default_status: `RUNNING` starts the sensor with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: An argument is invalid, or a job has no claimed-batch op.

    Example:
        ```python
        redo = build_reprocess_job(orders_per_shop)
        sensor = build_stale_claim_sensor(redo, group="shops", default_status=DefaultSensorStatus.RUNNING)
        ```
    """
    require_group(group)
    for field_name, value in (("max_runs_per_tick", max_runs_per_tick), ("max_attempts", max_attempts)):
        if value < 1:
            raise ConfigurationError(f"{field_name} is {value}; it must be at least 1")
    if on_exhausted_plans is not None:
        check_arguments(on_exhausted_plans, ("found",))
    if not 0 <= retry_wait_s < math.inf:
        raise ConfigurationError(f"retry_wait_s is {retry_wait_s}; it must be a number of seconds, 0 or more")
    wanted = [jobs] if isinstance(jobs, AnyJob) else list(jobs)
    targets = _targets(wanted)
    grouped = enum_member(Grouping, "grouping", grouping)

    # Dagster also passes resources by keyword if a test calls the sensor directly.
    def stale_claims(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Find the unfinished work of dead members, and request runs that repeat it."""
        tick = _Tick(
            context,
            group,
            targets,
            grouped,
            max_runs_per_tick,
            max_attempts,
            retry_wait_s,
            on_exhausted_plans,
            translator,
        )
        return tick.run(resource_of(RationalizerResource, context.resources, rationalizer_key))

    return SensorDefinition(
        name=name or sensor_name(group, "stale_claims"),
        evaluation_fn=stale_claims,
        jobs=wanted,
        minimum_interval_seconds=minimum_interval_s,
        required_resource_keys={rationalizer_key},
        default_status=default_status,
        description=f"Finds the unfinished work of dead members of group {group!r}, and requests runs that repeat it.",
    )


def _targets(jobs: Sequence[AnyJob]) -> list[_Target]:
    targets: dict[str, _Target] = {}
    for job in jobs:
        ops = claimed_batch_ops(job)
        if not ops:
            raise ConfigurationError(f"job {job.name!r} has no claimed-batch op: build it with build_reprocess_job")
        for topic, op_name in ops.items():
            if topic in targets:
                raise ConfigurationError(
                    f"jobs {targets[topic].job!r} and {job.name!r} both process topic {topic!r}: pass one of them"
                )
            targets[topic] = _Target(job.name, op_name, topic)
    return list(targets.values())


@dataclass(slots=True)
class _Tick:
    """One evaluation of the sensor."""

    context: SensorEvaluationContext
    group: str
    targets: Sequence[_Target]
    grouping: Grouping
    max_runs_per_tick: int
    max_attempts: int
    retry_wait_s: float
    on_exhausted_plans: AlertHook | None
    translator: "DagsterMarshalTranslator | None"
    requests: list[RunRequest] = field(default_factory=list)
    events: list[AssetObservation | AssetCheckEvaluation] = field(default_factory=list)
    given_up: defaultdict[str, list[ExhaustedPlan]] = field(default_factory=lambda: defaultdict(list))
    """The exhausted plans of each topic."""
    coordination_topic: str = DEFAULT_COORDINATION_TOPIC
    reasons: list[str] = field(default_factory=list)
    """Why no run is requested for some of the unfinished work."""
    problem: Exception | None = None
    """The error with which the tick fails, if nothing is lost by that."""

    def run(self, rationalizer: RationalizerResource) -> SensorResult:
        """Examine every topic, and return the result of the tick."""
        self.coordination_topic = rationalizer.coordination_topic
        cursor = StaleClaimCursor.read(self.context.cursor)
        wall_ms = time.time_ns() // 1_000_000
        found: dict[_Target, list[AbandonedPartition]] = {}
        at_most_once: set[str] = set()
        with rationalizer.world() as world:
            self._check_group(world)
            for target in self.targets:
                topic = target.topic
                if world.group_of(self.group, topic).settings.delivery is DeliveryMode.AT_MOST_ONCE:
                    at_most_once.add(topic)
                barred = self._why_barred(world, topic, wall_ms)
                if barred is None:
                    found[target] = abandoned_partitions(world, self.group, topic, wall_ms)
                else:
                    self._add_reason(barred)
            announcing = sorted(at_most_once | cursor.looked_at.keys() & {target.topic for target in self.targets})
            view = KeysView.of(world, self.group, wall_ms) if announcing else None
        if view is not None:
            self._report_drops(cursor, announcing, view)
        for target, partitions in found.items():
            wanted = partitions
            if target.topic in at_most_once:
                wanted = [left for left in partitions if left.plan_end is not None]
                self._report_dead(cursor, [left for left in partitions if left.plan_end is None])
            if wanted:
                self._request_runs(target, wanted)
        for target in found:
            self._report_exhausted_plans(cursor, target.topic)
        if self.problem is not None and not self._has_news(cursor):
            raise self.problem
        return SensorResult(
            run_requests=self.requests,
            skip_reason=None if self.requests else SkipReason(self._why_skipped()),
            cursor=cursor.model_dump_json(),
            asset_events=self.events,
        )

    def _check_group(self, world: World) -> None:
        if (missing := missing_group(world, self.group)) is not None:
            self._add_reason(missing, logging.WARNING)

    def _why_barred(self, world: World, topic: str, wall_ms: int) -> str | None:
        """Return why no member can claim the topic now, or None. Remember the error of an incomplete log."""
        try:
            require_certain(world, topic)
        except IncompleteLogError as error:
            self.problem = error
            return str(error)
        return why_paused(world, self.group, topic, wall_ms)

    def _has_news(self, cursor: StaleClaimCursor) -> bool:
        """Return whether a failure of the tick would lose anything: requests, events or changes of the cursor."""
        return bool(self.requests or self.events) or cursor != StaleClaimCursor.read(self.context.cursor)

    def _add_reason(self, reason: str, level: int = logging.INFO) -> None:
        self.reasons.append(reason)
        if len(self.reasons) <= _MOST_LOGGED:
            self.context.log.log(level, reason)

    def _why_skipped(self) -> str:
        shown = first_ten(self.reasons, "; ") or "nothing to redo"
        if len(self.reasons) <= MAX_NAMED:
            return shown
        logged = "" if len(self.reasons) <= _MOST_LOGGED else f", which has the first {_MOST_LOGGED:,}"
        return f"{shown} in the log of this tick{logged}"

    def _report_drops(self, cursor: StaleClaimCursor, topics: Sequence[str], view: KeysView) -> None:
        """Report once what each at-most-once run possibly dropped, even if other members hold the partitions by now."""
        watcher = DroppedRangeWatcher(
            self.context.instance, self.group, cursor.looked_at, cursor.looked_at_runs, cursor.watched
        )
        for drops in watcher.look(topics, view):
            self._add_reason(drops.describe(), logging.WARNING)
            self.events += drops.observations()
        for run_id in watcher.given_up:
            self._add_reason(
                f"run {run_id} is unfinished, but too many newer runs are watched: its drops are not reported"
            )
        cursor.watched = watcher.watched

    def _report_dead(self, cursor: StaleClaimCursor, dead: Sequence[AbandonedPartition]) -> None:
        """Report once, for each dead at-most-once owner, why no run is requested; `_report_drops` reports the drops."""
        new = [left for left in dead if not cursor.has_reported(left)]
        announced_by: dict[str, set[tuple[str, int, int]]] = {}
        for left in new:
            run_id = left.run_id
            if not run_id or not self.context.instance.has_run(run_id):
                reason = f"{left}: this Dagster instance has no run {run_id or '(none)'}, so its drops are unknown"
                self._add_reason(reason, logging.WARNING)
                continue
            if run_id not in announced_by:
                rows = announced_ranges(self.context.instance, run_id)
                announced_by[run_id] = {(row.topic, row.partition, row.epoch) for row, _ in rows}
            if (left.topic, left.partition, left.epoch) not in announced_by[run_id]:
                self._add_reason(
                    f"{left}: nothing was dropped, because the run died before it committed", logging.WARNING
                )
        cursor.report(new)

    def _request_runs(self, target: _Target, found: Sequence[AbandonedPartition]) -> None:
        """Request runs for `found`, except for work that a run is processing, and exhausted plans."""
        previous = previous_runs(self.context.instance, self.group, job=target.job, op_name=target.op, found=found)
        pending: defaultdict[str, list[AbandonedPartition]] = defaultdict(list)
        for left in found:
            pending[previous.pending_run(left) or ""].append(left)
        wanted = [left for left in pending.pop("", []) if self._is_wanted(left, previous)]
        for run_id, waiting in pending.items():
            self._add_reason(f"run {run_id} was requested and has not ended: {listed(waiting)}")
        bundles = self._bundles(wanted, previous)
        room = self.max_runs_per_tick - len(self.requests)
        if later := sum(map(len, bundles[room:])):
            self._add_reason(f"{later} partitions of {target.topic!r} wait for the next tick")
        for bundle in bundles[:room]:
            self.requests.append(self._request(target, bundle, previous))
            drawn = self._timeline_command(target.topic, bundle, previous.now_s)
            self.context.log.info("requesting a run for %s; `%s` draws what happened", listed(bundle), drawn)

    def _bundles(self, wanted: Sequence[AbandonedPartition], previous: PreviousRuns) -> list[list[AbandonedPartition]]:
        """Return the partitions of each run to request.

        A partition with a failed or futile run gets a run of its own, because another partition may have caused the
        failure. Two ranges of one partition are in different runs, because a batch has at most one range of a
        partition.
        """
        together: list[dict[int, AbandonedPartition]] = []
        alone: list[list[AbandonedPartition]] = []
        for left in wanted:
            if self.grouping is Grouping.PARTITION or previous.futile_runs(left):
                alone.append([left])
                continue
            bundle = next((bundle for bundle in together if left.partition not in bundle), None)
            if bundle is None:
                together.append(bundle := {})
            bundle[left.partition] = left
        return [*(list(bundle.values()) for bundle in together), *alone]

    def _is_wanted(self, left: AbandonedPartition, previous: PreviousRuns) -> bool:
        futile_runs = previous.futile_runs(left)
        if left.plan_end is not None and left.plan_attempts >= self.max_attempts:
            plan = OpenPlan(
                self.group, left.topic, left.partition, left.offset, left.plan_end, left.plan_attempts, left.generation
            )
            advice = way_out([plan], {left.partition: left.position})
            reason = f"no more runs after {plan.tries} attempts. {advice}"
            self._give_up(left, left.plan_attempts, futile_runs, reason)
        elif previous.is_settled(left):
            return False
        elif len(futile_runs) >= self.max_attempts:
            reason = (
                f"no more runs after {len(futile_runs)} runs that failed or changed nothing. Check the last one, fix "
                "the cause and launch the job yourself"
            )
            self._give_up(left, len(futile_runs), futile_runs, reason)
        elif (wait_s := previous.wait_s(left, self.retry_wait_s)) > 0:
            why = (
                "the last run failed or changed nothing"
                if futile_runs
                else "the last run found it held by another member or paused"
            )
            self._add_reason(f"{left}: {why}, next request in {wait_s:.0f} s")
        else:
            return True
        return False

    def _give_up(self, left: AbandonedPartition, attempts: int, run_ids: Sequence[str], reason: str) -> None:
        reason = f"{left}: {reason}"
        plan = ExhaustedPlan(
            left.partition, left.offset, left.plan_end, left.generation, attempts, tuple(run_ids), reason
        )
        self.given_up[left.topic].append(plan)
        self._add_reason(reason, logging.WARNING)

    def _report_exhausted_plans(self, cursor: StaleClaimCursor, topic: str) -> None:
        """Evaluate the check if its state has changed, and call the hook for new exhausted plans."""
        plans = self.given_up[topic]
        key = exhausted_plans_check_key(self.group, topic, self.translator)
        state = digest(key, plans)
        if cursor.checked.get(topic) != state:
            drawn = self._timeline_since(topic, time.time() - _TRIED_WITHIN_S)
            self.events.append(evaluation(key, self.group, plans, drawn))
            cursor.checked[topic] = state
        if self.on_exhausted_plans is None:
            cursor.alerted.pop(topic, None)
            return
        places = {plan.place: plan for plan in plans[:MOST_REMEMBERED]}
        alerted = [place for place in cursor.alerted.get(topic, []) if place in places]
        new = tuple(plan for place, plan in places.items() if place not in set(alerted))
        if new:
            try:
                self.on_exhausted_plans(ExhaustedPlans(self.group, topic, new, len(plans)))
                alerted = list(places)
            except Exception as error:
                self.context.log.exception("on_exhausted_plans failed and is called again at the next tick")
                self.problem = self.problem or Failure(
                    f"{function_text(self.on_exhausted_plans)} is the option on_exhausted_plans and failed, so no "
                    f"operator was alerted to {len(new)} exhausted plans of topic {topic!r}; it is called again at the "
                    f"next tick: {error!r}"
                )
        cursor.alerted[topic] = alerted

    def _request(self, target: _Target, bundle: Sequence[AbandonedPartition], previous: PreviousRuns) -> RunRequest:
        config = {
            "partitions": partitions_text({left.partition for left in bundle}),
            "max_batches": 1,
            "seen": [_as_run_config(left) for left in bundle],
        }
        name, first = digest_of(self.group, bundle), bundle[0]
        place = place_of(first.partition, first.generation, first.offset)
        what = place if len(bundle) == 1 else f"{len(bundle)} partitions/{name}"
        return RunRequest(
            run_key=f"{self.group}/{target.topic}/{what}.{next_key(self.context.instance, name)}",
            job_name=target.job,
            run_config={"ops": {target.op: {"config": config}}},
            tags={
                **request_tags(self.group, target.topic, STALE_CLAIM, name, previous.now_s),
                TIMELINE_TAG: self._timeline_command(target.topic, bundle, previous.now_s),
            },
        )

    def _timeline_command(self, topic: str, partitions: Sequence[AbandonedPartition], now_s: float) -> str:
        """Return the command that draws the picture from before the last heartbeat of the owner that died first."""
        silent_s = max(left.silent_s or 0.0 for left in partitions)
        return self._timeline_since(topic, now_s - silent_s)

    def _timeline_since(self, topic: str, event_s: float) -> str:
        return timeline_command(self.group, topic, round(event_s * 1_000), coordination_topic=self.coordination_topic)


def _as_run_config(left: AbandonedPartition) -> dict[str, object]:
    """Return the fields of `ExpectedKeyState` as run config, without the cost of creating the objects."""
    return {name: value for name in ExpectedKeyState.model_fields if (value := getattr(left, name)) is not None}
