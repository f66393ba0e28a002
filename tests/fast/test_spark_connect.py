"""What differs on a Spark Connect server, tested without one."""

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest

from marshal_dagster._internal import processes
from marshal_dagster._internal.processes import ProcessMark, mark_of
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.resources.spark_connect import SparkConnectResource
from marshal_dagster.spark import connect, connect_server, connect_session, job_control
from marshal_dagster.spark.connect_server import ConnectServer, Server
from marshal_dagster.spark.session import SINGLE_EXECUTION, check_session, check_single_execution
from tests.conditions import WITHIN_S


class Session:
    """The parts of a Spark Connect session that are used. Its client reports progress as PySpark's does."""

    is_stopped = False
    version = "4.0.5"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.conf = SimpleNamespace(get=self.settings.get, set=self.settings.__setitem__)
        self.handlers: list[Callable[..., None]] = []
        self.client = SimpleNamespace(
            register_progress_handler=self.handlers.append,
            remove_progress_handler=self.handlers.remove,
            get_retry_policies=lambda: ["one"],
            _use_reattachable_execute=True,
        )
        self.tags: set[str] = set()
        self.interrupted: list[str] = []

    def getTags(self) -> set[str]:  # noqa: N802 - Spark's name
        """Return the thread's tags."""
        return self.tags

    def addTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        """Add a tag."""
        self.tags.add(tag)

    def interruptTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        """Record the interrupt."""
        self.interrupted.append(tag)


Session.__module__ = "pyspark.sql.connect.session"


def session(settings: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 - replaces Spark's
    """Return a session on a server."""
    return Session(settings)


def stage(done: int, total: int, *, is_done: bool = False) -> SimpleNamespace:
    """Return a stage as the server reports it."""
    return SimpleNamespace(num_completed_tasks=done, num_tasks=total, done=is_done)


@pytest.mark.parametrize("master", ["local[2]", "spark://h:7077"])
def test_a_server_that_runs_each_task_once(master: str) -> None:
    """A server that reports all of these settings itself is accepted, whatever its master."""
    check_single_execution(session({**SINGLE_EXECUTION, "spark.master": master}))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"spark.master": "local[2]"}, r"spark\.task\.maxFailures is 4, must be 1"),
        ({**SINGLE_EXECUTION, "spark.master": "local[2, 3]"}, "must not set a number of allowed failures"),
        ({**SINGLE_EXECUTION, "spark.speculation": "true"}, r"spark\.speculation is true"),
    ],
)
def test_a_server_that_may_run_a_task_twice_is_refused(settings: Mapping[str, str], why: str) -> None:
    """A server without these settings is refused even if its master implies them, because a session can set them."""
    with pytest.raises(ConfigurationError, match=f"{why}.*Start the server with these settings"):
        check_single_execution(session(settings))


def test_a_client_that_may_send_a_statement_twice_is_refused() -> None:
    """A client that repeats calls is refused, because the server cannot distinguish the second from the first."""
    fake = session(SINGLE_EXECUTION)
    fake.client._use_reattachable_execute = False
    with pytest.raises(ConfigurationError, match="repeats calls without reattachable execution"):
        check_single_execution(fake)
    fake.client.get_retry_policies = list
    check_single_execution(fake)


def test_progress_is_what_the_server_last_reported_the_batch() -> None:
    """Progress has only the stages of the batch's own operations, until those are done."""
    fake = session()
    with job_control.batch_jobs(fake, "b"):
        assert fake.tags == {"marshal-dagster b"}
        assert job_control.progress(fake, "b") is None
        (report,) = fake.handlers
        report(stages=[stage(1, 4), stage(2, 2, is_done=True)], inflight_tasks=2, operation_id="o", done=False)
        assert job_control.progress(fake, "b") == job_control.Progress(active_stages=1, tasks_done=3, tasks_total=6)
        assert job_control.progress(fake, "another") is None
        fake.tags.clear()
        report(stages=[stage(9, 9)], inflight_tasks=1, operation_id="p", done=False)
        assert str(job_control.progress(fake, "b")) == "3 of 6 tasks done, 1 stages running"
        fake.tags.add("marshal-dagster b")
        report(stages=None, inflight_tasks=0, operation_id="o", done=True)
        assert job_control.progress(fake, "b") is None
    assert not fake.handlers
    assert not fake.tags


def test_cancelling_interrupts_by_tag() -> None:
    """Cancelling has an effect only inside the block of the batch."""
    fake = session()
    with job_control.batch_jobs(fake, "b,1"):
        job_control.cancel(fake, "b,1")
        assert fake.interrupted[0] == "marshal-dagster b;1"
    fake.interrupted.clear()
    job_control.cancel(fake, "b,1")
    assert not fake.interrupted


