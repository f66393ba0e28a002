"""Decide what an output does with a range, so that it takes each range once (protocol.md, section 6).

Every sink calls `judge` or `judge_ranges` in the transaction that stores the rows. A range is half open: `start` is its
first offset, and `end` is the next offset to read after it.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import StrEnum

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """What an output has stored about one (group, topic, partition), if it keeps a position.

    The output writes these values in the same transaction as the rows.

    Example:
        ```python
        stored = StoredPosition(
            range_.coordination_topic_id, range_.data_topic_id, range_.generation, range_.epoch, range_.end
        )
        ```
    """

    coordination_topic_id: str
    """Kafka's id of the coordination topic of the last range."""
    data_topic_id: str
    """Kafka's id of the data topic of the last range."""
    generation: int
    """The generation of the last range (protocol.md, section 3.6)."""
    epoch: int
    """The fencing token of the last range."""
    position: int
    """The end (exclusive) of the last range."""


@dataclass(frozen=True, slots=True)
class StoredRanges:
    """What an output has stored about one (group, topic, partition), if it keeps each range.

    The values concern the newest generation of the output. `TakenRanges` computes them for one wanted range.
    """

    coordination_topic_id: str
    """Kafka's id of the coordination topic of the last range."""
    data_topic_id: str
    """Kafka's id of the data topic of the last range."""
    generation: int
    """The generation of the ranges (protocol.md, section 3.6)."""
    epoch: int
    """The highest fencing token of the ranges."""
    below: int
    """The end (exclusive) of what was taken in order; 0 if nothing was. All offsets below it count as stored."""
    position: int | None
    """The end (exclusive) of the last range; None if offsets are missing between the ranges."""
    overlapping: tuple[int, int] | None
    """The first stored range, as (start, end), that overlaps the wanted one, or None."""


@dataclass(slots=True)
class TakenRanges:
    """The ranges of one (group, topic, partition) that an output has stored in the newest generation.

    Ranges are not merged, so that a repeated range is recognised. A sink that keeps each range fills this from its
    storage and passes `beside(wanted)` to `judge_ranges`.

    Example:
        ```python
        taken = TakenRanges()
        for stored in ranges_in_output:
            taken.add(stored)
        verdict = judge_ranges(taken.beside(wanted), wanted)
        ```
    """

    _newest: ClaimedRange | None = None
    _epoch: int = 0
    _below: int = 0
    _first: int = 0
    _last: int = 0
    _width: int = 0
    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, taken: ClaimedRange) -> None:
        """Add a range that `judge_ranges` accepted.

        Args:
            taken: A range that overlaps no other range of its generation. The first range of another generation
                replaces all ranges that were added before.
        """
        if self._newest is None or self._newest.generation != taken.generation:
            self._starts, self._ends = [], []
            self._epoch, self._below, self._width = taken.epoch, 0, 0
            self._first, self._last = taken.start, taken.end
        self._newest = taken
        self._epoch = max(self._epoch, taken.epoch)
        self._first, self._last = min(self._first, taken.start), max(self._last, taken.end)
        self._width += taken.width
        if not taken.in_any_order:
            self._below = taken.end
        if taken.width:
            at = bisect_left(self._starts, taken.start)
            self._starts.insert(at, taken.start)
            self._ends.insert(at, taken.end)

    def beside(self, wanted: ClaimedRange) -> StoredRanges | None:
        """Return what is stored, as `judge_ranges` needs it.

        Args:
            wanted: The range that is to be judged.

        Returns:
            The stored values, with the stored range that overlaps `wanted`; None if nothing was added.
        """
        if self._newest is None:
            return None
        at = bisect_right(self._ends, wanted.start)
        overlaps = wanted.width > 0 and at < len(self._ends) and self._starts[at] < wanted.end
        return StoredRanges(
            coordination_topic_id=self._newest.coordination_topic_id,
            data_topic_id=self._newest.data_topic_id,
            generation=self._newest.generation,
            epoch=self._epoch,
            below=self._below,
            position=self._last if self._width == self._last - self._first else None,
            overlapping=(self._starts[at], self._ends[at]) if overlaps else None,
        )


class Verdict(StrEnum):
    """What an output does with a range.

    With `TAKE` and with `REPLACE` the output deletes rows of older generations at the offsets that could be read.
    `TAKE` needs that too, because older generations may have written rows beyond the first range of the new one.
    """

    TAKE = "take"
    """Write the rows. The range follows what is stored in its generation or, in any order, does not overlap it."""
    SKIP = "skip"
    """Write nothing: the range was taken before."""
    REPLACE = "replace"
    """Write the rows, wherever the range starts: it is the first one of a generation or of an empty output."""


