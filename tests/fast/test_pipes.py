"""A batch that a script processes through Dagster Pipes: what both sides exchange, and when nothing is committed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import MagicMock

import dagster as dg
import pytest
from dagster_pipes import (
    DAGSTER_PIPES_CONTEXT_ENV_VAR,
    PipesCliArgsParamsLoader,
    PipesContext,
    PipesDefaultContextLoader,
    PipesDefaultMessageWriter,
    PipesEnvVarParamsLoader,
    PipesMappingParamsLoader,
    PipesParamsLoader,
    encode_param,
)

from marshal_dagster.assets.decorator import marshal_asset
from marshal_dagster.batches import ClaimedBatch, RangeOptions, submitted
from marshal_dagster.batches.manifest import EXTRAS_KEY, MESSAGE_KEY, BatchManifest, ScriptOutcome
from marshal_dagster.batches.submitted import SubmittedBatch, pipes_parameters, submitted_batch
from marshal_dagster.coordination.claim_watch import ClaimWatch
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    ConfigurationError,
    DataTopicChangedError,
    FailingRecordError,
    GroupPausedError,
)
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.secret_text import SecretText
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.pipes import run_with_pipes
from marshal_dagster.protocol.messages import DeliveryMode, Heartbeat, RevokingClaim
from marshal_dagster.sinks import RemoteSink, Verdict, WriteResult
from marshal_dagster.spark import job_control, reader
from tests.batch_fixtures import TOPIC, Scene
from tests.conditions import wait_until
from tests.fast.test_dagster_ops import Stand, instance, stand

__all__ = ["instance", "stand"]

AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE = DeliveryMode
CONNECTION = KafkaConnection(
    bootstrap_servers="127.0.0.1:1",
    security_protocol="SASL_PLAINTEXT",
    sasl_mechanism="PLAIN",
    username="u",
    password=SecretText("made-up"),
)


class Channel:
    """The script's side of a stand-in for Pipes: everything passes through JSON."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self.extras = json.loads(json.dumps(extras))
        self.messages: list[Any] = []

    def report_custom_message(self, payload: Any) -> None:  # noqa: ANN401 - as dagster-pipes
        """Keep a message."""
        self.messages.append(json.loads(json.dumps(payload)))


Script = Callable[[Channel], object]


class Client:
    """A stand-in for a client of Pipes, which runs the script in this process."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.arguments: list[dict[str, Any]] = []

    def run(self, *, context: object, extras: Mapping[str, Any], **arguments: Any) -> Any:  # noqa: ANN401, ARG002
        """Run the script; return its messages."""
        self.arguments.append(arguments)
        channel = Channel(extras)
        self.script(channel)
        return SimpleNamespace(get_custom_messages=lambda: channel.messages)


CONTEXT = cast("Any", SimpleNamespace(log=MagicMock()))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Return a group whose topic has messages, and whose scripts read the same log and topics."""
    scene = Scene()
    scene.data.make(messages=5)
    reach(monkeypatch, scene)
    return scene


