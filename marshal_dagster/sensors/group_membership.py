"""A Dagster deployment as a member of a group that a coordinator leads, by a sensor that keeps it there.

A code location registers by its sensor: the first tick begins a membership in the code server's process, which answers
the coordinator until ticks stay away. Runs are other processes: they read their member's share from Kafka. While the
coordinator is silent, nothing is anybody's, and claims are first come, first served.
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
"""On runs that a member's sensor asks for: the member's name."""
_MISSED_TICKS: Final = 6
"""After so many intervals without a tick a member leaves its group."""
_LEAST_PATIENCE_S: Final = 60.0
_MAY_PASS: Final = {"session_timeout_too_short", "session_timeout_too_long", "bad_pattern"}
"""Refusals after which a member registers again at the next tick."""

logger = logging.getLogger(__name__)


class MemberCursor(Cursor):
    """What a member's sensor remembers: the partitions that it had at the last tick, by topic."""

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
    """Build the sensor by which this code location is a member of its group; `marshal-dagster coordinator` leads it.

    The resource `claimer_key` names the group, the member and its session time-out. The member takes `topics` and
    those that match `pattern` (`*` and `?`), by default the topics of `job`'s claimed-batch ops; `capacity` is how much
    of the work it takes next to others. Whenever it is assigned partitions that it did not have, the sensor asks for a
    run of `job`, unless `asks_for_runs` is False: then schedules alone start them.

    A sensor that is switched off, or a code location that is gone, leaves the group. Raises `ConfigurationError`.
    """
    wanted = list(topics) or ([] if pattern else list(claimed_batch_ops(job)))
    if not wanted and pattern is None:
        raise ConfigurationError(f"job {job.name!r} has no claimed-batch op: name the topics that the member takes")
    if capacity < 1:
        raise ConfigurationError(f"capacity is {capacity}; it must be at least 1")
    interest = Subscription(tuple(wanted), pattern, capacity)

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult:
        """See that the member lives, and what it has."""
        claimer = claimer_of(context.resources, claimer_key)
        member = require_member(claimer, claimer_key)
        patience_s = max(_LEAST_PATIENCE_S, _MISSED_TICKS * minimum_interval_s)
        living = process_member(claimer, interest, patience_s)
        if living.error is not None:
            raise ConfigurationError(_refused(member, claimer, living.error))
        had, has = MemberCursor.read(context.cursor).had, by_topic(living.places)
        cursor = MemberCursor(had=has).model_dump_json(exclude={"version"})
        text = f"member {member!r} of group {claimer.group!r}: {living.state.value}, with {_named(living.places)}"
        gained = {topic: set(numbers) - set(had.get(topic, ())) for topic, numbers in has.items()}
        if not asks_for_runs or not any(gained.values()):
            return SensorResult(skip_reason=text, cursor=cursor)
        context.log.info("%s: asking for a run", text)
        return SensorResult(run_requests=[RunRequest(tags={MEMBER_TAG: member})], cursor=cursor)

    return SensorDefinition(
        name=name or sensor_name(job.name, "member"),
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description="Makes this code location a member of its group, to whom the coordinator assigns partitions.",
        job=job,
        default_status=default_status,
        required_resource_keys={claimer_key},
    )


def require_member(claimer: ClaimerResource, key: str) -> str:
    """Give the member's name. Raises `ConfigurationError` where the resource names none."""
    if claimer.member is None:
        raise ConfigurationError(f"resource {key!r}: member is not given; name this deployment, such as 'east'")
    return claimer.member


# Memberships of this process


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member takes."""

    topics: tuple[str, ...]
    pattern: str | None
    capacity: int


_Key = tuple[KafkaConnection, str, str, str, int, Subscription]


@dataclass(slots=True)
class _Membership:
    """A membership of this process; `timer` ends it unless a tick comes before."""

    member: "CoordinatedMember"
    timer: threading.Timer | None = None

    def stop(self) -> None:
        """Leave the group."""
        if self.timer is not None:
            self.timer.cancel()
        self.member.__exit__()


_kept: dict[_Key, _Membership] = {}
_locks: dict[_Key, threading.Lock] = {}
"""One each, so that a group whose brokers are slow keeps no other waiting."""


def process_member(claimer: ClaimerResource, interest: Subscription, patience_s: float) -> "CoordinatedMember":
    """Give this process's membership, begun now if it is the first use or the last one ended.

    It leaves the group unless it is asked for again within `patience_s` seconds. Raises `ConfigurationError`,
    `TopicNotFoundError`, `UnavailableError`.
    """
    connection, name = claimer.coordination(), require_member(claimer, "claimer")
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
        stop=lambda places: logger.info("member %r gives up %s", name, _named(places)),
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
    """Return why a coordinator refused a member, and what to do."""
    causes = {
        "duplicate_id": "another process has registered under that name: give each deployment a name of its own; after "
        "a reload of this code location the newest one has it",
        "session_timeout_too_short": f"member_session_s is {claimer.member_session_s:g}, less than the coordinator's "
        "--min-session",
        "session_timeout_too_long": "a session time-out is an hour at most",
        "bad_pattern": "a pattern may have up to 249 letters, digits, '.', '_', '-', '*' and '?'",
    }
    return f"member {member!r} of group {claimer.group!r} was refused: {causes.get(error, error)}"


def _named(places: Collection[tuple[str, int]]) -> str:
    return ", ".join(f"{len(numbers)} of {topic!r}" for topic, numbers in by_topic(places).items()) or "no partitions"
