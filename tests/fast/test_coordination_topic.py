"""Check which settings of the coordination topic are accepted, and what is reported for the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.coordination.topic_settings import (
    BATCH_BYTES,
    SettingProblem,
    Severity,
    check_coordination_topic,
    create_coordination_topic,
    create_snapshot_topic,
    require_safe,
    require_usable,
    settings_for,
    with_reasons,
)
from marshal_dagster.errors import AuthorizationError, ConfigurationError, TopicNotFoundError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.kafka.topic_creation import create_with_allowed_settings

NAME, TOPIC_ID = "__marshal", "B" * 22


@dataclass(slots=True)
class Cluster:
    """An in-memory cluster with the operations that the checks call."""

    brokers: int = 1
    topic_id: str = TOPIC_ID
    hides_settings: bool = False
    refuses: dict[str, str] = field(default_factory=dict)
    """For settings that the brokers refuse, the text of their error."""
    defaults: dict[str, str] = field(default_factory=dict)
    """The values of settings that the brokers ignore, or that were left out."""
    ignores: frozenset[str] = frozenset()
    created: dict[str, tuple[int, int, dict[str, str]]] = field(default_factory=dict)

    @property
    def topics(self) -> Topics:
        """Return this object in place of `Topics`."""
        return cast("Topics", self)

    def broker_count(self) -> int:
        """Return the number of brokers."""
        return self.brokers

    def create(self, topic: str, partitions: int, replication: int, settings: Mapping[str, str] | None = None) -> bool:
        """Create the topic; return false if it exists."""
        if topic in self.created:
            return False
        wanted = dict(settings or {})
        for setting, text in self.refuses.items():
            if setting in wanted:
                raise ConfigurationError(f"cannot create topic {topic!r}: {text}")
        kept = {name: value for name, value in wanted.items() if name not in self.ignores}
        self.created[topic] = (partitions, replication, self.defaults | kept)
        return True

    def describe(self, topic: str) -> TopicDescription:
        """Return the topic's description."""
        if topic not in self.created:
            raise TopicNotFoundError(topic)
        partitions, replication, _ = self.created[topic]
        return TopicDescription(topic, self.topic_id, tuple(range(partitions)), replication)

    def settings(self, topic: str) -> dict[str, str]:
        """Return the topic's settings."""
        self.describe(topic)
        if self.hides_settings:
            raise AuthorizationError("DESCRIBE_CONFIGS")
        return dict(self.created[topic][2])


def safe(brokers: int, **changes: str | None) -> Cluster:
    """Return a cluster whose coordination topic was created by the library, with `changes` to its settings."""
    cluster = Cluster(brokers)
    create_coordination_topic(cluster.topics, NAME)
    settings = cluster.created[NAME][2]
    for name, value in changes.items():
        setting = name.replace("_", ".")
        if value is None:
            del settings[setting]
        else:
            settings[setting] = value
    return cluster


def problems(cluster: Cluster) -> dict[str, SettingProblem]:
    """Return the problems found, by setting."""
    return {problem.setting: problem for problem in check_coordination_topic(cluster.topics, cluster.describe(NAME))}


@pytest.mark.parametrize(("brokers", "replication", "insync"), [(1, 1, "1"), (2, 2, "2"), (3, 3, "2"), (9, 3, "2")])
def test_a_topic_is_created_as_the_protocol_needs_it(brokers: int, replication: int, insync: str) -> None:
    """With three brokers or more there are three replicas, two of them in sync; with fewer, one on each broker."""
    partitions, replicas, settings = safe(brokers).created[NAME]

    assert (partitions, replicas) == (8, replication)
    assert settings == {
        "cleanup.policy": "delete",
        "compression.type": "uncompressed",
        "max.message.bytes": str(BATCH_BYTES),
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": insync,
        "retention.bytes": "-1",
        "retention.ms": "-1",
        "unclean.leader.election.enable": "false",
    }


@pytest.mark.parametrize("brokers", [3, 5])
def test_a_topic_as_created_has_no_problem(brokers: int) -> None:
    """The check accepts a topic as the library creates it."""
    assert problems(safe(brokers)) == {}


def test_one_broker_is_a_warning() -> None:
    """A cluster of one broker can only have one replica: this is a warning, not an error."""
    cluster = safe(1)

    (problem,) = require_safe(cluster.topics, cluster.describe(NAME))

    assert (problem.setting, problem.severity) == ("replication factor", Severity.WARNING)


