"""A small replacement of Spark that runs the tasks of a job in processes, and of which tests can kill each."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self
from unittest.mock import patch

import psutil

from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.kafka import tasks
from tests.conditions import WITHIN_S, wait_until
from tests.task_races.worker import PRELOADED, STOPPED, Fault, run_task

if TYPE_CHECKING:
    from pyarrow import RecordBatch

FORKED: Final = multiprocessing.get_context("forkserver")
MOST_ATTEMPTS: Final = 4
"""How often a task of a cluster runs before its job fails."""


class TaskDiedError(Exception):
    """A task died, and its job fails."""


class LocalSession:
    """The part of a Spark session that the sink uses."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.conf = SimpleNamespace(get=settings.get, set=lambda *_: None, isModifiable=lambda _: False)
        self.sparkContext = SimpleNamespace(broadcast=Broadcast)

    def range(self, _: int) -> "LocalRows":
        """Return no rows: a check of the executors finds that nothing is missing."""
        return LocalRows(Processes(), [], Attempts())


@dataclass(frozen=True)
class Broadcast:
    """A value that each process gets with the task."""

    value: bytes

    def destroy(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class TaskProcess:
    """A process of a task."""

    process: ForkServerProcess
    results: "Connection[object, object]"
    run: str
    is_stopped: bool = False

    def receive(self) -> object:
        """Return what the process has sent, or None if it has died. Raise the task's error."""
        try:
            found = self.results.recv()
        except EOFError:
            return None
        if found == STOPPED:
            self.is_stopped = True
        return found

    def go_on(self) -> None:
        """Let a process that has stopped itself continue."""
        process = psutil.Process(self.process.pid)
        # It has reported that it is about to stop.
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
        self.is_stopped = False
        process.resume()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join(WITHIN_S)


class Processes:
    """All processes of tasks, and those that work on although their job has ended."""

    def __init__(self) -> None:
        self.left: list[TaskProcess] = []
        self._all: list[TaskProcess] = []
        self._lock = threading.Lock()
        # The condition of the real function needs a session.
        self._without_spark = patch.object(tasks, without_partitions.__name__, LocalRows.without)

    def __enter__(self) -> Self:
        FORKED.set_forkserver_preload(["__main__", *PRELOADED])
        self._without_spark.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that still run."""
        self._without_spark.stop()
        for process in self._all:
            with suppress(ProcessLookupError):
                process.kill()

    def start(self, task: bytes, rows: "Sequence[RecordBatch]", fault: Fault | None, run: str) -> TaskProcess:
        """Start a process of a run."""
        ours, its = FORKED.Pipe(duplex=False)
        process = FORKED.Process(target=run_task, args=(task, list(rows), fault, its), daemon=True)
        with self._lock:
            process.start()
            its.close()
            started = TaskProcess(process, ours, run)
            self._all.append(started)
        return started

    def leave(self, process: TaskProcess) -> None:
        """Note a process whose job does not wait for it."""
        with self._lock:
            self.left.append(process)

    def taken(self) -> list[TaskProcess]:
        """Return the processes that were left, and forget them."""
        with self._lock:
            found, self.left = self.left, []
        return found


@dataclass(frozen=True, slots=True)
class Attempts:
    """How a job runs its tasks."""

    run: str = ""
    """The name of the run."""
    faults: Callable[[int], Iterator[Fault | None]] = lambda _: iter(())
    """Returns the faults of the processes of the task with this number."""
    copies: int = 1
    """How many processes run an attempt of a task at the same time, as with speculative execution."""
    most: int = MOST_ATTEMPTS
    lost: Callable[[], None] = lambda: None
    """Called when a process has died or was stopped."""
    while_stopped: Callable[[], None] | None = None
    """Called while a process is stopped, which then continues. None: the job does not wait for such a process."""


@dataclass(frozen=True, slots=True)
class LocalRows:
    """A frame of which each task gets some batches of rows."""

    processes: Processes
    tasks: "Sequence[Sequence[RecordBatch]]"
    attempts: Attempts
    function: bytes = b""

    def without(self, done: Sequence[int]) -> "LocalRows":
        """Return the rows except those of the partitions `done`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pa.array(list(done), pa.int64())
        tasks = [
            [rows.filter(pc.invert(pc.is_in(rows.column(0), value_set=numbers))) for rows in task]
            for task in self.tasks
        ]
        return replace(self, tasks=tasks)

    def mapInArrow(self, function: object, _: str) -> "LocalRows":  # noqa: N802 - Spark's name
        """Return the results of a function on the rows."""
        return LocalRows(self.processes, self.tasks, self.attempts, pickle.dumps(function) if self.tasks else b"")

    def collect(self) -> list[Any]:
        """Run the tasks at the same time, and return the rows of all results."""
        if not self.tasks:
            return []
        with ThreadPoolExecutor(len(self.tasks)) as pool:
            found = list(pool.map(self._result, range(len(self.tasks))))
        if None in found:
            raise TaskDiedError("a task has died")
        return [SimpleNamespace(**row) for rows in found for row in rows or ()]

    def _result(self, task: int) -> list[dict[str, Any]] | None:
        """Return the result of a task: that of the first process that ends. None if the last process has died."""
        faults = self.attempts.faults(task)
        for _ in range(self.attempts.most):
            running = [
                self.processes.start(self.function, self.tasks[task], next(faults, None), self.attempts.run)
                for _ in range(self.attempts.copies)
            ]
            found = self._first(running)
            if found is not None:
                return found
        return None

    def _first(self, running: list[TaskProcess]) -> list[dict[str, Any]] | None:
        while running:
            for ready in wait([each.results for each in running], WITHIN_S):
                (process,) = (each for each in running if each.results is ready)
                found = process.receive()
                if isinstance(found, list):
                    running.remove(process)
                    for other in running:
                        self.processes.leave(other)
                    return found
                if isinstance(found, Exception):
                    raise found
                if process.is_stopped and self.attempts.while_stopped is not None:
                    self.attempts.while_stopped()
                    process.go_on()
                    continue
                running.remove(process)
                self.attempts.lost()
                if process.is_stopped:
                    self.processes.leave(process)
                    return None if not running else self._first(running)
        return None
