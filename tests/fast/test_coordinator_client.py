"""Check how a member in a process handles failures of its work and of its Kafka client."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID

from marshal_dagster.coordinator import client, transport
from marshal_dagster.coordinator.assignment import DataPartitionId, sticky_assignment
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.group import GroupCoordinator, GroupEventKind, GroupRules
from marshal_dagster.coordinator.member import MemberState
from marshal_dagster.coordinator.messages import CoordinatorMessage, MemberMessage, render
from marshal_dagster.coordinator.transport import CoordinatorTopics, ReceivedRecord
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.testing import ManualClock
from tests.conditions import WITHIN_S, wait_until

GROUP = "etl"
SESSION_MS = 600
TICK_MS = 50
PLACES = {("orders", number) for number in range(4)}


class Hub:
    """An in-memory coordinator for the members' readers and writers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clock = ManualClock()
        rules = GroupRules(sticky_assignment, min_session_ms=100, rebalance_backoff_ms=100)
        self.leader = GroupCoordinator(GROUP, 1, rules, self.now_ms)
        self.leader.update_topics({"orders": 4}, self.now_ms)
        self.readers: list[Reader] = []
        self.fatal: list[Exception] = []
        """What the members' next turns raise."""
        self.made = 0
        self.refusal: Exception | None = None
        """What making a client raises."""

    @property
    def now_ms(self) -> float:
        """Return the present time of the coordinator and its members."""
        return self.clock.lease_ms()

    @property
    def happened(self) -> list[GroupEventKind]:
        """Return the kinds of the coordinator's events."""
        return [event.happening for event in self.leader.events]

    def send_message(self, message: MemberMessage) -> None:
        """Pass a message to the coordinator."""
        with self.lock:
            self._send(self.leader.receive(message, self.now_ms))

    def tick(self) -> None:
        """Let a moment pass, and let the coordinator act on that, if each member has read what it was sent.

        So a member is silent only if it has no clients.
        """
        with self.lock:
            readers = list(self.readers)
            if all(reader.has_read_all for reader in readers) and (readers or self.refusal):
                for reader in readers:
                    reader.has_read_all = False
                self.clock.advance(TICK_MS)
                self._send(self.leader.tick(self.now_ms))

    def _send(self, orders: list[CoordinatorMessage]) -> None:
        for order in orders:
            for reader in self.readers:
                reader.values.put(render(order))


class Reader:
    """A reader of the hub's coordinator."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.values: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.has_read_all = False
        hub.made += 1

    def follow(self, _: object) -> None:
        """Start to read."""
        self._hub.readers.append(self)

    def read(self, timeout_s: float) -> Iterator[ReceivedRecord]:
        """Yield one order if it arrives in time."""
        self.has_read_all = self.values.empty()
        with suppress(queue.Empty):
            yield ReceivedRecord(0, 0, b"", self.values.get(timeout=timeout_s), 0)

    def close(self) -> None:
        """Stop reading."""
        if self in self._hub.readers:
            self._hub.readers.remove(self)


class Writer:
    """A writer to the hub's coordinator."""

    def __init__(self, hub: Hub) -> None:
        if hub.refusal is not None:
            raise hub.refusal
        self._hub = hub
        self.send_to_coordinator = hub.send_message

    def poll(self) -> None:
        """Raise the next planned error, if any."""
        if self._hub.fatal:
            raise self._hub.fatal.pop()

    def close(self) -> None:
        """Close nothing: the writer has no resources."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub to which the members' clients connect."""
    hub = Hub()
    monkeypatch.setattr(transport, "Reader", lambda *_: Reader(hub))
    monkeypatch.setattr(transport, "Writer", lambda *_: Writer(hub))
    monkeypatch.setattr(transport, "end_of", lambda *_: 0)
    monkeypatch.setattr(CoordinatorTopics, "partitions", lambda *_: 1)
    monkeypatch.setattr(CoordinatorTopics, "check_member", lambda *_: None)
    monkeypatch.setattr(client, "_AGAIN_AFTER_S", 0.05)
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.02):
            hub.tick()

    thread = threading.Thread(target=tick)
    thread.start()
    yield hub
    over.set()
    thread.join()


