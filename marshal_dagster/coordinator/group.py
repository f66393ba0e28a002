"""How a coordinator leads one group: membership, liveness and rebalances. Pure: no clock, no Kafka.

Its methods take the members' messages and return the coordinator's messages to send. `service` runs it over Kafka.
Times are in milliseconds of a monotonic clock.

A wrong, late or second coordinator can only cost balance. The claims in the coordination log give safety.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

from marshal_dagster.coordinator.assignment import DataPartitionId, Strategy, count_moves
from marshal_dagster.coordinator.group_members import Liveness, Member, Members, Recovery
from marshal_dagster.coordinator.messages import (
    ALL,
    LONGEST_PATTERN,
    LONGEST_SESSION_MS,
    CoordinatorMessage,
    Leave,
    MemberMessage,
    Ping,
    Pong,
    Refusal,
    Register,
    Registered,
    Started,
    StartFetcher,
    StopFetcher,
    Stopped,
    by_topic,
)
from marshal_dagster.coordinator.rebalance import Deadlines, Plan, Rebalance
from marshal_dagster.coordinator.workload import Workload
from marshal_dagster.errors import ConfigurationError

_ABSENT_MS: Final = 1_000.0
"""After a longer time between two calls, deadlines are extended, because the coordinator could not receive answers."""
_IS_PATTERN: Final = re.compile(r"[A-Za-z0-9._*?-]+").fullmatch


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The rules by which a coordinator leads its groups.

    Raises:
        ConfigurationError: A number is negative or not finite, or `min_session_ms` is out of range.

    Example:
        ```python
        rules = GroupRules(weighted_assignment, gather_ms=500, weighs=True)
        ```
    """

    strategy: Strategy
    """The function that assigns partitions to members."""
    min_session_ms: int = 1_000
    """The shortest session timeout with which a member may register, in milliseconds (1 to 3,600,000)."""
    max_failed_pings: int = 1
    """How many pings a member may leave unanswered. With one more it is removed."""
    gather_ms: float = 100.0
    """How long after the last member has joined or left a rebalance starts, in milliseconds.

    It starts at most ten times this after the first of them. So thousands of members that join together cause a single
    rebalance.
    """
    rebalance_backoff_ms: float = 1_000.0
    """The pause before a rebalance is retried, in milliseconds."""
    max_rebalance_retries: int = 4
    """How many times a rebalance is retried. After that, the pause is 30 times as long."""
    weighs: bool = False
    """Whether the strategy needs the weights of partitions, such as their lag. Rebalances then wait for them."""

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if a value is out of range."""
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ConfigurationError(f"{option.name} is {value}; it must be 0 or more")
        if not 1 <= self.min_session_ms <= LONGEST_SESSION_MS:
            raise ConfigurationError(
                f"min_session_ms is {self.min_session_ms}; it must be from 1 to {LONGEST_SESSION_MS}"
            )


class GroupEventKind(Enum):
    """The kind of an event in a group."""

    JOINED = "joined"
    """A member has joined."""
    LEFT = "left"
    """A member has left."""
    FAILED = "failed"
    """Members did not answer in time, and were removed."""
    REBALANCED = "rebalanced"
    """A rebalance has moved partitions."""
    REBALANCE_RETRIED = "rebalance retried"
    """Members did not stop or start in time; the rebalance is retried after a pause."""
    REBALANCE_GIVEN_UP = "rebalance given up"
    """The retries are used up; the rebalance is retried after a long pause."""
    SUPERSEDED = "superseded"
    """A later coordinator leads the group."""


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """An event in a group, for the `listener` of a `Coordinator`.

    Example:
        ```python
        def listen(group: str, event: GroupEvent) -> None:
            if event.happening is GroupEventKind.FAILED:
                print(f"group {group}: {', '.join(event.members)} no longer answers")


        coordinator = Coordinator(connection, listener=listen)
        ```
    """

    happening: GroupEventKind
    """The kind of the event."""
    members: tuple[str, ...] = ()
    """The names of the members that the event is about."""
    moved: int = 0
    """The number of partitions that were assigned to another member."""


class GroupCoordinator:
    """The coordinator of one group for one term of the election. Not thread-safe.

    The methods that process messages or time return the messages to send. `events` collects the events of the group.
    """

    def __init__(
        self,
        group: str,
        epoch: int,
        rules: GroupRules,
        now_ms: float,
        *,
        kept: Iterable[StartFetcher] = (),
        recovery_ms: float = 0.0,
        generation: int = 0,
        is_later_epoch: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Start to lead a group.

        Args:
            group: The group's name.
            epoch: The epoch of this coordinator.
            rules: The rules by which it leads.
            now_ms: The present time.
            kept: The shares that the previous coordinator sent to members. No partition moves before all these members
                have registered again, or the time for that is over.
            recovery_ms: The time that these members have to register again. They have the longest of their session
                timeouts (up to a minute) if that is longer.
            generation: Generations of this coordinator are larger than this one.
            is_later_epoch: Returns whether the election shows that a later coordinator may lead under an epoch. A later
                epoch that a member reports is ignored otherwise.
        """
        self.group, self.epoch = group, epoch
        self.events: list[GroupEvent] = []
        self._rules = rules
        self._is_later_epoch = is_later_epoch
        self._members = Members()
        self._liveness = Liveness(rules.min_session_ms, rules.max_failed_pings, now_ms)
        self._recovery = Recovery(kept, recovery_ms, now_ms)
        self._workload = Workload(rules.strategy, weighs=rules.weighs)
        self._rebalance = Rebalance(rules.gather_ms, rules.rebalance_backoff_ms, rules.max_rebalance_retries, now_ms)
        self.generation = max(generation, self._recovery.newest_generation)
        """The generation of the newest messages to stop and to start."""
        self._called_ms = now_ms

    # State

    @property
    def members(self) -> list[str]:
        """The names of the members, sorted."""
        return sorted(self._members.by_name)

    @property
    def is_empty(self) -> bool:
        """Whether there are no members, and none are expected."""
        return not self._members.by_name and not self._recovery.is_expecting

    @property
    def positions(self) -> Mapping[DataPartitionId, int]:
        """The next offsets of partitions, as reported by members that commit by themselves."""
        return self._members.positions

    @property
    def awaits_weights(self) -> bool:
        """Whether no partition can move before the weights are set (`update_weights`)."""
        return self._workload.awaits_weights

    def assignment(self) -> dict[str, frozenset[DataPartitionId]]:
        """Return the partitions of each member, as far as this coordinator knows them."""
        return {name: member.places for name, member in self._members.by_name.items()}

    def shares(self) -> list[StartFetcher]:
        """Return the assignment as messages, from which another coordinator can start (`kept`)."""
        return [self._start(name) for name in self._members.by_name]

    def topics_wanted(self) -> frozenset[str]:
        """Return the existing topics that members subscribe to."""
        return self._workload.topics_wanted(self._members)

    # Input

    def receive(self, message: MemberMessage, now_ms: float) -> list[CoordinatorMessage]:
        """Process a member's message.

        If it makes a rebalance due, that starts with the next `tick`, after all messages that have arrived.
        """
        self._reset_deadlines(now_ms)
        member = self._members.find(message.member, message.tenure)
        if message.epoch > self.epoch:
            is_of_group = isinstance(message, Register) or member is not None
            return self._hear_of_successor(message.epoch) if is_of_group else []
        if isinstance(message, Register):
            return self._register(message, now_ms)
        if member is None:
            is_replaced = self._members.is_replaced(message.tenure)
            refusal: Refusal = "duplicate_id" if is_replaced else "unknown_member"
            return [self._answer(message, refusal)] if isinstance(message, Pong) else []
        if isinstance(message, Leave):
            self._remove([message.member], GroupEventKind.LEFT, now_ms)
            return []
        if message.epoch != self.epoch:
            return []
        match message:
            case Pong():
                if self._liveness.answer(member, message.round):
                    self._members.record_positions(member, message)
                return []
            case Stopped():
                return self._stopped(message, now_ms)
            case Started():
                self._started(message, member)
                return []

    def update_topics(self, topics: Mapping[str, int], now_ms: float) -> list[CoordinatorMessage]:
        """Set the number of partitions of each existing topic."""
        self._reset_deadlines(now_ms)
        if self._workload.update_topics(topics):
            self._rebalance.request()
        return self._advance(now_ms)

    def update_weights(self, topics: Collection[str], weights: Mapping[DataPartitionId, float] | None) -> None:
        """Set the weights of the partitions of these topics, such as their lag; None if they could not be looked up.

        They apply from the next rebalance on. If a rebalance would balance the loads much better, it is requested now.
        """
        self._workload.update_weights(self._members, topics, weights)
        if not self._rebalance.is_under_way and self._members.by_name:
            self._rebalance.request()

    def tick(self, now_ms: float) -> list[CoordinatorMessage]:
        """Process the time that has passed: remove dead members, send a ping and advance a rebalance if due."""
        self._reset_deadlines(now_ms)
        self._remove_dead(now_ms)
        is_ping_due = not self.is_empty and now_ms >= self._liveness.next_ping_ms
        return [*([self._ping(now_ms)] if is_ping_due else []), *self._advance(now_ms)]

    # Members

    def _hear_of_successor(self, epoch: int) -> list[CoordinatorMessage]:
        if self._is_later_epoch(epoch):
            self._report(GroupEventKind.SUPERSEDED)
        return []

    def _register(self, message: Register, now_ms: float) -> list[CoordinatorMessage]:
        refusal = self._refusal(message)
        if refusal is None:
            self._admit(message, now_ms)
        return [self._answer(message, refusal)]

    def _refusal(self, message: Register) -> Refusal | None:
        if message.session_timeout_ms < self._rules.min_session_ms:
            return "session_timeout_too_short"
        if message.session_timeout_ms > LONGEST_SESSION_MS:
            return "session_timeout_too_long"
        if message.pattern is not None and (len(message.pattern) > LONGEST_PATTERN or not _IS_PATTERN(message.pattern)):
            return "bad_pattern"
        return "duplicate_id" if self._members.is_name_taken(message) else None

    def _admit(self, message: Register, now_ms: float) -> None:
        recorded = self._recovery.returned(message.member)
        if not self._members.by_name:
            self._recovery.wait_for_others(message.session_timeout_ms, now_ms)
        before = self._members.by_name.get(message.member)
        is_unchanged = self._members.admit(message, recorded)
        if before is None or not before.has_same_interests(message):
            self._workload.reweigh()
        if before is None:
            self._report(GroupEventKind.JOINED, message.member)
        has_nothing = not self._members.by_name[message.member].places
        if before is None and has_nothing and self._rebalance.is_under_way:
            self._rebalance.gather(now_ms)
        elif not is_unchanged:
            self._rebalance.interrupt(now_ms)

    def _remove_dead(self, now_ms: float) -> None:
        members = self._members.by_name
        dead = self._liveness.dead(members, now_ms)
        if len(dead) == len(members) > 1:
            # Probably this coordinator receives nothing, so let members that come back keep their partitions.
            longest_ms = max(member.session_ms for member in members.values())
            self._recovery.expect(self.shares(), now_ms + longest_ms)
        if dead:
            self._remove(dead, GroupEventKind.FAILED, now_ms)

    def _remove(self, names: Iterable[str], kind: GroupEventKind, now_ms: float) -> None:
        for name in names:
            self._members.remove(name)
            self._report(kind, name)
        self._rebalance.interrupt(now_ms)

    def _ping(self, now_ms: float) -> Ping:
        number, retry = self._liveness.ping(self._members.by_name.values(), now_ms)
        return Ping(group=self.group, member=ALL, epoch=self.epoch, round=number, retry=retry)

    def _reset_deadlines(self, now_ms: float) -> None:
        """Extend all deadlines if this process did not run for a while."""
        away_ms, self._called_ms = now_ms - self._called_ms, now_ms
        if away_ms > _ABSENT_MS:
            self._liveness.excuse(self._members.by_name.values(), away_ms)
            self._recovery.excuse(away_ms)
            self._rebalance.deadlines.extend(away_ms)

    # Rebalance

    def _advance(self, now_ms: float) -> list[CoordinatorMessage]:
        """Take the next step of a rebalance, if one is due."""
        if self._rebalance.is_under_way:
            late = self._rebalance.deadlines.late(now_ms)
            if not late:
                return []
            is_given_up = self._rebalance.time_out(now_ms)
            self._report(GroupEventKind.REBALANCE_GIVEN_UP if is_given_up else GroupEventKind.REBALANCE_RETRIED, *late)
            if self._rebalance.is_under_way:
                return self._send_free_shares(now_ms)
        if not self._workload.is_known or not self._rebalance.may_begin(now_ms) or self._recovery.is_pending(now_ms):
            return []
        return self._begin(now_ms)

    def _begin(self, now_ms: float) -> list[CoordinatorMessage]:
        """Plan a rebalance, and request the members that lose partitions to stop them."""
        self._rebalance.gathered()
        for name in self._recovery.end():
            self._report(GroupEventKind.FAILED, name)
        plan = self._plan()
        if not plan.changed:
            self._rebalance.settle()
            return []
        self.generation += 1
        lost = {
            name: lost for name, member in self._members.by_name.items() if (lost := member.places - plan.shares[name])
        }
        self._rebalance.plan = plan
        if not lost:
            self._rebalance.start()
            return self._send_shares(now_ms)
        self._rebalance.stop(self._deadlines(lost, now_ms))
        return [self._stop(name, places) for name, places in lost.items()]

    def _plan(self) -> Plan:
        shares, before = self._workload.assign(self._members), self._members.owners
        after = {place: name for name, places in shares.items() for place in places}
        members = self._members.by_name.items()
        changed = {name for name, member in members if member.places != shares[name] or not member.is_confirmed}
        return Plan(shares, count_moves(before, after), frozenset(changed))

    def _stopped(self, message: Stopped, now_ms: float) -> list[CoordinatorMessage]:
        rebalance, name = self._rebalance, message.member
        if message.generation != self.generation:
            return []
        if not rebalance.is_under_way:
            rebalance.end_pause(now_ms)
        if not rebalance.is_stopping or name not in rebalance.deadlines.awaited:
            return []
        rebalance.deadlines.answer(name)
        self._members.assign(name, self._members.by_name[name].places & rebalance.plan.shares[name])
        if rebalance.deadlines.awaited:
            return []
        rebalance.start()
        return self._send_shares(now_ms)

    def _send_free_shares(self, now_ms: float) -> list[CoordinatorMessage]:
        """Leave partitions that were not stopped in time with their members, and send the other members the rest."""
        plan, members = self._rebalance.plan, self._members.by_name
        stopping = frozenset(self._rebalance.deadlines.awaited)
        kept = {name: members[name].places - plan.shares[name] for name in stopping}
        occupied = frozenset[DataPartitionId]().union(*kept.values())
        shares = {name: kept.get(name, frozenset()) | (places - occupied) for name, places in plan.shares.items()}
        self._rebalance.plan = Plan(shares, plan.moved - len(occupied), plan.changed - stopping)
        return self._send_shares(now_ms)

    def _send_shares(self, now_ms: float) -> list[CoordinatorMessage]:
        plan = self._rebalance.plan
        for name in plan.changed:
            member, share = self._members.by_name[name], plan.shares[name]
            member.gained = share - member.places or member.gained & share
            member.is_confirmed = False
            self._members.assign(name, share)
        self._rebalance.deadlines = self._deadlines(plan.changed, now_ms)
        self._finish_if_started()
        return [self._start(name) for name in sorted(plan.changed)]

    def _started(self, message: Started, member: Member) -> None:
        deadlines = self._rebalance.deadlines
        if message.generation != self.generation or message.member not in deadlines.awaited:
            return
        if self._rebalance.is_starting:
            deadlines.answer(message.member)
            member.is_confirmed = True
            self._finish_if_started()

    def _finish_if_started(self) -> None:
        if not self._rebalance.deadlines.awaited:
            if self._rebalance.plan.moved:
                self.events.append(GroupEvent(GroupEventKind.REBALANCED, moved=self._rebalance.plan.moved))
            self._rebalance.finish()

    def _deadlines(self, names: Iterable[str], now_ms: float) -> Deadlines:
        """Wait for the answers of members for 2/3 of their session timeouts."""
        return Deadlines({name: now_ms + self._members.by_name[name].session_ms * 2 / 3 for name in names})

    # Messages and events

    def _stop(self, name: str, places: Iterable[DataPartitionId]) -> StopFetcher:
        self._members.by_name[name].is_confirmed = False
        return StopFetcher(**self._addressed(name), places=by_topic(places))

    def _start(self, name: str) -> StartFetcher:
        member = self._members.by_name[name]
        return StartFetcher(
            **self._addressed(name),
            places=by_topic(member.places),
            session_timeout_ms=member.session_ms,
            gained=by_topic(member.gained),
        )

    def _addressed(self, name: str) -> dict[str, Any]:
        tenure = self._members.by_name[name].tenure
        return {
            "group": self.group,
            "member": name,
            "epoch": self.epoch,
            "tenure": tenure,
            "generation": self.generation,
        }

    def _answer(self, message: Register | Pong, error: Refusal | None) -> Registered:
        return Registered(group=self.group, member=message.member, epoch=self.epoch, tenure=message.tenure, error=error)

    def _report(self, kind: GroupEventKind, *members: str) -> None:
        self.events.append(GroupEvent(kind, members))
