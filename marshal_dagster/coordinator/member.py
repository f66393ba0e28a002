"""The member's side of the coordinator protocol: its answers, and when it stops by itself. Pure: no clock, no Kafka.

It gives no safety guarantee: a member must claim a partition in the coordination log before it processes it. `client`
runs it in a process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.messages import (
    CoordinatorMessage,
    Leave,
    MemberMessage,
    Ping,
    Pong,
    Register,
    Registered,
    Started,
    StartFetcher,
    StopFetcher,
    Stopped,
    by_topic,
    places_of,
)
from marshal_dagster.coordinator.state_machine import StateMachine, Transitions

Offsets = Mapping[DataPartitionId, int]


class MemberState(Enum):
    """The state of a member's registration with its coordinator."""

    LOOKING = "looking for the coordinator"
    REGISTERED = "registered"
    REFUSED = "refused"
    LEAVING = "leaving"
    GONE = "gone"


class MemberEvent(Enum):
    """An event that changes the state of a member."""

    SILENCE = "no message of a coordinator arrived for a session timeout"
    SUCCESSION = "another coordinator leads"
    ACCEPTED = "the coordinator has accepted the registration"
    REJECTED = "the coordinator has rejected the registration"
    FORGOTTEN = "the coordinator does not know the member"
    LAST_COMMIT = "the member leaves as soon as the coordinator has its last offsets"
    LEFT = "the member leaves"


_S, _E = MemberState, MemberEvent
TRANSITIONS: Final[Transitions[MemberState, MemberEvent]] = MappingProxyType(
    {
        _S.LOOKING: {
            _E.SILENCE: _S.LOOKING,
            _E.SUCCESSION: _S.LOOKING,
            _E.ACCEPTED: _S.REGISTERED,
            _E.REJECTED: _S.REFUSED,
            _E.FORGOTTEN: _S.LOOKING,
            _E.LEFT: _S.GONE,
        },
        _S.REGISTERED: {
            _E.SILENCE: _S.LOOKING,
            _E.SUCCESSION: _S.LOOKING,
            _E.ACCEPTED: _S.REGISTERED,
            _E.REJECTED: _S.REFUSED,
            _E.FORGOTTEN: _S.LOOKING,
            _E.LAST_COMMIT: _S.LEAVING,
            _E.LEFT: _S.GONE,
        },
        _S.REFUSED: {
            _E.SUCCESSION: _S.REFUSED,
            _E.ACCEPTED: _S.REGISTERED,
            _E.REJECTED: _S.REFUSED,
            _E.FORGOTTEN: _S.LOOKING,
            _E.LEFT: _S.GONE,
        },
        _S.LEAVING: {
            _E.SILENCE: _S.GONE,
            _E.SUCCESSION: _S.LEAVING,
            _E.ACCEPTED: _S.LEAVING,
            _E.LEFT: _S.GONE,
        },
        _S.GONE: {},
    }
)
_WITHOUT_COORDINATOR: Final = frozenset({_S.GONE, _S.REFUSED})


@dataclass(frozen=True, slots=True)
class MemberActions:
    """The actions that the member must carry out after a message, or as time passes."""

    messages: tuple[MemberMessage, ...] = ()
    """Messages to send to the coordinator."""
    stop: frozenset[DataPartitionId] = frozenset()
    """Partitions to stop processing. Call `Membership.stopped` once that is done."""
    start: frozenset[DataPartitionId] = frozenset()
    """Partitions to start processing."""


