"""What a check comes to."""

from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found; where that is not right, why it matters and the command that mends it."""

    name: str
    state: CheckState
    found: str
    why: str = ""
    mend: str = ""
