"""The state of a coordination partition as snapshot records, and back (protocol.md, section 5)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_dagster.protocol import snapshots
from marshal_dagster.protocol.messages import WITHOUT_SETTINGS, GroupSettings
from marshal_dagster.protocol.snapshots import (
    Record,
    RejectedSnapshot,
    SnapshotChoice,
    SnapshotName,
    choose,
    collect,
    outdated,
    render,
)
from marshal_dagster.protocol.world import LastRecord, PartitionWorld, World
from tests.log_generator import LogRecord, Profile, generate
from tests.reader_diff import PROFILES, Case, case_of

TOPIC_ID, OTHER_TOPIC_ID = "A" * 22, "B" * 22
LogPart = list[tuple[int, int, bytes | None]]


def facts(world: PartitionWorld) -> tuple[object, ...]:
    """Return all fields of a state."""
    counts = (world.invalid, world.refused, world.noted)
    where = (world.number, world.certain, world.next_offset, world.log_time_ms)
    return *where, world.groups, counts, world.defaults, world.had_ranges


def read(records: Iterable[Record], like: PartitionWorld, **requested: Any) -> SnapshotChoice:  # noqa: ANN401 - of what was asked
    """Read the newest snapshot as a reader of the same log would. `requested` replaces arguments."""
    request: dict[str, Any] = {
        "topic_id": TOPIC_ID,
        "number": like.number,
        "partitions": like.coordination_partitions,
        "start": 0,
        "end": 2**62,
        "defaults": like.defaults,
    }
    return choose(records, **{**request, **requested})


def world_of(profile: Profile = "steady", seed: int = 1, records: int = 400) -> PartitionWorld:
    """Return the state after a generated log of one coordination partition."""
    world = World(1)
    for each in generate(seed, records, keys=30, coordination_partitions=1, profile=profile):
        world.apply(*each)
    return world.partitions[0]


def at(world: PartitionWorld, offset: int) -> PartitionWorld:
    """Move `world` to a log offset."""
    world.resume_at(offset, world.log_time_ms)
    return world


def by_partition(log: Iterable[LogRecord]) -> dict[int, LogPart]:
    """Group the records of a log by coordination partition."""
    parts: dict[int, LogPart] = {}
    for partition, offset, timestamp_ms, value in log:
        parts.setdefault(partition, []).append((offset, timestamp_ms, value))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("profile", [*PROFILES, "steady"])
@pytest.mark.parametrize("many", [False, True])
def test_a_snapshot_and_the_rest_of_the_log_are_the_whole_log(profile: Profile, many: bool) -> None:
    """A snapshot and the records after it lead, field by field, to the same state as the whole log."""
    compared = 0
    for seed in range(15):
        case = Case(profile, seed, 300, 12, 2, 60_000) if profile == "steady" else case_of(profile, seed, 200)
        rng = Random(seed)
        for number, records in by_partition(case.log()).items():
            if records[0][0] != 0:
                continue
            cut = rng.randrange(len(records) + 1)
            whole, taken = case.library().world, case.library().world
            for world in (whole, taken):
                world.start(number, 0)
                world.apply_many(number, records[:cut])
            kept = render(taken.partitions[number], TOPIC_ID, "s")
            restored = read(kept, taken.partitions[number]).world
            assert restored is not None
            assert facts(restored) == facts(whole.partitions[number])
            taken.adopt(restored)
            for world in (whole, taken):
                if many:
                    world.apply_many(number, records[cut:])
                else:
                    for record in records[cut:]:
                        world.apply(number, *record)
            assert facts(taken.partitions[number]) == facts(whole.partitions[number])
            compared += bool(whole.partitions[number].groups)
    assert compared > 8


@pytest.mark.thorough
def test_many_keys_are_several_parts_each_under_the_limit() -> None:
    """50,000 keys of one topic are split into parts below the brokers' default limit, and are read back equal."""
    world = world_of(records=10)
    (group,) = list(world.groups.values())[:1]
    place, key = next((place, key) for place, key in group.keys.items() if key.owner is not None)
    for number in range(50_000):
        group.keys[place[0], number] = replace(key, offset=number)

    records = render(world, TOPIC_ID, "s")

    sizes = [len(record.value or b"") for record in records]
    assert len(records) > 4
    assert max(sizes) <= snapshots.PART_BYTES
    restored = read(records, world).world
    assert restored is not None
    assert facts(restored) == facts(world)


