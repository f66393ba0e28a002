"""How soon a new process has the world state from a snapshot, compared with one that reads the whole log."""

from dataclasses import dataclass
from typing import Final

from benchmarks import first_state, interpreters, services, world_state
from benchmarks.claim import until_done_ms
from benchmarks.first_state import FROM_LOG, FROM_SNAPSHOT
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import KafkaSnapshotTopic, kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshot_writer import renew_snapshots
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.coordination.topic_settings import create_snapshot_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.state import OffsetBounds

COORDINATION_TOPIC: Final = "__marshal"
MS_PER_S: Final = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: records in the coordination log, the number of their keys, and rounds."""

    records: int = 1_000_000
    keys: int = 10_000
    alternations: int = 5


def run(sizes: Sizes) -> Measured:
    """Write the log and the snapshots once, then start processes alternately."""
    with services.broker() as connection, interpreters.environment() as environment:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        with Topics(connection) as topics:
            create_snapshot_topic(topics, COORDINATION_TOPIC)
        written = world_state.write_log(connection, sizes.records, sizes.keys)
        snapshots = _write_snapshots(connection, list(written))
        command = [first_state.__name__, connection.bootstrap_servers, COORDINATION_TOPIC]
        from_snapshot = until_done_ms([*command, FROM_SNAPSHOT, "0"], environment)
        from_log = until_done_ms([*command, FROM_LOG, str(sizes.records)], environment)
        ours, beside = alternate(sizes.alternations, lambda: from_snapshot() / MS_PER_S, lambda: from_log() / MS_PER_S)
    name = f"fresh process to the world state after {sizes.records:,} records"
    return Measured([Case(name, ours, beside, "s", Goal.OURS_AT_MOST, 1)], {"snapshots": snapshots})


def _write_snapshots(connection: KafkaConnection, partitions: list[int]) -> dict[str, int]:
    """Write snapshots as a member does at the end of its run, and return their sizes. Raises `RuntimeError`."""
    log = KafkaLog(connection, COORDINATION_TOPIC)
    rationalizer = Rationalizer(log, timeout_s=connection.timeout_s)
    written = renew_snapshots(rationalizer, kafka_snapshots(connection, COORDINATION_TOPIC))
    log.close()
    if sorted(written) != sorted(partitions):
        raise RuntimeError(f"snapshots were written of coordination partitions {written}, not of {partitions}")
    topic = KafkaSnapshotTopic(connection, snapshot_topic_of(COORDINATION_TOPIC))
    ranges = {number: OffsetBounds(0, at.end) for number, at in topic.bounds(partitions).items()}
    sizes = [len(value or b"") for records in topic.read(ranges, connection.timeout_s).values() for _, value in records]
    topic.close()
    return {"coordination_partitions": len(written), "records": len(sizes), "bytes": sum(sizes)}


BENCHMARK: Final = Benchmark(
    "snapshot", "a new process that starts at a snapshot, compared with one that reads the whole log", Sizes(), run
)
