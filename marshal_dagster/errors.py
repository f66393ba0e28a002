"""The exceptions that a user can catch: one small tree with `MarshalError` at its root."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NAMED: Final = 5


class MarshalError(Exception):
    """Root of all errors raised by marshal-dagster."""


class ConfigurationError(MarshalError):
    """A setting is missing, malformed, or contradicts another; the message names the field."""


class UnavailableError(MarshalError):
    """A service (Kafka, Spark, a sink's database) could not be reached within its time-out."""


class TopicNotFoundError(MarshalError):
    """A data topic or the coordination topic does not exist, or cannot be seen with these rights."""


class AuthorizationError(MarshalError):
    """The user may not do this to a topic, a group or the cluster; the message names the right that it takes."""


class UnsafeTopicError(MarshalError):
    """The coordination topic has settings under which the protocol does not hold."""

    def __init__(self, topic: str, reasons: Sequence[str], *, can_be_accepted: bool = True) -> None:
        """Keep `reasons`, one sentence for each setting that is wrong."""
        self.topic = topic
        self.reasons = tuple(reasons)
        listed = "; ".join(self.reasons)
        super().__init__(
            f"coordination topic {topic!r} has dangerous settings: {listed}. "
            "Fix them (`marshal-dagster topic create --help` shows the right ones)"
            + (", or accept them explicitly." if can_be_accepted else "; no option allows them.")
        )


class CoordinationLogChangedError(MarshalError):
    """The coordination log is not the one read before: truncated, made anew, or repartitioned."""


class TimestampTypeError(CoordinationLogChangedError):
    """The coordination topic stored a record with its sender's timestamp: it was not made with LogAppendTime."""


class GoGroupError(MarshalError):
    """Go consumers use the group or the coordination topic, so a person must decide before anything is written."""


class IncompleteLogError(MarshalError):
    """The log no longer starts at offset 0 and no snapshot fits: one may observe, never claim."""


class RecoveryFailedError(MarshalError):
    """A log that was cut could not be made certain again: somebody is at work on it."""


class SettingsMismatchError(MarshalError):
    """The group's settings in the log differ from those this member is configured with."""


class GroupPausedError(MarshalError):
    """The group is paused; nothing is claimed or planned until it is resumed."""


class ClaimLostError(MarshalError):
    """A claim is no longer this instance's; the message names who holds it now."""


class CommitFailedError(MarshalError):
    """A commit was not seen accepted in the log: nothing was committed by it."""


class PlanRejectedError(MarshalError):
    """A plan was not seen accepted in the log."""


class PositionNotSetError(MarshalError):
    """A position was not set: members did not leave in time, or others paused and resumed in between."""


class SettingsNotSetError(MarshalError):
    """The group's settings were not changed, or not in every coordination partition."""


class DataTopicChangedError(MarshalError):
    """The data topic is not the incarnation to which the stored offsets belong."""


class DataLossError(MarshalError):
    """Retention deleted messages that were not processed, and the mode does not allow going on."""


class StartPositionError(MarshalError):
    """A partition has no position and the start policy is `fail`, or the log forgot one."""


class SinkRejectedError(MarshalError):
    """A sink refused a range: lower token or generation, or a position that does not fit."""


class FailingRecordError(MarshalError):
    """Spark fails at a record of the batch; the message names its partition and offset, and how to continue."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded, and why."""

    topic: str
    partition: int
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} offset {self.offset} ({self.reason})"


class DecodeError(MarshalError):
    """Records of a batch could not be decoded, and were to fail it."""

    def __init__(self, count: int, first: Sequence[BadRecord]) -> None:
        """Keep how many there are, and the first one of each partition that has any."""
        self.count = count
        self.first = tuple(first)
        named = ", ".join(map(str, self.first[:_NAMED])) + (", ..." if len(self.first) > _NAMED else "")
        super().__init__(
            f"{count} {'record' if count == 1 else 'records'} of the batch could not be decoded; the first of each "
            f"partition: {named}. Mend the schema or the writer, or have bad records set aside (docs/decoding.md)"
        )

    def __reduce__(self) -> tuple[type["DecodeError"], tuple[int, tuple[BadRecord, ...]]]:
        return type(self), (self.count, self.first)


class SchemaDriftError(MarshalError):
    """The records of a batch have fields that the declared schema lacks, and these were to fail it."""


class BatchAbortedError(MarshalError):
    """The batch was stopped before its commit; nothing more was committed."""


class PortInUseError(UnavailableError):
    """Another process listens on a port that a server was to have."""
