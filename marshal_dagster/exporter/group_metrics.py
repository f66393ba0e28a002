"""Make the values of the metrics of groups, topics and partitions from the world state and the data topics."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.exporter import definitions as names
from marshal_dagster.exporter.definitions import Definition, Row, Samples
from marshal_dagster.exporter.lag_times import LagTimes
from marshal_dagster.exporter.topic_reader import ExportedTopic
from marshal_dagster.protocol.messages import Invalid
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, exhausted, open_plans
from marshal_dagster.protocol.rules import Refusal
from marshal_dagster.protocol.staleness import Freshness, freshness, stale_after_ms
from marshal_dagster.protocol.state import Group, Key, Owner, Phase
from marshal_dagster.protocol.unread_records import unread_records
from marshal_dagster.protocol.world import PartitionWorld, World

_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the exporter serves."""

    groups: Collection[str] = ()
    """Only these groups; empty for all."""
    topics: Collection[str] = ()
    """Only these data topics; empty for all."""
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    """How often members take over a plan before it is exhausted."""
    per_partition: bool = True
    """Whether there are series of each partition, not only of each group and topic."""
    all_owners: bool = False
    """Whether fresh owners are named too, not only stale ones."""

    def has_group(self, name: str) -> bool:
        """Return whether the group is served."""
        return not self.groups or name in self.groups

    def has_topic(self, name: str) -> bool:
        """Return whether the data topic is served."""
        return not self.topics or name in self.topics


def data_topics(world: World, options: ExportOptions) -> set[str]:
    """Return the data topics of the groups that are served."""
    return {
        topic
        for group, (topic, _), _, _ in world.keys()  # noqa: SIM118 - no mapping
        if options.has_group(group) and options.has_topic(topic)
    }


@dataclass(frozen=True, slots=True)
class GroupView:
    """The world state and the data topics at one time."""

    world: World
    data: Mapping[str, ExportedTopic | None]
    times: LagTimes
    at_ms: int
    """The present time by this machine's clock, in unix milliseconds."""
    options: ExportOptions = ExportOptions()

    def samples(self) -> Samples:
        """Return the values of all metrics but those of the exporter itself."""
        samples = Samples()
        self._add_log(samples)
        self._add_groups(samples)
        self._add_plans(samples)
        for world in self.world.partitions.values():
            for name, group in world.groups.items():
                if self.options.has_group(name):
                    for topic, keys in self._keys_by_topic(group).items():
                        TopicView(self, name, group, topic, keys, world.present_ms(self.at_ms)).add_to(samples)
        for topic, found in self.data.items():
            samples.add(names.DATA_TOPIC_KNOWN, int(found is not None), topic)
            if found is not None and found.retention_s is not None:
                samples.add(names.DATA_TOPIC_RETENTION, found.retention_s, topic)
        return samples

    def _keys_by_topic(self, group: Group) -> dict[str, dict[int, Key]]:
        found: dict[str, dict[int, Key]] = {}
        for (topic, partition), key in group.keys.items():
            if self.options.has_topic(topic):
                found.setdefault(topic, {})[partition] = key
        return found

    def _add_log(self, samples: Samples) -> None:
        worlds = self.world.partitions.values()
        for refusal in Refusal:
            count = sum(world.refused[refusal] for world in worlds)
            samples.add(names.LOG_REFUSED, count, refusal.name.lower())
        for invalid in Invalid:
            count = sum(world.invalid[invalid] for world in worlds)
            samples.add(names.LOG_INVALID, count, invalid.name.lower())
        samples.add(names.LOG_UNCERTAIN, sum(not world.certain for world in worlds))
        times_ms = [world.log_time_ms for world in worlds if world.log_time_ms is not None]
        if times_ms:
            samples.add(names.LOG_TIME, max(times_ms) / _MS)

    def _add_groups(self, samples: Samples) -> None:
        parts: dict[str, list[tuple[PartitionWorld, Group]]] = {}
        for world in self.world.partitions.values():
            for name, group in world.groups.items():
                if self.options.has_group(name):
                    parts.setdefault(name, []).append((world, group))
        for name, found in parts.items():
            settings = next((group for _, group in found if group.settings_accepted), found[0][1]).settings
            samples.add(names.GROUP_STALE_AFTER, stale_after_ms(settings.heartbeat_interval_ms) / _MS, name)
            ends_s = [group.paused_until_s for world, group in found if group.is_paused(world.present_ms(self.at_ms))]
            samples.add(names.GROUP_PAUSED, int(bool(ends_s)), name)
            if ends_s:
                samples.add(names.GROUP_PAUSED_UNTIL, max(end_s for end_s in ends_s if end_s is not None), name)

    def _add_plans(self, samples: Samples) -> None:
        places = {
            (group, topic)
            for group, (topic, _), _, _ in self.world.keys()  # noqa: SIM118 - no mapping
            if self.options.has_group(group) and self.options.has_topic(topic)
        }
        unheld = open_plans(self.world, self.at_ms)
        for definition, plans in (
            (names.TOPIC_UNHELD_PLANS, unheld),
            (names.TOPIC_EXHAUSTED_PLANS, exhausted(unheld, self.options.max_attempts)),
        ):
            counts = Counter((plan.group, plan.topic) for plan in plans)
            for group, topic in sorted(places):
                samples.add(definition, counts[group, topic], group, topic)


