"""Cases of a new generation, which replaces offset by offset what older ones hold, or is refused."""

from collections.abc import Mapping, Sequence
from functools import partial

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.conformance.case import Case, registers
from marshal_dagster.sinks.conformance.interrupts import dies, steps_of
from marshal_dagster.sinks.conformance.target import (
    Row,
    Target,
    deliver,
    expect,
    expect_refused,
    expect_rows,
    intervals,
    never,
    part,
    rows_of,
    shared_target,
)
from marshal_dagster.sinks.sink import Intervals

CASES: list[Case] = []
case = registers(CASES)


@case
def inside_an_older_range(target: Target) -> None:
    """Only the offsets that were read anew are replaced; what lies before and behind stays."""
    deliver(target, "old", part(0, 0, 10), part(1, 0, 3))
    newer = part(0, 4, 7, generation=20, epoch=21)
    if replaced(target, newer):
        expected = rows_of("old", part(0, 0, 4), part(0, 7, 10), part(1, 0, 3)) + rows_of("new", newer)
        expect_rows(target, expected, "after a new generation of [4, 7)")


@case
def over_older_ranges(target: Target) -> None:
    """Each batch of the new generation replaces, the first and those that follow on it."""
    for start in (0, 10, 20, 30):
        deliver(target, "old", part(0, start, start + 10))
    for start, end in ((5, 15), (15, 35), (35, 50)):
        if not replaced(target, part(0, start, end, generation=20, epoch=21)):
            return
    expect_rows(
        target, rows_of("old", part(0, 0, 5)) + rows_of("new", part(0, 5, 50)), "after a new generation of 5 on"
    )
    expect_refused(target, "old", part(0, 40, 50, epoch=90), why="generation 0 after 20")


@case
def beyond_older_rows(target: Target) -> None:
    """A new generation where the output has no rows yet is taken by every sink, also one that cannot replace."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 30, 35, generation=20, epoch=21)
    reason = target.sink().can_replace([newer])
    expect(reason is None, f"can_replace() says of offsets without rows: {reason}")
    expect(deliver(target, "new", newer).taken == (newer,), "a new generation beyond all rows was not taken")
    expect_rows(
        target, rows_of("old", part(0, 0, 10)) + rows_of("new", newer), "after a new generation beyond all rows"
    )


@case
def what_was_not_read_stays(target: Target) -> None:
    """What retention took, or compaction since, was not read anew: its rows stay."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 0, 10, generation=20, epoch=21, readable=3)
    if replaced(target, newer, without=(5, 6, 9)):
        old = rows_of("old", part(0, 0, 3), part(0, 5, 7), part(0, 9, 10))
        expect_rows(target, old + rows_of("new", newer, without=(5, 6, 9)), "after some offsets were read anew")


@case
def read_without_rows(target: Target) -> None:
    """Code that now filters a message out removes the row that the old code made of it."""
    deliver(target, "old", part(0, 0, 6))
    newer = part(0, 0, 6, generation=20, epoch=21)
    rows = [(0, 1, "new"), (0, 4, "new")]
    if replaced(target, newer, rows=rows):
        expect_rows(target, rows, "after messages were filtered out that had rows")


@case
def compacted_meanwhile(target: Target) -> None:
    """An offset that has a new row and is gone when the offsets are read has that row, and only that."""
    deliver(target, "old", part(0, 0, 6))
    newer = part(0, 0, 6, generation=20, epoch=21)
    if replaced(target, newer, rows=rows_of("new", newer), without=(1, 4)):
        expect_rows(target, rows_of("new", newer), "after offsets 1 and 4 were compacted while their rows were written")


