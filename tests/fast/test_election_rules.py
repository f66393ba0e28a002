"""Check the rules of the election: when a term starts and ends, which heartbeats count, and which ids are used."""

from collections.abc import Iterator
from itertools import count

import pytest

from marshal_dagster.election.rules import LONGEST_ID, Beat, Candidacy, Term, TermEnded, TermStarted, Timing
from marshal_dagster.errors import ConfigurationError

TIMING = Timing(receive_deadline_ms=1_000, poll_interval_ms=100)


def ids() -> Iterator[str]:
    """Return an iterator of different ids."""
    return (f"id{number}" for number in count())


def candidate(now_ms: float = 0.0) -> Candidacy:
    """Return a member to which the partition was assigned."""
    candidacy = Candidacy(TIMING, ids())
    candidacy.gain(now_ms)
    return candidacy


def due(candidacy: Candidacy, now_ms: float) -> Beat:
    """Return the heartbeat that is due; there must be no events."""
    events, beat = candidacy.tick(now_ms)
    assert events == []
    assert beat is not None
    return beat


def leader(fence: int = 7) -> Candidacy:
    """Return a member that leads since 0 ms."""
    candidacy = candidate()
    candidacy.receive(due(candidacy, 0), fence, 0)
    return candidacy


def test_the_first_beat_of_its_own_that_it_hears_begins_a_term() -> None:
    """The term's fence is the offset of that heartbeat."""
    candidacy = candidate()
    beat = due(candidacy, 0)
    assert not candidacy.leads(1)
    assert candidacy.receive(beat, 7, 5) == [TermStarted(Term(7, "id0"))]
    assert candidacy.term == Term(7, "id0")
    assert candidacy.leads(5)


def test_a_beat_before_its_own_term_ends_it() -> None:
    """The leader topic must have been replaced, because in the same topic a later heartbeat has a higher offset."""
    candidacy = leader(fence=100)
    events = candidacy.receive(due(candidacy, 200), 3, 210)
    assert [type(event) for event in events] == [TermEnded]
    assert not candidacy.leads(220)


def test_a_member_without_the_partition_sends_nothing_and_leads_nothing() -> None:
    """A heartbeat with its id changes nothing."""
    candidacy = Candidacy(TIMING, ids())
    assert candidacy.tick(0) == ([], None)
    assert candidacy.receive(Beat("id0", 1), 7, 0) == []
    assert not candidacy.leads(0)


def test_a_beat_is_due_at_once_and_then_five_times_a_deadline() -> None:
    """The first heartbeat is due at once, others every fifth of the deadline; their numbers rise."""
    candidacy = candidate(50)
    sent = [(now_ms, beat.number) for now_ms in range(50, 700, 10) if (beat := candidacy.tick(now_ms)[1])]
    assert sent == [(50, 1), (250, 2), (450, 3), (650, 4)]
    assert TIMING.beat_interval_ms == 200


def test_beats_of_others_begin_no_term() -> None:
    """Heartbeats of others neither start nor prolong a term."""
    candidacy = candidate()
    beat = due(candidacy, 0)
    assert candidacy.receive(Beat("another", beat.number), 7, 5) == []
    assert candidacy.term is None
    candidacy.receive(beat, 8, 5)
    assert candidacy.receive(Beat("another", 1), 9, 900) == []
    assert not candidacy.leads(1_000)


def test_a_beat_that_it_has_not_sent_counts_for_nothing() -> None:
    """A number that it has not sent does not count, even with its own id."""
    candidacy = candidate()
    due(candidacy, 0)
    assert candidacy.receive(Beat("id0", 99), 7, 5) == []


def test_a_term_lasts_for_the_deadline_from_when_its_last_beat_was_sent() -> None:
    """The time when the heartbeat was read does not matter."""
    candidacy = candidate()
    candidacy.receive(due(candidacy, 0), 7, 800)
    assert candidacy.leads(999)
    assert not candidacy.leads(1_000)
    assert candidacy.term is not None


def test_a_beat_that_is_heard_after_the_deadline_begins_no_term() -> None:
    """Another member may have led meanwhile."""
    candidacy = candidate()
    beat = due(candidacy, 0)
    assert candidacy.receive(beat, 7, 1_000) == []
    assert candidacy.term is None


def test_each_beat_that_is_heard_makes_a_term_last_longer() -> None:
    """The term and its fence stay the same."""
    candidacy = leader(7)
    assert candidacy.receive(due(candidacy, 300), 8, 400) == []
    assert candidacy.leads(1_299)
    assert not candidacy.leads(1_300)
    assert candidacy.term == Term(7, "id0")


def test_beats_that_come_twice_or_late_shorten_nothing() -> None:
    """The newest heartbeat that was read counts."""
    candidacy = candidate()
    first, second = due(candidacy, 0), due(candidacy, 300)
    candidacy.receive(second, 7, 400)
    assert candidacy.receive(first, 8, 500) == []
    assert candidacy.receive(second, 9, 600) == []
    assert candidacy.leads(1_299)
    assert not candidacy.leads(1_300)
    assert candidacy.term == Term(7, "id0")


def test_a_leader_that_hears_nothing_of_itself_steps_down_and_stands_under_another_id() -> None:
    """The event has the reason; the next heartbeat, with another id, is due at once and may start a later term."""
    candidacy = leader(7)
    events, beat = candidacy.tick(1_000)
    assert events == [TermEnded(Term(7, "id0"), "read back none of its own beats of the last 1 s")]
    assert beat == Beat("id1", 1)
    assert candidacy.term is None
    assert candidacy.receive(beat, 12, 1_001) == [TermStarted(Term(12, "id1"))]


