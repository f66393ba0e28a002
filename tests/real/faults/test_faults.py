"""Real members under faults on three real brokers, with a few seeds that together contain every kind of fault.

`make soak-faults` runs 200 seeds; `docs/verification/faults.md` describes what is judged.
"""

from itertools import product

from marshal_dagster.protocol.messages import DeliveryMode
from tests.fault_harness.cluster import FaultyKafka
from tests.faults.__main__ import SUITE
from tests.faults.scenario import FaultKind, scenario

SEEDS = (4, 15, 25, 70, 76, 85, 88, 112, 141, 142)


def test_the_seeds_have_every_fault() -> None:
    """The few seeds contain every kind of fault, and every delivery mode with whole partitions and with ranges."""
    chosen = [scenario(seed) for seed in SEEDS]
    assert {fault.kind for of in chosen for fault in of.faults} == set(FaultKind)
    assert {(of.mode, of.ranges is None) for of in chosen} == set(product(DeliveryMode, (True, False)))


def test_a_group_keeps_its_promises_under_faults(faulty_brokers: FaultyKafka) -> None:
    """Under any fault nothing is lost or processed twice, and no member wrongly believes in a claim or a commit."""
    with SUITE.bed(services=faulty_brokers) as bed:
        rows = list(bed.rows(SEEDS))
    assert [(row.seed, row.violations) for row in rows if row.violations] == []
    assert sum(row.lost + row.twice for row in rows) == 0
    assert sum(len(row.takeovers_ms) for row in rows) > 0
    assert max(row.together for row in rows) > 1
