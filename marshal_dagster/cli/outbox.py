"""`outbox`: the tables of an outbox, the process that publishes its rows, and the rows that are set aside."""

import importlib.util
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.health_server import PATH
from marshal_dagster._internal.postgres import DEFAULT_SCHEMA, Database
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, is_kafka_named
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import AsJson, ConnectionOptions, Health, Yes
from marshal_dagster.cli.service import health_server, report_event, run_until_signal
from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester, OutboxTopics
from marshal_dagster.outbox.options import (
    DEFAULT_OPTIONS,
    MAX_ATTEMPTS_TEXT,
    MAX_IN_FLIGHT_TEXT,
    NAME_TEXT,
    PARTITIONER_TEXT,
    SCHEMA_TEXT,
    TOPIC_PATIENCE_TEXT,
    HarvesterOptions,
)
from marshal_dagster.outbox.schema import DEFAULT_NAME, OutboxTables
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus, ParkedRow

DSN_VARIABLE: Final = "MARSHAL_OUTBOX_DSN"
_LOGGED_PARTS: Final = ("outbox", "election")
_LIMITS: Final = DEFAULT_OPTIONS.limits

app = command_group(
    "Publish rows that PostgreSQL has committed to Kafka. Transactions write them into the outbox's table; a harvester "
    "publishes them, in order per key."
)
parked_app = command_group("List, retry and delete rows that are set aside.")
app.add_typer(parked_app, name="parked")

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        envvar=DSN_VARIABLE,
        show_envvar=False,
        help=f"The database: postgresql://user@host:port/database. {DSN_VARIABLE} sets it too: put a password there, "
        "because other users of this machine can see the options of a process.",
        show_default=False,
    ),
]
PARKED_IDS_TEXT: Final = "Rows, as `outbox parked list` shows them."


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """Which outbox, and whether the answer is JSON."""

    dsn: Dsn = field(default=None, repr=False)
    name: Annotated[str, typer.Option("--name", metavar="NAME", help=NAME_TEXT)] = DEFAULT_NAME
    schema: Annotated[str, typer.Option("--schema", metavar="NAME", help=SCHEMA_TEXT)] = DEFAULT_SCHEMA
    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(OutboxOptions):
    """Which outbox, and how each batch of its rows is published."""

    max_in_flight: Annotated[int, typer.Option("--max-in-flight", metavar="N", min=1, help=MAX_IN_FLIGHT_TEXT)] = (
        _LIMITS.max_in_flight_records
    )
    max_attempts: Annotated[int, typer.Option("--max-attempts", metavar="N", min=1, help=MAX_ATTEMPTS_TEXT)] = (
        _LIMITS.max_attempts
    )
    topic_patience_s: Annotated[
        float, typer.Option("--topic-patience", metavar="SECONDS", min=0, help=TOPIC_PATIENCE_TEXT)
    ] = _LIMITS.topic_patience_s
    transaction_timeout_s: Annotated[
        float,
        typer.Option(
            "--transaction-timeout",
            metavar="SECONDS",
            min=1,
            help="When brokers end the transaction of a harvester that has died; consumers wait for it until then.",
        ),
    ] = DEFAULT_OPTIONS.transaction_timeout_s
    partitioner: Annotated[str, typer.Option("--partitioner", metavar="NAME", help=PARTITIONER_TEXT)] = (
        DEFAULT_OPTIONS.partitioner
    )


