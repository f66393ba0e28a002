"""The scenario of one seed: the rows that are written, the members, and the faults with their times."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

TOPICS: Final = ("orders", "bills")
KEYS: Final = (b"a", b"b", b"c")
MOST_CALLS: Final = 120
"""Faults of calls happen within this number of first calls to the database and the brokers."""
CONTENDED_PART: Final = 0.4
"""The share of seeds in which several members believe that they lead, and rows are rejected."""
TRUNCATED_PART: Final = 0.1
"""The share of seeds in which an operator empties the tables."""
TIMING_DEADLINE_MS: Final = 2_000.0


class CallFault(StrEnum):
    """A fault of one request to the database or to a broker."""

    LOST_REQUEST = "request lost"
    LOST_ANSWER = "answer lost"
    LATE = "carried out after its client gave up"
    CRASH_BEFORE = "crash before a call"
    CRASH_AFTER = "crash after a call took effect"
    PAUSE_BEFORE = "pause before a call"
    PAUSE_AFTER = "pause after a call took effect"
    SLOW = "slow answer"


class EventKind(StrEnum):
    """A fault or an event at a given time."""

    CRASH = "crash at any time"
    STOP = "pause at any time"
    HANDOVER = "asked to stop"
    RESTART = "database restarted"
    CUT_DATABASE = "cut off from the database"
    CUT_KAFKA = "cut off from the brokers"
    SLOW_DATABASE = "slow database"
    SLOW_KAFKA = "slow brokers"
    REBALANCE = "partition given to another before its owner knows"
    LATE_BEATS = "beats delayed"
    DOUBLE_BEATS = "beats doubled"
    WALL_CLOCK = "wall clock jumps"
    RIGHT_LOST = "member without a right that it needs"
    TOPIC_GONE = "topic deleted and made again"
    PUT_BACK = "rows put back by a person"
    NOTES_LOST = "notes lost"
    TRUNCATED = "tables truncated, and ids given again"


@dataclass(frozen=True, slots=True)
class Event:
    """An event at virtual time `at_ms` that lasts `for_ms`; `chance` seeds the other random choices."""

    kind: EventKind
    at_ms: float
    for_ms: float
    chance: int


@dataclass(frozen=True, slots=True)
class Poison:
    """A row that the client rejects, or a broker, which names only the batch; until a time, or forever."""

    is_client: bool
    until_ms: float


@dataclass(frozen=True, slots=True)
class Written:
    """A row that a transaction inserts at virtual time `at_ms`."""

    number: int
    at_ms: float
    topic: str
    key: bytes | None
    poison: Poison | None = None


@dataclass(frozen=True, slots=True)
class Writing:
    """A transaction of a writer: it begins with its first row and ends at `ends_ms`."""

    rows: tuple[Written, ...]
    ends_ms: float
    is_rolled_back: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of one seed; `call_faults` maps the number of a call to its fault."""

    seed: int
    members: int
    writings: tuple[Writing, ...]
    missing: tuple[tuple[str, float], ...]
    """Topics that do not exist at first, and the times of their creation; infinity if they are never created."""
    max_records: int
    max_bytes: int
    max_attempts: int
    topic_patience_s: float
    poll_interval_s: float
    latency_ms: float
    """The longest time of a call in one direction, without faults."""
    faulty_ms: float
    """Faults and writers begin before this time."""
    call_faults: tuple[tuple[int, CallFault], ...]
    events: tuple[Event, ...]

    @property
    def calm_ms(self) -> float:
        """Return the time at which every fault is over."""
        return self.faulty_ms + 2_000

    @property
    def ends_ms(self) -> float:
        """Return the time at which every row must be published or parked."""
        return self.calm_ms + 60_000

    @property
    def faults(self) -> int:
        """Return the number of faults and events; shrinking leaves some out."""
        return len(self.call_faults) + len(self.events)

    def without(self, left_out: set[int]) -> "Scenario":
        """Return the same scenario without the faults and events of these numbers, which count through both."""
        first = len(self.call_faults)
        return replace(
            self,
            call_faults=tuple(fault for number, fault in enumerate(self.call_faults) if number not in left_out),
            events=tuple(event for number, event in enumerate(self.events, first) if number not in left_out),
        )