def test_an_observed_state_is_no_start_for_anyone() -> None:
    """A state that was only observed cannot be written."""
    world = World(1)
    world.apply(0, 7, 1, b"x")
    with pytest.raises(ValueError, match="only observed"):
        render(world.partitions[0], TOPIC_ID, "s")


def test_an_id_that_would_spoil_a_key_is_refused() -> None:
    """An id cannot extend into another field of the key."""
    for snapshot_id in ("", "a/b", "a" * 65):
        with pytest.raises(ValueError, match="not allowed in the key"):
            render(world_of(), TOPIC_ID, snapshot_id)
    with pytest.raises(ValueError, match="not allowed in the key"):
        render(world_of(), "a/b", "s")


# Rejected snapshots


def reasons(choice: SnapshotChoice) -> set[RejectedSnapshot]:
    """Return the reasons why snapshots were rejected. Check that none was taken."""
    assert choice.world is None
    return set(choice.passed_over.values())


def test_every_single_missing_part_makes_it_incomplete() -> None:
    """A snapshot without any one of its parts is rejected."""
    world = world_of()
    records = render(world, TOPIC_ID, "s")
    assert len(records) == 2
    for missing in range(len(records)):
        assert reasons(read(records[:missing] + records[missing + 1 :], world)) == {RejectedSnapshot.INCOMPLETE}
        deleted = [*records, Record(records[missing].key, None)]
        assert reasons(read(deleted, world)) == {RejectedSnapshot.INCOMPLETE}
    assert reasons(read([], world)) == set()


def test_a_changed_byte_is_found() -> None:
    """The checksum covers the whole text and the snapshot's name."""
    world = world_of()
    part, closing = render(world, TOPIC_ID, "s")
    assert part.value is not None
    for position in (0, len(part.value) // 2, len(part.value) - 1):
        changed = bytearray(part.value)
        changed[position] ^= 1
        assert reasons(read([Record(part.key, bytes(changed)), closing], world)) == {RejectedSnapshot.CHECKSUM}
    elsewhere = [Record(each.key.replace(b"/s/", b"/t/"), each.value) for each in (part, closing)]
    assert reasons(read(elsewhere, world)) == {RejectedSnapshot.CHECKSUM}


def test_a_snapshot_of_another_log_is_passed_over() -> None:
    """Another topic id, another number of partitions and offsets outside the log are each reported as the reason."""
    world = at(world_of(), 1000)
    records = render(world, TOPIC_ID, "s")
    assert reasons(read(records, world, topic_id=OTHER_TOPIC_ID)) == {RejectedSnapshot.OTHER_LOG}
    assert reasons(read(records, world, partitions=2)) == {RejectedSnapshot.OTHER_PARTITION_COUNT}
    assert reasons(read(records, world, start=1001)) == {RejectedSnapshot.BEFORE_START}
    assert reasons(read(records, world, end=999)) == {RejectedSnapshot.BEYOND_END}
    assert reasons(read(records, world, defaults=GroupSettings(1))) == {RejectedSnapshot.OTHER_DEFAULTS}
    assert reasons(read(records, world, number=1)) == set()
    assert read(records, world, start=1000, end=1000).world is not None


def test_a_newer_version_is_passed_over_by_its_name() -> None:
    """A snapshot of a newer version is reported and not deleted, whatever its format."""
    world = world_of()
    records = render(world, TOPIC_ID, "s")
    newer = [Record(b"5" + record.key[1:], record.value) for record in records]
    assert reasons(read(newer, world)) == {RejectedSnapshot.NEWER_VERSION}
    assert read([*records, *newer], world).world is not None
    stored, foreign = collect([*records, *newer])
    assert len(stored) == len(foreign) == 1
    assert outdated(stored, stored[0].name._replace(offset=2**40)) == [Record(each.key, None) for each in records]


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"/",
        b"\xff\xff",
        b"x/1",
        b"3",
        b"3/a/1/0/0/s",
        b"3/a/1/1/0/s/0",
        b"3/a/-1/0/0/s/0",
        b"3/a/1/0/0/s/x",
        b"3/a/1/0/99999999999999999999/s/0",
        b"3/a/1/0/0/a b/0",
    ],
)
def test_a_key_of_something_else_is_no_snapshot(key: bytes | None) -> None:
    """A record with a key of another form is ignored."""
    assert collect([(key, b"value")]) == ([], {})


