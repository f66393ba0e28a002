"""Texts for a paused group, shared by errors, idle batches, sensors, tables and the command line."""

from collections.abc import Mapping
from typing import Final

from marshal_dagster._internal.texts import run_text, utc_to_second
from marshal_dagster.protocol.state import PauseOrigin

SETTING: Final = "setting-positions"
"""The prefix of the instance ids that set positions; their pauses are never restored."""
PUTTING_BACK: Final = "putting-back"
"""The prefix of the instance ids that restore a previous pause."""
_ROLES: Final[Mapping[str, str]] = {
    SETTING: ", for the time of a change",
    PUTTING_BACK: ", who restored it after a change",
}


def origin_text(origin: PauseOrigin) -> str:
    """Return who paused a group, and why: `jane@host (reason: the database moves)`; the instance if it is all we know.

    Example:
        ```python
        origin_text(PauseOrigin("operator.0f1e2d3c4b5a", "jane@host", "the database moves"))
        ```
    """
    role = "" if origin.client is None else _ROLES.get((origin.instance or "").partition(".")[0], "")
    reason = "" if origin.reason is None else f" (reason: {origin.reason})"
    return f"{run_text(origin.client or origin.instance or 'an unknown member')}{role}{reason}"


def pause_end_text(until: str, by: PauseOrigin | None = None) -> str:
    """Return the text for the end of a pause, with who began it and why, if that is to be shown."""
    return until + (f" by {origin_text(by)}" if by else "")


def paused_text(until: str, by: PauseOrigin | None = None) -> str:
    """Return the text for a pause that ends at `until`."""
    return f"paused until {pause_end_text(until, by)}"


def paused_group_text(group: str, until_s: int | None, by: PauseOrigin | None = None) -> str:
    """Return the text for `group`, paused until `until_s` (unix seconds)."""
    until = "an unknown time" if until_s is None else utc_to_second(until_s)
    return f"group {group!r} is {paused_text(until, by)}"


def resume_command(group: str) -> str:
    """Return the command that ends the pause of a group."""
    import shlex

    return shlex.join(["marshal-dagster", "resume", group])
