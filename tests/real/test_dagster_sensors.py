"""Sensors on a real Kafka and a real Dagster instance, evaluated as Dagster evaluates them."""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from dagster._core.definitions.sensor_definition import SensorExecutionData

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.devkafka import KafkaCluster, running_kafka
from marshal_dagster.errors import UnavailableError
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_reprocess_job
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.sensors._exhausted_plans import exhausted_plans_check_key
from marshal_dagster.sensors.lag import build_lag_sensor
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

PARTITIONS = 2
HI_MS = 30_000


@dataclass(slots=True)
class Site:
    """A group on a topic, and its own Dagster instance, on disk."""

    connection: KafkaConnection
    coordination_topic: str
    topic: str
    instance: dg.DagsterInstance
    group: str = field(default_factory=lambda: new_instance_id("group"))
    logs: list[KafkaLog] = field(default_factory=list)

    def close(self) -> None:
        """Close the connections of the runs that claimed."""
        for log in self.logs:
            log.close()

    def job(self, *, reprocess: bool = False) -> dg.JobDefinition:
        """Return a job on the topic."""
        op = build_claimed_batch_op(lambda *_: None, name="work", topic=self.topic)
        return build_reprocess_job(op) if reprocess else build_claimed_batch_job(op)

    def evaluate(self, sensor: dg.SensorDefinition, cursor: str | None = None) -> SensorExecutionData:
        """Evaluate a sensor with newly created resources, as a code server does."""
        kafka = KafkaConnectionConfig(
            bootstrap_servers=self.connection.bootstrap_servers, timeout_s=self.connection.timeout_s
        )
        where: dict[str, Any] = {"connection": kafka, "coordination_topic": self.coordination_topic}
        resources = {
            "rationalizer": RationalizerResource(**where),
            "claimer": ClaimerResource(**where, group=self.group, heartbeat_interval_s=HI_MS / 1_000),
        }
        with dg.build_sensor_context(instance=self.instance, cursor=cursor, resources=resources) as context:
            return sensor.evaluate_tick(context)

    def claim(self, run_id: str, offsets: Mapping[int, int]) -> Claimer:
        """Claim partitions for a run, with the given offsets as the group's positions."""
        log = KafkaLog(self.connection, self.coordination_topic, HI_MS)
        self.logs.append(log)
        settings = GroupSettings(HI_MS, RuleSet.NATIVE, DeliveryMode.AT_LEAST_ONCE, ())
        member = Member(self.group, run_id, new_instance_id(run_id))
        claimer = Claimer(Rationalizer(log), member, self.topic, settings)
        claimer.ensure_group_settings()
        assert len(claimer.claim(offsets)) == len(offsets)
        with Topics(self.connection) as topics:
            claimer.name_data_topic(topics.describe(self.topic).topic_id)
        claimer.beat(offsets)
        return claimer

    def write(self, partition: int, ages_s: list[float]) -> None:
        """Write a record of each of these ages."""
        producer = Producer({"bootstrap.servers": self.connection.bootstrap_servers})
        for age_s in ages_s:
            producer.produce(self.topic, b"x", partition=partition, timestamp=int((time.time() - age_s) * 1_000))
        assert producer.flush(WITHIN_S) == 0


@pytest.fixture
def site(connection: KafkaConnection, coordination_topic: str, topic: MakeTopic, tmp_path: Path) -> Iterator[Site]:
    """A topic of two empty partitions."""
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        closing(Site(connection, coordination_topic, topic(PARTITIONS), instance)) as made,
    ):
        yield made


def test_the_lag_sensor_sees_what_is_unread_and_how_old_it_is(site: Site) -> None:
    """The sensor requests runs and stops after the group has read.

    It uses only offsets, and joins no consumer group.
    """
    many = build_lag_sensor(site.job(), group=site.group, max_lag_records=4)
    old = build_lag_sensor(site.job(), group=site.group, max_lag_age_s=600)
    site.write(0, [900, 500, 10])
    assert str(site.evaluate(many).skip_message).startswith("3 records are unread, 3 of them in 1 unheld partitions")
    assert len(site.evaluate(old).run_requests or ()) == 1
    claimer = site.claim("reader", {0: 1, 1: 0})
    assert str(site.evaluate(old).skip_message).startswith("2 records are unread, 0 of them in 0 unheld partitions")
    claimer.release()
    assert "0 partitions have an unread record older than 600 s" in str(site.evaluate(old).skip_message)
    site.write(1, [20, 10, 0])
    fired = site.evaluate(many)
    assert len(fired.run_requests or ()) == 1
    claimer = site.claim("another", {0: 1, 1: 0})
    claimer.plan({0: 3, 1: 1})
    claimer.commit({0: 3, 1: 1})
    claimer.release()
    assert str(site.evaluate(many, fired.cursor).skip_message).startswith("2 records are unread")
    client = AdminClient({"bootstrap.servers": site.connection.bootstrap_servers})
    groups = client.list_consumer_groups().result(WITHIN_S).valid
    assert site.group not in {group.group_id for group in groups}


