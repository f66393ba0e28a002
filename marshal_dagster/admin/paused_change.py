"""One change of a paused group, over several tries; the pause that was in force before is put back."""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_dagster.admin.group_writer import TRIES, GroupWriter
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.coordination.claims import Member
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.state import Group, Owner

logger = logging.getLogger(__name__)

RESUMED_S: Final = 0
"""A pause that ends then, in unix seconds, has ended by any clock."""
LONGEST_SETTING_S: Final = 3_600
"""How long a group stays paused, in seconds, should the process that changes it die in the middle."""
SETTING: Final = "setting-positions"
"""The prefix of the instance ids that set positions: their pauses are not put back by others."""
_PUTTING_BACK: Final = "putting-back"
"""The prefix of the instance ids that put back the pause that was in force before."""


class _LastPause(NamedTuple):
    """The last pause or resumption that a coordination partition has of a group."""

    until_s: int = RESUMED_S
    by: str | None = None

    @classmethod
    def of(cls, group: Group | None) -> "_LastPause":
        """Take it from a group's state."""
        if group is None or group.paused_until_s is None:
            return _NO_PAUSE
        return cls(group.paused_until_s, group.paused_by)

    @property
    def is_for_a_change(self) -> bool:
        """Whether it only began or ended a change, and no person requested it by itself."""
        role, _, _ = (self.by or "").partition(".")
        return role == SETTING or (role == _PUTTING_BACK and self.until_s == RESUMED_S)


_NO_PAUSE: Final = _LastPause()


class PausedChange:
    """A change of a group's positions in `topic`, or of its settings.

    `done` are the partitions that were set, `in_doubt` those of which a record that sets them, or takes their offset,
    may be in the log.
    """

    def __init__(
        self, writer: GroupWriter, topic: str, wait_ms: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> None:
        """Begin; owners have `wait_ms` to leave, those that `is_dead` knows to be dead are not waited for."""
        self.topic = topic
        self.deadline_ms = writer.clock.lease_ms() + wait_ms
        self.done: frozenset[int] = frozenset()
        self.in_doubt: frozenset[int] = frozenset()
        self._writer = writer
        self._is_dead = is_dead
        self._former: set[str] = set()
        """The instances of tries that ended."""
        self._before: dict[int, _LastPause] = {}
        """What is to be put back in each coordination partition."""

    @property
    def is_late(self) -> bool:
        """Whether the owners have had their time to leave."""
        return self._writer.clock.lease_ms() >= self.deadline_ms

    @property
    def what_was_set(self) -> str:
        """The text that names the partitions that have their new positions."""
        known = f"partitions {sorted(self.done)} were set" if self.done else "nothing was seen set"
        return f"{known}, partitions {sorted(self.in_doubt)} may have been" if self.in_doubt else known

    def note_done(self, partitions: frozenset[int]) -> None:
        """Note which partitions were seen set."""
        self.done |= partitions
        self.in_doubt -= partitions

    def is_over(self, owner: Owner) -> bool:
        """Return whether `owner` is dead, or was an earlier try."""
        return owner.instance in self._former or self._is_dead(owner)

    def repeat(self, attempt: Callable[[Member], bool]) -> bool:
        """Try, each time as a new instance, until `attempt` returns that all is done; return whether it is.

        However it ends, the pause that was in force before is put back.
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
        """Pause the group everywhere, in the name of `member`."""
        self._writer.write_pause(member, dict.fromkeys(self._writer.numbers, self.until_s()))

    def until_s(self) -> int:
        """Return when the pause is to end if no process ends it, should this machine's clock be slow too."""
        clock, worlds = self._writer.clock, self._writer.rationalizer.world.partitions.values()
        latest_ms = max(world.present_ms(clock.wall_ms()) for world in worlds)
        left_ms = max(0.0, self.deadline_ms - clock.lease_ms())
        return int(latest_ms + left_ms) // 1_000 + LONGEST_SETTING_S

    def _note_pauses(self) -> list[int]:
        """Note what is to be put back; return the coordination partitions where another has paused or resumed since.

        Where retention has overtaken the reader since, what was in force before still is what is known.
        """
        changed: list[int] = []
        for number, partition in self._writer.rationalizer.follow_all().partitions.items():
            if number in self._before and not partition.certain:
                continue
            pause = _LastPause.of(partition.groups.get(self._writer.name))
            before = self._before.setdefault(number, _NO_PAUSE if pause.is_for_a_change else pause)
            if not pause.is_for_a_change and pause != before:
                self._before[number] = pause
                changed.append(number)
        return changed

    def _put_back(self) -> None:
        """End this change's pause: with the one in force before, except where another has decided meanwhile."""
        with self._writer.rationalizer.lock:
            theirs = self._note_pauses()
            ends = {number: pause.until_s for number, pause in self._before.items() if number not in theirs}
            self._writer.write_pause(self._writer.new_member(_PUTTING_BACK), ends)

    def _try_to_put_back(self) -> None:
        try:
            self._put_back()
        except MarshalError:
            logger.exception(
                "group %r stays paused for %d s or a little longer, resume it; of the positions in %r: %s",
                self._writer.name,
                LONGEST_SETTING_S,
                self.topic,
                self.what_was_set,
            )
