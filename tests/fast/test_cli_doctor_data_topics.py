"""`doctor` on the data topics in the log: records that were deleted unread, or soon will be."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import pytest

from marshal_dagster.cli.doctor_checks.acls import Principal
from marshal_dagster.cli.doctor_checks.data_topics import (
    RETIRED_MS,
    CheckedTopic,
    Position,
    check_data_topics,
    held_back,
    judge,
    positions,
    read_data_topic,
    retired,
)
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.inspection import KafkaInspector, Replicas, TopicInfo
from marshal_dagster.protocol.messages import ClaimingPartition, DataTopic, Heartbeat, coordination_partition, render
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner, Phase, Range
from marshal_dagster.protocol.world import World

ID = "7tPg1PQ3SOOgBg6Ha5P9nw"
OTHER_ID = "QN2EAngHR2eh1GKqIax1BQ"
READER = frozenset({Right.DESCRIBE, Right.READ})
DELETES = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
WEEK_MS = 604_800_000
HEARD_MS = 1_000
"""The time of the group's last heartbeat."""
ASKER = Principal("broker:9092", "dora")


def topic(
    settings: Mapping[str, str] | None = None,
    bounds: tuple[int, int] = (0, 100),
    *,
    end: int | None = None,
    young_from: Mapping[int, int | None] | None = None,
) -> CheckedTopic:
    """Return a topic with one partition that holds `bounds`; open transactions may hold back records up to `end`."""
    topic_info = TopicInfo("orders", ID, READER, {0: Replicas(1, 1, has_leader=True)})
    ends = {0: bounds[1] if end is None else end}
    return CheckedTopic(topic_info, {**DELETES, **(settings or {})}, {0: OffsetBounds(*bounds)}, ends, young_from or {})


def position(
    group: str, partition: int, offset: int | None, topic_id: str | None, *ranges: Range, is_go: bool = False
) -> Position:
    """Return a group's position, with ranges after it."""
    return Position(group, partition, Key(offset, data_topic_id=topic_id, ranges=ranges), is_go)


def judged(data: CheckedTopic, *at: Position) -> list[Finding]:
    """Return the findings, after a check that each has a description, a reason and a fix."""
    findings = list(judge(data, at or [position("g", 0, 50, ID)], "broker:9092"))
    assert all((finding.found, finding.why, finding.fix) for finding in findings)
    assert all(each.name == "data topic orders" for each in findings)
    return findings


def test_a_topic_in_order_has_no_finding() -> None:
    """Positions within the topic, at its ends, or missing are fine."""
    at = [position("g", 0, offset, topic_id) for offset in (0, 50, 100, None) for topic_id in (ID, None)]
    assert judged(topic(), *at) == []


def test_a_topic_without_an_id_is_a_warning() -> None:
    """Nothing shows that it was deleted and re-created."""
    data = topic()
    (finding,) = judged(
        replace(data, topic_info=replace(data.topic_info, topic_id=NO_TOPIC_ID)), position("g", 0, 50, NO_TOPIC_ID)
    )
    assert (finding.state, finding.found) == (CheckState.WARNING, "it has no id")


def test_a_topic_re_created_is_a_problem() -> None:
    """An offset of a topic with another id is reported as such and not checked further."""
    (finding,) = judged(topic(), position("g", 0, 5_000, OTHER_ID), position("h", 0, 50, ID))
    assert finding.state is CheckState.PROBLEM
    assert "group g: partitions 0 have positions in a deleted topic of that name" in finding.found
    assert "group h" not in finding.found


def test_a_group_of_go_consumers_has_no_topic_ids() -> None:
    """An id that is left from another time of the group is not compared, as members do not compare it."""
    assert judged(topic(), position("g", 0, 50, OTHER_ID, is_go=True)) == []


def test_ranges_that_are_done_were_read() -> None:
    """Retention that deletes them loses nothing, and they will not be lost."""
    done = Range(12, 70, Phase.DONE)
    lost, soon = judged(
        topic({"retention.ms": str(WEEK_MS)}, (40, 100), young_from={0: 80}), position("g", 0, 10, ID, done)
    )
    assert ("2 offsets were deleted unread" in lost.found, "have 10 unread records" in soon.found) == (True, True)
    at_end = position("g", 0, 10, ID, Range(10, 90, Phase.DONE), Range(95, 96, Phase.PLANNED))
    assert judged(topic({"retention.bytes": "1000"}, (40, 100)), at_end) == []


def test_a_partition_that_is_not_there_is_a_problem() -> None:
    """A topic never loses partitions, so it was re-created."""
    (finding,) = judged(topic(), position("g", 0, 50, ID), position("g", 3, 50, ID))
    assert (finding.state, "group g: partitions 3 are in the log" in finding.found) == (CheckState.PROBLEM, True)


