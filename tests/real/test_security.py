"""Each role of docs/how-to/security.md on a real broker, with exactly the rights that the page's commands grant."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import KafkaError, Message, Producer
from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, decode_param

from marshal_dagster.batches.manifest import EXTRAS_KEY, MESSAGE_KEY
from marshal_dagster.coordination.topic_settings import create_coordination_topic, create_snapshot_topic
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.service import Coordinator
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.errors import AuthorizationError, MarshalError
from marshal_dagster.jobs.batch import build_reprocess_job
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.pipes import run_with_pipes
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import ClaimingPartition, coordination_partition, render
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from marshal_dagster.sinks import KafkaSink, PostgresSink, WriteResult
from marshal_dagster.sinks.conformance import LocalFrame
from marshal_dagster.sinks.conformance.target import never, part, rows_of
from marshal_dagster.sinks.kafka.sink import NOTES_SETTINGS
from tests.cli import Answer, call, start
from tests.conditions import WITHIN_S, wait_until
from tests.kafka_outputs import KafkaOutput, committed
from tests.pages import commands_of
from tests.real.canaries import has_executions, leaks
from tests.real.isolated_client import IsolatedClient
from tests.real.isolated_script import ROOT, IsolatedScript
from tests.real.secured_kafka import STORE_PASSWORD, Acl, SecuredKafka, secured_kafka

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "security.md"
CANARIES = Path(__file__).parent / "canary_location.py"
ROLES = ("reader", "member", "script", "writer", "operator", "coordinator", "maker")
PASSWORD = "of-the-role"
NOT_ALLOWED = 6
ACT: dict[str, tuple[str, ...]] = {
    "pause": ("pause", "shops", "--for", "1h"),
    "position reset": ("position", "reset", "shops", "orders", "--to-offset", "0=0", "--yes"),
    "revoke": ("revoke", "shops", "orders", "--instance", "nobody", "--yes"),
}


def fields(secured: SecuredKafka, role: str) -> dict[str, Any]:
    """Return the connection fields of `role`."""
    return {
        "bootstrap_servers": secured.servers["SASL_PLAINTEXT"],
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-256",
        "username": role,
        "password": PASSWORD,
        "timeout_s": 30,
    }


def connection_of(secured: SecuredKafka, role: str) -> KafkaConnection:
    """Return the connection of `role`."""
    return KafkaConnection.from_settings(fields(secured, role))


@dataclass(frozen=True, slots=True)
class Stand:
    """A broker whose users have the rights of their roles, and a command line that connects as one of them."""

    secured: SecuredKafka
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def call(self, role: str, *arguments: str) -> Answer:
        """Run a command line as `role`."""
        for name, value in fields(self.secured, role).items():
            self.monkeypatch.setenv(f"MARSHAL_{name.upper()}", str(value))
        return call(self.capsys, *arguments)

    def connection(self, role: str) -> KafkaConnection:
        """Return the connection of `role`."""
        return connection_of(self.secured, role)

    def config(self, role: str) -> KafkaConnectionConfig:
        """Return the connection of `role` as Dagster config."""
        self.monkeypatch.setenv("PASSWORD_OF_ROLE", PASSWORD)
        return KafkaConnectionConfig(**{**fields(self.secured, role), "password": dg.EnvVar("PASSWORD_OF_ROLE")})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A broker with the topics, three data messages, and a user for each role."""
    with secured_kafka(tmp_path_factory.mktemp("roles")) as secured:
        with Topics(KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])) as admin:
            admin.create("orders", 1, 1)
        writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
        for number in range(3):
            writer.produce("orders", str(number), partition=0)
        assert writer.flush(WITHIN_S) == 0
        for role in ROLES:
            secured.make_user(role, PASSWORD)
        secured.grant_all(acl for command in granted(PAGE.read_text()) for acl in acls(command))
        # A producer without WRITE on any topic is rejected at once, so the reader gets WRITE on another topic.
        secured.grant("reader", "WRITE", "TOPIC", "elsewhere")
        with Topics(connection_of(secured, "maker")) as maker:
            wait_until_allowed(lambda: create_coordination_topic(maker, "__marshal", 2))
            wait_until_allowed(lambda: create_snapshot_topic(maker, "__marshal"))
        yield secured


