"""The members of a group as its coordinator (`group`) sees them. Pure: no clock, no Kafka.

`Members` has what each member works on, `Liveness` which members still answer pings, and `Recovery` which members a
new coordinator waits for.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from marshal_dagster.coordinator.assignment import Assignment, DataPartitionId
from marshal_dagster.coordinator.messages import Pong, Register, StartFetcher, places_of

_MAX_ROUNDS: Final = 32
_MAX_REPLACED: Final = 1_000
_GENERATION_BELOW: Final = 2**40
"""No group reaches this generation. A coordinator did not write a record with a larger one."""
_MAX_RECOVERY_MS: Final = 60_000.0
_MIN_RECOVERY_MS: Final = 1_000.0
"""How long a new coordinator waits for members without a record of the previous coordinator."""


@dataclass(slots=True)
class Member:
    """A member as the coordinator sees it."""

    registration: Register
    is_confirmed: bool
    """Whether the member has reported that it works on exactly `places`."""
    places: frozenset[DataPartitionId] = frozenset()
    """The partitions that were sent to the member and that it has not reported as stopped."""
    gained: frozenset[DataPartitionId] = frozenset()
    """The partitions in `places` that the member got in the last change."""
    unanswered_ms: float | None = None
    """When the oldest ping that the member has not answered was sent, in milliseconds; None if there is none."""
    answered_round: int = 0
    """The number of the newest ping that the member has answered. Answers to older pings are ignored."""

    @property
    def session_ms(self) -> int:
        """The member's session timeout in milliseconds."""
        return self.registration.session_timeout_ms

    @property
    def tenure(self) -> str:
        """The id of the member's process."""
        return self.registration.tenure

    def has_same_interests(self, registration: Register) -> bool:
        """Return whether a registration has the topics, pattern and capacity of the present one."""
        return _interests(self.registration) == _interests(registration)


def _interests(registration: Register) -> tuple[object, ...]:
    return frozenset(registration.topics), registration.pattern, registration.capacity


class Members:
    """The members of a group by name, and the owner of each partition."""

    def __init__(self) -> None:
        """Start without members."""
        self.by_name: dict[str, Member] = {}
        self.owners: Assignment = {}
        self.positions: dict[DataPartitionId, int] = {}
        """The next offset of each partition, as members have reported it."""
        self._replaced: dict[str, None] = {}
        """The ids of processes whose fixed name another process has taken, the newest last."""

    def find(self, name: str, tenure: str) -> Member | None:
        """Return the member of this name; None if there is none or if its process is another one."""
        member = self.by_name.get(name)
        return member if member is not None and member.tenure == tenure else None

    def is_replaced(self, tenure: str) -> bool:
        """Return whether another process has taken the name of this process."""
        return tenure in self._replaced

    def is_name_taken(self, registration: Register) -> bool:
        """Return whether another process has the name of a registration and keeps it."""
        before = self.by_name.get(registration.member)
        if before is None or before.tenure == registration.tenure:
            return False
        is_static = registration.is_static and before.registration.is_static
        return not is_static or self.is_replaced(registration.tenure)

    def admit(self, registration: Register, recorded: StartFetcher | None) -> bool:
        """Add or update a member, and return whether nothing has changed.

        The member gets the partitions that it reports, except those of other members. If it has a fixed name and
        reports none, it gets the partitions in `recorded`, or else those that it had before.

        Nothing has changed if the same process was a member with the same interests and partitions.
        """
        name, before = registration.member, self.by_name.get(registration.member)
        had = before.places if before is not None else frozenset[DataPartitionId]()
        reported = requested_places = places_of(registration.holds)
        if registration.is_static and not reported:
            requested_places = places_of(recorded.places) if recorded is not None else had
        places = frozenset(place for place in requested_places if self.owners.get(place, name) == name)
        is_as_reported = places == reported
        is_same_process = before is not None and before.tenure == registration.tenure
        # The report may be older than the newest share, which the process then still has to confirm.
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
        """Remove a member, and free its partitions."""
        self.assign(name, frozenset())
        del self.by_name[name]

    def assign(self, name: str, places: frozenset[DataPartitionId]) -> None:
        """Replace a member's partitions by these."""
        member = self.by_name[name]
        for place in member.places - places:
            if self.owners.get(place) == name:
                del self.owners[place]
        self.owners |= dict.fromkeys(places - member.places, name)
        member.places = places

    def record_positions(self, member: Member, pong: Pong) -> None:
        """Record the offsets that a member reports for its own partitions; ignore those of other partitions."""
        for topic, offsets in (pong.offsets or {}).items():
            self.positions |= {
                (topic, number): at for number, at in offsets.items() if (topic, number) in member.places
            }


