"""The clocks of a member: one to measure leases, one for the time of day. Tests and the simulator have their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """The time as a member sees it."""

    def lease_ms(self) -> float:
        """Return the time in ms of a clock that does not jump, and does not stop while the machine sleeps."""
        ...

    def wall_ms(self) -> int:
        """Return the unix time in ms; it is used for advice, and no rule depends on it."""
        ...

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait for `duration_ms` milliseconds."""
        ...


class SystemClock:
    """This machine's clocks: CLOCK_BOOTTIME and the time of day."""

    def lease_ms(self) -> float:
        """Return the ms since boot, including the time that the machine slept."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000

    def wall_ms(self) -> int:
        """Return the unix time in ms."""
        return time.time_ns() // 1_000_000

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep for `duration_ms` milliseconds."""
        time.sleep(duration_ms / 1_000)
