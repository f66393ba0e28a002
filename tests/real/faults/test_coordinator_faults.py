"""A coordinated group under faults on three real brokers, with a few seeds that contain the worst faults.

`make soak-coordinator` runs 200 seeds.
"""

import pytest

from tests.conditions import WITHIN_S
from tests.coordinator_faults import run
from tests.coordinator_faults.__main__ import SUITE
from tests.coordinator_faults.scenario import FaultKind, scenario
from tests.fault_harness.cluster import FaultyKafka

SEEDS = (2561, 57607)
WORST = {
    FaultKind.COORDINATOR_KILLED,
    FaultKind.COORDINATOR_STOPPED,
    FaultKind.MEMBER_KILLED,
    FaultKind.MEMBER_STOPPED,
    FaultKind.BROKER_KILLED,
    FaultKind.PARTITIONS_ADDED,
    FaultKind.TOPIC_CREATED,
}


def test_the_seeds_have_the_worst_faults() -> None:
    """The few seeds contain each of the worst faults."""
    assert {fault.kind for seed in SEEDS for fault in scenario(seed).faults} >= WORST


def test_a_coordinated_group_keeps_its_promises_under_faults(
    faulty_brokers: FaultyKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition never has two owners, no offset is lost or committed by another member, and work resumes evenly."""
    monkeypatch.setattr(run, "SETTLE_WITHIN_S", WITHIN_S)  # on a busy machine; the soak measures
    with SUITE.bed(services=faulty_brokers) as bed:
        rows = list(bed.rows(SEEDS))
    assert [(row.seed, row.violations) for row in rows if row.violations] == []
    assert sum(row.two_owners + row.lost + row.foreign for row in rows) == 0
    assert [row.seed for row in rows if row.commits] == list(SEEDS)
