"""Show the world state as tables, for `status`, `top` and `replay`."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.texts import owner_text, settings_text
from marshal_dagster.cli import output
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.world_view import (
    NO_SETTINGS,
    Assignee,
    GroupOverview,
    KeyOverview,
    LastHeartbeat,
    PartitionLag,
    WorldView,
)
from marshal_dagster.coordination.pause_text import paused_text, resume_command
from marshal_dagster.protocol.staleness import Freshness
from marshal_dagster.protocol.state import Owner, Phase

ASSIGNED: Final = "assigned to"
"""The column that is shown only if a coordinator leads a group."""
COLUMNS: Final = ("partition", ASSIGNED, "owner", "heartbeat", "#offset", "#plan end", "#lag", "#lag time")
"""The columns of a group's keys. `lag time` is the age of the first unread record."""
WIDE_COLUMNS: Final = (*COLUMNS, "#epoch", "#generation", "instance")
_LAG_COLUMNS: Final = frozenset({"#lag", "#lag time"})
_MAY_FOLD: Final = frozenset({"partition", ASSIGNED, "owner"})
_STYLES: Final[Mapping[Freshness, str]] = {
    Freshness.FRESH: "green",
    Freshness.UNKNOWN: "yellow",
    Freshness.STALE: "bold red",
}
_WARNING: Final = "yellow"
_NEW_FOR_MS: Final = 600_000

Row = Mapping[str, str | Line]
"""The cells of a row by column."""


def overview(view: WorldView, columns: Sequence[str] = COLUMNS) -> Iterator[str | Line | Table]:
    """Yield a few lines about the log, then each group with these columns of its keys."""
    yield from _log(view)
    if not view.groups:
        yield view.nothing
    for group in view.groups:
        yield from _group(group, view.at_ms, columns)


def key_rows(key: KeyOverview, at_ms: int | None) -> Iterator[Row]:
    """Yield the row of a key, then the rows of its ranges. Their start is shown as offset, their end as plan end."""
    name, assigned = f"{key.place[0]}/{key.place[1]}", _assignee_text(key.assigned, at_ms)
    state = key.key
    yield {
        "partition": name + (" (provisional)" if state.provisional else ""),
        ASSIGNED: assigned,
        **_owner_cells(state.owner, key.last_heartbeat),
        "#offset": output.number(state.offset),
        "#plan end": _plan_text(state.plan_end, state.plan_attempts),
        "#lag": _lag_text(key.lag or PartitionLag()),
        "#lag time": lag_time_text(key.lag or PartitionLag()),
        "#generation": str(state.generation),
    }
    for part in key.ranges:
        range_ = part.range
        yield {
            "partition": f"{name} [{range_.start}, {range_.end}) {range_.phase}",
            ASSIGNED: assigned,
            **_owner_cells(range_.owner, part.last_heartbeat),
            "#offset": str(range_.start),
            "#plan end": _plan_text(range_.end if range_.phase is Phase.PLANNED else None, range_.attempts),
        }


def key_table(rows: Collection[Row], columns: Sequence[str]) -> Table:
    """Return a table of these columns. A cell that a row does not have is shown as `-`."""
    if all(row[ASSIGNED] == output.NOTHING for row in rows):
        columns = [column for column in columns if column != ASSIGNED]
    cells = [[row.get(column, output.NOTHING) for column in columns] for row in rows]
    return Table(columns, cells, may_fold=_MAY_FOLD)


def _log(view: WorldView) -> Iterator[str | Line | Table]:
    if view.log_time_ms is not None:
        yield f"Log time {output.utc(view.log_time_ms)}{_distance(view.log_time_ms, view.at_ms)}"
    for what, counts in (("invalid", view.invalid), ("refused", view.refused)):
        if counts:
            reasons = "; ".join(f"{count} {reason}" for reason, count in counts.items())
            yield f"Records {what}: {reasons}"
    if view.observed:
        yield output.styled(
            f"Only observed: coordination partitions {runs_text(view.observed)}. They do not begin at offset 0: their "
            "keys are provisional, and nothing can be claimed from them.",
            _WARNING,
        )


def _distance(log_time_ms: int, at_ms: int | None) -> str:
    if at_ms is None:
        return ""
    return f" ({output.duration(at_ms - log_time_ms)} {'ago' if log_time_ms <= at_ms else 'ahead of this clock'})"


def _group(group: GroupOverview, at_ms: int | None, columns: Sequence[str]) -> Iterator[str | Line | Table]:
    yield ""
    yield output.styled(f"Group {group.name}", "bold")
    by_default = "" if group.settings_accepted else f" ({NO_SETTINGS})"
    yield f"  {settings_text(group.settings)}{by_default}"
    if group.paused_until_s is not None and (group.is_paused or at_ms is None):
        advice = "" if at_ms is None else f"; `{resume_command(group.name)}` ends it now"
        text = f"  {paused_text(utc_to_second(group.paused_until_s), group.pause_origin)}{advice}"
        yield output.styled(text, _WARNING if group.is_paused else "")
    for difference in group.differences:
        yield output.styled(f"  half written: {difference}", _WARNING)
    if group.keys:
        has_lag = any(key.lag is not None for key in group.keys)
        shown = [column for column in columns if has_lag or column not in _LAG_COLUMNS]
        yield key_table([row for key in group.keys for row in key_rows(key, at_ms)], shown)


def _owner_cells(owner: Owner | None, last_heartbeat: LastHeartbeat | None) -> Row:
    if owner is None or last_heartbeat is None:
        return {}
    heartbeat: str | Line = output.utc(last_heartbeat.last_beat_ms)
    if last_heartbeat.freshness is not None and last_heartbeat.silent_ms is not None:
        text = f"{last_heartbeat.freshness}, {output.duration(last_heartbeat.silent_ms)}"
        heartbeat = output.styled(text, _STYLES[last_heartbeat.freshness])
    return {
        "owner": owner_text(owner),
        "instance": owner.instance,
        "heartbeat": heartbeat,
        "#epoch": output.number(owner.epoch),
    }


def _assignee_text(assignee: Assignee | None, at_ms: int | None) -> str:
    """Return the member that a partition is assigned to, and for 10 minutes also since when."""
    if assignee is None:
        return output.NOTHING
    for_ms = math.inf if at_ms is None or assignee.since_ms is None else at_ms - assignee.since_ms
    return assignee.member if for_ms > _NEW_FOR_MS else f"{assignee.member}, for {output.duration(max(0, for_ms))}"


def _plan_text(end: int | None, attempts: int) -> str:
    if end is None:
        return output.NOTHING
    return f"{end}, try {attempts + 1}" if attempts else str(end)


def lag_time_text(lag: PartitionLag) -> str:
    """Return the lag in time: how old the first unread record is."""
    return output.NOTHING if lag.age_ms is None or not lag.records else output.duration(lag.age_ms)


def _lag_text(lag: PartitionLag) -> str | Line:
    return output.number(lag.records) if lag.unknown is None else output.styled(lag.unknown, _WARNING)
