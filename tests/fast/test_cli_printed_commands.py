"""Commands that are printed to be run get the options that name the cluster and the topics."""

import re
import shlex
from pathlib import Path

import pytest

from marshal_dagster.cli import output, tail, world_reader
from marshal_dagster.cli.main import COMMANDS, load_command
from marshal_dagster.cli.printed_commands import PrintedCommands
from marshal_dagster.testing import MemoryBroker, MemoryLog
from tests.admin_fixtures import FakeTopics, at_work_on, site_now
from tests.cli import REPOSITORY, call
from tests.members import GROUP

GIVEN = ("-b", "broker:1", "--coordination-topic", "log")
CARRIED = "--bootstrap-servers broker:1 --coordination-topic log"
PRINTED = re.compile(r"marshal-dagster((?: [a-z][a-z-]*)+)")
TAKES = {"bootstrap_servers", "MARSHAL_COORDINATION_TOPIC"}


@pytest.fixture
def memory_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tail` read an empty log in memory."""
    monkeypatch.setattr(tail, "open_log", lambda *_: MemoryLog(MemoryBroker(1)))
    monkeypatch.setattr(tail, "require_rights", lambda *_: None)


@pytest.fixture
def given(memory_log: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> PrintedCommands:
    """Return what a command line with a cluster and a coordination topic makes of commands."""
    del memory_log
    made: list[PrintedCommands | None] = []
    monkeypatch.setattr(output, "complete_commands", made.append)
    assert call(capsys, "tail", *GIVEN).code == 0
    commands, after = made
    assert commands is not None
    assert after is None
    return commands


def leaf(words: list[str]) -> list[str]:
    """Return the part that names a command; an empty list if there is none."""
    if words[0] not in COMMANDS:
        return []
    command, count = load_command(words[0]), 1
    while count < len(words) and words[count] in getattr(command, "commands", {}):
        command, count = command.commands[words[count]], count + 1
    return [] if hasattr(command, "commands") else words[:count]


def printed() -> set[tuple[str, ...]]:
    """Return each command that a text of the library names."""
    found: set[tuple[str, ...]] = set()
    for file in (REPOSITORY / "marshal_dagster").rglob("*.py"):
        # A text may be split over two literals.
        text = re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
        found |= {tuple(leaf(each[1].split())) for each in PRINTED.finditer(text)}
        found |= {
            tuple(leaf(re.findall(r'"([a-z-]+)"', each[1])))
            for each in re.finditer(r'\["marshal-dagster"((?:, "[a-z-]+")+)', text.replace("'", '"'))
        }
    return found - {()}


def test_each_printed_command_that_takes_them_gets_the_options(given: PrintedCommands) -> None:
    """The library names some twenty commands, and those of a local Kafka or of the outbox take fewer options."""
    commands = printed()
    assert len(commands) > 15
    assert {("resume",), ("position", "reset"), ("retry",), ("doctor",), ("recover",)} <= commands
    for words in commands:
        command = load_command(words[0])
        for word in words[1:]:
            command = command.commands[word]
        takes = {str(option.envvar or option.name): option.opts[0] for option in command.params}
        expected = [
            part
            for key, value in (("bootstrap_servers", "broker:1"), ("MARSHAL_COORDINATION_TOPIC", "log"))
            if key in takes
            for part in (takes[key], value)
        ]
        line = shlex.join(["marshal-dagster", *words])
        order = sorted(shlex.split(given.complete(f"{line} g"))[len(words) + 1 : -1])
        assert order == sorted(expected), line


def test_only_commands_are_changed(given: PrintedCommands) -> None:
    """Other text after the name of the program is prose. What has an option already, keeps it."""
    for text in (
        "marshal-dagster does not work without them",
        "marshal-dagster kafka up (a Kafka for this machine)",
        "marshal-dagster topic",
        "a newer marshal-dagster wrote: update this one",
        f"run `marshal-dagster resume {CARRIED} g`",
        "`marshal-dagster topic create --name other -b else:1`",
    ):
        assert given.complete(text) == text
    assert given.complete("`marshal-dagster position reset`; run marshal-dagster doctor") == (
        f"`marshal-dagster position reset {CARRIED}`; run marshal-dagster doctor {CARRIED}"
    )
    once = given.complete("`marshal-dagster resume 'a b'`")
    assert (once, given.complete(once)) == (f"`marshal-dagster resume {CARRIED} 'a b'`", once)


@pytest.mark.usefixtures("memory_log")
def test_values_are_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A pasted command must have the same value."""
    file = tmp_path / "my connection.toml"
    file.write_text('bootstrap_servers = "127.0.0.1:1"')
    answer = call(capsys, "tail", "--topic", "x", "--connection", file)
    assert f"`marshal-dagster lag --connection {shlex.quote(str(file))}` lists the topics" in answer.err


@pytest.mark.usefixtures("memory_log")
def test_variables_are_not_repeated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold for the pasted command too."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("MARSHAL_COORDINATION_TOPIC", "log")
    assert "`marshal-dagster lag` lists the topics" in call(capsys, "tail", "--topic", "x").err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_paused_group_is_shown_with_the_whole_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """In text, and in the lines that JSON has for operators."""
    site = site_now()
    at_work_on(site, monkeypatch, world_reader, topics=FakeTopics())
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    for number in range(site.partitions):
        until_s = site.clock.wall_ms() // 1_000 + 10**6
        site.broker.append(number, f"ReleaseGroup/1/1/op.1/c/{GROUP}//0/{until_s}".encode(), site.clock.wall_ms())
    answer = call(capsys, "status", *GIVEN, *(["--json"] if as_json else []))
    assert f"`marshal-dagster resume {CARRIED} {GROUP}`" in answer.out
