"""One-line texts for errors of Spark, whose messages can have hundreds of lines."""

import errno
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.errors import PySparkException

_TRACEBACK: Final = "Traceback (most recent call last):"
_LOST_TASK: Final = re.compile(r"Job aborted due to stage failure: .*? \(TID \d+\) \([^)]*\): ")

_NO_ROOM: Final = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Mkdirs failed to create"
    r"|Failed to create (?:a temp directory|local dir|directory)|Unable to create directory|Cannot create directory"
)
_NO_ROOM_CODES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_JVM_MODULES: Final = ("py4j", "pyspark")


def first_line(error: BaseException) -> str:
    """Return the essential line of an error: of Java's error, or of the error in a Python worker, if it has one."""
    text = str(error)
    if _TRACEBACK in text:
        raised = text.rpartition(_TRACEBACK)[2].splitlines()
        return next((line.strip() for line in raised if line and not line[0].isspace()), type(error).__name__)
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
    return _LOST_TASK.sub("", line)


def error_condition(error: "PySparkException") -> str | None:
    """Return Spark's name for an error, such as `TABLE_OR_VIEW_NOT_FOUND`; None if it has none."""
    name = getattr(error, "getCondition", None) or error.getErrorClass  # before Spark 4.0
    condition: str | None = name()
    return condition


def full_disk_text(error: BaseException) -> str | None:
    """Return the line about a full disk, or about a folder that cannot be created; None for other errors.

    In an error of the JVM it is one line among hundreds.
    """
    if isinstance(error, OSError):
        return str(error) if error.errno in _NO_ROOM_CODES else None
    if not type(error).__module__.startswith(_JVM_MODULES):
        return None
    return next((line.strip() for line in str(error).splitlines() if _NO_ROOM.search(line)), None)