@pytest.fixture
def stand(secured: SecuredKafka, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stand:
    """The broker and its command line."""
    return Stand(secured, capsys, monkeypatch)


def granted(page: str) -> list[list[str]]:
    """Return the page's commands that grant rights, as lists of arguments."""
    return [shlex.split(command) for command in commands_of(page) if command.startswith("kafka-acls --add ")]


def acls(command: Sequence[str]) -> Iterator[Acl]:
    """Yield the rights that Kafka's tool would grant with this command."""
    assert command[:3] == ["kafka-acls", "--add", "--allow-principal"]
    user, given = command[3].removeprefix("User:"), command[4:]
    options = list(itertools.pairwise(given))
    operations = [value for option, value in options if option == "--operation"]
    kinds = {"--topic": "TOPIC", "--group": "GROUP", "--transactional-id": "TRANSACTIONAL_ID"}
    places = [(kinds[option], value) for option, value in options if option in kinds]
    pattern = dict(options).get("--resource-pattern-type", "literal").upper()
    places += [("BROKER", "kafka-cluster")] * ("--cluster" in given)
    for operation in operations:
        for kind, name in places:
            # Kafka's tool accepts READ of a topic and of a group in one command.
            right = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()
            yield Acl(user, right, kind, name, pattern)


def test_each_command_of_the_page_is_tried() -> None:
    """The commands are for exactly the roles that are tested."""
    users = {command[3] for command in granted(PAGE.read_text())}
    assert users == {f"User:{role}" for role in ROLES}


def test_a_reader_looks_at_everything_and_changes_nothing(stand: Stand) -> None:
    """Without WRITE a reader can use all commands that only read.

    All others name the missing right and the command, and write nothing.
    """
    member_works(stand)
    for looks in (
        ("status",),
        ("tail",),
        ("position", "get", "shops"),
        (*ACT["pause"], "--dry-run"),
        (*ACT["position reset"][:-1], "--dry-run"),
    ):
        assert stand.call("reader", *looks).code == 0
    assert "problem" not in {each["state"] for each in doctor(stand, "reader")}
    assert "nothing" in tick(stand, "reader")
    before = stand.call("reader", "tail", "--json").out
    for act in (*ACT.values(), ("resume", "shops"), ("recover", "--yes", "--json")):
        assert_write_missing(stand, stand.call("reader", *act))
    assert_write_missing_in_a_run(stand, "reader")
    assert refused(stand, "reader", "__marshal")
    assert stand.call("reader", "tail", "--json").out == before


def test_a_member_claims_and_commits_and_has_no_other_data(stand: Stand) -> None:
    """A member's run claims, commits, writes snapshots and Kafka's own offsets. Other topics are closed to it."""
    offset = member_works(stand)
    assert offset == 3
    with Topics(stand.connection("member")) as topics:
        assert topics.group_offsets("shops", "orders") == {0: 3}
        with pytest.raises(AuthorizationError, match="CREATE on topic 'more'"):
            topics.create("more", 1, 1)
        with pytest.raises(AuthorizationError, match="DELETE on topic '__marshal'"):
            topics.delete("__marshal")
    assert refused(stand, "member", "orders")


def test_a_writer_fills_a_topic_and_no_other(stand: Stand, secured: SecuredKafka) -> None:
    """With the page's rights a sink works.

    Each missing right is named, with its command, before anything is written.
    """
    wanted = [part(0, 0, 3)]
    with Topics(KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])) as admin:
        for name in ("orders-upper", "another"):
            assert admin.create(name, 1, 1)
        assert KafkaSink(stand.connection("maker"), "orders-upper").create_notes()
        assert admin.create("another_marshal_ranges", 1, 1, NOTES_SETTINGS)
        another = KafkaOutput(stand.connection("writer"), "another")
        said = ["DESCRIBE on topic 'another'", "WRITE on topic 'another'", "DESCRIBE on topic 'another_marshal_ranges'"]
        said += ["WRITE on topic 'another_marshal_ranges'", "WRITE on transactional ids that begin with 'marshal"]
        reported = ""
        for missing, granted_then in zip(said, ["DESCRIBE", "WRITE", "READ", "WRITE", None], strict=True):
            reported = wait_until_refused(lambda: another.sink().verdicts(wanted), missing)
            if granted_then is not None:
                secured.grant(
                    "writer", granted_then, "TOPIC", "another" if "another'" in missing else "another_marshal_ranges"
                )
        assert "--transactional-id marshal-dagster/another/ --resource-pattern-type prefixed" in reported
    output = KafkaOutput(stand.connection("writer"), "orders-upper")
    sink = output.sink()
    assert deliver_rows(sink, wanted).taken == tuple(wanted)
    assert refused(stand, "writer", "orders")


