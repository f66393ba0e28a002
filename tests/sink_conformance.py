"""Tests of the library's own sinks beyond the conformance kit for users (`marshal_dagster.sinks.conformance`).

They test the texts of rejections, death at each step that a sink names, also by SIGKILL, and more kinds of concurrency.
A module provides an `output` fixture (an `Output`: one place to write to) and inherits `SinkConformance`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.sinks.conformance import Row
from marshal_dagster.sinks.conformance.target import ahead, intervals, never, part, rows_of
from tests.conditions import WITHIN_S

__all__ = [
    "AnyOrderConformance",
    "CrashConformance",
    "HistoryConformance",
    "KillConformance",
    "Model",
    "Output",
    "RangesModel",
    "ReplacingConformance",
    "Row",
    "SinkConformance",
    "ahead",
    "deliver",
    "intervals",
    "never",
    "part",
    "rows_of",
    "shared",
]

Frame = Any
"""A DataFrame, or its replacement in tests."""


class CrashError(BaseException):
    """Stands for the death of a process."""


class Output(ABC):
    """One place to write to. Each `sink` has the view of a new process."""

    steps: ClassVar[Sequence[str]]
    """The steps at which a writer can die, in order."""
    racing_step: ClassVar[str]
    """The step at which a writer has its rows ready and has not yet made its last check."""

    @abstractmethod
    def sink(self, reached: Callable[[str], None] | None = None) -> Sink:
        """Return a new sink that calls `reached` at each of its steps."""

    @abstractmethod
    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> Frame:
        """Return a frame of these rows."""

    @abstractmethod
    def poison(self) -> Frame:
        """Return a frame that fails when it is evaluated."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return all valid rows, in order; a missing offset is -1."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove the remains of dead writers, if the sink leaves any."""


def deliver(
    output: Output,
    value: str,
    *ranges: ClaimedRange,
    sink: Sink | None = None,
    without: Iterable[int] = (),
    rows: Sequence[Row] | None = None,
) -> WriteResult:
    """Do what a batch does: get the verdicts, process, write."""
    sink = sink or output.sink()
    sink.verdicts(ranges)
    read = rows_of(value, *ranges, without=without)
    written = read if rows is None else rows
    return sink.write(output.frame(written), ranges, lambda: intervals(read))


def shared(sink: Any) -> Any:  # noqa: ANN401 - each of the library's
    """Return a sink as with `shared_by_groups=True`."""
    sink._groups = replace(sink._groups, shared_by_groups=True)
    return sink


class SinkConformance:
    """Tests of ranges that come in order."""

    def test_the_first_batch_is_taken_whole(self, output: Output) -> None:
        """An empty output takes every range, whatever its start, and then has exactly its rows."""
        ranges = [part(0, 0, 5), part(1, 100, 103)]
        assert output.sink().verdicts(ranges) == dict.fromkeys(ranges, Verdict.REPLACE)
        outcome = output.sink().write(output.frame(rows_of("a", *ranges)), ranges, never)
        assert outcome.taken == tuple(ranges)
        assert outcome.skipped == ()
        assert outcome.rows in ({0: 5, 1: 3}, {})
        assert output.rows() == rows_of("a", *ranges)

    def test_a_duplicate_is_skipped_unevaluated(self, output: Output) -> None:
        """A range that was stored is skipped under the same token or a higher one, and its rows are not computed."""
        done = [part(0, 0, 5), part(1, 0, 3)]
        deliver(output, "a", *done)
        for again in (done, [part(0, 0, 5, epoch=20), part(1, 0, 3, epoch=21)]):
            assert set(output.sink().verdicts(again).values()) == {Verdict.SKIP}
            outcome = output.sink().write(output.poison(), again, never)
            assert outcome == WriteResult(taken=(), skipped=tuple(again), rows={})
        assert output.rows() == rows_of("a", *done)

    def test_of_a_partly_taken_batch_the_rest_is_taken(self, output: Output) -> None:
        """Ranges that are stored already are left out with their rows; the others are written."""
        deliver(output, "a", part(0, 0, 4), part(2, 0, 4))
        batch = [part(number, 0, 4, epoch=20) for number in range(4)]
        outcome = deliver(output, "b", *batch)
        assert outcome.taken == (batch[1], batch[3])
        assert outcome.skipped == (batch[0], batch[2])
        assert outcome.rows in ({1: 4, 3: 4}, {})
        assert output.rows() == sorted(rows_of("a", batch[0], batch[2]) + rows_of("b", batch[1], batch[3]))

    @pytest.mark.parametrize(
        ("bounds", "others", "why"),
        [
            ((10, 20), {"epoch": 9}, "fencing token 9 is lower than 10"),
            ((0, 10), {"epoch": 9}, "fencing token 9 is lower than 10"),
            ((10, 20), {"epoch": 50, "generation": 6}, "generation 6 is older than 7"),
            ((12, 20), {}, "is at position 10"),
            ((5, 15), {}, "is at position 10"),
            ((5, 15), {"epoch": 50}, "is at position 10"),
            ((10, 20), {"log": "another-log"}, "coordination topic was deleted and re-created"),
            (
                (10, 20),
                {"log": "another-log", "epoch": 90, "generation": 95},
                "coordination topic was deleted and re-created",
            ),
            ((10, 20), {"topic_id": "another-topic"}, "data topic was deleted and re-created"),
        ],
    )
    def test_what_does_not_follow_is_refused(
        self, output: Output, bounds: tuple[int, int], others: Mapping[str, Any], why: str
    ) -> None:
        """A lower token or generation, a gap, an overlap and another log are rejected, with the whole batch."""
        deliver(output, "a", part(0, 0, 10, generation=7))
        late = part(0, *bounds, **{"generation": 7, **others})
        beside = part(1, 0, 3, generation=7, log=late.coordination_topic_id)
        with pytest.raises(SinkRejectedError, match=why):
            output.sink().verdicts([beside, late])
        with pytest.raises(SinkRejectedError, match=why):
            output.sink().write(output.frame(rows_of("b", beside, late)), [beside, late], never)
        assert output.rows() == rows_of("a", part(0, 0, 10))
        assert deliver(output, "c", part(0, 10, 12, generation=7)).taken

    def test_ranges_without_rows_are_taken(self, output: Output) -> None:
        """Filtered, compacted and aborted messages leave no row, and the position moves all the same."""
        ranges = [part(0, 0, 5), part(1, 3, 8)]
        outcome = deliver(output, "a", *ranges, rows=rows_of("a", ranges[1]))
        assert outcome.taken == tuple(ranges)
        assert output.rows() == rows_of("a", ranges[1])
        following = [part(0, 5, 9), part(1, 8, 9)]
        assert deliver(output, "b", *following, rows=[]).taken == tuple(following)
        assert output.sink().verdicts([part(0, 5, 9)])[part(0, 5, 9)] is Verdict.SKIP
        assert output.rows() == rows_of("a", ranges[1])

    def test_rows_need_a_partition_of_the_batch(self, output: Output) -> None:
        """If rows have no partition or a wrong one, an error explains it and nothing is written."""
        mine = part(0, 0, 3)
        with pytest.raises(ConfigurationError, match=r"groupBy\(\"partition\""):
            output.sink().write(output.frame([(1, "x")], ("offset", "value")), [mine], never)
        for foreign in ([(7, 0, "x")], [(None, 0, "x")], [(-1, 0, "x")]):
            with pytest.raises(SinkRejectedError, match="which this batch did not read"):
                output.sink().write(output.frame([*rows_of("a", mine), *foreign]), [mine], never)
        assert output.rows() == []
        assert deliver(output, "b", mine).taken == (mine,)

    def test_a_batch_is_of_one_group_and_topic(self, output: Output) -> None:
        """Ranges of two topics, or two ranges of one partition, are an error of the caller."""
        for wrong in ([part(0, 0, 1), part(1, 0, 1, topic="u")], [part(0, 0, 1), part(0, 1, 2)]):
            with pytest.raises(ValueError, match=r"one (group|call)|more than one"):
                output.sink().verdicts(wrong)

    def test_offsets_beyond_32_bits(self, output: Output) -> None:
        """Positions are as large as Kafka's."""
        high = part(2**31 - 1, 2**62, 2**62 + 3, epoch=2**62, generation=2**61)
        deliver(output, "a", high)
        newer = part(2**31 - 1, 2**62 + 1, 2**62 + 2, epoch=2**62 + 9, generation=2**62)
        deliver(output, "b", newer)
        assert [value for _, _, value in output.rows()] == ["a", "b", "a"]


