"""`doctor`: what a deployment needs, looked at one after the other; what is wrong, why it matters, what mends it."""

import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from marshal_dagster.cli import output, survey
from marshal_dagster.cli.connecting import check_topic, connection_of
from marshal_dagster.cli.exits import ExitCode
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.topic import with_servers
from marshal_dagster.coordination.admin import Severity, check_coordination_topic
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.log import Bounds, CoordinationLog, LogIdentity
from marshal_dagster.coordination.rationalizer import LOG_TIME_AHEAD_MS, Rationalizer
from marshal_dagster.coordination.snapshots import Head, Snapshots, snapshot_topic_of
from marshal_dagster.errors import ConfigurationError, MarshalError, TopicMissing, UnavailableError
from marshal_dagster.java import find_java
from marshal_dagster.kafka.clients import check_reachable
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.protocol.messages import MAX_VALUE_BYTES
from marshal_dagster.spark.connector import CONNECTOR, cache_folder, connector_jars

_PACKAGES: Final = ("marshal-dagster", "dagster", "dagster-pyspark", "pyspark", "confluent-kafka", "pydantic")
_SPARK_CORE: Final = re.compile(r"spark-core_(?P<scala>\d+\.\d+)-(?P<release>\d+\.\d+)(?P<rest>[^/]*)\.jar")
_CONNECTOR: Final = re.compile(r"[^:]+:spark-sql-kafka-0-10_(?P<scala>\d+\.\d+):(?P<release>\d+\.\d+)\..+")


