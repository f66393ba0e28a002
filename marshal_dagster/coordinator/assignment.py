"""Which member is to work on which partition: strategies, each a pure function of partitions and members.

The result is advice: claims in the coordination log decide which member works on what.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from marshal_dagster.errors import ConfigurationError

DataPartitionId = tuple[str, int]
"""A topic and the number of a partition of it."""

Assignment = dict[DataPartitionId, str]
"""The member of each partition; a partition without subscribers is not in it."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member of a group: the topics that it takes, and its share of the work relative to others."""

    id: str
    topics: frozenset[str]
    capacity: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for a capacity below 1."""
        if self.capacity < 1:
            raise ConfigurationError(f"capacity of member {self.id!r}: {self.capacity}; give at least 1")


@dataclass(frozen=True, slots=True)
class AssignmentInput:
    """What a strategy assigns: partitions with their weights, members, and the member that had each before."""

    places: Mapping[DataPartitionId, float]
    members: Sequence[Subscriber]
    previous: Mapping[DataPartitionId, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for two members of one id, or a weight below 0."""
        if len({member.id for member in self.members}) < len(self.members):
            raise ConfigurationError("two members have the same id")
        if any(weight < 0 for weight in self.places.values()):
            raise ConfigurationError("a partition weighs less than 0")

    def subscribers(self) -> dict[str, list[Subscriber]]:
        """Return the members of each topic, by id."""
        found: dict[str, list[Subscriber]] = {topic: [] for topic, _ in self.places}
        for member in sorted(self.members, key=lambda member: member.id):
            for topic in member.topics & found.keys():
                found[topic].append(member)
        return found


Strategy = Callable[[AssignmentInput], Assignment]


