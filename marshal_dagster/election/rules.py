"""When a member leads: pure rules, without clock, thread or Kafka.

A member that the group has given a partition publishes beats to it and reads them back. The first beat of its own that
it hears begins a term: the term's id is new, and its fence is the offset at which that beat lies, so of two terms the
later one has the larger fence. A term ends when the partition goes, or when no beat that was sent within the deadline
has been heard.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from marshal_dagster.errors import ConfigurationError

LEADER_FORMAT: Final = "NELI1"
LONGEST_ID: Final = 100
_MOST_DIGITS: Final = 19
"""Of a beat's number: more than any member gets to."""
_BEATS_PER_DEADLINE: Final = 5
_MOST_RIVALS: Final = 100
"""How many of the newest beats of other members are remembered; within a deadline there are far fewer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How soon a leader that hears nothing of itself steps down, and how often it polls, in milliseconds."""

    receive_deadline_ms: float = 5_000.0
    poll_interval_ms: float = 100.0

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for values that cannot be."""
        for name in ("poll_interval_ms", "receive_deadline_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}: {getattr(self, name):g}; give a time above 0")
        if self.receive_deadline_ms < 2 * _BEATS_PER_DEADLINE * self.poll_interval_ms:
            raise ConfigurationError(
                f"receive_deadline_ms: {self.receive_deadline_ms:g} is too short for a poll each "
                f"{self.poll_interval_ms:g} ms; give at least {2 * _BEATS_PER_DEADLINE} times as much"
            )

    @property
    def beat_interval_ms(self) -> float:
        """How often a member that has the partition publishes a beat."""
        return self.receive_deadline_ms / _BEATS_PER_DEADLINE


@dataclass(frozen=True, slots=True)
class Beat:
    """What a member publishes: the id under which it leads or would lead, and the beat's number under it."""

    leader_id: str
    number: int

    def render(self) -> bytes:
        """Write it."""
        return f"{LEADER_FORMAT}/{self.leader_id}/{self.number}".encode()

    @classmethod
    def parse(cls, value: bytes | None) -> "Beat | None":
        """Read one; None for anything else."""
        try:
            kind, leader_id, number = (value or b"").decode().split("/")
        except ValueError:  # of decoding too
            return None
        if kind != LEADER_FORMAT or not 0 < len(leader_id) <= LONGEST_ID:
            return None
        is_number = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS
        return cls(leader_id, int(number)) if is_number else None


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """A time for which one member leads: of two terms of a partition the later one has the larger `fence`."""

    fence: int
    leader_id: str


@dataclass(frozen=True, slots=True)
class TermStarted:
    """A term has begun."""

    term: Term


@dataclass(frozen=True, slots=True)
class TermEnded:
    """A term has ended."""

    term: Term
    reason: str


Event = TermStarted | TermEnded


class Candidacy:
    """One member's standing in one partition of the leader topic, by milliseconds of a clock that never jumps."""

    def __init__(self, timing: Timing, ids: Iterable[str]) -> None:
        """Have no partition yet. `ids` never gives an id twice, to anybody."""
        self._timing = timing
        self._ids = iter(ids)
        self._id: str | None = None
        """Under which it leads or would lead; None without the partition."""
        self._sent_ms: dict[int, float] = {}
        """When beats that can still be heard in time were sent."""
        self._number = 0
        self._next_beat_ms = 0.0
        self._ends_ms = 0.0
        self.term: Term | None = None
        self._rivals: deque[int] = deque(maxlen=_MOST_RIVALS)
        """The offsets of other members' beats after the beginning of the term."""

    def gain(self, now_ms: float) -> None:
        """Take the partition, which the group has given."""
        self._start_new_candidacy(now_ms)

    def lose(self, reason: str) -> list[Event]:
        """Give the partition up, which the group has taken."""
        events = self._resign(reason)
        self._id = None
        return events

    def give_up(self, now_ms: float, reason: str) -> list[Event]:
        """End the term, as one whose storage has seen a later one must, and stand for another."""
        events = self._resign(reason)
        if self._id is not None:
            self._start_new_candidacy(now_ms)
        return events

    def receive(self, beat: Beat, offset: int, now_ms: float) -> list[Event]:
        """Take a beat that was read at `offset` of the partition, anybody's; a term that is over it ends."""
        if self._is_over(now_ms):
            return self._end(now_ms)
        if self.term is not None and beat.leader_id != self._id and offset > self.term.fence:
            self._rivals.append(offset)
        sent_ms = self._sent_ms.get(beat.number) if beat.leader_id == self._id else None
        if sent_ms is None:
            return []
        ends_ms = sent_ms + self._timing.receive_deadline_ms
        if now_ms >= ends_ms:
            return []
        self._ends_ms = max(self._ends_ms, ends_ms)
        self._sent_ms = {number: at for number, at in self._sent_ms.items() if number > beat.number}
        if self.term is None:
            self.term = Term(offset, beat.leader_id)
            return [TermStarted(self.term)]
        if offset <= self.term.fence:
            return self.give_up(now_ms, "the leader topic was made anew or truncated: a beat lies before its term")
        return []

    def leads(self, now_ms: float) -> bool:
        """Tell whether the term holds at this moment, be the deadline looked at yet or not."""
        return self.term is not None and now_ms < self._ends_ms

    def may_have_successor(self, fence: int) -> bool:
        """Return whether another member may have begun a term with this fence after this member's.

        The fence of a term is the offset of the beat that began it, so a beat of another member is at that offset.
        """
        return fence in self._rivals

    def tick(self, now_ms: float) -> tuple[list[Event], Beat | None]:
        """Let time pass: end a term whose deadline is over; give the beat to publish, if one is due."""
        events = self._end(now_ms) if self._is_over(now_ms) else []
        if self._id is None or now_ms < self._next_beat_ms:
            return events, None
        self._next_beat_ms = now_ms + self._timing.beat_interval_ms
        self._number += 1
        oldest_ms = now_ms - self._timing.receive_deadline_ms
        self._sent_ms = {number: at for number, at in self._sent_ms.items() if at > oldest_ms}
        self._sent_ms[self._number] = now_ms
        return events, Beat(self._id, self._number)

    def _is_over(self, now_ms: float) -> bool:
        return self.term is not None and now_ms >= self._ends_ms

    def _end(self, now_ms: float) -> list[Event]:
        waited_s = self._timing.receive_deadline_ms / 1_000
        return self.give_up(now_ms, f"heard no beat of its own of the last {waited_s:g} s")

    def _start_new_candidacy(self, now_ms: float) -> None:
        self._id = next(self._ids)
        self._sent_ms = {}
        self._number = 0
        self._next_beat_ms = now_ms
        self._rivals.clear()

    def _resign(self, reason: str) -> list[Event]:
        term, self.term = self.term, None
        return [] if term is None else [TermEnded(term, reason)]
