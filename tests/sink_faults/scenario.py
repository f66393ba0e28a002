"""The scenario of a seed: its faults, their processes and their times."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.sink_faults.outputs import OF_DELTA, SinkKind

PROCESSES: Final = 2
AFTER_S: Final = (0.0, 8.0)


class FaultKind(StrEnum):
    """The kinds of faults, as the table of results names them."""

    KILLED = "process and its JVM killed"
    KILLED_AT_STEP = "killed at a step of the sink"
    JVM_KILLED = "JVM killed"
    TASK_KILLED = "Python worker of a task killed"
    STOPPED = "process and its JVM stopped"
    DRIVER_STOPPED = "process stopped, its JVM not"
    JVM_STOPPED = "JVM stopped, its process not"
    BROKER_KILLED = "broker killed"
    FOREIGN = "another engine commits"
    SET_BACK = "positions set back"


LASTS_S: Final = {
    FaultKind.STOPPED: (0.5, 15.0),
    FaultKind.DRIVER_STOPPED: (0.5, 15.0),
    FaultKind.JVM_STOPPED: (0.5, 15.0),
    FaultKind.BROKER_KILLED: (0.2, 3.0),
}
STARTS_AGAIN_AFTER_S: Final = (0.0, 2.0)
OF_TABLES: Final = {*OF_DELTA, SinkKind.ICEBERG}
APPENDS_ONLY: Final = {SinkKind.KAFKA, SinkKind.DELTA_UPSERT}
"""These refuse a new generation, or one that does not begin at the first offset."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one of the processes: `after_s` after it is at work again, for `lasts_s`.

    A process that is killed at a step dies when its sinks have made `steps` steps more. When positions are set back,
    the process is killed, or with `as_zombie` stopped and continued after another one has read some offsets again.
    """

    kind: FaultKind
    after_s: float
    lasts_s: float
    process: int
    steps: int = 1
    as_zombie: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed's run."""

    seed: int
    sink: SinkKind
    partitions: int
    max_records: int
    records_per_s: int
    faults: tuple[Fault, ...]


def kinds_of(sink: SinkKind) -> tuple[FaultKind, ...]:
    """Return the kinds of faults that make sense for a sink."""
    without = {FaultKind.SET_BACK} if sink in APPENDS_ONLY else set()
    without |= set() if sink in OF_TABLES else {FaultKind.FOREIGN}
    without |= {FaultKind.KILLED_AT_STEP} if sink is SinkKind.KAFKA else set()  # its steps are those of tasks
    return tuple(kind for kind in FaultKind if kind not in without)


def scenario(sink: SinkKind, seed: int) -> Scenario:
    """Draw a run from a seed. Among as many consecutive seeds as there are kinds each kind is the main one once."""
    chance = random.Random(f"{sink} {seed}")
    kinds = kinds_of(sink)
    drawn = [kinds[seed % len(kinds)], *chance.choices(kinds, k=chance.randint(4, 7))]
    return Scenario(
        seed=seed,
        sink=sink,
        partitions=chance.choice((2, 4, 6)),
        max_records=chance.choice((100, 400, 1_500)),
        records_per_s=chance.choice((20, 60, 150)),
        faults=tuple(_fault(kind, chance) for kind in drawn),
    )


def _fault(kind: FaultKind, chance: random.Random) -> Fault:
    return Fault(
        kind,
        after_s=chance.uniform(*AFTER_S),
        lasts_s=chance.uniform(*LASTS_S.get(kind, STARTS_AGAIN_AFTER_S)),
        process=chance.randrange(PROCESSES),
        steps=chance.randint(1, 12),
        as_zombie=chance.random() < 0.5,
    )
