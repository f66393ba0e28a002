"""`top`: watch the owners, lag and progress of partitions. It only reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.cli import output, world_tables
from marshal_dagster.cli.attention import exhausted_json, urgent_lines
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, MaxAttempts, OnlyGroup, OnlyTopic
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.position_rates import PositionRates
from marshal_dagster.cli.watching import INTERVAL_S, Interval, problem_line, watch_on_screen
from marshal_dagster.cli.world_reader import WorldReader, open_world_reader
from marshal_dagster.cli.world_view import (
    GroupOverview,
    KeyOverview,
    PartitionLag,
    ViewFilter,
    WorldView,
    to_json,
)
from marshal_dagster.coordination.pause_text import paused_text
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS
from marshal_dagster.protocol.staleness import Freshness
from marshal_dagster.protocol.state import Owner

_GROUPS: Final = ("group", "#owners", "#partitions", "#held", "#stale", "#lag", "#lag time", "#/s", "paused")
_KEYS: Final = (
    "group",
    "partition",
    world_tables.ASSIGNED,
    "owner",
    "heartbeat",
    "#offset",
    "#lag",
    "#lag time",
    "#/s",
)
_LEAST_ROWS: Final = 3
_MS: Final = 1_000

app = command_group("Watch the owners, lag and progress of partitions.")


@command(
    app,
    "top",
    "Watch the owners, lag and progress of partitions. It also shows the last heartbeat of each owner, how fast "
    "positions move, and paused groups. If a coordinator leads a group, the member that each partition is assigned to "
    "is shown too. It only reads. `q` or Ctrl-C ends it. With --once or --json, or if stdout is not a terminal, it "
    "reads the state twice, an interval apart, shows the second state, and ends. The exit code is then 1 if the log "
    "does not have the group.",
    "top --group flights",
    "top --json --interval 10",
)
def top(
    *,
    group: OnlyGroup = None,
    topic: OnlyTopic = None,
    interval: Interval = INTERVAL_S,
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and exit.")] = False,
    max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS,
    options: DataLogOptions,
) -> ExitCode:
    """Show the state until the user ends it, or once. Raises `MarshalError`."""
    with open_world_reader(options, ViewFilter(group, topic), "marshal-dagster-top") as reader:
        watched = TopReader(reader)
        if once or options.as_json or not output.is_terminal():
            # How fast positions move is known only after a second reading.
            reader.require_topic(watched.look())
            output.wait(interval)
            view = watched.look()
            if options.as_json:
                output.write_json(_to_json(view, watched.rates, max_attempts))
            else:
                output.show(*page(view, watched.rates, max_attempts=max_attempts))
            if options.as_json and view.unknown_group is not None:
                output.write_note(view.unknown_group)
            return ExitCode.OK if view.unknown_group is None else ExitCode.PROBLEMS
        title = f"{options.coordination_topic}, every {interval:g} s, q ends"
        first = watched.look()  # an error is reported before the screen is taken
        reader.require_topic(first)
        watch_on_screen(
            first,
            watched.look,
            lambda view, problem, lines: page(view, watched.rates, title, problem, lines, max_attempts=max_attempts),
            interval,
        )
        return ExitCode.OK


@dataclass(frozen=True, slots=True)
class TopReader:
    """Reads the world state repeatedly, and measures how fast positions move."""

    reader: WorldReader
    rates: PositionRates = field(default_factory=PositionRates)

    def look(self) -> WorldView:
        """Read to the log's present end. Raises `MarshalError`."""
        view = self.reader.look()
        self.rates.note(view, self.reader.clock.lease_ms() / _MS)
        return view


