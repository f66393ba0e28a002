"""`reprocess`: let a group's members process a range of offsets again, then continue at their former position."""

from typing import Annotated, Final

import typer

from marshal_dagster.admin.reprocess import RangeReprocessor, ReprocessPlan, ReprocessResult
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import SettingOptions

_COLUMNS: Final = ("partition", "#log start", "#log end", "#position", "#again from", "#up to", "note")

app = command_group("Process a range of offsets again.")


@command(
    app,
    "reprocess",
    "Process a range of offsets again. The group's own members do it, as they did before, and must keep running. The "
    "command shows the range and asks for confirmation. It then sets the position back to the range's start, waits "
    "until the members have reached its end, and sets the group to its former position. If it is interrupted, the "
    "group continues at its former position. The exit code is 1 if the members did not finish in time.",
    "reprocess flights flights --partition 0 --from 1500 --to 1720 --dry-run",
    "reprocess flights flights --partition 0 --from 1500 --to 1720 --within 2h --yes",
)
def reprocess(
    *,
    partition: Annotated[
        int, typer.Option("--partition", "-p", metavar="N", min=0, help="The partition.", show_default=False)
    ],
    start: Annotated[
        int, typer.Option("--from", metavar="OFFSET", min=0, help="The first offset of the range.", show_default=False)
    ],
    end: Annotated[
        int,
        typer.Option("--to", metavar="OFFSET", min=1, help="The first offset after the range.", show_default=False),
    ],
    within: Annotated[
        str, typer.Option("--within", metavar="DURATION", help="How long to wait for the members to finish.")
    ] = "1h",
    options: SettingOptions,
) -> ExitCode:
    """Show the range, ask for confirmation, and wait until it is processed. Raises `MarshalError`."""
    within_s = duration_s(within, "--within")
    with options.opened("redo", PositionResetter) as resetter:
        reprocessor = RangeReprocessor(resetter)
        plan = reprocessor.look(partition, start, end)
        for warning in resetter.warnings([plan.back]):
            output.write_note(warning)
        if not options.as_json:
            _show(options, partition, plan)
        if options.dry_run:
            _report(options, partition, plan, None)
            return ExitCode.OK
        if not (options.yes or typer.confirm("Process this range again? The group is paused twice, briefly", err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        result = reprocessor.carry_out(
            plan, wait_s=duration_s(options.wait, "--wait"), within_s=within_s, report=output.write_note
        )
    _report(options, partition, plan, result)
    if result.problem is not None:
        output.write_note(result.problem)
    if result.reached >= plan.end:
        return ExitCode.OK
    output.write_note(
        f"the members did not finish within {within}: the offsets from {result.reached} up to {plan.end} were not "
        "committed again"
    )
    return ExitCode.PROBLEMS


def _show(options: SettingOptions, partition: int, plan: ReprocessPlan) -> None:
    extent = plan.back.extent
    numbers = (extent.start, extent.end, plan.position_before, plan.back.offset, plan.end)
    output.show(
        output.styled(f"Group {options.group}, topic {options.topic}", "bold"),
        output.Table(
            _COLUMNS, [[str(partition), *map(str, numbers), output.notes_cell(plan.back.notes)]], may_fold={"note"}
        ),
    )


def _report(options: SettingOptions, partition: int, plan: ReprocessPlan, result: ReprocessResult | None) -> None:
    """Report the result; None for a dry run."""
    if options.as_json:
        output.write_json(
            {
                "group": options.group,
                "topic": options.topic,
                "partition": partition,
                "dry_run": options.dry_run,
                "start": plan.back.offset,
                "end": plan.end,
                "stood_at": plan.position_before,
                "reached": None if result is None else result.reached,
                "goes_on_at": None if result is None else result.resume_offset,
                "notes": list(plan.back.notes),
            }
        )
    elif result is None:
        output.show(output.DRY_RUN)
    elif result.reached >= plan.end:
        output.show(f"Processed again up to {plan.end}.")
