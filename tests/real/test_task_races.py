"""A few races of processes that write the same ranges of a Kafka output (`python -m tests.task_races`)."""

import multiprocessing.forkserver
from collections.abc import Iterator

import pytest

from marshal_dagster.kafka.connection import KafkaConnection
from tests.task_races.local_tasks import Processes
from tests.task_races.race import Race

SEEDS = (3, 4, 5)


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
    assert sum(race.killed for race in races) > len(SEEDS)
    assert sum(race.resumed for race in races) > 0
