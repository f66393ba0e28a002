"""`settings show|set|disable-ranges`: show and change the settings that a group's members agree on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.admin.go_groups import are_stopped
from marshal_dagster.admin.group_settings import (
    LONGEST_INTERVAL_S,
    SHORTEST_INTERVAL_S,
    ForgottenRanges,
    GroupSettingsAdmin,
    PartitionSettings,
    SettingsChange,
    partitions_by_settings,
)
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output, world_view
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import READING, WRITING, connection_of, open_reader, operator_name
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import DryRun, GroupName, LogOptions, NewGroup, Wait, Yes, finite
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.messages import DEFAULT_SETTINGS, WITHOUT_SETTINGS

_COLUMNS: Final = ("coordination partitions", "heartbeat interval", "rule set", "delivery", "features", "note")

app = command_group("Show and change a group's settings. All of its members agree on them.")


def heartbeat_interval_option(text: str) -> Any:  # noqa: ANN401 - typer's own
    """Return the option --heartbeat-interval with this help text."""
    return typer.Option(
        "--heartbeat-interval",
        metavar="SECONDS",
        callback=finite,
        min=SHORTEST_INTERVAL_S,
        max=LONGEST_INTERVAL_S,
        help=text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsOptions(LogOptions):
    """The group, and the coordination log with its settings."""

    group: GroupName

    @contextmanager
    def opened(self, *, writes: bool = False, go_consumers_stopped: str | None = None) -> Iterator[GroupSettingsAdmin]:
        """Connect to the coordination log while the block lasts. Raises `MarshalError`."""
        stopped = are_stopped(go_consumers_stopped, self.group)
        connection = connection_of(self)
        rights = WRITING if writes else READING

        def open_log(interval_ms: int) -> Rationalizer:
            return open_reader(connection, self.coordination_topic, interval_ms=interval_ms, rights=rights)

        admin = GroupSettingsAdmin(open_log, self.group, operator_name(), go_consumers_stopped=stopped)
        with warnings_to_stderr(), closing(admin):
            yield admin


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions(SettingsOptions):
    """The options of the commands that change settings."""

    wait: Wait = "5m"
    dry_run: DryRun = False
    yes: Yes = False

    def check(self) -> int:
        """Return --wait in seconds. Raises `ConfigurationError`, also if --json prevents the confirmation."""
        if self.as_json and not (self.yes or self.dry_run):
            raise output.cannot_ask("with --dry-run")
        return duration_s(self.wait, "--wait")


@command(
    app,
    "show",
    "Show a group's settings. If the settings in force differ between coordination partitions, each has its own row. A "
    "group without settings follows the rules of Go consumers.",
    "settings show flights",
    "settings show flights --json",
)
def show(options: SettingsOptions) -> None:
    """Show the settings in force. Raises `MarshalError`."""
    with options.opened() as admin:
        found = admin.look(otherwise="It has no settings")
    differ = len({there.settings for there in found.values() if there.certain}) > 1
    if options.as_json:
        rows = [{"partition": number} | _to_json(there) for number, there in found.items()]
        output.write_json({"group": options.group, "differ": differ, "coordination_partitions": rows})
    else:
        _show(options, found)
    if differ:
        output.write_note(
            "the settings differ, because they were written to some coordination partitions only. `marshal-dagster "
            "settings set` completes them, as do members that are configured alike; if ranges are left, "
            "`marshal-dagster settings disable-ranges` does"
        )


@command(
    app,
    "set",
    "Set or change a group's settings. A setting that is not given keeps its value, or takes a member's default. The "
    "command shows the settings before and after, and asks for confirmation. It then pauses the group, waits for the "
    "owners of partitions to leave, writes the settings, and restores the pause that was in force before. A group that "
    "is not in the log yet is not paused. Configure all members alike.",
    "settings set flights --heartbeat-interval 10 --delivery effectively_once",
    "settings set flights --ranges --dry-run",
)
def set_(
    *,
    heartbeat_interval: Annotated[
        float | None,
        heartbeat_interval_option(
            "Time between two heartbeats. Default: the present one, or in a new group "
            f"{DEFAULT_SETTINGS.heartbeat_interval_ms // 1_000} "
            f"(with --rules go: {WITHOUT_SETTINGS.heartbeat_interval_ms // 1_000}).",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="native|go",
            help=f"The rule set. Default: the present one, or {DEFAULT_SETTINGS.rule_set} in a new group.",
        ),
    ] = None,
    delivery: Annotated[
        str | None,
        typer.Option(
            "--delivery",
            metavar="MODE",
            help="at_most_once, at_least_once or effectively_once. Default: the present one, or "
            f"{DEFAULT_SETTINGS.delivery} in a new group.",
        ),
    ] = None,
    ranges: Annotated[bool, typer.Option("--ranges", help="Let members claim ranges of a partition.")] = False,
    new_group: NewGroup = False,
    go_consumers_stopped: Annotated[
        str | None,
        typer.Option(
            "--go-consumers-stopped",
            metavar="GROUP",
            help="Repeat the group's name to confirm that no Go consumer, of any group, will use this coordination "
            "topic again.",
        ),
    ] = None,
    options: ChangeOptions,
) -> ExitCode:
    """Show the settings before and after, ask for confirmation, and set them. Raises `MarshalError`."""
    wait_s = options.check()
    with options.opened(writes=not options.dry_run, go_consumers_stopped=go_consumers_stopped) as admin:
        before = admin.look(new_group=new_group)
        settings = SettingsChange(heartbeat_interval, rules, delivery, ranges=ranges).settings(before)
        if all(there.settings == settings for there in before.values()):
            output.write_note(f"group {options.group!r} has these settings already")
            _report(options, before, before)
            return ExitCode.OK
        admin.require_allowed()
        if admin.has_partitions() and any(
            there.settings.delivery is not settings.delivery for there in before.values()
        ):
            output.write_note(
                f"delivery changes for group {options.group!r}: open plans end, and every partition with an offset "
                "begins a new generation"
            )
        if go_consumers_stopped is not None:
            output.write_note(
                "from now on the coordination topic holds records that Go consumers do not know: a Go consumer that "
                "starts there again may begin far before its group's offset"
            )
        after: Mapping[int, PartitionSettings] = {
            number: PartitionSettings(settings, by_default=False, certain=there.certain)
            for number, there in before.items()
        }
        if not options.as_json:
            _show(options, before)
            _show(options, after, ", after the change")
        question = "Set these settings? The group is paused for the change"
        if not (options.dry_run or options.yes or typer.confirm(question, err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        if not options.dry_run:
            if admin.owners():
                output.write_note(
                    f"the group is paused; waiting up to {options.wait} for the owners of partitions to leave"
                )
            after = admin.set_settings(settings, wait_s=wait_s)
    _report(options, before, after, done="The settings were set.")
    return ExitCode.OK


@command(
    app,
    "disable-ranges",
    "Disable a group's range claims. The command removes the feature `ranges` from its settings, so that members that "
    "do not support it can claim. It shows which ranges are forgotten, and asks for confirmation. It then pauses the "
    "group, waits for the owners of partitions to leave and for two more heartbeat intervals, and restores the pause "
    "that was in force before.",
    "settings disable-ranges flights --dry-run",
)
def disable_ranges(options: ChangeOptions) -> ExitCode:
    """Show which ranges are forgotten, ask for confirmation, and disable ranges. Raises `MarshalError`."""
    wait_s = options.check()
    with options.opened(writes=not options.dry_run) as admin:
        before, forgotten = admin.look(otherwise="It has no ranges to disable"), admin.forgotten()
        if not any(there.has_ranges for there in before.values()):
            output.write_note(f"ranges are already disabled in group {options.group!r}")
            _report(options, before, before, forgotten)
            return ExitCode.OK
        for warning in admin.warnings():
            output.write_note(warning)
        if not options.as_json:
            _show(options, before)
            _show_forgotten(forgotten)
        question = "Disable ranges? The group is paused for the change"
        if not (options.dry_run or options.yes or typer.confirm(question, err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        after: Mapping[int, PartitionSettings] = {number: there.without_ranges() for number, there in before.items()}
        if not options.dry_run:
            longest_ms = max(there.settings.heartbeat_interval_ms for there in before.values())
            is_held = any(key.owners for key in forgotten)
            left = f"; waiting up to {options.wait} for the owners of partitions to leave" if is_held else ""
            output.write_note(f"the group is paused for at least {output.duration(2 * longest_ms)}{left}")
            try:
                after = admin.switch_ranges_off(wait_s=wait_s)
            except BaseException:
                _report_partial_change(admin)
                raise
    _report(options, before, after, forgotten, done="Ranges are disabled.")
    return ExitCode.OK


def _report_partial_change(admin: GroupSettingsAdmin) -> None:
    try:
        on = [number for number, there in admin.look().items() if there.has_ranges]
    except MarshalError as error:
        output.write_note(
            f"could not read where ranges are still enabled ({error}): see `marshal-dagster settings show`"
        )
        return
    output.write_note(f"ranges are still enabled in coordination partitions {runs_text(on) or 'none'}")


def _show(options: SettingsOptions, found: Mapping[int, PartitionSettings], when: str = "") -> None:
    rows = [_row(there, numbers) for there, numbers in partitions_by_settings(found).items()]
    title = output.styled(f"Group {options.group}{when}", "bold")
    output.show(title, output.Table(_COLUMNS, rows, may_fold={"note"}))


def _show_forgotten(forgotten: Sequence[ForgottenRanges]) -> None:
    if forgotten:
        rows = [
            [f"{key.place[0]}/{key.place[1]}", output.number(key.offset), "; ".join(_notes(key))] for key in forgotten
        ]
        output.show("", output.Table(["partition", "#position", "note"], rows, may_fold={"note"}))


def _notes(key: ForgottenRanges) -> Iterator[str]:
    if key.offset is None:
        yield "it has no position: set one first"
    yield from (
        f"[{range_.start}, {range_.end}) {range_.phase}: forgotten, and processed again" for range_ in key.ahead
    )
    yield from (f"held by {owner.instance}" for owner in key.owners)


def _report(
    options: ChangeOptions,
    before: Mapping[int, PartitionSettings],
    after: Mapping[int, PartitionSettings],
    forgotten: Sequence[ForgottenRanges] = (),
    done: str = "",
) -> None:
    """Report what changed. Without --json that is the text `done`, which is empty if nothing changed."""
    if options.as_json:
        rows = [
            {"partition": number, "before": _to_json(there), "after": _to_json(after[number])}
            for number, there in before.items()
        ]
        keys = [
            {"topic": key.place[0], "partition": key.place[1], "offset": key.offset, "notes": list(_notes(key))}
            for key in forgotten
        ]
        output.write_json(
            {"group": options.group, "dry_run": options.dry_run, "coordination_partitions": rows, "positions": keys}
        )
    elif options.dry_run:
        output.show(output.DRY_RUN)
    elif done:
        output.show(done)


def _row(there: PartitionSettings, numbers: Sequence[int]) -> list[str | output.Line]:
    notes = [world_view.NO_SETTINGS] if there.by_default else []
    notes += [] if there.certain else ["only observed"]
    return [
        runs_text(numbers),
        f"{there.settings.heartbeat_interval_ms / 1_000:g} s",
        str(there.settings.rule_set),
        str(there.settings.delivery),
        ", ".join(there.settings.features) or output.NOTHING,
        output.notes_cell(notes),
    ]


def _to_json(there: PartitionSettings) -> dict[str, Any]:
    return world_view.settings_json(there.settings) | {"accepted": not there.by_default, "certain": there.certain}
