"""The sensor that asks for runs when much is unread, or something is for long."""

import hashlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
)

from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.resources.claimer import require_group, resource_of
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import MAX_NAMED, why_unclaimable
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, GROUP_TAG, TOPIC_TAG, sensor_name
from marshal_dagster.runs.status import FINISHED, MAY_CLAIM
from marshal_dagster.sensors._cursor import Cursor
from marshal_dagster.sensors._lag_reader import GroupPositions, TopicLag, UnreadRecords, positions_of, read_lag
from marshal_dagster.sensors._run_history import (
    ASKED_AT_TAG,
    ASKED_TAG,
    FIRST_WAIT_S,
    REASON_TAG,
    ended_at_s,
    may_begin,
    place_of,
    retry_backoff_s,
)
from marshal_dagster.telemetry.metrics import record_lag

LAG: Final = "lag"
_RUNS_LOOKED_AT: Final = 1_000


class LagCursor(Cursor):
    """What the sensor remembers from tick to tick; which runs it asked for stands in Dagster's runs."""

    is_draining: bool = False
    """Whether an upper threshold was passed, and the lag has not fallen to the lower ones since."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Above `upper` runs are asked for, until it is not above `lower` any more."""

    upper: float
    lower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    group: str
    job: str
    topic: str
    records: Threshold | None
    age_s: Threshold | None
    max_runs_per_tick: int
    max_attempts: int
    rationalizer_key: str


