"""The data topics and outputs of simulated runs. Other tasks may run between any two steps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import TakenRanges, Verdict, judge_ranges
from marshal_dagster.sinks.sink import BeforeCommit, OffsetsRead, WriteResult
from tests.batch_fixtures import Bounds, DataTopics, Description

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Wait = Callable[[], None]
"""Lets other tasks run."""


class ProcessTopics:
    """One process's view of the data cluster, with the methods of `marshal_dagster.kafka.admin_client.Topics`."""

    def __init__(self, data: DataTopics, wait: Wait) -> None:
        self._data = data
        self._wait = wait

    def describe(self, topic: str) -> Description:
        """Look up a topic."""
        self._wait()
        return self._data.describe(topic)

    def partition_numbers(self, topic: str) -> tuple[int, ...]:
        """Look up a topic's partitions."""
        self._wait()
        return self._data.partition_numbers(topic)

    def offsets(self, topic: str, partitions: Iterable[int], *, committed_only: bool = True) -> dict[int, Bounds]:
        """Look up bounds, which may be old when they arrive."""
        bounds = self._data.offsets(topic, partitions, committed_only=committed_only)
        self._wait()
        return bounds

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Look up committed offsets."""
        self._wait()
        return self._data.group_offsets(group, topic)

    def commit_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> str | None:
        """Set committed offsets."""
        self._wait()
        return self._data.commit_group_offsets(group, topic, offsets)

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Attempt:
    """One process's work on one range without a sink: the offsets that it has processed so far."""

    range: ClaimedRange
    place: tuple[str, str, int]
    """Group, topic, partition."""
    sender: str = ""
    """The instance id; empty if another process uses it too, or if it was not known at the start."""
    began_at: int = 0
    """The end of the log at its start."""
    done: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """What was processed without a sink, and what a sink has stored."""

    attempts: list[Attempt] = field(default_factory=list)
    elsewhere: set[tuple[int, int]] = field(default_factory=set)
    """Partition and offset of each message that Go members have processed."""
    rows: dict[tuple[int, int], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """By partition and offset: the number of rows of each generation."""
    stored: dict[int, TakenRanges] = field(default_factory=lambda: defaultdict(TakenRanges))
    taken: list[ClaimedRange] = field(default_factory=list)
    """The ranges that a sink stored, in order."""


class SimulatedSink:
    """A transactional output, written by one process. It uses the library's rules and stores ranges in one step."""

    supports_unordered_ranges = True

    def __init__(self, output: Output, wait: Wait, hesitate: Wait) -> None:
        self._output = output
        self._wait = wait
        self._hesitate = hesitate

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Judge each range."""
        self._wait()
        return self._decisions(ranges)

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,  # noqa: ARG002 - the frame is what was read
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Store all ranges that are not stored yet."""
        self._wait()
        before_commit()
        self._hesitate()
        verdicts = self._decisions(ranges)
        taken = tuple(range_ for range_ in ranges if verdicts[range_] is not Verdict.SKIP)
        generations = {one.partition: one.generation for one in taken}
        for partition, offset in frame:  # type: ignore[attr-defined] # a list stands for the frame
            if partition in generations:
                generation = generations[partition]
                rows = self._output.rows[partition, offset]
                for older in [each for each in rows if each < generation]:
                    del rows[older]
                rows[generation] += 1
        self._output.taken += taken
        for one in taken:
            self._output.stored[one.partition].add(one)
        self._wait()
        return WriteResult(taken, tuple(one for one in ranges if one not in taken), {})

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:  # noqa: ARG002 - as `Sink`
        """Return None: each row has an offset, so replacing is always possible."""
        return None

    def _decisions(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        return {range_: judge_ranges(self._output.stored[range_.partition].beside(range_), range_) for range_ in ranges}
