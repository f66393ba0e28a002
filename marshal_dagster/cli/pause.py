"""`pause` and `resume`: what is in force before, and what is afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.pause import GroupPauser, Pause, PauseChange
from marshal_dagster.admin.times import duration_s, instant_ms
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.connections import READING, WRITING, connection_of, open_reader, operator_name
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.pause_text import paused_text

_SECOND_MS = 1_000


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Which group, where, and whether it is only to be shown what would change.

    `go_consumers_stopped` is the group's name where a person says that no Go consumer newer than January 2017 starts.
    """

    connection: ConnectionOptions
    coordination_topic: str
    group: str
    dry_run: bool = False
    as_json: bool = False
    go_consumers_stopped: str | None = None


@dataclass(frozen=True, slots=True)
class PauseRequest(ResumeRequest):
    """Until when, or for how long: one of the two."""

    until: str | None = None
    length: str | None = None
    new_group: bool = False


def pause(request: PauseRequest) -> None:
    """Pause the group and show what changed. Raises `MarshalError`."""
    until_ms = None if request.until is None else instant_ms(request.until, "--until")
    length_s = None if request.length is None else duration_s(request.length, "--for")
    with _pausing(request) as pausing:
        if not request.new_group:
            pausing.require_known("If it is to be paused before its first claim give --new-group")
        until_s = pausing.end_after(length_s or 0) if until_ms is None else -(-until_ms // _SECOND_MS)
        pausing.require_future(until_s, "--for" if until_ms is None else "--until")
        if pausing.ends_s is not None and pausing.ends_s > until_s:
            output.write_note(
                f"this ends earlier than the pause in force, which goes on until "
                f"{output.utc(pausing.ends_s * _SECOND_MS)}"
            )
        _show(request, pausing.preview(until_s) if request.dry_run else pausing.pause(until_s))


def resume(request: ResumeRequest) -> None:
    """Resume the group and show what changed. Raises `MarshalError`."""
    with _pausing(request) as pausing:
        pausing.require_known("There is nothing to resume")
        if not pausing.is_in_force:
            output.write_note(f"group {request.group!r} is not paused")
        _show(request, pausing.preview() if request.dry_run else pausing.resume())


@contextmanager
def _pausing(request: ResumeRequest) -> Iterator[GroupPauser]:
    stopped = are_stopped(request.go_consumers_stopped, request.group)
    connection = connection_of(request.connection)
    rights = READING if request.dry_run else WRITING
    with (
        warnings_to_stderr(),
        closing(open_reader(connection, request.coordination_topic, rights=rights)) as rationalizer,
    ):
        pausing = GroupPauser(rationalizer, request.group, operator_name(), go_consumers_stopped=stopped)
        pausing.look()
        yield pausing


def _show(request: ResumeRequest, changes: Sequence[PauseChange]) -> None:
    if request.as_json:
        rows = [
            {"partition": change.number, "before": _to_json(change.before), "after": _to_json(change.after)}
            for change in changes
        ]
        output.write_json({"group": request.group, "dry_run": request.dry_run, "coordination_partitions": rows})
        return
    output.show(
        output.styled(f"Group {request.group}", "bold"),
        output.Table(["coordination partitions", "before", "after"], list(_rows(changes)), may_fold={"before"}),
    )
    if request.dry_run:
        output.show("A dry run: nothing was written.")


def _rows(changes: Sequence[PauseChange]) -> Iterator[list[str]]:
    """Give a row for each change, with all coordination partitions in which it is the same."""
    alike: dict[tuple[Pause, Pause], list[int]] = {}
    for change in changes:
        alike.setdefault((change.before, change.after), []).append(change.number)
    for (before, after), numbers in alike.items():
        yield [world_view.listed(numbers), _text(before), _text(after)]


def _text(pause: Pause) -> str:
    if not pause.is_in_force or pause.until_s is None:
        return "not paused"
    return paused_text(output.utc(pause.until_s * _SECOND_MS), pause.by)


def _to_json(pause: Pause) -> dict[str, Any]:
    return {"paused_until": pause.until_s, "paused_by": pause.by, "paused": pause.is_in_force}
