"""The members of a group, what each works on, which of them still answer, and which are expected back. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from marshal_dagster.coordinator.assignment import Assignment, DataPartitionId
from marshal_dagster.coordinator.messages import Pong, Register, StartFetcher, places_of

_MAX_ROUNDS: Final = 32
_MAX_REPLACED: Final = 1_000
_GENERATION_BELOW: Final = 2**40
"""No group comes so far: a record with a larger one was not written by a coordinator."""
_MAX_RECOVERY_MS: Final = 60_000.0
_MIN_RECOVERY_MS: Final = 1_000.0
"""How long a coordinator that takes over waits for members of which the one before has left no record."""


@dataclass(slots=True)
class Member:
    """A member as the coordinator sees it."""

    registration: Register
    is_confirmed: bool
    """Whether it has reported that it works on exactly `places`."""
    places: frozenset[DataPartitionId] = frozenset()
    """What it was sent to work on, and has not reported as stopped."""
    gained: frozenset[DataPartitionId] = frozenset()
    """The part of `places` that it was given last."""
    unanswered_ms: float | None = None
    """When the oldest ping was sent that it has not answered."""
    answered_round: int = 0
    """The newest ping that it has answered: answers to older ones count for nothing."""

    @property
    def session_ms(self) -> int:
        """Its session time-out."""
        return self.registration.session_timeout_ms

    @property
    def tenure(self) -> str:
        """The id of its process."""
        return self.registration.tenure

    def has_same_interests(self, registration: Register) -> bool:
        """Return whether an assignment treats this registration as its present one."""
        return _interests(self.registration) == _interests(registration)


def _interests(registration: Register) -> tuple[object, ...]:
    return frozenset(registration.topics), registration.pattern, registration.capacity


class Members:
    """The members by name, and which of them has each partition."""

    def __init__(self) -> None:
        """Begin without members."""
        self.by_name: dict[str, Member] = {}
        self.owners: Assignment = {}
        self.positions: dict[DataPartitionId, int] = {}
        """The next offsets that members have reported."""
        self._replaced: dict[str, None] = {}
        """Processes whose fixed name another process has taken, the newest last."""

    def find(self, name: str, tenure: str) -> Member | None:
        """Return the member of this name if it is this process."""
        member = self.by_name.get(name)
        return member if member is not None and member.tenure == tenure else None

    def is_replaced(self, tenure: str) -> bool:
        """Return whether another process has taken the name of this one."""
        return tenure in self._replaced

    def is_name_taken(self, registration: Register) -> bool:
        """Return whether a process may not take its name from the one that has it."""
        before = self.by_name.get(registration.member)
        if before is None or before.tenure == registration.tenure:
            return False
        is_static = registration.is_static and before.registration.is_static
        return not is_static or self.is_replaced(registration.tenure)

    def admit(self, registration: Register, recorded: StartFetcher | None) -> bool:
        """Add a process as a member; return whether it was one already, with the same interests and partitions.

        It has the partitions that it reports and no other member has. One of a fixed name that reports none has those
        that were `recorded` for it, or those that it had.
        """
        name, before = registration.member, self.by_name.get(registration.member)
        had = before.places if before is not None else frozenset[DataPartitionId]()
        reported = asked = places_of(registration.holds)
        if registration.is_static and not reported:
            asked = places_of(recorded.places) if recorded is not None else had
        places = frozenset(place for place in asked if self.owners.get(place, name) == name)
        is_as_reported = places == reported
        is_same_process = before is not None and before.tenure == registration.tenure
        # A process may report what it had before its newest share reached it, which it has yet to confirm.
        is_confirmed = is_as_reported and (before is None or not is_same_process or before.is_confirmed)
        self.by_name[name] = Member(registration, is_confirmed, had)
        self.assign(name, places)
        if before is None:
            return False
        if not is_same_process:
            self._replaced[before.tenure] = None
            if len(self._replaced) > _MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
        return is_same_process and is_as_reported and places == had and before.has_same_interests(registration)

    def remove(self, name: str) -> None:
        """Forget a member; its partitions are free."""
        self.assign(name, frozenset())
        del self.by_name[name]

    def assign(self, name: str, places: frozenset[DataPartitionId]) -> None:
        """Record that a member has these partitions from now on, and no others."""
        member = self.by_name[name]
        for place in member.places - places:
            if self.owners.get(place) == name:
                del self.owners[place]
        self.owners |= dict.fromkeys(places - member.places, name)
        member.places = places

    def record_positions(self, member: Member, pong: Pong) -> None:
        """Record the offsets that a member reports of its own partitions."""
        for topic, offsets in (pong.offsets or {}).items():
            self.positions |= {
                (topic, number): at for number, at in offsets.items() if (topic, number) in member.places
            }


class Liveness:
    """Which members have answered the pings; milliseconds.

    A ping counts as failed when 2/3 of the member's session time-out have passed, and each further one after 1/3.
    """

    def __init__(self, min_session_ms: int, max_failed_pings: int, now_ms: float) -> None:
        """Begin without pings; the first is due."""
        self._min_session_ms, self._max_failed_pings = min_session_ms, max_failed_pings
        self.next_ping_ms = now_ms
        self._round = 0
        self._sent_ms: dict[int, float] = {}
        self._first_death_ms = math.inf
        """No member has failed too many pings earlier, unless another ping is sent."""

    def ping(self, members: Collection[Member], now_ms: float) -> tuple[int, int]:
        """Begin a round; return its number, and in how many rounds before it some member did not answer."""
        self._round += 1
        self._sent_ms[self._round] = now_ms
        self._sent_ms.pop(self._round - _MAX_ROUNDS, None)
        for member in members:
            if member.unanswered_ms is None:
                member.unanswered_ms = now_ms
        self._first_death_ms = min(map(self._death_ms, members), default=math.inf)
        self.next_ping_ms = now_ms + min((member.session_ms for member in members), default=self._min_session_ms) / 3
        unanswered_ms = (member.unanswered_ms for member in members if member.unanswered_ms is not None)
        oldest_ms = min(unanswered_ms, default=now_ms)
        return self._round, sum(oldest_ms <= sent_ms < now_ms for sent_ms in self._sent_ms.values())

    def answer(self, member: Member, number: int) -> bool:
        """Take a member's answer to a round that has begun; return whether it is its newest."""
        if not member.answered_round < number <= self._round:
            return False
        member.answered_round = number
        member.unanswered_ms = min((sent_ms for sent, sent_ms in self._sent_ms.items() if sent > number), default=None)
        return True

    def dead(self, members: Mapping[str, Member], now_ms: float) -> list[str]:
        """Return the members that have failed too many pings; they are returned once."""
        if now_ms < self._first_death_ms:
            return []
        deaths_ms = {name: self._death_ms(member) for name, member in members.items()}
        self._first_death_ms = min((at_ms for at_ms in deaths_ms.values() if at_ms > now_ms), default=math.inf)
        return [name for name, at_ms in deaths_ms.items() if at_ms <= now_ms]

    def excuse(self, members: Iterable[Member], away_ms: float) -> None:
        """Move all pings by a time in which this process could not receive answers."""
        self._sent_ms = {number: sent_ms + away_ms for number, sent_ms in self._sent_ms.items()}
        for member in members:
            if member.unanswered_ms is not None:
                member.unanswered_ms += away_ms

    def _death_ms(self, member: Member) -> float:
        if member.unanswered_ms is None:
            return math.inf
        return member.unanswered_ms + member.session_ms * (2 + self._max_failed_pings) / 3