@dataclass(slots=True)
class TopicView:
    """One data topic of one group."""

    view: GroupView
    name: str
    group: Group
    topic: str
    keys: Mapping[int, Key]
    now_ms: int
    rows: dict[Definition, list[Row]] = field(default_factory=dict)
    claims: Counter[Freshness] = field(default_factory=Counter)

    def add_to(self, samples: Samples) -> None:
        """Add the values of the topic, and of its partitions if they are served."""
        place = (self.name, self.topic)
        for partition, key in sorted(self.keys.items()):
            self._add_key((*place, str(partition)), key)
        for state in Freshness:
            samples.add(names.TOPIC_CLAIMS, self.claims[state], *place, state.value)
        samples.add(names.TOPIC_POSITION, sum(key.offset or 0 for key in self.keys.values()), *place)
        found = self.view.data.get(self.topic)
        if found is not None:
            samples.add(names.TOPIC_PARTITIONS, len(found.bounds), *place)
            for definition, value in self._lag(found):
                samples.add(definition, value, *place)
        if self.view.options.per_partition:
            for definition, rows in self.rows.items():
                samples.extend(definition, rows)
        else:
            owners = self.rows.get(names.PARTITION_OWNER, [])
            samples.extend(names.PARTITION_OWNER, owners)

    def _add(self, definition: Definition, labels: tuple[str, ...], value: float) -> None:
        self.rows.setdefault(definition, []).append((labels, value))

    def _add_key(self, labels: tuple[str, ...], key: Key) -> None:
        interval_ms = self.group.settings.heartbeat_interval_ms
        ages_ms = []
        for owner, last_beat_ms in _owners(key):
            silent_ms = self.now_ms - last_beat_ms
            state = freshness(silent_ms, interval_ms)
            self.claims[state] += 1
            ages_ms.append(silent_ms)
            if state is Freshness.STALE or self.view.options.all_owners:
                self._add(names.PARTITION_OWNER, (*labels, owner.instance), 1)
        self._add(names.PARTITION_CLAIMED, labels, int(bool(ages_ms)))
        if ages_ms:
            self._add(names.PARTITION_HEARTBEAT_AGE, labels, max(ages_ms) / _MS)
        if key.offset is not None:
            self._add(names.PARTITION_POSITION, labels, key.offset)
        attempts = [range_.attempts for range_ in key.ranges if range_.phase is Phase.PLANNED]
        attempts += [key.plan_attempts] if key.plan_end is not None else []
        if attempts:
            self._add(names.PARTITION_ATTEMPTS, labels, max(attempts))

    def _lag(self, topic: ExportedTopic) -> Iterator[tuple[Definition, float]]:
        """Add the lag of each partition, and yield the values of the whole topic."""
        lag = unknown = deleted = 0
        lag_s, margins = 0.0, []
        at_s = self.view.at_ms / _MS
        for partition, at in topic.bounds.items():
            labels = (self.name, self.topic, str(partition))
            unread = unread_records(self.keys.get(partition), topic.topic_id, at, is_go=self.group.is_go)
            if unread is None:
                unknown += 1
                continue
            age_s = 0.0
            if unread.records > 0:
                age_s = self.view.times.of(self.topic, partition).age_s(unread.first, at_s) or 0.0
                margins.append(unread.margin)
                self._add(names.PARTITION_MARGIN, labels, unread.margin)
            self._add(names.PARTITION_LAG, labels, unread.records)
            self._add(names.PARTITION_LAG_S, labels, round(age_s, 3))
            lag, lag_s, deleted = lag + unread.records, max(lag_s, age_s), deleted + unread.deleted
        yield names.TOPIC_LAG, lag
        yield names.TOPIC_LAG_S, round(lag_s, 3)
        yield names.TOPIC_LAG_UNKNOWN, unknown
        yield names.TOPIC_DELETED, deleted
        if margins:
            yield names.TOPIC_MARGIN, min(margins)


def _owners(key: Key) -> Iterator[tuple[Owner, int]]:
    """Yield each owner of the key or of one of its ranges, with the log time of its last heartbeat in ms."""
    held: Iterable[tuple[Owner | None, int]] = (
        (key.owner, key.last_beat_ms),
        *((range_.owner, range_.last_beat_ms) for range_ in key.ranges),
    )
    yield from ((owner, last_beat_ms) for owner, last_beat_ms in held if owner is not None)


def oldest_unread(world: World, topic: str, found: ExportedTopic, options: ExportOptions) -> dict[int, int]:
    """Return the smallest first unread offset of all groups, for each partition with unread records."""
    oldest: dict[int, int] = {}
    for name, group in world.partition_of(topic).groups.items():
        if not options.has_group(name) or not any(place[0] == topic for place in group.keys):
            continue
        for partition, at in found.bounds.items():
            unread = unread_records(group.keys.get((topic, partition)), found.topic_id, at, is_go=group.is_go)
            if unread is not None and unread.records > 0:
                oldest[partition] = min(unread.first, oldest.get(partition, unread.first))
    return oldest
