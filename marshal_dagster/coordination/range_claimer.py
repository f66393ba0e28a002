"""Claims ranges of partitions for one instance, so that many instances can work on one partition at once.

It is the counterpart of `Claimer` for groups whose settings name the feature `ranges`; protocol.md, section 8.4, has
the steps.
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
    """Claims at most one range of each partition of one data topic for one instance.

    `BaseClaimer` describes what holds for all methods. A range that is done needs no lease, no heartbeat and no release
    record, but it stays among the `claims` until `release` is called. The group's settings must enable ranges. The
    instance id must not be used for whole claims.
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
        """Return the range to claim in each partition of `ends` that has a free one; only a claim decides.

        A planned range without a live owner comes first. It is returned with its exact bounds, even beyond `ends` and
        `size`.

        Args:
            ends: the exclusive offset up to which a new range of each partition may go.
            size: the highest number of readable offsets in a new range.
            readable: the first readable offset of each partition; offsets below it do not count for `size`.
            is_dead: returns whether an owner is known to be dead. It is called once for each owner, without the lock.
            max_attempts: leave out planned ranges that have had this many attempts; by default, leave out none.
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
        """Claim a range of each partition in `wanted` with one append; return the claims that were won.

        Call `ensure_group_settings` first, which reads the log. If this raises, call `release`. An instance requests
        each partition only once, except after a refusal.

        Args:
            wanted: the range of each partition.
            is_dead: returns whether an owner is known to be dead. Claims of dead owners on these ranges are revoked
                first.

        Raises:
            IncompleteLogError: the coordination partition can only be observed.
            GroupPausedError: another instance has paused the group.
            SettingsMismatchError: the group has other settings than this member.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        dead = self._reader.dead_owners(wanted, is_dead)
        with self.rationalizer.lock, self._claim_set:
            self._reader.require_ready()
            new_bounds = {
                number: bounds for number, bounds in wanted.items() if number not in self._claim_set.requested
            }
            if not new_bounds:
                return []
            signed = self._sender.signed(self.member)
            claims = [
                ClaimingRange(partition=n, start=start, end=end, **signed) for n, (start, end) in new_bounds.items()
            ]
            revocations = self._reader.revocations(
                signed, new_bounds, dead, lambda n: overlapping_dead_ranges(self.key(n).ranges, *new_bounds[n], dead)
            )
            self._claim_set.request(new_bounds)
            sent = self._sender.send([*revocations, *claims])
            won = self._add_won_claims(sent, ClaimingRange)
            for message, outcome in sent:
                if isinstance(message, ClaimingRange) and outcome is not None and not outcome.accepted:
                    del self._claim_set.requested[message.partition]
            return won

    # Staying

    def beat(self) -> None:
        """Send a heartbeat for every range that is not done, and check that the log is the same.

        A range whose heartbeat is refused is lost. A range whose heartbeat was not acknowledged stays while its lease
        lasts.

        Raises:
            ClaimLostError: a range is lost.
            CommitFailedError: a heartbeat was not acknowledged.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
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
        """Write a plan for each range in `ends`, and read it back: the range up to the end is one batch.

        This also releases the offsets of the range after the plan's end. A range that had a plan when it was won keeps
        its end, and no record is sent for it. If an acknowledgement is missing, the log shows whether the plan was
        accepted.

        Args:
            ends: the exclusive end of each partition's plan.

        Raises:
            PlanRejectedError: a range does not allow its end (then nothing was sent), or a plan was not accepted.
            ClaimLostError: a range is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
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
        """Commit planned ranges as done and read that back; retry while the leases last.

        If an acknowledgement is missing, the log is read. The range counts as committed if, in the same generation, the
        key's offset is at its end or beyond, or a done range covers it. Commits that were read back stay, even if this
        raises.

        Args:
            ends: the exclusive end of each partition's planned range.

        Raises:
            ClaimLostError: a range is lost; the message names its owner.
            CommitFailedError: no plan ends at an offset of `ends`; nothing was sent.
            ConfigurationError: the delivery is at most once: use `commit_before_processing`.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        self._require_commit_after()
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(ends.keys())
            unplanned = self._without_plan_to(ends)
            if unplanned:
                raise CommitFailedError(
                    f"group {self.member.group!r}, {self._named(unplanned)}: no plan ends at the offset to commit, so "
                    "nothing was sent. Call plan() first"
                )
            missing = self._uncommitted(ends)
        self._commit_while_held(missing)

    def commit_before_processing(self, ends: Mapping[int, int]) -> frozenset[int]:
        """Commit planned ranges as done before they are processed (at most once).

        A range may be processed only if this instance's own record, found by its log offset, was accepted. It needs no
        lease from then on. The caller must drop the other ranges. If this raises, the caller must drop all ranges.

        Args:
            ends: the exclusive end of each partition's planned range.

        Returns:
            The partitions whose range may be processed now.

        Raises:
            PlanRejectedError: no plan ends at an offset of `ends`, or the range is done already.
            ClaimLostError: a range is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require(ends.keys())
            unplanned = self._without_plan_to(ends) or ends.keys() - self._uncommitted(ends).keys()
            if unplanned:
                raise PlanRejectedError(
                    f"group {self.member.group!r}, {self._named(unplanned)}: no open plan ends at the offset to "
                    "commit; call plan() first"
                )
            sent = self._finish(ends)
            self._check_log()
            self._claim_set.require_valid(ends)
            return frozenset(message.partition for message, outcome in sent if is_accepted(outcome))

    # The parts of a step

    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        self._finish(missing)
        self._settle()
        self._claim_set.require(missing.keys())
        return self._uncommitted(missing)

    def _finish(self, ends: Mapping[int, int]) -> AppendResult:
        """Send the commit of each range (`RangeDone`), and apply the results to the claims."""
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
                claim.is_done = True  # first: an interrupt may come between two lines
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

    # Checks

    def _require_fitting(self, ends: Mapping[int, int]) -> None:
        """Raise `PlanRejectedError` unless each end lies within the claimed range and equals the end of its plan."""
        claims = self._claim_set.claims
        for number, end in ends.items():
            claim = claims[number]
            if claim.is_done or claim.plan_end not in {None, end}:
                raise PlanRejectedError(
                    f"group {self.member.group!r}: {self.topic}/{number} is {'done' if claim.is_done else 'planned'} "
                    f"from {claim.start} to {claim.end} (exclusive), so it cannot be planned to {end}; nothing was sent"
                )
            if not claim.start < end <= claim.end:
                raise PlanRejectedError(
                    f"group {self.member.group!r}: {self.topic}/{number} cannot be planned to {end}, because the "
                    f"claimed range is {claim.start} to {claim.end} (exclusive); nothing was sent"
                )

    def _without_plan_to(self, ends: Mapping[int, int]) -> list[int]:
        return [number for number, end in ends.items() if self._claim_set.claims[number].plan_end != end]
