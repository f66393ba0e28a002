"""Which processes write the rows of a batch."""

from enum import StrEnum


class RowWriter(StrEnum):
    """The processes that send the rows of a batch to the output."""

    EXECUTORS = "executors"
    """Spark's tasks, several at the same time."""
    DRIVER = "driver"
    """The process of the run. All rows pass through it."""
