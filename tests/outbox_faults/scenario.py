"""The scenario of a seed: its faults, their harvesters and their times."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.fault_harness.proxy import Way

HARVESTERS: Final = 3
LEADER: Final = -1
"""The harvester that leads at that time."""


class FaultKind(StrEnum):
    """The kinds of faults of an outbox, as the table of results names them."""

    KILLED = "harvester killed"
    STOPPED = "harvester stopped"
    HANDED_OVER = "harvester ended in order"
    BROKER_KILLED = "broker killed"
    BROKER_STOPPED = "broker stopped"
    POSTGRES_RESTARTED = "Postgres restarted"
    POSTGRES_CRASHED = "Postgres crashed"
    KAFKA_CUT = "link to Kafka cut"
    KAFKA_HELD = "link to Kafka silent"
    KAFKA_SLOW = "link to Kafka slow"
    POSTGRES_CUT = "link to Postgres cut"
    POSTGRES_HELD = "link to Postgres silent"
    POSTGRES_SLOW = "link to Postgres slow"
    CLOCK_OFF = "clock off"
    POISONED = "poisoned records"


KINDS: Final = tuple(FaultKind)
OF_KAFKA_LINKS: Final = frozenset({FaultKind.KAFKA_CUT, FaultKind.KAFKA_HELD, FaultKind.KAFKA_SLOW})
OF_POSTGRES_LINKS: Final = frozenset({FaultKind.POSTGRES_CUT, FaultKind.POSTGRES_HELD, FaultKind.POSTGRES_SLOW})
LASTS_S: Final = {
    FaultKind.KILLED: (0.1, 3.0),
    FaultKind.STOPPED: (0.3, 8.0),
    FaultKind.HANDED_OVER: (0.1, 2.0),
    FaultKind.BROKER_KILLED: (0.2, 2.0),
    FaultKind.BROKER_STOPPED: (0.3, 5.0),
    FaultKind.POSTGRES_RESTARTED: (0.0, 1.0),
    FaultKind.POSTGRES_CRASHED: (0.0, 1.0),
    FaultKind.CLOCK_OFF: (0.5, 4.0),
    FaultKind.POISONED: (1.0, 4.0),
}
LINK_LASTS_S: Final = (0.1, 5.0)
FARTHEST_AHEAD_S: Final = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at_s` after there is a first leader, for `lasts_s`, at `harvester` if it concerns one.

    In the `held` directions a link passes nothing; the bytes arrive afterwards if `comes_late`, else never. A clock
    jumps by `off_s` when the fault begins, and back when it ends.
    """

    kind: FaultKind
    at_s: float
    lasts_s: float
    harvester: int = LEADER
    held: frozenset[Way] = frozenset()
    comes_late: bool = True
    delay_s: float = 0.0
    off_s: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed's run."""

    seed: int
    writers: int
    max_in_flight_records: int
    session_ms: int
    receive_deadline_ms: int
    transaction_timeout_s: float
    timeout_s: float
    faults: tuple[Fault, ...]

    @property
    def kinds(self) -> frozenset[FaultKind]:
        """Return the kinds of its faults."""
        return frozenset(fault.kind for fault in self.faults)


def scenario(seed: int) -> Scenario:
    """Draw a run from a seed; in 15 consecutive seeds each kind of fault is the main one once."""
    chance = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)], *chance.choices(KINDS, k=chance.randint(2, 4))]
    quick = chance.random() < 0.8
    return Scenario(
        seed=seed,
        writers=4,
        max_in_flight_records=chance.choice((20, 100, 300, 1_000)),
        session_ms=3_000 if quick else 6_000,
        receive_deadline_ms=2_500 if quick else 5_000,
        transaction_timeout_s=chance.choice((4.0, 6.0, 10.0)),
        timeout_s=chance.choice((3.0, 5.0, 10.0)),
        faults=tuple(_fault(kind, chance) for kind in kinds),
    )


def _fault(kind: FaultKind, chance: random.Random) -> Fault:
    held: frozenset[Way] = frozenset()
    if kind in {FaultKind.KAFKA_HELD, FaultKind.POSTGRES_HELD}:
        held = chance.choice((frozenset(Way), frozenset({Way.TO_BROKER}), frozenset({Way.TO_MEMBER})))
    return Fault(
        kind,
        at_s=chance.uniform(0.2, 6.0),
        lasts_s=chance.uniform(*LASTS_S.get(kind, LINK_LASTS_S)),
        harvester=LEADER if chance.random() < 0.75 else chance.randrange(HARVESTERS),
        held=held,
        comes_late=chance.random() < 0.6,
        delay_s=chance.uniform(0.01, 0.2),
        off_s=_off(chance.choice((-1, 1)) * chance.randint(10, 36_000)),
    )


def _off(off_s: int) -> int:
    """Limit how far a clock is set forward, because it is set back in the end.

    The timed waits of Kafka's client use the time of day. A wait that began before the clock is set back lasts that
    much longer.
    """
    return off_s if off_s < 0 else 1 + off_s % FARTHEST_AHEAD_S
