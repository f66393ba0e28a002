"""Parsing of times and durations that an operator enters."""

import re
from datetime import datetime
from typing import Final

from marshal_dagster.errors import ConfigurationError

_DURATION: Final = re.compile(r"(?=\d)(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
_UNITS_S: Final = (86_400, 3_600, 60, 1)
_SECOND_MS: Final = 1_000


def instant_ms(text: str, source: str) -> int:
    """Parse an ISO 8601 time with a time zone and return it in unix milliseconds.

    Raises `ConfigurationError`, whose message begins with `source`.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ConfigurationError(
            f"{source}: {text!r} is not an ISO 8601 time with a time zone; give one such as 2026-01-31T18:00:00Z or "
            "2026-01-31T18:00+01:00"
        )
    try:
        seconds = at.timestamp()
    except OverflowError:
        seconds = -1
    if seconds < 0:
        raise ConfigurationError(f"{source}: {text!r} is before 1970 or out of range; give a later time")
    return round(seconds * _SECOND_MS)


def moment_ms(text: str, source: str, now_ms: int) -> int:
    """Parse a time as `instant_ms` does, or a duration such as 2h, which is that long before `now_ms` (unix ms).

    Raises `ConfigurationError`, whose message begins with `source`.
    """
    if _DURATION.fullmatch(text.replace(" ", "")):
        return now_ms - duration_s(text, source) * _SECOND_MS
    try:
        return instant_ms(text, source)
    except ConfigurationError:
        raise ConfigurationError(
            f"{source}: {text!r} is neither a duration such as 90s, 30m or 2h nor an ISO 8601 time with a time zone, "
            "such as 2026-01-31T18:00:00Z"
        ) from None


def duration_s(text: str, source: str) -> int:
    """Parse a duration such as 90s, 30m, 2h or 1d12h and return it in seconds.

    Raises `ConfigurationError`, whose message begins with `source`.
    """
    match = _DURATION.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigurationError(f"{source}: {text!r} is not a duration; give one such as 90s, 30m, 2h or 1d12h")
    length_s = sum(int(count or 0) * unit_s for count, unit_s in zip(match.groups(), _UNITS_S, strict=True))
    if not length_s:
        raise ConfigurationError(f"{source}: {text!r} is zero; give 1s or more")
    return length_s
