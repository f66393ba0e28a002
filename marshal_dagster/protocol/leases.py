"""Compute the lease of an owner: how long it may trust its claim (protocol.md, section 6, "Stay").

All times are milliseconds of one clock that never jumps and that runs while the machine sleeps. The caller reads the
clock and passes the time.
"""

from dataclasses import dataclass, field

from marshal_dagster.protocol.staleness import stale_after_ms


def safety_margin_ms(heartbeat_interval_ms: int) -> float:
    """Return how long before `2 * HI` a lease ends, so that it does not outlive the claim even if the clock drifts."""
    return heartbeat_interval_ms / 10


def delivery_timeout_ms(heartbeat_interval_ms: int) -> int:
    """Return the longest time that a record may wait in the sender's queue: a quarter of the heartbeat interval."""
    return max(1, heartbeat_interval_ms // 4)


@dataclass(frozen=True, slots=True)
class Lease:
    """The time in which an owner may trust its claim.

    It starts at the *sending* of the last heartbeat, or winning claim, that was acknowledged and read back as accepted.
    """

    heartbeat_interval_ms: int
    sent_ms: float
    ends_ms: float = field(init=False, repr=False)
    """The end (exclusive): the owner must have stopped by then."""

    def __post_init__(self) -> None:
        """Compute the end once, because every step reads it."""
        interval_ms = self.heartbeat_interval_ms
        ends_ms = self.sent_ms + stale_after_ms(interval_ms) - safety_margin_ms(interval_ms)
        object.__setattr__(self, "ends_ms", ends_ms)

    def left_ms(self, now_ms: float) -> float:
        """Return how long the lease still holds at `now_ms`; 0 or negative after its end."""
        return self.ends_ms - now_ms

    def holds(self, now_ms: float) -> bool:
        """Return whether the owner may still act at `now_ms`."""
        return self.left_ms(now_ms) > 0

    def may_send(self, now_ms: float) -> bool:
        """Return whether a record that is sent at `now_ms` arrives before the lease ends, or is never delivered."""
        return self.left_ms(now_ms) > delivery_timeout_ms(self.heartbeat_interval_ms)

    def renewed(self, by: "Lease") -> "Lease":
        """Return the later one of this lease and `by`, the lease of a heartbeat that was read back as accepted."""
        return by if by.sent_ms > self.sent_ms else self
