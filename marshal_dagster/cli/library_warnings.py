"""Show the library's logged warnings on stderr while a command runs.

The layers below the command line log warnings, for example that a group stays paused. A command shows them to its user.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from marshal_dagster.cli import output


class _WarningHandler(logging.Handler):
    """Writes each warning and error to stderr as one line, either once or each time that it is logged."""

    def __init__(self, *, each_time: bool) -> None:
        super().__init__(logging.WARNING)
        self._each_time = each_time
        self._written: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self._each_time or message not in self._written:
            self._written.add(message)
            output.write_note(message)


@contextmanager
def warnings_to_stderr(parts: Sequence[str] = ("admin", "coordination"), *, each_time: bool = False) -> Iterator[None]:
    """Write the warnings of some parts of the library to stderr while the block runs.

    Args:
        parts: Packages or modules in `marshal_dagster`. By default those that read and write the coordination log.
        each_time: Whether to write a repeated message each time, not only once.
    """
    sources = [logging.getLogger(f"marshal_dagster.{part}") for part in parts]
    handler = _WarningHandler(each_time=each_time)
    for source in sources:
        source.addHandler(handler)
    try:
        yield
    finally:
        for source in sources:
            source.removeHandler(handler)
