"""`adopt`: a group's first positions, from a consumer group or a checkpoint of Structured Streaming."""

from marshal_dagster.admin.import_positions import Adopting, Given
from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import Moving


def run(moving: Moving, given: Given) -> ExitCode:
    """Show where the group would begin, ask, and set its positions. Raises `MarshalError`."""
    moving.check()
    others, named = given.begin_at("--"), moving.named()
    with moving.opened("adopt") as (topics, positions):
        work = Adopting(positions)
        source = given.source(topics, moving.topic)
        moves = work.look(source, named, others=others, outside_the_log=moving.outside_the_log)
        if not moving.dry_run:
            source.require_at_rest()
        for warning in (*source.notes, *work.warnings()):
            output.note(warning)
        return moving.carry_through(work, moves, "Begin at these positions?")
