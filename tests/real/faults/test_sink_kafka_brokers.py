"""A broker is killed while a task writes a range of the Kafka sink: a leader, or the transaction's coordinator."""

from collections.abc import Iterator
from random import Random

import pytest

from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks.conformance.target import part
from tests.fault_harness.cluster import DATA_SETTINGS, FaultyKafka
from tests.kafka_outputs import committed
from tests.task_races.checks import judge
from tests.task_races.local_tasks import Attempts, Processes
from tests.task_races.race import Run, open_sink, rows_of
from tests.task_races.worker import Act, Fault

TRANSACTIONS = "__transaction_state"
RANGE = part(0, 0, 40)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """The processes of all tasks."""
    with Processes() as processes:
        yield processes


@pytest.mark.parametrize(("step", "victim"), [("sent", "the leader of the output"), ("noted", "the coordinator")])
def test_a_broker_is_killed_while_a_task_has_a_range_open(
    faulty_brokers: FaultyKafka, processes: Processes, step: str, victim: str
) -> None:
    """The task completes the range with another broker, or the next run does. Each record exists once."""
    kafka = faulty_brokers
    kafka.repair()
    connection = KafkaConnection(bootstrap_servers=kafka.bootstrap_servers)
    topic = new_instance_id("output")
    with Topics(connection) as topics:
        assert topics.create(topic, 2, 3, DATA_SETTINGS)
    sink = open_sink(connection, topic)
    assert sink.create_notes()
    killed: list[int] = []

    def kill() -> None:
        if victim == "the coordinator":
            killed.append(kafka.leader(TRANSACTIONS, coordinating_partition(kafka, sink._key(RANGE))))
        else:
            killed.append(kafka.leader(topic, 0))
        kafka.kill(killed[0])

    stopping = Attempts("a", faults=lambda _: iter([Fault(Act.STOP, step, 1)]), most=1, while_stopped=kill)
    reported = []
    for name, attempts in (("a", stopping), ("b", Attempts("b"))):
        run = Run(open_sink(connection, topic), processes, name, [RANGE], Random(0), attempts)
        try:
            reported += [(range_, name) for range_ in run.write().taken]
        except MarshalError:
            assert name == "a", "the next run must succeed"
    assert killed

    verdict = judge(committed(connection, topic, 60), {0: [place[1:] for place in rows_of(RANGE)]}, reported)
    assert verdict.violations == ()


def coordinating_partition(kafka: FaultyKafka, transactional_id: str) -> int:
    """Return the partition of the brokers' transaction log for an id, as Java computes it."""
    number = 0
    for character in transactional_id:
        number = (31 * number + ord(character)) & 0xFFFFFFFF
    return (number & 0x7FFFFFFF) % len(kafka.admin().list_topics(TRANSACTIONS).topics[TRANSACTIONS].partitions)
