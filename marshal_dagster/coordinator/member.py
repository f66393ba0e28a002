"""A member's side of the coordinator's protocol: what it answers, and when it stops by itself. Pure, as `group`.

It guarantees no safety: a member claims a partition in the coordination log before it works on it.
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
    """What a member is to its coordinator."""

    LOOKING = "looking for the coordinator"
    REGISTERED = "registered"
    REFUSED = "refused"
    LEAVING = "leaving"
    GONE = "gone"


class MemberEvent(Enum):
    """What changes the state of a member."""

    SILENCE = "no coordinator was heard for a session time-out"
    SUCCESSION = "another coordinator leads"
    ACCEPTED = "the coordinator has accepted the registration"
    REJECTED = "the coordinator has rejected the registration"
    FORGOTTEN = "the coordinator does not know the member"
    LAST_COMMIT = "it is to leave, once the coordinator has its last offsets"
    LEFT = "it leaves"


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
    """What follows from a message or from time: messages to send, and partitions to stop and to start working on.

    Once it has stopped with those of `stop`, the member reports so by `Membership.stopped`.
    """

    messages: tuple[MemberMessage, ...] = ()
    stop: frozenset[DataPartitionId] = frozenset()
    start: frozenset[DataPartitionId] = frozenset()


class Membership:
    """One member of a group; for one thread. `registration` is who it is and what it wants."""

    def __init__(self, registration: Register, now_ms: float) -> None:
        """Begin to look for the coordinator."""
        self.registration = registration
        self.error: str | None = None
        """Why it was refused."""
        self.places: frozenset[DataPartitionId] = frozenset()
        """What it is to work on."""
        self._machine = StateMachine(TRANSITIONS, MemberState.LOOKING)
        self._last_contact_ms = self._next_call_ms = now_ms
        self._stopping: frozenset[DataPartitionId] = frozenset()
        """What it has yet to stop with."""
        self._epoch = 0
        self._generation = 0
        """Of the newest message of this coordinator: older ones do not count."""
        self._awaited: dict[int, frozenset[DataPartitionId]] = {}
        """The partitions that the coordinator waits for, by the generation of its request."""
        self._last_round: int | None = None
        """The first ping that it has answered since it is leaving."""

    @property
    def state(self) -> MemberState:
        """What it is to its coordinator."""
        return self._machine.state

    @property
    def session_ms(self) -> int:
        """After so long without a message from the coordinator it stops."""
        return self.registration.session_timeout_ms

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long no coordinator has been heard."""
        return now_ms - self._last_contact_ms

    def receive(self, message: CoordinatorMessage, now_ms: float, offsets: Offsets | None = None) -> MemberActions:
        """Take a message; `offsets` are the member's positions, for members that commit by themselves."""
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
        """Let time pass: look for the coordinator; stop all if it has been silent for a session time-out."""
        stop = self._end_if_silent(now_ms)
        is_waiting_for_its_name = self.state is MemberState.REFUSED and self.error == "duplicate_id"
        is_calling = self.state is MemberState.LOOKING or is_waiting_for_its_name
        is_due = is_calling and now_ms >= self._next_call_ms
        return MemberActions((self._call(now_ms),) if is_due else (), stop=stop)

    def stopped(self, places: frozenset[DataPartitionId]) -> MemberActions:
        """Report that it has stopped with these partitions, and committed how far it got."""
        self._stopping -= places
        done = [generation for generation, awaited in self._awaited.items() if not awaited & self._stopping]
        for generation in done:
            del self._awaited[generation]
        return MemberActions(tuple(Stopped(**self._signed(), generation=generation) for generation in done))

    def leave(self) -> MemberActions:
        """Shut down: at once, or where it commits by itself once its last offsets have arrived."""
        if self.registration.auto_commit and self.state is MemberState.REGISTERED:
            self._machine.apply(MemberEvent.LAST_COMMIT)
            return MemberActions()
        return self._go()

    def _is_gone(self) -> bool:
        return self.state is MemberState.GONE

    def _end_if_silent(self, now_ms: float) -> frozenset[DataPartitionId]:
        """Give all up when no coordinator has been heard for a session time-out, and follow any from then on."""
        if self.state in _WITHOUT_COORDINATOR or self.silent_ms(now_ms) < self.session_ms:
            return frozenset()
        self._machine.apply(MemberEvent.SILENCE)
        self._follow(0)
        return self._give_up(self.places)

    def _follow(self, epoch: int) -> None:
        """Follow a coordinator from now on; requests of the one before are void."""
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
        """Begin to stop with partitions that it works on, and return them."""
        self.places -= places
        self._stopping |= places
        return places

    def _call(self, now_ms: float) -> Register:
        """Register; a member that was refused, because another has its name, takes it only once no other has it."""
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
