"""Writes on behalf of one instance: claims, plans, commits, releases (protocol.md, section 6)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
    """Claims partitions of one data topic for one instance, keeps, commits and releases them.

    What holds for all its methods is described at `BaseClaimer`.
    """

    # Before claiming

    def claimable(
        self,
        partitions: Iterable[int],
        *,
        is_dead: Callable[[Owner], bool] = assume_alive,
        max_attempts: int | None = None,
    ) -> list[int]:
        """Give those of `partitions` that look free by the log and this member's own clock: advice, not a promise.

        `is_dead` is asked once for each owner, and may take its time. A partition whose open plan has had
        `max_attempts` attempts is left alone.
        """
        wanted = list(partitions)
        dead = self._reader.dead_owners(wanted, is_dead)
        with self.rationalizer.lock:
            return [number for number in wanted if self._looks_free(number, dead, max_attempts)]

    # Claiming

    def claim(
        self,
        partitions: Iterable[int],
        *,
        max_claims: int | None = None,
        is_dead: Callable[[Owner], bool] = assume_alive,
    ) -> list[Claim]:
        """Ask for all of `partitions` with one append, and give those that were won.

        At most `max_claims` are held afterwards. Claims of owners that `is_dead` knows to be dead are revoked on the
        way. A partition is asked for once in a tenure. Read the log first (`ensure_group_settings`); should this raise,
        `release`.
        Raises `IncompleteLogError`, `GroupPausedError`, `SettingsMismatchError`, `UnavailableError`,
        `CoordinationLogChangedError`.
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
        """Claim partition 0, the key to the topic, and all others that look free only if that was won.

        Raises as `claim`, and `ClaimLostError` when partition 0 is lost while the others are asked for.
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
        """Write down which incarnation of the data topic the offsets belong to, where a key does not say.

        What does not have that id afterwards is released, and `ClaimLostError` raised for it. In a Go group nothing is
        written: Go consumers do not know the record.
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
                dict.fromkeys(unnamed, "the data topic's id could not be written down, so it was released")
            )
            self._claim_set.require()

    # Staying

    def beat(self, starts: Mapping[int, int] | None = None) -> None:
        """Send a heartbeat for every claim, at the offset where it stands, and make sure that the log is the same.

        `starts` gives the first offset of keys that have none; without it these wait. A claim whose heartbeat is
        refused is lost; one that was not acknowledged stays as long as its lease does.
        Raises `ClaimLostError`, `CommitFailedError` for one not acknowledged, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require()
            starts = starts or {}
            self._claim_set.require(starts.keys())
            stands = {claim.partition: claim.beat_offset for claim in self._claim_set.claims.values()}
            offsets = {number: starts.get(number) if at is None else at for number, at in stands.items()}
            sent = self._beat({number: offset for number, offset in offsets.items() if offset is not None})
            self._require_heartbeats(sent)

    # Planning and committing

    def plan(self, ends: Mapping[int, int]) -> None:
        """Write down that the messages up to `ends` (exclusive) are one batch, and read it back.

        One without acknowledgement is settled by reading. Raises `PlanRejectedError` when one was not seen accepted,
        `ClaimLostError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(ends.keys())
            signed = self._sender.signed(self.member)
            sent = self._send_owned([ClaimingMessages(partition=n, plan_end=end, **signed) for n, end in ends.items()])
            self._require_plans_accepted(ends, sent)

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit `offsets` (next to read) and see them in the log, trying for as long as the leases last.

        One without acknowledgement is settled by reading: the offset there while one is the owner counts as committed.
        Raises `PlanRejectedError` where no plan is open; `ClaimLostError` naming the owner of a lost key,
        `CommitFailedError` otherwise; what was seen stays committed.
        Not for at most once, which raises `ConfigurationError`: see `commit_before_processing`.
        """
        self._require_commit_after()
        with self.rationalizer.lock, self._claim_set:
            self._claim_set.require(offsets.keys())
            self._require_forward(offsets)
        self._commit_while_held(dict(offsets))

    def commit_before_processing(self, ends: Mapping[int, int]) -> frozenset[int]:
        """Commit plans' ends before their messages are processed; give the partitions that may be processed now.

        Only where this very process's own record moved the offset from the plan's start to its end (protocol.md,
        section 6, "At most once"), and while its lease lasts. The others must be dropped, all of them should this
        raise.
        Raises `PlanRejectedError` for what is not the end of an open plan, `ClaimLostError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self._settle()
            self._claim_set.require(ends.keys())
            claims = self._claim_set.claims
            unplanned = [number for number, end in ends.items() if claims[number].plan_end != end]
            if unplanned:
                raise PlanRejectedError(f"{self._named(unplanned)}: no open plan ends there; plan first")
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
        """Give claims up at new `offsets`, as the instance that paused the group; give the partitions that were set.

        The offsets are of the data topic with id `topic_id`, which is written down first where a key has another.
        Where another paused or resumed the group in between nothing is set: claim again as a new instance.
        Raises `ClaimLostError`, `UnavailableError`, `CoordinationLogChangedError`.
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
        """Set the position of each claim to where it stands, as the instance that paused the group; give what was set.

        The data topic's id is named again before, where there is one: readers that know no ranges may have seen another
        (protocol.md, section 8.4, "Switch off"). What has no offset, and that of which this was not seen accepted, is
        not set. Raises as `set_positions`.
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
        """Give claims up at `offsets`; give those whose generation this has begun."""
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
        """Free partitions of a Go group from owners that are dead, or set their positions; return what is free there.

        `offsets` says where each is to be: None for where it is now. This instance sends a heartbeat, which takes the
        partition there, and releases it once it has read that back. Where the partition has no offset nothing is sent.
        The owner, should it be alive, takes the partition back with its next heartbeat. Raises `ClaimLostError`,
        `UnavailableError`, `CoordinationLogChangedError`.
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

    # How a step is done

    def _beat(self, offsets: Mapping[int, int]) -> AppendResult:
        """Send heartbeats and note what they came to.

        Where a heartbeat takes a partition (rule set `go`) it is read first whose it is.
        """
        if self.is_go:
            self._read_claims()
        signed = self._sender.signed(self.member)
        sent = self._send_owned([Heartbeat(partition=n, offset=offset, **signed) for n, offset in offsets.items()])
        self._apply_heartbeat_results(sent)
        return sent

    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        sent = self._beat(missing)
        self._claim_set.require(missing.keys())  # what was refused is raised before anything else is asked
        self._settle()
        self._claim_set.require(missing.keys())
        missing = self._uncommitted(missing)
        refused = missing.keys() - set(sent.unconfirmed)
        if refused:
            raise CommitFailedError(
                f"the commit of {self._named(refused)} was not seen in the log; nothing was committed there"
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
        """Release what this instance holds in a Go group; a release that would set an offset is left to go stale."""
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
        """Without an offset to name, or from the instance that paused the group, a release would set a position.

        Such a claim is revoked instead; in a Go group, which knows no revocation, it goes stale.
        """
        if claim.offset is None or self.group.paused_by == self.member.instance:
            if self.is_go:
                return None
            return RevokingClaim(partition=claim.partition, epoch=claim.epoch, **signed)
        return ReleasingPartition(partition=claim.partition, offset=claim.offset, **signed)

    # What must hold

    def _require_forward(self, offsets: Mapping[int, int]) -> None:
        for number, offset in offsets.items():
            claim = self._claim_set.claims[number]
            beaten = claim.beat_offset
            if beaten is not None and offset < beaten:
                raise CommitFailedError(
                    f"{self.topic}/{number} cannot be committed at {offset}: this instance's heartbeats stand at "
                    f"{beaten}; nothing was sent. To go back, set the position"
                )
            if claim.plan_end is None and offset != claim.offset and not self.is_go:
                raise PlanRejectedError(
                    f"{self.topic}/{number} has no open plan; plan before a commit. Nothing was sent"
                )

    # What it believes

    def _select_partitions(self, wanted: Iterable[int], dead: Collection[Owner], max_claims: int | None) -> list[int]:
        asked = self._claim_set.requested
        chosen = [number for number in wanted if number not in asked]
        if self.is_go:
            chosen = [number for number in chosen if self._looks_free(number, dead, None)]
        return chosen if max_claims is None else chosen[: max(0, max_claims - len(self._claim_set.claims))]

    def _looks_free(self, partition: int, dead: Collection[Owner], max_attempts: int | None) -> bool:
        key, group = self.key(partition), self.group
        if max_attempts is not None and key.plan_end is not None and key.plan_attempts >= max_attempts:
            return False
        now_ms = group.advice_time_ms(self._reader.home.log_time_ms, self.clock.wall_ms())
        if group.is_live(key, now_ms) and key.owner not in dead:
            return False
        return not key.ranges or self._has_no_live_ranges(key, dead)

    def _has_no_live_ranges(self, key: Key, dead: Collection[Owner]) -> bool:
        """Tell whether nobody alive holds a range; who has not paused the group may not claim beside others either."""
        group, now_ms = self.group, self._reader.present_ms()
        interval_ms = group.settings.heartbeat_interval_ms
        if any(range_.is_live(now_ms, interval_ms) and range_.owner not in dead for range_ in key.ranges):
            return False
        return not key.ahead or group.is_paused_by(self.member.instance, now_ms)
