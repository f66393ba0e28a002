"""The judges of the fault runs, on journals made up by hand: an honest one passes, each doctored one is caught."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from marshal_dagster.devkafka.ports import HOST
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Phase
from tests.faults.__main__ import Row, read_rows, table
from tests.faults.journal import Claimed, Entry, Journal, Known, Left, Part, Processed, Refused, read_journal
from tests.faults.judging import ON_MS, Evidence, Trial
from tests.faults.proxy import FAIR, Proxy, Way, Weather
from tests.faults.scenario import KINDS, FaultKind, scenario

GROUP, TOPIC = "fleet", "orders"
FIRST, SECOND = Part(0, 0, 0, 0, 3), Part(0, 0, 6, 3, 6)
"""What two members work on, one after the other; their epochs are the log offsets of their claims."""
NOW_MS = 1_000_000.0


def log() -> list[tuple[int, int, int, bytes]]:
    """Two members claim, plan, commit and release, one after the other."""

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
    """All messages of a part, a millisecond each."""
    return [
        Processed(at_ms=at_ms + number, instance=instance, part=part, offset=offset, lease_ends_ms=lease_ends_ms)
        for number, offset in enumerate(range(part.start, part.end))
    ]


def work(part: Part, instance: str, at_ms: float) -> list[Entry]:
    """A batch of one part, from its claim to its end."""
    return [
        Claimed(at_ms=at_ms, instance=instance, parts=(part,)),
        *processed(part, instance, at_ms),
        Left(at_ms=at_ms + 10, instance=instance, committed=(part,), dropped=()),
    ]


def honest(mode: DeliveryMode) -> Evidence:
    """What two members leave behind that keep all promises."""
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
    """Which promises the judges find broken."""
    return {violation.promise for violation in Trial(evidence, log()).judge().violations}


@pytest.mark.parametrize("mode", DeliveryMode)
def test_honest_work_passes(mode: DeliveryMode) -> None:
    """Work as the rules want it violates nothing, and is counted."""
    tally = Trial(honest(mode), log()).judge()
    assert tally.violations == []
    assert (tally.lost, tally.twice, tally.dropped, tally.takeovers_ms) == (0, 0, 0, [])


def test_a_reader_that_knows_what_the_log_says_passes() -> None:
    """What it wrote down is compared in every field, at the log offset up to which it has read."""
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


def known(next_offset: int, offset: int, *ranges: tuple[object, ...]) -> Known:
    """What a reader says of the key, of which nobody holds the whole."""
    return Known(
        at_ms=NOW_MS,
        instance="run0",
        coordination_partition=0,
        next_offset=next_offset,
        group=GROUP,
        topic=TOPIC,
        partition=0,
        state=(None, None, None, None, offset, None, 0, 0, None),
        ranges=ranges,
    )


def _a_wrong_reader(evidence: Evidence) -> None:
    evidence.journals["run0"].append(known(5, 4))


def _a_reader_that_sees_a_range(evidence: Evidence) -> None:
    evidence.journals["run0"].append(known(5, 3, (5, 9, "done", None, None, None, None, 0)))


def _an_observer_claims(evidence: Evidence) -> None:
    evidence.observers = {"run0"}


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
    ],
)
def test_a_doctored_journal_is_caught(doctor: Callable[[Evidence], None], promise: str) -> None:
    """Each way to break a promise is seen."""
    evidence = honest(DeliveryMode.AT_LEAST_ONCE)
    doctor(evidence)
    assert promise in promises(evidence)


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
    """What only at most once promises is seen too."""
    evidence = honest(DeliveryMode.AT_MOST_ONCE)
    doctor(evidence)
    assert promise in promises(evidence)


def test_a_batch_in_hand_may_be_dropped_at_most_once() -> None:
    """What a killed run had committed and not processed is counted as dropped, not as lost."""
    evidence = honest(DeliveryMode.AT_MOST_ONCE)
    del evidence.journals["run1"][2:]
    tally = Trial(evidence, log()).judge()
    assert (tally.violations, tally.dropped, tally.lost) == ([], 2, 0)


@pytest.mark.parametrize("count", [0, 2])
def test_an_output_with_a_message_missing_or_twice_is_caught(count: int) -> None:
    """Effectively once is judged by the rows of the output."""
    evidence = honest(DeliveryMode.EFFECTIVELY_ONCE)
    evidence.rows[0, 4] = count
    assert promises(evidence) == {"effectively once"}


def test_a_takeover_is_counted_with_its_time() -> None:
    """A claim that follows on one that was not released is a takeover, timed by the log."""
    records = [each for each in log() if not each[3].startswith(b"ReleasingPartition/1/0/run0.a")]
    late = [(p, o, t + (130_000 if o > 4 else 0), value) for p, o, t, value in records]
    tally = Trial(Evidence(DeliveryMode.AT_LEAST_ONCE, GROUP, TOPIC, 0, 1, 0.0), late).judge()
    assert tally.takeovers_ms == [130_030]


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every kind of line comes back equal."""
    entries = [*work(FIRST, "run0.a", NOW_MS), known(5, 3, (5, 9, Phase.PLANNED, "run1.b", "member", 7, 9, 1))]
    journal = Journal(tmp_path / "run0.jsonl")
    for entry in entries:
        journal.write(entry)
    assert read_journal(tmp_path / "run0.jsonl") == entries


