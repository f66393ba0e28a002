"""The states of a group's rebalance, who has yet to answer, and when the next one may begin. Pure: no clock, no Kafka.

Those members stop first that give partitions up; then every member starts whose share has changed.
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
"""How many times the usual pause follows when the retries are used up."""
_MAX_GATHER: Final = 10
"""How many times the usual while a rebalance waits at most for more members to come or go."""


class RebalanceState(Enum):
    """Where a group is between two stable assignments."""

    STABLE = "no rebalance is under way or due"
    DUE = "a rebalance is due"
    STOPPING = "members stop what they give up"
    STOPPING_DUE = "members stop what they give up, and another rebalance is due"
    STARTING = "members start with their shares"
    STARTING_DUE = "members start with their shares, and another rebalance is due"
    STARTING_PARTLY = "members start without the partitions that were not stopped in time; another rebalance is due"


class RebalanceEvent(Enum):
    """What changes the state of a rebalance."""

    CHANGE = "members, topics or weights have changed; a rebalance under way is still of use"
    INTERRUPTION = "a rebalance under way is of no more use: a member has gone, or has other partitions than expected"
    BALANCED = "no share has to change"
    STOP_SENT = "members were asked to stop"
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
    """What a rebalance leads to: the share of each member."""

    shares: Mapping[str, frozenset[DataPartitionId]]
    moved: int
    """How many partitions change hands."""
    changed: frozenset[str]
    """The members that are sent their share: it has changed, or they have not confirmed it."""


class Deadlines:
    """Until when each member may answer; milliseconds."""

    def __init__(self, at_ms: Mapping[str, float]) -> None:
        """Expect one answer from each of these members."""
        self._at_ms = dict(at_ms)
        self._first_ms = min(self._at_ms.values(), default=math.inf)
        """No deadline is earlier."""

    @property
    def awaited(self) -> Collection[str]:
        """The members that have not answered."""
        return self._at_ms.keys()

    def answer(self, member: str) -> None:
        """Note that a member has answered."""
        self._at_ms.pop(member, None)

    def extend(self, more_ms: float) -> None:
        """Move all deadlines by this time."""
        self._at_ms = {member: at_ms + more_ms for member, at_ms in self._at_ms.items()}
        self._first_ms += more_ms

    def late(self, now_ms: float) -> list[str]:
        """Return the members that have not answered in time."""
        if now_ms < self._first_ms:
            return []
        self._first_ms = min(self._at_ms.values(), default=math.inf)
        return sorted(member for member, at_ms in self._at_ms.items() if now_ms >= at_ms)


class Rebalance:
    """The rebalances of one group, of which at most one is under way.

    `gather_ms`, `backoff_ms` and `max_retries` are those of `Rules`.
    """

    def __init__(self, gather_ms: float, backoff_ms: float, max_retries: int, now_ms: float) -> None:
        """Begin stable."""
        self._gather_ms, self._backoff_ms, self._max_retries = gather_ms, backoff_ms, max_retries
        self._machine = StateMachine(TRANSITIONS, RebalanceState.STABLE)
        self.plan = Plan({}, 0, frozenset())
        """Of the rebalance under way, or the last one."""
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
        """Return whether a rebalance is due, and the pause and the wait for more members are over."""
        is_due = self._machine.state is RebalanceState.DUE
        return is_due and now_ms >= max(self._pauses_until_ms, self._gathers_until_ms)

    def request(self) -> None:
        """Request another rebalance; one that is under way continues."""
        self._machine.apply(RebalanceEvent.CHANGE)

    def gather(self, now_ms: float) -> None:
        """Request another rebalance, and wait a little for more members to come or go."""
        self.request()
        self._retries = 0
        if self._gathers_from_ms is None:
            self._gathers_from_ms = now_ms
        longest_ms = _MAX_GATHER * self._gather_ms
        self._gathers_until_ms = min(now_ms + self._gather_ms, self._gathers_from_ms + longest_ms)

    def interrupt(self, now_ms: float) -> None:
        """End a rebalance that is under way, and request another without a pause."""
        self._machine.apply(RebalanceEvent.INTERRUPTION)
        self.end_pause(now_ms)
        self.gather(now_ms)

    def end_pause(self, now_ms: float) -> None:
        """Let the next rebalance begin without a pause."""
        self._pauses_until_ms = now_ms

    def gathered(self) -> None:
        """End the wait for more members: those that come or go from now on begin a new one."""
        self._gathers_from_ms = None

    def settle(self) -> None:
        """Return to the stable state, because every member has its share already."""
        self._machine.apply(RebalanceEvent.BALANCED)
        self._retries = 0

    def stop(self, deadlines: Deadlines) -> None:
        """Begin a rebalance, and wait for the members that were asked to stop."""
        self._machine.apply(RebalanceEvent.STOP_SENT)
        self.deadlines = deadlines

    def start(self) -> None:
        """Begin to start members, because none has anything left to stop."""
        self._machine.apply(RebalanceEvent.ALL_STOPPED)

    def time_out(self, now_ms: float) -> bool:
        """End the wait for late members, and pause before the next rebalance.

        Return whether the pause is long, because the retries are used up. If members were late to stop, the others
        start all the same.
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
