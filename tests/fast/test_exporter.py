"""The exporter: what it serves of the log's state, at which cost for cardinality, and how it fails."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    AuthorizationError,
    CoordinationLogChangedError,
    MarshalError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.exporter import exporter as exporter_module
from marshal_dagster.exporter.definitions import DEFINITIONS, Kind
from marshal_dagster.exporter.exporter import FAILING_AFTER_S, Exporter
from marshal_dagster.exporter.group_metrics import ExportOptions
from marshal_dagster.exporter.lag_times import EndTimes
from marshal_dagster.exporter.topic_reader import TopicReader
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    ReleaseGroup,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog

TOPIC_ID, OTHER_ID = "A" * 22, "B" * 22
PARTITIONS = 4
HI_MS = 30_000
DAY_MS = 86_400_000
Found = dict[str, dict[tuple[str, ...], float]]


@dataclass
class Cluster:
    """The data topics: `bounds` by topic and partition; the topics in `errors` raise."""

    bounds: dict[str, dict[int, OffsetBounds]] = field(default_factory=dict)
    errors: dict[str, MarshalError] = field(default_factory=dict)
    offset_errors: dict[str, MarshalError] = field(default_factory=dict)
    settings_error: MarshalError | None = None
    ids: dict[str, str] = field(default_factory=dict)
    past: dict[int, int] = field(default_factory=dict)
    """For each time the offset in partition 0 of the first record of that time or later."""
    retention_ms: int | None = 7 * DAY_MS
    requested: list[str] = field(default_factory=list)

    def describe(self, topic: str) -> TopicDescription:
        """Return the topic, or raise its error."""
        self.requested.append(topic)
        if topic in self.errors:
            raise self.errors[topic]
        return TopicDescription(topic, self.ids.get(topic, TOPIC_ID), tuple(self.bounds[topic]), 1)

    def offsets(self, topic: str, partitions: Collection[int]) -> dict[int, OffsetBounds]:
        """Return the bounds of the partitions, or raise if there are fewer, or the topic's error."""
        if topic in self.offset_errors:
            raise self.offset_errors[topic]
        if set(partitions) - set(self.bounds[topic]):
            raise TopicNotFoundError("no such partition")
        return {partition: self.bounds[topic][partition] for partition in partitions}

    def offsets_at(self, _: str, partitions: Collection[int], at_ms: int) -> dict[int, int]:
        """Return the offset of the latest known time that is not later."""
        self.requested.append("times")
        known = [offset for time_ms, offset in sorted(self.past.items()) if time_ms >= at_ms]
        return dict.fromkeys(partitions, known[0]) if known else {}

    def settings(self, _: str) -> dict[str, str]:
        """Return the retention, or raise without the right."""
        if self.settings_error is not None:
            raise self.settings_error
        if self.retention_ms is None:
            raise AuthorizationError("DESCRIBE_CONFIGS is missing")
        return {"retention.ms": str(self.retention_ms), "cleanup.policy": "delete"}


