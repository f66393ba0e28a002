"""The values that the log's records change: keys, their owners, and groups (protocol.md, section 3)."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.staleness import GO_ALLOWANCE_MS, stale_after_ms

DataPartitionId = tuple[str, int]
"""A data topic and a partition of it."""


class OffsetBounds(NamedTuple):
    """The offsets that a partition holds, or of it can be read: from `start` up to `end`, the next one."""

    start: int
    end: int


RANGES: Final = "ranges"
"""The feature that lets a group's members claim ranges of a partition's offsets."""


class Owner(NamedTuple):
    """Who holds a key, or a range of it. `epoch` is the log offset of the winning record; an observer knows none."""

    instance: str
    client: str
    epoch: int | None


class Phase(StrEnum):
    """How far a range has got."""

    CLAIMED = "claimed"
    """It goes with its owner."""
    PLANNED = "planned"
    """One batch, which stays as it is until it is done."""
    DONE = "done"
    """It waits for the offset."""


class Range(NamedTuple):
    """The offsets from `start` up to `end` (exclusive); `last_beat_ms` means something only while there is an owner."""

    start: int
    end: int
    phase: Phase
    owner: Owner | None = None
    last_beat_ms: int = 0
    attempts: int = 0

    def is_live(self, at_ms: int, heartbeat_interval_ms: int) -> bool:
        """Tell whether it has an owner that is not stale at `at_ms`."""
        return self.owner is not None and at_ms - self.last_beat_ms <= stale_after_ms(heartbeat_interval_ms)

    def is_spent(self, at_ms: int, heartbeat_interval_ms: int) -> bool:
        """Tell whether nothing but a stale owner speaks for it."""
        return self.phase is Phase.CLAIMED and not self.is_live(at_ms, heartbeat_interval_ms)

    def overlaps(self, start: int, end: int) -> bool:
        """Tell whether it shares an offset with [start, end)."""
        return self.start < end and start < self.end

    def without_owner(self) -> "Range":
        """Give it as it is when nobody holds it."""
        return self._replace(owner=None, last_beat_ms=0)


Ranges = tuple[Range, ...]


@dataclass(slots=True)
class Key:
    """The state of one partition of a data topic for one group.

    `offset` is the next to read; `plan_end` (exclusive) is there while a plan is open; `last_beat_ms` is log time and
    means something only while there is an owner. `ranges` are ordered and do not overlap (protocol.md, section 8.2).
    """

    offset: int | None = None
    owner: Owner | None = None
    last_beat_ms: int = 0
    plan_end: int | None = None
    plan_attempts: int = 0
    generation: int = 0
    data_topic_id: str | None = None
    provisional: bool = False
    ranges: Ranges = ()

    @property
    def owners(self) -> tuple[Owner, ...]:
        """The members that hold the key whole, or ranges of it."""
        return tuple(owner for owner in (self.owner, *(range_.owner for range_ in self.ranges)) if owner is not None)

    def owners_within(self, start: int, end: int) -> tuple[Owner, ...]:
        """Return the members that hold the key whole, or ranges of it that share an offset with [start, end)."""
        return replace(self, ranges=tuple(range_ for range_ in self.ranges if range_.overlaps(start, end))).owners

    @property
    def ahead(self) -> Ranges:
        """The ranges that are planned or done ahead of the offset."""
        return tuple(range_ for range_ in self.ranges if range_.phase is not Phase.CLAIMED)

    def copy(self) -> "Key":
        """Return a copy, which stays as it is while the log is followed further."""
        return replace(self)

    def end_plan(self) -> None:
        """Forget the open plan, if any, and its attempts."""
        self.plan_end = None
        self.plan_attempts = 0

    def move(self, offset: int | None) -> None:
        """Set the offset; another offset than before ends the plan."""
        if offset != self.offset:
            self.end_plan()
        self.offset = offset

    def new_generation(self, generation: int) -> None:
        """Begin to count "once" anew: the plan ends, all ranges are gone."""
        self.end_plan()
        self.ranges = ()
        self.generation = generation


def enables_ranges(settings: GroupSettings) -> bool:
    """Tell whether a group under `settings` may claim ranges: a Go reader would take the partition for free."""
    return RANGES in settings.features and settings.rule_set is RuleSet.NATIVE


def without_ranges(settings: GroupSettings) -> GroupSettings:
    """Return `settings` that do not name the feature `ranges`."""
    return replace(settings, features=tuple(feature for feature in settings.features if feature != RANGES))


@dataclass(slots=True)
class Group:
    """What one coordination partition knows of a group."""

    settings: GroupSettings
    settings_accepted: bool = False
    paused_until_s: int | None = None
    paused_by: str | None = None
    keys: dict[DataPartitionId, Key] = field(default_factory=dict)

    @property
    def is_go(self) -> bool:
        """Whether its records are judged as Go consumers judge them."""
        return self.settings.rule_set is RuleSet.GO

    @property
    def has_go_keys(self) -> bool:
        """Whether Go consumers use it: it has no settings here, and a key with an offset and no data topic id."""
        keys = () if self.settings_accepted else self.keys.values()
        return any(key.offset is not None and key.data_topic_id is None for key in keys)

    def advice_time_ms(self, log_time_ms: int | None, wall_ms: int) -> int:
        """Return the time at which a member judges between records who is stale: advice, never a state.

        It is the later of log time and the member's clock (protocol.md, section 2), less the allowance in a Go group.
        """
        return max(log_time_ms or 0, wall_ms) - (GO_ALLOWANCE_MS if self.is_go else 0)

    def is_paused(self, at_ms: int) -> bool:
        """Tell whether the group is paused at `at_ms`."""
        return self.paused_until_s is not None and at_ms < self.paused_until_s * 1_000

    def is_paused_by(self, instance: str, at_ms: int) -> bool:
        """Tell whether the group is paused at `at_ms`, and `instance` paused it."""
        return self.paused_by == instance and self.is_paused(at_ms)

    def is_live(self, key: Key, at_ms: int) -> bool:
        """Tell whether `key` is held whole by an owner that is not stale at `at_ms`."""
        interval_ms = self.settings.heartbeat_interval_ms
        return key.owner is not None and at_ms - key.last_beat_ms <= stale_after_ms(interval_ms)

    def live_keys(self, at_ms: int) -> Iterator[DataPartitionId]:
        """Give the places that are held at `at_ms`, whole or by a range, by an owner that is not stale."""
        return (
            place for place, key in self.keys.items() if self.is_live(key, at_ms) or self.has_live_range(key, at_ms)
        )

    def has_live_range(self, key: Key, at_ms: int) -> bool:
        """Tell whether a range of `key` has an owner that is not stale at `at_ms`."""
        interval_ms = self.settings.heartbeat_interval_ms
        return any(range_.is_live(at_ms, interval_ms) for range_ in key.ranges)

    def effective_ranges(self, key: Key, at_ms: int) -> Ranges:
        """Give the ranges of `key` that count at `at_ms`: all but those for which only a stale owner speaks."""
        interval_ms = self.settings.heartbeat_interval_ms
        return tuple(range_ for range_ in key.ranges if not range_.is_spent(at_ms, interval_ms))
