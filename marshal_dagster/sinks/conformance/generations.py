"""Conformance cases of a new generation: it replaces rows of older generations offset by offset, or is refused."""

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
    """Only the offsets that were read again are replaced; rows before and after them stay."""
    deliver(target, "old", part(0, 0, 10), part(1, 0, 3))
    newer = part(0, 4, 7, generation=20, epoch=21)
    if replaced(target, newer):
        expected = rows_of("old", part(0, 0, 4), part(0, 7, 10), part(1, 0, 3)) + rows_of("new", newer)
        expect_rows(target, expected, "after a new generation of [4, 7)")


@case
def over_older_ranges(target: Target) -> None:
    """Each batch of the new generation replaces older rows, not only the first one."""
    for start in (0, 10, 20, 30):
        deliver(target, "old", part(0, start, start + 10))
    for start, end in ((5, 15), (15, 35), (35, 50)):
        if not replaced(target, part(0, start, end, generation=20, epoch=21)):
            return
    expect_rows(
        target, rows_of("old", part(0, 0, 5)) + rows_of("new", part(0, 5, 50)), "after a new generation from offset 5"
    )
    expect_refused(target, "old", part(0, 40, 50, epoch=90), why="generation 0 after 20")


@case
def beyond_older_rows(target: Target) -> None:
    """Every sink takes a new generation of offsets without rows, also a sink that cannot replace rows."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 30, 35, generation=20, epoch=21)
    reason = target.sink().can_replace([newer])
    expect(reason is None, f"can_replace() of offsets without rows returned: {reason}")
    expect(deliver(target, "new", newer).taken == (newer,), "a new generation beyond all rows was not taken")
    expect_rows(
        target, rows_of("old", part(0, 0, 10)) + rows_of("new", newer), "after a new generation beyond all rows"
    )


@case
def what_was_not_read_stays(target: Target) -> None:
    """Messages that retention or compaction has deleted are not read again, so their rows stay."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 0, 10, generation=20, epoch=21, readable=3)
    if replaced(target, newer, without=(5, 6, 9)):
        old = rows_of("old", part(0, 0, 3), part(0, 5, 7), part(0, 9, 10))
        expect_rows(target, old + rows_of("new", newer, without=(5, 6, 9)), "after some offsets were read again")


@case
def read_without_rows(target: Target) -> None:
    """If the new code filters a message out, the row that the old code made from it is removed."""
    deliver(target, "old", part(0, 0, 6))
    newer = part(0, 0, 6, generation=20, epoch=21)
    rows = [(0, 1, "new"), (0, 4, "new")]
    if replaced(target, newer, rows=rows):
        expect_rows(target, rows, "after messages were filtered out that had rows")


@case
def compacted_meanwhile(target: Target) -> None:
    """An offset with a new row, whose message is compacted before `offsets_read`, has only the new row."""
    deliver(target, "old", part(0, 0, 6))
    newer = part(0, 0, 6, generation=20, epoch=21)
    if replaced(target, newer, rows=rows_of("new", newer), without=(1, 4)):
        expect_rows(target, rows_of("new", newer), "after offsets 1 and 4 were compacted while their rows were written")


@case
def rows_at_other_offsets(target: Target) -> None:
    """A row with an offset outside of its range does not replace rows of other messages."""
    deliver(target, "old", part(0, 0, 10))
    newer = part(0, 2, 6, generation=20, epoch=21, readable=3)
    rows = [(0, offset, "new") for offset in (1, 4, 6, 2**63 - 2)]
    if replaced(target, newer, rows=rows):
        expected = rows_of("old", part(0, 0, 3), part(0, 6, 10)) + rows
        expect_rows(target, expected, "after [3, 6) was read again, with rows at other offsets")


@case
def several_rows_of_a_message(target: Target) -> None:
    """Equal rows are all kept, and all rows at a replaced offset are removed, however many there are."""
    rows = [(0, 1, "a"), (0, 1, "b"), (0, 2, "c"), (0, 2, "c")]
    deliver(target, "old", part(0, 0, 4), rows=rows)
    expect_rows(target, rows, "with two messages of two rows each, two of them equal")
    if replaced(target, part(0, 1, 2, generation=20, epoch=21)):
        expect_rows(target, [(0, 1, "new"), *rows[2:]], "after an offset with two rows was replaced")


