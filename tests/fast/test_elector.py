"""Check what an elector reports between two steps of its thread."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, TopicPartition

from marshal_dagster.election import elector as module
from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Beat, Candidacy, Term, Timing
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection


def test_a_term_is_over_with_its_deadline_whether_that_was_looked_at_or_not() -> None:
    """A process that was stopped learns this from the elector's first answer, before the elector's thread has run."""
    now_ms = 0.0
    clock = cast("Any", SimpleNamespace(lease_ms=lambda: now_ms))
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", clock=clock)
    candidacy = Candidacy(Timing(receive_deadline_ms=5_000), iter(["id"]))
    candidacy.gain(now_ms)
    _, beat = candidacy.tick(now_ms)
    assert beat is not None
    candidacy.receive(beat, 7, 100)
    elector._candidacies[0] = candidacy
    now_ms = 4_999
    assert elector.term() == Term(7, "id")
    now_ms = 5_000
    assert elector.term() is None
    assert not elector.leads(Term(7, "id"))
    assert elector.wait_for_term(0.01) is None


@pytest.mark.slow
def test_an_elector_outlives_what_the_client_makes_of_a_fatal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """During callbacks, the client raises a SystemError: the elector reports it and becomes a candidate again."""
    timing = Timing(receive_deadline_ms=100, poll_interval_ms=10)
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", timing=timing)
    stands: list[int] = []

    def stand() -> None:
        stands.append(len(stands))
        if len(stands) == 1:
            raise SystemError("returned NULL without setting an exception")
        elector._stop.set()

    monkeypatch.setattr(elector, "_take_part", stand)
    elector._run()
    assert stands == [0, 1]
    assert isinstance(elector.failure, UnavailableError)


@pytest.mark.slow
@pytest.mark.parametrize("error", [BufferError("the queue is full"), TypeError("of a listener")])
def test_an_elector_stands_again_after_any_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The thread does not end silently; it keeps the error and becomes a candidate again."""
    timing = Timing(receive_deadline_ms=100, poll_interval_ms=10)
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", timing=timing)
    errors = iter([error])

    def stand() -> None:
        for each in errors:
            raise each
        elector._stop.set()

    monkeypatch.setattr(elector, "_take_part", stand)
    elector._run()
    assert str(elector.failure) == str(error)


def test_who_hangs_is_not_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes a candidate only when it is reported as alive."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    alive = iter([False, False, True])
    connection = KafkaConnection(bootstrap_servers="127.0.0.1:1")
    elector = Elector(connection, "topic", "group", is_alive=lambda: next(alive, True))
    stands: list[object] = []

    def stand() -> None:
        stands.append(next(alive, "asked three times before"))
        elector._stop.set()

    monkeypatch.setattr(elector, "_take_part", stand)
    elector._run()
    assert stands == ["asked three times before"]


def test_a_member_of_the_group_without_a_partition_has_not_failed() -> None:
    """Without a partition it reads back no heartbeats, so the failure is over. With one, it waits for its heartbeat."""
    consumer = cast("Any", SimpleNamespace(incremental_assign=lambda _: None))
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group")
    elector.failure = UnavailableError("no right to read the group")
    elector._gain(consumer, [TopicPartition("topic", 0)])
    elector._gain(consumer, [])
    assert elector.failure is not None
    elector._lose_all("the group assigned it to another member")
    elector._gain(consumer, [])
    assert elector.failure is None


def test_an_elector_that_hangs_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can hang, for example after a jump of the clock. Each poll that returns shows that it does not."""
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group")
    found = []

    def consume(*_: object) -> list[object]:
        found.append(elector.idle_s)
        elector._alive_at_s -= 100
        if len(found) == 3:
            elector._stop.set()
        return []

    log = SimpleNamespace(fatal=None)
    client = SimpleNamespace(consume=consume, subscribe=lambda *_, **__: None, poll=lambda _: None)
    monkeypatch.setattr(elector, "_consumer", lambda: (client, log))
    monkeypatch.setattr(clients, "producer", lambda *_, **__: (client, log))
    monkeypatch.setattr(module, "close_client", lambda *_: None)
    elector._thread = threading.current_thread()
    elector._alive_at_s -= 100
    assert elector.idle_s >= 100
    elector._run()
    assert max(found) < 100
    assert elector.idle_s == 0


def test_who_stands_aside_is_out_of_the_group_for_a_while() -> None:
    """Its term ends at once, and it becomes a candidate again after that time."""
    now_ms = 0.0
    clock = cast("Any", SimpleNamespace(lease_ms=lambda: now_ms))
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", clock=clock)
    candidacy = Candidacy(Timing(), iter(["id", "another"]))
    candidacy.gain(now_ms)
    _, beat = candidacy.tick(now_ms)
    assert beat is not None
    candidacy.receive(beat, 7, 100)
    elector._candidacies[0] = candidacy
    elector.step_down(Term(6, "other"), "not its own", 10)
    assert elector.term() == Term(7, "id")
    assert elector._aside_s == 0
    elector.step_down(Term(7, "id"), "no database", 10)
    assert elector.term() is None
    assert elector._aside_s == 10
    now_ms = 10_000
    assert elector._aside_s == 0


def test_a_member_that_should_lead_and_does_not_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """It is not a healthy standby, because no member leads. The failure ends once it reads back its own beats."""
    now_ms = 0.0
    clock = cast("Any", SimpleNamespace(lease_ms=lambda: now_ms))
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", clock=clock)
    for partition in (0, 1):
        elector._candidacies[partition] = Candidacy(Timing(receive_deadline_ms=5_000), iter(["id", "another"]))
        elector._candidacies[partition].gain(now_ms)
    elector._delivered(KafkaError(KafkaError._MSG_TIMED_OUT), cast("Any", None))
    now_ms = 10_000
    elector._note_if_late()
    failures = [elector.failure]
    now_ms = 10_001
    beats = dict(elector._due())
    for _ in range(2):
        elector._note_if_late()
    assert "'topic', partition 0, 1, are not stored or not read back: Local: Message timed out" in str(elector.failure)
    assert caplog.text.count("this member cannot lead") == 1
    for partition, beat in beats.items():
        failures.append(elector.failure)
        elector._take(message_of(beat, partition), cast("Any", None))
    assert [failure is None for failure in failures] == [True, False, False]
    assert (elector.failure, elector.term(0)) == (None, Term(7, "id"))


def message_of(beat: Beat, partition: int) -> Any:  # noqa: ANN401
    """Return a record with a beat at offset 7."""
    return SimpleNamespace(error=lambda: None, value=beat.render, partition=lambda: partition, offset=lambda: 7)
