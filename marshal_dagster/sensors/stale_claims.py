"""The sensor that finds what dead members left and asks for runs that redo it."""

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
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
)
from pydantic import Field

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.ops.user_function import check_arguments
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.open_plans import retry_command
from marshal_dagster.resources.claimer import require_group, resource_of
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import (
    MAX_NAMED,
    AbandonedPartition,
    ExpectedKeyState,
    abandoned_partitions,
    first_ten,
    listed,
    why_unclaimable,
)
from marshal_dagster.runs.announcements import announced_ranges
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, sensor_name
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

if TYPE_CHECKING:
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator

_MOST_REPORTED: Final = 1_000
_MOST_LOGGED: Final = 1_000


class Grouping(StrEnum):
    """What one run is requested for."""

    TOPIC = "topic"
    PARTITION = "partition"


class StaleClaimCursor(Cursor):
    """What the sensor remembers from tick to tick; all else is in the log and in Dagster's runs."""

    reported: dict[str, int] = Field(default_factory=dict)
    """For `topic/partition`: the epoch of the dead at-most-once owner that was reported last."""
    looked_at: dict[str, int] = Field(default_factory=dict)
    """For each topic: up to which of its observations (Dagster's storage id) announcements were looked for."""
    looked_at_runs: dict[str, str] = Field(default_factory=dict)
    """For each topic: the run of that observation."""
    watched: dict[str, int] = Field(default_factory=dict)
    """At most 200 runs that announced what they were about to commit, and are not over: see `DroppedRangeWatcher`."""
    checked: dict[str, str] = Field(default_factory=dict)
    """For each topic: of what the check of what is given up was evaluated last, as a digest."""
    alerted: dict[str, list[str]] = Field(default_factory=dict)
    """For each topic: at most 1,000 places that are given up and that the alert hook was called for."""

    def report(self, left: Sequence[AbandonedPartition]) -> None:
        """Remember `left` as reported too, the oldest forgotten beyond 1,000."""
        epochs = self.reported | {
            f"{dead.topic}/{dead.partition}": dead.epoch for dead in left if dead.epoch is not None
        }
        self.reported = dict(list(epochs.items())[-_MOST_REPORTED:])

    def has_reported(self, left: AbandonedPartition) -> bool:
        """Return whether this very owner was reported."""
        return self.reported.get(f"{left.topic}/{left.partition}") == left.epoch


class _Target(NamedTuple):
    """The job and its op that redo a topic's partitions."""

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
    """Build the sensor that finds what dead members of `group` left, and asks for runs of `jobs` that redo it.

    It watches the topics of the jobs' claimed-batch ops (`build_reprocess_job`) for partitions whose owner is stale, or
    that have an open plan and no live owner, and for planned ranges without one; it asks for one run a topic, or one a
    partition, and more where several ranges of one are left. A success moves the
    offset and is never asked for twice; after a failure it asks again, now for each partition alone, `retry_wait_s`
    seconds after the run ended, then after twice as long, up to an hour, until a plan has been tried `max_attempts`
    times or as many runs for it have failed. Such ones are given up: named in the tick, by the failed asset check
    `nothing_given_up_<group>` (`build_exhausted_plans_check`) of the topic's asset, `kafka/<topic>` unless
    `translator` gives it another key, and to `on_exhausted_plans` (see `AlertHook`).
    In at most once nothing that was committed is redone: what a run that is over, or has vanished, possibly dropped is
    reported instead, in the tick's log and as an observation of the topic. Where Go consumers share the group, or it
    has no settings, an owner is stale two minutes and a second after its last heartbeat, and nothing is revoked.
    Default name: `<group>_stale_claims` (of dashes `_` is made; other characters that Dagster does not allow put a
    digest behind). Raises `ConfigurationError`.
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

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def stale_claims(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Find what dead members left, and request runs that redo it."""
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
        description=f"Finds what dead members of group {group!r} left, and requests runs that redo it.",
    )


