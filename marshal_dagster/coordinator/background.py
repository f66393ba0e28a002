"""Calls that a coordinator's thread has made in the background, now and then, and looks at when they are done."""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.group import GroupCoordinator
from marshal_dagster.errors import MarshalError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WEIGH_EACH_MS: Final = 30_000.0
_WEIGHS_FOR_MS: Final = 30_000.0
"""The known weights are used if weighing takes longer."""


class PeriodicCall(Generic[T]):
    """A call that is made every `interval_ms`, and not again before it is done; `use` receives what it returns."""

    def __init__(self, name: str, call: Callable[[], T], use: Callable[[T], None], interval_ms: float) -> None:
        """Call nothing yet; the first call is due."""
        self._name, self._call, self._use, self._interval_ms = name, call, use, interval_ms
        self._running: Future[T] | None = None
        self.next_ms = 0.0
        """When the next call is due."""
        self.failure: MarshalError | None = None
        """What the last call has failed with."""

    def poll(self, executor: Executor, now_ms: float) -> None:
        """Use what a call that is done has returned; begin the next one if it is due."""
        if self._running is not None and self._running.done():
            try:
                self._use(self._running.result())
                self.failure = None
            except MarshalError as error:
                if str(error) != str(self.failure):
                    logger.warning("%s: %s", self._name, error)
                self.failure = error
            self._running = None
        if self._running is None and now_ms >= self.next_ms:
            self.next_ms = now_ms + self._interval_ms
            self._running = executor.submit(self._call)

    def forget(self) -> None:
        """Take no notice of a call that has not ended."""
        self._running = None


FindWeights = Callable[[str, Collection[str], Mapping[DataPartitionId, int]], Mapping[DataPartitionId, float] | None]
"""`Weigh`, which returns None if the weights could not be found."""


@dataclass(slots=True)
class _LagMeasurement:
    """A group's partitions that are being weighed, for any group that has the name when it is done."""

    topics: frozenset[str]
    began_ms: float
    found: Future[Mapping[DataPartitionId, float] | None]


class GroupWeigher:
    """Weighs what each group has to work on: every 30 s, and as soon as a group awaits its weights."""

    def __init__(self, find_weights: FindWeights) -> None:
        """Weigh nothing yet."""
        self._find_weights = find_weights
        self._weighings: dict[str, _LagMeasurement] = {}
        self._next_ms: dict[str, float] = {}

    def poll(self, executor: Executor, groups: Mapping[str, GroupCoordinator], now_ms: float) -> None:
        """Give groups the weights that were found, and begin to weigh those that are due."""
        for name in [name for name, weighing in self._weighings.items() if weighing.found.done()]:
            weighing = self._weighings.pop(name)
            self._next_ms[name] = now_ms + _WEIGH_EACH_MS
            if name in groups:
                groups[name].update_weights(weighing.topics, weighing.found.result())
        self._next_ms = {name: at_ms for name, at_ms in self._next_ms.items() if name in groups}
        for name, group in groups.items():
            self._poll_group(executor, name, group, now_ms)

    def _poll_group(self, executor: Executor, name: str, group: GroupCoordinator, now_ms: float) -> None:
        weighing = self._weighings.get(name)
        if weighing is None:
            if group.awaits_weights or now_ms >= self._next_ms.get(name, 0.0):
                topics, positions = group.topics_wanted(), dict(group.positions)
                found = executor.submit(self._find_weights, name, topics, positions)
                self._weighings[name] = _LagMeasurement(topics, now_ms, found)
        elif group.awaits_weights and now_ms >= weighing.began_ms + _WEIGHS_FOR_MS:
            group.update_weights(group.topics_wanted(), None)

    def forget(self) -> None:
        """Take no notice of what is being weighed."""
        self._weighings = {}
