"""Check the judges of the fault runs with handmade journals: a correct one passes, each doctored one fails."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marshal_dagster._internal.ports import HOST
from marshal_dagster.batches import RangeOptions
from marshal_dagster.protocol.messages import DeliveryMode, coordination_partition
from marshal_dagster.protocol.state import Phase
from tests import batch_fixtures as scenes
from tests import soak_results
from tests.batch_fixtures import Scene
from tests.conditions import wait_until
from tests.fault_harness.journal import Journal, read_journal
from tests.fault_harness.proxy import HEALTHY, LinkState, Proxy, Way
from tests.faults.__main__ import SUITE, Row
from tests.faults.checkers import CLOCKS_MS, ON_MS, Evidence, Trial
from tests.faults.journal import ENTRY, Claimed, Entry, Known, Left, Part, Processed, Refused
from tests.faults.scenario import APPENDS, KINDS, RANGE_APPENDS, FaultKind, scenario
from tests.faults.worker import Orders, Worker

GROUP, TOPIC = "fleet", "orders"
FIRST, SECOND = Part(0, 0, 0, 0, 3), Part(0, 0, 6, 3, 6)
"""The batches of two members, one after the other; their epochs are the log offsets of their claims."""
NOW_MS = 1_000_000.0


def log() -> list[tuple[int, int, int, bytes]]:
    """Return a log in which two members claim, plan, commit and release, one after the other."""

    def records(instance: str, start: int, end: int) -> list[str]:
        return [
            f"ClaimingPartition/1/0/{instance}/member/{GROUP}/{TOPIC}/0",
            f"Heartbeat/1/0/{instance}/member/{GROUP}/{TOPIC}/0/{start}",
            f"ClaimingMessages/1/0/{instance}/member/{GROUP}/{TOPIC}/0/{end}",
            f"Heartbeat/1/0/{instance}/member/{GROUP}/{TOPIC}/0/{end}",
            f"ReleasingPartition/1/0/{instance}/member/{GROUP}/{TOPIC}/0/{end}",
        ]

    values = [*records("run0.a", 0, 3), "Mark/1/0/x/y/z//0", *records("run1.b", 3, 6)]
    return [(0, offset, round(NOW_MS) + 10 * offset, value.encode()) for offset, value in enumerate(values)]


def processed(part: Part, instance: str, at_ms: float, lease_ends_ms: float | None = 2 * NOW_MS) -> list[Entry]:
    """Return the entries of a part's messages, one for each millisecond."""
    return [
        Processed(at_ms=at_ms + number, instance=instance, part=part, offset=offset, lease_ends_ms=lease_ends_ms)
        for number, offset in enumerate(range(part.start, part.end))
    ]


def work(part: Part, instance: str, at_ms: float) -> list[Entry]:
    """Return the entries of a batch of one part, from its claim to its end."""
    return [
        Claimed(at_ms=at_ms, instance=instance, parts=(part,)),
        *processed(part, instance, at_ms),
        Left(at_ms=at_ms + 10, instance=instance, committed=(part,), dropped=()),
    ]


def honest(mode: DeliveryMode) -> Evidence:
    """Return the evidence of two members that keep all promises."""
    evidence = Evidence(mode, GROUP, TOPIC, 0, 1, 0.0)
    evidence.journals = {
        "run0": work(FIRST, "run0.a", NOW_MS + 45),
        "run1": work(SECOND, "run1.b", NOW_MS + 115),
    }
    evidence.messages = {(0, offset) for offset in range(6)}
    if mode is DeliveryMode.EFFECTIVELY_ONCE:
        evidence.rows = Counter(evidence.messages)
        evidence.journals = {
            run_id: [entry for entry in entries if not isinstance(entry, Processed)]
            for run_id, entries in evidence.journals.items()
        }
    return evidence


def promises(evidence: Evidence) -> set[str]:
    """Return the promises that the judges find broken."""
    return {violation.promise for violation in Trial(evidence, log()).judge().violations}


