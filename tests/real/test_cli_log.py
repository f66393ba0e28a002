"""The command line on a real broker, as a user calls it: in its own process."""

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition

from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Append
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    coordination_partition,
    render,
)
from tests.cli import COMMAND, REPOSITORY, Answer, environ, start
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.topics import alter, grow

PARTITIONS = 4
VECTOR = REPOSITORY / "tests" / "vectors" / "marshal-log.jsonl"
OF_STATUS = {"freshness", "data_end", "lag", "lag_ms", "lag_unknown"}

Call = Callable[..., Answer]


@pytest.fixture
def call(kafka: str, coordination_topic: str) -> Call:
    """A function that runs the command line with the suite's broker and the test's coordination topic."""
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    return lambda *arguments, given="": start(*arguments, given=given, environment=environment)


def message(kind: type[Message], topic: str, number: int = 0, **fields: int) -> Message:
    """Return a record of instance i in group g."""
    return kind(instance="i", client="c", group="g", topic=topic, partition=number, time_s=1, **fields)


def write(connection: KafkaConnection, coordination_topic: str, *messages: Message) -> None:
    """Append records about data topics."""
    log = KafkaLog(connection, coordination_topic)
    records = [Append(coordination_partition(each.topic, PARTITIONS), render(each)) for each in messages]
    assert all(ack.offset is not None for ack in log.append(records))
    log.close()


def write_raw(kafka: str, topic: str, records: list[tuple[int, bytes | None]]) -> None:
    """Append (coordination partition, value) records, valid or not."""
    producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True, "logger": None})
    for partition, value in records:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(WITHIN_S) == 0


def test_a_stored_tail_is_what_status_shows(call: Call, kafka: str, topics: Topics, coordination_topic: str) -> None:
    """`tail --json | replay` builds the world state that `status` shows, from a log with all kinds of values."""
    grow(topics, coordination_topic, 8)
    rows = [json.loads(line) for line in VECTOR.read_text().splitlines()]
    written = [(row["partition"], row["value"].encode()) for row in rows]
    written += [(2, b"junk\xff\x1b[31m"), (2, None), (4, b"ClaimingPartition/1/1/i/c/groupG/ev/1"), (0, "é".encode())]
    written += [(4, f"Heartbeat/1/1/{name}/c/groupG/ev/1/250".encode()) for name in ("i", "nobody")]
    write_raw(kafka, coordination_topic, written)
    stored = call("tail", "--json")
    assert (stored.code, stored.err) == (0, "")
    assert len(stored.lines) == len(written)
    replayed = call("replay", "-", "--json", "--coordination-partitions", "8", given=stored.out).json
    status = call("status", "--json").json
    shown = {
        name: {
            "paused_until": group["paused_until"],
            "partitions": [{key: row[key] for key in row.keys() - OF_STATUS} for row in group["partitions"]],
        }
        for name, group in status["groups"].items()
    }
    assert shown == replayed["groups"]
    assert (status["invalid"], status["refused"]) == (replayed["invalid"], replayed["refused"])
    assert replayed["invalid"] == 3
    owner = next(row for row in replayed["groups"]["groupG"]["partitions"] if row["partition"] == 1)
    assert (owner["owner_instance"], owner["last_beat_ms"] is None) == ("nobody", False)


