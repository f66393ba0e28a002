"""`coordinator`: create a group coordinator's topics, run it, and show which partitions it assigned."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import typer

from marshal_dagster._internal.health_server import PATH
from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import counted, first_few, nearest_first
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, data_connection_of, hint_how_to_create
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import (
    COORDINATOR_TOPIC_VARIABLE,
    AsJson,
    ConnectionOptions,
    CoordinationTopic,
    DataConnection,
    GroupName,
    Health,
    finite,
)
from marshal_dagster.cli.service import health_server, report_event, run_until_signal
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer
from marshal_dagster.coordinator import DEFAULT_TOPIC
from marshal_dagster.coordinator.assignment import STRATEGIES
from marshal_dagster.coordinator.group import GroupEvent, GroupEventKind, GroupRules
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment, read_groups
from marshal_dagster.coordinator.lag_weights import LagWeights
from marshal_dagster.coordinator.messages import LONGEST_SESSION_MS, by_topic
from marshal_dagster.coordinator.service import Coordinator, CoordinatorOptions
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topic_names import require_topic_name

_LOGGED_PARTS: Final = ("coordinator", "election", "coordination", "kafka", "_internal")
_LONG_SILENT_MS: Final = 60_000.0
_MOST_NAMED: Final = 10
_EVENT_TEXTS: Final = {
    GroupEventKind.JOINED: "joined",
    GroupEventKind.LEFT: "left",
    GroupEventKind.FAILED: "no longer answers",
    GroupEventKind.REBALANCE_RETRIED: "did not answer in a rebalance, which is retried",
    GroupEventKind.REBALANCE_GIVEN_UP: "did not answer in several rebalances in a row; the rebalance is retried later",
    GroupEventKind.SUPERSEDED: "a newer coordinator leads it now",
}

app = command_group(
    "Assign partitions to the members of a group. An assignment is advice: a member owns a partition only after it has "
    "claimed it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorCommandOptions(ConnectionOptions):
    """The connection, the coordinator's topics, and whether to write JSON."""

    coordinator_topic: Annotated[
        str,
        typer.Option(
            "--coordinator-topic",
            metavar="NAME",
            envvar=COORDINATOR_TOPIC_VARIABLE,
            show_envvar=False,
            help=f"The first of the coordinator's three topics; {COORDINATOR_TOPIC_VARIABLE} sets it too.",
        ),
    ] = DEFAULT_TOPIC
    as_json: AsJson = False

    def topics(self) -> CoordinatorTopics:
        """Return the coordinator's topics. Raises `ConfigurationError`."""
        require_topic_name("--coordinator-topic", self.coordinator_topic)
        return CoordinatorTopics(self.coordinator_topic)


@command(
    app,
    "init",
    "Create the coordinator's topics. There are three; those that exist already are not changed. Their number of "
    "partitions is the maximum number of coordinators that share the groups. It can never change.",
    "coordinator init",
    "coordinator init --partitions 16",
)
def init(
    *,
    partitions: Annotated[
        int, typer.Option("--partitions", metavar="N", min=1, max=1_000, help="Number of partitions of each topic.")
    ] = 8,
    options: CoordinatorCommandOptions,
) -> None:
    """Create the topics that are missing. Raises `MarshalError`."""
    topics, connection = options.topics(), connection_of(options)
    with warnings_to_stderr(_LOGGED_PARTS):
        topics.create(connection, partitions)
    found = topics.partitions(connection)
    names = [topics.member_messages, topics.coordinator_messages, topics.leader]
    if options.as_json:
        output.write_json({"topics": names, "partitions": found})
        return
    output.show(f"Topics {', '.join(names)} with {counted(found, 'partition')} each")
    if found != partitions:
        output.write_note(f"the topics existed already with {found} partitions, and stay as they are")


