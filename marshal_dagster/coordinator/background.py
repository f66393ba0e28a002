"""Calls that a coordinator's thread has made in the background, now and then, and looks at when they are done."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from marshal_dagster.errors import MarshalError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PeriodicCall(Generic[T]):
    """A call that is made every `interval_ms`, and not again before it is done; `use` receives what it returns."""

    def __init__(self, name: str, call: Callable[[], T], use: Callable[[T], None], interval_ms: float) -> None:
        """Call nothing yet; the first call is due."""
        self._name, self._call, self._use, self._interval_ms = name, call, use, interval_ms
        self._running: Future[T] | None = None
        self.next_ms = 0.0
        """When the next call is due."""
        self.failure: MarshalError | None = None
        """What the last call has failed with."""

    def poll(self, executor: Executor, now_ms: float) -> None:
        """Use what a call that is done has returned; begin the next one if it is due."""
        if self._running is not None and self._running.done():
            try:
                self._use(self._running.result())
                self.failure = None
            except MarshalError as error:
                if str(error) != str(self.failure):
                    logger.warning("%s: %s", self._name, error)
                self.failure = error
            self._running = None
        if self._running is None and now_ms >= self.next_ms:
            self.next_ms = now_ms + self._interval_ms
            self._running = executor.submit(self._call)

    def forget(self) -> None:
        """Take no notice of a call that has not ended."""
        self._running = None
