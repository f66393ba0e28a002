"""A batch that a submitted script processes: what the script receives, and when the batch is withdrawn from it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from marshal_dagster._internal.processes import mark_of
from marshal_dagster.batches import ClaimedBatch, submitted
from marshal_dagster.batches.submitted import BATCH_VARIABLE, SubmittedBatch, read_outcome, submitted_batch
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    ConfigurationError,
    FailingRecordError,
    UnavailableError,
)
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.secret_text import SecretText
from marshal_dagster.pipes import Submission, handed_over
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks import WriteResult
from marshal_dagster.spark import job_control, reader
from marshal_dagster.spark.secret_pipe import listen, telling
from tests.batch_fixtures import Scene
from tests.conditions import wait_until

CONNECTION = KafkaConnection(
    bootstrap_servers="127.0.0.1:1",
    security_protocol="SASL_PLAINTEXT",
    sasl_mechanism="PLAIN",
    username="u",
    password=SecretText("made-up"),
)


@pytest.fixture
def scene() -> Scene:
    """Return a group whose topic has messages."""
    scene = Scene()
    scene.data.make(messages=5)
    return scene


def test_the_script_is_told_its_ranges_and_no_one_else_a_secret(scene: Scene) -> None:
    """The command and the environment contain only a folder and a file that no other user can read.

    Both are deleted in the end.
    """
    with scene.batch(scene.delivery()) as batch:
        with handed_over(batch, CONNECTION) as submission:
            told = submitted.BatchManifest.read(submission.folder)
            assert (told.batch_id, told.ranges) == (batch.batch_id, batch.ranges)
            with submitted_batch(submission.environment) as theirs:
                theirs.begin_processing()
                assert "made-up" in theirs._kafka_options["kafka.sasl.jaas.config"]
            command = submission.command("a/script.py", "argument", settings={"spark.secret": "made-up"})
            assert command[-2:] == ["a/script.py", "argument"]
            assert "made-up" not in " ".join([*command, *submission.environment.values()])
            assert submission.folder.stat().st_mode & 0o077 == 0
            assert all(each.stat().st_mode & 0o077 == 0 for each in submission.folder.iterdir())
            assert "spark.secret=made-up\n" in (submission.folder / "spark.conf").read_text()
        assert not submission.folder.exists()
    assert batch.committed


def test_a_failed_script_commits_nothing(scene: Scene) -> None:
    """If a script fails, nothing is committed, and the error in the block is the error of the batch."""
    batch = scene.batch(scene.delivery())
    with pytest.raises(ChildProcessError), batch, handed_over(batch, CONNECTION):
        raise ChildProcessError("code 1")
    assert not batch.committed


def no_script(_: Submission) -> None:
    """Submit no script, or ignore that it failed."""


def script_that_does_not_read(submission: Submission) -> None:
    """Finish without reading the batch."""
    with pytest.raises(BatchAbortedError, match=r"without batch\.read"), submitted_batch(submission.environment):
        pass


def script_that_fails(submission: Submission) -> None:
    """Read the batch and fail."""
    with suppress(OSError), submitted_batch(submission.environment) as theirs:
        theirs.begin_processing()
        raise OSError("disk full")


@pytest.mark.parametrize("script", [no_script, script_that_does_not_read, script_that_fails])
def test_what_no_script_has_read_to_its_end_is_not_committed(
    scene: Scene, script: Callable[[Submission], None]
) -> None:
    """A batch that no script has read to its end is not committed, even if the run ignores the script's exit code."""
    batch = scene.batch(scene.delivery())

    def work() -> None:
        with batch, handed_over(batch, CONNECTION) as submission:
            script(submission)

    with pytest.raises(BatchAbortedError, match="no script has processed the batch"):
        work()
    assert not batch.committed


def test_at_most_once_is_not_handed_over(scene: Scene) -> None:
    """An at-most-once batch is rejected before anything is committed."""
    batch = scene.batch(scene.delivery(DeliveryMode.AT_MOST_ONCE))
    with pytest.raises(ConfigurationError, match="Process the batch in the run"), batch, handed_over(batch, CONNECTION):
        raise AssertionError
    assert not batch.committed
    assert not batch.dropped


