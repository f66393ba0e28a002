"""Cases of batches that come in order: taking, skipping, refusing, and writers that die, stall or meet."""

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
    """An empty output takes every range, wherever it starts, and has then exactly its rows."""
    ranges = [part(0, 0, 5), part(1, 100, 103)]
    verdicts = target.sink().verdicts(ranges)
    expect(set(verdicts.values()) == {Verdict.REPLACE}, f"an empty output judged {verdicts}")
    outcome = target.sink().write(target.frame(rows_of("a", *ranges)), ranges, never)
    expect(outcome.taken == tuple(ranges), f"of {listed(ranges)} an empty output took {listed(outcome.taken)}")
    wrote = {0: 5, 1: 3}
    expect(set(outcome.rows.items()) <= set(wrote.items()), f"told rows {dict(outcome.rows)}, wrote {wrote}")
    expect_rows(target, rows_of("a", *ranges), "after the first batch")


@case
def batch_after_batch(target: Target) -> None:
    """A range that starts where the output stands is taken."""
    for start in range(0, 30, 10):
        outcome = deliver(target, "a", part(0, start, start + 10))
        expect(len(outcome.taken) == 1, f"the batch at {start} was not taken")
    expect_rows(target, rows_of("a", part(0, 0, 30)), "after three batches")
    following = part(0, 30, 31)
    expect(target.sink().verdicts([following])[following] is Verdict.TAKE, "the next batch would not be taken")


@case
def duplicate(target: Target) -> None:
    """A batch that comes again, by the same owner or a later one, is skipped and not even evaluated."""
    done = [part(0, 0, 5), part(1, 0, 3)]
    deliver(target, "a", *done)
    for again in (done, [part(0, 0, 5, epoch=20), part(1, 0, 3, epoch=21)]):
        verdicts = target.sink().verdicts(again)
        expect(set(verdicts.values()) == {Verdict.SKIP}, f"what the output has was judged {verdicts}")
        outcome = target.sink().write(target.unreadable(), again, never)
        expect(set(outcome.skipped) == set(again), f"of what the output has, write() took {listed(outcome.taken)}")
        expect_rows(target, rows_of("a", *done), "after a duplicate")


@case
def subset_replayed_by_others(target: Target) -> None:
    """After a batch died between its commits, two others replay half of its ranges each: nothing is there twice."""
    batch = [part(partition, 0, 4) for partition in range(4)]
    deliver(target, "a", *batch)
    for first in (0, 1):
        half = [part(partition, 0, 4, epoch=20 + partition) for partition in (first, first + 2)]
        expect(set(deliver(target, "b", *half).skipped) == set(half), f"{listed(half)} were taken a second time")
        expect_rows(target, rows_of("a", *batch), "after a part of the batch was replayed")


@case
def rest_of_a_batch(target: Target) -> None:
    """Ranges that are there are left out, with their rows, and the others of the batch are written."""
    deliver(target, "a", part(0, 0, 4), part(2, 0, 4))
    batch = [part(partition, 0, 4, epoch=20) for partition in range(4)]
    outcome = deliver(target, "b", *batch)
    expect(set(outcome.taken) == {batch[1], batch[3]}, f"took {listed(outcome.taken)}")
    expected = rows_of("a", batch[0], batch[2]) + rows_of("b", batch[1], batch[3])
    expect_rows(target, expected, "after a batch of which half was there")


@case
def lower_epoch(target: Target) -> None:
    """A lower fencing token is refused, also for what the output has, with all beside it."""
    deliver(target, "a", part(0, 0, 10))
    for start, end in ((10, 20), (0, 10)):
        late = part(0, start, end, epoch=9)
        expect_refused(target, "b", late, part(1, 0, 3), why="fencing token 9 after 10")
    _goes_on(target)


@case
def lower_generation(target: Target) -> None:
    """A lower generation is refused, whatever its fencing token."""
    deliver(target, "a", part(0, 0, 10, generation=7))
    late = part(0, 10, 20, generation=6, epoch=50)
    expect_refused(target, "b", part(1, 0, 3), late, why="generation 6 after 7")
    _goes_on(target, generation=7)


@case
def gap_or_overlap(target: Target) -> None:
    """A range that neither starts nor ends where the output stands is refused."""
    deliver(target, "a", part(0, 0, 10))
    for start, end in ((12, 20), (5, 15), (0, 5), (0, 20)):
        wrong = part(0, start, end, epoch=20)
        expect_refused(target, "b", part(1, 0, 3), wrong, why=f"[{start}, {end}) where the output stands at 10")
    _goes_on(target)


