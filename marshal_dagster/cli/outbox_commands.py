"""The commands `outbox ...`: their options and help, as `main` has them of the others.

Nothing heavy is imported here either.
"""

from typing import Annotated

import typer

from marshal_dagster._internal.postgres import DEFAULT_SCHEMA
from marshal_dagster.cli.command import Command, command_group, help_text
from marshal_dagster.cli.exit_codes import HELP, ExitCode
from marshal_dagster.cli.options import (
    FROM_ENVIRONMENT,
    AsJson,
    ConnectionOptions,
    Health,
    Yes,
    with_connection,
)
from marshal_dagster.election.rules import Timing
from marshal_dagster.outbox.backoff import HarvestLimits
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
from marshal_dagster.outbox.schema import DEFAULT_NAME

app = command_group("A transactional outbox: rows committed in PostgreSQL, published to Kafka in order per key.")


Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="The database: postgresql://user@host:port/database. Other users of this machine see options: put one "
        "with a password into MARSHAL_OUTBOX_DSN, which counts where this is not given.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help=NAME_TEXT)]
Schema = Annotated[str, typer.Option("--schema", metavar="NAME", help=SCHEMA_TEXT)]
Ids = Annotated[
    list[int] | None,
    typer.Argument(metavar="[ID]...", help="Rows, as `outbox parked` lists them.", show_default=False),
]
MaxInFlight = Annotated[int, typer.Option("--max-in-flight", metavar="N", min=1, help=MAX_IN_FLIGHT_TEXT)]
MaxAttempts = Annotated[int, typer.Option("--max-attempts", metavar="N", min=1, help=MAX_ATTEMPTS_TEXT)]
TopicPatience = Annotated[
    float,
    typer.Option(
        "--topic-patience",
        metavar="SECONDS",
        min=0,
        help=TOPIC_PATIENCE_TEXT,
    ),
]
ReceiveDeadline = Annotated[
    float,
    typer.Option(
        "--receive-deadline",
        metavar="SECONDS",
        min=2,
        max=600,
        help="A leader that has not heard itself for so long steps down.",
    ),
]
PollInterval = Annotated[
    float,
    typer.Option(
        "--poll-interval",
        metavar="SECONDS",
        min=0.001,
        max=30,
        help="How soon rows are seen of which the database does not notify.",
    ),
]
TransactionTimeout = Annotated[
    float,
    typer.Option(
        "--transaction-timeout",
        metavar="SECONDS",
        min=1,
        help="After which brokers end the transaction of a harvester that is gone; consumers wait for it as long.",
    ),
]
PartitionerName = Annotated[
    str,
    typer.Option(
        "--partitioner",
        metavar="NAME",
        help=PARTITIONER_TEXT,
    ),
]


