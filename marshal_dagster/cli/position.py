"""`position get|reset|import`: show a group's positions in its topics, and set where it continues."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.admin.go_groups import Way, are_stopped
from marshal_dagster.admin.import_positions import PositionImporter, PositionSourceOptions
from marshal_dagster.admin.named_sink import named_sink
from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.position_spec import TargetOptions, outside_text, partitions_of
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.times import duration_s
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import (
    READING,
    WRITING,
    connection_of,
    data_connection_of,
    open_reader,
    operator_name,
)
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import (
    DataLogOptions,
    DryRun,
    GoConsumersStopped,
    GroupName,
    NewGroup,
    Partitions,
    SinkName,
    TopicArgument,
    Wait,
    Yes,
)
from marshal_dagster.cli.world_view import ViewFilter, data_places
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.state import Key, OffsetBounds
from marshal_dagster.protocol.unread_records import is_of_topic, unread_records
from marshal_dagster.protocol.world import World

_GET_COLUMNS: Final = ("partition", "#log start", "#log end", "#position", "#lag", "#in Kafka", "#generation", "note")
_SET_COLUMNS: Final = ("partition", "#log start", "#log end", "#before", "#after", "#by", "note")
_HOW: Final = {
    Way.PAUSE: "The group is paused for the change",
    Way.SETTINGS_FIRST: "The group gets its settings first, and is paused for the change",
    Way.GO: "The group is not paused: all of its consumers must be stopped",
}

_Resetter = TypeVar("_Resetter", bound=PositionResetter)

app = command_group("Show and set a group's positions.")

AllowOutOfRange = Annotated[
    bool, typer.Option("--allow-out-of-range", help="Allow offsets that the topic does not hold.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOptions(DataLogOptions):
    """The group and the data topic, for commands that set positions."""

    group: GroupName
    topic: TopicArgument
    wait: Wait = "5m"
    sink: SinkName = None
    dry_run: DryRun = False
    yes: Yes = False

    def check(self) -> None:
        """Raise `ConfigurationError` if an option is wrong, or if the operator cannot be asked for confirmation."""
        duration_s(self.wait, "--wait")
        if self.as_json and not (self.yes or self.dry_run):
            raise output.cannot_ask("with --dry-run")
        require_topic_name("TOPIC", self.topic)

    @contextmanager
    def opened(
        self, command: str, kind: type[_Resetter], go_consumers_stopped: str | None = None
    ) -> Iterator[_Resetter]:
        """Check the options, connect, and yield an object of class `kind` while the block lasts.

        The name `command` becomes part of the Kafka client id. Raises `MarshalError`.
        """
        self.check()
        stopped = are_stopped(go_consumers_stopped, self.group)
        sink = None if self.sink is None else named_sink(self.sink, "--sink")
        connection = connection_of(self)
        rights = READING if self.dry_run else WRITING
        client_id = f"marshal-dagster-{command}"

        def open_log(interval_ms: int) -> Rationalizer:
            return open_reader(connection, self.coordination_topic, interval_ms=interval_ms, rights=rights)

        with (
            warnings_to_stderr(),
            Topics(data_connection_of(self.data_connection, connection), client_id=client_id) as topics,
            closing(
                kind(
                    open_log,
                    topics,
                    self.group,
                    self.topic,
                    operator_name(),
                    SystemClock(),
                    go_consumers_stopped=stopped,
                    sink=sink,
                )
            ) as resetter,
        ):
            yield resetter


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionOptions(SettingOptions):
    """The positions that are set, and how."""

    partitions: Partitions = None
    allow_out_of_range: AllowOutOfRange = False
    go_consumers_stopped: GoConsumersStopped = None

    def named(self) -> Sequence[range] | None:
        """Return the partitions of --partitions, or None for all. Raises `ConfigurationError`."""
        return None if self.partitions is None else partitions_of(self.partitions, "--partitions")


@command(
    app,
    "get",
    "Show a group's positions. For each partition of TOPIC, or of all topics that the log has for the group, it shows "
    "the next offset to read, the offsets that the topic holds, and the group's offset in Kafka.",
    "position get flights",
    "position get flights flights --json",
)
def get(
    *,
    group: GroupName,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this data topic.")] = None,
    options: DataLogOptions,
) -> None:
    """Show the positions. Raises `MarshalError`."""
    if topic is not None:
        require_topic_name("TOPIC", topic)
    connection = connection_of(options)
    data_connection = data_connection_of(options.data_connection, connection)
    with closing(open_reader(connection, options.coordination_topic)) as rationalizer:
        world = rationalizer.catch_up()
        require_known(world, group, "It has no positions")
        with Topics(data_connection, client_id="marshal-dagster-position") as topics:
            if topic is not None and topic not in data_places(world, ViewFilter(group)):
                # This raises if the topic is misspelt. A topic without positions is shown with its bounds.
                topics.describe(topic)
            positions = list(positions_of(world, topics, group, topic))
    if options.as_json:
        output.write_json({"group": group, "positions": [_position_json(position) for position in positions]})
        return
    output.show(
        output.styled(f"Group {group}", "bold"),
        output.Table(_GET_COLUMNS, [_position_row(position) for position in positions], may_fold={"partition", "note"}),
    )


@command(
    app,
    "reset",
    "Set the next offset to read. The command shows the positions before and after, and asks for confirmation. It then "
    "pauses the group, waits for the owners of partitions to leave, sets the positions, and restores the pause that "
    "was in force before. If it fails half way, the group resumes, and the command shows which positions were set. "
    "Give a group without settings its settings first (`settings set`). If Go consumers share the group, stop all of "
    "its consumers and give --go-consumers-stopped; the group is then not paused.",
    "position reset flights flights --to-offset 0=1500,1=1720",
    "position reset flights flights --to-datetime 2026-01-31T18:00:00Z --dry-run",
    "position reset flights flights --shift-by -1000 --partitions 0,2-3 --yes",
)
def reset(
    *,
    to_offset: Annotated[
        str | None,
        typer.Option(
            "--to-offset", metavar="P=OFFSET,...", help="Next offset of each partition (0=5,1=7), or one for all."
        ),
    ] = None,
    to_datetime: Annotated[
        str | None,
        typer.Option(
            "--to-datetime", metavar="TIME", help="The first record of this time or later (ISO 8601 with time zone)."
        ),
    ] = None,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="The oldest record that the topic still has.")
    ] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="The end of the topic: only new records are read.")
    ] = False,
    shift_by: Annotated[
        int | None,
        typer.Option("--shift-by", metavar="N", help="Move the position by N offsets; a negative N moves it back."),
    ] = None,
    new_group: NewGroup = False,
    options: PositionOptions,
) -> ExitCode:
    """Show the positions before and after, ask for confirmation, and set them. Raises `MarshalError`."""
    target = TargetOptions(to_offset, to_datetime, to_earliest, to_latest, shift_by)
    if target.given != 1:
        raise typer.BadParameter("give one of --to-offset, --to-datetime, --to-earliest, --to-latest or --shift-by")
    wanted, named = target.target("--"), options.named()
    with options.opened("position", PositionResetter, options.go_consumers_stopped) as resetter:
        changes = resetter.look(wanted, named, allow_out_of_range=options.allow_out_of_range, new_group=new_group)
        _write_notes(resetter.warnings(changes))
        return _confirm_and_set(options, resetter, changes, "Set these positions?")


@command(
    app,
    "import",
    "Set a group's first positions from another consumer's. The source is the committed offsets of a Kafka consumer "
    "group, or the newest committed batch in a checkpoint folder of Spark Structured Streaming. Stop that consumer "
    "group or query first. The command shows the positions, asks for confirmation, and sets them as `position reset` "
    "does. It refuses a group that already has positions.",
    "position import flights flights --consumer-group flights-loader --dry-run",
    "position import flights flights --checkpoint /data/checkpoints/flights --yes",
)
def import_(
    *,
    consumer_group: Annotated[
        str | None,
        typer.Option("--consumer-group", metavar="NAME", help="Use the committed offsets of this consumer group."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="FOLDER", help="Use the checkpoint of a streaming query on this machine."),
    ] = None,
    others: Annotated[
        str | None,
        typer.Option(
            "--others",
            metavar="earliest|latest",
            help="Where to begin in partitions without an offset in the source (default for a checkpoint: earliest).",
        ),
    ] = None,
    options: PositionOptions,
) -> ExitCode:
    """Show where the group would begin, ask for confirmation, and set its positions. Raises `MarshalError`."""
    given = PositionSourceOptions(consumer_group, checkpoint, others)
    if not given.is_one:
        raise typer.BadParameter("give either --consumer-group or --checkpoint")
    begin_at, named = given.begin_at("--"), options.named()
    with options.opened("import", PositionImporter, options.go_consumers_stopped) as importer:
        source = given.source(importer.topics, options.topic)
        changes = importer.look_at(source, named, others=begin_at, allow_out_of_range=options.allow_out_of_range)
        if not options.dry_run:
            source.require_at_rest()
        _write_notes((*source.notes, *importer.warnings(changes)))
        return _confirm_and_set(options, importer, changes, "Begin at these positions?")


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """A data topic's id and offsets, and the group's offsets in Kafka. What cannot be read is empty."""

    topic_id: str | None = None
    bounds: Mapping[int, OffsetBounds] = field(default_factory=dict)
    committed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """A group's position in one partition."""

    topic: str
    partition: int
    key: Key
    data: TopicOffsets
    is_go: bool

    @property
    def bounds(self) -> OffsetBounds | None:
        """The offsets that can be read, or None if they are not known."""
        return self.data.bounds.get(self.partition)

    @property
    def is_of_deleted_topic(self) -> bool:
        """Whether the position belongs to a deleted topic of the same name."""
        return self.data.topic_id is not None and not is_of_topic(self.key, self.data.topic_id, is_go=self.is_go)

    @property
    def lag(self) -> int | None:
        """The number of unread offsets that the topic still has, or None if that is not known."""
        topic_id, bounds = self.data.topic_id, self.bounds
        if topic_id is None or bounds is None or self.key.offset is None:
            return None
        unread = unread_records(self.key, topic_id, bounds, is_go=self.is_go)
        return None if unread is None else unread.records

    @property
    def notes(self) -> list[str]:
        """Remarks on the position, as shown in the table."""
        notes = ["the topic was deleted and re-created"] if self.is_of_deleted_topic else []
        if self.key.provisional:
            notes.append("provisional")
        if self.bounds is not None and self.key.offset is not None and not self.is_of_deleted_topic:
            notes.append(outside_text(self.key.offset, self.bounds))
        if self.key.plan_end is not None:
            notes.append(f"planned up to {self.key.plan_end}")
        notes += [f"[{range_.start}, {range_.end}) {range_.phase}" for range_ in self.key.ahead]
        return [note for note in notes if note]


