"""Check the JSON that commands write against the schema in the documentation."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from marshal_dagster.cli.main import COMMANDS, load_command

SCHEMA: Final = Path(__file__).parents[1] / "docs" / "reference" / "command-line.schema.json"
SERVICES: Final = frozenset({"outbox harvest", "coordinator run", "exporter"})
"""They write a line of JSON for each event."""
WITHOUT_VERSION: Final = SERVICES | {"tail", "replay"}
"""Commands whose JSON has no `format_version`. `tail` writes a stored log, and `replay` the state that it leads to."""
_BY_LINE: Final = SERVICES | {"tail"}


@cache
def schemas() -> dict[str, Any]:
    """Return the whole schema."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return schema


@cache
def commands_with_json() -> frozenset[str]:
    """Return the commands that have the option --json, such as `position reset`."""
    return frozenset(path for name in COMMANDS for path in _with_json([name], load_command(name)))


def _with_json(path: list[str], command: Any) -> Iterator[str]:  # noqa: ANN401 - typer names no type for a command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _with_json([*path, name], inner)
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)


def command_of(arguments: Sequence[str]) -> str | None:
    """Return the command that arguments begin with, if it has --json."""
    names = (" ".join(arguments[:count]) for count in (3, 2, 1))
    return next((name for name in names if name in commands_with_json()), None)


def check_json(arguments: Sequence[str], out: str) -> None:
    """Fail if a command wrote a JSON object with a field that its schema lacks, or without one that it requires."""
    command = command_of(arguments)
    if "--json" not in arguments or "--at-each" in arguments or command is None or not out.strip():
        return
    for text in out.splitlines() if command in _BY_LINE else [out]:
        if (value := json.loads(text)) is not None:
            validator(command).validate(value)


@cache
def validator(command: str) -> Draft202012Validator:
    """Return the validator of a command's JSON."""
    return Draft202012Validator(schemas()["$defs"][command])
