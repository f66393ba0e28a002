"""Where the bars of a timeline begin, end and are stale, and which records have marks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from marshal_dagster.protocol.messages import RuleSet
from marshal_dagster.protocol.replay import StoredRecord, parse_lines
from marshal_dagster.protocol.state import Owner
from marshal_dagster.protocol.world import World
from marshal_dagster.timeline.builder import TimelineBuilder, Wanted
from marshal_dagster.timeline.model import Bar, BarEnd, Lane, MarkKind, Span, Timeline
from tests.log_generator import Profile, generate
from tests.simulator.scenario import scenario
from tests.simulator.world import simulate

VECTOR = Path(__file__).parent.parent / "vectors" / "marshal-log.jsonl"
INTERVAL_MS = 10_000
T0 = 1_795_000_000_000
SETTINGS = f"GroupSettings/1/1/op.1/op/g//0/{INTERVAL_MS}/native/at_least_once/-"

Holders = dict[tuple[Lane, Owner], bool]
"""The owners in each lane, and whether each is live."""


def record(offset: int, at_s: float, value: str) -> StoredRecord:
    """Return a record of the only coordination partition, at a number of seconds after T0."""
    return StoredRecord(0, offset, T0 + round(at_s * 1_000), value.encode())


def log(*records: tuple[float, str]) -> list[StoredRecord]:
    """Return records with rising offsets, after the settings of group g: each is a time in seconds and a value.

    A value is short: `Heartbeat a 7` is a heartbeat of instance a for partition 0 of topic ev.
    """
    return [record(0, 0, SETTINGS), *(record(n, at_s, spelled(text)) for n, (at_s, text) in enumerate(records, 1))]


def spelled(text: str) -> str:
    """Return the value that a short text stands for."""
    name, instance, *tail = text.split()
    place = "/0" if name == "ReleaseGroup" else "ev/0"
    version = 0 if name == "ReleaseGroup" else 1
    return "/".join([name, str(version), "1", f"{instance}.1", f"client-{instance}", "g", place, *tail])


def timeline(records: Iterable[StoredRecord], wanted: Wanted | None = None, partitions: int = 1) -> Timeline:
    """Build the timeline of a log."""
    builder = TimelineBuilder(World(partitions), wanted)
    for each in records:
        builder.add(each)
    return builder.build()


def kinds(found: Timeline) -> list[MarkKind]:
    """Return the kinds of the marks, in the order of time, without that of the settings that every log begins with."""
    return [mark.kind for mark in found.marks][1:]


def seconds(span: Span) -> tuple[float, float]:
    """Return a span in seconds after T0."""
    return (span.start_ms - T0) / 1_000, (span.end_ms - T0) / 1_000


def holders(world: World, partition: int) -> Holders:
    """Return all owners that the world state has in a coordination partition, at its log time."""
    state = world.partitions[partition]
    found: Holders = {}
    at_ms = state.log_time_ms or 0
    for name, group in state.groups.items():
        interval_ms = group.settings.heartbeat_interval_ms
        for place, key in group.keys.items():
            if key.owner is not None:
                found[Lane(name, *place), key.owner] = group.is_live(key, at_ms)
            for held in key.ranges:
                if held.owner is not None:
                    found[Lane(name, *place), held.owner] = held.is_live(at_ms, interval_ms)
    return found


class Drawn:
    """The bars of one coordination partition, by the log offset at which they are held."""

    def __init__(self, bars: Iterable[Bar]) -> None:
        self._left = sorted(bars, key=lambda bar: bar.start_offset, reverse=True)
        self._held: list[Bar] = []

    def check(self, offset: int, at_ms: int, expected: Holders, *, has_same_interval: bool) -> None:
        """Check that the bars that include the record at `offset` are as expected. Offsets rise from call to call.

        Staleness is not checked in the millisecond in which a heartbeat interval changes.
        """
        while self._left and self._left[-1].start_offset <= offset:
            self._held.append(self._left.pop())
        self._held = [bar for bar in self._held if bar.end_offset is None or bar.end_offset > offset]
        assert sorted((bar.lane, bar.owner) for bar in self._held) == sorted(expected), offset
        for bar in self._held if has_same_interval else ():
            is_live = expected[bar.lane, bar.owner]
            assert not is_live or not any(start < at_ms < end for start, end in bar.stale), offset
            assert is_live or any(start <= at_ms <= end for start, end in bar.stale), offset


def check_against_the_world_state(records: Sequence[StoredRecord], world: World, builder: TimelineBuilder) -> int:
    """Check at every record that the bars are what the world state has, and return the number of bars."""
    for each in records:
        builder.add(each)
    bars = builder.build().bars
    homes: dict[int, Drawn] = {}
    by_home: dict[int, list[Bar]] = {}
    for bar in bars:
        for number, state in builder.world.partitions.items():
            if state.is_home_of(bar.lane.topic):
                by_home.setdefault(number, []).append(bar)
    changed_ms = {(each.partition, each.timestamp_ms) for each in records if (each.value or b"").startswith(b"Group")}
    for each in records:
        drawn = homes.setdefault(each.partition, Drawn(by_home.get(each.partition, [])))
        world.apply(each.partition, each.offset, each.timestamp_ms, each.value)
        at_ms = world.partitions[each.partition].log_time_ms
        assert at_ms is not None
        same = (each.partition, at_ms) not in changed_ms
        drawn.check(each.offset, at_ms, holders(world, each.partition), has_same_interval=same)
    return len(bars)


def simulated(seed: int) -> list[StoredRecord]:
    """Return the log of a seed of the simulator, up to the point where it was truncated."""
    records: list[StoredRecord] = []
    last: dict[int, int] = {}
    for partition, offset, timestamp_ms, value, _ in simulate(scenario(seed)).log:
        if offset <= last.get(partition, -1):
            return records
        last[partition] = offset
        records.append(StoredRecord(partition, offset, timestamp_ms, value.encode("utf-8", "surrogateescape")))
    return records


def check_seed(seed: int) -> int:
    """Check the log of a seed, and return the number of bars."""
    partitions = scenario(seed).coordination_partitions
    return check_against_the_world_state(simulated(seed), World(partitions), TimelineBuilder(World(partitions)))


@pytest.mark.slow
def test_bars_are_what_the_world_state_has_at_every_record_of_simulated_logs() -> None:
    """Each claim's bar begins, ends and is stale where the world state has it so."""
    assert sum(check_seed(seed) for seed in range(8)) > 50


