"""Check the data topics in the log: whether unread records still exist, and will exist until they are read.

The checks compare each group's position with the offsets that the broker keeps and with their age. No record is read.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import first_few
from marshal_dagster.cli import output
from marshal_dagster.cli.doctor_checks import acls
from marshal_dagster.cli.doctor_checks.finding import Finding, alter_topic, failed, ok, problem, warning
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError
from marshal_dagster.kafka.inspection import KafkaInspector, TopicInfo
from marshal_dagster.kafka.record_times import hidden_by_future
from marshal_dagster.protocol.state import Key, OffsetBounds, Phase
from marshal_dagster.protocol.unread_records import UnreadRecords, is_of_topic, unread_after
from marshal_dagster.protocol.world import World

RETIRED_MS: Final = 32 * 86_400_000
"""The least age of a retired group's last heartbeat. It is longer than a monthly job is silent."""
_MOST_NAMED: Final = 5
_SET_POSITION: Final = "check what was processed, then set the position: marshal-dagster position reset"


@dataclass(frozen=True, slots=True)
class Position:
    """A group's position in a data partition, from the log."""

    group: str
    partition: int
    key: Key = field(hash=False)
    is_go: bool = False

    def unread(self, at: OffsetBounds) -> UnreadRecords:
        """Return the part between the position and the end of `at`, without ranges that are done."""
        done = (range_ for range_ in self.key.ranges if range_.phase is Phase.DONE)
        return unread_after(at.start if self.key.offset is None else self.key.offset, done, at)


@dataclass(frozen=True, slots=True)
class CheckedTopic:
    """A data topic in its cluster, limited to the partitions that are in the log.

    `bounds` end before the first open transaction; `ends` are the offsets of the next records. `settings` are empty if
    they may not be read. `young_from` has the first offset that is younger than half the retention, or None if there is
    no such record. It is empty if nothing is deleted by age.
    """

    topic_info: TopicInfo
    settings: Mapping[str, str]
    bounds: Mapping[int, OffsetBounds]
    ends: Mapping[int, int]
    young_from: Mapping[int, int | None] = field(default_factory=dict)
    hidden: Mapping[int, int] = field(default_factory=dict)
    """By partition, the offset of `young_from` if that record has a time in the future."""

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.topic_info.name

    @property
    def title(self) -> str:
        """The name of the topic's findings."""
        return f"data topic {self.name}"

    @property
    def policies(self) -> Collection[str]:
        """The cleanup policies: `delete`, `compact`, or both."""
        return [each.strip() for each in self.settings.get("cleanup.policy", "").split(",")]

    def limit(self, setting: str) -> int | None:
        """Return a retention limit, or None without a limit."""
        value = int(self.settings.get(setting, "-1"))
        return value if "delete" in self.policies and value >= 0 else None


def positions(world: World) -> dict[str, list[Position]]:
    """Return the positions that are in the log, by data topic."""
    found: dict[str, list[Position]] = {}
    for name, (topic, partition), group, key in world.keys():  # noqa: SIM118 - no mapping
        found.setdefault(topic, []).append(Position(name, partition, key, group.is_go))
    return found


def retired(world: World, at_ms: int) -> dict[str, int]:
    """Return the groups whose last heartbeat is older than `RETIRED_MS` by the clock `at_ms`, with its time.

    A group without any heartbeat time, for example after ranges were done and released, is not retired.
    """
    last_beats_ms: dict[str, int] = {}
    for group, _, _, key in world.keys():  # noqa: SIM118 - no mapping
        latest_ms = max([key.last_beat_ms, *(range_.last_beat_ms for range_ in key.ranges)])
        last_beats_ms[group] = max(last_beats_ms.get(group, 0), latest_ms)
    return {group: last_ms for group, last_ms in last_beats_ms.items() if 0 < last_ms < at_ms - RETIRED_MS}


