"""The world state as a person looks at it: by group, with what a clock and the data topics add to it.

What is added is advice and shown as such: an owner's freshness and a pause that has run out by this machine's clock,
the lag up to the data topics' present ends.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from marshal_dagster.cli import output
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.state import DataPartitionId, Freshness, Group, Key, Owner, Range, freshness
from marshal_dagster.protocol.world import PartitionWorld, World


class LagUnknownReason(StrEnum):
    """Why the lag of a key is not known."""

    NO_OFFSET = "no offset yet"
    NO_TOPIC = "no such topic"
    NO_PARTITION = "no such partition"
    OTHER_TOPIC = "topic made anew"
    BEYOND_END = "beyond the end"
    NOT_ALLOWED = "not allowed to see"
    UNAVAILABLE = "out of reach"


@dataclass(frozen=True, slots=True)
class DataTopicEnds:
    """A data topic as its cluster has it: the next offset of each partition; or why that is not known."""

    topic_id: str | None = None
    ends: Mapping[int, int] | None = None
    unknown: LagUnknownReason | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The data partition's next offset, and how many offsets lie before it; or why that is not known."""

    end: int | None = None
    records: int | None = None
    unknown: LagUnknownReason | None = None


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """When an owner was last heard of, and how that looks by a clock, if there is one."""

    last_beat_ms: int
    silent_ms: int | None = None
    freshness: Freshness | None = None


@dataclass(frozen=True, slots=True)
class RangeOverview:
    """One range of a key; `heard` is None without an owner."""

    range: Range
    last_heartbeat: LastHeartbeat | None


@dataclass(frozen=True, slots=True)
class Assignee:
    """The member that is to claim a partition; `since_ms` is when it was given it, if that was its last change."""

    member: str
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KeyOverview:
    """One key; `heard` is None without an owner, `lag` without a look at the data topics."""

    place: DataPartitionId
    key: Key
    last_heartbeat: LastHeartbeat | None
    lag: PartitionLag | None
    ranges: tuple[RangeOverview, ...] = ()
    assigned: Assignee | None = None
    """The member that is to claim it, where a coordinator leads the group."""


Assigned = Mapping[str, Mapping[DataPartitionId, Assignee]]
"""The member of each partition, by group."""


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """One group over all coordination partitions that were read; `differences` tells what is written by halves."""

    name: str
    settings: GroupSettings
    settings_accepted: bool
    paused_until_s: int | None
    paused_by: str | None
    is_paused: bool
    differences: tuple[str, ...]
    keys: tuple[KeyOverview, ...]


@dataclass(frozen=True, slots=True)
class PartitionOverview:
    """One coordination partition; one that is not `certain` is only observed."""

    number: int
    certain: bool
    next_offset: int
    log_time_ms: int | None


@dataclass(frozen=True, slots=True)
class WorldView:
    """All that was read. `at_ms` is the clock that it was looked at by, None for a stored log."""

    at_ms: int | None
    partitions: tuple[PartitionOverview, ...]
    groups: tuple[GroupOverview, ...]
    invalid: Mapping[str, int]
    refused: Mapping[str, int]
    wanted: "ViewFilter"

    @property
    def nothing(self) -> str:
        """Say that there is no group to show."""
        name = self.wanted.group
        return "No group is named in it." if name is None else f"No group {name!r} is named in it."

    @property
    def observed(self) -> list[int]:
        """The coordination partitions that are only observed."""
        return [partition.number for partition in self.partitions if not partition.certain]

    @property
    def log_time_ms(self) -> int | None:
        """The latest log time of all coordination partitions."""
        return max(
            (partition.log_time_ms for partition in self.partitions if partition.log_time_ms is not None), default=None
        )


@dataclass(frozen=True, slots=True)
class ViewFilter:
    """Which group and data topic are looked at; None stands for all."""

    group: str | None = None
    topic: str | None = None

    def has_group(self, name: str) -> bool:
        """Tell whether the group is looked at."""
        return self.group in {None, name}

    def has_topic(self, name: str) -> bool:
        """Tell whether the data topic is looked at."""
        return self.topic in {None, name}


EVERYTHING = ViewFilter()


