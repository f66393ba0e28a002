"""A model check of protocol.md, section 8: random walks of simple members over the library's rules.

Members follow section 8.4 one step at a time, in any interleaving. They crash, stop for a while and lose
acknowledgements, and their records arrive late or twice. Meanwhile operators pause, set positions, revoke, change the
settings and switch ranges off and on. After each record the walk checks the state, and compares it with what was
processed.

`python -m tests.range_model --walks 1000` runs walks; a violation names its seed.
"""

import argparse
import functools
import heapq
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingRange,
    DataTopic,
    DeliveryMode,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    PlanningRange,
    RangeDone,
    RangeHeartbeat,
    ReleaseGroup,
    ReleasingPartition,
    ReleasingRange,
    RevokingClaim,
    RevokingRange,
    RuleSet,
    render,
    type_name,
)
from marshal_dagster.protocol.range_set import MOST_RANGES
from marshal_dagster.protocol.state import Group, Key, Keys, Phase, Range, enables_ranges
from marshal_dagster.protocol.world import VerdictKind, World

HI_MS: Final = 10
LEASE_MS: Final = 2 * HI_MS - HI_MS // 10
DELIVERY_MS: Final = HI_MS // 4
FAR_S: Final = 10**9
TOPIC_IDS: Final = ("A" * 22, "B" * 22)
PLACE: Final = ("events", 0)
MODES: Final = tuple(DeliveryMode)

Steps = Generator[None, None, None]


class ViolationError(Exception):
    """A promise was broken."""


class CrashError(Exception):
    """A member is dead."""


@dataclass(slots=True)
class View:
    """The state that a certain reader has computed up to now."""

    key: Key
    group: Group
    log_time_ms: int

    def live_ranges(self, at_ms: int) -> list[Range]:
        """Return the ranges with an owner that is not stale at `at_ms`."""
        interval_ms = self.group.settings.heartbeat_interval_ms
        return [range_ for range_ in self.key.ranges if range_.is_live(at_ms, interval_ms)]

    def is_held(self, at_ms: int) -> bool:
        """Return whether any instance holds the key or a range of it."""
        return self.group.is_live(self.key, at_ms) or bool(self.live_ranges(at_ms))


@dataclass(slots=True)
class Belief:
    """What a member believes that it holds, and until when."""

    start: int
    end: int
    until_ms: int
    generation: int


@dataclass(slots=True)
class Truth:
    """What really happened in one generation; `done` has the offsets that are done but not passed yet."""

    done: set[int] = field(default_factory=set)
    processed: Counter[int] = field(default_factory=Counter)
    stored: set[tuple[int, int]] = field(default_factory=set)
    output: Counter[int] = field(default_factory=Counter)