class Scene:
    """A coordination log in memory, a cluster, and an exporter that reads them by one clock."""

    def __init__(self) -> None:
        """Create an empty log, and topic orders with three partitions."""
        self.clock = ManualClock()
        self.broker = MemoryBroker(PARTITIONS, now_ms=self.clock.wall_ms)
        self.cluster = Cluster({"orders": {number: OffsetBounds(0, 100) for number in range(3)}})
        self.opened = 0

    def add(self, *messages: Message, topic: str = "orders") -> None:
        """Append records to the coordination partition of a topic."""
        for message in messages:
            self.broker.append(coordination_partition(topic, PARTITIONS), render(message))

    def own(self, partition: int = 0, *, offset: int = 0, instance: str = "run1.0", group: str = "g") -> None:
        """Let an instance claim a partition at an offset."""
        whose: dict[str, Any] = {
            "instance": instance,
            "client": "c",
            "group": group,
            "topic": "orders",
            "partition": partition,
            "time_s": 1,
        }
        settings = GroupSettings(HI_MS)
        self.add(GroupSettingsRecord(instance=instance, client="c", group=group, time_s=1, settings=settings))
        self.add(ClaimingPartition(**whose), DataTopic(**whose, topic_id=TOPIC_ID), Heartbeat(**whose, offset=offset))

    def plan(self, partition: int, end: int) -> None:
        """Let the owner of a partition write a plan."""
        plan = ClaimingMessages(
            instance="run1.0", client="c", group="g", topic="orders", partition=partition, time_s=1, plan_end=end
        )
        self.add(plan)

    def pause(self, until_s: int) -> None:
        """Pause the group."""
        self.add(ReleaseGroup(instance="alice@host", client="c", group="g", time_s=1, expiry_s=until_s))

    def open(self) -> Rationalizer:
        """Open a reader of the log."""
        self.opened += 1
        return Rationalizer(MemoryLog(self.broker), clock=self.clock)

    def exporter(self, **options: Any) -> Exporter:  # noqa: ANN401 - those of `ExportOptions`
        """Return an exporter that has not read yet."""
        return Exporter(self.open, TopicReader(self.cluster), ExportOptions(**options), clock=self.clock)


@pytest.fixture
def scene() -> Scene:
    """Return a scene in which run1 holds partition 0 of topic orders at offset 40."""
    scene = Scene()
    scene.own(offset=40)
    return scene