def page(
    view: WorldView,
    rates: PositionRates,
    title: str = "",
    problem: str | None = None,
    lines: int | None = None,
    *,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
) -> Iterator[str | Line | Table]:
    """Yield the groups, then as many keys as fit into `lines`. If not all fit, the most urgent are shown."""
    head = [output.styled(output.utc(view.at_ms) + (f"  {title}" if title else ""), "bold")]
    head += problem_line(problem)
    head += urgent_lines(view, max_attempts) if view.groups or view.observed else []
    head += [pause for group in view.groups for pause in _pause_lines(group)]
    if view.observed:
        head.append(output.styled(f"only observed: coordination partitions {runs_text(view.observed)}", "yellow"))
    yield from head
    if not view.groups:
        yield view.nothing
        return
    yield Table(_GROUPS, [_group_row(group, rates) for group in view.groups], may_fold=())
    yield ""
    keys = [(group.name, key) for group in view.groups for key in group.keys]
    room = len(keys) if lines is None else max(_LEAST_ROWS, lines - len(head) - len(view.groups) - 4)
    shown = keys if len(keys) <= room else sorted(keys, key=lambda key: _urgency(key[1]))[: room - 1]
    columns = _KEYS if len(view.groups) > 1 else [column for column in _KEYS if column != "group"]
    yield world_tables.key_table([row for group, key in shown for row in _key_rows(group, key, view, rates)], columns)
    if len(shown) < len(keys):
        yield f"Left out: {len(keys) - len(shown)} more with less lag; --group and --topic show fewer"


def _pause_lines(group: GroupOverview) -> Iterator[Line]:
    if group.is_paused and group.paused_until_s is not None:
        text = paused_text(utc_to_second(group.paused_until_s), group.pause_origin)
        yield output.styled(f"group {group.name} is {text}", "yellow")


def _urgency(key: KeyOverview) -> tuple[bool, int]:
    """Return the sort key of a key: stale ones first, then by lag, the largest first."""
    lag = key.lag.records if key.lag is not None else None
    return not _is_stale(key), -(lag or 0)


def _is_stale(key: KeyOverview) -> bool:
    heartbeats = [key.last_heartbeat, *(range_.last_heartbeat for range_ in key.ranges)]
    return any(heartbeat is not None and heartbeat.freshness is Freshness.STALE for heartbeat in heartbeats)


def _owners(key: KeyOverview) -> list[Owner]:
    held = [key.key.owner, *(range_.range.owner for range_ in key.ranges)]
    return [owner for owner in held if owner is not None]


def _group_row(group: GroupOverview, rates: PositionRates) -> list[str | Line]:
    lags = [key.lag.records for key in group.keys if key.lag is not None and key.lag.records is not None]
    ages = [key.lag.age_ms for key in group.keys if key.lag is not None and key.lag.age_ms is not None]
    moved = [rates.per_second(group.name, key.place) for key in group.keys]
    known = [per_second for per_second in moved if per_second is not None]
    stale = sum(map(_is_stale, group.keys))
    paused: str | Line = output.styled("yes", "yellow") if group.is_paused else output.NOTHING
    return [
        group.name,
        str(len({owner.instance for key in group.keys for owner in _owners(key)})),
        str(len(group.keys)),
        str(sum(bool(_owners(key)) for key in group.keys)),
        output.styled(str(stale), "bold red") if stale else "0",
        output.number(sum(lags) if lags else None),
        world_tables.lag_time_text(PartitionLag(records=max(ages, default=0), age_ms=max(ages, default=None))),
        _rate_text(sum(known) if known else None),
        paused,
    ]


def _key_rows(group: str, key: KeyOverview, view: WorldView, rates: PositionRates) -> Iterator[world_tables.Row]:
    first, *ranges = world_tables.key_rows(key, view.at_ms)
    yield {"group": group, **first, "#/s": _rate_text(rates.per_second(group, key.place))}
    yield from ({"group": group, **row} for row in ranges)


def _rate_text(per_second: float | None) -> str:
    return output.NOTHING if per_second is None else f"{per_second:.1f}"


def _to_json(view: WorldView, rates: PositionRates, max_attempts: int) -> dict[str, Any]:
    """Return the groups as `status --json` does, with the owners' silence and the speed of positions."""
    shown = {"exhausted_plans": exhausted_json(view, max_attempts)} | to_json(view)
    for group in view.groups:
        for row, key in zip(shown["groups"][group.name]["partitions"], group.keys, strict=True):
            row["silent_ms"] = None if key.last_heartbeat is None else key.last_heartbeat.silent_ms
            row["per_second"] = rates.per_second(group.name, key.place)
    return shown
