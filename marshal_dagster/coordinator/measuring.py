"""Metrics of a coordinator, where OpenTelemetry is in use."""

from collections.abc import Mapping
from typing import Final

from marshal_dagster.coordinator.assignment import Place
from marshal_dagster.coordinator.group import Event, Happening
from marshal_dagster.telemetry.metrics import coordinator_metrics, flush

_OUTCOMES: Final = {
    Happening.REBALANCED: "done",
    Happening.REBALANCE_RETRIED: "tried_again",
    Happening.REBALANCE_GIVEN_UP: "given_up",
}


class GroupMetrics:
    """Counts what happens in groups, and notes how they stand; for one thread. Never raises by itself."""

    def __init__(self) -> None:
        """Measure nothing yet."""
        self._metrics = coordinator_metrics()
        self._told: set[str] = set()
        """Groups of which something was noted."""

    def happened(self, group: str, event: Event) -> None:
        """Count what happened in a group."""
        found, whose = self._metrics, {"group": group}
        if found is None:
            return
        if event.happening in _OUTCOMES:
            found.rebalances.add(1, {**whose, "outcome": _OUTCOMES[event.happening]})
        if event.moved:
            found.moved.add(event.moved, whose)
        if event.happening is Happening.FAILED:
            found.failed.add(len(event.members), whose)

    def look(self, groups: Mapping[str, Mapping[str, frozenset[Place]]]) -> None:
        """Note what is assigned to whom in the groups that are led now; those led no more have nothing."""
        found = self._metrics
        if found is None:
            return
        found.groups.set(len(groups))
        for group in self._told | groups.keys():
            shares = groups.get(group, {})
            found.members.set(len(shares), {"group": group})
            found.assigned.set(sum(map(len, shares.values())), {"group": group})
        self._told = set(groups)

    def end(self) -> None:
        """Note that nothing is led any more, and hand all over."""
        self.look({})
        if self._metrics is not None:
            flush()
