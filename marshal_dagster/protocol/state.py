"""The state of keys, ranges and groups, with methods to query it (protocol.md, sections 3 and 8.2).

`rules` changes these values; `world` holds them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import Final, NamedTuple

from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.staleness import GO_ALLOWANCE_MS, stale_after_ms

DataPartitionId = tuple[str, int]
"""A data topic and the number of one of its partitions."""


class OffsetBounds(NamedTuple):
    """The offsets that a partition holds, or that can be read from it: from `start` to `end` (exclusive)."""

    start: int
    end: int


RANGES: Final = "ranges"
"""The feature that allows the members of a group to claim ranges of a partition's offsets."""


class Owner(NamedTuple):
    """The member that holds a key or a range of it.

    `epoch` is the log offset of the record that won it; None if the reader only observes (protocol.md, section 5.5).
    """

    instance: str
    client: str
    epoch: int | None


class Phase(StrEnum):
    """The phase of a range. Snapshots store these texts."""

    CLAIMED = "claimed"
    """A member holds it. If that member is stale, the range is ignored."""
    PLANNED = "planned"
    """It is one batch, which does not change until it is done."""
    DONE = "done"
    """It is done and waits until the offset reaches it."""


class Range(NamedTuple):
    """A range of a key: the offsets from `start` to `end` (exclusive).

    `last_beat_ms` is log time, and has a meaning only while there is an owner.
    """

    start: int
    end: int
    phase: Phase
    owner: Owner | None = None
    last_beat_ms: int = 0
    attempts: int = 0

    def is_live(self, at_ms: int, heartbeat_interval_ms: int) -> bool:
        """Return whether the range has an owner that is not stale at `at_ms`."""
        return self.owner is not None and at_ms - self.last_beat_ms <= stale_after_ms(heartbeat_interval_ms)

    def is_spent(self, at_ms: int, heartbeat_interval_ms: int) -> bool:
        """Return whether the range is only claimed, and its owner is stale, so that it can be ignored."""
        return self.phase is Phase.CLAIMED and not self.is_live(at_ms, heartbeat_interval_ms)

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether the range shares an offset with [start, end)."""
        return self.start < end and start < self.end

    def without_owner(self) -> "Range":
        """Return the range without its owner."""
        return self._replace(owner=None, last_beat_ms=0)


Ranges = tuple[Range, ...]


@dataclass(slots=True)
class Key:
    """The state of one partition of a data topic for one group (protocol.md, section 3.1)."""

    offset: int | None = None
    """The next offset to read; None if the group has no position yet."""
    owner: Owner | None = None
    """The member that holds the whole key, live or stale."""
    last_beat_ms: int = 0
    """The log time of the owner's last heartbeat or claim; it has no meaning without an owner."""
    plan_end: int | None = None
    """The end (exclusive) of the open plan; None while no plan is open."""
    plan_attempts: int = 0
    """How often a member took the open plan over (section 3.5)."""
    generation: int = 0
    """The log offset of the last record that started a new generation (section 3.6)."""
    data_topic_id: str | None = None
    """Kafka's id of the data topic to which the offset belongs."""
    provisional: bool = False
    """Whether the reader only observes, so that no member may claim from this state (section 5.5)."""
    ranges: Ranges = ()
    """The ranges of the key, ordered and without overlap (section 8.2)."""
    former_owner: Owner | None = field(default=None, compare=False)
    """The last member that held the whole key before the present owner, for people; None if it is not known.

    No rule uses it, and snapshots do not have it.
    """

    @property
    def owners(self) -> tuple[Owner, ...]:
        """The members that hold the whole key or ranges of it."""
        return tuple(owner for owner in (self.owner, *(range_.owner for range_ in self.ranges)) if owner is not None)

    def owners_within(self, start: int, end: int) -> tuple[Owner, ...]:
        """Return the members that hold the whole key, or ranges of it that share an offset with [start, end)."""
        return replace(self, ranges=tuple(range_ for range_ in self.ranges if range_.overlaps(start, end))).owners

    @property
    def ahead(self) -> Ranges:
        """The ranges that are planned or done; none of them begins below the offset."""
        return tuple(range_ for range_ in self.ranges if range_.phase is not Phase.CLAIMED)

    def copy(self) -> "Key":
        """Return a copy, which does not change while the reader follows the log."""
        return Key(  # `replace` takes four times as long
            self.offset,
            self.owner,
            self.last_beat_ms,
            self.plan_end,
            self.plan_attempts,
            self.generation,
            self.data_topic_id,
            self.provisional,
            self.ranges,
            self.former_owner,
        )

    def end_plan(self) -> None:
        """Delete the open plan, if there is one, and its attempts."""
        self.plan_end = None
        self.plan_attempts = 0

    def move(self, offset: int | None) -> None:
        """Set the offset; if it changes, the plan ends."""
        if offset != self.offset:
            self.end_plan()
        self.offset = offset

    def new_generation(self, generation: int) -> None:
        """Start a new generation: the plan ends and all ranges are deleted (protocol.md, section 3.6)."""
        self.end_plan()
        self.ranges = ()
        self.generation = generation


