"""The scenario of one seed: its members, and the faults with their times."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from marshal_dagster.batches import RangeOptions
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet
from tests.simulator.broker import AppendFault
from tests.simulator.checkers import GO_PATIENCE_MS
from tests.simulator.snapshots import SnapshotFault

T = TypeVar("T")
GROUP, TOPIC = "etl", "orders"
GO_GROUP, GO_CLIENT = "gophers", "go"
"""The name of a group of Go consumers on the same topic, and the prefix of the client ids of Go consumers."""
HI_MS = 1_000
LONG_HI_MS = 60_000
"""The heartbeat interval of groups with rule set `go`, and of some others."""
FAULTY_INTERVALS = 3
"""Faults begin within this number of heartbeat intervals."""
LOOK_LEAST_MS, LOOK_MOST_MS = 600, 800
"""The time between two attempts of members to find work, once earlier claims are stale."""
GO_PART = 0.12
"""The share of groups with rule set `go`."""
LONG_PART = 0.2
"""The share of native at-least-once groups that have the long heartbeat interval of Go groups."""
RANGES_PART = 0.2
"""The share of native groups whose members claim ranges."""
ADVISED_PART = 0.15
"""The share of groups whose members get advice on what to claim."""
FAILING_READINGS_PART = 0.25
"""The share of groups some of whose reads fail; three times as many if records may have senders' timestamps."""
MOST_APPENDS = 40
"""Append faults happen within this number of first appends."""
MOST_SNAPSHOT_RECORDS = 15
"""Snapshot faults happen within this number of first records of the snapshot topic."""


class EventKind(StrEnum):
    """A fault or an event at a given time."""

    CRASH = "crash at any time"
    STOP = "pause beyond the lease at any time"
    ORPHAN = "run that Dagster says is over goes on"
    TAKEN_FOR_DEAD = "claims revoked of a run that lives"
    CLOCK_BACK = "broker clock jumps back"
    CLOCK_AHEAD = "broker clock jumps ahead"
    GARBAGE = "garbage records"
    DOUBLE = "records of a second process with the same instance id"
    LAST_MOMENT = "claim to the millisecond at two intervals of silence"
    OTHER_INTERVAL = "member with another heartbeat interval"
    PAUSE = "group paused"
    POSITION = "position set back"
    LATE_RELEASE = "crash while a release is under way that arrives late"
    PARTITIONS = "partitions added"
    RETENTION = "log cut behind a snapshot"
    LATE_SNAPSHOT = "snapshot by a reader that lags"
    MIDDLE = "log cut: readers start in the middle"
    TRUNCATION = "log truncated"
    SWITCH_OFF = "ranges switched off"
    REVOKED_DONE = "range revoked as its end is under way"
    SETTLE = "settings written by a person"
    SENDERS_TIME = "senders' timestamps for a while"
    INTRUDER = "Go consumer in a native group"
    FORMER_SNAPSHOT = "snapshot of a former version"
    TAKE_OVER = "partition of a dead owner freed in a Go group"
    GO_POSITION = "position set back in a Go group"


class Beginning(StrEnum):
    """The content of the log before members start."""

    NOTHING = "nothing"
    GO_KEYS = "native group that Go consumers have used"
    BESIDE_GO = "native group beside a Go group"
    BESIDE_BOTH = "native group beside a Go group and another native one"
    FORMER_KEYS = "native group with keys and no settings"
    FORMER_PLAN = "native group with an open plan and no settings"
    GO_SETTINGS = "Go group with settings that say so"
    FORMER_GO = "Go group with ids of a former data topic"


