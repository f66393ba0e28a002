"""Finds the record that makes a batch fail in Spark, while the batch is still claimed, and builds the error for it."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import FailingRecordError, MarshalError
from marshal_dagster.protocol.batch_planning import ClaimedRange, skip_text
from marshal_dagster.spark.record_search import FailingPart, NoFailingPart, Offsets, find_failing_part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

SEARCH_S: Final = 60.0
"""After this many seconds the search evaluates no further part of the batch."""


def find_failing_record(
    error: Exception,
    read: "DataFrame",
    ranges: Sequence[ClaimedRange],
    read_part: "Callable[[Offsets], DataFrame]",
    check: Callable[[], None],
    *,
    written: "DataFrame | None" = None,
) -> FailingRecordError | None:
    """Return the error that names the record that makes Spark fail, or None if none was found.

    Args:
        error: The error with which Spark failed.
        read: The frame over the batch.
        ranges: The ranges of the batch.
        read_part: Returns a frame over a part of the batch.
        check: Raises when the batch has to end.
        written: The rows that were passed to a sink, if any.
    """
    if isinstance(error, MarshalError):
        return None
    offsets = {range_.partition: (range_.first_readable, range_.end) for range_ in ranges}
    offsets = {number: bounds for number, bounds in offsets.items() if bounds[0] < bounds[1]}
    until_s = time.monotonic() + SEARCH_S

    def may_continue() -> bool:
        check()
        return time.monotonic() < until_s

    try:
        found = None
        if offsets:
            found = find_failing_part(error, read, offsets, read_part, may_continue, written=written)
    except MarshalError as ended:
        logger.info("the search for the failing record in %s was stopped: %s", list(map(str, ranges)), ended)
        return None
    except Exception:
        logger.warning("the search for the failing record in %s failed", list(map(str, ranges)), exc_info=True)
        return None
    if isinstance(found, NoFailingPart):
        logger.warning("no message of %s is named as the cause of the error: %s", list(map(str, ranges)), found.reason)
    return FailingRecordError(_text(found, ranges)) if isinstance(found, FailingPart) else None


def _text(found: FailingPart, ranges: Sequence[ClaimedRange]) -> str:
    """Return the text that names the failing records, their error, and how to continue."""
    named = [range_ for range_ in ranges if range_.partition in found.offsets]
    group, topic = named[0].group, named[0].topic
    places = [f"partition {range_.partition}, {_offsets(*found.offsets[range_.partition])}" for range_ in named]
    place = f"topic {topic!r}, {'; '.join(places)}"
    if sum(end - first for first, end in found.offsets.values()) == 1:
        reads, hint = (
            ("cannot be read by Spark", "its sender") if found.is_unreadable else ("fails in Spark", "the code")
        )
        why = " (its time is beyond the range of Spark's timestamps)" if "long overflow" in found.error else ""
        text, which = f"the message of {place} {reads}: {found.error}{why}. Correct {hint}", "it"
    elif found.is_smallest:
        text = f"no single message fails: those of {place} fail together, and neither half of them fails alone"
        text, which = f"{text}: {found.error}. Correct the code", "them"
    else:
        text = f"one of the messages of {place} fails in Spark; the search for it was stopped after {SEARCH_S:.0f} s"
        text, which = f"{text}: {found.error}. Correct the code", "them"
    skip = " and ".join(skip_text(range_, *found.offsets[range_.partition]) for range_ in named)
    return f"group {group!r}: {text}, or skip {which}: {skip}"


def _offsets(first: int, end: int) -> str:
    return f"offset {first}" if end - first == 1 else f"offsets {first} to {end - 1}"
