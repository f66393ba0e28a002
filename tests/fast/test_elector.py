"""What an elector answers between its thread's looks."""

from types import SimpleNamespace
from typing import Any, cast

from marshal_dagster.election.elector import Elector
from marshal_dagster.election.rules import Candidacy, Term, Timing
from marshal_dagster.kafka.connection import KafkaConnection


def test_a_term_is_over_with_its_deadline_whether_that_was_looked_at_or_not() -> None:
    """A process that was stopped knows it with its first question, before its elector's thread has run."""
    now_ms = 0.0
    clock = cast("Any", SimpleNamespace(lease_ms=lambda: now_ms))
    elector = Elector(KafkaConnection(bootstrap_servers="127.0.0.1:1"), "topic", "group", clock=clock)
    candidacy = Candidacy(Timing(receive_deadline_ms=5_000), iter(["id"]))
    candidacy.gain(now_ms)
    _, beat = candidacy.tick(now_ms)
    assert beat is not None
    candidacy.hear(beat, 7, 100)
    elector._candidacies[0] = candidacy
    now_ms = 4_999
    assert elector.term() == Term(7, "id")
    now_ms = 5_000
    assert elector.term() is None
    assert not elector.leads(Term(7, "id"))
    assert elector.wait_for_term(0.01) is None
