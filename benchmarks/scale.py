"""The cost of one step of a run in a large deployment, compared with a deployment a hundredth as large.

The members are real, the clock is virtual, and the coordination log is in memory, so that only this library's own work
is measured. The members share one world state, as if each had just read it. The conditions of the result show the size
of the log (records, bytes, memory, snapshots), what a sample of runs reads if each follows the log itself, the
takeover from runs that died, and the load of a minute in which each run sends its heartbeats at its own pace.
"""

import heapq
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from statistics import mean
from typing import Final

from benchmarks.claim import MS_PER_S
from benchmarks.harness import Benchmark, Case, Goal, Measured, alternate, rounded
from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.heartbeats import LONGEST_PART, SHORTEST_PART
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol import snapshots
from marshal_dagster.protocol.messages import WITHOUT_SETTINGS, GroupSettings, coordination_partition
from marshal_dagster.protocol.world import PartitionWorld
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog

SMALLER: Final = 100
ONE_DIES_IN: Final = 10
SAMPLE: Final = 50
SETTINGS: Final = GroupSettings(heartbeat_interval_ms=10_000)
LOG_BYTES: Final = 10
"""What a broker's log needs for a record in addition to its value, if ten are appended together."""
_RUN_ID: Final = "3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11"
_TARGET: Final = 2
_MIB: Final = 2**20
_MB: Final = 10**6
_GB: Final = 10**9
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: concurrent runs, partitions of each, coordination partitions; heartbeats, seconds of load, and rounds."""

    runs: int = 10_000
    partitions_of_a_run: int = 10
    runs_of_a_topic: int = 10
    coordination_partitions: int = 64
    heartbeats: int = 3
    paced_seconds: int = 60
    alternations: int = 200
    readings: int = 3


class _Follower:
    """A reader that follows the log, with the number of records of each step and the processor time of all."""

    def __init__(self, reader: Rationalizer) -> None:
        """Read what is there."""
        self._reader = reader
        self.read: list[int] = []
        self.processor_s = 0.0
        reader.catch_up()

    def follow(self) -> None:
        """Read what is new."""
        before, began_s = self._reader.records_read, time.process_time()
        self._reader.catch_up()
        self.processor_s += time.process_time() - began_s
        self.read.append(self._reader.records_read - before)


class Deployment:
    """Runs that own their share of a topic and send heartbeats."""

    def __init__(self, sizes: Sizes, runs: int) -> None:
        """Start all runs. Each claims its partitions and sets a position for them."""
        self.sizes = sizes
        self.clock = ManualClock()
        self.broker = MemoryBroker(sizes.coordination_partitions, now_ms=self.clock.wall_ms)
        self.rationalizer = Rationalizer(MemoryLog(self.broker), clock=self.clock)
        self.claimers = [self._started(run) for run in range(runs)]

    def _started(self, run: int) -> Claimer:
        claimer = self._claimer(run)
        claimer.ensure_group_settings()
        partitions = self._partitions(run)
        claimer.claim(partitions)
        claimer.name_data_topic("0123456789012345678901")
        claimer.beat(dict.fromkeys(partitions, 0))
        return claimer

    def _claimer(self, run: int) -> Claimer:
        topic = run // self.sizes.runs_of_a_topic
        member = Member(f"group-{topic % 10}", "scheduled", new_instance_id(_RUN_ID))
        return Claimer(self.rationalizer, member, f"topic-{topic}", SETTINGS, clock=self.clock)

    def _partitions(self, run: int) -> range:
        width = self.sizes.partitions_of_a_run
        first = run % self.sizes.runs_of_a_topic * width
        return range(first, first + width)

    def beat_all(self) -> None:
        """Send the heartbeats of each run, and advance the clock by a heartbeat interval."""
        for claimer in self.claimers:
            claimer.beat()
        self.clock.advance(SETTINGS.heartbeat_interval_ms)

    def claim_ms(self) -> float:
        """End the first run, let another one claim its partitions, and return the milliseconds of the claim."""
        self.claimers[0].release()
        claimer = self._claimer(0)
        began_s = time.perf_counter()
        won = claimer.claim(self._partitions(0))
        took_s = time.perf_counter() - began_s
        if len(won) != self.sizes.partitions_of_a_run:
            raise RuntimeError(f"{len(won)} of {self.sizes.partitions_of_a_run} partitions were won")
        self.claimers[0] = claimer
        return took_s * MS_PER_S

    def beat_ms(self) -> float:
        """Send the heartbeats of one run, and return the milliseconds."""
        began_s = time.perf_counter()
        self.claimers[0].beat()
        return (time.perf_counter() - began_s) * MS_PER_S

    def read_us(self) -> float:
        """Read the whole log with a new reader, and return the microseconds per record."""
        began_s = time.perf_counter()
        reader = self._read()
        return (time.perf_counter() - began_s) / reader.records_read * MS_PER_S**2

    def _read(self) -> Rationalizer:
        reader = Rationalizer(MemoryLog(self.broker), clock=self.clock)
        reader.catch_up()
        return reader

    def figures(self) -> dict[str, float | int]:
        """Return the figures of the log and the world state."""
        tracemalloc.start()
        worlds = self._read().world.partitions.values()
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        keys = Counter({world.number: sum(len(group.keys) for group in world.groups.values()) for world in worlds})
        before = self._records()
        self.beat_all()
        busiest = next(world for world in worlds if world.number == keys.most_common(1)[0][0])
        return {
            "runs": len(self.claimers),
            "partitions": keys.total(),
            "records": before,
            "records_an_interval": self._records() - before,
            "bytes_a_record": round(self._bytes_a_record()),
            "most_partitions_in_a_coordination_partition": keys[busiest.number],
            "world_state_mib": round(memory / _MIB),
            **_snapshot_figures(busiest),
            **self._read_by_runs(),
            **self._paced(),
            **self._taken_over(),
        }

    def _read_by_runs(self) -> dict[str, float | int]:
        """Return how many records a run reads in an interval, for a sample of runs that each follow the log."""
        topics = [f"topic-{run // self.sizes.runs_of_a_topic}" for run in range(len(self.claimers))]
        readers = [
            Rationalizer(MemoryLog(self.broker), topics=[topic], clock=self.clock)
            for topic in topics[:: max(1, len(topics) // SAMPLE)]
        ]
        for reader in readers:
            reader.catch_up()
        before = [reader.records_read for reader in readers]
        self.beat_all()
        for reader in readers:
            reader.catch_up()
        read = [reader.records_read - then for reader, then in zip(readers, before, strict=True)]
        return {"runs_that_read": len(read), "records_read_an_interval": round(mean(read)), "most_read": max(read)}

    def _paced(self) -> dict[str, float | int]:
        """Return the load while each run sends heartbeats at the pace of `Heartbeats`.

        A reader of all coordination partitions follows the log each second, as sensors do, and so does a reader of the
        busiest coordination partition, as the runs of its topics do.
        """
        runs_s, pace = 0.0, self._heartbeats_at_their_pace()
        next(pace)
        sensor, run = _Follower(self._read()), _Follower(self._busiest_reader())
        for second in range(self.sizes.paced_seconds):
            began_s = time.process_time()
            pace.send(second)
            runs_s += time.process_time() - began_s
            sensor.follow()
            run.follow()
        records_a_second, width = mean(sensor.read), self._bytes_a_record() + LOG_BYTES
        shares = self.sizes.coordination_partitions / len(self.claimers)
        return {
            "records_a_second": round(records_a_second),
            "most_records_in_a_second": max(sensor.read),
            "log_gb_a_day": rounded(records_a_second * width * _DAY_S / _GB),
            "heartbeats_processor_us_a_record": rounded(runs_s / sum(sensor.read) * MS_PER_S**2),
            "sensor_percent_of_a_core": rounded(100 * sensor.processor_s / self.sizes.paced_seconds),
            "busiest_run_percent_of_a_core": rounded(100 * run.processor_s / self.sizes.paced_seconds),
            "busiest_run_reads_a_second": round(mean(run.read)),
            "brokers_send_to_runs_mb_a_second": rounded(records_a_second * width / shares / _MB),
            "identity_requests_a_second": round(records_a_second / self.sizes.partitions_of_a_run),
        }

    def _heartbeats_at_their_pace(self) -> Generator[None, int, None]:
        """Send the heartbeats of all runs up to the end of each second that is sent to this generator."""
        interval_ms, chance = SETTINGS.heartbeat_interval_ms, random.Random(_RUN_ID)
        for claimer in self.claimers:
            claimer.beat()
        due = [(chance.uniform(0, LONGEST_PART) * interval_ms, number) for number in range(len(self.claimers))]
        heapq.heapify(due)
        now_ms = 0.0
        second = yield
        while True:
            while due[0][0] < (second + 1) * MS_PER_S:
                at_ms, number = due[0]
                self.clock.advance(at_ms - now_ms)
                now_ms = at_ms
                self.claimers[number].beat()
                heapq.heapreplace(due, (at_ms + chance.uniform(SHORTEST_PART, LONGEST_PART) * interval_ms, number))
            second = yield

    def _busiest_reader(self) -> Rationalizer:
        """Return a reader of the coordination partition that has the most keys."""
        topics = {claimer.topic for claimer in self.claimers}
        count = self.sizes.coordination_partitions
        keys = Counter(coordination_partition(topic, count) for topic in topics)
        busiest = keys.most_common(1)[0][0]
        topic = next(topic for topic in topics if coordination_partition(topic, count) == busiest)
        return Rationalizer(MemoryLog(self.broker), topics=[topic], clock=self.clock)

    def _taken_over(self) -> dict[str, float | int]:
        """Let runs die and others claim their partitions as soon as possible; return figures of the takeover."""
        self.beat_all()
        last_beat_ms = self.clock.wall_ms() - SETTINGS.heartbeat_interval_ms
        dead = range(0, len(self.claimers), ONE_DIES_IN)
        for number, claimer in enumerate(self.claimers):
            if number not in dead:
                claimer.beat()
        self.clock.advance(SETTINGS.heartbeat_interval_ms)
        if any(self._claimer(run).claim(self._partitions(run)) for run in dead):
            raise RuntimeError("a claim was won although the owner was not stale yet")
        self.clock.advance(1)
        began_s, before = time.perf_counter(), self._records()
        for run in dead:
            self.claimers[run] = self._claimer(run)
        won = sum(len(self.claimers[run].claim(self._partitions(run))) for run in dead)
        took_s = time.perf_counter() - began_s
        if won != len(dead) * self.sizes.partitions_of_a_run:
            raise RuntimeError(f"{won} partitions were taken over of {len(dead)} runs")
        return {
            "partitions_taken_over": won,
            "taken_over_ms_after_the_last_heartbeat": self.clock.wall_ms() - last_beat_ms,
            "records_of_the_takeover": self._records() - before,
            "takeover_processor_s": rounded(took_s),
        }

    def _bytes_a_record(self) -> float:
        numbers = range(self.sizes.coordination_partitions)
        return mean(len(value or b"") for number in numbers for _, _, value in self.broker.records(number))

    def _records(self) -> int:
        return sum(self.broker.bounds(number).end for number in range(self.sizes.coordination_partitions))


def _snapshot_figures(world: PartitionWorld) -> dict[str, float | int]:
    """Return the size of a snapshot of one coordination partition, and the time to render and load it."""
    began_s = time.perf_counter()
    records = snapshots.render(world, "0123456789012345678901", "snapshot")
    rendered_s = time.perf_counter() - began_s
    (stored,), _ = snapshots.collect((record.key, record.value) for record in records)
    began_s = time.perf_counter()
    if not isinstance(snapshots.load(stored, WITHOUT_SETTINGS), PartitionWorld):
        sys.exit("the snapshot could not be read back")
    loaded_s = time.perf_counter() - began_s
    return {
        "snapshot_bytes": sum(len(record.value or b"") for record in records),
        "snapshot_rendered_ms": rounded(rendered_s * MS_PER_S),
        "snapshot_loaded_ms": rounded(loaded_s * MS_PER_S),
    }


def run(sizes: Sizes) -> Measured:
    """Build both deployments, then measure the same steps in both alternately."""
    large, small = Deployment(sizes, sizes.runs), Deployment(sizes, max(1, sizes.runs // SMALLER))
    for deployment in (large, small):
        for _ in range(sizes.heartbeats):
            deployment.beat_all()
    width = sizes.partitions_of_a_run

    def case(step: str, ours: Callable[[], float], beside: Callable[[], float], unit: str, rounds: int) -> Case:
        name = f"{step}, {sizes.runs:,} runs at once"
        return Case(name, *alternate(rounds, ours, beside), unit, Goal.RATIO_AT_MOST, _TARGET)

    return Measured(
        [
            case(f"claim {width} partitions", large.claim_ms, small.claim_ms, "ms", sizes.alternations),
            case(f"heartbeats of {width} partitions", large.beat_ms, small.beat_ms, "ms", sizes.alternations),
            case("a new reader, each record", large.read_us, small.read_us, "µs", sizes.readings),
        ],
        {"large": large.figures(), "small": small.figures()},
    )


BENCHMARK: Final = Benchmark(
    "scale", "the steps of a run in a large deployment, compared with a small one", Sizes(), run
)