class Liveness:
    """Which members answer the pings. Times are in milliseconds.

    A ping fails if it is not answered within 2/3 of the member's session timeout. Each further ping fails another 1/3
    later.
    """

    def __init__(self, min_session_ms: int, max_failed_pings: int, now_ms: float) -> None:
        """Start without pings; the first one is due at `now_ms`."""
        self._min_session_ms, self._max_failed_pings = min_session_ms, max_failed_pings
        self.next_ping_ms = now_ms
        self._round = 0
        self._sent_ms: dict[int, float] = {}
        self._first_death_ms = math.inf
        """The earliest time at which a member can have failed too many of the pings sent so far."""

    def ping(self, members: Collection[Member], now_ms: float) -> tuple[int, int]:
        """Start a round of pings.

        Returns the number of the round, and how many earlier rounds still lack the answer of some member.
        """
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
        """Record a member's answer to a round, and return whether it is the member's newest answer.

        Answers to rounds that have not started are ignored.
        """
        if not member.answered_round < number <= self._round:
            return False
        member.answered_round = number
        member.unanswered_ms = min((sent_ms for sent, sent_ms in self._sent_ms.items() if sent > number), default=None)
        return True

    def dead(self, members: Mapping[str, Member], now_ms: float) -> list[str]:
        """Return the names of members that have failed too many pings. Each is returned once."""
        if now_ms < self._first_death_ms:
            return []
        deaths_ms = {name: self._death_ms(member) for name, member in members.items()}
        self._first_death_ms = min((at_ms for at_ms in deaths_ms.values() if at_ms > now_ms), default=math.inf)
        return [name for name, at_ms in deaths_ms.items() if at_ms <= now_ms]

    def excuse(self, members: Iterable[Member], away_ms: float) -> None:
        """Extend all deadlines by `away_ms`, during which this process could not receive answers."""
        self._sent_ms = {number: sent_ms + away_ms for number, sent_ms in self._sent_ms.items()}
        for member in members:
            if member.unanswered_ms is not None:
                member.unanswered_ms += away_ms

    def _death_ms(self, member: Member) -> float:
        if member.unanswered_ms is None:
            return math.inf
        return member.unanswered_ms + member.session_ms * (2 + self._max_failed_pings) / 3


class Recovery:
    """The members that must register again, or time out, before partitions move. Times are in milliseconds.

    These are the members of the previous coordinator. If all members of this coordinator time out at once, it expects
    all of them back.
    """

    def __init__(self, recorded: Iterable[StartFetcher], recovery_ms: float, now_ms: float) -> None:
        """Expect the members with a recorded share for `recovery_ms` or their longest session timeout."""
        self._expected = {share.member: share for share in recorded}
        self._expected_members = set(self._expected)
        """The members of the previous coordinator that have not registered with this one."""
        sessions_ms = [min(share.session_timeout_ms, _MAX_RECOVERY_MS) for share in self._expected.values()]
        self._until_ms = now_ms + max([recovery_ms, *sessions_ms])
        self._unrecorded_until_ms = now_ms + min(recovery_ms, _MIN_RECOVERY_MS)

    @property
    def is_expecting(self) -> bool:
        """Whether any member is expected."""
        return bool(self._expected)

    @property
    def newest_generation(self) -> int:
        """The largest generation of the recorded shares, without impossible ones; 0 if there is none."""
        generations = (share.generation for share in self._expected.values())
        return max((generation for generation in generations if generation < _GENERATION_BELOW), default=0)

    def is_pending(self, now_ms: float) -> bool:
        """Return whether partitions may not move yet."""
        return now_ms < (self._until_ms if self._expected else self._unrecorded_until_ms)

    def returned(self, name: str) -> StartFetcher | None:
        """Stop expecting a member, because it registered; return its recorded share, if any."""
        self._expected_members.discard(name)
        return self._expected.pop(name, None)

    def expect(self, shares: Iterable[StartFetcher], until_ms: float) -> None:
        """Expect the members of these shares until `until_ms`."""
        self._expected |= {share.member: share for share in shares}
        self._until_ms = until_ms

    def wait_for_others(self, session_ms: int, now_ms: float) -> None:
        """Wait at least another third of the session timeout of the first member that registered."""
        self._until_ms = max(self._until_ms, now_ms + min(session_ms / 3, _MAX_RECOVERY_MS))

    def excuse(self, away_ms: float) -> None:
        """Extend the wait by `away_ms`, during which this process could not receive registrations."""
        self._until_ms += away_ms

    def end(self) -> list[str]:
        """Stop expecting members; return those of the previous coordinator that did not register again."""
        missing = sorted(self._expected_members)
        self._expected, self._expected_members = {}, set()
        return missing