class Work:
    """The work of a member."""

    def __init__(self) -> None:
        self.on: set[DataPartitionId] = set()
        self.calls = 0
        self.may_stop: Callable[[], bool] = lambda: True
        self.fails: list[Exception] = []
        """What the next calls raise."""

    def start(self, places: frozenset[DataPartitionId]) -> None:
        """Start work on these partitions."""
        self._call()
        self.on |= places

    def stop(self, places: frozenset[DataPartitionId]) -> None:
        """Stop work on these partitions."""
        wait_until(self.may_stop, "the work may stop")
        self.on -= places
        self._call()

    def _call(self) -> None:
        self.calls += 1
        if self.fails:
            raise self.fails.pop()


def member(hub: Hub, work: Work, name: str, **fields: Any) -> CoordinatedMember:  # noqa: ANN401 - a member's options
    """Return a member of the hub's group."""
    connection = KafkaConnection(bootstrap_servers="127.0.0.1:1")
    return CoordinatedMember(
        connection,
        GROUP,
        name,
        start=work.start,
        stop=work.stop,
        clock=hub.clock,
        topics_wanted=["orders"],
        session_timeout_ms=SESSION_MS,
        **fields,
    )


def until(hub: Hub, passed_ms: float) -> Callable[[], bool]:
    """Return a function that returns whether this time has passed from now on."""
    at_ms = hub.now_ms + passed_ms
    return lambda: hub.now_ms >= at_ms


@pytest.mark.thorough
def test_one_that_stops_slowly_answers_pings_meanwhile(hub: Hub) -> None:
    """Stopping takes longer than the session timeout, but the member does not count as dead."""
    one, other = Work(), Work()
    with member(hub, one, "a"):
        wait_until(lambda: one.on == PLACES, "the member has all partitions")
        one.may_stop = until(hub, 3 * SESSION_MS)
        with member(hub, other, "b"):
            wait_until(lambda: len(one.on) == len(other.on) == 2, "both members have two partitions")
            assert GroupEventKind.FAILED not in hub.happened


@pytest.mark.slow
def test_a_client_that_is_of_no_more_use_is_replaced(hub: Hub) -> None:
    """The member continues with a new client and keeps its partitions."""
    work = Work()
    with member(hub, work, "a") as found:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
        hub.fatal.append(UnavailableError("the client has failed for good"))
        wait_until(lambda: hub.made == 2, "a second producer was made")
        wait_until(lambda: not hub.fatal and found.state is MemberState.REGISTERED, "the member is registered again")
        assert work.on == found.places == PLACES
        assert work.calls == 1


@pytest.mark.thorough
@pytest.mark.parametrize("in_stop", [False, True])
def test_one_whose_work_cannot_be_done_leaves_and_comes_back(hub: Hub, in_stop: bool) -> None:
    """Other members get its share meanwhile, so no partition stays without a worker."""
    one, other = Work(), Work()
    with member(hub, one, "a"):
        wait_until(lambda: one.on == PLACES, "the first member has all partitions")
        if in_stop:
            one.fails.append(ValueError("it cannot stop"))
        else:
            other.fails.append(ValueError("it cannot start"))
        with member(hub, other, "b"):
            wait_until(lambda: hub.happened.count(GroupEventKind.LEFT) == 1, "one member has left")
            wait_until(lambda: hub.happened.count(GroupEventKind.JOINED) == 3, "a member has joined again")
            wait_until(
                lambda: len(one.on) == len(other.on) == 2 and one.on | other.on == PLACES,
                "both members have two partitions, all in all",
            )


