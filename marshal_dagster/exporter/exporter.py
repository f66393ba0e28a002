"""The exporter: reads the coordination log at its own interval, and renders the metrics once for all scrapes."""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.admin.pause import group_names, topic_names, unknown_group
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import CoordinationLogChangedError, MarshalError
from marshal_dagster.exporter import definitions as names
from marshal_dagster.exporter.definitions import Samples
from marshal_dagster.exporter.group_metrics import ExportOptions, GroupView, data_topics, oldest_unread
from marshal_dagster.exporter.lag_times import SEED_AGES_S, LagTimes
from marshal_dagster.exporter.topic_reader import ExportedTopic, TopicReader
from marshal_dagster.protocol.world import World

DEFAULT_INTERVAL_S: Final = 15.0
FAILING_AFTER_S: Final = 60.0
"""The exporter is not ready if its reads have failed for longer."""
LIVE_WITHIN_S: Final = 600.0
"""The exporter is not live if one refresh takes longer; the first one reads the whole log or a snapshot."""
_SEED_AGAIN_S: Final = 600.0
_HALVINGS: Final = 3
"""After these, the ages between which a record was written differ by a factor of 2 ** (1 / 8), less than 10 %."""
_SEED_AFTER_FAILURE_S: Final = 60.0
_MS: Final = 1_000

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Status:
    """What the last refreshes did; times are in unix seconds or in seconds of the monotonic clock (`_at_s`)."""

    read_at_unix_s: float = 0.0
    took_s: float = 0.0
    failures: int = 0
    failure: MarshalError | None = None
    failing_from_s: float | None = None
    alive_at_s: float = field(default_factory=time.monotonic)


