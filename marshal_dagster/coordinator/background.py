"""Periodic calls in the background, so that Kafka requests never block a coordinator's thread (`service`)."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from marshal_dagster.errors import MarshalError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PeriodicCall(Generic[T]):
    """A function that an executor calls every `interval_ms`, but never twice at once; `use` receives its result."""

    def __init__(self, name: str, call: Callable[[], T], use: Callable[[T], None], interval_ms: float) -> None:
        """Make the first call due at the first `poll`.

        Args:
            name: A name for log lines.
            call: The function to call in the background. It may raise a `MarshalError`.
            use: Receives each result, in the thread that calls `poll`.
            interval_ms: The least time between two calls, in milliseconds.
        """
        self._name, self._call, self._use, self._interval_ms = name, call, use, interval_ms
        self._running: Future[T] | None = None
        self.next_ms = 0.0
        """When the next call is due."""
        self.failure: MarshalError | None = None
        """The error of the last call; None if it succeeded."""

    def poll(self, executor: Executor, now_ms: float) -> None:
        """Process the result of a finished call, and start the next call if it is due."""
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
        """Ignore the result of a call that is still running."""
        self._running = None
