"""Sensors that watch the coordination log.

A tick reads what is new in the log, asks Dagster about the runs concerned, and ends: it starts no JVM and writes
nothing. What it believes by the clock is advice; the run that it asks for decides by claiming.
"""

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Any, Final, Literal, Self

from dagster import (
    AssetObservation,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    JobDefinition,
    MetadataValue,
    RunRequest,
    RunsFilter,
    RunStatusSensorContext,
    RunStatusSensorDefinition,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
)
from pydantic import BaseModel, Field, ValidationError

from marshal_dagster.coordination.claimer import GO_EXTRA_PATIENCE_MS
from marshal_dagster.delivery import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs import claimed_batch_ops
from marshal_dagster.ops import Outcome, SeenKey
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet, is_name
from marshal_dagster.protocol.state import Key
from marshal_dagster.protocol.world import World
from marshal_dagster.resources import ClaimerResource, RationalizerResource
from marshal_dagster.runs import (
    FINISHED,
    GROUP_TAG,
    OUTCOME_TAG,
    TOPIC_TAG,
    Announced,
    announced,
    announcement_table,
    run_of,
    topic_asset_key,
)

DEFAULT_INTERVAL_S: Final = 30
REASON_TAG: Final = "marshal/reason"
STALE_CLAIM: Final = "stale claim"
_RUNS_LOOKED_AT: Final = 200
_MOST_REPORTED: Final = 1_000
_MOST_TOLD: Final = 10


class Grouping(StrEnum):
    """What one run is asked for."""

    TOPIC = "topic"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True)
class Left:
    """A partition that a dead member left: its owner is stale, or its plan is open and nobody holds it."""

    topic: str
    partition: int
    offset: int | None
    plan_end: int | None
    plan_attempts: int
    generation: int
    instance: str | None
    client: str | None
    epoch: int | None
    silent_s: float | None
    """Seconds since the owner's last heartbeat; as the other three None when nobody holds it."""

    def __str__(self) -> str:
        """Say what was left, for the log of a tick."""
        plan = "no plan" if self.plan_end is None else f"plan [{self.offset}, {self.plan_end})"
        held = "held by nobody" if self.silent_s is None else f"client {self.client!r} silent for {self.silent_s:.0f} s"
        return f"{self.topic}/{self.partition}: {plan}, {held}"

    @property
    def run_id(self) -> str:
        """The run in front of the stale owner's instance id."""
        return run_of(self.instance or "")

    @property
    def seen(self) -> SeenKey:
        """The same as run config."""
        return SeenKey(
            partition=self.partition,
            generation=self.generation,
            offset=self.offset,
            plan_end=self.plan_end,
            plan_attempts=self.plan_attempts,
            epoch=self.epoch,
            instance=self.instance,
        )


