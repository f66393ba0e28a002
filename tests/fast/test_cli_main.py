"""The command line as a whole: start-up time, errors and exit codes."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster import errors
from marshal_dagster.cli import output, topic
from marshal_dagster.cli import replay as replay_command
from marshal_dagster.cli.exit_codes import MEANINGS, ExitCode, code_of
from marshal_dagster.cli.main import COMMANDS as COMMAND_LIST
from marshal_dagster.cli.main import load_command, run
from marshal_dagster.coordination import topic_settings
from marshal_dagster.devkafka import PortInUseError
from marshal_dagster.protocol.replay import MalformedLogError
from tests.cli import COMMAND, REPOSITORY, call, environ, start, stored
from tests.conditions import WITHIN_S

Walked = tuple[list[str], Any]


def walk(command: Any, path: Sequence[str] = ()) -> Iterator[Walked]:  # noqa: ANN401 - typer names no type for them
    """Yield every command below `command` with its path."""
    for name, part in getattr(command, "commands", {}).items():
        yield from walk(part, (*path, name))
    if not hasattr(command, "commands"):
        yield list(path), command


LOADED = {name: load_command(name) for name in COMMAND_LIST}
FOUND = [found for name, command in LOADED.items() for found in walk(command, [name])]
COMMANDS = [path for path, _ in FOUND]
VECTOR = REPOSITORY / "tests" / "vectors" / "marshal-log.jsonl"


def imported_by(*arguments: str) -> set[str]:
    """Return the packages that one command line imports, run in its own process."""
    script = (
        "import json, sys; from marshal_dagster.cli.main import run; code = run(sys.argv[1:]);"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, check=True, env=environ(), cwd=REPOSITORY
    )
    code, modules = json.loads(done.stderr)
    assert code == 0
    return {name.partition(".")[0] for name in modules}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_list_of_commands_imports_nothing_heavy(arguments: list[str]) -> None:
    """The list of commands and the version need no Dagster, Spark, Kafka client, psutil or rich."""
    heavy = {"dagster", "pyspark", "confluent_kafka", "dagster_pyspark", "psutil", "rich"}
    assert imported_by(*arguments) & heavy == set()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["kafka", "--help"], ["status", "--help"], ["outbox", "--help"]])
def test_the_help_of_a_command_imports_neither_dagster_nor_spark(arguments: list[str]) -> None:
    """The help imports only what the command itself needs."""
    assert imported_by(*arguments) & {"dagster", "pyspark", "dagster_pyspark", "rich"} == set()


@pytest.mark.parametrize("name", COMMAND_LIST)
def test_the_list_of_commands_has_the_first_sentence_of_each_help(name: str) -> None:
    """The list is written by hand, so that it imports nothing, and must match the commands."""
    assert LOADED[name].help.partition(". ")[0].rstrip(".") + "." == COMMAND_LIST[name]


@pytest.mark.slow
def test_replay_imports_no_client() -> None:
    """A stored log is replayed without a Kafka client, Dagster or Spark."""
    heavy = {"dagster", "pyspark", "confluent_kafka", "dagster_pyspark"}
    assert imported_by("replay", str(VECTOR)) & heavy == set()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """Each command's help has an example and explains the exit codes."""
    answer = call(capsys, *command, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"  marshal-dagster {' '.join(command)}" in answer.out.partition("Example")[2]
    assert "Exit codes: 0 done;" in answer.out


@pytest.mark.slow
def test_every_example_is_one_that_the_parser_takes() -> None:
    """Each example in a command's help, and after its pipes, has valid arguments and options."""
    lines = [line for _, command in FOUND for line in command.help.partition("Example")[2].splitlines()]
    examples = [shlex.split(part.partition(">")[0]) for line in lines for part in line.split("|")]
    calls = [example[1:] for example in examples if example[:1] == ["marshal-dagster"]]
    assert len(calls) > len(COMMANDS)
    for arguments in calls:
        ((path, command),) = [each for each in FOUND if arguments[: len(each[0])] == each[0]]
        command.make_context("", arguments[len(path) :])


@pytest.mark.parametrize("name", [name for name, command in LOADED.items() if hasattr(command, "commands")])
def test_the_list_of_a_group_cuts_no_sentence(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """In a terminal of 80 columns, the first sentence of each command's help fits into the group's list."""
    lines = call(capsys, name, "--help").out.partition("Commands:")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []


def test_every_command_is_walked() -> None:
    """Commands within groups are included."""
    assert [each for each in (["top"], ["position", "reset"], ["kafka", "up"]) if each not in COMMANDS] == []


@pytest.mark.parametrize(
    ("path", "command"), FOUND, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_every_command_can_answer_in_json(path: list[str], command: Any) -> None:  # noqa: ANN401 - as `walk`
    """All commands have `--json`, and each option has a help text."""
    options = {name: param for param in command.params for name in param.opts}
    assert "--json" in options, path
    assert [name for name, option in options.items() if name.startswith("-") and not option.help] == []


def in_bash(script: str, folder: Path) -> str:
    """Run a script in a real bash that finds the program, with its own home folder; return the output."""
    program = folder / "marshal-dagster"
    program.write_text(f"#!{sys.executable}\nfrom marshal_dagster.cli.main import main\nmain()\n")
    program.chmod(0o700)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
        env=environ({"PATH": path, "HOME": str(folder), "PYTHONPATH": str(REPOSITORY)}),
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.thorough
def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    """`--install-completion` writes the completion to files in the user's home."""
    assert "bash completion installed" in in_bash("marshal-dagster --install-completion; true", tmp_path)
    requested = [["po"], ["position", ""], ["position", "import", "--ch"]]
    completed = "".join(
        f"COMP_WORDS=(marshal-dagster {' '.join(map(shlex.quote, words))}) COMP_CWORD={len(words)}\n"
        '_marshal_dagster_completion marshal-dagster; echo "${COMPREPLY[@]}"\n'
        for words in requested
    )
    assert in_bash(f'. "$HOME/.bashrc"\n{completed}', tmp_path).splitlines() == [
        "position",
        "get reset import",
        "--checkpoint",
    ]


def test_the_page_about_the_command_line_names_everything() -> None:
    """docs/reference/cli.md has each command, and each exit code with its number."""
    page = (REPOSITORY / "docs" / "reference" / "cli.md").read_text()
    assert [each for each in COMMANDS if f"marshal-dagster {' '.join(each)}" not in page] == []
    assert [code for code in ExitCode if f"| {code.value} | {MEANINGS[code]} |" not in page] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--wat"],
        ["stat"],
        ["status", "--wat"],
        ["replay"],
        ["replay", "a", "b"],
        ["kafka", "up", "--brokers", "many"],
        ["tail", "--from-start", "-n", "3"],
        ["pause"],
        ["pause", "g"],
        ["pause", "g", "--for", "1h", "--until", "2100-01-01T00:00:00Z"],
        ["revoke", "g", "t"],
        ["position", "reset", "g", "t"],
        ["position", "import", "g", "t"],
        ["reprocess", "g", "t", "--partition", "0", "--from", "-3", "--to", "5"],
        ["settings", "show", "g", "--yes"],
        ["top", "--interval", "0"],
        ["settings", "show", "g", "--dry-run"],
        ["position", "import", "g", "t", "--consumer-group", "x", "--checkpoint", "y"],
        ["position", "reset", "g", "t", "--to-earliest", "--shift-by", "-3"],
        ["position", "reset", "g", "--to-earliest"],
        ["outbox", "parked", "retry"],
        ["outbox", "parked", "retry", "3", "--all"],
        ["outbox", "parked", "delete"],
        ["outbox", "harvest", "--max-in-flight", "0"],
        ["outbox", "drain", "--poll-interval", "1"],
        ["coordinator", "assignments"],
        ["coordinator", "init", "--partitions", "0"],
        ["coordinator", "run", "--strategy", "fair"],
        ["coordinator", "run", "--min-session", "inf"],
        ["settings", "set", "g", "--heartbeat-interval", "3601"],
        ["recover", "--heartbeat-interval", "inf"],
        [],
        ["kafka"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_reported_on_stderr(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """An unknown or missing option, command or argument ends with exit code 2."""
    answer = call(capsys, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Usage: marshal-dagster" in answer.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status"], "no Kafka cluster is specified: use --bootstrap-servers"),
        (["status", "-b", "somewhere"], "--bootstrap-servers must be a comma-separated list of host:port"),
        (["status", "-b", "a:1", "--timeout", "0"], "--timeout must be a number of seconds above 0"),
        (["status", "-b", "a:1", "--connection", "x.toml"], "use only one of them"),
        (["status", "--connection", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["status", "-b", "a:1", "--coordination-topic", "a/b"], "--coordination-topic: 'a/b' is not a name"),
        (["status", "-b", "a:1", "--topic", "a/b"], "--topic: 'a/b' is not a name"),
        (["status", "-b", "a:1", "--data-connection", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["doctor", "-b", "a:1", "--coordination-topic", ".."], "--coordination-topic: '..' is not a name"),
        (["top", "-b", "a:1", "--topic", "a/b"], "--topic: 'a/b' is not a name"),
        (["tail", "-b", "a:1", "-n", "-1"], "-n is -1; it must be a number of records"),
        (["topic", "create", "-b", "a:1", "--name", "a b"], "--name: 'a b' is not a name"),
        (["topic", "create", "-b", "a:1", "--partitions", "0"], "--partitions is 0; it must be at least 1"),
        (["topic", "create", "-b", "a:1", "--replication", "0"], "--replication is 0; it must be at least 1"),
        (["pause", "g", "-b", "a:1", "--for", "5"], "--for: '5' is not a duration"),
        (["pause", "g", "-b", "a:1", "--until", "2100-01-01"], "--until: '2100-01-01' is not an ISO 8601 time"),
        (["revoke", "g", "t", "-i", "x", "-b", "a:1", "-p", "x"], "--partitions: 'x' names no partitions"),
        (["position", "get", "g", "a/b", "-b", "a:1"], "TOPIC: 'a/b' is not a name"),
        (["position", "reset", "g", "t", "-b", "a:1", "--to-offset", "x"], "--to-offset: 'x' is not of the form"),
        (
            ["position", "reset", "g", "t", "-b", "a:1", "--to-latest", "-p", "x"],
            "--partitions: 'x' names no partitions",
        ),
        (
            ["position", "reset", "g", "t", "-b", "a:1", "--to-latest", "--wait", "x"],
            "--wait: 'x' is not a duration",
        ),
        (
            ["position", "reset", "g", "t", "-b", "a:1", "--to-datetime", "noon"],
            "--to-datetime: 'noon' is not an ISO 8601 time",
        ),
        (["settings", "disable-ranges", "g", "-b", "a:1", "--wait", "x"], "--wait: 'x' is not a duration"),
        (["outbox", "harvest", "--dsn", "host=h", "--name", ""], "name: ''; give a name of 1 to 48 bytes"),
        (["outbox", "harvest", "--dsn", "host=h"], "no Kafka cluster is specified: use --bootstrap-servers"),
        (["coordinator", "run"], "no Kafka cluster is specified: use --bootstrap-servers"),
        (["coordinator", "run", "-b", "a:1", "--health", "here"], "--health: 'here' is not an address"),
        (
            ["coordinator", "init", "-b", "a:1", "--coordinator-topic", "a/b"],
            "--coordinator-topic: 'a/b' is not a name",
        ),
        (["kafka", "up", "--brokers", "2"], "brokers is 2; it must be 1 or 3"),
        (["kafka", "up", "--port", "70000"], "port is 70000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    """An invalid value is reported with its option before anything is connected or started."""
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVERS", raising=False)
    answer = call(capsys, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.error


def test_the_environment_is_named_where_it_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid variable is reported by its own name; the value of a secret never appears."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "a:1")
    monkeypatch.setenv("MARSHAL_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("MARSHAL_PASSWORD", "gehe1m")
    answer = call(capsys, "status")
    assert answer.code == 2
    assert "MARSHAL_SASL_MECHANISM" in answer.error
    assert "gehe1m" not in answer.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigurationError("x"), 2),
        (errors.UnavailableError("x"), 3),
        (PortInUseError("x"), 3),
        (MalformedLogError("x"), 4),
        (errors.TopicNotFoundError("x"), 5),
        (errors.AuthorizationError("x"), 6),
        (errors.CoordinationLogChangedError("x"), 1),
        (errors.UnsafeTopicError("t", ["x"]), 1),
        (OSError(28, "No space left on device"), 1),
        (ValueError("x"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code(error: Exception, code: int | None) -> None:
    """The exit code shows what kind of error occurred."""
    assert code_of(error) == code


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `replay` fail."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(replay_command, "stored_log", fail)


def test_an_error_is_one_line_whatever_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line breaks and escape sequences of a message do not reach the terminal, and there is no traceback."""
    failing(monkeypatch, errors.MarshalError("first\nsecond \x1b[31mred"))
    answer = call(capsys, "replay", "x")
    assert (answer.code, answer.error) == (1, r"marshal-dagster: first second \x1b[31mred")


@pytest.mark.parametrize("arguments", [["--debug", "replay", "x"], ["replay", "x", "--debug"]])
def test_debug_shows_where_an_error_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """With `--debug` at any place, the traceback precedes the line."""
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    failing(monkeypatch, errors.MarshalError("no"))
    answer = call(capsys, *arguments)
    assert answer.err.startswith("Traceback")
    assert answer.err.endswith("marshal-dagster: no\n")


def test_a_mistake_of_ours_is_reported_as_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error is one line too, with its own exit code and what to do."""
    failing(monkeypatch, KeyError("lost"))
    answer = call(capsys, "replay", "x")
    assert answer.code == ExitCode.BUG
    assert "unexpected KeyError: 'lost'; this is a bug in marshal-dagster: run it again with --debug" in answer.error


@pytest.mark.slow
def test_an_interrupt_is_quiet() -> None:
    """Ctrl-C ends with exit code 130 and without a message."""
    command = [*COMMAND, "replay", "-", "--at-each", "--coordination-partitions", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdin.write(stored([(0, 0, 0, None)]).encode())
        process.stdin.flush()
        assert process.stdout.readline() != b""
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 130
        assert process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--at-each"], []])
def test_a_closed_pipe_is_quiet(tmp_path: Path, options: list[str]) -> None:
    """If the reader closes the pipe, as `head` does, there is no error message."""
    path = tmp_path / "log.jsonl"
    path.write_text(stored([(0, n, 0, f"ClaimingPartition/1/1/{'i' * 200}/c/{'g' * 200}/t/{n}") for n in range(5_000)]))
    process = subprocess.Popen(
        [*COMMAND, "replay", path, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.close()
        assert process.wait(WITHIN_S) == ExitCode.PIPE_CLOSED
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_what_is_piped_has_no_colour_and_no_folded_line() -> None:
    """Without a terminal each row of a table is one line, without escape sequences."""
    answer = start("replay", VECTOR, environment={"COLUMNS": "20", "FORCE_COLOR": "1"})
    assert answer.code == 0
    assert "\x1b" not in answer.out
    assert len([line for line in answer.out.splitlines() if line.startswith("wide/")]) == 64


def parts_read(terminal: int) -> Iterator[bytes]:
    """Read all that was written to a terminal whose other side is closed. It may come in parts."""
    with suppress(OSError):  # the end
        while part := os.read(terminal, 65_536):
            yield part


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_has_colour_unless_it_wants_none(
    tmp_path: Path, environment: dict[str, str], has_colour: bool
) -> None:
    """On a terminal a warning is coloured, except with NO_COLOR."""
    path = tmp_path / "log.jsonl"
    path.write_text(stored([(0, 5, 0, "Mark/1/1/i/c/g//0")]))
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, "replay", path], stdout=theirs, env=environ({"TERM": "xterm-256color"} | environment)
        )
        assert process.wait(WITHIN_S) == 0
        os.close(theirs)
        written = b"".join(parts_read(ours)).decode()
    finally:
        os.close(ours)
    assert "Only observed" in written
    assert ("\x1b[33m" in written) == has_colour


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_no_success(tmp_path: Path, unbuffered: str) -> None:
    """The disk of a file to which stdout is redirected may be full."""
    path = tmp_path / "log.jsonl"
    path.write_text(stored([(0, 0, 0, "Mark/1/1/i/c/g//0")]))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "replay", path],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            env=environ({"PYTHONUNBUFFERED": unbuffered}),
        )
    said = b"marshal-dagster: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_no_terminal_acts_upon_what_a_log_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Invisible and directional characters in a name are shown as escapes, and markup as plain text."""
    name = "[red]\u202eevil\u200b"
    path = tmp_path / "log.jsonl"
    path.write_text(stored([(0, 0, 0, f"ClaimingPartition/1/1/{name}/c/g/t/0")]))
    out = call(capsys, "replay", path).out
    assert r"[red]\u202eevil\u200b (c)" in out
    assert out.replace("\n", "").isprintable()


def test_the_version_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the program and its version."""
    assert call(capsys, "--version").out.startswith("marshal-dagster 0.")


def test_a_command_that_mends_names_the_cluster() -> None:
    """A Kafka tool gets the servers as an option; other advice stays unchanged."""
    problem = topic_settings.SettingProblem("retention.ms", "1", "-1", "why", "kafka-configs --alter")
    assert topic.with_servers(problem, "a:1,b:2").fix == "kafka-configs --bootstrap-server a:1,b:2 --alter"
    other = topic_settings.SettingProblem("replicas", "1", "3", "why", "more brokers")
    assert topic.with_servers(other, "a:1") == other


@pytest.mark.parametrize(
    ("length_ms", "said"),
    [(0, "0 s"), (1_500, "1.5 s"), (61_000, "1 min 1 s"), (7_500_000, "2 h 5 min"), (273_600_000, "3 d 4 h")],
)
def test_a_length_of_time_is_said_as_a_person_would(length_ms: int, said: str) -> None:
    """A duration is shown in its two largest units."""
    assert output.duration(length_ms) == said


@pytest.mark.parametrize(
    ("at_ms", "said"),
    [(0, "1970-01-01 00:00:00.000Z"), (1_795_230_346_706, "2026-11-21 03:05:46.706Z"), (2**62, f"{2**62} ms")],
)
def test_a_time_is_said_in_utc_or_as_its_number(at_ms: int, said: str) -> None:
    """A time that no calendar has, as of an unlimited pause, is shown as a number."""
    assert output.utc(at_ms) == said


def test_run_gives_the_code_to_who_calls_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`run` returns the exit code for every command line; only `main` exits the process."""
    assert run(["replay", "/nowhere/at/all"]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1