def rendered(rows: Sequence[object], world: PartitionWorld, version: int = 3) -> list[Record]:
    """Return records with these rows and a correct checksum."""
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
    name = SnapshotName(TOPIC_ID, 1, 0, world.next_offset, "s", version)
    checksum = sha256(f"{name}\n".encode() + text).hexdigest()
    closing = json.dumps({"parts": 1, "sha256": checksum, "log_time_ms": 5}).encode()
    return [Record(name.key(0), text), Record(name.key("end"), closing)]


HEAD = {"defaults": "60000/go/at_least_once/", "log_time_ms": 5, "invalid": {}, "refused": {}, "noted": {}}
GROUP = {"group": "g", "settings": "9/native/at_least_once/-", "paused_until_s": 1, "paused_by": "i"}
TOPIC = {"topic": "t"}
KEY: list[object] = [0, 5, 9, 1, 0, None, 7, "i", "c", 3]


def spoiled_rows() -> list[list[object]]:
    """Return rows of a key, each with one fault."""
    wrongs: tuple[object, ...] = (True, -2.5, {})
    of_no_kind = [(at, wrong) for at in range(len(KEY)) for wrong in wrongs]
    out_of_range: list[tuple[int, object]] = [(at, wrong) for at in (0, 1, 2, 3, 4, 9) for wrong in (-1, 2**63)]
    return [[*KEY[:at], wrong, *KEY[at + 1 :]] for at, wrong in of_no_kind + out_of_range]


def test_rows_of_ones_own_are_read() -> None:
    """The rows that the next test spoils are valid as they are. An unknown reason of a count is ignored."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    head = {**HEAD, "refused": {"a reason to come": 3, "the group is paused": 2}}
    restored = read(rendered([head, GROUP, TOPIC, KEY], world), world).world
    assert restored is not None
    assert restored.groups["g"].keys["t", 0].plan_end == 9
    assert restored.refused.total() == 2


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        ({}, (None, None)),
        ({"pause_client": "jane@host", "pause_reason": "moving"}, ("jane@host", "moving")),
        ({"pause_client": "a/b", "pause_reason": "two\nlines"}, (None, None)),
        ({"pause_client": 5, "pause_reason": ["x"], "later": 1}, (None, None)),
    ],
)
def test_who_paused_a_group_and_why_is_optional(texts: dict[str, object], kept: tuple[str | None, str | None]) -> None:
    """Only people read it, so a snapshot without it, or with what is not valid, is used all the same."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    restored = read(rendered([HEAD, {**GROUP, **texts}, TOPIC, KEY], world), world).world
    assert restored is not None
    group = restored.groups["g"]
    assert (group.paused_by, group.pause_client, group.pause_reason) == ("i", *kept)


