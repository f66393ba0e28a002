"""Check the health and the metrics of a coordinator's process, without a broker."""

import itertools
import json
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from marshal_dagster._internal.health_server import FAILING_AFTER_S, IDLE_AFTER_S, HealthServer
from marshal_dagster.coordinator import group_view, lag_weights, service, transport
from marshal_dagster.coordinator import metrics as coordinator_metrics
from marshal_dagster.coordinator.assignment import AssignmentInput, sticky_assignment
from marshal_dagster.coordinator.group import GroupEvent, GroupEventKind
from marshal_dagster.coordinator.member import Membership
from marshal_dagster.coordinator.messages import (
    CoordinatorMessage,
    Leave,
    MemberMessage,
    Pong,
    Register,
    Registered,
    StartFetcher,
    render,
)
from marshal_dagster.coordinator.metrics import GroupMetrics
from marshal_dagster.coordinator.service import Coordinator, CoordinatorOptions
from marshal_dagster.coordinator.transport import (
    CoordinatorTopics,
    Reader,
    ReceivedRecord,
    _read_up_to,
    keep_newest,
    partition_of,
)
from marshal_dagster.election.rules import Term
from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.telemetry import metrics
from tests.conditions import WITHIN_S, wait_until


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Yield a coordinator that is not started; its brokers are unreachable, but the lookup of data topics works."""
    found = Coordinator(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=0.1), look=lambda: {"t": 2})
    yield found
    found._helpers.shutdown()


@dataclass
class Ends:
    """A stand-in for an elector, a reader and a writer.

    `fails` is the error that the reader raises, `messages` are what it reads.
    """

    failure: MarshalError | None = None
    fails: Exception | None = None
    messages: list[MemberMessage] = field(default_factory=list)
    orders: list[CoordinatorMessage] = field(default_factory=list)
    partitions: int = 1
    is_deposed: bool = False
    rival_fences: tuple[int, ...] = ()
    given_up: list[str] = field(default_factory=list)
    revoked: list[CoordinatorMessage] = field(default_factory=list)

    def leads(self, *_: object) -> bool:
        """Return whether every term holds."""
        return not self.is_deposed

    def read(self, *_: object) -> list[ReceivedRecord]:
        """Return the messages, once."""
        if self.fails is not None:
            raise self.fails
        messages, self.messages = self.messages, []
        return [ReceivedRecord(0, 0, b"", render(message), 0) for message in messages]

    def send_to_member(self, order: CoordinatorMessage) -> None:
        """Keep the message."""
        self.orders.append(order)

    def revoke(self, message: CoordinatorMessage) -> None:
        """Keep the revoked message."""
        self.revoked.append(message)

    def nothing(self, *_: object) -> None:
        """Do nothing."""

    def may_have_successor(self, fence: int, **_: object) -> bool:
        """Return whether another coordinator's heartbeat was seen."""
        return fence in self.rival_fences

    def give_up(self, _: object, reason: str, __: int) -> None:
        """Keep the reason."""
        self.given_up.append(reason)

    leave = follow = poll = close = forget = nothing


@pytest.fixture
def ends(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Return the stand-in of a coordinator that leads one partition and queries no brokers."""
    monkeypatch.setattr(service, "_AGAIN_AFTER_S", 0.0)
    coordinator._shards[0] = service._Shard(Term(1, "id"))
    coordinator._topic_lookup.next_ms = coordinator._topic_check.next_ms = float("inf")
    return Ends()


def turn(coordinator: Coordinator, ends: Any) -> None:  # noqa: ANN401 - one object in three roles
    """Let the coordinator take one turn."""
    coordinator._turn(ends, ends, ends)


def lead(coordinator: Coordinator, ends: Any) -> None:  # noqa: ANN401 - one object in three roles
    """Let the coordinator lead until a client fails."""
    coordinator._lead_with(ends, ends, ends)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Yield the reader of the metrics."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter_provider", lambda: provider)
    metrics._of.cache_clear()
    yield reader
    metrics._of.cache_clear()


def values(reader: InMemoryMetricReader) -> dict[str, dict[str, float]]:
    """Return the value of each instrument, by the values of its attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name.removeprefix("marshal.coordinator."): {
            "/".join(map(str, (point.attributes or {}).values())): getattr(point, "value", 0.0)
            for point in metric.data.data_points
        }
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }


