"""Forwards the library's warnings and errors to a run's log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marshal_dagster.telemetry.log_lines import FIELDS, FURTHER_FIELDS

if TYPE_CHECKING:
    from marshal_dagster.runs.names import RunContext


class _RunLogHandler(logging.Handler):
    """Hands the library's warnings and errors to a run's log."""

    def __init__(self, context: "RunContext") -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        """Log the line in the run; from any thread."""
        try:
            extra = {name: getattr(record, name) for name in (*FIELDS, *FURTHER_FIELDS) if hasattr(record, name)}
            self._context.log.log(record.levelno, record.getMessage(), extra=extra)
        except Exception:  # noqa: BLE001 - a line that cannot be logged harms nothing
            self.handleError(record)


@contextmanager
def logs_to_run(context: "RunContext") -> Iterator[None]:
    """Show the library's warnings and errors in the run's log, unless Dagster is configured to do so by itself."""
    ours = logging.getLogger("marshal_dagster")
    managed = context.instance.managed_python_loggers
    if any(name == "root" or name.split(".")[0] == ours.name for name in managed):
        yield
        return
    handler = _RunLogHandler(context)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
