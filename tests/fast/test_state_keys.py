"""The keys of a group behave as a dict does, and need little memory."""

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterable, Iterator
from random import Random

import pytest

from marshal_dagster.protocol import messages
from marshal_dagster.protocol import world as world_module
from marshal_dagster.protocol.messages import InvalidMessage, RuleSet, parse
from marshal_dagster.protocol.state import DataPartitionId, Key, Keys, Owner, Phase, Range
from marshal_dagster.protocol.world import PartitionWorld, World

KEYS = 4_000
KEYS_OF_A_RUN = 10
START_MS = 1_795_230_000_000


def test_keys_are_found_as_in_a_dict() -> None:
    """Whatever the order in which keys come, each is found, once, and those of a topic are in order."""
    for seed in range(200):
        rng = Random(seed)
        keys, expected = Keys(), dict[DataPartitionId, Key]()
        for offset in range(rng.randrange(60)):
            place = rng.choice("ab"), rng.randrange(rng.choice((3, 30, 2**31)))
            keys[place] = expected[place] = Key(offset=offset)
            assert len(keys) == len(expected)
        assert dict(keys.items()) == expected
        assert list(keys) == [place for place, _ in keys.items()]
        assert [key for _, key in sorted(keys.items(), key=lambda item: item[0])] == [
            expected[place] for place in sorted(expected)
        ]
        assert {id(key) for key in keys.values()} == {id(key) for key in expected.values()}
        assert all(keys[place] is key and place in keys for place, key in expected.items())
        assert keys == Keys(expected.items())
        requested = [-1, *range(-2, 31), 2**31]
        assert keys.of_topic("a", requested) == [expected.get(("a", partition)) for partition in requested]
        assert [partition for topic, partition in keys if topic == "a"] == sorted(
            n for topic, n in expected if topic == "a"
        )
        for place in (("a", -1), ("a", 30), ("c", 0)):
            if place not in expected:
                assert keys.get(place) is None
                with pytest.raises(KeyError):
                    keys[place]


def test_a_copy_of_a_key_has_each_field() -> None:
    """Fields that `==` does not compare are copied too."""
    owners = Owner("a", "c", 1), Owner("b", "c", 2)
    key = Key(5, owners[0], 6, 7, 8, 9, "A" * 22, True, (Range(10, 11, Phase.DONE),), owners[1])
    fields = [field.name for field in dataclasses.fields(Key)]
    assert [getattr(key.copy(), name) for name in fields] == [getattr(key, name) for name in fields]
    assert all(getattr(key, name) != getattr(Key(), name) for name in fields)


def records_of_runs() -> Iterator[tuple[int, int, bytes]]:
    """Yield the claim, the topic's id, the commit and a heartbeat of each key; each run has ten keys."""
    offset = 0
    for first in range(0, KEYS, KEYS_OF_A_RUN):
        run = f"{first:08x}-6f64-4a4e-9d1b-0c8f6a2d7e11.ab12/dagster/etl/orders-{first // 1_000}"
        for kind in ("ClaimingPartition", "DataTopic", "Heartbeat", "Heartbeat"):
            for number in range(first, first + KEYS_OF_A_RUN):
                tails = {
                    "ClaimingPartition": "",
                    "DataTopic": f"/{first // 1_000:022}",
                    "Heartbeat": f"/{10**9 + number}",
                }
                value = f"{kind}/1/1795230000/{run}/{number % 1_000}{tails[kind]}"
                yield offset, START_MS + first, value.encode()
                offset += 1


@pytest.mark.slow
@pytest.mark.parametrize(("most_beats", "most_bytes"), [(0, 300), (KEYS, 500)], ids=["without heartbeats", "with them"])
def test_a_key_needs_little_memory(monkeypatch: pytest.MonkeyPatch, most_beats: int, most_bytes: int) -> None:
    """A million keys need less than 300 MB; only for a limited number of them a heartbeat is remembered too."""
    monkeypatch.setattr(world_module, "MOST_BEATS", most_beats)
    world = World(1, 60_000)
    world.start(0, 0)
    gc.collect()
    tracemalloc.start()
    try:
        world.apply_many(0, records_of_runs())
        for cached in (
            messages.shared_name,
            messages.shared_topic,
            messages.shared_topic_id,
            messages._repeated_number,
        ):
            cached.cache_clear()
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    read = world.partitions[0]
    assert (len(read.groups["etl"].keys), len(read._beats)) == (KEYS, min(KEYS, most_beats))
    assert read.refused.total() == read.invalid.total() == 0
    assert held_bytes < KEYS * most_bytes


