"""The exceptions of marshal-dagster that user code can catch.

Every exception derives from `MarshalError`. Each class describes one cause, and what an operator or developer can do
about it. The message of an exception names the group, topic and partition concerned. Lower layers import this module,
and it imports no other module of the package.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MAX_SHOWN: Final = 5
"""The number of bad records that a message lists."""


class MarshalError(Exception):
    """Base class of all exceptions that marshal-dagster raises.

    Example:
        ```python
        try:
            with claimer.claimed_batch(context, topic="orders") as batch:
                if not batch.idle:
                    process(batch.read(spark))
        except ClaimLostError:
            pass  # another process repeats the batch
        except MarshalError as error:
            logger.error("the batch on topic orders failed: %s", error)
        ```
    """


class ConfigurationError(MarshalError):
    """A setting or argument is missing, malformed, or contradicts another one.

    Action: correct the setting that the message names.
    """


class UnavailableError(MarshalError):
    """A service (Kafka, Spark, a sink's database) could not be reached within its timeout.

    Cause: the service is down, the network does not reach it, or the address or credentials are wrong.

    Action: check the service that the message names, then run again. Nothing has to be repaired.
    """


class TopicNotFoundError(MarshalError):
    """A topic does not exist, or this user has no right to see it.

    The topic is a data topic, the coordination topic, or a topic that a sink or a coordinator needs.

    Action: check the name, create the topic, or grant the right that the message names.
    """


class AuthorizationError(MarshalError):
    """Kafka does not allow this user to use a topic, a group or the cluster.

    Action: grant the right that the message names.
    """


class UnsafeTopicError(MarshalError):
    """The coordination topic has settings that break the guarantees of the protocol (protocol.md, section 1.6).

    Action: correct the settings that the message lists. Some of them can be accepted with `allow_unsafe_topic` of the
    claimer, or `--allow-unsafe` of `marshal-dagster topic create`.

    Attributes:
        topic: The name of the coordination topic.
        reasons: One sentence for each wrong setting.
    """

    def __init__(self, topic: str, reasons: Sequence[str], *, can_be_accepted: bool = True) -> None:
        """Store the topic and the reasons, and build the message.

        Args:
            topic: The name of the coordination topic.
            reasons: One sentence for each wrong setting.
            can_be_accepted: Whether an option accepts these settings. The message names the option.
        """
        self.topic = topic
        self.reasons = tuple(reasons)
        listed = "; ".join(self.reasons)
        super().__init__(
            f"coordination topic {topic!r} has dangerous settings: {listed}. "
            "Correct them (`marshal-dagster topic create --help` lists the right ones)"
            + (
                ", or accept them with --allow-unsafe (allow_unsafe_topic of the claimer)."
                if can_be_accepted
                else "; no option allows them."
            )
        )


class CoordinationLogChangedError(MarshalError):
    """The coordination log is not the one that this process has read so far.

    Cause: the coordination topic was deleted and re-created, its log was truncated, or its partition count changed.

    Action: find out what changed the topic. Restart every process that uses it.
    """


class TimestampTypeError(CoordinationLogChangedError):
    """The coordination topic stored a record with the timestamp of its sender.

    Cause: the topic does not have `message.timestamp.type=LogAppendTime`, so log time depends on the senders' clocks
    (protocol.md, section 1.6).

    Action: set `message.timestamp.type=LogAppendTime`, or use a new topic. Then restart the members.
    """


class GoGroupError(MarshalError):
    """Go consumers use the group or the coordination topic, so an operator must decide before anything is written.

    Action: follow the message. It names the settings to write first, or the option that confirms that the Go consumers
    are stopped.
    """


class IncompleteLogError(MarshalError):
    """The coordination log no longer starts at offset 0 and no snapshot replaces its beginning.

    A process can read the log in this state, but not claim (protocol.md, section 5.1).

    Cause: retention or an operator deleted the beginning of the log.

    Action: stop all members of the group, then run `marshal-dagster recover`.
    """


class RecoveryFailedError(MarshalError):
    """`marshal-dagster recover` could not restore a truncated coordination log.

    Cause: a member, another `recover` or retention changed the log in the meantime.

    Action: stop all members of all groups, then run `marshal-dagster recover` again.
    """


class SettingsMismatchError(MarshalError):
    """The group's settings in the coordination log differ from the settings of this member.

    Action: configure this deployment like the group, or change the group's settings with the command in the message.
    """


class GroupPausedError(MarshalError):
    """The group is paused: nothing is claimed or planned until an operator resumes it or the pause expires.

    Action: run `marshal-dagster resume`, or wait until the time in the message.
    """


class ClaimLostError(MarshalError):
    """This instance no longer holds a claim, so it commits nothing more by it.

    Cause: the lease ended because no heartbeat was accepted in time, or another instance took over the partition.

    Action: check why heartbeats stopped, for example a broker that is down or a process that was suspended. Another
    run repeats the batch.
    """


class CommitFailedError(MarshalError):
    """A commit was not read back from the coordination log as accepted.

    Cause: the broker did not acknowledge the record, or the claim does not permit this offset.

    Action: run again. The message lists the partitions and offsets that were not committed.
    """


class PlanRejectedError(MarshalError):
    """A plan was not read back from the coordination log as accepted, or a batch refers to a plan that is not open.

    Action: run again. The message lists the partitions.
    """


class PositionNotSetError(MarshalError):
    """A position was not set, or not everywhere.

    Cause: members did not release their partitions in time, or another process paused, resumed or claimed meanwhile.

    Action: let the other process end, then set the position again.
    """


class SettingsNotSetError(MarshalError):
    """The group's settings were not changed in all coordination partitions.

    Cause: live members still held partitions after the wait, or another process paused, resumed or claimed meanwhile.

    Action: let the runs end, then repeat the command. It completes the change.
    """


class DataTopicChangedError(MarshalError):
    """The data topic was deleted and re-created, so the stored offsets belong to another topic of the same name.

    Action: check what was processed, then set the position of the group.
    """


class DataLossError(MarshalError):
    """Retention deleted messages before they were processed, and the delivery mode does not skip them by itself.

    Action: set `allow_data_loss` for one run, or set the position after the deleted messages. Give the topic more
    retention.
    """


class StartPositionError(MarshalError):
    """The offset where a partition starts is unknown.

    Cause: the partition has no position and the start policy is `fail`, or Kafka has a committed offset of the group
    that the coordination log lacks.

    Action: set the position or choose another start policy. If the log was re-created, check what was processed, then
    run once with `allow_log_reset`.
    """


class SinkRejectedError(MarshalError):
    """A sink rejected a batch, and wrote nothing of it.

    Cause: the output has a newer fencing token or generation, its position does not match the range, or it does not
    accept a row.

    Action: nothing if another run took over. Otherwise compare the output with `marshal-dagster status`, or correct the
    row that the message names.
    """


class FailingRecordError(MarshalError):
    """Spark fails at one record of the batch.

    Action: correct the code for the record at the partition and offset in the message, or skip the record.
    """


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded, and the reason."""

    topic: str
    """The data topic."""
    partition: int
    """The partition of the data topic."""
    offset: int
    """The offset of the record."""
    reason: str
    """Why the decoder failed."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} offset {self.offset} ({self.reason})"


class DecodeError(MarshalError):
    """Records of a batch could not be decoded, and the decoding is configured to fail the batch then.

    Action: correct the schema or the writer of the records, or set bad records aside (docs/decoding.md).

    Attributes:
        count: The number of bad records in the batch.
        first: The first bad record of each partition that has any.
    """

    def __init__(self, count: int, first: Sequence[BadRecord]) -> None:
        """Store the count and the first bad records, and build the message.

        Args:
            count: The number of bad records in the batch.
            first: The first bad record of each partition that has any. The message lists five of them.
        """
        self.count = count
        self.first = tuple(first)
        named = ", ".join(map(str, self.first[:_MAX_SHOWN])) + (", ..." if len(self.first) > _MAX_SHOWN else "")
        super().__init__(
            f"{count} {'record' if count == 1 else 'records'} of the batch could not be decoded; the first of each "
            f"partition: {named}. Correct the schema or the writer, or set bad records aside (docs/decoding.md)"
        )

    def __reduce__(self) -> tuple[type["DecodeError"], tuple[int, tuple[BadRecord, ...]]]:
        return type(self), (self.count, self.first)


class SchemaDriftError(MarshalError):
    """Records of a batch have fields that the declared schema lacks, and the decoding is configured to fail then.

    Action: declare the fields that the message names, or drop them with `new_fields="ignore"`.
    """


class BatchAbortedError(MarshalError):
    """A batch ended before its commit; nothing more was committed.

    Cause: the run was cancelled, Spark stopped or its disk is full, or the block ended without reading or writing the
    batch.

    Action: nothing after a cancellation. Otherwise correct the cause in the message, then run again.
    """


class PortInUseError(UnavailableError):
    """Another process listens on the port that a server of this library needs.

    Action: choose another port, or 0 for a free one.
    """
