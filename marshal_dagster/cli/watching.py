"""Show a view of the world again and again, on the terminal's whole screen, until the operator ends it."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from marshal_dagster.cli import output
from marshal_dagster.cli.options import finite
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.world_view import WorldView
from marshal_dagster.errors import UnavailableError

Page = Callable[[WorldView, str | None, int | None], Iterable[str | Line | Table]]
"""Returns what is shown of a view, with the problem of the last reading, in a number of lines."""
INTERVAL_S: Final = 2.0
Watch = Annotated[bool, typer.Option("--watch", help="Show it again and again on the whole screen; `q` ends it.")]
Interval = Annotated[
    float,
    typer.Option(
        "--interval", "-i", metavar="SECONDS", callback=finite, min=0.1, max=3_600, help="Time between two readings."
    ),
]


def is_watched(*, watch: bool, once: bool) -> bool:
    """Return whether a view is shown again and again. If it is shown once despite `--watch`, a note states why."""
    is_possible = output.is_terminal() and not once
    if watch and not is_possible:
        output.write_note("This is shown once: --watch needs a terminal, and neither --json nor --check.")
    return watch and is_possible


def watch_on_screen(view: WorldView, look: Callable[[], WorldView], page: Page, interval_s: float) -> None:
    """Show `view` on the whole screen, then a new one every `interval_s` seconds, until `q` or Ctrl-C.

    Raises `MarshalError`.
    """
    with _keyboard() as is_ended, output.screen() as fill:
        watch(
            view,
            look,
            lambda view, problem: fill(lambda lines: page(view, problem, lines)),
            lambda: is_ended(interval_s),
        )


def problem_line(problem: str | None) -> list[Line]:
    """Return the line that is shown above an older state."""
    if problem is None:
        return []
    return [output.styled(f"This is an older state: {problem}", "bold red")]


def watch(
    view: WorldView,
    look: Callable[[], WorldView],
    show: Callable[[WorldView, str | None], None],
    wait: Callable[[], bool],
) -> None:
    """Show `view`, then call `look` and show its result until `wait` returns true.

    If Kafka cannot be reached, that is shown above the last view. Raises `MarshalError` for any other error.
    """
    problem = None
    while True:
        show(view, problem)
        if wait():
            return
        try:
            view, problem = look(), None
        except UnavailableError as error:
            problem = str(error)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds, or until `q` is pressed, and returns whether it was."""
    if not sys.stdin.isatty():
        yield lambda seconds: _is_ended([], seconds)
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield lambda seconds: _is_ended([keys], seconds)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_ended(keyboards: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        for keys in select.select(keyboards, [], [], left_s)[0]:
            if os.read(keys, 1) in {b"q", b"Q", b""}:
                return True
    return False
