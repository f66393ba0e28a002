"""`top`: who works on what, shown again and again. It only reads."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marshal_dagster.cli import output
from marshal_dagster.cli import world_view as survey
from marshal_dagster.cli.assignments import AssignmentCache
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of, open_reader
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.rates import PositionRates
from marshal_dagster.cli.status import read_data_topics
from marshal_dagster.cli.tables import assignee_text, lag_text, last_heartbeat_text, owner_text, plan_text
from marshal_dagster.cli.world_view import GroupOverview, KeyOverview, PartitionLag, RangeOverview, WorldView
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.protocol.state import Freshness, Owner, Phase
from marshal_dagster.protocol.world import World

_GROUPS: Final = ("group", "#owners", "#partitions", "#held", "#stale", "#lag", "#per second", "paused")
_KEYS: Final = ("group", "partition", "owner", "heard of", "#offset", "#plan end", "#lag", "#per second")
_LEAST_ROWS: Final = 3
_MS: Final = 1_000

Part = str | Line | Table


@dataclass(frozen=True, slots=True)
class TopRequest:
    """What is watched, and how often (seconds)."""

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None = None
    group: str | None = None
    topic: str | None = None
    interval_s: float = 2.0
    once: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class TopView:
    """What one look saw, with how fast positions moved up to it."""

    world: World
    survey: WorldView
    rates: PositionRates


@dataclass(slots=True)
class TopReader:
    """Looks at the coordination log and the data topics, each time at what is new."""

    rationalizer: Rationalizer
    topics: Topics
    wanted: survey.ViewFilter
    clock: Clock
    rates: PositionRates
    assignments: AssignmentCache

    def look(self) -> TopView:
        """Read to the present end. Raises `MarshalError`."""
        world = self.rationalizer.catch_up()
        at_s = self.clock.lease_ms() / _MS
        data = read_data_topics(self.topics, survey.data_places(world, self.wanted))
        looked = survey.world_view(world, at_ms=self.clock.wall_ms(), data=data, wanted=self.wanted)
        looked = survey.with_assignments(looked, self.assignments.of([group.name for group in looked.groups]))
        self.rates.note(looked, at_s)
        return TopView(world, looked, self.rates)


def run(request: TopRequest) -> None:
    """Watch until told to stop, or show it once. Raises `MarshalError`."""
    connection = connection_of(request.connection)
    data_connection = data_connection_of(request.data_connection, connection)
    if request.topic is not None:
        check_topic("--topic", request.topic)
    followed = None if request.topic is None else [request.topic]
    with (
        closing(open_reader(connection, request.coordination_topic, followed)) as rationalizer,
        Topics(data_connection, client_id="marshal-dagster-top") as topics,
    ):
        wanted = survey.ViewFilter(request.group, request.topic)
        assignments = AssignmentCache(connection)
        looker = TopReader(rationalizer, topics, wanted, SystemClock(), PositionRates(), assignments)
        if request.once or request.as_json or not output.is_terminal():
            show_once(looker.look, request)
        else:
            _watch_on_terminal(looker.look, request)


def show_once(look: Callable[[], TopView], request: TopRequest) -> None:
    """Look twice, so that it is seen how fast positions move, and show that. Raises `MarshalError`."""
    look()
    output.wait(request.interval_s)
    looked = look()
    if request.as_json:
        output.write_json(_to_json(looked))
    else:
        output.show(*page(looked))


def watch(look: Callable[[], TopView], show: Callable[[TopView, str | None], None], wait: Callable[[], bool]) -> None:
    """Look and show until `wait` says that it is enough; what is out of reach is told beside what was seen last.

    Raises `MarshalError` if the first look fails, or for what does not pass by itself.
    """
    looked, problem = look(), None
    while True:
        show(looked, problem)
        if wait():
            return
        try:
            looked, problem = look(), None
        except UnavailableError as error:
            problem = str(error)


def _watch_on_terminal(look: Callable[[], TopView], request: TopRequest) -> None:
    first = look()  # an error of this one is told as any other command's
    looks = iter([first])
    title = f"{request.coordination_topic}, every {request.interval_s:g} s, q ends"
    with _keyboard() as is_ended, output.screen() as fill:
        watch(
            lambda: next(looks, None) or look(),
            lambda looked, problem: fill(lambda lines: page(looked, title, problem, lines)),
            lambda: is_ended(request.interval_s),
        )


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Give what waits for some seconds, and tells whether `q` was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield lambda seconds: _is_ended(keys, seconds)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_ended(keys: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([keys], [], [], left_s)[0] and os.read(keys, 1) in {b"q", b"Q", b""}:
            return True
    return False


def page(looked: TopView, title: str = "", problem: str | None = None, lines: int | None = None) -> Iterator[Part]:
    """Show a look: the groups, then the keys, of which so many that it fits into `lines`."""
    seen = looked.survey
    head = [output.styled(f"{output.utc(seen.at_ms)}" + (f"  {title}" if title else ""), "bold")]
    if problem is not None:
        head.append(output.styled(f"out of reach, shown is what was seen at that time: {problem}", "bold red"))
    if seen.observed:
        head.append(output.styled(f"only observed: coordination partitions {survey.listed(seen.observed)}", "yellow"))
    yield from head
    if not seen.groups:
        yield seen.nothing
        return
    yield Table(_GROUPS, [_group_row(each, looked.rates) for each in seen.groups], may_fold={"group", "paused"})
    yield ""
    rows = [(group, key) for group in seen.groups for key in group.keys]
    room = len(rows) if lines is None else max(_LEAST_ROWS, lines - len(head) - len(seen.groups) - 4)
    kept = rows if len(rows) <= room else sorted(rows, key=_urgency)[: room - 1]
    table = [(each.assigned, line) for group, each in kept for line in _key_rows(group, each, looked.rates)]
    if any(assignee is not None for assignee, _ in table):
        wider = [[*line[:2], assignee_text(assignee, seen.at_ms), *line[2:]] for assignee, line in table]
        yield Table((*_KEYS[:2], "assigned to", *_KEYS[2:]), wider, may_fold={"group", "partition", "owner"})
    else:
        yield Table(_KEYS, [line for _, line in table], may_fold={"group", "partition", "owner"})
    if len(kept) < len(rows):
        yield f"{len(rows) - len(kept)} more, that lag less; --group and --topic narrow it down"


def _urgency(row: tuple[GroupOverview, KeyOverview]) -> tuple[bool, int]:
    """Order what is stale first, then what lags most."""
    _, each = row
    lag = each.lag.records if each.lag is not None else None
    return not _is_stale(each), -(lag or 0)


def _is_stale(each: KeyOverview) -> bool:
    last_heartbeat = [each.last_heartbeat, *(range_.last_heartbeat for range_ in each.ranges)]
    return any(one is not None and one.freshness is Freshness.STALE for one in last_heartbeat)


def _owners(each: KeyOverview) -> Sequence[Owner]:
    held = [each.key.owner, *(range_.range.owner for range_ in each.ranges)]
    return [owner for owner in held if owner is not None]


def _group_row(group: GroupOverview, rates: PositionRates) -> list[str | Line]:
    lags = [key.lag.records for key in group.keys if key.lag is not None and key.lag.records is not None]
    moved = [rates.per_second(group.name, each.place) for each in group.keys]
    known = [each for each in moved if each is not None]
    stale = sum(map(_is_stale, group.keys))
    return [
        group.name,
        str(len({owner.instance for each in group.keys for owner in _owners(each)})),
        str(len(group.keys)),
        str(sum(bool(_owners(each)) for each in group.keys)),
        output.styled(str(stale), "bold red") if stale else "0",
        output.number(sum(lags) if lags else None),
        _rate(sum(known) if known else None),
        _pause(group),
    ]


def _pause(group: GroupOverview) -> str | Line:
    if not group.is_paused or group.paused_until_s is None:
        return output.NOTHING
    return output.styled(f"until {output.utc(group.paused_until_s * _MS)} by {group.paused_by}", "yellow")


def _key_rows(group: GroupOverview, each: KeyOverview, rates: PositionRates) -> Iterator[list[str | Line]]:
    key, name = each.key, f"{each.place[0]}/{each.place[1]}"
    yield [
        group.name,
        name + (" (provisional)" if key.provisional else ""),
        owner_text(key.owner),
        last_heartbeat_text(each.last_heartbeat),
        output.number(key.offset),
        plan_text(key.plan_end, key.plan_attempts),
        lag_text(each.lag or PartitionLag()),
        _rate(rates.per_second(group.name, each.place)),
    ]
    for range_ in each.ranges:
        yield _range_row(group, name, range_)


def _range_row(group: GroupOverview, name: str, one: RangeOverview) -> list[str | Line]:
    held = one.range
    end = held.end if held.phase is Phase.PLANNED else None
    return [
        group.name,
        f"{name} [{held.start}, {held.end}) {held.phase}",
        owner_text(held.owner),
        last_heartbeat_text(one.last_heartbeat),
        str(held.start),
        plan_text(end, held.attempts),
        output.NOTHING,
        output.NOTHING,
    ]


def _rate(per_second: float | None) -> str:
    return output.NOTHING if per_second is None else f"{per_second:.1f}"


def _to_json(looked: TopView) -> dict[str, Any]:
    """Give what `status --json` has of groups, with how long owners were silent and how fast positions moved."""
    shown = survey.to_json(looked.world, looked.survey)
    for group in looked.survey.groups:
        for row, each in zip(shown["groups"][group.name]["partitions"], group.keys, strict=True):
            row["silent_ms"] = None if each.last_heartbeat is None else each.last_heartbeat.silent_ms
            row["per_second"] = looked.rates.per_second(group.name, each.place)
    return shown
