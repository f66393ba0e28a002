"""List of all benchmarks. Add a new module with a `BENCHMARK` here."""

from typing import Any, Final

from benchmarks import (
    alternatives,
    batch,
    claim,
    connect,
    coordinator,
    delta_sink,
    exporter,
    file_sink,
    growth,
    heartbeat_under_load,
    iceberg_sink,
    kafka_sink,
    mariadb_sink,
    outbox,
    postgres_sink,
    postgres_upsert,
    scale,
    sink_memory,
    snapshot,
    start_up,
    tick,
    world_state,
)
from benchmarks.harness import Benchmark

BENCHMARKS: Final[tuple[Benchmark[Any], ...]] = (
    claim.BENCHMARK,
    world_state.BENCHMARK,
    snapshot.BENCHMARK,
    batch.BENCHMARK,
    alternatives.BENCHMARK,
    growth.BENCHMARK,
    scale.BENCHMARK,
    connect.BENCHMARK,
    kafka_sink.BENCHMARK,
    postgres_sink.BENCHMARK,
    postgres_upsert.BENCHMARK,
    mariadb_sink.BENCHMARK,
    sink_memory.BENCHMARK,
    iceberg_sink.BENCHMARK,
    delta_sink.BENCHMARK,
    file_sink.BENCHMARK,
    outbox.BENCHMARK,
    coordinator.BENCHMARK,
    heartbeat_under_load.BENCHMARK,
    tick.BENCHMARK,
    exporter.BENCHMARK,
    start_up.BENCHMARK,
)
