"""How the plan of a frame recognises the first attempt of a task, by what the session can do.

See protocol.md, section 6, "At most once".
"""

from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import connect
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

FIRST_ATTEMPT: Final = r"task [0-9]+\.0 in stage [0-9]+\.0 "
"""A part of the name of the thread of a task that runs for the first time."""
_WRITER_THREAD: Final = "org.apache.spark.api.python.BasePythonRunner$WriterThread"
_TASK_CONTEXT: Final = "org.apache.spark.TaskContext"


class AttemptSource(StrEnum):
    """What shows which attempt of a task reads a row."""

    THREAD_NAME = "thread name"
    """The task's own thread reads all rows."""
    TASK_CONTEXT = "task context"
    """A thread without the task's name reads the rows of a Python function, but it has the task's context."""


def attempt_source(spark: "SparkSession") -> AttemptSource:
    """Return what shows the attempt of a task in this session.

    Servers of Spark Connect are of a version whose tasks read all rows in their own threads (`connect.FIRST_RELEASE`).
    """
    if connect.is_connect(spark) or not _has_class(spark, _WRITER_THREAD):
        return AttemptSource.THREAD_NAME
    return AttemptSource.TASK_CONTEXT


def check_attempts_are_shown(spark: "SparkSession") -> None:
    """Raise `ConfigurationError` if nothing shows the attempt of a task in this session."""
    if attempt_source(spark) is AttemptSource.TASK_CONTEXT:
        _first_by_context(spark)


def is_first_attempt(spark: "SparkSession") -> "Column":
    """Return a condition that is true where a task runs for the first time, in the first attempt of its stage.

    Args:
        spark: The session.

    Returns:
        The condition, which Spark evaluates in each task again.

    Raises:
        ConfigurationError: Nothing shows the attempt of a task in this session.
    """
    if attempt_source(spark) is AttemptSource.TASK_CONTEXT:
        return _first_by_context(spark)
    # In SQL only the name of a task's thread shows the attempt.
    return f.call_function("reflect", f.lit("java.lang.Thread"), f.lit("currentThread")).rlike(FIRST_ATTEMPT)


def _has_class(spark: "SparkSession", name: str) -> bool:
    from py4j.java_gateway import JavaClass

    return isinstance(reduce(getattr, name.split("."), spark._jvm), JavaClass)  # noqa: SLF001 - there is no public name


def _first_by_context(spark: "SparkSession") -> "Column":
    try:
        return (_from_context(spark, "attemptNumber") == 0) & (_from_context(spark, "stageAttemptNumber") == 0)
    except Exception as error:  # a class or a constructor that this Spark does not have
        raise ConfigurationError(
            f"at_most_once on a cluster: this Spark {spark.version} reads the rows of Python functions in threads "
            f"that do not show the attempt of their task, and its plans cannot call {_TASK_CONTEXT} "
            f"({first_line(error)}). Use Spark {connect.FIRST_RELEASE}, a local master, or another delivery mode"
        ) from error


def _from_context(spark: "SparkSession", method: str) -> "Column":
    """Return the result of a method of the task's context, for which SQL has no function."""
    from pyspark.sql import Column

    jvm: Any = spark._jvm  # noqa: SLF001 - there is no public name
    sql = jvm.org.apache.spark.sql
    objects = sql.catalyst.expressions.objects
    # Whether null arguments give null, whether the result may be null, and whether each call has the same result.
    as_it_is = (False, True, False)
    context = jvm.java.lang.Class.forName(_TASK_CONTEXT)
    none = jvm.org.apache.spark.api.python.PythonUtils.toSeq([])
    current = objects.StaticInvoke(context, sql.types.ObjectType(context), "get", none, none, *as_it_is)
    return Column(sql.Column(objects.Invoke(current, method, sql.types.DataTypes.IntegerType, none, none, *as_it_is)))
