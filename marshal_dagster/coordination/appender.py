"""Appends records to the coordination log, reads them back and returns their results; claimers use it in each step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import OwnRecord, Rationalizer, RecordResult
from marshal_dagster.protocol.messages import Message, coordination_partition, render, type_name

logger = logging.getLogger(__name__)

GO_TIME_SHIFT_S: Final = 2
"""How many seconds a member of a Go group subtracts from its clock for the time in its records.

A Go consumer treats a record whose time is later than its own clock as stale.
"""


@dataclass(slots=True)
class AppendResult:
    """Records that were appended together, with the log offset and the result of each."""

    sent_ms: float
    """When they were appended, in ms of the lease clock (`Clock.lease_ms`)."""
    messages: Sequence[Message]
    log_offsets: Sequence[int | None]
    """The log offset of each record; None for one that was not acknowledged."""
    outcomes: Sequence[RecordResult | None]
    """The result of each record; None also for one that retention deleted before it was read back."""

    def __iter__(self) -> Iterator[tuple[Message, RecordResult | None]]:
        return zip(self.messages, self.outcomes, strict=True)

    @property
    def unconfirmed(self) -> list[int]:
        """The data partitions whose record was not acknowledged, or not read back."""
        return [message.partition for message, outcome in self if outcome is None]


class Sender:
    """Appends records about one data topic; use it under the rationalizer's lock."""

    def __init__(
        self,
        rationalizer: Rationalizer,
        topic: str,
        clock: Clock,
        on_sent: Callable[[AppendResult], None] | None = None,
    ) -> None:
        """Send to the coordination partition of data topic `topic`; `on_sent` is called with the results."""
        self.coordination_partition = coordination_partition(topic, rationalizer.identity.partitions)
        self._rationalizer = rationalizer
        self._topic = topic
        self._clock = clock
        self._on_sent = on_sent

    def signed(self, by: Member) -> dict[str, Any]:
        """Return the fields that all records of member `by` about the topic share."""
        return {
            "instance": by.instance,
            "client": by.client,
            "group": by.group,
            "topic": self._topic,
            "time_s": self._clock.wall_ms() // 1_000 - (GO_TIME_SHIFT_S if self._is_go(by.group) else 0),
        }

    def _is_go(self, group: str) -> bool:
        world = self._rationalizer.world.partitions.get(self.coordination_partition)
        return world is not None and world.group(group).is_go

    def send(
        self, messages: Sequence[Message], numbers: Sequence[int] | None = None, reason: str | None = None
    ) -> AppendResult:
        """Append records, read them back and return their results.

        Args:
            messages: the records.
            numbers: the coordination partition of each record; by default that of the topic.
            reason: why the group is paused, if the records are pauses.

        Raises:
            UnavailableError: the log did not answer in time. It is not known which records are in it.
            CoordinationLogChangedError: it is not the log that was read before.
        """
        sent = self._send(messages, numbers or [self.coordination_partition] * len(messages), reason)
        if self._on_sent is not None:
            self._on_sent(sent)
        return sent

    def send_last(self, messages: Sequence[Message]) -> None:
        """Append records whose results are not needed.

        They are read back nevertheless, so that no other claimer in this process has to wait for them.
        """
        own, _ = self._append(messages, [self.coordination_partition] * len(messages))
        if self._rationalizer.can_resume:
            self._rationalizer.read_past(own)
        else:
            # After an interrupt the log must be read again. Do not read it now: other members wait for the keys.
            self._rationalizer.expect(own)

    def _send(self, messages: Sequence[Message], numbers: Sequence[int], reason: str | None) -> AppendResult:
        sent_ms = self._clock.lease_ms()
        own, offsets = self._append(messages, numbers, reason)
        outcomes = self._rationalizer.read_past(own)
        found = [None if at is None else outcomes[number].get(at) for number, at in zip(numbers, offsets, strict=True)]
        return AppendResult(sent_ms, messages, offsets, found)

    def _append(
        self, messages: Sequence[Message], numbers: Sequence[int], reason: str | None = None
    ) -> tuple[dict[int, dict[int, OwnRecord]], list[int | None]]:
        """Append records; return the acknowledged ones by coordination partition and log offset, and each log offset.

        If the log is known to be another one, or to store the senders' timestamps, this raises and appends nothing.
        """
        if not messages:
            return {}, []
        self._rationalizer.require_unchanged()
        values = [render(message) for message in messages]
        acks = self._rationalizer.log.append(list(map(Append, numbers, values, repeat(reason))))
        offsets = [ack.offset for ack in acks]
        if None in offsets:
            _log_unacknowledged(messages, [ack.error for ack in acks if ack.offset is None])
        own: dict[int, dict[int, OwnRecord]] = {number: {} for number in numbers}
        for number, message, value, offset in zip(numbers, messages, values, offsets, strict=True):
            if offset is not None:
                # If two records were acknowledged at one offset, one of them is lost. `read_past` compares the values.
                own[number].setdefault(offset, (message, value))
        return {number: records for number, records in own.items() if records}, offsets


def _log_unacknowledged(messages: Sequence[Message], errors: Sequence[str | None]) -> None:
    kinds = ", ".join(dict.fromkeys(type_name(message) for message in messages))
    why = next((error for error in errors if error), "no reason given")
    group = messages[0].group
    logger.warning(
        "group %r: %d of %d records (%s) were not acknowledged: %s", group, len(errors), len(messages), kinds, why
    )
