"""Complete the commands that are printed for a user to run.

Such a command must reach the same cluster and topics as the command that prints it. So it gets the options that name
them, if they were given on the command line. Environment variables hold for both.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_COMMAND: Final = re.compile(r"\bmarshal-dagster((?: [a-z][a-z-]*)+)")
_REST: Final = re.compile(r"[^`;]*")
"""The text after a command that may have its options."""
_CARRIED: Final = frozenset(
    {
        "bootstrap_servers",
        "connection_file",
        "data_connection",
        "MARSHAL_COORDINATION_TOPIC",
        "MARSHAL_COORDINATOR_TOPIC",
    }
)
_OF_OUTBOX: Final = frozenset({"name", "schema"})


@dataclass(frozen=True, slots=True)
class PrintedCommands:
    """The options that one command line gave, for the commands that it prints."""

    root: Any
    """The parser's context of the program; typer has no public name for its type."""
    given: Mapping[str, str]
    """The given values by the key of their option (`_key`)."""

    @classmethod
    def of(cls, context: Any) -> "PrintedCommands":  # noqa: ANN401 - the parser's
        """Return the options of a command line that was parsed."""
        is_outbox = context.command_path.split()[1:2] == ["outbox"]
        carried = _CARRIED | _OF_OUTBOX if is_outbox else _CARRIED
        return cls(
            context.find_root(),
            {
                _key(option): str(context.params[option.name])
                for option in context.command.params
                if _key(option) in carried and context.get_parameter_source(option.name).name == "COMMANDLINE"
            },
        )

    def complete(self, text: str) -> str:
        """Return the text with the options added to each command in it that takes them and does not have them."""
        return _COMMAND.sub(self._completed, text) if self.given else text

    def _completed(self, found: re.Match[str]) -> str:
        command, words = self._resolve(found[1].split())
        if command is None or not hasattr(command, "params") or hasattr(command, "commands"):
            return found[0]
        name = " ".join(["marshal-dagster", *words])
        rest = found.string[found.start() + len(name) :]
        options = shlex.join(self._options(command, words, set(_words(rest))))
        return name + (f" {options}" if options else "") + found[0][len(name) :]

    def _resolve(self, words: list[str]) -> tuple[Any, list[str]]:
        """Return the command that a text begins with, and the part that names it; None if it names no command."""
        if words[0] not in self.root.command.commands:
            return None, []
        _, command, _ = self.root.command.resolve_command(self.root, words[:1])
        count = 1
        while count < len(words) and words[count] in getattr(command, "commands", {}):
            command, count = command.commands[words[count]], count + 1
        return command, words[:count]

    def _options(self, command: Any, words: list[str], present: set[str]) -> Iterator[str]:  # noqa: ANN401 - the parser's
        for option in command.params:
            key = _key(option)
            is_other = key in _OF_OUTBOX and words[0] != "outbox"
            if key in self.given and not is_other and present.isdisjoint(option.opts):
                yield from (option.opts[0], self.given[key])


def _key(option: Any) -> str:  # noqa: ANN401 - the parser's
    """Return what identifies an option in all commands: its variable, as some have other names, or its name."""
    return str(option.envvar or option.name)


def _words(rest: str) -> list[str]:
    found = _REST.match(rest)
    return [] if found is None else found[0].split()
