"""The commands `coordinator ...`: their options and help, as `main` has them of the others.

Nothing heavy is imported here either.
"""

from typing import Annotated, Final, Literal

import typer

from marshal_dagster.cli.command import Command, command_group, help_text
from marshal_dagster.cli.exit_codes import HELP, ExitCode
from marshal_dagster.cli.options import (
    DEFAULT_COORDINATION_TOPIC,
    FROM_ENVIRONMENT,
    AsJson,
    ConnectionOptions,
    CoordinationTopic,
    DataConnection,
    GroupName,
    Health,
    with_connection,
)
from marshal_dagster.coordinator import DEFAULT_TOPIC

app = command_group("A group coordinator: which member is to claim which partitions. Claims alone decide.")

TOPIC_VARIABLE: Final = "MARSHAL_COORDINATOR_TOPIC"

CoordinatorTopic = Annotated[
    str,
    typer.Option(
        "--coordinator-topic",
        metavar="NAME",
        envvar=TOPIC_VARIABLE,
        show_envvar=False,
        help="The first of the coordinator's topics; MARSHAL_COORDINATOR_TOPIC sets it too.",
    ),
]


@app.command(
    "init",
    cls=Command,
    short_help="Create its topics.",
    epilog=HELP,
    help=help_text(
        "Create the coordinator's three topics where they are missing. As many coordinators as they have partitions "
        "can share the groups; that cannot be changed later.",
        "coordinator init",
        "coordinator init --partitions 16",
    ),
)
@with_connection
def _init(
    topic: CoordinatorTopic = DEFAULT_TOPIC,
    partitions: Annotated[
        int, typer.Option("--partitions", metavar="N", min=1, max=1_000, help="Partitions of each topic.")
    ] = 8,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import coordinator

    coordinator.init(coordinator.CoordinatorTopicOptions(topic, connection), partitions, as_json=as_json)


@app.command(
    "run",
    cls=Command,
    short_help="Assign partitions to members, as a service.",
    epilog=HELP,
    help=help_text(
        "Lead groups until SIGTERM or Ctrl-C (exit code 0), and tell each member which partitions to claim. Several "
        "that run share the groups, and take over from each other. What happens is told in lines on stderr, with "
        "--json on stdout.",
        "coordinator run",
        "coordinator run --strategy weighted --json",
    ),
)
@with_connection
def _run(  # noqa: PLR0917 - by name
    topic: CoordinatorTopic = DEFAULT_TOPIC,
    strategy: Annotated[
        Literal["sticky", "weighted", "range", "round_robin"],
        typer.Option(
            "--strategy",
            help="How partitions are spread: sticky by number, with the fewest moves; weighted by how much of each is "
            "unread; both by members' capacities too.",
        ),
    ] = "sticky",
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    health: Health = None,
    min_session: Annotated[
        float,
        typer.Option("--min-session", metavar="SECONDS", min=0, help="Refuse members with a shorter session time-out."),
    ] = 1.0,
    max_failed_pings: Annotated[
        int, typer.Option("--max-failed-pings", metavar="N", min=0, help="Pings a member may miss, one after another.")
    ] = 1,
    backoff: Annotated[
        float,
        typer.Option(
            "--rebalance-backoff",
            metavar="SECONDS",
            min=0,
            help="How long to wait when somebody did not answer in a rebalance; after the last try 30 times as long.",
        ),
    ] = 1.0,
    max_retries: Annotated[
        int, typer.Option("--max-retries", metavar="N", min=0, help="How often a rebalance is tried again at once.")
    ] = 4,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    data_connection: DataConnection = None,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import coordinator

    manner = coordinator.CoordinatorRunOptions(
        strategy, coordination_topic, min_session, max_failed_pings, backoff, max_retries
    )
    return coordinator.run(
        coordinator.CoordinatorTopicOptions(topic, connection, data_connection), manner, health, as_json=as_json
    )


@app.command(
    "status",
    cls=Command,
    short_help="Show its groups and their members.",
    epilog=HELP,
    help=help_text(
        "Show each group that a coordinator leads: since when it has been silent, the members, and how many partitions "
        "each is to claim. The exit code is 1 when a group's coordinator has been silent for more than a minute.",
        "coordinator status",
        "coordinator status --json",
    ),
)
@with_connection
def _status(
    topic: CoordinatorTopic = DEFAULT_TOPIC,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import coordinator

    return coordinator.status(coordinator.CoordinatorTopicOptions(topic, connection), as_json=as_json)


@app.command(
    "assignments",
    cls=Command,
    short_help="Show who is to claim what in a group.",
    epilog=HELP,
    help=help_text(
        "Show which partitions each member of a group is to claim. Who holds them is another question: `status` "
        "answers it. The exit code is 1 when no coordinator has ever led the group.",
        "coordinator assignments shops",
    ),
)
@with_connection
def _assignments(
    group: GroupName,
    topic: CoordinatorTopic = DEFAULT_TOPIC,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import coordinator

    return coordinator.assignments(coordinator.CoordinatorTopicOptions(topic, connection), group, as_json=as_json)
