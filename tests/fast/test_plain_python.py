"""Check claimed batches without Dagster: `BatchSession.open`, and its example, with Kafka and Spark in memory."""

import logging
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

import marshal_dagster as marshal
from marshal_dagster import BatchRequest, BatchSession, ConfigurationError, KafkaConnection, UnsafeTopicError
from marshal_dagster.coordination import topic_settings
from marshal_dagster.coordination.topic_settings import settings_for, usable_topic_id
from marshal_dagster.telemetry.observer import telemetry_observer
from tests.batch_fixtures import TOPIC, DataTopics, MemorySink, Scene
from tests.fast.test_dagster_ops import do_without_spark

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_python"
CONNECTION = KafkaConnection(bootstrap_servers="127.0.0.1:1")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A topic of three partitions with ten messages each, and a coordination log, to which sessions connect."""
    scene = Scene()
    scene.data.make(messages=10)
    do_without_spark(monkeypatch, scene)
    monkeypatch.setattr("marshal_dagster.coordination.kafka_log.KafkaLog", lambda *_: scene.log())
    monkeypatch.setattr("marshal_dagster.coordination.kafka_snapshots.kafka_snapshots", lambda *_: None)
    monkeypatch.setattr("marshal_dagster.kafka.admin_client.Topics", lambda _: scene.data)
    monkeypatch.setattr(topic_settings, "usable_topic_id", lambda *_, **__: None)
    return scene


def test_a_session_without_dagster_claims_and_commits(scene: Scene) -> None:
    """Its batches process each message once, and the owner is named as given."""
    seen: list[Any] = []
    with BatchSession.open(CONNECTION, "plain", client="host", run_id="cron 7") as session:
        for claimed in session.batches(BatchRequest(topic=TOPIC, max_records=20)):
            with claimed as batch:
                if batch.idle is None:
                    seen += batch.read(None)  # type: ignore[arg-type] # there is no Spark
                    assert batch.ranges
    assert sorted(seen) == sorted(scene.data.all_messages())
    (claim, *_) = [value for value in scene.values() if value.startswith("ClaimingPartition")]
    assert "/cron 7." in claim
    assert "/host/plain/" in claim


@pytest.mark.usefixtures("scene")
def test_a_session_without_dagster_reports_to_an_observer(caplog: pytest.LogCaptureFixture) -> None:
    """`telemetry_observer` writes the log lines of claims and commits, as it does for Dagster's batches."""
    with (
        caplog.at_level(logging.INFO, "marshal_dagster"),
        telemetry_observer("plain") as observer,
        BatchSession.open(CONNECTION, "plain", observer=observer) as session,
        session.claimed_batch(BatchRequest(topic=TOPIC)) as batch,
    ):
        batch.read(None)  # type: ignore[arg-type] # there is no Spark
    assert {record.__dict__.get("event") for record in caplog.records} >= {"claim", "commit"}


@pytest.mark.parametrize("names", [{"group": "a/b"}, {"client": "a\nb"}, {"run_id": "x" * 256}])
@pytest.mark.usefixtures("scene")
def test_a_name_that_cannot_be_is_refused(names: dict[str, str]) -> None:
    """The error is one line that names the argument."""
    arguments: dict[str, Any] = {"group": "plain", **names}
    with pytest.raises(ConfigurationError, match=f"^{next(iter(names))} .* cannot be a name"):
        BatchSession.open(CONNECTION, **arguments)


def test_a_session_that_may_not_claim_closes_its_connections(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is checked before a session is returned."""
    closed = []
    monkeypatch.setattr(DataTopics, "close", lambda _: closed.append("data"))

    def unsafe(*_: object, allow_unsafe: bool) -> None:
        raise UnsafeTopicError("__marshal", [f"allowed: {allow_unsafe}"], can_be_accepted=True)

    monkeypatch.setattr(topic_settings, "usable_topic_id", unsafe)
    with pytest.raises(UnsafeTopicError, match="allowed: True"):
        BatchSession.open(CONNECTION, "plain", allow_unsafe_topic=True)
    assert (closed, scene.values()) == (["data"], [])


def test_a_dangerous_topic_that_is_allowed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A member that allows it gets the topic's id; another one gets an error."""

    class Unlike:
        def require(self, _: object) -> None: ...

        def describe(self, name: str) -> object:
            return SimpleNamespace(name=name, topic_id="id", partitions=(0,), replication=3)

        def settings(self, _: str) -> dict[str, str]:
            return {**settings_for(3), "min.insync.replicas": "1"}

        def broker_count(self) -> int:
            return 3

    topics: Any = Unlike()
    with pytest.raises(UnsafeTopicError, match=r"min\.insync\.replicas is 1"):
        usable_topic_id(topics, "__marshal")
    assert usable_topic_id(topics, "__marshal", allow_unsafe=True) == "id"
    assert "allow_unsafe_topic accepts a dangerous setting of coordination topic '__marshal'" in caplog.text


class Frame(list[Any]):
    """A list in place of a data frame; its transformations return the list itself."""

    def selectExpr(self, *_: str) -> "Frame":  # noqa: N802 - Spark's name
        """Return this frame."""
        return self

    def groupBy(self, *_: str) -> "Frame":  # noqa: N802 - Spark's name
        """Return this frame."""
        return self

    def count(self) -> "Frame":  # type: ignore[override] # Spark's name
        """Return this frame."""
        return self


@pytest.fixture
def dag(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module for Airflow, without Airflow."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setattr(marshal, "FileSink", lambda _: scene.sink)
    monkeypatch.setattr(marshal, "start_session", lambda _: object())
    read = marshal.ClaimedBatch.read
    monkeypatch.setattr(marshal.ClaimedBatch, "read", lambda batch, spark: Frame(cast("list[Any]", read(batch, spark))))
    import orders_dag

    yield_module: ModuleType = orders_dag
    monkeypatch.delitem(sys.modules, "orders_dag")
    monkeypatch.delitem(sys.modules, "count_orders")
    return yield_module


def test_sigterm_ends_a_task_of_airflow(dag: ModuleType) -> None:
    """Airflow's own handler would not raise, and the batch would keep its claims."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        dag.end_at_sigterm()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_task_of_airflow_processes_each_message_once(
    dag: ModuleType, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task's function needs no Airflow; a second try finds nothing to do."""
    assert not hasattr(dag, "dag"), "Airflow is not installed here"
    assert dag.run_task("scheduled__2026-01-31T18:00:00+00:00", 1) == 1
    assert isinstance(scene.sink, MemorySink)
    assert set(scene.sink.counts()) == scene.data.all_messages()
    assert max(scene.sink.counts().values()) == 1
    assert dag.run_task("scheduled__2026-01-31T18:00:00+00:00", 2) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 batches; now nothing to do: ")


def test_a_task_of_airflow_that_finds_only_exhausted_plans_fails(
    dag: ModuleType, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each later try would succeed, although nothing is processed until an operator acts."""
    monkeypatch.setattr(Frame, "count", lambda _: 1 / 0)
    for number in range(6):
        with pytest.raises(ZeroDivisionError):
            dag.run_task("run", number)
    with pytest.raises(SystemExit, match="marshal-dagster retry"):
        dag.run_task("run", 7)
    assert scene.sink.counts() == {}
