"""Decide when an owner without heartbeats is stale (protocol.md, section 3.3). No other module repeats the formula."""

from enum import StrEnum
from typing import Final

GO_ALLOWANCE_MS: Final = 1_000
"""How much longer than the rules require a member of a Go group waits, because Go judges by wall clocks.

See protocol.md, section 7.
"""


class Freshness(StrEnum):
    """The age of an owner's last heartbeat, as tools show it; rules use only whether it is `STALE`."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


def stale_after_ms(heartbeat_interval_ms: int) -> int:
    """Return how long after its last heartbeat an owner is live; one millisecond later it is stale."""
    return 2 * heartbeat_interval_ms


def freshness(silent_ms: int, heartbeat_interval_ms: int) -> Freshness:
    """Classify an owner by the age `silent_ms` of its last heartbeat; at exactly 2 intervals it is not stale yet."""
    if silent_ms <= heartbeat_interval_ms:
        return Freshness.FRESH
    return Freshness.UNKNOWN if silent_ms <= stale_after_ms(heartbeat_interval_ms) else Freshness.STALE
