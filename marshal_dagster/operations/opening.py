"""How the coordination log is opened for who looks, and for who writes."""

from collections.abc import Callable
from typing import Final

from marshal_dagster.coordination.rationalizer import Rationalizer

OpenForInterval = Callable[[int], Rationalizer]
"""Opens a reader on a coordination log that can be written as members of that heartbeat interval (ms) write it."""
LOOKING_MS: Final = 60_000
"""The interval for who looks: nothing is written."""