@pytest.mark.parametrize("mode", DeliveryMode)
def test_honest_work_passes(mode: DeliveryMode) -> None:
    """Correct work violates nothing, and is counted."""
    tally = Trial(honest(mode), log()).judge()
    assert tally.violations == []
    assert (tally.lost, tally.twice, tally.dropped, tally.takeovers_ms) == (0, 0, 0, [])


def test_a_reader_that_knows_what_the_log_says_passes() -> None:
    """The judges compare each field that the reader wrote, at the log offset up to which it had read."""
    evidence = honest(DeliveryMode.AT_LEAST_ONCE)
    evidence.journals["run0"].append(known(5, 3))
    assert promises(evidence) == set()


def _claim_nobody_won(evidence: Evidence) -> None:
    evidence.journals["run2"] = [Claimed(at_ms=NOW_MS, instance="run2.c", parts=(Part(0, 0, 1, 0, 3),))]


def _commit_of_another(evidence: Evidence) -> None:
    evidence.journals["run2"] = [Left(at_ms=NOW_MS, instance="run2.c", committed=(FIRST,), dropped=())]


def _work_without_a_plan(evidence: Evidence) -> None:
    evidence.journals["run1"].extend(processed(Part(0, 0, 6, 3, 5), "run1.b", NOW_MS + 120))


def _work_after_the_lease(evidence: Evidence) -> None:
    late = processed(FIRST, "run0.a", NOW_MS + 50, lease_ends_ms=NOW_MS)
    late.append(late[-1].model_copy(update={"at_ms": NOW_MS + 60 + ON_MS}))
    evidence.journals["run0"] = late


def _work_side_by_side(evidence: Evidence) -> None:
    evidence.journals["run0"].extend(processed(FIRST, "run0.a", NOW_MS + 200))


def _a_message_is_never_processed(evidence: Evidence) -> None:
    del evidence.journals["run1"][1]


def known(next_offset: int, offset: int, *ranges: tuple[object, ...], data_topic_id: str | None = None) -> Known:
    """Return a reader's state of the key, of which no member holds the whole partition."""
    return Known(
        at_ms=NOW_MS,
        instance="run0",
        coordination_partition=0,
        next_offset=next_offset,
        group=GROUP,
        topic=TOPIC,
        partition=0,
        state=(None, None, None, None, offset, None, 0, 0, data_topic_id),
        ranges=ranges,
    )


def _a_wrong_reader(evidence: Evidence) -> None:
    evidence.journals["run0"].append(known(5, 4))


def _a_reader_that_sees_a_range(evidence: Evidence) -> None:
    evidence.journals["run0"].append(known(5, 3, (5, 9, "done", None, None, None, None, 0)))


def _an_observer_claims(evidence: Evidence) -> None:
    evidence.observers = {"run0"}


def _a_false_alarm(evidence: Evidence) -> None:
    refused = Refused(
        at_ms=NOW_MS, instance="run0.d", error="CoordinationLogChangedError", text="the log was truncated"
    )
    evidence.journals["run0"].append(refused)


def _a_false_alarm_of_data(evidence: Evidence) -> None:
    left = Left(at_ms=NOW_MS, instance="run0.d", committed=(), dropped=(), error="DataTopicChangedError")
    evidence.journals["run0"].append(left)
    evidence.is_log_safe = False


def _a_deserted_member_blames_the_network(evidence: Evidence) -> None:
    evidence.deserted = {"run0"}
    refused = Refused(at_ms=NOW_MS, instance="run0.d", error="UnavailableError", text="no answer")
    evidence.journals["run0"].append(refused)


