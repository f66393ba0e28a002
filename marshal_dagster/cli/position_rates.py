"""Measure how fast positions move, from the world states that `top` read within the last minute."""

from collections import deque
from typing import Final, NamedTuple

from marshal_dagster.cli.world_view import WorldView
from marshal_dagster.protocol.state import DataPartitionId

WINDOW_S: Final = 60.0


class _Seen(NamedTuple):
    at_s: float
    offset: int
    generation: int


class PositionRates:
    """The positions of keys within the last minute. They move in steps, one batch at a time."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, DataPartitionId], deque[_Seen]] = {}

    def note(self, view: WorldView, at_s: float) -> None:
        """Add the positions in `view`, at the time `at_s` of a monotonic clock."""
        keys = [(group.name, key) for group in view.groups for key in group.keys]
        self._seen = {
            (group, key.place): self._with(group, key.place, _Seen(at_s, key.key.offset, key.key.generation))
            for group, key in keys
            if key.key.offset is not None
        }

    def _with(self, group: str, place: DataPartitionId, now: _Seen) -> deque[_Seen]:
        seen = self._seen.get((group, place), deque())
        if seen and (seen[-1].generation != now.generation or seen[-1].offset > now.offset):
            seen = deque()  # the position was set, not reached by processing
        seen.append(now)
        while len(seen) > 2 and seen[1].at_s <= now.at_s - WINDOW_S:  # noqa: PLR2004 - a rate needs two
            seen.popleft()
        return seen

    def per_second(self, group: str, place: DataPartitionId) -> float | None:
        """Return by how many offsets per second a key moved, or None if it was seen only once."""
        seen = self._seen.get((group, place))
        if seen is None or seen[-1].at_s <= seen[0].at_s:
            return None
        return (seen[-1].offset - seen[0].offset) / (seen[-1].at_s - seen[0].at_s)
