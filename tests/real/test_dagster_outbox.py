"""The job that drains an outbox, on a real PostgreSQL and a real Kafka."""

import os
import socket
from collections.abc import Iterator

import psycopg
import pytest
from dagster import DagsterInstance, ExecuteInProcessResult

from marshal_dagster.jobs.outbox import build_outbox_drain_job
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.outbox import OutboxResource
from tests.real.conftest import MakeTopic
from tests.sink_outputs import own_schema


@pytest.fixture
def outbox(postgres: str, connection: KafkaConnection) -> OutboxResource:
    """An outbox in its own schema."""
    resource = OutboxResource(
        connection=KafkaConnectionConfig(bootstrap_servers=connection.bootstrap_servers),
        dsn=postgres,
        database_schema=own_schema(),
        max_attempts=1,
        topic_patience_s=0,
    )
    with psycopg.connect(postgres) as made:
        made.execute(f"CREATE SCHEMA {resource.database_schema}".encode())
    OutboxTopics.of(resource.tables().create().uid).create(connection)
    return resource


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    """A Dagster instance for this test."""
    with DagsterInstance.ephemeral() as instance:
        yield instance


def test_a_run_publishes_what_is_there_and_ends(
    outbox: OutboxResource, instance: DagsterInstance, postgres: str, topic: MakeTopic
) -> None:
    """The metadata reports the number of rows. A second run publishes nothing, and a run that parks rows fails."""
    wanted = topic(2)
    box = Outbox(schema=outbox.database_schema)
    with psycopg.connect(postgres) as connection:
        box.stash(connection, [OutboxRecord(wanted, str(number), key="k") for number in range(2_500)])
    drain = build_outbox_drain_job()

    reported = drain.execute_in_process(instance=instance, resources={"outbox": outbox})
    assert _metadata(reported)["published"] == 2_500
    assert _metadata(reported)["rows waiting"] == 0
    assert outbox.status().registration.leader == f"{socket.gethostname()}:{os.getpid()}"

    again = drain.execute_in_process(instance=instance, resources={"outbox": outbox})
    assert _metadata(again)["published"] == 0

    with psycopg.connect(postgres) as connection:
        box.stash(connection, [OutboxRecord(f"{wanted}-missing", "a"), OutboxRecord(wanted, "b")])
    failed = drain.execute_in_process(instance=instance, resources={"outbox": outbox}, raise_on_error=False)
    assert not failed.success
    (failure,) = [event.step_failure_data for event in failed.all_events if event.is_step_failure]
    assert "outbox 'outbox': 1 rows cannot be published and are set aside" in str(failure.error)
    assert (outbox.status().rows, outbox.status().parked) == (0, 1)


def _metadata(reported: ExecuteInProcessResult) -> dict[str, object]:
    (output,) = [event.step_output_data for event in reported.all_events if event.event_type_value == "STEP_OUTPUT"]
    return {name: value.value for name, value in output.metadata.items()}
