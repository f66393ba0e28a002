"""Duration of a claim, compared with a bare client that writes the same records and reads them back."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks import bare, first_claim, interpreters, services
from benchmarks.first_claim import TOPIC, new_member
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from benchmarks.machine import TOP
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingPartition, GroupSettings, render

COORDINATION_TOPIC: Final = "__marshal"
BARE_TOPIC: Final = "bare"
MS_PER_S: Final = 1_000
_EXIT_WITHIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: rounds of each case, partitions of the large claim, records in the log at the start."""

    single_rounds: int = 500
    many_rounds: int = 50
    partitions: int = 1_000
    process_rounds: int = 15
    log_records: int = 100


class Claims:
    """Claims the same partitions repeatedly, each time as a new instance, with a rationalizer that is caught up."""

    def __init__(self, connection: KafkaConnection, partitions: int) -> None:
        """Set a position for each partition, as every partition in use has one."""
        self.log = KafkaLog(connection, COORDINATION_TOPIC)
        self._rationalizer = Rationalizer(self.log, topics=[TOPIC])
        self._partitions = range(partitions)
        first = self._claimer()
        first.ensure_group_settings()
        first.claim(self._partitions)
        first.beat(dict.fromkeys(self._partitions, 0))
        first.release()

    def claim_s(self) -> float:
        """Claim, check that all partitions were won, and release; return the seconds that the claim took."""
        claimer = self._claimer()
        began_s = time.perf_counter()
        won = claimer.claim(self._partitions)
        took_s = time.perf_counter() - began_s
        if len(won) != len(self._partitions):
            raise RuntimeError(f"{len(won)} of {len(self._partitions)} partitions were won")
        claimer.release()
        return took_s

    def _claimer(self) -> Claimer:
        return Claimer(self._rationalizer, new_member(), TOPIC, GroupSettings())


def records_like_claims(partitions: int) -> list[bytes]:
    """Return the records of a claim of that many partitions."""
    member = new_member()
    return [
        render(
            ClaimingPartition(
                instance=member.instance,
                client=member.client,
                group=member.group,
                topic=TOPIC,
                partition=number,
                time_s=int(time.time()),
            )
        )
        for number in range(partitions)
    ]


def run(sizes: Sizes) -> Measured:
    """Measure the three cases with one broker."""
    with services.broker() as connection:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        services.create_coordination_topic(connection, BARE_TOPIC)
        single = _round_trips(connection, 1, sizes.single_rounds)
        many = _round_trips(connection, sizes.partitions, sizes.many_rounds)
        fresh = _fresh_processes(connection, sizes)
    return Measured(
        [
            Case("claim 1 partition", *single, "ms", Goal.RATIO_AT_MOST, 2),
            Case(f"claim {sizes.partitions:,} partitions", *many, "ms", Goal.RATIO_AT_MOST, 2),
            Case("fresh process to first won claim", *fresh, "ms", Goal.RATIO_AT_MOST, 1.5),
        ],
        {"record_bytes": len(records_like_claims(1)[0])},
    )


def _round_trips(connection: KafkaConnection, partitions: int, rounds: int) -> tuple[Sequence[float], Sequence[float]]:
    """Compare claims with bare round trips, in milliseconds."""
    records = records_like_claims(partitions)
    claims = Claims(connection, partitions)
    with _bare_client(connection) as client:

        def bare_ms() -> float:
            began_s = time.perf_counter()
            client.round_trip(records)
            return (time.perf_counter() - began_s) * MS_PER_S

        measured = alternate(rounds, lambda: claims.claim_s() * MS_PER_S, bare_ms, warm_up=max(2, rounds // 10))
    claims.log.close()
    return measured


@contextmanager
def _bare_client(connection: KafkaConnection) -> Iterator[bare.BareClient]:
    client = bare.BareClient(connection.bootstrap_servers, BARE_TOPIC)
    yield client
    client.close()


def _fresh_processes(connection: KafkaConnection, sizes: Sizes) -> tuple[Sequence[float], Sequence[float]]:
    """Measure from the start of an interpreter to its first won claim, and to its first bare round trip, in ms.

    The coordination topic is new, and its log is short.
    """
    topic = f"{COORDINATION_TOPIC}-short"
    services.create_coordination_topic(connection, topic)
    log = KafkaLog(connection, topic)
    claimer = Claimer(Rationalizer(log, topics=[TOPIC]), new_member(), TOPIC, GroupSettings())
    claimer.ensure_group_settings()
    claimer.claim([0])
    for _ in range(sizes.log_records):
        claimer.beat({0: 0})
    claimer.release()
    log.close()
    size = len(records_like_claims(1)[0])
    servers = connection.bootstrap_servers
    with interpreters.environment() as environment:
        return alternate(
            sizes.process_rounds,
            until_done_ms([first_claim.__name__, servers, topic], environment),
            until_done_ms([bare.__name__, servers, BARE_TOPIC, "0", str(size)], environment),
            warm_up=2,
        )


def until_done_ms(command: Sequence[str], environment: Mapping[str, str]) -> Callable[[], float]:
    """Return a function that measures from the start of `python -m COMMAND` to the line `done` that it prints."""

    def measure() -> float:
        began_s = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, cwd=TOP, env=environment
        ) as process:
            said = process.stdout.readline() if process.stdout else ""
            took_s = time.perf_counter() - began_s
            code = process.wait(_EXIT_WITHIN_S)
        if said.strip() != bare.DONE or code:
            raise RuntimeError(f"python -m {' '.join(command)} exited with code {code} and printed {said!r}")
        return took_s * MS_PER_S

    return measure


BENCHMARK: Final = Benchmark(
    "claim", "a claim, compared with a bare client that writes and reads the same records", Sizes(), run
)