class ReplacingConformance:
    """A new generation replaces the rows of older ones, offset by offset."""

    def test_inside_one_older_range(self, output: Output) -> None:
        """Only the offsets that were read again are replaced; the rows at lower and higher offsets stay."""
        deliver(output, "old", part(0, 0, 10), part(1, 0, 3))
        newer = part(0, 4, 7, generation=20, epoch=21)
        assert output.sink().verdicts([newer]) == {newer: Verdict.REPLACE}
        assert deliver(output, "new", newer).taken == (newer,)
        expected = rows_of("old", part(0, 0, 4), part(0, 7, 10), part(1, 0, 3)) + rows_of("new", newer)
        assert output.rows() == sorted(expected)

    def test_over_several_older_ranges_in_several_batches(self, output: Output) -> None:
        """Each batch of the new generation replaces rows, the first one and those that follow it."""
        for start in (0, 10, 20, 30):
            deliver(output, "old", part(0, start, start + 10))
        deliver(output, "new", part(0, 5, 15, generation=20, epoch=21))
        following = part(0, 15, 35, generation=20, epoch=22)
        assert output.sink().verdicts([following]) == {following: Verdict.TAKE}
        deliver(output, "new", following)
        deliver(output, "new", part(0, 35, 50, generation=20, epoch=22))
        assert output.rows() == sorted(
            rows_of("old", part(0, 0, 5)) + rows_of("new", part(0, 5, 50)),
        )

    def test_offsets_that_are_no_longer_there_keep_their_rows(self, output: Output) -> None:
        """Messages that retention or compaction removed were not read again, so their rows stay."""
        deliver(output, "old", part(0, 0, 10))
        newer = part(0, 0, 10, generation=20, epoch=21, readable=3)
        deliver(output, "new", newer, without=(5, 6, 9))
        assert output.rows() == sorted(
            rows_of("old", part(0, 0, 3), part(0, 5, 7), part(0, 9, 10)) + rows_of("new", part(0, 3, 5), part(0, 7, 9))
        )

    def test_an_offset_compacted_while_its_row_is_written_is_replaced(self, output: Output) -> None:
        """Offsets are read after the rows. If compaction removes one in between, it has only its new row."""
        deliver(output, "old", part(0, 0, 9), part(1, 0, 3))
        newer = [part(0, 0, 8, generation=20, epoch=21), part(1, 0, 2, generation=20, epoch=22)]
        left = rows_of("new", *newer, without=(1, 4, 5))
        written = [row for row in rows_of("new", *newer) if row[1] not in {3, 5}]
        output.sink().write(output.frame(written), newer, lambda: intervals(left))
        kept = [(0, 5, "old"), (0, 8, "old"), (1, 2, "old")]
        assert output.rows() == sorted(written + kept)

    def test_rows_at_offsets_beyond_their_range_replace_nothing_there(self, output: Output) -> None:
        """A row whose column `offset` lies outside of the range removes no row of other ranges."""
        deliver(output, "old", part(0, 0, 10))
        newer = part(0, 2, 6, generation=20, epoch=21, readable=3)
        written = [(0, offset, "new") for offset in (1, 4, 6, 2**63 - 1, -(2**63))]
        output.sink().write(output.frame(written), [newer], lambda: {0: [(4, 6)]})
        assert output.rows() == sorted(rows_of("old", part(0, 0, 4), part(0, 6, 10)) + written)

    @pytest.mark.parametrize("is_replacing", [False, True])
    def test_the_batch_is_requested_after_kafka_was_read_for_the_last_time(
        self, output: Output, is_replacing: bool
    ) -> None:
        """If the batch finds a change after its rows or the replaced offsets were read, the output does not change."""
        if is_replacing:
            deliver(output, "old", part(0, 0, 5))
        before = output.rows()
        newer = part(0, 2, 4, generation=20, epoch=21)
        read = rows_of("new", newer)
        reads: list[str] = []

        class TopicRecreatedError(Exception):
            """The topic was deleted and re-created."""

        def offsets_read() -> Mapping[int, Sequence[tuple[int, int]]]:
            reads.append("offsets")
            return intervals(read)

        def is_changed_after(count: int) -> Callable[[], None]:
            def before_commit() -> None:
                if len(reads) == count:
                    raise TopicRecreatedError

            return before_commit

        with pytest.raises(TopicRecreatedError):
            output.sink().write(output.frame(read), [newer], offsets_read, is_changed_after(int(is_replacing)))
        assert output.rows() == before
        assert len(reads) == int(is_replacing)

    def test_offsets_read_that_give_no_row_lose_their_old_ones(self, output: Output) -> None:
        """If new code filters a message out, the row that the old code made of it is removed."""
        deliver(output, "old", part(0, 0, 6))
        newer = part(0, 0, 6, generation=20, epoch=21)
        deliver(output, "new", newer, rows=[(0, 1, "new"), (0, 4, "new")])
        assert output.rows() == [(0, 1, "new"), (0, 4, "new")]

    def test_a_range_of_which_nothing_is_left_replaces_nothing(self, output: Output) -> None:
        """If retention removed the whole range, no offsets are read and all rows stay."""
        deliver(output, "old", part(0, 0, 6))
        gone = part(0, 2, 4, generation=20, epoch=21, readable=4)
        assert output.sink().write(output.frame([]), [gone], never).taken == (gone,)
        assert output.rows() == rows_of("old", part(0, 0, 6))

    def test_generation_upon_generation(self, output: Output) -> None:
        """An offset has the rows of the newest generation that read it; equal ranges in one call stay separate."""
        deliver(output, "0", part(0, 0, 12), part(1, 0, 12))
        deliver(output, "1", part(0, 2, 10, generation=20, epoch=21), part(1, 6, 7, generation=20, epoch=22))
        deliver(output, "2", part(0, 4, 6, generation=30, epoch=31))
        deliver(output, "3", part(0, 0, 5, generation=40, epoch=41), part(1, 0, 1, generation=40, epoch=42))
        by_partition = {number: "".join(value for at, _, value in output.rows() if at == number) for number in (0, 1)}
        assert by_partition == {0: "333332111100", 1: "300000100000"}

    def test_several_rows_of_one_message_go_together(self, output: Output) -> None:
        """All rows at a replaced offset are removed, however many there are."""
        twice = part(0, 0, 4)
        deliver(output, "old", twice, rows=[(0, 1, "a"), (0, 1, "b"), (0, 2, "c")])
        deliver(output, "new", part(0, 1, 2, generation=20, epoch=21))
        assert output.rows() == [(0, 1, "new"), (0, 2, "c")]

    def test_another_data_topic_of_the_name_is_not_replaced(self, output: Output) -> None:
        """Offsets of a re-created topic are other messages, so the old rows stay."""
        deliver(output, "old", part(0, 0, 5))
        deliver(output, "new", part(0, 0, 3, generation=20, epoch=21, topic_id="made-anew"))
        assert output.rows() == sorted(rows_of("old", part(0, 0, 5)) + rows_of("new", part(0, 0, 3)))

    def test_rows_without_offsets_cannot_be_replaced(self, output: Output) -> None:
        """If older rows have no offsets, a new generation is rejected before it processes, with the reason."""
        old = part(0, 0, 10)
        columns = ("partition", "value")
        output.sink().write(output.frame([(0, "sum")], columns), [old], never)
        over, beyond = part(0, 5, 12, generation=20, epoch=21), part(0, 10, 12, generation=20, epoch=21)
        assert "no column 'offset'" in (output.sink().can_replace([over]) or "")
        assert output.sink().can_replace([beyond]) is None
        with pytest.raises(SinkRejectedError, match="no column 'offset'"):
            output.sink().verdicts([over])
        with pytest.raises(SinkRejectedError, match="no column 'offset'"):
            output.sink().write(output.poison(), [over], never)
        assert output.sink().write(output.frame([(0, "more")], columns), [beyond], never).taken == (beyond,)
        assert output.rows() == [(0, -1, "more"), (0, -1, "sum")]

    def test_rows_with_offsets_give_way_to_rows_without(self, output: Output) -> None:
        """Only the older rows need offsets."""
        old = part(0, 0, 3)
        deliver(output, "old", old)
        assert output.sink().can_replace([old]) is None
        newer = part(0, 1, 5, generation=20, epoch=21)
        output.sink().write(output.frame([(0, "sum")], ("partition", "value")), [newer], lambda: {0: [(1, 5)]})
        assert output.rows() == [(0, -1, "sum"), (0, 0, "old")]