def test_one_replica_among_several_brokers_is_refused() -> None:
    """A single replica is a danger if the cluster has several brokers."""
    cluster = Cluster(3)
    create_coordination_topic(cluster.topics, NAME, replication=1)

    assert problems(cluster)["replication factor"].severity is Severity.DANGER


UNUSABLE = {"message_timestamp_type": "CreateTime", "cleanup_policy": "compact"}
DANGERS = {
    "unclean_leader_election_enable": "true",
    "compression_type": "zstd",
    "retention_ms": "604800000",
    "retention_bytes": "1073741824",
    "max_message_bytes": "2048",
    "min_insync_replicas": "1",
}


@pytest.mark.parametrize("name", DANGERS | UNUSABLE)
def test_a_dangerous_setting_is_refused(name: str) -> None:
    """Each setting that breaks a guarantee is refused.

    The message has the value found, the correct value and the fix.
    """
    cluster = safe(3, **{name: (DANGERS | UNUSABLE)[name]})
    setting = name.replace("_", ".")

    with pytest.raises(UnsafeTopicError) as refused:
        require_safe(cluster.topics, cluster.describe(NAME))

    (reason,) = refused.value.reasons
    assert reason.startswith(f"{setting} is {(DANGERS | UNUSABLE)[name]}, it must be ")
    assert f"kafka-configs --alter --entity-type topics --entity-name {NAME} --add-config {setting}=" in reason


@pytest.mark.parametrize("name", DANGERS)
def test_a_dangerous_setting_is_accepted_if_that_is_requested(name: str) -> None:
    """With `allow_unsafe`, the problem is returned instead of raised."""
    cluster = safe(3, **{name: DANGERS[name]})

    (problem,) = require_safe(cluster.topics, cluster.describe(NAME), allow_unsafe=True)

    assert problem.severity is Severity.DANGER


@pytest.mark.parametrize("name", UNUSABLE)
def test_no_option_allows_an_unusable_topic(name: str) -> None:
    """No option allows producers' timestamps or compaction, and readers refuse such a topic too."""
    cluster = safe(3, **{name: UNUSABLE[name]})

    with pytest.raises(UnsafeTopicError, match="no option allows"):
        require_safe(cluster.topics, cluster.describe(NAME), allow_unsafe=True)
    with pytest.raises(UnsafeTopicError, match="no option allows"):
        require_usable(cluster.topics, cluster.describe(NAME))


def test_a_topic_without_an_id_is_unusable() -> None:
    """Such a topic could be deleted and re-created unnoticed, so it is refused even if its settings are hidden."""
    cluster = safe(3)
    cluster.topic_id = "A" * 22

    with pytest.raises(UnsafeTopicError, match="topic id is missing"):
        require_safe(cluster.topics, cluster.describe(NAME), allow_unsafe=True)
    cluster.hides_settings = True
    with pytest.raises(UnsafeTopicError, match="topic id is missing"):
        require_usable(cluster.topics, cluster.describe(NAME))


def test_dangers_and_hidden_settings_leave_a_topic_usable() -> None:
    """A reader accepts a topic with other dangerous settings, and one whose settings it may not read."""
    for name, value in DANGERS.items():
        cluster = safe(3, **{name: value})
        require_usable(cluster.topics, cluster.describe(NAME))
    cluster = safe(3, message_timestamp_type="CreateTime")
    cluster.hides_settings = True
    require_usable(cluster.topics, cluster.describe(NAME))


def test_compaction_beside_deletion_is_refused() -> None:
    """A topic with the policy `compact,delete` is refused."""
    assert problems(safe(3, cleanup_policy="compact,delete"))["cleanup.policy"].severity is Severity.UNUSABLE


def test_a_small_batch_is_a_warning() -> None:
    """A topic that accepts single records but no large batches causes a warning."""
    problem = problems(safe(3, max_message_bytes="100000"))["max.message.bytes"]

    assert problem.severity is Severity.WARNING


def test_more_replicas_wanted_than_there_are_is_refused() -> None:
    """A topic that requires more in-sync replicas than it has can never be written to, so it is refused."""
    problem = problems(safe(1, min_insync_replicas="2"))["min.insync.replicas"]

    assert (problem.wanted, problem.severity) == ("1", Severity.DANGER)


