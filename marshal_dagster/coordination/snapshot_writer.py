"""Who writes snapshots, and when: a member at the end of its run, where the newest one is old."""

import logging
from collections.abc import Mapping
from typing import Final

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import SnapshotHead, Snapshots
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.snapshots import VERSION_WITH_RANGES
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.protocol.world import PartitionWorld

logger = logging.getLogger(__name__)

OLD_RECORDS: Final = 10_000
"""A snapshot with more records behind it is old,"""
OLD_MS: Final = 3_600_000
"""and so is one from so long ago that is not the present state any more."""


def renew_snapshots(rationalizer: Rationalizer, snapshots: Snapshots, clock: Clock | None = None) -> list[int]:
    """Write a snapshot of each coordination partition whose newest is old; give those that were written.

    The rationalizer follows all coordination partitions afterwards if one that it did not follow needs it: nobody else
    may come by one whose topics are idle. Best effort: without a snapshot topic, or the right to write, nothing is
    written, and nothing is raised but what interrupts it.
    """
    written: list[int] = []
    try:
        with rationalizer.lock:
            _renew(rationalizer, snapshots, clock or SystemClock(), written)
    except MarshalError as error:
        logger.info("snapshots of %r are not renewed: %s", rationalizer.identity.topic, error)
    except Exception as error:  # noqa: BLE001 - the work of the run is done, and stays so
        logger.warning("snapshots of %r could not be renewed: %r", rationalizer.identity.topic, error)
    finally:
        snapshots.close()
    return written


def _renew(rationalizer: Rationalizer, snapshots: Snapshots, clock: Clock, written: list[int]) -> None:
    identity = rationalizer.identity
    followed = rationalizer.world.partitions
    heads = {number: _of_use(head, followed.get(number)) for number, head in snapshots.heads(identity).items()}
    bounds = rationalizer.log.bounds(range(identity.partitions))
    due = {
        number
        for number in outdated_snapshots(heads, bounds, clock.wall_ms())
        if (followed[number].certain if number in followed else _has_a_start(heads[number], bounds[number]))
    }
    if not due:
        return
    if due <= followed.keys():
        rationalizer.catch_up()
    else:
        rationalizer.follow_all()
    for number in sorted(due):
        world = rationalizer.world.partitions[number]
        if world.certain:
            snapshots.write(world, identity, rationalizer.catch_up)  # older ones stay where the log was truncated
            written.append(number)


def _of_use(head: SnapshotHead | None, world: PartitionWorld | None) -> SnapshotHead | None:
    """Pass over the snapshot of a member that does not know the ranges that `world` has."""
    is_lacking = head is not None and world is not None and world.had_ranges and head.version < VERSION_WITH_RANGES
    return None if is_lacking else head


def _has_a_start(head: SnapshotHead | None, at: OffsetBounds) -> bool:
    """Tell whether who reads it now will be certain of it."""
    return at.start == 0 or (head is not None and at.start <= head.offset <= at.end)


def outdated_snapshots(
    heads: Mapping[int, SnapshotHead | None], bounds: Mapping[int, OffsetBounds], now_ms: int
) -> set[int]:
    """Give the coordination partitions whose newest snapshot is old, or that have records and none.

    One that lies beyond the log's end, which was truncated then, is of no use.
    """
    return {number for number, at in bounds.items() if _is_old(heads[number], at, now_ms)}


def _is_old(head: SnapshotHead | None, at: OffsetBounds, now_ms: int) -> bool:
    if head is None:
        return at.end > 0
    behind = at.end - head.offset
    return not 0 <= behind <= OLD_RECORDS or (behind > 0 and now_ms - (head.log_time_ms or 0) > OLD_MS)
