"""OpenTelemetry metrics of a harvester, recorded by a separate thread; without OpenTelemetry nothing is recorded."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from marshal_dagster.errors import MarshalError
from marshal_dagster.outbox.harvest import HarvestCounts
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.telemetry.metrics import OutboxMetrics, flush, outbox_metrics

logger = logging.getLogger(__name__)

COUNT_EACH_S: Final = 1.0
LOOK_EACH_S: Final = 10.0
"""The least time between two counts of the waiting rows, which only the leader requests from the database."""
_CLOSE_WITHIN_S: Final = 5.0
_now_s: Final = time.time
_COUNTED: Final = ("published", "parked", "refused", "sessions")


@contextmanager
def metrics_recorded(tables: OutboxTables, counts: HarvestCounts, leads: Callable[[], bool]) -> Iterator[None]:
    """Record `counts`, and the backlog while `leads` returns true; export the metrics at the end of the block.

    Does nothing if the process does not use OpenTelemetry. It raises no errors of its own.
    """
    found = outbox_metrics()
    if found is None:
        yield
        return
    measuring = _MetricsRecorder(found, tables, counts, leads)
    over = threading.Event()
    thread = threading.Thread(target=measuring.run, args=(over,), name="metrics of an outbox", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_CLOSE_WITHIN_S)
        flush()


class _MetricsRecorder:
    """A recorder that adds the increase of the counts to the instruments, and measures the backlog."""

    def __init__(
        self, metrics: OutboxMetrics, tables: OutboxTables, counts: HarvestCounts, leads: Callable[[], bool]
    ) -> None:
        self._metrics, self._counts, self._leads = metrics, counts, leads
        self._whose = {"outbox": tables.name}
        self._backlog = OutboxInspector(tables)
        self._reported = replace(counts)
        self._looked_s: float | None = None
        self._led = False

    def run(self, over: threading.Event) -> None:
        for name in _COUNTED:  # a counter that begins at 0 shows its first event as an increase
            getattr(self._metrics, name).add(0, self._whose)
        self._metrics.leads.set(0, self._whose)
        self._metrics.backlog_counted_at.set(0, self._whose)
        try:
            while not over.wait(COUNT_EACH_S):
                self._count()
                self._look()
            self._count()
            self._set_role(leads=False)
        finally:
            self._backlog.close()

    def _count(self) -> None:
        now = replace(self._counts)
        for name in _COUNTED:
            more = getattr(now, name) - getattr(self._reported, name)
            if more:
                getattr(self._metrics, name).add(more, self._whose)
        self._reported = now

    def _look(self) -> None:
        now_s = time.monotonic()
        leads = self._leads()
        self._set_role(leads=leads)
        if not leads or (self._looked_s is not None and now_s - self._looked_s < LOOK_EACH_S):
            return
        self._looked_s = now_s
        try:
            status = self._backlog.status()
        except MarshalError as error:
            logger.debug("outbox %r: the backlog cannot be measured: %s", self._whose["outbox"], error)
            return
        if not self._leads():  # meanwhile another harvester may lead, which reports the backlog
            return
        self._metrics.backlog_counted_at.set(_now_s(), self._whose)
        self._metrics.backlog.set(status.rows, self._whose)
        self._metrics.backlog_age.set(status.oldest_age_s or 0.0, self._whose)

    def _set_role(self, *, leads: bool) -> None:
        """Report the role, and a backlog of 0 when the harvester leads no more, because only the leader knows it."""
        self._metrics.leads.set(int(leads), self._whose)
        if self._led and not leads:
            self._metrics.backlog.set(0, self._whose)
            self._metrics.backlog_age.set(0.0, self._whose)
            self._looked_s = None
        self._led = leads
