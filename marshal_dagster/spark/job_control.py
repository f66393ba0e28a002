"""Control of the Spark jobs of one batch: cancel them together from another thread, and read their progress.

Jobs that a thread starts inside `batch_jobs` get the batch's job tag. Spark passes the tag to its own threads
(broadcasts, subqueries, adaptive execution). A thread of the user's function inherits it only if it is a
`pyspark.InheritableThread`. On a Spark Connect server (`connect`) operations have the tag.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from marshal_dagster.spark import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_DESCRIPTION = "spark.job.description"
_INTERRUPT = "spark.job.interruptOnCancel"
# A cancellation affects only running jobs, so it is repeated at this interval for jobs that the batch starts later.
_CANCEL_AGAIN_AFTER_S = 0.2
_NO_SUCH_METHOD = "cancelJobsWithTag([class java.lang.String, class java.lang.String]) does not exist"

_lock = threading.Lock()
_open: dict[str, threading.Event] = {}
"""The batches of this process by tag; the event is set when the batch leaves `batch_jobs`."""
_cancelled: set[str] = set()


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a batch's running jobs: the tasks of all stages that Spark has planned so far."""

    active_stages: int
    tasks_done: int
    tasks_total: int

    def __str__(self) -> str:
        return f"{self.tasks_done} of {self.tasks_total} tasks done, {self.active_stages} stages running"


@contextmanager
def batch_jobs(spark: "SparkSession", batch_id: str) -> Iterator[None]:
    """Tag all Spark jobs that this thread starts inside the block, so that `cancel` and `progress` find them.

    Raises `ValueError` if the jobs of this batch are already tagged.
    """
    tag = _tag(batch_id)
    with _lock:
        if tag in _open:
            raise ValueError(f"the jobs of batch {batch_id} are already tagged")
        left = _open[tag] = threading.Event()
    try:
        with connect.tagged(spark, tag) if connect.is_connect(spark) else _tagged(spark, tag, batch_id):
            yield
    finally:
        with _lock:
            del _open[tag]
            _cancelled.discard(tag)
        left.set()


@contextmanager
def _tagged(spark: "SparkSession", tag: str, batch_id: str) -> Iterator[None]:
    context = spark.sparkContext
    description, interrupt = context.getLocalProperty(_DESCRIPTION), context.getLocalProperty(_INTERRUPT)
    context.addJobTag(tag)
    context.setLocalProperty(_DESCRIPTION, description or f"claimed batch {batch_id}")
    # Without this a task that waits for a broker would run until the broker answers.
    context.setInterruptOnCancel(interruptOnCancel=True)
    try:
        yield
    finally:
        if not is_stopped(spark):
            context.removeJobTag(tag)
            context.setLocalProperty(_DESCRIPTION, description)  # type: ignore[arg-type] # None unsets it
            context.setLocalProperty(_INTERRUPT, interrupt)  # type: ignore[arg-type]


def cancel(spark: "SparkSession", batch_id: str, reason: str = "") -> None:
    """Cancel the batch's jobs, including those that it starts later. Any thread may call this, also repeatedly.

    A thread that waits for a job gets Spark's error with `reason`, but not on a Connect server. Nothing happens if the
    batch has left `batch_jobs`, or the session or its JVM is gone.
    """
    tag, because = _tag(batch_id), reason or f"batch {batch_id} was stopped"
    with _lock:
        left = _open.get(tag)
        if left is None or tag in _cancelled:
            return
        _cancelled.add(tag)
    if _cancel_running(spark, tag, because):
        threading.Thread(
            target=_keep_cancelling, args=(spark, tag, because, left), name=f"cancel {tag}", daemon=True
        ).start()


@contextmanager
def interruptible_calls(spark: "SparkSession") -> Iterator[None]:
    """Let a signal whose handler raises interrupt a call to the JVM in the main thread.

    Without this, PySpark cleans up with another call on the same connection after the handler has raised. That call
    waits until the first one is answered, which may take as long as the Spark job. So the connection is closed before
    the handler is called, and later calls use a new one. Other threads need nothing, because signals do not reach them.
    Sessions on a Connect server need nothing either, because they wait for answers without such a lock.
    """
    if connect.is_connect(spark) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def hang_up(number: int, frame: FrameType | None) -> None:
        _hang_up(spark)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, hang_up)
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def _hang_up(spark: "SparkSession") -> None:
    """Close this thread's connection to the JVM; its next call opens another one."""
    gateway = spark.sparkContext._gateway  # noqa: SLF001 - there is no public name
    connection_of = getattr(gateway and gateway._gateway_client, "get_thread_connection", None)  # noqa: SLF001
    connection = connection_of and connection_of()
    if connection is not None:
        connection.close()