def test_the_reason_of_a_pause_is_in_a_snapshot_as_long_as_there_is_one() -> None:
    """A resumed group keeps its sender, and has no reason any more."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    for offset, (expiry_s, reason) in enumerate(((10, "moving"), (0, None))):
        value = f"ReleaseGroup/0/1/ops.1/jane@host/g//0/{expiry_s}".encode()
        world.apply(offset, 5, value)
        if reason is not None:
            world.keep_pause_reason(value, reason)
        text = b"".join(record.value or b"" for record in render(world, TOPIC_ID, "s"))
        assert (b'"pause_reason":"moving"' in text) == (reason is not None)
        assert b'"pause_client":"jane@host"' in text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[]],
        ["["],
        ["[" * 100_000],
        ["9" * 5_000],
        [HEAD, "null"],
        [HEAD, 7],
        [HEAD, "text"],
        [{"defaults": HEAD["defaults"]}],
        [{**HEAD, "log_time_ms": "5"}],
        [{**HEAD, "invalid": []}],
        [{**HEAD, "refused": {"the group is paused": -1}}],
        *[
            [{**HEAD, "last": last}]
            for last in (5, [], [0, 1], [0, 1, 2], [-1, 1, "x"], [0, "1", "x"], [10**6, 1, "x"])
        ],
        [HEAD, {**GROUP, "group": "a/b"}],
        [HEAD, {**GROUP, "group": None}],
        [HEAD, {**GROUP, "settings": "0/native/at_least_once/-"}],
        [HEAD, {**GROUP, "settings": "9/native"}],
        [HEAD, {**GROUP, "settings": 5}],
        [HEAD, {**GROUP, "paused_until_s": 1.5}],
        [HEAD, {**GROUP, "paused_by": ""}],
        [HEAD, '{"group":"\\ud800","settings":null,"paused_until_s":null,"paused_by":null}'],
        [HEAD, '{"group":"g","settings":null,"paused_until_s":9,"paused_by":"\\udc80"}'],
        [HEAD, GROUP, TOPIC, '[0,5,9,1,0,null,7,"\\ud800","c",3]'],
        [HEAD, GROUP, KEY],
        [HEAD, TOPIC, GROUP, KEY],
        [HEAD, GROUP, {"topic": "a b"}],
        [HEAD, GROUP, {}],
        [HEAD, GROUP, TOPIC, []],
        [HEAD, GROUP, TOPIC, KEY[:6]],
        [HEAD, GROUP, TOPIC, KEY[:9]],
        [HEAD, GROUP, TOPIC, [*KEY, 1]],
        *[[HEAD, GROUP, TOPIC, row] for row in spoiled_rows()],
        [HEAD, GROUP, TOPIC, [2**31, *KEY[1:]]],
        [HEAD, GROUP, TOPIC, [*KEY[:5], "short", *KEY[6:]]],
    ],
)
def test_rows_that_are_wrong_are_malformed(rows: Sequence[object]) -> None:
    """Even with a correct checksum, rows that no version has written are rejected and raise no error."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    assert reasons(read(rendered(rows, world), world)) <= {RejectedSnapshot.MALFORMED, RejectedSnapshot.OTHER_DEFAULTS}
    assert reasons(read(rendered(rows, world), world))


@pytest.mark.parametrize("closing", [b"", b"{}", b"[]", b"1", b'{"parts": -1, "sha256": "", "log_time_ms": 1}', b"["])
def test_a_closing_part_that_is_none_leaves_it_incomplete(closing: bytes) -> None:
    """An invalid closing part leaves the snapshot incomplete."""
    world = world_of()
    part, end = render(world, TOPIC_ID, "s")
    assert reasons(read([part, Record(end.key, closing)], world)) == {RejectedSnapshot.INCOMPLETE}


