"""`recover` on a real broker, as a user calls it."""

from collections.abc import Callable

import pytest

from marshal_dagster.coordination.topic_settings import create_snapshot_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    ReleasingPartition,
    coordination_partition,
    render,
)
from tests.cli import Answer, start
from tests.real.conftest import MakeTopic
from tests.real.test_cli_log import PARTITIONS, delete_up_to, message, write, write_raw

Call = Callable[..., Answer]


@pytest.fixture
def call(kafka: str, coordination_topic: str) -> Call:
    """A function that runs the command line with the suite's broker and the test's coordination topic."""
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    return lambda *arguments, given="": start(*arguments, given=given, environment=environment)


def test_a_cut_log_is_recovered(  # noqa: PLR0917 - fixtures
    call: Call,
    kafka: str,
    connection: KafkaConnection,
    topics: Topics,
    coordination_topic: str,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> None:
    """After an operator confirms, `recover` makes the partitions of a cut log claimable again."""
    data = topic(2)
    fill(data, 2, 20)
    home = coordination_partition(data, PARTITIONS)
    write(connection, coordination_topic, message(ClaimingPartition, data))
    settings = GroupSettingsRecord(instance="i", client="c", group="g", time_s=1, settings=GroupSettings(500))
    write_raw(kafka, coordination_topic, [(home, render(settings))])
    ends = (message(Heartbeat, data, offset=3), message(ReleasingPartition, data, offset=3))
    write(connection, coordination_topic, *ends)
    delete_up_to(connection, coordination_topic, home, 1)

    without = call("recover")
    assert (without.code, f"topic create --name {coordination_topic}" in without.error) == (5, True)
    assert create_snapshot_topic(topics, coordination_topic)
    refused = call("recover", given="n\n")
    assert (refused.code, "nothing was written" in refused.err) == (1, True)
    assert f"Only observed: coordination partitions {home}." in refused.out
    assert [line.split()[:6] for line in refused.out.splitlines() if line.startswith(f"g      {data}/0")] == [
        ["g", f"{data}/0", "3", "3", "-", "3"]
    ]
    answer = call("recover", "--offset", f"g/{data}/1=4", given="y\n")
    assert answer.code == 0, answer.err
    assert f"Coordination partitions {home} have a snapshot" in answer.out

    status = call("status", "--json").json
    assert all(each["certain"] for each in status["coordination_partitions"])
    rows = status["groups"]["g"]["partitions"]
    assert [(row["partition"], row["offset"], row["owner_instance"], row["lag"]) for row in rows] == [
        (0, 3, None, 7),
        (1, 4, None, 6),
    ]
    again = call("recover", "--yes", "--json")
    assert (again.code, again.json) == (0, {"recovered": [], "keys": []})
    doctor = {each["name"]: each["state"] for each in call("doctor", "--json").json["findings"]}
    assert (doctor["certain"], doctor["snapshots"]) == ("ok", "ok")