@case
def rows_at_other_offsets(target: Target) -> None:
    """A column `offset` that is no message's of the range takes away no row of others."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 2, 6, generation=20, epoch=21, readable=3)
    rows = [(0, offset, "new") for offset in (1, 4, 6, 2**63 - 2)]
    if replaced(target, newer, rows=rows):
        expected = rows_of("old", part(0, 0, 3), part(0, 6, 10)) + rows
        expect_rows(target, expected, "after [3, 6) was read anew, with rows at other offsets")


@case
def several_rows_of_a_message(target: Target) -> None:
    """Rows that are equal are kept each, and all rows at a replaced offset go, however many there are."""
    rows = [(0, 1, "a"), (0, 1, "b"), (0, 2, "c"), (0, 2, "c")]
    deliver(target, "old", part(0, 0, 4), rows=rows)
    expect_rows(target, rows, "with two messages of two rows each, of which one's are equal")
    if replaced(target, part(0, 1, 2, generation=20, epoch=21)):
        expect_rows(target, [(0, 1, "new"), *rows[2:]], "after an offset with two rows was replaced")


@case
def generation_upon_generation(target: Target) -> None:
    """The newest generation that read an offset has it."""
    deliver(target, "0", part(0, 0, 12))
    for number, (start, end) in ((1, (2, 10)), (2, (4, 6)), (3, (0, 5))):
        if not replaced(target, part(0, start, end, generation=10 * number, epoch=10 * number + 1), value=str(number)):
            return
    expected = [(0, offset, value) for offset, value in enumerate("333332111100")]
    expect_rows(target, expected, "after three generations over one another")


@case
def other_data_topic(target: Target) -> None:
    """Offsets of a topic that was made anew are other messages: the old rows stay."""
    deliver(target, "old", part(0, 0, 5))
    newer = part(0, 0, 3, generation=20, epoch=21, topic_id="made-anew")
    if target.sink().can_replace([newer]) is None:
        deliver(target, "new", newer)
        expect_rows(target, rows_of("old", part(0, 0, 5)) + rows_of("new", newer), "after the topic was made anew")


@case
def other_groups_stay(target: Target) -> None:
    """A new generation of a group, or of a topic, replaces nothing of another."""
    others = [part(0, 0, 5, topic="u")]
    if (shared := shared_target(target)) is not None:
        target = shared
        others.append(part(0, 0, 5, group="h"))
    for other in others:
        deliver(target, "other", other)
    deliver(target, "old", part(0, 0, 5))
    newer = part(0, 0, 3, generation=20, epoch=21)
    if replaced(target, newer):
        expected = rows_of("other", *others) + rows_of("new", newer) + rows_of("old", part(0, 3, 5))
        expect_rows(target, expected, "after a new generation of one group of two")


@case
def rows_without_offsets(target: Target) -> None:
    """Where older rows have no offset a new generation is refused, and `can_replace` says so."""
    old, columns = part(0, 0, 10), ("partition", "value")
    try:
        target.sink().write(target.frame([(0, "sum")], columns), [old], never)
    except ConfigurationError:
        expect_rows(target, [], "after a frame without a column 'offset' was refused")
        return
    over = part(0, 5, 12, generation=20, epoch=21)
    expect(target.sink().can_replace([over]) is not None, "can_replace() says nothing of rows that have no offset")
    expect_refused(target, "new", over, why="a new generation over rows without offsets")


@case
def some_rows_without_offsets(target: Target) -> None:
    """A single older row that has no offset, beside others, has a new generation refused, as it could not go."""
    old, beside = part(0, 0, 10), part(1, 0, 10)
    rows = [(0, 1, "a"), (0, None, "sum"), (1, 1, "b")]
    try:
        target.sink().write(target.frame(rows), [old, beside], never)
    except ConfigurationError:
        expect_rows(target, [], "after a frame with a row without 'offset' was refused")
        return
    written = [(0, 1, "a"), (0, -1, "sum"), (1, 1, "b")]
    expect_rows(target, written, "with a row that has no offset")
    over = part(0, 5, 12, generation=20, epoch=21)
    expect(target.sink().can_replace([over]) is not None, "can_replace() says nothing of a row that has no offset")
    expect_refused(target, "new", over, why="a new generation over a row without offset")
    newer = part(1, 0, 3, generation=20, epoch=21)
    if replaced(target, newer):
        expected = [*written[:2], *rows_of("new", newer)]
        expect_rows(target, expected, "after a new generation of a range whose rows all have offsets")


@case
def batch_says_no_to_the_offsets(target: Target) -> None:
    """`before_commit` is called once more behind `offsets_read`, and what it raises leaves everything as it was."""

    class TopicRecreatedError(Exception):
        """The topic that was read is another than that of the rows."""

    old, newer = part(0, 0, 6), part(0, 0, 3, generation=20, epoch=21)
    deliver(target, "old", old)
    if target.sink().can_replace([newer]) is not None:
        return
    rows, asked = rows_of("new", newer), list[str]()

    def offsets_read() -> Mapping[int, Intervals]:
        asked.append("offsets")
        return intervals(rows)

    def before_commit() -> None:
        if asked:
            raise TopicRecreatedError

    try:
        target.sink().write(target.frame(rows), [newer], offsets_read, before_commit)
    except TopicRecreatedError:
        expect_rows(target, rows_of("old", old), "after before_commit() had raised behind offsets_read()")
        return
    expect(bool(asked), "offsets_read() was not called, though older rows were to be replaced")
    raise AssertionError("before_commit() was not called behind offsets_read(), or what it raised did not come through")


@case
def death_while_replacing(target: Target) -> None:
    """New rows and the removal of older ones are one step, wherever their writer dies."""
    spare = 10**6
    deliver(target, "o", part(spare, 0, 10))
    if not replaced(target, part(spare, 3, 6, generation=20, epoch=21)):
        return
    deliver(target, "o", part(spare + 1, 0, 10))
    newest = part(spare + 1, 3, 6, generation=20, epoch=21)
    for number in steps_of(target, lambda: deliver(target, "n", newest)):
        deliver(target, "o", part(number, 0, 10))
        newer = part(number, 3, 6, generation=20, epoch=21)
        line = dies(target, number, partial(deliver, target, "n", newer))
        values = _values(target, number)
        expect(values in {"oooooooooo", "ooonnnoooo"}, f"one that died at {line} while it replaced has left {values}")
        deliver(target, "n", part(number, 3, 6, generation=20, epoch=22))
        values = _values(target, number)
        expect(values == "ooonnnoooo", f"one died at {line} while it replaced, and delivered again it is {values}")


def replaced(
    target: Target,
    newer: ClaimedRange,
    *,
    value: str = "new",
    without: Sequence[int] = (),
    rows: Sequence[Row] | None = None,
) -> bool:
    """Deliver a new generation over older rows; return False where the sink says that it cannot, and it is refused."""
    if target.sink().can_replace([newer]) is not None:
        expect_refused(target, value, newer, why="can_replace() gives a reason why not")
        return False
    try:
        outcome = deliver(target, value, newer, without=without, rows=rows)
    except SinkRejectedError as refused:
        raise AssertionError(f"can_replace() gives no reason, and {newer} was refused: {refused}") from refused
    expect(outcome.taken == (newer,), f"{newer} of a new generation was not taken")
    return True


def _values(target: Target, partition: int) -> str:
    return "".join(value for at, _, value in target.found() if at == partition)
