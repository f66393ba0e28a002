"""Runs of consecutive whole numbers, each a list of its first and its last number."""

from collections.abc import Iterable, Sequence


def merged(runs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return runs, which are sorted by their first number, without those that overlap or adjoin an earlier one.

    The earlier run is extended instead: `[1, 2], [3, 3], [7, 7]` become `[1, 3], [7, 7]`.
    """
    found: list[list[int]] = []
    for first, last in runs:
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(last, found[-1][1])
        else:
            found.append([first, last])
    return found


def runs_text(numbers: Iterable[int], separator: str = ", ") -> str:
    """Return numbers as text in ascending order, neighbours together: `0-2, 5`."""
    runs = merged((number, number) for number in sorted(numbers))
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
