"""The rationalizers that a process shares: when they are reused, opened in parallel, and replaced after a failure."""

import threading
from itertools import count

import pytest

from marshal_dagster.coordination import checked_log, rationalizer_cache
from marshal_dagster.coordination.rationalizer_cache import MOST_KEPT, shared_rationalizer
from marshal_dagster.errors import CoordinationLogChangedError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.testing import MemoryBroker, MemoryLog
from tests.conditions import WITHIN_S, wait_until
from tests.faulty_log import FaultyLog

NUMBERS = count()


class OpenedLogs:
    """A replacement for `KafkaLog` that opens logs of in-memory brokers, one for each topic name."""

    def __init__(self) -> None:
        """Create it without brokers."""
        self.brokers: dict[str, MemoryBroker] = {}
        self.opened: list[FaultyLog] = []
        self.hold: dict[str, threading.Event] = {}
        self.held: list[str] = []
        self.is_down = False

    def __call__(self, _: KafkaConnection, topic: str, __: int) -> FaultyLog:
        """Open a log."""
        if topic in self.hold:
            self.held.append(topic)
            assert self.hold[topic].wait(WITHIN_S)
        broker = self.brokers.setdefault(topic, MemoryBroker(2, topic=topic))
        log = FaultyLog(MemoryLog(broker), is_down=self.is_down)
        self.opened.append(log)
        return log


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> OpenedLogs:
    """Replace Kafka's logs by logs in memory, and the cache by an empty one."""
    openings = OpenedLogs()
    monkeypatch.setattr(checked_log, "KafkaLog", openings)
    monkeypatch.setattr(rationalizer_cache, "_places", type(rationalizer_cache._places)())
    return openings


def connection(port: int = 9092) -> KafkaConnection:
    """Return a connection to a port on which no process listens."""
    return KafkaConnection(bootstrap_servers=f"127.0.0.1:{port}")


def test_a_second_use_reads_only_new_records(openings: OpenedLogs) -> None:
    """A second call with an equal connection returns the same reader, which then reads only new records."""
    first = shared_rationalizer(connection(), "log")
    openings.brokers["log"].append(0, b"anything")
    first.catch_up()
    openings.brokers["log"].append(1, b"anything")

    second = shared_rationalizer(connection(), "log")
    second.catch_up()

    assert second is first
    assert second.records_read == 2
    assert len(openings.opened) == 1


def test_other_topics_and_connections_have_their_own(openings: OpenedLogs) -> None:
    """Each cluster and topic has its own rationalizer."""
    kept = [
        shared_rationalizer(connection(), "log"),
        shared_rationalizer(connection(), "other"),
        shared_rationalizer(connection(9093), "log"),
    ]

    assert len({id(each) for each in kept}) == len(openings.opened) == 3


def test_all_coordination_partitions_are_followed(openings: OpenedLogs) -> None:
    """Each user of a shared rationalizer sees the whole log."""
    assert sorted(shared_rationalizer(connection(), "log").world.partitions) == [0, 1]
    assert openings.opened


def test_threads_that_ask_at_once_get_one(openings: OpenedLogs) -> None:
    """Parallel first calls open a single rationalizer."""
    openings.hold["log"] = threading.Event()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(shared_rationalizer(connection(), "log"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    openings.hold["log"].set()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert len({id(each) for each in found}) == len(openings.opened) == 1


def test_a_cluster_that_hangs_holds_up_no_other(openings: OpenedLogs) -> None:
    """While one rationalizer is being opened, others can be found and opened."""
    openings.hold["slow"] = threading.Event()
    thread = threading.Thread(target=lambda: shared_rationalizer(connection(), "slow"))
    thread.start()
    wait_until(lambda: openings.held, "the log of the cluster that hangs is being opened")

    assert shared_rationalizer(connection(), "log") is shared_rationalizer(connection(), "log")
    assert thread.is_alive()
    openings.hold["slow"].set()
    thread.join()


def test_one_that_could_not_be_opened_is_opened_next_time(openings: OpenedLogs) -> None:
    """If the broker is down at the first call, the next call tries again."""
    openings.is_down = True
    with pytest.raises(UnavailableError):
        shared_rationalizer(connection(), "log")
    openings.is_down = False

    shared_rationalizer(connection(), "log").catch_up()

    assert len(openings.opened) == 2


def test_one_that_failed_is_replaced(openings: OpenedLogs) -> None:
    """After an outage the next call returns a new rationalizer. The old one can still be used."""
    old = shared_rationalizer(connection(), "log")
    openings.opened[0].is_down = True
    with pytest.raises(UnavailableError):
        old.catch_up()
    openings.opened[0].is_down = False

    new = shared_rationalizer(connection(), "log")

    assert new is not old
    old.catch_up()
    new.catch_up()


def test_one_whose_log_changed_is_replaced(openings: OpenedLogs) -> None:
    """After the coordination topic was re-created, the next call reads the new one."""
    old = shared_rationalizer(connection(), "log")
    openings.brokers["log"].recreate()
    with pytest.raises(CoordinationLogChangedError):
        old.catch_up()

    new = shared_rationalizer(connection(), "log")

    assert new.catch_up().coordination_partitions == 2
    assert new.identity == openings.brokers["log"].identity


def test_no_more_are_kept_than_allowed(openings: OpenedLogs) -> None:
    """The least recently used rationalizers are removed, and recently used ones stay."""
    first = shared_rationalizer(connection(), "log")
    for number in range(MOST_KEPT - 1):
        shared_rationalizer(connection(), f"log{number}")
    assert shared_rationalizer(connection(), "log") is first
    shared_rationalizer(connection(), "one more")

    assert shared_rationalizer(connection(), "log") is first
    assert len(rationalizer_cache._places) == MOST_KEPT
    before = len(openings.opened)
    shared_rationalizer(connection(), "log0")
    assert len(openings.opened) == before + 1