def test_status_shows_owner_plan_and_lag(
    call: Call,
    connection: KafkaConnection,
    coordination_topic: str,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> None:
    """A claimed and planned partition is shown with owner, freshness, plan, and lag to the end of the topic."""
    data = topic(2)
    fill(data, 2, 20)
    write(
        connection,
        coordination_topic,
        message(ClaimingPartition, data),
        message(Heartbeat, data, offset=3),
        message(ClaimingMessages, data, plan_end=8),
        message(ClaimingPartition, "not-there"),
    )
    answer = call("status", "--json", "--topic", data)
    assert (answer.code, answer.err) == (0, "")
    home = coordination_partition(data, PARTITIONS)
    assert [each["partition"] for each in answer.json["coordination_partitions"]] == [home]
    (row,) = answer.json["groups"]["g"]["partitions"]
    assert (row["topic"], row["partition"], row["owner_instance"], row["freshness"]) == (data, 0, "i", "fresh")
    assert (row["offset"], row["plan_end"], row["data_end"], row["lag"]) == (3, 8, 10, 7)
    rows = call("status", "--json", "--group", "g").json["groups"]["g"]["partitions"]
    assert {each["topic"]: each["lag_unknown"] for each in rows} == {data: None, "not-there": "no such topic"}
    text = call("status").out
    assert re.search(rf"{data}/0 +i \(c\) +fresh, [0-9.]+ s +3 +8 +7 ", text)
    assert "has no settings" not in text
    unknown = call("status", "--group", "nobody")
    assert unknown.code == 1
    assert ("\nThe log has no group 'nobody'; it has '" in unknown.out, unknown.err) == (True, "")


def test_what_is_only_observed_is_said(call: Call, connection: KafkaConnection, coordination_topic: str) -> None:
    """If the log's beginning is deleted, status and tail report that it is only observed. Doctor reports a problem."""
    write(connection, coordination_topic, message(ClaimingPartition, "orders"), message(ClaimingPartition, "orders"))
    home = coordination_partition("orders", PARTITIONS)
    delete_up_to(connection, coordination_topic, home, 1)
    assert f"Only observed: coordination partitions {home}." in call("status").out
    certain = {each["partition"]: each["certain"] for each in call("status", "--json").json["coordination_partitions"]}
    assert certain == {number: number != home for number in range(PARTITIONS)}
    answer = call("doctor", "--json")
    assert answer.code == 1
    problems = [each["name"] for each in answer.json["findings"] if each["state"] == "problem"]
    assert problems == ["certain"]
    assert f"coordination partition {home} begins at offset 1" in call("tail").error


def delete_up_to(connection: KafkaConnection, topic: str, partition: int, offset: int) -> None:
    """Delete a partition's records before `offset`, as retention does."""
    client, _ = clients.admin(connection, client_id="test")
    (future,) = client.delete_records([TopicPartition(topic, partition, offset)]).values()
    future.result(WITHIN_S)


def test_tail_follows_until_it_is_interrupted(connection: KafkaConnection, kafka: str, coordination_topic: str) -> None:
    """`tail --follow` shows each new record with its result, and Ctrl-C ends it with code 130 and no message."""
    write(connection, coordination_topic, message(ClaimingPartition, "orders"))
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    process = subprocess.Popen(
        [*COMMAND, "tail", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ(environment),
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.readline().endswith("ClaimingPartition g orders/0 by i (c)  accepted\n")
        write(connection, coordination_topic, message(ClaimingPartition, "orders"))
        assert process.stdout.readline().endswith("refused: the partition has a live owner\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 130
        assert process.stderr.read() == ""


def test_the_exporter_serves_a_log_until_it_is_terminated(
    connection: KafkaConnection,
    kafka: str,
    coordination_topic: str,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> None:
    """It serves owner, lag and retention of a real topic, and follows the log. SIGTERM ends it with exit code 0."""
    data = topic(2)
    fill(data, 2, 20)
    write(connection, coordination_topic, message(ClaimingPartition, data), message(Heartbeat, data, offset=3))
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    process = subprocess.Popen(
        [*COMMAND, "exporter", "--json", "--listen", "0", "--interval", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ(environment),
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        address = json.loads(process.stdout.readline())["listen"]

        def has(line: str) -> Callable[[], bool]:
            def is_served() -> bool:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=WITHIN_S) as answer:
                    return line in answer.read().decode().splitlines()

            return is_served

        place = f'group="g",topic="{data}"'
        wait_until(has(f"marshal_topic_lag_records{{{place}}} 17.0"), "the lag is served")
        assert has(f'marshal_topic_claims{{freshness="fresh",{place}}} 1.0')()
        assert has(f'marshal_partition_claimed{{group="g",partition="0",topic="{data}"}} 1.0')()
        assert has(f"marshal_topic_retention_margin_records{{{place}}} 0.0")()
        write(connection, coordination_topic, message(ReleasingPartition, data, offset=3))
        wait_until(has(f'marshal_topic_claims{{freshness="fresh",{place}}} 0.0'), "the release is served")
        process.terminate()
        assert process.wait(WITHIN_S) == 0
        assert process.stderr.read() == ""


def test_a_follower_ends_when_nobody_reads(connection: KafkaConnection, kafka: str, coordination_topic: str) -> None:
    """`tail --follow | head` ends although no further record is written."""
    write(connection, coordination_topic, message(ClaimingPartition, "orders"))
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    process = subprocess.Popen(
        [*COMMAND, "tail", "-f", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(environment)
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.readline() != b""
        process.stdout.close()
        assert process.wait(WITHIN_S) == 141
        assert process.stderr.read() == b""


def test_the_last_lines_are_shown(call: Call, connection: KafkaConnection, coordination_topic: str) -> None:
    """`tail` shows 10 records, `-n` the given number, `--from-start` all."""
    write(connection, coordination_topic, *(message(ClaimingPartition, f"t{number}") for number in range(15)))
    assert len(call("tail").out.splitlines()) == 10
    assert len(call("tail", "-n", "12").out.splitlines()) == 12
    assert len(call("tail", "--from-start").out.splitlines()) == 15
    assert len(call("tail", "--json", "-n", "2").lines) == 2


def test_the_topic_is_created_once_and_checked(kafka: str, topics: Topics) -> None:
    """`topic create` creates a topic that `topic check` and `doctor` accept. A second call changes nothing."""
    name = f"cli-{time.time_ns()}"
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": name}
    missing = start("topic", "check", environment=environment)
    assert (missing.code, missing.out) == (5, "")
    assert f"`marshal-dagster topic create --name {name}` creates it" in missing.error
    assert start("status", environment=environment).code == 5
    first = start("topic", "create", "--partitions", "5", "--json", environment=environment).json
    assert (first["created"], first["partitions"], first["ok"]) == (True, 5, True)
    assert first["snapshot_topic"] == f"{name}_snapshot"
    assert topics.settings(f"{name}_snapshot")["cleanup.policy"] == "compact"
    assert len(topics.describe(f"{name}_snapshot").partitions) == 5
    again = start("topic", "create", "--partitions", "5", "--json", environment=environment).json
    assert again == first | {"created": False}
    other = start("topic", "create", environment=environment)
    assert (other.code, "--partitions 5" in other.error) == (2, True)
    check = start("topic", "check", "--json", environment=environment)
    assert (check.code, check.json["topic_id"]) == (0, topics.describe(name).topic_id)
    doctor = start("doctor", "--json", environment=environment)
    assert (doctor.code, doctor.err, doctor.json["ok"]) == (0, "", True)
    assert {each["state"] for each in doctor.json["findings"]} == {"ok", "warning"}


def test_a_topic_with_dangerous_settings_is_refused(kafka: str, topic: MakeTopic) -> None:
    """A topic with senders' timestamps and retention is rejected with both reasons.

    `--allow-unsafe` never allows senders' timestamps. Once the topic has the broker's timestamps, the option allows the
    retention. The topic then has a snapshot topic, with which a week of retention is only a warning.
    """
    name = topic(2)
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": name}
    refused = start("topic", "create", "--partitions", "2", environment=environment)
    assert (refused.code, refused.out) == (1, "")
    assert "message.timestamp.type is CreateTime" in refused.error
    assert "retention.ms is 604800000" in refused.error
    still_refused = start("topic", "create", "--partitions", "2", "--allow-unsafe", environment=environment)
    assert (still_refused.code, still_refused.out) == (1, "")
    check = start("topic", "check", "--json", environment=environment)
    found = {each["setting"]: each["severity"] for each in check.json["problems"]}
    assert found == {"message.timestamp.type": "unusable", "retention.ms": "danger", "replication factor": "warning"}
    alter(KafkaConnection(bootstrap_servers=kafka), name, "message.timestamp.type", "LogAppendTime")
    accepted = start("topic", "create", "--partitions", "2", "--allow-unsafe", environment=environment)
    assert (accepted.code, accepted.err) == (0, "")
    alter(KafkaConnection(bootstrap_servers=kafka), name, "unclean.leader.election.enable", "true")
    check = start("topic", "check", "--json", environment=environment)
    assert (check.code, check.json["ok"]) == (1, False)
    found = {each["setting"]: each["severity"] for each in check.json["problems"]}
    assert found["retention.ms"] == "warning"
    assert f"kafka-configs --bootstrap-server {kafka} --alter" in start("topic", "check", environment=environment).out
    doctor = start("doctor", "--json", environment=environment)
    wrong = [each for each in doctor.json["findings"] if each["state"] == "problem"]
    assert doctor.code == 1
    assert [each["name"] for each in wrong] == ["topic settings"]


def test_a_pause_in_one_place_is_reported(call: Call, kafka: str, coordination_topic: str) -> None:
    """`status` shows a half-written pause, and `doctor` reports it as a problem."""
    pause = ReleaseGroup(instance="p", client="c", group="g", time_s=1, expiry_s=4_000_000_000)
    write_raw(kafka, coordination_topic, [(3, render(pause))])
    group = call("status", "--json").json["groups"]["g"]
    assert (group["paused"], group["paused_by"], group["paused_until"]) == (True, "p", 4_000_000_000)
    assert "in coordination partitions 3 only" in group["differences"][0]
    assert call("doctor").code == 1


@pytest.mark.parametrize("command", [["status"], ["tail", "--follow"], ["topic", "create"], ["topic", "check"]])
def test_a_broker_that_is_down_is_one_line_in_time(command: list[str], unused_port: int) -> None:
    """Without a broker the command ends in time, with code 3 and one line that names the address and what to do."""
    answer = start(*command, "--bootstrap-servers", f"127.0.0.1:{unused_port}", "--timeout", "2")
    assert (answer.code, answer.out) == (3, "")
    assert f"Kafka at 127.0.0.1:{unused_port} cannot be reached" in answer.error
    assert "(tried for 2 s)" in answer.error
    assert "refused" in answer.error


def test_a_connection_file_names_the_broker(kafka: str, coordination_topic: str, tmp_path: Path) -> None:
    """`--connection` replaces the environment."""
    path = tmp_path / "connection.toml"
    path.write_text(f'bootstrap_servers = "{kafka}"\n', encoding="utf-8")
    answer = start("status", "--connection", path, "--coordination-topic", coordination_topic)
    assert (answer.code, answer.err) == (0, "")
    assert f"Coordination log {coordination_topic} (id " in answer.out