class Membership:
    """The membership of one process in a group. Not thread-safe. Times are in milliseconds."""

    def __init__(self, registration: Register, now_ms: float) -> None:
        """Start to look for the coordinator, with this registration."""
        self.registration = registration
        self.error: str | None = None
        """Why the coordinator refused the registration; None if it did not."""
        self.places: frozenset[DataPartitionId] = frozenset()
        """The partitions that are assigned to the member."""
        self._machine = StateMachine(TRANSITIONS, MemberState.LOOKING)
        self._last_contact_ms = self._next_call_ms = now_ms
        self._stopping: frozenset[DataPartitionId] = frozenset()
        """The partitions that the member has not stopped processing yet."""
        self._epoch = 0
        self._generation = 0
        """The generation of this coordinator's newest message. Messages of older generations are ignored."""
        self._awaited: dict[int, frozenset[DataPartitionId]] = {}
        """The partitions that the coordinator waits for the member to stop, by the generation of its request."""
        self._last_round: int | None = None
        """The number of the last ping that was answered while leaving; None if there was none."""

    @property
    def state(self) -> MemberState:
        """The state of the registration with the coordinator."""
        return self._machine.state

    @property
    def session_ms(self) -> int:
        """The session timeout in milliseconds: without a message of a coordinator for this long, the member stops."""
        return self.registration.session_timeout_ms

    def silent_ms(self, now_ms: float) -> float:
        """Return the time since the last message of a coordinator, in milliseconds."""
        return now_ms - self._last_contact_ms

    def receive(self, message: CoordinatorMessage, now_ms: float, offsets: Offsets | None = None) -> MemberActions:
        """Process a message of a coordinator.

        `offsets` are the next offsets of the member's partitions, which the answer to a ping reports if the
        registration has `auto_commit`.
        """
        if message.group != self.registration.group or message.epoch < self._epoch or self._is_gone():
            return MemberActions()
        late = self._end_if_silent(now_ms)
        if self._is_gone():
            return MemberActions(stop=late)
        if message.epoch > self._epoch:
            self._machine.apply(MemberEvent.SUCCESSION)
            self._follow(message.epoch)
        if not isinstance(message, Ping) and not self._is_me(message):
            return MemberActions(stop=late)
        self._last_contact_ms = now_ms
        actions = self._obey(message, now_ms, offsets)
        return MemberActions(actions.messages, actions.stop | late, actions.start)

    def tick(self, now_ms: float) -> MemberActions:
        """Register again if that is due; stop everything if the coordinator was silent for a session timeout."""
        stop = self._end_if_silent(now_ms)
        is_waiting_for_its_name = self.state is MemberState.REFUSED and self.error == "duplicate_id"
        is_calling = self.state is MemberState.LOOKING or is_waiting_for_its_name
        is_due = is_calling and now_ms >= self._next_call_ms
        return MemberActions((self._call(now_ms),) if is_due else (), stop=stop)

    def stopped(self, places: frozenset[DataPartitionId]) -> MemberActions:
        """Report that processing of these partitions has stopped and its offsets are committed."""
        self._stopping -= places
        done = [generation for generation, awaited in self._awaited.items() if not awaited & self._stopping]
        for generation in done:
            del self._awaited[generation]
        return MemberActions(tuple(Stopped(**self._signed(), generation=generation) for generation in done))

    def leave(self) -> MemberActions:
        """Leave the group: at once, or with `auto_commit` once the coordinator has the last offsets."""
        if self.registration.auto_commit and self.state is MemberState.REGISTERED:
            self._machine.apply(MemberEvent.LAST_COMMIT)
            return MemberActions()
        return self._go()

    def _is_gone(self) -> bool:
        return self.state is MemberState.GONE

    def _end_if_silent(self, now_ms: float) -> frozenset[DataPartitionId]:
        """Stop everything if no coordinator was heard for a session timeout; return the partitions to stop.

        After that, the member follows any coordinator.
        """
        if self.state in _WITHOUT_COORDINATOR or self.silent_ms(now_ms) < self.session_ms:
            return frozenset()
        self._machine.apply(MemberEvent.SILENCE)
        self._follow(0)
        return self._give_up(self.places)

    def _follow(self, epoch: int) -> None:
        """Follow the coordinator of this epoch, and drop the requests of the previous one."""
        self._awaited, self._epoch, self._generation = {}, epoch, 0

    def _obey(self, message: CoordinatorMessage, now_ms: float, offsets: Offsets | None) -> MemberActions:
        match message:
            case Ping():
                return self._ping(message, now_ms, offsets)
            case Registered():
                return self._registered(message, now_ms)
        if message.generation < self._generation:
            return MemberActions()
        self._generation = message.generation
        return self._stop(message) if isinstance(message, StopFetcher) else self._start(message)

    def _ping(self, message: Ping, now_ms: float, offsets: Offsets | None) -> MemberActions:
        if self.state is MemberState.LOOKING:
            return MemberActions((self._call(now_ms),))
        if self.state is MemberState.REFUSED:
            return MemberActions()
        if self.state is MemberState.LEAVING:
            if self._last_round is not None and message.round > self._last_round:
                return self._go()
            self._last_round = message.round
        reported = _by_topic(offsets or {}) if self.registration.auto_commit else None
        return MemberActions((Pong(**self._signed(), round=message.round, offsets=reported),))

    def _go(self) -> MemberActions:
        self._machine.apply(MemberEvent.LEFT)
        return MemberActions((Leave(**self._signed()),), stop=self._give_up(self.places))

    def _registered(self, message: Registered, now_ms: float) -> MemberActions:
        if message.error is not None and self.state is MemberState.LEAVING:
            return self._go()
        if message.error == "unknown_member":
            self._machine.apply(MemberEvent.FORGOTTEN)
            return MemberActions((self._call(now_ms),))
        if message.error is not None:
            self._machine.apply(MemberEvent.REJECTED)
            self.error = message.error
            return MemberActions(stop=self._give_up(self.places))
        was_refused, self.error = self.state is MemberState.REFUSED, None
        self._machine.apply(MemberEvent.ACCEPTED)
        return MemberActions((self._call(now_ms),) if was_refused else ())

    def _stop(self, message: StopFetcher) -> MemberActions:
        wanted = places_of(message.places)
        stop = self._give_up(wanted & self.places)
        if not wanted & self._stopping:
            return MemberActions((Stopped(**self._signed(), generation=message.generation),))
        self._awaited = {message.generation: wanted}
        return MemberActions(stop=stop)

    def _start(self, message: StartFetcher) -> MemberActions:
        wanted = places_of(message.places)
        stop, start = self._give_up(self.places - wanted), wanted - self.places
        self.places = wanted
        self._stopping -= wanted
        return MemberActions((Started(**self._signed(), generation=message.generation),), stop=stop, start=start)

    def _give_up(self, places: frozenset[DataPartitionId]) -> frozenset[DataPartitionId]:
        """Move partitions from those assigned to those being stopped, and return them."""
        self.places -= places
        self._stopping |= places
        return places

    def _call(self, now_ms: float) -> Register:
        """Return a registration to send.

        A member that was refused because another process has its name does not take the name over: it gets it only
        after that process is gone.
        """
        self._next_call_ms = now_ms + self.session_ms / 3
        fields = {"epoch": self._epoch, "holds": by_topic(self.places)}
        if self.state is MemberState.REFUSED:
            fields["is_static"] = False
        return self.registration.model_copy(update=fields)

    def _is_me(self, message: Registered | StopFetcher | StartFetcher) -> bool:
        return (message.member, message.tenure) == (self.registration.member, self.registration.tenure)

    def _signed(self) -> dict[str, Any]:
        return {
            "group": self.registration.group,
            "member": self.registration.member,
            "epoch": self._epoch,
            "tenure": self.registration.tenure,
        }


def _by_topic(offsets: Offsets) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for (topic, number), offset in offsets.items():
        found.setdefault(topic, {})[number] = offset
    return found
