"""Append, read back, tell what each record came to: what every step of a claimer is made of."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import OwnRecord, Rationalizer, RecordResult
from marshal_dagster.protocol.messages import Message, coordination_partition, render, type_name

logger = logging.getLogger(__name__)

GO_TIME_SHIFT_S: Final = 2
"""How much earlier than its clock a member of a Go group dates a record: Go takes a time ahead of its own for stale."""


@dataclass(slots=True)
class AppendResult:
    """Records that were handed to the log together, at `sent_ms`; where each lies and what it came to.

    Both are None for a record that was not acknowledged, the second also for one that retention deleted before it was
    read back.
    """

    sent_ms: float
    messages: Sequence[Message]
    log_offsets: Sequence[int | None]
    outcomes: Sequence[RecordResult | None]

    def __iter__(self) -> Iterator[tuple[Message, RecordResult | None]]:
        return zip(self.messages, self.outcomes, strict=True)

    @property
    def unconfirmed(self) -> list[int]:
        """The partitions whose record was not acknowledged, or not read back."""
        return [message.partition for message, outcome in self if outcome is None]


class Sender:
    """Sends records about one data topic; use it under the rationalizer's lock."""

    def __init__(
        self,
        rationalizer: Rationalizer,
        topic: str,
        clock: Clock,
        on_sent: Callable[[AppendResult], None] | None = None,
    ) -> None:
        """Send to the coordination partition of data topic `topic`; `on_sent` is told what the records came to."""
        self.coordination_partition = coordination_partition(topic, rationalizer.identity.partitions)
        self._rationalizer = rationalizer
        self._topic = topic
        self._clock = clock
        self._on_sent = on_sent

    def signed(self, by: Member) -> dict[str, Any]:
        """Give the fields that all records of `by` about the topic share."""
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

    def send(self, messages: Sequence[Message], numbers: Sequence[int] | None = None) -> AppendResult:
        """Append, read back past the acknowledged offsets, and tell what each record came to.

        Each goes to the coordination partition that stands in its place in `numbers`, by default the topic's.
        Raises `UnavailableError`, `CoordinationLogChangedError`; then what is in the log is not known.
        """
        sent = self._send(messages, numbers or [self.coordination_partition] * len(messages))
        if self._on_sent is not None:
            self._on_sent(sent)
        return sent

    def send_last(self, messages: Sequence[Message]) -> None:
        """Append what nobody here waits for; read it back so that others of this process find it read."""
        own, _ = self._append(messages, [self.coordination_partition] * len(messages))
        if self._rationalizer.can_resume:
            self._rationalizer.read_past(own)
        else:  # after an interrupt the log is read again from its start: not while others wait for the keys
            self._rationalizer.expect(own)

    def _send(self, messages: Sequence[Message], numbers: Sequence[int]) -> AppendResult:
        sent_ms = self._clock.lease_ms()
        own, offsets = self._append(messages, numbers)
        outcomes = self._rationalizer.read_past(own)
        found = [None if at is None else outcomes[number].get(at) for number, at in zip(numbers, offsets, strict=True)]
        return AppendResult(sent_ms, messages, offsets, found)

    def _append(
        self, messages: Sequence[Message], numbers: Sequence[int]
    ) -> tuple[dict[int, dict[int, OwnRecord]], list[int | None]]:
        """Append; give what was acknowledged, by where it lies, and the log offset of each record.

        To a log that was found to be another one, or to store the senders' timestamps, nothing is appended.
        """
        if not messages:
            return {}, []
        self._rationalizer.require_unchanged()
        records = [Append(number, render(message)) for number, message in zip(numbers, messages, strict=True)]
        acks = self._rationalizer.log.append(records)
        own: dict[int, dict[int, OwnRecord]] = {}
        for (number, value), message, (offset, _) in zip(records, messages, acks, strict=True):
            if offset is not None:
                # Where two were acknowledged at one offset the first is lost, and reading it back finds that.
                own.setdefault(number, {}).setdefault(offset, (message, value))
        offsets = [ack.offset for ack in acks]
        if None in offsets:
            _log_unacknowledged(messages, [ack.error for ack in acks if ack.offset is None])
        return own, offsets


def _log_unacknowledged(messages: Sequence[Message], errors: Sequence[str | None]) -> None:
    kinds = ", ".join(dict.fromkeys(type_name(message) for message in messages))
    why = next((error for error in errors if error), "no reason given")
    logger.warning("%d of %d records (%s) were not acknowledged: %s", len(errors), len(messages), kinds, why)
