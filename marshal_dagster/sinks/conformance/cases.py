"""Conformance cases of batches in order: take, skip and refuse ranges; writers that die, stall or run concurrently."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks.conformance.case import Case, registers
from marshal_dagster.sinks.conformance.interrupts import dies, stalls, steps_of
from marshal_dagster.sinks.conformance.target import (
    LocalFrame,
    Target,
    deliver,
    expect,
    expect_raised,
    expect_refused,
    expect_rows,
    listed,
    never,
    part,
    rows_of,
    shared_target,
)
from marshal_dagster.sinks.sink import WriteResult

CASES: list[Case] = []
case = registers(CASES)


@case
def first_batch(target: Target) -> None:
    """An empty output takes every range, wherever it starts, and then has exactly the range's rows."""
    ranges = [part(0, 0, 5), part(1, 100, 103)]
    verdicts = target.sink().verdicts(ranges)
    expect(set(verdicts.values()) == {Verdict.REPLACE}, f"verdicts() of an empty output returned {verdicts}")
    outcome = target.sink().write(target.frame(rows_of("a", *ranges)), ranges, never)
    expect(outcome.taken == tuple(ranges), f"of {listed(ranges)} an empty output took {listed(outcome.taken)}")
    wrote = {0: 5, 1: 3}
    expect(set(outcome.rows.items()) <= set(wrote.items()), f"reported rows {dict(outcome.rows)}, wrote {wrote}")
    expect_rows(target, rows_of("a", *ranges), "after the first batch")


@case
def batch_after_batch(target: Target) -> None:
    """A range that starts at the output's position is taken."""
    for start in range(0, 30, 10):
        outcome = deliver(target, "a", part(0, start, start + 10))
        expect(len(outcome.taken) == 1, f"the batch at {start} was not taken")
    expect_rows(target, rows_of("a", part(0, 0, 30)), "after three batches")
    following = part(0, 30, 31)
    verdict = target.sink().verdicts([following])[following]
    expect(verdict is Verdict.TAKE, "verdicts() does not return TAKE for the next batch")


@case
def duplicate(target: Target) -> None:
    """A batch that is delivered again, by the same owner or a later one, is skipped and not evaluated."""
    done = [part(0, 0, 5), part(1, 0, 3)]
    deliver(target, "a", *done)
    for again in (done, [part(0, 0, 5, epoch=20), part(1, 0, 3, epoch=21)]):
        verdicts = target.sink().verdicts(again)
        expect(set(verdicts.values()) == {Verdict.SKIP}, f"verdicts() of ranges in the output returned {verdicts}")
        outcome = target.sink().write(target.unreadable(), again, never)
        expect(set(outcome.skipped) == set(again), f"write() took ranges in the output again: {listed(outcome.taken)}")
        expect_rows(target, rows_of("a", *done), "after a duplicate batch")


@case
def subset_replayed_by_others(target: Target) -> None:
    """If a batch died between its commits, and two others repeat half of its ranges each, no row exists twice."""
    batch = [part(partition, 0, 4) for partition in range(4)]
    deliver(target, "a", *batch)
    for first in (0, 1):
        half = [part(partition, 0, 4, epoch=20 + partition) for partition in (first, first + 2)]
        expect(set(deliver(target, "b", *half).skipped) == set(half), f"{listed(half)} were taken a second time")
        expect_rows(target, rows_of("a", *batch), "after a part of the batch was repeated")


@case
def rest_of_a_batch(target: Target) -> None:
    """Ranges that the output has are skipped with their rows, and the others of the batch are written."""
    deliver(target, "a", part(0, 0, 4), part(2, 0, 4))
    batch = [part(partition, 0, 4, epoch=20) for partition in range(4)]
    outcome = deliver(target, "b", *batch)
    expect(set(outcome.taken) == {batch[1], batch[3]}, f"took {listed(outcome.taken)}")
    expected = rows_of("a", batch[0], batch[2]) + rows_of("b", batch[1], batch[3])
    expect_rows(target, expected, "after a batch of which the output had half")


@case
def lower_epoch(target: Target) -> None:
    """A lower fencing token is refused with the whole batch, also for ranges that the output has."""
    deliver(target, "a", part(0, 0, 10))
    for start, end in ((10, 20), (0, 10)):
        late = part(0, start, end, epoch=9)
        expect_refused(target, "b", late, part(1, 0, 3), why="fencing token 9 after 10")
    _goes_on(target)


@case
def lower_generation(target: Target) -> None:
    """A lower generation is refused with any fencing token."""
    deliver(target, "a", part(0, 0, 10, generation=7))
    late = part(0, 10, 20, generation=6, epoch=50)
    expect_refused(target, "b", part(1, 0, 3), late, why="generation 6 after 7")
    _goes_on(target, generation=7)


