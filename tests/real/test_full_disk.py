"""A batch whose output is on a full file system: the run fails with one line, and a later run writes the same rows."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Producer

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.ops import execution
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.sinks import FileSink
from tests.conditions import WITHIN_S
from tests.real.conftest import MakeTopic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS, MESSAGES, MESSAGE_BYTES = 2, 40, 20_000
SMALL, LARGE = "256k", "64m"
"""Sizes of the file system: smaller and larger than the messages."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user is not allowed to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # Spark may still have it open


def values(_: dg.OpExecutionContext, __: ClaimedBatch, frame: "DataFrame") -> "DataFrame":
    """Return the messages of a batch."""
    return frame.select("partition", "offset", "value")


def test_a_full_disk_fails_the_run_with_one_line(  # noqa: PLR0917 - fixtures
    disk: Path,
    spark: "SparkSession",
    kafka: str,
    topic: MakeTopic,
    coordination_topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line names group and topic, and what to do. With more space, each message is written once."""
    monkeypatch.setattr(execution, "start_session", lambda _: spark)
    name = topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(MESSAGES):
        producer.produce(name, os.urandom(MESSAGE_BYTES), partition=number % PARTITIONS)
    assert producer.flush(WITHIN_S) == 0
    sink = FileSink(disk / "output")
    orders = build_claimed_batch_op(values, name="orders", topic=name, sink=sink)
    claimer = ClaimerResource(
        connection=KafkaConnectionConfig(bootstrap_servers=kafka),
        coordination_topic=coordination_topic,
        group="shops",
        delivery="effectively_once",
    )

    @dg.job(resource_defs={"claimer": claimer})
    def job() -> None:
        orders()

    with dg.DagsterInstance.ephemeral() as instance:
        failed = job.execute_in_process(instance=instance, raise_on_error=False).failure_data_for_node("orders")
        assert failed is not None
        assert failed.error is not None
        error = failed.error.cause or failed.error
        message = error.message.strip()
        assert "\n" not in message
        assert f"group 'shops', topic '{name}': the batch failed and its claims are released" in message
        assert "No space left on device" in message
        assert "Free disk space" in message
        assert "at org.apache" not in failed.error.to_string()
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", str(disk)], check=True)
        assert job.execute_in_process(instance=instance, raise_on_error=False).success
    rows = sink.read(spark).select("partition", "offset").collect()
    assert sorted((row[0], row[1]) for row in rows) == [
        (partition, offset) for partition in range(PARTITIONS) for offset in range(MESSAGES // PARTITIONS)
    ]
