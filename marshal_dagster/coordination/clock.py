"""The two clocks a member has, one to count its leases by, one to tell the time; and how it waits."""

import time
from typing import Protocol


class Clock(Protocol):
    """What a member knows of time; the simulator and tests bring their own."""

    def lease_ms(self) -> float:
        """Milliseconds of a clock that neither jumps nor stops while the machine sleeps."""
        ...

    def wall_ms(self) -> int:
        """Unix time in milliseconds: advice, never a decision."""
        ...

    def sleep_ms(self, duration_ms: float) -> None:
        """Let `duration_ms` milliseconds pass."""
        ...


class SystemClock:
    """This machine's clocks: CLOCK_BOOTTIME and the time of day."""

    def lease_ms(self) -> float:
        """Milliseconds since boot, the time asleep included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000

    def wall_ms(self) -> int:
        """Unix time in milliseconds."""
        return time.time_ns() // 1_000_000

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep."""
        time.sleep(duration_ms / 1_000)