@pytest.mark.slow
def test_keys_without_a_remembered_heartbeat_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit changes no state."""
    states = []
    for most_beats in (0, 7, KEYS):
        monkeypatch.setattr(world_module, "MOST_BEATS", most_beats)
        world = World(1, 60_000)
        world.apply_many(0, records_of_runs())
        states.append(world.partitions[0].groups)
    assert states[0] == states[1] == states[2]


OWNED = ["ClaimingPartition/1/1795230000/a/c/g/t/0", *["Heartbeat/1/1795230000/a/c/g/t/0/5"] * 3]
PAUSE = "ReleaseGroup/0/1795230000/op/c/g//0/4000000000"
LATER = ""
"""An invalid record, which moves log time beyond the last heartbeat of every owner."""
CHANGES = {
    "nothing": [],
    "plan": ["ClaimingMessages/1/1795230000/a/c/g/t/0/9"],
    "commit": ["ClaimingMessages/1/1795230000/a/c/g/t/0/9", "Heartbeat/1/1795230000/a/c/g/t/0/9"],
    "release": ["ReleasingPartition/1/1795230000/a/c/g/t/0/5"],
    "revoked": ["RevokingClaim/1/1795230000/op/c/g/t/0/0"],
    "another owner": ["RevokingClaim/1/1795230000/op/c/g/t/0/0", "ClaimingPartition/1/1795230000/b/c/g/t/0"],
    "the topic was deleted and re-created": [
        f"DataTopic/1/1795230000/a/c/g/t/0/{'A' * 22}",
        "Heartbeat/1/1795230000/a/c/g/t/0/5",
        PAUSE.replace("/op/", "/a/"),
        f"DataTopic/1/1795230000/a/c/g/t/0/{'B' * 22}",
    ],
    "position": [
        "ReleasingPartition/1/1795230000/a/c/g/t/0/5",
        PAUSE,
        "ClaimingPartition/1/1795230000/op/c/g/t/0",
        "ReleasingPartition/1/1795230000/op/c/g/t/0/2",
        "ClaimingPartition/1/1795230000/op/c/g/t/0",
    ],
    "a takeover": [LATER, "ClaimingPartition/1/1795230000/b/c/g/t/0"],
    "settings of a group without live owners": [LATER, "GroupSettings/1/1795230000/a/c/g//0/60000/go/at_least_once/-"],
    "a Go owner": ["Heartbeat/1/1795230000/go/c/g/t/0/7"],
    "a lower offset": ["Heartbeat/1/1795230000/a/c/g/t/0/4"],
}


def timed(values: Iterable[str]) -> list[tuple[int, int, bytes]]:
    """Return the records of `values`; a heartbeat has a later timestamp than the record after it."""
    records, now_ms = [], START_MS
    for offset, value in enumerate(values):
        now_ms += 600_000 if value == LATER else 1
        records.append((offset, now_ms + 1_000 * value.startswith("Heartbeat/"), value.encode()))
    return records


def require_equal(one: PartitionWorld, other: PartitionWorld) -> None:
    """Check that two readers computed the same."""
    for name in ("groups", "refused", "noted", "invalid", "log_time_ms", "next_offset"):
        assert getattr(one, name) == getattr(other, name), name


def require_as_by_one(values: Iterable[str], rules: RuleSet) -> None:
    """Check that a reader of each beginning of a log computes the same as one that applies record by record."""
    records = timed(values)
    by_one = World(1, 60_000, rules).start(0, 0)
    for count, record in enumerate(records, start=1):
        by_one.apply(*record)
        by_many = World(1, 60_000, rules).start(0, 0)
        by_many.apply_many(records[:count])
        require_equal(by_many, by_one)


@pytest.mark.parametrize("rules", list(RuleSet))
@pytest.mark.parametrize("change", CHANGES)
def test_a_remembered_heartbeat_counts_until_its_key_changes(change: str, rules: RuleSet) -> None:
    """After any change of the key, the same heartbeat is judged again."""
    values = [*OWNED, *CHANGES[change], *OWNED[-2:], "GroupSettings/1/1795230000/a/c/g//0/60000/go/at_least_once/-"]
    require_as_by_one([*values, PAUSE.replace("/op/", "/a/"), values[-1], *OWNED[-2:]], rules)


@pytest.mark.parametrize("rules", list(RuleSet))
@pytest.mark.parametrize("change", CHANGES)
def test_an_own_record_also_ends_what_is_remembered(change: str, rules: RuleSet) -> None:
    """A process does not parse its own records, but they change keys too."""
    records = timed([*OWNED, *CHANGES[change], *OWNED[-2:]])
    by_one, by_own = (World(1, 60_000, rules).start(0, 0) for _ in range(2))
    for record in records:
        by_one.apply(*record)
    by_own.apply_many(records[: len(OWNED)])
    for offset, timestamp_ms, value in records[len(OWNED) : -2]:
        message = parse(value)
        by_own.apply(offset, timestamp_ms, value, None if isinstance(message, InvalidMessage) else message)
    by_own.apply_many(records[-2:])
    require_equal(by_own, by_one)


@pytest.mark.parametrize("rules", list(RuleSet))
@pytest.mark.parametrize(
    "head",
    [
        "Heartbeat/1/0795230000/",
        "Heartbeat/x/1795230000/",
        "Heartbeet/1/1795230000/",
        "Heartbeat/1/179523000x/",
        "x" * 23,
    ],
)
def test_an_invalid_record_that_ends_like_a_remembered_heartbeat_is_invalid(head: str, rules: RuleSet) -> None:
    """Only the time of a heartbeat may differ from the remembered one."""
    require_as_by_one([*OWNED, head + OWNED[-1][len(head) :]], rules)


@pytest.mark.parametrize("rules", list(RuleSet))
@pytest.mark.parametrize("time_s", ["179523000", "17952300000"])
def test_only_heartbeats_with_a_time_of_ten_digits_are_remembered(time_s: str, rules: RuleSet) -> None:
    """The end of another one, cut at the same place, can be the heartbeat of another instance."""
    owned = [value.replace("/1795230000/a/", f"/{time_s}/xa/") for value in OWNED]
    others = [f"Heartbeat/1/1795230000/{sender}c/g/t/0/5" for sender in ("a/", "/xa/", "")]
    require_as_by_one([*owned, *others], rules)


def test_a_plan_does_not_end_what_is_remembered() -> None:
    """A plan changes neither the owner nor the offset, and each batch has one."""
    world = World(1, 60_000).start(0, 0)
    world.apply_many(timed([*OWNED, *CHANGES["plan"]]))
    assert len(world._beats) == 1