@command(
    app,
    "init",
    "Create the outbox's tables and topics. Tables of an earlier version are brought up to this one. The two topics "
    "are created if a Kafka is named. What exists already stays as it is, except the notifications, which each call "
    "switches on or off.",
    "outbox init --bootstrap-servers localhost:9092",
    "outbox init --name billing --schema events --no-notify",
)
def init(
    *,
    notify: Annotated[
        bool,
        typer.Option(
            "--notify/--no-notify",
            help="Whether rows wake the harvester. If not, it polls for them, and commits do not queue to notify.",
        ),
    ] = True,
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            metavar="N",
            min=1,
            help="Replicas of the topics; 3 by default, or as many as there are brokers.",
            show_default=False,
        ),
    ] = None,
    options: OutboxOptions,
    kafka: ConnectionOptions,
) -> None:
    """Create the tables, and the topics if a Kafka is named. Raises `MarshalError`."""
    tables = _tables(options)
    connection = connection_of(kafka) if is_kafka_named(kafka) else None
    registration = tables.create(notifies=notify)
    topics = OutboxTopics.of(registration.uid)
    if connection is not None:
        topics.create(connection, replication)
    if options.as_json:
        output.write_json(
            {
                "outbox": registration.name,
                "schema": tables.schema,
                "uid": registration.uid,
                "version": registration.version,
                "notifies": notify,
                "topics": None if connection is None else asdict(topics),
            }
        )
        return
    woken = "its rows wake the harvester" if notify else "the harvester looks for its rows"
    output.show(
        f"Outbox {tables.schema}.{registration.name} (version {registration.version}, uid {registration.uid}): {woken}"
    )
    if connection is None:
        output.write_note("no Kafka is named, so its topics were not made: call it again with --bootstrap-servers")
        return
    output.show(f"Topics {topics.leader} and {topics.notes} on {connection.bootstrap_servers}")


@command(
    app,
    "harvest",
    "Publish the outbox's rows, as a service. At SIGTERM or Ctrl-C the harvester hands over to another one at once, "
    "and ends with exit code 0. If several run, one is active and the others stand by. With --json each change is a "
    "line of JSON.",
    "outbox harvest --health 8080",
    "outbox harvest --name billing --max-in-flight 5000 --transaction-timeout 30",
)
def harvest(
    *,
    health: Health = None,
    poll_interval_s: Annotated[
        float,
        typer.Option(
            "--poll-interval",
            metavar="SECONDS",
            min=0.001,
            max=30,
            help="How often to look for rows that the database does not notify of.",
        ),
    ] = DEFAULT_OPTIONS.poll_interval_s,
    receive_deadline_s: Annotated[
        float,
        typer.Option(
            "--receive-deadline",
            metavar="SECONDS",
            min=2,
            max=600,
            help="A leader that has not read its own heartbeats for so long steps down.",
        ),
    ] = DEFAULT_OPTIONS.timing.receive_deadline_ms / 1_000,
    options: BatchOptions,
    kafka: ConnectionOptions,
) -> ExitCode:
    """Harvest until a signal ends it, and report each change of role. Raises `MarshalError`."""
    timing = Timing(receive_deadline_ms=receive_deadline_s * 1_000)
    harvester = _harvester(options, kafka, timing, poll_interval_s)
    report = partial(report_event, as_json=options.as_json)
    shown = f"outbox {harvester.name!r}"
    role = ""

    def look() -> None:
        nonlocal role
        before, role = role, "standby" if harvester.term is None else "leader"
        if role != before:
            report(role, f"{shown}: this process {'harvests' if role == 'leader' else 'stands by'}")

    with warnings_to_stderr(_LOGGED_PARTS, each_time=True), health_server(harvester.health, health) as server:
        address = None if server is None else server.address
        where = "" if address is None else f"; its health is at http://{address}{PATH}"
        report("started", f"{shown}: the harvester has started{where}", health=address)
        run_until_signal(harvester.run, harvester.stop, look)
        counts = harvester.counts
        report(
            "stopped",
            f"{shown}: handed over; {counts.published} rows published here, {counts.parked} set aside",
            published=counts.published,
            parked=counts.parked,
            sessions=counts.sessions,
        )
    return ExitCode.OK


