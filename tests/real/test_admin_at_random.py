"""Dagster runs work while an operator pauses, repositions and resumes their group six times, at random moments."""

import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pytest

from marshal_dagster.errors import MarshalError
from marshal_dagster.jobs.admin import (
    PauseConfig,
    ResumeConfig,
    SetPositionConfig,
    build_pause_job,
    build_resume_job,
    build_set_position_job,
)
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.real.kill_points import read_messages
from tests.real.sink_worker import COLUMNS, value_of
from tests.sink_outputs import FakeFrame, PostgresOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GROUP = "etl"
PARTITIONS, MESSAGES = 3, 150
MAX_RECORDS = 30
ROUNDS = 6
FAILS_EVERY = 3
"""One of this many batches with an output fails once, after the write and before the commit."""

Place = tuple[int, int, int]
"""Epoch of the claim, partition and offset."""


@dataclass(slots=True)
class Runs:
    """The results of all runs."""

    processed: Counter[Place] = field(default_factory=Counter)
    committed: list[ClaimedRange] = field(default_factory=list)
    given_up: list[ClaimedRange] = field(default_factory=list)
    skipped: list[ClaimedRange] = field(default_factory=list)
    """Ranges that were committed without a write, because the output already had them."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class Deployment:
    """A group's job, executed in a loop as Dagster would, and the operator's jobs."""

    instance: dg.DagsterInstance
    connection: KafkaConnection
    claimer: dict[str, Any]
    topic: str
    output: PostgresOutput | None
    """The output of the rows in effectively-once mode."""
    runs: Runs = field(default_factory=Runs)
    over: threading.Event = field(default_factory=threading.Event)

    def job(self, seed: int) -> dg.JobDefinition:
        """Return the job that processes one batch. Its delays are random, from `seed`."""
        chance, runs, topic, output = random.Random(seed), self.runs, self.topic, self.output
        fails = itertools.cycle([False] * (FAILS_EVERY - 1) + [True])

        @dg.op(required_resource_keys={"claimer"})
        def work(context: dg.OpExecutionContext) -> None:
            sink = None if output is None else output.sink()
            batch = context.resources.claimer.claimed_batch(context, topic=topic, sink=sink, max_records=MAX_RECORDS)
            try:
                with batch:
                    if batch.idle is not None:
                        return
                    batch.begin_processing()
                    time.sleep(chance.uniform(0, 0.1))
                    epochs = {range_.partition: range_.epoch for range_ in batch.ranges}
                    places = [(epochs[at[0]], *at) for at in read_messages(self.connection, batch.ranges)]
                    if output is not None:
                        batch.write(cast("DataFrame", frame(places)))
                    with runs.lock:
                        runs.processed.update(places)
                    if output is not None:
                        fail_when(next(fails))
            except (MarshalError, RuntimeError):
                runs.given_up += batch.ranges
                raise
            finally:
                if batch.idle is None:
                    runs.committed += [each.range for each in batch.report() if each.state == "committed"]
                    runs.skipped += batch.skipped if batch.committed else ()

        @dg.job(name=f"work_{seed}", executor_def=dg.in_process_executor)
        def orders() -> None:
            work()

        return orders

    def go_on(self, seed: int) -> None:
        """Start one run after another until `over` is set."""
        job, chance = self.job(seed), random.Random(-seed)
        while not self.over.wait(chance.uniform(0, 0.2)):
            self.execute(job, None, raise_on_error=False)

    def execute(self, job: dg.JobDefinition, config: dg.Config | None, **options: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401
        """Run a job with its own claimer, as each run has."""
        run_config = None if config is None else dg.RunConfig(ops={f"{job.name}_op": config})
        resources = {"claimer": ClaimerResource(**self.claimer)}
        return job.execute_in_process(run_config, self.instance, resources=resources, **options)

    def set_positions(self, config: SetPositionConfig) -> dict[int, int]:
        """Set positions, and return the new position of each partition that was set."""
        result = self.execute(build_set_position_job(), config)
        (output,) = [all_node_event for all_node_event in result.all_node_events if all_node_event.is_successful_output]
        table = output.step_output_data.metadata["before_and_after"]
        assert isinstance(table, dg.TableMetadataValue)
        rows = [record.data for record in table.records]
        return {int(row["partition"]): int(row["after"]) for row in rows if row["set"]}  # type: ignore[arg-type] # ints


@pytest.fixture(params=["at_least_once", "at_most_once", "effectively_once"])
def deployment(  # noqa: PLR0917 - fixtures
    request: pytest.FixtureRequest,
    tmp_path: Path,
    connection: KafkaConnection,
    kafka: str,
    coordination_topic: str,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> Iterator[Deployment]:
    """A Dagster instance whose runs share a group, with messages to read."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, PARTITIONS * MESSAGES)
    output = None
    if request.param == "effectively_once":
        output = PostgresOutput(request.getfixturevalue("postgres"), own_schema())
    claimer = {
        "connection": KafkaConnectionConfig(bootstrap_servers=kafka),
        "coordination_topic": coordination_topic,
        "group": GROUP,
        "heartbeat_interval_s": 60.0,
        "delivery": request.param,
    }
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield Deployment(instance, connection, claimer, name, output)