@pytest.mark.parametrize(
    ("doctor", "promise"),
    [
        (_claim_nobody_won, "a claim that is believed in is in the log"),
        (_commit_of_another, "a commit that is believed in is in the log"),
        (_work_without_a_plan, "what is processed was planned"),
        (_work_after_the_lease, "no work without a lease"),
        (_work_side_by_side, "one owner at a time"),
        (_a_message_is_never_processed, "at least once"),
        (_a_wrong_reader, "readers agree"),
        (_a_reader_that_sees_a_range, "readers agree"),
        (_an_observer_claims, "an observing reader never claims"),
        (_a_deserted_member_blames_the_network, "a deleted log is a clear error"),
        (_a_false_alarm, "no false alarm"),
        (_a_false_alarm_of_data, "no false alarm"),
    ],
)
def test_a_doctored_journal_is_caught(doctor: Callable[[Evidence], None], promise: str) -> None:
    """Each way to break a promise is found."""
    evidence = honest(DeliveryMode.AT_LEAST_ONCE)
    doctor(evidence)
    assert promise in promises(evidence)


def test_that_a_log_was_cut_may_be_said() -> None:
    """If the log was cut, such an error is no false alarm."""
    evidence = honest(DeliveryMode.AT_LEAST_ONCE)
    _a_false_alarm(evidence)
    evidence.is_log_safe = False
    assert promises(evidence) == set()


def _processed_twice(evidence: Evidence) -> None:
    evidence.journals["run1"].extend(processed(SECOND, "run1.b", NOW_MS + 120))


def _processed_before_the_commit(evidence: Evidence) -> None:
    evidence.journals["run1"] = work(SECOND, "run1.b", NOW_MS)


@pytest.mark.parametrize(
    ("doctor", "promise"),
    [
        (_processed_twice, "at most once"),
        (_processed_before_the_commit, "at most once commits before it processes"),
        (_a_message_is_never_processed, "what is committed at most once is processed"),
    ],
)
def test_a_doctored_journal_is_caught_at_most_once(doctor: Callable[[Evidence], None], promise: str) -> None:
    """Violations of the additional promises of at most once are found too."""
    evidence = honest(DeliveryMode.AT_MOST_ONCE)
    doctor(evidence)
    assert promise in promises(evidence)


def test_a_batch_in_hand_may_be_dropped_at_most_once() -> None:
    """Messages that a killed run had committed but not processed count as dropped, not as lost."""
    evidence = honest(DeliveryMode.AT_MOST_ONCE)
    del evidence.journals["run1"][2:]
    tally = Trial(evidence, log()).judge()
    assert (tally.violations, tally.dropped, tally.lost) == ([], 2, 0)


@pytest.mark.parametrize("count", [0, 2])
def test_an_output_with_a_message_missing_or_twice_is_caught(count: int) -> None:
    """In effectively once, the output's rows are judged."""
    evidence = honest(DeliveryMode.EFFECTIVELY_ONCE)
    evidence.rows[0, 4] = count
    assert promises(evidence) == {"effectively once"}


def test_a_takeover_is_counted_with_its_time() -> None:
    """A claim that follows an unreleased claim is a takeover; its time comes from the log."""
    records = [each for each in log() if not each[3].startswith(b"ReleasingPartition/1/0/run0.a")]
    late = [(p, o, t + (130_000 if o > 4 else 0), value) for p, o, t, value in records]
    tally = Trial(Evidence(DeliveryMode.AT_LEAST_ONCE, GROUP, TOPIC, 0, 1, 0.0), late).judge()
    assert tally.takeovers_ms == [130_030]


LOW, HIGH = Part(0, 0, 5, 0, 3), Part(0, 0, 6, 4, 6)
"""Ranges that two members process at the same time.

The first claimed up to 4 and planned less; the second range is done first.
"""
REST = Part(0, 0, 10, 3, 4)
"""The offsets that the first plan left out, as the second member claims them later."""
AGAIN = Part(0, 0, 11, 0, 3)
"""The lower range as a third member claims it if the first member never finished it."""
DATA_TOPIC = "A" * 22


