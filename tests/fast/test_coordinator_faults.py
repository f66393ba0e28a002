"""Check the judges of coordinated groups under faults: they find the fault in each doctored journal or log."""

import pytest

from marshal_dagster.protocol.messages import coordination_partition
from tests.coordinator_faults.checkers import Ownership, Record, gap_ms, judge, needless_stops
from tests.coordinator_faults.journal import Did, Line
from tests.coordinator_faults.scenario import KINDS, scenario

GROUP, TOPIC = "fleet", "orders"
HOME = coordination_partition(TOPIC, 2)


def log(*texts: str) -> list[Record]:
    """Return records of the topic's coordination partition, a tenth of a second apart."""
    return [(HOME, offset, 1_000 + 100 * offset, text.encode()) for offset, text in enumerate(texts)]


def claiming(instance: str) -> str:
    """Return a claim of partition 0."""
    return f"ClaimingPartition/1/7/{instance}/client/{GROUP}/{TOPIC}/0"


def beat(instance: str, offset: int) -> str:
    """Return a heartbeat that commits an offset of partition 0."""
    return f"Heartbeat/1/7/{instance}/client/{GROUP}/{TOPIC}/0/{offset}"


def releasing(instance: str, offset: int) -> str:
    """Return a release of partition 0."""
    return f"ReleasingPartition/1/7/{instance}/client/{GROUP}/{TOPIC}/0/{offset}"


def line(did: Did, at_ms: float, instance: str, epoch: int, offset: int) -> Line:
    """Return a journal line about partition 0."""
    return Line(at_ms, did, TOPIC, 0, instance, epoch, offset)


GOOD_LOG = log(
    claiming("a.1"),
    beat("a.1", 0),
    beat("a.1", 1),
    releasing("a.1", 1),
    claiming("b.1"),
    beat("b.1", 1),
    beat("b.1", 2),
)
A = [line(Did.WORKS, 10, "a.1", 0, 0), line(Did.COMMITTED, 20, "a.1", 0, 1)]
B = [line(Did.WORKS, 50, "b.1", 4, 1), line(Did.COMMITTED, 60, "b.1", 4, 2)]


def broken(records: list[Record], a: list[Line], b: list[Line]) -> set[str]:
    """Return the guarantees that the judges find broken."""
    return {violation.promise for violation in judge(GROUP, 2, records, {"a": a, "b": b}).violations}


def test_a_good_run_passes() -> None:
    """Two owners work one after the other, and the log has their commits."""
    assert broken(GOOD_LOG, A, B) == set()


@pytest.mark.parametrize(
    ("a", "b", "promise"),
    [
        ([*A, line(Did.WORKS, 55, "a.1", 0, 1)], B, "never two owners"),
        (A, [line(Did.WORKS, 50, "b.1", 5, 1)], "who works has won its claim"),
        ([*A, line(Did.COMMITTED, 30, "a.1", 0, 2)], B, "a commit that is believed in is in the log"),
        (A, [*B, line(Did.COMMITTED, 70, "b.1", 4, 3)], "no offset is lost"),
    ],
)
def test_a_doctored_journal_is_caught(a: list[Line], b: list[Line], promise: str) -> None:
    """Each fault is found as a breach of the guarantee that it breaks."""
    assert promise in broken(GOOD_LOG, a, b)


def test_uneven_and_homeless_partitions_are_reported() -> None:
    """Uneven shares, partitions without an owner and partitions of a dead owner are reported."""
    places = [(TOPIC, number) for number in range(4)]
    owners = {place: ("a" if number < 2 else "b", number) for number, place in enumerate(places)}
    assert Ownership(owners).what_is_wrong(places, ["a", "b"]) is None
    assert Ownership(owners).what_is_wrong(places, ["a", "b", "c"]) == "spread {'a': 2, 'b': 2, 'c': 0}"
    assert "no owner" in (Ownership(owners).what_is_wrong(places, ["a", "c"]) or "")


def test_a_stop_of_what_stays_is_needless() -> None:
    """A stop is needless if the partition stays; one of a partition that moved, or an earlier stop, is not."""
    journals = {"a": [Line(at_ms, Did.STOPS, TOPIC, number) for at_ms, number in ((1, 0), (5, 0), (5, 1))]}
    after = Ownership({(TOPIC, 0): ("a", 9), (TOPIC, 1): ("b", 9)})
    assert needless_stops(journals, 2, after) == [f"a: {journals['a'][1]}"]
    assert needless_stops(journals, 2, after, leaving=["a"]) == []


def test_a_time_without_a_coordinator_is_found() -> None:
    """A gap lies between the end of one coordinator's term and the next term, or the present."""
    one = [Line(at_ms, did) for at_ms, did in ((1, Did.LEADS), (10, Did.FOLLOWS))]
    assert gap_ms({"a": one, "b": [Line(14, Did.LEADS)]}, 5, 20) == 4
    assert gap_ms({"a": one, "b": []}, 5, 20) == 10
    assert gap_ms({"a": one, "b": []}, 15, 20) == 0


def test_each_kind_of_fault_is_first_in_some_run() -> None:
    """Any run of consecutive seeds as long as the list of faults begins with each kind of fault once."""
    assert [scenario(seed).faults[0].kind for seed in range(len(KINDS))] == list(KINDS)