def test_a_coordinator_that_stands_by_is_healthy(coordinator: Coordinator) -> None:
    """A coordinator that leads no partition is a healthy standby."""
    health = coordinator.health()
    assert health.pop("idle_s") < IDLE_AFTER_S
    assert health == {
        "healthy": True,
        "live": True,
        "ready": False,
        "role": "standby",
        "partitions": 0,
        "groups": 0,
        "members": 0,
        "failure": None,
        "failing_s": 0.0,
    }


def test_a_coordinator_that_hangs_is_not(coordinator: Coordinator) -> None:
    """A coordinator is unhealthy if its thread was idle for longer than any of its own waits."""
    coordinator._alive_at_s = time.monotonic()
    assert coordinator.health()["healthy"]
    coordinator._alive_at_s -= IDLE_AFTER_S
    assert not coordinator.health()["healthy"]


def test_a_coordinator_that_fails_is_given_time(coordinator: Coordinator) -> None:
    """A failure makes it unhealthy only after some time, and is forgotten after a period of success."""
    coordinator._note(UnavailableError("away"))
    coordinator._failures.from_s -= 40
    coordinator._note(UnavailableError("still away"))
    assert (coordinator.health()["healthy"], coordinator.health()["failure"]) == (True, "still away")
    assert not coordinator.health(failing_after_s=30)["healthy"]
    coordinator._note(None)
    assert coordinator.health()["failure"] == "still away"
    coordinator._failures.last_s -= service._CALM_S + 1
    coordinator._note(None)
    assert (coordinator.health()["failure"], coordinator.health()["failing_s"]) == (None, 0.0)


def test_a_client_that_fails_again_and_again_is_not_well(coordinator: Coordinator, ends: Ends) -> None:
    """Successful turns between the failures do not make the coordinator healthy."""
    for _ in range(3):
        ends.fails = None
        turn(coordinator, ends)
        ends.fails = UnavailableError("fatal")
        lead(coordinator, ends)
        assert coordinator.health()["failure"] == "fatal"
        coordinator._failures.from_s -= FAILING_AFTER_S / 2
    assert not coordinator.health()["healthy"]


