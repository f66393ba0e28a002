"""The observer that records the outcomes of records and batches as metrics and log lines.

`coordination` and `batches` call it; it never affects what they do.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    ClaimingRange,
    GroupMessage,
    Heartbeat,
    Message,
    RangeDone,
    RangeHeartbeat,
    RevokingClaim,
    RevokingRange,
    type_name,
)
from marshal_dagster.telemetry.log_lines import LOGGER, LineWriter
from marshal_dagster.telemetry.metrics import Metrics, flush, metrics

if TYPE_CHECKING:
    from marshal_dagster.batches import ClaimedBatch
    from marshal_dagster.coordination.appender import AppendResult
    from marshal_dagster.coordination.claims import BaseClaim
    from marshal_dagster.coordination.observer import ObservedClaimer
    from marshal_dagster.coordination.rationalizer import RecordResult

_UNACKNOWLEDGED: Final = "unacknowledged"
_REFUSED: Final = "refused"
_LOST: Final = "lost"


class LineEvent(StrEnum):
    """The kind of record that a log line is about."""

    CLAIM = "claim"
    HEARTBEAT = "heartbeat"
    COMMIT = "commit"
    OTHER = "record"


_SUCCESS: Final = {
    LineEvent.CLAIM: "won",
    LineEvent.HEARTBEAT: "accepted",
    LineEvent.COMMIT: "committed",
    LineEvent.OTHER: "accepted",
}
_LEVELS: Final = {LineEvent.CLAIM: logging.INFO, LineEvent.HEARTBEAT: logging.DEBUG, LineEvent.COMMIT: logging.INFO}
"""The levels of lines about accepted records. Other accepted records have no line."""
_RACES: Final = (ClaimingPartition, ClaimingRange, RevokingClaim, RevokingRange, GroupMessage)
"""Records for which another member may be faster. If they are refused, that is no reason for a warning."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of this process in the coordination log, with its outcome."""

    event: LineEvent
    message: Message
    outcome: "RecordResult | None"
    epoch: int | None
    offset: int | None = None
    """For a commit, the end of the committed offsets (exclusive)."""

    @property
    def result_text(self) -> str:
        """The name of the outcome."""
        if self.outcome is None:
            return _UNACKNOWLEDGED
        return _SUCCESS[self.event] if self.outcome.accepted else _REFUSED

    @property
    def has_failed(self) -> bool:
        """Whether the record was refused, or its outcome is unknown."""
        return self.outcome is None or not self.outcome.accepted

    @property
    def kind(self) -> str:
        """The name of the record's type."""
        return type_name(self.message)


@contextmanager
def telemetry_observer(group: str) -> "Iterator[Telemetry]":
    """Yield an observer for a member of `group`; write its log lines and export the metrics at the end.

    Args:
        group: The group's name, for metrics and log lines.

    Yields:
        The observer, for the `observer` argument of a `BatchSession`.

    Example:
        ```python
        with (
            telemetry_observer("shops") as observer,
            BatchSession.open(connection, "shops", observer=observer) as session,
            session.claimed_batch(BatchRequest(topic="orders")) as batch,
        ):
            ...
        ```
    """
    telemetry = Telemetry(group)
    try:
        yield telemetry
    finally:
        telemetry.lines.close()
        flush()


class Telemetry:
    """An observer of the batches of one op or session (`marshal_dagster.batches.BatchObserver`)."""

    def __init__(self, group: str) -> None:
        """Observe batches of `group`. Metrics are recorded if the process uses OpenTelemetry now."""
        self.lines = LineWriter()
        self._group = group
        self._metrics = metrics()

    def sent(self, claimer: "ObservedClaimer", sent: "AppendResult") -> None:
        """Count and log the outcomes of own records."""
        logs_all = LOGGER.isEnabledFor(logging.INFO)
        are_accepted = all(outcome is not None and outcome.accepted for outcome in sent.outcomes)
        if self._metrics is None and not logs_all and are_accepted:
            return
        claims = claimer.claims
        records = [
            _record(message, log_offset, outcome, claims.get(message.partition))
            for message, log_offset, outcome in zip(sent.messages, sent.log_offsets, sent.outcomes, strict=True)
        ]
        left_s = _least_left_s(claimer, claims, records)
        for record in records:
            if logs_all or record.has_failed:
                self._report(claimer, record, left_s.get(record.event))
        if self._metrics is not None:
            _count(self._metrics, _whose(claimer), records, left_s)

    def lost(self, claimer: "ObservedClaimer", claim: "BaseClaim", why: str) -> None:
        """Count and log a lost claim."""
        if claim.is_done:
            return
        if self._metrics is not None:
            self._metrics.claims.add(1, {**_whose(claimer), "outcome": _LOST})
        if LOGGER.isEnabledFor(logging.WARNING):
            fields = _fields(claimer, LineEvent.CLAIM, _LOST, claim.partition, claim.epoch)
            self.lines.write(logging.WARNING, f"claim of {_named(fields)}: lost, {why}", {**fields, "reason": why})

    def left(self, batch: "ClaimedBatch") -> None:
        """Count the outcome of a batch, and wait for its log lines, because Dagster accepts none after the op."""
        if self._metrics is not None:
            _count_batch(self._metrics, {"group": self._group, "topic": batch.request.topic}, batch)
        self.lines.flush()

    def _report(self, claimer: "ObservedClaimer", record: _Record, left_s: float | None) -> None:
        level = _level(record)
        if level is None or not LOGGER.isEnabledFor(level):
            return
        partition = None if isinstance(record.message, GroupMessage) else record.message.partition
        fields = _fields(claimer, record.event, record.result_text, partition, record.epoch)
        fields["record"] = record.kind
        if record.offset is not None:
            fields["offset"] = record.offset
        if left_s is not None:
            fields["lease_remaining_s"] = round(left_s, 3)
        if record.outcome is not None and record.has_failed:
            fields["reason"] = str(record.outcome.verdict.reason)
        self.lines.write(level, _text(record, fields), fields)