def deliver_rows(sink: KafkaSink, ranges: Sequence[ClaimedRange]) -> WriteResult:
    """Deliver rows as a batch does."""
    sink.verdicts(ranges)
    frame: Any = LocalFrame(["partition", "offset", "value"], tuple(rows_of("a", *ranges)))
    return sink.write(frame, ranges, never)


def wait_until_refused(question: Callable[[], object], said: str) -> str:
    """Repeat until the error names this right: brokers apply a new right after a moment."""
    answers: list[str] = []

    def answer() -> str | None:
        with pytest.raises(AuthorizationError) as raised:
            question()
        answers.append(str(raised.value))
        assert "\n" not in answers[-1]
        return answers[-1] if f"grant this user {said}" in answers[-1] else None

    return wait_until(answer, lambda: f"an error requests {said}, the last: {answers[-1]}")


def test_an_operator_acts_on_a_group_and_reads_no_data(stand: Stand) -> None:
    """Pause, position and resume need no right on the data, except to see its offsets."""
    member_works(stand)
    assert stand.call("operator", *ACT["pause"]).code == 0
    assert stand.call("operator", *ACT["position reset"]).code == 0
    assert stand.call("operator", "resume", "shops").code == 0
    nobody = stand.call("operator", *ACT["revoke"])
    assert (nobody.code, "nobody" in nobody.err) == (1, True)
    with (
        Topics(stand.connection("operator")) as topics,
        pytest.raises(AuthorizationError, match="READ on topic 'orders'"),
    ):
        topics.require(on_topic("orders", Right.READ))
    assert refused(stand, "operator", "orders")
    assert refused(stand, "operator", "__marshal_snapshot")


def test_a_coordinator_reports_members_and_has_no_data(stand: Stand) -> None:
    """With the page's rights a group is coordinated and inspected. No role can do the work of another."""
    made = wait_until_ok(lambda: stand.call("maker", "coordinator", "init", "--partitions", "2"))
    assert "__marshal_coordinator_orders" in made.out
    topics = CoordinatorTopics()
    with pytest.raises(AuthorizationError, match="on topic '__marshal_coordinator_leader'"):
        Coordinator(stand.connection("member"), topics).run()
    with pytest.raises(AuthorizationError, match="READ on topic '__marshal_coordinator'"):
        topics.check(stand.connection("member"), 2)
    topics.check(stand.connection("coordinator"), 2)
    coordinator = Coordinator(stand.connection("coordinator"), topics)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    try:
        as_member = stand.connection("member")
        with CoordinatedMember(
            as_member, "shops", "east", start=lambda _: None, stop=lambda _: None, topics_wanted=["orders"]
        ) as member:
            wait_until(lambda: member.places == {("orders", 0)}, "the member has the partition")
            assert stand.call("reader", "coordinator", "status").code == 0
            assert "east" in stand.call("reader", "coordinator", "assignments", "shops").out
    finally:
        coordinator.stop()
        thread.join(WITHIN_S)
    assert refused(stand, "member", topics.coordinator_messages)
    assert refused(stand, "reader", topics.member_messages)
    assert refused(stand, "coordinator", "orders")
    assert refused(stand, "coordinator", "__marshal")


def wait_until_ok(question: Callable[[], Answer]) -> Answer:
    """Repeat until the exit code is 0."""
    answers: list[Answer] = []

    def answer() -> Answer | None:
        answers.append(question())
        return None if answers[-1].code else answers[-1]

    return wait_until(answer, lambda: f"the command succeeds, not: {answers[-1].err}")


def test_who_makes_the_topics_cannot_use_them(stand: Stand) -> None:
    """`topic create` and `topic check` work, and nothing else does."""
    made = stand.call("maker", "topic", "create", "--name", "__marshal", "--partitions", "2", "--replication", "1")
    assert made.code == 0, made.err
    checked = stand.call("maker", "topic", "check")
    assert checked.code == 0, checked.err
    for command in (("status",), *ACT.values()):
        answer = stand.call("maker", *command)
        assert answer.code == NOT_ALLOWED
        assert "grant this user" in answer.error
    with pytest.raises(AuthorizationError, match="grant this user READ on topic '__marshal': kafka-acls"):
        tick(stand, "maker")
    assert refused(stand, "maker", "__marshal")