def positions_of(world: World, topics: Topics, group: str, topic: str | None = None) -> Iterator[Position]:
    """Yield the position in each partition of `topic`, or of all topics that the log has for the group.

    If a topic cannot be read, that is reported on stderr, and its positions are yielded as the log has them.
    """
    keys = {place: key for name, place, _, key in world.keys() if name == group and topic in {None, place[0]}}  # noqa: SIM118
    is_unreachable = False
    for name in sorted({place[0] for place in keys} if topic is None else {topic}):
        data = TopicOffsets()
        try:
            data = data if is_unreachable else _read(topics, group, name)
        except (TopicNotFoundError, AuthorizationError, UnavailableError) as error:
            output.write_note(str(error))
            is_unreachable = isinstance(error, UnavailableError)
        partitions = {partition for of, partition in keys if of == name} | data.bounds.keys()
        for partition in sorted(partitions):
            is_go = world.group_of(group, name).is_go
            yield Position(name, partition, world.key(group, name, partition), data, is_go)


def _read(topics: Topics, group: str, topic: str) -> TopicOffsets:
    described = topics.describe(topic)
    bounds = topics.offsets(topic, described.partitions)
    try:
        committed = topics.group_offsets(group, topic)
    except MarshalError as error:
        output.write_note(f"the offsets of group {group!r} in Kafka are not shown: {error}")
        committed = {}
    return TopicOffsets(described.topic_id, bounds, committed)