class Walk:
    """One walk: a log, its writers, and the checks."""

    def __init__(self, seed: int) -> None:
        """Start with a group that has no record."""
        self.rng = Random(f"ranges:{seed}")
        self.mode = self.rng.choice(MODES)
        self.now_ms = 0
        self.end = self.rng.randrange(1, 30)
        self.world, self.older = (World(1, 60_000, RuleSet.NATIVE) for _ in range(2))
        for each in (self.world, self.older):
            each.start(0, 0)
        self.views: list[View] = []
        self.accepted: list[bool] = []
        self.late: list[tuple[int, int, Message]] = []
        self.truth: dict[int, Truth] = {}
        self.beliefs: dict[tuple[str, int], Belief] = {}
        self.excused: set[int] = set()
        self.instances = 0
        self.calm = False
        self.seen: Counter[str] = Counter()
        self.reported: list[str] = []
        self.ranges_on = GroupSettings(HI_MS, RuleSet.NATIVE, self.mode, ("ranges",))
        self.ranges_off = replace(self.ranges_on, features=())

    # The log

    def view(self) -> View:
        """Return the state after the present log."""
        return self.views[-1] if self.views else View(Key(), Group(GroupSettings()), 0)

    def look(self) -> View:
        """Return a copy of the state after the present log."""
        group = self.world.group_of("g", PLACE[0])
        return View(
            replace(group.keys.get(PLACE) or Key()),
            replace(group, keys=Keys()),
            self.world.partitions[0].log_time_ms or 0,
        )

    def append(self, message: Message) -> int:
        """Append a record to the log, and check its effect."""
        before, value, offset = self.view(), render(message), len(self.accepted)
        verdict = self.world.apply(0, offset, self.now_ms, value)
        older = b"Unheard" if b"Range" in value.split(b"/", 1)[0] else value
        self.older.apply(0, offset, self.now_ms, older)
        is_accepted = verdict.kind is VerdictKind.ACCEPTED
        self.accepted.append(is_accepted)
        self.views.append(self.look())
        self.seen[f"{type_name(message)} {verdict.kind}"] += 1
        self.reported.append(f"{offset} at {self.now_ms}: {value.decode()} {verdict.kind} {verdict.reason or ''}")
        if is_accepted:
            self.record(before, self.views[-1], message)
        self.check_state(self.views[-1])
        return offset

    def record(self, before: View, after: View, message: Message) -> None:
        """Record what was done, apart from the state, and check that the offset passes nothing else."""
        was, now = before.key, after.key
        truth = self.truth_of(was.generation)
        if isinstance(message, RangeDone):
            [found] = [
                range_ for range_ in was.ranges if range_.owner is not None and range_.owner.epoch == message.epoch
            ]
            truth.done |= set(range(found.start, found.end))
        if isinstance(message, Heartbeat) and was.offset is not None and was.plan_end == message.offset:
            truth.done |= set(range(was.offset, message.offset))
        if isinstance(message, ClaimingRange | PlanningRange) and before.group.is_paused(after.log_time_ms):
            raise ViolationError("new work in a paused group")
        if isinstance(message, RevokingClaim | RevokingRange):
            self.excused.add(message.epoch)
        for held in was.ranges:
            if held.owner is not None and held.owner not in [each.owner for each in now.ranges]:
                self.give_way(held.owner.epoch or 0, was.generation != now.generation)
        if now.generation == was.generation and was.offset is not None and now.offset != was.offset:
            if now.offset is None or now.offset < was.offset:
                raise ViolationError("the offset went back within a generation")
            self.check_ground(truth, was.offset, now.offset)
        if now.generation != was.generation and now.ranges:
            raise ViolationError("ranges outlived their generation")

    def give_way(self, epoch: int, is_new_generation: bool) -> None:
        """Excuse a member that works in the old generation, because an operator started the new one."""
        if is_new_generation:
            self.excused.add(epoch)

    def check_ground(self, truth: Truth, start: int, end: int) -> None:
        """Check that the offset may move from `start` to `end`."""
        ground = range(start, end)
        if not truth.done.issuperset(ground):
            raise ViolationError(f"the offset passed {sorted(set(ground) - truth.done)}, which is not done")
        if self.mode is DeliveryMode.AT_LEAST_ONCE and not all(truth.processed[each] for each in ground):
            raise ViolationError("at least once: the offset passed a message that no member processed")
        truth.done.difference_update(ground)
        if self.mode is DeliveryMode.EFFECTIVELY_ONCE and any(truth.output[each] != 1 for each in ground):
            raise ViolationError("effectively once: the output does not hold each message once")

    def check_state(self, view: View) -> None:
        """Check what must hold of any state."""
        key, at_ms = view.key, view.log_time_ms
        edges = [edge for each in key.ranges for edge in (each.start, each.end)]
        if edges != sorted(edges) or any(each.start >= each.end for each in key.ranges):
            raise ViolationError("ranges overlap, or are not in order")
        if key.ranges and (key.offset is None or key.offset > key.ranges[0].start or key.data_topic_id is None):
            raise ViolationError("a range below the offset, or of an unknown topic")
        if key.ranges and key.plan_end is not None:
            raise ViolationError("a plan for the whole key together with ranges")
        if view.group.is_live(key, at_ms) and view.live_ranges(at_ms):
            raise ViolationError("the whole key and ranges of it have live owners")
        if key.ranges and not enables_ranges(view.group.settings):
            raise ViolationError("ranges in a group that does not enable them")
        if len(key.ranges) > MOST_RANGES:
            raise ViolationError("too many ranges")
        for each in key.ranges:
            if each.phase is (Phase.CLAIMED if each.owner is None else Phase.DONE):
                raise ViolationError("a range without a phase")
        self.check_done(key)

    def check_done(self, key: Key) -> None:
        """Check that the done ranges are exactly what is done above the offset."""
        done = {each for one in key.ranges if one.phase is Phase.DONE for each in range(one.start, one.end)}
        if done != self.truth_of(key.generation).done:
            raise ViolationError("the done ranges differ from what was done")
        if any(
            one.end == other.start and one.phase is other.phase is Phase.DONE
            for one, other in zip(key.ranges, key.ranges[1:], strict=False)
        ):
            raise ViolationError("adjacent done ranges are not merged")

    def truth_of(self, generation: int) -> Truth:
        """Return what happened in a generation."""
        return self.truth.setdefault(generation, Truth())

    # Effects of members outside of the log

    def process(self, generation: int, start: int, end: int) -> None:
        """Process all messages of a range, as the mode requires."""
        truth = self.truth_of(generation)
        self.seen["processed"] += 1
        if self.mode is DeliveryMode.EFFECTIVELY_ONCE:
            if (start, end) in truth.stored:
                self.seen["stored before"] += 1
                return
            if any(truth.output[each] for each in range(start, end)):
                raise ViolationError(f"effectively once: the output holds a part of [{start}, {end})")
            truth.stored.add((start, end))
            truth.output.update(range(start, end))
        truth.processed.update(range(start, end))
        if self.mode is DeliveryMode.AT_MOST_ONCE and any(truth.processed[each] > 1 for each in range(start, end)):
            raise ViolationError(f"at most once: [{start}, {end}) processed twice in generation {generation}")

    def believe(self, instance: str, epoch: int, belief: Belief | None) -> None:
        """Record that a member believes in a lease or no longer does; no two may believe in the same offsets."""
        if belief is None:
            self.beliefs.pop((instance, epoch), None)
            return
        self.beliefs[instance, epoch] = belief
        for (_, other_epoch), other in self.beliefs.items():
            if other_epoch == epoch or {epoch, other_epoch} & self.excused or other.generation != belief.generation:
                continue
            both = other.until_ms > self.now_ms < belief.until_ms
            if both and other.start < belief.end and belief.start < other.end:
                raise ViolationError(f"two leases at once on [{belief.start}, {belief.end})")

    # Sending

    def new_instance(self) -> str:
        """Return an id that no instance has had."""
        self.instances += 1
        return f"i{self.instances}"

    def send(self, kind: type[Message], instance: str, **content: object) -> int | None:
        """Send a record; return its log offset if acknowledged. It may be lost, late or doubled, or kill the sender."""
        where = (
            {} if issubclass(kind, ReleaseGroup | GroupSettingsRecord) else {"topic": PLACE[0], "partition": PLACE[1]}
        )
        said: dict[str, Any] = {**where, **content}
        message = kind(instance=instance, client="c", group="g", time_s=0, **said)
        chance = 1.0 if self.calm else self.rng.random()
        if chance < 0.02:
            raise CrashError
        if chance < 0.05:
            return None
        if chance < 0.10:
            heapq.heappush(self.late, (self.now_ms + self.rng.randrange(5 * HI_MS), self.rng.randrange(10**9), message))
            return None
        offset = self.append(message)
        if chance < 0.12:
            raise CrashError
        if chance < 0.15:
            return None
        if chance < 0.18:
            heapq.heappush(self.late, (self.now_ms + self.rng.randrange(5 * HI_MS), self.rng.randrange(10**9), message))
        return offset

    # The walk

    def walk(self, steps: int) -> None:
        """Let actors act in any order for so many steps, then let one finish the rest."""
        actors: list[Steps] = []
        kinds: Sequence[Callable[[Walk], Steps]] = (
            *(member,) * 30,
            whole_member,
            *(revoker,) * 3,
            *(stranger,) * 6,
            position_setter,
            settler,
        )
        for _ in range(steps):
            self.pass_time()
            if len(actors) < 4 or (len(actors) < 7 and self.rng.random() < 0.03):
                actors.append(self.rng.choice(kinds)(self))
            actor = self.rng.choice(actors[: self.rng.randrange(1, len(actors) + 1)])  # some stop for a long time
            if not self.alive(actor):
                actors.remove(actor)
            if self.rng.random() < 0.002 and actor in actors:
                actors.remove(actor)
        self.drain()

    def pass_time(self) -> None:
        """Let time pass, let messages arrive and let late records reach the log."""
        roll = self.rng.random()
        self.now_ms += 0 if roll < 0.5 else 1 if roll < 0.93 else self.rng.choice((HI_MS, 2 * HI_MS, 2 * HI_MS + 1))
        if self.rng.random() < 0.05:
            self.end += self.rng.randrange(1, 12)
        while self.late and self.late[0][0] <= self.now_ms:
            self.append(heapq.heappop(self.late)[2])

    @staticmethod
    def alive(actor: Steps) -> bool:
        """Let an actor take a step; return whether it continues."""
        try:
            next(actor)
        except (StopIteration, CrashError):
            return False
        return True

    def drain(self) -> None:
        """Check that all messages get done once no more faults happen."""
        self.calm = True
        self.late.clear()
        self.now_ms += 2 * HI_MS + 1
        self.append(ReleaseGroup(instance="calm", client="c", group="g", time_s=0, expiry_s=0))
        for _ in range(400):
            if self.is_drained():
                return
            for _ in member(self):
                self.now_ms += self.rng.randrange(2)
            self.now_ms += 2 * HI_MS + 1
        raise ViolationError(f"not all messages get done: {self.view()}")

    def is_drained(self) -> bool:
        """Return whether no work is left."""
        key = self.view().key
        return (
            key.offset is not None
            and key.offset >= self.end
            and all(range_.phase is Phase.CLAIMED for range_ in key.ranges)
        )