@pytest.mark.parametrize(
    ("name", "severity"),
    [("message_timestamp_type", Severity.DANGER), ("unclean_leader_election_enable", Severity.WARNING)],
)
def test_a_setting_that_is_not_reported_is_not_taken_for_right(name: str, severity: Severity) -> None:
    """A setting that the broker does not report is a problem: its value is not assumed to be correct."""
    problem = problems(safe(3, **{name: None}))[name.replace("_", ".")]

    assert problem.found == "not reported by the broker"
    assert problem.severity is severity


def test_an_equal_topic_is_left_as_it_is() -> None:
    """Creating an equal topic again changes nothing and returns false."""
    cluster = safe(3)
    before = dict(cluster.created)

    assert create_coordination_topic(cluster.topics, NAME).created is False
    assert create_coordination_topic(cluster.topics, NAME, 8, 3).created is False
    assert cluster.created == before


@pytest.mark.parametrize(("partitions", "replication", "said"), [(16, None, "8 partitions"), (8, 1, "3 replicas")])
def test_a_topic_of_another_shape_is_an_error(partitions: int, replication: int | None, said: str) -> None:
    """An existing topic with other partitions or replicas than requested is an error."""
    cluster = safe(3)

    with pytest.raises(ConfigurationError, match=said):
        create_coordination_topic(cluster.topics, NAME, partitions, replication)


def test_an_unsafe_topic_is_not_taken_for_created() -> None:
    """Creating a topic fails if it exists with dangerous settings."""
    cluster = safe(3, retention_ms="1")

    with pytest.raises(UnsafeTopicError, match=r"retention\.ms"):
        create_coordination_topic(cluster.topics, NAME)


def test_a_missing_topic_is_missing() -> None:
    """Checking a topic that does not exist raises `TopicNotFoundError`."""
    cluster = safe(3)
    described = cluster.describe(NAME)
    del cluster.created[NAME]

    with pytest.raises(TopicNotFoundError):
        check_coordination_topic(cluster.topics, described)


def test_settings_follow_the_replicas() -> None:
    """`min.insync.replicas` never exceeds the number of replicas; it is 2 where possible."""
    assert [settings_for(replicas)["min.insync.replicas"] for replicas in (1, 2, 3, 5)] == ["1", "2", "2", "2"]


WEEK_MS, GIB = 604_800_000, 1_073_741_824


@pytest.mark.parametrize(
    ("setting", "found", "severity"),
    [
        ("retention_ms", WEEK_MS, Severity.WARNING),
        ("retention_ms", 3_600_000, Severity.DANGER),
        ("retention_bytes", GIB, Severity.WARNING),
        ("retention_bytes", GIB - 1, Severity.DANGER),
    ],
)
def test_snapshots_outlive_a_log_that_keeps_enough(setting: str, found: int, severity: Severity) -> None:
    """A long retention is only a warning if a snapshot topic exists; without one, any retention is dangerous."""
    cluster = safe(3, **{setting: str(found)})
    name = setting.replace("_", ".")
    assert problems(cluster)[name].severity is Severity.DANGER
    create_snapshot_topic(cluster.topics, NAME)
    (problem,) = problems(cluster).values()
    assert (problem.setting, problem.severity) == (name, severity)
    assert ("marshal-dagster recover" in problem.why) == (severity is Severity.WARNING)


# Brokers that refuse or ignore settings

UNCLEAN, COMPRESSION = "unclean.leader.election.enable", "compression.type"
SERVICE = {UNCLEAN: "false", COMPRESSION: "producer", "retention.ms": "604800000"}
"""Settings of a service's topics that its users may not change."""


@pytest.mark.parametrize(
    "refuses",
    [
        {COMPRESSION: f"Config property '{COMPRESSION}' cannot be set."},
        {UNCLEAN: f"{UNCLEAN} is not editable", COMPRESSION: f"unknown configs: {COMPRESSION}"},
        {COMPRESSION: "Policy violation."},
        {UNCLEAN: "Policy violation.", COMPRESSION: f"{COMPRESSION}: no"},
        {UNCLEAN: "Policy violation.", COMPRESSION: "Policy violation."},
    ],
    ids=str,
)
def test_a_topic_is_created_with_what_the_brokers_accept(refuses: dict[str, str]) -> None:
    """Settings that are refused by name or without one are left out; what they are by default is then checked."""
    cluster = Cluster(3, refuses=refuses, defaults=SERVICE)
    creation = create_coordination_topic(cluster.topics, NAME)
    assert creation.created
    assert set(creation.refused) >= set(refuses)
    assert cluster.created[NAME][2]["message.timestamp.type"] == "LogAppendTime"
    if len(creation.refused) == len(refuses):
        assert problems(cluster) == {}
    else:
        assert "retention.ms" in problems(cluster)


