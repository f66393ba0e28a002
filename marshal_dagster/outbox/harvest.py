"""The steps of a harvesting session, over the protocols of `interfaces`: no database, no Kafka.

A session starts in three steps:

1. It starts in the database, which refuses earlier sessions from then on.
2. It starts in Kafka, which aborts the open transactions of earlier sessions.
3. It reads from Kafka which batch was published last, and deletes the rows of that batch from the database.

After a refusal a session initialises its Kafka transaction again. Before it commits a batch after that, and after a
hundred refusals, it checks in the database that it is still current. A newer session has therefore aborted each
transaction that an older one could still commit, so no row is published twice. A single refusal costs no transaction of
the database.

Each batch is deleted before the next one is published. So at most one batch is in doubt at any time, and the newest
note in Kafka shows whether it was published.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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

_MOST_RESTARTS: Final = 100
"""Each restart fences a newer session, so one that was superseded must notice it soon."""


@dataclass(slots=True)
class HarvestCounts:
    """Counts of a harvester process since its start."""

    published: int = 0
    """Published rows that it deleted. This includes rows that an earlier session had published but not deleted."""
    parked: int = 0
    """Rows that it set aside."""
    refused: int = 0
    """Refusals of rows and topics."""
    sessions: int = 0
    """Sessions that it started."""


class LeadershipLostError(Exception):
    """This process no longer leads, so it publishes nothing more."""


class Harvest:
    """One harvesting session. Not thread-safe."""

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
        """Configure the session; it starts with `begin`.

        Args:
            store: The outbox's rows.
            publisher: The Kafka side.
            limits: The limits of a batch and of retries.
            counts: The counts of this process, which the session increases.
            now_ms: A monotonic clock in milliseconds.
            leads: Returns whether this process still leads. It is called before each batch.
        """
        self._store = store
        self._publisher = publisher
        self._limits = limits
        self._counts = counts
        self._leads = leads
        self._holds = RefusalBackoff(limits, now_ms)
        self._session = 0
        self._done = PublishedBatch()
        self._parked: list[Parked] = []
        self._restarts = 0
        """How often the publisher was started again since the database last confirmed that this session is current."""

    def begin(self) -> None:
        """Start the session. Raises `PublisherFencedError`, `UnavailableError`."""
        self._session = self._store.begin()
        self._publisher.begin()
        self._done = self._publisher.noted()
        self._counts.sessions += 1

    def turn(self) -> int:
        """Delete the published rows, then take and publish the next rows.

        Returns the number of rows that were taken. If it is below `max_in_flight_records`, no more rows are ready.

        Raises `LeadershipLostError`, `SessionSupersededError`, `PublisherFencedError`, `BatchUnsettledError`,
        `UnavailableError`. The session has ended then.
        """
        self._holds.begin_turn()
        rows = self._turn(self._limits.max_in_flight_records)
        if rows:
            self._check_topics(rows)
            self._publish(rows)
        return len(rows)

    def finish(self) -> None:
        """Delete the published rows, so that the next session has nothing to check. Raises the errors of `turn`."""
        if self._done.ranges or self._parked:
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
        self._done, self._parked, self._restarts = PublishedBatch(), [], 0
        return turned.rows

    def _check_topics(self, rows: Sequence[Row]) -> None:
        """Check which topics cannot be written to, so that no batch waits for one of them."""
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
        """Publish the rows that do not wait after a refusal.

        If a batch is refused and the error does not name the row, it is split in halves until a single row is left.
        """
        batches = deque([rows])
        while batches:
            batch = self._holds.open_rows(batches.popleft())
            if not batch:
                continue
            if not self._leads():
                raise LeadershipLostError
            if self._restarts >= _MOST_RESTARTS:
                self._turn(0)
            try:
                self._publisher.publish(batch, self._settle)
            except RowRejectedError as refused:
                self._restarts += 1
                batches.extendleft(reversed(self._without(batch, refused)))
            except TopicRejectedError as refused:
                self._restarts += 1
                self._counts.refused += 1
                self._holds.refuse_topic(refused.topic, refused.reason)
                batches.appendleft(batch)
            else:
                self._done = PublishedBatch.of(batch)
                self._holds.accept(batch)

    def _settle(self) -> None:
        """Delete what was published before, and check the session, before the next batch is committed."""
        if self._done.ranges or self._parked or self._restarts:
            # A row is set aside before later rows of its key are published.
            self._turn(0)

    def _without(self, batch: Sequence[Row], refused: RowRejectedError) -> list[Sequence[Row]]:
        """Return the batches to try next after a batch was refused."""
        named = batch[0] if len(batch) == 1 else next((row for row in batch if row.id == refused.row), None)
        if named is None:
            middle = len(batch) // 2
            return [batch[:middle], batch[middle:]]
        self._counts.refused += 1
        parked = self._holds.refuse(named, refused.reason)
        if parked is not None:
            self._parked.append(parked)
        return [[row for row in batch if row is not named]]
