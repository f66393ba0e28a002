"""How an output takes each range once (protocol.md, section 6).

Every range is half open: `start` is the first offset, `end` the next one to read after it.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import StrEnum

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """How far an output has got with one (group, topic, partition)."""

    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class StoredRanges:
    """What an output that knows each of its ranges holds of one (group, topic, partition), seen from a range wanted.

    All of it is of the newest generation there; `epoch` is the highest token. Everything below `below` counts as
    stored: it is the end of what was taken in order, 0 where nothing was. `position` is where the output stands if
    nothing is missing between its ranges, else None. `overlapping` is the first range that shares an offset with the
    one wanted.
    """

    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    below: int
    position: int | None
    overlapping: tuple[int, int] | None


@dataclass(slots=True)
class TakenRanges:
    """The ranges that an output has taken of one (group, topic, partition), those of the newest generation.

    Each is kept as it was taken: an output keeps its ranges anyway, with the rows, so nothing is merged and "exactly
    this one" stays known.
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
        """Add a range that the rules let in: it overlaps none of its generation."""
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
        """Return what is there, as `judge_ranges` needs it to judge `wanted`."""
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

    Rows of older generations at the offsets read give way in both cases of writing: a new generation that is under way
    still meets what older ones wrote further on.
    """

    TAKE = "take"
    """The range follows on what is stored in its generation or, in any order, lies beside it: write its rows."""
    SKIP = "skip"
    """The range was taken before: write nothing."""
    REPLACE = "replace"
    """The first range of a new generation or of an empty output: write its rows, wherever it starts."""


def judge(stored: StoredPosition | None, wanted: ClaimedRange) -> Verdict:
    """Say what an output that has got as far as `stored` does with `wanted`.

    See protocol.md, section 6, "Effectively once".

    Raises `SinkRejectedError` for a lower token or generation, another coordination log, a data topic made anew
    without a new generation, a position that is neither the range's start nor its end, and ranges in any order: a
    position cannot tell one that it has from one that it passed over.
    """
    if wanted.in_any_order:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: members of the group claim ranges, which are done in any order, and "
            "the output keeps only a position: use one that keeps ranges"
        )
    if stored is None or _is_of_newer_generation(stored, wanted):
        return Verdict.REPLACE
    return _judge_position(stored.position, wanted)


def _judge_position(position: int, wanted: ClaimedRange) -> Verdict:
    if position == wanted.end:
        return Verdict.SKIP
    if position != wanted.start:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output stands at {position}, which is neither the range's start "
            "nor its end: nothing was written; compare the output with `marshal-dagster position get`"
        )
    return Verdict.TAKE


def judge_ranges(stored: StoredRanges | None, wanted: ClaimedRange) -> Verdict:
    """Say what an output that knows each of its ranges does with `wanted`.

    See protocol.md, section 8.4, "Effectively once".

    Where members claim ranges they come in any order, so tokens of different ranges are not compared; one without
    offsets is there already. In other groups all is as with `judge`, and what was taken in any order before must leave
    no gap. Raises `SinkRejectedError` for a lower generation, another coordination log, a data topic made anew without
    a new generation, and a range that overlaps what is stored and is not the same.
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
            f"overlaps it and is not the same: nothing was written; {_UNPLANNED}"
        )
    if wanted.start < stored.below:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output was written in order up to {stored.below} in the same "
            f"generation, and has no such range: nothing was written; {_UNPLANNED}"
        )
    return Verdict.TAKE


_UNPLANNED = (
    "a plan never changes within a generation, so compare the output with the coordination log (`marshal-dagster "
    "tail`); setting the position begins a new generation, which replaces what was read"
)


def _judge_in_order(stored: StoredRanges, wanted: ClaimedRange) -> Verdict:
    """Judge by the position alone if all was taken in order; else the very last range is known and what follows it."""
    is_known = stored.overlapping in {None, (wanted.start, wanted.end)}
    if stored.position is None or (stored.position != stored.below and not is_known):
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: members have claimed ranges in this generation, and the output holds "
            "some that it neither is nor follows on without a gap: nothing was written; a group that no longer claims "
            "ranges needs a new generation: set the position"
        )
    return _judge_position(stored.position, wanted)


def _is_of_newer_generation(stored: StoredPosition | StoredRanges, wanted: ClaimedRange) -> bool:
    """Say whether `wanted` begins a new generation of the output.

    Raises `SinkRejectedError` for another log or data topic, an older generation, and a lower token where they are
    compared.
    """
    if stored.coordination_topic_id != wanted.coordination_topic_id:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output was written under coordination topic id "
            f"{stored.coordination_topic_id}, this run uses {wanted.coordination_topic_id}. The coordination topic was "
            "made anew; a person must check what was done and point the group at a new output"
        )
    if wanted.generation < stored.generation:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: generation {wanted.generation} is older than {stored.generation} in "
            "the output: the position was set while this run worked; let it end"
        )
    if wanted.epoch < stored.epoch and not wanted.in_any_order:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: fencing token {wanted.epoch} is lower than {stored.epoch} in the "
            "output: another run has taken the partition over; this one must stop"
        )
    if wanted.generation > stored.generation:
        return True
    if wanted.data_topic_id != stored.data_topic_id:
        raise SinkRejectedError(
            f"{wanted} of group {wanted.group!r}: the output holds data topic {stored.data_topic_id}, this run reads "
            f"{wanted.data_topic_id} in the same generation: the data topic was made anew; set the position first"
        )
    return False
