"""How a coordinator leads one group: who is in it, who lives, and who is to work on what. Pure: no clock, no Kafka.

Times are milliseconds of a clock that never jumps. Words of members come in, orders go out; what a wrong, late or
second coordinator orders can cost balance, never safety, which is the claims' in the coordination log.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from marshal_dagster.coordinator.assignment import Assignment, Board, Place, Strategy, Subscriber
from marshal_dagster.coordinator.messages import (
    ALL,
    LONGEST_PATTERN,
    LONGEST_SESSION_MS,
    Leave,
    Order,
    Ping,
    Pong,
    Refusal,
    Register,
    Registered,
    Started,
    StartFetcher,
    StopFetcher,
    Stopped,
    Word,
    by_topic,
    places_of,
)
from marshal_dagster.errors import ConfigurationError

_ROUNDS_KEPT: Final = 32
_REPLACED_KEPT: Final = 1_000
_UNWEIGHED: Final = 1.0
_MUCH: Final = 1.25
"""By so much a member's load is off what it could be, before partitions that have a weight are moved for it."""
_LONG: Final = 30
"""How many times the usual pause follows a rebalance that was given up."""
_GATHER_AT_MOST: Final = 10
"""How many times the usual while a rebalance waits for more members that come or go."""
_AT_LEAST_MS: Final = 1_000.0
"""How long a coordinator that takes over waits for members of which the one before has left no record."""
_ABSENT_MS: Final = 1_000.0
"""A longer time without a turn counts against nobody: the coordinator could not hear."""
_GENERATION_BELOW: Final = 2**40
"""No group comes so far: a record that says so is not a coordinator's."""
_RECOVERS_AT_MOST_MS: Final = 60_000.0
_IS_PATTERN: Final = re.compile(r"[A-Za-z0-9._*?-]+").fullmatch


@dataclass(frozen=True, slots=True)
class Rules:
    """How a coordinator leads its groups; times in milliseconds.

    A rebalance begins `gather_ms` after the last member came or went, and ten times that after the first at the
    latest: those of thousands that come together are shared out to once, not one after the other.

    Where it `weighs` partitions, as for a strategy that goes by their lag, none begins before the weights are told.
    """

    strategy: Strategy
    min_session_ms: int = 1_000
    max_failed_pings: int = 1
    gather_ms: float = 100.0
    rebalance_backoff_ms: float = 1_000.0
    max_rebalance_retries: int = 4
    weighs: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for values that cannot be."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ConfigurationError(f"{each.name}: {value}; give 0 or more")
        if not 1 <= self.min_session_ms <= LONGEST_SESSION_MS:
            raise ConfigurationError(f"min_session_ms: {self.min_session_ms}; give 1 to {LONGEST_SESSION_MS}")


