"""The observer that makes metrics and log lines of what records and batches came to."""

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
from marshal_dagster.telemetry.log_lines import LOGGER, Lines
from marshal_dagster.telemetry.metrics import Metrics, flush, metrics

if TYPE_CHECKING:
    from marshal_dagster.batches import ClaimedBatch
    from marshal_dagster.coordination.appender import Sent
    from marshal_dagster.coordination.claims import Held
    from marshal_dagster.coordination.observer import ObservedClaimer
    from marshal_dagster.coordination.rationalizer import Outcome

_UNACKNOWLEDGED: Final = "unacknowledged"
_REFUSED: Final = "refused"
_LOST: Final = "lost"


class Event(StrEnum):
    """What a line is about."""

    CLAIM = "claim"
    HEARTBEAT = "heartbeat"
    COMMIT = "commit"
    OTHER = "record"

    @property
    def success(self) -> str:
        """Name the outcome of one that was accepted."""
        return _SUCCESS[self]


_SUCCESS: Final = {
    Event.CLAIM: "won",
    Event.HEARTBEAT: "accepted",
    Event.COMMIT: "committed",
    Event.OTHER: "accepted",
}
_LEVELS: Final = {Event.CLAIM: logging.INFO, Event.HEARTBEAT: logging.DEBUG, Event.COMMIT: logging.INFO}
"""Of lines about what was accepted; about the rest there are none."""
_RACES: Final = (ClaimingPartition, ClaimingRange, RevokingClaim, RevokingRange, GroupMessage)
"""Another may be faster with these: that they are refused is nothing to warn of."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One own record, and what came of it."""

    event: Event
    message: Message
    epoch: int | None
    offset: int | None
    """Up to where it commits."""
    outcome: "Outcome | None"
    came_to: str
    """Its outcome's name."""

    @classmethod
    def of(
        cls, event: Event, message: Message, outcome: "Outcome | None", epoch: int | None, offset: int | None = None
    ) -> "_Record":
        """Name what it came to."""
        came_to = _UNACKNOWLEDGED
        if outcome is not None:
            came_to = event.success if outcome.accepted else _REFUSED
        return cls(event, message, epoch, offset, outcome, came_to)

    @property
    def has_failed(self) -> bool:
        """Whether it was not accepted, as far as is known."""
        return self.outcome is None or not self.outcome.accepted

    @property
    def kind(self) -> str:
        """Name its type."""
        return type_name(self.message)


@contextmanager
def observed(group: str) -> "Iterator[Telemetry]":
    """Give an observer of a member of `group`; at the block's end its lines are written and the metrics handed over."""
    telemetry = Telemetry(group)
    try:
        yield telemetry
    finally:
        telemetry.lines.close()
        flush()


class Telemetry:
    """Observes the batches of one op (`marshal_dagster.batches.BatchObserver`)."""

    def __init__(self, group: str) -> None:
        """Observe batches of `group`; metrics are on if they are now."""
        self.lines = Lines()
        self._group = group
        self._metrics = metrics()

    def sent(self, claimer: "ObservedClaimer", sent: "Sent") -> None:
        """Count and tell what own records came to."""
        tells_all = LOGGER.isEnabledFor(logging.INFO)
        if (
            self._metrics is None
            and not tells_all
            and all(each is not None and each.accepted for each in sent.outcomes)
        ):
            return
        claims = claimer.claims
        records = [
            _record(message, log_offset, outcome, claims.get(message.partition))
            for message, log_offset, outcome in zip(sent.messages, sent.log_offsets, sent.outcomes, strict=True)
        ]
        left_s = _least_left_s(claimer, claims, records)
        for record in records:
            if tells_all or record.has_failed:
                self._tell(claimer, record, left_s.get(record.event))
        if self._metrics is not None:
            _count(self._metrics, _whose(claimer), records, left_s)

    def lost(self, claimer: "ObservedClaimer", claim: "Held", why: str) -> None:
        """Count and tell a lost claim."""
        if claim.is_over:
            return
        if self._metrics is not None:
            self._metrics.claims.add(1, {**_whose(claimer), "outcome": _LOST})
        if LOGGER.isEnabledFor(logging.WARNING):
            fields = _fields(claimer, Event.CLAIM, _LOST, claim.partition, claim.epoch)
            self.lines.write(logging.WARNING, f"claim of {_named(fields)}: lost, {why}", {**fields, "reason": why})

    def left(self, batch: "ClaimedBatch") -> None:
        """Count what a batch came to, and wait for its lines: Dagster takes none after the op."""
        if self._metrics is not None:
            _count_batch(self._metrics, {"group": self._group, "topic": batch.request.topic}, batch)
        self.lines.flush()

    def _tell(self, claimer: "ObservedClaimer", record: _Record, left_s: float | None) -> None:
        level = _level(record)
        if level is None or not LOGGER.isEnabledFor(level):
            return
        partition = None if isinstance(record.message, GroupMessage) else record.message.partition
        fields = _fields(claimer, record.event, record.came_to, partition, record.epoch)
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
    instruments: Metrics, whose: Mapping[str, str], records: list[_Record], left_s: Mapping[Event, float]
) -> None:
    counters = {Event.CLAIM: instruments.claims, Event.COMMIT: instruments.commits}
    for (event, came_to), number in Counter((each.event, each.came_to) for each in records).items():
        if event in counters:
            counters[event].add(number, {**whose, "outcome": came_to})
    for (kind, reason), number in Counter(_refusals(records)).items():
        instruments.refused.add(number, {**whose, "record": kind, "reason": reason})
    for event, left in left_s.items():
        instruments.lease_remaining.record(left, {**whose, "at": event.value})