class StaleClaimCursor(BaseModel):
    """What the sensor remembers from tick to tick; all else stands in the log and in Dagster's runs."""

    version: Literal[1] = 1
    reported: dict[str, int] = Field(default_factory=dict)
    """For `topic/partition`: the epoch of the dead at-most-once owner whose possible drops were reported last."""

    @classmethod
    def read(cls, text: str | None) -> Self:
        """Read a cursor; one of another shape or version is begun anew."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError:
            return cls()

    def reporting(self, left: Iterable[Left]) -> Self:
        """Give the cursor that remembers `left` as reported too, the oldest forgotten beyond 1,000."""
        found = self.reported | {f"{one.topic}/{one.partition}": one.epoch for one in left if one.epoch is not None}
        return self.model_copy(update={"reported": dict(list(found.items())[-_MOST_REPORTED:])})

    def has_reported(self, one: Left) -> bool:
        """Tell whether the drops of this very owner were reported."""
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
    rationalizer_key: str


def build_stale_claim_sensor(
    jobs: JobDefinition | Sequence[JobDefinition],
    *,
    group: str,
    name: str | None = None,
    grouping: Grouping | str = Grouping.TOPIC,
    max_runs_per_tick: int = 10,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    rationalizer_key: str = "rationalizer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build the sensor that finds what dead members of `group` left, and asks for runs of `jobs` that redo it.

    It watches the topics of the jobs' claimed-batch ops (`build_reprocess_job`) for partitions whose owner is stale, or
    that have an open plan and no live owner, and asks for one run a topic, or one a partition. A success moves the
    offset and is never asked for twice; after a failure it asks again, until a plan has been tried `max_attempts` times
    or as many runs for it have failed: such ones are left alone and named in the tick. In at most once nothing that was
    committed is redone: what a dead run possibly dropped is reported instead, in the tick's log and as an observation
    of the topic. Default name: `<group>_stale_claims`, with `_` for what Dagster does not allow in a name.
    Raises `ConfigurationError`.
    """
    if not is_name(group):
        raise ConfigurationError(f"group {group!r} cannot be a name: use 1 to 255 characters, no '/', no control ones")
    for field_name, value in (("max_runs_per_tick", max_runs_per_tick), ("max_attempts", max_attempts)):
        if value < 1:
            raise ConfigurationError(f"{field_name} is {value}; it must be at least 1")
    wanted = [jobs] if isinstance(jobs, JobDefinition) else list(jobs)
    spec = _Spec(
        group=group,
        targets=_targets(wanted),
        grouping=_grouping(grouping),
        max_runs_per_tick=max_runs_per_tick,
        max_attempts=max_attempts,
        rationalizer_key=rationalizer_key,
    )

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def stale_claims(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Find what dead members left, and ask for runs that redo it."""
        return _Tick(spec, context).run()

    return SensorDefinition(
        name=name or f"{_as_name(group)}_stale_claims",
        evaluation_fn=stale_claims,
        jobs=wanted,
        minimum_interval_seconds=minimum_interval_s,
        required_resource_keys={rationalizer_key},
        default_status=default_status,
        description=f"Finds what dead members of group {group!r} left, and asks for runs that redo it.",
    )


def _targets(jobs: Sequence[JobDefinition]) -> list[_Target]:
    targets: dict[str, _Target] = {}
    for each in jobs:
        found = claimed_batch_ops(each)
        if not found:
            raise ConfigurationError(f"job {each.name!r} has no claimed-batch op: make it with build_reprocess_job")
        for topic, op_name in found.items():
            if topic in targets:
                raise ConfigurationError(f"jobs {targets[topic].job!r} and {each.name!r} both work on topic {topic!r}")
            targets[topic] = _Target(each.name, op_name, topic)
    return list(targets.values())


def _grouping(grouping: Grouping | str) -> Grouping:
    try:
        return Grouping(grouping)
    except ValueError:
        raise ConfigurationError(f"grouping is {grouping!r}; it must be one of {', '.join(Grouping)}") from None


def _as_name(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in text)


def build_dead_run_sensors(
    *,
    group: str,
    name: str | None = None,
    monitored_jobs: Sequence[JobDefinition] | None = None,
    monitor_all_code_locations: bool = False,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    claimer_key: str = "claimer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> tuple[SensorDefinition, SensorDefinition]:
    """Build the two sensors that revoke what a run held, as soon as Dagster says that it failed or was canceled.

    Others can then claim at once instead of waiting until the claim is stale. Should processes of the run still live,
    they are fenced: their next heartbeat or commit is refused. In at most once it is also reported what the run
    possibly dropped. They watch `monitored_jobs`, by default all of their code location. The claimer of resource
    `claimer_key` says of which group and log; it writes, which takes WRITE on the coordination topic. Default names:
    `<group>_failed_runs` and `<group>_canceled_runs`. Raises `ConfigurationError`.
    """
    if not is_name(group):
        raise ConfigurationError(f"group {group!r} cannot be a name: use 1 to 255 characters, no '/', no control ones")

    def revoke(context: RunStatusSensorContext, **_resources: object) -> SensorResult | SkipReason:
        """Revoke what the run held."""
        return _revoke_run(context, group, getattr(context.resources, claimer_key))

    def build(status: DagsterRunStatus, word: str) -> SensorDefinition:
        return RunStatusSensorDefinition(
            name=f"{name or _as_name(group)}_{word}_runs",
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


def _revoke_run(context: RunStatusSensorContext, group: str, claimer: object) -> SensorResult | SkipReason:
    if not isinstance(claimer, ClaimerResource) or claimer.group != group:
        raise ConfigurationError(f"the claimer of a dead-run sensor must be a ClaimerResource of group {group!r}")
    run_id = context.dagster_run.run_id
    taken = claimer.revoke_run(run_id)
    if not taken:
        return SkipReason(f"run {run_id} held nothing of group {group!r}")
    dead = [_left(topic, partition, key, key.last_beat_ms) for (topic, partition), key in sorted(taken.items())]
    observations = []
    if claimer.settings.delivery is DeliveryMode.AT_MOST_ONCE:
        for one in dead:
            rows = [] if one.plan_end is not None else possibly_dropped(context.instance, group, one)
            if rows:
                observations.append(_dropped(group, one, rows))
    told = f"revoked what run {run_id} held: {_listed(dead)}"
    context.log.info(told)
    return SensorResult(skip_reason=told, asset_events=observations)


def _listed(left: Sequence[Left]) -> str:
    more = f" and {len(left) - _MOST_TOLD} more" if len(left) > _MOST_TOLD else ""
    return "; ".join(str(one) for one in left[:_MOST_TOLD]) + more


# What the log says


def partitions_left(world: World, group: str, topic: str, wall_ms: int) -> list[Left]:
    """Give the partitions of `topic` whose owner in `group` is stale, or whose plan is open without a live owner.

    Stale by the larger of the log's time and `wall_ms` (unix milliseconds): advice, as every answer between records is
    (PROTOCOL.md 2).
    """
    state = world.group_of(group, topic)
    now_ms = max(world.partition_of(topic).log_time_ms or 0, wall_ms)
    patience_ms = GO_EXTRA_PATIENCE_MS if state.settings.rule_set is RuleSet.GO else 0
    found = []
    for (of_topic, partition), key in sorted(state.keys.items(), key=itemgetter(0)):
        if of_topic != topic or state.is_live(key, now_ms - patience_ms):
            continue
        if key.owner is not None or key.plan_end is not None:
            found.append(_left(topic, partition, key, now_ms))
    return found


def _left(topic: str, partition: int, key: Key, now_ms: int) -> Left:
    owner = key.owner
    return Left(
        topic=topic,
        partition=partition,
        offset=key.offset,
        plan_end=key.plan_end,
        plan_attempts=key.plan_attempts,
        generation=key.generation,
        instance=None if owner is None else owner.instance,
        client=None if owner is None else owner.client,
        epoch=None if owner is None else owner.epoch,
        silent_s=None if owner is None else (now_ms - key.last_beat_ms) / 1_000,
    )


# What Dagster says


@dataclass(slots=True)
class _Asked:
    """The runs that this sensor asked for before, as far as they matter for what is left now."""

    under_way: dict[int, str] = field(default_factory=dict)
    """For each partition the id of a run that was asked for and is not over."""
    over: defaultdict[tuple[int, int, int | None], list[tuple[DagsterRun, SeenKey]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """For each partition, generation and offset the runs that are over, with what they were told."""

    def add(self, run: DagsterRun, seen: SeenKey) -> None:
        """Take one partition of one run."""
        if run.status in FINISHED:
            self.over[seen.partition, seen.generation, seen.offset].append((run, seen))
        else:
            self.under_way[seen.partition] = run.run_id

    def of(self, left: Left) -> list[tuple[DagsterRun, SeenKey]]:
        """Give the runs that are over and were asked for the partition at the same offset."""
        return self.over[left.partition, left.generation, left.offset]

    def fruitless(self, left: Left) -> int:
        """Count those of them that failed, or saw what is there now and changed nothing."""
        return sum(run.status is not DagsterRunStatus.SUCCESS or _is_same(seen, left) for run, seen in self.of(left))

    def is_settled(self, left: Left) -> bool:
        """Tell whether a run that saw what is there now has found nothing to redo."""
        return any(run.tags.get(OUTCOME_TAG) == Outcome.DRAINED and _is_same(seen, left) for run, seen in self.of(left))


def _is_same(seen: SeenKey, left: Left) -> bool:
    """Tell whether nobody has claimed the partition since."""
    return (seen.epoch, seen.plan_attempts) == (left.epoch, left.plan_attempts)


def _asked_before(instance: DagsterInstance, group: str, target: _Target) -> _Asked:
    tags = {GROUP_TAG: group, TOPIC_TAG: target.topic, REASON_TAG: STALE_CLAIM}
    asked = _Asked()
    for run in instance.get_runs(RunsFilter(job_name=target.job, tags=tags), limit=_RUNS_LOOKED_AT):
        for seen in _seen_in(run.run_config, target.op):
            asked.add(run, seen)
    return asked


def _seen_in(run_config: Mapping[str, Any], op_name: str) -> Iterator[SeenKey]:
    """Give what a run was told; what an older version wrote otherwise is passed over."""
    config = run_config.get("ops", {}).get(op_name, {}).get("config", {})
    for each in config.get("seen") or []:
        try:
            yield SeenKey(**each)
        except (TypeError, ValidationError):
            continue


def possibly_dropped(instance: DagsterInstance, group: str, left: Left) -> list[Announced] | None:
    """Give the committed ranges that a dead at-most-once owner may not have processed (PROTOCOL.md 6, "At most once").

    By what its run announced before it committed; None when this Dagster instance does not know the run.
    """
    if not left.run_id or not instance.has_run(left.run_id):
        return None
    return [
        row
        for row in announced(instance, left.run_id)
        if (row.group, row.topic, row.partition, row.epoch) == (group, left.topic, left.partition, left.epoch)
        and left.offset is not None
        and row.end <= left.offset
    ]


def _dropped(group: str, one: Left, rows: Sequence[Announced]) -> AssetObservation:
    return AssetObservation(
        topic_asset_key(one.topic),
        description="At most once: committed, and possibly never processed.",
        metadata={
            "possibly_dropped": announcement_table(rows),
            "possibly_dropped_offsets": sum(row.end - row.start for row in rows),
            "group": group,
            "run": MetadataValue.dagster_run(one.run_id),
        },
    )


# A tick


@dataclass(slots=True)
class _Tick:
    """One evaluation of the sensor."""

    spec: _Spec
    context: SensorEvaluationContext
    requests: list[RunRequest] = field(default_factory=list)
    observations: list[AssetObservation] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why something that was left is not asked for."""

    def run(self) -> SensorResult:
        """Look at every topic."""
        cursor = StaleClaimCursor.read(self.context.cursor)
        wall_ms = time.time_ns() // 1_000_000
        left: dict[_Target, list[Left]] = {}
        with self._rationalizer.world() as world:
            for target in self.spec.targets:
                if self._may_ask(world, target.topic, wall_ms):
                    left[target] = partitions_left(world, self.spec.group, target.topic, wall_ms)
            at_most_once = {
                target
                for target in left
                if world.group_of(self.spec.group, target.topic).settings.delivery is DeliveryMode.AT_MOST_ONCE
            }
        for target, found in left.items():
            if target in at_most_once:
                committed = [one for one in found if one.plan_end is None]
                cursor = self._report(cursor, [one for one in committed if not cursor.has_reported(one)])
                self._ask(target, [one for one in found if one.plan_end is not None])
            else:
                self._ask(target, found)
        skip = None if self.requests else SkipReason(self._why_skipped())
        return SensorResult(
            run_requests=self.requests,
            skip_reason=skip,
            cursor=cursor.model_dump_json(),
            asset_events=self.observations,
        )

    @property
    def _rationalizer(self) -> RationalizerResource:
        found = getattr(self.context.resources, self.spec.rationalizer_key)
        if not isinstance(found, RationalizerResource):
            raise ConfigurationError(
                f"resource {self.spec.rationalizer_key!r} is a {type(found).__name__}, not a RationalizerResource"
            )
        return found

    def _say(self, reason: str, level: int = logging.INFO) -> None:
        self.reasons.append(reason)
        self.context.log.log(level, reason)

    def _why_skipped(self) -> str:
        told = "; ".join(self.reasons[:_MOST_TOLD]) or "nothing to redo"
        more = len(self.reasons) - _MOST_TOLD
        return f"{told}; and {more} more in the log of this tick" if more > 0 else told

    def _may_ask(self, world: World, topic: str, wall_ms: int) -> bool:
        part = world.partition_of(topic)
        if not part.certain:
            self._say(
                f"the coordination partition of topic {topic!r} no longer begins at offset 0: it is only observed, and "
                "nobody can claim from it (see `marshal-dagster recover`)"
            )
            return False
        group = world.group_of(self.spec.group, topic)
        now_ms = max(part.log_time_ms or 0, wall_ms)
        if group.paused_until_s is not None and group.is_paused(now_ms):
            left_s = group.paused_until_s - now_ms / 1_000
            self._say(f"group {self.spec.group!r} is paused by {group.paused_by!r}, for {left_s:.0f} s more: no runs")
            return False
        return True

    def _report(self, cursor: StaleClaimCursor, dead: Sequence[Left]) -> StaleClaimCursor:
        """Say once what dead at-most-once owners possibly dropped."""
        for one in dead:
            rows = possibly_dropped(self.context.instance, self.spec.group, one)
            if rows is None:
                told = f"{one}: its run {one.run_id or '(none)'} is not known here, so what it dropped cannot be said"
            elif rows:
                ranges = ", ".join(f"[{row.start}, {row.end})" for row in rows)
                told = f"{one.topic}/{one.partition}: possibly dropped {ranges}: run {one.run_id} died after its commit"
                self.observations.append(_dropped(self.spec.group, one, rows))
            else:
                told = f"{one}: nothing was dropped, it died before it committed"
            self._say(told, logging.WARNING)
        return cursor.reporting(dead)

    def _ask(self, target: _Target, found: Sequence[Left]) -> None:
        """Ask for runs that redo `found`, but for those that a run is under way for, or that are left alone."""
        if not found:
            return
        asked = _asked_before(self.context.instance, self.spec.group, target)
        under_way: defaultdict[str, list[Left]] = defaultdict(list)
        for one in found:
            under_way[asked.under_way.get(one.partition, "")].append(one)
        wanted = [one for one in under_way.pop("", []) if self._is_wanted(one, asked)]
        for run_id, waiting in under_way.items():
            self._say(f"run {run_id} was asked for and is not over: {_listed(waiting)}")
        bundles = [wanted] if self.spec.grouping is Grouping.TOPIC else [[one] for one in wanted]
        for bundle in bundles:
            if not bundle:
                continue
            if len(self.requests) >= self.spec.max_runs_per_tick:
                self._say(f"{len(bundle)} partitions of {target.topic!r} wait for the next tick")
                continue
            self.requests.append(self._request(target, bundle, asked))
            self.context.log.info("asking for a run for %s", _listed(bundle))

    def _is_wanted(self, one: Left, asked: _Asked) -> bool:
        if one.plan_end is not None and one.plan_attempts >= self.spec.max_attempts:
            self._say(
                f"{one}: left alone after {one.plan_attempts} attempts. Mend what fails and run the job with "
                "one_more_attempt, or set the position past the plan"
            )
        elif asked.fruitless(one) >= self.spec.max_attempts:
            self._say(
                f"{one}: left alone after {asked.fruitless(one)} runs that failed or changed nothing. Look at the last "
                "one, mend what fails and run the job by hand"
            )
        elif not asked.is_settled(one):
            return True
        return False

    def _request(self, target: _Target, bundle: Sequence[Left], asked: _Asked) -> RunRequest:
        config = {
            "partitions": [one.partition for one in bundle],
            "max_batches": 1,
            "seen": [one.seen.model_dump(exclude_none=True) for one in bundle],
        }
        return RunRequest(
            run_key=self._run_key(target.topic, bundle, asked),
            job_name=target.job,
            run_config={"ops": {target.op: {"config": config}}},
            tags={GROUP_TAG: self.spec.group, TOPIC_TAG: target.topic, REASON_TAG: STALE_CLAIM},
        )

    def _run_key(self, topic: str, bundle: Sequence[Left], asked: _Asked) -> str:
        """Name what is asked for: an equal key is never run twice, be it that it succeeded or is still under way."""
        parts = [
            f"{one.partition}.{one.generation}.{one.offset}.{one.plan_attempts + len(asked.of(one))}" for one in bundle
        ]
        if len(parts) == 1:
            return f"{self.spec.group}/{topic}/{parts[0]}"
        digest = hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]
        return f"{self.spec.group}/{topic}/{len(parts)} partitions/{digest}"
