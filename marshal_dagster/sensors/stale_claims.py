"""The sensor that finds what dead members left and asks for runs that redo it."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

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

from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.protocol.messages import DeliveryMode, is_name
from marshal_dagster.protocol.world import World
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import (
    MAX_NAMED,
    AbandonedPartition,
    ExpectedKeyState,
    abandoned_partitions,
    listed,
    why_unclaimable,
)
from marshal_dagster.runs.announcements import announced_ranges
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, GROUP_TAG, TOPIC_TAG, sensor_name
from marshal_dagster.sensors._cursor import Cursor
from marshal_dagster.sensors._dropped_ranges import DroppedRangeWatcher, KeysView
from marshal_dagster.sensors._exhausted_plans import (
    MOST_REMEMBERED,
    AlertHook,
    ExhaustedPlan,
    ExhaustedPlans,
    digest,
    evaluation,
    exhausted_plan,
    exhausted_plans_check_key,
    named,
)
from marshal_dagster.sensors._run_history import (
    ASKED_AT_TAG,
    ASKED_TAG,
    FIRST_WAIT_S,
    REASON_TAG,
    STALE_CLAIM,
    PreviousRuns,
    digest_of,
    place_of,
    previous_runs,
)

if TYPE_CHECKING:
    from marshal_dagster.assets.decorator import DagsterMarshalTranslator

_MOST_REPORTED: Final = 1_000
_MOST_LOGGED: Final = 1_000


class Grouping(StrEnum):
    """What one run is asked for."""

    TOPIC = "topic"
    PARTITION = "partition"


class StaleClaimCursor(Cursor):
    """What the sensor remembers from tick to tick; all else stands in the log and in Dagster's runs."""

    reported: dict[str, int] = Field(default_factory=dict)
    """For `topic/partition`: the epoch of the dead at-most-once owner of which was told last."""
    looked_at: dict[str, int] = Field(default_factory=dict)
    """For each topic: up to which of its observations (Dagster's storage id) announcements were looked for."""
    watched: dict[str, int] = Field(default_factory=dict)
    """At most 200 runs that announced what they were about to commit, and are not over: see `DroppedRangeWatcher`."""
    checked: dict[str, str] = Field(default_factory=dict)
    """For each topic: of what the check of what is given up was evaluated last, as a digest."""
    alerted: dict[str, list[str]] = Field(default_factory=dict)
    """For each topic: at most 1,000 places that are given up and of which the alert hook was told."""

    def report(self, left: Sequence[AbandonedPartition]) -> None:
        """Remember `left` as reported too, the oldest forgotten beyond 1,000."""
        found = self.reported | {f"{one.topic}/{one.partition}": one.epoch for one in left if one.epoch is not None}
        self.reported = dict(list(found.items())[-_MOST_REPORTED:])

    def has_reported(self, one: AbandonedPartition) -> bool:
        """Tell whether this very owner was told of."""
        return self.reported.get(f"{one.topic}/{one.partition}") == one.epoch


