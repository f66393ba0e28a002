"""The library's reader and the reference reader have equal verdicts and states, record by record.

`python -m tests.reader_diff` compares them over a million records.
"""

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from marshal_dagster.protocol.replay import StoredRecord, parse_lines, render_record
from tests import reader_diff
from tests.fuzz.promises import held_bytes
from tests.log_generator import (
    GROUP_TYPES,
    LogRecord,
    Profile,
    generate,
    padded,
    spoiled,
    stretched,
    topics_by_coordination_partition,
    value_of,
)
from tests.reader_diff import (
    PROFILES,
    Case,
    Difference,
    LibraryReader,
    case_of,
    compare,
    explain,
    first_difference,
    first_difference_in_batches,
)
from tests.reference_reader import TAIL_FIELDS, PlainReader, records_of

VECTOR = Path(__file__).parent.parent / "vectors" / "marshal-log.jsonl"
START_MS = 1_795_230_000_000
TAILS = {
    "Heartbeat": ["5"],
    "ReleasingPartition": ["5"],
    "ClaimingMessages": ["9"],
    "ReleaseGroup": ["1795230060"],
    "RevokingClaim": ["0"],
    "GroupSettings": ["60000", "go", "at_least_once", "-"],
    "DataTopic": ["Zk3_-0987654321abcdefg"],
    "ClaimingRange": ["5", "9"],
    "PlanningRange": ["0", "9"],
    "RangeHeartbeat": ["0"],
    "RangeDone": ["0"],
    "ReleasingRange": ["0"],
    "RevokingRange": ["0"],
}
[[TOPIC], [FOREIGN]] = topics_by_coordination_partition(2, 1, odd=False)


def fields_of(kind: str) -> list[str]:
    """Return the fields of a valid value of this type, in coordination partition 0 of 2."""
    where = ["", "0"] if kind in GROUP_TYPES else [TOPIC, "0"]
    return [kind, "1", "1795230000", "a", "c", "g", *where, *TAILS.get(kind, [])]


def in_a_log(values: Sequence[bytes | None]) -> list[LogRecord]:
    """Return the values as a log of coordination partition 0, one each millisecond."""
    return [(0, offset, START_MS + offset, value) for offset, value in enumerate(values)]


@pytest.mark.thorough
@pytest.mark.parametrize("first_seed", [0, 20])
@pytest.mark.parametrize("profile", PROFILES)
def test_verdict_and_state_after_each_record(profile: Profile, first_seed: int) -> None:
    """Both readers agree after each record of each small log, and after each part that the fast path reads at once."""
    for seed in range(first_seed, first_seed + 20):
        problem = compare(case_of(profile, seed, 200))
        assert problem is None, problem


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.thorough
def test_long_logs(profile: Profile) -> None:
    """Both readers agree on a long log with many keys, with the fast path too."""
    case = Case(profile, 1, records=6000, keys=120, coordination_partitions=8, heartbeat_interval_ms=60_000)
    problem = compare(case, every=300)
    assert problem is None, problem


@pytest.mark.thorough
def test_a_steady_log_by_the_fast_path() -> None:
    """The benchmark's log, read many records at once, ends in the reference reader's state."""
    log = list(generate(2, 50_000, keys=800, profile="steady"))
    difference = first_difference_in_batches(log, PlainReader(4), LibraryReader(4, 60_000, "go"), 2, largest=20_000)
    assert difference is None, difference


@pytest.mark.parametrize("rules", ["native", "go"])
def test_the_log_that_go_wrote(rules: str) -> None:
    """Both readers agree on the log that the Go library wrote."""
    records = records_of(VECTOR.read_text(encoding="utf-8").splitlines())
    plain, library = PlainReader(8, rules=rules), LibraryReader(8, 60_000, rules)
    difference = first_difference(records, plain, library, every=20)
    assert difference is None, difference


@pytest.mark.parametrize("profile", PROFILES)
def test_stored_lines(profile: Profile) -> None:
    """JSON lines of a log are parsed to the same bytes, and the reference reader reads the same from them."""
    case = case_of(profile, 3, 600)
    log = list(case.log())
    lines = [render_record(StoredRecord(*record)) for record in log]
    stored = [(each.partition, each.offset, each.timestamp_ms, each.value) for each in parse_lines(lines)]
    assert stored == log
    of_lines, of_log = case.plain(), case.plain()
    assert [of_lines.read(*record) for record in records_of(lines)] == [of_log.read(*record) for record in log]
    assert of_lines.summary() == of_log.summary()


