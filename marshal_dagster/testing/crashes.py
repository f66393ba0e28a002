"""Simulated crashes: the points at which a run can die, and the parts of a run that die with it."""

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

from marshal_dagster.coordination.log import Ack, Append, Chunk, CoordinationLog, LogIdentity
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.protocol.messages import ClaimingMessages, Heartbeat, PlanningRange, RangeDone, parse
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.sinks.sink import BeforeCommit, OffsetsRead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class CrashPoint(StrEnum):
    """A point of a batch at which a run can die, in the order in which a batch reaches them.

    To die in the middle of a function, call `crash` in it or in a test double that it uses.

    Example:
        ```python
        result = run_in_memory(orders_per_shop, {"orders": ["north"]}, crash_at=CrashPoint.AFTER_WRITE)
        assert [row["shop"] for row in result.rows] == ["north"]
        ```
    """

    AFTER_CLAIM = "after_claim"
    """The partitions are claimed, and nothing is read."""
    AFTER_READ = "after_read"
    """The batch is read, and the function is not called yet."""
    AFTER_PROCESS = "after_process"
    """The function has returned. What it has written itself is written; no sink has its rows, nothing is committed."""
    AFTER_PLAN = "after_plan"
    """The plan is in the coordination log. With a sink that is just before its write, otherwise before the read.

    For a function that gets rows instead of a frame of Spark it is before the function is called.
    """
    DURING_WRITE = "during_write"
    """The sink has the rows, and has not stored them yet. Only with a sink."""
    AFTER_WRITE = "after_write"
    """The sink has stored the rows, and the positions are not committed. Only with a sink."""
    AFTER_COMMIT = "after_commit"
    """The positions are committed. In at most once that is before the read."""


class SimulatedCrash(BaseException):
    """The simulated process of a run has died. Only `run_in_memory` catches it."""


class MortalProcess:
    """The simulated process of one run, which dies at a crash point, or when `crash` is called."""

    def __init__(self, crash_at: CrashPoint | None) -> None:
        self.crash_at: Final = crash_at
        self.is_dead = False
        self.opened: Final = ExitStack()
        """Closes what the run has opened, at its end, also if the process has died."""
        self._thread = threading.current_thread()

    def reach(self, point: CrashPoint) -> None:
        """Die if this is the crash point; also raise `SimulatedCrash` if the process is already dead."""
        self.require_alive()
        if point is self.crash_at:
            self.die()

    def require_alive(self) -> None:
        """Raise `SimulatedCrash` if the process is dead, or `UnavailableError` in a thread of it."""
        if not self.is_dead:
            return
        if threading.current_thread() is not self._thread:
            raise UnavailableError("this simulated process has crashed")
        raise SimulatedCrash

    def die(self) -> NoReturn:
        """End the process: no further call of it reaches Kafka or the sink."""
        self.is_dead = True
        raise SimulatedCrash


_running: Final[ContextVar[MortalProcess | None]] = ContextVar("running", default=None)
"""The simulated process of the present run."""
_all_running: Final[set[MortalProcess]] = set()
"""The simulated processes of all present runs."""


@contextmanager
def running(process: MortalProcess) -> Iterator[None]:
    """Make `process` the one that `crash` ends, also in threads that the run starts."""
    token = _running.set(process)
    _all_running.add(process)
    try:
        with process.opened:
            yield
    finally:
        _all_running.discard(process)
        _running.reset(token)


def _present_process() -> MortalProcess | None:
    """Return the simulated process of the present run; a thread does not inherit it, but usually only one runs."""
    all_running = list(_all_running)
    return _running.get() or (all_running[0] if len(all_running) == 1 else None)


def crash() -> NoReturn:
    """End the simulated process of the present run here, as SIGKILL would.

    Call it in a function that `run_in_memory` runs, or in a test double that the function uses. Each attempt calls it
    again, so crash in the first attempt only.

    Raises:
        ConfigurationError: `run_in_memory` is not running.

    Example:
        ```python
        def send(order):
            sent.append(order)
            if len(sent) == 2:
                crash()
        ```
    """
    process = _present_process()
    if process is None:
        raise ConfigurationError("crash() ends a run of run_in_memory, and none is running: call it in such a run")
    process.die()


class MortalLog:
    """The coordination log of a process that may die. It recognises plans and commits by their records."""

    def __init__(self, log: CoordinationLog, process: MortalProcess) -> None:
        self._log = log
        self._process = process
        self._plan_ends: dict[tuple[str, int], int] = {}

    @property
    def delivery_timeout_ms(self) -> int:
        """The delivery timeout of the log."""
        return self._log.delivery_timeout_ms

    def identity(self) -> LogIdentity:
        """Return the log's identity."""
        return self._alive().identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the log's bounds."""
        return self._alive().bounds(partitions)

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from these positions on."""
        self._alive().follow(positions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Yield the records up to `ends`."""
        return self._alive().read_until(ends, timeout_s)

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append records, and die after them if they are what the process crashes at."""
        acks = self._alive().append(records)
        for point in self._points(records):
            self._process.reach(point)
        return acks

    def purge(self) -> None:
        """Drop records that wait to be sent."""
        self._log.purge()

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _alive(self) -> CoordinationLog:
        self._process.require_alive()
        return self._log

    def _points(self, records: Sequence[Append]) -> set[CrashPoint]:
        points = set()
        for record in records:
            message = parse(record.value)
            if isinstance(message, ClaimingMessages):
                self._plan_ends[message.topic, message.partition] = message.plan_end
            if isinstance(message, ClaimingMessages | PlanningRange):
                points.add(CrashPoint.AFTER_PLAN)
            if isinstance(message, RangeDone) or (isinstance(message, Heartbeat) and self._commits(message)):
                points.add(CrashPoint.AFTER_COMMIT)
        return points

    def _commits(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat is the commit of a plan: its offset is the plan's end."""
        return self._plan_ends.get((beat.topic, beat.partition)) == beat.offset


class MortalSink:
    """The sink of a process that may die."""

    def __init__(self, sink: Sink, process: MortalProcess) -> None:
        self._sink = sink
        self._process = process

    def __repr__(self) -> str:
        return repr(self._sink)

    @property
    def supports_unordered_ranges(self) -> bool:
        """Whether the sink stores every range that it has."""
        return self._sink.supports_unordered_ranges

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Return what the sink would do with each range."""
        self._process.require_alive()
        return self._sink.verdicts(ranges)

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write to the sink; die when it has the rows, or after it has stored them, if the process crashes there."""
        self._process.require_alive()

        def checked() -> None:
            before_commit()
            self._process.reach(CrashPoint.DURING_WRITE)

        result = self._sink.write(frame, ranges, offsets_read, checked)
        self._process.reach(CrashPoint.AFTER_WRITE)
        return result

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return why the sink could not replace rows at these offsets, or None."""
        return self._sink.can_replace(ranges)


def mortal_function(function: Callable[..., Any], process: MortalProcess) -> Callable[..., Any]:
    """Return a function that calls `function`, and dies before or after it if the process crashes there."""

    @functools.wraps(function)  # errors name the user's function
    def processed(*arguments: Any) -> Any:  # noqa: ANN401 - the user's
        process.reach(CrashPoint.AFTER_READ)
        result = function(*arguments)
        process.reach(CrashPoint.AFTER_PROCESS)
        return result

    return processed