def _position_row(position: Position) -> list[str | output.Line]:
    key, bounds = position.key, position.bounds
    start, end = (None, None) if bounds is None else (bounds.start, bounds.end)
    numbers = (start, end, key.offset, position.lag, position.data.committed.get(position.partition), key.generation)
    return [f"{position.topic}/{position.partition}", *map(output.number, numbers), output.notes_cell(position.notes)]


def _position_json(position: Position) -> dict[str, Any]:
    bounds = position.bounds
    return {
        "topic": position.topic,
        "partition": position.partition,
        "log_start": None if bounds is None else bounds.start,
        "log_end": None if bounds is None else bounds.end,
        "offset": position.key.offset,
        "lag": position.lag,
        "committed_in_kafka": position.data.committed.get(position.partition),
        "generation": position.key.generation,
        "notes": position.notes,
    }


def _write_notes(notes: Sequence[str]) -> None:
    for note in notes:
        output.write_note(note)


def _confirm_and_set(
    options: PositionOptions,
    setter: PositionResetter,
    changes: Sequence[PositionChange],
    question: str,
) -> ExitCode:
    """Show the positions before and after, ask `question`, set the positions, and report the result."""
    if not options.as_json:
        output.show(
            output.styled(f"Group {options.group}, topic {options.topic}", "bold"),
            output.Table(_SET_COLUMNS, [_change_row(change) for change in changes], may_fold={"note"}),
        )
    ask = f"{question} {_HOW[setter.way()]}"
    if not options.dry_run and not (options.yes or typer.confirm(ask, err=True)):
        output.write_nothing_written()
        return ExitCode.PROBLEMS
    done = {} if options.dry_run else _carry_out(options, setter, changes)
    if options.as_json:
        rows = [_change_json(change, done) for change in changes]
        output.write_json(
            {"group": options.group, "topic": options.topic, "dry_run": options.dry_run, "positions": rows}
        )
    elif options.dry_run:
        output.show(output.DRY_RUN)
    elif done:
        output.show(f"The positions of partitions {runs_text(done)} were set.")
    changed = [change.partition for change in changes if change.partition not in done]
    if options.dry_run or not changed:
        return ExitCode.OK
    output.write_note(
        f"partitions {runs_text(changed)} do not have these positions, because another process set them "
        f"meanwhile: see `{shlex.join(['marshal-dagster', 'position', 'get', options.group])}`"
    )
    return ExitCode.PROBLEMS


