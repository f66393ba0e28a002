"""The claims that one instance holds, and the conditions that end each of them (protocol.md, section 6, "Stay").

Claimers keep their claims here. This module decides which claims still count; it sends no records.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from marshal_dagster.coordination.claims import BaseClaim
from marshal_dagster.coordination.group_reader import GroupReader
from marshal_dagster.coordination.revocation_text import revocation_text
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.protocol.range_choice import Bounds
from marshal_dagster.protocol.state import Key, Owner

if TYPE_CHECKING:
    from marshal_dagster.protocol.world import PartitionWorld

logger = logging.getLogger(__name__)

_MOST_NAMED: Final = 3
_DISPLACED: Final = "it is no longer this instance's"
_OVERTAKEN: Final = (
    "this reader of the coordination log continued from a snapshot newer than its claims, so records in between were "
    "not read"
)
_OBSERVED: Final = (
    "retention deleted records of the coordination log before they were read, so the log can only be observed"
)

H = TypeVar("H", bound=BaseClaim)


class ClaimSet(Generic[H]):
    """The partitions that an instance has requested so far, and the claims that it holds; use it under the lock.

    A claim is judged by the state as last read and by its lease. Once it is lost, no further record is sent for it.
    Each step of a claimer is a `with` block. At the end of the block, claims that the log shows as taken are dropped.
    """

    def __init__(self, reader: GroupReader, on_lost: Callable[[H, str], None]) -> None:
        """Hold nothing yet; `on_lost` is called with each claim that is lost, and with the reason."""
        self.claims: dict[int, H] = {}
        """The claims that are held, by partition: the whole partition, or a range of it."""
        self.requested: dict[int, Bounds | None] = {}
        """What was requested of each partition: a range, or None for the whole."""
        self.unconfirmed: set[int] = set()
        """Partitions whose claim may be in the log but whose result has not been read back, or whose release is not
        sent yet. They are revoked on release."""
        self.left: dict[int, str] = {}
        """Why each partition that was held is no longer held."""
        self._reader = reader
        self._on_lost = on_lost
        self._began_at = 0
        """The log offset from which records of the group concern this tenure."""
        self._judged: tuple[PartitionWorld, int] | None = None
        """The state by which all claims were judged last, and its next log offset.

        Only the next record can change a key, so nothing is judged again before it is read.
        """

    def __enter__(self) -> None:
        """Begin a step."""

    def __exit__(self, *_: object) -> None:
        self.lose_displaced()

    def request(self, wanted: Mapping[int, Bounds | None]) -> None:
        """Record that `wanted` is about to be requested: of each partition a range, or None for the whole."""
        if not self.requested:
            self._began_at = self._reader.home.next_offset
        self.unconfirmed.update(wanted)
        self.requested.update(wanted)

    def give_up(self, partitions: Iterable[int]) -> list[H]:
        """Remove the claims on `partitions` and return them, so that the caller can send their release."""
        return [self.claims.pop(partition) for partition in partitions if partition in self.claims]

    # Losing claims

    def lose(self, partition: int, why: str) -> None:
        """Remove the claim on `partition`; no further record is sent for it."""
        claim = self.claims.pop(partition, None)
        if claim is not None:
            self.left[partition] = why
            self._on_lost(claim, why)

    def lose_refused(self, claim: H, why: str) -> None:
        """Lose a claim whose record was refused, unless the state shows that it is held, or that its range is done."""
        if not claim.refresh(self._reader.key(claim.partition), self._reader.member.instance):
            cause = self._displacement(claim)
            self.lose(claim.partition, f"{why}, because {cause}" if cause else why)

    def refresh(self) -> None:
        """Update each claim from the state, and lose those that this instance no longer holds."""
        self.drop_all_if_log_changed()
        instance = self._reader.member.instance
        for claim, key in self._claims_with_keys():
            if not claim.refresh(key, instance):
                self._lose_to_other(claim)
        self._judged = self._reader.home, self._reader.home.next_offset

    def lose_displaced(self) -> None:
        """Lose each claim that this instance no longer holds by the log as read; lose all if none is valid.

        If reading failed, the part that was read counts.
        """
        self.drop_all_if_log_changed()
        home, instance = self._reader.home, self._reader.member.instance
        read = home.next_offset
        if self._judged is not None and self._judged[0] is home and self._judged[1] == read:
            return
        for claim, key in self._claims_with_keys():
            # While the log is read again from its start, the state is older than the claim.
            if claim.epoch < read and not claim.is_held(key, instance):
                self._lose_to_other(claim)
        self._judged = home, read

    def drop_all_if_log_changed(self) -> None:
        """Lose all claims if, by the log as last read, none is valid."""
        why = self._why_void()
        if why is not None:
            self._lose_all(why)
        if self._reader.rationalizer.changed is not None:
            self.unconfirmed.clear()

    def drop_ended(self) -> None:
        """Lose each claim whose lease has ended, or that the log as read shows as lost."""
        self.lose_displaced()
        now_ms = self._reader.clock.lease_ms()
        # Each step of a thousand claims asks this several times, so a lease is judged only where it may have ended.
        ended = [claim for claim in self.claims.values() if claim.lease.ends_ms <= now_ms]
        self._fence(claim.partition for claim in ended if not (claim.lease.holds(now_ms) or claim.is_done))

    # Checks

    def require(self, partitions: Collection[int] | None = None) -> None:
        """Raise `ClaimLostError` unless `partitions` (default: all won and not released) are held under a lease."""
        self.drop_ended()
        lost = self.left.keys() if partitions is None else [n for n in partitions if n not in self.claims]
        if lost:
            raise ClaimLostError(self._why_lost(sorted(lost)))

    def require_sendable(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError` unless each lease lasts longer than a record may wait to be sent."""
        now_ms = self._reader.clock.lease_ms()
        self._fence(n for n in partitions if (claim := self.claims.get(n)) and not claim.lease.may_send(now_ms))
        self.require(partitions)

    def require_certain(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError` if the log can only be observed: then every record looks accepted."""
        if not self._reader.is_certain:
            self.drop_all_if_log_changed()
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def require_valid(self, partitions: Collection[int]) -> None:
        """Raise `ClaimLostError` if no claim is valid: then even an accepted commit permits no processing."""
        if self._why_void() is not None:
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def lease_left_ms(self) -> float | None:
        """Return the time left on the shortest lease in ms, or None if nothing is held. It never waits for the lock."""
        now_ms, held = self._reader.clock.lease_ms(), tuple(self.claims.values())
        return min((claim.lease.left_ms(now_ms) for claim in held if not claim.is_done), default=None)

    def _why_void(self) -> str | None:
        """Return why no claim is valid by the log as read, or None if claims are valid.

        The log is another one or can only be observed, or records were skipped, or a Go consumer joined the group.
        """
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
            "without a plan, as Go consumers do. The group's rule set is not 'go', so a Go consumer breaks its "
            "guarantees: stop that consumer, or give it another group"
        )

    def _lose_to_other(self, claim: H) -> None:
        self.lose(claim.partition, self._displacement(claim) or _DISPLACED)

    def _displacement(self, claim: H) -> str | None:
        """Return who ended a claim that the log as read shows as lost, and how; None if that is not known."""
        revocation = self._reader.home.revocations.get(claim.epoch)
        if revocation is not None:
            return revocation_text(revocation)
        # A Go consumer displaces a live owner with a heartbeat. Each other member can only claim what is stale.
        owners, instance = self._owners(claim.partition), self._reader.member.instance
        is_taken = not self._reader.is_go and any(owner.instance != instance for owner in owners)
        return "it was stale and another member took it over" if is_taken else None

    def _claims_with_keys(self) -> list[tuple[H, Key]]:
        claims = tuple(self.claims.values())
        return list(zip(claims, self._reader.keys(claim.partition for claim in claims), strict=True))

    def _lose_all(self, why: str) -> None:
        for partition in tuple(self.claims):
            self.lose(partition, why)

    def _fence(self, partitions: Iterable[int]) -> None:
        fenced = list(partitions)
        for partition in fenced:
            self.lose(partition, "its lease ended: no heartbeat was accepted in time")
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
            "stays committed; the next run takes over the rest"
        )

    def _holder(self, partition: int) -> str:
        owners = self._owners(partition)
        if any(owner.instance == self._reader.member.instance for owner in owners):
            return "the log as last read still shows this same instance as owner, until the claim is stale"
        held_by = [f"client {owner.client!r}, instance {owner.instance!r}, epoch {owner.epoch}" for owner in owners]
        return f"by the log as last read it is held by {listed(held_by or ['no instance'])}"

    def _owners(self, partition: int) -> tuple[Owner, ...]:
        key, bounds = self._reader.key(partition), self.requested.get(partition)
        return key.owners if bounds is None else key.owners_within(*bounds)


def listed(parts: Sequence[str], count: int | None = None, separator: str = "; ") -> str:
    """Return the first three of `parts`, joined, and how many more there are of `count` (default: all parts)."""
    more = (len(parts) if count is None else count) - _MOST_NAMED
    return separator.join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
