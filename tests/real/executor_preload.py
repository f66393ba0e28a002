"""Executes a run while the process starts from which run workers are forked, so that they share what Dagster loads.

In each worker the first run would import the database libraries and Dagster's migrations, which takes half a second.
"""

import tempfile
import threading

import dagster as dg

from tests.quick_dagster import import_migrations_once
from tests.quick_disk import write_quickly


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job(executor_def=dg.in_process_executor)
def first_run() -> None:
    """Let Dagster load what a run needs."""
    nothing()


import_migrations_once()
write_quickly()
with tempfile.TemporaryDirectory() as folder, dg.DagsterInstance.local_temp(folder) as instance:
    first_run.execute_in_process(instance=instance)
assert threading.active_count() == 1, "a process with threads cannot be forked safely"
