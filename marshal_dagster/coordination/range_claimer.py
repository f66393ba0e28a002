"""Claims ranges of partitions on behalf of one instance: many of these work on one partition at once.

What each step must be is in protocol.md, section 8.4.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from marshal_dagster.coordination.appender import AppendResult
from marshal_dagster.coordination.base_claimer import BaseClaimer, is_accepted, reason
from marshal_dagster.coordination.claims import RangeClaim
from marshal_dagster.coordination.group_reader import assume_alive
from marshal_dagster.errors import CommitFailedError, PlanRejectedError
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    ClaimingRange,
    Message,
    PlanningRange,
    RangeDone,
    RangeHeartbeat,
    ReleasingRange,
)
from marshal_dagster.protocol.range_choice import Bounds, ChoiceContext, choose_range, overlapping_dead_ranges
from marshal_dagster.protocol.state import Key, Owner

__all__ = ["RangeClaim", "RangeClaimer"]


class RangeClaimer(BaseClaimer[RangeClaim]):
    """Claims at most one range of each partition of one data topic for one instance; keeps, commits and releases them.

    What holds for all its methods is described at `BaseClaimer`. A range that is done needs no lease, no heartbeat and
    no release: it stays among the `claims` until it is released all the same. The group's settings enable ranges; the
    instance id is never used for whole claims.
    """

    _claims_ranges = True

    # Claiming

    def choose(
        self,
        ends: Mapping[int, int],
        size: int,
        *,
        readable: Mapping[int, int] = MappingProxyType({}),
        is_dead: Callable[[Owner], bool] = assume_alive,
        max_attempts: int | None = None,
    ) -> dict[int, Bounds]:
        """Give what had better be claimed of the partitions in `ends`, where anything is free: advice, not a promise.

        `ends` says up to where each may be claimed anew, `size` how many offsets at most, not counting those below
        what is `readable`. A planned range that nobody alive holds comes first, exactly as it is, also beyond that;
        one that has had `max_attempts` attempts is left alone. `is_dead` is asked once for each owner, and may take
        its time.
        """
        dead = self._reader.dead_owners(ends, is_dead)
        with self.rationalizer.lock:
            look = ChoiceContext(self._reader.present_ms(), dead)
            chosen = {
                number: choose_range(
                    self.group,
                    self.key(number),
                    look,
                    until=end,
                    size=size,
                    readable=readable.get(number, 0),
                    max_attempts=max_attempts,
                )
                for number, end in ends.items()
                if number not in self._claim_set.requested
            }
        return {number: bounds for number, bounds in chosen.items() if bounds is not None}

    def claim(
        self, wanted: Mapping[int, Bounds], *, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> list[RangeClaim]:
        """Ask for a range of each partition in `wanted` with one append, and give those that were won.

        What owners that `is_dead` knows to be dead hold of these is revoked on the way. A partition is asked for once
        in a tenure, and again where that was refused. Read the log first (`ensure_group_settings`); should this raise,
        `release`.
        Raises `IncompleteLogError`, `GroupPausedError`, `SettingsMismatchError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        dead = self._reader.dead_owners(wanted, is_dead)
        with self.rationalizer.lock, self._claim_set:
            self._reader.require_ready()
            asked = {number: bounds for number, bounds in wanted.items() if number not in self._claim_set.requested}
            if not asked:
                return []
            signed = self._sender.signed(self.member)
            claims = [ClaimingRange(partition=n, start=start, end=end, **signed) for n, (start, end) in asked.items()]
            revocations = self._reader.revocations(
                signed, asked, dead, lambda n: overlapping_dead_ranges(self.key(n).ranges, *asked[n], dead)
            )
            self._claim_set.request(asked)
            sent = self._sender.send([*revocations, *claims])
            won = self._add_won_claims(sent, ClaimingRange)
            for message, outcome in sent:
                if isinstance(message, ClaimingRange) and outcome is not None and not outcome.accepted:
                    del self._claim_set.requested[message.partition]
            return won

    # Staying

    def beat(self) -> None:
        """Send a heartbeat for every range that is not done, and make sure that the log is the same.

        A range whose heartbeat is refused is lost; one that was not acknowledged stays as long as its lease does.
        Raises `ClaimLostError`, `CommitFailedError` for one not acknowledged, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require()
            signed = self._sender.signed(self.member)
            held = [claim for claim in self._claim_set.claims.values() if not claim.is_done]
            sent = self._send_owned([RangeHeartbeat(partition=c.partition, epoch=c.epoch, **signed) for c in held])
            self._apply_heartbeat_results(sent)
            self._require_heartbeats(sent)

    # Planning and committing

    def plan(self, ends: Mapping[int, int]) -> None:
        """Write down that the ranges up to `ends` (exclusive) are one batch each, and read it back.

        What lies behind these ends is the member's no more from now on. A range that is planned already, as it was
        when it was won, gets no record, and no other end. One without acknowledgement is settled by reading. Raises
        `PlanRejectedError` for ends that the ranges do not allow, with nothing sent, and when a plan was not seen
        accepted; `ClaimLostError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require(ends.keys())
            claims, signed = self._claim_set.claims, self._sender.signed(self.member)
            self._require_fitting(ends)
            new = {number: end for number, end in ends.items() if claims[number].plan_end is None}
            sent = self._send_owned(
                [PlanningRange(partition=n, epoch=claims[n].epoch, end=end, **signed) for n, end in new.items()]
            )
            self._require_plans_accepted(ends, sent)

    def commit(self, ends: Mapping[int, int]) -> None:
        """Say that the planned ranges, which end at `ends`, are done; see it in the log, trying while the leases last.

        One without acknowledgement is settled by reading: in the same generation, the offset at its end or beyond, or
        a done range that covers it, counts as committed. Ranges that are done stay so. Raises `ClaimLostError` naming
        who holds a lost range now, `CommitFailedError` for what is not the end of a plan, with nothing sent; what was
        seen stays committed.
        Not for at most once, which raises `ConfigurationError`: see `commit_before_processing`.
        """
        self._require_commit_after()
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(ends.keys())
            unplanned = self._without_plan_to(ends)
            if unplanned:
                raise CommitFailedError(f"{self._named(unplanned)}: no plan ends there; nothing was sent")
            missing = self._uncommitted(ends)
        self._commit_while_held(missing)

    def commit_before_processing(self, ends: Mapping[int, int]) -> frozenset[int]:
        """Say that planned ranges are done before they are processed; give the partitions that may be processed now.

        Only where this very process's own record, known by its log offset, was the one accepted. They need no lease
        from then on. The others must be dropped, all of them should this raise. Raises `PlanRejectedError` for what is
        not the end of a plan, or done already, `ClaimLostError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require(ends.keys())
            unplanned = self._without_plan_to(ends) or ends.keys() - self._uncommitted(ends).keys()
            if unplanned:
                raise PlanRejectedError(f"{self._named(unplanned)}: no open plan ends there; plan first")
            sent = self._finish(ends)
            self._check_log()
            self._claim_set.require_valid(ends)
            return frozenset(message.partition for message, outcome in sent if is_accepted(outcome))

    # How a step is done

    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        self._finish(missing)
        self._settle()
        self._claim_set.require(missing.keys())
        return self._uncommitted(missing)

    def _finish(self, ends: Mapping[int, int]) -> AppendResult:
        """Say that ranges are done, and note what came of it."""
        self._settle()
        self._claim_set.require(ends.keys())
        claims, signed = self._claim_set.claims, self._sender.signed(self.member)
        numbers = list(self._uncommitted(ends))
        unconfirmed = {number for number in numbers if claims[number].may_be_done}
        sent = self._send_owned([RangeDone(partition=n, epoch=claims[n].epoch, **signed) for n in numbers])
        for message, outcome in sent:
            claim = claims.get(message.partition)
            if claim is None or outcome is None:
                continue
            if outcome.accepted:
                claim.is_done = True  # first of all: between two lines an interrupt may come
                continue
            claim.may_be_done = claim.partition in unconfirmed
            self._claim_set.lose_refused(claim, f"its commit was refused: {reason(outcome)}")
        self._claim_set.refresh()
        return sent

    def _uncommitted(self, ends: Mapping[int, int]) -> dict[int, int]:
        claims = self._claim_set.claims
        return {number: end for number, end in ends.items() if number not in claims or not claims[number].is_done}

    def _note_sending(self, messages: Sequence[Message]) -> None:
        for message in messages:
            claim = self._claim_set.claims[message.partition]
            if isinstance(message, PlanningRange):
                claim.end = message.end
            elif isinstance(message, RangeDone):
                claim.may_be_done = True

    def _won(self, partition: int, epoch: int, lease: Lease, key: Key) -> RangeClaim | None:
        return RangeClaim.won(partition, epoch, lease, key, self.member.instance)

    def _release_record(self, claim: RangeClaim, signed: dict[str, Any]) -> Message:
        return ReleasingRange(partition=claim.partition, epoch=claim.epoch, **signed)

    # What must hold

    def _require_fitting(self, ends: Mapping[int, int]) -> None:
        """Refuse ends that are not within what is still the member's, or not those of the plans there are."""
        claims = self._claim_set.claims
        for number, end in ends.items():
            claim = claims[number]
            if claim.is_done or claim.plan_end not in {None, end}:
                raise PlanRejectedError(
                    f"{self.topic}/{number} is {'done' if claim.is_done else 'planned'} from {claim.start} to "
                    f"{claim.end}: it cannot be planned to {end}"
                )
            if not claim.start < end <= claim.end:
                raise PlanRejectedError(
                    f"{self.topic}/{number} cannot be planned to {end}: what is held ends at {claim.end}, and begins "
                    f"at {claim.start}"
                )

    def _without_plan_to(self, ends: Mapping[int, int]) -> list[int]:
        return [number for number, end in ends.items() if self._claim_set.claims[number].plan_end != end]