def of_range(kind: str, instance: str, *tail: int) -> str:
    """Return a record about a range."""
    return "/".join([kind, "1/0", instance, f"member/{GROUP}/{TOPIC}/0", *map(str, tail)])


def range_log(*more: str, is_done: bool = True, later_ms: int = 0) -> list[tuple[int, int, int, bytes]]:
    """Return the log of two members on one partition.

    `is_done` is whether the lower range is finished; the records `more` come `later_ms` afterwards.
    """
    whole = f"1/0/run0.w/member/{GROUP}/{TOPIC}/0"
    values = [
        f"GroupSettings/1/0/run0.w/member/{GROUP}//0/1000/native/at_least_once/ranges",
        f"ClaimingPartition/{whole}",
        f"DataTopic/{whole}/{DATA_TOPIC}",
        f"Heartbeat/{whole}/0",
        f"ReleasingPartition/{whole}/0",
        of_range("ClaimingRange", "run0.a", 0, 4),
        of_range("ClaimingRange", "run1.b", 4, 6),
        of_range("PlanningRange", "run0.a", LOW.epoch, 3),
        of_range("PlanningRange", "run1.b", HIGH.epoch, 6),
        of_range("RangeDone", "run1.b", HIGH.epoch),
    ]
    timed = [(offset * 10, value) for offset, value in enumerate(values)]
    ends = [
        of_range("ClaimingRange", "run1.d", 3, 4),
        of_range("RangeDone", "run0.a", LOW.epoch),
        of_range("PlanningRange", "run1.d", REST.epoch, 4),
        of_range("RangeDone", "run1.d", REST.epoch),
    ]
    timed += [(100 + number * 10, value) for number, value in enumerate(ends if is_done else ends[:1])]
    timed += [(150 + later_ms + number * 10, value) for number, value in enumerate(more)]
    return [(0, offset, round(NOW_MS) + ms, value.encode()) for offset, (ms, value) in enumerate(timed)]


def honest_ranges(mode: DeliveryMode) -> Evidence:
    """Return the evidence of two members that share a partition and keep all promises."""
    evidence = Evidence(mode, GROUP, TOPIC, 0, 1, 0.0)
    evidence.journals = {
        "run0": range_work(LOW, "run0.a", 82, 120),
        "run1": [*range_work(HIGH, "run1.b", 84, 98), *range_work(REST, "run1.d", 101, 140)],
    }
    evidence.messages = {(0, offset) for offset in range(6)}
    return evidence


def range_work(part: Part, instance: str, began_ms: float, left_ms: float) -> list[Entry]:
    """Return the entries of a batch of one range; its messages are processed just before its end."""
    return [
        Claimed(at_ms=NOW_MS + began_ms, instance=instance, parts=(part,)),
        *processed(part, instance, NOW_MS + left_ms - 5),
        Left(at_ms=NOW_MS + left_ms, instance=instance, committed=(part,), dropped=()),
    ]


def known_ranges(owner: str) -> Known:
    """Return a reader's state when the higher range is done and `owner` has the lower one."""
    low = (LOW.start, LOW.end, "planned", owner, "member", LOW.epoch, round(NOW_MS) + 50, 0)
    done = (HIGH.start, HIGH.end, "done", None, None, None, None, 0)
    return known(10, 0, low, done, data_topic_id=DATA_TOPIC)


BY_RANGES = [DeliveryMode.AT_MOST_ONCE, DeliveryMode.AT_LEAST_ONCE]


def range_promises(evidence: Evidence, log: list[tuple[int, int, int, bytes]] | None = None) -> set[str]:
    """Return the promises that the judges find broken, for members that claim ranges."""
    return {violation.promise for violation in Trial(evidence, log or range_log()).judge().violations}


