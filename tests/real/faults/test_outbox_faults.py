"""An outbox under faults on three real brokers and a real PostgreSQL, with a few seeds that contain the worst faults.

`make soak-outbox` runs 200 seeds.
"""

from tests.fault_harness.cluster import FaultyKafka
from tests.outbox_faults.__main__ import SUITE
from tests.outbox_faults.cluster import Services, faulty_postgres
from tests.outbox_faults.scenario import HARVESTERS, LEADER, FaultKind, scenario

SEEDS = (367570, 1142932)
WORST = {
    FaultKind.KILLED,
    FaultKind.STOPPED,
    FaultKind.BROKER_KILLED,
    FaultKind.POSTGRES_RESTARTED,
    FaultKind.POSTGRES_CRASHED,
    FaultKind.KAFKA_CUT,
    FaultKind.POSTGRES_CUT,
}


def test_the_seeds_have_the_worst_faults() -> None:
    """The few seeds contain each of the worst faults, and kill and stop the leader."""
    faults = [fault for seed in SEEDS for fault in scenario(seed).faults]
    assert {fault.kind for fault in faults} >= WORST
    of_harvesters = [fault for fault in faults if fault.kind in {FaultKind.KILLED, FaultKind.STOPPED}]
    assert {fault.harvester for fault in of_harvesters} == {LEADER}


def test_an_outbox_keeps_its_promises_under_faults(faulty_brokers: FaultyKafka) -> None:
    """All committed rows are published exactly once, no other records are published, and each key keeps its order."""
    with faulty_postgres(HARVESTERS) as postgres, SUITE.bed(services=Services(faulty_brokers, postgres)) as bed:
        rows = list(bed.rows(SEEDS))
    assert [(row.seed, row.violations) for row in rows if row.violations] == []
    assert sum(row.lost + row.invented + row.repeated + row.out_of_order for row in rows) == 0
    assert sum(row.takeovers for row in rows) > 0
    assert min(row.rows for row in rows) > 100
