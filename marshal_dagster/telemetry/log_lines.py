"""Log lines with fields, written by a thread of their own.

Claims are made under a lock that heartbeats need too, and a handler may be slow (Dagster's writes into its storage): so
nobody who claims waits for one.
"""

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import Final

LOGGER: Final = logging.getLogger("marshal_dagster.claims")
"""Where they are written; the level set here decides which."""

FIELDS: Final = ("event", "outcome", "group", "topic", "partition", "epoch", "instance")
"""What every line has as attributes of its record; None where there is no such thing."""
FURTHER_FIELDS: Final = ("record", "offset", "lease_remaining_s", "reason")
"""What some have."""

_MOST_WAITING: Final = 10_000
TIMEOUT_S: Final = 5.0
"""How long those wait who hold nothing any more until their lines are written."""


class LineWriter:
    """Takes lines and writes them in order; `close` at the end."""

    def __init__(self) -> None:
        self._waiting: Queue[logging.LogRecord | threading.Event] = Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._left_out = 0

    def write(self, level: int, text: str, fields: Mapping[str, object]) -> None:
        """Take a line, with `fields` as attributes; it is left out where too many wait already. Never waits."""
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
        """Wait until what was taken so far is written, for `timeout_s` seconds at most."""
        if self._thread is None or self._is_over.is_set():
            return
        deadline_s = time.monotonic() + timeout_s
        written = threading.Event()
        with suppress(Full):
            self._waiting.put(written, timeout=timeout_s)
            written.wait(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Write what waits, as far as the handlers are done with it in `timeout_s` seconds; take no more."""
        if self._thread is None:
            return
        try:
            self.flush(timeout_s)
        finally:
            is_empty = self._waiting.empty()
            self._is_over.set()
            with suppress(Full):  # then the thread does not wait for a line either
                self._waiting.put_nowait(threading.Event())
        if is_empty:
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while not self._is_over.is_set():
            self._write(self._waiting.get())
        # From here, for whoever closes must not wait for a handler that hangs.
        while not self._waiting.empty():
            self._left_out += isinstance(self._waiting.get_nowait(), logging.LogRecord)
        if self._left_out:
            LOGGER.warning("%d lines on claims were left out: the handlers of log lines are too slow", self._left_out)

    def _write(self, line: logging.LogRecord | threading.Event) -> None:
        if isinstance(line, threading.Event):
            line.set()
            return
        with suppress(Exception):  # a line that cannot be written harms nothing
            LOGGER.handle(line)
