"""Decide when a member leads a partition: pure rules, without clock, thread or Kafka.

A member to which the group has assigned a partition publishes beats there and reads them back. The first of its own
beats that it reads back starts a term. The term has a new id, and its fence is the offset of that beat. So the later of
two terms has the larger fence. A term ends when the group takes the partition away. It also ends when the member has
read back none of the beats that it sent within the last `receive_deadline_ms`.
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
"""How many digits the number of a beat may have; no member sends that many beats."""
_BEATS_PER_DEADLINE: Final = 5
_MOST_RIVALS: Final = 100
"""How many of the newest beats of other members are stored; within one deadline there are far fewer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an election, in milliseconds."""

    receive_deadline_ms: float = 5_000.0
    """A leader that has read back no beat of the last `receive_deadline_ms` steps down."""
    poll_interval_ms: float = 100.0
    """How long one poll of the leader topic may take."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: A value is not above 0, or the deadline is too short for the poll interval.
        """
        for name in ("poll_interval_ms", "receive_deadline_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name):g}, but must be a time above 0")
        if self.receive_deadline_ms < 2 * _BEATS_PER_DEADLINE * self.poll_interval_ms:
            raise ConfigurationError(
                f"receive_deadline_ms is {self.receive_deadline_ms:g}, which is too short for a poll every "
                f"{self.poll_interval_ms:g} ms; set it to at least {2 * _BEATS_PER_DEADLINE} times poll_interval_ms"
            )

    @property
    def beat_interval_ms(self) -> float:
        """How often, in milliseconds, a member that owns the partition publishes a beat."""
        return self.receive_deadline_ms / _BEATS_PER_DEADLINE


@dataclass(frozen=True, slots=True)
class Beat:
    """A record of the leader topic: the id under which a member leads or wants to lead, and a number that rises."""

    leader_id: str
    number: int

    def render(self) -> bytes:
        """Return the beat as the value of a record."""
        return f"{LEADER_FORMAT}/{self.leader_id}/{self.number}".encode()

    @classmethod
    def parse(cls, value: bytes | None) -> "Beat | None":
        """Return the beat in the value of a record, or None for any other value."""
        try:
            kind, leader_id, number = (value or b"").decode().split("/")
        except ValueError:  # UnicodeDecodeError too
            return None
        if kind != LEADER_FORMAT or not 0 < len(leader_id) <= LONGEST_ID:
            return None
        is_number = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS
        return cls(leader_id, int(number)) if is_number else None


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """A time in which one member leads a partition. The later of two terms has the larger `fence`."""

    fence: int
    leader_id: str


@dataclass(frozen=True, slots=True)
class TermStarted:
    """The event that a term has started."""

    term: Term


@dataclass(frozen=True, slots=True)
class TermEnded:
    """The event that a term has ended."""

    term: Term
    reason: str


Event = TermStarted | TermEnded


class Candidacy:
    """The candidacy of one member in one partition of the leader topic.

    All times are milliseconds of a clock that never jumps.
    """

    def __init__(self, timing: Timing, ids: Iterable[str]) -> None:
        """Start without the partition. `ids` yields ids that no member ever used before."""
        self._timing = timing
        self._ids = iter(ids)
        self._id: str | None = None
        """The id under which the member leads or wants to lead; None while it does not own the partition."""
        self._sent_ms: dict[int, float] = {}
        """The sending times of the beats that can still be read back in time, by number."""
        self._number = 0
        self._next_beat_ms = 0.0
        self._candidate_from_ms = 0.0
        self._ends_ms = 0.0
        self.term: Term | None = None
        self._rivals: deque[int] = deque(maxlen=_MOST_RIVALS)
        """The offsets of other members' beats after the start of the term."""

    def gain(self, now_ms: float) -> None:
        """Become a candidate, because the group has assigned the partition to this member."""
        self._start_new_candidacy(now_ms)

    def lose(self, reason: str) -> list[Event]:
        """End the term, because the group has taken the partition away."""
        events = self._resign(reason)
        self._id = None
        return events

    def give_up(self, now_ms: float, reason: str) -> list[Event]:
        """End the term and become a candidate for another one.

        A leader must do this, for example, when its storage shows that a later leader has started.
        """
        events = self._resign(reason)
        if self._id is not None:
            self._start_new_candidacy(now_ms)
        return events

    def receive(self, beat: Beat, offset: int, now_ms: float) -> list[Event]:
        """Process a beat of any member that was read at `offset` of the partition; end a term whose deadline passed."""
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
            reason = "the leader topic was re-created or truncated: a beat has an offset before the start of the term"
            return self.give_up(now_ms, reason)
        return []

    def leads(self, now_ms: float) -> bool:
        """Return whether the term holds at `now_ms`, also if its deadline has passed since the last call of `tick`."""
        return self.term is not None and now_ms < self._ends_ms

    def waited_ms(self, now_ms: float) -> float:
        """Return how long this member has owned the partition without a term, in milliseconds."""
        is_waiting = self.term is None and self._id is not None
        return now_ms - self._candidate_from_ms if is_waiting else 0.0

    def may_have_successor(self, fence: int) -> bool:
        """Return whether another member may have started a term with this fence after this member's term.

        The fence of a term is the offset of the beat that started it, so a beat of another member is at that offset.
        """
        return fence in self._rivals

    def tick(self, now_ms: float) -> tuple[list[Event], Beat | None]:
        """End a term whose deadline has passed, and return the beat to publish, if one is due."""
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
        return self.give_up(now_ms, f"read back none of its own beats of the last {waited_s:g} s")

    def _start_new_candidacy(self, now_ms: float) -> None:
        self._id = next(self._ids)
        self._sent_ms = {}
        self._number = 0
        self._next_beat_ms = now_ms
        self._candidate_from_ms = now_ms
        self._rivals.clear()

    def _resign(self, reason: str) -> list[Event]:
        term, self.term = self.term, None
        return [] if term is None else [TermEnded(term, reason)]
