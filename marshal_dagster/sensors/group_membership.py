"""The sensor that makes a Dagster code location a member of a group with a coordinator.

The first tick starts a membership in the process of the code server. The membership answers the coordinator until ticks
stop. Runs are other processes, which read the partitions assigned to their member from Kafka. While the coordinator is
silent, no partition is assigned, and the first member to claim a partition gets it.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dagster import DefaultSensorStatus, RunRequest, SensorDefinition, SensorEvaluationContext, SensorResult
from pydantic import Field

from marshal_dagster.coordinator.messages import by_topic
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.batch import AnyJob, claimed_batch_ops
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.resources.claimer import ClaimerResource, claimer_of
from marshal_dagster.runs.names import sensor_name
from marshal_dagster.sensors._cursor import Cursor

if TYPE_CHECKING:
    from marshal_dagster.coordinator.client import CoordinatedMember

MEMBER_TAG: Final = "marshal/member"
"""Tag with the member's name, on runs that its sensor requests."""
_MISSED_TICKS: Final = 6
"""The number of intervals without a tick after which a member leaves its group."""
_LEAST_PATIENCE_S: Final = 60.0
_MAY_PASS: Final = {"session_timeout_too_short", "session_timeout_too_long", "bad_pattern"}
"""The errors of the coordinator after which a member registers again at the next tick."""

logger = logging.getLogger(__name__)


class MemberCursor(Cursor):
    """The sensor's cursor: the partitions assigned at the last tick, by topic."""

    had: dict[str, list[int]] = Field(default_factory=dict)


