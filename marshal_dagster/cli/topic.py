"""`topic`: create the coordination topic and check its settings (docs/reference/protocol.md, section 1.6)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from marshal_dagster._internal.texts import counted
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, hint_how_to_create
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.library_warnings import warnings_to_stderr
from marshal_dagster.cli.options import AsJson, ConnectionOptions
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_PARTITIONS, DEFAULT_COORDINATION_TOPIC
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.coordination.topic_settings import (
    SettingProblem,
    Severity,
    check_coordination_topic,
    create_coordination_topic,
    create_snapshot_topic,
    require_safe,
    with_reasons,
)
from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.kafka.topic_creation import TopicCreation
from marshal_dagster.kafka.topic_names import require_topic_name

_CLIENT_ID = "marshal-dagster-topic"

app = command_group("Create and check the coordination topic.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions(ConnectionOptions):
    """The connection, the coordination topic, and whether to write JSON."""

    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            envvar="MARSHAL_COORDINATION_TOPIC",
            show_envvar=False,
            help="The coordination topic; MARSHAL_COORDINATION_TOPIC sets it too.",
        ),
    ] = DEFAULT_COORDINATION_TOPIC
    as_json: AsJson = False


@command(
    app,
    "create",
    "Create the topic with the right settings. These are message.timestamp.type=LogAppendTime, cleanup.policy=delete, "
    "retention.ms=-1, retention.bytes=-1, unclean.leader.election.enable=false, and with 3 replicas "
    "min.insync.replicas=2. If the brokers refuse some of them, the topic is created with the others and then checked; "
    "the exit code is 1 if its settings are dangerous. An existing topic is not changed; it is refused if its settings "
    "are dangerous.",
    "topic create",
    "topic create --name __marshal --partitions 8 --replication 3",
)
def create(
    *,
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", metavar="N", help="Number of partitions, which can never change.")
    ] = DEFAULT_COORDINATION_PARTITIONS,
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            metavar="N",
            help="Replicas of each partition (default: 3, or the number of brokers if there are fewer).",
        ),
    ] = None,
    allow_unsafe: Annotated[
        bool,
        typer.Option(
            "--allow-unsafe", help="Accept an existing topic with dangerous settings, but not an unusable one."
        ),
    ] = False,
    options: TopicOptions,
) -> ExitCode:
    """Create the coordination topic and its snapshot topic, or check that the existing topic can be used.

    The exit code is 1 if the topic was created with dangerous settings, because the brokers refused or ignored some.

    Raises:
        UnsafeTopicError: The topic exists, and has unusable settings, or dangerous ones without `allow_unsafe`.
        ConfigurationError: The topic has another number of partitions, or an option is wrong.
        MarshalError: Kafka does not answer, or a right is missing.
    """
    require_topic_name("--name", options.name)
    for option, value in (("--partitions", partitions), ("--replication", replication)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{option} is {value}; it must be at least 1")
    connection = connection_of(options)
    with warnings_to_stderr(("kafka",)), Topics(connection, client_id=_CLIENT_ID) as topics:
        try:
            creation = create_coordination_topic(topics, options.name, partitions, replication)
        except UnsafeTopicError:
            if not allow_unsafe:
                raise
            require_safe(topics, topics.describe(options.name), allow_unsafe=True)
            creation = TopicCreation(created=False, refused={})
        described, problems = _look(topics, options.name, connection.bootstrap_servers)
        problems = with_reasons(problems, creation.refused)
        snapshot_topic = _snapshot_topic(topics, options.name)
    if options.as_json:
        about = {"created": creation.created, "snapshot_topic": snapshot_topic, "refused": dict(creation.refused)}
        output.write_json(about | _to_json(described, problems))
    else:
        output.show(f"{_described(described)} {'was created' if creation.created else 'exists already'}")
        _show(problems)
        _show_refused(creation, problems)
    return ExitCode.OK if allow_unsafe or _is_safe(problems) else ExitCode.PROBLEMS


@command(
    app,
    "check",
    "Check the topic's settings. The exit code is 1 if the protocol does not hold under one of them. It is 0 if there "
    "are only warnings.",
    "topic check --json",
)
def check(options: TopicOptions) -> ExitCode:
    """Show the problems of the coordination topic's settings. The exit code is 1 if one is dangerous.

    Raises:
        TopicNotFoundError: The topic does not exist.
        MarshalError: Kafka does not answer, or a right is missing.
    """
    require_topic_name("--name", options.name)
    connection = connection_of(options)
    with hint_how_to_create(options.name), Topics(connection, client_id=_CLIENT_ID) as topics:
        described, problems = _look(topics, options.name, connection.bootstrap_servers)
    if options.as_json:
        output.write_json(_to_json(described, problems))
    else:
        output.show(f"{_described(described)} {_judgement(problems)}")
        _show(problems)
    return ExitCode.OK if _is_safe(problems) else ExitCode.PROBLEMS


def _is_safe(problems: Iterable[SettingProblem]) -> bool:
    return all(problem.severity is Severity.WARNING for problem in problems)


def _judgement(problems: Iterable[SettingProblem]) -> str:
    worst = {problem.severity for problem in problems}
    if Severity.UNUSABLE in worst:
        return "cannot be used: no member or command works with it, and no option allows it"
    return "has dangerous settings" if Severity.DANGER in worst else "has safe settings"


def with_servers(problem: SettingProblem, servers: str) -> SettingProblem:
    """Add the cluster's address to the command that fixes a setting, so that it can be run as it is."""
    tool, _, rest = problem.fix.partition(" ")
    if tool not in {"kafka-configs", "kafka-reassign-partitions"}:
        return problem
    return replace(problem, fix=f"{tool} --bootstrap-server {servers} {rest}")