@pytest.mark.parametrize("mode", BY_RANGES)
def test_honest_work_on_ranges_passes(mode: DeliveryMode) -> None:
    """Adjacent ranges may be processed at the same time and finished in any order.

    Another member may claim the offsets that a plan left out.
    """
    evidence = honest_ranges(mode)
    evidence.journals["run0"].append(known_ranges("run0.a"))
    tally = Trial(evidence, range_log()).judge()
    assert tally.violations == []
    assert (tally.lost, tally.twice, tally.dropped, tally.repeated, tally.takeovers_ms) == (0, 0, 0, 0, [])
    assert tally.together == 2


@pytest.mark.parametrize("mode", BY_RANGES)
def test_members_one_after_another_are_not_together(mode: DeliveryMode) -> None:
    """`together` counts members that work at the same time, which shows that ranges are useful."""
    evidence = honest_ranges(mode)
    del evidence.journals["run0"]
    assert Trial(evidence, range_log()).judge().together == 1


def _range_nobody_won(evidence: Evidence) -> None:
    evidence.journals["run2"] = [Claimed(at_ms=NOW_MS, instance="run2.c", parts=(LOW,))]


def _range_that_starts_elsewhere(evidence: Evidence) -> None:
    evidence.journals["run0"].insert(0, Claimed(at_ms=NOW_MS, instance="run0.a", parts=(LOW._replace(start=1),)))


def _range_larger_than_was_claimed(evidence: Evidence) -> None:
    evidence.journals["run0"].insert(0, Claimed(at_ms=NOW_MS, instance="run0.a", parts=(LOW._replace(end=5),)))


def _range_done_by_nobody(evidence: Evidence) -> None:
    evidence.journals["run1"].append(
        Left(at_ms=NOW_MS, instance="run1.d", committed=(REST._replace(end=5),), dropped=())
    )


def _range_done_by_another(evidence: Evidence) -> None:
    evidence.journals["run2"] = [Left(at_ms=NOW_MS + 500, instance="run2.c", committed=(LOW,), dropped=())]


def _work_behind_the_plan(evidence: Evidence) -> None:
    evidence.journals["run0"].extend(processed(LOW._replace(end=4), "run0.a", NOW_MS + 115))


def _work_before_the_plan(evidence: Evidence) -> None:
    evidence.journals["run0"].insert(1, processed(LOW, "run0.a", NOW_MS - CLOCKS_MS)[0])


@pytest.mark.parametrize("mode", BY_RANGES)
@pytest.mark.parametrize(
    ("doctor", "promise"),
    [
        (_range_nobody_won, "a claim that is believed in is in the log"),
        (_range_that_starts_elsewhere, "a claim that is believed in is in the log"),
        (_range_larger_than_was_claimed, "a claim that is believed in is in the log"),
        (_range_done_by_nobody, "a commit that is believed in is in the log"),
        (_range_done_by_another, "a commit that is believed in is in the log"),
        (_work_behind_the_plan, "what is processed was planned"),
        (_work_before_the_plan, "what is processed was planned"),
    ],
)
def test_a_doctored_journal_of_ranges_is_caught(
    mode: DeliveryMode, doctor: Callable[[Evidence], None], promise: str
) -> None:
    """Each way to break a promise with ranges is found."""
    evidence = honest_ranges(mode)
    doctor(evidence)
    assert promise in range_promises(evidence)


def test_a_reader_is_requested_its_ranges() -> None:
    """A reader that attributes a range to the wrong member is found."""
    evidence = honest_ranges(DeliveryMode.AT_LEAST_ONCE)
    evidence.journals["run0"].append(known_ranges("run2.c"))
    assert range_promises(evidence) == {"readers agree"}


@pytest.mark.parametrize(("mode", "broken"), [(BY_RANGES[0], set()), (BY_RANGES[1], {"no work without a lease"})])
def test_what_is_done_needs_no_lease_at_most_once(mode: DeliveryMode, broken: set[str]) -> None:
    """In at most once, a range is committed before it is processed; all other work needs a lease."""
    evidence = honest_ranges(mode)
    lines = processed(HIGH, "run1.b", NOW_MS + 170, lease_ends_ms=NOW_MS)
    last = lines[-1].model_copy(update={"at_ms": NOW_MS + 180 + ON_MS})
    evidence.journals["run1"][:4] = [evidence.journals["run1"][0], lines[0], last]
    assert range_promises(evidence) == broken


