"""`position set`: shows where a group stands in a topic and where it is to stand, asks, and sets it."""

from marshal_dagster.admin.position_spec import TargetOptions
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import PositionOptions


def run(moving: PositionOptions, where: TargetOptions, *, new_group: bool) -> ExitCode:
    """Show what was and what is to be, ask, and set the positions. Raises `MarshalError`."""
    moving.check()
    target, named = where.target("--"), moving.named()
    with moving.opened("position", PositionResetter) as work:
        moves = work.look(target, named, allow_out_of_range=moving.allow_out_of_range, new_group=new_group)
        for warning in work.warnings():
            output.write_note(warning)
        return moving.confirm_and_set(work, moves, "Set these positions?")
