"""A short run of the model check of range claims, and a check that it finds each broken rule."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from marshal_dagster.protocol import rules, world
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingRange,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    PlanningRange,
    RangeDone,
    ReleasingPartition,
    ReleasingRange,
    RevokingRange,
)
from marshal_dagster.protocol.range_set import finish, put
from marshal_dagster.protocol.rules import NATIVE, Event, Refusal, Rule
from marshal_dagster.protocol.state import Key, Phase, Range, Ranges
from tests import range_model
from tests.range_model import main, run

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.thorough
def test_no_promise_is_broken() -> None:
    """Random walks of members that follow the page break no promise, and every kind of event occurs."""
    outcome = run(range(40), 500)
    assert outcome.violation is None, outcome.violation
    for kind in ("ClaimingRange", "PlanningRange", "RangeHeartbeat", "RangeDone", "ReleasingRange", "RevokingRange"):
        assert outcome.seen[f"{kind} accepted"] > 50, kind
        assert outcome.seen[f"{kind} refused"] > 20, kind
    assert outcome.seen["switched off"] > 2
    assert outcome.seen["stored before"] > 20


def _with(kind: type[Message], rule: Rule) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(world, "NATIVE", {**NATIVE, kind: rule})

    return patch


def _without(kind: type[Message], *removed: Callable[[Event[Any]], bool] | Refusal) -> Patch:
    kept = tuple(pair for pair in NATIVE[kind].guards if not {*pair} & {*removed})
    assert len(kept) == len(NATIVE[kind].guards) - len(removed)
    return _with(kind, Rule(NATIVE[kind].effect, kept))


def _does(kind: type[Message], effect: Callable[[Event[Any]], Any]) -> Patch:
    return _with(kind, Rule(effect, NATIVE[kind].guards))


def _set(target: object, name: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def _beat_over_ranges(event: Event[Heartbeat]) -> None:
    event.key.last_beat_ms = event.log_time_ms
    if event.key.offset is None or event.message.offset > event.key.offset:
        event.key.move(event.message.offset)


def _take_and_leave_owners(event: Event[ClaimingPartition]) -> None:
    ranges = event.key.ranges
    rules.take(event)
    event.key.ranges = ranges


def _take_and_drop_ranges(event: Event[ClaimingPartition]) -> None:
    rules.take(event)
    event.key.ranges = ()


def _take_range_and_leave_whole_owner(event: Event[ClaimingRange]) -> None:
    owner = event.key.owner
    rules.take_range(event)
    event.key.owner = owner


def _drop(event: Event[Any]) -> None:
    held = rules._named(event)
    event.key.ranges = tuple(each for each in event.key.ranges if each is not held)


def _finish_over_gaps(ranges: Ranges, done: Range, offset: int) -> tuple[Ranges, int]:
    left, moved = finish(ranges, done, offset)
    if left and left[0].phase is Phase.DONE:
        return left[1:], left[0].end
    return left, moved


def _finish_up_to(ranges: Ranges, done: Range, offset: int) -> tuple[Ranges, int]:
    """Join a range with one that starts an offset later."""
    return finish(ranges, done._replace(end=done.end + (done.start == offset)), offset)


def _overlaps_by_more_than_one(self: Range, start: int, end: int) -> bool:
    return self.start < end - 1 and start < self.end


def _left_planned_live_too(event: Event[ClaimingRange]) -> Range | None:
    requested = (event.message.start, event.message.end)
    return next((one for one in event.key.ranges if one[:2] == requested and one.phase is Phase.PLANNED), None)


def _left_planned_by_start(event: Event[ClaimingRange]) -> Range | None:
    at_ms, interval_ms = event.log_time_ms, event.group.settings.heartbeat_interval_ms
    found = (one for one in event.key.ranges if one.start == event.message.start and one.phase is Phase.PLANNED)
    return next((one._replace(end=event.message.end) for one in found if not one.is_live(at_ms, interval_ms)), None)


def _take_over_and_forget_the_plan(event: Event[ClaimingRange]) -> None:
    rules.take_range(event)
    event.key.ranges = tuple(
        each._replace(phase=Phase.CLAIMED) if each.owner and each.owner.epoch == event.offset else each
        for each in event.key.ranges
    )


def _take_over_under_the_old_epoch(event: Event[ClaimingRange]) -> None:
    left = rules._abandoned_plan(event)
    rules.take_range(event)
    if left is not None and left.owner is not None:
        event.key.ranges = put(event.key.ranges, left._replace(last_beat_ms=event.log_time_ms))


def _release_and_keep_ranges(event: Event[ReleasingPartition]) -> None:
    ranges = event.key.ranges
    rules.release(event)
    event.key.ranges = ranges


def _new_generation_only_of_the_plan(self: Key, generation: int) -> None:
    self.end_plan()
    self.generation = generation


def _drop_in_the_same_generation(event: Event[GroupSettingsRecord]) -> None:
    generations = {place: key.generation for place, key in event.group.keys.items()}
    rules.apply_settings(event)
    for place, key in event.group.keys.items():
        key.ranges, key.generation = (), generations[place]


def _live_for_one_interval(self: Range, at_ms: int, heartbeat_interval_ms: int) -> bool:
    return self.owner is not None and at_ms - self.last_beat_ms <= heartbeat_interval_ms


def _switch_off_at_once(walk: range_model.Walk, instance: str, *, to_own: bool) -> Any:  # noqa: ANN401 - as it is
    yield from ()
    return to_own and bool(instance) and bool(walk)


def _process_first(self: range_model._Tenures, epoch: int, held: Range, generation: int) -> range_model.Steps:
    self.walk.process(generation, held.start, held.end)
    yield from carry_out(self, epoch, held, generation)


carry_out = range_model._Tenures.carry_out

BROKEN: Final[Mapping[str, Patch]] = {
    "a heartbeat of the whole owner carries the offset over ranges": _does(Heartbeat, _beat_over_ranges),
    "a whole claim leaves the ranges' owners": _does(ClaimingPartition, _take_and_leave_owners),
    "a whole claim drops the ranges": _does(ClaimingPartition, _take_and_drop_ranges),
    "the whole is planned beside ranges": _without(ClaimingMessages, Refusal.HELD_BY_RANGES),
    "a range is claimed beside a live whole owner": _without(ClaimingRange, rules.is_unowned),
    "a range claim leaves a stale whole owner": _does(ClaimingRange, _take_range_and_leave_whole_owner),
    "a range is claimed beside an open whole plan": _without(ClaimingRange, Refusal.OPEN_PLAN),
    "a range is claimed below the offset": _without(ClaimingRange, Refusal.BELOW_OFFSET),
    "ranges are claimed though they are switched off": _without(ClaimingRange, Refusal.RANGES_DISABLED),
    "a range is claimed in a paused group": _without(ClaimingRange, rules.is_running),
    "ranges may share an offset": _set(Range, "overlaps", _overlaps_by_more_than_one),
    "a live planned range is taken over": _set(rules, "_abandoned_plan", _left_planned_live_too),
    "a planned range is taken over with another end": _set(rules, "_abandoned_plan", _left_planned_by_start),
    "a takeover forgets the plan": _does(ClaimingRange, _take_over_and_forget_the_plan),
    "a takeover keeps the old owner and epoch": _does(ClaimingRange, _take_over_under_the_old_epoch),
    "a range is live for one interval": _set(Range, "is_live", _live_for_one_interval),
    "a planned range is planned again": _without(PlanningRange, rules.is_same_plan_or_first),
    "a plan reaches beyond its range": _without(PlanningRange, rules.is_within_range),
    "a planned range goes when it is released": _does(ReleasingRange, _drop),
    "a planned range goes when it is revoked": _does(RevokingRange, _drop),
    "any member reports that a range is done": _without(RangeDone, rules.is_range_of_epoch, rules.is_range_owner),
    "a range is done without a plan": _without(RangeDone, Refusal.NOT_PLANNED),
    "the offset passes a gap": _set(rules, "finish", _finish_over_gaps),
    "the offset is one too high": _set(rules, "finish", _finish_up_to),
    "a set position leaves the ranges": _does(ReleasingPartition, _release_and_keep_ranges),
    "a new generation leaves the ranges": _set(Key, "new_generation", _new_generation_only_of_the_plan),
    "settings drop the ranges in the same generation": _does(GroupSettingsRecord, _drop_in_the_same_generation),
    "ranges are switched off before the positions are set": _set(range_model, "_set_position", _switch_off_at_once),
    "at most once processes before the commit": _set(range_model._Tenures, "carry_out", _process_first),
}


FIRST_SEEDS: Final = {
    "a whole claim leaves the ranges' owners": 230,
    "a range is claimed beside an open whole plan": 70,
}
"""Where the walks begin for the faults that are rare: shortly before the first walk that finds them."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken rule violates a promise within a few walks."""
    BROKEN[name](monkeypatch)
    first = FIRST_SEEDS.get(name, 0)
    assert run(range(first, first + 400), 500).violation is not None


def test_the_command_names_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """A successful run exits with 0 and prints what it covered."""
    assert main(["--walks", "3", "--steps", "100"]) == 0
    assert "3 walks of 100 steps, 300 in all" in capsys.readouterr().out