def test_beats_of_a_term_that_has_ended_begin_none() -> None:
    """Heartbeats that were sent in the ended term may still arrive."""
    candidacy = leader()
    late = due(candidacy, 200)
    candidacy.give_up(300, "for a reason")
    due(candidacy, 300)
    assert candidacy.receive(late, 9, 310) == []
    assert not candidacy.leads(310)


def test_who_loses_the_partition_leads_no_more() -> None:
    """Its term ends at once; it sends no more heartbeats and ignores those that arrive."""
    candidacy = leader(7)
    beat = due(candidacy, 200)
    assert candidacy.lose("taken") == [TermEnded(Term(7, "id0"), "taken")]
    assert not candidacy.leads(201)
    assert candidacy.tick(500) == ([], None)
    assert candidacy.receive(beat, 8, 300) == []
    assert candidacy.lose("taken") == []


def test_who_gets_the_partition_back_stands_under_another_id() -> None:
    """Each id is used for one term at most."""
    candidacy = leader()
    candidacy.lose("taken")
    candidacy.gain(500)
    assert due(candidacy, 500) == Beat("id1", 1)


def test_a_term_that_is_given_up_is_over_and_another_may_follow() -> None:
    """While the member has the partition, it may start another term with another id."""
    candidacy = leader(7)
    assert candidacy.give_up(300, "the database has seen a later one") == [
        TermEnded(Term(7, "id0"), "the database has seen a later one")
    ]
    assert not candidacy.leads(300)
    assert due(candidacy, 300) == Beat("id1", 1)
    candidacy.lose("taken")
    assert candidacy.give_up(400, "again") == []
    assert candidacy.tick(400) == ([], None)


def test_giving_up_without_a_term_reports_nothing() -> None:
    """There is no term to end; the next heartbeat has another id all the same."""
    candidacy = candidate()
    due(candidacy, 0)
    assert candidacy.give_up(100, "for a reason") == []
    assert due(candidacy, 100) == Beat("id1", 1)


def test_whether_a_term_holds_does_not_wait_for_somebody_to_look() -> None:
    """After a long pause of the process, the term is over before the next tick."""
    assert not leader().leads(60_000)


def test_a_term_that_is_over_does_not_come_back() -> None:
    """A heartbeat that arrives after the deadline, but before the next tick, ends the term.

    The member may already have reported in between that it does not lead.
    """
    candidacy = leader()
    beat = due(candidacy, 500)
    assert not candidacy.leads(1_000)
    assert candidacy.receive(beat, 8, 1_001) == [
        TermEnded(Term(7, "id0"), "read back none of its own beats of the last 1 s")
    ]
    assert not candidacy.leads(1_002)
    again = due(candidacy, 1_002)
    assert (again.leader_id, again.number) == ("id1", 1)


def test_only_beats_that_can_still_count_are_remembered() -> None:
    """The memory stays small even if no heartbeat is ever read."""
    candidacy = candidate()
    for now_ms in range(0, 100_000, 100):
        candidacy.tick(now_ms)
    assert len(candidacy._sent_ms) <= 5


def test_of_two_terms_the_later_one_has_the_larger_fence() -> None:
    """Terms are ordered by their fences, whatever their ids are."""
    assert Term(9, "a") > Term(8, "b")


def test_a_beat_is_read_as_it_was_written() -> None:
    """A heartbeat has format, id and number."""
    beat = Beat("an-id", 12)
    assert beat.render() == b"NELI1/an-id/12"
    assert Beat.parse(beat.render()) == beat
    assert Beat.parse(b"NELI1/" + b"i" * LONGEST_ID + b"/1") is not None


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"NELI1",
        b"NELI1/id",
        b"NELI1/id/1/2",
        b"NELI2/id/1",
        b"NELI1//1",
        b"NELI1/id/",
        b"NELI1/id/-1",
        b"NELI1/id/x",
        "NELI1/id/\u0661".encode(),
        b"NELI1/id/" + b"9" * 10_000,
        b"NELI1/\xff/1",
        b"NELI1/" + b"i" * (LONGEST_ID + 1) + b"/1",
    ],
)
def test_anything_else_is_no_beat(value: bytes | None) -> None:
    """Other values are ignored."""
    assert Beat.parse(value) is None


def test_timing_has_room_for_ten_polls_in_a_deadline() -> None:
    """Otherwise a heartbeat could be late without a reason."""
    assert Timing(1_000, 100).beat_interval_ms == 200
    with pytest.raises(ConfigurationError, match="at least 10 times poll_interval_ms"):
        Timing(999, 100)
    with pytest.raises(ConfigurationError, match="poll_interval_ms is 0"):
        Timing(1_000, 0)


def test_a_later_term_begins_with_a_beat_of_another_after_the_own_one() -> None:
    """The offset of another member's heartbeat after its own fence may be the fence of a later term."""
    candidacy = leader(fence=7)
    for offset, name in ((5, "other"), (9, "other"), (10, "id0"), (12, "third")):
        assert candidacy.receive(Beat(name, 1_000), offset, 10) == []
    assert [fence for fence in range(20) if candidacy.may_have_successor(fence)] == [9, 12]
    assert not candidacy.may_have_successor(2**60)
    candidacy.give_up(20, "another")
    assert not candidacy.may_have_successor(9)


def test_only_the_newest_beats_of_others_are_remembered() -> None:
    """The limit is far above the number of heartbeats within a deadline."""
    candidacy = leader(fence=7)
    for offset in range(8, 10_000):
        candidacy.receive(Beat("other", offset), offset, 10)
    assert len(candidacy._rivals) <= 100
    assert candidacy.may_have_successor(9_999)
