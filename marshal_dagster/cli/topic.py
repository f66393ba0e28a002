"""`topic create|check`: the coordination topic and the settings that the protocol's promises rest on."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from marshal_dagster.cli import output
from marshal_dagster.cli.connections import check_topic, connection_of, hint_how_to_create
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.coordination.topic_settings import (
    SettingProblem,
    Severity,
    check_coordination_topic,
    create_coordination_topic,
    create_snapshot_topic,
    require_safe,
)
from marshal_dagster.errors import AuthorizationError, ConfigurationError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics

_CLIENT_ID = "marshal-dagster-topic"


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Which topic is to be there; `replication` None: 3, or as many as there are brokers."""

    connection: ConnectionOptions
    name: str
    partitions: int
    replication: int | None = None
    allow_unsafe: bool = False
    as_json: bool = False


def create(request: CreateRequest) -> None:
    """Create the coordination topic, or make sure that the one that is there will do, and the one for its snapshots.

    Raises `UnsafeTopicError` for one that would not, unless that is accepted; `ConfigurationError` for another
    partition count; `MarshalError`.
    """
    check_topic("--name", request.name)
    for option, value in (("--partitions", request.partitions), ("--replication", request.replication)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{option}: {value}; give 1 or more")
    connection = connection_of(request.connection)
    with Topics(connection, client_id=_CLIENT_ID) as topics:
        created = _created(topics, request)
        described, problems = _look(topics, request.name, connection.bootstrap_servers)
        snapshot_topic = _snapshot_topic(topics, request.name)
    if request.as_json:
        output.write_json({"created": created, "snapshot_topic": snapshot_topic} | _to_json(described, problems))
        return
    output.show(f"{_said(described)} {'was created' if created else 'is there already'}")
    _show(problems)


def check(options: ConnectionOptions, name: str, *, as_json: bool) -> ExitCode:
    """Show what is wrong with the coordination topic's settings; the exit code says whether one is dangerous.

    Raises `TopicNotFoundError`, `MarshalError`.
    """
    check_topic("--name", name)
    connection = connection_of(options)
    with hint_how_to_create(name), Topics(connection, client_id=_CLIENT_ID) as topics:
        described, problems = _look(topics, name, connection.bootstrap_servers)
    if as_json:
        output.write_json(_to_json(described, problems))
    else:
        output.show(f"{_said(described)} {_judgement(problems)}")
        _show(problems)
    return ExitCode.OK if is_safe(problems) else ExitCode.PROBLEMS


def is_safe(problems: Iterable[SettingProblem]) -> bool:
    """Tell whether the protocol holds all the same."""
    return all(problem.severity is Severity.WARNING for problem in problems)


def _judgement(problems: Iterable[SettingProblem]) -> str:
    worst = {problem.severity for problem in problems}
    if Severity.UNUSABLE in worst:
        return "cannot be used: no member or command works with it, and no option allows it"
    return "has dangerous settings" if Severity.DANGER in worst else "will do"


def with_servers(problem: SettingProblem, servers: str) -> SettingProblem:
    """Have the command that mends a setting name the cluster, so that it can be run as it is."""
    tool, _, rest = problem.mend.partition(" ")
    if tool != "kafka-configs":
        return problem
    return SettingProblem(**{**asdict(problem), "mend": f"{tool} --bootstrap-server {servers} {rest}"})


def _look(topics: Topics, name: str, servers: str) -> tuple[TopicDescription, list[SettingProblem]]:
    described = topics.describe(name)
    return described, [with_servers(each, servers) for each in check_coordination_topic(topics, described)]


def _created(topics: Topics, request: CreateRequest) -> bool:
    try:
        return create_coordination_topic(topics, request.name, request.partitions, request.replication)
    except UnsafeTopicError:
        if not request.allow_unsafe:
            raise
        require_safe(topics, topics.describe(request.name), allow_unsafe=True)
        return False


def _snapshot_topic(topics: Topics, name: str) -> str | None:
    """Create the topic for snapshots too; a deployment does without where it may not be created."""
    try:
        create_snapshot_topic(topics, name)
    except (AuthorizationError, ConfigurationError) as error:
        output.write_note(f"no topic for snapshots: {error}")
        return None
    return snapshot_topic_of(name)


def _said(described: TopicDescription) -> str:
    count, replicas = len(described.partitions), described.replication
    return (
        f"{described.name} ({count} coordination partition{'' if count == 1 else 's'}, {replicas} "
        f"replica{'' if replicas == 1 else 's'}, id {described.topic_id})"
    )


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
            output.styled(f"  mend: {problem.mend}", ""),
        )


def _to_json(described: TopicDescription, problems: Iterable[SettingProblem]) -> dict[str, object]:
    listed = list(problems)
    return {
        "topic": described.name,
        "topic_id": described.topic_id,
        "partitions": len(described.partitions),
        "replication": described.replication,
        "ok": is_safe(listed),
        "problems": [asdict(each) for each in listed],
    }
