"""Claimed batches on a local Spark Connect server, also when the server dies."""

import gc
import json
import logging
import signal
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import psycopg
import pytest
from psycopg import sql

from marshal_dagster._internal.ports import free_port
from marshal_dagster.errors import BadRecord, ConfigurationError, DecodeError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.resources.spark_connect import SparkConnectResource
from marshal_dagster.sinks import DeltaSink, FileSink, KafkaSink, PostgresSink, delta_settings
from marshal_dagster.spark import connect_session
from marshal_dagster.spark.connect_server import ConnectServer, Server
from marshal_dagster.spark.connector import fetch_connector
from marshal_dagster.spark.decoding import SchemaRegistry, decode_avro, decode_json, decode_protobuf
from marshal_dagster.spark.packages import avro_package, delta_package
from marshal_dagster.spark.reader import read_ranges
from tests.avro_bytes import encode, framed
from tests.conditions import WITHIN_S, wait_until
from tests.kafka_outputs import KafkaOutput, committed
from tests.protobuf_bytes import framed_message, orders_file
from tests.real.batch_function import mark_when_at_work, values
from tests.real.canaries import SecretOutputs, write_with_secrets
from tests.real.conftest import MakeTopic
from tests.real.executor_python import python_without, refused, write_with
from tests.real.spark_driver import (
    Driver,
    Where,
    Work,
    claimed,
    fail_at_a_message,
    lose_a_batch,
    messages,
    rows_in,
    rows_of_table,
    run_op,
    session,
    stop_session,
    write_into,
    write_oneself,
    write_through_the_sink,
)
from tests.real.spark_fixtures import jars_beside_the_connector
from tests.real.test_decoding import JSONS, MISFIT, ORDER_1, ORDER_2, batch, outcome
from tests.real.test_decoding import messages as read_letters
from tests.real.test_kill_points_sinks import KafkaTopic, Table
from tests.registry import running_registry
from tests.session_settings import INTERPRETED, SMALL_DELTA
from tests.sink_outputs import TABLE

