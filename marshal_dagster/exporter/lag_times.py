"""Turn a lag in offsets into seconds, by the times at which the end of a data partition passed an offset.

Kafka finds the offset of a time, but not the time of an offset. So the ends of each refresh are kept with their times.
For positions before the first of them, Kafka is asked once for the offsets of times in the past.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

OLDEST_S: Final = 7 * 86_400.0
"""An older record counts as that old, unless the exporter has seen it for longer."""
SEED_AGES_S: Final = (*(15.0 * 2**power for power in range(16)), OLDEST_S)
"""The ages for which Kafka is asked, from the first, until one is older than the position; each doubles the last."""
_MOST_POINTS: Final = 32


class EndTimes:
    """The ends that one data partition had, with the last time at which it had each of them.

    The first end may be there twice, with its first and its last time: records before it are older than the first.
    """

    __slots__ = ("_ends", "_times_s")

    def __init__(self) -> None:
        """Start without a point."""
        self._ends = array("q")
        self._times_s = array("d")

    def note(self, end: int, at_s: float) -> None:
        """Record the partition's end at `at_s` (unix seconds). A smaller end starts again: the topic is another one."""
        if self._ends and end < self._ends[-1]:
            del self._ends[:], self._times_s[:]
        if len(self._ends) > 1 and end == self._ends[-1]:
            self._times_s[-1] = at_s
            return
        self._ends.append(end)
        self._times_s.append(at_s)
        if len(self._ends) > _MOST_POINTS:  # every second of the older half is dropped
            half = _MOST_POINTS // 2
            del self._ends[1:half:2], self._times_s[1:half:2]

    def seed(self, points: Mapping[float, int]) -> None:
        """Add points from before the first one: for times (unix seconds) the first offset of that time or later."""
        for at_s, end in sorted(points.items(), reverse=True):
            if not self._ends or end > self._ends[0] or at_s >= self._times_s[0]:
                continue
            if self._ends[:2].count(end) == 2:  # noqa: PLR2004 - the first and the last time of one end are enough
                self._times_s[0] = at_s
                continue
            self._ends.insert(0, end)
            self._times_s.insert(0, at_s)

    def knows(self, offset: int) -> bool:
        """Return whether a point at or before `offset` is known."""
        return bool(self._ends) and self._ends[0] <= offset

    def forget_before(self, offset: int) -> None:
        """Drop the points that no position at `offset` or later needs."""
        unneeded = bisect_right(self._ends, offset) - 1
        if unneeded > 0:
            del self._ends[:unneeded], self._times_s[:unneeded]

    def age_s(self, offset: int, at_s: float) -> float | None:
        """Return how long before `at_s` the record at `offset` was written, in seconds; None without a point.

        Between two points it is interpolated. A record before the first point is at least as old as that.
        """
        if not self._ends:
            return None
        before = bisect_right(self._ends, offset) - 1
        if before < 0:
            return max(0.0, at_s - self._times_s[0])
        time_s = self._times_s[before]
        if before + 1 < len(self._ends):
            end, next_end = self._ends[before], self._ends[before + 1]
            time_s += (offset - end) / (next_end - end) * (self._times_s[before + 1] - time_s)
        return max(0.0, at_s - time_s)


class LagTimes:
    """The end times of all data partitions."""

    def __init__(self) -> None:
        """Start without any partition."""
        self._topics: dict[str, dict[int, EndTimes]] = {}

    def of(self, topic: str, partition: int) -> EndTimes:
        """Return the end times of a partition."""
        partitions = self._topics.setdefault(topic, {})
        found = partitions.get(partition)
        if found is None:
            found = partitions[partition] = EndTimes()
        return found

    def keep_topics(self, topics: Mapping[str, object]) -> None:
        """Forget all topics that are not in `topics`."""
        for topic in self._topics.keys() - topics.keys():
            del self._topics[topic]
