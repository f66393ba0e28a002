"""Saying in one line what went wrong in Spark."""

import re
from typing import Final

_TRACEBACK: Final = "Traceback (most recent call last):"
_LOST_TASK: Final = re.compile(r"Job aborted due to stage failure: .*? \(TID \d+\) \([^)]*\): ")


def first_line(error: BaseException) -> str:
    """Return what an error says in one line; of one that Java raised, Java's, and of a Python worker's, Python's."""
    text = str(error)
    if _TRACEBACK in text:
        raised = text.rpartition(_TRACEBACK)[2].splitlines()
        return next((line.strip() for line in raised if line and not line[0].isspace()), type(error).__name__)
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
    return _LOST_TASK.sub("", line)
