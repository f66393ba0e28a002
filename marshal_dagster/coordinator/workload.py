"""The partitions that a group processes, with their weights, and their assignment to members. Pure, as `group`."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from types import MappingProxyType
from typing import Final

from marshal_dagster.coordinator.assignment import AssignmentInput, DataPartitionId, Strategy, Subscriber
from marshal_dagster.coordinator.group_members import Members
from marshal_dagster.coordinator.messages import Register

_DEFAULT_WEIGHT: Final = 1.0
_TOLERANCE: Final = 1.25
"""Weighted partitions move only if a load is off its best possible value by more than this factor."""

Shares = Mapping[str, frozenset[DataPartitionId]]
"""The partitions of each member."""


class Workload:
    """The partitions of a group's topics, and their assignment by a strategy."""

    def __init__(self, strategy: Strategy, *, weighs: bool) -> None:
        """Start without topics. If it `weighs` partitions, nothing is assigned before their weights are known."""
        self._strategy, self._weighs = strategy, weighs
        self._topics: Mapping[str, int] | None = None
        self.weights: Mapping[DataPartitionId, float] = MappingProxyType({})
        self.awaits_weights = weighs

    @property
    def is_known(self) -> bool:
        """Whether the topics are known, and the weights if they are needed."""
        return self._topics is not None and not self.awaits_weights

    def update_topics(self, topics: Mapping[str, int]) -> bool:
        """Set the partition count of each topic; return whether any has changed."""
        is_changed = topics != (self._topics or {})
        self._topics = dict(topics)
        if is_changed:
            self.reweigh()
        return is_changed

    def update_weights(
        self, members: Members, topics: Collection[str], weights: Mapping[DataPartitionId, float] | None
    ) -> None:
        """Set the weights of the partitions of these topics; with None, keep the last ones known."""
        self.weights = self.weights if weights is None else weights
        self.awaits_weights = topics != self.topics_wanted(members)

    def reweigh(self) -> None:
        """Require new weights before the next assignment, because the subscribed topics may have changed."""
        self.awaits_weights = self._weighs

    def topics_wanted(self, members: Members) -> frozenset[str]:
        """Return the existing topics that members subscribe to."""
        wanted = chain.from_iterable(self._wanted(member.registration) for member in members.by_name.values())
        return frozenset(wanted) & (self._topics or {}).keys()

    def assign(self, members: Members) -> Shares:
        """Return the partitions that each member should have.

        With weights, the present shares stay if their loads are within the tolerance.
        """
        subscribers = [
            Subscriber(name, self._wanted(member.registration), member.registration.capacity)
            for name, member in members.by_name.items()
        ]
        topics = self._topics or {}
        wanted = {topic for subscriber in subscribers for topic in subscriber.topics}
        numbered = ((topic, number) for topic in wanted for number in range(topics.get(topic, 0)))
        weights = {place: self.weights.get(place, _DEFAULT_WEIGHT) for place in numbered}
        shares: dict[str, list[DataPartitionId]] = {name: [] for name in members.by_name}
        for place, name in self._strategy(AssignmentInput(weights, subscribers, dict(members.owners))).items():
            shares[name].append(place)
        best = {name: frozenset(share) for name, share in shares.items()}
        present = {name: member.places for name, member in members.by_name.items()}
        return present if self._weighs and self._is_as_good(members, present, best) else best

    def _is_as_good(self, members: Members, present: Shares, best: Shares) -> bool:
        """Return whether the present shares can stay.

        They must cover the wanted partitions, match the subscriptions, and have loads within the tolerance of `best`.
        """
        if set().union(*present.values()) != set().union(*best.values()):
            return False
        for name, places in present.items():
            if not {topic for topic, _ in places} <= self._wanted(members.by_name[name].registration):
                return False
        loads, best_loads = self._loads(members, present) or [0.0], self._loads(members, best) or [0.0]
        return max(loads) <= _TOLERANCE * max(best_loads) and min(best_loads) <= _TOLERANCE * min(loads)

    def _loads(self, members: Members, shares: Shares) -> list[float]:
        """Return the total weight of each member's partitions, divided by its capacity."""
        return [
            sum(self.weights.get(place, _DEFAULT_WEIGHT) + 1 for place in places)
            / members.by_name[name].registration.capacity
            for name, places in shares.items()
        ]

    def _wanted(self, registration: Register) -> frozenset[str]:
        pattern = registration.pattern
        matching: Iterable[str] = (
            () if pattern is None else (topic for topic in self._topics or {} if fnmatchcase(topic, pattern))
        )
        return frozenset(registration.topics).union(matching)
