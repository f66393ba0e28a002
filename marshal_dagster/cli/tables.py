"""The world state as tables for a person."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from marshal_dagster.cli import output
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.world_view import (
    NO_SETTINGS,
    Assignee,
    GroupOverview,
    KeyOverview,
    LastHeartbeat,
    PartitionLag,
    RangeOverview,
    WorldView,
    listed,
    settings_text,
)
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.protocol.state import DataPartitionId, Freshness, Owner, Phase

_STYLES: Final[Mapping[Freshness, str]] = {
    Freshness.FRESH: "green",
    Freshness.UNKNOWN: "yellow",
    Freshness.STALE: "bold red",
}
_WARNING: Final = "yellow"
_NEW_FOR_MS: Final = 600_000


def overview(looked: WorldView) -> Iterator[str | Line | Table]:
    """Show the log in a few lines, then each group with its keys."""
    yield from _log(looked)
    if not looked.groups:
        yield looked.nothing
    for group in looked.groups:
        yield from _group(group, looked)


def _log(looked: WorldView) -> Iterator[str | Line | Table]:
    log_time_ms = looked.log_time_ms
    if log_time_ms is not None:
        yield f"Log time {output.utc(log_time_ms)}{_distance(log_time_ms, looked.at_ms)}"
    for what, counts in (("invalid", looked.invalid), ("refused", looked.refused)):
        reasons = "; ".join(f"{count} {reason}" for reason, count in counts.items())
        yield f"{sum(counts.values())} {what}" + (f": {reasons}" if reasons else "")
    if looked.observed:
        yield output.styled(
            f"Only observed: coordination partitions {listed(looked.observed)}. They do not begin at offset 0: their "
            "keys are provisional, and nothing can be claimed from them.",
            _WARNING,
        )


def _distance(log_time_ms: int, at_ms: int | None) -> str:
    if at_ms is None:
        return ""
    return f" ({output.duration(at_ms - log_time_ms)} {'ago' if log_time_ms <= at_ms else 'ahead of this clock'})"


def _group(group: GroupOverview, looked: WorldView) -> Iterator[str | Line | Table]:
    yield ""
    yield output.styled(f"Group {group.name}", "bold")
    unwritten = "" if group.settings_accepted else f" ({NO_SETTINGS})"
    yield f"  {settings_text(group.settings)}{unwritten}"
    if group.paused_until_s is not None:
        tense = "" if looked.at_ms is None else " (paused now)" if group.is_paused else " (over)"
        line = f"  {paused_text(output.utc(group.paused_until_s * 1_000), group.paused_by)}{tense}"
        yield output.styled(line, _WARNING if group.is_paused else "")
    for difference in group.differences:
        yield output.styled(f"  half written: {difference}", _WARNING)
    if group.keys:
        yield _keys(group.keys, looked.at_ms)


def _keys(keys: tuple[KeyOverview, ...], at_ms: int | None) -> Table:
    with_lag = any(each.lag is not None for each in keys)
    with_assigned = any(each.assigned is not None for each in keys)
    columns = [
        "partition",
        *(["assigned to"] if with_assigned else []),
        "owner",
        "last beat" if at_ms is None else "heard of",
        "#offset",
        "#plan end",
    ]
    columns += ["#lag"] if with_lag else []
    columns += ["#epoch", "#generation"]
    rows = [
        row
        for key in keys
        for row in (_row(key, with_lag=with_lag), *(_range_row(range_, key.place, with_lag) for range_ in key.ranges))
    ]
    if with_assigned:
        members = [assignee_text(each.assigned, at_ms) for each in keys for _ in range(1 + len(each.ranges))]
        rows = [[row[0], member, *row[1:]] for row, member in zip(rows, members, strict=True)]
    return Table(columns, rows, may_fold={"partition", "owner", "assigned to"})


def _row(each: KeyOverview, *, with_lag: bool) -> list[str | Line]:
    key, owner = each.key, each.key.owner
    return [
        f"{each.place[0]}/{each.place[1]}" + (" (provisional)" if key.provisional else ""),
        owner_text(owner),
        last_heartbeat_text(each.last_heartbeat),
        output.number(key.offset),
        plan_text(key.plan_end, key.plan_attempts),
        *([lag_text(each.lag or PartitionLag())] if with_lag else []),
        output.number(None if owner is None else owner.epoch),
        str(key.generation),
    ]


def _range_row(each: RangeOverview, place: DataPartitionId, with_lag: bool) -> list[str | Line]:
    """Show a range below its key: where it begins stands for the offset, where it ends for the end of its plan."""
    one, owner = each.range, each.range.owner
    return [
        f"{place[0]}/{place[1]} [{one.start}, {one.end}) {one.phase}",
        owner_text(owner),
        last_heartbeat_text(each.last_heartbeat),
        str(one.start),
        plan_text(one.end if one.phase is Phase.PLANNED else None, one.attempts),
        *([output.NOTHING] if with_lag else []),
        output.number(None if owner is None else owner.epoch),
        output.NOTHING,
    ]


def owner_text(owner: Owner | None) -> str:
    """Name an owner."""
    return output.NOTHING if owner is None else f"{owner.instance} ({owner.client})"


def assignee_text(assignee: Assignee | None, at_ms: int | None) -> str:
    """Name the member that is to claim a partition, and since when, for a while after it was given it."""
    if assignee is None:
        return output.NOTHING
    for_ms = math.inf if at_ms is None or assignee.since_ms is None else at_ms - assignee.since_ms
    return assignee.member if for_ms > _NEW_FOR_MS else f"{assignee.member}, for {output.duration(max(0, for_ms))}"


def last_heartbeat_text(last_heartbeat: LastHeartbeat | None) -> str | Line:
    """Say when an owner was heard of, and how that looks."""
    if last_heartbeat is None:
        return output.NOTHING
    if last_heartbeat.freshness is None or last_heartbeat.silent_ms is None:
        return output.utc(last_heartbeat.last_beat_ms)
    return output.styled(
        f"{last_heartbeat.freshness}, {output.duration(last_heartbeat.silent_ms)}", _STYLES[last_heartbeat.freshness]
    )


def plan_text(end: int | None, attempts: int) -> str:
    """Write where a plan ends, and how often it was tried."""
    return output.NOTHING if end is None else f"{end} ({attempts} attempt{'' if attempts == 1 else 's'})"


def lag_text(lag: PartitionLag) -> str | Line:
    """Write a lag, or why it is not known."""
    return output.number(lag.records) if lag.unknown is None else output.styled(lag.unknown, _WARNING)
