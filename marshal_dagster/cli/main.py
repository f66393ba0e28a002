"""The command `marshal-dagster`: its commands, their options and help, and what becomes of errors.

Nothing heavy is imported here: a command's module comes when the command is called.
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

from marshal_dagster.cli import admin_commands, coordinator_commands, outbox_commands, output
from marshal_dagster.cli.command import PROGRAM, Command, command_group, help_text
from marshal_dagster.cli.exit_codes import HELP, ExitCode, code_of
from marshal_dagster.cli.options import (
    DEFAULT_COORDINATION_TOPIC,
    FROM_ENVIRONMENT,
    AsJson,
    ConnectionOptions,
    CoordinationTopic,
    DataConnection,
    with_connection,
)
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_PARTITIONS

_DEBUG: Final = "--debug"
_NOWHERE: Final = logging.NullHandler()
_UsageError: Final[Any] = typer.BadParameter.__mro__[1]
"""The parser's own error, for which typer has no public name."""


app = command_group(
    "Kafka partitions claimed before Spark batches: the coordination log, looked at and looked after.",
    add_completion=True,
)
kafka_app = command_group("A real Kafka for this machine: started, looked at and stopped.")
topic_app = command_group("The coordination topic: created and checked.")
app.add_typer(admin_commands.app)
app.add_typer(topic_app, name="topic")
app.add_typer(outbox_commands.app, name="outbox")
app.add_typer(coordinator_commands.app, name="coordinator")
app.add_typer(kafka_app, name="kafka")

Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        "-d",
        help="Where the cluster lives; by default MARSHAL_KAFKA_DIR, else a folder of the user's.",
        show_default=False,
    ),
]

WantedGroup = Annotated[str | None, typer.Option("--group", "-g", help="This group only.", show_default=False)]
WantedTopic = Annotated[
    str | None,
    typer.Option(
        "--topic", "-t", help="This data topic only; no other coordination partition is read.", show_default=False
    ),
]
TopicName = Annotated[
    str,
    typer.Option(
        "--name",
        metavar="NAME",
        envvar="MARSHAL_COORDINATION_TOPIC",
        show_envvar=False,
        help="The topic's name; MARSHAL_COORDINATION_TOPIC sets it too.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.write_line(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="With an error show where it comes from, and log what Kafka's client says.")
    ] = False,
) -> None:
    # Both are dealt with by now: the one by its callback, the other by `run`.
    del version, debug


