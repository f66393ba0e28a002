"""Watches the claims of another process in the coordination log (protocol.md, section 3.3). It sends no records.

A script that processes a batch outside of its run uses it: the run holds the claims and sends the heartbeats, and the
script reads in the log whether it still does.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import BatchAbortedError, ClaimLostError, IncompleteLogError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import coordination_partition
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import Key

T = TypeVar("T")

RETRY_MS: Final = 200.0
"""How long to wait before brokers that did not answer are asked again, in ms."""


class ClaimWatch:
    """The claims of one instance on the ranges of a batch, as another process reads them in the log.

    A claim holds while the log shows the same instance and epoch as its owner, and while a later heartbeat is read
    within two heartbeat intervals. `marshal_dagster.sinks` fences a process that stops later than that.
    """

    def __init__(
        self, rationalizer: Rationalizer, instance: str, ranges: Sequence[ClaimedRange], clock: Clock | None = None
    ) -> None:
        """Watch the claims of `instance` on `ranges`, which belong to one group and topic; nothing is read yet."""
        self._rationalizer = rationalizer
        self._instance = instance
        self._ranges = tuple(ranges)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._interval_ms = 0
        self._beats: dict[int, tuple[int, float]] = {}
        """For each partition the log time of the last heartbeat, and when this process first read it (lease clock)."""

    @property
    def interval_ms(self) -> int:
        """The heartbeat interval of the group in ms, as last read."""
        return self._interval_ms

    def require_held(self) -> None:
        """Read the log to its end, and check that the claims hold.

        Brokers that do not answer are asked again until the last heartbeat is too old.

        Raises:
            ClaimLostError: a claim was released or revoked, or another instance has taken it.
            BatchAbortedError: no heartbeat came for two heartbeat intervals.
            IncompleteLogError: the log can only be observed, because it does not begin at offset 0.
            CoordinationLogChangedError: the log is not the one that was read before.
            UnavailableError: the log did not answer to the first reading.
        """
        self.while_fresh(self._look)

    def while_fresh(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns; call it again after an `UnavailableError` while the claims are fresh.

        Raises:
            BatchAbortedError: no heartbeat came for two heartbeat intervals.
            UnavailableError: `ask` raised it before the claims were read for the first time.
        """
        while True:
            try:
                return ask()
            except UnavailableError:
                if not self._beats:
                    raise
                self._require_fresh()
                self._clock.sleep_ms(RETRY_MS)

    def _look(self) -> None:
        began_ms = self._clock.lease_ms()
        with self._rationalizer.lock:
            self._rationalizer.catch_up()
            log_time_ms, beats = self._read_beats()
        with self._lock:
            for partition, beat_ms in beats.items():
                if self._beats.get(partition, (None, 0.0))[0] != beat_ms:
                    self._beats[partition] = beat_ms, began_ms
        silent_ms = log_time_ms - min(beats.values(), default=log_time_ms)
        if silent_ms > stale_after_ms(self._interval_ms):
            raise self._silent(silent_ms)
        self._require_fresh()

    def _read_beats(self) -> tuple[int, dict[int, int]]:
        """Return log time and the last heartbeat of each partition, in ms; raise if a claim is not held."""
        world, first = self._rationalizer.world, self._ranges[0]
        home = world.partitions[coordination_partition(first.topic, self._rationalizer.identity.partitions)]
        if not home.certain:
            raise IncompleteLogError(
                f"coordination partition {home.number} of {self._rationalizer.identity.topic!r} can only be observed, "
                f"so it is not known whether batch {self._instance} is still claimed: nothing is written. Run "
                "`marshal-dagster recover`"
            )
        self._interval_ms = world.group_of(first.group, first.topic).settings.heartbeat_interval_ms
        keys = {range_: world.key(first.group, first.topic, range_.partition) for range_ in self._ranges}
        return home.log_time_ms or 0, {range_.partition: self._beat(range_, key) for range_, key in keys.items()}

    def _beat(self, range_: ClaimedRange, key: Key) -> int:
        """Return the log time of the last heartbeat for a range; raise `ClaimLostError` if it is not held."""
        claim = (self._instance, range_.epoch)
        if key.generation == range_.generation:
            if key.owner is not None and (key.owner.instance, key.owner.epoch) == claim:
                return key.last_beat_ms
            for part in key.ranges:
                if part.owner is not None and (part.owner.instance, part.owner.epoch) == claim:
                    return part.last_beat_ms
        owners = key.owners_within(range_.start, range_.end)
        holder = ", ".join(f"client {owner.client!r}, instance {owner.instance!r}" for owner in owners) or "no instance"
        raise ClaimLostError(
            f"group {range_.group!r}: the claim of batch {self._instance} on {range_} has ended; it is held by "
            f"{holder} now. The script writes nothing more, and the next run repeats what was not committed"
        )

    def _require_fresh(self) -> None:
        now_ms = self._clock.lease_ms()
        with self._lock:
            silent_ms = max((now_ms - read_ms for _, read_ms in self._beats.values()), default=0.0)
        if silent_ms > stale_after_ms(self._interval_ms):
            raise self._silent(silent_ms)

    def _silent(self, silent_ms: float) -> BatchAbortedError:
        return BatchAbortedError(
            f"no heartbeat of batch {self._instance} of topic {self._ranges[0].topic!r} came for "
            f"{silent_ms / 1_000:.1f} s: its run has died, or the brokers cannot be reached. The script writes nothing "
            "more, and the next run repeats the batch"
        )
