"""`position set`: shows where a group stands in a topic and where it is to stand, asks, and sets it."""

from marshal_dagster.admin.position_spec import Where
from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import Moving


def run(moving: Moving, where: Where, *, new_group: bool) -> ExitCode:
    """Show what was and what is to be, ask, and set the positions. Raises `MarshalError`."""
    moving.check()
    target, named = where.target("--"), moving.named()
    with moving.opened("position") as (_, work):
        moves = work.look(target, named, outside_the_log=moving.outside_the_log, new_group=new_group)
        for warning in work.warnings():
            output.note(warning)
        return moving.carry_through(work, moves, "Set these positions?")