@dataclass(frozen=True, slots=True)
class _Target:
    """The job and its op that redo a topic's partitions."""

    job: str
    op: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    group: str
    targets: Sequence[_Target]
    grouping: Grouping
    max_runs_per_tick: int
    max_attempts: int
    retry_wait_s: float
    on_exhausted_plans: AlertHook | None
    translator: "DagsterMarshalTranslator | None"
    rationalizer_key: str


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
    if not is_name(group):
        raise ConfigurationError(f"group {group!r} cannot be a name: use 1 to 255 characters, no '/', no control ones")
    for field_name, value in (("max_runs_per_tick", max_runs_per_tick), ("max_attempts", max_attempts)):
        if value < 1:
            raise ConfigurationError(f"{field_name} is {value}; it must be at least 1")
    if not 0 <= retry_wait_s < math.inf:
        raise ConfigurationError(f"retry_wait_s is {retry_wait_s}; it must be a number of seconds, 0 or more")
    wanted = [jobs] if isinstance(jobs, AnyJob) else list(jobs)
    spec = _Spec(
        group=group,
        targets=_targets(wanted),
        grouping=_grouping(grouping),
        max_runs_per_tick=max_runs_per_tick,
        max_attempts=max_attempts,
        retry_wait_s=retry_wait_s,
        on_exhausted_plans=on_exhausted_plans,
        translator=translator,
        rationalizer_key=rationalizer_key,
    )

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def stale_claims(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Find what dead members left, and ask for runs that redo it."""
        return _Tick(spec, context).run()

    return SensorDefinition(
        name=name or sensor_name(group, "stale_claims"),
        evaluation_fn=stale_claims,
        jobs=wanted,
        minimum_interval_seconds=minimum_interval_s,
        required_resource_keys={rationalizer_key},
        default_status=default_status,
        description=f"Finds what dead members of group {group!r} left, and asks for runs that redo it.",
    )


def _targets(jobs: Sequence[AnyJob]) -> list[_Target]:
    targets: dict[str, _Target] = {}
    for job in jobs:
        found = claimed_batch_ops(job)
        if not found:
            raise ConfigurationError(f"job {job.name!r} has no claimed-batch op: make it with build_reprocess_job")
        for topic, op_name in found.items():
            if topic in targets:
                raise ConfigurationError(f"jobs {targets[topic].job!r} and {job.name!r} both work on topic {topic!r}")
            targets[topic] = _Target(job.name, op_name, topic)
    return list(targets.values())


def _grouping(grouping: Grouping | str) -> Grouping:
    try:
        return Grouping(grouping)
    except ValueError:
        raise ConfigurationError(f"grouping is {grouping!r}; it must be one of {', '.join(Grouping)}") from None


# A tick


@dataclass(slots=True)
class _Tick:
    """One evaluation of the sensor."""

    spec: _Spec
    context: SensorEvaluationContext
    requests: list[RunRequest] = field(default_factory=list)
    events: list[AssetObservation | AssetCheckEvaluation] = field(default_factory=list)
    given_up: defaultdict[str, list[ExhaustedPlan]] = field(default_factory=lambda: defaultdict(list))
    """For each topic what is asked for no more."""
    reasons: list[str] = field(default_factory=list)
    """Why something that was left is not asked for."""

    def run(self) -> SensorResult:
        """Look at every topic."""
        cursor = StaleClaimCursor.read(self.context.cursor)
        wall_ms = time.time_ns() // 1_000_000
        left: dict[_Target, list[AbandonedPartition]] = {}
        group = self.spec.group
        with self._rationalizer.world() as world:
            for target in self.spec.targets:
                if self._may_ask(world, target.topic, wall_ms):
                    left[target] = abandoned_partitions(world, group, target.topic, wall_ms)
            at_most_once = {
                target.topic
                for target in self.spec.targets
                if world.group_of(group, target.topic).settings.delivery is DeliveryMode.AT_MOST_ONCE
            }
            announcing = sorted(at_most_once | cursor.looked_at.keys() & {target.topic for target in self.spec.targets})
            view = KeysView.of(world, group, wall_ms) if announcing else None
        if view is not None:
            self._report_drops(cursor, announcing, view)
        for target, found in left.items():
            if target.topic in at_most_once:
                committed = [one for one in found if one.plan_end is None]
                self._report_dead(cursor, [one for one in committed if not cursor.has_reported(one)])
                self._ask(target, [one for one in found if one.plan_end is not None])
            else:
                self._ask(target, found)
        for target in left:
            self._report_exhausted_plans(cursor, target.topic)
        skip = None if self.requests else SkipReason(self._why_skipped())
        return SensorResult(
            run_requests=self.requests,
            skip_reason=skip,
            cursor=cursor.model_dump_json(),
            asset_events=self.events,
        )

    @property
    def _rationalizer(self) -> RationalizerResource:
        found = getattr(self.context.resources, self.spec.rationalizer_key)
        if not isinstance(found, RationalizerResource):
            raise ConfigurationError(
                f"resource {self.spec.rationalizer_key!r} is a {type(found).__name__}, not a RationalizerResource"
            )
        return found

    def _add_reason(self, reason: str, level: int = logging.INFO) -> None:
        self.reasons.append(reason)
        if len(self.reasons) <= _MOST_LOGGED:
            self.context.log.log(level, reason)

    def _why_skipped(self) -> str:
        told = "; ".join(self.reasons[:MAX_NAMED]) or "nothing to redo"
        more = len(self.reasons) - MAX_NAMED
        if more <= 0:
            return told
        logged = "" if len(self.reasons) <= _MOST_LOGGED else f", which has the first {_MOST_LOGGED:,}"
        return f"{told}; and {more} more in the log of this tick{logged}"

    def _may_ask(self, world: World, topic: str, wall_ms: int) -> bool:
        barred = why_unclaimable(world, self.spec.group, topic, wall_ms)
        if barred is not None:
            self._add_reason(barred)
        return barred is None

    def _report_drops(self, cursor: StaleClaimCursor, topics: Sequence[str], view: KeysView) -> None:
        """Say once what each at-most-once run possibly dropped, whoever holds the partitions by now."""
        watch = DroppedRangeWatcher(
            self.context.instance, self.spec.group, dict(cursor.looked_at), dict(cursor.watched)
        )
        for drops in watch.look(topics, view):
            self._add_reason(drops.describe(), logging.WARNING)
            self.events += drops.observations()
        for run_id in watch.given_up:
            self._add_reason(f"run {run_id} is not over and too many came after it: what it drops will not be told")
        cursor.looked_at, cursor.watched = watch.looked_at, watch.watched

    def _report_dead(self, cursor: StaleClaimCursor, dead: Sequence[AbandonedPartition]) -> None:
        """Say once of dead at-most-once owners why nothing is asked for; drops are told for the run as a whole."""
        announced_by: dict[str, set[tuple[str, int, int]]] = {}
        for one in dead:
            if not one.run_id or not self.context.instance.has_run(one.run_id):
                told = f"{one}: its run {one.run_id or '(none)'} is not known here, so what it dropped cannot be said"
                self._add_reason(told, logging.WARNING)
                continue
            if one.run_id not in announced_by:
                rows = announced_ranges(self.context.instance, one.run_id)
                announced_by[one.run_id] = {(row.topic, row.partition, row.epoch) for row in rows}
            if (one.topic, one.partition, one.epoch) not in announced_by[one.run_id]:
                self._add_reason(f"{one}: nothing was dropped, it died before it committed", logging.WARNING)
        cursor.report(dead)

    def _ask(self, target: _Target, found: Sequence[AbandonedPartition]) -> None:
        """Ask for runs that redo `found`, but for those that a run is under way for, or that are left alone."""
        if not found:
            return
        asked = previous_runs(self.context.instance, self.spec.group, job=target.job, op_name=target.op, found=found)
        under_way: defaultdict[str, list[AbandonedPartition]] = defaultdict(list)
        for one in found:
            under_way[asked.pending_run(one) or ""].append(one)
        wanted = [one for one in under_way.pop("", []) if self._is_wanted(one, asked)]
        for run_id, waiting in under_way.items():
            self._add_reason(f"run {run_id} was asked for and is not over: {listed(waiting)}")
        bundles = self._bundles(wanted, asked)
        room = self.spec.max_runs_per_tick - len(self.requests)
        if later := sum(map(len, bundles[room:])):
            self._add_reason(f"{later} partitions of {target.topic!r} wait for the next tick")
        for bundle in bundles[:room]:
            self.requests.append(self._request(target, bundle, asked))
            self.context.log.info("asking for a run for %s", listed(bundle))

    def _bundles(self, wanted: Sequence[AbandonedPartition], asked: PreviousRuns) -> list[list[AbandonedPartition]]:
        """Say which are asked for together: none whose run was fruitless, which may have been another's fault.

        Nor two ranges of one partition: a batch holds one of each.
        """
        together: list[dict[int, AbandonedPartition]] = []
        alone: list[list[AbandonedPartition]] = []
        for one in wanted:
            if self.spec.grouping is Grouping.TOPIC and not asked.futile_runs(one):
                bundle = next((each for each in together if one.partition not in each), None)
                if bundle is None:
                    together.append(bundle := {})
                bundle[one.partition] = one
            else:
                alone.append([one])
        return [*(list(each.values()) for each in together), *alone]

    def _is_wanted(self, one: AbandonedPartition, asked: PreviousRuns) -> bool:
        futile_runs = asked.futile_runs(one)
        if one.plan_end is not None and one.plan_attempts >= self.spec.max_attempts:
            self._give_up(
                one,
                one.plan_attempts,
                futile_runs,
                f"left alone after {one.plan_attempts} attempts. Mend what fails and run the job with "
                "retry_exhausted, or set the position past the plan",
            )
        elif asked.is_settled(one):
            return False
        elif len(futile_runs) >= self.spec.max_attempts:
            self._give_up(
                one,
                len(futile_runs),
                futile_runs,
                f"left alone after {len(futile_runs)} runs that failed or changed nothing. Look at the last one, mend "
                "what fails and run the job by hand",
            )
        elif (wait_s := asked.wait_s(one, self.spec.retry_wait_s)) > 0:
            why = "its last run failed or changed nothing" if futile_runs else "found held or paused by the last run"
            self._add_reason(f"{one}: {why}, asked for again in {wait_s:.0f} s")
        else:
            return True
        return False

    def _give_up(self, one: AbandonedPartition, attempts: int, run_ids: Sequence[str], reason: str) -> None:
        found = exhausted_plan(one, attempts, run_ids, reason)
        self.given_up[one.topic].append(found)
        self._add_reason(found.reason, logging.WARNING)

    def _report_exhausted_plans(self, cursor: StaleClaimCursor, topic: str) -> None:
        """Evaluate the check when its state has changed, and call the hook for what it has not been told of."""
        found = self.given_up[topic]
        key = exhausted_plans_check_key(self.spec.group, topic, self.spec.translator)
        state = digest(key, found)
        if cursor.checked.get(topic) != state:
            self.events.append(evaluation(key, self.spec.group, found))
            cursor.checked[topic] = state
        if self.spec.on_exhausted_plans is None:
            cursor.alerted.pop(topic, None)
            return
        places = {named(each): each for each in found[:MOST_REMEMBERED]}
        told = [place for place in cursor.alerted.get(topic, []) if place in places]
        new = tuple(each for place, each in places.items() if place not in set(told))
        if new and self._alert(self.spec.on_exhausted_plans, ExhaustedPlans(self.spec.group, topic, new, len(found))):
            told = list(places)
        cursor.alerted[topic] = told

    def _alert(self, hook: AlertHook, found: ExhaustedPlans) -> bool:
        """Call the hook; tell whether it took it."""
        try:
            hook(found)
        except Exception as error:
            self.reasons.append(f"on_given_up failed and is called again at the next tick: {error!r}")
            self.context.log.exception("on_given_up failed and is called again at the next tick")
            return False
        return True

    def _request(self, target: _Target, bundle: Sequence[AbandonedPartition], asked: PreviousRuns) -> RunRequest:
        config = {
            "partitions": [one.partition for one in bundle],
            "max_batches": 1,
            "seen": [_as_run_config(one) for one in bundle],
        }
        digest = digest_of(self.spec.group, bundle)
        return RunRequest(
            run_key=self._run_key(bundle, digest, asked.count(digest)),
            job_name=target.job,
            run_config={"ops": {target.op: {"config": config}}},
            tags={
                GROUP_TAG: self.spec.group,
                TOPIC_TAG: target.topic,
                REASON_TAG: STALE_CLAIM,
                ASKED_TAG: digest,
                ASKED_AT_TAG: str(int(asked.now_s)),
            },
        )

    def _run_key(self, bundle: Sequence[AbandonedPartition], digest: str, attempt: int) -> str:
        """Name what is asked for and for the how many-th time: Dagster never runs an equal key twice."""
        first = bundle[0]
        place = place_of(first.partition, first.generation, first.offset)
        what = place if len(bundle) == 1 else f"{len(bundle)} partitions/{digest}"
        return f"{self.spec.group}/{first.topic}/{what}.{attempt}"


def _as_run_config(one: AbandonedPartition) -> dict[str, object]:
    """Give the fields of `ExpectedKeyState` as run config, of thousands without the cost of making each."""
    return {name: value for name in ExpectedKeyState.model_fields if (value := getattr(one, name)) is not None}
