"""Conformance cases of groups whose members claim ranges: ranges arrive in any order, and each is judged by itself."""

from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks.conformance.case import Case, registers
from marshal_dagster.sinks.conformance.cases import race
from marshal_dagster.sinks.conformance.generations import replaced
from marshal_dagster.sinks.conformance.target import (
    Target,
    ahead,
    deliver,
    expect,
    expect_refused,
    expect_rows,
    part,
    rows_of,
)
from marshal_dagster.sinks.sink import WriteResult

CASES: list[Case] = []
case = registers(CASES, in_any_order=True)


@case
def ranges_in_any_order(target: Target) -> None:
    """Each range is taken once, with a fencing token higher or lower than those of its neighbours."""
    for start in (30, 0, 40, 10, 20):
        range_ = ahead(0, start, start + 10, epoch=50 - start)
        expect(deliver(target, "a", range_).taken == (range_,), f"{range_} was not taken")
    expect_rows(target, rows_of("a", part(0, 0, 50)), "after five ranges that came in any order")


@case
def range_that_comes_again(target: Target) -> None:
    """A range that the output has is skipped, with any fencing token, also if the output has its neighbours."""
    done = [ahead(0, start, start + 10, epoch=20) for start in (10, 30, 0, 20)]
    for range_ in done:
        deliver(target, "a", range_)
    for range_ in done:
        for epoch in (19, 20, 21):
            again = ahead(0, range_.start, range_.end, epoch=epoch)
            verdict = target.sink().verdicts([again])[again]
            expect(verdict is Verdict.SKIP, f"verdicts() of {again}, which the output has, returned {verdict}")
            deliver(target, "b", again)
    expect_rows(target, rows_of("a", part(0, 0, 40)), "after ranges were delivered again")


@case
def ranges_that_do_not_fit(target: Target) -> None:
    """Different ranges that overlap, an older generation and another coordination log are refused."""
    held = [ahead(0, 30, 40, generation=7), ahead(0, 10, 20, generation=7)]
    for range_ in held:
        deliver(target, "a", range_)
    for start, end in ((0, 20), (10, 19), (11, 20), (20, 31), (12, 18), (0, 99)):
        wrong = ahead(0, start, end, generation=7, epoch=50)
        expect_refused(target, "b", wrong, ahead(1, 0, 3, generation=7), why=f"{wrong} over others")
    for other in (
        ahead(0, 20, 30, generation=6, epoch=50),
        ahead(0, 20, 30, generation=7, log="another-log"),
        ahead(0, 20, 30, generation=7, topic_id="another-topic"),
    ):
        expect_refused(target, "b", other, why=f"{other!r} beside {held[0]!r}")
    between = ahead(0, 20, 30, generation=7)
    expect(deliver(target, "c", between).taken == (between,), "the range between two others was not taken")


@case
def ranges_and_whole_batches(target: Target) -> None:
    """A batch in order can follow ranges only if they have no gap, and a range must not overlap a batch in order."""
    deliver(target, "a", ahead(0, 20, 30))
    deliver(target, "a", ahead(0, 0, 10))
    expect_refused(target, "b", part(0, 30, 40, epoch=30), why="a batch in order after ranges with a gap")
    deliver(target, "a", ahead(0, 10, 20))
    whole = part(0, 30, 40, epoch=30)
    expect(deliver(target, "b", whole).taken == (whole,), "a batch in order after ranges without a gap was not taken")
    expect_refused(target, "b", ahead(0, 35, 45), why="a range that overlaps a batch in order")
    expect_rows(target, rows_of("a", part(0, 0, 30)) + rows_of("b", whole), "after ranges and a batch in order")


@case
def ranges_of_a_new_generation(target: Target) -> None:
    """Each range of a new generation replaces older rows only at its own offsets, in whatever order ranges come."""
    for start in (0, 10, 20, 30):
        deliver(target, "old", ahead(0, start, start + 10))
    for start in (22, 35, 12):
        if not replaced(target, ahead(0, start, start + 10, generation=20, epoch=50 - start)):
            return
    old = rows_of("old", part(0, 0, 12), part(0, 32, 35))
    expected = old + rows_of("new", part(0, 12, 32), part(0, 35, 45))
    expect_rows(target, expected, "after three ranges of a new generation")


@case
def neighbours_at_once(target: Target) -> None:
    """Writers of different ranges of one partition can commit at the same time, and all ranges are taken."""
    ranges = {f"v{start}": ahead(0, start, start + 5, epoch=90 - start) for start in (15, 0, 10, 5)}
    for value, outcome in race(target, {value: [range_] for value, range_ in ranges.items()}).items():
        if not isinstance(outcome, WriteResult):
            deliver(target, value, ranges[value])  # it failed because of the others
    expected = [row for value, range_ in ranges.items() for row in rows_of(value, range_)]
    expect_rows(target, expected, "after four neighbours were written at the same time")
