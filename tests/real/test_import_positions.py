"""A group's first positions are imported from a real consumer group, or from a checkpoint that Spark wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer

from marshal_dagster.kafka.admin_client import Topics
from tests.cli import Answer, start
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP = "etl"
PARTITIONS, MESSAGES = 3, 60

Call = Callable[..., Answer]


@pytest.fixture
def call(kafka: str, coordination_topic: str) -> Call:
    """A function that runs the command line with the suite's broker and the test's coordination topic.

    The group has settings there.
    """
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}

    def call(*arguments: Any) -> Answer:  # noqa: ANN401 - arguments
        return start(*arguments, environment=environment)

    assert call("settings", "set", GROUP, "--new-group", "--yes").code == 0
    return call


@pytest.fixture
def data(topic: MakeTopic, fill: Callable[[str, int, int], None]) -> str:
    """A data topic with messages in two of its three partitions."""
    name = topic(PARTITIONS)
    fill(name, 2, 2 * MESSAGES)
    return name


def positions(call: Call, data: str) -> list[int | None]:
    """Return the group's positions."""
    return [row["offset"] for row in call("position", "get", GROUP, data, "--json").json["positions"]]


def test_a_consumer_group_is_adopted(call: Call, kafka: str, topics: Topics, data: str) -> None:
    """The import is rejected while the consumers run. Later it takes their commits, or the start of a partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": f"{data}-loader",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.subscribe([data])
        read = dict.fromkeys(range(2), 0)
        while min(read.values()) < MESSAGES // 2:
            message = consumer.poll(WITHIN_S)
            assert message is not None
            assert message.error() is None
            if read[message.partition() or 0] < MESSAGES // 2:
                read[message.partition() or 0] += 1
                consumer.commit(message=message, asynchronous=False)
        assert topics.has_consumers(f"{data}-loader")
        busy = call("position", "import", GROUP, data, "--consumer-group", f"{data}-loader", "--yes")
        assert (busy.code, "has running consumers" in busy.error) == (2, True)
    finally:
        consumer.close()
    wait_until(lambda: not topics.has_consumers(f"{data}-loader"), "the group has no consumers")
    answer = call("position", "import", GROUP, data, "--consumer-group", f"{data}-loader", "--yes", "--json")
    assert answer.code == 0, answer.err
    assert [(row["before"], row["after"], row["set"]) for row in answer.json["positions"]] == [
        (None, at, True) for at in (MESSAGES // 2, MESSAGES // 2, 0)
    ]
    assert positions(call, data) == [MESSAGES // 2, MESSAGES // 2, 0]
    assert topics.group_offsets(GROUP, data) == {0: MESSAGES // 2, 1: MESSAGES // 2, 2: 0}
    again = call("position", "import", GROUP, data, "--consumer-group", f"{data}-loader", "--yes")
    assert (again.code, "already has positions" in again.error) == (2, True)


def test_a_group_that_is_not_there_has_no_consumers(topics: Topics) -> None:
    """A request about such a group is no error."""
    assert not topics.has_consumers("nobody")


def test_a_checkpoint_that_spark_wrote_is_adopted(
    call: Call, kafka: str, data: str, spark: "SparkSession", tmp_path: Path
) -> None:
    """The positions are the end of the last batch that the query has committed."""
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", kafka)
        .option("subscribe", data)
        .option("startingOffsets", f'{{"{data}": {{"0": 7, "1": -2, "2": -2}}}}')
        .option("maxOffsetsPerTrigger", MESSAGES)
        .load()
    )
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(int(WITHIN_S))
    progress = query.recentProgress
    assert len(progress) > 1, "the query had several batches"
    (tmp_path / "checkpoint" / "commits" / str(progress[-1].batchId)).unlink()
    answer = call("position", "import", GROUP, data, "--checkpoint", tmp_path / "checkpoint", "--yes")
    assert answer.code == 0, answer.err
    assert f"batch {progress[-1].batchId} was started and not committed" in answer.err
    reached = json.loads(progress[-2].json)["sources"][0]["endOffset"][data]
    assert 7 < reached["0"] < MESSAGES
    assert positions(call, data) == [reached[str(number)] for number in range(PARTITIONS)]
