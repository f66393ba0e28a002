"""The settings of a group as each coordination partition has them, and its ranges switched off."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.operator import Operator
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import NotCertain
from marshal_dagster.operations.opening import LOOKING_MS, OpenForInterval
from marshal_dagster.operations.pausing import require_known
from marshal_dagster.operations.positions import owners_of
from marshal_dagster.protocol.messages import DeliveryMode, Settings
from marshal_dagster.protocol.state import RANGES, Key, Owner, Phase, Place, Ranges
from marshal_dagster.protocol.world import World


@dataclass(frozen=True, slots=True)
class SettingsThere:
    """What one coordination partition has of a group's settings.

    They are in force `by_default` where no record of them was accepted; where the log is not `certain` they are only
    what was last seen.
    """

    settings: Settings
    by_default: bool
    certain: bool

    @property
    def has_ranges(self) -> bool:
        """Whether members may claim ranges."""
        return RANGES in self.settings.features

    def without_ranges(self) -> "SettingsThere":
        """Give them without that."""
        features = tuple(each for each in self.settings.features if each != RANGES)
        return replace(self, settings=replace(self.settings, features=features))


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What is `ahead` of the offset of a key, planned or done, who holds it, and where it stands."""

    place: Place
    offset: int | None
    ahead: Ranges
    owners: Sequence[Owner]


def settings_of(world: World, group: str) -> Mapping[int, SettingsThere]:
    """Give the settings by coordination partition; one that does not know the group has the defaults."""
    found = {}
    for number, partition in sorted(world.partitions.items()):
        known = partition.groups.get(group)
        settings = world.defaults if known is None else known.settings
        by_default = known is None or not known.settings_accepted
        found[number] = SettingsThere(settings, by_default, partition.certain)
    return found


@dataclass(slots=True)
class Agreed:
    """Looks at the settings of one group, and switches its ranges off; `client` is for people to see.

    `look` before anything else.
    """

    open_log: OpenForInterval
    group: str
    client: str
    clock: Clock = field(default_factory=SystemClock)
    _reader: Rationalizer | None = None

    def look(self) -> Mapping[int, SettingsThere]:
        """Read to the end, and give the settings by coordination partition.

        Raises `ConfigurationError` for a group that the log does not name; `UnavailableError`, `LogChanged`.
        """
        reader = self._open()
        with reader.lock:
            world = reader.follow_all()
            require_known(world, self.group, "There are no settings to show")
            return settings_of(world, self.group)

    def forgotten(self) -> Sequence[Forgotten]:
        """Give each key, by place, of which something is forgotten when ranges are switched off, or that is held.

        Also those that stand nowhere: they keep ranges from being switched off. Raises `NotCertain`.
        """
        reader = self._open()
        with reader.lock:
            _require_all_certain(reader.world)
            keys = [(place, key) for name, place, _, key in reader.world.keys() if name == self.group]  # noqa: SIM118
            found = [_forgotten(place, key) for place, key in sorted(keys, key=lambda each: each[0])]
        return [each for each in found if each.ahead or each.owners or each.offset is None]

    def warnings(self) -> Sequence[str]:
        """Say what a person should know of the group before ranges are switched off."""
        reader = self._open()
        with reader.lock:
            modes = {each.settings.delivery for each in settings_of(reader.world, self.group).values()}
        if DeliveryMode.EFFECTIVELY_ONCE not in modes:
            return []
        told = "at the offsets done ahead its output must replace what it holds; one that cannot refuses"
        return [f"group {self.group!r} delivers effectively once: {told}"]

    def switch_ranges_off(self, *, wait_s: float) -> Mapping[int, SettingsThere]:
        """Take the feature out of the settings, pausing the group meanwhile, and give them as they then are.

        Raises as `Operator.switch_ranges_off`.
        """
        interval_ms = min(each.settings.heartbeat_interval_ms for each in self.look().values())
        rationalizer = self.open_log(interval_ms)
        try:
            Operator(rationalizer, self.group, self.client, clock=self.clock).switch_ranges_off(wait_ms=wait_s * 1_000)
        finally:
            rationalizer.close()
        return self.look()

    def close(self) -> None:
        """Let go of the coordination log."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open(self) -> Rationalizer:
        if self._reader is None:
            self._reader = self.open_log(LOOKING_MS)
        return self._reader


def alike(found: Mapping[int, SettingsThere]) -> Mapping[SettingsThere, Sequence[int]]:
    """Put the coordination partitions together in which the same is in force."""
    together: dict[SettingsThere, list[int]] = {}
    for number, each in found.items():
        together.setdefault(each, []).append(number)
    return together


def _require_all_certain(world: World) -> None:
    if unsure := [number for number, each in sorted(world.partitions.items()) if not each.certain]:
        raise NotCertain(
            f"coordination partitions {unsure} no longer begin at offset 0 and have no snapshot: whether ranges are "
            "enabled there is not known. Stop all members of the group, then see `marshal-dagster recover`"
        )


def _forgotten(place: Place, key: Key) -> Forgotten:
    ahead = tuple(each for each in key.ranges if each.phase is not Phase.CLAIMED)
    return Forgotten(place, key.offset, ahead, owners_of(key))