@case
def other_topics_made_anew(target: Target) -> None:
    """Another coordination topic is refused always, another data topic within a generation."""
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
    """What others have done since `verdicts` counts: a sink judges again when it writes."""
    mine = part(0, 0, 5)
    early = target.sink()
    early.verdicts([mine])
    deliver(target, "new", part(0, 0, 5, epoch=20))
    late = target.frame(rows_of("late", mine))
    what = "write() by one that was overtaken after verdicts()"
    expect_raised(SinkRejectedError, lambda: early.write(late, [mine], never), what)
    following = part(1, 0, 5)
    early.verdicts([following])
    deliver(target, "new", following)
    outcome = early.write(target.frame(rows_of("late", following)), [following], never)
    expect(outcome.skipped == (following,), "a range done by another since verdicts() was taken again")
    expect_rows(target, rows_of("new", mine, following), "after another was faster")


@case
def groups_and_topics_apart(target: Target) -> None:
    """Two groups that share an output, and two topics, have positions of their own there, whatever their names."""
    ours = [part(0, 0, 5), part(0, 7, 9, topic="u", epoch=4)]
    if (shared := shared_target(target)) is not None:
        target = shared
        ours.append(part(0, 0, 5, group="h'; \\' \"%s\" `x` \u00e9", epoch=3))
    for our in ours:
        outcome = deliver(target, our.group + our.topic, our)
        expect(outcome.taken == (our,), f"{our} of group {our.group} was not taken beside the others")
    expected = [row for our in ours for row in rows_of(our.group + our.topic, our)]
    expect_rows(target, expected, "with three groups and topics")


@case
def another_group(target: Target) -> None:
    """Where one group has taken ranges of a topic another is refused, by name, and the first goes on."""
    deliver(target, "a", part(0, 0, 5))
    for wanted in (part(0, 0, 5, group="h", epoch=99), part(1, 7, 9, group="h", epoch=99)):
        expect_refused(target, "b", wanted, why="a second group")
    deliver(target, "b", part(0, 0, 5, group="h", topic="u"))
    deliver(target, "a", part(0, 5, 7, epoch=20))
    expected = rows_of("a", part(0, 0, 7)) + rows_of("b", part(0, 0, 5))
    expect_rows(target, expected, "after a second group was refused")


@case
def two_groups_at_once(target: Target) -> None:
    """Of two groups that begin with a topic together one takes its range, and no row of the other is there."""
    mine = {"a": part(0, 0, 5, group="g"), "b": part(0, 0, 5, group="h"), "c": part(1, 0, 5, group="i")}
    results = race(target, {value: [range_] for value, range_ in mine.items()})
    taken = [value for value, result in results.items() if isinstance(result, WriteResult)]
    expect(len(taken) == 1, f"of three groups that began at once {taken} reported that they wrote: {results}")
    expect_rows(target, rows_of(taken[0], mine[taken[0]]), "after three groups began at once")


@case
def ranges_without_rows(target: Target) -> None:
    """What is filtered out or compacted away leaves no row, and the output moves on all the same."""
    ranges = [part(0, 0, 5), part(1, 3, 8)]
    outcome = deliver(target, "a", *ranges, rows=rows_of("a", ranges[1]))
    expect(set(outcome.taken) == set(ranges), f"took {listed(outcome.taken)}")
    following = [part(0, 5, 9), part(1, 8, 9)]
    outcome = deliver(target, "b", *following, rows=[])
    expect(set(outcome.taken) == set(following), f"took {listed(outcome.taken)}, all of them without rows")
    verdicts = target.sink().verdicts(following)
    expect(set(verdicts.values()) == {Verdict.SKIP}, f"ranges taken without rows are judged {verdicts}")
    expect_rows(target, rows_of("a", ranges[1]), "after ranges without rows")


@case
def lost_and_missing_offsets(target: Target) -> None:
    """A range of which retention or compaction took offsets is taken to its end."""
    lost, gone = part(0, 0, 10, readable=4), part(1, 0, 10, readable=10)
    deliver(target, "a", lost, gone, without=(6, 9))
    expect_rows(target, rows_of("a", lost, without=(6, 9)), "after ranges that were lost in part")
    following = [part(0, 10, 12), part(1, 10, 12)]
    outcome = deliver(target, "a", *following)
    expect(set(outcome.taken) == set(following), f"what follows on lost ranges: took {listed(outcome.taken)}")


@case
def foreign_rows(target: Target) -> None:
    """Rows of a partition that the batch did not read, or of none, are refused with the whole batch."""
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
    expect_rows(target, rows_of("b", mine), "after a batch that follows on refused ones")


@case
def large_numbers(target: Target) -> None:
    """Partitions, offsets, generations and tokens are as large as Kafka's."""
    high = part(2**31 - 1, 2**62, 2**62 + 3, epoch=2**62, generation=2**61)
    deliver(target, "a", high)
    expect(target.sink().verdicts([high])[high] is Verdict.SKIP, "a range of large numbers is not known again")
    expect_refused(target, "b", part(2**31 - 1, 2**62 + 3, 2**62 + 4, epoch=2**62 - 1, generation=2**61), why="epoch")
    expect_rows(target, rows_of("a", high), "with large numbers")