def test_junk_harms_nobody(stand: Stand) -> None:
    """Malformed, oversized and misplaced records are skipped and counted. Members still claim, commit and are paused.

    The same holds for tombstones, headers, and the traces of transactions: markers, aborted records and an open one.
    """
    member_works(stand)
    before = stand.call("reader", "status", "--json").json
    with junk(stand.secured) as sent:
        offsets = []
        for number in range(3, 6):
            write_order(stand.secured, number)
            offsets.append(member_works(stand))
        assert stand.call("operator", *ACT["pause"]).code == 0
        assert stand.call("operator", "resume", "shops").code == 0
    assert offsets == [4, 5, 6]
    after = stand.call("reader", "status", "--json").json
    assert after["invalid"] - before["invalid"] == sum(sent) > len(JUNK)
    assert list(after["groups"]) == ["shops"]
    assert [each["offset"] for each in after["groups"]["shops"]["partitions"]] == [6]
    assert "problem" not in {each["state"] for each in doctor(stand, "reader")}


JUNK: tuple[bytes | None, ...] = (
    None,
    b"",
    b"\xff\xfe",
    b"Heartbeat/1/1/i/c/shops/orders/0/" + b"9" * 2_000,
    b"Heartbeat/1/1/i/c/shops/orders/0/99/extra",
    b"ClaimingPartition/1/1/i/c/shops/orders/0\nHeartbeat/1/1/i/c/shops/orders/0/99",
    b"ReleaseGroup/1/1/i/c/shops/orders/0/9999999999",
    b"RevokingClaim/1/1/i/c/shops/orders/0/-1",
    b"GroupSettings/1/1/i/c/shops//0/0/native/at_least_once/-",
)
"""None of these is a valid message."""
LARGE = b"x" * 900_000
"""Junk that is sent in two rounds only: each later reader of the coordination topic has to read it."""


