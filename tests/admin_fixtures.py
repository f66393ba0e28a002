"""Fixtures for tests of an operator's commands: a group in memory and a fake data topic."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch

import pytest

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    GroupSettings,
    Heartbeat,
    ReleasingPartition,
    render,
)
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import ManualClock
from tests.cli import Answer, call
from tests.members import SETTINGS, TOPIC, TOPIC_ID, Site, about, settings_record

START, END, WRITTEN = 20, 100, 110
"""The bounds of each partition of the data topic. An open transaction holds the offsets from `END` to `WRITTEN`."""
YOUNGEST_MS = 5_000
"""The timestamp of the last record. The record at offset n has the timestamp 50·n."""


def write_first_settings(site: Site, settings: GroupSettings = SETTINGS) -> None:
    """Write the settings of the tests' group as its first records."""
    for number in range(site.partitions):
        site.broker.append(number, render(settings_record(settings)))


def go_owner(site: Site, *partitions: int, at: int = 50, instance: str = "gohost-7") -> str:
    """Write the records of a Go consumer that owns partitions at offset `at`; return its instance id."""
    for partition in partitions:
        site.say(about(ClaimingPartition, instance, partition))
        site.say(about(Heartbeat, instance, partition, offset=at))
    return instance


def go_left(site: Site, *partitions: int) -> None:
    """Write the records of a Go consumer that owned partitions at offset 50 and released them."""
    at = 50
    instance = go_owner(site, *partitions, at=at)
    for partition in partitions:
        site.say(about(ReleasingPartition, instance, partition, offset=at))


GO_TYPES = {"ClaimingPartition", "Heartbeat", "ReleasingPartition", "ClaimingMessages"}


def types(site: Site) -> set[str]:
    """Return the types of all records in the log."""
    values = [value for number in range(site.partitions) for _, _, value in site.broker.records(number)]
    return {(value or b"").decode().partition("/")[0] for value in values}


@dataclass(slots=True)
class FakeTopics:
    """A fake cluster with the data topic `TOPIC` of three partitions and the committed group offsets."""

    topic_id: str = TOPIC_ID
    committed: dict[int, int] = field(default_factory=dict)
    problem: str | None = None
    partitions: tuple[int, ...] = (0, 1, 2)
    has_consumers_of: set[str] = field(default_factory=set)
    future: dict[int, int] = field(default_factory=dict)
    """For some partitions, the offset of a record with a timestamp in the future."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def describe(self, topic: str) -> TopicDescription:
        """Return the description of `TOPIC`; raise an error for any other topic."""
        if topic != TOPIC:
            raise TopicNotFoundError(f"topic {topic!r} does not exist")
        return TopicDescription(topic, self.topic_id, self.partitions, 1)

    def offsets(self, _: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return the bounds of each partition."""
        return {partition: OffsetBounds(START, END if committed_only else WRITTEN) for partition in partitions}

    def offsets_at(self, _: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset with that timestamp or a later one."""
        at = max(START, -(-at_ms // 50))
        found = {} if at_ms > YOUNGEST_MS else dict.fromkeys(partitions, at)
        hidden = {number: self.future[number] for number in partitions if number in self.future}
        return found | {number: min(offset, found.get(number, offset)) for number, offset in hidden.items()}

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets."""
        assert group
        assert topic
        return self.committed

    def has_consumers(self, group: str) -> bool:
        """Return whether the group has active consumers."""
        return group in self.has_consumers_of

    def commit_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> str | None:
        """Commit the offsets, or return why that failed."""
        assert group
        assert topic
        if self.problem is None:
            self.committed.update(offsets)
        return self.problem


def site_now() -> Site:
    """Create a coordination topic on a broker whose clock starts at this machine's time."""
    return Site(ManualClock(time.time_ns() // 1_000_000))


class Nobodys:
    """Assignments of a cluster without a coordinator."""

    def of(self, _: Collection[str]) -> dict[str, dict[tuple[str, int], str]]:
        """Return no assignment."""
        return {}


NOBODYS = Nobodys()


def at_work_on(site: Site, monkeypatch: pytest.MonkeyPatch, *modules: object, topics: FakeTopics | None = None) -> None:
    """Make the commands in `modules` use this group and data topic, whatever server they are given."""

    def open_reader(*_: object, **__: object) -> Rationalizer:
        return Rationalizer(site.log(), clock=site.clock)

    for module in modules:
        monkeypatch.setattr(module, "open_reader", open_reader)
        if topics is not None and hasattr(module, "Topics"):
            monkeypatch.setattr(module, "Topics", lambda *_, **__: topics)
        if hasattr(module, "AssignmentCache"):
            monkeypatch.setattr(module, "AssignmentCache", lambda _: NOBODYS)


def act(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Answer:  # noqa: ANN401 - arguments of any type
    """Run a command line against a server that is not contacted."""
    with patch.dict("os.environ", MARSHAL_BOOTSTRAP_SERVERS="somewhere:1"):
        return call(capsys, *map(str, arguments))
