"""The states of a group's rebalance, with deadlines and pauses. Pure: no clock, no Kafka.

A rebalance has two phases. First, the members that lose partitions stop them. Then all members whose share has changed
start with their new shares. `group` drives it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.state_machine import StateMachine, Transitions

_LONG_PAUSE: Final = 30
"""The pause after the last retry, as a multiple of the usual pause."""
_MAX_GATHER: Final = 10
"""The longest wait for more members to join or leave, as a multiple of the usual wait."""


class RebalanceState(Enum):
    """The state of a group between two stable assignments."""

    STABLE = "no rebalance is under way or due"
    DUE = "a rebalance is due"
    STOPPING = "members stop the partitions that they lose"
    STOPPING_DUE = "members stop the partitions that they lose, and another rebalance is due"
    STARTING = "members start with their shares"
    STARTING_DUE = "members start with their shares, and another rebalance is due"
    STARTING_PARTLY = "members start without the partitions that were not stopped in time; another rebalance is due"


class RebalanceEvent(Enum):
    """An event that changes the state of a rebalance."""

    CHANGE = "members, topics or weights have changed; a rebalance under way continues"
    INTERRUPTION = "a rebalance under way ends: a member is gone, or has other partitions than expected"
    BALANCED = "no share has to change"
    STOP_SENT = "members were asked to stop partitions"
    ALL_STOPPED = "no member has anything left to stop"
    STOP_TIMED_OUT = "a member has not stopped in time"
    ALL_STARTED = "every member has started"
    START_TIMED_OUT = "a member has not started in time"


_S, _E = RebalanceState, RebalanceEvent
TRANSITIONS: Final[Transitions[RebalanceState, RebalanceEvent]] = MappingProxyType(
    {
        _S.STABLE: {_E.CHANGE: _S.DUE, _E.INTERRUPTION: _S.DUE},
        _S.DUE: {
            _E.CHANGE: _S.DUE,
            _E.INTERRUPTION: _S.DUE,
            _E.BALANCED: _S.STABLE,
            _E.STOP_SENT: _S.STOPPING,
            _E.ALL_STOPPED: _S.STARTING,
        },
        _S.STOPPING: {
            _E.CHANGE: _S.STOPPING_DUE,
            _E.INTERRUPTION: _S.DUE,
            _E.ALL_STOPPED: _S.STARTING,
            _E.STOP_TIMED_OUT: _S.STARTING_PARTLY,
        },
        _S.STOPPING_DUE: {
            _E.CHANGE: _S.STOPPING_DUE,
            _E.INTERRUPTION: _S.DUE,
            _E.ALL_STOPPED: _S.STARTING_DUE,
            _E.STOP_TIMED_OUT: _S.STARTING_PARTLY,
        },
        _S.STARTING: {
            _E.CHANGE: _S.STARTING_DUE,
            _E.INTERRUPTION: _S.DUE,
            _E.ALL_STARTED: _S.STABLE,
            _E.START_TIMED_OUT: _S.DUE,
        },
        _S.STARTING_DUE: {
            _E.CHANGE: _S.STARTING_DUE,
            _E.INTERRUPTION: _S.DUE,
            _E.ALL_STARTED: _S.DUE,
            _E.START_TIMED_OUT: _S.DUE,
        },
        _S.STARTING_PARTLY: {
            _E.CHANGE: _S.STARTING_PARTLY,
            _E.INTERRUPTION: _S.DUE,
            _E.ALL_STARTED: _S.DUE,
            _E.START_TIMED_OUT: _S.DUE,
        },
    }
)
_IDLE: Final = frozenset({_S.STABLE, _S.DUE})
_STOPPING: Final = frozenset({_S.STOPPING, _S.STOPPING_DUE})


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned result of a rebalance."""

    shares: Mapping[str, frozenset[DataPartitionId]]
    """The partitions of each member."""
    moved: int
    """The number of partitions that get another member."""
    changed: frozenset[str]
    """The members whose share is sent: it has changed, or the member has not confirmed it."""