@command(
    app,
    "drain",
    "Publish the rows that wait now, and end. While another harvester is active, the command waits until that one has "
    "published them. The exit code is 1 if rows were set aside.",
    "outbox drain",
)
def drain(options: BatchOptions, kafka: ConnectionOptions) -> ExitCode:
    """Publish the rows that wait, and show how many they were. Raises `MarshalError`."""
    harvester = _harvester(options, kafka)
    with warnings_to_stderr(_LOGGED_PARTS):
        was_stopped = run_until_signal(harvester.drain, harvester.stop)
    counts = harvester.counts
    if options.as_json:
        output.write_json({"published": counts.published, "parked": counts.parked, "complete": not was_stopped})
    else:
        output.show(f"{counts.published} rows published here, {counts.parked} set aside")
    if was_stopped:
        output.write_note("it was stopped before all rows were published")
        return ExitCode.INTERRUPTED
    if counts.parked:
        output.write_note("`marshal-dagster outbox parked list` shows why rows were set aside")
    return ExitCode.PROBLEMS if counts.parked else ExitCode.OK


@command(
    app,
    "status",
    "Show the outbox's rows and last harvester. That is: how many rows wait, the age of the oldest, how many are set "
    "aside, and the last process that harvested. Only the database is read.",
    "outbox status --json",
)
def status(options: OutboxOptions) -> None:
    """Show the rows that wait and those set aside. Raises `ConfigurationError`, `UnavailableError`."""
    with closing(_inspector(options)) as inspector:
        found = inspector.status()
    if options.as_json:
        output.write_json(_status_to_json(options, found))
        return
    registration = found.registration
    oldest = "" if found.oldest_age_s is None else f", the oldest for {output.duration(found.oldest_age_s * 1_000)}"
    advice = "; `marshal-dagster outbox parked list` shows why" if found.parked else ""
    led = f"session {registration.session}, begun by {registration.leader}"
    output.show(
        f"Outbox {options.schema}.{registration.name} (version {registration.version}, uid {registration.uid})",
        f"  waiting    {_rows(found.rows)}{oldest}",
        output.styled(f"  set aside  {_rows(found.parked)}{advice}", "yellow" if found.parked else ""),
        f"  harvested  {'never' if found.led_since is None else f'{led} at {_utc(found.led_since)}'}",
    )


@command(
    parked_app,
    "list",
    "List rows that are set aside. The oldest come first, each with the reason: the harvester has tried them as often "
    "as it may, and continues with the rest.",
    "outbox parked list --limit 20",
)
def list_parked(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="The first N.")] = 100,
    options: OutboxOptions,
) -> None:
    """List rows that are set aside. Raises `ConfigurationError`, `UnavailableError`."""
    with closing(_inspector(options)) as inspector:
        rows = inspector.parked(limit)
        total = inspector.status().parked if len(rows) == limit else len(rows)
    if options.as_json:
        output.write_json({"parked": total, "rows": [_row_to_json(row) for row in rows]})
        return
    if not rows:
        output.show("Nothing is set aside")
        return
    output.show(_table(rows))
    if total > len(rows):
        output.write_note(f"{total - len(rows)} more; --limit shows them")


@command(
    parked_app,
    "retry",
    "Publish rows that are set aside. They are put back into the outbox, and come after all rows of their keys that "
    "were published meanwhile. The exit code is 1 if an id is not that of a row set aside.",
    "outbox parked retry 4711 4712",
    "outbox parked retry --all",
)
def retry_parked(
    *,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help=PARKED_IDS_TEXT, show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    options: OutboxOptions,
) -> ExitCode:
    """Put rows back, by id, or all. Raises `ConfigurationError`, `UnavailableError`."""
    if bool(ids) == every:
        raise typer.BadParameter("name rows by their ids, or give --all")
    with closing(_inspector(options)) as inspector:
        done = inspector.retry(None if every else ids)
    return _report("retried", "put back, to be published", ids or (), done, as_json=options.as_json)