def reach(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Let scripts reach the scene's log and topics, and do without Spark."""
    monkeypatch.setattr(submitted, "_connect", lambda *_: (Rationalizer(scene.log()), scene.data))
    monkeypatch.setattr(submitted, "ClaimWatch", partial(ClaimWatch, clock=scene.clock))
    monkeypatch.setattr(submitted, "check_session", lambda _: None)
    monkeypatch.setattr(job_control, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(reader, "read_ranges", lambda *_, **__: "frame")
    monkeypatch.setattr(reader, "offsets_read", lambda _: {partition: [(0, 5)] for partition in range(3)})


def process(scene: Scene, channel: Channel) -> None:
    """Read the batch and write it to the output of its mode, as a script does."""
    with submitted_batch(channel, CONNECTION) as batch:
        work(scene, batch)


def work(scene: Scene, batch: SubmittedBatch) -> None:
    """Read and write within the block."""
    batch.begin_processing()
    messages = scene.data.read(batch.ranges)
    if batch.mode is EFFECTIVELY_ONCE:
        batch.write(scene.sink, cast("Any", messages))
    else:
        scene.processed.update(messages)


def launch(batch: ClaimedBatch, script: Script, **more: Any) -> Any:  # noqa: ANN401 - what the client returns
    """Process a batch with a script in this process."""
    return run_with_pipes(CONTEXT, batch, cast("Any", Client(script)), **more)


def run(scene: Scene, script: Script, mode: DeliveryMode = EFFECTIVELY_ONCE) -> ClaimedBatch:
    """Claim a batch, process it with a script, and commit it."""
    with scene.batch(scene.delivery(mode)) as batch:
        launch(batch, script)
    return batch


def counted_once(scene: Scene, mode: DeliveryMode) -> bool:
    """Return whether each message is in the output once."""
    return scene.counts(mode) == dict.fromkeys(scene.data.all_messages(), 1)


# A batch that succeeds


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
@pytest.mark.parametrize("ranges", [False, True])
def test_a_script_processes_the_batch_of_its_run(scene: Scene, mode: DeliveryMode, *, ranges: bool) -> None:
    """The script gets exactly the ranges, the run commits them, and nothing is left to do."""
    options = {"ranges": RangeOptions(size=10)} if ranges else {}
    with scene.batch(scene.delivery(mode, ranges=ranges), **options) as batch:
        assert launch(batch, partial(process, scene), job="a") is not None
    assert batch.committed
    assert counted_once(scene, mode)
    assert scene.key().offset == 5
    assert scene.work(scene.delivery(mode, ranges=ranges)).idle is not None


def test_the_clients_arguments_and_extras_reach_it(scene: Scene) -> None:
    """The batch is one more extra. Clients of AWS add to the arguments, so each call gets a copy of them."""
    arguments: dict[str, Any] = {"image": "spark:4", "params": {"tags": []}}
    seen: list[Any] = []

    def script(channel: Channel) -> None:
        seen.append(channel.extras["mine"])
        process(scene, channel)

    client = Client(script)
    with scene.batch(scene.delivery()) as batch:
        run_with_pipes(CONTEXT, batch, cast("Any", client), extras={"mine": 7}, **arguments)
    assert (seen, client.arguments) == ([7], [arguments])
    client.arguments[0]["params"]["tags"].append("run 1")
    assert arguments == {"image": "spark:4", "params": {"tags": []}}
    with pytest.raises(ConfigurationError, match="which is that of the batch"):
        launch(scene.batch(scene.delivery()), print, extras={EXTRAS_KEY: 1})


def test_a_function_may_make_a_client_for_each_batch(scene: Scene) -> None:
    """Readers of messages in an object store count what they have read, so they serve one script only."""
    made: list[Client] = []

    def make() -> Any:  # noqa: ANN401 - a stand-in for a client
        made.append(Client(partial(process, scene)))
        return made[-1]

    for count in (1, 2):
        with scene.batch(scene.delivery(), max_records=6) as batch:
            run_with_pipes(CONTEXT, batch, make)
        assert (len(made), batch.committed) == (count, True)


def test_a_class_makes_a_client_for_each_batch(scene: Scene) -> None:
    """A class has the method `run` too, but is no client."""

    class Own(Client):
        def __init__(self) -> None:
            super().__init__(partial(process, scene))

    with scene.batch(scene.delivery()) as batch:
        run_with_pipes(CONTEXT, batch, cast("Any", Own))
    assert batch.committed


def test_the_manifest_has_the_batch_and_no_secret(scene: Scene) -> None:
    """Everything that a script needs to know, except how to connect."""
    with scene.batch(scene.delivery()) as batch:
        extras = json.loads(json.dumps(batch.manifest().to_extras()))
        assert BatchManifest.from_extras(extras) == batch.manifest()
        assert batch.manifest().ranges == batch.ranges
        assert "127.0.0.1" not in str(extras)
        launch(batch, partial(process, scene))


@pytest.mark.slow
def test_a_thousand_partitions_fit_into_one_environment_variable_and_one_line_of_a_log() -> None:
    """Linux allows 128 KiB for one variable, platforms less for all job arguments. Kubernetes cuts lines at 16 KiB."""
    scene = Scene()
    scene.data.make(partitions=1_000, messages=1)
    with suppress(BatchAbortedError), scene.batch(scene.delivery()) as batch:
        assert len(batch.ranges) == 1_000
        assert len(encode_param({"data": {"extras": batch.manifest().to_extras()}})) < 16_384
        result = WriteResult(batch.ranges[::2], batch.ranges[1::2], dict.fromkeys(range(0, 1_000, 2), 1_000_000))
        message = ScriptOutcome(batch.batch_id, "a", result).to_message()
        assert len(json.dumps(message)) < 16_384
        assert ScriptOutcome.from_message(message, batch.manifest()) == ScriptOutcome(batch.batch_id, "a", result)


def test_what_the_script_adds_is_metadata_of_the_batch(scene: Scene) -> None:
    """Rows, note and metadata of the script are those of the run's batch."""

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            work(scene, batch)
            batch.metadata |= {"files": ["a", "b"], "day": date(2026, 1, 2)}
            assert batch._result is not None
            batch._result = replace(batch._result, rows={0: 5, 1: 5, 2: 5}, note="read it so")

    batch = run(scene, script)
    assert batch.metadata == {"files": ["a", "b"], "day": "2026-01-02"}
    assert batch.outcome == WriteResult(batch.ranges, (), {0: 5, 1: 5, 2: 5}, "read it so")


def test_nothing_to_process_starts_no_script(scene: Scene) -> None:
    """An idle batch, and one that the sink has already, cost no cluster."""

    def fail(_: Channel) -> None:
        raise AssertionError

    def die() -> None:
        raise OSError("killed")

    scene.sink.after_write = die
    with pytest.raises(OSError, match="killed"):
        run(scene, partial(process, scene))
    scene.sink.after_write = lambda: None
    with scene.batch(scene.delivery(EFFECTIVELY_ONCE)) as batch:
        assert (batch.ranges, len(batch.skipped)) == ((), 3)
        assert launch(batch, fail) is None
    assert batch.committed
    with scene.batch(scene.delivery(EFFECTIVELY_ONCE)) as batch:
        assert launch(batch, fail) is None


def test_the_output_that_only_a_script_reaches(scene: Scene) -> None:
    """The address travels to the script. What a script had written before its run died is skipped by its sink."""
    outputs: list[str] = []

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            outputs.append(batch.output)
            work(scene, batch)

    def dies(channel: Channel) -> None:
        script(channel)
        raise OSError("the run is killed")

    def attempt(script: Script) -> ClaimedBatch:
        remote = scene.delivery(EFFECTIVELY_ONCE).claimed_batch(_request(), RemoteSink("s3a://lake/orders"))
        with remote as batch:
            launch(batch, script)
        return batch

    with pytest.raises(OSError, match="killed"):
        attempt(dies)
    batch = attempt(script)
    assert outputs == ["s3a://lake/orders"] * 2
    assert batch.outcome is not None
    assert (batch.outcome.taken, batch.outcome.skipped) == ((), batch.ranges)
    assert counted_once(scene, EFFECTIVELY_ONCE)


def _request() -> Any:  # noqa: ANN401
    from marshal_dagster.batches import BatchRequest

    return BatchRequest(topic=TOPIC)


# Outcomes that are refused


def outcome(scene: Scene, channel: Channel) -> dict[str, Any]:
    """Process the batch, and return the outcome instead of reporting it."""
    process(scene, channel)
    message: dict[str, Any] = channel.messages.pop()
    return message


def nothing(_: Scene, __: Channel) -> None:
    """End without an outcome, as a script that is killed and whose platform reports success."""


def unread(_: Scene, channel: Channel) -> None:
    """Ignore that the block has not read the batch."""
    with suppress(BatchAbortedError), submitted_batch(channel, CONNECTION):
        pass


def read_only(_: Scene, channel: Channel) -> None:
    """Ignore that nothing was written."""
    with suppress(BatchAbortedError), submitted_batch(channel, CONNECTION) as batch:
        batch.begin_processing()


def failed(_: Scene, channel: Channel) -> None:
    """Ignore that the block failed."""
    with suppress(OSError), submitted_batch(channel, CONNECTION) as batch:
        batch.begin_processing()
        raise OSError("disk full")


def other_message(_: Scene, channel: Channel) -> None:
    """Report only messages of its own."""
    channel.report_custom_message({"rows": 5})
    channel.report_custom_message("done")


def of_another_batch(scene: Scene, channel: Channel) -> None:
    """Report the outcome of another batch, as with a channel that two scripts share."""
    message = outcome(scene, channel)
    message[MESSAGE_KEY]["batch_id"] = "run9.other"
    channel.report_custom_message(message)


def twice(scene: Scene, channel: Channel) -> None:
    """Report two outcomes of one attempt that differ."""
    message = outcome(scene, channel)
    channel.report_custom_message(message)
    message[MESSAGE_KEY]["rows"] = [1, 1, 1]
    channel.report_custom_message(message)


def both_took(scene: Scene, channel: Channel) -> None:
    """Report two attempts that both wrote the batch."""
    message = outcome(scene, channel)
    channel.report_custom_message(message)
    message[MESSAGE_KEY]["attempt"] = "second"
    channel.report_custom_message(message)


def incomplete(scene: Scene, channel: Channel) -> None:
    """Report rows of only a part of the batch."""
    message = outcome(scene, channel)
    message[MESSAGE_KEY]["rows"].pop()
    channel.report_custom_message(message)


def other_offsets(scene: Scene, channel: Channel) -> None:
    """Report other offsets than those of the batch."""
    with submitted_batch(channel, CONNECTION) as batch:
        work(scene, batch)
        assert batch._result is not None
        last = batch.ranges[-1]
        batch._result = replace(batch._result, taken=(*batch.ranges[:-1], replace(last, end=last.end + 1)))


def other_version(scene: Scene, channel: Channel) -> None:
    """Report in the form of another version."""
    message = outcome(scene, channel)
    message[MESSAGE_KEY]["version"] = 2
    channel.report_custom_message(message)


def malformed(_: Scene, channel: Channel) -> None:
    """Report no mapping."""
    channel.report_custom_message({MESSAGE_KEY: ["done"]})


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (nothing, "ended without an outcome"),
        (unread, "ended without an outcome"),
        (read_only, "ended without an outcome"),
        (failed, "ended without an outcome"),
        (other_message, "ended without an outcome"),
        (of_another_batch, "ended without an outcome"),
        (twice, "two different outcomes"),
        (both_took, "both wrote a range"),
        (incomplete, "cannot be used"),
        (other_offsets, "not those of the batch"),
        (other_version, "version 2"),
        (malformed, "cannot be used"),
    ],
)
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_outcome_that_proves_nothing_commits_nothing(
    scene: Scene, script: Callable[[Scene, Channel], None], why: str, *, is_swallowed: bool
) -> None:
    """The run fails, also if its function ignores the error; the next run repeats the same ranges, each once."""
    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))

    def attempt() -> None:
        with batch, suppress(BatchAbortedError) if is_swallowed else nullcontext():
            launch(batch, partial(script, scene))

    with pytest.raises(BatchAbortedError, match="nothing was written" if is_swallowed else why):
        attempt()
    assert not batch.committed
    assert (scene.key().offset, scene.key().plan_end) == (0, 5)
    assert run(scene, partial(process, scene)).committed
    assert counted_once(scene, EFFECTIVELY_ONCE)


