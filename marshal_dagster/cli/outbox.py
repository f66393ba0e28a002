"""`outbox`: create an outbox's tables, publish its rows, and list, retry or delete rows that are set aside."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final

import typer

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster._internal.health_server import PATH
from marshal_dagster._internal.postgres import DEFAULT_SCHEMA, Database
from marshal_dagster._internal.texts import counted
from marshal_dagster.cli import outbox_migration, output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, is_kafka_named
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import AsJson, ConnectionOptions, DryRun, Health, Yes, finite
from marshal_dagster.cli.outbox_migration import OldTableOptions
from marshal_dagster.cli.service import health_server, report_event, run_until_signal
from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester, OutboxTopics
from marshal_dagster.outbox.migration import DEFAULT_LOCK_TIMEOUT_S, OutboxMigration
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
from marshal_dagster.outbox.status import BlockingTransaction, OutboxInspector, OutboxStatus, ParkedRow, parked_command

DSN_VARIABLE: Final = "MARSHAL_OUTBOX_DSN"
_LOGGED_PARTS: Final = ("outbox", "election", "kafka", "_internal")
_LIMITS: Final = DEFAULT_OPTIONS.limits
_LONG_WAIT_S: Final = 60.0
"""A row that waits for longer needs an operator, because a harvester tries again within seconds."""
_LONGEST_S: Final = 2_147_483  # Kafka holds its times in milliseconds of 32 bits.

app = command_group(
    "Publish committed PostgreSQL rows to Kafka. Transactions write rows into the outbox's table. A harvester "
    "publishes them, in order for each key."
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
        help=f"The database: postgresql://user@host:port/database. Put a password into {DSN_VARIABLE} instead, because "
        "other users of this machine can see the options of a process.",
    ),
]
PARKED_IDS_TEXT: Final = "Ids of rows, as shown by `outbox parked list`."


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxOptions:
    """The outbox, and whether to write JSON."""

    dsn: Dsn = field(default=None, repr=False)
    name: Annotated[str, typer.Option("--name", metavar="NAME", help=NAME_TEXT)] = DEFAULT_NAME
    schema: Annotated[str, typer.Option("--schema", metavar="NAME", help=SCHEMA_TEXT)] = DEFAULT_SCHEMA
    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(OutboxOptions):
    """The outbox, and how each batch of its rows is published."""

    max_in_flight: Annotated[int, typer.Option("--max-in-flight", metavar="N", min=1, help=MAX_IN_FLIGHT_TEXT)] = (
        _LIMITS.max_in_flight_records
    )
    max_attempts: Annotated[int, typer.Option("--max-attempts", metavar="N", min=1, help=MAX_ATTEMPTS_TEXT)] = (
        _LIMITS.max_attempts
    )
    topic_patience_s: Annotated[
        float,
        typer.Option(
            "--topic-patience", metavar="SECONDS", callback=finite, min=0, max=_LONGEST_S, help=TOPIC_PATIENCE_TEXT
        ),
    ] = _LIMITS.topic_patience_s
    transaction_timeout_s: Annotated[
        float,
        typer.Option(
            "--transaction-timeout",
            metavar="SECONDS",
            callback=finite,
            min=1,
            max=_LONGEST_S,
            help="Time after which brokers abort the transaction of a dead harvester. Until then, read_committed "
            "consumers wait.",
        ),
    ] = DEFAULT_OPTIONS.transaction_timeout_s
    partitioner: Annotated[str, typer.Option("--partitioner", metavar="NAME", help=PARTITIONER_TEXT)] = (
        DEFAULT_OPTIONS.partitioner
    )


@command(
    app,
    "init",
    "Create the outbox's tables and topics. Tables of an earlier version are upgraded. The two topics are created only "
    "if a Kafka cluster is specified. What exists already is not changed, except that each call switches notifications "
    "on or off. The first harvester records its Kafka cluster and its partitioner. Harvesters with others refuse to "
    "start. Before you change one of the two, drain the outbox, stop its harvesters, and use --forget-target.",
    "outbox init --bootstrap-servers localhost:9092",
    "outbox init --name billing --schema events --no-notify",
)
def init(
    *,
    notify: Annotated[
        bool,
        typer.Option(
            "--notify/--no-notify",
            help="Whether new rows notify the harvester. If not, it polls, and commits do not queue to notify.",
        ),
    ] = True,
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            metavar="N",
            min=1,
            help="Replicas of the topics (default: 3, or the number of brokers if there are fewer).",
        ),
    ] = None,
    forget_target: Annotated[
        bool,
        typer.Option("--forget-target", help="Let the next harvester have another Kafka cluster or partitioner."),
    ] = False,
    options: OutboxOptions,
    kafka: ConnectionOptions,
) -> None:
    """Create the tables, and the topics if a Kafka cluster is specified. Raises `MarshalError`."""
    tables = _tables(options)
    connection = connection_of(kafka) if is_kafka_named(kafka) else None
    registration = tables.create(notifies=notify, forgets_target=forget_target)
    topics = OutboxTopics.of(registration.uid)
    if connection is not None:
        with warnings_to_stderr(_LOGGED_PARTS):
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
    woken = "new rows notify the harvester" if notify else "the harvester polls for new rows"
    output.show(
        f"Outbox {tables.schema}.{registration.name} (version {registration.version}, uid {registration.uid}): {woken}"
    )
    if connection is None:
        output.write_note(
            "no Kafka cluster is specified, so the topics were not created: run the command again with "
            "--bootstrap-servers"
        )
        return
    output.show(f"Topics {topics.leader} and {topics.notes} on {connection.bootstrap_servers}")


@command(
    app,
    "harvest",
    "Run a harvester, which publishes the outbox's rows. On SIGTERM or Ctrl-C it hands over to another harvester at "
    "once, and ends with exit code 0. If several run, one is active and the others stand by. With --json each change "
    "is a line of JSON.",
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
            callback=finite,
            min=0.001,
            max=30,
            help="Time between two polls for rows of which the database sends no notification.",
        ),
    ] = DEFAULT_OPTIONS.poll_interval_s,
    receive_deadline_s: Annotated[
        float,
        typer.Option(
            "--receive-deadline",
            metavar="SECONDS",
            callback=finite,
            min=2,
            max=600,
            help="A leader steps down if it has not read its own heartbeats for this long.",
        ),
    ] = DEFAULT_OPTIONS.timing.receive_deadline_ms / 1_000,
    options: BatchOptions,
    kafka: ConnectionOptions,
) -> ExitCode:
    """Publish rows until a signal arrives, and report each change of role. Raises `MarshalError`."""
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
            f"{shown}: handed over; {counted(counts.published, 'row')} published by this process, "
            f"{counts.parked} set aside",
            published=counts.published,
            parked=counts.parked,
            sessions=counts.sessions,
        )
    return ExitCode.OK


@command(
    app,
    "drain",
    "Publish the waiting rows, and exit. While another harvester is active, the command waits until that harvester has "
    "published them. The exit code is 1 if rows were set aside.",
    "outbox drain",
)
def drain(options: BatchOptions, kafka: ConnectionOptions) -> ExitCode:
    """Publish the waiting rows, and show their number. Raises `MarshalError`."""
    harvester = _harvester(options, kafka)
    with closing(_inspector(options)) as inspector, warnings_to_stderr(_LOGGED_PARTS):
        before = inspector.status().parked
        was_stopped = run_until_signal(harvester.drain, harvester.stop)
        after = inspector.status().parked
    published = harvester.counts.published
    parked = max(harvester.counts.parked, after - before)  # another harvester may have set them aside
    if options.as_json:
        output.write_json({"published": published, "parked": parked, "complete": not was_stopped})
    else:
        output.show(f"{counted(published, 'row')} published by this process, {parked} set aside")
    if was_stopped:
        output.write_note("the command was stopped before all rows were published")
        return ExitCode.INTERRUPTED
    if after:
        output.write_note(
            f"{counted(after, 'row')} set aside; `{parked_command(options.name, options.schema)}` shows why"
        )
    return ExitCode.PROBLEMS if parked or (after and not published) else ExitCode.OK


@command(
    app,
    "status",
    "Show the outbox's rows and last harvester. The command shows how many rows wait, the age of the oldest, how many "
    "are set aside, and the process that harvested last. If an open transaction of the database blocks the harvester, "
    "it shows the statement that ends it. It reads only the database. The exit code is 1 if a transaction blocks the "
    "harvester, or if rows wait for more than a minute.",
    "outbox status --json",
)
def status(options: OutboxOptions) -> ExitCode:
    """Show the number of waiting rows and of rows set aside. Raises `ConfigurationError`, `UnavailableError`."""
    with closing(_inspector(options)) as inspector:
        blocking = inspector.blocking()
        try:
            found = inspector.status()
        except UnavailableError:
            if options.as_json:
                for line in _blocking_lines(blocking):
                    output.write_note(str(line))
            else:
                output.show(*_blocking_lines(blocking))
            raise
    is_late = (found.oldest_age_s or 0.0) > _LONG_WAIT_S
    code = ExitCode.PROBLEMS if blocking or is_late else ExitCode.OK
    if options.as_json:
        output.write_json(_status_to_json(options, found, blocking))
        return code
    registration = found.registration
    oldest = "" if found.oldest_age_s is None else f", the oldest for {output.duration(found.oldest_age_s * 1_000)}"
    advice = f"; `{parked_command(options.name, options.schema)}` shows why" if found.parked else ""
    led = f"session {registration.session}, started by {registration.leader}"
    output.show(
        f"Outbox {options.schema}.{registration.name} (version {registration.version}, uid {registration.uid})",
        f"  waiting    {counted(found.rows, 'row')}{oldest}",
        output.styled(f"  set aside  {counted(found.parked, 'row')}{advice}", "yellow" if found.parked else ""),
        f"  harvested  {'never' if found.led_since is None else f'{led} at {_utc(found.led_since)}'}",
        *_blocking_lines(blocking),
    )
    if is_late and not blocking:
        output.show(
            output.styled(
                f"  Rows wait for long. GET {PATH} of the harvester has its failure, as its log has.", "yellow"
            )
        )
    return code


def _blocking_lines(blocking: Sequence[BlockingTransaction]) -> Iterator[output.Line]:
    """Yield two lines for each transaction that blocks the harvester: what it is, and the statement that ends it."""
    for found in blocking:
        user = f"user {found.user}" if found.user else None
        since = None if found.open_s is None else f"open for {output.duration(found.open_s * 1_000)}"
        about = ", ".join(filter(None, (user, found.application, found.state, since)))
        text = f"  blocked by process {found.pid} of the database" + (f" ({about})" if about else "")
        yield output.styled(text, "bold red")
        yield output.Line(
            ((f"    this ends it, and undoes its changes: SELECT pg_terminate_backend({found.pid});", ""),)
        )


@command(
    app,
    "migrate",
    "Move goharvest's or Debezium's table into the outbox. For Debezium it is the table of the outbox event router. In "
    "one transaction the table is renamed, its waiting rows move, and a view with a trigger takes its name, so that "
    "its writers continue unchanged. The command shows its checks and asks for confirmation. --dry-run also shows the "
    "SQL. The outbox must exist, with another name than the table.",
    "outbox migrate --from goharvest --table outbox --name events --dry-run",
    "outbox migrate --from debezium --table outboxevent --name events --header type=eventType",
    "outbox migrate --from goharvest --table outbox --name events --undo",
)
def migrate(
    *,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Give the table its name back. Rows that wait in the outbox stay there."),
    ] = False,
    lock_timeout_s: Annotated[
        float,
        typer.Option(
            "--lock-timeout",
            metavar="SECONDS",
            callback=finite,
            min=0.001,
            max=_LONGEST_S,
            help="How long to wait for the lock of the table. Its writers wait for as long.",
        ),
    ] = DEFAULT_LOCK_TIMEOUT_S,
    dry_run: DryRun = False,
    yes: Yes = False,
    old_table: OldTableOptions,
    options: OutboxOptions,
) -> ExitCode:
    """Show the checks, ask for confirmation, and move the table. Raises `MarshalError`."""
    if options.as_json and not (yes or dry_run):
        raise output.cannot_ask("with --dry-run")
    old, (schema, table) = old_table.old_table(), old_table.place()
    migration = OutboxMigration(_tables(options), old, table, schema, lock_timeout_s=lock_timeout_s)
    plan = migration.plan(is_undo=undo)
    if not options.as_json and not plan.is_done:
        outbox_migration.show_plan(plan, with_statements=dry_run)
    if not (dry_run or plan.is_done or plan.problems):
        question = outbox_migration.question(migration, old, is_undo=undo)
        if not (yes or typer.confirm(question, err=True)):
            output.write_nothing_written()
            return ExitCode.PROBLEMS
        plan = migration.undo() if undo else migration.apply()
    if options.as_json:
        output.write_json(outbox_migration.plan_to_json(plan, old, dry_run=dry_run))
    elif plan.is_done:
        output.show(f"{migration.shown} {'is a table already' if undo else 'was moved before'}; nothing was changed.")
    elif plan.problems or dry_run:
        output.show(output.DRY_RUN if dry_run else "Nothing was changed, because a check found a problem.")
    else:
        outbox_migration.show_next(plan, migration, old, options.name, is_undo=undo)
    return ExitCode.PROBLEMS if plan.problems else ExitCode.OK


@command(
    parked_app,
    "list",
    "List rows that are set aside. The harvester sets a row aside when its last attempt failed, and continues with the "
    "others. The oldest come first, each with the reason.",
    "outbox parked list --limit 20",
)
def list_parked(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show at most N rows.")] = 100,
    options: OutboxOptions,
) -> None:
    """List the rows that are set aside. Raises `ConfigurationError`, `UnavailableError`."""
    with closing(_inspector(options)) as inspector:
        rows = inspector.parked(limit)
        total = inspector.status().parked if len(rows) == limit else len(rows)
    if options.as_json:
        output.write_json({"parked": total, "rows": [_row_to_json(row) for row in rows]})
        return
    if not rows:
        output.show("No rows are set aside")
        return
    output.show(_table(rows))
    if total > len(rows):
        output.write_note(f"{total - len(rows)} more; --limit shows them")


@command(
    parked_app,
    "retry",
    "Publish rows that are set aside. The command puts them back into the outbox. Rows of the same keys that were "
    "published meanwhile come before them. The exit code is 1 if an id belongs to no row that is set aside.",
    "outbox parked retry 4711 4712",
    "outbox parked retry --all",
)
def retry_parked(
    *,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help=PARKED_IDS_TEXT)] = None,
    every: Annotated[bool, typer.Option("--all", help="Retry all rows that are set aside.")] = False,
    options: OutboxOptions,
) -> ExitCode:
    """Put rows back into the outbox, by id or all. Raises `ConfigurationError`, `UnavailableError`."""
    if bool(ids) == every:
        raise typer.BadParameter("use either the ids of rows or --all")
    with closing(_inspector(options)) as inspector:
        done = inspector.retry(None if every else ids)
    return _report(options, "retried", "put back, to be published", ids or (), done)


@command(
    parked_app,
    "delete",
    "Delete rows that are set aside. They are never published. The command shows them and asks for confirmation. The "
    "exit code is 1 if an id belongs to no row that is set aside, or if nothing was deleted.",
    "outbox parked delete 4711",
    "outbox parked delete 4711 4712 --yes",
)
def delete_parked(
    *,
    ids: Annotated[list[int], typer.Argument(metavar="ID", help=PARKED_IDS_TEXT)],
    yes: Yes = False,
    options: OutboxOptions,
) -> ExitCode:
    """Show rows, ask for confirmation, and delete them. Raises `ConfigurationError`, `UnavailableError`."""
    if options.as_json and not yes:
        raise output.cannot_ask("with `outbox parked list`")
    with closing(_inspector(options)) as inspector:
        if not yes:
            rows = inspector.parked(len(ids), ids)
            if not rows:
                return _report(options, "dropped", "", ids, [])
            output.show(_table(rows))
            if not typer.confirm(f"Delete {counted(len(rows), 'row')}, which will never be published?", err=True):
                output.write_note("nothing was deleted")
                return ExitCode.PROBLEMS
        done = inspector.drop(ids)
    return _report(options, "dropped", "deleted", ids, done)


def _tables(options: OutboxOptions) -> OutboxTables:
    """Return the outbox's tables, without connecting yet. Raises `ConfigurationError`."""
    dsn = (options.dsn or "").strip()
    if not dsn:
        raise ConfigurationError(
            f"no database is specified: set {DSN_VARIABLE}=postgresql://user:password@host:port/database, or use --dsn"
        )
    require_extra(Extra.POSTGRES, "the outbox")
    return OutboxTables(Database(dsn), options.name, options.schema)


