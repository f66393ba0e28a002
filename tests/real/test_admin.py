"""Pause, reposition and resume a group on a real broker, from the shell and from Dagster, while a member works."""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

import dagster as dg
import pytest

from marshal_dagster.cli.connections import operator_name
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.claims import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ClaimLostError, GroupPausedError, PlanRejectedError
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
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from tests.cli import Answer, start
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

GROUP = "etl"
SETTINGS = GroupSettings(60_000)
"""The lease does not end between a claim and its commit, even if this process is stopped for a while."""
PARTITIONS, MESSAGES = 2, 400
STEP = 7

Call = Callable[..., Answer]
Batch = tuple[int, int, int, int]
"""Partition, generation, start and end."""


class Worker(threading.Thread):
    """A member that claims both partitions, commits a few offsets of each and releases, in a loop.

    It waits while the group is paused.
    """

    def __init__(self, connection: KafkaConnection, coordination_topic: str, data_topic: str, topic_id: str) -> None:
        super().__init__(daemon=True)
        self.done: list[Batch] = []
        self.turns = 0
        self.is_waiting = threading.Event()
        self.failure: BaseException | None = None
        self._over = threading.Event()
        log = KafkaLog(connection, coordination_topic, SETTINGS.heartbeat_interval_ms)
        self._rationalizer = Rationalizer(log, topics=[data_topic])
        self._topic, self._topic_id = data_topic, topic_id

    def run(self) -> None:
        """Work until `stop` is called."""
        try:
            while not self._over.wait(0.02):
                self._turn()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.failure = error

    def stop(self) -> None:
        """Let the worker finish its turn, then end it."""
        self._over.set()
        self.join(WITHIN_S)
        self._rationalizer.close()

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds. Fail at once if the worker has failed."""

        def holds() -> bool:
            assert self.failure is None
            return bool(condition())

        wait_until(holds, what)

    def _turn(self) -> None:
        member = Member(GROUP, "worker", new_instance_id("worker"))
        claimer = Claimer(self._rationalizer, member, self._topic, SETTINGS)
        try:
            claimer.ensure_group_settings()
            if claimer.paused_until_s() is not None:
                self.is_waiting.set()
                return
            self.is_waiting.clear()
            self._work(claimer)
        except (ClaimLostError, GroupPausedError, PlanRejectedError):
            pass  # an operator was faster
        finally:
            claimer.release()
            self.turns += 1

    def _work(self, claimer: Claimer) -> None:
        if not claimer.claim(range(PARTITIONS)):
            return
        claimer.name_data_topic(self._topic_id)
        keys = {claim: claimer.key(claim) for claim in claimer.claims}
        begun = {number: (key.generation, key.offset or 0) for number, key in keys.items()}
        claimer.beat({number: offset for number, (_, offset) in begun.items()})
        ends = {
            number: keys[number].plan_end or min(offset + STEP, MESSAGES)
            for number, (_, offset) in begun.items()
            if offset < MESSAGES
        }
        if ends:
            claimer.plan(ends)
            claimer.commit(ends)
            self.done += [(number, *begun[number], end) for number, end in ends.items()]


def starts_by_generation(done: list[Batch]) -> dict[int, list[int]]:
    """Return where each partition's generations start. Check that batches of a generation follow without a gap."""
    starts: dict[int, list[int]] = defaultdict(list)
    at: dict[int, tuple[int, int]] = {}
    for partition, generation, start_offset, end in done:
        if partition not in at or at[partition][0] != generation:
            starts[partition].append(start_offset)
        else:
            assert at[partition] == (generation, start_offset)
        at[partition] = (generation, end)
    return dict(starts)


@pytest.fixture
def call(kafka: str, coordination_topic: str) -> Call:
    """A function that runs the command line with the suite's broker and the test's coordination topic."""
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": kafka, "MARSHAL_COORDINATION_TOPIC": coordination_topic}
    return lambda *arguments, given="": start(*arguments, given=given, environment=environment)


