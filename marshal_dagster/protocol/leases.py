"""How long an owner may believe in its own claim (protocol.md, section 6, "Stay").

All times are milliseconds of one clock that neither jumps nor stops while the machine sleeps; it is read by the
caller and arrives here as a number.
"""

from dataclasses import dataclass, field

from marshal_dagster.protocol.staleness import stale_after_ms


def safety_margin_ms(heartbeat_interval_ms: int) -> float:
    """How much earlier than `2 * HI` a lease ends, so that no clock's drift lets it outlive the claim."""
    return heartbeat_interval_ms / 10


def delivery_timeout_ms(heartbeat_interval_ms: int) -> int:
    """The longest time for which a record may wait in the sender's queue, at most a quarter of the interval."""
    return max(1, heartbeat_interval_ms // 4)


@dataclass(frozen=True, slots=True)
class Lease:
    """The time for which one claim is surely still its owner's.

    It is counted from the *sending* of the last heartbeat or winning claim that was acknowledged and seen accepted.
    """

    heartbeat_interval_ms: int
    sent_ms: float
    ends_ms: float = field(init=False, repr=False)
    """When the owner must have stopped."""

    def __post_init__(self) -> None:
        """Work out the end once: it is asked for at every step."""
        interval_ms = self.heartbeat_interval_ms
        ends_ms = self.sent_ms + stale_after_ms(interval_ms) - safety_margin_ms(interval_ms)
        object.__setattr__(self, "ends_ms", ends_ms)

    def left_ms(self, now_ms: float) -> float:
        """How long it still holds at `now_ms`; not positive once it has ended."""
        return self.ends_ms - now_ms

    def holds(self, now_ms: float) -> bool:
        """Tell whether the owner may still act at `now_ms`."""
        return self.left_ms(now_ms) > 0

    def may_send(self, now_ms: float) -> bool:
        """Tell whether a record of the claim may be sent at `now_ms`: it cannot arrive after the lease's end."""
        return self.left_ms(now_ms) > delivery_timeout_ms(self.heartbeat_interval_ms)

    def renewed(self, by: "Lease") -> "Lease":
        """Give the lease after a heartbeat that brings `by` was seen accepted; it never gets shorter."""
        return by if by.sent_ms > self.sent_ms else self