class Exporter:
    """Reads the coordination log again and again, and renders the state of its groups. It never writes.

    One thread calls `run`; any thread may call `render`, `health` and `stop`.

    Example:
        ```python
        exporter = Exporter(lambda: open_rationalizer(connection, "__marshal"), TopicReader(topics))
        with HealthServer(exporter.health, port=9400, metrics=exporter.render):
            exporter.run()
        ```
    """

    def __init__(
        self,
        open_log: Callable[[], Rationalizer],
        topics: TopicReader,
        options: ExportOptions | None = None,
        *,
        interval_s: float = DEFAULT_INTERVAL_S,
        clock: Clock | None = None,
    ) -> None:
        """Configure the exporter; it connects in `run`.

        Args:
            open_log: Opens a reader of the coordination log; called again if the log was deleted and re-created.
            topics: Looks up the data topics.
            options: What to serve; by default everything.
            interval_s: The time from the start of one refresh to the start of the next, in seconds.
            clock: The clock by which heartbeats, pauses and unread records are judged.
        """
        self._open_log, self._topics = open_log, topics
        self._options = options or ExportOptions()
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._stop = threading.Event()
        self._log: Rationalizer | None = None
        self._times = LagTimes()
        self._seeded_at_s: dict[str, float] = {}
        self._rendered = b""
        self._records_before = 0
        """The records that readers before the present one have read."""
        self.status = _Status()

    def stop(self) -> None:
        """Make `run` end after the present refresh."""
        self._stop.set()

    def run(self) -> None:
        """Refresh at each interval until `stop` is called; after a failure within `DEFAULT_INTERVAL_S`.

        Errors are raised only by the first read. Later ones are logged and retried, and `health` reports them.

        Raises:
            MarshalError: The coordination log cannot be opened or read at the start.
        """
        try:
            self._refresh_or_raise()
            while not self._stop.wait(self._wait_s):
                self.refresh()
        finally:
            self._close_log()

    def refresh(self) -> None:
        """Read to the log's end and render the metrics; an error is logged once and kept for `health`."""
        try:
            self._refresh_or_raise()
        except MarshalError as error:
            if str(error) != str(self.status.failure):
                logger.warning("exporter: %s", error)
            self.status.failures += 1
            self.status.failure = error
            self.status.failing_from_s = self.status.failing_from_s or time.monotonic()
            if isinstance(error, CoordinationLogChangedError):
                self._close_log()

    def health(self) -> dict[str, Any]:
        """Return the state of the exporter, for probes.

        Returns:
            A report of JSON values. `live` is false if a refresh hangs. `ready` and `healthy` are false until the first
            read, if reads have failed for a minute, and while `render` has no values of groups. `failure` is the text
            of the present failure, or None. `failing_s` is how long it has failed, and `read_age_s` the age of the last
            successful read (None before the first), in seconds.
        """
        status, now_s = self.status, time.monotonic()
        failing_s = 0.0 if status.failing_from_s is None else now_s - status.failing_from_s
        is_live = now_s - status.alive_at_s <= LIVE_WITHIN_S + self._interval_s
        is_ready = is_live and self._is_fresh and failing_s <= FAILING_AFTER_S
        return {
            "healthy": is_ready,
            "live": is_live,
            "ready": is_ready,
            "failure": None if status.failure is None else str(status.failure),
            "failing_s": round(failing_s, 3),
            "read_age_s": round(self._now_s - status.read_at_unix_s, 3) if status.read_at_unix_s else None,
        }

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format: those of the last read, and of the exporter itself.

        Without a new read, the values of groups stay for a minute or three intervals, and then vanish.

        Raises:
            ConfigurationError: The extra `prometheus` is not installed.
        """
        require_extra(Extra.PROMETHEUS, "/metrics")
        status = self.status
        own = Samples()
        own.add(names.EXPORTER_UP, int(self._is_fresh and status.failure is None))
        own.add(names.EXPORTER_LAST_READ, status.read_at_unix_s)
        own.add(names.EXPORTER_REFRESH_S, status.took_s)
        own.add(names.EXPORTER_FAILURES, status.failures)
        own.add(names.EXPORTER_RECORDS, self._records_read)
        return own.render() + _process_metrics() + (self._rendered if self._is_fresh else b"")

    @property
    def _is_fresh(self) -> bool:
        """Whether values are served. They stay at least until another refresh of the same length has ended."""
        status = self.status
        fresh_for_s = max(FAILING_AFTER_S, 3 * self._interval_s) + 2 * status.took_s
        return status.read_at_unix_s > 0 and self._now_s - status.read_at_unix_s <= fresh_for_s

    @property
    def _wait_s(self) -> float:
        if self.status.failure is not None:
            return min(self._interval_s, DEFAULT_INTERVAL_S)
        return max(0.0, self._interval_s - self.status.took_s)

    @property
    def _now_s(self) -> float:
        return self._clock.wall_ms() / _MS

    @property
    def _records_read(self) -> int:
        return self._records_before + (0 if self._log is None else self._log.records_read)

    def _refresh_or_raise(self) -> None:
        began_s = self.status.alive_at_s = time.monotonic()
        if self._log is None:
            self._log = self._open_log()
        world = self._log.catch_up()
        if not self.status.read_at_unix_s:
            self._warn_of_unknown_names(world)
        at_ms = self._clock.wall_ms()
        at_s = at_ms / _MS
        data = self._topics.read(data_topics(world, self._options), at_s)
        for topic, found in data.items():
            if found is not None:
                self._note_ends(topic, found, oldest_unread(world, topic, found, self._options), at_s)
        self._times.keep_topics(data)
        self._rendered = GroupView(world, data, self._times, at_ms, self._options).samples().render()
        status = self.status
        status.read_at_unix_s, status.failure, status.failing_from_s = at_s, None, None
        status.alive_at_s = time.monotonic()
        status.took_s = status.alive_at_s - began_s

    def _warn_of_unknown_names(self, world: World) -> None:
        """Warn of each group and topic that is to be served and that the log does not have: its alerts cannot fire."""
        topics = topic_names(world) if self._options.topics else set()
        unknown = [unknown_group(world, name) for name in sorted(set(self._options.groups) - set(group_names(world)))]
        unknown += [f"the log has no topic {name!r}" for name in sorted(set(self._options.topics) - topics)]
        for text in unknown:
            logger.warning("exporter: %s. There are no metrics of it until a member claims", text)

    def _note_ends(self, topic: str, found: ExportedTopic, oldest: dict[int, int], at_s: float) -> None:
        for partition, at in found.bounds.items():
            self._times.of(topic, partition).note(at.end, at_s)
        unknown = {number: first for number, first in oldest.items() if not self._times.of(topic, number).knows(first)}
        if unknown and at_s - self._seeded_at_s.get(topic, float("-inf")) >= _SEED_AGAIN_S:
            self._seeded_at_s[topic] = at_s
            self._seed(topic, unknown, found, at_s)
        for partition, at in found.bounds.items():
            self._times.of(topic, partition).forget_before(oldest.get(partition, at.end))

    def _seed(self, topic: str, unread: Mapping[int, int], found: ExportedTopic, at_s: float) -> None:
        """Ask Kafka for the offsets of times in the past, until each partition has one before its unread records.

        The first ages double, and those between which the oldest unread record was written are then halved.

        Args:
            topic: The data topic.
            unread: The first unread offset of each partition that lags further than what was seen.
            found: The topic's present offsets.
            at_s: The present time in unix seconds.
        """
        points: dict[int, dict[float, int]] = {partition: {} for partition in unread}

        def look_up(partitions: Collection[int], age_s: float) -> None:
            offsets = self._topics.client.offsets_at(topic, partitions, round((at_s - age_s) * _MS))
            for partition in partitions:
                points[partition][age_s] = offsets.get(partition, found.bounds[partition].end)

        left = dict(unread)
        try:
            for age_s in SEED_AGES_S:
                look_up(left, age_s)
                left = {number: first for number, first in left.items() if points[number][age_s] > first}
                if not left:
                    break
            for _ in range(_HALVINGS):
                for age_s, partitions in _between(points, unread).items():
                    look_up(partitions, age_s)
        except MarshalError as error:
            logger.debug("exporter: the times of topic %r cannot be looked up: %s", topic, error)
            self._seeded_at_s[topic] = at_s - _SEED_AGAIN_S + _SEED_AFTER_FAILURE_S
        for partition, known in points.items():
            self._times.of(topic, partition).seed({at_s - age_s: offset for age_s, offset in known.items()})

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._records_before += log.records_read
            log.close()


def _between(points: Mapping[int, Mapping[float, int]], unread: Mapping[int, int]) -> dict[float, list[int]]:
    """Return the ages to look up next, in seconds, each with its partitions.

    Args:
        points: For each partition, the first offset that is not older than an age, by the age.
        unread: For each partition, the first unread offset.
    """
    found: dict[float, list[int]] = {}
    for partition, first in unread.items():
        older = [age_s for age_s, offset in points[partition].items() if offset <= first]
        younger = [age_s for age_s, offset in points[partition].items() if offset > first]
        if older and younger:
            found.setdefault(math.sqrt(min(older) * max(younger)), []).append(partition)
    return found


def _process_metrics() -> bytes:
    """Return the memory, the CPU time and the files of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return generate_latest(registry)
