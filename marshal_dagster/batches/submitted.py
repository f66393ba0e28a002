"""The claimed batch in a script that a run has started on another machine, through Dagster Pipes.

The run holds the claims, sends the heartbeats and commits (`marshal_dagster.pipes`). The script gets the batch in the
context of Pipes, reads in the coordination log whether the claims still hold, and reports its outcome as a message of
Pipes. Run and script share no folder and no process. The script needs dagster-pipes, but not Dagster:

    with open_dagster_pipes() as pipes, submitted_batch(pipes, KafkaConnection.from_environment()) as batch:
        batch.write(FileSink(batch.output), batch.read(spark).select("partition", "offset", "value"))
"""

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from marshal_dagster.batches.failing_record import find_failing_record
from marshal_dagster.batches.manifest import BatchManifest, ScriptOutcome
from marshal_dagster.coordination.claim_watch import ClaimWatch
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    BatchAbortedError,
    ConfigurationError,
    DataTopicChangedError,
    FailingRecordError,
    MarshalError,
)
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.sinks.sink import check_result
from marshal_dagster.spark import job_control, reader
from marshal_dagster.spark.reader import NOTHING_READ
from marshal_dagster.spark.session import check_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.batch_planning import ClaimedRange

_LOOK_PART: Final = 0.25
"""The part of the heartbeat interval after which the script looks at its claims again."""
_GOODBYE_S: Final = 5.0
_PARAMETERS: Final = ("DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES")


class PipesContext(Protocol):
    """What a batch needs of `dagster_pipes.PipesContext`."""

    @property
    def extras(self) -> Mapping[str, Any]:
        """The extras that the run has passed."""
        ...

    def report_custom_message(self, payload: Any) -> None:  # noqa: ANN401 - as dagster-pipes
        """Send a message to the run."""
        ...


