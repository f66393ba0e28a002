"""What claiming whole partitions and claiming ranges have in common (protocol.md, section 6).

Every step is the same: append, read back past the acknowledged offsets, see what each own record came to. A step that
was not seen accepted did not happen; one that may have happened is settled by reading before anything else is sent.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from marshal_dagster.coordination.appender import AppendResult, Sender
from marshal_dagster.coordination.claims import ClaimSet, H, Member
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_reader import GroupReader
from marshal_dagster.coordination.group_settings import check_settings, write_first_settings
from marshal_dagster.coordination.observer import ClaimerObserver, Observer
from marshal_dagster.coordination.rationalizer import Rationalizer, RecordResult
from marshal_dagster.errors import (
    ClaimLostError,
    CommitFailedError,
    ConfigurationError,
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
    is_topic,
)
from marshal_dagster.protocol.state import Group, Key, Owner

logger = logging.getLogger(__name__)

RETRY_PART: Final = 0.02
"""Part of the heartbeat interval to wait before something that failed is tried again."""

_MOST_NAMED: Final = 3
N = TypeVar("N")
_OBSERVED: Final = "retention has overtaken this reader of the coordination log, which can only be observed now"


class BaseClaimer(ABC, Generic[H]):
    """Holds something of each of some partitions of one data topic for one instance, under leases.

    All methods may be called from any thread; one at a time does its work, under the rationalizer's lock. Once a
    partition is lost or released, this instance sends no further record for it. When the coordination log turns out
    not to be the one read before (`CoordinationLogChangedError`), every claim is over.
    """

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
        told = None if observer is None else ClaimerObserver(observer, self)
        self._claim_set: ClaimSet[H] = ClaimSet(on_lost=told.lost if told else None)
        self._step = _GuardedStep(self._drop_all_if_log_changed)
        self._is_settled = True
        """Whether what became of every record sent for a claim is known."""
        self._began_at = 0
        """The log offset from which records of the group concern this tenure."""
        self._sender = Sender(rationalizer, topic, self.clock, told.sent if told else None)
        number = self._sender.coordination_partition
        if number not in rationalizer.world.partitions:
            raise ConfigurationError(
                f"the rationalizer does not follow topic {topic!r}: open it with topics=[{topic!r}]"
            )
        self._reader = GroupReader(rationalizer, member, topic, settings, self.clock, number)

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
            self._check(partitions)

    def look(self) -> None:
        """Read in a Go group whether the claims are still this instance's: nothing else shows a displacement.

        A look that fails decides nothing, the lease does. Raises `ClaimLostError`, `CoordinationLogChangedError`.
        """
        if not self.is_go or not self._claim_set.claims:
            return
        with self.rationalizer.lock, self._step:
            try:
                self.rationalizer.catch_up()
            except UnavailableError as error:
                logger.warning("the coordination log could not be looked at, the lease runs on: %s", error)
                return
            self._refresh()
            self._check()

    def lease_left_ms(self) -> float | None:
        """Give the time that is left on the shortest lease held, in ms, or None when nothing is held.

        Never waits, whatever another thread is waiting for.
        """
        now_ms, held = self.clock.lease_ms(), tuple(self._claim_set.claims.values())
        return min((claim.lease.left_ms(now_ms) for claim in held if not claim.is_over), default=None)

    # Before claiming

    def ensure_group_settings(self) -> None:
        """Require that the group's settings in the log are this member's; write the group's first ones.

        Raises `IncompleteLogError`, `SettingsMismatchError`, `GoGroupError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock, self._step:
            self.rationalizer.catch_up()
            self._reader.require_certain()
            if not self.group.settings_accepted:
                write_first_settings(self.rationalizer, self._sender, self.member, self.settings)
                self._reader.require_certain()
            self._reader.require_settings()

    def paused_until_s(self) -> int | None:
        """Give the time (unix seconds) until which the group is paused by another instance, or None."""
        return self._reader.paused_until_s()

    # Leaving

    def release(self, partitions: Collection[int] | None = None) -> None:
        """Give up `partitions`, or all that are held or may have been won, where they stand.

        Never raises but what interrupts it: what fails goes stale by itself.
        """
        with self.rationalizer.lock:
            try:
                self._drop_ended_leases()
                self._leave(partitions)
                if partitions is None:
                    self._revoke_unconfirmed()
            except Exception as error:  # noqa: BLE001 - whatever a log can come up with
                logger.warning("release of claims on %r failed, they will go stale: %s", self.topic, error)
            finally:
                self._drop_all_if_log_changed()

    # How a step is done

    def _check(self, partitions: Collection[int] | None = None) -> None:
        """Do what `check` says, under the lock."""
        self._drop_ended_leases()
        claim_set = self._claim_set
        lost = claim_set.left.keys() if partitions is None else [n for n in partitions if n not in claim_set.claims]
        if lost:
            raise ClaimLostError(self._why_lost(sorted(lost)))

    def _send_owned(self, messages: Sequence[Message]) -> AppendResult:
        """Send records of owned keys, once all that was sent before is settled.

        Only while more of the lease is left than a record may wait to be sent. Raises `ClaimLostError`.
        """
        self._settle()
        now_ms = self.clock.lease_ms()
        partitions = [message.partition for message in messages]
        self._fence(
            partition
            for partition in partitions
            if (claim := self._claim_set.claims.get(partition)) is not None and not claim.lease.may_send(now_ms)
        )
        self._check(partitions)
        self._note_sending(messages)
        self._is_settled = False
        sent = self._sender.send(messages)
        self._is_settled = None not in sent.outcomes
        self._drop_all_if_incomplete(partitions)
        return sent

    def _drop_all_if_incomplete(self, partitions: Sequence[int]) -> None:
        """Lose all where retention has overtaken the reader: to one that only observes everything looks accepted."""
        if not self._reader.is_certain:
            self._drop_all_if_log_changed()
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def _begin_tenure(self) -> None:
        """Note from where on the log concerns this tenure, when it first asks for something."""
        if not self._claim_set.requested:
            self._began_at = self._reader.home.next_offset

    def _settle(self) -> None:
        """Read what became of records whose acknowledgement is missing: nothing else is sent before."""
        if self._is_settled:
            return
        self._read_first()
        self._is_settled = True

    def _read_first(self) -> None:
        self.rationalizer.catch_up()
        self._refresh()
        self._check()

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
                self._lose(claim, f"its heartbeat was refused: {reason(outcome)}")
        self._refresh()

    def _require_acknowledged(self, beats: AppendResult) -> None:
        if beats.unconfirmed:
            raise CommitFailedError(
                f"no acknowledgement for the heartbeats of {self._named(beats.unconfirmed)}; the lease runs on"
            )

    def _require_plans_accepted(self, ends: Mapping[int, int], sent: AppendResult) -> None:
        """Read what became of the plans that were `sent`; refuse those not seen accepted, nor found by reading."""
        self._settle()
        self._refresh()
        self._check(ends.keys())
        claims, numbered = self._claim_set.claims, [(message.partition, outcome) for message, outcome in sent]
        refused = [
            f"{self.topic}/{number}: {reason(outcome)}"
            for number, outcome in numbered
            if not (claims[number].plan_end == ends[number] if outcome is None else outcome.accepted)
        ]
        if refused:
            raise PlanRejectedError(f"plans of group {self.member.group!r} were not accepted: {listed(refused)}")
        self._check_log()
        self._check(ends.keys())

    def _require_commit_after(self) -> None:
        if self.settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError("delivery is at_most_once: it commits before it processes, never after")

    def _commit_while_held(self, missing: Mapping[int, int]) -> None:
        """Try to commit, and settle what was tried, until nothing is `missing`, for as long as the leases last."""
        partitions = tuple(missing)
        is_sent = False
        while missing:
            with self.rationalizer.lock, self._step:
                self._check(partitions)
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
        with self.rationalizer.lock, self._step:
            self._check_log()

    def _check_log(self) -> None:
        """Make sure that what was read back is of the same log; a broker that cannot tell now is asked again later."""
        try:
            self.rationalizer.check_identity()
        except (UnavailableError, TopicNotFoundError) as error:
            logger.warning("the coordination topic could not be looked up: %s", error)

    def _add_won_claims(self, sent: AppendResult, asks: type[Message]) -> list[H]:
        """Hold what the records of type `asks` have won by the log as read back."""
        lease = Lease(self.settings.heartbeat_interval_ms, sent.sent_ms)
        keys, claim_set = self.group.keys, self._claim_set
        won: list[H] = []
        for message, epoch, outcome in zip(sent.messages, sent.log_offsets, sent.outcomes, strict=True):
            if epoch is None or outcome is None or type(message) is not asks:
                continue
            number = message.partition
            if outcome.accepted:
                claim = self._won(keys[self.topic, number], number, epoch, lease)
                if claim is not None:
                    claim_set.claims[number] = claim
                    won.append(claim)
            claim_set.unconfirmed.discard(number)
        if claim_set.unconfirmed:
            self._try_to_revoke_unconfirmed()
        return won

    def _try_to_revoke_unconfirmed(self) -> None:
        try:
            self._revoke_unconfirmed()
        except UnavailableError as error:
            logger.warning("claims without acknowledgement are looked for again on leaving: %s", error)

    def _revoke_unconfirmed(self) -> None:
        """Revoke what claims without acknowledgement have won; those not in the log yet may still come."""
        unseen = self._claim_set.unconfirmed
        if not unseen:
            return
        self.rationalizer.catch_up()
        unseen -= self._revoke_own(frozenset(unseen))

    def _confirmed_revocations(self, named: Iterable[N], revocations: AppendResult) -> list[N]:
        """Give those of `named` whose revocation was seen accepted: of what is only observed, none."""
        taken = zip(named, revocations.outcomes, strict=True)
        return [one for one, outcome in taken if outcome is not None and outcome.accepted and self._reader.is_certain]

    def _leave(self, partitions: Collection[int] | None) -> None:
        now_ms, claim_set = self.clock.lease_ms(), self._claim_set
        going = frozenset(claim_set.claims if partitions is None else claim_set.claims.keys() & set(partitions))
        claim_set.unconfirmed |= going  # should this be interrupted, what is still held then is revoked on leaving
        leaving = claim_set.give_up(going)
        signed = self._sender.signed(self.member)
        sendable = [claim for claim in leaving if not claim.is_over and claim.lease.may_send(now_ms)]
        words = [self._release_record(claim, signed) for claim in sendable]
        self._sender.send_last([word for word in words if word is not None])
        claim_set.unconfirmed -= going
        self._refresh()  # what was read back with them may have ended other claims
        if leaving and not claim_set.claims:
            self.rationalizer.log.purge()

    def _require_unchanged(self, won: Collection[H]) -> None:
        """Settings that changed, or a log that retention cut, while the claim was under way: release it unused."""
        try:
            self._reader.require_certain()
            self._reader.require_settings()
        except (IncompleteLogError, SettingsMismatchError):
            self.release([claim.partition for claim in won])
            raise

    def _refresh(self) -> None:
        """Take over from the state what it says of each claim, and lose those that are another's now."""
        self._drop_all_if_log_changed()
        for claim in tuple(self._claim_set.claims.values()):
            if not self._copy_state(claim):
                self._claim_set.lose(claim.partition, "it is no longer this instance's")

    def _lose(self, claim: H, why: str) -> None:
        self._claim_set.lose(claim.partition, why)

    def _drop_all_if_log_changed(self) -> None:
        """Hold nothing where by the log as read no promise holds."""
        why = self._why_void()
        if why is not None:
            self._claim_set.lose_all(why)
        if self.rationalizer.changed is not None:
            self._claim_set.unconfirmed.clear()

    def _why_void(self) -> str | None:
        """Return why no claim counts by the log as read: it is another one, only observed, or a Go consumer joined."""
        if self.rationalizer.changed is not None:
            return str(self.rationalizer.changed)
        if not self._reader.is_certain:
            return _OBSERVED
        seen = self._reader.unplanned
        if seen is None or seen.log_offset < self._began_at:
            return None
        return (
            f"instance {seen.message.instance!r} moved the offset of {seen.message.topic}/{seen.message.partition} "
            "without a plan, as Go consumers do: the group's rule set is not 'go', so no promise holds while one "
            "is in it. Stop it, or give it a group of its own"
        )

    def _require_valid_claims(self, partitions: Iterable[int]) -> None:
        """Raise `ClaimLostError` where no claim counts: a commit that was accepted permits nothing there."""
        if self._why_void() is not None:
            raise ClaimLostError(self._why_lost(sorted(partitions)))

    def _drop_ended_leases(self) -> None:
        """Stop by itself: where a lease has ended, and everywhere when the log is another one or only observed."""
        self._drop_all_if_log_changed()
        now_ms, held = self.clock.lease_ms(), self._claim_set.claims.values()
        ended = [claim.partition for claim in held if not (claim.lease.holds(now_ms) or claim.is_over)]
        if ended:
            self._fence(ended)

    def _fence(self, partitions: Iterable[int]) -> None:
        fenced = list(partitions)
        for partition in fenced:
            self._claim_set.lose(partition, "its lease ended: no heartbeat was seen accepted in time")
        if fenced:
            self.rationalizer.log.purge()

    # What differs between claims of the whole and of ranges

    @abstractmethod
    def beat(self) -> None:
        """Send a heartbeat for every claim."""

    @abstractmethod
    def _commit(self, missing: Mapping[int, int]) -> dict[int, int]:
        """Try once, and give what still is not there."""

    @abstractmethod
    def _uncommitted(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Give those of `ends` that are not committed by the log as last read."""

    @abstractmethod
    def _won(self, key: Key, partition: int, epoch: int, lease: Lease) -> H | None:
        """Make the claim that this process's record at log offset `epoch` has won, if it still has it."""

    @abstractmethod
    def _copy_state(self, claim: H) -> bool:
        """Take over what the state says of `claim`; tell whether it is still this instance's."""

    @abstractmethod
    def _release_record(self, claim: H, signed: dict[str, Any]) -> Message | None:
        """Make the record that gives `claim` up and moves nothing; None where it has to go stale."""

    @abstractmethod
    def _revoke_own(self, partitions: Collection[int]) -> frozenset[int]:
        """Revoke what this instance holds of `partitions` by the log; give those where it was taken."""

    @abstractmethod
    def _note_sending(self, messages: Sequence[Message]) -> None:
        """Note that `messages` are about to be sent, and may be in the log from now on."""

    # Words

    def _why_lost(self, partitions: Sequence[int]) -> str:
        whys = [
            f"{self.topic}/{partition}: {self._claim_set.left.get(partition, 'it was never won, or was released')}; "
            f"{self._holder(partition)}"
            for partition in partitions[:_MOST_NAMED]
        ]
        return (
            f"group {self.member.group!r} does not hold {listed(whys, len(partitions))}. What was committed stays, "
            "the next run takes over the rest"
        )

    def _holder(self, partition: int) -> str:
        owners = self._current_owners(partition)
        if any(owner.instance == self.member.instance for owner in owners):
            return "the log as last read still shows this very instance as owner, until that goes stale"
        held_by = [f"client {one.client!r}, instance {one.instance!r}, epoch {one.epoch}" for one in owners] or [
            "nobody"
        ]
        return f"by the log as last read it is held by {listed(held_by)}"

    def _current_owners(self, partition: int) -> list[Owner]:
        """Give who holds what was lost of `partition`."""
        return self._reader.owners(partition)

    def _named(self, partitions: Iterable[int]) -> str:
        numbers = sorted(partitions)
        return f"{self.topic}/{listed([str(number) for number in numbers], separator=',')}"


class _GuardedStep:
    """One step, done under the lock: however it ends, what the log has taken meanwhile is not held any more."""

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fence()


def reason(outcome: RecordResult | None) -> str:
    """Say why a record was not accepted."""
    return "not acknowledged" if outcome is None else str(outcome.verdict.reason)


def listed(words: Sequence[str], count: int | None = None, separator: str = "; ") -> str:
    """Join the first of `words`, and say how many more of `count` there are."""
    more = (len(words) if count is None else count) - _MOST_NAMED
    return separator.join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
