"""`reprocess`: let a group's members process offsets again, then continue at their former positions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from marshal_dagster.admin.reprocess import RangeReprocessor, ReprocessPlan, ReprocessResult, WindowPlans, plans_finder
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import SettingOptions
from marshal_dagster.errors import ConfigurationError

_COLUMNS: Final = ("partition", "#log start", "#log end", "#position", "#again from", "#up to", "note")

app = command_group("Process a range of offsets or a window of time again.")


@command(
    app,
    "reprocess",
    "Process a range of offsets or a window of time again. Give --partition, --from and --to (offsets), or "
    "--from-datetime and --to-datetime (all partitions, unless --partition selects one). The group's own members do "
    "it, as they did before, and must keep running. The command shows the ranges and asks for confirmation. It then "
    "sets the positions back, waits until the members have reached the end of each range, and sets the group to its "
    "former positions. If it is interrupted, the group continues at its former positions. The exit code is 1 if the "
    "members did not finish in time, or if they have not processed the window at all yet.",
    "reprocess flights flights --partition 0 --from 1500 --to 1720 --dry-run",
    "reprocess flights flights --partition 0 --from 1500 --to 1720 --within 2h --yes",
    "reprocess flights flights --from-datetime 2026-01-31T00:00Z --to-datetime 2026-02-01T00:00Z",
)
def reprocess(
    *,
    partition: Annotated[
        int | None,
        typer.Option("--partition", "-p", metavar="N", min=0, help="The partition (with times: default all)."),
    ] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", min=0, help="The first offset of the range."),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option("--to", metavar="OFFSET", min=1, help="The first offset after the range."),
    ] = None,
    from_datetime: Annotated[
        str | None,
        typer.Option(
            "--from-datetime",
            metavar="TIME",
            help="Start of the window: the first message with this timestamp or a later one. ISO 8601 with time zone.",
        ),
    ] = None,
    to_datetime: Annotated[
        str | None,
        typer.Option(
            "--to-datetime",
            metavar="TIME",
            help="End of the window (exclusive): the first message with this timestamp or a later one.",
        ),
    ] = None,
    within: Annotated[
        str, typer.Option("--within", metavar="DURATION", help="How long to wait for the members to finish.")
    ] = "1h",
    options: SettingOptions,
) -> ExitCode:
    """Show the ranges, ask for confirmation, and wait until they are processed. Raises `MarshalError`."""
    within_s = duration_s(within, "--within")
    chosen = None if partition is None else [range(partition, partition + 1)]
    find = plans_finder(chosen, start, end, from_datetime, to_datetime, prefix="--")
    if find is None:
        raise ConfigurationError(
            "give either --partition, --from and --to (offsets), or --from-datetime and --to-datetime"
        )
    with options.opened("redo", PositionResetter) as resetter:
        reprocessor = RangeReprocessor(resetter)
        found = find(reprocessor)
        for warning in resetter.warnings([plan.back for plan in found.plans]):
            output.write_note(warning)
        if not options.as_json:
            _show(options, found)
        if options.dry_run or not found.plans:
            _report(options, found, None)
            return ExitCode.OK if found.plans or not found.has_messages else ExitCode.PROBLEMS
        if not (options.yes or typer.confirm("Process this again? The group is paused for each change", err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        result = reprocessor.carry_out(
            found.plans, wait_s=duration_s(options.wait, "--wait"), within_s=within_s, report=output.write_note
        )
    _report(options, found, result)
    if result.problem is not None:
        output.write_note(result.problem)
    for part in result.unfinished:
        output.write_note(
            f"{options.topic}/{part.partition}: the members did not finish within {within}: the offsets from "
            f"{part.reached} up to {part.end} were not committed again"
        )
    return ExitCode.PROBLEMS if result.unfinished else ExitCode.OK


def _show(options: SettingOptions, found: WindowPlans) -> None:
    rows = [
        [
            *map(str, (plan.partition, plan.back.extent.start, plan.back.extent.end)),
            *map(str, (plan.position_before, plan.back.offset, plan.end)),
            output.notes_cell(plan.notes),
        ]
        for plan in found.plans
    ]
    rows += [[str(partition), "-", "-", "-", "-", "-", why] for partition, why in found.left_out.items()]
    output.show(
        output.styled(f"Group {options.group}, topic {options.topic}", "bold"),
        output.Table(_COLUMNS, rows, may_fold={"note"}),
    )


def _report(options: SettingOptions, found: WindowPlans, result: ReprocessResult | None) -> None:
    """Report the result; None if nothing was written."""
    if options.as_json:
        output.write_json(
            {
                "group": options.group,
                "topic": options.topic,
                "dry_run": options.dry_run,
                "partitions": _json_rows(found.plans, result),
                "left_out": {str(partition): why for partition, why in found.left_out.items()},
            }
        )
    elif result is None:
        output.show(output.DRY_RUN if found.plans else "There is nothing to process again.")
    else:
        done = [part for part in result.partitions if part.is_done]
        output.show(*(f"Partition {part.partition}: processed again up to {part.end}." for part in done))


def _json_rows(plans: Sequence[ReprocessPlan], result: ReprocessResult | None) -> list[Mapping[str, Any]]:
    return [
        {
            "partition": plan.partition,
            "start": plan.back.offset,
            "end": plan.end,
            "stood_at": plan.position_before,
            "reached": None if result is None else result.of(plan.partition).reached,
            "goes_on_at": None if result is None else result.of(plan.partition).resume_offset,
            "notes": list(plan.notes),
        }
        for plan in plans
    ]