# Members


def member(walk: Walk) -> Steps:
    """Work by ranges if the group enables them and the partition has an offset; else claim the whole key."""
    for _ in range(walk.rng.randrange(1, 4)):
        view = walk.view()
        yield
        key = view.key
        is_begun = key.offset is not None and key.data_topic_id is not None and key.plan_end is None
        if not view.group.settings_accepted:
            walk.send(GroupSettingsRecord, walk.new_instance(), settings=walk.ranges_on)
        elif is_begun and enables_ranges(view.group.settings):
            yield from _Tenures(walk, view).work()
        else:
            yield from whole_member(walk)


def whole_member(walk: Walk) -> Steps:
    """Claim the whole key: name its topic, or do a batch."""
    instance, sent_ms = walk.new_instance(), walk.now_ms
    epoch = walk.send(ClaimingPartition, instance)
    yield
    try:
        yield from _hold_whole(walk, instance, epoch, sent_ms)
    finally:
        walk.believe(instance, epoch or 0, None)


def _hold_whole(walk: Walk, instance: str, epoch: int | None, sent_ms: int) -> Steps:
    key = walk.view().key
    if epoch is None or key.owner is None or key.owner.epoch != epoch:
        if key.owner is not None and key.owner.instance == instance:
            walk.send(RevokingClaim, walk.new_instance(), epoch=key.owner.epoch)
        return
    walk.believe(instance, epoch, Belief(0, 2**62, sent_ms + LEASE_MS, key.generation))
    if key.data_topic_id is None:
        walk.send(DataTopic, instance, topic_id=TOPIC_IDS[0])
        yield
        if walk.view().key.data_topic_id is None:
            return
    walk.send(Heartbeat, instance, offset=key.offset or 0)
    yield
    key = walk.view().key
    if key.owner is None or key.owner.instance != instance or key.offset is None:
        return
    if (key.plan_end is not None or walk.rng.random() < 0.5) and not key.ranges:
        yield from _whole_batch(walk, instance, sent_ms)
    walk.believe(instance, epoch, None)
    walk.send(ReleasingPartition, instance, offset=walk.view().key.offset or 0)


