"""A member's side of the coordinator's protocol: what it answers, and when it stops by itself. Pure, as `group`.

It keeps no promise of safety: before it works on a partition a member claims it in the coordination log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from marshal_dagster.coordinator.assignment import Place
from marshal_dagster.coordinator.messages import (
    Leave,
    Order,
    Ping,
    Pong,
    Register,
    Registered,
    Started,
    StartFetcher,
    StopFetcher,
    Stopped,
    Word,
    by_topic,
    places_of,
)

Offsets = Mapping[Place, int]


class Standing(Enum):
    """How a member stands with its coordinator."""

    LOOKING = "looking for the coordinator"
    REGISTERED = "registered"
    REFUSED = "refused"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Told:
    """What comes of an order or of time: words to send, and partitions to stop working on and to begin with.

    Once it has stopped with those of `stop`, the member says so by `Membership.stopped`.
    """

    words: tuple[Word, ...] = ()
    stop: frozenset[Place] = frozenset()
    start: frozenset[Place] = frozenset()


@dataclass(slots=True)
class Membership:
    """One member of a group; for one thread. `registration` says who it is and what it wants."""

    registration: Register
    now_ms: float
    standing: Standing = Standing.LOOKING
    error: str | None = None
    """Why it was refused."""
    places: frozenset[Place] = frozenset()
    """What it is to work on."""
    _epoch: int = 0
    _heard_ms: float = field(init=False)
    _next_call_ms: float = field(init=False)
    _stopping: frozenset[Place] = frozenset()
    """What it has yet to stop with."""
    _generation: int = 0
    """Of the newest order of this coordinator; what is of an older one has been overtaken."""
    _awaited: dict[int, frozenset[Place]] = field(default_factory=dict)
    """Of that, what a coordinator waits for, by the generation that wants it."""
    _last_round: int | None = None
    """The first ping that it has answered since it wants to leave."""

    def __post_init__(self) -> None:
        """Begin to look for the coordinator."""
        self._heard_ms = self._next_call_ms = self.now_ms

    @property
    def session_ms(self) -> int:
        """After so long without a word from the coordinator it stops."""
        return self.registration.session_timeout_ms

    def _is_gone(self) -> bool:
        return self.standing is Standing.GONE

    def silent_ms(self, now_ms: float) -> float:
        """Give for how long no coordinator has been heard."""
        return now_ms - self._heard_ms

    def hear(self, order: Order, now_ms: float, offsets: Offsets | None = None) -> Told:
        """Take an order; `offsets` are where it stands, for members that commit by themselves."""
        if order.group != self.registration.group or order.epoch < self._epoch or self._is_gone():
            return Told()
        late = self._end_if_silent(now_ms)
        if self._is_gone():
            return Told(stop=late)
        if order.epoch > self._epoch:
            self._follow(order.epoch)
        if not isinstance(order, Ping) and not self._is_me(order):
            return Told(stop=late)
        self._heard_ms = now_ms
        told = self._obey(order, now_ms, offsets)
        return Told(told.words, told.stop | late, told.start)

    def tick(self, now_ms: float) -> Told:
        """Let time pass: look for the coordinator; stop all if it has been silent for a session time-out."""
        stop = self._end_if_silent(now_ms)
        is_asking = self.standing is Standing.LOOKING or (
            self.standing is Standing.REFUSED and self.error == "duplicate_id"
        )
        if not is_asking or now_ms < self._next_call_ms:
            return Told(stop=stop)
        return Told((self._call(now_ms),), stop=stop)

    def stopped(self, places: frozenset[Place]) -> Told:
        """Say that it has stopped with these partitions, and committed how far it got."""
        self._stopping -= places
        done = [generation for generation, awaited in self._awaited.items() if not awaited & self._stopping]
        for generation in done:
            del self._awaited[generation]
        return Told(tuple(Stopped(**self._signed(), generation=generation) for generation in done))

    def leave(self) -> Told:
        """Shut down: at once, or where it commits by itself once its last offsets have arrived."""
        if self.registration.auto_commit and self.standing is Standing.REGISTERED:
            self.standing = Standing.LEAVING
            return Told()
        return self._go()

    def _end_if_silent(self, now_ms: float) -> frozenset[Place]:
        """Give all up when no coordinator has been heard for a session time-out, and follow any from then on."""
        if self.standing in {Standing.GONE, Standing.REFUSED} or self.silent_ms(now_ms) < self.session_ms:
            return frozenset()
        self._awaited, self._epoch, self._generation = {}, 0, 0
        self.standing = Standing.GONE if self.standing is Standing.LEAVING else Standing.LOOKING
        return self._give_up(self.places)

    def _follow(self, epoch: int) -> None:
        """Take a coordinator's word from now on; what the one before waits for, it does not."""
        self._awaited, self._epoch, self._generation = {}, epoch, 0
        if self.standing is Standing.REGISTERED:
            self.standing = Standing.LOOKING

    def _obey(self, order: Order, now_ms: float, offsets: Offsets | None) -> Told:
        match order:
            case Ping():
                return self._ping(order, now_ms, offsets)
            case Registered():
                return self._registered(order, now_ms)
        if order.generation < self._generation:
            return Told()
        self._generation = order.generation
        return self._stop(order) if isinstance(order, StopFetcher) else self._start(order)

    def _ping(self, order: Ping, now_ms: float, offsets: Offsets | None) -> Told:
        if self.standing is Standing.LOOKING:
            return Told((self._call(now_ms),))
        if self.standing is Standing.REFUSED:
            return Told()
        if self.standing is Standing.LEAVING:
            if self._last_round is not None and order.round > self._last_round:
                return self._go()
            self._last_round = order.round
        told = _by_topic(offsets or {}) if self.registration.auto_commit else None
        return Told((Pong(**self._signed(), round=order.round, offsets=told),))

    def _go(self) -> Told:
        self.standing = Standing.GONE
        return Told((Leave(**self._signed()),), stop=self._give_up(self.places))

    def _registered(self, order: Registered, now_ms: float) -> Told:
        if order.error is not None and self.standing is Standing.LEAVING:
            return self._go()
        if order.error == "unknown_member":
            self.standing = Standing.LOOKING
            return Told((self._call(now_ms),))
        if order.error is not None:
            self.standing, self.error = Standing.REFUSED, order.error
            return Told(stop=self._give_up(self.places))
        was_refused, self.error = self.standing is Standing.REFUSED, None
        if self.standing is not Standing.LEAVING:
            self.standing = Standing.REGISTERED
        return Told((self._call(now_ms),)) if was_refused else Told()

    def _stop(self, order: StopFetcher) -> Told:
        wanted = places_of(order.places)
        stop = self._give_up(wanted & self.places)
        if not wanted & self._stopping:
            return Told((Stopped(**self._signed(), generation=order.generation),))
        self._awaited = {order.generation: wanted}
        return Told(stop=stop)

    def _start(self, order: StartFetcher) -> Told:
        wanted = places_of(order.places)
        stop, start = self._give_up(self.places - wanted), wanted - self.places
        self.places = wanted
        self._stopping -= wanted
        return Told((Started(**self._signed(), generation=order.generation),), stop=stop, start=start)

    def _give_up(self, places: frozenset[Place]) -> frozenset[Place]:
        """Begin to stop with partitions that it works on, and give them."""
        self.places -= places
        self._stopping |= places
        return places

    def _call(self, now_ms: float) -> Register:
        """Register; one that was refused, as another has its name, takes it only once nobody does."""
        self._next_call_ms = now_ms + self.session_ms / 3
        says = {"epoch": self._epoch, "holds": by_topic(self.places)}
        if self.standing is Standing.REFUSED:
            says["is_static"] = False
        return self.registration.model_copy(update=says)

    def _is_me(self, order: Registered | StopFetcher | StartFetcher) -> bool:
        return (order.member, order.tenure) == (self.registration.member, self.registration.tenure)

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
