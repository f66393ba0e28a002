"""A few races of processes that write the same ranges of a Kafka output (`python -m tests.task_races`)."""

import multiprocessing.forkserver
from collections.abc import Iterator
from random import Random

import pytest

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks.conformance.target import part
from tests.conditions import WITHIN_S
from tests.kafka_outputs import KafkaOutput, committed
from tests.task_races.checks import judge
from tests.task_races.local_tasks import Attempts, Processes
from tests.task_races.race import Race, Run, open_sink, rows_of

SEEDS = (4, 24)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """The processes of all tasks, forked from one that has imported everything."""
    with Processes() as processes:
        yield processes
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined] # no public function stops it


def test_each_record_is_written_once_whichever_processes_die(connection: KafkaConnection, processes: Processes) -> None:
    """Runs write the same ranges at the same time, while their tasks are killed or stopped, repeated and run twice."""
    races = [Race(connection, processes, seed) for seed in SEEDS]
    found = [race.go() for race in races]
    assert [verdict.violations for verdict in found] == [()] * len(SEEDS)
    assert sum(verdict.lost + verdict.twice for verdict in found) == 0
    assert sum(race.killed for race in races) > 0


def test_tasks_that_run_twice_at_the_same_time_write_their_ranges(
    connection: KafkaConnection, processes: Processes
) -> None:
    """With speculative execution one process of a task fences the other one, and the job takes the first result."""
    topic = KafkaOutput(connection).topic
    for start in (0, 20):
        ranges = [part(partition, start, start + 20) for partition in range(3)]
        sink = open_sink(connection, topic)
        attempts = Attempts("a", copies=2)
        run = Run(sink, processes, "a", ranges, Random(start), attempts, has_whole_partitions=False)
        assert set(run.write().taken) == set(ranges)
        for copy in processes.taken():  # Spark kills it; here it would fence a task of the next batch
            copy.process.join(WITHIN_S)
    expected = {n: [place[1:] for place in rows_of(part(n, 0, 40))] for n in range(3)}
    assert judge(committed(connection, topic), expected, []).violations == ()
