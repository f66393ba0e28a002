"""The settings of a group as each coordination partition has them, given, changed, and its ranges switched off."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter

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


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """What one coordination partition has of a group's settings.

    They are in force `by_default` where no record of them was accepted; where the log is not `certain` they are only
    what was last seen.
    """

    settings: GroupSettings
    by_default: bool
    certain: bool

    @property
    def has_ranges(self) -> bool:
        """Whether members may claim ranges."""
        return RANGES in self.settings.features

    def without_ranges(self) -> "PartitionSettings":
        """Give them without that."""
        return replace(self, settings=without_ranges(self.settings))


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What a person changes of a group's settings: None, and `ranges` when false, stands for what is in force."""

    heartbeat_interval_s: float | None = None
    rules: str | None = None
    delivery: str | None = None
    ranges: bool = False

    def settings(self, found: Mapping[int, PartitionSettings]) -> GroupSettings:
        """Return what is to be in force, where `found` is now; a group without settings gets a member's defaults.

        Raises `ConfigurationError` for what no group can have, and where `found` differs in what is not named.
        """
        in_force = {there.settings for there in found.values() if not there.by_default} or {self._without()}
        wanted = {self._changed(settings) for settings in in_force}
        if len(wanted) > 1:
            raise ConfigurationError(
                "the group's settings differ between coordination partitions, so that nothing says what stays. Give "
                "--heartbeat-interval, --rules and --delivery together"
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
            interval_ms = round(self.heartbeat_interval_s * 1_000)
        elif rules is RuleSet.GO:
            interval_ms = WITHOUT_SETTINGS.heartbeat_interval_ms
        elif before.rule_set is RuleSet.GO:
            interval_ms = DEFAULT_SETTINGS.heartbeat_interval_ms
        features = before.features
        if self.ranges and RANGES not in features:
            features = (*features, RANGES)
        return GroupSettings(interval_ms, rules, delivery, features)


@dataclass(frozen=True, slots=True)
class ForgottenRanges:
    """What is `ahead` of the offset of a key, planned or done, who holds it, and where it stands."""

    place: DataPartitionId
    offset: int | None
    ahead: Ranges
    owners: Sequence[Owner]


def settings_by_partition(world: World, group: str) -> Mapping[int, PartitionSettings]:
    """Give the settings by coordination partition; one that does not know the group has the defaults."""
    found = {}
    for number, partition in sorted(world.partitions.items()):
        known = partition.groups.get(group)
        settings = world.defaults if known is None else known.settings
        by_default = known is None or not known.settings_accepted
        found[number] = PartitionSettings(settings, by_default, partition.certain)
    return found


@dataclass(slots=True)
class GroupSettingsAdmin(LogUser):
    """Looks at the settings of one group, gives it others, and switches its ranges off; `client` is for people to see.

    `look` before anything else. `go_consumers_stopped`: a person says that no Go consumer, of any group, will use this
    coordination topic again.
    """

    group: str
    client: str
    clock: Clock = field(default_factory=SystemClock)
    go_consumers_stopped: bool = False

    def look(self, *, new_group: bool = False) -> Mapping[int, PartitionSettings]:
        """Read to the end, and give the settings by coordination partition.

        Raises `ConfigurationError` for a group that the log does not name, unless it may be a `new_group`;
        `UnavailableError`, `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            world = reader.follow_all()
            if not new_group:
                require_known(world, self.group, "If it is to get settings before its first claim give --new-group")
            return settings_by_partition(world, self.group)

    def require_allowed(self) -> None:
        """Raise `GoGroupError` where Go consumers may use the group or the topic, and no person says otherwise."""
        reader = self.reader
        with reader.lock:
            require_all_certain(reader.world)
            require_settings_allowed(reader.world, self.group, stopped=self.go_consumers_stopped)

    def owners(self) -> Sequence[Owner]:
        """Return who holds something of the group, by the log as read last."""
        reader = self.reader
        with reader.lock:
            keys = [key for name, _, _, key in reader.world.keys() if name == self.group]  # noqa: SIM118
            return tuple(dict.fromkeys(owner for key in keys for owner in key.owners))

    def set_settings(
        self, settings: GroupSettings, *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> Mapping[int, PartitionSettings]:
        """Give the group `settings`, pausing it meanwhile, and return those then in force.

        Ranges that are in force and not wanted are switched off first, by the steps that this takes. Raises
        `GoGroupError` as `require_allowed`; as `SettingsChanger.set_settings` and `switch_ranges_off`.
        """
        found = self.look(new_group=True)
        self.require_allowed()
        if RANGES not in settings.features and any(part.has_ranges for part in found.values()):
            found = self.switch_ranges_off(wait_s=wait_s)
        with self._changer([settings, *(part.settings for part in found.values())]) as changer:
            changer.set_settings(settings, wait_ms=wait_s * 1_000, is_dead=is_dead)
        return self.look()

    def forgotten(self) -> Sequence[ForgottenRanges]:
        """Give each key, by place, of which something is forgotten when ranges are switched off, or that is held.

        Also those that stand nowhere: they keep ranges from being switched off. Raises `IncompleteLogError`.
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
        """Say what a person should know of the group before ranges are switched off."""
        reader = self.reader
        with reader.lock:
            modes = {part.settings.delivery for part in settings_by_partition(reader.world, self.group).values()}
        if DeliveryMode.EFFECTIVELY_ONCE not in modes:
            return []
        told = "at the offsets done ahead its output must replace what it holds; one that cannot refuses"
        return [f"group {self.group!r} delivers effectively once: {told}"]

    def switch_ranges_off(self, *, wait_s: float) -> Mapping[int, PartitionSettings]:
        """Take the feature out of the settings, pausing the group meanwhile, and give them as they then are.

        Raises as `SettingsChanger.switch_ranges_off`.
        """
        with self._changer([part.settings for part in self.look().values()]) as changer:
            changer.switch_ranges_off(wait_ms=wait_s * 1_000)
        return self.look()

    @contextmanager
    def _changer(self, settings: Iterable[GroupSettings]) -> Iterator[SettingsChanger]:
        """Open the log as members of the shortest heartbeat interval among `settings` write it."""
        with closing(self.open_log(min(each.heartbeat_interval_ms for each in settings))) as rationalizer:
            yield SettingsChanger(rationalizer, self.group, self.client, clock=self.clock)


def partitions_by_settings(found: Mapping[int, PartitionSettings]) -> Mapping[PartitionSettings, Sequence[int]]:
    """Put the coordination partitions together in which the same is in force."""
    together: dict[PartitionSettings, list[int]] = {}
    for number, each in found.items():
        together.setdefault(each, []).append(number)
    return together
