"""What the parts below warn of, told to the person who acts: that a group stays paused, say, or why nobody answered."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from marshal_dagster.cli import output


class _Notes(logging.Handler):
    """Writes each warning and error in one line to stderr, once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._told:
            self._told.add(message)
            output.note(message)


@contextmanager
def telling_warnings() -> Iterator[None]:
    """Tell what the coordination log and those that write it warn of while the block runs."""
    source, notes = logging.getLogger("marshal_dagster.coordination"), _Notes()
    source.addHandler(notes)
    try:
        yield
    finally:
        source.removeHandler(notes)