@pytest.mark.thorough
def test_bars_are_what_the_world_state_has_in_hundreds_of_simulated_logs() -> None:
    """The same for 300 seeds, which have crashes, pauses, ranges, positions, Go groups and garbage."""
    assert sum(check_seed(seed) for seed in range(8, 308)) > 3_000


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["mixed", "go", "ranges"])
@pytest.mark.parametrize("start", [0, 3], ids=["from the beginning", "observed"])
def test_bars_are_what_the_world_state_has_in_logs_of_all_kinds_of_records(profile: Profile, start: int) -> None:
    """The same for made-up logs in which every rule accepts and refuses, and for a log that lost its first records."""
    rules = RuleSet.GO if profile == "go" else RuleSet.NATIVE
    interval_ms = 60_000
    records = [
        StoredRecord(partition, offset, at_ms, value)
        for partition, offset, at_ms, value in generate(7, 1_500, profile=profile)
        if offset >= start
    ]
    worlds = [World(4, interval_ms, rules) for _ in range(2)]
    assert check_against_the_world_state(records, worlds[0], TimelineBuilder(worlds[1])) > 10


CLAIM, BEAT, RELEASE, PLAN = "ClaimingPartition", "Heartbeat", "ReleasingPartition", "ClaimingMessages"


def test_a_claim_that_was_released_is_one_bar_and_a_plan_and_a_commit_have_marks() -> None:
    """Heartbeats extend the bar and have no mark. The first position of a partition has one."""
    found = timeline(
        log(
            (1, f"{CLAIM} a"),
            (2, f"{BEAT} a 0"),
            (3, f"{PLAN} a 10"),
            (5, f"{BEAT} a 0"),
            (9, f"{BEAT} a 10"),
            (10, f"{RELEASE} a 10"),
        )
    )
    (bar,) = found.bars
    assert (bar.owner, seconds(Span(bar.start_ms, bar.end_ms or 0))) == (Owner("a.1", "client-a", 1), (1, 10))
    assert (bar.ended_by, bar.heartbeats, bar.stale, bar.row) == (BarEnd.RELEASED, 3, [], 0)
    assert kinds(found) == [MarkKind.POSITION, MarkKind.PLAN, MarkKind.COMMIT]
    assert found.lanes == [Lane("g"), Lane("g", "ev", 0)]
    assert (found.records, found.invalid, seconds(found.span)) == (7, 0, (0, 10))


