"""Short texts for lists in messages."""

from collections.abc import Sequence


def first_few(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Join the first `most` of `items`, followed by the number of those left out."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more