def test_a_topic_of_another_coordination_partition_is_malformed() -> None:
    """A snapshot with a topic of another coordination partition is rejected, because its writer was faulty."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    part, _ = rendered([HEAD, GROUP, {"topic": "orders"}, KEY], world)
    name = SnapshotName(TOPIC_ID, 4, 0, 0, "s")
    checksum = sha256(f"{name}\n".encode() + (part.value or b"")).hexdigest()
    closing = json.dumps({"parts": 1, "sha256": checksum, "log_time_ms": 5}).encode()
    records = [Record(name.key(0), part.value), Record(name.key("end"), closing)]
    assert reasons(read(records, world, partitions=4)) == {RejectedSnapshot.MALFORMED}


# Range claims (protocol.md, section 8.5)

WITH_RANGES = {**GROUP, "settings": "9/native/at_least_once/ranges"}
SWITCHED_OFF = {**GROUP, "settings": "9/native/at_least_once/-"}
SKIPPED = {**HEAD, "invalid": {"unknown type": 1}}
RANGE: list[object] = [6, 9, "planned", 2, 7, "i", "c", 3]
RANGES_KEY: list[object] = [*KEY[:2], None, 0, 0, None, 7, [RANGE, [9, 12, "done", 0, 0]]]


def read_rows(rows: Sequence[object], version: int = 3) -> SnapshotChoice:
    """Read these rows as a snapshot."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    return read(rendered(rows, world, version), world)


def test_the_version_says_whether_settings_ever_named_ranges() -> None:
    """Version 3 is written until a group's settings name ranges.

    From then on version 4 is written, whatever they name.
    """
    world = World(1)
    texts = ["ReleaseGroup/1/1/i/c/g//0/9999999999"]
    texts += [f"GroupSettings/1/1/i/c/g//0/60000/native/at_least_once/{features}" for features in ("a", "ranges", "-")]
    versions = []
    for offset, text in enumerate(texts):
        assert world.apply(0, offset, 1, text.encode()).kind == "accepted"
        records = render(world.partitions[0], TOPIC_ID, "s")
        versions.append({record.key.split(b"/")[0] for record in records})
        restored = read(records, world.partitions[0]).world
        assert restored is not None
        assert facts(restored) == facts(world.partitions[0])
    assert versions == [{b"3"}, {b"3"}, {b"4"}, {b"4"}]


def test_a_snapshot_of_who_may_have_skipped_range_records_is_passed_over() -> None:
    """A version 3 snapshot is rejected if ranges may ever have been enabled and its writer did not know them."""
    for rows in ([HEAD, WITH_RANGES], [{**SKIPPED, "knows": ["ranges"]}, WITH_RANGES], [SKIPPED, SWITCHED_OFF]):
        assert reasons(read_rows(rows)) == {RejectedSnapshot.RANGES_SKIPPED}
    for rows in (
        [HEAD, SWITCHED_OFF],
        [SKIPPED],
        [SKIPPED, {**GROUP, "settings": None}],
        [{**SKIPPED, "knows": ["ranges"]}, SWITCHED_OFF],
        [{**HEAD, "invalid": {"no value": 3}}, SWITCHED_OFF],
    ):
        assert read_rows(rows).world is not None
    assert read_rows([SKIPPED, WITH_RANGES], version=4).world is not None


def test_a_writer_says_that_it_knows_ranges() -> None:
    """A snapshot of this version is accepted even if its writer met records of unknown types."""
    world = World(1)
    for offset, text in enumerate(["GroupSettings/1/1/i/c/g//0/60000/native/at_least_once/-", "Unheard/1/1/i/c/g//0"]):
        world.apply(0, offset, 1, text.encode())
    records = render(world.partitions[0], TOPIC_ID, "s")
    assert read(records, world.partitions[0]).world is not None


def test_a_version_deletes_only_its_own() -> None:
    """A writer deletes only snapshots of its own version, because some members may read only the other one."""
    world = at(world_of(), 10)
    stored = collect(render(world, TOPIC_ID, "s"))[0]
    assert len(outdated(stored, SnapshotName(TOPIC_ID, 1, 0, 11, "t", version=3))) == 2
    assert outdated(stored, SnapshotName(TOPIC_ID, 1, 0, 11, "t", version=4)) == []


