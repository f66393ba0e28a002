"""The runs of one seed: several write the ranges of each batch at the same time, and one of them completes it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import wait
from random import Random
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import KafkaSink, WriteResult
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.kafka.range_write import Step
from tests.conditions import WITHIN_S
from tests.kafka_outputs import KafkaOutput, committed
from tests.task_races import worker
from tests.task_races.checks import Place, Verdict, headers_of, judge, value_of
from tests.task_races.local_tasks import Attempts, LocalRows, LocalSession, Processes, TaskProcess
from tests.task_races.worker import STEPS, Act, Fault

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

BATCHES: Final = 3
PARTITIONS: Final = 3
_MOST_ROWS: Final = 40
_MOST_RUNS_TO_COMPLETE: Final = 30


class ClaimGoneError(MarshalError):
    """The driver of a run has died after it has judged its ranges."""


def rows_of(range_: ClaimedRange) -> list[Place]:
    """Return the rows that the result has for a range: none, one or two for each offset."""
    return [
        (range_.partition, offset, row)
        for offset in range(range_.start, range_.end)
        for row in range((range_.partition + offset) % 4 % 3)
    ]


@dataclass(frozen=True, slots=True)
class RaceFrame:
    """The result of a run, which its sink evaluates."""

    sparkSession: LocalSession  # noqa: N815 - Spark's name
    places: Sequence[Place]

    @property
    def schema(self) -> "StructType":
        """The columns' types."""
        from pyspark.sql import types as t

        header = t.StructType().add("key", t.StringType()).add("value", t.BinaryType())
        numbers = t.StructType().add("partition", t.LongType()).add("offset", t.LongType())
        return (
            numbers.add("value", t.BinaryType())
            .add("key", t.BinaryType())
            .add("headers", t.ArrayType(header))
            .add("output_partition", t.IntegerType())
        )

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return self.schema.names


@dataclass(frozen=True)
class RaceRecords:
    """The evaluated rows of a run (`FrameRecords`)."""

    run: "Run"
    session: LocalSession
    places: Sequence[Place]
    rejected: None = None

    @cached_property
    def counts(self) -> Mapping[int, int]:
        """The number of rows, by source partition."""
        partitions = [partition for partition, _, _ in self.places]
        return {partition: partitions.count(partition) for partition in partitions}

    @property
    def has_whole_partitions(self) -> bool:
        """Whether each range is in one task. Half of the runs have no such rows."""
        return self.run.has_whole_partitions

    def batch_rows(self, _: int) -> int:
        """Return the rows of a batch, which nothing limits here."""
        return 10_000

    def as_they_are(self) -> LocalRows:
        """Return the rows in the tasks of the frame. In some tasks they are not in order."""
        return self._in_tasks(are_mixed=True)

    def by_range(self, _: int) -> LocalRows:
        """Return the rows of each range in one task, in order; a task may have several ranges."""
        return self._in_tasks(are_mixed=False)

    def _in_tasks(self, *, are_mixed: bool) -> LocalRows:
        dice = self.run.dice
        tasks: list[list[Place]] = [[] for _ in range(dice.randint(1, PARTITIONS))]
        chosen = {partition: dice.randrange(len(tasks)) for partition in sorted(self.counts)}
        for place in self.places:
            tasks[chosen[place[0]]].append(place)
        for task in tasks:
            if are_mixed and dice.random() < 0.4:
                moments = {place[:2]: dice.random() for place in task}
                task.sort(key=lambda place: (moments[place[:2]], place))
        return LocalRows(self.run.processes, [self._pieces(task) for task in tasks if task], self.run.attempts)

    def _pieces(self, places: list[Place]) -> "list[RecordBatch]":
        """Return rows in batches of random sizes."""
        pieces = []
        while places:
            size = self.run.dice.randint(1, len(places))
            pieces.append(arrow(places[:size], self.run.name))
            places = places[size:]
        return pieces