class Recovery:
    """Members that are expected to register again before anything moves; times in milliseconds.

    These are the members of the coordinator before, or all members if none of them was heard for a while.
    """

    def __init__(self, recorded: Iterable[StartFetcher], recovery_ms: float, now_ms: float) -> None:
        """Expect the members with a recorded share for `recovery_ms`, or the longest of their session time-outs."""
        self._expected = {share.member: share for share in recorded}
        self._expected_members = set(self._expected)
        """Members of the coordinator before that have not registered here."""
        sessions_ms = [min(share.session_timeout_ms, _MAX_RECOVERY_MS) for share in self._expected.values()]
        self._until_ms = now_ms + max([recovery_ms, *sessions_ms])
        self._unrecorded_until_ms = now_ms + min(recovery_ms, _MIN_RECOVERY_MS)

    @property
    def is_expecting(self) -> bool:
        """Whether some member is expected."""
        return bool(self._expected)

    @property
    def newest_generation(self) -> int:
        """The newest generation of the recorded shares."""
        generations = (share.generation for share in self._expected.values())
        return max((generation for generation in generations if generation < _GENERATION_BELOW), default=0)

    def is_pending(self, now_ms: float) -> bool:
        """Return whether nothing may move yet."""
        return now_ms < (self._until_ms if self._expected else self._unrecorded_until_ms)

    def returned(self, name: str) -> StartFetcher | None:
        """Expect a member no more; return the share that was recorded for it."""
        self._expected_members.discard(name)
        return self._expected.pop(name, None)

    def expect(self, shares: Iterable[StartFetcher], until_ms: float) -> None:
        """Expect these members until then."""
        self._expected |= {share.member: share for share in shares}
        self._until_ms = until_ms

    def wait_for_others(self, session_ms: int, now_ms: float) -> None:
        """Wait at least another third of a session time-out, because the first member has just come."""
        self._until_ms = max(self._until_ms, now_ms + min(session_ms / 3, _MAX_RECOVERY_MS))

    def excuse(self, away_ms: float) -> None:
        """Wait longer by a time in which this process could not receive registrations."""
        self._until_ms += away_ms

    def end(self) -> list[str]:
        """Expect no member any more; return the members of the coordinator before that have not come."""
        missing = sorted(self._expected_members)
        self._expected, self._expected_members = {}, set()
        return missing
