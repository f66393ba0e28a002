"""Keeps the claims of one claimer alive from threads of its own (protocol.md, section 6, "Stay")."""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from marshal_dagster.coordination.base_claimer import RETRY_PART, BaseClaimer
from marshal_dagster.errors import BatchAbortedError, ClaimLostError, CoordinationLogChangedError, MarshalError
from marshal_dagster.protocol.leases import Lease

logger = logging.getLogger(__name__)

LONGEST_PART: Final = 0.9
SHORTEST_PART: Final = 0.7
"""Parts of the heartbeat interval between which the time to the next heartbeat is drawn: jitter only shortens."""
LOOK_PART: Final = 0.25
"""Part of the interval after which the leases, and the reasons to stop, are looked at again."""
LONGEST_GOODBYE_S: Final = 5.0

ReasonToStop = Callable[[], str | None]
"""Says why the work has lost its reason to live (the parent process ended, the run is over), or None."""


class Heartbeats:
    """Sends heartbeats while the `with` block runs, and calls `on_lost` once when the claims are no longer sure.

    `on_lost` gets the error, which `error` keeps; it is called from a thread of the heartbeats and should stop the work
    at once (cancel Spark jobs, say). After that no heartbeat is sent any more.

    One thread beats, another looks at the leases, so that these end the work on time while the first waits for a
    broker; a third asks for reasons to stop, of which who knows may take as long as it likes.
    """

    def __init__(
        self,
        claimer: BaseClaimer[Any],
        on_lost: Callable[[MarshalError], None],
        *,
        reasons_to_stop: Sequence[ReasonToStop] = (),
        seed: int | None = None,
    ) -> None:
        """Prepare; the threads start with the block. `seed` makes the jitter the same each time."""
        self.error: MarshalError | None = None
        self._claimer = claimer
        self._on_lost = on_lost
        self._reasons_to_stop = reasons_to_stop
        self._random = random.Random(seed)  # noqa: S311 - jitter, no secret
        self._interval_ms = claimer.settings.heartbeat_interval_ms
        self._failure = ""
        """Why the last heartbeat failed, in a sentence, if it did."""
        self._due_ms = self._first_due_ms()
        self._stopped = threading.Event()
        self._giving_up = threading.Lock()
        works = (self.step, self.watch, *((self.ask,) if reasons_to_stop else ()))
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=f"{work.__name__} {claimer.topic}", daemon=True)
            for work in works
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and wait a while for a heartbeat under way; a thread that hangs sends nothing any more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(LONGEST_GOODBYE_S)

    def step(self) -> float:
        """Beat if it is time to, else look at the log; return the seconds until the next step.

        The first thread repeats this, at least every quarter of the heartbeat interval.
        """
        now_ms = self._claimer.clock.lease_ms()
        if now_ms >= self._due_ms and not self._stopped.is_set():
            self._due_ms = self._beat(now_ms)
        else:
            self._claimer.look()
        left_ms = self._due_ms - self._claimer.clock.lease_ms()
        return min(max(0.0, left_ms), self._interval_ms * LOOK_PART) / 1_000

    def watch(self) -> float:
        """End the work when a lease has ended, and give the seconds until the next look; what the second repeats."""
        left_ms = self._claimer.lease_left_ms()
        if left_ms is None:
            return self._interval_ms * LOOK_PART / 1_000
        if left_ms <= 0:
            self._give_up(
                ClaimLostError(
                    f"the lease on partitions of {self._claimer.topic!r} ended, as no heartbeat was seen accepted. "
                    f"{self._failure or 'Is the broker down, or was this process stopped?'} Nothing more is committed"
                )
            )
        return (min(left_ms, self._interval_ms * LOOK_PART) + 1) / 1_000

    def ask(self) -> float:
        """End the work when there is a reason to; give the seconds until the next question. What the third repeats."""
        for reason_to_stop in self._reasons_to_stop:
            try:
                reason = reason_to_stop()
            except Exception:
                logger.warning("it could not be told whether the work should stop; it goes on", exc_info=True)
                continue
            if reason is not None:
                raise BatchAbortedError(
                    f"the batch on {self._claimer.topic!r} was stopped: {reason}; nothing more is committed"
                )
        return self._interval_ms * LOOK_PART / 1_000

    def _repeat(self, work: Callable[[], float]) -> None:
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            try:
                wait_s = work()
            except MarshalError as error:
                self._give_up(error)
            except Exception as error:
                self._give_up(
                    BatchAbortedError(f"heartbeats of {self._claimer.topic!r} failed, so the work ends: {error!r}")
                )
                logger.exception("heartbeats failed")

    def _beat(self, now_ms: float) -> float:
        """Send heartbeats; give when the next are due: at once, nearly, should these have failed."""
        try:
            self._claimer.beat()
        except (ClaimLostError, CoordinationLogChangedError):
            raise
        except MarshalError as error:
            self._claimer.require_held()  # what a reading showed counts, though it failed after that
            logger.warning("a heartbeat failed and is tried again: %s", error)
            self._failure = f"The last one failed: {error}."
            return self._claimer.clock.lease_ms() + self._interval_ms * RETRY_PART
        self._failure = ""
        return now_ms + self._next_ms()

    def _give_up(self, error: MarshalError) -> None:
        with self._giving_up:
            if self._stopped.is_set():
                return
            self.error = error
            self._stopped.set()
        # The log may be slow to take a line: the work ends first.
        try:
            self._on_lost(error)
        except Exception:
            logger.exception("the work could not be stopped; its commit will be refused")
        logger.error("heartbeats end: %s", error)

    def _first_due_ms(self) -> float:
        """Count from the oldest claim: it may have been won a while ago."""
        now_ms, left_ms = self._claimer.clock.lease_ms(), self._claimer.lease_left_ms()
        age_ms = 0.0 if left_ms is None else Lease(self._interval_ms, now_ms).left_ms(now_ms) - left_ms
        return now_ms + max(0.0, self._next_ms() - age_ms)

    def _next_ms(self) -> float:
        return self._interval_ms * self._random.uniform(SHORTEST_PART, LONGEST_PART)