def _whole_batch(walk: Walk, instance: str, sent_ms: int) -> Steps:
    key = walk.view().key
    end = key.plan_end or min(walk.end, (key.offset or 0) + 8)
    if key.plan_end is None and (
        end <= (key.offset or 0) or walk.send(ClaimingMessages, instance, plan_end=end) is None
    ):
        return
    yield
    view = walk.view()
    planned = view.key
    is_own = planned.owner is not None and planned.owner.instance == instance and planned.plan_end == end
    if not is_own or planned.offset is None or walk.now_ms > sent_ms + LEASE_MS - DELIVERY_MS:
        return
    generation, start = planned.generation, planned.offset
    if walk.mode is not DeliveryMode.AT_MOST_ONCE:
        for _ in range(walk.rng.randrange(4)):
            yield
        walk.process(generation, start, end)
    committed = walk.send(Heartbeat, instance, offset=end)
    yield
    moved = committed is not None and walk.accepted[committed]
    if walk.mode is DeliveryMode.AT_MOST_ONCE and moved and committed is not None:
        was, now = walk.views[committed - 1].key, walk.views[committed].key
        if (was.offset, now.offset, now.generation) == (start, end, generation):
            walk.process(generation, start, end)


class _Tenures:
    """One instance that works by ranges (section 8.4)."""

    def __init__(self, walk: Walk, view: View) -> None:
        self.walk, self.view, self.rng = walk, view, walk.rng
        self.instance = walk.new_instance()
        self.sent_ms: dict[int, int] = {}

    def work(self) -> Steps:
        """Claim some ranges, do them in any order, and leave the rest. A dead instance believes nothing."""
        try:
            yield from self.claim_and_do()
        finally:
            for epoch in self.sent_ms:
                self.walk.believe(self.instance, epoch, None)

    def claim_and_do(self) -> Steps:
        walk = self.walk
        sent, unconfirmed = {}, False
        for start, end in self.wanted():
            at_ms = walk.now_ms
            epoch = walk.send(ClaimingRange, self.instance, start=start, end=end)
            unconfirmed |= epoch is None
            if epoch is not None:
                sent[epoch] = at_ms
            if self.rng.random() < 0.3:
                yield
        yield
        for range_ in walk.view().key.ranges:
            if range_.owner is not None and range_.owner.instance == self.instance:
                epoch = range_.owner.epoch or 0
                if epoch in sent:
                    self.sent_ms[epoch] = sent[epoch]
                    self.believe(range_)
                else:
                    walk.send(RevokingRange, walk.new_instance(), epoch=epoch)
        for epoch in self.rng.sample(list(self.sent_ms), len(self.sent_ms)):
            yield from self.do(epoch)

    def wanted(self) -> Iterator[tuple[int, int]]:
        """Yield planned ranges without an owner, then parts of the lowest gaps, also beyond the end of the data."""
        key, interval_ms = self.view.key, HI_MS
        left = self.rng.randrange(1, 4)
        for range_ in key.ranges:
            is_left = range_.phase is Phase.PLANNED and not range_.is_live(self.walk.now_ms, interval_ms)
            if is_left and left:
                left -= 1
                yield range_.start, range_.end
        at = key.offset or 0
        kept = [each for each in key.ranges if not each.is_spent(self.walk.now_ms, interval_ms)]
        ahead = 0 if self.walk.calm else self.rng.choice((0, 0, 10))
        while left and at < self.walk.end + ahead:
            inside = next((each for each in kept if each.start <= at < each.end), None)
            if inside is not None:
                at = inside.end
                continue
            stop = min((each.start for each in kept if each.start > at), default=at + 8)
            end = min(stop, at + self.rng.randrange(1, 8))
            left -= 1
            yield at, end
            at = end

    def held(self, epoch: int) -> Range | None:
        """Return the range of this epoch in the last state that was read."""
        ranges = self.walk.view().key.ranges
        return next((each for each in ranges if each.owner is not None and each.owner.epoch == epoch), None)

    def believe(self, held: Range) -> None:
        epoch = 0 if held.owner is None else held.owner.epoch or 0
        until_ms = self.sent_ms[epoch] + LEASE_MS
        belief = Belief(held.start, held.end, until_ms, self.walk.view().key.generation)
        self.walk.believe(self.instance, epoch, belief)

    def may_send(self, epoch: int) -> bool:
        return self.walk.now_ms < self.sent_ms[epoch] + LEASE_MS - DELIVERY_MS or self.walk.rng.random() < 0.02

    def beat(self, epoch: int) -> None:
        """Send a heartbeat, and read back whether it was accepted."""
        if not self.may_send(epoch):
            return
        at_ms = self.walk.now_ms
        offset = self.walk.send(RangeHeartbeat, self.instance, epoch=epoch)
        held = self.held(epoch)
        if offset is not None and self.walk.accepted[offset] and held is not None:
            self.sent_ms[epoch] = max(at_ms, self.sent_ms[epoch])
            self.believe(held)

    def do(self, epoch: int) -> Steps:
        """Plan, process and commit one range, or leave it."""
        yield from self.wait_for_data(epoch)
        held = self.held(epoch)
        if held is None:
            return
        end = held.end if held.phase is Phase.PLANNED else min(held.end, self.walk.end)
        if self.rng.random() < 0.1 or end <= held.start or not self.may_send(epoch):
            self.leave(epoch)
            return
        if held.phase is Phase.CLAIMED:
            self.believe(held._replace(end=end))
            self.walk.send(PlanningRange, self.instance, epoch=epoch, end=end)
            yield
        view, held = self.walk.view(), self.held(epoch)
        if held is None or held.phase is not Phase.PLANNED:
            return
        self.believe(held)
        yield from self.carry_out(epoch, held, view.key.generation)

    def carry_out(self, epoch: int, held: Range, generation: int) -> Steps:
        walk = self.walk
        if walk.mode is not DeliveryMode.AT_MOST_ONCE:
            for _ in range(self.rng.randrange(5)):
                yield
                self.beat(epoch)
            walk.process(generation, held.start, held.end)
        walk.believe(self.instance, epoch, None)
        if self.may_send(epoch):
            done = walk.send(RangeDone, self.instance, epoch=epoch)
            yield
            if walk.mode is DeliveryMode.AT_MOST_ONCE and done is not None and walk.accepted[done]:
                yield
                walk.process(walk.views[done].key.generation, held.start, held.end)
        if self.held(epoch) is not None:
            self.leave(epoch)

    def wait_for_data(self, epoch: int) -> Steps:
        for _ in range(self.rng.randrange(6)):
            held = self.held(epoch)
            if held is None or held.end <= self.walk.end:
                return
            yield
            self.beat(epoch)

    def leave(self, epoch: int) -> None:
        self.walk.believe(self.instance, epoch, None)
        if self.may_send(epoch):
            self.walk.send(ReleasingRange, self.instance, epoch=epoch)


