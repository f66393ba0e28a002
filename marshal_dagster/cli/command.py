"""Build the commands: their help, the list of exit codes, and the options.

A command function declares its options as parameters. Options that several commands share are fields of a dataclass
(see `options`), which `command` turns into parameters.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import HELP
from marshal_dagster.cli.printed_commands import PrintedCommands

PROGRAM: Final = "marshal-dagster"
F = TypeVar("F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command of this program: the commands that it prints are complete.

    It raises `PipeClosedError` if its reader closes the pipe. Typer itself would report a failure.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401 - what the command returns
        """Run the command. Raises `PipeClosedError`."""
        output.complete_commands(PrintedCommands.of(ctx))
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise output.PipeClosedError from None


def command_group(about: str, **options: Any) -> typer.Typer:  # noqa: ANN401 - typer's own
    """Return an empty group of commands; `options` are typer's."""
    defaults = {"add_completion": False, "no_args_is_help": True, "rich_markup_mode": None}
    return typer.Typer(
        help=about,
        epilog=HELP,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **(defaults | options),
    )


def command(app: typer.Typer, name: str, about: str, *examples: str) -> Callable[[F], F]:
    """Return a decorator that adds a function to `app` as the command `name`.

    A parameter whose type is a dataclass becomes one option for each field. The fields are annotated like typer's
    parameters. The function itself is not changed.

    Args:
        app: The group that the command is added to. A group with a single command becomes that command.
        name: The name of the command.
        about: The help text. Its first sentence is shown in the list of commands.
        examples: Calls of the command, without the program's name. Each is one line of the help.
    """
    heading = "Example" if len(examples) == 1 else "Examples"
    shown = "\n".join(f"  {PROGRAM} {example}" for example in examples)
    help_text = f"{about}\n\n\b\n{heading}:\n{shown}"

    def add(function: F) -> F:
        app.command(name, cls=Command, epilog=HELP, help=help_text)(_with_fields_as_options(function))
        return function

    return add


def _with_fields_as_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a parameter for each field of the dataclasses that `function` takes."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    records = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        plain = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += _field_parameters(records[name]) if name in records else [plain]

    @wraps(function)
    def run(**given: Any) -> Any:  # noqa: ANN401 - as `function`
        return function(**dict(_gathered(records, given)), **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _field_parameters(record: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


def _gathered(records: Mapping[str, Any], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each parameter name with its dataclass, built from the fields that are removed from `given`."""
    for name, record in records.items():
        yield name, record(**{field.name: given.pop(field.name) for field in dataclasses.fields(record)})