def _targets(jobs: Sequence[AnyJob]) -> list[_Target]:
    targets: dict[str, _Target] = {}
    for job in jobs:
        ops = claimed_batch_ops(job)
        if not ops:
            raise ConfigurationError(f"job {job.name!r} has no claimed-batch op: make it with build_reprocess_job")
        for topic, op_name in ops.items():
            if topic in targets:
                raise ConfigurationError(f"jobs {targets[topic].job!r} and {job.name!r} both work on topic {topic!r}")
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
    """For each topic what is requested no more."""
    reasons: list[str] = field(default_factory=list)
    """Why something that was left is not requested."""

    def run(self, rationalizer: RationalizerResource) -> SensorResult:
        """Look at every topic."""
        cursor = StaleClaimCursor.read(self.context.cursor)
        wall_ms = time.time_ns() // 1_000_000
        found: dict[_Target, list[AbandonedPartition]] = {}
        at_most_once: set[str] = set()
        with rationalizer.world() as world:
            for target in self.targets:
                topic = target.topic
                if world.group_of(self.group, topic).settings.delivery is DeliveryMode.AT_MOST_ONCE:
                    at_most_once.add(topic)
                barred = why_unclaimable(world, self.group, topic, wall_ms)
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
        return SensorResult(
            run_requests=self.requests,
            skip_reason=None if self.requests else SkipReason(self._why_skipped()),
            cursor=cursor.model_dump_json(),
            asset_events=self.events,
        )

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
        """Report once what each at-most-once run possibly dropped, although others hold the partitions by now."""
        watcher = DroppedRangeWatcher(
            self.context.instance, self.group, cursor.looked_at, cursor.looked_at_runs, cursor.watched
        )
        for drops in watcher.look(topics, view):
            self._add_reason(drops.describe(), logging.WARNING)
            self.events += drops.observations()
        for run_id in watcher.given_up:
            self._add_reason(f"run {run_id} is not over and too many came after it: what it drops is not reported")
        cursor.watched = watcher.watched

    def _report_dead(self, cursor: StaleClaimCursor, dead: Sequence[AbandonedPartition]) -> None:
        """Report once of dead at-most-once owners why nothing is requested; drops are reported for the whole run."""
        new = [left for left in dead if not cursor.has_reported(left)]
        announced_by: dict[str, set[tuple[str, int, int]]] = {}
        for left in new:
            run_id = left.run_id
            if not run_id or not self.context.instance.has_run(run_id):
                reason = f"{left}: its run {run_id or '(none)'} is not known here, so what it dropped is not known"
                self._add_reason(reason, logging.WARNING)
                continue
            if run_id not in announced_by:
                rows = announced_ranges(self.context.instance, run_id)
                announced_by[run_id] = {(row.topic, row.partition, row.epoch) for row, _ in rows}
            if (left.topic, left.partition, left.epoch) not in announced_by[run_id]:
                self._add_reason(f"{left}: nothing was dropped, it died before it committed", logging.WARNING)
        cursor.report(new)

    def _request_runs(self, target: _Target, found: Sequence[AbandonedPartition]) -> None:
        """Request runs that redo `found`, except what a run is under way for, or what is left alone."""
        previous = previous_runs(self.context.instance, self.group, job=target.job, op_name=target.op, found=found)
        pending: defaultdict[str, list[AbandonedPartition]] = defaultdict(list)
        for left in found:
            pending[previous.pending_run(left) or ""].append(left)
        wanted = [left for left in pending.pop("", []) if self._is_wanted(left, previous)]
        for run_id, waiting in pending.items():
            self._add_reason(f"run {run_id} was asked for and is not over: {listed(waiting)}")
        bundles = self._bundles(wanted, previous)
        room = self.max_runs_per_tick - len(self.requests)
        if later := sum(map(len, bundles[room:])):
            self._add_reason(f"{later} partitions of {target.topic!r} wait for the next tick")
        for bundle in bundles[:room]:
            self.requests.append(self._request(target, bundle, previous))
            self.context.log.info("asking for a run for %s", listed(bundle))

    def _bundles(self, wanted: Sequence[AbandonedPartition], previous: PreviousRuns) -> list[list[AbandonedPartition]]:
        """Return which are requested together: none whose run was futile, which another may have caused.

        Nor two ranges of one partition: a batch holds one of each.
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
            reason = (
                f"left alone after {left.plan_attempts + 1} attempts. Fix the cause and run "
                f"`{retry_command(self.group, left.topic, [left.partition])}`, or set the position past the plan"
            )
            self._give_up(left, left.plan_attempts, futile_runs, reason)
        elif previous.is_settled(left):
            return False
        elif len(futile_runs) >= self.max_attempts:
            reason = (
                f"left alone after {len(futile_runs)} runs that failed or changed nothing. Look at the last one, fix "
                "the cause and run the job by hand"
            )
            self._give_up(left, len(futile_runs), futile_runs, reason)
        elif (wait_s := previous.wait_s(left, self.retry_wait_s)) > 0:
            why = "its last run failed or changed nothing" if futile_runs else "found held or paused by the last run"
            self._add_reason(f"{left}: {why}, asked for again in {wait_s:.0f} s")
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
        """Evaluate the check when its state has changed, and call the hook for what it was not called for yet."""
        plans = self.given_up[topic]
        key = exhausted_plans_check_key(self.group, topic, self.translator)
        state = digest(key, plans)
        if cursor.checked.get(topic) != state:
            self.events.append(evaluation(key, self.group, plans))
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
                reason = "on_given_up failed and is called again at the next tick"
                self.reasons.append(f"{reason}: {error!r}")
                self.context.log.exception(reason)
        cursor.alerted[topic] = alerted

    def _request(self, target: _Target, bundle: Sequence[AbandonedPartition], previous: PreviousRuns) -> RunRequest:
        config = {
            "partitions": [left.partition for left in bundle],
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
            tags=request_tags(self.group, target.topic, STALE_CLAIM, name, previous.now_s),
        )


def _as_run_config(left: AbandonedPartition) -> dict[str, object]:
    """Return the fields of `ExpectedKeyState` as run config, of thousands without the cost of making each."""
    return {name: value for name in ExpectedKeyState.model_fields if (value := getattr(left, name)) is not None}
