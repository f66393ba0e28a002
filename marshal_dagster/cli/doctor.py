"""`doctor`: what a deployment needs, looked at one after the other; what is wrong, why it matters, what mends it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Final

from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of
from marshal_dagster.cli.doctor_checks import acls, brokers
from marshal_dagster.cli.doctor_checks.coordination_log import check_world, missing_topic, read_log
from marshal_dagster.cli.doctor_checks.data_topics import check_data_topics
from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.cli.doctor_checks.go_consumers import check_go_consumers
from marshal_dagster.cli.doctor_checks.machine import check_machine
from marshal_dagster.cli.doctor_checks.senders import check_senders, newest
from marshal_dagster.cli.doctor_checks.snapshots import Retention, check_snapshots, retention_of
from marshal_dagster.cli.doctor_checks.topic_settings import check_snapshot_topic, check_topic_settings
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions
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
from marshal_dagster.kafka.inspection import Broker, KafkaInspector, TopicInfo

app = command_group("Check what a deployment needs.")


@command(
    app,
    "doctor",
    "Check what a deployment needs. That is: versions, Java, Spark's connector, the connection, this user's rights, "
    "the coordination topic and its log, the data topics that it names. Each problem is shown with why it matters and "
    "the command that fixes it; the exit code is then 1.",
    "doctor --bootstrap-servers localhost:9092",
)
def doctor(options: DataLogOptions) -> ExitCode:
    """Check everything and show it; the exit code says whether something is wrong.

    Raises `ConfigurationError` when the command line itself is wrong.
    """
    check_topic("--coordination-topic", options.coordination_topic)
    findings = [*check_machine(), *check_kafka(options)]
    wrong = any(finding.state is CheckState.PROBLEM for finding in findings)
    if options.as_json:
        output.write_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return ExitCode.PROBLEMS if wrong else ExitCode.OK


def check_kafka(options: DataLogOptions) -> Iterator[Finding]:
    """Check the connection, then the coordination topic, what its log says, and the data topics that it names."""
    try:
        connection = connection_of(options)
        data_connection = data_connection_of(options.data_connection, connection)
        check_reachable(connection, client_id="marshal-dagster-doctor")
    except (ConfigurationError, UnavailableError) as error:
        yield Finding(
            "connection",
            CheckState.PROBLEM,
            str(error),
            "every claim, heartbeat and commit is a record in Kafka: without it no batch runs",
            _connection_fix(error),
        )
        yield Finding("coordination topic", CheckState.NOT_CHECKED, "there is no connection")
        return
    yield Finding(
        "connection", CheckState.OK, f"{connection.bootstrap_servers} answers ({connection.security_protocol})"
    )
    with ExitStack() as stack:
        # With the members' own client id: quotas go by it.
        home = CheckedCluster(connection, stack.enter_context(KafkaInspector(connection, client_id=CLIENT_ID)))
        data = home
        if data_connection != connection:
            data = CheckedCluster(
                data_connection, stack.enter_context(KafkaInspector(data_connection, client_id=CLIENT_ID))
            )
        try:
            yield from Deployment(options.coordination_topic, home, data).check()
        except MarshalError as error:
            yield Finding("coordination topic", CheckState.NOT_CHECKED, str(error))
        throttled_s = max(home.cluster.throttled_s, data.cluster.throttled_s)
        yield brokers.throttling(throttled_s, connection.bootstrap_servers)


def _connection_fix(error: MarshalError) -> str:
    if isinstance(error, UnavailableError) and "start Kafka" not in str(error):
        return "what is said, then: marshal-dagster doctor"
    return (
        "marshal-dagster kafka up (a Kafka for this machine), or name yours: export MARSHAL_BOOTSTRAP_SERVERS=HOST:PORT"
    )


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """A cluster that answers, and as whom it is asked."""

    connection: KafkaConnection
    cluster: KafkaInspector

    @property
    def asker(self) -> acls.Principal:
        """Who asks, for a command that grants a right."""
        return acls.Principal(self.connection.bootstrap_servers, self.connection.username)


class Deployment:
    """One coordination topic, with all that its members rest on."""

    def __init__(self, topic: str, home: CheckedCluster, data: CheckedCluster) -> None:
        """Say which it is, where it is, and where the data topics are."""
        self._topic = topic
        self._connection = home.connection
        self._cluster = home.cluster
        self._asker = home.asker
        self._data = data

    def check(self) -> Iterator[Finding]:
        """Check everything; what may not be seen is told, and the rest goes on. Raises `MarshalError`."""
        try:
            topic_info = self._cluster.topic_info(self._topic)
        except AuthorizationError:
            yield acls.missing_describe(self._topic, self._asker, is_needed=True)
            return
        except TopicNotFoundError as error:
            yield missing_topic(error, self._topic)
            return
        alive = self._cluster.brokers()
        yield brokers.versions(alive, topic_info.topic_id)
        yield acls.of_coordination_topic(topic_info, self._asker)
        yield from self._check_snapshot_rights(topic_info)
        yield from self._check_settings(topic_info)
        if topic_info.rights is None or Right.READ in topic_info.rights:
            yield from self._check_log(alive, is_member=_is_member(topic_info))

    def _check_snapshot_rights(self, beside: TopicInfo) -> Iterator[Finding]:
        topic = snapshot_topic_of(self._topic)
        try:
            topic_info = self._cluster.topic_info(topic)
        except AuthorizationError:
            yield acls.missing_describe(topic, self._asker, is_needed=False)
        except MarshalError:
            return  # that it is missing is told with the snapshots
        else:
            yield acls.of_snapshot_topic(topic_info, self._asker, is_member=_is_member(beside))

    def _check_log(self, alive: Collection[Broker], *, is_member: bool) -> Iterator[Finding]:
        snapshots = kafka_snapshots(self._connection, self._topic)
        with closing(KafkaLog(self._connection, self._topic)) as log, closing(snapshots):
            read = read_log(log, self._topic, timeout_s=self._connection.timeout_s, snapshots=snapshots)
            if isinstance(read, Finding):
                yield read
                return
            at_ms = SystemClock().wall_ms()
            yield from check_world(read.identity, read.world, at_ms)
            yield from check_go_consumers(read.world, alive, self._topic, at_ms)
            yield from check_senders(newest(log, self._connection.timeout_s, at_ms), read.world, at_ms)
            yield from check_snapshots(log, snapshots, retention_of(self._cluster, self._topic), at_ms)
        yield from check_data_topics(self._data.cluster, read.world, self._data.asker, at_ms, is_member=is_member)

    def _check_settings(self, topic_info: TopicInfo) -> Iterator[Finding]:
        servers = self._connection.bootstrap_servers
        yield from check_topic_settings(self._cluster, self._topic, servers)
        is_cut = retention_of(self._cluster, self._topic) != Retention()
        yield from check_snapshot_topic(self._cluster, self._topic, servers, log_is_cut=is_cut)
        try:
            least = int(self._cluster.settings(self._topic).get("min.insync.replicas", "1"))
        except MarshalError:
            least = 1
        yield brokers.replicas(topic_info, least, servers)


def _is_member(coordination_topic: TopicInfo) -> bool:
    """Tell whether who asks may claim."""
    return coordination_topic.rights is not None and Right.WRITE in coordination_topic.rights


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
        for label, words in (("why", finding.why), ("mend", finding.mend)):
            if words:
                output.show(output.styled(f"{'':{width}}  {label}: {words}", "" if label == "mend" else "dim"))