@dataclass(frozen=True, slots=True)
class Event:
    """An event at virtual time `at_ms`; `chance` seeds the other random choices."""

    kind: EventKind
    at_ms: float
    chance: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member that starts runs: its clock, the delay of its way to the broker, and its client id."""

    client: str
    clock_rate: float = 1.0
    clock_off_ms: int = 0
    slowness: float = 1.0
    is_twin: bool = False
    """Whether its runs use the instance ids of the first member."""
    claim_entire_topic: bool = False
    max_claims: int | None = None
    interval_factor: int = 1
    """The factor by which its configured heartbeat interval differs from the group's."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of one seed; `append_faults` and `snapshot_faults` map the number of an append to its fault."""

    seed: int
    hi_ms: int
    """The group's heartbeat interval."""
    mode: DeliveryMode
    rule_set: RuleSet
    coordination_partitions: int
    data_partitions: int
    messages: int
    max_records: int
    slow: float
    """The longest time to process one message, in heartbeat intervals."""
    has_snapshots: bool
    members: tuple[Member, ...]
    append_faults: tuple[tuple[int, AppendFault], ...]
    events: tuple[Event, ...]
    go_members: int = 0
    """The number of Go members, in a group with rule set `go` or in a separate group on the same topic."""
    snapshot_faults: tuple[tuple[int, SnapshotFault], ...] = ()
    ranges: RangeOptions | None = None
    """How the members claim ranges, if the group uses them: the highest size of each."""
    is_advised: bool = False
    """Whether members get random advice on what to claim until faults are over."""
    beginning: Beginning = Beginning.NOTHING
    failing_part: float = 0.0
    """The share of reads of working members that fail."""

    @property
    def faulty_ms(self) -> int:
        """Return the time before which faults begin."""
        return FAULTY_INTERVALS * self.hi_ms

    @property
    def calm_ms(self) -> int:
        """Return the time at which every fault is over."""
        return self.faulty_ms + 2 * self.hi_ms

    @property
    def stale_ms(self) -> float:
        """Return the time at which all that died before the end of faults is stale, by the members' clocks."""
        return self.calm_ms + 2 * self.hi_ms + (GO_PATIENCE_MS if self.rule_set is RuleSet.GO else 0)

    @property
    def taken_up_ms(self) -> float:
        """Return the time at which every partition has an active member again, a second after what died is stale."""
        return self.stale_ms + 1_000

    @property
    def patience_ms(self) -> int:
        """Return the time after the end of faults within which all is processed or at least one offset has moved."""
        return 40 * self.hi_ms

    @property
    def traits(self) -> Counter[str]:
        """Return the counts of unusual properties of members."""
        clients = Counter(member.client for member in self.members)
        return Counter(
            {
                "member whose clock runs 10 % fast or slow": sum(one.clock_rate != 1 for one in self.members),
                "member whose clock is set wrongly": sum(one.clock_off_ms != 0 for one in self.members),
                "member that lags: a slow way to the broker": sum(one.slowness != 1 for one in self.members),
                "member with another's instance ids": sum(one.is_twin for one in self.members),
                "member with another's client id": clients.total() - len(clients),
            }
        )

    @property
    def faults(self) -> int:
        """Return the number of faults and events; shrinking leaves some out."""
        return len(self.append_faults) + len(self.events) + len(self.snapshot_faults) + (self.failing_part > 0)

    def without(self, left_out: set[int]) -> "Scenario":
        """Return the scenario without the faults and events of these numbers; all failing reads count as one."""
        events_at = len(self.append_faults)
        snapshot_faults_at = events_at + len(self.events)
        readings_at = snapshot_faults_at + len(self.snapshot_faults)
        return replace(
            self,
            append_faults=_without(left_out, self.append_faults),
            events=_without(left_out, self.events, events_at),
            snapshot_faults=_without(left_out, self.snapshot_faults, snapshot_faults_at),
            failing_part=0.0 if readings_at in left_out else self.failing_part,
        )


def _without(left_out: set[int], faults: tuple[T, ...], first: int = 0) -> tuple[T, ...]:
    return tuple(fault for number, fault in enumerate(faults, first) if number not in left_out)