def check_data_topics(
    cluster: KafkaInspector, world: World, asker: acls.Principal, at_ms: int, *, is_member: bool
) -> Iterator[Finding]:
    """Check each data topic in the log by the clock `at_ms` (unix ms), then report how many there are.

    The positions of retired groups are not judged, because no member will read what they left unread. `is_member`: this
    user may claim, and so should be able to read the topics.
    """
    unseen, held = 0, 0
    named, retired_groups = positions(world), retired(world, at_ms)
    for name, found in sorted(named.items()):
        at = [position for position in found if position.group not in retired_groups]
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
            yield warning(
                f"data topic {name}",
                f"{_where(at)}: {error}",
                "a batch of this topic fails; if it was deleted for good, only its positions are left in the log",
                "check the name of the topic and which cluster has it (--data-connection)",
            )
            continue
        except MarshalError as error:
            yield failed("data topics", error)
            return
        unseen, held = unseen + (not settings), held + held_back(topic)
        if (right := acls.of_data_topic(topic_info, asker, is_member=is_member)) is not None:
            yield right
        yield from judge(topic, at, asker.servers)
    for group, last_ms in sorted(retired_groups.items()):
        topics = [topic for topic, at in sorted(named.items()) if any(position.group == group for position in at)]
        yield ok(
            f"group {group}",
            f"it looks retired: last heartbeat {output.utc(last_ms)}, {output.duration(at_ms - last_ms)} ago; its "
            f"positions in {', '.join(topics)} are not judged until a member claims again",
        )
    yield _summary(len(named), unseen, held)


def _settings(cluster: KafkaInspector, topic: str) -> Mapping[str, str]:
    try:
        return cluster.settings(topic)
    except AuthorizationError:
        return {}


def _summary(topics: int, unseen: int, held: int) -> Finding:
    parts = [f"{topics} in the log"]
    if unseen:
        parts.append(f"the settings of {unseen} may not be read (that needs DescribeConfigs)")
    if held:
        # Not a fault: transaction markers have offsets, and readers wait for open transactions.
        parts.append(
            f"open transactions hold back {held} offsets: batches end before them; if that does not change, "
            "kafka-transactions find-hanging shows the producers"
        )
    return ok("data topics", "; ".join(parts))


