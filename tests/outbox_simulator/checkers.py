"""The judge of what consumers, the tables and the members' beliefs come to; it shares no code with the library."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

Lane = tuple[str, bytes | int]
MOST_IDLE_TURNS: Final = 3


@dataclass(eq=False, slots=True)
class Story:
    """What became of a row that was written: the steps, which rise, at which it was inserted and became visible."""

    number: int
    id: int
    topic: str
    key: bytes | None
    writing: int
    begun: int
    """When its transaction began."""
    committed: float = inf
    published: int = 0
    is_struck: bool = False
    is_parked: bool = False
    was_put_back: bool = False
    is_refused: bool = False
    is_removed: bool = False
    """Whether an operator has deleted the row: it may have been published before, but need not be."""

    def is_before(self, other: "Story") -> bool:
        """Tell whether who wrote `other` could know of this row."""
        if self.writing == other.writing:
            return self.number < other.number
        return self.committed < other.begun


@dataclass(slots=True)
class Judge:
    """Sees what is committed at either end, as it is committed, and what members believe."""

    fail: Callable[[str, str], None]
    stories: dict[int, Story] = field(default_factory=dict)
    """By number: an id may be given again."""
    lanes: defaultdict[Lane, list[Story]] = field(default_factory=lambda: defaultdict(list))
    """What was published, by topic and key."""
    session: int = 0
    """The last one that has begun in the database."""
    sessions: dict[str, int] = field(default_factory=dict)
    """The last one of each process."""
    refused_topics: set[str] = field(default_factory=set)
    """Topics that were missing once."""
    may_repeat: bool = False
    """Whether the notes were lost."""
    elected: dict[str, int] = field(default_factory=dict)
    """Fences, by the ids of terms."""
    fences: dict[int, str] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    """The largest fence of each process."""
    sent_ms: dict[bytes, float] = field(default_factory=dict)
    """When a beat was first sent."""
    heard_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    """By process and leader id: when the newest of the beats that it has heard was sent."""
    idle_turns: Counter[str] = field(default_factory=Counter)
    """How often each process has taken rows since it last tried anything with them."""
    ended: set[str] = field(default_factory=set)
    """Ids of terms that were given up, or have ended."""

    def inserted(self, story: Story) -> None:
        """Take note of a row that was written, of which nothing is visible yet."""
        self.stories[story.number] = story

    def published(self, row_id: int, topic: str, key: bytes | None, number: int) -> None:
        """Judge a record that has become visible to consumers that read what is committed; its value is its number."""
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
        """Take note of a session that has begun in the database."""
        if session <= self.session:
            self.fail("sessions rise", f"{session} after {self.session}")
        self.session = self.sessions[process] = session

    def struck(self, process: str, struck: list[int], parked: list[int]) -> None:
        """Judge what a turn has deleted and set aside."""
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
        """Take note of a row that the brokers or the client did not take."""
        self.stories[number].is_refused = True

    def removed(self, numbers: list[int]) -> None:
        """Record rows that an operator has deleted."""
        for number in numbers:
            self.stories[number].is_removed = True

    def took(self, process: str) -> None:
        """Judge that rows are taken for something to be done with them."""
        self.idle_turns[process] += 1
        if self.idle_turns[process] > MOST_IDLE_TURNS:
            self.fail("who can publish nothing waits", f"{process} takes rows again and again")

    def tried(self, process: str) -> None:
        """Take note that a process has asked something of the brokers."""
        self.idle_turns[process] = 0

    def put_back(self, number: int) -> None:
        """Take note of a row that a person has put back."""
        self.stories[number].is_parked = False
        self.stories[number].was_put_back = True

    def beat_sent(self, value: bytes, now_ms: float) -> None:
        """Take note of a beat on its way."""
        self.sent_ms.setdefault(value, now_ms)

    def heartbeat_received(self, process: str, value: bytes) -> None:
        """Take note of a beat that was read."""
        place = (process, value.split(b"/")[1].decode())
        self.heard_ms[place] = max(self.heard_ms.get(place, -inf), self.sent_ms[value])

    def term_begun(self, process: str, leader_id: str, fence: int, beat: bytes) -> None:
        """Judge a term that begins; `beat` is what lies at its fence."""
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
        """Take note of the end of a term."""
        self.ended.add(leader_id)

    def believed(self, process: str, leader_id: str, now_ms: float, deadline_ms: float, *, has_partition: bool) -> None:
        """Judge a process that takes itself for the leader."""
        if not has_partition:
            self.fail("who knows that the partition is gone leads no more", process)
        if leader_id in self.ended:
            self.fail("a term that has ended is over", f"{process} leads on")
        heard_ms = self.heard_ms.get((process, leader_id), -inf)
        if now_ms >= heard_ms + deadline_ms:
            text = f"{process} leads at {now_ms:.3f} ms, its last beat heard was sent at {heard_ms:.3f}"
            self.fail("who leads has heard a beat that was sent within the deadline", text)

    def at_the_end(self, now_ms: float) -> None:
        """Judge that nothing is left over."""
        promise = "every row is published and struck, or set aside, in time"
        stories = [story for story in self.stories.values() if not story.is_removed]
        done = [story for story in stories if story.is_struck or story.is_parked]
        left = [story.id for story in stories if story.committed < inf and story not in done]
        if left:
            self.fail(promise, f"rows {left} are not at {now_ms:.0f} ms")
        lost = [story.id for story in done if not story.published and not story.is_parked]
        if lost:
            self.fail("every row is published or set aside", f"rows {lost} are neither")