@pytest.mark.thorough
def test_a_lost_claim_is_taken_back_from_the_script(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the claim is lost, the script can no longer read or write, and its block fails."""

    def lost() -> None:
        raise ClaimLostError("another has it")

    def script(submission: Submission) -> None:
        with submitted_batch(submission.environment) as theirs:
            theirs.begin_processing()
            monkeypatch.setattr(ClaimedBatch, "check", lambda _: lost())
            wait_until(lambda: not (submission.folder / "batch.json").exists(), "the batch's file is gone")

    batch = scene.batch(scene.delivery())

    def work() -> None:
        with batch, handed_over(batch, CONNECTION) as submission:
            with pytest.raises(BatchAbortedError, match="withdrawn"):
                script(submission)
            with pytest.raises(BatchAbortedError, match="withdrawn"), submitted_batch(submission.environment):
                raise AssertionError
            monkeypatch.undo()

    with pytest.raises(BatchAbortedError, match="no script has processed the batch"):
        work()


def test_a_script_stops_without_its_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its run has died, a script stops and deletes the secrets, because the claim gets no heartbeats any more."""

    def script() -> None:
        with (
            scene.batch(scene.delivery()) as batch,
            handed_over(batch, CONNECTION) as submission,
            submitted_batch(submission.environment) as theirs,
        ):
            folders.append(submission.folder)
            monkeypatch.setattr(submitted.BatchManifest, "has_launcher", False)
            theirs.check()

    folders: list[Path] = []
    with pytest.raises(BatchAbortedError, match="has died"):
        script()
    assert not folders[0].exists()


def test_a_run_that_died_and_was_not_reaped_is_dead() -> None:
    """A killed run counts as dead, even if its parent has not waited for it yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as run:
        handed = submitted.BatchManifest("b", "t", (), mark_of(run.pid))
        assert handed.has_launcher
        run.kill()
        wait_until(lambda: psutil.Process(run.pid).status() == psutil.STATUS_ZOMBIE, "the process is a zombie")
        assert not handed.has_launcher


RUN = """
import subprocess, sys
from tests.fast.test_spark_submitted import CONNECTION, handed_over
from tests.batch_fixtures import Scene

scene = Scene()
scene.data.make(messages=5)
with scene.batch(scene.delivery()) as batch, handed_over(batch, CONNECTION) as submission:
    submission.command("script.py", settings={"spark.secret": "made-up"})
    with subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=submission.environment) as script:
        print(submission.folder, script.pid, flush=True)
        script.wait()
"""
SCRIPT = """
import time
from marshal_dagster.batches.submitted import submitted_batch

with submitted_batch() as batch:
    assert "made-up" in batch._kafka_options["kafka.sasl.jaas.config"]
    print("has it", flush=True)
    time.sleep(60)
