"""Dagster's runs go on while an operator pauses, repositions and resumes their group ten times, at random moments."""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.operator_jobs import (
    PauseConfig,
    ResumeConfig,
    SetPositionConfig,
    build_pause_job,
    build_resume_job,
    build_set_position_job,
)
from marshal_dagster.protocol.ranges import ClaimedRange
from marshal_dagster.resources import ClaimerResource, KafkaConnectionConfig
from tests.real.conftest import MakeTopic
from tests.real.killing import read_messages

GROUP = "etl"
PARTITIONS, MESSAGES = 3, 300
MAX_RECORDS = 30
ROUNDS = 10
WITHIN_S = 180.0

Place = tuple[int, int, int]
"""Epoch of the claim, partition and offset."""


@dataclass(slots=True)
class Runs:
    """What runs have done."""

    processed: Counter[Place] = field(default_factory=Counter)
    committed: list[ClaimedRange] = field(default_factory=list)
    given_up: list[ClaimedRange] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class Deployment:
    """A group's job, as Dagster would start it again and again, and the operator's jobs."""

    instance: dg.DagsterInstance
    connection: KafkaConnection
    claimer: dict[str, Any]
    topic: str
    runs: Runs = field(default_factory=Runs)
    over: threading.Event = field(default_factory=threading.Event)

    def job(self, seed: int) -> dg.JobDefinition:
        """Give the job that takes one batch; it takes its time, by `seed`."""
        chance, runs, topic = random.Random(seed), self.runs, self.topic

        @dg.op(required_resource_keys={"claimer"})
        def work(context: dg.OpExecutionContext) -> None:
            batch = context.resources.claimer.claimed_batch(context, topic=topic, max_records=MAX_RECORDS)
            try:
                with batch:
                    if batch.idle is not None:
                        return
                    batch.begin_processing()
                    time.sleep(chance.uniform(0, 0.1))
                    epochs = {one.partition: one.epoch for one in batch.ranges}
                    for partition, offset in read_messages(self.connection, batch.ranges):
                        with runs.lock:
                            runs.processed[epochs[partition], partition, offset] += 1
            except MarshalError:
                runs.given_up += batch.ranges
                raise
            finally:
                if batch.idle is None:
                    runs.committed += [each.range for each in batch.report() if each.state == "committed"]

        @dg.job(name=f"work_{seed}", executor_def=dg.in_process_executor)
        def orders() -> None:
            work()

        return orders

    def go_on(self, seed: int) -> None:
        """Start one run after another until it is over."""
        job, chance = self.job(seed), random.Random(-seed)
        while not self.over.wait(chance.uniform(0, 0.2)):
            self.execute(job, None, raise_on_error=False)

    def execute(self, job: dg.JobDefinition, config: dg.Config | None, **options: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401
        """Run a job, with a claimer of its own as each run has."""
        run_config = None if config is None else dg.RunConfig(ops={f"{job.name}_op": config})
        resources = {"claimer": ClaimerResource(**self.claimer)}
        return job.execute_in_process(run_config, self.instance, resources=resources, **options)

    def set_positions(self, config: SetPositionConfig) -> dict[int, int]:
        """Set positions; give where each partition that was set goes on."""
        result = self.execute(build_set_position_job(), config)
        (output,) = [each for each in result.all_node_events if each.is_successful_output]
        table = output.step_output_data.metadata["before_and_after"]
        assert isinstance(table, dg.TableMetadataValue)
        rows = [record.data for record in table.records]
        return {int(row["partition"]): int(row["after"]) for row in rows if row["set"]}  # type: ignore[arg-type] # ints


@pytest.fixture(params=["at_least_once", "at_most_once"])
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
    claimer = {
        "connection": KafkaConnectionConfig(bootstrap_servers=kafka),
        "coordination_topic": coordination_topic,
        "group": GROUP,
        "heartbeat_interval_s": 2.0,
        "delivery": request.param,
    }
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield Deployment(instance, connection, claimer, name)


def test_nothing_is_lost_or_repeated_however_it_is_operated(deployment: Deployment, topics: Topics) -> None:
    """What was committed was done once, and batches follow on one another but where the position was set."""
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
    deadline = time.monotonic() + WITHIN_S
    while topics.group_offsets(GROUP, deployment.topic) != dict.fromkeys(range(PARTITIONS), MESSAGES):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    deployment.over.set()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive()
    check_committed(deployment.runs, starts)
    check_processed(deployment.runs, is_at_most_once=deployment.claimer["delivery"] == "at_most_once")


def somewhere(chance: random.Random, topic: str) -> SetPositionConfig:
    """Say where the group shall go on."""
    kind = chance.choice(["offsets", "one partition", "back", "earliest"])
    if kind == "offsets":
        given = ",".join(f"{number}={chance.randrange(MESSAGES)}" for number in range(PARTITIONS))
        return SetPositionConfig(topic=topic, offsets=given)
    if kind == "one partition":
        return SetPositionConfig(topic=topic, offsets=f"{chance.randrange(PARTITIONS)}={chance.randrange(MESSAGES)}")
    if kind == "back":
        return SetPositionConfig(topic=topic, back=chance.randint(1, 2 * MAX_RECORDS))
    return SetPositionConfig(topic=topic, earliest=True, partitions=str(chance.randrange(PARTITIONS)))


def check_committed(runs: Runs, starts: dict[int, list[int]]) -> None:
    """Each range begins where the last one ended, or where the position was set since; in the end all is read."""
    assert sum(map(len, starts.values())) > ROUNDS
    for partition in range(PARTITIONS):
        ours = sorted((one for one in runs.committed if one.partition == partition), key=lambda one: one.epoch)
        at, to_come = 0, iter(starts[partition])
        for one in ours:
            while one.start != at:
                at = next(to_come)
            at = one.end
        assert at == MESSAGES
        assert {MESSAGES, *(one.start for one in ours)} >= set(to_come)


def check_processed(runs: Runs, *, is_at_most_once: bool) -> None:
    """What was committed was processed once; more or less of it only by batches that were given up."""

    def places(ranges: list[ClaimedRange]) -> Counter[Place]:
        return Counter((one.epoch, one.partition, offset) for one in ranges for offset in range(one.start, one.end))

    committed, given_up = places(runs.committed), places(runs.given_up)
    if is_at_most_once:
        assert runs.processed <= committed
        assert committed - runs.processed <= given_up
        return
    assert committed <= runs.processed
    assert runs.processed - committed <= given_up