def _inspector(options: OutboxOptions) -> OutboxInspector:
    return OutboxInspector(_tables(options))


def _harvester(
    options: BatchOptions,
    kafka: ConnectionOptions,
    timing: Timing = DEFAULT_OPTIONS.timing,
    poll_interval_s: float = DEFAULT_OPTIONS.poll_interval_s,
) -> Harvester:
    """Return a harvester, without connecting yet. Raises `ConfigurationError`."""
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


def _report(options: OutboxOptions, field_name: str, text: str, wanted: Sequence[int], done: Sequence[int]) -> ExitCode:
    """Show how many rows were changed and which ids were not set aside; return the exit code."""
    missing = sorted(set(wanted) - set(done))
    if options.as_json:
        output.write_json({field_name: list(done), "missing": missing})
    elif done or not wanted:
        output.show(f"{counted(len(done), 'row')} {text}")
    if missing:
        listed = ", ".join(map(str, missing))
        command = parked_command(options.name, options.schema)
        output.write_note(f"not set aside: {listed}; `{command}` shows the rows that are set aside")
    return ExitCode.PROBLEMS if missing else ExitCode.OK


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


def _status_to_json(
    options: OutboxOptions, found: OutboxStatus, blocking: Sequence[BlockingTransaction]
) -> dict[str, Any]:
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
        "cluster_id": registration.target.cluster_id,
        "partitioner": registration.target.partitioner,
        "led_since": None if found.led_since is None else found.led_since.isoformat(),
        "blocked_by": [asdict(transaction) for transaction in blocking],
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