def test_a_server_that_has_ended_is_distinguished_from_an_error() -> None:
    """If the server still responds, it has not ended, whatever the error was."""
    fake = session()
    assert job_control.session_ended(fake, ValueError("the function's own")) is None

    def unanswered(*_: str) -> str:
        raise ConnectionError("reset")

    fake.conf.get = unanswered
    assert "has ended" in str(job_control.session_ended(fake, ValueError("reset")))
    with job_control.batch_jobs(fake, "b"):
        fake.interruptTag = unanswered
        job_control.cancel(fake, "b")


def test_a_server_that_has_ended_before_a_batch_is_not_taken_for_one_without_a_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that has ended is unavailable.

    One that responds but cannot read Kafka was started with wrong settings.
    """
    monkeypatch.setattr(connect, "fail_fast_when_dead", lambda _: None)
    fake = session()
    with pytest.raises(ConfigurationError, match=r"no working Kafka connector .* start the server with spark\.jars"):
        check_session(fake)
    fake.is_stopped = True
    with pytest.raises(UnavailableError, match="the Spark Connect server has ended"):
        check_session(fake)


def test_a_client_that_is_too_old_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before Spark 4.0 the client takes no retry policy. The message names that version."""
    monkeypatch.setattr("pyspark.__path__", [str(tmp_path)])
    monkeypatch.setattr("pyspark.__version__", "3.5.9")
    for call in (lambda: connect_session.connect("sc://localhost:1"), ConnectServer(tmp_path).start):
        with pytest.raises(ConfigurationError, match=r"Spark Connect needs PySpark 4\.0 or newer, but 3\.5\.9 is"):
            call()


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts the connection and never responds, as a stopped one, causes an error with advice."""
    answer, left = threading.Event(), threading.Event()
    hanging = session()
    hanging.stop = left.set
    builder = SimpleNamespace(remote=lambda _: SimpleNamespace(create=lambda: hanging))
    monkeypatch.setattr("pyspark.sql.SparkSession", SimpleNamespace(builder=builder))
    monkeypatch.setattr(connect_session, "fail_fast_when_dead", lambda _: None)
    monkeypatch.setattr("marshal_dagster.spark.session.check_session", lambda _: answer.wait(WITHIN_S))
    monkeypatch.setattr(connect_session, "_ANSWERS_WITHIN_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(UnavailableError, match=r"created no session within 0\.2 s: .*Resource\(\)\.stop_server"),
    ):
        connect_session.connect(f"sc://127.0.0.1:{server.getsockname()[1]}")
    assert left.wait(WITHIN_S)
    answer.set()


PLAN = """options {
  key: "kafka.sasl.jaas.config"
  value: "x.PlainLoginModule required username=\\"u\\" password=\\"se\\\\\\\\\\"cret\\";"
}
options { key: "kafka.ssl.keystore.key" value: "-----BEGIN secret" }
options { key: "kafka.ssl.key.password" value: "secret" }
options { key: "kafka.sasl.oauthbearer.client.credentials.client.secret" value: "secret" }
options { key: "databricks.serviceCredential" value: "secret" }
options { key: "kafka.sasl.oauthbearer.token.endpoint.url" value: "https://shown" }
options { key: "assign" value: "kept" }"""


def test_secrets_among_a_readers_options_are_redacted() -> None:
    """The redaction rule matches the whole value of each secret and nothing else. Without secrets no rule is set."""
    fake = session()
    connect.hide_secrets(fake, {"kafka.bootstrap.servers": "b:1"})
    assert not fake.settings
    connect.hide_secrets(fake, {"kafka.sasl.jaas.config": "..."})
    (rule,) = fake.settings.values()
    shown = re.sub(rule, "***", PLAN)
    assert shown.count("***") == 5
    assert "cret" not in shown.replace("client.secret", "")
    assert 'value: "https://shown"' in shown
    assert 'key: "assign" value: "kept"' in shown


def test_another_rule_stays_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The administrator's rule is not replaced."""
    fake = session({"spark.sql.redaction.string.regex": "theirs"})
    connect.hide_secrets(fake, {"kafka.ssl.key.password": "..."})
    assert fake.settings == {"spark.sql.redaction.string.regex": "theirs"}
    assert "make sure that it covers" in caplog.text


def test_a_server_is_known_by_its_process_and_not_by_its_number(tmp_path: Path) -> None:
    """If the process has ended or was replaced, or the state file is incomplete, no server is running."""
    home = ConnectServer(tmp_path)
    state = tmp_path / "server.json"
    assert home.running() is None
    this = mark_of(os.getpid())
    state.write_text(json.dumps(asdict(Server(replace(this, birth="another"), 1, "t"))))
    assert home.running() is None
    assert not home.stop()
    assert not state.exists()
    state.write_text('{"pid":')
    assert home.running() is None
    state.write_text(json.dumps(asdict(Server(this, 1, "t"))))
    found = home.running()
    assert found is not None
    assert found.url == "sc://localhost:1"


LATE = (
    "import socket, sys, time; time.sleep(1); s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"
)


