"""The status of runs by Dagster's storage: ended, queued or alive.

A member may revoke claims or stop its batch early because of what Dagster reports. Who owns a partition is decided by
the coordination log alone.
"""

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
"""The statuses of runs that have ended."""
UNFINISHED: Final = frozenset(DagsterRunStatus) - FINISHED
"""The statuses of runs that have not ended."""
NOT_LAUNCHED: Final = frozenset({DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED})
"""The statuses of runs without a process."""
MAY_CLAIM: Final = UNFINISHED - {DagsterRunStatus.CANCELING}
"""The statuses of runs that may still claim partitions."""
_ASK_AGAIN_AFTER_S: Final = 1.0


class EndedRunDetector:
    """Decides whether an owner is dead: this Dagster instance has its run, and the run has ended.

    An owner whose run is not in this instance, for example one of another deployment, does not count as dead. The
    answer for an ended run is cached. For an unfinished run Dagster is queried again after a second.
    """

    def __init__(self, instance: DagsterInstance) -> None:
        """Use the run storage of `instance`."""
        self._instance = instance
        self._over: set[str] = set()
        self._last_query_s: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool:
        """Return whether `owner` is dead. Never raises: if the storage does not answer, the owner is not dead."""
        run_id = run_of(owner.instance)
        if not run_id or run_id in self._over:
            return bool(run_id)
        now_s = time.monotonic()
        if now_s - self._last_query_s.get(run_id, -_ASK_AGAIN_AFTER_S) < _ASK_AGAIN_AFTER_S:
            return False
        self._last_query_s[run_id] = now_s
        try:
            run = self._instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - each storage has its own exceptions
            logger.warning(
                "Dagster's storage did not answer whether run %s has ended, so its claims are not revoked now: %s",
                run_id,
                error,
            )
            return False
        if run is None or run.status not in FINISHED:
            return False
        self._over.add(run_id)
        return True


def run_is_over(instance: DagsterInstance, run_id: str) -> Callable[[], str | None]:
    """Return a function that returns a reason to stop if Dagster reports the run as ended or being canceled.

    Errors of the storage are no reason to stop.
    """

    def reason() -> str | None:
        try:
            run = instance.get_run_by_id(run_id)
        except Exception as error:  # noqa: BLE001 - each storage has its own exceptions
            logger.debug("Dagster's storage did not answer a query about this run: %s", error)
            return None
        if run is None or run.status in MAY_CLAIM:
            return None
        return f"Dagster reports that run {run_id} is {run.status.value.lower()}"

    return reason


def run_worker_ended(instance: DagsterInstance, run_id: str) -> Callable[[], str | None] | None:
    """Return a function that returns a reason to stop if the run worker of this step has ended.

    Return None unless the step runs in a child process of the run worker. If it runs in the run worker itself, the
    parent process is the code server, which may be replaced at any time. Dagster records the process of a step before
    it starts.
    """
    parent = multiprocessing.parent_process()
    if parent is None or str(os.getpid()) not in _step_workers(instance, run_id):
        return None
    return lambda: None if parent.is_alive() else f"the run worker that started this step (pid {parent.pid}) has ended"


def _step_workers(instance: DagsterInstance, run_id: str) -> set[str]:
    """Return the ids of the child processes in which steps of the run were started."""
    found = set()
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.STEP_WORKER_STARTED):
        event = entry.dagster_event
        pid = event and event.engine_event_data.metadata.get("pid")
        if pid is not None:
            found.add(str(pid.value))
    return found
