"""Keep Python's cyclic garbage collector out of steps that create thousands of objects at once."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_steps: Final[set[object]] = set()
"""The steps of this process that have paused the collector."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector in this process, unless it is off; also a decorator.

    A step about 4,096 partitions creates some 100,000 objects without cycles, which their reference counts free. The
    collector would look at them again and again, and that takes a third of the step. A step ends within the time limit
    of the log, so little other garbage can gather. A thread that finds it paused by another leaves it to that one.
    """
    if not gc.isenabled():
        yield
        return
    step = object()
    try:
        _steps.add(step)
        gc.disable()
        yield
    finally:
        gc.enable()
        _steps.discard(step)


def _resume_in_fork() -> None:
    """Resume the collector in a process that was forked during a step, which never ends there."""
    if _steps:
        _steps.clear()
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_fork)