@case
def gap_or_overlap(target: Target) -> None:
    """A range that neither starts nor ends at the output's position is refused."""
    deliver(target, "a", part(0, 0, 10))
    for start, end in ((12, 20), (5, 15), (0, 5), (0, 20)):
        wrong = part(0, start, end, epoch=20)
        expect_refused(target, "b", part(1, 0, 3), wrong, why=f"[{start}, {end}) while the output's position is 10")
    _goes_on(target)


@case
def recreated_topics(target: Target) -> None:
    """Another coordination topic is always refused, and another data topic is refused within a generation."""
    deliver(target, "a", part(0, 0, 10, generation=7))
    for wrong in (
        part(0, 10, 20, generation=7, epoch=90, log="another-log"),
        part(0, 10, 20, generation=95, epoch=96, log="another-log"),
        part(0, 10, 20, generation=7, epoch=90, topic_id="another-topic"),
    ):
        expect_refused(target, "b", wrong, why=f"{wrong!r} after {part(0, 0, 10, generation=7)!r}")
    _goes_on(target, generation=7)


@case
def judged_when_written(target: Target) -> None:
    """A sink judges again when it writes, so changes by others since `verdicts` count."""
    mine = part(0, 0, 5)
    early = target.sink()
    early.verdicts([mine])
    deliver(target, "new", part(0, 0, 5, epoch=20))
    late = target.frame(rows_of("late", mine))
    what = "write() by a writer that another one has overtaken since verdicts()"
    expect_raised(SinkRejectedError, lambda: early.write(late, [mine], never), what)
    following = part(1, 0, 5)
    early.verdicts([following])
    deliver(target, "new", following)
    outcome = early.write(target.frame(rows_of("late", following)), [following], never)
    expect(outcome.skipped == (following,), "a range that another writer has written since verdicts() was taken again")
    expect_rows(target, rows_of("new", mine, following), "after another writer was faster")


@case
def groups_and_topics_apart(target: Target) -> None:
    """Groups that share an output, and different topics, have separate positions there, whatever their names."""
    ours = [part(0, 0, 5), part(0, 7, 9, topic="u", epoch=4)]
    if (shared := shared_target(target)) is not None:
        target = shared
        ours.append(part(0, 0, 5, group="h'; \\' \"%s\" `x` \u00e9", epoch=3))
    for our in ours:
        outcome = deliver(target, our.group + our.topic, our)
        expect(outcome.taken == (our,), f"{our} of group {our.group} was not taken after those of the others")
    expected = [row for our in ours for row in rows_of(our.group + our.topic, our)]
    expect_rows(target, expected, "with three groups and topics")


@case
def another_group(target: Target) -> None:
    """If one group has taken ranges of a topic, another group is refused, and the first one can continue."""
    deliver(target, "a", part(0, 0, 5))
    for wanted in (part(0, 0, 5, group="h", epoch=99), part(1, 7, 9, group="h", epoch=99)):
        expect_refused(target, "b", wanted, why="a second group")
    deliver(target, "b", part(0, 0, 5, group="h", topic="u"))
    deliver(target, "a", part(0, 5, 7, epoch=20))
    expected = rows_of("a", part(0, 0, 7)) + rows_of("b", part(0, 0, 5))
    expect_rows(target, expected, "after a second group was refused")


@case
def two_groups_at_once(target: Target) -> None:
    """If several groups start with a topic at the same time, one takes its range, and no row of the others exists."""
    mine = {"a": part(0, 0, 5, group="g"), "b": part(0, 0, 5, group="h"), "c": part(1, 0, 5, group="i")}
    results = race(target, {value: [range_] for value, range_ in mine.items()})
    taken = [value for value, result in results.items() if isinstance(result, WriteResult)]
    expect(len(taken) == 1, f"of three groups that started at once, {taken} reported that they wrote: {results}")
    expect_rows(target, rows_of(taken[0], mine[taken[0]]), "after three groups started at once")


@case
def ranges_without_rows(target: Target) -> None:
    """A range whose messages were all filtered out or compacted away is taken too, without rows."""
    ranges = [part(0, 0, 5), part(1, 3, 8)]
    outcome = deliver(target, "a", *ranges, rows=rows_of("a", ranges[1]))
    expect(set(outcome.taken) == set(ranges), f"took {listed(outcome.taken)}")
    following = [part(0, 5, 9), part(1, 8, 9)]
    outcome = deliver(target, "b", *following, rows=[])
    expect(set(outcome.taken) == set(following), f"of two ranges without rows, took {listed(outcome.taken)}")
    verdicts = target.sink().verdicts(following)
    expect(set(verdicts.values()) == {Verdict.SKIP}, f"verdicts() of ranges taken without rows returned {verdicts}")
    expect_rows(target, rows_of("a", ranges[1]), "after ranges without rows")


