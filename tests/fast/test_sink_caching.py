"""Frames that a sink persists during a write, and those that their user has persisted before."""

from typing import Any, cast

import pytest
from pyspark import StorageLevel

from marshal_dagster.sinks.caching import persisted


class Frame:
    """A frame that only knows whether it is persisted."""

    def __init__(self, level: StorageLevel) -> None:
        self.storageLevel = level

    def persist(self, level: StorageLevel) -> "Frame":
        """Persist the rows."""
        self.storageLevel = level
        return self

    def unpersist(self) -> None:
        """Drop the rows."""
        self.storageLevel = StorageLevel.NONE


def test_a_frame_is_persisted_during_a_write() -> None:
    """Afterwards its rows are dropped."""
    frame: Any = Frame(StorageLevel.NONE)
    with persisted(frame) as rows:
        assert cast("Any", rows).storageLevel == StorageLevel.MEMORY_AND_DISK
    assert frame.storageLevel == StorageLevel.NONE


@pytest.mark.parametrize("level", [StorageLevel.MEMORY_ONLY, StorageLevel.DISK_ONLY, StorageLevel.OFF_HEAP])
def test_a_frame_that_its_user_has_persisted_stays_so(level: StorageLevel) -> None:
    """The user's code may read it again, and must not compute other values then."""
    frame: Any = Frame(level)
    with persisted(frame) as rows:
        assert rows is frame
    assert frame.storageLevel == level
