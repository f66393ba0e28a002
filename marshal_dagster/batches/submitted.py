"""A claimed batch in a script of its own, that a run has submitted to Spark and waits for.

The run holds the claim, sends the heartbeats and commits (`marshal_dagster.pipes`); it hands over a folder that this
user alone can read, named in the script's environment, and tells the connection's secrets through a pipe in it: killed,
they leave no secret behind. The script needs no Dagster:

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
"""The settings that the script's session starts with; they may hold secrets."""
KAFKA_PIPE: Final = "kafka"
"""The pipe through which the options of the Kafka connection are told."""

_BATCH_FILE: Final = "batch.json"
_OUTCOME_FILE: Final = "outcome.json"
_DONE_FILE: Final = "done"
_QUESTION: Final = "asked-"
_POLL_S: Final = 0.5
_ANSWER_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class BatchManifest:
    """What the script is told of its batch; taken back by removing the file, when the claim is lost."""

    batch_id: str
    topic: str
    ranges: tuple[ClaimedRange, ...]
    launcher: ProcessMark
    """The run's process, which sends the heartbeats."""

    def write(self, folder: Path) -> None:
        """Put it into `folder`."""
        write_private(folder / _BATCH_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it. Raises `BatchAbortedError` when it was taken back already."""
        try:
            told = json.loads((folder / _BATCH_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise _taken_back(folder) from error
        ranges = tuple(ClaimedRange(**range_) for range_ in told["ranges"])
        return cls(**told | {"ranges": ranges, "launcher": ProcessMark(**told["launcher"])})

    @property
    def has_launcher(self) -> bool:
        """Whether the run's process lives."""
        return is_alive(self.launcher)


def _taken_back(folder: Path) -> BatchAbortedError:
    return BatchAbortedError(f"the batch of {folder} was taken back by the run that submitted it")


def take_back(folder: Path) -> None:
    """Have the script stop: the claim is lost."""
    (folder / _BATCH_FILE).unlink(missing_ok=True)


def questions(folder: Path) -> list[Path]:
    """Give what scripts wait for: that the run looks whether the batch is still theirs, and then removes these."""
    return list(folder.glob(f"{_QUESTION}*"))


def read_outcome(folder: Path) -> WriteResult | None:
    """Give what the script's sink took; None if it wrote none."""
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
    """Tell whether a script has read the batch and come to the end of its block."""
    return (folder / _DONE_FILE).exists()


class SubmittedBatch:
    """The batch that this script was submitted for."""

    def __init__(self, folder: Path, handed: BatchManifest, stack: ExitStack) -> None:
        self.batch_id = handed.batch_id
        self.topic = handed.topic
        self.ranges: Sequence[ClaimedRange] = handed.ranges
        self._folder = folder
        self._handed = handed
        self._kafka_options: Mapping[str, str] = self._listen()
        self._stack = stack
        self._spark: SparkSession | None = None
        self._is_read = False
        self._frame: DataFrame | None = None
        """What was read last."""
        self._written: DataFrame | None = None

    def check(self) -> None:
        """Have the run look whether the claims hold and the data topic is the same: call it before touching an output.

        Raises `BatchAbortedError` when it is not so, or the run has died; the run says why.
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
        """Raise `BatchAbortedError` when the run has taken the batch back, or has died."""
        if not self._handed.has_launcher:
            shutil.rmtree(self._folder, ignore_errors=True)  # nobody else is left to do it
            raise BatchAbortedError(f"the run that submitted batch {self.batch_id} has died: its claim goes stale")
        BatchManifest.read(self._folder)

    def read(self, spark: "SparkSession", *, min_partitions: int | None = None) -> "DataFrame":
        """Give a frame over exactly the ranges: key, value, topic, partition, offset, timestamp, headers.

        The frame reads Kafka anew for each action on it. `min_partitions` splits the reading into at least so many
        tasks (by default one for each Kafka partition). Its Spark jobs are cancelled when the claim is lost. Raises
        `ConfigurationError` for a session that cannot be used, and what `check` raises.
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
        """Say that a reader of your own reads the ranges, instead of `read`. Raises what `check` raises."""
        self.check()
        self._is_read = True

    def finish(self) -> None:
        """Let the run commit: `submitted_batch` does so at the end of its block.

        Raises `BatchAbortedError` when nothing was read, and what `check` raises.
        """
        self.check()
        if not self._is_read:
            raise BatchAbortedError(NOTHING_READ)
        write_private(self._folder / _DONE_FILE, "")

    def write(self, sink: Sink, frame: "DataFrame") -> WriteResult:
        """Hand the result to the sink that the run was given too, once for the whole batch (effectively once).

        Raises `SinkRejectedError`, and what `check` raises.
        """
        if self._spark is None:
            raise ConfigurationError("write() before read(): there is no result of this batch yet")
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
        """Return the error that names the record by which Spark failed with `error`; None if none is found."""
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
    """Give the batch that the run handed over to this script; its Spark jobs belong to it until the block ends.

    The run commits only what a script has read (`read`, `begin_processing`) in a block that ended well.
    Raises `FailingRecordError` in place of an error of Spark's that comes of a record. Raises `ConfigurationError`
    outside of such a script, `BatchAbortedError` when the run does not hold it any more: also at the end of the block,
    so that the script fails whose batch was lost meanwhile, or was not read.
    """
    folder = environment.get(BATCH_VARIABLE)
    if folder is None:
        raise ConfigurationError(
            f"{BATCH_VARIABLE} is not set: a script has a batch where a run submits it (marshal_dagster.handed_over)"
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
