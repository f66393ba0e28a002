"""The generated logs are fit for comparing readers: they reach the edge cases of each rule and expose wrong readers."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import reference_reader
from tests.log_generator import FEATURES, LogRecord, Profile, generate, padded, spoiled, stretched, value_of
from tests.mutant_readers import WRONG_PARSING, WRONG_RANGES, WRONG_RULES
from tests.reader_diff import PROFILES, Case, LibraryReader, Reader, case_of
from tests.reference_reader import PlainReader, coordination_partition, parse

SOURCE = Path(reference_reader.__file__).read_text(encoding="utf-8")
LOGS_PER_PROFILE = 50
RECORDS = 250

EXAMPLES = {
    kind: [kind, "1", "1795230000", "run-1.ab12", "spark", "etl", *where, *tail]
    for kind, where, tail in [
        ("ClaimingPartition", ["events0", "3"], []),
        ("Heartbeat", ["events0", "3"], ["250"]),
        ("ReleasingPartition", ["events0", "3"], ["250"]),
        ("ClaimingMessages", ["events0", "3"], ["250"]),
        ("ReleaseGroup", ["", "0"], ["1795230060"]),
        ("RevokingClaim", ["events0", "3"], ["17"]),
        ("GroupSettings", ["", "0"], ["60000", "go", "at_least_once", "-"]),
        ("DataTopic", ["events0", "3"], ["Zk3_-0987654321abcdefg"]),
        ("Mark", ["", "0"], []),
        ("ClaimingRange", ["events0", "3"], ["250", "300"]),
        ("PlanningRange", ["events0", "3"], ["17", "300"]),
        ("RangeHeartbeat", ["events0", "3"], ["17"]),
        ("RangeDone", ["events0", "3"], ["17"]),
        ("ReleasingRange", ["events0", "3"], ["17"]),
        ("RevokingRange", ["events0", "3"], ["17"]),
    ]
}
RANGE_RECORDS = {kind for kind in EXAMPLES if "Range" in kind}
OTHER_SETTINGS = [*EXAMPLES["GroupSettings"][:8], "30000", "native", "effectively_once", "ranges,f_1"]
FOREIGN = next(f"t{n}" for n in range(99) if coordination_partition(f"t{n}", 2) != coordination_partition("events0", 2))


@functools.cache
def values() -> list[tuple[str, bytes | None, bool]]:
    """Return (description, value, whether it is valid) for each record type and each way to vary or spoil it.

    All are valid or invalid in the only coordination partition of a log.
    """
    found: list[tuple[str, bytes | None, bool]] = []
    for fields in [*EXAMPLES.values(), OTHER_SETTINGS]:
        kind = fields[0]
        found.append((kind, value_of(fields), True))
        found += [(f"{kind}, {what}", value, True) for what, value in stretched(fields)]
        found += [(f"{kind}, {what}", value, False) for what, value in spoiled(fields, None)]
    found += [(f"features {text}", value_of([*OTHER_SETTINGS[:11], text]), True) for text in FEATURES]
    beat = EXAMPLES["Heartbeat"]
    for topic in ["...", "-", "_", "x" * 249]:
        found.append((f"topic {topic}", value_of([*beat[:6], topic, *beat[7:]]), True))
    return found


def mistaken(parse_one: Callable[[bytes | None, int, int], object]) -> list[str]:
    """Return the descriptions of the values that a parser classifies wrongly."""
    return [what for what, value, valid in values() if (parse_one(value, 0, 1) is not None) is not valid]


def lies_where_it_should(parse_one: Callable[[bytes | None, int, int], object]) -> bool:
    """Return whether a parser accepts a topic's records in its coordination partition and in no other."""
    for fields in EXAMPLES.values():
        own = coordination_partition("events0", 2)
        if parse_one(value_of(fields), own, 2) is None:
            return False
        foreign = dict(spoiled(fields, FOREIGN)).get(f"field 6: {FOREIGN!r}")
        if foreign is not None and parse_one(foreign, own, 2) is not None:
            return False
    return True


def wrong_reader(right: str, wrong: str) -> dict[str, Any]:
    """Return the reference reader's module with one text in it replaced."""
    assert SOURCE.count(right) == 1, "the text must occur once in the reference reader"
    module: dict[str, Any] = {"__name__": "wrong_reader"}
    exec(compile(SOURCE.replace(right, wrong), "wrong_reader", "exec"), module)  # noqa: S102 (our own source)
    return module


def shown_by(reader: Reader) -> dict[str, Any]:
    """Return the reader's state and how often it reported each note."""
    return {**reader.summary(), "noted": dict(reader.noted)}


Trace = list[tuple[LogRecord, str, dict[str, Any] | None]]


