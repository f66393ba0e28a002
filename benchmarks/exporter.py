"""The exporter with many groups and partitions: seconds of a refresh and of a scrape, and the memory of the process."""

import gzip
import http.client
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import psutil

from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate
from marshal_dagster._internal.health_server import METRICS, HealthServer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.exporter.definitions import PARTITION_LAG, Samples
from marshal_dagster.exporter.exporter import Exporter
from marshal_dagster.exporter.topic_reader import TopicReader
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemoryBroker, MemoryLog

_TOPIC_ID: Final = "A" * 22
_LAG: Final = 5
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: groups, the partitions of each group's topic, and rounds."""

    groups: int = 100
    partitions: int = 1_000
    alternations: int = 5


class DataTopics:
    """Data topics in memory, whose ends grow with each look-up. Half of the partitions have unread records."""

    def __init__(self, partitions: int) -> None:
        """Start with `partitions` in each topic."""
        self._partitions = partitions
        self._end = 1_000

    def describe(self, topic: str) -> TopicDescription:
        """Return the topic."""
        return TopicDescription(topic, _TOPIC_ID, tuple(range(self._partitions)), 3)

    def offsets(self, _: str, partitions: Collection[int]) -> dict[int, OffsetBounds]:
        """Return bounds in which every second partition has unread records."""
        self._end += 1
        return {number: OffsetBounds(0, self._end if number % 2 else 1_000) for number in partitions}

    def offsets_at(self, _: str, partitions: Collection[int], __: int) -> dict[int, int]:
        """Return that the records of the requested time were read."""
        return dict.fromkeys(partitions, 990)

    def settings(self, _: str) -> dict[str, str]:
        """Return a retention of a week."""
        return {"retention.ms": "604800000"}


def run(sizes: Sizes) -> Measured:
    """Refresh and scrape an exporter, alternately with the client library alone on as many series."""
    before = psutil.Process().memory_info().rss
    broker = MemoryBroker()
    exporter = Exporter(lambda: Rationalizer(MemoryLog(broker)), TopicReader(DataTopics(sizes.partitions)))
    _write_log(broker, sizes)
    began_s = time.perf_counter()
    exporter.refresh()
    first_s = time.perf_counter() - began_s
    if exporter.status.failure is not None:
        raise exporter.status.failure
    text = exporter.render()
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    labels = [("group", "topic", str(number)) for number in range(series)]
    bare = Samples({PARTITION_LAG: [(row, 7.0) for row in labels]})
    ours, beside = alternate(sizes.alternations, lambda: _timed(exporter.refresh), lambda: _timed(bare.render))
    with HealthServer(exporter.health, metrics=exporter.render) as server:
        scrapes, packed = alternate(
            sizes.alternations,
            lambda: _timed(lambda: _scrape(server.address)),
            lambda: _timed(lambda: gzip.compress(text, compresslevel=1)),
        )
    memory = psutil.Process().memory_info().rss - before
    what = f"{sizes.groups} groups, {sizes.groups * sizes.partitions:,} partitions"
    return Measured(
        [
            Case(f"refresh: {what}", ours, beside, "s", Goal.RATIO_AT_MOST, 4),
            Case(f"scrape: {what}", scrapes, packed, "s", Goal.RATIO_AT_MOST, 4),
        ],
        {
            "series": series,
            "mib_of_text": round(len(text) / _MIB, 1),
            "mib_compressed": round(len(gzip.compress(text, compresslevel=1)) / _MIB, 1),
            "memory_mib": round(memory / _MIB),
            "first_refresh_s": round(first_s, 2),
        },
    )


def _write_log(broker: MemoryBroker, sizes: Sizes) -> None:
    """Let a run of each group hold every partition of its topic, with an open plan in every tenth."""
    count = broker.identity.partitions
    for number in range(sizes.groups):
        group, topic, instance = f"group-{number}", f"topic-{number}", f"run-{number}.0"
        home = coordination_partition(topic, count)
        settings = GroupSettings()
        _add(broker, home, GroupSettingsRecord(instance=instance, client="c", group=group, time_s=1, settings=settings))
        for partition in range(sizes.partitions):
            whose: dict[str, Any] = {
                "instance": instance,
                "client": "c",
                "group": group,
                "topic": topic,
                "partition": partition,
                "time_s": 1,
            }
            _add(broker, home, ClaimingPartition(**whose))
            _add(broker, home, DataTopic(**whose, topic_id=_TOPIC_ID))
            _add(broker, home, Heartbeat(**whose, offset=1_000 - _LAG * (partition % 2)))
            if partition % 10 == 0:
                _add(broker, home, ClaimingMessages(**whose, plan_end=1_100))


def _add(broker: MemoryBroker, partition: int, message: Message) -> None:
    broker.append(partition, render(message))


def _scrape(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", METRICS, headers={"Accept-Encoding": "gzip"})
    if not connection.getresponse().read():
        raise RuntimeError("the scrape was empty")
    connection.close()


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


BENCHMARK: Final = Benchmark(
    "exporter", "refreshes and scrapes of the exporter, compared with Prometheus' client library alone", Sizes(), run
)
