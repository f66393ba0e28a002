"""The program `marshal-dagster`: the list of its commands, and the report of errors.

A command's module is imported when the command is called, so that `--help` and `--version` answer at once.
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from marshal_dagster.cli import output
from marshal_dagster.cli.command import PROGRAM, command_group
from marshal_dagster.cli.exit_codes import ExitCode, code_of

COMMANDS: Final[Mapping[str, str]] = {
    "doctor": "Check what a deployment needs.",
    "status": "Show the world state, by group and key.",
    "top": "Watch the owners, lag and progress of partitions.",
    "lag": "Show the lag of groups.",
    "tail": "Show the records of the coordination log.",
    "replay": "Show the world state that a stored log leads to.",
    "timeline": "Draw a timeline of claims, plans and commits.",
    "recover": "Recover a log that lost its first records.",
    "pause": "Pause a group.",
    "resume": "Resume a group.",
    "reprocess": "Process a range of offsets or a window of time again.",
    "retry": "Retry plans that failed too often.",
    "revoke": "Revoke the claims of a dead owner.",
    "position": "Show and set a group's positions.",
    "settings": "Show and change a group's settings.",
    "topic": "Create and check the coordination topic.",
    "outbox": "Publish committed PostgreSQL rows to Kafka.",
    "sink": "Describe, check and vacuum the output of a sink.",
    "exporter": "Serve the state of groups to Prometheus.",
    "coordinator": "Assign partitions to the members of a group.",
    "kafka": "Start, show and stop a real Kafka on this machine.",
}
"""Each command with the first sentence of its help. Its module has the same name."""

_MODULES: Final = {"resume": "pause"}
_DEBUG: Final = "--debug"
_NULL_HANDLER: Final = logging.NullHandler()
_UsageError: Final[Any] = typer.BadParameter.__mro__[1]
"""The parser's error class, for which typer has no public name."""


def load_command(name: str) -> Any:  # noqa: ANN401 - typer names no type for a command or a group
    """Import the module of the command or group `name` and return what it defines."""
    loaded = get_command(import_module(f"marshal_dagster.cli.{_MODULES.get(name, name)}").app)
    return getattr(loaded, "commands", {}).get(name, loaded)


class _LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's own
        options["commands"] = {name: TyperCommand(name, help=about) for name, about in COMMANDS.items()}
        super().__init__(**options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer names no type for them
        """Import the command that the arguments begin with."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app = command_group(
    "Show and maintain the coordination log, in which Spark batches claim their Kafka partitions.",
    add_completion=True,
    cls=_LazyGroup,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.write_line(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the traceback of an error and the logs of Kafka's client.")
    ] = False,
) -> None:
    # The callback of `version`, and `run`, have handled both already.
    del version, debug


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is reported as one line on stderr."""
    arguments, debug = _without_debug(arguments)
    _prepare(debug=debug)
    try:
        given = get_command(app).main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        output.flush()
        return int(given or ExitCode.OK)
    except _UsageError as error:
        error.show()
        return ExitCode.USAGE
    except (output.PipeClosedError, BrokenPipeError):
        output.stop_writing()
        return ExitCode.PIPE_CLOSED
    except typer.Abort as abort:  # of a question: Ctrl-C, or an input that has ended
        has_ended = isinstance(abort.__context__, EOFError)
        return _report(output.no_answer(), debug=debug) if has_ended else ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - every error is reported in one line
        return _report(error, debug=debug)
    finally:
        output.complete_commands(None)


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    sys.exit(run(sys.argv[1:]))


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Remove `--debug`, which may be anywhere before a `--`; return the rest, and whether it was given."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != _DEBUG]
    return [*kept, *arguments[end:]], len(kept) < end


def _prepare(*, debug: bool) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a test's replacement stream may lack it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    else:
        # Log records are meant for Dagster. A command shows what matters itself, or reports it as an error.
        logging.getLogger("marshal_dagster").addHandler(_NULL_HANDLER)


def _report(error: Exception, *, debug: bool) -> ExitCode:
    code = code_of(error)
    if debug:
        traceback.print_exception(error)
    if code is None:
        kind = type(error).__name__
        advice = "" if debug else f"; this is a bug in {PROGRAM}: run it again with {_DEBUG} and report the output"
        output.write_error(f"unexpected {kind}: {error}{advice}")
        return ExitCode.BUG
    output.write_error(str(error))
    return code
