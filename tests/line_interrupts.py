"""Run a callback before each line of some code, to test an interrupt at every line."""

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

Place = tuple[str, int]
"""The name of a file and the number of a line."""


@contextmanager
def watched(modules: Iterable[ModuleType], at_line: Callable[[Place], None], *, but: tuple[str, ...]) -> Iterator[None]:
    """Call `at_line` before each line of `modules` in this thread, except lines that start with a text in `but`.

    Python handles no signal between the end of a block and its cleanup, nor before lines that neither call nor jump. A
    trace function is called there all the same.
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
