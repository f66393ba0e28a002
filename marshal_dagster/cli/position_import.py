"""`adopt`: a group's first positions, from a consumer group or a checkpoint of Structured Streaming."""

from marshal_dagster.admin.import_positions import PositionImporter, PositionSourceOptions
from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position import PositionOptions


def run(moving: PositionOptions, given: PositionSourceOptions) -> ExitCode:
    """Show where the group would begin, ask, and set its positions. Raises `MarshalError`."""
    moving.check()
    others, named = given.begin_at("--"), moving.named()
    with moving.opened("adopt", PositionImporter) as work:
        source = given.source(work.topics, moving.topic)
        moves = work.look_at(source, named, others=others, allow_out_of_range=moving.allow_out_of_range)
        if not moving.dry_run:
            source.require_at_rest()
        for warning in (*source.notes, *work.warnings()):
            output.write_note(warning)
        return moving.confirm_and_set(work, moves, "Begin at these positions?")