def test_nothing_is_lost_or_repeated_however_it_is_operated(deployment: Deployment, topics: Topics) -> None:
    """Every committed message was processed once, and batches are contiguous except where a position was set."""
    chance = random.Random(11)
    threads = [threading.Thread(target=deployment.go_on, args=(seed,), daemon=True) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    starts: dict[int, list[int]] = defaultdict(list)
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(0, 0.8))
        is_paused = chance.random() < 0.5
        if is_paused:
            deployment.execute(build_pause_job(), PauseConfig(duration="10m"))
            time.sleep(chance.uniform(0, 0.3))
        for partition, start in deployment.set_positions(somewhere(chance, deployment.topic)).items():
            starts[partition].append(start)
        if is_paused:
            deployment.execute(build_resume_job(), ResumeConfig())
    ends = dict.fromkeys(range(PARTITIONS), MESSAGES)
    wait_until(lambda: topics.group_offsets(GROUP, deployment.topic) == ends, "the topic is drained")
    deployment.over.set()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    check_committed(deployment.runs, starts)
    if deployment.output is not None:
        check_written(deployment.runs, deployment.output)
    else:
        check_processed(deployment.runs, is_at_most_once=deployment.claimer["delivery"] == "at_most_once")


def fail_when(it_is_time: bool) -> None:
    """Fail as user code may, after everything is written."""
    if it_is_time:
        raise RuntimeError("written, and not committed")


def somewhere(chance: random.Random, topic: str) -> SetPositionConfig:
    """Return a random position to set."""
    kind = chance.choice(["offsets", "one partition", "back", "earliest"])
    if kind == "offsets":
        given = ",".join(f"{number}={chance.randrange(MESSAGES)}" for number in range(PARTITIONS))
        return SetPositionConfig(topic=topic, to_offset=given)
    if kind == "one partition":
        return SetPositionConfig(topic=topic, to_offset=f"{chance.randrange(PARTITIONS)}={chance.randrange(MESSAGES)}")
    if kind == "back":
        return SetPositionConfig(topic=topic, shift_by=-chance.randint(1, 2 * MAX_RECORDS))
    return SetPositionConfig(topic=topic, to_earliest=True, partitions=str(chance.randrange(PARTITIONS)))


def check_committed(runs: Runs, starts: dict[int, list[int]]) -> None:
    """Check that each range starts at the end of the last one or at a position set since, and that all is read."""
    assert sum(map(len, starts.values())) > ROUNDS
    for partition in range(PARTITIONS):
        of_both = (*runs.committed, *runs.skipped)
        ours = sorted((one for one in of_both if one.partition == partition), key=lambda one: one.epoch)
        at, to_come = 0, iter(starts[partition])
        for one in ours:
            while one.start != at:
                at = next(to_come)
            at = one.end
        assert at == MESSAGES
        assert {MESSAGES, *(our.start for our in ours)} >= set(to_come)


def check_processed(runs: Runs, *, is_at_most_once: bool) -> None:
    """Check that committed messages were processed once. Only abandoned batches may have processed more or fewer."""
    committed, given_up = places(runs.committed), places(runs.given_up)
    if is_at_most_once:
        assert runs.processed <= committed
        assert committed - runs.processed <= given_up
        return
    assert committed <= runs.processed
    assert runs.processed - committed <= given_up


def check_written(runs: Runs, output: PostgresOutput) -> None:
    """Check that the output has each committed message once, as its newest writer wrote it.

    Further rows may come only from abandoned batches.
    """
    rows = {(partition, offset): value for partition, offset, value in output.rows()}
    assert len(rows) == len(output.rows())
    written = {at: int(value.rpartition(" by ")[2]) for at, value in rows.items()}
    assert rows == {at: message(epoch, *at) for at, epoch in written.items()}
    newest: dict[tuple[int, int], int] = {}
    for epoch, *at in sorted(places(runs.committed)):
        newest[at[0], at[1]] = epoch
    assert newest.keys() | {tuple(at) for _, *at in places(runs.skipped)} <= written.keys()
    given_up = places(runs.given_up)
    assert {at for at, epoch in written.items() if newest.get(at) != epoch and (epoch, *at) not in given_up} == set()
    assert {at for at, epoch in newest.items() if written[at] < epoch} == set()
    assert runs.skipped


def places(ranges: list[ClaimedRange]) -> Counter[Place]:
    """Return each message of these ranges."""
    return Counter(
        (range_.epoch, range_.partition, offset) for range_ in ranges for offset in range(range_.start, range_.end)
    )


def frame(processed: list[Place]) -> FakeFrame:
    """Return the rows of these messages. Each names the claim that wrote it."""
    return FakeFrame(COLUMNS, tuple((*at, message(epoch, *at)) for epoch, *at in processed))


def message(epoch: int, partition: int, offset: int) -> str:
    """Return the value of a row."""
    return f"{value_of(partition, offset, PARTITIONS)} by {epoch}"
