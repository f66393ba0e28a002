"""`reprocess`: the group's own members do a range of offsets again, then go on where they stood."""

from dataclasses import dataclass
from typing import Final

import typer

from marshal_dagster.admin.reprocess import RangeReprocessor, ReprocessPlan, ReprocessResult
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.position_context import PositionRequest

_COLUMNS: Final = ("partition", "#log start", "#log end", "#position", "#again from", "#up to", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReprocessRequest(PositionRequest):
    """What is done again: the offsets from `start` up to `end` (exclusive)."""

    partition: int
    start: int
    end: int
    within: str


def run(request: ReprocessRequest) -> ExitCode:
    """Show what is to be, ask, and stay until it is done. Raises `MarshalError`."""
    request.check()
    wait_s, within_s = duration_s(request.wait, "--wait"), duration_s(request.within, "--within")
    with request.opened("redo", PositionResetter) as positions:
        work = RangeReprocessor(positions)
        redo = work.look(request.partition, request.start, request.end)
        for warning in positions.warnings():
            output.write_note(warning)
        if not request.as_json:
            _show(request, redo)
        if not request.dry_run and not (request.yes or _agreed()):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        redone = None
        if not request.dry_run:
            redone = work.carry_out(redo, wait_s=wait_s, within_s=within_s, report=output.write_note)
    return _report(request, redo, redone)


def _agreed() -> bool:
    return typer.confirm("Have this done again? The group is paused twice, for a moment", err=True)


def _show(request: ReprocessRequest, redo: ReprocessPlan) -> None:
    extent, notes = redo.back.extent, redo.back.notes
    numbers = (extent.start, extent.end, redo.position_before, redo.back.offset, redo.end)
    note = output.styled("; ".join(notes), "yellow") if notes else output.NOTHING
    output.show(
        output.styled(f"Group {request.group}, topic {request.topic}", "bold"),
        output.Table(_COLUMNS, [[str(request.partition), *map(str, numbers), note]], may_fold={"note"}),
    )


def _report(request: ReprocessRequest, redo: ReprocessPlan, redone: ReprocessResult | None) -> ExitCode:
    is_done = redone is not None and redone.reached >= redo.end
    if request.as_json:
        output.write_json(
            {
                "group": request.group,
                "topic": request.topic,
                "partition": request.partition,
                "dry_run": request.dry_run,
                "start": redo.back.offset,
                "end": redo.end,
                "stood_at": redo.position_before,
                "reached": None if redone is None else redone.reached,
                "goes_on_at": None if redone is None else redone.resume_offset,
                "notes": list(redo.back.notes),
            }
        )
    elif redone is None:
        output.show("A dry run: nothing was written.")
    elif is_done:
        output.show(f"Done again up to {redo.end}.")
    if redone is None:
        return ExitCode.OK
    if redone.problem is not None:
        output.write_note(redone.problem)
    if not is_done:
        output.write_note(
            f"the members were not through within {request.within}: what lies from {redone.reached} up to {redo.end} "
            "was not committed again"
        )
    return ExitCode.OK if is_done else ExitCode.PROBLEMS
