"""`doctor` on the cluster: rights, brokers, replicas and quotas."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Uuid
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]  # its hints do not export what it offers

from marshal_dagster.cli.doctor import CheckedCluster, check_deployment
from marshal_dagster.cli.doctor_checks import acls, brokers
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.errors import AuthorizationError
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.clients import ClientLog
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.inspection import FROM_4, Broker, KafkaInspector, Replicas, TopicInfo

ASKER = acls.Principal("broker:9092", "dora")
READER = frozenset({Right.DESCRIBE, Right.DESCRIBE_CONFIGS, Right.READ})
MEMBER = READER | {Right.WRITE}


def topic_info(held: frozenset[Right] | None = MEMBER, *replicas: Replicas) -> TopicInfo:
    """Return a topic with these rights and replicas."""
    return TopicInfo("__marshal", "7tPg1PQ3SOOgBg6Ha5P9nw", held, dict(enumerate(replicas)))


def is_complete(finding: Finding) -> bool:
    """Return whether a warning or problem has a description, a reason and a fix."""
    return finding.state in {CheckState.PROBLEM, CheckState.WARNING} and all((finding.found, finding.why, finding.fix))


def test_what_a_reader_can_do_is_reported() -> None:
    """A missing WRITE is not a problem: the rights are listed with what they allow."""
    finding = acls.of_coordination_topic(topic_info(READER), ASKER)
    assert (finding.state, finding.fix) == (CheckState.OK, "")
    assert finding.found.startswith("on __marshal: Describe, DescribeConfigs, Read: it can read (doctor")
    assert "not claim" in finding.found


def test_the_rights_of_a_member_are_reported() -> None:
    """With WRITE the principal can claim, and it controls every group in the log."""
    finding = acls.of_coordination_topic(topic_info(MEMBER), ASKER)
    assert finding.state is CheckState.OK
    assert "Write: it can claim, and pause and set the positions of every group" in finding.found


def test_without_read_the_log_is_out_of_reach() -> None:
    """A principal that may not read the log gets the command that grants the right."""
    finding = acls.of_coordination_topic(topic_info(frozenset({Right.DESCRIBE, Right.WRITE})), ASKER)
    assert (finding.state, is_complete(finding)) == (CheckState.PROBLEM, True)
    assert finding.fix == (
        "kafka-acls --bootstrap-server broker:9092 --add --allow-principal User:dora --operation Read --topic __marshal"
    )


@pytest.mark.parametrize(
    ("held", "is_member", "missing"),
    [
        (MEMBER, True, []),
        (READER, False, []),
        (READER, True, ["Write"]),
        (MEMBER - {Right.READ}, True, ["Read"]),
        (frozenset({Right.DESCRIBE}), False, ["Read"]),
        (frozenset({Right.DESCRIBE}), True, ["Read", "Write"]),
    ],
)
def test_a_member_should_write_snapshots(held: frozenset[Right], missing: list[str], *, is_member: bool) -> None:
    """Every client should read snapshots, and members should write them.

    A missing right is a warning with the command.
    """
    finding = acls.of_snapshot_topic(topic_info(held), ASKER, is_member=is_member)
    assert (finding.state is CheckState.WARNING, is_complete(finding)) == (bool(missing), bool(missing))
    assert [right for right in ("Read", "Write") if f"--operation {right}" in finding.fix] == missing


def test_a_data_topic_that_cannot_be_read_is_reported() -> None:
    """A batch would be claimed and then fail. A principal that cannot claim needs no right to read it."""
    finding = acls.of_data_topic(topic_info(frozenset({Right.DESCRIBE})), ASKER, is_member=True)
    assert finding is not None
    assert is_complete(finding)
    assert acls.of_data_topic(topic_info(READER), ASKER, is_member=True) is None
    assert acls.of_data_topic(topic_info(frozenset({Right.DESCRIBE})), ASKER, is_member=False) is None


def test_a_topic_that_may_not_be_seen_is_reported() -> None:
    """Without DESCRIBE on the coordination topic nothing works; on another topic it is only a warning."""
    needed = acls.missing_describe("__marshal", ASKER, is_needed=True)
    assert (needed.state, "--operation Describe" in needed.fix) == (CheckState.PROBLEM, True)
    other = acls.missing_describe("orders", ASKER, is_needed=False)
    assert (other.state, is_complete(other)) == (CheckState.WARNING, True)


def test_rights_that_brokers_do_not_report_are_not_checked() -> None:
    """Old brokers do not report the rights, so none is called missing."""
    assert acls.of_coordination_topic(topic_info(None), ASKER).state is CheckState.NOT_CHECKED
    assert acls.of_snapshot_topic(topic_info(None), ASKER, is_member=True).state is CheckState.NOT_CHECKED
    assert acls.of_data_topic(topic_info(None), ASKER, is_member=True) is None


def test_the_brokers_versions_are_reported() -> None:
    """Each version is listed once; if it cannot be read, the right that it requires is named."""
    several = brokers.versions([Broker("3.9-IV0"), Broker(FROM_4), Broker(FROM_4)], "x")
    assert (several.state, several.found) == (CheckState.OK, "3 alive; Kafka 3.9-IV0 and Kafka 4.0 or newer")
    assert "DescribeConfigs" in brokers.versions([Broker(None)], "x").found


def test_brokers_that_give_topics_no_ids_are_a_problem() -> None:
    """The id of the coordination topic is half of the fencing token."""
    finding = brokers.versions([Broker("2.7")], NO_TOPIC_ID)
    assert (finding.state, is_complete(finding)) == (CheckState.PROBLEM, True)


@pytest.mark.parametrize(
    ("replicas", "state", "where"),
    [
        ([Replicas(3, 3, has_leader=True)] * 3, CheckState.OK, ""),
        ([Replicas(3, 3, has_leader=True), Replicas(3, 2, has_leader=True)], CheckState.WARNING, "partitions 1 "),
        ([Replicas(3, 1, has_leader=True), Replicas(3, 2, has_leader=True)], CheckState.PROBLEM, "partitions 0 "),
        ([Replicas(3, 3, has_leader=False)], CheckState.PROBLEM, "partitions 0 "),
    ],
)
def test_replicas_out_of_sync_are_reported(replicas: list[Replicas], state: CheckState, where: str) -> None:
    """Fewer in-sync replicas than min.insync.replicas are a problem; fewer than all are a warning."""
    finding = brokers.replicas(topic_info(MEMBER, *replicas), 2, "broker:9092")
    assert (finding.state, is_complete(finding), where in finding.found) == (state, state is not CheckState.OK, True)


def test_an_answer_that_was_held_back_is_reported() -> None:
    """A quota that throttles doctor also throttles members.

    Without throttling the finding states that this is no proof.
    """
    finding = brokers.throttling(1.5, "broker:9092")
    assert (finding.state, "1.5 s" in finding.found, is_complete(finding)) == (CheckState.WARNING, True, True)
    quiet = brokers.throttling(0.0, "broker:9092")
    assert (quiet.state, "a quota on bytes shows only" in quiet.found) == (CheckState.OK, True)


class Cluster:
    """An admin client that answers each request at once, as a broker would."""

    operations: Iterable[Any] | None = (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.ALTER_CONFIGS)
    settings: Mapping[str, Any] = MappingProxyType({})

    def describe_topics(self, _topics: object, **_: object) -> dict[str, Future[object]]:
        """Return one partition with a leader and one without."""
        node = SimpleNamespace(id=1)
        partitions = [
            SimpleNamespace(id=0, replicas=[node, node], isr=[node], leader=node),
            SimpleNamespace(id=1, replicas=[node, node], isr=[], leader=None),
        ]
        answer = SimpleNamespace(topic_id=Uuid(1, 2), authorized_operations=self.operations, partitions=partitions)
        return {"orders": done(answer)}

    def list_topics(self, **_: object) -> SimpleNamespace:
        """Return one broker."""
        return SimpleNamespace(brokers={7: SimpleNamespace(id=7, host="h", port=9)})

    def describe_configs(self, resources: list[Any], **_: object) -> dict[object, Future[object]]:
        """Return its settings."""
        return {resources[0]: done(self.settings)}

    def poll(self, _: float) -> None:
        """Return without an event."""


class Forbidding:
    """A cluster that allows a look at topics with some rights, and nothing else."""

    throttled_s = 0.0

    def __init__(self, held: frozenset[Right] | None) -> None:
        self.held = held

    def topic_info(self, name: str) -> TopicInfo:
        """Return the rights, or raise an error if there are none."""
        if self.held is None:
            raise AuthorizationError("DESCRIBE")
        return TopicInfo(name, "7tPg1PQ3SOOgBg6Ha5P9nw", self.held, {0: Replicas(1, 1, has_leader=True)})

    def brokers(self) -> list[Broker]:
        """Return one broker."""
        return [Broker(None)]

    def describe(self, name: str) -> TopicInfo:
        """Raise an authorization error."""
        raise AuthorizationError(name)

    settings = describe


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (None, ["rights"]),
        (
            frozenset({Right.DESCRIBE}),
            ["brokers", "rights", "rights", "topic settings", "snapshot topic settings", "replicas"],
        ),
    ],
)
def test_what_may_not_be_read_is_not_waited_for(held: frozenset[Right] | None, names: list[str]) -> None:
    """Without READ the log is not read, because the client would only reach its timeout."""
    requested = CheckedCluster(
        KafkaConnection(bootstrap_servers="broker:9092"), cast("KafkaInspector", Forbidding(held))
    )
    findings = list(check_deployment("__marshal", requested, requested))
    assert [finding.name for finding in findings] == names
    assert CheckState.PROBLEM in {each.state for each in findings}


def done(value: object) -> Future[object]:
    """Return a completed future."""
    answer: Future[object] = Future()
    answer.set_result(value)
    return answer


@pytest.fixture
def log() -> ClientLog:
    """The log of the client's events."""
    return ClientLog("a", "broker:9092")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, log: ClientLog) -> Iterator[KafkaInspector]:
    """An inspector of the fake cluster."""
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.admin", lambda *_, **__: (Cluster(), log))
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.reach", lambda *_, **__: None)
    with KafkaInspector(KafkaConnection(bootstrap_servers="broker:9092")) as inspection:
        yield inspection


