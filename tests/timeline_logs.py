"""A log for the tests and screenshots of the timeline: an incident."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Final
from uuid import UUID

from marshal_dagster.protocol.messages import coordination_partition
from marshal_dagster.protocol.replay import StoredRecord, render_record

GROUP, TOPIC, CLIENT = "shops", "orders", "orders_per_shop"
COORDINATION_PARTITIONS: Final = 8
HOME: Final = coordination_partition(TOPIC, COORDINATION_PARTITIONS)
START_MS: Final = 1_795_000_000_000
"""2026-11-18 11:06:40 UTC."""
INTERVAL_S: Final = 10
OPERATOR: Final = "operator.6a1f0c2b9d3e"
TOPIC_ID: Final = "Zk3_-0987654321abcdefg"

Written = tuple[float, str]
"""A time in seconds after the start, and a value."""


def run_instance(random: Random) -> str:
    """Return the instance id of a new Dagster run."""
    return f"{UUID(int=random.getrandbits(128), version=4)}.{random.getrandbits(48):012x}"


def value(kind: str, instance: str, at_s: float, partition: int, *tail: int | str, client: str = CLIENT) -> str:
    """Return the value of a record about a partition."""
    fields = (kind, 1, START_MS // 1_000 + int(at_s), instance, client, GROUP, TOPIC, partition, *tail)
    return "/".join(map(str, fields))


def group_value(kind: str, at_s: float, version: int, *tail: int | str) -> str:
    """Return the value of an operator's record about the group."""
    fields = (kind, version, START_MS // 1_000 + int(at_s), OPERATOR, "ada@ops-1", GROUP, "", 0, *tail)
    return "/".join(map(str, fields))


def settings() -> Written:
    """Return the record with the group's settings."""
    return 0, group_value("GroupSettings", 0, 1, INTERVAL_S * 1_000, "native", "effectively_once", "-")


def stored(written: Iterable[Written]) -> list[StoredRecord]:
    """Return records in the order of their times as a stored log."""
    ordered = sorted(written, key=lambda each: each[0])
    return [
        StoredRecord(HOME, offset, START_MS + round(at_s * 1_000), text.encode())
        for offset, (at_s, text) in enumerate(ordered)
    ]


class Member:
    """A run that writes its records to a list."""

    def __init__(self, written: list[Written], random: Random) -> None:
        self.instance = run_instance(random)
        self._written = written

    def claim(self, at_s: float, partitions: Iterable[int], offset: int, *, is_first: bool = False) -> None:
        """Claim partitions, and confirm each claim at its offset."""
        for number, partition in enumerate(partitions):
            moment = at_s + number * 0.02
            self.write(moment, "ClaimingPartition", partition)
            self.write(moment + 0.3, "Heartbeat", partition, offset)
            if is_first:
                self.write(moment + 0.4, "DataTopic", partition, TOPIC_ID)

    def each(self, at_s: float, kind: str, partitions: Iterable[int], *tail: int | str) -> None:
        """Write a record for each of some partitions."""
        for number, partition in enumerate(partitions):
            self.write(at_s + number * 0.02, kind, partition, *tail)

    def beats(self, times: Iterable[float], partitions: Iterable[int], offset: int) -> None:
        """Send heartbeats."""
        for at_s in times:
            self.each(at_s, "Heartbeat", partitions, offset)

    def write(self, at_s: float, kind: str, partition: int, *tail: int | str) -> None:
        """Write a record for a partition."""
        self._written.append((at_s, value(kind, self.instance, at_s, partition, *tail)))


def incident() -> list[StoredRecord]:
    """Return the log of a crash, with a takeover, refused records, a pause and a position that is set back."""
    written, random, all_ = [settings()], Random(32), (0, 1, 2)
    dead, heir, next_ = (Member(written, random) for _ in range(3))
    dead.claim(2, all_, 0, is_first=True)
    dead.each(3, "ClaimingMessages", all_, 1_000)
    dead.beats((12, 22, 32), all_, 0)
    dead.each(36, "Heartbeat", all_, 1_000)
    dead.each(37, "ClaimingMessages", all_, 2_000)
    dead.beats((46, 56), all_, 1_000)
    next_.each(60, "ClaimingPartition", (0,))
    heir.claim(84, all_, 1_000)
    heir.each(85, "ClaimingMessages", all_, 2_000)
    heir.beats((94, 104), all_, 1_000)
    dead.each(99, "Heartbeat", (1,), 2_000)
    heir.each(109, "Heartbeat", all_, 2_000)
    heir.each(110, "ReleasingPartition", all_, 2_000)
    until = START_MS // 1_000 + 600
    written.append((118, group_value("ReleaseGroup", 118, 0, until)))
    written.append((128, value("ClaimingPartition", OPERATOR, 128, 2, client="ada@ops-1")))
    written.append((130, value("ReleasingPartition", OPERATOR, 130, 2, 1_500, client="ada@ops-1")))
    written.append((141, group_value("ReleaseGroup", 141, 0, 0)))
    next_.claim(146, (0, 1), 2_000)
    next_.claim(146.1, (2,), 1_500)
    next_.each(147, "ClaimingMessages", all_, 3_000)
    next_.beats((156, 166), (0, 1), 2_000)
    next_.beats((156, 166), (2,), 1_500)
    next_.each(172, "Heartbeat", all_, 3_000)
    next_.beats((182,), all_, 3_000)
    return stored(written)


def lines(records: Iterable[StoredRecord]) -> Iterator[str]:
    """Yield records as the lines of a stored log."""
    return (render_record(record) + "\n" for record in records)
