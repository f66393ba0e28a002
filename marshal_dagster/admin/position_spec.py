"""Target positions as an operator gives them, and the offset that each means in a partition. No I/O."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.admin.times import instant_ms
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import INT32_MAX, INT64_MAX, NUMBER
from marshal_dagster.protocol.state import OffsetBounds

PARTITIONS_TEXT: Final = "Partitions of the topic, such as '0-3,7' (default: all)."
"""The description of the option `partitions` in all run configs."""

_MOST_PARTITIONS: Final = 1_000_000
"""More than any cluster has: a slip in a range must not fill the memory."""
_PARTITIONS: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The present position of one partition, from which a target is computed."""

    offset: int | None
    """The next offset to read; None without a position."""
    extent: OffsetBounds
    """The offsets that can be read."""
    is_other: bool = False
    """Whether `offset` belongs to a deleted topic of the same name."""
    at_time: int | None = None
    """The first offset with the requested time or later; None if there is none."""


class LogEnd(StrEnum):
    """One end of the readable offsets of a partition."""

    EARLIEST = "earliest"
    """The first record that was not deleted."""
    LATEST = "latest"
    """After the last record: only new records are read."""

    def of(self, extent: OffsetBounds) -> int:
        """Return the offset of this end of `extent`."""
        return extent.start if self is LogEnd.EARLIEST else extent.end


@dataclass(frozen=True, slots=True)
class ToOffsets:
    """Given offsets, either one for every partition or one for each named partition."""

    each: int | None = None
    """The offset for every partition."""
    by_partition: tuple[tuple[int, int], ...] = ()
    """Pairs of partition and offset, which also name the partitions to set."""


@dataclass(frozen=True, slots=True)
class ToDatetime:
    """The first record with that timestamp (unix ms) or a later one; the end of the partition if there is none."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """That many offsets after the present position, or before it if the number is negative."""

    offsets: int


Target = ToOffsets | ToDatetime | LogEnd | ShiftBy


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The options that give a target; exactly one must be given."""

    to_offset: str | None = None
    to_datetime: str | None = None
    to_earliest: bool = False
    to_latest: bool = False
    shift_by: int | None = None

    @property
    def given(self) -> int:
        """The number of options that are given."""
        ways = (self.to_offset, self.to_datetime, self.to_earliest or None, self.to_latest or None, self.shift_by)
        return sum(way is not None for way in ways)

    def target(self, prefix: str = "") -> Target:
        """Return the target; `prefix` is `--` for options of the command line. Raises `ConfigurationError`."""
        if self.given != 1:
            raise ConfigurationError("give one of to_offset, to_datetime, to_earliest, to_latest and shift_by")
        joint = "-" if prefix else "_"
        if self.to_offset is not None:
            return offsets_of(self.to_offset, f"{prefix}to{joint}offset")
        if self.to_datetime is not None:
            return ToDatetime(instant_ms(self.to_datetime, f"{prefix}to{joint}datetime"))
        if self.shift_by is not None:
            return ShiftBy(self.shift_by)
        return LogEnd.EARLIEST if self.to_earliest else LogEnd.LATEST


def offsets_of(text: str, source: str) -> ToOffsets:
    """Parse `0=5,1=7`, or one offset for all partitions. Raises `ConfigurationError`, which begins with `source`."""
    if NUMBER.fullmatch(text) and int(text) <= INT64_MAX:
        return ToOffsets(each=int(text))
    found: dict[int, int] = {}
    for part in text.split(","):
        number, _, offset = part.strip().partition("=")
        if not (NUMBER.fullmatch(number) and NUMBER.fullmatch(offset)) or int(offset) > INT64_MAX:
            raise ConfigurationError(
                f"{source}: {part!r} is not of the form PARTITION=OFFSET; give 0=5,1=7 or one offset for all"
            )
        if found.setdefault(int(number), int(offset)) != int(offset):
            raise ConfigurationError(f"{source}: partition {number} is named twice")
    return ToOffsets(by_partition=tuple(sorted(found.items())))


