"""The claimed batch in a script that a run has submitted to Spark (spark-submit) and waits for.

The run holds the claim, sends the heartbeats and commits (`marshal_dagster.pipes`). It shares a folder with the script
that only this user can read, and names it in the script's environment. The secrets of the connection pass through a
FIFO in that folder, so no secret is left on disk if the processes are killed. The script needs no Dagster:

    with submitted_batch() as batch:
        batch.read(spark).groupBy("topic").count().write.parquet(...)
"""

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from marshal_dagster._internal.processes import ProcessMark, is_alive
from marshal_dagster.batches.failing_record import find_failing_record
from marshal_dagster.errors import BatchAbortedError, ConfigurationError, FailingRecordError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.spark import job_control, reader
from marshal_dagster.spark.process_files import write_private
from marshal_dagster.spark.reader import NOTHING_READ
from marshal_dagster.spark.secret_pipe import listen
from marshal_dagster.spark.session import check_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_VARIABLE: Final = "MARSHAL_BATCH"
"""The environment variable that names the folder of the batch."""

SETTINGS_FILE: Final = "spark.conf"
"""The file with the settings with which the script's session starts; they may contain secrets."""
KAFKA_PIPE: Final = "kafka"
"""The FIFO through which the options of the Kafka connection are passed."""