def arrow(places: Sequence[Place], run: str) -> "RecordBatch":
    """Return rows with the columns of `FrameRecords.rows`."""
    import pyarrow as pa

    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    columns = {
        "partition": pa.array([partition for partition, _, _ in places], pa.int64()),
        "offset": pa.array([offset for _, offset, _ in places], pa.int64()),
        "value": pa.array([value_of(place) for place in places], pa.binary()),
        "key": pa.array(["/".join(map(str, place)).encode() for place in places], pa.binary()),
        "headers": pa.array(
            [[{"key": key, "value": value} for key, value in headers_of(place, run)] for place in places], headers
        ),
        "output_partition": pa.array([partition % 2 for partition, _, _ in places], pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


class RunSink(KafkaSink):
    """The sink of a run, whose tasks are processes."""

    run: "Run"

    @contextmanager
    def _evaluated(self, frame: RaceFrame, done: Sequence[int]) -> Iterator[RaceRecords]:  # type: ignore[override]
        left = [place for place in frame.places if place[0] not in done]
        yield RaceRecords(self.run, frame.sparkSession, left)

    def _with_connection(self, connection: KafkaConnection | None) -> KafkaSink:
        """Return a copy for tasks, which do not know the run."""
        other = super()._with_connection(connection)
        vars(other).pop("run", None)
        return other


def open_sink(connection: KafkaConnection, topic: str) -> RunSink:
    """Return the sink of a run, as its process opens it."""
    sink = RunSink(connection, topic, transaction_timeout_s=12)
    sink._reached = worker.reached  # type: ignore[method-assign]
    return sink


@dataclass(frozen=True, slots=True)
class Run:
    """A run that writes ranges of a batch."""

    sink: RunSink
    processes: Processes
    name: str
    ranges: Sequence[ClaimedRange]
    dice: Random
    attempts: Attempts
    has_whole_partitions: bool = True
    before_commit: Callable[[], None] = lambda: None

    def write(self) -> WriteResult:
        """Write the ranges as a batch does."""
        self.sink.run = self
        places = [place for range_ in self.ranges for place in rows_of(range_)]
        session = LocalSession({"spark.speculation": "true"} if self.attempts.copies > 1 else {})
        frame: Any = RaceFrame(session, places)
        return self.sink.write(frame, self.ranges, never, self.before_commit)


def lose_claim() -> None:
    """Raise the error of a run that is not alive when its tasks would start."""
    raise ClaimGoneError("the driver has died")


def random_faults(dice: Random) -> Iterator[Fault | None]:
    """Yield the faults of the processes that a task starts, one after the other."""
    while True:
        is_healthy = dice.random() < 0.25
        fault = Fault(dice.choice(list(Act)), dice.choice(STEPS), dice.choice((1, 1, 1, 2)))
        yield None if is_healthy else fault


@dataclass(slots=True)
class Race:
    """A race on an output of its own."""

    connection: KafkaConnection
    processes: Processes
    seed: int
    killed: int = 0
    resumed: int = 0
    runs: int = 0
    _reported: list[tuple[ClaimedRange, str]] = field(default_factory=list)
    _zombies: list[tuple[TaskProcess, Sequence[ClaimedRange]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looks: "list[Future[None]]" = field(default_factory=list)
    _output: KafkaOutput = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _batch: Sequence[ClaimedRange] = ()
    _epoch: int = 0

    def go(self) -> Verdict:
        """Write all batches, and judge the output."""
        dice = Random(self.seed)
        self._output = KafkaOutput(self.connection)
        expected: dict[int, list[tuple[int, int]]] = {partition: [] for partition in range(PARTITIONS)}
        ends = dict.fromkeys(range(PARTITIONS), 0)
        with ThreadPoolExecutor(1) as self._pool:
            for _ in range(BATCHES):
                batch = [
                    part(partition, start, start + dice.randint(1, _MOST_ROWS)) for partition, start in ends.items()
                ]
                self._write(batch, dice)
                ends = {range_.partition: range_.end for range_ in batch}
                for range_ in batch:
                    expected[range_.partition] += [place[1:] for place in rows_of(range_)]
                self._resume(dice, 0.5)
            while self._zombies:
                self._resume(dice, 1)
        messages = committed(self.connection, self._output.topic)
        return judge(messages, expected, self._reported)

    def report(self, run: str, ranges: Sequence[ClaimedRange]) -> None:
        """Note that a run has reported these ranges as written."""
        with self._lock:
            self._reported += [(range_, run) for range_ in ranges]

    def lost(self) -> None:
        """Look at the output as a new run does, because a process has died or was stopped."""
        with self._lock:
            self.killed += 1
            self._looks.append(self._pool.submit(self._look))

    def _look(self) -> None:
        ranges = [replace(range_, epoch=self._epoch + 10) for range_ in self._batch]
        try:
            open_sink(self.connection, self._output.topic).verdicts(ranges)
        except MarshalError:
            return

    def _write(self, batch: Sequence[ClaimedRange], dice: Random) -> None:
        """Write a batch by several runs at the same time, each with another fencing token."""
        self._batch = batch
        count = dice.randint(2, 3)
        runs = [
            self._run(batch if dice.random() < 0.6 else dice.sample(batch, dice.randint(1, PARTITIONS)), dice)
            for _ in range(count)
        ]
        is_last_alone = dice.random() < 0.5
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self._try, run) for run in runs]
            if is_last_alone:
                wait_for_futures(futures, WITHIN_S)
            self._complete(batch, dice)
        self._zombies += [(process, batch) for process in self.processes.taken()]

    def _run(self, ranges: Sequence[ClaimedRange], dice: Random, *, is_healthy: bool = False) -> Run:
        self._epoch += 1
        self.runs += 1
        name, own = f"run {self._epoch}", Random(dice.random())
        attempts = Attempts(name, lost=self.lost)
        if not is_healthy:
            dices = [Random(own.random()) for _ in range(PARTITIONS)]
            attempts = replace(
                attempts,
                faults=lambda task: random_faults(dices[task]),
                copies=1 if own.random() < 0.7 else 2,
                most=own.choice((1, 1, 2, 4)),
            )
        return Run(
            open_sink(self.connection, self._output.topic),
            self.processes,
            name,
            [replace(range_, epoch=self._epoch + 10) for range_ in ranges],
            own,
            attempts,
            own.random() < 0.5,
            lose_claim if not is_healthy and own.random() < 0.1 else lambda: None,
        )

    def _try(self, run: Run) -> WriteResult | MarshalError:
        try:
            result = run.write()
        except MarshalError as error:
            return error
        self.report(run.name, result.taken)
        return result

    def _complete(self, batch: Sequence[ClaimedRange], dice: Random) -> None:
        """Start runs without faults until one has written or skipped the whole batch."""
        errors = []
        for _ in range(_MOST_RUNS_TO_COMPLETE):
            found = self._try(self._run(batch, dice, is_healthy=True))
            if not isinstance(found, MarshalError):
                return
            errors.append(str(found))
        raise AssertionError(f"seed {self.seed}: no run could complete {batch}: {errors[-3:]}")

    def _resume(self, dice: Random, share: float) -> None:
        """Continue a share of the stopped processes. Wait until these and those without a job have ended."""
        still, waiting = [], {}
        for process, ranges in self._zombies:
            if process.is_stopped and dice.random() >= share:
                still.append((process, ranges))
                continue
            if process.is_stopped:
                self.resumed += 1
                process.go_on()
            waiting[process.results] = process, ranges
        while waiting:
            for ready in wait(list(waiting), WITHIN_S):
                process, ranges = waiting.pop(ready)  # type: ignore[call-overload] # one of them
                found = process.receive()
                if isinstance(found, list):
                    self._report_late(process.run, ranges, found)
                else:
                    self.lost()
                if process.is_stopped:
                    still.append((process, ranges))
        self._zombies = still

    def _report_late(self, run: str, ranges: Sequence[ClaimedRange], rows: Sequence[Mapping[str, Any]]) -> None:
        """Note what a process has reported to a driver that is gone."""
        taken = {row["partition"] for row in rows if row["outcome"] in tuple(Step)}
        self.report(run, [range_ for range_ in ranges if range_.partition in taken])
