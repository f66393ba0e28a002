"""Sends heartbeats for the claims of one claimer, from separate threads (protocol.md, section 6, "Stay").

A batch starts `Heartbeats` after it has claimed, and stops it before it releases.
"""

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
"""The next heartbeat is due after a random part of the heartbeat interval, between these two."""
LOOK_PART: Final = 0.25
"""The part of the interval after which the leases, and the reasons to stop, are checked again."""
LONGEST_GOODBYE_S: Final = 5.0

ReasonToStop = Callable[[], str | None]
"""Returns why the work must stop (the parent process ended, the run is over), or None."""


class Heartbeats:
    """Sends heartbeats during a `with` block, and calls `on_lost` once if the claims may be lost or the work must stop.

    `on_lost` is called with the error, from a thread of the heartbeats. It should stop the work at once, for example
    cancel Spark jobs. Afterwards `error` has the error, and no more heartbeats are sent.

    There are three threads. One sends the heartbeats. The second watches the leases, so that it can stop the work on
    time while the first waits for a broker. The third calls `reasons_to_stop`, which may take any time.
    """

    def __init__(
        self,
        claimer: BaseClaimer[Any],
        on_lost: Callable[[MarshalError], None],
        *,
        reasons_to_stop: Sequence[ReasonToStop] = (),
        seed: int | None = None,
    ) -> None:
        """Prepare the threads; they start with the block. `seed` makes the jitter reproducible."""
        self.error: MarshalError | None = None
        self._claimer = claimer
        self._on_lost = on_lost
        self._reasons_to_stop = reasons_to_stop
        self._random = random.Random(seed)  # noqa: S311 - jitter, no secret
        self._interval_ms = claimer.settings.heartbeat_interval_ms
        self._failure = ""
        """A sentence that states why the last heartbeat failed, if it did."""
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
        """Stop the threads and wait up to 5 s for each; a thread that hangs sends nothing any more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(LONGEST_GOODBYE_S)

    def step(self) -> float:
        """Send a heartbeat if one is due, else look at the log; return the seconds until the next step.

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
        """Stop the work if a lease has ended; return the seconds until the next check.

        The second thread repeats this.
        """
        left_ms = self._claimer.lease_left_ms()
        if left_ms is None:
            return self._interval_ms * LOOK_PART / 1_000
        if left_ms <= 0:
            self._give_up(
                ClaimLostError(
                    f"group {self._claimer.member.group!r}: the lease on partitions of {self._claimer.topic!r} ended, "
                    "because no heartbeat was accepted in time. "
                    f"{self._failure or 'Check whether the broker was down or this process was suspended.'} "
                    "Nothing more is committed"
                )
            )
        return (min(left_ms, self._interval_ms * LOOK_PART) + 1) / 1_000

    def ask(self) -> float:
        """Stop the work if there is a reason to; return the seconds until the next check.

        The third thread repeats this.

        Raises:
            BatchAbortedError: the work must stop.
        """
        for reason_to_stop in self._reasons_to_stop:
            try:
                reason = reason_to_stop()
            except Exception:
                logger.warning(
                    "group %r, topic %r: the check whether the batch must stop failed, so the batch continues",
                    self._claimer.member.group,
                    self._claimer.topic,
                    exc_info=True,
                )
                continue
            if reason is not None:
                raise BatchAbortedError(
                    f"group {self._claimer.member.group!r}: the batch on {self._claimer.topic!r} was stopped: "
                    f"{reason}; nothing more is committed"
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
                    BatchAbortedError(
                        f"group {self._claimer.member.group!r}: the heartbeats on {self._claimer.topic!r} failed, so "
                        f"the batch was stopped: {error!r}. Nothing more is committed; please report this error"
                    )
                )
                logger.exception(
                    "group %r: the heartbeats on topic %r failed", self._claimer.member.group, self._claimer.topic
                )

    def _beat(self, now_ms: float) -> float:
        """Send heartbeats; return when the next are due (ms of the lease clock), which is very soon if these failed."""
        try:
            self._claimer.beat()
        except (ClaimLostError, CoordinationLogChangedError):
            raise
        except MarshalError as error:
            self._claimer.require_held()  # what the reading showed before it failed counts
            logger.warning(
                "group %r: a heartbeat on topic %r failed and is sent again: %s",
                self._claimer.member.group,
                self._claimer.topic,
                error,
            )
            self._failure = f"The last heartbeat failed: {error}."
            return self._claimer.clock.lease_ms() + self._interval_ms * RETRY_PART
        self._failure = ""
        return now_ms + self._next_ms()

    def _give_up(self, error: MarshalError) -> None:
        with self._giving_up:
            if self._stopped.is_set():
                return
            self.error = error
            self._stopped.set()
        # Writing the log line may be slow: stop the work first.
        try:
            self._on_lost(error)
        except Exception:
            logger.exception(
                "group %r: the batch on topic %r could not be stopped; its commit will fail",
                self._claimer.member.group,
                self._claimer.topic,
            )
        logger.error("the heartbeats have ended: %s", error)

    def _first_due_ms(self) -> float:
        """Return when the first heartbeats are due, counted from the oldest claim."""
        now_ms, left_ms = self._claimer.clock.lease_ms(), self._claimer.lease_left_ms()
        age_ms = 0.0 if left_ms is None else Lease(self._interval_ms, now_ms).left_ms(now_ms) - left_ms
        return now_ms + max(0.0, self._next_ms() - age_ms)

    def _next_ms(self) -> float:
        return self._interval_ms * self._random.uniform(SHORTEST_PART, LONGEST_PART)