@contextmanager
def junk(secured: SecuredKafka) -> Iterator[list[int]]:
    """Send junk to each coordination partition during the block.

    Yield the number of records that each sender has sent.
    """
    home = coordination_partition("orders", 2)
    # This message would be valid in another partition.
    misplaced = render(
        ClaimingPartition(instance="i", client="c", group="elsewhere", topic="orders", partition=0, time_s=1)
    )
    sent, stop = [0], threading.Event()
    servers = {"bootstrap.servers": secured.servers["PLAINTEXT"], "log_level": 0}
    plain = Producer(servers)
    transactional = Producer({**servers, "transactional.id": "junk", "transaction.timeout.ms": 60_000})
    transactional.init_transactions(WITHIN_S)

    def send_to(producer: Producer, values: Sequence[bytes | None]) -> None:
        for value in values:
            for partition in (0, 1):
                producer.produce("__marshal", value, b"a key", partition, headers={"h": b"\xff" * 100})
        producer.produce("__marshal", misplaced, partition=1 - home)
        sent[0] += 2 * len(values) + 1
        producer.flush(WITHIN_S)

    def send() -> None:
        rounds = itertools.chain([(*JUNK, LARGE)] * 2, itertools.repeat(JUNK))
        ends = itertools.cycle((transactional.abort_transaction, transactional.commit_transaction))
        for values, end in zip(rounds, ends, strict=False):
            send_to(plain, values)
            transactional.begin_transaction()
            send_to(transactional, values)
            if stop.is_set():
                return  # leaves the transaction open
            end(WITHIN_S)
            stop.wait(0.1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join(WITHIN_S)


def write_order(secured: SecuredKafka, number: int) -> None:
    """Write one more data message."""
    writer = Producer({"bootstrap.servers": secured.servers["PLAINTEXT"]})
    writer.produce("orders", str(number), partition=0)
    assert writer.flush(WITHIN_S) == 0


def test_a_secret_is_found_nowhere(
    secured: SecuredKafka,
    postgres: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Secrets are neither in the files of a run that fails, nor in what other users see, nor on the command line.

    The folder has runs, events, run config, metadata and compute logs. It also has Spark's event log, the pages of
    Spark's UI, the functions of tasks that write to PostgreSQL and Kafka, and the arguments of all processes.
    """
    plain = KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])
    names = ("password", "key-password", "database", "client-secret", "of-an-option")
    canaries = {name: f"canary-{name}-{os.urandom(6).hex()}" for name in names}
    secured.make_user("canary", canaries["password"])
    secured.grant_all(
        acl
        for command in granted(PAGE.read_text())
        if command[3] == "User:member"
        for user in ("User:canary", "User:CN=client")
        for acl in acls([*command[:3], user, *("canaries" if word == "shops" else word for word in command[4:])])
    )
    outputs = dict.fromkeys(("canary", "CN=client"), "")
    for number, user in enumerate(outputs):
        outputs[user] = topic_for(secured, user, f"canaries-{number}")
    for user in ("canary-client", "CN=stored"):
        secured.grant(user, "READ", "TOPIC", "orders")
    secured.provider.client_secrets["canary-client"] = canaries["client-secret"]
    (tmp_path.parent / "canary-client-secret").write_text(canaries["client-secret"])
    secrets = {*canaries.values(), STORE_PASSWORD, secured.key.read_text().splitlines()[1]}
    environment = canary_environment(secured, canaries, tmp_path.parent / "canary-client-secret") | {
        "DAGSTER_HOME": str(tmp_path),
        "PYTHONPATH": str(PAGE.parents[1]),
        "TEST_FOLDER": str(tmp_path),
        "TEST_DSN": f"{postgres}&password={canaries['database']}",
        "TEST_GROUP": "canaries",
        "TEST_OUTPUTS": " ".join(outputs.values()),
    }

    PostgresSink(environment["TEST_DSN"], "canaries").create_tables()
    for number in range(2):
        write_order(secured, number)
    assert execute("works_then_fails", tmp_path, environment) != 0

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for requested in ("status --json", "doctor --json", "doctor", "tail --json", "--debug status"):
        answer = call(capfd, *requested.split())
        assert answer.code == 0, answer.err
        assert not [each for each in secrets if each in answer.out + answer.err], requested
    wrong = {**environment, "MARSHAL_SSL_CA_LOCATION": str(secured.certificate), "MARSHAL_TIMEOUT_S": "30"}
    answer = start("--debug", "status", environment=wrong)
    assert "certificate verify failed" in answer.err
    assert not [each for each in secrets if each in answer.out + answer.err]

    assert secured.provider.signatures
    secrets |= set(secured.provider.signatures)
    assert leaks(secrets, [tmp_path]) == []
    assert {"_CopyTask", "_RangeTask", "TaskSecret"} <= words_in(tmp_path / "functions")
    assert [len(committed(plain, topic)) for topic in outputs.values()] == [1, 1]
    assert {"spark.driver.memory", "KafkaRelation"} <= words_in(tmp_path / "pages")
    assert {"canary_location.py", "org.apache.spark.deploy.SparkSubmit"} <= words_in(tmp_path / "processes")
    assert {"ASSET_MATERIALIZATION", "STEP_FAILURE", "purpose"} <= words_in(tmp_path / "works_then_fails.log")
    assert has_executions(tmp_path)
    assert not [each for each in secrets if each in capfd.readouterr().err]


def topic_for(secured: SecuredKafka, user: str, topic: str) -> str:
    """Create a topic that this user may fill. Return its name."""
    admin = KafkaConnection(bootstrap_servers=secured.servers["PLAINTEXT"])
    with Topics(admin) as topics:
        assert topics.create(topic, 1, 1)
    assert KafkaSink(admin, topic).create_notes()
    secured.grant_all(
        acl
        for command in granted(PAGE.read_text())
        if command[3] == "User:writer"
        for acl in acls([*command[:3], f"User:{user}", *(word.replace("orders-upper", topic) for word in command[4:])])
    )
    return topic


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::dagster.PreviewWarning")  # of Pipes itself
def test_a_script_of_pipes_has_a_secret_of_its_own(stand: Stand, secured: SecuredKafka, tmp_path: Path) -> None:
    """A script logs in with a secret of its platform, and with the rights of its role.

    Neither its secret nor that of its run is in the batch's manifest and context, its messages, or Dagster's event log.
    """
    secret = f"canary-script-{os.urandom(6).hex()}"
    secured.make_user("script", secret)
    write_order(secured, 2)
    shared, home = tmp_path / "shared", tmp_path / "dagster"
    for folder in (shared / "steps", home):
        folder.mkdir(parents=True)
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "examples" / "sqlite_sink", scripts)
    script = Path(shutil.copy(ROOT / "tests" / "real" / "pipes_script.py", scripts))
    store = {
        "MARSHAL_SECURITY_PROTOCOL": "SASL_SSL",
        "MARSHAL_SASL_MECHANISM": "SCRAM-SHA-512",
        "MARSHAL_USERNAME": "script",
        "MARSHAL_SSL_CA_PEM": secured.authority.read_text(),
        "STEPS": str(shared / "steps"),
    }
    logs = {"": "without.log", secret: "with.log"}
    clients = {
        password: IsolatedClient(
            IsolatedScript(script, shared, secured.servers["SASL_SSL"], {**store, "MARSHAL_PASSWORD": password}, log)
        )
        for password, log in logs.items()
    }
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        assert not process_with(clients[""], stand, instance).success
        done = process_with(clients[secret], stand, instance)
        assert done.success
        events = [repr(entry) for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]
    assert "needs MARSHAL_PASSWORD" in (tmp_path / logs[""]).read_text()
    assert done.output_for_node("work") > 0
    context = json.dumps(decode_param(clients[secret].variables[DAGSTER_PIPES_CONTEXT_ENV_VAR]))
    messages = (tmp_path / logs[secret]).read_text()
    for text, control in ((context, EXTRAS_KEY), (messages, MESSAGE_KEY), ("\n".join(events), "username='script'")):
        assert control in text
        assert secret not in text
        assert PASSWORD not in text
    files = [file for folder in (home, shared) for file in folder.rglob("*") if file.is_file()]
    assert [file for file in files if secret.encode() in file.read_bytes()] == []


def process_with(client: IsolatedClient, stand: Stand, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    """Have a member's run claim all messages and process them with a script. The op returns the group's position."""

    @dg.op
    def work(context: dg.OpExecutionContext, claimer: ClaimerResource) -> int | None:
        with claimer.claimed_batch(context, topic="orders") as batch:
            run_with_pipes(context, batch, client)
        return claimer.group_keys()["orders", 0].offset

    @dg.job(executor_def=dg.in_process_executor)
    def working() -> None:
        work()

    claimer = ClaimerResource(connection=stand.config("member"), group="shops")
    return working.execute_in_process(instance=instance, resources={"claimer": claimer}, raise_on_error=False)


def words_in(file: Path) -> set[str]:
    """Return the set of identifiers in a file."""
    return set(re.findall(r"[A-Za-z_.]+", file.read_text(errors="replace")))


def canary_environment(secured: SecuredKafka, canaries: Mapping[str, str], client_secret: Path) -> dict[str, str]:
    """Return the variables of a connection with a password to the data, and of one with a key to the coordination log.

    More connections have a client's secret in a file, a key store, and a key as text.
    """
    connections = {
        "MARSHAL_DATA_": {
            "bootstrap_servers": secured.servers["SASL_SSL"],
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "username": "canary",
            "password": canaries["password"],
            "ssl_ca_location": str(secured.authority),
        },
        "MARSHAL_": {
            "bootstrap_servers": secured.servers["SSL"],
            "security_protocol": "SSL",
            "ssl_ca_location": str(secured.authority),
            "ssl_certificate_location": str(secured.certificate),
            "ssl_key_location": str(secured.key),
            "ssl_key_password": canaries["key-password"],
        },
    }
    trust = {"ssl_ca_location": str(secured.authority)}
    more: dict[str, dict[str, str]] = {
        "TOKENS_": {
            "bootstrap_servers": secured.servers["REAUTH"],
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "oauth_token_endpoint_url": secured.provider.url,
            "oauth_client_id": "canary-client",
            "oauth_client_secret_file": str(client_secret),
            "spark_source_options": '{"kafka.my.password": "env:TEST_OPTION"}',
            **trust,
        },
        "STORE_": {
            "bootstrap_servers": secured.servers["SSL"],
            "security_protocol": "SSL",
            "ssl_keystore_location": str(secured.store),
            "ssl_keystore_password": STORE_PASSWORD,
            **trust,
        },
        "TEXTS_": {
            "bootstrap_servers": secured.servers["SSL"],
            "security_protocol": "SSL",
            "ssl_certificate_pem": secured.certificate.read_text(),
            "ssl_key_pem": secured.key.read_text(),
            **trust,
        },
    }
    return {
        "TEST_PREFIXES": " ".join(more),
        "TEST_OPTION": canaries["of-an-option"],
        **{
            f"{prefix}{name.upper()}": value
            for prefix, fields in {**connections, **more}.items()
            for name, value in fields.items()
        },
    }


def execute(job: str, folder: Path, environment: Mapping[str, str]) -> int:
    """Execute a job of `canary_location` in its own run worker. Its output goes to a file."""
    with (folder / f"{job}.log").open("wb") as output:
        return subprocess.run(
            [sys.executable, "-m", "dagster", "job", "execute", "-f", CANARIES, "-j", job],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=WITHIN_S,
        ).returncode


def member_works(stand: Stand) -> int | None:
    """Have a member's run claim and commit all messages. Return the group's position."""
    result = run(stand, "member")
    assert result.success
    offset: int | None = result.output_for_node("work")
    return offset


def run(stand: Stand, role: str) -> dg.ExecuteInProcessResult:
    """Have a run claim as `role`, and end its batch without a Spark session."""

    @dg.op
    def work(context: dg.OpExecutionContext, claimer: ClaimerResource) -> int | None:
        with claimer.claimed_batch(context, topic="orders") as batch:
            if not batch.idle:
                batch.begin_processing()
        return claimer.group_keys()["orders", 0].offset

    @dg.job(executor_def=dg.in_process_executor)
    def working() -> None:
        work()

    claimer = ClaimerResource(connection=stand.config(role), group="shops")
    return working.execute_in_process(resources={"claimer": claimer}, raise_on_error=False)


def tick(stand: Stand, role: str) -> str:
    """Evaluate the sensor that only requests runs as `role`, and return why it requests none."""
    op = build_claimed_batch_op(lambda _context, _batch, _frame: None, name="count", topic="orders")
    sensor = build_stale_claim_sensor(build_reprocess_job(op), group="shops")
    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"rationalizer": RationalizerResource(connection=stand.config(role))}
        result = sensor(dg.build_sensor_context(instance=instance, resources=resources))
    assert isinstance(result, dg.SensorResult)
    return str(result.skip_reason)


def doctor(stand: Stand, role: str) -> list[dict[str, str]]:
    """Return the findings of `doctor` as `role`."""
    found: list[dict[str, str]] = stand.call(role, "doctor", "--json").json["findings"]
    return found


def assert_write_missing(stand: Stand, answer: Answer) -> None:
    """Check that the one line of the error names WRITE and the command that grants it."""
    assert answer.code == NOT_ALLOWED
    assert_names_write(stand, "reader", answer.error)


def assert_write_missing_in_a_run(stand: Stand, role: str) -> None:
    """Check that a run fails before it claims, with the same line."""
    result = run(stand, role)
    (event,) = [all_node_event for all_node_event in result.all_node_events if all_node_event.is_step_failure]
    error = event.step_failure_data.error
    assert error is not None
    cause = error.cause or error
    assert cause.cls_name == AuthorizationError.__name__
    assert_names_write(stand, role, cause.message)


def assert_names_write(stand: Stand, role: str, message: str) -> None:
    """Check that the message is one line with the right and a command."""
    servers = stand.secured.servers["SASL_PLAINTEXT"]
    assert f"grant this user WRITE on topic '__marshal': kafka-acls --bootstrap-server {servers} --add" in message
    assert f"--allow-principal User:{role} --operation Write --topic __marshal" in message
    assert "\n" not in message.strip()


def refused(stand: Stand, role: str, topic: str) -> bool:
    """Return whether the broker itself rejects a record of `role`."""
    codes: list[int | None] = []

    def note(error: KafkaError | None, _: Message) -> None:
        codes.append(None if error is None else error.code())

    writer = Producer(
        {**stand.connection(role).librdkafka(), "message.timeout.ms": round(WITHIN_S * 1_000), "log_level": 0}
    )
    writer.produce(topic, b"x", partition=0, on_delivery=note)
    assert writer.flush(WITHIN_S) == 0
    return codes == [KafkaError.TOPIC_AUTHORIZATION_FAILED]


def wait_until_allowed(action: Callable[[], object]) -> None:
    """Repeat until the action raises nothing: brokers apply a new right after a moment."""
    wait_until(lambda: (action(),), "the action is allowed", ignored=MarshalError)
