"""Positions that are set: shown before and after, asked about, set, and told of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import typer

from marshal_dagster.admin.go_groups import Way
from marshal_dagster.admin.position_spec import partitions_of
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position_context import PositionRequest
from marshal_dagster.errors import MarshalError

_HOW: Final = {
    Way.PAUSE: "The group is paused meanwhile",
    Way.SETTINGS_FIRST: "The group gets its settings first, and is paused meanwhile",
    Way.GO: "The group is not paused: all of its consumers must be stopped",
}
_COLUMNS: Final = ("partition", "#log start", "#log end", "#before", "#after", "#by", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionOptions(PositionRequest):
    """Which positions are set, and how."""

    partitions: str | None
    allow_out_of_range: bool

    def named(self) -> Sequence[range] | None:
        """Give the partitions that were named; None for all. Raises `ConfigurationError`."""
        return None if self.partitions is None else partitions_of(self.partitions, "--partitions")

    def confirm_and_set(self, work: PositionResetter, moves: Sequence[PositionChange], question: str) -> ExitCode:
        """Show what was and what is to be, ask `question`, set it, and tell. Raises `MarshalError`."""
        ask = f"{question} " + _HOW[work.way()]
        if not self.as_json:
            output.show(
                output.styled(f"Group {self.group}, topic {self.topic}", "bold"),
                output.Table(_COLUMNS, [_row(change) for change in moves], may_fold={"note"}),
            )
        if not self.dry_run and not (self.yes or typer.confirm(ask, err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        self._report(moves, {} if self.dry_run else self._carry_out(work, moves))
        return ExitCode.OK

    def _carry_out(self, work: PositionResetter, moves: Sequence[PositionChange]) -> Mapping[int, int | None]:
        """Set the positions, and give the generations that this has begun; should it fail, say what was set."""
        if any(change.owners for change in moves):
            is_paused = "" if work.way() is Way.GO else "the group is paused; "
            output.write_note(f"{is_paused}those that hold partitions have {self.wait} to leave")
        try:
            problem = work.carry_out(moves, wait_s=duration_s(self.wait, "--wait"))
        except BaseException:
            _report_partial_change(work, moves)
            raise
        if problem is not None:
            output.write_note(problem)
        try:
            return work.done(moves)
        except MarshalError as error:
            output.write_note(f"the positions were set; the log could not be read again: {error}")
            return {each.partition: None for each in moves}

    def _report(self, moves: Sequence[PositionChange], done: Mapping[int, int | None]) -> None:
        if self.as_json:
            output.write_json(
                {
                    "group": self.group,
                    "topic": self.topic,
                    "dry_run": self.dry_run,
                    "positions": [_to_json(change, done) for change in moves],
                }
            )
        elif self.dry_run:
            output.show("A dry run: nothing was written.")
        else:
            output.show(
                f"The positions of partitions {world_view.listed([each.partition for each in moves])} were set."
            )


def _report_partial_change(work: PositionResetter, moves: Sequence[PositionChange]) -> None:
    try:
        done = work.done(moves)
    except MarshalError as error:
        output.write_note(f"what was set could not be read ({error}): see `marshal-dagster position get`")
        return
    left = [change.partition for change in moves if change.partition not in done]
    output.write_note(
        f"set: partitions {world_view.listed(done) or 'none'}; not set: {world_view.listed(left) or 'none'}"
    )


def _row(move: PositionChange) -> list[str | output.Line]:
    before = move.key.offset
    by = output.NOTHING if before is None or move.is_other else f"{move.offset - before:+d}"
    numbers = (move.extent.start, move.extent.end, before, move.offset)
    note = output.styled("; ".join(move.notes), "yellow") if move.notes else output.NOTHING
    return [str(move.partition), *map(output.number, numbers), by, note]


def _to_json(move: PositionChange, done: Mapping[int, int | None]) -> dict[str, Any]:
    return {
        "partition": move.partition,
        "log_start": move.extent.start,
        "log_end": move.extent.end,
        "before": move.key.offset,
        "after": move.offset,
        "set": move.partition in done,
        "generation": done.get(move.partition),
        "notes": list(move.notes),
    }
