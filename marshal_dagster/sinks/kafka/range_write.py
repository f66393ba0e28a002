"""What the write of one range needs and returns, in the driver and in Spark's tasks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.kafka.notes import PositionNote
from marshal_dagster.sinks.sink import BeforeCommit

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.kafka.transactions import NotesReader, Transaction


@dataclass(frozen=True, slots=True)
class Place:
    """The id of the output topic, a reader of its notes, and an admin client of its cluster."""

    topic_id: str
    notes: "NotesReader"
    topics: "Topics"


class Step(StrEnum):
    """What a writer has done with a range that it wrote."""

    TAKEN = "taken"
    APPENDED = "appended"
    """The records follow those of an older generation."""


class RecordQueue(Protocol):
    """The records of one or more ranges."""

    def send(self, transaction: "Transaction", topic: str, wanted: ClaimedRange) -> int:
        """Send the records of a range, and return their number."""
        ...


class RangeSink(Protocol):
    """The parts of `KafkaSink` that Spark's tasks use."""

    topic: str
    transaction_timeout_s: float
    _connection: KafkaConnection
    _patience_s: float

    def _with_connection(self, connection: KafkaConnection | None) -> "RangeSink":
        """Return a copy with another connection. Without one it contains no secret, and cannot write."""
        ...

    def _notes_reader(self) -> AbstractContextManager[tuple["Topics", "NotesReader"]]:
        """Yield an admin client and a reader of the notes; close both after the block."""
        ...

    def _write(
        self,
        place: Place,
        wanted: ClaimedRange,
        count: int,
        queue: RecordQueue,
        before_commit: BeforeCommit,
        *,
        sends_alone: bool = False,
        attempt: str | None = None,
    ) -> Step | None:
        """Write a range in one transaction; return None if another writer has taken it."""
        ...

    def _found(self, notes: Mapping[str, bytes], wanted: ClaimedRange) -> PositionNote | None:
        """Return the note of the range's partition."""
        ...

    def _fenced_error(self, wanted: ClaimedRange, took_s: float) -> MarshalError:
        """Return the error of a writer that was fenced."""
        ...