class Deadlines:
    """The deadlines of members' answers, in milliseconds."""

    def __init__(self, at_ms: Mapping[str, float]) -> None:
        """Expect one answer from each of these members by its deadline."""
        self._at_ms = dict(at_ms)
        self._first_ms = min(self._at_ms.values(), default=math.inf)
        """A lower bound of all deadlines."""

    @property
    def awaited(self) -> Collection[str]:
        """The members that have not answered."""
        return self._at_ms.keys()

    def answer(self, member: str) -> None:
        """Record that a member has answered."""
        self._at_ms.pop(member, None)

    def extend(self, more_ms: float) -> None:
        """Extend all deadlines by `more_ms`."""
        self._at_ms = {member: at_ms + more_ms for member, at_ms in self._at_ms.items()}
        self._first_ms += more_ms

    def late(self, now_ms: float) -> list[str]:
        """Return the members that have missed their deadlines."""
        if now_ms < self._first_ms:
            return []
        self._first_ms = min(self._at_ms.values(), default=math.inf)
        return sorted(member for member, at_ms in self._at_ms.items() if now_ms >= at_ms)


class Rebalance:
    """The rebalances of one group, at most one at a time. Times are in milliseconds."""

    def __init__(self, gather_ms: float, backoff_ms: float, max_retries: int, now_ms: float) -> None:
        """Start in the stable state. The options are those of `GroupRules`."""
        self._gather_ms, self._backoff_ms, self._max_retries = gather_ms, backoff_ms, max_retries
        self._machine = StateMachine(TRANSITIONS, RebalanceState.STABLE)
        self.plan = Plan({}, 0, frozenset())
        """The plan of the rebalance under way, or of the last one."""
        self.deadlines = Deadlines({})
        self._gathers_from_ms: float | None = None
        self._gathers_until_ms = self._pauses_until_ms = now_ms
        self._retries = 0

    @property
    def is_under_way(self) -> bool:
        """Whether members are stopping or starting."""
        return self._machine.state not in _IDLE

    @property
    def is_stopping(self) -> bool:
        """Whether members are stopping."""
        return self._machine.state in _STOPPING

    @property
    def is_starting(self) -> bool:
        """Whether members are starting."""
        return self.is_under_way and not self.is_stopping

    def may_begin(self, now_ms: float) -> bool:
        """Return whether a rebalance is due, and both the pause and the wait for more members are over."""
        is_due = self._machine.state is RebalanceState.DUE
        return is_due and now_ms >= max(self._pauses_until_ms, self._gathers_until_ms)

    def request(self) -> None:
        """Request another rebalance; the one under way continues."""
        self._machine.apply(RebalanceEvent.CHANGE)

    def gather(self, now_ms: float) -> None:
        """Request another rebalance, after a short wait for more members to join or leave."""
        self.request()
        self._retries = 0
        if self._gathers_from_ms is None:
            self._gathers_from_ms = now_ms
        longest_ms = _MAX_GATHER * self._gather_ms
        self._gathers_until_ms = min(now_ms + self._gather_ms, self._gathers_from_ms + longest_ms)

    def interrupt(self, now_ms: float) -> None:
        """End the rebalance under way, and request another one without a pause."""
        self._machine.apply(RebalanceEvent.INTERRUPTION)
        self.end_pause(now_ms)
        self.gather(now_ms)

    def end_pause(self, now_ms: float) -> None:
        """Allow the next rebalance without a pause."""
        self._pauses_until_ms = now_ms

    def gathered(self) -> None:
        """End the wait for more members; members that join or leave later start a new wait."""
        self._gathers_from_ms = None

    def settle(self) -> None:
        """Return to the stable state, because every member already has its share."""
        self._machine.apply(RebalanceEvent.BALANCED)
        self._retries = 0

    def stop(self, deadlines: Deadlines) -> None:
        """Start a rebalance, and wait for the members that were asked to stop partitions."""
        self._machine.apply(RebalanceEvent.STOP_SENT)
        self.deadlines = deadlines

    def start(self) -> None:
        """Start the second phase, because no member has anything left to stop."""
        self._machine.apply(RebalanceEvent.ALL_STOPPED)

    def time_out(self, now_ms: float) -> bool:
        """End the wait for late members, and pause before the next rebalance.

        If members were late to stop, the other members start nevertheless. Returns whether the pause is long because
        the retries are used up.
        """
        self._machine.apply(RebalanceEvent.STOP_TIMED_OUT if self.is_stopping else RebalanceEvent.START_TIMED_OUT)
        self._retries += 1
        is_given_up = self._retries > self._max_retries
        if is_given_up:
            self._retries = 0
        self._pauses_until_ms = now_ms + (_LONG_PAUSE if is_given_up else 1) * self._backoff_ms
        return is_given_up

    def finish(self) -> None:
        """End the rebalance, because every member has started."""
        if self._machine.state is not RebalanceState.STARTING_PARTLY:
            self._retries = 0
        self._machine.apply(RebalanceEvent.ALL_STARTED)
