"""Real members under faults on three real brokers: a few seeds that have every kind of fault between them.

`make soak-faults` runs 200; `docs/faults.md` tells what is judged.
"""

import pytest

from tests.faults.__main__ import LANES, running_bed
from tests.faults.scenario import FaultKind, scenario

SEEDS = (4, 25, 70, 76, 85, 88, 112, 141, 142, 143)


def test_the_seeds_have_every_fault() -> None:
    """The short form leaves out no kind of fault, and no delivery mode."""
    chosen = [scenario(seed) for seed in SEEDS]
    assert {fault.kind for of in chosen for fault in of.faults} == set(FaultKind)
    assert len({of.mode for of in chosen}) == 3


@pytest.mark.timeout(400)
def test_a_group_keeps_its_promises_under_faults() -> None:
    """Whatever befalls members and brokers: nothing lost, nothing done twice, no claim or commit believed in vain."""
    with running_bed(LANES) as bed:
        rows = list(bed.rows(SEEDS))
    assert [(row.seed, row.violations) for row in rows if row.violations] == []
    assert sum(row.lost + row.twice for row in rows) == 0
    assert sum(len(row.takeovers_ms) for row in rows) > 0
