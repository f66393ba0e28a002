"""Virtual time: processes made of greenlets, of which one runs at a time until it waits.

The library's code runs unchanged. Where it would wait for a broker, a lock or a thread, it switches to the scheduler,
which continues with the task that is due next. The same seed makes the same run.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import cached_property
from math import inf
from typing import Any, Final

from greenlet import getcurrent, greenlet

LEAST_MS: Final = 0.001
"""The shortest wait, so that time moves."""


class KilledError(BaseException):
    """The process is dead: its further actions have no effect."""


class Process:
    """A simulated process. It can be killed, or stopped for a while as by SIGSTOP."""

    def __init__(self, scheduler: "Scheduler", name: str) -> None:
        self.name = name
        self.is_dead = False
        self.runs_from_ms = 0.0
        """The time until which it is stopped."""
        self.tasks: dict[Task, None] = {}
        self.watchers: list[Task] = []
        """Tasks to wake when it has ended."""
        self.after_step: Callable[[], None] | None = None
        """Called after each of its steps."""
        self._scheduler = scheduler

    @cached_property
    def random(self) -> random.Random:
        """Return a random generator that is the same for two processes of the same name."""
        return random.Random(f"{self._scheduler.seed}/{self.name}")

    def spawn(self, work: Callable[[], object]) -> "Task":
        """Start `work` as a thread of this process."""
        return self._scheduler.spawn(self, work)

    def stop(self, duration_ms: float) -> None:
        """Stop all its threads for a while, starting when the current one waits next."""
        until_ms = min(self._scheduler.now_ms + duration_ms, self._scheduler.stops_end_ms)
        self.runs_from_ms = max(self.runs_from_ms, until_ms)

    def kill(self) -> None:
        """Kill the process with all its threads; raise `KilledError` in the calling thread."""
        self.is_dead = True
        for task in tuple(self.tasks):
            self._scheduler.wake(task)
        self.require_alive()

    def wait_until_over(self) -> None:
        """Wait, in a task of another process, until all its threads have ended."""
        task = self._scheduler.current
        if self.tasks and task is not None:
            self.watchers.append(task)
            self._scheduler.park()

    def may_go_on(self) -> bool:
        """Return whether it is neither dead nor stopped."""
        return not self.is_dead and self.runs_from_ms <= self._scheduler.now_ms

    def require_alive(self) -> None:
        """Raise `KilledError` in a thread of a dead process."""
        if self.is_dead and self._scheduler.current is not None and self._scheduler.current.process is self:
            raise KilledError


class Task:
    """A thread of a process."""

    __slots__ = ("greenlet", "is_over", "joiners", "process", "ticket", "work")

    def __init__(self, process: Process, work: Callable[[], object], carrier: greenlet) -> None:
        self.process = process
        self.work = work
        self.greenlet = carrier
        self.ticket = 0
        """Counts how often it was scheduled, so that only the last wake-up request counts."""
        self.is_over = False
        self.joiners: list[Task] = []


class Scheduler:
    """Runs tasks in the order of virtual time; `now_ms` counts from 0."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ms = 0.0
        self.current: Task | None = None
        self.failures: list[tuple[Process, BaseException]] = []
        """Unexpected errors that ended tasks."""
        self.steps = 0
        self.stops_end_ms = inf
        """No process is stopped after this time."""
        self.is_stopped = False
        """Set to end the run."""
        self._tasks: dict[Task, None] = {}
        self._until_ms = 0.0
        self._loop = getcurrent()
        self._idle: list[greenlet] = []
        """Greenlets of tasks that are over, for use by other tasks, because creating a greenlet is slow."""
        self._queue: list[tuple[float, int, int, Task]] = []
        self._count = 0

    def spawn(self, process: Process, work: Callable[[], object]) -> Task:
        """Start a task now."""
        task = Task(process, work, self._idle.pop() if self._idle else greenlet(self._serve, parent=self._loop))
        process.tasks[task] = None
        self._tasks[task] = None
        self.wake(task)
        return task

    def wake(self, task: Task, after_ms: float = 0.0) -> None:
        """Schedule `task` after a delay; this replaces an earlier request."""
        task.ticket += 1
        self._count += 1
        heapq.heappush(self._queue, (self.now_ms + after_ms, self._count, task.ticket, task))

    def sleep(self, duration_ms: float) -> None:
        """Wait in the current task."""
        task, queue = self._waiting(), self._queue
        after_ms = duration_ms if duration_ms > LEAST_MS else LEAST_MS  # noqa: FURB136 - max() is dear here
        until_ms = self.now_ms + after_ms
        is_next = not queue or queue[0][0] > until_ms
        if is_next and task.process.runs_from_ms <= until_ms <= self._until_ms and not self.is_stopped:
            task.ticket += 1
            self._end_step(task.process)
            if not self.is_stopped:
                self.now_ms = until_ms
                return
        self.wake(task, after_ms)
        self._switch(task)

    def park(self, timeout_ms: float | None = None) -> None:
        """Wait in the current task until it is woken or the timeout ends."""
        if timeout_ms is not None:
            self.sleep(timeout_ms)
            return
        self._switch(self._waiting())

    def run(self, until_ms: float) -> None:
        """Run until virtual time `until_ms`, or until no task is left."""
        self._until_ms = until_ms
        self._go_on_from(None)
        while self.current is not None:
            self.current.greenlet.switch()
        self.now_ms = max(self.now_ms, until_ms)

    def kill_all(self) -> None:
        """End all tasks that still run or wait."""
        for task in tuple(self._tasks):
            task.process.is_dead = True
            self.wake(task)
        self.is_stopped = False
        self.run(self.now_ms)
        assert not self._tasks
        while self._idle:
            self._idle.pop().switch()

    def _waiting(self) -> Task:
        task = self.current
        if task is None:
            raise RuntimeError("only a task can wait")
        if task.process.is_dead:
            raise KilledError
        return task

    def _switch(self, task: Task) -> None:
        """End a step of the current task and switch to the one that is due next, which may be the same."""
        self._go_on_from(task.process)
        if self.current is not task:
            self._hand_over()
        if task.process.is_dead:
            raise KilledError

    def _hand_over(self) -> None:
        """Switch to the current task's greenlet; a task that has not begun is started by the loop."""
        following = self.current
        has_begun = following is not None and following.greenlet
        (has_begun or self._loop).switch()

    def _serve(self) -> None:
        """Run one task after another in this greenlet."""
        carrier = getcurrent()
        while True:
            task = self.current
            if task is None:
                return
            self._run(task)
            self._idle.append(carrier)
            self._go_on_from(task.process)
            self._hand_over()

    def _go_on_from(self, process: Process | None) -> None:
        """End a step of `process` and make the task that is due next the current one, or none if time is over."""
        self.current = None
        if process is not None:
            self._end_step(process)
        queue, until_ms = self._queue, self._until_ms
        while queue and queue[0][0] <= until_ms and not self.is_stopped:
            at_ms, count, ticket, task = heapq.heappop(queue)
            if ticket != task.ticket or task.is_over:
                continue
            process = task.process
            if process.runs_from_ms > at_ms and not process.is_dead:
                heapq.heappush(queue, (process.runs_from_ms, count, ticket, task))
                continue
            if at_ms > self.now_ms:  # noqa: PLR1730 - max() is dear here
                self.now_ms = at_ms
            self.current = task
            return

    def _end_step(self, process: Process) -> None:
        self.steps += 1
        if process.after_step is not None:
            process.after_step()

    def _run(self, task: Task) -> None:
        try:
            if not task.process.is_dead:
                task.work()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is reported, whatever it is
            self.failures.append((task.process, error))
        task.is_over = True
        task.process.tasks.pop(task, None)
        self._tasks.pop(task, None)
        for joiner in task.joiners:
            self.wake(joiner)
        if not task.process.tasks:
            for watcher in task.process.watchers:
                self.wake(watcher)