def test_a_coordinator_that_cannot_reconnect_is_not_over(
    coordinator: Coordinator, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key file can be missing while it is replaced: `run` makes a writer as soon as that is possible."""
    refusals = [ConfigurationError("no key file"), ConfigurationError("no key file")]

    def writer(*_: object) -> Ends:
        if coordinator._shards.pop(0, None) is not None:
            ends.fails = UnavailableError("fatal")
        elif refusals:
            raise refusals.pop()
        else:
            coordinator.stop()
        return ends

    monkeypatch.setattr(service, "Writer", writer)
    monkeypatch.setattr(service, "Reader", lambda *_: ends)
    monkeypatch.setattr(service, "Elector", lambda *_, **__: nullcontext(ends))
    monkeypatch.setattr(CoordinatorTopics, "partitions", lambda *_: 1)
    monkeypatch.setattr(Coordinator, "_turn", lambda *_: ends.read())
    coordinator.run()
    assert str(coordinator.failure) == "no key file"


def test_a_coordinator_that_can_take_nothing_over_is_not_well(coordinator: Coordinator, ends: Ends) -> None:
    """In each term, the messages of earlier terms cannot be read, so the coordinator takes over no partition."""
    for fence in range(3):
        found: Future[Any] = Future()
        found.set_exception(UnavailableError("cannot be read"))
        coordinator._beginning[1] = Term(fence, "id"), found
        turn(coordinator, ends)
        assert coordinator.health()["failure"] == "cannot be read"
        coordinator._failures.from_s -= FAILING_AFTER_S / 2
    assert not coordinator.health()["healthy"]


@pytest.mark.parametrize("name", ["election", "_topic_lookup", "_topic_check"])
def test_whatever_keeps_it_from_leading_is_reported(coordinator: Coordinator, ends: Ends, name: str) -> None:
    """The health shows a failed election, a failed lookup of the data topics and unusable coordinator topics."""
    failing: Any = ends if name == "election" else getattr(coordinator, name)
    failing.failure = UnavailableError(name)
    turn(coordinator, ends)
    assert coordinator.health()["failure"] == name


def test_a_failure_is_kept_while_a_term_begins(coordinator: Coordinator) -> None:
    """Reading the earlier messages may fail again, and may take longer than failures are usually kept."""
    coordinator._beginning[1] = Term(1, "id"), Future()
    coordinator._note(UnavailableError("cannot be read"))
    coordinator._failures.last_s -= service._CALM_S + 1
    coordinator._note(None)
    assert coordinator.health()["failure"] == "cannot be read"


@pytest.mark.slow
def test_its_own_brokers_are_looked_at_too(
    coordinator: Coordinator,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator's own brokers are checked again and again, even if the data topics are on other brokers."""
    coordinator._topic_lookup.next_ms = coordinator._topic_check.next_ms = 0.0

    def takes_a_turn_and_fails() -> bool:
        turn(coordinator, ends)
        return coordinator.health()["failure"] is not None

    wait_until(takes_a_turn_and_fails, "the health reports a failure")
    assert isinstance(coordinator.failure, UnavailableError)
    monkeypatch.setattr(CoordinatorTopics, "check", lambda *_: None)
    coordinator._topic_check.next_ms = 0.0

    def takes_a_turn_and_works() -> bool:
        turn(coordinator, ends)
        return coordinator._topic_check.failure is None

    wait_until(takes_a_turn_and_works, "the brokers can be used again")


@pytest.mark.slow
def test_it_answers_over_http(coordinator: Coordinator) -> None:
    """The health server answers with status 200, and with 503 once the coordinator hangs."""
    with HealthServer(coordinator.health) as server:
        with urllib.request.urlopen(f"http://{server.address}/health", timeout=WITHIN_S) as answer:
            assert (answer.status, json.load(answer)["role"]) == (200, "standby")
        coordinator._alive_at_s -= IDLE_AFTER_S + 5
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://{server.address}/health", timeout=WITHIN_S)
        assert (raised.value.code, json.load(raised.value)["healthy"]) == (503, False)


def test_a_group_that_is_led_is_measured(
    reader: InMemoryMetricReader,
    coordinator: Coordinator,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member joins, gets both partitions and stops answering; the metrics follow."""
    now_ms = 0.0
    monkeypatch.setattr(coordinator, "_clock", SimpleNamespace(lease_ms=lambda: now_ms))
    monkeypatch.setattr(coordinator._known, "counts", {"t": 2})
    coordinator._metrics = GroupMetrics()
    register = Register(group="etl", member="a", epoch=0, tenure="a-1", topics=["t"], session_timeout_ms=3_000)
    member = Membership(register, now_ms)
    for _ in range(20):
        orders, ends.orders = ends.orders, []
        ends.messages = [message for order in orders for message in member.receive(order, now_ms).messages]
        ends.messages += member.tick(now_ms).messages
        turn(coordinator, ends)
        now_ms += 500
    assert values(reader) == {
        "groups": {"": 1},
        "led": {"": 1},
        "partitions": {"": 0},
        "members": {"etl": 1},
        "assigned": {"etl": 2},
        "rebalances": {"etl/done": 1, "etl/tried_again": 0, "etl/given_up": 0},
        "moved": {"etl": 2},
        "failed": {"etl": 0},
    }
    for _ in range(20):
        turn(coordinator, ends)
        now_ms += 500
    assert {name: values(reader)[name] for name in ("members", "failed")} == {
        "members": {"etl": 0},
        "failed": {"etl": 1},
    }


def test_what_happens_in_groups_is_counted(reader: InMemoryMetricReader) -> None:
    """Rebalances are counted by outcome; moved partitions and failed members are counted too."""
    measuring = GroupMetrics()
    measuring.record("etl", GroupEvent(GroupEventKind.REBALANCED, moved=7))
    measuring.record("etl", GroupEvent(GroupEventKind.REBALANCED, moved=2))
    measuring.record("etl", GroupEvent(GroupEventKind.REBALANCE_RETRIED, ("a",)))
    measuring.record("other", GroupEvent(GroupEventKind.FAILED, ("a", "b")))
    measuring.record("other", GroupEvent(GroupEventKind.JOINED, ("c",)))
    assert values(reader) == {
        "rebalances": {"etl/done": 2, "etl/tried_again": 1},
        "moved": {"etl": 9},
        "failed": {"other": 2},
    }


def test_how_groups_stand_is_noted(reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that another process leads now has the value 0."""
    monkeypatch.setattr(coordinator_metrics, "flush", lambda: None)  # it would read the values away in older versions
    measuring = GroupMetrics()
    groups = {"etl": {"a": frozenset({("t", 0), ("t", 1)}), "b": frozenset({("t", 2)})}, "other": {}}
    measuring.update(groups, led=3, partitions=8)
    outcomes = {f"{group}/{outcome}": 0 for group in groups for outcome in ("done", "tried_again", "given_up")}
    counted = {"rebalances": outcomes, "moved": {"etl": 0, "other": 0}, "failed": {"etl": 0, "other": 0}}
    assert values(reader) == {
        **counted,
        "groups": {"": 2},
        "led": {"": 3},
        "partitions": {"": 8},
        "members": {"etl": 2, "other": 0},
        "assigned": {"etl": 3, "other": 0},
    }
    measuring.update({"other": {"a": frozenset({("t", 0)})}}, led=2, partitions=8)
    assert values(reader) == {
        **counted,
        "groups": {"": 1},
        "led": {"": 2},
        "partitions": {"": 8},
        "members": {"etl": 0, "other": 1},
        "assigned": {"etl": 0, "other": 1},
    }
    measuring.close()
    assert values(reader)["assigned"]["other"] == 0


def test_a_coordinator_is_ready_once_it_knows_the_data_topics(coordinator: Coordinator) -> None:
    """It is live before that, and neither live nor ready if its thread hangs."""
    assert [coordinator.health()[name] for name in ("live", "ready")] == [True, False]
    coordinator._known.update({"t": 2})
    assert [coordinator.health()[name] for name in ("live", "ready")] == [True, True]
    coordinator._alive_at_s -= IDLE_AFTER_S + 1
    assert [coordinator.health()[name] for name in ("live", "ready")] == [False, False]


def test_at_its_end_nothing_is_led(
    reader: InMemoryMetricReader,
    coordinator: Coordinator,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the coordinator ends, it exports that it leads nothing."""
    monkeypatch.setattr(CoordinatorTopics, "partitions", lambda *_: 1)
    monkeypatch.setattr(service, "Elector", lambda *_, **__: nullcontext(ends))
    monkeypatch.setattr(service, "Reader", lambda *_: ends)
    coordinator.stop()
    coordinator.run()
    assert values(reader) == {"groups": {"": 0}, "led": {"": 0}, "partitions": {"": 0}}


def test_without_opentelemetry_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry no instruments are created."""
    monkeypatch.setattr(metrics, "_is_in_use", lambda: False)
    measuring = GroupMetrics()
    measuring.record("etl", GroupEvent(GroupEventKind.REBALANCED, moved=7))
    measuring.update({"etl": {}})
    measuring.close()
    assert measuring._metrics is None


def test_kinds_of_metrics_do_not_push_each_other_out(reader: InMemoryMetricReader) -> None:
    """A process may use all kinds of metrics; each is created once."""
    kinds = (metrics.metrics, metrics.outbox_metrics, metrics.coordinator_metrics)
    made = [kind() for kind in kinds]
    assert None not in made
    assert all(kind() is before for _ in range(2) for kind, before in zip(kinds, made, strict=True))
    del reader


def registers(group: str, member: str = "a", **fields: Any) -> Register:  # noqa: ANN401 - a record's fields
    """Return a registration."""
    said = {"topics": ["t"], "session_timeout_ms": 60_000, **fields}
    return Register.model_validate({"group": group, "member": member, "epoch": 0, "tenure": member, **said})


@pytest.fixture
def clock(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Return a clock that the test sets."""
    found = SimpleNamespace(now_ms=0.0)
    monkeypatch.setattr(coordinator, "_clock", SimpleNamespace(lease_ms=lambda: found.now_ms))
    monkeypatch.setattr(coordinator._known, "counts", {"t": 2})
    return found


def shares(ends: Ends) -> dict[str, list[Any]]:
    """Return the partitions that were assigned to members, by group."""
    found: dict[str, list[Any]] = {}
    for order in ends.orders:
        if isinstance(order, StartFetcher):
            found.setdefault(order.group, []).append(order.places)
    return found


def turns(coordinator: Coordinator, ends: Ends, clock: SimpleNamespace, count: int = 10) -> None:
    """Take turns, half a second apart."""
    for _ in range(count):
        turn(coordinator, ends)
        clock.now_ms += 500


def test_a_group_that_goes_wrong_disturbs_no_other(
    coordinator: Coordinator, ends: Ends, clock: SimpleNamespace
) -> None:
    """If a group's strategy raises, other groups continue and the health shows the error.

    After a pause the coordinator leads the group again, with the partitions that its members hold.
    """
    fails = True

    def strategy(board: AssignmentInput) -> Any:  # noqa: ANN401 - an assignment
        if fails and any(member.id == "bad" for member in board.members):
            raise ValueError("no idea")
        return sticky_assignment(board)

    coordinator._rules = replace(coordinator._rules, strategy=strategy)
    ends.messages = [registers("odd", "bad"), registers("even")]
    turns(coordinator, ends, clock, 3)
    assert shares(ends) == {"even": [{"t": [0, 1]}]}
    assert coordinator.health()["failure"] == "no idea"
    fails = False
    ends.messages = [registers("odd", "bad")]
    turns(coordinator, ends, clock, 2)
    assert "odd" not in shares(ends)
    pings = sum(order.kind == "ping" and order.group == "even" for order in ends.orders)
    ends.messages = [registers("odd", "bad")]
    turns(coordinator, ends, clock, 60)
    assert shares(ends)["odd"] == [{"t": [0, 1]}]
    assert sum(order.kind == "ping" and order.group == "even" for order in ends.orders) > pings


def test_one_that_leads_no_more_writes_nothing(coordinator: Coordinator, ends: Ends, clock: SimpleNamespace) -> None:
    """A coordinator that lost its term during a turn does not send the answers that it still had."""
    ends.messages = [registers("etl")]
    turns(coordinator, ends, clock)
    assert ends.orders
    ends.orders.clear()
    ends.is_deposed = True
    ends.messages = [registers("etl", "b"), registers("other")]
    turn(coordinator, ends)
    assert ends.orders == []
    assert coordinator._shards == {}


def test_no_member_ends_a_term_by_an_epoch_of_its_own(
    coordinator: Coordinator, ends: Ends, clock: SimpleNamespace
) -> None:
    """Members' epochs alone end no term, even once a second; if the election shows another heartbeat, the term ends."""
    coordinator._shards[0] = service._Shard(Term(1, "id"), ends.may_have_successor)
    for second in range(10):
        ends.messages = [registers("etl", epoch=2**60 + second), registers("etl", epoch=second % 2 * 10)]
        turn(coordinator, ends)
        clock.now_ms += 1_000
    assert ends.given_up == []
    assert coordinator.groups()["etl"].keys() == {"a"}
    ends.rival_fences = (9,)
    ends.messages = [registers("etl", epoch=10)]
    turn(coordinator, ends)
    assert ends.given_up == ["a later coordinator leads"]


def test_only_who_registers_makes_a_group(coordinator: Coordinator, ends: Ends, clock: SimpleNamespace) -> None:
    """Other messages create no group, nor do registrations in a partition that is not the group's."""
    ends.messages = [Pong(group=f"g{number}", member="a", epoch=1, tenure="a", round=1) for number in range(100)]
    turns(coordinator, ends, clock)
    assert (coordinator._shards[0].groups, ends.orders) == ({}, [])
    ends.partitions = 8
    strays = [f"g{number}" for number in range(100) if partition_of(f"g{number}", 8) != 0]
    ends.messages = [registers(group) for group in strays]
    turns(coordinator, ends, clock)
    assert coordinator._shards[0].groups == {}
    ends.messages = [Pong(group="etl", member="a", epoch=2, tenure="a", round=1)]
    ends.partitions = 1
    turn(coordinator, ends)
    assert [getattr(order, "error", None) for order in ends.orders] == ["unknown_member"]


def test_a_group_that_all_have_left_is_forgotten(coordinator: Coordinator, ends: Ends, clock: SimpleNamespace) -> None:
    """A member that comes back knows earlier generations, so the group continues to count from there."""
    ends.messages = [registers("etl")]
    turns(coordinator, ends, clock)
    first = coordinator._shards[0].groups["etl"].generation
    assert first > 0
    ends.messages = [Leave(group="etl", member="a", epoch=2, tenure="a")]
    turns(coordinator, ends, clock)
    assert coordinator._shards[0].groups == {}
    ends.messages = [registers("etl", "b")]
    turns(coordinator, ends, clock)
    assert coordinator._shards[0].groups["etl"].generation > first


def test_the_tombstone_of_a_member_that_left_does_not_delete_its_next_share(
    coordinator: Coordinator, ends: Ends, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that leaves and registers again at once keeps its share, which its runs read from the topic."""
    coordinator._rules = replace(coordinator._rules, gather_ms=0)
    written: list[str] = []
    monkeypatch.setattr(ends, "forget", lambda *_: written.append("tombstone"), raising=False)
    monkeypatch.setattr(ends, "send_to_member", lambda message: written.append(message.kind), raising=False)
    ends.messages = [registers("etl")]
    turns(coordinator, ends, clock)
    written.clear()
    ends.messages = [Leave(group="etl", member="a", epoch=2, tenure="a"), registers("etl", tenure="b")]
    turns(coordinator, ends, clock)
    assert [kind for kind in written if kind in {"tombstone", "start"}][:2] == ["tombstone", "start"]


def test_a_coordinator_whose_election_hangs_is_not_live(coordinator: Coordinator) -> None:
    """It would stand by without a limit, although no other failure shows that."""
    coordinator._elector_idle_s = lambda: IDLE_AFTER_S + 1
    health = coordinator.health()
    assert (health["healthy"], health["live"], health["ready"]) == (False, False, False)


@pytest.fixture
def weighs(coordinator: Coordinator) -> dict[str, Any]:
    """Let the coordinator weigh groups; the values by group name are weights, errors, or functions to call."""
    found: dict[str, Any] = {}

    def weigh(name: str, *_: object) -> Any:  # noqa: ANN401 - weights
        each = found[name].pop(0) if isinstance(found[name], list) else found[name]
        if isinstance(each, Exception):
            raise each
        return each() if callable(each) else each

    coordinator._weigher = lag_weights.GroupWeigher(weigh)
    coordinator._rules = replace(coordinator._rules, weighs=True)
    return found


def until_weighed(coordinator: Coordinator, ends: Ends, group: str) -> None:
    """Take turns until the group has its weights."""

    def is_weighed() -> bool:
        groups = coordinator._shards[0].groups
        if group in groups and not groups[group].awaits_weights:
            return True
        turn(coordinator, ends)
        return False

    wait_until(is_weighed, f"{group} has its weights")


@pytest.mark.slow
def test_a_weighing_that_fails_is_done_again(
    coordinator: Coordinator, ends: Ends, clock: SimpleNamespace, weighs: dict[str, Any]
) -> None:
    """After any error the group is weighed again; meanwhile it is led without weights."""
    weigher = coordinator._weigher
    assert weigher is not None
    weighs["etl"] = [KafkaException("away"), RuntimeError("odd"), {("t", 0): 5.0}]
    ends.messages = [registers("etl")]
    until_weighed(coordinator, ends, "etl")
    turns(coordinator, ends, clock)
    assert shares(ends) == {"etl": [{"t": [0, 1]}]}
    for left in (1, 0):
        clock.now_ms += lag_weights._WEIGH_EACH_MS + 1
        turn(coordinator, ends)
        wait_until(lambda left=left: len(weighs["etl"]) == left, "the weights were requested")  # type: ignore[misc]
        wait_until(
            lambda: all(weighing.found.done() for weighing in weigher._weighings.values()), "the weights are found"
        )
        turn(coordinator, ends)
    assert coordinator._shards[0].groups["etl"]._workload.weights == {("t", 0): 5.0}


def test_a_weighing_that_hangs_holds_up_no_other_group(
    coordinator: Coordinator, ends: Ends, clock: SimpleNamespace, weighs: dict[str, Any]
) -> None:
    """Other groups continue, and the group itself waits only for a limited time."""
    goes_on = threading.Event()
    weighs.update(stuck=lambda: goes_on.wait(WITHIN_S) and {}, free={})
    ends.messages = [registers("stuck"), registers("free")]
    until_weighed(coordinator, ends, "free")
    turns(coordinator, ends, clock)
    assert shares(ends) == {"free": [{"t": [0, 1]}]}
    clock.now_ms += lag_weights._WEIGHS_FOR_MS
    turns(coordinator, ends, clock)
    assert shares(ends)["stuck"] == [{"t": [0, 1]}]
    goes_on.set()


def test_topics_that_are_gone_are_believed_at_the_second_look() -> None:
    """A broker that has just started may not list all topics; new topics count at once."""
    known = service._KnownTopics()
    for looked, counts in (
        ({"a": 4, "b": 2}, {"a": 4, "b": 2}),
        ({"c": 1}, {"a": 4, "b": 2, "c": 1}),
        ({"a": 4, "c": 1}, {"a": 4, "c": 1}),
    ):
        known.update(looked)
        assert known.counts == counts


def test_what_an_older_coordinator_writes_late_does_not_count() -> None:
    """A share or ping at a higher offset, but of an older epoch, does not count; a tombstone deletes the message."""
    found: dict[tuple[int, bytes], tuple[CoordinatorMessage, ReceivedRecord]] = {}

    def came(offset: int, epoch: int | None) -> ReceivedRecord:
        share = (
            None
            if epoch is None
            else StartFetcher(group="etl", member="a", tenure="a", epoch=epoch, generation=1, places={"t": [epoch]})
        )
        return ReceivedRecord(0, offset, b"etl/a/start", None if share is None else render(share), 0)

    for offset, epoch in enumerate([5, 9, 5]):
        keep_newest(found, came(offset, epoch))
    assert [each[0].epoch for each in found.values()] == [9]
    keep_newest(found, came(3, 9))
    assert [each[1].offset for each in found.values()] == [3]
    keep_newest(found, ReceivedRecord(0, 4, b"etl/a/start", b"garbage", 0))
    assert len(found) == 1
    keep_newest(found, came(5, None))
    assert found == {}


@pytest.mark.parametrize("key", [b"", b"x", b"etl/a/stop", b"etl/b/start", b"other/a/start"])
def test_a_message_under_another_key_than_a_coordinators_does_not_count(key: bytes) -> None:
    """A message under a wrong key does not count, because no coordinator's message would ever replace it."""
    found: dict[tuple[int, bytes], tuple[CoordinatorMessage, ReceivedRecord]] = {}
    share = StartFetcher(group="etl", member="a", tenure="a", epoch=2**61, generation=1, places={"t": [0]})
    keep_newest(found, ReceivedRecord(0, 0, key, render(share), 0))
    assert found == {}
    answer = Registered(group="etl", member="a", epoch=1, tenure="a")
    keep_newest(found, ReceivedRecord(0, 1, b"etl/*/registered", render(answer), 0))
    assert [message for message, _ in found.values()] == [answer]


@pytest.mark.parametrize("names", [None, ["etl"]])
def test_messages_in_a_partition_of_other_groups_do_not_count(
    monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    """They are from before the topics got more partitions, and no coordinator deletes them."""
    topics = SimpleNamespace(partitions=lambda _: 8, coordinator_messages="orders")
    own = partition_of("etl", 8)
    shares = [
        (
            StartFetcher(group="etl", member=member, tenure="t", epoch=1, generation=1, places={"t": [0]}),
            ReceivedRecord(partition, 0, b"", None, 0),
        )
        for member, partition in [("a", own), ("gone", (own + 1) % 8)]
    ]
    monkeypatch.setattr(group_view, "read_coordinator_messages", lambda *_: shares)
    found = group_view.read_groups(cast("Any", None), cast("Any", topics), names)
    assert found["etl"].shares.keys() == {"a"}


def test_a_message_with_an_impossible_epoch_is_deleted(
    coordinator: Coordinator, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers would prefer its epoch to any real one; the coordinator still waits for the member that it names."""
    coordinator._partitions = 1
    del coordinator._shards[0]
    share = StartFetcher(group="etl", member="a", tenure="a", epoch=5, generation=1, places={"t": [0]})
    foreign = share.model_copy(update={"member": "b", "epoch": 2**61})
    found: Future[Any] = Future()
    found.set_result(service._TopicsRead.of([share, foreign], last_epoch=5, end=0))
    coordinator._beginning[0] = Term(5, "id"), found
    turn(coordinator, ends)
    assert ends.revoked == [foreign]
    assert "of epoch 2305843009213693952, which is after the end of topic '__marshal_coordinator_leader'" in caplog.text
    assert not coordinator._shards[0].groups["etl"].is_empty


class Producer:
    """A stand-in for the client's producer."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.fails: Exception | None = None
        self.keys: list[bytes] = []

    def produce(self, _: str, __: object, key: bytes, *___: object, on_delivery: Any) -> None:  # noqa: ANN401 - a callback
        """Keep the callback."""
        if self.fails:
            raise self.fails
        self.keys.append(key)
        self.reports.append(on_delivery)


def test_refusals_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All refusals have one key: the topic keeps a record for each key, and refused members often have new names."""
    producer = Producer()
    monkeypatch.setattr(clients, "producer", lambda *_, **__: (producer, None))
    writer = transport.Writer(KafkaConnection(bootstrap_servers="127.0.0.1:1"), CoordinatorTopics(), 1)
    for name in "ab":
        writer.send_to_member(Registered(group="etl", member=name, epoch=1, tenure="t", error="bad_pattern"))
    assert len(set(producer.keys)) == 1


def test_what_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A message that is too large, refused at once or not delivered is logged, at a limited rate."""
    producer = Producer()
    monkeypatch.setattr(clients, "producer", lambda *_, **__: (producer, None))
    writer = transport.Writer(KafkaConnection(bootstrap_servers="127.0.0.1:1"), CoordinatorTopics(), 1)
    places = {"t" * 200: list(range(150_000))}
    large = StartFetcher(group="etl", member="a", tenure="a", epoch=1, generation=1, places=places)

    def answer() -> list[str]:
        writer._warned_at_s = -math.inf
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    writer.send_to_member(large)
    assert "more than the 900,000 that readers accept; start more members" in answer()[0]
    assert producer.reports == []
    writer.send_to_member(large.model_copy(update={"places": {}}))
    producer.reports[0](None, SimpleNamespace(topic=lambda: "orders"))
    assert answer() == []
    for _ in range(2):
        producer.reports[0](KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), SimpleNamespace(topic=lambda: "orders"))
    assert len(answer()) == 1
    producer.fails = BufferError("full")
    writer.send_to_coordinator(registers("etl"))
    assert "full" in answer()[0]


@pytest.mark.parametrize("recovery_ms", [-5, math.nan, math.inf])
def test_a_recovery_that_cannot_be_is_refused(recovery_ms: float) -> None:
    """The error shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=r"recovery_ms is .*; it must be 0 or more"):
        CoordinatorOptions(recovery_ms=recovery_ms)


class BusyReader:
    """A reader of two partitions: the second gets more and more records, the first has no broker."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.offsets = itertools.count()

    def read(self, timeout_s: float) -> list[ReceivedRecord]:
        """Return a record of the second partition."""
        assert timeout_s < 1
        offset = next(self.offsets)
        assert offset < 10_000, "it reads without a limit"
        return [ReceivedRecord(1, offset, b"", None, 0)]


def test_reading_up_to_an_end_does_not_wait_for_ever_beside_a_busy_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a partition after its end are no progress, so the reading times out."""
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=itertools.count(step=0.01).__next__))
    with pytest.raises(UnavailableError, match=r"not read to their ends: nothing arrived within 0.2 s"):
        list(_read_up_to(cast("Reader", BusyReader()), {0: 5, 1: 3}, 0.2))


class PausingReader:
    """A reader of one partition that returns a record at each second call."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.parts: list[list[ReceivedRecord]] = [
            [ReceivedRecord(0, 0, b"", None, 0)],
            [],
            [ReceivedRecord(0, 1, b"", None, 0)],
        ]

    def read(self, _: float) -> list[ReceivedRecord]:
        """Return the next part."""
        return self.parts.pop(0)


def test_the_time_that_the_caller_takes_for_a_record_is_not_that_of_the_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was stopped for a while between two records waits for the next one as long as before."""
    now_s = [0.0]
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    found = []
    for record in _read_up_to(cast("Reader", PausingReader()), {0: 2}, 0.2):
        found.append(record.offset)
        now_s[0] += 20
    assert found == [0, 1]
