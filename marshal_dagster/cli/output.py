"""Everything that is written to a terminal or a pipe.

What comes out of a log was written by anybody: `clean` goes over it before a terminal sees it, and rich gets it as
plain text, never as markup.
"""

import json
import os
import select
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

_LEAST_WIDTH: Final = 100
NOTHING: Final = "-"
DRY_RUN: Final = "A dry run: nothing was written."


class PipeClosedError(Exception):
    """Who read our output reads no more."""


def clean(text: str) -> str:
    """Replace each character that a terminal would act upon, or that cannot be seen, by its escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def one_line(text: str) -> str:
    """Make one line of a message, with nothing in it that a terminal would act upon."""
    return clean(" ".join(text.split()))


def write_error(message: str) -> None:
    """Write one line to stderr: what is wrong."""
    print(f"marshal-dagster: {one_line(message)}", file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks


def cannot_ask(look: str) -> ConfigurationError:
    """Return the error for a command with --json that needs consent; `look` says how to see its effect."""
    return ConfigurationError(f"--json cannot ask for consent: give --yes too, after a look {look}")


def write_nothing_written() -> None:
    """Report that a dry run, or an operator's refusal, has left everything as it was."""
    write_note("nothing was written")


def write_note(message: str) -> None:
    """Write one line to stderr that is no error: what takes long, or what to know of the output."""
    print(one_line(message), file=sys.stderr, flush=True)  # noqa: T201 - the command line speaks


def write_json(value: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
    """Write one JSON value in one line of ASCII."""
    write_line(json.dumps(value))


def write_line(line: str) -> None:
    """Write one line to stdout as it is."""
    sys.stdout.write(line + "\n")


def flush() -> None:
    """Hand on what was written so far."""
    sys.stdout.flush()


def wait(seconds: float) -> None:
    """Wait, but no longer than somebody reads our output. Raises `PipeClosedError`."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if reader.poll(seconds * 1_000):
        raise PipeClosedError


def stop_writing() -> None:
    """Let the interpreter end quietly although nobody reads what is still to be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


@dataclass(frozen=True, slots=True)
class Line:
    """A line in parts, each a text and its style (empty: none); `clean` goes over it when it is shown."""

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Give it without its styles."""
        return clean("".join(text for text, _ in self.parts))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns: one whose name begins with `#` stands to the right, those in `may_fold` give way."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Line]]
    may_fold: Collection[str] = ()

    def __str__(self) -> str:
        """Give it without its styles, no row folded and nothing cut."""
        named = [name.lstrip("#") for name in self.columns]
        lines = [named, *([clean(str(cell)) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        align = [str.rjust if name.startswith("#") else str.ljust for name in self.columns]
        return "\n".join(
            "  ".join(place(cell, width) for place, cell, width in zip(align, line, widths, strict=True)).rstrip()
            for line in lines
        )


def styled(text: str, style: str) -> Line:
    """Give a line in one style."""
    return Line(((text, style),))


def notes_cell(notes: Sequence[str]) -> str | Line:
    """Return the cell of a table that shows `notes`."""
    return styled("; ".join(notes), "yellow") if notes else NOTHING


def is_terminal() -> bool:
    """Tell whether a person looks at stdout."""
    return sys.stdout.isatty()


@contextmanager
def screen() -> Iterator[Callable[[Callable[[int], Iterable[str | Line | Table]]], None]]:
    """Take the terminal's whole screen while the block runs, and give what fills it anew.

    That gets a function from the number of lines to what they show.
    """
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def fill(parts_of: Callable[[int], Iterable[str | Line | Table]]) -> None:
            parts = parts_of(console.height)
            shown = [_rich_table(part) if isinstance(part, Table) else _rich_text(part) for part in parts]
            live.update(Group(*shown), refresh=True)

        yield fill


def show(*parts: str | Line | Table) -> None:
    """Write texts and tables to stdout: in colour on a terminal, unless NO_COLOR is set; plain elsewhere."""
    if is_terminal():
        _show_on_terminal(parts)
        return
    for part in parts:
        write_line(clean(part) if isinstance(part, str) else str(part))


def _show_on_terminal(parts: Iterable[str | Line | Table]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    # Rather than fold a table beyond recognition, leave it to the terminal.
    console.width = max(console.width, _LEAST_WIDTH)
    for part in parts:
        if isinstance(part, Table):
            console.print(_rich_table(part))
        else:
            console.print(_rich_text(part), soft_wrap=True)


def _rich_text(part: str | Line) -> "Text":
    from rich.text import Text

    parts = part.parts if isinstance(part, Line) else ((part, ""),)
    return Text.assemble(*((clean(text), style) for text, style in parts))


def _rich_table(table: Table) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    built = RichTable(header_style="dim", box=None, pad_edge=False, padding=(0, 1))
    for name in table.columns:
        justify: Literal["left", "right"] = "right" if name.startswith("#") else "left"
        built.add_column(Text(name.lstrip("#")), justify=justify, overflow="fold", no_wrap=name not in table.may_fold)
    for row in table.rows:
        built.add_row(*map(_rich_text, row))
    return built


def number(value: int | None) -> str:
    """Write a number, or that there is none."""
    return NOTHING if value is None else str(value)


def utc(at_ms: int | None) -> str:
    """Write a time in UTC to the millisecond, or that there is none; one out of the calendar's range as its number."""
    if at_ms is None:
        return NOTHING
    try:
        return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"


def duration(length_ms: float) -> str:
    """Write a length of time as a person says it: 1.5 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    seconds = abs(length_ms) / 1_000
    if seconds < _MINUTE_S:
        return f"{seconds:.3g} s"
    for larger_s, larger, smaller_s, smaller in _UNITS:
        if seconds >= larger_s:
            count, rest = divmod(int(seconds), larger_s)
            return f"{count} {larger} {rest // smaller_s} {smaller}"
    raise AssertionError(length_ms)


_MINUTE_S: Final = 60
_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
