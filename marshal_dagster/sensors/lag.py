"""The sensor that requests runs if many records are unread, or old ones are.

It compares the group's positions with the topic's offsets (`_lag_reader`), and checks which runs it requested before
(`_run_history`).
"""

import hashlib
import math
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from dagster import (
    DefaultSensorStatus,
    Failure,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
)

from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.pause import missing_group
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.errors import ConfigurationError, DataTopicChangedError, TopicNotFoundError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.protocol.open_plans import OpenPlan, exhausted, open_plans, retry_text
from marshal_dagster.resources.claimer import require_group, resource_of
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.abandoned_work import first_ten, why_paused
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S, sensor_name
from marshal_dagster.runs.status import FINISHED, MAY_CLAIM
from marshal_dagster.sensors._cursor import Cursor
from marshal_dagster.sensors._lag_reader import GroupPositions, TopicLag, UnreadRecords, positions_of, read_lag
from marshal_dagster.sensors._run_history import (
    ASKED_TAG,
    FIRST_WAIT_S,
    ended_at_s,
    may_begin,
    next_key,
    place_of,
    request_tags,
    retry_backoff_s,
)
from marshal_dagster.telemetry.metrics import record_lag

LAG: Final = "lag"
_RUNS_LOOKED_AT: Final = 1_000