class State(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found; where that is not right, why it matters and the command that mends it."""

    name: str
    state: State
    found: str
    why: str = ""
    mend: str = ""


def run(options: ConnectionOptions, coordination_topic: str, *, as_json: bool) -> ExitCode:
    """Check everything and show it; the exit code says whether something is wrong.

    Raises `ConfigurationError` when the command line itself is wrong.
    """
    check_topic("--coordination-topic", coordination_topic)
    findings = [*check_machine(), *check_kafka(options, coordination_topic)]
    wrong = any(finding.state is State.PROBLEM for finding in findings)
    if as_json:
        output.write_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return ExitCode.PROBLEMS if wrong else ExitCode.OK


def check_machine(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check what is installed here: packages, Java, Spark and its connector to Kafka."""
    yield _versions()
    yield _java(environ)
    yield _spark(environ)


def check_kafka(options: ConnectionOptions, topic: str) -> Iterator[Finding]:
    """Check the connection, then the coordination topic and what its log says."""
    try:
        connection = connection_of(options)
        check_reachable(connection, client_id="marshal-dagster-doctor")
    except (ConfigurationError, UnavailableError) as error:
        yield Finding(
            "connection",
            State.PROBLEM,
            str(error),
            "every claim, heartbeat and commit is a record in Kafka: without it no batch runs",
            "marshal-dagster kafka up (a Kafka for this machine), or name yours: "
            "export MARSHAL_BOOTSTRAP_SERVERS=HOST:PORT",
        )
        yield Finding("coordination topic", State.NOT_CHECKED, "there is no connection")
        return
    yield Finding("connection", State.OK, f"{connection.bootstrap_servers} answers ({connection.security_protocol})")
    snapshots = kafka_snapshots(connection, topic)
    with closing(KafkaLog(connection, topic)) as log, closing(snapshots):
        yield from check_log(log, topic, timeout_s=connection.timeout_s, snapshots=snapshots)
        yield from check_snapshots(log, snapshots, retention_of(connection, topic), SystemClock().wall_ms())
    yield from check_topic_settings(connection, topic)


def check_log(
    log: CoordinationLog,
    topic: str,
    *,
    timeout_s: float,
    clock: Clock | None = None,
    snapshots: Snapshots | None = None,
) -> Iterator[Finding]:
    """Check that the coordination topic is there, that its log is whole, its time right, and nothing half written."""
    try:
        rationalizer = Rationalizer(log, timeout_s=timeout_s, clock=clock, snapshots=snapshots)
    except TopicMissing as error:
        yield Finding(
            "coordination topic",
            State.PROBLEM,
            str(error),
            "it is the one authority on who holds what: nothing can be claimed",
            f"marshal-dagster topic create --name {topic}",
        )
        return
    except MarshalError as error:
        yield _unreadable(error)
        return
    try:
        world = rationalizer.catch_up()
    except MarshalError as error:
        yield _unreadable(error)
        return
    looked = survey.survey(world, at_ms=(clock or SystemClock()).wall_ms())
    yield _identity(rationalizer.identity)
    yield _certainty(looked, rationalizer.identity)
    yield _clocks(looked)
    yield _groups(looked)


def _unreadable(error: MarshalError) -> Finding:
    return Finding(
        "coordination topic",
        State.PROBLEM,
        str(error),
        "who cannot read the log knows of no claim and can make none",
        "mend what is said, then: marshal-dagster doctor",
    )


def _versions() -> Finding:
    found, missing = [f"Python {platform.python_version()}"], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Finding("versions", State.OK, ", ".join(found))
    return Finding(
        "versions",
        State.PROBLEM,
        f"not installed: {', '.join(missing)}",
        "marshal-dagster does not work without them",
        "pip install --upgrade marshal-dagster",
    )


def _java(environ: Mapping[str, str]) -> Finding:
    try:
        java = find_java(environ)
    except ConfigurationError as error:
        return Finding(
            "java",
            State.PROBLEM,
            str(error),
            "Spark, and a Kafka for this machine, run on Java 17 or newer",
            "apt-get install openjdk-17-jre-headless (or your system's way), or export JAVA_HOME=/path/to/java-17",
        )
    return Finding("java", State.OK, f"Java {java.version} at {java.executable}")


def _spark(environ: Mapping[str, str]) -> Finding:
    """Check by the names of Spark's jars: to import PySpark takes a second, to ask a session takes a JVM."""
    home = _spark_home(environ)
    core = next(filter(None, (_SPARK_CORE.fullmatch(path.name) for path in _jars(home))), None)
    connector = _CONNECTOR.fullmatch(CONNECTOR)
    if core is None or connector is None:
        return Finding(
            "spark",
            State.PROBLEM,
            f"no Spark in {home}" if home else "PySpark is not installed",
            "batches are read with Spark",
            "unset SPARK_HOME"
            if environ.get("SPARK_HOME")
            else f"pip install 'pyspark=={connector['release']}.*'"
            if connector
            else "pip install --upgrade marshal-dagster",
        )
    found = f"Spark {core['release']}{core['rest']} (Scala {core['scala']}) in {home}"
    if (core["scala"], core["release"]) != (connector["scala"], connector["release"]):
        return Finding(
            "spark",
            State.PROBLEM,
            f"{found}, but the connector is {CONNECTOR}",
            "a connector for another Spark or Scala fails when a batch is read, after it was claimed",
            "unset SPARK_HOME" if environ.get("SPARK_HOME") else f"pip install 'pyspark=={connector['release']}.*'",
        )
    return Finding("spark", State.OK, f"{found}; connector {CONNECTOR}, {_fetched(environ)}")


def _spark_home(environ: Mapping[str, str]) -> Path | None:
    """Give the Spark that PySpark would start: that of SPARK_HOME, else its own."""
    named = environ.get("SPARK_HOME")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("pyspark")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _jars(home: Path | None) -> list[Path]:
    return sorted((home / "jars").glob("spark-core_*.jar")) if home else []


def _fetched(environ: Mapping[str, str]) -> str:
    folder = cache_folder(environ)
    jars = connector_jars(folder=folder)
    if jars:
        return f"fetched to {jars[0].parent}"
    return f"to be fetched to {folder} by the first session"


def _identity(identity: LogIdentity) -> Finding:
    found = f"{identity.topic} has {identity.partitions} coordination partitions and the id {identity.topic_id}"
    return Finding("coordination topic", State.OK, found)


def _certainty(looked: survey.Survey, identity: LogIdentity) -> Finding:
    if not looked.observed:
        return Finding(
            "certain", State.OK, "the log is whole from offset 0, or from a snapshot, on: its world state is certain"
        )
    return Finding(
        "certain",
        State.PROBLEM,
        f"coordination partitions {survey.listed(looked.observed)} do not begin at offset 0 and no snapshot fits: they "
        "are only observed",
        "what was deleted may hold a pause, a plan or a live claim, so nothing can be claimed from them",
        "keep all records from now on: kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics "
        f"--entity-name {identity.topic} --add-config retention.ms=-1,retention.bytes=-1,cleanup.policy=delete; "
        "to claim again, stop all members and have them use a new one: marshal-dagster topic create --name NEW",
    )


def _clocks(looked: survey.Survey) -> Finding:
    log_time_ms, at_ms = looked.log_time_ms, looked.at_ms
    if log_time_ms is None or at_ms is None:
        return Finding("log time", State.OK, "the log has no record yet")
    ahead_ms = log_time_ms - at_ms
    if ahead_ms <= LOG_TIME_AHEAD_MS:
        where = f"{output.duration(ahead_ms)} {'behind' if ahead_ms <= 0 else 'ahead of'} this machine's clock"
        return Finding("log time", State.OK, f"{output.utc(log_time_ms)}, {where}")
    return Finding(
        "log time",
        State.PROBLEM,
        f"log time {output.utc(log_time_ms)} is {output.duration(ahead_ms)} ahead of this machine's clock",
        "a broker's clock has jumped, or this one is slow: owners may be taken for stale too early (fenced, they redo "
        "work) or too late",
        "on the brokers and here: timedatectl status (the clock must be synchronised)",
    )


def _groups(looked: survey.Survey) -> Finding:
    halves = [f"group {group.name}: {each}" for group in looked.groups for each in group.differences]
    if not halves:
        return Finding("groups", State.OK, f"{len(looked.groups)} named in the log; nothing is half written")
    return Finding(
        "groups",
        State.PROBLEM,
        "; ".join(halves),
        "its members go by different pauses or settings, depending on the topic",
        "marshal-dagster status (shows them); write the record again from where it was sent",
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """What the broker keeps of each coordination partition; None: all of it."""

    time_ms: int | None = None
    size_bytes: int | None = None


def retention_of(connection: KafkaConnection, topic: str) -> Retention:
    """Look up the coordination topic's retention; where it cannot be seen it counts as unlimited."""
    try:
        with Topics(connection, client_id="marshal-dagster-doctor") as topics:
            settings = topics.settings(topic)
    except MarshalError:
        return Retention()
    limits = (int(settings.get(name, "-1")) for name in ("retention.ms", "retention.bytes"))
    return Retention(*(None if limit < 0 else limit for limit in limits))


def check_snapshots(log: CoordinationLog, snapshots: Snapshots, retention: Retention, at_ms: int) -> Iterator[Finding]:
    """Check that there are snapshots, and that none of the newest is older than the log's start will soon be."""
    topic = None
    try:
        identity = log.identity()
        topic = identity.topic
        heads = snapshots.heads(identity)
        bounds = log.bounds(range(identity.partitions))
    except TopicMissing as error:
        if topic is not None:  # else it was told already
            yield Finding(
                "snapshots",
                State.WARNING,
                str(error),
                "each process reads the whole log, and should retention ever cut it, nothing can be claimed",
                f"marshal-dagster topic create --name {topic}",
            )
        return
    except MarshalError as error:
        yield Finding("snapshots", State.NOT_CHECKED, str(error))
        return
    yield _snapshots(heads, bounds, retention, at_ms, identity.topic)


def _snapshots(
    heads: Mapping[int, Head | None], bounds: Mapping[int, Bounds], retention: Retention, at_ms: int, topic: str
) -> Finding:
    overtaken = [number for number, at in bounds.items() if _is_soon_overtaken(heads[number], at, retention, at_ms)]
    if overtaken:
        return Finding(
            "snapshots",
            State.PROBLEM,
            f"coordination partitions {survey.listed(overtaken)} have no snapshot from which the log can still be "
            "read for long: its start is, or will soon be, behind the newest one",
            "then they can only be observed, and nothing can be claimed from them",
            f"let a run of any group end well (it writes {snapshot_topic_of(topic)}; its user needs WRITE on that), or "
            f"keep more: kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name "
            f"{topic} --add-config retention.ms=-1,retention.bytes=-1",
        )
    missing = [number for number, at in bounds.items() if at.end > 0 and heads[number] is None]
    if missing:
        return Finding(
            "snapshots",
            State.OK,
            f"none yet of coordination partitions {survey.listed(missing)}; the next run writes them at its end",
        )
    behind = [(bounds[number].end - head.offset, head) for number, head in heads.items() if head is not None]
    most = max((records for records, _ in behind), default=0)
    return Finding("snapshots", State.OK, f"at most {most} records lie behind the newest of a coordination partition")


_MOST_RECORD_BYTES: Final = MAX_VALUE_BYTES + 150
"""What a valid record takes in the log at most, with Kafka's own overhead."""


def _is_soon_overtaken(head: Head | None, at: Bounds, retention: Retention, at_ms: int) -> bool:
    """Tell whether a limited retention has, or will have in half its time or size again, deleted what comes next."""
    if retention == Retention() or at.end == 0:
        return False
    if head is None or not at.start <= head.offset <= at.end:
        return True
    if head.offset == at.end:
        return False
    is_old = retention.time_ms is not None and at_ms - (head.log_time_ms or 0) > retention.time_ms / 2
    records = at.end - at.start
    is_large = retention.size_bytes is not None and records * _MOST_RECORD_BYTES > retention.size_bytes / 2
    return is_old or (is_large and head.offset - at.start < records / 2)


def check_topic_settings(connection: KafkaConnection, topic: str) -> Iterator[Finding]:
    """Check the coordination topic's settings: under some the protocol does not hold."""
    try:
        with Topics(connection, client_id="marshal-dagster-doctor") as topics:
            problems = check_coordination_topic(topics, topic)
    except TopicMissing:
        return  # told already
    except MarshalError as error:
        yield Finding("topic settings", State.NOT_CHECKED, str(error))
        return
    for problem in problems:
        state = State.PROBLEM if problem.severity is Severity.DANGER else State.WARNING
        found = f"{problem.setting} of {topic} is {problem.found}, should be {problem.wanted}"
        mend = with_servers(problem, connection.bootstrap_servers).mend
        yield Finding("topic settings", state, found, problem.why, mend)
    if not problems:
        yield Finding("topic settings", State.OK, f"{topic} has the settings that the protocol needs")


_MARKS: Final[Mapping[State, tuple[str, str]]] = {
    State.OK: ("ok", "green"),
    State.WARNING: ("warning", "yellow"),
    State.PROBLEM: ("PROBLEM", "bold red"),
    State.NOT_CHECKED: ("not checked", "dim"),
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