@case
def lost_and_missing_offsets(target: Target) -> None:
    """A range is taken to its end even if retention or compaction has deleted some of its messages."""
    lost, gone = part(0, 0, 10, readable=4), part(1, 0, 10, readable=10)
    deliver(target, "a", lost, gone, without=(6, 9))
    expect_rows(target, rows_of("a", lost, without=(6, 9)), "after ranges of which messages were lost")
    following = [part(0, 10, 12), part(1, 10, 12)]
    outcome = deliver(target, "a", *following)
    expect(set(outcome.taken) == set(following), f"after ranges with lost messages, took {listed(outcome.taken)}")


@case
def foreign_rows(target: Target) -> None:
    """Rows without a partition, or of one that the batch did not read, are refused with the whole batch."""
    mine = part(0, 0, 3)
    for foreign in ((7, 0, "x"), (None, 0, "x"), (-1, 0, "x")):
        frame = target.frame([*rows_of("a", mine), foreign])
        what = f"write() of a row of partition {foreign[0]}, which the batch did not read,"
        expect_raised(SinkRejectedError, partial(target.sink().write, frame, [mine], never), what)
        expect_rows(target, [], "after foreign rows were refused")
    nowhere = target.frame([(1, "x")], ("offset", "value"))
    what = "write() of a frame without a column 'partition'"
    expect_raised(ConfigurationError, lambda: target.sink().write(nowhere, [mine], never), what)
    expect_rows(target, [], "after a frame without a column 'partition'")
    deliver(target, "b", mine)
    expect_rows(target, rows_of("b", mine), "after a batch that follows refused ones")


@case
def large_numbers(target: Target) -> None:
    """Partitions, offsets, generations and fencing tokens can be as large as Kafka's."""
    high = part(2**31 - 1, 2**62, 2**62 + 3, epoch=2**62, generation=2**61)
    deliver(target, "a", high)
    expect(
        target.sink().verdicts([high])[high] is Verdict.SKIP,
        "a range with large numbers is not skipped when it is delivered again",
    )
    expect_refused(target, "b", part(2**31 - 1, 2**62 + 3, 2**62 + 4, epoch=2**62 - 1, generation=2**61), why="epoch")
    expect_rows(target, rows_of("a", high), "with large numbers")


@case
def many_partitions(target: Target) -> None:
    """A batch of more than a hundred ranges is one atomic step."""
    ranges = [part(partition, partition, partition + 2) for partition in range(120)]
    deliver(target, "a", *ranges)
    expect_rows(target, rows_of("a", *ranges), "after a batch of 120 partitions")
    verdicts = target.sink().verdicts(ranges)
    expect(set(verdicts.values()) == {Verdict.SKIP}, "some of 120 ranges are not skipped when they are delivered again")


@case
def batch_refuses(target: Target) -> None:
    """If `before_commit` raises after the rows were read, nothing is written."""

    class ClaimGoneError(Exception):
        """The batch has lost its claim."""

    mine = part(0, 0, 3)
    frame = target.frame(rows_of("a", mine))
    seen: list[bool] = []

    def before_commit() -> None:
        seen.append(not isinstance(frame, LocalFrame) or bool(frame.reads))
        raise ClaimGoneError

    what = "write() whose before_commit() raises"
    expect_raised(ClaimGoneError, lambda: target.sink().write(frame, [mine], never, before_commit), what)
    expect(seen[-1], "before_commit() was called before the rows were read, and not after")
    expect_rows(target, [], "after before_commit() had raised")
    expect(deliver(target, "b", mine).taken == (mine,), "a range that was not written was skipped")