@pytest.mark.parametrize("script", [nothing, unread])
def test_an_at_least_once_batch_is_not_committed_by_an_ignored_failure(
    scene: Scene, script: Callable[[Scene, Channel], None]
) -> None:
    """Without a sink, too, only an outcome makes the batch count as processed."""
    batch = scene.batch(scene.delivery())

    def attempt() -> None:
        with batch, suppress(BatchAbortedError):
            launch(batch, partial(script, scene))

    with pytest.raises(BatchAbortedError, match="nothing was read"):
        attempt()
    assert not batch.committed


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_message_may_come_twice_and_a_script_may_be_started_twice(scene: Scene, mode: DeliveryMode) -> None:
    """Platforms start a failed driver again; what the first attempt wrote, the sink skips in the second."""

    def script(channel: Channel) -> None:
        process(scene, channel)
        channel.messages *= 2
        process(scene, channel)

    batch = run(scene, script, mode)
    assert batch.committed
    if mode is EFFECTIVELY_ONCE:
        assert batch.outcome == WriteResult(batch.ranges, (), {})
        assert counted_once(scene, mode)


def test_the_outcome_of_an_earlier_batch_is_ignored(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A client that is used again may read the messages of its earlier script again."""

    def script(channel: Channel) -> None:
        of_another_batch(scene, channel)
        process(scene, channel)

    assert run(scene, script).committed
    assert "an outcome of another batch is ignored: run9.other" in caplog.text


def test_a_failed_script_commits_nothing(scene: Scene) -> None:
    """The error of the client is that of the batch. The attempt counts, because the plan is written before."""

    def script(_: Channel) -> None:
        raise ChildProcessError("code 1")

    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE), late_plan=True)
    with pytest.raises(ChildProcessError), batch:
        launch(batch, script)
    assert not batch.committed
    assert scene.key().plan_end == 5


def test_at_most_once_is_refused_before_anything_is_committed(scene: Scene) -> None:
    """The error is one line with the reason."""
    batch = scene.batch(scene.delivery(AT_MOST_ONCE))
    with pytest.raises(ConfigurationError, match=r"cannot process a batch in at_most_once, .* \(batch\.read\)"), batch:
        launch(batch, print)
    assert not batch.committed
    assert not batch.dropped


def test_a_group_that_is_paused_before_the_plan_starts_no_script(scene: Scene) -> None:
    """The plan is refused then, so the batch is idle."""
    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE), late_plan=True)
    with suppress(GroupPausedError), batch:
        scene.pause()
        launch(batch, print)
        raise AssertionError
    assert batch.idle is not None


# Claims that are lost


def lose(scene: Scene) -> None:
    """Let another member take the batch over."""
    scene.wait_until_stale()
    scene.delivery(EFFECTIVELY_ONCE).claimed_batch(_request(), scene.sink).__enter__()


def before_the_script(scene: Scene, channel: Channel) -> None:
    """Lose the claim while the script waits for its cluster."""
    lose(scene)
    with submitted_batch(channel, CONNECTION):
        raise AssertionError("a script does not begin without its claim")


def before_it_reads(scene: Scene, channel: Channel) -> None:
    """Lose the claim before the script reads."""
    with submitted_batch(channel, CONNECTION) as batch:
        lose(scene)
        work(scene, batch)


def before_it_writes(scene: Scene, channel: Channel) -> None:
    """Lose the claim while the sink computes the rows."""
    scene.sink.while_reading = lambda: lose(scene)
    process(scene, channel)


def before_it_reports(scene: Scene, channel: Channel) -> None:
    """Lose the claim after the sink has written."""
    scene.sink.after_write = lambda: lose(scene)
    process(scene, channel)


def after_it_reported(scene: Scene, channel: Channel) -> None:
    """Lose the claim before the run commits."""
    process(scene, channel)
    lose(scene)


@pytest.mark.parametrize(
    "script", [before_the_script, before_it_reads, before_it_writes, before_it_reports, after_it_reported]
)
def test_a_claim_that_is_lost_at_any_step_commits_nothing(
    scene: Scene, script: Callable[[Scene, Channel], None]
) -> None:
    """The script reads the loss in the log by itself, and the run loses its lease: each message is written once."""
    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))
    with pytest.raises(ClaimLostError), batch:
        launch(batch, partial(script, scene))
    assert not batch.committed
    has_written = script in {before_it_reports, after_it_reported}
    assert bool(scene.sink.rows) is has_written
    scene.sink.while_reading = scene.sink.after_write = lambda: None
    scene.wait_until_stale()
    batch = run(scene, partial(process, scene))
    assert bool(batch.skipped) is has_written
    assert counted_once(scene, EFFECTIVELY_ONCE)


def test_a_script_without_its_run_stops(scene: Scene) -> None:
    """If no heartbeat comes any more, the script writes nothing, although no other member has claimed."""

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            batch.begin_processing()
            scene.wait_until_stale()
            batch.write(scene.sink, cast("Any", scene.data.read(batch.ranges)))

    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))
    with pytest.raises(BatchAbortedError, match=r"no heartbeat .* its run has died"), batch:
        launch(batch, script)
    assert not scene.sink.rows


def test_the_script_ends_its_spark_jobs_when_the_claim_is_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at its claims while Spark works."""
    cancelled: list[str] = []
    monkeypatch.setattr(job_control, "cancel", lambda _, batch_id, why: cancelled.append(f"{batch_id}: {why}"))
    monkeypatch.setattr(submitted, "_LOOK_PART", 1e-6)

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            batch.read(cast("Any", object()))
            for range_ in batch.ranges:
                scene.about(RevokingClaim, "ops.1", range_.partition, epoch=range_.epoch)
            wait_until(lambda: bool(cancelled), "the jobs are cancelled")
            batch.check()

    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE))
    with pytest.raises(ClaimLostError), batch:
        launch(batch, script)
    assert cancelled[0].startswith(f"{batch.batch_id}: group 'etl': the claim of batch")


