"""`coordinator init|run|status|assignments`: groups led, and looked at."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from marshal_dagster._internal.health_server import PATH
from marshal_dagster.cli import output
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of, hint_how_to_create
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import DEFAULT_COORDINATION_TOPIC, ConnectionOptions
from marshal_dagster.cli.service import health_server, run_until_signal
from marshal_dagster.cli.world_view import listed
from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer
from marshal_dagster.coordinator.assignment import STRATEGIES
from marshal_dagster.coordinator.group import GroupEvent, GroupEventKind, GroupRules
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment, read_group, read_groups
from marshal_dagster.coordinator.lag_weights import LagWeights, Weigh
from marshal_dagster.coordinator.messages import by_topic
from marshal_dagster.coordinator.service import Coordinator, CoordinatorOptions
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection

_WARNS: Final = ("coordinator.service", "coordinator.wire", "election")
_BY_WEIGHT: Final = "weighted"
_LONG_SILENT_MS: Final = 60_000.0
_TOLD: Final = {
    GroupEventKind.JOINED: "joined",
    GroupEventKind.LEFT: "left",
    GroupEventKind.FAILED: "no longer answers",
    GroupEventKind.REBALANCE_RETRIED: "did not answer in a rebalance, which is tried again",
    GroupEventKind.REBALANCE_GIVEN_UP: "did not answer in a rebalance again and again; it is tried again later",
    GroupEventKind.SUPERSEDED: "a later coordinator leads it",
}


@dataclass(frozen=True, slots=True)
class CoordinatorTopicOptions:
    """Where a coordinator's topics are, as the command line says it."""

    topic: str
    options: ConnectionOptions
    data: Path | None = None

    def topics(self) -> CoordinatorTopics:
        """Name the topics. Raises `ConfigurationError`."""
        check_topic("--coordinator-topic", self.topic)
        return CoordinatorTopics(self.topic)

    def connection(self) -> KafkaConnection:
        """Say how to get there. Raises `ConfigurationError`."""
        return connection_of(self.options)


@dataclass(frozen=True, slots=True)
class CoordinatorRunOptions:
    """How a coordinator leads, as the command line says it."""

    strategy: str = "sticky"
    coordination_topic: str = DEFAULT_COORDINATION_TOPIC
    min_session_s: float = 1.0
    max_failed_pings: int = 1
    backoff_s: float = 1.0
    max_retries: int = 4

    def options(self) -> CoordinatorOptions:
        """Give it as the library has it."""
        rules = GroupRules(
            STRATEGIES[self.strategy],
            min_session_ms=round(self.min_session_s * 1_000),
            max_failed_pings=self.max_failed_pings,
            rebalance_backoff_ms=self.backoff_s * 1_000,
            max_rebalance_retries=self.max_retries,
        )
        return CoordinatorOptions(rules=rules)

    def weigh(self, connection: KafkaConnection, data: KafkaConnection) -> Weigh | None:
        """Give what weighs partitions, where the strategy goes by that. Raises `MarshalError`."""
        if self.strategy != _BY_WEIGHT:
            return None
        check_topic("--coordination-topic", self.coordination_topic)
        with hint_how_to_create(self.coordination_topic):
            shared_rationalizer(connection, self.coordination_topic)
        return LagWeights(connection, self.coordination_topic, data)


def init(place: CoordinatorTopicOptions, partitions: int, *, as_json: bool) -> None:
    """Make the topics that are missing. Raises `MarshalError`."""
    topics, connection = place.topics(), place.connection()
    topics.create(connection, partitions)
    there = topics.partitions(connection)
    names = [topics.messages, topics.orders, topics.leader]
    if as_json:
        output.write_json({"topics": names, "partitions": there})
        return
    output.show(f"Topics {', '.join(names)} with {there} partition{'' if there == 1 else 's'} each")
    if there != partitions:
        output.write_note(f"they were there already, with {there} partitions, and stay as they are")


def run(
    place: CoordinatorTopicOptions, manner: CoordinatorRunOptions, health: str | None, *, as_json: bool
) -> ExitCode:
    """Lead groups until a signal comes, and tell what happens. Raises `MarshalError`."""
    connection = place.connection()
    data = data_connection_of(place.data, connection)
    teller = _EventReporter(as_json=as_json)
    coordinator = Coordinator(
        connection,
        place.topics(),
        manner.options(),
        look=partial(_partition_counts, data),
        weigh=manner.weigh(connection, data),
        listener=teller.happened,
    )
    with warnings_to_stderr(_WARNS, each_time=True), health_server(coordinator.health, health) as server:
        address = None if server is None else server.address
        answers = "" if address is None else f"; http://{address}{PATH} says how it is"
        teller.tell("started", f"the coordinator has started{answers}", health=address)
        run_until_signal(coordinator.run, coordinator.stop)
        teller.tell("stopped", "the coordinator has stopped; another one takes its groups over")
    return ExitCode.OK


