"""Short texts in messages: lists, numbers, times and run ids."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final


def first_few(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Join the first `most` of `items`, followed by the number of those left out."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def counted(number: int, what: str) -> str:
    """Return a number with the name of what is counted, such as `1 row` or `5,632 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def nearest_first(wanted: str, names: Iterable[str]) -> list[str]:
    """Return `names` with those first that are most like `wanted`."""
    from difflib import SequenceMatcher

    return sorted(names, key=lambda name: (-SequenceMatcher(None, wanted.lower(), name.lower()).ratio(), name))


def run_text(name: str) -> str:
    """Return `run 5b1c0d3e` if `name` is a Dagster run id, else `name`."""
    return f"run {name[:_SHORT_RUN]}" if _RUN.fullmatch(name) else name


def utc_to_second(at_s: int) -> str:
    """Return a unix time in seconds as UTC text, such as 2026-01-31 18:00:00Z, or its number after the year 9999."""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return f"{at_s} s after 1970"


_RUN: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_SHORT_RUN: Final = 8
"""How many characters of a run id are shown; the Dagster UI shows as many."""
