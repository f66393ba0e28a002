"""The world state by group and data partition, with advice from a clock, the data topics and a coordinator.

The advice is: an owner's freshness and the end of a pause by this machine's clock, the lag up to the data topics'
present ends, and the member that each partition is assigned to. `world_tables` shows a view as tables.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.pause import unknown_group
from marshal_dagster.admin.texts import settings_text
from marshal_dagster.coordination.pause_text import pause_end_text
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.staleness import Freshness, freshness
from marshal_dagster.protocol.state import DataPartitionId, Group, Key, OffsetBounds, Owner, PauseOrigin, Range
from marshal_dagster.protocol.unread_records import UnreadRecords, is_of_topic, unread_records
from marshal_dagster.protocol.world import PartitionWorld, World


class LagUnknownReason(StrEnum):
    """Why the lag of a key is not known."""

    NO_OFFSET = "no offset yet"
    NO_TOPIC = "no such topic"
    NO_PARTITION = "no such partition"
    OTHER_TOPIC = "topic re-created"
    BEYOND_END = "beyond the end"
    NOT_ALLOWED = "not allowed to see"
    UNAVAILABLE = "out of reach"


@dataclass(frozen=True, slots=True)
class DataTopicEnds:
    """A data topic's id and the bounds of each partition, or why they are not known."""

    topic_id: str | None = None
    bounds: Mapping[int, OffsetBounds] | None = None
    """The offsets that each partition holds."""
    ages_ms: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """About how old the record at a partition and offset is, in ms, as far as that is known."""
    unknown: LagUnknownReason | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The end of a data partition, and the number of unread offsets that it still has, or why that is not known."""

    end: int | None = None
    records: int | None = None
    unknown: LagUnknownReason | None = None
    age_ms: int | None = None
    """About how old the first unread record is, in ms; 0 if there is none, and None if that is not known."""


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """The log time of an owner's last heartbeat, and its age if there is a clock to judge it by."""

    last_beat_ms: int
    silent_ms: int | None = None
    freshness: Freshness | None = None


@dataclass(frozen=True, slots=True)
class RangeOverview:
    """One range of a key; `last_heartbeat` is None without an owner."""

    range: Range
    last_heartbeat: LastHeartbeat | None


@dataclass(frozen=True, slots=True)
class Assignee:
    """The member that a partition is assigned to.

    `since_ms` is the time of the assignment, if it belongs to the last change of this member's assignments.
    """

    member: str
    since_ms: int | None = None


Assigned = Mapping[str, Mapping[DataPartitionId, Assignee]]
"""The member of each partition, by group."""


@dataclass(frozen=True, slots=True)
class KeyOverview:
    """One key. `last_heartbeat` is None without an owner, and `lag` if the data topics were not read."""

    place: DataPartitionId
    key: Key
    last_heartbeat: LastHeartbeat | None
    lag: PartitionLag | None
    ranges: tuple[RangeOverview, ...] = ()
    assigned: Assignee | None = None
    """The member that it is assigned to, if a coordinator leads the group."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A pause or settings that only some coordination partitions have, and what to do about it."""

    problem: str
    advice: str = "write it again to complete it"

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.problem}; {self.advice}"


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """One group over all coordination partitions that were read; `differences` lists what was only partly written."""

    name: str
    settings: GroupSettings
    settings_accepted: bool
    paused_until_s: int | None
    pause_origin: PauseOrigin | None
    is_paused: bool
    differences: tuple[Difference, ...]
    keys: tuple[KeyOverview, ...]


@dataclass(frozen=True, slots=True)
class ViewFilter:
    """The group and the data topic that are shown; None means all."""

    group: str | None = None
    topic: str | None = None

    def has_group(self, name: str) -> bool:
        """Return whether the group is shown."""
        return self.group in {None, name}

    def has_topic(self, name: str) -> bool:
        """Return whether the data topic is shown."""
        return self.topic in {None, name}


EVERYTHING: Final = ViewFilter()