def _refusals(records: list[_Record]) -> Iterator[tuple[str, str]]:
    for each in records:
        if each.outcome is not None and each.has_failed:
            reason = each.outcome.verdict.reason
            yield each.kind, "unknown" if reason is None else reason.name.lower()


def _count_batch(instruments: Metrics, whose: Mapping[str, str], batch: "ClaimedBatch") -> None:
    if batch.idle is not None:
        instruments.batches.add(1, {**whose, "outcome": batch.idle.reason.value})
        return
    instruments.batches.add(1, {**whose, "outcome": "committed" if batch.committed else "failed"})
    offsets: Counter[str] = Counter()
    for report in batch.report():
        offsets[report.state.replace(" ", "_")] += report.range.width
    for state, number in offsets.items():
        instruments.offsets.add(number, {**whose, "state": state})
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
    instruments.batch_lag.set(batch.lag_after, whose)


# Looking


def _record(message: Message, log_offset: int | None, outcome: "Outcome | None", claim: "Held | None") -> _Record:
    """Say what a record is about; `claim` is as it was before."""
    offset: int | None = None
    if isinstance(message, ClaimingPartition | ClaimingRange):
        accepted = outcome is not None and outcome.accepted
        return _Record.of(Event.CLAIM, message, outcome, log_offset if accepted else None)
    event, stands_at = Event.OTHER, getattr(claim, "offset", None)
    if isinstance(message, RangeDone):
        event, offset = Event.COMMIT, getattr(claim, "end", None)
    elif isinstance(message, Heartbeat) and stands_at is not None and message.offset > stands_at:
        event, offset = Event.COMMIT, message.offset
    elif isinstance(message, Heartbeat | RangeHeartbeat):
        event = Event.HEARTBEAT
    epoch = claim.epoch if claim is not None else getattr(message, "epoch", None)
    return _Record.of(event, message, outcome, epoch, offset)


def _least_left_s(
    claimer: "ObservedClaimer", claims: "Mapping[int, Held]", records: list[_Record]
) -> dict[Event, float]:
    """Give the seconds that are left of the shortest lease, of those that heartbeats and commits were sent for."""
    now_ms = claimer.clock.lease_ms()
    left_s: dict[Event, float] = {}
    for each in records:
        claim = claims.get(each.message.partition)
        if each.event in {Event.HEARTBEAT, Event.COMMIT} and claim is not None:
            left = max(0.0, claim.lease.left_ms(now_ms) / 1_000)
            left_s[each.event] = min(left, left_s.get(each.event, left))
    return left_s


def _whose(claimer: "ObservedClaimer") -> dict[str, str]:
    return {"group": claimer.member.group, "topic": claimer.topic}


# Telling


def _level(record: _Record) -> int | None:
    if not record.has_failed:
        return _LEVELS.get(record.event)
    if record.outcome is None:
        return None if record.event is Event.OTHER else logging.WARNING
    return logging.INFO if isinstance(record.message, _RACES) else logging.WARNING


def _fields(
    claimer: "ObservedClaimer", event: Event, outcome: str, partition: int | None, epoch: int | None
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
    about = f"{record.kind} for" if record.event is Event.OTHER else f"{record.event} of"
    told = f"{about} {_named(fields)}: {record.came_to}"
    if record.event is Event.COMMIT:
        told += f", up to {record.offset}" if record.has_failed else f" up to {record.offset}"
    if "reason" in fields:
        told += f", {fields['reason']}"
    if "lease_remaining_s" in fields:
        told += f"; {fields['lease_remaining_s']} s of the lease were left"
    return told
