"""The values that the log's records change: keys, their owners, and groups (PROTOCOL.md 3)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from marshal_dagster.protocol.messages import Settings

Place = tuple[str, int]
"""A data topic and a partition of it."""


class Freshness(StrEnum):
    """How long ago an owner was heard of, for showing; only `STALE` decides anything."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


def freshness(silent_ms: int, heartbeat_interval_ms: int) -> Freshness:
    """Classify an owner last heard of `silent_ms` ago: exactly 2 intervals are not stale yet."""
    if silent_ms <= heartbeat_interval_ms:
        return Freshness.FRESH
    return Freshness.UNKNOWN if silent_ms <= 2 * heartbeat_interval_ms else Freshness.STALE


class Owner(NamedTuple):
    """Who holds a key. `epoch` is the log offset of the winning record; an observing reader knows none."""

    instance: str
    client: str
    epoch: int | None


@dataclass(slots=True)
class Key:
    """The state of one partition of a data topic for one group.

    `offset` is the next to read; `plan_end` (exclusive) is there while a plan is open; `last_beat_ms` is log time and
    means something only while there is an owner.
    """

    offset: int | None = None
    owner: Owner | None = None
    last_beat_ms: int = 0
    plan_end: int | None = None
    plan_attempts: int = 0
    generation: int = 0
    data_topic_id: str | None = None
    provisional: bool = False

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
        """Begin to count "once" anew: the plan ends."""
        self.end_plan()
        self.generation = generation


@dataclass(slots=True)
class Group:
    """What one coordination partition knows of a group."""

    settings: Settings
    settings_accepted: bool = False
    paused_until_s: int | None = None
    paused_by: str | None = None
    keys: dict[Place, Key] = field(default_factory=dict)

    def is_paused(self, at_ms: int) -> bool:
        """Tell whether the group is paused at `at_ms`."""
        return self.paused_until_s is not None and at_ms < self.paused_until_s * 1_000

    def is_paused_by(self, instance: str, at_ms: int) -> bool:
        """Tell whether the group is paused at `at_ms`, and `instance` paused it."""
        return self.paused_by == instance and self.is_paused(at_ms)

    def is_live(self, key: Key, at_ms: int) -> bool:
        """Tell whether `key` has an owner that is not stale at `at_ms`."""
        return key.owner is not None and at_ms - key.last_beat_ms <= 2 * self.settings.heartbeat_interval_ms

    def live_keys(self, at_ms: int) -> Iterator[Place]:
        """Give the places whose owner is live at `at_ms`."""
        return (place for place, key in self.keys.items() if self.is_live(key, at_ms))