@pytest.fixture
def data(topic: MakeTopic, fill: Callable[[str, int, int], None]) -> str:
    """The data topic."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, PARTITIONS * MESSAGES)
    return name


@pytest.fixture
def worker(connection: KafkaConnection, coordination_topic: str, topics: Topics, data: str) -> Iterator[Worker]:
    """A member at work."""
    worker = Worker(connection, coordination_topic, data, topics.describe(data).topic_id)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
    assert worker.failure is None


def positions(call: Call, data: str) -> list[int | None]:
    """Return the group's positions."""
    return [row["offset"] for row in call("position", "get", GROUP, data, "--json").json["positions"]]


def test_a_group_is_paused_repositioned_and_resumed(call: Call, worker: Worker, topics: Topics, data: str) -> None:
    """The member waits during the pause, continues at the new positions, and skips or repeats no other message."""
    worker.wait_until(lambda: len(worker.done) >= 2 * PARTITIONS, "all partitions were worked on twice")
    paused = call("pause", GROUP, "--for", "10m", "--json")
    assert paused.code == 0, paused.err
    worker.wait_until(worker.is_waiting.is_set, "the worker waits for the end of the pause")
    reached = positions(call, data)
    turns = worker.turns
    refused = call("position", "reset", GROUP, data, "--to-offset", "9999", "--yes")
    assert (refused.code, f"beyond the end {MESSAGES}" in refused.error) == (2, True)
    shown = call("position", "reset", GROUP, data, "--to-earliest", "--dry-run")
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "A dry run: nothing was written.")
    requested = call("position", "reset", GROUP, data, "--to-offset", "0=3,1=5", given="y\n")
    assert requested.code == 0, requested.err
    assert positions(call, data) == [3, 5]
    assert topics.group_offsets(GROUP, data) == {0: 3, 1: 5}
    worker.wait_until(lambda: worker.turns > turns, "the worker takes another turn")
    assert worker.is_waiting.is_set(), "the earlier pause is in force again"
    resumed = call("resume", GROUP)
    assert resumed.code == 0, resumed.err
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    starts = starts_by_generation(worker.done)
    assert starts == {0: [0, 3], 1: [0, 5]}
    assert all(at is not None and at > 0 for at in reached)


def test_positions_are_set_while_a_member_is_at_work(call: Call, worker: Worker, data: str) -> None:
    """The member leaves, then continues at the new positions.

    The group was not paused before, so it is not left paused.
    """
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    answer = call("position", "reset", GROUP, data, "--shift-by", "-20", "--yes", "--wait", "5m", "--json")
    assert answer.code == 0, answer.err
    assert [(row["before"], row["after"], row["set"]) for row in answer.json["positions"]] == [
        (MESSAGES, MESSAGES - 20, True)
    ] * PARTITIONS
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    assert starts_by_generation(worker.done) == {0: [0, MESSAGES - 20], 1: [0, MESSAGES - 20]}
    assert not worker.is_waiting.is_set()


def test_dagster_pauses_repositions_and_resumes(  # noqa: PLR0917 - fixtures
    call: Call, worker: Worker, topics: Topics, data: str, kafka: str, coordination_topic: str
) -> None:
    """The Dagster jobs do the same as the commands, with the deployment's own claimer."""
    claimer = ClaimerResource(
        connection=KafkaConnectionConfig(bootstrap_servers=kafka), coordination_topic=coordination_topic, group=GROUP
    )

    def run(job: dg.JobDefinition, config: dg.Config) -> None:
        run_config = dg.RunConfig(ops={f"{job.name}_op": config})
        with dg.DagsterInstance.ephemeral() as instance:
            assert job.execute_in_process(run_config, instance, resources={"claimer": claimer}).success

    worker.wait_until(lambda: worker.done, "the worker has done something")
    run(build_pause_job(), PauseConfig(duration="10m"))
    worker.wait_until(worker.is_waiting.is_set, "the worker waits for the end of the pause")
    run(build_set_position_job(), SetPositionConfig(topic=data, to_offset="0=3,1=5", wait_s=WITHIN_S))
    assert positions(call, data) == [3, 5]
    assert topics.group_offsets(GROUP, data) == {0: 3, 1: 5}
    run(build_resume_job(), ResumeConfig())
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    assert starts_by_generation(worker.done) == {0: [0, 3], 1: [0, 5]}