def range_assignment(board: AssignmentInput) -> Assignment:
    """Assign neighbouring partitions to each member of a topic; of every topic the first members have one more."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(board.places):
        numbers[topic].append(number)
    found: Assignment = {}
    for topic, members in board.subscribers().items():
        for member, part in zip(members, _parts(numbers[topic], len(members)), strict=True):
            found |= {(topic, number): member.id for number in part}
    return found


def round_robin_assignment(board: AssignmentInput) -> Assignment:
    """Assign the partitions of all topics in turn; members that do not take a topic are skipped."""
    members = sorted(board.members, key=lambda member: member.id)
    found: Assignment = {}
    turn = 0
    for place in sorted(board.places):
        for skipped in range(len(members)):
            member = members[(turn + skipped) % len(members)]
            if place[0] in member.topics:
                found[place] = member.id
                turn += skipped + 1
                break
    return found


def sticky_assignment(board: AssignmentInput) -> Assignment:
    """Spread the partitions evenly by number and capacity, with as few moves as possible."""
    return _Balancer(board, dict.fromkeys(board.places, 1)).run()


def weighted_assignment(board: AssignmentInput) -> Assignment:
    """Spread the weights, such as lag, by capacity: the heaviest first; its previous member if that is as good."""
    return _Balancer(board, {place: round(weight) + 1 for place, weight in board.places.items()}).run()


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "range": range_assignment,
        "round_robin": round_robin_assignment,
        "sticky": sticky_assignment,
        "weighted": weighted_assignment,
    }
)


def count_moves(before: Mapping[DataPartitionId, str], after: Mapping[DataPartitionId, str]) -> int:
    """Return how many partitions change hands."""
    return sum(before.get(place) != after.get(place) for place in before.keys() | after.keys())


class _Balancer:
    """Levels the loads of members: moves one partition at a time from the fullest to the emptiest that takes it."""

    def __init__(self, board: AssignmentInput, weights: Mapping[DataPartitionId, int]) -> None:
        self._board = board
        self._weights = weights
        self._subscribers = board.subscribers()
        self._by_id = {member.id: member for member in board.members}
        self._loads = dict.fromkeys(self._by_id, 0)
        self._held: dict[str, dict[str, list[DataPartitionId]]] = {name: defaultdict(list) for name in self._by_id}
        """The partitions of each member, by topic, the lightest last."""
        self._kinds: dict[_Kind, list[Subscriber]] = defaultdict(list)
        for member in sorted(board.members, key=lambda member: member.id):
            self._kinds[_kind(member)].append(member)

    def run(self) -> Assignment:
        unassigned = self._keep()
        self._place(unassigned)
        self._level()
        return {place: name for name, topics in self._held.items() for places in topics.values() for place in places}

    def _keep(self) -> list[DataPartitionId]:
        """Leave with each member what it had and still takes; return the rest, the heaviest first."""
        unassigned = []
        heaviest_first = sorted(self._board.places)
        heaviest_first.sort(key=self._weights.__getitem__, reverse=True)
        before, by_id, held, loads, weights = self._board.previous, self._by_id, self._held, self._loads, self._weights
        for place in heaviest_first:
            name, topic = before.get(place, ""), place[0]
            member = by_id.get(name)
            if member is not None and topic in member.topics:
                held[name][topic].append(place)
                loads[name] += weights[place]
            elif self._subscribers[topic]:
                unassigned.append(place)
        return unassigned

    def _place(self, places: Iterable[DataPartitionId]) -> None:
        heaps = self._heaps()
        for place in places:
            _, member = self._least(heaps, place[0], self._weights[place])
            heapq.heappop(heaps[_kind(member)])
            self._give(place, member)
            heapq.heappush(heaps[_kind(member)], (self._loads[member.id], member.id))

    def _level(self) -> None:
        """Move from the fullest member to the emptiest that takes it, while that leaves both below the fullest."""
        while self._level_once():
            pass

    def _level_once(self) -> bool:
        """Do so; return whether a member had nothing to give before another gave something: it may have now."""
        had_nothing = may_have_more = False
        # Where all partitions weigh the same and all members take the same, no other can have what the fullest has not.
        is_one_for_all = len({topics for topics, _ in self._kinds}) == len(set(self._weights.values())) == 1
        heaps = self._heaps()
        fullest = [(-self._share(member), member.id) for member in self._board.members]
        heapq.heapify(fullest)
        while fullest:
            share, name = heapq.heappop(fullest)
            member = self._by_id[name]
            if -share != self._share(member):
                continue
            found = self._better(heaps, member)
            if found is None and is_one_for_all:
                break
            if found is None:
                had_nothing = True
                continue
            may_have_more = had_nothing
            place, other = found
            self._held[name][place[0]].remove(place)
            self._loads[name] -= self._weights[place]
            self._give(place, other)
            for changed in (member, other):
                heapq.heappush(heaps[_kind(changed)], (self._loads[changed.id], changed.id))
                heapq.heappush(fullest, (-self._share(changed), changed.id))
        return may_have_more

    def _better(self, heaps: "_Heaps", member: Subscriber) -> tuple[DataPartitionId, Subscriber] | None:
        """Return the heaviest partition of a member that would be better with another, and that other."""
        best: tuple[float, DataPartitionId, Subscriber] | None = None
        share = self._share(member)
        for topic, places in self._held[member.id].items():
            for place in places:
                after, other = self._least(heaps, topic, self._weights[place])
                if after < share and (best is None or after > best[0]):
                    best = (after, place, other)
                if self._weights[places[0]] == self._weights[places[-1]]:
                    break
        return None if best is None else (best[1], best[2])

    def _heaps(self) -> "_Heaps":
        heaps = {
            kind: [(self._loads[member.id], member.id) for member in members] for kind, members in self._kinds.items()
        }
        for heap in heaps.values():
            heapq.heapify(heap)
        return heaps

    def _least(self, heaps: "_Heaps", topic: str, weight: int) -> tuple[float, Subscriber]:
        """Return the load with `weight` added, and the member for which that is the least of those that take a topic.

        There must be one. Older loads in a heap are dropped.
        """
        found: list[tuple[float, str]] = []
        for (topics, capacity), heap in heaps.items():
            if topic not in topics:
                continue
            while heap[0][0] != self._loads[heap[0][1]]:
                heapq.heappop(heap)
            load, name = heap[0]
            found.append(((load + weight) / capacity, name))
        after, name = min(found)
        return after, self._by_id[name]

    def _share(self, member: Subscriber) -> float:
        return self._loads[member.id] / member.capacity

    def _give(self, place: DataPartitionId, member: Subscriber) -> None:
        self._held[member.id][place[0]].append(place)
        self._loads[member.id] += self._weights[place]


_Kind = tuple[frozenset[str], int]
"""Topics and capacity: members that have the same are alike to an assignment."""

_Heaps = dict[_Kind, list[tuple[int, str]]]


def _kind(member: Subscriber) -> _Kind:
    return member.topics, member.capacity


def _parts(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Cut a sequence into neighbouring parts, of which the first have one more."""
    if count == 0:
        return []
    width, more = divmod(len(numbers), count)
    starts = [part * width + min(part, more) for part in range(count + 1)]
    return [numbers[start:end] for start, end in pairwise(starts)]