@pytest.mark.parametrize(("offset", "is_wrong"), [(100, False), (110, False), (111, True)])
def test_a_position_beyond_the_end_is_a_problem(offset: int, *, is_wrong: bool) -> None:
    """The end includes the records of open transactions."""
    findings = judged(topic(end=110), position("g", 0, offset, ID))
    assert [finding.state for finding in findings] == [CheckState.PROBLEM] * is_wrong


@pytest.mark.parametrize(("offset", "is_wrong"), [(40, False), (39, True)])
def test_records_that_were_deleted_unread_are_a_problem(offset: int, *, is_wrong: bool) -> None:
    """A position before the first offset that is left has lost the records in between."""
    findings = judged(topic(bounds=(40, 100)), position("g", 0, offset, ID))
    assert [finding.state for finding in findings] == [CheckState.PROBLEM] * is_wrong
    assert all("1 offsets were deleted unread" in each.found for each in findings)


@pytest.mark.parametrize(
    ("offset", "young_from", "records"),
    [(50, 50, 0), (49, 50, 1), (20, None, 80), (100, None, 0), (30, 90, 60), (None, 90, 0)],
)
def test_unread_records_that_will_soon_be_deleted_are_reported(
    offset: int | None, young_from: int | None, records: int
) -> None:
    """Unread records older than half of the retention are counted; without a younger record all of them are."""
    data = topic({"retention.ms": str(WEEK_MS)}, young_from={0: young_from})
    findings = judged(data, position("g", 0, offset, ID))
    assert [finding.state for finding in findings] == [CheckState.WARNING] * bool(records)
    assert all(f"have {records} unread records" in each.found for each in findings)
    assert all(f"--add-config retention.ms={2 * WEEK_MS}" in each.fix for each in findings)


def test_what_is_lost_is_not_counted_as_what_will_be() -> None:
    """If retention has overtaken a position, the old records that are left are reported in addition to the loss."""
    data = topic({"retention.ms": str(WEEK_MS)}, (40, 100), young_from={0: 60})
    lost, old = judged(data, position("g", 0, 10, ID))
    assert ("30 offsets were deleted" in lost.found, "have 20 unread records" in old.found) == (True, True)


@pytest.mark.parametrize(
    ("offset", "start", "is_reported"), [(59, 20, True), (60, 20, False), (10, 0, False), (None, 20, False)]
)
def test_a_position_in_the_older_half_of_a_topic_of_limited_size_is_reported(
    offset: int | None, start: int, *, is_reported: bool
) -> None:
    """If size limits retention and records were deleted already, the older half is next."""
    findings = judged(topic({"retention.bytes": "1000"}, (start, 100)), position("g", 0, offset, ID))
    assert [finding.state for finding in findings] == [CheckState.WARNING] * is_reported
    assert all("retention.bytes=2000" in each.fix for each in findings)


def test_a_retention_that_does_not_count_is_not_reported() -> None:
    """A topic that is only compacted deletes nothing by age or size, whatever these settings are."""
    settings = {"cleanup.policy": "compact", "retention.ms": "1", "retention.bytes": "1"}
    (finding,) = judged(topic(settings, (20, 100), young_from={0: None}))
    assert "cleanup.policy" in finding.found


@pytest.mark.parametrize("policy", ["compact", "compact,delete", "delete, compact"])
def test_compaction_is_reported(policy: str) -> None:
    """Compaction can remove unread records."""
    (finding,) = judged(topic({"cleanup.policy": policy}))
    assert (finding.state, policy in finding.found) == (CheckState.WARNING, True)
    assert finding.fix.endswith("--entity-name orders --add-config cleanup.policy=delete")


def test_unclean_elections_are_reported() -> None:
    """An unclean election can reuse offsets that were read for other records."""
    (finding,) = judged(topic({"unclean.leader.election.enable": "true"}))
    assert (finding.state, "unclean" in finding.found) == (CheckState.WARNING, True)


def test_what_open_transactions_hold_back_is_counted() -> None:
    """A reader of committed records stops at the first open transaction."""
    assert (held_back(topic()), held_back(topic(end=107))) == (0, 7)


