"""Claims whole partitions for one instance: claim, plan, commit, release (protocol.md, section 6).

`marshal_dagster.batches` uses it for each batch, and the commands of operators use it to set positions.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from marshal_dagster._internal.collector import paused_collector
from marshal_dagster.coordination.appender import AppendResult
from marshal_dagster.coordination.base_claimer import BaseClaimer, is_accepted
from marshal_dagster.coordination.claims import Claim, Member, new_instance_id
from marshal_dagster.coordination.group_reader import assume_alive
from marshal_dagster.errors import CommitFailedError, PlanRejectedError
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    Heartbeat,
    Message,
    ReleasingPartition,
    RevokingClaim,
)
from marshal_dagster.protocol.state import Key, Owner

__all__ = ["Claim", "Claimer", "Member", "assume_alive", "new_instance_id"]


class Claimer(BaseClaimer[Claim]):
    """Claims partitions of one data topic for one instance, keeps them alive, commits and releases them.

    `BaseClaimer` describes what holds for all methods.
    """

    # Before claiming

    def claimable(
        self,
        partitions: Iterable[int],
        *,
        is_dead: Callable[[Owner], bool] = assume_alive,
        max_attempts: int | None = None,
    ) -> list[int]:
        """Return the partitions that look free by the log and this member's clock; only a claim decides.

        Args:
            partitions: the partitions to look at.
            is_dead: returns whether an owner is known to be dead. It is called once for each owner, without the lock.
            max_attempts: leave out partitions whose open plan has had this many attempts; by default, leave out none.
        """
        wanted = list(partitions)
        dead = self._reader.dead_owners(wanted, is_dead)
        with self.rationalizer.lock:
            return self._that_look_free(wanted, dead, max_attempts)

    # Claiming

    @paused_collector()
    def claim(
        self,
        partitions: Iterable[int],
        *,
        max_claims: int | None = None,
        is_dead: Callable[[Owner], bool] = assume_alive,
    ) -> list[Claim]:
        """Claim `partitions` with one append; return the claims that were won.

        Call `ensure_group_settings` first, which reads the log. If this raises, call `release`. An instance requests
        each partition only once.

        Args:
            partitions: the partitions to claim, in order of preference.
            max_claims: how many partitions to hold at most, including those held before.
            is_dead: returns whether an owner is known to be dead. Claims of dead owners are revoked first.

        Raises:
            IncompleteLogError: the coordination partition can only be observed.
            GroupPausedError: another instance has paused the group.
            SettingsMismatchError: the group has other settings than this member.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        wanted = list(dict.fromkeys(partitions))
        dead = self._reader.dead_owners(wanted, is_dead)
        with self.rationalizer.lock, self._claim_set:
            self._reader.require_ready()
            wanted = self._select_partitions(wanted, dead, max_claims)
            if not wanted:
                return []
            signed = self._sender.signed(self.member)
            claims = [ClaimingPartition(partition=number, **signed) for number in wanted]
            revocations = self._reader.revocations(signed, wanted, dead, lambda number: self.key(number).ranges)
            self._claim_set.request(dict.fromkeys(wanted))
            return self._add_won_claims(self._sender.send([*revocations, *claims]), ClaimingPartition)

    def claim_entire_topic(
        self, partitions: Collection[int], *, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> list[Claim]:
        """Claim partition 0 and, if that was won, all other partitions that look free.

        Partition 0 is the key to the topic: members that claim entire topics claim it first. This raises the errors of
        `claim`, and `ClaimLostError` if partition 0 is lost while the others are claimed.
        """
        claims = self._claim_set.claims
        if 0 not in claims and not self.claim(self.claimable([0], is_dead=is_dead), is_dead=is_dead):
            return []
        others = self.claimable([partition for partition in partitions if partition], is_dead=is_dead)
        won = self.claim(others, is_dead=is_dead)
        with self.rationalizer.lock:
            self._claim_set.require([0])
            return [claims[0], *won]

    def name_data_topic(self, topic_id: str) -> None:
        """Write the id of the data topic for each held key that has none (record `DataTopic`).

        If a key does not have that id afterwards, it is released and `ClaimLostError` is raised. In a Go group nothing
        is written, because Go consumers do not know the record.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require()
            if self.is_go:
                return
            nameless = [claim.partition for claim in self._claim_set.claims.values() if claim.data_topic_id is None]
            signed = self._sender.signed(self.member)
            self._send_owned([DataTopic(partition=number, topic_id=topic_id, **signed) for number in nameless])
            self._settle()
            self._claim_set.refresh()
            held = self._claim_set.claims
            unnamed = [number for number in nameless if number in held and held[number].data_topic_id != topic_id]
            self.release(unnamed)
            self._claim_set.left.update(
                dict.fromkeys(unnamed, "the data topic's id could not be written, so it was released")
            )
            self._claim_set.require()

    # Staying

    @paused_collector()
    def beat(self, starts: Mapping[int, int] | None = None) -> None:
        """Send a heartbeat for every claim at its present offset, and check that the log is the same.

        A claim whose heartbeat is refused is lost. A claim whose heartbeat was not acknowledged stays while its lease
        lasts.

        Args:
            starts: the first offset of keys that have none. Without it, no heartbeat is sent for these keys.

        Raises:
            ClaimLostError: a claim is lost.
            CommitFailedError: a heartbeat was not acknowledged.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require()
            starts = starts or {}
            self._claim_set.require(starts.keys())
            beat_offsets = {claim.partition: claim.beat_offset for claim in self._claim_set.claims.values()}
            offsets = {number: starts.get(number) if at is None else at for number, at in beat_offsets.items()}
            sent = self._beat({number: offset for number, offset in offsets.items() if offset is not None})
            self._require_heartbeats(sent)

    # Planning and committing

    @paused_collector()
    def plan(self, ends: Mapping[int, int]) -> None:
        """Write a plan for each partition in `ends`, and read it back: the messages up to the end are one batch.

        If an acknowledgement is missing, the log shows whether the plan was accepted.

        Args:
            ends: the exclusive end of each partition's plan.

        Raises:
            PlanRejectedError: a plan was not accepted.
            ClaimLostError: a claim is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(ends.keys())
            signed = self._sender.signed(self.member)
            sent = self._send_owned([ClaimingMessages(partition=n, plan_end=end, **signed) for n, end in ends.items()])
            self._require_plans_accepted(ends, sent)

    @paused_collector()
    def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit `offsets` and read them back; retry while the leases last.

        If an acknowledgement is missing, the log is read: the offset counts as committed if the key has it while this
        instance is the owner. Commits that were read back stay, even if this raises.

        Args:
            offsets: the next offset to read of each partition.

        Raises:
            PlanRejectedError: a partition has no open plan; nothing was sent.
            ClaimLostError: a key is lost; the message names its owner.
            CommitFailedError: a commit was not found in the log, or it would lower an offset (then nothing was sent).
            ConfigurationError: the delivery is at most once: use `commit_before_processing`.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        self._require_commit_after()
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(offsets.keys())
            self._require_forward(offsets)
        self._commit_while_held(dict(offsets))

    @paused_collector()
    def commit_before_processing(self, ends: Mapping[int, int]) -> frozenset[int]:
        """Commit the ends of plans before their messages are processed (at most once).

        A partition may be processed only while its lease lasts, and only if this instance's own record moved its offset
        from the plan's start to the plan's end (protocol.md, section 6, "At most once"). The caller must drop the other
        partitions. If this raises, the caller must drop all partitions.

        Args:
            ends: the exclusive end of each partition's open plan.

        Returns:
            The partitions that may be processed now.

        Raises:
            PlanRejectedError: no open plan ends at an offset of `ends`.
            ClaimLostError: a claim is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require(ends.keys())
            claims = self._claim_set.claims
            unplanned = [number for number, end in ends.items() if claims[number].plan_end != end]
            if unplanned:
                raise PlanRejectedError(
                    f"group {self.member.group!r}, {self._named(unplanned)}: no open plan ends at the offset to "
                    "commit; call plan() first"
                )
            starts = {number: claims[number].offset for number in ends}
            sent = self._beat(ends)
            self._check_log()
            self._claim_set.require_valid(ends)
            self._claim_set.drop_ended()
            return frozenset(
                message.partition
                for message, outcome in sent
                if outcome is not None
                and outcome.accepted
                and outcome.before == starts[message.partition]
                and outcome.after == ends[message.partition]
                and message.partition in claims
            )

    # Leaving

    def set_positions(self, offsets: Mapping[int, int], topic_id: str) -> frozenset[int]:
        """Release claims at new `offsets`, as the instance that paused the group: that sets the positions.

        If another instance paused or resumed the group in the meantime, nothing is set: claim again as a new instance.

        Args:
            offsets: the new position of each partition.
            topic_id: the id of the data topic to which the offsets belong. It is first written to keys with another id.

        Returns:
            The partitions whose position was set.

        Raises:
            ClaimLostError: a claim is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(offsets.keys())
            held, signed = self._claim_set.claims, self._sender.signed(self.member)
            renamed = [number for number in offsets if held[number].data_topic_id != topic_id]
            self._send_owned([DataTopic(partition=number, topic_id=topic_id, **signed) for number in renamed])
            self._settle()
            self._claim_set.refresh()
            return self._set({n: at for n, at in offsets.items() if n in held and held[n].data_topic_id == topic_id})

    def confirm_positions(self) -> frozenset[int]:
        """Set the position of each claim to its present offset, as the instance that paused the group.

        If a claim has a data topic id, that id is written again first. Readers that do not know ranges may have
        accepted another id (protocol.md, section 8.4, "Switch off"). A claim is not set if it has no offset, or if its
        id was not accepted. This returns the partitions that were set, and raises the errors of `set_positions`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require()
            held, signed = self._claim_set.claims, self._sender.signed(self.member)
            ids = {n: claim.data_topic_id for n, claim in held.items()}
            sent = self._send_owned(
                [DataTopic(partition=n, topic_id=each, **signed) for n, each in ids.items() if each is not None]
            )
            self._settle()
            named = {message.partition for message, outcome in sent if is_accepted(outcome)}
            offsets = {n: claim.offset for n, claim in held.items() if n in named or ids[n] is None}
            return self._set({n: offset for n, offset in offsets.items() if offset is not None})

    def _set(self, offsets: Mapping[int, int]) -> frozenset[int]:
        """Release claims at `offsets`; return the partitions that have a new generation by that."""
        signed = self._sender.signed(self.member)
        self._claim_set.unconfirmed |= offsets.keys()
        try:
            sent = self._send_owned([ReleasingPartition(partition=n, offset=at, **signed) for n, at in offsets.items()])
        finally:
            self._claim_set.give_up(offsets)
        self._claim_set.unconfirmed -= offsets.keys()
        return frozenset(
            message.partition
            for message, log_offset in zip(sent.messages, sent.log_offsets, strict=True)
            if log_offset is not None and self.key(message.partition).generation == log_offset
        )

    def take_over_and_release(self, offsets: Mapping[int, int | None]) -> frozenset[int]:
        """Take partitions of a Go group from dead owners, or set their positions.

        This instance sends a heartbeat, which takes the partition in a Go group. When it has read that back, it
        releases the partition. Nothing is sent for a partition without an offset. If the owner is alive, it takes the
        partition back with its next heartbeat.

        Args:
            offsets: the new position of each partition; None keeps the present one.

        Returns:
            The partitions that are now free at these offsets.

        Raises:
            ClaimLostError: a claim is lost.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self.rationalizer.catch_up()
            to = {n: self.key(n).offset if offset is None else offset for n, offset in offsets.items()}
            known = {n: offset for n, offset in to.items() if offset is not None}
            signed = self._sender.signed(self.member)
            self._claim_set.give_up(known)
            beats = self._sender.send([Heartbeat(partition=n, offset=at, **signed) for n, at in known.items()])
            taken = [m.partition for m, outcome in beats if outcome is not None and self._owns(m.partition)]
            self._sender.send([ReleasingPartition(partition=n, offset=known[n], **signed) for n in taken])
            keys = {n: self.key(n) for n in known}
            return frozenset(n for n, key in keys.items() if key.owner is None and key.offset == known[n])

    def _owns(self, partition: int) -> bool:
        owner = self.key(partition).owner
        return owner is not None and owner.instance == self.member.instance

    # The parts of a step

    def _beat(self, offsets: Mapping[int, int]) -> AppendResult:
        """Send heartbeats and apply their results to the claims.

        Under rule set `go` a heartbeat takes a partition, so there the log is read first to see who owns it.
        """
        if self.is_go:
            self._read_claims()
        signed = self._sender.signed(self.member)
        sent = self._send_owned([Heartbeat(partition=n, offset=offset, **signed) for n, offset in offsets.items()])
        self._apply_heartbeat_results(sent)
        return sent

    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        sent = self._beat(missing)
        self._claim_set.require(missing.keys())  # refusals are raised before the log is read again
        self._settle()
        self._claim_set.require(missing.keys())
        missing = self._uncommitted(missing)
        refused = missing.keys() - set(sent.unconfirmed)
        if refused:
            raise CommitFailedError(
                f"group {self.member.group!r}: the commit of {self._named(refused)} was not found in the log, so "
                "nothing was committed there. The next run processes these messages again"
            )
        return missing

    def _uncommitted(self, ends: Mapping[int, int]) -> dict[int, int]:
        claims = self._claim_set.claims
        return {n: end for n, end in ends.items() if n not in claims or claims[n].offset != end}

    def _won(self, partition: int, epoch: int, lease: Lease, key: Key) -> Claim | None:
        return Claim.won(partition, epoch, lease, key, self.member.instance)

    def _revoke_own(self, partitions: Collection[int]) -> frozenset[int]:
        return self._release_own(partitions) if self.is_go else super()._revoke_own(partitions)

    def _release_own(self, partitions: Collection[int]) -> frozenset[int]:
        """Release what this instance holds in a Go group, except claims whose release would set an offset."""
        if self.group.paused_by == self.member.instance:
            return frozenset()
        held = {n: self.key(n).offset for n in partitions if self._owns(n)}
        signed = self._sender.signed(self.member)
        sent = self._sender.send(
            [ReleasingPartition(partition=n, offset=at, **signed) for n, at in held.items() if at is not None]
        )
        accepted = [message.partition for message, outcome in sent if is_accepted(outcome)]
        return frozenset(accepted) if self._reader.is_certain else frozenset()

    def _note_sending(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Heartbeat):
                claim = self._claim_set.claims[message.partition]
                claim.highest_sent = max(claim.highest_sent, message.offset)

    def _release_record(self, claim: Claim, signed: dict[str, Any]) -> Message | None:
        """Return a release, a revocation, or None if the claim has to go stale.

        A release would set a position if the key has no offset, or if this instance paused the group. Then the claim is
        revoked instead. In a Go group it goes stale, because Go consumers do not know revocations.
        """
        if claim.offset is None or self.group.paused_by == self.member.instance:
            if self.is_go:
                return None
            return RevokingClaim(partition=claim.partition, epoch=claim.epoch, **signed)
        return ReleasingPartition(partition=claim.partition, offset=claim.offset, **signed)

    # Checks

    def _require_forward(self, offsets: Mapping[int, int]) -> None:
        for number, offset in offsets.items():
            claim = self._claim_set.claims[number]
            beaten = claim.beat_offset
            if beaten is not None and offset < beaten:
                raise CommitFailedError(
                    f"group {self.member.group!r}: {self.topic}/{number} cannot be committed at {offset}, because this "
                    f"instance has sent a heartbeat at {beaten}; nothing was sent. To go back, set the position with "
                    "`marshal-dagster position reset`"
                )
            if claim.plan_end is None and offset != claim.offset and not self.is_go:
                raise PlanRejectedError(
                    f"group {self.member.group!r}: {self.topic}/{number} has no open plan, so nothing was sent. Call "
                    "plan() before commit()"
                )

    # Advice

    def _select_partitions(self, wanted: Iterable[int], dead: Collection[Owner], max_claims: int | None) -> list[int]:
        asked = self._claim_set.requested
        chosen = [number for number in wanted if number not in asked]
        if self.is_go:
            chosen = self._that_look_free(chosen, dead, None)
        return chosen if max_claims is None else chosen[: max(0, max_claims - len(self._claim_set.claims))]

    def _that_look_free(self, wanted: Sequence[int], dead: Collection[Owner], max_attempts: int | None) -> list[int]:
        now_ms = self.group.advice_time_ms(self._reader.home.log_time_ms, self.clock.wall_ms())
        group, keys = self.group, self._reader.keys(wanted)
        if max_attempts is None:
            max_attempts = sys.maxsize
        return [
            partition
            for partition, key in zip(wanted, keys, strict=True)
            if (key.plan_end is None or key.plan_attempts < max_attempts)
            and (key.owner is None or key.owner in dead or not group.is_live(key, now_ms))
            and (not key.ranges or self._has_no_live_ranges(key, dead))
        ]

    def _has_no_live_ranges(self, key: Key, dead: Collection[Owner]) -> bool:
        """Return whether the ranges of a key allow a whole claim: none has a live owner, and none is planned or done.

        The instance that paused the group may claim although ranges are planned or done.
        """
        group, now_ms = self.group, self._reader.present_ms()
        interval_ms = group.settings.heartbeat_interval_ms
        if any(range_.is_live(now_ms, interval_ms) and range_.owner not in dead for range_ in key.ranges):
            return False
        return not key.ahead or group.is_paused_by(self.member.instance, now_ms)