def samples(exporter: Exporter) -> Found:
    """Return the values that a scrape gets: by metric and the values of its labels in the definition's order."""
    labels = {definition.name: definition.labels for definition in DEFINITIONS}
    found: Found = {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        for sample in family.samples:
            if sample.name in labels:
                key = tuple(sample.labels[label] for label in labels[sample.name])
                found.setdefault(sample.name, {})[key] = sample.value
    return found


def read(exporter: Exporter) -> Found:
    """Let the exporter read once, and return its values."""
    exporter.refresh()
    assert exporter.status.failure is None
    return samples(exporter)


# What is served


def test_each_claimed_partition_has_its_state(scene: Scene) -> None:
    """Position, lag, margin and the age of the heartbeat are those of the log and the topic."""
    scene.clock.advance(20_000)
    found = read(scene.exporter())
    place = ("g", "orders", "0")
    of_partition = {name: values.get(place) for name, values in found.items() if name.startswith("marshal_partition_")}
    assert of_partition == {
        "marshal_partition_claimed": 1,
        "marshal_partition_heartbeat_age_seconds": 20,
        "marshal_partition_position_offset": 40,
        "marshal_partition_lag_records": 60,
        "marshal_partition_lag_seconds": 7 * 86_400,
        "marshal_partition_retention_margin_records": 40,
    }
    assert found["marshal_topic_lag_records"] == {("g", "orders"): 260}  # two partitions were never claimed
    assert found["marshal_topic_position_offsets"] == {("g", "orders"): 40}
    assert found["marshal_group_stale_after_seconds"] == {("g",): 60}
    assert found["marshal_data_topic_retention_seconds"] == {("orders",): 7 * 86_400}


@pytest.mark.parametrize(("silent_ms", "state"), [(30_000, "fresh"), (60_000, "unknown"), (60_001, "stale")])
def test_claims_are_counted_by_freshness(scene: Scene, silent_ms: int, state: str) -> None:
    """The limits are those of the protocol; only a stale owner is named."""
    scene.clock.advance(silent_ms)
    found = read(scene.exporter())
    claims = {key[2]: value for key, value in found["marshal_topic_claims"].items()}
    assert claims == {"fresh": 0, "unknown": 0, "stale": 0} | {state: 1}
    named = {("g", "orders", "0", "run1.0"): 1.0} if state == "stale" else {}
    assert found.get("marshal_partition_owner_info", {}) == named
    assert read(scene.exporter(all_owners=True))["marshal_partition_owner_info"] == {("g", "orders", "0", "run1.0"): 1}


def test_open_plans_are_counted(scene: Scene) -> None:
    """A plan counts as unheld once its owner is stale, and as exhausted after enough attempts."""
    scene.plan(0, 50)
    place = ("g", "orders")
    found = read(scene.exporter())
    assert (found["marshal_topic_unheld_plans"][place], found["marshal_topic_exhausted_plans"][place]) == (0, 0)
    assert found["marshal_partition_plan_attempts"] == {(*place, "0"): 0}
    for attempt in (2, 3):
        scene.clock.advance(60_001)
        claim = ClaimingPartition(
            instance=f"run{attempt}.0", client="c", group="g", topic="orders", partition=0, time_s=1
        )
        scene.add(claim)
    scene.clock.advance(60_001)
    found = read(scene.exporter(max_attempts=2))
    assert (found["marshal_topic_unheld_plans"][place], found["marshal_topic_exhausted_plans"][place]) == (1, 1)
    assert found["marshal_partition_plan_attempts"] == {(*place, "0"): 2}
    assert read(scene.exporter())["marshal_topic_exhausted_plans"][place] == 0


def test_a_pause_ends_by_the_clock(scene: Scene) -> None:
    """The end of the pause is served until then."""
    until_s = scene.clock.wall_ms() // 1_000 + 100
    exporter = scene.exporter()
    assert read(exporter)["marshal_group_paused"] == {("g",): 0}
    scene.pause(until_s)
    found = read(exporter)
    assert (found["marshal_group_paused"], found["marshal_group_paused_until_timestamp_seconds"]) == (
        {("g",): 1},
        {("g",): until_s},
    )
    scene.clock.advance(101_000)
    found = read(exporter)
    assert found["marshal_group_paused"] == {("g",): 0}
    assert "marshal_group_paused_until_timestamp_seconds" not in found


def test_refused_records_are_counted_by_reason_from_zero(scene: Scene) -> None:
    """Each reason exists from the start, so that the first refused record is an increase."""
    exporter = scene.exporter()
    before = read(exporter)["marshal_log_refused_records_total"]
    assert set(before.values()) == {0}
    scene.add(Heartbeat(instance="x", client="c", group="g", topic="orders", partition=0, time_s=1, offset=41))
    found = read(exporter)
    assert found["marshal_log_refused_records_total"] == before | {("not_owner",): 1}
    assert found["marshal_exporter_read_records_total"][()] == 5


def test_any_name_that_the_protocol_allows_is_served(scene: Scene) -> None:
    """Quotes, backslashes, braces, spaces and letters of any script are escaped as Prometheus reads them."""
    names = ['my "own"', "back\\slash\\n", 'x{group="g"} 1', " a b ", "größe 群組 🚚", "# HELP"]
    for name in names:
        scene.own(1, group=name, instance=f"{name}.0")
    scene.clock.advance(3 * HI_MS)
    found = read(scene.exporter())
    assert {group for (group,) in found["marshal_group_paused"]} == {"g", *names}
    owners = {(group, owner) for group, _, _, owner in found["marshal_partition_owner_info"]}
    assert owners == {("g", "run1.0"), *((name, f"{name}.0") for name in names)}


def test_only_what_was_requested_is_served(scene: Scene) -> None:
    """Groups, topics and partitions can be left out."""
    scene.own(1, group="other")
    assert set(read(scene.exporter())["marshal_group_paused"]) == {("g",), ("other",)}
    assert set(read(scene.exporter(groups={"other"}))["marshal_group_paused"]) == {("other",)}
    assert "marshal_topic_claims" not in read(scene.exporter(topics={"else"}))
    scene.clock.advance(60_001)
    totals = read(scene.exporter(per_partition=False))
    assert [name for name in totals if name.startswith("marshal_partition")] == ["marshal_partition_owner_info"]


def test_names_that_the_log_does_not_have_are_reported_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name has no metrics, so no alert of it can fire."""
    exporter = scene.exporter(groups={"g", "gg"}, topics={"orders", "odrers"})
    for _ in range(2):
        exporter.refresh()
    advice = "There are no metrics of it until a member claims"
    assert caplog.messages == [
        f"exporter: the log has no group 'gg'; it has 'g'. {advice}",
        f"exporter: the log has no topic 'odrers'. {advice}",
    ]


def test_no_counter_has_an_unbounded_label() -> None:
    """A run or an instance is a label of one gauge alone."""
    assert [found.name for found in DEFINITIONS if "owner" in found.labels] == ["marshal_partition_owner_info"]
    allowed = {"group", "topic", "partition", "freshness", "reason", "owner"}
    assert {label for found in DEFINITIONS for label in found.labels} <= allowed
    assert all(found.name.endswith("_total") == (found.kind is Kind.COUNTER) for found in DEFINITIONS)


def test_every_defined_metric_is_served(scene: Scene) -> None:
    """Dashboards and alerts may name each of them."""
    scene.plan(0, 50)
    scene.pause(scene.clock.wall_ms() // 1_000 + 100)
    scene.clock.advance(60_001)
    assert set(read(scene.exporter())) == {definition.name for definition in DEFINITIONS}


# Data topics


def test_a_topic_that_cannot_be_looked_up_leaves_the_others(scene: Scene) -> None:
    """Its lag is absent. A missing topic is looked up again after five minutes."""
    for topic in ("gone", "secret"):
        claim = ClaimingPartition(instance="i", client="c", group="g", topic=topic, partition=0, time_s=1)
        scene.add(claim, topic=topic)
    scene.cluster.errors = {"gone": TopicNotFoundError("no topic"), "secret": AuthorizationError("not allowed")}
    exporter = scene.exporter()
    found = read(exporter)
    assert found["marshal_data_topic_known"] == {("gone",): 0, ("orders",): 1, ("secret",): 0}
    assert set(found["marshal_topic_lag_records"]) == {("g", "orders")}
    assert set(found["marshal_topic_claims"]) >= {("g", "gone", "fresh"), ("g", "secret", "fresh")}
    scene.cluster.requested.clear()
    read(exporter)
    assert scene.cluster.requested == []
    scene.clock.advance(300_000)
    read(exporter)
    assert set(scene.cluster.requested) == {"orders", "gone", "secret"}


def test_a_topic_without_an_answer_does_not_hide_the_others(scene: Scene) -> None:
    """Each read waits for one timeout at most. The next one leaves that topic out, for a minute."""
    claim = ClaimingPartition(instance="i", client="c", group="g", topic="a", partition=0, time_s=1)
    scene.add(claim, topic="a")
    scene.cluster.errors = {"a": UnavailableError("away")}
    exporter = scene.exporter()
    found = read(exporter)
    assert scene.cluster.requested == ["a"]
    assert found["marshal_data_topic_known"] == {("a",): 0, ("orders",): 0}
    assert found["marshal_exporter_up"] == {(): 1}
    assert read(exporter)["marshal_data_topic_known"] == {("a",): 0, ("orders",): 1}
    scene.clock.advance(60_000)
    assert read(exporter)["marshal_data_topic_known"] == {("a",): 0, ("orders",): 1}
    assert [topic for topic in scene.cluster.requested if topic != "times"] == ["a", "orders", "a"]


def test_topics_that_were_not_requested_keep_their_values(scene: Scene) -> None:
    """While many topics have no leader, each read finds one of them; the alerts of the others must not be reset."""
    for topic in ("a", "b"):
        claim = ClaimingPartition(instance="i", client="c", group="g", topic=topic, partition=0, time_s=1)
        scene.add(claim, topic=topic)
        scene.cluster.bounds[topic] = {0: OffsetBounds(0, 7)}
    exporter = scene.exporter()
    before = read(exporter)["marshal_topic_lag_records"]
    assert set(before) == {("g", "a"), ("g", "b"), ("g", "orders")}
    scene.cluster.offset_errors = {topic: UnavailableError("no leader") for topic in ("a", "b")}
    for _ in range(2):
        scene.clock.advance(15_000)
        assert read(exporter)["marshal_topic_lag_records"] == before
    scene.clock.advance(120_000)
    found = read(exporter)
    assert found["marshal_data_topic_known"] == {("a",): 0, ("b",): 0, ("orders",): 1}
    assert set(found["marshal_topic_lag_records"]) == {("g", "orders")}


def test_the_retention_stays_while_it_cannot_be_looked_up(scene: Scene) -> None:
    """Otherwise each restart of a broker would end the alert on retention. The right may be taken away, though."""
    exporter = scene.exporter()
    assert read(exporter)["marshal_data_topic_retention_seconds"] == {("orders",): DAY_MS * 7 / 1_000}
    scene.cluster.settings_error = UnavailableError("away")
    scene.clock.advance(300_000)
    assert read(exporter)["marshal_data_topic_retention_seconds"] == {("orders",): DAY_MS * 7 / 1_000}
    scene.cluster.settings_error, scene.cluster.retention_ms = None, DAY_MS
    scene.clock.advance(60_000)
    assert read(exporter)["marshal_data_topic_retention_seconds"] == {("orders",): DAY_MS / 1_000}
    scene.cluster.retention_ms = None
    scene.clock.advance(300_000)
    assert "marshal_data_topic_retention_seconds" not in read(exporter)


def test_a_position_of_another_topic_has_no_lag(scene: Scene) -> None:
    """Such partitions are counted, and so are positions after the end."""
    scene.cluster.ids["orders"] = OTHER_ID
    found = read(scene.exporter())
    assert found["marshal_topic_lag_unknown_partitions"] == {("g", "orders"): 1}
    assert ("g", "orders", "0") not in found["marshal_partition_lag_records"]


def test_a_topic_that_was_created_again_is_noticed_by_its_end(scene: Scene) -> None:
    """Otherwise its id is looked up every five minutes, and not at each read."""
    exporter = scene.exporter()
    read(exporter)
    read(exporter)
    assert scene.cluster.requested.count("orders") == 1
    scene.cluster.ids["orders"] = OTHER_ID
    scene.cluster.bounds["orders"] = {0: OffsetBounds(0, 90)}
    assert read(exporter)["marshal_topic_lag_unknown_partitions"] == {("g", "orders"): 1}
    scene.cluster.bounds["orders"] = {number: OffsetBounds(0, 90) for number in range(5)}
    scene.clock.advance(300_000)
    assert read(exporter)["marshal_topic_partitions"] == {("g", "orders"): 5}


def test_unread_records_that_retention_deleted_are_counted(scene: Scene) -> None:
    """The margin shrinks to 0, then the deleted offsets grow."""
    exporter = scene.exporter()
    margins, deleted = [], []
    for start in (0, 30, 40, 55):
        scene.cluster.bounds["orders"] = {0: OffsetBounds(start, 100)}
        found = read(exporter)
        margins.append(found["marshal_topic_retention_margin_records"]["g", "orders"])
        deleted.append(found["marshal_topic_deleted_unread_records"]["g", "orders"])
    assert (margins, deleted) == ([40, 10, 0, 0], [0, 0, 0, 15])


def test_without_the_right_to_see_settings_there_is_no_retention(scene: Scene) -> None:
    """Nothing else depends on that right."""
    scene.cluster.retention_ms = None
    found = read(scene.exporter())
    assert "marshal_data_topic_retention_seconds" not in found
    assert found["marshal_topic_lag_records"] == {("g", "orders"): 260}


# Lag in seconds


def test_the_lag_in_seconds_follows_the_ends_that_were_seen(scene: Scene) -> None:
    """A record is as old as the last read that did not have it yet."""
    scene.cluster.bounds["orders"] = {0: OffsetBounds(0, 40)}
    exporter = scene.exporter()
    place = ("g", "orders")
    assert read(exporter)["marshal_topic_lag_seconds"][place] == 0
    scene.clock.advance(15_000)
    assert read(exporter)["marshal_topic_lag_seconds"][place] == 0
    scene.cluster.bounds["orders"] = {0: OffsetBounds(0, 50)}
    scene.clock.advance(15_000)
    assert read(exporter)["marshal_topic_lag_seconds"][place] == 15
    scene.clock.advance(600_000)
    assert read(exporter)["marshal_topic_lag_seconds"][place] == 615
    assert "times" not in scene.cluster.requested


def test_kafka_gets_one_request_for_what_was_written_before(scene: Scene) -> None:
    """An exporter that starts with a lag looks up the offsets of some times in the past."""
    now_ms = scene.clock.wall_ms()
    scene.cluster.bounds["orders"] = {0: OffsetBounds(0, 100)}
    scene.cluster.past = {now_ms - 2 * 3_600_000: 30, now_ms - 1_800_000: 60}
    exporter = scene.exporter()
    lag_s = read(exporter)["marshal_topic_lag_seconds"]["g", "orders"]
    assert 7_042 <= lag_s <= 7_680  # the two ages between which the record was written; they differ by 9 %
    requested = scene.cluster.requested.count("times")
    scene.clock.advance(15_000)
    assert read(exporter)["marshal_topic_lag_seconds"]["g", "orders"] == pytest.approx(lag_s + 15)
    assert scene.cluster.requested.count("times") == requested == 13  # from 15 s to 7,680 s, then between


def test_times_that_could_not_be_looked_up_are_requested_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then an exporter that starts with a lag shows only the time since its start."""
    now_ms = scene.clock.wall_ms()
    scene.cluster.bounds["orders"] = {0: OffsetBounds(0, 100)}
    scene.cluster.past = {now_ms - 2 * 3_600_000: 30, now_ms - 1_800_000: 60}
    exporter = scene.exporter()

    def fail(*_: Any) -> Any:  # noqa: ANN401 - it only raises
        raise UnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(scene.cluster, "offsets_at", fail)
        assert read(exporter)["marshal_topic_lag_seconds"]["g", "orders"] == 0
    scene.clock.advance(30_000)
    assert read(exporter)["marshal_topic_lag_seconds"]["g", "orders"] == 30  # not at each read, because it may hang
    scene.clock.advance(30_000)
    assert read(exporter)["marshal_topic_lag_seconds"]["g", "orders"] > 3_600


def test_few_points_are_kept_for_each_partition() -> None:
    """Older points become sparse, and those that no position needs are dropped; the age stays close."""
    times = EndTimes()
    for second in range(10_000):
        times.note(10 * second, second)
    assert len(times._ends) <= 32
    assert times.age_s(50_000, 9_999) == pytest.approx(4_999, rel=0.01)
    times.forget_before(99_000)
    assert times.age_s(99_500, 9_999) == pytest.approx(49, abs=20)
    assert times._ends[0] <= 99_000
    times.note(5, 10_000)
    assert list(times._ends) == [5]


def test_an_age_is_never_negative_or_infinite() -> None:
    """A partition without points has no age; one before the first point is at least as old as that."""
    times = EndTimes()
    assert times.age_s(5, 100) is None
    times.note(10, 90)
    assert (times.age_s(5, 100), times.age_s(10, 80)) == (10, 0)
    times.seed({60.0: 4, 70.0: 8, 95.0: 9, 50.0: 4})
    assert times.age_s(4, 100) == 40
    assert times.age_s(2, 100) == 50
    assert math.isclose(times.age_s(6, 100) or 0, 35)


# Failures


def test_a_failed_read_is_reported_and_tried_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The values stay for a minute and vanish then; the same failure is logged once."""
    exporter = scene.exporter()
    assert exporter.health() | {"failing_s": 0.0} == {
        "healthy": False,
        "live": True,
        "ready": False,
        "failure": None,
        "failing_s": 0.0,
        "read_age_s": None,
    }
    assert samples(exporter)["marshal_exporter_up"] == {(): 0}
    read(exporter)
    assert exporter.health()["ready"]
    broken = exporter._log
    assert broken is not None
    catch_up = broken.catch_up

    def fail() -> Any:  # noqa: ANN401 - it only raises
        raise UnavailableError("away")

    broken.catch_up = fail  # type: ignore[method-assign]
    for _ in range(2):
        exporter.refresh()
    found = samples(exporter)
    assert (found["marshal_exporter_up"], found["marshal_exporter_failed_reads_total"]) == ({(): 0}, {(): 2})
    assert "marshal_topic_claims" in found
    assert [record.getMessage() for record in caplog.records] == ["exporter: away"]
    scene.clock.advance(2 * FAILING_AFTER_S * 1_000)
    assert "marshal_topic_claims" not in samples(exporter)
    assert exporter.status.failing_from_s is not None
    exporter.status.failing_from_s -= FAILING_AFTER_S + 1
    assert (exporter.health()["ready"], exporter.health()["live"]) == (False, True)
    broken.catch_up = catch_up  # type: ignore[method-assign]
    assert "marshal_topic_claims" in read(exporter)
    assert exporter.health()["ready"]


def test_a_failed_read_is_tried_again_soon(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long interval does not prolong an outage of the brokers."""
    exporter = Exporter(scene.open, TopicReader(scene.cluster), interval_s=3_600, clock=scene.clock)
    waits: list[float] = []

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        assert exporter._log is not None
        exporter._log.catch_up = fail if len(waits) == 1 else succeed  # type: ignore[method-assign]
        return len(waits) == 3

    def fail() -> Any:  # noqa: ANN401 - it only raises
        raise UnavailableError("away")

    def succeed() -> Any:  # noqa: ANN401 - a world state
        assert exporter._log is not None
        return exporter._log.world

    monkeypatch.setattr(exporter._stop, "wait", wait)
    exporter.run()
    assert waits == [pytest.approx(3_600, abs=60), exporter_module.DEFAULT_INTERVAL_S, pytest.approx(3_600, abs=60)]


def test_values_that_vanished_are_reported(scene: Scene) -> None:
    """A refresh that takes long is no failure yet, but the exporter is not ready when it has no values to serve."""
    exporter = scene.exporter()
    read(exporter)
    scene.clock.advance(2 * FAILING_AFTER_S * 1_000)
    found = samples(exporter)
    assert "marshal_topic_claims" not in found
    assert found["marshal_exporter_up"] == {(): 0}
    assert (exporter.health()["ready"], exporter.health()["live"]) == (False, True)


def test_a_refresh_of_minutes_has_values(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as old as the refresh when it ends."""
    exporter = scene.exporter()
    look_up, started_s = scene.cluster.offsets, time.monotonic()

    def slow(topic: str, partitions: Collection[int]) -> dict[int, OffsetBounds]:
        scene.clock.advance(120_000)
        monkeypatch.setattr(time, "monotonic", lambda: started_s + 120)
        return look_up(topic, partitions)

    monkeypatch.setattr(scene.cluster, "offsets", slow)
    assert "marshal_topic_claims" in read(exporter)
    assert exporter.health()["ready"]


def test_a_refresh_that_hangs_is_not_live(scene: Scene) -> None:
    """A restart helps then."""
    exporter = scene.exporter()
    read(exporter)
    exporter.status.alive_at_s -= exporter_module.LIVE_WITHIN_S + 60
    assert not exporter.health()["live"]


def test_a_log_that_was_created_again_is_opened_again(scene: Scene) -> None:
    """The counters continue, and the state is that of the new log."""
    exporter = scene.exporter()
    assert read(exporter)["marshal_exporter_read_records_total"][()] == 4
    scene.broker.recreate()
    exporter.refresh()
    assert isinstance(exporter.status.failure, CoordinationLogChangedError)
    found = read(exporter)
    assert scene.opened == 2
    assert "marshal_topic_claims" not in found
    assert found["marshal_exporter_read_records_total"][()] == 4


def test_the_first_read_may_fail_with_an_error(scene: Scene) -> None:
    """A wrong connection or topic ends the command with its message."""
    scene.broker.delete()
    with pytest.raises(TopicNotFoundError):
        scene.exporter().run()


def test_it_never_writes(scene: Scene) -> None:
    """The log is the same after many reads."""
    exporter = scene.exporter()
    before = [list(records) for records in scene.broker._records]
    for _ in range(3):
        scene.clock.advance(60_000)
        read(exporter)
    assert [list(records) for records in scene.broker._records] == before