def test_rows_of_ranges_are_read() -> None:
    """The row that the next test spoils is valid as it is."""
    restored = read_rows([HEAD, WITH_RANGES, TOPIC, RANGES_KEY], version=4).world
    assert restored is not None
    assert [(range_.start, range_.end) for range_ in restored.groups["g"].keys["t", 0].ranges] == [(6, 9), (9, 12)]


@pytest.mark.parametrize(
    "ranges",
    [
        {},
        "",
        None,
        [{}],
        [[]],
        [RANGE[:4]],
        [RANGE[:7]],
        [[*RANGE, 1]],
        [[4, *RANGE[1:]]],
        [[9, *RANGE[1:]]],
        [RANGE, [8, 12, "done", 0, 0]],
        [[9, 12, "done", 0, 0], RANGE],
        [[*RANGE[:2], "claimed", 0, 7]],
        [[*RANGE[:2], "done", *RANGE[3:]]],
        [[*RANGE[:2], "finished", *RANGE[3:]]],
        [[*RANGE[:3], -1, *RANGE[4:]]],
        [[*RANGE[:4], "7", *RANGE[5:]]],
        [[True, *RANGE[1:]]],
    ],
)
def test_rows_of_ranges_that_are_wrong_are_malformed(ranges: object) -> None:
    """Ranges that no log leads to are rejected and raise no error."""
    assert reasons(read_rows([HEAD, WITH_RANGES, TOPIC, [*RANGES_KEY[:7], ranges]], version=4)) == {
        RejectedSnapshot.MALFORMED
    }


# Snapshots that were written before a group without settings became a Go group

FORMER = json.loads(Path("tests/data/snapshots_before_go_rules.json").read_text(encoding="utf-8"))
"""Snapshots of the previous version by name: the keys and values of their records."""


def former(name: str) -> list[Record]:
    """Return the records of a snapshot that the previous version wrote."""
    return [Record(key.encode(), value.encode()) for key, value in FORMER[name]]


@pytest.mark.parametrize(("name", "ranges"), [("version_1", 0), ("version_2", 1)])
def test_a_former_snapshot_is_read_when_every_group_with_keys_has_settings(name: str, ranges: int) -> None:
    """A snapshot of the previous version is accepted if each group with keys has settings.

    The old defaults do not matter then. A group that is only paused has no keys.
    """
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)

    restored = read(former(name), world).world

    assert restored is not None
    key = restored.key("etl", "orders", 0)
    assert (key.offset, len(key.ranges), key.data_topic_id) == (200 if ranges else 100, ranges, OTHER_TOPIC_ID)
    assert restored.group("etl").settings.delivery == "effectively_once"
    assert (restored.group("paused").paused_by, restored.group("paused").settings) == ("ops.1", WITHOUT_SETTINGS)
    assert {record.key[:1] for record in render(restored, TOPIC_ID, "s")} == {b"4" if ranges else b"3"}


def test_a_former_snapshot_with_a_group_without_settings_is_passed_over() -> None:
    """A snapshot of the previous version is rejected if a group without settings has keys.

    These keys follow the rule set `native`, which no longer applies to groups without settings.
    """
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)

    assert reasons(read(former("version_1_with_a_group_without_settings"), world)) == {RejectedSnapshot.OTHER_DEFAULTS}


def test_a_former_snapshot_is_not_deleted() -> None:
    """Snapshots of the previous version are not deleted, because members of that version may still read them."""
    stored, _ = collect([*former("version_1"), *former("version_2")])
    name = SnapshotName(TOPIC_ID, 1, 0, 2**40, "new")

    assert len(stored) == 2
    assert [outdated(stored, name._replace(version=version)) for version in (3, 4)] == [[], []]


# Several writers