def _carry_out(
    options: PositionOptions, setter: PositionResetter, changes: Sequence[PositionChange]
) -> Mapping[int, int | None]:
    """Set the positions and return the new generations. After a failure report which positions were set."""
    if any(change.owners for change in changes):
        is_paused = "" if setter.way() is Way.GO else "the group is paused; "
        output.write_note(f"{is_paused}waiting up to {options.wait} for the owners of partitions to leave")
    try:
        problem = setter.carry_out(changes, wait_s=duration_s(options.wait, "--wait"))
    except BaseException:
        _report_partial_change(setter, changes)
        raise
    if problem is not None:
        output.write_note(problem)
    try:
        return setter.done(changes)
    except MarshalError as error:
        output.write_note(f"the positions were set, but the log could not be read afterwards: {error}")
        return {change.partition: None for change in changes}


def _report_partial_change(setter: PositionResetter, changes: Sequence[PositionChange]) -> None:
    try:
        done = setter.done(changes)
    except MarshalError as error:
        output.write_note(f"could not read which positions were set ({error}): see `marshal-dagster position get`")
        return
    left = [change.partition for change in changes if change.partition not in done]
    output.write_note(f"set: partitions {runs_text(done) or 'none'}; not set: {runs_text(left) or 'none'}")


def _change_row(change: PositionChange) -> list[str | output.Line]:
    before = change.key.offset
    by = output.NOTHING if before is None or change.is_other else f"{change.offset - before:+d}"
    numbers = (change.extent.start, change.extent.end, before, change.offset)
    return [str(change.partition), *map(output.number, numbers), by, output.notes_cell(change.notes)]


def _change_json(change: PositionChange, done: Mapping[int, int | None]) -> dict[str, Any]:
    return {
        "partition": change.partition,
        "log_start": change.extent.start,
        "log_end": change.extent.end,
        "before": change.key.offset,
        "after": change.offset,
        "set": change.partition in done,
        "generation": done.get(change.partition),
        "notes": list(change.notes),
    }
