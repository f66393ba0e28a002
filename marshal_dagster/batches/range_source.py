"""Claims ranges of partitions for a batch, and cuts each at the messages that exist (protocol.md, section 8.4).

`ClaimedBatch` uses it in groups whose settings name the feature `ranges`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.request import RangeOptions
from marshal_dagster.batches.result import Idle
from marshal_dagster.coordination.claim_set import listed
from marshal_dagster.coordination.range_claimer import RangeClaim, RangeClaimer
from marshal_dagster.errors import GroupPausedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, Position, plan_ends
from marshal_dagster.protocol.range_choice import Bounds
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner, Phase, Range

logger = logging.getLogger(__name__)

LOOK_MS: Final = 250.0
"""How often to look for new messages at prefetched offsets, in ms."""
_MOST_TRIES: Final = 16
"""How often to choose other ranges if all claims are refused."""


class RangeSource:
    """Claims one range of each partition for a batch. `keep_alive` starts the heartbeats, `check` checks them."""

    def __init__(
        self, context: BatchContext, claimer: RangeClaimer, keep_alive: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self.claimer = claimer
        self.positions: dict[int, Position] = {}
        self.replays: set[int] = set()
        self._context = context
        self._options = context.request.ranges or RangeOptions()
        self._keep_alive = keep_alive
        self._check = check
        self._warned_of: Mapping[int, tuple[int | None, int]] = {}
        """The plans with too many attempts that were logged last."""

    # Before claiming

    def without_position(self, wanted: Sequence[int]) -> list[int]:
        """Return the `wanted` partitions without an offset or a data topic id; only a whole claim can set these."""
        return [number for number, key in self._context.keys(wanted).items() if not _has_position(key)]

    def planned_whole(self, wanted: Sequence[int]) -> list[int]:
        """Return the `wanted` partitions in which a plan of the whole partition is open; it has to be done first."""
        return [number for number, key in self._context.keys(wanted).items() if key.plan_end is not None]

    # Claiming

    def take(self, wanted: Sequence[int]) -> tuple[ClaimedRange, ...]:
        """Claim a free range of each `wanted` partition; return the ranges to process.

        If no partition has unread messages, it claims prefetched offsets (`RangeOptions`) and waits for messages.
        """
        claims = self._claim_free(wanted, prefetch_offsets=0)
        is_ahead = not claims and self._options.prefetch_offsets > 0
        if is_ahead:
            claims = self._claim_free(wanted, prefetch_offsets=self._options.prefetch_offsets)
        if not claims:
            return ()
        self._keep_alive()
        extents = self._extents_in_time(claims) if is_ahead else self._context.extents([c.partition for c in claims])
        self._context.look_up()  # last, so that nothing is planned if the topic was re-created in the meantime
        return self._ranges(claims, extents)

    def _claim_free(self, wanted: Sequence[int], *, prefetch_offsets: int) -> list[RangeClaim]:
        """Claim free ranges of `wanted`; if all are refused, choose again among partitions that have changed."""
        refused: dict[int, int] = {}
        left = set(wanted)
        for _ in range(_MOST_TRIES):
            chosen = self._choose(sorted(left), prefetch_offsets=prefetch_offsets)
            same = {number for number, (start, _) in chosen.items() if refused.get(number) == start}
            claims = [] if same else self._claim(chosen)
            if claims or not chosen:
                return claims
            left -= same
            refused |= {number: start for number, (start, _) in chosen.items()}
        return []

    def _choose(self, wanted: Sequence[int], *, prefetch_offsets: int) -> dict[int, Bounds]:
        context = self._context
        keys = {number: key for number, key in context.keys(wanted).items() if _has_position(key)}
        extents = context.extents(keys)
        context.check_incarnation(keys, extents)
        exhausted = self._exhausted_claims(keys)
        if exhausted and exhausted != self._warned_of:
            logger.error("%s", context.given_up(exhausted))
            self._warned_of = exhausted
        until = {number: extents[number].end + prefetch_offsets for number in keys}
        chosen = self.claimer.choose(
            until,
            self._options.size,
            readable={number: extents[number].start for number in keys},
            is_dead=context.is_dead,
            max_attempts=None if context.request.retry_exhausted else context.request.max_attempts,
        )
        planned = {number for number, (start, _) in chosen.items() if start in _planned_starts(keys[number])}
        sizes = {number: until[number] - start for number, (start, _) in chosen.items()}
        first = sorted(chosen, key=lambda number: (number not in planned, -sizes[number], number))
        most = {number: chosen[number] for number in first[: context.request.max_claims]}
        return self._limited(most, planned, {number: extents[number].start for number in most}, until)

    def _limited(
        self, chosen: Mapping[int, Bounds], planned: set[int], readable: Mapping[int, int], until: Mapping[int, int]
    ) -> dict[int, Bounds]:
        """Return ranges within `max_records`: the `planned` ones unchanged, then those with the highest lag first.

        Offsets that retention has deleted do not count.
        """
        offered = {n: (min(end, max(start, readable[n])), end) for n, (start, end) in chosen.items()}
        fresh = {n: bounds for n, bounds in offered.items() if n not in planned}
        spent = sum(end - start for n, (start, end) in offered.items() if n in planned)
        most = self._context.request.max_records
        ends = plan_ends(fresh, None if most is None else max(0, most - spent), until)
        ends |= {n: end for n, (start, end) in offered.items() if n in planned or start == end}
        return {n: (start, ends[n]) for n, (start, _) in chosen.items() if n in ends}

    def _claim(self, chosen: Mapping[int, Bounds]) -> list[RangeClaim]:
        if not chosen:
            return []
        try:
            claims = self.claimer.claim(chosen, is_dead=self._context.is_dead)
        except GroupPausedError:
            return []
        request = self._context.request
        exhausted = [c for c in claims if c.attempts > request.max_attempts and not request.retry_exhausted]
        if exhausted:
            logger.error("%s", self._context.given_up({c.partition: (c.start, c.end) for c in exhausted}))
            self.claimer.release([claim.partition for claim in exhausted])
        return [claim for claim in claims if claim not in exhausted]

    def _extents_in_time(self, claims: Sequence[RangeClaim]) -> dict[int, OffsetBounds]:
        """Wait until there are messages up to the end of each range, or until `wait_s` or a pause ends the wait."""
        clock = self.claimer.clock
        until_ms = clock.lease_ms() + self._options.wait_s * 1_000
        while True:
            extents = self._context.extents([claim.partition for claim in claims])
            is_full = all(extents[claim.partition].end >= claim.end for claim in claims)
            if is_full or clock.lease_ms() >= until_ms or self.claimer.paused_until_s() is not None:
                return extents
            self._check()
            clock.sleep_ms(min(LOOK_MS, max(1.0, until_ms - clock.lease_ms())))

    def _ranges(self, claims: Sequence[RangeClaim], extents: Mapping[int, OffsetBounds]) -> tuple[ClaimedRange, ...]:
        """Return the readable parts of the claimed ranges; release claims without messages."""
        context, ends = self._context, dict[int, int]()
        keys = context.keys(extents)
        context.check_incarnation(keys, extents)
        self.replays = {claim.partition for claim in claims if claim.plan_end is not None}
        for claim in claims:
            number = claim.partition
            at = self.positions[number] = context.position(number, claim.start, extents[number])
            end = claim.end if claim.plan_end is not None else min(claim.end, at.end)
            if end > claim.start:
                ends[number] = end
        held = self.claimer.claims
        self.claimer.check(ends)
        unused = [claim.partition for claim in claims if claim.partition not in ends]
        if unused:
            self.claimer.release(unused)
        return context.ranges(held, self.positions, ends)

    # Reporting

    def offsets_to_publish(self, sure: Sequence[ClaimedRange]) -> dict[int, int]:
        """Return the offsets to commit to Kafka after `sure` are committed: the offset of each key."""
        keys = self._context.keys(part.partition for part in sure)
        return {number: key.offset for number, key in keys.items() if key.offset is not None}

    def why_idle(self, wanted: Sequence[int]) -> Idle:
        """Read the log to its end, and return why there is nothing to do."""
        context = self._context
        self.claimer.rationalizer.catch_up()
        paused_until_s = self.claimer.paused_until_s()
        if paused_until_s is not None:
            return context.paused(paused_until_s, self.claimer.group.pause_origin)
        extents, keys = context.extents(wanted), context.keys(wanted)
        exhausted = self._exhausted_claims(keys)
        todo = [key for n, key in keys.items() if key.offset is None or key.offset < extents[n].end]
        if not todo:
            context.check_id(keys, extents)
        owners = [pair for key in todo for pair in self._owners(key)]
        held = self._held(owners) if owners or (todo and not exhausted) else None
        return context.why_idle(held, exhausted)

    def _held(self, owners: Sequence[tuple[Owner, int]]) -> Idle:
        clients = listed(sorted({owner.client for owner, _ in owners}), separator=", ")
        text = f"no range of topic {self._context.request.topic!r} with unread messages can be claimed"
        return self._context.held(f"{text}: the rest is held by {clients}" if owners else text, owners)

    def _exhausted_claims(self, keys: Mapping[int, Key]) -> dict[int, tuple[int | None, int]]:
        """Return the lowest plan of each partition that has had too many attempts and has no live owner now."""
        request, most = self._context.request, self._context.request.max_attempts
        if request.retry_exhausted:
            return {}
        ranges: dict[int, tuple[int | None, int]] = {
            number: (range_.start, range_.end)
            for number, key in keys.items()
            for range_ in reversed(key.ranges)
            if range_.phase is Phase.PLANNED and range_.attempts >= most and not self._has_recent_heartbeat(range_)
        }
        return ranges | {
            number: (key.offset, key.plan_end)
            for number, key in keys.items()
            if key.plan_end is not None and key.plan_attempts >= most and not self._has_recent_heartbeat(key)
        }

    def _owners(self, key: Key) -> list[tuple[Owner, int]]:
        """Return the live owners of a key and of its ranges, each with the log time of its last heartbeat in ms."""
        held: list[Key | Range] = [key, *key.ranges]
        return [(part.owner, part.last_beat_ms) for part in held if part.owner and self._has_recent_heartbeat(part)]

    def _has_recent_heartbeat(self, held: Key | Range) -> bool:
        return held.owner is not None and self._context.live_for_ms([held.last_beat_ms]) >= 0


def _has_position(key: Key) -> bool:
    return key.offset is not None and key.data_topic_id is not None


def _planned_starts(key: Key) -> set[int]:
    return {range_.start for range_ in key.ranges if range_.phase is Phase.PLANNED}
