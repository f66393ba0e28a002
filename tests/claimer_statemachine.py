"""A state machine in which members of a group take any allowed step, in any order, while time passes.

The test keeps its own list of owners, built only from the results of the steps. The reference reader reads the log that
the members write. After each step the members, the list and the reference reader must agree, and no member may believe
that it owns a claim of another member.
"""

from collections import Counter
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.errors import ClaimLostError, GroupPausedError, PlanRejectedError
from marshal_dagster.protocol.messages import Message, parse
from tests.fuzz.world import state_of, state_of_plain
from tests.member_statemachine import MemberMachine, steps_ms, which_ones
from tests.members import GROUP, HI_MS, TOPIC, TOPIC_ID
from tests.reference_reader import new_group, new_key

PARTITIONS = 3
partitions = st.integers(0, PARTITIONS - 1)


class Holder(NamedTuple):
    """The owner of a key, by the results of the steps."""

    instance: str
    epoch: int


class ClaimerMachine(MemberMachine[Claimer]):
    """The steps of the members."""

    seen: ClassVar[Counter[str]] = Counter()
    """Counts of what happened in all runs. A test checks that each case occurs."""

    def _prepare(self) -> None:
        self.holders: dict[int, Holder] = {}
        self.revoked: set[Holder] = set()
        self.requested: set[tuple[str, int]] = set()
        self.left: set[tuple[str, int]] = set()

    def _new_member(self) -> Claimer:
        return self.site.member()

    @rule(which=which_ones, wanted=st.sets(partitions, min_size=1), looks=st.booleans())
    def claim(self, which: int, wanted: set[int], *, looks: bool) -> None:
        """In a running group, a member wins exactly the keys that it newly requests and that have no live owner."""
        member = self._member(which)
        instance = member.member.instance
        if looks:
            member.rationalizer.catch_up()
        new = {n for n in wanted if (instance, n) not in self.requested}
        free = set() if self._is_paused else {n for n in new if not self._is_live(n)}
        try:
            won = member.claim(sorted(wanted))
        except GroupPausedError:
            self._see("paused")
            assert self._is_paused or not looks
            return
        assert not (self._is_paused and looks)
        assert {claim.partition for claim in won} == free
        self.requested |= {(instance, number) for number in new}
        for claim in won:
            former = self.holders.get(claim.partition)
            self._see("takeover" if former else "claim")
            assert former is None or claim.epoch > former.epoch
            self.holders[claim.partition] = Holder(instance, claim.epoch)

    @rule(passed_ms=steps_ms, starts=st.booleans())
    def succeed(self, passed_ms: int, *, starts: bool) -> None:
        """Time passes and a new member requests all keys. The oldest member may never send a record again."""
        newest = self._succeed(passed_ms)
        self.claim(newest, set(range(PARTITIONS)), looks=True)
        if starts:
            self.start(newest)

    @rule(which=which_ones)
    def start(self, which: int) -> None:
        """A member that has won sends its first records."""
        member = self._member(which)
        nowhere = [n for n, claim in member.claims.items() if claim.offset is None]
        before = self._may_lose(member)
        try:
            member.name_data_topic(TOPIC_ID)
            member.beat(dict.fromkeys(nowhere, 0))
        except ClaimLostError:
            self._see("lost at the start")
            assert before
            return
        self._read_log()
        assert all(self._key(n)["data_topic_id"] == TOPIC_ID for n in member.claims)
        assert all(self._key(n)["offset"] == 0 for n in nowhere)

    @rule(which=which_ones)
    def beat(self, which: int) -> None:
        """A member's heartbeat renews all its claims; the member is notified of each claim that it has lost."""
        member = self._member(which)
        before, ended = self._may_lose(member), self._has_ended(member)
        try:
            member.beat()
        except ClaimLostError:
            self._see("lost at a heartbeat")
            assert before
            return
        assert not ended
        self._read_log()
        for number, claim in member.claims.items():
            if claim.offset is not None:
                assert self._key(number)["owner"]["last_beat"] == self._now_ms

    @rule(which=which_ones, ahead=st.integers(0, 20))
    def plan(self, which: int, ahead: int) -> None:
        """An accepted plan is open; a plan is rejected only where the reference reader gives a reason."""
        member = self._member(which)
        number = self._one_of(member, which)
        if number is None:
            return
        end = (member.claims[number].offset or 0) + ahead
        key, may_lose = dict(self._key(number)), self._may_lose(member)
        can = key["offset"] is not None and end > key["offset"] and key["plan_end"] in {None, end}
        try:
            member.plan({number: end})
        except ClaimLostError:
            self._see("lost at a plan")
            assert may_lose
            return
        except PlanRejectedError:
            self._see("plan rejected")
            assert self._is_paused or not can
            return
        self._see("plan")
        self._read_log()
        assert self._key(number)["plan_end"] == end

    @rule(which=which_ones, ahead=st.integers(0, 20), whole=st.booleans())
    def commit(self, which: int, ahead: int, whole: bool) -> None:
        """A commit that succeeds is in the log; one that fails has moved no offset."""
        member = self._member(which)
        number = self._one_of(member, which)
        if number is None:
            return
        claim = member.claims[number]
        to = claim.plan_end if whole and claim.plan_end is not None else (claim.beat_offset or 0) + ahead
        if claim.plan_end is None:
            to = claim.offset or 0
        before, may_lose = self._key(number)["offset"], self._may_lose(member)
        try:
            member.commit({number: to})
        except PlanRejectedError:
            self._see("commit without a plan")
            assert claim.plan_end is None
            self._read_log()
            assert self._key(number)["offset"] == before
            return
        except ClaimLostError:
            self._see("commit refused")
            assert may_lose
            self._read_log()
            assert self._key(number)["offset"] == before
            return
        self._see("commit")
        self._read_log()
        assert self._key(number)["offset"] == to
        assert self._key(number)["owner"]["instance"] == member.member.instance

    @rule(which=which_ones, some=st.none() | st.sets(partitions, min_size=1))
    def release(self, which: int, some: set[int] | None) -> None:
        """A member releases some or all claims. Those that its lease covers are free at once, and no offset moves."""
        member = self._member(which)
        leaving = [n for n in member.claims if some is None or n in some]
        free = [n for n in leaving if not self._is_late(member, n)]
        offsets = {n: self._key(n)["offset"] for n in range(PARTITIONS)}
        member.release(some)
        for number in free:
            if self.holders.get(number, Holder("", -1)).instance == member.member.instance:
                self._see("release")
                del self.holders[number]
        assert not set(leaving) & member.claims.keys()
        self._read_log()
        self.left |= {(member.member.instance, number) for number in leaving}
        assert offsets == {n: self._key(n)["offset"] for n in range(PARTITIONS)}

    @rule(which=which_ones, number=partitions, older=st.booleans())
    def revoke(self, which: int, number: int, older: bool) -> None:
        """A revocation takes a claim from its owner only if it names the epoch of that claim."""
        holder = self.holders.get(number)
        epoch = 0 if holder is None else holder.epoch - older
        taken = self._member(which).revoke([(number, epoch)])
        assert taken == ({(number, epoch)} if holder is not None and not older else set())
        if holder is not None and taken:
            self._see("revoke")
            self.revoked.add(holder)
            del self.holders[number]

    # Invariants after each step

    @invariant()
    def readers_agree(self) -> None:
        """The library and the reference reader compute the same state; the owners match the results of the steps."""
        if not hasattr(self, "site"):
            return
        self._read_log()
        state = state_of_plain(self.plain.logs[self.site.home])
        assert state_of(self.world.partitions[self.site.home]) == state
        owners = {n: self._key(n)["owner"] for n in range(PARTITIONS)}
        held = {n: Holder(owner["instance"], owner["epoch"]) for n, owner in owners.items() if owner is not None}
        assert held == self.holders

    @invariant()
    def no_member_holds_anothers_claim(self) -> None:
        """What a member holds under a lease is its own by the log, unless the claim was revoked without its notice."""
        for member in getattr(self, "members", []):
            for number, claim in member.claims.items():
                believed = Holder(member.member.instance, claim.epoch)
                if claim.lease.holds(self.site.clock.lease_ms()) and believed not in self.revoked:
                    assert self.holders.get(number) == believed

    # Helpers of the steps

    @staticmethod
    def _one_of(member: Claimer, which: int) -> int | None:
        held = sorted(member.claims)
        return held[which % len(held)] if held else None

    def _key(self, number: int) -> dict[str, Any]:
        group = self.plain.logs[self.site.home]["groups"].get(GROUP, new_group())
        found: dict[str, Any] = group["keys"].get((TOPIC, number), new_key())
        return found

    def _is_live(self, number: int) -> bool:
        owner = self._key(number)["owner"]
        return owner is not None and self._now_ms - owner["last_beat"] <= 2 * HI_MS

    def _is_late(self, member: Claimer, number: int) -> bool:
        """Return whether the lease is too short for another record."""
        return not member.claims[number].lease.may_send(self.site.clock.lease_ms())

    def _has_ended(self, member: Claimer) -> bool:
        """Return whether a lease has ended."""
        now_ms = self.site.clock.lease_ms()
        return any(not claim.lease.holds(now_ms) for claim in member.claims.values())

    def _may_lose(self, member: Claimer) -> bool:
        """Return whether a member has lost a claim or is about to: its lease ended, or another took the claim."""
        instance = member.member.instance
        return bool(member._claim_set.left) or any(
            self._is_late(member, n) or self.holders.get(n) != Holder(instance, claim.epoch)
            for n, claim in member.claims.items()
        )

    def _read_log(self) -> None:
        home = self.site.home
        for offset, timestamp_ms, value in self.site.broker.records(home, self.read):
            self.plain.read(home, offset, timestamp_ms, value)
            self.world.apply(home, offset, timestamp_ms, value)
            self.read = offset + 1
            message = parse(value)
            assert isinstance(message, Message)
            # A member that has released a key sends nothing more for it. A revocation names the claim of another
            # member.
            assert (message.instance, message.partition) not in self.left or message.topic != TOPIC
