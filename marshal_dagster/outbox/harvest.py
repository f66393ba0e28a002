"""From the outbox's rows to Kafka: the steps, over the ports.

A session begins in the database, which refuses earlier ones from then on; then at Kafka's end, which ends what earlier
sessions have under way there; then it asks Kafka which batch was the last to be published, and strikes its rows.

A session may begin anew at Kafka's end, after a refusal; it publishes there only once the database has said, since it
last began there, that it goes on. So whatever an earlier session began at Kafka's end before it was told so lies before
the beginning of a later one there, which ends it: rows that a session takes are in no transaction of another that could
still take effect. Each batch is struck before the next one is published; all that is in doubt at any time is one batch,
of which Kafka's note tells.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marshal_dagster.outbox.backoff import HarvestLimits, RefusalBackoff
from marshal_dagster.outbox.interfaces import (
    BatchTransaction,
    Parked,
    PublishedBatch,
    Publisher,
    Row,
    RowRejectedError,
    Store,
    TopicRejectedError,
)


@dataclass(slots=True)
class HarvestCounts:
    """What a process has done since it started."""

    published: int = 0
    """Rows that it has struck: its own, and those that the note says a session before it has published."""
    parked: int = 0
    refused: int = 0
    sessions: int = 0


class LeadershipLostError(Exception):
    """This process does not lead any more: it publishes nothing more."""


class Harvest:
    """One session of harvesting; for one thread."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        *,
        limits: HarvestLimits,
        counts: HarvestCounts,
        now_ms: Callable[[], float],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Do nothing yet; `leads` is asked before each batch, `now_ms` is a clock that never jumps."""
        self._store = store
        self._publisher = publisher
        self._limits = limits
        self._counts = counts
        self._leads = leads
        self._holds = RefusalBackoff(limits, now_ms)
        self._session = 0
        self._done = PublishedBatch()
        self._parked: list[Parked] = []
        self._is_checking = False
        """Whether the publisher has begun anew since the database was asked whether this session goes on."""

    def begin(self) -> None:
        """Begin the session. Raises `Fenced`, `UnavailableError`."""
        self._session = self._store.begin()
        self._publisher.begin()
        self._done = self._publisher.noted()
        self._counts.sessions += 1

    def turn(self) -> int:
        """Strike what is published, take the next rows and publish them; give how many were taken.

        With 0, or fewer than `max_in_flight_records`, it can wait for more. Raises `LeadershipLostError`, `Deposed`,
        `Fenced`, `Unsettled`, `UnavailableError`: the session is over then.
        """
        self._holds.begin_turn()
        rows = self._turn(self._limits.max_in_flight_records)
        if rows:
            self._check_topics(rows)
            self._publish(rows)
        return len(rows)

    def finish(self) -> None:
        """Strike what is published, so that who comes next has nothing to find out. Raises as `turn`."""
        if self._done.rows or self._parked:
            self._turn(0)

    def _turn(self, limit: int) -> list[Row]:
        turn = BatchTransaction(
            self._done,
            self._parked,
            limit,
            self._limits.max_in_flight_bytes,
            held_lanes=self._holds.lanes(),
            held_topics=self._holds.topics(),
        )
        turned = self._store.turn(self._session, turn)
        self._counts.published += turned.struck
        self._counts.parked += turned.parked
        if turned.parked < len(self._parked):
            self._holds.reset_topic_waits()
        self._done, self._parked, self._is_checking = PublishedBatch(), [], False
        return turned.rows

    def _check_topics(self, rows: Sequence[Row]) -> None:
        """Find out which topics cannot be written to, before a batch waits for one of them."""
        unsure = [topic for topic in dict.fromkeys(row.topic for row in rows) if not self._holds.is_checked(topic)]
        refused = self._publisher.refused(unsure)
        for topic in unsure:
            if topic not in refused:
                self._holds.accept_topic(topic)
        for topic, reason in refused.items():
            self._counts.refused += 1
            self._holds.refuse_topic(topic, reason)
        self._parked += self._holds.to_park(rows)

    def _publish(self, rows: Sequence[Row]) -> None:
        """Publish what is not held; a batch that is refused without naming a row is halved until it names one."""
        batches = deque([rows])
        while batches:
            batch = [row for row in batches.popleft() if self._holds.is_open(row)]
            if not batch:
                continue
            if not self._leads():
                raise LeadershipLostError
            if self._done.rows or self._parked or self._is_checking:
                # What comes after a row that is set aside must not get ahead of that.
                self._turn(0)
            try:
                self._publisher.publish(batch)
            except RowRejectedError as refused:
                self._is_checking = True
                batches.extendleft(reversed(self._without(batch, refused)))
            except TopicRejectedError as refused:
                self._is_checking = True
                self._counts.refused += 1
                self._holds.refuse_topic(refused.topic, refused.reason)
                batches.appendleft(batch)
            else:
                self._done = PublishedBatch.of(batch)
                self._holds.accept(batch)

    def _without(self, batch: Sequence[Row], refused: RowRejectedError) -> list[Sequence[Row]]:
        """Give what is to be tried of a refused batch."""
        named = batch[0] if len(batch) == 1 else next((row for row in batch if row.id == refused.row), None)
        if named is None:
            middle = len(batch) // 2
            return [batch[:middle], batch[middle:]]
        self._counts.refused += 1
        parked = self._holds.refuse(named, refused.reason)
        if parked is not None:
            self._parked.append(parked)
        return [[row for row in batch if row is not named]]
