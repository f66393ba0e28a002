# ruff: noqa: PT012 - what raises is the block of a batch
"""The guarantees of each delivery mode when members die at any step or acknowledgements are lost.

See protocol.md, section 6.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from unittest.mock import Mock

import pytest

from marshal_dagster.batches import BatchRequest, record_reader
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    MarshalError,
    PlanRejectedError,
    SinkRejectedError,
    UnavailableError,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import TakenRanges
from marshal_dagster.protocol.messages import ClaimingMessages, DataTopic, DeliveryMode, Heartbeat
from marshal_dagster.sinks import WriteResult
from marshal_dagster.spark import job_control, reader
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, Place, Scene
from tests.faulty_log import Fault, FaultyLog, InterruptError, of_type
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.batches import ClaimedBatch

ALL_MODES = list(DeliveryMode)
AT_LEAST_ONCE = DeliveryMode.AT_LEAST_ONCE
AT_MOST_ONCE = DeliveryMode.AT_MOST_ONCE
EFFECTIVELY_ONCE = DeliveryMode.EFFECTIVELY_ONCE

APPENDS = ("GroupSettings", "ClaimingPartition", "DataTopic", "Heartbeat", "ClaimingMessages", "ReleasingPartition")
STEPS = [KillPoint(side, record, count) for record in APPENDS for side in Side for count in (1, 2, 3)]


@pytest.fixture
def scene() -> Scene:
    """A data topic of 4 partitions with 5 messages each, and a group without any record."""
    scene = Scene()
    scene.data.make(partitions=4, messages=5)
    return scene


def once(scene: Scene) -> Counter[Place]:
    """Return every message once."""
    return Counter(scene.data.all_messages())


def die(scene: Scene, mode: DeliveryMode, at: KillPoint) -> set[Place]:
    """Process batches until the member dies at `at`.

    Return the messages of its last batch, or nothing if it survives.
    """
    log = KillableLog(scene.log(), at)
    delivery = scene.delivery(mode, log=log)
    last: ClaimedBatch | None = None
    try:
        for _ in range(4):
            last = scene.batch(delivery, max_records=9)
            with last:
                if last.idle is None:
                    scene.process(last)
    except KilledError:
        assert last is not None
        return {(range_.partition, offset) for range_ in last.all_ranges for offset in range(range_.start, range_.end)}
    assert at.record in {"GroupSettings", "DataTopic"}, "the member did not die"
    return set()


@pytest.mark.parametrize("at", STEPS, ids=str)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_member_that_dies_at_any_step(scene: Scene, mode: DeliveryMode, at: KillPoint) -> None:
    """At most once repeats nothing and at least once loses nothing; only one batch is affected.

    Effectively once is exact.
    """
    its_batch = die(scene, mode, at)
    scene.wait_until_stale()
    scene.drain(scene.delivery(mode), max_records=7)

    counts = scene.counts(mode)
    if mode is EFFECTIVELY_ONCE:
        assert counts == once(scene)
        return
    more, fewer = counts - once(scene), once(scene) - counts
    assert not (more if mode is AT_MOST_ONCE else fewer)
    assert set(more | fewer) <= its_batch
    assert max((more | fewer).values(), default=1) == 1


@pytest.mark.parametrize("side", ["while_reading", "after_write"])
def test_a_member_that_dies_beside_its_output(scene: Scene, side: str) -> None:
    """If the member dies before the output, its successor writes it. If it dies after, the successor only commits."""
    log = KillableLog(scene.log(), None)

    def kill() -> None:
        setattr(scene.sink, side, lambda: None)
        log.dead = True
        raise KilledError

    setattr(scene.sink, side, kill)
    with pytest.raises(KilledError):
        scene.work(scene.delivery(EFFECTIVELY_ONCE, log=log))
    scene.wait_until_stale()

    with scene.batch(scene.delivery(EFFECTIVELY_ONCE)) as batch:
        done = side == "after_write"
        assert (len(batch.ranges), len(batch.skipped)) == ((0, 4) if done else (4, 0))
        assert {report.state for report in batch.report()} == {"skipped" if done else "not committed"}
        if not done:
            scene.process(batch)

    assert batch.committed
    assert scene.sink.counts() == once(scene)
    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]


@pytest.mark.parametrize(
    "reported",
    [
        lambda ranges: WriteResult(ranges[1:], (), {}),
        lambda ranges: WriteResult(ranges, ranges[:1], {}),
        lambda ranges: WriteResult((*ranges[1:], replace(ranges[0], end=1)), (), {}),
        lambda _: None,
    ],
    ids=["missing", "twice", "another", "nothing"],
)
def test_a_sink_that_does_not_report_each_range_commits_nothing(
    scene: Scene, reported: Callable[[Sequence[ClaimedRange]], WriteResult]
) -> None:
    """A sink of the user's may catch the error of a range. The position would be committed without the rows."""
    sink = Mock(spec=scene.sink, wraps=scene.sink, supports_unordered_ranges=True)
    sink.write.side_effect = lambda _, ranges, *__: reported(ranges)
    batch = scene.delivery(EFFECTIVELY_ONCE).claimed_batch(BatchRequest(topic=TOPIC), sink)
    with pytest.raises(BatchAbortedError, match=rf"once as taken or skipped: .*{TOPIC}/0.*nothing is committed"), batch:
        batch.begin_processing()
        batch.write(cast("DataFrame", []))
    assert not batch.committed


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_batch_half_committed_is_taken_over_by_two(scene: Scene, mode: DeliveryMode) -> None:
    """A commit is one record per partition: those written stay, and other members repeat the rest."""
    log = KillableLog(scene.log(), KillPoint(Side.WITHIN, "Heartbeat", 3))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(mode, log=log))
    scene.wait_until_stale()
    assert sorted(scene.key(n).offset or 0 for n in range(4)) == [0, 0, 0, 5]

    one, two = scene.delivery(mode), scene.delivery(mode)
    with scene.batch(one, partitions=(0, 1)) as first, scene.batch(two, partitions=(2, 3)) as second:
        assert {r.partition for r in first.all_ranges + second.all_ranges} == {
            n for n in range(4) if scene.key(n).offset == 0
        }
        for batch in (second, first):
            if batch.ranges:
                scene.process(batch)

    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]
    if mode is EFFECTIVELY_ONCE:
        assert scene.sink.counts() == once(scene)
        assert {one.partition for one in first.skipped + second.skipped} == {1, 2, 3}
    else:
        assert sorted(scene.processed.values()) == [1] * 5 + [2] * 15


