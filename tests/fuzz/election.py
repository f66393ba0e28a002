"""The leader topic: whatever it contains, a member leads only by its own beats, and only while it reads them in time.

The bytes write the topic. The member's own beats arrive in time, late, again or never. Between them are beats of
others, beats with changed bytes, and noise. The bytes also decide how much time passes.
"""

from itertools import count
from typing import Final

from marshal_dagster.election.rules import Beat, Candidacy, Term, TermEnded, TermStarted, Timing
from tests.fuzz.promises import hold, in_time
from tests.fuzz.supply import Supply

TIMING: Final = Timing(receive_deadline_ms=1_000, poll_interval_ms=100)
NUMBERS: Final = (0, 1, 2, 3, 2**31, 2**62, 10**19 - 1, 10**19)


def check(data: bytes) -> int:
    """Let a member read the records that the bytes describe; return their number."""
    return _Member(Supply(data)).run()


class _Member:
    """A member that reads the topic, with what the checks need."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._candidacy = Candidacy(TIMING, (f"own{number}" for number in count()))
        self._now_ms = 0.0
        self._offset = 0
        self._sent: dict[tuple[str, int], float] = {}
        self._heard_ms = -1e9
        """The time at which the newest beat was sent that was read in time."""
        self._others: set[int] = set()
        self._term: Term | None = None
        self._candidacy.gain(0.0)

    def run(self) -> int:
        records = 0
        while self._supply:
            self._now_ms += self._supply.byte() * 4
            events, beat = self._candidacy.tick(self._now_ms)
            self._judge(events, None)
            if beat is not None:
                self._sent[beat.leader_id, beat.number] = self._now_ms
            self._read(self._value())
            records += 1
        return records

    def _value(self) -> bytes | None:
        supply = self._supply
        match supply.byte() % 6:
            case 0 | 1:
                return self._own()
            case 2:
                return Beat("other", supply.choose(NUMBERS)).render()
            case 3:
                value = bytearray(self._own())
                at = supply.byte() % (len(value) + 1)
                value[at : at + supply.byte() % 3] = supply.take(supply.byte() % 5)
                return bytes(value)
            case 4:
                return None
            case _:
                return supply.take(supply.byte())

    def _own(self) -> bytes:
        if not self._sent:
            return b""
        name, number = list(self._sent)[-1 - self._supply.byte() % min(8, len(self._sent))]
        return Beat(name, number).render()

    def _read(self, value: bytes | None) -> None:
        self._offset += 1 + self._supply.byte() % 3
        offset = self._offset
        beat = in_time("reading a beat", lambda: Beat.parse(value))
        if beat is None:
            return
        hold(beat.leader_id and 0 <= beat.number < 10**19, "a beat has an id and a number", beat)
        hold(Beat.parse(beat.render()) == beat, "a beat can be written again", value, beat)
        events = in_time("taking a beat", lambda: self._candidacy.receive(beat, offset, self._now_ms))
        sent_ms = self._sent.get((beat.leader_id, beat.number))
        if sent_ms is None:
            self._others.add(offset)
            hold(not any(isinstance(event, TermStarted) for event in events), "no term begins by another's beat", value)
        self._judge(events, offset)
        term = self._candidacy.term
        if sent_ms is not None and term is not None and beat.leader_id == term.leader_id:
            self._heard_ms = max(self._heard_ms, sent_ms)
        for fence in (offset, 2**60):
            if self._candidacy.may_have_successor(fence):
                hold(term is not None and term.fence < fence, "a successor comes after the own term", fence, term)
                hold(beat.leader_id != (term and term.leader_id), "no member succeeds itself", beat)

    def _judge(self, events: list[TermStarted | TermEnded], offset: int | None) -> None:
        for event in events:
            if isinstance(event, TermStarted):
                hold(event.term.fence == offset, "a term's fence is where its beat lies", event, offset)
                self._term, self._heard_ms = event.term, -1e9
            else:
                hold(event.term == self._term, "the term ends that had begun", event, self._term)
                is_late = self._now_ms >= self._heard_ms + TIMING.receive_deadline_ms
                hold(is_late, "no record of another ends a term", event, self._now_ms, self._heard_ms)
                self._term = None