def build_group_member_sensor(
    job: AnyJob,
    *,
    topics: Sequence[str] = (),
    pattern: str | None = None,
    capacity: int = 1,
    asks_for_runs: bool = True,
    name: str | None = None,
    minimum_interval_s: int = 10,
    claimer_key: str = "claimer",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build a sensor that makes this code location a member of a group led by `marshal-dagster coordinator`.

    The claimer resource has the group, the member's name and its session timeout. If the member is assigned partitions
    that it did not have before, the sensor requests a run of `job`. The member leaves the group if the sensor is
    switched off or the code location stops.

    Args:
        job: A job of `build_claimed_batch_job`.
        topics: The topics of the member (default: the topics of the job, if there is no `pattern`).
        pattern: Topics that match this pattern are topics of the member too. Wildcards are `*` and `?`.
        capacity: The weight of the member in the assignment, relative to the other members; 1 or more.
        asks_for_runs: Whether the sensor requests runs. If False, only schedules start them.
        name: The name of the sensor (default: `<job>_member`).
        minimum_interval_s: The minimum time between two ticks, in seconds. The member leaves after six intervals
            without a tick, but not before 60 s.
        claimer_key: The key of the `ClaimerResource`, which must have a `member`.
        default_status: `RUNNING` starts the sensor with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: There is no topic, or `capacity` is below 1.

    Example:
        ```python
        claimer = ClaimerResource(connection=kafka, group="shops", member="east")
        sensor = build_group_member_sensor(job, default_status=DefaultSensorStatus.RUNNING)
        ```
    """
    wanted = list(topics) or ([] if pattern else list(claimed_batch_ops(job)))
    if not wanted and pattern is None:
        raise ConfigurationError(f"job {job.name!r} has no claimed-batch op: pass the member's topics or pattern")
    if capacity < 1:
        raise ConfigurationError(f"capacity is {capacity}; it must be at least 1")
    interest = Subscription(tuple(wanted), pattern, capacity)

    # Dagster also passes resources by keyword if a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """Keep the membership alive, and request a run if new partitions are assigned."""
        claimer = claimer_of(context.resources, claimer_key)
        member = require_member(claimer, claimer_key)
        patience_s = max(_LEAST_PATIENCE_S, _MISSED_TICKS * minimum_interval_s)
        living = process_member(claimer, interest, patience_s)
        if living.error is not None:
            raise ConfigurationError(_refused(member, claimer, living.error))
        had, has = MemberCursor.read(context.cursor).had, by_topic(living.places)
        cursor = MemberCursor(had=has).model_dump_json(exclude={"version"})
        text = f"member {member!r} of group {claimer.group!r}: {living.state.value}, with {_named(living.places)}"
        problem = _silence(living, claimer.member_session_ms)
        if problem is not None:
            text = f"{text}; {problem}"
            context.log.warning(text)
        gained = {topic: set(numbers) - set(had.get(topic, ())) for topic, numbers in has.items()}
        if not asks_for_runs or not any(gained.values()):
            return SensorResult(skip_reason=text, cursor=cursor)
        context.log.info("%s: requesting a run", text)
        return SensorResult(run_requests=[RunRequest(tags={MEMBER_TAG: member})], cursor=cursor)

    return SensorDefinition(
        name=name or sensor_name(job.name, "member"),
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description="Makes this code location a member of its group, so that the coordinator assigns partitions to it.",
        job=job,
        default_status=default_status,
        required_resource_keys={claimer_key},
    )


def require_member(claimer: ClaimerResource, key: str) -> str:
    """Return the member's name. Raises `ConfigurationError` if the resource has none."""
    if claimer.member is None:
        raise ConfigurationError(
            f"resource {key!r} has no member: set its field `member` to a name for this deployment, such as 'east'"
        )
    return claimer.member


# Memberships of this process


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics and the capacity with which a member registers."""

    topics: tuple[str, ...]
    pattern: str | None
    capacity: int


_Key = tuple[KafkaConnection, str, str, str, int, Subscription]


@dataclass(slots=True)
class _Membership:
    """A membership of this process; `timer` ends it unless another tick resets the timer."""

    member: "CoordinatedMember"
    timer: threading.Timer | None = None

    def stop(self) -> None:
        """Leave the group."""
        if self.timer is not None:
            self.timer.cancel()
        self.member.__exit__()


_kept: dict[_Key, _Membership] = {}
_locks: dict[_Key, threading.Lock] = {}
"""One lock for each membership, so that a group with slow brokers does not block others."""


def process_member(claimer: ClaimerResource, interest: Subscription, patience_s: float) -> "CoordinatedMember":
    """Return this process's membership; start it on first use, or if the last one ended.

    The member leaves the group unless this function is called again within `patience_s` seconds. Raises
    `ConfigurationError`, `TopicNotFoundError` and `UnavailableError`.
    """
    connection, name = claimer.coordination(), require_member(claimer, "claimer")
    claimer.require_own_group()
    key = (connection, claimer.coordinator_topic, claimer.group, name, claimer.member_session_ms, interest)
    with _locks.setdefault(key, threading.Lock()):
        kept = _kept.get(key)
        if kept is None or kept.member.is_over or kept.member.error in _MAY_PASS:
            if kept is not None:
                kept.stop()
            kept = _kept[key] = _Membership(_join(claimer, connection, name, interest))
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = threading.Timer(patience_s, _leave, [key, kept])
        kept.timer.daemon = True
        kept.timer.start()
        return kept.member


def _join(
    claimer: ClaimerResource, connection: KafkaConnection, name: str, interest: Subscription
) -> "CoordinatedMember":
    from marshal_dagster.coordinator.client import CoordinatedMember
    from marshal_dagster.coordinator.transport import CoordinatorTopics

    member = CoordinatedMember(
        connection,
        claimer.group,
        name,
        start=lambda places: logger.info("member %r is assigned %s", name, _named(places)),
        stop=lambda places: logger.info("member %r releases %s", name, _named(places)),
        topics=CoordinatorTopics(claimer.coordinator_topic),
        topics_wanted=list(interest.topics),
        pattern=interest.pattern,
        capacity=interest.capacity,
        session_timeout_ms=claimer.member_session_ms,
        is_static=True,
    )
    member.__enter__()
    return member


def _leave(key: _Key, kept: _Membership) -> None:
    with _locks.setdefault(key, threading.Lock()):
        if _kept.get(key) is kept:
            del _kept[key]
    kept.stop()


def _refused(member: str, claimer: ClaimerResource, error: str) -> str:
    """Return an error text: why the coordinator refused the member, and what to do."""
    causes = {
        "duplicate_id": "another process registered with the same name. Give each deployment its own name; after a "
        "reload of this code location only the newest process has it",
        "session_timeout_too_short": f"member_session_s is {claimer.member_session_s:g}, less than the coordinator's "
        "--min-session. Increase it",
        "session_timeout_too_long": "member_session_s must be at most 3,600",
        "bad_pattern": "a pattern may have up to 249 characters: letters, digits, '.', '_', '-', '*' and '?'",
    }
    return f"member {member!r} of group {claimer.group!r} was refused: {causes.get(error, error)}"


def _silence(member: "CoordinatedMember", session_ms: int) -> str | None:
    """Return why the member hears no coordinator, and what to do; None if it hears one."""
    from marshal_dagster.coordinator.assignment_reader import SILENT_SESSIONS

    if member.failure is not None:
        return str(member.failure)
    if member.silent_ms() < SILENT_SESSIONS * session_ms:
        return None
    return (
        f"no coordinator has sent a message for {member.silent_ms() / 1_000:.0f} s, so runs claim free partitions; "
        "check that `marshal-dagster coordinator run` is running, and the rights of this member on its topics"
    )


def _named(places: Collection[tuple[str, int]]) -> str:
    return ", ".join(f"{len(numbers)} of {topic!r}" for topic, numbers in by_topic(places).items()) or "no partitions"