def progress(spark: "SparkSession", batch_id: str) -> Progress | None:
    """Return the progress of the batch's running jobs; None if there are none, or the session is gone."""
    if connect.is_connect(spark):
        stages = connect.stages_of(_tag(batch_id))
        return _progress_of(stages) if stages else None
    return _answered(spark, lambda: _progress(spark, _tag(batch_id)))


def _progress(spark: "SparkSession", tag: str) -> Progress | None:
    tracker = spark.sparkContext.statusTracker()
    # PySpark's own tracker does not support tags.
    ours = set(spark.sparkContext._jsc.sc().statusTracker().getJobIdsForTag(tag))  # noqa: SLF001
    jobs = [job for job_id in tracker.getActiveJobsIds() if job_id in ours and (job := tracker.getJobInfo(job_id))]
    if not jobs:
        return None
    stages = [stage for job in jobs for stage_id in job.stageIds if (stage := tracker.getStageInfo(stage_id))]
    return _progress_of([(stage.numCompletedTasks, stage.numTasks, stage.numActiveTasks > 0) for stage in stages])


def _progress_of(stages: Sequence[tuple[int, int, bool]]) -> Progress:
    """Return the sum of stages, each with its tasks done, tasks in total, and whether it is running."""
    return Progress(
        active_stages=sum(at_work for _, _, at_work in stages),
        tasks_done=sum(done for done, _, _ in stages),
        tasks_total=sum(total for _, total, _ in stages),
    )


def session_ended(spark: "SparkSession", error: Exception) -> str | None:
    """Return one line if `error` was caused by a dead session, server or JVM; None if the session still answers."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if connect.is_connect(spark):
        return None if connect.is_alive(spark) else connect.ENDED
    # PySpark raises an AttributeError for its missing connection if the session was stopped.
    if not isinstance(error, Py4JError | PySparkException | OSError | AttributeError) or _is_alive(spark):
        return None
    return "the Spark session has ended: its JVM died, or the function has stopped it"


def is_stopped(spark: "SparkSession") -> bool:
    """Return whether this process has stopped the session; False for a session on a Connect server."""
    context = None if connect.is_connect(spark) else getattr(spark, "sparkContext", None)
    return context is not None and context._jsc is None  # noqa: SLF001 - there is no public name


def _keep_cancelling(spark: "SparkSession", tag: str, reason: str, left: threading.Event) -> None:
    while not left.wait(_CANCEL_AGAIN_AFTER_S):
        if not _cancel_running(spark, tag, reason):
            return


def _cancel_running(spark: "SparkSession", tag: str, reason: str) -> bool:
    """Cancel the running jobs; return False if the session is gone."""
    from py4j.protocol import Py4JError

    if connect.is_connect(spark):
        return connect.interrupt(spark, tag)

    def cancel_now() -> bool:
        context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - PySpark's own method takes no reason
        try:
            context.cancelJobsWithTag(tag, reason)
        except Py4JError as error:
            if _NO_SUCH_METHOD not in str(error):
                raise
            for job in context.statusTracker().getJobIdsForTag(tag):  # as in Spark 3.5, where only a job takes a reason
                context.cancelJob(job, reason)
            context.cancelJobsWithTag(tag)  # those that the tracker does not know yet
        return True

    return bool(_answered(spark, cancel_now))


def _answered(spark: "SparkSession", call: Callable[[], T]) -> T | None:
    """Return the result of a call to the JVM; None if the session or its JVM is gone."""
    from py4j.protocol import Py4JError

    if is_stopped(spark):
        return None
    try:
        return call()
    except (Py4JError, OSError, AttributeError):
        if _is_alive(spark):
            raise
        return None


def _is_alive(spark: "SparkSession") -> bool:
    """Return whether the session's JVM still answers and has not stopped the session."""
    from py4j.protocol import Py4JError

    try:
        return not spark.sparkContext._jsc.sc().isStopped()  # noqa: SLF001
    except (Py4JError, OSError, AttributeError):
        return False


def _tag(batch_id: str) -> str:
    # Spark joins tags with commas.
    return f"marshal-dagster {batch_id}".replace(",", ";")
