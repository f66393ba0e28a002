"""`settings show|set|disable-ranges`: what a group's members agree on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import typer

from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.group_settings import (
    ForgottenRanges,
    GroupSettingsAdmin,
    PartitionSettings,
    SettingsChange,
    partitions_by_settings,
)
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.connections import READING, WRITING, connection_of, open_reader, operator_name
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.acls import Right
from marshal_dagster.protocol.messages import GroupSettings

_COLUMNS: Final = ("coordination partitions", "heartbeat interval", "rule set", "delivery", "features", "note")
_NO_CHANGE: Final = SettingsChange()


@dataclass(frozen=True, slots=True)
class SettingsRequest:
    """Which group's."""

    connection: ConnectionOptions
    coordination_topic: str
    group: str
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class WritingRequest(SettingsRequest):
    """How long others have to leave, and whether it is only shown, or done without a question."""

    wait: str = "5m"
    dry_run: bool = False
    yes: bool = False

    def wait_s(self) -> int:
        """Read the wait. Raises `ConfigurationError`, also where nobody can be asked."""
        if self.as_json and not (self.yes or self.dry_run):
            raise output.cannot_ask("with --dry-run")
        return duration_s(self.wait, "--wait")


@dataclass(frozen=True, slots=True)
class ChangeRequest(WritingRequest):
    """What is changed; `go_consumers_stopped` is the group's name where a person says that these are, for good."""

    change: SettingsChange = _NO_CHANGE
    new_group: bool = False
    go_consumers_stopped: str | None = None


def show(request: SettingsRequest) -> ExitCode:
    """Show the settings in force. Raises `MarshalError`."""
    with _agreed(request) as work:
        found = work.look()
    differ = len({each.settings for each in found.values() if each.certain}) > 1
    if request.as_json:
        rows = [{"partition": number} | _to_json(each) for number, each in found.items()]
        output.write_json({"group": request.group, "differ": differ, "coordination_partitions": rows})
    else:
        _show(request, found)
    if differ:
        output.write_note(
            "they differ: settings were written by halves. Members that are configured alike complete them, as does "
            "`marshal-dagster settings set`; where ranges are left, another `settings disable-ranges` does"
        )
    return ExitCode.OK


def set_settings(request: ChangeRequest) -> ExitCode:
    """Show what is in force and what is to be, ask, and set it. Raises `MarshalError`."""
    wait_s = request.wait_s()
    stopped = are_stopped(request.go_consumers_stopped, request.group)
    with _agreed(request, READING if request.dry_run else WRITING, stopped=stopped) as work:
        before = work.look(new_group=request.new_group)
        settings = request.change.settings(before)
        after: Mapping[int, PartitionSettings] = {
            number: PartitionSettings(settings, by_default=False, certain=each.certain)
            for number, each in before.items()
        }
        is_in_force = all(each.settings == settings for each in before.values())
        if is_in_force:
            output.write_note(f"group {request.group!r} has these settings already")
            after = before
        else:
            work.require_allowed()
            for warning in _warnings(request, before, settings):
                output.write_note(warning)
            if not request.as_json:
                _show(request, before)
                _show(request, after, "to be")
            if not (request.dry_run or request.yes or _is_agreed_to_change()):
                output.write_nothing_written()
                return ExitCode.PROBLEMS
            if not request.dry_run:
                if work.owners():
                    output.write_note(f"the group is paused; those that hold partitions have {request.wait} to leave")
                after = work.set_settings(settings, wait_s=wait_s)
    _report(request, before, after, (), dry_run=request.dry_run, done="The settings were set.")
    return ExitCode.OK


def _warnings(
    request: ChangeRequest, before: Mapping[int, PartitionSettings], settings: GroupSettings
) -> Iterator[str]:
    in_force = [each.settings for each in before.values()]
    if any(each.delivery is not settings.delivery for each in in_force):
        yield (
            f"delivery changes for group {request.group!r}: open plans end, and every partition with an offset begins "
            "a new generation"
        )
    if request.go_consumers_stopped is not None:
        yield (
            "from now on the coordination topic holds records that Go consumers do not know: one that starts there "
            "again may begin far before its group's offset"
        )


def _is_agreed_to_change() -> bool:
    return typer.confirm("Set these settings? The group is paused meanwhile", err=True)


def switch_ranges_off(request: WritingRequest) -> ExitCode:
    """Show what is forgotten, ask, and switch ranges off. Raises `MarshalError`."""
    wait, wait_s, dry_run, yes = request.wait, request.wait_s(), request.dry_run, request.yes
    with _agreed(request, READING if dry_run else WRITING) as work:
        before, forgotten = work.look(), work.forgotten()
        if not any(each.has_ranges for each in before.values()):
            output.write_note(f"ranges are off already in group {request.group!r}")
            _report(request, before, before, forgotten, dry_run=dry_run)
            return ExitCode.OK
        for warning in work.warnings():
            output.write_note(warning)
        if not request.as_json:
            _show(request, before)
            _show_forgotten(forgotten)
        if not (dry_run or yes or _is_agreed()):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        after = (
            {number: each.without_ranges() for number, each in before.items()}
            if dry_run
            else _carry_out(work, before, forgotten, wait, wait_s)
        )
    _report(request, before, after, forgotten, dry_run=dry_run)
    return ExitCode.OK


