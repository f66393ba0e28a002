"""What Spark's tasks share that get their rows as Arrow batches: the size of a batch, and errors for the driver.

It also has what makes the next task of a worker process begin sooner.

A task that raises loses its class on the way to the driver. So a task returns a known error as text, and the driver
raises it again.
"""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipimport import zipimporter

from marshal_dagster import errors
from marshal_dagster.errors import MarshalError
from marshal_dagster.spark.interrupts import changed_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT: Final = 0
_BATCH_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED_BYTES: Final = 2**31 - 1
"""The value with which Spark does not measure batches."""
_SPARKS_ARCHIVE: Final = re.compile(r"spark-core_.*\.jar|pyspark\.zip|py4j-.*\.zip")
"""The archives that Spark itself puts on the path of its Python workers."""


@contextmanager
def limited_batches(spark: "SparkSession", most_rows: int, *, is_size_known: bool = False) -> Iterator[None]:
    """Limit the rows of an Arrow batch during the block, so that a batch of large rows fits into memory.

    After an interrupt the limits stay until the session ends.

    Args:
        spark: The session.
        most_rows: The maximum number of rows of a batch. A smaller limit of the session stays.
        is_size_known: Whether `most_rows` follows from the size of the largest row. Spark's own limit of a batch's
            bytes is then switched off. To keep it, Spark measures the batch at each row, which takes several times
            as long as the rest if there are arrays or structs.
    """
    changed: dict[str, int] = {}
    if not 0 < int(spark.conf.get(_BATCH_ROWS) or _NO_LIMIT) <= most_rows:
        changed[_BATCH_ROWS] = most_rows
    if is_size_known and spark.conf.isModifiable(_BATCH_BYTES):  # Spark 3.5 has no such limit
        changed[_BATCH_BYTES] = _UNLIMITED_BYTES
    with changed_settings(spark, changed):
        yield


@contextmanager
def sparing_next_tasks() -> Iterator[None]:
    """Run a task in the block so that the next tasks of this worker process begin and end sooner.

    Before each task, PySpark's workers let Python read the directories of all archives on its path again. Those of
    Spark have thousands of files and do not change, and that takes 100 ms or more. So Python forgets their importers,
    and makes them again for the next import. After each task, the workers collect garbage, which takes 40 ms with the
    imported modules. So the objects that the process has now are excluded.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    try:
        yield
    finally:
        for path, importer in list(sys.path_importer_cache.items()):
            if isinstance(importer, zipimporter) and _SPARKS_ARCHIVE.fullmatch(Path(importer.archive).name):
                del sys.path_importer_cache[path]


def error_as_text(error: MarshalError) -> str:
    """Return the name of the error's public class, a blank, and its message."""
    kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    return f"{kind.__name__} {error}"


def error_from_text(text: str) -> MarshalError:
    """Return the error that `error_as_text` has made a text of."""
    name, _, message = text.partition(" ")
    error: MarshalError = getattr(errors, name)(message)
    return error
