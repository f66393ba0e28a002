"""When an owner that sends no heartbeat counts as stale (protocol.md, section 3)."""

from enum import StrEnum
from typing import Final

GO_ALLOWANCE_MS: Final = 1_000
"""How much longer than the rules require a member waits in a Go group: Go judges by wall clocks.

See protocol.md, section 7.
"""


class Freshness(StrEnum):
    """How long ago an owner sent its last heartbeat, for showing; only `STALE` decides anything."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


def stale_after_ms(heartbeat_interval_ms: int) -> int:
    """Return for how long after its last heartbeat an owner is live; a millisecond later it is stale."""
    return 2 * heartbeat_interval_ms


def freshness(silent_ms: int, heartbeat_interval_ms: int) -> Freshness:
    """Classify an owner whose last heartbeat is `silent_ms` old: exactly 2 intervals are not stale yet."""
    if silent_ms <= heartbeat_interval_ms:
        return Freshness.FRESH
    return Freshness.UNKNOWN if silent_ms <= stale_after_ms(heartbeat_interval_ms) else Freshness.STALE
