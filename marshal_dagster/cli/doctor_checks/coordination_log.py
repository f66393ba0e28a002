"""The coordination log: whether it is there and whole, its time right, and nothing half written."""

from collections.abc import Iterator

from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.log import CoordinationLog, LogIdentity
from marshal_dagster.coordination.rationalizer import LOG_TIME_AHEAD_MS, Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import MarshalError, TopicNotFoundError
from marshal_dagster.protocol.messages import Invalid
from marshal_dagster.protocol.world import World


def read_log(
    log: CoordinationLog,
    topic: str,
    *,
    timeout_s: float,
    clock: Clock | None = None,
    snapshots: Snapshots | None = None,
) -> Rationalizer | Finding:
    """Read the log to its present end; where that cannot be done, tell why."""
    try:
        rationalizer = Rationalizer(log, timeout_s=timeout_s, clock=clock, snapshots=snapshots)
        rationalizer.catch_up()
    except TopicNotFoundError as error:
        return missing_topic(error, topic)
    except MarshalError as error:
        return _unreadable(error)
    return rationalizer


def missing_topic(error: TopicNotFoundError, topic: str) -> Finding:
    """Tell that there is no coordination topic."""
    return Finding(
        "coordination topic",
        CheckState.PROBLEM,
        str(error),
        "it is the one authority on who holds what: nothing can be claimed",
        f"marshal-dagster topic create --name {topic}",
    )


def check_world(identity: LogIdentity, world: World, at_ms: int) -> Iterator[Finding]:
    """Check that the log is whole, its time right by the clock `at_ms` (unix ms), and nothing half written."""
    view = world_view.world_view(world, at_ms=at_ms)
    yield _identity(identity)
    yield _placement(view, identity)
    yield _certainty(view, identity)
    yield _clocks(view)
    yield _groups(view)


def _unreadable(error: MarshalError) -> Finding:
    return Finding(
        "coordination topic",
        CheckState.PROBLEM,
        str(error),
        "who cannot read the log knows of no claim and can make none",
        "mend what is said, then: marshal-dagster doctor",
    )


def _identity(identity: LogIdentity) -> Finding:
    found = f"{identity.topic} has {identity.partitions} coordination partitions and the id {identity.topic_id}"
    return Finding("coordination topic", CheckState.OK, found)


def _placement(view: world_view.WorldView, identity: LogIdentity) -> Finding:
    """Tell by the records whether the topic was given more partitions: placement changes with their number."""
    misplaced = view.invalid.get(str(Invalid.MISPLACED), 0)
    if not misplaced:
        return Finding("partition count", CheckState.OK, "each record lies in the coordination partition of its topic")
    return Finding(
        "partition count",
        CheckState.WARNING,
        f"{misplaced} records lie in another coordination partition than that of their topic, which is one of "
        f"{identity.partitions}",
        "they count for nothing: the topic was given more partitions, and what was written before is not where members "
        "look now; or somebody writes who goes by another number",
        "marshal-dagster tail --from-start (shows which); if partitions were added, stop all members "
        "and have them use a new topic: marshal-dagster topic create --name NEW",
    )


def _certainty(view: world_view.WorldView, identity: LogIdentity) -> Finding:
    if not view.observed:
        return Finding(
            "certain",
            CheckState.OK,
            "the log is whole from offset 0, or from a snapshot, on: its world state is certain",
        )
    return Finding(
        "certain",
        CheckState.PROBLEM,
        f"coordination partitions {world_view.listed(view.observed)} do not begin at offset 0 and no snapshot "
        "fits: they "
        "are only observed",
        "what was deleted may hold a pause, a plan or a live claim, so nothing can be claimed from them",
        "keep all records from now on: kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics "
        f"--entity-name {identity.topic} --add-config retention.ms=-1,retention.bytes=-1,cleanup.policy=delete; "
        "to claim again, stop all members and have them use a new one: marshal-dagster topic create --name NEW",
    )


def _clocks(view: world_view.WorldView) -> Finding:
    log_time_ms, at_ms = view.log_time_ms, view.at_ms
    if log_time_ms is None or at_ms is None:
        return Finding("log time", CheckState.OK, "the log has no record yet")
    ahead_ms = log_time_ms - at_ms
    if ahead_ms <= LOG_TIME_AHEAD_MS:
        where = f"{output.duration(ahead_ms)} {'behind' if ahead_ms <= 0 else 'ahead of'} this machine's clock"
        return Finding("log time", CheckState.OK, f"{output.utc(log_time_ms)}, {where}")
    return Finding(
        "log time",
        CheckState.PROBLEM,
        f"log time {output.utc(log_time_ms)} is {output.duration(ahead_ms)} ahead of this machine's clock ("
        f"coordination partitions {world_view.listed(_ahead(view, at_ms))})",
        "a broker's clock has jumped, or this one is slow: owners may be taken for stale too early (fenced, they redo "
        "work) or too late",
        "on the brokers that lead these and here: timedatectl status (the clock must be synchronised)",
    )


def _ahead(view: world_view.WorldView, at_ms: int) -> list[int]:
    """Give the coordination partitions whose log time is too far ahead: each is that of the broker that leads it."""
    return [
        partition.number
        for partition in view.partitions
        if partition.log_time_ms is not None and partition.log_time_ms - at_ms > LOG_TIME_AHEAD_MS
    ]


def _groups(view: world_view.WorldView) -> Finding:
    halves = [f"group {group.name}: {difference}" for group in view.groups for difference in group.differences]
    if not halves:
        return Finding("groups", CheckState.OK, f"{len(view.groups)} named in the log; nothing is half written")
    return Finding(
        "groups",
        CheckState.PROBLEM,
        "; ".join(halves),
        "its members go by different pauses or settings, depending on the topic",
        "marshal-dagster status (shows them); write the record again from where it was sent",
    )
