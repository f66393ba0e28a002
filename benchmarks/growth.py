"""How the cost of coordination grows with the partitions of a batch, and with the concurrent runs of a group.

The batches process nothing. A batch costs its claim, its plan and its commit: each is an append that is read back. The
bare client, with which it is compared, appends as many records and reads them back, three times.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks import bare, services
from benchmarks.claim import MS_PER_S, records_like_claims
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings, coordination_partition

COORDINATION_TOPIC: Final = "__marshal"
BARE_TOPIC: Final = "bare"
_STEPS: Final = 3
"""Appends of a batch that it waits for and reads back: claims, plans, commits."""
_EIGHT: Final = 8
_WITHIN_S: Final = 120.0
_WARM_UP: Final = 3
_TARGETS: Final = ((512, 8), (4_096, 10))
"""The targets for up to so many partitions."""
_TARGETS_AT_ONCE: Final = ((8, 6), (32, 8))
"""The targets for up to so many runs at once."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: the most partitions (in steps of factor 8), the most concurrent runs (in steps of factor 2)."""

    partitions: int = 4_096
    runs: int = 32
    partitions_of_a_run: int = 4
    alternations: int = 9


def run(sizes: Sizes) -> Measured:
    """Measure both kinds of growth with one broker."""
    with services.broker() as connection:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        services.create_coordination_topic(connection, BARE_TOPIC)
        cases = [_one_run(connection, partitions, sizes) for partitions in _steps(sizes.partitions, _EIGHT)]
        cases += [_many_runs(connection, runs, sizes) for runs in _steps(sizes.runs, 2)]
    return Measured(cases)


def _steps(most: int, factor: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= factor


def _target(targets: Sequence[tuple[int, int]], size: int) -> int:
    """Return the target for this size; the last one also counts beyond its size."""
    return next((target for most, target in targets if size <= most), targets[-1][1])


def _one_run(connection: KafkaConnection, partitions: int, sizes: Sizes) -> Case:
    topic = _data_topic(connection, f"orders-{partitions}", partitions)
    client = bare.BareClient(connection.bootstrap_servers, BARE_TOPIC)
    records = records_like_claims(partitions)
    member = _Member(connection, topic)

    def batch_ms() -> float:
        _arrive(connection, topic, partitions)
        began_s = time.perf_counter()
        if len(member.batch(partitions).ranges) != partitions:
            raise RuntimeError(f"{topic}: not all partitions were in the batch")
        return (time.perf_counter() - began_s) * MS_PER_S

    def bare_ms() -> float:
        began_s = time.perf_counter()
        for _ in range(_STEPS):
            client.round_trip(records)
        return (time.perf_counter() - began_s) * MS_PER_S

    measured = alternate(sizes.alternations, batch_ms, bare_ms, warm_up=_WARM_UP)
    client.close()
    member.close()
    target = _target(_TARGETS, partitions)
    return Case(f"batch of {partitions:,} partitions", *measured, "ms", Goal.RATIO_AT_MOST, target)


def _many_runs(connection: KafkaConnection, runs: int, sizes: Sizes) -> Case:
    """Start all runs at once. Each claims its share of the new messages, and repeats until nothing is left to claim."""
    share = sizes.partitions_of_a_run
    topic = _data_topic(connection, f"shared-{runs}", runs * share)
    with _processes(runs, _work, connection, topic) as work, _processes(runs, _round_trips, connection, topic) as trips:

        def batches_ms() -> float:
            _arrive(connection, topic, runs * share)
            took_s, done = work(share)
            if sum(done) != runs * share:
                raise RuntimeError(f"{done} partitions were done by the runs, of {runs * share}")
            return took_s * MS_PER_S

        measured = alternate(sizes.alternations, batches_ms, lambda: trips(share)[0] * MS_PER_S, warm_up=_WARM_UP)
    target = _target(_TARGETS_AT_ONCE, runs)
    return Case(f"{runs} run(s) at once, {share} partitions each", *measured, "ms", Goal.RATIO_AT_MOST, target)


class _Member:
    """The batches of a group in one topic, without any processing."""

    def __init__(self, connection: KafkaConnection, topic: str) -> None:
        self._log = KafkaLog(connection, COORDINATION_TOPIC)
        self._data = Topics(connection)
        self._topic = topic
        self._delivery = BatchSession(
            log=self._log,
            data=self._data,
            connection=connection,
            group=topic,
            client="benchmark",
            run_id="3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11",
            settings=GroupSettings(),
        )

    def work(self, at_once: int) -> int:
        """Process batches until no partition is left to claim, and return how many partitions were processed."""
        done = 0
        while True:
            batch = self.batch(at_once)
            done += len(batch.ranges)
            if batch.idle is not None:
                return done

    def batch(self, at_once: int) -> ClaimedBatch:
        """Process one batch of at most `at_once` partitions."""
        with self._delivery.claimed_batch(BatchRequest(topic=self._topic, max_claims=at_once)) as batch:
            if batch.idle is None:
                batch.begin_processing()
        return batch

    def close(self) -> None:
        self._delivery.close()


Serve = Callable[[Connection, KafkaConnection, str], None]
"""Main function of a process: it answers each number that it receives with a number, until it receives None."""


def _work(commands: Connection, connection: KafkaConnection, topic: str) -> None:
    member = _Member(connection, topic)
    for at_once in iter(commands.recv, None):
        commands.send(member.work(at_once))
    member.close()


def _round_trips(commands: Connection, connection: KafkaConnection, topic: str) -> None:
    partition = coordination_partition(topic, services.COORDINATION_PARTITIONS)  # one for all, as the runs have
    client = bare.BareClient(connection.bootstrap_servers, BARE_TOPIC, partition)
    for records in iter(commands.recv, None):
        for _ in range(_STEPS):
            client.round_trip(records_like_claims(records))
        commands.send(records)
    client.close()


@contextmanager
def _processes(
    number: int, serve: Serve, connection: KafkaConnection, topic: str
) -> Iterator[Callable[[int], tuple[float, list[int]]]]:
    """Start `number` processes that run `serve`.

    Yields a function that sends a number to all of them, waits for their answers, and returns seconds and answers.
    """
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(number)]
    started = [spawn.Process(target=serve, args=(theirs, connection, topic), daemon=True) for _, theirs in ends]
    for process in started:
        process.start()

    def ask(what: int) -> tuple[float, list[int]]:
        began_s = time.perf_counter()
        for ours, _ in ends:
            ours.send(what)
        answers = [_answer(ours) for ours, _ in ends]
        return time.perf_counter() - began_s, answers

    yield ask
    for ours, _ in ends:
        ours.send(None)
    for process in started:
        process.join(_WITHIN_S)


def _answer(ours: "Connection[int | None, int]") -> int:
    if not ours.poll(_WITHIN_S):
        raise RuntimeError(f"a process did not answer within {_WITHIN_S:g} s")
    return ours.recv()


def _arrive(connection: KafkaConnection, topic: str, partitions: int) -> None:
    """Write one message to each partition."""
    services.load(connection, topic, ((number, b"x") for number in range(partitions)))


def _data_topic(connection: KafkaConnection, name: str, partitions: int) -> str:
    with Topics(connection) as topics:
        topics.create(name, partitions, 1)
    return name


BENCHMARK: Final = Benchmark(
    "growth", "the cost of coordination with more partitions and runs, compared with a bare client", Sizes(), run
)
