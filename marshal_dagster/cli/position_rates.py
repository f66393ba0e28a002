"""How fast positions move, from one look at the world state to the next."""

from collections import deque
from typing import Final

from marshal_dagster.cli.world_view import WorldView
from marshal_dagster.protocol.state import DataPartitionId

WINDOW_S: Final = 60.0


class PositionRates:
    """Remembers where keys stood at the looks of the last minute: positions move in steps, a batch at a time."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, DataPartitionId], deque[tuple[float, int]]] = {}
        self._generations: dict[tuple[str, DataPartitionId], int] = {}

    def note(self, looked: WorldView, at_s: float) -> None:
        """Take in a look; `at_s` is of a clock that does not jump."""
        seen: dict[tuple[str, DataPartitionId], deque[tuple[float, int]]] = {}
        for group in looked.groups:
            for each in group.keys:
                key, offset = (group.name, each.place), each.key.offset
                if offset is None:
                    continue
                before = self._seen.get(key, deque())
                if self._generations.get(key) != each.key.generation or (before and before[-1][1] > offset):
                    before = deque()  # it was set: no measure of work done
                before.append((at_s, offset))
                while len(before) > 2 and before[1][0] <= at_s - WINDOW_S:  # noqa: PLR2004 - two make a difference
                    before.popleft()
                seen[key] = before
                self._generations[key] = each.key.generation
        self._seen = seen

    def per_second(self, group: str, place: DataPartitionId) -> float | None:
        """Give the offsets per second by which a key moved on; None where it was not seen twice."""
        seen = self._seen.get((group, place))
        if seen is None:
            return None
        (begun_s, begun), (at_s, offset) = seen[0], seen[-1]
        return (offset - begun) / (at_s - begun_s) if at_s > begun_s else None