@command(
    app,
    "run",
    "Run a coordinator. It leads groups and sends each member the partitions to claim, until SIGTERM or Ctrl-C (exit "
    "code 0). Several coordinators share the groups and take over from each other. Each event is a line on stderr, or "
    "with --json a line of JSON on stdout.",
    "coordinator run",
    "coordinator run --strategy weighted --json",
)
def run(
    *,
    strategy: Annotated[
        Literal["sticky", "weighted", "range", "round_robin"],
        typer.Option(
            "--strategy",
            help="How partitions are assigned: `sticky` evenly with the fewest moves, `weighted` by lag (both use the "
            "members' capacities), `range` consecutive partitions, `round_robin` in turn.",
        ),
    ] = "sticky",
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    health: Health = None,
    min_session_s: Annotated[
        float,
        typer.Option(
            "--min-session",
            metavar="SECONDS",
            callback=finite,
            min=0.001,
            max=LONGEST_SESSION_MS / 1_000,
            help="Reject members with a shorter session timeout.",
        ),
    ] = 1.0,
    max_failed_pings: Annotated[
        int, typer.Option("--max-failed-pings", metavar="N", min=0, help="Pings in a row that a member may miss.")
    ] = 1,
    backoff_s: Annotated[
        float,
        typer.Option(
            "--rebalance-backoff",
            metavar="SECONDS",
            callback=finite,
            min=0,
            max=3_600,
            help="Wait before a failed rebalance is retried. After the last retry the wait is 30 times as long.",
        ),
    ] = 1.0,
    max_retries: Annotated[
        int,
        typer.Option("--max-retries", metavar="N", min=0, help="Retries of a failed rebalance before the long wait."),
    ] = 4,
    data_connection: DataConnection = None,
    options: CoordinatorCommandOptions,
) -> ExitCode:
    """Lead groups until a signal arrives, and report events. Raises `MarshalError`."""
    connection = connection_of(options)
    data = data_connection_of(data_connection, connection)
    topics = options.topics()
    rules = GroupRules(
        STRATEGIES[strategy],
        min_session_ms=round(min_session_s * 1_000),
        max_failed_pings=max_failed_pings,
        rebalance_backoff_ms=backoff_s * 1_000,
        max_rebalance_retries=max_retries,
    )
    report = partial(_report, as_json=options.as_json)
    coordinator = Coordinator(
        connection,
        topics,
        CoordinatorOptions(rules=rules),
        look=partial(_partition_counts, data),
        weigh=_lag_weights(connection, coordination_topic, data) if strategy == "weighted" else None,
        listener=partial(_report_group_event, as_json=options.as_json),
    )
    with warnings_to_stderr(_LOGGED_PARTS, each_time=True), health_server(coordinator.health, health) as server:
        address = None if server is None else server.address
        where = "" if address is None else f"; its health is at http://{address}{PATH}"
        report("started", f"the coordinator has started{where}", health=address)
        run_until_signal(coordinator.run, coordinator.stop)
        report("stopped", "the coordinator has stopped; its groups wait for another one")
    return ExitCode.OK


@command(
    app,
    "status",
    "Show the groups and their members. For each group it shows the time since its coordinator's last ping, the "
    "members, and how many partitions each is assigned. The exit code is 1 if the coordinator of a group with members "
    "has been silent for more than a minute.",
    "coordinator status",
    "coordinator status --json",
)
def status(options: CoordinatorCommandOptions) -> ExitCode:
    """Show the groups. Raises `MarshalError`."""
    views = read_groups(connection_of(options), options.topics()).values()
    now_ms = time.time() * 1_000
    if options.as_json:
        output.write_json({"groups": [_to_json(view, now_ms) for view in views]})
    elif not views:
        output.show("No coordinator has led a group yet")
    else:
        for view in views:
            output.show(*_lines(view, now_ms))
    return ExitCode.PROBLEMS if any(_is_silent(view, now_ms) for view in views) else ExitCode.OK


@command(
    app,
    "assignments",
    "Show which partitions a group's members should claim. `status` shows the members that own them. The exit code is "
    "1 if no coordinator has ever led the group.",
    "coordinator assignments shops",
)
def assignments(*, group: GroupName, options: CoordinatorCommandOptions) -> ExitCode:
    """Show the partitions of each member. Raises `MarshalError`."""
    views = read_groups(connection_of(options), options.topics())
    if (view := views.get(group)) is None:
        if options.as_json:
            output.write_json(None)
        output.write_note(_not_led(group, views))
        return ExitCode.PROBLEMS
    if options.as_json:
        output.write_json(_to_json(view, time.time() * 1_000))
    elif not view.shares:
        output.show(f"Group {group} has no members")
    else:
        rows = [row for share in _sorted(view) for row in _rows(share)]
        columns = ("member", "topic", "#count", "partitions", "last assigned", "at")
        output.show(output.Table(columns, rows, may_fold=("partitions", "last assigned")))
    return ExitCode.OK


