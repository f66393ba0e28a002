"""Log lines with fields, written by a separate thread.

Claims are made under a lock that heartbeats need too. A log handler may be slow, such as Dagster's, which writes to its
storage. So claiming never waits for a handler.
"""

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Final

LOGGER: Final = logging.getLogger("marshal_dagster.claims")
"""The logger of these lines. Its level decides which of them are written."""

FIELDS: Final = ("event", "outcome", "group", "topic", "partition", "epoch", "instance")
"""The attributes of every log record; the value is None if there is none."""
FURTHER_FIELDS: Final = ("record", "offset", "lease_remaining_s", "reason")
"""Attributes that only some log records have."""

_MOST_WAITING: Final = 10_000
TIMEOUT_S: Final = 5.0
"""How long to wait for lines to be written, after all claims are released."""


class LineWriter:
    """A queue of log lines, and the thread that writes them in order. Call `close` at the end."""

    def __init__(self) -> None:
        self._waiting: Queue[logging.LogRecord | threading.Event] = Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._left_out = 0

    def write(self, level: int, text: str, fields: Mapping[str, object]) -> None:
        """Queue a line with `fields` as attributes. Never waits: if the queue is full, the line is dropped."""
        if self._is_over.is_set():
            return
        record = LOGGER.makeRecord(LOGGER.name, level, __file__, 0, text, (), None, extra=dict(fields))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="log lines of claims", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(record)
        except Full:
            self._left_out += 1

    def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the lines queued so far are written, for `timeout_s` seconds at most."""
        if self._thread is None or self._is_over.is_set():
            return
        deadline_s = time.monotonic() + timeout_s
        written = threading.Event()
        with suppress(Full):
            self._waiting.put(written, timeout=timeout_s)
            written.wait(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Accept no more lines, and wait up to `timeout_s` seconds until the queued ones are written."""
        if self._thread is None:
            return
        try:
            self.flush(timeout_s)
        finally:
            is_empty = self._waiting.empty()
            self._is_over.set()
            with suppress(Full):  # wakes up the thread; if the queue is full, it is not waiting
                self._waiting.put_nowait(threading.Event())
        if is_empty:
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while not self._is_over.is_set():
            self._write(self._waiting.get())
        # The count is logged by this thread, because `close` must not wait for a handler that hangs.
        while not self._waiting.empty():
            self._left_out += isinstance(self._waiting.get_nowait(), logging.LogRecord)
        if self._left_out:
            LOGGER.warning(
                "%d log lines about claims were dropped, because the log handlers are too slow; raise the level of "
                "logger %r or use a faster handler",
                self._left_out,
                LOGGER.name,
            )

    def _write(self, line: logging.LogRecord | threading.Event) -> None:
        if isinstance(line, threading.Event):
            line.set()
            return
        with suppress(Exception):  # a failing handler must not end the thread
            LOGGER.handle(line)
