"""`lag`: show the lag of each group in each partition, in offsets and in time."""

from collections.abc import Iterator
from typing import Any, Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.admin.texts import owner_text
from marshal_dagster.cli import output, world_tables
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, OnlyGroup, OnlyTopic
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.watching import INTERVAL_S, Interval, Watch, is_watched, problem_line, watch_on_screen
from marshal_dagster.cli.world_reader import open_world_reader
from marshal_dagster.cli.world_view import (
    GroupOverview,
    KeyOverview,
    LagUnknownReason,
    LastHeartbeat,
    PartitionLag,
    ViewFilter,
    WorldView,
)
from marshal_dagster.protocol.staleness import Freshness
from marshal_dagster.protocol.state import Owner

_COLUMNS: Final = ("group", "partition", "#position", "#end", "#lag", "#lag time", "owner")
_LEAST_ROWS: Final = 3
_MOST_OWNERS: Final = 2
_UNKNOWN: Final = {
    LagUnknownReason.UNAVAILABLE: "the cluster of data topics does not answer",
    LagUnknownReason.NOT_ALLOWED: "a data topic needs the right DESCRIBE",
    LagUnknownReason.OTHER_TOPIC: "a data topic was re-created, see `marshal-dagster status`",
    LagUnknownReason.BEYOND_END: "a position is after the end of its topic, see `marshal-dagster status`",
}
"""The reasons that need an operator. A topic that does not exist may have been deleted for good."""

app = command_group("Show the lag of groups.")


@command(
    app,
    "lag",
    "Show the lag of groups. For each group, topic and partition it shows the position, the end of the "
    "partition, the number of unread offsets, how old the first of them is, and the owner. The largest lag comes "
    "first. The age is found by timestamps, without reading a record, and may be 15 % too small. The exit code is 1 if "
    "the log does not have the group, or if a lag is unknown: the cluster of a data topic does not answer, this user "
    "may not see the topic, or the position is not one of the topic.",
    "lag",
    "lag --group flights --watch",
)
def lag(
    *,
    group: OnlyGroup = None,
    topic: OnlyTopic = None,
    watch: Watch = False,
    interval: Interval = INTERVAL_S,
    options: DataLogOptions,
) -> ExitCode:
    """Read the log and the data topics' ends, and show the lag. Raises `MarshalError`."""
    with open_world_reader(options, ViewFilter(group, topic), "marshal-dagster-lag") as reader:
        view = reader.look()
        reader.require_topic(view)
        if is_watched(watch=watch, once=options.as_json):
            watch_on_screen(view, reader.look, _page, interval)
            return ExitCode.OK
    if options.as_json:
        output.write_json({"at_ms": view.at_ms, "partitions": list(_json(view))})
    else:
        output.show(*_page(view))
    if options.as_json and view.unknown_group is not None:
        output.write_note(view.unknown_group)
    unknown = {key.lag.unknown for group in view.groups for key in group.keys if key.lag is not None}
    problems = [text for why, text in _UNKNOWN.items() if why in unknown]
    if problems:
        output.write_note(f"not every lag is known: {'; '.join(problems)}")
    return ExitCode.PROBLEMS if problems or view.unknown_group is not None else ExitCode.OK


def _page(view: WorldView, problem: str | None = None, lines: int | None = None) -> Iterator[str | Line | Table]:
    """Yield a line for each group, then the partitions with the largest lag that fit into `lines`."""
    head = [*problem_line(problem), *(_summary(group, view.wanted) for group in view.groups)]
    yield from head
    if not view.groups:
        yield view.nothing
        return
    keys = sorted(((group.name, key) for group in view.groups for key in group.keys), key=_urgency)
    room = len(keys) if lines is None else max(_LEAST_ROWS, lines - len(head) - 3)
    shown = keys if len(keys) <= room else keys[: room - 1]
    if not keys:
        return
    yield ""
    yield Table(_COLUMNS, [_row(name, key, view.at_ms) for name, key in shown], may_fold={"owner"})
    if len(shown) < len(keys):
        yield f"Left out: {len(keys) - len(shown)} more with less lag; --group and --topic show fewer"


def _urgency(named: tuple[str, KeyOverview]) -> tuple[int, str, tuple[str, int]]:
    """Return the sort key of a key: the largest lag first."""
    name, key = named
    return -((key.lag or PartitionLag()).records or 0), name, key.place


def _summary(group: GroupOverview, wanted: ViewFilter) -> Line:
    if not group.keys:
        of_topic = "" if wanted.topic is None else f" of topic {wanted.topic!r}"
        return output.styled(f"Group {group.name}: no member has claimed a partition{of_topic} yet", "bold")
    lags = [key.lag for key in group.keys if key.lag is not None]
    lagging = [lag for lag in lags if lag.records]
    oldest = max((lag.age_ms for lag in lagging if lag.age_ms is not None), default=None)
    unknown = sum(lag.unknown is not None for lag in lags)
    if lags and unknown == len(lags):
        return output.styled(f"Group {group.name}: the lag of {unknown} of {unknown} partitions is not known", "bold")
    text = f"Group {group.name}: {sum(lag.records or 0 for lag in lagging)} unread"
    text += f" in {len(lagging)} of {len(lags)} partitions" if lagging else ""
    text += f", the oldest for {output.duration(oldest)}" if oldest else ""
    return output.styled(text + (f"; the lag of {unknown} is not known" if unknown else ""), "bold")


def _row(group: str, key: KeyOverview, at_ms: int | None) -> list[str | Line]:
    cells, *_ = world_tables.key_rows(key, at_ms)
    row: dict[str, str | Line] = {
        **cells,
        "group": group,
        "#position": cells["#offset"],
        "owner": _owner_text(key),
        "#end": output.number((key.lag or PartitionLag()).end),
    }
    return [row.get(column, output.NOTHING) for column in _COLUMNS]


def _owner_text(key: KeyOverview) -> str:
    """Return the owners of the partition and of its ranges, each with its last heartbeat if that is not fresh."""
    held = [(key.key.owner, key.last_heartbeat)]
    held += [(part.range.owner, part.last_heartbeat) for part in key.ranges]
    owners = [_with_freshness(owner, heartbeat) for owner, heartbeat in held if owner is not None]
    return first_few(list(dict.fromkeys(owners)), _MOST_OWNERS, "; ") or output.NOTHING


def _with_freshness(owner: Owner, heartbeat: LastHeartbeat | None) -> str:
    freshness = None if heartbeat is None else heartbeat.freshness
    return owner_text(owner) + ("" if freshness in {None, Freshness.FRESH} else f", {freshness}")


def _json(view: WorldView) -> Iterator[dict[str, Any]]:
    for group in view.groups:
        for key in group.keys:
            owner, lag = key.key.owner, key.lag or PartitionLag()
            yield {
                "group": group.name,
                "topic": key.place[0],
                "partition": key.place[1],
                "position": key.key.offset,
                "end": lag.end,
                "lag": lag.records,
                "lag_ms": lag.age_ms,
                "lag_unknown": lag.unknown,
                "owner_instance": owner and owner.instance,
                "owner_client": owner and owner.client,
            }