class Cluster:
    """A cluster with one topic, which may raise errors instead of answering."""

    def __init__(self, settings: Mapping[str, str], rights: frozenset[Right] = READER) -> None:
        self.held = rights
        self.kept = settings
        self.raises: dict[str, MarshalError] = {}
        self.requested_since_ms = 0
        self.future: dict[int, int] = {}

    def topic_info(self, name: str) -> TopicInfo:
        """Return its two partitions."""
        if name in self.raises:
            raise self.raises[name]
        return TopicInfo(name, ID, self.held, {number: Replicas(1, 1, has_leader=True) for number in (0, 1)})

    def settings(self, name: str) -> Mapping[str, str]:
        """Return its settings."""
        if f"settings of {name}" in self.raises:
            raise self.raises[f"settings of {name}"]
        return self.kept

    def offsets(self, _name: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return 100 records per partition, of which the last 7 are in an open transaction."""
        return {partition: OffsetBounds(0, 93 if committed_only else 100) for partition in partitions}

    def offsets_at(self, _name: str, partitions: Iterable[int], time_ms: int) -> dict[int, int]:
        """Return offset 60 for any past time, and the offsets in `future` for a time in the future."""
        if time_ms > time.time() * 1_000:
            return {number: self.future[number] for number in partitions if number in self.future}
        self.requested_since_ms = time_ms
        return dict.fromkeys(partitions, 60)


def world_of(topics: Iterable[str]) -> World:
    """Return a world state with partition 0 of each topic at offset 50, claimed by group g."""
    world = World(1)
    world.start(0, 0)
    offset = 0
    for name in topics:
        assert coordination_partition(name, 1) == 0
        about = {"instance": "i", "client": "c", "group": "g", "topic": name, "partition": 0, "time_s": 1}
        for record in (
            ClaimingPartition(**about),  # type: ignore[arg-type]
            DataTopic(**about, topic_id=ID),  # type: ignore[arg-type]
            Heartbeat(**about, offset=50),  # type: ignore[arg-type]
        ):
            world.partitions[0].apply(offset, HEARD_MS, render(record))
            offset += 1
    return world


def check(cluster: Cluster, *topics: str, at_ms: int = WEEK_MS) -> list[Finding]:
    """Check the data topics in the log."""
    return list(check_data_topics(cast("KafkaInspector", cluster), world_of(topics), ASKER, at_ms, is_member=True))


class CutCluster(Cluster):
    """A cluster that has deleted all unread records of the group."""

    def offsets(self, _name: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return empty bounds."""
        assert committed_only in {True, False}
        return {partition: OffsetBounds(100, 100) for partition in partitions}


@pytest.mark.parametrize("late_ms", [0, 1])
def test_a_group_that_nobody_was_heard_of_for_long_is_noted(late_ms: int) -> None:
    """A loss is a problem for 32 days after the last heartbeat; then the group counts as retired."""
    findings = check(CutCluster(DELETES), "orders", at_ms=HEARD_MS + RETIRED_MS + late_ms)
    if not late_ms:
        assert [finding.state for finding in findings] == [CheckState.PROBLEM, CheckState.OK]
        return
    note, summary = findings
    assert (note.name, note.state, summary.state) == ("group g", CheckState.OK, CheckState.OK)
    assert "it looks retired: last heartbeat 1970-01-01 00:00:01.000Z, 32 d 0 h ago" in note.found
    assert "its positions in orders are not judged" in note.found


def test_a_retired_group_hides_nothing_of_the_others() -> None:
    """If a topic has a retired group and an active one, the active one is checked."""
    world, now_ms = world_of(["orders"]), HEARD_MS + 2 * RETIRED_MS
    about = {"instance": "j", "client": "c", "group": "h", "topic": "orders", "partition": 0, "time_s": 1}
    for offset, record in enumerate((ClaimingPartition(**about), Heartbeat(**about, offset=7)), start=3):  # type: ignore[arg-type]
        world.partitions[0].apply(offset, now_ms - 1, render(record))
    assert retired(world, now_ms) == {"g": HEARD_MS}
    found = check_data_topics(cast("KafkaInspector", CutCluster(DELETES)), world, ASKER, now_ms, is_member=True)
    problem, note, _ = found
    assert (problem.state, "group h" in problem.found, "group g" in problem.found) == (CheckState.PROBLEM, True, False)
    assert note.name == "group g"


def test_a_group_of_which_no_time_is_known_is_not_retired() -> None:
    """An example is a group whose ranges are all done and released."""
    world = world_of(["orders"])
    for _, _, _, key in world.keys():  # noqa: SIM118 - no mapping
        key.last_beat_ms = 0
    assert retired(world, HEARD_MS + 2 * RETIRED_MS) == {}


def test_a_held_range_is_a_sign_of_life() -> None:
    """A group that claims ranges sends heartbeats only for these."""
    world, now_ms = world_of(["orders"]), HEARD_MS + 2 * RETIRED_MS
    for _, _, _, key in world.keys():  # noqa: SIM118 - no mapping
        key.ranges = (Range(50, 60, Phase.CLAIMED, Owner("i", "c", 1), now_ms),)
    assert retired(world, now_ms) == {}


def test_positions_are_those_of_the_log() -> None:
    """Group, partition, offset and data topic id come from the log."""
    (found,) = positions(world_of(["orders"]))["orders"]
    assert (found.group, found.partition, found.key.offset, found.key.data_topic_id) == ("g", 0, 50, ID)


def test_a_topic_is_looked_up_where_the_log_names_it() -> None:
    """Only existing partitions are looked up.

    If retention has a time limit, records younger than half of it are, too.
    """
    cluster = Cluster({**DELETES, "retention.ms": "1000"})
    topic_info = cluster.topic_info("orders")
    at = [position("g", 1, 50, ID), position("g", 9, 50, ID)]
    found = read_data_topic(cast("KafkaInspector", cluster), topic_info, cluster.kept, at, 10_000)
    assert (found.bounds, found.ends, found.young_from) == ({1: OffsetBounds(0, 93)}, {1: 100}, {1: 60})
    assert cluster.requested_since_ms == 10_000 - 500
    assert read_data_topic(cast("KafkaInspector", cluster), topic_info, DELETES, at, 10_000).young_from == {}


def test_times_in_the_future_are_reported() -> None:
    """They hide later records from each look-up by time, so partition and offset are named."""
    cluster = Cluster({**DELETES, "retention.ms": "1000"})
    cluster.future = {0: 60}
    (finding,) = (found for found in check(cluster, "orders") if "future" in found.found)
    assert finding.state is CheckState.WARNING
    assert finding.found == "1 partitions have a record with a time in the future: partition 0, offset 60"
    assert "message.timestamp.after.max.ms=3600000" in finding.fix
    cluster.future = {0: 61}
    assert not any("future" in found.found for found in check(cluster, "orders"))


class BusyCluster(Cluster):
    """A cluster whose topics get 10 records between any two requests, without transactions."""

    end = 0

    def offsets(self, _name: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return the bounds of all records so far."""
        assert committed_only in {True, False}
        self.end += 10
        return {partition: OffsetBounds(0, self.end) for partition in partitions}


def test_what_is_written_meanwhile_is_no_transaction() -> None:
    """The end of all records is requested first, so records written later do not count as held back."""
    cluster = BusyCluster(DELETES)
    at = [position("g", 0, 5, ID)]
    found = read_data_topic(cast("KafkaInspector", cluster), cluster.topic_info("orders"), DELETES, at, 0)
    assert held_back(found) == 0


def test_what_all_topics_come_to_is_said_last() -> None:
    """The number of topics and of offsets held back by open transactions is information, not a problem."""
    (finding,) = check(Cluster(DELETES), "orders", "flights")
    assert finding.state is CheckState.OK
    assert "2 in the log" in finding.found
    assert "open transactions hold back 14 offsets" in finding.found
    (finding,) = check(Cluster(DELETES))
    assert finding.found == "0 in the log"


def test_what_cannot_be_seen_of_one_topic_keeps_nothing_from_the_others() -> None:
    """A topic that is missing or hidden is a warning; the others are checked all the same."""
    cluster = Cluster({**DELETES, "cleanup.policy": "compact"})
    cluster.raises = {"a": TopicNotFoundError("no such topic"), "b": AuthorizationError("DESCRIBE")}
    missing, forbidden, compacted, summary = check(cluster, "a", "b", "c")
    assert (missing.name, missing.state, bool(missing.fix)) == ("data topic a", CheckState.WARNING, True)
    assert (forbidden.state, "--topic b" in forbidden.fix) == (CheckState.WARNING, True)
    assert (compacted.name, summary.state) == ("data topic c", CheckState.OK)


def test_settings_that_may_not_be_seen_are_counted() -> None:
    """Without DESCRIBE_CONFIGS the offsets are checked, and the summary states what was not."""
    cluster = Cluster(DELETES)
    cluster.raises = {"settings of orders": AuthorizationError("DESCRIBE_CONFIGS")}
    (summary,) = check(cluster, "orders")
    assert "the settings of 1 may not be read" in summary.found


def test_a_data_topic_without_read_is_reported() -> None:
    """A principal that can describe but not read a topic cannot process it."""
    right, _ = check(Cluster(DELETES, frozenset({Right.DESCRIBE})), "orders")
    assert (right.name, right.state) == ("rights", CheckState.WARNING)


def test_a_cluster_that_stops_answering_is_reported_once() -> None:
    """The timeout of one request is not repeated for each topic."""
    cluster = Cluster(DELETES)
    cluster.raises = {"a": UnavailableError("gone")}
    (finding,) = check(cluster, "a", "b")
    assert (finding.state, bool(finding.why), bool(finding.fix)) == (CheckState.PROBLEM, True, True)
