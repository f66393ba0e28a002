"""A state machine in which members claim ranges of two partitions, in any order of steps, with lost and late records.

The reference reader reads the log that they write. After each step it must agree with the library. No member may
believe that it holds offsets of another member, or that an unfinished range is done.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from marshal_dagster.coordination.range_claimer import RangeClaim, RangeClaimer
from marshal_dagster.errors import ClaimLostError, CommitFailedError, GroupPausedError, PlanRejectedError
from marshal_dagster.protocol.messages import ClaimingRange, Message, RangeDone, parse
from marshal_dagster.protocol.state import Key, Range
from tests.faulty_log import Fault, every
from tests.fuzz.world import state_of, state_of_plain
from tests.member_statemachine import MemberMachine, steps_ms, which_ones
from tests.members import GROUP, TOPIC, faulty

PARTITIONS = 2
TOPIC_END = 30
partitions = st.integers(0, PARTITIONS - 1)
faults = st.sampled_from([None, None, None, *Fault])
sizes = st.integers(1, 8)


class RangeMachine(MemberMachine[RangeClaimer]):
    """The steps of the members."""

    seen: ClassVar[Counter[str]] = Counter()
    """Counts of what happened in all runs. A test checks that each case occurs."""

    def _prepare(self) -> None:
        self.revoked: set[int] = set()
        self.winners: set[tuple[str, int]] = set()
        self.done: dict[int, set[int]] = {n: set() for n in range(PARTITIONS)}
        self.done_epochs: set[int] = set()
        self.site.begin(*range(PARTITIONS))

    def _new_member(self) -> RangeClaimer:
        return self.site.range_claimer()

    @rule(which=which_ones)
    def arrive(self, which: int) -> None:
        """Late records reach the log."""
        faulty(self._member(which)).arrive()

    @rule(which=which_ones, size=sizes, max_attempts=st.sampled_from([None, 1, 3]), plans=st.booleans())
    def take_advice(self, which: int, size: int, max_attempts: int | None, *, plans: bool) -> None:
        """A member that has read the log wins exactly the ranges that the library advises; it may plan them."""
        member = self._member(which)
        member.rationalizer.catch_up()
        wanted = member.choose(dict.fromkeys(range(PARTITIONS), TOPIC_END), size, max_attempts=max_attempts)
        if not wanted:
            return
        assert not self._is_paused
        won = member.claim(wanted)
        assert {claim.partition: (claim.start, claim.end) for claim in won} == wanted
        for claim in won:
            self._see("planned range taken over" if claim.plan_end is not None else "range claimed")
            assert max_attempts is None or claim.attempts <= max_attempts
        if plans and not member._claim_set.left:
            member.plan({claim.partition: claim.end for claim in won})

    @rule(which=which_ones, number=partitions, start=st.integers(0, TOPIC_END), size=sizes, fault=faults)
    def claim(self, which: int, number: int, start: int, size: int, fault: Fault | None) -> None:
        """A member claims any range; it wins only a range that was free."""
        member = self._member(which)
        try:
            with self._failing(member, fault):
                won = member.claim({number: (start, start + size)})
        except GroupPausedError:
            return
        self._see("any range claimed" if won else "range not won")

    @rule(which=which_ones, fault=faults)
    def beat(self, which: int, fault: Fault | None) -> None:
        """A member's heartbeat renews all its ranges; the member is notified of each range that it has lost."""
        member = self._member(which)
        try:
            with self._failing(member, fault):
                member.beat()
        except ClaimLostError:
            self._see("lost at a heartbeat")
            assert self._may_lose(member)
        except CommitFailedError:
            assert fault is not None

    @rule(passed_ms=steps_ms, size=sizes)
    def succeed(self, passed_ms: int, size: int) -> None:
        """Time passes, and a new member starts and works; the oldest may never send a record again."""
        self.take_advice(self._succeed(passed_ms), size, None, plans=True)

    @rule(which=which_ones, length=sizes, fault=faults)
    def plan(self, which: int, length: int, fault: Fault | None) -> None:
        """A range with a successful plan is planned in the log, with the same end."""
        member = self._member(which)
        if not member.claims:
            return
        number = sorted(member.claims)[which % len(member.claims)]
        claim = member.claims[number]
        end, before = claim.start + length, (claim.end, claim.plan_end)
        try:
            with self._failing(member, fault):
                member.plan({number: end})
        except ClaimLostError:
            assert self._may_lose(member)
            return
        except PlanRejectedError:
            allowed = end == before[1] if before[1] is not None else end <= before[0]
            assert fault is not None or self._is_paused or claim.is_done or not allowed
            return
        self._see("range planned")
        held = self._held(claim)
        if held is None:  # planned before, so no record was sent or read
            assert before[1] == end
            assert claim.epoch in self.revoked or not claim.lease.holds(self.site.clock.lease_ms()) or claim.may_be_done
            return
        assert (held.start, held.end, held.phase) == (claim.start, end, "planned")

    @rule(which=which_ones, fault=faults)
    def commit(self, which: int, fault: Fault | None) -> None:
        """A commit that succeeds is in the log and not reported as lost, though another range may be."""
        member = self._member(which)
        planned = [claim for claim in member.claims.values() if claim.plan_end is not None and not claim.is_done]
        if not planned:
            return
        claim = planned[which % len(planned)]
        try:
            with self._failing(member, fault):
                member.commit({claim.partition: claim.end})
        except ClaimLostError:
            self._see("commit refused")
            assert self._may_lose(member)
            has_ended = not claim.lease.holds(self.site.clock.lease_ms())
            assert claim.epoch not in self.done_epochs or claim.is_done or has_ended
            return
        self._see("commit" if fault is None else "commit after a fault")
        assert claim.is_done

    @rule(which=which_ones, some=st.none() | st.sets(partitions, min_size=1), fault=faults)
    def release(self, which: int, some: set[int] | None, fault: Fault | None) -> None:
        """A member releases some or all ranges."""
        member = self._member(which)
        with self._failing(member, fault):
            member.release(some)
        assert not member.claims.keys() & (range(PARTITIONS) if some is None else some)

    @rule(which=which_ones, number=partitions, nth=st.integers(0, 3))
    def revoke(self, which: int, number: int, nth: int) -> None:
        """A revocation takes a range from its owner if it names the epoch."""
        epochs = [range_.owner.epoch for range_ in self._key(number).ranges if range_.owner is not None]
        if not epochs:
            return
        epoch = epochs[nth % len(epochs)] or 0
        assert self._member(which).revoke([(number, epoch)]) == {(number, epoch)}
        self._see("range revoked")
        self.revoked.add(epoch)
        self._read_log()
        assert epoch not in [each.owner.epoch for each in self._key(number).ranges if each.owner is not None]

    # Invariants after each step

    @invariant()
    def readers_agree(self) -> None:
        """The library and the reference reader compute the same state, and the offset passes only what was done."""
        if not hasattr(self, "site"):
            return
        self._read_log()
        home = self.site.home
        assert state_of(self.world.partitions[home]) == state_of_plain(self.plain.logs[home])
        for number in range(PARTITIONS):
            assert self.done[number] >= set(range(self._key(number).offset or 0))

    @invariant()
    def no_member_holds_anothers_range(self) -> None:
        """By the log, a member's leased ranges belong to it alone, and the ranges that it reports as done are done."""
        if not hasattr(self, "members"):
            return
        self._read_log()
        believed: dict[int, list[tuple[int, int]]] = {n: [] for n in range(PARTITIONS)}
        for member in self.members:
            for claim in member.claims.values():
                key = self._key(claim.partition)
                if claim.is_done:
                    assert self.done[claim.partition] >= set(range(claim.start, claim.end))
                elif claim.lease.holds(self.site.clock.lease_ms()) and claim.epoch not in self.revoked:
                    held = self._held(claim)
                    assert claim.may_be_done or held is not None
                    assert held is None or (held.start == claim.start and claim.end <= held.end)
                    believed[claim.partition].append((claim.start, claim.end))
                    assert key.offset is not None
        for bounds in believed.values():
            ordered = sorted(bounds)
            assert all(one[1] <= other[0] for one, other in pairwise(ordered))

    # Helpers of the steps

    @contextmanager
    def _failing(self, member: RangeClaimer, fault: Fault | None) -> Iterator[None]:
        """Apply `fault` to the first record of a step."""
        log = faulty(member)
        if fault is not None:
            log.fail(fault, every, times=1)
        try:
            yield
        finally:
            log.recover()
            self._read_log()

    def _key(self, number: int) -> Key:
        return self.world.key(GROUP, TOPIC, number)

    def _held(self, claim: RangeClaim) -> Range | None:
        ranges = self._key(claim.partition).ranges
        return next(
            (range_ for range_ in ranges if range_.owner is not None and range_.owner.epoch == claim.epoch), None
        )

    def _may_lose(self, member: RangeClaimer) -> bool:
        """Return whether a member has lost a range or is about to."""
        now_ms = self.site.clock.lease_ms()
        return bool(member._claim_set.left) or any(
            not claim.is_done and (not claim.lease.may_send(now_ms) or self._held(claim) is None)
            for claim in member.claims.values()
        )

    def _read_log(self) -> None:
        home = self.site.home
        for offset, timestamp_ms, value in self.site.broker.records(home, self.read):
            message = parse(value)
            assert isinstance(message, Message)
            before = self._key(message.partition)
            ranges = {range_.owner.epoch: range_ for range_ in before.ranges if range_.owner is not None}
            self.plain.read(home, offset, timestamp_ms, value)
            verdict = self.world.apply(home, offset, timestamp_ms, value)
            self.read = offset + 1
            if isinstance(message, RangeDone) and verdict.reason is None:
                done = ranges[message.epoch]
                self.done[message.partition] |= set(range(done.start, done.end))
                self.done_epochs.add(message.epoch)
            if isinstance(message, ClaimingRange):
                # A member whose claim was refused may claim again; one that has won a range claims no other.
                assert (message.instance, message.partition) not in self.winners
                if verdict.reason is None:
                    self.winners.add((message.instance, message.partition))
