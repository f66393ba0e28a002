"""Writes snapshots of the coordination log when the newest ones are old; members call it at the end of a run."""

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
"""A snapshot is old if more than this many records follow it."""
OLD_MS: Final = 3_600_000
"""A snapshot is also old after this many ms, if any record follows it."""


def renew_snapshots(rationalizer: Rationalizer, snapshots: Snapshots, clock: Clock | None = None) -> list[int]:
    """Write a snapshot of each coordination partition whose newest snapshot is old; return these partitions.

    If a partition that the rationalizer does not follow needs a snapshot, the rationalizer follows all partitions from
    now on. If the topics of a partition are idle, perhaps no other member reads it. Without a snapshot topic, or
    without the right to write, nothing is written. Errors are logged and not raised, except interrupts.
    """
    written: list[int] = []
    try:
        with rationalizer.lock:
            _renew(rationalizer, snapshots, clock or SystemClock(), written)
    except MarshalError as error:
        logger.info("no snapshots of coordination topic %r were written: %s", rationalizer.identity.topic, error)
    except Exception as error:  # noqa: BLE001 - the run's work is done, and this must not make it fail
        logger.warning(
            "snapshots of coordination topic %r could not be written: %r", rationalizer.identity.topic, error
        )
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
            snapshots.write(world, identity, rationalizer.catch_up)  # if the log was truncated, older snapshots stay
            written.append(number)


def _of_use(head: SnapshotHead | None, world: PartitionWorld | None) -> SnapshotHead | None:
    """Return `head`, or None if its writer did not know ranges and `world` has had some."""
    is_lacking = head is not None and world is not None and world.had_ranges and head.version < VERSION_WITH_RANGES
    return None if is_lacking else head


def _has_a_start(head: SnapshotHead | None, at: OffsetBounds) -> bool:
    """Return whether a reader that starts now can be certain of the state."""
    return at.start == 0 or (head is not None and at.start <= head.offset <= at.end)


def outdated_snapshots(
    heads: Mapping[int, SnapshotHead | None], bounds: Mapping[int, OffsetBounds], now_ms: int
) -> set[int]:
    """Return the coordination partitions whose newest snapshot is old, or that have records and no snapshot.

    A snapshot beyond the log's end counts as old, because the log was truncated.
    """
    return {number for number, at in bounds.items() if _is_old(heads[number], at, now_ms)}


def _is_old(head: SnapshotHead | None, at: OffsetBounds, now_ms: int) -> bool:
    if head is None:
        return at.end > 0
    new_records = at.end - head.offset
    return not 0 <= new_records <= OLD_RECORDS or (new_records > 0 and now_ms - (head.log_time_ms or 0) > OLD_MS)