@app.command(
    "doctor",
    cls=Command,
    short_help="Check what a deployment needs.",
    epilog=HELP,
    help=help_text(
        "Check what a deployment needs: versions, Java, Spark's connector, the connection, this user's rights, the "
        "coordination topic and its log, the data topics that it names. "
        "Each thing that is wrong is told with why it matters and the command that mends it; the exit code is then 1.",
        "doctor --bootstrap-servers localhost:9092",
    ),
)
@with_connection
def _doctor(
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import doctor

    return doctor.run(doctor.DoctorRequest(connection, coordination_topic, data_connection, as_json))


@app.command(
    "status",
    cls=Command,
    short_help="Show the world state, by group and key.",
    epilog=HELP,
    help=help_text(
        "Show the world state that the coordination log leads to: groups, pauses, settings, and each key with its "
        "owner, offset and plan. Freshness and lag are as of now. Where a coordinator leads a group, it also shows to "
        "whom each partition is assigned.",
        "status",
        "status --group flights --topic flights --json",
    ),
)
@with_connection
def _status(  # noqa: PLR0917 - typer gives options by name
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    group: WantedGroup = None,
    topic: WantedTopic = None,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import status

    status.run(status.StatusRequest(connection, coordination_topic, data_connection, group, topic, as_json))


@app.command(
    "top",
    cls=Command,
    short_help="Watch who works on what.",
    epilog=HELP,
    help=help_text(
        "Watch who works on what: claims and their owners, when these were last heard of, lag, how fast positions "
        "move, paused groups. It only reads. `q` ends it, as Ctrl-C does. Where stdout is no terminal, and with --once "
        "or --json, it looks twice, an interval apart, shows that, and ends. Where a coordinator leads a group, it "
        "also shows to whom each partition is assigned.",
        "top --group flights",
        "top --json --interval 10",
    ),
)
@with_connection
def _top(  # noqa: PLR0917 - by name
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    group: WantedGroup = None,
    topic: WantedTopic = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=0.1, help="How often it looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import top

    top.run(
        top.TopRequest(
            connection, coordination_topic, data_connection, group, topic, interval, once=once, as_json=as_json
        )
    )


@app.command(
    "tail",
    cls=Command,
    short_help="Show the coordination log's records.",
    epilog=HELP,
    help=help_text(
        "Show the coordination log's records, parsed and with what each came to: by default the last 10, with --json "
        "all of them, as `replay` reads them. Records of one coordination partition are in order; those of several are "
        "merged by log time.",
        "tail --follow",
        "tail --json > log.jsonl",
    ),
)
@with_connection
def _tail(  # noqa: PLR0917 - by name
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the records that come.")] = False,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the log's first record.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", help="The last N records.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import tail

    if from_start and lines is not None:
        raise typer.BadParameter("--from-start and -n contradict each other: give one of them")
    if lines is None and not from_start and not as_json:
        lines = tail.DEFAULT_LINES
    tail.run(tail.TailRequest(connection, coordination_topic, lines, follow, as_json))


@app.command(
    "replay",
    cls=Command,
    short_help="Show what a stored log leads to.",
    epilog=HELP,
    help=help_text(
        "Read a stored coordination log and show the world state that it leads to. A line is "
        '{"partition": p, "offset": o, "timestamp": ms, "value": text or null}.',
        "replay log.jsonl --json",
        "tail --json | marshal-dagster replay - --coordination-partitions 8",
    ),
)
def _replay(  # noqa: PLR0917 - by name
    file: Annotated[str, typer.Argument(metavar="FILE", help="The stored log; - for standard input.")],
    heartbeat_interval: Annotated[
        float,
        typer.Option(
            "--heartbeat-interval",
            metavar="SECONDS",
            help="The heartbeat interval until a group's first settings record.",
        ),
    ] = 60.0,
    rules: Annotated[
        str,
        typer.Option(
            "--rules", metavar="native|go", help="The rule set until a group's first settings record; readers take go."
        ),
    ] = "go",
    coordination_partitions: Annotated[
        int | None,
        typer.Option(
            "--coordination-partitions",
            metavar="N",
            help="How many the coordination topic has; by default the largest number in the log + 1.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    at_each: Annotated[
        bool, typer.Option("--at-each", help="Write each record's verdict, a JSON line each.", show_default=False)
    ] = False,
) -> None:
    from marshal_dagster.cli import replay

    replay.run(replay.ReplayRequest(file, heartbeat_interval, rules, coordination_partitions, as_json, at_each))


@app.command(
    "recover",
    cls=Command,
    short_help="Make a log certain that was cut without a snapshot.",
    epilog=HELP,
    help=help_text(
        "Make a coordination log certain again that no longer begins at offset 0 and has no snapshot; also the way to "
        "take over a deployment of the Go library. Stop all members of all groups first. It shows what is known and "
        "what cannot be, asks, waits for 2 heartbeat intervals in which nobody may write, and writes the first "
        "snapshot: pauses and settings as shown or named, the offsets confirmed, no owner and no plan. A group of "
        "which neither settings nor a data topic id are left is taken for one of Go consumers.",
        "recover",
        "recover --offset flights/flights/0=1500 --heartbeat-interval 120",
    ),
)
@with_connection
def _recover(  # noqa: PLR0917 - by name
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    heartbeat_interval: Annotated[
        float | None,
        typer.Option(
            "--heartbeat-interval",
            metavar="SECONDS",
            min=0.001,
            help="The longest that any member has, where that is longer than what is shown.",
            show_default=False,
        ),
    ] = None,
    offset: Annotated[
        list[str] | None,
        typer.Option(
            "--offset",
            metavar="GROUP/TOPIC/PARTITION=OFFSET",
            help="Start there instead: the next offset to read. Can be given again.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--settings",
            metavar="GROUP=native,10s,at_least_once",
            help="What a group works under of which no settings are left; go for one of Go consumers. Can be given "
            "again.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import recover

    return recover.run(
        recover.RecoverRequest(
            connection,
            coordination_topic,
            data_connection,
            heartbeat_interval,
            tuple(offset or ()),
            tuple(settings or ()),
            yes,
            as_json,
        )
    )


@topic_app.command(
    "create",
    cls=Command,
    short_help="Create it with the right settings.",
    epilog=HELP,
    help=help_text(
        "Create the coordination topic with the settings that the protocol needs: "
        "message.timestamp.type=LogAppendTime, cleanup.policy=delete, retention.ms=-1, retention.bytes=-1, "
        "unclean.leader.election.enable=false, and with 3 replicas min.insync.replicas=2. One that is there already "
        "stays as it is; with dangerous settings it is refused.",
        "topic create",
        "topic create --name __marshal --partitions 8 --replication 3",
    ),
)
@with_connection
def _create(  # noqa: PLR0917 - by name
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    name: TopicName = DEFAULT_COORDINATION_TOPIC,
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", metavar="N", help="Coordination partitions; this can never change.")
    ] = DEFAULT_COORDINATION_PARTITIONS,
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            metavar="N",
            help="Replicas of each; 3 by default, or as many as there are brokers.",
            show_default=False,
        ),
    ] = None,
    allow_unsafe: Annotated[
        bool,
        typer.Option(
            "--allow-unsafe", help="Do with one that is there and has dangerous settings; an unusable one is refused."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import topic

    topic.create(topic.CreateRequest(connection, name, partitions, replication, allow_unsafe, as_json))


@topic_app.command(
    "check",
    cls=Command,
    short_help="Check its settings.",
    epilog=HELP,
    help=help_text(
        "Check the coordination topic's settings. The exit code is 1 if the protocol does not hold under one of "
        "them; a warning alone leaves it 0.",
        "topic check --json",
    ),
)
@with_connection
def _check(
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    name: TopicName = DEFAULT_COORDINATION_TOPIC,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import topic

    return topic.check(connection, name, as_json=as_json)


@kafka_app.command(
    "up",
    cls=Command,
    short_help="Start a Kafka on this machine.",
    epilog=HELP,
    help=help_text(
        "Start a real Apache Kafka on this machine, or what is missing of it. It listens on 127.0.0.1 only and goes on "
        "until `kafka down`. The first time its jars are fetched.",
        "kafka up",
        "kafka up --brokers 3 --port 19092 --directory /tmp/kafka",
    ),
)
def _up(
    brokers: Annotated[
        int | None, typer.Option("--brokers", metavar="1|3", help="How many brokers.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            help="The first broker's port, 9092 by default; others take the next ones. 0: any free ones.",
            show_default=False,
        ),
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import devkafka

    devkafka.up(devkafka.UpRequest(directory, brokers, port, as_json))


@kafka_app.command(
    "down",
    cls=Command,
    short_help="Stop it, and delete its data if asked.",
    epilog=HELP,
    help=help_text(
        "Stop the brokers that `kafka up` started. Their data stays, unless it is to be deleted.",
        "kafka down",
        "kafka down --wipe",
    ),
)
def _down(
    wipe: Annotated[bool, typer.Option("--wipe", help="Delete the topics and all else that the brokers kept.")] = False,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import devkafka

    devkafka.down(directory, wipe=wipe, as_json=as_json)


@kafka_app.command(
    "status",
    cls=Command,
    short_help="Show each broker.",
    epilog=HELP,
    help=help_text(
        "Show each broker: its address, its process, whether it answers. The exit code is 3 unless all do.",
        "kafka status --json",
    ),
)
def _kafka_status(directory: Directory = None, as_json: AsJson = False) -> ExitCode:
    from marshal_dagster.cli import devkafka

    return devkafka.status(directory, as_json=as_json)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line and give its exit code; an error is told in one line on stderr."""
    arguments, debug = _without_debug(arguments)
    _prepare(debug=debug)
    try:
        given = get_command(app).main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        output.flush()
        return int(given or ExitCode.OK)
    except _UsageError as error:
        error.show()
        return ExitCode.USAGE
    except (output.PipeClosedError, BrokenPipeError):
        output.stop_writing()
        return ExitCode.PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told in one line
        return _report(error, debug=debug)


def main() -> None:
    """Run the command line of this process, and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, which may stand anywhere before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != _DEBUG]
    return [*kept, *arguments[end:]], len(kept) < end


def _prepare(*, debug: bool) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stand-in of a test's has no encoding to speak of
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if debug:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    else:
        # What the parts below log is for Dagster; here it is shown, or told as an error, by the command.
        logging.getLogger("marshal_dagster").addHandler(_NOWHERE)


def _report(error: Exception, *, debug: bool) -> ExitCode:
    code = code_of(error)
    if debug:
        traceback.print_exception(error)
    if code is None:
        kind = type(error).__name__
        advice = (
            "" if debug else f"; this is a mistake in {PROGRAM}: run it again with {_DEBUG} and report what it shows"
        )
        output.write_error(f"unexpected {kind}: {error}{advice}")
        return ExitCode.BUG
    output.write_error(str(error))
    return code
