"""What runs of real processes under faults share: processes that come and go, scripts, and brokers that fail."""

import random
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.fault_harness.cluster import BROKERS, FaultyKafka

TOP: Final = Path(__file__).parents[1]
END_WITHIN_S: Final = 30.0
TICK_S: Final = 0.02

Script = Generator[None]
"""What happens in time: goes on at each tick."""


class Failed(Exception):
    """The run itself did not go as it must: a promise of liveness, or the test bed."""


@dataclass(slots=True)
class Child:
    """A process of the run, start after start."""

    process: subprocess.Popen[bytes] | None = field(default=None, kw_only=True)
    is_held: bool = field(default=False, kw_only=True)
    """Whether a fault decides when it is started again."""

    @property
    def is_alive(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.process is not None and self.is_alive:
            self.process.send_signal(number)

    def tell_to_end(self) -> None:
        """Send it SIGTERM; one that is stopped goes on."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def has_ended(self) -> bool:
        """Wait for its end; tell whether it came, or it never ran."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_WITHIN_S)
        return not self.is_alive


class BefallenRun(ABC):
    """A seed's run on real brokers: what goes on all the time is `_tick`, what befalls it are scripts."""

    def __init__(self, seed: int, kafka: FaultyKafka) -> None:
        self.kafka = kafka
        self.chance = random.Random(seed * 3 + 1)
        self.wrong: list[str] = []
        self._helpers = ThreadPoolExecutor(4)

    @abstractmethod
    def _tick(self) -> None:
        """Do what is due all the time, and let a moment pass."""

    def _play(self, scripts: Sequence[Script]) -> None:
        """Tick until all scripts are over."""
        left = list(scripts)
        while left:
            self._tick()
            left = [script for script in left if next(script, left) is None]

    def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise Failed(f"waited {within_s:g} s for {what}")
            self._tick()

    def _pause(self, seconds: float) -> Script:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            yield

    def _aside(self, work: Callable[[], object]) -> Script:
        """Do what takes long in a thread."""
        done: Future[object] = self._helpers.submit(work)
        while not done.done():
            yield
        done.result()

    def _until_dead(self, child: Child, what: str) -> Script:
        """Tell it to end, and wait for that."""
        child.tell_to_end()
        deadline_s = time.monotonic() + END_WITHIN_S
        while child.is_alive:
            child.signal(signal.SIGCONT)
            if time.monotonic() > deadline_s:
                raise Failed(f"{what} does not end within {END_WITHIN_S:g} s of SIGTERM{self._whereabouts(child)}")
            yield

    def _whereabouts(self, child: Child) -> str:
        """Say where a process is that does not end."""
        del child
        return ""

    def _broker(self, topic: str | None, partition: int = 0) -> Generator[None, None, int]:
        """Choose a broker: the one that leads a partition, if there is one."""
        if topic is not None:
            asked = self._helpers.submit(self.kafka.leader, topic, partition)
            while not asked.done():
                yield
            with suppress(Exception):
                if asked.result() in BROKERS:
                    return asked.result()
        return self.chance.choice(BROKERS)

    def _broker_killed(self, broker: int, lasts_s: float) -> Script:
        yield from self._aside(lambda: self.kafka.kill(broker))
        yield from self._pause(lasts_s)
        yield from self._aside(self.kafka.repair)

    def _broker_stopped(self, broker: int, lasts_s: float) -> Script:
        with suppress(ProcessLookupError):
            self.kafka.suspend(broker)
        yield from self._pause(lasts_s)
        self.kafka.resume(broker)