@command(
    parked_app,
    "delete",
    "Delete rows that are set aside. They are never published. The command shows them, and asks. The exit code is 1 if "
    "an id is not that of a row set aside, or if nothing was deleted.",
    "outbox parked delete 4711",
    "outbox parked delete 4711 4712 --yes",
)
def delete_parked(
    *,
    ids: Annotated[list[int], typer.Argument(metavar="ID", help=PARKED_IDS_TEXT, show_default=False)],
    yes: Yes = False,
    options: OutboxOptions,
) -> ExitCode:
    """Show rows, ask, and delete them. Raises `ConfigurationError`, `UnavailableError`."""
    if options.as_json and not yes:
        raise output.cannot_ask("with `outbox parked list`")
    with closing(_inspector(options)) as inspector:
        if not yes:
            rows = inspector.parked(len(ids), ids)
            if not rows:
                return _report("dropped", "", ids, [], as_json=False)
            output.show(_table(rows))
            if not typer.confirm(f"Delete {_rows(len(rows))}, never to be published?", err=True):
                output.write_note("nothing was deleted")
                return ExitCode.PROBLEMS
        done = inspector.drop(ids)
    return _report("dropped", "deleted", ids, done, as_json=options.as_json)


def _tables(options: OutboxOptions) -> OutboxTables:
    """Return the outbox's tables; nothing is connected yet. Raises `ConfigurationError`."""
    dsn = (options.dsn or "").strip()
    if not dsn:
        raise ConfigurationError(
            f"no database is named: set {DSN_VARIABLE}=postgresql://user:password@host:port/database, or give --dsn"
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigurationError("psycopg is not installed: `pip install 'marshal-dagster[postgres]'`")
    return OutboxTables(Database(dsn), options.name, options.schema)


def _inspector(options: OutboxOptions) -> OutboxInspector:
    return OutboxInspector(_tables(options))


def _harvester(
    options: BatchOptions,
    kafka: ConnectionOptions,
    timing: Timing = DEFAULT_OPTIONS.timing,
    poll_interval_s: float = DEFAULT_OPTIONS.poll_interval_s,
) -> Harvester:
    """Return a harvester; nothing is connected yet. Raises `ConfigurationError`."""
    limits = HarvestLimits(
        max_in_flight_records=options.max_in_flight,
        max_attempts=options.max_attempts,
        topic_patience_s=options.topic_patience_s,
    )
    return Harvester(
        _tables(options),
        connection_of(kafka),
        HarvesterOptions(limits, timing, poll_interval_s, options.transaction_timeout_s, options.partitioner),
    )


def _report(field_name: str, text: str, wanted: Sequence[int], done: Sequence[int], *, as_json: bool) -> ExitCode:
    """Show the rows that are done and those that were not set aside, and return the exit code."""
    missing = sorted(set(wanted) - set(done))
    if as_json:
        output.write_json({field_name: list(done), "missing": missing})
    elif done or not wanted:
        output.show(f"{_rows(len(done))} {text}")
    if missing:
        listed = ", ".join(map(str, missing))
        output.write_note(f"not set aside: {listed}; `marshal-dagster outbox parked list` shows the rows that are")
    return ExitCode.PROBLEMS if missing else ExitCode.OK


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _table(rows: Sequence[ParkedRow]) -> output.Table:
    cells = [
        (str(row.id), row.topic, _text(row.key) or output.NOTHING, str(row.size), _utc(row.parked_at), row.reason)
        for row in rows
    ]
    return output.Table(("#id", "topic", "key", "#bytes", "set aside", "reason"), cells, may_fold=("key", "reason"))


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="backslashreplace")


def _utc(at: datetime) -> str:
    return output.utc(round(at.timestamp() * 1_000))


def _status_to_json(options: OutboxOptions, found: OutboxStatus) -> dict[str, Any]:
    registration = found.registration
    return {
        "outbox": registration.name,
        "schema": options.schema,
        "uid": registration.uid,
        "version": registration.version,
        "rows": found.rows,
        "oldest_age_s": found.oldest_age_s,
        "parked": found.parked,
        "session": registration.session,
        "leader": registration.leader,
        "led_since": None if found.led_since is None else found.led_since.isoformat(),
    }


def _row_to_json(row: ParkedRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "topic": row.topic,
        "key": _text(row.key),
        "value_bytes": row.size,
        "reason": row.reason,
        "parked_at": row.parked_at.isoformat(),
    }
