"""The exceptions that marshal-dagster raises for its users, as one tree with `MarshalError` at its root.

Each class is public and importable from `marshal_dagster`. Its docstring has a fixed form: one line that states what
happened, then `Meaning:`, `Cause:` and `Action:`. `More:` names pages of the documentation with details.
`tools/error_reference.py` writes docs/reference/errors.md from these docstrings; run it after a change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NAMED: Final = 5
"""How many bad records the message of a `DecodeError` names."""


class MarshalError(Exception):
    """Base class of all errors that marshal-dagster raises on purpose.

    Meaning:
        The library refused an operation or could not finish it. Catch this class to handle every error of the library.

    Cause:
        The message states what happened and to which group, topic or partition. The subclass states the kind of error.

    Action:
        Follow the message and the entry of the subclass. If the class is `MarshalError` itself, only the message has
        details.

    Example:
        ```python
        try:
            with claimer.claimed_batch(context, topic="orders") as batch:
                if not batch.idle:
                    process(batch.read(spark))
        except marshal_dagster.ClaimLostError:
            pass  # another process repeats the batch
        except marshal_dagster.MarshalError as error:
            logger.error("the batch failed: %s", error)
        ```
    """


class ConfigurationError(MarshalError):
    """A setting, an argument or a function given to the library is missing, malformed or contradicts another.

    Meaning:
        The operation was refused. It would fail again with the same configuration. If the message names your function,
        the failed run does not count as an attempt to process its batch.

    Cause:
        A field of a resource, a run config, a command-line option or an argument has a value that cannot work. Or the
        function of an op or asset takes wrong arguments or returns a result that the sink cannot store. The message
        names the field or the function.

    Action:
        Correct the field or the function that the message names, then start the run or command again.

    More:
        docs/how-to/use.md
    """


class UnavailableError(MarshalError):
    """A service did not answer within its timeout: Kafka, Spark, a database, a schema registry or a download.

    Meaning:
        The operation did not finish. Nothing in your configuration is known to be wrong. A run that fails with this
        error leaves its batch to the next run.

    Cause:
        The service is down, overloaded or unreachable from this machine. Or the address, port, security protocol or
        password is wrong in a way that looks like an unreachable server.

    Action:
        Check the address and the service that the message names, then try again. For Kafka, `marshal-dagster doctor`
        shows whether the brokers answer.

    More:
        docs/operate/runbook.md#a-broker-is-down
        docs/how-to/security.md#when-there-is-no-connection
    """


class TopicNotFoundError(MarshalError):
    """A data topic, the coordination topic or another Kafka topic does not exist, or this user may not see it.

    Meaning:
        Nothing was read or written in that topic.

    Cause:
        The name is misspelled, the topic was not created yet or was deleted, or this user lacks DESCRIBE on it.
        Kafka reports a topic that a user may not see as missing.

    Action:
        Correct the name, create the topic, or grant the right. `marshal-dagster topic create` creates the coordination
        topic. `allow_missing_topic` of an op or asset lets its runs succeed until the data topic exists.

    More:
        docs/reference/cli.md#the-coordination-topic
        docs/operate/runbook.md#the-coordination-topic-was-deleted-or-truncated
    """


class AuthorizationError(MarshalError):
    """Kafka does not allow this user an operation on a topic, a group or the cluster.

    Meaning:
        The operation was refused. Runs check their rights before they claim, so no claim remains.

    Cause:
        An ACL is missing. The message names the right and the resource.

    Action:
        Have an administrator run the command in the message, which grants the right.

    More:
        docs/how-to/security.md#the-rights-of-each-role
        docs/how-to/security.md#when-a-right-is-missing
    """


class UnsafeTopicError(MarshalError):
    """The coordination topic has settings with which the protocol is not safe.

    Meaning:
        The topic was not used, because two runs could own one partition or acknowledged records could be lost.

    Cause:
        The topic was created without the settings that the protocol needs, or they were changed later. The message
        names each wrong setting.

    Action:
        Change the settings that the message names. `marshal-dagster topic check` shows the present value, the value
        needed, and the command that changes it. `allow_unsafe_topic` of the resource accepts settings that are
        dangerous. No option accepts settings with which the topic cannot be used.

    More:
        docs/reference/cli.md#the-coordination-topic
    """

    topic: str
    """Name of the coordination topic."""

    reasons: tuple[str, ...]
    """One sentence for each setting that is wrong."""

    def __init__(self, topic: str, reasons: Sequence[str], *, can_be_accepted: bool = True) -> None:
        """Build the message from the topic's name and the reasons.

        Args:
            topic: Name of the coordination topic.
            reasons: One sentence for each setting that is wrong.
            can_be_accepted: Whether an option lets members use the topic in spite of these settings.
        """
        self.topic = topic
        self.reasons = tuple(reasons)
        listed = "; ".join(self.reasons)
        super().__init__(
            f"coordination topic {topic!r} has dangerous settings: {listed}. "
            "Correct them (`marshal-dagster topic check` shows the commands)"
            + (
                ", or accept them (`allow_unsafe_topic` of the resource, `--allow-unsafe` of the command)."
                if can_be_accepted
                else "; no option allows them."
            )
        )


class CoordinationLogChangedError(MarshalError):
    """The coordination topic is no longer the log that this process read before.

    Meaning:
        Records that members relied on are gone. The run or command stopped. What it committed may be lost, too.

    Cause:
        The coordination topic was truncated, deleted and re-created, or given other partitions. A cluster that was
        restored from a backup looks the same.

    Action:
        Stop all members and run `marshal-dagster doctor`, then follow the runbook. If the message ends with "run the
        command again", repeat the command.

    More:
        docs/operate/runbook.md#the-coordination-topic-was-deleted-or-truncated
    """


class TimestampTypeError(CoordinationLogChangedError):
    """The coordination topic stored a record with the timestamp of its sender instead of the broker's.

    Meaning:
        Nothing was claimed, planned or committed by that record. With senders' timestamps one wrong clock would end
        the claims of live runs.

    Cause:
        `message.timestamp.type` of the coordination topic is or was not `LogAppendTime`.

    Action:
        Set `message.timestamp.type=LogAppendTime` on the topic, or create a new coordination topic, then start the
        members again.

    More:
        docs/operate/runbook.md#findings-of-doctor
    """


class GoGroupError(MarshalError):
    """Go consumers use the group or the coordination topic, so an operator must decide before anything is written.

    Meaning:
        Nothing was written. Some records of this library would disturb Go consumers when they start.

    Cause:
        The group has rule set `go`, has offsets but no settings, or Go consumers use another group on the same topic.
        A group without settings counts as a group of Go consumers.

    Action:
        Configure the member with `rule_set="go"`, use another coordination topic, or stop the Go consumers and repeat
        the command with `--go-consumers-stopped GROUP`. If only this library uses the group, give it settings first:
        `marshal-dagster settings set GROUP`.

    More:
        docs/how-to/go-consumers.md#what-an-operator-does
    """


class IncompleteLogError(MarshalError):
    """The coordination log no longer starts at offset 0 and no snapshot replaces the deleted part.

    Meaning:
        The state can be observed, but nothing can be claimed or changed. The deleted records may have contained a
        pause, a plan, a position or a live owner.

    Cause:
        Retention or `kafka-delete-records` deleted the start of the coordination topic before a snapshot was written.

    Action:
        Stop all members of all groups, then run `marshal-dagster recover` and confirm each position. To prevent it,
        turn off the retention of the coordination topic. Create the topic for snapshots, too, with
        `marshal-dagster topic create`.

    More:
        docs/operate/runbook.md#incompletelogerror
        docs/reference/cli.md#recover
    """


class RecoveryFailedError(MarshalError):
    """`marshal-dagster recover` stopped, because the coordination log changed while it worked.

    Meaning:
        The recovery is not complete, so nothing can be claimed yet in the partitions that the message names.

    Cause:
        A member or another `recover` wrote to the log after the preview, or retention deleted more of it. Or log time
        does not advance with this machine's clock.

    Action:
        Stop all members of all groups, set `retention.ms` and `retention.bytes` to -1, check the brokers' clocks, then
        run `marshal-dagster recover` again.

    More:
        docs/reference/cli.md#recover
    """


class SettingsMismatchError(MarshalError):
    """This member is configured with other settings than its group has in the coordination log.

    Meaning:
        The member claimed nothing. All members of a group need the same heartbeat interval, rule set, delivery mode
        and features.

    Cause:
        The configuration of this deployment differs from the group's settings. Or the group has no settings yet and
        cannot be given any, because live owners or open plans from before exist.

    Action:
        Configure this deployment like the group, or change the group's settings with the command in the message or
        the job of `build_settings_job`.

    More:
        docs/reference/cli.md#settings
    """


class GroupPausedError(MarshalError):
    """The group is paused, so nothing can be claimed or planned.

    Meaning:
        Nothing was lost. Runs of the group claim again when the pause ends.

    Cause:
        An operator or a command paused the group. The message names the end of the pause and the instance that paused.

    Action:
        Wait for the end of the pause, or end it with `marshal-dagster resume GROUP`.

    More:
        docs/operate/pause.md
    """


class ClaimLostError(MarshalError):
    """The run no longer holds a partition that it had claimed.

    Meaning:
        The run stopped and committed nothing more. The next run repeats the batch, or another run works on it already.
        In at most once, messages whose commit was already written are not processed again.

    Cause:
        The lease ended because no heartbeat was accepted in time: a broker was down, or the process was suspended or
        starved of CPU. Or another run, a sensor or an operator took the partition over. The message shows which of
        these it was, who revoked the claim, and the present owner, as far as the log shows it.

    Action:
        If another run took over on purpose, do nothing. Otherwise find out why heartbeats stopped. If it happens
        again and again, use a longer heartbeat interval.

    More:
        docs/operate/runbook.md#claimlosterror
        docs/how-to/tune.md#the-heartbeat-interval
    """


class CommitFailedError(MarshalError):
    """A commit was not found accepted in the coordination log.

    Meaning:
        The commit took no effect for the partitions in the message. The next run repeats their batch. If the message is
        about heartbeats, the claims stay valid until their lease ends.

    Cause:
        The brokers did not acknowledge the record in time. Or the commit does not end where the plan ends, or is below
        an offset that an earlier heartbeat reported.

    Action:
        Let the next run repeat the batch. If it happens again, check the brokers with `marshal-dagster doctor`. If your
        code commits by itself, commit exactly up to the end of the plan.

    More:
        docs/operate/runbook.md#a-broker-is-down
    """


class PlanRejectedError(MarshalError):
    """A plan was not found accepted in the coordination log.

    Meaning:
        The batch was not planned for the partitions in the message, so nothing of it was committed.

    Cause:
        The group was paused or the claim was lost before the plan arrived, or the brokers did not acknowledge it in
        time. Or the plan has offsets that the claim does not hold. The message gives the reason.

    Action:
        Let the next run plan the batch again. If your code plans by itself, plan once before a commit, and only offsets
        that the claim holds.

    More:
        docs/concepts/delivery.md#the-steps
    """


class PositionNotSetError(MarshalError):
    """A command that changes positions did not finish.

    Meaning:
        The positions of the partitions in the message have not changed, or it is not known whether they have. The
        message states which, if any, were set.

    Cause:
        Members held their partitions longer than the command waits. Or other members or operators wrote at the same
        time, or the brokers did not acknowledge the records.

    Action:
        Look at the positions with `marshal-dagster status`, let the runs that hold partitions end or stop them, then
        repeat the command with a longer wait.

    More:
        docs/reference/cli.md#position-get-and-position-reset
    """


class SettingsNotSetError(MarshalError):
    """The settings of a group were not changed, or were changed in only some of the coordination partitions.

    Meaning:
        The group keeps its old settings in the coordination partitions that the message names.

    Cause:
        Members held their partitions longer than the command waits. Or other members or operators wrote at the same
        time, the brokers did not acknowledge the records, or their clocks did not advance.

    Action:
        Let the runs that hold partitions end or stop them, then repeat the command. It completes what is missing.

    More:
        docs/reference/cli.md#settings
    """


class DataTopicChangedError(MarshalError):
    """The data topic is not the topic to which the group's positions belong.

    Meaning:
        Nothing is read until an operator sets the position, because the old offsets name other messages or none.

    Cause:
        The data topic was deleted and re-created, or the connection leads to another cluster.

    Action:
        Check the connection, and what was processed of the old topic. Then set the positions with
        `marshal-dagster position reset`.

    More:
        docs/operate/runbook.md#the-data-topic-was-deleted-and-re-created
        docs/operate/position.md
    """


class DataLossError(MarshalError):
    """Retention deleted messages of the data topic before the group read them.

    Meaning:
        Nothing was done, because the run may not skip messages by itself. The message names the deleted range.

    Cause:
        The group lagged for longer than the retention of the data topic.

    Action:
        Accept the loss for one run with `allow_data_loss`, or set the position after the deleted range. Give the data
        topic a longer retention.

    More:
        docs/operate/runbook.md#lag-grows
        docs/operate/position.md
    """


class StartPositionError(MarshalError):
    """A partition has no position, and the library may not choose one.

    Meaning:
        Nothing was read. A wrong start would skip messages or process them twice.

    Cause:
        The start policy is `fail`. Or Kafka has committed offsets of the group while the coordination log has none, so
        the log may have been lost. Only a group that delivers at least once continues from Kafka's offsets by itself.

    Action:
        With start policy `fail`, set the position or choose `earliest` or `latest`. Otherwise check what was processed,
        then run once with `allow_log_reset`, or set the position.

    More:
        docs/operate/position.md#the-first-positions
        docs/operate/runbook.md#the-coordination-topic-was-deleted-or-truncated
    """


class SinkRejectedError(MarshalError):
    """The sink refused to write the rows of a batch.

    Meaning:
        Nothing of the range in the message was written and nothing was committed for it. The sink refuses so that no
        range is stored twice or in part.

    Cause:
        Another run wrote the partition since, or the output's position does not fit the range. Or the output belongs to
        another group or topic, is damaged, or cannot store a row. The message states which.

    Action:
        If another run took over, do nothing. If the message names a row, correct the code that makes it, or skip the
        message. Otherwise compare `marshal-dagster position get` with the output before you change anything.

    More:
        docs/operate/runbook.md#sinkrejectederror
        docs/how-to/sinks.md
    """


class FailingRecordError(MarshalError):
    """Spark fails at one message of the batch, or at a few.

    Meaning:
        Nothing of the batch was committed. Each further run fails at the same message until the code or the position
        changes.

    Cause:
        The code of the op or asset fails for this message, or Spark cannot read it. The error names the topic, the
        partition, the offset and Spark's own error.

    Action:
        Correct the code, or skip the message with the command in the error.

    More:
        docs/operate/reprocess.md#a-message-that-cannot-be-processed
    """


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded, and the reason. `str()` gives `topic/partition offset N (reason)`.

    Example:
        ```python
        try:
            rows = decoded.or_fail()
        except DecodeError as error:
            for record in error.first:
                print(record.topic, record.partition, record.offset, record.reason)
            raise
        ```
    """

    topic: str
    """Data topic of the record."""

    partition: int
    """Partition of the record."""

    offset: int
    """Offset of the record."""

    reason: str
    """Why it could not be decoded."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} offset {self.offset} ({self.reason})"


class DecodeError(MarshalError):
    """Records of a batch could not be decoded.

    Meaning:
        The batch failed before a row was written. It stays planned, so the next run tries the same records again. In at
        most once its records are dropped.

    Cause:
        A sender wrote records that do not match the schema, or the schema is wrong. The code calls `or_fail()`,
        which makes this an error.

    Action:
        Correct the schema or the sender. Or set the bad records aside with `split()`, `marked()` or
        `or_dead_letter()` instead of `or_fail()`.

    More:
        docs/how-to/decoding.md#bad-records
    """

    count: int
    """How many records of the batch could not be decoded."""

    first: tuple[BadRecord, ...]
    """The first bad record of each partition that has any."""

    def __init__(self, count: int, first: Sequence[BadRecord]) -> None:
        """Build the message, which names the first bad records.

        Args:
            count: How many records of the batch could not be decoded.
            first: The first bad record of each partition that has any.
        """
        self.count = count
        self.first = tuple(first)
        named = ", ".join(map(str, self.first[:_NAMED])) + (", ..." if len(self.first) > _NAMED else "")
        super().__init__(
            f"{count} {'record' if count == 1 else 'records'} of the batch could not be decoded; the first of each "
            f"partition: {named}. Correct the schema or the sender, or set bad records aside (docs/how-to/decoding.md)"
        )

    def __reduce__(self) -> tuple[type["DecodeError"], tuple[int, tuple[BadRecord, ...]]]:
        return type(self), (self.count, self.first)


class SchemaDriftError(MarshalError):
    """The JSON records of a batch have fields that the declared schema lacks.

    Meaning:
        The batch failed before a row was written, so no field was dropped silently.

    Cause:
        A sender added fields, and the code calls the decoder with `new_fields="fail"`.

    Action:
        Add the fields to the schema, or leave them out with `new_fields="ignore"`.

    More:
        docs/how-to/decoding.md#json
    """


class BatchAbortedError(MarshalError):
    """The batch was stopped before it was committed.

    Meaning:
        Nothing more was committed. The claims are released, or end with their lease, and the next run repeats the
        batch. In at most once, messages whose commit was already written are not processed again.

    Cause:
        The run was canceled, or the block ended without reading or writing its batch. Or the Spark session or the
        script ended, a disk was full, or heartbeats failed. Or a sink of your own has not reported each range of the
        batch as taken or skipped. The message states which.

    Action:
        After a cancellation, do nothing. Otherwise remove the cause in the message. If the block reads Kafka by itself,
        call `batch.begin_processing()` in it.

    More:
        docs/how-to/executors.md
        docs/how-to/use.md
    """


class PortInUseError(UnavailableError):
    """A server cannot listen, because another process uses its port.

    Meaning:
        The server was not started.

    Cause:
        Another process on this machine listens on that port, or no port of the allowed range is free.

    Action:
        Stop the other process, or choose another port. If the message mentions port 0, it picks a free
        port.
    """
