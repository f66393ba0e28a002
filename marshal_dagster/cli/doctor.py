"""`doctor`: check what a deployment needs, and show each problem, why it matters and how to fix it.

The checks are in `doctor_checks`. This module connects to the clusters, runs the checks and shows the findings.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Final

from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import connection_of, data_connection_of, misspelled_variables
from marshal_dagster.cli.doctor_checks import acls, brokers
from marshal_dagster.cli.doctor_checks.coordination_log import check_world, missing_topic, read_log
from marshal_dagster.cli.doctor_checks.data_topics import check_data_topics
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding, failed, not_checked, ok, problem, warning
from marshal_dagster.cli.doctor_checks.go_consumers import check_go_consumers
from marshal_dagster.cli.doctor_checks.machine import check_machine
from marshal_dagster.cli.doctor_checks.senders import check_senders, newest
from marshal_dagster.cli.doctor_checks.snapshots import Retention, check_snapshots
from marshal_dagster.cli.doctor_checks.topic_settings import check_snapshot_topic, check_topic_settings
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, MaxAttempts
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.kafka_log import CLIENT_ID, KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.snapshots import snapshot_topic_of
from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    MarshalError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.clients import check_reachable
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.inspection import KafkaInspector
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS

_WITHOUT_A_KAFKA: Final = ("no Kafka cluster is specified", "start Kafka there")
"""Texts in errors of connections for which a Kafka on this machine is a fix."""

app = command_group("Check what a deployment needs.")


@command(
    app,
    "doctor",
    "Check what a deployment needs. The command checks versions, Java, Spark's connector, the connection, this user's "
    "rights, the coordination topic and its log, and the data topics in that log. Each problem is shown with the "
    "reason why it matters and the command that fixes it. The exit code is 1 if there is a problem.",
    "doctor --bootstrap-servers localhost:9092",
)
def doctor(*, max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS, options: DataLogOptions) -> ExitCode:
    """Run all checks and show the findings. The exit code is 1 if there is a problem.

    Raises:
        ConfigurationError: The name of the coordination topic is invalid.
    """
    require_topic_name("--coordination-topic", options.coordination_topic)
    findings = [*check_machine(), *check_kafka(options, max_attempts)]
    wrong = any(finding.state is CheckState.PROBLEM for finding in findings)
    if options.as_json:
        output.write_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return ExitCode.PROBLEMS if wrong else ExitCode.OK


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """A cluster that answered, and the connection to it."""

    connection: KafkaConnection
    cluster: KafkaInspector

    @property
    def asker(self) -> acls.Principal:
        """The principal that `doctor` connects as, for commands that grant rights."""
        return acls.Principal(self.connection.bootstrap_servers, self.connection.username)


def check_kafka(options: DataLogOptions, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> Iterator[Finding]:
    """Check the connection, then the coordination topic, its log, and the data topics in the log."""
    yield from _misspelled_variables()
    try:
        connection = connection_of(options)
        data_connection = data_connection_of(options.data_connection, connection)
        check_reachable(connection, client_id="marshal-dagster-doctor")
    except (ConfigurationError, UnavailableError) as error:
        yield problem(
            "connection",
            str(error),
            "every claim, heartbeat and commit is a record in Kafka: without it no batch runs",
            _connection_fix(error),
        )
        yield not_checked("coordination topic", "there is no connection")
        return
    yield ok("connection", f"{connection.bootstrap_servers} answers ({connection.security_protocol})")
    with ExitStack() as stack:

        def opened(connection: KafkaConnection) -> CheckedCluster:
            # With the members' own client id, because quotas apply to it.
            return CheckedCluster(connection, stack.enter_context(KafkaInspector(connection, client_id=CLIENT_ID)))

        home = opened(connection)
        data = home if data_connection == connection else opened(data_connection)
        try:
            yield from check_deployment(options.coordination_topic, home, data, max_attempts)
        except MarshalError as error:
            yield failed("coordination topic", error)
        throttled_s = max(home.cluster.throttled_s, data.cluster.throttled_s)
        yield brokers.throttling(throttled_s, connection.bootstrap_servers)


def _misspelled_variables() -> Iterator[Finding]:
    for name, right in misspelled_variables(os.environ).items():
        yield warning(
            "variables",
            f"no setting of a connection is named {name}; did you mean {right}?",
            "a variable with an unknown name is ignored, because it may belong to another program",
            f"export {right}=...; unset {name}",
        )


def _connection_fix(error: MarshalError) -> str:
    if not any(text in str(error) for text in _WITHOUT_A_KAFKA):
        return "correct what is reported, then: marshal-dagster doctor"
    return (
        "marshal-dagster kafka up (a Kafka for this machine), or name yours: export MARSHAL_BOOTSTRAP_SERVERS=HOST:PORT"
    )


def check_deployment(
    topic: str, home: CheckedCluster, data: CheckedCluster, max_attempts: int = DEFAULT_MAX_ATTEMPTS
) -> Iterator[Finding]:
    """Check a coordination topic and what its members need. Report what this user may not see, and skip it.

    Raises `MarshalError`.
    """
    cluster, asker = home.cluster, home.asker
    try:
        topic_info = cluster.topic_info(topic)
    except AuthorizationError:
        yield acls.missing_describe(topic, asker, is_needed=True)
        return
    except TopicNotFoundError as error:
        yield missing_topic(error, topic)
        return
    alive = cluster.brokers()
    yield brokers.versions(alive, topic_info.topic_id)
    yield acls.of_coordination_topic(topic_info, asker)
    is_member = topic_info.rights is not None and Right.WRITE in topic_info.rights
    snapshot_topic = snapshot_topic_of(topic)
    try:
        yield acls.of_snapshot_topic(cluster.topic_info(snapshot_topic), asker, is_member=is_member)
    except AuthorizationError:
        yield acls.missing_describe(snapshot_topic, asker, is_needed=False)
    except MarshalError:
        pass  # a missing topic is reported with the snapshots
    try:
        settings = cluster.settings(topic)
    except MarshalError:
        settings = {}
    retention = Retention.of(settings)
    yield from check_topic_settings(cluster, topic, asker.servers)
    yield from check_snapshot_topic(cluster, topic, asker.servers, log_is_cut=retention != Retention())
    yield brokers.replicas(topic_info, int(settings.get("min.insync.replicas", "1")), asker.servers)
    if topic_info.rights is not None and Right.READ not in topic_info.rights:
        return
    timeout_s, snapshots = home.connection.timeout_s, kafka_snapshots(home.connection, topic)
    with closing(KafkaLog(home.connection, topic)) as log, closing(snapshots):
        read = read_log(log, topic, timeout_s=timeout_s, snapshots=snapshots)
        if isinstance(read, Finding):
            yield read
            return
        at_ms = SystemClock().wall_ms()
        yield from check_world(read.identity, read.world, at_ms, max_attempts)
        yield from check_go_consumers(read.world, alive, topic, at_ms)
        yield from check_senders(newest(log, timeout_s, at_ms), read.world, at_ms)
        yield from check_snapshots(log, snapshots, retention, at_ms)
    yield from check_data_topics(data.cluster, read.world, data.asker, at_ms, is_member=is_member)


_MARKS: Final[Mapping[CheckState, tuple[str, str]]] = {
    CheckState.OK: ("ok", "green"),
    CheckState.WARNING: ("warning", "yellow"),
    CheckState.PROBLEM: ("PROBLEM", "bold red"),
    CheckState.NOT_CHECKED: ("not checked", "dim"),
}


def _show(findings: list[Finding]) -> None:
    width = max(len(mark) for mark, _ in _MARKS.values())
    for finding in findings:
        mark, style = _MARKS[finding.state]
        marked = (f"{mark:<{width}}  ", style)
        output.show(output.Line((marked, (f"{finding.name}: ", "bold"), (finding.found, ""))))
        for label, text, label_style in (("why", finding.why, "dim"), ("fix", finding.fix, "")):
            if text:
                output.show(output.styled(f"{'':{width}}  {label}: {text}", label_style))
