"""A claimed batch that a script of its own processes, submitted to Spark, as with Dagster Pipes.

The run that submits it holds the claim and sends the heartbeats; it commits when the block ends well.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster._internal.processes import mark_of
from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.batches.submitted import (
    BATCH_VARIABLE,
    KAFKA_PIPE,
    SETTINGS_FILE,
    BatchManifest,
    is_done,
    questions,
    read_outcome,
    take_back,
)
from marshal_dagster.errors import BatchAbortedError, ConfigurationError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.spark.process_files import spark_home, write_private
from marshal_dagster.spark.secret_pipe import telling
from marshal_dagster.spark.session import spark_settings, with_connector

if TYPE_CHECKING:
    from marshal_dagster.resources.claimer import ClaimerResource

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0
_ANSWER_WITHIN_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Submission:
    """How to start the script: neither the command nor the environment holds a secret."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the script's process needs beside this one's environment."""
        return {BATCH_VARIABLE: str(self.folder), "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}

    def command(
        self, script: str | os.PathLike[str], *arguments: str, settings: Mapping[str, str] | None = None
    ) -> Sequence[str]:
        """Give the command that submits `script` with the Spark that PySpark ships, which waits for it.

        `settings` change those of `spark_settings`; the session that the script starts has them. They stand in a file
        that the script removes when it begins: call this for each attempt. Raises `UnavailableError` when the connector
        cannot be fetched.
        """
        name = Path(script).stem
        properties = self.folder / SETTINGS_FILE
        write_private(properties, render_properties(with_connector(spark_settings(app_name=name, extra=settings))))
        submit = str(spark_home() / "bin" / "spark-submit")
        return [submit, "--properties-file", str(properties), os.fspath(script), *arguments]


@contextmanager
def handed_over(batch: ClaimedBatch, claimer: "ClaimerResource | KafkaConnection") -> Iterator[Submission]:
    """Take the permission to process `batch` and hand it over to the script that is submitted in the block.

    The script reads it with `marshal_dagster.batches.submitted.submitted_batch`, on this machine (client mode). When
    the claim is lost meanwhile, or the data topic made anew, the script's Spark jobs are cancelled and it fails; before
    its sink commits it asks this run. `claimer` is the resource of the batch, or the connection to its data. Raises
    `ConfigurationError` in at most once, where a session must be seen to run no task twice before anything is
    committed, what `batch.begin_processing` raises, and in at least once `BatchAbortedError` at the end when no script
    has read the batch and come to the end of its own block.
    """
    if batch.mode is DeliveryMode.AT_MOST_ONCE:
        raise ConfigurationError(
            "delivery is at_most_once: a batch is not handed over to a script, whose session cannot be checked before "
            "the commit; process it in the run (batch.read)"
        )
    batch.begin_processing()
    with tempfile.TemporaryDirectory(prefix="marshal-batch-") as name:
        folder = Path(name)
        BatchManifest(
            batch_id=batch.batch_id,
            topic=batch.request.topic,
            ranges=batch.ranges,
            launcher=mark_of(os.getpid()),
        ).write(folder)
        over = threading.Event()
        watch = threading.Thread(target=_watch, args=(batch, folder, over), name=f"watch {batch.batch_id}", daemon=True)
        watch.start()
        try:
            connection = claimer if isinstance(claimer, KafkaConnection) else claimer.data()
            with telling(folder / KAFKA_PIPE, json.dumps(connection.spark_options())):
                yield Submission(folder)
        finally:
            take_back(folder)
            over.set()
            watch.join()
        if batch.mode is DeliveryMode.AT_LEAST_ONCE and not is_done(folder):
            raise BatchAbortedError(
                f"batch {batch.batch_id}: no script has read it and come to the end of its block, so nothing is "
                "committed. Submit one in the block of handed_over(), wait for it, see that its exit code is 0, and "
                "have it read the batch in a block of submitted_batch()"
            )
        outcome = read_outcome(folder)
        if outcome is not None:
            batch.outcome = outcome


def _watch(batch: ClaimedBatch, folder: Path, over: threading.Event) -> None:
    """Look, each second and when the script asks, whether the batch is held still; take it back once it is not."""
    look_at_s = 0.0
    while not over.wait(_ANSWER_WITHIN_S):
        requests = questions(folder)
        if not requests and time.monotonic() < look_at_s:
            continue
        look_at_s = time.monotonic() + _LOOK_EVERY_S
        try:
            batch.check()
        except UnavailableError:  # the heartbeats decide what an outage means
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch is not watched any more
            logger.warning("batch %s is taken back from its script: %s", batch.batch_id, error)
            take_back(folder)
            return
        for request in requests:
            request.unlink(missing_ok=True)