@case
def death_at_any_step(target: Target) -> None:
    """If a writer dies at any line, and the same ranges are delivered again, their rows exist once."""

    def batch(number: int, epoch: int) -> list[ClaimedRange]:
        return [part(2 * number, 0, 3, epoch=epoch), part(2 * number + 1, 5, 7, epoch=epoch)]

    spare = 10**6
    expected = rows_of("a", *batch(spare, 10))
    for number in steps_of(target, lambda: deliver(target, "a", *batch(spare, 10))):
        line = dies(target, number, partial(deliver, target, "a", *batch(number, 10)))
        rows = [row for row in target.found() if row[0] // 2 == number]
        left = [range_ for range_ in batch(number, 10) if any(row[0] == range_.partition for row in rows)]
        may_be_left = target.range_by_range or len(left) != 1
        expect(
            may_be_left and rows == rows_of("a", *left),
            f"a writer that died at {line} left only a part of {listed(batch(number, 10))}: {rows}",
        )
        deliver(target, "b", *batch(number, 20))
        for range_ in batch(number, 20):
            expected += rows_of("a" if any(range_.partition == its.partition for its in left) else "b", range_)
        expect_rows(target, expected, f"a writer died at {line}, and its batch was delivered again")


@case
def overtaken_at_any_step(target: Target) -> None:
    """A writer that stalls at any line, and whose claim is taken over, adds nothing to the new owner's rows."""
    spare = part(10**6, 0, 5)
    for number in steps_of(target, lambda: deliver(target, "late", spare)):
        mine, again, following = part(number, 0, 5), part(number, 0, 5, epoch=20), part(number, 5, 8, epoch=20)

        def meanwhile(again: ClaimedRange = again, following: ClaimedRange = following) -> None:
            deliver(target, "new", again)
            deliver(target, "new", following)

        late, new = stalls(target, number, partial(deliver, target, "late", mine), meanwhile)
        raise_assertions(late, new)
        if new is not None:  # it failed because the other writer ran at the same time
            meanwhile()
        rows = [row for row in target.found() if row[0] == number]
        wrote = {value for _, at, value in rows if at < again.end}
        value = wrote.pop() if len(wrote) == 1 else "of one writer"
        expect(
            sorted(rows) == rows_of(value, again) + rows_of("new", following),
            f"after a writer stalled at step {number} and was overtaken (its result: {late!r}), the output has {rows}",
        )
        is_taken = isinstance(late, WriteResult) and bool(late.taken)
        expect(
            is_taken == (value == "late"),
            f"write() of a writer that was overtaken at step {number} returned {late!r}, but the rows are {value!r}",
        )


@case
def two_at_once(target: Target) -> None:
    """If two writers of the same range commit at the same time, one takes it, and the other skips it or fails."""
    for start in (0, 20, 40):
        mine = part(0, start, start + 20)
        results = race(target, {"a": [mine], "b": [mine]})
        takers = [value for value, result in results.items() if isinstance(result, WriteResult) and result.taken]
        expect(len(takers) == 1, f"of two writers of {mine}, {takers} reported that they wrote it: {results}")
        rows = [row for row in target.found() if row[1] >= start]
        expect(
            rows == rows_of(takers[0], mine), f"{takers[0]} reported that it wrote {mine}, but the output has {rows}"
        )


@case
def batches_that_share_ranges(target: Target) -> None:
    """If several batches contain the same range, it is taken once, whichever batch comes first."""
    parts = [part(partition, 0, 5) for partition in range(5)]
    batches = {"a": parts[:3], "b": parts[1:4], "c": parts[2:]}
    for value, result in race(target, batches).items():
        if not isinstance(result, WriteResult):
            deliver(target, value, *batches[value])  # it failed because of the others
    owners = {row[0]: row[2] for row in target.found()}
    expect_rows(target, [(at, offset, owners.get(at, "?")) for at in range(5) for offset in range(5)], "after a race")


def race(target: Target, batches: Mapping[str, Sequence[ClaimedRange]]) -> dict[str, object]:
    """Run one writer for each batch, and let all read their rows before any of them continues.

    Returns:
        The result of each writer, or the exception that it raised.
    """
    barrier = threading.Barrier(len(batches))

    def write(value: str, ranges: Sequence[ClaimedRange]) -> object:
        is_met: list[bool] = []

        def before_commit() -> None:
            if not is_met:
                is_met.append(True)
                barrier.wait(60)

        try:
            return target.sink().write(frames[value], ranges, never, before_commit)
        except Exception as error:  # noqa: BLE001 - the caller examines it
            barrier.abort()
            return error

    frames = {value: target.frame(rows_of(value, *ranges)) for value, ranges in batches.items()}
    with ThreadPoolExecutor(len(batches)) as pool:
        running = {value: pool.submit(write, value, ranges) for value, ranges in batches.items()}
        results = {value: future.result(120) for value, future in running.items()}
    raise_assertions(*results.values())
    return results


def raise_assertions(*results: object) -> None:
    """Raise the first of these results that is an `AssertionError`."""
    for result in results:
        if isinstance(result, AssertionError):
            raise result


def _goes_on(target: Target, generation: int = 0) -> None:
    """Check that refused batches have changed nothing: the correct batch is taken."""
    following = [part(0, 10, 12, generation=generation), part(1, 0, 3, generation=generation)]
    outcome = deliver(target, "c", *following)
    expect(set(outcome.taken) == set(following), f"after refusals {listed(outcome.skipped)} were skipped")
    expect_rows(target, rows_of("a", part(0, 0, 10)) + rows_of("c", *following), "after refusals and the correct batch")