def test_rights_and_replicas_are_looked_up(cluster: KafkaInspector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the operations that matter are kept; partitions with and without a leader are distinguished."""
    found = cluster.topic_info("orders")
    assert found.rights == frozenset({Right.READ, Right.DESCRIBE})
    assert found.replicas == {0: Replicas(2, 1, has_leader=True), 1: Replicas(2, 0, has_leader=False)}
    monkeypatch.setattr(Cluster, "operations", None)
    assert cluster.topic_info("orders").rights is None


def test_a_brokers_version_is_reported_by_its_settings(
    cluster: KafkaInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 3.9 a setting names the version; 4.0 no longer has that setting."""
    assert cluster.brokers() == [Broker(FROM_4)]
    monkeypatch.setattr(Cluster, "settings", {"inter.broker.protocol.version": SimpleNamespace(value="3.8-IV0")})
    assert cluster.brokers() == [Broker("3.8-IV0")]


def test_the_longest_time_held_back_is_kept(cluster: KafkaInspector, log: ClientLog) -> None:
    """The client reports each throttled answer, and also when throttling ends."""
    assert cluster.throttled_s <= 0
    for seconds in (0.5, 2.0, 0.0):
        log.callbacks()["throttle_cb"](SimpleNamespace(broker_name="b", throttle_time=seconds))
    assert cluster.throttled_s == pytest.approx(2.0)
