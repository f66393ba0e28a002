"""Waits after Kafka refused a row or topic: which keys and topics wait, how long, and when a row is set aside."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.interfaces import OrderingKey, Parked, Row, RowRange

MOST_IN_FLIGHT_RECORDS: Final = 1_000_000
_FIRST_WAIT_MS: Final = 200.0
_LONGEST_WAIT_MS: Final = 5_000.0


@dataclass(frozen=True, slots=True)
class HarvestLimits:
    """The limits of a batch, and of the attempts to publish a row.

    Raises:
        ConfigurationError: A limit is out of range.

    Example:
        ```python
        limits = HarvestLimits(max_in_flight_records=5_000, max_attempts=10)
        harvester = Harvester(tables, connection, HarvesterOptions(limits=limits))
        ```
    """

    max_in_flight_records: int = 5_000
    """The largest number of rows in a batch (1 to 1,000,000)."""
    max_in_flight_bytes: int = 16_000_000
    """The largest size of a batch in bytes: keys, values and headers together. A larger row is a batch of its own."""
    max_attempts: int = 5
    """The number of attempts to publish a row before it is set aside."""
    topic_patience_s: float = 30.0
    """The shortest time, in seconds, to wait for a topic that cannot be written to before its rows are set aside.

    A topic that is being created needs this time.
    """

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` if a limit is out of range."""
        for name in ("max_in_flight_records", "max_in_flight_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_in_flight_records > MOST_IN_FLIGHT_RECORDS:
            raise ConfigurationError(
                f"max_in_flight_records is {self.max_in_flight_records}; it must be from 1 to {MOST_IN_FLIGHT_RECORDS}"
            )
        if not 0 <= self.topic_patience_s < math.inf:
            raise ConfigurationError(f"topic_patience_s is {self.topic_patience_s}; it must be 0 or more")


@dataclass(slots=True)
class _Refusal:
    tries: int
    since_ms: float
    until_ms: float
    reason: str
    is_given_up: bool = False
    """Only for a topic: whether its rows are set aside. This is decided when the topic is refused, not later."""


class RefusalBackoff:
    """The refusals of one session, with their waits. Not thread-safe.

    Waits end only when a turn of the harvest (`Harvest.turn`) begins. A key that waits at the beginning of a turn, or
    is refused during it, waits until the next turn. So a row never overtakes an earlier row of its key within a turn.
    """

    def __init__(self, limits: HarvestLimits, now_ms: Callable[[], float]) -> None:
        """Start without refusals; `now_ms` is a monotonic clock in milliseconds."""
        self._max_attempts = limits.max_attempts
        self._topic_patience_ms = limits.topic_patience_s * 1_000
        self._now_ms = now_ms
        self._turn_ms = now_ms()
        self._lanes: dict[OrderingKey, _Refusal] = {}
        self._topics: dict[str, _Refusal] = {}

    def begin_turn(self) -> None:
        """Begin a turn: rows whose wait is over may be published in it."""
        self._turn_ms = self._now_ms()

    def lanes(self) -> list[OrderingKey]:
        """Return the ordering keys that wait."""
        return [lane for lane, hold in self._lanes.items() if hold.until_ms > self._turn_ms]

    def topics(self) -> list[str]:
        """Return the topics that wait, without those whose rows are being set aside."""
        return [topic for topic, hold in self._topics.items() if hold.until_ms > self._turn_ms and not hold.is_given_up]

    def open_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that may be published in this turn."""
        if not self._lanes and not self._topics:
            return rows
        return [row for row in rows if self._is_open(row)]

    def _is_open(self, row: Row) -> bool:
        holds = (self._lanes.get(OrderingKey.of(row)), self._topics.get(row.topic))
        return all(hold is None or hold.until_ms <= self._turn_ms for hold in holds)

    def refuse(self, row: Row, reason: str) -> Parked | None:
        """Count a refusal of a row; return the row if it must be set aside now, so that its key no longer waits."""
        lane = OrderingKey.of(row)
        hold = self._again(self._lanes.get(lane), reason)
        if hold.tries < self._max_attempts:
            self._lanes[lane] = hold
            return None
        self._lanes.pop(lane, None)
        return Parked(RowRange.of(row), f"{reason} (tried {hold.tries} times)")

    def refuse_topic(self, topic: str, reason: str) -> None:
        """Count a refusal of a topic that cannot be written to."""
        hold = self._again(self._topics.get(topic), reason)
        waited_ms = self._now_ms() - hold.since_ms
        hold.is_given_up = hold.tries >= self._max_attempts and waited_ms >= self._topic_patience_ms
        self._topics[topic] = hold

    def accept_topic(self, topic: str) -> None:
        """Forget the refusals of a topic that can be written to."""
        self._topics.pop(topic, None)

    def is_checked(self, topic: str) -> bool:
        """Return whether a topic was refused so recently that it is not checked again in this turn."""
        hold = self._topics.get(topic)
        return hold is not None and hold.until_ms > self._turn_ms

    def to_park(self, rows: Sequence[Row]) -> list[Parked]:
        """Return the rows that must be set aside because their topic was refused too often."""
        return [
            Parked(RowRange.of(row), f"{hold.reason} (tried {hold.tries} times)")
            for row in rows
            if (hold := self._topics.get(row.topic)) is not None and hold.is_given_up
        ]

    def reset_topic_waits(self) -> None:
        """Check topics again before more of their rows are set aside, because some rows could not be."""
        for hold in self._topics.values():
            hold.is_given_up = False

    def accept(self, rows: Sequence[Row]) -> None:
        """Forget the refusals of rows that were published."""
        if self._lanes:
            for row in rows:
                self._lanes.pop(OrderingKey.of(row), None)

    def _again(self, before: _Refusal | None, reason: str) -> _Refusal:
        tries, now_ms = 1 if before is None else before.tries + 1, self._now_ms()
        wait_ms = min(_LONGEST_WAIT_MS, _FIRST_WAIT_MS * 2 ** (min(tries, 20) - 1))
        return _Refusal(tries, now_ms if before is None else before.since_ms, now_ms + wait_ms, reason)
