"""Something happens before each line of some code: how an interrupt at any of them is tried."""

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

Place = tuple[str, int]
"""A file's name and a line's number."""


@contextmanager
def watched(modules: Iterable[ModuleType], at_line: Callable[[Place], None], *, but: tuple[str, ...]) -> Iterator[None]:
    """Call `at_line` before each line of `modules`, in this thread, `but` before those that begin so.

    A signal is not handled between a block's end and its clearing up, nor before what calls nothing and jumps nowhere,
    a trace would be.
    """
    files = {str(module.__file__) for module in modules}

    def within(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - as `sys.settrace` has it
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not linecache.getline(*place).lstrip().startswith(but):
            at_line(place)
        return within

    def entered(frame: FrameType, _event: str, _: Any) -> Any:  # noqa: ANN401
        return within if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)
