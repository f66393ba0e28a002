"""Writers that die or stall before a given line of the sink. It uses Python's tracing, so sinks need no hooks."""

import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from marshal_dagster.sinks.conformance.target import Target

_DIED, _FAILED = b"died ", b"failed "
_ENDED = b"ended"
_LONGEST_REPORT_BYTES = 60_000
_MOST_WITH_SPARK = 40
_FORKS, _FORK_ENDS_WITHIN_S = 3, 100.0


class SimulatedDeathError(BaseException):
    """The simulated death of a process that cannot be killed."""


@contextmanager
def at_line(files: Collection[str], number: int, then: Callable[[str], None]) -> Iterator[set[tuple[CodeType, int]]]:
    """Call `then` in this thread before the `number`th line of `files` that is reached, counted from 0.

    A line counts once, however often it runs.

    Yields:
        The lines that were reached; the set grows while the block runs.
    """
    seen: set[tuple[CodeType, int]] = set()

    def lines(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - the type of trace functions
        at = frame.f_code, frame.f_lineno
        if event == "line" and at not in seen:
            seen.add(at)
            if len(seen) == number + 1:
                then(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return lines

    def calls(frame: FrameType, _event: str, _: Any) -> Any:  # noqa: ANN401
        return lines if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield seen
    finally:
        sys.settrace(before)


def steps_of(target: Target, write: Callable[[], object]) -> list[int]:
    """Write once, and return the numbers of the lines to stop at (`Target.most_steps`)."""
    with at_line(target.source_files(), -1, lambda _: None) as seen:
        write()
    most = target.most_steps or (len(seen) if target.spark is None else _MOST_WITH_SPARK)
    every = max(1, -(-len(seen) // most))
    return list(range(0, len(seen), every))


def dies(target: Target, number: int, write: Callable[[], object]) -> str | None:
    """Run `write` in a writer that dies before a line; return that line, or None if it was not reached.

    Without Spark the writer is a forked process that exits at once. With Spark it raises `SimulatedDeathError`, because
    a JVM cannot be forked; then the sink's `finally` blocks run.
    """
    if target.spark is None:
        return _dies_alone(target, number, write)
    died_at: list[str] = []

    def die(at: str) -> None:
        died_at.append(at)
        raise SimulatedDeathError

    try:
        with at_line(target.source_files(), number, die):
            write()
    except SimulatedDeathError:
        pass
    return died_at[0] if died_at else None


def _dies_alone(target: Target, number: int, write: Callable[[], object]) -> str | None:
    for _ in range(_FORKS):
        report = _forked_report(target, number, write)
        if report.startswith(_DIED):
            return report.removeprefix(_DIED).decode()
        if report == _ENDED:
            return None
        if report:
            raise AssertionError(f"a writer in a forked process failed: {report.removeprefix(_FAILED).decode()}")
    raise AssertionError(f"{_FORKS} writers in forked processes did not end within {_FORK_ENDS_WITHIN_S:g} s each")


def _forked_report(target: Target, number: int, write: Callable[[], object]) -> bytes:
    """Return what a forked writer reported; nothing if it hangs, which kills it.

    A process that is forked beside other threads can hang by a lock that one of them held, as those of a client do.
    """
    files = target.source_files()
    ours, its = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with other threads: only this one continues
        process = os.fork()
    if not process:
        _write_and_die(its, files, number, write)
    os.close(its)
    with os.fdopen(ours, "rb") as pipe:
        ended = select.select([pipe], [], [], _FORK_ENDS_WITHIN_S)[0]
        if not ended:
            os.kill(process, signal.SIGKILL)
        report = pipe.read()
    os.waitpid(process, 0)
    return report


def _write_and_die(pipe: int, files: Collection[str], number: int, write: Callable[[], object]) -> None:
    def die(at: str) -> None:
        os.write(pipe, _DIED + at.encode())
        os._exit(1)

    try:
        with at_line(files, number, die):
            write()
        os.write(pipe, _ENDED)
    except BaseException:  # noqa: BLE001 - reported to the parent process
        os.write(pipe, _FAILED + traceback.format_exc().encode()[-_LONGEST_REPORT_BYTES:])
    finally:
        os._exit(0)


def stalls(
    target: Target, number: int, late: Callable[[], object], meanwhile: Callable[[], object]
) -> tuple[object, object]:
    """Run `late`, stall it before a line, and run `meanwhile` in the meantime.

    If `meanwhile` waits for a lock of `late`, both continue after `Target.patience_s`.

    Returns:
        The result of each, or the exception that it raised.
    """
    results: list[object] = []
    other = threading.Thread(target=lambda: results.append(_result(meanwhile)), daemon=True)

    def stall(_: str) -> None:
        other.start()
        other.join(target.patience_s)

    with at_line(target.source_files(), number, stall):
        result = _result(late)
    if other.ident is None:
        return result, _result(meanwhile)
    other.join(120)
    if not results:
        raise AssertionError("a writer that ran at the same time as another one did not end within 120 s")
    return result, results[0]


def _result(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller examines it
        return error
