"""A group is paused and resumed, with a look at what was in force before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.admin.go_groups import has_native_settings, require_pause_allowed
from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.paused_change import RESUMED_S
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.world import PartitionWorld, World

_SECOND_MS: Final = 1_000
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Pause:
    """A group's last pause, or its end: until when (unix seconds), by which instance, and whether it is in force."""

    until_s: int | None = None
    by: str | None = None
    is_in_force: bool = False


@dataclass(frozen=True, slots=True)
class PauseChange:
    """What one coordination partition has of a group's pause, before and after."""

    number: int
    before: Pause
    after: Pause


@dataclass(slots=True)
class GroupPauser:
    """Pauses and resumes one group; `client` is for people to see.

    `look` before anything else. A group without settings gets `settings` first, those that its members are configured
    with, where these are known and native. `go_consumers_stopped`: a person says that no Go consumer newer than January
    2017 will start on this coordination topic again.
    """

    rationalizer: Rationalizer
    group: str
    client: str
    clock: Clock = field(default_factory=SystemClock)
    settings: GroupSettings | None = None
    go_consumers_stopped: bool = False
    _before: dict[int, Pause] = field(default_factory=dict)

    def look(self) -> None:
        """Read to the end of all coordination partitions. Raises `UnavailableError`, `CoordinationLogChangedError`."""
        with self.rationalizer.lock:
            self._before = self._pauses(self.rationalizer.follow_all())

    def require_known(self, otherwise: str) -> None:
        """Raise as the function `require_known`."""
        with self.rationalizer.lock:
            require_known(self.rationalizer.world, self.group, otherwise)

    @property
    def is_in_force(self) -> bool:
        """Whether the group was paused, in a part at least, when it was looked at."""
        return any(pause.is_in_force for pause in self._before.values())

    @property
    def ends_s(self) -> int | None:
        """When the pause ends that was in force, in unix seconds; None without one."""
        ends = [pause.until_s for pause in self._before.values() if pause.is_in_force and pause.until_s]
        return max(ends, default=None)

    def end_after(self, length_s: int) -> int:
        """Give the end (unix seconds) of a pause of `length_s` that begins now, by whatever clock is ahead."""
        worlds = self.rationalizer.world.partitions.values()
        now_ms = max(world.present_ms(self.clock.wall_ms()) for world in worlds)
        return -(-now_ms // _SECOND_MS) + length_s

    def require_future(self, until_s: int, source: str) -> None:
        """Raise `ConfigurationError` for an end that has passed: a pause until then would resume the group."""
        if until_s <= self.end_after(0):
            raise ConfigurationError(
                f"{source}: that is over already, by this machine's clock or by log time; nothing was written"
            )

    def pause(self, until_s: int) -> Sequence[PauseChange]:
        """Pause the group until then (unix seconds).

        Raises `GoGroupError` where Go consumers may not know the record; as `GroupAdmin.pause`, and as
        `GroupAdmin.give_first_settings` for a group that gets its settings first.
        """
        self._prepare()
        self._operator().pause(until_s)
        return self._changes()

    def resume(self) -> Sequence[PauseChange]:
        """End a pause, whoever began it. Raises as `pause`."""
        self._prepare()
        self._operator().resume()
        return self._changes()

    def preview(self, until_s: int = RESUMED_S) -> Sequence[PauseChange]:
        """Give what `pause` until then, or else `resume`, would change. Raises `GoGroupError` as these do."""
        if not self._gets_settings():
            self._require_allowed()
        after = Pause(until_s, None, until_s > RESUMED_S)
        return [PauseChange(number, before, after) for number, before in self._before.items()]

    def _prepare(self) -> None:
        if self.settings is not None and self._gets_settings():
            self._operator().give_first_settings(self.settings)
        self._require_allowed()

    def _gets_settings(self) -> bool:
        """Return whether the group has no settings, and its members are configured with native ones."""
        is_native = self.settings is not None and self.settings.rule_set is RuleSet.NATIVE
        with self.rationalizer.lock:
            has_settings = has_native_settings(self.rationalizer.world, self.group)
        return is_native and not (has_settings or self.go_consumers_stopped)

    def _require_allowed(self) -> None:
        with self.rationalizer.lock:
            require_pause_allowed(self.rationalizer.world, self.group, stopped=self.go_consumers_stopped)

    def _operator(self) -> GroupAdmin:
        return GroupAdmin(self.rationalizer, self.group, self.client, clock=self.clock)

    def _changes(self) -> Sequence[PauseChange]:
        with self.rationalizer.lock:
            after = self._pauses(self.rationalizer.world)
        return [PauseChange(number, before, after[number]) for number, before in self._before.items()]

    def _pauses(self, world: World) -> dict[int, Pause]:
        return {partition: self._pause(world.partitions[partition]) for partition in sorted(world.partitions)}

    def _pause(self, partition: PartitionWorld) -> Pause:
        group = partition.groups.get(self.group)
        if group is None or group.paused_until_s is None:
            return Pause()
        is_in_force = group.is_paused(partition.present_ms(self.clock.wall_ms()))
        return Pause(group.paused_until_s, group.paused_by, is_in_force)


def group_names(world: World) -> Sequence[str]:
    """Give the groups that the log names."""
    return sorted({name for partition in world.partitions.values() for name in partition.groups})


def require_known(world: World, group: str, otherwise: str) -> None:
    """Raise `ConfigurationError` for a group that the log does not name, most likely misspelt.

    `otherwise` says what to do where it is not.
    """
    if group not in group_names(world):
        raise ConfigurationError(f"{unknown_group(world, group)}. {otherwise}")


def unknown_group(world: World, group: str) -> str:
    """Say that the log does not name this group, and which ones it does name."""
    names = group_names(world)
    shown = first_few(list(map(repr, names)), _SHOWN)
    return f"the log does not name a group {group!r}{f'; it names {shown}' if names else ', nor any other'}"
