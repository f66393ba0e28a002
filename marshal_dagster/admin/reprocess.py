"""Reprocessing of a range of offsets that a group has already processed, by the group's own members.

The position is set back to the start of the range. When the members have reached its end, the position is set to the
one before. It is moved forward only over offsets that were processed before, so no record is skipped, whatever happens
meanwhile.
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
    """A range of offsets to reprocess, and the position to which the group returns."""

    back: PositionChange
    """The change that sets the position back to the start of the range."""
    end: int
    """The end of the range (exclusive)."""
    position_before: int
    """The group's position when the plan was made."""


@dataclass(frozen=True, slots=True)
class ReprocessResult:
    """The result of reprocessing a range."""

    reached: int
    """The offset up to which the group has reprocessed."""
    resume_offset: int
    """The offset at which the group continues."""
    problem: str | None = None
    """Why the position could not be committed to Kafka's own group offsets; None if it was."""


@dataclass(slots=True)
class RangeReprocessor:
    """Makes one group reprocess a range of a partition.

    Call `look`, show the operator its result, then call `carry_out`.
    """

    work: PositionResetter
    """Sets the positions; the caller closes it."""

    def look(self, partition: int, start: int, end: int) -> ReprocessPlan:
        """Return the plan to reprocess the offsets from `start` up to `end` (exclusive); nothing is written.

        Raises `ConfigurationError` for an empty range or one that the group has not processed yet; for a group that
        delivers at most once, is shared with Go consumers, claims ranges or is paused. Raises what
        `PositionResetter.look` raises.
        """
        if start >= end:
            raise ConfigurationError(
                f"the range from {start} up to {end} (exclusive) is empty; give a start before the end"
            )
        (back,) = self.work.look(ToOffsets(by_partition=((partition, start),)), is_set_later=False)
        name, position_before = f"{self.work.topic}/{partition}", back.key.offset
        if position_before is None or back.is_other:
            raise ConfigurationError(
                f"group {self.work.group!r} has no position in {name}, so there is nothing to reprocess"
            )
        if end > position_before:
            raise ConfigurationError(
                f"group {self.work.group!r} is at {position_before} in {name} and has not processed all offsets up to "
                f"{end}. To process everything from {start} on, use `marshal-dagster position reset`"
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
        """Set the position back, wait until the members have reprocessed the range, and restore the position.

        For both changes the group is paused, and its members have `wait_s` to release the partition. The position is
        restored after `within_s` at the latest, or if the wait fails. `report` is called with one line for each step.

        Raises `PositionNotSetError` if members do not leave, or if another process sets the position meanwhile;
        `DataTopicChangedError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        with self._at_rest(redo, wait_s, is_dead):
            position_before = self._reached(redo, redo.back.key.generation)
            with _failure_with_position(report, position_before):
                self.work.carry_out([redo.back], wait_s=wait_s, is_dead=is_dead)
                generation = self._key(redo).generation
        report(f"the group reprocesses from {redo.back.offset} on; its position before was {position_before}")
        try:
            self._await(redo, generation, within_s)
        finally:
            with _failure_with_position(report, position_before):
                redone = self._go_on(redo, generation, position_before, wait_s, is_dead)
            report(f"the group continues at {redone.resume_offset}")
        return redone

    def _require_fit(self) -> None:
        settings, group = self.work.settings_in_force(), self.work.group
        if settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError(
                f"group {group!r} delivers at most once: if reprocessing were interrupted, more would be processed "
                "twice than you requested. Use `marshal-dagster position reset` if you accept that"
            )
        if settings.rule_set is RuleSet.GO:
            raise ConfigurationError(
                f"Go consumers share group {group!r}, or may share it because it has no settings. Their heartbeats "
                "move positions, so a range cannot be reprocessed: use `marshal-dagster position reset` if you accept "
                "that"
            )
        if RANGES in settings.features:
            raise ConfigurationError(
                f"members of group {group!r} claim ranges after the offset, so a range cannot be reprocessed. Use "
                "`marshal-dagster position reset`"
            )
        pausing = GroupPauser(self.work.reader, group, self.work.client, self.work.clock)
        pausing.look()
        if pausing.is_in_force:
            raise ConfigurationError(
                f"group {group!r} is paused, so no member would reprocess the range: resume it first"
            )

    @contextmanager
    def _at_rest(self, redo: ReprocessPlan, wait_s: float, is_dead: Callable[[Owner], bool]) -> Iterator[None]:
        """Pause the group and wait until the partition is free while the block runs; other pauses stay in force."""
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
                            f"{self.work.topic}/{redo.back.partition} of group {self.work.group!r} is still claimed by "
                            f"{key.owner.instance} after the wait: give it more time, or stop its run"
                        )
                    clock.sleep_ms(_LOOK_MS)
                yield
            finally:
                pausing.look()
                # Setting a position restores the pause as another instance, so this pause is recognized by its end.
                if ours_s is not None and pausing.ends_s == ours_s:
                    pausing.resume()

    def _is_gone(self, key: Key, is_dead: Callable[[Owner], bool]) -> bool:
        owner, settings = key.owner, self.work.settings_in_force()
        is_stale = self.work.clock.wall_ms() - key.last_beat_ms > stale_after_ms(settings.heartbeat_interval_ms)
        return owner is None or is_stale or is_dead(owner)

    def _await(self, redo: ReprocessPlan, generation: int, within_s: float) -> None:
        """Wait until the members have reached the end of the range, for at most `within_s`."""
        clock = self.work.clock
        deadline_ms = clock.lease_ms() + within_s * 1_000
        while clock.lease_ms() < deadline_ms:
            clock.sleep_ms(_LOOK_MS)
            with suppress(UnavailableError):  # it may be temporary; the wait is bounded
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
        """Restore the position, unless the members have reached it by now."""
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
        """Return the present position. Raises `PositionNotSetError` if another process has set it since."""
        key = self._key(redo)
        if key.offset is None or key.generation != generation:
            raise PositionNotSetError(
                f"another process has set the position of {self.work.topic}/{redo.back.partition} meanwhile. It was "
                f"not changed; check group {self.work.group!r} with `marshal-dagster status`"
            )
        return key.offset


@contextmanager
def _failure_with_position(report: Callable[[str], None], position_before: int) -> Iterator[None]:
    """If the block fails, report what the group may do: it is unknown whether the position was set."""
    try:
        yield
    except BaseException:
        report(f"if the group's position is before {position_before}, it processes all offsets up to there again")
        raise