class SimulatedRLock:
    """Replaces `threading.RLock` for the tasks of one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: deque[Task] = deque()

    @property
    def is_held(self) -> bool:
        """Return whether a task holds it."""
        return self._depth > 0

    def __enter__(self) -> bool:
        task = self._scheduler.current
        if self._depth and self._owner is not task:
            self._wait(task)
        self._owner = task
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiters:
                self._scheduler.wake(self._waiters.popleft())

    def _wait(self, task: Task | None) -> None:
        assert task is not None
        while self._depth:
            self._waiters.append(task)
            self._scheduler.park()


class SimulatedEvent:
    """Replaces `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it and wake the waiting tasks."""
        self._is_set = True
        for task in self._waiters:
            self._scheduler.wake(task)
        self._waiters.clear()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set or the timeout ends."""
        if not self._is_set and timeout_s > 0:
            task = self._scheduler.current
            assert task is not None
            self._waiters.append(task)
            self._scheduler.park(timeout_s * 1_000)
            if task in self._waiters:
                self._waiters.remove(task)
        return self._is_set


class SimulatedThread:
    """Replaces `threading.Thread`."""

    def __init__(self, scheduler: Scheduler, work: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._scheduler = scheduler
        self._work = lambda: work(*args)
        self._task: Task | None = None

    def start(self) -> None:
        """Start the thread."""
        assert self._scheduler.current is not None
        self._task = self._scheduler.current.process.spawn(self._work)

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended or the timeout ends."""
        task = self._scheduler.current
        if self._task is not None and not self._task.is_over:
            assert task is not None
            self._task.joiners.append(task)
            self._scheduler.park(timeout_s * 1_000)
            if task in self._task.joiners:
                self._task.joiners.remove(task)


class SimulatedThreading:
    """The part of the module `threading` that the library uses; `scheduler` is that of the current run."""

    scheduler: Scheduler

    def RLock(self) -> SimulatedRLock:  # noqa: N802 - as in `threading`
        """Create a lock."""
        return SimulatedRLock(self.scheduler)

    Lock = RLock

    def Event(self) -> SimulatedEvent:  # noqa: N802 - as in `threading`
        """Create an event."""
        return SimulatedEvent(self.scheduler)

    def Thread(  # noqa: N802 - as in `threading`
        self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool
    ) -> SimulatedThread:
        """Create a thread."""
        del name, daemon
        return SimulatedThread(self.scheduler, target, args)
