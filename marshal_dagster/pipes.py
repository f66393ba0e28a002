"""Processing of a claimed batch in a separate script that is submitted to Spark, for example through Dagster Pipes.

The run holds the claims and sends the heartbeats. It commits if the `with` block ends without an error. The script
reads the batch with `marshal_dagster.batches.submitted`.
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
    """How to start the script of a batch. Neither the command nor the environment contains a secret.

    `handed_over` yields it; see the example there.
    """

    folder: Path
    """The folder through which run and script exchange the batch. Only this user can read it."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the script needs in addition to those of this process."""
        return {BATCH_VARIABLE: str(self.folder), "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}

    def command(
        self, script: str | os.PathLike[str], *arguments: str, settings: Mapping[str, str] | None = None
    ) -> Sequence[str]:
        """Return the command that submits `script` with PySpark's own `spark-submit` and waits for it.

        The Spark settings are written to a file, which the script removes when it starts. So call this method again for
        each attempt.

        Args:
            script: The path of the Python script.
            *arguments: The arguments of the script.
            settings: Spark settings that replace or extend `spark_settings`.

        Returns:
            The command and its arguments.

        Raises:
            UnavailableError: The Kafka connector cannot be downloaded.
        """
        name = Path(script).stem
        properties = self.folder / SETTINGS_FILE
        write_private(properties, render_properties(with_connector(spark_settings(app_name=name, extra=settings))))
        submit = str(spark_home() / "bin" / "spark-submit")
        return [submit, "--properties-file", str(properties), os.fspath(script), *arguments]


@contextmanager
def handed_over(batch: ClaimedBatch, claimer: "ClaimerResource | KafkaConnection") -> Iterator[Submission]:
    """Hand a batch over to a script that you submit to Spark inside the `with` block.

    The script runs on this machine (Spark's client mode) and reads the batch with `submitted_batch`. If the claim is
    lost or the data topic is re-created, the script's Spark jobs are cancelled and the script fails. Before its sink
    commits, the script checks with this run that the claim is still held.

    Args:
        batch: The batch, inside its own `with` block.
        claimer: The `ClaimerResource` of the batch, or the connection to its data topic.

    Yields:
        The submission, with the command and the environment of the script.

    Raises:
        ConfigurationError: The delivery mode is `at_most_once`. That mode checks the Spark session before the commit,
            which is impossible if the session is in another process.
        BatchAbortedError: In `at_least_once`, no script read the batch and reached the end of its block.
        MarshalError: As in `batch.begin_processing`.

    Example:
        ```python
        with claimer.claimed_batch(context, topic="orders") as batch:
            if batch.ranges:
                with handed_over(batch, claimer) as submission:
                    command = submission.command("orders_script.py", settings={"spark.master": "local[*]"})
                    pipes.run(context=context, command=[*command], env=submission.environment)
        ```
    """
    if batch.mode is DeliveryMode.AT_MOST_ONCE:
        raise ConfigurationError(
            f"batch {batch.batch_id}: a batch cannot be handed over to a script in at_most_once, because the Spark "
            "session must be checked before the commit. Process the batch in the run (batch.read)"
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
                f"batch {batch.batch_id}: nothing is committed, because no script has processed the batch to the end. "
                "Inside handed_over(), submit a script that uses submitted_batch(), and wait until it ends with exit "
                "code 0"
            )
        outcome = read_outcome(folder)
        if outcome is not None:
            batch.outcome = outcome


def _watch(batch: ClaimedBatch, folder: Path, over: threading.Event) -> None:
    """Check every second, and at each request of the script, that the batch is still held; if not, take it back."""
    look_at_s = 0.0
    while not over.wait(_ANSWER_WITHIN_S):
        requests = questions(folder)
        if not requests and time.monotonic() < look_at_s:
            continue
        look_at_s = time.monotonic() + _LOOK_EVERY_S
        try:
            batch.check()
        except UnavailableError:  # the heartbeats decide whether an outage ends the batch
            continue
        except Exception as error:  # noqa: BLE001 - after any error the batch is no longer monitored
            logger.warning("batch %s is taken back from its script: %s", batch.batch_id, error)
            take_back(folder)
            return
        for request in requests:
            request.unlink(missing_ok=True)
