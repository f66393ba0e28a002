"""Texts of lists, short enough for a message."""

from collections.abc import Sequence


def first_few(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Join the first `most` of `items`, and state how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more