def test_a_late_member_cannot_write_over_its_successor(scene: Scene) -> None:
    """The sink refuses the lower fencing token."""
    late = scene.batch(scene.delivery(EFFECTIVELY_ONCE), max_records=8)
    with pytest.raises(ClaimLostError), late:
        scene.wait_until_stale()
        scene.drain(scene.delivery(EFFECTIVELY_ONCE), max_records=8)
        with pytest.raises(SinkRejectedError, match="fencing token"):
            scene.sink.write([], late.ranges, dict)  # type: ignore[arg-type]
        scene.process(late)

    assert scene.sink.counts() == once(scene)


# The permission of at most once


def test_at_most_once_without_an_acknowledgement_drops_the_batch(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit that is in the log, but was not acknowledged, gives no permission: the range is dropped and reported."""
    log = FaultyLog(scene.log())
    with scene.batch(scene.delivery(AT_MOST_ONCE, log=log)) as batch:
        log.fail(Fault.LOST_ACK, of_type("Heartbeat", partition=2))
        with caplog.at_level(logging.ERROR):
            batch.begin_processing()
        log.recover()
        scene.processed.update(scene.data.read(batch.ranges))

    assert [one.partition for one in batch.dropped] == [2]
    assert "dropped, not repeated in at most once: orders/2 [0, 5)" in caplog.text
    assert {report.range.partition: report.state for report in batch.report()}[2] == "dropped"
    assert {place[0] for place in scene.processed} == {0, 1, 3}
    assert scene.data.committed == {(GROUP, TOPIC): {0: 5, 1: 5, 3: 5}}
    scene.wait_until_stale()
    scene.drain(scene.delivery(AT_MOST_ONCE))
    assert scene.processed == once(scene) - Counter({(2, offset): 1 for offset in range(5)})


def test_at_most_once_that_is_wholly_unsure_processes_nothing(scene: Scene) -> None:
    """Without any acknowledgement, every range is dropped."""
    log = FaultyLog(scene.log())
    with scene.batch(scene.delivery(AT_MOST_ONCE, log=log)) as batch:
        log.fail(Fault.LOST_ACK, of_type("Heartbeat"))
        batch.begin_processing()
        log.recover()

    assert batch.ranges == ()
    assert len(batch.dropped) == 4
    assert not batch.committed
    assert scene.data.committed == {}


def test_at_most_once_never_takes_another_record_for_its_own(scene: Scene) -> None:
    """If an equal record of another process moved the offset first, this process has no permission."""
    with scene.batch(scene.delivery(AT_MOST_ONCE)) as batch:
        twin = batch.batch_id
        log = batch._claimer.rationalizer.log
        append = log.append

        def overtaken(records):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            if records[0].value.startswith(b"Heartbeat"):
                scene.about(Heartbeat, twin, 1, offset=5)
            return append(records)

        log.append = overtaken  # type: ignore[method-assign]
        batch.begin_processing()

    assert [one.partition for one in batch.dropped] == [1]
    assert [range_.partition for range_ in batch.ranges] == [0, 2, 3]


def test_at_most_once_reports_the_ranges_before_it_commits(scene: Scene) -> None:
    """The ranges that a crash would lose are logged before the commit."""
    log = KillableLog(scene.log(), KillPoint(Side.BEFORE, "Heartbeat", 3))
    with pytest.raises(KilledError):
        scene.work(scene.delivery(AT_MOST_ONCE, log=log))

    assert [str(one) for one in scene.announced] == [f"orders/{n} [0, 5)" for n in range(4)]
    assert [scene.key(n).offset for n in range(4)] == [0, 0, 0, 0]


def test_at_most_once_that_was_never_read_commits_nothing(scene: Scene) -> None:
    """A block that does not read drops nothing, and fails: the same batch would be claimed again and again."""
    batch = scene.batch(scene.delivery(AT_MOST_ONCE))
    with pytest.raises(BatchAbortedError, match="nothing was read, so nothing is committed"), batch:
        pass

    assert (batch.committed, batch.dropped, states(batch)) == (False, (), {"not committed"})
    assert [scene.key(n).offset for n in range(4)] == [0, 0, 0, 0]


def states(batch: "ClaimedBatch") -> set[str]:
    """Return the states in the batch's report."""
    return {report.state for report in batch.report()}


def after_the_commit(log: FaultyLog, inject_fault: Callable[[], object]) -> None:
    """Call `inject_fault` once the next heartbeats are in the log and before their acknowledgement arrives."""

    def appended() -> None:
        if log.types()[-1] == "Heartbeat":
            log.after_append = lambda: None
            inject_fault()

    log.after_append = appended


def interrupt() -> None:
    """Raise an `InterruptError`."""
    raise InterruptError


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_an_at_most_once_commit_that_ends_in_an_error_is_reported_as_dropped(
    scene: Scene, caplog: pytest.LogCaptureFixture, is_interrupt: bool
) -> None:
    """The commit was sent before the log failed or an interrupt came, so no member will process these ranges."""
    log = FaultyLog(scene.log())
    batch = scene.batch(scene.delivery(AT_MOST_ONCE, log=log))
    with pytest.raises((UnavailableError, InterruptError)), batch:
        after_the_commit(log, interrupt if is_interrupt else lambda: setattr(log, "is_down", True))
        try:
            scene.process(batch)
        finally:
            log.recover()

    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]
    assert (batch.ranges, batch.committed) == ((), False)
    assert [str(one) for one in batch.dropped] == [f"orders/{n} [0, 5)" for n in range(4)]
    assert states(batch) == {"possibly dropped"}
    assert caplog.text.count("possibly dropped, not repeated in at most once: orders/0 [0, 5), orders/1 [0, 5)") == 1
    assert scene.data.committed == {}