def test_a_batch_that_was_given_up_stays_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script has cancelled its jobs, so a heartbeat that comes late after all changes nothing."""
    cancelled: list[str] = []
    monkeypatch.setattr(job_control, "cancel", lambda _, __, why: cancelled.append(why))
    monkeypatch.setattr(submitted, "_LOOK_PART", 1e-6)

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            batch.read(cast("Any", object()))
            scene.wait_until_stale()
            wait_until(lambda: bool(cancelled), "the jobs are cancelled")
            for range_ in batch.ranges:
                scene.about(Heartbeat, batch.batch_id, range_.partition, offset=0)
            ClaimWatch(Rationalizer(scene.log()), batch.batch_id, batch.ranges, scene.clock).require_held()
            batch.check()

    batch = scene.batch(scene.delivery())
    with pytest.raises(BatchAbortedError, match="no heartbeat"), batch:
        launch(batch, script)


@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_a_topic_that_is_re_created_is_not_written(scene: Scene, mode: DeliveryMode) -> None:
    """The messages may be of either topic."""

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            scene.data.make(messages=5)
            work(scene, batch)

    batch = scene.batch(scene.delivery(mode))
    with pytest.raises(DataTopicChangedError, match="it was re-created"), batch:
        launch(batch, script)
    assert not scene.counts(mode)
    assert not batch.committed


def test_a_batch_that_is_lost_already_starts_no_script(scene: Scene) -> None:
    """The run checks its claims and the topic before it pays for a cluster."""

    def fail(_: Channel) -> None:
        raise AssertionError

    def attempt(batch: ClaimedBatch) -> None:
        with batch:
            scene.data.make(messages=5)
            launch(batch, fail)

    with pytest.raises(DataTopicChangedError):
        attempt(scene.batch(scene.delivery()))


# The script's side


@pytest.mark.parametrize("extras", [{}, {EXTRAS_KEY: None}, MagicMock()])
def test_a_script_that_no_run_has_started_gets_one_line(extras: Any) -> None:  # noqa: ANN401
    """Outside of Dagster, Pipes gives a script a mock."""
    with (
        pytest.raises(ConfigurationError, match="let a run start this script with marshal_dagster"),
        submitted_batch(cast("Any", SimpleNamespace(extras=extras)), CONNECTION),
    ):
        raise AssertionError


@pytest.mark.thorough
def test_a_script_loads_only_three_packages() -> None:
    """Dagster and the other requirements of the library may be missing on a cluster."""
    names = "submitted_batch KafkaConnection FileSink DeltaSink spark_settings start_session pipes_parameters"
    modules = "coordination.kafka_log coordination.kafka_snapshots kafka.admin_client spark.job_control"
    code = f"""
