"""Pause and resume of a group, with the state before and after, and the check that the log knows a group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster._internal.texts import first_few, nearest_first
from marshal_dagster.admin.go_groups import has_native_settings, require_pause_allowed
from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.paused_change import RESUMED_S
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, IncompleteLogError
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.pause_reason import MOST_CHARACTERS, is_reason
from marshal_dagster.protocol.state import PauseOrigin
from marshal_dagster.protocol.world import PartitionWorld, World

_SECOND_MS: Final = 1_000
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Pause:
    """A group's last pause or resumption; all fields keep their defaults if there was none."""

    until_s: int | None = None
    """When the pause ends, in unix seconds; 0 for a resumption."""
    by: PauseOrigin | None = None
    """Who wrote it, and why."""
    is_in_force: bool = False
    """Whether the group is paused now."""


@dataclass(frozen=True, slots=True)
class PauseChange:
    """The pause of a group in one coordination partition before and after an operation."""

    number: int
    before: Pause
    after: Pause


@dataclass(slots=True)
class GroupPauser:
    """Pauses and resumes one group. Call `look` first."""

    rationalizer: Rationalizer
    group: str
    client: str
    """A name for the operator in the records, for people who read the log."""
    clock: Clock = field(default_factory=SystemClock)
    settings: GroupSettings | None = None
    """The settings that the group's members are configured with, if known. A group without settings gets them first, if
    their rule set is `native`.
    """
    go_consumers_stopped: bool = False
    """Whether the operator confirms that no Go consumer newer than January 2017 will start on this coordination topic
    again.
    """
    _before: dict[int, Pause] = field(default_factory=dict)

    def look(self) -> None:
        """Read all coordination partitions to their ends. Raises `UnavailableError`, `CoordinationLogChangedError`."""
        with self.rationalizer.lock:
            self._before = self._pauses(self.rationalizer.follow_all())

    def require_known(self, otherwise: str) -> None:
        """Raise an error if the log has no record of the group; see the function `require_known`."""
        with self.rationalizer.lock:
            require_known(self.rationalizer.world, self.group, otherwise)

    @property
    def is_in_force(self) -> bool:
        """Whether `look` found the group paused in at least one coordination partition."""
        return any(pause.is_in_force for pause in self._before.values())

    @property
    def ends_s(self) -> int | None:
        """The end of the pause that `look` found, in unix seconds; None if the group was not paused."""
        ends = [pause.until_s for pause in self._before.values() if pause.is_in_force and pause.until_s]
        return max(ends, default=None)

    def end_after(self, length_s: int) -> int:
        """Return the end (unix seconds) of a pause of `length_s` that starts now, by the latest clock."""
        worlds = self.rationalizer.world.partitions.values()
        now_ms = max(world.present_ms(self.clock.wall_ms()) for world in worlds)
        return -(-now_ms // _SECOND_MS) + length_s

    def require_future(self, until_s: int, source: str) -> None:
        """Raise `ConfigurationError` if `until_s` has passed, because a pause until then would resume the group."""
        if until_s <= self.end_after(0):
            raise ConfigurationError(
                f"{source}: this time has passed, by this machine's clock or by log time. Nothing was written; give a "
                "later one"
            )

    def pause(self, until_s: int, reason: str | None = None) -> Sequence[PauseChange]:
        """Pause the group until `until_s` (unix seconds) and return the change in each coordination partition.

        `reason` is why, for people (`require_reason`). Every reader of the log can see it.

        Raises `GoGroupError` if Go consumers may not understand the record; what `GroupAdmin.pause` raises; and what
        `GroupAdmin.give_first_settings` raises if the group gets its settings first.
        """
        self._prepare()
        self._operator().pause(until_s, reason)
        return self._changes()

    def resume(self) -> Sequence[PauseChange]:
        """End any pause and return the change in each coordination partition. Raises what `pause` raises."""
        self._prepare()
        self._operator().resume()
        return self._changes()

    def preview(self, until_s: int = RESUMED_S, reason: str | None = None) -> Sequence[PauseChange]:
        """Return what `pause` until `until_s`, by default `resume`, would change. Raises `GoGroupError` as they do."""
        if not self._gets_settings():
            self._require_allowed()
        by = PauseOrigin(None, self.client, reason) if until_s > RESUMED_S else None
        after = Pause(until_s, by, until_s > RESUMED_S)
        return [PauseChange(number, before, after) for number, before in self._before.items()]

    def _prepare(self) -> None:
        if self.settings is not None and self._gets_settings():
            self._operator().give_first_settings(self.settings)
        self._require_allowed()

    def _gets_settings(self) -> bool:
        """Return whether the group gets its settings first: it has none, and its members' settings are native."""
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
        return Pause(group.paused_until_s, group.pause_origin, is_in_force)


def require_reason(reason: str | None, source: str) -> str | None:
    """Return the reason of a pause, without white space around it; None if there is none.

    Raises `ConfigurationError`, whose message begins with `source`, if no record can carry it.
    """
    if reason is None or not (text := reason.strip()):
        return None
    if not is_reason(text):
        raise ConfigurationError(
            f"{source}: the reason of a pause must be one line of at most {MOST_CHARACTERS} visible characters, but it "
            f"has {len(text)} characters or an invisible one. Shorten it, or write it in one line"
        )
    return text


def group_names(world: World) -> Sequence[str]:
    """Return the names of the groups in the log, sorted."""
    return sorted({name for partition in world.partitions.values() for name in partition.groups})


def require_known(world: World, group: str, otherwise: str) -> None:
    """Raise `ConfigurationError` if the log has no record of the group, whose name is then probably misspelt.

    `otherwise` is the sentence of the message for a name that is right. Raises `IncompleteLogError` instead if the
    records of the group may have been deleted.
    """
    if group in group_names(world):
        return
    unsure = [number for number, partition in sorted(world.partitions.items()) if not partition.certain]
    if unsure:
        raise IncompleteLogError(
            f"{unknown_group(world, group)}. But coordination partitions {unsure} no longer begin at offset 0, so its "
            "records may have been deleted: correct the name, or stop all members of all groups and run "
            "`marshal-dagster recover`"
        )
    raise ConfigurationError(f"{unknown_group(world, group)}. {otherwise}")


def require_known_topic(world: World, group: str, topic: str, otherwise: str) -> None:
    """Raise `ConfigurationError` if the group has no partition of the topic, whose name is then probably misspelt.

    `otherwise` is the sentence of the message for a name that is right.
    """
    names = topic_names(world, group)
    if topic not in names:
        shown = first_few(list(map(repr, nearest_first(topic, names))), _SHOWN) or "none of any topic"
        raise ConfigurationError(f"group {group!r} has no partition of topic {topic!r}; it has {shown}. {otherwise}")


def topic_names(world: World, group: str | None = None) -> set[str]:
    """Return the data topics in the log, of one group or of all."""
    return {topic for name, (topic, _), _, _ in world.keys() if group in {None, name}}  # noqa: SIM118 - no mapping


def missing_group(world: World, group: str) -> str | None:
    """Return the message of `unknown_group` if the log has groups, but not this one. Its name is probably misspelt."""
    names = group_names(world)
    return unknown_group(world, group) if names and group not in names else None


def unknown_group(world: World, group: str, log: str = "the log") -> str:
    """Return the message that the log has no record of this group, with those that it has, the most similar first.

    `log` is a name for the part of the log that was read.
    """
    names = nearest_first(group, group_names(world))
    shown = first_few(list(map(repr, names)), _SHOWN)
    return f"{log} has no group {group!r}{f'; it has {shown}' if names else ' and no other group'}"
