"""Assignment strategies: pure functions that assign the partitions of a group to its members.

The result is advice. The claims in the coordination log decide which member processes a partition.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

from marshal_dagster.errors import ConfigurationError

DataPartitionId = tuple[str, int]
"""A topic and the number of one of its partitions."""

Assignment = dict[DataPartitionId, str]
"""The id of the member that each partition is assigned to. A partition without subscribers is left out."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member of a group, as an assignment strategy sees it; see the example of `sticky_assignment`.

    Raises:
        ConfigurationError: The capacity is below 1.
    """

    id: str
    """The member's name, unique in its group."""
    topics: frozenset[str]
    """The topics that the member subscribes to."""
    capacity: int = 1
    """Its share of the work relative to other members: one with 2 gets twice as much as one with 1."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if the capacity is below 1."""
        if self.capacity < 1:
            raise ConfigurationError(f"capacity of member {self.id!r} is {self.capacity}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class AssignmentInput:
    """The partitions, members and previous assignment that a strategy works with; see `sticky_assignment`.

    Raises:
        ConfigurationError: Two members have the same id, or a weight is below 0.
    """

    places: Mapping[DataPartitionId, float]
    """The partitions to assign, with the weight of each, such as its lag in offsets."""
    members: Sequence[Subscriber]
    """The members to assign them to."""
    previous: Mapping[DataPartitionId, str] = field(default_factory=lambda: MappingProxyType({}))
    """The id of the member that has each partition now."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if two members have the same id or a weight is below 0."""
        if len({member.id for member in self.members}) < len(self.members):
            raise ConfigurationError("two members of the assignment have the same id; each needs its own")
        if any(weight < 0 for weight in self.places.values()):
            raise ConfigurationError("the weight of a partition is below 0; it must be 0 or more")

    def subscribers(self) -> dict[str, list[Subscriber]]:
        """Return the subscribers of each topic.

        Returns:
            For each topic of `places` the members that subscribe to it, sorted by id.
        """
        found: dict[str, list[Subscriber]] = {topic: [] for topic, _ in self.places}
        for member in sorted(self.members, key=lambda member: member.id):
            for topic in member.topics & found.keys():
                found[topic].append(member)
        return found


Strategy = Callable[[AssignmentInput], Assignment]
"""A function that assigns partitions to members."""


def range_assignment(board: AssignmentInput) -> Assignment:
    """Assign consecutive partitions of each topic to each of its subscribers, as Kafka's range assignor does.

    Members are sorted by id, and get a number of partitions in proportion to their capacity. If the partitions of a
    topic cannot be divided evenly, the first members get one more.

    Args:
        board: The partitions and members. Weights and the previous assignment have no effect.

    Returns:
        The member of each partition.

    Example:
        ```python
        east, west = Subscriber("east", frozenset({"orders"})), Subscriber("west", frozenset({"orders"}))
        places = {("orders", partition): 0.0 for partition in range(3)}
        range_assignment(AssignmentInput(places, [east, west]))  # east: 0 and 1, west: 2
        ```
    """
    numbers: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(board.places):
        numbers[topic].append(number)
    found: Assignment = {}
    for topic, members in board.subscribers().items():
        capacities = [member.capacity for member in members]
        for member, part in zip(members, _parts(numbers[topic], capacities), strict=True):
            found |= {(topic, number): member.id for number in part}
    return found


def round_robin_assignment(board: AssignmentInput) -> Assignment:
    """Assign the partitions of all topics to the members in turn, as Kafka's round-robin assignor does.

    A member with capacity 2 has two turns for each turn of one with 1. A member that does not subscribe to the topic of
    a partition is skipped.

    Args:
        board: The partitions and members. Weights and the previous assignment have no effect.

    Returns:
        The member of each partition.

    Example:
        ```python
        east, west = Subscriber("east", frozenset({"orders"})), Subscriber("west", frozenset({"orders"}))
        places = {("orders", partition): 0.0 for partition in range(3)}
        round_robin_assignment(AssignmentInput(places, [east, west]))  # east: 0 and 2, west: 1
        ```
    """
    by_id = {member.id: member for member in board.members}
    subscribers = board.subscribers()
    turns = [(1 / member.capacity, member.id) for member in board.members]
    heapq.heapify(turns)
    found: Assignment = {}
    for place in sorted(board.places):
        if not subscribers[place[0]]:
            continue
        passed = [heapq.heappop(turns)]
        while place[0] not in by_id[passed[-1][1]].topics:
            passed.append(heapq.heappop(turns))
        now = passed[-1]
        found[place] = now[1]
        for _, name in passed:
            heapq.heappush(turns, _next_turn(by_id[name], now))
    return found


def _next_turn(member: Subscriber, now: tuple[float, str]) -> tuple[float, str]:
    """Return the time of the first turn of a member after `now`, and its id. It has `capacity` turns in a time of 1."""
    turn = math.floor(now[0] * member.capacity)
    while (turn / member.capacity, member.id) <= now:
        turn += 1
    return turn / member.capacity, member.id


def sticky_assignment(board: AssignmentInput) -> Assignment:
    """Assign to each member a number of partitions in proportion to its capacity, and move as few as possible.

    Args:
        board: The partitions, members and previous assignment. Weights have no effect.

    Returns:
        The member of each partition.

    Example:
        ```python
        east, west = Subscriber("east", frozenset({"orders"})), Subscriber("west", frozenset({"orders"}))
        places = {("orders", partition): 0.0 for partition in range(4)}
        assignment = sticky_assignment(AssignmentInput(places, [east, west]))  # two partitions each
        ```
    """
    return _Balancer(board, dict.fromkeys(board.places, 1)).run()


def weighted_assignment(board: AssignmentInput) -> Assignment:
    """Assign to each member a total weight in proportion to its capacity, such as its share of the lag.

    The heaviest partitions are assigned first. A partition stays with its previous member if that is as good.

    Args:
        board: The partitions with their weights, the members and the previous assignment.

    Returns:
        The member of each partition.

    Example:
        ```python
        east, west = Subscriber("east", frozenset({"orders"})), Subscriber("west", frozenset({"orders"}))
        lag = {("orders", 0): 900.0, ("orders", 1): 400.0, ("orders", 2): 500.0}
        weighted_assignment(AssignmentInput(lag, [east, west]))  # one of them gets 0, the other 1 and 2
        ```
    """
    return _Balancer(board, {place: round(weight) + 1 for place, weight in board.places.items()}).run()


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "range": range_assignment,
        "round_robin": round_robin_assignment,
        "sticky": sticky_assignment,
        "weighted": weighted_assignment,
    }
)
"""The strategies by their names in the option `--strategy`."""


