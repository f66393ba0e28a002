"""`sink`: show what the output of a sink has, check it, and shorten its record of ranges."""

from dataclasses import asdict
from typing import Annotated, Final

import typer

from marshal_dagster.admin.named_sink import named_sink
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import AsJson, DryRun, Yes
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.report import ReportingSink, StoredGeneration, VacuumResult

_COLUMNS: Final = (
    "group",
    "topic",
    "#partition",
    "#generation",
    "#from",
    "#up to",
    "#ranges",
    "#rows",
    "#gaps",
    "note",
)
_SINK: Final = "--sink"

app = command_group("Describe, check and vacuum the output of a sink.")

Sink = Annotated[
    str, typer.Option(_SINK, metavar="MODULE:NAME", help="The sink, or a function without arguments that returns it.")
]


@command(
    app,
    "describe",
    "Show the ranges and positions of a sink's output. They are shown by group, partition and generation. The rows are "
    "those that were written, also if they were replaced or deleted later. DeltaSink and KafkaSink "
    "store only positions.",
    "sink describe --sink my_project.sinks:orders",
)
def describe(*, sink: Sink, as_json: AsJson = False) -> ExitCode:
    """Show the ranges of the output. Raises `MarshalError`."""
    report = _reporting(sink).describe()
    if as_json:
        output.write_json(asdict(report))
        return ExitCode.OK
    output.show(output.styled(f"Output: {report.output}", "bold"))
    if report.generations:
        output.show(output.Table(_COLUMNS, [_row(stored) for stored in report.generations], may_fold={"note"}))
    else:
        output.show("It has no ranges.")
    return ExitCode.OK


def _row(stored: StoredGeneration) -> list[str | output.Line]:
    numbers = (stored.partition, stored.generation, stored.start, stored.end, stored.ranges, stored.rows, stored.gaps)
    cells = ["-" if number is None else str(number) for number in numbers]
    notes = (["in any order"] if stored.in_any_order else []) + ([] if stored.is_current else ["older generation"])
    return [stored.group, stored.topic, *cells, output.notes_cell(notes)]


@command(
    app,
    "check",
    "Check whether the output of a sink is whole. Its ranges must have no gaps and overlaps, its positions must match "
    "them, and each row must belong to a range. The command reads all rows and changes nothing. The exit code is 1 if "
    "something is wrong, or if the output has no ranges.",
    "sink check --sink my_project.sinks:orders",
)
def check(*, sink: Sink, as_json: AsJson = False) -> ExitCode:
    """Show what is wrong with the output. Raises `MarshalError`."""
    reporting = _reporting(sink)
    problems = list(reporting.check())
    if not problems and not (stored := reporting.describe()).generations:
        problems = [
            f"{stored.output} has no ranges, so there is nothing to check: correct the sink, if batches were written"
        ]
    if as_json:
        output.write_json({"problems": problems})
    else:
        output.show(*(problems or ["The output is whole."]))
    return ExitCode.PROBLEMS if problems else ExitCode.OK


@command(
    app,
    "vacuum",
    "Remove files and records that no write needs. Of a FileSink these are the files of attempts that did not commit, "
    "of a database sink records of ranges. Entries of adjacent ranges become one, and their rows are assigned to it. "
    "Entries of older generations without rows are deleted. The command shows the numbers and asks for confirmation. "
    "Writers of a partition wait while it is worked on.",
    "sink vacuum --sink my_project.sinks:orders --dry-run",
    "sink vacuum --sink my_project.sinks:orders --yes",
)
def vacuum(*, sink: Sink, dry_run: DryRun = False, yes: Yes = False, as_json: AsJson = False) -> ExitCode:
    """Show what would be removed, ask for confirmation, and remove it. Raises `MarshalError`."""
    if as_json and not (yes or dry_run):
        raise output.cannot_ask("with --dry-run")
    reporting = _reporting(sink)
    result = reporting.vacuum(dry_run=True)
    if not as_json:
        _show_planned(result)
    if not dry_run and result.merged + result.obsolete + result.completed:
        verbs = "Complete and delete" if result.completed else "Merge and delete"
        if not (yes or typer.confirm(f"{verbs} these {result.what}? Writers may wait meanwhile", err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        result = reporting.vacuum(dry_run=False)
    if as_json:
        output.write_json(asdict(result))
    elif dry_run:
        output.show(output.DRY_RUN)
    else:
        _show_done(result)
    return ExitCode.OK


def _show_planned(result: VacuumResult) -> None:
    left = result.entries - result.merged - result.obsolete - result.completed
    output.show(
        output.styled(f"Output: {result.output}", "bold"),
        f"{result.entries} {result.what}: {result.merged} can be merged, {result.obsolete} deleted. {left} stay.",
    )
    if result.completed:
        output.show(f"{result.completed} {result.what} were committed: their files are moved to their places.")
    if result.hint is not None:
        output.show(result.hint)


def _show_done(result: VacuumResult) -> None:
    if result.moved_rows is not None:
        output.show(f"Done: {result.moved_rows} rows were assigned to merged entries.")
    elif result.completed:
        output.show(f"Done: {result.completed} {result.what} were completed, and {result.obsolete} were deleted.")
    elif result.obsolete:
        output.show(f"Done: {result.obsolete} {result.what} were deleted.")


def _reporting(text: str) -> ReportingSink:
    """Return the sink of that name. Raises `ConfigurationError` if it reports nothing."""
    sink = named_sink(text, _SINK)
    if not isinstance(sink, ReportingSink):
        raise ConfigurationError(
            f"{_SINK}: {text!r} is a {type(sink).__name__}, which cannot be described. Name a sink with the methods of "
            "`ReportingSink`"
        )
    return sink
