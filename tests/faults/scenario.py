"""The scenario of a seed: the group, its topic and its faults."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from marshal_dagster.batches import RangeOptions
from marshal_dagster.protocol.messages import DeliveryMode
from tests.fault_harness.proxy import Way
from tests.real.kill_points import KillPoint, Side

HI_MS: Final = 1_000
MEMBERS: Final = 3
LEASE_S: Final = 2 * HI_MS / 1_000


class FaultKind(StrEnum):
    """The kinds of faults of a group, as the table of results names them."""

    LEADER_KILLED = "coordination leader killed"
    LINK_CUT = "link cut"
    MEMBER_KILLED = "member killed"
    MEMBER_STOPPED = "member stopped beyond its lease"
    LINK_SLOW = "link slow"
    CLOCK_OFF = "member's clock off"
    LEADER_STOPPED = "coordination leader stopped"
    LINK_HALF_OPEN = "link half open"
    TAKEN_FOR_DEAD = "live member taken for dead"
    DATA_CUT = "data cut by retention"
    LINK_ONE_WAY = "link one way"
    PARTITIONS_ADDED = "partitions added"
    ROLLING_RESTART = "rolling restart"
    LOG_CUT = "log cut, no snapshots"
    LOG_CUT_WITH_SNAPSHOTS = "log cut, snapshots"
    LOG_DELETED = "coordination topic deleted"


KINDS: Final = tuple(FaultKind)
OF_BROKERS: Final = frozenset({FaultKind.LEADER_KILLED, FaultKind.LEADER_STOPPED, FaultKind.ROLLING_RESTART})
OF_LINKS: Final = frozenset({FaultKind.LINK_CUT, FaultKind.LINK_SLOW, FaultKind.LINK_HALF_OPEN, FaultKind.LINK_ONE_WAY})
ALONE: Final = frozenset({FaultKind.LOG_CUT, FaultKind.LOG_CUT_WITH_SNAPSHOTS, FaultKind.LOG_DELETED})
"""These need all members in a known state, so there is no second fault."""
BESIDE: Final = (
    FaultKind.MEMBER_KILLED,
    FaultKind.MEMBER_STOPPED,
    FaultKind.TAKEN_FOR_DEAD,
    FaultKind.LINK_CUT,
    FaultKind.LINK_HALF_OPEN,
    FaultKind.LINK_ONE_WAY,
    FaultKind.PARTITIONS_ADDED,
)
"""The kinds of a second fault."""

OF_HOLDERS: Final = OF_LINKS | {FaultKind.MEMBER_KILLED, FaultKind.MEMBER_STOPPED, FaultKind.TAKEN_FOR_DEAD}
"""These wait for a while until their member holds a claim."""

APPENDS: Final = ("ClaimingPartition", "ClaimingMessages", "Heartbeat", "ReleasingPartition")
RANGE_APPENDS: Final = ("ClaimingRange", "PlanningRange", "RangeHeartbeat", "RangeDone", "ReleasingRange")
RANGES_PART: Final = 0.25
"""The share of groups whose members claim ranges."""
SLOWEST_MS: Final = 250


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at_s` after the group's first commit, for `lasts_s`, at `member` if it concerns one member.

    A member is killed or stopped at `step`, if it reaches that, or `after_messages` of one batch; otherwise at `at_s`.
    In the `held` directions a link passes nothing; the bytes arrive afterwards if `comes_late`, else never. A clock is
    wrong by `off_s` and runs at `rate`. The clock of the lease, which cannot be set, runs at `lease_rate`.
    """

    kind: FaultKind
    member: int
    at_s: float
    lasts_s: float
    step: KillPoint | None = None
    after_messages: int | None = None
    held: frozenset[Way] = frozenset()
    comes_late: bool = True
    delay_s: float = 0.0
    off_s: int = 0
    rate: float = 1.0
    lease_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed's run."""

    seed: int
    mode: DeliveryMode
    coordination_partitions: int
    partitions: int
    backlog: int
    """The number of messages in each partition at the start."""
    max_records: int
    max_claims: int | None
    slow_ms: int
    """The longest time for one message. A batch takes a part of a lease, or more than one lease."""
    faults: tuple[Fault, ...]
    ranges: RangeOptions | None = None
    """How the members claim ranges, if the group uses them."""

    @property
    def claims_ranges(self) -> bool:
        """Return whether members claim ranges."""
        return self.ranges is not None

    @property
    def is_of_brokers(self) -> bool:
        """Return whether the run needs the cluster for itself."""
        return any(fault.kind in OF_BROKERS for fault in self.faults)

    def of(self, kind: FaultKind) -> Fault | None:
        """Return the fault of a kind."""
        return next((fault for fault in self.faults if fault.kind is kind), None)