def test_a_commit_whose_error_was_caught_is_not_tried_again(scene: Scene) -> None:
    """If the block catches the error, it has nothing to process, and the ranges are reported as dropped."""
    log = FaultyLog(scene.log())
    with scene.batch(scene.delivery(AT_MOST_ONCE, log=log)) as batch:
        after_the_commit(log, lambda: setattr(log, "is_down", True))
        with pytest.raises(UnavailableError):
            batch.begin_processing()
        log.recover()
        scene.process(batch)

    assert len(batch.dropped) == 4
    assert not scene.processed


def test_at_most_once_that_did_not_come_to_commit_drops_nothing(scene: Scene) -> None:
    """If the lease ends before the commit is sent, the next run processes the plan."""
    delivery = scene.delivery(AT_MOST_ONCE)
    delivery.announce = lambda _: scene.clock.advance(1.9 * HI_MS)
    batch = scene.batch(delivery)
    with pytest.raises(ClaimLostError), batch:
        scene.process(batch)

    assert batch.dropped == ()
    assert states(batch) == {"not committed"}
    scene.wait_until_stale()
    scene.drain(scene.delivery(AT_MOST_ONCE))
    assert scene.processed == once(scene)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_at_most_once_work_that_fails_is_possibly_dropped(
    scene: Scene, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Only the block knows which messages of its ranges it has processed."""
    batch = scene.batch(scene.delivery(AT_MOST_ONCE))
    with pytest.raises(type(error)), batch:
        batch.begin_processing()
        assert (len(batch.ranges), batch.dropped) == (4, ())
        raise error

    assert (batch.ranges, len(batch.dropped)) == ((), 4)
    assert states(batch) == {"possibly dropped"}
    assert caplog.text.count("possibly dropped, not repeated in at most once: orders/0 [0, 5)") == 1


def test_at_most_once_whose_claim_was_lost_meanwhile_is_possibly_dropped(scene: Scene) -> None:
    """The block ended without an error, but after the heartbeats did: its work may have been cancelled."""
    batch = scene.batch(scene.delivery(AT_MOST_ONCE))
    with pytest.raises(BatchAbortedError), batch:
        scene.process(batch)
        assert batch._guard.heartbeats is not None
        batch._guard.heartbeats.error = BatchAbortedError("reported")

    assert states(batch) == {"possibly dropped"}


def test_at_most_once_work_that_ends_well_drops_nothing(scene: Scene) -> None:
    """Every range is committed and remains among the batch's ranges."""
    batch = scene.work(scene.delivery(AT_MOST_ONCE))

    assert (len(batch.ranges), batch.dropped, states(batch)) == (4, (), {"committed"})


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replace the reader so that batches need no Spark session; a test chooses the step that fails."""
    monkeypatch.setattr(record_reader, "check_session", lambda _: None)
    monkeypatch.setattr(record_reader, "check_single_execution", lambda _: None)
    monkeypatch.setattr(job_control, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(job_control, "interruptible_calls", lambda _: nullcontext())
    monkeypatch.setattr(job_control, "cancel", lambda *_: None)
    monkeypatch.setattr(reader, "read_ranges", lambda *_, **__: [])
    return monkeypatch


def read(batch: "ClaimedBatch") -> None:
    """Read the batch with an object in place of a session."""
    batch.read(cast("SparkSession", object()))


@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize("step", ["batch_jobs", "read_ranges"])
def test_at_most_once_that_could_not_be_read_is_dropped(
    scene: Scene, no_spark: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, is_caught: bool
) -> None:
    """The batch was committed, but no frame could be created: nothing was processed, and nothing will be."""
    no_spark.setattr(job_control if step == "batch_jobs" else reader, step, lambda *_, **__: 1 / 0)
    batch = scene.batch(scene.delivery(AT_MOST_ONCE))
    raised = pytest.raises(BatchAbortedError, match="committed, and nothing processes them: orders/0")
    with raised if is_caught else pytest.raises(ZeroDivisionError), batch:
        try:
            read(batch)
        except ZeroDivisionError:
            if not is_caught:
                raise

    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]
    assert (len(batch.dropped), states(batch)) == (4, {"dropped"})
    assert any(line.startswith("dropped, not repeated in at most once: orders/0 [0, 5)") for line in caplog.messages)


def test_a_batch_is_read_as_of_the_incarnation_it_claimed(scene: Scene, no_spark: pytest.MonkeyPatch) -> None:
    """The reader gets the topic id, so that Spark does not reuse data cached from a topic since re-created."""
    requested: list[object] = []
    no_spark.setattr(reader, "read_ranges", lambda *_, topic_id, **__: requested.append(topic_id))
    with scene.batch(scene.delivery(AT_LEAST_ONCE)) as batch:
        read(batch)
    assert requested == [batch.ranges[0].data_topic_id]


def test_at_least_once_that_could_not_be_read_commits_nothing(scene: Scene, no_spark: pytest.MonkeyPatch) -> None:
    """A block that catches the reader's error has read nothing."""
    no_spark.setattr(reader, "read_ranges", lambda *_, **__: 1 / 0)
    batch = scene.batch(scene.delivery(AT_LEAST_ONCE))
    with pytest.raises(BatchAbortedError, match="nothing was read"), batch, suppress(ZeroDivisionError):
        read(batch)

    assert [scene.key(n).offset for n in range(4)] == [0, 0, 0, 0]


def test_at_least_once_that_was_read_is_committed(scene: Scene, no_spark: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """A batch counts as read once the frame exists."""
    with scene.batch(scene.delivery(AT_LEAST_ONCE)) as batch:
        read(batch)

    assert batch.committed
    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]


def test_at_least_once_that_was_never_read_commits_nothing(scene: Scene) -> None:
    """Without this error an early return from the block would lose the messages; the text states what to do."""
    batch = scene.batch(scene.delivery(AT_LEAST_ONCE))
    with pytest.raises(BatchAbortedError, match=r"Read the batch, or call batch\.begin_processing\(\)"), batch:
        pass

    assert not batch.committed
    assert states(batch) == {"not committed"}
    assert [(scene.key(n).offset, scene.key(n).owner) for n in range(4)] == [(0, None)] * 4
    scene.drain(scene.delivery(AT_LEAST_ONCE))
    assert scene.processed == once(scene)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_reading_twice_commits_once(scene: Scene, mode: DeliveryMode) -> None:
    """The permission is taken once for the whole batch."""
    with scene.batch(scene.delivery(mode)) as batch:
        batch.begin_processing()
        before = len(scene.values())
        batch.begin_processing()
        assert len(scene.values()) == before
        scene.process(batch)

    assert scene.counts(mode) == once(scene)


# Commits without an acknowledgement


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_commit_without_acknowledgement_is_settled_by_reading(scene: Scene, mode: DeliveryMode) -> None:
    """If the commit is read back from the log, it counts."""
    log = FaultyLog(scene.log())
    with scene.batch(scene.delivery(mode, log=log)) as batch:
        scene.process(batch)
        log.fail(Fault.LOST_ACK, of_type("Heartbeat"), times=4)

    assert batch.committed
    assert [scene.key(n).offset for n in range(4)] == [5, 5, 5, 5]


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_commit_that_is_not_in_the_log_is_none(scene: Scene, mode: DeliveryMode) -> None:
    """If the broker accepts nothing until the lease ends, nothing is committed and an error is raised."""
    log = FaultyLog(scene.log())
    batch = scene.batch(scene.delivery(mode, log=log))
    with pytest.raises(MarshalError), batch:
        scene.process(batch)
        log.fail(Fault.FAILED, of_type("Heartbeat"))
        log.before_append = lambda: scene.clock.advance(HI_MS / 2)

    assert not batch.committed
    assert [scene.key(n).offset for n in range(4)] == [0, 0, 0, 0]
    scene.wait_until_stale()
    scene.drain(scene.delivery(mode))
    assert scene.counts(mode) == dict.fromkeys(once(scene), 1 if mode is EFFECTIVELY_ONCE else 2)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_plan_that_is_not_in_the_log_is_none(scene: Scene, mode: DeliveryMode) -> None:
    """A batch without its plan in the log is not processed."""
    log = FaultyLog(scene.log())
    log.fail(Fault.FAILED, of_type(ClaimingMessages.__name__, partition=3))

    with pytest.raises(PlanRejectedError, match="orders/3"):
        scene.work(scene.delivery(mode, log=log))

    assert not scene.counts(mode)
    assert [scene.key(n).owner for n in range(4)] == [None, None, None, None]


def test_a_data_topic_that_could_not_be_named_is_let_go(scene: Scene) -> None:
    """Without the data topic's id an offset has no meaning, so the claim is released."""
    log = FaultyLog(scene.log())
    log.fail(Fault.FAILED, of_type(DataTopic.__name__, partition=3))

    with pytest.raises(ClaimLostError, match="orders/3"):
        scene.work(scene.delivery(log=log))

    assert [scene.key(n).owner for n in range(4)] == [None, None, None, None]
    scene.drain(scene.delivery())
    assert scene.processed == once(scene)


# Effectively once


def test_a_block_that_wrote_nothing_commits_nothing(scene: Scene) -> None:
    """Leaving the block without `write` is an error, because a commit would lose the messages."""
    with (
        pytest.raises(BatchAbortedError, match="nothing was written and nothing is committed"),
        scene.batch(scene.delivery(EFFECTIVELY_ONCE)) as batch,
    ):
        batch.begin_processing()

    assert not batch.committed
    assert [scene.key(n).offset for n in range(4)] == [0, 0, 0, 0]


def test_an_output_that_refuses_fails_the_batch_before_it_is_processed(scene: Scene) -> None:
    """If the sink's position does not match, nothing is read or committed, and the plan stays open for an operator."""
    batch = scene.work(scene.delivery(EFFECTIVELY_ONCE), max_records=8)
    scene.sink.stored[1] = TakenRanges()
    scene.sink.stored[1].add(replace(batch.ranges[1], end=4))

    with (
        pytest.raises(SinkRejectedError, match="the output is at position 4"),
        scene.batch(scene.delivery(EFFECTIVELY_ONCE)),
    ):
        pytest.fail("entered")

    assert scene.key(1).plan_end == 5
    assert [scene.key(n).owner for n in range(4)] == [None, None, None, None]


def test_a_lost_batch_is_not_even_worked_out(scene: Scene) -> None:
    """If the lease ended before the write, Spark does no work."""
    scene.sink.while_reading = lambda: pytest.fail("at work")
    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))
    with pytest.raises(ClaimLostError), batch:
        batch.begin_processing()
        scene.clock.advance(1.9 * HI_MS)
        scene.process(batch)


def test_a_write_that_failed_cannot_be_passed_over(scene: Scene) -> None:
    """If the block catches the sink's error, nothing is committed."""
    scene.sink.while_reading = lambda: (_ for _ in ()).throw(SinkRejectedError("full"))
    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))
    with pytest.raises(BatchAbortedError), batch, pytest.raises(SinkRejectedError):
        scene.process(batch)

    assert not batch.committed
