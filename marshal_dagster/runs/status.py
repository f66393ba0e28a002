"""Which runs are over, queued or alive, by Dagster's storage."""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Final

from dagster import DagsterEventType, DagsterInstance, DagsterRunStatus

from marshal_dagster.protocol.state import Owner
from marshal_dagster.runs.names import run_of

logger = logging.getLogger(__name__)
FINISHED: Final = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})
UNFINISHED: Final = frozenset(DagsterRunStatus) - FINISHED
NOT_LAUNCHED: Final = frozenset({DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED})
MAY_CLAIM: Final = UNFINISHED - {DagsterRunStatus.CANCELING}
"""Statuses of runs: those that are over, the others, and of these those without a process, and those that may claim."""
_ASK_AGAIN_AFTER_S: Final = 1.0


class EndedRunDetector:
    """Says of an owner that it is dead when this Dagster instance knows its run and the run is over.

    A run that the instance does not know (of another deployment, say) is not dead. What a finished run claimed stays
    dead; about one that goes on Dagster is asked again after a second.
    """

    def __init__(self, instance: DagsterInstance) -> None:
        """Ask `instance`."""
        self._instance = instance
        self._over: set[str] = set()
        self._asked_s: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool:
        """Return whether `owner` is dead. Never raises: a storage that does not answer knows of no run."""
        run_id = run_of(owner.instance)
        if not run_id or run_id in self._over:
            return bool(run_id)
        now_s = time.monotonic()
        if now_s - self._asked_s.get(run_id, -_ASK_AGAIN_AFTER_S) < _ASK_AGAIN_AFTER_S:
            return False
        self._asked_s[run_id] = now_s
        try:
            run = self._instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - every storage raises its own
            logger.warning("Dagster was asked about run %s of another member and did not answer: %s", run_id, error)
            return False
        if run is None or run.status not in FINISHED:
            return False
        self._over.add(run_id)
        return True


def run_is_over(instance: DagsterInstance, run_id: str) -> Callable[[], str | None]:
    """Give a reason to stop: Dagster says that the run is over or being canceled. A storage's errors are none."""

    def reason() -> str | None:
        try:
            run = instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - every storage raises its own
            logger.debug("Dagster was asked about this run and did not answer: %s", error)
            return None
        if run is None or run.status in MAY_CLAIM:
            return None
        return f"Dagster says that run {run_id} is {run.status.value.lower()}"

    return reason


def run_worker_ended(instance: DagsterInstance, run_id: str) -> Callable[[], str | None] | None:
    """Give a reason to stop for a step in a child process of the run worker: the run worker has ended; None elsewhere.

    Where the step runs in the run worker itself, that one's parent is the code server, which may be replaced at any
    time. Dagster wrote down in which process it started the step, before it did.
    """
    parent = multiprocessing.parent_process()
    if parent is None or str(os.getpid()) not in _step_workers(instance, run_id):
        return None
    return lambda: None if parent.is_alive() else f"the run worker that started this step (pid {parent.pid}) has ended"


def _step_workers(instance: DagsterInstance, run_id: str) -> set[str]:
    """Give the process ids of the child processes in which steps of the run were started."""
    found = set()
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.STEP_WORKER_STARTED):
        event = entry.dagster_event
        pid = event and event.engine_event_data.metadata.get("pid")
        if pid is not None:
            found.add(str(pid.value))
    return found
