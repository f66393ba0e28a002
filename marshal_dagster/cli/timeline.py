"""`timeline`: draw what happened to partitions, runs and plans, as one page that works offline."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.texts import first_few, nearest_first
from marshal_dagster.admin.pause import group_names, topic_names, unknown_group
from marshal_dagster.admin.texts import utc
from marshal_dagster.admin.times import moment_ms
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.options import LogOptions, OnlyGroup
from marshal_dagster.cli.stored_log import StoredLogOptions, stored_log
from marshal_dagster.coordination.log import TimedLog
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.messages import NO_NAME, is_name
from marshal_dagster.protocol.replay import StoredRecord
from marshal_dagster.protocol.world import World
from marshal_dagster.timeline.builder import TimelineBuilder, Wanted
from marshal_dagster.timeline.model import Timeline

_MEGABYTE: Final = 1_000_000
_MOST_NAMED: Final = 10

app = command_group("Draw a timeline of claims, plans and commits.")


@command(
    app,
    "timeline",
    "Draw a timeline of claims, plans and commits. It is one HTML page that needs no network: a lane for each "
    "partition, a bar for each claim, and marks for what happened. It shows the coordination log since a time, or a "
    "FILE that `tail --json` wrote.",
    "timeline --since 2h --group flights -o flights.html",
    "timeline log.jsonl -o log.html",
)
def timeline(
    *,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A stored log; - for standard input. Without it Kafka is read."),
    ] = None,
    page: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="The page to write.")] = Path(
        "timeline.html"
    ),
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="The beginning of the picture: a duration such as 2h, or a time such as 2026-01-31T18:00:00Z. "
            "Required without a FILE.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="TIME", help="The end of the picture, as --since. Default: the end of the log."
        ),
    ] = None,
    group: OnlyGroup = None,
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="NAME", help="Show only this data topic.")
    ] = None,
    stored: StoredLogOptions,
    options: LogOptions,
) -> None:
    """Write the page.

    Raises:
        ConfigurationError: An option is wrong, the log lacks the group or topic, or the extra `timeline` is missing.
        MalformedLogError: A line of FILE is malformed.
        MarshalError: The coordination log cannot be read.
    """
    require_extra(Extra.TIMELINE, "the timeline")
    if file is None and since is None:
        raise typer.BadParameter("give a FILE that `tail --json` wrote, or --since with a time such as 2h")
    if group is not None and not is_name(group):
        raise ConfigurationError(f"--group: {group!r} {NO_NAME}")
    if topic is not None:
        require_topic_name("--topic", topic)
    wanted = Wanted(group, topic)
    drawn = _live(options, wanted, since, until) if file is None else _from_file(file, stored, wanted, since, until)
    _write(page, drawn, wanted, as_json=options.as_json)


def _live(options: LogOptions, wanted: Wanted, since: str | None, until: str | None) -> Timeline:
    # Imported here, because a stored log needs no Kafka client.
    from marshal_dagster.cli.connections import READING, connection_of, hint_how_to_create, open_log, require_rights
    from marshal_dagster.coordination.clock import SystemClock

    now_ms = SystemClock().wall_ms()
    limited = _limited(wanted, since, until, now_ms)
    connection, topic = connection_of(options), options.coordination_topic
    with hint_how_to_create(topic), closing(open_log(connection, topic)) as log:
        require_rights(connection, topic, READING)
        return live_timeline(log, limited, now_ms, connection.timeout_s)


def live_timeline(log: TimedLog, wanted: Wanted, now_ms: int, timeout_s: float) -> Timeline:
    """Read the whole coordination log and draw the part of it that is wanted.

    Every record is read, because whether a record is refused depends on those before it.

    Args:
        log: The log.
        wanted: What is drawn. Without an end the picture ends at `now_ms`.
        now_ms: The present, in unix ms.
        timeout_s: How long to wait for the next record, in seconds.

    Raises:
        ConfigurationError: The log does not have the group.
        CoordinationLogChangedError: The topic was re-created, repartitioned or truncated meanwhile.
        UnavailableError: Kafka does not answer.
    """
    from marshal_dagster.cli.tail import Reader

    reader = Reader(log, judge=False, timeout_s=timeout_s)
    reader.limit(None, wanted.end_ms)
    partitions = range(log.identity().partitions)
    builder = TimelineBuilder(
        World(len(partitions)), wanted if wanted.end_ms is not None else wanted._replace(end_ms=now_ms)
    )
    for partition, bounds in log.bounds(partitions).items():
        builder.start(partition, bounds.start)
    return _built(builder, wanted, (judged.record for batch in reader.read() for judged in batch))


def _from_file(file: str, stored: StoredLogOptions, wanted: Wanted, since: str | None, until: str | None) -> Timeline:
    with stored_log(file, stored) as log:
        records, world = list(log.records), log.world
    last_ms = max((record.timestamp_ms for record in records), default=0)
    limited = wanted if since is None and until is None else _limited(wanted, since, until, last_ms)
    return _built(TimelineBuilder(world, limited), limited, records)


def _limited(wanted: Wanted, since: str | None, until: str | None, now_ms: int) -> Wanted:
    since_ms = None if since is None else moment_ms(since, "--since", now_ms)
    until_ms = None if until is None else moment_ms(until, "--until", now_ms)
    if since_ms is not None and since_ms >= (now_ms if until_ms is None else until_ms):
        raise ConfigurationError("--since is not before the end of the picture, so nothing lies between them")
    return wanted._replace(start_ms=since_ms, end_ms=until_ms)


def _built(builder: TimelineBuilder, wanted: Wanted, records: Iterable[StoredRecord]) -> Timeline:
    for record in records:
        builder.add(record)
    drawn = builder.build()
    if builder.world.partitions and drawn.is_empty:
        _require_names(builder.world, wanted)
    return drawn


def _require_names(world: World, wanted: Wanted) -> None:
    """Raise `ConfigurationError` if the log does not have the group, or the topic of the group."""
    if wanted.group is not None and wanted.group not in group_names(world):
        raise ConfigurationError(unknown_group(world, wanted.group))
    topics = topic_names(world, wanted.group)
    if wanted.topic is not None and wanted.topic not in topics:
        whose = "the log" if wanted.group is None else f"group {wanted.group!r}"
        shown = first_few(list(map(repr, nearest_first(wanted.topic, topics))), _MOST_NAMED)
        raise ConfigurationError(f"{whose} has no topic {wanted.topic!r}; it has {shown or 'no topic'}")


def _write(page: Path, drawn: Timeline, wanted: Wanted, *, as_json: bool) -> None:
    from marshal_dagster.timeline.page import render_page

    text = render_page(drawn, empty=_why_empty(drawn, wanted)).encode()
    try:
        size = page.write_bytes(text)
    except OSError as error:
        raise ConfigurationError(f"the page {page} cannot be written: {error.strerror}") from None
    partitions = sum(not lane.is_group for lane in drawn.lanes)
    if as_json:
        output.write_json(
            {
                "page": str(page),
                "bytes": size,
                "start": drawn.span.start_ms,
                "end": drawn.span.end_ms,
                "records": drawn.records,
                "partitions": partitions,
                "claims": len(drawn.bars),
                "marks": len(drawn.marks),
            }
        )
        return
    output.show(
        f"{page}: {partitions} partitions and {len(drawn.bars)} claims from {drawn.records} records, "
        f"{size / _MEGABYTE:.1f} MB. Open it in a browser."
    )


def _why_empty(drawn: Timeline, wanted: Wanted) -> str:
    if not drawn.records:
        return "The log has no records, so no member has claimed a partition yet."
    which = "" if wanted.group is None else f" of group {wanted.group}"
    which += "" if wanted.topic is None else f" about topic {wanted.topic}"
    span = f"from {utc(drawn.span.start_ms)} to {utc(drawn.span.end_ms)}"
    return f"No claim was held and no record{which} was written {span}. Choose an earlier --since."