def test_seeds_have_every_fault_in_turn() -> None:
    """As many seeds one after another as there are kinds have each of them, and a seed is always the same run."""
    assert {scenario(seed).faults[0].kind for seed in range(100, 100 + len(KINDS))} == set(FaultKind)
    assert scenario(7) == scenario(7)


def test_the_table_counts_a_run_in_each_of_its_faults(tmp_path: Path) -> None:
    """Rows come back from the file, and into the lines of their faults."""
    row = Row("c", 1, "at_least_once", ("link cut", "member killed"), 9, (2_100,), 1, 0, 0, 0, 3, (), 8.0)
    path = tmp_path / "faults.jsonl"
    path.write_text(json.dumps(asdict(row)) + "\n")
    assert read_rows(path) == [row]
    lines = table([row]).splitlines()
    counts = "1 | 1 | 2.1 s, 2.1 s | 1 | 0 | 0 | 0 |"
    assert [line for line in lines if line.endswith(counts)] == [
        f"| link cut | {counts}",
        f"| member killed | {counts}",
        f"| all runs | {counts}",
    ]
    assert "Of commit c" in lines[-1]
    assert "3 again" in lines[-1]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer):
        while chunk := await reader.read(100):
            writer.write(chunk)


async def _has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(4), 5) == b""
    except ConnectionError:
        return True


async def _weathers() -> None:
    server = await asyncio.start_server(_echo, HOST, 0)
    proxy = Proxy([{1: server.sockets[0].getsockname()[1]}])
    proxy.start()

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, proxy.links[0].ports[1])

    try:
        reader, writer = await connect()
        writer.write(b"fair")
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"fair"
        for way in Way:
            proxy.change(0, Weather(held=frozenset({way})))
            writer.write(b"held")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(4), 0.1)
            proxy.change(0, FAIR)
            assert await asyncio.wait_for(reader.readexactly(4), 5) == b"held"
        proxy.change(0, Weather(held=frozenset(Way)))
        writer.write(b"gone")
        await asyncio.sleep(0.05)
        proxy.change(0, FAIR, delivers_late=False)
        assert await _has_ended(reader)
        writer.close()
        reader, writer = await connect()
        proxy.change(0, Weather(is_cut=True))
        assert await _has_ended(reader)
        writer.close()
    finally:
        proxy.stop()
        server.close()


def test_a_link_has_weather() -> None:
    """Bytes pass, are held one way and come late, vanish with their connection, and a cut link resets."""
    asyncio.run(_weathers())
