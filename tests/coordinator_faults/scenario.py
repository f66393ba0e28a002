"""The scenario of a seed: the numbers of processes, their faults, and the step that is checked in the calm."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.fault_harness.proxy import Way

LINKED: Final = 2
"""How many of the coordinators, and of the members, have a link of a proxy."""
LINKS: Final = 2 * LINKED


TAKEOVER_MS: Final = 10_000
"""A session timeout within which another coordinator takes over from one that was killed."""


class FaultKind(StrEnum):
    """The kinds of faults of a coordinated group, as the table of results names them."""

    COORDINATOR_KILLED = "coordinator killed"
    COORDINATOR_STOPPED = "coordinator stopped"
    ALL_COORDINATORS_KILLED = "all coordinators killed"
    ALL_COORDINATORS_STOPPED = "all coordinators stopped"
    COORDINATOR_CUT = "coordinator's link cut"
    COORDINATOR_HELD = "coordinator's link silent"
    MEMBER_KILLED = "member killed"
    MEMBER_STOPPED = "member stopped"
    MEMBER_CUT = "member's link cut"
    MEMBER_HELD = "member's link silent"
    MEMBERS_FLAP = "members flap"
    NAME_TAKEN = "second process of a name"
    BROKER_KILLED = "broker killed"
    BROKER_STOPPED = "broker stopped"
    PARTITIONS_ADDED = "partitions added"
    TOPIC_CREATED = "topic created"


KINDS: Final = tuple(FaultKind)
OF_LINKS: Final = frozenset(
    {FaultKind.COORDINATOR_CUT, FaultKind.COORDINATOR_HELD, FaultKind.MEMBER_CUT, FaultKind.MEMBER_HELD}
)
LASTS_S: Final = {
    FaultKind.COORDINATOR_KILLED: (0.1, 4.0),
    FaultKind.COORDINATOR_STOPPED: (1.0, 9.0),
    FaultKind.ALL_COORDINATORS_KILLED: (0.5, 7.0),
    FaultKind.ALL_COORDINATORS_STOPPED: (0.5, 7.0),
    FaultKind.MEMBER_KILLED: (0.1, 6.0),
    FaultKind.MEMBER_STOPPED: (1.0, 9.0),
    FaultKind.BROKER_KILLED: (0.2, 3.0),
    FaultKind.BROKER_STOPPED: (0.5, 6.0),
    FaultKind.NAME_TAKEN: (1.0, 6.0),
    FaultKind.MEMBERS_FLAP: (0.1, 1.5),
}
OTHERS_LAST_S: Final = (0.5, 8.0)


class Ending(StrEnum):
    """The step in the calm, after the group has settled."""

    JOINED = "a member joined"
    LEFT = "a member left"
    WITHOUT = "no coordinator for a while"
    REPLACED = "the coordinator replaced"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at_s` after the group has settled first, for `lasts_s`, at a process by its `number`.

    A fault of a coordinator mostly concerns the leader: then the number is 0. In the `held` directions a link passes
    nothing; the bytes arrive afterwards if `comes_late`, else never.
    """

    kind: FaultKind
    at_s: float
    lasts_s: float
    number: int
    held: frozenset[Way] = frozenset()
    comes_late: bool = True


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed's run."""

    seed: int
    coordinators: int
    members: int
    partitions: int
    session_ms: int
    slow_stop_s: float
    """The longest time that a member takes to stop with a partition."""
    faults: tuple[Fault, ...]
    ending: Ending

    @property
    def kinds(self) -> frozenset[FaultKind]:
        """Return the kinds of its faults."""
        return frozenset(fault.kind for fault in self.faults)


def scenario(seed: int) -> Scenario:
    """Draw a run from a seed; in 16 consecutive seeds each kind of fault is the main one once."""
    chance = random.Random(f"coordinator {seed}")
    kinds = [KINDS[seed % len(KINDS)], *chance.choices(KINDS, k=chance.randint(1, 3))]
    ending = tuple(Ending)[chance.randrange(len(Ending))]
    return Scenario(
        seed=seed,
        coordinators=chance.randint(2, 3),
        members=chance.randint(3, 7),
        partitions=chance.randint(6, 12),
        session_ms=TAKEOVER_MS if ending is Ending.REPLACED else chance.choice((4_000, 6_000)),
        slow_stop_s=chance.choice((0.0, 0.0, 0.5, 3.0)),
        faults=tuple(_fault(kind, chance) for kind in kinds),
        ending=ending,
    )


def _fault(kind: FaultKind, chance: random.Random) -> Fault:
    held: frozenset[Way] = frozenset()
    if kind in {FaultKind.COORDINATOR_HELD, FaultKind.MEMBER_HELD}:
        held = chance.choice((frozenset(Way), frozenset({Way.TO_BROKER}), frozenset({Way.TO_MEMBER})))
    return Fault(
        kind,
        at_s=chance.uniform(0.2, 8.0),
        lasts_s=chance.uniform(*LASTS_S.get(kind, OTHERS_LAST_S)),
        number=0 if chance.random() < 0.6 else chance.randrange(8),
        held=held,
        comes_late=chance.random() < 0.6,
    )