"""


def test_run_and_script_killed_together_leave_no_secret(tmp_path: Path) -> None:
    """No process is left to remove the folder, so it must not contain secrets."""
    command = [sys.executable, "-c", RUN, SCRIPT]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        folder, script = run.stdout.readline().split()
        assert run.stdout.readline() == "has it\n"
        os.kill(int(script), signal.SIGSTOP)
        run.kill()
        os.kill(int(script), signal.SIGKILL)
    left = {path.name: path.is_file() and path.read_text() for path in Path(folder).iterdir()}
    assert sorted(left) == ["batch.json", "kafka"]
    assert "made-up" not in str(left)
    assert left["kafka"] is False


@pytest.mark.thorough
def test_a_script_waits_for_no_secret_of_a_run_that_is_dead(tmp_path: Path) -> None:
    """A script does not wait for the secret of a dead run. A second script receives the whole secret too."""
    pipe = tmp_path / "pipe"

    def dead() -> None:
        raise BatchAbortedError("has died")

    with telling(pipe, "x" * 100_000):
        for _ in range(20):
            assert listen(pipe, lambda: None) == "x" * 100_000
    with pytest.raises(BatchAbortedError, match="has died"):
        listen(pipe, dead)


@pytest.fixture
def fake_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions that need Spark."""
    monkeypatch.setattr(submitted, "check_session", lambda _: None)
    monkeypatch.setattr(job_control, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(reader, "read_ranges", lambda *_, **__: "frame")
    offsets = {partition: [(0, 5)] for partition in range(3)}
    monkeypatch.setattr(reader, "offsets_read", lambda _: offsets)


@pytest.mark.usefixtures("fake_spark")
def test_what_the_scripts_sink_took_is_committed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the script's sink is returned to the run. A script that wrote nothing causes an error."""
    with pytest.raises(BatchAbortedError, match="nothing was read"):
        _work(scene, lambda _: None)
    with pytest.raises(BatchAbortedError, match="nothing was written"):
        _work(scene, lambda theirs: theirs.begin_processing())
    write = scene.sink.write
    monkeypatch.setattr(scene.sink, "write", lambda *given: replace(write(*given), rows={1: 5}, note="read it so"))
    done = _work(scene, lambda theirs: _read_and_write(theirs, scene))
    assert done.committed
    assert done.outcome is not None
    assert done.outcome == WriteResult(taken=done.ranges, skipped=(), rows={1: 5}, note="read it so")


@pytest.mark.usefixtures("fake_spark")
def test_a_script_names_the_record_that_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search covers what the script has read and was about to write. An error before any read is not changed."""
    looked: list[tuple[Any, ...]] = []

    def find(error: Exception, *given: Any, written: object) -> FailingRecordError:  # noqa: ANN401 - a stand-in
        looked.append((*given[:2], written))
        return FailingRecordError(f"offset 3: {error}")

    def script(theirs: SubmittedBatch) -> None:
        frame = theirs.read(cast("Any", object()))
        theirs.write(cast("Any", SimpleNamespace(write=lambda *_: 1 / 0)), frame)

    monkeypatch.setattr(submitted, "find_failing_record", find)
    with pytest.raises(FailingRecordError, match="offset 3: division by zero"):
        _work(scene, script)
    ((frame, ranges, written),) = looked
    assert (frame, len(ranges), written) == ("frame", 3, "frame")
    with pytest.raises(ZeroDivisionError):
        _work(scene, lambda _: 1 / 0)


@pytest.mark.usefixtures("fake_spark")
def test_a_topic_made_anew_before_the_scripts_sink_commits_is_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the topic is re-created before the script's sink commits, the batch is withdrawn.

    The run checks the topic at that moment, as for its own batches, because the messages may be of either topic.
    """
    monkeypatch.setattr("marshal_dagster.pipes._LOOK_EVERY_S", 3_600)

    scene.sink.while_reading = lambda: scene.data.make(messages=5)
    with pytest.raises(BatchAbortedError, match="withdrawn"):
        _work(scene, lambda theirs: _read_and_write(theirs, scene))
    assert not scene.sink.counts()


def test_a_script_asks_again_through_an_outage(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeats decide whether the claim is lost. The script continues once the brokers respond again."""
    asked: list[int] = []
    check = ClaimedBatch.check

    def seldom(batch: ClaimedBatch) -> None:
        asked.append(1)
        if len(asked) < 3:
            raise UnavailableError("no broker")
        check(batch)

    def script(theirs: SubmittedBatch) -> None:
        theirs.begin_processing()
        assert len(asked) >= 3

    monkeypatch.setattr(ClaimedBatch, "check", seldom)
    with pytest.raises(BatchAbortedError, match="nothing was written"):
        _work(scene, script)


def test_a_script_that_nobody_submitted_says_so(tmp_path: Path) -> None:
    """A script without a submitted batch gets a one-line error.

    A folder without a batch means that the batch was withdrawn.
    """
    with pytest.raises(ConfigurationError, match="MARSHAL_BATCH is not set"), submitted_batch({}):
        raise AssertionError
    with pytest.raises(BatchAbortedError, match="withdrawn"), submitted_batch({BATCH_VARIABLE: str(tmp_path)}):
        raise AssertionError
    assert read_outcome(tmp_path) is None
    for two_lines in ("a\nb", "a\rspark.master b"):
        with pytest.raises(ConfigurationError, match=r"'spark\.x': .* must not contain line breaks"):
            Submission(tmp_path).command("s.py", settings={"spark.x": two_lines})


def _work(scene: Scene, script: Callable[[SubmittedBatch], object]) -> ClaimedBatch:
    with (
        scene.batch(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE)) as batch,
        handed_over(batch, CONNECTION) as submission,
        submitted_batch(submission.environment) as theirs,
    ):
        script(theirs)
    return batch


def _read_and_write(theirs: SubmittedBatch, scene: Scene) -> None:
    assert cast("str", theirs.read(cast("Any", object()))) == "frame"
    theirs.write(scene.sink, cast("Any", scene.data.read(theirs.ranges)))
