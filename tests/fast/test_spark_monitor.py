"""How errors of Spark during a batch are reported."""

import errno
import os
import traceback

import pytest

from marshal_dagster.errors import BatchAbortedError
from marshal_dagster.ops.spark_monitor import full_disk_as_abort
from marshal_dagster.spark.error_text import full_disk_text

STACK = "\n".join(f"\tat org.apache.spark.Frame{number}(Frame.scala:{number})" for number in range(900))


class JvmError(Exception):
    """An error as the library of the JVM gateway raises it."""

    __module__ = "py4j.protocol"


@pytest.mark.parametrize(
    "line",
    [
        "java.io.IOException: No space left on device",
        "Caused by: java.io.FileNotFoundException: /d/blockmgr-1/0a (No space left on device)",
        "java.io.IOException: Mkdirs failed to create file:/out/part (exists=false, cwd=file:/)",
        "java.io.IOException: Failed to create a temp directory (under /d) after 10 attempts!",
        "java.io.IOException: Disk quota exceeded",
    ],
)
def test_a_full_disk_is_reported_in_one_line(line: str) -> None:
    """A full disk is reported in one line, without the 900 lines of the JVM's stack."""
    error = JvmError(
        f"An error occurred while calling o1.save.\n: org.apache.spark.SparkException: ...\n{STACK}\n{line}"
    )
    with pytest.raises(BatchAbortedError) as aborted, full_disk_as_abort("shops", "orders"):
        raise error
    reported = str(aborted.value)
    assert reported.startswith(
        "group 'shops', topic 'orders': the batch failed and its claims are released, because a disk"
    )
    assert line in reported
    assert "\n" not in reported
    assert "Frame7" not in "".join(traceback.format_exception(aborted.value))


def test_a_full_disk_that_python_reports_is_too() -> None:
    """A full disk that Python reports is reported in the same way, with the name of the file."""
    with pytest.raises(BatchAbortedError, match="No space left on device: '/out/part'"), full_disk_as_abort("g", "t"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/part")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("No space left on device"),
        JvmError("java.lang.ArithmeticException: long overflow"),
        PermissionError(errno.EACCES, "Permission denied"),
        KeyError("orders"),
    ],
    ids=repr,
)
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    """Other errors are not changed, including a user's own errors with a similar text."""
    assert full_disk_text(error) is None
    with pytest.raises(type(error)) as raised, full_disk_as_abort("g", "t"):
        raise error
    assert raised.value is error