@dataclass(frozen=True, slots=True)
class WorldView:
    """All that was read. `at_ms` (unix ms) is the clock that it is judged by, or None for a stored log."""

    world: World
    wanted: ViewFilter
    at_ms: int | None
    groups: tuple[GroupOverview, ...]

    @property
    def partitions(self) -> list[PartitionWorld]:
        """The coordination partitions that were read, in order."""
        return [partition for _, partition in sorted(self.world.partitions.items())]

    @property
    def observed(self) -> list[int]:
        """The numbers of the coordination partitions that are only observed."""
        return [partition.number for partition in self.partitions if not partition.certain]

    @property
    def log_time_ms(self) -> int | None:
        """The latest log time of all coordination partitions."""
        times_ms = [partition.log_time_ms for partition in self.partitions if partition.log_time_ms is not None]
        return max(times_ms, default=None)

    @property
    def invalid(self) -> Mapping[str, int]:
        """The number of invalid records by reason."""
        return _totals(partition.invalid for partition in self.partitions)

    @property
    def refused(self) -> Mapping[str, int]:
        """The number of refused records by reason."""
        return _totals(partition.refused for partition in self.partitions)

    @property
    def nothing(self) -> str:
        """The text that is shown if there is no group to show."""
        text = self.unknown_group or f"{self._log} has no group"
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def unknown_group(self) -> str | None:
        """A text with the chosen group, which the log lacks, and the groups that it has; else None."""
        name = self.wanted.group
        return None if name is None or self.groups else unknown_group(self.world, name, self._log)

    @property
    def _log(self) -> str:
        topic = self.wanted.topic
        return "the log" if topic is None else f"the coordination partition of topic {topic!r}"


def _totals(counters: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for counter in counters:
        totals.update(counter)
    return dict(sorted(totals.items()))


def data_places(world: World, wanted: ViewFilter = EVERYTHING) -> dict[str, set[int]]:
    """Return the data topics that are in the log, each with its partitions that are in the log."""
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
    assigned: Assigned | None = None,
    wanted: ViewFilter = EVERYTHING,
) -> WorldView:
    """Return a view of the world state.

    Args:
        world: The world state that was read from the log.
        at_ms: The clock (unix ms) that freshness and pauses are judged by; None for a stored log.
        data: The ends of each data topic in the log, for the lag.
        assigned: The member that each partition is assigned to.
        wanted: The group and the data topic to show.
    """
    parts: dict[str, list[_GroupPart]] = {}
    for _, partition in sorted(world.partitions.items()):
        for name, group in partition.groups.items():
            if wanted.has_group(name):
                parts.setdefault(name, []).append(_GroupPart(partition, group, at_ms))
    certain = {number for number, partition in world.partitions.items() if partition.certain}
    members = assigned or {}
    groups = []
    for name, own in sorted(parts.items()):
        keys = [
            part.key(place, key, data, members.get(name, {}).get(place))
            for part in own
            for place, key in part.group.keys.items()
            if wanted.has_topic(place[0])
        ]
        groups.append(_group(name, own, certain, keys))
    return WorldView(world, wanted, at_ms, tuple(groups))


def to_json(view: WorldView) -> dict[str, Any]:
    """Return what `replay --json` shows, for the groups and keys in `view`, with the advice of `view`."""
    stored = summary(view.world)
    groups = {}
    for group in view.groups:
        rows = {(row["topic"], row["partition"]): row for row in stored["groups"][group.name]["partitions"]}
        groups[group.name] = {
            "paused_until": stored["groups"][group.name]["paused_until"],
            "paused": group.is_paused,
            **origin_json(group.pause_origin),
            "settings": settings_json(group.settings) | {"accepted": group.settings_accepted},
            "differences": list(map(str, group.differences)),
            "partitions": [rows[key.place] | _added(key) for key in group.keys],
        }
    return {
        "at_ms": view.at_ms,
        "coordination_partitions": [
            {
                "partition": partition.number,
                "certain": partition.certain,
                "next_offset": partition.next_offset,
                "log_time_ms": partition.log_time_ms,
            }
            for partition in view.partitions
        ],
        "invalid": stored["invalid"],
        "refused": stored["refused"],
        "groups": groups,
    }


def _added(key: KeyOverview) -> dict[str, Any]:
    lag = key.lag or PartitionLag()
    added = {
        "freshness": None if key.last_heartbeat is None else key.last_heartbeat.freshness,
        "data_end": lag.end,
        "lag": lag.records,
        "lag_ms": lag.age_ms,
        "lag_unknown": lag.unknown,
    }
    if key.assigned is None:
        return added
    return added | {"assigned": key.assigned.member, "assigned_since_ms": key.assigned.since_ms}


def origin_json(origin: PauseOrigin | None) -> dict[str, str | None]:
    """Return who paused a group, and why, as JSON values."""
    instance, client, reason = origin or PauseOrigin(None)
    return {"paused_by": instance, "paused_by_client": client, "pause_reason": reason}


def settings_json(settings: GroupSettings) -> dict[str, Any]:
    """Return a group's settings as a JSON value."""
    return {
        "heartbeat_interval_ms": settings.heartbeat_interval_ms,
        "rule_set": settings.rule_set,
        "delivery": settings.delivery,
        "features": list(settings.features),
    }