class SubmittedBatch:
    """The batch for which a run has started this script; get it with `submitted_batch`.

    The run holds the claim and commits. The script reads the batch and writes the results.

    Example:
        ```python
        with open_dagster_pipes() as pipes, submitted_batch(pipes, connection) as batch:
            frame = batch.read(spark)
            batch.check()
            frame.write.mode("append").parquet("s3a://lake/orders")
        ```
    """

    def __init__(
        self,
        manifest: BatchManifest,
        connection: KafkaConnection,
        watch: ClaimWatch,
        topics: "Topics",
        stack: ExitStack,
    ) -> None:
        """Prepare a batch; call `submitted_batch` to get one.

        Args:
            manifest: The description of the batch.
            connection: The cluster of the data topic.
            watch: Reads whether the claims hold.
            topics: The topics of that cluster.
            stack: Ends the batch's Spark jobs when it is closed.
        """
        first = manifest.ranges[0]
        self.batch_id = manifest.batch_id
        """The instance id of the batch's claims; it is unique to the batch."""
        self.group = first.group
        """The group that claimed the batch."""
        self.topic = first.topic
        """The data topic."""
        self.mode = manifest.mode
        """The delivery mode of the group."""
        self.ranges: tuple[ClaimedRange, ...] = manifest.ranges
        """The ranges to process, by partition."""
        self.metadata: dict[str, Any] = {}
        """Metadata for the batch's materialization. Add to it; values that JSON does not have travel as text."""
        self._output = manifest.output
        self._data_topic_id = first.data_topic_id
        self._connection = connection
        self._watch = watch
        self._topics = topics
        self._stack = stack
        self._lost: MarshalError | None = None
        self._spark: SparkSession | None = None
        self._is_read = False
        self._frame: DataFrame | None = None
        """The frame that `read` returned last."""
        self._written: DataFrame | None = None
        self._result: WriteResult | None = None

    @property
    def output(self) -> str:
        """The address of the output, as the run has named it with `RemoteSink`.

        Raises:
            ConfigurationError: The run has no `RemoteSink`.
        """
        if self._output is None:
            raise ConfigurationError(
                f"batch {self.batch_id} of topic {self.topic!r} has no output: pass RemoteSink(address) as `sink` in "
                "the run, or name the output in the script"
            )
        return self._output

    def check(self) -> None:
        """Read in the coordination log that the claims still hold, and check that the data topic is the same.

        Call it before you change an output yourself. `write` calls it for a sink.

        Raises:
            ClaimLostError: A claim has ended.
            BatchAbortedError: No heartbeat of the run came for two heartbeat intervals.
            DataTopicChangedError: The data topic was deleted and re-created.
            CoordinationLogChangedError: The coordination log is not the one that was read before.
        """
        self._require_not_lost()
        self._watch.require_held()
        topic_id = self._watch.while_fresh(lambda: self._topics.describe(self.topic).topic_id)
        if topic_id != self._data_topic_id:
            raise DataTopicChangedError(
                f"topic {self.topic!r} has id {topic_id}, but group {self.group!r} claimed the one with id "
                f"{self._data_topic_id}, so nothing is written: it was re-created, or this script reads another "
                "cluster than its run"
            )

    def read(self, spark: "SparkSession", *, min_partitions: int | None = None) -> "DataFrame":
        """Return a DataFrame over exactly the messages of `ranges`.

        Each action on the frame reads Kafka again: cache it, or use it for one action. Its Spark jobs are cancelled if
        the claim is lost.

        Args:
            spark: The Spark session.
            min_partitions: The lowest number of Spark tasks for reading; by default one for each Kafka partition.

        Returns:
            A frame with the columns key, value, topic, partition, offset, timestamp and headers.

        Raises:
            ConfigurationError: The session cannot be used.
            MarshalError: The errors of `check`.
        """
        check_session(spark)
        self.check()
        if self._spark is None:
            self._stack.enter_context(job_control.batch_jobs(spark, self.batch_id))
            self._spark = spark
        self._require_not_lost()
        self._is_read = True
        self._frame = frame = self._read(spark, min_partitions)
        return frame

    def begin_processing(self) -> None:
        """Check that the `ranges` may be processed now. Call it before you read them in another way than with `read`.

        Raises:
            MarshalError: The errors of `check`.
        """
        self.check()
        self._is_read = True

    def write(self, sink: Sink, frame: "DataFrame") -> WriteResult:
        """Write the result of the batch to a sink (effectively once). Call it once for the whole batch.

        Args:
            sink: The sink.
            frame: The rows. The column `partition` assigns each row to a range.

        Returns:
            The ranges and the numbers of rows that the sink has written.

        Raises:
            ConfigurationError: Nothing was read before, `write` was called before, or the group has no sink.
            SinkRejectedError: The sink cannot take the ranges or the rows.
            BatchAbortedError: The sink has not reported each range as taken or skipped.
            MarshalError: The errors of `check`.
        """
        self._require_writable(sink)
        self.check()
        self._written = frame
        result = sink.write(frame, self.ranges, self._offsets_read, self.check)
        check_result(result, self.ranges, sink)
        self._result = result
        return result

    def _require_writable(self, sink: Sink) -> None:
        wrong = None
        if self.mode is not DeliveryMode.EFFECTIVELY_ONCE:
            wrong = f"its group has delivery {self.mode}, but only effectively_once uses a sink: write the frame itself"
        elif not self._is_read:
            wrong = "write() was called before read(): call read() first, or begin_processing()"
        elif self._result is not None:
            wrong = "write() was called twice: write the whole result with one call"
        elif self.ranges[0].in_any_order and not getattr(sink, "supports_unordered_ranges", False):
            wrong = f"{sink!r} stores one position for each partition, but the group claims ranges: use another sink"
        if wrong is not None:
            raise ConfigurationError(f"batch {self.batch_id} of topic {self.topic!r}: {wrong}")

    def outcome(self, attempt: str) -> ScriptOutcome:
        """Check the claims, and return what was done; `submitted_batch` reports it at the end of its block.

        Args:
            attempt: A random name of this process.

        Raises:
            BatchAbortedError: Nothing was read, or nothing was written to the sink.
            MarshalError: The errors of `check`.
        """
        self.check()
        if not self._is_read:
            raise BatchAbortedError(NOTHING_READ)
        result = self._result
        if self.mode is DeliveryMode.EFFECTIVELY_ONCE and result is None:
            raise BatchAbortedError(
                f"batch {self.batch_id} of topic {self.topic!r}: the block ended without batch.write(...), so nothing "
                "was written and nothing is committed. Call batch.write(sink, frame) in it"
            )
        if result is None:
            result = WriteResult(taken=self.ranges, skipped=(), rows={})
        return ScriptOutcome(self.batch_id, attempt, result, self.metadata)

    def failing_record(self, error: Exception) -> FailingRecordError | None:
        """Return the error that names the record that makes Spark fail with `error`, or None if none was found.

        Args:
            error: The error that Spark raised.
        """
        spark, frame = self._spark, self._frame
        if spark is None or frame is None:
            return None

        def read_part(offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
            return reader.read_part(spark, self._connection.spark_options(), self.topic, offsets)

        return find_failing_record(error, frame, self.ranges, read_part, self._require_not_lost, written=self._written)

    def watch_until(self, over: threading.Event) -> None:
        """Look at the claims again and again until `over`; if they are lost, cancel the batch's Spark jobs."""
        while not over.wait(self._watch.interval_ms * _LOOK_PART / 1_000):
            try:
                self._watch.require_held()
            except MarshalError as lost:
                self._lost = lost
                if self._spark is not None:
                    job_control.cancel(self._spark, self.batch_id, str(lost))
                return

    def _require_not_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _offsets_read(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        if self._spark is None:
            return {range_.partition: [(range_.first_readable, range_.end)] for range_ in self.ranges}
        return reader.offsets_read(self._read(self._spark))

    def _read(self, spark: "SparkSession", min_partitions: int | None = None) -> "DataFrame":
        offsets = {range_.partition: (range_.first_readable, range_.end) for range_ in self.ranges}
        return reader.read_ranges(
            spark, self._connection.spark_options(), self.topic, offsets, min_partitions=min_partitions
        )


@contextmanager
def submitted_batch(
    pipes: PipesContext, connection: KafkaConnection, *, coordination_connection: KafkaConnection | None = None
) -> Iterator[SubmittedBatch]:
    """Yield the batch for which a run has started this script, for use in a `with` block.

    The run commits only if the block has read the batch (`read`, `begin_processing`), has written it in effectively
    once, and ended without an error. Spark jobs in the block belong to the batch.

    The script's user needs the right to read the data topic and the coordination topic.

    Args:
        pipes: The context of `dagster_pipes.open_dagster_pipes`.
        connection: The cluster of the data topics. Take its secrets from the platform's own store.
        coordination_connection: The cluster of the coordination topic; by default the same one.

    Yields:
        The batch.

    Raises:
        ConfigurationError: No run has started this script with `marshal_dagster.run_with_pipes`, or the connection
            leads to another coordination topic than that of the run.
        ClaimLostError: The run does not hold the batch any more.
        BatchAbortedError: The run has died, or the block has not processed the batch. The end of the block raises it
            too, so that the script fails.
        CoordinationLogChangedError: The coordination topic was deleted and re-created, or truncated, meanwhile.
        FailingRecordError: Spark failed because of the records that the message names.
        UnavailableError: The brokers did not answer in time.

    Example:
        ```python
        with open_dagster_pipes() as pipes:
            with submitted_batch(pipes, KafkaConnection.from_environment()) as batch:
                frame = batch.read(spark).select("partition", "offset", "value")
                batch.write(FileSink(batch.output), frame)
        ```
    """
    manifest = BatchManifest.from_extras(pipes.extras)
    with ExitStack() as stack:
        rationalizer, topics = _connect(manifest, connection, coordination_connection or connection)
        stack.callback(rationalizer.close)
        stack.callback(topics.close)
        _require_same_log(manifest, rationalizer)
        watch = ClaimWatch(rationalizer, manifest.batch_id, manifest.ranges)
        watch.require_held()
        batch = SubmittedBatch(manifest, connection, watch, topics, stack)
        over = threading.Event()
        thread = threading.Thread(target=batch.watch_until, args=(over,), name="watch the claims", daemon=True)
        thread.start()
        stack.callback(thread.join, _GOODBYE_S)
        stack.callback(over.set)
        try:
            yield batch
        except Exception as error:
            if named := batch.failing_record(error):
                raise named from error
            raise
        outcome = batch.outcome(secrets.token_hex(8))
        pipes.report_custom_message(outcome.to_message())


def _connect(
    manifest: BatchManifest, connection: KafkaConnection, coordination: KafkaConnection
) -> tuple[Rationalizer, "Topics"]:
    """Open the coordination log, of which nothing is read yet, and the topics of the data cluster."""
    from marshal_dagster.coordination.checked_log import open_rationalizer
    from marshal_dagster.kafka.admin_client import Topics

    first = manifest.ranges[0]
    rationalizer = open_rationalizer(
        coordination,
        manifest.coordination_topic,
        followed=[first.topic],
        usable_id=first.coordination_topic_id,
    )
    return rationalizer, Topics(connection)


def _require_same_log(manifest: BatchManifest, rationalizer: Rationalizer) -> None:
    claimed, found = manifest.ranges[0].coordination_topic_id, rationalizer.identity.topic_id
    if claimed != found:
        raise ConfigurationError(
            f"batch {manifest.batch_id} was claimed in coordination topic {manifest.coordination_topic!r} with id "
            f"{claimed}, but this script's connection leads to one with id {found}: connect to the cluster of the run"
        )


def pipes_parameters(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of Pipes among a platform's settings, for `dagster_pipes.PipesMappingParamsLoader`.

    Platforms that pass no environment variables to a driver pass Spark settings. A parameter is found under its own
    name, with or without a prefix that ends with a dot, such as `spark.`, `spark.yarn.appMasterEnv.` or
    `spark.kubernetes.driverEnv.`.

    Args:
        settings: The settings by name, such as `dict(spark.sparkContext.getConf().getAll())`.

    Returns:
        The values of `DAGSTER_PIPES_CONTEXT` and `DAGSTER_PIPES_MESSAGES`, as far as they are set.

    Example:
        ```python
        settings = dict(spark.sparkContext.getConf().getAll())
        loader = PipesMappingParamsLoader(pipes_parameters(settings))
        with open_dagster_pipes(params_loader=loader) as pipes:
            ...
        ```
    """
    return {
        name: value
        for key, value in settings.items()
        for name in _PARAMETERS
        if key == name or key.endswith(f".{name}")
    }