class _TopicKeys(NamedTuple):
    """The keys of a group in one data topic.

    `first` has the keys of partition 0, 1, 2 and so on, up to the first partition without a key, and `others` those
    after it.
    """

    first: list[Key]
    others: dict[int, Key]

    def put(self, partition: int, key: Key) -> None:
        """Add a key, or replace it."""
        first, others = self
        if partition < len(first):
            first[partition] = key
        elif partition > len(first):
            others[partition] = key
        else:
            others.pop(partition, None)
            first.append(key)
            while others and (following := others.pop(len(first), None)) is not None:
                first.append(following)

    def items(self) -> Iterator[tuple[int, Key]]:
        """Return the partition and the state of all keys."""
        yield from enumerate(self.first)
        yield from sorted(self.others.items(), key=itemgetter(0))


class Keys:
    """The keys of a group by (topic, partition); those of a topic are in the order of their partitions.

    A dict would have a tuple and an entry for each key, which need nearly 100 bytes.
    """

    __slots__ = ("_topics",)
    __hash__ = None  # type: ignore[assignment] # the keys change

    def __init__(self, keys: Iterable[tuple[DataPartitionId, Key]] = ()) -> None:
        """Start with some keys."""
        self._topics: dict[str, _TopicKeys] = {}
        for place, key in keys:
            self[place] = key

    def get(self, place: DataPartitionId) -> Key | None:
        """Return a key, or None if there is none."""
        topic, partition = place
        keys = self._topics.get(topic)
        if keys is None:
            return None
        first, others = keys
        return first[partition] if 0 <= partition < len(first) else others.get(partition)

    def of_topic(self, topic: str, partitions: Iterable[int]) -> list[Key | None]:
        """Return the keys of partitions of a topic, in that order; None for each that does not exist."""
        first, others = self._topics.get(topic) or ([], {})
        count = len(first)
        return [first[partition] if 0 <= partition < count else others.get(partition) for partition in partitions]

    def __getitem__(self, place: DataPartitionId) -> Key:
        """Return a key; raise `KeyError` if there is none."""
        key = self.get(place)
        if key is None:
            raise KeyError(place)
        return key

    def __setitem__(self, place: DataPartitionId, key: Key) -> None:
        """Add a key, or replace it."""
        topic, partition = place
        keys = self._topics.get(topic)
        if keys is None:
            self._topics[topic] = keys = _TopicKeys([], {})
        keys.put(partition, key)

    def __contains__(self, place: DataPartitionId) -> bool:
        """Return whether there is a key."""
        return self.get(place) is not None

    def __iter__(self) -> Iterator[DataPartitionId]:
        """Return the topics and partitions of all keys."""
        return (place for place, _ in self.items())

    def __len__(self) -> int:
        """Return the number of keys."""
        return sum(len(first) + len(others) for first, others in self._topics.values())

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal keys."""
        return isinstance(other, Keys) and dict(self.items()) == dict(other.items())

    def __repr__(self) -> str:
        """Return all keys."""
        return f"Keys({list(self.items())})"

    def items(self) -> Iterator[tuple[DataPartitionId, Key]]:
        """Return the topic and partition, and the state, of all keys."""
        for topic, keys in self._topics.items():
            for partition, key in keys.items():
                yield (topic, partition), key

    def values(self) -> Iterator[Key]:
        """Return the state of all keys."""
        for first, others in self._topics.values():
            yield from first
            yield from others.values()


class PauseOrigin(NamedTuple):
    """Who paused a group, and why. It is for people; no rule uses the client and the reason."""

    instance: str | None
    """The instance that sent the pause; None for one that is only planned."""
    client: str | None = None
    reason: str | None = None


def enables_ranges(settings: GroupSettings) -> bool:
    """Return whether a group with these settings may claim ranges.

    A Go group may not, because a Go reader would consider the partition free.
    """
    return RANGES in settings.features and settings.rule_set is RuleSet.NATIVE


def without_ranges(settings: GroupSettings) -> GroupSettings:
    """Return `settings` that do not name the feature `ranges`."""
    return replace(settings, features=tuple(feature for feature in settings.features if feature != RANGES))


@dataclass(slots=True)
class Group:
    """The state of a group in one coordination partition (protocol.md, section 3.1)."""

    settings: GroupSettings
    """The settings in force."""
    settings_accepted: bool = False
    """Whether a record has set them."""
    paused_until_s: int | None = None
    """The end of the last pause, in unix seconds; it may have passed."""
    paused_by: str | None = None
    """The instance that sent that pause."""
    keys: Keys = field(default_factory=Keys)
    """The group's keys in this coordination partition."""
    pause_client: str | None = field(default=None, compare=False)
    """The client id of `paused_by`, for people; None if it is not known. No rule uses it."""
    pause_reason: str | None = field(default=None, compare=False)
    """Why the group was paused, for people; None if no reason is known. No rule uses it."""

    @property
    def pause_origin(self) -> "PauseOrigin | None":
        """Who sent the last pause, and why; None if there was none."""
        if self.paused_by is None:
            return None
        return PauseOrigin(self.paused_by, self.pause_client, self.pause_reason)

    def copy_pause(self, group: "Group") -> None:
        """Take over the last pause of `group`."""
        self.paused_until_s, self.paused_by = group.paused_until_s, group.paused_by
        self.pause_client, self.pause_reason = group.pause_client, group.pause_reason

    @property
    def is_go(self) -> bool:
        """Whether its records are judged as Go consumers judge them."""
        return self.settings.rule_set is RuleSet.GO

    @property
    def has_go_keys(self) -> bool:
        """Whether Go consumers use the group: it has no settings here, and a key with offset but no data topic id."""
        keys = () if self.settings_accepted else self.keys.values()
        return any(key.offset is not None and key.data_topic_id is None for key in keys)

    def advice_time_ms(self, log_time_ms: int | None, wall_ms: int) -> int:
        """Return the time that a member uses between records to judge whether an owner is stale.

        It is the later of log time and the member's clock (protocol.md, section 2), less the allowance in a Go group.
        The answer is advice and never part of the state.
        """
        return max(log_time_ms or 0, wall_ms) - (GO_ALLOWANCE_MS if self.is_go else 0)

    def is_paused(self, at_ms: int) -> bool:
        """Return whether the group is paused at `at_ms`."""
        return self.paused_until_s is not None and at_ms < self.paused_until_s * 1_000

    def is_paused_by(self, instance: str, at_ms: int) -> bool:
        """Return whether the group is paused at `at_ms`, and `instance` paused it."""
        return self.paused_by == instance and self.is_paused(at_ms)

    def is_live(self, key: Key, at_ms: int) -> bool:
        """Return whether the whole of `key` has an owner that is not stale at `at_ms`."""
        interval_ms = self.settings.heartbeat_interval_ms
        return key.owner is not None and at_ms - key.last_beat_ms <= stale_after_ms(interval_ms)

    def live_keys(self, at_ms: int) -> Iterator[DataPartitionId]:
        """Return the partitions that have an owner, of the whole or of a range, that is not stale at `at_ms`."""
        return (
            place for place, key in self.keys.items() if self.is_live(key, at_ms) or self.has_live_range(key, at_ms)
        )

    def has_live_range(self, key: Key, at_ms: int) -> bool:
        """Return whether a range of `key` has an owner that is not stale at `at_ms`."""
        interval_ms = self.settings.heartbeat_interval_ms
        return any(range_.is_live(at_ms, interval_ms) for range_ in key.ranges)

    def effective_ranges(self, key: Key, at_ms: int) -> Ranges:
        """Return the ranges of `key` that count at `at_ms`: all except those that are only claimed by a stale owner."""
        interval_ms = self.settings.heartbeat_interval_ms
        return tuple(range_ for range_ in key.ranges if not range_.is_spent(at_ms, interval_ms))