class Happening(Enum):
    """What people want to hear of a group."""

    JOINED = "joined"
    LEFT = "left"
    FAILED = "failed"
    REBALANCED = "rebalanced"
    REBALANCE_RETRIED = "rebalance retried"
    REBALANCE_GIVEN_UP = "rebalance given up"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a group: to which members, or how many partitions changed hands."""

    happening: Happening
    members: tuple[str, ...] = ()
    moved: int = 0


@dataclass(slots=True)
class _Member:
    """A member as the coordinator sees it."""

    registration: Register
    places: frozenset[Place]
    """What it has been told to work on, and has not said that it stopped."""
    is_told: bool
    """Whether it has said that it works on just that."""
    unanswered_ms: float | None = None
    """When the oldest ping was sent that it has not answered."""
    gained: frozenset[Place] = frozenset()
    """What of its places was given to it last."""
    answered: int = 0
    """The newest round that it has answered: an answer to an older one says nothing more."""

    @property
    def session_ms(self) -> int:
        return self.registration.session_timeout_ms

    @property
    def tenure(self) -> str:
        return self.registration.tenure


@dataclass(slots=True)
class _Rebalance:
    """A rebalance under way: first those stop who give something up, then all start whose share has changed."""

    target: Mapping[str, frozenset[Place]]
    stopping: dict[str, frozenset[Place]]
    moved: int
    changed: frozenset[str]
    """Whose share is not what it was, or is told to a member for the first time."""
    is_partial: bool = False
    """Whether another is to come, for what is still to be moved."""
    starting: set[str] = field(default_factory=set)
    has_begun_to_start: bool = False
    _deadlines_ms: dict[str, float] = field(default_factory=dict)
    _first_ms: float = math.inf
    """No deadline is before."""

    def wait_for(self, members: Mapping[str, float], now_ms: float) -> None:
        """Wait for these members' answers, and no others', so many milliseconds each."""
        self._deadlines_ms = {name: now_ms + wait_ms for name, wait_ms in members.items()}
        self._first_ms = min(self._deadlines_ms.values(), default=math.inf)

    def wait_longer(self, more_ms: float) -> None:
        """Wait so much longer for each."""
        self._deadlines_ms = {name: at_ms + more_ms for name, at_ms in self._deadlines_ms.items()}
        self._first_ms += more_ms

    def has_answered(self, member: str) -> None:
        """Wait no more for a member."""
        self._deadlines_ms.pop(member, None)

    def late(self, now_ms: float) -> list[str]:
        """Give the members that have not answered in time."""
        if now_ms < self._first_ms:
            return []
        self._first_ms = min(self._deadlines_ms.values(), default=math.inf)
        return [name for name, deadline_ms in self._deadlines_ms.items() if now_ms >= deadline_ms]


class GroupCoordinator:
    """Leads one group, for one term; for one thread.

    Every method that is given something returns the orders to send; `events` collects what happened.
    """

    def __init__(
        self,
        group: str,
        epoch: int,
        rules: Rules,
        now_ms: float,
        *,
        kept: Iterable[StartFetcher] = (),
        recovery_ms: float = 0.0,
        generation: int = 0,
    ) -> None:
        """Lead from `now_ms` on. `kept` are the shares that the coordinator before has told members of.

        These members have `recovery_ms` to register again, or the longest of their session time-outs, up to a minute;
        until all have, or it is over, nothing is moved. Its generations come after `generation`.
        """
        self.group, self.epoch = group, epoch
        self.events: list[Event] = []
        self._rules = rules
        self._members: dict[str, _Member] = {}
        self._replaced: dict[str, None] = {}
        """Tenures whose place another process of the same fixed name has taken, the newest last."""
        self._owner: Assignment = {}
        """Who has what, the other way round."""
        self._kept = {each.member: each for each in kept}
        self._unheard = set(self._kept)
        """Whom a coordinator before has told something, and who has not come to this one yet."""
        sessions_ms = [min(each.session_timeout_ms, _RECOVERS_AT_MOST_MS) for each in self._kept.values()]
        self._recovers_until_ms = now_ms + max([recovery_ms, *sessions_ms])
        self._waits_until_ms = now_ms + min(recovery_ms, _AT_LEAST_MS)
        generations = [each.generation for each in self._kept.values() if each.generation < _GENERATION_BELOW]
        self.generation = max([generation, *generations])
        """Of the newest orders to stop and to start."""
        self._topics: Mapping[str, int] = {}
        self._knows_topics = False
        """Before it does, nobody is told anything."""
        self._weights: Mapping[Place, float] = MappingProxyType({})
        self.awaits_weights = rules.weighs
        """Whether there is something to weigh before anything is moved."""
        self._positions: dict[Place, int] = {}
        """How far members say that they got."""
        self._round = 0
        self._sent_ms: dict[int, float] = {}
        self._next_ping_ms = now_ms
        self._none_dead_before_ms = math.inf
        """No member can have failed too many pings earlier, unless another ping is sent."""
        self._turn_ms = now_ms
        self._is_due = False
        self._gathers_from_ms: float | None = None
        self._gathers_until_ms = now_ms
        self._not_before_ms = now_ms
        self._retries = 0
        self._rebalance: _Rebalance | None = None

    # What is known

    @property
    def members(self) -> list[str]:
        """The members, by id."""
        return sorted(self._members)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way and nothing is due."""
        return self._rebalance is None and not self._is_due

    @property
    def is_forsaken(self) -> bool:
        """Whether there is nobody to lead, nor anybody to wait for."""
        return not self._members and not self._kept

    def assignment(self) -> dict[str, frozenset[Place]]:
        """Give what each member works on, as far as it is known."""
        return {name: member.places for name, member in self._members.items()}

    def shares(self) -> list[StartFetcher]:
        """Give the same as orders to start with it."""
        return [self._start(name) for name in self._members]

    @property
    def positions(self) -> Mapping[Place, int]:
        """How far members that commit by themselves say that they got."""
        return self._positions

    def topics_wanted(self) -> frozenset[str]:
        """Give the topics that members take, as far as they are there."""
        wanted = {topic for member in self._members.values() for topic in self._wanted(member.registration)}
        return frozenset(wanted & self._topics.keys())

    # What comes in

    def hear(self, word: Word, now_ms: float) -> list[Order]:
        """Take a member's word. A rebalance that it makes due begins with a `tick`, once all that came were heard."""
        self._excuse(now_ms)
        member = self._members.get(word.member)
        if word.epoch > self.epoch and (isinstance(word, Register) or (member and member.tenure == word.tenure)):
            self._tell(Happening.SUPERSEDED)
            return []
        if isinstance(word, Register):
            return self._register(word, now_ms)
        if member is None or member.tenure != word.tenure:
            if not isinstance(word, Pong):
                return []
            error: Refusal = "duplicate_id" if word.tenure in self._replaced else "unknown_member"
            return [self._answer(word.member, word.tenure, error)]
        if isinstance(word, Leave):
            self._remove([word.member], Happening.LEFT, now_ms)
            return []
        if word.epoch != self.epoch:
            return []
        match word:
            case Pong():
                self._answered(word, member)
                return []
            case Stopped():
                return self._stopped(word, now_ms)
            case Started():
                return self._started(word)

    def _answered(self, word: Pong, member: _Member) -> None:
        if word.round <= member.answered:
            return
        member.answered = word.round
        later = [sent_ms for number, sent_ms in self._sent_ms.items() if number > word.round]
        member.unanswered_ms = min(later, default=None)
        self._note_positions(word, member)

    def topics_are(self, topics: Mapping[str, int], now_ms: float) -> list[Order]:
        """Take how many partitions each topic has."""
        self._excuse(now_ms)
        self._knows_topics = True
        if topics != self._topics:
            self._topics = dict(topics)
            self._is_due = True
            self.awaits_weights = self._rules.weighs
        return self._go_on(now_ms)

    def weights_are(self, topics: Collection[str], weights: Mapping[Place, float] | None) -> None:
        """Take what partitions of these topics weigh, such as their lag; None for what could not be found out.

        It counts from the next rebalance on, of which one begins now if that spreads the weights much better.
        """
        self._weights = self._weights if weights is None else weights
        self.awaits_weights = topics != self.topics_wanted()
        if self._rebalance is None and self._members:
            self._is_due = True

    def tick(self, now_ms: float) -> list[Order]:
        """Let time pass."""
        orders: list[Order] = []
        self._excuse(now_ms)
        self._fail_silent(now_ms)
        if (self._members or self._kept) and now_ms >= self._next_ping_ms:
            orders.append(self._ping(now_ms))
        return [*orders, *self._go_on(now_ms)]

    # Members

    def _register(self, word: Register, now_ms: float) -> list[Order]:
        error = self._why_not(word)
        if error is not None:
            return [self._answer(word.member, word.tenure, error)]
        before = self._members.get(word.member)
        kept = self._kept.pop(word.member, None)
        self._unheard.discard(word.member)
        if not self._members:
            within_ms = min(word.session_timeout_ms / 3, _RECOVERS_AT_MOST_MS)
            self._recovers_until_ms = max(self._recovers_until_ms, now_ms + within_ms)
        had = before.places if before is not None else frozenset[Place]()
        places = self._places_of(word, had, kept)
        is_as_said = places == places_of(word.holds)
        is_known = before is not None and before.tenure == word.tenure
        # What it has been told since it said so, it has yet to answer.
        is_told = is_as_said and (before is None or not is_known or before.is_told)
        self._members[word.member] = _Member(word, had, is_told)
        self._has(word.member, places)
        is_same = before is not None and _interests(before.registration) == _interests(word) and places == had
        if before is None or _interests(before.registration) != _interests(word):
            self.awaits_weights = self._rules.weighs
        if before is None:
            self._tell(Happening.JOINED, word.member)
        if before is None and not places and self._rebalance is not None:
            self._gather(now_ms)
        elif not is_known or not is_same or not is_as_said:
            self._make_due(now_ms)
        if before is not None and before.tenure != word.tenure:
            self._replace(before.tenure)
        return [self._answer(word.member, word.tenure, None)]

    def _why_not(self, word: Register) -> Refusal | None:
        if word.session_timeout_ms < self._rules.min_session_ms:
            return "session_timeout_too_short"
        if word.session_timeout_ms > LONGEST_SESSION_MS:
            return "session_timeout_too_long"
        if word.pattern is not None and (len(word.pattern) > LONGEST_PATTERN or not _IS_PATTERN(word.pattern)):
            return "bad_pattern"
        before = self._members.get(word.member)
        is_other = before is not None and before.tenure != word.tenure
        if is_other and before is not None and not (word.is_static and before.registration.is_static):
            return "duplicate_id"
        return "duplicate_id" if is_other and word.tenure in self._replaced else None

    def _replace(self, tenure: str) -> None:
        """Have a process whose name another one has taken not take it back."""
        self._replaced[tenure] = None
        if len(self._replaced) > _REPLACED_KEPT:
            del self._replaced[next(iter(self._replaced))]

    def _places_of(self, word: Register, had: frozenset[Place], kept: StartFetcher | None) -> frozenset[Place]:
        """Give what a member that registers has: what it says, of which nobody else has anything.

        One of a fixed name that has come back has what it had.
        """
        told = places_of(word.holds)
        if word.is_static and not told:
            told = places_of(kept.places) if kept is not None else had
        return frozenset(place for place in told if self._owner.get(place, word.member) == word.member)

    def _fail_silent(self, now_ms: float) -> None:
        if now_ms < self._none_dead_before_ms:
            return
        dead = [name for name, member in self._members.items() if now_ms >= self._dies_ms(member)]
        if len(dead) == len(self._members) > 1:
            # Rather it is the coordinator who hears nothing: those who come back find what they had.
            self._kept |= {name: self._start(name) for name in dead}
            self._recovers_until_ms = now_ms + max(self._members[name].session_ms for name in dead)
        if dead:
            self._remove(dead, Happening.FAILED, now_ms)
        self._note_first_death()

    def _note_first_death(self) -> None:
        self._none_dead_before_ms = min(map(self._dies_ms, self._members.values()), default=math.inf)

    def _dies_ms(self, member: _Member) -> float:
        """Give when a member has failed more pings than it may: each counts as failed after 2/3 of its session."""
        if member.unanswered_ms is None:
            return math.inf
        thirds = 2 + self._rules.max_failed_pings
        return member.unanswered_ms + member.session_ms * thirds / 3

    def _remove(self, names: Iterable[str], happening: Happening, now_ms: float) -> None:
        for name in names:
            self._has(name, frozenset())
            del self._members[name]
            self._tell(happening, name)
        self._make_due(now_ms)

    def _ping(self, now_ms: float) -> Order:
        self._round += 1
        self._sent_ms[self._round] = now_ms
        self._sent_ms.pop(self._round - _ROUNDS_KEPT, None)
        for member in self._members.values():
            if member.unanswered_ms is None:
                member.unanswered_ms = now_ms
        self._note_first_death()
        sessions_ms = [member.session_ms for member in self._members.values()]
        self._next_ping_ms = now_ms + min(sessions_ms, default=self._rules.min_session_ms) / 3
        unanswered = [each.unanswered_ms for each in self._members.values() if each.unanswered_ms is not None]
        oldest_ms = min(unanswered, default=now_ms)
        retry = sum(oldest_ms <= sent_ms < now_ms for sent_ms in self._sent_ms.values())
        return Ping(group=self.group, member=ALL, epoch=self.epoch, round=self._round, retry=retry)

    # Rebalance

    def _go_on(self, now_ms: float) -> list[Order]:
        """Do what is due of a rebalance."""
        rebalance = self._rebalance
        if rebalance is not None:
            late = rebalance.late(now_ms)
            if not late:
                return []
            self._retry(late, now_ms)
            if not rebalance.has_begun_to_start:
                return self._start_what_is_free(rebalance, now_ms)
        if not self._is_due or not self._knows_topics or self.awaits_weights:
            return []
        if now_ms < max(self._not_before_ms, self._gathers_until_ms) or self._is_recovering(now_ms):
            return []
        return self._begin(now_ms)

    def _gather(self, now_ms: float) -> None:
        """Have the work shared out anew, with those that come or go together with this one."""
        self._is_due = True
        self._retries = 0
        if self._gathers_from_ms is None:
            self._gathers_from_ms = now_ms
        longest_ms = _GATHER_AT_MOST * self._rules.gather_ms
        self._gathers_until_ms = min(now_ms + self._rules.gather_ms, self._gathers_from_ms + longest_ms)

    def _is_recovering(self, now_ms: float) -> bool:
        return now_ms < (self._recovers_until_ms if self._kept else self._waits_until_ms)

    def _begin(self, now_ms: float) -> list[Order]:
        """Work out who is to have what; tell those to stop who give something up."""
        self._is_due = False
        self._gathers_from_ms = None
        self._kept = {}
        for name in sorted(self._unheard):
            self._tell(Happening.FAILED, name)
        self._unheard.clear()
        before: Assignment = dict(self._owner)
        target = self._target(before)
        after = {place: name for name, places in target.items() for place in places}
        moved = sum(before.get(place) != name for place, name in after.items()) + len(before.keys() - after.keys())
        shares = frozenset(
            name for name, member in self._members.items() if member.places != target[name] or not member.is_told
        )
        if not shares:
            self._retries = 0
            return []
        self.generation += 1
        stopping = {name: lost for name, member in self._members.items() if (lost := member.places - target[name])}
        self._rebalance = _Rebalance(target, stopping, moved, shares)
        if not stopping:
            return self._start_all(now_ms)
        self._rebalance.wait_for(self._answers_within_ms(stopping), now_ms)
        for name in stopping:
            self._members[name].is_told = False
        return [
            StopFetcher(
                group=self.group,
                member=name,
                epoch=self.epoch,
                tenure=self._members[name].tenure,
                generation=self.generation,
                places=by_topic(places),
            )
            for name, places in stopping.items()
        ]

    def _stopped(self, word: Stopped, now_ms: float) -> list[Order]:
        rebalance = self._rebalance
        if rebalance is None and word.generation == self.generation:
            self._not_before_ms = now_ms
        if rebalance is None or rebalance.has_begun_to_start or word.generation != self.generation:
            return []
        lost = rebalance.stopping.pop(word.member, frozenset())
        rebalance.has_answered(word.member)
        self._has(word.member, self._members[word.member].places - lost)
        return [] if rebalance.stopping else self._start_all(now_ms)

    def _start_all(self, now_ms: float) -> list[Order]:
        rebalance = self._rebalance
        assert rebalance is not None  # noqa: S101 - it calls this
        rebalance.has_begun_to_start = True
        rebalance.starting = set(rebalance.changed)
        rebalance.wait_for(self._answers_within_ms(rebalance.starting), now_ms)
        for name in rebalance.starting:
            member, target = self._members[name], rebalance.target[name]
            member.gained = target - member.places or member.gained & target
            self._has(name, target)
            member.is_told = False
        orders: list[Order] = [self._start(name) for name in sorted(rebalance.starting)]
        self._end_if_done()
        return orders

    def _start_what_is_free(self, rebalance: _Rebalance, now_ms: float) -> list[Order]:
        """Leave with those who have not stopped what they have; what others gave up waits for nobody."""
        held = {place: name for name, places in rebalance.stopping.items() for place in places}
        target = {
            name: frozenset(place for place in places if held.get(place, name) == name)
            | rebalance.stopping.get(name, frozenset())
            for name, places in rebalance.target.items()
        }
        changed = rebalance.changed - rebalance.stopping.keys()
        self._rebalance = _Rebalance(target, {}, rebalance.moved - len(held), changed, is_partial=True)
        return self._start_all(now_ms)

    def _started(self, word: Started) -> list[Order]:
        rebalance = self._rebalance
        if rebalance is None or word.generation != self.generation:
            return []
        if word.member in rebalance.starting:
            rebalance.starting.remove(word.member)
            self._members[word.member].is_told = True
        rebalance.has_answered(word.member)
        self._end_if_done()
        return []

    def _answers_within_ms(self, members: Iterable[str]) -> dict[str, float]:
        return {name: self._members[name].session_ms * 2 / 3 for name in members}

    def _end_if_done(self) -> None:
        rebalance = self._rebalance
        if rebalance is not None and rebalance.has_begun_to_start and not rebalance.starting:
            if rebalance.moved:
                self.events.append(Event(Happening.REBALANCED, moved=rebalance.moved))
            self._rebalance = None
            self._retries = self._retries if rebalance.is_partial else 0

    def _retry(self, late: Iterable[str], now_ms: float) -> None:
        """Give this attempt up, and try again later; much later, and told of, when that has been done often enough."""
        self._rebalance = None
        self._retries += 1
        self._is_due = True
        if self._retries > self._rules.max_rebalance_retries:
            self._tell(Happening.REBALANCE_GIVEN_UP, *sorted(late))
            self._retries = 0
            self._not_before_ms = now_ms + _LONG * self._rules.rebalance_backoff_ms
            return
        self._tell(Happening.REBALANCE_RETRIED, *sorted(late))
        self._not_before_ms = now_ms + self._rules.rebalance_backoff_ms

    def _make_due(self, now_ms: float) -> None:
        """Give up what is under way, and have it worked out anew soon: who there is has changed, or who has what."""
        self._rebalance = None
        self._not_before_ms = now_ms
        self._gather(now_ms)

    def _excuse(self, now_ms: float) -> None:
        """Hold against nobody what was not heard while this process had no turn."""
        away_ms, self._turn_ms = now_ms - self._turn_ms, now_ms
        if away_ms <= _ABSENT_MS:
            return
        self._sent_ms = {number: sent_ms + away_ms for number, sent_ms in self._sent_ms.items()}
        for member in self._members.values():
            if member.unanswered_ms is not None:
                member.unanswered_ms += away_ms
        self._recovers_until_ms += away_ms
        if self._rebalance is not None:
            self._rebalance.wait_longer(away_ms)

    # Who has what

    def _has(self, name: str, places: frozenset[Place]) -> None:
        """Note what a member has from now on."""
        member = self._members[name]
        for place in member.places - places:
            if self._owner.get(place) == name:
                del self._owner[place]
        self._owner |= dict.fromkeys(places - member.places, name)
        member.places = places

    def _note_positions(self, word: Pong, member: _Member) -> None:
        told = {(topic, number): at for topic, each in (word.offsets or {}).items() for number, at in each.items()}
        self._positions |= {place: at for place, at in told.items() if place in member.places}

    def _target(self, before: Assignment) -> dict[str, frozenset[Place]]:
        subscribers = [
            Subscriber(name, frozenset(self._wanted(member.registration)), member.registration.capacity)
            for name, member in self._members.items()
        ]
        wanted = {topic for each in subscribers for topic in each.topics}
        numbered = ((topic, number) for topic in wanted for number in range(self._topics.get(topic, 0)))
        places = {place: self._weights.get(place, _UNWEIGHED) for place in numbered}
        found = self._rules.strategy(Board(places, subscribers, before))
        shares: dict[str, list[Place]] = {name: [] for name in self._members}
        for place, name in found.items():
            shares[name].append(place)
        target = {name: frozenset(share) for name, share in shares.items()}
        now = {name: member.places for name, member in self._members.items()}
        return now if self._rules.weighs and self._is_as_good(now, target) else target

    def _is_as_good(self, one: Mapping[str, frozenset[Place]], other: Mapping[str, frozenset[Place]]) -> bool:
        """Tell whether nobody takes what it does not want, nothing is left over, and loads do not differ much more."""
        if {place for places in one.values() for place in places} != {
            place for each in other.values() for place in each
        }:
            return False
        for name, places in one.items():
            if not {topic for topic, _ in places} <= set(self._wanted(self._members[name].registration)):
                return False
        loads, others = self._loads(one) or [0.0], self._loads(other) or [0.0]
        return max(loads) <= _MUCH * max(others) and min(others) <= _MUCH * min(loads)

    def _loads(self, shares: Mapping[str, frozenset[Place]]) -> list[float]:
        """Give how much each member has, by the weights of its partitions and its capacity."""
        return [
            sum(self._weights.get(place, _UNWEIGHED) + 1 for place in places)
            / self._members[name].registration.capacity
            for name, places in shares.items()
        ]

    def _wanted(self, registration: Register) -> Iterable[str]:
        pattern = registration.pattern
        matching = [] if pattern is None else [topic for topic in self._topics if fnmatchcase(topic, pattern)]
        return [*registration.topics, *matching]

    def _start(self, name: str) -> StartFetcher:
        member = self._members[name]
        return StartFetcher(
            group=self.group,
            member=name,
            epoch=self.epoch,
            tenure=member.tenure,
            generation=self.generation,
            places=by_topic(member.places),
            session_timeout_ms=member.session_ms,
            gained=by_topic(member.gained),
        )

    def _answer(self, member: str, tenure: str, error: Refusal | None) -> Registered:
        return Registered(group=self.group, member=member, epoch=self.epoch, tenure=tenure, error=error)

    def _tell(self, happening: Happening, *members: str) -> None:
        self.events.append(Event(happening, members))


def _interests(registration: Register) -> tuple[object, ...]:
    """Give what of a registration an assignment depends on."""
    return frozenset(registration.topics), registration.pattern, registration.capacity
