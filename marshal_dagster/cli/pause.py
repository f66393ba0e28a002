"""`pause` and `resume`: pause or resume a group, and show its pause before and after."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.pause import GroupPauser, Pause, PauseChange, require_reason
from marshal_dagster.admin.times import duration_s, instant_ms
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import READING, WRITING, connection_of, open_reader, operator_name
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import DryRun, GroupName, LogOptions, NewGroup
from marshal_dagster.coordination.pause_text import paused_text

_SECOND_MS = 1_000


app = command_group("Pause and resume a group.")

GoConsumersStopped = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="Repeat the group's name to confirm that no Go consumer newer than January 2017 will start on this "
        "coordination topic again. Such consumers do not understand the pause record.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOptions(LogOptions):
    """The group, and whether to only show what would change."""

    group: GroupName
    dry_run: DryRun = False
    go_consumers_stopped: GoConsumersStopped = None


@command(
    app,
    "pause",
    "Pause a group. Its members finish their current batches, claim and plan nothing more, and leave. The group "
    "resumes at the given time, or with `resume`. The command replaces a pause that is in force. The newest Go "
    "consumers do not understand the pause record. A group that they share, or that has no settings yet, needs "
    "--go-consumers-stopped. With --reason the pause shows why, wherever it is shown.",
    "pause flights --for 2h --reason 'the database moves'",
    "pause flights --until 2026-01-31T18:00:00Z --dry-run",
)
def pause(
    *,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="When the pause ends: an ISO 8601 time with time zone."),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="How long to pause: 90s, 30m, 2h, 1d12h. This or --until is required."
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            "--reason",
            metavar="TEXT",
            help="Why, in one line of at most 200 characters. Every reader of the log sees it: no secrets.",
        ),
    ] = None,
    new_group: NewGroup = False,
    options: PauseOptions,
) -> None:
    """Pause the group and show what changed. Raises `MarshalError`."""
    if (until is None) == (length is None):
        raise typer.BadParameter("use either --until or --for")
    until_ms = None if until is None else instant_ms(until, "--until")
    length_s = None if length is None else duration_s(length, "--for")
    why = require_reason(reason, "--reason")
    with _pausing(options) as pausing:
        if not new_group:
            pausing.require_known("To pause a group before its first claim, give --new-group")
        until_s = pausing.end_after(length_s or 0) if until_ms is None else -(-until_ms // _SECOND_MS)
        pausing.require_future(until_s, "--for" if until_ms is None else "--until")
        if pausing.ends_s is not None and pausing.ends_s > until_s:
            ends = utc_to_second(pausing.ends_s)
            output.write_note(f"the new pause ends earlier than the pause in force, which ends at {ends}")
        _show(options, pausing.preview(until_s, why) if options.dry_run else pausing.pause(until_s, why))


@command(
    app,
    "resume",
    "Resume a group. This ends the pause, whichever operator began it.",
    "resume flights",
    "resume flights --dry-run --json",
)
def resume(options: PauseOptions) -> None:
    """Resume the group and show what changed. Raises `MarshalError`."""
    with _pausing(options) as pausing:
        pausing.require_known("There is nothing to resume")
        if not pausing.is_in_force:
            output.write_note(f"group {options.group!r} is not paused")
        _show(options, pausing.preview() if options.dry_run else pausing.resume())


@contextmanager
def _pausing(options: PauseOptions) -> Iterator[GroupPauser]:
    stopped = are_stopped(options.go_consumers_stopped, options.group)
    connection = connection_of(options)
    rights = READING if options.dry_run else WRITING
    with (
        warnings_to_stderr(),
        closing(open_reader(connection, options.coordination_topic, rights=rights)) as rationalizer,
    ):
        pausing = GroupPauser(rationalizer, options.group, operator_name(), go_consumers_stopped=stopped)
        pausing.look()
        yield pausing


def _show(options: PauseOptions, changes: Sequence[PauseChange]) -> None:
    if options.as_json:
        rows = [
            {"partition": change.number, "before": _to_json(change.before), "after": _to_json(change.after)}
            for change in changes
        ]
        output.write_json({"group": options.group, "dry_run": options.dry_run, "coordination_partitions": rows})
        return
    output.show(
        output.styled(f"Group {options.group}", "bold"),
        output.Table(
            ["coordination partitions", "before", "after"], list(_rows(changes)), may_fold={"before", "after"}
        ),
    )
    if options.dry_run:
        output.show(output.DRY_RUN)


def _rows(changes: Sequence[PauseChange]) -> Iterator[list[str]]:
    """Yield a row for each different change, with the coordination partitions that it applies to."""
    alike: dict[tuple[Pause, Pause], list[int]] = {}
    for change in changes:
        alike.setdefault((change.before, change.after), []).append(change.number)
    for (before, after), numbers in alike.items():
        yield [runs_text(numbers), _text(before), _text(after)]


def _text(pause: Pause) -> str:
    if not pause.is_in_force or pause.until_s is None:
        return "not paused"
    return paused_text(utc_to_second(pause.until_s), pause.by)


def _to_json(pause: Pause) -> dict[str, Any]:
    return {"paused_until": pause.until_s, "paused": pause.is_in_force, **world_view.origin_json(pause.by)}
