"""Check the coordination log: that it exists and is complete, that its time is right, and nothing is half written."""

from collections.abc import Iterator
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import first_few
from marshal_dagster.cli import output
from marshal_dagster.cli.doctor_checks.finding import Finding, alter_topic, ok, problem, warning
from marshal_dagster.cli.world_view import WorldView, world_view
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.log import CoordinationLog, LogIdentity
from marshal_dagster.coordination.pause_text import paused_group_text, resume_command
from marshal_dagster.coordination.rationalizer import LOG_TIME_AHEAD_MS, Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import MarshalError, TopicNotFoundError
from marshal_dagster.protocol.messages import Invalid
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, exhausted, open_plans, retry_commands
from marshal_dagster.protocol.world import World

_TOPIC: Final = "coordination topic"
_MOST_SHOWN: Final = 5


def read_log(
    log: CoordinationLog,
    topic: str,
    *,
    timeout_s: float,
    clock: Clock | None = None,
    snapshots: Snapshots | None = None,
) -> Rationalizer | Finding:
    """Read the log to its present end, or return the finding why that is not possible."""
    try:
        rationalizer = Rationalizer(log, timeout_s=timeout_s, clock=clock, snapshots=snapshots)
        rationalizer.catch_up()
    except TopicNotFoundError as error:
        return missing_topic(error, topic)
    except MarshalError as error:
        return problem(
            _TOPIC,
            str(error),
            "a process that cannot read the log sees no claims and cannot make any",
            "fix what is reported, then: marshal-dagster doctor",
        )
    return rationalizer


def missing_topic(error: TopicNotFoundError, topic: str) -> Finding:
    """Report that there is no coordination topic."""
    return problem(
        _TOPIC,
        str(error),
        "it records all claims: without it nothing can be claimed",
        f"marshal-dagster topic create --name {topic}",
    )


def check_world(
    identity: LogIdentity, world: World, at_ms: int, max_attempts: int = DEFAULT_MAX_ATTEMPTS
) -> Iterator[Finding]:
    """Check that the log is complete, its time right by the clock `at_ms` (unix ms), and nothing half written."""
    view = world_view(world, at_ms=at_ms)
    found = f"{identity.topic} has {identity.partitions} coordination partitions and the id {identity.topic_id}"
    yield ok(_TOPIC, found)
    yield _exhausted_plans(world, at_ms, max_attempts)
    yield _placement(view, identity)
    yield _certainty(view, identity)
    yield _clocks(view, at_ms)
    yield _groups(view)
    yield _pauses(view)


def _exhausted_plans(world: World, at_ms: int, max_attempts: int) -> Finding:
    plans = exhausted(open_plans(world, at_ms), max_attempts)
    if not plans:
        return ok("exhausted plans", "no plan has used up its attempts")
    return problem(
        "exhausted plans",
        first_few([plan.tried for plan in plans], _MOST_SHOWN, "; "),
        "runs do not retry these offsets any more, and later messages of the partition wait: fix the cause, which the "
        "last failed run reports",
        retry_commands(plans),
    )


def _placement(view: WorldView, identity: LogIdentity) -> Finding:
    """Check by the records whether partitions were added to the topic, because placement depends on their number."""
    misplaced = view.invalid.get(str(Invalid.MISPLACED), 0)
    if not misplaced:
        return ok("partition count", "each record is in the coordination partition of its topic")
    return warning(
        "partition count",
        f"{misplaced} records are not in the coordination partition of their topic, which is one of "
        f"{identity.partitions}",
        "they have no effect: either partitions were added to the topic, and members no longer read these records, or "
        "a process assumes another number of partitions",
        "marshal-dagster tail --from-start (shows which); if partitions were added, stop all members "
        "and have them use a new topic: marshal-dagster topic create --name NEW",
    )


def _certainty(view: WorldView, identity: LogIdentity) -> Finding:
    if not view.observed:
        return ok("certain", "the log is complete from offset 0 or a snapshot on: its world state is certain")
    keep_all = alter_topic(identity.topic, "retention.ms=-1,retention.bytes=-1,cleanup.policy=delete")
    return problem(
        "certain",
        f"coordination partitions {runs_text(view.observed)} do not begin at offset 0 and no snapshot fits: they are "
        "only observed",
        "what was deleted may hold a pause, a plan or a live claim, so nothing can be claimed from them",
        f"keep all records from now on: {keep_all}; then stop all members of all groups, and confirm their positions: "
        f"marshal-dagster recover --coordination-topic {identity.topic}",
    )


def _clocks(view: WorldView, at_ms: int) -> Finding:
    if view.log_time_ms is None:
        return ok("log time", "the log has no record yet")
    ahead_ms = view.log_time_ms - at_ms
    if ahead_ms <= LOG_TIME_AHEAD_MS:
        where = f"{output.duration(ahead_ms)} {'behind' if ahead_ms <= 0 else 'ahead of'} this machine's clock"
        return ok("log time", f"{output.utc(view.log_time_ms)}, {where}")
    # The log time of a coordination partition is the clock of the broker that leads it.
    fast_partitions = [each.number for each in view.partitions if (each.log_time_ms or 0) - at_ms > LOG_TIME_AHEAD_MS]
    return problem(
        "log time",
        f"log time {output.utc(view.log_time_ms)} is {output.duration(ahead_ms)} ahead of this machine's clock "
        f"(coordination partitions {runs_text(fast_partitions)})",
        "a broker's clock has jumped, or this machine's is slow: owners may count as stale too early (they are "
        "fenced, and their work is repeated) or too late",
        "on the brokers that lead these partitions, and here: timedatectl status (the clock must be synchronised)",
    )


def _groups(view: WorldView) -> Finding:
    halves = [f"group {group.name}: {difference}" for group in view.groups for difference in group.differences]
    if not halves:
        return ok("groups", f"{len(view.groups)} in the log; nothing is half written")
    return problem(
        "groups",
        "; ".join(halves),
        "which pause or settings members follow depends on the coordination partition of the data topic",
        "marshal-dagster status (shows them); then repeat the command that wrote the record",
    )


def _pauses(view: WorldView) -> Finding:
    paused = [group for group in view.groups if group.is_paused]
    if not paused:
        return ok("pauses", "no group is paused")
    return warning(
        "pauses",
        "; ".join(paused_group_text(group.name, group.paused_until_s, group.pause_origin) for group in paused),
        "members of a paused group claim nothing, so its lag grows: end a pause that is no longer needed",
        "; ".join(resume_command(group.name) for group in paused),
    )