# Operators


def revoker(walk: Walk) -> Steps:
    """Revoke the claim of any instance, live or not."""
    key = walk.view().key
    yield
    instance = walk.new_instance()
    if key.owner is not None and walk.rng.random() < 0.5:
        walk.send(RevokingClaim, instance, epoch=key.owner.epoch)
    for range_ in key.ranges:
        if range_.owner is not None and walk.rng.random() < 0.4:
            walk.send(RevokingRange, instance, epoch=range_.owner.epoch)


def _paused(walk: Walk, instance: str) -> Generator[None, None, bool]:
    """Pause, and wait a short time until no instance holds anything."""
    walk.send(ReleaseGroup, instance, expiry_s=FAR_S)
    for _ in range(60):
        yield
        view = walk.view()
        if not view.group.is_paused_by(instance, walk.now_ms):
            return False
        if not view.is_held(walk.now_ms):
            return True
        if walk.rng.random() < 0.1:
            yield from revoker(walk)
    return False


def _set_position(walk: Walk, instance: str, *, to_own: bool) -> Generator[None, None, bool]:
    """Claim the whole key and release it at an offset; return whether the position is set."""
    epoch = walk.send(ClaimingPartition, instance)
    yield
    key = walk.view().key
    if epoch is None or key.owner is None or key.owner.epoch != epoch:
        return False
    if to_own and key.data_topic_id is not None:
        named = walk.send(DataTopic, instance, topic_id=key.data_topic_id)
        yield
        if named is None or not walk.accepted[named]:
            return False
    elif walk.rng.random() < 0.2:
        walk.send(Heartbeat, instance, offset=key.offset or 0)
        yield
    elif not to_own and walk.rng.random() < 0.2:
        walk.send(DataTopic, instance, topic_id=walk.rng.choice(TOPIC_IDS))
        yield
    offset = key.offset or 0
    released = walk.send(
        ReleasingPartition, instance, offset=offset if to_own else walk.rng.randrange(max(offset, walk.end) + 1)
    )
    yield
    return released is not None and walk.views[released].key.generation == released


