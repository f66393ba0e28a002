"""The promises that every target checks: no record may stop, crash or slow down a reader, or make it grow.

See protocol.md, section 1.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from marshal_dagster.protocol.world import PartitionWorld

TRIES: Final = 3
CPU_MS_PER_RECORD: Final = 50
"""CPU time for a record of any size. The instrumented code must keep it on a busy machine."""
GROWTH_BYTES: Final = 2_048
GROWTH_BYTES_PER_BYTE: Final = 32
"""Memory that an accepted record may add to a reader for each byte of its value, in addition to `GROWTH_BYTES`."""

T = TypeVar("T")


class PromiseError(Exception):
    """A promise was broken."""


class TooSlowError(PromiseError):
    """Work took more CPU time than its records may take."""


def hold(kept: object, promise: str, *shown: object) -> None:
    """Raise `PromiseError` unless the promise is kept."""
    if not kept:
        raise PromiseError("; ".join([promise, *map(repr, shown)]))


def in_time(what: str, work: Callable[[], T], records: int = 1) -> T:
    """Do some work and check that it took no more CPU time than its records may take.

    Garbage collection waits until the work is done, because its time does not belong to the work.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        began_s = time.thread_time()
        result = work()
        took_ms = (time.thread_time() - began_s) * 1_000
    finally:
        if was_enabled:
            gc.enable()
    if took_ms > CPU_MS_PER_RECORD * records:
        raise TooSlowError(f"{what} takes no longer than {CPU_MS_PER_RECORD} ms; {took_ms!r}")
    return result


def check_repeatedly(check: Callable[[bytes], int], data: bytes) -> int:
    """Check an input; it counts as too slow only if it is so each time, because a machine may pause at any time."""
    for _ in range(TRIES - 1):
        try:
            return check(data)
        except TooSlowError:
            continue
    return check(data)


def held_bytes(world: PartitionWorld) -> int:
    """Return the size of what a reader keeps of the records that it has read, except its counts of reasons."""
    size = sum(map(sys.getsizeof, (world.groups, world._beats, *world._beats, world._beat_of)))
    for name, group in world.groups.items():
        features = group.settings.features
        size += sum(map(sys.getsizeof, (name, group, group.keys, group.paused_by, features, *features)))
        for place, key in group.keys.items():
            owners = (key.owner, *(range_.owner for range_ in key.ranges))
            parts = (place, *place, key, key.data_topic_id, key.ranges, *key.ranges, *owners)
            size += sum(map(sys.getsizeof, (*parts, *(field for owner in owners if owner for field in owner))))
    return size