def count_moves(before: Mapping[DataPartitionId, str], after: Mapping[DataPartitionId, str]) -> int:
    """Return how many partitions are moved from one assignment to another.

    Args:
        before: The member of each partition before.
        after: The member of each partition afterwards.

    Returns:
        The number of partitions with another member, or that only one of the two assignments has.

    Example:
        ```python
        count_moves({("orders", 0): "east"}, {("orders", 0): "west"})  # 1
        ```
    """
    return sum(before.get(place) != after.get(place) for place in before.keys() | after.keys())


class _Balancer:
    """A balancer of the members' loads.

    It moves one partition at a time from the most loaded member to the least loaded one that subscribes to its topic.
    """

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
        """Leave each partition with its previous member if that still subscribes to the topic.

        Returns the other partitions that have subscribers, the heaviest first.
        """
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
        """Move partitions from the most to the least loaded subscriber while the higher of their two loads falls."""
        while self._level_once():
            pass

    def _level_once(self) -> bool:
        """Move partitions once through all members, the most loaded first.

        Returns whether to repeat it: a member that could give nothing away may be able to after a later move.
        """
        had_nothing = may_have_more = False
        # If all weights and all subscriptions are equal and the most loaded member can give nothing away, no other can.
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
        """Return the partition that a member should give away, and the member that should get it.

        The new load of the other member is below the present load of this one. Of several partitions, the one that
        makes that new load largest is returned. None if no partition should move.
        """
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
        """Return the subscriber of a topic with the least load once `weight` is added, and that load.

        The topic must have a subscriber. Outdated loads are removed from the heaps.
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
"""Subscribed topics and capacity. Members with equal ones are interchangeable in an assignment."""

_Heaps = dict[_Kind, list[tuple[int, str]]]


def _kind(member: Subscriber) -> _Kind:
    return member.topics, member.capacity


def _parts(numbers: Sequence[int], shares: Sequence[int]) -> list[Sequence[int]]:
    """Cut a sequence into consecutive parts in proportion to `shares`.

    What is left over after rounding down goes to the parts that lack most, the first ones if these are equal.
    """
    total = sum(shares)
    sizes = [len(numbers) * share // total for share in shares]
    by_lack = sorted(range(len(shares)), key=lambda part: -(len(numbers) * shares[part] % total))
    for part in by_lack[: len(numbers) - sum(sizes)]:
        sizes[part] += 1
    return [numbers[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