def test_a_missing_setting_has_the_brokers_reason() -> None:
    """The problem states why the setting could not be set, in place of a command that would fail as well."""
    cluster = Cluster(3, refuses={"retention.ms": "retention.ms may be at most 7 days"}, defaults=SERVICE)
    creation = create_coordination_topic(cluster.topics, NAME)
    (problem,) = with_reasons(problems(cluster).values(), creation.refused)
    assert (problem.setting, problem.found, problem.severity) == ("retention.ms", "604800000", Severity.DANGER)
    assert problem.fix.startswith("the brokers refused it (cannot create topic '__marshal': retention.ms may be")


def test_a_setting_that_is_ignored_is_found() -> None:
    """The brokers accept the request, and the check finds what they did not do."""
    cluster = Cluster(3, ignores=frozenset({"retention.ms", COMPRESSION}), defaults=SERVICE)
    assert create_coordination_topic(cluster.topics, NAME).refused == {}
    assert set(problems(cluster)) == {"retention.ms"}


def test_a_topic_without_the_brokers_times_is_not_created() -> None:
    """No member could use it, so the brokers' error is reported and there is no topic."""
    refuses = {COMPRESSION: f"{COMPRESSION}: no", "message.timestamp.type": "message.timestamp.type is not supported"}
    cluster = Cluster(3, refuses=refuses)
    with pytest.raises(ConfigurationError, match=r"message\.timestamp\.type is not supported"):
        create_coordination_topic(cluster.topics, NAME)
    assert cluster.created == {}


def test_a_request_that_is_wrong_by_itself_keeps_its_error() -> None:
    """An error that has nothing to do with settings is the one that is reported."""

    class Full(Cluster):
        def create(self, *_: object) -> bool:
            raise ConfigurationError("too many partitions")

    with pytest.raises(ConfigurationError, match=r"^too many partitions$"):
        create_coordination_topic(Full(3).topics, NAME)


def test_a_snapshot_topic_reports_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    """A refused and an ignored setting are warnings; without compaction the topic is not created."""
    ignored = {"segment.ms": "604800000"}
    cluster = Cluster(3, defaults=ignored, ignores=frozenset(ignored))
    create_coordination_topic(cluster.topics, NAME)
    cluster.refuses = {"min.cleanable.dirty.ratio": "min.cleanable.dirty.ratio: no"}
    assert create_snapshot_topic(cluster.topics, NAME)
    assert "created without min.cleanable.dirty.ratio=0.1: cannot create topic" in caplog.text
    assert "the brokers ignored segment.ms=3600000" in caplog.text
    del cluster.created[snapshot_topic_of(NAME)]
    cluster.refuses = {"cleanup.policy": "cleanup.policy must be delete"}
    with pytest.raises(ConfigurationError, match="must be delete"):
        create_snapshot_topic(cluster.topics, NAME)


@pytest.mark.parametrize("text", ["retention.ms: no", "'retention.ms'", "do not change retention.ms."])
def test_a_setting_is_recognized_in_an_error(text: str) -> None:
    """Only the setting that the error names is left out."""
    cluster = Cluster(3, refuses={"retention.ms": text})
    creation = create_with_allowed_settings(cluster.topics, NAME, 1, 3, {"retention.ms": "-1", "b.retention.ms": "1"})
    assert set(creation.refused) == {"retention.ms"}


def test_a_setting_is_recognized_as_a_whole() -> None:
    """A setting whose name is part of the one that the error names is kept."""
    cluster = Cluster(3, refuses={"b.retention.ms": "b.retention.ms: no"})
    creation = create_with_allowed_settings(cluster.topics, NAME, 1, 3, {"retention.ms": "-1", "b.retention.ms": "1"})
    assert set(creation.refused) == {"b.retention.ms"}


def test_in_sync_replicas_that_are_not_reported_are_a_warning() -> None:
    """Brokers that have no such setting may acknowledge by a majority; a single replica needs no warning for it."""
    cluster = safe(3, min_insync_replicas=None)
    (problem,) = require_safe(cluster.topics, cluster.describe(NAME))
    assert (problem.setting, problem.severity) == ("min.insync.replicas", Severity.WARNING)
    assert set(problems(safe(1, min_insync_replicas=None))) == {"replication factor"}
