"""A range of a partition's offsets, done before, is done again by the group's own members.

The position is set back to the range's start; when the members have reached its end it is set to where the group stood.
So that nothing between is left out, whatever happens meanwhile, the way forward leads only over what was done before.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from marshal_dagster.admin.pause import GroupPauser
from marshal_dagster.admin.paused_change import LONGEST_SETTING_S
from marshal_dagster.admin.position_spec import ToOffsets
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.errors import ConfigurationError, PositionNotSetError, UnavailableError
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import RANGES, Key, Owner

_LOOK_MS: Final = 500


@dataclass(frozen=True, slots=True)
class ReprocessPlan:
    """What is to be done again: the offsets from that of `back`, where the partition is set, up to `end` (exclusive).

    `stood` is where the group stood when it was looked at.
    """

    back: PositionChange
    end: int
    position_before: int


@dataclass(frozen=True, slots=True)
class ReprocessResult:
    """How far it was done again, where the group goes on, and why Kafka's own offsets did not follow."""

    reached: int
    resume_offset: int
    problem: str | None = None


@dataclass(slots=True)
class RangeReprocessor:
    """Has one group do a range of a partition again, by `work`, which the caller closes.

    `look` first, show a person what it gives, then `carry_out`.
    """

    work: PositionResetter

    def look(self, partition: int, start: int, end: int) -> ReprocessPlan:
        """Give what is to be. Nothing is written.

        Raises `ConfigurationError` for a range that is none, or that the group has not done yet; for a group that
        delivers at most once, is shared with Go consumers, claims ranges or is paused. Raises as
        `PositionResetter.look`.
        """
        if start >= end:
            raise ConfigurationError(f"from {start} up to {end} (exclusive) is no range of offsets")
        (back,) = self.work.look(ToOffsets(by_partition=((partition, start),)), is_set_later=False)
        name, position_before = f"{self.work.topic}/{partition}", back.key.offset
        if position_before is None or back.is_other:
            raise ConfigurationError(f"group {self.work.group!r} has no position in {name}: nothing was done yet")
        if end > position_before:
            raise ConfigurationError(
                f"group {self.work.group!r} stands at {position_before} in {name}, and has not done all up to {end}: "
                f"to have it do all from {start} on, set the position"
            )
        self._require_fit()
        return ReprocessPlan(back, end, position_before)

    def carry_out(
        self,
        redo: ReprocessPlan,
        *,
        wait_s: float,
        within_s: float,
        is_dead: Callable[[Owner], bool] = assume_alive,
        report: Callable[[str], None] = lambda _: None,
    ) -> ReprocessResult:
        """Set the position back, wait until the members are through, and set it to where they stood.

        Each time the group is paused, and its members have `wait_s` to leave. However the waiting ends, after
        `within_s` at the latest, the group goes on where it stood. Raises `PositionNotSetError` where members stay, or
        somebody else sets the position meanwhile; `DataTopicChangedError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self._at_rest(redo, wait_s, is_dead):
            position_before = self._reached(redo, redo.back.key.generation)
            with _failure_with_position(report, position_before):
                self.work.carry_out([redo.back], wait_s=wait_s, is_dead=is_dead)
                generation = self._key(redo).generation
        report(f"the group does it again from {redo.back.offset} on; it has stood at {position_before}")
        try:
            self._await(redo, generation, within_s)
        finally:
            with _failure_with_position(report, position_before):
                redone = self._go_on(redo, generation, position_before, wait_s, is_dead)
            report(f"the group goes on at {redone.resume_offset}")
        return redone

    def _require_fit(self) -> None:
        settings, group = self.work.settings_in_force(), self.work.group
        if settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError(
                f"group {group!r} delivers at most once: should this end half way, more would be done twice than you "
                "ask for. Set the position if that is what you want"
            )
        if settings.rule_set is RuleSet.GO:
            raise ConfigurationError(
                f"Go consumers share group {group!r}, or may because it has no settings: their heartbeats move a "
                "position, so a range cannot be done again. Set the position if that is what you want"
            )
        if RANGES in settings.features:
            raise ConfigurationError(f"members of group {group!r} claim ranges ahead of the offset: set the position")
        pausing = GroupPauser(self.work.reader, group, self.work.client, self.work.clock)
        pausing.look()
        if pausing.is_in_force:
            raise ConfigurationError(f"group {group!r} is paused, so that nobody would do it: resume it first")

    @contextmanager
    def _at_rest(self, redo: ReprocessPlan, wait_s: float, is_dead: Callable[[Owner], bool]) -> Iterator[None]:
        """Keep all members out of the partition while the block runs; others' pauses stay."""
        clock = self.work.clock
        deadline_ms = clock.lease_ms() + wait_s * 1_000
        with closing(self.work.open_log(self.work.settings_in_force().heartbeat_interval_ms)) as rationalizer:
            pausing = GroupPauser(rationalizer, self.work.group, self.work.client, clock)
            pausing.look()
            ours_s = None if pausing.is_in_force else pausing.end_after(round(wait_s) + LONGEST_SETTING_S)
            if ours_s is not None:
                pausing.pause(ours_s)
            try:
                while (key := self._key(redo)).owner is not None and not self._is_gone(key, is_dead):
                    if clock.lease_ms() >= deadline_ms:
                        raise PositionNotSetError(
                            f"{self.work.topic}/{redo.back.partition} is still held by {key.owner.instance} after the "
                            "wait: give it more time, or stop its run"
                        )
                    clock.sleep_ms(_LOOK_MS)
                yield
            finally:
                pausing.look()
                # Setting a position puts back what it finds, in a name of its own: the end tells whose pause it is.
                if ours_s is not None and pausing.ends_s == ours_s:
                    pausing.resume()

    def _is_gone(self, key: Key, is_dead: Callable[[Owner], bool]) -> bool:
        owner, settings = key.owner, self.work.settings_in_force()
        is_stale = self.work.clock.wall_ms() - key.last_beat_ms > stale_after_ms(settings.heartbeat_interval_ms)
        return owner is None or is_stale or is_dead(owner)

    def _await(self, redo: ReprocessPlan, generation: int, within_s: float) -> None:
        """Wait until the members have reached the end, for so long at most."""
        clock = self.work.clock
        deadline_ms = clock.lease_ms() + within_s * 1_000
        while clock.lease_ms() < deadline_ms:
            clock.sleep_ms(_LOOK_MS)
            with suppress(UnavailableError):  # it may pass; the time is bounded
                if self._reached(redo, generation) >= redo.end:
                    return

    def _go_on(
        self,
        redo: ReprocessPlan,
        generation: int,
        position_before: int,
        wait_s: float,
        is_dead: Callable[[Owner], bool],
    ) -> ReprocessResult:
        """Set the position to where the group stood, unless it is there by now."""
        self._reached(redo, generation)
        problem = None
        with self._at_rest(redo, wait_s, is_dead):
            reached = self._reached(redo, generation)
            if reached < position_before:
                forward = replace(redo.back, key=self._key(redo), offset=position_before)
                problem = self.work.carry_out([forward], wait_s=wait_s, is_dead=is_dead)
        return ReprocessResult(reached, max(reached, position_before), problem)

    def _key(self, redo: ReprocessPlan) -> Key:
        return self.work.keys([redo.back.partition])[redo.back.partition]

    def _reached(self, redo: ReprocessPlan, generation: int) -> int:
        """Read on, and give where the partition stands. Raises `PositionNotSetError` if another has set it since."""
        key = self._key(redo)
        if key.offset is None or key.generation != generation:
            raise PositionNotSetError(
                f"somebody else has set the position of {self.work.topic}/{redo.back.partition} meanwhile: it is left "
                "so"
            )
        return key.offset


@contextmanager
def _failure_with_position(report: Callable[[str], None], position_before: int) -> Iterator[None]:
    """Tell what the group does if the block fails, which may have set the position or not."""
    try:
        yield
    except BaseException:
        report(f"where the group stands before {position_before} by now it does all up to there again")
        raise
