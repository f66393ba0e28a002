"""The search for the failing part of a batch, which tries few parts. A function replaces Spark here."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from marshal_dagster.spark import record_search
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.record_search import FailingPart, NoFailingPart, Offsets, _Search

Place = tuple[int, int]
READ: Any = object()


def places(part: Offsets) -> set[Place]:
    """Return partition and offset of each record of a part."""
    return {(number, offset) for number, (start, end) in part.items() for offset in range(start, end)}


def search(
    offsets: Offsets, fails: Callable[[set[Place]], object], *, most: int = 10**6, kind: str = "ValueError"
) -> tuple[FailingPart | NoFailingPart, list[Offsets]]:
    """Run the search and return its result with the parts tried.

    `fails` returns the error of a part. The search may try at most `most` parts.
    """
    requested: list[Offsets] = []

    class Search(_Search):
        def _evaluate(self, part: Offsets, rows: object) -> str | None:
            requested.append(part)
            found = fails(places(part)) if rows is None else None
            return f"{found}: no number" if found else None

    work = Search(cast("Any", object()), READ, READ, lambda: len(requested) < most, kind)
    return work.run(offsets), requested


OFFSETS = st.dictionaries(st.integers(0, 6), st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1).map(
    lambda found: {number: (start, start + width) for number, (start, width) in found.items()}
)


@pytest.mark.slow
@given(OFFSETS, st.data())
def test_a_record_that_fails_is_found(offsets: Offsets, data: st.DataObject) -> None:
    """One of the failing records is found. The number of tries is logarithmic in the number of records."""
    bad = data.draw(st.sets(st.sampled_from(sorted(places(offsets))), min_size=1))
    found, requested = search(offsets, lambda part: part & bad and "ValueError")
    assert isinstance(found, FailingPart)
    assert found.is_smallest
    assert places(found.offsets) <= bad
    assert len(places(found.offsets)) == 1
    assert len(requested) <= 2 + 3 + 6 + 2


@pytest.mark.slow
@given(OFFSETS, st.data())
def test_what_fails_together_only_is_narrowed_down(offsets: Offsets, data: st.DataObject) -> None:
    """If records fail only together, all of the found part fails and neither of its halves does."""
    records = sorted(places(offsets))
    together = set(records[:1]) | data.draw(st.sets(st.sampled_from(records), min_size=1))
    assume(len(together) > 1)
    found, _ = search(offsets, lambda part: together <= part and "ValueError")
    assert isinstance(found, FailingPart)
    assert together <= places(found.offsets)
    assert found.is_smallest


def test_what_fails_without_records_is_of_none() -> None:
    """If even an empty part fails, the error belongs to no record."""
    expected = NoFailingPart("it also fails without any message: ValueError: no number")
    assert search({0: (0, 9)}, lambda _: "ValueError") == (expected, [{0: (0, 0)}])


@pytest.mark.parametrize("tries", range(12))
def test_a_worker_that_dies_during_the_search_changes_nothing(tries: int) -> None:
    """If one try fails because a process died, it is repeated, so the record is still found and no other is named."""
    so_far = 0

    def fails(part: set[Place]) -> str:
        nonlocal so_far
        so_far += 1
        if so_far == tries + 1:
            return "org.apache.spark.SparkException"
        return "ValueError" if (1, 5) in part else ""

    found, _ = search(dict.fromkeys(range(3), (0, 8)), fails)
    assert found == FailingPart({1: (5, 6)}, "ValueError: no number", is_smallest=True)


def test_a_reason_is_given_if_no_part_fails() -> None:
    """If nothing fails any more, or there is no time, the result states that."""
    assert search({0: (0, 9)}, lambda _: "")[0] == NoFailingPart("it does not fail when it is evaluated again")
    assert search({0: (0, 9)}, lambda _: "", most=0)[0] == NoFailingPart("the time for the search was over")


def test_what_fails_by_something_else_meanwhile_is_of_no_record() -> None:
    """If an outage begins during the search, a part that succeeded before fails too. Then no record is blamed."""
    requested = 0

    def fails(part: set[Place]) -> str:
        nonlocal requested
        requested += bool(part)
        if requested > 2:
            return "KafkaException"
        return "ValueError" if (0, 40) in part else ""

    found, _ = search({0: (0, 64)}, fails)
    assert isinstance(found, NoFailingPart)
    assert "KafkaException: no number" in found.reason
    found, _ = search({0: (0, 64)}, lambda part: (0, 9) in part and "KeyError")
    assert isinstance(found, FailingPart)
    assert found.offsets == {0: (9, 10)}


def test_a_search_that_takes_too_long_gives_what_it_has() -> None:
    """At its limit the search returns the smallest part that failed; that may be the whole batch."""
    found, _ = search({0: (0, 1024)}, lambda part: (0, 5) in part and "ValueError", most=4)
    assert found == FailingPart({0: (0, 256)}, "ValueError: no number", is_smallest=False)
    found, _ = search({0: (0, 1024)}, lambda part: (0, 1023) in part and "ValueError", most=4)
    assert found == FailingPart({0: (0, 1024)}, "ValueError: no number", is_smallest=False)


OVERFLOW = "java.lang.ArithmeticException: long overflow"
LOST = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task 0.0 in stage"
)
UDF = "An exception was thrown from the worker.\nTraceback (most recent call last):\n  File 'a', line 1\n    int(x)\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{UDF}ValueError: no number: 'x'\n", "ValueError: no number: 'x'"),
        (f"An error occurred while calling o1.save.\n: {OVERFLOW}\n\tat java.base", OVERFLOW),
        (f"{LOST} 1.0 (TID 1) (localhost executor driver): {OVERFLOW}\n\tat java", OVERFLOW),
        ("[CAST_INVALID_INPUT] The value 'x'.\n== SQL ==\n^^^", "[CAST_INVALID_INPUT] The value 'x'."),
        ("", "ValueError"),
    ],
)
def test_an_error_of_sparks_in_one_line(text: str, line: str) -> None:
    """An error of Spark is reduced to one line: Python's own, or Java's."""
    assert first_line(ValueError(text)) == line


@pytest.mark.parametrize(
    ("text", "is_of_none"),
    [
        ("org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired", True),
        (
            "An error occurred while calling o1.save.\n: org.apache.spark.sql.kafka010.KafkaIllegalStateException: S",
            True,
        ),
        ("ValueError: a Timeout is missing", False),
        ("java.lang.OutOfMemoryError: Java heap space", True),
        ("Task failed\njava.io.IOException: No space left on device", True),
        (f"{OVERFLOW}\n\tat org.apache.spark.sql.kafka010.KafkaRecordToRowConverter", False),
        ("[CAST_INVALID_INPUT] The value 'x'", False),
    ],
)
def test_what_a_disk_or_a_broker_comes_to_is_of_no_record(text: str, *, is_of_none: bool) -> None:
    """An error of a disk or a broker belongs to no record. Any record would cause it, so the first would be blamed."""
    error = type("SparkException", (Exception,), {"__module__": "pyspark.errors.exceptions.captured"})(text)
    assert record_search._is_of_no_record(error) is is_of_none


def test_only_what_an_action_of_spark_raised_is_looked_into() -> None:
    """Only an error of a Spark action starts a search, also if the user's function wraps it in another error."""
    captured = type("PythonException", (Exception,), {"__module__": "pyspark.errors.exceptions.captured"})("x")
    analysis = type("AnalysisException", (Exception,), {"__module__": "pyspark.errors.exceptions.captured"})("x")
    other = RuntimeError("mine")
    other.__cause__ = captured
    assert [record_search._spark_error(each) for each in (captured, other, analysis, ValueError())] == [
        captured,
        captured,
        None,
        None,
    ]