@pytest.mark.parametrize(
    "instance",
    [
        r"\ud83d",
        r"\udc80",
        r"a\udcff",
        r"\ude00\ud83d",
        pytest.param(r"\udcc3\udca9"),
        pytest.param(r"\udcf0\udc9f\udc98\udc80"),
    ],
)
def test_a_stored_text_without_utf8_is_invalid(instance: str) -> None:
    """A text with a lone surrogate has no UTF-8 form, so its value is invalid to both readers."""
    line = f'{{"partition": 0, "offset": 0, "timestamp": 1, "value": "Mark/1/1/{instance}/c/g//0"}}'
    [[partition, offset, timestamp_ms, value]] = records_of([line])
    assert PlainReader(1).read(partition, offset, timestamp_ms, value) == "invalid"
    [stored] = parse_lines([line])
    assert LibraryReader(1, 60_000, "go").read(0, 0, 1, stored.value) == "invalid"


@pytest.mark.parametrize("kind", TAIL_FIELDS)
def test_every_way_to_be_invalid_or_at_a_limit(kind: str) -> None:
    """Each value with one fault is invalid to both readers, and each value at a limit is valid to both."""
    wrong = in_a_log([value for _, value in spoiled(fields_of(kind), FOREIGN)])
    plain, library = PlainReader(2), LibraryReader(2, 60_000, "go")
    difference = first_difference(wrong, plain, library)
    assert difference is None, difference
    assert library.summary() == {"invalid": len(wrong), "refused": 0, "groups": {}}

    odd = in_a_log([value for _, value in stretched(fields_of(kind))])
    plain, library = PlainReader(2), LibraryReader(2, 60_000, "go")
    difference = first_difference(odd, plain, library)
    assert difference is None, difference
    assert library.summary()["invalid"] == 0


def fuzzed(seed: int, records: int) -> Iterator[bytes]:
    """Yield noise, valid values with changed bytes, and fields of several values joined together."""
    rng = Random(f"fuzz:{seed}")
    valid = [value_of(fields_of(kind)) for kind in TAIL_FIELDS]
    pieces = [piece for value in valid for piece in value.split(b"/")]
    pieces += [b"", b"\xff", "\u0661".encode(), b"\x00", b"99999999999999999999", b"-", "\u00e4".encode() * 255]
    for _ in range(records):
        way = rng.randrange(4)
        if way == 0:
            yield rng.randbytes(rng.choice((0, 1, 10, 100, 2047, 2048, 2049, 5000)))
        elif way == 1:
            value = bytearray(rng.choice(valid))
            for _ in range(rng.randrange(1, 4)):
                value[rng.randrange(len(value))] = rng.choice((rng.randrange(256), ord("/"), ord("0"), ord("9")))
            yield bytes(value)
        elif way == 2:
            value = bytearray(rng.choice(valid))
            start = rng.randrange(len(value))
            value[start : start + rng.randrange(5)] = rng.randbytes(rng.randrange(5))
            yield bytes(value)
        else:
            yield b"/".join(rng.choices(pieces, k=rng.randrange(1, 14)))


@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_stop_or_grow_a_reader(seed: int) -> None:
    """No bytes raise an exception, and both readers agree on verdict and state."""
    records = in_a_log(list(fuzzed(seed, 4000)))
    plain, library = PlainReader(2), LibraryReader(2, 60_000, "go")
    difference = first_difference(records, plain, library, every=50)
    assert difference is None, difference
    assert library.summary()["invalid"] > 2000

    by_many = LibraryReader(2, 60_000, "go")
    by_many.read_many(0, [record[1:] for record in records])
    assert by_many.summary() == plain.summary()


def test_noise_leaves_no_trace_but_its_count() -> None:
    """A log that contains only noise creates no group."""
    rng = Random(5)
    library = LibraryReader(1, 60_000, "go")
    verdicts = Counter(library.read(0, offset, -1, rng.randbytes(rng.randrange(300))) for offset in range(3000))
    assert verdicts == {"invalid": 3000}
    assert library.summary() == {"invalid": 3000, "refused": 0, "groups": {}}


