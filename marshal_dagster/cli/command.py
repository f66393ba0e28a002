"""What all commands are made of: their help, their exit codes, and options that come from a dataclass."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import HELP

PROGRAM: Final = "marshal-dagster"
F = TypeVar("F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose output may be closed by its reader: typer would report that as a failure."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401 - whatever it returns
        """Carry the command out. Raises `PipeClosedError`."""
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

    A parameter whose type is a dataclass becomes one option for each of its fields, which are annotated as typer's
    parameters are. The function itself stays as it is.

    Args:
        app: The group; an app with one command alone is that command.
        name: What the command is called.
        about: Its help. The first sentence is shown in the list of commands.
        examples: Calls without the program's name; each is one line of the help.
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
    """Take the fields of each record out of `given`, and give the records by the name of their parameter."""
    for name, record in records.items():
        yield name, record(**{field.name: given.pop(field.name) for field in dataclasses.fields(record)})