def judge(stored: StoredPosition | None, wanted: ClaimedRange) -> Verdict:
    """Decide what an output that keeps a position does with a range.

    This is the table of protocol.md, section 6, "Effectively once".

    Args:
        stored: What the output has stored about the range's group, topic and partition; None if nothing.
        wanted: The range of the batch.

    Returns:
        What the output does with the range.

    Raises:
        SinkRejectedError: the output must not take the range. The range has a lower fencing token or generation, or
            another coordination topic. Or the data topic was deleted and re-created without a new generation, or the
            position is neither the range's start nor its end. Ranges in any order are refused too, because a position
            does not show which of them are stored.

    Example:
        ```python
        if judge(stored, range_) is not Verdict.SKIP:
            write(rows)
        ```
    """
    if wanted.in_any_order:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: members of the group claim ranges, which are done in any order, but "
            "the output keeps only a position. Use an output that keeps ranges"
        )
    if stored is None or _is_of_newer_generation(stored, wanted):
        return Verdict.REPLACE
    return _judge_position(stored.position, wanted)


def _judge_position(position: int, wanted: ClaimedRange) -> Verdict:
    if position == wanted.end:
        return Verdict.SKIP
    if position != wanted.start:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output is at position {position}, which is neither the range's "
            "start nor its end, so nothing was written. Compare the output with `marshal-dagster position get`"
        )
    return Verdict.TAKE


def judge_ranges(stored: StoredRanges | None, wanted: ClaimedRange) -> Verdict:
    """Decide what an output that keeps each range does with a range.

    See protocol.md, section 8.4, "Effectively once". If members of the group claim ranges, ranges come in any order. So
    the fencing tokens of different ranges are not compared, and a range without offsets is skipped. In other groups the
    rules of `judge` apply; ranges that were taken in any order before must leave no gap.

    Args:
        stored: What the output has stored about the range's group, topic and partition; None if nothing.
        wanted: The range of the batch.

    Returns:
        What the output does with the range.

    Raises:
        SinkRejectedError: the output must not take the range. The range has a lower generation or another
            coordination topic. Or the data topic was deleted and re-created without a new generation, or the range
            overlaps stored ranges and is not one of them.

    Example:
        ```python
        if judge_ranges(taken.beside(range_), range_) is not Verdict.SKIP:
            write(rows)
        ```
    """
    if stored is None or _is_of_newer_generation(stored, wanted):
        return Verdict.REPLACE
    if not wanted.in_any_order:
        return _judge_in_order(stored, wanted)
    if not wanted.width or stored.overlapping == (wanted.start, wanted.end):
        return Verdict.SKIP
    if stored.overlapping is not None:
        start, end = stored.overlapping
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output holds [{start}, {end}) of the same generation, which "
            f"overlaps this range and is not equal to it, so nothing was written. {_UNPLANNED}"
        )
    if wanted.start < stored.below:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output was written in order up to {stored.below} in the same "
            f"generation, but does not hold this range, so nothing was written. {_UNPLANNED}"
        )
    return Verdict.TAKE


_UNPLANNED = (
    "A plan never changes within a generation: compare the output with the coordination log (`marshal-dagster tail`), "
    "or set the position (`marshal-dagster position reset`), which starts a new generation and replaces rows"
)


def _judge_in_order(stored: StoredRanges, wanted: ClaimedRange) -> Verdict:
    """Judge by the position alone if all ranges were taken in order; otherwise only a stored or the next range fits."""
    is_known = stored.overlapping in {None, (wanted.start, wanted.end)}
    if stored.position is None or (stored.position != stored.below and not is_known):
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output holds ranges that members claimed in this generation. "
            "This range is none of them and does not follow them without a gap, so nothing was written. A group that "
            "no longer claims ranges needs a new generation: set the position with `marshal-dagster position reset`"
        )
    return _judge_position(stored.position, wanted)


def _is_of_newer_generation(stored: StoredPosition | StoredRanges, wanted: ClaimedRange) -> bool:
    """Return whether `wanted` starts a new generation of the output.

    Raises:
        SinkRejectedError: the range has another coordination topic, or an older generation, or another data topic in
            the same generation. Or it must come in order, and has a lower fencing token.
    """
    if stored.coordination_topic_id != wanted.coordination_topic_id:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output was written under coordination topic id "
            f"{stored.coordination_topic_id}, but this run uses {wanted.coordination_topic_id}: the coordination topic "
            "was deleted and re-created. Check what the output holds, then give the group a new output"
        )
    if wanted.generation < stored.generation:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: generation {wanted.generation} is older than {stored.generation} in "
            "the output, because an operator set the position while this run worked. Let this run fail; the next one "
            "starts at the new position"
        )
    if wanted.epoch < stored.epoch and not wanted.in_any_order:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: fencing token {wanted.epoch} is lower than {stored.epoch} in the "
            "output, because another run has taken the partition over. This run must stop"
        )
    if wanted.generation > stored.generation:
        return True
    if wanted.data_topic_id != stored.data_topic_id:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output holds data topic id {stored.data_topic_id}, but this run "
            f"reads {wanted.data_topic_id} in the same generation: the data topic was deleted and re-created. Set the "
            "position with `marshal-dagster position reset` first"
        )
    return False
