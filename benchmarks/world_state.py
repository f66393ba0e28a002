"""Duration of building the world state from a long log, compared with only reading its records."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from benchmarks import bare, services
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate, median
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from tests.log_generator import LogRecord, generate

COORDINATION_TOPIC: Final = "__marshal"
_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: records in the coordination log, the number of their keys, and rounds."""

    records: int = 1_000_000
    keys: int = 10_000
    alternations: int = 9


class WorldStates:
    """Builds the world state of the whole log repeatedly, and keeps the last one for its figures."""

    def __init__(self, connection: KafkaConnection, records: int) -> None:
        """Expect `records` records in the log."""
        self.last: Rationalizer | None = None
        self._connection = connection
        self._records = records

    def build_s(self) -> float:
        """Connect, build the world state from offset 0, and return the seconds."""
        began_s = time.perf_counter()
        log = KafkaLog(self._connection, COORDINATION_TOPIC)
        rationalizer = Rationalizer(log, timeout_s=bare.TIMEOUT_S)
        rationalizer.catch_up()
        took_s = time.perf_counter() - began_s
        log.close()
        if rationalizer.records_read != self._records:
            raise RuntimeError(f"{rationalizer.records_read} of {self._records} records were read")
        self.last = rationalizer
        return took_s


def run(sizes: Sizes) -> Measured:
    """Write the log once, then read it alternately."""
    with services.broker() as connection:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        ends = write_log(connection, sizes.records, sizes.keys)
        states = WorldStates(connection, sizes.records)

        def read_s() -> float:
            began_s = time.perf_counter()
            consumer = bare.read_all(connection.bootstrap_servers, COORDINATION_TOPIC, ends)
            took_s = time.perf_counter() - began_s
            consumer.close()
            return took_s

        ours, beside = alternate(sizes.alternations, states.build_s, read_s)
    return Measured(
        [Case(f"world state from {sizes.records:,} records", ours, beside, "s", Goal.RATIO_AT_MOST, 1.6)],
        {
            "records_per_s": {
                "ours": round(sizes.records / median(ours)),
                "beside": round(sizes.records / median(beside)),
            },
            "log": _figures(states.last),
        },
    )


def write_log(connection: KafkaConnection, count: int, keys: int) -> dict[int, int]:
    """Write a log of `count` records of `keys` keys, and return the end offset of each coordination partition."""
    partitions = services.COORDINATION_PARTITIONS
    records = generate(_SEED, count, keys=keys, coordination_partitions=partitions, profile="steady")
    ends: Counter[int] = Counter()

    def placed(record: LogRecord) -> tuple[int, bytes | None]:
        ends[record[0]] += 1
        return record[0], record[3]

    services.load(connection, COORDINATION_TOPIC, map(placed, records))
    return dict(ends)


def _figures(rationalizer: Rationalizer | None) -> dict[str, int]:
    """Return figures of the log, from the world state."""
    if rationalizer is None:
        return {}
    worlds = rationalizer.world.partitions.values()
    return {
        "coordination_partitions": len(worlds),
        "keys": sum(len(group.keys) for world in worlds for group in world.groups.values()),
        "invalid_records": sum(world.invalid.total() for world in worlds),
        "refused_records": sum(world.refused.total() for world in worlds),
    }


BENCHMARK: Final = Benchmark(
    "world_state", "the world state of a long log, compared with only reading it", Sizes(), run
)
