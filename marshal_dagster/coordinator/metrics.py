"""OpenTelemetry metrics of a coordinator process; without OpenTelemetry nothing is measured."""

from collections.abc import Mapping
from typing import Final

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.group import GroupEvent, GroupEventKind
from marshal_dagster.telemetry.metrics import CoordinatorMetrics, coordinator_metrics, flush

_OUTCOMES: Final = {
    GroupEventKind.REBALANCED: "done",
    GroupEventKind.REBALANCE_RETRIED: "tried_again",
    GroupEventKind.REBALANCE_GIVEN_UP: "given_up",
}


class GroupMetrics:
    """The metrics of the groups that a process leads: their events, members and partitions.

    Not thread-safe. Its methods never raise.
    """

    def __init__(self) -> None:
        """Look up the instruments; nothing is measured yet."""
        self._metrics = coordinator_metrics()
        self._measured: set[str] = set()
        """The groups in the last measurement."""
        self._counted: set[str] = set()
        """The groups whose counters were started at 0, so that the first event is an increase."""
        self._partitions = 0

    def record(self, group: str, event: GroupEvent) -> None:
        """Count an event of a group."""
        found, whose = self._metrics, {"group": group}
        if found is None:
            return
        if event.happening in _OUTCOMES:
            found.rebalances.add(1, {**whose, "outcome": _OUTCOMES[event.happening]})
        if event.moved:
            found.moved.add(event.moved, whose)
        if event.happening is GroupEventKind.FAILED:
            found.failed.add(len(event.members), whose)

    def update(
        self, groups: Mapping[str, Mapping[str, frozenset[DataPartitionId]]], *, led: int = 0, partitions: int = 0
    ) -> None:
        """Measure the assignments of the groups that this process leads; report 0 for groups that it led before.

        Args:
            groups: The assignment of each group that this process leads.
            led: How many partitions of the coordinator's topics this process leads.
            partitions: How many partitions these topics have.
        """
        found = self._metrics
        if found is None:
            return
        found.groups.set(len(groups))
        found.led.set(led)
        found.partitions.set(partitions)
        self._partitions = partitions
        for group in groups.keys() - self._counted:
            self._start_counters(found, group)
        for group in self._measured | groups.keys():
            shares = groups.get(group, {})
            found.members.set(len(shares), {"group": group})
            found.assigned.set(sum(map(len, shares.values())), {"group": group})
        self._measured = set(groups)

    def _start_counters(self, found: CoordinatorMetrics, group: str) -> None:
        self._counted.add(group)
        for outcome in _OUTCOMES.values():
            found.rebalances.add(0, {"group": group, "outcome": outcome})
        found.moved.add(0, {"group": group})
        found.failed.add(0, {"group": group})

    def close(self) -> None:
        """Report that this process leads no group any more, and export all metrics."""
        self.update({}, partitions=self._partitions)
        if self._metrics is not None:
            flush()