def test_what_another_log_left_is_not_touched() -> None:
    """Only snapshots of the same log, number of partitions and coordination partition are deleted."""
    world = at(world_of(), 10)
    own = collect(render(world, TOPIC_ID, "s"))[0]
    for foreign in (
        SnapshotName(OTHER_TOPIC_ID, 1, 0, 20, "t"),
        SnapshotName(TOPIC_ID, 2, 0, 20, "t"),
        SnapshotName(TOPIC_ID, 1, 1, 20, "t"),
    ):
        assert outdated(own, foreign) == []
    assert len(outdated(own, SnapshotName(TOPIC_ID, 1, 0, 11, "t"))) == 2


WORLDS = [at(world_of(seed=seed, records=40), offset) for seed, offset in enumerate((10, 20, 20, 30))]
WRITTEN = [render(world, TOPIC_ID, f"writer{number}", 400) for number, world in enumerate(WORLDS)]
assert min(map(len, WRITTEN)) > 5


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.lists(st.booleans(), min_size=len(WRITTEN), max_size=len(WRITTEN)))
def test_interleaved_writers_do_not_break_each_other(rng: Random, breaks_off: list[bool]) -> None:
    """However writers interleave, and wherever some stop, the newest complete snapshot is read."""
    both = zip(WRITTEN, breaks_off, strict=True)
    queues = [records[: rng.randrange(len(records))] if off else list(records) for records, off in both]
    whole = [world for world, off in zip(WORLDS, breaks_off, strict=True) if not off]
    topic: list[Record] = []
    while any(queues):
        topic.append(rng.choice([queue for queue in queues if queue]).pop(0))

    choice = read(topic, WORLDS[0])

    if not whole:
        assert choice.world is None
        return
    highest = max(world.next_offset for world in whole)
    assert choice.world is not None
    assert facts(choice.world) in [facts(world) for world in whole if world.next_offset == highest]


@given(st.randoms(use_true_random=False))
@pytest.mark.thorough
def test_what_is_deleted_is_never_the_newest_that_is_whole(rng: Random) -> None:
    """Once a snapshot was complete, there is always one at its log offset or later, in any order of events."""
    topic: list[Record] = []
    queues = {number: list(records) for number, records in enumerate(WRITTEN)}
    deletions: list[list[Record]] = []
    reached, found = -1, read(topic, WORLDS[0]).world
    for _ in range(120):
        deed, before = rng.randrange(5), topic
        waiting = [queue for queue in queues.values() if queue]
        if deed <= 1 and waiting:
            topic = [*topic, rng.choice(waiting).pop(0)]
        elif deed == 2 and found is not None:
            stored, _ = collect(topic)
            name = next(each.name for each in stored if each.name.offset == found.next_offset)
            deletions.append(outdated(stored, name))
        elif deed == 3 and deletions:  # from a deleter that read the topic long ago
            topic = topic + rng.choice(deletions)
        elif deed == 4:
            last = {record.key: index for index, record in enumerate(topic)}
            topic = [record for index, record in enumerate(topic) if last[record.key] == index]
        if topic != before:
            found = read(topic, WORLDS[0]).world
        at_offset = -1 if found is None else found.next_offset
        assert at_offset >= reached
        reached = at_offset


def test_the_last_record_before_it_is_kept() -> None:
    """The last record is read back. A snapshot is rejected if the log has another record at that offset."""
    world = world_of()
    world.set_last_record((world.next_offset - 1, 7, b"value"))
    last = world.last
    assert last is not None
    records = render(world, TOPIC_ID, "s")
    choice = read(records, world)
    assert choice.world is not None
    assert choice.world.last == last == LastRecord.of(world.next_offset - 1, 7, b"value")
    assert reasons(read(records, world, foreign=[last])) == {RejectedSnapshot.OTHER_RECORDS}
    assert read(records, world, foreign=[last._replace(digest="")]).world is not None


def test_a_snapshot_of_an_older_writer_names_no_last_record() -> None:
    """A snapshot without a last record, from an older writer, is accepted."""
    world = PartitionWorld(0, 1, WITHOUT_SETTINGS, 0)
    choice = read(rendered([HEAD], world), world)
    assert choice.world is not None
    assert choice.world.last is None
