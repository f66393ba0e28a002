"""The settings of a group in each coordination partition: read them, change them, and disable ranges.

This is what `marshal-dagster settings` and the settings job use; `settings_change` writes the records.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.admin.go_groups import require_settings_allowed
from marshal_dagster.admin.log_access import LogUser
from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_settings import check_settings, require_all_certain
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import DEFAULT_SETTINGS, WITHOUT_SETTINGS, DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Owner, Ranges, without_ranges
from marshal_dagster.protocol.world import World

SHORTEST_INTERVAL_S: Final = 0.1
LONGEST_INTERVAL_S: Final = 3_600.0
"""The heartbeat intervals that `ClaimerResource` and the component accept, in seconds."""


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """The settings of a group in one coordination partition."""

    settings: GroupSettings
    by_default: bool
    """Whether no record of settings was accepted, so that the defaults apply."""
    certain: bool
    """Whether the log is complete; if not, `settings` are only the last ones seen."""

    @property
    def has_ranges(self) -> bool:
        """Whether members may claim ranges."""
        return RANGES in self.settings.features

    def without_ranges(self) -> "PartitionSettings":
        """Return the same settings without the feature `ranges`."""
        return replace(self, settings=without_ranges(self.settings))


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """The changes of a group's settings that an operator requests; None keeps the current value."""

    heartbeat_interval_s: float | None = None
    """The heartbeat interval in seconds."""
    rules: str | None = None
    """The rule set, `native` or `go`."""
    delivery: str | None = None
    """The delivery mode."""
    ranges: bool = False
    """Whether to enable ranges; false keeps the current value."""

    def settings(self, found: Mapping[int, PartitionSettings]) -> GroupSettings:
        """Return the settings after the change; a group without settings starts from a member's defaults.

        `found` are the current settings by coordination partition. Raises `ConfigurationError` for invalid settings,
        and if `found` differ in a value that the change keeps.
        """
        in_force = {there.settings for there in found.values() if not there.by_default} or {self._without()}
        wanted = {self._changed(settings) for settings in in_force}
        if len(wanted) > 1:
            raise ConfigurationError(
                "the group's settings differ between coordination partitions, so it is not clear which ones to keep. "
                "Give --heartbeat-interval, --rules and --delivery together"
            )
        (settings,) = wanted
        check_settings(settings, 0)
        return settings

    def _without(self) -> GroupSettings:
        return WITHOUT_SETTINGS if self.rules == RuleSet.GO else DEFAULT_SETTINGS

    def _changed(self, before: GroupSettings) -> GroupSettings:
        rules = before.rule_set if self.rules is None else enum_member(RuleSet, "--rules", self.rules)
        delivery = before.delivery
        if self.delivery is not None:
            delivery = enum_member(DeliveryMode, "--delivery", self.delivery)
        interval_ms = before.heartbeat_interval_ms
        if self.heartbeat_interval_s is not None:
            interval_ms = member_interval_ms(self.heartbeat_interval_s, "--heartbeat-interval")
        elif rules is RuleSet.GO:
            interval_ms = WITHOUT_SETTINGS.heartbeat_interval_ms
        elif before.rule_set is RuleSet.GO:
            interval_ms = DEFAULT_SETTINGS.heartbeat_interval_ms
        features = before.features
        if self.ranges and RANGES not in features:
            features = (*features, RANGES)
        return GroupSettings(interval_ms, rules, delivery, features)


def member_interval_ms(interval_s: float, source: str) -> int:
    """Return a heartbeat interval in milliseconds.

    Raises `ConfigurationError`, whose message begins with `source`, if no member can be configured so.
    """
    if not SHORTEST_INTERVAL_S <= interval_s <= LONGEST_INTERVAL_S:
        raise ConfigurationError(
            f"{source}: {interval_s:g} s; give {SHORTEST_INTERVAL_S:g} to {LONGEST_INTERVAL_S:g} seconds, "
            "which members can be configured with"
        )
    return round(interval_s * 1_000)


@dataclass(frozen=True, slots=True)
class ForgottenRanges:
    """A partition that is affected if ranges are disabled: its ranges after the offset, its owners, its position."""

    place: DataPartitionId
    offset: int | None
    """The position of the group; None if it has none."""
    ahead: Ranges
    """The ranges after the offset that are planned or done."""
    owners: Sequence[Owner]
    """The members that own the partition or ranges of it."""


def settings_by_partition(world: World, group: str) -> Mapping[int, PartitionSettings]:
    """Return the settings by coordination partition; one without records of the group has the defaults."""
    found = {}
    for number, partition in sorted(world.partitions.items()):
        known = partition.groups.get(group)
        settings = world.defaults if known is None else known.settings
        by_default = known is None or not known.settings_accepted
        found[number] = PartitionSettings(settings, by_default, partition.certain)
    return found


