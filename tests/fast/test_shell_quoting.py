"""Commands in messages can be pasted into a shell, whatever the name of a group or an outbox is."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from marshal_dagster.admin.go_groups import require_pause_allowed
from marshal_dagster.errors import GoGroupError
from marshal_dagster.protocol.world import World

SOURCES: Final = Path(__file__).parents[2] / "marshal_dagster"
COMMAND: Final = re.compile(r"((`|: )marshal-dagster( [a-z]+)+|--(group|name|consumer-group|go-consumers-stopped)) $")
"""Text after which a message names a group or an outbox, or a topic, whose name needs no quotes."""


def unquoted(source: str) -> Iterator[str]:
    """Yield each value that an f-string puts into a command without quoting it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            if COMMAND.search(text) and not (isinstance(part.value, ast.Call) or text.endswith("topic create --name ")):
                yield f"{text}{{{value}}}"
            text += "VALUE"


@pytest.mark.thorough
def test_messages_quote_each_name_in_a_command() -> None:
    """A name of a group or an outbox is quoted by `shlex`."""
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    sources = {path: text for path, text in sources.items() if re.search(r"(`|: )marshal-dagster |--go-c", text)}
    assert {path: found for path, text in sources.items() if (found := list(unquoted(text)))} == {}


def test_a_name_without_quotes_is_found() -> None:
    """The check above finds what it is for."""
    assert list(unquoted('f"`marshal-dagster settings set {name}`"')) == ["`marshal-dagster settings set {name}"]
    assert list(unquoted('f"`marshal-dagster settings set {shlex.quote(name)}`"')) == []
    assert list(unquoted('f"give --go-consumers-stopped {group}"')) == ["give --go-consumers-stopped {group}"]


@pytest.mark.parametrize("group", ["a b", "it's", "etl"])
def test_a_message_can_be_pasted(group: str) -> None:
    """A shell splits the command into the arguments that were meant."""
    with pytest.raises(GoGroupError) as raised:
        require_pause_allowed(World(1), group, stopped=False)
    command = re.search(r"`(.*?)`", str(raised.value))
    assert command is not None
    assert shlex.split(command[1]) == ["marshal-dagster", "settings", "set", group, "--new-group"]