def test_a_dead_owner_is_stale_from_two_intervals_after_its_last_heartbeat_until_the_takeover() -> None:
    """The bar ends where the other run's claim begins, which has a mark."""
    found = timeline(
        log((1, f"{CLAIM} a"), (2, f"{BEAT} a 0"), (4, f"{PLAN} a 10"), (30, f"{CLAIM} b"), (31, f"{BEAT} b 10"))
    )
    dead, other = found.bars
    assert (dead.ended_by, dead.end_ms, other.start_ms) == (BarEnd.TAKEN_OVER, T0 + 30_000, T0 + 30_000)
    assert [seconds(span) for span in dead.stale] == [(22, 30)]
    assert other.end_ms is None
    assert other.ended_by is None
    assert kinds(found) == [MarkKind.POSITION, MarkKind.PLAN, MarkKind.TAKEOVER, MarkKind.COMMIT]


def test_a_late_heartbeat_ends_the_staleness_of_its_owner() -> None:
    """The owner is stale between the two, and again until the end of the picture."""
    found = timeline(log((1, f"{CLAIM} a"), (25, f"{BEAT} a 0")), Wanted(end_ms=T0 + 60_000))
    assert [seconds(span) for span in found.bars[0].stale] == [(21, 25), (45, 60)]


def test_a_claim_of_an_open_plan_that_was_released_is_a_takeover() -> None:
    """The plan has one more attempt then."""
    released = (5, f"{RELEASE} a 0")
    found = timeline(
        log((1, f"{CLAIM} a"), (2, f"{BEAT} a 0"), (3, f"{PLAN} a 10"), released, (6, f"{CLAIM} b"), (7, f"{BEAT} b 0"))
    )
    assert kinds(found)[-1] is MarkKind.TAKEOVER


def test_refused_records_have_a_mark_and_no_bar() -> None:
    """A claim of a held partition, and a heartbeat of a run that lost it."""
    found = timeline(log((1, f"{CLAIM} a"), (2, f"{CLAIM} b"), (3, f"{BEAT} b 5")))
    assert [bar.owner.instance for bar in found.bars] == ["a.1"]
    assert kinds(found) == [MarkKind.REFUSAL] * 2


def test_a_revoked_claim_ends_with_a_mark() -> None:
    """The revocation names the epoch of the claim."""
    found = timeline(log((1, f"{CLAIM} a"), (2, "RevokingClaim b 1")))
    assert found.bars[0].ended_by is BarEnd.REVOKED
    assert kinds(found) == [MarkKind.REVOCATION]


def test_a_pause_covers_the_lanes_of_its_group_until_it_ends_or_is_ended() -> None:
    """The first pause is replaced after 5 s. The second one is cut at the end of the picture."""
    until = T0 // 1_000
    claim = (1, f"{CLAIM} a")
    found = timeline(
        log(claim, (2, f"ReleaseGroup p {until + 10}"), (7, f"ReleaseGroup q {until + 60}"), (12, f"{RELEASE} a 0"))
    )
    ev = [seconds(pause.span) for pause in found.pauses if pause.topic == "ev"]
    assert ev == [(2, 7), (7, 12)]
    assert [seconds(pause.span) for pause in found.pauses if not pause.topic] == [(2, 12)]
    assert kinds(found) == [MarkKind.PAUSE] * 2


def test_a_resumed_group_has_no_pause_after_it() -> None:
    """A pause whose end has passed resumes the group."""
    until = T0 // 1_000
    found = timeline(
        log((1, f"{CLAIM} a"), (2, f"ReleaseGroup p {until + 60}"), (4, "ReleaseGroup p 0"), (9, f"{BEAT} a 0"))
    )
    assert {seconds(pause.span) for pause in found.pauses} == {(2, 4)}


