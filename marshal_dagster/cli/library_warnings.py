"""What the parts below warn of, told to the person who acts: that a group stays paused, say, or why nobody answered."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from marshal_dagster.cli import output


class _WarningHandler(logging.Handler):
    """Writes each warning and error in one line to stderr, once or each time."""

    def __init__(self, *, each_time: bool) -> None:
        super().__init__(logging.WARNING)
        self._each_time = each_time
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self._each_time or message not in self._told:
            self._told.add(message)
            output.write_note(message)


@contextmanager
def warnings_to_stderr(parts: Sequence[str] = ("admin", "coordination"), *, each_time: bool = False) -> Iterator[None]:
    """Tell what parts of the library warn of while the block runs.

    By default that is the coordination log and those that write it.
    """
    sources, notes = (
        [logging.getLogger(f"marshal_dagster.{part}") for part in parts],
        _WarningHandler(each_time=each_time),
    )
    for source in sources:
        source.addHandler(notes)
    try:
        yield
    finally:
        for source in sources:
            source.removeHandler(notes)