class LagCursor(Cursor):
    """The sensor's cursor. The requested runs are not in it, because Dagster's run storage has them."""

    is_draining: bool = False
    """Whether the lag was above an upper threshold, and has not fallen to the lower ones since."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Runs are requested above `upper`, and then until the value is no longer above `lower`."""

    upper: float
    lower: float

    def active(self, cursor: LagCursor) -> float:
        """Return the threshold in force: the lower one while draining."""
        return self.lower if cursor.is_draining else self.upper


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
    allow_missing_topic: bool = False,
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    rationalizer_key: str = "rationalizer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build a sensor that requests runs of `job` if the lag of `group` in the job's topic is high.

    Partitions that no member holds are *unheld*. The sensor starts to request runs if their unread records (offsets)
    exceed `max_lag_records`, or if the oldest of these records is older than `max_lag_age_s`. It continues to request
    runs until at most `rearm_records` are unread in the whole topic and none is older than `rearm_s`.

    A tick never requests more runs than there are unheld partitions with unread records. If runs moved no position, the
    sensor waits before the next request, twice as long each time, up to an hour. It requests nothing while the group is
    paused. Partitions with an exhausted plan do not count. A partition without a position counts from its first record.
    The sensor reports records with a time in the future; unread records of their partition count as old.

    A tick fails if only an operator can make the group continue: the coordination log is incomplete. It also fails if
    it requests no run and no member works, but a plan is exhausted or the data topic was re-created.

    The sensor needs DESCRIBE on the data topic. It reads no record and joins no consumer group.

    Args:
        job: A job of `build_claimed_batch_job` with one claimed-batch op.
        group: The group.
        max_lag_records: Request runs above this number of unread records.
        max_lag_age_s: Request runs if an unread record is older than this, in seconds, by its own timestamp.
        rearm_records: Stop at this number of unread records (default: half of `max_lag_records`).
        rearm_s: Stop if no unread record is older than this, in seconds (default: half of `max_lag_age_s`).
        max_runs_per_tick: The maximum number of runs of a tick, including runs of the job that hold nothing yet.
        max_attempts: How often a plan is retried before it counts as exhausted; the value of the op.
        name: The name of the sensor (default: `<group>_lag`).
        allow_missing_topic: Skip a tick if the data topic does not exist. By default the tick fails.
        minimum_interval_s: The minimum time between two ticks, in seconds.
        rationalizer_key: The key of the `RationalizerResource`, which connects to the log and the data topics.
        default_status: `RUNNING` starts the sensor with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: An argument is invalid, or neither of the limits is given.

    Example:
        ```python
        sensor = build_lag_sensor(job, group="shops", max_lag_records=1_000_000, max_lag_age_s=600)
        ```
    """
    require_group(group)
    for field_name, value in (("max_runs_per_tick", max_runs_per_tick), ("max_attempts", max_attempts)):
        if value < 1:
            raise ConfigurationError(f"{field_name} is {value}; it must be at least 1")
    topics = list(claimed_batch_ops(job))
    if len(topics) != 1:
        raise ConfigurationError(
            f"job {job.name!r} has {len(topics)} claimed-batch ops; a lag sensor needs a job with one"
        )
    topic = topics[0]
    rearm = None if rearm_records is None else float(rearm_records)
    records = _threshold("max_lag_records", max_lag_records, "rearm_records", rearm)
    age_s = _threshold("max_lag_age_s", max_lag_age_s, "rearm_s", rearm_s)
    if records is None and age_s is None:
        raise ConfigurationError(
            f"the lag sensor of group {group!r} has no limit: pass max_lag_records, max_lag_age_s, or both"
        )

    # Dagster also passes resources by keyword if a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Read the log and the topic, and request runs if a limit is exceeded."""
        tick = _Tick(
            context, group, job.name, topic, records, age_s, max_runs_per_tick, max_attempts, allow_missing_topic
        )
        return tick.run(resource_of(RationalizerResource, context.resources, rationalizer_key))

    return SensorDefinition(
        name=name or sensor_name(group, "lag"),
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description=f"Requests runs if the lag of group {group!r} in topic {topic!r} is high.",
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


@dataclass(slots=True)
class _Tick:
    """One evaluation of the sensor."""

    context: SensorEvaluationContext
    group: str
    job: str
    topic: str
    records: Threshold | None
    age_s: Threshold | None
    max_runs_per_tick: int
    max_attempts: int
    allow_missing_topic: bool

    def run(self, rationalizer: RationalizerResource) -> SensorResult:
        """Read the log, the topic and the job's runs, as far as needed, and return the result of the tick."""
        cursor, now_s = LagCursor.read(self.context.cursor), time.time()
        wall_ms = round(now_s * 1_000)
        with rationalizer.world() as world:
            require_certain(world, self.topic)
            paused = why_paused(world, self.group, self.topic, wall_ms)
            positions = positions_of(world, self.group, self.topic, max_attempts=self.max_attempts, wall_ms=wall_ms)
            plans = exhausted(open_plans(world, wall_ms, group=self.group, topic=self.topic), self.max_attempts)
            unknown = missing_group(world, self.group)
            misspelt = f"; {unknown}" if unknown else ""
        if paused is not None:
            return self._skip(cursor, paused)
        limits = _Limits(*(None if limit is None else limit.active(cursor) for limit in (self.records, self.age_s)))
        older_than_ms = None if limits.age_s is None else round((now_s - limits.age_s) * 1_000)
        try:
            with rationalizer.open_data() as topics:
                lag = read_lag(topics, self.topic, positions, older_than_ms)
        except TopicNotFoundError as missing:
            if not self.allow_missing_topic:
                raise
            return self._skip(cursor, str(missing))
        record_lag(self.group, self.topic, lag.records)
        is_above = limits.are_exceeded(lag.unread if cursor.is_draining else lag.due, lag.old)
        cursor.is_draining = is_above
        text = f"{limits.describe(lag)}{misspelt}"
        if lag.hidden or misspelt:
            self.context.log.warning(text)
        if not is_above:
            if not positions.working:
                self._require_no_operator(lag, plans, text)
            return self._skip(cursor, text)
        if not limits.are_exceeded(lag.due, lag.old):
            return self._skip(cursor, f"{text}; the members that hold partitions are processing them")
        return self._request_runs(cursor, lag.due, positions, text, now_s)

    def _require_no_operator(self, lag: TopicLag, plans: Sequence[OpenPlan], text: str) -> None:
        """Raise an error if the topic was re-created or plans are exhausted, because no run would be requested."""
        where = f"group {self.group!r}, topic {self.topic!r}"
        if lag.is_recreated:
            raise DataTopicChangedError(
                f"{where}: {text}. Check what was processed of the old topic, then set the position with "
                f"`{shlex.join(['marshal-dagster', 'position', 'reset', self.group, self.topic, '--to-earliest'])}`"
            )
        if plans:
            tried = first_ten([plan.tried for plan in plans], "; ")
            raise Failure(f"{tried}. Runs do not retry it. Fix the cause and {retry_text(plans)}")

    def _skip(self, cursor: LagCursor, reason: str) -> SensorResult:
        self.context.log.info(reason)
        return SensorResult(skip_reason=reason, cursor=cursor.model_dump_json())

    def _request_runs(
        self, cursor: LagCursor, due: Sequence[UnreadRecords], positions: GroupPositions, text: str, now_s: float
    ) -> SensorResult:
        waiting = self._waiting(positions, now_s)
        room = min(self.max_runs_per_tick, len(due)) - len(waiting)
        if room < 1:
            in_progress = f"runs of {self.job!r} are in progress and hold nothing yet: {first_ten(waiting)}"
            return self._skip(cursor, f"{text}; {in_progress}")
        digest = self._digest(due)
        wait_s = self._wait_s(digest, now_s)
        if wait_s > 0:
            return self._skip(cursor, f"{text}; the last run moved no position, next request in {wait_s:.0f} s")
        key = f"{self.group}/{self.topic}/{LAG}/{digest}.{next_key(self.context.instance, digest)}"
        requests = [self._request(f"{key}.{number}", digest, now_s) for number in range(room)]
        self.context.log.info("%s: requesting %d runs", text, len(requests))
        return SensorResult(run_requests=requests, cursor=cursor.model_dump_json())

    def _waiting(self, positions: GroupPositions, now_s: float) -> list[str]:
        """Return the unfinished runs of the job that hold nothing yet but may still claim, including manual ones."""
        wanted = RunsFilter(job_name=self.job, statuses=list(MAY_CLAIM))
        records = self.context.instance.get_run_records(wanted, limit=_RUNS_LOOKED_AT)
        return [
            record.dagster_run.run_id
            for record in records
            if record.dagster_run.run_id not in positions.working and may_begin(record, now_s)
        ]

    def _wait_s(self, digest: str, now_s: float) -> float:
        """Return how many seconds to wait before the next request, because runs moved no position."""
        wanted = RunsFilter(tags={ASKED_TAG: digest}, statuses=list(FINISHED))
        records = self.context.instance.get_run_records(wanted, limit=_RUNS_LOOKED_AT)
        if not records:
            return 0.0
        return max(map(ended_at_s, records)) + retry_backoff_s(FIRST_WAIT_S, len(records)) - now_s

    def _request(self, key: str, digest: str, now_s: float) -> RunRequest:
        return RunRequest(
            run_key=key,
            job_name=self.job,
            tags=request_tags(self.group, self.topic, LAG, digest, now_s),
        )

    def _digest(self, due: Sequence[UnreadRecords]) -> str:
        """Return a digest of what is done of the due partitions, to find runs that changed nothing.

        Ranges count too, because an exhausted range keeps the offset where it is.
        """
        return hashlib.sha256("/".join([LAG, self.group, self.topic, *map(_place, due)]).encode()).hexdigest()[:24]


def _place(unread: UnreadRecords) -> str:
    position = unread.position
    passed_over = [f"{range_.start}-{range_.end}" for range_ in position.passed_over]
    return ".".join([place_of(unread.partition, position.generation, position.offset), *passed_over])


@dataclass(frozen=True, slots=True)
class _Limits:
    """The thresholds in force in this tick."""

    records: float | None
    age_s: float | None

    def are_exceeded(self, unread: Sequence[UnreadRecords], old: Collection[int]) -> bool:
        """Return whether there are too many unread records, or one that is too old."""
        many = self.records is not None and sum(partition.records for partition in unread) > self.records
        return many or any(partition.partition in old for partition in unread)

    def describe(self, lag: TopicLag) -> str:
        """Return one line about the lag."""
        records = sum(partition.records for partition in lag.unread)
        due = sum(partition.records for partition in lag.due)
        texts = [f"{records:,} records are unread, {due:,} of them in {len(lag.due)} unheld partitions"]
        texts += [f"the limit is {self.records:,.0f}"] if self.records is not None else []
        if self.age_s is not None:
            texts.append(f"{len(lag.old)} partitions have an unread record older than {self.age_s:g} s")
        if lag.hidden:
            named = first_ten([f"partition {number}, offset {offset}" for number, offset in lag.hidden.items()])
            texts.append(
                f"records after one with a time in the future count as old, because their age is unknown: {named}. "
                "Correct the sender's clock or unit of time (Kafka uses milliseconds), or use max_lag_records"
            )
        if lag.given_up:
            texts.append(f"not counted because their plan failed too many times: partitions {first_ten(lag.given_up)}")
        if lag.is_recreated:
            texts.append(f"not counted because the topic was re-created: partitions {first_ten(lag.is_recreated)}")
        return "; ".join(texts)