@app.command(
    "init",
    cls=Command,
    short_help="Create its tables and topics.",
    epilog=HELP,
    help=help_text(
        "Create an outbox's tables, or bring them up to this version, and its two topics where a Kafka is named. What "
        "is there already stays as it is, but for the notifications, which are switched as this call says.",
        "outbox init --bootstrap-servers localhost:9092",
        "outbox init --name billing --schema events --no-notify",
    ),
)
@with_connection
def _init(  # noqa: PLR0917 - typer gives options by name
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    notify: Annotated[
        bool,
        typer.Option(
            "--notify/--no-notify",
            help="Whether rows wake the harvester. Without, it looks for them, and commits need not queue to notify.",
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
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import outbox

    request = outbox.InitRequest(outbox.OutboxLocation(dsn, name, schema), connection, notify, replication, as_json)
    outbox.init(request)


@app.command(
    "harvest",
    cls=Command,
    short_help="Publish its rows, as a service.",
    epilog=HELP,
    help=help_text(
        "Publish the outbox's rows as they come, until SIGTERM or Ctrl-C, which hand over at once (exit code 0). Of "
        "several that run one is active, the others stand by. With --json each change is a line of JSON.",
        "outbox harvest --health 8080",
        "outbox harvest --name billing --max-in-flight 5000 --transaction-timeout 30",
    ),
)
@with_connection
def _harvest(  # noqa: PLR0917 - by name
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    health: Health = None,
    max_in_flight: MaxInFlight = DEFAULT_OPTIONS.limits.max_in_flight_records,
    max_attempts: MaxAttempts = DEFAULT_OPTIONS.limits.max_attempts,
    topic_patience: TopicPatience = DEFAULT_OPTIONS.limits.topic_patience_s,
    poll_interval: PollInterval = DEFAULT_OPTIONS.poll_interval_s,
    receive_deadline: ReceiveDeadline = DEFAULT_OPTIONS.timing.receive_deadline_ms / 1_000,
    transaction_timeout: TransactionTimeout = DEFAULT_OPTIONS.transaction_timeout_s,
    partitioner: PartitionerName = DEFAULT_OPTIONS.partitioner,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import outbox, outbox_harvest

    work = HarvesterOptions(
        HarvestLimits(max_in_flight_records=max_in_flight, max_attempts=max_attempts, topic_patience_s=topic_patience),
        Timing(receive_deadline_ms=receive_deadline * 1_000),
        poll_interval,
        transaction_timeout,
        partitioner,
    )
    return outbox_harvest.harvest(
        outbox_harvest.HarvestRequest(outbox.OutboxLocation(dsn, name, schema), connection, work, as_json), health
    )


@app.command(
    "drain",
    cls=Command,
    short_help="Publish what it has now, and end.",
    epilog=HELP,
    help=help_text(
        "Publish the rows that are there now, and end. While another harvester is active, wait until that one has "
        "published them. The exit code is 1 when rows were set aside.",
        "outbox drain",
    ),
)
@with_connection
def _drain(  # noqa: PLR0917 - by name
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    max_in_flight: MaxInFlight = DEFAULT_OPTIONS.limits.max_in_flight_records,
    max_attempts: MaxAttempts = DEFAULT_OPTIONS.limits.max_attempts,
    topic_patience: TopicPatience = DEFAULT_OPTIONS.limits.topic_patience_s,
    transaction_timeout: TransactionTimeout = DEFAULT_OPTIONS.transaction_timeout_s,
    partitioner: PartitionerName = DEFAULT_OPTIONS.partitioner,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import outbox, outbox_harvest

    work = HarvesterOptions(
        HarvestLimits(max_in_flight_records=max_in_flight, max_attempts=max_attempts, topic_patience_s=topic_patience),
        transaction_timeout_s=transaction_timeout,
        partitioner=partitioner,
    )
    return outbox_harvest.drain(
        outbox_harvest.HarvestRequest(outbox.OutboxLocation(dsn, name, schema), connection, work, as_json)
    )


@app.command(
    "status",
    cls=Command,
    short_help="Show how it stands.",
    epilog=HELP,
    help=help_text(
        "Show how many rows wait and for how long the oldest has, how many are set aside, and who harvested last. It "
        "asks the database alone.",
        "outbox status --json",
    ),
)
def _status(
    dsn: Dsn = None, name: Name = DEFAULT_NAME, schema: Schema = DEFAULT_SCHEMA, as_json: AsJson = False
) -> None:
    from marshal_dagster.cli import outbox

    outbox.status(outbox.OutboxLocation(dsn, name, schema), as_json=as_json)


@app.command(
    "parked",
    cls=Command,
    short_help="List the rows that are set aside.",
    epilog=HELP,
    help=help_text(
        "List the rows that were set aside, the oldest first, each with the reason: the harvester tried them as often "
        "as it may, and goes on with the rest.",
        "outbox parked --limit 20",
    ),
)
def _parked(
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="The first N.")] = 100,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import outbox

    outbox.parked(outbox.OutboxLocation(dsn, name, schema), limit, as_json=as_json)


@app.command(
    "retry",
    cls=Command,
    short_help="Have rows that are set aside published.",
    epilog=HELP,
    help=help_text(
        "Put rows that were set aside back, to be published: after all that was published of their keys meanwhile. The "
        "exit code is 1 when one that was named is not there.",
        "outbox retry 4711 4712",
        "outbox retry --all",
    ),
)
def _retry(  # noqa: PLR0917 - by name
    ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import outbox

    if bool(ids) == every:
        raise typer.BadParameter("name rows by their ids, or give --all")
    return outbox.retry(outbox.OutboxLocation(dsn, name, schema), None if every else ids, as_json=as_json)


@app.command(
    "drop",
    cls=Command,
    short_help="Delete rows that are set aside.",
    epilog=HELP,
    help=help_text(
        "Delete rows that were set aside: they are never published. Shows them, and asks. The exit code is 1 when one "
        "that was named is not there, or nothing was deleted.",
        "outbox drop 4711",
        "outbox drop 4711 4712 --yes",
    ),
)
def _drop(  # noqa: PLR0917 - by name
    ids: Annotated[
        list[int], typer.Argument(metavar="ID...", help="Rows, as `outbox parked` lists them.", show_default=False)
    ],
    dsn: Dsn = None,
    name: Name = DEFAULT_NAME,
    schema: Schema = DEFAULT_SCHEMA,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import outbox

    return outbox.drop(outbox.OutboxLocation(dsn, name, schema), ids, yes=yes, as_json=as_json)
