"""Waiting for what is to come."""

import time
from collections.abc import Callable
from typing import Final

WITHIN_S: Final = 20.0
RUN_S: Final = 150.0
"""More than a busy machine takes for a run of Dagster's, or what Spark is to do in one."""


def until(
    condition: Callable[[], object], within_s: float = WITHIN_S, *, what: str = "it holds", pause_s: float = 0.02
) -> float:
    """Wait until `condition` holds; give the seconds that it took. Raises `AssertionError` when it is not in time."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s)
    return time.monotonic() - began_s