def data_places(world: World, wanted: ViewFilter = EVERYTHING) -> dict[str, set[int]]:
    """Give the data topics that the log names, each with the partitions that it names."""
    places: dict[str, set[int]] = {}
    for group, (topic, partition), _, _ in world.keys():  # noqa: SIM118 - no mapping
        if wanted.has_group(group) and wanted.has_topic(topic):
            places.setdefault(topic, set()).add(partition)
    return places


def world_view(
    world: World,
    *,
    at_ms: int | None = None,
    data: Mapping[str, DataTopicEnds] | None = None,
    wanted: ViewFilter = EVERYTHING,
) -> WorldView:
    """Look at the world state by the clock `at_ms` (unix ms) and against the data topics, where these are given."""
    partitions = [world.partitions[number] for number in sorted(world.partitions)]
    names = sorted({name for partition in partitions for name in partition.groups if wanted.has_group(name)})
    return WorldView(
        at_ms=at_ms,
        partitions=tuple(PartitionOverview(p.number, p.certain, p.next_offset, p.log_time_ms) for p in partitions),
        groups=tuple(_group(name, partitions, at_ms, data, wanted) for name in names),
        invalid=_sums(partition.invalid for partition in partitions),
        refused=_sums(partition.refused for partition in partitions),
        wanted=wanted,
    )


def with_assignments(looked: WorldView, assigned: Assigned) -> WorldView:
    """Add to whom partitions are assigned."""
    groups = [
        replace(group, keys=tuple(replace(key, assigned=members.get(key.place)) for key in group.keys))
        if (members := assigned.get(group.name))
        else group
        for group in looked.groups
    ]
    return replace(looked, groups=tuple(groups))


def to_json(world: World, looked: WorldView) -> dict[str, Any]:
    """Give what `replay --json` gives of `world`, for the groups and keys in `looked`, and what `looked` adds."""
    stored = summary(world)
    groups = {}
    for group in looked.groups:
        rows = {(row["topic"], row["partition"]): row for row in stored["groups"][group.name]["partitions"]}
        groups[group.name] = {
            "paused_until": stored["groups"][group.name]["paused_until"],
            "paused": group.is_paused,
            "paused_by": group.paused_by,
            "settings": _settings_json(group),
            "differences": list(group.differences),
            "partitions": [rows[key.place] | _added(key) for key in group.keys],
        }
    return {
        "at_ms": looked.at_ms,
        "coordination_partitions": [
            {
                "partition": partition.number,
                "certain": partition.certain,
                "next_offset": partition.next_offset,
                "log_time_ms": partition.log_time_ms,
            }
            for partition in looked.partitions
        ],
        "invalid": stored["invalid"],
        "refused": stored["refused"],
        "groups": groups,
    }


def listed(numbers: Collection[int]) -> str:
    """Write numbers in rising order, neighbours together: 0-2, 5."""
    runs: list[list[int]] = []
    for each in sorted(numbers):
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, slots=True)
class _Part:
    """A group as one coordination partition has it, and the time at which it is looked at."""

    number: int
    certain: bool
    group: Group
    at_ms: int

    @property
    def is_paused(self) -> bool:
        return self.group.is_paused(self.at_ms)


def _group(
    name: str,
    partitions: Collection[PartitionWorld],
    at_ms: int | None,
    data: Mapping[str, DataTopicEnds] | None,
    wanted: ViewFilter,
) -> GroupOverview:
    parts = [
        _Part(partition.number, partition.certain, group, _time(partition, at_ms))
        for partition in partitions
        if (group := partition.groups.get(name)) is not None
    ]
    told = next((part.group for part in parts if part.group.settings_accepted), parts[0].group)
    last = max(parts, key=lambda part: -1 if part.group.paused_until_s is None else part.group.paused_until_s).group
    keys = [
        _key(part, place, key, at_ms, data)
        for part in parts
        for place, key in part.group.keys.items()
        if wanted.has_topic(place[0])
    ]
    return GroupOverview(
        name=name,
        settings=told.settings,
        settings_accepted=told.settings_accepted,
        paused_until_s=last.paused_until_s,
        paused_by=last.paused_by,
        is_paused=any(part.is_paused for part in parts),
        differences=tuple(_differences(parts, [each.number for each in partitions if each.certain])),
        keys=tuple(sorted(keys, key=lambda each: each.place)),
    )


def _time(partition: PartitionWorld, at_ms: int | None) -> int:
    """Give the later of log time and the clock: the time of a silent log stands still."""
    return max(partition.log_time_ms or 0, at_ms or 0)


