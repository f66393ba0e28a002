"""Writers that die or stall ahead of a line of their own: no hook in the sink is needed."""

import os
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


class SimulatedDeathError(BaseException):
    """Stands for the end of a process where it cannot be ended."""


@contextmanager
def at_line(files: Collection[str], number: int, then: Callable[[str], None]) -> Iterator[set[tuple[CodeType, int]]]:
    """Call `then` in this thread ahead of the line of `files` that is come to as the `number`th, from 0.

    Gives the lines seen. A line counts once, however often it is run.
    """
    seen: set[tuple[CodeType, int]] = set()

    def lines(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - as Python has it
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
    """Write once, and return at which lines to stop: `Target.most_steps`."""
    with at_line(target.source_files(), -1, lambda _: None) as seen:
        write()
    most = target.most_steps or (len(seen) if target.spark is None else _MOST_WITH_SPARK)
    every = max(1, -(-len(seen) // most))
    return list(range(0, len(seen), every))


def dies(target: Target, number: int, write: Callable[[], object]) -> str | None:
    """Carry out `write` by one who dies ahead of a line; return the line, None if it was never come to.

    Without Spark that is a process, of which nothing is run afterwards. With Spark `SimulatedDeathError` is raised, as
    a JVM cannot be forked: what the sink does in `finally` is done.
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
    files = target.source_files()
    ours, its = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside other threads: only this one goes on
        process = os.fork()
    if not process:
        _write_and_die(its, files, number, write)
    os.close(its)
    with os.fdopen(ours, "rb") as pipe:
        report = pipe.read()
    os.waitpid(process, 0)
    if report.startswith(_DIED):
        return report.removeprefix(_DIED).decode()
    if report == _ENDED:
        return None
    raise AssertionError(f"a writer in a process of its own failed: {report.removeprefix(_FAILED).decode()}")


def _write_and_die(pipe: int, files: Collection[str], number: int, write: Callable[[], object]) -> None:
    def die(at: str) -> None:
        os.write(pipe, _DIED + at.encode())
        os._exit(1)

    try:
        with at_line(files, number, die):
            write()
        os.write(pipe, _ENDED)
    except BaseException:  # noqa: BLE001 - told to the process that waits
        os.write(pipe, _FAILED + traceback.format_exc().encode()[-_LONGEST_REPORT_BYTES:])
    finally:
        os._exit(0)


def stalls(
    target: Target, number: int, late: Callable[[], object], meanwhile: Callable[[], object]
) -> tuple[object, object]:
    """Carry out `late`, which stalls ahead of a line while `meanwhile` is carried out; return what each came to.

    That is its result or the exception that it raised. Where `meanwhile` waits for something that `late` holds, both go
    on after a while.
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
        raise AssertionError("a writer that met another one has not ended within 120 s")
    return result, results[0]


def _result(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - looked at by who asked
        return error