def test_a_real_instance_keeps_what_sensors_ask_for_and_report(site: Site) -> None:
    """Requested runs with a run record are not requested again, and an exhausted plan fails a stored check."""
    site.write(0, [0, 0])
    job = site.job(reprocess=True)
    reported: list[object] = []
    sensor = build_stale_claim_sensor(job, group=site.group, max_attempts=1, on_exhausted_plans=reported.append)
    claimer = site.claim("a-dead-run", {0: 0})
    claimer.plan({0: 2})
    claimer.release()
    first = site.evaluate(sensor)
    (request,) = first.run_requests or ()
    run = site.instance.create_run_for_job(job, run_config=request.run_config, tags=request.tags)
    assert "was requested and has not ended" in str(site.evaluate(sensor, first.cursor).skip_message)
    site.instance.report_run_failed(run)
    second = site.evaluate(sensor, first.cursor)
    for event in second.asset_events:
        site.instance.report_runless_asset_event(event)
    key = exhausted_plans_check_key(site.group, site.topic)
    (record,) = site.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    assert record.status.value == "FAILED"
    assert len(reported) == 1
    assert site.evaluate(sensor, second.cursor).asset_events == []


def test_all_that_failed_runs_held_is_free_after_one_tick(site: Site) -> None:
    """Two runs fail at once and Dagster shows the sensor only one of them. Both partitions can be claimed at once."""
    failed, _ = build_run_failure_sensors(group=site.group)
    started = site.evaluate(failed)
    runs = [site.instance.create_run_for_job(site.job(), status=dg.DagsterRunStatus.STARTED) for _ in range(2)]
    for partition, run in enumerate(runs):
        site.claim(run.run_id, {partition: 0})
    for run in runs:
        site.instance.report_run_failed(run)
    reported = str(site.evaluate(failed, started.cursor).skip_message)
    assert f"revoked the claims of run {runs[0].run_id}" in reported
    assert "revoked the claims of 1 other ended runs" in reported
    site.claim("next", dict.fromkeys(range(PARTITIONS), 0)).release()


def _sensors(site: Site) -> dict[str, dg.SensorDefinition]:
    failed, _ = build_run_failure_sensors(group=site.group)
    return {
        "stale claims": build_stale_claim_sensor(site.job(reprocess=True), group=site.group),
        "lag": build_lag_sensor(site.job(), group=site.group, max_lag_records=0),
        "dead runs": failed,
    }


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A separate broker, which the test stops."""
    with running_kafka(tmp_path / "kafka") as cluster:
        yield cluster


def test_a_broker_that_stops_fails_ticks_and_harms_nothing(own_cluster: KafkaCluster, tmp_path: Path) -> None:
    """While the broker is down, each tick fails in time and in one line. Once it is back, the same sensors continue."""
    patient = KafkaConnection(bootstrap_servers=own_cluster.bootstrap_servers)
    with Topics(patient) as topics:
        topics.create("coordination", 4, 1, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})
        topics.create("data", PARTITIONS, 1)
    home = tmp_path / "dagster"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance, ExitStack() as stack:
        site = stack.enter_context(closing(Site(patient, "coordination", "data", instance)))
        site.write(0, [0])
        site.claim("reader", {0: 0}).release()
        site.connection = replace(patient, timeout_s=2)
        before = wait_until(
            lambda: {name: site.evaluate(sensor) for name, sensor in _sensors(site).items()},
            "no tick fails",
            ignored=UnavailableError,
        )
        assert [len(found.run_requests or ()) for found in before.values()] == [0, 1, 0]
        own_cluster.kill(1)
        for name in ("stale claims", "lag"):
            _check_failure(site, name, before[name].cursor)
        assert instance.get_runs() == []
        run = instance.create_run_for_job(site.job(), status=dg.DagsterRunStatus.STARTED)
        instance.report_run_failed(run)
        reaction = site.evaluate(_sensors(site)["dead runs"], before["dead runs"].cursor)
        (reported,) = reaction.dagster_run_reactions or ()
        assert reported.error is not None
        assert "could not be revoked: Kafka at " in reported.error.message
        own_cluster.start(1)
        after = _until_it_answers(site, before)
        assert [len(found.run_requests or ()) for found in after.values()] == [0, 1]
        assert (after["lag"].run_requests or ())[0].run_key == (before["lag"].run_requests or ())[0].run_key


def _check_failure(site: Site, name: str, cursor: str | None = None) -> None:
    with pytest.raises(UnavailableError, match=rf"^Kafka at .*\(tried for {site.connection.timeout_s:g} s\)") as failed:
        site.evaluate(_sensors(site)[name], cursor)
    assert "\n" not in str(failed.value)


def _until_it_answers(site: Site, before: Mapping[str, SensorExecutionData]) -> dict[str, SensorExecutionData]:
    """Evaluate the sensors as the daemon does, until no tick fails any more."""

    def tick() -> dict[str, SensorExecutionData]:
        return {name: site.evaluate(_sensors(site)[name], before[name].cursor) for name in ("stale claims", "lag")}

    return wait_until(tick, "no tick fails", ignored=UnavailableError)


def test_a_port_where_nothing_listens_fails_every_sensor_in_one_line(site: Site) -> None:
    """A broker that never existed has the same effect."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        site.connection = KafkaConnection(bootstrap_servers=f"127.0.0.1:{port}", timeout_s=0.5)
        for name in ("stale claims", "lag"):
            _check_failure(site, name)