def trace_of(reader: Reader, log: Iterable[LogRecord], length: int) -> Trace:
    """Return the records with a reader's verdicts, and its state after every fifth record and the last."""
    return [
        (record, reader.read(*record), shown_by(reader) if number % 5 == 0 or number == length - 1 else None)
        for number, record in enumerate(log)
    ]


@functools.cache
def traces(profiles: tuple[Profile, ...]) -> list[tuple[Case, Trace]]:
    """Return generated logs with the verdicts and states of the reference reader."""
    cases = [case_of(profile, seed, RECORDS) for seed in range(LOGS_PER_PROFILE) for profile in profiles]
    return [(case, trace_of(case.plain(), case.log(), RECORDS)) for case in cases]


@functools.cache
def crowd() -> Trace:
    """Return a log that fills a key with the maximum number of ranges: held, planned, done and expired ones."""
    head, where = "1/1795230000/a/c", "etl/events0/3"
    texts = [
        f"ReleaseGroup/{head}/etl//0/4000000000",
        f"GroupSettings/{head}/etl//0/60000/native/at_least_once/ranges",
        f"ReleaseGroup/{head}/etl//0/0",
        f"ClaimingPartition/{head}/{where}",
        f"DataTopic/{head}/{where}/Zk3_-0987654321abcdefg",
        f"Heartbeat/{head}/{where}/1",
        f"ReleasingPartition/{head}/{where}/1",
    ]
    times = [0] * len(texts)

    def add(time_ms: int, kind: str, *tail: int) -> int:
        texts.append("/".join([kind, head, where, *map(str, tail)]))
        times.append(time_ms)
        return len(texts) - 1

    add(1, "ClaimingRange", 9_000, 9_001)  # expires in the end
    last = 0
    for number in range(256):
        last = add(60_000, "ClaimingRange", 10 * number + 2, 10 * number + 9)
        add(60_000, "PlanningRange", last, 10 * number + 9)
        if number == 253:
            add(120_001, "ClaimingRange", 9_100, 9_101)  # the limit is reached with the expired range; it makes room
            add(120_001, "ClaimingRange", 9_200, 9_201)
    add(120_002, "ClaimingRange", 9_300, 9_301)
    add(120_002, "RangeDone", last)
    add(120_002, "RevokingRange", last - 2)
    add(120_003, "ClaimingRange", 9_300, 9_301)
    add(120_003, "ClaimingRange", 10 * 252 + 2, 10 * 252 + 9)
    add(180_001, "ClaimingRange", 2, 9)
    add(240_001, "ClaimingRange", 9_400, 9_401)
    return trace_of(
        PlainReader(1),
        [(0, offset, 1_795_230_000_000 + times[offset], text.encode()) for offset, text in enumerate(texts)],
        len(texts),
    )


def agrees(reader: Reader, trace: Trace) -> bool:
    """Return whether a reader comes to the same verdicts and states as a trace."""
    for record, verdict, state in trace:
        if reader.read(*record) != verdict:
            return False
        if state is not None and shown_by(reader) != state:
            return False
    return True


def test_values_are_valid_or_not_as_they_are_called() -> None:
    """The reference reader rejects each spoiled value and accepts each varied one."""
    assert set(EXAMPLES) == set(reference_reader.TAIL_FIELDS)
    assert mistaken(parse) == []
    assert lies_where_it_should(parse)


@pytest.mark.parametrize("name", WRONG_PARSING)
def test_wrong_parsing_shows(name: str) -> None:
    """A reader that breaks one sentence of section 1 misclassifies at least one of the listed values."""
    wrong_parse = wrong_reader(*WRONG_PARSING[name])["parse"]
    assert mistaken(wrong_parse) != [] or not lies_where_it_should(wrong_parse)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_shows(name: str) -> None:
    """A reader with one wrong rule differs from the reference reader in at least one generated log."""
    assert shows(wrong_reader(*WRONG_RULES[name]), traces(PROFILES))


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_RANGES)
def test_a_wrong_rule_of_ranges_shows(name: str) -> None:
    """A reader with one wrong rule for range claims differs from the reference reader in at least one generated log."""
    module = wrong_reader(*WRONG_RANGES[name])
    assert not agrees(module["PlainReader"](1), crowd()) or shows(module, traces(("ranges",)))


def shows(module: dict[str, Any], read: list[tuple[Case, Trace]]) -> bool:
    """Return whether a wrong reader differs from the reference reader in one of the logs."""
    for case, trace in read:
        reader = module["PlainReader"](case.coordination_partitions, case.heartbeat_interval_ms, case.rules)
        if not agrees(reader, trace):
            return True
    return False


@pytest.mark.slow
def test_a_key_may_be_full() -> None:
    """The log fills a key with 256 ranges, and the library's reader agrees with it."""
    assert agrees(LibraryReader(1, 60_000, "native"), crowd())
    counts = [
        len(state["groups"]["etl"]["partitions"][0].get("ranges", ()))
        for _, _, state in crowd()
        if state and state["groups"]["etl"]["partitions"]
    ]
    assert max(counts) == 256


