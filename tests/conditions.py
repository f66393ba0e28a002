"""Functions with which tests wait for another thread, process or server."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")

WITHIN_S: Final = 300.0
"""The seconds after which a test gives up. They only guard against waiting forever; pytest's timeout is longer."""
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.1


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], object],
    within_s: float = WITHIN_S,
    *,
    pause_s: float | None = None,
    ignored: type[Exception] | tuple[type[Exception], ...] = (),
) -> T:
    """Wait until `condition` returns a true value, and return that value.

    Args:
        condition: Called repeatedly.
        what: A sentence that is then true, such as "the topic is drained", or a function that returns it.
        within_s: The deadline in seconds.
        pause_s: The seconds between two calls. By default they grow from 0.02 to 0.1, because a call may be costly.
        ignored: Errors of `condition` that count as "not yet".

    Raises:
        AssertionError: The condition does not hold in time; the message contains `what`.
    """
    deadline_s = time.monotonic() + within_s
    next_s = _FIRST_PAUSE_S
    while True:
        last: Exception | None = None
        try:
            if found := condition():
                return found
        except ignored as error:
            last = error
        if time.monotonic() >= deadline_s:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within_s:g} s: {said}") from last
        time.sleep(next_s if pause_s is None else pause_s)
        next_s = min(_LONGEST_PAUSE_S, next_s * 1.1)


def wait_for_line(process: "subprocess.Popen[str]", beginning: str, within_s: float = WITHIN_S) -> str:
    """Read the output of a process up to a line that starts with `beginning`, and return that line.

    The process is killed after `within_s` seconds.

    Raises:
        AssertionError: The process ends without such a line; the message contains its output.
    """
    assert process.stdout is not None
    deadline = threading.Timer(within_s, process.kill)
    deadline.start()
    printed: list[str] = []
    try:
        for line in process.stdout:
            if line.startswith(beginning):
                return line
            printed.append(line)
    finally:
        deadline.cancel()
    raise AssertionError(f"the process ended with {process.wait()} before a line {beginning!r}: {printed}")
