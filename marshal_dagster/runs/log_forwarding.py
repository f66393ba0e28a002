"""Forwarding of the library's warnings and errors to the log of a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marshal_dagster.telemetry.log_lines import FIELDS, FURTHER_FIELDS

if TYPE_CHECKING:
    from marshal_dagster.runs.names import RunContext


class _RunLogHandler(logging.Handler):
    """Log handler that forwards warnings and errors to a run's log."""

    def __init__(self, context: "RunContext") -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the run's log. Any thread may call this."""
        try:
            extra = {name: getattr(record, name) for name in (*FIELDS, *FURTHER_FIELDS) if hasattr(record, name)}
            self._context.log.log(record.levelno, record.getMessage(), extra=extra)
        except Exception:  # noqa: BLE001 - a log line that fails must not stop the work
            self.handleError(record)


@contextmanager
def logs_to_run(context: "RunContext") -> Iterator[None]:
    """Forward the library's warnings and errors to the run's log, unless Dagster is configured to do that itself."""
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
