"""The claims that one instance holds, and when each of them ends (protocol.md, section 6, "Stay")."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from marshal_dagster.coordination.claims import BaseClaim
from marshal_dagster.coordination.group_reader import GroupReader
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.protocol.range_choice import Bounds

logger = logging.getLogger(__name__)

_MOST_NAMED: Final = 3
_DISPLACED: Final = "it is no longer this instance's"
_OVERTAKEN: Final = (
    "this reader of the coordination log went on from a snapshot newer than its claims: what lies between was not read"
)
_OBSERVED: Final = "retention has overtaken this reader of the coordination log, which can only be observed now"

H = TypeVar("H", bound=BaseClaim)


class ClaimSet(Generic[H]):
    """The partitions that an instance has requested at any time, and what it holds of them; use it under the lock.

    A claim is judged by the state as last read and by its lease. Once one is lost, no further record is sent for it.
    Each step of a claimer is a `with` block: however it ends, what the log has taken meanwhile is not held any more.
    """

    def __init__(self, reader: GroupReader, on_lost: Callable[[H, str], None]) -> None:
        """Hold nothing yet; `on_lost` is called with each claim that is lost, and why."""
        self.claims: dict[int, H] = {}
        """What is held, by partition: the whole partition, or a range of it."""
        self.requested: dict[int, Bounds | None] = {}
        """What was requested of each partition: a range, or None for the whole."""
        self.unconfirmed: set[int] = set()
        """Partitions whose claim may be in the log but whose result has not been read back, or whose release is not
        sent yet. They are revoked on leaving."""
        self.left: dict[int, str] = {}
        """The partitions that were held once, and why they no longer are."""
        self._reader = reader
        self._on_lost = on_lost
        self._began_at = 0
        """The log offset from which records of the group concern this tenure."""

    def __enter__(self) -> None:
        """Begin a step."""

    def __exit__(self, *_: object) -> None:
        self.lose_displaced()

    def request(self, wanted: Mapping[int, Bounds | None]) -> None:
        """Note that records which request `wanted`, a range or the whole of each partition, are about to be sent."""
        if not self.requested:
            self._began_at = self._reader.home.next_offset
        self.unconfirmed.update(wanted)
        self.requested.update(wanted)

    def give_up(self, partitions: Iterable[int]) -> list[H]:
        """Hold `partitions` no more by the instance's own will; return their claims, for their last record."""
        return [self.claims.pop(partition) for partition in partitions if partition in self.claims]

    # Losing claims

    def lose(self, partition: int, why: str) -> None:
        """Hold `partition` no more: no further record is sent for it."""
        claim = self.claims.pop(partition, None)
        if claim is not None:
            self.left[partition] = why
            self._on_lost(claim, why)

    def lose_refused(self, claim: H, why: str) -> None:
        """Lose a claim whose record was refused, unless the state shows that it is held, or a range of it done."""
        if not self._is_current(claim):
            self.lose(claim.partition, why)

    def refresh(self) -> None:
        """Take over from the state what it shows of each claim, and lose those that are another's now."""
        self.drop_all_if_log_changed()
        for claim in tuple(self.claims.values()):
            if not self._is_current(claim):
                self.lose(claim.partition, _DISPLACED)

    def lose_displaced(self) -> None:
        """Hold nothing where no promise holds, and no claim that by the log as read is another's or nobody's.

        What was read counts, also where the reading failed after that.
        """
        self.drop_all_if_log_changed()
        read, instance = self._reader.home.next_offset, self._reader.member.instance
        for claim in tuple(self.claims.values()):
            # While the log is read again from its start, the state is that of before the claim.
            if claim.epoch < read and not claim.is_held(self._reader.key(claim.partition), instance):
                self.lose(claim.partition, _DISPLACED)

    def drop_all_if_log_changed(self) -> None:
        """Hold nothing where by the log as last read no promise holds."""
        why = self._why_void()
        if why is not None:
            self._lose_all(why)
        if self._reader.rationalizer.changed is not None:
            self.unconfirmed.clear()

    def drop_ended(self) -> None:
        """Drop each claim whose lease has ended, or that is lost by the log as read."""
        self.lose_displaced()
        now_ms = self._reader.clock.lease_ms()
        self._fence(
            claim.partition for claim in self.claims.values() if not (claim.lease.holds(now_ms) or claim.is_done)
        )

    # What must hold

    def require(self, partitions: Collection[int] | None = None) -> None:
        """Raise `ClaimLostError` unless all of `partitions` (or all not released by itself) are held under a lease."""
        self.drop_ended()
        lost = self.left.keys() if partitions is None else [n for n in partitions if n not in self.claims]
        if lost:
            raise ClaimLostError(self._why_lost(sorted(lost)))

    def require_sendable(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError` unless more is left of each lease than a record may wait to be sent."""
        now_ms = self._reader.clock.lease_ms()
        self._fence(n for n in partitions if (claim := self.claims.get(n)) and not claim.lease.may_send(now_ms))
        self.require(partitions)

    def require_certain(self, partitions: Collection[int]) -> None:
        """Lose all where retention has overtaken the reader: to one that only observes everything looks accepted."""
        if not self._reader.is_certain:
            self.drop_all_if_log_changed()
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def require_valid(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError` where no claim counts: a commit that was accepted permits nothing there."""
        if self._why_void() is not None:
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def lease_left_ms(self) -> float | None:
        """Return the time left on the shortest lease, in ms, or None when nothing is held. Never waits for the lock."""
        now_ms, held = self._reader.clock.lease_ms(), tuple(self.claims.values())
        return min((claim.lease.left_ms(now_ms) for claim in held if not claim.is_done), default=None)

    def _why_void(self) -> str | None:
        """Return why no claim counts by the log as read: it is another one, only observed, or a Go consumer joined."""
        changed, seen = self._reader.rationalizer.changed, self._reader.unplanned
        if changed is not None:
            return str(changed)
        if not self._reader.is_certain:
            return _OBSERVED
        if self._reader.began_at > self._began_at:
            return _OVERTAKEN
        if seen is None or seen.log_offset < self._began_at:
            return None
        return (
            f"instance {seen.message.instance!r} moved the offset of {seen.message.topic}/{seen.message.partition} "
            "without a plan, as Go consumers do: the group's rule set is not 'go', so no promise holds while one "
            "is in it. Stop it, or give it a group of its own"
        )

    def _is_current(self, claim: H) -> bool:
        return claim.refresh(self._reader.key(claim.partition), self._reader.member.instance)

    def _lose_all(self, why: str) -> None:
        for partition in tuple(self.claims):
            self.lose(partition, why)

    def _fence(self, partitions: Iterable[int]) -> None:
        fenced = list(partitions)
        for partition in fenced:
            self.lose(partition, "its lease ended: no heartbeat was seen accepted in time")
        if fenced:
            self._reader.rationalizer.log.purge()

    def _why_lost(self, partitions: Sequence[int]) -> str:
        reasons = [
            f"{self._reader.topic}/{partition}: {self.left.get(partition, 'it was never won, or was released')}; "
            f"{self._holder(partition)}"
            for partition in partitions[:_MOST_NAMED]
        ]
        return (
            f"group {self._reader.member.group!r} does not hold {listed(reasons, len(partitions))}. What was committed "
            "stays, the next run takes over the rest"
        )

    def _holder(self, partition: int) -> str:
        key, bounds = self._reader.key(partition), self.requested.get(partition)
        owners = key.owners if bounds is None else key.owners_within(*bounds)
        if any(owner.instance == self._reader.member.instance for owner in owners):
            return "the log as last read still shows this very instance as owner, until that goes stale"
        held_by = [f"client {owner.client!r}, instance {owner.instance!r}, epoch {owner.epoch}" for owner in owners]
        return f"by the log as last read it is held by {listed(held_by or ['nobody'])}"


def listed(parts: Sequence[str], count: int | None = None, separator: str = "; ") -> str:
    """Join the first of `parts`, and name how many more of `count` there are."""
    more = (len(parts) if count is None else count) - _MOST_NAMED
    return separator.join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