def test_the_pauses_of_all_coordination_partitions_are_one_mark() -> None:
    """The same record is written to each of them."""
    value = spelled(f"ReleaseGroup p {T0 // 1_000 + 60}").encode()
    records = [StoredRecord(partition, 0, T0 + partition, value) for partition in range(8)]
    found = timeline(records, partitions=8)
    assert [(mark.kind, mark.lane) for mark in found.marks] == [(MarkKind.PAUSE, Lane("g"))]
    assert [seconds(pause.span) for pause in found.pauses] == [(0, 0.007)]


def test_a_position_that_a_person_sets_has_a_mark() -> None:
    """The instance that paused the group claims the partition and releases it at the position."""
    until = T0 // 1_000 + 60
    found = timeline(
        log(
            (1, f"{CLAIM} a"),
            (2, f"{BEAT} a 50"),
            (3, f"{RELEASE} a 50"),
            (4, f"ReleaseGroup p {until}"),
            (5, f"{CLAIM} p"),
            (6, f"{RELEASE} p 20"),
        )
    )
    assert kinds(found) == [MarkKind.POSITION, MarkKind.PAUSE, MarkKind.POSITION]


def test_ranges_that_are_held_at_the_same_time_are_in_rows_of_their_lane() -> None:
    """A row is used again after its range is done."""
    settings = SETTINGS.replace("/-", "/ranges")
    values = [
        *("ClaimingPartition a", "Heartbeat a 0", f"DataTopic a {'t' * 22}", "ReleasingPartition a 0"),
        *("ClaimingRange b 0 10", "ClaimingRange c 10 20", "PlanningRange b 5 10", "RangeDone b 5"),
        *("ClaimingRange d 20 30", "RangeHeartbeat c 6"),
    ]
    records = [record(0, 0, settings), *(record(n, n, spelled(value)) for n, value in enumerate(values, 1))]
    found = timeline(records)
    assert [(bar.owner.instance, bar.range_start, bar.range_end, bar.row) for bar in found.bars[1:]] == [
        ("b.1", 0, 10, 0),
        ("c.1", 10, 20, 1),
        ("d.1", 20, 30, 0),
    ]
    assert found.rows == {Lane("g", "ev", 0): 2}
    assert found.bars[1].ended_by is BarEnd.DONE
    assert kinds(found) == [MarkKind.POSITION, MarkKind.PLAN, MarkKind.COMMIT]


def test_a_lost_claim_has_the_one_that_continues_it_as_its_heir() -> None:
    """The heir of a range is in another row if the row was taken meanwhile; a released claim has no heir."""
    settings = SETTINGS.replace("/-", "/ranges")
    values = [
        *("ClaimingPartition a", "Heartbeat a 0", f"DataTopic a {'t' * 22}", "ReleasingPartition a 0"),
        *("ClaimingRange b 0 10", "ClaimingRange c 10 20", "RevokingRange o 5"),
        *("ClaimingRange d 20 30", "ClaimingRange e 0 10"),
    ]
    records = [record(0, 0, settings), *(record(n, n, spelled(value)) for n, value in enumerate(values, 1))]
    found = timeline(records)
    heirs = {bar.owner.instance: bar.heir and bar.heir.owner.instance for bar in found.bars}
    assert heirs == {"a.1": None, "b.1": "e.1", "c.1": None, "d.1": None, "e.1": None}
    assert [(bar.owner.instance, heir.owner.instance) for bar, heir in found.links] == [("b.1", "e.1")]


def test_a_jump_of_the_clock_is_explained() -> None:
    """Else all claims are within one pixel of a picture of years. A part before or after it has no such note."""
    year_s = 365 * 86_400
    records = log((1, f"{CLAIM} a"), (2, f"{BEAT} a 0"), (year_s, f"{BEAT} a 5"), (year_s + 1, f"{RELEASE} a 5"))
    (note,) = timeline(records).notes
    assert note.startswith("No record was written from 2026-11-18 11:07:00.000Z to 2027-11-18 11:06:00.000Z")
    assert timeline(records[:-2]).notes == []
    other = [StoredRecord(1, n, T0 + n * year_s * 100, b"Mark/1/1/a/c/g//0") for n in range(10)]
    assert timeline([*records, *other], partitions=2).notes == []
    assert timeline(records, Wanted(end_ms=T0 + 60_000)).notes == []
    assert timeline(records, Wanted(start_ms=T0 + (year_s - 1) * 1_000)).notes == []


