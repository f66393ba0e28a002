"""Texts for operators: times, durations, members and settings. Pages and commands show them alike."""

import re
from datetime import UTC, datetime
from typing import Final

from marshal_dagster._internal.texts import run_text
from marshal_dagster.coordination.claims import is_operator
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.state import Owner

NOTHING: Final = "-"
"""The text for a value that does not exist."""
_TENURE: Final = re.compile(r"[0-9a-f]{12}", re.ASCII)
_MINUTE_S: Final = 60
_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def utc(at_ms: int | None) -> str:
    """Return a unix time as UTC text to the millisecond, `-` for None, or its number beyond the calendar's range."""
    if at_ms is None:
        return NOTHING
    try:
        return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"


def duration(length_ms: float) -> str:
    """Return a duration in its one or two largest units: 1.5 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    seconds = abs(length_ms) / 1_000
    if seconds < _MINUTE_S:
        return f"{seconds:.3g} s"
    for larger_s, larger, smaller_s, smaller in _UNITS:
        if seconds >= larger_s:
            count, rest = divmod(int(seconds), larger_s)
            return f"{count} {larger} {rest // smaller_s} {smaller}"
    raise AssertionError(length_ms)


def settings_text(settings: GroupSettings) -> str:
    """Return a group's settings as text."""
    features = ", ".join(settings.features) or "none"
    return (
        f"heartbeat interval {settings.heartbeat_interval_ms / 1_000:g} s, rule set {settings.rule_set}, "
        f"delivery {settings.delivery}, features {features}"
    )


def short_instance(instance: str) -> str:
    """Return an instance id for a line of text: `run 5b1c0d3e` for a Dagster run, else the id without its suffix.

    The id of a Go consumer has no suffix and stays as it is.
    """
    return run_text(without_suffix(instance))


def without_suffix(instance: str) -> str:
    """Return an instance id without the random suffix of this library's members, such as the id of a Dagster run.

    The id of a Go consumer, such as `host.1`, has no such suffix and stays as it is.
    """
    head, _, suffix = instance.rpartition(".")
    return head if head and _TENURE.fullmatch(suffix) else instance


def member_text(instance: str, client: str) -> str:
    """Return a member for a line of text: `run 5b1c0d3e (flights)`, or only the name of an operator.

    A client id that is the run id, as it is by default, is not shown twice.
    """
    if is_operator(instance):
        return run_text(client)
    shown = short_instance(instance)
    return shown if run_text(client) == shown else f"{shown} ({run_text(client)})"


def owner_text(owner: Owner) -> str:
    """Return an owner for a line of text; see `member_text`."""
    return member_text(owner.instance, owner.client)
