"""Writes on behalf of one instance: claims, plans, commits, releases (PROTOCOL.md 6).

Every step is the same: append, read back past the acknowledged offsets, see what each own record came to. A step that
was not seen accepted did not happen; one that may have happened is settled by reading before anything else is sent.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from marshal_dagster.coordination.agreement import check_settings, give_settings, require_settings
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Outcome, Rationalizer
from marshal_dagster.coordination.sending import Sender, Sent
from marshal_dagster.coordination.tenure import Claim, Member, Tenure, is_held, new_instance_id
from marshal_dagster.errors import (
    ClaimLost,
    ConfigurationError,
    GroupPaused,
    LogChanged,
    NotCertain,
    NotCommitted,
    PlanRejected,
    SettingsDiffer,
    TopicMissing,
    UnavailableError,
)
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    DeliveryMode,
    Heartbeat,
    Message,
    ReleasingPartition,
    RevokingClaim,
    RuleSet,
    Settings,
    is_topic,
)
from marshal_dagster.protocol.state import Group, Key, Owner

__all__ = ["Claim", "Claimer", "Member", "new_instance_id", "nobody_is_dead"]

logger = logging.getLogger(__name__)

GO_EXTRA_PATIENCE_MS: Final = 1_000
"""How much longer than the rules ask a member waits in a group shared with Go consumers (PROTOCOL.md 7)."""
RETRY_PART: Final = 0.02
"""Part of the heartbeat interval to wait before something that failed is tried again."""

_MOST_NAMED: Final = 3


def nobody_is_dead(_: Owner) -> bool:
    """Know of no owner that it is dead."""
    return False


class Claimer:
    """Claims partitions of one data topic for one instance, keeps, commits and releases them.

    All methods may be called from any thread; one at a time does its work, under the rationalizer's lock. Once a
    partition is lost or released, this instance sends no further record for it. When the coordination log turns out
    not to be the one read before (`LogChanged`), every claim is over.
    """

    def __init__(
        self,
        rationalizer: Rationalizer,
        member: Member,
        topic: str,
        settings: Settings,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Be `member`, for the partitions of data topic `topic`, under the group's `settings`.

        Raises `ConfigurationError` for settings that a member cannot keep, and for a log opened for a longer heartbeat
        interval.
        """
        if not is_topic(topic):
            raise ConfigurationError(f"topic {topic!r} is no name that Kafka allows")
        check_settings(settings, rationalizer.log.delivery_timeout_ms)
        self.member = member
        self.topic = topic
        self.settings = settings
        self.rationalizer = rationalizer
        self.clock = clock or SystemClock()
        self._tenure = Tenure()
        self._is_settled = True
        """Whether what became of every record sent for a claim is known."""
        self._sender = Sender(rationalizer, topic, self.clock)
        if self._sender.coordination_partition not in rationalizer.world.partitions:
            raise ConfigurationError(
                f"the rationalizer does not follow topic {topic!r}: open it with topics=[{topic!r}]"
            )

    # What it knows

    @property
    def claims(self) -> Mapping[int, Claim]:
        """The claims held now, by partition. A claim whose lease has ended is still among them until `check`."""
        return dict(self._tenure.claims)

    @property
    def group(self) -> Group:
        """The group as the topic's coordination partition knows it; live state, under `rationalizer.lock`."""
        return self.rationalizer.world.group_of(self.member.group, self.topic)

    def key(self, partition: int) -> Key:
        """Give the key's live state, under `rationalizer.lock`."""
        return self.rationalizer.world.key(self.member.group, self.topic, partition)

    def check(self, partitions: Collection[int] | None = None) -> None:
        """Raise `ClaimLost` unless all of `partitions` (or all not released by itself) are held under a lease."""
        with self.rationalizer.lock:
            self._fence_what_ended()
            tenure = self._tenure
            lost = tenure.left.keys() if partitions is None else [n for n in partitions if n not in tenure.claims]
            if lost:
                raise ClaimLost(self._why_lost(sorted(lost)))

    def lease_left_ms(self) -> float | None:
        """Give the time that is left on the shortest lease held, in ms, or None when nothing is held.

        Never waits, whatever another thread is waiting for.
        """
        now_ms = self.clock.lease_ms()
        return min((claim.lease.left_ms(now_ms) for claim in tuple(self._tenure.claims.values())), default=None)

    # Before claiming

    def agree_on_settings(self) -> None:
        """See to it that the group's settings in the log are this member's; give the group its first ones.

        Raises `NotCertain`, `SettingsDiffer`, `UnavailableError`, `LogChanged`.
        """
        with self._step():
            self.rationalizer.catch_up()
            self._require_certain()
            if not self.group.settings_accepted:
                give_settings(self.rationalizer, self._sender, self.member, self.settings)
            self._require_settings()

    def claimable(
        self,
        partitions: Iterable[int],
        *,
        is_dead: Callable[[Owner], bool] = nobody_is_dead,
        max_attempts: int | None = None,
    ) -> list[int]:
        """Give those of `partitions` that look free by the log and this member's own clock: advice, not a promise.

        `is_dead` is asked once for each owner, and may take its time. A partition whose open plan has had
        `max_attempts` attempts is left alone.
        """
        wanted = list(partitions)
        dead = self._dead_owners(wanted, is_dead)
        with self.rationalizer.lock:
            return [number for number in wanted if self._looks_free(number, dead, max_attempts)]

    def paused_until_s(self) -> int | None:
        """Give the time (unix seconds) until which the group is paused by another instance, or None."""
        with self.rationalizer.lock:
            group = self.group
            if not group.is_paused(self._advised_time_ms()) or group.paused_by == self.member.instance:
                return None
            return group.paused_until_s

    # Claiming

    def claim(
        self,
        partitions: Iterable[int],
        *,
        max_claims: int | None = None,
        is_dead: Callable[[Owner], bool] = nobody_is_dead,
    ) -> list[Claim]:
        """Ask for all of `partitions` with one append, and give those that were won.

        At most `max_claims` are held afterwards. Claims of owners that `is_dead` knows to be dead are revoked on the
        way. A partition is asked for once in a tenure. Read the log first (`agree_on_settings`); should this raise,
        `release`.
        Raises `NotCertain`, `GroupPaused`, `SettingsDiffer`, `UnavailableError`, `LogChanged`.
        """
        wanted = list(dict.fromkeys(partitions))
        dead = self._dead_owners(wanted, is_dead)
        with self._step():
            self._require_certain()
            self._require_settings()
            self._require_running()
            wanted = self._to_ask_for(wanted, dead, max_claims)
            if not wanted:
                return []
            signed = self._sender.signed(self.member)
            claims = [ClaimingPartition(partition=number, **signed) for number in wanted]
            revocations = self._revocations(wanted, dead)
            self._tenure.ask(wanted)
            won = self._note_wins(self._sender.send([*revocations, *claims]))
            self._require_unchanged(won)
            return won

    def claim_entire_topic(
        self, partitions: Collection[int], *, is_dead: Callable[[Owner], bool] = nobody_is_dead
    ) -> list[Claim]:
        """Claim partition 0, the key to the topic, and all others that look free only if that was won."""
        claims = self._tenure.claims
        if 0 not in claims and not self.claim(self.claimable([0], is_dead=is_dead), is_dead=is_dead):
            return []
        others = self.claimable([number for number in partitions if number], is_dead=is_dead)
        return [claims[0], *self.claim(others, is_dead=is_dead)]

    def name_data_topic(self, topic_id: str) -> None:
        """Write down which incarnation of the data topic the offsets belong to, where a key does not say.

        What does not have that id afterwards is released, and `ClaimLost` raised for it.
        """
        with self._step():
            self.check()
            nameless = [claim.partition for claim in self._tenure.claims.values() if claim.data_topic_id is None]
            signed = self._sender.signed(self.member)
            self._send_owned([DataTopic(partition=number, topic_id=topic_id, **signed) for number in nameless])
            self._settle()
            self._refresh()
            held = self._tenure.claims
            unnamed = [number for number in nameless if number in held and held[number].data_topic_id != topic_id]
            self.release(unnamed)
            self._tenure.left.update(
                dict.fromkeys(unnamed, "the data topic's id could not be written down, so it was released")
            )
            self.check()

    # Staying

    def beat(self, starts: Mapping[int, int] | None = None) -> None:
        """Send a heartbeat for every claim, at the offset where it stands, and make sure that the log is the same.

        `starts` gives the first offset of keys that have none; without it these wait. A claim whose heartbeat is
        refused is lost; one that was not acknowledged stays as long as its lease does.
        Raises `ClaimLost`, `NotCommitted` for one not acknowledged, `UnavailableError`, `LogChanged`.
        """
        with self._step():
            self.check()
            starts = starts or {}
            self.check(starts.keys())
            stands = {claim.partition: claim.beat_offset for claim in self._tenure.claims.values()}
            offsets = {number: starts.get(number) if at is None else at for number, at in stands.items()}
            sent = self._beat({number: offset for number, offset in offsets.items() if offset is not None})
            self._check_log()
            self.check()
            if sent.unheard:
                raise NotCommitted(
                    f"no acknowledgement for the heartbeats of {self._named(sent.unheard)}; the lease runs on"
                )

    # Planning and committing

    def plan(self, ends: Mapping[int, int]) -> None:
        """Write down that the messages up to `ends` (exclusive) are one batch, and read it back.

        One without acknowledgement is settled by reading. Raises `PlanRejected` when one was not seen accepted,
        `ClaimLost`, `UnavailableError`, `LogChanged`.
        """
        with self._step():
            self.check(ends.keys())
            signed = self._sender.signed(self.member)
            sent = self._send_owned([ClaimingMessages(partition=n, plan_end=end, **signed) for n, end in ends.items()])
            self._settle()
            self._refresh()
            self._check_log()
            self.check(ends.keys())
            claims = self._tenure.claims
            refused = [
                f"{self.topic}/{number}: {_reason(outcome)}"
                for number, outcome in zip(ends, sent.outcomes, strict=True)
                if not (claims[number].plan_end == ends[number] if outcome is None else outcome.accepted)
            ]
            if refused:
                raise PlanRejected(f"plans of group {self.member.group!r} were not accepted: {_listed(refused)}")

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit `offsets` (next to read) and see them in the log, trying for as long as the leases last.

        One without acknowledgement is settled by reading: the offset there while one is the owner counts as committed.
        Raises `ClaimLost` naming who holds a lost key now, `NotCommitted` otherwise; what was seen stays committed.
        Not for at most once, which raises `ConfigurationError`: see `commit_before_processing`.
        """
        if self.settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError("delivery is at_most_once: it commits before it processes, never after")
        with self._step():
            self.check(offsets.keys())
            self._require_forward(offsets)
        missing = dict(offsets)
        is_sent = False
        while missing:
            with self._step():
                self.check(offsets.keys())
                try:
                    missing = self._commit(missing, is_sent=is_sent)
                except UnavailableError as error:
                    logger.warning("the commit of %s is not settled yet: %s", self._named(missing), error)
                is_sent = True
            if missing:
                self.clock.sleep_ms(self.settings.heartbeat_interval_ms * RETRY_PART)
        with self._step():
            self._check_log()

    def commit_before_processing(self, ends: Mapping[int, int]) -> frozenset[int]:
        """Commit plans' ends before their messages are processed; give the partitions that may be processed now.

        Only where this very process's own record moved the offset from the plan's start to its end (PROTOCOL.md 6, "At
        most once"), and while its lease lasts. The others must be dropped, all of them should this raise.
        Raises `PlanRejected` for what is not the end of an open plan, `ClaimLost`, `UnavailableError`, `LogChanged`.
        """
        with self._step():
            self._settle()
            self.check(ends.keys())
            claims = self._tenure.claims
            unplanned = [number for number, end in ends.items() if claims[number].plan_end != end]
            if unplanned:
                raise PlanRejected(f"{self._named(unplanned)}: no open plan ends there; plan first")
            starts = {number: claims[number].offset for number in ends}
            sent = self._beat(ends)
            self._check_log()
            self._fence_what_ended()
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
        Raises `ClaimLost`, `UnavailableError`, `LogChanged`.
        """
        with self._step():
            self.check(offsets.keys())
            held, signed = self._tenure.claims, self._sender.signed(self.member)
            strange = [number for number in offsets if held[number].data_topic_id != topic_id]
            self._send_owned([DataTopic(partition=number, topic_id=topic_id, **signed) for number in strange])
            self._settle()
            self._refresh()
            named = {n: at for n, at in offsets.items() if n in held and held[n].data_topic_id == topic_id}
            sent = self._send_owned([ReleasingPartition(partition=n, offset=at, **signed) for n, at in named.items()])
            self._tenure.give_up(named)
            return frozenset(
                message.partition
                for message, log_offset in zip(sent.messages, sent.log_offsets, strict=True)
                if log_offset is not None and self.key(message.partition).generation == log_offset
            )

    def release(self, partitions: Collection[int] | None = None) -> None:
        """Give up `partitions`, or all that are held or may have been won, where they stand.

        Never raises but what interrupts it: what fails goes stale by itself.
        """
        with self.rationalizer.lock:
            try:
                self._fence_what_ended()
                self._leave(partitions)
                if partitions is None:
                    self._abandon_unseen()
            except Exception as error:  # noqa: BLE001 - whatever a log can come up with
                logger.warning("release of claims on %r failed, they will go stale: %s", self.topic, error)

    def revoke(self, epochs: Mapping[int, int]) -> frozenset[int]:
        """Take claims, named by partition and epoch, from owners known to be dead. Give those that were taken.

        Raises `UnavailableError`, `LogChanged`.
        """
        with self._step():
            member = self.member.anew() if self._tenure.asked & epochs.keys() else self.member
            signed = self._sender.signed(member)
            sent = self._sender.send([RevokingClaim(partition=n, epoch=epoch, **signed) for n, epoch in epochs.items()])
            return frozenset(message.partition for message, outcome in sent if outcome is not None and outcome.accepted)

    # How a step is done

    @contextmanager
    def _step(self) -> Iterator[None]:
        """One at a time; a log that is not the same any more ends every claim."""
        with self.rationalizer.lock:
            try:
                yield
            except LogChanged as changed:
                self._tenure.lose_all(str(changed))
                raise

    def _send_owned(self, messages: Sequence[Message]) -> Sent:
        """Send records of owned keys, once all that was sent before is settled.

        Only while more of the lease is left than a record may wait to be sent. Raises `ClaimLost`.
        """
        self._settle()
        now_ms = self.clock.lease_ms()
        partitions = [message.partition for message in messages]
        self._fence(
            number
            for number in partitions
            if (claim := self._tenure.claims.get(number)) is not None and not claim.lease.may_send(now_ms)
        )
        self.check(partitions)
        for message in messages:
            if isinstance(message, Heartbeat):
                claim = self._tenure.claims[message.partition]
                claim.highest_sent = max(claim.highest_sent, message.offset)
        self._is_settled = False
        sent = self._sender.send(messages)
        self._is_settled = None not in sent.outcomes
        return sent

    def _settle(self) -> None:
        """Read what became of records whose acknowledgement is missing: nothing else is sent before."""
        if self._is_settled:
            return
        self._read_first()
        self._is_settled = True

    def _read_first(self) -> None:
        self.rationalizer.catch_up()
        self._refresh()
        self.check()

    def _beat(self, offsets: Mapping[int, int]) -> Sent:
        """Send heartbeats and note what they came to.

        Where a heartbeat takes a partition (rule set `go`) it is read first whose it is.
        """
        if self.settings.rule_set is RuleSet.GO:
            self._read_first()
        signed = self._sender.signed(self.member)
        sent = self._send_owned([Heartbeat(partition=n, offset=offset, **signed) for n, offset in offsets.items()])
        for message, outcome in sent:
            claim = self._tenure.claims.get(message.partition)
            if claim is None or outcome is None:
                continue
            if outcome.accepted:
                claim.lease = claim.lease.renewed(sent.sent_ms)
            else:
                self._tenure.lose(claim.partition, f"its heartbeat was refused: {_reason(outcome)}")
        self._refresh()
        return sent

    def _commit(self, missing: Mapping[int, int], *, is_sent: bool) -> dict[int, int]:
        """Try once: settle what was sent, then send what is not there; give what still is not."""
        if is_sent:
            self._settle()
            missing = self._uncommitted(missing)
        sent = self._beat(missing)
        self._settle()
        self.check(missing.keys())
        missing = self._uncommitted(missing)
        refused = missing.keys() - set(sent.unheard)
        if refused:
            raise NotCommitted(
                f"the commit of {self._named(refused)} was not seen in the log; nothing was committed there"
            )
        return missing

    def _uncommitted(self, offsets: Mapping[int, int]) -> dict[int, int]:
        claims = self._tenure.claims
        return {n: offset for n, offset in offsets.items() if n not in claims or claims[n].offset != offset}

    def _check_log(self) -> None:
        """Make sure that what was read back is of the same log; a broker that cannot tell now is asked again later."""
        try:
            self.rationalizer.check_identity()
        except (UnavailableError, TopicMissing) as error:
            logger.warning("the coordination topic could not be looked up: %s", error)

    def _note_wins(self, sent: Sent) -> list[Claim]:
        lease = Lease(self.settings.heartbeat_interval_ms, sent.sent_ms)
        keys, tenure, instance = self.group.keys, self._tenure, self.member.instance
        won: list[Claim] = []
        for message, epoch, outcome in zip(sent.messages, sent.log_offsets, sent.outcomes, strict=True):
            if epoch is None or outcome is None or type(message) is not ClaimingPartition:
                continue
            number = message.partition
            if outcome.accepted:
                key = keys[self.topic, number]
                if is_held(key, instance, epoch):
                    claim = Claim.of(number, epoch, lease, key)
                    tenure.claims[number] = claim
                    won.append(claim)
            tenure.unseen.discard(number)
        if tenure.unseen:
            self._try_to_abandon()
        return won

    def _try_to_abandon(self) -> None:
        try:
            self._abandon_unseen()
        except UnavailableError as error:
            logger.warning("claims without acknowledgement are looked for again on leaving: %s", error)

    def _abandon_unseen(self) -> None:
        """Revoke what claims without acknowledgement have won; those not in the log yet may still come."""
        unseen = self._tenure.unseen
        if not unseen:
            return
        self.rationalizer.catch_up()
        owners = {number: self.key(number).owner for number in unseen}
        epochs = {
            number: owner.epoch
            for number, owner in owners.items()
            if owner is not None and owner.epoch is not None and owner.instance == self.member.instance
        }
        unseen -= self.revoke(epochs)

    def _leave(self, partitions: Collection[int] | None) -> None:
        now_ms = self.clock.lease_ms()
        leaving = self._tenure.give_up(partitions)
        signed = self._sender.signed(self.member)
        self._sender.send_last([self._last_word(claim, signed) for claim in leaving if claim.lease.may_send(now_ms)])
        if leaving and not self._tenure.claims:
            self.rationalizer.log.purge()

    def _last_word(self, claim: Claim, signed: dict[str, Any]) -> Message:
        """Make the record that gives `claim` up and moves nothing.

        Without an offset to name, or from the instance that paused the group, a release would set a position: such a
        claim is revoked instead.
        """
        if claim.offset is None or self.group.paused_by == self.member.instance:
            return RevokingClaim(partition=claim.partition, epoch=claim.epoch, **signed)
        return ReleasingPartition(partition=claim.partition, offset=claim.offset, **signed)

    def _revocations(self, wanted: Iterable[int], dead: Collection[Owner]) -> list[Message]:
        owners = [(number, self.key(number).owner) for number in wanted] if dead else []
        signed = self._sender.signed(self.member)
        return [
            RevokingClaim(partition=number, epoch=owner.epoch, **signed)
            for number, owner in owners
            if owner is not None and owner.epoch is not None and owner in dead
        ]

    # What must hold

    def _require_certain(self) -> None:
        if not self.rationalizer.world.partition_of(self.topic).certain:
            raise NotCertain(
                f"the coordination partition of topic {self.topic!r} no longer begins at offset 0 and has no snapshot: "
                "its state can only be observed. Stop all members of the group, then see `marshal-dagster recover`"
            )

    def _require_settings(self) -> None:
        require_settings(self.member.group, self.group, self.settings)

    def _require_running(self) -> None:
        until_s = self.paused_until_s()
        if until_s is not None:
            raise GroupPaused(
                f"group {self.member.group!r} is paused until {until_s} (unix seconds) by {self.group.paused_by!r}; "
                "resume it with `marshal-dagster resume`, or wait"
            )

    def _require_unchanged(self, won: Collection[Claim]) -> None:
        """Settings that changed while the claim was under way: release it unused."""
        try:
            self._require_settings()
        except SettingsDiffer:
            self.release([claim.partition for claim in won])
            raise

    def _require_forward(self, offsets: Mapping[int, int]) -> None:
        for number, offset in offsets.items():
            beaten = self._tenure.claims[number].beat_offset
            if beaten is not None and offset < beaten:
                raise NotCommitted(
                    f"{self.topic}/{number} cannot be committed at {offset}: this instance's heartbeats stand at "
                    f"{beaten}; nothing was sent. To go back, set the position"
                )

    # What it believes

    def _advised_time_ms(self) -> int:
        log_time_ms = self.rationalizer.world.partition_of(self.topic).log_time_ms or 0
        return max(log_time_ms, self.clock.wall_ms())

    def _dead_owners(self, partitions: Iterable[int], is_dead: Callable[[Owner], bool]) -> frozenset[Owner]:
        """Give the owners of `partitions` that `is_dead` knows to be dead; it is asked once an instance, unlocked."""
        if is_dead is nobody_is_dead:
            return frozenset()
        with self.rationalizer.lock:
            owners = {owner for number in partitions if (owner := self.key(number).owner) is not None}
        instances = {owner.instance: owner for owner in owners}
        dead = {instance for instance, owner in instances.items() if is_dead(owner)}
        return frozenset(owner for owner in owners if owner.instance in dead)

    def _to_ask_for(self, wanted: Iterable[int], dead: Collection[Owner], max_claims: int | None) -> list[int]:
        asked = self._tenure.asked
        chosen = [number for number in wanted if number not in asked]
        if self.settings.rule_set is RuleSet.GO:
            chosen = [number for number in chosen if self._looks_free(number, dead, None)]
        return chosen if max_claims is None else chosen[: max(0, max_claims - len(self._tenure.claims))]

    def _looks_free(self, partition: int, dead: Collection[Owner], max_attempts: int | None) -> bool:
        key, group = self.key(partition), self.group
        if max_attempts is not None and key.plan_end is not None and key.plan_attempts >= max_attempts:
            return False
        patience_ms = GO_EXTRA_PATIENCE_MS if group.settings.rule_set is RuleSet.GO else 0
        return not group.is_live(key, self._advised_time_ms() - patience_ms) or key.owner in dead

    def _refresh(self) -> None:
        """Take over from the state what it says of each claim, and lose those that are another's now."""
        for claim in tuple(self._tenure.claims.values()):
            key = self.key(claim.partition)
            if is_held(key, self.member.instance, claim.epoch):
                claim.copy_state(key)
            else:
                self._tenure.lose(claim.partition, "it is no longer this instance's")

    def _fence_what_ended(self) -> None:
        """Stop by itself: where a lease has ended, and everywhere when the log is another one."""
        if self.rationalizer.changed is not None:
            self._tenure.lose_all(str(self.rationalizer.changed))
        now_ms = self.clock.lease_ms()
        self._fence(claim.partition for claim in tuple(self._tenure.claims.values()) if not claim.lease.holds(now_ms))

    def _fence(self, partitions: Iterable[int]) -> None:
        fenced = list(partitions)
        for partition in fenced:
            self._tenure.lose(partition, "its lease ended: no heartbeat was seen accepted in time")
        if fenced:
            self.rationalizer.log.purge()

    # Words

    def _why_lost(self, partitions: Sequence[int]) -> str:
        whys = [
            f"{self.topic}/{number}: {self._tenure.left.get(number, 'it was never won, or was released')}; "
            f"{self._holder(number)}"
            for number in partitions[:_MOST_NAMED]
        ]
        return (
            f"group {self.member.group!r} does not hold {_listed(whys, len(partitions))}. What was committed stays, "
            "the next run takes over the rest"
        )

    def _holder(self, partition: int) -> str:
        owner = self.key(partition).owner
        if owner is not None and owner.instance == self.member.instance:
            return "the log as last read still shows this very instance as owner, until that goes stale"
        held_by = f"client {owner.client!r}, instance {owner.instance!r}, epoch {owner.epoch}" if owner else "nobody"
        return f"by the log as last read it is held by {held_by}"

    def _named(self, partitions: Iterable[int]) -> str:
        numbers = sorted(partitions)
        return f"{self.topic}/{_listed([str(number) for number in numbers], separator=',')}"


def _reason(outcome: Outcome | None) -> str:
    return "not acknowledged" if outcome is None else str(outcome.verdict.reason)


def _listed(words: Sequence[str], count: int | None = None, separator: str = "; ") -> str:
    """Join the first of `words`, and say how many more of `count` there are."""
    more = (len(words) if count is None else count) - _MOST_NAMED
    return separator.join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