def test_a_range_is_done_again_by_a_member_at_work(call: Call, worker: Worker, data: str) -> None:
    """The range is repeated, up to one batch beyond its end or until the pause. Then the position is restored."""
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    answer = call(
        *("reprocess", GROUP, data, "--partition", "1", "--from", "100", "--to", "150", "--within", "5m"),
        *("--wait", "5m", "--yes", "--json"),
    )
    assert answer.code == 0, answer.err
    (row,) = answer.json["partitions"]
    assert (row["stood_at"], row["goes_on_at"]) == (MESSAGES, MESSAGES)
    assert 150 <= row["reached"] <= MESSAGES
    assert positions(call, data) == [MESSAGES] * PARTITIONS
    assert starts_by_generation(worker.done) == {0: [0], 1: [0, 100]}
    assert worker.done[-1][3] == row["reached"]
    turns = worker.turns
    worker.wait_until(lambda: worker.turns > turns + 2, "the worker takes more turns")
    assert not worker.is_waiting.is_set()


def test_a_window_of_time_is_done_again_in_all_partitions(call: Call, worker: Worker, data: str) -> None:
    """The brokers' timestamps select the offsets; a window that ends before the first message has none."""
    worker.wait_until(lambda: positions(call, data) == [MESSAGES] * PARTITIONS, "the topic is drained")
    window = ("reprocess", GROUP, data, "--from-datetime", "2020-01-01T00:00Z", "--within", "5m", "--yes", "--json")
    assert call(*window, "--to-datetime", "2020-01-02T00:00Z").json["partitions"] == []
    answer = call(*window, "--to-datetime", "2100-01-01T00:00Z", "--wait", "5m")
    assert answer.code == 0, answer.err
    found = [(row["start"], row["end"], row["reached"], row["goes_on_at"]) for row in answer.json["partitions"]]
    assert found == [(0, MESSAGES, MESSAGES, MESSAGES)] * PARTITIONS
    assert starts_by_generation(worker.done) == {0: [0, 0], 1: [0, 0]}


def test_what_a_dead_member_holds_is_revoked(
    call: Call, connection: KafkaConnection, coordination_topic: str, topics: Topics, data: str
) -> None:
    """After the revocation its error names the operator, and other members can claim the partitions at once."""
    log = KafkaLog(connection, coordination_topic, SETTINGS.heartbeat_interval_ms)
    rationalizer = Rationalizer(log, topics=[data])
    dead = Claimer(rationalizer, Member(GROUP, "dead", new_instance_id("dead")), data, SETTINGS)
    dead.ensure_group_settings()
    assert len(dead.claim(range(PARTITIONS))) == PARTITIONS
    dead.name_data_topic(topics.describe(data).topic_id)
    dead.beat(dict.fromkeys(range(PARTITIONS), 4))
    answer = call("revoke", GROUP, data, "--instance", "dead", "--yes", "--json")
    assert (answer.code, [row["revoked"] for row in answer.json["claims"]]) == (0, [True] * PARTITIONS)
    with pytest.raises(ClaimLostError, match=rf"because an operator \({re.escape(operator_name())}\) revoked it"):
        dead.beat()
    other = Claimer(rationalizer, Member(GROUP, "other", new_instance_id("other")), data, SETTINGS)
    other.ensure_group_settings()
    assert len(other.claim(range(PARTITIONS))) == PARTITIONS
    other.release()
    rationalizer.close()
    assert positions(call, data) == [4] * PARTITIONS