def status(place: CoordinatorTopicOptions, *, as_json: bool) -> ExitCode:
    """Show the groups. Raises `MarshalError`."""
    views = read_groups(place.connection(), place.topics())
    now_ms = time.time() * 1_000
    if as_json:
        output.write_json({"groups": [_to_json(view, now_ms) for view in views.values()]})
    elif not views:
        output.show("No coordinator has led a group yet")
    else:
        for view in views.values():
            output.show(*_lines(view, now_ms))
    return ExitCode.PROBLEMS if any(_is_silent(view, now_ms) for view in views.values()) else ExitCode.OK


def assignments(place: CoordinatorTopicOptions, group: str, *, as_json: bool) -> ExitCode:
    """Show who is to claim what. Raises `MarshalError`."""
    view = read_group(place.connection(), place.topics(), group)
    is_known = bool(view.shares) or view.pinged_at_ms is not None
    if as_json:
        output.write_json(_to_json(view, time.time() * 1_000) if is_known else None)
    elif not is_known:
        output.write_note(f"no coordinator has led group {group!r}")
    elif not view.shares:
        output.show(f"Group {group} has no members")
    else:
        rows = [row for share in _sorted(view) for row in _rows(share)]
        columns = ("member", "topic", "#count", "partitions", "of these given last", "at")
        output.show(output.Table(columns, rows, may_fold=("partitions", "of these given last")))
    return ExitCode.OK if is_known else ExitCode.PROBLEMS


def _partition_counts(connection: KafkaConnection) -> Mapping[str, int]:
    with Topics(connection) as topics:
        return topics.partition_counts()


class _EventReporter:
    """Tells what becomes of groups: people on stderr, programs in lines of JSON on stdout."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def happened(self, group: str, event: GroupEvent) -> None:
        """Tell of something that happened in a group."""
        who = ", ".join(event.members)
        if event.happening is GroupEventKind.REBALANCED:
            text = f"{event.moved} partition{'' if event.moved == 1 else 's'} changed hands"
        else:
            text = f"{who} {_TOLD[event.happening]}".strip()
        fields = {"group": group, "members": list(event.members), "moved": event.moved}
        self.tell(event.happening.value.replace(" ", "_"), f"group {group!r}: {text}", **fields)

    def tell(self, event: str, text: str, **more: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Tell one thing."""
        now_ms = time.time_ns() // 1_000_000
        if not self._as_json:
            output.write_note(f"{output.utc(now_ms)} {text}")
            return
        output.write_json({"event": event, "time_ms": now_ms, **more})
        output.flush()


def _is_silent(view: GroupAssignments, now_ms: float) -> bool:
    return bool(view.shares) and view.silent_ms(now_ms) > _LONG_SILENT_MS


def _sorted(view: GroupAssignments) -> list[MemberAssignment]:
    return [view.shares[name] for name in sorted(view.shares)]


def _lines(view: GroupAssignments, now_ms: float) -> list[str | output.Line]:
    heard = "never heard" if view.pinged_at_ms is None else f"heard {output.duration(view.silent_ms(now_ms))} ago"
    counts = [len(share.places) for share in view.shares.values()]
    total = f"{sum(counts)} partitions for {len(counts)} member{'' if len(counts) == 1 else 's'}{_spread(counts)}"
    style = "yellow" if _is_silent(view, now_ms) else ""
    lines: list[str | output.Line] = [output.styled(f"Group {view.group}: {total}; its coordinator was {heard}", style)]
    width = max((len(share.member) for share in view.shares.values()), default=0)
    lines += [f"  {share.member:{width}}  {len(share.places)}{_gained(share, now_ms)}" for share in _sorted(view)]
    return lines


def _gained(share: MemberAssignment, now_ms: float) -> str:
    """Say how many partitions a member was given last, and when."""
    if not share.gained:
        return ""
    return f", {len(share.gained)} of them given {output.duration(max(0.0, now_ms - share.assigned_at_ms))} ago"


def _spread(counts: Sequence[int]) -> str:
    """Say how many each of several has."""
    if len(counts) < 2:  # noqa: PLR2004 - of one there is nothing to compare
        return ""
    least, most = min(counts), max(counts)
    return f", {least} each" if least == most else f", {least} to {most} each"


def _rows(share: MemberAssignment) -> list[tuple[str, ...]]:
    topics, gained = by_topic(share.places), by_topic(share.gained)
    if not topics:
        return [(share.member, output.NOTHING, "0", *[output.NOTHING] * 3)]
    return [
        (share.member, topic, str(len(numbers)), listed(numbers), *_given(gained.get(topic, []), share.assigned_at_ms))
        for topic, numbers in topics.items()
    ]


def _given(numbers: Sequence[int], at_ms: int) -> tuple[str, str]:
    return (listed(numbers), output.utc(at_ms)) if numbers else (output.NOTHING, output.NOTHING)


def _to_json(view: GroupAssignments, now_ms: float) -> dict[str, Any]:
    silent_ms = None if view.pinged_at_ms is None else round(view.silent_ms(now_ms))
    members = [
        {
            "member": share.member,
            "generation": share.generation,
            "partitions": by_topic(share.places),
            "gained": by_topic(share.gained),
            "told_at_ms": share.assigned_at_ms,
        }
        for share in _sorted(view)
    ]
    return {"group": view.group, "epoch": view.epoch, "silent_ms": silent_ms, "members": members}
