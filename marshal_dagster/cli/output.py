"""Write everything that the command line shows, to a terminal or a pipe.

Text from a log is not trusted. `clean` escapes control characters before a terminal sees it, and rich gets it as plain
text, never as markup.
"""

import json
import os
import select
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

from marshal_dagster.admin import texts
from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table as RichTable
    from rich.text import Text

    from marshal_dagster.cli.printed_commands import PrintedCommands

JSON_VERSION: Final = 1
"""The version of the form of all JSON objects, which docs/reference/command-line.schema.json describes.

It grows when a field is removed or changes its meaning, not when one is added.
"""
_LEAST_WIDTH: Final = 100
_BETWEEN_COLUMNS: Final = 2
NOTHING: Final = texts.NOTHING
_commands: "PrintedCommands | None" = None
DRY_RUN: Final = "A dry run: nothing was written."
utc = texts.utc
duration = texts.duration


class PipeClosedError(Exception):
    """The reader of our output has closed the pipe."""


def complete_commands(commands: "PrintedCommands | None") -> None:
    """Complete all commands in what is written from now on."""
    global _commands  # noqa: PLW0603 - a process runs one command line, and threads of it write too
    _commands = commands


def _complete(text: str) -> str:
    return text if _commands is None else _commands.complete(text)


def _complete_json(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return _complete(value)
    if isinstance(value, dict):
        return {name: _complete_json(each) for name, each in value.items()}
    return list(map(_complete_json, value)) if isinstance(value, list | tuple) else value


def clean(text: str) -> str:
    """Replace each invisible character, and each that controls a terminal, with its escape sequence."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def one_line(text: str) -> str:
    """Return a message as one line, without characters that control a terminal."""
    return clean(_complete(" ".join(text.split())))


def write_error(message: str) -> None:
    """Write an error to stderr as one line."""
    print(f"marshal-dagster: {one_line(message)}", file=sys.stderr, flush=True)  # noqa: T201 - the output of a command


def cannot_ask(look: str) -> ConfigurationError:
    """Return the error for a command with --json that needs confirmation. `look` is how to see its effect first."""
    return ConfigurationError(
        f"with --json the command cannot ask for confirmation: show the effect {look} first, then add --yes"
    )


def no_answer() -> ConfigurationError:
    """Return the error for a command that needs confirmation and whose standard input ends before an answer."""
    return ConfigurationError(
        "the command cannot ask for confirmation, because its standard input has ended: run it in a terminal, or add "
        "--yes"
    )


def write_nothing_written() -> None:
    """Report that the operator declined, and nothing was written."""
    write_note("nothing was written")


def write_note(message: str) -> None:
    """Write one line to stderr that is not an error, such as a remark on the output."""
    print(one_line(message), file=sys.stderr, flush=True)  # noqa: T201 - the output of a command


def write_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON value to stdout as one line of ASCII. An object gets the version of its form."""
    value = value if _commands is None else _complete_json(value)
    write_line(json.dumps({"format_version": JSON_VERSION, **value} if isinstance(value, dict) else value))


def write_line(line: str) -> None:
    """Write one line to stdout, unchanged."""
    with _stdout() as stdout:
        stdout.write(line + "\n")


def flush() -> None:
    """Flush stdout."""
    with _stdout() as stdout:
        stdout.flush()


@contextmanager
def _stdout() -> Iterator[TextIO]:
    """Yield stdout. An `OSError` of the block, except a closed pipe, gets a text that names the output."""
    try:
        yield sys.stdout
    except BrokenPipeError:
        raise
    except OSError as error:
        stop_writing()
        raise OSError(f"the output cannot be written: {error.strerror}") from None


def wait(seconds: float) -> None:
    """Wait for some seconds. Raises `PipeClosedError` as soon as the reader of our output closes the pipe."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if reader.poll(seconds * 1_000):
        raise PipeClosedError


def stop_writing() -> None:
    """Send the rest of the output to /dev/null, so that the interpreter exits quietly if it cannot be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


@dataclass(frozen=True, slots=True)
class Line:
    """A line of parts, each a text and a style (empty for no style). `clean` is applied when it is shown."""

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the text without styles."""
        return clean(_complete("".join(text for text, _ in self.parts)))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns.

    A column whose name begins with `#` is right-aligned. Columns in `may_fold` wrap if a terminal is narrow.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Line]]
    may_fold: Collection[str] = ()

    def __str__(self) -> str:
        """Return the table as text without styles. No row wraps and no cell is truncated."""
        named = [name.lstrip("#") for name in self.columns]
        lines = [named, *([clean(str(cell)) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        align = [str.rjust if name.startswith("#") else str.ljust for name in self.columns]
        return "\n".join(
            "  ".join(place(cell, width) for place, cell, width in zip(align, line, widths, strict=True)).rstrip()
            for line in lines
        )


def styled(text: str, style: str) -> Line:
    """Return a line in one style."""
    return Line(((text, style),))


def notes_cell(notes: Sequence[str]) -> str | Line:
    """Return the cell of a table that shows `notes`."""
    return styled("; ".join(notes), "yellow") if notes else NOTHING


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


@contextmanager
def screen() -> Iterator[Callable[[Callable[[int], Iterable[str | Line | Table]]], None]]:
    """Take over the terminal's screen while the block runs, and yield a function that redraws it.

    That function takes another one, which gets the number of lines of the screen and returns what to show. If that
    still does not fit, the last line of the screen shows how many lines are left out.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.segment import SegmentLines

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def fill(parts_of: Callable[[int], Iterable[str | Line | Table]]) -> None:
            height = console.height
            rows = _rows(console, parts_of(height))
            if len(rows) > height:  # long lines wrap
                rows = _rows(console, parts_of(2 * height - len(rows)))
            if len(rows) > height:
                left = f"Left out: {len(rows) - height + 1} lines; enlarge the terminal, or choose --group or --topic"
                rows = [*rows[: height - 1], *_rows(console, [styled(left, "yellow")])[:1]]
            live.update(SegmentLines(rows, new_lines=True), refresh=True)

        yield fill


def _rows(console: "Console", parts: Iterable[str | Line | Table]) -> list[list["Segment"]]:
    """Return the lines of a terminal that `parts` take."""
    rows: list[list[Segment]] = []
    for part in parts:
        shown = _rich_table(part, console.width) if isinstance(part, Table) else _rich_text(part)
        rows += console.render_lines(shown, pad=False)
    return rows


def show(*parts: str | Line | Table) -> None:
    """Write texts and tables to stdout. A terminal gets colours, unless NO_COLOR is set."""
    if is_terminal():
        _show_on_terminal(parts)
        return
    for part in parts:
        write_line(clean(_complete(part)) if isinstance(part, str) else str(part))


def _show_on_terminal(parts: Iterable[str | Line | Table]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    # In a narrower terminal the terminal itself wraps lines: rich would fold tables beyond recognition.
    console.width = max(console.width, _LEAST_WIDTH)
    for part in parts:
        if isinstance(part, Table):
            console.print(_rich_table(part, console.width))
        else:
            console.print(_rich_text(part), soft_wrap=True)


def _rich_text(part: str | Line) -> "Text":
    from rich.text import Text

    parts = part.parts if isinstance(part, Line) else ((part, ""),)
    return Text.assemble(*((clean(_complete(text)), style) for text, style in parts))


def _rich_table(table: Table, width: int) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    built = RichTable(header_style="dim", box=None, pad_edge=False, padding=(0, 1))
    folded = _folded(table, width)
    for name in table.columns:
        justify: Literal["left", "right"] = "right" if name.startswith("#") else "left"
        # A number without its last digits would be another one, so an ellipsis shows that a cell is cut.
        overflow: Literal["fold", "ellipsis"] = "fold" if name in folded else "ellipsis"
        built.add_column(Text(name.lstrip("#")), justify=justify, overflow=overflow, no_wrap=name not in folded)
    for row in table.rows:
        built.add_row(*map(_rich_text, row))
    return built


def _folded(table: Table, width: int) -> Collection[str]:
    """Return the columns that may fold in a terminal of this width.

    Those that have no space to fold at, such as names, do not, if the others can fold at spaces and make enough room.
    """
    needed, names = (len(table.columns) - 1) * _BETWEEN_COLUMNS, set()
    for at, name in enumerate(table.columns):
        cells = [name.lstrip("#"), *(clean(str(row[at])) for row in table.rows)]
        most, least = max(map(len, cells)), max(len(word) for cell in cells for word in cell.split(" "))
        needed += least if name in table.may_fold else most
        if most == least:
            names.add(name)
    return set(table.may_fold) - (names if needed <= width else set())


def number(value: int | None) -> str:
    """Return a number as text, or `-` for None."""
    return NOTHING if value is None else str(value)