def taken_over(*before: str) -> list[tuple[int, int, int, bytes]]:
    """Return a log in which the lower range is taken over 2.5 seconds after its owner's last record."""
    claim = of_range("ClaimingRange", "run2.c", 0, 3)
    return range_log(*before, claim, is_done=False, later_ms=2_400 - 10 * len(before))


def work_on_both_sides(mode: DeliveryMode) -> Evidence:
    """Return the evidence of a former owner that works under a lease while the next owner works too."""
    evidence = honest_ranges(mode)
    del evidence.journals["run1"][-4:]
    evidence.journals["run0"] = [evidence.journals["run0"][0], *processed(LOW, "run0.a", NOW_MS + 2_700)]
    return evidence


@pytest.mark.parametrize("is_revoked", [False, True])
def test_work_on_a_range_that_was_taken_over_is_caught(*, is_revoked: bool) -> None:
    """If the range was revoked, both may work for a while, as with a whole partition."""
    log = taken_over(of_range("RevokingRange", "run2.r", LOW.epoch)) if is_revoked else taken_over()
    again = AGAIN._replace(epoch=log[-1][1])
    evidence = work_on_both_sides(DeliveryMode.AT_LEAST_ONCE)
    evidence.journals["run2"] = processed(again, "run2.c", NOW_MS + 2_650)
    broken = range_promises(evidence, log)
    assert ("one owner at a time" in broken) is not is_revoked


@pytest.mark.parametrize(
    ("before", "times_ms"),
    [
        ((), [2_500]),
        ((of_range("RevokingRange", "run2.r", LOW.epoch),), [2_500]),
        ((of_range("ReleasingRange", "run0.a", LOW.epoch),), []),
        ((of_range("RangeHeartbeat", "run0.a", LOW.epoch), of_range("ReleasingRange", "run0.a", LOW.epoch)), []),
    ],
)
def test_a_takeover_of_a_range_is_counted_with_its_time(before: tuple[str, ...], times_ms: list[int]) -> None:
    """The time counts from the owner's last record; a released range is not taken over."""
    tally = Trial(Evidence(DeliveryMode.AT_LEAST_ONCE, GROUP, TOPIC, 0, 1, 0.0), taken_over(*before)).judge()
    assert tally.takeovers_ms == times_ms


@pytest.mark.parametrize(("mode", "is_broken"), [(BY_RANGES[0], True), (BY_RANGES[1], False)])
def test_a_range_that_another_has_done_counts_but_at_most_once(mode: DeliveryMode, *, is_broken: bool) -> None:
    """A member whose own commit was lost may rely on the log's state, except in at most once."""
    done = (of_range("ClaimingRange", "run2.c", 0, 3), of_range("RangeDone", "run2.c", AGAIN.epoch))
    evidence = Evidence(mode, GROUP, TOPIC, 0, 1, 0.0)
    evidence.journals = {"run0": [Left(at_ms=NOW_MS + 3_000, instance="run0.a", committed=(LOW,), dropped=())]}
    assert bool(range_promises(evidence, range_log(*done, is_done=False, later_ms=2_400))) is is_broken
    evidence.journals = {"run0": [Left(at_ms=NOW_MS + 2_000, instance="run0.a", committed=(LOW,), dropped=())]}
    assert range_promises(evidence, range_log(*done, is_done=False, later_ms=2_400))


def _twice_by_ranges(evidence: Evidence) -> None:
    evidence.journals["run2"] = processed(AGAIN, "run2.c", NOW_MS + 190)