def _not_led(group: str, led: Collection[str]) -> str:
    names = first_few(list(map(repr, nearest_first(group, led))), _MOST_NAMED) or "none"
    return (
        f"no coordinator has led group {group!r}; groups with a coordinator: {names}. Correct the name, or start "
        "`marshal-dagster coordinator run` and a member of the group"
    )


def _partition_counts(connection: KafkaConnection) -> Mapping[str, int]:
    with Topics(connection) as topics:
        return topics.partition_counts()


def _lag_weights(connection: KafkaConnection, coordination_topic: str, data: KafkaConnection) -> LagWeights:
    """Open the coordination log, and return the weights of partitions by their lag. Raises `MarshalError`."""
    require_topic_name("--coordination-topic", coordination_topic)
    with hint_how_to_create(coordination_topic):
        shared_rationalizer(connection, coordination_topic)
    return LagWeights(connection, coordination_topic, data)


def _report_group_event(group: str, event: GroupEvent, *, as_json: bool) -> None:
    if event.happening is GroupEventKind.REBALANCED:
        text = f"{counted(event.moved, 'partition')} changed hands"
    else:
        text = f"{', '.join(event.members)} {_EVENT_TEXTS[event.happening]}".strip()
    fields = {"group": group, "members": list(event.members), "moved": event.moved}
    _report(event.happening.value.replace(" ", "_"), f"group {group!r}: {text}", as_json=as_json, **fields)


def _report(event: str, text: str, *, as_json: bool, **fields: Any) -> None:  # noqa: ANN401 - JSON values
    report_event(event, f"{output.utc(time.time_ns() // 1_000_000)} {text}", as_json=as_json, **fields)


def _is_silent(view: GroupAssignments, now_ms: float) -> bool:
    return bool(view.shares) and view.silent_ms(now_ms) > _LONG_SILENT_MS


def _sorted(view: GroupAssignments) -> list[MemberAssignment]:
    return [view.shares[name] for name in sorted(view.shares)]


def _lines(view: GroupAssignments, now_ms: float) -> list[str | output.Line]:
    ping = "no ping yet" if view.pinged_at_ms is None else f"last ping {output.duration(view.silent_ms(now_ms))} ago"
    counts = [len(share.places) for share in view.shares.values()]
    total = f"{sum(counts)} partitions for {counted(len(counts), 'member')}{_spread(counts)}"
    style = "yellow" if _is_silent(view, now_ms) else ""
    width = max(map(len, view.shares), default=0)
    return [
        output.styled(f"Group {view.group}: {total}; its coordinator: {ping}", style),
        *(f"  {share.member:{width}}  {len(share.places)}{_gained(share, now_ms)}" for share in _sorted(view)),
    ]


def _gained(share: MemberAssignment, now_ms: float) -> str:
    """Return how many partitions a member got in its last change, and when."""
    if not share.gained:
        return ""
    return f", {len(share.gained)} of them assigned {output.duration(max(0.0, now_ms - share.assigned_at_ms))} ago"


def _spread(counts: Sequence[int]) -> str:
    """Return the smallest and the largest number of partitions that several members have."""
    if len(counts) < 2:  # noqa: PLR2004 - a single member has no other to compare
        return ""
    least, most = min(counts), max(counts)
    return f", {least} each" if least == most else f", {least} to {most} each"


def _rows(share: MemberAssignment) -> list[tuple[str, ...]]:
    topics, gained = by_topic(share.places), by_topic(share.gained)
    if not topics:
        return [(share.member, output.NOTHING, "0", *[output.NOTHING] * 3)]
    return [
        (
            share.member,
            topic,
            str(len(numbers)),
            runs_text(numbers),
            *_given(gained.get(topic, []), share.assigned_at_ms),
        )
        for topic, numbers in topics.items()
    ]


def _given(numbers: Sequence[int], at_ms: int) -> tuple[str, str]:
    return (runs_text(numbers), output.utc(at_ms)) if numbers else (output.NOTHING, output.NOTHING)


def _to_json(view: GroupAssignments, now_ms: float) -> dict[str, Any]:
    return {
        "group": view.group,
        "epoch": view.epoch,
        "silent_ms": None if view.pinged_at_ms is None else round(view.silent_ms(now_ms)),
        "members": [
            {
                "member": share.member,
                "generation": share.generation,
                "partitions": by_topic(share.places),
                "gained": by_topic(share.gained),
                "told_at_ms": share.assigned_at_ms,
            }
            for share in _sorted(view)
        ],
    }