@case
def generation_upon_generation(target: Target) -> None:
    """The rows at an offset are those of the newest generation that has read it."""
    deliver(target, "0", part(0, 0, 12))
    for number, (start, end) in ((1, (2, 10)), (2, (4, 6)), (3, (0, 5))):
        if not replaced(target, part(0, start, end, generation=10 * number, epoch=10 * number + 1), value=str(number)):
            return
    expected = [(0, offset, value) for offset, value in enumerate("333332111100")]
    expect_rows(target, expected, "after three overlapping generations")


@case
def other_data_topic(target: Target) -> None:
    """Offsets of a topic that was deleted and re-created are other messages, so the old rows stay."""
    deliver(target, "old", part(0, 0, 5))
    newer = part(0, 0, 3, generation=20, epoch=21, topic_id="made-anew")
    if target.sink().can_replace([newer]) is None:
        deliver(target, "new", newer)
        expect_rows(target, rows_of("old", part(0, 0, 5)) + rows_of("new", newer), "after the topic was re-created")


@case
def other_groups_stay(target: Target) -> None:
    """A new generation of one group and topic does not replace rows of other groups and topics."""
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
    """If older rows have no offset, a new generation is refused, and `can_replace` returns the reason."""
    old, columns = part(0, 0, 10), ("partition", "value")
    try:
        target.sink().write(target.frame([(0, "sum")], columns), [old], never)
    except ConfigurationError:
        expect_rows(target, [], "after a frame without a column 'offset' was refused")
        return
    over = part(0, 5, 12, generation=20, epoch=21)
    expect(target.sink().can_replace([over]) is not None, "can_replace() gives no reason for rows without offsets")
    expect_refused(target, "new", over, why="a new generation over rows without offsets")


@case
def some_rows_without_offsets(target: Target) -> None:
    """A new generation is refused even if only one of the older rows has no offset, because it cannot be replaced."""
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
    expect(target.sink().can_replace([over]) is not None, "can_replace() gives no reason for a row without offset")
    expect_refused(target, "new", over, why="a new generation over a row without offset")
    newer = part(1, 0, 3, generation=20, epoch=21)
    if replaced(target, newer):
        expected = [*written[:2], *rows_of("new", newer)]
        expect_rows(target, expected, "after a new generation of a range whose rows all have offsets")


@case
def batch_refuses_the_offsets(target: Target) -> None:
    """`before_commit` is called again after `offsets_read`, and if it raises, the output does not change."""

    class TopicRecreatedError(Exception):
        """The topic was re-created after the rows were read."""

    old, newer = part(0, 0, 6), part(0, 0, 3, generation=20, epoch=21)
    deliver(target, "old", old)
    if target.sink().can_replace([newer]) is not None:
        return
    rows, calls = rows_of("new", newer), list[str]()

    def offsets_read() -> Mapping[int, Intervals]:
        calls.append("offsets")
        return intervals(rows)

    def before_commit() -> None:
        if calls:
            raise TopicRecreatedError

    try:
        target.sink().write(target.frame(rows), [newer], offsets_read, before_commit)
    except TopicRecreatedError:
        expect_rows(target, rows_of("old", old), "after before_commit() had raised after offsets_read()")
        return
    expect(bool(calls), "offsets_read() was not called, although there were older rows to replace")
    raise AssertionError("before_commit() was not called after offsets_read(), or its error was not raised")


@case
def death_while_replacing(target: Target) -> None:
    """New rows are added and older ones removed in one atomic step, wherever the writer dies."""
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
        expect(
            values in {"oooooooooo", "ooonnnoooo"}, f"a writer that died at {line} while replacing rows left {values}"
        )
        deliver(target, "n", part(number, 3, 6, generation=20, epoch=22))
        values = _values(target, number)
        expect(
            values == "ooonnnoooo",
            f"a writer died at {line} while replacing rows, and after another delivery the rows are {values}",
        )


def replaced(
    target: Target,
    newer: ClaimedRange,
    *,
    value: str = "new",
    without: Sequence[int] = (),
    rows: Sequence[Row] | None = None,
) -> bool:
    """Deliver a new generation over older rows, and return whether the sink replaced them.

    If `can_replace` gives a reason, check that the sink refuses the range, and return False.
    """
    if target.sink().can_replace([newer]) is not None:
        expect_refused(target, value, newer, why="can_replace() gives a reason")
        return False
    try:
        outcome = deliver(target, value, newer, without=without, rows=rows)
    except SinkRejectedError as refused:
        raise AssertionError(f"can_replace() gives no reason, but {newer} was refused: {refused}") from refused
    expect(outcome.taken == (newer,), f"{newer} of a new generation was not taken")
    return True


def _values(target: Target, partition: int) -> str:
    return "".join(value for at, _, value in target.found() if at == partition)
