"""The base class of `Claimer` and `RangeClaimer`, with the steps that both share (protocol.md, section 6).

Each step appends records, reads past their acknowledged offsets, and looks at the result of each record. A step counts
only if its records were read back as accepted. If an acknowledgement is missing, the log is read before anything else
is sent.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic

from marshal_dagster._internal.collector import paused_collector
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
"""The part of the heartbeat interval that passes before a failed step is tried again."""


class BaseClaimer(ABC, Generic[H]):
    """Holds claims on partitions of one data topic for one instance, each under a lease.

    All methods may be called from any thread; the rationalizer's lock lets one work at a time. Once a partition is lost
    or released, this instance sends no further record for it. If the coordination log is no longer the one that was
    read before (`CoordinationLogChangedError`), every claim is lost.
    """

    _claims_ranges: ClassVar[bool] = False
    """Whether a claim is a range of a partition, not the whole partition."""

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
        """Claim partitions of data topic `topic` as `member`, under the group's `settings`.

        Raises:
            ConfigurationError: a member cannot keep the settings, or they do not enable ranges for a claimer of ranges.
                Or the log was opened for a longer heartbeat interval, or the rationalizer does not follow the topic.
        """
        if self._claims_ranges and not enables_ranges(settings):
            raise ConfigurationError(
                f"group {member.group!r} has features {settings.features} and rule set {settings.rule_set}: to claim "
                f"ranges, use rule set 'native' and the feature {RANGES!r}"
            )
        if not is_topic(topic):
            raise ConfigurationError(
                f"{topic!r} is not a valid topic name: use 1 to 249 letters, digits, '.', '_' and '-', and neither '.' "
                "nor '..'"
            )
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

    # State

    @property
    def claims(self) -> Mapping[int, H]:
        """The claims held now, by partition. A claim whose lease has ended is among them until the next `check`."""
        return dict(self._claim_set.claims)

    @property
    def requested(self) -> Collection[int]:
        """The partitions that this instance has requested so far. It may request each of them only once."""
        return self._claim_set.requested.keys()

    @property
    def group(self) -> Group:
        """The group's live state in the topic's coordination partition; use it under `rationalizer.lock`."""
        return self._reader.group

    def key(self, partition: int) -> Key:
        """Return the live state of a partition; use it under `rationalizer.lock`."""
        return self._reader.key(partition)

    @property
    def is_go(self) -> bool:
        """Whether this member shares its group with Go consumers (protocol.md, section 7)."""
        return self._reader.is_go

    def check(self, partitions: Collection[int] | None = None) -> None:
        """Raise `ClaimLostError` unless all `partitions` are held under a lease.

        By default, these are all partitions that this instance has won and not released. In a Go group the log is read
        first, because there a heartbeat of another instance takes the partition.
        """
        with self.rationalizer.lock:
            self.look()
            self._claim_set.require(partitions)

    def require_held(self) -> None:
        """Raise `ClaimLostError` unless all claims hold by the log as last read; read nothing."""
        with self.rationalizer.lock:
            self._claim_set.require()

    def look(self) -> None:
        """Read the log in a Go group, to find out whether another instance has taken a claim.

        If the log cannot be read to its end, the part that was read counts. For the rest the lease decides. Outside of
        Go groups this does nothing.

        Raises:
            ClaimLostError: a claim was lost.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        if not self.is_go or not self._claim_set.claims:
            return
        with self.rationalizer.lock, self._claim_set:
            try:
                self._read_claims()
            except UnavailableError as error:
                logger.warning(
                    "group %r: the coordination log could not be read; the claims on topic %r stay while their leases "
                    "last: %s",
                    self.member.group,
                    self.topic,
                    error,
                )
                self._claim_set.require()

    def lease_left_ms(self) -> float | None:
        """Return the time left on the shortest lease in ms, or None if nothing is held. It never waits for a lock."""
        return self._claim_set.lease_left_ms()

    # Before claiming

    def ensure_group_settings(self) -> None:
        """Check that the group's settings in the log equal this member's; write them if the group has none.

        Raises:
            IncompleteLogError: the coordination partition can only be observed.
            SettingsMismatchError: the group has other settings, or could not be given any.
            GoGroupError: Go consumers use the group or the coordination topic.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        with self.rationalizer.lock, self._claim_set:
            self.rationalizer.catch_up()
            self._reader.require_certain()
            if not self.group.settings_accepted:
                write_first_settings(self.rationalizer, self._sender, self.member, self.settings)
                self._reader.require_certain()
            self._reader.require_settings()

    def paused_until_s(self) -> int | None:
        """Return the end (unix seconds) of a present pause by another instance, or None if there is none."""
        return self._reader.paused_until_s()

    # Leaving

    @paused_collector()
    def release(self, partitions: Collection[int] | None = None) -> None:
        """Release `partitions` at their present offsets; by default all that are held or may have been won.

        This raises nothing except interrupts. A claim whose release fails goes stale.
        """
        with self.rationalizer.lock, self._claim_set:
            try:
                self._claim_set.drop_ended()
                self._leave(partitions)
                if partitions is None:
                    self._revoke_unconfirmed()
            except Exception as error:  # noqa: BLE001 - a failed release must not hide the result of the work
                logger.warning(
                    "group %r: claims on topic %r could not be released, so they go stale: %s",
                    self.member.group,
                    self.topic,
                    error,
                )

    def revoke(self, claims: Collection[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Revoke claims of owners that are known to be dead.

        Args:
            claims: partition and epoch of each claim.

        Returns:
            The claims whose revocation was read back as accepted; none if the log can only be observed.

        Raises:
            GoGroupError: Go consumers use the group; they do not know the record.
            UnavailableError: the log did not answer in time.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        if self.is_go:
            raise GoGroupError(
                f"nothing was revoked in group {self.member.group!r}, because Go consumers use it and do not know "
                "revocations. Wait until the dead owner is stale"
            )
        with self.rationalizer.lock, self._claim_set:
            is_used = any(number in self._claim_set.requested for number, _ in claims)
            signed = self._sender.signed(self.member.with_new_instance() if is_used else self.member)
            record_type = RevokingRange if self._claims_ranges else RevokingClaim
            sent = self._sender.send([record_type(partition=n, epoch=epoch, **signed) for n, epoch in claims])
            accepted = [claim for claim, outcome in zip(claims, sent.outcomes, strict=True) if is_accepted(outcome)]
            return frozenset(accepted) if self._reader.is_certain else frozenset()

    # The parts of a step

    def _send_owned(self, messages: Sequence[Message]) -> AppendResult:
        """Send records of owned keys, after the results of all earlier records are known.

        Raises `ClaimLostError` if less of a lease is left than a record may wait to be sent.
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
        """Read the results of records whose acknowledgement is missing, before anything else is sent."""
        if not self._is_settled:
            self._read_claims()
            self._is_settled = True

    def _read_claims(self) -> None:
        """Read the log to its end, and raise `ClaimLostError` if a claim was lost."""
        self.rationalizer.catch_up()
        self._claim_set.refresh()
        self._claim_set.require()

    def _apply_heartbeat_results(self, sent: AppendResult) -> None:
        """Renew the lease of each claim whose heartbeat was accepted; a claim whose heartbeat was refused is lost."""
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
        """Raise for heartbeats that were refused or not acknowledged, and for a log that changed."""
        self._claim_set.require()  # refusals are reported first, however long the next call takes
        self._check_log()
        self._claim_set.require()
        if sent.unconfirmed:
            raise CommitFailedError(
                f"group {self.member.group!r}: no acknowledgement for the heartbeats of "
                f"{self._named(sent.unconfirmed)}. The leases continue, and the next heartbeat is sent soon"
            )

    def _require_plans_accepted(self, ends: Mapping[int, int], sent: AppendResult) -> None:
        """Raise `PlanRejectedError` unless the log has accepted all plans that were `sent`."""
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
            raise PlanRejectedError(
                f"plans of group {self.member.group!r} were not accepted: {listed(refused)}. Nothing was committed; "
                "the next run claims the partitions again"
            )
        self._check_log()
        self._claim_set.require(ends.keys())

    def _require_commit_after(self) -> None:
        if self.settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError(
                f"group {self.member.group!r} has delivery at_most_once, which never commits after processing: use "
                "commit_before_processing()"
            )

    def _commit_while_held(self, missing: Mapping[int, int]) -> None:
        """Try to commit until nothing is `missing`, while the leases last; before each retry, read the results."""
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
                    logger.warning(
                        "group %r: the result of the commit of %s is not known yet: %s",
                        self.member.group,
                        self._named(missing),
                        error,
                    )
                is_sent = True
            if missing:
                self.clock.sleep_ms(self.settings.heartbeat_interval_ms * RETRY_PART)
        with self.rationalizer.lock, self._claim_set:
            self._check_log()

    def _check_log(self) -> None:
        """Check that the records were read back from the same log; without an answer, only log a warning."""
        try:
            self.rationalizer.check_identity()
        except (UnavailableError, TopicNotFoundError) as error:
            logger.warning(
                "the coordination topic %r could not be described, so it is checked again at the next step: %s",
                self.rationalizer.identity.topic,
                error,
            )

    def _add_won_claims(self, sent: AppendResult, requests: type[Message]) -> list[H]:
        """Add the claims that the records of type `requests` have won, as read back, and return them.

        If the settings changed or retention cut the log in the meantime, all of them are released unused.
        """
        lease = Lease(self.settings.heartbeat_interval_ms, sent.sent_ms)
        keys, claim_set = self._reader.keys(message.partition for message in sent.messages), self._claim_set
        won: list[H] = []
        for message, epoch, outcome, key in zip(sent.messages, sent.log_offsets, sent.outcomes, keys, strict=True):
            if epoch is None or outcome is None or type(message) is not requests:
                continue
            partition = message.partition
            if outcome.accepted:
                claim = self._won(partition, epoch, lease, key)
                if claim is not None:
                    claim_set.claims[partition] = claim
                    won.append(claim)
            claim_set.unconfirmed.discard(partition)
        if claim_set.unconfirmed:
            try:
                self._revoke_unconfirmed()
            except UnavailableError as error:
                logger.warning(
                    "group %r: claims of %s were not acknowledged and could not be revoked; the release tries again: "
                    "%s",
                    self.member.group,
                    self._named(claim_set.unconfirmed),
                    error,
                )
        try:
            self._reader.require_certain()
            self._reader.require_settings()
        except (IncompleteLogError, SettingsMismatchError):
            self.release([claim.partition for claim in won])
            raise
        return won

    def _revoke_unconfirmed(self) -> None:
        """Revoke what claims without acknowledgement have won. Their records may also arrive in the log later."""
        unconfirmed = self._claim_set.unconfirmed
        if unconfirmed:
            self.rationalizer.catch_up()
            unconfirmed -= self._revoke_own(frozenset(unconfirmed))

    def _revoke_own(self, partitions: Collection[int]) -> frozenset[int]:
        """Revoke what this instance holds of `partitions` by the log; return the partitions that were revoked."""
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
        claim_set.unconfirmed |= going  # if this is interrupted, the next release revokes what is still held
        leaving = claim_set.give_up(going)
        signed = self._sender.signed(self.member)
        sendable = [claim for claim in leaving if not claim.is_done and claim.lease.may_send(now_ms)]
        records = [self._release_record(claim, signed) for claim in sendable]
        self._sender.send_last([record for record in records if record is not None])
        claim_set.unconfirmed -= going
        claim_set.refresh()  # records that were read back with the releases may have ended other claims
        if leaving and not claim_set.claims:
            self.rationalizer.log.purge()

    def _named(self, partitions: Iterable[int]) -> str:
        return f"{self.topic}/{listed([str(partition) for partition in sorted(partitions)], separator=',')}"

    # What differs between claims of partitions and claims of ranges

    @abstractmethod
    def beat(self) -> None:
        """Send a heartbeat for every claim."""

    @abstractmethod
    def _won(self, partition: int, epoch: int, lease: Lease, key: Key) -> H | None:
        """Return the claim that this instance's record at log offset `epoch` has won, if it is still held."""

    @abstractmethod
    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        """Try to commit `missing` once, and return the part that is still not committed."""

    @abstractmethod
    def _uncommitted(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Return the `ends` that are not committed by the log as last read."""

    @abstractmethod
    def _release_record(self, claim: H, signed: dict[str, Any]) -> Message | None:
        """Return the record that releases `claim` and moves no offset; None if the claim has to go stale."""

    @abstractmethod
    def _note_sending(self, messages: Sequence[Message]) -> None:
        """Record in the claims that `messages` are about to be sent, and may be in the log from now on."""


def is_accepted(outcome: RecordResult | None) -> bool:
    """Return whether a record was acknowledged, read back and accepted."""
    return outcome is not None and outcome.accepted


def reason(outcome: RecordResult | None) -> str:
    """Return the reason why a record was not accepted."""
    return "not acknowledged" if outcome is None else str(outcome.verdict.reason)
