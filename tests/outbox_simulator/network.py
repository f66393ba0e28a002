"""The network to the database and to the brokers: calls take time and may fail."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from marshal_dagster.errors import UnavailableError
from tests.outbox_simulator.scenario import CallFault
from tests.simulator.scheduler import KilledError, Process, Scheduler

T = TypeVar("T")

LONGEST_LATE_MS: Final = 3_000.0
LONGEST_PAUSE_MS: Final = 6_000.0


class Side(StrEnum):
    """The other side of a call."""

    DATABASE = "database"
    KAFKA = "Kafka"


class Network:
    """Makes calls on behalf of the current process."""

    def __init__(
        self,
        scheduler: Scheduler,
        chance: random.Random,
        faults: Mapping[int, CallFault],
        kill: Callable[[Process], None],
        *,
        latency_ms: float,
        calm_ms: float,
    ) -> None:
        self.befallen: Counter[str] = Counter()
        self.calls = 0
        self.cut_until_ms: dict[tuple[str, Side], float] = {}
        """By member and side."""
        self.slow_until_ms: dict[Side, float] = {}
        self._scheduler = scheduler
        self._chance = chance
        self._faults = faults
        self._kill = kill
        self._longest_way_ms = latency_ms
        self._calm_ms = calm_ms
        self._wires = Process(scheduler, "network")

    def call(self, side: Side, effect: Callable[[], T], timeout_ms: float, is_late: Callable[[], None]) -> T:
        """Run `effect` at the other side and return its result; `is_late` is called if the effect happens too late.

        Raises `UnavailableError` if no answer arrives, whether `effect` ran or not.
        """
        scheduler = self._scheduler
        self.calls += 1
        if self.calls in self._faults and scheduler.now_ms < self._calm_ms:
            return self._faulty(self._faults[self.calls], side, effect, timeout_ms, is_late)
        self._require_way(side, timeout_ms)
        scheduler.sleep(self._latency_ms(side))
        found = effect()
        scheduler.sleep(self._latency_ms(side))
        self._require_way(side, timeout_ms)
        return found

    def cut_ms(self, process: Process, side: Side) -> float:
        """Return until when a process cannot reach a side; 0 if it was never cut off."""
        return self.cut_until_ms.get((process.name.partition(".")[0], side), 0.0)

    def later(self, after_ms: float, work: Callable[[], object]) -> None:
        """Do some work after a delay, whatever happens to the process that requested it."""

        def carry_out() -> None:
            self._scheduler.sleep(after_ms)
            work()

        self._wires.spawn(carry_out)

    def _faulty(
        self, fault: CallFault, side: Side, effect: Callable[[], T], timeout_ms: float, is_late: Callable[[], None]
    ) -> T:
        self.befallen[fault] += 1
        scheduler, chance = self._scheduler, self._chance
        process = self._process
        if fault is CallFault.CRASH_BEFORE:
            self._kill(process)
        if fault is CallFault.LOST_REQUEST:
            self._give_up(timeout_ms)
        if fault is CallFault.LATE:
            is_late()
            self.later(timeout_ms + chance.random() * LONGEST_LATE_MS, lambda: _ignoring_errors(effect))
            self._give_up(timeout_ms)
        if fault is CallFault.PAUSE_BEFORE:
            process.stop(chance.random() * LONGEST_PAUSE_MS)
        scheduler.sleep(self._latency_ms(side))
        found = effect()
        if fault is CallFault.CRASH_AFTER:
            self._kill(process)
        if fault is CallFault.LOST_ANSWER:
            self._give_up(timeout_ms)
        if fault is CallFault.PAUSE_AFTER:
            process.stop(chance.random() * LONGEST_PAUSE_MS)
        slow_ms = chance.random() * timeout_ms if fault is CallFault.SLOW else 0.0
        scheduler.sleep(slow_ms + self._latency_ms(side))
        return found

    @property
    def _process(self) -> Process:
        task = self._scheduler.current
        assert task is not None
        return task.process

    def _latency_ms(self, side: Side) -> float:
        if self.slow_until_ms.get(side, 0.0) > self._scheduler.now_ms:
            return self._chance.random() * 200
        return 0.1 + self._chance.random() * self._longest_way_ms

    def _require_way(self, side: Side, timeout_ms: float) -> None:
        if self.cut_until_ms and self.cut_ms(self._process, side) > self._scheduler.now_ms:
            self._give_up(timeout_ms)

    def _give_up(self, timeout_ms: float) -> None:
        self._scheduler.sleep(timeout_ms)
        raise UnavailableError("no answer came in time")


def _ignoring_errors(effect: Callable[[], object]) -> None:
    try:
        effect()
    except KilledError:
        raise
    except Exception:  # noqa: BLE001, S110 - the process that would get the error is gone
        pass