class CrashConformance:
    """Writers that die, stall or run at the same time."""

    def test_dying_at_any_step_then_delivered_again(self, output: Output) -> None:
        """If a writer dies at any step and the same ranges are delivered again, their rows are stored once."""
        for number, step in enumerate(output.steps):
            ranges = [part(2 * number, 0, 3), part(2 * number + 1, 5, 7)]
            seen = self.dies(output, step, "a", *ranges)
            assert step in seen, f"{step} was not reached: {seen}"
            again = [part(range_.partition, range_.start, range_.end, epoch=20) for range_ in ranges]
            outcome = deliver(output, "b", *again)
            assert set(outcome.taken + outcome.skipped) == set(again)
            mine = [row for row in output.rows() if row[0] in {2 * number, 2 * number + 1}]
            values = {value for _, _, value in mine}
            assert len(values) == 1
            assert mine == rows_of(values.pop(), *ranges)
            output.sweep()
        assert len(output.rows()) == 5 * len(output.steps)

    def test_dying_at_any_step_of_a_replacement(self, output: Output) -> None:
        """New rows and the removal of older ones are atomic, at whatever step the writer dies."""
        for number, step in enumerate([*output.steps, "none"]):
            deliver(output, "old", part(number, 0, 10))
            newer = part(number, 3, 6, generation=20, epoch=21)
            self.dies(output, step, "new", newer)
            output.sweep()
            mine = "".join(value[0] for at, _, value in output.rows() if at == number)
            assert mine in {"oooooooooo", "ooonnnoooo"}
            deliver(output, "new", part(number, 3, 6, generation=20, epoch=22))
            mine = "".join(value[0] for at, _, value in output.rows() if at == number)
            assert mine == "ooonnnoooo"

    @staticmethod
    def dies(output: Output, step: str, value: str, *ranges: ClaimedRange) -> list[str]:
        """Deliver and die at `step`; return the steps that were reached."""
        seen: list[str] = []

        def reached(at: str) -> None:
            seen.append(at)
            if at == step:
                raise CrashError

        try:
            deliver(output, value, *ranges, sink=output.sink(reached))
        except CrashError:
            assert seen[-1] == step or step in seen
        return seen

    def test_two_writers_of_the_same_range(self, output: Output) -> None:
        """If two writers of one range reach the last step together, one stores it and the other finds it done."""
        for number, start in ((0, 0), (0, 20), (1, 0), (0, 40)):
            mine = part(number, start, start + 20)
            outcomes = self.race(output, {"a": [mine], "b": [mine]})
            assert sorted(len(each.taken) for each in outcomes.values()) == [0, 1]
            assert sorted(len(each.skipped) for each in outcomes.values()) == [0, 1]
            winner = next(value for value, outcome in outcomes.items() if outcome.taken)
            found = [row for row in output.rows() if row[0] == number and row[1] >= start]
            assert found == rows_of(winner, mine)

    def test_writers_whose_ranges_overlap_in_part(self, output: Output) -> None:
        """Each range is stored once, whichever of the batches that contain it comes first."""
        parts = [part(number, 0, 5) for number in range(5)]
        outcomes = self.race(output, {"a": parts[:3], "b": parts[1:4], "c": parts[2:]})
        taken = [each for outcome in outcomes.values() for each in outcome.taken]
        assert sorted(taken, key=lambda each: each.partition) == parts
        owner = {each.partition: value for value, outcome in outcomes.items() for each in outcome.taken}
        assert output.rows() == [(at, offset, owner[at]) for at in range(5) for offset in range(5)]

    @classmethod
    def race(
        cls, output: Output, batches: Mapping[str, Sequence[ClaimedRange]], *, replacing: bool = False
    ) -> dict[str, WriteResult]:
        """Let all writers reach the racing step before one continues; with `replacing`, over an older generation."""
        found = cls.race_or_refused(output, batches, replacing=replacing)
        for each in found.values():
            if isinstance(each, SinkRejectedError):
                raise each
        return {value: each for value, each in found.items() if isinstance(each, WriteResult)}

    @staticmethod
    def race_or_refused(
        output: Output, batches: Mapping[str, Sequence[ClaimedRange]], *, replacing: bool = False
    ) -> dict[str, WriteResult | SinkRejectedError]:
        """Let all writers reach the racing step before one continues, and return the result of each."""
        barrier = threading.Barrier(len(batches))

        def waits() -> Callable[[str], None]:
            met = False

            def reached(step: str) -> None:
                nonlocal met
                if step == output.racing_step and not met:
                    met = True
                    barrier.wait(60)

            return reached

        def write(value: str, ranges: Sequence[ClaimedRange]) -> WriteResult | SinkRejectedError:
            read = rows_of(value, *ranges)
            try:
                return output.sink(waits()).write(
                    frames[value], ranges, lambda: intervals(read) if replacing else never()
                )
            except SinkRejectedError as refused:
                return refused

        frames = {value: output.frame(rows_of(value, *ranges)) for value, ranges in batches.items()}
        with ThreadPoolExecutor(len(batches)) as pool:
            running = {value: pool.submit(write, value, ranges) for value, ranges in batches.items()}
            return {value: future.result(WITHIN_S) for value, future in running.items()}

    def test_a_writer_that_was_overtaken_adds_nothing(self, output: Output) -> None:
        """A writer that stalls with its rows ready and continues after the new owner's batch is rejected."""
        mine = part(0, 0, 5)
        ready, go = threading.Event(), threading.Event()

        def stall(step: str) -> None:
            if step == output.racing_step:
                ready.set()
                assert go.wait(WITHIN_S)

        late = output.sink(stall)
        frame = output.frame(rows_of("late", mine))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(late.write, frame, [mine], never)
            assert ready.wait(WITHIN_S)
            deliver(output, "new", part(0, 0, 5, epoch=20), sink=output.sink())
            output.sweep()
            go.set()
            with pytest.raises(SinkRejectedError, match="fencing token 10 is lower than 20"):
                future.result(WITHIN_S)
        assert output.rows() == rows_of("new", mine)
        assert deliver(output, "next", part(0, 5, 6, epoch=20)).taken

    def test_rows_that_came_in_meanwhile_are_replaced_too(self, output: Output) -> None:
        """Rows that an older generation adds during the work of a new one are replaced at the offsets that it read."""
        deliver(output, "old", part(0, 0, 5))
        newer = part(0, 8, 12, generation=20, epoch=21)
        requested: list[str] = []

        def reached(step: str) -> None:
            if step == output.racing_step and not requested:
                requested.append(step)
                deliver(output, "old", part(0, 5, 10), sink=output.sink())

        read = rows_of("new", newer)
        outcome = output.sink(reached).write(output.frame(read), [newer], lambda: intervals(read))
        assert outcome.taken == (newer,)
        assert output.rows() == rows_of("old", part(0, 0, 8)) + rows_of("new", newer)


