"""Judges the published records, the tables and the beliefs of members; it shares no code with the library."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

Lane = tuple[str, bytes | int]
MOST_IDLE_TURNS: Final = 3


@dataclass(eq=False, slots=True)
class Story:
    """The history of a row: the steps at which its transaction began and was committed, and its present state."""

    number: int
    id: int
    topic: str
    key: bytes | None
    writing: int
    begun: int
    """The step at which its transaction began."""
    committed: float = inf
    published: int = 0
    is_struck: bool = False
    is_parked: bool = False
    was_put_back: bool = False
    is_refused: bool = False
    is_removed: bool = False
    """Whether an operator has deleted the row. It may have been published before, but need not be."""

    def is_before(self, other: "Story") -> bool:
        """Return whether the writer of `other` could know this row."""
        if self.writing == other.writing:
            return self.number < other.number
        return self.committed < other.begun


@dataclass(slots=True)
class Judge:
    """Sees each commit in the database and in Kafka when it happens, and the beliefs of members."""

    fail: Callable[[str, str], None]
    stories: dict[int, Story] = field(default_factory=dict)
    """The rows by number, because an id may be used again."""
    lanes: defaultdict[Lane, list[Story]] = field(default_factory=lambda: defaultdict(list))
    """The published rows by topic and key."""
    session: int = 0
    """The last session that started in the database."""
    sessions: dict[str, int] = field(default_factory=dict)
    """The last session of each process."""
    refused_topics: set[str] = field(default_factory=set)
    """Topics that were missing at some time."""
    may_repeat: bool = False
    """Whether the notes were lost."""
    elected: dict[str, int] = field(default_factory=dict)
    """The fence of each term, by the term's id."""
    fences: dict[int, str] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    """The highest fence of each process."""
    sent_ms: dict[bytes, float] = field(default_factory=dict)
    """The time at which a beat was first sent."""
    heard_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    """By process and leader id: the time at which the newest beat that it has received was sent."""
    idle_turns: Counter[str] = field(default_factory=Counter)
    """How often each process has taken rows since it last tried to publish or park any."""
    ended: set[str] = field(default_factory=set)
    """The ids of terms that were given up or have ended."""

    def inserted(self, story: Story) -> None:
        """Record a row that was inserted but not committed."""
        self.stories[story.number] = story

    def published(self, row_id: int, topic: str, key: bytes | None, number: int) -> None:
        """Judge a record that has become visible to read_committed consumers; its value is its number."""
        story = self.stories.get(number)
        if story is None or (row_id, topic, key) != (story.id, story.topic, story.key):
            self.fail("records are the rows as they were written", f"row {row_id} as {number} in {topic}")
            return
        if story.committed == inf:
            self.fail("nothing is published that was not committed", f"row {row_id}")
        if story.is_parked:
            self.fail("a row that is set aside is not published", f"row {row_id}")
        story.published += 1
        if story.published > 1:
            if not self.may_repeat:
                self.fail("nothing is published twice", f"row {row_id}")
            return
        lane = self.lanes[topic, number if key is None else key]
        if not story.was_put_back:
            for other in lane:
                if story.is_before(other):
                    self.fail("rows of a key keep their order", f"row {row_id} came after {other.id}")
        lane.append(story)

    def begun(self, process: str, session: int) -> None:
        """Record a session that has started in the database."""
        if session <= self.session:
            self.fail("sessions rise", f"{session} after {self.session}")
        self.session = self.sessions[process] = session

    def struck(self, process: str, struck: list[int], parked: list[int]) -> None:
        """Judge the rows that a turn has deleted and parked."""
        own = self.sessions.get(process, 0)
        if own != self.session:
            self.fail("one session strikes at a time", f"{process} in session {own}, the last is {self.session}")
        for number in struck:
            story = self.stories[number]
            story.is_struck = True
            if not story.published:
                self.fail("a row is struck once it is published", f"row {story.id}")
        if parked:
            self.tried(process)
        for number in parked:
            story = self.stories[number]
            story.is_parked = True
            if not story.is_refused and story.topic not in self.refused_topics:
                self.fail("a row is set aside once it was refused", f"row {story.id}")
            if story.published and not self.may_repeat:
                self.fail("a row is set aside or published", f"row {story.id} is both")

    def refused(self, number: int) -> None:
        """Record a row that the brokers or the client rejected."""
        self.stories[number].is_refused = True

    def removed(self, numbers: list[int]) -> None:
        """Record rows that an operator has deleted."""
        for number in numbers:
            self.stories[number].is_removed = True

    def took(self, process: str) -> None:
        """Judge that a process does not take rows again and again without trying to publish them."""
        self.idle_turns[process] += 1
        if self.idle_turns[process] > MOST_IDLE_TURNS:
            self.fail("who can publish nothing waits", f"{process} takes rows again and again")

    def tried(self, process: str) -> None:
        """Record that a process has sent a request to the brokers."""
        self.idle_turns[process] = 0

    def put_back(self, number: int) -> None:
        """Record a row that an operator has put back."""
        self.stories[number].is_parked = False
        self.stories[number].was_put_back = True

    def beat_sent(self, value: bytes, now_ms: float) -> None:
        """Record a beat that was sent."""
        self.sent_ms.setdefault(value, now_ms)

    def heartbeat_received(self, process: str, value: bytes) -> None:
        """Record a beat that was received."""
        place = (process, value.split(b"/")[1].decode())
        self.heard_ms[place] = max(self.heard_ms.get(place, -inf), self.sent_ms[value])

    def term_begun(self, process: str, leader_id: str, fence: int, beat: bytes) -> None:
        """Judge a term that starts; `beat` is the record at its fence."""
        if leader_id in self.elected:
            self.fail("the id of a term is new", f"{process}'s")
        if fence in self.fences:
            self.fail("no two terms have the same fence", f"{fence}")
        if fence <= self.highest.get(process, -1):
            self.fail("fences rise", f"{process}: {fence} after {self.highest[process]}")
        if beat.split(b"/")[1].decode() != leader_id:
            self.fail("a term begins with a beat of its own", f"{process} at {fence}")
        self.elected[leader_id] = fence
        self.fences[fence] = leader_id
        self.highest[process] = max(fence, self.highest.get(process, -1))

    def term_ended(self, leader_id: str) -> None:
        """Record the end of a term."""
        self.ended.add(leader_id)

    def believed(self, process: str, leader_id: str, now_ms: float, deadline_ms: float, *, has_partition: bool) -> None:
        """Judge a process that believes that it is the leader."""
        if not has_partition:
            self.fail("who knows that the partition is gone leads no more", process)
        if leader_id in self.ended:
            self.fail("a term that has ended is over", f"{process} leads on")
        heard_ms = self.heard_ms.get((process, leader_id), -inf)
        if now_ms >= heard_ms + deadline_ms:
            text = f"{process} leads at {now_ms:.3f} ms, its last beat heard was sent at {heard_ms:.3f}"
            self.fail("who leads has heard a beat that was sent within the deadline", text)

    def at_the_end(self, now_ms: float) -> None:
        """Judge that every row is published, parked or removed."""
        promise = "every row is published and struck, or set aside, in time"
        stories = [story for story in self.stories.values() if not story.is_removed]
        done = [story for story in stories if story.is_struck or story.is_parked]
        left = [story.id for story in stories if story.committed < inf and story not in done]
        if left:
            self.fail(promise, f"rows {left} are not at {now_ms:.0f} ms")
        lost = [story.id for story in done if not story.published and not story.is_parked]
        if lost:
            self.fail("every row is published or set aside", f"rows {lost} are neither")