def position_setter(walk: Walk) -> Steps:
    """Set the position as section 6 describes, or stop half-way."""
    instance = walk.new_instance()
    if (yield from _paused(walk, instance)):
        yield from _set_position(walk, instance, to_own=walk.rng.random() < 0.3)
    walk.send(ReleaseGroup, instance if walk.rng.random() < 0.5 else walk.new_instance(), expiry_s=0)


def settler(walk: Walk) -> Steps:
    """Write the settings again, or switch ranges off or on as section 8.4 describes."""
    instance = walk.new_instance()
    if (yield from _paused(walk, instance)):
        is_on = enables_ranges(walk.view().group.settings)
        if is_on and walk.rng.random() < 0.5:
            yield from _switch_off(walk, instance)
        else:
            walk.send(GroupSettingsRecord, instance, settings=walk.ranges_on)
    yield
    walk.send(ReleaseGroup, instance, expiry_s=0)


def _switch_off(walk: Walk, instance: str) -> Steps:
    begun_ms, pauses = walk.now_ms, walk.seen["ReleaseGroup accepted"]
    for _ in range(200):
        if walk.now_ms > begun_ms + 2 * HI_MS:
            break
        yield
    walk.send(Heartbeat, walk.new_instance(), offset=0)  # any record moves log time
    if not (yield from _set_position(walk, instance, to_own=True)):
        return
    if walk.seen["ReleaseGroup accepted"] != pauses:
        return
    settled = walk.send(GroupSettingsRecord, instance, settings=walk.ranges_off)
    if settled is None or not walk.accepted[settled]:
        return
    walk.seen["switched off"] += 1
    ours, theirs = walk.view().key, walk.older.key("g", *PLACE)
    if ours != theirs or walk.view().group.settings != walk.older.group_of("g", PLACE[0]).settings:
        raise ViolationError(f"a reader without support for ranges has another state: {theirs}, not {ours}")