class KillConformance:
    """Writers that are killed: no more code of theirs runs, not even cleanup."""

    def test_killed_at_any_step_of_a_batch_and_of_a_replacement(
        self, output: Output, die: Callable[[Output, str, str, Sequence[ClaimedRange]], int]
    ) -> None:
        """If a process is killed at any step, the next one completes the batch, and no row is stored twice."""
        deliver(output, "old", *(part(number, 0, 10) for number in range(len(output.steps))))
        for number, step in enumerate(output.steps):
            ranges = [part(number, 3, 6, generation=20, epoch=21), part(100 + number, 0, 2)]
            assert die(output, step, "new", ranges) != 0, step
            mine = {at: "".join(v[0] for p, _, v in output.rows() if p == at) for at in (number, 100 + number)}
            assert tuple(mine.values()) in {("o" * 10, ""), ("ooonnnoooo", "nn")}, step
            again = [part(number, 3, 6, generation=20, epoch=22), part(100 + number, 0, 2, epoch=22)]
            deliver(output, "new", *again)
            mine = {at: "".join(v[0] for p, _, v in output.rows() if p == at) for at in (number, 100 + number)}
            assert tuple(mine.values()) == ("ooonnnoooo", "nn"), step
            output.sweep()
        assert len(output.rows()) == 12 * len(output.steps)

    def test_killed_at_any_step_beside_neighbours(
        self, output: Output, die: Callable[[Output, str, str, Sequence[ClaimedRange]], int]
    ) -> None:
        """If the writer of a range is killed at any step, its neighbours continue, and the next writer completes it."""
        deliver(output, "old", *(ahead(number, 0, 10) for number in range(len(output.steps))))
        for number, step in enumerate(output.steps):
            if number % 2:
                deliver(output, "new", ahead(number, 8, 10, generation=20, epoch=40))
            assert die(output, step, "new", [ahead(number, 3, 6, generation=20, epoch=21)]) != 0, step
            deliver(output, "new", ahead(number, 6, 8, generation=20, epoch=20))
            mine = "".join(value[0] for at, _, value in output.rows() if at == number)
            assert mine[:6] in {"oooooo", "ooonnn"}, step
            deliver(output, "new", ahead(number, 3, 6, generation=20, epoch=22))
            deliver(output, "new", ahead(number, 8, 10, generation=20, epoch=22))
            mine = "".join(value[0] for at, _, value in output.rows() if at == number)
            assert mine == "ooonnnnnnn", step
            output.sweep()
        assert len(output.rows()) == 10 * len(output.steps)


