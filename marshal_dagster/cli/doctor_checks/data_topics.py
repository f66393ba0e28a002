"""The data topics that the log names: whether what is still to be read will be there when it is read.

What a broker keeps is judged against each group's offset, by the offsets of records of an age: no record is read.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.doctor_checks import acls
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError
from marshal_dagster.kafka.inspection import KafkaInspector, TopicInfo
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import World

RETIRED_MS: Final = 32 * 86_400_000
"""For how long nobody was heard of in a group that looks retired: longer than a monthly job is silent."""
_SET_POSITION: Final = "look at what was done, then set the position: marshal-dagster position set"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a group stands in a data partition, and in which incarnation of the topic, as the log says."""

    group: str
    partition: int
    offset: int | None = None
    topic_id: str | None = None


@dataclass(frozen=True, slots=True)
class DataTopic:
    """A data topic as its cluster has it, as far as the log names its partitions.

    `bounds` end where no open transaction holds a reader back, `ends` with the next record's offset. `settings` are
    empty where they may not be seen. `young_from` has the first offset that is younger than half the retention, None
    where there is no such record; it is empty where nothing is deleted by age.
    """

    topic_info: TopicInfo
    settings: Mapping[str, str]
    bounds: Mapping[int, OffsetBounds]
    ends: Mapping[int, int]
    young_from: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name."""
        return self.topic_info.name

    @property
    def policies(self) -> Collection[str]:
        """How the broker cleans up: `delete`, `compact`, or both."""
        return [each.strip() for each in self.settings.get("cleanup.policy", "").split(",")]

    def limit(self, setting: str) -> int | None:
        """Give a limit on what is kept; None: there is none."""
        value = int(self.settings.get(setting, "-1"))
        return value if "delete" in self.policies and value >= 0 else None


def positions(world: World) -> dict[str, list[Position]]:
    """Give the positions that the log knows, by data topic."""
    found: dict[str, list[Position]] = {}
    for group, (topic, partition), _, key in world.keys():  # noqa: SIM118 - no mapping
        found.setdefault(topic, []).append(Position(group, partition, key.offset, key.data_topic_id))
    return found


def retired(world: World, at_ms: int) -> dict[str, int]:
    """Give the groups in which nobody was heard of for `RETIRED_MS` by the clock `at_ms`, each with when that was.

    One of which no key tells when, as after ranges were done and released, is none of them.
    """
    heard_ms: dict[str, int] = {}
    for group, _, _, key in world.keys():  # noqa: SIM118 - no mapping
        latest_ms = max([key.last_beat_ms, *(range_.last_beat_ms for range_ in key.ranges)])
        heard_ms[group] = max(heard_ms.get(group, 0), latest_ms)
    return {group: last_ms for group, last_ms in heard_ms.items() if 0 < last_ms < at_ms - RETIRED_MS}


def check_data_topics(
    cluster: KafkaInspector, world: World, asker: acls.Principal, at_ms: int, *, is_member: bool
) -> Iterator[Finding]:
    """Check each data topic that the log names, by the clock `at_ms` (unix ms); then say how many there are.

    Where retired groups stand is not judged: what they leave unread will be deleted, and nobody means to read it.
    `is_member`: who asks may claim, and so should be able to read them.
    """
    unseen, held = 0, 0
    named, gone = positions(world), retired(world, at_ms)
    for name, every in sorted(named.items()):
        at = [each for each in every if each.group not in gone]
        if not at:
            continue
        try:
            topic_info = cluster.topic_info(name)
            settings = _settings(cluster, name)
            topic = read_data_topic(cluster, topic_info, settings, at, at_ms)
        except AuthorizationError:
            yield acls.missing_describe(name, asker, is_needed=False)
            continue
        except TopicNotFoundError as error:
            yield _missing(name, at, error)
            continue
        except MarshalError as error:
            yield Finding("data topics", CheckState.NOT_CHECKED, str(error))
            return
        unseen, held = unseen + (not settings), held + held_back(topic)
        if (right := acls.of_data_topic(topic_info, asker, is_member=is_member)) is not None:
            yield right
        yield from judge(topic, at, asker.servers)
    yield from (_retired(group, last_ms, named, at_ms) for group, last_ms in sorted(gone.items()))
    yield _summary(len(named), unseen, held)


def _retired(group: str, last_ms: int, named: Mapping[str, Iterable[Position]], at_ms: int) -> Finding:
    topics = [topic for topic, at in sorted(named.items()) if any(each.group == group for each in at)]
    return Finding(
        f"group {group}",
        CheckState.OK,
        f"it looks retired: last heard of {output.utc(last_ms)}, {output.duration(at_ms - last_ms)} ago; where it "
        f"stands in {', '.join(topics)} is not judged until somebody claims again",
    )


def _settings(cluster: KafkaInspector, topic: str) -> Mapping[str, str]:
    try:
        return cluster.settings(topic)
    except AuthorizationError:
        return {}


def _missing(name: str, at: Iterable[Position], error: TopicNotFoundError) -> Finding:
    return Finding(
        f"data topic {name}",
        CheckState.WARNING,
        f"{_where(at)}: {error}",
        "a batch of it fails; if it was deleted for good this says no more than that the log still names it",
        "check the name of the topic and which cluster has it (--data-connection)",
    )


def _summary(topics: int, unseen: int, held: int) -> Finding:
    """Say what is no fault: markers of transactions have offsets of their own, and open ones hold readers back."""
    parts = [f"the log names {topics}"]
    if unseen:
        parts.append(f"the settings of {unseen} may not be seen (that takes DescribeConfigs)")
    if held:
        parts.append(
            f"open transactions hold back {held} offsets: batches end before them, and if it stays so "
            "kafka-transactions find-hanging shows whose they are"
        )
    return Finding("data topics", CheckState.OK, "; ".join(parts))


def read_data_topic(
    cluster: KafkaInspector, topic_info: TopicInfo, settings: Mapping[str, str], at: Iterable[Position], at_ms: int
) -> DataTopic:
    """Look up a data topic at these positions, by the clock `at_ms`. Raises `MarshalError`."""
    name, partitions = topic_info.name, {each.partition for each in at} & topic_info.replicas.keys()
    # The ends come first: of what is written in between nothing may look as if a transaction held it back.
    ends = {number: each.end for number, each in cluster.offsets(name, partitions, committed_only=False).items()}
    bounds = cluster.offsets(name, partitions)
    topic = DataTopic(topic_info, settings, bounds, ends)
    kept_ms = topic.limit("retention.ms")
    if kept_ms is None:
        return topic
    young_from = cluster.offsets_at(name, partitions, at_ms - kept_ms // 2)
    return DataTopic(
        topic_info, settings, bounds, ends, {partition: young_from.get(partition) for partition in partitions}
    )


def judge(topic: DataTopic, at: Collection[Position], servers: str) -> Iterator[Finding]:
    """Tell what is wrong with a data topic for the groups that read it; nothing where all is well."""
    here = [
        each for each in at if each.partition in topic.bounds and each.topic_id in {None, topic.topic_info.topic_id}
    ]
    yield from _other_incarnation(topic, at)
    yield from _missing_partitions(topic, at)
    yield from _beyond_end(topic, here)
    yield from _lost(topic, here)
    yield from _soon_lost(topic, here, servers)
    yield from _compaction(topic, servers)
    yield from _unclean_election(topic, servers)


def held_back(topic: DataTopic) -> int:
    """Count the offsets that open transactions keep from readers."""
    return sum(max(0, end - topic.bounds[number].end) for number, end in topic.ends.items())


def _other_incarnation(topic: DataTopic, at: Collection[Position]) -> Iterator[Finding]:
    others = [each for each in at if each.topic_id not in {None, topic.topic_info.topic_id}]
    if others:
        yield _problem(
            topic,
            f"{_where(others)} stand in another topic of that name, which was deleted; the one now there has the id "
            f"{topic.topic_info.topic_id}",
            "an offset of the old topic means nothing in the new one: every batch of these partitions fails",
            _SET_POSITION,
        )


def _missing_partitions(topic: DataTopic, at: Collection[Position]) -> Iterator[Finding]:
    missing = [each for each in at if each.partition not in topic.topic_info.replicas]
    if missing:
        yield _problem(
            topic,
            f"{_where(missing)} are named in the log, but the topic has {len(topic.topic_info.replicas)} partitions",
            "partitions are never taken away from a topic: it was made anew, and offsets of the old one mean nothing",
            _SET_POSITION,
        )


def _beyond_end(topic: DataTopic, at: Collection[Position]) -> Iterator[Finding]:
    beyond = [each for each in at if each.offset is not None and each.offset > topic.ends[each.partition]]
    if beyond:
        yield _problem(
            topic,
            f"{_where(beyond)} stand beyond the end",
            "records that were read are gone (an unclean leader election, or the topic was made anew): every batch of "
            "these partitions fails",
            _SET_POSITION,
        )


def _lost(topic: DataTopic, at: Collection[Position]) -> Iterator[Finding]:
    lost = [each for each in at if each.offset is not None and each.offset < topic.bounds[each.partition].start]
    if lost:
        records = sum(topic.bounds[each.partition].start - (each.offset or 0) for each in lost)
        yield _problem(
            topic,
            f"{_where(lost)} stand before what the broker still has: {records} offsets were deleted unread",
            "at least once reads what is left and reports the loss; the other delivery modes fail until somebody "
            "accepts it",
            "accept the loss for one run, or set the position past it; then keep more, or run more often",
        )


def _soon_lost(topic: DataTopic, at: Collection[Position], servers: str) -> Iterator[Finding]:
    """What lies before `young_from` is in the older half of what the retention keeps."""
    old = [(each, records) for each in at if (records := _old_records(topic, each)) > 0]
    kept_ms = topic.limit("retention.ms")
    why = "retention deletes unread records like all others, and nobody waits for the reader"
    if old and kept_ms is not None:
        yield Finding(
            _name(topic),
            CheckState.WARNING,
            f"{_where(each for each, _ in old)} have {sum(records for _, records in old)} unread records older "
            f"than half of retention.ms ({output.duration(kept_ms)})",
            why,
            f"run the job more often, or longer; or {_alter(topic, servers, f'retention.ms={2 * kept_ms}')}",
        )
    kept_bytes = topic.limit("retention.bytes")
    large = [each for each in at if kept_bytes is not None and _is_in_older_half(topic, each)]
    if large and kept_bytes is not None:
        yield Finding(
            _name(topic),
            CheckState.WARNING,
            f"{_where(large)} stand in the older half of what retention.bytes={kept_bytes} has left",
            why,
            f"run the job more often, or longer; or {_alter(topic, servers, f'retention.bytes={2 * kept_bytes}')}",
        )


def _old_records(topic: DataTopic, at: Position) -> int:
    if at.offset is None or at.partition not in topic.young_from:
        return 0
    bounds, young_from = topic.bounds[at.partition], topic.young_from[at.partition]
    return (bounds.end if young_from is None else min(young_from, bounds.end)) - max(at.offset, bounds.start)


def _is_in_older_half(topic: DataTopic, at: Position) -> bool:
    """Tell by offsets: how many bytes a partition has is not told. Where nothing was deleted yet, there is room."""
    bounds = topic.bounds[at.partition]
    if at.offset is None or bounds.start == 0:
        return False
    return at.offset - bounds.start < (bounds.end - bounds.start) / 2


def _compaction(topic: DataTopic, servers: str) -> Iterator[Finding]:
    if "compact" in topic.policies:
        yield Finding(
            _name(topic),
            CheckState.WARNING,
            f"cleanup.policy is {topic.settings['cleanup.policy']}",
            "of records with the same key only the newest is kept: older ones may be gone before they are read, a plan "
            "that is redone may find fewer than the first time, and lag counts offsets that hold no record",
            f"if each record counts: {_alter(topic, servers, 'cleanup.policy=delete')}",
        )


def _unclean_election(topic: DataTopic, servers: str) -> Iterator[Finding]:
    if topic.settings.get("unclean.leader.election.enable") == "true":
        yield Finding(
            _name(topic),
            CheckState.WARNING,
            "unclean.leader.election.enable is true",
            "such an election can lose records and give their offsets to others, which then count as done",
            _alter(topic, servers, "unclean.leader.election.enable=false"),
        )


def _problem(topic: DataTopic, found: str, why: str, mend: str) -> Finding:
    return Finding(_name(topic), CheckState.PROBLEM, found, why, mend)


def _name(topic: DataTopic) -> str:
    return f"data topic {topic.name}"


def _where(at: Iterable[Position]) -> str:
    by_group: dict[str, set[int]] = {}
    for each in at:
        by_group.setdefault(each.group, set()).add(each.partition)
    return "; ".join(f"group {group}: partitions {world_view.listed(each)}" for group, each in sorted(by_group.items()))


def _alter(topic: DataTopic, servers: str, setting: str) -> str:
    return (
        f"kafka-configs --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic.name} "
        f"--add-config {setting}"
    )