def read_data_topic(
    cluster: KafkaInspector, topic_info: TopicInfo, settings: Mapping[str, str], at: Iterable[Position], at_ms: int
) -> CheckedTopic:
    """Look up a data topic at these positions, by the clock `at_ms`. Raises `MarshalError`."""
    name, partitions = topic_info.name, {position.partition for position in at} & topic_info.replicas.keys()
    # The ends are read first, so that a record written meanwhile does not look as if a transaction held it back.
    ends = {number: each.end for number, each in cluster.offsets(name, partitions, committed_only=False).items()}
    topic = CheckedTopic(topic_info, settings, cluster.offsets(name, partitions), ends)
    kept_ms = topic.limit("retention.ms")
    if kept_ms is None:
        return topic
    young_from = cluster.offsets_at(name, partitions, at_ms - kept_ms // 2)
    return replace(
        topic,
        young_from={partition: young_from.get(partition) for partition in partitions},
        hidden=hidden_by_future(cluster, name, young_from),
    )


def held_back(topic: CheckedTopic) -> int:
    """Return the number of offsets that readers cannot read yet because of open transactions."""
    return sum(max(0, end - topic.bounds[partition].end) for partition, end in topic.ends.items())


def judge(topic: CheckedTopic, at: Collection[Position], servers: str) -> Iterator[Finding]:
    """Yield the findings on a data topic for the groups that read it."""
    topic_id, partitions = topic.topic_info.topic_id, topic.topic_info.replicas
    if topic_id == NO_TOPIC_ID:
        yield warning(
            topic.title,
            "it has no id",
            "a topic that is deleted and re-created under this name is not noticed, so groups may skip or repeat "
            "messages; only at_least_once reads it without allow_topic_without_id",
            "use brokers of Kafka 2.8 or newer; until then, set the groups' positions after you re-create the topic",
        )
    own = [position for position in at if is_of_topic(position.key, topic_id, is_go=position.is_go)]
    read = [(position, position.key.offset) for position in own if position.partition in topic.bounds]
    known = [(position, offset) for position, offset in read if offset is not None]
    for wrong, found, why in (
        (
            [position for position in at if position not in own],
            f"have positions in a deleted topic of that name; the present topic has the id {topic_id}",
            "an offset of the old topic means nothing in the new one: every batch of these partitions fails",
        ),
        (
            [position for position in at if position.partition not in partitions],
            f"are in the log, but the topic has {len(partitions)} partitions",
            "a topic never loses partitions: it was deleted and re-created, and offsets of the old topic mean nothing",
        ),
        (
            [position for position, offset in known if offset > topic.ends[position.partition]],
            "have positions beyond the end",
            "an unclean leader election lost records, or the topic was re-created: batches of these partitions fail",
        ),
    ):
        if wrong:
            yield problem(topic.title, f"{_where(wrong)} {found}", why, _SET_POSITION)
    deleted = {position: position.unread(topic.bounds[position.partition]).deleted for position, _ in known}
    lost = {position: count for position, count in deleted.items() if count > 0}
    if lost:
        yield problem(
            topic.title,
            f"{_where(lost)} have positions before what the broker still has: {sum(lost.values())} offsets were "
            "deleted unread",
            "at_least_once reads what is left and reports the loss; the other delivery modes fail until an operator "
            "accepts it",
            "accept the loss for one run, or set the position after it; then raise the retention, or run more often",
        )
    yield from _soon_lost(topic, known, servers)
    if topic.hidden and known:
        where = [f"partition {number}, offset {offset}" for number, offset in topic.hidden.items()]
        yield warning(
            topic.title,
            f"{len(where)} partitions have a record with a time in the future: {first_few(where, _MOST_NAMED)}",
            "Kafka finds a time by the first record of that time or later, so the age of later records is unknown; "
            "retention by age keeps these records until that time has passed",
            "correct the sender's clock or unit of time (Kafka uses milliseconds). To let brokers reject such records: "
            f"{alter_topic(topic.name, 'message.timestamp.after.max.ms=3600000', servers)}",
        )
    yield from _unsafe_settings(topic, servers)


def _soon_lost(topic: CheckedTopic, known: Collection[tuple[Position, int]], servers: str) -> Iterator[Finding]:
    """Yield a warning for unread records in the older half of what the retention keeps."""
    why = "retention also deletes unread records; it does not wait for the reader"
    old = {position: count for position, _ in known if (count := _old_records(topic, position)) > 0}
    kept_ms = topic.limit("retention.ms")
    if old and kept_ms is not None:
        fix = alter_topic(topic.name, f"retention.ms={2 * kept_ms}", servers)
        yield warning(
            topic.title,
            f"{_where(old)} have {sum(old.values())} unread records older than half of retention.ms "
            f"({output.duration(kept_ms)})",
            why,
            f"{fix}; then run the job more often, or longer",
        )
    kept_bytes = topic.limit("retention.bytes")
    large = [position for position, _ in known if _is_in_older_half(topic.bounds[position.partition], position)]
    if large and kept_bytes is not None:
        fix = alter_topic(topic.name, f"retention.bytes={2 * kept_bytes}", servers)
        yield warning(
            topic.title,
            f"{_where(large)} have positions in the older half of what retention.bytes={kept_bytes} has left",
            why,
            f"{fix}; then run the job more often, or longer",
        )


def _old_records(topic: CheckedTopic, position: Position) -> int:
    """Return the number of unread records before `young_from`."""
    if position.partition not in topic.young_from:
        return 0
    bounds, young_from = topic.bounds[position.partition], topic.young_from[position.partition]
    end = bounds.end if young_from is None else min(young_from, bounds.end)
    return position.unread(OffsetBounds(bounds.start, end)).records


def _is_in_older_half(bounds: OffsetBounds, position: Position) -> bool:
    """Judge by offsets, because brokers report no bytes. A partition without deleted records still has room."""
    return bounds.start > 0 and position.unread(bounds).margin < (bounds.end - bounds.start) / 2


def _unsafe_settings(topic: CheckedTopic, servers: str) -> Iterator[Finding]:
    if "compact" in topic.policies:
        yield warning(
            topic.title,
            f"cleanup.policy is {topic.settings['cleanup.policy']}",
            "only the newest record of each key is kept: older ones may be deleted before they are read, a repeated "
            "plan may find fewer records than the first time, and lag counts offsets without a record",
            f"if each record matters: {alter_topic(topic.name, 'cleanup.policy=delete', servers)}",
        )
    if topic.settings.get("unclean.leader.election.enable") == "true":
        yield warning(
            topic.title,
            "unclean.leader.election.enable is true",
            "such an election can lose records and reuse their offsets for others, which then count as processed",
            alter_topic(topic.name, "unclean.leader.election.enable=false", servers),
        )


def _where(at: Iterable[Position]) -> str:
    partitions: dict[str, set[int]] = {}
    for position in at:
        partitions.setdefault(position.group, set()).add(position.partition)
    return "; ".join(f"group {group}: partitions {runs_text(numbers)}" for group, numbers in sorted(partitions.items()))