_RARE = frozenset({EventKind.MIDDLE, EventKind.TRUNCATION})
_WITH_SNAPSHOTS = frozenset({EventKind.RETENTION, EventKind.LATE_SNAPSHOT})
_WITH_RANGES = frozenset({EventKind.SWITCH_OFF, EventKind.REVOKED_DONE})
_DRAWN_ALONE = frozenset(
    {
        EventKind.SETTLE,
        EventKind.SENDERS_TIME,
        EventKind.INTRUDER,
        EventKind.FORMER_SNAPSHOT,
        EventKind.TAKE_OVER,
        EventKind.GO_POSITION,
    }
)
_COMMON_EVENTS = [kind for kind in EventKind if kind not in _RARE | _WITH_SNAPSHOTS | _WITH_RANGES | _DRAWN_ALONE]
_UNDER_GO = [
    EventKind.CRASH,
    EventKind.STOP,
    EventKind.ORPHAN,
    EventKind.CLOCK_BACK,
    EventKind.CLOCK_AHEAD,
    EventKind.LAST_MOMENT,
    EventKind.PAUSE,
    EventKind.PARTITIONS,
]
"""The events of Go groups.

There any heartbeat can take a claim, so a process with another's instance id would do harm. A position stays set only
while the group has no members.
"""
_NATIVE_BEGINNINGS = (
    Beginning.GO_KEYS,
    Beginning.BESIDE_GO,
    Beginning.BESIDE_BOTH,
    Beginning.FORMER_KEYS,
    Beginning.FORMER_PLAN,
)
_GO_BEGINNINGS = (Beginning.NOTHING, Beginning.NOTHING, Beginning.GO_SETTINGS, Beginning.FORMER_GO)
WAITING_FOR_A_PERSON = frozenset({Beginning.GO_KEYS, Beginning.BESIDE_GO, Beginning.FORMER_PLAN})
"""Members of these groups do not claim before an operator has written their group's settings."""
BEGINNINGS_PART = 0.16
"""The share of native groups whose log is not empty at the start."""
_APPEND_FAULTS = [*AppendFault, AppendFault.OUTAGE]
"""An outage is drawn twice as often, because a record that leaves the queue late does harm only in a later tenure."""
_SNAPSHOT_FAULTS = list(SnapshotFault)
_MODES = list(DeliveryMode)


def scenario(seed: int) -> Scenario:
    """Return the scenario of `seed`."""
    chance = random.Random(seed)
    many = chance.random() < 0.3
    append_faults = {
        chance.randint(1, MOST_APPENDS): chance.choice(_APPEND_FAULTS)
        for _ in range(chance.randint(0, 8 if many else 3))
    }
    is_go = chance.random() < GO_PART
    mode = DeliveryMode.AT_LEAST_ONCE if is_go else chance.choice(_MODES)
    is_long = is_go or (mode is DeliveryMode.AT_LEAST_ONCE and chance.random() < LONG_PART)
    hi_ms = LONG_HI_MS if is_long else HI_MS
    common = _UNDER_GO if is_go else _COMMON_EVENTS
    kinds = [chance.choice(common) for _ in range(chance.randint(0, 5 if many else 2))]
    if chance.random() < 0.06:
        kinds.append(chance.choice(sorted(_RARE)))
    has_snapshots = chance.random() < 0.33
    if has_snapshots:
        kinds += chance.choices(sorted(_WITH_SNAPSHOTS), k=chance.randint(0, 3))
    events = [Event(kind, chance.random() * FAULTY_INTERVALS * hi_ms, chance.getrandbits(32)) for kind in kinds]
    members = tuple(_member(number, chance) for number in range(3 if chance.random() < 0.9 else 4))
    drawn = Scenario(
        seed=seed,
        hi_ms=hi_ms,
        mode=mode,
        rule_set=RuleSet.GO if is_go else RuleSet.NATIVE,
        coordination_partitions=chance.randint(1, 2),
        data_partitions=chance.randint(1, 8),
        messages=chance.choice((1, 2, 2, 2, 3)),
        max_records=chance.randint(3, 14),
        slow=chance.choice((0.005, 0.2, 0.8)),
        has_snapshots=has_snapshots,
        members=tuple(replace(member, is_twin=False) for member in members) if is_go else members,
        append_faults=tuple(sorted(append_faults.items())),
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
        go_members=chance.randint(1, 2) if is_go else 0,
        snapshot_faults=_snapshot_faults(chance) if has_snapshots else (),
        is_advised=random.Random(~seed).random() < ADVISED_PART,
    )
    return _begun(drawn if is_go or chance.random() > RANGES_PART else _with_ranges(drawn, chance))