@case
def many_partitions(target: Target) -> None:
    """A batch of some hundred ranges is one step."""
    ranges = [part(partition, partition, partition + 2) for partition in range(120)]
    deliver(target, "a", *ranges)
    expect_rows(target, rows_of("a", *ranges), "after a batch of 120 partitions")
    verdicts = target.sink().verdicts(ranges)
    expect(set(verdicts.values()) == {Verdict.SKIP}, "some of 120 partitions are not known again")


@case
def batch_says_no(target: Target) -> None:
    """What `before_commit` raises, once the rows were read, leaves nothing written."""

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
    expect(deliver(target, "b", mine).taken == (mine,), "a range that was not written counts as done")


@case
def death_at_any_step(target: Target) -> None:
    """Whatever line a writer dies at, the same ranges delivered again give their rows once."""

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
            f"a writer that died at {line} left {rows} of {listed(batch(number, 10))}: neither nothing nor all",
        )
        deliver(target, "b", *batch(number, 20))
        for range_ in batch(number, 20):
            expected += rows_of("a" if any(range_.partition == its.partition for its in left) else "b", range_)
        expect_rows(target, expected, f"a writer died at {line}, and its batch was delivered again")


@case
def overtaken_at_any_step(target: Target) -> None:
    """One that stalls at any line, and is taken over, adds nothing to what the new owner wrote."""
    spare = part(10**6, 0, 5)
    for number in steps_of(target, lambda: deliver(target, "late", spare)):
        mine, again, following = part(number, 0, 5), part(number, 0, 5, epoch=20), part(number, 5, 8, epoch=20)

        def meanwhile(again: ClaimedRange = again, following: ClaimedRange = following) -> None:
            deliver(target, "new", again)
            deliver(target, "new", following)

        late, new = stalls(target, number, partial(deliver, target, "late", mine), meanwhile)
        raise_assertions(late, new)
        if new is not None:  # it could not go on beside the other, and failed
            meanwhile()
        rows = [row for row in target.found() if row[0] == number]
        wrote = {value for _, at, value in rows if at < again.end}
        value = wrote.pop() if len(wrote) == 1 else "of one writer"
        expect(
            sorted(rows) == rows_of(value, again) + rows_of("new", following),
            f"one that stalled at step {number} and was overtaken, which came to {late!r}: the output has {rows}",
        )
        is_taken = isinstance(late, WriteResult) and bool(late.taken)
        expect(
            is_taken == (value == "late"),
            f"one that was overtaken at step {number} was told {late!r}, and the rows are {value!r}",
        )


@case
def two_at_once(target: Target) -> None:
    """Of two that come to the end of the same range together one takes it; the other finds it done, or fails."""
    for start in (0, 20, 40):
        mine = part(0, start, start + 20)
        results = race(target, {"a": [mine], "b": [mine]})
        takers = [value for value, result in results.items() if isinstance(result, WriteResult) and result.taken]
        expect(len(takers) == 1, f"of two writers of {mine} {takers} reported that they wrote it: {results}")
        rows = [row for row in target.found() if row[1] >= start]
        expect(rows == rows_of(takers[0], mine), f"{takers[0]} wrote {mine}, and the output has {rows}")


@case
def batches_that_share_ranges(target: Target) -> None:
    """Each range is taken once, whichever of the batches that have it comes first."""
    parts = [part(partition, 0, 5) for partition in range(5)]
    batches = {"a": parts[:3], "b": parts[1:4], "c": parts[2:]}
    for value, result in race(target, batches).items():
        if not isinstance(result, WriteResult):
            deliver(target, value, *batches[value])  # it could not go on beside the others
    owners = {row[0]: row[2] for row in target.found()}
    expect_rows(target, [(at, offset, owners.get(at, "?")) for at in range(5) for offset in range(5)], "after a race")


def race(target: Target, batches: Mapping[str, Sequence[ClaimedRange]]) -> dict[str, object]:
    """Let all have their rows ready before one goes on; return the outcome of each, or what it raised."""
    barrier = threading.Barrier(len(batches))

    def write(value: str, ranges: Sequence[ClaimedRange]) -> object:
        is_met: list[bool] = []

        def before_commit() -> None:
            if not is_met:
                is_met.append(True)
                barrier.wait(60)

        try:
            return target.sink().write(frames[value], ranges, never, before_commit)
        except Exception as error:  # noqa: BLE001 - looked at by who asked
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
    """Make sure that what was refused has left no trace: the right batch is taken."""
    following = [part(0, 10, 12, generation=generation), part(1, 0, 3, generation=generation)]
    outcome = deliver(target, "c", *following)
    expect(set(outcome.taken) == set(following), f"after refusals {listed(outcome.skipped)} were skipped")
    expect_rows(target, rows_of("a", part(0, 0, 10)) + rows_of("c", *following), "after refusals and the right batch")