def _processed_before_it_was_done(evidence: Evidence) -> None:
    evidence.journals["run0"] = range_work(LOW, "run0.a", 40, 110 - CLOCKS_MS)


def _range_never_processed(evidence: Evidence) -> None:
    del evidence.journals["run1"][1]


@pytest.mark.parametrize(
    ("doctor", "promise"),
    [
        (_twice_by_ranges, "at most once"),
        (_processed_before_it_was_done, "at most once commits before it processes"),
        (_range_never_processed, "what is committed at most once is processed"),
    ],
)
def test_a_doctored_journal_of_ranges_is_caught_at_most_once(doctor: Callable[[Evidence], None], promise: str) -> None:
    """Violations of the additional promises of at most once are found too."""
    evidence = honest_ranges(DeliveryMode.AT_MOST_ONCE)
    doctor(evidence)
    assert promise in range_promises(evidence)


def test_ranges_that_overlap_are_caught_at_least_once() -> None:
    """Only a whole plan may be repeated, never a part or a combination of plans; nothing may be left out."""
    evidence = honest_ranges(DeliveryMode.AT_LEAST_ONCE)
    evidence.journals["run2"] = processed(Part(0, 0, 9, 2, 4), "run2.c", NOW_MS + 190)
    assert "repeats are one uncommitted batch" in range_promises(evidence)
    evidence = honest_ranges(DeliveryMode.AT_LEAST_ONCE)
    _range_never_processed(evidence)
    assert range_promises(evidence) == {"at least once"}


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All kinds of entries are read as they were written."""
    entries = [*work(FIRST, "run0.a", NOW_MS), known(5, 3, (5, 9, Phase.PLANNED, "run1.b", "member", 7, 9, 1))]
    journal = Journal(tmp_path / "run0.jsonl", ENTRY)
    for entry in entries:
        journal.write(entry)
    assert read_journal(tmp_path / "run0.jsonl", ENTRY) == entries


def test_what_a_worker_reports_ranges_is_what_the_log_says(tmp_path: Path) -> None:
    """A held range and a finished one go through the journal; the judges compare them with the log."""
    scene = Scene()
    scene.data.make(partitions=1, messages=35)
    first, second = (scene.delivery(ranges=True) for _ in range(2))
    worker = object.__new__(Worker)
    worker.delivery, worker.journal = first, Journal(tmp_path / "run1.jsonl", ENTRY)
    worker.orders = cast("Orders", SimpleNamespace(run_id="run1"))
    with scene.batch(first, ranges=RangeOptions(size=10)) as batch:
        scene.work(second, ranges=RangeOptions(size=10))
        batch._claimer.rationalizer.catch_up()
        worker._report_state()
        scene.process(batch)

    entries = read_journal(tmp_path / "run1.jsonl", ENTRY)
    phases = [[range_[2] for range_ in entry.ranges] for entry in entries if isinstance(entry, Known)]
    assert phases == [["planned", "done"]]
    home = coordination_partition(scenes.TOPIC, 4)
    evidence = Evidence(DeliveryMode.AT_LEAST_ONCE, scenes.GROUP, scenes.TOPIC, home, 4, 0.0, {"run1": entries})
    records = [(home, *record) for record in scene.broker.records(home)]
    assert Trial(evidence, [(p, o, t, v or b"") for p, o, t, v in records]).judge().violations == []


def test_seeds_have_every_fault_in_turn() -> None:
    """Consecutive seeds, as many as there are kinds, begin with each kind once; a seed always gives the same run."""
    assert {scenario(seed).faults[0].kind for seed in range(100, 100 + len(KINDS))} == set(FaultKind)
    assert scenario(7) == scenario(7)


def test_a_part_of_the_groups_claims_ranges() -> None:
    """Ranges occur in all modes, with kills at their steps; the other runs do not change."""
    chosen = [scenario(seed) for seed in range(400)]
    by_ranges = [of for of in chosen if of.ranges is not None]
    assert 70 < len(by_ranges) < 130
    assert {of.mode for of in by_ranges} == set(DeliveryMode)
    steps = [{fault.step.record for of in some for fault in of.faults if fault.step} for some in (by_ranges, chosen)]
    assert steps[0] == set(RANGE_APPENDS)
    assert steps[1] == {*RANGE_APPENDS, *APPENDS}


def row_of(faults: tuple[str, ...], **fields: Any) -> Row:  # noqa: ANN401 - the fields of the row
    """Return a row of a run without results, except `fields`."""
    counts = ("records", "refused_commits", "lost", "dropped", "twice")
    common = {"commit": "c", "seed": 1, "violations": (), "seconds": 8.0, "mode": "at_least_once", "repeated": 3}
    return Row(faults=faults, **{**common, **dict.fromkeys(counts, 0), "takeovers_ms": (), **fields})


def test_the_table_counts_a_run_in_each_of_its_faults(tmp_path: Path) -> None:
    """Rows that are read from the file appear in the lines of their faults."""
    row = row_of(
        ("link cut", "member killed"), takeovers_ms=(2_100,), refused_commits=1, claims_ranges=True, together=3
    )
    path = tmp_path / "faults.jsonl"
    path.write_text(json.dumps(asdict(row)) + "\n")
    assert soak_results.rows_of(Row, path) == [row]
    lines = SUITE.table([row]).splitlines()
    counts = "1 | 1 | 1 | 2.1 s, 2.1 s | 1 | 0 | 0 | 0 |"
    assert [line for line in lines if line.endswith(counts)] == [
        f"| link cut | {counts}",
        f"| member killed | {counts}",
        f"| all runs | {counts}",
    ]
    assert "Of commit c" in lines[-2]
    assert "3 again" in lines[-2]
    assert lines[-1].startswith("In 1 runs members claimed ranges; in 1 of these several worked")


def test_rows_of_before_ranges_are_read(tmp_path: Path) -> None:
    """Files of results stay readable when fields are added."""
    row = asdict(row_of(("link cut",)))
    path = tmp_path / "faults.jsonl"
    path.write_text(json.dumps({name: row[name] for name in row if name not in {"claims_ranges", "together"}}) + "\n")
    assert [(each.claims_ranges, each.together) for each in soak_results.rows_of(Row, path)] == [(False, 0)]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer):
        while chunk := await reader.read(100):
            writer.write(chunk)


async def _has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(4), 60) == b""
    except ConnectionError:
        return True


async def _link_states() -> None:
    server = await asyncio.start_server(_echo, HOST, 0)
    proxy = Proxy([{1: server.sockets[0].getsockname()[1]}])
    proxy.start()

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, proxy.links[0].ports[1])

    try:
        reader, writer = await connect()
        writer.write(b"fair")
        assert await asyncio.wait_for(reader.readexactly(4), 60) == b"fair"
        for way in Way:
            proxy.change(0, LinkState(held=frozenset({way})))
            writer.write(b"held")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(4), 0.1)
            proxy.change(0, HEALTHY)
            assert await asyncio.wait_for(reader.readexactly(4), 60) == b"held"
        proxy.change(0, LinkState(held=frozenset(Way)))
        writer.write(b"gone")
        await asyncio.to_thread(wait_until, lambda: proxy.links[0].held_back, "bytes are held back", 60)
        proxy.change(0, HEALTHY, delivers_late=False)
        assert await _has_ended(reader)
        writer.close()
        reader, writer = await connect()
        proxy.change(0, LinkState(is_cut=True))
        assert await _has_ended(reader)
        writer.close()
    finally:
        proxy.stop()
        server.close()


@pytest.mark.slow
def test_a_link_fails_in_each_way() -> None:
    """A link passes bytes, holds them in one direction, delivers them late, or loses them with their connection.

    A cut link resets connections.
    """
    asyncio.run(_link_states())