def _look(topics: Topics, name: str, servers: str) -> tuple[TopicDescription, list[SettingProblem]]:
    described = topics.describe(name)
    return described, [with_servers(problem, servers) for problem in check_coordination_topic(topics, described)]


def _snapshot_topic(topics: Topics, name: str) -> str | None:
    """Create the snapshot topic and return its name, or None: a deployment also works without it."""
    try:
        create_snapshot_topic(topics, name)
    except (AuthorizationError, ConfigurationError) as error:
        output.write_note(f"the snapshot topic was not created: {error}")
        return None
    return snapshot_topic_of(name)


def _described(described: TopicDescription) -> str:
    partitions = counted(len(described.partitions), "coordination partition")
    return f"{described.name} ({partitions}, {counted(described.replication, 'replica')}, id {described.topic_id})"


def _show(problems: Iterable[SettingProblem]) -> None:
    for problem in problems:
        style = "yellow" if problem.severity is Severity.WARNING else "bold red"
        output.show(
            output.Line(
                (
                    (f"{problem.severity}: ", style),
                    (f"{problem.setting} is {problem.found}, should be {problem.wanted}", ""),
                )
            ),
            output.styled(f"  why: {problem.why}", "dim"),
            f"  fix: {problem.fix}",
        )


def _show_refused(creation: TopicCreation, problems: Iterable[SettingProblem]) -> None:
    """Show the settings that the brokers refused and that are right without being set."""
    shown = {problem.setting for problem in problems}
    for setting, reason in creation.refused.items():
        if setting not in shown:
            output.show(
                output.styled(f"the brokers refused to set {setting}, but it has a safe value: {reason}", "dim")
            )


def _to_json(described: TopicDescription, problems: Sequence[SettingProblem]) -> dict[str, object]:
    return {
        "topic": described.name,
        "topic_id": described.topic_id,
        "partitions": len(described.partitions),
        "replication": described.replication,
        "ok": _is_safe(problems),
        "problems": [asdict(problem) for problem in problems],
    }
