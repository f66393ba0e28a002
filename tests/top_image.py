"""Write docs/images/top.svg, which shows the screen of `marshal-dagster top`: `python -m tests.top_image`."""

import html
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any, Final, cast

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from marshal_dagster.cli import output, top
from marshal_dagster.cli.top import TopReader
from marshal_dagster.cli.world_reader import WorldReader
from marshal_dagster.cli.world_view import EVERYTHING, WorldView
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.messages import GroupMessage, parse
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog
from tests.admin_fixtures import NOBODYS, FakeTopics
from tests.timeline_logs import (
    COORDINATION_PARTITIONS,
    HOME,
    START_MS,
    TOPIC_ID,
    Member,
    Written,
    group_value,
    settings,
    stored,
)

IMAGE: Final = Path(__file__).parents[1] / "docs" / "images" / "top.svg"
_COLUMNS: Final = 110
_PLAN: Final = 40_000
_FIRST_S, _SECOND_S = 96, 98
"""When the screen is read, in seconds after the log's start."""
_THEME: Final = TerminalTheme(
    (27, 31, 36),
    (230, 233, 237),
    [
        *((27, 31, 36), (255, 123, 114), (63, 185, 80), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (57, 197, 207), (200, 206, 214)),
    ],
)
_SVG: Final = """\
<svg class="rich-terminal" viewBox="-14 24 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>marshal-dagster top</title>
<desc>%s</desc>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>{lines}</defs>
<rect fill="#1b1f24" x="-14" y="24" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


class _Topics(FakeTopics):
    """A data topic of six partitions, to which records arrive evenly."""

    def offsets(self, _: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:  # noqa: ARG002 - as its base class
        """Return the bounds of each partition."""
        return {number: OffsetBounds(0, 130_000 + 2_117 * number) for number in partitions}

    def offsets_at(self, _: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset with that timestamp or a later one."""
        since_s = (at_ms - START_MS) / 1_000 + 300
        return {number: round(since_s * 330) + 2_117 * number for number in partitions}


def _story() -> list[Written]:
    """Return a group of six partitions: one run died and left three of them, another run works on the others."""
    written, random = [settings()], Random(31)
    dead, live = Member(written, random), Member(written, random)
    dead.claim(2, (0, 1, 2), 20_000, is_first=True)
    live.claim(2, (3, 4, 5), 20_000, is_first=True)
    for member, partitions in ((dead, (0, 1, 2)), (live, (3, 4, 5))):
        member.each(3, "ClaimingMessages", partitions, 20_000 + _PLAN)
    dead.beats((12, 22, 32, 42, 52, 62), (0, 1, 2), 20_000)
    live.beats((12, 22, 32), (3, 4, 5), 20_000)
    for number, at_s in enumerate((40, 70, 97)):
        done = 20_000 + (number + 1) * _PLAN
        live.each(at_s, "Heartbeat", (3, 4, 5), done - 7_000 * number)
        live.each(at_s + 0.5, "ClaimingMessages", (3, 4, 5), done + _PLAN)
    live.beats((50, 60), (3, 4, 5), 20_000 + _PLAN)
    live.beats((80, 90), (3, 4, 5), 20_000 + 2 * _PLAN - 7_000)
    written.append((92, group_value("ReleaseGroup", 92, 0, START_MS // 1_000 + 7_200).replace("/shops/", "/returns/")))
    return written


def screen() -> list[str | output.Line | output.Table]:
    """Return what `top` shows at its second look."""
    clock = ManualClock(START_MS)
    broker = MemoryBroker(COORDINATION_PARTITIONS, now_ms=clock.wall_ms)
    topics = _Topics(partitions=tuple(range(6)), topic_id=TOPIC_ID)
    rationalizer = Rationalizer(MemoryLog(broker), clock=clock)
    reader = TopReader(WorldReader(rationalizer, cast("Any", topics), EVERYTHING, clock, cast("Any", NOBODYS)))
    records = stored(_story())

    def look(second: int) -> WorldView:
        while records and records[0].timestamp_ms <= START_MS + second * 1_000:
            record = records.pop(0)
            is_of_group = isinstance(parse(record.value), GroupMessage)
            for number in range(COORDINATION_PARTITIONS) if is_of_group else (HOME,):
                broker.append(number, record.value or b"", record.timestamp_ms)
        clock.advance(START_MS + second * 1_000 - clock.wall_ms())
        return reader.look()

    look(_FIRST_S)
    view = look(_SECOND_S)
    return list(top.page(view, reader.rates, "__marshal, every 2 s, q ends"))


def text(parts: Iterable[str | output.Line | output.Table]) -> str:
    """Return the screen as text."""
    return "\n".join("\n".join(line.rstrip() for line in str(part).splitlines()) for part in parts)


def svg() -> str:
    """Return the screen as a picture, with its text as the description."""
    parts = screen()
    console = Console(width=_COLUMNS, record=True, highlight=False, markup=False, emoji=False, file=StringIO())
    for part in parts:
        console.print(output._rich_table(part, _COLUMNS) if isinstance(part, output.Table) else output._rich_text(part))
    form = _SVG % html.escape(text(parts)).replace("{", "{{").replace("}", "}}")
    return console.export_svg(theme=_THEME, code_format=form, unique_id="top")


if __name__ == "__main__":
    IMAGE.write_text(svg(), encoding="utf-8")
    print(text(screen()))  # noqa: T201 - a tool