def build_lag_sensor(
    job: AnyJob,
    *,
    group: str,
    max_lag_records: int | None = None,
    max_lag_age_s: float | None = None,
    rearm_records: int | None = None,
    rearm_s: float | None = None,
    max_runs_per_tick: int = 1,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    name: str | None = None,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    rationalizer_key: str = "rationalizer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build the sensor that asks for runs of `job` when `group` lags behind in its topic.

    It asks when more than so many records (offsets) are unread in all partitions that nobody holds, or when the oldest
    unread record of one of them, by its own timestamp, is older than `max_lag_age_s` seconds. Then it asks again
    whenever it can, until not more than `rearm_records` are unread in the whole topic and none is older than `rearm_s`
    (by default half of the thresholds): from there on only a threshold counts again.

    In a tick it asks for at most `max_runs_per_tick` runs, those of the job counted in that hold nothing yet, and
    never for more than there are partitions with unread records that nobody holds. Runs that moved no position are
    followed by a pause that is doubled each time, up to an hour. Partitions whose plan has been tried `max_attempts`
    times are left to a person and count for nothing. A partition that the group has no position in counts from its
    first record. While the group is paused nothing is asked for.

    The rationalizer of resource `rationalizer_key` says where the coordination log and the data topics are; the sensor
    needs DESCRIBE on the data topic, reads none of its records and is in no consumer group. Default name:
    `<group>_lag`. Raises `ConfigurationError`.
    """
    require_group(group)
    for field_name, value in (("max_runs_per_tick", max_runs_per_tick), ("max_attempts", max_attempts)):
        if value < 1:
            raise ConfigurationError(f"{field_name} is {value}; it must be at least 1")
    topics = list(claimed_batch_ops(job))
    if len(topics) != 1:
        raise ConfigurationError(f"job {job.name!r} has {len(topics)} claimed-batch ops; a lag sensor's has one")
    records = None if rearm_records is None else float(rearm_records)
    spec = _Spec(
        group=group,
        job=job.name,
        topic=topics[0],
        records=_threshold("max_lag_records", max_lag_records, "rearm_records", records),
        age_s=_threshold("max_lag_age_s", max_lag_age_s, "rearm_s", rearm_s),
        max_runs_per_tick=max_runs_per_tick,
        max_attempts=max_attempts,
        rationalizer_key=rationalizer_key,
    )
    if spec.records is None and spec.age_s is None:
        raise ConfigurationError("a lag sensor needs max_lag_records, max_lag_age_s, or both")

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Look at the log and the topic once."""
        return _Tick(spec, context).run()

    return SensorDefinition(
        name=name or sensor_name(group, "lag"),
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description=f"Asks for runs when group {group!r} lags behind in topic {spec.topic!r}.",
        job=job,
        default_status=default_status,
        required_resource_keys={rationalizer_key},
    )


def _threshold(name: str, upper: float | None, lower_name: str, lower: float | None) -> Threshold | None:
    if upper is None:
        if lower is not None:
            raise ConfigurationError(f"{lower_name} is {lower:g}, but {name} is not given")
        return None
    if not 0 <= upper < math.inf:
        raise ConfigurationError(f"{name} is {upper}; it must be 0 or more")
    if lower is not None and not 0 <= lower <= upper:
        raise ConfigurationError(f"{lower_name} is {lower:g}; it must be between 0 and {name}, which is {upper:g}")
    return Threshold(upper, upper / 2 if lower is None else lower)


# A tick


@dataclass(slots=True)
class _Tick:
    """One evaluation of the sensor."""

    spec: _Spec
    context: SensorEvaluationContext

    def run(self) -> SensorResult:
        """Look at the log, at the topic, and at the job's runs, as far as need be."""
        spec, cursor = self.spec, LagCursor.read(self.context.cursor)
        now_s = time.time()
        resource = self._resource
        with resource.world() as world:
            wall_ms = round(now_s * 1_000)
            barred = why_unclaimable(world, spec.group, spec.topic, wall_ms)
            positions = positions_of(world, spec.group, spec.topic, max_attempts=spec.max_attempts, wall_ms=wall_ms)
        if barred is not None:
            return self._skip(cursor, barred)
        limits = _ActiveThresholds.now(spec, cursor)
        older_than_ms = None if limits.age_s is None else round((now_s - limits.age_s) * 1_000)
        try:
            with resource.open_data() as topics:
                lag = read_lag(topics, spec.topic, positions, older_than_ms)
        except TopicNotFoundError as missing:
            return self._skip(cursor, str(missing))
        record_lag(spec.group, spec.topic, lag.records)
        is_above = limits.are_exceeded(lag.unread if cursor.is_draining else lag.due, lag.old)
        cursor.is_draining = is_above
        told = limits.describe(lag)
        if not is_above:
            return self._skip(cursor, told)
        if not limits.are_exceeded(lag.due, lag.old):
            return self._skip(cursor, f"{told}; those who hold the partitions are at work")
        return self._ask(cursor, lag.due, positions, told, now_s)

    @property
    def _resource(self) -> RationalizerResource:
        return resource_of(RationalizerResource, self.context.resources, self.spec.rationalizer_key)

    def _skip(self, cursor: LagCursor, reason: str) -> SensorResult:
        self.context.log.info(reason)
        return SensorResult(skip_reason=reason, cursor=cursor.model_dump_json())

    def _ask(
        self, cursor: LagCursor, due: Sequence[UnreadRecords], positions: GroupPositions, told: str, now_s: float
    ) -> SensorResult:
        waiting = self._waiting(positions, now_s)
        room = min(self.spec.max_runs_per_tick, len(due)) - len(waiting)
        if room < 1:
            runs = ", ".join(waiting[:MAX_NAMED])
            return self._skip(cursor, f"{told}; runs of {self.spec.job!r} are under way and hold nothing yet: {runs}")
        digest = _digest(self.spec, due)
        wait_s = self._wait_s(digest, now_s)
        if wait_s > 0:
            return self._skip(cursor, f"{told}; the last run moved no position, asked again in {wait_s:.0f} s")
        asked = self.context.instance.get_runs_count(RunsFilter(tags={ASKED_TAG: digest}))
        requests = [self._request(digest, asked + number, now_s) for number in range(room)]
        self.context.log.info("%s: asking for %d runs", told, len(requests))
        return SensorResult(run_requests=requests, cursor=cursor.model_dump_json())

    def _waiting(self, positions: GroupPositions, now_s: float) -> list[str]:
        """Give the runs of the job, whoever asked for them, that may still claim: under way, and holding nothing."""
        wanted = RunsFilter(job_name=self.spec.job, statuses=list(MAY_CLAIM))
        records = self.context.instance.get_run_records(wanted, limit=_RUNS_LOOKED_AT)
        return [
            record.dagster_run.run_id
            for record in records
            if record.dagster_run.run_id not in positions.working and may_begin(record, now_s)
        ]

    def _wait_s(self, digest: str, now_s: float) -> float:
        """Give for how long nothing is asked for, after runs that left the positions as they were."""
        wanted = RunsFilter(tags={ASKED_TAG: digest}, statuses=list(FINISHED))
        records = self.context.instance.get_run_records(wanted, limit=_RUNS_LOOKED_AT)
        if not records:
            return 0.0
        last_s = max(map(ended_at_s, records))
        return last_s + retry_backoff_s(FIRST_WAIT_S, len(records)) - now_s

    def _request(self, digest: str, number: int, now_s: float) -> RunRequest:
        """Ask under a key that is the same for the same positions and number: Dagster never runs an equal key twice."""
        return RunRequest(
            run_key=f"{self.spec.group}/{self.spec.topic}/{LAG}/{digest}.{number}",
            job_name=self.spec.job,
            tags={
                GROUP_TAG: self.spec.group,
                TOPIC_TAG: self.spec.topic,
                REASON_TAG: LAG,
                ASKED_TAG: digest,
                ASKED_AT_TAG: str(int(now_s)),
            },
        )


@dataclass(frozen=True, slots=True)
class _ActiveThresholds:
    """The thresholds that count in this tick: the lower ones while draining, else the upper ones."""

    records: float | None
    age_s: float | None

    @classmethod
    def now(cls, spec: _Spec, cursor: LagCursor) -> "_ActiveThresholds":
        """Choose them."""

        def of(threshold: Threshold | None) -> float | None:
            if threshold is None:
                return None
            return threshold.lower if cursor.is_draining else threshold.upper

        return cls(of(spec.records), of(spec.age_s))

    def are_exceeded(self, unread: Sequence[UnreadRecords], old: Collection[int]) -> bool:
        """Tell whether there are more records than so many, or one is older than that."""
        many = self.records is not None and sum(each.records for each in unread) > self.records
        return many or any(each.partition in old for each in unread)

    def describe(self, lag: TopicLag) -> str:
        """Say what was seen."""
        records = sum(each.records for each in lag.unread)
        due = sum(each.records for each in lag.due)
        told = [f"{records:,} records are unread, {due:,} of them in {len(lag.due)} partitions that nobody holds"]
        told += [f"the limit is {self.records:,.0f}"] if self.records is not None else []
        if self.age_s is not None:
            told.append(f"{len(lag.old)} partitions have an unread record older than {self.age_s:g} s")
        if lag.given_up:
            told.append(f"not counted, for their plan was tried too often: partitions {_numbers(lag.given_up)}")
        if lag.is_recreated:
            told.append(f"not counted, for the topic was made anew since: partitions {_numbers(lag.is_recreated)}")
        return "; ".join(told)


def _numbers(partitions: Sequence[int]) -> str:
    shown = ", ".join(map(str, partitions[:MAX_NAMED]))
    more = len(partitions) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _digest(spec: _Spec, due: Sequence[UnreadRecords]) -> str:
    """Name where the group stands in what is due, so that runs that moved nothing are known by it."""
    places = (place_of(each.partition, each.position.generation, each.position.offset) for each in due)
    return hashlib.sha256("/".join([LAG, spec.group, spec.topic, *places]).encode()).hexdigest()[:24]
