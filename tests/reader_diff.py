"""Compares the library's reader of the log with the reference reader, record by record, over generated logs.

`python -m tests.reader_diff --records 1000000` does so for that many records and ends with exit code 1 if the two
differ. It then shows the first difference with its seed and the shortest log that still has it.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, cast

from marshal_dagster.protocol.messages import RuleSet
from marshal_dagster.protocol.replay import summary
from marshal_dagster.protocol.world import World
from tests.log_generator import LogRecord, Profile, generate
from tests.reference_reader import PlainReader

PROFILES: tuple[Profile, ...] = ("mixed", "hostile", "go", "ranges")
INTERVALS_MS = (60_000, 60_000, 1000, 7, 1)


class Reader(Protocol):
    """A reader to compare: verdicts, the state as `replay --json` shows it, and the notes about accepted records."""

    @property
    def noted(self) -> dict[str, int]:
        """Return how often each note was made."""

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> str:
        """Read one record: "accepted", "refused" or "invalid"."""

    def summary(self) -> dict[str, Any]:
        """Return the JSON object of `replay --json`."""


class LibraryReader:
    """The library's reader, for single records or for many at once."""

    def __init__(self, coordination_partitions: int, heartbeat_interval_ms: int, rules: str) -> None:
        self.world = World(coordination_partitions, heartbeat_interval_ms, RuleSet(rules))

    @property
    def noted(self) -> dict[str, int]:
        """Return how often each note was made, by its name."""
        found = sum((partition.noted for partition in self.world.partitions.values()), Counter())
        return {note.name.lower(): count for note, count in found.items()}

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> str:
        """Read one record."""
        return str(self.world.apply(partition, offset, timestamp_ms, value).kind.value)

    def read_many(self, partition: int, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Read many records of one coordination partition by the fast path."""
        self.world.apply_many(partition, records)

    def summary(self) -> dict[str, Any]:
        """Return the JSON object of `replay --json` as it is after a round trip through JSON."""
        return cast("dict[str, Any]", json.loads(json.dumps(summary(self.world))))


@dataclass(frozen=True, slots=True)
class Case:
    """A generated log and the arguments of its readers."""

    profile: Profile
    seed: int
    records: int
    keys: int
    coordination_partitions: int
    heartbeat_interval_ms: int

    @property
    def rules(self) -> str:
        """Return the rule set that applies until a group's first settings."""
        return "go" if self.profile == "go" else "native"

    def log(self) -> Iterator[LogRecord]:
        """Yield the log."""
        return generate(
            self.seed,
            self.records,
            keys=self.keys,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            coordination_partitions=self.coordination_partitions,
            profile=self.profile,
        )

    def plain(self) -> PlainReader:
        """Return a reference reader that has read nothing."""
        return PlainReader(self.coordination_partitions, self.heartbeat_interval_ms, self.rules)

    def library(self) -> LibraryReader:
        """Return a library reader that has read nothing."""
        return LibraryReader(self.coordination_partitions, self.heartbeat_interval_ms, self.rules)


def case_of(profile: Profile, seed: int, records: int) -> Case:
    """Return the case of a seed, which decides the number of keys, the coordination partitions and the interval."""
    rng = Random(f"case:{seed}")
    keys, coordination_partitions = rng.randrange(1, 16), rng.randrange(1, 5)
    if profile == "ranges":  # a key has more possible states than in the other profiles
        keys, coordination_partitions = 1 + keys % 5, 1
    return Case(
        profile,
        seed,
        records,
        keys=keys,
        coordination_partitions=coordination_partitions,
        heartbeat_interval_ms=60_000 if profile == "go" else rng.choice(INTERVALS_MS),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two readers differ: after which record, and what each returns."""

    at: int
    what: str
    plain: Any
    other: Any

    def __str__(self) -> str:
        """Return the difference in a few lines."""
        return f"record {self.at}, {self.what}:\n  reference reader: {self.plain}\n  other reader: {self.other}"


def parts_of(plain: dict[str, Any], other: dict[str, Any]) -> tuple[Any, Any]:
    """Return only the parts in which two summaries differ."""
    if plain["groups"] == other["groups"]:
        return ({name: plain[name] for name in ("invalid", "refused")}, {**other, "groups": "the same"})
    names = [n for n in {**plain["groups"], **other["groups"]} if plain["groups"].get(n) != other["groups"].get(n)]
    return [plain["groups"].get(name) for name in names], [other["groups"].get(name) for name in names]


def first_difference(records: Iterable[LogRecord], plain: Reader, other: Reader, every: int = 1) -> Difference | None:
    """Return where the readers first differ: verdicts after each record, states after `every` records."""
    at = -1
    for at, record in enumerate(records):
        verdict, others = plain.read(*record), other.read(*record)
        if verdict != others:
            return Difference(at, f"{record}, verdict", verdict, others)
        if plain.noted != other.noted:
            return Difference(at, f"{record}, notes", plain.noted, other.noted)
        if at % every == 0:
            state, others_state = plain.summary(), other.summary()
            if state != others_state:
                return Difference(at, f"{record}, state", *parts_of(state, others_state))
    state, others_state = plain.summary(), other.summary()
    if state != others_state:
        return Difference(at, "state at the end", *parts_of(state, others_state))
    return None


def first_difference_in_batches(
    records: Iterable[LogRecord], plain: Reader, other: LibraryReader, seed: int, largest: int = 60
) -> Difference | None:
    """Return where the fast path first differs. It reads batches of random size; the slow path reads a few records."""
    rng = Random(f"pieces:{seed}")
    waiting: dict[int, list[tuple[int, int, bytes | None]]] = {}
    left = rng.randrange(1, largest)
    at = -1
    for at, (partition, offset, timestamp_ms, value) in enumerate(records):
        plain.read(partition, offset, timestamp_ms, value)
        if not waiting and rng.random() < 0.02:
            other.read(partition, offset, timestamp_ms, value)
            continue
        waiting.setdefault(partition, []).append((offset, timestamp_ms, value))
        left -= 1
        if left > 0:
            continue
        _read_all(other, waiting)
        left = rng.randrange(1, largest)
        state, others_state = plain.summary(), other.summary()
        if state != others_state:
            return Difference(at, "state after many at once", *parts_of(state, others_state))
    _read_all(other, waiting)
    state, others_state = plain.summary(), other.summary()
    if state != others_state:
        return Difference(at, "state at the end, many at once", *parts_of(state, others_state))
    if plain.noted != other.noted:
        return Difference(at, "notes at the end, many at once", plain.noted, other.noted)
    return None


def _read_all(reader: LibraryReader, waiting: dict[int, list[tuple[int, int, bytes | None]]]) -> None:
    for partition, records in waiting.items():
        reader.read_many(partition, iter(records))
    waiting.clear()


def shortest(
    records: Sequence[LogRecord], differs: Callable[[Sequence[LogRecord]], Difference | None]
) -> list[LogRecord]:
    """Return a log that still differs and from which no single record can be removed."""
    kept = list(records)
    size = max(1, len(kept) // 2)
    while True:
        start = 0
        while start < len(kept):
            without = kept[:start] + kept[start + size :]
            if without and differs(without) is not None:
                kept = without
            else:
                start += size
        if size == 1:
            return kept
        size //= 2


def explain(case: Case, difference: Difference, differs: Callable[[Sequence[LogRecord]], Difference | None]) -> str:
    """Return the case, the difference and the shortest log that has one."""
    log = shortest(list(case.log()), differs)
    lines = [
        json.dumps({"partition": p, "offset": o, "timestamp": t, "value": None if v is None else repr(v)})
        for p, o, t, v in log
    ]
    return "\n".join([str(case), str(difference), "The shortest log:", *lines, str(differs(log))])


def compare(case: Case, every: int = 1) -> str | None:
    """Return an explanation if the library differs from the reference reader, record by record or in batches."""

    def by_one(records: Iterable[LogRecord]) -> Difference | None:
        return first_difference(records, case.plain(), case.library(), every)

    def by_many(records: Iterable[LogRecord]) -> Difference | None:
        return first_difference_in_batches(records, case.plain(), case.library(), case.seed)

    for differs in (by_one, by_many):
        difference = differs(case.log())
        if difference is not None:
            return explain(case, difference, differs)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare over many seeds; return 0 if nothing differs, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.reader_diff", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="records in all (default: %(default)s)")
    parser.add_argument("--log-records", type=int, default=500, help="records in a log (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--profile", choices=PROFILES, help="one profile only (default: all in turn)")
    parser.add_argument(
        "--every", type=int, default=1, help="compare the state after so many records (default: after each)"
    )
    options = parser.parse_args(arguments)

    profiles = PROFILES if options.profile is None else (options.profile,)
    started_s = time.monotonic()
    done = logs = 0
    while done < options.records:
        seed = options.seed + logs // len(profiles)
        records = min(options.log_records, options.records - done)
        problem = compare(case_of(profiles[logs % len(profiles)], seed, records), options.every)
        if problem is not None:
            sys.stdout.write(problem + "\n")
            return 1
        done += records
        logs += 1
        if logs % 100 == 0:
            sys.stderr.write(f"\r{done:,} records, {logs:,} logs, {time.monotonic() - started_s:.0f} s")
    result = {
        "records": done,
        "logs": logs,
        "first_seed": options.seed,
        "last_seed": options.seed + (logs - 1) // len(profiles),
        "profiles": profiles,
        "state_compared_every": options.every,
        "differences": 0,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