@pytest.mark.thorough
def test_a_server_whose_starter_was_killed_is_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server outlives the process that started it. If it were not recorded at once, it would run forever."""
    started: list[psutil.Process] = []

    def spawn(command: Sequence[str], *_: object) -> ProcessMark:
        settings = Path(command[command.index("--properties-file") + 1]).read_text()
        port = settings.partition("binding.port=")[2].split()[0]
        started.append(psutil.Popen([sys.executable, "-c", LATE, port]))
        return mark_of(started[-1].pid)

    def killed(*_: object) -> None:
        raise KilledError

    monkeypatch.setattr(processes, "spawn", spawn)
    monkeypatch.setattr(connect_server, "with_connector", lambda settings: settings)
    try:
        with monkeypatch.context() as dying:
            dying.setattr(processes, "stop", lambda *_: None)  # nothing runs in a killed process
            dying.setattr(ConnectServer, "_wait_until_ready", killed)
            with pytest.raises(KilledError):
                ConnectServer(tmp_path).start()
        server = ConnectServer(tmp_path).start()
        assert [each.pid for each in started] == [server.process.pid]
        socket.create_connection(("127.0.0.1", server.port), 5).close()
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_jars_of_ones_own_come_beside_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector is always added. The user's settings are kept, except for the server's port."""
    connector = (Path("/cache/connector.jar"),)
    monkeypatch.setattr("marshal_dagster.spark.session.connector_jars", lambda *_: connector)
    wanted = {
        "spark.jars": "/mine.jar",
        "spark.jars.packages": "a:b:1",
        "spark.jars.excludes": "e:f",
        "spark.task.maxFailures": "3",
        "spark.connect.grpc.binding.port": "1",
    }
    settings = connect_server._settings(wanted, 15_002)
    assert settings["spark.jars"] == "/cache/connector.jar,/mine.jar"
    assert settings["spark.jars.packages"] == "a:b:1"
    assert settings["spark.jars.excludes"].endswith("hadoop-client-runtime,e:f")
    assert settings["spark.task.maxFailures"] == "3"
    assert settings["spark.connect.grpc.binding.port"] == "15002"
    monkeypatch.setattr("marshal_dagster.spark.session.connector_jars", lambda *_: ())
    monkeypatch.setattr("marshal_dagster.spark.session.fetch_connector", lambda *_, **__: connector)
    settings = connect_server._settings({"spark.jars.packages": "a:b:1"}, 15_002)
    assert (settings["spark.jars"], settings["spark.jars.packages"]) == ("/cache/connector.jar", "a:b:1")


class KilledError(BaseException):
    """A stand-in for the end of a process."""


@pytest.mark.slow
def test_another_that_listens_there_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process took the port, it receives no token, and the server ends."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(connect_server, "free_port", lambda: other.getsockname()[1])
        monkeypatch.setattr(connect_server, "with_connector", lambda settings: settings)
        spawn = processes.spawn
        monkeypatch.setattr(processes, "spawn", lambda _, *others: spawn([sys.executable, "-c", "exit(1)"], *others))
        with pytest.raises(UnavailableError, match="ended during its start"):
            ConnectServer(tmp_path).start()


@pytest.mark.slow
def test_what_a_server_printed_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run starts a new server, so the old output is kept. Only this user may read it."""
    monkeypatch.setattr(connect_server, "with_connector", lambda settings: settings)
    spawn = processes.spawn
    for says in ("first", "second"):
        script = f"print('{says}'); exit(1)"
        command = [sys.executable, "-c", script]
        monkeypatch.setattr(processes, "spawn", lambda _, *others, command=command: spawn(command, *others))
        with pytest.raises(UnavailableError, match="ended during its start"):
            ConnectServer(tmp_path).start()
    logs = [tmp_path / "previous.log", tmp_path / "server.log"]
    assert [log.read_text() for log in logs] == ["first\n", "second\n"]
    assert {log.stat().st_mode & 0o777 for log in logs} == {0o600}


@pytest.mark.parametrize("fields", [{"token": "plain"}, {"url": "sc://h/;token=plain"}])
def test_a_token_written_down_is_refused(fields: dict[str, Any]) -> None:
    """Dagster would store and show the token. The name of an environment variable is accepted."""
    url: dict[str, Any] = {"url": "sc://h"}
    with pytest.raises(ConfigurationError, match=r"token=EnvVar\(.ITS_NAME.\)"):
        dg.Definitions(resources={"spark": SparkConnectResource(**url | fields)}).get_repository_def()
    dg.Definitions(resources={"spark": SparkConnectResource(**url, token=dg.EnvVar("T"))}).get_repository_def()


def test_only_the_server_of_this_machine_is_stopped_here() -> None:
    """A server is stopped on the machine that started it."""
    with pytest.raises(ConfigurationError, match="it did not start the server"):
        SparkConnectResource(url="sc://h").stop_server()
