"""What claiming whole partitions and claiming ranges have in common (protocol.md, section 6).

Every step is the same: append, read back past the acknowledged offsets, see what each own record came to. A step that
was not seen accepted did not happen; one that may have happened is settled by reading before anything else is sent.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic

from marshal_dagster.coordination.appender import AppendResult, Sender
from marshal_dagster.coordination.claim_set import ClaimSet, H, listed
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_reader import GroupReader
from marshal_dagster.coordination.group_settings import check_settings, write_first_settings
from marshal_dagster.coordination.observer import ClaimerObserver, Observer
from marshal_dagster.coordination.rationalizer import Rationalizer, RecordResult
from marshal_dagster.errors import (
    CommitFailedError,
    ConfigurationError,
    GoGroupError,
    IncompleteLogError,
    PlanRejectedError,
    SettingsMismatchError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    DeliveryMode,
    GroupSettings,
    Message,
    RevokingClaim,
    RevokingRange,
    is_topic,
)
from marshal_dagster.protocol.state import RANGES, Group, Key, enables_ranges

logger = logging.getLogger(__name__)

RETRY_PART: Final = 0.02
"""Part of the heartbeat interval to wait before something that failed is tried again."""


class BaseClaimer(ABC, Generic[H]):
    """Holds something of each of some partitions of one data topic for one instance, under leases.

    All methods may be called from any thread; one at a time does its work, under the rationalizer's lock. Once a
    partition is lost or released, this instance sends no further record for it. When the coordination log turns out
    not to be the one read before (`CoordinationLogChangedError`), every claim is over.
    """

    _claims_ranges: ClassVar[bool] = False
    """Whether it holds ranges of partitions, not the whole of each."""

    def __init__(
        self,
        rationalizer: Rationalizer,
        member: Member,
        topic: str,
        settings: GroupSettings,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Be `member`, for the partitions of data topic `topic`, under the group's `settings`.

        Raises `ConfigurationError` for settings that a member cannot keep or that do not enable ranges where these are
        claimed, and for a log opened for a longer heartbeat interval.
        """
        if self._claims_ranges and not enables_ranges(settings):
            raise ConfigurationError(
                f"features are {settings.features}, rule set is {settings.rule_set}: ranges are claimed in groups of "
                f"rule set 'native' whose settings name the feature {RANGES!r}"
            )
        if not is_topic(topic):
            raise ConfigurationError(f"topic {topic!r} is no name that Kafka allows")
        check_settings(settings, rationalizer.log.delivery_timeout_ms)
        self.member = member
        self.topic = topic
        self.settings = settings
        self.rationalizer = rationalizer
        self.clock = clock or SystemClock()
        observed = ClaimerObserver(observer, self)
        self._sender = Sender(rationalizer, topic, self.clock, observed.sent)
        number = self._sender.coordination_partition
        if number not in rationalizer.world.partitions:
            raise ConfigurationError(
                f"the rationalizer does not follow topic {topic!r}: open it with topics=[{topic!r}]"
            )
        self._reader = GroupReader(rationalizer, member, topic, settings, self.clock, number)
        self._claim_set: ClaimSet[H] = ClaimSet(self._reader, observed.lost)
        self._is_settled = True
        """Whether the result of every record sent for a claim is known."""

    # What it knows

    @property
    def claims(self) -> Mapping[int, H]:
        """The claims held now, by partition. A claim whose lease has ended is still among them until `check`."""
        return dict(self._claim_set.claims)

    @property
    def group(self) -> Group:
        """The group as the topic's coordination partition knows it; live state, under `rationalizer.lock`."""
        return self._reader.group

    def key(self, partition: int) -> Key:
        """Return the key's live state, under `rationalizer.lock`."""
        return self._reader.key(partition)

    @property
    def is_go(self) -> bool:
        """Whether this member shares its group with Go consumers (protocol.md, section 7)."""
        return self._reader.is_go

    def check(self, partitions: Collection[int] | None = None) -> None:
        """Raise `ClaimLostError` unless all of `partitions` (or all not released by itself) are held under a lease.

        In a Go group the log is read first, because a heartbeat of any instance takes a partition there.
        """
        with self.rationalizer.lock:
            self.look()
            self._claim_set.require(partitions)

    def require_held(self) -> None:
        """Raise `ClaimLostError` unless all claims hold by the log as last read; read nothing."""
        with self.rationalizer.lock:
            self._claim_set.require()

    def look(self) -> None:
        """Read in a Go group whether the claims are still this instance's: nothing else shows a displacement.

        A look that fails decides only by what it read before it failed; for the rest the lease decides. Raises
        `ClaimLostError`, `CoordinationLogChangedError`.
        """
        if not self.is_go or not self._claim_set.claims:
            return
        with self.rationalizer.lock, self._claim_set:
            try:
                self._read_claims()
            except UnavailableError as error:
                logger.warning("the coordination log could not be looked at, the lease runs on: %s", error)
                self._claim_set.require()

    def lease_left_ms(self) -> float | None:
        """Return the time that is left on the shortest lease held, in ms, or None when nothing is held.

        Never waits, whatever another thread is waiting for.
        """
        return self._claim_set.lease_left_ms()

    # Before claiming

    def ensure_group_settings(self) -> None:
        """Require that the group's settings in the log are this member's; write the group's first ones.

        Raises `IncompleteLogError`, `SettingsMismatchError`, `GoGroupError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._claim_set:
            self.rationalizer.catch_up()
            self._reader.require_certain()
            if not self.group.settings_accepted:
                write_first_settings(self.rationalizer, self._sender, self.member, self.settings)
                self._reader.require_certain()
            self._reader.require_settings()

    def paused_until_s(self) -> int | None:
        """Return the time (unix seconds) until which the group is paused by another instance, or None."""
        return self._reader.paused_until_s()

    # Leaving

    def release(self, partitions: Collection[int] | None = None) -> None:
        """Give up `partitions`, or all that are held or may have been won, at their present offsets.

        Never raises but what interrupts it: what fails goes stale by itself.
        """
        with self.rationalizer.lock, self._claim_set:
            try:
                self._claim_set.drop_ended()
                self._leave(partitions)
                if partitions is None:
                    self._revoke_unconfirmed()
            except Exception as error:  # noqa: BLE001 - whatever a log can come up with
                logger.warning("release of claims on %r failed, they will go stale: %s", self.topic, error)

    def revoke(self, claims: Collection[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Take claims, each named by partition and epoch, from owners known to be dead. Return those seen taken.

        Of a log that is only observed none is. Raises `GoGroupError` in a Go group, whose members do not know the
        record; `UnavailableError`, `CoordinationLogChangedError`.
        """
        if self.is_go:
            raise GoGroupError(
                f"nothing is revoked in group {self.member.group!r}, which Go consumers use: a dead owner goes stale "
                "by itself"
            )
        with self.rationalizer.lock, self._claim_set:
            is_used = any(number in self._claim_set.requested for number, _ in claims)
            signed = self._sender.signed(self.member.with_new_instance() if is_used else self.member)
            record_type = RevokingRange if self._claims_ranges else RevokingClaim
            sent = self._sender.send([record_type(partition=n, epoch=epoch, **signed) for n, epoch in claims])
            accepted = [claim for claim, outcome in zip(claims, sent.outcomes, strict=True) if is_accepted(outcome)]
            return frozenset(accepted) if self._reader.is_certain else frozenset()

    # How a step is done

    def _send_owned(self, messages: Sequence[Message]) -> AppendResult:
        """Send records of owned keys, once all that was sent before is settled.

        Only while more of the lease is left than a record may wait to be sent. Raises `ClaimLostError`.
        """
        self._settle()
        partitions = [message.partition for message in messages]
        self._claim_set.require_sendable(partitions)
        self._note_sending(messages)
        self._is_settled = False
        sent = self._sender.send(messages)
        self._is_settled = None not in sent.outcomes
        self._claim_set.require_certain(partitions)
        return sent

    def _settle(self) -> None:
        """Read the results of records whose acknowledgement is missing: nothing else is sent before."""
        if not self._is_settled:
            self._read_claims()
            self._is_settled = True

    def _read_claims(self) -> None:
        """Read on, and raise `ClaimLostError` where a claim was lost."""
        self.rationalizer.catch_up()
        self._claim_set.refresh()
        self._claim_set.require()

    def _apply_heartbeat_results(self, sent: AppendResult) -> None:
        """Renew the leases whose heartbeats were seen accepted; where one was refused the claim is lost."""
        renewed = Lease(self.settings.heartbeat_interval_ms, sent.sent_ms)
        for message, outcome in sent:
            claim = self._claim_set.claims.get(message.partition)
            if claim is None or outcome is None:
                continue
            if outcome.accepted:
                claim.lease = claim.lease.renewed(renewed)
            else:
                self._claim_set.lose_refused(claim, f"its heartbeat was refused: {reason(outcome)}")
        self._claim_set.refresh()

    def _require_heartbeats(self, sent: AppendResult) -> None:
        """Raise for claims whose heartbeats `sent` were refused or not acknowledged, and for a log that changed."""
        self._claim_set.require()  # what was refused is reported first, however long the next question takes
        self._check_log()
        self._claim_set.require()
        if sent.unconfirmed:
            raise CommitFailedError(
                f"no acknowledgement for the heartbeats of {self._named(sent.unconfirmed)}; the lease runs on"
            )

    def _require_plans_accepted(self, ends: Mapping[int, int], sent: AppendResult) -> None:
        """Read the results of the plans that were `sent`; refuse those not seen accepted, nor found by reading."""
        self._settle()
        self._claim_set.refresh()
        self._claim_set.require(ends.keys())
        claims, results = self._claim_set.claims, [(message.partition, outcome) for message, outcome in sent]
        refused = [
            f"{self.topic}/{partition}: {reason(outcome)}"
            for partition, outcome in results
            if not (claims[partition].plan_end == ends[partition] if outcome is None else outcome.accepted)
        ]
        if refused:
            raise PlanRejectedError(f"plans of group {self.member.group!r} were not accepted: {listed(refused)}")
        self._check_log()
        self._claim_set.require(ends.keys())

    def _require_commit_after(self) -> None:
        if self.settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError("delivery is at_most_once: it commits before it processes, never after")

    def _commit_while_held(self, missing: Mapping[int, int]) -> None:
        """Try to commit, and settle what was tried, until nothing is `missing`, for as long as the leases last."""
        partitions = tuple(missing)
        is_sent = False
        while missing:
            with self.rationalizer.lock, self._claim_set:
                self._claim_set.require(partitions)
                try:
                    if is_sent:
                        self._settle()
                        missing = self._uncommitted(missing)
                    missing = self._commit(missing)
                except UnavailableError as error:
                    logger.warning("the commit of %s is not settled yet: %s", self._named(missing), error)
                is_sent = True
            if missing:
                self.clock.sleep_ms(self.settings.heartbeat_interval_ms * RETRY_PART)
        with self.rationalizer.lock, self._claim_set:
            self._check_log()

    def _check_log(self) -> None:
        """Make sure that what was read back is of the same log; a broker that cannot tell now is asked again later."""
        try:
            self.rationalizer.check_identity()
        except (UnavailableError, TopicNotFoundError) as error:
            logger.warning("the coordination topic could not be looked up: %s", error)

    def _add_won_claims(self, sent: AppendResult, requests: type[Message]) -> list[H]:
        """Hold what the records of type `requests` have won by the log as read back.

        Settings that changed, or a log that retention cut, while the claim was under way: it is released unused.
        """
        lease = Lease(self.settings.heartbeat_interval_ms, sent.sent_ms)
        keys, claim_set = self.group.keys, self._claim_set
        won: list[H] = []
        for message, epoch, outcome in zip(sent.messages, sent.log_offsets, sent.outcomes, strict=True):
            if epoch is None or outcome is None or type(message) is not requests:
                continue
            partition = message.partition
            if outcome.accepted:
                claim = self._won(partition, epoch, lease, keys[self.topic, partition])
                if claim is not None:
                    claim_set.claims[partition] = claim
                    won.append(claim)
            claim_set.unconfirmed.discard(partition)
        if claim_set.unconfirmed:
            try:
                self._revoke_unconfirmed()
            except UnavailableError as error:
                logger.warning("claims without acknowledgement are looked for again on leaving: %s", error)
        try:
            self._reader.require_certain()
            self._reader.require_settings()
        except (IncompleteLogError, SettingsMismatchError):
            self.release([claim.partition for claim in won])
            raise
        return won

    def _revoke_unconfirmed(self) -> None:
        """Revoke what claims without acknowledgement have won; those not in the log yet may still come."""
        unconfirmed = self._claim_set.unconfirmed
        if unconfirmed:
            self.rationalizer.catch_up()
            unconfirmed -= self._revoke_own(frozenset(unconfirmed))

    def _revoke_own(self, partitions: Collection[int]) -> frozenset[int]:
        """Revoke what this instance holds of `partitions` by the log; return those where it was taken."""
        held = [
            (partition, owner.epoch)
            for partition in partitions
            for owner in self.key(partition).owners
            if owner.epoch is not None and owner.instance == self.member.instance
        ]
        return frozenset(partition for partition, _ in self.revoke(held))

    def _leave(self, partitions: Collection[int] | None) -> None:
        now_ms, claim_set = self.clock.lease_ms(), self._claim_set
        going = frozenset(claim_set.claims if partitions is None else claim_set.claims.keys() & set(partitions))
        claim_set.unconfirmed |= going  # should this be interrupted, what is still held then is revoked on leaving
        leaving = claim_set.give_up(going)
        signed = self._sender.signed(self.member)
        sendable = [claim for claim in leaving if not claim.is_done and claim.lease.may_send(now_ms)]
        records = [self._release_record(claim, signed) for claim in sendable]
        self._sender.send_last([record for record in records if record is not None])
        claim_set.unconfirmed -= going
        claim_set.refresh()  # what was read back with them may have ended other claims
        if leaving and not claim_set.claims:
            self.rationalizer.log.purge()

    def _named(self, partitions: Iterable[int]) -> str:
        return f"{self.topic}/{listed([str(partition) for partition in sorted(partitions)], separator=',')}"

    # What differs between claims of the whole and of ranges

    @abstractmethod
    def beat(self) -> None:
        """Send a heartbeat for every claim."""

    @abstractmethod
    def _won(self, partition: int, epoch: int, lease: Lease, key: Key) -> H | None:
        """Make the claim that this process's record at log offset `epoch` has won, if it still has it."""

    @abstractmethod
    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        """Try once, and return what still is not there."""

    @abstractmethod
    def _uncommitted(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Return those of `ends` that are not committed by the log as last read."""

    @abstractmethod
    def _release_record(self, claim: H, signed: dict[str, Any]) -> Message | None:
        """Make the record that gives `claim` up and moves nothing; None where it has to go stale."""

    @abstractmethod
    def _note_sending(self, messages: Sequence[Message]) -> None:
        """Note that `messages` are about to be sent, and may be in the log from now on."""


def is_accepted(outcome: RecordResult | None) -> bool:
    """Return whether a record was acknowledged, read back and accepted."""
    return outcome is not None and outcome.accepted


def reason(outcome: RecordResult | None) -> str:
    """Name the reason for which a record was not accepted."""
    return "not acknowledged" if outcome is None else str(outcome.verdict.reason)