def _key(
    part: _Part, place: DataPartitionId, key: Key, at_ms: int | None, data: Mapping[str, DataTopicEnds] | None
) -> KeyOverview:
    lag = None if data is None else _lag(place, key, data)
    ranges = tuple(
        RangeOverview(range_, _last_heartbeat(part, range_.owner, range_.last_beat_ms, at_ms)) for range_ in key.ranges
    )
    return KeyOverview(place, key, _last_heartbeat(part, key.owner, key.last_beat_ms, at_ms), lag, ranges)


def _last_heartbeat(part: _Part, owner: Owner | None, last_beat_ms: int, at_ms: int | None) -> LastHeartbeat | None:
    if owner is None or at_ms is None:
        return None if owner is None else LastHeartbeat(last_beat_ms)
    silent_ms = part.at_ms - last_beat_ms
    return LastHeartbeat(last_beat_ms, silent_ms, freshness(silent_ms, part.group.settings.heartbeat_interval_ms))


def _differences(parts: Iterable[_Part], everywhere: Collection[int]) -> Iterable[str]:
    """Tell in which coordination partitions a pause or settings stand, if not in all that are certain."""
    certain = [part for part in parts if part.certain]
    yield from _differing("paused until", certain, everywhere, _pause)
    yield from _differing("settings", certain, everywhere, _settings)


def _pause(part: _Part) -> str | None:
    if not part.is_paused or part.group.paused_until_s is None:
        return None
    return f"{output.utc(part.group.paused_until_s * 1_000)} by {part.group.paused_by}"


def _settings(part: _Part) -> str | None:
    return settings_text(part.group.settings) if part.group.settings_accepted else None


def _differing(
    what: str, parts: Iterable[_Part], everywhere: Collection[int], value_of: Callable[[_Part], str | None]
) -> Iterable[str]:
    where: dict[str, set[int]] = {}
    for part in parts:
        value = value_of(part)
        if value is not None:
            where.setdefault(value, set()).add(part.number)
    for value, numbers in where.items():
        if numbers != set(everywhere):
            yield f"{what} {value}: in coordination partitions {listed(numbers)} only; mended by writing it again"


NO_SETTINGS: Final = "by default: no settings record yet, so it is judged as Go consumers judge"
"""What is shown of a group without settings."""


def settings_text(settings: GroupSettings) -> str:
    """Write a group's settings in words."""
    features = ", ".join(settings.features) or "none"
    return (
        f"heartbeat interval {settings.heartbeat_interval_ms / 1_000:g} s, rule set {settings.rule_set}, "
        f"delivery {settings.delivery}, features {features}"
    )


def _lag(place: DataPartitionId, key: Key, data: Mapping[str, DataTopicEnds]) -> PartitionLag:
    now = data[place[0]]
    if now.unknown is not None or now.ends is None:
        return PartitionLag(unknown=now.unknown)
    end = now.ends.get(place[1])
    if end is None:
        return PartitionLag(unknown=LagUnknownReason.NO_PARTITION)
    if key.data_topic_id not in {None, now.topic_id}:
        return PartitionLag(end, unknown=LagUnknownReason.OTHER_TOPIC)
    if key.offset is None:
        return PartitionLag(end, unknown=LagUnknownReason.NO_OFFSET)
    if key.offset > end:
        return PartitionLag(end, unknown=LagUnknownReason.BEYOND_END)
    return PartitionLag(end, end - key.offset)


def _added(each: KeyOverview) -> dict[str, Any]:
    lag = each.lag or PartitionLag()
    fresh = None if each.last_heartbeat is None else each.last_heartbeat.freshness
    added = {"freshness": fresh, "data_end": lag.end, "lag": lag.records, "lag_unknown": lag.unknown}
    if each.assigned is None:
        return added
    return {**added, "assigned": each.assigned.member, "assigned_since_ms": each.assigned.since_ms}


def _settings_json(group: GroupOverview) -> dict[str, Any]:
    settings = group.settings
    return {
        "heartbeat_interval_ms": settings.heartbeat_interval_ms,
        "rule_set": settings.rule_set,
        "delivery": settings.delivery,
        "features": list(settings.features),
        "accepted": group.settings_accepted,
    }


def _sums(counters: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for counter in counters:
        for reason, count in counter.items():
            sums[str(reason)] = sums.get(str(reason), 0) + count
    return dict(sorted(sums.items()))