import sys
from importlib import import_module

import dagster_pipes
import marshal_dagster

for name in {names.split()}:
    getattr(marshal_dagster, name)
for name in {modules.split()}:
    import_module(f"marshal_dagster.{{name}}")
found = {{name.partition(".")[0] for name, module in sys.modules.items() if "site-packages" in str(module)}}
print(*sorted(found - {{"_distutils_hack"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["confluent_kafka", "dagster_pipes"]


def test_a_manifest_of_another_version_is_refused(scene: Scene) -> None:
    """Run and script are installed apart."""
    with suppress(BatchAbortedError), scene.batch(scene.delivery()) as batch:
        extras = batch.manifest().to_extras()
    extras[EXTRAS_KEY]["version"] = 2
    with pytest.raises(ConfigurationError, match="install the same version"):
        BatchManifest.from_extras(extras)


def test_a_script_with_another_coordination_topic_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of the same name on another cluster would show that nothing is claimed."""
    other = Scene()
    monkeypatch.setattr(submitted, "_connect", lambda *_: (Rationalizer(other.log()), scene.data))
    batch = scene.batch(scene.delivery())
    with pytest.raises(ConfigurationError, match="connect to the cluster of the run"), batch:
        launch(batch, partial(process, scene))


def test_a_sink_that_does_not_report_each_range_commits_nothing(scene: Scene) -> None:
    """The script fails, with the ranges that the sink has left out."""

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            batch.begin_processing()
            sink = SimpleNamespace(write=lambda _, ranges, *__: WriteResult(ranges[1:], (), {}))
            batch.write(cast("Any", sink), cast("Any", []))

    with pytest.raises(BatchAbortedError, match="once as taken or skipped"):
        run(scene, script)


def test_calls_out_of_order_are_refused(scene: Scene) -> None:
    """Each error states what to do."""
    refused: list[str] = []

    def note(call: Callable[[], object]) -> None:
        with pytest.raises(ConfigurationError) as error:
            call()
        refused.append(str(error.value))

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            note(lambda: batch.output)
            note(lambda: batch.write(scene.sink, cast("Any", [])))
            work(scene, batch)
            note(lambda: batch.write(scene.sink, cast("Any", [])))

    def plain(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            batch.begin_processing()
            note(lambda: batch.write(scene.sink, cast("Any", [])))

    run(scene, script)
    scene.data.append(0, 1)
    other = Scene(clock=scene.clock, data=scene.data)
    assert len(refused) == 3
    with pytest.MonkeyPatch.context() as patched:
        reach(patched, other)
        run(other, plain, AT_LEAST_ONCE)
    for text, line in zip(
        ["pass RemoteSink", "before read()", "called twice", "only effectively_once uses a sink"], refused, strict=True
    ):
        assert text in line


def test_a_sink_without_ranges_is_refused_in_a_group_with_ranges(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has checked its own sink only."""

    def script(channel: Channel) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            monkeypatch.setattr(type(scene.sink), "supports_unordered_ranges", False)
            work(scene, batch)

    batch = scene.batch(scene.delivery(EFFECTIVELY_ONCE, ranges=True), ranges=RangeOptions(size=10))
    with pytest.raises(ConfigurationError, match="the group claims ranges: use another sink"), batch:
        launch(batch, script)


def test_a_remote_sink_says_whether_the_scripts_sink_takes_ranges_in_any_order(scene: Scene) -> None:
    """By default it does not, and a group whose members claim ranges refuses it before it starts a script."""
    delivery = scene.delivery(EFFECTIVELY_ONCE, ranges=True)
    delivery.claimed_batch(_request(), RemoteSink("lake/orders", supports_unordered_ranges=True))
    with pytest.raises(ConfigurationError, match="use a sink that stores ranges"):
        delivery.claimed_batch(_request(), RemoteSink("lake/orders"))


def test_the_coordination_topic_may_be_on_another_cluster(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a script reads it on the cluster of the data topics."""
    home = KafkaConnection(bootstrap_servers="127.0.0.1:2")
    seen: list[tuple[KafkaConnection, KafkaConnection]] = []

    def connect(_: object, data: KafkaConnection, coordination: KafkaConnection) -> tuple[Rationalizer, Any]:
        seen.append((data, coordination))
        return Rationalizer(scene.log()), scene.data

    def script(channel: Channel, *, elsewhere: KafkaConnection | None) -> None:
        with submitted_batch(channel, CONNECTION, coordination_connection=elsewhere) as batch:
            work(scene, batch)

    monkeypatch.setattr(submitted, "_connect", connect)
    for elsewhere in (home, None):
        run(scene, partial(script, elsewhere=elsewhere))
        scene.data.append(0, 1)
    assert seen == [(CONNECTION, home), (CONNECTION, CONNECTION)]


def test_a_script_names_the_record_that_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search covers what the script has read and was about to write. An error before any read is not changed."""
    looked: list[tuple[Any, ...]] = []

    def find(error: Exception, *given: Any, written: object) -> FailingRecordError:  # noqa: ANN401 - a stand-in
        looked.append((*given[:2], written))
        return FailingRecordError(f"offset 3: {error}")

    def script(channel: Channel, *, reads: bool) -> None:
        with submitted_batch(channel, CONNECTION) as batch:
            frame = batch.read(cast("Any", object())) if reads else None
            batch.write(cast("Any", SimpleNamespace(write=lambda *_: 1 / 0)), cast("Any", frame) if reads else 1 / 0)  # type: ignore[arg-type]

    monkeypatch.setattr(submitted, "find_failing_record", find)
    with pytest.raises(FailingRecordError, match="offset 3: division by zero"):
        run(scene, partial(script, reads=True))
    ((frame, ranges, written),) = looked
    assert (frame, len(ranges), written) == ("frame", 3, "frame")
    with pytest.raises(ZeroDivisionError):
        run(scene, partial(script, reads=False))


def test_a_remote_sink_only_stands_for_the_scripts_sink(scene: Scene) -> None:
    """It cannot write or look, and takes no address with a password."""
    sink = RemoteSink("s3a://lake/orders")
    with scene.batch(scene.delivery()) as batch:
        assert set(sink.verdicts(batch.ranges).values()) == {Verdict.TAKE}
        launch(batch, partial(process, scene))
    assert "name the script's sink" in str(sink.can_replace(batch.ranges))
    with pytest.raises(ConfigurationError, match=r"RemoteSink\('s3a://lake/orders'\) is written by a script only"):
        sink.write(cast("Any", None), (), dict)
    for wrong in ("", "postgresql://u:made-up@db/orders"):
        with pytest.raises(ConfigurationError, match="output") as error:
            RemoteSink(wrong)
        assert "made-up" not in str(error.value)


# Through Dagster


Where = Literal["environment", "arguments", "Spark settings"]


class InProcessClient(dg.PipesClient):
    """A client with a real session of Pipes, whose script runs in this process."""

    def __init__(self, where: Where, script: Callable[[PipesContext], object]) -> None:
        self.where, self.script = where, script

    def run(self, *, context: Any, extras: Any = None, **_: Any) -> dg.PipesClientCompletedInvocation:  # noqa: ANN401
        """Run the script with the parameters of Pipes where the platform puts them."""
        with (
            dg.open_pipes_session(
                context=context,
                extras=extras,
                context_injector=dg.PipesEnvContextInjector(),
                message_reader=dg.PipesTempFileMessageReader(),
            ) as session,
            self._loader(session) as loader,
            PipesContext(loader, PipesDefaultContextLoader(), PipesDefaultMessageWriter()) as pipes,
        ):
            self.script(pipes)
        return dg.PipesClientCompletedInvocation(session)

    @contextmanager
    def _loader(self, session: dg.PipesSession) -> Iterator[PipesParamsLoader]:
        variables = session.get_bootstrap_env_vars()
        with pytest.MonkeyPatch.context() as patched:
            if self.where == "environment":
                for name, value in variables.items():
                    patched.setenv(name, value)
                yield PipesEnvVarParamsLoader()  # type: ignore[no-untyped-call]
            elif self.where == "arguments":
                pairs = session.get_bootstrap_cli_arguments().items()
                patched.setattr(sys, "argv", ["script.py", "--own", "1", *(part for pair in pairs for part in pair)])
                yield PipesCliArgsParamsLoader()  # type: ignore[no-untyped-call]
            else:
                settings = {f"spark.yarn.appMasterEnv.{name}": value for name, value in variables.items()}
                yield PipesMappingParamsLoader(pipes_parameters({**settings, "spark.app.name": "orders"}))


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["environment", "arguments", "Spark settings"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::dagster.PreviewWarning")  # of Pipes itself
def test_an_asset_is_three_lines(stand: Stand, monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    """The run starts no Spark; each batch is a materialization, with what its script has added."""
    scene = stand.scene
    reach(monkeypatch, scene)

    def script(pipes: PipesContext) -> None:
        with submitted_batch(pipes, CONNECTION) as batch:
            work(scene, batch)
            batch.metadata |= {"written to": batch.output, "offsets": "many", "files": ["a"]}

    client = InProcessClient(where, script)

    @marshal_asset(topic=TOPIC, sink=RemoteSink("lake/orders"), with_frame=False, max_records=12)
    def orders(context: dg.AssetExecutionContext, batch: ClaimedBatch) -> None:
        run_with_pipes(context, batch, client)

    result = dg.materialize([orders], instance=stand.instance, resources={"claimer": stand.claimer()})
    assert result.success
    batches = stand.materializations(result)
    assert len(batches) == 3
    assert {each.metadata["written to"].value for each in batches} == {"lake/orders"}
    assert [each.metadata["offsets"].value for each in batches] == [12, 12, 6]
    assert batches[0].metadata["own/offsets"].value == "many"
    assert stand.sessions == 0
    assert counted_once(scene, EFFECTIVELY_ONCE)


@pytest.mark.thorough
def test_an_op_and_its_job_are_as_short(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules, sensors and reprocess jobs take them as any other claimed batch."""
    reach(monkeypatch, stand.scene)
    stand.mode = AT_LEAST_ONCE

    def orders(_: dg.OpExecutionContext, batch: ClaimedBatch) -> object:
        return launch(batch, partial(process, stand.scene))

    op = build_claimed_batch_op(orders, name="orders", topic=TOPIC, with_frame=False)
    definitions = dg.Definitions(jobs=[build_claimed_batch_job(op)], resources={"claimer": stand.claimer()})
    job = definitions.resolve_job_def("orders_job")
    assert job.execute_in_process(instance=stand.instance).success
    assert counted_once(stand.scene, AT_LEAST_ONCE)


@pytest.mark.parametrize(
    "options", [{"spark_key": "spark"}, {"count_records": True}, {"min_partitions": 4}, {"spark_config": {"a": "b"}}]
)
def test_options_of_a_frame_are_refused_without_one(options: dict[str, Any]) -> None:
    """They would have no effect."""
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} would have no effect"):
        build_claimed_batch_op(lambda _context, _batch: None, name="a", topic=TOPIC, with_frame=False, **options)


def test_a_function_must_take_what_it_is_given() -> None:
    """With and without a frame."""
    with pytest.raises(ConfigurationError, match=r"calls it with \(context, batch\)"):
        build_claimed_batch_op(lambda _c, _b, _f: None, name="a", topic=TOPIC, with_frame=False)
    with pytest.raises(ConfigurationError, match=r"calls it with \(context, batch, frame\)"):
        build_claimed_batch_op(lambda _c, _b: None, name="a", topic=TOPIC)


def test_parameters_are_found_behind_any_prefix() -> None:
    """Platforms put them into the environment of the driver by settings of their own."""
    name = DAGSTER_PIPES_CONTEXT_ENV_VAR
    for key in (name, f"spark.{name}", f"spark.emr-serverless.driverEnv.{name}", f"spark.kubernetes.driverEnv.{name}"):
        assert pipes_parameters({key: "x", "spark.master": "yarn"}) == {name: "x"}
    assert pipes_parameters({f"MY_{name}": "x"}) == {}