@dataclass(slots=True)
class GroupSettingsAdmin(LogUser):
    """Reads and changes the settings of one group, and disables its ranges. Call `look` first."""

    group: str
    client: str
    """A name for the operator in the records, for people who read the log."""
    clock: Clock = field(default_factory=SystemClock)
    go_consumers_stopped: bool = False
    """Whether the operator confirms that no Go consumer, of any group, will use this coordination topic again."""

    def look(
        self, *, new_group: bool = False, otherwise: str = "For settings before its first claim, give --new-group"
    ) -> Mapping[int, PartitionSettings]:
        """Read the log to its end and return the settings by coordination partition.

        `otherwise` is the sentence for a name that is right, in the message that the group is unknown.

        Raises `ConfigurationError` if the log has no record of the group, unless `new_group` allows that;
        `UnavailableError`, `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            world = reader.follow_all()
            if not new_group:
                require_known(world, self.group, otherwise)
            return settings_by_partition(world, self.group)

    def require_allowed(self) -> None:
        """Raise `GoGroupError` if Go consumers may use the group or the topic.

        It is not raised if the operator has confirmed that they are stopped.
        """
        reader = self.reader
        with reader.lock:
            require_all_certain(reader.world)
            require_settings_allowed(reader.world, self.group, stopped=self.go_consumers_stopped)

    def has_partitions(self) -> bool:
        """Return whether the log as read last has a partition of the group."""
        reader = self.reader
        with reader.lock:
            return any(name == self.group for name, _, _, _ in reader.world.keys())  # noqa: SIM118

    def owners(self) -> Sequence[Owner]:
        """Return the owners of the group's partitions and ranges, by the log as read last."""
        reader = self.reader
        with reader.lock:
            keys = [key for name, _, _, key in reader.world.keys() if name == self.group]  # noqa: SIM118
            return tuple(dict.fromkeys(owner for key in keys for owner in key.owners))

    def set_settings(
        self, settings: GroupSettings, *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> Mapping[int, PartitionSettings]:
        """Change the group's settings while it is paused, and return the settings then in force.

        If ranges are enabled and `settings` do not include them, they are disabled first. `wait_s`: how many seconds
        owners have to release their claims. Raises what `require_allowed`, `SettingsChanger.set_settings` and
        `switch_ranges_off` raise.
        """
        found = self.look(new_group=True)
        self.require_allowed()
        if RANGES not in settings.features and any(part.has_ranges for part in found.values()):
            found = self.switch_ranges_off(wait_s=wait_s)
        with self._changer([settings, *(part.settings for part in found.values())]) as changer:
            changer.set_settings(settings, wait_ms=wait_s * 1_000, is_dead=is_dead)
        return self.look()

    def forgotten(self) -> Sequence[ForgottenRanges]:
        """Return each partition that disabling ranges affects, sorted by topic and partition.

        These have ranges after the offset, which are forgotten; or an owner; or no position, which prevents the change.
        Raises `IncompleteLogError`.
        """
        reader = self.reader
        with reader.lock:
            require_all_certain(reader.world)
            keys = [(place, key) for name, place, _, key in reader.world.keys() if name == self.group]  # noqa: SIM118
            found = [
                ForgottenRanges(place, key.offset, key.ahead, key.owners)
                for place, key in sorted(keys, key=itemgetter(0))
            ]
        return [key for key in found if key.ahead or key.owners or key.offset is None]

    def warnings(self) -> Sequence[str]:
        """Return warnings to show to the operator before ranges are disabled."""
        reader = self.reader
        with reader.lock:
            modes = {part.settings.delivery for part in settings_by_partition(reader.world, self.group).values()}
        if DeliveryMode.EFFECTIVELY_ONCE not in modes:
            return []
        note = "its sink must replace its output of ranges that are processed again; a sink that cannot rejects them"
        return [f"group {self.group!r} delivers effectively once: {note}"]

    def switch_ranges_off(self, *, wait_s: float) -> Mapping[int, PartitionSettings]:
        """Remove the feature `ranges` while the group is paused, and return the settings then in force.

        `wait_s`: how many seconds owners have to release their claims. Raises what `SettingsChanger.switch_ranges_off`
        raises.
        """
        with self._changer([part.settings for part in self.look().values()]) as changer:
            changer.switch_ranges_off(wait_ms=wait_s * 1_000)
        return self.look()

    @contextmanager
    def _changer(self, settings: Iterable[GroupSettings]) -> Iterator[SettingsChanger]:
        """Open the log with the write timeouts of a member with the shortest heartbeat interval in `settings`."""
        with closing(self.open_log(min(part.heartbeat_interval_ms for part in settings))) as rationalizer:
            yield SettingsChanger(rationalizer, self.group, self.client, clock=self.clock)


def partitions_by_settings(found: Mapping[int, PartitionSettings]) -> Mapping[PartitionSettings, Sequence[int]]:
    """Group the coordination partitions by the settings in force there."""
    together: dict[PartitionSettings, list[int]] = {}
    for number, settings in found.items():
        together.setdefault(settings, []).append(number)
    return together
