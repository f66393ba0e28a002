"""`retry`: end plans that failed too often, so that the next run plans and processes their offsets again."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from marshal_dagster.admin.retry_plans import PlanRetrier
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.attention import plan_json
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import MaxAttempts
from marshal_dagster.cli.position import SettingOptions
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, OpenPlan

_COLUMNS: Final = ("partition", "#from", "#up to", "#tries")

app = command_group("Retry plans that failed too often.")


@command(
    app,
    "retry",
    "Retry plans that failed too often. Members no longer try these exhausted plans. Fix the cause first. The command "
    "shows the exhausted plans of a group in a data topic, asks for confirmation, and sets the position of each of "
    "their partitions to its present offset. That ends the plan, and the group's next run makes a new one. The group "
    "is paused for the change, and a pause that was in force is restored. With PARTITION the command retries the plan "
    "of that partition even if it failed less often. The exit code is 1 if there is no such plan.",
    "retry flights flights",
    "retry flights flights 3 --yes",
)
def retry(
    *,
    options: SettingOptions,
    partition: Annotated[int | None, typer.Argument(metavar="PARTITION", min=0, help="Only this partition.")] = None,
    max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS,
) -> ExitCode:
    """Show the plans, ask for confirmation, and end them. Raises `MarshalError`."""
    with options.opened("retry", PlanRetrier) as retrier:
        plans = retrier.exhausted(partition, max_attempts=max_attempts)
        if not plans:
            output.write_note(retrier.nothing_to_retry(partition))
            if options.as_json:
                output.write_json(_to_json(options, plans))
            return ExitCode.PROBLEMS
        if not _carry_out(options, retrier, plans):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
    if options.as_json:
        output.write_json(_to_json(options, plans))
    elif options.dry_run:
        output.show(output.DRY_RUN)
    else:
        output.show("The group's next run tries these offsets again.")
    return ExitCode.OK


def _carry_out(options: SettingOptions, retrier: PlanRetrier, plans: Sequence[OpenPlan]) -> bool:
    """Show the plans and warnings, ask for confirmation, and end the plans; return whether the user agreed."""
    changes = retrier.look_at_plans(plans)
    for warning in retrier.warnings(changes):
        output.write_note(warning)
    for change in changes:
        for range_ in change.ahead:
            place = f"{options.topic}/{change.partition} [{range_.start}, {range_.end})"
            output.write_note(f"{place} is {range_.phase}: it will be processed again too")
    if not options.as_json:
        output.show(
            output.styled(f"Group {options.group}, topic {options.topic}", "bold"),
            output.Table(_COLUMNS, [_row(plan) for plan in plans]),
        )
    if options.dry_run:
        return True
    if not (options.yes or typer.confirm("Retry these plans? The group is paused briefly", err=True)):
        return False
    problem = retrier.carry_out(changes, wait_s=duration_s(options.wait, "--wait"))
    if problem is not None:
        output.write_note(problem)
    return True


def _row(plan: OpenPlan) -> list[str | output.Line]:
    return [str(plan.partition), output.number(plan.start), str(plan.end), str(plan.tries)]


def _to_json(options: SettingOptions, plans: Sequence[OpenPlan]) -> dict[str, Any]:
    return {
        "group": options.group,
        "topic": options.topic,
        "dry_run": options.dry_run,
        "plans": [plan_json(plan) for plan in plans],
    }