# Counting


def _count(
    instruments: Metrics, whose: Mapping[str, str], records: list[_Record], left_s: Mapping[LineEvent, float]
) -> None:
    counters = {LineEvent.CLAIM: instruments.claims, LineEvent.COMMIT: instruments.commits}
    for (event, result_text), count in Counter((record.event, record.result_text) for record in records).items():
        if event in counters:
            counters[event].add(count, {**whose, "outcome": result_text})
    for (kind, reason), count in Counter(_refusals(records)).items():
        instruments.refused.add(count, {**whose, "record": kind, "reason": reason})
    for event, left in left_s.items():
        instruments.lease_remaining.record(left, {**whose, "at": event.value})


def _refusals(records: list[_Record]) -> Iterator[tuple[str, str]]:
    for record in records:
        if record.outcome is not None and record.has_failed:
            reason = record.outcome.verdict.reason
            yield record.kind, "unknown" if reason is None else reason.name.lower()


def _count_batch(instruments: Metrics, whose: Mapping[str, str], batch: "ClaimedBatch") -> None:
    if batch.idle is not None:
        instruments.batches.add(1, {**whose, "outcome": batch.idle.reason.value})
        return
    instruments.batches.add(1, {**whose, "outcome": "committed" if batch.committed else "failed"})
    offsets: Counter[str] = Counter()
    for report in batch.report():
        offsets[report.state.replace(" ", "_")] += report.range.width
    for state, offset in offsets.items():
        instruments.offsets.add(offset, {**whose, "state": state})
    phases = batch.phases
    durations_s = {
        "claim": phases.waiting_s,
        "start_spark": phases.starting_spark_s,
        "read": phases.reading_s,
        "process": phases.processing_s - phases.starting_spark_s - phases.writing_s,
        "write": phases.writing_s,
        "commit": phases.committing_s,
    }
    for phase, duration_s in durations_s.items():
        if duration_s > 0:
            instruments.phase_duration.record(duration_s, {**whose, "phase": phase})
    instruments.batch_lag.set(batch.lag_after + offsets["not_committed"], whose)


# Records


def _record(
    message: Message, log_offset: int | None, outcome: "RecordResult | None", claim: "BaseClaim | None"
) -> _Record:
    """Classify a record; `claim` is the state of its claim before the record."""
    offset: int | None = None
    if isinstance(message, ClaimingPartition | ClaimingRange):
        accepted = outcome is not None and outcome.accepted
        return _Record(LineEvent.CLAIM, message, outcome, log_offset if accepted else None)
    event, current_offset = LineEvent.OTHER, getattr(claim, "offset", None)
    if isinstance(message, RangeDone):
        event, offset = LineEvent.COMMIT, getattr(claim, "end", None)
    elif isinstance(message, Heartbeat) and current_offset is not None and message.offset > current_offset:
        event, offset = LineEvent.COMMIT, message.offset
    elif isinstance(message, Heartbeat | RangeHeartbeat):
        event = LineEvent.HEARTBEAT
    epoch = claim.epoch if claim is not None else getattr(message, "epoch", None)
    return _Record(event, message, outcome, epoch, offset)


def _least_left_s(
    claimer: "ObservedClaimer", claims: "Mapping[int, BaseClaim]", records: list[_Record]
) -> dict[LineEvent, float]:
    """Return the seconds left of the shortest lease that the heartbeats and the commits were sent for."""
    now_ms = claimer.clock.lease_ms()
    left_s: dict[LineEvent, float] = {}
    for record in records:
        claim = claims.get(record.message.partition)
        if record.event in {LineEvent.HEARTBEAT, LineEvent.COMMIT} and claim is not None:
            left = max(0.0, claim.lease.left_ms(now_ms) / 1_000)
            left_s[record.event] = min(left, left_s.get(record.event, left))
    return left_s


def _whose(claimer: "ObservedClaimer") -> dict[str, str]:
    return {"group": claimer.member.group, "topic": claimer.topic}


# Log lines


def _level(record: _Record) -> int | None:
    if not record.has_failed:
        return _LEVELS.get(record.event)
    if record.outcome is None:
        return None if record.event is LineEvent.OTHER else logging.WARNING
    return logging.INFO if isinstance(record.message, _RACES) else logging.WARNING


def _fields(
    claimer: "ObservedClaimer", event: LineEvent, outcome: str, partition: int | None, epoch: int | None
) -> dict[str, object]:
    return {
        "event": event.value,
        "outcome": outcome,
        **_whose(claimer),
        "partition": partition,
        "epoch": epoch,
        "instance": claimer.member.instance,
    }


def _named(fields: Mapping[str, object]) -> str:
    partition, epoch = fields["partition"], fields["epoch"]
    place = fields["topic"] if partition is None else f"{fields['topic']}/{partition}"
    return f"{place} of group {fields['group']!r}" + ("" if epoch is None else f", epoch {epoch}")


def _text(record: _Record, fields: Mapping[str, object]) -> str:
    about = f"{record.kind} for" if record.event is LineEvent.OTHER else f"{record.event} of"
    text = f"{about} {_named(fields)}: {record.result_text}"
    if record.event is LineEvent.COMMIT:
        text += f", up to {record.offset}" if record.has_failed else f" up to {record.offset}"
    if "reason" in fields:
        text += f", {fields['reason']}"
    if "lease_remaining_s" in fields:
        text += f"; {fields['lease_remaining_s']} s of the lease were left"
    return text