ENDLESS_MS = 60_000
"""The time that a task takes for a message of a batch whose server is killed."""
SMALL = INTERPRETED | {"spark.master": "local[2]", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """The folder of the server, which is stopped at the end."""
    home = ConnectServer(tmp_path_factory.mktemp("connect"))
    yield home
    home.stop()


@pytest.fixture(scope="module")
def page_port() -> int:
    """The port of the server's web page. It is chosen when the server starts, since others take ports until then."""
    return free_port()


def start(home: ConnectServer, page_port: int) -> Server:
    """Start the server if it does not run, with a web page, Delta Lake and Avro."""
    jars = [*jars_beside_the_connector(avro_package()), *fetch_connector(delta_package())]
    others = {"spark.ui.enabled": "true", "spark.ui.port": str(page_port), "spark.jars": ",".join(map(str, jars))}
    return home.start(SMALL | SMALL_DELTA | delta_settings() | others)


@pytest.fixture
def work(  # noqa: PLR0917 - fixtures
    home: ConnectServer, page_port: int, kafka: str, filled: str, shared_coordination_topic: str, tmp_path: Path
) -> Iterator[Work]:
    """A group at the start of a filled topic, and the server. A failing test shows the server's output."""
    server = start(home, page_port)
    yield Work(Where(server.url, token=server.token), kafka, shared_coordination_topic, filled, tmp_path / "output")
    logging.getLogger(__name__).info((home.folder / "server.log").read_text(errors="replace")[-5_000:])


@pytest.fixture
def outputs(postgres: str, connection: KafkaConnection, tmp_path: Path) -> SecretOutputs:
    """An empty table and an empty topic, which are reached with secrets."""
    folder = tmp_path / "seen"
    folder.mkdir()
    return SecretOutputs(Table(postgres), KafkaOutput(connection), folder)


def write_into_postgres(work: Work, dsn: str) -> None:
    """Process one batch in effectively-once mode into PostgreSQL."""
    spark = session(work.where)
    sink = PostgresSink(dsn, work.group)
    sink.create_tables()
    with claimed(work, sink) as batch:
        rows = values(batch.read(spark))
        sink.create_tables(rows.schema)
        batch.write(rows)


def write_piece_by_piece(work: Work, sink: KafkaSink) -> None:
    """Process one batch in effectively-once mode. This process fetches only a few records at a time."""
    with patch("marshal_dagster.sinks.kafka.records._BYTES_AT_ONCE", 1_000):
        write_into(work, sink)


@dataclass(frozen=True)
class DecodingResults:
    """The results of decoding: each record's value or reason, and the errors."""

    json: list[Any]
    avro: list[Any]
    protobuf: list[Any]
    bad: DecodeError
    good: list[int]
    no_ddl: str


def decode(work: Work, url: str, avro: Sequence[bytes], protobuf: Sequence[bytes], dead: str) -> DecodingResults:
    """Decode JSON, Avro and Protobuf. Bad JSON fails, or is written to the topic `dead`."""
    spark, schemas = session(work.where), SchemaRegistry(url=url)
    jsons = decode_json(batch(spark, [value for value, _ in JSONS]), "id bigint NOT NULL, name string")
    avros = decode_avro(batch(spark, avro), schemas, subject="avro")
    protobufs = decode_protobuf(batch(spark, protobuf), schemas, message="shop.Order", subject="protobuf")
    two = decode_json(batch(spark, ['{"a": 1}', "{"]), "a int")
    with pytest.raises(DecodeError) as bad:
        two.or_fail()
    good = two.or_dead_letter(dead, KafkaConnection(bootstrap_servers=work.bootstrap_servers))
    with pytest.raises(ConfigurationError) as no_ddl:
        decode_json(batch(spark, []), "a intt")
    return DecodingResults(
        json=outcome(jsons, len(JSONS)),
        avro=outcome(avros, len(avro)),
        protobuf=outcome(protobufs, len(protobuf)),
        bad=bad.value,
        good=[row["a"] for row in good.select("value.*").collect()],
        no_ddl=str(no_ddl.value),
    )


def release_threads_stay(work: Work) -> bool:
    """Return whether PySpark's shared threads stay when an earlier session is collected."""
    from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator

    stop_session()
    earlier = session(work.where)
    stop_session()
    session(work.where).range(1).count()
    before = ExecutePlanResponseReattachableIterator._release_thread_pool_instance
    del earlier
    gc.collect()
    return before is not None and before is ExecutePlanResponseReattachableIterator._release_thread_pool_instance


def connect_wrongly(url: str, token: str) -> str:
    """Connect and return the error."""
    stop_session()
    with pytest.raises(UnavailableError) as refused:
        connect_session.connect(url, token=token)
    return str(refused.value)


def fail_to_read(work: Work, hidden: bool) -> None:
    """Have the server run a read with secrets, which fails."""
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="a \\"canary\\"";'
    options = {
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "kafka.sasl.jaas.config": login,
        "kafka.ssl.keystore.key": "-----BEGIN PRIVATE KEY-----\ncanary\n",
        "kafka.ssl.key.password": "canary",
        "kafka.default.api.timeout.ms": "200",
        "kafka.request.timeout.ms": "100",
    }
    stop_session()
    spark = session(work.where)
    if not hidden:
        spark.conf.set("spark.sql.redaction.string.regex", "nothing like this")
    with pytest.raises(Exception, match=r"Timeout|timed out"):
        read_ranges(spark, options, "orders", {0: (0, 5)}).count()
    stop_session()


class InterruptError(BaseException):
    """The interrupt that Dagster raises when a run is canceled."""


def interrupt_a_batch(work: Work) -> None:
    """Interrupt a batch that would take longer than any test by a signal, and wait until its block has ended."""
    spark = session(work.where)

    def interrupt(*_: object) -> None:
        raise InterruptError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with claimed(work) as batch:
            mark_when_at_work(spark, batch.batch_id, work.mark)
            threading.Thread(target=alarm_when_at_work, args=(work.mark,), daemon=True).start()
            values(batch.read(spark), 100_000).write.format("noop").mode("append").save()
    except InterruptError:
        assert session(work.where).range(10).count() == 10
        return
    finally:
        signal.signal(signal.SIGALRM, before)
    raise AssertionError("the batch was not interrupted")


def alarm_when_at_work(mark: Path) -> None:
    """Send this process a signal once the batch is at work."""
    wait_until(mark.exists, "the batch is at work")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def run_job(work: Work, folder: str, slow_ms: int) -> tuple[bool, str]:
    """Execute a run of a job with the resource. Return whether it succeeded, and its error."""
    return run_op(work, SparkConnectResource(folder=folder, server_config=SMALL), slow_ms)


def test_effectively_once_through_the_file_sink(driver: Driver, work: Work) -> None:
    """The rows equal the topic's messages, with the same function as on a cluster."""
    driver.call(write_through_the_sink, work)
    assert rows_in(FileSink(work.output).committed_files()) == messages()


def test_effectively_once_into_postgres(driver: Driver, work: Work, postgres: str) -> None:
    """The client writes the rows into the table, each once."""
    work = replace(work, group=work.group.replace(".", "_"))
    driver.call(write_into_postgres, work, postgres)
    with psycopg.connect(postgres) as connection:
        columns = sql.SQL("SELECT kafka_partition, kafka_offset, value FROM {}")
        found = connection.execute(columns.format(sql.Identifier(work.group))).fetchall()
    assert sorted(found) == messages()


def test_effectively_once_into_a_delta_table(driver: Driver, work: Work) -> None:
    """The sink reads the table on the server, through the process's active session. Each row exists once."""
    driver.call(write_into, work, DeltaSink(str(work.output)))
    assert driver.call(rows_of_table, work) == messages()


def test_effectively_once_into_a_topic(driver: Driver, work: Work, connection: KafkaConnection) -> None:
    """The client writes the rows into the topic in pieces, each once."""
    topic = KafkaTopic(connection)
    driver.call(write_piece_by_piece, work, topic.open())
    assert topic.rows() == messages()


@pytest.mark.parametrize("mode", [DeliveryMode.AT_LEAST_ONCE, DeliveryMode.AT_MOST_ONCE])
def test_what_a_batch_writes_itself(driver: Driver, work: Work, mode: DeliveryMode) -> None:
    """This works in at-most-once mode too, because the server was started with the required settings."""
    driver.call(write_oneself, replace(work, mode=mode))
    assert rows_in(work.output.glob("part-*")) == messages()


def test_the_message_that_fails_is_named(driver: Driver, work: Work) -> None:
    """The server evaluates the failed plan again, over parts of the batch."""
    error = driver.call(fail_at_a_message, work)
    assert "partition 1, offset 8 fails in Spark: [USER_RAISED_EXCEPTION] no good" in error
    assert "--to-offset 1=9`, which also skips the 8 offsets of the batch before it" in error


def test_decoding(driver: Driver, work: Work, topic: MakeTopic) -> None:
    """Records are good or bad as in a local session. Bad records fail the batch or go to a topic."""
    dead = topic(1)
    with running_registry() as registry:
        older, newer = (registry.register("avro", json.dumps(each)) for each in (ORDER_1, ORDER_2))
        file = orders_file(newer=True).SerializeToString()
        number = registry.register("protobuf", "...", kind="PROTOBUF", serialized=file)
        avro = [
            framed(newer, encode(ORDER_2, {"id": 2, "note": "ä", "total": 0.5})),
            framed(older, encode(ORDER_1, {"id": 1, "note": None})),
            framed(newer, b"\x02"),
            framed(77, b""),
        ]
        protobuf = [framed_message(number, [1], b"\x08\x07"), framed_message(number, [0], b"")]
        reported = driver.call(decode, work, registry.url, avro, protobuf, dead)

    assert reported.json == [expected for _, expected in JSONS]
    reported_early = [f"it is truncated, or is not of schema id {each}, or does not fit" for each in (older, newer)]
    assert reported.avro[0] == {"id": 2, "note": "ä", "total": 0.5}
    assert [each[: len(reported_early[0])] for each in reported.avro[1:]] == [
        *reported_early,
        "schema id 77 is not known",
    ]
    assert (reported.protobuf[0]["id"], reported.protobuf[1]) == (7, "it is a shop.Other, not a shop.Order")
    assert (reported.bad.count, reported.bad.first) == (1, (BadRecord("orders", 1, 100, MISFIT),))
    assert reported.good == [1]
    assert [value for _, value, _ in read_letters(work.bootstrap_servers, dead, 1)] == [b"{"]
    assert 'Unsupported data type "INTT"' in reported.no_ddl


def test_a_revoked_batch_ends_its_operations_on_the_server(driver: Driver, work: Work) -> None:
    """The batch fails about one heartbeat after its revocation."""
    error, came_of = driver.call(lose_a_batch, replace(work, mode=DeliveryMode.AT_LEAST_ONCE))
    assert "held by no instance" in error
    assert "OPERATION_CANCELED" in came_of


def test_an_interrupt_leaves_the_batch_at_once(driver: Driver, page_port: int, work: Work) -> None:
    """The signal's exception ends the wait for the server, and the server's tasks end. The session remains usable."""
    work = replace(work, mode=DeliveryMode.AT_LEAST_ONCE)
    driver.call(interrupt_a_batch, work)
    with urllib.request.urlopen(f"http://127.0.0.1:{page_port}/api/v1/applications", timeout=WITHIN_S) as answer:
        application = json.load(answer)[0]["id"]

    def running() -> int:
        jobs = f"http://127.0.0.1:{page_port}/api/v1/applications/{application}/jobs?status=running"
        with urllib.request.urlopen(jobs, timeout=WITHIN_S) as answer:
            return len(json.load(answer))

    wait_until(lambda: not running(), "no operation runs")


def test_a_session_that_was_closed_disturbs_no_other(driver: Driver, work: Work) -> None:
    """PySpark closes it once more when it is collected, which would end the threads that all sessions share."""
    assert driver.call(release_threads_stay, work)


def test_the_servers_page_shows_no_secret(driver: Driver, page_port: int, work: Work) -> None:
    """A reader's options are redacted on the page. Without the library's rule they are not."""
    for hidden in (True, False):
        driver.call(fail_to_read, work, hidden)
        with urllib.request.urlopen(f"http://127.0.0.1:{page_port}/connect/", timeout=WITHIN_S) as page:
            assert ("canary" in page.read().decode()) is not hidden


def test_a_secret_of_a_sink_that_tasks_use_is_found_nowhere(
    driver: Driver, home: ConnectServer, page_port: int, work: Work, outputs: SecretOutputs
) -> None:
    """Neither functions that the server gets and its pages have it, nor what the server prints."""
    driver.call(write_with_secrets, work, outputs, f"http://127.0.0.1:{page_port}")
    outputs.check(home.folder)


def test_executors_that_lack_what_a_sink_needs_are_refused_before_anything_is_written(
    driver: Driver, work: Work, outputs: SecretOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line has what is missing, and where. The other way to write is named, and works."""
    table, topic = outputs.table, outputs.topic
    error = driver.call(refused, work, topic.open(), None)
    assert "cannot run Python functions on Arrow batches" in error
    assert "give them the driver's version of Python, or use written_by='driver'" in error
    python = python_without(tmp_path / "python", "psycopg")
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    another = ConnectServer(tmp_path / "server")
    try:
        server = another.start(SMALL)
        work = replace(work, where=Where(server.url, token=server.token))
        error = driver.call(refused, work, table.open(), python)
        assert f" ({python}) has no psycopg: install it there, or use written_by='driver'" in error
        assert (table.rows(), table.staging_tables(), committed(topic.connection, topic.topic)) == ([], [], [])
        by_driver = PostgresSink(table.dsn, TABLE, schema=table.schema, written_by="driver")
        driver.call(write_with, work, by_driver, python)
        assert table.rows() == messages()
    finally:
        driver.call(stop_session)
        another.stop()


def test_a_wrong_token_and_a_missing_server_are_one_line(driver: Driver, work: Work) -> None:
    """Each error comes at once, in one line, and states what to do."""
    refused = driver.call(connect_wrongly, work.where.master, "wrong")
    assert "created no session" in refused
    missing = driver.call(connect_wrongly, f"sc://localhost:{free_port()}", "any")
    assert "no Spark Connect server answers at localhost" in missing
    assert "\n" not in refused + missing


def test_a_killed_server_fails_the_batch_at_once_and_the_next_run_redoes_it(
    driver: Driver, home: ConnectServer, page_port: int, work: Work
) -> None:
    """One line reports that the server has ended.

    The claims are released, and with another server no row is missing.
    """
    server = start(home, page_port)
    result = driver.start(run_job, work, str(home.folder), ENDLESS_MS)
    wait_until(work.mark.exists, "the batch is at work")
    psutil.Process(server.process.pid).kill()
    success, error = result()  # within its time limit, while Spark's own client would retry for ten minutes
    assert not success
    assert "the Spark Connect server has ended" in error
    assert "\n" not in error
    assert home.running() is None
    assert driver.call(run_job, work, str(home.folder), 0) == (True, "")
    assert rows_in(FileSink(work.output).committed_files()) == messages()
    again = home.running()
    assert again is not None
    assert again.process.pid != server.process.pid
    assert home.start() == again