def test_a_known_owners_heartbeats_are_still_looked_at() -> None:
    """A heartbeat from a known owner is invalid if one of its fields is, or if the value exceeds the size limit."""
    beat = padded([*fields_of("Heartbeat")[:8], ""], 2040).decode().split("/")[:8]
    claim = ["ClaimingPartition", *beat[1:]]
    numbers = [str(10**digits) for digits in range(19)]
    values = [value_of(claim), *(value_of([*beat, number]) for number in numbers)]
    for version, time in [("1" * 19, "1"), ("1", "9" * 19), ("01", "1"), ("1", "01"), ("1", "x"), ("", "1")]:
        values += [value_of([beat[0], version, time, *beat[3:], number]) for number in numbers]
    by_one, by_many = LibraryReader(2, 60_000, "go"), LibraryReader(2, 60_000, "go")
    plain = PlainReader(2)
    difference = first_difference(in_a_log(values), plain, by_one)
    assert difference is None, difference
    assert plain.invalid > 4 * len(numbers)
    by_many.read_many(0, [record[1:] for record in in_a_log(values)])
    assert by_many.summary() == plain.summary()


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["5", "05"], ids=["refused", "invalid"])
def test_refused_and_invalid_records_do_not_grow_a_reader(tail: str) -> None:
    """The reader's memory stays bounded, however many different records there are."""
    library = LibraryReader(1, 60_000, "native")
    filler = "x" * 250
    tracemalloc.start()
    try:
        for offset in range(3_000):
            beat = f"Heartbeat/1/1/{offset}/{filler}/{filler}/t/{offset}/{tail}"
            library.read(0, offset, START_MS, beat.encode())
        more = (
            (offset, START_MS, f"Heartbeat/1/1/{offset}/{filler}/{filler}/t/{offset}/{tail}".encode())
            for offset in range(3_000, 6_000)
        )
        library.read_many(0, more)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2_000_000  # the values alone have 3.3 MB
    assert library.summary()["groups"] == {}


def test_tenures_that_are_over_do_not_grow_a_reader() -> None:
    """For owners and client ids that follow one another on a key, the reader keeps only the last one."""
    library = LibraryReader(1, 60_000, "go")
    world = library.world.start(0, 0)
    sizes = []
    for tenure in range(2_000):
        reported = f"1795230000/run{tenure:06}/{'c' * 200}/g/t/0"
        values = [f"ClaimingPartition/1/{reported}", *(f"Heartbeat/1/{reported}/{tenure}" for _ in range(2))]
        values += [
            f"Heartbeat/1/{reported.replace('/ccc', '/abc')}/{tenure}",
            f"ReleasingPartition/1/{reported}/{tenure}",
        ]
        records = [(world.next_offset + at, START_MS, value.encode()) for at, value in enumerate(values)]
        library.read_many(0, records)
        sizes.append(held_bytes(world))
    assert world.refused.total() == world.invalid.total() == 0
    assert sizes[-1] == sizes[0]


# Check that the comparison finds differences


class LateReader(LibraryReader):
    """A wrong reader, which adds a millisecond to each timestamp."""

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> str:
        """Read one record with a later timestamp."""
        return super().read(partition, offset, timestamp_ms + 1, value)


class ForgetfulReader(LibraryReader):
    """A wrong reader, whose fast path drops the last record."""

    def read_many(self, partition: int, records: Any) -> None:  # noqa: ANN401 (as its base)
        """Read all but the last record."""
        super().read_many(partition, list(records)[:-1])


def test_a_wrong_reader_is_found_and_its_log_is_made_short() -> None:
    """A difference is reported with the shortest log that shows it."""
    case = case_of("mixed", 1, 200)

    def differs(records: Sequence[LogRecord]) -> Difference | None:
        late = LateReader(case.coordination_partitions, case.heartbeat_interval_ms, case.rules)
        return first_difference(records, case.plain(), late)

    difference = differs(list(case.log()))
    assert difference is not None
    text = explain(case, difference, lambda records: differs(list(records)))
    assert "seed=1" in text
    shortest = [json.loads(line) for line in text.splitlines() if line.startswith('{"partition"')]
    assert len(shortest) == 1


def test_a_wrong_fast_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path that drops a record differs from the reference reader."""
    monkeypatch.setattr(reader_diff, "LibraryReader", ForgetfulReader)
    problem = compare(case_of("mixed", 1, 60))
    assert problem is not None
    assert "many at once" in problem


def test_the_command_says_what_it_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with 0 and its figures, or with 1 and the difference."""
    assert reader_diff.main(["--records", "250", "--log-records", "100", "--seed", "9"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["records"], result["logs"], result["differences"]) == (250, 3, 0)
    monkeypatch.setattr(reader_diff, "LibraryReader", LateReader)
    assert reader_diff.main(["--records", "250", "--log-records", "100", "--profile", "go"]) == 1
    assert "reference reader" in capsys.readouterr().out