_RARE: Final = frozenset({EventKind.NOTES_LOST, EventKind.TRUNCATED})
_COMMON: Final = [kind for kind in EventKind if kind not in _RARE]
_CALL_FAULTS: Final = list(CallFault)


def scenario(seed: int) -> Scenario:
    """Draw the scenario of `seed`."""
    chance = random.Random(seed)
    many = chance.random() < 0.3
    is_contended = chance.random() < CONTENDED_PART
    faulty_ms = chance.choice((2_000.0, 3_000.0, 4_000.0))
    kinds = [chance.choice(_COMMON) for _ in range(chance.randint(0, 6 if many else 3))]
    if is_contended:
        kinds += [EventKind.REBALANCE] * chance.randint(2, 4)
    if chance.random() < 0.03:
        kinds.append(EventKind.NOTES_LOST)
    truncates = random.Random(seed * 3 + 2)
    if truncates.random() < TRUNCATED_PART:
        at_ms = truncates.random() * faulty_ms
        truncated = [Event(EventKind.TRUNCATED, at_ms, 0.0, truncates.getrandbits(32))]
    else:
        truncated = []
    events = truncated + [
        Event(kind, chance.random() * faulty_ms, chance.choice((300, 1_500, 3_500)), chance.getrandbits(32))
        for kind in kinds
    ]
    faults = {
        chance.randint(1, MOST_CALLS): chance.choice(_CALL_FAULTS) for _ in range(chance.randint(0, 8 if many else 4))
    }
    missing = () if chance.random() < 0.8 else ((chance.choice(TOPICS), chance.choice((1_000.0, 2_000.0, inf))),)
    return Scenario(
        seed=seed,
        members=chance.choice((2, 2, 3)) if is_contended else chance.choice((1, 2, 3)),
        writings=_writings(chance, faulty_ms, (0.2, 0.4) if is_contended else (0.0, 0.0, 0.05, 0.2)),
        missing=missing,
        max_records=chance.choice((1, 2, 4, 8, 100, 100)),
        max_bytes=chance.choice((1, 12, *[1_000] * 4)),
        max_attempts=chance.choice((1, 2, 3, 4)),
        topic_patience_s=random.Random(~seed).choice((0.0, 0.0, 1.0, 3.0)),
        poll_interval_s=chance.choice((0.1, 0.3, 0.5)),
        latency_ms=chance.choice((5.0, 50.0, 100.0)) if is_contended else chance.choice((1.0, 2.0, 10.0)),
        faulty_ms=faulty_ms,
        call_faults=tuple(sorted(faults.items())),
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
    )


def _writings(chance: random.Random, faulty_ms: float, poisonous_parts: tuple[float, ...]) -> tuple[Writing, ...]:
    writings: list[Writing] = []
    poisonous = chance.choice(poisonous_parts)
    number = 0
    for _ in range(chance.randint(2, 4)):
        topic, key = chance.choice(TOPICS), chance.choice(KEYS)
        at_ms = chance.random() * faulty_ms / 2
        for _ in range(chance.randint(2, 6)):
            rows = []
            for _ in range(chance.choice((1, 1, 2, 3))):
                other = chance.random() < 0.3
                place = (chance.choice(TOPICS), chance.choice((*KEYS, None))) if other else (topic, key)
                poison = _poison(chance, faulty_ms) if chance.random() < poisonous else None
                rows.append(Written(number, at_ms, *place, poison))
                number += 1
                at_ms += chance.random() * 20
            at_ms += chance.random() * chance.choice((2, 20, 20, 800))
            writings.append(Writing(tuple(rows), at_ms, chance.random() < 0.1))
            at_ms += chance.random() * chance.choice((2, 50, 400))
    return tuple(writings)


def _poison(chance: random.Random, faulty_ms: float) -> Poison:
    return Poison(chance.random() < 0.5, chance.choice((inf, chance.random() * faulty_ms)))