@contextmanager
def _agreed(
    request: SettingsRequest, rights: tuple[Right, ...] = READING, *, stopped: bool = False
) -> Iterator[GroupSettingsAdmin]:
    connection = connection_of(request.connection)

    def open_log(interval_ms: int) -> Rationalizer:
        return open_reader(connection, request.coordination_topic, interval_ms=interval_ms, rights=rights)

    with (
        warnings_to_stderr(),
        closing(GroupSettingsAdmin(open_log, request.group, operator_name(), go_consumers_stopped=stopped)) as work,
    ):
        yield work


def _is_agreed() -> bool:
    return typer.confirm("Switch ranges off? The group is paused meanwhile", err=True)


def _carry_out(
    work: GroupSettingsAdmin,
    before: Mapping[int, PartitionSettings],
    forgotten: Sequence[ForgottenRanges],
    wait: str,
    wait_s: int,
) -> Mapping[int, PartitionSettings]:
    """Switch ranges off; should it fail, say where they are."""
    longest_ms = max(each.settings.heartbeat_interval_ms for each in before.values())
    left = f"; those that hold something have {wait} to leave" if any(each.owners for each in forgotten) else ""
    output.write_note(f"the group is paused for {output.duration(2 * longest_ms)} at least{left}")
    try:
        return work.switch_ranges_off(wait_s=wait_s)
    except BaseException:
        _report_partial_change(work)
        raise


def _report_partial_change(work: GroupSettingsAdmin) -> None:
    try:
        on = [number for number, each in work.look().items() if each.has_ranges]
    except MarshalError as error:
        output.write_note(f"where ranges are still on could not be read ({error}): see `marshal-dagster settings show`")
        return
    output.write_note(f"ranges are still on in coordination partitions {world_view.listed(on) or 'none'}")


def _show(request: SettingsRequest, found: Mapping[int, PartitionSettings], when: str = "") -> None:
    rows = [_row(each, numbers) for each, numbers in partitions_by_settings(found).items()]
    title = f"Group {request.group}{f', {when}' if when else ''}"
    output.show(output.styled(title, "bold"), output.Table(_COLUMNS, rows, may_fold={"note"}))


def _show_forgotten(forgotten: Sequence[ForgottenRanges]) -> None:
    if not forgotten:
        return
    rows = [
        [f"{each.place[0]}/{each.place[1]}", output.number(each.offset), "; ".join(_notes(each))] for each in forgotten
    ]
    output.show("", output.Table(["partition", "#position", "note"], rows, may_fold={"note"}))


def _notes(each: ForgottenRanges) -> Iterator[str]:
    if each.offset is None:
        yield "it stands nowhere: set its position first"
    yield from (f"[{one.start}, {one.end}) {one.phase}: forgotten, and done again" for one in each.ahead)
    yield from (f"held by {owner.instance}" for owner in each.owners)


def _report(
    request: SettingsRequest,
    before: Mapping[int, PartitionSettings],
    after: Mapping[int, PartitionSettings],
    forgotten: Sequence[ForgottenRanges],
    *,
    dry_run: bool,
    done: str = "Ranges are off.",
) -> None:
    if request.as_json:
        rows = [
            {"partition": number, "before": _to_json(each), "after": _to_json(after[number])}
            for number, each in before.items()
        ]
        keys = [
            {"topic": each.place[0], "partition": each.place[1], "offset": each.offset, "notes": list(_notes(each))}
            for each in forgotten
        ]
        output.write_json(
            {"group": request.group, "dry_run": dry_run, "coordination_partitions": rows, "positions": keys}
        )
    elif dry_run:
        output.show("A dry run: nothing was written.")
    elif before is not after:
        output.show(done)


def _row(there: PartitionSettings, numbers: Sequence[int]) -> list[str | output.Line]:
    notes = [world_view.NO_SETTINGS] if there.by_default else []
    notes += [] if there.certain else ["only observed"]
    return [
        world_view.listed(numbers),
        f"{there.settings.heartbeat_interval_ms / 1_000:g} s",
        str(there.settings.rule_set),
        str(there.settings.delivery),
        ", ".join(there.settings.features) or output.NOTHING,
        output.styled("; ".join(notes), "yellow") if notes else output.NOTHING,
    ]


def _to_json(there: PartitionSettings) -> dict[str, Any]:
    settings = there.settings
    return {
        "heartbeat_interval_ms": settings.heartbeat_interval_ms,
        "rule_set": settings.rule_set,
        "delivery": settings.delivery,
        "features": list(settings.features),
        "accepted": not there.by_default,
        "certain": there.certain,
    }
