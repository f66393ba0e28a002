"""Claims whole partitions for a batch, and determines where each range starts and ends.

`ClaimedBatch` uses it in groups that do not claim ranges, and for a group's first positions (protocol.md, section 6,
"Where to start").
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from marshal_dagster._internal.collector import paused_collector
from marshal_dagster.batches.claim_order import own_order, preferred_partitions
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.batches.result import Idle
from marshal_dagster.coordination.claimer import Claim, Claimer, assume_alive
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.errors import GroupPausedError, StartPositionError
from marshal_dagster.protocol.batch_planning import ClaimedRange, Position, first_offset, plan_ends
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner

logger = logging.getLogger(__name__)

_MOST_TRIES: Final = 16
"""How often to claim other partitions if all claims are refused."""
_TRIES_FOR_MORE: Final = 2
"""How often to claim other partitions if some claims were won, but fewer than the batch may have."""


class PartitionSource:
    """Claims whole partitions for a batch. `keep_alive` starts the heartbeats."""

    def __init__(self, context: BatchContext, claimer: Claimer, keep_alive: Callable[[], None]) -> None:
        self.claimer = claimer
        self.positions: dict[int, Position] = {}
        self.replays: set[int] = set()
        self._context = context
        self._request = context.request
        self._keep_alive = keep_alive
        self._extents: Mapping[int, OffsetBounds] = {}
        """The offsets of the partitions that were looked at before the claim."""
        self._extents_of = NO_TOPIC_ID
        """The id of the data topic to which these offsets belong."""
        self._extents_at_ms = 0.0
        """When these offsets were looked up, in ms of the lease clock."""
        self._has_claimed = False
        """Whether anything was claimed, so that the log has to be read again to find out why nothing was won."""

    def worth_trying(self, planned: Sequence[int]) -> list[int]:
        """Return the `planned` partitions that look free, without those whose plan has had too many attempts."""
        return self._free(planned)[0] if planned else []

    @paused_collector()
    def take(self, wanted: Sequence[int]) -> tuple[ClaimedRange, ...]:
        """Claim the `wanted` partitions that look free and have unread messages; return the ranges to process."""
        key_partition = self._key_to_first_claim()
        is_first = key_partition is not None
        chosen = (
            list(self._context.existing) if is_first and not self._request.claim_entire_topic else self._choose(wanted)
        )
        claims = self._claim(chosen, is_first=is_first)
        if not claims:
            return ()
        # A key with an offset must have its data topic's id before a heartbeat. A Go group has no ids.
        if self._context.is_go or all(claim.offset is None or claim.data_topic_id is not None for claim in claims):
            self._keep_alive()
        return self._without_rest(self._take_positions(claims, key_partition), wanted)

    def _key_to_first_claim(self) -> int | None:
        """Return the lowest partition if it has no position yet, else None.

        A group's first claim of a topic sets the position of every partition, the lowest one last. So if the lowest
        partition has no position, the first claim was not made or was interrupted, and has to be made again.
        """
        lowest = min(self._context.existing)
        key = self._context.keys([lowest])[lowest]
        return lowest if key.offset is None and key.generation == 0 else None

    def _choose(self, wanted: Sequence[int]) -> list[int]:
        """Return the `wanted` partitions that look free and have unread messages, in the order in which to claim them.

        Raises `DataTopicChangedError` if a position belongs to another incarnation of the topic.
        """
        free, exhausted = self._free(wanted)
        self._extents_at_ms = self.claimer.clock.lease_ms()
        extents, keys = self._context.extents(wanted), self._context.keys(wanted)
        self._extents, self._extents_of = extents, self._context.topic_id
        self._context.check_incarnation({number: keys[number] for number in free}, extents)
        if exhausted:
            logger.error("%s", self._context.given_up(_plans(exhausted)))
        todo = {number: lag for number in free if (lag := _advised_lag(keys[number], extents[number]))}
        if self._request.claim_entire_topic:
            return list(wanted) if todo and len(free) == len(wanted) else []
        return preferred_partitions(todo, self.claimer.member.instance, self._request.max_claims)

    def _free(self, wanted: Sequence[int]) -> tuple[list[int], dict[int, Key]]:
        """Return the `wanted` partitions that look free, and separately those whose plan has had too many attempts."""
        is_dead = self._context.is_dead
        free = self.claimer.claimable(wanted, is_dead=is_dead)
        if self._request.retry_exhausted:
            return free, {}
        untired = self.claimer.claimable(free, is_dead=is_dead, max_attempts=self._request.max_attempts)
        tired = set(free).difference(untired)
        return untired, self._context.keys(number for number in free if number in tired)

    def _claim(self, chosen: Sequence[int], *, is_first: bool) -> list[Claim]:
        request, is_dead = self._request, self._context.is_dead
        if not chosen:
            return []
        self._has_claimed = True
        try:
            if request.claim_entire_topic:
                claims = self.claimer.claim_entire_topic(chosen, is_dead=is_dead)
            else:
                claims = self._claim_some(chosen, None if is_first else request.max_claims)
        except GroupPausedError:
            self.claimer.release()
            return []
        exhausted = {claim.partition for claim in claims if self._is_exhausted(claim)}
        if exhausted:
            logger.error("%s", self._context.given_up(_plans(self._context.keys(exhausted))))
            self.claimer.release(exhausted)
        kept = [claim for claim in claims if claim.partition not in exhausted]
        if request.claim_entire_topic and len(kept) < len(chosen):
            self.claimer.release()
            return []
        return kept

    def _claim_some(self, chosen: Sequence[int], most: int | None) -> list[Claim]:
        """Claim at most `most` partitions; if other runs were faster, try what they have left."""
        if most is None:
            return self.claimer.claim(chosen, is_dead=self._context.is_dead)
        won: list[Claim] = []
        for tried in range(_MOST_TRIES):
            # Asking Dagster about owners takes time, and won claims have no heartbeats yet.
            is_dead = assume_alive if won else self._context.is_dead
            left = self._left_by_others(chosen, most, is_dead) if tried else chosen
            if not left:
                break
            new = self.claimer.claim(left, max_claims=most, is_dead=is_dead)
            won += self._without_read(new)
            chosen = [number for number in chosen if number not in self.claimer.requested]
            if len(won) >= most or (won and tried + 1 >= _TRIES_FOR_MORE):
                break
        return won

    def _without_read(self, claims: Sequence[Claim]) -> list[Claim]:
        """Release claims on partitions that other runs have read since they were chosen; return the others."""
        unread = [claim for claim in claims if _advised_lag(claim, self._extents[claim.partition])]
        if len(unread) < len(claims):
            self.claimer.release({claim.partition for claim in claims} - {claim.partition for claim in unread})
        return unread

    def _left_by_others(self, partitions: Sequence[int], most: int, is_dead: Callable[[Owner], bool]) -> list[int]:
        """Return which of `partitions` look free and unread by the log as last read, in this instance's own order."""
        # Owners that are new since the first try are alive. Asking Dagster about each of them takes time.
        free = self.claimer.claimable(partitions) or self.claimer.claimable(partitions, is_dead=is_dead)
        keys = self._context.keys(free)
        unread = [number for number in free if _advised_lag(keys[number], self._extents[number])]
        return own_order(unread, self.claimer.member.instance, most)

    def _is_exhausted(self, claim: Claim) -> bool:
        return claim.plan_attempts > self._request.max_attempts and not self._request.retry_exhausted

    def _take_positions(self, claims: Sequence[Claim], key_partition: int | None) -> tuple[ClaimedRange, ...]:
        """Read the position of each claimed partition and choose its end. Call it only after the claim is won."""
        context, request = self._context, self._request
        context.look_up()
        keys = context.keys(claim.partition for claim in claims)
        extents = self._present_extents(keys)
        context.check_incarnation(keys, extents)
        self.claimer.name_data_topic(context.topic_id)
        self._keep_alive()
        self._check_forgotten(keys)
        starts = self._starts(keys, extents, is_first=key_partition is not None)
        context.check_incarnation(
            {number: replace(key, offset=starts[number]) for number, key in keys.items() if key.offset is None}, extents
        )
        if key_partition in starts and len(starts) > 1:
            self.claimer.beat({number: start for number, start in starts.items() if number != key_partition})
        self.claimer.beat(starts)
        wanted = keys.keys() if request.partitions is None else keys.keys() & set(request.partitions)
        for number in wanted:
            self.positions[number] = context.position(number, starts[number], extents[number])
        return self._ranges(keys)

    def _present_extents(self, keys: Mapping[int, Key]) -> dict[int, OffsetBounds]:
        """Return the readable offsets of `keys`, whose states were read after the claim.

        Offsets that were looked up before the claim are used again for a heartbeat interval, if the topic still has the
        same id and neither the key's position nor its plan is beyond them. After a longer time, retention may have
        deleted unread messages. A key without a position needs the present offsets.
        """
        age_ms = self.claimer.clock.lease_ms() - self._extents_at_ms
        is_recent = age_ms < self.claimer.settings.heartbeat_interval_ms
        known = self._extents if is_recent and self._extents_of == self._context.topic_id != NO_TOPIC_ID else {}
        extents = {
            number: known[number]
            for number, key in keys.items()
            if number in known and key.offset is not None and max(key.offset, key.plan_end or 0) <= known[number].end
        }
        missing = [number for number in keys if number not in extents]
        return extents | self._context.extents(missing) if missing else extents

    def _starts(
        self, keys: Mapping[int, Key], extents: Mapping[int, OffsetBounds], *, is_first: bool
    ) -> dict[int, int]:
        unset = [number for number, key in keys.items() if key.offset is None]
        committed = self._context.group_offsets() if unset else {}
        return {
            number: first_offset(
                self._context.name(number),
                key,
                extents[number],
                self._request.start,
                group_offset=committed.get(number),
                is_new=not is_first,
            )
            for number, key in keys.items()
        }

    def _check_forgotten(self, keys: Mapping[int, Key]) -> None:
        """Raise `StartPositionError` if Kafka has a committed offset where the coordination log has no position."""
        mode = self._context.settings.delivery
        unset = [number for number, key in keys.items() if key.offset is None and key.generation == 0]
        if not unset or mode is DeliveryMode.AT_LEAST_ONCE or self._request.allow_log_reset:
            return
        committed = self._context.group_offsets()
        known = sorted(number for number in unset if number in committed)
        if known:
            raise StartPositionError(
                f"Kafka has committed offsets of group {self._context.group!r} for partitions {known} of topic "
                f"{self._request.topic!r}, but the coordination log has none: perhaps it was deleted and re-created. "
                f"Delivery {mode} does not continue automatically: check what was processed, then import these offsets "
                "(`marshal-dagster position import`), or set allow_log_reset"
            )

    def _ranges(self, keys: Mapping[int, Key]) -> tuple[ClaimedRange, ...]:
        plans = {number: keys[number].plan_end for number in self.positions}
        self.replays = {number for number, end in plans.items() if end is not None}
        ends = {number: end for number, end in plans.items() if end is not None}
        spent = sum(max(0, end - self.positions[number].readable) for number, end in ends.items())
        left = None if self._request.max_records is None else max(0, self._request.max_records - spent)
        fresh = {number: at for number, at in self.positions.items() if number not in ends}
        ends |= plan_ends({number: (at.readable, at.end) for number, at in fresh.items()}, left)
        ends |= {number: at.end for number, at in fresh.items() if not at.lag and at.end > at.offset}
        claims = self.claimer.claims
        self.claimer.check(ends)
        return self._context.ranges(claims, self.positions, ends)

    def _without_rest(self, ranges: tuple[ClaimedRange, ...], wanted: Sequence[int]) -> tuple[ClaimedRange, ...]:
        """Release partitions without a range in the batch, and those beyond the limit after a first claim."""
        if self._request.claim_entire_topic:
            return ranges
        most, may_have = self._request.max_claims, set(wanted)
        mine = [range_ for range_ in ranges if range_.partition in may_have]
        if most is not None and len(mine) > most:
            mine = sorted(sorted(mine, key=lambda range_: -range_.width)[:most], key=lambda range_: range_.partition)
        kept = {range_.partition for range_ in mine}
        unused = [partition for partition in self.claimer.claims if partition not in kept]
        if unused:
            self.claimer.release(unused)
        return tuple(mine)

    # Reporting

    def offsets_to_publish(self, sure: Sequence[ClaimedRange]) -> dict[int, int]:
        """Return the offsets to commit to Kafka after `sure` are committed, for partitions that are still held."""
        held, now_ms = self.claimer.claims, self.claimer.clock.lease_ms()
        claims = [(range_, held.get(range_.partition)) for range_ in sure]
        return {range_.partition: range_.end for range_, claim in claims if claim and claim.lease.holds(now_ms)}

    def why_idle(self, wanted: Sequence[int]) -> Idle:
        """Return why there is nothing to do; if a claim was tried, read the log to its end first.

        Raises `DataTopicChangedError` if the topic looks drained only because it was deleted and re-created.
        """
        context, is_entire = self._context, self._request.claim_entire_topic
        if self._has_claimed:
            self.claimer.rationalizer.catch_up()
        paused_until_s = self.claimer.paused_until_s()
        if paused_until_s is not None:
            return context.paused(paused_until_s, self.claimer.group.pause_origin)
        extents = context.extents(wanted) if self._has_claimed else self._extents
        keys = context.keys(wanted)
        free, exhausted = self._free(wanted)
        todo = [n for n, key in keys.items() if n not in exhausted and _advised_lag(key, extents[n])]
        if not todo:
            context.check_id({number: keys[number] for number in free}, extents)
        held = None
        if todo and not (exhausted and is_entire):
            taken = set(wanted if is_entire else todo).difference(free)
            held = self._held({n: key for n, key in keys.items() if n in taken}, is_all=len(taken) >= len(todo))
        return context.why_idle(held, _plans(exhausted))

    def _held(self, taken: Mapping[int, Key], *, is_all: bool) -> Idle:
        """Return the idle reason for partitions that others hold; `is_all` if all unread messages are in these."""
        owners = {number: owner for number, key in taken.items() if (owner := key.owner) is not None}
        clients = ", ".join(sorted({owner.client for owner in owners.values()}))
        text = f"no partition of topic {self._request.topic!r} with unread messages can be claimed"
        if self._request.claim_entire_topic and owners:
            held = ", ".join(f"{owner.client} holds partition {number}" for number, owner in sorted(owners.items()))
            text = f"topic {self._request.topic!r} can only be claimed as a whole, but {held}"
        elif owners:
            text = f"{text}: {'all' if is_all else 'some'} are held by {clients}"
        return self._context.held(text, [(owner, taken[number].last_beat_ms) for number, owner in owners.items()])


def _advised_lag(key: Key | Claim, extent: OffsetBounds) -> int:
    """Return about how many offsets are unread; at least 1 for a key without a position or with an open plan."""
    if key.offset is None or key.plan_end is not None:
        return max(1, extent.end - (key.offset or extent.start))
    return max(0, extent.end - key.offset)


def _plans(exhausted: Mapping[int, Key]) -> dict[int, tuple[int | None, int]]:
    return {number: (key.offset, key.plan_end) for number, key in exhausted.items() if key.plan_end is not None}