class AnyOrderConformance:
    """Groups whose members claim ranges: each range is judged by itself, in any order."""

    @pytest.fixture(autouse=True)
    def _in_any_order(self, output: Output) -> None:
        assert output.sink().supports_unordered_ranges is True

    def test_ranges_come_in_any_order(self, output: Output) -> None:
        """Each range is stored once, under a higher or a lower token than its neighbours."""
        starts = [30, 0, 40, 10, 20]
        for number, start in enumerate(starts):
            one = ahead(0, start, start + 10, epoch=50 - start)
            expected = Verdict.TAKE if number else Verdict.REPLACE
            assert output.sink().verdicts([one]) == {one: expected}
            assert deliver(output, "a", one).taken == (one,)
        assert output.rows() == rows_of("a", part(0, 0, 50))
        assert deliver(output, "b", ahead(0, 900, 903), ahead(1, 7, 9)).taken
        assert len(output.rows()) == 55

    def test_a_replay_is_skipped_unevaluated(self, output: Output) -> None:
        """A range that is stored is skipped, whichever instance delivers it and whichever neighbours are stored."""
        done = [ahead(0, start, start + 10, epoch=20) for start in (10, 30, 0, 20)]
        for each in done:
            deliver(output, "a", each)
        for each in done:
            for epoch in (19, 20, 21):
                again = ahead(0, each.start, each.end, epoch=epoch)
                assert output.sink().verdicts([again]) == {again: Verdict.SKIP}
                assert output.sink().write(output.poison(), [again], never).skipped == (again,)
        assert output.rows() == rows_of("a", part(0, 0, 40))

    def test_of_a_partly_taken_batch_the_rest_is_taken(self, output: Output) -> None:
        """Ranges that are stored already are left out with their rows; the others are written."""
        deliver(output, "a", ahead(0, 20, 24), ahead(2, 0, 4))
        batch = [ahead(0, 20, 24), ahead(1, 20, 24), ahead(2, 8, 9)]
        outcome = deliver(output, "b", *batch)
        assert (outcome.taken, outcome.skipped) == (tuple(batch[1:]), (batch[0],))
        assert output.rows() == sorted(rows_of("a", batch[0], part(2, 0, 4)) + rows_of("b", *batch[1:]))

    @pytest.mark.parametrize(
        ("bounds", "others", "why"),
        [
            ((0, 20), {}, r"holds \[10, 20\) of the same generation, which overlaps this range and is not equal to it"),
            ((10, 19), {}, r"holds \[10, 20\)"),
            ((11, 20), {"epoch": 50}, r"holds \[10, 20\)"),
            ((20, 31), {}, r"holds \[30, 40\)"),
            ((12, 18), {}, r"holds \[10, 20\)"),
            ((0, 99), {}, r"holds \[10, 20\)"),
            ((20, 30), {"generation": 6, "epoch": 50}, "generation 6 is older than 7"),
            ((10, 20), {"generation": 6, "epoch": 50}, "generation 6 is older than 7"),
            ((20, 30), {"log": "another-log"}, "coordination topic was deleted and re-created"),
            ((20, 30), {"log": "another-log", "generation": 95}, "coordination topic was deleted and re-created"),
            ((20, 30), {"topic_id": "another-topic"}, "data topic was deleted and re-created"),
            ((10, 20), {"topic_id": "another-topic"}, "data topic was deleted and re-created"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, output: Output, bounds: tuple[int, int], others: Mapping[str, Any], why: str
    ) -> None:
        """A different range over the same offsets, an older generation and another log: the batch is rejected."""
        held = [ahead(0, 30, 40, generation=7), ahead(0, 10, 20, generation=7)]
        for each in held:
            deliver(output, "a", each)
        wrong = ahead(0, *bounds, **{"generation": 7, **others})
        beside = ahead(1, 0, 3, generation=7, log=wrong.coordination_topic_id)
        with pytest.raises(SinkRejectedError, match=why):
            output.sink().verdicts([beside, wrong])
        with pytest.raises(SinkRejectedError, match=why):
            output.sink().write(output.frame(rows_of("b", beside, wrong)), [beside, wrong], never)
        assert output.rows() == rows_of("a", *reversed(held))
        assert deliver(output, "c", ahead(0, 20, 30, generation=7)).taken

    def test_what_was_done_whole_before_counts(self, output: Output) -> None:
        """Whole batches of the same generation from before the use of ranges are skipped and never overlapped."""
        for start in (10, 20):
            deliver(output, "a", part(0, start, start + 10, epoch=20))
        for start in (10, 20):
            assert deliver(output, "b", ahead(0, start, start + 10)).skipped
        for start, end, why in (
            (15, 25, r"holds \[10, 20\)"),
            (25, 35, r"holds \[20, 30\)"),
            (0, 10, "in order up to 30 in the same generation, but does not hold this range"),
        ):
            with pytest.raises(SinkRejectedError, match=why):
                deliver(output, "b", ahead(0, start, end, epoch=30))
        for start in (50, 30):
            assert deliver(output, "c", ahead(0, start, start + 10)).taken
        with pytest.raises(SinkRejectedError, match="in order up to 30"):
            deliver(output, "b", ahead(0, 5, 10, epoch=30))
        expected = rows_of("a", part(0, 10, 30)) + rows_of("c", part(0, 30, 40), part(0, 50, 60))
        assert output.rows() == expected

    def test_whole_batches_after_ranges_need_ground_without_a_gap(self, output: Output) -> None:
        """If a group no longer claims ranges, the missing ranges between the stored ones are not skipped."""
        for start, epoch in ((20, 15), (0, 12)):
            deliver(output, "a", ahead(0, start, start + 10, epoch=epoch))
        for start in (0, 10, 20, 30):
            with pytest.raises(SinkRejectedError, match="needs a new generation: set the position"):
                deliver(output, "b", part(0, start, start + 10, epoch=30))
        deliver(output, "a", ahead(0, 10, 20, epoch=11))
        with pytest.raises(SinkRejectedError, match="fencing token 14 is lower than 15"):
            deliver(output, "b", part(0, 30, 40, epoch=14))
        for start, end, why in (
            (10, 20, "is at position 30"),
            (15, 30, "needs a new generation"),
            (31, 40, "is at position 30"),
        ):
            with pytest.raises(SinkRejectedError, match=why):
                deliver(output, "b", part(0, start, end, epoch=30))
        assert deliver(output, "b", part(0, 20, 30, epoch=30)).skipped
        assert deliver(output, "c", part(0, 30, 40, epoch=30)).taken
        assert deliver(output, "c", part(0, 40, 50, epoch=30)).taken
        assert deliver(output, "d", part(0, 40, 50, epoch=30)).skipped
        assert deliver(output, "e", ahead(0, 60, 65)).taken
        for each in (ahead(0, 10, 20), ahead(0, 30, 40)):
            assert deliver(output, "f", each).skipped
        expected = rows_of("a", part(0, 0, 30)) + rows_of("c", part(0, 30, 50)) + rows_of("e", part(0, 60, 65))
        assert output.rows() == expected

    def test_whole_batches_after_ranges_ask_for_those_of_their_generation(self, output: Output) -> None:
        """The ranges and tokens of older generations have no effect."""
        deliver(output, "a", ahead(0, 5, 50, epoch=99))
        deliver(output, "b", ahead(0, 10, 20, generation=20, epoch=3))
        assert deliver(output, "c", part(0, 20, 25, generation=20, epoch=3)).taken
        assert deliver(output, "d", part(0, 20, 25, generation=20, epoch=3)).skipped
        assert "".join(value for _, _, value in output.rows()) == "a" * 5 + "b" * 10 + "c" * 5 + "a" * 25

    def test_a_new_generation_ends_either_way(self, output: Output) -> None:
        """After the position was set, ranges may follow whole batches, and whole batches ranges, at any offset."""
        deliver(output, "a", part(0, 0, 10))
        deliver(output, "b", ahead(0, 20, 30, generation=20, epoch=21))
        deliver(output, "b", ahead(0, 0, 5, generation=20, epoch=22))
        deliver(output, "c", part(0, 25, 40, generation=30, epoch=31))
        deliver(output, "c", part(0, 40, 45, generation=30, epoch=31))
        with pytest.raises(SinkRejectedError, match="generation 20 is older than 30"):
            deliver(output, "d", ahead(0, 5, 20, generation=20, epoch=40))
        values = "".join(value for _, _, value in output.rows())
        assert values == "bbbbb" + "aaaaa" + "bbbbb" + "c" * 20

    def test_groups_and_topics_do_not_meet(self, output: Output) -> None:
        """Groups that share an output, with or without ranges, have separate ranges."""
        deliver(output, "a", ahead(0, 20, 30), sink=shared(output.sink()))
        deliver(output, "b", part(0, 0, 10, group="h", epoch=3), sink=shared(output.sink()))
        deliver(output, "b", part(0, 10, 25, group="h", epoch=3), sink=shared(output.sink()))
        deliver(output, "c", ahead(0, 15, 25, topic="u", epoch=4), sink=shared(output.sink()))
        deliver(output, "c", ahead(1, 15, 25), sink=shared(output.sink()))
        assert deliver(output, "a", ahead(0, 10, 20), sink=shared(output.sink())).taken
        assert len(output.rows()) == 65

    def test_a_range_without_offsets_is_there_already(self, output: Output) -> None:
        """A range without offsets counts as stored, and rows that the code makes for it are not written."""
        deliver(output, "a", ahead(0, 10, 20))
        for at in (0, 10, 15, 20, 30):
            assert deliver(output, "b", ahead(0, at, at), rows=[(0, at, "b")]).skipped
        assert output.rows() == rows_of("a", part(0, 10, 20))
        deliver(output, "c", ahead(1, 15, 15))
        assert deliver(output, "c", ahead(1, 10, 20)).taken
        assert deliver(output, "d", ahead(1, 10, 20)).skipped

    def test_offsets_beyond_32_bits(self, output: Output) -> None:
        """Ranges are as large as Kafka's offsets."""
        last = 2**31 - 1
        deliver(output, "a", ahead(last, 2**62, 2**62 + 3, epoch=2**62, generation=2**61))
        deliver(output, "b", ahead(last, 2**63 - 3, 2**63 - 1, epoch=1, generation=2**61))
        deliver(output, "c", ahead(last, 2**62 + 3, 2**62 + 5, epoch=1, generation=2**61))
        assert [value for _, _, value in output.rows()] == list("aaaccbb")
        with pytest.raises(SinkRejectedError, match="which overlaps this range"):
            output.sink().verdicts([ahead(last, 2**62 + 5, 2**63 - 1, generation=2**61)])

    @pytest.mark.slow
    def test_many_ranges_of_one_partition(self, output: Output) -> None:
        """Each of several dozen ranges is known by itself, also after the gaps between them are filled."""
        order = [*range(0, 60, 2), *range(59, 0, -2)]
        for number in order:
            deliver(output, "a", ahead(0, 2 * number, 2 * number + 2))
        assert output.rows() == rows_of("a", part(0, 0, 120))
        for number in order:
            again = ahead(0, 2 * number, 2 * number + 2)
            assert output.sink().verdicts([again]) == {again: Verdict.SKIP}
        with pytest.raises(SinkRejectedError, match=r"holds \[40, 42\)"):
            output.sink().verdicts([ahead(0, 40, 44)])

    # New generations

    def test_each_range_of_a_new_generation_replaces_its_own_offsets(self, output: Output) -> None:
        """A later range that is done first removes older rows only there; the earlier range does so afterwards."""
        for start in (0, 10, 20, 30):
            deliver(output, "o", ahead(0, start, start + 10))
        seen = []
        for start in (22, 35, 12):
            newer = ahead(0, start, start + 10, generation=20, epoch=50 - start)
            assert deliver(output, "n", newer).taken == (newer,)
            seen.append("".join(value for _, _, value in output.rows()))
        assert seen[0] == "o" * 22 + "n" * 10 + "o" * 8
        assert seen[1] == "o" * 22 + "n" * 10 + "ooo" + "n" * 10
        assert seen[2] == "o" * 12 + "n" * 20 + "ooo" + "n" * 10
        done_before = ahead(0, 0, 10, generation=20, epoch=22)
        assert output.sink().verdicts([done_before]) == {done_before: Verdict.TAKE}

    def test_lost_and_compacted_offsets_keep_their_rows(self, output: Output) -> None:
        """In any order, only offsets that were read again are replaced."""
        deliver(output, "o", ahead(0, 0, 20))
        deliver(output, "n", ahead(0, 10, 20, generation=20), without=(12, 13))
        deliver(output, "n", ahead(0, 0, 10, generation=20, readable=4), without=(6,))
        assert "".join(value for _, _, value in output.rows()) == "oooo" + "nnonnn" + "nnoonnnnnn"

    # Concurrency

    def test_neighbours_that_meet_are_all_taken(self, output: Output) -> None:
        """Writers of different ranges of one partition reach the last step together, in a new or an old output."""
        for generation, value in ((0, "a"), (20, "b")):
            ranges = [ahead(0, start, start + 5, generation=generation, epoch=90 - start) for start in (15, 0, 10, 5)]
            batches = {f"{value}{range_.start}": [range_] for range_ in ranges}
            outcomes = CrashConformance.race(output, batches, replacing=generation > 0)
            assert [outcome.taken for outcome in outcomes.values()] == [(each,) for each in ranges]
            assert [offset for _, offset, _ in output.rows()] == list(range(20))
            assert {(offset // 5 * 5, row) for _, offset, row in output.rows()} == {
                (each.start, f"{value}{each.start}") for each in ranges
            }

    def test_two_writers_of_the_same_range(self, output: Output) -> None:
        """If two writers of one range reach the last step together, one stores it and the other finds it done."""
        for start in (30, 0, 10):
            mine = ahead(0, start, start + 10)
            outcomes = CrashConformance.race(output, {"a": [mine], "b": [mine]})
            assert sorted(len(each.taken) for each in outcomes.values()) == [0, 1]
            assert sorted(len(each.skipped) for each in outcomes.values()) == [0, 1]
            winner = next(value for value, outcome in outcomes.items() if outcome.taken)
            assert [row for row in output.rows() if start <= row[1] < start + 10] == rows_of(winner, mine)

    def test_two_writers_of_ranges_that_overlap(self, output: Output) -> None:
        """If two writers of overlapping ranges reach the last step together, one stores its rows; the other fails."""
        for start in (60, 0, 30):
            mine, other = ahead(0, start, start + 10), ahead(0, start + 5, start + 15)
            outcomes = CrashConformance.race_or_refused(output, {"a": [mine], "b": [other]})
            refused = [value for value, outcome in outcomes.items() if isinstance(outcome, SinkRejectedError)]
            assert len(refused) == 1, outcomes
            assert "which overlaps this range and is not equal to it" in str(outcomes[refused[0]])
            winner = {"a": mine, "b": other}[{"a": "b", "b": "a"}[refused[0]]]
            expected = rows_of({"a": "b", "b": "a"}[refused[0]], winner)
            assert [row for row in output.rows() if start <= row[1] < start + 15] == expected

    def test_writers_that_share_some_ranges(self, output: Output) -> None:
        """Each range is stored once, whichever of the batches that contain it comes first."""
        deliver(output, "first", *(ahead(number, 50, 55) for number in range(5)))
        parts = [ahead(number, 0, 5) for number in range(5)]
        outcomes = CrashConformance.race(output, {"a": parts[:3], "b": parts[1:4], "c": parts[2:]})
        taken = [each for outcome in outcomes.values() for each in outcome.taken]
        assert sorted(taken, key=lambda each: each.partition) == parts
        owner = {each.partition: value for value, outcome in outcomes.items() for each in outcome.taken}
        rows = [row for row in output.rows() if row[1] < 50]
        assert rows == [(at, offset, owner[at]) for at in range(5) for offset in range(5)]

    @pytest.mark.parametrize(
        ("meanwhile", "outcome"),
        [
            (ahead(0, 10, 20, epoch=50), "skipped"),
            (ahead(0, 20, 30, epoch=50), "taken"),
            (ahead(0, 15, 25, epoch=50), r"holds \[15, 25\)"),
            (ahead(0, 90, 95, generation=20, epoch=50), "generation 0 is older than 20"),
            (ahead(0, 10, 20, generation=20, epoch=50), "generation 0 is older than 20"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("is_first", [False, True])
    def test_a_writer_that_stalls_is_judged_by_what_is_there_then(
        self, output: Output, meanwhile: ClaimedRange, outcome: str, *, is_first: bool
    ) -> None:
        """A stalled writer is judged by what others stored meanwhile, in outputs with and without earlier ranges."""
        if not is_first:
            deliver(output, "old", ahead(0, 0, 10))
        before = output.rows()
        mine = ahead(0, 10, 20)
        stalled: list[str] = []

        def reached(step: str) -> None:
            if step == output.racing_step and not stalled:
                stalled.append(step)
                deliver(output, "new", meanwhile, sink=output.sink())

        frame = output.frame(rows_of("late", mine))
        sink = output.sink(reached)
        if outcome in {"taken", "skipped"}:
            assert getattr(sink.write(frame, [mine], never), outcome) == (mine,)
        else:
            with pytest.raises(SinkRejectedError, match=outcome):
                sink.write(frame, [mine], never)
        late = rows_of("late", mine) if outcome == "taken" else []
        assert output.rows() == sorted(before + late + rows_of("new", meanwhile))

    def test_rows_that_came_in_meanwhile_are_replaced_too(self, output: Output) -> None:
        """Rows that an older generation adds during the work of a new one are replaced at the offsets that it read."""
        deliver(output, "old", ahead(0, 20, 25))
        newer = ahead(0, 8, 12, generation=20)
        requested: list[str] = []

        def reached(step: str) -> None:
            if step == output.racing_step and not requested:
                requested.append(step)
                deliver(output, "old", ahead(0, 5, 10), sink=output.sink())

        read = rows_of("new", newer)
        outcome = output.sink(reached).write(output.frame(read), [newer], lambda: intervals(read))
        assert outcome.taken == (newer,)
        expected = rows_of("old", part(0, 5, 8)) + rows_of("new", newer) + rows_of("old", part(0, 20, 25))
        assert output.rows() == expected

    # Death

    def test_dying_at_any_step_then_delivered_again(self, output: Output) -> None:
        """If a writer dies at any step, its neighbours continue; a second delivery stores its rows once."""
        for number, step in enumerate(output.steps):
            deliver(output, "old", ahead(number, 0, 20))
            deliver(output, "c", ahead(number, 15, 20, generation=20))
            mine = ahead(number, 5, 10, generation=20)
            seen = CrashConformance.dies(output, step, "a", mine)
            assert step in seen, f"{step} was not reached: {seen}"
            neighbour = ahead(number, 10, 15, generation=20, epoch=5)
            assert deliver(output, "c", neighbour).taken == (neighbour,)
            again = ahead(number, 5, 10, generation=20, epoch=30)
            outcome = deliver(output, "b", again)
            assert outcome.taken + outcome.skipped == (again,)
            output.sweep()
            values = "".join(value for at, _, value in output.rows() if at == number)
            assert values in {"old" * 5 + 5 * own + "c" * 10 for own in "ab"}, step


class HistoryConformance:
    """Many writers in sequence, correct and incorrect ones, compared with a model of three lines."""

    @pytest.mark.parametrize("seed", range(12))
    def test_any_history_gives_the_rows_of_the_model(self, output: Output, seed: int) -> None:
        """After each step of a random history the output has exactly the rows of the model."""
        self.play(output, seed, Model())

    @pytest.mark.parametrize("seed", range(12))
    def test_any_history_of_ranges_gives_the_rows_of_the_model(self, output: Output, seed: int) -> None:
        """The same with ranges in any order, some of which were never planned."""
        self.play(output, seed, RangesModel())

    def play(self, output: Output, seed: int, model: "Rows") -> None:
        """Write what the model chooses, die now and then, and compare after each step."""
        dice = Random(seed)
        for step in range(25):
            ranges = model.some_ranges(dice)
            gone = {offset for offset in range(60) if dice.random() < 0.2}
            read = rows_of(f"v{step}", *ranges, without=gone)
            written = [row for row in read if dice.random() < 0.9]
            died_at = dice.choice(output.steps) if dice.random() < 0.3 else None
            expected = model.outcome(ranges, read, written)
            try:
                self.write(output, ranges, written, read, died_at)
            except SinkRejectedError:
                assert expected is None
            except CrashError:
                pass
            else:
                assert expected is not None
            if expected is not None and (died_at is None or self.has(output, ranges)):
                model.apply(ranges, expected)
            assert output.rows() == sorted(model.rows.values()), (seed, step)
            if dice.random() < 0.2:
                output.sweep()
        assert output.rows() == sorted(model.rows.values())

    @staticmethod
    def has(output: Output, ranges: Sequence[ClaimedRange]) -> bool:
        """Return whether the output has all of these ranges."""
        return set(output.sink().verdicts(ranges).values()) == {Verdict.SKIP}

    @staticmethod
    def write(
        output: Output,
        ranges: Sequence[ClaimedRange],
        written: Sequence[Row],
        read: Sequence[Row],
        died_at: str | None,
    ) -> None:
        """Write the ranges; with `died_at`, die at that step."""

        def reached(step: str) -> None:
            if step == died_at:
                raise CrashError

        output.sink(reached).write(output.frame(written), ranges, lambda: intervals(read))


Taken = tuple[set[int], list[Row], list[Row]]
"""The partitions of which a range was stored, with the rows that were read and written of them."""


class Rows(ABC):
    """The rows that an output of one group and topic should hold, by message."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Row] = {}

    @abstractmethod
    def some_ranges(self, dice: Random) -> list[ClaimedRange]:
        """Return ranges of one batch: mostly what a correct member would have, sometimes not."""

    @abstractmethod
    def outcome(self, ranges: Sequence[ClaimedRange], read: Sequence[Row], written: Sequence[Row]) -> Taken | None:
        """Return what is stored, or None if it must be rejected."""

    def apply(self, ranges: Sequence[ClaimedRange], outcome: Taken) -> None:
        """Store it."""
        taken, read, written = outcome
        for partition, offset, _ in read:
            self.rows.pop((partition, offset), None)
        self.rows |= {(partition, offset): (partition, offset, value) for partition, offset, value in written}
        for range_ in ranges:
            if range_.partition in taken:
                self._note(range_)

    @abstractmethod
    def _note(self, taken: ClaimedRange) -> None:
        """Record that a range was stored."""


def of_partitions(taken: set[int], read: Sequence[Row], written: Sequence[Row]) -> Taken:
    """Keep the rows of the partitions that were stored."""
    return taken, [row for row in read if row[0] in taken], [row for row in written if row[0] in taken]


class Model(Rows):
    """The expected output if ranges come in order: the position of each partition."""

    def __init__(self) -> None:
        super().__init__()
        self._stands: dict[int, tuple[int, int, int]] = {}

    def some_ranges(self, dice: Random) -> list[ClaimedRange]:
        """Return ranges of one batch: mostly what a correct member would have, sometimes not."""
        found = []
        for partition in dice.sample(range(3), dice.randint(1, 3)):
            generation, epoch, position = self._stands.get(partition, (0, 10, 0))
            if dice.random() < 0.15:
                generation, position = generation + 5, dice.randint(0, max(1, position))
                epoch = max(epoch, generation)
            elif dice.random() < 0.05:
                generation -= 1
            elif dice.random() < 0.05:
                position += 1
            start, width = position, dice.randint(0, 8)
            if dice.random() < 0.15 and position >= 3:
                start, width = position - 3, 3
            epoch += dice.choice((0, 0, 1, 3)) if dice.random() < 0.97 else -1
            readable = start + dice.randint(0, width) if dice.random() < 0.1 else start
            found.append(
                part(
                    partition,
                    start,
                    start + width,
                    generation=max(0, generation),
                    epoch=epoch,
                    readable=readable,
                )
            )
        return found

    def outcome(self, ranges: Sequence[ClaimedRange], read: Sequence[Row], written: Sequence[Row]) -> Taken | None:
        """Return the partitions to store with the rows read and written of them, or None if it must be rejected."""
        taken = set()
        for range_ in ranges:
            if range_.partition in self._stands:
                generation, epoch, position = self._stands[range_.partition]
                if range_.generation < generation or range_.epoch < epoch:
                    return None
                if range_.generation == generation and range_.end == position:
                    continue
                if range_.generation == generation and range_.start != position:
                    return None
            taken.add(range_.partition)
        return of_partitions(taken, read, written)

    def _note(self, taken: ClaimedRange) -> None:
        self._stands[taken.partition] = (taken.generation, taken.epoch, taken.end)


class RangesModel(Rows):
    """The expected output if ranges come in any order: the range of each offset."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[int, dict[int, tuple[int, int]]]] = {}

    def some_ranges(self, dice: Random) -> list[ClaimedRange]:
        """Return ranges of one batch: mostly ones that were planned in the generation, sometimes not."""
        found = []
        for partition in dice.sample(range(3), dice.randint(1, 3)):
            generation = self._held.get(partition, (5, {}))[0]
            if dice.random() < 0.1:
                generation += dice.choice((5, 5, 5, -5))
            cuts = sorted(Random(f"{partition} {generation}").sample(range(60), 9))
            at = dice.randrange(8)
            start, end = cuts[at], cuts[at + 1] + (dice.random() < 0.1)
            readable = dice.randint(start, end) if dice.random() < 0.1 else start
            epoch = dice.randint(1, 99)
            found.append(ahead(partition, start, end, generation=generation, epoch=epoch, readable=readable))
        return found

    def outcome(self, ranges: Sequence[ClaimedRange], read: Sequence[Row], written: Sequence[Row]) -> Taken | None:
        """Return the partitions to store with the rows read and written of them, or None if it must be rejected."""
        taken = set()
        for range_ in ranges:
            generation, ground = self._held.get(range_.partition, (-1, {}))
            if range_.generation < generation:
                return None
            met = {ground.get(offset) for offset in range(range_.start, range_.end)}
            if range_.generation == generation and met == {(range_.start, range_.end)}:
                continue
            if range_.generation == generation and met != {None}:
                return None
            taken.add(range_.partition)
        return of_partitions(taken, read, written)

    def _note(self, taken: ClaimedRange) -> None:
        generation, ground = self._held.get(taken.partition, (-1, {}))
        kept = ground if generation == taken.generation else {}
        added = dict.fromkeys(range(taken.start, taken.end), (taken.start, taken.end))
        self._held[taken.partition] = taken.generation, kept | added