def stranger(walk: Walk) -> Steps:
    """Send records that no correct member sends: they are refused or have no bad effect."""
    instance = walk.new_instance()
    yield
    deed = walk.rng.choice((_speak_for_others, _claim_wrongly, _plan_wrongly, _pause_and_hold))
    yield from deed(walk, instance)


def _speak_for_others(walk: Walk, instance: str) -> Steps:
    key = walk.view().key
    for range_ in key.ranges:
        kind = walk.rng.choice((RangeDone, RangeHeartbeat, ReleasingRange, PlanningRange))
        if range_.owner is not None:
            content = {"end": range_.end} if kind is PlanningRange else {}
            walk.send(kind, instance, epoch=range_.owner.epoch, **content)
    walk.send(Heartbeat, instance, offset=(key.offset or 0) + 5)
    yield


def _claim_wrongly(walk: Walk, instance: str) -> Steps:
    """Claim a range that others may hold, and report it as done without a plan."""
    start = max(0, (walk.view().key.offset or 0) + walk.rng.randrange(-6, 12))
    epoch = walk.send(ClaimingRange, instance, start=start, end=start + walk.rng.randrange(1, 8))
    yield
    held = next(
        (range_ for range_ in walk.view().key.ranges if range_.owner is not None and range_.owner.epoch == epoch), None
    )
    if held is not None and held.phase is Phase.CLAIMED:
        walk.send(RangeDone, instance, epoch=epoch)