_BATCH_FILE: Final = "batch.json"
_OUTCOME_FILE: Final = "outcome.json"
_DONE_FILE: Final = "done"
_QUESTION: Final = "asked-"
_POLL_S: Final = 0.5
_ANSWER_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class BatchManifest:
    """The description of a batch that the run writes for the script. The run removes its file if the claim is lost."""

    batch_id: str
    topic: str
    ranges: tuple[ClaimedRange, ...]
    launcher: ProcessMark
    """The run's process, which sends the heartbeats."""

    def write(self, folder: Path) -> None:
        """Write the manifest to `folder`."""
        write_private(folder / _BATCH_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in `folder`; raise `BatchAbortedError` if the run has removed it."""
        try:
            told = json.loads((folder / _BATCH_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise _taken_back(folder) from error
        ranges = tuple(ClaimedRange(**range_) for range_ in told["ranges"])
        return cls(**told | {"ranges": ranges, "launcher": ProcessMark(**told["launcher"])})

    @property
    def has_launcher(self) -> bool:
        """Whether the run's process is alive."""
        return is_alive(self.launcher)


def _taken_back(folder: Path) -> BatchAbortedError:
    return BatchAbortedError(
        f"the run that submitted this script has withdrawn its batch (folder {folder}), because it lost the claim or "
        "ended: see the run's log. Nothing more is committed"
    )


def take_back(folder: Path) -> None:
    """Make the script stop, because the claim is lost."""
    (folder / _BATCH_FILE).unlink(missing_ok=True)


def questions(folder: Path) -> list[Path]:
    """Return the files with which scripts request a check of the claim; the run removes each after the check."""
    return list(folder.glob(f"{_QUESTION}*"))


def read_outcome(folder: Path) -> WriteResult | None:
    """Return the result of the script's sink, or None if the script has not written to it."""
    try:
        told = json.loads((folder / _OUTCOME_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return WriteResult(
        taken=tuple(ClaimedRange(**range_) for range_ in told["taken"]),
        skipped=tuple(ClaimedRange(**range_) for range_ in told["skipped"]),
        rows={int(partition): rows for partition, rows in told["rows"].items()},
        note=told["note"],
    )


def is_done(folder: Path) -> bool:
    """Return whether the script has read the batch and ended its block without an error."""
    return (folder / _DONE_FILE).exists()


class SubmittedBatch:
    """The batch for which a run has submitted this script; get it with `submitted_batch`.

    The run holds the claim and commits. The script reads the batch and writes the results.

    Example:
        ```python
        with submitted_batch() as batch:
            frame = batch.read(spark)
            batch.check()
            frame.write.mode("append").parquet("/data/orders")
        ```
    """

    def __init__(self, folder: Path, handed: BatchManifest, stack: ExitStack) -> None:
        """Read the options of the Kafka connection; call `submitted_batch` to get a batch.

        Args:
            folder: the folder that the run shares with this script.
            handed: the description of the batch, from that folder.
            stack: ends the batch's Spark jobs when it is closed.
        """
        self.batch_id = handed.batch_id
        """The instance id of the batch's claims; it is unique to the batch."""
        self.topic = handed.topic
        """The data topic."""
        self.ranges: Sequence[ClaimedRange] = handed.ranges
        """The ranges to process, by partition."""
        self._folder = folder
        self._handed = handed
        self._kafka_options: Mapping[str, str] = self._listen()
        self._stack = stack
        self._spark: SparkSession | None = None
        self._is_read = False
        self._frame: DataFrame | None = None
        """The frame that `read` returned last."""
        self._written: DataFrame | None = None

    def check(self) -> None:
        """Let the run check that the claims still hold and that the data topic is the same.

        Call it before you change an output yourself. `write` calls it for a sink.

        Raises:
            BatchAbortedError: the check failed, or the run has died. The run's log has the reason.
        """
        self._check_handed_over()
        question = self._folder / f"{_QUESTION}{secrets.token_hex(8)}"
        try:
            write_private(question, "")
        except FileNotFoundError as error:
            raise _taken_back(self._folder) from error
        while question.exists():
            self._check_handed_over()
            time.sleep(_ANSWER_POLL_S)
        self._check_handed_over()

    def _check_handed_over(self) -> None:
        """Raise `BatchAbortedError` if the run has withdrawn the batch, or has died."""
        if not self._handed.has_launcher:
            shutil.rmtree(self._folder, ignore_errors=True)  # the run, which has died, cannot remove it
            raise BatchAbortedError(
                f"the run that submitted batch {self.batch_id} of topic {self.topic!r} has died: nothing more is "
                "committed, and another run takes the batch over once its claim is stale"
            )
        BatchManifest.read(self._folder)

    def read(self, spark: "SparkSession", *, min_partitions: int | None = None) -> "DataFrame":
        """Return a DataFrame over exactly the messages of `ranges`.

        Each action on the frame reads Kafka again: cache it, or use it for one action. Its Spark jobs are cancelled if
        the claim is lost.

        Args:
            spark: the Spark session.
            min_partitions: the lowest number of Spark tasks for reading; by default one for each Kafka partition.

        Returns:
            A frame with the columns key, value, topic, partition, offset, timestamp and headers.

        Raises:
            ConfigurationError: the session cannot be used.
            BatchAbortedError: the claim is lost, or the run has died.
        """
        check_session(spark)
        self.check()
        if self._spark is None:
            self._spark = spark
            self._stack.enter_context(job_control.batch_jobs(spark, self.batch_id))
            over = threading.Event()
            self._stack.callback(over.set)
            threading.Thread(target=self._watch, args=(spark, over), name="watch the claim", daemon=True).start()
        self._is_read = True
        self._frame = frame = self._read(spark, min_partitions)
        return frame

    def begin_processing(self) -> None:
        """Check that the `ranges` may be processed now. Call it before you read them in another way than with `read`.

        Raises:
            BatchAbortedError: the claim is lost, or the run has died.
        """
        self.check()
        self._is_read = True

    def finish(self) -> None:
        """Let the run commit the batch. `submitted_batch` calls it at the end of its block.

        Raises:
            BatchAbortedError: nothing was read, the claim is lost, or the run has died.
        """
        self.check()
        if not self._is_read:
            raise BatchAbortedError(NOTHING_READ)
        write_private(self._folder / _DONE_FILE, "")

    def write(self, sink: Sink, frame: "DataFrame") -> WriteResult:
        """Write the result of the batch to a sink (effectively once). Call it once for the whole batch.

        Args:
            sink: the same sink that the run has.
            frame: the rows. The column `partition` assigns each row to a range.

        Returns:
            The ranges and the numbers of rows that the sink has written.

        Raises:
            ConfigurationError: `read` was not called before.
            SinkRejectedError: the sink cannot take the ranges or the rows.
            BatchAbortedError: the claim is lost, or the run has died.
        """
        if self._spark is None:
            raise ConfigurationError(
                f"write() was called before read() for batch {self.batch_id} of topic {self.topic!r}: call read() first"
            )
        spark = self._spark
        self.check()
        self._written = frame
        outcome = sink.write(frame, self.ranges, lambda: reader.offsets_read(self._read(spark)), self.check)
        told = {
            "taken": [asdict(each) for each in outcome.taken],
            "skipped": [asdict(each) for each in outcome.skipped],
            "rows": dict(outcome.rows),
            "note": outcome.note,
        }
        write_private(self._folder / _OUTCOME_FILE, json.dumps(told))
        return outcome

    def failing_record(self, error: Exception) -> FailingRecordError | None:
        """Return the error that names the record that makes Spark fail with `error`, or None if none was found.

        Args:
            error: the error that Spark raised.
        """
        spark, frame = self._spark, self._frame
        if spark is None or frame is None:
            return None

        def read_part(offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
            return reader.read_part(spark, self._kafka_options, self.topic, offsets)

        check = self._check_handed_over
        return find_failing_record(error, frame, self.ranges, read_part, check, written=self._written)

    def _read(self, spark: "SparkSession", min_partitions: int | None = None) -> "DataFrame":
        offsets = {range_.partition: (range_.first_readable, range_.end) for range_ in self.ranges}
        return reader.read_ranges(spark, self._kafka_options, self.topic, offsets, min_partitions=min_partitions)

    def _listen(self) -> dict[str, str]:
        try:
            told = json.loads(listen(self._folder / KAFKA_PIPE, self._check_handed_over))
        except FileNotFoundError as error:
            raise _taken_back(self._folder) from error
        return {str(name): str(value) for name, value in told.items()}

    def _watch(self, spark: "SparkSession", over: threading.Event) -> None:
        while not over.wait(_POLL_S):
            try:
                self._check_handed_over()
            except BatchAbortedError as lost:
                job_control.cancel(spark, self.batch_id, str(lost))
                return


@contextmanager
def submitted_batch(environment: Mapping[str, str] = os.environ) -> Iterator[SubmittedBatch]:
    """Yield the batch for which a run has submitted this script, for use in a `with` block.

    The run commits only if the block has read the batch (`read`, `begin_processing`) and ended without an error. Spark
    jobs in the block belong to the batch.

    Args:
        environment: the environment variables; by default those of this process.

    Yields:
        The batch.

    Raises:
        ConfigurationError: this script was not submitted by a run with `marshal_dagster.handed_over`.
        BatchAbortedError: the run does not hold the batch any more, or the block has not read it. The end of the block
            raises it too, so that the script fails.
        FailingRecordError: Spark failed because of the records that the message names.

    Example:
        ```python
        with submitted_batch() as batch:
            batch.read(spark).groupBy("topic").count().write.parquet("/data/counts")
        ```
    """
    folder = environment.get(BATCH_VARIABLE)
    if folder is None:
        raise ConfigurationError(
            f"{BATCH_VARIABLE} is not set, so this script has no batch: let a run submit it with "
            "marshal_dagster.handed_over"
        )
    (Path(folder) / SETTINGS_FILE).unlink(missing_ok=True)  # this script's Spark has read it
    handed = BatchManifest.read(Path(folder))
    with ExitStack() as stack:
        batch = SubmittedBatch(Path(folder), handed, stack)
        try:
            yield batch
        except Exception as error:
            if named := batch.failing_record(error):
                raise named from error
            raise
        batch.finish()
