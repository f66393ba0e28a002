"""Duration of a sensor's tick with many partitions, compared with the Kafka requests that it needs at least."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka.admin
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from benchmarks import bare, services
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    RuleSet,
    coordination_partition,
    render,
)
from tests.topics import grow

if TYPE_CHECKING:
    from dagster import DagsterInstance, JobDefinition, SensorDefinition

_API: Final[Any] = confluent_kafka.admin
"""The module without type hints, which lack some of its names."""
COORDINATION_TOPIC: Final = "__marshal"
TOPIC: Final = "orders"
LIVE: Final = "live"
DEAD: Final = "dead"
"""Groups: in `LIVE` all claims are live during the benchmark, in `DEAD` all are stale."""
_INTERVALS_MS: Final = {LIVE: 3_600_000, DEAD: 1}
_TARGET_S: Final = 1
_OLD_S: Final = 0.001
"""Every record is older than this. That is the most expensive case: the sensor checks twice for a younger one."""
_AT_ONCE: Final = 5_000
"""Partitions that one request creates. A controller refuses a request of more than 10,000 records."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: partitions that a group has claimed, partitions of the topic that lags, and rounds."""

    partitions: int = 10_000
    lagging: int = 10_000
    alternations: int = 5


def run(sizes: Sizes) -> Measured:
    """Write the claims once, then measure ticks and the bare requests alternately."""
    from dagster import DagsterInstance

    from marshal_dagster.jobs.batch import build_reprocess_job
    from marshal_dagster.ops.claimed_batch import build_claimed_batch_op

    op = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
    job = build_reprocess_job(op)
    with services.broker() as connection, tempfile.TemporaryDirectory() as folder:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        with Topics(connection) as topics:
            _create(topics, sizes.lagging)
        for group in (LIVE, DEAD):
            services.load(connection, COORDINATION_TOPIC, _claims(group, sizes.partitions))
        services.load(connection, TOPIC, ((number, b"unread") for number in range(sizes.lagging)))
        with DagsterInstance.local_temp(folder) as instance:
            cases = list(_cases(connection, instance, job, sizes))
    return Measured(cases, {"coordination_partitions": services.COORDINATION_PARTITIONS})


