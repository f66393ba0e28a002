"""A change that is made while a group is paused: pause, try the change several times, restore the previous pause.

`GroupAdmin` and `SettingsChanger` make their changes this way (protocol.md, section 6).
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_dagster.admin.group_writer import TRIES, GroupWriter
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.pause_text import PUTTING_BACK, SETTING
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.state import Group, Owner

logger = logging.getLogger(__name__)

RESUMED_S: Final = 0
"""The end of a pause, in unix seconds, that resumes the group, because it has passed by any clock."""
LONGEST_SETTING_S: Final = 3_600
"""How many seconds a group stays paused if the process that changes it dies."""


class _LastPause(NamedTuple):
    """The last pause or resumption of a group in one coordination partition."""

    until_s: int = RESUMED_S
    by: str | None = None
    reason: str | None = None

    @classmethod
    def of(cls, group: Group | None) -> "_LastPause":
        """Return the last pause in a group's state."""
        if group is None or group.paused_until_s is None:
            return _NO_PAUSE
        return cls(group.paused_until_s, group.paused_by, group.pause_reason)

    @property
    def is_for_a_change(self) -> bool:
        """Whether it only started or ended a change and was not requested by an operator."""
        role, _, _ = (self.by or "").partition(".")
        return role == SETTING or (role == PUTTING_BACK and self.until_s == RESUMED_S)


_NO_PAUSE: Final = _LastPause()


class PausedChange:
    """A change of a group's positions in `topic`, or of its settings.

    `done` are the partitions that were set. `in_doubt` are partitions for which a record that sets or releases them may
    be in the log, although that was not read back.
    """

    def __init__(
        self, writer: GroupWriter, topic: str, wait_ms: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> None:
        """Wait at most `wait_ms` from now on for owners to leave; skip those that `is_dead` reports as dead."""
        self.topic = topic
        self.deadline_ms = writer.clock.lease_ms() + wait_ms
        self.done: frozenset[int] = frozenset()
        self.in_doubt: frozenset[int] = frozenset()
        self._writer = writer
        self._is_dead = is_dead
        self._former: set[str] = set()
        """The instance ids of earlier tries."""
        self._before: dict[int, _LastPause] = {}
        """The pause to restore in each coordination partition."""

    @property
    def is_late(self) -> bool:
        """Whether the wait for the owners is over."""
        return self._writer.clock.lease_ms() >= self.deadline_ms

    @property
    def what_was_set(self) -> str:
        """The part of a message that names the partitions that have their new positions."""
        known = f"partitions {sorted(self.done)} were set" if self.done else "no partition is known to be set"
        return f"{known}, partitions {sorted(self.in_doubt)} may have been set" if self.in_doubt else known

    def note_done(self, partitions: frozenset[int]) -> None:
        """Record that `partitions` were read back with their new positions."""
        self.done |= partitions
        self.in_doubt -= partitions

    def is_over(self, owner: Owner) -> bool:
        """Return whether `owner` is dead or is the instance of an earlier try."""
        return owner.instance in self._former or self._is_dead(owner)

    def repeat(self, attempt: Callable[[Member], bool]) -> bool:
        """Call `attempt`, each time with a new instance, until it returns true; return whether it did.

        The pause that was in force before is always restored.
        """
        is_done = False
        try:
            for _ in range(TRIES):
                self._note_pauses()
                member = self._writer.new_member(SETTING)
                try:
                    is_done = attempt(member)
                finally:
                    self._former.add(member.instance)
                if is_done:
                    break
            self._put_back()
        except BaseException:
            self._try_to_put_back()
            raise
        return is_done

    def pause(self, member: Member) -> None:
        """Pause the group as `member` in all coordination partitions."""
        self._writer.write_pause(member, dict.fromkeys(self._writer.numbers, self.until_s()))

    def until_s(self) -> int:
        """Return the end of the pause if no process ends it earlier; it is late enough even if this clock is slow."""
        clock, worlds = self._writer.clock, self._writer.rationalizer.world.partitions.values()
        latest_ms = max(world.present_ms(clock.wall_ms()) for world in worlds)
        left_ms = max(0.0, self.deadline_ms - clock.lease_ms())
        return int(latest_ms + left_ms) // 1_000 + LONGEST_SETTING_S

    def _note_pauses(self) -> list[int]:
        """Update the pauses to restore; return the coordination partitions where an operator has changed it.

        If retention deleted unread records of a partition, its last known pause is kept.
        """
        changed: list[int] = []
        for number, partition in self._writer.rationalizer.follow_all().partitions.items():
            if number in self._before and not partition.certain:
                continue
            pause = _LastPause.of(partition.groups.get(self._writer.name))
            before = self._before.setdefault(number, _NO_PAUSE if pause.is_for_a_change else pause)
            if not pause.is_for_a_change and (pause.until_s, pause.by) != (before.until_s, before.by):
                self._before[number] = pause
                changed.append(number)
        return changed

    def _put_back(self) -> None:
        """Restore the pauses from before the change, except where an operator has paused or resumed since."""
        with self._writer.rationalizer.lock:
            theirs = self._note_pauses()
            ends: dict[str | None, dict[int, int]] = {}
            for number, pause in self._before.items():
                if number not in theirs:
                    ends.setdefault(pause.reason, {})[number] = pause.until_s
            member = self._writer.new_member(PUTTING_BACK)
            for reason, ends_s in ends.items():
                self._writer.write_pause(member, ends_s, reason)

    def _try_to_put_back(self) -> None:
        try:
            self._put_back()
        except MarshalError:
            logger.exception(
                "group %r stays paused for at least %d s: resume it with `marshal-dagster resume`. Positions in %r: %s",
                self._writer.name,
                LONGEST_SETTING_S,
                self.topic,
                self.what_was_set,
            )
