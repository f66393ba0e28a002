"""The generated logs are worth comparing readers over: they reach each rule's edges, and a wrong reader shows."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import plain_reader
from tests.log_generator import FEATURES, LogRecord, Profile, generate, padded, spoiled, stretched, value_of
from tests.plain_reader import PlainReader, coordination_partition, parse
from tests.second_reader import PROFILES, Case, Reader, case_of
from tests.wrong_readings import WRONG_PARSING, WRONG_RULES

SOURCE = Path(plain_reader.__file__).read_text(encoding="utf-8")
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
    ]
}
OTHER_SETTINGS = [*EXAMPLES["GroupSettings"][:8], "30000", "native", "effectively_once", "ranges,f_1"]
FOREIGN = next(f"t{n}" for n in range(99) if coordination_partition(f"t{n}", 2) != coordination_partition("events0", 2))


@functools.cache
def values() -> list[tuple[str, bytes | None, bool]]:
    """Return what is special about it, a value, and whether it is valid, for each type and each way to be either.

    They are found in the only coordination partition of a log.
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
    """Return of which values a parser says the wrong thing."""
    return [what for what, value, valid in values() if (parse_one(value, 0, 1) is not None) is not valid]


def lies_where_it_should(parse_one: Callable[[bytes | None, int, int], object]) -> bool:
    """Tell whether a parser takes a topic's records in its coordination partition and in no other."""
    for fields in EXAMPLES.values():
        own = coordination_partition("events0", 2)
        if parse_one(value_of(fields), own, 2) is None:
            return False
        foreign = dict(spoiled(fields, FOREIGN)).get(f"field 6: {FOREIGN!r}")
        if foreign is not None and parse_one(foreign, own, 2) is not None:
            return False
    return True


def wrong_reader(right: str, wrong: str) -> dict[str, Any]:
    """Return the plain reader's module with one place of it changed."""
    assert SOURCE.count(right) == 1, "names one place of the plain reader"
    module: dict[str, Any] = {"__name__": "wrong_reader"}
    exec(compile(SOURCE.replace(right, wrong), "wrong_reader", "exec"), module)  # noqa: S102 (our own source)
    return module


@functools.cache
def traces() -> list[tuple[Case, list[tuple[LogRecord, str, dict[str, Any] | None]]]]:
    """Return logs with the plain reader's verdict of each record, and its state after every fifth."""
    found = []
    for seed in range(LOGS_PER_PROFILE):
        for profile in PROFILES:
            case = case_of(profile, seed, RECORDS)
            reader = case.plain()
            trace = [
                (record, reader.read(*record), reader.summary() if number % 5 == 0 or number == RECORDS - 1 else None)
                for number, record in enumerate(case.log())
            ]
            found.append((case, trace))
    return found


def agrees(reader: Reader, trace: list[tuple[LogRecord, str, dict[str, Any] | None]]) -> bool:
    """Tell whether a reader comes to the verdicts and states of a trace."""
    for record, verdict, state in trace:
        if reader.read(*record) != verdict:
            return False
        if state is not None and reader.summary() != state:
            return False
    return True


def test_values_are_valid_or_not_as_they_are_called() -> None:
    """The plain reader calls each spoiled value invalid and each stretched one valid."""
    assert set(EXAMPLES) == set(plain_reader.TAIL_FIELDS)
    assert mistaken(parse) == []
    assert lies_where_it_should(parse)


@pytest.mark.parametrize("name", WRONG_PARSING)
def test_wrong_parsing_shows(name: str) -> None:
    """A reader with one sentence of section 1 wrong takes one of the tabled values for what it is not."""
    wrong_parse = wrong_reader(*WRONG_PARSING[name])["parse"]
    assert mistaken(wrong_parse) != [] or not lies_where_it_should(wrong_parse)


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_shows(name: str) -> None:
    """A reader with one rule wrong differs from the right one within the generated logs."""
    module = wrong_reader(*WRONG_RULES[name])
    for case, trace in traces():
        reader = module["PlainReader"](case.coordination_partitions, case.heartbeat_interval_ms, case.rules)
        if not agrees(reader, trace):
            return
    pytest.fail(f"No log among {len(traces())} tells that reader from the right one.")


@pytest.mark.parametrize("profile", ["mixed", "hostile", "go", "steady"])
def test_a_seed_is_a_log(profile: Profile) -> None:
    """The same seed gives the same log, another seed another one, of the length asked for."""
    first = list(generate(7, 500, profile=profile))
    assert first == list(generate(7, 500, profile=profile))
    assert first != list(generate(8, 500, profile=profile))
    assert len(first) == 500


@pytest.mark.parametrize("profile", ["mixed", "hostile", "go", "steady"])
def test_offsets_rise(profile: Profile) -> None:
    """Within a coordination partition offsets rise, as a log's do, and they fit int64."""
    last: dict[int, int] = {}
    for partition, offset, _, _ in generate(3, 2000, profile=profile):
        assert last.get(partition, -1) < offset < 2**63
        last[partition] = offset


@pytest.mark.parametrize("profile", ["mixed", "hostile", "go"])
def test_every_verdict_of_every_type_comes_up(profile: Profile) -> None:
    """Within a few logs each type is accepted, each that can be refused is, and observers read each."""
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
    for kind in EXAMPLES:
        assert seen[kind, "accepted"] >= 40, kind
        assert seen[kind, "observed"] >= 5, kind
        assert (seen[kind, "refused"] >= 40) is (kind not in always), kind


def test_edges_of_a_lease_are_hit() -> None:
    """Claims fall on the last millisecond of another's lease and on the ones before and behind it, over and over."""
    seen: Counter[int] = Counter()
    for seed in range(20):
        case = case_of("mixed", seed, RECORDS)
        reader = case.plain()
        for partition, offset, timestamp_ms, value in case.log():
            log = reader.logs.get(partition)
            record = parse(value, partition, case.coordination_partitions)
            if log is not None and record is not None and record["type"] == "ClaimingPartition":
                group = log["groups"].get(record["group"], plain_reader.new_group())
                key = group["keys"].get((record["topic"], record["partition"]), plain_reader.new_key())
                interval_ms = reader._settings_of(group)["heartbeat_interval_ms"]
                if key["owner"] is not None and timestamp_ms >= log["log_time"]:
                    seen[timestamp_ms - key["owner"]["last_beat"] - 2 * interval_ms] += 1
            reader.read(partition, offset, timestamp_ms, value)
    assert min(seen[-1], seen[0], seen[1]) >= 50


def test_steady_is_what_its_name_says() -> None:
    """A steady log is 97 % heartbeats, 0.5 % invalid, nearly nothing refused, and no owner in it goes stale."""
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
    """A padded value has exactly the bytes asked for, whatever remainder its characters leave."""
    for fields in EXAMPLES.values():
        for size in range(2040, 2052):
            assert len(padded(fields, size)) == size