NO_SETTINGS: Final = "default: no settings record yet, so the rules of Go consumers apply"
"""The text that is shown for a group without settings."""


@dataclass(frozen=True, slots=True)
class _GroupPart:
    """A group in one coordination partition, judged by the clock `at_ms`."""

    partition: PartitionWorld
    group: Group
    at_ms: int | None

    @property
    def now_ms(self) -> int:
        """The later of log time and the clock, because log time stops in a log without new records."""
        return max(self.partition.log_time_ms or 0, self.at_ms or 0)

    @property
    def is_paused(self) -> bool:
        return self.group.is_paused(self.now_ms)

    def pause_text(self) -> str | None:
        until_s = self.group.paused_until_s
        if not self.is_paused or until_s is None:
            return None
        return pause_end_text(utc_to_second(until_s), self.group.pause_origin)

    def settings_text(self) -> str | None:
        return settings_text(self.group.settings) if self.group.settings_accepted else None

    def key(
        self, place: DataPartitionId, key: Key, data: Mapping[str, DataTopicEnds] | None, assigned: Assignee | None
    ) -> KeyOverview:
        return KeyOverview(
            place,
            key,
            self._last_heartbeat(key.owner, key.last_beat_ms),
            None if data is None else _lag(key, place[1], data[place[0]], is_go=self.group.is_go),
            tuple(RangeOverview(each, self._last_heartbeat(each.owner, each.last_beat_ms)) for each in key.ranges),
            assigned,
        )

    def _last_heartbeat(self, owner: Owner | None, last_beat_ms: int) -> LastHeartbeat | None:
        if owner is None or self.at_ms is None:
            return None if owner is None else LastHeartbeat(last_beat_ms)
        silent_ms = self.now_ms - last_beat_ms
        return LastHeartbeat(last_beat_ms, silent_ms, freshness(silent_ms, self.group.settings.heartbeat_interval_ms))


def _group(name: str, parts: Collection[_GroupPart], certain: set[int], keys: Iterable[KeyOverview]) -> GroupOverview:
    groups = [part.group for part in parts]
    given = next((group for group in groups if group.settings_accepted), groups[0])
    last_paused = max(groups, key=lambda group: -1 if group.paused_until_s is None else group.paused_until_s)
    return GroupOverview(
        name=name,
        settings=given.settings,
        settings_accepted=given.settings_accepted,
        paused_until_s=last_paused.paused_until_s,
        pause_origin=last_paused.pause_origin,
        is_paused=any(part.is_paused for part in parts),
        differences=(
            *_differing("paused until", parts, certain, _GroupPart.pause_text),
            *_differing("settings", parts, certain, _GroupPart.settings_text),
        ),
        keys=tuple(sorted(keys, key=lambda key: key.place)),
    )


def _differing(
    what: str, parts: Iterable[_GroupPart], certain: set[int], value_of: Callable[[_GroupPart], str | None]
) -> Iterator[Difference]:
    """Yield each value that is in force in some of the `certain` coordination partitions, but not in all."""
    where: dict[str, set[int]] = {}
    for part in parts:
        value = value_of(part)
        if part.partition.certain and value is not None:
            where.setdefault(value, set()).add(part.partition.number)
    for value, numbers in where.items():
        if numbers != certain:
            yield Difference(f"{what} {value}: in coordination partitions {runs_text(numbers)} only")


def unread_in(topic: DataTopicEnds, partition: int, key: Key, *, is_go: bool) -> UnreadRecords | LagUnknownReason:
    """Return the unread part of a partition for the group with this key, or why it is not known."""
    if topic.bounds is None or topic.topic_id is None:
        return topic.unknown or LagUnknownReason.UNAVAILABLE
    at = topic.bounds.get(partition)
    if at is None:
        return LagUnknownReason.NO_PARTITION
    if not is_of_topic(key, topic.topic_id, is_go=is_go):
        return LagUnknownReason.OTHER_TOPIC
    if key.offset is None:
        return LagUnknownReason.NO_OFFSET
    return unread_records(key, topic.topic_id, at, is_go=is_go) or LagUnknownReason.BEYOND_END


def _lag(key: Key, partition: int, topic: DataTopicEnds, *, is_go: bool) -> PartitionLag:
    at = None if topic.bounds is None else topic.bounds.get(partition)
    end = None if at is None else at.end
    unread = unread_in(topic, partition, key, is_go=is_go)
    if isinstance(unread, LagUnknownReason):
        return PartitionLag(end, unknown=unread)
    age_ms = topic.ages_ms.get((partition, unread.first)) if unread.records else 0
    return PartitionLag(end, unread.records, age_ms=age_ms)