def _begun(drawn: Scenario) -> Scenario:
    """Return the scenario with the content of the log at the start, and with faults that only some groups have."""
    chance = random.Random(drawn.seed * 7 + 8)
    kinds: dict[EventKind, float] = {EventKind.SENDERS_TIME: 0.04}
    if drawn.rule_set is RuleSet.GO:
        drawn = replace(drawn, beginning=chance.choice(_GO_BEGINNINGS))
        if chance.random() < 0.15:
            first, *others = drawn.members
            drawn = replace(drawn, members=(replace(first, client=f"{GO_CLIENT}0"), *others))
        kinds |= {EventKind.TAKE_OVER: 0.3, EventKind.GO_POSITION: 0.2}
    elif chance.random() < BEGINNINGS_PART:
        beginning = chance.choice(_NATIVE_BEGINNINGS)
        is_beside = beginning in {Beginning.BESIDE_GO, Beginning.BESIDE_BOTH}
        drawn = replace(drawn, beginning=beginning, go_members=chance.randint(1, 2) if is_beside else 0)
        if beginning in WAITING_FOR_A_PERSON:
            drawn = _with_event(drawn, EventKind.SETTLE, chance.uniform(0.3, 2) * drawn.hi_ms, chance)
    else:
        kinds[EventKind.INTRUDER] = 0.06
    if drawn.has_snapshots:
        kinds[EventKind.FORMER_SNAPSHOT] = 0.3
    for kind, part in kinds.items():
        if chance.random() < part:
            at_ms = chance.random() * drawn.faulty_ms
            is_early = kind is EventKind.SENDERS_TIME and drawn.ranges is not None
            drawn = _with_event(drawn, kind, 0 if is_early and at_ms < drawn.hi_ms else at_ms, chance)
    has_senders_time = any(event.kind is EventKind.SENDERS_TIME for event in drawn.events)
    is_go = drawn.rule_set is RuleSet.GO
    if chance.random() < FAILING_READINGS_PART * (3 if has_senders_time or is_go else 1):
        drawn = replace(drawn, failing_part=chance.choice((0.1, 0.2, 0.4) if is_go else (0.02, 0.1, 0.3)))
    return drawn


def _with_ranges(drawn: Scenario, chance: random.Random) -> Scenario:
    wait_s = chance.uniform(0, 1.5) * drawn.hi_ms / 1_000
    ranges = RangeOptions(size=chance.randint(2, 9), prefetch_offsets=chance.choice((0, 0, 6, 20)), wait_s=wait_s)
    mode = random.Random(drawn.seed * 7 + 6).choice((drawn.mode, DeliveryMode.AT_MOST_ONCE))
    drawn = replace(drawn, mode=mode)
    if chance.random() < 0.4:
        drawn = _with_event(drawn, EventKind.POSITION, chance.random() * drawn.hi_ms, chance)
    for kind in sorted(_WITH_RANGES):
        if chance.random() < 0.15:
            drawn = _with_event(drawn, kind, chance.random() * drawn.faulty_ms, chance)
    if chance.random() < 0.05:  # then the present ranges are unknown
        drawn = _with_event(drawn, EventKind.MIDDLE, chance.random() * drawn.hi_ms, chance)
        drawn = _with_event(drawn, EventKind.SWITCH_OFF, chance.uniform(1, 3) * drawn.hi_ms, chance)
    return replace(drawn, ranges=ranges)


def _with_event(drawn: Scenario, kind: EventKind, at_ms: float, chance: random.Random) -> Scenario:
    event = Event(kind, at_ms, chance.getrandbits(32))
    return replace(drawn, events=tuple(sorted([*drawn.events, event], key=lambda one: one.at_ms)))


def _snapshot_faults(chance: random.Random) -> tuple[tuple[int, SnapshotFault], ...]:
    count = chance.randint(0, 2)
    faults = {chance.randint(1, MOST_SNAPSHOT_RECORDS): chance.choice(_SNAPSHOT_FAULTS) for _ in range(count)}
    return tuple(sorted(faults.items()))


def _member(number: int, chance: random.Random) -> Member:
    odd = chance.random()
    return Member(
        client="same client" if chance.random() < 0.4 else f"client{number}",
        clock_rate=chance.choice((0.9, 1.1)) if odd < 0.1 else 1.0,
        clock_off_ms=chance.randint(-5_000, 5_000) if 0.1 < odd < 0.2 else 0,
        slowness=chance.choice((5.0, 20.0)) if 0.2 < odd < 0.3 else 1.0,
        is_twin=number > 0 and 0.3 < odd < 0.33,
        claim_entire_topic=0.4 < odd < 0.45,
        max_claims=1 if 0.5 < odd < 0.65 else None,
    )