def _cases(
    connection: KafkaConnection, instance: "DagsterInstance", job: "JobDefinition", sizes: Sizes
) -> Iterator[Case]:
    from marshal_dagster.assets.topics import build_topic_sensor
    from marshal_dagster.sensors.lag import build_lag_sensor
    from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor

    def case(name: str, ours: Callable[[], float], beside: Callable[[], float]) -> Case:
        return Case(name, *alternate(sizes.alternations, ours, beside), "s", Goal.OURS_AT_MOST, _TARGET_S)

    def ticks(sensor: "SensorDefinition", requests: int) -> Callable[[], float]:
        return lambda: _tick_s(connection, instance, sensor, requests)

    follower = Rationalizer(KafkaLog(connection, COORDINATION_TOPIC), timeout_s=bare.TIMEOUT_S)
    follower.catch_up()
    live, dead = (build_stale_claim_sensor(job, group=group) for group in (LIVE, DEAD))

    def after_a_heartbeat_each(measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            services.load(connection, COORDINATION_TOPIC, _heartbeats(LIVE, sizes.partitions))
            return measure()

        return measured

    def read_s() -> float:
        began_s = time.perf_counter()
        follower.catch_up()
        return time.perf_counter() - began_s

    read = after_a_heartbeat_each(read_s)
    for state, sensor, requests in (("live", live, 0), ("stale", dead, 1)):
        name = f"stale-claim tick, {sizes.partitions:,} {state} claims"
        yield case(name, after_a_heartbeat_each(ticks(sensor, requests)), read)
    lagging = build_lag_sensor(job, group=LIVE, max_lag_records=sizes.lagging, max_lag_age_s=_OLD_S)
    admin_client = _admin(connection)
    wanted = [TopicPartition(TOPIC, number) for number in range(sizes.lagging)]
    for kind, sensor in (("lag", lagging), ("topic", build_topic_sensor(TOPIC))):
        name = f"{kind} tick, {sizes.lagging:,} partitions"
        yield case(name, ticks(sensor, 0), lambda: _list_offsets_s(admin_client, wanted))


def _create(topics: Topics, partitions: int) -> None:
    topics.create(TOPIC, min(partitions, _AT_ONCE), 1)
    for made in range(_AT_ONCE, partitions, _AT_ONCE):
        grow(topics, TOPIC, min(partitions, made + _AT_ONCE))


def _claims(group: str, partitions: int) -> Iterator[tuple[int, bytes]]:
    """Yield the records with which one instance claims all partitions of the topic."""
    home = coordination_partition(TOPIC, services.COORDINATION_PARTITIONS)
    who: dict[str, Any] = {"instance": f"{group}-run.1", "client": group, "group": group, "time_s": 0}
    settings = GroupSettings(_INTERVALS_MS[group], RuleSet.NATIVE, DeliveryMode.AT_LEAST_ONCE, ())
    yield home, render(GroupSettingsRecord(settings=settings, **who))
    for number in range(partitions):
        yield home, render(ClaimingPartition(topic=TOPIC, partition=number, **who))
        yield home, render(Heartbeat(topic=TOPIC, partition=number, offset=0, **who))


def _heartbeats(group: str, partitions: int) -> Iterator[tuple[int, bytes]]:
    home = coordination_partition(TOPIC, services.COORDINATION_PARTITIONS)
    who: dict[str, Any] = {"instance": f"{group}-run.1", "client": group, "group": group, "time_s": 0}
    for number in range(partitions):
        yield home, render(Heartbeat(topic=TOPIC, partition=number, offset=0, **who))


def _tick_s(
    connection: KafkaConnection, instance: "DagsterInstance", sensor: "SensorDefinition", requests: int
) -> float:
    """Evaluate a sensor like Dagster, with new resources. Raises `RuntimeError` unless it requests that many runs."""
    from dagster import build_sensor_context

    from marshal_dagster.resources.claimer import ClaimerResource
    from marshal_dagster.resources.connection import KafkaConnectionConfig
    from marshal_dagster.resources.rationalizer import RationalizerResource

    config = KafkaConnectionConfig(bootstrap_servers=connection.bootstrap_servers, timeout_s=connection.timeout_s)
    began_s = time.perf_counter()
    where: dict[str, Any] = {"connection": config, "coordination_topic": COORDINATION_TOPIC}
    resources = {
        "rationalizer": RationalizerResource(**where),
        "claimer": ClaimerResource(**where, group=LIVE, heartbeat_interval_s=_INTERVALS_MS[LIVE] / 1_000),
    }
    with build_sensor_context(instance=instance, resources=resources) as context:
        found = sensor.evaluate_tick(context)
    took_s = time.perf_counter() - began_s
    if len(found.run_requests or ()) != requests:
        raise RuntimeError(f"{len(found.run_requests or ())} runs were requested, not {requests}: {found.skip_message}")
    return took_s


def _admin(connection: KafkaConnection) -> AdminClient:
    client = AdminClient({"bootstrap.servers": connection.bootstrap_servers})
    client.list_topics(timeout=bare.TIMEOUT_S)
    return client


def _list_offsets_s(client: AdminClient, wanted: list[TopicPartition]) -> float:
    """Request the first and the next offset of each partition, and return the seconds."""
    began_s = time.perf_counter()
    look_ups = [
        client.list_offsets(dict.fromkeys(wanted, spec))
        for spec in (_API.OffsetSpec.earliest(), _API.OffsetSpec.latest())
    ]
    for answers in look_ups:
        for answer in answers.values():
            answer.result(timeout=bare.TIMEOUT_S)
    return time.perf_counter() - began_s


BENCHMARK: Final = Benchmark(
    "tick", "a sensor's tick with many partitions, compared with the Kafka requests that it needs", Sizes(), run
)