def partitions_of(text: str, source: str) -> tuple[range, ...]:
    """Parse partitions such as `0,2-4`. Raises `ConfigurationError`, whose message begins with `source`."""
    return tuple(_run_of(part.strip(), source) for part in text.split(","))


def partition_numbers(text: str, source: str) -> tuple[int, ...]:
    """Parse partitions as `partitions_of` does; return their numbers, sorted. Raises `ConfigurationError`."""
    runs = partitions_of(text, source)
    if sum(map(len, runs)) > _MOST_PARTITIONS:
        raise ConfigurationError(f"{source}: {text!r} names more than {_MOST_PARTITIONS} partitions")
    return tuple(sorted({number for run in runs for number in run}))


def partitions_text(numbers: Collection[int]) -> str:
    """Return partitions in the form that `partitions_of` parses, such as `0,2-4`."""
    return runs_text(numbers, ",")


def _run_of(text: str, source: str) -> range:
    match = _PARTITIONS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last or last > INT32_MAX:
        raise ConfigurationError(
            f"{source}: {text!r} names no partitions; give numbers and ranges of numbers, such as 0,2-4"
        )
    return range(first, last + 1)


def choose_partitions(
    topic: str, target: Target, named: Sequence[range] | None, existing: Collection[int]
) -> list[int]:
    """Return the selected partitions, sorted: those `named`, or those that the target names, or all existing ones.

    Raises `ConfigurationError` for a partition that does not exist, and if both `named` and the target name partitions.
    """
    by_target = (
        [range(number, number + 1) for number, _ in target.by_partition] if isinstance(target, ToOffsets) else []
    )
    if by_target and named is not None:
        raise ConfigurationError("the offsets already name partitions; do not give partitions as well")
    runs = by_target or named
    if runs is None:
        return sorted(existing)
    unknown = [run[-1] for run in runs if run[-1] not in existing]
    if unknown:
        raise ConfigurationError(f"topic {topic!r} has no partition {unknown[0]}; it has {len(existing)}")
    return sorted({number for run in runs for number in run})


def resolve(topic: str, target: Target, positions: Mapping[int, PartitionPosition]) -> dict[int, int]:
    """Return the offset that `target` means in each partition. Raises `ConfigurationError`."""
    return {number: _resolve(f"{topic}/{number}", number, target, at) for number, at in positions.items()}


def _resolve(name: str, number: int, target: Target, at: PartitionPosition) -> int:
    match target:
        case ToOffsets(each=None):
            return dict(target.by_partition)[number]
        case ToOffsets(each=int(offset)):
            return offset
        case ToDatetime():
            return at.extent.end if at.at_time is None else at.at_time
        case LogEnd():
            return target.of(at.extent)
        case ShiftBy():
            return _shift(name, target.offsets, at)
    raise AssertionError(target)


def _shift(name: str, offsets: int, at: PartitionPosition) -> int:
    if at.offset is None or at.is_other:
        why = "it has none" if at.offset is None else "the topic was deleted and re-created since"
        raise ConfigurationError(f"{name} cannot be shifted from its present position: {why}. Give an offset instead")
    if at.offset + offsets < 0:
        raise ConfigurationError(
            f"{name} is at offset {at.offset} and cannot be shifted by {offsets}: the smallest offset is 0"
        )
    if at.offset + offsets > INT64_MAX:
        raise ConfigurationError(
            f"{name} is at offset {at.offset} and cannot be shifted by {offsets}: the largest offset is {INT64_MAX}"
        )
    return at.offset + offsets


def outside_text(offset: int, extent: OffsetBounds) -> str:
    """Return how `offset` is outside of `extent`; an empty text if it is not."""
    if offset < extent.start:
        return f"offsets {offset} to {extent.start} (exclusive) are deleted"
    return f"beyond the end {extent.end}" if offset > extent.end else ""