def scenario(seed: int) -> Scenario:
    """Draw a run from a seed; 16 consecutive seeds have each kind of fault once, in any mode."""
    chance = random.Random(seed)
    first = KINDS[seed % len(KINDS)]
    kinds = [first]
    if first not in ALONE and chance.random() < 0.6:
        kinds.append(chance.choice([kind for kind in BESIDE if kind is not first]))
    members = chance.sample(range(MEMBERS), len(kinds))
    max_records = chance.randint(20, 50)
    whole = Scenario(
        seed=seed,
        mode=chance.choice(tuple(DeliveryMode)),
        coordination_partitions=chance.choice((1, 2, 4)),
        partitions=chance.randint(2, 4),
        backlog=chance.randint(20, 40),
        max_records=max_records,
        max_claims=chance.choice((None, 1, 2)),
        slow_ms=min(SLOWEST_MS, round(2_000 * chance.uniform(0.5, 2.5 * LEASE_S) / max_records)),
        faults=tuple(_fault(kind, member, chance) for kind, member in zip(kinds, members, strict=True)),
    )
    return _with_ranges(whole, chance) if chance.random() < RANGES_PART else whole


def _with_ranges(whole: Scenario, chance: random.Random) -> Scenario:
    """Return the scenario with members that claim ranges, small enough for all of them in every partition."""
    size = chance.randint(4, 10)
    in_a_batch = min(whole.max_records, size * min(whole.partitions, whole.max_claims or whole.partitions))
    steps = {fault: replace(fault.step, record=chance.choice(RANGE_APPENDS)) for fault in whole.faults if fault.step}
    return replace(
        whole,
        slow_ms=min(SLOWEST_MS, whole.slow_ms * whole.max_records // in_a_batch),
        faults=tuple(replace(fault, step=steps.get(fault)) for fault in whole.faults),
        ranges=RangeOptions(
            size=size, prefetch_offsets=chance.choice((0, 0, size, 3 * size)), wait_s=chance.uniform(0, LEASE_S)
        ),
    )


def _fault(kind: FaultKind, member: int, chance: random.Random) -> Fault:
    details = _DETAILS.get(kind, _plain)
    return details(kind, member, chance.uniform(0.3, 2.0), chance)


def _plain(kind: FaultKind, member: int, at_s: float, chance: random.Random) -> Fault:
    return Fault(kind, member, at_s, lasts_s=chance.uniform(0.5, 2.5))


def _stepped(kind: FaultKind, member: int, at_s: float, chance: random.Random) -> Fault:
    step, after_messages = None, None
    match chance.randrange(3):
        case 0:
            sides = tuple(Side) if kind is FaultKind.MEMBER_KILLED else (Side.BEFORE, Side.AFTER)
            step = KillPoint(chance.choice(sides), chance.choice(APPENDS), chance.randint(1, 6))
        case 1:
            after_messages = chance.randint(0, 20)
    lasts_s = chance.uniform(0.2, 2.0) if kind is FaultKind.MEMBER_KILLED else chance.uniform(1.0, 1.8) * LEASE_S
    return Fault(kind, member, at_s, lasts_s, step, after_messages)


def _link(kind: FaultKind, member: int, at_s: float, chance: random.Random) -> Fault:
    held: frozenset[Way] = frozenset()
    if kind is FaultKind.LINK_HALF_OPEN:
        held = frozenset(Way)
    elif kind is FaultKind.LINK_ONE_WAY:
        held = frozenset({chance.choice(tuple(Way))})
    delay_s = chance.uniform(0.02, 0.3) if kind is FaultKind.LINK_SLOW else 0.0
    lasts_s = chance.uniform(0.3, 2.2) * LEASE_S
    return Fault(kind, member, at_s, lasts_s, held=held, comes_late=chance.random() < 0.6, delay_s=delay_s)


def _clock(kind: FaultKind, member: int, at_s: float, chance: random.Random) -> Fault:
    off_s = chance.choice((-1, 1)) * chance.randint(1, 36_000)
    rate = chance.choice((0.9, 0.95, 1.05, 1.1))
    return Fault(kind, member, at_s, 2.0, off_s=off_s, rate=rate, lease_rate=chance.uniform(0.97, 1.2))


_DETAILS: Final[dict[FaultKind, Callable[[FaultKind, int, float, random.Random], Fault]]] = {
    FaultKind.MEMBER_KILLED: _stepped,
    FaultKind.MEMBER_STOPPED: _stepped,
    FaultKind.CLOCK_OFF: _clock,
    **dict.fromkeys(OF_LINKS, _link),
}