def test_a_window_keeps_claims_that_began_before_it_and_leaves_out_what_ended_before() -> None:
    """A claim keeps its true start. Records are judged from the log's beginning."""
    records = log((1, f"{CLAIM} a"), (2, f"{BEAT} a 0"), (3, f"{RELEASE} a 0"), (4, f"{CLAIM} b"), (8, f"{BEAT} b 5"))
    found = timeline(records, Wanted(start_ms=T0 + 6_000, end_ms=T0 + 20_000))
    assert [(bar.owner.instance, bar.start_ms) for bar in found.bars] == [("b.1", T0 + 4_000)]
    assert [mark.kind for mark in found.marks] == [MarkKind.COMMIT]
    assert seconds(found.span) == (6, 20)


def test_a_timeline_has_only_the_group_and_the_topic_that_are_wanted() -> None:
    """Other records are read nevertheless, and counted."""
    records = list(parse_lines(VECTOR.read_text().splitlines()))
    assert {lane.group for lane in timeline(records, Wanted(group="takeover"), 8).lanes} == {"takeover"}
    found = timeline(records, Wanted(topic="ev2"), 8)
    assert {lane.topic for lane in found.lanes} == {"ev2"}
    assert found.records == len(records)


def test_the_log_that_go_wrote_has_the_claims_that_its_readme_describes() -> None:
    """Every claim was released, except those of the consumer that was killed, which were taken over."""
    found = timeline(parse_lines(VECTOR.read_text().splitlines()), partitions=8)
    ends = Counter((bar.lane.group, bar.owner.client, bar.ended_by) for bar in found.bars)
    assert ends == {
        ("groupG", "clientA", BarEnd.RELEASED): 4,
        ("groupG", "clientB", BarEnd.RELEASED): 2,
        ("takeover", "tkA", BarEnd.TAKEN_OVER): 4,
        ("takeover", "tkB", BarEnd.RELEASED): 4,
        ("wideG", "wideA", BarEnd.RELEASED): 64,
    }
    killed = [bar for bar in found.bars if bar.owner.client == "tkA"]
    assert all(len(bar.stale) == 1 and bar.stale[0].start_ms == bar.last_beat_ms + 120_000 for bar in killed)


def test_an_empty_log_has_an_empty_timeline() -> None:
    """So has one with nothing but invalid records."""
    assert timeline([]).is_empty
    found = timeline([record(0, 0, "nonsense")])
    assert (found.is_empty, found.invalid) == (True, 1)


def test_a_log_that_lost_its_beginning_says_so() -> None:
    """Its records are only observed, so a heartbeat alone shows an owner."""
    found = timeline([record(7, 0, spelled(f"{BEAT} a 3")), record(8, 9, spelled(f"{BEAT} a 3"))])
    assert [(bar.owner.instance, bar.start_ms) for bar in found.bars] == [("a.1", T0)]
    assert "begins at offset 7" in found.notes[0]


def test_each_of_two_short_pauses_has_its_marks() -> None:
    """They end with the same record, which is not a copy for another coordination partition then."""
    pauses = [f"ReleaseGroup p {T0 // 1_000 + 600}", "ReleaseGroup p 0", f"ReleaseGroup p {T0 // 1_000 + 900}"]
    found = timeline(log(*enumerate([*pauses, "ReleaseGroup p 0"], 1)))
    assert kinds(found) == [MarkKind.PAUSE] * 4


@pytest.mark.parametrize("by_partition", [False, True])
def test_a_pause_in_several_coordination_partitions_has_one_mark(*, by_partition: bool) -> None:
    """It does not matter which partition is read first, nor that a record was sent twice."""
    values = [SETTINGS, *(spelled(f"ReleaseGroup p {until_s}") for until_s in (T0 + 600, 0, 0, T0 + 900, 0))]
    records = [
        StoredRecord(partition, n, T0 + 1_000 * n + partition, value.encode())
        for n, value in enumerate(values)
        for partition in range(3)
    ]
    found = timeline(sorted(records, key=lambda each: each.partition) if by_partition else records, partitions=3)
    assert kinds(found) == [MarkKind.PAUSE] * 4
