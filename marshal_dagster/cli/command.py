"""What all commands are made of."""

from typing import Any, Final

import typer
from typer.core import TyperCommand

from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import HELP

PROGRAM: Final = "marshal-dagster"


class Command(TyperCommand):
    """A command whose reader may go away: typer would take that for a failure."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401 - whatever it returns
        """Carry the command out. Raises `PipeClosedError`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise output.PipeClosedError from None


def command_group(about: str, *, add_completion: bool = False) -> typer.Typer:
    """Make a group of commands; the outermost one can add the options that install a shell's completion."""
    return typer.Typer(
        help=about,
        epilog=HELP,
        no_args_is_help=True,
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def help_text(what: str, *examples: str) -> str:
    """Put a command's help together, the lines of the examples kept as they are."""
    shown = "\n".join(f"  {PROGRAM} {example}" for example in examples)
    return f"{what}\n\n\b\n{'Example' if len(examples) == 1 else 'Examples'}:\n{shown}"
