"""Who is to work on which partition: strategies, each a pure function of what there is.

The result is advice: claims in the coordination log decide who works on what.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from marshal_dagster.errors import ConfigurationError

Place = tuple[str, int]
"""A topic and the number of a partition of it."""

Assignment = dict[Place, str]
"""The member of each partition; one that nobody subscribes to is not in it."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member of a group: the topics that it takes, and how much of the work next to others."""

    id: str
    topics: frozenset[str]
    capacity: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for a capacity that cannot be."""
        if self.capacity < 1:
            raise ConfigurationError(f"capacity of member {self.id!r}: {self.capacity}; give at least 1")


@dataclass(frozen=True, slots=True)
class AssignmentInput:
    """What there is to assign: partitions with their weight, members, and who had which before."""

    places: Mapping[Place, float]
    members: Sequence[Subscriber]
    previous: Mapping[Place, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for two members of one id, or a weight below 0."""
        if len({member.id for member in self.members}) < len(self.members):
            raise ConfigurationError("two members have the same id")
        if any(weight < 0 for weight in self.places.values()):
            raise ConfigurationError("a partition weighs less than 0")

    def subscribers(self) -> dict[str, list[Subscriber]]:
        """Give the members of each topic, by id."""
        found: dict[str, list[Subscriber]] = {topic: [] for topic, _ in self.places}
        for member in sorted(self.members, key=lambda member: member.id):
            for topic in member.topics & found.keys():
                found[topic].append(member)
        return found


Strategy = Callable[[AssignmentInput], Assignment]


def range_assignment(board: AssignmentInput) -> Assignment:
    """Give each member of a topic neighbouring partitions; of every topic the first members have one more."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(board.places):
        numbers[topic].append(number)
    found: Assignment = {}
    for topic, members in board.subscribers().items():
        for member, part in zip(members, _parts(numbers[topic], len(members)), strict=True):
            found |= {(topic, number): member.id for number in part}
    return found


def round_robin_assignment(board: AssignmentInput) -> Assignment:
    """Deal the partitions of all topics out in turn; who does not take a topic is passed over."""
    members = sorted(board.members, key=lambda member: member.id)
    found: Assignment = {}
    turn = 0
    for place in sorted(board.places):
        for ahead in range(len(members)):
            member = members[(turn + ahead) % len(members)]
            if place[0] in member.topics:
                found[place] = member.id
                turn += ahead + 1
                break
    return found


def sticky_assignment(board: AssignmentInput) -> Assignment:
    """Move as few partitions as will do for an even spread by number, each member's share by its capacity."""
    return _Balancer(board, dict.fromkeys(board.places, 1)).run()


def weighted_assignment(board: AssignmentInput) -> Assignment:
    """Spread the weights, such as lag, by capacity; the heaviest first, and where it was if that is as good."""
    return _Balancer(board, {place: round(weight) + 1 for place, weight in board.places.items()}).run()


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "range": range_assignment,
        "round_robin": round_robin_assignment,
        "sticky": sticky_assignment,
        "weighted": weighted_assignment,
    }
)


def moves(before: Mapping[Place, str], after: Mapping[Place, str]) -> dict[Place, tuple[str | None, str | None]]:
    """Give the partitions that change hands: who had each, and who gets it."""
    return {
        place: (before.get(place), after.get(place))
        for place in before.keys() | after.keys()
        if before.get(place) != after.get(place)
    }


class _Balancer:
    """Loads of members, levelled by moving one partition at a time from the fullest to the emptiest that takes it."""

    def __init__(self, board: AssignmentInput, weights: Mapping[Place, int]) -> None:
        self._board = board
        self._weights = weights
        self._subscribers = board.subscribers()
        self._by_id = {member.id: member for member in board.members}
        self._loads = dict.fromkeys(self._by_id, 0)
        self._held: dict[str, dict[str, list[Place]]] = {name: defaultdict(list) for name in self._by_id}
        """What each member has, by topic, the lightest last."""
        self._kinds: dict[_Kind, list[Subscriber]] = defaultdict(list)
        for member in sorted(board.members, key=lambda member: member.id):
            self._kinds[_kind(member)].append(member)

    def run(self) -> Assignment:
        homeless = self._keep()
        self._house(homeless)
        self._level()
        return {place: name for name, topics in self._held.items() for places in topics.values() for place in places}

    def _keep(self) -> list[Place]:
        """Leave with everybody what they had and still take; give the rest, the heaviest first."""
        homeless = []
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
                homeless.append(place)
        return homeless

    def _house(self, places: Iterable[Place]) -> None:
        heaps = self._heaps()
        for place in places:
            member = self._emptiest(heaps, place)
            self._give(place, member)
            heapq.heappush(heaps[_kind(member)], (self._loads[member.id], member.id))

    def _level(self) -> None:
        """Move from the fullest member to the emptiest that takes it, while that leaves both below the fullest."""
        while self._level_once():
            pass

    def _level_once(self) -> bool:
        """Do so; tell whether one had nothing to give before another gave something, and so may have now."""
        had_nothing = is_to_be_seen_again = False
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
            is_to_be_seen_again = had_nothing
            place, other = found
            self._held[name][place[0]].remove(place)
            self._loads[name] -= self._weights[place]
            self._give(place, other)
            for each in (member, other):
                heapq.heappush(heaps[_kind(each)], (self._loads[each.id], each.id))
                heapq.heappush(fullest, (-self._share(each), each.id))
        return is_to_be_seen_again

    def _better(self, heaps: "_Heaps", member: Subscriber) -> tuple[Place, Subscriber] | None:
        """Give what of a member's would be better with which other; the heaviest for which that is so."""
        best: tuple[float, Place, Subscriber] | None = None
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
        heaps = {kind: [(self._loads[each.id], each.id) for each in members] for kind, members in self._kinds.items()}
        for heap in heaps.values():
            heapq.heapify(heap)
        return heaps

    def _emptiest(self, heaps: "_Heaps", place: Place) -> Subscriber:
        _, member = self._least(heaps, place[0], self._weights[place])
        heapq.heappop(heaps[_kind(member)])
        return member

    def _least(self, heaps: "_Heaps", topic: str, weight: int) -> tuple[float, Subscriber]:
        """Give who of those that take a topic would have the least with so much more, and how much that is.

        There must be one. What a heap has of older loads is thrown away.
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

    def _give(self, place: Place, member: Subscriber) -> None:
        self._held[member.id][place[0]].append(place)
        self._loads[member.id] += self._weights[place]


_Kind = tuple[frozenset[str], int]
"""Members that are all the same to an assignment: of the same topics and capacity."""

_Heaps = dict[_Kind, list[tuple[int, str]]]


def _kind(member: Subscriber) -> _Kind:
    return member.topics, member.capacity


def _parts(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Cut a sequence into neighbouring parts, of which the first have one more."""
    if count == 0:
        return []
    width, more = divmod(len(numbers), count)
    starts = [each * width + min(each, more) for each in range(count + 1)]
    return [numbers[start:end] for start, end in pairwise(starts)]