@pytest.mark.thorough
def test_who_leaves_has_stopped_before_it_says_so(hub: Hub) -> None:
    """Otherwise another member would start work that this one has not stopped."""
    work = Work()
    with member(hub, work, "a") as found:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
        work.may_stop = lambda: found.state is MemberState.GONE and GroupEventKind.LEFT not in hub.happened
    assert not work.on
    assert found.state is MemberState.GONE
    wait_until(lambda: hub.happened[-1] is GroupEventKind.LEFT, "the member has left")


@pytest.mark.thorough
def test_one_that_commits_by_itself_says_how_far_it_got(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Offsets are reported at each ping; an offset that is unknown is left out."""
    work, times = Work(), itertools.count()

    def offsets() -> dict[DataPartitionId, int]:
        if next(times) == 0:
            raise OSError("no answer")
        return {("orders", 0): 17, ("orders", 1): OFFSET_INVALID}

    with member(hub, work, "m0", auto_commit=True, offsets=offsets):
        wait_until(lambda: hub.leader.positions == {("orders", 0): 17}, "the leader knows the position")
    assert "no offsets are reported to the coordinator" in caplog.text


@pytest.mark.slow
def test_whatever_goes_wrong_in_its_thread_a_member_goes_on(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """After any error in its thread the member continues with a new client, and logs the error."""
    work = Work()
    with member(hub, work, "a") as found:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
        hub.fatal.append(ZeroDivisionError("odd"))
        wait_until(lambda: hub.made == 2, "a second producer was made")
        wait_until(lambda: not hub.fatal and found.state is MemberState.REGISTERED, "the member is registered again")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.thorough
def test_a_member_whose_clients_cannot_be_made_stops_its_work_and_comes_back(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """A key file can be missing while it is replaced; the work stops after a session timeout, as without a message."""
    work = Work()
    with member(hub, work, "a") as found:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
        hub.refusal = ConfigurationError("the Kafka client rejects its settings: no key file")
        hub.fatal.append(UnavailableError("the client has failed for good"))
        wait_until(lambda: found.failure is hub.refusal and not work.on, "the work has stopped")
        assert not found.is_over
        assert caplog.text.count("no key file") == 1
        hub.refusal = None
        wait_until(lambda: work.on == PLACES and found.failure is None, "the member has all partitions again")
    assert "Traceback" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("auto_commit", [False, True])
def test_a_member_whose_clients_cannot_be_made_can_end(hub: Hub, auto_commit: bool) -> None:
    """It stops its work and ends after a session timeout, though it cannot notify the coordinator."""
    work = Work()
    with member(hub, work, "a", auto_commit=auto_commit) as found:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
        hub.refusal = ConfigurationError("the Kafka client rejects its settings: no key file")
        hub.fatal.append(UnavailableError("the client has failed for good"))
        wait_until(lambda: found.failure is hub.refusal, "the member has no clients")
    assert found.is_over
    assert found.state is MemberState.GONE
    assert not work.on


@pytest.mark.thorough
def test_leaving_waits_for_a_session_and_says_so_when_that_is_not_enough(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that commits by itself waits for two pings, and then for its work to stop."""
    monkeypatch.setattr(client, "_STOP_WITHIN_S", WITHIN_S)
    work = Work()
    with member(hub, work, "a", auto_commit=True) as quick:
        wait_until(lambda: work.on == PLACES, "the member has all partitions")
    assert quick.is_over
    assert not work.on
    assert "did not leave" not in caplog.text
    with member(hub, work, "a") as slow:
        wait_until(lambda: work.on == PLACES, "the member has all partitions again")
        monkeypatch.setattr(client, "_STOP_WITHIN_S", 0.1)
        may_stop = threading.Event()
        work.may_stop = may_stop.is_set
    assert not slow.is_over
    assert "it did not leave within" in caplog.text
    may_stop.set()
    wait_until(lambda: slow.is_over, "the slow work is over")
