"""Compares an output with its input, record by record."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulator.checkers import ViolationError
from tests.sink_conformance import Row
from tests.sink_faults.outputs import FOREIGN


@dataclass(frozen=True, slots=True)
class SetBack:
    """The position of a partition was set back to `start`, so each offset from there on is of `generation` or newer."""

    partition: int
    start: int
    generation: int


@dataclass(slots=True)
class Verdict:
    """What is wrong with the output."""

    lost: int = 0
    twice: int = 0
    changed: int = 0
    invented: int = 0
    outdated: int = 0
    """Rows of an older generation at offsets that were read again."""
    foreign_lost: int = 0
    violations: list[ViolationError] = field(default_factory=list)


def judge(
    rows: Sequence[Row], written: Mapping[int, Sequence[str]], set_back: Sequence[SetBack], foreign: int
) -> Verdict:
    """Judge an output.

    Args:
        rows: All rows. The value of each ends with the generation in which it was read.
        written: By partition, the values that were written to the data topic, in the order of their offsets.
        set_back: The positions that were set back.
        foreign: How many rows another engine has appended.
    """
    verdict = Verdict()
    counts = Counter((partition, offset) for partition, offset, _ in rows)
    for partition, values in written.items():
        for offset in range(len(values)):
            found = counts.pop((partition, offset), 0)
            verdict.lost += found == 0
            verdict.twice += found > 1
    verdict.foreign_lost = foreign - sum(counts.pop(place) for place in list(counts) if place[0] == FOREIGN)
    verdict.invented = len(counts)
    for partition, offset, text in rows:
        if partition not in written or offset >= len(written[partition]):
            continue
        value, _, generation = text.rpartition("|")
        verdict.changed += value != written[partition][offset]
        newest = [one.generation for one in set_back if one.partition == partition and one.start <= offset]
        verdict.outdated += int(generation) < max(newest, default=0)
    for name in ("lost", "twice", "changed", "invented", "outdated", "foreign_lost"):
        if count := getattr(verdict, name):
            verdict.violations.append(ViolationError("each record is in the output once", f"{name}: {count} rows"))
    return verdict