def _plan_wrongly(walk: Walk, instance: str) -> Steps:
    """Take over a planned range and plan another end, or plan beyond the claim."""
    view = walk.view()
    left = [
        range_ for range_ in view.key.ranges if range_.phase is Phase.PLANNED and not range_.is_live(walk.now_ms, HI_MS)
    ]
    if left:
        start, end = left[0].start, left[0].end
        epoch, end = walk.send(ClaimingRange, instance, start=start, end=end), max(start + 1, end - 1)
    else:
        start = max([view.key.offset or 0, *(each.end for each in view.key.ranges)])
        epoch, end = walk.send(ClaimingRange, instance, start=start, end=start + 1), start + 3
    yield
    if epoch is not None:
        walk.send(PlanningRange, instance, epoch=epoch, end=end)


def _pause_and_hold(walk: Walk, instance: str) -> Steps:
    """Pause, claim ranges and the whole key without waiting, and act as its owner after the pause."""
    walk.send(ReleaseGroup, instance, expiry_s=FAR_S)
    group = walk.view().group
    walk.send(GroupSettingsRecord, instance, settings=group.settings if group.settings_accepted else walk.ranges_on)
    start = max([walk.view().key.offset or 0, *(range_.end for range_ in walk.view().key.ranges)])
    walk.send(ClaimingRange, instance, start=start, end=start + 3)
    walk.send(ClaimingPartition, instance)
    yield
    key = walk.view().key
    if key.owner is not None and key.owner.instance == instance and key.ranges:
        walk.send(Heartbeat, instance, offset=key.ranges[-1].end)
        walk.send(ReleaseGroup, walk.new_instance(), expiry_s=0)
        if walk.view().key.ranges == key.ranges:
            walk.send(ClaimingMessages, instance, plan_end=key.ranges[-1].end + 1)
        yield
    walk.send(ReleaseGroup, walk.new_instance(), expiry_s=0)
    if not walk.view().group.is_paused(walk.now_ms):
        walk.send(ReleasingPartition, instance, offset=0)


# Many walks


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of some walks: what was seen, and the first violation by seed."""

    seen: Mapping[str, int]
    violation: str | None = None


def run(seeds: Sequence[int], steps: int, *, shows: int = 25) -> Outcome:
    """Walk with each of the seeds until one breaks a promise."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed)
        try:
            walk.walk(steps)
        except ViolationError as violation:
            lines = "\n  ".join(walk.reported[-shows:])
            return Outcome(seen, f"seed {seed}, {walk.mode}: {violation}\n  {lines}")
        seen.update(walk.seen)
        seen["records"] += len(walk.accepted)
    return Outcome(seen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk over many seeds; return 1 on a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.range_model", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--walks", type=int, default=1_000, help="the number of walks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1_000, help="steps of each (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="processes that run at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    chunks = [
        range(first, min(first + 20, options.first + options.walks))
        for first in range(options.first, options.first + options.walks, 20)
    ]
    began_s, seen, found = time.monotonic(), Counter[str](), None
    with ProcessPoolExecutor(options.processes) as pool:
        for outcome in pool.map(functools.partial(run, steps=options.steps), chunks):
            seen.update(outcome.seen)
            if outcome.violation is not None and found is None:
                found = outcome.violation
                sys.stdout.write(found + "\n")
    for what, count in sorted(seen.items()):
        sys.stdout.write(f"{count:>12,} {what}\n")
    walked = options.walks * options.steps
    sys.stdout.write(
        f"{options.walks:,} walks of {options.steps:,} steps, {walked:,} in all, "
        f"{time.monotonic() - began_s:.0f} s, {'a violation' if found else 'no violation'}\n"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
