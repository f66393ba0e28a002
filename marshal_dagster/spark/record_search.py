"""Search for the record at which a Spark job fails, by reading smaller and smaller parts of the batch.

The result names the record in a `FailingRecordError`.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.spark import connect
from marshal_dagster.spark.error_text import first_line, full_disk_text

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame

Offsets = Mapping[int, tuple[int, int]]
"""The offsets [start, end) of each partition."""

_KIND: Final = re.compile(r"\[[\w.]+\]|[\w.$]+")
_NOT_OF_RECORDS: Final = re.compile(
    r"\borg\.apache\.kafka\.|KafkaIllegalStateException|OutOfMemoryError|ExecutorLostFailure|FetchFailed"
    r"|Timeout|Connect(?:ion)?Exception|SocketException|UnknownHost"
)
"""Errors that are not caused by records, by the line of the error."""
_PYTHON_LOGGER: Final = "SQLQueryContextLogger"
_JAVA_LOGGERS: Final = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.v2",
    "org.apache.spark.util.Utils",
)
_SPARK: Final = ("pyspark.errors.exceptions.captured", "pyspark.errors.exceptions.connect", "py4j.protocol")


@dataclass(frozen=True, slots=True)
class FailingPart:
    """The smallest part of a batch that fails when it is processed alone."""

    offsets: Offsets
    error: str
    """The line of its error."""
    is_smallest: bool
    """Whether it has one offset, or neither half of it fails alone. False if the search was stopped early."""
    is_unreadable: bool = False
    """Whether reading alone fails, without any processing."""


@dataclass(frozen=True, slots=True)
class NoFailingPart:
    """The search has found no part, because records are not the cause, or because it could not find out."""

    reason: str


def find_failing_part(
    error: Exception,
    read: "DataFrame",
    offsets: Offsets,
    read_part: "Callable[[Offsets], DataFrame]",
    may_continue: Callable[[], bool],
    *,
    written: "DataFrame | None" = None,
) -> FailingPart | NoFailingPart | None:
    """Evaluate the failed frame on parts of `read`, and return the part that fails.

    Nothing is written. Only the expressions of the failed frame are evaluated, which Spark may do more than once
    anyway. If the frame fails without any record, records are not the cause.

    Args:
        error: The error that an action on a frame raised.
        read: The frame over `offsets` from which the failed frame was derived.
        offsets: The offsets of `read`.
        read_part: Returns a frame like `read` over other offsets of the same topic.
        may_continue: Returns whether there is time for one more part.
        written: The rows for the sink. The sink's own action may not contain the expression that failed, for example
            if it counts cached rows.

    Returns:
        The failing part, or why there is none; None if `error` is not from an action of Spark.
    """
    failed = _spark_error(error)
    if failed is None:
        return None
    line = first_line(failed)
    if _is_of_no_record(failed):
        return NoFailingPart(f"a disk, a broker or an executor is the cause: {line}")
    candidates = {
        "the rows for the sink": written,
        "the frame that failed": _failed_frame(failed),
        "the messages as Spark reads them": read,
    }
    reasons: list[str] = []
    with _without_stacks(read.sparkSession):
        for name, rows in candidates.items():
            if rows is None:
                continue
            found = _Search(rows, read, read_part, may_continue, _kind(line)).run(offsets)
            if isinstance(found, FailingPart):
                return found
            reasons.append(f"{name}: {found.reason}")
    return NoFailingPart("; ".join(reasons))


@dataclass(slots=True)
class _Search:
    rows: "DataFrame"
    read: "DataFrame"
    read_part: "Callable[[Offsets], DataFrame]"
    may_continue: Callable[[], bool]
    kind: str
    """The kind of the error with which the batch failed."""
    failing: Offsets = field(default_factory=dict, init=False)
    """The smallest part that failed so far; `error` is the line of its error."""
    error: str = field(default="", init=False)
    good: Offsets | None = field(default=None, init=False)
    """The last part that did not fail."""
    other_kinds: set[str] = field(default_factory=set, init=False)
    """The kinds of other errors with which a part has failed twice."""

    def run(self, offsets: Offsets) -> FailingPart | NoFailingPart:
        """Search in `offsets`.

        If the error has another kind than `kind`, it counts only if a part that was good before is still good.
        """
        nothing = {number: (start, start) for number, (start, _) in offsets.items()}
        if not self.may_continue():
            return NoFailingPart("the time for the search was over")
        if error := self._error(nothing):
            return NoFailingPart(f"it also fails without any message: {error}")
        if not self._fails(offsets):
            return NoFailingPart("it does not fail when it is evaluated again")
        # Usually one record fails. Then half of the attempts are enough.
        is_smallest = self._narrow(offsets, assumes=True) or self._narrow(self.failing, assumes=False)
        part = self.failing
        if not (_kind(self.error) == self.kind or self._is_good_still()):
            return NoFailingPart(f"parts that did not fail before fail now, or all fail: {self.error}")
        is_unreadable = self.rows is self.read or (self.may_continue() and self._error(part, self.read) is not None)
        return FailingPart(part, self.error, is_smallest, is_unreadable)

    def _narrow(self, part: Offsets, *, assumes: bool) -> bool:
        """Halve the part repeatedly; return whether the smallest failing part was found.

        With `assumes`, the second half is assumed to fail if the first does not.
        """
        while self.may_continue():
            halves = _halves(part)
            if not halves:
                return part is self.failing or self._fails(part)
            first, second = halves
            if self._fails(first):
                part = first
            elif assumes or self._fails(second):
                part = second
            else:
                return part is self.failing
        return False

    def _fails(self, part: Offsets) -> bool:
        error = self._error(part)
        if error is None:
            self.good = part
            return False
        self.failing, self.error = part, error
        return True

    def _error(self, part: Offsets, rows: "DataFrame | None" = None) -> str | None:
        """Evaluate a part; return the line of its error, or None if it does not fail.

        An error of an unknown kind counts only if the part fails again: the Python worker of a task may have died.
        """
        error = self._evaluate(part, rows)
        if error is None or _kind(error) in {self.kind, *self.other_kinds}:
            return error
        again = self._evaluate(part, rows)
        if again is not None and _kind(again) == _kind(error):
            self.other_kinds.add(_kind(again))
        return again

    def _evaluate(self, part: Offsets, rows: "DataFrame | None") -> str | None:
        try:
            with _over(rows or self.rows, self.read, self.read_part(part)) as frame:
                frame.write.format("noop").mode("overwrite").save()
        except Exception as error:
            if _spark_error(error) is None or _is_of_no_record(error):
                raise
            return first_line(error)
        return None

    def _is_good_still(self) -> bool:
        """Return whether the last good part is still good; if not, something other than a record fails."""
        return self.good is not None and self._error(self.good) is None


@contextmanager
def _without_stacks(spark: Any) -> Iterator[None]:  # noqa: ANN401 - its JVM object has no public name
    """Suppress the log output of each failing part; the log of a Connect server stays unchanged."""
    logger: Any = logging.root.manager.loggerDict.get(
        _PYTHON_LOGGER, SimpleNamespace(disabled=False)
    )  # PySpark creates it
    was_disabled = logger.disabled
    levels: list[tuple[str, Any]] = []
    with suppress(Exception):  # a session with another logging library
        log4j = spark._jvm.org.apache.logging.log4j  # noqa: SLF001
        configurator = log4j.core.config.Configurator
        levels = [(name, log4j.LogManager.getLogger(name).getLevel()) for name in _JAVA_LOGGERS]
        for name in _JAVA_LOGGERS:
            configurator.setLevel(name, log4j.Level.OFF)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled
        with suppress(Exception):
            for name, level in levels:
                configurator.setLevel(name, level)


def _halves(part: Offsets) -> list[Offsets]:
    """Return both halves of a part; empty for a single offset."""
    if len(part) > 1:
        numbers = sorted(part)
        middle = len(numbers) // 2
        return [{n: part[n] for n in half} for half in (numbers[:middle], numbers[middle:])]
    ((number, (start, end)),) = part.items()
    middle = (start + end) // 2
    return [{number: (start, middle)}, {number: (middle, end)}] if end - start > 1 else []


def _is_of_no_record(error: BaseException) -> bool:
    """Return whether a disk, a broker or an executor is the cause, and not a record."""
    return full_disk_text(error) is not None or _NOT_OF_RECORDS.search(first_line(error).partition(": ")[0]) is not None


def _kind(line: str) -> str:
    """Return the class or condition of an error from its line."""
    found = _KIND.match(line)
    return found[0] if found else line


def _spark_error(error: BaseException | None) -> BaseException | None:
    """Return the error of a Spark action in the chain of causes of `error`; None without one."""
    while error is not None and not type(error).__module__.startswith(_SPARK):
        error = error.__cause__
    return None if error is None or type(error).__name__ == "AnalysisException" else error


def _failed_frame(error: BaseException) -> "DataFrame | None":
    """Return the frame of the innermost PySpark call that raised `error`."""
    from pyspark.sql import DataFrame

    found, step = None, error.__traceback__
    while step is not None:
        if str(step.tb_frame.f_globals.get("__name__")).startswith("pyspark.sql"):
            caller = step.tb_frame.f_locals.get("self")
            frame = caller if isinstance(caller, DataFrame) else getattr(caller, "_df", None)
            found = frame if isinstance(frame, DataFrame) else connect.frame_of_writer(caller) or found
        step = step.tb_next
    return found


@contextmanager
def _over(rows: "DataFrame", read: "DataFrame", part: "DataFrame") -> "Iterator[DataFrame]":
    """Yield `rows` with `part` instead of `read`, from which they were derived."""
    if connect.is_connect(read.sparkSession):
        with connect.reading(read, part):
            yield rows
        return
    from pyspark.sql import DataFrame

    spark: Any = read.sparkSession
    plan = _replaced(spark, _plan(rows), _source(_plan(read)).relation(), _source(_plan(part)).relation())
    name: str = rows._jdf.getClass().getName()  # noqa: SLF001 - Spark 3.5 has it in another package
    dataset = reduce(getattr, name.split("."), spark._jvm).ofRows(spark._jsparkSession, plan)  # noqa: SLF001
    yield DataFrame(dataset, spark)


def _plan(frame: Any) -> "JavaObject":  # noqa: ANN401 - a classic frame, whose JVM object has no public name
    plan: JavaObject = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    return plan


def _source(plan: Any) -> Any:  # noqa: ANN401 - JVM objects
    return plan.collectLeaves().apply(0)


def _replaced(spark: Any, plan: Any, relation: Any, other: Any) -> Any:  # noqa: ANN401 - JVM objects
    """Return a plan that reads `other` instead of `relation`."""
    children = plan.children()
    if children.size():
        made = [_replaced(spark, children.apply(index), relation, other) for index in range(children.size())]
        return plan.withNewChildren(spark._jvm.org.apache.spark.api.python.PythonUtils.toSeq(made))  # noqa: SLF001
    if plan.getClass().getSimpleName() != "LogicalRelation" or not plan.relation().equals(relation):
        return plan
    gateway = spark.sparkContext._gateway  # noqa: SLF001
    fields = gateway.new_array(gateway.jvm.java.lang.Object, plan.productArity())
    fields[0] = other
    for index in range(1, plan.productArity()):
        fields[index] = plan.productElement(index)
    return plan.makeCopy(fields)