@pytest.mark.parametrize("profile", ["mixed", "hostile", "go", "ranges", "steady"])
def test_a_seed_is_a_log(profile: Profile) -> None:
    """The same seed generates the same log, another seed a different one, each with the requested length."""
    first = list(generate(7, 500, profile=profile))
    assert first == list(generate(7, 500, profile=profile))
    assert first != list(generate(8, 500, profile=profile))
    assert len(first) == 500


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["mixed", "hostile", "go", "ranges", "steady"])
def test_offsets_rise(profile: Profile) -> None:
    """Offsets increase within a coordination partition and fit into int64."""
    last: dict[int, int] = {}
    for partition, offset, _, _ in generate(3, 2000, profile=profile):
        assert last.get(partition, -1) < offset < 2**63
        last[partition] = offset


@pytest.mark.thorough
@pytest.mark.parametrize("profile", ["mixed", "hostile", "go"])
def test_every_verdict_of_every_type_comes_up(profile: Profile) -> None:
    """In a few logs each record type is accepted, refused (if its rules allow that) and read by observers."""
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(30):
        case = case_of(profile, seed, RECORDS)
        reader = case.plain()
        for record in case.log():
            verdict = reader.read(*record)
            if record[3] is not None and verdict != "invalid":
                observed = reader.logs[record[0]]["observed"]
                seen[record[3].split(b"/")[0].decode(), "observed" if observed else verdict] += 1
    always = {"ReleaseGroup", "Mark"}
    for kind in set(EXAMPLES) - RANGE_RECORDS:
        assert seen[kind, "accepted"] >= 40, kind
        assert seen[kind, "observed"] >= 5, kind
        assert (seen[kind, "refused"] >= 40) is (kind not in always), kind


@pytest.mark.thorough
def test_every_verdict_of_every_range_record_comes_up() -> None:
    """In a few logs each type of range record is accepted and refused."""
    seen: Counter[tuple[str, str]] = Counter()
    for _, trace in traces(("ranges",)):
        for record, verdict, _ in trace:
            seen[(record[3] or b"").split(b"/")[0].decode("utf-8", "replace"), verdict] += 1
    for kind in RANGE_RECORDS:
        assert seen[kind, "accepted"] >= 30, kind
        assert seen[kind, "refused"] >= 40, kind


@pytest.mark.slow
def test_edges_of_a_lease_are_hit() -> None:
    """Many claims are written in the last millisecond of another lease, or one millisecond before or after it."""
    seen: Counter[int] = Counter()
    for seed in range(20):
        case = case_of("mixed", seed, RECORDS)
        reader = case.plain()
        for partition, offset, timestamp_ms, value in case.log():
            log = reader.logs.get(partition)
            record = parse(value, partition, case.coordination_partitions)
            if log is not None and record is not None and record["type"] == "ClaimingPartition":
                group = log["groups"].get(record["group"], reference_reader.new_group())
                key = group["keys"].get((record["topic"], record["partition"]), reference_reader.new_key())
                interval_ms = reader._settings_of(group)["heartbeat_interval_ms"]
                if key["owner"] is not None and timestamp_ms >= log["log_time"]:
                    seen[timestamp_ms - key["owner"]["last_beat"] - 2 * interval_ms] += 1
            reader.read(partition, offset, timestamp_ms, value)
    assert min(seen[-1], seen[0], seen[1]) >= 50


@pytest.mark.thorough
def test_steady_is_what_its_name_says() -> None:
    """A steady log has about 97 % heartbeats, 0.5 % invalid and almost no refused records, and no stale owner."""
    records = 60_000
    kinds: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    reader = PlainReader(4)
    for record in generate(1, records, keys=600, profile="steady"):
        verdicts[reader.read(*record)] += 1
        kinds[(record[3] or b"").split(b"/")[0].decode()] += 1
    assert 0.965 <= kinds["Heartbeat"] / records <= 0.985
    assert 0.003 <= verdicts["invalid"] / records <= 0.007
    assert verdicts["refused"] <= records / 1000
    keys = [key for group in reader.summary()["groups"].values() for key in group["partitions"]]
    assert len(keys) == 600
    newest_ms = max(key["last_beat_ms"] or 0 for key in keys)
    assert all(newest_ms - key["last_beat_ms"] <= 120_000 for key in keys if key["owner_instance"] is not None)


def test_padding_is_exact() -> None:
    """A padded value has exactly the requested number of bytes, including characters of several bytes."""
    for fields in EXAMPLES.values():
        for size in range(2040, 2052):
            assert len(padded(fields, size)) == size
