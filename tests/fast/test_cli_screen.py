"""The whole screen of a terminal that `top` and `--watch` fill: what does not fit is reported."""

import os
import pty
import re
import select
from collections.abc import Callable, Iterable

import pytest

from marshal_dagster.cli import output

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_screen(monkeypatch: pytest.MonkeyPatch, parts_of: Callable[[int], Iterable[str | output.Table]]) -> list[str]:
    """Return the lines of a terminal of 6 lines and 80 columns after it was filled."""
    ours, theirs = pty.openpty()
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "6"}.items():
        monkeypatch.setenv(name, value)
    with open(theirs, "w", encoding="utf-8") as terminal:  # noqa: PTH123 - a file descriptor
        monkeypatch.setattr("sys.stdout", terminal)
        with output.screen() as fill:
            fill(parts_of)
        monkeypatch.undo()
        written = b""
        while select.select([ours], [], [], 0)[0]:
            written += os.read(ours, 65_536)
    os.close(ours)
    _, _, frame = written.decode().rpartition("\x1b[H")
    return [line.rstrip() for line in ESCAPES.sub("", frame).split("\r\n")]


def test_lines_that_wrap_leave_room_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that leaves out rows is given fewer lines, so that its last line is visible."""

    def page(lines: int) -> list[str]:
        rows = ["row"] * (lines - 2)
        return ["x" * 100, *rows, f"Left out: {10 - len(rows)}"]

    assert on_screen(monkeypatch, page) == ["x" * 80, "x" * 20, "row", "row", "row", "Left out: 7"]


def test_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that shows everything is cut at its end."""
    shown = on_screen(monkeypatch, lambda _: [f"line {number}" for number in range(9)])
    assert shown[:5] == [f"line {number}" for number in range(5)]
    assert shown[5] == "Left out: 4 lines; enlarge the terminal, or choose --group or --topic"


def test_a_page_that_fits_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six lines fit into six lines."""
    assert on_screen(monkeypatch, lambda lines: map(str, range(lines))) == list("012345")


def test_a_number_that_is_cut_is_no_other_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ellipsis shows that the terminal is too narrow for a column."""
    table = output.Table([f"#column {number}" for number in range(12)], [["123456789"] * 12])
    _, row, *_ = on_screen(monkeypatch, lambda _: [table])
    assert len(row.split()) == 12
    assert all(cell.endswith("…") for cell in row.split())
