"""Fixtures for real services, which start once for the whole suite. A test that needs a service names its fixture."""

import os
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import Producer
from xdist.scheduler.loadfile import LoadFileScheduling  # type: ignore[import-untyped]

from marshal_dagster._internal import ports
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.devkafka import KafkaCluster, running_kafka
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from tests.conditions import WITHIN_S
from tests.real.services import ended_services, watched
from tests.real.spark_fixtures import compiled, database, driver, filled, hdfs, mariadb, postgres, spark  # noqa: F401 - fixtures
from tests.session_settings import QUICK_PLANS, show_frames_without_jvm, submit_environment
from tests.spark_archive import start_spark_quickly

FOLDER = Path(__file__).parent
LONG = {f"test_{name}.py" for name in ("outbox_end_to_end", "security", "spark_connect", "takeover_sinks")}
LONG |= {path.name for path in FOLDER.glob("test_sink_*.py")}
"""Files that take a minute or more, alone or with those that run in the same worker, and that sort late by name.

Those of a folder run first too.
"""
WITH_HDFS = {"test_sink_hadoop.py", "test_takeover_sinks.py", "test_data_of_version_0_1.py"}


def pytest_configure() -> None:
    """Let Spark's JVMs start quickly and interpret plans, reports not ask them, and each worker have its own ports.

    The ports of a broker that a worker killed must stay free until it restarts the broker.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        start_spark_quickly()  # workers inherit the environment
        os.environ.update(submit_environment(QUICK_PLANS))
    show_frames_without_jvm()
    name = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    own = own_ports(range(ports._LOWEST, ports._highest() + 1), int(name) if name else None, workers)
    ports._LOWEST = own.start
    ports._highest = lambda: own.stop - 1


def own_ports(found: range, worker: int | None, workers: int) -> range:
    """Return the ports of a worker; of a run without workers, which CI starts beside them, if `worker` is None."""
    beside = len(found) // 4
    if worker is None:
        return found[-beside:]
    width = (len(found) - beside) // workers
    return found[worker * width : (worker + 1) * width]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first. If a worker started one last, the other workers would wait for it."""
    items.sort(key=lambda item: item.path.parent == FOLDER and item.path.name not in LONG)


class FolderScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Gives the files that need the same services to one worker (`group_of`)."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(str(super()._split_scope(nodeid))))


def group_of(file: Path) -> str:
    """Return the name of the files that one worker runs, because each worker starts its own services.

    These are the files of a folder within `tests/real`, and those of a sink, whose names begin alike. What Spark does
    for the first time in a session costs several times as much as what follows.
    """
    if file.parent.parent.name == FOLDER.name:
        return str(file.parent)
    if file.name in WITH_HDFS:
        return "HDFS"
    words = file.stem.split("_")
    return "_".join(words[1:3]) if words[1] == "sink" else str(file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FolderScheduling | None:  # noqa: ANN401 - no types
    """Schedule by files and folders where pytest-xdist would schedule by files."""
    return FolderScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the services that have ended to the report of a test that failed."""
    report = yield
    if report.failed:
        report.sections += ended_services()
    return report


class MakeTopic(Protocol):
    """A function that creates a topic with a unique name and returns the name."""

    def __call__(self, partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        """Create the topic and return once all its partitions can be used."""
        ...


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """The broker of the whole suite. A test that stops or kills brokers starts its own.

    It looks for records to compact every half second instead of every 15 s.
    """
    with running_kafka(tmp_path_factory.mktemp("kafka"), settings={"log.cleaner.backoff.ms": "500"}) as cluster:
        [broker] = cluster.status().brokers
        assert broker.pid is not None
        console, crash = broker.log.with_name("console.log"), broker.log.with_name(f"crash-{broker.pid}.log")
        with watched("the Kafka broker", broker.pid, broker.log, console, crash):
            yield cluster


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> str:
    """The bootstrap servers of the suite's broker, or of the one that `tests.platforms` started."""
    named = os.environ.get("MARSHAL_TEST_BROKER")
    if named:
        return named
    cluster: KafkaCluster = request.getfixturevalue("kafka_cluster")
    return cluster.bootstrap_servers


@pytest.fixture(scope="session")
def connection(kafka: str) -> KafkaConnection:
    """A connection to the suite's broker."""
    return KafkaConnection(bootstrap_servers=kafka)


@pytest.fixture(scope="session")
def topics(connection: KafkaConnection) -> Iterator[Topics]:
    """An admin client of the suite's broker."""
    with Topics(connection) as topics:
        yield topics


@pytest.fixture
def topic(request: pytest.FixtureRequest, topics: Topics) -> MakeTopic:
    """A function that creates topics with unique names, which begin with the test's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60].strip("-")

    def make(partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        name = f"{stem}-{uuid.uuid4().hex[:8]}"
        assert topics.create(name, partitions, 1, settings), name
        return name

    return make


@pytest.fixture
def coordination_topic(topic: MakeTopic) -> str:
    """A coordination topic for this test only."""
    return topic(4, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})


@pytest.fixture(scope="module")
def shared_coordination_topic(topics: Topics) -> str:
    """A coordination topic for all groups of a module."""
    name = new_instance_id("coordination")
    assert topics.create(name, 4, 1, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})
    return name


@pytest.fixture(scope="session")
def fill(connection: KafkaConnection) -> Callable[[str, int, int], None]:
    """A function (topic, partitions, messages) that writes that many messages, round-robin over the partitions."""

    def write(topic: str, partitions: int, messages: int) -> None:
        # An idempotent producer would wait half a second for its id. Without retries no message is written twice.
        settings = {"retries": 0, "request.timeout.ms": round(WITHIN_S * 1_000)}
        producer = Producer({"bootstrap.servers": connection.bootstrap_servers, **settings})
        failed: list[object] = []

        def note(error: object, _: object) -> None:
            if error is not None:
                failed.append(error)

        for number in range(messages):
            producer.produce(topic, f"message {number}", partition=number % partitions, on_delivery=note)
        assert (producer.flush(WITHIN_S), failed) == (0, [])

    return write
